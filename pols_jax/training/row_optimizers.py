"""Optimizers for an output layer of which a step sees a few rows: the dense optimizer, late.

Under a dense optimizer a row without a gradient moves on: its momentum carries it, and its moments decay. Here nothing
is done to a row in the steps that do not touch it. Before it is used again it is *caught up*: what the skipped steps would
have done to it is done at once, in closed form. A row that is caught up is where the dense optimizer would have brought it.

- ``sgd``: nothing to catch up.
- ``momentum``: exact, for any schedule.
- ``adam``: exact but for epsilon, which is taken as it is in the first of the skipped steps.
- ``adagrad``: nothing to catch up; one accumulator per row, of the mean of the squared gradient of the row.

**The closed form.** Let update i have the weight w_i (the learning rate; for Adam with its bias correction) and let a row's
direction shrink by the factor r per step. Between updates a and b it moves by its direction times

    sum of w_(a+j) r^j over j = 1 .. b - a   =   F(a) - r^(b-a) F(b),    F(a) = sum of w_(a+j) r^j over all later updates.

F is a table with one number per step, made once. Its terms are of one sign and magnitude, so nothing cancels badly.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int

# The constants of optax's optimizers of the same names.
_BETA_1, _BETA_2, _ADAM_EPSILON = 0.9, 0.999, 1e-8
_ADAGRAD_START, _ADAGRAD_EPSILON = 0.1, 1e-7

Slots = dict[str, Array]


class RowOptimizer(NamedTuple):
    """An optimizer of rows, as three functions. Updates are counted from 1. Made by `make_row_optimizer`.

    Attributes:
      init: From parameters ``[k, ...]``, what is kept of each row (its slots).
      catch_up: ``(rows, slots, last, now)``: rows and slots after update ``now``, from those after update ``last``, if there
        was no gradient in between.
      update: ``(rows, slots, gradients, now)``: rows and slots after update ``now``, from those after the update before.
    """

    init: Callable[[Array], Slots]
    catch_up: Callable[[Array, Slots, Array, Array], tuple[Array, Slots]]
    update: Callable[[Array, Slots, Array, Array], tuple[Array, Slots]]


class RowState(NamedTuple):
    """What is kept of the rows of an output layer.

    Attributes:
      last: The last update that each row has seen, 0 for none, shape ``[k]``.
      slots: What the optimizer keeps of each parameter, by name; all with k entries.
    """

    last: Int[Array, " classes"]
    slots: dict[str, Slots]

    @classmethod
    def init(cls, optimizer: RowOptimizer, head: Mapping[str, Array]) -> "RowState":
        """The state before the first update of an output layer ``{"kernel": [k, d], "bias": [k]}``."""
        slots = {name: optimizer.init(leaf) for name, leaf in head.items()}
        return cls(jnp.zeros(len(head["bias"]), jnp.int32), slots)


class Rows(NamedTuple):
    """Some rows of an output layer, with what the optimizer keeps of them, caught up; and their ``last`` before that."""

    params: dict[str, Array]
    slots: dict[str, Slots]
    last: Int[Array, " touched"]


def read_rows(
    optimizer: RowOptimizer,
    head: Mapping[str, Array],
    state: RowState,
    classes: Int[Array, " touched"],
    now: Int[Array, ""],
) -> Rows:
    """Reads some rows, caught up to update ``now``; a class that does not exist stands for any row."""

    def taken(table: Array) -> Array:
        return table.at[classes].get(mode="clip")

    return _caught_up(optimizer, Rows(*jax.tree.map(taken, (dict(head), state.slots, state.last))), now)


def write_rows(
    optimizer: RowOptimizer,
    head: Mapping[str, Array],
    state: RowState,
    classes: Int[Array, " touched"],
    rows: Rows,
    gradients: Mapping[str, Array],
    now: Int[Array, ""],
) -> tuple[dict[str, Array], RowState]:
    """Does update ``now`` to rows that `read_rows` read, and writes them: in place, where the arrays are donated.

    The classes are in increasing order, each once; those from k on are not written.
    """
    updated = {
        name: optimizer.update(rows.params[name], rows.slots[name], gradients[name], now) for name in head
    }
    new = _unzipped(updated)

    def put(table: Array, values: Array) -> Array:
        return table.at[classes].set(values, mode="drop", unique_indices=True, indices_are_sorted=True)

    params, slots = jax.tree.map(put, (dict(head), state.slots), new)
    # No row is ahead. But XLA writes in place only what is plainly read before it is written.
    return params, RowState(put(state.last, jnp.maximum(rows.last, now)), slots)


def catch_up_rows(
    optimizer: RowOptimizer, head: Mapping[str, Array], state: RowState, now: Int[Array, ""]
) -> tuple[dict[str, Array], RowState]:
    """Catches all rows up to update ``now``: the output layer is then the dense optimizer's. Costs what k rows cost."""
    rows = _caught_up(optimizer, Rows(dict(head), state.slots, state.last), now)
    return rows.params, RowState(jnp.full_like(state.last, now), rows.slots)


def _caught_up(optimizer: RowOptimizer, rows: Rows, now: Array) -> Rows:
    pairs = {
        name: optimizer.catch_up(leaf, rows.slots[name], rows.last.reshape(-1, *(1,) * (leaf.ndim - 1)), now)
        for name, leaf in rows.params.items()
    }
    return Rows(*_unzipped(pairs), rows.last)


