"""The verb `medfl site`: tools for a clinical partner."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfl.cli.arguments import bundle_folder, existing, parse_names, parse_pairs
from medfl.cli.parser import add_actions, add_verb, log, show
from medfl.cli.walls import Use, hold
from medfl.core import Config, Document, InputError, check_name, hanging_indent, printable, tables
from medfl.flare import serve

if TYPE_CHECKING:
    from medfl.bundle.open import WithData
    from medfl.data import Fingerprint
    from medfl.policy.policy import Policy
    from medfl.problem.fingerprint import Cases
    from medfl.starter.survey import Survey

_EXAMPLES = """\
examples
  medfl site inspect path/to/bundle
      what would run, what would leave, and what is refused (exit code 2)
  medfl site inspect path/to/bundle --write-policy policies/bundle.yaml
      accept it as it is: from now on, no file may change
  medfl site inspect path/to/bundle --policy policies/bundle.yaml
      before every run: is it unchanged?
  medfl site inspect path/to/bundle --policy policies/bundle.yaml --write-policy policies/new.yaml
      accept a changed bundle: pin its files again, keep the other rules
  medfl site inspect path/to/new --against path/to/accepted
      what has changed since then?"""

_CHECK_EXAMPLES = """\
examples
  medfl site check path/to/bundle --data DIR --policy policies/bundle.yaml
      would the bundle run here, on these images?
  medfl site check path/to/bundle --data DIR --server fl.example.org:8002 --kit site-1
      also: can the server be reached, and is its certificate of the same federation?"""

_STATS_EXAMPLES = """\
examples
  medfl site stats path/to/bundle --data DIR
      show what would leave; nothing is written
  medfl site stats path/to/bundle --data DIR --noise 1 --out clinic-a.json
      write exactly what is shown, with noise
  medfl site stats --collect clinic-a.json clinic-b.json --out federation.png
      at the server: plot all sites, with each one's distance from all together"""

_FINGERPRINT_EXAMPLES = """\
examples
  medfl site fingerprint --images path/to/images --masks path/to/masks --classes left,right
      show what would leave; nothing is written
  medfl site fingerprint path/to/bundle --data DIR --policy policies/bundle.yaml --out site-1.json
      write exactly that, for medfl plan"""

