"""Which mask is of which image: by the path in their folders first, then by the file's name where it is one image's."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from medfl.core.errors import InputError

Named = Sequence[tuple[str, str]]
"""(path below a folder, without the file's ending; URI)."""

ENDING = re.compile(r"(?<=.)_(?:mask|segmentation|seg|label)$", re.IGNORECASE)
_ONLY = re.compile(r"(?:mask|segmentation|seg|label)s?", re.IGNORECASE)  # a name that says no more than what it is


def match(images: Named, masks: Named) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return name -> URI of the images, and of the masks by their images' names; a mask without one by its path.

    A mask is of the image at its own path, its name with or without one of the endings _mask, _segmentation, _seg and
    _label. Else it is of the image of that name, or, if it is called mask or the like, of the image in its folder. Once
    subfolders agree (patients'), a mask of one is of no image of another. An image's name is its file's; its path where
    several have that name.

    Raises:
        InputError: a mask that fits several images, or several masks that fit one; names the files.
    """
    shown = defaultdict[str, list[str]](list)
    named, beside = (defaultdict[str, set[str]](set) for _ in range(2))
    for path, uri in images:
        folder, _, name = path.rpartition("/")
        shown[path].append(uri)
        named[name].add(path)
        beside[folder].add(path)

    by_path = {path: home for path, _ in masks if (home := next((p for p in _forms(path) if p in shown), None))}
    in_folders = any("/" in path for path in by_path.values())

    def fitting(path: str) -> list[str]:
        if path in by_path:
            return [by_path[path]]
        folder, _, name = path.rpartition("/")
        for form in _forms(name):
            if fits := sorted(p for p in named.get(form, ()) if not (in_folders and folder and "/" in p)):
                return fits
        return sorted(beside.get(folder, ())) if folder and _ONLY.fullmatch(name) else []

    found: dict[str, str] = {}
    for path, uri in masks:
        fits = fitting(path)
        uris = [one for fit in fits for one in shown[fit]]
        if len(uris) > 1:
            more = f" and {len(uris) - 2} more" if len(uris) > 2 else ""
            raise InputError(
                f"mask {uri} fits the images {uris[0]} and {uris[1]}{more}",
                "a mask has the path of its image below their folders, or a name that one image has",
                "rename or move the files",
            )
        name = _name(fits[0], named) if fits else path
        if name in found:
            of = f" of image {uris[0]}" if uris else ""
            raise InputError(
                f"masks {found[name]} and {uri} are both the mask{of}", "one an image", "remove one of them"
            )
        found[name] = uri
    single = {_name(path, named): uris[0] for path, uris in shown.items()}
    return single, found


def _forms(path: str) -> tuple[str, str]:
    """Return what the image of a mask may be called."""
    return ENDING.sub("", path), path


def _name(path: str, named: Mapping[str, set[str]]) -> str:
    name = path.rpartition("/")[2]
    return name if len(named[name]) == 1 else path
