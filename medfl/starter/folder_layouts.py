"""The layout of a user's image folders, for `medfl new`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from medfl.core.errors import InputError
from medfl.datasets import own
from medfl.datasets.readers import conventions, matching


@dataclass(frozen=True)
class UserLayout:
    """Where images, and masks or a table of labels, lie.

    Attributes:
        folder: what is given with --data.
        images, masks, labels: places in it, "." for the folder itself and "" where there is none.
        classes: value -> name of the masks' classes, where a file says them.
        ignored: value of pixels that nobody has labelled, by that file.
        channels: names of the images' channels, by that file.
        note: in which layout they are, where it is more than folders of their own.
    """

    folder: Path
    images: str = ""
    masks: str = ""
    labels: str = ""
    classes: Mapping[int, str] = field(default_factory=dict)
    ignored: int | None = None
    channels: tuple[str, ...] = ()
    note: str = ""


def find(
    images: str | Path,
    masks: str | Path | None = None,
    labels: str | Path | None = None,
    named: bool = False,
) -> UserLayout:
    """Return the layout of folders.

    Args:
        images: folder of the images; without `masks` and `labels` it holds a folder for each class, images beside
            their masks, nnU-Net's layout or BIDS.
        masks: folder of the masks, beside that of the images or in it.
        labels: table of the classes, beside the folder of the images or in it.
        named: the user names the structures, whatever a file in the folder calls them.

    Raises:
        InputError: no such folder, or one that is elsewhere.
    """
    root = Path(images).expanduser().resolve()
    if not root.is_dir():
        raise InputError(f"--images {images} is no folder", "a folder of images", "check the path")

    if labels is not None:
        if masks is not None:
            raise InputError(
                "--labels with --masks", "labelled pictures, or images with masks", "leave one out"
            )
        return _beside(root, Path(labels), "--labels", "table of the classes")

    if masks is not None:
        return _with_names(_beside(root, Path(masks), "--masks", "folder of the masks"), named)

    listed = conventions.NNUNET_FILE
    if conventions.listed_files(root / listed):
        return _with_names(
            UserLayout(root, listed, listed, note=f"nnU-Net's layout: files by {listed}"), named
        )

    names = conventions.NNUNET_FOLDERS
    if all((root / name).is_dir() for name in names):
        left_out = "; imagesTs is left out" * (root / "imagesTs").is_dir()
        return _with_names(
            UserLayout(root, *names, note=f"nnU-Net's layout: imagesTr and labelsTr{left_out}"),
            named,
        )

    if (root / conventions.BIDS_FILE).is_file():
        where = conventions.bids_masks(root)
        return UserLayout(
            root, ".", where, note=f"a BIDS data set: masks of {where}, patients are its subjects"
        )

    if note := _together(root):
        return UserLayout(root, ".", ".", note=note)

    return UserLayout(root)


def _beside(root: Path, place: Path, flag: str, kind: str) -> UserLayout:
    """Return the layout of images and a folder or table in the same folder, or in that of the images."""
    path = place.expanduser().resolve()
    if not (path.is_file() if flag == "--labels" else path.is_dir()):
        raise InputError(f"{flag} {place} is not there", f"the {kind}", "check the path")

    if path != root and path.is_relative_to(root):
        folder = root
        images = "."
    elif path.parent == root.parent and path != root:
        folder = root.parent
        images = root.name
    else:
        problem = f"--images {root} and {flag} {place}"
        allowed = f"the {kind} and the images beside each other, or it among them"
        raise InputError(problem, allowed, "put both into one folder")

    where = path.relative_to(folder).as_posix()
    if flag == "--labels":
        return UserLayout(folder, images, labels=where)

    return UserLayout(folder, images, where)


def _with_names(layout: UserLayout, named: bool) -> UserLayout:
    """Return a layout with the names that nnU-Net's dataset.json has, if it is one of nnU-Net."""
    path = layout.folder / conventions.NNUNET_FILE
    of_nnunet = (conventions.NNUNET_FOLDERS[1], conventions.NNUNET_FILE)
    if layout.masks not in of_nnunet or not path.is_file():
        return layout
    names, ignored = conventions.mask_labels(path, named)
    note = layout.note + f"; names of the structures by {conventions.NNUNET_FILE}" * bool(
        layout.note and names
    )
    channels = conventions.channel_names(path)
    return replace(layout, classes=names, ignored=ignored, channels=channels, note=note)


def _together(root: Path) -> str:
    """Tell whether a folder has images and their masks beside each other: most images have one; "" where not."""
    images, masks = own.paths(root, root, lacking=False)
    if not masks or 2 * len(masks) < len(images):
        return ""

    matches = (matching.MASK_END.search(path) for path, _ in masks)
    endings = sorted({match[0] for match in matches if match})
    return f"images and masks in one folder: files that end in {', '.join(endings)} are masks"
