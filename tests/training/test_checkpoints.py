"""Checkpoints: what is saved comes back, damage is noticed, and a row can be read alone."""

import json
import os
import resource
import shutil
import zlib
from types import SimpleNamespace

import chex
import numpy as np
import pytest
import tensorstore

from pols_jax.errors import CheckpointError
from pols_jax.training import stored_arrays
from pols_jax.training.checkpoint_reading import StoredCheckpoint
from pols_jax.training.checkpoints import Checkpoints, HeadRows, newest_step


def some_state(seed=0, num_classes=50):
    rng = np.random.default_rng(seed)
    head = {
        "kernel": rng.normal(size=(num_classes, 8)).astype(np.float32),
        "bias": rng.normal(size=num_classes).astype(np.float32),
    }
    return {
        "params": {"head": head, "layer": rng.normal(size=(4, 8)).astype(np.float32)},
        "step": np.int32(seed),
    }


def saved_steps(run_dir, steps, **options):
    with Checkpoints(run_dir, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, some_state(step), config={})
        checkpoints.wait()
        return checkpoints.steps()


def test_the_newest_checkpoint_comes_back_bit_for_bit(tmp_path):
    saved_steps(tmp_path, [1, 2])
    with Checkpoints(tmp_path) as checkpoints:
        saved = checkpoints.restore_newest(some_state())
    assert saved.step == 2
    assert saved.problems == {}
    chex.assert_trees_all_equal(saved.state, some_state(2))


def test_a_part_of_the_state_can_be_restored_alone(tmp_path):
    saved_steps(tmp_path, [3])
    with Checkpoints(tmp_path) as checkpoints:
        part = checkpoints.restore(3, {"params": {"layer": np.zeros((4, 8), np.float32)}})
    chex.assert_trees_all_equal(part, {"params": {"layer": some_state(3)["params"]["layer"]}})


def test_the_newest_few_and_the_best_on_validation_are_kept(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step, accuracy in ((1, 0.1), (2, 0.9), (3, 0.5), (4, None), (5, 0.6)):
            checkpoints.save(step, some_state(step), config={}, validation_accuracy=accuracy)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 4, 5]
    assert newest_step(tmp_path) == 5


def damage(run_dir, step, how):
    folder = run_dir / "checkpoints" / str(step) / "state" / "params.layer"
    chunk = max((path for path in folder.iterdir() if path.name != ".zarray"), key=lambda p: p.stat().st_size)
    content = bytearray(chunk.read_bytes())
    if how == "flipped":
        content[-1] ^= 1
    elif how == "cut off":
        content = content[: len(content) // 2]
    chunk.unlink()
    if how != "gone":
        chunk.write_bytes(bytes(content))


@pytest.mark.parametrize("how", ["flipped", "cut off", "gone"])
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_is_used(tmp_path, how):
    saved_steps(tmp_path, [1, 2])
    damage(tmp_path, 2, how)
    with Checkpoints(tmp_path) as checkpoints:
        saved = checkpoints.restore_newest(some_state())
    assert saved.step == 1
    chex.assert_trees_all_equal(saved.state, some_state(1))
    assert list(saved.problems) == [2]
    assert "Checkpoint 2" in saved.problems[2]


def test_when_every_checkpoint_is_damaged_that_is_an_error_and_not_a_new_start(tmp_path):
    saved_steps(tmp_path, [1])
    damage(tmp_path, 1, "flipped")
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match=r"Checkpoint 1 .* is damaged"),
    ):
        checkpoints.restore_newest(some_state())


def test_a_run_without_checkpoints_has_none(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore_newest(some_state()) is None
    assert newest_step(tmp_path) is None


def test_rows_of_the_head_are_read_alone(tmp_path):
    # 64 MB of kernel in chunks of about 1 MB: a row costs one chunk.
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(2**17, 128)).astype(np.float32)
    bias = rng.normal(size=2**17).astype(np.float32)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"params": {"head": {"kernel": kernel, "bias": bias}}}, config={})
        checkpoints.wait()
    before = bytes_read()
    rows = HeadRows(tmp_path)
    assert rows.shape == (2**17, 128)
    kernel_rows, biases = rows.read([70_000, 3])
    np.testing.assert_array_equal(kernel_rows, kernel[[70_000, 3]])
    np.testing.assert_array_equal(biases, bias[[70_000, 3]])
    assert bytes_read() - before < 0.05 * kernel.nbytes


