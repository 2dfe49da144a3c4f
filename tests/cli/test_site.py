"""The verb `medfl site`: what a policy says stays in the policy that pins, and every action helps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medfl.cli import verbs as cli
from medfl.policy.policy import Outbound, Policy
from tests.hostile.base import write


def test_pinning_keeps_the_words_and_the_rules_for_what_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, words, pinned = write(tmp_path / "b"), tmp_path / "words.yaml", tmp_path / "pinned.yaml"
    words.write_text("outbound: {clip: 2, noise: 3, keys: [weights]}\n")
    assert (
        cli.main(
            ["site", "inspect", str(root), "--policy", str(words), "--write-policy", str(pinned)]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "policy: may leave: weights" in shown
    found = Policy.read(pinned)
    assert found.outbound == Outbound(keys=("weights",), clip=2.0, noise=3.0)
    assert found.files
    assert cli.main(["site", "inspect", str(root), "--policy", str(pinned), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["outbound"] == found.outbound.lines()
    assert document["pinned"]


@pytest.mark.parametrize("action", ["inspect", "check", "stats", "audit", "serve"])
def test_every_action_helps(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["site", action, "--help"]) == 0
    assert "examples" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["check", "stats"])
def test_a_bundle_that_is_not_accepted_is_never_opened(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(
        tmp_path / "b", {"x": {"_target_": "evil.Net"}}, {"evil.py": "raise SystemExit(7)"}
    )
    assert cli.main(["site", action, str(root), "--data", str(tmp_path)]) == 2
    assert (
        "x#_target_: evil.Net, for which the policy has to allow 'scripts'"
        in capsys.readouterr().err
    )
