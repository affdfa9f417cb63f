"""What a loss needs to know about all k logits, from features and kernel, without ever having all k logits.

`LinearStats` goes over the classes block by block, and at any time has the logits of one block only. One pass gives
the true logit and the statistic that was asked for. The gradient of a maximum takes two rows of the kernel per
example and no second pass; that of a logsumexp or a softplus sum takes a second pass, which computes each block's
logits again instead of remembering them.

The rows of the kernel may also be spread over devices (``class_axis_name``). Each device then makes its passes over
its own rows, and the results are merged by sums and maxima over the devices. The passes know nothing of devices, and
the merges are differentiated by JAX: see docs/large_k.md for what that means under ``shard_map``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from pols_jax.losses.checks import accumulation_dtype
from pols_jax.losses.class_stats import LogSumExp
from pols_jax.losses.device_axes import is_on_explicit_mesh, partitioned_by_xla, vary_alike
from pols_jax.losses.linear_logits import LinearLogits
from pols_jax.losses.noise import Noise

# The logits of one block. On a CPU they stay in the caches; on an accelerator the product is large enough to be fast.
_CPU_BLOCK_BYTES, _ACCELERATOR_BLOCK_BYTES = 2**22, 2**27
_SMALLEST_BLOCK = 1024


def default_block_size(num_examples: int, num_features: int, num_classes: int) -> int:
    """Chooses how many classes a block has, for the kind of device that the program runs on.

    The float32 logits of a block, and its rows of the kernel, fit a budget: 4 MB on a CPU, 128 MB on an accelerator.
    A block of fewer than 1,024 classes is not chosen whatever the budget, because many small products are slow.

    Examples:
      >>> default_block_size(128, 512, 1000)
      1000
    """
    budget = _CPU_BLOCK_BYTES if jax.default_backend() == "cpu" else _ACCELERATOR_BLOCK_BYTES
    fitting = max(budget // (4 * max(num_examples, num_features, 1)), _SMALLEST_BLOCK)
    return min(2 ** (fitting.bit_length() - 1), num_classes)


class LinearStats:
    """Class statistics from an output layer, as `DenseStats` has them. Each method makes one pass over the classes.

    Args:
      logits: Features and output layer, checked. With ``class_axis_name``, kernel and bias are this device's rows.
      labels: True classes, int32, shape ``[...]``, counted over all devices. A label outside of the classes makes the
        true logit NaN.

    Examples:
      >>> kernel = jnp.array([[1.0, 2.0], [0.0, 1.0], [1.0, 0.5]])
      >>> logits = LinearLogits(jnp.array([[1.0, 2.0]]), kernel, block_size=2)
      >>> true_logit, max_false_logit = LinearStats(logits, jnp.array([0])).max_false_logit()
      >>> float(true_logit[0]), float(max_false_logit[0])
      (5.0, 2.0)
    """

    def __init__(self, logits: LinearLogits, labels: Int[Array, "*batch"]):
        num_rows, num_features = logits.kernel.shape
        block_size = logits.block_size or default_block_size(labels.size, num_features, num_rows)
        self._logits, self._labels, self._axis_name = logits, labels, logits.class_axis_name
        self._block_size = min(block_size, num_rows)
        self._num_shards = 1 if self._axis_name is None else lax.axis_size(self._axis_name)

    @property
    def num_classes(self) -> int:
        """The number of classes, over all devices."""
        return self._logits.kernel.shape[0] * self._num_shards

    def logsumexp(self) -> tuple[Float[Array, "..."], LogSumExp]:
        """The true logit, and the logsumexp over all classes."""
        return self._pass(_logsumexp_pass, _merge_logsumexp)

    def max_false_logit(self) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """The true logit, and the largest false logit; in a tie the lowest class has the gradient."""
        return self._pass(_max_false_pass, _merge_max)

    def false_softplus_sum(self) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """The true logit, and the sum of softplus over the false logits."""
        return self._pass(_softplus_pass, lax.psum)

    def noise_softplus_sum(self, noise: Noise) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """The true score, and the sum over all classes of ``count * softplus(score)``; the noise gets no gradient."""
        return self._pass(_softplus_pass, lax.psum, noise)

    def _pass(self, over_blocks: Callable, merge: Callable, noise: Noise | None = None) -> Any:
        features, kernel, bias = self._logits.features, self._logits.kernel, self._logits.bias
        if is_on_explicit_mesh((features, kernel, bias)):
            # The places of the blocks are no business of the caller's.
            return partitioned_by_xla(
                lambda logits, labels, noise: LinearStats(logits, labels)._pass(over_blocks, merge, noise),
                (self._logits, self._labels, noise),
                out_spec=P(*jax.typeof(features).sharding.spec[:-1]),
            )
        labels, first_class = self._labels.reshape(-1), 0
        if self._axis_name is not None:
            first_class = kernel.shape[0] * lax.axis_index(self._axis_name)
            # Uniform noise is one number for all classes.
            if noise is not None and noise.probs.shape != (1,):
                noise = noise.part(first_class, kernel.shape[0])
        rows = features.reshape(labels.size, features.shape[-1])
        inputs = vary_alike(_Inputs(rows, kernel, bias, labels - first_class, noise))
        try:
            true_logit, statistic = over_blocks(self._block_size, inputs)
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            raise TypeError(
                "LinearLogits have derivatives in reverse mode alone: use jax.grad or jax.vjp, or give the loss "
                "all_logits(features, kernel, bias)."
            ) from None
        if self._axis_name is not None:
            true_logit = lax.psum(true_logit, self._axis_name)
            statistic = merge(statistic, self._axis_name)
        exists = (labels >= 0) & (labels < self.num_classes)
        true_logit = jnp.where(exists, true_logit, jnp.nan)
        return jax.tree.map(lambda x: x.reshape(self._labels.shape), (true_logit, statistic))


class _Inputs(NamedTuple):
    """What a pass reads. The labels are rows of the kernel here; one outside of them belongs to another device."""

    features: Float[Array, "batch features"]
    kernel: Float[Array, "classes features"]
    bias: Float[Array, " classes"] | None
    labels: Int[Array, " batch"]
    noise: Noise | None

    @property
    def dtype(self):
        """The dtype that is computed in."""
        return accumulation_dtype(*jax.tree.leaves((self.features, self.kernel, self.bias)))

    def zeros(self) -> Float[Array, " batch"]:
        """A running number per example, before the first block."""
        return jnp.zeros_like(self.labels, self.dtype)


class _Block(NamedTuple):
    """The logits of some consecutive classes. The classes are the first axis: XLA's sums over it are the fast ones."""

    logits: Float[Array, "block batch"]
    is_true: Bool[Array, "block batch"]
    kernel: Float[Array, "block features"]
    weights: Float[Array, "block 1"] | None
    start: Int[Array, ""]


