"""Sites with images of their own on NVIDIA FLARE: what is offered, what a site takes, what their server has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

pytest.importorskip("nvflare")

from medfl import datasets
from medfl.bundle.bundle import Bundle
from medfl.bundle.text_embeddings import Embeddings, unit
from medfl.core import portable
from medfl.core.errors import InputError
from medfl.core.run import Run, TextRecord, without_round_limit
from medfl.core.task import SECTIONS
from medfl.core.terminal import Print
from medfl.data.prepared import Batch, Prepared
from medfl.flare import offer as flare_offer, wire
from medfl.flare.files import read_run
from medfl.flare.parts import ALLOWED, SIMULATED
from medfl.flare.remote import ReportedRunFolder, mean_reported
from medfl.flare.server import FlareWorkers
from medfl.flare.site import FlareSite
from medfl.flare.site_config import SiteConfig, accepted_run, open_server, open_site
from medfl.runs import launch, text_record
from medfl.runtimes.federation import Federation
from medfl.runtimes.launch import Launch
from medfl.runtimes.monai_fl.client import MedflClientAlgo
from medfl.runtimes.registry import Execution
from medfl.runtimes.simulator import Simulator
from medfl.storage.files import load_state, load_weights
from medfl.storage.run_folder import RunFolder
from tests.flare.test_server import Near
from tests.support.sweeps import mostly_slow
from tests.support.toy import bits

CONFIG = {"network": "small_cnn", "image_size": 16}
SITES = ["north", "south"]


def offer(method: str = "fedavg", **changes: Any) -> Run:
    requested = {
        "method": method,
        "rounds": 2,
        "local_epochs": 1,
        "batch_size": 8,
        **changes.pop("requested", {}),
    }
    return flare_offer.offer(
        "mednist", SITES, config=CONFIG, requested=requested, rehearsal=True, **changes
    )


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each site's images, of different numbers."""
    place = tmp_path_factory.mktemp("scans")
    return {
        name: datasets.write_phantom("mednist", place / name, per_class=10 + 2 * i, size=16, seed=i)
        for i, name in enumerate(SITES)
    }


@pytest.fixture(scope="module")
def scaffold() -> Run:
    """A run that is offered as it may be; planning one takes a while."""
    return offer("scaffold")


def own(scans: dict[str, Path], name: str = "north", **changes: Any) -> SiteConfig:
    values = {
        "bundle": "mednist",
        "folder": "unused",
        "data": str(scans[name]),
        "permits": ("network", "image_size"),
    }
    return SiteConfig(**{**values, **changes})


# What is offered


def test_a_job_has_numbers_and_names_and_no_code(tmp_path: Path) -> None:
    asked = {"config": CONFIG, "requested": {"method": "scaffold", "rounds": 3}, "rehearsal": True}
    document = flare_offer.export(
        "mednist", SITES, tmp_path / "out", resume=True, min_replies=1, deadline=60.0, **asked
    )
    job = Path(document["job"])
    files = sorted(str(path.relative_to(job)) for path in job.rglob("*") if path.is_file())
    configuration = [
        f"app/config/{name}"
        for name in ("config_fed_client.json", "config_fed_server.json", "run.json")
    ]
    assert files == [*configuration, "meta.json"]
    server, client = (json.loads((job / name).read_text()) for name in (files[1], files[0]))
    assert server["workflows"][0]["path"] == ALLOWED[0]
    assert server["workflows"][0]["args"] == {"resume": True, "min_replies": 1, "deadline": 60.0}
    assert client["executors"][0]["executor"]["path"] == ALLOWED[1]
    assert not client["executors"][0]["executor"].get("args")
    assert json.loads((job / "meta.json").read_text())["min_clients"] == 1
    run = read_run(str(job / "app"))
    assert run.run_hash == document["run_hash"]
    assert run.partition.sites == {"north": {}, "south": {}}
    text = (job / "app" / "config" / "run.json").read_text()
    assert str(Path.home()) not in text
    assert "/" not in text.replace("mednist", "")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"requested": {"method": "central"}},
            "method 'central', which needs everybody's images in one place",
        ),
        ({"requested": {"method": "tests.nowhere"}}, "tests.nowhere"),
        ({"requested": {"rounds": 0}}, "--rounds 0"),
        ({"options": {"nonsense": "1"}}, "nonsense"),
        (
            {"method": "fedlora", "options": {"layers": "attn.qkv"}},
            "layers that fit are body.0, body.3, body.6; ",
        ),
        (
            {"method": "fedlora", "options": {"rank": 10}},
            "rank=10 for body.0.weight, which is 32 x 9; a rank is at most",
        ),
        (
            {"method": "fedlora", "options": {"ranks": "west=2"}},
            "there is no site 'west'; the sites are north, south; ",
        ),
        (
            {"method": "fedlora", "options": {"layers": "body.*"}},
            "option layers=body.*; numbers and plain names: sites",
        ),
        ({"method": "condistfl"}, "method 'condistfl' on bundle 'mednist', a classification task"),
        (
            {"requested": {"aggregation": "krum:1"}},
            "--aggregation krum:1 with 2 sites in a round; krum:1 needs at least",
        ),
    ],
)
def test_what_cannot_be_offered_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError) as caught:
        offer(**changes)
    assert text in str(caught.value)


