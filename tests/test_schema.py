"""One reader for JSON and npz files: whatever is wrong becomes one sentence that names file and field."""

import dataclasses
import json
import os
from typing import Any, Literal

import numpy as np
import pytest

from pols_jax.errors import CheckpointError, ConfigError, RunError
from pols_jax.schema import ArrayKind, decode, encode, json_field, read_arrays, read_json, read_record


@dataclasses.dataclass(frozen=True)
class Part:
    name: str = json_field("class")
    weight: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole:
    steps: int
    rate: float = 0.1
    quiet: bool = False
    mode: Literal["a", "b"] = "a"
    rates: Literal["sweep"] | tuple[float, ...] = ()
    shape: tuple[int, int] = (1, 2)
    parts: tuple[Part, ...] = ()
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    measures: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.steps < 1:
            raise ConfigError(f"steps must be positive, got {self.steps}.")


WHOLE = Whole(
    steps=3, rates=(0.5,), parts=(Part("cat"), Part("dog", 2.0)), data={"a": [1]}, measures={"loss": 0.5}
)


def test_a_record_comes_back_through_json():
    assert decode(Whole, json.loads(json.dumps(encode(WHOLE)))) == WHOLE
    assert encode(WHOLE)["parts"][0] == {"class": "cat", "weight": None}
    assert decode(Whole, {"steps": 3}) == Whole(steps=3)
    assert isinstance(decode(Whole, {"steps": 3, "rate": 1}).rate, float)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"steps": "3"}, "steps must be a whole number, got '3'."),
        ({"steps": 3.0}, "steps must be a whole number, got 3.0."),
        ({"steps": True}, "steps must be a whole number, got True."),
        ({"steps": None}, "steps must be a whole number, got None."),
        ({"steps": 0}, "steps must be positive, got 0."),
        ({"rate": "fast"}, "rate must be a number, got 'fast'."),
        ({"rate": False}, "rate must be a number, got False."),
        ({"rate": float("inf")}, "rate must be a number, got inf."),
        ({"quiet": 1}, "quiet must be true or false, got 1."),
        ({"mode": "c"}, "mode must be 'a' or 'b', got 'c'."),
        ({"rates": "swept"}, "rates must be 'sweep' or a list, got 'swept'."),
        ({"shape": [1]}, "shape must have 2 entries, got 1."),
        ({"shape": [1, "x"]}, "shape[1] must be a whole number, got 'x'."),
        ({"parts": [{"class": "a"}, {}]}, "parts[1].class is missing."),
        ({"parts": [{"class": "a", "weight": "x"}]}, "parts[0].weight must be a number or null, got 'x'."),
        ({"parts": {"class": "a"}}, "parts must be a list, got an object."),
        ({"parts": [["a"]]}, "parts[0] must be an object, got a list."),
        ({"measures": {"loss": "x"}}, "measures.loss must be a number, got 'x'."),
        (
            {"flux": 1},
            "'flux' is unknown here: it was written by a newer version of pols_jax, or by something else.",
        ),
        ({"mode": "x" * 1000}, "mode must be 'a' or 'b', got '" + "x" * 56 + "...."),
    ],
)
def test_a_wrong_field_is_named_with_what_it_must_be(change, sentence):
    with pytest.raises(ConfigError) as raised:
        decode(Whole, encode(WHOLE) | change)
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is not JSON"),
        (b'{"steps": 3', "it is not JSON"),
        (b"\xff\xfe{}", r"it is not UTF-8 \(byte 0\)"),
        (b'{"steps": "caf\xe9"}', r"it is not UTF-8 \(byte 14\)"),
        (b"[" * 200_000, "it is nested too deeply"),
        (b'{"a":' * 100_000, "it is nested too deeply"),
        (b'{"steps": NaN}', "it holds the number NaN"),
        (b'{"rate": -Infinity}', "it holds the number -Infinity"),
        (b'{"rate": 1e999}', "it holds the number 1e999"),
        (b'{"steps": 9223372036854775808}', "it holds the number 9223372036854775808, which is too large"),
        (b'{"steps": ' + b"9" * 10_000 + b"}", r"it holds the number 9{20}\.\.\., which is too large"),
        (b'{"a": "\\ud800"}', "it holds half of a surrogate pair"),
        (b"\xef\xbb\xbf{}", "it is not JSON"),
    ],
)
def test_what_is_no_json_is_one_sentence_with_the_name_of_the_file(tmp_path, content, why):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    for error in (RunError, CheckpointError):
        with pytest.raises(error, match=rf"config\.json cannot be read: {why}"):
            read_json(path, error=error)


def test_a_record_that_is_wrong_names_its_file(tmp_path):
    (tmp_path / "config.json").write_text('{"steps": "x"}')
    with pytest.raises(
        RunError, match=r"config\.json cannot be used: steps must be a whole number, got 'x'\.$"
    ):
        read_record(Whole, tmp_path / "config.json")


def test_a_pipe_in_the_place_of_a_file_is_an_error_and_not_a_hang(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(RunError, match="not a regular file"):
        read_json(tmp_path / "config.json")
    with pytest.raises(RunError, match="not a regular file"):
        read_arrays(tmp_path / "config.json", {})


@pytest.mark.parametrize("content", [b"", b"PK", b"\x93NUMPY", b"text"])
def test_what_is_no_npz_is_one_sentence(tmp_path, content):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(RunError, match=r"a\.npz cannot be read: it is damaged"):
        read_arrays(tmp_path / "a.npz", {})


def test_a_cut_off_npz_is_one_sentence(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.arange(1000))
    whole = (tmp_path / "a.npz").read_bytes()
    for length in range(0, len(whole), 500):
        (tmp_path / "a.npz").write_bytes(whole[:length])
        with pytest.raises(RunError, match="it is damaged"):
            read_arrays(tmp_path / "a.npz", {"a": ArrayKind("iu", ("n",))})
