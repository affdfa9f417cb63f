"""Train networks whose single logits can be trusted: flags -> runs -> one table.

python train.py                                   # about three minutes: 2,221 characters, two losses
python train.py --preset mnist-quick --loss all
python train.py --run-dir runs/mine --resume
"""

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import jax
import tyro

from pols_jax import cli
from pols_jax.benchmarking.records import describe_environment
from pols_jax.checks import unknown_name
from pols_jax.config import PRESETS, ConfigError, Experiment
from pols_jax.data import load
from pols_jax.evaluation import evaluate
from pols_jax.experiment_records import write_experiment_record
from pols_jax.experiments import run_experiment, saved_experiment
from pols_jax.output_files import check_writable
from pols_jax.slc_tables import slc_table
from pols_jax.training import RunOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Train networks whose single logits can be trusted, and compare them.

    Attributes:
      preset: Where the settings start from; other flags change them.
      experiment: What to train.
      options: How to train it.
      run_dir: Where everything is written; by default a new folder of runs/. Starting in the directory of an
        unfinished run goes on with it.
      resume: Go on with the run in --run-dir, with its own settings; an error if there is none.
      data_dir: Where prepared tfds data sets are; by default TFDS_DATA_DIR, or else tfds's own place.
      evaluate: Measure the trained networks on the test split at the end.
      record: Write everything about the experiment into this file: command, settings, versions, machine and measures.
      coordinator: With several hosts: HOST:PORT of the first one. On TPU pods and under SLURM this is found by itself.
      num_processes: With several hosts: how many.
      process_id: With several hosts: which one this is, from 0.
    """

    preset: str = next(iter(PRESETS))
    experiment: Annotated[Experiment, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Experiment)
    options: Annotated[RunOptions, tyro.conf.arg(name="")] = dataclasses.field(default_factory=RunOptions)
    run_dir: Path | None = None
    resume: bool = False
    data_dir: Path | None = None
    evaluate: bool = True
    record: Path | None = None
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def parse(arguments: list[str]) -> Flags:
    """Reads the flags: those given, over the settings of the run to resume or of the preset."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default=next(iter(PRESETS)))
    first.add_argument("--run-dir", type=Path)
    first.add_argument("--resume", action="store_true")
    known, _ = first.parse_known_args(arguments)
    if known.preset not in PRESETS:
        raise ConfigError(unknown_name("preset", known.preset, PRESETS))
    experiment = PRESETS[known.preset].experiment
    if known.resume:
        if known.run_dir is None:
            raise ConfigError("--resume needs the --run-dir of the run to go on with.")
        experiment = saved_experiment(known.run_dir)
        if experiment is None:
            raise ConfigError(f"There is no run in {known.run_dir} to resume.")
    presets = "\n".join(f"  {name}: {preset.promise}" for name, preset in PRESETS.items())
    return tyro.cli(
        Flags,
        args=arguments,
        default=Flags(preset=known.preset, experiment=experiment),
        description=f"Train networks whose single logits can be trusted, and compare them.\n\nPresets:\n{presets}",
    )


def main() -> None:
    """Trains what the flags ask for."""
    flags = parse(sys.argv[1:])
    flags.experiment.runs()  # a wrong loss or rate is found before data is read
    check_writable(flags.record)
    if flags.coordinator:
        jax.distributed.initialize(flags.coordinator, flags.num_processes, flags.process_id)
    elif "," in os.environ.get("TPU_WORKER_HOSTNAMES", "") or int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        jax.distributed.initialize()
    if flags.record is not None and jax.process_count() > 1:
        raise ConfigError(
            "--record is written by one host; train without it, then evaluate with eval_slc.py."
        )
    options = flags.experiment.options()
    if flags.data_dir is not None:
        options["data_dir"] = flags.data_dir
    dataset = load(flags.experiment.dataset, **options)
    environment = describe_environment(jax.local_devices())
    run_dir = flags.run_dir or Path("runs") / time.strftime(f"{dataset.name.split(':')[0]}-%Y%m%d-%H%M%S")
    outcomes = run_experiment(flags.experiment, dataset, run_dir, options=flags.options)
    if jax.process_count() > 1:
        return  # evaluation is a matter of one host: eval_slc.py
    if flags.record is not None:
        record = write_experiment_record(
            flags.record, flags.experiment, dataset, outcomes, run_dir=run_dir, environment=environment
        )
        slc_table([run["test"] for run in record["runs"]])
    elif flags.evaluate:
        slc_table([evaluate(outcome.run_dir, dataset=dataset) for outcome in outcomes])


if __name__ == "__main__":
    sys.exit(cli.run(main))
