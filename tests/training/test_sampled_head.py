"""`--head sampled`: a step reads and writes the rows of the true and the drawn classes, on one device or on many."""

import dataclasses
import json
import re
import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pols_jax.training.fitting as fitting
from pols_jax.data import ArraySplit, Batch, Dataset, load, sample_batch
from pols_jax.errors import ConfigError, InterruptedRunError
from pols_jax.evaluation.measuring import evaluate
from pols_jax.losses import noise_contrastive_estimation
from pols_jax.search.class_bank import ClassBank
from pols_jax.training.checkpoints import Checkpoints
from pols_jax.training.config import Experiment, RunConfig
from pols_jax.training.feasibility import check_feasible
from pols_jax.training.fitting import RunOptions, fit
from pols_jax.training.learning import Learner, train_step
from pols_jax.training.trainer import Trainer

# 80 training images in batches of 32: the third batch of every epoch is only half full.
CONFIG = RunConfig(
    loss="noise_contrastive_estimation",
    head="sampled",
    num_noise=5,
    characters="0030-0039",
    width=0.05,
    batch_size=32,
    steps=8,
    evaluate_every=4,
    optimizer="momentum",
    learning_rate=0.5,
    clip_norm=1.0,
)


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("glyphs", **CONFIG.options())


def one_device_step(config, dataset):
    """`train_step` under plain jit: what eight devices have to equal."""
    learner = Learner.from_config(config, dataset)
    options = {"seed": config.seed, "batch_size": config.batch_size, "augment": dataset.augment}

    @jax.jit
    def step(state, images, labels):
        return train_step(learner, state, sample_batch(images, labels, state.step, **options))

    return learner, step


def test_eight_devices_train_the_model_of_one_with_the_same_draws(digits):
    assert jax.device_count() == 8
    learner, step = one_device_step(CONFIG, digits)
    expected = learner.init(digits.image_shape)
    trainer = Trainer(CONFIG, digits)
    state = trainer.init()
    for until in range(1, 9):
        expected, one = step(expected, jnp.asarray(digits.train.images), jnp.asarray(digits.train.labels))
        state, eight = trainer.advance(state, until)
        # Sums in another order, one rounding of float32 (6e-8) each, carried through the steps.
        np.testing.assert_allclose(eight.last_loss, one.last_loss, rtol=1e-4)
    chex.assert_trees_all_close(
        trainer.whole(trainer.caught_up(state)), learner.caught_up(expected), rtol=2e-4, atol=2e-5
    )
    assert trainer.num_traces == 1
    assert int(eight.examples) == 0, "nobody has seen all logits: there is no training accuracy"


def dense_head(config):
    """The same run with exact NCE and optax alone."""
    return dataclasses.replace(config, head="dense", clip_norm=None, num_noise=None)


@pytest.mark.parametrize("optimizer", ["momentum", pytest.param("adam", marks=pytest.mark.slow)])
def test_a_step_is_the_dense_optimizer_on_the_gradient_of_the_loss_of_the_drawn_classes(optimizer, digits):
    """Against autodiff through all rows, and optax on all rows, with the draws of the sampled step."""
    config = dataclasses.replace(CONFIG, optimizer=optimizer, learning_rate=0.1, clip_norm=None)
    learner, step = one_device_step(config, digits)
    dense = Learner.from_config(dense_head(config), digits)
    images, labels = jnp.asarray(digits.train.images), jnp.asarray(digits.train.labels)
    options = {"seed": config.seed, "batch_size": config.batch_size, "augment": digits.augment}

    def dense_loss(params, state, batch):
        features = dense.model.apply(
            {"params": params},
            batch.images,
            train=True,
            where=batch.where,
            method="features",
            mutable=["batch_stats"],
        )[0]
        logits = features @ params["head"]["kernel"].T + params["head"]["bias"][None]
        sampled = learner.sampled
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), state.step), 2**31)
        drawn = sampled.sampler.draw(key, (config.num_noise,))
        scores = logits - np.log(np.float32(config.num_noise / digits.num_classes))
        true = jnp.take_along_axis(scores, batch.labels[:, None], axis=1)[:, 0]
        losses = jax.nn.softplus(-true) + jnp.sum(jax.nn.softplus(scores[:, drawn]), axis=1)
        return jnp.sum(jnp.where(batch.where, losses, 0)) / jnp.sum(batch.where.astype(jnp.float32))

    @jax.jit
    def dense_step(state):
        batch = sample_batch(images, labels, state.step, **options)
        gradients = jax.grad(dense_loss)(state.params, state, batch)
        params, opt_state = dense.update(state, gradients, None)
        return state._replace(step=state.step + 1, params=params, opt_state=opt_state)

    state, expected = learner.init(digits.image_shape), dense.init(digits.image_shape)
    for _ in range(6):
        state, _ = step(state, images, labels)
        expected = dense_step(expected)
    # Adam turns the rounding of next to no gradient into a step of a size of its own: a twentieth of a rate of 0.1.
    atol = 2e-5 if optimizer == "momentum" else 5e-3
    chex.assert_trees_all_close(learner.caught_up(state).params, expected.params, rtol=2e-4, atol=atol)


