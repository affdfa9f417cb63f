"""Trains networks that differ in something that no flag of ``pols train`` changes, and compares them on the validation split.

batch_cross_entropy: MNIST with what the paper leaves open, the optimizer, the batch size, and the epsilon that the authors' program has
inside the logarithm. The best trial is trained in full with three seeds and measured on the test split.

augmentation, omniglot_augmentation: how much the pictures of glyphs and of omniglot are distorted.

A study that is stopped goes on from its record.

python results/tools/validation_study.py augmentation results/study_augmentation.json
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pols_jax.benchmarking.records import describe_environment
from pols_jax.data import Dataset, load
from pols_jax.data.augmentation import augment_glyphs
from pols_jax.files import write_json
from pols_jax.schema import read_json
from pols_jax.training.config import RunConfig
from pols_jax.training.trainer import Trainer

# A trial is measured by the mean of this many looks at the validation split, at its end: one look is a matter of few pictures.
_LOOKS = 5


@dataclasses.dataclass(frozen=True)
class Trial:
    """A network to train: what distinguishes it, and its whole configuration.

    Attributes:
      settings: What is varied, by name.
      config: The run.
      augment: What is done to pictures; None for what the config says.
    """

    settings: Mapping[str, Any]
    config: RunConfig
    augment: Callable | None = None


def batch_cross_entropy_with_epsilon(logits, labels, *, where=None, axis_name=None, epsilon=1e-6):
    """Computes the batch cross-entropy as the paper's authors published it, of the rows that ``where`` keeps.

    The epsilon bounds what one example can cost.

    Examples:
      >>> logits, labels = jnp.array([[3.0, 0.0], [0.0, 3.0], [9.0, 9.0]]), jnp.array([0, 1, 0])
      >>> batch_cross_entropy_with_epsilon(logits, labels, where=jnp.array([True, True, False]))
      Array(0.0486, dtype=float32)
    """
    assert axis_name is None, "this form of the loss is for one device"
    where = jnp.ones(labels.shape, bool) if where is None else where
    num_examples = jnp.sum(where, dtype=logits.dtype)
    kept = jnp.where(jnp.broadcast_to(where[:, None], logits.shape), logits, -jnp.inf)
    true_probs = jnp.take_along_axis(jax.nn.softmax(kept, axis=(0, 1)), labels[:, None], axis=1)[:, 0]
    of_example = jnp.log(1 / (num_examples * (true_probs + epsilon)) + epsilon)
    return jnp.sum(jnp.where(where, of_example, 0)) / num_examples


def run_trial(trial: Trial, dataset: Dataset, *, looks: int = _LOOKS) -> dict[str, float]:
    """Trains a network, and returns the means of its last looks at the validation split of ``dataset``."""
    trainer = Trainer(trial.config, dataset)
    if trial.settings.get("epsilon"):
        loss = functools.partial(batch_cross_entropy_with_epsilon, epsilon=trial.settings["epsilon"])
        trainer.learner = trainer.learner._replace(loss=loss)
    if trial.augment is not None:
        trainer.augment = trial.augment
    state, seen = trainer.init(), []
    for look in range(looks):
        state, totals = trainer.advance(state, until=trial.config.steps * (looks + look + 1) // (2 * looks))
        if not np.isfinite(totals.last_loss):
            return {}
        seen.append(trainer.validate(state))
    return {name: float(np.mean([each[name] for each in seen])) for name in ("auprc", "accuracy")}


def augmentation_trials(
    steps: int, error: Callable[[Trial], float], *, dataset: str = "glyphs"
) -> Iterator[Trial]:
    """More and less distortion, as multiples of one that was chosen by eye; ``--augment distort`` has half."""
    by_eye = {"max_rotation": 0.1, "max_log_scale": 0.1, "max_shift": 0.04, "max_noise": 0.2}
    for loss in ("cross_entropy", "batch_cross_entropy"):
        for factor in (0.0, 0.5, 1.0, 2.0):
            augment = functools.partial(augment_glyphs, **{n: factor * v for n, v in by_eye.items()})
            config = RunConfig(dataset=dataset, loss=loss, steps=steps)
            yield Trial({"loss": loss, "distortion": factor}, config, augment)


def batch_cross_entropy_trials(steps: int, error: Callable[[Trial], float]) -> Iterator[Trial]:
    """MNIST: three optimizers with two rates each in batches of 128; the better rate of each in batches of 32 and 512."""
    rates = {"sgd": (1.0, 0.1), "momentum": (0.1, 0.01), "adam": (0.001, 0.0001)}

    def trial(optimizer, rate, batch_size, epsilon):
        config = RunConfig(
            dataset="mnist",
            loss="batch_cross_entropy",
            optimizer=optimizer,
            learning_rate=rate,
            schedule="constant",
            batch_size=batch_size,
            steps=steps,
        )
        varied = {name: getattr(config, name) for name in ("optimizer", "learning_rate", "batch_size")}
        return Trial(varied | {"epsilon": epsilon}, config)

    for epsilon in (0.0, 1e-6):
        best = []
        for optimizer in rates:
            tried = [trial(optimizer, rate, 128, epsilon) for rate in rates[optimizer]]
            yield from tried
            best.append(min(tried, key=error).settings)
        for settings in best:
            for batch_size in (32, 512):
                yield trial(settings["optimizer"], settings["learning_rate"], batch_size, epsilon)


STUDIES = {
    "augmentation": (augmentation_trials, 2_000),
    "omniglot_augmentation": (functools.partial(augmentation_trials, dataset="omniglot"), 1_000),
    "batch_cross_entropy": (batch_cross_entropy_trials, 10_000),
}
"""The trials of each study, and the steps of a trial."""

# What is trained in full, and measured on the test split, shows this many pictures: the paper's 10^5 steps of 128.
_FULL_EXAMPLES = 12_800_000


def study(
    name: str, record_path: Path, *, steps: int | None = None, full_examples: int = _FULL_EXAMPLES
) -> None:
    """Makes a study, and writes each trial into the record as soon as it is measured."""
    make_trials, default_steps = STUDIES[name]
    if record_path.exists():
        record = read_json(record_path)
    else:
        record = {"environment": describe_environment(jax.local_devices()), "study": name, "trials": []}
    found = {str(entry["settings"]): entry["validation"] for entry in record["trials"]}
    datasets: dict[str, Dataset] = {}

    def data(config: RunConfig) -> Dataset:
        if config.dataset not in datasets:
            datasets[config.dataset] = load(config.dataset, **config.options())
        return datasets[config.dataset]

    def error(trial: Trial) -> float:
        return 1 - found[str(trial.settings)].get("auprc", 0.0)

    best = None
    for trial in make_trials(steps or default_steps, error):
        key = str(trial.settings)
        if key not in found:
            found[key] = run_trial(trial, data(trial.config))
            entry = {"settings": trial.settings, "validation": found[key], "config": trial.config.to_json()}
            record["trials"].append(entry)
            write_json(record_path, record)
            print(trial.settings, found[key], flush=True)
        best = trial if best is None else min(best, trial, key=error)
    if name != "batch_cross_entropy" or best is None:
        return
    done = {entry["seed"] for entry in record.setdefault("full", [])}
    for seed in sorted({1, 2, 3} - done):
        steps = max(1, full_examples // best.config.batch_size)
        config = dataclasses.replace(best.config, steps=steps, seed=seed)
        dataset = data(config)
        measured = run_trial(
            Trial(best.settings, config), dataclasses.replace(dataset, validation=dataset.test), looks=1
        )
        record["full"].append(
            {"settings": best.settings, "seed": seed, "test": measured, "config": config.to_json()}
        )
        write_json(record_path, record)
        print(seed, best.settings, measured, flush=True)


def main(arguments: list[str]) -> None:
    """Makes the study that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("record", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--full-examples", type=int, default=_FULL_EXAMPLES)
    flags = parser.parse_args(arguments)
    study(flags.study, flags.record, steps=flags.steps, full_examples=flags.full_examples)


if __name__ == "__main__":
    main(sys.argv[1:])
