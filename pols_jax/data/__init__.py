"""Data sets and their batches: glyphs from installed fonts, tfds data sets, folders of pictures."""

from pols_jax.data.augmentation import augment_glyphs
from pols_jax.data.dataset import (
    ArraySplit,
    Batch,
    DataError,
    Dataset,
    DataWarning,
    Split,
    StreamSplit,
    scale_pixels,
)
from pols_jax.data.iterators import evaluation_batches
from pols_jax.data.loading import load
from pols_jax.data.sampling import sample_batch, steps_per_epoch

__all__ = [
    "ArraySplit",
    "Batch",
    "DataError",
    "DataWarning",
    "Dataset",
    "Split",
    "StreamSplit",
    "augment_glyphs",
    "evaluation_batches",
    "load",
    "sample_batch",
    "scale_pixels",
    "steps_per_epoch",
]
