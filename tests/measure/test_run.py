"""A record holds what was measured, says what puts it in doubt, and is made whatever a run dies
of.
"""

import datetime
import gc
import itertools
import os
import signal
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
import pynvml
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import clear_compilation_metrics
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cs336 import waits
from cs336.analysis.warnings import judged
from cs336.config import CompileMode, Device, Mode, ModelConfig, Phase, Precision, RunConfig
from cs336.measure import run as measurement
from cs336.measure.clock import HostClock, StepTimes
from cs336.measure.failure import classify, requested_bytes
from cs336.measure.nvml import Gpu
from cs336.measure.progress import Progress
from cs336.measure.run import MAX_EXTRA_WARMUP_STEPS, measure
from cs336.model.batches import FileBatches
from cs336.record import RunRecord, Status, WarningCode, encode_record, read_record, write_record
from tests.conftest import HostTime
from tests.own_models import PrefersTf32

MODEL = ModelConfig(vocab_size=11, context_length=8, d_model=8, d_ff=12, num_layers=2, num_heads=2)
CONFIG = RunConfig(size="custom", model=MODEL, batch_size=3, warmup_steps=2, measured_steps=3)


ROOT = Path(__file__).parents[2]


class Table(nn.Module):
    """The smallest model, which does `act` in every forward pass, told the number of the step."""

    def __init__(self, act: Callable[[int], object] = lambda step: None) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11)
        self.act = act
        self.step = -1

    def forward(self, tokens: Tensor) -> Tensor:
        self.step += 1
        made = self.act(self.step)
        logits = self.table(tokens)
        return logits * made if isinstance(made, float) else logits


def codes(record: RunRecord) -> set[WarningCode]:
    """Warnings, less those on the times, which a busy machine may call forth."""
    assert record.status is Status.OK, record.failure
    noise = {WarningCode.UNSTABLE, WarningCode.OUTLIERS, WarningCode.DRIFT}
    return {warning.code for warning in record.warnings} - noise


def message(record: RunRecord, code: WarningCode) -> str:
    return next(warning.message for warning in record.warnings if warning.code is code)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.FP16])
def test_a_record_holds_every_step_of_every_phase(
    mode: Mode, precision: Precision, tmp_path: Path
) -> None:
    config = replace(CONFIG, mode=mode, precision=precision)
    before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    start = perf_counter()
    record = measure(config)
    elapsed = perf_counter() - start
    assert record.status is Status.OK
    assert record.failure is None
    assert record.config == config
    assert (
        before
        <= datetime.datetime.fromisoformat(record.started_at)
        <= datetime.datetime.now(datetime.UTC)
    )
    assert [m.phase for m in record.measurements] == [*config.phases, Phase.STEP]
    assert all(len(m.times_s) == 3 for m in record.measurements)
    for i, step_s in enumerate(record.measurement(Phase.STEP).times_s):
        phases_s = [record.measurement(phase).times_s[i] for phase in config.phases]
        assert all(time_s > 0 for time_s in phases_s)
        assert sum(phases_s) <= record.host_times_s[i] + 1e-9 <= step_s + 2e-9
    assert record.host_phases == (), "a CPU launches as long as it runs"
    assert len(record.warmup_times_s) == 2
    assert len(record.losses) == 5
    assert record.skipped_steps == 0
    assert record.memory is None, "there is no allocator to ask on a CPU"
    assert record.telemetry is None
    durations = record.durations
    assert durations.warmup_s == pytest.approx(sum(record.warmup_times_s))
    assert durations.measured_s == pytest.approx(sum(record.measurement(Phase.STEP).times_s))
    assert (
        durations.setup_s + durations.warmup_s + durations.measured_s < durations.total_s < elapsed
    )
    assert torch.__version__.startswith(record.environment.identity.torch)
    assert read_record(write_record(record, tmp_path)) == record


