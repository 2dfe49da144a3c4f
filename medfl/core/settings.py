"""The settings of a run, each declared once: its type, default, limits, flag and help.

From these declarations come the fields of `Run` and of `runs.plan.Request`, the flags of the verbs, what a record
leaves out, what `request_of` repeats, and what a site of a FLARE job accepts. `GeneralSettings` have the same type in a
request as in a run; `ProtocolSettings` come from the bundle's protocol where a request leaves them open.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from medfl.core import portable, setting_values
from medfl.core.declared import Declared, declared
from medfl.core.errors import InputError, did_you_mean

LOSSLESS, MEAN = "lossless", "mean"
TRAINING, MACHINE, COMPUTING, ROBUSTNESS, SITES = "training", "machine", "computing", "robustness", "sites"
_MAX_VALUE = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Setting(Declared):
    """One setting; its flag is its name with dashes.

    Attributes:
        metavar: of the flag, "" for a switch.
        group: of flags in the help.
        later: added after the first release: records leave it out at its default, so that their hashes stay.
        parse: reads a text, and raises an InputError for one that it does not allow; None: any text.
        longest: characters of text.
    """

    metavar: str = ""
    group: str
    later: bool = False
    parse: Callable[[str], object] | None = None
    longest: int = 200

    @property
    def flag(self) -> str:
        """The flag."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def kind(self) -> type:
        """int, float, str or bool."""
        return self.kinds[0]

    @property
    def optional(self) -> bool:
        """Whether a run may have None."""
        return NoneType in self.kinds

    @property
    def allowed(self) -> str:
        """Its choices, or its kind and limits in words."""
        if self.choices is not None:
            return " or ".join(self.choices)

        limits = {"of at least": self.minimum, "above": self.above, "at most": self.maximum}
        bounds = " and ".join(f"{words} {limit:g}" for words, limit in limits.items() if limit is not None)
        kind = "a whole number" if self.kind is int else "a number"
        return f"{kind} {bounds}".strip()

    @property
    def schema(self) -> dict[str, Any]:
        """The allowed values, as JSON Schema."""
        bounds = {"minimum": self.minimum, "exclusiveMinimum": self.above, "maximum": self.maximum}
        limits = {name: value for name, value in bounds.items() if value is not None}
        kinds: Mapping[type, dict[str, Any]] = {
            bool: {"type": "boolean"},
            str: {"type": "string", "maxLength": self.longest},
            int: {"type": "integer", **limits},
            float: {"type": "number", **limits},
        }
        schema = kinds[self.kind]

        return {"anyOf": [{"type": "null"}, schema]} if self.optional else schema

    def check(self, value: Any) -> None:
        """Raise an InputError for a value of its kind that is beyond its limits or not of its form; None is neither."""
        if value is None:
            return

        if not self.within_limits(value):
            text = value if isinstance(value, str) else f"{value:g}"
            advice = f"change the value of {self.flag}"
            if self.choices is not None:
                advice = did_you_mean(text, self.choices, "choose one")
            raise InputError(f"{self.flag} {text}", self.allowed, advice)

        if self.parse is not None:
            self.parse(value)


def setting(help: str, metavar: str = "", *, group: str, default: Any = dataclasses.MISSING, **form: Any) -> Any:
    """Declare a setting; without a default it comes from the bundle's protocol."""
    return declared(default, help, metavar=metavar, group=group, **form)