def test_the_clipped_norm_is_that_of_backbone_and_touched_rows_together(digits):
    """With plain SGD and a constant rate, a step is as long as the rate times the clipped norm."""
    settings = {"optimizer": "sgd", "schedule": "constant", "learning_rate": 1.0, "clip_norm": 0.01}
    learner, step = one_device_step(dataclasses.replace(CONFIG, **settings), digits)
    before = learner.init(digits.image_shape)
    after, _ = step(before, jnp.asarray(digits.train.images), jnp.asarray(digits.train.labels))
    moved = jax.tree.map(lambda a, b: np.sum(np.square(a - b)), after.params, before.params)
    np.testing.assert_allclose(np.sqrt(sum(jax.tree.leaves(moved))), 0.01, rtol=1e-3)


def test_the_mean_step_over_draws_goes_along_the_exact_gradient_with_class_weights(digits):
    """Plain SGD at rate 1: the change of the head, averaged over many steps' draws, is minus the exact gradient."""
    labels = np.array([0, 0, 0, 1, 2, 2], np.int32)
    images = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    split = ArraySplit(images, labels)
    data = Dataset("features", tuple("abcde"), (4,), split, split, split, provenance={})  # type: ignore[arg-type]
    config = RunConfig(
        loss="noise_contrastive_estimation",
        head="sampled",
        num_noise=3,
        noise="log_uniform",
        class_weights="balanced",
        optimizer="sgd",
        schedule="constant",
        learning_rate=1.0,
        steps=4000,
    )
    learner = Learner.from_config(config, data)
    state = learner.init((4,))  # type: ignore[arg-type]
    batch = Batch(images, labels, np.ones(6, bool))

    @jax.jit
    def heads(steps):
        return jax.vmap(lambda step: train_step(learner, state._replace(step=step), batch)[0].params["head"])(
            steps
        )

    mean = jax.tree.map(lambda leaf: np.mean(leaf, axis=0), heads(jnp.arange(4000, dtype=jnp.int32)))
    probs = np.log((np.arange(5) + 2) / (np.arange(5) + 1)) / np.log(6)
    weights = np.array([2 / 3, 2 / 3, 2 / 3, 2, 1, 1], np.float32)

    def exact(head):
        logits = jnp.asarray(images) @ head["kernel"].T + head["bias"][None]
        losses = noise_contrastive_estimation(
            logits, labels, num_noise=3, noise_probs=probs.astype(np.float32)
        )
        return jnp.sum(losses * weights) / weights.sum()

    expected = jax.tree.map(lambda p, g: p - g, state.params["head"], jax.grad(exact)(state.params["head"]))
    # 4,000 draws of 3: a standard error below 0.01 of terms below 1, and five of them.
    chex.assert_trees_all_close(mean, expected, atol=0.05)


