"""docs/deploy*.md are true: commands run in their order, and the table says what methods send."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from medfl import datasets
from medfl.bundle.bundle import shipped_root
from medfl.cli import verbs as cli
from medfl.core.errors import RunError
from medfl.methods import names
from medfl.policy.audit import verify
from medfl.policy.policy import Outbound, Policy
from medfl.policy.privacy import epsilon_of
from medfl.runtimes.monai_fl.client import MedflClientAlgo
from tests.partner.test_connection import Authority, serving, trusting
from tests.runtimes.test_monai_fl import broadcast, federation, said
from tests.support.toy import CLASSIFYING, ToyBundle

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "deploy.md").read_text()
OPERATOR, ENCRYPTION = (
    (DOCS / f"deploy-{reader}.md").read_text() for reader in ("operator", "encryption")
)
OTHERS = "## Join a federation over NVIDIA FLARE"
"""A section whose commands its own tests run."""
SMALL = ["--config=network=small_cnn", "--config=image_size=16"]
NOT_SENT = {
    "central": "never at a site",
    "fedhelp": "sites have different networks; sends weights alone",
}


def blocks(kind: str) -> list[str]:
    before, _, rest = PAGE.partition(OTHERS)
    own = before + rest[rest.index("\n## ") :]
    return re.findall(rf"^```{kind}\n(.*?)^```$", own, re.MULTILINE | re.DOTALL)


@pytest.fixture
def hospital(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with everything that the page names."""
    monkeypatch.chdir(tmp_path)
    root = shipped_root()
    assert root is not None
    shutil.copytree(root / "ham10000", tmp_path / "bundles" / "ham10000")
    datasets.write_phantom("ham10000", tmp_path / "data" / "ham10000", per_class=20, size=16)
    (rules,) = blocks("yaml")
    (tmp_path / "words.yaml").write_text(rules)
    for folder in ("policies", "state"):
        (tmp_path / folder).mkdir()
    authority = Authority()
    authority.kit(tmp_path / "server", "server1", "server")
    authority.kit(tmp_path / "kits" / "site-1" / "startup", "site-1")
    return tmp_path


@pytest.mark.slow
def test_the_commands_run_one_after_the_other(
    hospital: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = blocks("python")
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) == 11
    for line in commands:
        given = shlex.split(line)
        assert given[0] == "medfl"
        if given[2] in ("check", "stats") and "--collect" not in given:
            given += SMALL
        if "--collect" in given:
            shutil.copyfile("site-1.json", "site-2.json")
        if given[2] == "audit":
            if not Path("audit.jsonl").exists():
                _drive(program)
            given = [
                verify(Path("audit.jsonl")).last[:8] if word == "3f5a91c0" else word
                for word in given
            ]
        if "fl.example.org:8002" in given:
            with serving(trusting(hospital / "server")) as (host, port):
                given[given.index("fl.example.org:8002")] = f"{host}:{port}"
                assert cli.main(given[1:]) == 0, capsys.readouterr().err
        else:
            assert cli.main(given[1:]) == 0, capsys.readouterr().err
    assert Path("federation.png").is_file()
    said = capsys.readouterr().out.splitlines()
    assert "INTACT" in said
    assert said[-1] == "ACCEPTED"  # the policy for a version that has changed
    (account_of,) = Path("state").glob("data-*.privacy.json")
    account = json.loads(account_of.read_text())
    assert account["words"].startswith("1 reply: no formal privacy")


FLARE = {
    "medfl flare simulate": "flare/test_parity.py, by its runtime; planned in test_docs_commands.py",
    "medfl flare poc": "flare/test_parity.py, likewise",
    "pip install": "an installation",
    "python docs/examples/encrypted/run.py": "flare/test_encrypted.py",
    "python docs/examples/stock_flare/job.py": "flare/test_stock.py",
    "nvflare job submit": "needs a running server; flare/test_faults.py submits such jobs to one",
}
"""Commands of the FLARE section that are not run here, and where."""


