"""Timing: variants of the same work, interleaved so that noise hits all alike, and every repetition kept."""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to do the work that is being timed.

    Attributes:
      name: What the variant is called in the record.
      call: Does the work once. It is given the number of the call, warm-up included, so that no two calls need to ask for
        the same thing, and returns what there is to be waited for.
      case: What else identifies the measurement, such as the number of classes.
      compile_ms: How long the program took to compile; None if nothing is compiled.
    """

    name: str
    call: Callable[[int], Any]
    case: Mapping[str, str | int] = dataclasses.field(default_factory=dict)
    compile_ms: float | None = None


@dataclasses.dataclass
class Measurement:
    """The times of one variant.

    Attributes:
      variant: The name of the variant.
      case: What else identifies the measurement.
      compile_ms: How long the program took to compile; None if nothing was compiled.
      times_ms: The time of every repetition, in the order of measuring, warm-up left out.

    Examples:
      >>> measured = Measurement("one_logit", {"num_classes": 1024}, None, [5.0, 1.0, 2.0, 1.5, 3.0])
      >>> measured.median_ms, measured.spread_ms
      (2.0, (1.5, 3.0))
    """

    variant: str
    case: dict[str, str | int]
    compile_ms: float | None
    times_ms: list[float]

    @property
    def median_ms(self) -> float:
        """The median of the times."""
        return statistics.median(self.times_ms)

    @property
    def spread_ms(self) -> tuple[float, float]:
        """The first and the third quartile of the times."""
        if len(self.times_ms) == 1:
            return self.times_ms[0], self.times_ms[0]
        first, _, third = statistics.quantiles(self.times_ms, n=4, method="inclusive")
        return first, third


def measure(
    variants: Sequence[Variant],
    *,
    repetitions: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[Any], Any] = jax.block_until_ready,
    measurements: list[Measurement] | None = None,
    after_round: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """Times the variants in rounds: in each round every variant runs once, in a new random order.

    A variant that empties the caches, or meets a slow moment of the machine, thus does not always hit the same neighbour.

    Args:
      variants: What to time.
      repetitions: The number of rounds that are kept.
      warmup: The number of rounds before them that are not.
      clock: Returns the time in seconds.
      wait: Waits until a result is there; its time belongs to the variant.
      measurements: The list to append to, so that its owner has what was measured so far at any time; a new one if None.
      after_round: Called after every kept round.

    Returns:
      ``measurements``, with one entry more for each variant.

    Examples:
      >>> variants = [Variant("sum", lambda call: sum(range(call))), Variant("nothing", lambda call: None)]
      >>> [(m.variant, len(m.times_ms)) for m in measure(variants, repetitions=3)]
      [('sum', 3), ('nothing', 3)]
    """
    measurements = [] if measurements is None else measurements
    ordering = random.Random(0)
    mine = [Measurement(variant.name, dict(variant.case), variant.compile_ms, []) for variant in variants]
    for round_number in range(warmup + repetitions):
        for index in ordering.sample(range(len(variants)), len(variants)):
            start = clock()
            wait(variants[index].call(round_number))
            elapsed_ms = 1e3 * (clock() - start)
            if round_number >= warmup:
                mine[index].times_ms.append(round(elapsed_ms, 5))
                if len(mine[index].times_ms) == 1:  # an entry without times would have no median
                    measurements.append(mine[index])
        if round_number >= warmup:
            after_round()
    order = {id(measurement): place for place, measurement in enumerate(mine)}
    measurements.sort(key=lambda m: order.get(id(m), -1))  # stable: what was there before stays in front
    return measurements
