"""The figures of docs/RESULTS.md, each computed from a committed file; some are in the other
documents too.
"""

import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from cs336.analysis.kernels.step_profile import IdleCause, read_profile
from cs336.commands.sweep_plan import make_plan
from cs336.config import CompileMode, Phase, Precision, RunConfig
from cs336.costs.accounting import component_flops
from cs336.costs.hardware import find_device
from cs336.costs.memory import predicted_peak_bytes
from cs336.record import RunRecord, Status, load_records, read_record
from tests.committed import committed_runs
from tests.statements.documents import ROOT, Row, Value, claim, linked, one, some, table

README, METHOD, RESULTS = "README.md", "docs/METHOD.md", "docs/RESULTS.md"
GIB, MIB = 2**30, 2**20
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


@cache
def records(directory: str) -> tuple[RunRecord, ...]:
    """The runs of a directory below data/."""
    return tuple(load_records(ROOT / "data" / "published" / directory / "runs")[0])


def number(row: Mapping[str, str], name: str) -> float:
    return float(row[name])


def count(rows: Iterable[Mapping[str, str]], *names: str) -> int:
    """Different values of these columns."""
    return len({tuple(row[name] for name in names) for row in rows})


def percents(rows: Iterable[Mapping[str, str]], name: str) -> list[float]:
    return [100 * number(row, name) for row in rows]


# The grid


def train() -> tuple[dict[str, str], ...]:
    return linked(RESULTS, "e2e_benchmark/train/results.csv")


@claim
def steps_of_all_sizes() -> Sequence[dict[str, Value]]:
    found: list[dict[str, Value]] = []
    for row in some(train(), context_length=512):
        full = one(train(), size=row["size"], context_length=512, precision="fp32")
        times_as_fast = number(full, "step_mean_ms") / number(row, "step_mean_ms")
        found.append(
            {
                "size": row["size"],
                "precision": row["precision"],
                **{
                    f"{phase} (ms)": mean_ms(row, phase)
                    for phase in ("forward", "backward", "optimizer", "step")
                },
                "std/mean (%)": 100 * number(row, "step_cv"),
                "tokens/s": number(row, "tokens_per_s"),
                "MFU (%)": 100 * number(row, "mfu"),
                "peak (GiB)": number(row, "peak_allocated_gib"),
                "speed-up": "" if row is full else times_as_fast,
            }
        )
    return found


def mean_ms(row: Mapping[str, str], phase: str) -> tuple[float, float]:
    """Mean and standard deviation of a phase."""
    return number(row, f"{phase}_mean_ms"), number(row, f"{phase}_std_ms")


@claim
def sizes_and_contexts() -> Sequence[Value]:
    return count(train(), "size"), count(train(), "context_length")


@claim
def sizes() -> Sequence[Value]:
    assert count(train(), "size") == len(linked(RESULTS, "e2e_benchmark/train_fast/results.csv"))
    return (count(train(), "size"),)


@claim
def measured_steps() -> Sequence[Value]:
    (steps,) = {row["measured_steps"] for row in train()}
    return (float(steps),)


@claim
def why_mfu_falls() -> Sequence[Value]:
    full, low = peaks_tflops()
    return *percents(some(train(), size="small", context_length=512), "mfu"), low, low / full, full


@claim
def why_mfu_falls_in_short() -> Sequence[Value]:
    full, low = peaks_tflops()
    for size in ("small", "medium"):
        assert (
            "launch-bound"
            in one(train(), size=size, context_length=512, precision="bf16")["warnings"]
        )
    gains = [row["speed-up"] for row in steps_of_all_sizes() if isinstance(row["speed-up"], float)]
    return low / full, min(gains), max(gains), share_of_adamw()


def peaks_tflops() -> tuple[float, float]:
    """What the data sheet of the GPU promises in fp32 and in bf16."""
    (name,) = {row["device_name"] for row in train()}
    device = find_device(name)
    assert device is not None
    full, low = (
        device.peak_flops_per_s[precision] / 1e12 for precision in (Precision.FP32, Precision.BF16)
    )
    return full, low


