"""A run offered as a FLARE job to sites with their own images: only numbers and names."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from medfl import methods
from medfl.bundle.bundle import Bundle, shipped
from medfl.core import (
    Config,
    DataRecord,
    Document,
    InputError,
    PartitionRecord,
    Run,
    check_name,
    is_name,
)
from medfl.flare.files import OWN_IMAGES, RUN_FILE
from medfl.flare.job import recipe, require_flare, write_job
from medfl.flare.remote import federation_of_names
from medfl.flare.site_config import EXAMINING, PLAIN, needs_in_one_place, odd_option
from medfl.flare.wire import is_flare_name
from medfl.policy.policy import PLAN
from medfl.runs import initial_weights, text_record
from medfl.runs.plan import Request, make_plan
from medfl.runtimes import Tolerance, check_unlabelled, site_settings
from medfl.storage import PHANTOM, new_folder, require_unused


def untrained(job: str, requested: Config) -> Document:
    """Return the settings of a job that only evaluates a model, or only requests the input for planning one.

    Raises:
        InputError: no model is named, or it should be trained; or one is named for a plan.
    """
    fixed = {"method": EXAMINING, "rounds": 0}
    allowed = "a finished model, which is sent as it is and not trained"
    if job == PLAN:
        fixed |= {"init": "", "seed": 0}
        allowed = "nothing that is trained or drawn"
    elif not requested.get("init"):
        raise InputError(
            "--evaluate without a model",
            "weights to examine, as --init FILE, run:DIR or bundle:DIR",
            "name them",
        )

    for name, value in fixed.items():
        if requested.get(name, value) != value:
            raise InputError(
                f"--{job} with --{name} {requested[name]}", allowed, "leave one of them out"
            )

    if job == PLAN:
        fixed["rounds"] = 1  # a request without rounds names weights: only the record says 0

    return {**requested, **fixed}


def offer(
    bundle: str,
    sites: Sequence[str],
    *,
    options: Config | None = None,
    config: Config | None = None,
    requested: Config | None = None,
    rehearsal: bool = False,
    data: str | None = None,
) -> Run:
    """Return the run, planned on the bundle's phantom or on `data`, none of which is kept.

    In a rehearsal the sites use phantom images.

    Raises:
        InputError: something is not allowed, or not between sites with separate images.
    """
    for site in sites:
        if not is_flare_name(site):
            raise InputError(
                f"site {site!r}",
                "letters, digits, - and _, at most 63, and not server, admin or relay",
                "rename it",
            )

    if data is None and bundle in shipped():
        data = PHANTOM

    # the phantom has neither these sites nor their missing data: both are set on the finished run
    settings = dict(requested or {})
    settings |= {"sites": 1, "partition": "iid", "data": data, **site_settings.EMPTY}
    plan = make_plan(Request(bundle, options=options or {}, config=config or {}, **settings))
    run = plan.run
    method = plan.method

    if run.method not in methods.names():
        raise InputError(
            f"--method {run.method}",
            "a shipped method: sites take no other code",
            "see medfl methods",
        )

    check_name(run.bundle, "bundle")
    if need := needs_in_one_place(method):
        raise InputError(
            f"method {run.method!r}, which needs {need}",
            "one that does without",
            "see medfl methods",
        )

    if text := odd_option({**run.options, "plm": ""}):  # a language model's path becomes a name
        raise InputError(
            text, f"{PLAIN}: sites take no others", "write out what a pattern or path stands for"
        )

    site_texts = site_settings.of_request(bundle, requested or {})
    check_unlabelled(site_texts["unlabelled"], run.method, method, {site: {} for site in sites})
    source = "real"
    if rehearsal:
        source = PHANTOM

    offered = replace(
        run,
        bundle_path="",
        data=DataRecord(source, "", "", "", {}),
        partition=PartitionRecord(OWN_IMAGES, run.seed, (), {name: {} for name in sites}),
        **site_texts,
    )
    federation_of_names(plan.bundle, method, offered, held_out=False)  # refuses as the server would
    return offered


def export(
    bundle: str,
    sites: Sequence[str],
    out: Path,
    *,
    resume: bool = False,
    min_replies: int | None = None,
    deadline: float | None = None,
    evaluate: bool = False,
    calibrate: str = "",
    plan: bool = False,
    **offered: Any,
) -> Document:
    """Write the job of an offered run into a new folder and return its description.

    With `resume` the server continues the run if it already has it; with `evaluate` the sites only evaluate the
    run's initial weights, and with `calibrate`, a kind of set scores, also release calibration tables; with `plan`
    they release their fingerprints; `offered` are further arguments of `offer`.

    Raises:
        InputError: something is not allowed; nothing was written.
    """
    require_flare()
    from medfl.flare.parts import RemoteController, RemoteExecutor

    tolerance = Tolerance(min_replies, deadline)
    require_unused(out, advice="give a new folder")
    if calibrate and not evaluate:
        raise InputError(
            f"--calibrate {calibrate} without --evaluate",
            "a finished model, which the sites examine",
            "add --evaluate",
        )

    for only, is_asked in (("evaluate", evaluate), (PLAN, plan)):
        if is_asked:
            offered["requested"] = untrained(only, offered.get("requested") or {})

    run = offer(bundle, sites, **offered)
    if plan:
        run = replace(run, rounds=0)

    least = min_replies or len(sites)
    sets = 0
    if calibrate:
        set_scores = Bundle(bundle, run.config).kind.set_scores
        if calibrate not in set_scores:
            allowed = " or ".join(set_scores) or "tasks of classes, findings, numbers or masks"
            raise InputError(f"--calibrate {calibrate}", allowed, "name the scores of this task")

        sets = 1 + set_scores.index(calibrate)

    if least > len(sites):
        raise InputError(
            f"--min-replies {least}", f"there are {len(sites)} sites", "ask for at most as many"
        )

    with tempfile.TemporaryDirectory() as temporary:
        method = methods.load(run.method, run.options)
        init = (offered.get("requested") or {}).get("init", "")
        source, _ = initial_weights.begin_with(Bundle(bundle, run.config), init, seed=run.seed)
        files = text_record.write_for_job(source, run, method, Path(temporary))

        if run.text is not None:  # the path of the embeddings is meaningless elsewhere
            plm = _language_model_name(run.text.plm)
            run = replace(run, options={**run.options, "plm": plm}, text=replace(run.text, plm=plm))

        carried = Path(temporary) / RUN_FILE
        carried.write_text(json.dumps({**run.to_dict(), "run_hash": run.run_hash}, indent=1))
        controller = RemoteController(resume=resume, sets=sets, **tolerance.record())
        written = recipe(run, [carried, *files], controller, RemoteExecutor(), least)
        with new_folder(out) as partial:
            write_job(written, partial)

    return {
        "job": str(out / str(written.name)),
        "sites": list(sites),
        "bundle": run.bundle,
        "bundle_sha256": run.bundle_sha256,
        "method": run.method,
        "rounds": run.rounds,
        "run_hash": run.run_hash,
        "data_source": run.data.source,
    }


def _language_model_name(plm: str) -> str:
    """Return a language model's name, or for a folder without one the folder's name."""
    name = plm.rstrip("/").rpartition("/")[2]
    return name if is_name(name) else "carried"
