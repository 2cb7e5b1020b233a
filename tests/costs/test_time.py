"""Prediction of a step's time: closed forms, a simulation tick by tick, PyTorch's dispatcher,
and a profile.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from cs336.config import (
    SIZES,
    Arch,
    Attention,
    CompileMode,
    Device,
    Mode,
    ModelConfig,
    OptimizerKind,
    Parallel,
    Phase,
    Precision,
    RunConfig,
    SdpaBackend,
)
from cs336.costs import traces
from cs336.costs.accounting import (
    Component,
    component_flops,
    count_parameters,
    parameters_by_component,
)
from cs336.costs.curves import Curves
from cs336.costs.kernels import Matmul
from cs336.costs.memory import is_fast_step
from cs336.costs.time import (
    KernelLaunch,
    StepLimit,
    TimePrediction,
    flops_of,
    limited_by_launches,
    operations,
    replay,
    step_time,
)
from cs336.model.fast.choose import fastest
from cs336.model.transformer import RMSNorm, TransformerLM
from cs336.record import load_records
from cs336.studies.ceilings_files import load_ceilings
from tests.operators import Calls

MODEL = ModelConfig(
    vocab_size=80, context_length=16, d_model=48, d_ff=96, num_layers=2, num_heads=3
)
RUN = RunConfig(size="custom", model=MODEL, batch_size=2, device=Device.CUDA)
FAST = {
    "precision": Precision.BF16,
    "optimizer": OptimizerKind.FUSED,
    "model": replace(MODEL, attention=Attention.SDPA),
    "compile": CompileMode.DEFAULT,
    "compile_blocks": True,
    "cast_once": True,
    "fused_loss": True,
    "fused_blocks": True,
    "bf16_embedding": True,
    "cuda_graph": True,
}
"""What `--fast` chooses on a GPU."""
RATE = 1e12
BANDWIDTH = 1e9


def curves(*, rate: float = RATE, launch_s: float = 0.0, kernel_s: float = 0.0) -> Curves:
    """A device whose matmuls have one rate and whose passes have one bandwidth, at all sizes."""
    sides = (16, 256)
    matmuls = tuple(
        Matmul(rows=side, inner=side, columns=side, time_s=2 * side**3 / rate) for side in sides
    )
    passes = {1: 1 / BANDWIDTH, 2**30: 2**30 / BANDWIDTH}
    return Curves(
        matmuls=dict.fromkeys(Precision, matmuls),
        copies=passes,
        adamw=passes,
        launch_s=launch_s,
        kernel_s=kernel_s,
    )


# the queue


@pytest.mark.parametrize(("factor", "is_known"), [(0.99, False), (1.0, True)])
def test_steps_with_far_larger_matmuls_than_were_measured_have_no_time(
    factor: float, is_known: bool
) -> None:
    """The first matmul of a feed-forward network, 256 times that of the measured one."""
    measured = Matmul(rows=round(factor * 400), inner=48, columns=96, time_s=1.0)
    larger = replace(RUN, batch_size=256 * 400 // 16)  # of sequences of 16
    forecast = step_time(larger, replace(curves(), matmuls={Precision.FP32: (measured,)}))
    assert (forecast is not None) is is_known


@pytest.mark.parametrize(
    ("kernel_us", "last_us", "limit"),
    [
        (5, 5, StepLimit.LAUNCHES),
        (20, 5, StepLimit.DEVICE),
        (5, 900, StepLimit.LAUNCHES),
        (5, 1100, StepLimit.DEVICE),
    ],
)
def test_launches_limit_a_step_that_ends_soon_after_the_last_one(
    kernel_us: int, last_us: int, limit: StepLimit
) -> None:
    """Of 10,000 launches of 10 us each; the last kernel may leave up to 1 ms."""
    launches = [
        KernelLaunch(host_s=1e-5, kernel_s=kernel_us * 1e-6, count=10_000),
        KernelLaunch(host_s=1e-5, kernel_s=last_us * 1e-6),
    ]
    assert replay({Phase.FORWARD: launches}).limit is limit


PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


def named(forecast: TimePrediction) -> dict[Phase, float]:
    on_device, on_host = forecast.phases_s, forecast.host_phases_s
    return limited_by_launches(
        {key: [on_device[key]] for key in on_device}, {key: [on_host[key]] for key in on_host}
    )


@pytest.mark.parametrize(
    "slow", [phases for number in range(4) for phases in combinations(PHASES, number)]
)
def test_the_phases_in_which_the_host_is_slow_are_those_that_launches_limit(
    slow: tuple[Phase, ...],
) -> None:
    """2,000 kernels of 20 us each: elsewhere the host runs ahead, until the queue of 1,024
    launches is full.
    """
    forecast = replay(
        {
            phase: [KernelLaunch(host_s=5e-5 if phase in slow else 5e-6, kernel_s=2e-5, count=2000)]
            for phase in PHASES
        }
    )
    assert tuple(named(forecast)) == slow
    assert forecast.limit is (
        StepLimit.LAUNCHES if len(slow) > 1 or slow == (Phase.FORWARD,) else StepLimit.DEVICE
    )


def test_a_phase_counts_from_when_the_device_has_ended_the_one_before() -> None:
    """The host launches forward in 10 ms and backward in 1,000 times 100 us, the device ends
    forward after 60 ms.
    """
    forward, backward = (
        KernelLaunch(host_s=0.01, kernel_s=0.05),
        KernelLaunch(host_s=1e-4, kernel_s=1e-5, count=1000),
    )
    forecast = replay({Phase.FORWARD: [forward], Phase.BACKWARD: [backward]})
    assert named(forecast) == pytest.approx({Phase.BACKWARD: 0.01 + 1000 * 1e-4 + 1e-5 - 0.06})
    assert forecast.limit is StepLimit.DEVICE


def by_ticks(launches: list[tuple[int, int]], gap: int, depth: int) -> tuple[int, int]:
    """Ends of the last launch and of the last kernel: a host and a device that each do one thing
    a tick.
    """
    tick, launched, ended = 0, 0, 0
    host_left, device_left, idle = launches[0][0], 0, gap
    host_end = 0
    running = False
    while ended < len(launches):
        # what ends at this moment
        if running and device_left == 0:
            running, ended, idle = False, ended + 1, 0
        if launched < len(launches) and host_left == 0 and launched - ended < depth:
            launched += 1
            host_end = tick
            host_left = launches[launched][0] if launched < len(launches) else 0
        if not running and ended < launched and idle >= gap:
            running, device_left = True, launches[ended][1]
        tick += 1
        host_left, device_left, idle = max(0, host_left - 1), device_left - 1, idle + 1
    return host_end, tick - 1


@pytest.mark.parametrize("seed", range(20))
def test_the_queue_is_that_of_a_simulation_by_ticks(seed: int) -> None:
    draw = random.Random(seed)
    launches = [(draw.randint(1, 6), draw.randint(1, 9)) for _ in range(60)]
    gap, depth = draw.randint(0, 3), draw.randint(1, 8)
    made = [KernelLaunch(host_s=host, kernel_s=kernel) for host, kernel in launches]
    forecast = replay({Phase.FORWARD: made[:25], Phase.BACKWARD: made[25:]}, gap, depth)
    assert (sum(forecast.host_phases_s.values()), forecast.step_s) == by_ticks(launches, gap, depth)
    assert sum(forecast.phases_s.values()) == pytest.approx(forecast.step_s)


# the operations


@pytest.mark.parametrize("attention", Attention)
@pytest.mark.parametrize("arch", Arch)
def test_matmuls_of_the_operations_have_the_flops_of_the_closed_form(
    attention: Attention, arch: Arch
) -> None:
    """Fused attention computes its scores again in backward."""
    config = replace(RUN, model=replace(MODEL, arch=arch, attention=attention))
    parts = {part.component: part for part in component_flops(config)}
    again = parts[Component.SCORES].forward if attention is Attention.SDPA else 0
    for phase, wanted in (
        (Phase.FORWARD, sum(part.forward for part in parts.values())),
        (Phase.BACKWARD, sum(part.backward for part in parts.values()) + again),
    ):
        assert sum(map(flops_of, operations(config)[phase])) == wanted, phase


VIEWS = {
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "permute",
    "expand",
    "unsqueeze",
    "slice",
    "split",
    "detach",
    "view_as_complex",
    "view_as_real",
    "_conj",
}


@pytest.fixture
def norms_of_one_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """RMSNorm is one kernel on a GPU and several on a CPU; LayerNorm is one on both. No tape
    with it is kept.
    """

    def forward(self: RMSNorm, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight)

    with monkeypatch.context() as patch:
        patch.setattr(RMSNorm, "forward", forward)
        patch.setattr(traces, "_traced", {})
        patch.setattr(traces, "_cache", lambda: tmp_path)
        yield


def dispatched(config: RunConfig) -> dict[Phase, Counter[str]]:
    """What PyTorch dispatches on a CPU in forward and backward of the model."""
    model = TransformerLM(config.model)
    tokens = torch.zeros(config.batch_size, config.model.context_length, dtype=torch.long)
    is_half = config.precision is Precision.BF16
    with Calls() as forward, torch.autocast("cpu", torch.bfloat16, enabled=is_half):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    with Calls() as backward:
        loss.backward()
    return {Phase.FORWARD: forward.counts, Phase.BACKWARD: backward.counts}


@pytest.mark.usefixtures("norms_of_one_kernel")
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("attention", Attention)
@pytest.mark.parametrize("arch", Arch)
def test_a_block_launches_and_views_what_pytorch_dispatches(
    arch: Arch, attention: Attention, precision: Precision
) -> None:
    """Of one more block: what one model of three has more than one of two."""
    configs = [
        replace(
            RUN,
            precision=precision,
            model=replace(MODEL, arch=arch, attention=attention, num_layers=layers),
        )
        for layers in (2, 3)
    ]
    fewer, more = (dispatched(config) for config in configs)
    ours_fewer, ours_more = (operations(config) for config in configs)
    # on a GPU autocast has the softmax in fp32, with a cast before and one after it, and the same
    # in backward
    is_cast = precision is Precision.BF16 and attention is Attention.NAIVE
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        added = more[phase] - fewer[phase]
        views = sum(added[name] for name in VIEWS)
        kernels = added.total() - views + 2 * is_cast

        ours = {
            name: sum(getattr(operation, name) for operation in ours_more[phase])
            - sum(getattr(operation, name) for operation in ours_fewer[phase])
            for name in ("views", "calls")
        }
        assert ours == {"views": views, "calls": kernels}, phase


@pytest.mark.parametrize(("kind", "tensors"), [(OptimizerKind.ADAMW, 18), (OptimizerKind.FUSED, 7)])
def test_an_update_moves_each_tensor_that_its_kernels_read_and_write(
    kind: OptimizerKind, tensors: int
) -> None:
    """PyTorch's fused update also adds 1 to the count of steps of each parameter, which is on
    the device.
    """
    updates = operations(replace(RUN, optimizer=kind))[Phase.OPTIMIZER]
    counts = (
        2 * 4 * len(list(TransformerLM(MODEL).parameters())) if kind is OptimizerKind.FUSED else 0
    )
    assert (
        sum(operation.launches * operation.moved_bytes for operation in updates)
        == tensors * 4 * count_parameters(MODEL) + counts
    )


# the whole prediction


@pytest.mark.usefixtures("one_rate")
def test_without_memory_traffic_or_launches_a_step_is_its_flops_over_the_rate() -> None:
    slow = curves(rate=1e6)  # so slow that no pass matters
    forecast = step_time(RUN, slow)
    assert forecast is not None
    flops = sum(part.step for part in component_flops(RUN))
    assert forecast.step_s == pytest.approx(flops / 1e6, rel=0.02)
    assert forecast.limit is StepLimit.DEVICE


def test_a_step_of_a_slow_host_takes_a_launch_for_each_call() -> None:
    launch_s = 1.0
    forecast = step_time(RUN, curves(launch_s=launch_s))
    assert forecast is not None
    calls = sum(
        operation.views + operation.calls
        for of_phase in operations(RUN).values()
        for operation in of_phase
    )
    assert forecast.launch_s == pytest.approx(calls * launch_s)
    assert forecast.step_s == pytest.approx(forecast.launch_s, rel=1e-3)
    assert forecast.limit is StepLimit.LAUNCHES


def test_on_a_cpu_a_step_is_the_sum_of_its_launches_and_kernels() -> None:
    """Where each kernel takes as long as its launch, a queue would hide half of them."""
    known = curves(rate=1e9, launch_s=3e-5)
    queued, alone = step_time(RUN, known), step_time(RUN, replace(known, on_host=True))
    assert queued is not None
    assert alone is not None
    assert alone.launch_s == pytest.approx(queued.launch_s)
    assert alone.step_s == pytest.approx(alone.launch_s + sum(alone.kernels_s.values()))
    assert queued.step_s < 0.95 * alone.step_s
    assert alone.limit is StepLimit.DEVICE


@pytest.mark.parametrize("mode", Mode)
def test_a_prediction_has_the_phases_that_a_run_times(mode: Mode) -> None:
    config = replace(RUN, mode=mode)
    forecast = step_time(config, curves())
    assert forecast is not None
    assert tuple(forecast.phases_s) == config.phases


@pytest.mark.parametrize(
    "change",
    [
        {"precision": Precision.FP16},
        {"compile": CompileMode.DEFAULT},
        {"model": replace(MODEL, attention=Attention.SDPA, sdpa_backend=SdpaBackend.MATH)},
        {"model_factory": "own:model"},
        {"optimizer": OptimizerKind.OWN, "own_optimizer": "own:AdamW"},
        {"parallel": Parallel.OWN, "own_ddp": "own:DDP", "ranks": 2},
        {**FAST, "update_in_backward": True},
    ],
)
def test_what_is_not_predicted_is_none(change: dict[str, Any]) -> None:
    assert step_time(replace(RUN, **change), curves()) is None


# CUDA graphs


def test_a_step_of_graphs_is_that_of_its_kernels_and_a_launch_for_each_phase() -> None:
    """A launch of a phase's graph waits for the launches before it alone; a slow host hides all
    phases but the last.
    """
    eager = replace(RUN, optimizer=OptimizerKind.FUSED)
    for launch_s in (1e-6, 1.0):
        known = curves(rate=1e9, launch_s=launch_s, kernel_s=1e-3)
        forecast, graph = (
            step_time(config, known) for config in (eager, replace(eager, cuda_graph=True))
        )
        assert forecast is not None
        assert graph is not None
        assert graph.kernels_s == forecast.kernels_s
        slow_host_s = 3 * launch_s + graph.kernels_s[Phase.OPTIMIZER]
        slow_device_s = launch_s + sum(graph.kernels_s.values())
        assert graph.step_s == pytest.approx(max(slow_host_s, slow_device_s))


DATA = Path(__file__).parents[2] / "data" / "published"
PROFILES = DATA / "kineto_profiles/train_fast"
KERNELS_OF_BACKWARD = 3
"""Of cuDNN's attention, where other backends have one or two: a kernel before, and one after it."""


