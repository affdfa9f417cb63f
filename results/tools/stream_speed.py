"""How fast are pictures read for training? Worker processes and threads against one worker; JPEGs shrunk while decoded.

    python results/tools/stream_speed.py results/speed_stream.json

The pictures are made up: 256 JPEGs of 500 x 375, decoded to 224 x 224 in batches of 32, and one of 12 megapixels.
"""

import io
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
from PIL import Image
from recording import recording

from pols_jax.benchmarking.timing import Variant
from pols_jax.data import StreamSplit, decode_image, images, stream_batches

_SHAPE = (224, 224, 3)
_BATCH_SIZE, _BATCHES = 32, 8


def photograph(size: tuple[int, int], seed: int = 0) -> bytes:
    """A JPEG with smooth parts and noise, which takes as long to decode as a photograph.

    Examples:
      >>> Image.open(io.BytesIO(photograph((40, 30)))).size
      (40, 30)
    """
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (12, 16, 3), np.uint8)).resize(size)
    pixels = np.asarray(coarse).astype(np.int16) + generator.integers(-12, 13, (size[1], size[0], 1))
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def stream_variants(
    folder: Path, *, num_pictures: int = 256, size: tuple[int, int] = (500, 375)
) -> list[Variant]:
    """Makes variants that each read `_BATCHES` more batches of a stream when called.

    Examples:
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     [variant.name for variant in stream_variants(Path(folder), num_pictures=2, size=(40, 30))]
      ['one worker', 'two workers', 'threads']
    """
    records = []
    for i in range(num_pictures):
        path = folder / f"{i}.jpg"
        path.write_bytes(photograph(size, i))
        records.append((str(path), i))
    split = StreamSplit(records, _SHAPE)
    case = {"pictures": _BATCHES * _BATCH_SIZE, "size": f"{size[0]} x {size[1]}"}

    def variant(name: str, num_workers: int) -> Variant:
        batches = stream_batches(split, seed=0, batch_size=_BATCH_SIZE, num_workers=num_workers)

        def read(call: int):
            for _ in range(_BATCHES):
                next(batches)

        return Variant(name, read, case)

    return [variant("one worker", 1), variant("two workers", 2), variant("threads", 0)]


def decode_variants(size: tuple[int, int] = (4000, 3000)) -> list[Variant]:
    """Makes variants that decode a large JPEG, shrunk meanwhile and not.

    Examples:
      >>> [variant.name for variant in decode_variants((400, 300))]
      ['decoded in full', 'shrunk while decoded']
    """
    source, case = photograph(size), {"pictures": 1, "size": f"{size[0]} x {size[1]}"}

    def in_full(call: int):
        with mock.patch.object(images, "_DRAFT_FACTOR", 10**6):
            return decode_image(source, _SHAPE)

    shrunk = Variant("shrunk while decoded", lambda call: decode_image(source, _SHAPE), case)
    return [Variant("decoded in full", in_full, case), shrunk]


def main() -> None:
    """Measures, writes the record and prints its table."""
    with tempfile.TemporaryDirectory() as folder, recording("stream") as recorder:
        # One at a time: a stream reads ahead, and would do so while another is measured.
        for variant in stream_variants(Path(folder)):
            recorder.measure([variant], repetitions=9)
        recorder.measure(decode_variants(), repetitions=9)


if __name__ == "__main__":
    main()
