"""Timing with a clock that stands still but for what the test makes it do."""

import pytest

from pols_jax.benchmarking.timing import Measurement, Variant, measure


class FakeClock:
    """A clock in seconds that moves only when work is done or waited for."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def timed(work, repetitions, warmup=2, **options):
    """Measures work given as name -> (seconds per call, seconds to wait); returns measurements and the calls."""
    clock, calls = FakeClock(), []

    def variant(name, seconds, delay):
        def call(number):
            calls.append((name, number))
            clock.now += seconds[number] if isinstance(seconds, list) else seconds
            return delay

        return Variant(name, call)

    def wait(delay):
        clock.now += delay

    variants = [variant(name, *times) for name, times in work.items()]
    return measure(variants, repetitions=repetitions, warmup=warmup, clock=clock, wait=wait, **options), calls


def test_every_repetition_is_kept_and_warm_up_is_left_out():
    measurements, calls = timed({"a": ([9.0, 8.0, 0.003, 0.001, 0.002], 0.0)}, repetitions=3)
    assert measurements[0].times_ms == pytest.approx([3.0, 1.0, 2.0])
    assert [number for _, number in calls] == [0, 1, 2, 3, 4]


def test_a_short_call_is_timed_many_times_in_a_row():
    clock, numbers = FakeClock(), []

    def call(number):
        numbers.append(number)
        clock.now += 0.001

    def wait(results):
        assert len(results) == 4
        clock.now += 0.002

    (measurement,) = measure([Variant("a", call, calls=4)], repetitions=2, warmup=1, clock=clock, wait=wait)
    assert measurement.times_ms == pytest.approx([1.5, 1.5])  # (4 * 1 ms + 2 ms) / 4
    assert numbers == list(range(12))


def test_waiting_for_the_result_belongs_to_the_time():
    measurements, _ = timed({"a": (0.001, 0.004)}, repetitions=2)
    assert measurements[0].times_ms == pytest.approx([5.0, 5.0])


def test_the_time_of_one_variant_is_not_charged_to_another():
    measurements, _ = timed({"slow": (2.0, 1.0), "fast": (0.001, 0.0)}, repetitions=5)
    assert {m.variant: m.median_ms for m in measurements} == pytest.approx({"slow": 3000.0, "fast": 1.0})


def test_the_variants_are_interleaved_in_rounds_of_changing_order():
    _, calls = timed(dict.fromkeys("abcd", (0.001, 0.0)), repetitions=18, warmup=2)
    rounds = [calls[start : start + 4] for start in range(0, len(calls), 4)]
    assert len(rounds) == 20
    for number, calls_of_round in enumerate(rounds):
        assert sorted(calls_of_round) == [(name, number) for name in "abcd"]
    assert len({tuple(name for name, _ in calls_of_round) for calls_of_round in rounds}) > 5


def test_the_measurements_come_in_the_order_of_the_variants_after_what_was_there():
    before = Measurement("before", {}, None, [1.0])
    measurements, _ = timed(dict.fromkeys("abcd", (0.001, 0.0)), repetitions=2, measurements=[before])
    assert [m.variant for m in measurements] == ["before", *"abcd"]


def test_an_interrupted_measurement_keeps_what_was_measured_so_far():
    measurements = []

    def interrupted():
        if len(measurements[0].times_ms) == 2:
            raise KeyboardInterrupt

    work = dict.fromkeys("ab", (0.001, 0.0))
    with pytest.raises(KeyboardInterrupt):
        timed(work, repetitions=10, measurements=measurements, after_round=interrupted)
    assert sorted(m.variant for m in measurements) == ["a", "b"]
    assert all(len(m.times_ms) == 2 for m in measurements)


def test_a_variant_that_was_interrupted_before_its_first_time_is_not_in_the_list():
    def stop(number):
        raise KeyboardInterrupt

    measurements = []
    with pytest.raises(KeyboardInterrupt):
        measure([Variant("a", stop)], repetitions=1, warmup=0, measurements=measurements)
    assert measurements == []


def test_the_median_and_the_quartiles_of_an_even_number_of_times():
    measured = Measurement("a", {}, None, [4.0, 1.0, 3.0, 2.0])
    assert measured.median_ms == 2.5  # between 2 and 3
    assert measured.spread_ms == (1.75, 3.25)  # a quarter of the way from 1 to 4, and three quarters
    assert Measurement("a", {}, None, [7.0]).spread_ms == (7.0, 7.0)


def test_the_case_and_the_compile_time_of_a_variant_go_into_its_measurement():
    variant = Variant("a", lambda number: None, {"num_classes": 16}, compile_ms=12.5)
    (measurement,) = measure([variant], repetitions=1)
    assert (measurement.case, measurement.compile_ms) == ({"num_classes": 16}, 12.5)
