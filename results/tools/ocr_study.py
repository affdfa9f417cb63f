"""Measures a network that somebody else trained: the text recognizer of the PyPI package rapidocr-onnxruntime.

Its output layer has 6,625 classes: blank, 6,623 characters, and space. The graph is cut before that layer. Pictures of single
Chinese characters are drawn in typefaces of Debian's fonts-noto-cjk and fonts-noto-cjk-extra. Some faces give features for the normalizers, without
labels; another one is for validation; others are the test. The record says in ``how`` what was done.

pip install rapidocr-onnxruntime onnx onnxruntime
python results/tools/ocr_study.py results/ocr.json
python results/tools/ocr_study.py quick.json --max-characters 20
"""

import argparse
import hashlib
import importlib.metadata
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import PIL
import PIL.features
from PIL import Image, ImageDraw, ImageFont

from pols_jax.benchmarking.records import describe_environment
from pols_jax.data.fonts import Face, characters_of, read_faces
from pols_jax.errors import ConfigError, DataError
from pols_jax.evaluation.measuring import estimates
from pols_jax.files import write_json
from pols_jax.metrics.class_blocks import ExampleStats, ScoredSplit
from pols_jax.metrics.thresholds import Rule, Thresholds
from pols_jax.search.class_bank import ClassBank

PACKAGE = "rapidocr-onnxruntime"
FILE = "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx"
FONTS = "/usr/share/fonts/opentype/noto/Noto*CJK-*.ttc"
FACES = {
    "fitting": (
        *("Noto Sans CJK SC Light", "Noto Sans CJK SC", "Noto Sans CJK SC Bold"),
        *("Noto Serif CJK SC Light", "Noto Serif CJK SC", "Noto Serif CJK SC Black"),
    ),
    "validation": ("Noto Serif CJK SC Medium",),
    "test": ("Noto Sans CJK SC Medium", "Noto Serif CJK SC Bold"),
}
_IDEOGRAPHS = range(0x4E00, 0xA000)
_HEIGHT, _PADDED_WIDTH, _TEXT_SIZE = 48, 64, 40
_BASELINE = 39  # the square of an ideograph reaches from 0.12 below the baseline to 0.88 above: 4 pixels are free on each side
_BATCH_SIZE = 32
_BLANK = 0
_RULE = Rule.parse("precision=0.9")
HOW = (
    "The graph is cut before its last MatMul. Its second factor is the kernel, and what the Add behind it adds is the bias. "
    "A Softmax follows in the file; it is left out, and logits are what is compared.",
    "The classes are blank, the characters in the metadata of the file, and space, as the package decodes them. All of them are in the softmax of all "
    "logits. Only ideographs (U+4E00 to U+9FFF) that every face has are drawn, so only they have an AUPRC.",
    f"A character is drawn black on a white square of {_HEIGHT} pixels, at {_TEXT_SIZE} pixels per em. As in the package, pixels are scaled to [-1, 1] "
    f"in three equal channels, and zeros are added on the right: to a width of {_PADDED_WIDTH} here, to 320 or more in the package.",
    "Text size and width were chosen by accuracy and time on some hundred characters in faces for fitting and validation.",
    "The network gives features for several positions of a picture, and blank is the likeliest class at most of them, by design of its CTC loss. A picture is "
    "represented by the one position where the logit of blank is lowest. This reads one row, and uses no label. 'same_position' is the share of validation "
    "pictures where the probability of blank is lowest at the same position.",
    "Normalizers are fitted to the features of the faces for fitting, without labels. The validation face decides when a fit stops, which normalizer "
    "is chosen, and the one threshold for all classes, for a precision of 0.9. The test faces are measured once.",
)


class Recognizer(NamedTuple):
    """The network, cut before its output layer.

    Attributes:
      kernel: One row per class, shape ``[k, d]``.
      bias: One number per class, shape ``[k]``.
      class_names: One name per class.
      features_of: From pictures ``[m, 3, h, w]`` to features ``[m, positions, d]``.
      probabilities_of: From pictures to what the whole network gives, ``[m, positions, k]``.
      about: What the record says about it.
    """

    kernel: np.ndarray
    bias: np.ndarray
    class_names: tuple[str, ...]
    features_of: Any
    probabilities_of: Any
    about: dict[str, Any]