def _over_blocks(inputs: _Inputs, block_size: int, body: Callable, carry):
    """Runs ``carry = body(carry, block)`` over all classes; the last block is smaller if k is not a multiple."""
    dtype, num_classes = inputs.dtype, inputs.kernel.shape[0]

    def step(start, size, carry):
        def rows(array):
            return lax.dynamic_slice_in_dim(array, start, size)

        kernel = rows(inputs.kernel)
        logits = _product(kernel, inputs.features, 1, 1, dtype)
        if inputs.bias is not None:
            logits = logits + rows(inputs.bias).astype(dtype)[:, None]
        weights = None
        if inputs.noise is not None:
            counts, log_counts = inputs.noise.part(start, size).counts()
            logits = logits - log_counts.astype(dtype)[:, None]
            weights = counts.astype(dtype)[:, None]
        is_true = start + lax.broadcasted_iota(jnp.int32, logits.shape, 0) == inputs.labels[None, :]
        return body(carry, _Block(logits, is_true, kernel, weights, start))

    num_full, rest = divmod(num_classes, block_size)
    carry = lax.fori_loop(0, num_full, lambda i, carry: step(i * block_size, block_size, carry), carry)
    return step(jnp.int32(num_full * block_size), rest, carry) if rest else carry


def _add_true(true, block: _Block):
    # From the block and not by a product of its own: rounded alike, it cancels against the peak of a logsumexp.
    return true + jnp.sum(jnp.where(block.is_true, block.logits, 0.0), axis=0)