def test_the_compiled_loop_copies_no_array_of_all_classes_and_its_memory_does_not_hold_one():
    num_classes, split = 50_000, ArraySplit(np.zeros((32, 8), np.float32), np.arange(32, dtype=np.int32))
    data = Dataset("rows", tuple(map(str, range(num_classes))), (8,), split, split, split, provenance={})  # type: ignore
    config = dataclasses.replace(CONFIG, characters=None, batch_size=16, num_noise=16, optimizer="adam")
    trainer = Trainer(config, data)
    state = trainer.init()
    resident = trainer.placement.put((split.images, split.labels))
    program = trainer._advance.lower(state, resident, jnp.int32(2)).compile()
    text = program.as_text()
    assert f"{num_classes},8]" in text  # else the pattern below finds nothing whatever there is
    assert not re.findall(rf"= \w+\[(?:1,)?{num_classes}(?:,8)?\]\S* copy\(", text)
    assert program.memory_analysis().temp_size_in_bytes < num_classes * 4  # not even one number per class


def final_state(run_dir, dataset):
    with Checkpoints(run_dir) as checkpoints:
        return checkpoints.restore_newest(
            Learner.from_config(CONFIG, dataset).init(dataset.image_shape)
        ).state


@pytest.fixture(scope="module")
def finished_run(digits, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("sampled") / "run"
    fit(CONFIG, digits, run_dir, options=RunOptions(quiet=True))
    return run_dir


def test_a_run_that_was_stopped_between_two_looks_goes_on_bit_for_bit(
    digits, finished_run, tmp_path, monkeypatch
):
    monkeypatch.setattr(fitting, "_DISPATCH_SECONDS", 0.0)
    advance = Trainer.advance

    def advance_and_signal(trainer, state, until):
        result = advance(trainer, state, until)
        if until == 6:
            signal.raise_signal(signal.SIGTERM)
        return result

    monkeypatch.setattr(Trainer, "advance", advance_and_signal)
    with pytest.raises(InterruptedRunError, match="Stopped at step 6"):
        fit(CONFIG, digits, tmp_path / "run", options=RunOptions(quiet=True))
    fit(CONFIG, digits, tmp_path / "run", options=RunOptions(quiet=True))
    chex.assert_trees_all_equal(final_state(tmp_path / "run", digits), final_state(finished_run, digits))


def test_a_run_is_evaluated_and_searched_as_any_other_and_has_no_training_accuracy(digits, finished_run):
    state = final_state(finished_run, digits)
    assert set(np.asarray(state.opt_state["head"].last)) == {8}, "a look leaves no row behind"
    records = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    assert [record["accuracy"] for record in records] == [None, None]
    record = evaluate(finished_run, dataset=digits)
    assert 0 < record.slc.auprc <= 1
    bank = ClassBank.open(finished_run)
    assert len(bank.names) == 10


def test_a_run_does_not_change_between_drawn_and_all_classes(digits, finished_run):
    with pytest.raises(ConfigError, match="--head dense instead of sampled"):
        fit(dataclasses.replace(CONFIG, head="dense"), digits, finished_run, options=RunOptions(quiet=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"loss": "cross_entropy"},
            "--head sampled is for --loss noise_contrastive_estimation; cross_entropy needs",
        ),
        ({"optimizer": "rmsprop"}, "--optimizer may be sgd, momentum, adam or adagrad, not rmsprop"),
        ({"weight_decay": 0.1}, "--weight-decay is about all rows"),
        ({"accumulate": 2}, "--accumulate is about all rows"),
        ({"mesh": "data=2,class=4"}, "--mesh is an option of --head sharded, not of --head sampled"),
    ],
)
def test_what_cannot_be_sampled_is_one_sentence(settings, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIG, **settings)


def test_more_drawn_classes_than_classes_are_one_sentence(digits):
    with pytest.raises(ConfigError, match="--num-noise 11 draws more classes than the 10 of glyphs"):
        check_feasible(dataclasses.replace(CONFIG, num_noise=11), digits)


def test_an_experiment_with_a_loss_that_cannot_be_sampled_is_refused():
    with pytest.raises(ConfigError, match="needs every class in every step"):
        Experiment(loss=("cross_entropy", "noise_contrastive_estimation"), head="sampled")
