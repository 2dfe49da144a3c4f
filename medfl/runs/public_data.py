"""Find and open the public data of a run: another bundle's images, not augmented, in the sites' dimensions.

A method that uses public data has the options of `medfl.methods._parts.public`. Those not given come from the
public bundle's own protocol (key `public`: section, items, split).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from medfl import methods
from medfl.bundle.bundle import Bundle, shipped
from medfl.bundle.open import WithData, open_problem, with_data
from medfl.core import Config, InputError, Print, PublicRecord, Shape, Task, stream
from medfl.data import Item, Prepared, Public, Shard
from medfl.methods.base import Method
from medfl.problem import Problem
from medfl.runs.teachers.answers import Questions, Teacher, obtain, open_teacher, split_names
from medfl.storage import PHANTOM

_LEAST_SIDE, _DEPTH = 32, 16  # four halvings of a U-Net leave two pixels per side, and one slice
_AUGMENTATION = "train#random_transforms"


@dataclass(frozen=True)
class PublicPlan:
    """The public data of a run, before any image is read.

    Attributes:
        opened: the public bundle on its images.
        section: which of its sections is used.
        indices: which of that section's items.
        teachers: whose outputs the method learns from; not run yet.
        channels: of the sites' images.
        depth: number of repetitions of an image for sites with volumes, 0 if they have images.
        record: the run's record of all this.
    """

    opened: WithData
    section: str
    indices: tuple[int, ...]
    teachers: tuple[Teacher, ...]
    channels: int
    depth: int
    record: PublicRecord

    def prepare(self, *, jobs: int = 1, progress: bool = False, say: Print = str) -> Public:
        """Read the images, and run the teachers for outputs that are not cached.

        Raises:
            InputError: an image cannot be read, or a teacher does not fit these data.
            RunError: the outputs cannot be written.
        """
        bundle = self.opened.bundle
        prepared = bundle.prepared(self.section, jobs=jobs, progress=progress)
        if self.teachers and bundle.task == "segmentation":
            self._refuse_crops(prepared)

        prepared = prepared.deterministic()
        shard = Shard.of(prepared, self.indices)
        task = Task(bundle.task, bundle.classes or bundle.structures)
        public = Public(bundle.name, shard, task, (), self.depth, self.channels)
        questions = Questions(
            bundle,
            self.section,
            self.indices,
            tuple(shard.ids),
            self.record.data.checksum,
            replace(public, channels=0),
        )
        answers = [obtain(t, questions, progress=progress, say=say) for t in self.teachers]
        return replace(public, answers=tuple(answers))

    def _refuse_crops(self, prepared: Prepared) -> None:
        """Raise an InputError if sites would use a crop of what a teacher segments."""
        patch = _size_of_first(prepared.deterministic(False))
        image = _size_of_first(prepared.deterministic(True))
        if patch != image:
            raise InputError(
                f"public data {self.opened.bundle.name!r}, section {self.section}: patches {patch} of images {image}",
                "teachers segment whole images",
                "take the section validate or test with --set public_section=NAME, or set teachers= for none",
            )

    def notes(self, bundle: Problem, used: Mapping[str, Sequence[Item]]) -> list[str]:
        """Return lines on these data for a user of the run."""
        record = self.record
        public = self.opened.bundle
        lines = [f"public data: {record.items} items of {public.name}, section {self.section}"]
        if record.data.source == PHANTOM:
            lines.append(f"PUBLIC DATA ARE PHANTOMS: drawn images in the place of {public.name}")

        if self.depth:
            lines.append(
                f"public images are flat, the sites have volumes: each is repeated {self.depth} times along a third "
                "axis, and outputs are averaged over it (lift=pseudo3d)"
            )

        lines += [f"teacher: {teacher.name}" for teacher in self.teachers]
        if public.name == bundle.name:
            site_ids = set[str]()
            for items in used.values():
                site_ids.update(str(item["id"]) for item in items)

            chosen = [public.items(self.section)[i]["id"] for i in self.indices]
            common = sum(str(ident) in site_ids for ident in chosen)
            if common:
                lines.append(
                    f"{common} OF THE PUBLIC ITEMS ARE ALSO ITEMS OF THE SITES: results are optimistic"
                )

        return lines


def _size_of_first(prepared: Prepared) -> Shape:
    """Return (H, W[, D]) of the first image."""
    images, *_ = next(prepared.batches(torch.tensor([0]), 1, None))
    return tuple(images.shape[2:])


def plan_public(
    method: Method,
    options: Config,
    bundle: Problem,
    device: str,
    *,
    folder: str | None = None,
    say: Print,
) -> PublicPlan | None:
    """Return the public data that a method's options request, or None if it uses none.

    They are in `folder`; by default as the option says, else below $MEDFL_DATA, else they are phantoms.

    Raises:
        InputError: none are named, or they do not fit the sites' task or dimensions, or a teacher does not fit them.
    """
    learner = methods.extra(method, methods.PublicData)
    if learner is None or not learner.uses_public:
        return None
    if not options["public"]:
        raise InputError(
            f"method {type(method).__name__.lower()!r} on bundle {bundle.name!r} without public data",
            "it learns from images that all sites share, and this bundle's protocol names none",
            f"add --set public=BUNDLE[:DIR], for example one of {', '.join(shipped())}",
        )

    name, data = read_public(str(options["public"]))
    overrides = {}
    # a shipped bundle finds its own data
    if name not in shipped() and data is not None:
        overrides["dataset_dir"] = str(Path(data).expanduser().resolve())

    plain = Bundle(name, overrides, policy=bundle.policy)
    protocol = plain.protocol.get("public") or {}
    section = str(options["public_section"] or protocol.get("section") or "test")
    number = int(options["public_items"])

    if plain.task != bundle.task:
        raise InputError(
            f"public data {name!r}, a {plain.task} task, for bundle {bundle.name!r}, a {bundle.task} task",
            "public data and sites have the same task",
            "name another bundle with --set public=BUNDLE",
        )

    depth = _depth(plain, bundle, str(options["lift"]))
    config = {}
    size = _size(bundle, plain, int(options["public_size"]), depth)
    if size is not None:
        config["image_size"] = size
        # whole images are learned from, so no patch larger than those fits
        if "patch_size" in plain and plain.get("patch_size") not in (None, size):
            config["patch_size"] = None

    # all sites and teachers see the same images
    if section == "train" and plain.dataset:
        config[_AUGMENTATION] = []

    preferred = protocol.get("split") or plain.protocol.get("split")
    problem = open_problem(name, config, device, bundle.policy)
    opened = with_data(problem, folder or data, config, say=say, preferred=preferred)
    items = opened.bundle.items(section)
    indices = chosen_items(items, number or min(int(protocol.get("items") or 0), len(items)))
    teachers = []
    if learner.uses_teachers:
        for teacher in split_names(str(options.get("teachers", ""))):
            teachers.append(open_teacher(teacher, opened.bundle, torch.device(device)))

    # the record identifies the items by a hash that names no patient
    ids = json.dumps([items[i]["id"] for i in indices])
    record = PublicRecord(
        bundle=opened.bundle.name,
        bundle_sha256=opened.bundle.sha256,
        config=config,
        data=opened.record(),
        section=section,
        items=len(indices),
        ids_sha256=hashlib.sha256(ids.encode()).hexdigest(),
        teachers=tuple((teacher.name, teacher.sha256) for teacher in teachers),
    )

    return PublicPlan(opened, section, indices, tuple(teachers), bundle.channels, depth, record)


def read_public(text: str) -> tuple[str, str | None]:
    """Return bundle and folder of BUNDLE or BUNDLE:DIR, where BUNDLE is a shipped one's name or a folder."""
    if Path(text).expanduser().is_dir():
        return text, None
    name, _, folder = text.partition(":")
    return name, folder or None


