"""Folders of pictures, and the one way to decode a picture."""

import dataclasses
import io
import itertools
import json
import os
import shutil

import numpy as np
import PIL.Image
import PIL.JpegImagePlugin
import pytest

from pols_jax.data import (
    ArraySplit,
    StreamSplit,
    decode_image,
    evaluation_batches,
    file_hashes as hashing,
    list_folder,
    load,
    picture_sizes,
)
from pols_jax.data.folder_listing import split_by_content
from pols_jax.errors import DataError, DataWarning, ImageError
from pols_jax.training.config import DataConfig


def encoded(image, file_format="PNG", **options):
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def write_class(folder, count, color, file_format="png"):
    folder.mkdir(parents=True)
    for i in range(count):
        PIL.Image.new("RGB", (20, 16), color).save(folder / f"{i:03}.{file_format}")


@pytest.fixture
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def pictures(tmp_path, cache):
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
        np.testing.assert_array_equal(batch.where, expected.where)
        np.testing.assert_array_equal(batch.labels, expected.labels)
        np.testing.assert_array_equal(batch.images[batch.where], expected.images[expected.where])


def test_broken_and_foreign_files_are_named_and_counted(pictures):
    (pictures / "train" / "cat" / "broken.png").write_bytes(b"no picture")
    whole = (pictures / "train" / "cat" / "000.jpg").read_bytes()
    (pictures / "test" / "cat" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (pictures / "test" / "cat" / "notes.txt").write_text("not a picture")
    (pictures / "test" / "cat" / ".DS_Store").write_text("hidden files are no data")
    with pytest.warns(DataWarning, match=r"3 files are left out as unusable") as warned:
        dataset = load(f"folder:{pictures}", image_size=8)
    for name in ("broken.png", "cut.jpg", "notes.txt"):
        assert name in str(warned[0].message)
    assert dataset.provenance["num_unusable_files"] == 3
    assert len(dataset.test) == 5


def flattened(root):
    """Moves all pictures to the top."""
    for i, path in enumerate([path for path in root.rglob("*") if path.is_file()]):
        path.rename(root / f"{i}{path.suffix}")
    shutil.rmtree(root / "train")
    return []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "test").rename(root / "tset"), "test is not a directory"),
        (lambda root: (root / "test" / "cow").mkdir(), "has classes that train/ has not: cow"),
        (lambda root: (root / "train" / "dog").rename(root / "dog"), "has 1 class folder, at least 2"),
        (lambda root: (root / "val").mkdir(), "The validation split of .* has no pictures"),
        (lambda root: root.rename(root.with_name("gone")), "is not a directory"),
        (lambda root: shutil.rmtree(root / "train" / "dog"), "has 1 class folder, at least 2 are needed"),
        (
            lambda root: [path.rename(path.with_suffix(".txt")) for path in (root / "test").rglob("*.png")],
            r"The test split of .* has no pictures \(\.jpg, ",
        ),
        (
            lambda root: [shutil.rmtree(root / "test"), (root / "train").rename(root / "pictures")],
            r"has 1 class folder, at least 2 are needed; the folders in .*pictures may be what you mean",
        ),
        (
            lambda root: [shutil.rmtree(root / "test"), *flattened(root)],
            "has 0 class folders, at least 2 are needed; put the pictures of each class into a folder of their own",
        ),
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
    with pytest.raises(DataError, match=r"no data set named 'mnsit'; the nearest names are .*\bmnist\b"):
        load("mnsit")
    with pytest.raises(DataError, match="glyphs"):
        load("glyhps")


def test_a_path_without_its_prefix_is_answered_with_it(pictures, monkeypatch):
    monkeypatch.chdir(pictures.parent)
    for name in (str(pictures), pictures.name, f"./{pictures.name}", f"{pictures}/"):
        with pytest.raises(DataError, match=f"There is no data set named .*, write folder:{name}\\.$"):
            load(name)
    for name in (f"{pictures}/gone", "../gone", "~nobody/x", "", "a\0b", "x" * 5000):
        with pytest.raises(DataError, match="your own pictures are folder:PATH"):
            load(name)


@pytest.mark.parametrize("name", ["folder:{}", "glyphs", "mnist"])
@pytest.mark.parametrize("size", [0, -1, 10**6, 2.5, "224"])
def test_sizes_that_pictures_cannot_have_are_refused(pictures, name, size):
    with pytest.raises(
        DataError, match=r"The image size must be a whole number of pixels from \d to 4096, got"
    ):
        load(name.format(pictures), image_size=size)


def test_glyphs_that_no_memory_holds_are_refused():
    with pytest.raises(DataError, match=r"characters in 12 faces at 4096 pixels take \d+ GiB of memory"):
        load("glyphs", image_size=4096)


