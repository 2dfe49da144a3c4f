"""The settings of a run, each declared once: its type, default, limits, flag and help.

These declarations define the fields of `Run` and of `runs.plan.Request`, the flags of the verbs, what a record
omits, what `request_of` repeats, and what a site of a FLARE job accepts. `GeneralSettings` have the same type in a
request and in a run; `ProtocolSettings` come from the bundle's protocol if a request leaves them open.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from medfl.core import portable, setting_values
from medfl.core.declared import Declared, declared
from medfl.core.documents import Config, Document
from medfl.core.errors import InputError, did_you_mean, either
from medfl.core.mappings import present

LOSSLESS = "lossless"
POLY = "poly"
MEAN = "mean"
TRAINING = "training"
MACHINE = "machine"
COMPUTING = "computing"
ROBUSTNESS = "robustness"
SITES = "sites"
OF_PROTOCOL = "; default: the bundle's protocol"
_MAX_VALUE = 1_000_000  # for counts: a job from outside cannot request endless work


@dataclass(frozen=True, kw_only=True)
class Setting(Declared):
    """One setting; its flag is its name with dashes.

    Attributes:
        metavar: of the flag, "" for a switch.
        group: of flags in the help.
        later: added after the first release: records omit it at its default, so that their hashes stay.
        parse: parses a text, and raises an InputError for an invalid one; None: any text.
        longest: maximum length of text.
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
            return either(self.choices)

        limits = {"of at least": self.minimum, "above": self.above, "at most": self.maximum}
        bounds = " and ".join(
            f"{words} {limit:g}" for words, limit in limits.items() if limit is not None
        )
        kind = "a whole number" if self.kind is int else "a number"
        return f"{kind} {bounds}".strip()

    @property
    def schema(self) -> Document:
        """The allowed values, as JSON Schema."""
        bounds = {"minimum": self.minimum, "exclusiveMinimum": self.above, "maximum": self.maximum}
        limits = present(bounds)
        kinds: Mapping[type, Document] = {
            bool: {"type": "boolean"},
            str: {"type": "string", "maxLength": self.longest},
            int: {"type": "integer", **limits},
            float: {"type": "number", **limits},
        }
        schema = kinds[self.kind]

        if self.optional:
            return {"anyOf": [{"type": "null"}, schema]}

        return schema

    def check(self, value: Any) -> None:
        """Raise an InputError for a value of the right type beyond its limits or malformed; None is accepted."""
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


def setting(
    help: str,
    metavar: str = "",
    *,
    group: str,
    default: Any = dataclasses.MISSING,
    later: bool = True,
    **form: Any,
) -> Any:
    """Declare a setting; without a default it comes from the bundle's protocol."""
    if default is dataclasses.MISSING:
        help += OF_PROTOCOL
        later = False
    # `Any`, as for dataclasses.field: the field has the type that it is annotated with.
    return declared(default, help, metavar=metavar, group=group, later=later, **form)


@dataclass(frozen=True, kw_only=True)
class GeneralSettings:
    """Settings that have a default."""

    seed: int = setting(
        "random seed; default: 0",
        "S",
        group=TRAINING,
        later=False,
        default=0,
        minimum=0,
        maximum=2**63 - 1,
    )
    device: str = setting(
        "device for training; default: cpu",
        "auto|cpu|cuda[:i]",
        group=MACHINE,
        later=False,
        default="cpu",
        parse=setting_values.device,
    )
    amp: bool = setting(
        "train with automatic mixed precision", group=COMPUTING, later=False, default=False
    )
    tf32: bool = setting(
        "allow TF32 matrix products and convolutions on a GPU",
        group=COMPUTING,
        default=False,
    )
    channels_last: bool = setting(
        "use the channels-last memory layout", group=COMPUTING, default=False
    )
    compile: bool = setting(
        "compile networks with torch.compile for training; results differ in the last bits",
        group=COMPUTING,
        default=False,
    )
    portable: bool = setting(
        "restrict kernels to AVX2 and one CPU thread so that results are bit-identical across x86 CPUs",
        group=COMPUTING,
        default=False,
    )
    threads: int = setting(
        "CPU threads per worker; more than 1 may change the last bits of results; default: 1",
        "T",
        group=MACHINE,
        later=False,
        default=1,
        minimum=1,
        maximum=_MAX_VALUE,
    )
    eval_every: int = setting(
        "evaluate every N rounds; 0: after the last round only; default: 1",
        "N",
        group=TRAINING,
        later=False,
        default=1,
        minimum=0,
        maximum=2**63 - 1,
    )
    score_trained: bool = setting(
        "at the end, also score the global model fine-tuned for one more local training at each site",
        group=TRAINING,
        default=False,
    )
    init: str = setting(
        "initial weights, for the same network, or all but its head (backbone:FILE, torchvision:, monai: or timm:NAME, "
        "where these libraries have downloaded them); default: random, from the seed",
        "FILE|run:DIR|bundle:DIR|...",
        group=TRAINING,
        default="",
    )
    metrics: str = setting(
        "comma-separated segmentation metrics on test images beside Dice: all (default), dice (Dice "
        "alone), hd95 or surface_dice; the last two also for one structure (hd95_liver)",
        "NAMES",
        group=TRAINING,
        default=setting_values.ALL,
        parse=setting_values.metrics,
    )
    messages: str = setting(
        "compression of messages: lossless (default), float16, bfloat16, int8, or topk:FRACTION (largest "
        "changes, with error feedback)",
        "FORM",
        group=TRAINING,
        default=LOSSLESS,
        parse=setting_values.messages,
    )
    aggregation: str = setting(
        "how the server combines n replies: mean (default), or, for methods with FedAvg's server: clip:C "
        "(mean of changes clipped to norm C; clip:auto: to the round's median norm); or, with equal site "
        "weights: median (tolerates fewer than n/2 faulty sites; ignores minority sites; O(n log n)), "
        "trimmed:FRACTION (tolerates that fraction of faulty sites; ignores less), krum:F (tolerates F "
        "faulty sites of at least 2F+3; learns from one site per round; O(n^2)), multikrum:F (as krum, but"
        " averages n-F-2 sites)",
        "RULE",
        group=ROBUSTNESS,
        default=MEAN,
        parse=setting_values.aggregation,
    )
    channel_drop: float = setting(
        "probability of setting each channel of a training image to zero (at least one is kept); for runs "
        "whose sites lack channels",
        "P",
        group=SITES,
        default=0.0,
        minimum=0,
        maximum=0.9,
    )
    unlabelled: str = setting(
        "comma-separated sites that train without labels; any labels they have are hidden",
        "SITES",
        group=SITES,
        default="",
        parse=setting_values.site_names,
    )
    max_share: float | None = setting(
        "cap on one site's share of the aggregation weight; default: no cap, but in a run across machines "
        "with three or more sites, a share above one half is an error",
        "F",
        group=ROBUSTNESS,
        default=None,
        above=0,
        maximum=1,
    )