_AUDIT_EXAMPLES = """\
examples
  medfl site audit audit.jsonl
      what came in and left, and whether the log is intact
  medfl site audit audit.jsonl --noted 3f5a91c0
      also: is the line still there whose sha256 was noted elsewhere?"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    actions = add_actions(
        verbs,
        "site",
        "tools for a hospital: inspect a bundle, check the data, share statistics, audit, join",
    )
    inspect = add_verb(
        actions, "inspect", "inspect a bundle without running any of its code", _inspect, _EXAMPLES
    )
    inspect.add_bundle(type=bundle_folder)
    _add_policy(inspect)
    inspect.add_path(
        "--against",
        "DIR",
        "previously accepted version of the bundle: show the differences",
        existing,
    )
    inspect.add_path(
        "--write-policy",
        "FILE",
        "if the bundle is accepted, write a policy that pins every file and keeps the other entries "
        "of --policy; files that differ from their pins are listed and pinned again",
    )
    inspect.add_path(
        "--job",
        "DIR|run.json",
        "with --write-policy: allow this job's method, rounds, batch size and local epochs",
        existing,
    )
    text = "preflight: would a bundle run here, on these images?"
    check = add_verb(actions, "check", text, _check, _CHECK_EXAMPLES)
    _add_data(check)
    check.add_text("--server", "HOST:PORT", "check that this server can be reached")
    check.add_path(
        "--kit",
        "DIR",
        "check that this startup kit is valid for the server and the site",
        existing,
    )
    check.add_text(
        "--device", "auto|cpu|cuda[:i]", "device for training; default: cpu", default="cpu"
    )
    check.add_number("--batch-size", "B", "images per optimiser step; default: the bundle's")
    check.add_path(
        "--folder",
        "DIR",
        "folder for the site's state; default: the current one",
        default=Path("."),
    )
    text = "local statistics: show what would leave, and write it"
    stats = add_verb(actions, "stats", text, _stats, _STATS_EXAMPLES)
    _add_data(stats, "?")
    stats.add_number("--bins", "N", "number of bins of the intensity histograms; default: 32")
    stats.add_text(
        "--range",
        "LOW,HIGH",
        "value range of the histograms; default: value_range of metadata.json",
    )
    stats.add_number(
        "--min-count", "K", "suppress counts below K; default: 10; never below the policy's"
    )
    stats.add_number(
        "--noise",
        "EPSILON",
        "differential privacy: add noise to each count and histogram; a smaller epsilon adds more",
        float,
    )
    stats.add_path("--out", "FILE", "write the statistics to this file; with --collect: the plot")
    stats.add_path(
        "--collect",
        "FILE",
        "plot the statistics that several sites have written",
        existing,
        nargs="+",
    )
    text = (
        "statistics for planning a segmentation (medfl plan): show what would leave, and write it"
    )
    fingerprint = add_verb(actions, "fingerprint", text, _fingerprint, _FINGERPRINT_EXAMPLES)
    _add_data(fingerprint, "?")
    add_pairs(fingerprint)
    fingerprint.add_number(
        "--min-count",
        "K",
        "suppress counts of fewer than K cases; default: 10; never below the policy's",
    )
    fingerprint.add_number(
        "--epsilon",
        "E",
        "differential privacy of one case: share only counts and clipped means, with noise; a smaller epsilon "
        "adds more",
        float,
    )
    fingerprint.add_path(
        "--folder",
        "DIR",
        "folder of the site's state; --epsilon is charged to the privacy account of these images there",
        existing,
    )
    fingerprint.add_path("--out", "FILE", "write the fingerprint to this file")
    audit = add_verb(
        actions, "audit", "verify and show a site's audit log", _audit, _AUDIT_EXAMPLES
    )
    audit.add_path("file", "FILE", "the log", existing)
    audit.add_text(
        "--noted",
        "SHA256",
        "hash of a log line that was noted elsewhere; fail if the log does not have it",
    )
    serve.add(actions, add_verb, show)


def _add_data(parser: Any, many: str | None = None) -> None:
    """Add the flags that open a bundle on its data."""
    parser.add_bundle(nargs=many)
    parser.add_text("--data", "DIR|phantom", "folder of the images, or phantom for synthetic ones")
    parser.add_switch("--unlabelled", "the site has no labels: use unlabelled images for training")
    _add_policy(parser)
    parser.add_config(
        "override a value of the bundle's configuration, e.g. image_size=64; may be repeated",
    )


def add_pairs(parser: Any) -> None:
    """Add the flags of a folder of images with masks."""
    for flag, text in (("--images", "folder of the images"), ("--masks", "folder of the masks")):
        parser.add_path(flag, "DIR", text, existing)

    parser.add_text(
        "--classes",
        "A,B,...",
        "comma-separated class names of the mask values 1, 2, ...; the same at each site",
        default="",
    )


def _add_policy(parser: Any) -> None:
    parser.add_walls()
    parser.add_path("--policy", "FILE", "the site's policy; default: none", existing)


def _inspect(args: Namespace) -> int:
    target = args.write_policy
    folder = args.bundle
    if target is not None:
        _check_new_file("--write-policy", target)
        if target.resolve().is_relative_to(folder.expanduser().resolve()):
            raise InputError(
                f"--write-policy {target}",
                "a place outside of the bundle",
                "give a file outside of it",
            )

    hold(args, Use(bundles=[args.bundle], file="write_policy"))
    from medfl.partner.differences import differences
    from medfl.policy.inspection import inspect
    from medfl.policy.policy import Policy
    from medfl.storage import read_run

    policy = Policy.read(args.policy) if args.policy else Policy()

    if args.job:
        policy = policy.restricted_to(read_run(_run_file(args.job))[0])

    target = args.write_policy
    inspection = inspect(folder, policy)
    # Before `accepted` is asked: it takes back what was refused for its pins alone.
    anew = None if target is None or policy.files is None else inspection.unpin()
    if args.against is None:
        changes = None
    else:
        changes = list(differences(inspect(args.against, policy), inspection))

    document = {
        **inspection.as_dict(),
        "outbound": policy.outbound.lines(),
        "jobs": policy.job_rules(),
        "changes": changes,
    }
    if anew is not None:
        document |= {"pinned_anew": anew}
    if target is not None and inspection.accepted:
        from medfl.storage import write_atomic

        check_name(inspection.bundle, "the bundle's folder")
        write_atomic(target, inspection.policy(policy).text().encode())
        document["policy_written"] = str(args.shown_file)

    show(args, document, _inspection_lines(document))
    inspection.require()
    return 0


def _run_file(job: Path) -> Path:
    """Return the record in a job's folder, or the given one."""
    run_files = sorted(job.rglob("run.json")) if job.is_dir() else [job]
    if not run_files:
        raise InputError(
            f"--job {job}",
            "the folder of a job with its run.json",
            "give what medfl flare export wrote",
        )
    return run_files[0]


