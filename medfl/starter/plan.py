"""A segmentation planned from a federation's fingerprint, by the rules published for nnU-Net.

Isensee, Jaeger, Kohl, Petersen and Maier-Hein, nnU-Net: a self-configuring method for deep learning-based biomedical
image segmentation, Nature Methods 18:203-211, 2021 (Methods and Supplementary Note 2), and nnU-Net's public
documentation. Departures: memory is estimated from the network's activations in float32, not looked up; sites' images
are not cropped; pictures are resized to one side and not cut; resampling is linear; see also `_LEFT_OUT`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from operator import add

import numpy as np

from medfl.core import Floats, InputError
from medfl.data import Fingerprint, Tally
from medfl.data.fingerprint import is_present

_ANISOTROPIC = 3  # ratio of a spacing, or of an axis' voxels, to the others
_LEAST_EDGE = 4  # voxels of the deepest feature map
_LEAST_PATCH = 16
_FIRST_EDGE = {3: 256, 2: 512}  # the largest patch has the volume of this cube, or square
_FILTERS = 32
_MOST_FILTERS = {3: 320, 2: 512}
_LEAST_BATCH = 2
_SHARE_OF_VOXELS = 0.05  # maximum share of all training voxels in a batch
_MOST_BATCH = 64
_GB = 2**30
_DIFFERS = 1.5  # ratio of a site's median length to the overall one
_FIXED = (
    "loss: Dice, over the batch without background, and cross-entropy; deep supervision but at the two coarsest levels",
    "optimizer: SGD with momentum 0.99, Nesterov's, learning rate 0.01, poly schedule over the rounds",
    "volumes: every third patch is around a voxel with a class; mirrored, turned, scaled, of other contrast",
    "volumes: inference in windows that overlap by half, weighted by a Gaussian",
    "post-processing: only the largest component of a structure whose validation Dice that raises; each run decides",
)
_LEFT_OUT = (
    "normalisation within a mask of what is not 0, and cropping to it",
    "cascades, ensembles of folds, mirroring at inference",
)


@dataclass(frozen=True)
class Network:
    """Arguments of MONAI's DynUNet: per level stride and kernel along each axis, and features."""

    strides: tuple[tuple[int, ...], ...]
    kernels: tuple[tuple[int, ...], ...]
    filters: tuple[int, ...]

    @classmethod
    def of(cls, patch: Sequence[int], spacing: Sequence[float]) -> Network:
        """Return the deepest network: axes are halved down to 4 voxels, a coarse one once the others match it."""
        dims = len(patch)
        size = np.array(patch, float)
        step = np.array(spacing, float)
        strides = [(1,) * dims]
        kernels = []
        fine = np.zeros(dims, bool)
        while True:
            fine |= step < 2 * step.min()  # even if others are halved further
            kernels.append(tuple(np.where(fine, 3, 1).tolist()))
            is_large = size >= 2 * _LEAST_EDGE
            if not is_large.any():
                break

            halved = is_large & (step < 2 * step[is_large].min())
            strides.append(tuple(np.where(halved, 2, 1).tolist()))
            size = np.where(halved, np.ceil(size / 2), size)
            step = np.where(halved, step * 2, step)

        filters = [min(_FILTERS * 2**level, _MOST_FILTERS[dims]) for level in range(len(strides))]
        return cls(tuple(strides), tuple(kernels), tuple(filters))

    @property
    def level_weights(self) -> tuple[float, ...]:
        """Weights of the levels in the loss, finest first: 1, 1/2, ... of sum 1, without the two coarsest."""
        count = len(self.strides) - 2
        total = 2 - 2.0 ** (1 - count)
        return tuple(round(0.5**level / total, 6) for level in range(count))

    @property
    def factors(self) -> Floats:
        """Factors of which each side of a patch must be a multiple."""
        factors: Floats = np.prod(self.strides, axis=0)
        return factors

    def memory(self, patch: Sequence[int], batch: int, outputs: int) -> float:
        """Return bytes of a training step in float32: activations, the largest gradient, weights and momentum."""
        voxels = np.prod(patch) / np.cumprod(np.prod(self.strides, axis=1))
        filters = np.array(self.filters)
        # per level: two convolutions and their norms down, the same up, the upsampled and the concatenated
        activations = 11 * voxels * filters
        inputs = np.append(filters[:1], filters[:-1])
        weights = 6 * (np.prod(self.kernels, axis=1) * filters * inputs).sum()
        largest = 4 * (voxels * filters).max()
        # of each level with a loss, resized to the full size
        scored = 6 * outputs * voxels[0] * len(self.level_weights)
        return float(4 * (batch * (activations.sum() + largest + scored) + 3 * weights))


