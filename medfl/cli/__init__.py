"""The verbs: what a flag is called and what is printed; no arithmetic."""

from medfl.cli.verbs import command as command, main as main
