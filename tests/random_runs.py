"""Runs with random parameters, which need no training: for tests in which it does not matter what a network has learned."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pols_jax.metrics.thresholds import MIN_EXAMPLES, Thresholds
from pols_jax.normalizers import Clusters, Fit, Normalizer
from pols_jax.search.class_bank import ClassBank
from pols_jax.training.checkpoints import Checkpoints
from pols_jax.training.config import RunConfig
from pols_jax.training.learning import make_model
from pols_jax.training.run_files import RunInfo, write_run_info
from pols_jax.training.run_normalizer import write_normalizer
from pols_jax.training.runs import Run

NAMES = [
    f"DIGIT {name}"
    for name in ["ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE"]
]
SHAPE = (32, 32, 1)
IMAGES = np.random.default_rng(1).integers(0, 256, (64, *SHAPE)).astype(np.uint8)


def make_run(directory, normalizer_rows=0, names=NAMES, seed=0, num_own=0, **options):
    """A run with random parameters, and a random normalizer: what a network has learned does not matter here."""
    rng = np.random.default_rng(seed)
    config = RunConfig(characters="0030-0039", steps=2, **({"width": 0.1} | options))
    model = make_model(config, len(names))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, *SHAPE), jnp.float32))
    state = {
        "params": jax.tree.map(lambda leaf: rng.normal(0, 0.2, leaf.shape).astype("f"), shapes["params"]),
        "batch_stats": jax.tree.map(
            lambda leaf: rng.uniform(0.5, 1.5, leaf.shape).astype("f"), shapes["batch_stats"]
        ),
    }
    directory.mkdir()
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(2, state, config=config.to_json())
        checkpoints.wait()
    info = RunInfo(config=config, num_classes=len(names), image_shape=SHAPE, data={})
    write_run_info(directory, info, names)
    if normalizer_rows:
        num_features = state["params"]["head"]["kernel"].shape[1]
        kernel, bias = rng.normal(size=(normalizer_rows, num_features)), rng.normal(size=normalizer_rows)
        normalizer = Normalizer(
            *(jnp.asarray(part, jnp.float32) for part in (kernel, bias)), Fit(1.0, 0.0, 0)
        )
        if num_own:
            cluster_of = np.arange(len(names)) % normalizer_rows
            head = Run.open(directory).own_head
            clusters = Clusters.of(cluster_of, *head, num_clusters=normalizer_rows, num_own=num_own)
            normalizer = dataclasses.replace(normalizer, clusters=clusters)
        write_normalizer(directory, normalizer, checkpoint=Run.open(directory).checkpoint)
    return directory


def with_thresholds(directory):
    """Gives a run thresholds that let some of the images pass: of seven its own, of the other classes the common one."""
    logits = ClassBank.open(directory).logits(IMAGES, [7, 1])
    labels = np.repeat([7, 1], [MIN_EXAMPLES, 3])
    own = np.concatenate([logits[:MIN_EXAMPLES, 0], logits[:3, 1]])
    passing = np.array(
        [np.sum(own[labels == label] >= logit) for label, logit in zip(labels, own, strict=True)]
    )
    false_passing = np.array([np.sum(logits >= logit) for logit in own])
    thresholds = Thresholds(labels, own, 2 * passing, passing, false_passing)
    thresholds.save(directory, checkpoint=Run.open(directory).checkpoint)
    return directory