def test_the_commands_of_server_and_site_run(
    hospital: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a startup kit that has no certificates, and whose FLARE client is a line of text."""
    pytest.importorskip("nvflare")
    datasets.write_phantom("pneumonia", hospital / "data" / "pneumonia", per_class=10, size=16)
    kit = hospital / "kits" / "north"
    for folder in ("startup", "local"):
        (kit / folder).mkdir(parents=True)
    (kit / "startup" / "fed_client.json").write_text("{}")
    (kit / "startup" / "sub_start.sh").write_text("echo FLARE has begun\n")
    listed = {"class_list_enforcement_mode": "enforce", "class_allow_list": []}
    (kit / "local" / "resources.json.default").write_text(json.dumps(listed))
    inspected = ["site", "inspect", "pneumonia", "--write-policy", "policies/pneumonia.yaml"]
    assert cli.main(inspected) == 0
    section = OPERATOR + ENCRYPTION + PAGE.partition(OTHERS)[2].partition("\n## ")[0]
    lines = "".join(
        re.findall(r"^```(?:sh)?\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    ).replace("\\\n", " ")
    run = [line for line in lines.splitlines() if not line.startswith(tuple(FLARE))]
    assert len(lines.splitlines()) - len(run) == len(FLARE)
    assert len(run) == 3
    for line in run:
        words = [
            str(hospital / word[1:]) if word.startswith("/") else word for word in shlex.split(line)
        ]
        assert cli.main(words[1:]) == 0, capfd.readouterr().err
    assert len(list(Path("jobs").glob("medfl-*/meta.json"))) == 1
    assert (kit / "local" / "medfl.yaml").is_file()
    assert "FLARE has begun" in capfd.readouterr().out


def _drive(program: str) -> None:
    """Be the host of the page's site for a round."""
    small = 'config={"network": "small_cnn", "image_size": 16}, requested={"batch_size": 32, "local_epochs": 1, '
    space: dict[str, Any] = {}
    exec(program.replace("requested={", small).replace("say=print", "say=str"), space)
    site = space["site"]
    site.initialize()
    site.get_weights()
    weights = {f"weights/{name}": tensor for name, tensor in site._view.networks.initial.items()}
    site.train(said(weights, 1))
    site.get_weights()


MEANT = {
    "weights": "weights",
    "entries of the network": "entries",
    "mean features": "prototypes",
    "how many images each class has |": "counts",
    "which classes there are": "owned",
    "number of steps": "scalars/effective_steps",
    "control variates": "control",
    "mean, covariance and number of each class's features": "statistics counts",
    "deviations": "rho",
    "the site's own": "personal",
    "the one that tells sites apart": "selector",
    "moments of the last one's optimiser": "mean square",
    "answers to public images": "scores",
    "low-rank factors": "adapters",
    "mean amplitudes": "amplitude",
}
"""Words of the table -> what they mean in a reply: names of its groups, of its class counts and of numbers."""


def test_the_table_of_what_leaves_is_true() -> None:
    """By what sites of a toy federation reply; noise covers weights and the number of images alone."""
    _, _, table = PAGE.partition("| what a reply has | methods | noise covers it |")
    rows = [line.split(" | ") for line in table.split("\n\n")[0].splitlines()[2:]]
    row_of = {name: row for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert row_of.keys() | NOT_SENT.keys() == set(names())
    for name in sorted(set(CLASSIFYING) - NOT_SENT.keys()):
        made = federation(name, bundle=ToyBundle(norm=False))
        site = MedflClientAlgo(made, "y", outbound=Outbound(clip=1.0, noise=1.0))
        site.initialize()
        site.get_weights()
        what, _, covered = row_of[name]
        if covered.strip(" |") == "refused":
            with pytest.raises(RunError, match="refuses: a reply without weights"):
                site.train(broadcast(made, "y"))

            continue

        site.train(broadcast(made, "y"))
        reply = site.get_weights().weights
        said = {
            part for words, parts in MEANT.items() if words in f"{what} |" for part in parts.split()
        }
        groups = {key if key.startswith("scalars/") else key.partition("/")[0] for key in reply}
        numbers = [tensor for key, tensor in reply.items() if key.endswith("/counts")]
        counted = {"counts" if tensor.max() > 1 else "owned" for tensor in numbers}
        assert said == (groups | counted) - {"scalars/samples"}, name
        uncovered = set(site.summary["privacy"]["uncovered"])
        assert (covered.strip(" |") in ("yes", "nothing leaves")) == (not uncovered), (
            name,
            uncovered,
        )


def test_every_rule_of_a_policy_has_its_line() -> None:
    for name in Outbound.__dataclass_fields__:
        assert f"`{name}`" in PAGE
    (rules,) = blocks("yaml")
    assert "clip" in rules


def test_the_figures_for_epsilon_are_right() -> None:
    """SIGMA = 10 C is a noise multiplier of 5."""
    pytest.importorskip("dp_accounting")
    told = re.search(r"one reply with SIGMA = 10 C: about ([\d.]+)", ENCRYPTION)
    assert told is not None
    assert float(told[1]) == pytest.approx(
        epsilon_of({Outbound(clip=1.0, noise=10.0).multiplier: 1}, 1e-5), abs=0.05
    )


def test_the_policy_of_the_page_is_one(hospital: Path) -> None:
    assert Policy.read(hospital / "words.yaml").outbound == Outbound(
        keys=("weights", "scalars/samples", "metrics"),
        max_bytes=100_000_000,
        clip=1.0,
        min_count=10,
    )
