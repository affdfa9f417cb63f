"""What a query of an index costs, against reading its features: a million pictures with 512 features each.

    python results/tools/search_index_speed.py results/search_index.json

The features are made up, written to a temporary directory (3 GB), and stay in the system's cache. All variants run in one
process, in turn. Reading is a sum over the same mapped files, by as many threads as the query has.
"""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
from recording import recording

from pols_jax.benchmarking.timing import Variant
from pols_jax.normalizers import Fit, Normalizer
from pols_jax.search.class_bank import ClassBank
from pols_jax.search.index import FeatureIndex
from pols_jax.search.index_files import SCHEMA, IndexInfo, IndexWriter, Rows

_NUM_CLASSES = 1000
_NORMALIZER_ROWS = 256


def random_bank(num_features: int, *, normalizer_rows: int = 0) -> ClassBank:
    """Makes a network with a random output layer, and a random normalizer if it is to have one.

    Examples:
      >>> random_bank(8, normalizer_rows=2).normalizer.num_rows
      2
    """
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((_NUM_CLASSES, num_features), np.float32)
    if not normalizer_rows:
        return ClassBank.from_arrays(kernel)
    rows = jnp.asarray(kernel[:normalizer_rows])
    return ClassBank.from_arrays(
        kernel, normalizer=Normalizer(rows, jnp.zeros(normalizer_rows), Fit(1.0, 0.0, 0))
    )


def write_index(directory: Path, bank: ClassBank, *, num_pictures: int, dtype: str) -> None:
    """Writes an index of pictures that do not exist, part by part.

    Examples:
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     write_index(Path(folder), random_bank(8), num_pictures=5, dtype="float16")
      ...     len(FeatureIndex.open(folder))
      5
    """
    new = IndexInfo(
        checkpoint=bank.checkpoint,
        run_dir="made up",
        num_features=bank.num_features,
        dtype=dtype,  # type: ignore[arg-type]
    )
    writer = IndexWriter(directory, new)
    block = np.random.default_rng(1).standard_normal((writer.rows_per_part, bank.num_features), np.float32)
    for start in range(0, num_pictures, len(block)):
        places = range(start, min(start + len(block), num_pictures))
        pictures = [{"path": b"/pictures/%09d.jpg" % i, "size": 0, "mtime_ns": 0} for i in places]
        writer.append(Rows(pa.Table.from_pylist(pictures, schema=SCHEMA), block[: len(places)]))


def read_all(index: FeatureIndex, threads: ThreadPoolExecutor) -> float:
    """Reads every byte of the features once, with NumPy's sum over pairs of them as one wide number.

    Examples:
      >>> with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as threads:
      ...     write_index(Path(folder), random_bank(8), num_pictures=5, dtype="float32")
      ...     _ = read_all(FeatureIndex.open(folder), threads)
    """
    pieces = [features[i : i + 4096] for _, features in index.blocks() for i in range(0, len(features), 4096)]
    with np.errstate(all="ignore"):
        return sum(threads.map(lambda piece: float(piece.reshape(-1).view(np.float64).sum()), pieces))


def anonymous_bytes() -> int:
    """How much memory of this process is not a mapped file.

    Examples:
      >>> anonymous_bytes() > 0
      True
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def query_variants(folder: Path, *, num_pictures: int, num_features: int) -> list[Variant]:
    """Makes the variants: reading, and queries, each for another class than the one before.

    Examples:
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     variants = query_variants(Path(folder), num_pictures=100, num_features=16)
      ...     for variant in variants:
      ...         _ = variant.call(0)
      >>> [variant.name for variant in variants]
      ['read', 'query', 'open_and_query', 'query_8_classes', 'query_normalizer', 'query_float16']
    """
    bank, normalized = (
        random_bank(num_features, normalizer_rows=rows) for rows in (0, min(_NORMALIZER_ROWS, num_features))
    )
    for dtype in ("float32", "float16"):
        (folder / dtype).mkdir()
        write_index(folder / dtype, bank, num_pictures=num_pictures, dtype=dtype)
    index, half = FeatureIndex.open(folder / "float32"), FeatureIndex.open(folder / "float16")
    index.normalizers(normalized)
    threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    calls = {
        "read": lambda i: read_all(index, threads),
        "query": lambda i: index.scores(bank, i % _NUM_CLASSES),
        "open_and_query": lambda i: FeatureIndex.open(folder / "float32").scores(bank, i % _NUM_CLASSES),
        "query_8_classes": lambda i: index.scores(bank, [(i + j) % _NUM_CLASSES for j in range(8)]),
        "query_normalizer": lambda i: index.scores(normalized, i % _NUM_CLASSES),
        "query_float16": lambda i: half.scores(bank, i % _NUM_CLASSES),
    }
    case = {"num_pictures": num_pictures, "num_features": num_features}
    return [Variant(name, call, case) for name, call in calls.items()]


def main() -> None:
    """Measures, writes the record and prints its table."""
    with tempfile.TemporaryDirectory() as folder, recording("search_index") as recorder:
        variants = query_variants(Path(folder), num_pictures=1_000_000, num_features=512)
        recorder.measure(variants, repetitions=15)
        query = next(variant for variant in variants if variant.name == "query")
        before = anonymous_bytes()
        for i in range(10):
            query.call(i)
        recorder.record.settings = {
            "anonymous_bytes": {"before_10_queries": before, "after": anonymous_bytes()}
        }


if __name__ == "__main__":
    main()
