"""Records of measurements: complete, and readable at any moment."""

import json

import jax
import pytest

from pols_jax.benchmarking import records
from pols_jax.benchmarking.records import Record, Recorder, describe_environment
from pols_jax.benchmarking.timing import Measurement
from pols_jax.errors import ConfigError
from pols_jax.memory import available_bytes


def a_record():
    record = Record("logits", {"classes": [1, 1024]}, describe_environment(jax.devices()[:1]))
    for num_classes in (1, 1024):
        case = {"network": "resnet50", "num_classes": num_classes}
        record.measurements.append(Measurement("one_logit", case, 12.5, [0.25, 0.5]))
    case = {"network": "resnet50", "num_classes": 10**9}
    record.skipped.append({"case": case, "reason": "it is too large"})
    return record


def test_a_record_read_back_is_the_record_that_was_written(tmp_path):
    record = a_record()
    record.save(tmp_path / "speed.json")
    assert Record.load(tmp_path / "speed.json") == record
    assert json.loads((tmp_path / "speed.json").read_text())["benchmark"] == "logits"


def test_a_record_without_measurements_is_readable(tmp_path):
    Record("losses", {}, {}).save(tmp_path / "speed.json")
    assert Record.load(tmp_path / "speed.json").measurements == []


def test_measurements_are_found_by_variant_and_any_part_of_their_case():
    record = a_record()
    found = record.find("one_logit", num_classes=1024)
    assert found is not None
    assert found.case["network"] == "resnet50"
    assert record.find("one_logit", num_classes=2) is None
    assert record.find("all_logits") is None
    assert record.values("num_classes") == [1, 1024, 10**9]


@pytest.mark.parametrize("stopped_by", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_is_stopped_leaves_a_readable_record_that_says_so(tmp_path, stopped_by):
    path = tmp_path / "speed.json"
    record = Record("losses", {}, {})

    def run():
        with Recorder(record, path):
            record.measurements.append(Measurement("optax", {}, None, [1.0]))
            raise stopped_by

    with pytest.raises(stopped_by):
        run()
    left = Record.load(path)
    assert left == record
    assert not left.finished


def test_a_run_that_is_killed_without_warning_leaves_what_was_saved_last(tmp_path, monkeypatch):
    moments = iter([0.0, 1.0, 3.0, 3.0])  # entering, a second later (too soon), and two more (saved)
    monkeypatch.setattr(records.time, "monotonic", lambda: next(moments))
    path = tmp_path / "speed.json"
    recorder = Recorder(Record("losses", {}, {}), path).__enter__()
    recorder.record.measurements.append(Measurement("optax", {}, None, [1.0]))
    recorder.save_now_and_then()
    assert Record.load(path).measurements == []
    recorder.save_now_and_then()
    assert Record.load(path).measurements[0].times_ms == [1.0]


def test_a_run_that_came_to_its_end_says_so(tmp_path):
    with Recorder(Record("losses", {}, {}), tmp_path / "speed.json"):
        assert not Record.load(tmp_path / "speed.json").finished
    assert Record.load(tmp_path / "speed.json").finished


WHOLE = '{"benchmark": "losses", "settings": {}, "environment": {}, "measurements": [%s], "skipped": [%s]}'
TIMES = '{"variant": "optax", "case": {}, "compile_ms": null, "times_ms": %s}'


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "{", "[]", '{"benchmark": 1}', "[" * 100_000, '{"benchmark": NaN}', "\udcff"),
        *(WHOLE % ("1", ""), WHOLE % (TIMES % "[]", ""), WHOLE % (TIMES % '["x"]', ""), WHOLE % ("", "{}")),
        *(WHOLE % (TIMES % "[1e999]", ""), WHOLE.replace("{}", "[]", 1) % ("", "")),
    ],
)
def test_a_file_that_is_no_record_is_named_in_one_sentence(tmp_path, text):
    path = tmp_path / "speed.json"
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"speed\.json"):
        Record.load(path)


def test_the_environment_says_with_what_and_where():
    environment = describe_environment(jax.devices()[:2], command=["pols", "bench", "a b"])
    assert environment["command"] == "pols bench 'a b'"
    assert environment["versions"]["jax"] == jax.__version__
    assert environment["device"] == {"platform": "cpu", "kind": "cpu", "count": 2}
    assert environment["host"]["cores"] >= 1
    json.dumps(environment)


def test_the_available_memory_of_the_host_is_less_than_all_of_it():
    available = available_bytes(jax.devices("cpu")[0])
    total = describe_environment(jax.devices()[:1])["host"]["memory_bytes"]
    assert available is None or 0 < available < total
