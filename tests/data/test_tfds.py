"""tfds data sets: real ones where they are prepared, made-up ones of the same features elsewhere."""

import collections
import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import tensorflow_datasets as tfds
from array_record.python import array_record_module
from tensorflow_datasets.proto import tf_example_pb2

from pols_jax.data import StreamSplit, evaluation_batches, load, stream_batches
from pols_jax.errors import DataError


def example(**features):
    """A serialized tf.train.Example of bytes and ints."""
    proto = tf_example_pb2.Example()
    for name, value in features.items():
        if isinstance(value, bytes):
            proto.features.feature[name].bytes_list.value.append(value)
        else:
            proto.features.feature[name].int64_list.value.append(value)
    return proto.SerializeToString()


def encoded(pixels, file_format="PNG"):
    file = io.BytesIO()
    PIL.Image.fromarray(pixels.squeeze()).save(file, file_format)
    return file.getvalue()


def write_prepared(data_dir, name, version, features, splits, file_format="array_record"):
    """Write a data set as tfds prepares it, without TensorFlow."""
    directory = data_dir / name / version
    directory.mkdir(parents=True)
    (directory / "features.json").write_text(json.dumps(features.to_json()))
    info = {
        "name": name,
        "version": version,
        "fileFormat": file_format,
        "splits": [
            {
                "name": split,
                "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
                "numBytes": str(sum(map(len, records))),
                "shardLengths": [str(len(records))],
            }
            for split, records in splits.items()
        ],
        "supervisedKeys": {"tuple": {"items": [{"featureKey": "image"}, {"featureKey": "label"}]}},
    }
    (directory / "dataset_info.json").write_text(json.dumps(info))
    for feature_name, feature in features.items():
        if isinstance(feature, tfds.features.ClassLabel):
            feature.save_metadata(directory, feature_name)
    for split, records in splits.items():
        path = directory / f"{name}-{split}.{file_format}-00000-of-00001"
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
        for record in records:
            writer.write(record)
        writer.close()
    return directory


def made_up(num_examples, shape, seed):
    return np.random.default_rng(seed).integers(0, 256, (num_examples, *shape), np.uint8)


@pytest.fixture
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def small_images(tmp_path, cache_home):
    """svhn_cropped and cifar10 of 20 and 5 images, each with its pixels."""
    pixels = {}
    for name, version, extra in [("svhn_cropped", "3.1.0", ["extra"]), ("cifar10", "3.0.2", [])]:
        features = tfds.features.FeaturesDict(
            {
                "id": tfds.features.Text(),
                "image": tfds.features.Image(shape=(32, 32, 3)),
                "label": tfds.features.ClassLabel(names=[f"class {i}" for i in range(10)]),
            }
        )
        pixels[name] = {"train": made_up(20, (32, 32, 3), 0), "test": made_up(5, (32, 32, 3), 1)}
        splits = {
            split: [example(id=b"x", image=encoded(image), label=i % 10) for i, image in enumerate(images)]
            for split, images in pixels[name].items()
        }
        splits |= dict.fromkeys(extra, splits["test"])
        write_prepared(tmp_path / "tfds", name, version, features, splits)
    return tmp_path / "tfds", pixels


@pytest.mark.parametrize("name", ["svhn_cropped", "cifar10"])
def test_small_images_are_decoded_exactly_and_the_last_tenth_validates(small_images, name):
    data_dir, pixels = small_images
    dataset = load(name, data_dir=data_dir)
    assert dataset.image_shape == (32, 32, 3)
    assert dataset.class_names == tuple(f"class {i}" for i in range(10))
    np.testing.assert_array_equal(dataset.train.images, pixels[name]["train"][:18])
    np.testing.assert_array_equal(dataset.validation.images, pixels[name]["train"][18:])
    np.testing.assert_array_equal(dataset.test.images, pixels[name]["test"])
    np.testing.assert_array_equal(dataset.train.labels, np.arange(18) % 10)
    assert "tensorflow" not in sys.modules
    assert json.loads(json.dumps(dataset.provenance))["split_rule"].startswith("validation is the last 10 %")


