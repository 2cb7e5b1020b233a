"""Draws programs, simulates them to the nanosecond, and knows what is true of them.

A `Plan` says what the program does, how it names its ranges and what its file lacks. `simulate`
runs it: host threads launch work, streams run it in order, ranks meet in collectives. `recorded`
cuts the result at edges and drops events, as a profiler does that starts late or loses some.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

MAIN, AUTOGRAD = 1, 2
COMPUTE, COMMUNICATION, COPIES, SIDE = 7, 20, 13, 17
MICROSECOND, MILLISECOND = 1_000, 1_000_000

FORWARD, LOSS, BACKWARD, WEIGHTS = "forward", "loss", "backward", "weight gradients"
OPTIMIZER, ZERO_GRAD, CLIP, EVALUATION = "optimizer", "zero_grad", "clip", "evaluation"
DATA, STEP, MICRO, PREFILL, DECODE = "data", "step", "micro", "prefill", "decode"
PAUSE, COLLECTOR, ALLOCATION, COMPILING, WAITING = "pause", "gc", "malloc", "compile", "wait"
CLOSURE = "closure"
"""What a region of a program is, whether a range of the file names it or not."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a drawn program does, how its ranges are named, and what its file lacks."""

    seed: int
    kind: str
    """`training`, `inference`, `server` or `pipeline`."""
    style: str
    """Whose names the ranges have: a key of STYLES."""
    limit: str
    """What takes longest: `gpu`, `host`, `data`, `copies` or `ranks`."""
    is_nsys: bool = False
    steps: int = 4
    micro_batches: int = 1
    layers: int = 2
    loader: str = ""
    """Name of the loader's own range; empty for a loop without."""
    zero_grad: str = ""
    """`first`, `last` or nowhere."""
    optimizer: str = "torch"
    """`torch` has its range, `kernels` only names of kernels, `plain` neither, or none."""
    steps_of_micro: bool = False
    """The profiler's step is called after each micro-batch."""
    clips: bool = False
    evaluates: bool = False
    checkpoints: bool = False
    compiled: bool = False
    graph: str = ""
    """What is launched as CUDA graphs: `step`, `parts` or nothing."""
    side_stream: bool = False
    reads_loss: bool = True
    ranks: int = 1
    slow_rank: int = 0
    devices: int = 1
    modules: bool = False
    hides: str = ""
    """An idle time of the host in each step: `pause`, `range`, `gc`, `malloc`, `compile`."""
    cut: tuple[float, float] = (0.0, 1.0)
    """The part of the run, by time, that the profiler records."""
    dropped: str = ""
    """What is lost of the file at random: `launches`, `operators`, `ranges`, `kernels`."""
    shift_ns: int = 0
    """How far the device's clock is off."""


LOADER = "enumerate(DataLoader)#{}DataLoaderIter.__next__"
_TORCH = {STEP: "ProfilerStep#{n}"}
_PL = "[pl][profile]"
STYLES: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "torch": _TORCH,
    "ours": {
        STEP: "step",
        DATA: "data",
        FORWARD: "forward",
        LOSS: "loss",
        BACKWARD: "backward",
        OPTIMIZER: "optimizer",
    },
    "phases": {FORWARD: "forward", BACKWARD: "backward", OPTIMIZER: "optimizer"},
    "hashes": _TORCH
    | {FORWARD: "## forward ##", BACKWARD: "## backward ##", OPTIMIZER: "## optimizer ##"},
    "lightning": {
        STEP: f"{_PL}run_training_batch",
        DATA: f"{_PL}[_TrainingEpochLoop].train_dataloader_next",
        FORWARD: f"{_PL}[Strategy]SingleDeviceStrategy.training_step",
        BACKWARD: f"{_PL}[Strategy]SingleDeviceStrategy.backward",
        ZERO_GRAD: f"{_PL}[LightningModule]GPT.optimizer_zero_grad",
        CLOSURE: f"{_PL}[LightningModule]GPT.optimizer_step",
    },
    "deepspeed": {
        FORWARD: "DeepSpeedEngine.forward",
        BACKWARD: "DeepSpeedEngine.backward",
        OPTIMIZER: "DeepSpeedEngine.step",
    },
    "iteration": {
        STEP: "iteration{n}",
        FORWARD: "forward",
        BACKWARD: "backward",
        OPTIMIZER: "opt.step()",
    },
    "vllm": {
        PREFILL: "execute_context_{batch}({tokens})_generation_0(0)",
        DECODE: "execute_context_0(0)_generation_{batch}({batch})",
    },
    "sglang": {PREFILL: "step[EXTEND bs={batch} toks={tokens}]", DECODE: "step[DECODE bs={batch}]"},
    "deepseek": {"attention": "attn({pass})", "mlp": "mlp({pass})"},
}
"""The name of the range around each kind of region that a program of this kind has."""

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
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
UPLOAD, DOWNLOAD = "Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pageable)"


