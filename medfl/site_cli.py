"""The verb `medfl site`: what a clinical partner runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from medfl import terminal
from medfl.errors import InputError

_EXAMPLES = """\
examples
  medfl site inspect path/to/bundle
      what would run, what would leave, and what is refused (exit code 2)
  medfl site inspect path/to/bundle --write-policy policies/bundle.yaml
      accept it as it is: from now on every file has to be this one
  medfl site inspect path/to/bundle --policy policies/bundle.yaml
      still the same? before every run"""


def add(verbs: Any, parser_class: type, verb: Callable[..., Any], show: Callable[..., int]) -> None:
    """Add the verb to the command line.

    Args:
        verbs: where to.
        parser_class: of its actions.
        verb: adds one verb with the flags that all have.
        show: prints a result, as JSON or as text.
    """
    text = "for a clinical partner: what would run here, and what would leave"
    site = verbs.add_parser("site", help=text, description=text[0].upper() + text[1:] + ".")
    actions = site.add_subparsers(title="actions", metavar="ACTION", required=True, parser_class=parser_class)

    def inspect(options: Any) -> int:
        return _inspect(options, show)

    inspected = verb(actions, "inspect", "read a bundle without running anything of it", inspect, _EXAMPLES)
    inspected.add_argument("bundle", metavar="BUNDLE", help="name of a shipped bundle, or the folder of any")
    inspected.add_argument("--policy", type=Path, metavar="FILE", help="the site's policy; default: nothing extra")
    inspected.add_argument(
        "--write-policy", type=Path, metavar="FILE",
        help="if accepted, write a policy that pins every file, with the words and limits of --policy",
    )  # fmt: skip


def _inspect(options: Any, show: Callable[..., int]) -> int:
    from medfl.configuration import shipped_folders
    from medfl.inspection import inspect
    from medfl.policy import Policy

    policy = Policy.read(options.policy) if options.policy is not None else Policy()
    folder = shipped_folders().get(options.bundle, Path(options.bundle))
    target = options.write_policy
    if target is not None:
        _can_write(target, folder)
    found = inspect(folder, policy)
    document = found.as_dict()
    if target is not None and found.accepted:
        from medfl.storage import write_atomic

        write_atomic(target, found.policy(policy).text().encode())
        document["policy_written"] = str(target)
    show(options, document, lambda: "\n".join(_text(document, terminal.width())))
    found.require()
    return 0


def _can_write(target: Path, folder: Path) -> None:
    if target.exists():
        raise InputError(f"--write-policy {target}", "a new file: a policy is never overwritten", "give another name")
    if not target.resolve().parent.is_dir():
        raise InputError(f"--write-policy {target}", "a file in a folder that exists", "make the folder")
    if target.resolve().is_relative_to(folder.expanduser().resolve()):
        raise InputError(f"--write-policy {target}", "a place outside of the bundle", "choose another folder")


def _text(document: Mapping[str, Any], width: int) -> list[str]:
    from medfl.untrusted import shown

    pinned = "every file is as the policy says" if document["pinned"] else "not pinned: --policy names no files"
    lines = [f"bundle {shown(document['bundle'])} in {shown(document['folder'], 200)}", "", f"Files ({pinned})"]
    rows = [[shown(f["path"]), f["kind"], str(f["bytes"]), f["sha256"]] for f in document["files"]]
    lines += terminal.table(["file", "kind", "bytes", "sha256"], rows, max(width, 132)) if rows else ["none"]
    for title, what in (
        ("Components that would be made (_target_)", document["targets"]),
        (f"What its {document['expressions']} expressions and its imports use", document["uses"]),
    ):
        lines += ["", title]
        counts = ", ".join(f"{shown(name)} {count}" for name, count in what.items())
        lines += terminal.hanging("  ", counts or "nothing", width)
    lines += ["", "Never run by medfl: statements for `monai.bundle run`"]
    lines += [f"  {line}" for line in document["statements"]] or ["  none"]
    lines += ["", "Allowed by the policy's words"]
    for item in document["allowed_by_policy"]:
        lines.append(f"  {item['word']}: {item['what']}, {item['times']} times ({item['meaning']})")
    lines += [] if document["allowed_by_policy"] else ["  none"]
    lines += ["", "Data that would be read"]
    lines += [f"  {shown(file)}: dataset_dir is {text}" for file, text in document["data"].items()]
    lines += ["  the folder given with --data takes its place; nothing else is known without running anything"]
    lines += ["", "What would leave"]
    for text in document["leaves"]:
        lines += terminal.hanging("  ", text, width)
    if "policy_written" in document:
        lines += ["", f"policy: {document['policy_written']}"]
    count = len(document["refused"])
    lines += ["", f"REFUSED, for {count} reason{'s' if count > 1 else ''}" if count else "ACCEPTED"]
    for refusal in document["refused"]:
        where = f"{refusal['file']}: {refusal['id']}" if refusal["id"] else refusal["file"]
        lines.append(f"  {shown(where)}: {refusal['why']}")
    return lines
