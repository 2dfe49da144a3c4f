"""A site's policy: read strictly, written whole, and the pins hold."""

from __future__ import annotations

import pydoc
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from medfl.core.errors import InputError
from medfl.policy.inspection import inspect
from medfl.policy.policy import PERMISSIONS, Limits, Policy
from tests.hostile.base import write
from tests.support.toy import run_record

BORDER = yaml.safe_load((Path(__file__).parents[2] / "docs" / "site" / "border.yaml").read_text())


def read(tmp_path: Path, text: str) -> Policy:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    return Policy.read(path)


def test_an_empty_policy_allows_nothing_and_pins_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, "") == Policy() == Policy("", frozenset(), Limits(), None)


def test_a_policy_that_is_written_is_read_back(tmp_path: Path) -> None:
    policy = Policy(
        "b", frozenset({"scripts", "pickle"}), Limits(depth=7), {"configs/train.json": "0" * 64}
    )
    policy = replace(policy, methods=("fedavg", "ditto"), settings={"rounds": 3})
    text = policy.text()
    assert read(tmp_path, text) == policy
    assert f"# scripts: {PERMISSIONS['scripts']}" in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("alow: [scripts]", "did you mean allow"),
        ("allow: [script]", "did you mean scripts"),
        ("allow: [everything]", "known are scripts"),
        ("allow: scripts", "a list of words"),
        ("allow: [scripts]\nallow: []", "twice"),
        ("limits: {nodes: 1, nodes: 0x1}", "twice"),
        ("1: a\n0x1: b", "twice"),
        ("1: a\ntrue: b", "twice"),
        (f"limits: {{nodes: {'9' * 400}}}", "a number of 400 characters; at most 64"),
        (f"limits: {{nodes: 0x{'f' * 6000}}}", "a number of 6002 characters"),
        (f"limits: {{nodes: 1{':1' * 50_000}}}", "a number of 100001 characters"),
        (f"outbound: {{clip: {'9' * 65}}}", "a number of 65 characters"),
        (f"outbound: {{keys: [0b{'1' * 30_000}]}}", "a number of 30002 characters"),
        ("allow: !!python/name:os.system []", "the YAML tag"),
        ("limits: {nodes: -1}", "at least 1"),
        ("limits: {nodes: true}", "whole numbers"),
        ("limits: {bytes: 1}", "known are config_bytes"),
        ("files: {a: abc}", "64 hexadecimal digits"),
        ("files: [a]", "64 hexadecimal digits"),
        ("bundle: [a]", "name of the bundle"),
        ("bundle: ../../x", "the name of the bundle '../../x'; letters, digits"),
        ("trusted: true", "key 'trusted'"),
        ("methods: fedavg", "a list of words"),
        ("jobs: [watch]", "jobs: 'watch'; known are train, evaluate"),
        ("methods: [a/b]", "method 'a/b'"),
        ("settings: [rounds]", "names with whole numbers"),
        ("settings: {rounds: 1.5}", "whole numbers of at least 1"),
        ("settings: {lr: 1}", "known are rounds, batch_size, local_epochs"),
        ("- a", "keys and values"),
        ("allow: [scripts", "not valid YAML"),
        ("# \u202e\n", "U+202E"),
    ],
)
def test_a_policy_with_a_mistake_is_refused_in_one_line(
    text: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_policy_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        Policy.read(tmp_path / "none.yaml")


def test_pinned_files_have_to_be_these_and_no_others(tmp_path: Path) -> None:
    root = write(tmp_path / "b")
    policy = inspect(root).policy(Policy())
    assert inspect(root, policy).accepted
    (root / "docs").mkdir()
    (root / "docs" / "README.md").write_text("new\n")
    (root / "LICENSE").unlink()
    (root / "configs" / "metadata.json").write_text("{}")
    found = {refusal.file: refusal.why for refusal in inspect(root, policy).refusals}
    assert found.keys() == {"docs/README.md", "LICENSE", "configs/metadata.json"}
    assert found["docs/README.md"] == "a file that the policy does not have"
    assert found["LICENSE"] == "it is in the policy but not here"
    assert "its sha256 is" in found["configs/metadata.json"]


def test_a_policy_is_for_one_bundle(tmp_path: Path) -> None:
    found = inspect(write(tmp_path / "b"), Policy("another"))
    assert [refusal.why for refusal in found.refusals] == ["the policy is for the bundle 'another'"]


def test_limits_of_the_policy_are_kept(tmp_path: Path) -> None:
    root = write(tmp_path / "b")
    for limits, says in (
        (Limits(config_bytes=100), "at most 100"),
        (Limits(nodes=5), "more than 5 values"),
        (Limits(depth=1), "more than 1 levels"),
        (Limits(expression=10), "more than 10 characters"),
        (Limits(files=2), "more than 2 files"),
    ):
        assert says in "\n".join(map(str, inspect(root, Policy(limits=limits)).refusals))


# What a job may ask for


def test_a_policy_that_says_nothing_of_runs_agrees_to_all() -> None:
    assert Policy().disagreement(run_record(method="anything", rounds=10**6)) is None


def test_a_run_that_was_agreed_to_is_taken_and_smaller_ones_but_no_other() -> None:
    agreed = Policy().restricted_to(
        run_record(method="fedavg", rounds=5, batch_size=8, local_epochs=2)
    )
    assert (agreed.methods, agreed.settings) == (
        ("fedavg",),
        {"rounds": 5, "batch_size": 8, "local_epochs": 2},
    )
    one = {"method": "fedavg", "rounds": 5, "batch_size": 8, "local_epochs": 2}
    assert agreed.disagreement(run_record(**one)) is None
    assert agreed.disagreement(run_record(**{**one, "rounds": 1})) is None
    assert agreed.disagreement(run_record(**{**one, "method": "ditto"})) == (
        "method ditto", "fedavg, as its policy says",
    )  # fmt: skip
    for name in ("rounds", "batch_size", "local_epochs"):
        assert agreed.disagreement(run_record(**{**one, name: 9})) == (
            f"{name} 9",
            f"at most {one[name]}, as its policy says",
        )


def test_what_a_policy_says_itself_stays_when_it_agrees_to_a_run() -> None:
    said = Policy(methods=("ditto",), settings={"rounds": 9}, jobs=("train",))
    assert said.restricted_to(run_record(method="fedavg", rounds=5)) == said


def test_a_job_that_only_examines_is_agreed_to_apart(tmp_path: Path) -> None:
    examines = run_record(method="fedavg", rounds=0, batch_size=8, local_epochs=2, init="x")
    agreed = read(tmp_path, Policy().restricted_to(examines).text())
    assert agreed.jobs == ("evaluate",)
    assert agreed.disagreement(examines) is None
    trains = run_record(method="fedavg", rounds=1, batch_size=8, local_epochs=2)
    assert agreed.disagreement(trains) == ("a job to train", "evaluate, as its policy says")
    assert "evaluate; " in agreed.job_rules()


def test_a_job_that_plans_has_to_be_named(tmp_path: Path) -> None:
    plans = run_record(method="fedavg", rounds=0, batch_size=8, local_epochs=2)
    problem = ("a job to plan", "train and evaluate, as its policy says")
    assert Policy().disagreement(plans) == problem
    agreed = read(tmp_path, Policy().restricted_to(plans).text())
    assert agreed.jobs == ("plan",)
    assert agreed.disagreement(plans) is None


@pytest.mark.parametrize("entry", BORDER, ids=lambda entry: entry["what"])
def test_every_border_has_a_function_that_exists(entry: dict[str, str]) -> None:
    assert callable(pydoc.locate(entry["validator"]))
    assert entry["checks"]
    assert entry["remains"]


def test_every_test_that_the_security_page_names_is_there() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "security.md").read_text()
    named = set(re.findall(r"`(tests/[\w/.]+)`", page))
    assert len(named) > 15
    assert not [name for name in named if not (root / name).is_file()]
