"""Launch: how a run is executed, in one record; nothing in it changes a weight. Needs no PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medfl.core import InputError, Print, did_you_mean, fields_of, type_mismatches


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a run, or each run of a comparison, is executed.

    Attributes:
        out: run folder, or the folder of a comparison; None: a new one in runs/.
        resume: continue the run in `out`, perhaps with more rounds.
        jobs: worker processes, or concurrent runs of a comparison; None: the number of cores, at most the cohort and
            what fits in memory.
        with_local: run the method Local first, into `out`/local, as each site's reference; a run that has one is
            resumed with it.
        cross_site: also score the sites' own models on the test images of every site, into cross_site.csv.
        contribution: estimate each site's contribution in each evaluated round, into contribution.csv.
        save_predictions: write the masks predicted for the test items, on the grid of their image files.
        profile: report where the time went, and write profile.json, a trace for a viewer; in one process, whatever
            `jobs` says.
        track: "mlflow" or "mlflow:URI": also log the numbers there.
        runtime: "simulator", or with the same results "monai-fl", whose sites are `ClientAlgo`s of MONAI FL, or
            "flare", where server and sites are processes of a job on NVIDIA FLARE's simulator.
        min_replies: sites of a cohort that have to reply in a round; the others are left out of it. None: all.
        deadline: time limit for the sites in a round, in seconds, with the runtime "flare".
        callbacks: called after each round with a `medfl.RoundEnd`; one that returns True or a reason ends the run.
        untested: stop before anything is scored on test items, with trial.json instead of summary.json: the best
            round by the validation metric. With `resume` it can be tested later.
        followed_by: number of runs of equal length that the same command runs afterwards; used for the time estimate.
        progress: show bars on stderr.
        command: the run's origin, for run.json.
        say: prints lines for the user.
    """

    out: Path | None = None
    resume: bool = False
    jobs: int | None = None
    with_local: bool = False
    cross_site: bool = False
    contribution: bool = False
    save_predictions: bool = False
    profile: bool = False
    track: str | None = None
    runtime: str = "simulator"
    min_replies: int | None = None
    deadline: float | None = None
    callbacks: Sequence[Callable[..., object]] = ()
    untested: bool = False
    followed_by: int = 0
    progress: bool = False
    command: str = "medfl.federate(...)"
    say: Print = str

    def having(self, **settings: Any) -> Launch:
        """Return a launch with other values of these fields; `out` may be a string.

        Raises:
            InputError: there is no such field, or a value is not of its type.
        """
        names = fields_of(self)
        for name in settings:
            if name not in names:
                raise InputError(
                    f"argument {name!r}",
                    f"arguments are {', '.join(names)}",
                    did_you_mean(name, names, "choose one"),
                )

        # "" is not a folder, but Path("") would be the current one
        if isinstance(settings.get("out"), str):
            settings["out"] = Path(settings["out"]) if settings["out"] else None

        # a dataclass does not check types: a string instead of a number would fail rounds later
        for name, value, allowed in type_mismatches(Launch, settings):
            raise InputError(
                f"{name}={value!r:.60}", f"{name} takes {allowed}", "change this argument"
            )

        return dataclasses.replace(self, **settings)

    @property
    def folder(self) -> Path:
        """`out`, for launches that need one; InputError if it is None."""
        if self.out is None:
            raise InputError("no --out", "a new folder, or that of the same runs", "add --out DIR")
        return self.out
