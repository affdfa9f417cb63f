"""Rows over devices: drawn, stored and read a piece at a time, with the bits of the whole array."""

import dataclasses
import itertools

import chex
import jax
import numpy as np
import pytest

from pols_jax.data import Dataset, load
from pols_jax.models import AsFeatures, Classifier
from pols_jax.training import class_parallel, stored_arrays
from pols_jax.training.checkpoints import Checkpoints
from pols_jax.training.config import RunConfig
from pols_jax.training.learning import Learner
from pols_jax.training.spread_rows import kernel_rows
from pols_jax.training.starting import Start
from pols_jax.training.trainer import Trainer

# 94 classes: not a multiple of the class parts.
CONFIG = RunConfig(
    characters="0021-007E",
    width=0.05,
    batch_size=32,
    optimizer="momentum",
    head="sharded",
    mesh="data=2,class=4",
)


@pytest.fixture(scope="module")
def characters() -> Dataset:
    return load("glyphs", **CONFIG.options())


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of one row of the kernel, so that a device has many; and no room for copies."""
    monkeypatch.setattr(stored_arrays, "_CHUNK_BYTES", 4 * 25)
    monkeypatch.setattr(class_parallel, "_MAX_COPIED_BYTES", 0)


@pytest.mark.parametrize("mesh", ["data=2,class=4", "data=8,class=1"])
def test_a_kernel_that_is_drawn_in_pieces_has_the_bits_of_one_that_is_drawn_at_once(mesh, characters):
    trainer = Trainer(dataclasses.replace(CONFIG, mesh=mesh), characters)
    expected = Learner.from_config(dataclasses.replace(CONFIG, head="dense", mesh=None), characters).init(
        characters.image_shape
    )
    chex.assert_trees_all_equal(trainer.whole(trainer.init()), expected)


def test_rows_of_another_run_take_the_place_of_drawn_ones(characters):
    trainer = Trainer(CONFIG, characters)
    head = {"kernel": np.ones((94, 25), np.float32), "bias": np.arange(94, dtype=np.float32)}
    start = Start(None, {"params": {"head": head}})  # type: ignore[arg-type]
    chex.assert_trees_all_equal(trainer.whole(trainer.init(start)).params["head"], head)


def test_rows_beyond_2_to_the_32_numbers_are_drawn_on_their_own_too():
    rows = kernel_rows(Classifier(AsFeatures(), num_classes=2), 0, 3)
    last = 2**32 // 3  # the first row with numbers on both sides
    together = rows(last - 1, last + 2)
    apart = [rows(row, row + 1) for row in (last - 1, last, last + 1)]
    np.testing.assert_array_equal(together, np.concatenate(apart))
    # Without the upper half of the count, numbers would come again.
    assert not np.isin(rows(last + 1, last + 2), rows(0, 3)).any()


def test_rows_are_asked_for_once_and_a_few_at_a_time(characters):
    trainer = Trainer(CONFIG, characters)
    template = trainer.template().params["head"]["kernel"]
    asked = []

    def rows(start, stop):
        asked.append((start, stop))
        return np.full((stop - start, 25), start, np.float32)

    kernel = template.placed(rows)
    assert kernel.shape == (96, 25)
    assert max(stop - start for start, stop in asked) == stored_arrays._GROUP
    assert sorted(itertools.chain(*(range(*each) for each in asked))) == list(range(94))
    for shard in kernel.addressable_shards:
        assert float(shard.data[0, 0]) == (shard.index[0].start or 0)
    assert not np.asarray(kernel)[94:].any(), "padding"


def test_rows_that_are_not_copied_are_on_the_disk_before_the_next_step_writes_over_them(characters, tmp_path):
    trainer = Trainer(CONFIG, characters)
    state, _ = trainer.advance(trainer.init(), 2)
    expected = jax.tree.map(np.array, trainer.whole(state))
    with Checkpoints(tmp_path) as checkpoints:
        stored = trainer.stored(state)
        assert stored.params["head"]["kernel"].is_on_device
        checkpoints.save(2, stored, config={})
        assert checkpoints.steps() == [2]
        state, _ = trainer.advance(state, 3)
        saved = checkpoints.restore_newest(trainer.template())
    assert saved is not None
    chex.assert_trees_all_equal(trainer.whole(trainer.place(saved.state)), expected)
