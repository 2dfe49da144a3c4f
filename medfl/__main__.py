"""`python -m medfl`."""

from __future__ import annotations

from medfl.cli import command

command()
