"""Which form of a convolution is fastest on this CPU? Measures what the table of `pols_jax.models.convolution` says.

    python results/tools/convolution_forms.py results/speed_convolutions.json

One layer of every kind that the networks have, for one image and for eight, forward (with ``--train`` as a second word also with
gradients). Where the table's form is not the fastest, the printed table shows by how much.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from recording import recording

from pols_jax.benchmarking.timing import Variant
from pols_jax.models.convolution import convolve

# Network and layer -> size of the image, inputs, features, kernel, stride, padding.
LAYERS = {
    "cnn conv1": (32, 3, 128, (5, 5), 1, 2),
    "cnn conv3": (16, 128, 256, (5, 5), 1, 2),
    "cnn conv5": (8, 256, 512, (5, 5), 1, 2),
    "cnn conv4": (16, 256, 256, (1, 1), 1, 0),
    "alexnet conv1": (224, 3, 64, (11, 11), 4, 2),
    "alexnet conv2": (27, 64, 192, (5, 5), 1, 2),
    "vgg16 conv1_1": (224, 3, 64, (3, 3), 1, 1),
    "vgg16 conv1_2": (224, 64, 64, (3, 3), 1, 1),
    "vgg16 conv2_2": (112, 128, 128, (3, 3), 1, 1),
    "vgg16 conv3_2": (56, 256, 256, (3, 3), 1, 1),
    "vgg16 conv4_2": (28, 512, 512, (3, 3), 1, 1),
    "vgg16 conv5_2": (14, 512, 512, (3, 3), 1, 1),
    "resnet stem": (224, 3, 64, (7, 7), 2, 3),
    "resnet stage1 conv1": (56, 256, 64, (1, 1), 1, 0),
    "resnet stage1 conv2": (56, 64, 64, (3, 3), 1, 1),
    "resnet stage2 conv2": (28, 128, 128, (3, 3), 1, 1),
    "resnet stage2 conv2, stride 2": (56, 128, 128, (3, 3), 2, 1),
    "resnet stage3 conv1": (14, 1024, 256, (1, 1), 1, 0),
    "resnet stage3 conv2": (14, 256, 256, (3, 3), 1, 1),
    "resnet stage4 conv2": (7, 512, 512, (3, 3), 1, 1),
    "inception stem1": (299, 3, 32, (3, 3), 2, 0),
    "inception stem3": (147, 32, 64, (3, 3), 1, 1),
    "inception stage1 5x5": (35, 48, 64, (5, 5), 1, 2),
    "inception stage2 1x7": (17, 160, 160, (1, 7), 1, "SAME"),
    "inception stage2 7x1": (17, 160, 160, (7, 1), 1, "SAME"),
    "inception stage3 1x3": (8, 384, 384, (1, 3), 1, "SAME"),
}
BATCH_SIZES = (1, 8)
REPETITIONS = 5


def layer_variants(layer: str, batch_size: int, *, train: bool) -> list[Variant]:
    """Makes one variant for each form that fits the layer, and one for the table's choice.

    Examples:
      >>> [variant.name for variant in layer_variants("inception stage3 1x3", 1, train=False)]
      ['auto', 'xla', 'im2col', 'winograd']
    """
    size, inputs, features, kernel_size, stride, padding = LAYERS[layer]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((batch_size, size, size, inputs), np.float32))
    kernel = jnp.asarray(rng.standard_normal((*kernel_size, inputs, features), np.float32))
    case = {"layer": layer, "batch_size": batch_size, "program": "gradients" if train else "forward"}
    forms = ["auto", "xla", "im2col"] + (["winograd"] if stride == 1 and kernel_size != (1, 1) else [])

    def variant(form):
        def forward(x, kernel):
            return convolve(x, kernel, stride=stride, padding=padding, form=form)

        def gradients(x, kernel):
            y, back = jax.vjp(forward, x, kernel)
            return y, back(y)

        program = jax.jit(gradients if train else forward).lower(x, kernel).compile()
        return Variant(form, lambda call: program(x, kernel), case)

    return [variant(form) for form in forms]


def main() -> None:
    """Measures, writes the record and prints its table."""
    with recording("convolutions") as recorder:
        for train in (False, True) if "--train" in sys.argv else (False,):
            for layer in LAYERS:
                for batch_size in BATCH_SIZES:
                    variants = layer_variants(layer, batch_size, train=train)
                    recorder.measure(variants, repetitions=REPETITIONS, warmup=1)


if __name__ == "__main__":
    main()
