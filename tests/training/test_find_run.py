"""From the directory of an experiment to the run that is meant."""

import json

import pytest

from pols_jax.errors import RunError
from pols_jax.training.config import RunConfig
from pols_jax.training.run_files import RunInfo, write_run_info
from pols_jax.training.runs import find_run


def write_run(directory, loss, *auprcs):
    directory.mkdir(parents=True)
    config = RunConfig(loss=loss)
    write_run_info(directory, RunInfo(config=config, num_classes=1, image_shape=(1, 1, 1), data={}), ["one"])
    measures = {"loss": 1.0, "accuracy": 0.5, "violation_rate": 0.0}
    looks = [{"step": i, "validation": {**measures, "auprc": auprc}} for i, auprc in enumerate(auprcs)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(look) + "\n" for look in looks))
    return directory


def test_a_run_stands_for_itself_and_an_experiment_of_one_run_for_that_run(tmp_path):
    run = write_run(tmp_path / "mine" / "cross_entropy", "cross_entropy", 0.5)
    assert find_run(run) == run
    assert find_run(tmp_path / "mine") == run


def test_several_runs_are_named_best_on_the_validation_split_first(tmp_path):
    write_run(tmp_path / "cross_entropy", "cross_entropy", 0.9, 0.5)
    write_run(tmp_path / "batch_cross_entropy", "batch_cross_entropy", 0.1, 0.8)
    write_run(tmp_path / "max_margin", "max_margin")
    with pytest.raises(RunError, match="holds 3 runs") as raised:
        find_run(tmp_path)
    sentence = str(raised.value)
    assert (
        sentence.index("batch_cross_entropy")
        < sentence.index("/cross_entropy")
        < sentence.index("max_margin")
    )


def test_of_a_sweep_the_chosen_run_is_meant(tmp_path):
    write_run(tmp_path / "max_margin-lr1", "max_margin", 0.1)
    chosen = write_run(tmp_path / "max_margin-lr0.1", "max_margin", 0.9)
    (tmp_path / "sweep.json").write_text(json.dumps({"max_margin": {"chosen": chosen.name, "runs": []}}))
    assert find_run(tmp_path) == chosen


def test_no_run_is_one_sentence_that_names_the_command(tmp_path):
    with pytest.raises(RunError, match="train one with pols train"):
        find_run(tmp_path)
