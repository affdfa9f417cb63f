"""Presets: named experiments that are known to work, each with what it trains, how long that takes and what comes out."""

import dataclasses
from collections.abc import Mapping

from pols_jax.training.config import Experiment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A named experiment that is known to work: what it trains, how long that takes, and 1-AUPRC of one logit.

    ``normalizer`` has the rows of the normalizer that is fitted at the end, or none.
    """

    what: str
    time: str
    score: str
    experiment: Experiment
    normalizer: str = "none"


# The paper's protocol: SGD with momentum, a constant rate chosen from four, 10^5 steps (Section VI-A).
_PAPER = Experiment(
    loss=("all",),
    learning_rate="sweep",
    optimizer="momentum",
    schedule="constant",
    steps=100_000,
    batch_size=128,
    evaluate_every=2_000,
)
_PAPER_CNN = dataclasses.replace(_PAPER, model="cnn")

PRESETS: Mapping[str, Preset] = {
    "glyphs": Preset(
        what="2,221 characters in typefaces never seen in training; MLP, 2 losses",
        time="3 minutes on two cores",
        score="cross-entropy 0.123, batch cross-entropy 0.100",
        experiment=Experiment(),
        normalizer="256",
    ),
    "folder": Preset(
        what="your own pictures of at most 32 pixels, --dataset folder:PATH; MLP, 2 losses",
        time="82 seconds on two cores for 70,000 pictures",
        score="Fashion-MNIST: cross-entropy 0.076, batch cross-entropy 0.059; accuracy 0.90",
        experiment=Experiment(dataset="folder:PATH", augment="none"),
        normalizer="256",
    ),
    "photos": Preset(
        what="your own larger pictures, --dataset folder:PATH, shrunk to 32 x 32 and cropped at random; the paper's 6 convolutions at an eighth of their width, 2 losses",
        time="75 seconds a loss on two cores (13 steps/s at 28 x 28 x 1)",
        score="Fashion-MNIST, validation: cross-entropy 0.136, batch cross-entropy 0.092 after 1.2 epochs",
        experiment=Experiment(
            dataset="folder:PATH",
            model="cnn",
            width=0.125,
            augment="crop",
            batch_size=64,
            steps=1000,
        ),
        normalizer="256",
    ),
    "mnist": Preset(
        what="the paper's MNIST protocol: MLP 500-500, 7 losses, 4 learning rates, 10^5 steps each",
        time="8 minutes a run on one core (210 steps/s)",
        score="not aligned 0.011, aligned 0.0025 on average, with --sweep-steps 10000",
        experiment=dataclasses.replace(_PAPER, dataset="mnist"),
    ),
    "svhn": Preset(
        what="the paper's SVHN protocol: 6 convolutions, 7 losses, 4 learning rates, 10^5 steps each",
        time="2 days a run on two cores (1.8 s a step): for an accelerator",
        score="the paper: aligned 0.017 on average",
        experiment=dataclasses.replace(_PAPER_CNN, dataset="svhn_cropped"),
    ),
    "cifar10": Preset(
        what="the paper's CIFAR-10 protocol, as svhn",
        time="2 days a run on two cores (1.8 s a step): for an accelerator",
        score="the paper: aligned 0.074 on average",
        experiment=dataclasses.replace(_PAPER_CNN, dataset="cifar10"),
    ),
    "cifar100": Preset(
        what="the paper's CIFAR-100 protocol, as svhn",
        time="2 days a run on two cores (1.8 s a step): for an accelerator",
        score="the paper: aligned 0.405 on average",
        experiment=dataclasses.replace(_PAPER_CNN, dataset="cifar100"),
    ),
    "omniglot": Preset(
        what="1,623 handwritten characters; MLP, 2 losses",
        time="2.5 minutes on two cores",
        score="cross-entropy 0.467, batch cross-entropy 0.391 after half of the steps",
        experiment=Experiment(dataset="omniglot"),
    ),
    "cjk": Preset(
        what="42,174 Chinese, Japanese and Korean characters in weights never seen in training, from Debian's fonts-noto-cjk and fonts-noto-cjk-extra; MLP, 3 losses",
        time="17 minutes a loss on one core, and 6 to measure it",
        score="cross-entropy 0.330, self-normalization 0.225, NCE 0.160",
        experiment=Experiment(
            loss=("cross_entropy", "self_normalization", "noise_contrastive_estimation"),
            fonts=("/usr/share/fonts/opentype/noto/Noto*CJK-*.ttc",),
            characters="2E80-9FFF,AC00-D7A3,F900-FAFF,20000-2FA1F",
            image_size=28,
            train_faces=(
                *(f"Noto Sans CJK JP{style}" for style in (" Thin", " Light", "", " Bold", " Black")),
                *(
                    f"Noto Serif CJK JP{style}"
                    for style in (" ExtraLight", " Light", "", " SemiBold", " Black")
                ),
            ),
            validation_faces=("Noto Serif CJK JP Medium",),
            test_faces=("Noto Sans CJK JP Medium", "Noto Serif CJK JP Bold"),
            augment="none",
            hidden_sizes=(1024, 128),
            optimizer="momentum",
            learning_rate=(0.3,),
            num_noise=(10_000,),
            choose_by="auprc",
            batch_size=64,
            steps=10_000,
            evaluate_every=2_500,
        ),
    ),
    "imagenet": Preset(
        what="Inception-v3 with the recipe it was published with, 2 losses, 6 million steps",
        time="6 million steps: for many devices",
        score="the paper: cross-entropy 0.366, batch cross-entropy 0.245",
        experiment=Experiment(
            dataset="imagenet2012",
            augment="crop-flip",
            model="inception_v3",
            auxiliary=True,
            image_size=299,
            optimizer="rmsprop",
            learning_rate=(0.045,),
            schedule="exponential",
            decay_rate=0.94,
            decay_steps=80_000,
            weight_decay=4e-5,
            batch_size=32,
            steps=6_000_000,
            evaluate_every=20_000,
        ),
    ),
    "mnist-quick": Preset(
        what="the paper's MLP and 7 losses in 3,000 steps",
        time="16 seconds a loss on two cores",
        score="cross-entropy 0.014, batch cross-entropy 0.005, self-normalization 0.002",
        experiment=dataclasses.replace(
            _PAPER, dataset="mnist", learning_rate=(0.1,), steps=3_000, evaluate_every=500
        ),
    ),
    "cifar100-quick": Preset(
        what="CIFAR-100, the paper's network at a quarter of its width, 500 steps of 64; 2 losses",
        time="70 seconds a loss on two cores",
        score="cross-entropy 0.798, batch cross-entropy 0.790",
        experiment=dataclasses.replace(
            _PAPER_CNN,
            dataset="cifar100",
            loss=("cross_entropy", "batch_cross_entropy"),
            learning_rate=(0.1,),
            width=0.25,
            batch_size=64,
            steps=500,
            schedule="cosine",
            evaluate_every=250,
        ),
    ),
}
"""Every preset by its name; the first is the default."""
