"""Whatever stands in a file or a message from somebody else, a declared error is all that is raised, in bounded memory.

Recorded files of a small run are changed, by their structure and by their bytes. Expressions have a fuzz of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from medfl import methods
from medfl.bundle import text_embeddings
from medfl.cli.audit_log import text
from medfl.compare.checks import check_folder
from medfl.core.errors import MedflError
from medfl.core.message import Message
from medfl.core.message_limits import MessageLimits
from medfl.core.untrusted import Refused, read_json_bytes
from medfl.data.partition.rules import _by_file
from medfl.flare import wire
from medfl.flare.files import read_kit_file
from medfl.partner import heterogeneity
from medfl.partner.connection import _server_of
from medfl.policy import audit, privacy
from medfl.policy.policy import Policy
from medfl.problem.prompts import Text
from medfl.report import RunFiles
from medfl.runs import text_record
from medfl.runs.launch import _scored
from medfl.runs.result import load_run
from medfl.storage.files import load_state, load_weights, state_round, to_device
from medfl.storage.run_documents import read_run
from medfl.storage.run_folder import RunFolder
from medfl.storage.run_integrity import read_verified_run, verified_manifest
from tests.partner.test_heterogeneity import told as told_statistics
from tests.policy.test_expressions import EXPRESSIONS
from tests.runtimes.test_simulator import divided, simulate
from tests.support.mutations import json_files, line_files, opened, tensor_files, text_files
from tests.support.programs import python_path

ROOM = 512 * 2**20
"""Bytes of address space beyond what the process has: far less than any file here declares."""


class Recorded(NamedTuple):
    """The files of a run of two rounds that are changed, and a folder for the changed ones."""

    run: Path
    place: Path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    root = tmp_path_factory.mktemp("fuzz")
    simulate(root / "run", "scaffold", rounds=2, partition=divided(4), cohort=0.5)
    folder = RunFolder(root / "run")
    folder.add_to_run(
        {
            "task": "classification", "classes": ["p", "q", "r"], "key_metric": "balanced_accuracy", "command": "medfl",
            "site_class_counts": {"s0": [1, 2, 3]},
            "resumed": [{"round": 1, "versions": {"medfl": "0"}, "command": "x"}],
            "text": {"plm": "x", "sha256": "0" * 64, "shape": [3, 5, 12]}, "with_local": False,
            "public": {
                "bundle": "b", "bundle_sha256": "0" * 64, "config": {}, "section": "train", "items": 3,
                "ids_sha256": "0" * 64, "teachers": [["run:/a", "1"]],
                "data": {"source": "real", "folder": "/d", "checksum": "1", "split": "s", "counts": {}, "notes": ["n"]},
            },
        }
    )  # fmt: skip
    (root / "place").mkdir()
    return Recorded(root / "run", root / "place")


@pytest.fixture
def little_room() -> Iterator[None]:
    """Let this process have no more than `ROOM` bytes more; MemoryError is no declared error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


Decode = Callable[[Any], object]
Target = Callable[[Recorded], tuple[st.SearchStrategy[Any], Decode]]
"""Changed contents, and what reads them."""


def document(path: Path) -> Any:
    return json.loads(path.read_text())


def written(path: Path, decode: Callable[[Path], object]) -> Decode:
    """Return a reader of a content that lies in a file."""

    def read(data: bytes) -> None:
        path.write_bytes(data)
        decode(path)

    return read


def a_message(recorded: Recorded) -> tuple[st.SearchStrategy[bytes], Decode]:
    group = {"a": torch.zeros(2, 3), "b": torch.ones(4, dtype=torch.int64)}
    data = Message({"weights": group, "control": {"c": torch.zeros(())}}, {"samples": 3.0}).encode()

    def decode(data: bytes) -> None:
        message = Message.decode(data, sender="site 'a'")
        assert message.num_bytes >= 0

    return tensor_files(data), decode


