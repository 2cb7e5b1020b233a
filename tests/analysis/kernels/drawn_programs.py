"""The programs, which run on a machine for each rank."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from threading import Barrier
from typing import Any

from tests.analysis.kernels.drawn_machine import MICROSECOND, MILLISECOND, Machine, Stream, Thread
from tests.analysis.kernels.drawn_plans import EARLY, PHASES, STYLES, Part, Pause, Plan

_AT = "void at::native::"
_FOREACH = _AT + "(anonymous namespace)::multi_tensor_apply_kernel<{}<float, 4>>"
_PLAIN = _AT + "vectorized_elementwise_kernel<4, at::native::{}>"
MATMULS = ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "ampere_bf16_s16816gemm_bf16_128x128_tn")
ADAM = _FOREACH.format("at::native::(anonymous namespace)::FusedAdamMathFunctor")
_FILL, _ADD = _PLAIN.format("FillFunctor<float>"), _PLAIN.format("CUDAFunctor_add<float>")
_GELU = _PLAIN.format("GeluCUDAKernelImpl")
_FLASH = "void flash::flash_{0}_kernel<Flash_{0}_kernel_traits<64, 128, 128, 4>>"
_DEEP_EP = "void deep_ep::internode::{}<true, 8, 9>"
COLLECTIVES = {
    "gather": ("all-gather", "_allgather_base", "AllGather", 1),
    "reduce": ("all-reduce", "allreduce", "AllReduce_Sum_bf16", 2),
    "scatter": ("reduce-scatter", "_reduce_scatter_base", "ReduceScatter_Sum_bf16", 2),
}
"""What each is called here, by `record_param_comms` and in its kernel; MB of messages differ."""
_SHOWN = {
    Pause.RANGE: ("range", "tokenize and log"),
    Pause.COLLECTOR: ("frame", "Python GC"),
    Pause.COMPILING: ("operator", "CachingAutotuner.benchmark_all_configs"),
}
"""What is open while the host does not launch, for the pauses that show their reason."""


class Program(Machine):
    """A program, which does on its machine what the plan asks for."""

    def run(self) -> None:
        self.scale = 1
        self.numbers: Counter[int] = Counter()
        """How many operators of each thread had a sequence number."""
        self.nodes: dict[int, int] = {}
        """The sequence number of each layer's operator of forward."""
        with self.opened("range", self.plan.around):
            for step in range(self.plan.steps * (3 if self.plan.kind == "server" else 1)):
                with self.within(step=step):
                    getattr(self, self.plan.kind)(step)
        self.wait("cudaDeviceSynchronize")

    # what all programs do

    @contextmanager
    def part(self, part: str, means: str = "", **facts: Any) -> Iterator[None]:
        """A part of the program, in a range if the style names it."""
        name = STYLES[self.plan.style].get(part, "").format(**facts)
        means = means or part
        changes = {"phase": means} if means in PHASES else {}
        with self.within(**changes), self.opened("range", name, means):
            yield

    def of_torch(self, name: str, means: str) -> AbstractContextManager[None]:
        """A range that PyTorch's profiler has of itself, and nsys has not."""
        return self.opened("range", "" if self.plan.is_nsys else name, means)

    def module(self, name: str, layer: int) -> AbstractContextManager[None]:
        """The frame of a layer's module, if the profiler records those."""
        is_seen = self.plan.modules and name
        return self.opened("frame", f"nn.Module: {name}_{layer}" if is_seen else "")

    def kernel(
        self, name: str, operator: str = "", stream: int = Stream.COMPUTE, **args: Any
    ) -> None:
        usual_ns = self.scale * (5 if self.plan.limit == "host" else 60) * MICROSECOND
        duration_ns = int(usual_ns * self.random.uniform(0.5, 1.5))
        with self.opened("operator", operator, args=args):
            self.launch("kernel", name, duration_ns, stream)

    def copy(self, kind: str, operator: str = "aten::copy_", stream: int = Stream.COMPUTE) -> None:
        is_long = self.plan.limit == "copies" and kind.startswith("HtoD")
        duration_ns = 8 * MILLISECOND if is_long else 15 * MICROSECOND
        with self.opened("operator", operator):
            self.launch("copy", f"Memcpy {kind}", duration_ns, stream)

    def collective(self, name: str) -> None:
        if self.plan.ranks == 1:
            return
        self.join(Stream.COMMUNICATION, Stream.COMPUTE)
        _, of_torch, of_kernel, scale = COLLECTIVES[name]
        number = self.random.randrange(4, 12) * scale * 500_000
        args = {
            "Collective name": of_torch,
            "In msg nelems": number,
            "Out msg nelems": number,
            "Group size": self.plan.ranks,
            "dtype": "BFloat16",
            "Process Group Name": "0",
            "Process Group Description": "default_pg",
            "Process Group Ranks": str([*range(self.plan.ranks)]),
        }
        kernel = f"ncclDevKernel_{of_kernel}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        with self.opened("operator", "record_param_comms", args=args):
            job = self.launch("kernel", kernel, 10, Stream.COMMUNICATION, args=args)
            self.meet(job, number // 50)

    def read(self) -> None:
        """Read the loss, which waits for it."""
        self.copy("DtoH (Device -> Pageable)")
        self.wait("cudaStreamSynchronize")

    # a step of each kind of program

    def training(self, step: int) -> None:
        plan = self.plan
        if plan.style in EARLY:
            self.batch()
        with self.part("" if plan.steps_of_micro else Part.STEP, n=step):
            for micro in range(plan.micro_batches):
                with self.within(micro=micro):
                    self.micro_batch(step, micro)
            if plan.reads_loss:
                self.read()
        if plan.decoy:
            with self.within(step=-1), self.opened("range", plan.decoy):
                self.kernel(_ADD, "aten::add_")
        if plan.evaluates and step == plan.steps // 2:
            with self.within(phase=Part.EVALUATION, step=-1):
                self.forward_pass()
                self.forward_pass()
                self.read()

    def inference(self, step: int) -> None:
        with self.part(Part.STEP, n=step):
            self.batch()
            with self.part(Part.FORWARD), self.graph(self.plan.graph):
                self.forward_pass()
            if self.plan.reads_loss:
                self.read()

    def server(self, step: int) -> None:
        """Fill the cache by launches, or decode by a graph."""
        plan, pick = self.plan, self.random.choice
        is_prefill = self.random.random() < 0.3
        turn = Part.PREFILL if is_prefill else Part.DECODE
        batch = pick((1, 4, 8) if is_prefill else (16, 32))
        tokens = batch * 1024 if is_prefill else batch
        decoding = pick((2, 8)) if is_prefill and plan.is_mixed else 0
        self.scale = 4 if is_prefill else 1
        place = self.within(phase=Part.FORWARD, label=f"{turn} {batch} {tokens}")
        with place, self.part(turn, batch=batch, tokens=tokens, decoding=decoding):
            self.pause(Pause.PREPARING, 30 * MICROSECOND)
            with self.graph(plan.graph and not is_prefill):
                self.forward_pass()
        if plan.limit in ("host", "data"):
            self.wait("cudaEventSynchronize")
            self.pause(Pause.PREPARING, 3 * MILLISECOND)

    def pipeline(self, step: int) -> None:
        """Forward, backward and the weights' gradients of chunks, as DualPipe has them."""
        for name in ("attn", "mlp", "mlp", "attn"):
            sent = _DEEP_EP.format("dispatch" if name == "attn" else "combine")
            for phase in (Part.FORWARD, Part.BACKWARD, Part.WEIGHTS):
                with self.part(name, phase, letter=phase[0].upper()):
                    self.kernel(MATMULS[phase != Part.FORWARD], "aten::mm")
                    self.kernel(MATMULS[phase != Part.FORWARD], "aten::mm")
                    self.kernel(sent, stream=Stream.COMMUNICATION)

    # parts of training

    def micro_batch(self, step: int, micro: int) -> None:
        plan = self.plan
        number = step * plan.micro_batches + micro
        with self.part(Part.STEP if plan.steps_of_micro else "", n=number):
            if micro or plan.style not in EARLY:
                self.batch()
            with self.graph(plan.graph == "step"):
                if plan.style == "lightning":
                    self.closed()
                else:
                    self.open(micro)

    def closed(self) -> None:
        """Forward and backward within the call of the optimizer."""
        with self.part(Part.CLOSURE), self.optimizer("step", Part.OPTIMIZER):
            with self.part(Part.FORWARD):
                self.forward_pass()
                self.loss_pass()
            self.zero_grad()
            with self.part(Part.BACKWARD):
                self.backward_pass(is_last=True)
            self.clip()
            with self.part(Part.OPTIMIZER):
                self.update()

    def open(self, micro: int) -> None:
        """Forward and backward, and the optimizer after the last micro-batch."""
        plan, is_last = self.plan, micro == self.plan.micro_batches - 1
        if plan.zero_grad == "first" and micro == 0:
            self.zero_grad()
        with self.part(Part.FORWARD):
            with self.graph(plan.graph == "parts"):
                if plan.is_sharded:
                    self.collective("gather")
                self.forward_pass()
            if plan.reads_in_forward:
                self.read()
            if plan.side_stream:
                self.join(Stream.SIDE, Stream.COMPUTE)
                self.kernel(_GELU, stream=Stream.SIDE)
                self.join(Stream.COMPUTE, Stream.SIDE)
            if Part.LOSS not in STYLES[plan.style]:
                self.loss_pass()
        if Part.LOSS in STYLES[plan.style]:
            with self.part(Part.LOSS):
                self.loss_pass()
        with self.part(Part.BACKWARD):
            self.backward_pass(is_last)
        if is_last:
            self.finish()

    def finish(self) -> None:
        plan = self.plan
        if plan.hides is not None:
            with self.opened(*_SHOWN.get(plan.hides, ("range", ""))):
                self.pause(plan.hides, 4 * MILLISECOND)
        self.clip()
        if plan.optimizer:
            with self.part(Part.OPTIMIZER), self.optimizer("step", Part.OPTIMIZER):
                self.update()
        if plan.zero_grad == "last":
            self.zero_grad()

    def optimizer(self, call: str, part: Part) -> AbstractContextManager[None]:
        is_torch = self.plan.optimizer == "torch"
        return self.of_torch(f"Optimizer.{call}#AdamW.{call}" if is_torch else "", part)

    def zero_grad(self) -> None:
        with self.part(Part.ZERO_GRAD), self.optimizer("zero_grad", Part.ZERO_GRAD):
            if self.plan.fills:
                with self.opened("operator", "aten::zero_"):
                    self.launch("kernel", _FILL, 3 * MICROSECOND, Stream.COMPUTE)

    def clip(self) -> None:
        if self.plan.clips:
            with self.within(phase=Part.CLIP):
                self.kernel(_FOREACH.format("LpNormFunctor"), "aten::_foreach_norm")
                self.kernel(_FOREACH.format("BinaryOpListAlphaFunctor"), "aten::_foreach_mul_")

    def update(self) -> None:
        is_plain = self.plan.optimizer == "plain"
        change = (_ADD, "aten::add_") if is_plain else (ADAM, "aten::_fused_adamw_")
        for device in range(self.plan.devices):
            with self.within(device=device):
                if self.plan.ranks > 1:
                    self.join(Stream.COMPUTE, Stream.COMMUNICATION)
                for _ in range(3):
                    self.kernel(*change)

    def batch(self) -> None:
        """Wait for a batch, and copy it to the device."""
        plan = self.plan
        duration_ns = 12 * MILLISECOND if plan.limit == "data" else 20 * MICROSECOND
        with self.within(phase=Part.DATA):
            with self.part(Part.DATA if plan.loader else ""), self.loader():
                self.pause(Pause.DATA, duration_ns)
            if plan.prefetches:
                with self.on_thread(Thread.LOADING):
                    self.copy("HtoD (Pinned -> Device)", "", Stream.COPIES)
                    self.kernel(_FILL, "aten::div_", Stream.COPIES)
                self.join(Stream.COMPUTE, Stream.COPIES)
            elif plan.is_pageable:
                self.copy("HtoD (Pageable -> Device)")
                self.wait("cudaStreamSynchronize")
            else:
                self.copy("HtoD (Pinned -> Device)")

    def loader(self) -> AbstractContextManager[None]:
        name = self.plan.loader
        if name.startswith("_"):
            return self.of_torch(f"enumerate(DataLoader)#{name}DataLoaderIter.__next__", Part.DATA)
        return self.opened("range", name, Pause.RANGE)

    # the model

    def forward_pass(self) -> None:
        region = "Torch-Compiled Region: 0/0" if self.plan.compiled else ""
        with self.within(), self.opened("operator", region):
            self.kernel(_ADD, "aten::embedding")
            for layer in range(self.plan.layers):
                self.move(layer)
                with self.module("Block", layer):
                    self.layer_body(layer)

    def layer_body(self, layer: int) -> None:
        norm = _AT + "vectorized_layer_norm_kernel<float>", "aten::native_layer_norm"
        activation = _GELU
        if self.plan.compiled:
            norm = f"triton_per_fused_add_native_layer_norm_{layer}", ""
            activation = f"triton_poi_fused_add_native_layer_norm_{layer}"
        with self.module("LayerNorm", layer):
            self.kernel(*norm)
        with self.module("Linear", layer):
            self.kernel(MATMULS[0], "aten::addmm", **self.numbered(layer))
        with self.module("Attention", layer):
            self.kernel(_FLASH.format("fwd"), "aten::_flash_attention_forward")
        self.kernel(activation)

    def numbered(self, layer: int) -> dict[str, int]:
        """The sequence number of an operator that makes a node of backward. Threads number theirs
        apart, so that a recomputation has the numbers of forward.
        """
        thread = self.at.get("thread", Thread.MAIN)
        number = self.numbers[thread]
        self.numbers[thread] += 1
        if self.at["phase"] == Part.FORWARD:
            self.nodes[layer] = number
        return {"Sequence number": number, "Fwd thread id": 0}

    def node(self, name: str, layer: int = -1) -> AbstractContextManager[None]:
        """A node of backward, which has the sequence number of its operator of forward."""
        args = {"Sequence number": self.nodes.get(layer, -1), "Fwd thread id": Thread.MAIN}
        text = f"autograd::engine::evaluate_function: {name}Backward0"
        return self.opened("operator", text, Part.BACKWARD, args=args)

    def move(self, layer: int) -> None:
        """Copy what was computed to the device of the layer, whose work waits for that."""
        device, before = layer * self.plan.devices // self.plan.layers, self.device
        if device != before:
            self.copy(f"PtoP (Device {before} -> Device {device})", "")
            self.at = self.at | {"device": device}
            self.join(Stream.COMPUTE, Stream.COMPUTE, before)

    def loss_pass(self) -> None:
        self.kernel("void cunn_SoftMaxForward<4, float, float>", "aten::_log_softmax")
        self.kernel(_AT + "nll_loss_forward_reduce_cuda_kernel_2d<float>")

    def backward_pass(self, is_last: bool) -> None:
        """Run the nodes, and exchange each layer's gradients after the last micro-batch."""
        node = "CompiledFunction" if self.plan.compiled else "Addmm"
        is_again = self.plan.checkpoints
        with self.on_thread(Thread.AUTOGRAD):
            with self.node("NllLoss"):
                self.kernel(_AT + "nll_loss_backward_reduce_cuda_kernel_2d<float>")
            for layer in reversed(range(self.plan.layers)):
                self.move(layer)
                with self.node(node, layer), self.module("Block" if is_again else "", layer):
                    if is_again:
                        self.layer_body(layer)
                    self.kernel(_FLASH.format("bwd"))
                    self.kernel(MATMULS[1], "aten::mm")
                    self.kernel(MATMULS[1], "aten::mm")
                if is_last:
                    self.collective("scatter" if self.plan.is_sharded else "reduce")


def simulate(plan: Plan, kind: type[Program] = Program) -> list[Program]:
    """Run the whole program on a machine for each rank."""
    barrier, starts = Barrier(plan.ranks), [0] * plan.ranks
    programs = [kind(plan, rank, barrier, starts) for rank in range(plan.ranks)]
    with ThreadPoolExecutor(plan.ranks) as pool:
        list(pool.map(kind.run, programs))
    return programs
