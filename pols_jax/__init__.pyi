from . import (
    data as data,
    errors as errors,
    evaluation as evaluation,
    heads as heads,
    losses as losses,
    metrics as metrics,
    models as models,
    normalizers as normalizers,
    principle as principle,
    search as search,
    training as training,
)
from .data import load as load
from .evaluation import evaluate as evaluate
from .heads import (
    ClassHead as ClassHead,
    all_logits as all_logits,
    class_logits as class_logits,
)
from .losses import (
    ALIGNED as ALIGNED,
    LOSSES as LOSSES,
    LinearLogits as LinearLogits,
    batch_cross_entropy as batch_cross_entropy,
    batch_max_margin as batch_max_margin,
    binary_cross_entropy as binary_cross_entropy,
    cross_entropy as cross_entropy,
    make_loss as make_loss,
    max_margin as max_margin,
    noise_contrastive_estimation as noise_contrastive_estimation,
    self_normalization as self_normalization,
)
from .metrics import (
    average_precision as average_precision,
    precision_at_recall as precision_at_recall,
    slc_metrics as slc_metrics,
    threshold_at_recall as threshold_at_recall,
)
from .models import (
    MODELS as MODELS,
    Classifier as Classifier,
)
from .normalizers import (
    Normalizer as Normalizer,
    fit_normalizer as fit_normalizer,
    fold as fold,
    log_normalizer as log_normalizer,
)
from .principle import (
    holds as holds,
    separation_margin as separation_margin,
    violation_rate as violation_rate,
)
from .search import ClassBank as ClassBank
from .training import fit as fit

__version__: str