def _inspection_lines(document: Config) -> list[str]:
    if document.get("pinned_anew"):
        pinned = "judged without the pins of --policy"
    elif document["pinned"]:
        pinned = "every file is as the policy says"
    else:
        pinned = "not pinned: --policy names no files"

    rows = []
    for f in document["files"]:
        rows.append([printable(f["path"]), f["kind"], str(f["bytes"]), f["sha256"][:16] + "..."])

    lines = [
        f"bundle {printable(document['bundle'])} in {printable(document['folder'], 200)}",
        "",
        f"Files ({pinned})",
        *(tables.text_table(["file", "kind", "bytes", "sha256"], rows) if rows else ["none"]),
    ]
    if document["changes"] is not None:
        lines += ["", "What differs from the version given with --against"]
        lines += document["changes"] or ["nothing"]

    allowed = []
    for item in document["allowed_by_policy"]:
        allowed.append(f"{item['word']}: {item['what']}, {item['times']} times ({item['meaning']})")

    data = [f"{printable(file)}: dataset_dir is {text}" for file, text in document["data"].items()]
    data.append("--data takes its place; nothing else is known without running anything")
    for title, texts in {
        "What is not as --policy pinned it": document.get("pinned_anew") or None,
        "Components that would be made (_target_)": _counts(document["targets"]),
        f"What its {document['expressions']} expressions and its imports use": _counts(
            document["uses"]
        ),
        "Never run by medfl: statements for `monai.bundle run`": document["statements"],
        "Allowed by the policy's words": allowed,
        "Data that would be read": data,
        "What would leave": (
            *document["leaves"],
            *(f"policy: {line}" for line in document["outbound"]),
        ),
        "Jobs that would be taken": [f"policy: {document['jobs']}"],
    }.items():
        if texts is not None:
            lines += ["", title]
            for text in texts or ["none"]:
                lines += hanging_indent("  ", text)

    if "policy_written" in document:
        lines += ["", f"policy: {document['policy_written']}"]

    count = len(document["refused"])
    lines += ["", f"REFUSED, for {count} reason{'s' if count > 1 else ''}" if count else "ACCEPTED"]
    for refusal in document["refused"]:
        where = ": ".join(filter(None, (refusal["file"], refusal["id"])))
        lines.append(f"  {printable(where)}: {refusal['why']}")

    return lines


def _counts(parts: Config) -> list[str]:
    text = ", ".join(f"{printable(name)} {count}" for name, count in parts.items())
    return text.splitlines()


# medfl site check, stats, audit


def _config(texts: list[str]) -> Document:
    """Parse --config as YAML values, as MONAI does."""
    from medfl.core import Refused, typed_value

    values = parse_pairs("--config", texts)
    try:
        return {
            name: value if value[:1] in "$@%" else typed_value(value)
            for name, value in values.items()
        }
    except Refused as error:
        raise InputError(
            f"--config {' '.join(texts)}", "values are YAML, as MONAI reads them", "quote it"
        ) from error


