"""Records: what was measured, where and with which command, as JSON that is readable at any moment of the run."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pols_jax.benchmarking.timing import Measurement, Variant, measure
from pols_jax.errors import ConfigError
from pols_jax.files import write_text
from pols_jax.memory import system_bytes
from pols_jax.schema import read_record

_PACKAGES = (
    *("pols-jax", "jax", "jaxlib", "flax", "optax", "numpy"),
    *("scikit-learn", "torch", "torchmetrics"),
)
# Between two writes of an unfinished record: a long run is not slowed down by saving it.
_SECONDS_BETWEEN_SAVES = 2.0


@dataclasses.dataclass
class Record:
    """The record of one run of a benchmark.

    Attributes:
      benchmark: Which one: logits, losses, metrics, networks, convolutions, large_k, large_k_training, training, startup,
        search_index, stream or head.
      settings: What was asked for.
      environment: Command, versions, device, host and commit, see `describe_environment`.
      measurements: What was measured so far.
      skipped: What was not measured, one dictionary for each with its ``case`` and the ``reason``.
      finished: Whether the run came to its end.
    """

    benchmark: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    measurements: list[Measurement] = dataclasses.field(default_factory=list)
    skipped: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    finished: bool = False

    def save(self, path: Path) -> None:
        """Writes the record; a reader sees the old file or the new one, never half of it."""
        fields = dataclasses.asdict(self)
        measurements = fields.pop("measurements")
        # One measurement per line: compact, and still readable and comparable.
        lines = ",\n".join("  " + json.dumps(measurement) for measurement in measurements)
        head = json.dumps(fields, indent=1).removesuffix("\n}")
        write_text(path, f'{head},\n "measurements": [\n{lines}\n ]\n}}\n')

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Reads a record; a `ConfigError` says what is wrong with the file."""
        return read_record(cls, path, error=ConfigError)

    def __post_init__(self):
        """Checks what types cannot say."""
        for entry in self.skipped:
            if not isinstance(entry.get("case"), dict):
                raise ConfigError("An entry of skipped has no case.")
        for measurement in self.measurements:
            if not measurement.times_ms:
                raise ConfigError(f"The measurement of {measurement.variant} has no times_ms.")

    def added_to(self, earlier: "Record") -> "Record":
        """Returns this new record with the measurements of an earlier one in front, and both commands.

        Raises:
          ConfigError: if the earlier one is of another benchmark, device or version.
        """
        for part in ("device", "versions"):
            if earlier.environment.get(part) != self.environment[part]:
                raise ConfigError(
                    f"The record was made with another {part}; write a new one without --append."
                )
        if earlier.benchmark != self.benchmark:
            raise ConfigError(f"The record is one of {earlier.benchmark}, not of {self.benchmark}.")
        command = self.environment["command"]
        commands = [words for words in earlier.environment["command"].split(" && ") if words != command]
        environment = self.environment | {"command": " && ".join([*commands, command])}
        measurements = earlier.measurements + self.measurements
        return dataclasses.replace(self, environment=environment, measurements=measurements)

    def find_all(self, variant: str, **case: str | int) -> list[Measurement]:
        """Returns the measurements of a variant whose case has these values."""
        return [m for m in self.measurements if m.variant == variant and case.items() <= m.case.items()]

    def find(self, variant: str, **case: str | int) -> Measurement | None:
        """Returns the first measurement of a variant whose case has these values; None if there is none."""
        return next(iter(self.find_all(variant, **case)), None)

    def values(self, name: str) -> list[Any]:
        """Returns the different values of one part of the cases, in the order in which they were measured."""
        cases = [m.case for m in self.measurements] + [entry["case"] for entry in self.skipped]
        return list(dict.fromkeys(case[name] for case in cases if name in case))


class Recorder:
    """Keeps the file of a record up to date while it grows.

    Leaving the ``with`` block saves the record, also when it is left by Ctrl-C, SIGTERM or an error.
    """

    def __init__(self, record: Record, path: Path | None):
        self.record, self._path, self._last_save = record, path, -float("inf")

    def __enter__(self) -> "Recorder":
        self.save()
        return self

    def __exit__(self, error_type, *_) -> None:
        self.record.finished = error_type is None
        self.save()

    def save(self) -> None:
        """Saves the record."""
        if self._path is not None:
            self.record.save(self._path)
            self._last_save = time.monotonic()

    def measure(self, variants: Sequence[Variant], *, repetitions: int, warmup: int = 2) -> None:
        """Times the variants into the record, see `measure`."""
        measure(
            variants,
            repetitions=repetitions,
            warmup=warmup,
            measurements=self.record.measurements,
            after_round=self.save_now_and_then,
        )
        self.save()

    def save_now_and_then(self) -> None:
        """Saves the record unless that was done a moment ago."""
        if time.monotonic() - self._last_save > _SECONDS_BETWEEN_SAVES:
            self.save()


def describe_environment(devices: Sequence[Any], *, command: Sequence[str] = ()) -> dict[str, Any]:
    """Says where and with what a measurement is made."""
    words = list(command) or [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {
        "command": shlex.join(words),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **_versions()},
        "device": {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
        },
        "host": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": system_bytes("MemTotal"),
            "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        },
        "flags": {name: os.environ[name] for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") if name in os.environ},
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _commit() -> str | None:
    """The commit of the checkout that this file is in, with a + where files have changed; None outside of one."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+"]
    try:
        answer = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
