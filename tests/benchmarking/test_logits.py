"""All logits against one: what is timed is what is said to be timed, read off the compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pols_jax.benchmarking import logits_speed
from pols_jax.benchmarking.logits_speed import NetworkBench, run_logits
from pols_jax.benchmarking.programs import check_programs, kernel_sized_arrays, wide_products
from pols_jax.benchmarking.records import Record, Recorder
from pols_jax.benchmarking.settings import LogitsSettings
from pols_jax.benchmarking.timing import profile
from pols_jax.errors import ProgramError
from pols_jax.heads import all_logits, class_logits

NUM_CLASSES = 1013  # a prime, which no layer of a network has as its width


NUM_FEATURES = 24


def check_head(everything, one):
    check_programs(
        all_logits=everything, one_logit=one, backbone="", num_classes=NUM_CLASSES, num_features=NUM_FEATURES
    )


def compiled_text(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().as_text()


@pytest.fixture
def head():
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.normal(size=shape).astype(np.float32))
        for shape in ((4, NUM_FEATURES), (NUM_CLASSES, NUM_FEATURES), (NUM_CLASSES,))
    ]


def test_the_program_of_all_logits_has_a_product_over_all_classes_and_that_of_one_logit_has_none(head):
    everything, one = compiled_text(all_logits, *head), compiled_text(class_logits, *head, np.int32(3))
    assert wide_products(everything, NUM_CLASSES) == 1
    assert wide_products(one, NUM_CLASSES) == kernel_sized_arrays(one, NUM_CLASSES, NUM_FEATURES) == 0
    check_head(everything, one)


def test_a_full_path_that_is_folded_or_dead_is_found_out(head):
    features, kernel, bias = head
    one = compiled_text(class_logits, *head, np.int32(3))
    folded = compiled_text(lambda: jnp.zeros((4, NUM_CLASSES)))
    dead = compiled_text(lambda *arrays: (all_logits(*arrays), arrays[0])[1], features, kernel, bias)
    for program in (folded, dead):
        with pytest.raises(ProgramError, match="no product over 1,013 classes"):
            check_head(program, one)


def test_a_one_logit_path_that_computes_all_logits_is_found_out(head):
    def slow(features, kernel, bias, asked):
        return all_logits(features, kernel, bias)[:, asked]

    with pytest.raises(ProgramError, match="has a product over 1,013 classes"):
        check_head(compiled_text(all_logits, *head), compiled_text(slow, *head, np.int32(3)))


def test_a_one_logit_path_that_writes_a_new_kernel_is_found_out(head):
    def slow(features, kernel, bias, asked):
        return class_logits(features, jnp.sort(kernel, axis=0), bias, asked)

    with pytest.raises(ProgramError, match="writes a kernel of 1,013 classes"):
        check_head(compiled_text(all_logits, *head), compiled_text(slow, *head, np.int32(3)))


def test_a_layer_of_the_backbone_that_is_as_wide_as_there_are_classes_is_no_mistake():
    # The hidden layers of the MLP have 500 units.
    bench = NetworkBench("mlp", 2, LogitsSettings(classes=(500,)))
    assert [variant.case.get("num_classes") for variant in bench.variants()] == [None, *[500] * 5, None]


@pytest.fixture(scope="module")
def bench():
    return NetworkBench("mlp", 3, LogitsSettings(classes=(NUM_CLASSES, 1)))


@pytest.fixture(scope="module")
def variants(bench):
    return {(v.name, v.case.get("num_classes")): v for v in bench.variants()}


def test_every_variant_computes_what_its_name_says(bench, variants):
    features = np.asarray(variants["backbone", None].call(0))
    np.testing.assert_allclose(features, bench.host_features, rtol=1e-6)
    for num_classes in (1, NUM_CLASSES):
        kernel, bias = bench.host_head(num_classes)
        expected = features.astype(np.float64) @ kernel.T + bias
        for name in ("all_logits", "head_all_logits"):
            # Sums of 500 float32 products of about 1/20.
            np.testing.assert_allclose(variants[name, num_classes].call(0), expected, atol=1e-4)
        for name in ("one_logit", "head_one_logit"):
            for call in (0, 1, 65):
                asked = bench.asked_classes(num_classes)[call % 64]
                np.testing.assert_allclose(
                    variants[name, num_classes].call(call), expected[:, asked], atol=1e-4
                )


def test_a_normalized_logit_is_one_logit_minus_the_same_number_for_any_class(bench, variants):
    """NUM_CLASSES is between 256 and 1,024, so that the normalizer of 256 rows is timed and that of 1,024 is not."""
    name = "head_one_logit_normalized_256"
    assert [k for variant, k in variants if variant == name] == [NUM_CLASSES]
    assert not any("1024" in variant or variant == "one_logit_normalized" for variant, _ in variants)
    estimates = [
        np.asarray(
            variants["head_one_logit", NUM_CLASSES].call(call) - variants[name, NUM_CLASSES].call(call)
        )
        for call in (0, 1)
    ]
    np.testing.assert_allclose(estimates[0], estimates[1], atol=1e-4)
    assert estimates[0].min() > np.log(256) - 3


def test_the_asked_class_changes_from_call_to_call(bench):
    assert len(set(bench.asked_classes(370_727))) == 64


def test_the_compile_time_is_kept_apart(variants):
    assert all(variant.compile_ms > 0 for variant in variants.values())


def test_the_kernels_of_all_sizes_share_their_memory_on_a_cpu(bench):
    kernel, _ = bench.host_head(NUM_CLASSES)
    smaller, _ = bench.host_head(1)
    assert np.shares_memory(kernel, smaller)
    on_device = jax.device_put(kernel, jax.devices("cpu")[0])
    assert on_device.unsafe_buffer_pointer() == kernel.ctypes.data


def test_a_kernel_that_does_not_fit_is_reported_with_its_bytes_and_the_run_goes_on(monkeypatch):
    monkeypatch.setattr(logits_speed, "available_bytes", lambda device: 10_000_000)
    settings = LogitsSettings(networks=("mlp",), classes=(7, 10**6), batch_size=(2,), batches=3)
    record, said = Record("logits", {}, {}), []
    run_logits(settings, Recorder(record, None), say=said.append)
    assert [entry["case"]["num_classes"] for entry in record.skipped] == [10**6]
    assert record.skipped[0]["kernel_bytes"] == 10**6 * 500 * 4
    assert any("1,000,000 classes left out" in line for line in said)
    measured = record.find("one_logit", num_classes=7)
    assert measured is not None
    assert len(measured.times_ms) == 3


def test_running_out_of_memory_while_compiling_is_reported_and_the_run_goes_on(monkeypatch):
    bench = NetworkBench("mlp", 2, LogitsSettings(classes=(7, 11)))
    variants_of = bench._variants_of

    def fail_for_eleven(num_classes):
        if num_classes == 11:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 22000 bytes.")
        return variants_of(num_classes)

    monkeypatch.setattr(bench, "_variants_of", fail_for_eleven)
    assert {variant.case.get("num_classes") for variant in bench.variants()} == {None, 7}
    assert bench.classes == [7]
    assert bench.skipped[0]["case"]["num_classes"] == 11


def test_several_devices_each_have_a_batch_of_their_own():
    bench = NetworkBench("mlp", 3, LogitsSettings(classes=(NUM_CLASSES,), num_devices=2))
    variants = {variant.name: variant for variant in bench.variants()}
    logits = variants["all_logits"].call(0)
    assert logits.shape == (6, NUM_CLASSES)
    assert len(logits.sharding.device_set) == 2
    asked = bench.asked_classes(NUM_CLASSES)[5]
    np.testing.assert_allclose(variants["one_logit"].call(5), logits[:, asked], atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_networks_have_16_bit_kernels(dtype):
    bench = NetworkBench("mlp", 2, LogitsSettings(classes=(NUM_CLASSES,), dtype=dtype))
    assert bench.host_head(NUM_CLASSES)[0].dtype.name == dtype
    assert all(np.isfinite(np.asarray(variant.call(0))).all() for variant in bench.variants())


def test_a_profile_is_a_trace_in_the_folder(tmp_path, variants):
    profile(list(variants.values())[:2], tmp_path, "trace")
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))
