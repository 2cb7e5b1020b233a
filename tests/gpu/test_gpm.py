"""Counters of the GPU without a profiler, against those that nsys reads in a run of its own; and
what watching costs.
"""

import contextlib
import json
import math
import shutil
import sqlite3
import statistics
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep

import pynvml
import pytest
import torch
from torch import nn

from cs336 import watch
from cs336.config import SIZES, Attention, Device, Precision, RunConfig
from cs336.measure.nvml import THROTTLE_COUNTERS, GpuMonitor, visible_gpus
from cs336.measure.run import measure
from cs336.model.trainable import cross_entropy
from cs336.model.transformer import TransformerLM

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(300)]

POINTS = 0.05
"""How far a share of GPM may lie from that of nsys."""
SECONDS = 3.0
"""How long each kind of loop runs in the comparison."""
MOST_COST = 0.001
"""Largest share of a step of 30 ms that watching may cost."""
BLOCK, AHEAD = 2, 3
"""Steps of a block, and blocks that are launched ahead of the device."""
WARMING_S, COMPARING_S = 10.0, 70.0
COUNTERS = {
    "tensor_share": ("Tensor Active",),
    "sm_share": ("SMs Active", "SM Active"),
    "dram_share": ("DRAM Read Bandwidth", "DRAM Write Bandwidth"),
}
"""The counters of nsys, in percent, that a share of GPM is the sum of; one of them by either of its
names.
"""


