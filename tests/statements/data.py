"""The figures of data/README.md that README.md has not, each computed from a committed file."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import product

from cs336_systems.config import Profiler, RunConfig
from cs336_systems.costs.accounting import count_parameters
from cs336_systems.costs.ranks_time import HOST_SPREAD
from cs336_systems.record import Status
from tests.committed import committed_runs
from tests.statements.documents import (
    ROOT,
    Row,
    Value,
    claim,
    linked,
    one,
    read,
    some,
    table,
    table_claim,
)
from tests.statements.results import (
    DATA,
    GIB,
    H200,
    MIB,
    bf16_ceiling,
    count,
    errors,
    number,
    out_of_memory,
    peak_gib,
    peaks_of_xl,
    percents,
    predicted_bytes,
    records,
    train,
)


@claim(
    DATA,
    r"\(driver ([\d.]+), CUDA ([\d.]+), torch ([\d.]+), Python ([\d.]+), (\d+) CPU cores of a virtual machine; "
    r"in `parallel/` (\w+) of one host and (\d+) cores\)",
)
def machines() -> Sequence[Value]:
    found, cores, ranks = set(), {}, set()
    for directory in (path.parent.relative_to(ROOT / "data") for path in committed_runs()):
        is_of_several = directory.parts[0] == "parallel"
        for record in records(str(directory)):
            if (environment := record.environment) is not None and record.device_name == H200:
                identity, python = environment.identity, environment.python.rpartition(".")[0]
                found.add((identity.driver, environment.cuda, identity.torch, python))
                cores.setdefault(is_of_several, set()).add(float(environment.cpu_count))
                ranks.add(record.config.ranks)
    ((driver, cuda, torch, python),) = found
    (of_one,), (of_several,) = cores[False], cores[True]
    assert driver is not None
    assert cuda is not None
    return driver, cuda, torch, python, of_one, float(max(ranks)), of_several


@claim(DATA, r"Batch (\d+), (\d+) warm-up and (\d+) measured steps unless said otherwise")
def defaults() -> Sequence[Value]:
    return [RunConfig.__dataclass_fields__[name].default for name in ("batch_size", "warmup_steps", "measured_steps")]


@claim(
    DATA, r"(\w+) sizes, (\w+) contexts, (\w+) precisions: (\d+) fresh processes in (\d+) s, (\d+) s of them in steps"
)
def grid_in_short() -> Sequence[Value]:
    runs = records("e2e_benchmark/train")
    begun_s = {record: datetime.fromisoformat(record.started_at).timestamp() for record in runs}
    ended_s, in_steps_s = [], 0.0
    for record in runs:
        assert record.durations is not None
        assert record.durations.measured_s is not None
        ended_s.append(begun_s[record] + record.durations.total_s)
        in_steps_s += (record.durations.warmup_s or 0.0) + record.durations.measured_s
    kinds = (count(train(), name) for name in ("size", "context_length", "precision"))
    return *kinds, len(runs), max(ended_s) - min(begun_s.values()), in_steps_s


@claim(DATA, r"what the NVTX ranges cost: less than ([\d.]+) %")
def cost_of_ranges() -> Sequence[Value]:
    text = (ROOT / "data/e2e_benchmark/ranges_on_off/comparison.md").read_text()
    assert "](e2e_benchmark/ranges_on_off/comparison.md)" in read(DATA)
    (bound,) = re.findall(r"any difference is below ([\d.]+) %", text)
    return (float(bound),)


@claim(DATA, r"(\w+) sizes at (\w+) contexts: \[phases\]")
def profiled_sizes() -> Sequence[Value]:
    rows = linked(DATA, "nsys_profiles/train/slowdown.csv")
    return count(rows, "size"), count(rows, "context_length")


def seen(profiler: str) -> list[Mapping[str, str]]:
    """Forward, backward and optimizer of the step of xl at context 512."""
    rows = linked(DATA, f"{profiler}_profiles/train/phases.csv")
    return [one(rows, size="xl", context_length=512, phase=phase) for phase in ("forward", "backward", "optimizer")]


@claim(DATA, r"seen (\w+) ways \(ms; kernels a step: ([\d,]+), ([\d,]+) and ([\d,]+) by both profilers\)")
def kernels_of_xl() -> Sequence[Value]:
    nsys, kineto = ([number(row, "kernels_per_step") for row in seen(profiler)] for profiler in ("nsys", "kineto"))
    assert nsys == kineto
    return len({str(row[""]).rpartition(",")[2] for row in xl_seen_three_ways()}), *nsys


@table_claim(DATA, "| | forward | backward | optimizer |")
def xl_seen_three_ways() -> Sequence[Row]:
    ways = {
        "GPU time of the kernels, nsys": ("nsys", "kernel_mean_ms"),
        "GPU time of the kernels, Kineto": ("kineto", "kernel_mean_ms"),
        "wall on the device, nsys": ("nsys", "wall_mean_ms"),
        "wall on the device, Kineto": ("kineto", "wall_mean_ms"),
        "CUDA events, no profiler": ("nsys", "clock_mean_ms"),
    }
    return [
        {"": name, **{row["phase"]: number(row, column) for row in seen(profiler)}}
        for name, (profiler, column) in ways.items()
    ]


@claim(DATA, r"(\d+) recorded runs and the same (\d+) plain")
def recorded_runs() -> Sequence[Value]:
    runs = records("memory_profiles/h200")
    recorded, plain = (
        {record.config.unprofiled for record in runs if record.config.profiler is profiler}
        for profiler in (Profiler.MEMORY, Profiler.NONE)
    )
    assert recorded == plain
    return len(recorded), len(plain)


@claim(DATA, r"parameters are (\d+) N, gradients (\d+) N and AdamW's state (\d+) N exactly")
def bytes_of_a_parameter() -> Sequence[Value]:
    found = set()
    for row in linked(DATA, "memory_profiles/h200/boundaries.csv"):
        if row["mode"] == "train" and row["moment"] == "end of backward":
            runs = records("memory_profiles/h200")
            config = next(record.config for record in runs if record.config.size == row["size"])
            names = (f"{kind}_requested_bytes" for kind in ("parameters", "gradients", "optimizer_state"))
            if number(row, "optimizer_state_bytes"):  # it appears at the end of the first step
                found.add(tuple(number(row, name) / count_parameters(config.model) for name in names))
    (kinds,) = found
    return kinds


@claim(
    DATA,
    r"Predicted peaks of the (\d+) runs that finished are within ([\d.]+) % \((\d+) MiB of ([\d.]+) GiB\); (\d+) are "
    r"right to the byte\. The (\d+) that ran out of memory, xl and 2\.7B at context (\d+) in `forward` and `train`, "
    r"are those foretold on ([\d.]+) GiB, and no other",
)
def predictions_of_recorded_runs() -> Sequence[Value]:
    plain = [record for record in records("memory_profiles/h200") if record.config.profiler is Profiler.NONE]
    finished = [record for record in plain if record.status is Status.OK]
    pairs = errors(finished)
    error, peak = max(pairs, key=lambda pair: pair[0] / pair[1])
    ended, gib = out_of_memory(plain)
    (context,) = {config.model.context_length for config in ended}
    kinds = {(config.size, str(config.mode)) for config in ended}
    assert kinds == {(size, mode) for size in ("xl", "2.7B") for mode in ("forward", "train")}
    exact = sum(error == 0 for error, _ in pairs)
    return len(finished), 100 * error / peak, error / MIB, peak / GIB, exact, len(ended), context, gib


@claim(DATA, r"2\.7B `forward` in fp32, was to need ([\d.]+) GiB; it had ([\d.]+) when ([\d.]+) more were not")
def closest_that_did_not_fit() -> Sequence[Value]:
    ended = [record for record in records("memory_profiles/h200") if record.status is Status.OOM]
    closest = min(ended, key=lambda record: predicted_bytes(record.config))
    config = closest.config
    assert (config.size, str(config.mode), str(config.precision)) == ("2.7B", "forward", "fp32")
    assert closest.failure is not None
    (asked,) = re.findall(r"Tried to allocate ([\d.]+) GiB", closest.failure.message)
    rows = linked(DATA, "memory_profiles/h200/peaks.csv")
    row = one(rows, size="2.7B", context_length=2048, mode="forward", precision="fp32")
    return predicted_bytes(config) / GIB, number(row, "peak_allocated_gib"), float(asked)


@claim(DATA, r"([\d.]+) GiB in inference, ([\d.]+) with the graph kept, ([\d.]+) in training\.")
def peaks_by_mode() -> Sequence[Value]:
    return peaks_of_xl()[1:4]


@claim(
    DATA,
    r"At context (\d+) the optimizer sets the peak \(([\d.]+)\), from (\d+) on what is saved for backward\. A block "
    r"saves (\d+) MiB, a (\w+) of it the softmax; at context 2048 it is ([\d.]+) GiB, and (\d+) of these",
)
def what_blocks_save() -> Sequence[Value]:
    rows = some(linked(DATA, "memory_profiles/h200/peaks.csv"), size="xl", mode="train", precision="fp32")
    by_context = {int(row["context_length"]): row for row in rows}
    optimizer = [context for context, row in by_context.items() if row["peak_phase"] == "optimizer"]
    first, *_ = sorted(set(by_context) - set(optimizer))
    model = next(record.config.model for record in records("memory_profiles/h200") if record.config.size == "xl")
    softmax_bytes = 4 * model.num_heads * 512**2 * 4
    saved, longest = (number(by_context[context], "block_saved_bytes") for context in (512, 2048))
    peak = number(by_context[optimizer[0]], "peak_allocated_gib")
    return *optimizer, peak, first, saved / MIB, softmax_bytes / saved, longest / GIB, model.num_layers


@claim(
    DATA,
    r"saves next to nothing, ([\d.]+) for ([\d.]+) GiB: ([\d.]+) GiB of copied weights eat the ([\d.]+) GiB of smaller "
    r"activations\. In inference it takes more, ([\d.]+) for ([\d.]+),",
)
def what_autocast_saves() -> Sequence[Value]:
    rows = some(linked(DATA, "memory_profiles/h200/categories.csv"), size="xl", context_length=512, mode="train")
    fp32, bf16 = (one(rows, precision=precision) for precision in ("fp32", "bf16"))
    less = number(fp32, "saved_activations_bytes") - number(bf16, "saved_activations_bytes")
    train_gib, inference_gib = (
        [peak_gib(precision, mode) for precision in ("bf16", "fp32")] for mode in ("train", "inference")
    )
    return *train_gib, number(bf16, "autocast_copies_bytes") / GIB, less / GIB, *inference_gib


@claim(DATA, r"The first step peaks at ([\d.]+) GiB, each later one at ([\d.]+):")
def peak_of_the_first_step() -> Sequence[Value]:
    first = one(linked(DATA, "memory_profiles/first_step/peaks.csv"), precision="fp32")
    return number(first, "peak_allocated_gib"), peak_gib("fp32", "train")


@claim(DATA, r"timelines of (\w+) runs of h200 only")
@claim(DATA, r"its tables have the (\w+) alone")
def kept_profiles() -> Sequence[Value]:
    return (len(list((ROOT / "data/memory_profiles/h200/memory").iterdir())),)


@claim(DATA, r"holds (\w+) snapshots for PyTorch's viewer")
def kept_snapshots() -> Sequence[Value]:
    return (len(list((ROOT / "data/memory_profiles/h200/examples").glob("*.pickle"))),)


@claim(DATA, r"is the same (\w+) sizes under `--fast`")
def fast_profiles() -> Sequence[Value]:
    fast, slow = (
        {row["size"] for row in linked(DATA, f"kineto_profiles/{name}/slowdown.csv")}
        for name in ("train_fast", "train")
    )
    assert fast == slow
    return (len(fast),)


@claim(
    DATA,
    r"forward at ([\d,]+) tokens and d_head (\d+) in bf16 takes ([\d.]+) ms written out, ([\d.]+) by flash, ([\d.]+) "
    r"by cuDNN; what is kept for backward is ([\d,]+) MiB, ([\d.]+) and (\d+\.\d+)\.",
)
def attention_alone() -> Sequence[Value]:
    rows = some(linked(DATA, "attention/bf16/results.csv"), context_length=16384, d_head=128)
    three = [one(rows, implementation=name) for name in ("naive", "flash", "cudnn")]
    return 16384, 128, *(number(row, name) for name in ("forward_mean_ms", "saved_mib") for row in three)


@claim(
    DATA,
    r"forward at ([\d,]+) tokens and d_head (\d+) in bf16 takes ([\d.]+) ms written out, ([\d.]+) by flash, ([\d.]+) "
    r"by cuDNN and ([\d.]+) by flex_attention",
)
def own_attention() -> Sequence[Value]:
    rows = some(linked(DATA, "attention/own_flex/results.csv"), context_length=65536, d_head=128, precision="bf16")
    return (
        65536,
        128,
        *(number(one(rows, implementation=name), "forward_mean_ms") for name in ("naive", "flash", "cudnn", "own")),
    )


@claim(DATA, r"Stopped after (\d+) of (\d+) cells: the (\w+) longest of flex_attention in fp32 are missing")
def missing_cells() -> Sequence[Value]:
    cells = {
        (row["implementation"], row["precision"], int(row["d_head"]), int(row["context_length"]))
        for row in linked(DATA, "attention/own_flex/results.csv")
    }
    grid = set(
        product(
            ("naive", "flash", "efficient", "cudnn", "own"), ("bf16", "fp32"), (16, 32, 64, 128),
            [2**power for power in range(7, 17)],
        )
    )  # fmt: skip
    missing = grid - cells
    kept = [cell for cell in grid if cell[:2] == ("own", "fp32") and cell not in missing]
    assert {cell[:2] for cell in missing} == {("own", "fp32")}
    assert min((cell[3], cell[2]) for cell in missing) > max((cell[3], cell[2]) for cell in kept)
    return len(cells), len(grid), len(missing)


@claim(DATA, r"at (\d+) of the promised ([\d.]+) TFLOP/s in bf16")
def ceiling_of_one() -> Sequence[Value]:
    row = one(linked(DATA, "ceilings/NVIDIA-H200/results.csv"), ceiling="bf16 product")
    return number(row, "measured"), number(row, "data_sheet")


@claim(
    DATA,
    r"\[ceilings of (\w+)\].* the same with (\w+) GPUs of one machine.* all-reduce between (\w+) reaches (\d+) GB/s on "
    r"the bus, .* Its (\d+) TFLOP/s in bf16 is the ceiling",
)
def ceilings_of_two() -> Sequence[Value]:
    every = linked(DATA, "ceilings/NVIDIA-H200-x2/collectives.csv")
    rows = [row for row in every if row["collective"] == "all-reduce"]
    (size,) = {int(row["world_size"]) for row in rows}
    assert (
        number(one(table("ceilings/NVIDIA-H200-x2/results.csv"), ceiling="bf16 product"), "measured") == bf16_ceiling()
    )
    return size, size, size, max(number(row, "bus_gb_per_s") for row in rows), bf16_ceiling()


@claim(
    DATA,
    r"Its spread, up to (\d+) % of the step, is that of the virtual machine's CPU, and so is the difference between "
    r"(\w+) sweeps: small in bf16 at context 128 took (\d+) ms in `train` and (\d+) ms in `train_bf16`\.",
)
def spread_where_the_cpu_is_the_limit() -> Sequence[Value]:
    spread = max(percents([row for row in train() if "launch-bound" in row["warnings"]], "step_cv"))
    sweeps = [linked(DATA, f"e2e_benchmark/{name}/results.csv") for name in ("train", "train_bf16")]
    bf16 = [one(rows, size="small", context_length=128, precision="bf16") for rows in sweeps]
    full = [linked(DATA, f"e2e_benchmark/{name}/results.csv") for name in ("train", "train_fp32")]
    for low, rows in zip(bf16, full, strict=True):
        fp32 = one(rows, size="small", context_length=128, precision="fp32")
        assert number(low, "step_mean_ms") > number(fp32, "step_mean_ms"), "small is slower in bf16, in both"
    return spread, len(sweeps), *(number(row, "step_mean_ms") for row in bf16)


@claim(
    DATA,
    r"Of (\d+) steps on H200s limited by the device the median error is ([\d.]+) %, (\d+) of (\d+) are at most "
    r"([\d.]+) % off, "
    r"and none is more than (\d+) %\. Of (\d+) limited by launches (\d+) of (\d+) are at most (\d+) % off, .* "
    r"of (\d+) of them the forecast says that the device limits them\.\s+"
    r"The forecast also says where a CPU that launches ([\d.]+) times as fast or as slowly would change the limit: "
    r"it does so for (\d+) of the (\d+), and names the wrong limit for (\d+) of the others\.",
)
def errors_of_forecasts() -> Sequence[Value]:
    rows = some(linked(DATA, "forecast/errors.csv"), device_name=H200)
    device, launches = some(rows, limit="device"), some(rows, limit="launches")
    of_device, of_launches = (
        sorted(abs(number(row, "step_error")) for row in each) for each in (device, launches)
    )  # fmt: skip
    assert max(of_device) <= 25
    most = [each[math.ceil(0.9 * len(each)) - 1] for each in (of_device, of_launches)]
    wrong = some(launches, predicted_limit="device")
    unsure, surely_wrong = (
        len(some(each, depends_on_host=value)) for each, value in ((launches, "True"), (wrong, "False"))
    )
    named = HOST_SPREAD, unsure, len(launches), surely_wrong
    return (
        len(device),
        statistics.median(of_device),
        9,
        10,
        most[0],
        25,
        len(launches),
        9,
        10,
        most[1],
        len(wrong),
        *named,
    )
