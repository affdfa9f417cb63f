"""Arrays with a row per class whose rows are spread over devices, made a piece at a time.

Whether rows are drawn or read from a checkpoint, a host has those of its own devices, and beside them a few megabytes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import define_prng_impl, threefry2x32_p
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from pols_jax.models import Classifier
from pols_jax.training.stored_arrays import group_rows


@dataclasses.dataclass(frozen=True)
class SpreadRows:
    """What an array with a row per class is on the devices; as a leaf of a template, what a stored one is read into.

    Attributes:
      name: The name that it is stored under.
      shape: Its shape, without padding.
      dtype: Its dtype.
      num_rows: The number of rows on the devices, those of padding at the end included.
      fill: What a row of padding holds.
      sharding: Which device has which rows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    num_rows: int
    fill: float
    sharding: NamedSharding

    def placed(self, rows: Callable[[int, int], Any]) -> jax.Array:
        """The array on the devices, from ``rows(start, stop)``, which makes some rows."""
        shape = (self.num_rows, *self.shape[1:])
        devices_of: dict[tuple[int, int], list[Any]] = {}  # some devices hold the same rows
        for device, index in self.sharding.addressable_devices_indices_map(shape).items():
            start, stop, _ = index[0].indices(self.num_rows)  # type: ignore[index]
            devices_of.setdefault((start, stop), []).append(device)
        arrays = []
        for (start, stop), devices in devices_of.items():
            size = (stop - start, *shape[1:])
            parts = [jnp.full(size, self.fill, self.dtype, device=device) for device in devices]
            end, step = min(stop, self.shape[0]), group_rows(self.name, self.shape, self.dtype)
            for first in range(start, end, step):
                piece = rows(first, min(first + step, end))
                parts = [_written(part, piece, first - start) for part in parts]
                jax.block_until_ready(parts)  # else many pieces would wait
            arrays += parts
        return jax.make_array_from_single_device_arrays(shape, self.sharding, arrays)


@functools.partial(jax.jit, donate_argnums=0)
def _written(array: Array, piece: Array, start: Any) -> Array:
    return lax.dynamic_update_slice_in_dim(array, piece, start, axis=0)


def kernel_rows(model: Classifier, seed: int, num_features: int) -> Callable[[int, int], Array]:
    """Draws rows of the kernel that ``model.init`` would draw as a whole, with the same bits.

    Threefry's bits are a function of the key and the place in the array: any rows can be drawn without the others.
    """
    rngs = {"params": jax.random.key(seed)}
    key: Any = model.apply({}, rngs=rngs, method=lambda bound: bound.head.make_rng("params"))
    words = np.asarray(jax.random.key_data(key))

    def rows(start: int, stop: int) -> Array:
        count = divmod(start * num_features, 2**32)
        return _draw(np.array([*words, *count], np.uint32), (stop - start, num_features))

    return rows


@functools.partial(jax.jit, static_argnums=1)
def _draw(words: Array, shape: tuple[int, int]) -> Float[Array, "rows features"]:
    # The initializer of `ClassHead`: its scale does not depend on the number of rows.
    draw = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)
    return draw(jax.random.wrap_key_data(words, impl=_THREEFRY_FROM), shape, jnp.float32)


def _bits_from(words: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
    """What ``jax.random.bits`` gives from some place on; the words are those of the key, and the place as two of 32 bits."""
    assert bit_width == 32
    low = words[3] + lax.iota(np.uint32, math.prod(shape)).reshape(shape)
    high = words[2] + (low < words[3]).astype(np.uint32)
    first, second = threefry2x32_p.bind(words[0], words[1], high, low)
    return first ^ second


def _is_not_used(*_: Any) -> Any:
    raise NotImplementedError


_THREEFRY_FROM = define_prng_impl(
    key_shape=(4,),
    seed=_is_not_used,
    split=_is_not_used,
    fold_in=_is_not_used,
    random_bits=_bits_from,
    name="threefry2x32_from",
)
