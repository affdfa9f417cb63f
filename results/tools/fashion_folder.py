"""Fashion-MNIST as a folder of pictures: `python results/tools/fashion_folder.py PATH`.

Reads the four idx files of Debian's dataset-fashion-mnist and writes PATH/train/CLASS/*.png and PATH/test/CLASS/*.png,
which `pols train --dataset folder:PATH` takes as it would anybody's pictures.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
from PIL import Image

SOURCE = Path("/usr/share/datasets/fashion-mnist")
CLASS_NAMES = (
    "T-shirt or top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)


def read_idx(path: Path) -> np.ndarray:
    """Reads a gzipped idx file of bytes: two zeros, the type 8, the number of axes, their lengths, the data."""
    content = gzip.decompress(path.read_bytes())
    axes = content[3]
    if content[:3] != b"\0\0\x08" or not axes:
        raise ValueError(f"{path} is not an idx file of bytes.")
    shape = np.frombuffer(content, ">i4", axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def write_folder(source: Path, folder: Path) -> int:
    """Writes every picture as a PNG into the folder of its class; returns how many there are."""
    count = 0
    for split, prefix in {"train": "train", "test": "t10k"}.items():
        images = read_idx(source / f"{prefix}-images-idx3-ubyte.gz")
        labels = read_idx(source / f"{prefix}-labels-idx1-ubyte.gz")
        for name in CLASS_NAMES:
            (folder / split / name).mkdir(parents=True, exist_ok=True)
        for i, (image, label) in enumerate(zip(images, labels, strict=True)):
            Image.fromarray(image).save(folder / split / CLASS_NAMES[label] / f"{i:05}.png")
        count += len(images)
    return count


def main() -> None:
    """Writes the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("path", type=Path, metavar="PATH")
    parser.add_argument("--source", type=Path, default=SOURCE, help="directory of the idx files")
    arguments = parser.parse_args()
    print(f"{write_folder(arguments.source, arguments.path):,} pictures in {arguments.path}.")


if __name__ == "__main__":
    main()