def test_tfds_data_dir_is_used_where_no_directory_is_given(small_images, monkeypatch):
    data_dir, _ = small_images
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    assert len(load("cifar10").train) == 18


def test_the_second_load_reads_the_arrays_and_decodes_nothing(small_images, monkeypatch):
    data_dir, _ = small_images
    first = load("cifar10", data_dir=data_dir)
    assert list((data_dir / "cifar10" / "3.0.2" / "pols_jax").glob("cifar10-*/train_images.npy"))
    monkeypatch.setattr("pols_jax.data.tfds_sets.decode_image", None)
    second = load("cifar10", data_dir=data_dir)
    np.testing.assert_array_equal(first.train.images, second.train.images)
    assert first.provenance == second.provenance


def test_another_size_is_another_cache_entry(small_images):
    data_dir, _ = small_images
    assert load("cifar10", data_dir=data_dir).image_shape == (32, 32, 3)
    small = load("cifar10", data_dir=data_dir, image_size=16)
    assert small.image_shape == (16, 16, 3)
    assert small.train.images.shape == (18, 16, 16, 3)


def test_read_only_data_is_cached_for_the_user(small_images, cache_home):
    data_dir, _ = small_images
    # A file where the folder should be stops everyone from writing there, the superuser included.
    (data_dir / "cifar10" / "3.0.2" / "pols_jax").write_text("")
    load("cifar10", data_dir=data_dir)
    assert list((cache_home / "pols_jax").glob("cifar10-*/train_images.npy"))


def test_omniglot_pools_its_alphabets_and_splits_every_character(tmp_path, cache_home):
    """Four characters of twenty drawings, two in each split of tfds; a drawing is one shade, so that its place is seen."""
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=(28, 28, 3)),
            "label": tfds.features.ClassLabel(names=["Greek_1", "Greek_2", "Latin_1", "Latin_2"]),
        }
    )

    def drawings(*characters):
        shades = [(c, 20 * c + i) for i in range(20) for c in characters]
        return [example(image=encoded(np.full((28, 28, 3), shade, np.uint8)), label=c) for c, shade in shades]

    splits = {"train": drawings(2, 0), "test": drawings(3, 1), "small1": drawings(0)}
    write_prepared(tmp_path / "tfds", "omniglot", "3.0.0", features, splits)
    dataset = load("omniglot", data_dir=tmp_path / "tfds")
    assert dataset.image_shape == (28, 28, 1)
    assert dataset.class_names == ("Greek_1", "Greek_2", "Latin_1", "Latin_2")
    for split, first, stop in ((dataset.train, 0, 15), (dataset.validation, 15, 17), (dataset.test, 17, 20)):
        found = sorted(zip(split.labels, split.images[:, 0, 0, 0], strict=True))
        assert found == [(c, 20 * c + i) for c in range(4) for i in range(first, stop)]


