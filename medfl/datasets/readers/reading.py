"""One reader for all images: a plain file, a member of a zip archive, a row of a NumPy archive, a list in a JSON file.

Image URIs: `<path>`, `<archive>.zip!<member>`, `<container>!<array>#<row>`, `<file>.json!<first byte>:<end>`. A
container is an .npz archive or one of `medfl.datasets.readers.stacks`. What lies in several files (the masks of two
lungs) has their URIs joined by ` | `.
"""

from __future__ import annotations

import functools
import io
import json
import math
import os
import re
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np
from PIL import EpsImagePlugin, ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import OPEN_INFO, ImageFileDirectory_v2, TiffImageFile
from PIL.TiffTags import TAGS_V2

from medfl.core import (
    Array,
    InputError,
    beginning,
    composed,
    folders_below,
    refuse_folder,
    refusing,
)
from medfl.datasets.readers import dicom, stacks
from medfl.datasets.readers.stacks import check_unpacked

# a page of PostScript, whatever its file is called, starts no program to draw it
EpsImagePlugin.gs_binary = False

# of grey TIFFs in which 0 is white Pillow knows some kinds alone: `white_is_high` turns the others too
for (_order, _photometric, _kind, _fill, _bits, _extra), _mode in [*OPEN_INFO.items()]:
    if _photometric == 1 and len(_bits) == 1:
        OPEN_INFO.setdefault((_order, 0, _kind, _fill, _bits, _extra), _mode)

# Once, as each change of the filters repeats what was warned of before. What Pillow warns of is read as it is
# described, refused, or damaged beside its pixels.
warnings.filterwarnings("ignore", module="PIL")

Pixels = Array
Files = list[tuple[str, str]]
"""Path or name, and URI, of each image or file."""

JOINED = " | "
READABLE = (
    "images are JPEG, PNG, BMP, TIFF or DICOM files, plain or in a zip, "
    "rows of an array or lists of a .json file"
)
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff")
_MOST_PAGES = 100  # that are looked at: a chain of more is no picture either
_SUBFILE_TYPE, _DESCRIPTION, _DEPTH = 254, 270, 32997  # tags of TIFF
_OF_IMAGEJ = re.compile(r"ImageJ=.*?^images=([0-9]{1,9})$", re.DOTALL | re.MULTILINE)
_NO_PAGE = 0b101  # its bits of a smaller copy and of a transparency mask
_FEW_BITS = re.compile(r"'L;([24])")  # a grey picture whose shades Pillow spreads over 0 to 255
_HDF5 = b"\x89HDF"
_OTHER_FILE = re.compile(
    rb"(?im)^\s*data ?file:"  # NRRD
    rb"|ElementDataFile\s*=(?!\s*LOCAL\s)"  # MetaImage
    rb"|ExternalFileName\s*=\s*(\"[^\"]|'[^'])"  # GIFTI
    rb"|^\s*ImageFile\s*="  # Hamamatsu's index of a slide
)
_INSIDE = re.compile(
    r"(.*?(?:\.zip|\.json|(?P<stack>\.npz|\.mat|-ubyte(?:\.gz)?|cifar-10-batches-py|cifar-100?-python(?:\.tar\.gz)?)))!(.*)",
    re.DOTALL,
)


def _version(path: str | Path) -> tuple[int, int]:
    stat = os.stat(path)
    return stat.st_mtime_ns, stat.st_size


def is_text(name: str) -> bool:
    """Tell whether a file's name is valid text, and does not contain what parts or joins URIs."""
    is_uri = JOINED in name or _INSIDE.fullmatch(name)
    return not is_uri and not any("\ud800" <= character <= "\udfff" for character in name)


def is_odd(path: str) -> bool:
    """Tell whether a path is to be skipped with a note: a pipe, a device, or a name that is not text."""
    return not is_text(os.path.basename(path)) or (
        not os.path.isfile(path) and os.path.exists(path)
    )


def names_other_file(head: bytes) -> bool:
    """Tell by its first bytes whether a file's header names another file as its pixels, or may: HDF5 has links."""
    # every match says `file`; nearly no image does, and the search takes milliseconds
    return head.startswith(_HDF5) or (
        b"file" in head.lower() and _OTHER_FILE.search(head) is not None
    )


def require_file(path: str) -> None:
    """Raise an InputError if a path leads to a pipe or a device, which would be waited for."""
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise InputError(f"{path} is a pipe or a device", "plain files", "remove it")


