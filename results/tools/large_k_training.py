"""Does a step of `pols train --head sampled` cost the same for any number of classes? And what does --head blockwise cost?

    python results/tools/large_k_training.py results/large_k_training.json

The trainer of `pols train` on `synthetic:K`: 256 examples, 256 features (an MLP with one layer), momentum, 1,000 drawn classes.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pols_jax.benchmarking.records import Record, Recorder, describe_environment
from pols_jax.benchmarking.timing import Variant, measure
from pols_jax.cli.compiling import keep_compiled_programs
from pols_jax.data import load
from pols_jax.training.config import RunConfig
from pols_jax.training.trainer import Trainer

_POWERS = (12, 14, 16, 18, 20)


def variant(
    head: str, num_classes: int, *, steps_per_call: int, batch_size: int = 256, num_noise: int = 1000
) -> Variant:
    """Makes a call that trains so many steps.

    Examples:
      >>> made = variant("sampled", 8, steps_per_call=2, batch_size=8, num_noise=4)
      >>> made.name, made.case["num_classes"]
      ('sampled', 8)
    """
    config = RunConfig(
        dataset=f"synthetic:{num_classes}",
        hidden_sizes=(256,),
        batch_size=batch_size,
        loss="noise_contrastive_estimation",
        num_noise=num_noise,
        head=head,  # type: ignore[arg-type]
        optimizer="momentum",
        learning_rate=0.1,
        steps=100_000,
    )
    trainer = Trainer(config, load(config.dataset))
    state = [trainer.init()]
    train: Any = trainer.dataset.train
    resident = trainer.placement.put((train.images, train.labels))
    program: Any = trainer._advance
    memory = program.lower(state[0], resident, jnp.int32(1)).compile().memory_analysis()

    def call(number: int):
        state[0], totals = trainer.advance(state[0], (number + 1) * steps_per_call)
        return totals

    case = {
        "num_classes": num_classes,
        "num_features": 256,
        "num_examples": batch_size,
        "num_noise": num_noise,
        "steps": steps_per_call,
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state[0])),
        "bytes_beyond_state": memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
    }
    return Variant(head, call, case)


def main() -> None:
    """Measures, writes the record and prints the medians."""
    keep_compiled_programs()
    command = ("python", "results/tools/large_k_training.py", *sys.argv[1:])
    environment = describe_environment(jax.devices()[:1], command=command)
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with Recorder(Record("large_k_training", {}, environment), path) as recorder:
        measurements = recorder.record.measurements
        options = {"measurements": measurements, "after_round": recorder.save_now_and_then}
        sampled = [variant("sampled", 2**power, steps_per_call=20) for power in _POWERS]
        measure(sampled, repetitions=30, warmup=3, **options)
        del sampled
        blockwise = [variant("blockwise", 2**power, steps_per_call=1) for power in (16, 18, 20)]
        measure(blockwise, repetitions=3, warmup=1, **options)
    for measured in measurements:
        per_second = 1e3 * int(measured.case["steps"]) / measured.median_ms
        print(measured.variant, measured.case, f"{per_second:.3g} steps per second")


if __name__ == "__main__":
    main()
