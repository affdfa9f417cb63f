"""Checkpoints: what is saved comes back, damage is noticed, and a row can be read alone."""

import subprocess
import sys
import textwrap

import chex
import numpy as np
import pytest
import tensorstore

from pols_jax.checkpoints import CheckpointError, Checkpoints, HeadRows, newest_step, read_config


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
    assert saved.problems == []
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
    assert len(saved.problems) == 1
    assert "Checkpoint 2" in saved.problems[0]


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
    assert read_config(tmp_path) is None


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


def test_a_full_disk_is_a_clear_error_and_the_checkpoint_before_stays_intact(tmp_path):
    """A limit on the size of files stands in for a full disk: writes beyond it fail in the same place."""
    program = textwrap.dedent(
        f"""
        import numpy as np, resource, signal
        from pols_jax.checkpoints import Checkpoints, CheckpointError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        state = {{"kernel": np.random.default_rng(0).normal(size=2**18)}}
        checkpoints = Checkpoints({str(tmp_path)!r})
        checkpoints.save(1, state, config={{}})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
        try:
            checkpoints.save(2, state, config={{}})
            checkpoints.wait()
        except CheckpointError as error:
            print(error)
        """
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert "Could not write" in result.stdout, result.stderr
    assert "Checkpoint 1 is intact" in result.stdout
    with Checkpoints(tmp_path) as checkpoints:
        saved = checkpoints.restore_newest({"kernel": np.zeros(2**18)})
    assert saved.step == 1
