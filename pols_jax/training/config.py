"""What a training run is: frozen dataclasses that become the flags of ``pols train``.

A `RunConfig` is everything that determines one trained model, and nothing else: two runs with equal configs end with
equal parameters. An `Experiment` is what a user asks for: several losses, and several values of whatever is to be
chosen on the validation split. `Experiment.runs` lists its runs.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pols_jax.errors import ConfigError
from pols_jax.schema import decode, encode
from pols_jax.settings import (
    LOSS_NAMES,
    Count,
    Network,
    NotNegative,
    OneOf,
    Positive,
    Range,
    WholeNotNegative,
    check_settings,
    flag,
)

LEARNING_RATE_SWEEP = (1.0, 0.1, 0.01, 0.001)
"""The learning rates that the paper chooses from."""

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adagrad", "rmsprop")
"""The optimizers that `Setup.optimizer` may name."""

NOISE = ("uniform", "log_uniform", "empirical")
"""The noise distributions of NCE: all classes alike, by rank (for classes sorted by frequency), or as in training."""

AUGMENTATIONS = ("auto", "none", "crop", "crop-flip", "distort")
"""What `Setup.augment` may name; ``older`` as well, in runs of older versions: see `pols_jax.data.find_augmentation`."""

# Data sets that older versions never streamed, and so never cropped.
_ALWAYS_IN_MEMORY = ("glyphs", "omniglot", "mnist", "svhn_cropped", "cifar10", "cifar100")

# Losses that sum one sigmoid per class: their biases start from the prior probability of a class.
_SIGMOID_LOSSES = ("binary_cross_entropy", "noise_contrastive_estimation")

# What settings were called when older runs were written.
_NEW_NAMES = {"bias_start": "bias_init"}

# Settings that change where a run is computed, but not what: a run may go on with others.
_PLACEMENT = ("head", "mesh")

# The optimizers with a row-wise form: the keys of `row_optimizers.ROW_OPTIMIZERS`, which takes JAX to import.
_ROW_OPTIMIZERS = ("sgd", "momentum", "adam", "adagrad")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which data to train on. Options that are not set are left to the data set.

    Attributes:
      dataset: glyphs, folder:PATH, mnist, svhn_cropped, cifar10, cifar100, imagenet2012, omniglot, or another tfds set
        of images with labels; synthetic:K for benchmarks.
      image_size: Height and width in pixels; by default the data's own.
      channels: Folders: 3 for color, 1 for gray; by default what the pictures have.
      max_bytes: Folders and tfds: stream what takes more bytes than this.
      max_classes: Glyphs: keep only this many classes, a fixed random choice.
      fonts: Glyphs: font files, or patterns of them, instead of DejaVu.
      characters: Glyphs: ranges of code points, such as 4E00-9FFF,3400-4DBF.
      train_faces: Glyphs: names or patterns of the faces to learn from.
      validation_faces: Glyphs: names or patterns of the faces to choose with.
      test_faces: Glyphs: names or patterns of the faces to measure on.

    Examples:
      >>> DataConfig(dataset="glyphs", max_classes=100).options()
      {'max_classes': 100}
    """

    dataset: str = "glyphs"
    image_size: Annotated[int, Range(least=1, most=4096)] | None = None
    channels: int | None = None
    max_bytes: Count | None = None
    max_classes: Count | None = None
    fonts: tuple[str, ...] = ()
    characters: str | None = None
    train_faces: tuple[str, ...] = ()
    validation_faces: tuple[str, ...] = ()
    test_faces: tuple[str, ...] = ()

    def options(self) -> dict[str, Any]:
        """The options that are set, for `pols_jax.data.load`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(DataConfig)}
        del values["dataset"]
        return {name: value for name, value in values.items() if value not in (None, ())}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup(DataConfig):
    """What all runs of an experiment have in common.

    Attributes:
      model: mlp, cnn, alexnet, vgg16, inception_v3, resnet50 or resnet101.
      width: A factor on the width of every layer.
      hidden_sizes: MLP: the units of its layers; 500 500 if not given.
      auxiliary: inception_v3: train its auxiliary classifier as well, with weight 0.4.
      dtype: What to compute in; parameters and losses stay float32.
      init_from: Start from a run, or from a .safetensors or .pth of torchvision or timm.
      train: head computes features once, and only the output layer learns.
      feature_passes: --train head: augmented passes, beside the plain one.
      pixels: What the network is fed; by default [-1, 1], or what --init-from needs.
      steps: The number of training steps.
      augment: At random: none, crop, crop-flip (not for text) or distort.
      batch_size: Examples per step, over all devices and hosts.
      accumulate: Steps per update; a batch loss compares within one step only.
      seed: Determines first parameters, order of examples and augmentation.
      optimizer: sgd, momentum, adam, adamw, adagrad or rmsprop.
      momentum: The decay of the running gradient, for momentum and rmsprop.
      backbone_rate: A factor on the backbone's learning rate; 0.1 with --init-from, else 1.
      schedule: exponential is times --decay-rate every --decay-steps.
      warmup_steps: Steps over which the learning rate rises from zero.
      decay_steps: For the exponential schedule.
      decay_rate: For the exponential schedule.
      weight_decay: Shrinks weights, but neither biases nor batch norm.
      clip_norm: Shrinks a gradient whose norm is larger than this.
      class_weights: All classes count alike, however many examples they have.
      bias_init: First biases of the output layer; 0, or for sigmoid losses -log(k - 1).
      evaluate_every: Steps between two looks at the validation split.
      stop_after: End after this many looks without a better accuracy.
      head: blockwise holds no array of all logits; sharded spreads the classes; sampled draws --num-noise (NCE).
      mesh: Sharded head: parts of batch and classes, such as data=2,class=4.

    Examples:
      >>> Setup(model="resnet")
      Traceback (most recent call last):
      pols_jax.errors.ConfigError: There is no network named 'resnet'; did you mean resnet50 or resnet101 or alexnet?
    """

    model: Network = "mlp"
    width: Annotated[float, Range(above=0, most=100)] = 1.0
    hidden_sizes: tuple[Annotated[int, Range(least=1, most=10**6)], ...] = ()
    auxiliary: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    init_from: str | None = None
    train: Literal["all", "head"] = "all"
    feature_passes: WholeNotNegative = 0
    pixels: Literal["symmetric", "imagenet"] | None = None
    steps: Count = 2000
    augment: Annotated[str, OneOf("augmentation", (*AUGMENTATIONS, "older"))] = "auto"
    batch_size: Count = 256
    accumulate: Count = 1
    seed: WholeNotNegative = 0
    optimizer: Annotated[str, OneOf("optimizer", OPTIMIZERS)] = "adam"
    momentum: Annotated[float, Range(least=0, most=1)] = 0.9
    backbone_rate: NotNegative | None = None
    schedule: Literal["constant", "cosine", "exponential"] = "cosine"
    warmup_steps: WholeNotNegative = 0
    decay_steps: Count = 10_000
    decay_rate: Positive = 0.94
    weight_decay: NotNegative = 0.0
    clip_norm: Positive | None = None
    class_weights: Literal["balanced"] | None = None
    bias_init: Annotated[float, Range()] | None = None
    evaluate_every: Count = 200
    stop_after: Count | None = None
    head: Literal["dense", "blockwise", "sharded", "sampled"] = "dense"
    mesh: str | None = None

    def __post_init__(self):
        """Checks the settings that can be checked without data or devices."""
        check_settings(self)
        if self.channels not in (None, 1, 3):
            raise ConfigError(f"--channels must be 1 or 3, got {self.channels}.")
        if self.hidden_sizes and self.model != "mlp":
            raise ConfigError(f"--hidden-sizes is an option of the mlp; {self.model} has --width.")
        if self.auxiliary and self.model != "inception_v3":
            raise ConfigError(f"--auxiliary is an option of inception_v3, not of {self.model}.")
        if self.auxiliary and self.head != "dense":
            raise ConfigError(f"--auxiliary needs --head dense; --head {self.head} has one output layer.")
        if self.mesh is not None and self.head != "sharded":
            raise ConfigError(f"--mesh is an option of --head sharded, not of --head {self.head}.")
        if self.train == "head":
            if self.init_from is None:
                raise ConfigError(
                    "--train head needs --init-from: weights of the network that computes the features."
                )
            if self.auxiliary or self.backbone_rate is not None:
                name = "--auxiliary" if self.auxiliary else "--backbone-rate"
                raise ConfigError(
                    f"{name} is about training the backbone, which --train head leaves as it is."
                )
        elif self.feature_passes:
            raise ConfigError("--feature-passes is an option of --train head.")
        self._check_updates("steps", self.steps)
        self._check_sampled()
        self.mesh_shape(1)

    def _check_sampled(self) -> None:
        if self.head != "sampled":
            return
        if self.optimizer not in _ROW_OPTIMIZERS:
            *names, last = _ROW_OPTIMIZERS
            raise ConfigError(
                f"--head sampled updates a few rows per step, for which --optimizer may be {', '.join(names)} or {last}, "
                f"not {self.optimizer}."
            )
        for name, value in (("weight_decay", self.weight_decay), ("accumulate", self.accumulate - 1)):
            if value:
                raise ConfigError(
                    f"{flag(name)} is about all rows in every step, and --head sampled touches a few; leave it out."
                )

    def _check_updates(self, name: str, steps: int) -> None:
        if steps % self.accumulate:
            raise ConfigError(f"{flag(name)} {steps} is not a multiple of --accumulate {self.accumulate}.")

    def backbone_factor(self) -> float:
        """The factor on the learning rate of the backbone."""
        default = 1.0 if self.init_from is None else 0.1
        return default if self.backbone_rate is None else self.backbone_rate

    def mesh_shape(self, num_devices: int) -> tuple[int, int]:
        """The parts of the batch and of the classes that ``mesh`` asks for."""
        if self.mesh is None:
            return 1, num_devices
        parts = re.fullmatch(r"data=([1-9]\d*),class=([1-9]\d*)", self.mesh)
        if parts is None:
            raise ConfigError(f"--mesh must look like data=2,class=4, got {self.mesh}.")
        return int(parts[1]), int(parts[2])

    def to_json(self) -> dict[str, Any]:
        """A dictionary that JSON can hold; `from_json` reads it back."""
        return encode(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Reads what `to_json` wrote, now or under older names; a `ConfigError` names the setting that is wrong."""
        return decode(cls, values)

    @staticmethod
    def with_new_names(values: Mapping[str, Any]) -> dict[str, Any]:
        """Settings as they are called now, from a file of any version.

        Examples:
          >>> Setup.with_new_names({"bias_start": -3.0, "head": "linear"})
          {'bias_init': -3.0, 'head': 'blockwise'}
        """
        renamed = {_NEW_NAMES.get(name, name): value for name, value in values.items()}
        if renamed.get("head") == "linear":
            renamed["head"] = "blockwise"
        if isinstance(augment := renamed.get("augment"), bool):
            is_in_memory = renamed.get("dataset", "glyphs") in _ALWAYS_IN_MEMORY
            renamed["augment"] = ("auto" if is_in_memory else "older") if augment else "none"
            if str(renamed.get("dataset")).startswith("folder:"):  # all pictures had this shape then
                renamed |= {n: renamed.get(n) or v for n, v in {"image_size": 224, "channels": 3}.items()}
        return renamed


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Setup):
    """Everything that determines one trained model.

    Attributes:
      loss: A key of `pols_jax.losses.LOSSES`.
      learning_rate: The highest learning rate of the schedule.
      margin: For the max-margin losses.
      alpha: For self-normalization.
      num_noise: For NCE; None is the smaller of 100 and the number of classes.
      noise: For NCE, the distribution of the noise classes.

    Examples:
      >>> run = RunConfig(loss="max_margin", margin=2.0)
      >>> run.loss_options()
      {'margin': 2.0}
      >>> RunConfig.from_json(run.to_json()) == run
      True
    """

    loss: Annotated[str, OneOf("loss", LOSS_NAMES)] = "cross_entropy"
    learning_rate: Positive = 0.002
    margin: Positive = 1.0
    alpha: Positive = 0.1
    num_noise: Count | None = None
    noise: Annotated[str, OneOf("noise distribution", NOISE)] = "uniform"

    def __post_init__(self):
        """Checks the settings that can be checked without data or devices."""
        super().__post_init__()
        if self.head == "sampled" and self.loss != "noise_contrastive_estimation":
            raise ConfigError(
                f"--head sampled is for --loss noise_contrastive_estimation; {self.loss} needs every class in every step: "
                "use --head blockwise."
            )

    def loss_options(self) -> dict[str, Any]:
        """The settings that this loss has, by the names of the flags."""
        return {name: getattr(self, name) for name in LOSS_FLAGS.get(self.loss, ())}

    def choices(self, *, separator: str) -> list[str]:
        """What distinguishes the runs of one loss, in words: the learning rate and the loss's own settings."""
        values = {"lr": self.learning_rate, **self.loss_options()}
        return [
            f"{name}{separator}{value if isinstance(value, str) else f'{value:g}'}"
            for name, value in values.items()
            if value is not None
        ]

    def runs(self) -> list["RunConfig"]:
        """This one; an `Experiment` has several."""
        return [self]

    def first_bias(self, num_classes: int) -> float:
        """The value that the biases of the output layer start from."""
        if self.bias_init is not None:
            return self.bias_init
        from pols_jax.heads import prior_bias  # here, because flags are read without JAX

        return prior_bias(num_classes) if self.loss in _SIGMOID_LOSSES else 0.0

    def differences(self, other: "RunConfig") -> list[str]:
        """The settings in which two configs differ, one phrase each; where a run is computed is none of them.

        Drawn classes are no matter of where.
        """
        is_sampled = [config.head == "sampled" for config in (self, other)]
        free = ("mesh",) if is_sampled[0] != is_sampled[1] else _PLACEMENT
        return [
            f"{flag(field.name)} {getattr(self, field.name)} instead of {getattr(other, field.name)}"
            for field in dataclasses.fields(self)
            if field.name not in free and getattr(self, field.name) != getattr(other, field.name)
        ]


