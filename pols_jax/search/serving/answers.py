"""What the server answers: each answer is a dataclass, from which its JSON and its schema are made."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class ErrorAnswer:
    """What is wrong, in one sentence."""

    error: str


@dataclasses.dataclass(frozen=True)
class ClassAnswer:
    """A class; of a character, also the character."""

    id: int
    name: str
    character: str | None = None


@dataclasses.dataclass(frozen=True)
class ClassesAnswer:
    """Classes whose names have a text in them: the name itself first, then those that begin with it."""

    num_classes: int
    classes: tuple[ClassAnswer, ...]


@dataclasses.dataclass(frozen=True)
class CostAnswer:
    """What a question cost: rows of the output layer that were used, of how many; pictures; milliseconds.

    ``normalizer_rows`` is 0 if there is none, or if it is affine and therefore in the row already. With ``from_memory`` the
    scores were those of an earlier question.
    """

    rows: int
    num_classes: int
    normalizer_rows: int
    num_pictures: int
    milliseconds: float
    from_memory: bool


@dataclasses.dataclass(frozen=True)
class ThresholdAnswer:
    """A threshold, how it was chosen, and the precision and recall that it had on the validation split.

    ``origin`` says by which examples a rule chose it; ``promise`` says which examples precision and recall are about. They are
    null where validation says nothing.
    """

    value: float
    origin: Literal["class", "all classes", "given"]
    promise: Literal["class", "all classes"] | None
    precision: float | None
    recall: float | None


@dataclasses.dataclass(frozen=True)
class HitAnswer:
    """A picture: its id, its name and its score."""

    picture: str
    name: str
    score: float


@dataclasses.dataclass(frozen=True)
class SearchAnswer:
    """The pictures whose score is at least the threshold, best first; all of them if there is no threshold."""

    asked: ClassAnswer = dataclasses.field(metadata={"json": "class"})
    threshold: ThresholdAnswer | None
    num_hits: int
    hits: tuple[HitAnswer, ...]
    cost: CostAnswer


@dataclasses.dataclass(frozen=True)
class DecisionAnswer:
    """Whether a picture is of a class; null without a threshold."""

    asked: ClassAnswer = dataclasses.field(metadata={"json": "class"})
    is_class: bool | None
    score: float
    threshold: ThresholdAnswer | None
    cost: CostAnswer


@dataclasses.dataclass(frozen=True)
class CurveAnswer:
    """Thresholds from strict to lenient, with the precision and recall of each on the validation split."""

    asked: ClassAnswer = dataclasses.field(metadata={"json": "class"})
    origin: Literal["class", "all classes"]
    num_examples: int
    class_examples: int
    thresholds: tuple[float, ...]
    precision: tuple[float, ...]
    recall: tuple[float, ...]
    rules: dict[str, float | None]


@dataclasses.dataclass(frozen=True)
class HealthAnswer:
    """What is served."""

    status: Literal["ok"]
    version: str
    run: str
    num_classes: int
    num_pictures: int
    normalizer_rows: int
    has_thresholds: bool
    folder: str | None
    max_upload_bytes: int