@dataclass(slots=True)
class Span:
    """A range, an operator, a call of the runtime or a Python frame on a thread of the host."""

    kind: str
    name: str
    thread: int
    start_ns: int
    end_ns: int
    means: str = ""
    number: int = -1
    args: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Job:
    """A kernel or a copy, with what the program knows of it."""

    kind: str
    name: str
    device: int
    stream: int
    start_ns: int
    end_ns: int
    launch: Span
    phase: str
    step: int
    """The step of the optimizer or of the server; -1 outside of all."""
    micro: int
    module: tuple[str, ...]
    is_in_graph: bool
    collective_bytes: int = 0


@dataclass(slots=True)
class Doing:
    """A time in which the host did something besides launching."""

    start_ns: int
    end_ns: int
    what: str
    phase: str


@dataclass
class Machine:
    """One rank: a host that launches work, and devices whose streams run it in order."""

    plan: Plan
    slowness: float = 1.0
    now: int = 0
    thread: int = MAIN
    spans: list[Span] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    free: defaultdict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    doing: list["Doing"] = field(default_factory=list)
    graph: Span | None = None

    def call(self, name: str, duration_ns: int) -> Span:
        call = Span("call", name, self.thread, self.now, self.now + duration_ns)
        self.spans.append(call)
        self.now += duration_ns
        return call

    def wait(self, until: int, name: str, phase: str) -> None:
        """A call that returns when the device has come so far."""
        begun = self.now
        self.call(name, max(until - self.now, 0) + 2 * MICROSECOND)
        self.doing.append(Doing(begun, self.now, WAITING, phase))

    def spend(self, duration_ns: int, what: str, phase: str) -> None:
        self.doing.append(Doing(self.now, self.now + duration_ns, what, phase))
        self.now += duration_ns

    @property
    def done(self) -> int:
        return max(self.free.values(), default=0)