def _check(args: Namespace) -> int:
    from medfl.partner.connection import address

    server = None if args.server is None else address(args.server)
    ports = [] if server is None else [server[1]]
    hold(args, Use(bundles=[args.bundle], ports=ports))
    from medfl.partner.preflight import PreflightOptions, check
    from medfl.policy.policy import Policy

    policy = None if args.policy is None else Policy.read(args.policy)
    preflight = PreflightOptions(
        args.bundle,
        args.data,
        policy,
        server,
        args.kit,
        args.device,
        args.batch_size,
        _config(args.config),
        args.folder,
        args.unlabelled,
    )
    report = check(preflight, progress=sys.stderr.isatty())
    show(args, report.as_dict(), report.text())
    report.require()

    return 0


def _stats(args: Namespace) -> int:
    if args.collect:
        return _collect(args)
    if args.bundle is None:
        raise InputError(
            "no bundle",
            "a shipped bundle's name or a folder, or --collect FILE ...",
            "see medfl bundles",
        )

    if args.out:
        _check_new_file("--out", args.out)

    hold(args, Use(bundles=[args.bundle], file="out"))
    from medfl.partner.statistics import (
        StatisticsOptions,
        bins_of,
        gather,
        text,
        unread_ages,
    )
    from medfl.runtimes.monai_fl.data_stats import OWN_BINS

    policy, least = _rules(args)
    _check_epsilon("--noise", args.noise)
    opened = _opened(args, policy)
    bins = bins_of(opened.bundle, OWN_BINS if args.bins is None else args.bins, args.range)
    rules = StatisticsOptions(bins, least, args.noise)
    document = gather(opened.bundle, opened.folder, rules, progress=sys.stderr.isatty())
    for line in unread_ages(opened.bundle, opened.folder):
        log(f"note, for you alone: {line}")

    return _preview(args, document, text(document))


def _opened(args: Namespace, policy: Policy) -> WithData:
    """Open the given bundle on its data, if a site with this policy would train it."""
    from medfl.bundle.files import shipped_folders
    from medfl.bundle.open import open_problem, with_data
    from medfl.policy.inspection import TRAINING, inspect

    # first, so that nothing of a bundle that is refused is ever built
    inspect(shipped_folders().get(args.bundle, Path(args.bundle)), policy).require(TRAINING)
    config = _config(args.config)
    problem = open_problem(args.bundle, config, policy=policy)
    return with_data(problem, args.data, config, unlabelled=args.unlabelled)


def _rules(args: Namespace) -> tuple[Policy, int]:
    """Return the site's policy, and the minimum released count."""
    from medfl.policy.policy import Policy
    from medfl.policy.suppression import LEAST

    policy = Policy.read(args.policy) if args.policy else Policy()
    min_count = LEAST if args.min_count is None else args.min_count
    if min_count < 0:
        raise InputError(
            f"--min-count {min_count}", "a whole number of at least 0", "give 10, or 0 for all"
        )

    return policy, max(min_count, policy.outbound.min_count)


def _preview(args: Namespace, document: Config, lines: list[str]) -> int:
    """Show what would leave, and write it if requested."""
    from medfl.partner.statistics import encoded

    if args.out is None:
        lines += ["", "Nothing was written; --out FILE writes exactly this."]
    else:
        from medfl.storage import write_atomic

        write_atomic(args.out, encoded(document))
        lines += ["", f"written: {args.shown_file}"]

    return show(args, document, lines)


