"""Records of 0.6.0 whose options have become settings are the same runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medfl import cli, load_run
from medfl.core.run import Run
from medfl.methods import load
from medfl.storage.run_documents import upgraded
from tests.support.toy import run_record

OLD = {"weights": "uniform", "keep_optimizer": False, "decay_per": "epoch"}


@pytest.mark.parametrize("method", ["fedbm", "fedcb"])
def test_moved_options_are_settings(method: str) -> None:
    run = upgraded(run_record(method=method, options={"tau": 7.5, **OLD}))
    assert (run.site_weights, run.decay_per, run.keep_optimizer) == ("uniform", "epoch", False)
    assert run.options == {"tau": 7.5}
    load(method, run.options)
    assert upgraded(run) == run


def test_fedhelps_weights_are_a_setting_and_other_methods_keep_theirs() -> None:
    run = upgraded(run_record(method="fedhelp", options={"weights": "uniform", "lambda_j": 0.4}))
    assert (run.site_weights, run.options) == ("uniform", {"lambda_j": 0.4})
    other = run_record(method="fedproc", options={"weights": "uniform"})
    assert upgraded(other) == other


def test_a_kept_optimiser_is_not_left_behind_in_silence() -> None:
    run = upgraded(run_record(method="fedbm", options={**OLD, "keep_optimizer": True}))
    with pytest.raises(Exception, match="keep_optimizer"):
        load("fedbm", run.options)


@pytest.mark.slow
def test_a_run_of_fedrod_goes_on_with_the_head_that_it_began_with(
    tmp_path: Path,
) -> None:
    """In the second round the first site comes for the first time: its head begins as it did in 0.6.0."""
    common = [
        "run",
        "mednist",
        "--data",
        "phantom",
        "--method",
        "fedrod",
        "--sites",
        "3",
        "--cohort",
        "0.34",
    ]
    common += [
        "--config",
        "image_size=28",
        "--config",
        "network=small_cnn",
        "--jobs",
        "1",
        "--quiet",
        "--set",
    ]
    for name, start, rounds in (
        ("whole", "zero", "3"),
        ("cut", "zero", "1"),
        ("today", "generic", "3"),
    ):
        assert (
            cli.main(
                [
                    *common,
                    f"personal_start={start}",
                    "--rounds",
                    rounds,
                    "--out",
                    str(tmp_path / name),
                ]
            )
            == 0
        )
    path = tmp_path / "cut" / "run.json"
    document = json.loads(path.read_text())
    del document["options"]["personal_start"]
    document["run_hash"] = Run.from_dict(document).run_hash
    path.write_text(json.dumps(document))
    assert (
        cli.main(["run", "--resume", "--out", str(tmp_path / "cut"), "--rounds", "3", "--quiet"])
        == 0
    )
    states = {
        name: sorted((tmp_path / name / "state").glob("*.safetensors"))
        for name in ("whole", "cut", "today")
    }
    content = {name: [file.read_bytes() for file in files] for name, files in states.items()}
    assert content["cut"] == content["whole"] != content["today"]
    assert load_run(tmp_path / "cut").run.options["personal_start"] == "zero"
