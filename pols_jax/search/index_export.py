"""An index as one Parquet file, for a vector database: see docs/vector_databases.md."""

import os
import secrets
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pols_jax.errors import FileError, reason_of
from pols_jax.search.class_bank import ClassBank
from pols_jax.search.index import FeatureIndex
from pols_jax.search.searching import utf8_name


def export_index(index: FeatureIndex, bank: ClassBank, directory: str | os.PathLike) -> Path:
    """Writes ``export.parquet``, with a row per picture: id, path, size, normalizer and features.

    The score of a class is ``features @ row + bias - normalizer``. The id is the place of the picture in the index, so
    that ``index.path(id)`` is its path; in the file, bytes of a path that are not UTF-8 are escapes.

    Args:
      index: The index.
      bank: Its network.
      directory: Where the file is written, at once or not at all.

    Returns:
      The path of the file.

    Raises:
      FileError: if it cannot be written.
    """
    normalizers = index.normalizers(bank)
    path = Path(directory) / "export.parquet"
    beside = path.with_name(f".{secrets.token_hex(8)}.tmp")
    schema = pa.schema(
        {
            "id": pa.int64(),
            "path": pa.string(),
            "size": pa.int64(),
            "normalizer": pa.float32(),
            "features": pa.list_(pa.float32(), index.num_features),
        }
    )
    try:
        with pq.ParquetWriter(beside, schema) as writer:
            for start, block in index.blocks():
                here = slice(start, start + len(block))
                flat = pa.array(np.asarray(block, np.float32).reshape(-1))
                columns = [
                    pa.array(np.arange(here.start, here.stop)),
                    pa.array([utf8_name(name) for name in index.paths[here]], pa.string()),
                    pa.array(index.sizes[here]),
                    pa.array(normalizers[here]),
                    pa.FixedSizeListArray.from_arrays(flat, index.num_features),
                ]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise FileError(f"{path} could not be written ({reason_of(error)}).") from error
    finally:
        beside.unlink(missing_ok=True)
    return path