def _gradients(inputs: _Inputs, block_size: int, true_cotangent, cotangents_of: Callable):
    """Computes block logits again, and from them the cotangents of features, kernel and bias.

    ``cotangents_of`` maps a block to the cotangents of its logits, without that of the true logit.
    """
    features, kernel, bias, *_ = inputs
    dtype = inputs.dtype

    def body(carry, block: _Block):
        for_features, for_kernel, for_bias = carry
        cotangents = cotangents_of(block)
        cotangents = jnp.where(block.is_true, cotangents + true_cotangent[None, :], cotangents)
        for_rows = _product(cotangents, features.astype(dtype), 1, 0, dtype).astype(kernel.dtype)
        if for_bias is not None:
            for_row_bias = jnp.sum(cotangents, axis=1).astype(for_bias.dtype)
            for_bias = lax.dynamic_update_slice_in_dim(for_bias, for_row_bias, block.start, 0)
        return (
            for_features + _product(cotangents, block.kernel.astype(dtype), 0, 0, dtype),
            lax.dynamic_update_slice_in_dim(for_kernel, for_rows, block.start, 0),
            for_bias,
        )

    zeros = (jnp.zeros_like(features, dtype), *jax.tree.map(jnp.zeros_like, (kernel, bias)))
    return (_cotangents(inputs, *_over_blocks(inputs, block_size, body, zeros)),)


def _cotangents(inputs: _Inputs, for_features, for_kernel, for_bias) -> _Inputs:
    """Labels and noise have none."""
    for_features = for_features.astype(inputs.features.dtype)
    return inputs._replace(features=for_features, kernel=for_kernel, bias=for_bias, labels=None, noise=None)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logsumexp_pass(block_size, inputs: _Inputs):
    def body(carry, block: _Block):
        true, (peak, log_sum) = carry
        new_peak = jnp.maximum(peak, jnp.max(block.logits, axis=0))
        total = jnp.sum(jnp.exp(block.logits - new_peak[None, :]), axis=0)
        log_sum = jnp.log(jnp.exp((peak - new_peak) + log_sum) + total)
        return _add_true(true, block), LogSumExp(new_peak, log_sum)

    zeros = inputs.zeros()
    nothing = LogSumExp(peak=zeros + jnp.finfo(zeros.dtype).min, log_sum=zeros - jnp.inf)
    return _over_blocks(inputs, block_size, body, (zeros, nothing))


def _logsumexp_forward(block_size, inputs):
    statistics = _logsumexp_pass(block_size, inputs)
    return statistics, (inputs, statistics)


def _logsumexp_backward(block_size, residuals, cotangents):
    inputs, (_, (peak, log_sum)) = residuals
    true_cotangent, for_parts = cotangents
    # The peak is held fixed, and log_sum has the whole gradient: the softmax.
    scale = for_parts.log_sum * jnp.exp(-log_sum)

    def softmax(block: _Block):
        return jnp.exp(block.logits - peak[None, :]) * scale[None, :]

    return _gradients(inputs, block_size, true_cotangent, softmax)