@dataclass(frozen=True, kw_only=True)
class ProtocolSettings:
    """Settings whose default is the bundle's protocol."""

    cohort: float = setting(
        "fraction of the sites that take part in each round",
        "FRACTION",
        group=SITES,
        above=0,
        maximum=1,
    )
    rounds: int = setting(
        "number of communication rounds", "R", group=TRAINING, minimum=0, maximum=_MAX_VALUE
    )
    local_epochs: int = setting(
        "local epochs per round", "E", group=TRAINING, minimum=1, maximum=_MAX_VALUE
    )
    batch_size: int = setting(
        "images per optimiser step", "B", group=TRAINING, minimum=1, maximum=_MAX_VALUE
    )
    lr: float | None = setting("learning rate in round 1", "X", group=TRAINING, above=0)
    lr_decay: float = setting(
        "factor applied to the learning rate each round (1: constant)",
        "G",
        group=TRAINING,
        above=0,
        maximum=1,
    )
    patience: int = setting(
        "stop after this many rounds without a better validation metric; default: the bundle's protocol, or 0 (never)",
        "N",
        group=TRAINING,
        default=0,
        minimum=0,
        maximum=_MAX_VALUE,
    )
    decay_per: str = setting(
        "apply --lr-decay per round (default) or per local epoch; poly: a round's factor is (1 - rounds before it / "
        "all rounds)^0.9 instead, as nnU-Net's",
        "round|epoch|poly",
        group=TRAINING,
        default="round",
        choices=("round", "epoch", POLY),
    )
    site_weights: str = setting(
        "weight of each site in averages: by number of images (samples, default) or equal (uniform)",
        "samples|uniform",
        group=TRAINING,
        default="samples",
        choices=("samples", "uniform"),
    )
    keep_optimizer: bool = setting(
        "keep each site's optimiser state between rounds; default: reset it every round",
        group=TRAINING,
        default=False,
    )
    site_labels: str = setting(
        "segmentation: the structures that each listed site annotates; auto: those found in its training "
        "masks; default: every site annotates all",
        "SITE=NAME,...;...",
        group=SITES,
        default="",
        parse=setting_values.by_site("--site-labels"),
        longest=10_000,
    )
    site_channels: str = setting(
        "image channels that each listed site has, by name or number; its other channels are set to zero "
        "and need no files; default: every site has all",
        "SITE=NAME,...;...",
        group=SITES,
        default="",
        parse=setting_values.by_site("--site-channels"),
        longest=10_000,
    )
    site_spacing: str = setting(
        "mm to which each listed site resamples its volumes; default: every site to the bundle's spacing",
        "SITE=XxYxZ;...",
        group=SITES,
        default="",
        parse=setting_values.spacings,
        longest=10_000,
    )
    partial_loss: str = setting(
        "how unannotated structures enter the loss: marginal (default; merged with background) or naive "
        "(treated as absent)",
        "marginal|naive",
        group=SITES,
        default="marginal",
        choices=("marginal", "naive"),
    )


SETTINGS: Mapping[str, Setting] = {
    field.name: Setting.of(field)
    for field in (*dataclasses.fields(ProtocolSettings), *dataclasses.fields(GeneralSettings))
}
ADDED_LATER: Config = {name: entry.default for name, entry in SETTINGS.items() if entry.later}
"""Defaults of the settings with `later`."""
WITHDRAWN: Config = {"capture": False, "pack": 1}
"""Settings of earlier releases, with their defaults; their values in a record are ignored."""


def check_limits(values: Config) -> None:
    """Raise an InputError if a setting of a run, or the number of sites, is beyond its limits or malformed.

    Unknown names and None are ignored.
    """
    sites = values.get("sites")
    if sites is not None and sites < 1:
        raise InputError(f"--sites {sites}", "a whole number of at least 1", "raise it")

    for name, entry in SETTINGS.items():
        entry.check(values.get(name))

    portable.check(values)
