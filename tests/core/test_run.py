"""The record of a run, its hash, and what differs between two."""

from __future__ import annotations

import dataclasses
import json

import pytest

from medfl.core.errors import InputError
from medfl.core.run import DataRecord, PartitionRecord, PublicRecord, Run, without_round_limit
from tests.support.toy import run_record

RUN = run_record()

CHANGES = {
    "bundle": "other",
    "bundle_sha256": "f" * 64,
    "method": "fedprox",
    "options": {"mu": 0.1},
    "config": {"image_size": 28},
    "cohort": 0.5,
    "rounds": 4,
    "local_epochs": 2,
    "batch_size": 8,
    "lr": None,
    "lr_decay": 0.9,
    "seed": 1,
    "device": "cuda",
    "amp": True,
    "threads": 2,
    "eval_every": 2,
    "versions": {"medfl": "1"},
    "messages": "topk:0.01",
    "aggregation": "median",
    "tf32": True,
    "compile": True,
    "channels_last": True,
    "adapted": ("numpy.product",),
    "init": "sha256:" + "8" * 64,
    "decay_per": "epoch",
    "site_weights": "uniform",
    "max_share": 0.4,
    "keep_optimizer": True,
    "patience": 5,
    "site_labels": "a=liver",
    "unlabelled": "b",
    "site_channels": "a=0",
    "site_spacing": "a=1x1x2",
    "channel_drop": 0.3,
    "partial_loss": "naive",
    "portable": True,
}
PUBLIC = PublicRecord(
    "pictures", "3" * 64, {"image_size": 32}, DataRecord("real", "/data/p", "4" * 64, "official", {"test": 9}),
    "test", 9, "5" * 64, (("run:/a", "6" * 64),),
)  # fmt: skip
DATA = {"source": "real", "checksum": "2" * 64, "split": "flamby"}
PARTITION = {"spec": "centre", "seed": 3, "sites": {"x": {"train": ["train1"]}}}


LATER = (
    "portable",
    "public",
    "text",
    "messages",
    "aggregation",
    "tf32",
    "channels_last",
    "compile",
    "max_share",
    "metrics",
    "init",
    "adapted",
    "decay_per",
    "site_weights",
    "keep_optimizer",
    "score_trained",
    "patience",
    "site_labels",
    "unlabelled",
    "site_channels",
    "site_spacing",
    "channel_drop",
    "partial_loss",
)
"""Settings that older records do not have."""


def with_data(**changes) -> Run:
    return run_record(data=dataclasses.replace(RUN.data, **changes))


def with_partition(**changes) -> Run:
    return run_record(partition=dataclasses.replace(RUN.partition, **changes))


def test_every_field_is_looked_at_here() -> None:
    others = {"bundle_path", "data", "partition", "public", "text", "metrics", "score_trained"}
    assert {f.name for f in dataclasses.fields(Run)} == {*CHANGES, *others}
    assert {f.name for f in dataclasses.fields(DataRecord)} == {*DATA, "folder", "counts", "notes"}
    assert {f.name for f in dataclasses.fields(PartitionRecord)} == {*PARTITION, "notes"}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_changes_the_hash_and_is_named(name: str) -> None:
    other = run_record(**{name: CHANGES[name]})
    assert other.run_hash != RUN.run_hash
    named = [line.partition(":")[0].partition(".")[0] for line in other.difference(RUN)]
    assert set(named) == (set() if name == "rounds" else {name})


def test_a_schedule_over_all_rounds_goes_on_with_its_own_number_of_rounds() -> None:
    run = run_record(decay_per="poly")
    longer = dataclasses.replace(run, rounds=run.rounds + 1)
    assert longer.difference(run) == [f"rounds: {run.rounds + 1} was {run.rounds}"]
    assert without_round_limit(longer).run_hash != without_round_limit(run).run_hash


def test_what_a_run_is_scored_by_is_named_and_changes_no_hash() -> None:
    assert run_record(score_trained=True).run_hash == RUN.run_hash
    other = run_record(metrics="dice")
    assert other.run_hash == RUN.run_hash
    assert other.difference(RUN) == ['metrics: "dice" was "all"']


@pytest.mark.parametrize("name", DATA)
def test_the_data_change_the_hash_and_are_named(name: str) -> None:
    other = with_data(**{name: DATA[name]})
    assert other.run_hash != RUN.run_hash
    assert [line.partition(":")[0] for line in other.difference(RUN)] == [f"data.{name}"]


@pytest.mark.parametrize("name", PARTITION)
def test_the_partition_changes_the_hash_and_is_named(name: str) -> None:
    other = with_partition(**{name: PARTITION[name]})
    assert other.run_hash != RUN.run_hash
    assert [line.partition(":")[0] for line in other.difference(RUN)] == [f"partition.{name}"]


@pytest.mark.parametrize(
    "other",
    [
        run_record(bundle_path="/elsewhere"),
        with_data(folder="/elsewhere"),
        with_data(counts={"train": 1}),
        with_data(notes=("read this",)),
    ],
)
def test_where_things_lie_changes_nothing(other: Run) -> None:
    assert other != RUN
    assert other.run_hash == RUN.run_hash
    assert other.difference(RUN) == []


def test_neither_do_notes_of_the_partition_nor_the_index_of_the_gpu() -> None:
    assert with_partition(notes=("re-drawn twice",)).run_hash == RUN.run_hash
    first, second = run_record(device="cuda:0"), run_record(device="cuda:1")
    assert first.run_hash == second.run_hash
    assert first.difference(second) == []


def test_the_name_of_a_partition_file_is_no_matter_its_content_is() -> None:
    here, there = with_partition(spec="file:a.csv"), with_partition(spec="file:/b/c.csv")
    assert here.run_hash == there.run_hash
    changed = run_record(partition=dataclasses.replace(here.partition, sites=PARTITION["sites"]))
    assert changed.run_hash != here.run_hash


