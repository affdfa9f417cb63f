"""Settings: every wrong one is found before anything runs."""

import dataclasses

import pytest

from pols_jax.cli import train
from pols_jax.errors import ConfigError
from pols_jax.losses import LOSSES
from pols_jax.training.config import LEARNING_RATE_SWEEP, Experiment, RunConfig, RunOptions
from pols_jax.training.experiments import run_folders
from pols_jax.training.presets import PRESETS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "batch_ce"}, "no loss named 'batch_ce'; did you mean batch_cross_entropy"),
        ({"model": "resnet"}, "no network named 'resnet'; did you mean resnet50"),
        ({"optimizer": "adan"}, "no optimizer named 'adan'; did you mean adam"),
        ({"noise": "gauss"}, "no noise distribution named 'gauss'"),
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"steps": 10**12}, "--steps must be at most 2,147,483,647, got 1000000000000"),
        ({"steps": 1.5}, "--steps must be a whole number, got 1.5"),
        ({"steps": True}, "--steps must be a whole number, got True"),
        ({"seed": 2**40}, "--seed must be at most 2,147,483,647"),
        ({"seed": -1}, "--seed must not be negative"),
        ({"batch_size": -1}, "--batch-size must be at least 1"),
        ({"width": float("inf")}, "--width must be a finite number, got inf"),
        ({"width": float("nan")}, "--width must be a finite number, got nan"),
        ({"width": -1.0}, "--width must be positive"),
        ({"width": 0.0}, "--width must be positive"),
        ({"width": "wide"}, "--width must be a number, got 'wide'"),
        ({"hidden_sizes": (0,)}, "--hidden-sizes must be at least 1, got 0"),
        ({"hidden_sizes": 500}, "--hidden-sizes must be a list, got 500"),
        ({"image_size": 0}, "--image-size must be at least 1, got 0"),
        ({"characters": ""}, "--characters must not be empty"),
        ({"dataset": "caf\udce9"}, "--dataset must be text in UTF-8"),
        ({"dtype": "float64"}, "--dtype must be float32 or bfloat16, got 'float64'"),
        ({"augment": "crops"}, "no augmentation named 'crops'; did you mean crop or crop-flip"),
        ({"learning_rate": -0.1}, "--learning-rate must be positive"),
        ({"learning_rate": float("nan")}, "--learning-rate must be a finite number, got nan"),
        ({"margin": 0.0}, "--margin must be positive"),
        ({"weight_decay": -1.0}, "--weight-decay must not be negative"),
        ({"hidden_sizes": (3,), "model": "cnn"}, "--hidden-sizes is an option of the mlp"),
        ({"auxiliary": True}, "--auxiliary is an option of inception_v3"),
    ],
)
def test_a_wrong_setting_is_one_sentence_that_names_the_flag(settings, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": ()}, "--loss needs at least one value"),
        ({"loss": ("batch_ce",)}, "no loss named 'batch_ce'; did you mean batch_cross_entropy"),
        ({"learning_rate": "swep"}, "--learning-rate must be sweep, got 'swep'"),
        ({"learning_rate": 0.1}, "--learning-rate must be a list, got 0.1"),
        ({"learning_rate": (0.1, float("inf"))}, "--learning-rate must be a finite number, got inf"),
        ({"num_noise": (0,)}, "--num-noise must be at least 1, got 0"),
        ({"sweep_steps": 0}, "--sweep-steps must be at least 1, got 0"),
    ],
)
def test_a_wrong_setting_of_an_experiment_is_found_when_it_is_made(settings, message):
    with pytest.raises(ConfigError, match=message):
        Experiment(**settings)


def test_how_to_run_is_checked_too():
    with pytest.raises(ConfigError, match="--keep-checkpoints must be at least 1, got 0"):
        RunOptions(keep_checkpoints=0)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_lists_valid_runs(name):
    preset = PRESETS[name]
    runs = preset.experiment.runs()
    assert runs
    assert preset.what
    assert preset.time
    assert any(character.isdigit() for character in preset.score)
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
    assert RunConfig(loss="binary_cross_entropy", bias_init=0.5).first_bias(1001) == 0.5


def test_a_config_that_was_written_with_older_names_still_opens():
    old = {"loss": "binary_cross_entropy", "bias_start": -3.0, "head": "linear"}
    assert RunConfig.from_json(old) == RunConfig(
        loss="binary_cross_entropy", bias_init=-3.0, head="blockwise"
    )
    assert Experiment.from_json({"bias_start": 0.5}).bias_init == 0.5
    assert train.parse(["--bias-start", "-3"]) == train.parse(["--bias-init", "-3"])


def test_augment_true_or_false_of_an_older_config_means_what_it_meant():
    assert RunConfig.from_json({"augment": False}).augment == "none"
    assert RunConfig.from_json({"augment": True}) == RunConfig()
    assert Experiment.from_json({"dataset": "mnist", "augment": True}).augment == "auto"
    # A folder was decoded to 224 x 224 x 3, and cropped and mirrored where it was streamed.
    folder = RunConfig.from_json({"dataset": "folder:x", "augment": True, "image_size": None, "channels": 1})
    assert (folder.augment, folder.image_size, folder.channels) == ("older", 224, 1)
    assert RunConfig.from_json(folder.to_json()) == folder
    assert train.parse(["--no-augment"]) == train.parse(["--augment", "none"])
