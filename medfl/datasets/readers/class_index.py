"""The class of an item in a data list: an int that can also be opened as a label image (see `label_images`)."""

from __future__ import annotations

OF_CLASS = "?class="


class ClassIndex(int):
    """The index of an item's class, which as a path is that of its label image."""

    def __new__(cls, index: int, image: str = "") -> ClassIndex:
        """Take the index, and the URI of the image whose size the label image has."""
        instance = super().__new__(cls, index)
        instance.image = image
        return instance

    image: str

    def __fspath__(self) -> str:
        return f"{self.image}{OF_CLASS}{int(self)}"
