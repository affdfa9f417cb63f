"""From records to tables and figures: medians, paired ratios, the paper's numbers beside ours."""

import io

import numpy as np
import pytest
from rich.console import Console

from pols_jax.benchmarking.records import Record
from pols_jax.benchmarking.settings import PAPER_CLASSES, PAPER_NETWORKS, LogitsSettings
from pols_jax.benchmarking.speed_figures import draw_speed
from pols_jax.benchmarking.speed_tables import (
    PAPER_SPEED_UPS,
    PAPER_TABLE_3,
    median_interval,
    ratio,
    speed_tables,
)
from pols_jax.benchmarking.timing import Measurement
from pols_jax.errors import ConfigError
from pols_jax.tables import print_tables, to_markdown

CASE = {"network": "resnet50", "batch_size": 32, "num_devices": 1, "num_features": 2048}


def a_record(num_devices=1):
    """The backbone takes 10 ms, one logit 0.1 ms more, all logits of k classes k / 10,000 ms more."""
    record = Record("logits", {}, {})
    case = {**CASE, "num_devices": num_devices}
    # The machine is twice as slow in the second round.
    rounds = (1.0, 2.0, 1.0)
    record.measurements.append(Measurement("backbone", case, 1.0, [10.0 * slow for slow in rounds]))
    for k in (1, 2**18):
        times = {
            "all_logits": 10 + k / 10_000,
            "one_logit": 10.1,
            "head_all_logits": k / 10_000,
            "head_one_logit": 0.05,
            "torch_linear": k / 5_000,
        }
        for name, time_ms in times.items():
            times_ms = [time_ms * slow for slow in rounds]
            record.measurements.append(Measurement(name, {**case, "num_classes": k}, 1.0, times_ms))
    skipped = {**case, "num_classes": 370_727}
    record.skipped.append({"case": skipped, "kernel_bytes": 3_036_995_584, "reason": "it is too large"})
    return record


def rows_of(table):
    return {row[0]: row[1:] for row in table.rows}


def test_the_table_of_a_network_has_our_times_the_speed_up_its_limit_and_the_paper():
    network, _ = speed_tables(a_record())
    assert network.headings == ["k", "1", "2^18", "2^18.5"]
    rows = rows_of(network)
    assert rows["all logits, ms"][1] == "36.21 ±9.05"  # quartiles 36.2144 and 54.3216, half their distance
    assert rows["speed-up"] == ["x0.99", "x3.59", ""]  # 36.2144 / 10.1
    assert rows["limit: all / backbone"] == ["x1.00", "x3.62", ""]  # 36.2144 / 10
    assert rows["PyTorch F.linear, ms"][1] == "52.43"
    assert rows["paper: all logits, ms for 32"] == ["6.1", "19.1", "78.0"]
    assert rows["paper: speed-up"] == ["", "x3.11", "x12.69"]
    assert rows["not measured"] == ["", "", "left out: 3.0 GB"]
    assert "images/s, one logit, all devices" not in rows


def test_the_summary_says_how_near_one_logit_is_to_the_backbone_alone():
    _, summary = speed_tables(a_record())
    row = dict(zip(summary.headings, summary.rows[0], strict=True))
    assert row["one logit / backbone"] == "1.010 (1.010 to 1.010)"  # the same in every round
    assert row["max / min over k"] == "1.000"
    assert row["of the limit"] == "99.0%"
    assert row["PyTorch head / ours"] == "x2.00"


def test_the_interval_of_a_median_holds_it_in_about_95_of_100_runs():
    rng = np.random.default_rng(0)
    ones = Measurement("ones", {}, None, [1.0] * 50)
    holds = 0
    for _ in range(1000):
        times = np.exp(rng.normal(0, 0.1, 50)).tolist()  # their true median is 1
        low, high = median_interval(Measurement("times", {}, None, times), ones)
        holds += low <= 1 <= high
    assert 935 <= holds <= 985


def test_several_devices_show_their_throughput_in_all_and_each():
    rows = rows_of(speed_tables(a_record(num_devices=4))[0])
    # 32 images in 10.1 ms on each of four devices.
    assert rows["images/s, one logit, each device"][0] == "3,168.3"
    assert rows["images/s, one logit, all devices"][0] == "12,673.3"


def test_a_ratio_compares_calls_of_the_same_round():
    slow = Measurement("a", {}, None, [2.0, 40.0, 2.0])
    fast = Measurement("b", {}, None, [1.0, 20.0])  # interrupted in the third round
    assert ratio(slow, fast) == 2.0
    assert ratio(slow, None) is None


def test_a_record_read_back_gives_the_same_tables(tmp_path):
    record = a_record()
    record.save(tmp_path / "speed.json")
    assert speed_tables(Record.load(tmp_path / "speed.json")) == speed_tables(record)


def test_a_record_of_no_benchmark_of_ours_is_one_sentence():
    with pytest.raises(ConfigError, match="There is no benchmark named 'loses'; did you mean losses"):
        speed_tables(Record("loses", {}, {}))


@pytest.mark.parametrize("benchmark", ["logits", "losses", "metrics"])
def test_a_record_without_measurements_has_tables_without_numbers(benchmark):
    tables = speed_tables(Record(benchmark, {}, {}))
    assert all(table.rows == [] for table in tables)
    print_tables(tables, console=Console(file=io.StringIO()))


def test_a_printed_table_is_not_cut_off_in_a_file():
    out = io.StringIO()
    print_tables(speed_tables(a_record()), console=Console(file=out))
    assert "…" not in out.getvalue()
    assert "PyTorch head / ours" in out.getvalue()


def test_markdown_has_every_table():
    text = to_markdown(speed_tables(a_record()))
    assert text.count("### ") == 2
    assert "| one logit, ms | 10.10 ±" in text


def test_figures_are_drawn_for_every_network_and_for_the_speed_up(tmp_path):
    names = {path.name for path in draw_speed(a_record(), tmp_path / "figures")}
    assert {"time_resnet50_batch_32.png", "speed_up_batch_32.png"} <= names
    assert all((tmp_path / "figures" / name).stat().st_size > 1000 for name in names)


def test_the_papers_speed_ups_are_those_of_its_times():
    # The times have one digit after the point, so the quotients agree to a few percent.
    for network, speed_ups in PAPER_SPEED_UPS.items():
        times = PAPER_TABLE_3[network]
        for num_classes, speed_up in speed_ups.items():
            assert times[num_classes] / times[1] == pytest.approx(speed_up, rel=0.03)


def test_the_paper_preset_is_the_papers_table_and_flags_change_it():
    settings = LogitsSettings(preset="paper").resolved()
    assert settings.networks == PAPER_NETWORKS == tuple(PAPER_TABLE_3)
    assert settings.classes == PAPER_CLASSES == tuple(PAPER_TABLE_3["vgg16"])
    assert (settings.batch_size, settings.batches) == ((32,), 100)
    assert LogitsSettings(preset="paper", batch_size=(1,)).resolved().batch_size == (1,)
