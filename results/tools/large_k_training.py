"""Does a step of `pols train --head sampled` cost the same for any number of classes? And what do other heads cost?

    python results/tools/large_k_training.py results/large_k_training.json

The trainer of `pols train` with NCE and momentum on `synthetic:K`. First 256 examples, 256 features (an MLP with one layer), 1,000
drawn classes. Then the sizes of `--preset cjk`, exact and with drawn classes: what a picture shows does not matter to the time.
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
_SIZES: dict[str, Any] = {"hidden_sizes": (256,), "batch_size": 256, "num_noise": 1000}
_CJK: dict[str, Any] = {
    "hidden_sizes": (1024, 128),
    "batch_size": 64,
    "image_size": 28,
    "learning_rate": 0.3,
}


def variant(head: str, num_classes: int, *, steps_per_call: int, **settings: Any) -> Variant:
    """Makes a call that trains so many steps.

    Examples:
      >>> made = variant("sampled", 8, steps_per_call=2, hidden_sizes=(4,), batch_size=8, num_noise=4)
      >>> made.name, made.case["num_classes"]
      ('sampled', 8)
    """
    config = RunConfig(
        dataset=f"synthetic:{num_classes}",
        loss="noise_contrastive_estimation",
        head=head,  # type: ignore[arg-type]
        optimizer="momentum",
        steps=100_000,
        **({"learning_rate": 0.1} | settings),
    )
    trainer = Trainer(config, load(config.dataset, **config.options()))
    state = [trainer.init()]
    train: Any = trainer.dataset.train
    resident = trainer.placement.put((train.images, train.labels))
    program: Any = trainer._advance
    memory = program.lower(state[0], resident, jnp.int32(1)).compile().memory_analysis()

    def call(number: int):
        state[0], totals = trainer.advance(state[0], (number + 1) * steps_per_call)
        return totals

    case: dict[str, str | int] = {
        "num_classes": num_classes,
        "num_features": config.hidden_sizes[-1],
        "num_examples": config.batch_size,
        "num_noise": config.num_noise or 0,
        "num_drawn": (config.num_noise or 0) if head == "sampled" else num_classes,
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
        sampled = [variant("sampled", 2**power, steps_per_call=20, **_SIZES) for power in _POWERS]
        measure(sampled, repetitions=25, warmup=3, **options)
        del sampled
        blockwise = [variant("blockwise", 2**power, steps_per_call=1, **_SIZES) for power in (16, 18, 20)]
        measure(blockwise, repetitions=3, warmup=1, **options)
        del blockwise
        cjk = [
            variant(head, 42_174, steps_per_call=5, num_noise=num_noise, **_CJK)
            for head, num_noise in (("dense", 10_000), ("sampled", 2500))
        ]
        measure(cjk, repetitions=10, warmup=2, **options)
    for measured in measurements:
        per_second = 1e3 * int(measured.case["steps"]) / measured.median_ms
        print(measured.variant, measured.case, f"{per_second:.3g} steps per second")


if __name__ == "__main__":
    main()