def share_of_adamw() -> float:
    """The optimizer's share of the step of 2.7B in bf16."""
    largest = one(train(), size="2.7B", context_length=512, precision="bf16")
    return number(largest, "optimizer_mean_ms") / number(largest, "step_mean_ms")


# Where the time goes


@claim
def idle_in_small() -> Sequence[Value]:
    step = one(
        linked(RESULTS, "nsys_profiles/train/phases.csv"),
        size="small",
        context_length=128,
        phase="step",
    )
    (path,) = (ROOT / "data/published/nsys_profiles/train/kernels").glob("small_ctx128_*.json")
    profile = read_profile(path)
    assert profile is not None
    late_s = sum(row.total_s for row in profile.idle if row.cause is IdleCause.LATE_LAUNCH)
    late_ms, clock_ms = 1e3 * late_s / profile.num_steps, number(step, "clock_mean_ms")
    busy_ms, wall_ms = number(step, "busy_mean_ms"), number(step, "wall_mean_ms")
    idle_ms = min(late_ms, clock_ms - busy_ms)
    return (
        100 * busy_ms / clock_ms,
        clock_ms,
        100 * busy_ms / wall_ms,
        wall_ms,
        100 * idle_ms / clock_ms,
    )


# Where the memory goes


def peak_gib(precision: str, mode: str, context: int = 512) -> float:
    rows = table("memory_profiles/h200/results.csv")
    return number(
        one(rows, size="xl", context_length=context, mode=mode, precision=precision),
        "peak_allocated_gib",
    )


@claim
def foretold_models_of_others() -> Sequence[Value]:
    """Of the records of all processes, and of what was committed before they ran."""
    directory, found = (
        ROOT / "data/published/forecast",
        defaultdict[tuple[str, str], list[RunRecord]](list),
    )
    with (
        zipfile.ZipFile(directory / "foreign_runs.zip") as archive,
        TemporaryDirectory() as scratch,
    ):
        archive.extractall(scratch)
        for record in map(read_record, Path(scratch).rglob("*.json")):
            model = str(record.config.model_factory).partition(":")[2]
            found[model, record.config.precision].append(record)
    rows = json.loads((directory / "foreign.json").read_text())
    (processes,) = {len(records) for records in found.values()}
    peaks, off, spread = [], defaultdict[str, list[float]](list), []
    for row in rows:
        records = found.pop((row["model"], row["precision"]))
        steps = [step for record in records if (step := record.measurement(Phase.STEP)) is not None]
        steps_ms = [1e3 * step.mean_s for step in steps]
        (peak_bytes,) = {
            record.memory.peak_allocated_bytes for record in records if record.memory is not None
        }
        peaks.append(100 * abs(row["predicted_peak_gib"] / (peak_bytes / GIB) - 1))
        off[row["precision"]].append(100 * (row["predicted_step_ms"] / median(steps_ms) - 1))
        spread.append(100 * (max(steps_ms) / min(steps_ms) - 1))
    assert not found, "none is left out"
    return (
        processes,
        max(peaks),
        max(map(abs, off["fp32"])),
        -max(off["bf16"]),
        -min(off["bf16"]),
        max(spread),
    )


@claim
def public_rows() -> Sequence[Value]:
    """Of all rows, and of those that no rule was made from."""
    rows = table("forecast/public_rows.csv")
    asked = [row for row in rows if row["error_percent"]]
    errors = [abs(float(row["error_percent"])) for row in asked]
    inside = sum(row["inside"] == "yes" for row in asked)
    blind = [
        abs(float(row["error_percent"]))
        for row in asked
        if row["source"].startswith(("NVIDIA/NeMo ", "arXiv "))
    ]
    return len(rows), len(asked), inside, median(errors), len(blind), median(blind)


