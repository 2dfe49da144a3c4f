"""Launch: how a run is carried out, in one record; nothing in it changes a weight. Needs no PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medfl.core.errors import InputError, did_you_mean
from medfl.core.terminal import Print
from medfl.core.type_checks import type_mismatches


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a run, or each run of a comparison, is carried out.

    Attributes:
        out: run folder, or the folder of a comparison; None: one below runs/.
        resume: continue the run in `out`, perhaps with more rounds.
        jobs: worker processes, or the runs of a comparison at the same time; None: the cores, at most the cohort and
            what fits in memory.
        with_local: run the method Local first, into `out`/local, as each site's reference; a run that has one is
            resumed with it.
        cross_site: score the sites' own models on the test images of every site too, into cross_site.csv.
        contribution: estimate in each evaluated round what each site contributes to it, into contribution.csv.
        save_predictions: write the masks that are predicted for the test items, on the grid of their images' files.
        profile: say where the time went, and write profile.json, a trace for a viewer; all in one process, whatever
            `jobs` says.
        track: "mlflow", "mlflow:URI", "wandb" or "wandb:PROJECT": write the numbers there as well.
        runtime: "simulator", or with the same results "monai-fl", whose sites are `ClientAlgo`s of MONAI FL, or
            "flare", where server and sites are processes of a job on NVIDIA FLARE's simulator.
        min_replies: sites of a cohort that have to reply in a round; the others are left out of it. None: all.
        deadline: seconds that the sites have for a round, with the runtime "flare".
        callbacks: called after each round with a `medfl.RoundEnd`; one that returns True or a reason ends the run.
        untested: end before anything is scored on test items, with trial.json in the place of summary.json: the best
            round by the validation metric. With `resume` it can be tested later.
        followed_by: runs of as many rounds that the same command makes afterwards; counted in the time that is left.
        progress: show bars on stderr.
        command: what run.json says about how the run was made.
        say: where lines for the user go.
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
        """Return a launch with other values of these fields; `out` may be text.

        Raises:
            InputError: there is no such field, or a value is not of its type.
        """
        names = [field.name for field in dataclasses.fields(self)]
        for name in settings:
            if name not in names:
                allowed = f"arguments are {', '.join(names)}"
                raise InputError(
                    f"argument {name!r}", allowed, did_you_mean(name, names, "choose one")
                )

        # "" is no folder, but Path("") would be the present one
        if isinstance(settings.get("out"), str):
            settings["out"] = Path(settings["out"]) if settings["out"] else None

        # a dataclass does not look at types: a text in the place of a number would fail rounds later
        for name, value, allowed in type_mismatches(Launch, settings):
            raise InputError(
                f"{name}={value!r:.60}", f"{name} takes {allowed}", "change this argument"
            )

        return dataclasses.replace(self, **settings)

    @property
    def folder(self) -> Path:
        """`out`, of what is never carried out without one; InputError where it is None."""
        if self.out is None:
            raise InputError("no --out", "a new folder, or that of the same runs", "add --out DIR")
        return self.out