_logsumexp_pass.defvjp(_logsumexp_forward, _logsumexp_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softplus_pass(block_size, inputs: _Inputs):
    def body(carry, block: _Block):
        true, total = carry
        terms = _counted(jax.nn.softplus(block.logits), block)
        return _add_true(true, block), total + jnp.sum(terms, axis=0)

    return _over_blocks(inputs, block_size, body, (inputs.zeros(), inputs.zeros()))


def _softplus_forward(block_size, inputs):
    return _softplus_pass(block_size, inputs), inputs


def _softplus_backward(block_size, inputs, cotangents):
    true_cotangent, for_sum = cotangents

    def sigmoid(block: _Block):
        return _counted(jax.nn.sigmoid(block.logits), block) * for_sum[None, :]

    return _gradients(inputs, block_size, true_cotangent, sigmoid)


_softplus_pass.defvjp(_softplus_forward, _softplus_backward)


def _counted(terms, block: _Block):
    """Multiplies with the weights of the noise; without noise, leaves out the true classes."""
    if block.weights is None:
        return jnp.where(block.is_true, 0.0, terms)
    return terms * jnp.broadcast_to(block.weights, terms.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _max_false_pass(block_size, inputs: _Inputs):
    return _max_false_forward(block_size, inputs)[0]


def _max_false_forward(block_size, inputs: _Inputs):
    lowest = jnp.finfo(inputs.dtype).min

    def body(carry, block: _Block):
        true, largest, place = carry
        false = jnp.where(block.is_true, lowest, block.logits)
        block_largest = jnp.max(false, axis=0)
        is_larger = block_largest > largest  # and not equal: the lowest class keeps a tie
        block_place = block.start + lax.argmax(false, 0, jnp.int32)
        place = jnp.where(is_larger, block_place, place)
        return _add_true(true, block), jnp.where(is_larger, block_largest, largest), place

    # Without a false class the place stays past the end, where there is no row to have a gradient.
    nowhere = jnp.full_like(inputs.labels, inputs.kernel.shape[0])
    start = (inputs.zeros(), inputs.zeros() + lowest, nowhere)
    true, largest, place = _over_blocks(inputs, block_size, body, start)
    return (true, largest), (inputs, place)


def _max_false_backward(block_size, residuals, cotangents):
    """Two rows of the kernel per example: that of the true class, and that of the largest false one."""
    del block_size
    inputs, place = residuals
    features, kernel, bias, labels, _ = inputs
    dtype = inputs.dtype
    # A negative index would count from the end; past the end it finds nothing.
    true_place = jnp.where(labels < 0, kernel.shape[0], labels)
    places = jnp.concatenate([true_place, place])
    weights = jnp.concatenate(cotangents)[:, None]
    rows = kernel.at[places].get(mode="fill", fill_value=0).astype(dtype) * weights
    for_rows = jnp.tile(features.astype(dtype), (2, 1)) * weights
    for_features = rows.reshape(2, *features.shape).sum(axis=0)
    for_kernel = jnp.zeros_like(kernel).at[places].add(for_rows.astype(kernel.dtype), mode="drop")
    for_bias = None
    if bias is not None:
        for_bias = jnp.zeros_like(bias).at[places].add(weights[:, 0].astype(bias.dtype), mode="drop")
    return (_cotangents(inputs, for_features, for_kernel, for_bias),)


_max_false_pass.defvjp(_max_false_forward, _max_false_backward)


def _merge_logsumexp(parts: LogSumExp, axis_name: str) -> LogSumExp:
    peak = lax.pmax(lax.stop_gradient(parts.peak), axis_name)
    return LogSumExp(peak, jnp.log(lax.psum(jnp.exp((parts.peak - peak) + parts.log_sum), axis_name)))


def _merge_max(largest, axis_name: str):
    """The maximum over shards. ``lax.pmax`` has no gradient, so the value comes by a sum from the shard that has it."""
    shard = lax.axis_index(axis_name)
    has_it = largest == lax.pmax(lax.stop_gradient(largest), axis_name)
    first = lax.pmin(jnp.where(has_it, shard, lax.axis_size(axis_name)), axis_name)
    return lax.psum(jnp.where(shard == first, largest, 0.0), axis_name)


def _product(left, right, left_axis, right_axis, dtype):
    """Contracts an axis of each, accumulated in dtype."""
    return lax.dot_general(
        left, right, (((left_axis,), (right_axis,)), ((), ())), preferred_element_type=dtype
    )
