"""What a training run is: frozen dataclasses that become the flags of ``train.py``, and named presets.

A `RunConfig` is everything that determines one trained model, and nothing else: two runs with equal configs end with
equal parameters. An `Experiment` is what a user asks for: several losses, and several values of whatever is to be
chosen on the validation split. `Experiment.runs` lists its runs.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

import tyro

from pols_jax.checks import unknown_name
from pols_jax.heads import prior_bias
from pols_jax.losses import LOSSES
from pols_jax.models import MODELS

LEARNING_RATE_SWEEP = (1.0, 0.1, 0.01, 0.001)
"""The learning rates that the paper chooses from."""

# Losses that sum one sigmoid per class: their biases start from the prior probability of a class.
_SIGMOID_LOSSES = ("binary_cross_entropy", "noise_contrastive_estimation")

# Settings that change where a run is computed, but not what: a run may go on with others.
_PLACEMENT = ("head", "mesh")


class ConfigError(ValueError):
    """A setting that cannot be used; the message says which one, and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which data to train on. Options that are not set are left to the data set.

    Attributes:
      dataset: A data set: glyphs, mnist, svhn_cropped, cifar10, cifar100, imagenet2012, omniglot, folder:PATH, or any
        tfds image classification set.
      image_size: Height and width of the images in pixels, for data sets that can be had in several sizes.
      max_classes: Glyphs: keep only this many classes, a fixed random choice.
      fonts: Glyphs: font files, or patterns of them, to draw from, instead of the twelve DejaVu faces.
      characters: Glyphs: ranges of code points, such as 4E00-9FFF,3400-4DBF.
      train_faces: Glyphs: names or patterns of the faces to learn from.
      validation_faces: Glyphs: names or patterns of the faces to choose with.
      test_faces: Glyphs: names or patterns of the faces to measure on.

    Examples:
      >>> DataConfig(dataset="glyphs", max_classes=100).options()
      {'max_classes': 100}
    """

    dataset: str = "glyphs"
    image_size: int | None = None
    max_classes: int | None = None
    fonts: tuple[str, ...] = ()
    characters: str | None = None
    train_faces: tuple[str, ...] = ()
    validation_faces: tuple[str, ...] = ()
    test_faces: tuple[str, ...] = ()

    def options(self) -> dict[str, Any]:
        """The options that are set, for `pols_jax.data.load`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(DataConfig)}
        return {
            name: value for name, value in values.items() if name != "dataset" and value not in (None, ())
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup(DataConfig):
    """What all runs of an experiment have in common.

    Attributes:
      model: A network: mlp, cnn, alexnet, vgg16, inception_v3, resnet50 or resnet101.
      width: A factor on the width of every layer of the network.
      hidden_sizes: MLP: the units of its layers; 500 500 if not given.
      auxiliary: inception_v3: train the auxiliary classifier of its recipe as well, with weight 0.4.
      dtype: The dtype to compute in. Parameters, batch statistics, logits and losses stay float32.
      steps: The number of training steps.
      augment: Distort the training images at random, for data sets that have a way of it: glyphs and omniglot.
      batch_size: Examples per step, over all devices and hosts. It matters to the batch losses beyond speed.
      seed: Determines initial parameters, order of the examples and augmentation.
      optimizer: sgd, momentum, adam, adamw or rmsprop.
      momentum: The decay of the running gradient, for momentum and rmsprop.
      schedule: How the learning rate goes on after the warm-up: constant, to zero along a cosine, or times decay_rate
        every decay_steps.
      warmup_steps: Steps over which the learning rate rises from zero.
      decay_steps: For the exponential schedule.
      decay_rate: For the exponential schedule.
      weight_decay: Shrinks weights, but neither biases nor batch norm. In adamw apart from the gradient, elsewhere in it.
      bias_start: Where the biases of the output layer start. By default 0; for binary cross-entropy and NCE
        -log(k - 1), so that at the start the k sigmoids of an example sum to one.
      evaluate_every: Steps between two looks at the validation split.

    Examples:
      >>> Setup(model="resnet")
      Traceback (most recent call last):
      pols_jax.config.ConfigError: There is no network named 'resnet'; did you mean resnet50 or resnet101 or alexnet?
    """

    model: str = "mlp"
    width: float = 1.0
    hidden_sizes: tuple[int, ...] = ()
    auxiliary: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    steps: int = 2000
    augment: bool = True
    batch_size: int = 256
    seed: int = 0
    optimizer: str = "adam"
    momentum: float = 0.9
    schedule: Literal["constant", "cosine", "exponential"] = "cosine"
    warmup_steps: int = 0
    decay_steps: int = 10_000
    decay_rate: float = 0.94
    weight_decay: float = 0.0
    bias_start: float | None = None
    evaluate_every: int = 200
    head: Literal["dense", "linear", "sharded"] = "dense"
    mesh: str | None = None

    def __post_init__(self):
        """Checks the settings that can be checked without data or devices."""
        if self.model not in MODELS:
            raise ConfigError(unknown_name("network", self.model, MODELS))
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(unknown_name("optimizer", self.optimizer, OPTIMIZERS))
        for name in ("steps", "batch_size", "evaluate_every", "width", "decay_steps", "decay_rate"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{flag(name)} must be positive, got {getattr(self, name)}.")
        for name in ("warmup_steps", "weight_decay", "seed", "momentum"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{flag(name)} must not be negative, got {getattr(self, name)}.")
        if self.hidden_sizes and self.model != "mlp":
            raise ConfigError(f"--hidden-sizes is an option of the mlp; {self.model} has --width.")
        if self.auxiliary and self.model != "inception_v3":
            raise ConfigError(f"--auxiliary is an option of inception_v3, not of {self.model}.")
        if self.auxiliary and self.head != "dense":
            raise ConfigError(f"--auxiliary needs --head dense; --head {self.head} has one output layer.")
        if self.mesh is not None and self.head != "sharded":
            raise ConfigError(f"--mesh is an option of --head sharded, not of --head {self.head}.")
        self.mesh_shape(1)

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
        return {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Reads what `to_json` wrote."""
        fields: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        return cls(**fields)


OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "rmsprop")
"""The optimizers that `Setup.optimizer` may name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Setup):
    """Everything that determines one trained model.

    Attributes:
      loss: A key of `pols_jax.losses.LOSSES`.
      learning_rate: The highest learning rate of the schedule.
      margin: For the max-margin losses.
      alpha: For self-normalisation.
      num_noise: For NCE; None is the smaller of 100 and the number of classes.
      noise: For NCE, the distribution of the noise classes.

    Examples:
      >>> run = RunConfig(loss="max_margin", margin=2.0)
      >>> run.loss_options()
      {'margin': 2.0}
      >>> RunConfig.from_json(run.to_json()) == run
      True
    """

    loss: str = "cross_entropy"
    learning_rate: float = 0.002
    margin: float = 1.0
    alpha: float = 0.1
    num_noise: int | None = None
    noise: str = "uniform"

    def __post_init__(self):
        """Checks the settings that can be checked without data or devices."""
        super().__post_init__()
        if self.loss not in LOSSES:
            raise ConfigError(unknown_name("loss", self.loss, (*LOSSES, "all")))
        if self.noise not in NOISE:
            raise ConfigError(unknown_name("noise distribution", self.noise, NOISE))
        for name in ("learning_rate", "margin", "alpha", "num_noise"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{flag(name)} must be positive, got {value}.")

    def loss_options(self) -> dict[str, Any]:
        """The settings that this loss has, by the names of the flags."""
        return {name: getattr(self, name) for name in LOSS_FLAGS.get(self.loss, ())}

    def first_bias(self, num_classes: int) -> float:
        """The value that the biases of the output layer start from."""
        if self.bias_start is not None:
            return self.bias_start
        return prior_bias(num_classes) if self.loss in _SIGMOID_LOSSES else 0.0

    def differences(self, other: "RunConfig") -> list[str]:
        """The settings in which two configs differ, one phrase each; where a run is computed is none of them."""
        return [
            f"{flag(field.name)} {getattr(self, field.name)} instead of {getattr(other, field.name)}"
            for field in dataclasses.fields(self)
            if field.name not in _PLACEMENT and getattr(self, field.name) != getattr(other, field.name)
        ]


NOISE = ("uniform", "log_uniform", "empirical")
"""The noise distributions of NCE: all classes alike, by rank (for classes sorted by frequency), or as in training."""

LOSS_FLAGS: Mapping[str, tuple[str, ...]] = {
    "max_margin": ("margin",),
    "batch_max_margin": ("margin",),
    "self_normalization": ("alpha",),
    "noise_contrastive_estimation": ("num_noise", "noise"),
}
"""Which hyper-parameters a loss has; the other losses have none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Setup):
    """What a user asks for: losses to compare, and values to choose from.

    Where several values are given for the learning rate or for a hyper-parameter of the loss, every combination is
    trained and the best on the validation split is chosen.

    Attributes:
      loss: One loss, several, or "all".
      learning_rate: One learning rate, several, or "sweep": 1, 0.1, 0.01 and 0.001.
      margin: For max_margin and batch_max_margin, by how much true logits are to exceed false ones.
      alpha: For self_normalization, the weight of the squared log-normaliser.
      num_noise: For noise_contrastive_estimation, the number of noise classes; by default 100, or k if that is less.
      noise: For noise_contrastive_estimation: uniform, log_uniform or empirical.
      sweep_steps: Choose among several values by runs of this many steps, then train the chosen ones for --steps. By
        default every value is trained for --steps.
      choose_by: What the choice among several values goes by, on the validation split: classification accuracy, or
        AUPRC of one logit.

    Examples:
      >>> [run.learning_rate for run in Experiment(loss=("max_margin",), learning_rate="sweep").runs()]
      [1.0, 0.1, 0.01, 0.001]
    """

    loss: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME...")] = (
        "cross_entropy",
        "batch_cross_entropy",
    )
    learning_rate: Literal["sweep"] | tuple[float, ...] = (0.002,)
    margin: tuple[float, ...] = (1.0,)
    alpha: tuple[float, ...] = (0.1,)
    num_noise: tuple[int, ...] = ()
    noise: tuple[str, ...] = ("uniform",)
    sweep_steps: int | None = None
    choose_by: Literal["accuracy", "auprc"] = "accuracy"

    def __post_init__(self):
        """Checks the settings that can be checked without data or devices."""
        super().__post_init__()
        if self.sweep_steps is not None and self.sweep_steps < 1:
            raise ConfigError(f"--sweep-steps must be positive, got {self.sweep_steps}.")

    @classmethod
    def of_run(cls, run: RunConfig) -> "Experiment":
        """The experiment that consists of one run."""
        values: dict[str, Any] = dataclasses.asdict(run)
        for name in ("loss", "learning_rate", "margin", "alpha", "num_noise", "noise"):
            values[name] = () if values[name] is None else (values[name],)
        return cls(**values)

    def losses(self) -> tuple[str, ...]:
        """The losses to train, in the order of the paper's tables."""
        if "all" in self.loss:
            return tuple(LOSSES)
        for name in self.loss:
            if name not in LOSSES:
                raise ConfigError(unknown_name("loss", name, (*LOSSES, "all")))
        return tuple(name for name in LOSSES if name in self.loss)

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


def flag(name: str) -> str:
    """The command-line flag of a field.

    Examples:
      >>> flag("batch_size")
      '--batch-size'
    """
    return "--" + name.replace("_", "-")


@dataclasses.dataclass(frozen=True)
class Preset:
    """A named experiment that is known to work.

    Attributes:
      promise: What it trains, how long that takes, and what comes out.
      experiment: Its settings.
    """

    promise: str
    experiment: Experiment


# The paper's protocol: SGD with momentum, a constant rate chosen from four, 10^5 steps (Section VI-A).
_PAPER = Experiment(
    loss=("all",),
    learning_rate="sweep",
    optimizer="momentum",
    schedule="constant",
    steps=100_000,
    batch_size=128,
    evaluate_every=2_000,
)
_PAPER_CNN = dataclasses.replace(_PAPER, model="cnn")
_QUICK_CNN = dataclasses.replace(
    _PAPER_CNN,
    loss=("cross_entropy", "batch_cross_entropy"),
    learning_rate=(0.1,),
    width=0.25,
    batch_size=64,
    steps=500,
    schedule="cosine",
    evaluate_every=250,
)

PRESETS: Mapping[str, Preset] = {
    "glyphs": Preset(
        "`python train.py`: 2,221 characters in typefaces never seen in training, an MLP, cross-entropy against batch "
        "cross-entropy. About three minutes on two cores; 1-AUPRC of one logit 0.172 and 0.133.",
        Experiment(),
    ),
    "mnist": Preset(
        "`python train.py --preset mnist`: the paper's MNIST protocol, MLP 500-500, seven losses, four learning rates, 10^5 "
        "steps each; about 130 steps a second on one core, 13 minutes a run. Mean 1-AUPRC of one logit 0.012 for the two losses "
        "that are not aligned, 0.002 for the five that are (with --sweep-steps 10000).",
        dataclasses.replace(_PAPER, dataset="mnist"),
    ),
    "svhn": Preset(
        "`python train.py --preset svhn`: the paper's SVHN protocol, six convolutions, seven losses, four learning rates, 10^5 "
        "steps each. For an accelerator: a step takes 10 s on two cores, a run 11 days. The paper's mean 1-AUPRC of the aligned losses is 0.017.",
        dataclasses.replace(_PAPER_CNN, dataset="svhn_cropped"),
    ),
    "cifar10": Preset(
        "`python train.py --preset cifar10`: the paper's CIFAR-10 protocol, six convolutions, seven losses, four learning "
        "rates, 10^5 steps each. For an accelerator: a step takes 10 s on two cores, a run 11 days. The paper's mean 1-AUPRC of the aligned losses is 0.074.",
        dataclasses.replace(_PAPER_CNN, dataset="cifar10"),
    ),
    "cifar100": Preset(
        "`python train.py --preset cifar100`: the paper's CIFAR-100 protocol, six convolutions, seven losses, four learning "
        "rates, 10^5 steps each. For an accelerator: a step takes 10 s on two cores, a run 11 days. The paper's mean 1-AUPRC of the aligned losses is 0.405.",
        dataclasses.replace(_PAPER_CNN, dataset="cifar100"),
    ),
    "omniglot": Preset(
        "`python train.py --preset omniglot`: 1,623 handwritten characters, an MLP, cross-entropy against batch "
        "cross-entropy. About two and a half minutes on two cores; 1-AUPRC of one logit 0.467 and 0.391 after half of the steps.",
        Experiment(dataset="omniglot"),
    ),
    "cjk": Preset(
        "`python train.py --preset cjk`: 42,174 Chinese, Japanese and Korean characters in weights never seen in training, "
        "from Debian's fonts-noto-cjk and fonts-noto-cjk-extra; an MLP and three losses. About 17 minutes a loss on one core, and "
        "6 to measure it; 1-AUPRC of one logit 0.330 for cross-entropy, 0.225 for self-normalisation, 0.160 for NCE.",
        Experiment(
            loss=("cross_entropy", "self_normalization", "noise_contrastive_estimation"),
            fonts=("/usr/share/fonts/opentype/noto/Noto*CJK-*.ttc",),
            characters="2E80-9FFF,AC00-D7A3,F900-FAFF,20000-2FA1F",
            image_size=28,
            train_faces=(
                *(f"Noto Sans CJK JP{style}" for style in (" Thin", " Light", "", " Bold", " Black")),
                *(
                    f"Noto Serif CJK JP{style}"
                    for style in (" ExtraLight", " Light", "", " SemiBold", " Black")
                ),
            ),
            validation_faces=("Noto Serif CJK JP Medium",),
            test_faces=("Noto Sans CJK JP Medium", "Noto Serif CJK JP Bold"),
            augment=False,
            hidden_sizes=(1024, 128),
            optimizer="momentum",
            learning_rate=(0.3,),
            num_noise=(10_000,),
            choose_by="auprc",
            batch_size=64,
            steps=10_000,
            evaluate_every=2_500,
        ),
    ),
    "imagenet": Preset(
        "`python train.py --preset imagenet`: Inception-v3 with the recipe it was published with, cross-entropy against batch "
        "cross-entropy, 6 million steps. For many devices: a step takes 40 s on two cores. The paper's 1-AUPRC: 0.366 and 0.245.",
        Experiment(
            dataset="imagenet2012",
            model="inception_v3",
            auxiliary=True,
            optimizer="rmsprop",
            learning_rate=(0.045,),
            schedule="exponential",
            decay_rate=0.94,
            decay_steps=80_000,
            weight_decay=4e-5,
            batch_size=32,
            steps=6_000_000,
            evaluate_every=20_000,
        ),
    ),
    "mnist-quick": Preset(
        "`python train.py --preset mnist-quick`: the paper's MLP and seven losses in 3,000 steps. About 40 seconds a loss on two "
        "cores; 1-AUPRC of one logit 0.014 for cross-entropy, 0.005 for batch cross-entropy, 0.002 for self-normalisation.",
        dataclasses.replace(_PAPER, dataset="mnist", learning_rate=(0.1,), steps=3_000, evaluate_every=500),
    ),
    "cifar100-quick": Preset(
        "`python train.py --preset cifar100-quick`: CIFAR-100 with the paper's network at a quarter of its width, 500 steps of 64. "
        "About six minutes a loss on one core; 1-AUPRC of one logit 0.798 for cross-entropy, 0.790 for batch cross-entropy.",
        dataclasses.replace(_QUICK_CNN, dataset="cifar100"),
    ),
}
"""Every preset by its name; the first is the default."""
