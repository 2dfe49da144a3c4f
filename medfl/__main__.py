"""`python -m medfl`."""

from medfl.cli import command

command()
