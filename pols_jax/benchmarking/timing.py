"""Timing: variants of the same work, interleaved so that noise hits all alike, and every repetition kept."""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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
      calls: How many calls in a row are timed together; the time of one is kept. A call of microseconds that comes after
        another program finds the threads asleep and the caches full of something else, which takes longer than itself.
    """

    name: str
    call: Callable[[int], Any]
    case: Mapping[str, str | int] = dataclasses.field(default_factory=dict)
    compile_ms: float | None = None
    calls: int = 1


@dataclasses.dataclass
class Measurement:
    """The times of one variant.

    Attributes:
      variant: The name of the variant.
      case: What else identifies the measurement.
      compile_ms: How long the program took to compile; None if nothing was compiled.
      times_ms: The time of every repetition, in the order of measuring, warm-up left out.
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


def compiled(jitted: Any, *arguments: Any) -> tuple[Any, float]:
    """Compiles a jitted function for such arguments; returns the program and how many milliseconds that took."""
    start = time.perf_counter()
    program = jitted.lower(*arguments).compile()
    return program, 1e3 * (time.perf_counter() - start)


def profile(variants: Sequence[Variant], directory: Path | None, name: str) -> None:
    """Records a trace of one more call of each variant in a directory, if one is wanted, for TensorBoard or XProf."""
    if directory is None:
        return
    with jax.profiler.trace(str(directory / name)):
        for variant in variants:
            case = " ".join([variant.name, *(f"{key}={value}" for key, value in variant.case.items())])
            with jax.profiler.TraceAnnotation(case):
                jax.block_until_ready(variant.call(0))


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

    A variant that empties the caches, or meets a slow moment of the machine, thus does not always hit the same neighbor.
    """
    measurements = [] if measurements is None else measurements
    ordering = random.Random(0)
    mine = [Measurement(variant.name, dict(variant.case), variant.compile_ms, []) for variant in variants]
    for round_number in range(warmup + repetitions):
        for index in ordering.sample(range(len(variants)), len(variants)):
            variant = variants[index]
            numbers = range(round_number * variant.calls, (round_number + 1) * variant.calls)
            start = clock()
            results = [variant.call(number) for number in numbers]
            wait(results if variant.calls > 1 else results[0])
            elapsed_ms = 1e3 * (clock() - start) / variant.calls
            if round_number >= warmup:
                mine[index].times_ms.append(round(elapsed_ms, 5))
                if len(mine[index].times_ms) == 1:  # an entry without times would have no median
                    measurements[:] = [old for old in measurements if not _same(old, mine[index])]
                    measurements.append(mine[index])
        if round_number >= warmup:
            after_round()
    order = {id(measurement): place for place, measurement in enumerate(mine)}
    measurements.sort(key=lambda m: order.get(id(m), -1))  # stable: what was there before stays in front
    return measurements


def _same(one: Measurement, other: Measurement) -> bool:
    """Whether one would stand for the other: the same variant and case, the memory that it took aside."""
    parts = [{key: m.case[key] for key in m.case if key != "memory_bytes"} for m in (one, other)]
    return one.variant == other.variant and parts[0] == parts[1]
