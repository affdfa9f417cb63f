"""What the tools that measure share: the record in the file that the command line names, and the table that they print."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
from own_tables import tables_of

from pols_jax.benchmarking.records import Record, Recorder, describe_environment
from pols_jax.tables import print_tables


@contextlib.contextmanager
def recording(benchmark: str) -> Iterator[Recorder]:
    """Records a benchmark into the file that the first word of the command line names; prints its tables at the end."""
    command = ("python", f"results/tools/{Path(sys.argv[0]).name}", *sys.argv[1:])
    environment = describe_environment(jax.devices()[:1], command=command)
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with Recorder(Record(benchmark, {}, environment), path) as recorder:
        yield recorder
    print_tables(tables_of(recorder.record))