def a_state(recorded: Recorded) -> tuple[st.SearchStrategy[bytes], Decode]:
    path = sorted((recorded.run / "state").glob("*-site-*"))[0]

    def decode(path: Path) -> None:
        assert state_round(path) >= 0
        to_device(load_state(path), torch.device("cpu"))

    return tensor_files(path.read_bytes()), written(recorded.place / path.name, decode)


def weights(recorded: Recorded) -> tuple[st.SearchStrategy[bytes], Decode]:
    return tensor_files((recorded.run / "best.safetensors").read_bytes()), written(
        recorded.place / "w", load_weights
    )


def a_record(recorded: Recorded) -> tuple[st.SearchStrategy[bytes], Decode]:
    def decode(path: Path) -> None:
        with suppress(MedflError):
            _shown(RunFiles(path.parent))
        run, _ = read_run(path)
        assert run.difference(run) == []
        with suppress(MedflError):
            read_verified_run(path)

    place = recorded.place / "record"
    place.mkdir(exist_ok=True)
    return json_files(document(recorded.run / "run.json")), written(place / "run.json", decode)


def a_manifest(recorded: Recorded) -> tuple[st.SearchStrategy[bytes], Decode]:
    """The run's own folder, in which all else is whole."""
    run = recorded.place / "run"
    shutil.copytree(recorded.run, run, dirs_exist_ok=True)
    path = run / "state" / "manifest.json"

    def decode(_: Path) -> None:
        folder = RunFolder(run)
        manifest = folder.manifest()
        if manifest is not None:
            folder.newest_state("s0")
            folder.best_path()
        verified_manifest(RunFolder(run))

    return json_files(document(path)), written(path, decode)


def _shown(run: RunFiles) -> None:
    """Ask what a report and a comparison ask."""
    assert run.progress() is not None
    assert run.pooled() is not None
    names = [run.title(name) for name in run.metric_names()]
    assert names
    for kind in ("received", "personal", "local"):
        run.site_values(kind, run.key)
    assert (
        run.finished,
        run.judged,
        run.site_names,
        run.partition,
        run.options,
        run.phantom,
        run.public,
    ) != ()
    assert run.predictions is None or len(run.predictions.ids) == len(run.predictions.sites)
    assert all(run.size(site, "train") >= 0 for site in run.site_names)


def _beside(name: str) -> Target:
    """Return the target of one file of a folder in which all else is whole."""

    def target(recorded: Recorded) -> tuple[st.SearchStrategy[bytes], Decode]:
        place = recorded.place / name.partition(".")[0]
        place.mkdir(exist_ok=True)
        for other in ("run.json", "rounds.jsonl", "summary.json", "sites.csv", "predictions.csv"):
            (place / other).write_bytes((recorded.run / other).read_bytes())
        source = (recorded.run / name).read_bytes()

        def decode(_: Path) -> None:
            RunFolder(place).rounds()
            _scored(place)
            with suppress(MedflError):
                load_run(place).subgroups("site", 1)
            _shown(RunFiles(place))

        if name.endswith(".jsonl"):
            changed: Any = line_files([json.loads(line) for line in source.splitlines()])
        elif name.endswith(".json"):
            changed = json_files(json.loads(source))
        else:
            words = (
                b",",
                b"\n",
                b'"',
                b"nan",
                b"inf",
                b"1e999",
                b"-1",
                b"9" * 5000,
                b"\x00",
                b"\xff",
                b",,,,,,,",
                b"x",
            )
            changed = text_files(source, words)
        return changed, written(place / name, decode)

    return target


def a_policy(recorded: Recorded) -> tuple[st.SearchStrategy[bytes], Decode]:
    text = b"""bundle: b
allow: [scripts, pickle]
limits: {nodes: 1000, depth: 7}
files:
  configs/train.json: "%s"
outbound: {keys: [weights, scalars/samples], max_bytes: 50000000, clip: 1.0, noise: 5.0, epsilon: 8, delta: 1.0e-5,
  min_count: 10}
""" % (b"0" * 64)
    words = (
        b"&a", b"*a", b"!!python/name:os.system", b"<<: *a", b"[", b"{", b"}", b"- ", b": ", b"\n", b"\t", b"1:1:1",
        b".nan", b".inf", b"-1", b"1e999", b"9" * 99, b"null", b"true", b"~", b"|", b">", b"? ", b"%YAML 1.1\n",
        b"---\n", b"[" * 200, b"&a [*a, *a]", "\u202e".encode(), b"2020-01-01", b"0x10", b"1_000", b'"\\ud800"', b"=",
        b"!!set", b"!!binary x",
    )  # fmt: skip
    return text_files(text, words), written(
        recorded.place / "policy.yaml", lambda path: Policy.read(path).text()
    )