@dataclass(frozen=True, kw_only=True)
class GeneralSettings:
    """Settings that have a default."""

    seed: int = setting(
        "seed of everything random; default 0", "S", group=TRAINING, default=0, minimum=0, maximum=2**63 - 1
    )
    device: str = setting(
        "where networks are trained; default cpu", "auto|cpu|cuda[:i]",
        group=MACHINE, default="cpu", parse=setting_values.device,
    )  # fmt: skip
    amp: bool = setting("automatic mixed precision", group=COMPUTING, default=False)
    tf32: bool = setting("let a GPU round products to TF32", group=COMPUTING, default=False, later=True)
    channels_last: bool = setting("lay images out with channels last", group=COMPUTING, default=False, later=True)
    capture: bool = setting("replay captured training steps on a GPU", group=COMPUTING, default=False, later=True)
    compile: bool = setting(
        "compile training steps by TorchInductor: faster for small networks, other last bits",
        group=COMPUTING, default=False, later=True,
    )  # fmt: skip
    portable: bool = setting(
        "compute on one CPU thread by kernels that x86 processors since about 2015 have, for the same bits on each",
        group=COMPUTING, default=False, later=True,
    )  # fmt: skip
    pack: int = setting(
        "capture, and train up to N sites in one step where that is measured to be faster", "N",
        group=COMPUTING, default=1, later=True, minimum=1, maximum=_MAX_VALUE,
    )  # fmt: skip
    threads: int = setting(
        "threads of each worker; default 1; more may change the last bits", "T",
        group=MACHINE, default=1, minimum=1, maximum=_MAX_VALUE,
    )  # fmt: skip
    eval_every: int = setting(
        "rounds between evaluations; 0: after the last only; default 1", "N",
        group=TRAINING, default=1, minimum=0, maximum=2**63 - 1,
    )  # fmt: skip
    score_trained: bool = setting(
        "at the end score the global model also after one more local training at each site (methods judged by it)",
        group=TRAINING, default=False, later=True,
    )  # fmt: skip
    init: str = setting(
        "weights to begin with, of the same network; default: drawn from the seed", "FILE|run:DIR|bundle:DIR",
        group=TRAINING, default="", later=True,
    )  # fmt: skip
    metrics: str = setting(
        "what segmented test items are scored by beside Dice: all (default), or dice (Dice alone), hd95, surface_dice, "
        "either with a structure's name (hd95_liver), joined by commas", "NAMES",
        group=TRAINING, default=setting_values.ALL, later=True, parse=setting_values.metrics,
    )  # fmt: skip
    messages: str = setting(
        "lossless (default), float16, bfloat16, int8, or topk:FRACTION of the changes, the rest sent later", "FORM",
        group=TRAINING, default=LOSSLESS, later=True, parse=setting_values.messages,
    )  # fmt: skip
    aggregation: str = setting(
        "mean (default); or for methods that keep FedAvg's server half: clip:C (the mean of changes of at most this "
        "norm; clip:auto: the round's middle one); or, counting every site the same, median (tolerates fewer than n/2 "
        "faulty sites; time n log n; loses what a minority knows), trimmed:FRACTION (tolerates that share; loses "
        "less), krum:F (tolerates F faulty ones of 2F+3 or more; time n^2; learns from one site a round), multikrum:F "
        "(as krum, from n-F-2 sites)", "RULE",
        group=ROBUSTNESS, default=MEAN, later=True, parse=setting_values.aggregation,
    )  # fmt: skip
    channel_drop: float = setting(
        "probability that a channel of a training image is set to zero, all but one at most; for runs whose sites lack "
        "channels", "P",
        group=SITES, default=0.0, later=True, minimum=0, maximum=0.9,
    )  # fmt: skip
    unlabelled: str = setting(
        "sites that train without labels, joined by commas; labels of theirs are hidden, images may have none", "SITES",
        group=SITES, default="", later=True, parse=setting_values.site_names,
    )  # fmt: skip
    max_share: float | None = setting(
        "largest share of a round's weight for one site: larger ones are cut down to it; default: no cap, but across "
        "machines with three or more sites, one with over half of the weight ends the run", "F",
        group=ROBUSTNESS, default=None, later=True, above=0, maximum=1,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ProtocolSettings:
    """Settings whose default is the bundle's protocol."""

    cohort: float = setting("fraction of the sites in each round", "FRACTION", group=SITES, above=0, maximum=1)
    rounds: int = setting(
        "rounds of broadcast, local training and aggregation", "R", group=TRAINING, minimum=1, maximum=_MAX_VALUE
    )
    local_epochs: int = setting("passes over a site's data a round", "E", group=TRAINING, minimum=1, maximum=_MAX_VALUE)
    batch_size: int = setting("images a step", "B", group=TRAINING, minimum=1, maximum=_MAX_VALUE)
    lr: float | None = setting("learning rate of round 1", "X", group=TRAINING, above=0)
    lr_decay: float = setting(
        "what one round multiplies the learning rate with; 1 keeps it", "G", group=TRAINING, above=0, maximum=1
    )
    patience: int = setting(
        "rounds without a better validation metric after which a run ends; default, 0: it has all its rounds", "N",
        group=TRAINING, default=0, later=True, minimum=0, maximum=_MAX_VALUE,
    )  # fmt: skip
    decay_per: str = setting(
        "what --lr-decay is of: a round (default), or a local epoch, counted over all rounds", "round|epoch",
        group=TRAINING, default="round", later=True, choices=("round", "epoch"),
    )  # fmt: skip
    site_weights: str = setting(
        "how sites count where a method averages by number of images: samples (default), or uniform: all the same",
        "samples|uniform", group=TRAINING, default="samples", later=True,
        choices=("samples", "uniform"),
    )  # fmt: skip
    keep_optimizer: bool = setting(
        "each site keeps its optimisers' states from round to round, instead of new ones in each",
        group=TRAINING, default=False, later=True,
    )  # fmt: skip
    site_labels: str = setting(
        "which structures some sites annotate, of a segmentation; auto: those that the site's training masks show; "
        "default: every site all", "SITE=NAME,...;...",
        group=SITES, default="", later=True, parse=setting_values.by_site("--site-labels"), longest=10_000,
    )  # fmt: skip
    site_channels: str = setting(
        "which channels of the images some sites have, by name or number; the others are zero there, and need no "
        "files; default: every site all", "SITE=NAME,...;...",
        group=SITES, default="", later=True, parse=setting_values.by_site("--site-channels"), longest=10_000,
    )  # fmt: skip
    partial_loss: str = setting(
        "what a structure is to a site that does not annotate it: marginal (default): it may be wherever the site "
        "sees background; or naive: it is nowhere", "marginal|naive",
        group=SITES, default="marginal", later=True,
        choices=("marginal", "naive"),
    )  # fmt: skip


SETTINGS: Mapping[str, Setting] = {
    field.name: Setting.of(field)
    for field in (*dataclasses.fields(ProtocolSettings), *dataclasses.fields(GeneralSettings))
}
ADDED_LATER: Mapping[str, Any] = {name: entry.default for name, entry in SETTINGS.items() if entry.later}
"""Defaults of the settings with `later`."""


def check_limits(values: Mapping[str, Any]) -> None:
    """Raise an InputError if a setting of a run, or the number of sites, is beyond its limits or not of its form.

    Unknown names and None are ignored.
    """
    sites = values.get("sites")
    if sites is not None and sites < 1:
        raise InputError(f"--sites {sites}", "a whole number of at least 1", "raise it")

    for name, entry in SETTINGS.items():
        entry.check(values.get(name))
    portable.check(values)
