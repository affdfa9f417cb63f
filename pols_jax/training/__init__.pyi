from .checkpoints import Checkpoints, HeadRows
from .config import Experiment, RunConfig, RunOptions
from .experiments import run_experiment
from .fitting import Outcome, fit
from .learning import Learner, TrainState, train_step
from .presets import PRESETS
from .runs import Run, find_runs
from .trainer import Trainer

__all__ = [
    "PRESETS",
    "Checkpoints",
    "Experiment",
    "HeadRows",
    "Learner",
    "Outcome",
    "Run",
    "RunConfig",
    "RunOptions",
    "TrainState",
    "Trainer",
    "find_runs",
    "fit",
    "run_experiment",
    "train_step",
]
