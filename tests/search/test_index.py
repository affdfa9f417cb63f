"""An index: its answers are those of a direct search, it follows the files, and a kill at any moment loses nothing."""

import os
import shutil
import threading
import tracemalloc
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pols_jax import files
from pols_jax.data import decode_image, scale_pixels
from pols_jax.errors import ConfigError, DataError, RunError
from pols_jax.heads import all_logits
from pols_jax.metrics.thresholds import Rule
from pols_jax.normalizers import Fit, Normalizer
from pols_jax.search import index_files, indexing
from pols_jax.search.class_bank import ClassBank
from pols_jax.search.index import FeatureIndex, update_index
from pols_jax.search.index_export import export_index
from pols_jax.search.index_files import SCHEMA, IndexInfo, IndexWriter, Rows
from pols_jax.search.pictures import Picture, find_pictures
from pols_jax.search.searching import make_queries, search, search_index
from pols_jax.training.run_dirs import locked
from pols_jax.training.run_normalizer import write_normalizer
from pols_jax.training.runs import Run

# Batches of 1, 8 and 64 pictures, and sums in another order, round differently: by some units in the seventh digit of the
# terms of a score, which are up to 100 here.
ROUNDING = 5e-5


@pytest.fixture(scope="module")
def normalized(run_dir, tmp_path_factory):
    """The same network with a normalizer of three rows."""
    run_dir = shutil.copytree(run_dir, tmp_path_factory.mktemp("normalized") / "run")
    run = Run.open(run_dir)
    kernel = jnp.asarray(run.restore_head()[0][:3])
    write_normalizer(
        run_dir, Normalizer(kernel, jnp.arange(3.0), Fit(1.0, 0.0, 0)), checkpoint=run.checkpoint
    )
    return ClassBank.open(run_dir)


