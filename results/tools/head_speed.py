"""What does --train head save? An epoch of the whole network against an epoch of its output layer on features.

    python results/tools/head_speed.py results/speed_head.json

resnet50 on random pictures of 224 x 224 pixels in 1,000 classes: what they show does not matter to the time. A call of
"whole" is one step of the whole network; a call of "head" is an epoch on the features, which are computed before.
"""

from recording import recording
from training_speed import random_dataset

from pols_jax.benchmarking.timing import Variant
from pols_jax.data import Dataset
from pols_jax.training.config import RunConfig
from pols_jax.training.features import feature_dataset
from pols_jax.training.learning import Learner
from pols_jax.training.trainer import Trainer

_NUM_CLASSES, _NUM_IMAGES = 1000, 256
_WHOLE_BATCH, _HEAD_BATCH = 16, 256


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


def main() -> None:
    """Measures, writes the record and prints its table."""
    dataset = random_dataset(_NUM_IMAGES, (224, 224, 3), _NUM_CLASSES)
    with recording("head") as recorder:
        recorder.measure(variants(dataset, model="resnet50", width=1.0), repetitions=5)


if __name__ == "__main__":
    main()
