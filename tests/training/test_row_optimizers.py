"""Optimizers that see a few rows per step: caught up, a row is where the dense optimizer would have brought it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pols_jax.training.row_optimizers import (
    ROW_OPTIMIZERS,
    RowState,
    catch_up_rows,
    make_row_optimizer,
    read_rows,
    write_rows,
)

NUM_CLASSES, NUM_FEATURES, NUM_UPDATES = 6, 3, 60
SCHEDULE = optax.cosine_decay_schedule(0.1, NUM_UPDATES)


def first_head():
    rng = np.random.default_rng(0)
    return {"kernel": rng.normal(size=(NUM_CLASSES, NUM_FEATURES)), "bias": rng.normal(size=NUM_CLASSES)}


def drawn_rows(num_drawn):
    """For each update, classes in increasing order and their gradients; the rest of the list is of no class."""
    rng = np.random.default_rng(1)
    for _ in range(NUM_UPDATES):
        classes = np.sort(rng.permutation(NUM_CLASSES)[:num_drawn])
        classes = np.concatenate([classes, NUM_CLASSES + np.arange(2)])
        shapes = {"kernel": (len(classes), NUM_FEATURES), "bias": (len(classes),)}
        yield classes, {name: rng.normal(size=shape) for name, shape in shapes.items()}


def row_wise(name, num_drawn):
    optimizer = make_row_optimizer(name, SCHEDULE, num_updates=NUM_UPDATES)
    head = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), first_head())
    state = RowState.init(optimizer, head)

    @jax.jit
    def update(head, state, classes, gradients, now):
        rows = read_rows(optimizer, head, state, classes, now - 1)
        return write_rows(optimizer, head, state, classes, rows, gradients, now)

    for now, (classes, gradients) in enumerate(drawn_rows(num_drawn), start=1):
        gradients = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), gradients)
        head, state = update(head, state, jnp.asarray(classes, jnp.int32), gradients, jnp.int32(now))
    return jax.jit(functools.partial(catch_up_rows, optimizer))(head, state, jnp.int32(NUM_UPDATES))


def dense_gradients(num_drawn):
    for classes, gradients in drawn_rows(num_drawn):
        dense = {name: np.zeros_like(leaf) for name, leaf in first_head().items()}
        for place, c in enumerate(classes):
            if c < NUM_CLASSES:
                for name in dense:
                    dense[name][c] = gradients[name][place]
        yield dense


@functools.cache
def rate(t):
    return float(SCHEDULE(t - 1))


def sgd(p, g, t, kept):
    return p - rate(t) * g, kept


def momentum(p, g, t, kept):
    trace = g + 0.9 * kept.get("m", 0)
    return p - rate(t) * trace, {"m": trace}


def adam(p, g, t, kept):
    m, v = 0.9 * kept.get("m", 0) + 0.1 * g, 0.999 * kept.get("v", 0) + 0.001 * g**2
    step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return p - rate(t) * step, {"m": m, "v": v}


def adagrad(p, g, t, kept):
    """One accumulator per row."""
    squares = kept.get("s", 0.1) + (np.mean(g**2, axis=1) if g.ndim > 1 else g**2)
    scale = rate(t) / np.sqrt(squares + 1e-7)
    return p - (scale[:, None] if g.ndim > 1 else scale) * g, {"s": squares}


ORACLES = {"sgd": sgd, "momentum": momentum, "adam": adam, "adagrad": adagrad}


def dense(name, num_drawn):
    """The dense optimizer in double precision, with the gradient zero for rows that are not drawn."""
    with np.errstate(invalid="raise"):
        head, kept = first_head(), {"kernel": {}, "bias": {}}
        for t, gradients in enumerate(dense_gradients(num_drawn), start=1):
            for leaf in head:
                head[leaf], kept[leaf] = ORACLES[name](head[leaf], gradients[leaf], t, kept[leaf])
    return head, kept


@pytest.mark.parametrize("num_drawn", [1, 3])
@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
def test_a_row_that_is_caught_up_is_where_the_dense_optimizer_brings_it(name, num_drawn):
    head, state = row_wise(name, num_drawn)
    expected, kept = dense(name, num_drawn)
    for leaf in expected:
        # Sixty updates in float32, 6e-8 each, of numbers about 1; for Adam, tables whose sums are ten steps' worth.
        np.testing.assert_allclose(head[leaf], expected[leaf], atol=2e-5)
        for ours, theirs in zip(state.slots[leaf].values(), kept[leaf].values(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("momentum", optax.sgd(SCHEDULE, momentum=0.9)),
        ("adam", optax.adam(SCHEDULE)),
        ("sgd", optax.sgd(SCHEDULE)),
    ],
)
def test_with_every_class_in_every_update_it_is_the_optimizer_of_optax(name, optimizer):
    head, _ = row_wise(name, NUM_CLASSES)
    expected = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), first_head())
    with jax.numpy_dtype_promotion("standard"):
        opt_state = optimizer.init(expected)
        step = jax.jit(optimizer.update)
        for gradients in dense_gradients(NUM_CLASSES):
            updates, opt_state = step(gradients, opt_state, expected)
            expected = optax.apply_updates(expected, updates)
    for leaf in head:
        np.testing.assert_allclose(head[leaf], expected[leaf], atol=5e-6)  # both in float32


def test_a_lazy_adam_that_lets_moments_stand_still_would_be_found_out():
    """What the oracle is for: moments that are not decayed give other rows, by far more than the tolerance."""
    optimizer = make_row_optimizer("adam", SCHEDULE, num_updates=NUM_UPDATES)
    lazy = optimizer._replace(catch_up=lambda rows, slots, last, now: (rows, slots))
    rows, slots, last = jnp.ones((1, 2)), optimizer.init(jnp.ones((1, 2))), jnp.zeros((1, 1), jnp.int32)
    rows, slots = optimizer.update(rows, slots, jnp.ones((1, 2)), jnp.int32(1))
    moved, decayed = optimizer.catch_up(rows, slots, last + 1, jnp.int32(20))
    still, _ = lazy.catch_up(rows, slots, last + 1, jnp.int32(20))
    assert np.all(np.abs(moved - still) > 0.05)
    np.testing.assert_allclose(decayed["mu"], 0.9**19 * 0.1, rtol=1e-5)
    np.testing.assert_allclose(decayed["nu"], 0.999**19 * 0.001, rtol=1e-5)
