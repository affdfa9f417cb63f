"""From image files to arrays: one way to open and decode, used for training, evaluation and search alike."""

import contextlib
import io
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

from pols_jax.errors import ImageError, printable, reason_of
from pols_jax.files import read_bytes

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""The formats that are opened, as Pillow names them; some of its others start programs, or trust what a file says."""

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")
"""How the names of such files end, in lower case."""

_DRAFT_FACTOR = 2  # a JPEG is decoded at no less than this times the wanted size

# How a picture is turned upright, by the orientation that EXIF gives.
_EXIF_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# The filter of warnings from Pillow's modules, as the list of filters has it.
_PILLOW = r"PIL\."
_SILENCE = ("ignore", None, Warning, re.compile(_PILLOW), 0)


def decode_image(
    source: str | Path | bytes,
    image_shape: tuple[int, int, int],
    *,
    name: str | None = None,
    max_pixels: int | None = None,
) -> UInt8[np.ndarray, "height width channels"]:
    """Decodes a picture and fits it to a shape: scaled until it covers the shape, then cropped in the center.

    This is how evaluation sees pictures, so anything that feeds a trained network should use it. EXIF rotation is
    applied, 16-bit gray is scaled to 8 bits, palettes are resolved, and transparency is laid on white. Of an animation
    the first picture is taken. A JPEG of at least four times the wanted size is shrunk while it is decoded, to no less
    than twice that size: several times faster, and a gray level away from the full decoding on average.

    Args:
      source: The path of a JPEG, PNG, WebP, GIF or BMP file, or its contents.
      image_shape: Height, width and channels (1 or 3).
      name: What an error calls the picture; by default its path or its size.
      max_pixels: A picture that says it has more is refused before it is decoded.

    Raises:
      ImageError: if it cannot be decoded, whatever the reason; the message names the file.

    Examples:
      >>> file = io.BytesIO()
      >>> Image.new("L", (40, 30), 255).save(file, "PNG")
      >>> decode_image(file.getvalue(), (28, 28, 1)).shape
      (28, 28, 1)
    """
    height, width, channels = image_shape
    if channels not in (1, 3):
        raise ValueError(f"images have 1 or 3 channels, not {channels}")
    if height < 1 or width < 1:
        raise ValueError(f"images have at least one pixel, got image_shape {image_shape}")
    # Both sides of a JPEG stay at least twice as long as is wanted, whichever way up, so that the filter below still sees
    # the detail that it averages.
    enough = _DRAFT_FACTOR * max(height, width)
    with _named_errors(source, name):
        image = _open(source, "L" if channels == 1 else "RGB", enough, max_pixels)
        # Pillow's bilinear filter widens when it shrinks a picture, so nothing is skipped.
        box = central_box(image.size, (width, height))
        resized = image.resize((width, height), Image.Resampling.BILINEAR, box=box)
        return np.asarray(resized, np.uint8).reshape(image_shape)


def decode_thumbnail(
    source: str | Path | bytes, largest: int, *, max_pixels: int | None = None
) -> UInt8[np.ndarray, "height width channels"]:
    """Decodes a whole picture for people to look at: as it is, or scaled down until no side is larger than asked.

    Args:
      source: As for `decode_image`.
      largest: The most pixels that a side may have.
      max_pixels: As for `decode_image`.

    Examples:
      >>> file = io.BytesIO()
      >>> Image.new("L", (400, 300), 255).save(file, "PNG")
      >>> decode_thumbnail(file.getvalue(), 100).shape, decode_thumbnail(file.getvalue(), 1000).shape
      ((75, 100, 3), (300, 400, 3))
    """
    with _named_errors(source):
        image = _open(source, "RGB", largest, max_pixels)
        image.thumbnail((largest, largest), Image.Resampling.BILINEAR)
        return np.asarray(image, np.uint8)


def central_box(size: tuple[int, int], target: tuple[int, int]) -> tuple[float, float, float, float]:
    """Finds the largest central part of a picture that has the proportions of a target: left, top, right and bottom.

    Examples:
      >>> central_box((40, 30), (28, 28))
      (5.0, 0.0, 35.0, 30.0)
    """
    scale = min(size[0] / target[0], size[1] / target[1])
    # Rounding can make scale * target a little larger than the side that it should equal.
    width, height = (min(scale * side, whole) for side, whole in zip(target, size, strict=True))
    left, top = (size[0] - width) / 2, (size[1] - height) / 2
    return left, top, min(left + width, size[0]), min(top + height, size[1])


@contextlib.contextmanager
def _named_errors(source: str | Path | bytes, name: str | None = None) -> Iterator[None]:
    """Turns whatever goes wrong into an `ImageError` that names the picture."""
    try:
        yield
    except Exception as error:  # Pillow and its plugins raise whatever a damaged file makes them stumble over
        if name is None:
            name = f"the image ({len(source)} bytes)" if isinstance(source, bytes) else str(source)
        reason = printable(reason_of(error))
        if isinstance(error, UnidentifiedImageError):
            reason = f"it is not a picture in one of the formats {', '.join(IMAGE_FORMATS)}"
        raise ImageError(f"{printable(name)} cannot be decoded: {reason.rstrip('.')}.") from error


def _open(source: str | Path | bytes, mode: str, enough: int, max_pixels: int | None) -> Image.Image:
    """Opens a picture the right way up, in gray ("L") or in color ("RGB"); the one place where files meet Pillow.

    A JPEG is shrunk to a half, a quarter or an eighth while it is decoded, as far as its sides stay long enough.
    """
    data = source if isinstance(source, bytes) else read_bytes(source)
    silence_pillow()
    with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
        if max_pixels is not None and image.width * image.height > max_pixels:
            raise ValueError(f"it has {image.width} x {image.height} pixels, and {max_pixels:,} are the most")
        image.draft(None, (enough, enough))
        image.load()
        # Not `ImageOps.exif_transpose`: it also writes the metadata anew, which fails for some that can be read.
        turn = _TURNS.get(image.getexif().get(_EXIF_ORIENTATION, 1))
        if turn is not None:
            image = image.transpose(turn)
    if image.mode.startswith("I"):  # 16-bit gray; converting would clip instead of scale
        image = Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) // 257).astype(np.uint8))
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert(mode)


def silence_pillow() -> None:
    """Keeps Pillow from warning about what it can still decode: odd metadata, very large pictures.

    Examples:
      >>> with warnings.catch_warnings():
      ...     silence_pillow()
    """
    # Not `catch_warnings`, which restores the wrong filters when threads use it at the same time.
    if tuple(warnings.filters[:1]) != (_SILENCE,):
        warnings.filterwarnings("ignore", module=_PILLOW)
