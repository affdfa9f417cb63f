"""A run is never lost, and never mixed up with another."""

import dataclasses
import fcntl
import io
import json
import shutil
import signal
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest

from pols_jax.data import StreamSplit
from pols_jax.errors import (
    ConfigError,
    DivergenceError,
    FileError,
    InterruptedRunError,
    RunError,
    RunWarning,
)
from pols_jax.files import check_space
from pols_jax.training import experiments, fitting as training
from pols_jax.training.checkpoints import Checkpoints, newest_step
from pols_jax.training.config import Experiment, RunConfig
from pols_jax.training.experiments import choose, read_sweep, run_experiment, saved_experiment
from pols_jax.training.fitting import RunOptions, fit
from pols_jax.training.learning import Learner
from pols_jax.training.progress import MetricsLog
from pols_jax.training.runs import Run, find_runs
from pols_jax.training.trainer import Trainer

CONFIG = RunConfig(
    characters="0030-0039", width=0.05, batch_size=32, steps=12, evaluate_every=4, learning_rate=0.01
)
OPTIONS = RunOptions(quiet=True)


def final_state(run_dir, dataset, config=CONFIG):
    with Checkpoints(run_dir) as checkpoints:
        return checkpoints.restore_newest(Learner.from_config(config, dataset).init(dataset.image_shape))


class StopAfter:
    """Sends this process a signal once a trainer has reached a step."""

    def __init__(self, monkeypatch, step, number):
        advance = Trainer.advance

        def advance_and_signal(trainer, state, until):
            result = advance(trainer, state, until)
            if until >= step and not self.sent:
                self.sent = True
                signal.raise_signal(number)
            return result

        self.sent = False
        monkeypatch.setattr(Trainer, "advance", advance_and_signal)


def test_a_run_directory_holds_config_classes_metrics_and_checkpoints(finished_run, digits):
    config = json.loads((finished_run / "config.json").read_text())
    assert RunConfig.from_json(config["config"]) == CONFIG
    assert config["loss"] == "cross_entropy"
    assert config["data"] == json.loads(json.dumps(digits.provenance))
    assert json.loads((finished_run / "class_names.json").read_text()) == list(digits.class_names)
    records = MetricsLog(finished_run / "metrics.jsonl").records()
    assert [record["step"] for record in records] == [4, 8, 12]
    assert set(records[0]["validation"]) >= {"loss", "accuracy", "auprc", "violation_rate"}
    assert newest_step(finished_run) == 12


def test_a_finished_run_is_not_trained_again(finished_run, digits, monkeypatch):
    monkeypatch.setattr(training, "_Run", None)
    outcome = fit(CONFIG, digits, finished_run, options=OPTIONS)
    assert (outcome.status, outcome.step) == ("finished", 12)
    assert outcome.validation["accuracy"] >= 0


