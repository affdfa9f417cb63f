"""`glyphs`: thousands of classes without a download, the characters of typefaces that are already installed.

A class is a character, an example is that character in one face, and the splits are by face: the test asks
for characters in typefaces that were never seen.  Characters that look the same in every face (Latin A and
Greek Alpha, superscript and subscript two) are one class, named after the first of them.
"""

import fnmatch
import logging
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import PIL
import PIL.features
from jaxtyping import Int

from pols_jax.data import array_cache
from pols_jax.data.augmentation import augment_glyphs
from pols_jax.data.dataset import DEFAULT_MAX_BYTES, ArraySplit, Dataset, check_image_size
from pols_jax.data.fonts import Face, characters_of, dejavu_paths, read_faces, render
from pols_jax.errors import DataError

_logger = logging.getLogger(__name__)

# One test face per family, each in another style; every style is seen in training in another family, and every
# family in at least two other styles. So the test varies family, weight and slant, and no axis is extrapolated.
DEJAVU_VALIDATION = ("DejaVu Sans Oblique",)
DEJAVU_TEST = ("DejaVu Sans Bold", "DejaVu Sans Mono Oblique", "DejaVu Serif Bold Italic")

_LEGIBLE = 8  # pixels that a character needs at least
_MAX_BYTES = 8 * DEFAULT_MAX_BYTES  # of all bitmaps together, which are kept in memory
_SUBSET_SEED = 0  # fixes which classes `max_classes` keeps


def load_glyphs(
    *,
    fonts: Sequence[str | Path] = (),
    characters: str | None = None,
    train_faces: Sequence[str] = (),
    validation_faces: Sequence[str] = (),
    test_faces: Sequence[str] = (),
    image_size: int = 32,
    max_classes: int | None = None,
) -> Dataset:
    """Draws the characters that all faces have.

    Args:
      fonts: TrueType or OpenType files, collections included, or patterns of such; by default matplotlib's twelve
        DejaVu faces.
      characters: Ranges of code points such as "4E00-9FFF,3400-4DBF"; by default everything.
      train_faces: Names or patterns ("Noto Sans CJK JP *") of the faces to learn from. Name the faces of all
        three splits or of none; faces in no split are not used.
      validation_faces: Names or patterns of the faces to validate with.
      test_faces: Names or patterns of the faces to test with.
      image_size: Height and width of the bitmaps in pixels.
      max_classes: Keep this many classes: a fixed random choice, and a smaller choice is part of a larger one.

    Returns:
      The data set; images have shape ``[image_size, image_size, 1]``, ink 255 on 0.

    Examples:
      >>> load_glyphs(characters="0030-0039").class_names[:2]
      ('DIGIT ZERO', 'DIGIT ONE')
    """
    patterns = {"train": train_faces, "validation": validation_faces, "test": test_faces}
    lists = {"fonts": fonts, **{f"{split}_faces": names for split, names in patterns.items()}}
    for option, value in lists.items():
        if isinstance(value, str):
            raise DataError(f"The option {option} must be a list, not the single string {value!r}.")
    check_image_size(image_size, smallest=_LEGIBLE)
    image_size = int(image_size)
    faces_of_split = _split_faces(read_faces(fonts or dejavu_paths()), patterns, is_dejavu=not fonts)
    used = [face for split in faces_of_split.values() for face in split]
    common = _common_characters(used, None if characters is None else parse_ranges(characters))
    needed = len(used) * len(common) * image_size**2
    if needed > _MAX_BYTES:
        raise DataError(
            f"{len(common)} characters in {len(used)} faces at {image_size} pixels take {needed / 2**30:.0f} GiB of "
            "memory; ask for a smaller image size or fewer characters."
        )

    drawing = {
        "format": 1,
        "faces": [[face.name, face.index, face.sha256] for face in used],
        "characters": common,
        "image_size": image_size,
        "pillow": PIL.__version__,
        "freetype": PIL.features.version("freetype2"),
    }
    cached = array_cache.cached_arrays(
        f"glyphs-{array_cache.fingerprint(drawing)}",
        lambda: _draw_classes(used, common, image_size),
        [array_cache.user_cache_dir()],
    )
    bitmaps, code_points = cached["bitmaps"], cached["code_points"]  # [faces, classes, h, w], [classes]
    if len(code_points) < 2:
        raise DataError(
            f"Only {len(code_points)} characters leave ink in every face; choose other characters."
        )
    if max_classes is not None:
        kept = _subset(len(code_points), max_classes)
        bitmaps, code_points = bitmaps[:, kept], code_points[kept]

    splits = {}
    ends = np.cumsum([len(split_faces) for split_faces in faces_of_split.values()])
    for split, drawn in zip(faces_of_split, np.split(bitmaps, ends[:-1]), strict=True):
        labels = np.tile(np.arange(len(code_points), dtype=np.int32), len(drawn))
        splits[split] = ArraySplit(images=drawn.reshape(-1, image_size, image_size, 1), labels=labels)
    in_train = {image.tobytes() for image in splits["train"].images}
    return Dataset(
        name="glyphs",
        class_names=tuple(character_name(code_point) for code_point in code_points.tolist()),
        image_shape=(image_size, image_size, 1),
        provenance={
            "fonts": {f"{face.path.name}#{face.index}": face.sha256 for face in used},
            "faces": {
                split: [face.name for face in split_faces] for split, split_faces in faces_of_split.items()
            },
            "split_rule": "by face: no face is in two splits",
            "images_drawn_as_in_train": {  # faces of one family share some of their symbols
                split: sum(image.tobytes() in in_train for image in splits[split].images)
                for split in ("validation", "test")
            },
            "characters": characters or "all that every face has",
            "max_classes": max_classes,
            "matplotlib": matplotlib.__version__,
            "pillow": PIL.__version__,
            "freetype": PIL.features.version("freetype2"),
            "content_sha256": array_cache.content_hash([split.images for split in splits.values()]),
        },
        augment=augment_glyphs,
        **splits,
    )