@pytest.fixture
def imagenet(tmp_path, cache_home):
    features = tfds.features.FeaturesDict(
        {
            "file_name": tfds.features.Text(),
            "image": tfds.features.Image(encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(names=[f"n{i:08}" for i in range(1000)]),
        }
    )

    def records(count, seed, unlabeled=False):
        generator = np.random.default_rng(seed)
        for i in range(count):
            image = generator.integers(0, 256, (*generator.integers(30, 60, 2), 3), np.uint8)
            yield example(file_name=b"x", image=encoded(image, "JPEG"), label=-1 if unlabeled else i)

    splits = {
        "train": list(records(40, 0)),
        "validation": list(records(7, 1)),
        "test": list(records(3, 2, unlabeled=True)),
    }
    write_prepared(tmp_path / "tfds", "imagenet2012", "5.1.0", features, splits)
    return tmp_path / "tfds"


def test_imagenet_streams_and_its_validation_split_is_the_test(imagenet):
    dataset = load("imagenet2012", data_dir=imagenet, image_size=24, max_bytes=1000)
    assert dataset.num_classes == 1000
    assert [len(split) for split in (dataset.train, dataset.validation, dataset.test)] == [36, 4, 7]
    assert isinstance(dataset.train, StreamSplit)
    assert "tfds's validation" in dataset.provenance["split_rule"]
    seen = np.concatenate([b.labels[b.where] for b in evaluation_batches(dataset.validation, batch_size=3)])
    np.testing.assert_array_equal(seen, [36, 37, 38, 39])
    seen = np.concatenate([b.labels[b.where] for b in evaluation_batches(dataset.test, batch_size=3)])
    np.testing.assert_array_equal(seen, np.arange(7))


def test_imagenet_records_reach_worker_processes(imagenet):
    dataset = load("imagenet2012", data_dir=imagenet, image_size=24, max_bytes=1000)
    batches = stream_batches(dataset.train, seed=0, batch_size=12, num_workers=1)
    labels = np.concatenate([next(batches).labels for _ in range(3)])
    assert sorted(labels) == list(range(36))


def test_images_of_different_sizes_have_a_default_shape(imagenet):
    assert load("imagenet2012", data_dir=imagenet, max_bytes=1000).image_shape == (224, 224, 3)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"train": 100, "test": 10}, [("train", 0, 90), ("train", 90, 100), ("test", 0, 10)]),
        (
            {"train": 100, "validation": 8, "test": 10},
            [("train", 0, 100), ("validation", 0, 8), ("test", 0, 10)],
        ),
        ({"train": 100, "validation": 8}, [("train", 0, 90), ("train", 90, 100), ("validation", 0, 8)]),
        ({"train": 100}, [("train", 0, 80), ("train", 80, 90), ("train", 90, 100)]),
    ],
)
def test_splits_never_overlap_whatever_tfds_has(sizes, expected):
    from pols_jax.data.tfds_sets import _split_rule

    _, parts = _split_rule("any", sizes)
    assert [tuple(part) for part in parts.values()] == expected


def test_a_set_that_is_not_prepared_says_how_to_prepare_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # as if it were not installed
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'pols-jax\[prepare\]'"):
        load("svhn_cropped", data_dir=tmp_path)
    with pytest.raises(
        DataError, match=r"downloads/manual.*ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar"
    ):
        load("imagenet2012", data_dir=tmp_path)


def test_a_set_is_prepared_as_array_record_where_tensorflow_is_installed(small_images, monkeypatch):
    data_dir, _ = small_images
    asked = {}

    class Builder:
        data_dir = small_images[0] / "cifar10" / "3.0.2"

        def download_and_prepare(self):
            asked["prepared"] = True

    def builder(name, **options):
        asked.update(options, name=name)
        return Builder()

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("pols_jax.data.tfds_sets.tfds.builder", builder)
    load("cifar10", data_dir=data_dir / "empty")
    assert asked == {
        "name": "cifar10",
        "data_dir": str(data_dir / "empty"),
        "file_format": "array_record",
        "prepared": True,
    }


def test_other_file_formats_are_refused_with_the_remedy(tmp_path, cache_home):
    features = tfds.features.FeaturesDict(
        {"image": tfds.features.Image(shape=(8, 8, 1)), "label": tfds.features.ClassLabel(num_classes=2)}
    )
    splits = {"train": [b""] * 10, "test": [b""]}
    write_prepared(tmp_path, "mnist", "3.0.1", features, splits, file_format="tfrecord")
    with pytest.raises(DataError, match="prepare it as array_record"):
        load("mnist", data_dir=tmp_path)


def test_a_set_without_class_labels_is_refused(tmp_path):
    features = tfds.features.FeaturesDict(
        {"image": tfds.features.Image(shape=(8, 8, 1)), "label": tfds.features.Scalar(np.int64)}
    )
    write_prepared(tmp_path, "mnist", "3.0.1", features, {"train": [], "test": []})
    with pytest.raises(DataError, match="does not map an image to one class label"):
        load("mnist", data_dir=tmp_path)