@claim
def peaks_of_xl() -> Sequence[Value]:
    (parameters,) = {
        record.num_parameters
        for record in records("memory_profiles/h200")
        if record.config.size == "xl" and record.status is Status.OK
    }
    assert parameters is not None
    fp32 = (peak_gib("fp32", mode) for mode in ("inference", "forward", "train"))
    return parameters / 1e9, *fp32, peak_gib("bf16", "train")


@cache
def eager_records() -> tuple[RunRecord, ...]:
    """Of all directories: runs of this project's model that nothing compiled, launched kernel by
    kernel.
    """
    found = (record for path in committed_runs() for record in load_records(path)[0])
    return tuple(
        dict.fromkeys(
            record
            for record in found
            if record.config.compile is CompileMode.NONE and not record.config.cuda_graph
        )
    )


def predicted_bytes(config: RunConfig) -> int:
    """The peak that is predicted for the configuration, which must be one that can be."""
    predicted = predicted_peak_bytes(config)
    assert predicted is not None, config.key
    return predicted


def errors(runs: Iterable[RunRecord]) -> list[tuple[int, int]]:
    """How far off each prediction was, and the measured peak (bytes); every run has both."""
    pairs = []
    for record in runs:
        assert record.memory is not None, record.key
        peak_bytes = record.memory.peak_allocated_bytes
        pairs.append((abs(predicted_bytes(record.config) - peak_bytes), peak_bytes))
    return pairs


def out_of_memory(runs: Iterable[RunRecord]) -> tuple[set[RunConfig], float]:
    """Configurations on one GPU that ran out of memory, which must be those foretold on its size
    (GiB, second).
    """
    kept = {record.config.unprofiled.configuration: record for record in runs}
    ended = {config: record for config, record in kept.items() if record.status is Status.OOM}
    messages = [record.failure.message for record in ended.values() if record.failure is not None]
    sizes = {
        float(size)
        for text in messages
        for size in re.findall(r"total capacity of ([\d.]+) GiB", text)
    }
    if not ended:
        known = (
            record.environment and record.environment.device_memory_bytes
            for record in kept.values()
        )
        sizes = {size / GIB for size in known if size}
    (gib,) = sizes
    assert set(ended) == set(make_plan(list(kept), round(gib * GIB)).too_large)
    return set(ended), gib


@claim
def predictions() -> Sequence[Value]:
    finished = [record for record in eager_records() if record.status is Status.OK]
    assert {record.device_name for record in finished} == {H200, H100}
    worst = max(error / peak for error, peak in errors(finished))
    num_ended = 0
    for name in (H200, H100):
        of_device = [record for record in eager_records() if record.device_name == name]
        ended, *_ = out_of_memory(of_device)
        num_ended += len(ended)
    return len(finished), 100 * worst, num_ended


@claim
def predictions_in_short() -> Sequence[Value]:
    return (predictions()[1],)


# How far it is from the hardware


def rung(ladder: str, name: str, document: str = RESULTS) -> Mapping[str, str]:
    return one(linked(document, f"ladder/{ladder}/ladder.csv"), rung=name)


@claim
def ladder_of_gpt2() -> Sequence[Value]:
    first, last = (rung("gpt2", name) for name in ("fp32", "fused-blocks"))
    interval = (number(last, f"speed_up_over_first_ci95_{end}") for end in ("low", "high"))
    return number(first, "step_mean_ms"), number(last, "step_mean_ms"), *interval


@claim
def gain_of_own_kernels() -> Sequence[Value]:
    before, after = (
        number(rung("gpt2", name), "step_mean_ms") for name in ("blocks", "fused-blocks")
    )
    return (before - after,)


@claim
def ladder_of_gpt2_xl() -> Sequence[Value]:
    return [
        number(rung("gpt2-xl", name), "step_mean_ms") for name in ("fp32", "fused-blocks", "fp8")
    ]


