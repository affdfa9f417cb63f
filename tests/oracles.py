"""The seven losses and their gradients, slowly and plainly, in float64 NumPy.

Written from the formulas of the paper alone and sharing no code with the library: one loop over examples, one over classes,
nothing vectorized, nothing clever. `z[i, j]` is the logit of class `j` for example `i`, `y[i]` the true class.
A loss returns one value per example, or one per batch; its `*_gradient` is the derivative of the mean with respect to `z`,
worked out by hand, and `central_difference` checks it in turn.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


def logsumexp(values) -> float:
    """`log(sum(exp(v)))` with the largest value taken out first."""
    values = [float(v) for v in values]
    largest = max(values)
    return largest + math.log(math.fsum(math.exp(v - largest) for v in values))


def softplus(x: float) -> float:
    """`log(1 + exp(x))`."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def sigmoid(x: float) -> float:
    """`1 / (1 + exp(-x))`, the derivative of softplus."""
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def _false_entries(z, y) -> list[tuple[int, int]]:
    return [(i, j) for i in range(z.shape[0]) for j in range(z.shape[1]) if j != y[i]]


def cross_entropy(z, y) -> np.ndarray:
    return np.array([logsumexp(z[i]) - z[i, y[i]] for i in range(len(z))])


def cross_entropy_gradient(z, y):
    gradient = np.zeros_like(z)
    for i in range(len(z)):
        for j in range(z.shape[1]):
            gradient[i, j] = math.exp(z[i, j] - logsumexp(z[i])) - (j == y[i])
    return gradient / len(z)


def max_margin(z, y, margin=1.0) -> np.ndarray:
    losses = []
    for i in range(len(z)):
        rivals = [z[i, j] for j in range(z.shape[1]) if j != y[i]]
        losses.append(max(0.0, margin - z[i, y[i]] + max(rivals)) if rivals else 0.0)
    return np.array(losses)


def max_margin_gradient(z, y, margin=1.0):
    gradient = np.zeros_like(z)
    for i in range(len(z)):
        rivals = [j for j in range(z.shape[1]) if j != y[i]]
        if not rivals:
            continue
        rival = max(rivals, key=lambda j: z[i, j])
        if margin - z[i, y[i]] + z[i, rival] > 0:
            gradient[i, y[i]] -= 1.0
            gradient[i, rival] += 1.0
    return gradient / len(z)


def self_normalization(z, y, alpha=0.1) -> np.ndarray:
    return np.array([logsumexp(z[i]) - z[i, y[i]] + alpha * logsumexp(z[i]) ** 2 for i in range(len(z))])


def self_normalization_gradient(z, y, alpha=0.1):
    gradient = np.zeros_like(z)
    for i in range(len(z)):
        log_z = logsumexp(z[i])
        for j in range(z.shape[1]):
            probability = math.exp(z[i, j] - log_z)
            gradient[i, j] = probability - (j == y[i]) + alpha * 2.0 * log_z * probability
    return gradient / len(z)


def noise_contrastive_estimation(z, y, num_noise, noise_probs=None) -> np.ndarray:
    k = z.shape[1]
    q = [1.0 / k] * k if noise_probs is None else [float(p) for p in noise_probs]
    losses = []
    for i in range(len(z)):
        s = [z[i, j] - math.log(num_noise * q[j]) for j in range(k)]
        losses.append(softplus(-s[y[i]]) + num_noise * sum(q[j] * softplus(s[j]) for j in range(k)))
    return np.array(losses)


def noise_contrastive_estimation_gradient(z, y, num_noise, noise_probs=None):
    k = z.shape[1]
    q = [1.0 / k] * k if noise_probs is None else [float(p) for p in noise_probs]
    gradient = np.zeros_like(z)
    for i in range(len(z)):
        for j in range(k):
            s = z[i, j] - math.log(num_noise * q[j])
            gradient[i, j] = num_noise * q[j] * sigmoid(s)
            if j == y[i]:
                gradient[i, j] -= sigmoid(-s)
    return gradient / len(z)


def binary_cross_entropy(z, y) -> np.ndarray:
    losses = []
    for i in range(len(z)):
        loss = softplus(-z[i, y[i]])
        for j in range(z.shape[1]):
            if j != y[i]:
                loss += softplus(z[i, j])
        losses.append(loss)
    return np.array(losses)


def binary_cross_entropy_gradient(z, y):
    gradient = np.zeros_like(z)
    for i in range(len(z)):
        for j in range(z.shape[1]):
            gradient[i, j] = -sigmoid(-z[i, j]) if j == y[i] else sigmoid(z[i, j])
    return gradient / len(z)


def batch_cross_entropy(z, y) -> float:
    """The Kullback-Leibler divergence from the softmax over all `m * k` entries to `1 / m` on the true ones, term by term."""
    m = len(z)
    log_z = logsumexp(z.ravel())
    return math.fsum((1.0 / m) * (math.log(1.0 / m) - (z[i, y[i]] - log_z)) for i in range(m))


def batch_cross_entropy_gradient(z, y):
    log_z = logsumexp(z.ravel())
    gradient = np.zeros_like(z)
    for i in range(len(z)):
        for j in range(z.shape[1]):
            gradient[i, j] = math.exp(z[i, j] - log_z) - (1.0 / len(z) if j == y[i] else 0.0)
    return gradient


