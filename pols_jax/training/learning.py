"""Learning: one pure `train_step`, and the network, loss and optimizer that it trains.

The batch may be split over devices, and the loss is that of the whole batch: a loss that compares examples sees those of
the other devices too, batch norm takes its statistics over all of them, and the gradients are averaged. N devices train
the model that one device would train.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from pols_jax.data import ArraySplit, Batch, Dataset, Split
from pols_jax.errors import ConfigError
from pols_jax.losses import LinearLogits, MeanLoss, is_correct, make_loss
from pols_jax.losses.sampled import UniformSampler, make_noise_sampler
from pols_jax.models import AsFeatures, Classifier
from pols_jax.training.config import RunConfig
from pols_jax.training.network import make_model
from pols_jax.training.optimizers import make_optimizer, make_schedule
from pols_jax.training.row_optimizers import RowState, catch_up_rows, make_row_optimizer, write_rows
from pols_jax.training.sampled_head import SampledHead, Touched

DATA_AXIS = "data"
"""The device axis that the batch is split over, under pmap and on a mesh."""

CLASS_AXIS = "class"
"""The mesh axis that the rows of the output layer are split over."""

# The weight of the auxiliary classifier's loss in the recipe of Inception-v3.
_AUXILIARY_WEIGHT = 0.4


class TrainState(NamedTuple):
    """All that training carries from step to step; everything else is a function of the config and the step.

    Attributes:
      step: The number of steps done.
      params: The parameters of the model.
      batch_stats: The running statistics of batch norm.
      opt_state: The state of the optimizer.
    """

    step: Int[Array, ""]
    params: Any
    batch_stats: Any
    opt_state: Any


class Totals(NamedTuple):
    """Sums over steps: divide by ``steps`` or ``examples``.

    Attributes:
      loss: The losses, summed over steps.
      correct: The number of examples whose largest logit was the true one.
      examples: The number of examples that this is known of: none, if classes are drawn.
      steps: The number of steps.
      last_loss: The loss of the last step.
    """

    loss: Float[Array, ""]
    correct: Float[Array, ""]
    examples: Float[Array, ""]
    steps: Int[Array, ""]
    last_loss: Float[Array, ""]

    @classmethod
    def zero(cls) -> "Totals":
        """No steps yet."""
        zero = jnp.zeros((), jnp.float32)
        return cls(zero, zero, zero, jnp.zeros((), jnp.int32), zero)

    def plus(self, later: "Totals") -> "Totals":
        """These and those of later steps."""
        return jax.tree.map(jnp.add, self, later)._replace(last_loss=later.last_loss)


class Learner(NamedTuple):
    """What is trained and how, as pure functions.

    Attributes:
      model: The network.
      loss: The loss of a whole batch.
      optimizer: The optimizer, with its schedule and weight decay.
      seed: The seed of the run.
      blockwise: Whether the loss goes over the classes block by block, without an array of all logits.
      mesh: The devices that the rows of the output layer, and the batch, are spread over; None for none.
      sampled: How the output layer learns from drawn classes; None if from all. ``optimizer`` is for the rest then.

    Examples:
      >>> from pols_jax.data import load
      >>> config = RunConfig(width=0.1, characters="0030-0039")
      >>> dataset = load("glyphs", **config.options())
      >>> state = Learner.from_config(config, dataset).init(dataset.image_shape)
      >>> state.params["head"]["kernel"].shape
      (10, 50)
    """

    model: Classifier
    loss: MeanLoss
    optimizer: optax.GradientTransformation
    seed: int
    blockwise: bool = False
    mesh: Mesh | None = None
    sampled: SampledHead | None = None

    @classmethod
    def from_config(cls, config: RunConfig, dataset: Dataset, *, axis_name: str | None = None) -> "Learner":
        """Builds the network, loss and optimizer that a config asks for."""
        model = make_model(config, dataset.num_classes, axis_name=axis_name)
        if len(dataset.image_shape) == 1:  # its images are features
            model = model.clone(backbone=AsFeatures())
        return cls(
            model,
            run_loss(config, dataset),
            make_optimizer(config),
            config.seed,
            blockwise=config.head != "dense",
            sampled=make_sampled_head(config, dataset) if config.head == "sampled" else None,
        )

    def init(self, image_shape: tuple[int, int, int]) -> TrainState:
        """Creates the state before the first step."""
        key = jax.random.key(self.seed)
        variables = self.model.init(key, jnp.zeros((1, *image_shape), jnp.float32))
        params, batch_stats = variables["params"], variables.get("batch_stats", {})
        return TrainState(jnp.zeros((), jnp.int32), params, batch_stats, self.init_optimizer(params))

    def init_optimizer(self, params: Any) -> Any:
        """Creates the state of the optimizer before the first step."""
        if self.sampled is None:
            return self.optimizer.init(params)
        rows = RowState.init(self.sampled.optimizer, params["head"])
        return {"backbone": self.optimizer.init(_rest(params)), "head": rows}

    def touch(self, state: TrainState, batch: Batch, *, axis_name: str | None) -> Touched | None:
        """Reads the rows that a step is about; None if it is about all of them."""
        if self.sampled is None:
            return None
        head, rows, labels = state.params["head"], state.opt_state["head"], jnp.asarray(batch.labels)
        return self.sampled.touch(head, rows, labels, state.step, axis_name=axis_name)

    def update(self, state: TrainState, gradients: Any, touched: Touched | None) -> tuple[Any, Any]:
        """Computes the parameters and the state of the optimizer after a step."""
        if self.sampled is None or touched is None:
            return _optax_update(self.optimizer, gradients, state.opt_state, state.params)
        gradients = self.sampled.clipped(gradients)
        params, backbone_state = _optax_update(
            self.optimizer, _rest(gradients), state.opt_state["backbone"], _rest(state.params)
        )
        head, rows = write_rows(
            self.sampled.optimizer,
            state.params["head"],
            state.opt_state["head"],
            touched.classes.classes,
            touched.rows,
            gradients["head"],
            state.step + 1,
        )
        return params | {"head": head}, {"backbone": backbone_state, "head": rows}

    def caught_up(self, state: TrainState) -> TrainState:
        """The state with every row where it belongs after so many steps: of drawn classes, those not drawn lag behind."""
        if self.sampled is None:
            return state
        params, opt_state = state.params, state.opt_state
        head, rows = catch_up_rows(self.sampled.optimizer, params["head"], opt_state["head"], state.step)
        return state._replace(params=params | {"head": head}, opt_state=opt_state | {"head": rows})

    def measure(
        self, params: Any, outputs: Float[Array, "batch units"], batch: Batch, *, axis_name: str | None
    ) -> tuple[Float[Array, ""], Bool[Array, " batch"]]:
        """Computes the loss, and which examples are right, from what the model's `method` returned."""
        arrays = self.logits(params, outputs), jnp.asarray(batch.labels), jnp.asarray(batch.where)
        if self.mesh is None:
            return self._measure(*arrays, axis_name=axis_name)
        on_mesh = jax.shard_map(
            functools.partial(self._measure, axis_name=DATA_AXIS),
            mesh=self.mesh,
            in_specs=(_SPREAD_LOGITS, P(DATA_AXIS), P(DATA_AXIS)),
            out_specs=(P(), P(DATA_AXIS)),
        )
        return on_mesh(*arrays)

    def _measure(self, logits, labels, where, *, axis_name):
        loss = self.loss(logits, labels, where=where, axis_name=axis_name)
        return loss, is_correct(lax.stop_gradient(logits), labels)

    def logits(
        self, params: Any, outputs: Float[Array, "batch units"]
    ) -> Float[Array, "batch classes"] | LinearLogits:
        """Returns the logits, in the dtypes that the model computes them with; on a mesh, for use in ``shard_map``."""
        if not self.blockwise:
            return outputs
        head, dtype = params["head"], self.model.dtype
        kernel, bias = head["kernel"].astype(dtype), head["bias"]
        class_axis_name = None if self.mesh is None else CLASS_AXIS
        return LinearLogits(outputs.astype(dtype), kernel, bias, class_axis_name=class_axis_name)

    @property
    def method(self) -> str:
        """The method of the model whose outputs `measure` takes."""
        return "features" if self.blockwise else "__call__"


