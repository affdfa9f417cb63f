"""Training with the rows of the output layer spread over devices.

`MeshTrainer` is a `Trainer` whose program is that of one device, with arrays that live on a mesh: kernel and bias of
the output layer, and what the optimizer keeps of them, are split over the class axis; the batch is split over all
devices for the backbone, and over the data axis for the loss. XLA puts the communication in.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pols_jax.config import ConfigError, RunConfig
from pols_jax.data import Batch, Dataset
from pols_jax.learning import Learner, Totals, TrainState, loss_options, train_step
from pols_jax.linear_losses import make_linear_loss
from pols_jax.linear_output import LinearOutput
from pols_jax.sharded_head import CLASS_AXIS, DATA_AXIS, make_mesh, padding_bias
from pols_jax.trainer import Trainer, check_batch_size, measure_validation


def make_trainer(config: RunConfig, dataset: Dataset) -> Trainer:
    """Makes the trainer that a config's ``head`` asks for.

    Args:
      config: The run.
      dataset: Its data.

    Returns:
      A `MeshTrainer` for a sharded head, else a `Trainer`.

    Examples:
      >>> from pols_jax.data import load
      >>> config = RunConfig(width=0.1, characters="0030-0039", batch_size=32, head="sharded")
      >>> trainer = make_trainer(config, load("glyphs", **config.options()))
      >>> type(trainer).__name__
      'MeshTrainer'
    """
    return MeshTrainer(config, dataset) if config.head == "sharded" else Trainer(config, dataset)


class MeshTrainer(Trainer):
    """Trains one model on a mesh of devices, see `Trainer`.

    The number of classes need not be a multiple of the class parts: `place` adds rows that no loss sees, and `whole`
    takes them away.

    Args:
      config: The run.
      dataset: Its data.

    Raises:
      ConfigError: if the mesh does not fit the devices, or the batch not the mesh.

    Examples:
      >>> from pols_jax.data import load
      >>> config = RunConfig(
      ...     width=0.1, characters="0030-0039", batch_size=32, head="sharded", mesh="data=2,class=4"
      ... )
      >>> trainer = MeshTrainer(config, load("glyphs", **config.options()))
      >>> state, totals = trainer.advance(trainer.init(), until=3)
      >>> state.params["head"]["kernel"].shape, trainer.whole(state).params["head"]["kernel"].shape
      ((12, 50), (10, 50))
    """

    def __init__(self, config: RunConfig, dataset: Dataset):
        if jax.process_count() > 1:
            raise ConfigError("--head sharded runs on the devices of one host; use --head linear on several.")
        check_batch_size(config.batch_size, jax.device_count())
        try:
            mesh = make_mesh(*config.mesh_shape(jax.device_count()))
        except ValueError as error:
            raise ConfigError(f"--mesh: {error}") from None
        self._prepare(config, dataset)
        self.mesh: Mesh = mesh
        self._num_padding = -dataset.num_classes % mesh.shape[CLASS_AXIS]
        self.learner = self._make_learner()
        template = jax.eval_shape(lambda: self.learner.init(dataset.image_shape))
        self._shardings = jax.tree_util.tree_map_with_path(self._sharding_of, template)
        self._advance = jax.jit(
            self._advance_on_mesh, donate_argnums=0, out_shardings=(self._shardings, None)
        )
        self._step = jax.jit(self._step_on_mesh, donate_argnums=0, out_shardings=(self._shardings, None))
        self._validate = jax.jit(self._validate_on_mesh)

    def place(self, state: TrainState) -> TrainState:
        """Puts a whole state on the mesh."""

        def pad(path, leaf):
            if not _is_of_head(path) or not self._num_padding:
                return leaf
            # The parameter itself; what the optimizer keeps of it starts from zero.
            is_bias = path[0].name == "params" and path[-1].key == "bias"
            widths = ((0, self._num_padding), *((0, 0),) * (leaf.ndim - 1))
            return jnp.pad(leaf, widths, constant_values=padding_bias(leaf.dtype) if is_bias else 0)

        return jax.device_put(jax.tree_util.tree_map_with_path(pad, state), self._shardings)

    def whole(self, state: TrainState) -> TrainState:
        """Takes a state from the mesh, as one device would have it."""
        num_classes = self.dataset.num_classes
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: np.asarray(leaf)[:num_classes] if _is_of_head(path) else np.asarray(leaf),
            state,
        )

    def _make_learner(self) -> Learner:
        learner = Learner.from_config(self.config, self.dataset)
        options, num_classes = loss_options(self.config, self.dataset), self.dataset.num_classes
        if "num_noise" in options and self._num_padding:
            probs = options.get("noise_probs", np.full(num_classes, 1 / num_classes, np.float32))
            options["noise_probs"] = np.pad(probs, (0, self._num_padding))
        output = LinearOutput(make_linear_loss(self.config.loss, **options), self.mesh)
        return learner._replace(linear_output=output)

    def _sharding_of(self, path: Any, leaf: Any) -> NamedSharding:
        del leaf
        return NamedSharding(self.mesh, P(CLASS_AXIS) if _is_of_head(path) else P())

    def _put_resident(self, arrays: Any) -> Any:
        return jax.device_put(arrays, NamedSharding(self.mesh, P()))

    def _split(self, batch: Batch) -> Batch:
        return batch

    def _first(self, tree: Any) -> Any:
        return tree

    def _over_all_devices(self, batch: Batch) -> Batch:
        sharding = NamedSharding(self.mesh, P((DATA_AXIS, CLASS_AXIS)))
        return jax.tree.map(lambda leaf: lax.with_sharding_constraint(jnp.asarray(leaf), sharding), batch)

    def _step_on_mesh(self, state: TrainState, batch: Batch) -> tuple[TrainState, Totals]:
        self.num_traces += 1
        return train_step(self.learner, state, self._over_all_devices(batch))

    def _advance_on_mesh(self, state, resident, until):
        return self._advance_with(state, resident, until, self._sampled_step)

    def _sampled_step(self, state: TrainState, images, labels) -> tuple[TrainState, Totals]:
        batch = self._sample(state, images, labels)
        return train_step(self.learner, state, self._over_all_devices(batch))

    def _validate_on_mesh(self, state, batch, columns):
        return measure_validation(self.learner, state, self._over_all_devices(batch), columns, axis_name=None)


def _is_of_head(path: Any) -> bool:
    """Whether a leaf is the kernel or bias of the output layer, or something that the optimizer keeps of them."""
    keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    return keys[-2:] in (["head", "kernel"], ["head", "bias"])