def fast(model: ModelConfig = MODEL, **fields: Any) -> RunConfig:
    return fastest(
        RunConfig(size="custom", model=model, batch_size=2, device=Device.CUDA, **fields),
        "NVIDIA H200",
    )


@pytest.mark.parametrize("size", ["small", "xl"])
def test_each_phase_launches_what_a_profile_of_it_has(size: str) -> None:
    record = next(
        record
        for record in load_records(PROFILES / "runs")[0]
        if record.config.size == size and record.config.precision is Precision.BF16
    )
    (path,) = (PROFILES / "kernels").glob(f"{size}_*")
    profile = json.loads(path.read_text())
    counted: Counter[str] = Counter()
    for kernel in profile["kernels"]:
        if kernel["phase"] is not None:
            counted[kernel["phase"]] += kernel["count"] / profile["num_steps"]
    by_phase = operations(record.config)
    assert is_fast_step(record.config)
    more = {Phase.BACKWARD: (KERNELS_OF_BACKWARD - 1) * SIZES[size].num_layers}
    assert {
        phase: len(launched) + more.get(phase, 0) for phase, launched in by_phase.items()
    } == counted


@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("mode", [Mode.INFERENCE, Mode.TRAIN])
def test_matmuls_have_the_flops_of_the_closed_form(arch: Arch, mode: Mode) -> None:
    config = fast(replace(MODEL, arch=arch), mode=mode)
    assert config.pad_vocabulary == 1, "else there are more FLOPs"
    flops = Counter[Phase]()
    for phase, launched in operations(config).items():
        flops[phase] = sum(map(flops_of, launched))
    parts = component_flops(config)
    scores = next(part.forward for part in parts if part.component is Component.SCORES)
    assert flops[Phase.FORWARD] == sum(part.forward for part in parts)
    # fused attention computes its scores again
    assert flops[Phase.BACKWARD] == sum(part.backward for part in parts) + (
        scores if flops[Phase.BACKWARD] else 0
    )


