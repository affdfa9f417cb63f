"""Glyphs: deterministic, split by face, unique names, legible bitmaps, clear errors about fonts."""

import json
import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from fontTools.ttLib import TTCollection, TTFont

from pols_jax.data import array_cache, fonts, glyphs, load
from pols_jax.errors import DataError

NOTO = sorted(Path("/usr/share/fonts/opentype/noto").glob("Noto*CJK-*.ttc"))


@pytest.fixture(scope="module")
def dataset():
    return load("glyphs")


@pytest.fixture(scope="module")
def paths():
    """The four DejaVu Sans faces."""
    return [path for path in fonts.dejavu_paths() if path.name.startswith(("DejaVuSans-", "DejaVuSans."))]


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pols_jax"


def test_the_embedded_set_has_thousands_of_uniquely_named_classes(dataset):
    assert 2_200 <= dataset.num_classes <= 2_300
    assert len(set(dataset.class_names)) == dataset.num_classes
    assert "LATIN CAPITAL LETTER A" in dataset.class_names
    assert "GREEK CAPITAL LETTER ALPHA" not in dataset.class_names  # the same drawing in all faces
    assert dataset.image_shape == (32, 32, 1)


def test_eight_faces_train_one_validates_three_test_and_none_is_in_two(dataset):
    faces = dataset.provenance["faces"]
    assert [len(faces[split]) for split in ("train", "validation", "test")] == [8, 1, 3]
    assert len({face for split in faces.values() for face in split}) == 12
    families = {
        face.removesuffix(" Italic").removesuffix(" Oblique").removesuffix(" Bold") for face in faces["test"]
    }
    assert families == {"DejaVu Sans", "DejaVu Sans Mono", "DejaVu Serif"}
    for split, count in (("train", 8), ("validation", 1), ("test", 3)):
        labels = getattr(dataset, split).labels
        assert set(np.bincount(labels, minlength=dataset.num_classes).tolist()) == {count}


def test_no_two_classes_look_the_same_in_every_face(dataset):
    splits = [dataset.train, dataset.validation, dataset.test]
    images = np.concatenate([split.images for split in splits]).reshape(12, dataset.num_classes, -1)
    assert len({images[:, i].tobytes() for i in range(dataset.num_classes)}) == dataset.num_classes


def test_glyphs_are_centered_unclipped_and_have_ink(dataset):
    for split in (dataset.train, dataset.validation, dataset.test):
        ink = split.images[..., 0] > 0
        assert ink.any(axis=(1, 2)).all()
        for border in (ink[:, :2], ink[:, -2:], ink[:, :, :2], ink[:, :, -2:]):
            assert not border.any()
        for axis in (1, 2):
            covered = ink.any(axis=3 - axis)
            first, last = covered.argmax(axis=1), 31 - covered[:, ::-1].argmax(axis=1)
            # Ink of odd extent cannot be exactly in the middle of an even number of pixels.
            assert np.abs(first - (31 - last)).max() <= 1


def test_case_shows_in_the_size_of_a_letter(dataset):
    by_name = {name: i for i, name in enumerate(dataset.class_names)}
    small, capital = (
        dataset.train.images[dataset.train.labels == by_name[f"LATIN {case} LETTER O"]]
        for case in ("SMALL", "CAPITAL")
    )
    heights = [(images.any(axis=(2, 3))).sum(axis=1) for images in (small, capital)]
    assert (heights[0] < heights[1]).all()


def test_drawing_twice_gives_the_same_bytes(dataset, no_cache):
    again = load("glyphs")
    assert again.provenance == dataset.provenance
    np.testing.assert_array_equal(again.test.images, dataset.test.images)


def test_provenance_is_json_and_names_the_fonts_by_hash(dataset):
    provenance = json.loads(json.dumps(dataset.provenance))
    assert len(provenance["fonts"]) == 12
    assert all(len(digest) == 64 for digest in provenance["fonts"].values())
    assert {"pillow", "freetype", "matplotlib", "content_sha256", "split_rule"} <= set(provenance)


def test_symbols_that_faces_share_are_counted_not_hidden(dataset):
    train = {image.tobytes() for image in dataset.train.images}
    for split in ("validation", "test"):
        shared = [image.tobytes() in train for image in getattr(dataset, split).images]
        assert dataset.provenance["images_drawn_as_in_train"][split] == sum(shared)
        assert 0.2 < np.mean(shared) < 0.3  # box drawings, arrows and blocks; letters are drawn anew


