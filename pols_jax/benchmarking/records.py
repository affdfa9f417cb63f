"""Records: what was measured, where and with which command, as JSON that is readable at any moment of the run."""

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

from pols_jax.benchmarking.timing import Measurement
from pols_jax.config import ConfigError

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
      benchmark: Which one: logits, losses, metrics, large_k or training.
      settings: What was asked for.
      environment: Command, versions, device, host and commit, see `describe_environment`.
      measurements: What was measured so far.
      skipped: What was not measured, one dictionary for each with its ``case`` and the ``reason``.
      finished: Whether the run came to its end.

    Examples:
      >>> import tempfile
      >>> record = Record("losses", {"batch_size": 2}, {}, [Measurement("optax", {}, 10.0, [1.0, 2.0])])
      >>> path = Path(tempfile.mkdtemp()) / "speed.json"
      >>> record.save(path)
      >>> Record.load(path) == record
      True
    """

    benchmark: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    measurements: list[Measurement] = dataclasses.field(default_factory=list)
    skipped: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    finished: bool = False

    def save(self, path: Path) -> None:
        """Writes the record; a reader sees the old file or the new one, never half of it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".tmp")
        fields = dataclasses.asdict(self)
        measurements = fields.pop("measurements")
        # One measurement per line: compact, and still readable and comparable.
        lines = ",\n".join("  " + json.dumps(measurement) for measurement in measurements)
        head = json.dumps(fields, indent=1).removesuffix("\n}")
        unfinished.write_text(f'{head},\n "measurements": [\n{lines}\n ]\n}}\n', encoding="utf-8")
        os.replace(unfinished, path)

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Reads a record."""
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
            measurements = [Measurement(**measurement) for measurement in fields.pop("measurements")]
            return cls(measurements=measurements, **fields)
        except OSError as error:
            raise ConfigError(f"The record {path} cannot be read: {error.strerror}.") from error
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path} is not a record of bench_speed.py.") from error

    def find(self, variant: str, **case: str | int) -> Measurement | None:
        """Returns the measurement of a variant whose case has these values; None if there is none."""
        for measurement in self.measurements:
            if measurement.variant == variant and case.items() <= measurement.case.items():
                return measurement
        return None

    def values(self, name: str) -> list[Any]:
        """Returns the different values of one part of the cases, in the order in which they were measured."""
        cases = [m.case for m in self.measurements] + [entry["case"] for entry in self.skipped]
        return list(dict.fromkeys(case[name] for case in cases if name in case))


class Recorder:
    """Keeps the file of a record up to date while it grows.

    Leaving the ``with`` block saves the record, also when it is left by Ctrl-C, SIGTERM or an error.

    Args:
      record: The record.
      path: Its file; None to keep it in memory only.

    Examples:
      >>> with Recorder(Record("losses", {}, {}), None) as recorder:
      ...     recorder.save()
      >>> recorder.record.finished
      True
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

    def save_now_and_then(self) -> None:
        """Saves the record unless that was done a moment ago."""
        if time.monotonic() - self._last_save > _SECONDS_BETWEEN_SAVES:
            self.save()


def describe_environment(devices: Sequence[Any], *, command: Sequence[str] = ()) -> dict[str, Any]:
    """Says where and with what a measurement is made.

    Args:
      devices: The devices that are measured.
      command: The words of the command line; those of this process if empty.

    Returns:
      ``command``, ``started``, ``commit``, ``versions``, ``device`` and ``host``, ready for JSON.

    Examples:
      >>> import jax
      >>> environment = describe_environment(jax.devices()[:1], command=["bench_speed.py", "losses"])
      >>> environment["command"], environment["device"]["platform"]
      ('bench_speed.py losses', 'cpu')
    """
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
            "memory_bytes": _memory("MemTotal"),
            "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        },
        "flags": {name: os.environ[name] for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") if name in os.environ},
    }


def available_bytes(device: Any) -> int | None:
    """Estimates how much memory can still be had on a device; None if that cannot be found out.

    Examples:
      >>> import jax
      >>> available_bytes(jax.devices("cpu")[0]) != 0
      True
    """
    statistics = device.memory_stats() if device.platform != "cpu" else None
    if statistics and "bytes_limit" in statistics:
        return statistics["bytes_limit"] - statistics.get("bytes_in_use", 0)
    return _memory("MemAvailable") if device.platform == "cpu" else None


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
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
    return _proc_value("/proc/cpuinfo", "model name") or platform.processor()


def _memory(name: str) -> int | None:
    value = _proc_value("/proc/meminfo", name)
    return 1024 * int(value.split()[0]) if value else None


def _proc_value(path: str, name: str) -> str | None:
    """The value of a line ``name : value``; None where the system has no such file."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
