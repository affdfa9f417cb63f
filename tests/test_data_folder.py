"""Folders of pictures, and the one way to decode a picture."""

import io
import json

import numpy as np
import PIL.Image
import pytest

from pols_jax.data import (
    ArraySplit,
    DataError,
    DataWarning,
    ImageError,
    StreamSplit,
    decode_image,
    evaluation_batches,
    load,
    scale_pixels,
)
from pols_jax.data.images import decode_random_crop


def encoded(image, file_format="PNG", **options):
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def write_class(folder, count, color, file_format="png"):
    folder.mkdir(parents=True)
    for i in range(count):
        PIL.Image.new("RGB", (20, 16), color).save(folder / f"{i:03}.{file_format}")


@pytest.fixture
def pictures(tmp_path):
    write_class(tmp_path / "train" / "cat", 20, "red", "jpg")
    write_class(tmp_path / "train" / "dog", 5, "blue", "webp")
    write_class(tmp_path / "test" / "cat", 3, "red")
    write_class(tmp_path / "test" / "dog", 2, "blue")
    return tmp_path


def test_classes_are_folders_and_the_last_tenth_of_each_validates(pictures):
    dataset = load(f"folder:{pictures}", image_size=8)
    assert dataset.class_names == ("cat", "dog")
    assert dataset.image_shape == (8, 8, 3)
    counts = [np.bincount(getattr(dataset, s).labels).tolist() for s in ("train", "validation", "test")]
    assert counts == [[18, 4], [2, 1], [3, 2]]
    red, blue = (dataset.test.images[dataset.test.labels == label] for label in (0, 1))
    assert (red == [255, 0, 0]).all()
    assert (blue == [0, 0, 255]).all()
    assert json.loads(json.dumps(dataset.provenance))["num_unusable_files"] == 0


def test_a_val_folder_validates_where_there_is_one(pictures):
    write_class(pictures / "val" / "dog", 4, "blue")
    dataset = load(f"folder:{pictures}", image_size=8)
    assert [len(split) for split in (dataset.train, dataset.validation, dataset.test)] == [25, 4, 5]


def test_large_folders_stream_the_same_pictures(pictures):
    in_memory = load(f"folder:{pictures}", image_size=8)
    streamed = load(f"folder:{pictures}", image_size=8, max_bytes=100)
    assert isinstance(in_memory.test, ArraySplit)
    assert isinstance(streamed.test, StreamSplit)
    assert streamed.provenance == in_memory.provenance
    batches = [list(evaluation_batches(dataset.test, batch_size=4)) for dataset in (in_memory, streamed)]
    for expected, batch in zip(*batches, strict=True):
        np.testing.assert_array_equal(batch.mask, expected.mask)
        np.testing.assert_array_equal(batch.label, expected.label)
        np.testing.assert_array_equal(batch.image[batch.mask], expected.image[expected.mask])


def test_broken_and_foreign_files_are_named_and_counted(pictures):
    (pictures / "train" / "cat" / "broken.png").write_bytes(b"no picture")
    whole = (pictures / "train" / "cat" / "000.jpg").read_bytes()
    (pictures / "test" / "cat" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (pictures / "test" / "cat" / "notes.txt").write_text("not a picture")
    (pictures / "test" / "cat" / ".DS_Store").write_text("hidden files are no data")
    with pytest.warns(DataWarning, match=r"3 files cannot be used") as warned:
        dataset = load(f"folder:{pictures}", image_size=8)
    for name in ("broken.png", "cut.jpg", "notes.txt"):
        assert name in str(warned[0].message)
    assert dataset.provenance["num_unusable_files"] == 3
    assert len(dataset.test) == 5


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "test").rename(root / "tset"), "test is not a directory"),
        (lambda root: (root / "test" / "cow").mkdir(), "has classes that train/ has not: cow"),
        (lambda root: (root / "train" / "dog").rename(root / "dog"), "has 1 class folders, at least 2"),
        (lambda root: (root / "val").mkdir(), "the validation split of .* has no pictures"),
    ],
)
def test_wrong_folders_are_explained(pictures, damage, message):
    damage(pictures)
    with pytest.raises(DataError, match=message):
        load(f"folder:{pictures}")


def test_unknown_options_and_names_are_answered_with_the_known_ones(pictures):
    with pytest.raises(DataError, match=r"has no option fonts; it has: image_size, channels, max_bytes"):
        load(f"folder:{pictures}", fonts=[])
    with pytest.raises(DataError, match=r"glyphs has no option data_dir, sise; it has: fonts, characters"):
        load("glyphs", sise=3, data_dir="x")
    with pytest.raises(DataError, match=r"no data set 'mnsit': the nearest names are .*\bmnist\b"):
        load("mnsit")
    with pytest.raises(DataError, match="glyphs"):
        load("glyhps")