def batch_max_margin(z, y, margin=1.0) -> float:
    m = len(z)
    false = [z[i, j] for i, j in _false_entries(z, y)]
    if not false:
        return 0.0
    smallest_true = min(z[i, y[i]] for i in range(m))
    return max(0.0, margin - smallest_true + max(false)) / m + float(np.mean(max_margin(z, y, margin)))


def batch_max_margin_gradient(z, y, margin=1.0):
    m = len(z)
    gradient = max_margin_gradient(z, y, margin)
    entries = _false_entries(z, y)
    if not entries:
        return gradient
    rival = max(entries, key=lambda entry: z[entry])
    weakest = min(((i, y[i]) for i in range(m)), key=lambda entry: z[entry])
    if margin - z[weakest] + z[rival] > 0:
        gradient[weakest] -= 1.0 / m
        gradient[rival] += 1.0 / m
    return gradient


class Oracle(NamedTuple):
    """A loss (one value per example, or one per batch) and the gradient of its mean; both take the hyper-parameters."""

    loss: Callable
    gradient: Callable


ORACLES = {
    "cross_entropy": Oracle(cross_entropy, cross_entropy_gradient),
    "max_margin": Oracle(max_margin, max_margin_gradient),
    "self_normalization": Oracle(self_normalization, self_normalization_gradient),
    "noise_contrastive_estimation": Oracle(
        noise_contrastive_estimation, noise_contrastive_estimation_gradient
    ),
    "binary_cross_entropy": Oracle(binary_cross_entropy, binary_cross_entropy_gradient),
    "batch_cross_entropy": Oracle(batch_cross_entropy, batch_cross_entropy_gradient),
    "batch_max_margin": Oracle(batch_max_margin, batch_max_margin_gradient),
}


# Each loss with the hyper-parameters that the suites run it with, for five classes.
CASES = (
    ("cross_entropy", {}),
    ("max_margin", {}),
    ("max_margin", {"margin": 0.5}),
    ("self_normalization", {}),
    ("self_normalization", {"alpha": 0.75}),
    ("noise_contrastive_estimation", {"num_noise": 3}),
    (
        "noise_contrastive_estimation",
        {"num_noise": 7.5, "noise_probs": np.array([0.4, 0.3, 0.15, 0.1, 0.05], np.float32)},
    ),
    ("binary_cross_entropy", {}),
    ("batch_cross_entropy", {}),
    ("batch_max_margin", {}),
    ("batch_max_margin", {"margin": 2.0}),
)
NUM_CLASSES = 5

# One set of hyper-parameters for each loss that fits any number of classes.
ANY_K = {name: {"num_noise": 2} if name == "noise_contrastive_estimation" else {} for name in ORACLES}


def problem(num_examples=7, num_classes=NUM_CLASSES, *, seed=0) -> tuple[np.ndarray, np.ndarray]:
    """Random float32 logits of about 3 and labels for them."""
    rng = np.random.default_rng(seed)
    logits = (3.0 * rng.normal(size=(num_examples, num_classes))).astype(np.float32)
    return logits, rng.integers(0, num_classes, num_examples, dtype=np.int32)


def value_and_gradient(name: str, logits, labels, where=None, **hyperparameters) -> tuple[float, np.ndarray]:
    """The mean loss over the rows that `where` marks, and its gradient; masked rows are dropped before anything is computed."""
    z, y = np.asarray(logits, np.float64), np.asarray(labels).astype(int)
    real = np.ones(len(z), bool) if where is None else np.asarray(where, bool)
    gradient = np.zeros_like(z)
    if not real.any():
        return 0.0, gradient
    oracle = ORACLES[name]
    gradient[real] = oracle.gradient(z[real], y[real], **hyperparameters)
    return float(np.mean(oracle.loss(z[real], y[real], **hyperparameters))), gradient


def central_difference(
    function: Callable[[np.ndarray], float], z: np.ndarray, step: float = 1e-5
) -> np.ndarray:
    """The gradient of `function` at `z` from two evaluations per entry; good to about `step**2`."""
    gradient = np.zeros_like(z)
    for index in np.ndindex(z.shape):
        above, below = z.copy(), z.copy()
        above[index] += step
        below[index] -= step
        gradient[index] = (function(above) - function(below)) / (2 * step)
    return gradient


def batch_cross_entropy_with_epsilon(z, y, epsilon: float) -> float:
    """Batch cross entropy with `epsilon` inside the logarithms, as the authors' own program has it."""
    m = len(z)
    log_z = logsumexp(z.ravel())
    total = 0.0
    for i in range(m):
        for j in range(z.shape[1]):
            p = 1.0 / m if j == y[i] else 0.0
            total += p * (math.log(p + epsilon) - math.log(math.exp(z[i, j] - log_z) + epsilon))
    return total


def separation_margin(z, y) -> float:
    """The smallest true logit minus the largest false one, over all examples."""
    true = [z[i, y[i]] for i in range(len(z))]
    false = [z[i, j] for i, j in _false_entries(z, y)]
    return min(true) - max(false)


def violation_rate(z, y) -> float:
    """The share of (true, false) pairs, over all examples, whose true logit is not the larger: by visiting every pair."""
    true = [z[i, y[i]] for i in range(len(z))]
    false = [z[i, j] for i, j in _false_entries(z, y)]
    return sum(t <= f for t in true for f in false) / (len(true) * len(false))
