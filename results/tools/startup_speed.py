"""How soon there is an answer: imports, a search of one picture, the first step of a training; each in a new process.

python results/tools/startup_speed.py RUN_DIR PICTURE QUERY --baseline DIR --json results/speed_startup.json

The baseline is another checkout, such as one of an older version: the same is timed there, in the same rounds.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
from own_tables import tables_of

from pols_jax.benchmarking.records import Record, Recorder, describe_environment
from pols_jax.benchmarking.timing import Measurement
from pols_jax.tables import print_tables

_ROOT = Path(__file__).parents[2]
_IMPORTS = {
    "import_jax": "import jax, jax.numpy",
    # Version 0.1.0 had it in a module of its own.
    "import_class_bank": "import jax, jax.numpy, pols_jax\n"
    "if hasattr(pols_jax, 'ClassBank'): pols_jax.ClassBank\n"
    "else: import pols_jax.class_bank",
}
_TRAIN = "train.py --preset glyphs --loss batch_cross_entropy --steps 1 --no-evaluate --quiet"


def finished_ms(words: Sequence[str], checkout: Path, environment: Mapping[str, str]) -> float:
    """Times a Python program from its start to its end.

    Examples:
      >>> finished_ms(["-c", "pass"], Path("."), {}) > 0
      True
    """
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    elapsed = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed: {done.stderr}")
    return 1e3 * elapsed


def first_step_ms(checkout: Path, environment: Mapping[str, str]) -> float:
    """Times a training from its start to the first line that it writes about its steps, and then stops it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *_TRAIN.split(), "--run-dir", f"{folder}/run"]
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=checkout, env=environment)
        while not Path(folder, "run", "metrics.jsonl").exists() and process.poll() is None:
            time.sleep(0.002)
        elapsed = time.perf_counter() - start
        process.terminate()
        if process.wait() not in (0, 143, -signal.SIGTERM):
            raise SystemExit(f"{_TRAIN} failed.")
    return 1e3 * elapsed


def measure(checkout: Path, search: Sequence[str], cache: Path) -> dict[str, float]:
    """Times everything once in a checkout. Data are in the cache; compiled programs are at the second start."""
    environment = dict(os.environ, PYTHONPATH=str(checkout), XDG_CACHE_HOME=str(cache))
    times = {name: finished_ms(["-c", code], checkout, environment) for name, code in _IMPORTS.items()}
    shutil.rmtree(cache / "pols_jax" / "compiled", ignore_errors=True)
    for start in ("first", "second"):
        times[f"search_{start}_start"] = finished_ms(search, checkout, environment)
        times[f"training_{start}_start"] = first_step_ms(checkout, environment)
    return times


def main() -> None:
    """Measures in rounds, writes the record and prints its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("run_dir", "picture", "query"):
        parser.add_argument(name)
    parser.add_argument("--baseline", type=Path)
    parser.add_argument(
        "--cache", type=Path, help="a cache directory that has the glyphs; they are drawn if not given"
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    checkouts = {"now": _ROOT} | ({"baseline": arguments.baseline} if arguments.baseline else {})
    paths = [str(Path(path).absolute()) for path in (arguments.run_dir, arguments.picture)]
    search = ["search.py", *paths, "--query", arguments.query, "--threshold", "0"]
    command = "python results/tools/startup_speed.py RUN_DIR PICTURE QUERY --baseline DIR"
    command += f" --repetitions {arguments.repetitions} --json {arguments.json}"
    environment = describe_environment(jax.local_devices(), command=command.split())
    record = Record("startup", {"repetitions": arguments.repetitions}, environment)
    with Recorder(record, arguments.json) as recorder, tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.repetitions + 1):
            for name, checkout in checkouts.items():
                for variant, ms in measure(checkout, search, arguments.cache or Path(folder)).items():
                    if number == 0:  # the first round fills the caches of data and of files
                        continue
                    if (found := record.find(variant, checkout=name)) is None:
                        found = Measurement(variant, {"checkout": name}, None, [])
                        record.measurements.append(found)
                    found.times_ms.append(round(ms, 1))
            recorder.save()
    print_tables(tables_of(record))


if __name__ == "__main__":
    main()