@dataclass(frozen=True)
class Choice:
    """A choice, the statistic and rule behind it, and what would change it."""

    choice: str
    value: object
    because: str
    changed_by: str


@dataclass(frozen=True)
class Plan:
    """Input of the templates, with reasons.

    Attributes:
        spacing: mm to which images are resampled, () for pictures.
        patch: voxels of a patch, or side of a picture.
        coarse: the only axis around which an anisotropic patch is rotated; None: all axes.
        clip: the 0.5 and 99.5 % quantile, mean and deviation of CT; () if each image has its own.
        pooled: fingerprint of all sites, with the names of the channels.
        choices: what was chosen, and why.
        sites: name -> cases.
        site_spacings: name -> mm, for sites that resample to a spacing of their own.
        differences: sentences on sites far from the pooled data.
    """

    spacing: tuple[float, ...]
    patch: tuple[int, ...]
    batch_size: int
    network: Network
    coarse: int | None
    clip: tuple[float, ...]
    pooled: Fingerprint
    choices: tuple[Choice, ...] = ()
    sites: Mapping[str, int] = field(default_factory=dict)
    site_spacings: Mapping[str, Sequence[float]] = field(default_factory=dict)
    differences: tuple[str, ...] = ()

    def record(self) -> dict[str, object]:
        """Return the content of plan.json."""
        return {
            "form": "medfl plan 1",
            "rules": "Isensee et al., nnU-Net, Nature Methods 18:203, 2021, and its public documentation",
            "sites": self.sites,
            "choices": list(map(asdict, self.choices)),
            "sites_that_differ": self.differences,
            "the_same_for_every_task": _FIXED,
            "left_out": _LEFT_OUT,
        }


def plan(
    sites: Mapping[str, Fingerprint],
    memory: float = 8.0,
    channel_names: Sequence[str] = (),
    per_site: str = "",
) -> Plan:
    """Plan from the fingerprints of all sites.

    Args:
        sites: name -> fingerprint.
        memory: GB available for a training step.
        channel_names: of the images, CT for Hounsfield units; default: those of the fingerprints.
        per_site: "spacing" if each site resamples to the spacing of its own cases, else "".

    Raises:
        InputError: sites with different tasks, no foreground, a memory in which no patch fits.
    """
    # by name: sums of floats depend on the order
    pooled = reduce(add, (sites[name] for name in sorted(sites)))
    names = tuple(channel_names) or pooled.channel_names
    if not pooled.classes or not pooled.foreground[0].count:
        raise InputError(
            "no site tells of a voxel with a class", "masks of some structure", "check the masks"
        )
    if names and len(names) != pooled.channels:
        raise InputError(
            f"{len(names)} names of channels: {', '.join(names)}",
            f"{pooled.channels}, as the images have",
            "give one for each",
        )
    if not 0.5 <= memory <= 1000:
        raise InputError(f"--memory {memory:g}", "0.5 to 1000 GB", "give for example --memory 8")

    if per_site and (per_site != "spacing" or pooled.kind != "volumes"):
        raise InputError(
            f"--per-site {per_site} for {pooled.kind}", "spacing, for volumes", "leave it out"
        )

    differences = _differences(sites, pooled)
    if pooled.noise:
        # deviation of the sum over the cases of a number from -1 to 1
        differences += (
            f"all sites: noise with a deviation of {pooled.noise:.3g} cases in {pooled.cases}; choices near a limit of "
            "their rule may be others without it",
        )

    planned = _planned(replace(pooled, channel_names=names), memory)
    spacings = {}
    choices = list(planned.choices)
    for name in sorted(sites) if per_site else ():
        spacing, coarse = _target_spacing(sites[name])
        spacings[name] = tuple(spacing.tolist())
        choices.append(_spacing_choice(f"spacing of {name}", spacings[name], coarse, sites[name]))

    return replace(
        planned,
        choices=tuple(choices),
        site_spacings=spacings,
        sites={name: sites[name].cases for name in sorted(sites)},
        differences=differences,
    )


