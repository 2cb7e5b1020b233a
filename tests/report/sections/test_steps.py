import csv
import io
import re
from dataclasses import replace

import pytest
import rich.console
import scipy.stats

from cs336.config import Precision
from cs336.report.configurations import step_results
from cs336.report.formats import WRITERS
from cs336.report.quantities import StepResult
from cs336.report.sections.steps import results_table, step_findings, warmup_table
from cs336.report.terminal import to_rich
from tests.report.making import make_config, make_failure, make_record
from tests.report.reading import column
from tests.report.writing import write_tables


def names(table):
    return [heading.name for heading in table.headings]


def rendered(records, width):
    console = rich.console.Console(width=width, file=io.StringIO())
    console.print(to_rich(results_table(step_results(records)), width))
    return console.file.getvalue()


def test_csv_has_every_row_and_every_column(grid, tmp_path):
    write_tables(grid, tmp_path)
    with (tmp_path / "results.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == [*StepResult.csv_keys([]), "device"]
    assert len(rows) == 8
    table = [dict(zip(header, row, strict=True)) for row in rows]
    failed = next(row for row in table if row["status"] == "oom")
    assert (failed["size"], failed["context_length"], failed["error"]) == ("xl", "512", "no memory")
    measured = header[header.index("forward_mean_ms") : header.index("warnings")]
    assert not any(failed[name] for name in measured)
    assert float(failed["predicted_peak_gib"]) > 30
    first = table[0]
    assert float(first["step_mean_ms"]) == pytest.approx(100)
    assert float(first["step_std_ms"]) == pytest.approx(10)
    assert float(first["tokens_per_s"]) == pytest.approx(4 * 128 / 0.1)


def test_selection_shows_what_varies_and_says_the_rest_once(grid):
    table = results_table(step_results(grid))
    assert names(table) == [
        "size",
        "context",
        "precision",
        "step",
        "forward",
        "backward",
        "optimizer",
        "std/mean",
        "tokens/s",
        "MFU",
        "peak",
        "predicted",
        "speed-up",
        "status",
    ]
    assert (
        "NVIDIA H200, cs336 architecture, batch 4, train, naive attention, adamw optimizer"
        in table.notes[0]
    )
    assert table.rows[0][:7] == (
        "small",
        "128",
        "fp32",
        "100 ± 10",
        "25 ± 3",
        "50 ± 5",
        table.rows[0][6],
    )
    assert table.rows[0][6].startswith("12.5 ± 1.")
    assert column(table, "std/mean")[0] == "10"
    assert column(table, "speed-up") == ["", "2.00", "", "2.00", "", "2.00", "", ""]


def test_failed_rows_say_so_in_words_and_have_no_numbers(grid):
    table = results_table(step_results(grid))
    (index,) = table.failed
    *before, predicted, speed_up, status = table.rows[index]
    assert (*before, speed_up, status) == ("xl", "512", "fp32", *[""] * 8, "", "out of memory")
    assert float(predicted) == pytest.approx(41.72, rel=0.005), (
        "measured on an H200 that had the memory"
    )


def test_warmup_table(warmup_records, tmp_path):
    table = warmup_table(step_results(warmup_records))
    assert names(table) == [
        "size",
        "context",
        "precision",
        "warm-up",
        "step",
        "std/mean",
        "first measured step",
        "status",
    ]
    assert column(table, "first measured step") == ["1,000", "200.0", "", "100.0"]
    assert column(table, "status") == ["ok", "ok", "killed", "ok"]
    assert column(table, "std/mean") == ["130", "43", "", "0.0"]
    assert warmup_table(step_results(warmup_records[:1])) is None
    write_tables(warmup_records, tmp_path)
    for ending, mark in (
        ("md", "### Time of a step by warm-up"),
        ("tex", r"\end{table}"),
        ("typ", "#figure("),
    ):
        assert (tmp_path / f"results.{ending}").read_text().count(mark) == (
            1 if ending == "md" else 2
        )


INTERVAL = r"(\d[\d,.]*) to (\d[\d,.]*)"


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_table_of_the_step_has_the_interval_over_processes(count, tmp_path):
    """In all formats, of both numbers of warm-up steps, as scipy has it; over two processes
    there is none anywhere.
    """
    records, expected_ms = [], []
    for warmup in (1, 5):
        means_s = [0.1 * (1 + repeat / 50) + warmup for repeat in range(count)]
        for repeat, mean_s in enumerate(means_s):
            config = make_config(warmup_steps=warmup, repeat=repeat)
            records.append(make_record(config, (0.9 * mean_s, 1.1 * mean_s)))
        if count > 2:
            error_s = scipy.stats.sem(means_s)
            low_s, high_s = scipy.stats.t.interval(0.95, count - 1, sum(means_s) / count, error_s)
            expected_ms.append([1e3 * low_s, 1e3 * high_s])
    write_tables(records, tmp_path)
    console = rich.console.Console(width=300, file=io.StringIO())
    for table in (results_table(step_results(records)), warmup_table(step_results(records))):
        console.print(to_rich(table))
    texts = [console.file.getvalue()]
    texts += [(tmp_path / f"results.{ending}").read_text() for ending in WRITERS]
    for text in texts:
        shown_ms = []
        for low, high in re.findall(INTERVAL, text):
            shown_ms.append([float(low.replace(",", "")), float(high.replace(",", ""))])
        # the intervals stand in both tables
        assert shown_ms == [pytest.approx(pair, rel=1e-2) for pair in expected_ms * 2]
        assert ("over processes" in text) is (count > 2)
        assert ("--repeats 3" in text) is (count == 2)
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["processes"] for row in rows] == [str(count)] * 2
    for row in rows:
        ends = row["step_ci95_low_ms"], row["step_ci95_high_ms"]
        assert [bool(end) for end in ends] == [count > 2] * 2


