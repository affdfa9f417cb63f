"""Training: config and presets, one pure step, its pmap and its mesh, `fit`, sweeps, runs and checkpoints.

The names below are imported when they are first used: settings can be read without JAX, Flax and Orbax.
"""

import lazy_loader

# Which name comes from which module stands in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
