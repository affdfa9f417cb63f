"""Training from weights that are there: what is taken, what is trained, and that nothing is lost on the way."""

import dataclasses
import shutil
import signal

import chex
import jax
import numpy as np
import pytest
from torch_resnet import write_safetensors

from pols_jax.data import ArraySplit, Dataset, load
from pols_jax.errors import ConfigError, InterruptedRunError
from pols_jax.evaluation.measuring import evaluate
from pols_jax.evaluation.normalizing import normalize
from pols_jax.search.class_bank import ClassBank
from pols_jax.training import features, fitting
from pols_jax.training.checkpoint_reading import StoredCheckpoint
from pols_jax.training.checkpoints import newest_step
from pols_jax.training.config import Experiment, RunConfig
from pols_jax.training.experiments import run_experiment
from pols_jax.training.fitting import RunOptions, fit
from pols_jax.training.learning import Learner, run_loss
from pols_jax.training.network import make_model
from pols_jax.training.optimizers import make_optimizer
from pols_jax.training.run_files import read_run_info
from pols_jax.training.runs import Run
from pols_jax.training.trainer import Trainer

# The settings of test_fitting.py: its programs are compiled already.
CONFIG = RunConfig(
    characters="0030-0039", width=0.05, batch_size=32, steps=12, evaluate_every=4, learning_rate=0.01
)
OPTIONS = RunOptions(quiet=True)


@pytest.fixture(scope="module")
def letters():
    return load("glyphs", characters="0041-004A")


@pytest.fixture(scope="module")
def source(finished_run):
    """A run to start from."""
    return finished_run


def on_letters(source, **changes):
    return dataclasses.replace(CONFIG, characters="0041-004A", init_from=str(source), **changes)


def stored_arrays(run_dir, step=None):
    checkpoint = StoredCheckpoint(run_dir, newest_step(run_dir) if step is None else step)
    return {name: checkpoint.array(name).read() for name in checkpoint.meta["arrays"]}


def stop_after(monkeypatch, step):
    """Sends a signal once, after a step."""
    advance, sent = Trainer.advance, []

    def advance_and_signal(trainer, state, until):
        result = advance(trainer, state, until)
        if trainer.step_of(result[0]) >= step and not sent:
            sent.append(step)
            signal.raise_signal(signal.SIGTERM)
        return result

    monkeypatch.setattr(Trainer, "advance", advance_and_signal)
    monkeypatch.setattr(fitting, "_DISPATCH_SECONDS", 0.0)


@pytest.mark.parametrize(
    "flags",
    [
        {"clip_norm": 0.1, "accumulate": 3, "class_weights": "balanced", "backbone_rate": 0.5},
        {"train": "head", "head": "blockwise", "feature_passes": 1, "stop_after": 1, "learning_rate": 1e-9},
        {"train": "head", "head": "sampled", "loss": "noise_contrastive_estimation", "num_noise": 4},
    ],
    ids=str,
)
def test_a_resumed_run_is_the_same_bit_for_bit_and_needs_the_weights_no_more(
    flags, source, letters, tmp_path, monkeypatch
):
    weights = tmp_path / "weights"
    shutil.copytree(source, weights)
    config = on_letters(weights, **flags)
    whole = fit(config, letters, tmp_path / "whole", options=OPTIONS)
    stop_after(monkeypatch, 5)
    with pytest.raises(InterruptedRunError):
        fit(config, letters, tmp_path / "stopped", options=OPTIONS)
    shutil.rmtree(weights)
    resumed = fit(config, letters, tmp_path / "stopped", options=OPTIONS)
    assert newest_step(tmp_path / "stopped") == newest_step(tmp_path / "whole") == whole.step
    # A rate of nearly zero improves nothing: the second look is as good as the first, and the last.
    assert whole.step == (8 if "stop_after" in flags else 12)
    assert resumed.validation == whole.validation
    chex.assert_trees_all_equal(stored_arrays(tmp_path / "stopped"), stored_arrays(tmp_path / "whole"))
    again = fit(config, letters, tmp_path / "whole", options=OPTIONS)
    assert (again.step, again.validation) == (whole.step, whole.validation)