def test_channels_are_an_option_of_the_command_line(pictures):
    config = DataConfig(dataset=f"folder:{pictures}", image_size=8, channels=1)
    assert load(config.dataset, **config.options()).image_shape == (8, 8, 1)
    with pytest.raises(DataError, match="Pictures have 1 or 3 channels, not 2"):
        load(f"folder:{pictures}", channels=2)


def test_every_option_that_an_error_offers_is_a_flag(pictures):
    for name in (f"folder:{pictures}", "glyphs", "mnist"):
        with pytest.raises(DataError) as raised:
            load(name, sise=3)
        offered = str(raised.value).partition("it has: ")[2].rstrip(".").split(", ")
        flags = {field.name for field in dataclasses.fields(DataConfig)} | {"data_dir"}
        assert set(offered) <= flags


# Entries that are no pictures, and names that are no text.


def odd_name(text):
    return os.fsdecode(text.encode("latin-1"))


def test_pipes_links_and_folders_are_counted_and_not_read(pictures):
    cats = pictures / "train" / "cat"
    os.mkfifo(cats / "pipe.jpg")
    (cats / "zero.jpg").symlink_to("/dev/zero")
    (cats / "dangling.jpg").symlink_to(cats / "gone.jpg")
    (cats / "folder.jpg").mkdir()  # a folder inside of a class may have any name
    (pictures / "train" / "cow").symlink_to(pictures / "gone")
    for max_bytes in (10**9, 100):
        with pytest.warns(DataWarning, match="4 files are left out as unusable") as warned:
            dataset = load(f"folder:{pictures}", image_size=8, max_bytes=max_bytes)
        for reason in (
            "pipe.jpg: not a regular",
            "zero.jpg: not a regular",
            "dangling.jpg: a link",
            "cow: a link",
        ):
            assert reason in str(warned[0].message)
        assert len(dataset.train) == 22
        assert dataset.provenance["num_unusable_files"] == 4


def test_odd_names_are_used_and_shown_safely(pictures):
    odd = os.path.join(pictures, "train", odd_name("co\xe9\x1b[2J"))
    shutil.copytree(pictures / "train" / "dog", odd)
    with open(os.path.join(odd, odd_name("\xff\n[x].png")), "wb") as file:
        file.write(b"no picture")
    shutil.copy(pictures / "test" / "dog" / "000.png", os.path.join(odd, odd_name("\xfe\r.png")))
    with pytest.warns(DataWarning, match="1 file is left out as unusable") as warned:
        dataset = load(f"folder:{pictures}", image_size=8)
    assert dataset.class_names == ("cat", "co\\xe9\\x1b[2J", "dog")
    assert str(warned[0].message).isprintable()
    assert np.bincount(dataset.train.labels).tolist() == [18, 6, 4], "one is held out, one is broken"
    json.dumps(dataset.provenance, ensure_ascii=False).encode()


def test_an_empty_class_a_stray_file_and_a_hidden_folder_are_named_in_one_sentence_each(pictures):
    (pictures / "train" / "cow").mkdir()
    shutil.copytree(pictures / "train" / "cat", pictures / "train" / ".thumbnails")
    shutil.copytree(pictures / "train" / "cat", pictures / "train" / "cat" / ".cache")
    (pictures / "train" / "stray.png").write_bytes(encoded(PIL.Image.new("L", (8, 8))))
    (pictures / "extra").mkdir()
    with pytest.warns(DataWarning) as warned:
        dataset = load(f"folder:{pictures}", image_size=8)
    left_out, empty = (str(warning.message) for warning in warned)
    for name in (
        "extra: a folder beside train/ and test/",
        "train/.thumbnails: a hidden folder",
        "cat/.cache: a hidden folder",
        "stray.png: in no class folder",
    ):
        assert name in left_out
    assert empty == "1 class has no pictures to learn from: cow."
    assert np.bincount(dataset.train.labels, minlength=3).tolist() == [18, 0, 4]


# Sizes and channels.


def write_sizes(folder, sizes, mode="RGB"):
    folder.mkdir(parents=True)
    for i, size in enumerate(sizes):
        PIL.Image.new(mode, size).save(folder / f"{i:03}.png")


def test_size_and_channels_are_those_of_nine_of_ten_pictures(tmp_path, cache):
    # Of 20 pictures two are smaller than 30 pixels; a third would be one too many.
    write_sizes(tmp_path / "a", [(5, 9), (40, 20), *[(30 + i, 90) for i in range(8)]], "L")
    write_sizes(tmp_path / "b", [(90, 31 + i) for i in range(10)], "LA")
    sizes = picture_sizes(list_folder(tmp_path))
    assert (sizes.usual_side, sizes.are_gray) == (30, True)
    assert (sizes.num_enlarged(30), sizes.num_enlarged(5)) == (2, 0)
    assert sizes.shape(largest=224) == (30, 30, 1)
    assert sizes.shape(largest=28) == (28, 28, 1)
    assert sizes.shape(largest=28, image_size=64, channels=3) == (64, 64, 3)
    assert load(f"folder:{tmp_path}").image_shape == (30, 30, 1)
    PIL.Image.new("RGB", (300, 300)).save(tmp_path / "b" / "color.png")
    assert load(f"folder:{tmp_path}").image_shape == (30, 30, 3)