def prompt_embeddings(recorded: Recorded) -> tuple[st.SearchStrategy[bytes], Decode]:
    values = torch.nn.functional.normalize(torch.rand(3, 2, 4) + 0.1, dim=2)
    text = Text(("p", "q", "r"), ("a {}", "the {}"))
    path = recorded.place / "e.safetensors"
    text_embeddings.Embeddings(values, "plm", "0" * 64, text).save(path)
    return tensor_files(path.read_bytes()), written(
        path, lambda path: text_embeddings.load(path, text)
    )


def carried_embeddings(recorded: Recorded) -> tuple[st.SearchStrategy[bytes], Decode]:
    carried = {"shape": [1, 2, 1], "float32": "AACAPwAAgD8="}
    return json_files(carried), written(recorded.place / text_record.JOB_FILE, text_record._read)


def statistics(recorded: Recorded) -> tuple[st.SearchStrategy[bytes], Decode]:
    path = told_statistics(
        recorded.place / "north.json", {"a": 60, "b": 40, "c": None}, 100, [[0.2, 0.8], [None, 0.5]]
    )
    other = told_statistics(
        recorded.place / "south.json", {"a": 6, "b": 4, "c": 9}, 50, [[0.2, 0.8], [0.5, 0.5]]
    )

    def decode(path: Path) -> None:
        for paths in ((path,), (other, path)):
            with suppress(MedflError):
                found = heterogeneity.read(paths)
                json.dumps(found.as_dict(), allow_nan=False)
                found.table()

    return json_files(document(path)), written(path, decode)


def an_account(recorded: Recorded) -> tuple[st.SearchStrategy[bytes], Decode]:
    account = {
        "noised": [{"multiplier": 1.5, "replies": 3}],
        "plain": 1,
        "uncovered": {"control": 2},
    }
    return json_files(account), written(recorded.place / "account.json", privacy._read)


def an_audit_log(recorded: Recorded) -> tuple[st.SearchStrategy[bytes], Decode]:
    entries = [
        {"time": "t", "site": "s", "round": 1, "direction": "out", "kind": "reply", "bytes": 3, "tensors": 1,
         "before": None, "sha256": "0", "groups": {"weights": {"norm": 1.0}}, "numbers": {"samples": 3.0},
         "privacy": "words"},
    ] * 2  # fmt: skip
    return line_files(entries), written(
        recorded.place / "log.jsonl", lambda path: text(audit.verify(path))
    )


def a_partition(recorded: Recorded) -> tuple[st.SearchStrategy[bytes], Decode]:
    text = b"id,site,section\nt0,north,train\nt1,south,train\nv0,north,\n"
    data = {"train": [{"id": "t0"}, {"id": "t1"}], "validate": [{"id": "v0"}], "test": []}
    words = (
        b",",
        b"\n",
        b'"',
        b"\t",
        b"\x00",
        b"\xff",
        b"..",
        b"/",
        b"9" * 200_000,
        b"\r",
        b"site",
        b"id",
        b"\xef\xbb\xbf",
    )
    return text_files(text, words), written(
        recorded.place / "p.csv", lambda path: _by_file(str(path), data)
    )


def a_grid(recorded: Recorded) -> tuple[st.SearchStrategy[bytes], Decode]:
    shared = {"bundle": "b", "options": {"mu": 1}, "config": {"a": [1]}, "requested": {"rounds": 3}}
    place = recorded.place / "grid"
    place.mkdir(exist_ok=True)
    return json_files(shared), written(
        place / "compare.json", lambda path: check_folder(shared, path.parent)
    )