@pytest.mark.parametrize(("within", "most", "num_steps"), [(1e9, 200, 10), (0, 13, 13)])
def test_steps_are_added_until_their_mean_is_known(
    within: float, most: int, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten are the fewest whose correlation is known; the record says how many there were."""
    monkeypatch.setattr(measurement, "STABLE", within)
    monkeypatch.setattr(measurement, "MAX_STABLE_STEPS", most)
    said: list[str] = []
    waits.tell(said.append)
    record = measure(CONFIG, until_stable=True)
    waits.tell(lambda _: None)
    told = [int(line.split()[0]) for line in said if " steps, ± " in line]
    assert told == [*range(10, num_steps + 1)]
    assert len(record.measurement(Phase.STEP).times_s) == record.config.measured_steps == num_steps


def test_a_loss_that_is_not_finite_is_a_warning_and_no_number(tmp_path: Path) -> None:
    record = measure(CONFIG, Table(lambda step: float("nan") if step == 3 else 1.0))
    assert [loss is None for loss in record.losses] == [False, False, False, True, True], (
        "NaN gradients spread"
    )
    assert codes(record) == {WarningCode.NOT_FINITE}
    assert message(record, WarningCode.NOT_FINITE) == "the loss was not finite in 2 step(s)"
    assert read_record(write_record(record, tmp_path)).losses == record.losses


@pytest.mark.parametrize(
    ("mode", "warmup_steps", "warned"),
    [
        (Mode.TRAIN, 0, True),
        (Mode.TRAIN, 1, True),
        (Mode.TRAIN, 2, False),
        (Mode.FORWARD_BACKWARD, 0, True),
        (Mode.FORWARD_BACKWARD, 1, False),
        (Mode.INFERENCE, 0, True),
        (Mode.INFERENCE, 1, False),
    ],
)
def test_training_needs_two_warm_up_steps_and_all_else_one(
    mode: Mode, warmup_steps: int, warned: bool
) -> None:
    record = measure(replace(CONFIG, mode=mode, warmup_steps=warmup_steps), Table())
    assert codes(record) == ({WarningCode.FEW_WARMUP_STEPS} if warned else set())
    assert len(record.warmup_times_s) == warmup_steps
    assert len(record.measurement(Phase.STEP).times_s) == 3


# The garbage collector


def test_the_collector_is_off_while_timing_and_on_afterwards() -> None:
    seen: list[bool] = []
    record = measure(CONFIG, Table(lambda step: seen.append(gc.isenabled())))
    assert seen == [False] * 5
    assert record.collector_on is False, "and the record says so"
    assert gc.isenabled()
    assert measure(CONFIG, Table(lambda step: 1 / 0)).status is Status.CRASHED
    assert gc.isenabled()


def test_garbage_is_collected_before_the_measured_steps() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    references: list[weakref.ref[Cycle]] = []
    alive: list[bool] = []

    def act(step: int) -> None:
        if step == 0:
            references.append(weakref.ref(Cycle()))
        alive.append(references[0]() is not None)

    measure(replace(CONFIG, warmup_steps=3), Table(act))
    assert alive[:2] == [True, True], "nothing collects it earlier"
    assert not any(alive[3:])


# Loss scaling


def with_infinite_gradients(steps: Callable[[int], bool]) -> Table:
    model = Table()
    model.table.weight.register_hook(
        lambda gradient: gradient * torch.inf if steps(model.step) else gradient
    )
    return model


def test_a_skipped_step_is_counted_and_not_timed() -> None:
    model = with_infinite_gradients(lambda step: step in (3, 4))
    weights: list[Tensor] = []
    model.act = lambda step: weights.append(model.table.weight.detach().clone())
    record = measure(replace(CONFIG, precision=Precision.FP16), model)
    assert record.skipped_steps == 2
    assert codes(record) == {WarningCode.SKIPPED_STEPS}
    assert (
        message(record, WarningCode.SKIPPED_STEPS)
        == "GradScaler skipped 2 step(s); they are not timed"
    )
    assert all(len(m.times_s) == 3 for m in record.measurements)
    assert len(record.host_times_s) == 3
    assert len(record.losses) == 2 + 3 + 2
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(weights)]
    assert changed == [True, True, True, False, False, True], "which steps changed the weights"


class ClockOfLaunches(HostClock):
    """Tells that forward and backward end with their launches, and the optimizer 50 ms after
    its.
    """

    def stop(self) -> StepTimes:
        times = super().stop()
        return replace(
            times,
            host_phases_s=times.phases_s
            | {Phase.OPTIMIZER: times.phases_s[Phase.OPTIMIZER] - 0.05},
        )


def test_phases_that_wait_for_launches_are_recorded_and_warned_of(
    monkeypatch: pytest.MonkeyPatch, host_time: HostTime
) -> None:
    monkeypatch.setattr(measurement, "make_clock", lambda config: ClockOfLaunches())
    hook = register_optimizer_step_pre_hook(lambda *_: host_time.sleep(0.06))
    try:
        record = judged(measure(CONFIG, Table(lambda step: host_time.sleep(0.1))))
    finally:
        hook.remove()
    assert [(each.phase, each.median_s) for each in record.host_phases] == [
        (Phase.FORWARD, 0.1),
        (Phase.BACKWARD, 0),
        (Phase.OPTIMIZER, pytest.approx(0.01)),
    ]
    assert "62.5 % of the step (forward" in message(record, WarningCode.LAUNCH_BOUND)
    assert "optimizer)" not in message(record, WarningCode.LAUNCH_BOUND)


@pytest.mark.parametrize(("first", "skipped"), [(0, 2 + 21), (2, 3 + 21)])
def test_a_run_that_skips_every_step_ends(first: int, skipped: int) -> None:
    record = measure(
        replace(CONFIG, precision=Precision.FP16),
        with_infinite_gradients(lambda step: step >= first),
    )
    assert record.status is Status.CRASHED
    assert f"GradScaler skipped {skipped} steps" in record.failure.message


# Compilation


class Specialised(nn.Module):
    """Compiled anew whenever `kind` has another value."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11)
        self.kind, self.last = 0, last

    def forward(self, tokens: Tensor) -> Tensor:
        self.kind = min(self.kind + 1, self.last)
        return self.table(tokens) * self.kind


@pytest.fixture
def compiler_anew():
    """A compiler that has compiled nothing: what earlier tests of this process did would count
    as this one's.
    """
    torch._dynamo.reset()
    clear_compilation_metrics()  # a reset numbers frames anew
    yield
    torch._dynamo.reset()


@pytest.fixture
def compiled_eagerly(monkeypatch: pytest.MonkeyPatch, compiler_anew):
    """torch.compile without its slow last stage: what is compiled, and when, stays the same."""
    compile_model = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, mode: compile_model(model, backend="eager"))