class Run:
    """All ranks of a program, which do the same and differ in speed."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.random = plan, random.Random(plan.seed)
        self.machines = [Machine(plan) for _ in range(plan.ranks)]
        if plan.limit == "ranks":
            self.machines[plan.slow_rank].slowness = 1.6
        self.phase, self.step, self.micro, self.device = "", -1, 0, 0
        self.modules: tuple[str, ...] = ()
        is_host = plan.limit == "host"
        self.kernel_ns = 5 * MICROSECOND if is_host else 60 * MICROSECOND
        self.pace_ns = 25 * MICROSECOND if is_host else 5 * MICROSECOND
        self.kinds: list[str] = []
        """What each step is: `prefill 4 4096`, `decode 32 32`, or empty."""

    @contextmanager
    def span(self, kind: str, name: str, means: str = "", **args: object) -> Iterator[None]:
        if self.machines[0].graph is not None:
            yield  # nothing of the host is repeated with a graph
            return
        opened = []
        for machine in self.machines:
            span = Span(kind, name, machine.thread, machine.now, -1, means, self.step, dict(args))
            machine.spans.append(span)
            machine.now += 200 + len(name)
            opened.append(span)
        yield
        for machine, span in zip(self.machines, opened, strict=True):
            machine.now += 100
            span.end_ns = machine.now

    @contextmanager
    def region(self, means: str, **words: object) -> Iterator[None]:
        """A part of the program, in a range if the style names such parts."""
        name = STYLES[self.plan.style].get(means)
        with ExitStack() as stack:
            if name is not None:
                stack.enter_context(self.span("range", name.format_map(words), means))
            yield

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        with self.region(phase):
            yield
        self.phase = before

    @contextmanager
    def on_thread(self, thread: int) -> Iterator[None]:
        for machine in self.machines:
            machine.thread = thread
            machine.now += 3 * MICROSECOND
        yield
        for machine in self.machines:
            machine.thread = MAIN
            machine.now += 3 * MICROSECOND

    @contextmanager
    def module(self, name: str) -> Iterator[None]:
        before, self.modules = self.modules, (*self.modules, name)
        with ExitStack() as stack:
            if self.plan.modules and not self.plan.is_nsys:
                stack.enter_context(self.span("frame", f"nn.Module: {name}"))
            yield
        self.modules = before

    @contextmanager
    def captured(self, is_captured: bool) -> Iterator[None]:
        """Launch all work within as one CUDA graph."""
        if not is_captured:
            yield
            return
        for machine in self.machines:
            machine.graph = machine.call("cudaGraphLaunch", 12 * MICROSECOND)
        yield
        for machine in self.machines:
            machine.graph = None

    def spend(self, duration_ns: int, what: str) -> None:
        for machine in self.machines:
            duration = int(duration_ns * self.random.uniform(0.9, 1.1))
            machine.spend(duration, what, self.phase)

    def wait(self, name: str = "cudaDeviceSynchronize") -> None:
        for machine in self.machines:
            machine.wait(machine.done, name, self.phase)

    def join(self, stream: int, other: int) -> None:
        """Let one stream wait for all work of another."""
        for machine in self.machines:
            key = self.device, stream
            machine.free[key] = max(machine.free[key], machine.free[self.device, other])
            if machine.graph is None:
                machine.call("cudaStreamWaitEvent", MICROSECOND)

    def launch(
        self,
        name: str,
        duration_ns: int = 0,
        /,
        *,
        stream: int = COMPUTE,
        kind: str = "kernel",
        call: str = "cudaLaunchKernel",
        operator: str = "",
    ) -> list[Job]:
        """Launch a kernel or a copy, from within an operator if one is named."""
        duration = duration_ns or int(self.kernel_ns * self.random.uniform(0.5, 1.5))
        jobs = []
        with ExitStack() as stack:
            if operator:
                stack.enter_context(self.span("operator", operator))
            for machine in self.machines:
                launch = machine.graph
                if launch is None:
                    machine.now += int(self.pace_ns * self.random.uniform(0.4, 0.8))
                    launch = machine.call(call, int(self.pace_ns * self.random.uniform(0.3, 0.6)))
                key = self.device, stream
                start = max(machine.free[key] + 700, launch.start_ns + 6 * MICROSECOND)
                end = start + int(duration * machine.slowness) + self.random.randrange(50)
                machine.free[key] = end
                jobs.append(
                    Job(
                        kind,
                        name,
                        *key,
                        start,
                        end,
                        launch,
                        self.phase,
                        self.step,
                        self.micro,
                        self.modules,
                        machine.graph is not None,
                    )
                )
                machine.jobs.append(jobs[-1])
        return jobs

    def copy(self, name: str, duration_ns: int, stream: int = COMPUTE) -> None:
        """A copy; one of pageable memory returns when it is done."""
        jobs = self.launch(
            name,
            duration_ns,
            stream=stream,
            kind="copy",
            call="cudaMemcpyAsync",
            operator="aten::copy_",
        )
        if "Pageable" in name:
            for machine, job in zip(self.machines, jobs, strict=True):
                machine.wait(job.end_ns, "cudaStreamSynchronize", self.phase)

    def move_to(self, device: int) -> None:
        """Copy what was computed to another device, whose work waits for it."""
        if device == self.device:
            return
        peers = f"Device {self.device} -> Device {device}"
        jobs = self.launch(
            f"Memcpy PtoP ({peers})", 4 * MICROSECOND, kind="copy", call="cudaMemcpyPeerAsync"
        )
        self.device = device
        for machine, job in zip(self.machines, jobs, strict=True):
            key = device, COMPUTE
            machine.free[key] = max(machine.free[key], job.end_ns)

    def reduce(self, num_bytes: int) -> None:
        """An all-reduce, which ends on all ranks together: they have one clock here."""
        self.join(COMMUNICATION, COMPUTE)
        with self.span(
            "operator",
            "record_param_comms",
            **{
                "Collective name": "allreduce",
                "In msg nelems": num_bytes // 2,
                "Out msg nelems": num_bytes // 2,
                "Group size": self.plan.ranks,
                "dtype": "BFloat16",
                "Process Group Name": "0",
                "Process Group Description": "default_pg",
                "Process Group Ranks": str([*range(self.plan.ranks)]),
            },
        ):
            jobs = self.launch(REDUCE, 10, stream=COMMUNICATION)
        end = max(job.start_ns for job in jobs) + num_bytes // 100
        for machine, job in zip(self.machines, jobs, strict=True):
            job.end_ns = machine.free[self.device, COMMUNICATION] = end
            job.collective_bytes = num_bytes


def _forward(run: Run) -> None:
    plan = run.plan
    with ExitStack() as stack:
        if plan.compiled:
            stack.enter_context(run.span("operator", "Torch-Compiled Region: 0/0"))
        run.launch(PLAIN, operator="aten::embedding")
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
        run.launch(MATMULS[0], operator="aten::addmm")
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
        with run.span("operator", NODE.format("NllLoss"), BACKWARD):
            run.launch("void at::native::nll_loss_backward_reduce_cuda_kernel_2d<float>")
        for layer in reversed(range(plan.layers)):
            run.move_to(layer * plan.devices // plan.layers)
            name = "CompiledFunction" if plan.compiled else "Addmm"
            with run.module(f"Block_{layer}"), run.span("operator", NODE.format(name), BACKWARD):
                if plan.checkpoints:
                    _layer(run, layer)
                run.launch(FLASH.format("bwd", "bwd"))
                run.launch(MATMULS[1], operator="aten::mm")
                run.launch(MATMULS[1], operator="aten::mm")
            if plan.ranks > 1 and run.micro == plan.micro_batches - 1:
                run.reduce(run.random.randrange(4, 12) * 2_000_000)
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
        means = {"step": OPTIMIZER}.get(method, ZERO_GRAD)
        stack.enter_context(run.span("range", f"Optimizer.{method}#AdamW.{method}", means))
    return stack


def _zero_grad(run: Run) -> None:
    with run.in_phase(ZERO_GRAD), _own_range(run, "zero_grad"):
        if run.plan.seed % 3 == 0:
            run.launch(FILL, 3 * MICROSECOND, operator="aten::zero_")


def _batch(run: Run) -> None:
    """Wait for the loader, then copy the batch."""
    plan, phase = run.plan, run.phase
    run.phase = DATA
    waits = 12 * MILLISECOND if plan.limit == "data" else 20 * MICROSECOND
    with ExitStack() as stack:
        if plan.loader and not plan.is_nsys:
            stack.enter_context(run.span("range", LOADER.format(plan.loader), DATA))
        elif plan.loader:
            stack.enter_context(run.region(DATA))
        run.spend(waits, DATA)
    copies = 8 * MILLISECOND if plan.limit == "copies" else 15 * MICROSECOND
    run.copy(UPLOAD if run.random.random() < 0.5 else "Memcpy HtoD (Pinned -> Device)", copies)
    run.phase = phase


def _hidden(run: Run) -> None:
    """Something that keeps the host from launching, for milliseconds."""
    what, duration = run.plan.hides, 4 * MILLISECOND
    if what == "range":
        with run.span("range", "tokenize and log", PAUSE):
            run.spend(duration, what)
    elif what == COLLECTOR:
        with run.span("frame", "Python GC", COLLECTOR):
            run.spend(duration, what)
    elif what == COMPILING:
        with run.span("operator", "CachingAutotuner.benchmark_all_configs", COMPILING):
            run.spend(duration, what)
    elif what == ALLOCATION:
        for machine in run.machines:
            machine.doing.append(Doing(machine.now, machine.now + duration, what, run.phase))
            machine.call("cudaMalloc", duration)
    elif what == PAUSE:
        run.spend(duration, what)


def _micro_batch(run: Run) -> None:
    graph = run.plan.graph == "parts"
    with run.in_phase(FORWARD):
        with run.captured(graph):
            _forward(run)
        if run.plan.side_stream:
            run.join(SIDE, COMPUTE)
            run.launch(GELU, stream=SIDE)
            run.join(COMPUTE, SIDE)
        if STYLES[run.plan.style].get(LOSS) is None:
            _loss(run)
    if STYLES[run.plan.style].get(LOSS) is not None:
        with run.in_phase(LOSS):
            _loss(run)
    with run.in_phase(BACKWARD):
        _backward(run)


def _clip(run: Run) -> None:
    if run.plan.clips:
        run.phase = CLIP
        run.launch(FOREACH.format("LpNormFunctor"), operator="aten::_foreach_norm")
        run.launch(FOREACH.format("BinaryOpListAlphaFunctor"), operator="aten::_foreach_mul_")
        run.phase = ""


def _update(run: Run) -> None:
    if run.plan.optimizer:
        with run.in_phase(OPTIMIZER), _own_range(run, "step"):
            _optimizer(run)


def _closed_step(run: Run) -> None:
    """Lightning's step: forward and backward run inside of the call of the optimizer."""
    with run.region(CLOSURE), _own_range(run, "step"):
        with run.in_phase(FORWARD):
            _forward(run)
            _loss(run)
        _zero_grad(run)
        with run.in_phase(BACKWARD):
            _backward(run)
        _clip(run)
        run.phase = OPTIMIZER
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
            stack.enter_context(run.region(STEP, n=run.step))
        for run.micro in range(plan.micro_batches):
            is_last = run.micro == plan.micro_batches - 1
            with ExitStack() as inner:
                if plan.steps_of_micro:
                    number = run.step * plan.micro_batches + run.micro
                    inner.enter_context(run.region(STEP, n=number))
                if not is_outside or run.micro:
                    _batch(run)
                if plan.style == "lightning":
                    _closed_step(run)
                    continue
                inner.enter_context(run.captured(plan.graph == "step"))
                if plan.zero_grad == "first" and run.micro == 0:
                    _zero_grad(run)
                _micro_batch(run)
                if is_last:
                    _finish(run)
        if plan.reads_loss:
            run.copy(DOWNLOAD, 2 * MICROSECOND)