def with_public(options: dict | None = None, **changes) -> Run:
    return run_record(public=dataclasses.replace(PUBLIC, **changes), options=options or {})


def test_a_run_without_public_data_has_no_such_key() -> None:
    assert "public" not in RUN.to_dict()
    assert Run.from_dict({**RUN.to_dict(), "public": None}) == RUN
    assert with_public().run_hash != RUN.run_hash
    assert with_public().difference(RUN)[0].startswith("public: ")
    assert RUN.difference(with_public())[0].startswith("public: null was ")


def test_a_run_with_lossless_messages_has_no_such_key() -> None:
    """So its hash is the one of a run recorded before there were others."""
    assert "messages" not in RUN.to_dict()
    assert Run.from_dict(RUN.to_dict()).messages == "lossless"
    small = run_record(messages="int8")
    assert Run.from_dict(json.loads(json.dumps(small.to_dict()))) == small
    assert small.difference(RUN) == ['messages: "int8" was "lossless"']
    assert RUN.difference(small) == ['messages: "lossless" was "int8"']


@pytest.mark.parametrize(
    "changes",
    [
        {"bundle": "others"}, {"bundle_sha256": "0" * 64}, {"config": {}}, {"section": "train"}, {"items": 8},
        {"ids_sha256": "0" * 64}, {"teachers": (("run:/a", "0" * 64),)},
        {"data": dataclasses.replace(PUBLIC.data, checksum="0" * 64)},
    ],
)  # fmt: skip
def test_public_data_and_teachers_change_the_hash_and_are_named(changes: dict) -> None:
    assert with_public(**changes).run_hash != with_public().run_hash
    (line,) = with_public(**changes).difference(with_public())
    assert line.startswith(f"public.{next(iter(changes))}: ")


def test_where_public_data_and_teachers_lie_changes_nothing() -> None:
    here = with_public({"public": "pictures:/data/p", "teachers": "run:/a", "mu": 1.0})
    there = with_public(
        {"public": "pictures", "teachers": "run:/b", "mu": 1.0},
        teachers=(("run:/b", "6" * 64),),
        data=dataclasses.replace(PUBLIC.data, folder="/b", counts={}, notes=("read this",)),
    )
    assert here.run_hash == there.run_hash
    assert here.difference(there) == []
    assert Run.from_dict(json.loads(json.dumps(here.to_dict()))) == here


def test_a_difference_shows_both_values_briefly() -> None:
    assert run_record(lr=0.2).difference(RUN) == ["lr: 0.2 was 0.1"]
    assert run_record(options={"mu": 1.0}).difference(run_record(options={"mu": 2.0})) == [
        "options.mu: 1.0 was 2.0"
    ]
    assert run_record(options={"mu": 1.0}).difference(RUN) == ["options.mu: 1.0 was null"]
    assert all(
        len(line) < 150
        for line in with_partition(sites={"x": {"train": ["i"] * 999}}).difference(RUN)
    )
    assert RUN.difference(RUN) == []


def test_json_round_trip() -> None:
    run = run_record(data=dataclasses.replace(RUN.data, notes=("a",)), lr=None, cohort=0.1)
    text = json.dumps({**run.to_dict(), "other": 1})
    again = Run.from_dict(json.loads(text))
    assert again == run
    assert again.run_hash == run.run_hash


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Run) if f.name not in LATER])
def test_a_record_without_a_setting_names_it(name: str) -> None:
    document = {key: value for key, value in RUN.to_dict().items() if key != name}
    with pytest.raises(InputError, match=f"run.json without '{name}'"):
        Run.from_dict(document)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("rounds",), "3"), (("rounds",), 2.5), (("rounds",), True), (("rounds",), None), (("lr",), "0.1"),
        (("cohort",), []), (("amp",), 1), (("amp",), "false"), (("tf32",), "false"), (("messages",), 3),
        (("options",), []), (("config",), None), (("versions",), {"torch": 2}), (("seed",), {}), (("method",), 7),
        (("data",), []), (("data", "source"), None), (("data", "counts"), {"train": "3"}), (("data", "notes"), "abc"),
        (("data", "notes"), 3), (("data", "more"), 3), (("partition",), "iid"), (("partition", "sites"), ["x"]),
        (("partition", "sites"), {"x": {"train": "abc"}}), (("partition", "sites"), {"x": {"train": [1]}}),
        (("partition", "seed"), "0"), (("public",), 3), (("public", "items"), "9"), (("public", "teachers"), [1]),
        (("public", "data"), {}),
    ],
)  # fmt: skip
def test_a_setting_of_another_kind_is_damage(where: tuple[str, ...], value: object) -> None:
    document = run_record(public=PUBLIC).to_dict()
    node = document
    for name in where[:-1]:
        node = node[name]
    node[where[-1]] = value
    with pytest.raises(InputError, match="^run.json (that is damaged|without)"):
        Run.from_dict(document)


@pytest.mark.parametrize("document", [[], None, 3, "text", {}])
def test_what_is_no_record_at_all(document: object) -> None:
    with pytest.raises(InputError, match="^run.json"):
        Run.from_dict(document)  # type: ignore[arg-type]


def test_the_hash_is_sixty_four_digits_and_does_not_depend_on_the_order_of_keys() -> None:
    left, right = (
        run_record(options=dict(items)) for items in ([("a", 1), ("b", 2)], [("b", 2), ("a", 1)])
    )
    assert left.run_hash == right.run_hash
    assert len(bytes.fromhex(RUN.run_hash)) == 32


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RUN.seed = 2  # type: ignore[misc]