def _planned(pooled: Fingerprint, memory: float) -> Plan:
    """Return the plan for all cases."""
    spacing, coarse = _target_spacing(pooled)
    shape = np.array([tally.length() for tally in pooled.extents]) / spacing
    outputs = len(pooled.classes) + 1
    patch, network = _fitted(shape, spacing, memory * _GB, outputs)
    most = pooled.cases * shape.prod() * _SHARE_OF_VOXELS / np.prod(patch)
    batch = _LEAST_BATCH
    while (
        batch < min(most, _MOST_BATCH) and network.memory(patch, batch + 1, outputs) <= memory * _GB
    ):
        batch += 1

    clip: tuple[float, ...] = ()
    # CT alone has values in a unit, Hounsfield's, that mean the same at every scanner
    if pooled.channels == 1 and [name.upper() for name in pooled.channel_names] == ["CT"]:
        values = pooled.foreground[0]
        ends = (values.intensity(0.005), values.intensity(0.995), values.mean, values.sd)
        clip = tuple(float(f"{value:.6g}") for value in ends)

    planned = Plan(
        tuple(spacing.tolist()) * (pooled.kind == "volumes"),
        patch,
        batch,
        network,
        coarse,
        clip,
        pooled,
    )
    return replace(planned, choices=_choices(planned, shape, memory))


def _target_spacing(pooled: Fingerprint) -> tuple[Floats, int | None]:
    """Return the spacing to resample to, and the coarse axis of anisotropic images.

    It is the median; along an axis whose spacing is 3 times the others' and that has a third of their voxels, the 10 %
    quantile, but not finer than the others.
    """
    spacing = np.array([tally.length() for tally in pooled.spacings])
    if len(spacing) == 2:
        return spacing, None

    sizes = np.array([tally.length() for tally in pooled.sizes])
    worst = int(spacing.argmax())
    finer = np.delete(spacing, worst)
    coarse = None
    if (
        spacing[worst] > _ANISOTROPIC * finer.max()
        and sizes[worst] * _ANISOTROPIC < np.delete(sizes, worst).min()
    ):
        coarse = worst
        spacing[worst] = max(pooled.spacings[worst].length(0.1), finer.max())

    return np.array([float(f"{value:.5g}") for value in spacing]), coarse


def _fitted(
    shape: Floats, spacing: Floats, budget: float, outputs: int
) -> tuple[tuple[int, ...], Network]:
    """Return the largest patch of which two fit, and its network: it shrinks where it is largest for the images."""
    dims = len(shape)
    # as many voxels as the cube has, with sides of equal length in mm
    cube = _FIRST_EDGE[dims] * spacing.prod() ** (1 / dims) / spacing
    least = np.where(spacing < 2 * spacing.min(), _LEAST_PATCH, 1)
    side = np.maximum(np.minimum(np.round(shape), np.round(cube)), least)
    if dims == 2:  # pictures are resized to a square
        side = np.full(2, np.sqrt(side.prod()))

    while True:
        network = Network.of(side.tolist(), spacing.tolist())
        factors = network.factors
        patch = tuple(map(int, np.ceil(side / factors) * factors))
        if network.memory(patch, _LEAST_BATCH, outputs) <= budget:
            return patch, network

        can_shrink = patch - factors >= least
        if not can_shrink.any():
            raise InputError(
                f"--memory {budget / _GB:g} for {outputs} classes",
                f"room for two patches of {' x '.join(map(str, patch))}",
                "give more",
            )

        largest = np.where(can_shrink, patch / shape, 0).argmax()
        side = patch - factors * ((np.arange(dims) == largest) | (dims == 2))


