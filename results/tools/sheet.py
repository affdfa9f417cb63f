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

from pols_jax.data.dataset import ArraySplit, Dataset
from pols_jax.data.fonts import dejavu_paths
from pols_jax.data.loading import load

_GAP = 2  # pixels between pictures
_COLUMNS = {"train": 8, "validation": 1, "test": 3, "augmented": 6}
_NAME_WIDTH = 300


def picture_sheet(dataset: Dataset, *, num_classes: int = 12, scale: int = 2, seed: int = 0) -> Image.Image:
    """Draw examples of some classes side by side.

    Args:
        dataset: A data set in memory.
        num_classes: Number of rows.
        scale: Whole number of screen pixels per pixel.
        seed: Chooses the classes and the augmentation.

    Returns:
        The sheet.

    >>> picture_sheet(load("glyphs", characters="0030-0039"), num_classes=2).mode
    'RGB'
    """
    generator = np.random.default_rng(seed)
    classes = np.sort(
        generator.choice(dataset.num_classes, min(num_classes, dataset.num_classes), replace=False)
    )
    height, width, _ = dataset.image_shape
    row_height, column_width = scale * height + _GAP, scale * width + _GAP
    columns = {name: count for name, count in _COLUMNS.items() if name != "augmented" or dataset.augment}
    section_gap, header = 4 * _GAP, 20
    sheet = Image.new(
        "RGB",
        (
            _NAME_WIDTH + sum(columns.values()) * column_width + len(columns) * section_gap,
            header + len(classes) * row_height,
        ),
        "white",
    )
    draw, font = ImageDraw.Draw(sheet), ImageFont.truetype(str(dejavu_paths()[3]), 12)
    left = _NAME_WIDTH
    for section, count in columns.items():
        draw.text((left, 2), section, fill="black", font=font)
        for row, class_id in enumerate(classes.tolist()):
            top = header + row * row_height
            if left == _NAME_WIDTH:
                name = _shortened(dataset.class_names[class_id], font)
                draw.text((4, top + row_height // 2 - 8), name, fill="black", font=font)
            for i, image in enumerate(_examples(dataset, section, class_id, count, seed)):
                picture = Image.fromarray(image.squeeze()).resize(
                    (scale * width, scale * height), Image.Resampling.NEAREST
                )
                sheet.paste(picture, (left + i * column_width, top))
        left += count * column_width + section_gap
    return sheet


def _examples(
    dataset: Dataset, section: str, class_id: int, count: int, seed: int
) -> UInt8[np.ndarray, "examples height width channels"]:
    split = dataset.train if section == "augmented" else getattr(dataset, section)
    if not isinstance(split, ArraySplit):
        raise TypeError("a picture sheet needs a data set in memory")
    images = split.images[split.labels == class_id]
    if section != "augmented" or dataset.augment is None:
        return images[:count]
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), class_id), count)
    augmented = jax.jit(dataset.augment)(keys, jax.numpy.repeat(images[:1], count, axis=0))
    return np.asarray((augmented + 1.0) * 127.5).round().astype(np.uint8)


def _shortened(text: str, font: ImageFont.FreeTypeFont) -> str:
    """Cut a name to the width of its column."""
    if font.getlength(text) <= _NAME_WIDTH - 12:
        return text
    while font.getlength(text + "…") > _NAME_WIDTH - 12:
        text = text[:-1]
    return text + "…"


def main() -> None:
    """Write a sheet to a file."""
    parser = argparse.ArgumentParser(description="Write a picture sheet of a data set in memory.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--dataset", default="glyphs")
    parser.add_argument("--classes", type=int, default=12, help="number of rows")
    arguments = parser.parse_args()
    picture_sheet(load(arguments.dataset), num_classes=arguments.classes).save(arguments.file, optimize=True)


if __name__ == "__main__":
    main()
