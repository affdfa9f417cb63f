from .augmentation import augment_glyphs, crop_pictures, find_augmentation
from .dataset import ArraySplit, Batch, Dataset, Split, StreamSplit, scale_pixels
from .folder_listing import FolderListing, PictureSizes, list_folder, picture_sizes
from .folders import DataError, DataWarning, load_folder, load_listing
from .glyphs import load_glyphs
from .images import ImageError, decode_image
from .iterators import evaluation_batches, prefetch_to_device, stream_batches
from .loading import load
from .sampling import augment_batch, sample_batch, steps_per_epoch
from .synthetic import load_synthetic
from .tfds_sets import load_tfds

__all__ = [
    "ArraySplit",
    "Batch",
    "DataError",
    "DataWarning",
    "Dataset",
    "FolderListing",
    "ImageError",
    "PictureSizes",
    "Split",
    "StreamSplit",
    "augment_batch",
    "augment_glyphs",
    "crop_pictures",
    "decode_image",
    "evaluation_batches",
    "find_augmentation",
    "list_folder",
    "load",
    "load_folder",
    "load_glyphs",
    "load_listing",
    "load_synthetic",
    "load_tfds",
    "picture_sizes",
    "prefetch_to_device",
    "sample_batch",
    "scale_pixels",
    "steps_per_epoch",
    "stream_batches",
]
