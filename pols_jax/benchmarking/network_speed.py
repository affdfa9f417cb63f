"""Forward passes and training steps of our networks: as they are, with XLA's convolutions, and in PyTorch.

All have the same weights and images, and their results are compared before they are timed.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pols_jax.benchmarking import torch_peer
from pols_jax.benchmarking.logits_speed import image_shape
from pols_jax.benchmarking.records import Recorder
from pols_jax.benchmarking.settings import NetworkSettings, find_devices
from pols_jax.benchmarking.timing import Variant, compiled, profile
from pols_jax.data import Batch
from pols_jax.errors import ProgramError
from pols_jax.losses import make_loss
from pols_jax.models import MODELS, Classifier
from pols_jax.training.config import RunConfig
from pols_jax.training.learning import Learner, Totals, train_step
from pols_jax.training.optimizers import make_optimizer

# Float32 through a hundred layers, relative to the largest value.
_TOLERANCE = 1e-3
_NUM_CLASSES = 10
_STEPS_IN_LOOP = 4
_LEARNING_RATE, _MOMENTUM = 1e-3, 0.9


def run_networks(settings: NetworkSettings, recorder: Recorder, *, say: Callable[[str], None]) -> None:
    """Measures what the settings ask for, network by network."""
    make = _step_variants if settings.program == "step" else _forward_variants
    for network, batch_size in itertools.product(settings.networks, settings.batch_size):
        title = f"{network}, batch size {batch_size}"
        say(f"{title}: compiling")
        case = {"network": network, "batch_size": batch_size, "width": str(settings.width)}
        variants = make(settings, case)
        say(f"{title}: {len(variants)} variants, {settings.repetitions} calls of each")
        recorder.measure(variants, repetitions=settings.repetitions, warmup=1)
        profile(variants, settings.profile, f"{network}-{batch_size}")


def _forward_variants(settings, case) -> list[Variant]:
    device = find_devices(settings.device)[0]
    images = _random_images(case, device)
    variables = jax.jit(_backbone(settings, case).init)(jax.random.key(0), images[:1])
    variants, expected = [], None
    for convolution in settings.convolutions:
        backbone = _backbone(settings, case, convolution)
        program, ms = compiled(jax.jit(backbone.apply), variables, images)
        features = np.asarray(program(variables, images))
        expected = features if expected is None else expected
        _check(f"forward_{convolution}", features, expected)

        def call(_, program=program):
            return program(variables, images)

        variants.append(Variant(f"forward_{convolution}", call, case | _memory(program), ms))
    if settings.peer == "torch":
        forward = torch_peer.forward_call(
            case["network"], variables, np.array(images), platform=device.platform
        )
        _check("torch_forward", forward(0).cpu().numpy(), expected)
        variants.append(Variant("torch_forward", forward, case))
    return variants


def _step_variants(settings, case) -> list[Variant]:
    device = find_devices(settings.device)[0]
    labels = np.arange(case["batch_size"], dtype=np.int32) % _NUM_CLASSES
    batch = Batch(_random_images(case, device), jnp.asarray(labels), jnp.ones(len(labels), bool))
    config = RunConfig(
        optimizer="momentum", momentum=_MOMENTUM, schedule="constant", learning_rate=_LEARNING_RATE
    )
    loss, optimizer = make_loss("cross_entropy"), make_optimizer(config)
    states, variants, expected = {}, [], None
    weights: dict[str, Any] = {}

    def learner(convolution):
        return Learner(Classifier(_backbone(settings, case, convolution), _NUM_CLASSES), loss, optimizer, 0)

    def loop(learner, state, batch, count):
        def once(_, carry):
            return train_step(learner, carry[0], batch)

        return lax.fori_loop(0, count, once, (state, Totals.zero()))

    programs: list[tuple[str, str, Callable[..., Any], tuple[Any, ...]]]
    programs = [(f"step_{name}", name, train_step, ()) for name in settings.convolutions]
    # As `Trainer` does it: several steps in a compiled loop, for which memory is allocated once.
    programs.append(("steps_in_loop", "auto", loop, (jnp.int32(_STEPS_IN_LOOP),)))
    for name, convolution, function, count in programs:
        ours = learner(convolution)
        state = ours.init(image_shape(case["network"]))
        if not weights:
            weights = jax.tree.map(np.array, {"params": state.params, "batch_stats": state.batch_stats})
        jitted = jax.jit(function, static_argnums=0, donate_argnums=1)
        program, ms = compiled(jitted, ours, state, batch, *count)
        states[name] = state

        def call(_, name=name, program=program, count=count):
            states[name], totals = program(states[name], batch, *count)
            return totals.last_loss

        steps = _STEPS_IN_LOOP if count else 1
        losses = np.asarray([float(call(0)) for _ in range(_STEPS_IN_LOOP // steps)])
        expected = losses if expected is None else expected
        _check(name, losses[-1], expected[-1])
        variants.append(Variant(name, call, case | _memory(program) | {"steps": steps}, ms))
    if settings.peer == "torch":
        step = torch_peer.step_call(
            case["network"],
            weights,
            np.array(batch.images),
            labels,
            learning_rate=_LEARNING_RATE,
            momentum=_MOMENTUM,
            platform=device.platform,
        )
        _check("torch_step", np.asarray([float(step(call)) for call in range(_STEPS_IN_LOOP)]), expected)
        variants.append(Variant("torch_step", step, case | {"steps": 1}))
    return variants


def _backbone(settings, case, convolution="auto"):
    return MODELS[case["network"]](width=settings.width, convolution=convolution)


def _random_images(case, device):
    shape = (case["batch_size"], *image_shape(case["network"]))
    return jax.device_put(np.random.default_rng(0).standard_normal(shape, np.float32), device)


def _memory(program) -> dict[str, int]:
    """What memory a compiled program takes, as a part of its case."""
    sizes = program.memory_analysis()
    if sizes is None:
        return {}
    # Outputs that take the place of inputs are counted once.
    size = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return {"memory_bytes": size + sizes.temp_size_in_bytes}


def _check(name, actual, expected):
    error = np.max(np.abs(actual - expected)) / np.max(np.abs(expected))
    if not error < _TOLERANCE:
        raise ProgramError(
            f"{name} gives other values than the first program: the relative difference is {error:.2g}."
        )