def make_loop(kind):
    """A step of a training loop, the model and the optimizer.

    Of `train` matmuls take most of the time, of `memory` an update, and of `pauses` nothing.
    """
    if kind == "memory":
        model = torch.nn.Linear(2**14, 2**15, bias=False, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        inputs = torch.randn(16, 2**14, device="cuda")

        def step():
            model(inputs).square().mean().backward()
            optimizer.step()

        return step, model, optimizer
    shape = replace(SIZES["small"], attention=Attention.SDPA)
    with torch.device("cuda"):
        model = TransformerLM(shape)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(shape.vocab_size, (2, 24, shape.context_length), device="cuda")

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = cross_entropy(model(tokens[0]), tokens[1], shape.vocab_size)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind == "pauses":
            torch.cuda.synchronize()
            torch.cuda._sleep(int(4e7))  # the device waits, without work for its units

    return step, model, optimizer


def run(kinds, output):
    """Run each kind of loop for SECONDS; return its activity by GPM, if it is counted."""
    shares = {}
    for kind in kinds:
        step, model, optimizer = make_loop(kind)
        watched = watch(model, optimizer, warmup_steps=5, name=kind, output=output, every=0)
        for _ in range(5):
            with watched.step():
                step()
        torch.cuda.synchronize()
        end_s = perf_counter() + SECONDS
        with torch.cuda.nvtx.range(f"loop {kind}"):
            while perf_counter() < end_s:
                with watched.step():
                    step()
                torch.cuda.synchronize()
        activity = watched.record().activity
        watched.remove()
        shares[kind] = None
        if activity is not None:
            shares[kind] = {name: getattr(activity, name) for name in COUNTERS}
            shares[kind]["span_s"] = activity.span_s
        del step, model, optimizer, watched
        torch.cuda.empty_cache()
    return shares


KINDS = ("train", "memory", "pauses")
PROGRAM = """
import json, sys
if sys.argv[2] == "nsys":  # whose counters are those of GPM, so that only one can read them
    import pynvml
    def refuse(*_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    pynvml.nvmlGpmQueryDeviceSupport = refuse
from tests.gpu.test_gpm import KINDS, run
json.dump(run(KINDS, sys.argv[3]), open(sys.argv[1], "w"))
"""


@pytest.fixture(scope="module")
def by_gpm(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gpm")
    path = directory / "shares.json"
    command = [sys.executable, "-c", PROGRAM, str(path), "gpm", str(directory)]
    subprocess.run(command, check=True, timeout=120)
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def by_nsys(tmp_path_factory):
    """Means of the samples within the range of each loop, without the first and last tenth."""
    nsys = shutil.which("nsys")
    assert nsys, "this machine should have nsys"
    directory = tmp_path_factory.mktemp("nsys")
    report = directory / "report.nsys-rep"
    options = ("--trace=nvtx", "--sample=none", "--cpuctxsw=none", "--gpu-metrics-devices=0")
    program = [sys.executable, "-c", PROGRAM, str(directory / "none.json"), "nsys", str(directory)]
    command = [nsys, "profile", *options, "--gpu-metrics-frequency=1000", f"--output={report}"]
    subprocess.run([*command, *program], check=True, timeout=200)
    tables = Path(f"{report}.sqlite")
    export = [nsys, "export", "--type=sqlite", f"--output={tables}", str(report)]
    subprocess.run(export, check=True, timeout=100, stdout=subprocess.DEVNULL)
    with sqlite3.connect(tables) as database:
        return {kind: shares_in(database, f"loop {kind}") for kind in KINDS}


def shares_in(database, name):
    query = (
        "SELECT start, end FROM NVTX_EVENTS LEFT JOIN StringIds ON textId = id "
        "WHERE coalesce(text, value) = ?"
    )
    ((start, end),) = database.execute(query, (name,)).fetchall()
    margin = (end - start) // 10
    query = (
        "SELECT metricName, avg(value) FROM GPU_METRICS JOIN TARGET_INFO_GPU_METRICS "
        "USING (typeId, metricId) WHERE timestamp BETWEEN ? AND ? GROUP BY metricName"
    )
    means = dict(database.execute(query, (start + margin, end - margin)).fetchall())
    shares = {}
    for share, counters in COUNTERS.items():
        keys = [f"{counter} [Throughput %]" for counter in counters]
        seen = [means[key] for key in keys if key in means]
        assert seen, f"nsys has {sorted(means)}"
        shares[share] = sum(seen) / 100
    return shares


@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_those_of_nsys(kind, by_gpm, by_nsys):
    assert by_gpm[kind] is not None, "an H100 or newer has these counters"
    for name in COUNTERS:
        gpm, nsys = by_gpm[kind][name], by_nsys[kind][name]
        print(f"{kind} {name}: {100 * gpm:.1f} % by GPM, {100 * nsys:.1f} % by nsys")
    for name in COUNTERS:
        assert by_gpm[kind][name] == pytest.approx(by_nsys[kind][name], abs=POINTS)


def test_a_benchmark_has_them_too():
    model = replace(SIZES["small"], attention=Attention.SDPA)
    config = RunConfig(
        size="small",
        model=model,
        batch_size=24,
        precision=Precision.BF16,
        device=Device.CUDA,
        measured_steps=30,
    )
    activity = measure(config).activity
    print(activity)
    assert 0.1 < activity.tensor_share < activity.sm_share <= 1


def median_interval(values):
    """The 95 % interval of the median, from the order of the values alone (binomial)."""
    values, half = sorted(values), 0.98 * math.sqrt(len(values))
    return values[int(len(values) / 2 - half)], values[math.ceil(len(values) / 2 + half)]


def test_watching_costs_at_most_a_thousandth_of_a_step(tmp_path, capsys):
    """The upper end of the interval is within the bound, so that an unclear result fails.

    Short blocks of steps with and without `watch` in turn, in one process, are timed on the device,
    which limits these steps and never waits between them: a mark's own time on the device, and any
    wait for the host, count. A block is compared with the mean of its two neighbours, so that a
    clock that changes steadily cancels out. The hooks stay all the time; without `with`, they mark
    nothing.
    """
    layers = [nn.Sequential(nn.Linear(2**13, 2**13), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.randn(2**13, 2**13, device="cuda")
    watched = watch(model, optimizer, output=tmp_path, every=0)

    def run_block(is_watched):
        for _ in range(BLOCK):
            with watched.step() if is_watched else contextlib.nullcontext():
                with torch.autocast("cuda", torch.bfloat16):
                    loss = model(inputs).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    end_s = perf_counter() + WARMING_S
    while perf_counter() < end_s:  # until the clock has settled
        run_block(True).synchronize()
    events = [run_block(False)]
    begin_s = perf_counter()
    while perf_counter() < begin_s + COMPARING_S:
        events.append(run_block(len(events) % 2 == 1))
        if len(events) > AHEAD:  # launches stay few blocks ahead, and the device never waits
            events[-AHEAD].synchronize()
    torch.cuda.synchronize()
    watched.remove()
    times_ms = [begin.elapsed_time(end) / BLOCK for begin, end in pairwise(events)]
    costs_ms = []
    for index in range(2, len(times_ms) - 1, 2):
        plain_ms = (times_ms[index - 1] + times_ms[index + 1]) / 2
        costs_ms.append(times_ms[index] - plain_ms)
    low_ms, high_ms = median_interval(costs_ms)
    step_ms = statistics.median(times_ms[1::2])
    with capsys.disabled():
        print(
            f"\nwatching costs {1e3 * statistics.median(costs_ms):.1f} us ({1e3 * low_ms:.1f} to "
            f"{1e3 * high_ms:.1f}) of a step of {step_ms:.2f} ms, in {len(costs_ms)} blocks"
        )
    assert step_ms >= 30, "the device is to limit a step of this length"
    assert high_ms <= MOST_COST * step_ms


def test_how_long_a_reading_takes_and_how_often_it_is_new(capsys):
    """What measure/gpm.py takes for granted, as this driver has it."""
    handle = pynvml.nvmlDeviceGetHandleByUUID(visible_gpus()[0].uuid)
    first, last = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
    values = torch.randn(2**26, device="cuda")
    took_s, shares = [], []
    pynvml.nvmlGpmSampleGet(handle, first)
    begin_s = perf_counter()
    while perf_counter() < begin_s + 1:
        for _ in range(20):
            values.mul_(1.0)
        sleep(0.003)
        before_s = perf_counter()
        pynvml.nvmlGpmSampleGet(handle, last)
        took_s.append(perf_counter() - before_s)
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, 1
        request.sample1, request.sample2 = first, last
        request.metrics[0].metricId = pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL
        pynvml.nvmlGpmMetricsGet(request)
        shares.append(request.metrics[0].value)
    new = sum(one != other for one, other in pairwise(shares))
    with capsys.disabled():
        print(
            f"\na reading takes {1e6 * statistics.median(took_s):.0f} us "
            f"(at most {1e6 * max(took_s):.0f}); {new} of {len(shares)} in a second are new"
        )
    assert statistics.median(took_s) < 0.01


def test_counters_of_throttled_time_grow_by_no_more_than_the_time():
    """In matmuls that reach the power limit or do not; the driver renews the counters every 0.1 s
    or so.
    """
    monitor = GpuMonitor(visible_gpus()[0].uuid)
    before, begun_s = monitor.throttled_s(), perf_counter()
    factor = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    while perf_counter() - begun_s < SECONDS:
        for _ in range(20):
            factor @ factor
        torch.cuda.synchronize()
    after = monitor.throttled_s()
    took_s = perf_counter() - begun_s
    assert before.keys() == after.keys() == set(THROTTLE_COUNTERS.values())
    for reason, seconds in after.items():
        assert 0 <= seconds - before[reason] <= took_s + 0.2
