"""Opening pictures: every size fits, only pictures are opened, and whatever else happens is an ImageError."""

import io
import os
import socket
import struct
import threading
import warnings
import zlib

import numpy as np
import PIL.Image
import pytest

from pols_jax.data import decode_image
from pols_jax.data.images import IMAGE_FORMATS, IMAGE_SUFFIXES, central_box, decode_thumbnail
from pols_jax.errors import ImageError
from pols_jax.files import read_bytes

TARGETS = (28, 32, 224, 299)


def encoded(image, file_format="PNG", **options):
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def noise(width, height, mode="RGB"):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return PIL.Image.fromarray(pixels).convert(mode)


def png_header(width, height):
    """A PNG that claims to be large, and has next to no data."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data))
            + kind
            + data
            + struct.pack(">I", zlib.crc32(kind + data) & 0xFFFFFFFF)
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"\0" * 100)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


# Sizes.


@pytest.mark.parametrize("target", TARGETS)
def test_the_central_part_of_every_size_is_inside_of_the_picture(target):
    for short in range(1, 1401):
        # Square, one more, and the proportions of cameras and screens; the longest pictures are strips.
        longs = {
            short,
            short + 1,
            short * 4 // 3,
            short * 3 // 2,
            short * 16 // 9,
            2 * short,
            20 * short,
            1600,
        }
        for long in longs:
            for width, height in ((short, long), (long, short)):
                left, top, right, bottom = central_box((width, height), (target, target))
                assert 0 <= left < right <= width, (width, height)
                assert 0 <= top < bottom <= height, (width, height)
                assert right - left == pytest.approx(min(width, height)), (width, height)
                assert bottom - top == pytest.approx(min(width, height)), (width, height)


@pytest.mark.parametrize(
    ("size", "target"),
    [
        *[((600, 450), 224), ((1600, 900), 224), ((800, 450), 224), ((654, 471), 28), ((450, 600), 224)],
        *[((1, 1), 28), ((1, 2000), 28), ((2000, 1), 299), ((3, 1), 32), ((1, 200_000), 28)],
        *[((side, side * 4 // 3), target) for side, target in zip((7, 99, 471, 1399), TARGETS, strict=True)],
    ],
)
def test_a_picture_of_any_size_is_decoded(size, target):
    source = encoded(PIL.Image.new("L", size, 200), compress_level=1)
    shape = (target, target, 1)
    np.testing.assert_array_equal(decode_image(source, shape), np.full(shape, 200, np.uint8))


@pytest.mark.parametrize("file_format", ["PNG", "JPEG"])
@pytest.mark.parametrize("size", [(1, 1), (32, 20), (500, 3), (3, 500), (4000, 3000)])
def test_a_thumbnail_is_the_whole_picture_and_never_larger_than_asked(size, file_format):
    content = encoded(PIL.Image.new("RGB", size, (200, 30, 60)), file_format)
    thumbnail = decode_thumbnail(content, 100)
    scale = max(1, max(size) / 100)
    assert thumbnail.shape[1::-1] == tuple(pytest.approx(max(1, side / scale), abs=1) for side in size)
    assert np.abs(thumbnail.astype(int) - (200, 30, 60)).max() <= 3, "JPEG rounds"


def test_a_picture_with_more_pixels_than_allowed_is_refused_before_it_is_decoded():
    content = png_header(5000, 3000)  # there is nothing behind the header
    for decode in (
        lambda: decode_image(content, (8, 8, 1), max_pixels=10**6),
        lambda: decode_thumbnail(content, 64, max_pixels=10**6),
    ):
        with pytest.raises(ImageError, match=r"it has 5000 x 3000 pixels, and 1,000,000 are the most\.$"):
            decode()


def test_a_shape_without_pixels_is_refused():
    with pytest.raises(ValueError, match="at least one pixel"):
        decode_image(encoded(noise(8, 8)), (0, 8, 3))


# Formats.


def test_every_format_of_the_list_is_decoded_and_has_a_suffix():
    suffixes = PIL.Image.registered_extensions()
    assert {suffixes[suffix] for suffix in IMAGE_SUFFIXES} == set(IMAGE_FORMATS)
    for file_format in IMAGE_FORMATS:
        decoded = decode_image(encoded(noise(40, 30), file_format), (16, 16, 3))
        assert decoded.shape == (16, 16, 3)


@pytest.mark.parametrize("file_format", ["EPS", "TIFF", "AVIF", "PPM", "TGA", "ICO", "JPEG2000"])
def test_other_formats_are_not_opened_whatever_their_name(file_format, tmp_path):
    (tmp_path / "photo.jpg").write_bytes(encoded(noise(16, 16), file_format))
    with pytest.raises(
        ImageError, match=r"photo\.jpg cannot be decoded: it is not a picture in one of the formats JPEG"
    ):
        decode_image(tmp_path / "photo.jpg", (8, 8, 3))


def test_the_first_picture_of_an_animation_is_taken():
    first, second = PIL.Image.new("RGB", (8, 8), "red"), PIL.Image.new("RGB", (8, 8), "blue")
    for file_format in ("GIF", "WEBP", "PNG"):
        source = encoded(first, file_format, save_all=True, append_images=[second])
        assert decode_image(source, (8, 8, 3))[4, 4, 0] > 200


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_is_turned_upright(orientation):
    ramp = np.tile(np.linspace(0, 255, 8).astype(np.uint8), (8, 1))
    ramp[0] = 128
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    expected = {
        1: ramp,
        2: ramp[:, ::-1],
        3: ramp[::-1, ::-1],
        4: ramp[::-1],
        5: ramp.T,
        6: np.rot90(ramp, -1),
        7: np.rot90(ramp, 2).T,
        8: np.rot90(ramp),
    }
    decoded = decode_image(encoded(PIL.Image.fromarray(ramp), exif=exif), (8, 8, 1))[..., 0]
    np.testing.assert_array_equal(decoded, expected[orientation])


# What is damaged, and what is no file.


def damaged():
    lab = encoded(PIL.Image.new("LAB", (16, 16)), "TIFF")
    avif = bytearray(encoded(noise(32, 32), "AVIF"))
    avif[len(avif) // 2 :] = bytes(len(avif) - len(avif) // 2)
    jpeg, webp = encoded(noise(64, 64), "JPEG"), encoded(noise(64, 64), "WEBP")
    bomb = png_header(60_000, 60_000)
    return {
        "empty": b"",
        "text": b"no picture",
        "a cut JPEG": jpeg[: len(jpeg) // 2],
        "a cut WebP": webp[: len(webp) // 2],
        "a JPEG of two bytes": b"\xff\xd8",
        "a LAB TIFF": lab,
        "a damaged AVIF": bytes(avif),
        "a PNG that claims 60,000 x 60,000": bomb,
        "a PNG that claims 13,000 x 13,000": png_header(13_000, 13_000),
        "a PNG without columns": png_header(0, 10),
        "a BMP of one row less than none": encoded(noise(8, 8), "BMP").replace(
            struct.pack("<ii", 8, 8), struct.pack("<ii", 8, -(2**31))
        ),
    }


@pytest.mark.parametrize("what", list(damaged()))
def test_damaged_pictures_are_image_errors_of_one_line(what, tmp_path):
    (tmp_path / "x.png").write_bytes(damaged()[what])
    with pytest.raises(ImageError, match=r"x\.png cannot be decoded: .+\.$") as raised:
        decode_image(tmp_path / "x.png", (8, 8, 3))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "error", [MemoryError(), struct.error("unpack"), zlib.error("-3"), OverflowError("int"), KeyError(3)]
)
def test_whatever_pillow_raises_is_an_image_error(error, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    source = encoded(noise(8, 8))
    monkeypatch.setattr(PIL.Image.Image, "convert", fail)
    with pytest.raises(ImageError, match="cannot be decoded"):
        decode_image(source, (8, 8, 3))


def test_a_very_large_picture_is_decoded_without_a_warning(monkeypatch):
    monkeypatch.setattr(
        PIL.Image, "MAX_IMAGE_PIXELS", 1000
    )  # Pillow warns above it, and refuses twice as much
    assert decode_image(encoded(noise(40, 40)), (8, 8, 3)).shape == (8, 8, 3)
    with pytest.raises(ImageError, match="exceeds limit"):
        decode_image(encoded(noise(60, 60)), (8, 8, 3))
    before = list(warnings.filters)
    decode_image(encoded(noise(8, 8)), (8, 8, 3))
    assert warnings.filters == before, "the filter is added once"


@pytest.fixture
def special_files(tmp_path):
    """A pipe, a socket, a directory, a dangling link and a link to a device, all named like pictures."""
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "dangling.png").symlink_to(tmp_path / "gone.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(tmp_path)  # the name of a socket has to be short
        server.bind("socket.png")
        os.chdir(here)
        yield tmp_path


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("pipe.png", "it is a named pipe, not a regular file"),
        ("socket.png", "it is a socket, not a regular file"),
        ("folder.png", "it is a directory, not a regular file"),
        ("zero.png", "it is a device, not a regular file"),
        ("dangling.png", "No such file or directory"),
        ("a\0b.png", "it is not a file name"),
        ("x" * 5000, "File name too long"),
    ],
)
def test_only_regular_files_are_read(special_files, name, why):
    with pytest.raises(ImageError, match=f"cannot be decoded: {why}"):
        decode_image(f"{special_files}/{name}", (8, 8, 3))


def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(special_files, monkeypatch):
    regular = os.stat(__file__)
    monkeypatch.setattr(os, "stat", lambda path: regular)  # as if it was a file a moment ago
    done = []

    def read():
        with pytest.raises(OSError, match="it is a named pipe"):
            read_bytes(special_files / "pipe.png")
        done.append(True)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert done


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert read_bytes(tmp_path / "x", max_bytes=5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_bytes(tmp_path / "x", max_bytes=4)


def test_names_in_errors_cannot_control_the_terminal(tmp_path):
    path = os.path.join(tmp_path, os.fsdecode(b"\x1b[2Jcaf\xe9\n.png"))
    with open(path, "wb") as file:
        file.write(b"no picture")
    with pytest.raises(ImageError) as raised:
        decode_image(path, (8, 8, 3))
    assert "\\x1b[2Jcaf\\xe9\\n.png cannot be decoded" in str(raised.value)
    assert str(raised.value).isprintable()
