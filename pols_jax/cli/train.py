"""``pols train``: flags -> runs -> one table, and the commands that come next."""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from pols_jax.cli.compiling import keep_compiled_programs
from pols_jax.cli.flags import Page, given_flags, parse as parse_flags
from pols_jax.cli.loading import FOLDER, check_start, load_data, said_by_loaders
from pols_jax.cli.running import HostFlags, draws_bars
from pols_jax.errors import ConfigError, shell_word, unknown_name
from pols_jax.files import check_writable
from pols_jax.training.config import Experiment, RunOptions
from pols_jax.training.presets import PRESETS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(HostFlags):
    """Train networks whose single logits can be trusted, and compare them.

    Attributes:
      preset: Where the settings start from; other flags change them.
      presets: List the presets, and train nothing.
      experiment: What to train.
      options: How to train it.
      run_dir: By default a new folder of runs/. An unfinished run there goes on.
      resume: Go on with the run in --run-dir, with its own settings.
      data_dir: Prepared tfds data sets; by default TFDS_DATA_DIR, or tfds's own place.
      normalizer: Fit a normalizer: its rows, affine, choose or none; else the preset's.
      evaluate: Measure the trained networks on the test split at the end.
      compilation_cache: Keep compiled programs for the next start.
      record: Write command, settings, versions, machine and measures to this file.
    """

    preset: str = next(iter(PRESETS))
    presets: bool = False
    experiment: Annotated[Experiment, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Experiment)
    options: Annotated[RunOptions, tyro.conf.arg(name="")] = dataclasses.field(default_factory=RunOptions)
    run_dir: Path | None = None
    resume: bool = False
    data_dir: Path | None = None
    normalizer: str | None = None
    evaluate: bool = True
    compilation_cache: bool = True
    record: Path | None = None


PAGE = Page(
    "pols train",
    "[FLAGS]",
    "Train networks whose single logits can be trusted, and compare them. Defaults are in brackets.",
    """
pols train                                 # about three minutes: 2,221 characters, two losses
pols train --preset mnist-quick --loss all
pols train --dataset folder:photos --loss batch_cross_entropy
pols train --run-dir runs/mine --resume
""",
    {
        "data": "dataset data_dir image_size channels max_bytes augment max_classes characters fonts train_faces "
        "validation_faces test_faces",
        "model": "model width hidden_sizes auxiliary dtype init_from train feature_passes pixels head mesh bias_init",
        "loss": "loss margin alpha num_noise noise",
        "optimization": "steps batch_size accumulate learning_rate backbone_rate optimizer momentum weight_decay clip_norm "
        "class_weights schedule warmup_steps decay_steps decay_rate sweep_steps choose_by seed",
        "run": "preset presets run_dir resume evaluate_every stop_after checkpoint_every keep_checkpoints on_nan workers normalizer "
        "evaluate compilation_cache",
        "output": "record tensorboard quiet",
        "hosts": "coordinator num_processes process_id host_timeout",
    },
)


# What the commands of older records call a flag; --no-augment stays.
_OLD_FLAGS = {"--bias-start": ["--bias-init"], "--no-augment": ["--augment", "none"]}

_MOST_WORKERS = 8

# Whoever gives one of these has chosen a network: a folder's pictures do not choose one then.
_NETWORK_FLAGS = {"preset", "resume", "model", "hidden_sizes", "init_from"}


def parse(arguments: Sequence[str], *, of_folders: str = "folder") -> Flags:
    """Reads the flags: those given, over the settings of the run to resume or of the preset.

    Without --preset, a folder's is ``of_folders``, and that of all other data the first.
    """
    if "-h" in arguments or "--help" in arguments:
        return parse_flags(Flags, ["--help"], PAGE)
    arguments = _with_new_flags(arguments)
    given = given_flags(Flags, arguments, PAGE)
    is_folder = given.get("dataset", [""])[0].startswith(FOLDER)
    preset, *_ = given.get("preset", [of_folders if is_folder else next(iter(PRESETS))])
    if preset not in PRESETS:
        raise ConfigError(unknown_name("preset", preset, PRESETS) + " See: pols train --presets.")
    experiment = PRESETS[preset].experiment
    if "resume" in given and "--no-resume" not in arguments:
        if "run_dir" not in given:
            raise ConfigError("--resume needs the --run-dir of the run to go on with.")
        from pols_jax.training.experiments import saved_experiment

        run_dir = Path(given["run_dir"][0])
        experiment = saved_experiment(run_dir)
        if experiment is None:
            raise ConfigError(f"There is no run in {run_dir} to resume.")
    return parse_flags(Flags, arguments, PAGE, default=Flags(preset=preset, experiment=experiment))


