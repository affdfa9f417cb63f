"""Reading typefaces from font files and drawing their characters as small bitmaps."""

import dataclasses
import functools
import glob
import hashlib
import io
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from fontTools.ttLib import TTCollection, TTFont
from jaxtyping import UInt8
from PIL import ImageFont

from pols_jax.errors import DataError, printable, reason_of
from pols_jax.files import read_bytes

# What matters of a damaged font is raised; its log can have one line per name of the font.
logging.getLogger("fontTools").setLevel(logging.CRITICAL)

_TEXT_SIZE = 0.7  # em size as a share of the bitmap: nearly every character of DejaVu and Noto CJK fits
_MARGIN = 1 / 16  # free border on each side as a share of the bitmap


@dataclasses.dataclass(frozen=True)
class Face:
    """One typeface: family and style, font file, place in a collection (else 0), and hash of the file."""

    name: str
    path: Path
    index: int
    sha256: str


def dejavu_paths() -> list[Path]:
    """Lists the twelve DejaVu text faces that matplotlib brings along.

    Examples:
      >>> len(dejavu_paths())
      12
    """
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return sorted(path for path in folder.glob("DejaVuS*.ttf") if "Display" not in path.name)


def read_faces(paths: Iterable[str | Path]) -> list[Face]:
    """Reads every face of font files; of a collection (.ttc, .otc) all that it holds.

    Args:
      paths: TrueType or OpenType files, or patterns such as "/usr/share/fonts/opentype/noto/*CJK*.ttc".

    Examples:
      >>> read_faces(dejavu_paths()[:1])[0].name
      'DejaVu Sans Bold'
    """
    faces = [face for path in paths for file in _files_of(str(path)) for face in _faces_of(file)]
    seen: dict[str, Face] = {}
    for face in faces:
        if face.name in seen:
            raise DataError(
                f"The fonts {printable(seen[face.name].path)} and {printable(face.path)} both hold a face named "
                f"{face.name!r}; leave one out."
            )
        seen[face.name] = face
    return faces


def _files_of(path: str) -> list[Path]:
    if os.path.exists(path) or not glob.has_magic(path):
        return [Path(path)]
    files = sorted(glob.glob(path))
    if not files:
        raise DataError(
            f"No font file matches {printable(path)}; install the fonts, or name files that exist."
        )
    return [Path(file) for file in files]


def _faces_of(path: Path) -> list[Face]:
    try:
        data = read_bytes(path)
    except OSError as error:
        raise _unusable(path, "cannot be opened", error) from error
    try:
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
            faces.append(Face(printable(name or path.stem), path, index, sha256))
        return faces
    except Exception as error:  # fontTools raises whatever a damaged table makes it stumble over
        raise _unusable(path, "cannot be read as TrueType or OpenType", error) from error


def _unusable(path: Path, what: str, error: Exception) -> DataError:
    return DataError(f"The font {printable(path)} {what}: {printable(reason_of(error))}.")


def characters_of(face: Face) -> frozenset[int]:
    """Returns the code points that a face has a glyph for.

    Examples:
      >>> ord("A") in characters_of(read_faces(dejavu_paths()[:1])[0])
      True
    """
    try:
        with TTFont(face.path, fontNumber=face.index, lazy=True) as font:
            return frozenset(code_point for code_point in font.getBestCmap() or () if code_point < 0x110000)
    except Exception as error:  # as above
        raise _unusable(face.path, "has characters that cannot be read", error) from error


def render(face: Face, characters: Sequence[int], size: int) -> UInt8[np.ndarray, "characters size size"]:
    """Draws characters of a face, each centered by its ink, 255 on 0.

    All characters of a face share one text size, so that o and O differ; those too large for the bitmap are
    drawn smaller.

    Returns:
      Bitmaps, uint8, shape ``[characters, size, size]``; all zero where a character leaves no ink.

    Examples:
      >>> render(read_faces(dejavu_paths()[:1])[0], [ord("A"), ord(" ")], 32).any(axis=(1, 2)).tolist()
      [True, False]
    """
    room = size - 2 * max(1, round(_MARGIN * size))
    bitmaps = np.zeros((len(characters), size, size), np.uint8)

    @functools.cache
    def font_of(text_size: int) -> ImageFont.FreeTypeFont:
        # The basic layout does not depend on whether Raqm is installed.
        layout = ImageFont.Layout.BASIC
        return ImageFont.truetype(str(face.path), text_size, index=face.index, layout_engine=layout)

    for bitmap, character in zip(bitmaps, characters, strict=True):
        try:
            ink = _ink(font_of, chr(character), max(1, round(_TEXT_SIZE * size)), room)
        except Exception as error:  # FreeType's errors come as OSError, Pillow's as several others
            raise _unusable(face.path, f"cannot draw U+{character:04X}", error) from error
        if ink is not None:
            top, left = (size - ink.shape[0]) // 2, (size - ink.shape[1]) // 2
            bitmap[top : top + ink.shape[0], left : left + ink.shape[1]] = ink
    return bitmaps


def _ink(
    font_of: Callable[[int], ImageFont.FreeTypeFont], character: str, text_size: int, room: int
) -> UInt8[np.ndarray, "height width"] | None:
    """Draws a character as large as the text size and the room allow, without a border; None if it has no ink."""
    while text_size:
        mask: Any = font_of(text_size).getmask(character, mode="L")  # the stubs do not know that it has bytes
        box = mask.getbbox()
        if box is None:
            return None
        left, top, right, bottom = box
        longest = max(right - left, bottom - top)
        if longest <= room:
            bitmap = np.frombuffer(bytes(mask), np.uint8).reshape(mask.size[::-1])
            return bitmap[top:bottom, left:right]
        text_size = min(text_size - 1, text_size * room // longest)
    return None
