"""An output layer spread over devices: its mesh, its padding, one logit from it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pols_jax import heads, linear_losses, losses
from pols_jax.sharded_head import class_logits, make_mesh, pad_classes


def layer(num_classes=16, num_features=4, num_examples=6):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(num_examples, num_features)).astype(np.float32)
    kernel = rng.normal(size=(num_classes, num_features)).astype(np.float32)
    return jnp.asarray(features), jnp.asarray(kernel), jnp.asarray(rng.normal(size=num_classes), jnp.float32)


def ask_on(mesh):
    specs = (P("data"), P("class"), P("class"), P())
    return jax.jit(jax.shard_map(class_logits, mesh=mesh, in_specs=specs, out_specs=P("data")))


@pytest.mark.parametrize("split", [(1, 8), (2, 4)], ids=str)
def test_a_query_is_answered_as_by_one_device_and_compiles_once(split):
    features, kernel, bias = layer()
    ask = ask_on(make_mesh(*split))
    for class_id in (0, 7, 15):
        expected = heads.class_logits(features, kernel, bias, class_id)
        np.testing.assert_allclose(ask(features, kernel, bias, jnp.int32(class_id)), expected, rtol=1e-6)
    assert ask._cache_size() == 1
    ids = jnp.array([15, 0, 3, 3])
    expected = heads.class_logits(features, kernel, bias, ids)
    np.testing.assert_allclose(ask(features, kernel, bias, ids), expected, rtol=1e-6)


def test_a_class_that_no_device_has_is_nan():
    ask = ask_on(make_mesh(1, 8))
    logits = ask(*layer(), jnp.array([3, 16, -1]))
    np.testing.assert_array_equal(np.isnan(logits), np.broadcast_to([False, True, True], (6, 3)))


def test_a_device_without_the_row_does_nothing_but_take_part_in_the_sum():
    """In the compiled program the product and the read of the kernel are inside one branch of a conditional."""
    features, kernel, bias = layer(num_classes=64, num_features=32, num_examples=128)
    text = ask_on(make_mesh(1, 8)).lower(features, kernel, bias, jnp.int32(3)).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert "conditional(" in entry
    assert "all-reduce" in entry
    assert not re.search(r"\b(dot|gather)\(", entry)
    assert "dot(" in text


def test_padding_changes_no_loss_and_has_no_gradient():
    features, kernel, bias = layer(num_classes=13)
    labels = jnp.array([0, 12, 3, 5, 5, 9])
    padded = pad_classes(kernel, bias, num_shards=8)
    noise = {"noise_probs": np.pad(np.full(13, 1 / 13, np.float32), (0, 3)), "num_noise": 5}
    for name in losses.LOSSES:
        is_nce = name == "noise_contrastive_estimation"
        dense = losses.make_loss(name, **({"num_noise": 5} if is_nce else {}))
        loss = functools.partial(
            linear_losses.make_linear_loss(name, **(noise if is_nce else {})), class_axis_name="class"
        )
        on_mesh = jax.shard_map(
            jax.value_and_grad(loss, argnums=(0, 1, 2)),
            mesh=make_mesh(1, 8),
            in_specs=(P(), P("class"), P("class"), P()),
            out_specs=(P(), (P(), P("class"), P("class"))),
        )
        value, gradients = jax.jit(on_mesh)(features, *padded, labels)
        expected, expected_gradients = jax.value_and_grad(
            lambda f, w, b: dense(heads.all_logits(f, w, b), labels),  # noqa: B023
            argnums=(0, 1, 2),
        )(features, kernel, bias)
        np.testing.assert_allclose(value, expected, rtol=2e-6)
        assert (gradients[1][13:] == 0).all()
        assert (gradients[2][13:] == 0).all()
        kept = gradients[0], gradients[1][:13], gradients[2][:13]
        for gradient, expected_gradient in zip(kept, expected_gradients, strict=True):
            np.testing.assert_allclose(gradient, expected_gradient, rtol=2e-5, atol=2e-6)


def test_padding_of_a_count_that_fits_changes_nothing_and_16_bit_padding_is_finite():
    _, kernel, bias = layer(num_classes=16)
    assert pad_classes(kernel, bias, num_shards=8)[0].shape == kernel.shape
    _, low = pad_classes(kernel, bias.astype(jnp.float16), num_shards=10)
    assert low.shape == (20,)
    assert np.isfinite(low).all()


def test_a_mesh_that_does_not_fit_the_devices_says_which_ones_do():
    with pytest.raises(
        ValueError, match=r"class=3 does not fit 8 devices; data x class may be 8x1, 4x2, 2x4, 1x8"
    ):
        make_mesh(2, 3)
    with pytest.raises(ValueError, match="does not fit"):
        make_mesh(-1, -8)
    with pytest.raises(ValueError, match="num_shards must be at least 1"):
        pad_classes(jnp.ones((2, 2)), jnp.ones(2), num_shards=0)
