"""Thousands of damaged pictures: each is decoded to the right shape, or refused by an ImageError of one line."""

import collections
import io
import struct
import threading
import warnings
import zlib

import numpy as np
import PIL.Image
import pytest

from pols_jax.data import decode_image
from pols_jax.data.images import IMAGE_FORMATS
from pols_jax.errors import ImageError

TRIES = 5_000
SECONDS = 30.0  # for one picture; the largest that is not refused takes a few
SHAPES = ((28, 28, 1), (32, 32, 3), (224, 224, 3), (299, 299, 3))


def sample_pictures():
    """Small pictures in every format and mode that is met, with metadata; and in formats that are not opened."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (24, 37, 4), np.uint8).repeat(3, axis=0).repeat(3, axis=1)
    picture = PIL.Image.fromarray(pixels)
    exif = PIL.Image.Exif()
    exif[0x0112], exif[0x010F], exif[0x0132] = 6, "Camera", "2024:01:01 00:00:00"
    second = PIL.Image.fromarray(pixels[::-1, ::-1])
    animated = {"save_all": True, "append_images": [second.convert("RGB")]}
    deep = PIL.Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    variants = [
        *[("JPEG", picture.convert(mode), {"exif": exif}) for mode in ("L", "RGB", "CMYK")],
        ("JPEG", picture.convert("RGB"), {"progressive": True, "comment": b"a comment"}),
        *[("PNG", picture.convert(mode), {"exif": exif}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")],
        ("PNG", deep, {}),
        ("PNG", picture.convert("P"), {"transparency": bytes(range(200))}),
        ("PNG", picture.convert("RGB"), animated),
        *[("WEBP", picture, {"lossless": lossless, "exif": exif}) for lossless in (False, True)],
        ("WEBP", picture.convert("RGB"), animated),
        ("GIF", picture.convert("RGB"), animated),
        ("GIF", picture.convert("P"), {"transparency": 3}),
        *[("BMP", picture.convert(mode), {}) for mode in ("1", "L", "P", "RGB", "RGBA")],
        *[("TIFF", picture.convert(mode), {}) for mode in ("RGB", "LAB", "CMYK")],
        ("AVIF", picture.convert("RGB"), {}),
    ]
    samples = []
    for file_format, image, options in variants:
        file = io.BytesIO()
        image.save(file, file_format, **options)
        samples.append((file_format, file.getvalue()))
    return samples


def mutated(data, others, generator):
    """Damages a file in one of the ways that disks, networks and attackers have."""
    data = bytearray(data)
    kind = generator.choice(["flips", "header", "cut", "splice", "numbers", "chunk", "zeros", "repeat"])
    if kind == "flips":
        for i in generator.integers(0, len(data), generator.integers(1, 30)):
            data[i] ^= 1 << generator.integers(8)
    elif kind == "header":
        for i in generator.integers(0, min(len(data), 64), generator.integers(1, 6)):
            data[i] = generator.integers(256)
    elif kind == "cut":
        del data[generator.integers(0, len(data)) :]
    elif kind == "splice":
        other = others[generator.integers(len(others))][1]
        data[generator.integers(0, len(data)) :] = other[generator.integers(0, len(other)) :]
    elif kind == "numbers":  # sizes, offsets and counts at the edge of what they can be
        for i in generator.integers(0, max(1, min(len(data), 200) - 4), generator.integers(1, 4)):
            order, value = (
                generator.choice(["<I", ">I"]),
                generator.choice([0, 1, 2**15, 2**16, 2**31 - 1, 2**32 - 1]),
            )
            data[i : i + 4] = struct.pack(str(order), int(value))
    elif kind == "chunk":
        data = with_valid_checksums(data, generator)
    elif kind == "zeros":
        start = generator.integers(0, len(data))
        stop = min(len(data), start + generator.integers(1, 500))
        data[start:stop] = bytes(stop - start)
    else:
        start = generator.integers(0, len(data))
        data[start:start] = data[start : start + 300] * 5
    return str(kind), bytes(data)


def with_valid_checksums(data, generator):
    """Damages the contents of the chunks of a PNG, and mends the checksums, so that they get past the first gate."""
    if not data.startswith(b"\x89PNG"):
        data[generator.integers(0, len(data))] = generator.integers(256)
        return data
    position, chunks = 8, [bytes(data[:8])]
    while position + 8 <= len(data):
        (length,) = struct.unpack(">I", data[position : position + 4])
        body = bytearray(data[position + 4 : position + 8 + length])
        if generator.random() < 0.5 and length:
            for i in generator.integers(4, len(body), generator.integers(1, 4)):
                body[i] = generator.integers(256)
        chunks.append(struct.pack(">I", length) + body + struct.pack(">I", zlib.crc32(body)))
        position += 12 + length
    return bytearray(b"".join(chunks))


def outcome(data, shape):
    """What became of a picture, and what is wrong with that."""
    results = []

    def decode():
        try:
            pixels = decode_image(data, shape)
        except ImageError as error:
            results.append(("refused", None if str(error).isprintable() else f"not one line: {error!r}"))
        except BaseException as error:
            results.append(("raised", f"{type(error).__name__}: {error}"))
        else:
            is_right = (pixels.shape, pixels.dtype) == (shape, np.uint8)
            results.append(("decoded", None if is_right else f"{pixels.shape} {pixels.dtype}"))

    # In a thread, because nothing else gets control back from a decoder that hangs.
    thread = threading.Thread(target=decode, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return results[0] if results else ("hung", f"it takes more than {SECONDS:.0f} s")


@pytest.mark.campaign
def test_mutated_images(tally, capfd):
    """Mutated images

    Every one is decoded to the right shape or an ImageError, in seconds, without a warning or a word on a stream.
    """
    samples, counts = sample_pictures(), collections.Counter()
    for file_format, data in samples:
        result, wrong = outcome(data, (28, 28, 3))
        assert (result == "decoded") == (file_format in IMAGE_FORMATS), (file_format, wrong)
    for i in range(TRIES):
        generator = np.random.default_rng((14, i))
        file_format, data = samples[i % len(samples)]
        kind, data = mutated(data, samples, generator)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            result, wrong = outcome(data, SHAPES[i // len(samples) % len(SHAPES)])
        if warned and not wrong:
            wrong = f"it warned: {warned[0].message}"
        counts[result] += 1
        tally.tried(wrong and f"{file_format} {i} ({kind}): {wrong}")
    assert capfd.readouterr() == ("", "")
    with capfd.disabled():
        print(f"\n{dict(counts)}")
    assert counts["decoded"] > TRIES / 10 < counts["refused"], "both ends are reached"
