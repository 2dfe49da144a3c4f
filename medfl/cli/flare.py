"""The verb `medfl flare`: a run as a job of NVIDIA FLARE."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from medfl.cli import arguments
from medfl.core.errors import InputError
from medfl.core.settings import COMPUTING, SITES

_SIMULATE = """\
The same as medfl run --runtime flare: a process for the server and one for each
site, with the simulator's results bit for bit.

examples
  medfl flare simulate pneumonia --data phantom --sites 2 --rounds 2"""

_POC = """\
The same as medfl run --runtime flare-poc: certificates are made, a FLARE server
and its sites are started on this machine, and the job is submitted to them.

examples
  medfl flare poc pneumonia --data phantom --sites 2 --rounds 2"""

_EXPORT = """\
For sites with images of their own. Each has the same bundle, and has joined with
medfl site serve; the job carries numbers and names, no code and no path.

examples
  medfl flare export hippocampus --sites north,south --method scaffold --rounds 50 --out jobs
      then, with the operator's own kit: nvflare job submit -j jobs/medfl-...
  medfl flare export hippocampus --sites north,south --rehearsal --rounds 2 --out rehearsal
      every site takes drawn images: medfl data make hippocampus --out DIR
  medfl flare export hippocampus --sites north,south --method scaffold --rounds 80 --resume --out more
      go on with what the server and the sites have kept"""


def add(
    verbs: Any,
    parser_class: type,
    verb: Callable[..., Any],
    show: Callable[..., int],
    run_flags: Callable[[Any], None],
    run: Callable[[Any], int],
    pairs: Callable[[str, Sequence[str]], Mapping[str, str]],
) -> None:
    """Add the verb to the command line.

    Args:
        verbs: where to.
        parser_class: of its actions.
        verb: adds one verb with the flags that all have.
        show: prints a result, as JSON or as text.
        run_flags: adds the flags of `medfl run`.
        run: executes it.
        pairs: (flag, NAME=VALUE texts) -> name -> value.
    """
    text = "run or write the NVIDIA FLARE job of a run"
    flare = verbs.add_parser("flare", help=text, description=text[0].upper() + text[1:] + ".")
    actions = flare.add_subparsers(title="actions", metavar="ACTION", required=True, parser_class=parser_class)
    for name, runtime, text, examples in (
        ("simulate", "flare", "run on FLARE's simulator on this machine", _SIMULATE),
        ("poc", "flare-poc", "run on a FLARE federation with certificates on this machine", _POC),
    ):
        action = verb(actions, name, text, run, examples)
        run_flags(action)
        action.set_defaults(runtime=runtime)

    def export(options: Any) -> int:
        return _export(options, show, pairs)

    _export_flags(
        verb(actions, "export", "write the job of a run over sites with images of their own", export, _EXPORT)
    )


def _export_flags(export: Any) -> None:
    export.add_argument("bundle", metavar="BUNDLE", help="name of a shipped bundle, or the folder of any")
    what = export.add_argument_group("what")
    what.add_argument("--method", metavar="NAME", help="a shipped method (medfl methods); default fedavg")
    what.add_argument(
        "--set", dest="options", action="append", default=[], metavar="OPTION=VALUE", help="of the method"
    )
    what.add_argument(
        "--config", action="append", default=[], metavar="ID=VALUE",
        help="id of the bundle's configuration that the sites permit, as image_size=64; may be repeated",
    )  # fmt: skip
    what.add_argument("--preset", dest="presets", action="append", metavar="NAME", help="of the bundle's protocol")
    what.add_argument("--rehearsal", action="store_true", help="with drawn images at all sites")
    sites = export.add_argument_group("sites")
    sites.add_argument("--sites", required=True, metavar="A,B,...", help="their names in the federation")
    arguments.add(sites, *arguments.of_group(SITES))
    arguments.training(export)
    arguments.robustness(export)
    machine = export.add_argument_group("machine", "each site trains on the device that it chooses itself")
    arguments.add(machine, *arguments.of_group(COMPUTING), "threads")
    output = export.add_argument_group("output")
    output.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder for the job")
    output.add_argument("--resume", action="store_true", help="the server goes on with this run, which it has already")


def _export(options: Any, show: Callable[..., int], pairs: Callable[[str, Sequence[str]], Mapping[str, str]]) -> int:
    set_, config = pairs("--set", options.options), pairs("--config", options.config)
    sites = [name.strip() for name in options.sites.split(",") if name.strip()]
    if len(set(sites)) != len(sites) or not sites:
        raise InputError(f"--sites {options.sites}", "different names, as north,south", "name each site once")
    from medfl.flare.offer import export

    given = arguments.requested(options, "method", "presets")
    document = export(
        options.bundle,
        sites,
        options.out,
        options=set_,
        config=config,
        requested=given,
        rehearsal=options.rehearsal,
        resume=options.resume,
        min_replies=options.min_replies,
        deadline=options.deadline,
    )
    return show(options, document, lambda: _text(document))


def _text(document: Mapping[str, Any]) -> str:
    lines = [f"job: {document['job']}", f"sites: {', '.join(document['sites'])}", f"run: {document['run_hash'][:16]}"]
    lines += [f"bundle: {document['bundle']} ({document['bundle_sha256'][:16]})", "submit it with the operator's kit:"]
    return "\n".join([*lines, f"  nvflare job submit -j {document['job']}"])
