"""Search: ask a trained network about one class, and find every picture of it.

The names below are imported when they are first used.
"""

import lazy_loader

# Which name comes from which module stands in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