def _training(run: Run) -> None:
    plan = run.plan
    for run.step in range(plan.steps):
        _training_step(run)
        run.kinds.append("")
        if plan.evaluates and run.step == plan.steps // 2:
            step, run.step, run.phase = run.step, -1, EVALUATION
            for _ in range(2):
                _forward(run)
            run.copy(DOWNLOAD, 2 * MICROSECOND)
            run.step, run.phase = step, ""
    run.step = -1
    run.wait()


def _inference(run: Run) -> None:
    for run.step in range(run.plan.steps):
        with run.region(STEP, n=run.step):
            _batch(run)
            with run.in_phase(FORWARD), run.captured(run.plan.graph != ""):
                _forward(run)
            _hidden(run)
            if run.plan.reads_loss:
                run.copy(DOWNLOAD, 2 * MICROSECOND)
        run.kinds.append("")
    run.step = -1
    run.wait()


def _server(run: Run) -> None:
    """Prefill by launches, decode by a graph; the host prepares a step while the one before runs."""
    run.phase = FORWARD
    usual = run.kernel_ns
    for run.step in range(run.plan.steps * 3):
        is_prefill = run.random.random() < 0.3
        batch = run.random.choice((1, 4, 8)) if is_prefill else run.random.choice((16, 32))
        tokens = batch * 1024 if is_prefill else batch
        kind = PREFILL if is_prefill else DECODE
        run.kernel_ns = usual * 4 if is_prefill else usual
        with run.region(kind, batch=batch, tokens=tokens):
            run.spend(30 * MICROSECOND, "prepare")
            with run.captured(not is_prefill and run.plan.graph != ""):
                _forward(run)
        run.kinds.append(f"{kind} {batch} {tokens}")
        if run.plan.limit in ("host", "data"):
            run.wait("cudaEventSynchronize")
            run.spend(3 * MILLISECOND, "prepare")
    run.step = -1
    run.wait()