def _spacing_choice(
    title: str, spacing: tuple[float, ...], coarse: int | None, cases: Fingerprint
) -> Choice:
    rule = "median of all cases"
    if coarse is not None:
        rule += f"; anisotropic: along axis {'RAS'[coarse]} the 10 % quantile"

    if cases.noise:
        rule += "; of a lognormal distribution, as no cells are told"
    else:
        hidden = max(tally.hidden for tally in (*cases.spacings, *cases.extents))
        rule += "; known to 4.4 %"
        if hidden:
            rule += f", with up to {hidden:.0%} of the cases in suppressed cells"

    return Choice(title, spacing, rule, "other spacings at the sites")


def _choices(planned: Plan, shape: Floats, memory: float) -> tuple[Choice, ...]:
    pooled = planned.pooled
    network = planned.network
    foreground = pooled.foreground[0]
    choices = []
    if planned.spacing:
        choices.append(_spacing_choice("spacing", planned.spacing, planned.coarse, pooled))

    median = " x ".join(f"{side:.0f}" for side in shape)
    needed = network.memory(planned.patch, planned.batch_size, len(pooled.classes) + 1) / _GB
    choices += [
        Choice(
            "patch",
            planned.patch,
            f"the median image has {median} voxels at this spacing; {memory:g} GB",
            "larger images, or more --memory",
        ),
        Choice(
            "batch_size",
            planned.batch_size,
            f"{needed:.2g} GB estimated; at most {_SHARE_OF_VOXELS:.0%} of the voxels of {pooled.cases} cases",
            "more --memory, or more cases",
        ),
        Choice(
            "network",
            asdict(network),
            f"each axis of the patch is halved down to {_LEAST_EDGE} voxels, a coarse one later",
            "another patch or spacing",
        ),
    ]
    ends: object = "each image by its own mean and sd"
    rule = "the channel is not named CT (--channels)"
    if planned.clip:
        ends = dict(zip(("low", "high", "mean", "sd"), planned.clip, strict=True))
        rule = "CT: quantiles of a normal distribution with the mean and sd of the cases, as no bins are told"
        if not pooled.noise:
            rule = (
                f"CT: the 0.5 and 99.5 % quantile of {foreground.count} foreground voxels, their mean and sd; "
                f"quantiles known to 0.8 %, {foreground.hidden:.2%} of the voxels in suppressed bins"
            )

    choices.append(Choice("intensities", ends, rule, "other names of channels, or scanners"))
    return tuple(choices)


def _differences(sites: Mapping[str, Fingerprint], pooled: Fingerprint) -> tuple[str, ...]:
    """Return sentences on sites far from the pooled data."""
    notes = []
    for name in sorted(sites):
        site = sites[name]
        for axis, spacings in enumerate(site.spacings):
            factor = spacings.length() / pooled.spacings[axis].length()
            if not 1 / _DIFFERS <= factor <= _DIFFERS:
                notes.append(
                    f"{name}: median spacing of axis {axis} is {factor:.3g} times that of all"
                )

        for channel, values in enumerate(site.foreground):
            average = pooled.foreground[channel]
            if values.count and abs(values.mean - average.mean) > average.sd:
                notes.append(
                    f"{name}: foreground of channel {channel} has mean {values.mean:.4g}, all {average.mean:.4g}"
                )

        annotated = []
        lacking: dict[str, list[str]] = {}
        for value, title in pooled.classes.items():
            volume = site.volumes.get(value, Tally())
            if volume is None or is_present(volume):
                annotated.append(title)
            else:
                lacking.setdefault("few cases" if volume is False else "no case", []).append(title)

        for how_many, titles in lacking.items():
            notes.append(
                f"{name}: {how_many} with {', '.join(titles)}; where it annotates none: --site-labels "
                f"'{name}={','.join(annotated)}'"
            )

        if None in site.volumes.values():
            notes.append(f"{name}: does not tell how many cases have some of the classes")

    return tuple(notes)
