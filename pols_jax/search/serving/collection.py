"""A network and the features of many pictures: every question that the server answers, without the server."""

import collections
import dataclasses
import functools
import io
import os
import threading
import time

import numpy as np
from jaxtyping import Float, Int
from PIL import Image

import pols_jax
from pols_jax.data.images import decode_image, decode_thumbnail
from pols_jax.errors import ConfigError, DataError, RunError, printable
from pols_jax.metrics.thresholds import DEFAULT_RULES, MIN_EXAMPLES, Curve, Rule
from pols_jax.search.class_bank import ClassBank
from pols_jax.search.index import FeatureIndex
from pols_jax.search.serving.answers import (
    ClassAnswer,
    ClassesAnswer,
    CostAnswer,
    CurveAnswer,
    DecisionAnswer,
    HealthAnswer,
    HitAnswer,
    SearchAnswer,
    ThresholdAnswer,
)
from pols_jax.search.serving.completion import NameCompletion

MAX_PIXELS = 100_000_000
"""A picture with more pixels is neither decided about nor shown."""

MAX_UPLOAD_BYTES = 32 * 2**20
"""A larger upload is refused."""

_MAX_POINTS = 256  # of a curve; a slider has no use for more
_SCORE_BYTES = 64 * 2**20  # of scores that are kept for the next question about the same class
_SOME_PATHS = 1000  # of which the common folder is found
_NO_CLASS = -1  # has no validation examples, and so the thresholds of all classes
_SMALL = 96  # pixels; a picture with fewer is not compressed with losses


@dataclasses.dataclass(frozen=True)
class View:
    """The pictures as they were at a moment: pictures keep their numbers as long as the version is the same."""

    index: FeatureIndex | None
    version: int
    root: str

    @property
    def num_pictures(self) -> int:
        """How many pictures there are."""
        return 0 if self.index is None else len(self.index)