def _rest(params: Any) -> Any:
    """All but the output layer."""
    return {name: tree for name, tree in params.items() if name != "head"}


def _optax_update(
    optimizer: optax.GradientTransformation, gradients: Any, opt_state: Any, params: Any
) -> tuple[Any, Any]:
    # Optax mixes step counts and floats, which strict promotion forbids.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


# How the parts of the logits are spread over a mesh.
_SPREAD_LOGITS = LinearLogits(P(DATA_AXIS), P(CLASS_AXIS), P(CLASS_AXIS), class_axis_name=CLASS_AXIS)  # type: ignore


def train_step(
    learner: Learner, state: TrainState, batch: Batch, *, axis_name: str | None = None
) -> tuple[TrainState, Totals]:
    """Takes one step. Pure: jit it, pmap it, scan it.

    Args:
      learner: The network, the loss and the optimizer.
      state: The state before the step.
      batch: The examples; under pmap this device's part of them.
      axis_name: The device axis that the batch is split over; None for one device.

    Returns:
      The state after the step, and what happened in it.

    Examples:
      >>> from pols_jax.data import evaluation_batches, load
      >>> config = RunConfig(width=0.1, characters="0030-0039")
      >>> dataset = load("glyphs", **config.options())
      >>> learner = Learner.from_config(config, dataset)
      >>> state = learner.init(dataset.image_shape)
      >>> batch = next(iter(evaluation_batches(dataset.train, batch_size=32)))
      >>> state, totals = jax.jit(train_step, static_argnums=0)(learner, state, batch)
      >>> int(state.step), int(totals.examples)
      (1, 32)
    """
    labels, where = jnp.asarray(batch.labels), jnp.asarray(batch.where)
    dropout_key = jax.random.fold_in(jax.random.key(learner.seed), state.step)
    if axis_name is not None:
        dropout_key = jax.random.fold_in(dropout_key, lax.axis_index(axis_name))

    def objective(params):
        applied: Any = learner.model.apply(
            {"params": params, "batch_stats": state.batch_stats},
            jnp.asarray(batch.images),
            train=True,
            where=where,
            rngs={"dropout": dropout_key},
            mutable=["batch_stats", "auxiliary"],
            method=learner.method,
        )
        outputs, updates = applied
        if touched is None:
            value, is_correct = learner.measure(params, outputs, batch, axis_name=axis_name)
        else:
            assert learner.sampled is not None
            options = {"dtype": learner.model.dtype, "axis_name": axis_name}
            value = learner.sampled.loss(params["head"], outputs, labels, where, touched, **options)
            is_correct = jnp.zeros_like(where)  # nobody has seen all logits
        if "auxiliary" in updates:
            logits = updates["auxiliary"]["auxiliary_logits"]
            value += _AUXILIARY_WEIGHT * learner.loss(logits, labels, where=where, axis_name=axis_name)
        return value, (is_correct, updates.get("batch_stats", {}))

    touched = learner.touch(state, batch, axis_name=axis_name)
    params = state.params if touched is None else state.params | {"head": touched.rows.params}
    (value, (is_correct, batch_stats)), grads = jax.value_and_grad(objective, has_aux=True)(params)
    correct = jnp.sum(is_correct & where).astype(jnp.float32)
    examples = jnp.sum(where & (touched is None)).astype(jnp.float32)
    if axis_name is not None:
        grads = lax.pmean(grads, axis_name)
        correct, examples = lax.psum((correct, examples), axis_name)
    params, opt_state = learner.update(state, grads, touched)
    totals = Totals(value, correct, examples, jnp.ones((), jnp.int32), value)
    return TrainState(state.step + 1, params, batch_stats, opt_state), totals