_OPTIONS = [
    ["fedprox", {"mu": "0.1"}], ["ditto", {"lam": 1}], ["fedproto", {"bodies": "a,b"}],
    ["proxyfl", {"bodies": "x=1,2"}], ["fedavg", {"prototypes": "true"}], ["fedmd", {"public": "b:/d", "epochs": 1}],
]  # fmt: skip
_TYPED = (
    "[" * 3000, "&a [*a]", "2020-13-45", "1:" * 500 + "1", "!!set x", "<<: 1", "0b", "1e999", "{", "x=[", "=", "\0",
)  # fmt: skip


def options_of_methods(recorded: Recorded) -> tuple[st.SearchStrategy[bytes], Decode]:
    """As a record from elsewhere has them; a text is read as YAML."""

    def decode(data: bytes) -> None:
        told_options = read_json_bytes(data)
        for told in told_options if isinstance(told_options, list) else ():
            if isinstance(told, list) and len(told) == 2 and isinstance(told[0], str):
                with suppress(MedflError):
                    made = methods.load(told[0], told[1])
                    methods.site_networks(made, ["x", "y"])

    worded = [
        json.dumps([[name, dict.fromkeys(own, word)] for name, own in _OPTIONS]).encode()
        for word in _TYPED
    ]
    return json_files(_OPTIONS) | st.sampled_from(worded), decode


VALUES = st.sampled_from(
    (
        torch.zeros(2), torch.zeros(3, dtype=torch.complex64), torch.zeros(2, device="meta"),
        torch.zeros(2).to_sparse(), torch.tensor(1.0), torch.tensor(float("nan")), np.zeros(2), np.zeros(2, ">f4"),
        np.array(["x"]), np.array([None]), np.zeros(2, "c8"), np.float64(3), np.ones((1,) * 9), 3, True, None,
        "x", float("nan"), 10**400, [1], {"x": 1}, b"x",
    )
)  # fmt: skip


def an_answer(recorded: Recorded) -> tuple[st.SearchStrategy[Any], Decode]:
    """What FLARE or MONAI's client API has restored of a site's answer."""
    names = st.sampled_from(
        (
            "message/weights/a",
            "message/scalars/samples",
            "cases/test/label",
            "a",
            "",
            "/",
            3,
            "_" * 600,
        )
    )
    told = st.sampled_from((*wire.NUMBERS, wire.FAILED, "x", 3))
    answers = st.tuples(
        st.dictionaries(names, VALUES, max_size=4), st.dictionaries(told, VALUES, max_size=4),
        st.dictionaries(st.sampled_from(("accuracy", 3)), VALUES, max_size=2),
        st.sampled_from(("", "params", "meta", "metrics")), VALUES,
    )  # fmt: skip

    def decode(answer: Any) -> None:
        params, meta, metrics, other, value = answer
        model = SimpleNamespace(params=params, meta=meta, metrics=metrics)
        if other:
            setattr(model, other, value)
        with suppress(MedflError):
            payload = wire.from_model(model, "site 'a'")
            with suppress(MedflError):
                payload.whole_number(wire.ROUND)
            wire.read_cases(payload, {"test": ["i", "j"]}, "site 'a'")
        Message.from_wire(MessageLimits().checked(params, "site 'a'"), "site 'a'")

    return answers, decode


def a_startup_kit(recorded: Recorded) -> tuple[st.SearchStrategy[bytes], Decode]:
    kit = {
        "require_signed_jobs": True, "format_version": 2, "components": [{"id": "x", "path": "y", "args": {}}],
        "class_allow_list": ["a.B"], "permissions": {"lead": {"submit_job": "any"}, "member": "none"},
        "servers": [{"identity": "n", "service": {"target": "host:8002"}}],
    }  # fmt: skip

    def decode(path: Path) -> None:
        _server_of(path)
        read_kit_file(path)

    return json_files(kit), written(recorded.place / "fed_client.json", decode)