def _unzipped(pairs: dict[str, tuple[Array, Slots]]) -> tuple[dict[str, Array], dict[str, Slots]]:
    return {name: leaf for name, (leaf, _) in pairs.items()}, {n: slots for n, (_, slots) in pairs.items()}


def make_row_optimizer(
    name: str, schedule: optax.Schedule, *, num_updates: int, momentum: float = 0.9
) -> RowOptimizer:
    """Builds the row-wise form of one of the `ROW_OPTIMIZERS`.

    Args:
      name: sgd, momentum, adam or adagrad.
      schedule: The learning rate as a function of the number of updates that were done before.
      num_updates: How many updates there will be.
      momentum: The decay of the running gradient, for momentum.

    Returns:
      The optimizer; its constants are those of optax's.
    """
    rates = np.asarray(jax.vmap(lambda now: _rate(schedule, now))(1 + jnp.arange(num_updates)), np.float64)
    return ROW_OPTIMIZERS[name](schedule, rates, momentum)


def _sgd(schedule: optax.Schedule, rates: np.ndarray, momentum: float) -> RowOptimizer:
    def update(rows, slots, gradients, now):
        return rows - _rate(schedule, now) * gradients, slots

    return RowOptimizer(lambda table: {}, _nothing_to_catch_up, update)


def _momentum(schedule: optax.Schedule, rates: np.ndarray, momentum: float) -> RowOptimizer:
    weight = _weight_of_skipped(rates, momentum)

    def catch_up(rows, slots, last, now):
        trace = slots["trace"]
        return rows - weight(last, now) * trace, {"trace": _power(momentum, now - last) * trace}

    def update(rows, slots, gradients, now):
        trace = gradients + momentum * slots["trace"]
        return rows - _rate(schedule, now) * trace, {"trace": trace}

    return RowOptimizer(lambda table: {"trace": jnp.zeros_like(table)}, catch_up, update)


def _adam(schedule: optax.Schedule, rates: np.ndarray, momentum: float) -> RowOptimizer:
    updates = np.arange(1.0, len(rates) + 1)
    corrections = np.sqrt(1 - _BETA_2**updates) / (1 - _BETA_1**updates)
    weight = _weight_of_skipped(rates * corrections, _BETA_1 / _BETA_2**0.5)

    def init(table):
        return {"mu": jnp.zeros_like(table), "nu": jnp.zeros_like(table)}

    def catch_up(rows, slots, last, now):
        mu, nu = slots["mu"], slots["nu"]
        # Where nothing was skipped the weight is 0.
        epsilon = _ADAM_EPSILON * jnp.sqrt((1 - _power(_BETA_2, last + 1)) / _BETA_2)
        direction = mu / (jnp.sqrt(nu) + epsilon)
        slots = {"mu": _power(_BETA_1, now - last) * mu, "nu": _power(_BETA_2, now - last) * nu}
        return rows - weight(last, now) * direction, slots

    def update(rows, slots, gradients, now):
        mu = _BETA_1 * slots["mu"] + (1 - _BETA_1) * gradients
        nu = _BETA_2 * slots["nu"] + (1 - _BETA_2) * gradients**2
        unbiased = mu / (1 - _power(_BETA_1, now)), nu / (1 - _power(_BETA_2, now))
        step = unbiased[0] / (jnp.sqrt(unbiased[1]) + _ADAM_EPSILON)
        return rows - _rate(schedule, now) * step, {"mu": mu, "nu": nu}

    return RowOptimizer(init, catch_up, update)


def _adagrad(schedule: optax.Schedule, rates: np.ndarray, momentum: float) -> RowOptimizer:
    def init(table):
        return {"sum_of_squares": jnp.full(table.shape[:1], _ADAGRAD_START, table.dtype)}

    def update(rows, slots, gradients, now):
        axes = tuple(range(1, gradients.ndim))
        total = slots["sum_of_squares"] + jnp.mean(gradients**2, axis=axes)
        scale = (_rate(schedule, now) / jnp.sqrt(total + _ADAGRAD_EPSILON)).reshape(-1, *(1 for _ in axes))
        return rows - scale * gradients, {"sum_of_squares": total}

    return RowOptimizer(init, _nothing_to_catch_up, update)


ROW_OPTIMIZERS: Mapping[str, Callable[[optax.Schedule, np.ndarray, float], RowOptimizer]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adam": _adam,
    "adagrad": _adagrad,
}
"""The optimizers that have a row-wise form."""


def _weight_of_skipped(weights: np.ndarray, factor: float) -> Callable[[Array, Array], Array]:
    """The closed form above, as a function of ``last`` and ``now``."""
    sums = itertools.accumulate(weights[::-1], lambda later, w: factor * (w + later), initial=0.0)
    table = np.fromiter(sums, np.float64, len(weights) + 1)[::-1].astype(np.float32)

    def weight(last: Array, now: Array) -> Array:
        later = jnp.asarray(table)
        return later[last] - _power(factor, now - last) * later[now]

    return weight


def _power(base: float, exponent: Array) -> Array:
    return jnp.power(jnp.float32(base), exponent.astype(jnp.float32))


def _rate(schedule: optax.Schedule, now: Array) -> Array:
    with jax.numpy_dtype_promotion("standard"):  # optax mixes step counts and floats
        return jnp.asarray(schedule(now - 1), jnp.float32)


def _nothing_to_catch_up(rows: Array, slots: Slots, last: Array, now: Array) -> tuple[Array, Slots]:
    return rows, slots