def noise_distribution(name: str, labels: Int[np.ndarray, " examples"], num_classes: int) -> np.ndarray:
    """Builds the distribution of NCE's noise classes, shape ``[k]``.

    It is ``uniform``; ``log_uniform``, which falls with the class id as word frequencies fall with rank; or ``empirical``,
    the frequencies of the training labels.
    """
    if name == "empirical":
        weights = np.bincount(labels, minlength=num_classes).astype(np.float64)
    elif name == "log_uniform":
        ranks = np.arange(num_classes, dtype=np.float64)
        weights = np.log((ranks + 2) / (ranks + 1))
    else:
        weights = np.ones(num_classes)
    return (weights / weights.sum()).astype(np.float32)


def loss_options(config: RunConfig, dataset: Dataset) -> dict[str, Any]:
    """Returns the hyperparameters of a run's loss, those that depend on the data included."""
    options = config.loss_options()
    if "noise" in options:
        noise = options.pop("noise")
        options["num_noise"] = options["num_noise"] or min(100, dataset.num_classes)
        if noise != "uniform":
            labels = _labels(dataset, "--noise empirical") if noise == "empirical" else np.array([])
            options["noise_probs"] = noise_distribution(noise, labels, dataset.num_classes)
    return options


def run_loss(config: RunConfig, dataset: Dataset, **options: Any) -> MeanLoss:
    """Builds the loss of a run; ``options`` are those of `make_loss`, by default what `loss_options` says.

    With ``class_weights`` an example of class c counts n / (k n_c) times, where n_c of the n training examples are of its
    class: on average once, and all classes alike.
    """
    loss = make_loss(config.loss, **(options or loss_options(config, dataset)))
    weights = _class_weights(config, dataset)
    if weights is None:
        return loss

    def weighted(logits, labels, *, where=None, axis_name=None):
        of_example = jnp.asarray(weights)[labels]
        where = of_example if where is None else jnp.where(where, of_example, 0)
        return loss(logits, labels, where=where, axis_name=axis_name)

    return weighted


