"""The published tables as data, and the runs that reproduce them."""

from pathlib import Path

from medfl.core import InputError

ROOT = Path(__file__).parent


def names() -> tuple[str, ...]:
    """Return the names of the tables."""
    return tuple(
        sorted(path.relative_to(ROOT).with_suffix("").as_posix() for path in ROOT.glob("*/*.yaml"))
    )


def check_name(key: str) -> None:
    """Raise an InputError if there is no such table."""
    if key not in names():
        raise InputError(f"--paper {key}", f"tables are {', '.join(names())}", "choose one of them")
