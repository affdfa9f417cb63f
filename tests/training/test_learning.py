"""One pure step, and the same step on many devices."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.jax_utils import unreplicate

from pols_jax.data import evaluation_batches, sample_batch
from pols_jax.errors import ConfigError
from pols_jax.losses import LOSSES
from pols_jax.models import MLP, Classifier
from pols_jax.training.config import RunConfig
from pols_jax.training.learning import Learner, noise_distribution, train_step
from pols_jax.training.optimizers import make_optimizer, make_schedule
from pols_jax.training.placement import check_batch_size
from pols_jax.training.trainer import Trainer

# 80 training images in batches of 32: the third batch of every epoch is only half full.
CONFIG = RunConfig(characters="0030-0039", width=0.05, batch_size=32, steps=20, evaluate_every=20)


@pytest.fixture(scope="module")
def trainer(digits) -> Trainer:
    """One trainer: its program is traced once for all tests of it."""
    return Trainer(CONFIG, digits)


def train_on_one_device(config, dataset, steps):
    """The reference: `train_step` under plain jit, in a Python loop."""
    learner = Learner.from_config(config, dataset)
    state = learner.init(dataset.image_shape)
    images, labels = jnp.asarray(dataset.train.images), jnp.asarray(dataset.train.labels)

    @jax.jit
    def step(state, images, labels):
        batch = sample_batch(
            images,
            labels,
            state.step,
            seed=config.seed,
            batch_size=config.batch_size,
            augment=dataset.augment,
        )
        return train_step(learner, state, batch)

    for _ in range(steps):
        state, totals = step(state, images, labels)
    return state, totals


# One of each kind in every test run, the others in the slow one: that each loss is the same on eight devices is tested
# without training in tests/losses/test_losses_across_devices.py.
QUICK = ("cross_entropy", "batch_cross_entropy")


@pytest.mark.parametrize(
    "loss", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LOSSES]
)
def test_eight_devices_train_the_same_model_as_one_with_batches_that_are_not_full(loss, digits):
    # Plain SGD: Adam divides by the root of tiny squared gradients, and would blow rounding errors up to the size of
    # the learning rate in parameters that have next to no gradient.
    config = dataclasses.replace(CONFIG, loss=loss, optimizer="momentum", learning_rate=0.05)
    assert jax.device_count() == 8
    expected, expected_totals = train_on_one_device(config, digits, 20)
    trainer = Trainer(config, digits)
    state, totals = trainer.advance(trainer.init(), 20)
    # Sums over 4 rows on 8 devices are added in another order than sums over 32 rows: one rounding error of float32
    # (6e-8) per sum, carried through 20 steps.
    for name in ("params", "batch_stats"):
        chex.assert_trees_all_close(
            unreplicate(getattr(state, name)), getattr(expected, name), rtol=2e-4, atol=2e-5
        )
    np.testing.assert_allclose(totals.last_loss, expected_totals.last_loss, rtol=2e-4, atol=1e-6)
    assert int(totals.examples) == 6 * 80 + 64, "the padding of the last batches was counted"


def test_devices_hold_identical_parameters(trainer):
    state, _ = trainer.advance(trainer.init(), 5)
    for leaf in jax.tree.leaves(state.params):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))


def test_the_training_program_compiles_once_whatever_the_length_of_a_dispatch_and_not_a_bit_changes(trainer):
    whole, _ = trainer.advance(trainer.init(), 20)
    state = trainer.init()
    for until in (1, 2, 3, 4, 11, 20):
        state, totals = trainer.advance(state, until)
    assert trainer.num_traces == 1
    assert int(unreplicate(state.step)) == 20
    assert int(totals.steps) == 9
    chex.assert_trees_all_equal(whole, state)


def test_training_stops_at_the_step_whose_loss_is_not_finite(digits):
    config = dataclasses.replace(CONFIG, optimizer="sgd", learning_rate=1e30, schedule="constant")
    trainer = Trainer(config, digits)
    state, totals = trainer.advance(trainer.init(), 20)
    assert not np.isfinite(totals.last_loss)
    assert int(unreplicate(state.step)) == int(totals.steps) < 20


def test_bfloat16_keeps_parameters_and_loss_in_float32(digits):
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    trainer = Trainer(config, digits)
    state, totals = trainer.advance(trainer.init(), 3)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert totals.loss.dtype == jnp.float32
    assert np.isfinite(totals.loss)


def test_validation_counts_every_example_once_and_equals_the_metrics_of_all_logits(trainer, digits):
    from pols_jax import metrics, principle

    state, _ = trainer.advance(trainer.init(), 20)
    measured = trainer.validate(state)
    one = unreplicate(state)
    split = digits.validation
    images = split.images.astype(np.float32) / 127.5 - 1
    variables = {"params": one.params, "batch_stats": one.batch_stats}
    logits = Learner.from_config(CONFIG, digits).model.apply(variables, images)
    assert measured["accuracy"] == pytest.approx(float(np.mean(np.argmax(logits, -1) == split.labels)))
    assert measured["auprc"] == pytest.approx(
        float(metrics.slc_metrics(logits, split.labels)["auprc"]), abs=1e-5
    )
    assert measured["violation_rate"] == pytest.approx(
        float(principle.violation_rate(logits, split.labels)), abs=1e-5
    )
    assert measured["num_classes"] == 10


def test_with_very_many_scores_validation_looks_at_some_classes_and_says_how_many(digits, monkeypatch):
    monkeypatch.setattr("pols_jax.training.trainer._MAX_SCORES", 4 * len(digits.validation))
    trainer = Trainer(CONFIG, digits)
    measured = trainer.validate(trainer.init())
    assert measured["num_classes"] == 4
    assert 0 <= measured["auprc"] <= 1


def test_a_batch_that_cannot_be_split_names_the_nearest_sizes():
    with pytest.raises(ConfigError, match="3 devices; the nearest sizes are 30 and 33"):
        check_batch_size(32, 3)
    with pytest.raises(ConfigError, match="the nearest sizes are 8"):
        check_batch_size(3, 8)


def test_weight_decay_leaves_biases_and_batch_norm_alone():
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2), "norm": {"scale": jnp.ones(2)}}
    zeros = jax.tree.map(jnp.zeros_like, params)
    for name in ("sgd", "momentum", "adam", "adamw", "rmsprop"):
        config = RunConfig(optimizer=name, weight_decay=0.1, learning_rate=0.5, schedule="constant")
        optimizer = make_optimizer(config)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes step counts and floats
            updates, _ = optimizer.update(zeros, optimizer.init(params), params)
        assert float(jnp.max(updates["kernel"])) < 0, name
        chex.assert_trees_all_equal(updates["bias"], zeros["bias"])
        chex.assert_trees_all_equal(updates["norm"], zeros["norm"])


def test_the_exponential_schedule_falls_in_steps_and_the_warm_up_rises():
    config = RunConfig(
        learning_rate=1.0, schedule="exponential", decay_rate=0.5, decay_steps=10, warmup_steps=4
    )
    schedule = make_schedule(config)
    # 4 steps up from zero; then 1 for 10 steps, one half for the next 10.
    assert [float(schedule(step)) for step in (0, 2, 4, 13, 14, 24)] == [0.0, 0.5, 1.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize("name", ["uniform", "log_uniform", "empirical"])
def test_noise_distributions_sum_to_one(name):
    probs = noise_distribution(name, np.array([0, 1, 1, 3]), 5)
    assert probs.shape == (5,)
    assert probs.sum() == pytest.approx(1.0)


def test_log_uniform_noise_falls_with_the_class_and_empirical_noise_counts_labels():
    falling = noise_distribution("log_uniform", np.array([]), 100)
    assert np.all(np.diff(falling) < 0)
    assert noise_distribution("empirical", np.array([0, 1, 1, 3]), 4).tolist() == [0.25, 0.5, 0.0, 0.25]


def test_nce_with_empirical_noise_trains(digits):
    config = dataclasses.replace(CONFIG, loss="noise_contrastive_estimation", noise="empirical", num_noise=5)
    trainer = Trainer(config, digits)
    _, first = trainer.advance(trainer.init(), 1)
    _, later = trainer.advance(trainer.init(), 20)
    assert float(later.last_loss) < float(first.last_loss)


def test_the_auxiliary_classifier_is_trained_with_the_main_one(digits):
    """Inception's recipe: without its own loss, the auxiliary head would have no gradient."""

    class WithAuxiliary(MLP):
        auxiliary: bool = True

        def with_auxiliary(self, images, *, train, where):
            features = self(images, train=train, where=where)
            return features, features

    learner = Learner.from_config(dataclasses.replace(CONFIG, optimizer="sgd"), digits)
    learner = learner._replace(model=Classifier(WithAuxiliary(hidden_sizes=(8,)), digits.num_classes))
    before = learner.init(digits.image_shape)
    batch = next(iter(evaluation_batches(digits.train, batch_size=32)))
    after, _ = jax.jit(train_step, static_argnums=0)(learner, before, batch)
    change = after.params["auxiliary_head"]["kernel"] - before.params["auxiliary_head"]["kernel"]
    assert float(jnp.max(jnp.abs(change))) > 0
