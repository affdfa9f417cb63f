"""The losses and metrics that are compared with each other compute the same thing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pols_jax.benchmarking import loss_speed, metric_speed, torch_peer
from pols_jax.benchmarking.loss_speed import authors_batch_cross_entropy, loss_functions, run_losses
from pols_jax.benchmarking.metric_speed import metric_variants, random_scores, run_metrics
from pols_jax.benchmarking.records import Record, Recorder
from pols_jax.benchmarking.settings import LossSettings, MetricSettings
from pols_jax.errors import ProgramError
from pols_jax.losses import LOSSES, batch_cross_entropy


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 40)).astype(np.float32)
    return logits, rng.integers(40, size=6).astype(np.int32)


def test_the_authors_form_is_the_batch_cross_entropy_but_for_its_epsilon(batch):
    logits, labels = map(jnp.asarray, batch)
    ours = batch_cross_entropy(logits, labels)
    np.testing.assert_allclose(authors_batch_cross_entropy(logits, labels, epsilon=1e-12), ours, rtol=1e-4)
    # An entry of 1/240 plus 1e-6: its logarithm is off by about 2e-4.
    np.testing.assert_allclose(authors_batch_cross_entropy(logits, labels), ours, rtol=1e-3)


def test_every_loss_and_both_rivals_are_timed(batch):
    record = Record("losses", {}, {})
    settings = LossSettings(batch_size=4, classes=32, repetitions=2)
    run_losses(settings, Recorder(record, None), say=lambda line: None)
    names = [m.variant for m in record.measurements]
    assert names == list(loss_functions())
    assert set(names) == {*LOSSES, "optax_cross_entropy", "authors_batch_cross_entropy"}


def test_pytorchs_losses_are_ours(batch):
    pytest.importorskip("torch")
    peers = torch_peer.loss_variants(*batch, num_noise=100, platform="cpu")
    assert set(peers) == set(LOSSES)
    functions = loss_functions()
    for name, peer in peers.items():
        ours = jax.value_and_grad(functions[name])(*map(jnp.asarray, batch))
        loss_speed._check_same(name, ours, peer(0))


def test_pytorchs_head_is_ours():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in ((2, 64), (1024, 64), (1024,))]
    linear, adaptive = torch_peer.head_variants(*arrays, asked=[3, 1000], case={}, platform="cpu")
    np.testing.assert_allclose(linear.call(0), arrays[0] @ arrays[1].T + arrays[2], atol=1e-4)
    assert adaptive.call(1).shape == torch.Size([2])


def test_a_counterpart_that_computes_something_else_is_not_timed(batch):
    class Tensor(np.ndarray):
        def cpu(self):
            return self

    gradient = np.ones((2, 3), np.float32).view(Tensor)
    loss_speed._check_same("max_margin", (1.0, gradient), (1.0, gradient))
    for value, other in ((1.1, gradient), (1.0, 2 * gradient)):
        with pytest.raises(ProgramError, match="max_margin and its PyTorch counterpart"):
            loss_speed._check_same("max_margin", (1.0, gradient), (value, other))


def test_our_metrics_are_those_of_scikit_learn_before_either_is_timed(monkeypatch):
    scores, labels = random_scores(80, 6)
    device = jax.devices()[0]
    ours, theirs = metric_variants(scores, labels, device=device, with_torch=False)
    our_means = [ours.call(0)[name] for name in ("auprc", "precision_at_0.9", "precision_at_0.99")]
    np.testing.assert_allclose(our_means, np.nanmean(theirs.call(0), axis=1), atol=1e-6)
    monkeypatch.setattr(metric_speed, "precision_at_recall", lambda scores, labels, recall: scores[0])
    with pytest.raises(ProgramError, match="differ"):
        metric_variants(scores, labels, device=device, with_torch=False)


def test_scikit_learn_is_timed_on_a_part_of_many_classes_and_the_record_says_so():
    settings = MetricSettings(examples=(60,), classes=(2, 9), repetitions=1, max_scores=240)
    with Recorder(Record("metrics", {}, {}), None) as recorder:
        run_metrics(settings, recorder, say=lambda text: None)
    timed = [m.case.get("timed_classes") for m in recorder.record.measurements if m.variant == "scikit_learn"]
    assert timed == [None, 4]
    _, theirs = metric_variants(
        *random_scores(60, 9), device=jax.devices()[0], with_torch=False, timed_classes=4
    )
    assert len(theirs.call(0)[0]) == 4


def test_torchmetrics_average_precision_is_ours():
    pytest.importorskip("torchmetrics")
    scores, labels = random_scores(80, 6)
    ours, _, theirs = metric_variants(scores, labels, device=jax.devices()[0], with_torch=True)
    np.testing.assert_allclose(ours.call(0)["auprc"], np.mean(theirs.call(0)[0]), atol=1e-5)