def _fingerprint(args: Namespace) -> int:
    if (args.bundle is None) == (args.images is None):
        raise InputError(
            "medfl site fingerprint of a bundle and --images, or of neither",
            "one of both: a bundle with --data DIR, or --images DIR --masks DIR",
            "see medfl site fingerprint --help",
        )

    if args.out:
        _check_new_file("--out", args.out)

    _check_epsilon("--epsilon", args.epsilon)
    policy, least = _rules(args)
    epsilon = args.epsilon or policy.outbound.fingerprint_epsilon or 0.0
    # By the keeper, beforehand: the folder has the accounts of everything that a site releases
    account = _charged(args, policy, epsilon) if args.folder and epsilon else []
    bundles = [args.bundle] if args.bundle else []
    hold(args, Use(bundles=bundles, file="out"))
    from medfl.problem import fingerprint

    progress = sys.stderr.isatty()
    if args.bundle is None:
        empty, cases = of_folder(args, progress)
    else:
        from medfl.bundle.open import notes_on_images

        problem = _opened(args, policy).bundle
        for line in notes_on_images(problem):
            log(f"note, for you alone: {line}")

        empty, cases = fingerprint.of_bundle(problem)

    released = fingerprint.gather(empty, cases, least, epsilon, progress=progress)
    lines = fingerprint.text(released, least, epsilon)
    return _preview(args, released.document(), [*lines, *account])


def _charged(args: Namespace, policy: Policy, epsilon: float) -> list[str]:
    """Charge a written fingerprint to the account of its images; return the line about it."""
    from medfl.policy.privacy import Account, account_file

    folder = args.images or args.data
    if folder is None:
        raise InputError("--folder without --data", "images whose account is charged", "name them")

    account = Account.open(account_file(args.folder, str(folder)), policy.outbound.delta)
    if args.out:
        account.add_fingerprint(epsilon)

    return [f"account: {account.words()}"]


def _check_epsilon(flag: str, epsilon: float | None) -> None:
    if epsilon is not None and not 0 < epsilon < 100:
        raise InputError(
            f"{flag} {epsilon:g}", "epsilon, above 0 and below 100", f"give for example {flag} 1"
        )


def of_folder(args: Namespace, progress: bool) -> tuple[Fingerprint, Cases]:
    """Return an empty fingerprint for the folders of `add_pairs`, and their training cases."""
    from medfl.starter import starter

    names = parse_names(args.classes)
    survey = starter.survey(args.images, args.masks, names=names, progress=progress)
    if survey.kind == "labelled":
        raise InputError(
            f"{args.images} without masks", "a folder of images with masks", "add --masks DIR"
        )

    return of_survey(survey)


def of_survey(survey: Survey) -> tuple[Fingerprint, Cases]:
    """Return an empty fingerprint for the contents of a folder, and its training and validation cases."""
    from medfl.data import Fingerprint
    from medfl.datasets import own

    values = survey.mask_values or range(len(survey.classes))
    classes = dict(zip(values, survey.classes, strict=True))
    del classes[0]  # the background is no structure
    folder = Path(survey.folder)
    dataset = own.with_masks(folder, survey.images, survey.masks)
    cases = []
    for record, section in own.sections_of(folder, dataset, survey.group_by):
        # a plan that has seen the test images would make their scores too good
        if section != "test":
            cases.append((record.image, record.mask))

    empty = Fingerprint(
        survey.kind,
        survey.channels,
        survey.images,
        survey.masks,
        classes,
        survey.channel_titles,
        survey.own_depth,
    )
    return empty, cases


def _collect(args: Namespace) -> int:
    if args.bundle is not None or args.data is not None:
        raise InputError(
            "--collect with a bundle or --data", "it reads what sites have written", "drop them"
        )

    from medfl.partner.heterogeneity import draw, read

    federation = read(args.collect)
    lines = federation.table()
    if args.out:
        draw(federation, args.out)
        lines += ["", f"picture: {args.out}"]

    return show(args, federation.as_dict(), lines)


def _audit(args: Namespace) -> int:
    from medfl.cli.audit_log import text
    from medfl.policy import audit

    log = audit.verify(args.file, args.noted)
    show(args, log.as_dict(), text(log))
    log.require()

    return 0


def _check_new_file(flag: str, target: Path) -> None:
    """Raise an InputError if a file already exists, or its folder does not."""
    if target.exists() or not target.resolve().parent.is_dir():
        raise InputError(
            f"{flag} {target}",
            "a new file, in a folder that exists",
            "give a new name, or make the folder",
        )
