"""Where training runs: what a `Trainer` has to know about devices.

A placement builds the learner for its devices, puts states, data and batches there and takes them back, and compiles the
programs of a trainer. `DataParallel` gives each device a part of the batch and a copy of the model, with ``pmap``.
`ClassParallel` spreads the rows of the output layer over a mesh as well: kernel and bias, and what the optimizer keeps of
them, are split over the class axis; the batch is split over all devices for the backbone, and over the data axis for the
loss. Its program is that of one device, and XLA puts the communication in.
"""

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.jax_utils import unreplicate
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from pols_jax.data import Batch, Dataset
from pols_jax.errors import ConfigError
from pols_jax.heads import padding_bias
from pols_jax.training.config import RunConfig
from pols_jax.training.learning import CLASS_AXIS, DATA_AXIS, Learner, TrainState, loss_options, run_loss


class Placement(abc.ABC):
    """What a `Trainer` asks of the devices; by default there is one program, which sees the whole batch.

    Attributes:
      learner: What is trained, for these devices.
      axis_name: The device axis that a program's batch is split over; None if a program sees the whole batch.
    """

    learner: Learner
    axis_name: str | None = None

    @abc.abstractmethod
    def place(self, state: TrainState) -> TrainState:
        """Puts a whole state on the devices."""

    @abc.abstractmethod
    def whole(self, state: TrainState) -> TrainState:
        """Takes a state from the devices, as it was before `place`."""

    @abc.abstractmethod
    def put(self, arrays: Any) -> Any:
        """Puts a copy of the data on every device."""

    @abc.abstractmethod
    def put_batch(self, batch: Batch) -> Batch:
        """Starts the transfer of a batch of the host, as a program takes it."""

    @abc.abstractmethod
    def compile(self, program: Callable, *, num_shared: int, trains: bool) -> Callable:
        """Compiles ``program(state, data, *shared)``; one that trains consumes a state and returns one and more."""

    def split(self, batch: Batch) -> Batch:
        """Arranges a batch of the host as a program takes it."""
        return batch

    def first(self, tree: Any) -> Any:
        """Takes one copy of what every device has."""
        return tree

    def shard(self) -> dict[str, Any]:
        """In a program: which part of a batch it draws, as options of `sample_batch`."""
        return {}

    def spread(self, batch: Batch) -> Batch:
        """In a program: its batch, over the devices that it runs on."""
        return batch

    def gather(self, tree: Any) -> Any:
        """In a program: one value per example, of the examples of all devices."""
        return tree

    def total(self, tree: Any) -> Any:
        """In a program: the sum over the devices."""
        return tree


def make_placement(config: RunConfig, dataset: Dataset) -> Placement:
    """Chooses the placement that a config's ``head`` asks for; a `ConfigError` if the devices do not fit the config."""
    return (ClassParallel if config.head == "sharded" else DataParallel)(config, dataset)


class DataParallel(Placement):
    """A part of the batch and a copy of the model on each device of every host, with ``pmap``; see `Placement`."""

    def __init__(self, config: RunConfig, dataset: Dataset):
        check_batch_size(config.batch_size, jax.device_count())
        # XLA does not leave out a sum over one device: without it a step of the MLP on a CPU is 4 % faster.
        self.axis_name = DATA_AXIS if jax.device_count() > 1 else None
        self.learner = Learner.from_config(config, dataset, axis_name=self.axis_name)

    def place(self, state: TrainState) -> TrainState:
        """Puts a copy of a state on each device."""
        return replicate(state)

    def whole(self, state: TrainState) -> TrainState:
        """Takes the first device's copy."""
        return unreplicate(state)

    def put(self, arrays: Any) -> Any:
        """Puts a copy of the data on each device."""
        return replicate(arrays)

    def put_batch(self, batch: Batch) -> Batch:
        """Starts the transfer of each local device's rows."""
        return jax.pmap(_as_it_is, axis_name=DATA_AXIS)(self.split(batch))

    def split(self, batch: Batch) -> Batch:
        """Gives each local device its rows, along a new first axis."""
        num_devices = jax.local_device_count()
        return jax.tree.map(lambda leaf: leaf.reshape((num_devices, -1, *leaf.shape[1:])), batch)

    def first(self, tree: Any) -> Any:
        """Takes the first device's copy."""
        return unreplicate(tree)

    def shard(self) -> dict[str, Any]:
        """Each device draws its own rows."""
        return {"shard": lax.axis_index(DATA_AXIS), "num_shards": jax.device_count()}

    def gather(self, tree: Any) -> Any:
        """The rows of all devices."""
        return lax.all_gather(tree, DATA_AXIS, tiled=True)

    def total(self, tree: Any) -> Any:
        """The sum over the devices."""
        return lax.psum(tree, DATA_AXIS)

    def compile(self, program: Callable, *, num_shared: int, trains: bool) -> Callable:
        """Maps a program over the devices."""
        in_axes = (0, 0, *(None,) * num_shared)
        return jax.pmap(program, axis_name=DATA_AXIS, in_axes=in_axes, donate_argnums=(0,) if trains else ())


