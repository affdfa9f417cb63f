"""Training without all the logits, on one device's memory or on a mesh: the model is that of the dense head."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from pols_jax.errors import ConfigError
from pols_jax.evaluation.measuring import evaluate
from pols_jax.losses import LOSSES
from pols_jax.search.class_bank import ClassBank
from pols_jax.training.checkpoints import Checkpoints
from pols_jax.training.class_parallel import ClassParallel, make_mesh
from pols_jax.training.config import RunConfig
from pols_jax.training.fitting import RunOptions, fit
from pols_jax.training.placement import DataParallel
from pols_jax.training.trainer import Trainer

# 80 training images in batches of 32: the third batch of every epoch is only half full. 10 classes: not a multiple of 4.
CONFIG = RunConfig(
    characters="0030-0039",
    width=0.05,
    batch_size=32,
    steps=6,
    evaluate_every=6,
    # Adam would blow rounding errors up to the size of the learning rate where there is next to no gradient.
    optimizer="momentum",
    learning_rate=0.05,
)
HEADS = {"blockwise": {"head": "blockwise"}, "sharded": {"head": "sharded", "mesh": "data=2,class=4"}}


def trained(config, dataset, steps=6):
    """The losses step by step, and the state and what validation says after the last."""
    trainer = Trainer(config, dataset)
    state, losses = trainer.init(), []
    for until in range(1, steps + 1):
        state, totals = trainer.advance(state, until)
        losses.append(float(totals.last_loss))
    assert trainer.num_traces == 1
    return losses, trainer.whole(state), trainer.validate(state), totals


# One loss in every test run, the others in the slow one.
QUICK = ("batch_cross_entropy",)


@pytest.mark.parametrize(
    "loss", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LOSSES]
)
def test_blockwise_and_sharded_heads_train_the_model_of_the_dense_head_step_for_step(loss, digits):
    config = dataclasses.replace(CONFIG, loss=loss)
    losses, state, validation, totals = trained(config, digits)
    for placement in HEADS.values():
        result = trained(dataclasses.replace(config, **placement), digits)
        # Sums in another order, one rounding of float32 (6e-8) each, carried through six steps.
        np.testing.assert_allclose(result[0], losses, rtol=2e-4)
        for name in ("params", "batch_stats", "opt_state"):
            chex.assert_trees_all_close(getattr(result[1], name), getattr(state, name), rtol=2e-4, atol=2e-5)
        assert result[2]["num_classes"] == validation["num_classes"]
        np.testing.assert_allclose(result[2]["loss"], validation["loss"], rtol=1e-3)
        np.testing.assert_allclose(result[2]["auprc"], validation["auprc"], atol=1e-3)
        assert int(result[3].examples) == int(totals.examples)


def test_the_rows_of_a_sharded_head_and_of_its_momentum_are_spread_over_the_class_axis(digits):
    trainer = Trainer(dataclasses.replace(CONFIG, **HEADS["sharded"]), digits)
    assert isinstance(trainer.placement, ClassParallel)
    state, _ = trainer.advance(trainer.init(), 2)
    spread = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if "'head'" in jax.tree_util.keystr(path) and leaf.ndim
    ]
    assert len(spread) == 4  # kernel and bias, and the momentum of each
    for leaf in spread:
        assert leaf.shape[0] == 12, "padded to a multiple of the four class shards"
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {3}


@pytest.mark.slow
def test_a_checkpoint_of_one_mesh_opens_on_another_and_in_the_dense_form(tmp_path, digits):
    options = RunOptions(quiet=True)
    whole = fit(dataclasses.replace(CONFIG, steps=6), digits, tmp_path / "whole", options=options)
    part = tmp_path / "part"
    for steps, placement in (
        (2, {"head": "sharded", "mesh": "data=1,class=8"}),
        (4, {"head": "sharded", "mesh": "data=4,class=2"}),
        (6, {}),
    ):
        trainer = Trainer(dataclasses.replace(CONFIG, **placement), digits)
        with Checkpoints(part, keep=1) as checkpoints:
            saved = checkpoints.restore_newest(trainer.template())
            state = trainer.init() if saved is None else trainer.place(saved.state)
            state, _ = trainer.advance(state, steps)
            checkpoints.save(steps, trainer.stored(state), config={}, validation_accuracy=None)
            checkpoints.wait()
    expected = whole.validation
    measured = trainer.validate(state)
    np.testing.assert_allclose(measured["loss"], expected["loss"], rtol=1e-3)


def test_where_a_run_is_computed_is_not_a_difference_between_configs():
    assert not CONFIG.differences(dataclasses.replace(CONFIG, **HEADS["sharded"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": "blockwise", "mesh": "data=1,class=8"}, "--mesh is an option of --head sharded"),
        ({"head": "sharded", "mesh": "4x2"}, "--mesh must look like data=2,class=4, got 4x2"),
        ({"head": "blockwise", "model": "inception_v3", "auxiliary": True}, "--auxiliary needs --head dense"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_do_not_fit_are_refused_before_anything_runs(settings, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIG, **settings)


def test_a_mesh_that_does_not_fit_the_devices_names_those_that_do(digits):
    config = dataclasses.replace(CONFIG, head="sharded", mesh="data=3,class=2")
    with pytest.raises(
        ConfigError, match=r"--mesh: .* does not fit 8 devices; data x class may be 8x1, 4x2, 2x4, 1x8"
    ):
        Trainer(config, digits)
    with pytest.raises(ValueError, match="does not fit"):
        make_mesh(-1, -8)


def test_a_dense_or_blockwise_head_needs_no_mesh(digits):
    trainer = Trainer(dataclasses.replace(CONFIG, head="blockwise"), digits)
    assert isinstance(trainer.placement, DataParallel)


def test_evaluation_and_search_open_a_run_that_was_trained_on_a_mesh(tmp_path, digits):
    config = dataclasses.replace(CONFIG, **HEADS["sharded"])
    fit(config, digits, tmp_path, options=RunOptions(quiet=True))
    record = evaluate(tmp_path, dataset=digits, quiet=True)
    bank = ClassBank.open(tmp_path)
    assert record.num_classes == len(bank.names) == 10  # the padding of the shards is not in the file
    logits = bank.logits(digits.test.images, list(digits.class_names))
    accuracy = np.mean(np.argmax(logits, axis=1) == digits.test.labels)
    np.testing.assert_allclose(accuracy, record.accuracy)