COMPILED = replace(CONFIG, compile=CompileMode.DEFAULT)


@pytest.mark.usefixtures("compiled_eagerly")
def test_the_warm_up_goes_on_while_anything_is_still_compiled() -> None:
    """Compiled in steps 0 to 4: the warm-up of 2 goes on until a step has compiled nothing."""
    record = measure(COMPILED, Specialised(last=4))
    assert len(record.warmup_times_s) == 6
    assert len(record.measurement(Phase.STEP).times_s) == 3
    assert not codes(record)
    assert (record.compilation.graphs, record.compilation.recompiles) == (5, 4)


@pytest.mark.usefixtures("compiled_eagerly")
def test_what_is_compiled_while_timing_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "MAX_EXTRA_WARMUP_STEPS", 1)
    record = measure(COMPILED, Specialised(last=5))
    assert len(record.warmup_times_s) == 3
    assert codes(record) == {WarningCode.RECOMPILED}
    assert message(record, WarningCode.RECOMPILED).startswith(
        "torch.compile made 3 graph(s) while timing"
    )
    assert MAX_EXTRA_WARMUP_STEPS == 20


# Tokens from a file


def test_reading_batches_is_a_phase_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_time: HostTime
) -> None:
    np.save(tmp_path / "x.npy", np.arange(10_000, dtype=np.uint16) % 11)
    config = replace(CONFIG, tokens=str(tmp_path / "x.npy"))
    next_batch = FileBatches.__call__
    monkeypatch.setattr(
        FileBatches, "__call__", lambda self: (host_time.sleep(0.05), next_batch(self))[1]
    )
    record = measure(config, Table(lambda step: host_time.sleep(0.01)))
    times_s = {m.phase: m.times_s for m in record.measurements}
    assert list(times_s) == [Phase.DATA, *CONFIG.phases, Phase.STEP]
    assert times_s[Phase.DATA] == (0.05,) * 3
    assert times_s[Phase.FORWARD] == (0.01,) * 3