def _pipeline(run: Run) -> None:
    """Chunks of forward and backward side by side, with gradients of weights apart."""
    for run.step in range(run.plan.steps):
        for part in ("attention", "mlp", "mlp", "attention"):
            for letter, phase in (("F", FORWARD), ("B", BACKWARD), ("W", WEIGHTS)):
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


def simulate(plan: Plan) -> Run:
    """Run the whole program."""
    run = Run(plan)
    PROGRAMS[plan.kind](run)
    return run


def draw(seed: int) -> Plan:
    """The plan of this seed."""
    random_ = random.Random(seed)
    pick, chance = random_.choice, random_.random
    kind = random_.choices([*PROGRAMS], [6, 1, 2, 1])[0]
    plan = Plan(
        seed=seed,
        kind=kind,
        style=pick(
            {"server": ("vllm", "sglang", "none"), "pipeline": ("deepseek", "none")}.get(
                kind, ("none", "torch", "ours")
            )
        ),
        limit=pick(("gpu", "gpu", "host", "data", "copies")),
        is_nsys=chance() < 0.25,
        steps=random_.randint(2, 5),
        layers=random_.randint(2, 4),
        loader=pick(("", "_SingleProcess", "_MultiProcessing")),
        reads_loss=chance() < 0.7,
        graph=pick(("", "", "step")),
        modules=chance() < 0.4,
        compiled=chance() < 0.3,
        cut=pick(((0.0, 1.0), (0.0, 1.0), (0.0, 0.8), (0.25, 1.0), (0.3, 0.7))),
        dropped=pick(("", "", "", "launches", "operators", "ranges", "kernels")),
        shift_ns=pick((0, 0, 0, 0, -400_000, 3_000_000)),
    )
    return _trained(plan, random_) if kind == "training" else plan


