"""Signals: noted while work is to be saved, raised elsewhere, and the second one ends the program at once."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from pols_jax.cli.running import run
from pols_jax.errors import Interrupted, InterruptedRunError
from pols_jax.signals import noted_signals, raised_signals

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_within_work_is_noted_and_raised_at_the_end(number):
    before = signal.getsignal(number)
    done = []

    def work():
        with noted_signals() as noted:
            signal.raise_signal(number)
            done.append(noted.number)

    with pytest.raises(InterruptedRunError) as raised:
        work()
    assert done == [number]
    assert raised.value.exit_code == 128 + number
    assert signal.getsignal(number) is before


def test_contexts_within_one_another_share_what_was_heard():
    def work():
        with noted_signals() as outer:
            with noted_signals() as inner:
                signal.raise_signal(signal.SIGTERM)
            assert inner is outer
            assert outer.number == signal.SIGTERM

    with pytest.raises(InterruptedRunError):
        work()


def test_an_error_of_the_work_is_not_replaced_by_the_signal():
    def work():
        with noted_signals():
            signal.raise_signal(signal.SIGTERM)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        work()


@pytest.mark.parametrize("number", NUMBERS)
def test_a_program_ends_with_one_sentence_and_the_exit_code_of_the_signal(number, capsys):
    assert run(lambda: signal.raise_signal(number)) == 128 + number
    assert capsys.readouterr().err == "Stopped.\n"


def test_an_interruption_passes_by_those_who_handle_errors():
    def program():
        try:
            signal.raise_signal(signal.SIGTERM)
        except Exception:
            return 0

    assert not issubclass(Interrupted, Exception)
    assert run(program) == 143


def test_a_program_under_nohup_does_not_hear_that_its_terminal_closed():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raised_signals(), noted_signals() as noted:
            signal.raise_signal(signal.SIGHUP)
            assert not noted.number
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_of_the_main_thread_signals_are_left_alone():
    heard = []

    def work():
        with noted_signals() as noted:
            heard.append(noted.number)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert heard == [0]


def test_a_second_signal_in_a_notebook_is_a_keyboard_interrupt():
    def work():
        with noted_signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_program_at_once_even_while_threads_write(number):
    program = textwrap.dedent(
        """
        import signal, sys, threading, time
        from pols_jax.cli.running import run
        from pols_jax.signals import noted_signals

        def main():
            threading.Thread(target=time.sleep, args=(60,)).start()  # a save that takes long
            with noted_signals():
                print("ready", flush=True)
                for _ in range(600):
                    time.sleep(0.1)

        sys.exit(run(main))
        """
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        process.send_signal(number)
        assert process.wait(timeout=20) == 128 + number
        assert process.stderr.read() == "Stopped at once.\n"
    finally:
        process.kill()
        process.communicate()