@pytest.fixture(scope="module")
def photos(pictures, tmp_path_factory):
    """Photographs of many sizes, modes, formats and names, in folders, and some files that are none."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    (folder / "2019" / "summer").mkdir(parents=True)
    modes = ["1", "L", "LA", "P", "RGB", "RGBA"]
    sizes = [(1, 1), (3, 400), (31, 33), (40, 30), (64, 64), (101, 57), (640, 480), (9, 1000)]
    for i in range(48):
        width, height = sizes[i % len(sizes)]
        pixels = rng.integers(0, 256, (height, width, 4), np.uint8)
        picture = Image.fromarray(pixels).convert(modes[i % len(modes)])
        picture.save(folder / ("2019" if i % 2 else "2019/summer") / f"{i}.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).convert("CMYK").save(folder / "cmyk.jpg", exif=exif)
    Image.fromarray(pixels).convert("RGB").save(folder / "lossy.webp")
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 257).save(folder / "deep.png")
    for name in (b"caf\xe9.png", b"\x1b[31mred.png", b"two\nlines.png"):
        shutil.copy(next(pictures.iterdir()), os.path.join(folder, os.fsdecode(name)))
    (folder / "notes.txt").write_text("no picture")
    (folder / "cut.png").write_bytes((folder / "deep.png").read_bytes()[:60])
    os.mkfifo(folder / "pipe.png")
    (folder / "dangling.png").symlink_to(folder / "gone.png")
    return folder


@pytest.fixture
def copies(pictures, tmp_path):
    """The pictures of the digits in a folder that may be changed."""
    return shutil.copytree(pictures, tmp_path / "pictures")


class Counting:
    """A bank that counts the pictures it looks at."""

    def __init__(self, bank):
        self._bank, self.num_pictures = bank, 0

    def __getattr__(self, name):
        return getattr(self._bank, name)

    def features(self, images):
        self.num_pictures += len(images)
        return self._bank.features(images)


def contents(directory):
    """All that an index says: paths and bits of features, in order, and what is broken."""
    info, index = index_files.read_info(Path(directory)), FeatureIndex.open(directory)
    features = np.concatenate([features for _, features in index.blocks()])
    tables = [index_files.read_pictures(Path(directory), part) for part in info.parts]
    return pa.concat_tables(tables).combine_chunks(), list(index.paths), features.tobytes()


# Its answers.


@pytest.mark.parametrize("kind", ["bank", "normalized"])
@pytest.mark.parametrize("folder", ["pictures", "photos"])
def test_an_index_a_direct_search_and_the_column_of_all_logits_give_the_same_hits(
    kind, folder, request, tmp_path
):
    bank, folder = request.getfixturevalue(kind), request.getfixturevalue(folder)
    update_index(bank, [str(folder)], tmp_path / "index")
    index = FeatureIndex.open(tmp_path / "index")
    scores = index.scores(bank, list(bank.names))
    pixels = np.stack([decode_image(path, bank.image_shape) for path in index.paths])
    features = bank.run.model.backbone.apply(bank.run.restore_backbone(), scale_pixels(pixels))
    full = np.asarray(all_logits(features, *map(jnp.asarray, bank.run.restore_head())))
    if bank.normalizer is not None:
        full = full - np.asarray(bank.normalizer(features))[:, None]
    np.testing.assert_allclose(scores, full, rtol=ROUNDING, atol=ROUNDING)
    everything = Rule.parse("-1e9")
    direct = search(bank, make_queries(bank, ["7", "2"], everything), find_pictures([str(folder)]))
    logits = {(hit.picture, hit.query.class_id): hit.logit for hit in direct.hits}
    assert len(logits) == 2 * len(index)
    for class_id in (2, 7):
        # Thresholds half way between two scores: rounding does not decide.
        column = np.unique(full[:, class_id])
        gaps = np.flatnonzero(np.diff(column) > 10 * ROUNDING)
        for place in gaps[:: max(1, len(gaps) // 5)]:
            threshold = float(column[place : place + 2].mean())
            queries = make_queries(bank, [bank.names[class_id]], Rule.parse(repr(threshold)))
            found = search_index(bank, queries, index)
            expected = {
                path for (path, asked), logit in logits.items() if asked == class_id and logit >= threshold
            }
            assert {hit.picture for hit in found.hits} == expected
            assert len(found.hits) == len(expected) == np.count_nonzero(full[:, class_id] >= threshold)
            for hit in found.hits:
                assert hit.logit == pytest.approx(logits[hit.picture, class_id], rel=ROUNDING, abs=ROUNDING)


def test_what_is_no_picture_is_named_as_by_a_direct_search_and_not_tried_again(bank, photos, tmp_path):
    named = []
    counting = Counting(bank)
    update = update_index(
        counting, [str(photos)], tmp_path / "index", on_skip=lambda path, why: named.append((path, why))
    )
    direct = search(bank, make_queries(bank, ["7"], Rule.parse("0")), find_pictures([str(photos)]))
    assert sorted(named) == sorted(update.broken) == sorted(direct.skipped)
    assert len(named) == update.num_broken == 4
    assert counting.num_pictures == update.num_pictures == len(FeatureIndex.open(tmp_path / "index")) == 54
    again = update_index(counting, [str(photos)], tmp_path / "index")
    assert (again.added, again.changed, again.vanished, again.broken) == ([], [], [], [])
    assert (counting.num_pictures, again.num_broken) == (54, 4)


def test_names_that_are_not_utf8_survive(bank, photos, tmp_path):
    update_index(bank, [str(photos)], tmp_path / "index")
    index = FeatureIndex.open(tmp_path / "index")
    assert os.path.join(photos, os.fsdecode(b"caf\xe9.png")) in index.paths
    assert all(os.path.exists(path) for path in index.paths)
    exported = pq.read_table(export_index(index, bank, tmp_path / "index"))
    assert f"{photos}/caf\\xe9.png" in exported["path"].to_pylist()


def test_a_score_does_not_depend_on_what_else_is_scored(bank, pictures, tmp_path):
    update_index(bank, [str(pictures)], tmp_path / "all")
    update_index(bank, [str(pictures / "*seven*")], tmp_path / "sevens")
    everything, sevens = FeatureIndex.open(tmp_path / "all"), FeatureIndex.open(tmp_path / "sevens")
    together, alone = everything.scores(bank, ["7", "2"]), everything.scores(bank, "7")
    np.testing.assert_array_equal(together[:, 0], alone)
    of_path = dict(zip(everything.paths, alone.tolist(), strict=True))
    for path, score in zip(sevens.paths, sevens.scores(bank, "7").tolist(), strict=True):
        assert score == pytest.approx(of_path[path], rel=ROUNDING), "a batch of another size"


def test_float16_features_are_as_near_as_their_digits(bank, photos, tmp_path):
    for dtype in ("float32", "float16"):
        update_index(bank, [str(photos)], tmp_path / dtype, dtype=dtype)
    exact, rounded = FeatureIndex.open(tmp_path / "float32"), FeatureIndex.open(tmp_path / "float16")
    assert next(rounded.blocks())[1].dtype == np.float16
    features = np.concatenate([block for _, block in exact.blocks()])
    # Rounding to 11 bits moves a feature by at most 2^-11 of itself, and one below the smallest normal number by 2^-25.
    bound = (np.abs(features) * 2.0**-11 + 2.0**-25) @ np.abs(bank.row("7").kernel) + ROUNDING
    difference = np.abs(exact.scores(bank, "7") - rounded.scores(bank, "7"))
    assert difference.max() > 0
    assert (difference <= bound).all()
    update_index(bank, [str(photos)], tmp_path / "float16")  # keeps what the index has
    with pytest.raises(
        ConfigError, match="holds features in float16, not float32; name another directory with --out"
    ):
        update_index(bank, [str(photos)], tmp_path / "float16", dtype="float32")


class Odd(Counting):
    """A bank some of whose features no index can keep."""

    def features(self, images):
        features = np.array(super().features(images))
        features[0, 0] = self.value
        return features


def test_features_that_cannot_be_kept_are_refused(bank, copies, tmp_path):
    odd = Odd(bank)
    odd.value = 1e5
    with pytest.raises(ConfigError, match=r"float16 ends at 6.55e.04; make the index with --dtype float32"):
        update_index(odd, [str(copies)], tmp_path / "index", dtype="float16")
    odd.value = np.nan
    update = update_index(odd, [str(copies)], tmp_path / "index", dtype="float32")
    assert [why for _, why in update.broken] == [
        f"{sorted(map(str, copies.iterdir()))[0]} has features that are not finite numbers."
    ]
    assert update.num_pictures == 29


def test_the_normalizer_is_computed_once_and_kept_beside_the_features(
    normalized, pictures, tmp_path, monkeypatch
):
    update_index(normalized, [str(pictures)], tmp_path / "index")
    index = FeatureIndex.open(tmp_path / "index")
    features = np.concatenate([features for _, features in index.blocks()])
    expected = np.asarray(normalized.normalizer(jnp.asarray(features)))
    np.testing.assert_allclose(index.normalizers(normalized), expected, rtol=ROUNDING)
    (kept,) = (tmp_path / "index").glob("normalizer-*.npy")
    np.save(kept, expected + 1)  # what is kept is what is used
    np.testing.assert_allclose(
        FeatureIndex.open(tmp_path / "index").scores(normalized, "7"),
        index.scores(normalized, "7") - 1,
        atol=1e-4,
    )
    kept.write_bytes(b"cut")  # made again
    np.testing.assert_array_equal(
        FeatureIndex.open(tmp_path / "index").scores(normalized, "7"), index.scores(normalized, "7")
    )
    assert np.load(kept).shape == (30,)


def test_a_query_needs_memory_for_its_scores_alone(bank, tmp_path):
    rng, num_pictures = np.random.default_rng(0), 40_000
    features = rng.normal(size=(num_pictures, bank.num_features)).astype(np.float32)
    directory = made_up_index(tmp_path / "index", features, checkpoint=bank.checkpoint)
    index = FeatureIndex.open(directory)
    index.scores(bank, "7")
    tracemalloc.start()
    scores = index.scores(bank, "7")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert features.nbytes > 10 * scores.nbytes
    assert peak < 2 * scores.nbytes
    np.testing.assert_allclose(
        scores, features @ bank.row("7").kernel + bank.row("7").bias, rtol=1e-4, atol=1e-4
    )


def made_up_index(directory, features, *, checkpoint="made up", rows_per_call=None):
    """An index of features of no pictures."""
    directory.mkdir()
    new = IndexInfo(checkpoint=checkpoint, run_dir="run", num_features=features.shape[1], dtype="float32")
    writer, step = IndexWriter(directory, new), rows_per_call or len(features)
    for start in range(0, len(features), step):
        block = features[start : start + step]
        table = [{"path": b"/%d.png" % i} for i in range(start, start + len(block))]
        writer.append(Rows(pa.Table.from_pylist(table, schema=SCHEMA), block))
    return directory


def test_there_are_never_many_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(index_files, "_PART_BYTES", 64 * 4 * 4)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # hundreds of them take long
    features = np.arange(4 * 300, dtype=np.float32).reshape(300, 4)
    directory = made_up_index(tmp_path / "index", features, rows_per_call=1)
    index = FeatureIndex.open(directory)
    sizes = [len(block) for _, block in index.blocks()]
    assert len(sizes) < 300 / 64 + 8
    assert max(sizes) <= 64
    assert list(index.paths) == [f"/{i}.png" for i in range(300)]
    np.testing.assert_array_equal(np.concatenate([block for _, block in index.blocks()]), features)
    assert len(list(directory.iterdir())) == 2 * len(sizes) + 1


# It follows the files.


def test_new_changed_and_vanished_pictures_are_noticed_and_others_not_looked_at_again(bank, copies, tmp_path):
    counting, index = Counting(bank), tmp_path / "index"
    assert len(update_index(counting, [str(copies)], index).added) == 30
    names = sorted(map(str, copies.iterdir()))
    stale = FeatureIndex.open(index)
    os.unlink(names[0])
    Image.new("L", (40, 40), 200).save(names[1])
    status = os.stat(names[2])
    shutil.copy(names[3], names[2])  # perhaps of another size, and with the times of the old one
    os.utime(names[2], ns=(status.st_atime_ns, status.st_mtime_ns))
    os.utime(names[4])
    os.chmod(names[5], 0o600)
    (copies / "broken.png").write_bytes(b"no picture")
    Image.new("L", (40, 40), 100).save(copies / "new.png")
    counting.num_pictures = 0
    update = update_index(counting, [str(copies)], index)
    assert (update.added, update.vanished) == ([str(copies / "new.png")], [names[0]])
    assert sorted(update.changed) == names[1:3]
    assert [path for path, _ in update.broken] == [str(copies / "broken.png")]
    assert counting.num_pictures == 3
    fresh = tmp_path / "fresh"
    update_index(bank, [str(copies)], fresh)
    by_path = [
        dict(zip(i.paths, i.scores(bank, "7"), strict=True)) for i in map(FeatureIndex.open, (index, fresh))
    ]
    assert by_path[0] == pytest.approx(by_path[1], rel=ROUNDING)
    assert len(stale) == 30, "who had opened it still has what it was"
    assert stale.scores(bank, "7").shape == (30,)
    # A broken file that was mended is looked at, and so is a picture that was broken.
    shutil.copy(names[3], copies / "broken.png")
    Path(names[6]).write_bytes(b"")
    update = update_index(counting, [str(copies)], index)
    assert update.added == [], "it was known, as broken"
    assert sorted(update.changed) == sorted([str(copies / "broken.png"), names[6]])
    assert [path for path, _ in update.broken] == [names[6]]
    assert (update.num_pictures, update.num_broken) == (30, 1)


def test_pictures_of_other_sources_stay(bank, copies, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    shutil.move(sorted(copies.iterdir())[0], other / "moved.png")
    index = tmp_path / "index"
    update_index(bank, [str(copies)], index)
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(copies / "nothing", ignore_errors=True)
    gone = sorted(copies.iterdir())[0]
    gone.unlink()
    assert update_index(bank, ["other"], index).vanished == [], "it was not asked about that folder"
    assert len(FeatureIndex.open(index)) == 30
    assert update_index(bank, ["pictures/*.png"], index).vanished == [str(gone)]
    assert len(FeatureIndex.open(index)) == 29
    listed = update_index(bank, [Picture("other/moved.png", "other/moved.png")], index)
    assert (listed.added, listed.changed, listed.vanished) == ([], [], [])


def test_the_index_may_be_among_its_pictures(bank, copies):
    for _ in range(2):
        update = update_index(bank, [str(copies)], copies / "index")
        assert update.broken == []
    assert update.num_pictures == 30


def test_shards_are_disjoint_and_complete_and_are_searched_as_one(bank, pictures, tmp_path):
    for shard in range(3):
        update_index(bank, [str(pictures)], tmp_path / f"{shard}", shard=(shard, 3))
    update_index(bank, [str(pictures)], tmp_path / "all")
    indexes = [FeatureIndex.open(tmp_path / f"{shard}") for shard in range(3)]
    whole = FeatureIndex.open(tmp_path / "all")
    assert all(len(index) for index in indexes)
    assert sorted(path for index in indexes for path in index.paths) == sorted(whole.paths)
    # A picture that is in several indexes counts once.
    together = FeatureIndex.open(*(tmp_path / name for name in ("1", "all", "0", "2")))
    assert sorted(together.paths) == sorted(whole.paths)
    assert list(together.sizes) == [os.path.getsize(path) for path in together.paths]
    of_path = dict(zip(whole.paths, whole.scores(bank, "7").tolist(), strict=True))
    of_both = dict(zip(together.paths, together.scores(bank, "7").tolist(), strict=True))
    assert of_both == pytest.approx(of_path, rel=ROUNDING, abs=ROUNDING)


def test_it_is_read_while_it_is_changed(bank, copies, tmp_path, monkeypatch):
    index, names, failures = tmp_path / "index", sorted(map(str, copies.iterdir())), []
    update_index(bank, [str(copies)], index)

    def read():
        while not done.is_set():
            try:
                assert len(FeatureIndex.open(index).scores(bank, "7")) in (29, 30)
            except Exception as error:
                failures.append(error)
                return

    done = threading.Event()
    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(15):
        os.rename(names[0], tmp_path / "away.png")
        update_index(bank, [str(copies)], index)
        os.rename(tmp_path / "away.png", names[0])
        update_index(bank, [str(copies)], index)
    done.set()
    for reader in readers:
        reader.join()
    assert not failures


# A kill.


class Killed(BaseException):
    """What ends an update at once."""


def test_an_update_that_is_killed_at_any_write_is_resumed_as_if_nothing_had_happened(
    bank, photos, copies, tmp_path, monkeypatch
):
    # A list of the index after every batch, of at most 8 pictures, and parts of at most 64.
    monkeypatch.setattr(indexing, "_SECONDS_BETWEEN_COMMITS", 0.0)
    monkeypatch.setattr(indexing, "_BATCH", 8)
    monkeypatch.setattr(index_files, "_PART_BYTES", 1)
    monkeypatch.setattr(files, "_sync_directory", lambda directory: None)
    sources, replace = [str(photos), str(copies)], files._replace
    first, second = tmp_path / "undisturbed", tmp_path / "killed"
    update_index(bank, sources, first)
    writes, kill_at = 0, 1

    def killed(target, content):
        nonlocal writes
        writes += 1
        if writes == kill_at:
            target.with_name(".0123456789abcdef.tmp").write_bytes(content[: len(content) // 2])
            raise Killed
        replace(target, content)

    monkeypatch.setattr(files, "_replace", killed)
    kills, last = 0, 0
    while True:
        writes, kill_at = 0, 1 + kills % 7  # the first files of a start and some of the later ones
        try:
            update_index(bank, sources, second)
            break
        except Killed:
            kills += 1
        if index_files.is_index(second):
            whole = FeatureIndex.open(second)
            assert len(set(whole.paths)) == len(whole) >= last
            last = len(whole)
    assert kills >= 10
    assert contents(second) == contents(first)
    assert len(list(second.iterdir())) == len(list(first.iterdir())), "nothing is left behind"
    # Nor does one lose anything while it takes out what is gone.
    for path in sorted(copies.iterdir())[::4]:
        path.unlink()
    kills = 0
    while True:
        writes, kill_at = 0, 1 + kills
        try:
            update_index(bank, sources, second)
            break
        except Killed:
            kills += 1
    monkeypatch.setattr(files, "_replace", replace)
    assert kills >= 3
    update_index(bank, sources, first)
    assert contents(second) == contents(first)
    assert len(FeatureIndex.open(second)) == 54 + 22


def test_ctrl_c_keeps_what_was_done(bank, copies, tmp_path, monkeypatch):
    monkeypatch.setattr(indexing, "_BATCH", 8)

    def progress(done, total):
        if done == 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        update_index(bank, [str(copies)], tmp_path / "index", on_progress=progress)
    assert len(FeatureIndex.open(tmp_path / "index")) == 16
    assert len(update_index(bank, [str(copies)], tmp_path / "index").added) == 14


# Wrong input.


@pytest.fixture
def index_dir(bank, pictures, tmp_path):
    update_index(bank, [str(pictures)], tmp_path / "index")
    return tmp_path / "index"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("features-000000.npy", lambda old: old[:-1], "features-000000.npy cannot be used: "),
        ("features-000000.npy", lambda old: old[:50], "features-000000.npy cannot be used: "),
        ("features-000000.npy", None, "features-000000.npy cannot be used: No such file"),
        ("pictures-000000.parquet", lambda old: old[:-1], "it has changed since it was written"),
        ("pictures-000000.parquet", None, "pictures-000000.parquet cannot be used: No such file"),
        ("feature_index.json", lambda old: old[:-9], "feature_index.json cannot be read: it is not JSON"),
        ("feature_index.json", lambda old: b"{}", "feature_index.json cannot be used: checkpoint is missing"),
        ("feature_index.json", None, "There is no index in .*; make one with pols index"),
    ],
)
def test_a_half_written_or_damaged_index_is_one_sentence(index_dir, name, content, sentence):
    path = index_dir / name
    old = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content(old))
    with pytest.raises(RunError, match=sentence) as error:
        FeatureIndex.open(index_dir)
    assert len(str(error.value).splitlines()) == 1


def test_a_flipped_bit_of_the_features_is_found_when_they_are_checked(bank, index_dir, pictures):
    path = index_dir / "features-000000.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 64
    path.write_bytes(content)
    with pytest.raises(
        RunError, match=r"features-000000.npy cannot be used: it has changed since it was written"
    ):
        FeatureIndex.open(index_dir).verify()


def test_features_of_another_network_are_refused(bank, index_dir, pictures, tmp_path):
    other = made_up_index(tmp_path / "other", np.zeros((2, bank.num_features), np.float32))
    with pytest.raises(RunError, match=r"holds features of another network .made up of run., not of"):
        FeatureIndex.open(other).scores(bank, "7")
    with pytest.raises(
        RunError, match=r"holds features of another network .*; name another directory with --out"
    ):
        update_index(bank, [str(pictures)], other)
    with pytest.raises(
        RunError, match=r"holds features of another network than .*; search them one after the other"
    ):
        FeatureIndex.open(index_dir, other)


def test_a_directory_that_cannot_be_an_index_is_left_alone(bank, pictures, copies, tmp_path):
    before = sorted(copies.iterdir())
    with pytest.raises(ConfigError, match="is no index, and not empty; name another directory with --out"):
        update_index(bank, [str(pictures)], copies)
    assert sorted(copies.iterdir()) == before
    with pytest.raises(DataError, match="There is no file, folder or pattern"):
        update_index(bank, [str(tmp_path / "gone")], tmp_path / "index")
    with pytest.raises(ConfigError, match="cannot be written to"):
        update_index(bank, [str(pictures)], before[0] / "index")
    assert not (tmp_path / "index").exists()


def test_one_process_at_a_time_writes_an_index(bank, pictures, index_dir):
    said = []

    def update():
        with pytest.raises(RunError) as error:
            update_index(bank, [str(pictures)], index_dir)
        said.append(str(error.value))

    with locked(index_dir, flag="--out"):
        thread = threading.Thread(target=update)
        thread.start()
        thread.join()
    assert f"Process {os.getpid()} on" in said[0]
    assert f"writes in {index_dir}; wait until it has ended, or name another --out." in said[0]


# A vector database.


def test_faiss_finds_the_same_pictures(normalized, bank, photos, tmp_path):
    faiss = pytest.importorskip("faiss", reason="faiss is not installed: pip install 'pols-jax[faiss]'")
    for network in (bank, normalized):
        directory = tmp_path / f"{network.normalizer is None}"
        update_index(network, [str(photos)], directory)
        index = FeatureIndex.open(directory)
        table = pq.read_table(export_index(index, network, directory))
        features = np.stack(table["features"].to_numpy())
        minus = table["normalizer"].to_numpy()
        vectors = np.column_stack([features, np.ones_like(minus), -minus]).astype(np.float32)
        database = faiss.IndexFlatIP(vectors.shape[1])
        database.add(vectors)
        row = network.row("7")
        query = np.concatenate([row.kernel, [row.bias, 1.0]]).astype(np.float32)
        scores = np.sort(index.scores(network, "7"))
        place = int(np.argmax(np.diff(scores)))
        threshold = float(scores[place : place + 2].mean())
        _, _, found = database.range_search(query[None], threshold)
        assert sorted(table["id"].to_numpy()[found]) == sorted(
            np.flatnonzero(index.scores(network, "7") >= threshold)
        )
        assert 0 < len(found) < len(index)
