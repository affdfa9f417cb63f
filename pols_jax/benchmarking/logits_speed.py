"""All logits against one gathered logit: backbone and head, and each alone, for any number of classes.

All variants of a network are timed in one interleaved group, so the kernels of all numbers of classes exist at once. On a
CPU they are views of one array; an accelerator holds a copy of each.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Float

from pols_jax.benchmarking import torch_peer
from pols_jax.benchmarking.programs import check_programs, wide_products
from pols_jax.benchmarking.records import Recorder
from pols_jax.benchmarking.settings import NORMALIZER_ROWS, LogitsSettings, find_devices
from pols_jax.benchmarking.timing import Variant, compiled, profile
from pols_jax.errors import ProgramError
from pols_jax.heads import all_logits, class_logits
from pols_jax.memory import available_bytes
from pols_jax.models import MODELS
from pols_jax.normalizers import Clusters, Fit, Normalizer, rows_of_clusters
from pols_jax.normalizers.normalizer import is_product_faster

_IMAGE_SHAPES = {"mlp": (28, 28, 1), "cnn": (32, 32, 3), "inception_v3": (299, 299, 3)}
_IMAGENET_SHAPE = (224, 224, 3)
# Random rows; a larger kernel repeats them. What is read and multiplied is as much as with rows that all differ.
_RANDOM_ROWS = 4096
# JAX takes an array of NumPy's over without a copy if it starts at a multiple of this many bytes.
_ALIGNMENT = 64
# Programs of the head that read fewer numbers than this are called many times in a row, see `Variant`.
_SHORT_READ, _SHORT_CALLS = 2**20, 64
# A kernel may take this share of the memory that is free: the rest is for logits, and for everybody else.
_USABLE_SHARE = 0.85


def image_shape(network: str) -> tuple[int, int, int]:
    """Returns the height, width and channels of the images that a network was published for."""
    return _IMAGE_SHAPES.get(network, _IMAGENET_SHAPE)


def calls_of_head(num_rows: int, num_features: int) -> int:
    """Returns how many calls of an output layer are timed together: several if one is over in no time.

    Examples:
      >>> calls_of_head(1, 2048), calls_of_head(370_727, 2048)
      (64, 1)
    """
    return _SHORT_CALLS if num_rows * num_features < _SHORT_READ else 1


def run_logits(settings: LogitsSettings, recorder: Recorder, *, say: Callable[[str], None]) -> None:
    """Measures what the settings, with their preset filled in, ask for, network by network."""
    assert settings.batches is not None
    for network, batch_size in itertools.product(settings.networks, settings.batch_size):
        title = f"{network}, batch size {batch_size}"
        say(f"{title}: compiling")
        bench = NetworkBench(network, batch_size, settings)
        variants = bench.variants()
        if settings.peer == "torch":
            for num_classes in bench.classes:
                variants += torch_peer.head_variants(
                    bench.host_features,
                    *bench.host_head(num_classes),
                    asked=bench.asked_classes(num_classes),
                    case={**bench.case, "num_classes": num_classes},
                    platform=bench.devices[0].platform,
                    calls=calls_of_head(num_classes, int(bench.case["num_features"])),
                )
        if settings.programs:
            variants = [variant for variant in variants if variant.name in ("backbone", *settings.programs)]
        recorder.record.skipped.extend(bench.skipped)
        for skipped in bench.skipped:
            say(f"{title}: {skipped['case']['num_classes']:,} classes left out, {skipped['reason']}")
        say(f"{title}: {len(variants)} variants, {settings.batches} calls of each")
        recorder.measure(variants, repetitions=settings.batches)
        profile(variants, settings.profile, f"{network}-{batch_size}")


class NetworkBench:
    """One network with random weights, random images and random output layers of several sizes, on its devices.

    Attributes:
      devices: Where it runs.
      case: What identifies its measurements.
      classes: The numbers of classes that fit in memory.
      skipped: Those that do not: one dictionary for each with its ``case``, ``kernel_bytes`` and the ``reason``.
    """

    def __init__(self, network: str, batch_size: int, settings: LogitsSettings):
        self.devices = find_devices(settings.device, settings.num_devices)
        self._mesh = Mesh(np.array(self.devices), ("devices",))
        self._dtype = jnp.dtype(settings.dtype)
        backbone = MODELS[network](dtype=None if self._dtype == jnp.float32 else self._dtype)
        rng = np.random.default_rng(0)
        shape = (batch_size * len(self.devices), *image_shape(network))
        images = rng.standard_normal(shape, np.float32)
        with jax.default_device(self.devices[0]):
            variables = jax.jit(backbone.init)(jax.random.key(0), images[:1])
        images = jax.device_put(images, self._sharding(P("devices")))
        self._of_images = self._replicated(variables), images
        self._apply: Callable[..., Any] = backbone.apply  # in evaluation mode it returns the features alone
        self._backbone, self._backbone_ms = self._compile(self._apply, self._of_images)
        self._features = self._backbone(*self._of_images)
        self._num_features = self._features.shape[-1]
        self.case: dict[str, str | int] = {
            "network": network,
            "batch_size": batch_size,
            "num_devices": len(self.devices),
            "num_features": self._num_features,
        }
        self.classes, self.skipped = [], []
        self._choose_classes(settings.classes)
        largest = max(self.classes, default=1)
        self._host_kernel, self._host_bias = _random_head(largest, self._num_features, self._dtype, rng)

    def variants(self) -> list[Variant]:
        """Compiles and checks all programs; a size that runs out of memory while doing so is skipped."""
        backbone = functools.partial(self._backbone, *self._of_images)
        variants = [Variant("backbone", lambda call: backbone(), self.case, self._backbone_ms)]
        for num_classes in list(self.classes):
            try:
                variants += self._variants_of(num_classes)
            except (MemoryError, jax.errors.JaxRuntimeError) as error:
                if not (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)):
                    raise
                self.classes.remove(num_classes)
                self._skip(num_classes, "it ran out of memory")
        # What any call costs: a program that takes one number of each image's features.
        empty, _ = self._variant(
            "empty_program", lambda features: features[:, 0], self.case, calls=_SHORT_CALLS
        )
        return [*variants, empty]

    @property
    def host_features(self) -> Float[np.ndarray, "batch features"]:
        """The features of the images."""
        return np.array(self._features)  # a copy, because PyTorch wants to be able to write

    def host_head(self, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
        """The kernel [k, d] and the bias [k]."""
        return self._host_kernel[:num_classes], self._host_bias[:num_classes]

    def asked_classes(self, num_classes: int) -> list[int]:
        """The classes that are asked about, another one in every call."""
        return np.random.default_rng(num_classes).integers(num_classes, size=64).tolist()

    def _choose_classes(self, wanted):
        free, taken = available_bytes(self.devices[0]), 0
        on_cpu = self.devices[0].platform == "cpu"
        for num_classes in sorted(set(wanted)):
            # On a CPU the kernels of all sizes share their memory, but each of several devices has its own.
            copies = len(self.devices) if on_cpu else 1
            needed = self._kernel_bytes(num_classes) * copies + 2 * 4 * num_classes * self._features.shape[0]
            if free is not None and taken + needed > _USABLE_SHARE * free:
                self._skip(num_classes, f"it needs {needed:,} bytes and {free - taken:,} are free")
            else:
                self.classes.append(num_classes)
                taken += 0 if on_cpu else needed

    def _kernel_bytes(self, num_classes):
        return num_classes * self._num_features * self._dtype.itemsize

    def _skip(self, num_classes, reason):
        case = {**self.case, "num_classes": num_classes}
        self.skipped.append({"case": case, "kernel_bytes": self._kernel_bytes(num_classes), "reason": reason})

    def _variants_of(self, num_classes) -> list[Variant]:
        kernel, bias = self._replicated(self.host_head(num_classes))
        asked = [self._replicated(np.int32(asked)) for asked in self.asked_classes(num_classes)]
        case = {**self.case, "num_classes": num_classes}

        def head(call):
            return kernel, bias

        def head_and_class(call):
            return kernel, bias, asked[call % len(asked)]

        calls = calls_of_head(num_classes, self._num_features)
        whole = [
            self._variant("all_logits", all_logits, case, head, from_images=True),
            self._variant("one_logit", class_logits, case, head_and_class, from_images=True),
        ]
        alone = [
            self._variant("head_all_logits", all_logits, case, head, calls=calls),
            self._variant("head_one_logit", class_logits, case, head_and_class, calls=_SHORT_CALLS),
        ]
        for ((_, of_all), (_, of_one)), backbone in ((whole, self._backbone.as_text()), (alone, "")):
            check_programs(
                all_logits=of_all,
                one_logit=of_one,
                backbone=backbone,
                num_classes=num_classes,
                num_features=self._num_features,
            )
        variants = [variant for variant, _ in (*whole, *alone)]
        for num_rows in NORMALIZER_ROWS:
            if num_rows < num_classes:
                variants += self._normalized_variants(num_rows, head_and_class, case)
        return variants

    def _normalized_variants(self, num_rows, head_and_class, case) -> list[Variant]:
        """One logit minus a normalizer: of the whole network with the most rows, and of the head alone with any."""
        rng, num_classes = np.random.default_rng(num_rows), case["num_classes"]
        num_clusters, num_own = rows_of_clusters(num_classes, num_rows=num_rows)
        kernel, bias = _random_head(num_clusters, self._num_features, self._dtype, rng)
        rows = self._replicated(Normalizer(jnp.asarray(kernel), jnp.asarray(bias), Fit(0.0, 0.0, 0)))
        cluster_of = rng.permutation(num_classes) % num_clusters

        def normalized(features, kernel, bias, class_id, normalizer):
            if num_own:
                own = Clusters.of(cluster_of, kernel, bias, num_clusters=num_clusters, num_own=num_own)
                normalizer = dataclasses.replace(normalizer, clusters=own)
            return class_logits(features, kernel, bias, class_id) - normalizer(features)

        def arguments(call):
            return *head_and_class(call), rows

        name, calls = f"head_one_logit_normalized_{num_rows}", calls_of_head(num_rows, self._num_features)
        made = [(*self._variant(name, normalized, case, arguments, calls=calls), "")]
        if num_rows == max(NORMALIZER_ROWS):
            whole = self._variant("one_logit_normalized", normalized, case, arguments, from_images=True)
            made.append((*whole, self._backbone.as_text()))
        # A batch may have so many own rows to read that one product over all classes takes less time.
        num_examples = self._features.shape[0] // len(self.devices)
        is_product = is_product_faster(num_examples, num_classes=num_classes, num_own=num_own)
        for variant, program, backbone in made:
            if not is_product and wide_products(program, num_classes) > wide_products(backbone, num_classes):
                raise ProgramError(
                    f"The compiled program {variant.name} has a product over {num_classes:,} classes."
                )
        return [variant for variant, _, _ in made]

    def _variant(self, name, of_features, case, arguments=lambda call: (), *, from_images=False, calls=1):
        """Compiles a function of features, or of images through the backbone; returns the variant and its text.

        ``arguments`` gives what else the function takes in a call.
        """

        def of_images(variables, images, *rest):
            return of_features(self._apply(variables, images), *rest)

        inputs = self._of_images if from_images else (self._features,)
        function = of_images if from_images else of_features
        program, compile_ms = self._compile(function, inputs, *arguments(0))
        call = functools.partial(program, *inputs)
        return Variant(name, lambda i: call(*arguments(i)), case, compile_ms, calls), program.as_text()

    def _compile(self, function, inputs, *arguments) -> tuple[Any, float]:
        """Compiles for the devices; the batch, the last of the inputs, is split over them, everything else is on each."""
        arguments = (*inputs, *arguments)
        if len(self.devices) > 1:
            batch = len(inputs) - 1
            specs = tuple(P("devices") if i == batch else P() for i in range(len(arguments)))
            function = jax.shard_map(function, mesh=self._mesh, in_specs=specs, out_specs=P("devices"))
        return compiled(jax.jit(function), *arguments)

    def _replicated(self, arrays):
        return jax.device_put(arrays, self._sharding(P()))

    def _sharding(self, spec):
        return NamedSharding(self._mesh, spec) if len(self.devices) > 1 else self.devices[0]


def _random_head(num_classes, num_features, dtype, rng) -> tuple[np.ndarray, np.ndarray]:
    """Returns a random kernel [k, d] that JAX and PyTorch can use where it is, and a random bias [k]."""
    num_bytes = num_classes * num_features * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    kernel = memory[start : start + num_bytes].view(dtype).reshape(num_classes, num_features)
    rows = rng.standard_normal((min(num_classes, _RANDOM_ROWS), num_features), np.float32)
    rows = (rows / np.float32(num_features**0.5)).astype(dtype)
    for first in range(0, num_classes, len(rows)):
        kernel[first : first + len(rows)] = rows[: num_classes - first]
    return kernel, rng.standard_normal(num_classes, np.float32).astype(dtype)
