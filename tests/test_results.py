"""The numbers and figures of README and docs are those of the records in results/, and each record can be made again."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest

import train
from pols_jax import reporting
from pols_jax.config import ConfigError, Experiment
from pols_jax.data import DataError, load
from pols_jax.reporting import fill_in, read_records, rebuild

ROOT = Path(train.__file__).parent
EXPERIMENTS, BENCHMARKS = read_records(ROOT / "results")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "results" / "README.md"]


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory):
    """A copy of the pages, rebuilt from the records; and the files that changed."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copy(ROOT / "README.md", root)
    for folder in ("docs", "results"):
        shutil.copytree(ROOT / folder, root / folder)
    return [path.relative_to(root) for path in rebuild(root / "results", root)]


def test_rebuilding_changes_no_page(rebuilt):
    assert [path for path in rebuilt if path.suffix == ".md"] == []


def test_rebuilding_changes_no_figure(rebuilt):
    drawn_by = re.search(r"Matplotlib v([\d.]+)", (ROOT / "docs/images/by_classes.svg").read_text())[1]
    if drawn_by.rstrip(".") != matplotlib.__version__:
        pytest.skip(f"the figures were drawn by matplotlib {drawn_by}, this is {matplotlib.__version__}")
    assert [path for path in rebuilt if path.suffix == ".svg"] == []


def test_a_changed_record_changes_the_readme(tmp_path):
    for folder in ("docs", "results"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "README.md", tmp_path)
    path = tmp_path / "results" / "glyphs.json"
    record = json.loads(path.read_text())
    record["runs"][0]["test"]["slc"]["auprc"] -= 0.1
    path.write_text(json.dumps(record))
    assert tmp_path / "README.md" in rebuild(tmp_path / "results", tmp_path)


def test_every_figure_of_a_page_exists_and_every_drawn_figure_is_shown():
    shown = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text())
    }
    assert [path for path in shown if not path.exists()] == []
    assert {path.resolve() for path in (ROOT / "docs" / "images").glob("*.svg")} <= shown


def test_a_table_that_no_record_makes_is_an_error():
    with pytest.raises(ConfigError, match="asks for the table nothing"):
        fill_in("<!-- results: nothing -->\n<!-- end -->", {}, Path("README.md"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "usage: python -m pols_jax.reporting results/\n"),
        (
            ["no/such/directory"],
            "There is no record in no/such/directory; name a directory such as results/.\n",
        ),
    ],
)
def test_wrong_use_of_the_command_is_one_sentence(arguments, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["reporting", *arguments])
    with pytest.raises(SystemExit) as stop:
        reporting.main()
    assert (stop.value.code, capsys.readouterr().err) == (2, sentence)


def test_a_benchmark_that_was_stopped_is_not_published(tmp_path):
    record = json.loads((ROOT / "results" / "speed_losses.json").read_text())
    (tmp_path / "speed_losses.json").write_text(json.dumps({**record, "finished": False}))
    with pytest.raises(ConfigError, match=r"speed_losses.json was stopped before its end; run it again"):
        read_records(tmp_path)


def test_a_record_of_several_batch_sizes_has_figures_of_each(tmp_path):
    records = [
        json.loads((ROOT / "results" / f"speed_logits_batch_{size}.json").read_text()) for size in (1, 32)
    ]
    measurements = [measurement for record in records for measurement in record["measurements"]]
    (tmp_path / "both.json").write_text(json.dumps({**records[0], "measurements": measurements}))
    drawn = reporting.figures(*read_records(tmp_path))
    assert set(drawn) == {f"both_{size}_{kind}" for size in (1, 32) for kind in ("speed_up", "time")}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_says_how_it_was_made(name):
    environment = BENCHMARKS[name].environment
    assert {"command", "commit", "versions", "host", "device", "started"} <= set(environment)
    assert f"results/{name}.json" in environment["command"]


def flags_of(name):
    """The flags of a record's command."""
    words = shlex.split(EXPERIMENTS[name]["environment"]["command"])
    return words[words.index("train.py") + 1 :]


def changed(flags, **values):
    """Flags with other values; those that the command does not have are added."""
    flags = list(flags)
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if flag in flags:
            flags[flags.index(flag) + 1] = str(value)
        else:
            flags += [flag, str(value)]
    return flags


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_records_command_still_means_the_experiment_of_the_record(name):
    assert train.parse(flags_of(name)).experiment == Experiment.from_json(EXPERIMENTS[name]["experiment"])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_record_says_how_it_was_made(name):
    record = EXPERIMENTS[name]
    environment = record["environment"]
    assert {"command", "commit", "versions", "host", "device", "started"} <= set(environment)
    assert f"results/{name}.json" in environment["command"]
    assert all({"seed", "steps", "loss"} <= set(run["config"]) for run in record["runs"])
    assert all(run["test"]["split"] == "test" for run in record["runs"])


def form(value):
    """The structure of a record without its values; of a list, that of its first element."""
    if isinstance(value, dict):
        return {name: form(part) for name, part in value.items()}
    if isinstance(value, list):
        return [form(value[0])] if value else []
    return None if isinstance(value, int | float | str | bool | type(None)) else type(value)


# Those that take seconds with one step; the others are as slow as their evaluation.
QUICK = [name for name in EXPERIMENTS if name in ("glyphs_10", "study_alpha")]
SLOW = [name for name in EXPERIMENTS if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_records_command_with_fewer_steps_writes_a_record_of_the_same_form(name, tmp_path):
    flags = changed(
        flags_of(name), steps=2, evaluate_every=2, run_dir=tmp_path / "run", record=tmp_path / "record.json"
    )
    if "--sweep-steps" in flags:
        flags = changed(flags, sweep_steps=2)
    experiment = train.parse(flags).experiment
    try:
        load(experiment.dataset, **experiment.options())
    except DataError as error:
        pytest.skip(f"the data of this record is not here: {error}")
    process = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *flags, "--quiet"],
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    made, kept = json.loads((tmp_path / "record.json").read_text()), EXPERIMENTS[name]
    assert form(made["runs"]) == form(kept["runs"])
    assert set(made) == set(kept)
    assert made["environment"].keys() == kept["environment"].keys()
