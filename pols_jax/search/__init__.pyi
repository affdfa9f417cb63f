from .class_bank import ClassBank
from .exporting import export
from .index import FeatureIndex
from .indexing import IndexUpdate, update_index
from .searching import search

__all__ = ["ClassBank", "FeatureIndex", "IndexUpdate", "export", "search", "update_index"]
