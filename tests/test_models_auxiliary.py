"""Inception-v3's auxiliary classifier: there in training, free in evaluation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pols_jax.models import Classifier, InceptionV3

MODEL = Classifier(
    InceptionV3(width=1 / 64, stage_sizes=(1, 1, 1), dropout_rate=0.0, auxiliary=True), num_classes=7
)
IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(3, 299, 299, 3)), jnp.float32)


@pytest.fixture(scope="module")
def variables():
    return jax.jit(MODEL.init)(jax.random.key(0), IMAGES)


def test_the_variables_are_the_same_however_init_is_called():
    def shapes(train):
        init = functools.partial(MODEL.init, train=train)
        return jax.tree.map(jnp.shape, jax.eval_shape(init, jax.random.key(0), IMAGES))

    assert shapes(train=False) == shapes(train=True)
    assert set(shapes(train=False)) == {"params", "batch_stats"}
    assert shapes(train=False)["params"]["auxiliary_head"] == {"kernel": (7, 12), "bias": (7,)}


def test_training_stores_the_auxiliary_logits_and_their_gradient_reaches_the_side_branch(variables):
    def auxiliary_loss(params):
        logits, updates = MODEL.apply(
            variables | {"params": params}, IMAGES, train=True, mutable=["batch_stats", "auxiliary"]
        )
        auxiliary_logits = updates["auxiliary"]["auxiliary_logits"]
        return jnp.mean(jnp.square(auxiliary_logits - 1.0)), (logits, auxiliary_logits)

    grads, (logits, auxiliary_logits) = jax.jit(jax.grad(auxiliary_loss, has_aux=True))(variables["params"])
    assert logits.shape == auxiliary_logits.shape == (3, 7)
    assert np.any(logits != auxiliary_logits)
    reached = {
        name
        for name, tree in grads["backbone"].items()
        if any(np.any(leaf) for leaf in jax.tree.leaves(tree))
    }
    after_the_branch = {"reduction2", "stage3_block1"}
    assert reached == set(grads["backbone"]) - after_the_branch
    assert np.any(grads["auxiliary_head"]["kernel"])
    assert not np.any(grads["head"]["kernel"])


def test_evaluation_stores_nothing_and_has_the_program_of_the_network_without_side_branch(variables):
    logits, updates = jax.jit(functools.partial(MODEL.apply, mutable=["auxiliary"]))(variables, IMAGES)
    assert not updates
    plain = Classifier(MODEL.backbone.clone(auxiliary=False), MODEL.num_classes)
    shapes = jax.eval_shape(plain.init, jax.random.key(0), IMAGES)

    def only(tree, wanted):
        return {
            key: only(tree[key], below) if isinstance(below, dict) else tree[key]
            for key, below in wanted.items()
        }

    fewer = only(variables, shapes)
    assert len(jax.tree.leaves(fewer)) < len(jax.tree.leaves(variables))
    np.testing.assert_array_equal(logits, jax.jit(plain.apply)(fewer, IMAGES))


def test_training_images_that_are_too_small_for_the_side_branch_are_refused():
    with pytest.raises(ValueError, match="at least 299 pixels"):
        jax.eval_shape(MODEL.init, jax.random.key(0), IMAGES[:, :298])


def test_evaluation_takes_smaller_images(variables):
    assert jax.eval_shape(MODEL.apply, variables, IMAGES[:, :75, :75]).shape == (3, 7)
