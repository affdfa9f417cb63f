"""Where training runs: what a `Trainer` has to know about devices.

A placement builds the learner for its devices, puts states, data and batches there and takes them back, and compiles the
programs of a trainer. `DataParallel` gives each device a part of the batch and a copy of the model, with ``pmap``;
`pols_jax.training.class_parallel.ClassParallel` spreads the classes as well.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax.jax_utils import unreplicate
from jax import lax

from pols_jax.data import Batch, Dataset
from pols_jax.errors import ConfigError
from pols_jax.training.config import RunConfig
from pols_jax.training.learning import DATA_AXIS, Learner, TrainState


class Placement:
    """What both placements have in common; by default there is one program, which sees the whole batch.

    Attributes:
      learner: What is trained, for these devices.
      axis_name: The device axis that a program's batch is split over; None if a program sees the whole batch.
    """

    learner: Learner
    axis_name: str | None = None

    def host_part(self) -> dict[str, Any]:
        """Which rows of a batch this host reads, as options of `stream_batches` and `evaluation_batches`."""
        return {"process_index": jax.process_index(), "process_count": jax.process_count()}

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


def replicate(tree: Any) -> Any:
    """Puts a copy of every leaf on each local device, along a new first axis, as pmap wants it.

    ``flax.jax_utils.replicate`` does so by way of all copies on one device, which a data set need not fit.
    """
    # The name of the axis is part of where the copies are: under another, a program would be compiled again.
    copies = jax.pmap(lambda leaves, _: leaves, axis_name=DATA_AXIS, in_axes=(None, 0))
    return copies(tree, np.arange(jax.local_device_count()))


class DataParallel(Placement):
    """A part of the batch and a copy of the model on each device of every host, with ``pmap``."""

    # A state, or the data, goes to every device as it is.
    place = put = staticmethod(replicate)

    def __init__(self, config: RunConfig, dataset: Dataset):
        # XLA does not leave out a sum over one device: without it a step of the MLP on a CPU is 4 % faster.
        self.axis_name = DATA_AXIS if jax.device_count() > 1 else None
        self.learner = Learner.from_config(config, dataset, axis_name=self.axis_name)

    def init(self, first: Callable[[Any], TrainState], arrays: Any) -> TrainState:
        """Creates the state ``first(arrays)`` on the devices."""
        return self.place(first(arrays))

    def template(self, state: TrainState) -> TrainState:
        """What a stored state is read into, from one of shapes and dtypes; `place` takes the result."""
        return state

    def stored(self, state: TrainState) -> TrainState:
        """What a checkpoint stores of a state: the first device's copy."""
        return jax.tree.map(np.asarray, unreplicate(state))

    def put_batch(self, batch: Batch) -> Batch:
        """Starts the transfer of a batch of the host, to each local device its rows."""
        return jax.pmap(_as_it_is, axis_name=DATA_AXIS)(self.split(batch))

    def split(self, batch: Batch) -> Batch:
        """Gives each local device its rows, along a new first axis."""
        num_devices = jax.local_device_count()
        return jax.tree.map(lambda leaf: leaf.reshape((num_devices, -1, *leaf.shape[1:])), batch)

    def first(self, tree: Any) -> Any:
        """Takes the first device's copy, which is as good as any."""
        return unreplicate(tree)

    whole = first

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
        """Maps ``program(state, data, *shared)`` over the devices; one that trains consumes a state and returns one and more."""
        in_axes = (0, 0, *(None,) * num_shared)
        return jax.pmap(program, axis_name=DATA_AXIS, in_axes=in_axes, donate_argnums=(0,) if trains else ())


def check_batch_size(batch_size: int, num_devices: int) -> None:
    """Raises unless the batch can be split evenly over the devices."""
    if batch_size % num_devices:
        below = batch_size // num_devices * num_devices
        nearest = f"{below} and {below + num_devices}" if below else f"{num_devices}"
        raise ConfigError(
            f"--batch-size {batch_size} cannot be split over {num_devices} devices; "
            f"the nearest sizes are {nearest}."
        )


def _as_it_is(batch: Batch) -> Batch:
    return batch