def test_large_pictures_are_shrunk_and_broken_ones_do_not_count(tmp_path, cache):
    write_sizes(tmp_path / "a", [(500, 400)] * 2)
    write_sizes(tmp_path / "b", [(300, 400)] * 2)
    (tmp_path / "a" / "broken.png").write_bytes(b"no picture")
    listing = list_folder(tmp_path)
    assert picture_sizes(listing).sides == (300, 300, 400, 400)
    assert picture_sizes(listing).shape(largest=224) == (224, 224, 3)
    assert picture_sizes(
        dataclasses.replace(listing, records={"train": [(str(tmp_path / "gone"), 0)]})
    ).shape(largest=224) == (224, 224, 3)


# A folder without splits.


def write_numbered(folder, count, start=0):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(start, start + count):
        PIL.Image.new("L", (8, 8), i % 256).resize((8 + i // 256, 8)).save(folder / f"{i:04}.png")


def names_of(dataset):
    """The split of every picture, which its shade tells."""
    return {
        (label, int(image[0, 0, 0])): split
        for split in ("train", "validation", "test")
        for image, label in zip(
            getattr(dataset, split).images, getattr(dataset, split).labels.tolist(), strict=True
        )
    }


def test_a_folder_of_classes_is_split_by_content_and_stays_so_when_files_come_and_go(tmp_path, cache):
    write_numbered(tmp_path / "a", 200)
    write_numbered(tmp_path / "b", 3)
    write_numbered(tmp_path / "c", 2)
    write_numbered(tmp_path / "d", 1)
    dataset = load(f"folder:{tmp_path}")
    first = names_of(dataset)
    shares = [list(first.values()).count(split) for split in ("train", "validation", "test")]
    # Of 200, a tenth is 20 with a standard deviation of 4.
    assert all(8 <= share <= 34 for share in shares[1:])
    by_class = [sorted(split for (label, _), split in first.items() if label == i) for i in range(1, 4)]
    assert by_class == [["test", "train", "validation"], ["test", "train"], ["train"]]
    assert dataset.provenance["split_rule"].startswith("by the SHA-256 of every file")

    write_numbered(tmp_path / "a", 40, start=200)
    for path in list((tmp_path / "a").iterdir())[::2]:
        path.rename(path.with_stem(f"renamed-{path.stem}"))
    second = names_of(load(f"folder:{tmp_path}"))
    assert {key: second[key] for key in first} == first
    # Copies of one file are all in the same split, whatever their names.
    for i in range(5):
        shutil.copy(tmp_path / "b" / "0001.png", tmp_path / "a" / f"copy-{i}.png")
    copies = load(f"folder:{tmp_path}")
    assert sum(len(getattr(copies, split)) for split in ("train", "validation", "test")) == 251
    streamed = load(f"folder:{tmp_path}", max_bytes=10)
    assert streamed.provenance == copies.provenance
    assert [len(getattr(streamed, split)) for split in ("train", "validation", "test")] == [
        len(getattr(copies, split)) for split in ("train", "validation", "test")
    ]


def test_copies_of_a_file_are_never_in_two_splits():
    hashes = [f"{i:02x}" for i in range(256)] * 2
    splits, digests = split_by_content([(str(i), 0) for i in range(512)], hashes, 1)
    assert [len(splits[name]) for name in ("train", "validation", "test")] == [2 * 204, 2 * 26, 2 * 26]
    for one, other in itertools.combinations(digests.values(), 2):
        assert not set(one) & set(other)


# The same data, or not.


@pytest.mark.parametrize("max_bytes", [10**9, 100], ids=["in memory", "streamed"])
def test_a_folder_is_known_by_its_contents(pictures, max_bytes):
    def provenance():
        return load(f"folder:{pictures}", image_size=8, max_bytes=max_bytes).provenance

    def swap(a, b):
        a.rename(pictures / "other")
        b.rename(a)
        (pictures / "other").rename(b)

    cats, dogs = pictures / "test" / "cat" / "000.png", pictures / "test" / "dog" / "000.png"
    cats.write_bytes(cats.read_bytes().ljust(100))  # names and sizes alone cannot tell one from the other
    dogs.write_bytes(dogs.read_bytes().ljust(100))
    original = load(f"folder:{pictures}", image_size=8, max_bytes=max_bytes)
    assert original.is_the_data_of(json.loads(json.dumps(provenance())))
    swap(cats, dogs)
    assert not original.is_the_data_of(provenance())
    swap(cats, dogs)
    assert original.is_the_data_of(provenance())

    data, status = bytearray(cats.read_bytes()), cats.stat()
    data[-1] ^= 1
    cats.write_bytes(data)
    os.utime(cats, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a copy that keeps the times
    assert not original.is_the_data_of(provenance())


def test_records_from_before_contents_were_hashed_are_compared_by_what_they_have(pictures):
    dataset = load(f"folder:{pictures}", image_size=8)
    older = {key: value for key, value in dataset.provenance.items() if key != "content_sha256"}
    assert dataset.is_the_data_of(older)
    assert not dataset.is_the_data_of(older | {"fingerprint": "another"})
    assert not dataset.is_the_data_of({}), "a record without any hash shows nothing"


def test_files_are_hashed_once(pictures, cache, monkeypatch):
    read = []

    def count(path):
        read.append(path)
        return read_bytes(path)

    read_bytes = hashing.read_bytes
    monkeypatch.setattr(hashing, "read_bytes", count)
    monkeypatch.setattr(hashing, "_SETTLED_SECONDS", -3600.0)

    def load_streamed():
        read.clear()
        return load(f"folder:{pictures}", image_size=8, max_bytes=100).provenance["content_sha256"]

    first = load_streamed()
    assert len(read) == 30
    assert load_streamed() == first
    assert not read
    (pictures / "test" / "cat" / "000.png").touch()
    assert load_streamed() == first
    assert [os.path.basename(path) for path in read] == ["000.png"]
    (arrays,) = (cache / "pols_jax").glob("hashes-*")
    for damage in (b"", b"\x00" * 500, (arrays / "hashes.npy").read_bytes()[:-1] + b"!"):
        (arrays / "hashes.npy").write_bytes(damage)
        assert load_streamed() == first
        assert len(read) == 30, "a damaged cache is made again"


def test_files_that_were_just_written_are_not_trusted_to_stay(pictures, cache):
    load(f"folder:{pictures}", image_size=8, max_bytes=100)
    assert not list(cache.glob("*/hashes-*"))


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
    ids=["gray", "RGB", "RGBA", "gray and alpha", "palette", "16 bit"],
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
    # JPEG and the conversion of colors move a value by a few steps.
    np.testing.assert_allclose(decoded.astype(int), np.broadcast_to([200, 30, 30], (8, 8, 3)), atol=6)


def test_a_wide_picture_is_cropped_in_the_center():
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


@pytest.mark.parametrize("size", [(800, 600), (600, 800), (300, 1400), (255, 300)])
@pytest.mark.parametrize("turn", [1, 6])
def test_a_jpeg_that_is_shrunk_while_it_is_decoded_is_nearly_the_same_picture(size, turn):
    # A photograph has smooth parts, edges and noise.
    generator, (width, height) = np.random.default_rng(0), size
    coarse = PIL.Image.fromarray(generator.integers(0, 256, (8, 8, 3), np.uint8)).resize(
        size, PIL.Image.Resampling.BICUBIC
    )
    pixels = np.asarray(coarse).astype(int) + generator.integers(-20, 21, (height, width, 1))
    pixels[height // 3 : height // 2, width // 3 : width // 2] = (250, 10, 10)
    photo = PIL.Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    exif = PIL.Image.Exif()
    exif[0x0112] = turn
    source = encoded(photo, "JPEG", quality=90, exif=exif)
    with PIL.Image.open(io.BytesIO(source)) as exact:
        whole = encoded(exact.convert("RGB"), "PNG", exif=exif, compress_level=1)
    for channels in (1, 3):
        drafted, plain = (decode_image(data, (64, 64, channels)).astype(int) for data in (source, whole))
        assert np.abs(drafted - plain).mean() <= 1.0
        assert np.abs(drafted - plain).max() <= 24


def test_a_jpeg_is_decoded_at_no_less_than_twice_the_wanted_size(monkeypatch):
    seen = []
    load_pixels = PIL.JpegImagePlugin.JpegImageFile.load

    def load_and_note(image):
        seen.append(image.size)
        return load_pixels(image)

    monkeypatch.setattr(PIL.JpegImagePlugin.JpegImageFile, "load", load_and_note)
    for size in ((1600, 1200), (257, 256), (255, 2000)):
        decode_image(encoded(PIL.Image.new("RGB", size), "JPEG"), (64, 64, 3))
    assert list(dict.fromkeys(seen)) == [(200, 150), (129, 128), (255, 2000)]


def test_two_channels_are_refused():
    with pytest.raises(ValueError, match="1 or 3 channels, not 2"):
        decode_image(encoded(PIL.Image.fromarray(RAMP)), (8, 8, 2))