def test_the_backbone_is_taken_and_the_head_only_with_the_same_classes(source, digits, letters, tmp_path):
    tiny = {"learning_rate": 1e-12, "steps": 1, "optimizer": "sgd"}
    before = stored_arrays(source)
    for dataset, keeps_head in ((letters, False), (digits, True)):
        config = dataclasses.replace(on_letters(source, **tiny), characters=dataset.provenance["characters"])
        run_dir = tmp_path / dataset.class_names[0]
        fit(config, dataset, run_dir, options=OPTIONS)
        after = stored_arrays(run_dir)
        kernel = "params.backbone.layer1.dense.kernel"
        np.testing.assert_allclose(after[kernel], before[kernel], atol=1e-8)
        is_same = np.allclose(after["params.head.kernel"], before["params.head.kernel"], atol=1e-8)
        assert is_same is keeps_head
        info = read_run_info(run_dir).start
        assert info.path == str(source)
        assert info.identity == Run.open(source, use="best").checkpoint
        assert ("head new (10 -> 10 classes)" in info.what) is not keeps_head


def test_with_train_head_features_are_computed_once_for_all_losses_and_the_backbone_stays(
    source, letters, tmp_path, monkeypatch
):
    calls, compute = [], features.split_features
    monkeypatch.setattr(
        features, "split_features", lambda *args, **options: calls.append(1) or compute(*args, **options)
    )
    losses = ("cross_entropy", "batch_max_margin")
    settings = dataclasses.asdict(on_letters(source, train="head"))
    for name in ("learning_rate", "margin", "alpha", "noise", "num_noise"):
        del settings[name]
    experiment = Experiment(**settings | {"loss": losses}, learning_rate=(0.01,))
    outcomes = run_experiment(experiment, letters, tmp_path / "runs", options=OPTIONS)
    assert len(calls) == 2  # the training and the validation split
    before = stored_arrays(Run.open(source, use="best").directory, Run.open(source, use="best").step)
    for outcome in outcomes:
        after = stored_arrays(outcome.run_dir)
        for name in before:
            if ".backbone." in name and not name.startswith("opt_state"):
                np.testing.assert_array_equal(after[name], before[name])
    # The directory is that of a normal run.
    run_dir = outcomes[0].run_dir
    normalize(run_dir, rows="affine", dataset=letters, quiet=True)
    record = evaluate(run_dir, dataset=letters, quiet=True)
    assert record.normalized is not None
    bank = ClassBank.open(run_dir)
    assert bank.logits(letters.test.images[:3], [0, 5]).shape == (3, 2)


