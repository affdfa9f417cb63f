"""The optimizer and the learning-rate schedule that a config asks for."""

import jax
import optax

from pols_jax.config import RunConfig


def make_schedule(config: RunConfig) -> optax.Schedule:
    """Builds the learning rate as a function of the step.

    Examples:
      >>> schedule = make_schedule(RunConfig(learning_rate=0.1, schedule="cosine", warmup_steps=10, steps=100))
      >>> [round(float(schedule(step)), 3) for step in (0, 5, 10, 55, 100)]
      [0.0, 0.05, 0.1, 0.05, 0.0]
    """
    after_warmup = max(config.steps - config.warmup_steps, 1)
    if config.schedule == "constant":
        schedule = optax.constant_schedule(config.learning_rate)
    elif config.schedule == "cosine":
        schedule = optax.cosine_decay_schedule(config.learning_rate, after_warmup)
    else:
        schedule = optax.exponential_decay(
            config.learning_rate, config.decay_steps, config.decay_rate, staircase=True
        )
    if config.warmup_steps:
        warmup = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
        schedule = optax.join_schedules([warmup, schedule], [config.warmup_steps])
    return schedule


def make_optimizer(config: RunConfig) -> optax.GradientTransformation:
    """Builds the optimizer with its schedule and weight decay.

    Examples:
      >>> import jax.numpy as jnp
      >>> optimizer = make_optimizer(RunConfig(optimizer="sgd", learning_rate=0.5, schedule="constant"))
      >>> params = {"kernel": jnp.ones((2, 2))}
      >>> updates, _ = optimizer.update({"kernel": jnp.ones((2, 2))}, optimizer.init(params), params)
      >>> updates["kernel"][0].tolist()
      [-0.5, -0.5]
    """
    schedule = make_schedule(config)

    def is_decayed(params):
        # Biases and the scales of batch norm are vectors; weights have at least two axes.
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    if config.optimizer == "adamw":
        return optax.adamw(schedule, weight_decay=config.weight_decay, mask=is_decayed)
    by_name = {
        "sgd": lambda: optax.sgd(schedule),
        "momentum": lambda: optax.sgd(schedule, momentum=config.momentum),
        "adam": lambda: optax.adam(schedule),
        # The constants of the Inception-v3 recipe.
        "rmsprop": lambda: optax.rmsprop(schedule, decay=0.9, eps=1.0, momentum=config.momentum),
    }
    optimizer = by_name[config.optimizer]()
    if config.weight_decay:
        decay = optax.add_decayed_weights(config.weight_decay, mask=is_decayed)
        return optax.chain(decay, optimizer)
    return optimizer
