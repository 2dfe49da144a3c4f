"""Flags shared by verbs: what is run, over which sites, how it trains, and on which machine."""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from medfl.core import (
    COMPUTING,
    OF_PROTOCOL,
    ROBUSTNESS,
    SETTINGS,
    SITES,
    TRAINING,
    Document,
    InputError,
    check_limits,
    present,
    split_commas,
)
from medfl.storage import weights_file


# argparse's parsers and groups have no other common base
class Flags(argparse._ActionsContainer):
    """Arguments of a verb, or of a group of its flags."""

    def add_argument_group(self, *names: Any, **settings: Any) -> Group:
        """Add a group of flags with a title."""
        group = Group(self, *names, **settings)
        self._action_groups.append(group)
        return group

    def add_text(self, name: str, metavar: str, text: str, **more: Any) -> None:
        """Add a flag or positional argument for text."""
        self.add_argument(name, metavar=metavar, help=text, **more)

    def add_number(self, flag: str, metavar: str, text: str, kind: type = int) -> None:
        """Add a flag for a number; its range is checked where it is used."""

        def read(text: str) -> int | float:
            """Return the number of a flag's text; InputError if it has none."""
            try:
                value: int | float = kind(text)
            except ValueError as error:
                allowed = "a whole number" if kind is int else "a number"
                raise InputError(
                    f"{flag} {text}", f"{flag} takes {allowed}", "write it in digits"
                ) from error

            return value

        self.add_text(flag, metavar, text, type=read)

    def add_path(
        self,
        name: str,
        metavar: str,
        text: str,
        kind: Callable[[str], Path] = Path,
        **more: Any,
    ) -> None:
        """Add a flag or positional argument for a path, which must exist if `existing`."""
        self.add_text(name, metavar, text, type=kind, **more)

    def add_switch(self, flag: str, text: str) -> None:
        """Add a boolean flag."""
        self.add_argument(flag, action="store_true", help=text)

    def add_examinations(self) -> None:
        """Add the flags that ask for more scores than a run needs."""
        self.add_switch(
            "--cross-site",
            "score each site's own model at every site too (cross_site.md, a heat map in the report)",
        )
        self.add_switch(
            "--contribution",
            "estimate what each site contributes to each evaluated round (contribution.csv, a table in the report)",
        )

    def add_what(self, option_text: str, *, data: bool = True) -> None:
        """Add the flags for what is trained, and with `data` on what, except the method."""
        self.add_text(
            "--set", "OPTION=VALUE", option_text, dest="options", action="append", default=[]
        )
        self.add_config(
            "override a value of the bundle's configuration, e.g. network=small_cnn or image_size=64; may be repeated",
        )
        self.add_preset()
        text = (
            "folder of the images, or phantom for synthetic ones; default: the bundle's folder below "
            "$MEDFL_DATA if there is one, else phantom"
        )

        if data:
            self.add_text("--data", "DIR|phantom", text)

    def add_preset(self) -> None:
        """Add the flag for presets of the bundle's protocol."""
        self.add_text(
            "--preset",
            "NAME",
            "apply a named preset of the bundle's protocol (medfl bundles NAME); may be repeated",
            dest="presets",
            action="append",
        )

    def add_config(self, text: str) -> None:
        """Add the flag for ids of a bundle's configuration."""
        self.add_text("--config", "ID=VALUE", text, action="append", default=[])

    def add_settings(self, *names: str) -> None:
        """Add the flags of settings, as `medfl.core.settings` declares them."""
        for declared in (SETTINGS[name] for name in names):
            if declared.kind is bool:
                # None, not False: what is not given comes from the protocol
                self.add_argument(
                    declared.flag, action="store_true", default=None, help=declared.help
                )
            elif declared.kind is str:
                self.add_text(declared.flag, declared.metavar, declared.help)
            else:
                self.add_number(declared.flag, declared.metavar, declared.help, declared.kind)

    def add_columns(self, **roles: str) -> None:
        """Add a flag for each column of a table of labels: role -> contents of the column."""
        for role, content in roles.items():
            self.add_text(
                f"--{role}-column",
                "NAME",
                f"column of the table with {content}; default: recognised by its name",
            )

    def add_sites(self) -> Any:
        """Add the flags about the sites, except their partition; return their group."""
        group = self.add_argument_group("sites")
        group.add_number("--sites", "N", f"number of sites{OF_PROTOCOL}")
        group.add_settings(*names_of_group(SITES))
        return group

    def add_partition(self, action: str = "store") -> None:
        """Add the flag for a partition, or for several."""
        self.add_text(
            "--partition",
            "SPEC",
            "how images are split over sites: iid, dirichlet:BETA, classes:C, shots:N,K,STD, centre (one "
            "site per centre; centre:NAME=TRAIN/TEST,... limits the images of a centre), "
            "counts:TRAIN/TEST,... (per site; TRAIN includes validation, 0: a site that only tests; TEST may be "
            "all), size (quantiles of the image size), stratified (the same shares of classes or findings), "
            "quantile or range (parts of the predicted number, in ascending order) or file:PATH.csv"
            + ("; may be repeated" if action == "append" else ""),
            action=action,
            type=_partition,
        )

    def add_training(self, seed: bool = True) -> Any:
        """Add the flags about training; return their group."""
        group = self.add_argument_group("training")
        group.add_settings(*(name for name in names_of_group(TRAINING) if seed or name != "seed"))
        return group

    def add_machine(self) -> Any:
        """Add the flags about the machine that can change a result; return their group."""
        group = self.add_argument_group("machine")
        group.add_settings("device", *names_of_group(COMPUTING), "threads")
        return group

    def add_runtime(self) -> None:
        """Add the flag that says what runs the sites."""
        self.add_text(
            "--runtime",
            "simulator|monai-fl|flare",
            "what runs the sites, with the same results: worker processes, MONAI FL's ClientAlgo in this "
            "process, or a job on NVIDIA FLARE's simulator",
            default="simulator",
        )

    def add_robustness(self) -> Any:
        """Add the flags about sites that fail or send wrong messages; return their group."""
        group = self.add_argument_group("robustness")
        group.add_settings(*names_of_group(ROBUSTNESS))
        group.add_number(
            "--min-replies",
            "N",
            "continue without failed sites, with a warning, while at least N reply; default: all must reply",
        )
        group.add_number(
            "--deadline",
            "SECONDS",
            "time limit for a round, in seconds; with --runtime flare",
            float,
        )

        return group

    def add_trust(self) -> None:
        """Add the flag that allows bundles and run folders to run what inspection does not accept."""
        self.add_switch(
            "--trust",
            "run code that inspection refuses (medfl site inspect), in the bundle or in a custom method or runtime "
            "that a file names; it runs with your rights",
        )
        self.add_walls()

    def add_walls(self) -> None:
        """Add the flags that sandbox shipped bundles too, or none."""
        self.add_switch(
            "--sandbox",
            "sandbox shipped bundles too: no network, no programs, writes to the output folder only; other bundles "
            "always are, on Linux with Landlock",
        )
        self.add_switch(
            "--no-sandbox",
            "do not sandbox a bundle that is not shipped: it runs with your rights",
        )

    def add_jobs(self, text: str) -> None:
        """Add the flag for a number of processes, None for as many as fit."""
        self.add_text("--jobs", "auto|N", f"{text}; default: auto", type=_jobs, default="auto")

    def add_machine_and_output(self, content: str) -> Any:
        """Add the machine flags of a verb with many runs, and --out; return the group of outputs."""
        of_machine = self.add_machine()
        of_machine.add_trust()
        of_machine.add_jobs(
            "number of concurrent runs, on a GPU at most as many as fit in memory; does not change results",
        )
        output = self.add_argument_group("output")
        output.add_path(
            "--out",
            "DIR",
            f"folder of {content}; what is there already is not run again",
            required=True,
        )
        self.set_defaults(goes_on_by="; the same command goes on")

        return output

    def add_quiet(self) -> None:
        """Add the flag that silences progress messages."""
        self.add_switch("--quiet", "print errors only")

    def add_bundle(self, **more: Any) -> None:
        """Add the argument that names a bundle."""
        self.add_text(
            "bundle",
            "BUNDLE",
            "name of a shipped bundle, or the folder of any bundle",
            **{"type": bundle_name, **more},
        )