def make_sampled_head(config: RunConfig, dataset: Dataset) -> SampledHead:
    """Builds what trains the output layer of a config with ``head`` sampled."""
    options = loss_options(config, dataset)
    probs = options.get("noise_probs")
    return SampledHead(
        UniformSampler(dataset.num_classes) if probs is None else make_noise_sampler(probs),
        options["num_noise"],
        make_row_optimizer(
            config.optimizer, make_schedule(config), num_updates=config.steps, momentum=config.momentum
        ),
        config.seed,
        clip_norm=config.clip_norm,
        class_weights=_class_weights(config, dataset),
    )


def _class_weights(config: RunConfig, dataset: Dataset) -> np.ndarray | None:
    if config.class_weights is None:
        return None
    counts = np.bincount(_labels(dataset, "--class-weights"), minlength=dataset.num_classes)
    return (counts.sum() / np.count_nonzero(counts) / np.maximum(counts, 1)).astype(np.float32)


def _labels(dataset: Dataset, flag: str) -> Int[np.ndarray, " examples"]:
    labels = known_labels(dataset.train)
    if labels is None:
        raise ConfigError(f"{flag} needs labels in memory, and {dataset.name} is streamed.")
    return labels


def known_labels(split: Split) -> Int[np.ndarray, " examples"] | None:
    """The labels of a split, those of streamed files without reading the files; None if that takes reading all of it."""
    if isinstance(split, ArraySplit):
        return split.labels
    if isinstance(split.records, list | tuple):
        return np.array([label for _, label in split.records], np.int32)
    return None
