"""Flags that verbs share: what is run, over which sites, how it trains, and on what machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from medfl.core.errors import InputError


def reader(kind: type[int] | type[float], flag: str) -> Callable[[str], int | float]:
    """Return a reader of a flag's number; its range is checked where the run is planned."""

    def read(text: str) -> int | float:
        try:
            return kind(text)
        except ValueError as error:
            allowed = "a whole number" if kind is int else "a number"
            raise InputError(f"{flag} {text}", f"{flag} takes {allowed}", "correct it") from error

    return read


def number(group: Any, flag: str, metavar: str, text: str, kind: type[int] | type[float] = int) -> None:
    """Add a flag that takes a number."""
    group.add_argument(flag, type=reader(kind, flag), metavar=metavar, help=text)


def what(group: Any, option_text: str) -> None:
    """Add the flags that say what is trained on what, but for the method."""
    group.add_argument("--set", dest="options", action="append", default=[], metavar="OPTION=VALUE", help=option_text)
    group.add_argument(
        "--config", action="append", default=[], metavar="ID=VALUE",
        help="id of the bundle's configuration, e.g. network=small_cnn or image_size=64; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--preset", dest="presets", action="append", metavar="NAME",
        help="values of the bundle's protocol under this name (medfl bundles NAME); may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--data", metavar="DIR|phantom",
        help="folder of the images, or drawn ones; default: a folder below $MEDFL_DATA that the bundle knows, else "
        "phantom",
    )  # fmt: skip


def sites(parser: Any) -> Any:
    """Add the flags about the sites, but for their partition; return their group."""
    group = parser.add_argument_group("sites")
    number(group, "--sites", "N", "number of sites")
    number(group, "--cohort", "FRACTION", "fraction of the sites in each round", float)
    return group


def partition(group: Any, action: str = "store") -> None:
    """Add the flag for a partition, or for several."""
    group.add_argument(
        "--partition", action=action, metavar="SPEC",
        help="which site holds which image: iid, dirichlet:BETA, classes:C, shots:N,K,STD, centre (where it was "
        "taken; centre:NAME=TRAIN/TEST,... keeps only so many images of a centre), counts:TRAIN/TEST,... (a site each; "
        "TRAIN includes validation), size (quantiles of the image size) or file:PATH.csv"
        + ("; may be repeated" if action == "append" else ""),
    )  # fmt: skip


def training(parser: Any) -> Any:
    """Add the flags about training, but for seeds; return their group."""
    group = parser.add_argument_group("training")
    number(group, "--rounds", "R", "rounds of broadcast, local training and aggregation")
    number(group, "--local-epochs", "E", "passes over a site's data a round")
    number(group, "--batch-size", "B", "images a step")
    number(group, "--lr", "X", "learning rate of round 1", float)
    number(group, "--lr-decay", "G", "what one round multiplies the learning rate with; 1 keeps it", float)
    number(group, "--eval-every", "N", "rounds between evaluations; 0: after the last only; default 1")
    group.add_argument(
        "--messages", metavar="FORM",
        help="lossless (default), float16, bfloat16, int8, or topk:FRACTION of the changes, the rest sent later",
    )  # fmt: skip
    return group


def machine(parser: Any) -> Any:
    """Add the flags about the machine that can change a result; return their group."""
    group = parser.add_argument_group("machine")
    group.add_argument("--device", metavar="auto|cpu|cuda[:i]", help="where networks are trained; default cpu")
    computing(group)
    number(group, "--threads", "T", "threads of each worker; default 1; more may change the last bits")
    return group


def computing(group: Any) -> None:
    """Add the flags about how numbers are computed."""
    group.add_argument("--amp", action="store_true", default=None, help="automatic mixed precision")
    group.add_argument("--tf32", action="store_true", default=None, help="let a GPU round products to TF32")
    group.add_argument("--channels-last", action="store_true", default=None, help="lay images out with channels last")
    group.add_argument("--capture", action="store_true", default=None, help="replay captured training steps on a GPU")
    group.add_argument(
        "--compile", action="store_true", default=None,
        help="compile training steps by TorchInductor: faster for small networks, other last bits",
    )  # fmt: skip
    number(group, "--pack", "N", "capture, and train up to N sites in one step where that is measured to be faster")


def robustness(parser: Any) -> Any:
    """Add the flags about sites that fail, or send what is wrong; return their group."""
    group = parser.add_argument_group("robustness")
    group.add_argument(
        "--aggregation", metavar="RULE",
        help="mean (default); or for methods that keep FedAvg's server half, counting every site the same: median "
        "(stands fewer than half of n sites bad; time n log n; loses what a minority knows), trimmed:FRACTION (stands "
        "that share; loses less), krum:F (stands F of 2F+3 or more; time n^2; learns from one site a round), "
        "multikrum:F (as krum, from n-F-2 sites)",
    )  # fmt: skip
    number(group, "--min-replies", "N", "go on without sites that fail while N reply, and say so; default: all must")
    number(group, "--deadline", "SECONDS", "that the sites have for a round; with --runtime flare", float)
    return group
