"""Reads arrays that other programs wrote: npz and safetensors files, and lists of names."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from pols_jax.errors import ConfigError, reason_of
from pols_jax.files import read_bytes, reading
from pols_jax.schema import npz_arrays, parse_json

__all__ = ["read_array_file", "read_names"]

# The output layer of many classes is large; what does not fit in memory is an error of its own.
_MAX_BYTES = 2**40
# The types of safetensors that an output layer, features or labels can have.
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    **{f"{kind}{bits}": f"{kind.lower()}{bits // 8}" for kind in "IU" for bits in (8, 16, 32, 64)},
}


def read_array_file(path: str | Path) -> dict[str, np.ndarray]:
    """Reads the arrays of an npz or a safetensors file, by name.

    Raises:
      ConfigError: if the name of the file ends with neither, or it cannot be read or is damaged.

    Examples:
      >>> read_array_file("network.bin")
      Traceback (most recent call last):
      pols_jax.errors.ConfigError: network.bin must be an .npz or a .safetensors file.
    """
    path = Path(path)
    readers = {".npz": npz_arrays, ".safetensors": _safetensors}
    if path.suffix not in readers:
        raise ConfigError(f"{path} must be an .npz or a .safetensors file.")
    with reading(path, error=ConfigError):
        content = read_bytes(path, max_bytes=_MAX_BYTES)
    try:
        return readers[path.suffix](content)
    except MemoryError:
        raise
    except Exception as error:  # whatever a damaged file makes the libraries raise
        raise ConfigError(f"{path} cannot be read: it is damaged ({reason_of(error)}).") from error


def read_names(path: str | Path) -> list[str]:
    """Reads names of classes: a JSON list, if the name of the file ends with .json, and else one name per line.

    Raises:
      ConfigError: if it cannot be read, or holds something else.
    """
    with reading(path, error=ConfigError):
        content = read_bytes(path, max_bytes=_MAX_BYTES)
        if Path(path).suffix != ".json":
            lines = content.decode().removeprefix("\ufeff").split("\n")
            return [line.rstrip("\r") for line in (lines if lines[-1] else lines[:-1])]
        names = parse_json(content)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path} must be a list of names, one for each class.")
    return names


def _safetensors(content: bytes) -> dict[str, np.ndarray]:
    """Eight bytes with the length of the header, the header in JSON, then the numbers, least significant byte first."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 + length:
        raise ValueError(f"it ends within its header, after {len(content)} bytes")
    header = json.loads(content[8 : 8 + length])
    return {
        name: _tensor(name, content, 8 + length, entry)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _tensor(name: str, content: bytes, offset: int, entry: dict[str, Any]) -> np.ndarray:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{name} has the type {entry['dtype']}")
    dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    size = int(np.prod(shape, dtype=np.int64))
    if not 0 <= start <= stop <= len(content) - offset:
        raise ValueError(f"{name} ends after the end of the file")
    if stop - start != size * dtype.itemsize:
        raise ValueError(f"{name} has {stop - start} bytes, and its shape needs {size * dtype.itemsize}")
    return np.frombuffer(content, dtype, size, offset + start).reshape(shape)
