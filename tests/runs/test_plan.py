"""From a request to a run: what comes from whom, and what is refused."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from medfl import datasets
from medfl.bundle.bundle import shipped_root
from medfl.bundle.open import bundle_of
from medfl.core.errors import InputError
from medfl.problem.tasks import KINDS
from medfl.runs import plan as planning
from medfl.runs.plan import Request, make_plan, repeat, request_of

CONFIG = {"network": "small_cnn"}


@pytest.fixture(scope="module")
def chest(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("chest") / "data"
    return str(datasets.write_phantom("pneumonia", folder, per_class=20, size=28))


@pytest.fixture(scope="module")
def skin(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("skin") / "data"
    return str(datasets.write_phantom("ham10000", folder, per_class=20, size=16))


@pytest.fixture
def other_bundle(tmp_path: Path) -> str:
    """A bundle that is not ours: a copy without a protocol, which names its own data."""
    root = shipped_root()
    assert root is not None
    folder = Path(shutil.copytree(root / "pneumonia", tmp_path / "theirs"))
    (folder / "configs" / "federated.yaml").unlink()
    return str(folder)


def test_what_is_not_asked_for_comes_from_the_protocol(skin: str) -> None:
    run = make_plan(
        Request("ham10000", "fedprox", config=CONFIG, data=skin, partition="iid", sites=2)
    ).run
    assert run.options == {"mu": 0.001}  # of the protocol; the method's own default is 0.01
    assert (run.cohort, run.rounds, run.local_epochs, run.batch_size, run.lr, run.lr_decay) == (
        0.5,
        200,
        1,
        8,
        0.01,
        0.99,
    )
    assert run.data.split == "lesion"


def test_what_is_asked_for_wins(skin: str) -> None:
    request = Request(
        "ham10000", "fedprox", {"mu": "0.5"}, {**CONFIG, "split": "dermamnist", "image_size": "24"}, skin, 3, "iid",
        cohort=1.0, rounds=2, local_epochs=3, batch_size=4, lr=0.5, lr_decay=0.9,
    )  # fmt: skip
    run = make_plan(request).run
    assert run.options == {"mu": 0.5}
    assert (run.cohort, run.rounds, run.local_epochs, run.batch_size, run.lr) == (1.0, 2, 3, 4, 0.5)
    assert run.lr_decay == request_of(run).lr_decay == 0.9
    assert run.data.split == "dermamnist"
    assert run.config == {**CONFIG, "split": "dermamnist", "image_size": 24}
    assert [*run.partition.sites] == ["site-1", "site-2", "site-3"]


def test_a_bundle_without_a_protocol_gets_plain_defaults(chest: str, other_bundle: str) -> None:
    made = make_plan(Request(other_bundle, config={**CONFIG, "dataset_dir": chest}))
    run = made.run
    assert (run.method, run.partition.spec, len(run.partition.sites)) == ("fedavg", "iid", 4)
    assert (run.cohort, run.rounds, run.local_epochs, run.lr, run.lr_decay) == (
        1.0,
        10,
        1,
        None,
        1.0,
    )
    assert run.batch_size == 16  # of its data loader
    assert (run.data.source, run.data.split) == ("phantom", "bundle"), (
        "its folder is a drawn cohort"
    )
    assert not [note for note in made.notes if "names no test data" in note]


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (
            "patience: soon",
            "patience 'soon' in the bundle's federated.yaml; a whole number of at least 0",
        ),
        (
            "rounds: [3]",
            r"rounds '\[3\]' in the bundle's federated.yaml; a whole number of at least 0",
        ),
        ("decay_per: batch", "--decay-per batch; round, epoch or poly; choose one"),
        ("site_weights: 3", "--site-weights 3; samples or uniform; choose one"),
        ("cohort: 2", "--cohort 2; a number above 0 and at most 1"),
    ],
)
def test_a_protocol_of_another_form_is_refused_in_one_line(
    chest: str, other_bundle: str, said: str, text: str
) -> None:
    (Path(other_bundle) / "configs" / "federated.yaml").write_text(said + "\n")
    with pytest.raises(InputError, match=text):
        make_plan(Request(other_bundle, "fedavg", data=chest))


def test_a_protocol_has_the_settings_of_the_schedule(chest: str, other_bundle: str) -> None:
    said = "decay_per: epoch\nsite_weights: uniform\nkeep_optimizer: true\npatience: 4\nlr: 1\n"
    (Path(other_bundle) / "configs" / "federated.yaml").write_text(said)
    run = make_plan(Request(other_bundle, "fedavg", data=chest)).run
    assert (run.decay_per, run.site_weights, run.keep_optimizer, run.patience) == (
        "epoch",
        "uniform",
        True,
        4,
    )
    assert isinstance(run.lr, float)
    asked = make_plan(
        Request(other_bundle, "fedavg", data=chest, lr=1, decay_per="round", patience=0)
    ).run
    assert (asked.decay_per, asked.patience, asked.site_weights) == ("round", 0, "uniform")
    assert isinstance(asked.lr, float)


def test_data_of_a_bundle_that_is_not_ours(chest: str, other_bundle: str) -> None:
    given = make_plan(Request(other_bundle, config=CONFIG, data=chest)).run
    assert given.data.folder == chest
    assert given.config == CONFIG
    assert (
        given.data.checksum
        == make_plan(
            Request(other_bundle, config={**CONFIG, "dataset_dir": chest})
        ).run.data.checksum
    )
    with pytest.raises(InputError, match="--data phantom; phantoms exist for the shipped bundles"):
        make_plan(Request(other_bundle, data="phantom"))


def test_a_bundle_without_test_data_says_so(chest: str, other_bundle: str) -> None:
    (Path(other_bundle) / "configs" / "evaluate.yaml").unlink()
    notes = make_plan(Request(other_bundle, config=CONFIG, data=chest)).notes
    assert sum("names no test data" in note for note in notes) == 1


def test_centres_and_files_bring_their_own_number_of_sites(skin: str, tmp_path: Path) -> None:
    run = make_plan(Request("ham10000", config=CONFIG, data=skin, partition="centre")).run
    assert sorted(run.partition.sites) == [
        "rosendahl",
        "vidir_modern",
        "vidir_molemax",
        "vienna_dias",
    ]
    table = tmp_path / "three.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("id", "site"))
        for index, item in enumerate(datasets.datalist("ham10000", skin, "train")):
            writer.writerow((item["id"], "abc"[index % 3]))
    assert [
        *make_plan(
            Request("ham10000", config=CONFIG, data=skin, partition=f"file:{table}")
        ).run.partition.sites
    ] == [*"abc"]


def test_real_data_below_medfl_data_are_found(
    chest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path(shutil.copytree(chest, tmp_path / "all" / "pneumoniamnist"))
    (real / "PHANTOM.json").unlink()
    monkeypatch.setenv("MEDFL_DATA", str(tmp_path / "all"))
    said: list[str] = []
    record = make_plan(
        Request("pneumonia", config=CONFIG, sites=2, partition="iid"), said.append
    ).run.data
    assert (record.source, record.folder, said) == ("real", str(real), [])


@pytest.mark.parametrize("given", [True, False])
def test_the_phantom_is_drawn_once_and_is_said(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEDFL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    drawn: list[str] = []

    def write(name: str, folder: Path) -> Path:
        drawn.append(name)
        return real(name, folder, per_class=20, size=28)

    real = datasets.write_phantom
    monkeypatch.setattr(datasets, "write_phantom", write)
    said: list[str] = []
    for _ in range(2):
        request = Request(
            "pneumonia", config=CONFIG, data="phantom" if given else None, sites=2, partition="iid"
        )
        assert make_plan(request, said.append).run.data.source == "phantom"
    assert drawn == ["pneumonia"]
    assert said == [] if given else all("NO REAL DATA for pneumonia" in line for line in said)


@pytest.mark.parametrize(
    "key", ["dataset_dir", "batch_size", "learning_rate", "max_epochs", "device"]
)
def test_ids_that_a_run_sets_itself_are_refused(chest: str, key: str) -> None:
    with pytest.raises(InputError, match=f"--config {key}=1; a federated run sets this id by --"):
        make_plan(Request("pneumonia", config={key: 1}, data=chest))


def test_an_expression_in_config_stays_text(chest: str) -> None:
    run = make_plan(
        Request("pneumonia", config={**CONFIG, "image_size": "$7 * 4"}, data=chest, sites=2)
    ).run
    assert run.config["image_size"] == "$7 * 4"


def test_how_messages_are_made_smaller_is_looked_at_before_the_images_and_has_one_spelling() -> (
    None
):
    with pytest.raises(InputError, match="--messages topk:2; a fraction above 0 and at most 0.5"):
        make_plan(Request("pneumonia", data="/nowhere", messages="topk:2"))


@pytest.mark.parametrize(
    ("given", "recorded"), [("topk:1e-2", "topk:0.01"), ("lossless", "lossless")]
)
def test_how_messages_are_made_smaller_is_recorded(chest: str, given: str, recorded: str) -> None:
    run = make_plan(
        Request("pneumonia", config=CONFIG, data=chest, sites=2, partition="iid", messages=given)
    ).run
    plain = make_plan(Request("pneumonia", config=CONFIG, data=chest, sites=2, partition="iid")).run
    assert run.messages == recorded
    assert (run.run_hash == plain.run_hash) == (recorded == "lossless")
    assert make_plan(request_of(_reloaded(run))).run == run
    assert repeat(_reloaded(run)).run.run_hash == run.run_hash


# Repeating


def _reloaded(run: planning.Run) -> planning.Run:
    return planning.Run.from_dict(json.loads(json.dumps(run.to_dict())))


def test_a_run_read_back_is_planned_alike(skin: str) -> None:
    made = make_plan(
        Request(
            "ham10000", "scaffold", config=CONFIG, data=skin, partition="dirichlet:0.5", sites=3
        )
    )
    back = repeat(_reloaded(made.run))
    assert back.run.run_hash == made.run.run_hash
    assert back.partition == made.partition
    assert back.method == made.method
    assert back.extra("x") == made.extra("x")


def test_a_run_of_a_bundle_that_is_not_ours_is_planned_alike(chest: str, other_bundle: str) -> None:
    made = make_plan(Request(other_bundle, config=CONFIG, data=chest, sites=2))
    assert bundle_of(made.run) == other_bundle
    assert repeat(_reloaded(made.run)).run.run_hash == made.run.run_hash


def test_a_bundle_that_is_not_ours_may_have_the_name_of_ours(chest: str, other_bundle: str) -> None:
    namesake = str(Path(other_bundle).rename(Path(other_bundle).parent / "mednist"))
    made = make_plan(Request(namesake, config=CONFIG, data=chest, sites=2))
    assert made.run.bundle == "mednist"
    assert bundle_of(made.run) == namesake
    assert repeat(_reloaded(made.run)).run.run_hash == made.run.run_hash


def test_a_bundle_that_has_changed_is_refused(chest: str, other_bundle: str) -> None:
    run = make_plan(Request(other_bundle, config=CONFIG, data=chest, sites=2)).run
    train = Path(other_bundle) / "configs" / "train.yaml"
    train.write_text(train.read_text() + "extra: 1\n")
    with pytest.raises(
        InputError, match=r"bundle 'theirs' has changed since the run: .*; the recorded one is"
    ):
        repeat(run)


def test_other_data_are_refused(chest: str, tmp_path: Path) -> None:
    run = make_plan(Request("pneumonia", config=CONFIG, data=chest, sites=2)).run
    other = datasets.write_phantom("pneumonia", tmp_path / "other", per_class=20, size=28, seed=1)
    with pytest.raises(InputError, match="the run used phantom data with checksum"):
        repeat(run, str(other))
    moved = shutil.copytree(chest, tmp_path / "moved")
    assert repeat(run, str(moved)).run.run_hash == run.run_hash


def test_again_keeps_what_is_not_asked_for(skin: str) -> None:
    request = Request(
        "ham10000", "fedprox", {"mu": 0.3}, {**CONFIG, "split": "flamby"}, skin, 3, "dirichlet:0.7", rounds=7, lr=0.2,
        seed=5,
    )  # fmt: skip
    run = _reloaded(make_plan(request).run)
    assert make_plan(request_of(run)).run.run_hash == run.run_hash
    assert make_plan(request_of(run, rounds=9)).run == dataclasses.replace(run, rounds=9)
    assert make_plan(request_of(run, batch_size=4)).run.difference(run) == ["batch_size: 4 was 8"]
    assert make_plan(request_of(run, options={"mu": 1.0})).run.difference(run) == [
        "options.mu: 1.0 was 0.3"
    ]
    assert (
        make_plan(request_of(run, method="fedavg")).run.difference(run)[0]
        == 'method: "fedavg" was "fedprox"'
    )
    centres = make_plan(request_of(run, partition="centre")).run
    assert len(centres.partition.sites) == 4


def test_a_run_is_resumed_with_the_presets_that_it_had_and_no_others(skin: str) -> None:
    asked = Request(
        "ham10000", "fedavg", config=CONFIG, data=skin, sites=2, rounds=1, presets=["beta-0.1"]
    )
    run = make_plan(asked).run
    assert run.partition.spec == "dirichlet:0.1"
    same = make_plan(request_of(run, presets=["beta-0.1"])).run
    assert not same.difference(run)
    other = make_plan(request_of(run, presets=["sgd"])).run
    assert any("optimizer" in line for line in other.difference(run))


@pytest.mark.parametrize(
    ("task", "item", "names"),
    [
        ("classification", {"id": "x", "label": 0}, ("a",)),
        ("multilabel", {"id": "x", "target": (1.0,)}, ("a",)),
        ("multilabel", {"id": "x"}, ()),
        ("regression", {"id": "x", "target": (1.0,)}, ()),
        ("segmentation", {"id": "x"}, ()),
    ],
)
def test_what_only_the_images_show_is_not_counted_in_the_list(
    task: str, item: dict[str, object], names: tuple[str, ...]
) -> None:
    """A site without a finding is not one whose data list has none."""
    bundle = SimpleNamespace(task=task, classes=("a",), kind=KINDS[task])
    plan = SimpleNamespace(bundle=bundle, sections={"train": [item]})
    assert planning.Plan.counted.func(plan) == names  # type: ignore[attr-defined]  # of a cached property


def test_a_method_with_a_schedule_over_the_rounds_follows_the_run(skin: str) -> None:
    asked = Request(
        "ham10000", "fedproc", config=CONFIG, data=skin, sites=2, partition="iid", rounds=7
    )
    run = make_plan(asked).run
    assert run.options["rounds"] == 7
    assert make_plan(request_of(run, rounds=9)).run.options["rounds"] == 7, (
        "its schedule is not stretched when rounds are added"
    )
    assert (
        make_plan(dataclasses.replace(asked, options={"rounds": "50"})).run.options["rounds"] == 50
    )
