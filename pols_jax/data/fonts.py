"""Reading typefaces from font files and drawing their characters as small bitmaps."""

import dataclasses
import glob
import hashlib
import io
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from fontTools.ttLib import TTCollection, TTFont, TTLibError
from jaxtyping import UInt8
from PIL import ImageFont

from pols_jax.data.dataset import DataError

_TEXT_SIZE = 0.7  # em size as a share of the bitmap: nearly every character of DejaVu and Noto CJK fits
_FONT_ERRORS = (
    TTLibError,
    KeyError,
    AssertionError,
    ValueError,
    struct.error,
)  # what fontTools raises for others
_MARGIN = 1 / 16  # free border on each side as a share of the bitmap


@dataclasses.dataclass(frozen=True)
class Face:
    """One typeface of a font file.

    Attributes:
        name: Family and style, as in "DejaVu Sans Bold".
        path: The font file.
        index: Which face of a collection; 0 for a plain font file.
        sha256: Hash of the font file.

    >>> Face("DejaVu Sans", Path("DejaVuSans.ttf"), index=0, sha256="3fdf69ca").name
    'DejaVu Sans'
    """

    name: str
    path: Path
    index: int
    sha256: str


def dejavu_paths() -> list[Path]:
    """The twelve DejaVu text faces that matplotlib brings along.

    >>> len(dejavu_paths())
    12
    """
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return sorted(path for path in folder.glob("DejaVuS*.ttf") if "Display" not in path.name)


def read_faces(paths: Iterable[str | Path]) -> list[Face]:
    """Read every face of font files; of a collection (.ttc, .otc) all that it holds.

    Args:
        paths: TrueType or OpenType files, or patterns such as "/usr/share/fonts/opentype/noto/*CJK*.ttc".

    Returns:
        The faces in the order of the files; the files of a pattern in the order of their names.

    Raises:
        DataError: A file cannot be read, or two faces have one name.

    >>> read_faces(dejavu_paths()[:1])[0].name
    'DejaVu Sans Bold'
    """
    faces = [face for path in paths for file in _files_of(str(path)) for face in _faces_of(file)]
    seen: dict[str, Face] = {}
    for face in faces:
        if face.name in seen:
            raise DataError(
                f"the fonts {seen[face.name].path} and {face.path} both hold a face named {face.name!r}: leave one out"
            )
        seen[face.name] = face
    return faces


def _files_of(path: str) -> list[Path]:
    if Path(path).exists() or not glob.has_magic(path):
        return [Path(path)]
    files = sorted(glob.glob(path))
    if not files:
        raise DataError(f"no font file matches {path}: install the fonts, or name files that exist")
    return [Path(file) for file in files]


def _faces_of(path: Path) -> list[Face]:
    try:
        data = path.read_bytes()
        file = io.BytesIO(data)
        fonts = TTCollection(file, lazy=True).fonts if data[:4] == b"ttcf" else [TTFont(file, lazy=True)]
        sha256 = hashlib.sha256(data).hexdigest()
        faces = []
        for index, font in enumerate(fonts):
            names = font["name"]
            family, style = (
                names.getDebugName(typographic) or names.getDebugName(legacy) or ""
                for typographic, legacy in ((16, 1), (17, 2))
            )
            name = family if style in ("Regular", "Book", "") else f"{family} {style}"
            faces.append(Face(name or path.stem, path, index, sha256))
        return faces
    except OSError as error:
        raise DataError(f"the font {path} cannot be opened: {error.strerror or error}") from error
    except _FONT_ERRORS as error:
        raise DataError(f"the font {path} cannot be read as TrueType or OpenType: {error}") from error


def characters_of(face: Face) -> frozenset[int]:
    """The code points that a face has a glyph for.

    >>> ord("A") in characters_of(read_faces(dejavu_paths()[:1])[0])
    True
    """
    try:
        with TTFont(face.path, fontNumber=face.index, lazy=True) as font:
            return frozenset(font.getBestCmap() or ())
    except _FONT_ERRORS as error:
        raise DataError(f"the characters of the font {face.path} cannot be read: {error}") from error


def render(face: Face, characters: Sequence[int], size: int) -> UInt8[np.ndarray, "characters size size"]:
    """Draw characters of a face, each centred by its ink, 255 on 0.

    All characters of a face share one text size, so that o and O differ; those too large for the bitmap are
    drawn smaller.

    Args:
        face: The typeface.
        characters: Code points.
        size: Height and width of a bitmap in pixels.

    Returns:
        [characters, size, size], uint8; all zero where a character leaves no ink.

    >>> render(read_faces(dejavu_paths()[:1])[0], [ord("A"), ord(" ")], 32).any(axis=(1, 2)).tolist()
    [True, False]
    """
    text_size, room = max(1, round(_TEXT_SIZE * size)), size - 2 * max(1, round(_MARGIN * size))
    bitmaps = np.zeros((len(characters), size, size), np.uint8)
    fonts: dict[int, ImageFont.FreeTypeFont] = {}
    for bitmap, character in zip(bitmaps, characters, strict=True):
        ink = None
        fitting_size = text_size
        while fitting_size:
            if fitting_size not in fonts:
                # The basic layout does not depend on whether Raqm is installed.
                fonts[fitting_size] = ImageFont.truetype(
                    str(face.path), fitting_size, index=face.index, layout_engine=ImageFont.Layout.BASIC
                )
            ink = _ink(fonts[fitting_size], chr(character))
            if ink is None or max(ink.shape) <= room:
                break
            fitting_size = min(fitting_size - 1, fitting_size * room // max(ink.shape))
        if ink is not None:
            top, left = (size - ink.shape[0]) // 2, (size - ink.shape[1]) // 2
            bitmap[top : top + ink.shape[0], left : left + ink.shape[1]] = ink
    return bitmaps


def _ink(font: ImageFont.FreeTypeFont, character: str) -> UInt8[np.ndarray, "height width"] | None:
    """The smallest bitmap that holds all ink of a character, or None."""
    mask: Any = font.getmask(character, mode="L")  # the stubs do not know that it has bytes
    box = mask.getbbox()
    if box is None:
        return None
    left, top, right, bottom = box
    width, height = mask.size
    return np.frombuffer(bytes(mask), np.uint8).reshape(height, width)[top:bottom, left:right]
