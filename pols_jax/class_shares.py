"""Classes that several processes share out: each has the rows of some, and they put together what they find."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

__all__ = ["ClassShare"]


def _alone(array: np.ndarray) -> np.ndarray:
    return array[None]


class ClassShare(NamedTuple):
    """Which classes this process has the rows of.

    All processes go through the same program: whatever one of them gathers, all of them gather.

    Attributes:
      process: The index of this process.
      edges: Process i has the classes from ``edges[i]`` on, and before ``edges[i + 1]``.
      gather: Stacks the arrays of all processes, of one shape and dtype, along a new first axis.

    Examples:
      >>> share = ClassShare.whole(10)
      >>> share.classes, share.num_classes, share.sum(np.arange(3)).tolist()
      (range(0, 10), 10, [0, 1, 2])
      >>> ClassShare.of(10, process=1, count=4, gather=_alone).classes
      range(3, 6)
    """

    process: int
    edges: tuple[int, ...]
    gather: Callable[[np.ndarray], np.ndarray] = _alone

    @classmethod
    def whole(cls, num_classes: int) -> "ClassShare":
        """All classes, of a process that is alone."""
        return cls(0, (0, num_classes))

    @classmethod
    def of(
        cls, num_classes: int, *, process: int, count: int, gather: Callable[[np.ndarray], np.ndarray]
    ) -> "ClassShare":
        """The share of one of ``count`` processes: about as many classes as the others have, next to each other."""
        size = -(-num_classes // count)
        return cls(process, tuple(min(i * size, num_classes) for i in range(count + 1)), gather)

    @property
    def num_classes(self) -> int:
        """The number of classes of all processes."""
        return self.edges[-1]

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process."""
        return len(self.edges) == 2

    @property
    def classes(self) -> range:
        """The classes of this process; there may be none."""
        return range(self.edges[self.process], self.edges[self.process + 1])

    def sum(self, array: np.ndarray) -> np.ndarray:
        """The sum of an array over all processes, in its own dtype."""
        return self.gather(array).sum(axis=0, dtype=array.dtype)

    def concatenated(self, rows: np.ndarray) -> np.ndarray:
        """The rows of all classes, from those of this process."""
        sizes = np.diff(self.edges)
        padded = np.zeros((max(sizes), *rows.shape[1:]), rows.dtype)
        padded[: len(rows)] = rows
        return np.concatenate([part[:size] for part, size in zip(self.gather(padded), sizes, strict=True)])
