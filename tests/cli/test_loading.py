"""What is said while data is loaded."""

import logging

from pols_jax.cli.loading import said_by_loaders
from pols_jax.data.reporting import counted


def test_where_no_bar_can_be_drawn_a_line_says_now_and_then_how_much_is_done(monkeypatch):
    now, said = [0.0], []

    def work():
        for item in range(5):
            now[0] += 6.0
            yield item

    monkeypatch.setattr("pols_jax.data.reporting.time.monotonic", lambda: now[0])
    with said_by_loaders(said.append):
        assert list(counted(work(), "Decoding", 5)) == [0, 1, 2, 3, 4]
    assert said == ["Decoding 5 pictures ...", "  2 of 5", "  4 of 5"]


def test_a_terminal_gets_a_bar_and_a_quiet_run_nothing(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any output for a terminal then
    said = []
    with said_by_loaders(said.append, draws_bars=True):
        list(counted(range(3), "Reading", 3))
    assert said == ["Reading 3 pictures ..."]
    assert "3/3" in capsys.readouterr().err
    with said_by_loaders(lambda text: None):
        list(counted(range(3), "Reading", 3))
    assert capsys.readouterr().out == ""


def test_a_bar_ends_when_loading_fails_and_the_log_is_left_as_it_was():
    logger = logging.getLogger("pols_jax.data")
    before = logger.level, logger.propagate, list(logger.handlers)
    try:
        with said_by_loaders(lambda text: None, draws_bars=True):
            for _ in counted(range(3), "Reading", 3):
                raise RuntimeError
    except RuntimeError:
        pass
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
