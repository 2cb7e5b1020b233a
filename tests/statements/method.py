"""The figures of docs/METHOD.md, each computed from a committed file or taken from the code that applies it."""

import inspect
import itertools
import math
import re
from collections.abc import Callable, Sequence

import scipy.stats

from cs336_systems.analysis import compare, few_processes, warnings
from cs336_systems.analysis.statistics import FEWEST, mean_interval
from cs336_systems.config import Phase, Precision, Profiler, RunConfig
from cs336_systems.costs.curves import SHEPARD_EXPONENT
from cs336_systems.costs.hardware import find_device
from cs336_systems.costs.ranks_time import SPEED_BESIDE
from cs336_systems.costs.time import MAX_BACKLOG_S, MAX_BACKLOG_SHARE, MIN_LAUNCHED_SHARE, QUEUE_DEPTH
from cs336_systems.measure.page_faults import MIN_SHARE
from cs336_systems.measure.run import LEAST_TRAIN_WARMUP_STEPS
from cs336_systems.record import Measurement
from cs336_systems.sweep.ladder import GATE_STEPS
from tests.committed import committed_runs
from tests.statements.documents import ROOT, Row, Value, claim, linked, one, read, some, table, table_claim
from tests.statements.results import METHOD, README, number, records


@claim(METHOD, r"One nsys report, (\w+) steps of small at context 512")
def steps_of_the_report() -> Sequence[Value]:
    return (number(one(table("nsys_profiles/train/results.csv"), size="small", context_length=512), "measured_steps"),)


@table_claim(METHOD, "| range | nsys stats: kernels |")
def kernels_by_range() -> Sequence[Row]:
    report = linked(METHOD, "nsys_profiles/train/nvtx_kern_sum_small_ctx512.csv")
    ours = some(linked(METHOD, "nsys_profiles/train/phases.csv"), size="small", context_length=512)
    (steps,) = steps_of_the_report()
    assert isinstance(steps, float)
    found: list[Row] = []
    for name in ("forward", "backward", "optimizer", "measure"):
        theirs = some(report, **{"NVTX Range": f":{name}"})
        row = one(ours, phase="step" if name == "measure" else name)
        found.append({
            "range": "all of `measure`" if name == "measure" else name,
            "nsys stats: kernels": sum(number(part, "Kern Inst") for part in theirs),
            "GPU time (ms)": sum(number(part, "Total Time (ns)") for part in theirs) / 1e6,
            "cs336 kernels: kernels": steps * number(row, "kernels_per_step"),
            "GPU time (ms) 2": steps * number(row, "kernel_mean_ms"),
        })  # fmt: skip
    return found


@claim(METHOD, r"([\d.]+) times for small at context 128, less than (\d+) % for xl")
def cost_of_the_profiler() -> Sequence[Value]:
    rows = some(linked(METHOD, "nsys_profiles/train/phases.csv"), phase="step")
    most = max(number(row, "slowdown") for row in some(rows, size="xl"))
    return number(one(rows, size="small", context_length=128), "slowdown"), math.ceil(100 * (most - 1))


@claim(METHOD, r"takes (\d+) FLOPs for each parameter and token at (\w+) of the peak: ([\d.]+) days")
def days_of_training() -> Sequence[Value]:
    command = r'account --parameters (\S+) --tokens (\S+) --device-name "([^"]*)" --count (\d+)'
    ((parameters, tokens, name, devices),) = re.findall(command, (ROOT / METHOD).read_text())
    device = find_device(name)
    assert device is not None
    flops_per_s = float(devices) * 0.5 * device.peak_flops_per_s[Precision.BF16]
    return 6, 0.5, 6 * float(parameters) * float(tokens) / flops_per_s / (24 * 60 * 60)


@claim(METHOD, r"logarithms of the sides, to the power of (\d+)")
def exponent_of_distances() -> Sequence[Value]:
    return (SHEPARD_EXPONENT,)


@claim(METHOD, r"at most (\d+) launches ahead")
def depth_of_the_queue() -> Sequence[Value]:
    return (QUEUE_DEPTH,)


@claim(METHOD, r"others are taken to be (\w+) as fast")
def speed_beside_collectives() -> Sequence[Value]:
    return (SPEED_BESIDE,)


@claim(METHOD, r"Its losses over (\d+) steps must be those of the first rung")
def steps_of_the_gate() -> Sequence[Value]:
    return (GATE_STEPS,)


@claim(METHOD, r"from (\w+) of them on\.")
@claim(README, r"With `--repeats`, (\w+) or more")
def fewest_processes_for_an_interval() -> Sequence[Value]:
    return (FEWEST,)


@claim(METHOD, r"Steady state only\*\*: (\w+) warm-up steps")
def warmup_steps() -> Sequence[Value]:
    return (RunConfig.__dataclass_fields__["warmup_steps"].default,)