def test_the_newest_version_is_read(small_images):
    from pols_jax.data.tfds_sets import _prepared_directory

    data_dir, _ = small_images
    for version in ("3.0.10", "2.9.9"):
        (data_dir / "cifar10" / version).mkdir()
        (data_dir / "cifar10" / version / "features.json").write_text("{}")
    assert _prepared_directory("cifar10", data_dir).name == "3.0.10"


# The real data, where it is. To decode it takes longer than all the tests above.


@pytest.fixture(scope="module")
def real_data(request):
    """Links to the prepared data, in a directory of pytest's: decoded arrays stay there, not in the original."""
    shared = Path(
        os.environ.get("TFDS_DATA_DIR") or Path(__file__).parents[2] / ".." / "shared" / "tfds"
    ).resolve()
    links = Path(request.config.cache.mkdir("tfds"))

    def directory_with(name):
        if not (shared / name).is_dir():
            pytest.skip(f"{name} is not prepared in TFDS_DATA_DIR or ../shared/tfds")
        for original in (shared / name).rglob("*"):
            link = links / original.relative_to(shared)
            if original.is_dir():
                link.mkdir(parents=True, exist_ok=True)
            elif not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(original)
        return links

    return directory_with


def duplicates_between_splits(dataset):
    """How many distinct images of one split are in another one too."""
    images = {
        name: {image.tobytes() for image in getattr(dataset, name).images}
        for name in ("train", "validation", "test")
    }
    return {
        f"{a}, {b}": len(images[a] & images[b])
        for a, b in (("train", "validation"), ("train", "test"), ("validation", "test"))
    }


@pytest.mark.slow
def test_mnist_has_its_sizes_and_no_leakage(real_data):
    dataset = load("mnist", data_dir=real_data("mnist"))
    assert [len(split) for split in (dataset.train, dataset.validation, dataset.test)] == [
        54_000,
        6_000,
        10_000,
    ]
    assert dataset.image_shape == (28, 28, 1)
    assert dataset.class_names == tuple("0123456789")
    # The published test set has 980 zeros and 1135 ones.
    assert np.bincount(dataset.test.labels).tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]
    duplicates = duplicates_between_splits(dataset)
    print("images that are in two splits because the original holds them twice:", duplicates)
    assert sum(duplicates.values()) <= 10
    assert "tensorflow" not in sys.modules


@pytest.mark.slow
def test_mnist_pixels_are_those_that_tfds_decodes(real_data):
    data_dir = real_data("mnist")
    dataset = load("mnist", data_dir=data_dir)
    source = tfds.builder_from_directory(data_dir / "mnist" / "3.0.1").as_data_source("train")
    for index in (0, 123, 53_999):
        np.testing.assert_array_equal(dataset.train.images[index], source[index]["image"])
        assert dataset.train.labels[index] == source[index]["label"]


@pytest.mark.slow
def test_omniglot_has_its_sizes_and_no_leakage(real_data):
    dataset = load("omniglot", data_dir=real_data("omniglot"))
    assert dataset.num_classes == 1623
    assert dataset.image_shape == (28, 28, 1)
    for split, drawings in ((dataset.train, 15), (dataset.validation, 2), (dataset.test, 3)):
        assert set(np.bincount(split.labels, minlength=1623).tolist()) == {drawings}
    assert dataset.class_names[0] == "Alphabet_of_the_Magi_1"
    duplicates = duplicates_between_splits(dataset)
    print("images that are in two splits because the original holds them twice:", duplicates)
    assert sum(duplicates.values()) <= 10


@pytest.mark.slow
def test_cifar100_has_its_sizes_and_classes(real_data):
    dataset = load("cifar100", data_dir=real_data("cifar100"))
    assert [len(split) for split in (dataset.train, dataset.validation, dataset.test)] == [
        45_000,
        5_000,
        10_000,
    ]
    assert dataset.image_shape == (32, 32, 3)
    assert dataset.class_names[:2] == ("apple", "aquarium_fish")
    assert set(collections.Counter(dataset.test.labels.tolist()).values()) == {100}
