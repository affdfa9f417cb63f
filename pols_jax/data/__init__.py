"""Data sets and their batches: glyphs from installed fonts, tfds data sets, folders of pictures.

The names below are imported when they are first used: pictures can be decoded without tfds, grain and fonts.
"""

import lazy_loader

# Which name comes from which module stands in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