@claim(METHOD, r"\[it costs ([\d.]+) % of the step of small\]")
def cost_of_synchronisations() -> Sequence[Value]:
    path = "data/published/e2e_benchmark/events_or_synchronisation/comparison.md"
    assert f"]({'../' + path})" in read(METHOD)
    (change,) = re.findall(r"B is slower than A: \+([\d.]+) %", (ROOT / path).read_text())
    return (float(change),)


@claim(METHOD, r"\[less than ([\d.]+) % of a step\]\(\.\./data/published/e2e_benchmark/ranges_on_off/comparison\.md\)")
def cost_of_ranges() -> Sequence[Value]:
    text = (ROOT / "data/published/e2e_benchmark/ranges_on_off/comparison.md").read_text()
    (bound,) = re.findall(r"any difference is below ([\d.]+) %", text)
    return (float(bound),)


@claim(METHOD, r"(\w+) are the least for whole steps")
@claim(METHOD, r"fewer than (\d+) warm-up steps before")
def least_warmup_steps() -> Sequence[Value]:
    return (LEAST_TRAIN_WARMUP_STEPS,)


@claim(METHOD, r"a (\d+) % confidence interval of their means \(Student's t\)")
@claim(README, r"a (\d+) % confidence interval over fresh processes")
def confidence_over_processes() -> Sequence[Value]:
    return (100 * default_of(mean_interval, "confidence"),)


@claim(METHOD, r"with a (\d+) % interval\. A sweep")
def confidence_of_a_comparison() -> Sequence[Value]:
    return (100 * default_of(compare.compare, "confidence"),)


@claim(METHOD, r"at least (\w+) processes, it rests")
def fewest_processes_of_both_sides() -> Sequence[Value]:
    return (FEWEST,)


@claim(
    METHOD,
    r"deviation of ([\d.]+) % between times .* deviation of ([\d.]+) %, and besides of (\w+) that of its steps, and "
    r"the (\d+) % interval .* below ([\d.]+) %\. `data",
)
def rule_for_few_processes() -> Sequence[Value]:
    assumed = (few_processes.TIME_DEVIATION, few_processes.PROCESS_DEVIATION)
    least = few_processes.least_difference()
    return *(100 * each for each in assumed), few_processes.STEP_FACTOR, 100 * compare.CONFIDENCE, 100 * least


@claim(
    METHOD,
    r"`data/published` holds more than (\d+) pairs of processes of one configuration under the same conditions, more "
    r"than (\d+) of them from different sweeps, and none of them is told apart. An interval over the steps alone would "
    r"tell more than a (\w+) of them apart",
)
def pairs_of_processes() -> Sequence[Value]:
    """The interval over the steps alone is Welch's, as SciPy computes it."""
    alike: dict[object, list[tuple[str, Measurement]]] = {}
    for directory in sorted(str(path.parent.relative_to(ROOT / "data" / "published")) for path in committed_runs()):
        for record in records(directory):
            measured = record.measurement(Phase.STEP)
            if record.environment and measured and measured.cv and record.config.profiler is Profiler.NONE:
                key = record.config.configuration, record.environment.identity
                alike.setdefault(key, []).append((directory, measured))
    pairs = [pair for own in alike.values() for pair in itertools.combinations(own, 2)]
    for (_, a), (_, b) in pairs:
        assert few_processes.compare_processes([a], [b]).verdict is compare.Verdict.CANNOT_TELL
    by_steps = [scipy.stats.ttest_ind(a.times_s, b.times_s, equal_var=False).pvalue for (_, a), (_, b) in pairs]
    across = sum(one != other for (one, _), (other, _) in pairs)
    share = sum(float(p) < 0.01 for p in by_steps) / len(pairs)
    return min(300, len(pairs) - 1), min(70, across - 1), min(1 / 3, share)


def default_of(function: Callable[..., object], name: str) -> float:
    default = inspect.signature(function).parameters[name].default
    assert isinstance(default, float)
    return default


@claim(METHOD, r"more than (\d+) % of the mean step")
def unstable() -> Sequence[Value]:
    return (100 * warnings.MAX_CV,)


@claim(METHOD, r"outlier by a test that names ([\d.]+) % of runs of pure noise, and (\d+) % or more")
def outliers() -> Sequence[Value]:
    return 100 * warnings.OUTLIER_ALPHA, 100 * warnings.MIN_OUTLIER


@claim(METHOD, r"that noise does not explain, of (\d+) % or more")
def drift() -> Sequence[Value]:
    return (100 * warnings.MIN_DRIFT,)


@claim(METHOD, r"page faults took about (\d+) % of the step or more")
def page_faults() -> Sequence[Value]:
    return (100 * MIN_SHARE,)


@claim(METHOD, r"in phases that take more than (\d+) % of the step the CPU .* within (\d+) ms, and (\d+) % of its time")
def launch_bound() -> Sequence[Value]:
    return 100 * MIN_LAUNCHED_SHARE, 1e3 * MAX_BACKLOG_S, 100 * MAX_BACKLOG_SHARE