# Failures


@pytest.mark.parametrize(
    ("step", "where"),
    [(0, "warm-up step 0"), (1, "warm-up step 1"), (2, "measured step 0"), (4, "measured step 2")],
)
def test_an_exception_of_the_model_is_a_crash_with_its_place(
    step: int, where: str, tmp_path: Path
) -> None:
    def explode(now: int) -> None:
        if now == step:
            raise RuntimeError("boom\nmore")

    record = measure(CONFIG, Table(explode))
    assert record.status is Status.CRASHED
    assert record.failure.message == "RuntimeError: boom"
    assert record.failure.where == f"forward of {where}"
    assert record.failure.requested_bytes is None
    assert "in explode" in record.failure.traceback
    own = Path("tests", "measure", "test_run.py")
    assert f'File "{own}"' in record.failure.traceback, "as it is imported from here"
    assert f'File "torch{os.sep}' in record.failure.traceback, "and this from where libraries lie"
    assert str(Path.home()) not in record.failure.traceback
    assert sys.prefix not in record.failure.traceback
    assert record.measurements == ()
    assert len(record.losses) == step
    assert len(record.warmup_times_s) == min(step, 2)
    assert record.environment is not None
    assert record.num_parameters == 121
    assert read_record(write_record(record, tmp_path)) == record


def test_running_out_of_memory_is_a_result_that_says_how_much_was_asked_for() -> None:
    record = measure(
        CONFIG, Table(lambda step: torch.empty(2**50, dtype=torch.uint8) if step == 3 else None)
    )
    assert record.status is Status.OOM
    assert record.failure.requested_bytes == 2**50
    assert record.failure.where == "forward of measured step 1"
    assert "allocate memory" in record.failure.message
    assert record.measurements == ()


def test_a_model_s_own_code_that_raises_an_interrupt_is_a_crash() -> None:
    """In a worker, which Ctrl-C ends at once by its default, so that no interrupt is the user's."""
    by_python = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        record = measure(replace(CONFIG, model_factory="tests.own_models:interrupted"))
    finally:
        signal.signal(signal.SIGINT, by_python)
    assert record.status is Status.CRASHED
    assert "KeyboardInterrupt" in record.failure.message
    assert record.failure.where == "set-up"
    assert "in interrupted" in record.failure.traceback


CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 1.02 GiB is free."
)


@pytest.mark.parametrize(
    ("error", "status", "asked"),
    [
        (torch.OutOfMemoryError(CUDA_OOM), Status.OOM, 1.5 * 2**30),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
            Status.OOM,
            20 * 2**20,
        ),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), Status.OOM, None),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            Status.OOM,
            None,
        ),
        (RuntimeError("Triton Error [CUDA]: out of memory"), Status.OOM, None),
        (MemoryError(), Status.OOM, None),
        (
            RuntimeError("CUDA error: an illegal memory access was encountered"),
            Status.CUDA_ERROR,
            None,
        ),
        (RuntimeError("CUDA error: device-side assert triggered"), Status.CUDA_ERROR, None),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), Status.CUDA_ERROR, None),
        (torch.AcceleratorError("unspecified launch failure"), Status.CUDA_ERROR, None),
        (
            RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
            Status.CRASHED,
            None,
        ),
        (ValueError("out of memory of what I came for"), Status.CRASHED, None),
    ],
)
def test_what_a_run_died_of_is_read_from_its_exception(
    error: Exception, status: Status, asked: float | None
) -> None:
    assert classify(error) is status
    assert requested_bytes(str(error)) == asked