def test_head_training_is_the_gradient_step_of_the_whole_network_with_a_backbone_that_stands_still(
    source, letters, tmp_path
):
    """One step of SGD on the head, from features: kernel - rate * gradient, computed here from the logits themselves."""
    config = on_letters(source, train="head", optimizer="sgd", schedule="constant", steps=1, batch_size=80)
    fit(config, letters, tmp_path / "run", options=OPTIONS)
    run = Run.open(tmp_path / "run")
    variables = run.restore_backbone()
    inputs, labels = features.split_features(run.model, variables, letters.train)
    assert len(labels) == config.batch_size  # one batch is the whole split
    first = Learner.from_config(config, letters).init(letters.image_shape).params["head"]

    def loss(head):
        logits = inputs @ head["kernel"].T + head["bias"][None]
        return run_loss(config, letters)(logits, labels)

    gradient = jax.jit(jax.grad(loss))(first)
    kernel, bias = run.restore_head()
    np.testing.assert_allclose(kernel, first["kernel"] - 0.01 * gradient["kernel"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bias, first["bias"] - 0.01 * gradient["bias"], rtol=1e-5, atol=1e-6)


def test_two_steps_that_are_accumulated_are_one_step_of_twice_the_batch(source, letters, tmp_path):
    shared = {"train": "head", "optimizer": "momentum", "schedule": "constant", "loss": "cross_entropy"}
    for name, batch in {
        "small": {"batch_size": 40, "steps": 8, "accumulate": 2},
        "large": {"batch_size": 80, "steps": 4},
    }.items():
        fit(on_letters(source, **shared, **batch), letters, tmp_path / name, options=OPTIONS)
    small, large = (Run.open(tmp_path / name, use="last").restore_head() for name in ("small", "large"))
    chex.assert_trees_all_close(small, large, rtol=1e-5, atol=1e-6)


def test_balanced_classes_weigh_the_same_in_every_loss(letters):
    few = ArraySplit(letters.train.images[:23], np.sort(np.arange(23) % 10 % 7).astype(np.int32))
    unbalanced = dataclasses.replace(letters, train=few)
    counts = np.bincount(few.labels, minlength=10)
    logits = np.random.default_rng(0).normal(size=(23, 10)).astype(np.float32)
    config = dataclasses.replace(CONFIG, class_weights="balanced")
    loss = jax.jit(run_loss(CONFIG, letters))
    per_class = [
        float(loss(logits[few.labels == c], few.labels[few.labels == c])) for c in range(10) if counts[c]
    ]
    weighted = float(jax.jit(run_loss(config, unbalanced))(logits, few.labels, where=np.ones(23, bool)))
    np.testing.assert_allclose(weighted, np.mean(per_class), rtol=1e-6)


def test_the_backbone_has_a_smaller_rate_and_large_gradients_are_clipped(source):
    params = {
        "backbone": {"kernel": np.ones((2, 2), np.float32)},
        "head": {"kernel": np.ones((3, 2), np.float32)},
    }
    gradients = jax.tree.map(lambda leaf: 3 * leaf, params)

    def updates(**changes):
        config = dataclasses.replace(CONFIG, optimizer="sgd", schedule="constant", **changes)
        optimizer = make_optimizer(config)
        with jax.numpy_dtype_promotion("standard"):
            moved, _ = optimizer.update(gradients, optimizer.init(params), params)
        return moved["backbone"]["kernel"], moved["head"]["kernel"]

    # The gradient is 3 everywhere and the rate 0.01; its norm is 3 sqrt(10).
    for (backbone, head), expected in (
        (updates(), (-0.03, -0.03)),
        (updates(init_from=str(source)), (-0.003, -0.03)),
        (updates(init_from=str(source), backbone_rate=0.5), (-0.015, -0.03)),
        (updates(clip_norm=1.0), (-0.01 / 10**0.5, -0.01 / 10**0.5)),
        (updates(clip_norm=100.0), (-0.03, -0.03)),
    ):
        np.testing.assert_allclose(backbone, expected[0], rtol=1e-6)
        np.testing.assert_allclose(head, expected[1], rtol=1e-6)


@pytest.fixture(scope="module")
def photos():
    rng = np.random.default_rng(0)
    parts = (
        ArraySplit(rng.integers(0, 256, (n, 64, 64, 3), np.uint8), np.arange(n, dtype=np.int32) % 3)
        for n in (48, 8, 8)
    )
    return Dataset("photos", ("a", "b", "c"), (64, 64, 3), *parts, provenance={})


ALEXNET = RunConfig(dataset="photos", model="alexnet", width=0.02, batch_size=16, steps=4, evaluate_every=4)


def alexnet_arrays(num_classes=5, channels=3):
    """The narrowest alexnet, in torchvision's layout."""
    rng = np.random.default_rng(0)
    layers = {"features.0": (1, channels, 11, 11), "features.3": (4, 1, 5, 5), "features.6": (8, 4, 3, 3)}
    layers |= {"features.8": (5, 8, 3, 3), "features.10": (5, 5, 3, 3)}
    layers |= {"classifier.1": (82, 5), "classifier.4": (82, 82), "classifier.6": (num_classes, 82)}
    arrays = {}
    for name, shape in layers.items():
        arrays[f"{name}.weight"] = rng.normal(size=shape).astype(np.float32)
        arrays[f"{name}.bias"] = rng.normal(size=shape[0]).astype(np.float32)
    return arrays


def test_published_weights_start_a_run_with_their_own_pixels(photos, tmp_path):
    path = write_safetensors(tmp_path / "alexnet.safetensors", alexnet_arrays())
    config = dataclasses.replace(ALEXNET, init_from=str(path), train="head")
    fit(config, photos, tmp_path / "run", options=OPTIONS)
    path.unlink()
    run = Run.open(tmp_path / "run")
    assert run.config.pixels == "imagenet"
    assert len(run.info.start.identity) == 64
    assert "head new (5 -> 3 classes)" in run.info.start.what
    assert make_model(run.config, 3).backbone.pixels == "imagenet"
    arrays = stored_arrays(tmp_path / "run")
    np.testing.assert_array_equal(
        arrays["params.backbone.conv2.kernel"], alexnet_arrays()["features.3.weight"].transpose(2, 3, 1, 0)
    )
    # The same command again, without the file: the run has ended.
    assert fit(config, photos, tmp_path / "run", options=OPTIONS).step == 4


def test_weights_that_do_not_fit_are_one_sentence(photos, source, tmp_path):
    def problem(path, **changes):
        config = dataclasses.replace(ALEXNET, init_from=str(path), **changes)
        with pytest.raises(ConfigError) as raised:
            fit(config, photos, tmp_path / "run", options=OPTIONS)
        assert not (tmp_path / "run").exists()
        message = str(raised.value)
        assert "\n" not in message
        return message

    good = write_safetensors(tmp_path / "good.safetensors", alexnet_arrays())
    assert "is not there" in problem(tmp_path / "none.safetensors")
    assert "holds weights of alexnet, not of resnet50" in problem(good, model="resnet50", width=0.05)
    assert "and not for --model mlp" in problem(good, model="mlp")
    assert "holds a mlp; add --model mlp" in problem(source)
    assert "must be a run directory, or a .safetensors or .pth file" in problem(__file__)
    gray = write_safetensors(tmp_path / "gray.safetensors", alexnet_arrays(channels=1))
    assert "features.0.weight has the shape [1, 1, 11, 11], and the network here [1, 3, 11, 11]" in problem(
        gray
    )
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(good.read_bytes()[:-100])
    assert "it is damaged" in problem(damaged)
    damaged.write_bytes(b"not weights at all")
    assert "it is damaged" in problem(damaged)
    wrong = alexnet_arrays()
    wrong["features.3.bias"][0] = np.nan
    assert "not finite" in problem(write_safetensors(tmp_path / "nan.safetensors", wrong))
    assert "does not fit: params/backbone/layer1/dense/kernel is [1024, 25]" in problem(source, model="mlp")


def test_weights_of_pytorch_are_read_without_running_what_is_in_the_file(photos, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)
    tensors = {f"module.{name}": torch.from_numpy(array) for name, array in alexnet_arrays().items()}
    torch.save({"state_dict": tensors}, tmp_path / "alexnet.pth")
    config = dataclasses.replace(ALEXNET, init_from=str(tmp_path / "alexnet.pth"), train="head")
    fit(config, photos, tmp_path / "run", options=OPTIONS)
    torch.save({"state_dict": print}, tmp_path / "print.pth")
    config = dataclasses.replace(config, init_from=str(tmp_path / "print.pth"))
    with pytest.raises(ConfigError, match="it is damaged, or holds more than weights"):
        fit(config, photos, tmp_path / "other", options=OPTIONS)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train": "head"}, "--train head needs --init-from"),
        ({"train": "tail"}, "--train must be all or head"),
        ({"feature_passes": 2}, "--feature-passes is an option of --train head"),
        ({"train": "head", "init_from": "x", "backbone_rate": 0.1}, "which --train head leaves as it is"),
        ({"class_weights": "even"}, "--class-weights must be balanced"),
        ({"accumulate": 5}, "--steps 12 is not a multiple of --accumulate 5"),
        ({"clip_norm": 0.0}, "--clip-norm must be positive"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_are_one_sentence(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        dataclasses.replace(CONFIG, **changes)
