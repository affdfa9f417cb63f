"""The normalizer of a run, in a file beside its checkpoint."""

import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from pols_jax.errors import RunError, RunWarning
from pols_jax.files import write_arrays
from pols_jax.normalizers import Clusters, Fit, Normalizer
from pols_jax.schema import ArrayKind, read_arrays

_ARRAYS = {
    "kernel": ArrayKind("f", ("rows", "features")),
    "bias": ArrayKind("f", ("rows",)),
    "r_squared": ArrayKind("f", ()),
    "error": ArrayKind("f", ()),
    "num_features": ArrayKind("iu", ()),
    "checkpoint": ArrayKind("U", ()),
    "cluster_of": ArrayKind("iu", ("classes",), is_optional=True),
    "num_own": ArrayKind("iu", (), is_optional=True),
}


def normalizer_path(run_dir: Path) -> Path:
    """The file that holds the normalizer of a run."""
    return run_dir / "normalizer.npz"


def write_normalizer(run_dir: Path, normalizer: Normalizer, *, checkpoint: str) -> None:
    """Writes the normalizer of a checkpoint, at once or not at all."""
    arrays = {
        "kernel": np.asarray(normalizer.kernel, np.float32),
        "bias": np.asarray(normalizer.bias, np.float32),
        "checkpoint": np.array(checkpoint),
        **{name: np.asarray(value) for name, value in normalizer.fit._asdict().items()},
    }
    if normalizer.clusters is not None:
        arrays["cluster_of"] = normalizer.clusters.cluster_of
        arrays["num_own"] = np.asarray(normalizer.clusters.num_own)
    write_arrays(normalizer_path(run_dir), arrays)


def read_normalizer(
    run_dir: Path,
    *,
    checkpoint: str,
    shape: tuple[int, int],
    head: Callable[[], tuple[np.ndarray, np.ndarray, int]],
    advice: str,
) -> Normalizer | None:
    """Reads the normalizer of a checkpoint; None if there is none. That of another checkpoint is not used, with a warning.

    Args:
      run_dir: The run directory.
      checkpoint: What identifies the checkpoint.
      shape: The numbers of classes and of features of its output layer.
      head: Reads kernel and bias of the output layer, and the class of its first row, if the normalizer needs them.
      advice: What to do about a file that cannot be used.

    Raises:
      RunError: if the file is damaged.
    """
    path = normalizer_path(run_dir)
    if not path.exists():
        return None
    try:
        arrays = read_arrays(path, _ARRAYS, classes=shape[0], features=shape[1])
    except RunError as error:
        raise RunError(f"{str(error).rstrip('.')}; {advice}.") from error
    if str(arrays["checkpoint"]) != checkpoint:
        warnings.warn(
            f"{path} belongs to another checkpoint and is not used; {advice}.", RunWarning, stacklevel=2
        )
        return None
    if not all(np.isfinite(arrays[name]).all() for name in ("kernel", "bias")) or not len(arrays["bias"]):
        raise RunError(f"{path} cannot be used: it holds no finite rows; {advice}.")
    fit = Fit(float(arrays["r_squared"]), float(arrays["error"]), int(arrays["num_features"]))
    clusters = None
    if "cluster_of" in arrays:
        clusters = _read_clusters(arrays, head, problem=f"{path} cannot be used: {{}}; {advice}.")
    return Normalizer(jnp.asarray(arrays["kernel"]), jnp.asarray(arrays["bias"]), fit, clusters)


def _read_clusters(arrays: dict[str, np.ndarray], head: Callable[[], tuple], *, problem: str) -> Clusters:
    cluster_of, num_clusters = arrays["cluster_of"], len(arrays["bias"])
    num_own = int(arrays.get("num_own", 0))
    if not ((cluster_of >= 0) & (cluster_of < num_clusters)).all() or not 0 < num_own <= len(cluster_of):
        raise RunError(problem.format("its clusters do not fit its rows"))
    kernel, bias, first_class = head()
    return Clusters.of(
        cluster_of, kernel, bias, num_clusters=num_clusters, num_own=num_own, first_class=first_class
    )


def score_id(checkpoint: str, normalizer: Normalizer | None) -> str:
    """What identifies the score that thresholds were chosen for: a checkpoint, and its normalizer if it is used.

    Examples:
      >>> score_id("step 7", None)
      'step 7'
    """
    return checkpoint if normalizer is None else f"{checkpoint}, normalizer {normalizer_id(normalizer)}"


def normalizer_id(normalizer: Normalizer) -> str:
    """What identifies a normalizer: a checksum of its rows."""
    arrays = [np.asarray(normalizer.kernel, np.float32), np.asarray(normalizer.bias, np.float32)]
    if normalizer.clusters is not None:
        arrays += [normalizer.clusters.cluster_of, np.int32(normalizer.clusters.num_own)]
    return f"{zlib.crc32(b''.join(array.tobytes() for array in arrays)):08x}"


def rows_in_words(num_rows: int) -> str:
    """Says how many rows a normalizer has.

    Examples:
      >>> rows_in_words(1), rows_in_words(1024)
      ('affine', '1,024 rows')
    """
    return "affine" if num_rows == 1 else f"{num_rows:,} rows"
