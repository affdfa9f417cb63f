"""What can be asked of a benchmark: frozen dataclasses that become the flags of ``bench_speed.py``."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any, Literal

import jax

from pols_jax.checks import unknown_name
from pols_jax.config import ConfigError
from pols_jax.models import MODELS

Program = Literal["backbone", "all_logits", "one_logit", "head_all_logits", "head_one_logit"]

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

    def check(self) -> None:
        """Raises ConfigError for what cannot be measured."""
        if self.peer == "torch" and importlib.util.find_spec("torch") is None:
            raise ConfigError("--peer torch needs PyTorch, which is not installed: pip install torch.")
        find_devices(self.device)


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
      programs: Which programs are timed beside the backbone; all of them by default. Rounds of few programs are short and
        many, and show small differences.
      dtype: What to compute in.
      num_devices: How many devices work at the same time, each on a batch of its own.
    """

    preset: Literal["short", "paper"] = "short"
    networks: tuple[str, ...] = ()
    classes: tuple[int, ...] = ()
    batch_size: tuple[int, ...] = ()
    batches: int | None = None
    programs: tuple[Program, ...] = ()
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    num_devices: int = 1

    def resolved(self) -> "LogitsSettings":
        """Fills in what the preset says.

        Examples:
          >>> LogitsSettings(preset="paper", networks=("resnet50",)).resolved().batch_size
          (32,)
        """
        values = _PRESETS[self.preset]
        return dataclasses.replace(
            self, **{name: value for name, value in values.items() if getattr(self, name) in ((), None)}
        )

    def check(self) -> None:
        """Raises ConfigError for what cannot be measured."""
        super().check()
        for network in self.networks:
            if network not in MODELS:
                raise ConfigError(unknown_name("network", network, MODELS))
        _check_at_least_one("--classes", self.classes)
        _check_at_least_one("--batch-size", self.batch_size)
        _check_at_least_one("--batches", [] if self.batches is None else [self.batches])
        _check_at_least_one("--num-devices", [self.num_devices])
        find_devices(self.device, self.num_devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSettings(Settings):
    """Value and gradient of the seven losses, against optax, the authors' formulation and PyTorch.

    Attributes:
      batch_size: The number of examples.
      classes: The number of classes.
      repetitions: How many calls are timed.
    """

    batch_size: int = 128
    classes: int = 2**18
    repetitions: int = 20

    def check(self) -> None:
        """Raises ConfigError for what cannot be measured."""
        super().check()
        _check_at_least_one("--batch-size", [self.batch_size])
        _check_at_least_one("--classes", [self.classes])
        _check_at_least_one("--repetitions", [self.repetitions])


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricSettings(Settings):
    """Exact AUPRC and precision at recall, against scikit-learn and (with --peer torch) torchmetrics.

    Attributes:
      examples: The number of examples.
      classes: The numbers of classes.
      repetitions: How many calls are timed.
    """

    examples: int = 10_000
    classes: tuple[int, ...] = (10, 100, 1_000, 10_000)
    repetitions: int = 3

    def check(self) -> None:
        """Raises ConfigError for what cannot be measured."""
        super().check()
        _check_at_least_one("--examples", [self.examples])
        _check_at_least_one("--classes", self.classes)
        _check_at_least_one("--repetitions", [self.repetitions])
        if importlib.util.find_spec("sklearn") is None:
            raise ConfigError("The metrics are compared with scikit-learn: pip install scikit-learn.")
        if self.peer == "torch" and importlib.util.find_spec("torchmetrics") is None:
            raise ConfigError("--peer torch needs torchmetrics here: pip install torchmetrics.")


def find_devices(name: str | None, count: int = 1) -> list[Any]:
    """Returns the devices that a name means.

    Args:
      name: A platform, such as cpu, or one of its devices, such as cpu:1; None for JAX's own choice.
      count: How many devices, from that one on.

    Returns:
      ``count`` devices.

    Raises:
      ConfigError: if they are not there.

    Examples:
      >>> [device.platform for device in find_devices("cpu:1", 2)]
      ['cpu', 'cpu']
    """
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


def _check_at_least_one(flag, numbers):
    for number in numbers:
        if number < 1:
            raise ConfigError(f"{flag} must be at least 1, got {number}.")


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