def _trained(plan: Plan, random_: random.Random) -> Plan:
    """The plan with what only training has."""
    pick, chance = random_.choice, random_.random
    styles = [style for style in STYLES if style not in ("vllm", "sglang", "deepseek")]
    style = pick(styles)
    micro_batches = 1 if style == "lightning" else pick((1, 1, 2, 4))
    ranks = pick((1, 1, 1, 1, 4)) if style != "lightning" and not plan.is_nsys else 1
    return replace(
        plan,
        style=style,
        micro_batches=micro_batches,
        steps_of_micro=micro_batches > 1 and style in ("torch", "hashes") and chance() < 0.3,
        zero_grad=pick(("", "first", "last")),
        optimizer="torch"
        if style == "lightning"
        else pick(("torch", "torch", "kernels", "plain", "")),
        clips=chance() < 0.3,
        evaluates=chance() < 0.2,
        checkpoints=chance() < 0.2,
        graph=""
        if style == "lightning" or ranks > 1 or micro_batches > 1
        else pick(("", "", "", "step", "parts")),
        side_stream=chance() < 0.2,
        ranks=ranks,
        slow_rank=random_.randrange(ranks),
        limit="ranks" if ranks > 1 and chance() < 0.5 else plan.limit,
        devices=1 if ranks > 1 else pick((1, 1, 1, 2)),
        hides=pick(("", "", PAUSE, "range", COLLECTOR, ALLOCATION, COMPILING)),
    )


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

    spans = [s for s in machine.spans if is_kept(s.kind, s.start_ns, s.end_ns)]
    jobs = [
        replace(job, start_ns=job.start_ns + plan.shift_ns, end_ns=job.end_ns + plan.shift_ns)
        for job in machine.jobs
        if is_kept(job.kind, job.start_ns, job.end_ns)
    ]
    return Recorded(plan, rank, spans, jobs, machine.doing, run.kinds)