# Decoding.

RAMP = np.tile(np.linspace(0, 255, 8).astype(np.uint8), (8, 1))


@pytest.mark.parametrize(
    "image",
    [
        PIL.Image.fromarray(RAMP),
        PIL.Image.fromarray(RAMP).convert("RGB"),
        PIL.Image.fromarray(RAMP).convert("RGBA"),
        PIL.Image.fromarray(RAMP).convert("LA"),
        PIL.Image.fromarray(RAMP).convert("P"),
        PIL.Image.fromarray(RAMP.astype(np.uint16) * 257),
    ],
    ids=["grey", "RGB", "RGBA", "grey and alpha", "palette", "16 bit"],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_mode_decodes_to_the_same_picture(image, channels):
    decoded = decode_image(encoded(image), (8, 8, channels))
    assert decoded.dtype == np.uint8
    np.testing.assert_array_equal(decoded, np.repeat(RAMP[:, :, None], channels, axis=2))


def test_transparent_pixels_become_white():
    image = PIL.Image.new("RGBA", (8, 8), (10, 20, 30, 0))
    assert (decode_image(encoded(image), (8, 8, 3)) == 255).all()
    palette = PIL.Image.new("P", (8, 8), 0)
    palette.putpalette([10, 20, 30])
    assert (decode_image(encoded(palette, transparency=0), (8, 8, 3)) == 255).all()


def test_exif_rotation_is_applied():
    image = PIL.Image.fromarray(RAMP)
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # to be shown rotated by 90 degrees clockwise
    decoded = decode_image(encoded(image, exif=exif), (8, 8, 1))[..., 0]
    np.testing.assert_array_equal(decoded, np.rot90(RAMP, -1))


def test_cmyk_jpeg_decodes():
    image = PIL.Image.new("RGB", (16, 16), (200, 30, 30)).convert("CMYK")
    decoded = decode_image(encoded(image, "JPEG"), (8, 8, 3))
    # JPEG and the conversion of colours move a value by a few steps.
    np.testing.assert_allclose(decoded.astype(int), np.broadcast_to([200, 30, 30], (8, 8, 3)), atol=6)


def test_a_wide_picture_is_cropped_in_the_centre():
    pixels = np.zeros((8, 24), np.uint8)
    pixels[:, 8:16] = 255
    np.testing.assert_array_equal(decode_image(encoded(PIL.Image.fromarray(pixels)), (8, 8, 1)), 255)
    np.testing.assert_array_equal(decode_image(encoded(PIL.Image.fromarray(pixels.T)), (8, 8, 1)), 255)


def test_a_path_and_its_contents_decode_alike(tmp_path):
    (tmp_path / "x.png").write_bytes(encoded(PIL.Image.fromarray(RAMP)))
    for source in (tmp_path / "x.png", str(tmp_path / "x.png")):
        np.testing.assert_array_equal(decode_image(source, (8, 8, 1))[..., 0], RAMP)


def test_what_cannot_be_decoded_is_named(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
    whole = encoded(PIL.Image.fromarray(noise))
    (tmp_path / "x.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ImageError, match=r"x\.png cannot be decoded"):
        decode_image(tmp_path / "x.png", (8, 8, 1))
    with pytest.raises(ImageError, match=r"absent\.png cannot be decoded: .*No such file"):
        decode_image(tmp_path / "absent.png", (8, 8, 1))


def test_random_crops_are_parts_of_the_picture_and_mirrored_half_of_the_time():
    columns = np.tile(np.arange(0, 240, 4, dtype=np.uint8), (60, 1))
    source = encoded(PIL.Image.fromarray(columns))
    crops = [decode_random_crop(source, (16, 16, 1), np.random.default_rng(i))[..., 0] for i in range(200)]
    steps = np.array([int(crop[0, -1]) - int(crop[0, 0]) for crop in crops])
    # Two standard deviations of 200 fair draws are 14.
    assert 72 <= (steps < 0).sum() <= 128
    covered = np.abs(steps) / 236
    assert covered.min() > 0.2  # the smallest crop is sqrt(0.08 * 3/4) = 0.24 of the width
    assert covered.max() > 0.9
    assert scale_pixels(np.stack(crops)).max() <= 1


def test_two_channels_are_refused():
    with pytest.raises(ValueError, match="1 or 3 channels, not 2"):
        decode_image(encoded(PIL.Image.fromarray(RAMP)), (8, 8, 2))