def test_fewer_classes_are_a_fixed_part_of_more_classes():
    ten, fifty = (load("glyphs", max_classes=count) for count in (10, 50))
    assert set(ten.class_names) < set(fifty.class_names)
    assert ten.num_classes == 10
    assert ten.train.labels.max() == 9
    assert len(ten.train) == 80


@pytest.mark.parametrize("max_classes", [1, 100_000])
def test_an_impossible_number_of_classes_is_refused(max_classes):
    with pytest.raises(DataError, match="max_classes must be between 2 and the"):
        load("glyphs", max_classes=max_classes)


def test_ranges_choose_characters():
    digits = load("glyphs", characters="0030-0039")
    assert digits.class_names == tuple(unicodedata.name(str(i)) for i in range(10))


@pytest.mark.parametrize("text", ["", "zz", "39-30", "30-31-32", "110000", "-"])
def test_ranges_that_make_no_sense_are_refused(text):
    with pytest.raises(DataError, match="is not a range of code points"):
        glyphs.parse_ranges(text)


def test_the_cache_is_used_and_a_damaged_one_is_made_again(no_cache, monkeypatch):
    first = load("glyphs", characters="0030-0039")
    (entry,) = no_cache.iterdir()
    monkeypatch.setattr("pols_jax.data.glyphs.render", None)
    np.testing.assert_array_equal(load("glyphs", characters="0030-0039").train.images, first.train.images)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(no_cache.parent))
    bitmaps = entry / "bitmaps.npy"
    bitmaps.write_bytes(bitmaps.read_bytes()[:1000])
    np.testing.assert_array_equal(load("glyphs", characters="0030-0039").train.images, first.train.images)
    assert [path.name for path in no_cache.iterdir()] == [entry.name]
    whole = bitmaps.read_bytes()
    bitmaps.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])  # one bit of one pixel
    np.testing.assert_array_equal(load("glyphs", characters="0030-0039").train.images, first.train.images)
    assert bitmaps.read_bytes() == whole


def test_without_a_place_for_the_cache_glyphs_are_drawn_every_time(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load("glyphs", characters="0030-0039").num_classes == 10


def test_a_write_that_fails_half_way_leaves_nothing_behind(tmp_path, monkeypatch):
    saved = []

    def save_one_then_fail(file, array, **options):
        if saved:
            raise OSError("no space left on device")
        saved.append(np.save.__name__)
        file.write(b"half")

    monkeypatch.setattr("pols_jax.data.array_cache.np.save", save_one_then_fail)
    arrays = array_cache.cached_arrays("x", lambda: {"a": np.ones(3), "b": np.ones(3)}, [tmp_path])
    np.testing.assert_array_equal(arrays["a"], np.ones(3))
    assert list(tmp_path.iterdir()) == []


def test_other_fonts_are_split_in_the_order_given(paths):
    dataset = load("glyphs", fonts=[*paths], characters="0041-005A")
    faces = dataset.provenance["faces"]
    assert [len(split) for split in faces.values()] == [2, 1, 1]
    assert dataset.num_classes == 26


def test_every_face_of_a_collection_is_read(paths, tmp_path):
    collection = TTCollection()
    collection.fonts = [TTFont(path) for path in paths[:3]]
    collection.save(tmp_path / "three.ttc", shareTables=False)
    for font in collection.fonts:
        font.close()
    faces = fonts.read_faces([tmp_path / "three.ttc"])
    assert [face.name for face in faces] == [face.name for face in fonts.read_faces(paths[:3])]
    together = load("glyphs", fonts=[tmp_path / "three.ttc"], characters="0041-005A")
    apart = load("glyphs", fonts=paths[:3], characters="0041-005A")
    for split in ("train", "validation", "test"):
        np.testing.assert_array_equal(getattr(together, split).images, getattr(apart, split).images)


def test_faces_are_chosen_by_name_or_pattern(paths):
    dataset = load(
        "glyphs",
        characters="0041-005A",
        train_faces=["DejaVu Serif*"],
        validation_faces=["DejaVu Sans Mono"],
        test_faces=["DejaVu Sans"],
    )
    faces = dataset.provenance["faces"]
    assert [len(split) for split in faces.values()] == [4, 1, 1]
    assert faces["test"] == ["DejaVu Sans"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_faces": ["DejaVu Sans"]}, "validation_faces, test_faces is missing"),
        (
            {"train_faces": ["DejaVu*"], "validation_faces": ["DejaVu Sans"], "test_faces": ["DejaVu Serif"]},
            "'DejaVu Sans' is in train_faces and in validation_faces",
        ),
        (
            {"train_faces": ["Arial"], "validation_faces": ["DejaVu Sans"], "test_faces": ["DejaVu Serif"]},
            "No face is named 'Arial'",
        ),
        ({"image_size": 4}, "from 8 to 4096, got"),
        ({"fonts": "font.ttf"}, "fonts must be a list, not the single string 'font.ttf'"),
        ({"characters": "4E00-9FFF"}, "0 of the characters in common, at least 2 are needed"),
        ({"characters": "0020,00A0,2000-200A"}, "characters leave ink in every face"),
    ],
)
def test_wrong_choices_are_explained(options, message):
    with pytest.raises(DataError, match=message):
        load("glyphs", **options)