TARGETS: dict[str, tuple[Target, int]] = {
    "message": (a_message, 1500), "state": (a_state, 150), "weights": (weights, 600), "run.json": (a_record, 150),
    "manifest": (a_manifest, 150), "policy": (a_policy, 600), "rounds.jsonl": (_beside("rounds.jsonl"), 200),
    "summary.json": (_beside("summary.json"), 150), "sites.csv": (_beside("sites.csv"), 150),
    "predictions.csv": (_beside("predictions.csv"), 240), "embeddings": (prompt_embeddings, 900),
    "carried embeddings": (carried_embeddings, 750), "statistics": (statistics, 750), "account": (an_account, 450),
    "audit log": (an_audit_log, 450), "options": (options_of_methods, 300), "answer": (an_answer, 600),
    "startup kit": (a_startup_kit, 450), "partition": (a_partition, 750), "compare.json": (a_grid, 300),
}  # fmt: skip
"""What is read, and how many changed contents of it are tried where there is time; fewer where Atheris makes others."""


def tried(recorded: Recorded, target: Target, number: int) -> None:
    contents, decode = target(recorded)

    @settings(
        max_examples=number, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(contents)
    def test(data: bytes) -> None:
        try:
            decode(data)
        except (MedflError, Refused) as error:
            told = str(error)
        else:
            return
        assert "\n" not in told
        assert len(told) < 5000

    test()


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.usefixtures("little_room")
def test_a_few_changed_contents_of_each_kind(recorded: Recorded, name: str) -> None:
    tried(recorded, TARGETS[name][0], 30)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.usefixtures("little_room")
def test_many_changed_contents_of_each_kind(recorded: Recorded, name: str) -> None:
    tried(recorded, *TARGETS[name])


FOLLOWED = {
    "message": 4_200,
    "state": 3_000,
    "run.json": 1_000,
    "manifest": 1_500,
    "expression": 2_000,
}
"""How many inputs Atheris makes of each kind, by the branches that they reach."""


TENSORS = ("message", "state")
"""Kinds whose files are safetensors."""


def seeds(strategy: st.SearchStrategy[Any], folder: Path, tensors: bool) -> Path:
    """Write a few inputs that hypothesis makes, for Atheris to begin with."""
    folder.mkdir()

    @settings(
        max_examples=40, derandomize=True, database=None, deadline=None, phases=(Phase.generate,)
    )
    @given(strategy)
    def write(made: bytes | str) -> None:
        data = made.encode() if isinstance(made, str) else opened(made) if tensors else made
        (folder / hashlib.sha256(data).hexdigest()).write_bytes(data)

    write()
    return folder


@pytest.mark.slow
def test_inputs_that_follow_the_branches(recorded: Recorded, tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="Atheris has no build for this Python or machine")
    begun = {}
    for kind in FOLLOWED:
        strategy = EXPRESSIONS if kind == "expression" else TARGETS[kind][0](recorded)[0]
        begun[kind] = len(
            list(seeds(strategy, tmp_path / f"seeds-{kind}", kind in TENSORS).iterdir())
        )
    words = [
        str(recorded.run),
        str(tmp_path),
        *(f"{kind}={number}" for kind, number in FOLLOWED.items()),
    ]
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.coverage_fuzz", *words],
        capture_output=True, text=True, timeout=900, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    counts = re.findall(r"^(.+): (\d+) inputs, (\d+) declared wrong$", done.stdout, re.MULTILINE)
    assert {kind: int(tried) for kind, tried, _ in counts} == FOLLOWED
    assert all(
        0 < int(refused) < int(tried) for kind, tried, refused in counts if kind != "expression"
    )
    for (
        kind
    ) in FOLLOWED:  # inputs that reached what none before had reached are kept beside the seeds
        assert len(list((tmp_path / f"seeds-{kind}").iterdir())) > begun[kind]


def test_there_are_enough_of_them() -> None:
    assert sum(FOLLOWED.values()) + sum(number for _, number in TARGETS.values()) >= 20_000