class Group(Flags, argparse._ArgumentGroup):
    """Flags with a title."""


def names_of_group(*groups: str) -> list[str]:
    """Return the names of the settings of some groups."""
    return [name for name, declared in SETTINGS.items() if declared.group in groups]


def given_settings(args: Namespace, *more: str) -> Document:
    """Return the given settings among those of a verb, and `more`: name -> value."""
    values = {name: getattr(args, name, None) for name in (*SETTINGS, *more)}
    check_limits(values)
    # a file that is not there is told before anything is opened
    if values["init"]:
        weights_file(values["init"])
    return present(values)


def given_columns(args: Namespace) -> dict[str, str]:
    """Return role -> column of the flags of `add_columns` that were given."""
    roles = {}
    for name, value in vars(args).items():
        if name.endswith("_column") and value:
            roles[name.removesuffix("_column")] = value

    return roles


def bundle_name(text: str) -> str:
    """Return a bundle's name or folder as given; InputError if there is no such bundle."""
    from medfl.bundle.files import find

    find(text)
    return text


def bundle_folder(text: str) -> Path:
    """Return a bundle's folder, which need not define training; InputError if there is none."""
    from medfl.bundle.files import shipped_folders

    folder = shipped_folders().get(text) or Path(text)
    if not folder.expanduser().is_dir():
        raise InputError(
            f"bundle {text}",
            "the folder of a MONAI bundle, or a shipped bundle's name",
            "check the path",
        )
    return folder


def existing(text: str) -> Path:
    """Return the path of a file or folder; InputError if it does not exist."""
    path = Path(text)
    if not path.expanduser().exists():
        raise InputError(f"{text} is not there", "a file or folder", "check the path")
    return path


def run_folder(text: str) -> Path:
    """Return the folder of a run; InputError if it contains none."""
    if not (Path(text) / "run.json").is_file():
        raise InputError(
            f"{text} holds no run (no run.json)", "a folder that medfl run wrote", "as runs/NAME"
        )
    return Path(text)


def _partition(text: str) -> str:
    from medfl.data.partition.rules import parse

    parse(text)
    return text


def _jobs(text: str) -> int | None:
    if text == "auto":
        return None
    if not (text.isascii() and text.isdecimal() and int(text)):  # isdigit also accepts ²
        raise InputError(
            f"--jobs {text}", "auto or a whole number of at least 1", "give for example --jobs 2"
        )
    return int(text)


def parse_pairs(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """Return name -> value of texts NAME=VALUE."""
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InputError(
                f"{flag} {text}", f"{flag} takes NAME=VALUE", "write it with an equals sign"
            )
        values[name] = value

    return values


def parse_names(text: str) -> list[str]:
    """Return the names in a list with commas."""
    return list(filter(None, split_commas(text)))


def as_flag_text(value: Any) -> str:
    """Return a value as typed on the command line."""
    if isinstance(value, str):
        return value

    return json.dumps(value)


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse the flag that lists seeds, each only once."""
    try:
        return tuple(dict.fromkeys(map(int, text.split(","))))
    except ValueError as error:
        raise InputError(
            f"--seeds {text}", "whole numbers, as 0,1,2", "write only digits and commas"
        ) from error