@pytest.mark.parametrize("arch", Arch)
def test_the_optimizer_moves_26_or_28_bytes_a_parameter(arch: Arch) -> None:
    """Master and both moments are read and written, and a gradient is read. The gradient has 16
    bits, and a copy of 16 is written, unless the model reads the parameter in fp32: norms and
    learned positions. Of a split master the copy is read and written, and the remainder.
    """
    model = replace(MODEL, arch=arch)
    parts = parameters_by_component(model)
    wide = parts[Component.NORMS] + (parts[Component.EMBEDDING] if arch is Arch.GPT2 else 0)
    copied = count_parameters(model) - wide
    for is_split, bytes_of_copied in ((True, 26), (False, 28)):
        config = replace(fast(model), split_masters=is_split)
        # the count of steps
        moved = sum(operation.moved_bytes for operation in operations(config)[Phase.OPTIMIZER]) - 8
        assert moved == bytes_of_copied * copied + 28 * wide


@pytest.mark.parametrize("arch", Arch)
def test_fused_activations_save_two_passes_a_block(arch: Arch) -> None:
    """Of a hidden activation h: SwiGLU reads 2 h and writes h, backward reads 3 h and writes 2
    h; GELU 2 h and 3 h.
    """
    plain = fast(replace(MODEL, arch=arch))
    fused = replace(plain, fused_activations=True)
    hidden = 2 * plain.batch_size * MODEL.context_length * MODEL.d_ff
    of_phase = (2, 3) if arch is Arch.GPT2 else (3, 5)
    for phase, passes in zip((Phase.FORWARD, Phase.BACKWARD), of_phase, strict=True):
        before, after = operations(plain)[phase], operations(fused)[phase]
        assert len(before) - len(after) == MODEL.num_layers
        saved = sum(operation.moved_bytes for operation in before) - sum(
            operation.moved_bytes for operation in after
        )
        assert saved == pytest.approx(MODEL.num_layers * passes * hidden, rel=0.05)  # and the bias