LOSS_FLAGS: Mapping[str, tuple[str, ...]] = {
    "max_margin": ("margin",),
    "batch_max_margin": ("margin",),
    "self_normalization": ("alpha",),
    "noise_contrastive_estimation": ("num_noise", "noise"),
}
"""Which hyperparameters a loss has; the other losses have none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Setup):
    """What a user asks for: losses to compare, and values to choose from.

    Where several values are given for the learning rate or for a hyperparameter of the loss, every combination is
    trained and the best on the validation split is chosen.

    Attributes:
      loss: One or several of cross_entropy, max_margin, self_normalization, noise_contrastive_estimation,
        binary_cross_entropy, batch_cross_entropy and batch_max_margin; or all.
      learning_rate: One or several, or sweep: 1, 0.1, 0.01 and 0.001.
      margin: Max-margin losses: how far true logits shall exceed false ones.
      alpha: Self-normalization: the weight of the squared log-normalizer.
      num_noise: NCE: the number of noise classes; by default 100, or k if that is less.
      noise: NCE: uniform, log_uniform or empirical.
      sweep_steps: Choose among values in runs of this many steps, then train in full.
      choose_by: What the choice goes by, on the validation split.

    Examples:
      >>> [run.learning_rate for run in Experiment(loss=("max_margin",), learning_rate="sweep").runs()]
      [1.0, 0.1, 0.01, 0.001]
    """

    loss: tuple[Annotated[str, OneOf("loss", (*LOSS_NAMES, "all"))], ...] = (
        "cross_entropy",
        "batch_cross_entropy",
    )
    learning_rate: Literal["sweep"] | tuple[Positive, ...] = (0.002,)
    margin: tuple[Positive, ...] = (1.0,)
    alpha: tuple[Positive, ...] = (0.1,)
    num_noise: tuple[Count, ...] = ()
    noise: tuple[Annotated[str, OneOf("noise distribution", NOISE)], ...] = ("uniform",)
    sweep_steps: Count | None = None
    choose_by: Literal["accuracy", "auprc"] = "accuracy"

    def __post_init__(self):
        """Checks the settings that can be checked without data or devices."""
        super().__post_init__()
        if not self.loss:
            raise ConfigError("--loss needs at least one value.")
        self._check_updates("sweep_steps", self.sweep_steps or 0)
        self.runs()  # a wrong combination of settings

    @classmethod
    def of_run(cls, run: RunConfig) -> "Experiment":
        """The experiment that consists of one run."""
        values: dict[str, Any] = dataclasses.asdict(run)
        for name in ("loss", "learning_rate", "margin", "alpha", "num_noise", "noise"):
            values[name] = () if values[name] is None else (values[name],)
        return cls(**values)

    def losses(self) -> tuple[str, ...]:
        """The losses to train, in the order of the paper's tables."""
        return tuple(name for name in LOSS_NAMES if name in self.loss or "all" in self.loss)

    def runs(self) -> list[RunConfig]:
        """Every run of the experiment, those of one loss together."""
        return [run for loss in self.losses() for run in self._runs_of(loss)]

    def is_sweep(self) -> bool:
        """Whether several values are tried for a loss."""
        return len(self.runs()) > len(self.losses())

    def _runs_of(self, loss: str) -> Iterator[RunConfig]:
        shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(Setup)}
        choices = {
            "learning_rate": LEARNING_RATE_SWEEP if self.learning_rate == "sweep" else self.learning_rate,
            **{name: getattr(self, name) for name in LOSS_FLAGS.get(loss, ())},
        }
        if not choices.get("num_noise", True):
            choices["num_noise"] = (None,)
        for name, values in choices.items():
            if not values:
                raise ConfigError(f"{flag(name)} needs at least one value.")
        for values in itertools.product(*choices.values()):
            yield RunConfig(loss=loss, **dict(zip(choices, values, strict=True)), **shared)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to run, as opposed to what: settings that do not change the trained model.

    Attributes:
      checkpoint_every: Steps between checkpoints; a look at validation saves one too.
      keep_checkpoints: How many of the newest to keep, beside the best on validation.
      on_nan: When a loss is not finite; skip-run where several values are tried.
      workers: Streamed data: processes that decode; one per core, at most 8.
      quiet: Print only what goes wrong.
      tensorboard: Write TensorBoard event files into the run directory as well.
    """

    checkpoint_every: Count = 2000
    keep_checkpoints: Count = 2
    on_nan: Literal["stop", "skip-run"] | None = None
    workers: Annotated[int, Range(least=0, most=1024)] | None = None
    quiet: bool = False
    tensorboard: bool = False

    def __post_init__(self):
        """Checks the settings."""
        check_settings(self)