@pytest.mark.parametrize("number", [signal.SIGHUP, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_and_the_resumed_run_is_the_same_bit_for_bit(
    finished_run, digits, tmp_path, monkeypatch, number
):
    monkeypatch.setattr(training, "_DISPATCH_SECONDS", 0.0)  # one step a dispatch: stop between two looks
    StopAfter(monkeypatch, 6, number)
    run_dir = tmp_path / "run"
    with pytest.raises(InterruptedRunError, match=r"Stopped at step 6; saved in .*checkpoints/6") as raised:
        fit(CONFIG, digits, run_dir, options=OPTIONS)
    assert raised.value.signal_number == number
    assert newest_step(run_dir) == 6
    outcome = fit(CONFIG, digits, run_dir, options=OPTIONS)
    assert outcome.status == "finished"
    chex.assert_trees_all_equal(final_state(run_dir, digits).state, final_state(finished_run, digits).state)
    records = MetricsLog(run_dir / "metrics.jsonl").records()
    assert [record["step"] for record in records] == [4, 8, 12]
    whole = MetricsLog(finished_run / "metrics.jsonl").records()
    assert records[-1]["validation"] == whole[-1]["validation"]


def test_another_config_in_the_same_directory_is_an_error_that_lists_the_differences(finished_run, digits):
    other = dataclasses.replace(CONFIG, steps=20, seed=3)
    with pytest.raises(ConfigError, match="--steps 20 instead of 12; --seed 3 instead of 0"):
        fit(other, digits, finished_run, options=OPTIONS)


def test_other_data_of_the_same_name_is_an_error(finished_run, digits):
    changed = dataclasses.replace(digits, provenance={**digits.provenance, "content_sha256": "other"})
    with pytest.raises(ConfigError, match="other data"):
        fit(CONFIG, changed, finished_run, options=OPTIONS)


def test_the_same_images_drawn_by_another_version_are_the_same_data(finished_run, digits):
    newer = dataclasses.replace(digits, provenance={**digits.provenance, "matplotlib": "99"})
    assert fit(CONFIG, newer, finished_run, options=OPTIONS).status == "finished"


def test_a_directory_that_cannot_be_written_is_an_error(digits, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        fit(CONFIG, digits, tmp_path / "file" / "run", options=OPTIONS)


def test_a_loss_that_is_not_finite_ends_the_run_with_step_rate_and_last_good_checkpoint(digits, tmp_path):
    diverging = Experiment(
        **{
            **dataclasses.asdict(Experiment.of_run(CONFIG)),
            "optimizer": "sgd",
            "schedule": "constant",
            "learning_rate": (1e30,),
        }
    )
    with pytest.raises(
        DivergenceError, match=r"no longer finite at step \d+, with learning rate 1e\+30; no check"
    ):
        run_experiment(diverging, digits, tmp_path / "run", options=OPTIONS)
    # Starting again says the same at once, and does not train a hopeless run a second time.
    with pytest.raises(DivergenceError, match="no longer finite"):
        run_experiment(diverging, digits, tmp_path / "run", options=OPTIONS)


def test_in_a_tie_the_smaller_validation_loss_is_chosen():
    def outcome(rate, loss):
        config = dataclasses.replace(CONFIG, learning_rate=rate)
        return training.Outcome("runs", config, "finished", 1, {"accuracy": 0.5, "loss": loss})

    assert choose([outcome(1.0, 0.3), outcome(0.1, 0.2)], "cross_entropy").config.learning_rate == 0.1
    assert choose([outcome(1.0, 0.2), outcome(0.1, 0.3)], "cross_entropy").config.learning_rate == 1.0


def test_a_cut_off_last_line_of_the_metrics_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert [record["step"] for record in MetricsLog(path).records()] == [1, 2]
    assert MetricsLog(path, first_step=1).records() == [{"step": 1}]
    assert np.size(path.read_text().splitlines()) == 1


def test_a_bad_line_of_the_metrics_keeps_the_good_ones_and_is_named_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    bad = [
        "{",
        "[]",
        "7",
        '{"loss": 1}',
        '{"step": "4"}',
        '{"step": 5, "loss": NaN}',
        "[" * 100_000,
        "\udcff",
    ]
    lines = ['{"step": 1}', *bad, '{"step": 2, "new": [1]}', ""]
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    with pytest.warns(
        RunWarning, match=r"line 2 is no record \(.*\), and 7 more; the others are used"
    ) as warned:
        assert MetricsLog(path).records() == [{"step": 1}, {"step": 2, "new": [1]}]
    assert len(warned) == 1


def test_means_that_are_not_finite_are_left_empty_in_the_metrics(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"step": 1, "loss": float("inf")})
    assert log.records() == [{"step": 1, "loss": None}]


def test_metrics_that_cannot_be_read_are_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(
        RunError, match=r"metrics\.jsonl cannot be read: it is a directory, not a regular file"
    ):
        MetricsLog(tmp_path / "metrics.jsonl").records()
    with pytest.raises(FileError, match=r"metrics\.jsonl could not be written"):
        MetricsLog(tmp_path / "metrics.jsonl").write({"step": 1})


def test_a_finished_run_whose_metrics_are_gone_is_measured_again(finished_run, digits, tmp_path):
    run_dir = shutil.copytree(finished_run, tmp_path / "run")
    (run_dir / "metrics.jsonl").unlink()
    outcome = fit(CONFIG, digits, run_dir, options=OPTIONS)
    before = MetricsLog(finished_run / "metrics.jsonl").records()[-1]
    assert (outcome.status, outcome.validation) == ("finished", before["validation"])
    (after,) = MetricsLog(run_dir / "metrics.jsonl").records()
    assert (after["step"], after["validation"]) == (12, before["validation"])
    assert choose([outcome], "cross_entropy") is outcome


def test_a_directory_where_another_process_trains_is_refused_and_not_touched(finished_run, digits, tmp_path):
    run_dir = shutil.copytree(finished_run, tmp_path / "run")
    experiment = dataclasses.replace(Experiment.of_run(CONFIG), loss=("cross_entropy", "max_margin"))
    with (run_dir / "lock").open("w") as file:
        file.write('{"pid": 1234, "host": "elsewhere"}')
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        with pytest.raises(RunError, match="Process 1234 on 'elsewhere' trains in"):
            fit(CONFIG, digits, run_dir, options=OPTIONS)
        run_dir.rename(tmp_path / "cross_entropy")
        with pytest.raises(RunError, match="Process 1234 on 'elsewhere' trains in"):
            run_experiment(experiment, digits, tmp_path, options=OPTIONS)
        (tmp_path / "cross_entropy").rename(run_dir)
        after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        assert after == before
        assert Run.open(run_dir).step == 12, "who only reads is not locked out"


def test_a_run_that_the_disk_has_no_room_for_is_refused_before_it_starts(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "check_space", lambda *args: check_space(args[0], args[1] * 10**12))
    with pytest.raises(ConfigError, match=r"needs .* PB, and its disk has .* left"):
        fit(CONFIG, digits, tmp_path / "run", options=OPTIONS)
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}]", "is not JSON"),
        ('{"loss": "cross_entropy"}', "loss must be a list"),
        ('{"loss": ["no_such_loss"]}', "no loss named"),
        ('{"learning_rate": []}', "needs at least one value"),
        ('{"steps": 1e3}', "steps must be a whole number"),
    ],
)
def test_an_experiment_that_cannot_be_read_is_one_sentence(tmp_path, text, why):
    (tmp_path / "experiment.json").write_text(text)
    with pytest.raises(RunError, match=rf"experiment\.json cannot be .*{why}"):
        saved_experiment(tmp_path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "must be an object"),
        ('{"cross_entropy": null}', "cross_entropy must be an object"),
        ('{"cross_entropy": {"chosen": 7}}', r"cross_entropy\.chosen must be text or null"),
        ('{"no_such_loss": {"chosen": null}}', "no loss that this version knows"),
        ('{"cross_entropy": {"chosen": null, "runs": [{}]}}', r"runs\[0\]\.run is missing"),
    ],
)
def test_a_sweep_that_cannot_be_read_is_one_sentence(tmp_path, text, why):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(RunError, match=rf"sweep\.json cannot be used: .*{why}"):
        read_sweep(tmp_path)
    with pytest.raises(RunError, match=rf"sweep\.json cannot be used: .*{why}"):
        find_runs([tmp_path])