def test_adapters_have_the_ranks_of_the_sites(scans: dict[str, Path]) -> None:
    """Planned for one site of another name, here and for a host of MONAI FL."""
    ranks = {"ranks": "north=1,south=2"}
    run = offer("fedlora", options=ranks)
    assert accepted_run(run, "south", own(scans, "south")).options["ranks"] == ranks["ranks"]
    asked = {"method": "fedlora", "data": str(scans["north"])}
    algo = launch.site_algo("mednist", "north", options=ranks, config=CONFIG, requested=asked)
    algo.initialize()
    assert algo._ready().method.rank_of("north") == 1


def test_an_init_file_of_another_network_is_not_offered(tmp_path: Path) -> None:
    save_file({"conv.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(
        InputError,
        match=r"weights of another network .*: 8 tensors are missing: 'body\.0\.weight', .* and 5 more; ",
    ):
        offer(requested={"init": str(tmp_path / "other.safetensors")})


def test_odd_names_of_sites_are_refused() -> None:
    for name in ("a b", "server", "../x"):
        with pytest.raises(InputError, match="letters, digits, - and _"):
            flare_offer.offer("mednist", [name], rehearsal=True)


# What a site takes


def test_a_site_takes_the_run_on_its_own_device(scans: dict[str, Path]) -> None:
    run = offer("scaffold")
    assert accepted_run(run, "north", own(scans, device="cpu")) == replace(run, device="cpu")


def changed(**values: Any) -> Callable[[Run], Run]:
    return lambda run: replace(run, **values)


REFUSED: dict[str, tuple[Callable[[Run], Run], str]] = {
    "dotted method": (changed(method="evil.module"), "method is evil.module"),
    "other bundle": (changed(bundle="pneumonia"), "it is for bundle 'pneumonia'"),
    "other version": (changed(bundle_sha256="0" * 64), "it is for bundle 'mednist' (000000000000)"),
    "component": (changed(config={"network": {"_target_": "os.system"}}), "config network="),
    "expression": (changed(config={"image_size": "$__import__('os')"}), "config image_size="),
    "reference": (changed(config={"network": "@x"}), "config network=@x"),
    "other id": (changed(config={"dataset_dir": "elsewhere"}), "config dataset_dir=elsewhere"),
    "path": (changed(options={"server_lr": "/etc/passwd"}), "option server_lr=/etc/passwd"),
    "way up": (changed(options={"server_lr": "a..b"}), "option server_lr=a..b"),
    "nested": (changed(options={"server_lr": {"a": 1}}), "options.server_lr is"),
    "rounds": (changed(rounds="3"), "rounds is 3"),
    "negative": (changed(local_epochs=-1), "local_epochs is -1"),
    "huge": (changed(batch_size=10**9), "batch_size is 1000000000"),
    "cohort": (changed(cohort=2.0), "cohort is 2.0"),
    "threads": (changed(threads=64), "it asks for 64 threads; at most 8"),
    "pooled data": (changed(method="central", options={}), "method central needs everybody's images in one place"),
    "unlabelled elsewhere": (changed(method="fedsemi", options={}, unlabelled="west"), "--unlabelled west; "),
    "unlabelled oddly": (changed(method="fedsemi", options={}, unlabelled="north;south"), "--unlabelled north; "),
    "no labels at all": (changed(method="fedsemi", options={}, unlabelled="north,south"), "no site has labels"),
    "method with labels": (changed(unlabelled="south"), "which is without labels"),
    "text that steers": (changed(site_channels="north=\x1b[2J\u202e"), "site_channels"),
    "public data": (changed(method="fedmd", options={}), "method fedmd needs public data"),
    "bundle of a path": (changed(bundle="../../x"), "bundle '../../x'"),
    "long name": (changed(bundle="x" * 65), "names of letters, digits"),
    "language model of a path": (changed(options={"plm": "a,b"}), "option plm 'a,b'"),
    "text of a path": (changed(text=TextRecord("../x", "0" * 64, (1, 1, 1))), "language model '../x'"),
    "place of the bundle": (changed(bundle_path="/root"), "it says where images lie"),
    "place of the data": (lambda run: replace(run, data=replace(run.data, folder="/root")), "it says where images lie"),
    "split": (lambda run: replace(run, data=replace(run.data, split="../x")), "it says where images lie"),
    "partition": (lambda run: replace(run, partition=replace(run.partition, spec="file:/x")), "it says where images"),
    "version": (changed(versions={"medfl": "<b>"}), "it says where images lie"),
    "site": (
        lambda run: replace(run, partition=replace(run.partition, sites={"north": {}, "../x": {}})), "odd names",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_run_that_asks_for_more_is_refused_by_the_site(
    scaffold: Run, scans: dict[str, Path], what: str
) -> None:
    change, text = REFUSED[what]
    with pytest.raises(InputError, match="^site 'north' refuses the run: ") as caught:
        accepted_run(change(scaffold), "north", own(scans))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("what", [what for what in REFUSED if what != "other id"])
def test_a_run_that_asks_for_more_is_refused_by_the_server(
    scaffold: Run, tmp_path: Path, what: str
) -> None:
    """What permits nothing takes plain values of any id, so that the sites decide; never an expression or a path."""
    change, text = REFUSED[what]
    with pytest.raises(InputError, match="^the server refuses the run: ") as caught:
        open_server(change(scaffold), SiteConfig("mednist", str(tmp_path)))
    assert text in str(caught.value)


def test_a_jobs_expression_does_not_run_at_the_server(tmp_path: Path) -> None:
    """Nor does a name in it become a folder: the run is refused before it has one."""
    mark = tmp_path / "mark"
    code = f"$__import__('pathlib').Path({str(mark)!r}).touch() or 'small_cnn'"
    for change in (
        changed(config={"network": code}),
        changed(config={"network": [code]}),
        changed(bundle="../../x"),
    ):
        with pytest.raises(InputError, match="the server refuses the run"):
            open_server(change(offer()), SiteConfig("mednist", str(tmp_path)))
    assert not mark.exists()


@pytest.mark.parametrize("device", ["krum", "meta", "cuda:99999999999", "cpu:0"])
def test_a_device_that_trains_nothing_is_refused_at_the_server(device: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the server refuses the run: device"):
        open_server(replace(offer(), device=device), SiteConfig("mednist", str(tmp_path)))


def test_items_and_other_sites_are_refused(scans: dict[str, Path]) -> None:
    run = offer()
    items = replace(run, partition=replace(run.partition, sites={"north": {"train": ["a"]}}))
    with pytest.raises(
        InputError, match="site 'north' refuses the run: partition.sites.north.train is"
    ):
        accepted_run(items, "north", own(scans))
    with pytest.raises(InputError, match="site 'east' refuses the run: it is not one of its sites"):
        accepted_run(run, "east", own(scans))


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("methods: [fedavg, ditto]", "method scaffold; fedavg, ditto, as its policy says"),
        ("settings: {rounds: 1}", "rounds 2; at most 1"),
        ("settings: {rounds: 2, batch_size: 7}", "batch_size 8; at most 7"),
        ("settings: {local_epochs: 1}", ""),
        ("methods: [scaffold]", ""),
        ("", ""),
    ],
)
def test_a_job_that_the_policy_does_not_agree_to_is_refused(
    scans: dict[str, Path], tmp_path: Path, policy: str, text: str
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(policy)
    config = own(scans, policy=str(file))
    if not text:
        accepted_run(offer("scaffold"), "north", config)
        return
    with pytest.raises(InputError) as caught:
        accepted_run(offer("scaffold"), "north", config)
    assert str(caught.value).startswith(f"site 'north' refuses the run: {text}")


def test_a_job_with_a_site_that_is_not_in_the_servers_roster_is_refused(tmp_path: Path) -> None:
    accepted_run(
        offer(),
        None,
        SiteConfig("mednist", str(tmp_path), roster={"north": 9, "south": 9, "west": 9}),
    )
    with pytest.raises(
        InputError, match="the server refuses the run: its site 'south' is not in the roster"
    ):
        open_server(offer(), SiteConfig("mednist", str(tmp_path), roster={"north": 9}))


@pytest.mark.parametrize("name", ["north", None])
def test_a_portable_run_is_refused_in_a_process_that_was_not_begun_for_one(
    scans: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    """By a site and by the server, which tells its operator what the site lacks."""
    run, begun = offer(requested={"portable": True}), dict[str, str]()
    monkeypatch.setattr(portable, "_begun", False)
    monkeypatch.setattr(portable, "_require_processor", lambda: None)
    monkeypatch.setattr(portable, "_at_the_start", lambda: begun)
    text = "^portable numbers in a process that was started without the variables for them; .*ONEDNN_MAX_CPU_ISA='AVX2'"
    with pytest.raises(InputError, match=text) as caught:
        accepted_run(run, name, own(scans))
    assert caught.value.safe_to_send
    assert "\n" not in str(caught.value)
    begun.update(portable.ENVIRONMENT)
    assert accepted_run(run, name, own(scans)).portable


def test_nothing_of_the_bundle_may_be_set_unless_the_site_permits_it(
    scans: dict[str, Path],
) -> None:
    with pytest.raises(InputError, match="config network=small_cnn; the bundle as it is"):
        accepted_run(offer(), "north", own(scans, permits=()))


def test_phantoms_are_not_taken_for_images_nor_images_for_phantoms(scans: dict[str, Path]) -> None:
    run = replace(offer(), data=replace(offer().data, source="real"))
    with pytest.raises(
        InputError, match="site 'north' has phantom images; the run is one with real ones"
    ):
        open_site(run, "north", own(scans))


# The site's file


def test_a_site_s_file_is_read_with_paths_from_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "medfl.yaml"
    path.write_text("bundle: mednist\ndata: images\nfolder: /var/medfl\npermits: [network]\n")
    found = SiteConfig.read(path)
    assert found == SiteConfig(
        "mednist", "/var/medfl", str(tmp_path / "images"), permits=("network",)
    )
    path.write_text("bundle: own/bundle\nfolder: states\n")
    assert SiteConfig.read(path).bundle == str(tmp_path / "own" / "bundle")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("bundle: x\n", "the keys bundle and folder"),
        ("bundle: x\nfolder: y\nmethod: z\n", "the keys bundle and folder"),
        ("[1, 2]", "the keys bundle and folder"),
        ("bundle: x\nfolder: 3\n", "folder; a str"),
        ("bundle: x\nfolder: y\npermits: network\n", "permits; a list"),
        ("bundle: x\nfolder: y\nthreads: true\n", "threads; a int"),
        ("bundle: x\nfolder: y\nroster: [north]\n", "roster; a dict"),
        ("bundle: x\nfolder: y\nroster: {north: 0}\n", "roster: north; sites with whole numbers"),
        ("bundle: x\nfolder: y\nroster: {../x: 3}\n", "roster: ../x; sites with whole numbers"),
        (
            "bundle: x\nfolder: y\nlabels: []\n",
            "labels; names of the bundle's structures, or auto; as labels: [NAME",
        ),
        ("bundle: x\nfolder: y\nlabels: {liver: 1}\n", "labels; a list"),
        (
            "bundle: x\nfolder: y\nchannels: ['T1;south=T2']\n",
            "channels; names of the bundle's channels; as channels:",
        ),
        ("bundle: !!python/object/apply:os.system [ls]\nfolder: y\n", "plain YAML"),
    ],
)
def test_a_site_s_file_that_says_something_else_is_refused(
    tmp_path: Path, text: str, what: str
) -> None:
    path = tmp_path / "medfl.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        SiteConfig.read(path)
    assert what in str(caught.value)


def test_a_bundle_that_is_not_the_pinned_one_is_refused(
    scans: dict[str, Path], tmp_path: Path
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        yaml.safe_dump({"bundle": "mednist", "files": {"configs/train.yaml": "0" * 64}})
    )
    with pytest.raises(InputError, match="'mednist' is refused"):
        open_site(offer(), "north", own(scans, policy=str(policy)))


# A run


class Apart(Near):
    """Sites that each know their own images only."""

    def __init__(
        self,
        run: Run,
        scans: dict[str, Path],
        place: Path,
        config: Callable[..., SiteConfig],
        say: Print,
    ) -> None:
        self.asked: list[tuple[str, list[str]]] = []
        self.dropped: list[int] = []
        self.gone: dict[str, str] = {}
        self.ended = False
        self._change = lambda site, word, payload: payload
        self.sites = {
            name: FlareSite(
                MedflClientAlgo(
                    lambda name=name: open_site(run, name, config(scans, name), say=say),
                    name,
                    folder=place / name,
                ),
                name,
                rounds=run.rounds,
            )
            for name in SITES
        }


def executed(
    out: Path,
    run: Run,
    scans: dict[str, Path],
    server: SiteConfig | None = None,
    config: Callable[..., SiteConfig] = own,
    say: Print = str,
) -> tuple[ReportedRunFolder, Apart]:
    federation = open_server(run, server or SiteConfig("mednist", str(out)))
    RunFolder.create(out)
    folder, link = (
        ReportedRunFolder(out),
        Apart(run, scans, out.parent / f"{out.name}-states", config, say),
    )
    folder.write_run(run, {})

    def workers(made: Federation, _: int) -> FlareWorkers:
        flare_workers = FlareWorkers(made, link, simulated=False, say=say)
        folder.follow(flare_workers)
        return flare_workers

    Simulator(Execution(federation, folder, Launch(resume=True)), workers).execute()
    return folder, link


@pytest.fixture(scope="module")
def images(scans: dict[str, Path]) -> dict[str, int]:
    return {name: len(datasets.datalist("mednist", path, "train")) for name, path in scans.items()}


def test_a_server_without_images_has_what_the_sites_tell(
    scans: dict[str, Path], images: dict[str, int], tmp_path: Path
) -> None:
    folder, link = executed(tmp_path / "run", offer(), scans)
    entries = folder.rounds()
    assert [sorted(entry["sites"]) for entry in entries] == [SITES, SITES]
    for entry in entries:
        assert {name: site["samples"] for name, site in entry["sites"].items()} == images
        total = sum(images.values())
        losses = [entry["sites"][name]["train_loss"] * images[name] / total for name in SITES]
        assert entry["train_loss"] == pytest.approx(sum(losses))
        told = [site["told"] for site in entry["sites"].values()]
        cases = [t["validate/cases"] for t in told]
        mean = sum(t["validate/accuracy"] * n for t, n in zip(told, cases, strict=True)) / sum(
            cases
        )
        assert entry["told"]["validate/accuracy"] == pytest.approx(mean)
        assert (entry["val"], entry["val_global"]) == ({}, None)
    summary = json.loads((folder.path / "summary.json").read_text())
    assert summary["told"]["validate/cases"] == sum(cases)
    assert (summary["data_source"], summary["last"], summary["best"]) == ("phantom", None, None)
    assert {word for word, _ in link.asked} == {"introduce", "train"}
    rows = (folder.path / "sites.csv").read_text().splitlines()
    assert rows[0].startswith("site,train,told_validate/cases,")
    assert not (folder.path / "predictions.csv").exists()
    assert load_weights(folder.path / "weights.safetensors").keys() == set(
        Bundle("mednist", CONFIG).network().state_dict()
    )


@pytest.mark.parametrize("method", ["fedbm", "ditto", "pfedpm"])
def test_methods_of_all_kinds_run_without_the_server_having_images(
    scans: dict[str, Path], tmp_path: Path, method: str
) -> None:
    options = {"g_iterations": 2, "g_batch": 4, "synthetic_batch": 2} if method == "fedbm" else {}
    folder, link = executed(tmp_path / "run", offer(method, options=options), scans)
    summary = json.loads((folder.path / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["told"]["validate/cases"] > 0
    assert {word for word, _ in link.asked} <= {"introduce", "train", "judge"}
    if summary["judged"] == "personal":
        assert summary["told"]["test/cases"] > 0


@pytest.mark.slow
def test_a_server_with_images_of_its_own_scores_the_global_model_on_them(
    scans: dict[str, Path], tmp_path: Path
) -> None:
    held = datasets.write_phantom("mednist", tmp_path / "held", per_class=10, size=16, seed=7)
    folder, _ = executed(
        tmp_path / "run", offer(), scans, SiteConfig("mednist", str(tmp_path), str(held))
    )
    summary = json.loads((folder.path / "summary.json").read_text())
    assert set(summary["last"]) > {"round", "balanced_accuracy"}
    assert summary["best"]["round"] in (1, 2)
    without, _ = executed(tmp_path / "without", offer(), scans)
    assert bits(load_weights(folder.path / "weights.safetensors")) == bits(
        load_weights(without.path / "weights.safetensors")
    )


class Joined(Prepared):
    """The images of several folders, one after the other."""

    def __init__(self, parts: Mapping[str, Prepared]) -> None:
        super().__init__(
            [
                {**item, "id": f"{name}/{item['id']}"}
                for name, part in parts.items()
                for item in part.items
            ]
        )
        self.parts = parts

    def batches(
        self, indices: Tensor, size: int, generator: torch.Generator | None
    ) -> Iterator[Batch]:
        start = 0
        for part in self.parts.values():
            here = indices[(indices >= start) & (indices < start + len(part))] - start
            if len(here):
                yield from part.batches(here, size, generator)
            start += len(part)


def together(
    run: Run, scans: dict[str, Path], config: Callable[..., SiteConfig] = own
) -> Federation:
    """The same sites in one place: the images of all folders, each of them its site's."""
    apart = {name: open_site(run, name, config(scans, name)) for name in SITES}
    prepared: dict[str, Prepared] = {}
    sites: dict[str, dict[str, list[str]]] = {name: {} for name in SITES}
    for section in SECTIONS:
        prepared[section] = Joined({name: made.sections[section] for name, made in apart.items()})
        for name in SITES:
            sites[name][section] = [
                i["id"] for i in prepared[section].items if i["id"].startswith(f"{name}/")
            ]
    partition = replace(run.partition, sites=sites)
    return Federation(
        apart["north"].bundle,
        apart["north"].method,
        replace(run, partition=partition),
        prepared=prepared,
    )


@pytest.mark.parametrize("method", mostly_slow(["fedavg", "scaffold", "ditto"], ["ditto"]))
def test_law1_a_federation_of_own_folders_gives_the_simulator_s_bits(
    scans: dict[str, Path], tmp_path: Path, method: str
) -> None:
    run = offer(method, requested={"rounds": 3})
    far, _ = executed(tmp_path / "apart", run, scans)
    made = together(run, scans)
    near = RunFolder.create(tmp_path / "together")
    near.write_run(made.run, {})
    Simulator(Execution(made, near)).execute()
    assert [(e["bytes_up"], e["bytes_down"]) for e in far.rounds()] == [
        (e["bytes_up"], e["bytes_down"]) for e in near.rounds()
    ]
    for mine, other in zip(far.rounds(), near.rounds(), strict=True):
        for name in SITES:
            assert {k: mine["sites"][name][k] for k in ("train_loss", "steps")} == {
                k: other["sites"][name][k] for k in ("train_loss", "steps")
            }
    servers = [
        load_state(next((folder.path / "state").glob("*3-server.safetensors")))
        for folder in (far, near)
    ]
    assert bits(servers[0]) == bits(servers[1])
    states = [
        [
            load_state(next(tmp_path.glob(f"apart-states/{name}/*/{name}/000003.safetensors")))
            for name in SITES
        ],
        [load_state(state.path) if (state := near.newest_state(name)) else {} for name in SITES],
    ]
    assert bits(states[0]) == bits(states[1])
    assert bool(states[0][0]) == (method != "fedavg")


def test_a_site_s_reply_is_that_of_a_site_of_a_host_of_monai_fl(
    scans: dict[str, Path], tmp_path: Path
) -> None:
    """`launch.site_algo` gives the same site: seeds depend on the run's seed, the round and the name alone."""
    run = offer("scaffold")
    federation = open_server(run, SiteConfig("mednist", str(tmp_path)))
    with federation.scope():
        server = federation.method.init_server(federation.host(0), federation.networks.initial, {})
        message = federation.method.broadcast(federation.host(1), server, "north")
        down = wire.message_payload(
            message, wire.question_numbers(1), wire.state_rounds({"north": 0})
        )
    requested = {
        "method": "scaffold",
        "data": str(scans["north"]),
        "rounds": 2,
        "local_epochs": 1,
        "batch_size": 8,
    }
    hosted = launch.site_algo("mednist", "north", config=CONFIG, requested=requested)
    sites = [MedflClientAlgo(lambda: open_site(run, "north", own(scans)), "north"), hosted]
    answers = [FlareSite(algo, "north").answer(wire.TRAIN, down) for algo in sites]
    assert [answer.failure_reason for answer in answers] == ["", ""]
    assert bits(answers[0].tensors) == bits(answers[1].tensors)


def test_means_of_what_was_told_are_weighted_by_cases() -> None:
    told = {
        "a": {"validate/cases": 1, "validate/dice": 0.0, "test/dice": 0.3, "test/cases": 3},
        "b": {"validate/cases": 3, "validate/dice": 1.0},
    }
    assert mean_reported(told) == {
        "validate/cases": 4,
        "validate/dice": 0.75,
        "test/dice": 0.3,
        "test/cases": 3,
    }


def test_a_run_is_found_again_whatever_its_rounds() -> None:
    shorter, longer = offer(requested={"rounds": 2}), offer(requested={"rounds": 5})
    assert without_round_limit(shorter).run_hash == without_round_limit(longer).run_hash
    assert without_round_limit(shorter).run_hash != without_round_limit(offer("fedper")).run_hash


def test_what_takes_folders_from_a_job_is_on_no_site_s_list() -> None:
    assert not set(ALLOWED) & set(SIMULATED)


# Text embeddings


def test_a_job_carries_the_text_embeddings(scans: dict[str, Path], tmp_path: Path) -> None:
    """A site has neither the language model nor the file that they came from; those of another run are refused."""
    values = unit(torch.randn(6, 24, 16, generator=torch.Generator().manual_seed(0)))
    file = tmp_path / "e.safetensors"
    Embeddings(values, "drawn", "0" * 64, Bundle("mednist").text).save(file)
    asked = {
        "config": CONFIG,
        "requested": {"method": "fedcb", "rounds": 1},
        "options": {"plm": str(file)},
    }
    made = flare_offer.export("mednist", SITES, tmp_path / "job", rehearsal=True, **asked)
    file.unlink()
    configs = sorted((tmp_path / "job").rglob(text_record.JOB_FILE))
    assert configs
    assert all(path.parent.name == "config" for path in configs)
    run, folder = read_run(str(configs[0].parent.parent)), configs[0].parent
    assert (run.options["plm"], run.run_hash) == ("drawn", made["run_hash"])
    for federation in (
        open_site(run, "north", own(scans), folder),
        open_server(run, own(scans), folder),
    ):
        assert text_record.fingerprint(federation.task.embeddings("drawn")) == run.text.sha256
    with pytest.raises(InputError, match="language model 'drawn'"):
        open_site(run, "north", own(scans))
    configs[0].write_text(configs[0].read_text().replace("A", "B"))
    with pytest.raises(InputError, match=r"(the run used those of 'drawn'|is damaged)"):
        open_site(run, "north", own(scans), folder)
