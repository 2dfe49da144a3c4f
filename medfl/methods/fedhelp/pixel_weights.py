"""Pixel weights of a cross-entropy over masks: rare classes and the gaps between neighbouring objects count more.

beta_q = beta^c_q + beta_0 exp(-(d_1(q) + d_2(q))^2 / (2 sigma^2)), d_1 and d_2 the distances from pixel q to the
nearest and the second nearest object: "U-Net: Convolutional Networks for Biomedical Image Segmentation" (Ronneberger et
al., 2015), eq. 2; FedHelp (Wang et al., KDD 2025), eq. 10. Objects are connected components of the foreground (4
neighbours, in volumes 6), distances are in pixels, 1 on the first pixel outside.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor
from torch.nn.functional import cross_entropy

from medfl.core import Task
from medfl.data import Shard
from medfl.methods._parts.prototypes import pixel_classes
from medfl.methods.base import Collated, Method, one_of, option

CAP = 10.0
"""Maximum weight of a class."""
_MAX_BORDERS = 4096  # borders in memory at once, of masks that have some


@dataclass(frozen=True)
class Border:
    """The second term of beta, cached per mask by its content.

    Attributes:
        beta_0: its height, 10 in both papers; 0 leaves it out.
        sigma: its width in pixels, 5 in both papers.
        single: of masks with one object: "zero" takes d_2 for infinite, so the term is 0; "d2_equals_d1".
        inside: on objects too, not only on the background.
    """

    beta_0: float = 10.0
    sigma: float = 5.0
    single: str = "zero"
    inside: bool = False
    _borders: OrderedDict[bytes, Tensor | None] = field(
        default_factory=OrderedDict, compare=False, repr=False
    )

    def __call__(self, masks: Tensor) -> Tensor:
        """Return the term of each pixel (B, H, W[, D]) float32 for masks (B, H, W[, D]) of class indices."""
        foreground = (masks > 0).cpu().numpy()
        out = torch.zeros(masks.shape)
        for index, mask in enumerate(foreground if self.beta_0 else ()):
            border = self._of(mask)
            if border is not None:
                out[index] = border

        return out.to(masks.device)

    def _of(self, mask: NDArray[np.bool_]) -> Tensor | None:
        # By content: with random transforms the same item has another mask each time.
        content = np.packbits(mask).tobytes() + str(mask.shape).encode()
        key = hashlib.blake2b(content, digest_size=16).digest()
        if key not in self._borders:
            self._borders[key] = self._computed(mask)
            if len(self._borders) > _MAX_BORDERS:
                self._borders.popitem(last=False)
        return self._borders[key]

    def _computed(self, mask: NDArray[np.bool_]) -> Tensor | None:
        objects, number = ndimage.label(mask)
        if number == 0 or (number == 1 and self.single == "zero"):
            return None

        # d_1 + d_2, in pixels: the two least of the distances to each object
        apart = [ndimage.distance_transform_edt(objects != 1 + k) for k in range(number)]
        if number == 1:
            sums = 2 * apart[0]
        else:
            sums = np.partition(np.stack(apart), 1, axis=0)[:2].sum(0)

        # beta_0 exp(-(d_1 + d_2)^2 / (2 sigma^2)), eq. 10
        term = self.beta_0 * np.exp(-(sums**2) / (2 * self.sigma**2))
        if not self.inside:
            term = np.where(mask, 0.0, term)

        return torch.from_numpy(term).float()


def class_balance(masks: Iterable[Tensor], classes: int) -> Tensor:
    """Return beta^c (K,) float32: N / (K N_c) over all pixels of the masks, at most 10, 0 for a class without pixels.

    Args:
        masks: class indices, of any shapes.
        classes: K, including the background.
    """
    counts = torch.zeros(classes, dtype=torch.float64)
    for mask in masks:
        counts += torch.bincount(mask.flatten().cpu(), minlength=classes)[:classes]
    # N / (K N_c)
    weights = counts.sum() / (classes * counts.clamp(min=1))
    return torch.where(counts > 0, weights.clamp(max=CAP), 0).float()


def beta(masks: Tensor, balance: Tensor, border: Border) -> Tensor:
    """Return beta (B, H, W[, D]) float32 of masks (B, H, W[, D]) of class indices, with beta^c (K,)."""
    return balance.to(masks.device)[masks] + border(masks)


@dataclass(frozen=True)
class PixelWeights(Method):
    """A method that weights the pixels of masks by beta."""

    mask_loss: str = one_of(
        "masks: the bundle's loss (ours), or cross-entropy with beta (paper)", "bundle", "weighted"
    )
    beta_0: float = option(10.0, "height of beta between objects (U-Net)", minimum=0.0)
    sigma: float = option(5.0, "width of it in pixels (U-Net)", minimum=0.01)
    single_object: str = one_of(
        "beta between objects where there is one: none, or with d_2 = d_1", "zero", "d2_equals_d1"
    )
    inside: bool = option(False, "beta between objects also on them")

    def border(self) -> Border:
        """Return the second term of beta."""
        return Border(self.beta_0, self.sigma, self.single_object, self.inside)

    def weighs_pixels(self, task: Task) -> bool:
        """Tell whether labels of a task are masks whose pixels are weighted."""
        return task.kind == "segmentation" and self.mask_loss == "weighted"

    def balance(self, shard: Shard, classes: int) -> Tensor:
        """Return beta^c over all pixels of the masks, read one by one since whole ones may differ in size."""
        return class_balance((pixel_classes(y) for _, y in shard.batches(1)), classes)


def pixel_loss(z: Tensor, y: Collated, balance: Tensor, border: Border) -> Tensor:
    """Return the mean over pixels of beta times the cross-entropy of logits z (B, K, H, W[, D])."""
    exact = z.to(torch.promote_types(z.dtype, torch.float32))
    labels = pixel_labels(y, exact)
    return weighted(cross_entropy(exact, labels, reduction="none"), beta(labels, balance, border))


def pixel_labels(y: Collated, z: Tensor) -> Tensor:
    """Return the class indices (B, H, W[, D]) of masks for logits z (B, K, H, W[, D])."""
    return pixel_classes(y).reshape(len(y), *z.shape[2:])


def weighted(values: Tensor, weight: Tensor | None) -> Tensor:
    """Return the mean of values times their weights, if there are any."""
    if weight is None:
        return values.mean()

    return (values * weight).mean()
