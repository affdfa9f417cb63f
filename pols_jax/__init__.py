"""Single-logit classification in JAX: train a k-class network so that one logit answers "is it this class?".

The names below load what they need when they are used first; ``import pols_jax`` by itself imports nothing heavy.

* The seven losses (`cross_entropy` ... `batch_max_margin`), `LinearLogits` in place of logits, `make_loss`, `LOSSES`, `ALIGNED`.
* The output layer: `ClassHead`, `all_logits`, `class_logits`.
* Measures: `average_precision`, `precision_at_recall`, `threshold_at_recall`, `slc_metrics`; `separation_margin`, `holds`,
  `violation_rate`.
* Data and networks: `load`, `MODELS`, `Classifier`.
* Trained networks: `fit`, `evaluate`, `ClassBank`.

Examples:
  >>> import jax.numpy as jnp
  >>> import pols_jax
  >>> pols_jax.batch_cross_entropy(jnp.array([[3.0, 0.0], [0.0, 3.0]]), jnp.array([0, 1]))
  Array(0.0486, dtype=float32)
"""

import lazy_loader

# Which name comes from which module stands in __init__.pyi, once for Python and for type checkers.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.1.0"
