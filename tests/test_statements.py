"""What README.md and data/README.md say in numbers is what the records and tables in data/ say."""

import csv
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from cs336_systems.config import CompileMode, Profiler, RunConfig
from cs336_systems.memory_model import predicted_peak_bytes
from cs336_systems.planning import make_plan
from cs336_systems.record import RunRecord, Status, load_records

ROOT = Path(__file__).parents[1]
H200_RUNS = ROOT / "data/memory_profiles/h200/runs"
GIB, MIB = 2**30, 2**20


def said(name: str, pattern: str) -> tuple[str, ...]:
    """The groups of the one place in the document that says this, however its lines are broken."""
    words = " ".join((ROOT / name).read_text().split())
    found = list(re.finditer(pattern, words))
    assert len(found) == 1, f"{name}: needed one place that says {pattern!r}, got {len(found)}"
    return found[0].groups()


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a table that this project wrote as CSV."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def eager_records() -> tuple[RunRecord, ...]:
    """Of all directories: runs of this project's model that nothing compiled."""
    found = (record for path in sorted((ROOT / "data").rglob("runs")) for record in load_records(path)[0])
    return tuple(dict.fromkeys(record for record in found if record.config.compile is CompileMode.NONE))


def errors(records: Iterable[RunRecord]) -> list[tuple[int, int]]:
    """How far off each prediction was, and the measured peak (bytes); every run has both."""
    pairs = []
    for record in records:
        predicted_bytes = predicted_peak_bytes(record.config)
        assert predicted_bytes is not None, record.key
        assert record.memory is not None, record.key
        pairs.append((abs(predicted_bytes - record.memory.peak_allocated_bytes), record.memory.peak_allocated_bytes))
    return pairs


def out_of_memory(records: Iterable[RunRecord]) -> tuple[set[RunConfig], set[RunConfig]]:
    """The configurations that ran out of memory, and those foretold on the GPU whose size the message gives."""
    kept = {record.config.unprofiled.configuration: record for record in records}
    ended = {config: record for config, record in kept.items() if record.status is Status.OOM}
    messages = [record.failure.message for record in ended.values() if record.failure is not None]
    (gib,) = {float(size) for text in messages for size in re.findall(r"total capacity of ([\d.]+) GiB", text)}
    return set(ended), set(make_plan(list(kept), round(gib * GIB)).too_large)


def test_readme_says_how_far_off_predictions_were() -> None:
    count, largest, num_ended = said(
        "README.md",
        r"Of the ([\d,]+) eager runs in `data/` that finished, all on H200s, it was at most ([\d.]+) % off, and the "
        r"(\d+) configurations that ran out of memory were those foretold\.",
    )
    finished = [record for record in eager_records() if record.status is Status.OK]
    assert {record.environment and record.environment.identity.device_name for record in finished} == {"NVIDIA H200"}
    assert int(count.replace(",", "")) == len(finished)
    assert largest == f"{100 * max(error / peak for error, peak in errors(finished)):.2f}"
    ended, foretold = out_of_memory(eager_records())
    assert ended == foretold
    assert int(num_ended) == len(ended)


def test_the_readme_of_data_says_how_far_off_those_of_h200_were() -> None:
    count, share, error_mib, peak_gib, num_exact, num_ended, gib = said(
        "data/README.md",
        r"Predicted peaks of the (\d+) runs that finished are within ([\d.]+) % \((\d+) MiB of ([\d.]+) GiB\); (\d+) "
        r"are right to the byte\. The (\d+) that ran out of memory, xl and 2\.7B at context 2048 in `forward` and "
        r"`train`, are those foretold on ([\d.]+) GiB, and no other",
    )
    plain = [record for record in load_records(H200_RUNS)[0] if record.config.profiler is Profiler.NONE]
    finished = [record for record in plain if record.status is Status.OK]
    pairs = errors(finished)
    error, peak = max(pairs, key=lambda pair: pair[0] / pair[1])
    assert int(count) == len(finished)
    assert (share, error_mib, peak_gib) == (f"{100 * error / peak:.2f}", f"{error / MIB:.0f}", f"{peak / GIB:.2f}")
    assert int(num_exact) == sum(error == 0 for error, _ in pairs)
    ended, foretold = out_of_memory(plain)
    assert ended == foretold
    assert int(num_ended) == len(ended)
    shapes = {(config.size, config.model.context_length, str(config.mode)) for config in ended}
    assert shapes == {(size, 2048, mode) for size in ("xl", "2.7B") for mode in ("forward", "train")}
    assert all(
        f"total capacity of {gib} GiB" in record.failure.message for record in plain if record.failure is not None
    )


def test_the_readme_of_data_says_the_closest_that_did_not_fit() -> None:
    needed, had = said(
        "data/README.md",
        r"The closest, 2\.7B `forward` in fp32, was to need ([\d.]+) GiB; it had ([\d.]+) when 2\.00 more were not",
    )
    ended = [record for record in load_records(H200_RUNS)[0] if record.status is Status.OOM]
    closest = min(ended, key=lambda record: predicted_peak_bytes(record.config) or 0)
    config = closest.config
    assert (config.size, str(config.mode), str(config.precision)) == ("2.7B", "forward", "fp32")
    assert needed == f"{(predicted_peak_bytes(config) or 0) / GIB:.1f}"
    assert closest.failure is not None
    assert "Tried to allocate 2.00 GiB" in closest.failure.message
    rows = [row for row in table(H200_RUNS.parent / "peaks.csv") if row["size"] == "2.7B"]
    (row,) = [
        row for row in rows if (row["context_length"], row["mode"], row["precision"]) == ("2048", "forward", "fp32")
    ]
    assert had == f"{float(row['peak_allocated_gib']):.1f}"