def test_processes_that_failed_are_not_counted():
    config = make_config()
    done = [make_record(replace(config, repeat=i), (0.1, 0.1 + i / 1e3)) for i in range(2)]
    table = results_table(step_results([*done, make_failure(replace(config, repeat=2))]))
    assert "95 % interval" not in names(table)
    assert any("--repeats 3" in note for note in table.notes)
    assert [result.processes for result in step_results([make_failure(config)])] == [0]


def numbers(text):
    return [
        float(number.replace(",", "")) for number in re.findall(r"(?<![\w.])\d[\d,]*\.?\d*", text)
    ]


def test_speed_ups_are_told_by_their_ends_and_against_the_first_value() -> None:
    gains = {("small", 128): 0.5, ("small", 512): 2, ("xl", 128): 3, ("xl", 512): 5}
    records = [
        make_record(
            make_config(size, context, precision=precision),
            (1.5 if precision == "fp32" else 1.5 / gain,),
        )
        for (size, context), gain in gains.items()
        for precision in (Precision.FP32, Precision.BF16)
    ]
    (text,) = step_findings(step_results(records))
    assert numbers(text) == [0.5, 128, 5, 512]
    assert "0.500 (small ctx 128)" in text
    others = make_config(compile="default"), make_config(model={"attention": "sdpa"})
    chosen = [
        make_record(config, (time_s,))
        for config, time_s in zip((make_config(), *others), (6, 2, 3), strict=True)
    ]
    assert [numbers(text) for text in step_findings(step_results(chosen))] == [[2.0], [3.0]]


def test_what_limits_steps_or_ended_them_is_counted_and_named() -> None:
    configs = [make_config(context_length=2**n) for n in range(7, 17)]
    records = [make_record(config, (0.1,), codes=["launch-bound"]) for config in configs[:9]]
    bound, ended = step_findings(step_results([*records, make_failure(configs[9])]))
    assert numbers(bound) == [9, 10, *(2**n for n in range(7, 15)), 1]
    assert numbers(ended) == [1, 10, 2**16]
    assert step_findings(step_results(records[:1])) == [], "the only run has its warning beside it"