class ClassParallel(Placement):
    """The rows of the output layer, and the batch, over a mesh of devices; see `Placement`.

    The number of classes need not be a multiple of the class parts: `place` adds rows that no loss sees, and `whole`
    takes them away.
    """

    def __init__(self, config: RunConfig, dataset: Dataset):
        if jax.process_count() > 1:
            raise ConfigError(
                "--head sharded runs on the devices of one host; use --head blockwise on several."
            )
        check_batch_size(config.batch_size, jax.device_count())
        try:
            self.mesh = make_mesh(*config.mesh_shape(jax.device_count()))
        except ValueError as error:
            raise ConfigError(f"--mesh: {error}") from None
        self._num_classes = dataset.num_classes
        self._num_padding = -dataset.num_classes % self.mesh.shape[CLASS_AXIS]
        options = loss_options(config, dataset)
        if "num_noise" in options and self._num_padding:
            uniform = np.full(dataset.num_classes, 1 / dataset.num_classes, np.float32)
            options["noise_probs"] = np.pad(options.get("noise_probs", uniform), (0, self._num_padding))
        learner = Learner.from_config(config, dataset)
        self.learner = learner._replace(loss=run_loss(config, dataset, **options), mesh=self.mesh)
        template = jax.eval_shape(lambda: learner.init(dataset.image_shape))
        self._shardings = jax.tree_util.tree_map_with_path(
            lambda path, _: NamedSharding(self.mesh, P(CLASS_AXIS) if _is_of_head(path) else P()), template
        )

    def place(self, state: TrainState) -> TrainState:
        """Puts a whole state on the mesh, with rows of padding."""

        def pad(path, leaf):
            if not _is_of_head(path) or not self._num_padding:
                return leaf
            # The parameter itself; what the optimizer keeps of it starts from zero.
            is_bias = path[0].name == "params" and path[-1].key == "bias"
            widths = ((0, self._num_padding), *((0, 0),) * (leaf.ndim - 1))
            return jnp.pad(leaf, widths, constant_values=padding_bias(dtype=leaf.dtype) if is_bias else 0)

        return jax.device_put(jax.tree_util.tree_map_with_path(pad, state), self._shardings)

    def whole(self, state: TrainState) -> TrainState:
        """Takes a state from the mesh, without the padding."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: (
                np.asarray(leaf)[: self._num_classes] if _is_of_head(path) else np.asarray(leaf)
            ),
            state,
        )

    def put(self, arrays: Any) -> Any:
        """Puts a copy of the data on each device."""
        return jax.device_put(arrays, NamedSharding(self.mesh, P()))

    def put_batch(self, batch: Batch) -> Batch:
        """Starts the transfer of each device's rows."""
        return jax.device_put(batch, NamedSharding(self.mesh, P((DATA_AXIS, CLASS_AXIS))))

    def spread(self, batch: Batch) -> Batch:
        """The rows of the batch over all devices: it is the backbone that they go to first."""
        sharding = NamedSharding(self.mesh, P((DATA_AXIS, CLASS_AXIS)))
        return jax.tree.map(lambda leaf: lax.with_sharding_constraint(jnp.asarray(leaf), sharding), batch)

    def compile(self, program: Callable, *, num_shared: int, trains: bool) -> Callable:
        """Compiles one program for the mesh."""
        del num_shared
        if not trains:
            return jax.jit(program)
        return jax.jit(program, donate_argnums=0, out_shardings=(self._shardings, None))


def make_mesh(num_data: int, num_class: int) -> Mesh:
    """Arranges the devices in ``num_data`` parts of the batch times ``num_class`` parts of the classes.

    Neighboring devices share a part of the batch: what the class parts exchange in a step is all over the batch.

    Raises:
      ValueError: if the product is not the number of devices.
    """
    num_devices = jax.device_count()
    if num_data < 1 or num_class < 1 or num_data * num_class != num_devices:
        fitting = ", ".join(
            f"{num_devices // c}x{c}" for c in range(1, num_devices + 1) if num_devices % c == 0
        )
        raise ValueError(
            f"A mesh of data={num_data}, class={num_class} does not fit {num_devices} devices; "
            f"data x class may be {fitting}."
        )
    return jax.make_mesh((num_data, num_class), (DATA_AXIS, CLASS_AXIS), axis_types=(AxisType.Auto,) * 2)


def check_batch_size(batch_size: int, num_devices: int) -> None:
    """Raises unless the batch can be split evenly over the devices."""
    if batch_size % num_devices:
        below = batch_size // num_devices * num_devices
        nearest = f"{below} and {below + num_devices}" if below else f"{num_devices}"
        raise ConfigError(
            f"--batch-size {batch_size} cannot be split over {num_devices} devices; "
            f"the nearest sizes are {nearest}."
        )


def replicate(tree: Any) -> Any:
    """Puts a copy of every leaf on each local device, along a new first axis, as pmap wants it.

    ``flax.jax_utils.replicate`` does so by way of all copies on one device, which a data set need not fit.
    """
    # The name of the axis is part of where the copies are: under another, a program would be compiled again.
    copies = jax.pmap(lambda leaves, _: leaves, axis_name=DATA_AXIS, in_axes=(None, 0))
    return copies(tree, np.arange(jax.local_device_count()))


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _is_of_head(path: Any) -> bool:
    """Whether a leaf is the kernel or bias of the output layer, or something that the optimizer keeps of them."""
    keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    return keys[-2:] in (["head", "kernel"], ["head", "bias"])