# The fast step


def steps_ms(name: str, **only: str) -> dict[str, float]:
    """The mean step of each size (ms), of the rows of a sweep that have these values."""
    rows = table(ROOT / "data/e2e_benchmark" / name / "results.csv")
    return {
        row["size"]: float(row["step_mean_ms"]) for row in rows if all(row[key] == value for key, value in only.items())
    }


def bf16_ceiling() -> float:
    """The highest rate that was measured on an H200 (TFLOP/s)."""
    studies = [table(path) for path in (ROOT / "data/ceilings").glob("NVIDIA-H200*/results.csv")]
    return max(float(row["measured"]) for rows in studies for row in rows if row["ceiling"] == "bf16 product")


def ceiling_shares(name: str) -> dict[str, float]:
    """Model FLOPs per second of each size over the highest bf16 rate that was measured (%)."""
    ceiling = bf16_ceiling()
    rows = table(ROOT / "data/e2e_benchmark" / name / "results.csv")
    return {row["size"]: 100 * float(row["model_tflops_per_s"]) / ceiling for row in rows}


def test_readme_says_how_fast_the_fast_step_is() -> None:
    row = r"\| (\S+) \| ([\d.]+) \| ([\d.]+)(?: ± \d+)? \| ([\d.]+) \| ([\d.]+) \|"
    text = (ROOT / "README.md").read_text()
    shown = re.findall(row, text[text.index("| size | eager bf16, above (ms)") :])
    eager = steps_ms("train", context_length="512", precision="bf16")
    fast, shares = steps_ms("train_fast"), ceiling_shares("train_fast")
    assert [size for size, *_ in shown] == list(fast) == ["small", "medium", "large", "xl", "2.7B"]
    for size, eager_ms, fast_ms, times, share in shown:
        assert float(eager_ms) == pytest.approx(eager[size], abs=0.05)
        assert float(fast_ms) == pytest.approx(fast[size], abs=0.5 if size == "2.7B" else 0.05)
        assert times == f"{eager[size] / fast[size]:.1f}"
        assert share == f"{shares[size]:.1f}"


def test_readme_says_what_share_of_the_ceiling_is_reached() -> None:
    xl, largest = said("README.md", r"\[(\d+) % and (\d+) %\]\(data/e2e_benchmark/train_fast_batch16/results\.md\)")
    shares = ceiling_shares("train_fast_batch16")
    assert (xl, largest) == (f"{shares['xl']:.0f}", f"{shares['2.7B']:.0f}")


def test_readme_says_how_far_up_the_ladders_go() -> None:
    gpt2 = said(
        "README.md", r"goes from ([\d.]+) to ([\d.]+) ms with fp32 masters, \[([\d.]+) to ([\d.]+) times as fast\]"
    )
    larger = said("README.md", r"at batch 4 goes from ([\d,]+) to (\d+) ms in bf16, and to (\d+) in fp8")
    rungs = {
        name: {row["rung"]: row for row in table(ROOT / "data/ladder" / name / "ladder.csv")}
        for name in ("gpt2", "gpt2-xl")
    }
    first, last = rungs["gpt2"]["fp32"], rungs["gpt2"]["fused-blocks"]
    assert gpt2[:2] == tuple(f"{float(row['step_mean_ms']):.1f}" for row in (first, last))
    interval = [float(last[f"speed_up_over_first_ci95_{end}"]) for end in ("low", "high")]
    assert gpt2[2:] == tuple(f"{end:.1f}" for end in interval)
    found = [float(rungs["gpt2-xl"][name]["step_mean_ms"]) for name in ("fp32", "fused-blocks", "fp8")]
    assert larger == tuple(f"{step_ms:,.0f}" for step_ms in found)


# Attention alone, and several GPUs


def test_the_readme_of_data_says_how_long_attention_takes() -> None:
    context, d_head, *times = said(
        "data/README.md",
        r"forward at ([\d,]+) tokens and d_head (\d+) in bf16 takes ([\d.]+) ms written out, ([\d.]+) by flash, "
        r"([\d.]+) by cuDNN; what is kept for backward is ([\d,]+) MiB, ([\d.]+) and (\d+\.\d+)\.",
    )
    rows = {
        row["implementation"]: row
        for row in table(ROOT / "data/attention/bf16/results.csv")
        if (row["context_length"], row["d_head"]) == (context.replace(",", ""), d_head)
    }
    three = [rows[name] for name in ("naive", "flash", "cudnn")]
    assert times[:3] == [f"{float(row['forward_mean_ms']):.2f}" for row in three]
    kept = [float(row["saved_mib"]) for row in three]
    assert times[3:] == [f"{kept[0]:,.0f}", *(f"{mib:.1f}" for mib in kept[1:])]


def test_the_readme_of_data_says_how_fast_two_gpus_reduce() -> None:
    rate, ceiling = said(
        "data/README.md",
        r"all-reduce between two reaches (\d+) GB/s on the bus, .* Its (\d+) TFLOP/s in bf16 is the ceiling",
    )
    rates = [float(row["bus_gb_per_s"]) for row in table(ROOT / "data/ceilings/NVIDIA-H200-x2/all_reduce.csv")]
    assert rate == f"{max(rates):.0f}"
    assert ceiling == f"{bf16_ceiling():.0f}"
