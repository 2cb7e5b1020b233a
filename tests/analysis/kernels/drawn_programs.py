"""Programs as they are drawn: training loops, inference, servers and pipelines.

`simulate` runs one. `recorded` cuts what happened at edges and drops events, as a profiler does
that starts late or loses some.
"""

import math
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from tests.analysis.kernels.drawn_machine import Doing, Job, Run, Span
from tests.analysis.kernels.drawn_plans import (
    AUTOGRAD,
    COMMUNICATION,
    COMPUTE,
    COPIES,
    LOADER,
    LOADING,
    MICROSECOND,
    MILLISECOND,
    SIDE,
    STYLES,
    Part,
    Pause,
    Plan,
)

MATMULS = ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "ampere_bf16_s16816gemm_bf16_128x128_tn")
NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>"
GELU = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>"
FLASH = "void flash::flash_{}_kernel<Flash_{}_kernel_traits<64, 128, 128, 4>>"
FUSED = "triton_{}_fused_add_native_layer_norm_{}"
ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel"
    "<at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>>"
)
FOREACH = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel"
    "<at::native::(anonymous namespace)::{}<float>>"
)
PLAIN = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>"
PINNED, COPY = "Memcpy HtoD (Pinned -> Device)", "cudaMemcpyAsync"
UPLOAD, DOWNLOAD = "Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pageable)"