def by_moments(size: str, column: str) -> tuple[float, float]:
    """A column of the compared steps with AdamW's moments in fp32 and in bf16."""
    rows = table(f"e2e_benchmark/moments_{size}/results.csv")
    return number(one(rows, bf16_moments="False"), column), number(
        one(rows, bf16_moments="True"), column
    )


def gain_of_moments(size: str) -> float:
    """How much less time the step takes with moments in bf16 (%); the comparison must tell the
    two apart.
    """
    assert (
        "| faster |"
        in (ROOT / f"data/published/e2e_benchmark/moments_{size}/comparison.md").read_text()
    )
    before, after = by_moments(size, "step_mean_ms")
    return 100 * (1 - after / before)


@claim
def moments_of_xl() -> Sequence[Value]:
    """An update reads the gradient, reads and writes the master and both moments, and writes the
    copy.
    """
    fp32, bf16 = torch.float32.itemsize, torch.bfloat16.itemsize
    moved = [bf16 + 2 * (fp32 + 2 * moment) + bf16 for moment in (bf16, fp32)]
    return *moved, gain_of_moments("xl"), *reversed(by_moments("xl", "peak_allocated_gib"))


@claim
def split_masters_of_xl() -> Sequence[Value]:
    directory = "e2e_benchmark/split_xl"
    assert "| faster |" in (ROOT / f"data/published/{directory}/comparison.md").read_text()
    rows = table(f"{directory}/results.csv")
    assert {row["device_name"] for row in rows} == {H100}
    whole, split = (one(rows, split_masters=name) for name in ("False", "True"))
    saved = 100 * (1 - number(split, "step_mean_ms") / number(whole, "step_mean_ms"))
    return saved, number(split, "peak_allocated_gib"), number(whole, "peak_allocated_gib")


def bf16_ceiling() -> float:
    """The highest rate that was measured on an H200 (TFLOP/s)."""
    studies = (table(f"ceilings/{name}/results.csv") for name in ("NVIDIA-H200", "NVIDIA-H200-x2"))
    return max(number(one(rows, ceiling="bf16 product"), "measured") for rows in studies)


def ceiling_shares(name: str, *, causal: bool = False) -> dict[str, float]:
    """Model FLOPs per second of each size over the highest bf16 rate that was measured (%)."""
    shares = {}
    for record in records(f"e2e_benchmark/{name}"):
        row = one(linked(RESULTS, f"e2e_benchmark/{name}/results.csv"), size=record.config.size)
        flops = sum(part.step for part in component_flops(record.config, causal=causal))
        shares[record.config.size] = (
            100 * flops / number(row, "step_mean_ms") / 1e9 / bf16_ceiling()
        )
    return shares


@claim
def fast_steps() -> Sequence[Row]:
    shares = ceiling_shares("train_fast")
    found: list[Row] = []
    for row in linked(RESULTS, "e2e_benchmark/train_fast/results.csv"):
        eager = one(train(), size=row["size"], context_length=512, precision="bf16")
        eager_ms, fast_ms = (number(side, "step_mean_ms") for side in (eager, row))
        found.append(
            {
                "size": row["size"],
                "eager bf16, above (ms)": eager_ms,
                "`--fast` (ms)": (fast_ms, number(row, "step_std_ms")),
                "times as fast": eager_ms / fast_ms,
                "of the measured ceiling (%)": shares[row["size"]],
            }
        )
    return found


@claim
def attention_of_the_fast_step() -> Sequence[Value]:
    classes = linked(RESULTS, "kineto_profiles/train_fast/classes.csv")
    return percents([one(classes, size="xl", phase="step")], "fused_attention_share")


@claim
def shares_at_batch_16() -> Sequence[Value]:
    full, causal = (ceiling_shares("train_fast_batch16", causal=causal) for causal in (False, True))
    return full["xl"], full["2.7B"], causal["xl"], causal["2.7B"]
