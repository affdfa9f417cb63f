"""Single-logit classification in JAX."""

__version__ = "0.1.0"
