"""Match masks to images: by their paths below their folders first, then by file name where only one image has it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from medfl.core import InputError, alike, listed

Named = Sequence[tuple[str, str]]
"""(path below a folder, without the file's ending; URI)."""

Matched = tuple[Mapping[str, str], Mapping[str, str]]
"""Name -> URI of the images, and of the masks by their images' names."""

MERGE = "merge the masks of an image into one, with the values 1, 2, … where they are of several structures"
MASK_END = re.compile(
    r"(?<=.)[_.-](?:mask|segmentation|seg|label|gt|ground_?truth)(?:[_-]?\d+)?$", re.IGNORECASE
)
# A name that says no more than what it is.
_ONLY = re.compile(r"(?:mask|segmentation|seg|label)s?", re.IGNORECASE)


def match(images: Named, masks: Named) -> Matched:
    """Return name -> URI of the images, and of the masks by their images' names; a mask without one by its path.

    A mask is of the image at its own path, its name with or without one of the endings _mask, _segmentation, _seg,
    _label, _gt and _groundtruth, or one of these with a number. Else it is of the image of that name, or, if it is
    called mask or the like, of the image in its folder. Once subfolders agree (patients'), a mask of one is of no
    image of another. An image's name is its file's; its path where several have that name.

    Raises:
        InputError: a mask that fits several images, or several masks that fit one; names the files.
    """
    uris_at = defaultdict(list)
    by_name = defaultdict(set)
    by_folder = defaultdict(set)
    spelling: dict[str, str] = {}
    masks = _compared(masks, spelling)
    images = _compared(images, spelling)
    for path, uri in images:
        folder, _, name = path.rpartition("/")
        uris_at[path].append(uri)
        by_name[name].add(path)
        by_folder[folder].add(path)

    by_path = {}
    for path, _ in masks:
        if image := next((form for form in _forms(path) if form in uris_at), None):
            by_path[path] = image

    # Once masks agree with images in subfolders, these are patients', who do not share masks.
    in_folders = any("/" in path for path in by_path.values())

    def fitting(path: str) -> list[str]:
        if path in by_path:
            return [by_path[path]]

        folder, _, name = path.rpartition("/")
        for form in _forms(name):
            paths = sorted(by_name.get(form, ()))
            if in_folders and folder:
                paths = [image for image in paths if "/" not in image]
            if paths:
                return paths

        if folder and _ONLY.fullmatch(name):
            return sorted(by_folder.get(folder, ()))

        return []

    matched: dict[str, str] = {}
    for path, uri in masks:
        fits = fitting(path)
        uris = [image for fit in fits for image in uris_at[fit]]
        if len(uris) > 1:
            raise InputError(
                f"mask {uri} fits the images {listed(uris, 2, ' and ')}",
                "a mask has the path of its image below their folders, or a name that one image has",
                "give the mask its image's name, or move it beside that image",
            )

        name = _name(fits[0], by_name, spelling) if fits else spelling[path]
        if name in matched:
            of = f" of image {uris[0]}" if uris else ""
            raise InputError(
                f"masks {matched[name]} and {uri} are both the mask{of}",
                "one for each image",
                f"remove one of them; {MERGE}",
            )

        matched[name] = uri

    return {_name(path, by_name, spelling): uris[0] for path, uris in uris_at.items()}, matched


def _compared(files: Named, spelling: dict[str, str]) -> Named:
    """Return files with their paths in the form that is compared, and enter how they are spelled."""
    plain = []
    for path, uri in files:
        spelling[alike(path)] = path
        plain.append((alike(path), uri))

    return plain


def _forms(path: str) -> tuple[str, str]:
    """Return what the image of a mask may be called."""
    return MASK_END.sub("", path), path


def _name(path: str, by_name: Mapping[str, set[str]], spelling: Mapping[str, str]) -> str:
    is_unique = len(by_name[path.rpartition("/")[2]]) == 1
    return spelling[path].rpartition("/")[2] if is_unique else spelling[path]