def test_a_chosen_rate_that_diverges_later_does_not_take_the_other_losses_with_it(
    digits, tmp_path, monkeypatch
):
    experiment = dataclasses.replace(
        Experiment.of_run(CONFIG),
        loss=("cross_entropy", "max_margin"),
        learning_rate=(0.01, 0.5),
        sweep_steps=3,
    )

    def diverges_in_the_end(config, dataset, run_dir, *, options, start):
        if run_dir == tmp_path / "cross_entropy":
            return training.Outcome(run_dir, config, "diverged", config.steps, {})
        return training.Outcome(run_dir, config, "finished", config.steps, {"accuracy": 0.5, "loss": 1.0})

    monkeypatch.setattr(experiments, "fit", diverges_in_the_end)
    outcomes = run_experiment(experiment, digits, tmp_path, options=OPTIONS)
    assert [outcome.run_dir for outcome in outcomes] == [tmp_path / "max_margin"]


def test_a_folder_with_another_run_is_found_before_the_sweep(finished_run, digits, tmp_path):
    shutil.copytree(finished_run, tmp_path / "cross_entropy")
    experiment = dataclasses.replace(
        Experiment.of_run(CONFIG),
        batch_size=2 * CONFIG.batch_size,
        loss=("cross_entropy",),
        learning_rate=(0.01, 0.5),
        sweep_steps=3,
    )
    with pytest.raises(ConfigError, match=r"holds a run of another config: .*--batch-size 64"):
        run_experiment(experiment, digits, tmp_path, options=OPTIONS)
    assert not (tmp_path / "sweep").exists()


