from .measuring import evaluate
from .slc_records import Measures, SlcRecord, read_slc

__all__ = ["Measures", "SlcRecord", "evaluate", "read_slc"]