def parse_ranges(text: str) -> frozenset[int]:
    """Reads ranges of hexadecimal code points, as in "4E00-9FFF,3400-4DBF,U+3007".

    Examples:
      >>> sorted(parse_ranges("30-32,U+41"))
      [48, 49, 50, 65]
    """
    code_points: set[int] = set()
    for part in text.split(","):
        ends = [end.strip().upper().removeprefix("U+") for end in part.split("-")]
        try:
            first, last = int(ends[0], 16), int(ends[-1], 16)
        except ValueError:
            first, last = 1, 0
        if len(ends) > 2 or not 0 <= first <= last <= 0x10FFFF:
            raise DataError(f"{part!r} is not a range of code points; write ranges as 4E00-9FFF,3400-4DBF.")
        code_points.update(range(first, last + 1))
    return frozenset(code_points)


def character_name(code_point: int) -> str:
    """Returns the Unicode name of a character, or its number where it has none.

    Examples:
      >>> character_name(0x41), character_name(0xE000)
      ('LATIN CAPITAL LETTER A', 'U+E000')
    """
    return unicodedata.name(chr(code_point), f"U+{code_point:04X}")


def _split_faces(
    faces: Sequence[Face], patterns: dict[str, Sequence[str]], *, is_dejavu: bool
) -> dict[str, list[Face]]:
    """Decides which face is in which split."""
    known = ", ".join(face.name for face in faces)
    if any(patterns.values()):
        if not all(patterns.values()):
            missing = ", ".join(f"{split}_faces" for split, chosen in patterns.items() if not chosen)
            raise DataError(f"Name the faces of all three splits or of none; {missing} is missing.")
        chosen = {split: _matching_faces(faces, names) for split, names in patterns.items()}
    elif is_dejavu:
        held_out = DEJAVU_VALIDATION + DEJAVU_TEST
        chosen = {
            "train": [face for face in faces if face.name not in held_out],
            "validation": [face for face in faces if face.name in DEJAVU_VALIDATION],
            "test": [face for face in faces if face.name in DEJAVU_TEST],
        }
    else:
        num_test, num_validation = max(1, len(faces) // 4), max(1, len(faces) // 12)
        num_train = len(faces) - num_test - num_validation
        chosen = {
            "train": list(faces[: max(0, num_train)]),
            "validation": list(faces[num_train : num_train + num_validation]),
            "test": list(faces[num_train + num_validation :]),
        }
    if not all(chosen.values()):
        raise DataError(
            f"{len(faces)} faces are too few to train, validate and test on different ones, "
            f"three is the least: {known}."
        )
    split_of: dict[str, str] = {}
    for split, split_faces in chosen.items():
        for face in split_faces:
            if face.name in split_of:
                raise DataError(
                    f"The face {face.name!r} is in {split_of[face.name]}_faces and in {split}_faces."
                )
            split_of[face.name] = split
    return chosen


def _matching_faces(faces: Sequence[Face], patterns: Sequence[str]) -> list[Face]:
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(face.name, pattern) for face in faces):
            raise DataError(
                f"No face is named {pattern!r}; there are: {', '.join(face.name for face in faces)}."
            )
    return [face for face in faces if any(fnmatch.fnmatchcase(face.name, pattern) for pattern in patterns)]


def _common_characters(faces: Sequence[Face], wanted: frozenset[int] | None) -> list[int]:
    """Lists the code points that every face has, in order."""
    available = {face.name: characters_of(face) for face in faces}
    if wanted is not None:
        available = {name: characters & wanted for name, characters in available.items()}
    common = frozenset.intersection(*available.values())
    if len(common) < 2:
        poorest = min(available, key=lambda name: len(available[name]))
        raise DataError(
            f"The faces have {len(common)} of the characters in common, at least 2 are needed; "
            f"{poorest!r} has the fewest, {len(available[poorest])}."
        )
    return sorted(common)


def _draw_classes(faces: Sequence[Face], characters: Sequence[int], size: int) -> array_cache.Arrays:
    """Draws characters, without those that leave no ink in some face, and merges those that look the same."""
    _logger.info("Drawing %s characters in %d faces ...", f"{len(characters):,}", len(faces))
    bitmaps = np.stack([render(face, characters, size) for face in faces])
    first_look: dict[bytes, int] = {}
    for i in np.flatnonzero(bitmaps.any(axis=(2, 3)).all(axis=0)).tolist():
        first_look.setdefault(bitmaps[:, i].tobytes(), i)
    kept = np.array(list(first_look.values()), np.int64)
    return {"bitmaps": bitmaps[:, kept], "code_points": np.array(characters, np.int32)[kept]}


def _subset(num_classes: int, max_classes: int) -> Int[np.ndarray, "classes"]:
    """Makes a fixed random choice of classes, in order; smaller choices are parts of larger ones."""
    if not 2 <= max_classes <= num_classes:
        raise DataError(
            f"The option max_classes must be between 2 and the {num_classes} classes there are, got {max_classes}."
        )
    return np.sort(np.random.default_rng(_SUBSET_SEED).permutation(num_classes)[:max_classes])
