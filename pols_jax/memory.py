"""Memory: how much there is, and a sentence instead of a crash for work that cannot fit."""

from pathlib import Path
from typing import Any

from rich.filesize import decimal

from pols_jax.errors import ConfigError

__all__ = ["available_bytes", "check_fits", "system_bytes"]


def available_bytes(device: Any) -> int | None:
    """Estimates how much memory can still be had on a device; None if that cannot be found out."""
    if device.platform == "cpu":
        return _free_on_host()
    statistics = device.memory_stats()
    if statistics and "bytes_limit" in statistics:
        return statistics["bytes_limit"] - statistics.get("bytes_in_use", 0)
    return None


def check_fits(needed_bytes: int, device: Any, *, what: str, advice: str) -> None:
    """Raises a `ConfigError`, from ``what`` to ``advice``, if work needs more memory than a device has left."""
    free = available_bytes(device)
    if free is not None and needed_bytes > free:
        raise ConfigError(
            f"{what} needs at least {decimal(needed_bytes)} of memory, and {decimal(free)} are free; {advice}."
        )


def system_bytes(name: str) -> int | None:
    """Reads a size that Linux tells about its memory, such as ``MemTotal``; None where the system has no such file."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(sizes[0]) if sizes else None


def _free_on_host() -> int | None:
    """What the system has, or what is left of the limit of a container if that is less."""
    amounts = [system_bytes("MemAvailable")]
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        amounts.append(int(limit) - int(used))
    except (OSError, ValueError):  # no such file, or "max" for no limit
        pass
    return min((amount for amount in amounts if amount is not None), default=None)
