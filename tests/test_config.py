"""Settings: every wrong one is found before anything runs."""

import dataclasses

import pytest

from pols_jax.config import LEARNING_RATE_SWEEP, PRESETS, ConfigError, Experiment, RunConfig
from pols_jax.experiments import run_folders
from pols_jax.losses import LOSSES


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "batch_ce"}, "no loss named 'batch_ce'; did you mean batch_cross_entropy"),
        ({"model": "resnet"}, "no network named 'resnet'; did you mean resnet50"),
        ({"optimizer": "adan"}, "no optimizer named 'adan'; did you mean adam"),
        ({"noise": "gauss"}, "no noise distribution named 'gauss'"),
        ({"steps": 0}, "--steps must be positive, got 0"),
        ({"batch_size": -1}, "--batch-size must be positive"),
        ({"learning_rate": -0.1}, "--learning-rate must be positive"),
        ({"learning_rate": float("nan")}, "--learning-rate must be positive"),
        ({"margin": 0.0}, "--margin must be positive"),
        ({"weight_decay": -1.0}, "--weight-decay must not be negative"),
        ({"hidden_sizes": (3,), "model": "cnn"}, "--hidden-sizes is an option of the mlp"),
        ({"auxiliary": True}, "--auxiliary is an option of inception_v3"),
    ],
)
def test_a_wrong_setting_is_one_sentence_that_names_the_flag(settings, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig(**settings)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_lists_valid_runs(name):
    preset = PRESETS[name]
    runs = preset.experiment.runs()
    assert runs
    command = "python train.py" if name == next(iter(PRESETS)) else f"python train.py --preset {name}"
    assert preset.promise.startswith(f"`{command}`: ")
    assert len(set(runs)) == len(runs)


def test_the_papers_presets_train_every_loss_with_four_rates():
    runs = PRESETS["mnist"].experiment.runs()
    assert [(run.loss, run.learning_rate) for run in runs] == [
        (loss, rate) for loss in LOSSES for rate in LEARNING_RATE_SWEEP
    ]


def test_only_the_hyper_parameters_of_a_loss_are_swept():
    experiment = Experiment(loss=("all",), margin=(1.0, 2.0), alpha=(0.1, 0.2, 0.3))
    counts = {loss: sum(run.loss == loss for run in experiment.runs()) for loss in LOSSES}
    assert counts == dict.fromkeys(LOSSES, 1) | {
        "max_margin": 2,
        "batch_max_margin": 2,
        "self_normalization": 3,
    }


def test_every_run_has_its_own_folder_named_after_its_loss():
    folders = run_folders(Experiment(loss=("all",), alpha=(0.1, 1.0)), "runs")
    assert len(folders) == 8
    assert all(path.name.startswith(run.loss) for path, run in folders.items())
    single = run_folders(Experiment(loss=("max_margin",)), "runs/mine")
    assert [str(path) for path in single] == ["runs/mine"]


@pytest.mark.parametrize(
    "config",
    [RunConfig(), Experiment(), Experiment(learning_rate="sweep", fonts=("a.ttf",), num_noise=(3, 4))],
)
def test_json_gives_back_the_same_config(config):
    assert type(config).from_json(config.to_json()) == config


def test_an_experiment_of_one_run_has_that_run():
    run = RunConfig(loss="noise_contrastive_estimation", num_noise=7, noise="empirical", seed=4)
    assert Experiment.of_run(run).runs() == [run]
    assert Experiment.of_run(dataclasses.replace(run, num_noise=None)).runs()[0].num_noise is None


def test_sigmoid_losses_start_from_the_prior_and_others_from_zero():
    assert RunConfig(loss="binary_cross_entropy").first_bias(1001) == pytest.approx(-6.9078, abs=1e-4)
    assert RunConfig(loss="batch_cross_entropy").first_bias(1001) == 0.0
    assert RunConfig(loss="binary_cross_entropy", bias_start=0.5).first_bias(1001) == 0.5