class Features(NamedTuple):
    """Features ``[n, d]`` of the pictures of a split, sorted by their labels ``[n]``."""

    features: np.ndarray
    labels: np.ndarray


def read_recognizer() -> Recognizer:
    """Reads the file of the package, and cuts its graph before the output layer."""
    try:
        import onnx
        import onnxruntime
        from onnx import numpy_helper

        package = importlib.metadata.distribution(PACKAGE)
    except ImportError as error:
        raise ConfigError(
            f"This needs the packages {PACKAGE}, onnx and onnxruntime; install them with pip."
        ) from error
    data = Path(str(package.locate_file(FILE))).read_bytes()
    model = onnx.load_from_string(data)
    arrays = {array.name: numpy_helper.to_array(array) for array in model.graph.initializer}
    # This file has its weights in nodes of the graph.
    for node in model.graph.node:
        if node.op_type == "Constant":
            arrays[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    place = max(i for i, node in enumerate(model.graph.node) if node.op_type == "MatMul")
    last = model.graph.node[place:]
    product, added = last[0], last[1]
    if [node.op_type for node in last] != ["MatMul", "Add", "Softmax"] or added.input[0] != product.output[0]:
        raise ConfigError(f"The file of {PACKAGE} {package.version} ends in other nodes than expected.")
    (characters,) = [entry.value for entry in model.metadata_props if entry.key == "character"]
    # A name may not be white space.
    names = [{"\u3000": "ideographic space"}.get(name, name) for name in characters.split("\n")]
    kernel, bias = arrays[product.input[1]].T, arrays[added.input[1]]

    def runner(content: bytes) -> Any:
        options = onnxruntime.SessionOptions()
        # Threads that spin while they wait slow down others on a busy machine.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        return lambda pictures: session.run(None, {session.get_inputs()[0].name: pictures})[0]

    del model.graph.output[:]
    model.graph.output.append(
        onnx.helper.make_tensor_value_info(product.input[0], onnx.TensorProto.FLOAT, None)
    )
    about = {
        "package": PACKAGE,
        "version": package.version,
        "license": package.metadata["License"],
        "file": FILE,
        "sha256": hashlib.sha256(data).hexdigest(),
        "last_nodes": [node.op_type for node in last],
        "num_classes": len(kernel),
        "num_features": kernel.shape[1],
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
    }
    class_names = ("blank", *names, "space")
    return Recognizer(
        np.ascontiguousarray(kernel),
        bias,
        class_names,
        runner(model.SerializeToString()),
        runner(data),
        about,
    )


def find_faces() -> dict[str, list[Face]]:
    """Finds the faces of each split; a `DataError` if one is not installed."""
    by_name = {face.name: face for face in read_faces([FONTS])}
    missing = [name for names in FACES.values() for name in names if name not in by_name]
    if missing:
        raise DataError(f"There is no {missing[0]} in {FONTS}; install fonts-noto-cjk-extra.")
    return {split: [by_name[name] for name in names] for split, names in FACES.items()}


def draw(face: Face, characters: Sequence[str]) -> np.ndarray:
    """Draws characters as the network wants them, float32 ``[m, 3, height, width]``."""
    font = ImageFont.truetype(
        str(face.path), _TEXT_SIZE, index=face.index, layout_engine=ImageFont.Layout.BASIC
    )
    pictures = np.zeros((len(characters), 3, _HEIGHT, _PADDED_WIDTH), np.float32)
    for picture, character in zip(pictures, characters, strict=True):
        image = Image.new("L", (_HEIGHT, _HEIGHT), 255)
        ImageDraw.Draw(image).text((_HEIGHT // 2, _BASELINE), character, fill=0, font=font, anchor="ms")
        picture[:, :, :_HEIGHT] = (np.asarray(image, np.float32) / 255 - 0.5) / 0.5
    return pictures


def all_positions(recognizer: Recognizer, face: Face, characters: Sequence[str]) -> np.ndarray:
    """The features of characters in a face at every position, ``[m, positions, d]``."""
    batches = [characters[start : start + _BATCH_SIZE] for start in range(0, len(characters), _BATCH_SIZE)]
    return np.concatenate([recognizer.features_of(draw(face, batch)) for batch in batches])


def least_blank(recognizer: Recognizer, features: np.ndarray, *, probability: bool = False) -> np.ndarray:
    """The position of each picture where the logit of blank, or its probability, is lowest."""
    blank = features @ recognizer.kernel[_BLANK] + recognizer.bias[_BLANK]
    if probability:
        for start in range(0, len(features), _BATCH_SIZE):
            batch = slice(start, start + _BATCH_SIZE)
            logits = features[batch] @ recognizer.kernel.T + recognizer.bias
            blank[batch] -= np.asarray(jax.nn.logsumexp(logits, axis=-1))
    return np.argmin(blank, axis=1)


def characters_to_draw(
    recognizer: Recognizer, faces: Sequence[Face], most: int | None
) -> tuple[np.ndarray, list[str]]:
    """The ids and characters of the classes that are ideographs of all faces; at most so many, a fixed random choice."""
    common = frozenset.intersection(*map(characters_of, faces))
    class_ids = np.array(
        [
            class_id
            for class_id, name in enumerate(recognizer.class_names)
            if len(name) == 1 and ord(name) in _IDEOGRAPHS and ord(name) in common
        ]
    )
    class_ids = np.sort(np.random.default_rng(0).permutation(class_ids)[:most])
    return class_ids, [recognizer.class_names[class_id] for class_id in class_ids]


def study(max_characters: int | None = None) -> dict[str, Any]:
    """Draws, fits and measures."""
    recognizer = read_recognizer()
    faces = find_faces()
    used = [face for each in faces.values() for face in each]
    class_ids, characters = characters_to_draw(recognizer, used, max_characters)
    largest_difference = _difference_from_whole(recognizer, used[0], characters[:8])
    began = time.perf_counter()
    splits, same_position = {}, 0.0
    for split, of_split in faces.items():
        found = []
        for face in of_split:
            features = all_positions(recognizer, face, characters)
            position = least_blank(recognizer, features)
            found.append(features[np.arange(len(features)), position])
            if split == "validation":
                likely = least_blank(recognizer, features, probability=True)
                same_position = float(np.mean(position == likely))
            print(f"{face.name}: {len(features)} pictures, {time.perf_counter() - began:.0f} s", flush=True)
        # By character, then by face: sorted by label, as `ScoredSplit` sorts.
        splits[split] = Features(np.concatenate(np.stack(found, axis=1)), np.repeat(class_ids, len(found)))
    feature_seconds, began = time.perf_counter() - began, time.perf_counter()
    bank = ClassBank.from_arrays(
        recognizer.kernel,
        recognizer.bias,
        recognizer.class_names,
        features=splits["fitting"].features,
        validation=splits["validation"],
    )
    fit_seconds = time.perf_counter() - began
    scores, accuracies = measure(recognizer, bank, splits)
    chosen = next(rung for rung in bank.ladder if rung.normalizer is bank.normalizer)
    return {
        "how": HOW,
        "network": recognizer.about | {"largest_difference": largest_difference},
        "faces": FACES,
        "fonts": {face.path.name: face.sha256 for face in used},
        "pillow": PIL.__version__,
        "freetype": PIL.features.version("freetype2"),
        "num_characters": len(characters),
        "num_pictures": {split: len(found.labels) for split, found in splits.items()},
        "same_position": same_position,
        "feature_seconds": round(feature_seconds, 1),
        "fit_seconds": round(fit_seconds, 1),
        **accuracies,
        "chosen": _name(chosen.normalizer),
        "scores": scores,
    }


def measure(
    recognizer: Recognizer, bank: ClassBank, splits: dict[str, Features]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Every score on the test pictures, with one threshold from the validation pictures; and what all logits decide."""
    scored = {
        name: ScoredSplit(*splits[name], recognizer.kernel, recognizer.bias)
        for name in ("validation", "test")
    }
    stats = {name: each.example_stats() for name, each in scored.items()}

    def score(name: str, subtracted: dict[str, np.ndarray], rows_read: int, normalizer: Any = None) -> dict:
        counts: dict[str, Any] = {}
        threshold = None
        for split in ("validation", "test"):
            shifted, shifted_stats = scored[split].minus(stats[split], subtracted[split])
            counts[split] = shifted.count(shifted_stats, thresholds=threshold, rank=split == "validation")
            if split == "validation":
                shared = Thresholds.from_counts(counts[split]).shared(_RULE)
                threshold = np.full((len(recognizer.kernel), 1), shared, np.float32)
        test = counts["test"]
        sizes = np.asarray(test.one_logit.class_sizes)
        is_drawn = sizes > 0
        # The order of confident pictures is not lost to rounding in the counts of all logits.
        own = {
            split: each.all_logits if name == "all logits" else each.one_logit
            for split, each in counts.items()
        }
        auprc = {
            split: float(np.nanmean(np.asarray(each.average_precision()))) for split, each in own.items()
        }
        found = {
            "score": name,
            "rows_read": rows_read,
            "auprc": auprc["test"],
            "validation_auprc": auprc["validation"],
            "shared_threshold_recall": float(np.mean(test.positives[is_drawn, 0] / sizes[is_drawn])),
            "shared_threshold_precision": float(test.positives.sum() / max(1, test.passing.sum())),
            "r_squared": None if normalizer is None else round(normalizer.fit.r_squared, 4),
            "error": None if normalizer is None else round(normalizer.fit.error, 4),
        }
        print(found, flush=True)
        return found

    scores = []
    for normalizer in (rung.normalizer for rung in bank.ladder):
        subtracted = {split: estimates(normalizer, splits[split].features) for split in scored}
        # An affine one is in the row of the class.
        num_rows = 0 if normalizer is None or normalizer.num_rows == 1 else normalizer.num_rows
        scores.append(score(_name(normalizer), subtracted, 1 + num_rows, normalizer))
    scores.append(
        score("all logits", {split: _log_z(each) for split, each in stats.items()}, len(recognizer.kernel))
    )
    predictions = stats["test"].prediction
    return scores, {
        "accuracy": float(np.mean(predictions == scored["test"].labels)),
        "blank_predicted": float(np.mean(predictions == _BLANK)),
    }


def _log_z(stats: ExampleStats) -> np.ndarray:
    return stats.peak + stats.log_sum


def _name(normalizer: Any) -> str:
    if normalizer is None:
        return "one logit"
    return "affine" if normalizer.num_rows == 1 else f"{normalizer.num_rows} rows"


def _difference_from_whole(recognizer: Recognizer, face: Face, characters: Sequence[str]) -> float:
    """How far the probabilities of features and output layer are from those of the whole network; raises if too far."""
    pictures = draw(face, characters)
    logits = recognizer.features_of(pictures) @ recognizer.kernel.T + recognizer.bias
    difference = np.abs(np.asarray(jax.nn.softmax(logits)) - recognizer.probabilities_of(pictures)).max()
    if not difference < 1e-4:
        raise ConfigError(f"Features and output layer are not the network: they differ by {difference:.2g}.")
    return float(difference)


def main(arguments: list[str]) -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--max-characters", type=int, help="draw only so many of the characters, to try it")
    options = parser.parse_args(arguments)
    command = ("python", "results/tools/ocr_study.py", *arguments)
    environment = describe_environment(jax.local_devices(), command=command)
    write_json(options.record, {"environment": environment, "ocr": study(options.max_characters)})


if __name__ == "__main__":
    main(sys.argv[1:])
