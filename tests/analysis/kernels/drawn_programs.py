"""The programs, which run on a machine for each rank."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Barrier
from typing import Any

from tests.analysis.kernels.drawn_machine import MICROSECOND, MILLISECOND, Machine, Stream, Thread
from tests.analysis.kernels.drawn_plans import PHASES, STYLES, TABLES, Part, Pause, Plan

KERNELS: Mapping[str, tuple[str, str]] = TABLES["kernels"]
"""The name of each kernel, and that of the operator that launches it."""


class Program(Machine):
    """A program, which does on its machine what the plan asks for."""

    def run(self) -> None:
        with self.opened("range", self.plan.around):
            for step in range(self.plan.steps * (3 if self.plan.kind == "server" else 1)):
                with self.within(step=step):
                    getattr(self, self.plan.kind)(step)
        self.wait("cudaDeviceSynchronize")

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

    def kernel(self, what: str, layer: int = 0, stream: int = Stream.COMPUTE, **args: Any) -> None:
        name, operator = KERNELS[what]
        usual_ns = self.scale * (5 if self.plan.limit == "host" else 60) * MICROSECOND
        duration_ns = int(usual_ns * self.random.uniform(0.5, 1.5))
        with self.opened("operator", operator, args=args):
            self.launch("kernel", name.format(layer), duration_ns, stream)

    def copy(self, kind: str, operator: str = "aten::copy_", stream: int = Stream.COMPUTE) -> None:
        is_long = self.plan.limit == "copies" and kind.startswith("HtoD")
        duration_ns = 8 * MILLISECOND if is_long else 15 * MICROSECOND
        with self.opened("operator", operator):
            self.launch("copy", f"Memcpy {kind}", duration_ns, stream)

    def collective(self, what: str) -> None:
        """Exchange with the other ranks, all of which end together."""
        if self.plan.ranks == 1:
            return
        self.join(Stream.COMMUNICATION, Stream.COMPUTE)
        name, of_torch = KERNELS[what]
        number = self.random.randrange(4, 12) * (1 if what == "all-gather" else 2) * 500_000
        numbers = dict.fromkeys(("In msg nelems", "Out msg nelems"), number)
        args = {**TABLES["record_param_comms"], "Collective name": of_torch, **numbers}
        with self.opened("operator", "record_param_comms", args=args):
            job = self.launch("kernel", name, 10, Stream.COMMUNICATION, args=args)
            self.meet(job, number // 50)

    def read(self, copied: str = "DtoH (Device -> Pageable)") -> None:
        """Copy from or to memory that makes the host wait, such as the loss that it reads."""
        self.copy(copied)
        self.wait("cudaStreamSynchronize")

    def training(self, step: int) -> None:
        plan = self.plan
        if plan.style in TABLES["early"]:
            self.batch()
        with self.part("" if plan.steps_of_micro else Part.STEP, n=step):
            for micro in range(plan.micro_batches):
                with self.within(micro=micro):
                    self.micro_batch(step * plan.micro_batches, micro)
            if plan.reads_loss:
                self.read()
        if plan.decoy:
            with self.within(step=-1), self.opened("range", plan.decoy):
                self.kernel("add")
        if plan.evaluates and step == plan.steps // 2:
            with self.within(phase=Part.EVALUATION, step=-1):
                self.model()
                self.model()
                self.read()

    def inference(self, step: int) -> None:
        with self.part(Part.STEP, n=step):
            self.batch()
            with self.part(Part.FORWARD), self.graph(self.plan.graph):
                self.model()
            if self.plan.reads_loss:
                self.read()

    def server(self, step: int) -> None:
        """Fill the cache by launches, or decode by a graph."""
        plan, pick = self.plan, self.random.choice
        turn = Part.PREFILL if self.random.random() < 0.3 else Part.DECODE
        is_prefill, facts = turn == Part.PREFILL, TABLES["turns"][turn]
        batch = pick(facts["batches"])
        tokens, self.scale = batch * facts["tokens"], facts["scale"]
        decoding = pick((2, 8)) if is_prefill and plan.is_mixed else 0
        place = self.within(phase=Part.FORWARD, label=f"{turn} {batch} {tokens}")
        with place, self.part(turn, batch=batch, tokens=tokens, decoding=decoding):
            self.pause(Pause.PREPARING, 30 * MICROSECOND)
            with self.graph(plan.graph and not is_prefill):
                self.model()
        if plan.limit in ("host", "data"):
            self.wait("cudaEventSynchronize")
            self.pause(Pause.PREPARING, 3 * MILLISECOND)

    def pipeline(self, step: int) -> None:
        """Forward, backward and the weights' gradients of chunks, as DualPipe has them."""
        for name in ("attn", "mlp", "mlp", "attn"):
            for phase in (Part.FORWARD, Part.BACKWARD, Part.WEIGHTS):
                with self.part(name, phase, letter=phase[0].upper()):
                    self.kernel(f"matmul_{phase}")
                    self.kernel(f"matmul_{phase}")
                    self.kernel(name, stream=Stream.COMMUNICATION)

    def micro_batch(self, before: int, micro: int) -> None:
        """A batch, forward and backward, and the optimizer after the last, or around it all."""
        plan, is_last = self.plan, micro == self.plan.micro_batches - 1
        closure = self.call(Part.CLOSURE) if Part.CLOSURE in STYLES[plan.style] else nullcontext()
        with self.part(Part.STEP if plan.steps_of_micro else "", n=before + micro):
            if micro or plan.style not in TABLES["early"]:
                self.batch()
            with self.graph(plan.graph == "step"), closure:
                if micro == 0:
                    self.zero_grad("first")
                self.forward()
                self.zero_grad("between")
                with self.part(Part.BACKWARD), self.on_thread(Thread.AUTOGRAD):
                    self.backward(is_last)
                if is_last:
                    self.finish()

    def forward(self) -> None:
        plan = self.plan
        is_loss_apart = Part.LOSS in STYLES[plan.style]
        with self.part(Part.FORWARD):
            with self.graph(plan.graph == "parts"):
                if plan.is_sharded:
                    self.collective("all-gather")
                self.model()
            if plan.reads_in_forward:
                self.read()
            if plan.side_stream:
                self.join(Stream.SIDE, Stream.COMPUTE)
                self.kernel("activation", stream=Stream.SIDE)
                self.join(Stream.COMPUTE, Stream.SIDE)
            if not is_loss_apart:
                self.loss()
        if is_loss_apart:
            with self.part(Part.LOSS):
                self.loss()

    def loss(self) -> None:
        self.kernel("softmax")
        self.kernel("loss")

    def finish(self) -> None:
        """Update the parameters, for which the host is late if something hides it."""
        plan = self.plan
        if plan.hides:
            with self.opened(*TABLES["shown"].get(plan.hides, ("range", ""))):
                self.pause(plan.hides, 4 * MILLISECOND)
        if plan.clips:
            with self.within(phase=Part.CLIP):
                self.kernel("clip_norm")
                self.kernel("clip")
        if plan.optimizer:
            call = self.part if Part.CLOSURE in STYLES[plan.style] else self.call
            with call(Part.OPTIMIZER):
                self.update()
        self.zero_grad("last")

    @contextmanager
    def call(self, part: Part, name: str = "step", means: Part = Part.OPTIMIZER) -> Iterator[None]:
        """A call of the optimizer, of which PyTorch's has a range."""
        of_torch = f"Optimizer.{name}#AdamW.{name}" if self.plan.optimizer == "torch" else ""
        with self.part(part), self.of_torch(of_torch, means):
            yield

    def zero_grad(self, when: str) -> None:
        if when == self.plan.zero_grad:
            with self.call(Part.ZERO_GRAD, "zero_grad", Part.ZERO_GRAD):
                if self.plan.fills:
                    self.kernel("fill")

    def update(self) -> None:
        for device in range(self.plan.devices):
            with self.within(device=device):
                if self.plan.ranks > 1:
                    self.join(Stream.COMPUTE, Stream.COMMUNICATION)
                for _ in range(3):
                    self.kernel("add" if self.plan.optimizer == "plain" else "adam")

    def batch(self) -> None:
        """Wait for a batch, and copy it to the device."""
        plan = self.plan
        duration_ns = 12 * MILLISECOND if plan.limit == "data" else 20 * MICROSECOND
        loader = self.opened("range", plan.loader, Pause.RANGE)
        if plan.loader.startswith("_"):
            name = f"enumerate(DataLoader)#{plan.loader}DataLoaderIter.__next__"
            loader = self.of_torch(name, Part.DATA)
        with self.within(phase=Part.DATA):
            with self.part(Part.DATA if plan.loader else ""), loader:
                self.pause(Pause.DATA, duration_ns)
            if plan.prefetches:
                with self.on_thread(Thread.LOADING):
                    self.copy("HtoD (Pinned -> Device)", "", Stream.COPIES)
                    self.kernel("scale", stream=Stream.COPIES)
                self.join(Stream.COMPUTE, Stream.COPIES)
            elif plan.is_pageable:
                self.read("HtoD (Pageable -> Device)")
            else:
                self.copy("HtoD (Pinned -> Device)")

    def model(self) -> None:
        region = "Torch-Compiled Region: 0/0" if self.plan.compiled else ""
        with self.within(), self.opened("operator", region):
            self.kernel("embedding")
            for layer in range(self.plan.layers):
                self.move(layer)
                with self.module("Block", layer):
                    self.block(layer)

    def block(self, layer: int) -> None:
        """Run the layer. The thread of backward counts its operators apart, last layer first."""
        is_again = self.at.get("thread") == Thread.AUTOGRAD
        number = self.plan.layers - 1 - layer if is_again else layer
        compiled = "compiled_" if self.plan.compiled else ""
        with self.module("LayerNorm", layer):
            self.kernel(f"{compiled}norm", layer)
        with self.module("Linear", layer):
            self.kernel("linear", **self.numbered(number))
        with self.module("Attention", layer):
            self.kernel("attention")
        self.kernel(f"{compiled}activation", layer)

    def numbered(self, layer: int, thread: int = 0) -> dict[str, int]:
        """The number of a layer's operator in this pass, which its node of backward has too."""
        step = self.at["step"] % (self.plan.steps + 1)  # what is evaluated comes after all
        number = step * self.plan.micro_batches + self.at.get("micro", 0)
        number = number * (self.plan.layers + 1) + layer
        return {"Sequence number": number, "Fwd thread id": thread}

    def node(self, name: str, layer: int) -> AbstractContextManager[None]:
        text = f"autograd::engine::evaluate_function: {name}Backward0"
        args = self.numbered(layer, Thread.MAIN)
        return self.opened("operator", text, Part.BACKWARD, args=args)

    def move(self, layer: int) -> None:
        """Copy what was computed to the device of the layer, whose work waits for that."""
        device, before = layer * self.plan.devices // self.plan.layers, self.at["device"]
        if device != before:
            self.copy(f"PtoP (Device {before} -> Device {device})", "")
            self.at = self.at | {"device": device}
            self.join(Stream.COMPUTE, Stream.COMPUTE, before)

    def backward(self, is_last: bool) -> None:
        """Run the nodes, and exchange each layer's gradients after the last micro-batch."""
        node = "CompiledFunction" if self.plan.compiled else "Addmm"
        is_again = self.plan.checkpoints
        with self.node("NllLoss", self.plan.layers):
            self.kernel("loss_backward")
        for layer in reversed(range(self.plan.layers)):
            self.move(layer)
            with self.node(node, layer), self.module("Block" if is_again else "", layer):
                if is_again:
                    self.block(layer)
                self.kernel("attention_backward")
                self.kernel("matmul_backward")
                self.kernel("matmul_backward")
            if is_last:
                self.collective("reduce-scatter" if self.plan.is_sharded else "all-reduce")


def simulate(plan: Plan, kind: type[Program] = Program) -> list[Program]:
    """Run the whole program on a machine for each rank."""
    barrier, programs = Barrier(plan.ranks), list[Program]()
    programs += [kind(plan, rank, barrier, programs) for rank in range(plan.ranks)]
    with ThreadPoolExecutor(plan.ranks) as pool:
        list(pool.map(kind.run, programs))
    return programs