def _forward(run: Run) -> None:
    plan = run.plan
    with ExitStack() as stack:
        if plan.compiled:
            stack.enter_context(run.span("operator", "Torch-Compiled Region: 0/0"))
        run.launch(PLAIN, operator="aten::embedding")
        if plan.ranks > 1 and plan.is_sharded and run.phase == Part.FORWARD:
            run.collective("all-gather", run.random.randrange(4, 12) * 1_000_000)
        for layer in range(plan.layers):
            run.move_to(layer * plan.devices // plan.layers)
            with run.module(f"Block_{layer}"):
                _layer(run, layer)
        run.move_to(0)


def _layer(run: Run, layer: int) -> None:
    compiled = run.plan.compiled
    norm = FUSED.format("per", layer) if compiled else NORM
    with run.module(f"LayerNorm_{layer}"):
        run.launch(norm, operator="" if compiled else "aten::native_layer_norm")
    with run.module(f"Linear_{layer}"):
        made = run.sequence()
        run.launch(MATMULS[0], operator="aten::addmm", **made)
        if run.phase == Part.FORWARD:
            run.nodes[layer:] = [int(str(made["Sequence number"]))]
    with run.module(f"Attention_{layer}"):
        run.launch(FLASH.format("fwd", "fwd"), operator="aten::_flash_attention_forward")
    run.launch(FUSED.format("poi", layer) if compiled else GELU)


def _loss(run: Run) -> None:
    run.launch("void cunn_SoftMaxForward<4, float, float, float>", operator="aten::_log_softmax")
    run.launch("void at::native::nll_loss_forward_reduce_cuda_kernel_2d<float>")


NODE = "autograd::engine::evaluate_function: {}Backward0"


def _backward(run: Run) -> None:
    plan = run.plan
    with run.on_thread(AUTOGRAD):
        with run.span("operator", NODE.format("NllLoss"), Part.BACKWARD):
            run.launch("void at::native::nll_loss_backward_reduce_cuda_kernel_2d<float>")
        for layer in reversed(range(plan.layers)):
            run.move_to(layer * plan.devices // plan.layers)
            name = "CompiledFunction" if plan.compiled else "Addmm"
            number = run.nodes[layer] if layer < len(run.nodes) else -1
            of_forward = {"Sequence number": number, "Fwd thread id": 1}
            node = run.span("operator", NODE.format(name), Part.BACKWARD, **of_forward)
            with node, run.module(f"Block_{layer}", is_called=plan.checkpoints):
                if plan.checkpoints:
                    _layer(run, layer)
                run.launch(FLASH.format("bwd", "bwd"))
                run.launch(MATMULS[1], operator="aten::mm")
                run.launch(MATMULS[1], operator="aten::mm")
            if plan.ranks > 1 and run.micro == plan.micro_batches - 1:
                name = "reduce-scatter" if plan.is_sharded else "all-reduce"
                run.collective(name, run.random.randrange(4, 12) * 2_000_000)
        run.move_to(0)


def _optimizer(run: Run) -> None:
    plan = run.plan
    for device in range(plan.devices):
        run.device = device
        if plan.ranks > 1:
            run.join(COMPUTE, COMMUNICATION)
        for _ in range(3):
            run.launch(PLAIN if plan.optimizer == "plain" else ADAM, operator="aten::_fused_adamw_")
    run.device = 0


def _own_range(run: Run, method: str) -> ExitStack:
    """PyTorch's own range around a method of its optimizers, which only its profiler records."""
    stack = ExitStack()
    if run.plan.optimizer == "torch" and not run.plan.is_nsys:
        means = {"step": Part.OPTIMIZER}.get(method, Part.ZERO_GRAD)
        stack.enter_context(run.span("range", f"Optimizer.{method}#AdamW.{method}", means))
    return stack


def _zero_grad(run: Run) -> None:
    with run.in_phase(Part.ZERO_GRAD), _own_range(run, "zero_grad"):
        if run.plan.seed % 3 == 0:
            run.launch(FILL, 3 * MICROSECOND, operator="aten::zero_")


def _batch(run: Run) -> None:
    """Wait for the loader, then copy the batch."""
    plan, phase = run.plan, run.phase
    run.phase = Part.DATA
    waits = 12 * MILLISECOND if plan.limit == "data" else 20 * MICROSECOND
    with ExitStack() as stack:
        if plan.loader:
            stack.enter_context(run.region(Part.DATA))
        if plan.loader == "get_batch":
            stack.enter_context(run.span("range", plan.loader, Pause.RANGE))
        elif plan.loader and not plan.is_nsys:
            stack.enter_context(run.span("range", LOADER.format(plan.loader), Part.DATA))
        run.spend(waits, Pause.DATA)
    if plan.prefetches:
        with run.beside(LOADING):
            run.launch(PINNED, 15 * MICROSECOND, stream=COPIES, kind="copy", call=COPY)
            run.launch(FILL, stream=COPIES, operator="aten::div_")
        run.join(COMPUTE, COPIES)
        run.phase = phase
        return
    copies = 8 * MILLISECOND if plan.limit == "copies" else 15 * MICROSECOND
    run.copy(UPLOAD if run.random.random() < 0.5 else PINNED, copies)
    run.phase = phase


def _hidden(run: Run) -> None:
    """Something that keeps the host from launching, for milliseconds."""
    what, duration = run.plan.hides, 4 * MILLISECOND
    if what == Pause.RANGE:
        with run.span("range", "tokenize and log", Pause.RANGE):
            run.spend(duration, what)
    elif what == Pause.COLLECTOR:
        with run.span("frame", "Python GC", Pause.COLLECTOR):
            run.spend(duration, what)
    elif what == Pause.COMPILING:
        with run.span("operator", "CachingAutotuner.benchmark_all_configs", Pause.COMPILING):
            run.spend(duration, what)
    elif what == Pause.ALLOCATION:
        for machine in run.machines:
            machine.doing.append(Doing(machine.now, machine.now + duration, what, run.phase))
            machine.call("cudaMalloc", duration)
    elif what == Pause.NOTHING_SEEN:
        run.spend(duration, what)


def _micro_batch(run: Run) -> None:
    graph = run.plan.graph == "parts"
    with run.in_phase(Part.FORWARD):
        with run.captured(graph):
            _forward(run)
        if run.plan.reads_in_forward:
            run.copy(DOWNLOAD, 2 * MICROSECOND)
        if run.plan.side_stream:
            run.join(SIDE, COMPUTE)
            run.launch(GELU, stream=SIDE)
            run.join(COMPUTE, SIDE)
        if STYLES[run.plan.style].get(Part.LOSS) is None:
            _loss(run)
    if STYLES[run.plan.style].get(Part.LOSS) is not None:
        with run.in_phase(Part.LOSS):
            _loss(run)
    with run.in_phase(Part.BACKWARD):
        _backward(run)


def _clip(run: Run) -> None:
    if run.plan.clips:
        run.phase = Part.CLIP
        run.launch(FOREACH.format("LpNormFunctor"), operator="aten::_foreach_norm")
        run.launch(FOREACH.format("BinaryOpListAlphaFunctor"), operator="aten::_foreach_mul_")
        run.phase = ""


def _update(run: Run) -> None:
    if run.plan.optimizer:
        with run.in_phase(Part.OPTIMIZER), _own_range(run, "step"):
            _optimizer(run)


def _closed_step(run: Run) -> None:
    """Lightning's step: forward and backward run inside of the call of the optimizer."""
    with run.region(Part.CLOSURE), _own_range(run, "step"):
        with run.in_phase(Part.FORWARD):
            _forward(run)
            _loss(run)
        _zero_grad(run)
        with run.in_phase(Part.BACKWARD):
            _backward(run)
        _clip(run)
        run.phase = Part.OPTIMIZER
        _optimizer(run)
        run.phase = ""


def _finish(run: Run) -> None:
    _hidden(run)
    _clip(run)
    _update(run)
    if run.plan.zero_grad == "last":
        _zero_grad(run)


def _training_step(run: Run) -> None:
    """One step of the optimizer: its micro-batches, then the update."""
    plan, is_outside = run.plan, run.plan.style in ("lightning", "iteration")
    if is_outside:
        _batch(run)
    with ExitStack() as stack:
        if not plan.steps_of_micro:
            stack.enter_context(run.region(Part.STEP, n=run.step))
        for micro in range(plan.micro_batches):
            run.micro = micro
            with ExitStack() as inner:
                if plan.steps_of_micro:
                    number = run.step * plan.micro_batches + micro
                    inner.enter_context(run.region(Part.STEP, n=number))
                if not is_outside or micro:
                    _batch(run)
                inner.enter_context(run.captured(plan.graph == "step"))
                _compute(run)
        if plan.reads_loss:
            run.copy(DOWNLOAD, 2 * MICROSECOND)


def _compute(run: Run) -> None:
    """What a step does with a micro-batch; with the last one, it updates the parameters too."""
    if run.plan.style == "lightning":
        _closed_step(run)
        return
    if run.plan.zero_grad == "first" and run.micro == 0:
        _zero_grad(run)
    _micro_batch(run)
    if run.micro == run.plan.micro_batches - 1:
        _finish(run)


def _training(run: Run) -> None:
    plan = run.plan
    for step in range(plan.steps):
        run.step = step
        _training_step(run)
        run.kinds.append("")
        run.step = -1
        if plan.decoy:
            with run.span("range", plan.decoy):
                run.launch(PLAIN, operator="aten::add_")
        if plan.evaluates and step == plan.steps // 2:
            run.phase = Part.EVALUATION
            for _ in range(2):
                _forward(run)
            run.copy(DOWNLOAD, 2 * MICROSECOND)
            run.phase = ""
    run.wait()


def _inference(run: Run) -> None:
    for step in range(run.plan.steps):
        run.step = step
        with run.region(Part.STEP, n=run.step):
            _batch(run)
            with run.in_phase(Part.FORWARD), run.captured(run.plan.graph != ""):
                _forward(run)
            _hidden(run)
            if run.plan.reads_loss:
                run.copy(DOWNLOAD, 2 * MICROSECOND)
        run.kinds.append("")
    run.step = -1
    run.wait()


def _server(run: Run) -> None:
    """Prefill by launches, decode by a graph; the host prepares a step while another one runs."""
    run.phase = Part.FORWARD
    usual = run.kernel_ns
    for step in range(run.plan.steps * 3):
        run.step = step
        is_prefill = run.random.random() < 0.3
        batch = run.random.choice((1, 4, 8)) if is_prefill else run.random.choice((16, 32))
        tokens = batch * 1024 if is_prefill else batch
        kind = Part.PREFILL if is_prefill else Part.DECODE
        run.kernel_ns = usual * 4 if is_prefill else usual
        decoding = run.random.choice((2, 8)) if is_prefill and run.plan.is_mixed else 0
        with run.region(kind, batch=batch, tokens=tokens, decoding=decoding):
            run.spend(30 * MICROSECOND, Pause.PREPARING)
            with run.captured(not is_prefill and run.plan.graph != ""):
                _forward(run)
        run.kinds.append(f"{kind} {batch} {tokens}")
        if run.plan.limit in ("host", "data"):
            run.wait("cudaEventSynchronize")
            run.spend(3 * MILLISECOND, Pause.PREPARING)
    run.step = -1
    run.wait()


def _pipeline(run: Run) -> None:
    """Chunks of forward and backward side by side, with gradients of weights apart."""
    for step in range(run.plan.steps):
        run.step = step
        for part in ("attention", "mlp", "mlp", "attention"):
            for letter, phase in (("F", Part.FORWARD), ("B", Part.BACKWARD), ("W", Part.WEIGHTS)):
                run.phase = phase
                with run.region(part, **{"pass": letter}):
                    for _ in range(2):
                        run.launch(MATMULS[letter != "F"], operator="aten::mm")
                    name = "void deep_ep::internode::{}<true, 8, 9>"
                    word = "dispatch" if part == "attention" else "combine"
                    run.launch(name.format(word), stream=COMMUNICATION)
        run.kinds.append("")
    run.phase, run.step = "", -1
    run.wait()


PROGRAMS = {
    "training": _training,
    "inference": _inference,
    "server": _server,
    "pipeline": _pipeline,
}


def simulate(plan: Plan, make: Callable[[Plan], Run] = Run) -> Run:
    """Run the whole program on the machine that is made for it."""
    run = make(plan)
    with ExitStack() as stack:
        if plan.around:
            stack.enter_context(run.span("range", plan.around))
        PROGRAMS[plan.kind](run)
    return run


@dataclass(frozen=True)
class Recorded:
    """What the file of one rank holds."""

    plan: Plan
    rank: int
    spans: list[Span]
    jobs: list[Job]
    doing: list[Doing]
    """What the host did besides launching, the whole truth."""
    kinds: list[str]
    lost: list[Job]
    """Kernels and copies of the program that are not in the file."""

    def __post_init__(self) -> None:
        self.jobs.sort(key=lambda job: (job.start_ns, job.device, job.stream))


def recorded(run: Run, rank: int = 0) -> Recorded:
    """What the profiler keeps of the rank: events that lie within the cut, but for lost ones."""
    plan, machine = run.plan, run.machines[rank]
    random_ = random.Random(plan.seed)
    low, high = (math.ceil(part * machine.now) for part in plan.cut)

    def is_kept(kind: str, start_ns: int, end_ns: int) -> bool:
        lost = {"launches": "call", "operators": "operator", "ranges": "range", "kernels": "kernel"}
        is_lost = kind == lost.get(plan.dropped) and random_.random() < 0.1
        return low <= start_ns and end_ns <= high and not is_lost

    spans = [span for span in machine.spans if is_kept(span.kind, span.start_ns, span.end_ns)]
    jobs, lost = [], []
    for job in machine.jobs:
        start, end = job.start_ns + plan.shift_ns, job.end_ns + plan.shift_ns
        kept = jobs if is_kept(job.kind, job.start_ns, job.end_ns) else lost
        kept.append(replace(job, start_ns=start, end_ns=end))
    return Recorded(plan, rank, spans, jobs, machine.doing, run.kinds, lost)
