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
from pols_jax.data.folders import load_folder
from pols_jax.data.glyphs import load_glyphs
from pols_jax.data.images import ImageError, decode_image
from pols_jax.data.iterators import evaluation_batches, prefetch_to_device, stream_batches
from pols_jax.data.loading import load
from pols_jax.data.sampling import sample_batch, steps_per_epoch
from pols_jax.data.tfds_sets import load_tfds

__all__ = [
    "ArraySplit",
    "Batch",
    "DataError",
    "DataWarning",
    "Dataset",
    "ImageError",
    "Split",
    "StreamSplit",
    "augment_glyphs",
    "decode_image",
    "evaluation_batches",
    "load",
    "load_folder",
    "load_glyphs",
    "load_tfds",
    "prefetch_to_device",
    "sample_batch",
    "scale_pixels",
    "steps_per_epoch",
    "stream_batches",
]
