"""Networks against PyTorch: the same weights give the same results, and records of several runs become one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pols_jax.benchmarking.records import Record, Recorder, describe_environment
from pols_jax.benchmarking.settings import NetworkSettings
from pols_jax.benchmarking.speed_tables import speed_tables
from pols_jax.cli.bench import main
from pols_jax.errors import ConfigError, ProgramError
from pols_jax.models import MODELS


def random_variables(backbone, images):
    """Random weights and running statistics, all of order one and positive where they have to be."""
    rng = np.random.default_rng(0)

    def fill(path, leaf):
        if path[-1].key == "kernel":
            return np.float32(rng.normal(size=leaf.shape) * np.sqrt(2 / np.prod(leaf.shape[:-1])))
        return np.float32(rng.uniform(0.5, 1.5, leaf.shape))

    return jax.tree.map_with_path(fill, jax.eval_shape(backbone.init, jax.random.key(0), images))


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("cnn", 16, {"width": 1 / 32}),
        ("alexnet", 63, {"width": 1 / 32}),
        ("vgg16", 32, {"width": 1 / 32}),
        pytest.param("resnet50", 32, {"width": 1 / 16}, marks=pytest.mark.slow),
        # More than nine blocks in a stage: their names do not sort as text.
        pytest.param("resnet101", 32, {"width": 1 / 16, "stage_sizes": (1, 11)}, marks=pytest.mark.slow),
        pytest.param("inception_v3", 75, {"width": 1 / 16}, marks=pytest.mark.slow),
    ],
)
def test_the_torch_module_computes_what_our_network_does(name, size, options):
    pytest.importorskip("torch", exc_type=ImportError)
    from pols_jax.benchmarking import torch_peer

    backbone = MODELS[name](**options)
    images = np.random.default_rng(1).standard_normal((2, size, size, 3), np.float32)
    variables = random_variables(backbone, images)
    features = jax.jit(backbone.apply)(variables, jnp.asarray(images))
    call = torch_peer.forward_call(name, variables, images, platform="cpu")
    scale = np.max(np.abs(features))
    assert scale > 0
    # Float32 sums in another order, through many layers.
    np.testing.assert_allclose(call(0).numpy(), features, rtol=0, atol=1e-4 * scale)


def test_the_command_compares_and_times_all_programs_and_appends(tmp_path, capsys):
    pytest.importorskip("torch", exc_type=ImportError)
    path = tmp_path / "speed.json"
    flags = [
        "--peer",
        "torch",
        "--networks",
        "cnn",
        "--width",
        "0.03",
        "--repetitions",
        "2",
        "--json",
        str(path),
    ]
    main(["networks", *flags, "--batch-size", "2"])
    main(["networks", *flags, "--batch-size", "2", "--program", "step", "--append"])
    main(["networks", *flags, "--batch-size", "2", "--append"])  # measured again: replaced
    record = Record.load(path)
    names = [
        "step_auto",
        "step_xla",
        "steps_in_loop",
        "torch_step",
        "forward_auto",
        "forward_xla",
        "torch_forward",
    ]
    assert sorted(m.variant for m in record.measurements) == sorted(names)
    assert all(len(m.times_ms) == 2 for m in record.measurements)
    forward, step = speed_tables(record)
    assert len(forward.rows) == len(step.rows) == 1
    assert "ours / PyTorch" in capsys.readouterr().out


def test_a_record_of_another_benchmark_is_not_added_to():
    environment = describe_environment(jax.devices()[:1])
    new, other = Record("networks", {}, environment), Record("losses", {}, environment)
    assert (
        new.added_to(Record("networks", {}, environment | {"command": "a"}))
        .environment["command"]
        .startswith("a && ")
    )
    with pytest.raises(ConfigError, match="one of losses"):
        new.added_to(other)
    elsewhere = Record("networks", {}, environment | {"device": {"platform": "tpu"}})
    with pytest.raises(ConfigError, match="another device"):
        new.added_to(elsewhere)


def test_other_values_than_the_first_programs_are_not_timed(monkeypatch):
    pytest.importorskip("torch", exc_type=ImportError)
    from pols_jax.benchmarking import network_speed, torch_peer

    settings = NetworkSettings(networks=("cnn",), batch_size=(2,), width=0.03, peer="torch", repetitions=1)
    wrong = torch_peer.forward_call

    def scaled(network, variables, images, **options):
        call = wrong(network, variables, images, **options)
        return lambda number: 1.01 * call(number)

    monkeypatch.setattr(torch_peer, "forward_call", scaled)
    recorder = Recorder(Record("networks", {}, {}), None)
    with pytest.raises(ProgramError, match="other values"):
        network_speed.run_networks(settings, recorder, say=lambda text: None)
    assert not recorder.record.measurements


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"append": True}, "--json"),
        ({"width": -1.0}, "--width"),
        ({"networks": ()}, "--networks"),
        ({"networks": ("mlp",), "peer": "torch"}, "mlp"),
    ],
)
def test_wrong_settings_are_one_sentence(flags, message):
    with pytest.raises(ConfigError, match=message):
        NetworkSettings(**flags).check()