def chosen_items(items: Sequence[Item], number: int) -> tuple[int, ...]:
    """Return the indices of so many items, with classes as balanced as their sizes allow; 0 selects all.

    A fixed draw, the same for every seed of a run, so that teachers run once. Items without a label are one class.

    Raises:
        InputError: there are fewer.
    """
    if number > len(items):
        raise InputError(
            f"{number} public items",
            f"this section has {len(items)}",
            "give fewer with --set public_items=N, or 0",
        )
    if not number or number == len(items):
        return tuple(range(len(items)))

    with stream(0, "public items") as generator:
        order = torch.randperm(len(items), generator=generator).tolist()

    # the classes alternate: each has its first item drawn before any has its second
    counts = Counter[object]()
    turns = {}
    for position in order:
        label = items[position].get("label")
        turns[position] = counts[label]
        counts[label] += 1

    # sorting is stable, and so keeps the drawn order within a turn
    return tuple(sorted(sorted(order, key=turns.__getitem__)[:number]))


def _depth(public: Problem, bundle: Problem, lift: str) -> int:
    """Return how often a public image is repeated along a third axis; InputError if dimensions do not match."""
    has = _dimensions(public)
    needs = _dimensions(bundle)
    if has == needs:
        return 0

    pair = f"public data {public.name!r} with {has} dimensions for the {needs} dimensions of bundle {bundle.name!r}"
    if has > needs:
        raise InputError(
            pair,
            "volumes are not cut into slices for sites with images",
            "name a bundle of images",
        )
    if lift == "refuse":
        raise InputError(
            pair,
            "lift=refuse takes data of equal dimensions only",
            "allow it with --set lift=pseudo3d (see its help)",
        )

    return _DEPTH


def _dimensions(bundle: Problem) -> int:
    """Return 2 or 3, from the image's shape in metadata.json; default 2."""
    inputs = bundle.metadata.get("network_data_format", {}).get("inputs", {})
    return len(inputs.get("image", {}).get("spatial_shape", ())) or 2


def _size(bundle: Problem, public: Problem, option: int, depth: int) -> Any:
    """Return the size to which public images are resized, None for their bundle's own; `option`: 0 for none."""
    if option:
        return option
    if bundle.task != "segmentation" or not bundle.dataset or not public.dataset:
        return None
    if not depth:
        return bundle.get("image_size")

    # the sides of the sites' slices, rounded down to a multiple of 16 that a U-Net halves four times
    sides = bundle.get("image_size") or bundle.get("patch_size")
    if sides:
        return max(_LEAST_SIDE, min(sides) // 16 * 16)

    return None
