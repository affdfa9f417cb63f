"""The line that shows how a run is doing, on a terminal and in a file."""

import io

import pytest
from rich.console import Console

from pols_jax.training import progress as progress_module
from pols_jax.training.progress import Progress, duration

TITLE = "noise_contrastive_estimation (lr 0.002, num_noise 100, noise uniform)"


def drawn(width, *, step, speed):
    """What stands on a terminal of some width after a step."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    with Progress(TITLE, 6_000_000, console=console) as progress:
        progress.update(step, loss=0.1234, steps_per_second=speed)
        progress._live.refresh()
        return out.getvalue().splitlines()[-1]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_time_left_is_not_cut_and_the_speed_is_there(width):
    # 4,765,433 steps at 17.84 a second: 267,120 s, or 3 x 86,400 + 2 x 3,600 + 12 x 60.
    line = drawn(width, step=1_234_567, speed=17.84)
    assert line.rstrip().endswith("17.8 steps/s  loss 0.1234  3d 02:12:00 left")
    assert "1234567/6000000" in line
    assert line.count("noise_contrastive") == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "00:00:00"), (86_399, "23:59:59"), (86_400, "1d 00:00:00"), (90 * 86_400 + 61, "90d 00:01:01")],
)
def test_a_duration_does_not_wrap_after_a_day(seconds, text):
    assert duration(seconds) == text


def test_a_slow_run_has_a_speed_too():
    assert "0.025 steps/s" in drawn(120, step=1, speed=0.025)


def test_where_no_line_can_be_redrawn_one_is_printed_after_seconds_and_then_now_and_then(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with Progress("cross_entropy", 100, console=Console(file=out, width=40)) as progress:
        progress.waiting("compiling")
        for step in range(1, 7):
            now[0] += 25.0
            progress.update(step, loss=0.5, steps_per_second=0.04)
    lines = out.getvalue().splitlines()
    assert lines[0] == "cross_entropy: compiling ..."
    assert [line.split()[2] for line in lines[1:]] == ["2/100", "5/100"]
    assert lines[1].endswith("00:40:50 left")


def test_a_quiet_run_says_only_what_goes_wrong():
    out = io.StringIO()
    with Progress("cross_entropy", 100, quiet=True, console=Console(file=out)) as progress:
        progress.waiting("compiling")
        progress.update(100, loss=0.5, steps_per_second=50.0)
        progress.validated(accuracy=0.9, auprc=0.8, violation_rate=0.01)
        progress.warn("The disk is full [/x].")
    assert out.getvalue() == "The disk is full [/x].\n"
