"""A site's audit log as `medfl site audit` prints it."""

from __future__ import annotations

from medfl.core import Config, printable, tables, terminal
from medfl.policy.audit import VerifiedLog


def text(log: VerifiedLog) -> list[str]:
    """Return a log as a table."""
    head = ["time", "site", "round", "", "what", "bytes", "tensors", "sha256", "content"]
    rows = [
        [
            *(
                printable(entry.get(key, "-"), 40)
                for key in ("time", "site", "round", "direction", "kind", "bytes", "tensors")
            ),
            printable(str(entry.get("sha256", "-"))[:12]),
            _content(entry),
        ]
        for entry in log.entries
    ]

    lines = [f"{log.lines} lines read; the last {len(rows)} of them:"]
    if rows:
        lines += tables.text_table(head, rows, spare=["site"])

    lines += ["", *(f"note: {note}" for note in log.notes)]
    words = [entry["privacy"] for entry in log.entries if isinstance(entry.get("privacy"), str)]
    if words:
        lines += terminal.hanging_indent("privacy: ", printable(words[-1], 1000))
    lines.append(f"last line: sha256 {log.last or '-'}")
    count = len(log.problems)
    lines.append(f"BROKEN in {count} place{'s' if count > 1 else ''}" if count else "INTACT")

    return lines + [f"  {problem}" for problem in log.problems]


def _content(entry: Config) -> str:
    """Return a line's groups and numbers, or why it was refused."""
    if "reason" in entry:
        return printable(entry["reason"], 300)

    parts = []
    groups = entry.get("groups")
    numbers = entry.get("numbers")
    for name, about in groups.items() if isinstance(groups, dict) else ():
        norm = about.get("norm") if isinstance(about, dict) else None
        parts.append(
            printable(name, 40) + (f" (norm {printable(norm, 20)})" if norm is not None else "")
        )

    for name, value in numbers.items() if isinstance(numbers, dict) else ():
        parts.append(
            f"{printable(name, 40)} {value:.6g}"
            if isinstance(value, int | float)
            else printable(name, 40)
        )

    return ", ".join(parts) or "-"