class Collection:
    """Answers questions about the pictures of an index, or of none; any number of threads may ask.

    Args:
      bank: The network.
      index: The pictures; `show` exchanges them later.
      name: What the network is called.
      folder: The name of the folder that is watched for new ones, if one is.
    """

    def __init__(
        self, bank: ClassBank, index: FeatureIndex | None = None, *, name: str = "", folder: str | None = None
    ):
        self.bank, self.name, self.folder = bank, name, folder
        self._completion = NameCompletion(bank.names)
        self._lock = threading.Lock()
        self._scores: collections.OrderedDict[tuple[int, int, int], np.ndarray] = collections.OrderedDict()
        self.view = View(index, 0, _root(index))

    def show(self, index: FeatureIndex | None, *, has_only_grown: bool) -> None:
        """Takes another index; if pictures were only added at its end, those before keep their numbers."""
        self.view = View(index, self.view.version + (not has_only_grown), _root(index))

    def warm_up(self) -> None:
        """Compiles what questions need, so that the first one does not wait."""
        image = np.zeros((1, *self.bank.image_shape), np.uint8)
        self.bank.logits(image, 0)
        self.threshold(0, None)
        self.scores(self.view, 0)

    def health(self) -> HealthAnswer:
        """Says what is served."""
        return HealthAnswer(
            status="ok",
            version=pols_jax.__version__,
            run=printable(self.name),
            num_classes=len(self.bank.names),
            num_pictures=self.view.num_pictures,
            normalizer_rows=0 if self.bank.normalizer is None else self.bank.normalizer.num_rows,
            has_thresholds=self._why_no_thresholds is None,
            folder=None if self.folder is None else printable(self.folder),
            max_upload_bytes=MAX_UPLOAD_BYTES,
        )

    def complete(self, text: str, limit: int) -> ClassesAnswer:
        """Finds classes by a part of their names."""
        found = self._completion.complete(text, limit=limit)
        return ClassesAnswer(len(self.bank.names), tuple(map(self._class, found)))

    def class_id(self, name_or_id: str) -> int:
        """Finds a class by its name, or by ``#`` and its id."""
        number = name_or_id.removeprefix("#")
        if number != name_or_id and number.isdecimal() and len(number) < 10:
            return self.bank.class_id(int(number))
        return self.bank.class_id(name_or_id)

    def search(self, class_id: int, rule: Rule | None, *, limit: int, offset: int = 0) -> SearchAnswer:
        """Finds the pictures of a class.

        Args:
          class_id: The class.
          rule: How to choose the threshold; by default recall=0.9, or none if the run was not evaluated.
          limit: How many hits are told.
          offset: How many of the best are left out, which were told before.
        """
        start = time.perf_counter()
        view, threshold = self.view, self.threshold(class_id, rule)
        scores, from_memory = self.scores(view, class_id)
        passing = _passing(scores, threshold)
        best = _best_first(scores, passing, offset + limit)[offset:]
        cost = self._cost(view.num_pictures, start, from_memory=from_memory)
        hits = tuple(self.hit(view, int(i), float(scores[i])) for i in best)
        return SearchAnswer(self._class(class_id), threshold, len(passing), hits, cost)

    def new_hits(
        self, before: View, seen: View, class_id: int, threshold: ThresholdAnswer | None, most: int
    ) -> list[HitAnswer]:
        """The best of the pictures that have come between two views, the best one last: who puts each in front has it there."""
        first = before.num_pictures
        scores = self.scores(seen, class_id)[0][first:]
        best = _best_first(scores, _passing(scores, threshold), most)
        return [self.hit(seen, first + int(i), float(scores[i])) for i in best[::-1]]

    def decide(self, content: bytes, class_id: int, rule: Rule | None) -> DecisionAnswer:
        """Tells whether the picture in the content of a file is of a class."""
        start = time.perf_counter()
        threshold = self.threshold(class_id, rule)
        shape = self.bank.image_shape
        image = decode_image(content, shape, name="The picture", max_pixels=MAX_PIXELS)
        score = float(self.bank.logits(image[None], class_id)[0])
        if not np.isfinite(score):
            raise DataError("The network gives this picture a score that is no number.")
        is_class = None if threshold is None else score >= threshold.value
        cost = self._cost(1, start, from_memory=False)
        return DecisionAnswer(self._class(class_id), is_class, score, threshold, cost)

    def threshold(self, class_id: int, rule: Rule | None) -> ThresholdAnswer | None:
        """Chooses the threshold of a class, and says what validation found at it; None if there is none.

        Raises:
          RunError: if the rule needs an evaluated run.
          ConfigError: if no threshold satisfies the rule.
        """
        if self._why_no_thresholds is not None:
            if rule is None:
                return None
            if rule.kind != "value":
                raise RunError(self._why_no_thresholds)
            return ThresholdAnswer(rule.value, "given", None, None, None)
        rule = rule or DEFAULT_RULES[0]
        value, origin = self._common_thresholds.get(rule, np.nan), "all classes"
        if np.isnan(value) or self._has_own(class_id):
            value, origin = self.bank.threshold(class_id, rule)
        curve = self._curve(class_id)
        return ThresholdAnswer(value, origin, curve.origin, *curve.at(value))

    def thresholds(self, class_id: int) -> CurveAnswer:
        """Lists thresholds of a class from strict to lenient, with what validation found at each."""
        if self._why_no_thresholds is not None:
            raise RunError(self._why_no_thresholds)
        curve, thresholds = self._curve(class_id), self.bank.thresholds
        last = len(curve.thresholds) - 1
        chosen = np.unique(np.linspace(0, last, min(_MAX_POINTS, last + 1)).round().astype(int))
        rules = {str(rule): thresholds.of_class(rule, class_id).value for rule in DEFAULT_RULES}
        return CurveAnswer(
            asked=self._class(class_id),
            origin=curve.origin,
            num_examples=curve.num_examples,
            class_examples=int(np.count_nonzero(thresholds.labels == class_id)),
            thresholds=tuple(curve.thresholds[chosen].tolist()),
            precision=tuple(curve.precision[chosen].tolist()),
            recall=tuple(curve.recall[chosen].tolist()),
            rules={rule: None if np.isnan(value) else value for rule, value in rules.items()},
        )

    def picture_path(self, picture: str) -> str:
        """The path of a picture of the index, by the id that a hit has."""
        version, _, number = picture.partition("-")
        view = self.view
        if not (version.isdecimal() and number.isdecimal() and len(picture) < 30):
            raise DataError("A picture is asked for by the id that a search gives it, such as 0-12.")
        if view.index is None or int(version) != view.version or int(number) >= view.num_pictures:
            raise DataError(f"There is no picture {version}-{number}, or no longer; search again.")
        return view.index.path(int(number))

    def thumbnail(self, path: str, size: int) -> tuple[bytes, str]:
        """Draws a picture at most this large; returns the content of an image file, and its media type."""
        image = Image.fromarray(decode_thumbnail(path, size, max_pixels=MAX_PIXELS))
        content = io.BytesIO()
        kind = "png" if max(image.size) <= _SMALL else "jpeg"
        image.save(content, kind, quality=85)
        return content.getvalue(), f"image/{kind}"

    def hit(self, view: View, number: int, score: float) -> HitAnswer:
        """What is told about a picture; its name is its path within the folder that all pictures have in common."""
        assert view.index is not None
        path = view.index.path(number)
        name = path.removeprefix(view.root) if path.startswith(view.root) else os.path.basename(path)
        return HitAnswer(f"{view.version}-{number}", printable(name), score)

    def scores(self, view: View, class_id: int) -> tuple[Float[np.ndarray, " pictures"], bool]:
        """The scores of all pictures for a class, and whether they were known from an earlier question."""
        if view.index is None:
            return np.zeros(0, np.float32), False
        key = (view.version, view.num_pictures, class_id)
        with self._lock:
            if key in self._scores:
                self._scores.move_to_end(key)
                return self._scores[key], True
        scores = np.asarray(view.index.scores(self.bank, class_id), np.float32)
        with self._lock:
            self._scores[key] = scores
            while sum(kept.nbytes for kept in self._scores.values()) > _SCORE_BYTES and len(self._scores) > 1:
                self._scores.popitem(last=False)
        return scores, False

    @functools.cached_property
    def _why_no_thresholds(self) -> str | None:
        """Why the run has no thresholds, if it has none."""
        try:
            return None if len(self.bank.thresholds.labels) else "The validation split has no examples."
        except ConfigError as error:
            return str(error)

    @functools.cached_property
    def _common_curve(self) -> Curve:
        return self.bank.thresholds.curve(_NO_CLASS)

    @functools.cached_property
    def _common_thresholds(self) -> dict[Rule, float]:
        return {rule: self.bank.thresholds.of_class(rule, _NO_CLASS).value for rule in DEFAULT_RULES}

    def _has_own(self, class_id: int) -> bool:
        """Whether a class has enough validation examples for thresholds of its own."""
        return int(np.count_nonzero(self.bank.thresholds.labels == class_id)) >= MIN_EXAMPLES

    def _curve(self, class_id: int) -> Curve:
        return self.bank.thresholds.curve(class_id) if self._has_own(class_id) else self._common_curve

    def _class(self, class_id: int) -> ClassAnswer:
        name, character = printable(self.bank.names[class_id]), self._completion.character(class_id)
        return ClassAnswer(class_id, name, character)

    def _cost(self, num_pictures: int, start: float, *, from_memory: bool) -> CostAnswer:
        rows = 0 if self.bank.estimator is None else self.bank.estimator.num_rows
        milliseconds = 1e3 * (time.perf_counter() - start)
        return CostAnswer(1, len(self.bank.names), rows, num_pictures, milliseconds, from_memory)


def _passing(
    scores: Float[np.ndarray, " pictures"], threshold: ThresholdAnswer | None
) -> Int[np.ndarray, " passing"]:
    """Which scores are at least the threshold, all that are numbers without one."""
    least = np.float64(-np.inf if threshold is None else threshold.value)
    return np.flatnonzero(np.isfinite(scores) & (scores >= least))


def _best_first(
    scores: Float[np.ndarray, " pictures"], which: Int[np.ndarray, " passing"], most: int
) -> Int[np.ndarray, " best"]:
    """The pictures with the highest scores, of equal ones the first; not all are sorted if only some are wanted."""
    if len(which) > most:
        least = np.partition(scores[which], len(which) - most)[len(which) - most]
        which = which[scores[which] >= least]
    return which[np.argsort(-scores[which], kind="stable")][:most]


def _root(index: FeatureIndex | None) -> str:
    """The folder that most pictures are in, with its last slash; some of a large index are looked at."""
    if index is None or not len(index):
        return ""
    some = [index.path(i) for i in range(0, len(index), -(-len(index) // _SOME_PATHS))]
    common = os.path.commonprefix([min(some), max(some)])  # noqa: RUF071 (cut at a slash)
    return common[: common.rfind("/") + 1]