def bytes_read():
    counters = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for counter in counters for value in counter["values"])


def test_an_id_that_is_not_a_row_is_an_error(tmp_path):
    saved_steps(tmp_path, [1])
    with pytest.raises(ValueError, match=r"in \[0, 50\), got 50"):
        HeadRows(tmp_path).read([3, 50])


def test_a_head_of_a_run_without_checkpoints_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        HeadRows(tmp_path)


def test_a_full_disk_is_a_clear_error_that_says_what_is_there(tmp_path):
    """A limit on the size of files stands in for a full disk: writes beyond it fail in the same place."""
    state = {"kernel": np.random.default_rng(0).normal(size=2**17)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, config={})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
        try:
            checkpoints.save(2, state, config={})
            with pytest.raises(
                CheckpointError,
                match=r"Could not write checkpoint 2 .* The newest checkpoint there is 1; free",
            ):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore_newest(state).step == 1


def test_a_disk_without_room_for_a_checkpoint_is_found_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="0 MB left, and a check"):
        checkpoints.prepare(some_state())


def test_a_directory_that_is_a_file_is_found_before_the_work(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="cannot be written to"):
        checkpoints.prepare(some_state())


def test_a_save_that_is_skipped_is_an_error(tmp_path):
    saved_steps(tmp_path, [5])
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match=r"Checkpoint 3 was not written: there is a newer one .*, 5\."),
    ):
        checkpoints.save(3, some_state(), config={})


def test_a_checkpoint_that_vanishes_is_an_error_and_nothing_is_called_intact(tmp_path, monkeypatch):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, some_state(), config={})
        monkeypatch.setattr(StoredCheckpoint, "looks_complete", lambda self: False)
        with pytest.raises(
            CheckpointError, match=r"it was written, and is not there\)\. There is no checkpoint"
        ):
            checkpoints.wait()


def test_a_directory_that_is_deleted_is_an_error_and_is_not_made_again(tmp_path):
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, some_state(), config={})
        checkpoints.wait()
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(CheckpointError, match=r"the directory is gone\)\. There is no checkpoint; free"):
            checkpoints.save(2, some_state(), config={})
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_read_is_moved_aside_and_saving_goes_on_before_its_step(tmp_path):
    saved_steps(tmp_path, [1, 9])
    damage(tmp_path, 9, "flipped")
    with Checkpoints(tmp_path) as checkpoints:
        saved = checkpoints.restore_newest(some_state())
        places = [checkpoints.set_aside(step) for step in saved.problems]
        assert places == [tmp_path / "damaged-checkpoints" / "9"]
        checkpoints.save(5, some_state(5), config={})
        checkpoints.wait()
    assert newest_step(tmp_path) == 5
    (tmp_path / "checkpoints" / "9").mkdir()
    assert Checkpoints(tmp_path).set_aside(9).name == "9-1", "nothing is overwritten"