# A user's own model


def test_a_model_that_sets_a_mode_of_its_own_is_measured_in_the_one_asked_for() -> None:
    record = measure(replace(CONFIG, model_factory="tests.own_models:PrefersTf32"))
    assert not codes(record)
    assert "highest" in PrefersTf32.in_force  # the model is first called to find its vocabulary
    assert record.environment.float32_matmul_precision == "highest"


@pytest.mark.parametrize(
    ("factory", "precision", "found"),
    [
        ("in_float64_by_default", Precision.FP32, "float64"),
        ("leaves_float64_as_default", Precision.FP32, "float64"),
        ("one_parameter_in_bf16", Precision.FP32, "bfloat16"),
        ("logits_in_bf16", Precision.FP32, "bfloat16"),
        ("one_parameter_in_bf16", Precision.BF16, None),
        ("logits_in_bf16", Precision.BF16, None),
    ],
)
def test_a_run_is_of_the_precision_that_it_says(
    factory: str, precision: Precision, found: str | None
) -> None:
    """A factory that made float64 the default had a good row in fp32, at a fraction of its
    speed.
    """
    try:
        record = measure(
            replace(CONFIG, precision=precision, model_factory=f"tests.own_models:{factory}")
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert (record.status is Status.OK) is (found is None), record.failure
    assert found is None or f"precision {precision}" in record.failure.message
    assert found is None or f" {found}" in record.failure.message


# The GPU's own word


GPU = Gpu(index=0, uuid="GPU-1", name="NVIDIA H100", memory_bytes=2**36, driver="580.1")


class Monitor:
    """A GPU on which some others compute and that answers only some questions."""

    others, unsupported = 0, False

    def __init__(self, uuid: str) -> None:
        assert uuid == GPU.uuid

    def processes(self) -> int:
        return self.others

    def state(self) -> None:
        if self.unsupported:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.mark.parametrize(
    ("gpus", "others", "unsupported", "code"),
    [
        ((), 0, False, WarningCode.NO_TELEMETRY),
        ((GPU,), 0, True, WarningCode.NO_TELEMETRY),
        ((GPU,), 2, False, WarningCode.GPU_SHARED),
        ((GPU,), 0, False, None),
    ],
)
def test_a_gpu_that_says_little_is_measured_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[Gpu, ...],
    others: int,
    unsupported: bool,
    code: WarningCode | None,
) -> None:
    monkeypatch.setattr(measurement, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(measurement, "GpuMonitor", Monitor)
    monkeypatch.setattr(Monitor, "others", others)
    monkeypatch.setattr(Monitor, "unsupported", unsupported)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    progress = Progress(subject=replace(CONFIG, device=Device.CUDA), started_at="", started=0.0)
    monitor = measurement._find_gpu(progress)
    assert [warning.code for warning in progress.warnings] == ([code] if code else [])
    assert (monitor is None) == (code is WarningCode.NO_TELEMETRY)
    if others:
        assert "2 other process(es)" in progress.warnings[0].message


@pytest.mark.gpu
def test_what_the_allocator_does_while_timing_is_a_warning() -> None:
    kept: list[Tensor] = []
    model = Table(
        lambda step: kept.append(torch.empty(64 * 2**20, device="cuda")) if step >= 2 else None
    ).cuda()
    record = measure(replace(CONFIG, device=Device.CUDA), model)
    assert WarningCode.ALLOCATOR_GREW in codes(record)
    assert record.memory.segments_allocated == 3
    assert record.memory.peak_allocated_bytes >= 3 * 256 * 2**20
    assert len(encode_record(record)) < 20_000
