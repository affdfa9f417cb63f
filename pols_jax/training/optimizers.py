"""The optimizer and the learning-rate schedule that a config asks for."""

import jax
import optax

from pols_jax.training.config import RunConfig


def make_schedule(config: RunConfig) -> optax.Schedule:
    """Builds the learning rate as a function of the step."""
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
    """Builds the optimizer with its schedule, weight decay, clipping, rate of the backbone and accumulation.

    With ``head`` sampled it is that of the backbone, without clipping: that is done before, with the rows (`SampledHead`).
    """
    optimizer = _plain_optimizer(config)
    if config.clip_norm is not None and config.head != "sampled":
        optimizer = optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)
    factor = config.backbone_factor()
    if factor != 1 and config.train == "all":

        def scale(updates, params):
            return updates | {"backbone": jax.tree.map(lambda leaf: factor * leaf, updates["backbone"])}

        optimizer = optax.chain(optimizer, optax.stateless(scale))
    if config.accumulate > 1:
        return optax.MultiSteps(optimizer, config.accumulate).gradient_transformation()
    return optimizer


def _plain_optimizer(config: RunConfig) -> optax.GradientTransformation:
    schedule = per_step = make_schedule(config)
    if config.accumulate > 1:
        schedule = lambda num_updates: per_step(num_updates * config.accumulate)  # noqa: E731

    def is_decayed(params):
        # Biases and the scales of batch norm are vectors; weights have at least two axes.
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    if config.optimizer == "adamw":
        return optax.adamw(schedule, weight_decay=config.weight_decay, mask=is_decayed)
    by_name = {
        "sgd": lambda: optax.sgd(schedule),
        "momentum": lambda: optax.sgd(schedule, momentum=config.momentum),
        "adam": lambda: optax.adam(schedule),
        "adagrad": lambda: optax.adagrad(schedule),
        # The constants of the Inception-v3 recipe.
        "rmsprop": lambda: optax.rmsprop(schedule, decay=0.9, eps=1.0, momentum=config.momentum),
    }
    optimizer = by_name[config.optimizer]()
    if config.weight_decay:
        decay = optax.add_decayed_weights(config.weight_decay, mask=is_decayed)
        return optax.chain(decay, optimizer)
    return optimizer
