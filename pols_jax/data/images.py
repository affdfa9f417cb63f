"""From image files to arrays: one way to decode, used for training, evaluation and search alike."""

import io
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from pols_jax.data.dataset import DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")

# What Pillow and its plugins raise for files that are damaged, cut short, or no images at all.
_DECODING_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, Image.DecompressionBombError)

_CROP_AREA = (0.08, 1.0)  # share of the picture that a random crop covers
_CROP_RATIO = (3 / 4, 4 / 3)  # width over height of a random crop


class ImageError(DataError):
    """An image cannot be decoded; the message says which and why."""


def open_image(source: str | Path | bytes, channels: int) -> Image.Image:
    """Open a picture the right way up, in grey or in colour.

    EXIF rotation is applied, 16-bit grey is scaled to 8 bits, palettes are resolved, and transparency is laid
    on white.

    Args:
        source: The path of a JPEG, PNG or WebP file, or its contents.
        channels: 1 for grey, 3 for colour.

    Returns:
        A picture of mode "L" or "RGB".

    Raises:
        ImageError: It cannot be decoded.

    >>> file = io.BytesIO()
    >>> Image.new("RGBA", (4, 3)).save(file, "PNG")
    >>> open_image(file.getvalue(), 3).getpixel((0, 0))
    (255, 255, 255)
    """
    if channels not in (1, 3):
        raise ValueError(f"images have 1 or 3 channels, not {channels}")
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            image.load()
            image = ImageOps.exif_transpose(image)
    except _DECODING_ERRORS as error:
        name = f"the image ({len(source)} bytes)" if isinstance(source, bytes) else str(source)
        raise ImageError(f"{name} cannot be decoded: {error}") from error
    if image.mode.startswith("I"):  # 16-bit grey; converting would clip instead of scale
        image = Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) // 257).astype(np.uint8))
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("L" if channels == 1 else "RGB")


def decode_image(
    source: str | Path | bytes, image_shape: tuple[int, int, int]
) -> UInt8[np.ndarray, "height width channels"]:
    """Decode a picture and fit it to a shape: scaled until it covers the shape, then cropped in the centre.

    This is how evaluation sees pictures, so anything that feeds a trained network should use it.

    Args:
        source: The path of a JPEG, PNG or WebP file, or its contents.
        image_shape: Height, width and channels (1 or 3).

    Returns:
        [h, w, c], uint8.

    Raises:
        ImageError: It cannot be decoded.

    >>> file = io.BytesIO()
    >>> Image.new("L", (40, 30), 255).save(file, "PNG")
    >>> decode_image(file.getvalue(), (28, 28, 1)).shape
    (28, 28, 1)
    """
    height, width, channels = image_shape
    image = open_image(source, channels)
    scale = min(image.width / width, image.height / height)
    crop_width, crop_height = scale * width, scale * height
    left, top = (image.width - crop_width) / 2, (image.height - crop_height) / 2
    return _crop_to(image, (left, top, left + crop_width, top + crop_height), image_shape)


def decode_random_crop(
    source: str | Path | bytes, image_shape: tuple[int, int, int], generator: np.random.Generator
) -> UInt8[np.ndarray, "height width channels"]:
    """Decode a random part of a picture for training, mirrored half of the time.

    The part covers 8 to 100 % of the area and is 3/4 to 4/3 as wide as high, before it is scaled to the shape.

    Args:
        source: The path of a JPEG, PNG or WebP file, or its contents.
        image_shape: Height, width and channels (1 or 3).
        generator: Decides on the part; the only randomness.

    Returns:
        [h, w, c], uint8.

    Raises:
        ImageError: It cannot be decoded.

    >>> file = io.BytesIO()
    >>> Image.new("RGB", (40, 30)).save(file, "PNG")
    >>> decode_random_crop(file.getvalue(), (24, 24, 3), np.random.default_rng(0)).shape
    (24, 24, 3)
    """
    image = open_image(source, image_shape[2])
    area = generator.uniform(*_CROP_AREA) * image.width * image.height
    ratio = np.exp(generator.uniform(*np.log(_CROP_RATIO)))
    crop_width, crop_height = (
        min(np.sqrt(area * ratio), image.width),
        min(np.sqrt(area / ratio), image.height),
    )
    left = generator.uniform(0, image.width - crop_width)
    top = generator.uniform(0, image.height - crop_height)
    pixels = _crop_to(image, (left, top, left + crop_width, top + crop_height), image_shape)
    return pixels[:, ::-1] if generator.integers(2) else pixels


def _crop_to(
    image: Image.Image, box: tuple[float, float, float, float], image_shape: tuple[int, int, int]
) -> UInt8[np.ndarray, "height width channels"]:
    height, width, _ = image_shape
    # Pillow's bilinear filter widens when it shrinks a picture, so nothing is skipped.
    resized = image.resize((width, height), Image.Resampling.BILINEAR, box=box)
    return np.asarray(resized, np.uint8).reshape(image_shape)
