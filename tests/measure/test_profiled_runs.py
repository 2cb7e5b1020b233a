"""Runs under torch.profiler on a CPU: what the trace holds, what is kept, and that no published
time is theirs.
"""

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cs336 import cli
from cs336.analysis.kernels.phases import LaunchPhase
from cs336.analysis.kernels.step_profile import Work, decode_profile
from cs336.config import SIZES, Mode, Phase, Profiler, RunConfig
from cs336.measure.run import measure
from cs336.model.annotate import Annotator, set_annotator
from cs336.record import Status, load_records
from cs336.sweep.keep import explain_run
from cs336.sweep.store import explanation_path, raw_profile_path
from cs336.sweep.worker import run_here
from tests.analysis.kernels.tracing import num_matmuls

MODEL = replace(SIZES["tiny"], context_length=32, d_model=32, d_ff=48, vocab_size=50)
CONFIG = RunConfig(
    size="custom", model=MODEL, warmup_steps=2, measured_steps=3, profiler=Profiler.KINETO
)


@pytest.fixture(autouse=True)
def nobody_is_told_afterwards() -> Iterator[None]:
    """Who is told of the ranges holds for a process, which is that of other tests too."""
    yield
    set_annotator(Annotator.NONE)


def events(trace: Path) -> list[dict]:
    return json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def ranges(trace: Path) -> Counter[str]:
    return Counter(
        event["name"] for event in events(trace) if event.get("cat") == "user_annotation"
    )


def test_the_trace_holds_the_measured_steps_and_one_of_warm_up(tmp_path: Path) -> None:
    record = measure(CONFIG, profile=tmp_path / "t.json.gz")
    assert record.status is Status.OK
    assert len(record.warmup_times_s) == CONFIG.warmup_steps + 1
    assert len(record.measurements[-1].times_s) == CONFIG.measured_steps
    found = ranges(tmp_path / "t.json.gz")
    assert (found["measure"], found["warmup"], found["step"]) == (1, 1, CONFIG.measured_steps + 1)
    # each of two layers' attention, forward and backward, in four steps
    assert found["attention"] == 2 * 2 * 4
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("mode", Mode)
def test_a_profiled_run_is_explained(mode: Mode, tmp_path: Path) -> None:
    config, runs = replace(CONFIG, mode=mode), tmp_path / "runs"
    runs.mkdir()
    record = run_here(config, runs)
    assert record.status is Status.OK, record.failure
    assert raw_profile_path(config, runs).is_file()
    assert not explanation_path(config, runs).exists(), "explaining is not measuring"
    explain_run(config, runs)
    profile = decode_profile(explanation_path(config, runs).read_bytes())
    assert profile.work is Work.OPERATORS
    assert profile.num_steps == config.measured_steps
    assert not profile.is_warmup
    busy = {phase.phase: sum(phase.kernel_s) for phase in profile.phases if sum(phase.kernel_s)}
    assert {LaunchPhase(phase.value) for phase in config.phases} <= set(busy)
    # by the host's clock the phases of the same steps: operators are part of them
    for phase in config.phases:
        clock = sum(record.measurement(phase).times_s)
        assert 0 < busy[LaunchPhase(phase.value)] < clock
    products = 3 * (9 * 2 + 1)
    assert num_matmuls(profile, LaunchPhase.FORWARD) == products
    assert sum(part.product_count for part in profile.attention) == 3 * 2 * 2
    if mode in (Mode.TRAIN, Mode.FORWARD_BACKWARD):
        assert num_matmuls(profile, LaunchPhase.BACKWARD) == 2 * products


def test_what_a_checkpoint_computes_again_has_its_own_name(tmp_path: Path) -> None:
    config, runs = replace(CONFIG, checkpoint_blocks=1), tmp_path / "runs"
    runs.mkdir()
    record = run_here(config, runs)
    assert record.status is Status.OK, record.failure
    explain_run(config, runs)
    profile = decode_profile(explanation_path(config, runs).read_bytes())
    layers, steps = config.model.num_layers, config.measured_steps
    assert num_matmuls(profile, LaunchPhase.FORWARD) == steps * (9 * layers + 1)
    # two gradients each, and the products of the blocks once more
    assert num_matmuls(profile, LaunchPhase.BACKWARD) == steps * (27 * layers + 2)
    paths = {module.path for module in profile.modules if module.phase is LaunchPhase.BACKWARD}
    again = {path[1:] for path in paths if path[:1] == ("forward",)}
    of_attention, of_others = set(), set()
    for block in (f"block.{index}" for index in range(layers)):
        of_attention.add((block, "attention"))
        for part in ("scores", "softmax", "values"):
            of_attention.add((block, "attention", f"attention.{part}"))
        of_others |= {(block, "norm"), (block, "ffn")}
    assert {path for path in again if path[1:2] == ("attention",)} == of_attention
    # the kernels of a backward node belong to the module of its operator in forward
    in_blocks = {path for path in paths if len(path) > 1 and path[0] != "forward"}
    assert in_blocks == of_attention | of_others
    sums_s = {phase.phase: sum(phase.recomputed_s) for phase in profile.phases}
    recomputed_s = {phase: sum_s for phase, sum_s in sums_s.items() if sum_s}
    by_module_s = sum(
        module.total_s
        for module in profile.modules
        if module.phase is LaunchPhase.BACKWARD and module.path[:1] == ("forward",)
    )
    assert recomputed_s == {LaunchPhase.BACKWARD: pytest.approx(by_module_s)}


SMALL = (
    "--d-model",
    "32",
    "--d-ff",
    "48",
    "--vocab-size",
    "50",
    "--warmup-steps",
    "2",
    "--measured-steps",
    "2",
    "--device",
    "cpu",
    "--profile",
)


@pytest.mark.usefixtures("no_pictures")
def test_a_profiled_sweep_publishes_the_times_of_the_plain_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.sweep([*SMALL, "--context-lengths", "16", "32", "--name", "p"]) == 0
    folder = tmp_path / "data" / "kineto_profiles" / "p"
    records, _ = load_records(folder / "runs")
    assert Counter(record.config.profiler for record in records) == {
        Profiler.NONE: 2,
        Profiler.KINETO: 2,
    }
    published = (folder / "results.csv").read_text().splitlines()
    assert len(published) == 1 + 2
    plain = {
        r.config.model.context_length: r for r in records if r.config.profiler is Profiler.NONE
    }
    header = published[0].split(",")
    for line in published[1:]:
        row = dict(zip(header, line.split(","), strict=True))
        step = plain[int(row["context_length"])].measurement(Phase.STEP)
        assert float(row["step_mean_ms"]) == pytest.approx(step.mean_s * 1e3, rel=1e-6)
    assert (
        len([decode_profile(path.read_bytes()) for path in (folder / "kernels").glob("*.json")])
        == 2
    )