def test_fonts_that_cannot_be_used_are_named(paths, tmp_path):
    broken = tmp_path / "broken.ttf"
    broken.write_bytes(b"\x00\x01\x00\x00 this is no font")
    with pytest.raises(DataError, match=r"broken\.ttf cannot be read as TrueType or OpenType"):
        load("glyphs", fonts=[broken, *paths])
    with pytest.raises(DataError, match=r"absent\.ttf cannot be opened: No such file"):
        load("glyphs", fonts=[tmp_path / "absent.ttf"])
    with pytest.raises(DataError, match="2 faces are too few"):
        load("glyphs", fonts=paths[:2])
    with pytest.raises(DataError, match="both hold a face named"):
        load("glyphs", fonts=[*paths, paths[0]])


def test_damaged_outlines_are_one_sentence(paths, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    font = TTFont(paths[0])
    start = font.reader.tables["glyf"].offset + font["loca"][font.getGlyphID(font.getBestCmap()[ord("1")])]
    damaged = bytearray(Path(paths[0]).read_bytes())
    damaged[start + 10 : start + 60] = b"\xff" * 50  # where its contours end, and what is in them
    (tmp_path / "damaged.ttf").write_bytes(damaged)
    fonts_used = [tmp_path / "damaged.ttf", *paths[1:]]
    with pytest.raises(DataError, match=r"The font .*damaged\.ttf cannot draw U\+0031: .+\.$"):
        load("glyphs", fonts=fonts_used, characters="0030-0039")


def test_what_is_no_font_file_is_one_sentence(paths, tmp_path):
    os.mkfifo(tmp_path / "pipe.ttf")
    (tmp_path / "text.ttf").write_text("no font")
    for font, why in {
        "/dev/zero": "cannot be opened: it is a device, not a regular file",
        str(tmp_path): "cannot be opened: it is a directory, not a regular file",
        str(tmp_path / "p*.ttf"): "cannot be opened: it is a named pipe, not a regular file",
        str(tmp_path / "text.ttf"): "cannot be read as TrueType or OpenType: ",
    }.items():
        with pytest.raises(DataError, match=f"The font .* {why}.*\\.$"):
            load("glyphs", fonts=[font, *paths])


@pytest.mark.slow
@pytest.mark.skipif(len(NOTO) < 14, reason="needs Debian's fonts-noto-cjk and fonts-noto-cjk-extra")
def test_tens_of_thousands_of_cjk_characters_load_from_collections():
    dataset = load(
        "glyphs",
        fonts=NOTO,
        characters="3400-4DBF,4E00-9FFF,AC00-D7A3",
        image_size=28,
        train_faces=["Noto Sans CJK JP", "Noto Serif CJK JP Black"],
        validation_faces=["Noto Sans CJK JP Light"],
        test_faces=["Noto Serif CJK JP Bold"],
    )
    assert dataset.num_classes > 38_000
    assert dataset.train.images.shape == (2 * dataset.num_classes, 28, 28, 1)


def test_fonts_may_be_a_pattern():
    pattern = str(fonts.dejavu_paths()[0].parent / "DejaVuS*.ttf")
    by_pattern = [face.name for face in fonts.read_faces([pattern]) if "Display" not in face.name]
    assert by_pattern == [face.name for face in fonts.read_faces(fonts.dejavu_paths())]


def test_a_pattern_that_matches_nothing_says_so():
    with pytest.raises(DataError, match=r"No font file matches /no/such/\*\.ttf"):
        fonts.read_faces(["/no/such/*.ttf"])
