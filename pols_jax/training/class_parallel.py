"""Training with the classes spread over devices, and over hosts.

The rows of the output layer, kernel and bias and what the optimizer keeps of them, are split over the class axis of a mesh.
The batch is split over all devices for the backbone, and over the data axis for the loss. The program is that of one
device, and XLA puts the communication in.

With several hosts the class axis is laid over the hosts first, so that a host holds as few rows as the mesh allows. Every
host creates, updates, stores and reads the rows of its own devices.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from pols_jax.data import Batch, Dataset
from pols_jax.errors import ConfigError
from pols_jax.heads import padding_bias
from pols_jax.training.config import RunConfig
from pols_jax.training.learning import CLASS_AXIS, DATA_AXIS, Learner, TrainState, loss_options, run_loss
from pols_jax.training.placement import Placement
from pols_jax.training.spread_rows import SpreadRows, kernel_rows
from pols_jax.training.stored_arrays import ArrayParts, chunk_rows, is_of_head, leaf_name

# From this many chunks of a checkpoint on, a device has whole chunks, and its host writes them without any other.
_MANY_CHUNKS = 8
# Rows of a host that are more than this are not copied to be written: training waits until they are on the disk.
_MAX_COPIED_BYTES = 2**27


class ClassParallel(Placement):
    """The rows of the output layer, and the batch, over a mesh of devices; see `Placement`.

    The number of classes need not be a multiple of the class parts: there are rows of padding on the devices that no loss
    sees, and that no checkpoint holds.
    """

    def __init__(self, config: RunConfig, dataset: Dataset):
        self.mesh = mesh_of(config)
        learner = Learner.from_config(config, dataset)
        template = jax.eval_shape(lambda: learner.init(dataset.image_shape))
        self._num_classes = dataset.num_classes
        self._kernel = template.params["head"]["kernel"]
        self._rows = rows_per_part(self._kernel, self.mesh.shape[CLASS_AXIS])
        self._num_rows = self._rows * self.mesh.shape[CLASS_AXIS]  # those of padding included
        num_padding = self._num_rows - self._num_classes
        options = loss_options(config, dataset)
        if "num_noise" in options and num_padding:
            uniform = np.full(dataset.num_classes, 1 / dataset.num_classes, np.float32)
            options["noise_probs"] = np.pad(options.get("noise_probs", uniform), (0, num_padding))
        self.learner = learner._replace(loss=run_loss(config, dataset, **options), mesh=self.mesh)
        self._replicated = NamedSharding(self.mesh, P())
        self._row_sharding = NamedSharding(self.mesh, P(CLASS_AXIS))
        self._batch_sharding = NamedSharding(self.mesh, P((DATA_AXIS, CLASS_AXIS)))
        self._shardings = jax.tree_util.tree_map_with_path(
            lambda path, _: self._row_sharding if is_of_head(leaf_name(path)) else self._replicated, template
        )
        devices = self.mesh.devices.reshape(-1)
        self._places = [i for i, each in enumerate(devices) if each.process_index == jax.process_index()]
        if jax.process_count() > 1:
            _connect(self.mesh)

    def init(self, first: Callable[[Any], TrainState], arrays: Any) -> TrainState:
        """Creates each row on the devices that hold it; its values do not depend on the mesh."""

        def program(kernel, arrays):
            state = first(arrays)
            if kernel is not None:
                state.params["head"]["kernel"] = kernel
            return jax.tree_util.tree_map_with_path(self._padded, state)

        kernel = None
        if "head" not in arrays.get("params", {}):
            # XLA would draw a whole part at once, which takes three times its memory on a CPU.
            rows = kernel_rows(self.learner.model, self.learner.seed, self._kernel.shape[1])
            kernel = self._spread("params.head.kernel", self._kernel).placed(rows)
        return jax.jit(program, out_shardings=self._shardings, donate_argnums=0)(kernel, arrays)

    def template(self, state: TrainState) -> TrainState:
        """Every host reads the rows of its devices."""

        def template(path, leaf):
            name = leaf_name(path)
            return self._spread(name, leaf) if is_of_head(name) else leaf

        return jax.tree_util.tree_map_with_path(template, state)

    def _spread(self, name: str, leaf: Any) -> SpreadRows:
        """What an array with a row per class is on the mesh, from its shape and dtype."""
        fill = _fill(name, leaf.dtype)
        return SpreadRows(name, leaf.shape, leaf.dtype, self._num_rows, fill, self._row_sharding)

    def place(self, state: TrainState) -> TrainState:
        """Puts a whole state on the mesh, with rows of padding."""

        def place(path, leaf, sharding):
            if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
                return leaf
            return _put(np.asarray(self._padded(path, np.asarray(leaf))), sharding)

        return jax.tree_util.tree_map_with_path(place, state, self._shardings)

    def whole(self, state: TrainState) -> TrainState:
        """Takes a state from the mesh, without the padding."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self._without_padding(leaf_name(path), np.asarray(leaf)), state
        )

    def stored(self, state: TrainState) -> TrainState:
        """The rows of this host: copies, or if they are many, the rows on its devices, which the next step writes over.

        Arrays of a few chunks, which parts would share, are gathered instead.
        """
        leaves = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
        whole = {name: leaf for name, leaf in leaves.items() if not self._has_whole_chunks(name, leaf)}
        whole = jax.jit(lambda arrays: arrays, out_shardings=self._replicated)(whole)
        parts = {name: _parts(leaf) for name, leaf in leaves.items() if name not in whole}
        if sum(part.nbytes for each in parts.values() for part in each.values()) <= _MAX_COPIED_BYTES:
            parts = jax.tree.map(np.array, parts)

        def stored(path, leaf):
            name = leaf_name(path)
            if name in whole:
                return self._without_padding(name, np.array(whole[name]))
            return ArrayParts(name, (self._num_classes, *leaf.shape[1:]), np.dtype(leaf.dtype), parts[name])

        return jax.tree_util.tree_map_with_path(stored, state)

    def _has_whole_chunks(self, name: str, leaf: jax.Array) -> bool:
        rows = chunk_rows(name, (self._num_classes, *leaf.shape[1:]), leaf.dtype)
        return rows is not None and self._rows % rows == 0

    def put(self, arrays: Any) -> Any:
        """Puts a copy of the data on each device."""
        return jax.tree.map(lambda array: _put(np.asarray(array), self._replicated), arrays)

    def host_part(self) -> dict[str, Any]:
        """The rows of the devices of this host, wherever they are in the mesh."""
        return {"process_index": self._places, "process_count": self.mesh.size}

    def put_batch(self, batch: Batch) -> Batch:
        """Starts the transfer of each device's rows."""
        num_rows = len(batch.labels) // len(self._places)

        def put(leaf):
            def rows(index):
                start = num_rows * self._places.index((index[0].start or 0) // num_rows)
                return leaf[start : start + num_rows]

            shape = (num_rows * self.mesh.size, *leaf.shape[1:])
            return jax.make_array_from_callback(shape, self._batch_sharding, rows)

        return jax.tree.map(put, batch)

    split = put_batch

    def spread(self, batch: Batch) -> Batch:
        """The rows of the batch over all devices: it is the backbone that they go to first."""
        return jax.tree.map(
            lambda leaf: lax.with_sharding_constraint(jnp.asarray(leaf), self._batch_sharding), batch
        )

    def compile(self, program: Callable, *, num_shared: int, trains: bool) -> Callable:
        """Compiles one program for the mesh; beside the state, every host has what it returns."""
        if not trains:
            return jax.jit(program, out_shardings=self._replicated)
        return jax.jit(program, donate_argnums=0, out_shardings=(self._shardings, self._replicated))

    def _without_padding(self, name: str, leaf: np.ndarray) -> np.ndarray:
        return leaf[: self._num_classes] if is_of_head(name) else leaf

    def _padded(self, path: Any, leaf: Any) -> Any:
        """A leaf with rows of padding, if it has a row per class."""
        name = leaf_name(path)
        if not is_of_head(name) or leaf.shape[0] == self._num_rows:
            return leaf
        widths = ((0, self._num_rows - self._num_classes), *((0, 0),) * (leaf.ndim - 1))
        return jnp.pad(leaf, widths, constant_values=_fill(name, leaf.dtype))


def rows_per_part(kernel: Any, num_parts: int) -> int:
    """How many rows of an output layer a part of the class axis has: enough, and many rows in whole chunks.

    Examples:
      >>> rows_per_part(np.zeros((10, 50), np.float32), 4)
      3
    """
    rows = -(-kernel.shape[0] // num_parts)
    chunk = chunk_rows("params.head.kernel", kernel.shape, kernel.dtype) or 1
    return -(-rows // chunk) * chunk if rows >= _MANY_CHUNKS * chunk else rows


def mesh_of(config: RunConfig) -> Mesh:
    """The mesh that a config asks for; a `ConfigError` if it does not fit the devices."""
    return make_mesh(*config.mesh_shape(jax.device_count()))


def make_mesh(num_data: int, num_class: int) -> Mesh:
    """Arranges the devices in ``num_data`` parts of the batch times ``num_class`` parts of the classes.

    On one host neighboring devices share a part of the batch: what the class parts exchange in a step is all over the batch.
    Several hosts share out the classes first: between the parts of the batch, gradients of whole rows are exchanged.

    Raises:
      ConfigError: if the product is not the number of devices.
    """
    num_devices, num_hosts = jax.device_count(), jax.process_count()
    if num_data < 1 or num_class < 1 or num_data * num_class != num_devices:
        fitting = ", ".join(
            f"{num_devices // c}x{c}" for c in range(1, num_devices + 1) if num_devices % c == 0
        )
        of_hosts = f" of {num_hosts} hosts" if num_hosts > 1 else ""
        raise ConfigError(
            f"--mesh: A mesh of data={num_data}, class={num_class} does not fit {num_devices} devices{of_hosts}; "
            f"data x class may be {fitting}."
        )
    names, kinds = (DATA_AXIS, CLASS_AXIS), (AxisType.Auto,) * 2
    if num_hosts == 1:
        return jax.make_mesh((num_data, num_class), names, axis_types=kinds)
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    grid = arrange_over_hosts(np.array(devices), num_hosts, num_data, num_class)
    return Mesh(grid, names, axis_types=kinds)


def arrange_over_hosts(devices: np.ndarray, num_hosts: int, num_data: int, num_class: int) -> np.ndarray:
    """Arranges the devices of several hosts, which follow each other, so that a host has as few class parts as possible.

    Examples:
      >>> arrange_over_hosts(np.array(["a0", "a1", "b0", "b1"]), 2, 2, 2).tolist()
      [['a0', 'b0'], ['a1', 'b1']]
    """
    class_hosts = math.gcd(num_class, num_hosts)
    data_hosts = num_hosts // class_hosts
    grid = devices.reshape(data_hosts, class_hosts, num_data // data_hosts, num_class // class_hosts)
    return grid.transpose(0, 2, 1, 3).reshape(num_data, num_class)


def _connect(mesh: Mesh) -> None:
    """Runs a small sum over each axis and over both, as `connect_devices` does over all devices in their own order."""
    for axis in (DATA_AXIS, CLASS_AXIS, (DATA_AXIS, CLASS_AXIS)):
        add = jax.shard_map(lambda x, axis=axis: lax.psum(x, axis), mesh=mesh, in_specs=P(), out_specs=P())
        jax.block_until_ready(jax.jit(add)(np.float32(1)))


def _parts(array: jax.Array) -> dict[int, jax.Array]:
    """By their first row, the rows of this host's devices, unless another host has them too and comes first."""
    return {
        shard.index[0].start or 0: shard.data for shard in array.addressable_shards if shard.replica_id == 0
    }


def _fill(name: str, dtype: Any) -> float:
    """What a row of padding holds; only a bias itself, not what the optimizer keeps of it, is not zero."""
    return padding_bias(dtype=dtype) if name == "params.head.bias" else 0.0


def _put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Puts an array that all hosts have on the devices; `jax.device_put` would first compare it between the hosts."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
