"""What does --train head save? An epoch of the whole network against an epoch of its output layer on features.

    python results/tools/head_speed.py results/speed_head.json

resnet50 on random pictures of 224 x 224 pixels in 1,000 classes: what they show does not matter to the time. A call of
"whole" is one step of the whole network; a call of "head" is an epoch on the features, which are computed before.
"""

import sys
from pathlib import Path

import jax
import numpy as np

from pols_jax.benchmarking.records import Record, Recorder, describe_environment
from pols_jax.benchmarking.timing import Variant, measure
from pols_jax.data import ArraySplit, Dataset
from pols_jax.training.config import RunConfig
from pols_jax.training.features import feature_dataset
from pols_jax.training.learning import Learner
from pols_jax.training.trainer import Trainer

_NUM_CLASSES, _NUM_IMAGES = 1000, 256
_WHOLE_BATCH, _HEAD_BATCH = 16, 256


def random_dataset(num_examples: int, *, size: int, num_classes: int) -> Dataset:
    """Random pictures.

    Examples:
      >>> random_dataset(5, size=64, num_classes=3).image_shape
      (64, 64, 3)
    """
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (num_examples, size, size, 3), dtype=np.uint8)
    train = ArraySplit(images, rng.integers(num_classes, size=num_examples, dtype=np.int32))
    few = ArraySplit(train.images[:8], train.labels[:8])
    names = tuple(map(str, range(num_classes)))
    return Dataset("random", names, (size, size, 3), train, few, few, provenance={})


def variants(dataset: Dataset, *, model: str, width: float) -> list[Variant]:
    """Makes the two variants: a step of the whole network, and an epoch of the output layer."""
    shared = {"model": model, "width": width, "optimizer": "momentum", "schedule": "constant"}
    whole = Trainer(RunConfig(**shared, batch_size=_WHOLE_BATCH), dataset)
    config = RunConfig(**shared, batch_size=_HEAD_BATCH, train="head", init_from="random weights")
    state = Learner.from_config(config, dataset).init(dataset.image_shape)
    backbone = {"params": state.params["backbone"], "batch_stats": state.batch_stats["backbone"]}
    head = Trainer(config, feature_dataset(config, dataset, backbone))
    epoch = len(dataset.train) // _HEAD_BATCH
    states = {"whole": whole.init(), "head": head.init()}

    def step_of_whole(call: int):
        states["whole"], totals = whole.advance(states["whole"], call + 1)
        return totals

    def epoch_of_head(call: int):
        states["head"], totals = head.advance(states["head"], (call + 1) * epoch)
        return totals

    case = {"model": model, "num_classes": dataset.num_classes, "num_images": len(dataset.train)}
    return [
        Variant("whole", step_of_whole, case | {"images_per_call": _WHOLE_BATCH}),
        Variant("head", epoch_of_head, case | {"images_per_call": epoch * _HEAD_BATCH}),
    ]


def epoch_seconds(record: Record, variant: str) -> float:
    """The time of one epoch of all images, from the median of the calls."""
    found = record.find(variant)
    return int(found.case["num_images"]) / int(found.case["images_per_call"]) * found.median_ms / 1000


def main() -> None:
    """Measures, writes the record and says how much faster the output layer alone is."""
    command = ("python", "results/tools/head_speed.py", *sys.argv[1:])
    environment = describe_environment(jax.devices()[:1], command=command)
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    dataset = random_dataset(_NUM_IMAGES, size=224, num_classes=_NUM_CLASSES)
    with Recorder(Record("head", {}, environment), path) as recorder:
        measure(
            variants(dataset, model="resnet50", width=1.0),
            repetitions=5,
            measurements=recorder.record.measurements,
            after_round=recorder.save_now_and_then,
        )
    whole, head = (epoch_seconds(recorder.record, name) for name in ("whole", "head"))
    print(
        f"An epoch of {_NUM_IMAGES} images: whole {whole:.1f} s, output layer {head:.3f} s, {whole / head:,.0f} times less."
    )


if __name__ == "__main__":
    main()