def _with_new_flags(arguments: Sequence[str]) -> list[str]:
    return [word for given in arguments for word in _OLD_FLAGS.get(given, [given])]


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains what the flags ask for."""
    arguments = sys.argv[1:] if arguments is None else arguments
    flags = parse(arguments)
    if flags.presets:
        print_presets()
        return
    check_writable(flags.record)
    say = (lambda text: None) if flags.options.quiet else functools.partial(print, flush=True)
    say("Starting JAX ...")
    if flags.compilation_cache:
        keep_compiled_programs()
    with said_by_loaders(say, draws_bars=draws_bars(quiet=flags.options.quiet)), flags.joined():
        train(flags, say, arguments)


def train(flags: Flags, say: Callable[[str], None], arguments: Sequence[str]) -> None:
    """Trains what the flags ask for, once all hosts are there."""
    import jax

    from pols_jax.benchmarking.records import describe_environment
    from pols_jax.data import list_folder, picture_sizes
    from pols_jax.evaluation.experiment_records import write_experiment_record
    from pols_jax.evaluation.measuring import evaluate
    from pols_jax.evaluation.normalizing import check_rows, normalize
    from pols_jax.evaluation.slc_records import SlcRecord
    from pols_jax.evaluation.slc_tables import slc_tables
    from pols_jax.tables import print_tables
    from pols_jax.training.experiments import run_experiment
    from pols_jax.training.feasibility import check_feasible
    from pols_jax.training.placement import check_batch_size
    from pols_jax.training.run_dirs import run_directory
    from pols_jax.training.sensible_start import are_small, describe_start, with_picture_shape

    if flags.record is not None and jax.process_count() > 1:
        raise ConfigError("--record is written by one host; train without it, then evaluate with pols eval.")
    rows = flags.normalizer or PRESETS[flags.preset].normalizer
    check_rows(rows, or_none=True)
    check_batch_size(flags.experiment.batch_size, jax.device_count())
    experiment, folder = flags.experiment, None
    say(f"Loading {experiment.dataset} ...")
    if experiment.dataset.startswith(FOLDER):
        listing = list_folder(experiment.dataset.removeprefix(FOLDER))
        folder = listing, picture_sizes(listing)
        if _NETWORK_FLAGS.isdisjoint(given_flags(Flags, _with_new_flags(arguments), PAGE)) and not are_small(
            folder[1]
        ):
            flags = parse(arguments, of_folders="photos")
        experiment = with_picture_shape(flags.experiment, folder[1])
        check_start(experiment, *folder)
    dataset = load_data(experiment, folder, flags.data_dir, say)
    check_feasible(experiment.runs()[0], dataset)
    environment = describe_environment(jax.local_devices())
    with run_directory(flags.run_dir, name=dataset.name.split(":")[0]) as run_dir:
        say(f"{describe_start(experiment, dataset)} Writing to {run_dir}.")
        options = flags.options
        if options.workers is None:  # not the default of `fit`: a program has to be ready for processes
            options = dataclasses.replace(options, workers=min(_MOST_WORKERS, os.cpu_count() or 1))
        outcomes = run_experiment(experiment, dataset, run_dir, options=options)
    for outcome in outcomes if rows != "none" else ():
        say(f"Fitting a normalizer to {outcome.run_dir} ...")
        options = {"dataset": dataset, "seed": experiment.seed, "quiet": flags.options.quiet}
        try:
            normalize(outcome.run_dir, rows=rows, **options)
        except ConfigError as error:
            if flags.normalizer is not None:
                raise
            say(f"No normalizer: {error}")
    records: list[SlcRecord] = []
    if flags.record is not None:
        record = write_experiment_record(
            flags.record, flags.experiment, dataset, outcomes, run_dir=run_dir, environment=environment
        )
        records = [SlcRecord.from_json(run["test"]) for run in record["runs"]]
    elif flags.evaluate:
        records = [evaluate(outcome.run_dir, dataset=dataset) for outcome in outcomes]
    if jax.process_index() > 0:
        return  # the first host says what was found
    if records:
        print_tables(slc_tables(records))
    best = max(outcomes, key=lambda outcome: outcome.validation.get("auprc", 0.0))
    runs = [outcome.run_dir for outcome in outcomes]
    say(next_steps(run_dir, runs, best.run_dir, dataset.class_names[0], bool(records)))


def next_steps(run_dir: Path, runs: Sequence[Path], best: Path, class_name: str, are_evaluated: bool) -> str:
    """Says where the runs are, and which commands come next.

    Examples:
      >>> print(next_steps(Path("runs/a b"), [Path("runs/a b")], Path("runs/a b"), "digit one", True))
      Trained: 'runs/a b'
      Next:
        pols search 'runs/a b' --split test --query='digit one'  # or your own pictures: a folder for --split test
        pols eval 'runs/a b'
    """
    search = f"  pols search {shell_word(best)} --split test --query={shell_word(class_name)}"
    steps = [
        f"{search}  # or your own pictures: a folder for --split test",
        f"  pols eval {shell_word(run_dir)}",
    ]
    steps = steps if are_evaluated else steps[::-1]
    return "\n".join([f"Trained: {' '.join(map(shell_word, runs))}", "Next:", *steps])


def print_presets() -> None:
    """Prints what every preset trains, how long that takes and what comes out."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_lines=False, pad_edge=False)
    table.add_column("preset", no_wrap=True)
    for heading in ("what", "time", "1-AUPRC of one logit"):
        table.add_column(heading, ratio=1)
    for name, preset in PRESETS.items():
        table.add_row(name, preset.what, preset.time, preset.score)
    Console(highlight=False).print(table)
    print("pols train --preset NAME trains one; other flags change it.")
