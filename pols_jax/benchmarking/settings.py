"""What can be asked of a benchmark: frozen dataclasses that become the flags of ``pols bench``."""

import dataclasses
import importlib.util
import itertools
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pols_jax.errors import ConfigError
from pols_jax.files import check_directory, check_writable
from pols_jax.memory import check_fits
from pols_jax.settings import Count, Network, OneOf, check_settings

NORMALIZER_ROWS = (256, 1024)
"""The rows of the normalizers that are timed; the whole network is timed with the most."""

_PROGRAMS = (
    *("backbone", "all_logits", "one_logit", "one_logit_normalized", "head_all_logits", "head_one_logit"),
    *(f"head_one_logit_normalized_{rows}" for rows in NORMALIZER_ROWS),
    "empty_program",
)
Program = Annotated[str, OneOf("program", _PROGRAMS)]

PAPER_NETWORKS = ("alexnet", "vgg16", "inception_v3", "resnet50", "resnet101")
"""The networks of the paper's Table 3."""

PAPER_CLASSES = (1, 2**10, 2**14, 2**16, 2**18, 370_727)
"""The numbers of classes of the paper's Table 3; the last one is 2^18.5."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What all benchmarks can be told.

    Attributes:
      device: Which device to measure: cpu, gpu or tpu, or one of several such as gpu:1; JAX's own choice if not given.
      peer: Time the same work in PyTorch too, in the same run; torch has to be installed.
      json: Where to write the record, every repetition included.
      markdown: Where to write the tables.
      figures: A folder for the figures.
      profile: A folder for a trace of one more round of calls, for TensorBoard or XProf.
    """

    device: str | None = None
    peer: Literal["none", "torch"] = "none"
    json: Path | None = None
    markdown: Path | None = None
    figures: Path | None = None
    profile: Path | None = None

    def __post_init__(self):
        """Checks the settings that can be checked without devices."""
        check_settings(self)

    def check(self) -> None:
        """Raises ConfigError for what cannot be measured here."""
        if self.peer == "torch" and importlib.util.find_spec("torch") is None:
            raise ConfigError("--peer torch needs PyTorch, which is not installed: pip install torch.")
        find_devices(self.device)
        check_writable(self.json, self.markdown)
        check_directory(self.figures)
        check_directory(self.profile)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitsSettings(Settings):
    """All logits against one gathered logit, from the image on: the paper's Table 3 and Figure 1.

    Attributes:
      preset: What is measured unless other flags say so. short: three numbers of classes, one image at a time, within five
        minutes on two cores. paper: all networks and numbers of classes, 100 batches of 32 images.
      networks: The networks to measure.
      classes: The numbers of classes to measure.
      batch_size: How many images one call is given; several sizes are measured one after the other.
      batches: How many calls are timed.
      programs: Which programs are timed beside the backbone, of all_logits, one_logit, one_logit_normalized,
        head_all_logits, head_one_logit, head_one_logit_normalized_256 and _1024, and empty_program; all of them by default. Rounds of few
        programs are short and many, and show small differences.
      dtype: What to compute in.
      num_devices: How many devices work at the same time, each on a batch of its own.
    """

    preset: Literal["short", "paper"] = "short"
    networks: tuple[Network, ...] = ()
    classes: tuple[Count, ...] = ()
    batch_size: tuple[Count, ...] = ()
    batches: Count | None = None
    programs: tuple[Program, ...] = ()
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    num_devices: Count = 1

    def resolved(self) -> "LogitsSettings":
        """Fills in what the preset says."""
        values = _PRESETS[self.preset]
        return dataclasses.replace(
            self, **{name: value for name, value in values.items() if getattr(self, name) in ((), None)}
        )

    def check(self) -> None:
        """Raises ConfigError for what cannot be measured here."""
        super().check()
        find_devices(self.device, self.num_devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSettings(Settings):
    """Value and gradient of the seven losses, against optax, the authors' formulation and PyTorch.

    Attributes:
      batch_size: The number of examples.
      classes: The number of classes.
      repetitions: How many calls are timed.
    """

    batch_size: Count = 128
    classes: Count = 2**18
    repetitions: Count = 20

    def check(self) -> None:
        """Raises ConfigError for what cannot be measured here."""
        super().check()
        # Logits and their gradient, in float32.
        _check_memory(2 * 4 * self.batch_size * self.classes, self.device, "--batch-size or --classes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricSettings(Settings):
    """Exact AUPRC and precision at recall, against scikit-learn and (with --peer torch) torchmetrics.

    Attributes:
      examples: The numbers of examples.
      classes: The numbers of classes.
      repetitions: How many calls are timed.
      max_scores: Where examples times classes are more, scikit-learn is timed on some of the classes only, spread evenly,
        and its time is multiplied.
    """

    examples: tuple[Count, ...] = (1_000, 10_000, 100_000)
    classes: tuple[Count, ...] = (1, 10, 100, 1_000, 10_000)
    repetitions: Count = 3
    max_scores: Count = 25_000_000

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The numbers of examples and classes to be measured; those with more than a gigabyte of scores are left out."""
        pairs = itertools.product(self.examples, self.classes)
        return [(num_examples, k) for num_examples, k in pairs if 4 * num_examples * k <= 2**30]

    def check(self) -> None:
        """Raises ConfigError for what cannot be measured here."""
        super().check()
        for name in ("examples", "classes"):
            if not getattr(self, name):
                raise ConfigError(f"--{name} needs at least one value.")
        if not self.sizes:
            raise ConfigError(
                "The scores take more than a gigabyte; choose a smaller --examples or --classes."
            )
        # Scores and labels, of every class, in 32 bits.
        _check_memory(2 * 4 * max(map(math.prod, self.sizes)), self.device, "--examples or --classes")
        if importlib.util.find_spec("sklearn") is None:
            raise ConfigError("The metrics are compared with scikit-learn: pip install scikit-learn.")
        if self.peer == "torch" and importlib.util.find_spec("torchmetrics") is None:
            raise ConfigError("--peer torch needs torchmetrics here: pip install torchmetrics.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkSettings(Settings):
    """Forward passes or training steps of the networks, with our convolutions, with XLA's and (with --peer torch) in PyTorch.

    Attributes:
      networks: The networks to measure.
      program: forward: images to features. step: a whole training step with ten classes, cross-entropy and momentum.
      batch_size: How many images one call is given; several sizes are measured one after the other.
      width: A factor on the width of every layer.
      convolutions: How a CPU computes convolutions: auto (the measured table), xla, products.
      repetitions: How many calls are timed.
      append: Add to the record of --json what it does not have yet, and replace what is measured again.
    """

    networks: tuple[Network, ...] = ("cnn", *PAPER_NETWORKS)
    program: Literal["forward", "step"] = "forward"
    batch_size: tuple[Count, ...] = (1, 32)
    width: float = 1.0
    convolutions: tuple[Literal["auto", "xla", "products"], ...] = ("auto", "xla")
    repetitions: Count = 5
    append: bool = False

    def check(self) -> None:
        """Raises ConfigError for what cannot be measured here."""
        for name in ("networks", "batch_size", "convolutions"):
            if not getattr(self, name):
                raise ConfigError(f"--{name.replace('_', '-')} needs at least one value.")
        if not self.width > 0:
            raise ConfigError(f"--width must be positive, got {self.width}.")
        if self.append and self.json is None:
            raise ConfigError("--append adds to a record: name it with --json.")
        if "mlp" in self.networks and self.peer == "torch":
            raise ConfigError("mlp has no convolution and no peer in PyTorch: leave it out of --networks.")
        super().check()


def find_devices(name: str | None, count: int = 1) -> list[Any]:
    """Returns ``count`` devices from the one on that a name means: cpu, cpu:1, or None for JAX's own choice.

    Examples:
      >>> [device.id for device in find_devices("cpu:1", 2)]
      [1, 2]
    """
    import jax  # here, because flags are read without it

    platform, _, index = (name or "").partition(":")
    try:
        devices = jax.local_devices(backend=platform or None)
    except RuntimeError as error:
        there = ", ".join(dict.fromkeys(device.platform for device in jax.local_devices()))
        raise ConfigError(f"There is no device {name!r} that JAX can use here; there is {there}.") from error
    first = int(index) if index.isdecimal() else 0
    if (index and not index.isdecimal()) or first + count > len(devices):
        raise ConfigError(
            f"{count} device(s) from {name or devices[0].platform!r} on are too many: there are {len(devices)}, from 0."
        )
    return devices[first : first + count]


def _check_memory(needed_bytes: int, device: str | None, flags: str) -> None:
    check_fits(
        needed_bytes, find_devices(device)[0], what="This benchmark", advice=f"choose a smaller {flags}"
    )


_PRESETS = {
    "short": {
        "networks": ("alexnet", "resnet50"),
        "classes": (1, 2**14, PAPER_CLASSES[-1]),
        "batch_size": (1,),
        "batches": 20,
    },
    "paper": {
        "networks": PAPER_NETWORKS,
        "classes": PAPER_CLASSES,
        "batch_size": (32,),
        "batches": 100,
    },
}
