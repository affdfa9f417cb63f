"""The same work in PyTorch, as its own library does it best, to be timed in the same run.

PyTorch is no dependency of the project: it is imported when one of these functions is called.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pols_jax.benchmarking.timing import Variant
from pols_jax.benchmarking.torch_networks import torch_network

# AdaptiveLogSoftmaxWithLoss: the share of the classes that is in the head, and where the second cluster ends.
_ADAPTIVE_CUTOFFS = (1 / 64, 1 / 8)
# Below this an adaptive softmax has no clusters worth the name.
_ADAPTIVE_SMALLEST = 1024


def head_variants(
    features: np.ndarray,
    kernel: np.ndarray,
    bias: np.ndarray,
    *,
    asked: Sequence[int],
    case: Mapping[str, str | int],
    platform: str,
    calls: int = 1,
) -> list[Variant]:
    """Makes PyTorch's output layers: ``F.linear`` for all logits, and the adaptive softmax asked for one class.

    ``AdaptiveLogSoftmaxWithLoss`` is PyTorch's own answer to many classes. Asked for the log-probability of one class it
    computes its head, one sixty-fourth of the classes, and the cluster which holds the class.
    """
    torch, device = _torch_on(platform)
    F = torch.nn.functional  # noqa: N806  # as all of PyTorch's users call it
    num_classes, num_features = kernel.shape
    inputs, weight, offset = (_tensor(array).to(device) for array in (features, kernel, bias))
    inputs = inputs.to(weight.dtype)

    def linear(call):
        return F.linear(inputs, weight, offset)

    variants = [Variant("torch_linear", _finished(linear, device), case, calls=calls)]
    if num_classes >= _ADAPTIVE_SMALLEST:
        cutoffs = [round(share * num_classes) for share in _ADAPTIVE_CUTOFFS]
        softmax = torch.nn.AdaptiveLogSoftmaxWithLoss(
            num_features, num_classes, cutoffs, device=device, dtype=weight.dtype
        )
        targets = [torch.full((len(features),), class_id, device=device) for class_id in asked]

        def ask(call):
            return softmax(inputs, targets[call % len(targets)]).output

        variants.append(Variant("torch_adaptive_softmax", _finished(ask, device), case))
    return variants


def forward_call(
    network: str, variables: Mapping[str, Any], images: np.ndarray, *, platform: str
) -> Callable[[int], Any]:
    """Makes the forward pass of a network in evaluation mode: channels-last, without the records that gradients need."""
    torch, device = _torch_on(platform)
    module = torch_network(network, variables).to(device)
    inputs = _channels_last(images).to(device)

    def call(_):
        with torch.inference_mode():
            return module(inputs)

    return _finished(call, device)


def step_call(
    network: str,
    variables: Mapping[str, Any],
    images: np.ndarray,
    labels: np.ndarray,
    *,
    learning_rate: float,
    momentum: float,
    platform: str,
) -> Callable[[int], Any]:
    """Makes a training step of a classifier with the given variables: channels-last, cross-entropy, SGD with momentum."""
    torch, device = _torch_on(platform)
    parts = {name: tree["backbone"] for name, tree in variables.items() if "backbone" in tree}
    head = variables["params"]["head"]
    linear = torch.nn.Linear(head["kernel"].shape[1], head["kernel"].shape[0])
    linear.weight.data, linear.bias.data = (torch.tensor(head[name]) for name in ("kernel", "bias"))
    module = torch.nn.Sequential(torch_network(network, parts), linear).train().to(device)
    optimizer = torch.optim.SGD(module.parameters(), learning_rate, momentum)
    inputs, targets = _channels_last(images).to(device), torch.from_numpy(labels.astype(np.int64)).to(device)

    def call(_):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return _finished(call, device, gradients=True)


def loss_variants(
    logits: np.ndarray, labels: np.ndarray, *, num_noise: int, platform: str
) -> dict[str, Callable[[int], Any]]:
    """Makes value and gradient of the seven losses in PyTorch: its own functions where there are any."""
    torch, device = _torch_on(platform)
    F = torch.nn.functional  # noqa: N806  # as all of PyTorch's users call it
    z = torch.from_numpy(logits).to(device).requires_grad_()
    y = torch.from_numpy(labels.astype(np.int64)).to(device)
    num_examples, num_classes = z.shape
    log_noise = float(np.log(num_noise / num_classes))

    def true_logits():
        return z.gather(1, y[:, None])[:, 0]

    def max_margin():
        false = z.scatter(1, y[:, None], -torch.inf).amax(1)
        return torch.relu(1.0 - true_logits() + false).mean()

    def self_normalization():
        log_z = z.logsumexp(1)
        return (log_z - true_logits() + 0.1 * log_z**2).mean()

    def noise_contrastive_estimation():
        scores = z - log_noise
        noise = (num_noise / num_classes) * F.softplus(scores).sum(1)
        return (F.softplus(log_noise - true_logits()) + noise).mean()

    def binary_cross_entropy():
        targets = torch.zeros_like(z).scatter_(1, y[:, None], 1.0)
        return F.binary_cross_entropy_with_logits(z, targets, reduction="sum") / num_examples

    def batch_cross_entropy():
        return z.flatten().logsumexp(0) - true_logits().mean() - float(np.log(num_examples))

    def batch_max_margin():
        false, true = z.scatter(1, y[:, None], -torch.inf).amax(1), true_logits()
        over_batch = torch.relu(1.0 - true.min() + false.max()) / num_examples
        return over_batch + torch.relu(1.0 - true + false).mean()

    losses = {
        "cross_entropy": lambda: F.cross_entropy(z, y),
        "max_margin": max_margin,
        "self_normalization": self_normalization,
        "noise_contrastive_estimation": noise_contrastive_estimation,
        "binary_cross_entropy": binary_cross_entropy,
        "batch_cross_entropy": batch_cross_entropy,
        "batch_max_margin": batch_max_margin,
    }

    def value_and_gradient(loss):
        def call(_):
            value = loss()
            (gradient,) = torch.autograd.grad(value, z)
            return value.detach(), gradient

        return _finished(call, device, gradients=True)

    return {name: value_and_gradient(loss) for name, loss in losses.items()}


def metrics_call(scores: np.ndarray, labels: np.ndarray, *, recall: float) -> Callable[[int], object]:
    """Makes torchmetrics' exact average precision, and precision at a recall, of every class."""
    from torchmetrics.functional import classification  # pyright: ignore[reportMissingImports]

    torch = _torch()

    # Probabilities: torchmetrics would take the softmax of anything else.
    probabilities = torch.from_numpy(scores)
    targets = torch.from_numpy(labels.astype(np.int64))
    num_classes = scores.shape[1]

    def call(_):
        with warnings.catch_warnings(action="ignore"):  # it warns about every class without examples
            average_precision = classification.multiclass_average_precision(
                probabilities, targets, num_classes, average="none", thresholds=None
            )
            precision, _ = classification.multiclass_precision_at_fixed_recall(
                probabilities, targets, num_classes, min_recall=recall, thresholds=None
            )
        return average_precision, precision

    return call


def _torch() -> Any:
    import torch  # pyright: ignore[reportMissingImports]

    # Its own default is the number of physical cores, which on a virtual machine may be half of what JAX uses.
    torch.set_num_threads(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return torch


def _torch_on(platform: str) -> tuple[Any, str]:
    """PyTorch, and the name that it has for the device of a platform of JAX."""
    torch = _torch()
    return torch, "cuda" if platform == "gpu" and torch.cuda.is_available() else "cpu"


def _tensor(array: np.ndarray) -> Any:
    """A tensor of a NumPy array without a copy; NumPy's bfloat16 is unknown to PyTorch, and is handed over as bits."""
    torch = _torch()
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _channels_last(images: np.ndarray) -> Any:
    """Images [m, h, w, c] as PyTorch's [m, c, h, w], without moving a number."""
    return _torch().from_numpy(images).permute(0, 3, 1, 2)


def _finished(call, device, *, gradients=False):
    """The call, with the wait for the device that PyTorch leaves to its user."""
    torch = _torch()

    def finished(number):
        with torch.set_grad_enabled(gradients):
            result = call(number)
        if device == "cuda":
            torch.cuda.synchronize()
        return result

    return finished