def test_a_choice_may_go_by_one_logit():
    def outcome(rate, accuracy, auprc):
        config = dataclasses.replace(CONFIG, learning_rate=rate)
        validation = {"accuracy": accuracy, "auprc": auprc, "loss": 1.0}
        return training.Outcome(Path("run"), config, "finished", 1, validation)

    outcomes = [outcome(1.0, 0.9, 0.1), outcome(0.1, 0.8, 0.2)]
    assert choose(outcomes, "cross_entropy").config.learning_rate == 1.0
    assert choose(outcomes, "cross_entropy", by="auprc").config.learning_rate == 0.1


def test_training_without_augmentation_sees_the_images_as_they_are(digits):
    plain = dataclasses.replace(digits, augment=None)
    config = dataclasses.replace(CONFIG, augment="none")
    states = [Trainer(config, dataset) for dataset in (digits, plain)]
    ends = [trainer.whole(trainer.advance(trainer.init(), until=3)[0]).params for trainer in states]
    chex.assert_trees_all_equal(*ends)
    augmented = Trainer(CONFIG, digits)
    other = augmented.whole(augmented.advance(augmented.init(), until=3)[0]).params
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(ends[0], other)


def test_a_streamed_run_trains_the_model_of_a_run_in_memory_and_resumes_to_it(digits):
    # Momentum, for the reason given below.
    config = dataclasses.replace(CONFIG, augment="crop-flip", optimizer="momentum")
    records = []
    for image, label in zip(digits.train.images, digits.train.labels.tolist(), strict=True):
        PIL.Image.fromarray(image[..., 0]).save(file := io.BytesIO(), "PNG")
        records.append((file.getvalue(), label))
    streamed = dataclasses.replace(digits, train=StreamSplit(records, digits.image_shape))
    ends = []
    for dataset in (digits, streamed):
        trainer = Trainer(config, dataset)
        state, totals = trainer.advance(trainer.init(), until=5)
        ends.append((trainer.whole(state).params, totals))
    # Two programs: XLA may order the additions of a product in another way. The batches are equal bit for bit.
    chex.assert_trees_all_close(*ends, rtol=2e-4, atol=2e-5)
    first, second = Trainer(config, streamed), Trainer(config, streamed)
    stopped = first.whole(first.advance(first.init(), until=3)[0])
    resumed = second.whole(second.advance(second.place(stopped), until=5)[0])
    chex.assert_trees_all_equal(resumed.params, ends[1][0])


def test_the_compiled_loop_of_a_convolutional_network_has_products_on_a_cpu(digits):
    trainer = Trainer(dataclasses.replace(CONFIG, model="cnn", width=1 / 32), digits)
    state = jax.eval_shape(trainer.init)
    resident = trainer.placement.put((digits.train.images, digits.train.labels))
    lowered = trainer._advance.lower(state, resident, jnp.int32(1)).as_text()
    # XLA compiles a convolution inside a loop without the library that makes it fast.
    assert "stablehlo.while" in lowered
    assert "dot_general" in lowered
    assert "stablehlo.convolution" not in lowered