def test_a_padded_vocabulary_is_computed() -> None:
    config = fast(replace(MODEL, vocab_size=81))
    assert config.pad_vocabulary == 128
    (head,) = [
        operation for operation in operations(config)[Phase.FORWARD] if operation.sides[2] == 128
    ]
    assert head.sides == (32, 48, 128)


def matmul_flops(config: RunConfig) -> dict[Phase, int]:
    return {phase: sum(map(flops_of, launched)) for phase, launched in operations(config).items()}


def test_checkpoints_compute_blocks_again_but_for_their_last_matmul() -> None:
    """Backward does not need the result of that one."""
    tokens = fast().batch_size * MODEL.context_length
    plain, again = matmul_flops(fast()), matmul_flops(replace(fast(), checkpoint_blocks=1))
    head = 2 * tokens * MODEL.d_model * MODEL.vocab_size
    last = 2 * tokens * MODEL.d_ff * MODEL.d_model * MODEL.num_layers
    assert again[Phase.FORWARD] == plain[Phase.FORWARD]
    more = again[Phase.BACKWARD] - plain[Phase.BACKWARD]
    assert more == plain[Phase.FORWARD] - head - last


@pytest.mark.parametrize("chunks", [2, 4])
def test_a_loss_in_parts_multiplies_as_much(chunks: int) -> None:
    whole, parts = matmul_flops(fast()), matmul_flops(replace(fast(), loss_chunks=chunks))
    assert sum(parts.values()) == sum(whole.values())


@pytest.mark.parametrize(
    "change",
    [{"fused_blocks": False, "bf16_embedding": False, "bf16_stream": False}, {"fused_loss": False}],
    ids=str,
)
def test_a_part_of_it_is_not_predicted(change: dict[str, Any]) -> None:
    curves = load_ceilings(DATA / "ceilings").curves("NVIDIA H200")
    assert curves is not None
    assert step_time(fast(), curves) is not None
    assert step_time(replace(fast(), **change), curves) is None