def test_only_what_looks_like_a_checkpoint_counts_as_the_newest(tmp_path):
    saved_steps(tmp_path, [1])
    for name in ("99", "007", "²", "3.orbax-checkpoint-tmp"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints" / "50").write_text("")
    assert newest_step(tmp_path) == 1
    with Checkpoints(tmp_path) as checkpoints:
        saved = checkpoints.restore_newest(some_state())
    assert (saved.step, list(saved.problems)) == (1, [99, 50])


def test_the_best_of_before_is_kept_after_a_restart(tmp_path):
    for step, accuracy in ((1, 0.9), (2, 0.1), (3, 0.2), (4, 0.3)):
        with Checkpoints(tmp_path, keep=1) as checkpoints:
            checkpoints.save(step, some_state(step), config={}, validation_accuracy=accuracy)
            checkpoints.wait()
    assert Checkpoints(tmp_path).steps() == [1, 4]


# A flipped bit gives the same answer or an error.


@pytest.fixture(scope="module")
def two_blocks(tmp_path_factory):
    """A head of two blocks of rows, in several files."""
    run_dir = tmp_path_factory.mktemp("blocks")
    with pytest.MonkeyPatch.context() as patch, Checkpoints(run_dir) as checkpoints:
        patch.setattr(stored_arrays, "_CHUNK_BYTES", 32 * 25)
        checkpoints.save(1, some_state(), config={}, data={"a": 1})
        checkpoints.wait()
    return run_dir


@pytest.mark.parametrize(
    "name",
    [
        *("params.head.kernel/0.0", "params.head.kernel/1.0", "params.head.kernel/.zarray"),
        *("params.head.bias/0", "../meta/metadata"),
    ],
)
def test_a_flipped_bit_never_changes_a_row_in_silence(two_blocks, name):
    path = two_blocks / "checkpoints" / "1" / "state" / name
    content, rng = path.read_bytes(), np.random.default_rng(0)
    expected, outcomes = some_state()["params"]["head"], set()
    try:
        for bit in rng.integers(0, 8 * len(content), 12).tolist():
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            try:
                kernel, bias = HeadRows(two_blocks).read(list(range(50)))
            except CheckpointError as error:
                outcomes.add(str(error))
            else:
                np.testing.assert_array_equal(kernel, expected["kernel"])
                np.testing.assert_array_equal(bias, expected["bias"])
    finally:
        path.write_bytes(content)
    assert outcomes, "some flip was noticed"
    assert not any("\n" in sentence for sentence in outcomes)


@pytest.mark.parametrize("name", ["params.head.kernel/1.0", "params.head.bias/0", "params.head.bias/.zarray"])
def test_a_missing_file_of_the_head_is_an_error_and_not_zeros(two_blocks, tmp_path, name):
    run_dir = shutil.copytree(two_blocks, tmp_path / "run")
    (run_dir / "checkpoints" / "1" / "state" / name).unlink()
    with pytest.raises(CheckpointError, match=r"Checkpoint 1 .* cannot be read .* --resume"):
        HeadRows(run_dir).read([49])


def test_a_pipe_in_the_place_of_a_chunk_is_an_error_and_no_hang(two_blocks, tmp_path):
    run_dir = shutil.copytree(two_blocks, tmp_path / "run")
    path = run_dir / "checkpoints" / "1" / "state" / "params.head.bias" / "0"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="is not a file"):
        HeadRows(run_dir)


def in_an_older_format(run_dir, number):
    """Each array has one checksum; in the first format there is nothing else."""
    path = run_dir / "checkpoints" / "1" / "meta" / "metadata"
    meta = json.loads(path.read_text())
    stored = StoredCheckpoint(run_dir, 1)
    for name, entry in meta["arrays"].items():
        entry[2] = stored_arrays.crc32(stored.array(name).read())
    if number == 1:
        crc32 = {name: checksum for name, (_, _, checksum) in meta["arrays"].items()}
        meta = {"step": meta["step"], "config": meta["config"], "crc32": crc32}
    else:
        meta = {name: value for name, value in meta.items() if name != "checksum"} | {"head": None}
        meta["checksum"] = zlib.crc32(json.dumps(meta, sort_keys=True).encode())
    path.write_text(json.dumps(meta))
    return run_dir


@pytest.mark.parametrize("number", [1, 2])
def test_a_checkpoint_without_checksums_of_rows_is_read_as_a_whole_and_checked(two_blocks, tmp_path, number):
    run_dir = in_an_older_format(shutil.copytree(two_blocks, tmp_path / "run"), number)
    kernel, bias = HeadRows(run_dir).read([7, 3])
    np.testing.assert_array_equal(kernel, some_state()["params"]["head"]["kernel"][[7, 3]])
    np.testing.assert_array_equal(bias, some_state()["params"]["head"]["bias"][[7, 3]])
    chunk = run_dir / "checkpoints" / "1" / "state" / "params.head.kernel" / "1.0"
    chunk.write_bytes((run_dir / "checkpoints/1/state/params.head.kernel/0.0").read_bytes())
    with pytest.raises(CheckpointError, match=r"params\.head\.kernel has changed"):
        HeadRows(run_dir).read([7])


def test_a_checkpoint_of_another_network_is_an_error(two_blocks):
    template = some_state(num_classes=51)
    with pytest.raises(CheckpointError, match=r"holds params\.head\.bias as float32 \[50\] instead of"):
        Checkpoints(two_blocks).restore(1, template)


def test_a_renamed_checkpoint_is_an_error(two_blocks, tmp_path):
    run_dir = shutil.copytree(two_blocks, tmp_path / "run")
    (run_dir / "checkpoints" / "1").rename(run_dir / "checkpoints" / "2")
    with pytest.raises(CheckpointError, match="says that it is of step 1"):
        HeadRows(run_dir)
