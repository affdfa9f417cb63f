"""A picture sheet of a data set in memory: `python results/tools/sheet.py FILE.png [--dataset NAME]`.

One row per class, drawn at random but fixed; the columns are examples of train, validation and test, and,
where the data set has an augmentation, augmented versions of a training example.
"""

import argparse
from pathlib import Path

import jax
import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

from pols_jax.data import ArraySplit, Dataset, load
from pols_jax.data.fonts import dejavu_paths

_COLUMNS = {"train": 8, "validation": 1, "test": 3, "augmented": 6}
_SCALE = 2  # screen pixels per pixel
_GAP, _SECTION_GAP = 2, 8  # pixels between pictures, and between splits
_NAME_WIDTH, _HEADER = 300, 20
_SEED = 0  # chooses the classes and the augmentation


def picture_sheet(dataset: Dataset, *, num_classes: int) -> Image.Image:
    """Draws examples of some classes of a data set in memory side by side.

    Examples:
      >>> picture_sheet(load("glyphs", characters="0030-0039"), num_classes=2).mode
      'RGB'
    """
    generator = np.random.default_rng(_SEED)
    num_rows = min(num_classes, dataset.num_classes)
    classes = np.sort(generator.choice(dataset.num_classes, num_rows, replace=False))
    height, width = (_SCALE * side for side in dataset.image_shape[:2])
    row_height, column_width = height + _GAP, width + _GAP
    columns = {name: count for name, count in _COLUMNS.items() if name != "augmented" or dataset.augment}
    sheet_width = _NAME_WIDTH + sum(columns.values()) * column_width + len(columns) * _SECTION_GAP
    sheet = Image.new("RGB", (sheet_width, _HEADER + num_rows * row_height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.truetype(str(dejavu_paths()[3]), 12)
    tops = [_HEADER + row * row_height for row in range(num_rows)]
    for top, class_id in zip(tops, classes, strict=True):
        name = _shortened(dataset.class_names[class_id], font)
        draw.text((4, top + row_height // 2 - 8), name, fill="black", font=font)
    left = _NAME_WIDTH
    for section, count in columns.items():
        draw.text((left, 2), section, fill="black", font=font)
        for top, class_id in zip(tops, classes, strict=True):
            for i, image in enumerate(_examples(dataset, section, int(class_id), count)):
                picture = Image.fromarray(image.squeeze()).resize((width, height), Image.Resampling.NEAREST)
                sheet.paste(picture, (left + i * column_width, top))
        left += count * column_width + _SECTION_GAP
    return sheet


def _examples(
    dataset: Dataset, section: str, class_id: int, count: int
) -> UInt8[np.ndarray, "examples height width channels"]:
    split = dataset.train if section == "augmented" else getattr(dataset, section)
    if not isinstance(split, ArraySplit):
        raise TypeError("a picture sheet needs a data set in memory")
    images = split.images[split.labels == class_id]
    if section != "augmented" or dataset.augment is None:
        return images[:count]
    keys = jax.random.split(jax.random.fold_in(jax.random.key(_SEED), class_id), count)
    augmented = jax.jit(dataset.augment)(keys, jax.numpy.repeat(images[:1], count, axis=0))
    return np.asarray((augmented + 1.0) * 127.5).round().astype(np.uint8)


def _shortened(text: str, font: ImageFont.FreeTypeFont) -> str:
    """Cuts a name to the width of its column."""
    if font.getlength(text) <= _NAME_WIDTH - 12:
        return text
    while font.getlength(text + "…") > _NAME_WIDTH - 12:
        text = text[:-1]
    return text + "…"


def main() -> None:
    """Writes a sheet to a file."""
    parser = argparse.ArgumentParser(description="Write a picture sheet of a data set in memory.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--dataset", default="glyphs")
    parser.add_argument("--classes", type=int, default=12, help="number of rows")
    arguments = parser.parse_args()
    picture_sheet(load(arguments.dataset), num_classes=arguments.classes).save(arguments.file, optimize=True)


if __name__ == "__main__":
    main()