@functools.lru_cache(maxsize=64)
def _archive(path: str, version: tuple[int, int], process: int) -> zipfile.ZipFile:
    """Open an archive; each forked process opens its own, as shared file offsets would mix reads."""
    return zipfile.ZipFile(path)


@functools.lru_cache(maxsize=6)
def _array(path: str, name: str, version: tuple[int, int]) -> Pixels:
    if not path.endswith(".npz"):
        return stacks.load(path, name)
    with _member(path, f"{name}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def archive(path: str | Path) -> zipfile.ZipFile:
    """Return the zip archive at `path`, opened once per process.

    Raises:
        InputError: `path` is not a zip archive or is damaged.
    """
    require_file(str(path))
    with refusing(
        f"{path} cannot be opened", "a complete .zip or .npz file", "download or copy it again"
    ):
        return _archive(str(path), _version(path), os.getpid())


def is_hidden(name: str) -> bool:
    """Tell whether a path has a hidden part, or one that macOS, a NAS or a disk adds."""
    return any(
        part.startswith((".", "__MACOSX", "@eaDir", "lost+found")) for part in name.split("/")
    )


def shown_files(root: Path) -> Iterator[Path]:
    """Yield the files below a folder that are not hidden; what `is_odd` is passed over."""
    for base, folders, files in folders_below(root, refuse_folder):
        folders[:] = sorted(name for name in folders if not is_hidden(name) and is_text(name))
        for path in (Path(base, name) for name in files if not is_hidden(name)):
            if not is_odd(str(path)):
                yield path


def files_below(root: Path, endings: tuple[str, ...]) -> Files:
    """Return (relative path, URI) of the files with these endings, in any case, below a folder or in a zip, sorted."""
    if root.is_file():
        names = (name for name in archive(root).namelist() if not is_hidden(name))
        files = [(name, f"{root}!{name}") for name in names]
    else:
        files = [(path.relative_to(root).as_posix(), str(path)) for path in shown_files(root)]

    return by_name((name, uri) for name, uri in files if name.lower().endswith(endings))


def by_name(files: Iterable[tuple[str, str]]) -> Files:
    """Return files sorted by name, the names in composed characters, by which they are compared with others.

    Raises:
        InputError: two of them look the same, as their characters are composed in one and not in the other.
    """
    uri_of: dict[str, str] = {}
    for name, uri in files:
        if (alternative := uri_of.setdefault(composed(name), uri)) != uri:
            raise InputError(
                f"{ascii(alternative)} and {ascii(uri)} have one name, in characters that look alike",
                "names that differ to the eye (Unicode NFC; of classes NFKC)",
                "rename one of them, or remove it",
            )

    return sorted(uri_of.items())


def array(path: str | Path, name: str) -> Pixels:
    """Return the array `name` of an .npz file or another container, loaded once per process.

    Raises:
        InputError: no such array, or it is damaged.
    """
    with refusing(f"array {name!r} of {path} cannot be read", READABLE, "download the file again"):
        try:
            values = _array(str(path), name, _version(path))
        except KeyError as error:
            names = ", ".join(Path(member).stem for member in archive(path).namelist())
            raise InputError(
                f"{path} has no array {name!r}", f"it has {names}", "download the file again"
            ) from error

        if not values.ndim:
            raise ValueError("it has no rows")

    return values


def _member(path: str | Path, name: str) -> IO[bytes]:
    """Open a file of an archive, unless it would fill the memory."""
    info = archive(path).getinfo(name)
    check_unpacked(info.file_size, info.compress_size)
    return archive(path).open(info)


def read_member(path: str | Path, name: str) -> bytes:
    """Return the content of a file in an archive; any error means that it cannot be read."""
    with _member(path, name) as file:
        return file.read()


def split_uri(uri: str) -> tuple[str, str]:
    """Split an image URI into the file's path and the part inside it ("" for a plain file)."""
    match = _INSIDE.fullmatch(uri)
    return (match[1], match[3]) if match else (uri, "")


def files_of(uris: Iterable[str]) -> set[str]:
    """Return the paths of the files in which images lie."""
    return {split_uri(part)[0] for uri in uris for part in uri.split(JOINED)}


def container_uri(uri: str) -> str:
    """Return the URI that stands for an image's content: for the rows of an array that of the first."""
    match = _INSIDE.fullmatch(uri)
    if match and match["stack"]:
        return f"{match[1]}!{match[3].rpartition('#')[0]}#0"

    return uri


def content_key(uri: str) -> str:
    """Return "<bytes>:<CRC-32>" of the image file at `uri`, without decoding it; for a row that of the whole array.

    For a list in a JSON file return that of the list's text, for a folder (a DICOM series) or joined files each file's.

    Raises:
        InputError: the file is not there.
    """
    if JOINED in uri:
        return ",".join(map(content_key, uri.split(JOINED)))

    path, part = split_uri(uri)
    require_file(path)
    try:
        if path.endswith(".json") and part:
            return _checksum(_text(path, part))
        if part and not path.endswith((".zip", ".npz")):
            return _checksum(array(path, part.rpartition("#")[0]).tobytes())

        if os.path.isdir(path):  # a DICOM series
            inside = [os.path.join(path, name) for name in sorted(os.listdir(path))]
            return ",".join(content_key(name) for name in inside if os.path.isfile(name))

        if part:
            info = archive(path).getinfo(
                part if path.endswith(".zip") else part.rpartition("#")[0] + ".npy"
            )
            return f"{info.file_size}:{info.CRC:08x}"

        return _checksum(Path(path).read_bytes())
    except (OSError, KeyError) as error:
        raise InputError(
            f"image {uri} cannot be read ({error})",
            READABLE,
            "check the path, or copy the file again",
        ) from error


def _checksum(content: bytes) -> str:
    return f"{len(content)}:{zlib.crc32(content):08x}"


def stored_key(uri: str | Path) -> str:
    """Return a key that is equal for URIs of the same image: `content_key`, and the row in an array.

    It is "" if there is no such file.
    """
    match = _INSIDE.fullmatch(str(uri))
    row = match[3].rpartition("#")[2] if match and match["stack"] else ""
    try:
        return f"{content_key(str(uri))}#{row}"
    except InputError:
        return ""


def read_pixels(
    uri: str,
    size: tuple[int, int] | None = None,
    channels: int | None = None,
    convert: bool = False,
    is_mask: bool = False,
) -> Pixels:
    """Read an image as a (H, W, C) array of its own type, resized to `size` (H, W) and checked for `channels`.

    A picture is upright as its EXIF orientation says, white is its highest value, and a DICOM file is as a viewer shows
    it (`dicom.read_picture`). A mask with a palette of colours is its indices, one of 2 or 4 bits its values as stored.

    Raises:
        InputError: unreadable or truncated image, one of several pages or in several files, values that are not
            finite, or another number of channels that is not converted.
    """
    if JOINED in uri:
        raise InputError(
            f"image {uri} has its channels in several files",
            "channels of a picture in one file, of a volume in several",
            "save them as one RGB picture, or as NIfTI",
        )

    advice = "copy the file again, or remove it from the data"
    with refusing(f"image {uri} cannot be read", READABLE, advice):
        path, part = split_uri(uri)
        require_file(path)
        if path.endswith(".json"):
            pixels = _square(json.loads(_text(path, part)))
        elif (
            not part
            and not path.lower().endswith(IMAGE_SUFFIXES)
            and dicom.is_named_or_begins_so(path)
        ):
            if is_mask:
                raise InputError(
                    f"mask {uri} is a DICOM file",
                    "masks of pictures are PNG, BMP or TIFF files",
                    "convert it, for example with 3D Slicer or dcmqi",
                )

            pixels = dicom.read_picture(path)
        elif part and not path.endswith(".zip"):
            name, _, row = part.rpartition("#")
            # A copy: the loaded array stays as it is, whatever is done to the image.
            pixels = array(path, name)[int(row)].copy()
        else:
            with opened(uri) as image:
                if (pages := _pages(image)) > 1:
                    raise InputError(
                        f"image {uri} has {pages} pages",
                        "one picture in each file",
                        "save each page as a file of its own",
                    )

                if loses(image):
                    content = read_member(path, part) if part else Path(path).read_bytes()
                    # Eight bytes a value, which is what resizing takes.
                    check_unpacked(8 * math.prod(image.size) * len(image.getbands()), len(content))
                    turn = orientation(image)
                    pixels = _upright(read_many_bits(image, content), turn)
                    image.load()  # which refuses a file that is damaged
                else:
                    pixels = _decode(image, size, channels if convert else None, is_mask)

                pixels = white_is_high(image, pixels, is_mask)

        if pixels.dtype.kind not in "biuf" or pixels.itemsize > 8:
            raise ValueError(f"it holds {pixels.dtype} values")

        if pixels.dtype.kind == "f" and not np.isfinite(pixels).all():
            raise InputError(
                f"image {uri} has values that are no numbers (NaN or infinite)",
                "pixels are finite",
                advice,
            )

        pixels = pixels.astype(pixels.dtype.newbyteorder("="), copy=False)

    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if channels and pixels.shape[-1] != channels:
        if not convert or {channels, pixels.shape[-1]} - {1, 2, 3, 4}:
            raise InputError(
                f"image {uri} has {pixels.shape[-1]} channels",
                f"the data set has {channels}",
                "convert the file, or remove it from the data",
            )

        pixels = _convert(pixels, channels)

    if size is None or pixels.shape[:2] == size:
        return pixels

    return resize(pixels, size)


def palette_of(uri: str) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return the indices of a picture with a palette of colours, and the colours (3,); nothing of any other picture."""
    path, part = split_uri(uri)
    if part and not path.endswith(".zip"):
        return [], []
    advice = "copy the file again"
    with refusing(f"image {uri} cannot be read", READABLE, advice), opened(uri) as image:
        if image.mode != "P" or _is_grey(image.convert("RGB")):
            return [], []
        palette = np.reshape(image.getpalette("RGB") or [], (-1, 3)).tolist()
        return np.unique(np.asarray(image)).tolist(), list(map(tuple, palette))


@contextmanager
def opened(uri: str) -> Iterator[ImageFile]:
    """Open a picture: a file, or one in a zip archive."""
    path, part = split_uri(uri)
    # of a path Pillow would map the bytes of a TIFF that lies on its side as if it stood
    with io.BytesIO(read_member(path, part)) if part else open(path, "rb") as source:
        try:
            image = Image.open(source)
        except UnidentifiedImageError as error:
            reason = f"no picture that is known; {beginning(source)}"
            with suppress(Exception):  # of another kind, or damaged
                reason = (
                    f"a TIFF with {tags_of(source) or 'no tag, or a BigTIFF in big-endian order'}"
                )

            raise ValueError(reason) from error

        with image:
            yield image


def turned(uri: str) -> str:
    """Return what is said of a picture beside its mask if its EXIF turns it, "" otherwise."""
    with suppress(ValueError), opened(uri) as image:
        if orientation(image) != 1:
            return "the image is turned upright by its EXIF, the mask is as stored; "

    return ""  # also of a DICOM file


def _text(path: str, part: str) -> bytes:
    """Read the bytes `<first>:<end>` of a file."""
    start, stop = map(int, part.split(":"))
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(stop - start)


def _square(numbers: object) -> Pixels:
    """Return the 8-bit (S, S) image of S * S numbers in 0..1, row by row."""
    values = np.asarray(numbers, dtype=np.float64)
    side = math.isqrt(values.size)
    if (
        values.ndim != 1
        or side == 0
        or side * side != values.size
        or not ((values >= 0) & (values <= 1)).all()
    ):
        raise ValueError("it is not a list of as many numbers in 0..1 as a square image has pixels")
    return np.rint(values * 255).astype(np.uint8).reshape(side, side)


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation that is left to be applied to an opened picture, 1 for none; from 5 on it lies."""
    if image.format == "TIFF" or "exif" not in image.info:  # Pillow turns a TIFF itself
        return 1
    try:
        # 1 upright, 2 to 4 mirrored or turned round, 5 to 8 on its side
        turn = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF says nothing of the pixels
        return 1

    return turn if turn in range(1, 9) else 1


def _upright(pixels: Pixels, turn: int) -> Pixels:
    """Turn pixels (H, W[, C]) by an EXIF orientation."""
    if turn > 4:
        pixels = pixels.swapaxes(0, 1)

    # Then it is mirrored along x, along both axes, or along y.
    step_of_rows, step_of_columns = ((1, 1), (1, -1), (-1, -1), (-1, 1))[(turn - 1) % 4]
    return np.ascontiguousarray(pixels[::step_of_rows, ::step_of_columns])


def _pages(image: Image.Image) -> int:
    """Return the number of pictures in a file, without the smaller copies and masks of a TIFF and of a camera."""
    if not isinstance(image, TiffImageFile):
        if image.format == "MPO":
            return 1
        return getattr(image, "n_frames", 1)

    # large stacks have one page, after which the slices lie
    if stack := _OF_IMAGEJ.match(str(image.tag_v2.get(_DESCRIPTION, ""))):
        return int(stack[1])

    pages = 0
    with suppress(EOFError):  # after the last one
        for page in range(_MOST_PAGES):
            image.seek(page)
            kind = image.tag_v2.get(_SUBFILE_TYPE, 0)
            if not (isinstance(kind, int) and kind & _NO_PAGE):
                pages += int(image.tag_v2.get(_DEPTH, 1))

    image.seek(0)
    return max(1, pages)


def _decode(
    source: ImageFile, size: tuple[int, int] | None, channels: int | None, is_mask: bool
) -> Pixels:
    """Decode, scaling a JPEG down by 2, 4 or 8 inside the decoder (draft mode) and the rest with antialiasing."""
    image: Image.Image = source
    step = 1
    if is_mask and (match := _FEW_BITS.search(str(source.tile))):
        step = 255 // (2 ** int(match[1]) - 1)

    turned = orientation(image)
    if size is not None and image.format == "JPEG":
        modes = {1: "L", 3: "RGB"}
        if image.mode == "CMYK":
            modes = {}

        # a draft has about the size, and the antialiasing below the rest
        image.draft(modes.get(channels or 0), size if turned >= 5 else size[::-1])

    if turned != 1:
        image = ImageOps.exif_transpose(image)

    if is_mask and image.mode == "P" and not _is_grey(image.convert("RGB")):
        return np.array(image)
    if image.mode == "CMYK" or image.mode.startswith(("P", "YCbCr", "HSV", "LAB")):
        image = image.convert("RGB")
    elif image.mode == "1":
        image = image.convert("L")

    if size is not None and image.size != size[::-1] and image.mode in ("L", "RGB"):
        image = image.resize(size[::-1], Image.Resampling.BILINEAR)

    decoded: Pixels = np.array(image)
    if step > 1:
        return decoded // step
    # Pillow opens grey pictures of 16 bits as 32-bit integers.
    if decoded.dtype == np.int32 and decoded.min() >= 0 and decoded.max() < 65536:
        return decoded.astype(np.uint16)

    return decoded.astype(decoded.dtype.newbyteorder("="))


def _is_grey(image: Image.Image) -> bool:
    """Tell whether all colours of a picture are shades of grey."""
    red, green, blue = image.split()
    return red == green == blue


def _convert(pixels: Pixels, channels: int) -> Pixels:
    """Convert between grey and RGB, dropping an alpha channel (ITU-R 601 luma, as PIL)."""
    colour = pixels[..., :-1] if pixels.shape[-1] in (2, 4) else pixels
    if channels not in (1, 3):
        raise ValueError(f"cannot convert to {channels} channels")
    if colour.shape[-1] == channels:
        return colour
    if channels == 3:
        return np.repeat(colour, 3, axis=-1)

    grey = colour.astype(np.float64) @ np.array([[0.299], [0.587], [0.114]])
    converted: Pixels = (grey if colour.dtype.kind == "f" else np.rint(grey)).astype(colour.dtype)
    return converted


def resize(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """Antialiased bilinear resize of a (H, W, C) array, keeping its type."""
    # Bytes as where a JPEG is decoded to a size, by Pillow, which has no other types.
    if pixels.dtype == np.uint8 and pixels.shape[-1] in (1, 3):
        image = Image.fromarray(
            np.ascontiguousarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        )
        resized = np.array(image.resize(size[::-1], Image.Resampling.BILINEAR))
        return np.atleast_3d(resized)

    import torch

    # pixel centres stay where they are (align_corners), as Pillow has it above
    batch = torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1)[None]
    scaled = torch.nn.functional.interpolate(
        batch, size=size, mode="bilinear", antialias=True, align_corners=False
    )
    values = scaled[0].permute(1, 2, 0).numpy()

    return (values if pixels.dtype.kind == "f" else np.rint(values)).astype(pixels.dtype)


# Pictures of more bits than Pillow keeps: it drops half of colours of 16 bits, and signs; SimpleITK reads all

_BITS, _PACKING, _PHOTOMETRIC, _STRIPS, _ORIENTATION, _SIZES, _PLANES, _FORMAT = (
    258, 259, 262, 273, 274, 279, 284, 339,
)  # fmt: skip
"""Tags of TIFF."""
_APART = 2  # PlanarConfiguration: the channels lie one after the other
_UNSIGNED, _SIGNED, _FLOAT = 1, 2, 3


def loses(image: ImageFile) -> bool:
    """Tell whether Pillow would drop bits or signs of an opened picture."""
    if isinstance(image, PngImageFile):
        return image.mode != "I;16" and "16" in str(image.tile[0].args)
    if not isinstance(image, TiffImageFile):
        return False

    bits, kind = _stored(image)
    return (
        (kind == _SIGNED and bits == 8)
        or "LX" in str(image.tile[0].args)
        or (kind == _UNSIGNED and bits > 8 and (bits > 16 or len(image.getbands()) > 1))
    )


def read_many_bits(image: ImageFile, content: bytes) -> Array:
    """Read such a picture, upright but for its EXIF, as (H, W) or (H, W, C) with C 3 or 4.

    Raises:
        ValueError: it cannot be read; it is grey with transparency, of inks, in packed planes or on its side.
    """
    layout = str(image.tile[0].args)
    if "LX" in layout:
        raise ValueError("it has a second channel, of which ExtraSamples says nothing: save one")
    if "LA;" in layout or "CMYK" in layout:
        raise ValueError("it is grey with transparency, or of inks, in 16 bits: save it without")

    bits = 16
    if isinstance(image, TiffImageFile):
        bits, _ = _stored(image)
        if image.tag_v2.get(_ORIENTATION, 1) != 1:
            raise ValueError("it lies on its side by Orientation: save it as PNG")
        if image.tag_v2.get(_PLANES) == _APART:
            return _planes(image, content, bits)

    sitk = dicom.sitk()
    with tempfile.TemporaryDirectory() as folder:  # SimpleITK reads files only
        path = Path(folder, "picture")
        path.write_bytes(content)
        with dicom.itk_errors():
            pixels: Array = sitk.GetArrayFromImage(
                sitk.ReadImage(str(path), imageIO=f"{image.format}ImageIO")
            )

    # of tiles ITK makes RGBA
    if 8 * pixels.itemsize != bits or pixels.ndim - 1 != min(2, len(image.getbands())):
        raise ValueError(
            f"it has {bits} bits a channel, or lies in tiles: save it as PNG of 8 or 16"
        )

    return pixels


def _planes(image: TiffImageFile, content: bytes, bits: int) -> Array:
    """Return the channels (H, W, C) of a TIFF in which they lie one after the other."""
    tags = image.tag_v2
    sizes = tags.get(_SIZES, ())
    length = math.prod(image.size) * len(tags[_BITS]) * bits // 8
    if tags.get(_PACKING) != 1 or sum(sizes) != length:
        raise ValueError(
            "its channels lie apart by PlanarConfiguration, and packed or in tiles: save it as PNG"
        )

    planes = bytearray()
    for start, size in zip(tags[_STRIPS], sizes, strict=True):
        planes += content[start : start + size]

    order = ">" if content.startswith(b"MM") else "<"
    values = np.frombuffer(planes, f"{order}u{bits // 8}")
    return np.moveaxis(values.reshape(-1, image.height, image.width), 0, -1)


def tags_of(file: IO[bytes]) -> str:
    """Return the tags by which a TIFF says how it is stored; an error means that it is none."""
    file.seek(0)
    tags = ImageFileDirectory_v2(file.read(8))
    file.seek(tags.next)
    tags.load(file)
    present = tags.keys() & {_BITS, _FORMAT, _PHOTOMETRIC, _PACKING, _PLANES}
    return ", ".join(f"{TAGS_V2[tag].name} {tags[tag]}" for tag in sorted(present))


def white_is_high(image: ImageFile, pixels: Array, is_mask: bool) -> Array:
    """Return the pixels of a TIFF in which 0 is white with white as the highest value; Pillow does so up to 8 bits.

    Raises:
        ValueError: they are no whole numbers, and so have no highest value; or a mask of more than a bit, which ImageJ
            writes without turning its values.
    """
    if not isinstance(image, TiffImageFile) or image.tag_v2.get(_PHOTOMETRIC) != 0:
        return pixels

    bits, kind = _stored(image)
    if kind == _FLOAT or (is_mask and bits > 1):
        raise ValueError(
            "0 is white in it by PhotometricInterpretation, which is unclear in a mask and in real numbers: "
            "save it with black as 0"
        )
    if bits <= 8 and kind == _UNSIGNED:
        return pixels

    # of eight bits: Pillow may have read the others as unsigned, if none is below 0
    return (2**bits - 1 if kind == _UNSIGNED else np.int8(-1)) - pixels


def _stored(image: TiffImageFile) -> tuple[int, int]:
    """Return the bits of a channel, and the format of its numbers."""
    return max(image.tag_v2.get(_BITS, (1,))), max(image.tag_v2.get(_FORMAT, (_UNSIGNED,)))


# The class of an item in a data list: an int that can also be opened as a label image (see `label_images`)

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
