"""`bench_speed.py` as a user runs it: a small run, wrong input, and an interrupt."""

import json
import signal
import sys
import threading

import pytest

from pols_jax.benchmarking.records import Record
from pols_jax.benchmarking.speed_tables import speed_tables
from pols_jax.cli import bench as bench_speed, running as cli

SMALL = ["--networks", "mlp", "--classes", "1", "1013", "--batch-size", "2", "--batches", "3"]


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bench_speed.py", *map(str, arguments)])
    return cli.run(bench_speed.main)


def test_a_run_writes_record_tables_and_figures_and_the_record_gives_the_same_tables_again(
    monkeypatch, capsys, tmp_path
):
    outputs = ["--json", tmp_path / "speed.json", "--markdown", tmp_path / "speed.md"]
    assert run(monkeypatch, *SMALL, *outputs, "--figures", tmp_path / "figures") == 0
    printed = capsys.readouterr().out
    assert "mlp, batch size 2" in printed
    record = Record.load(tmp_path / "speed.json")
    assert record.finished
    assert record.benchmark == "logits"
    assert record.settings["classes"] == [1, 1013]
    assert {len(m.times_ms) for m in record.measurements} == {3}
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".png", ".svg"}
    assert run(monkeypatch, "report", tmp_path / "speed.json", "--markdown", tmp_path / "again.md") == 0
    assert capsys.readouterr().out == printed
    assert (tmp_path / "again.md").read_text() == (tmp_path / "speed.md").read_text()


def test_only_the_programs_that_are_asked_for_are_timed(monkeypatch, tmp_path):
    outputs = ["--json", tmp_path / "speed.json", "--figures", tmp_path / "figures"]
    assert run(monkeypatch, *SMALL, "--programs", "backbone", "one_logit", *outputs) == 0
    record = Record.load(tmp_path / "speed.json")
    timed = [(m.variant, m.case.get("num_classes")) for m in record.measurements]
    assert timed == [("backbone", None), ("one_logit", 1), ("one_logit", 1013)]


def test_the_losses_are_compared_with_optax_and_the_authors_form(monkeypatch, capsys):
    assert run(monkeypatch, "losses", "--batch-size", 4, "--classes", 64, "--repetitions", 2) == 0
    printed = capsys.readouterr().out
    assert "optax cross_entropy" in printed
    assert "authors' batch_cross_entropy" in printed
    assert "batch_max_margin" in printed


def test_the_metrics_are_compared_with_scikit_learn(monkeypatch, tmp_path):
    path = tmp_path / "metrics.json"
    flags = ["--examples", 60, "--classes", 3, 5, "--repetitions", 1, "--json", path]
    assert run(monkeypatch, "metrics", *flags) == 0
    (table,) = speed_tables(Record.load(path))
    assert [row[:2] for row in table.rows] == [["60", "3"], ["60", "5"]]
    assert "scikit_learn / ours" in table.headings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--networks", "resnet52"], "There is no network named 'resnet52'; did you mean resnet50"),
        (["--classes", "0"], "--classes must be at least 1, got 0."),
        (["--classes", "1024", "-3"], "--classes must be at least 1, got -3."),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0."),
        (["--batches", "0"], "--batches must be at least 1, got 0."),
        (["--device", "abacus"], "There is no device 'abacus' that JAX can use here; there is cpu."),
        (["--device", "cpu:99"], "from 'cpu:99' on are too many"),
        (["--num-devices", "100"], "too many"),
        (["losses", "--classes", "0"], "--classes must be at least 1, got 0."),
        (["metrics", "--examples", "0"], "--examples must be at least 1, got 0."),
        (["--classes", "5000000000"], "--classes must be at most 2,147,483,647"),
        (["--dtype", "float8"], "--dtype must be float32 or bfloat16 or float16, got 'float8'"),
        (["--markdown", "."], ". cannot be written: it is a directory."),
        (["--json", "."], ". cannot be written: it is a directory."),
        (["--json", f"{__file__}/no/speed.json"], "is not a directory"),
        (["--figures", __file__], "is not a directory"),
        (["--profile", __file__], "is not a directory"),
        (["losses", "--classes", "2147483647"], "This benchmark needs at least"),
        (["metrics", "--examples", "2147483647"], "choose a smaller --examples or --classes"),
        (["metrics", "--classes"], "--classes needs at least one value"),
        (["lossses"], "There is no benchmark named 'lossses'; did you mean losses"),
        (["report"], "Name the records to show"),
        (["--no-such-flag"], "There is no flag named '--no-such-flag'"),
        (["report", "no_such_file.json"], "no_such_file.json cannot be read"),
        (["--json", "no/such/place/speed.json"], "no/such/place is not a directory."),
        (["losses", "--figures", "/dev/null/figures"], "/dev/null is not a directory."),
        (["report", "--markdown", ".", "no_such_file.json"], ". cannot be written: it is a directory."),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(monkeypatch, capsys, arguments, message):
    assert run(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_peer_that_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(monkeypatch, "losses", "--peer", "torch") == 2
    assert "pip install torch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_an_interrupted_run_leaves_a_readable_record_of_what_was_measured(monkeypatch, tmp_path, sent, code):
    path, ended = tmp_path / "speed.json", threading.Event()

    def interrupt():
        while not (path.exists() and json.loads(path.read_text())["measurements"]):
            if ended.wait(0.05):
                return
        signal.raise_signal(sent)

    watching = threading.Thread(target=interrupt)
    watching.start()
    try:
        assert run(monkeypatch, *SMALL[:-1], "1000000", "--json", path) == code
    finally:
        ended.set()
        watching.join()
    left = Record.load(path)
    assert not left.finished
    assert {m.variant for m in left.measurements} >= {"backbone", "all_logits", "one_logit"}
    assert speed_tables(left)
