"""One training step, or the part of it that the mode asks for, timed phase by phase; and what is
counted around it.

The modules of fast and shared steps are imported only for these, because that takes as long as some
steps.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from ..config import SIZES, CompileMode, Device, Mode, Phase, Precision, RunConfig
from ..model.annotate import annotate
from ..model.batches import Batch, make_batches
from ..model.trainable import Trainable, make_model
from ..model.transformer import TransformerLM
from ..model.user_code import vocabulary_of
from ..ranges import Range
from ..record import Compilation, Memory, MemoryMoment, MomentName
from .clock import Clock, StepTimes
from .precision import autocast, check_dtypes

if TYPE_CHECKING:
    from ..model.fast.step_graph import StepGraph
    from ..parallel.ways import Way


def _dtypes_of(model: nn.Module) -> Iterator[tuple[str, torch.dtype]]:
    """The types that a step begins with, and whose they are."""
    yield "PyTorch's default type", torch.get_default_dtype()
    for name, parameter in model.named_parameters():
        yield f"parameter {name}", parameter.dtype


class TrainingStep:
    """Forward, backward and optimizer of one model on one device; each call is one step.

    If several ranks share a step, this is the part of `rank`, which must have joined the process
    group.
    """

    def __init__(self, config: RunConfig, model: nn.Module | None = None, rank: int = 0) -> None:
        """Build what a step needs: the model (or the given one, set to the configuration's mode),
        batches, loss and, in fp16, a gradient scaler.
        """
        model = make_model(config) if model is None else model
        if config.model_factory is not None:
            config = with_own_vocabulary(config, model)
        self.config = config
        check_dtypes(config.precision, _dtypes_of(model))
        self.batches = make_batches(config, rank)
        self.scaler: torch.amp.GradScaler | None = None
        # small gradients would underflow in fp16; other precisions have the range of fp32
        if config.precision is Precision.FP16:
            self.scaler = torch.amp.GradScaler(config.device.value)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        if config.needs_fast_model:
            from ..model.fast.model import FastTrainable

            self.trainable: Trainable = FastTrainable(cast("TransformerLM", model), config)
        else:
            self.trainable = Trainable(model, config)
        self.model = self.trainable.model
        self.model.train(config.mode is not Mode.INFERENCE)
        self.way: "Way | None" = None
        """The wrapper that shares the step among ranks; None if it is not shared."""
        self._loss: Callable[..., Tensor] = self.trainable.loss
        make_optimizer = self.trainable.make_optimizer
        if config.is_shared:
            from ..parallel.ways import make_shared_optimizer, make_way

            self._loss = self.way = make_way(self.trainable, config)
            make_optimizer = partial(make_shared_optimizer, self.trainable, config, self.way)
        self.optimizer = make_optimizer() if config.mode is Mode.TRAIN else None
        self.phase = Phase.DATA
        """The phase that is running, which a failure's message names."""
        self.loss: Float[Tensor, ""]
        """Loss of the last step; a graph's next replay overwrites it."""
        self._grad = torch.no_grad if config.mode is Mode.INFERENCE else contextlib.nullcontext
        self.graph = self._make_graph() if config.cuda_graph else None

    def _make_graph(self) -> "StepGraph":
        """Prepare to capture the phases of the step as CUDA graphs. Loading data is not captured,
        and communication shares the graph of the phase before.
        """
        from ..model.fast.master_adamw import MasterAdamW
        from ..model.fast.step_graph import StepGraph

        captured = (
            self.optimizer.captured if isinstance(self.optimizer, MasterAdamW) else lambda: None
        )
        order = self.config.launched_phases
        return StepGraph(self._phases, order, captured, joined={Phase.COMMUNICATION})

    def __call__(self, clock: Clock) -> tuple[StepTimes, Float[Tensor, ""]]:
        """Run one step, timed by `clock`; return its times and its loss, which is still on the
        device.
        """
        if self.config.compile is CompileMode.REDUCE_OVERHEAD:
            torch.compiler.cudagraph_mark_step_begin()
        with annotate(Range.STEP):
            self.phase = Phase.DATA
            clock.start()
            with annotate(Range.DATA):
                batches = [self.batches() for _ in range(self.config.accumulate_steps)]
                batch = tuple(chain.from_iterable(batches))
            if self.config.tokens is not None:
                clock.lap(Phase.DATA)
            self.phase = Phase.FORWARD
            if self.graph:
                self.graph(batch, clock.lap)
            else:
                for phase in self._phases(batch):
                    clock.lap(phase)
            times = clock.stop()
        # for graphs too: if an earlier step's gradients were left, the capture would record
        # additions to them
        if self.config.mode is Mode.FORWARD_BACKWARD:
            self.model.zero_grad(set_to_none=True)
        return times, self.loss

    def _phases(self, batch: Sequence[Tensor]) -> Iterator[Phase]:
        """Launch the phases that the mode asks for, one after the other; `batch` has tokens and
        targets of each micro-batch in turn.
        """
        mode = self.config.mode
        micro_batches = [*zip(batch[::2], batch[1::2], strict=True)]
        for number, micro_batch in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            if self.way is not None and len(micro_batches) > 1:
                self.way.is_accumulating = not is_last
            self.phase = Phase.FORWARD
            loss = self.forward(micro_batch)
            if len(micro_batches) > 1:
                loss = loss / len(micro_batches)
            self.loss = loss.detach() if number == 0 else self.loss + loss.detach()
            # that of the logits, or autocast's float32
            check_dtypes(self.config.precision, [("the loss", loss.dtype)])
            yield Phase.FORWARD
            if mode.has_backward:
                self.phase = Phase.BACKWARD
                with annotate(Range.BACKWARD):
                    self.backward(loss)
                    # frees the rest of autograd's graph; those milliseconds of the host belong to
                    # backward
                    del loss
                yield Phase.BACKWARD
                if is_last or self.config.parallel.shards_parameters:
                    yield from self._exchange()
        if mode is Mode.TRAIN:
            self.phase = Phase.OPTIMIZER
            self.update()
            yield Phase.OPTIMIZER

    def _exchange(self) -> Iterator[Phase]:
        """Finish the exchange of gradients, if several ranks share the step."""
        if self.way is not None:
            self.phase = Phase.COMMUNICATION
            with annotate(Range.COMMUNICATION):
                self.way.finish_gradient_synchronization()
            yield Phase.COMMUNICATION

    def forward(self, batch: Batch) -> Float[Tensor, ""]:
        """Mean cross-entropy of the next tokens; autocast spans the model and the loss, and
        nothing else.
        """
        with (
            self._grad(),
            annotate(Range.FORWARD),
            autocast(self.config.precision, self.config.device),
        ):
            return self._loss(*batch)

    def backward(self, loss: Float[Tensor, ""]) -> None:
        """Compute the gradients of the loss, which in fp16 is multiplied by the gradient scaler's
        factor first.
        """
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def update(self) -> None:
        """Let the optimizer update the parameters, then drop the gradients."""
        assert self.optimizer is not None
        with annotate(Range.OPTIMIZER):
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)

    def optimizer_state(self) -> Mapping[Tensor, dict[str, Any]]:
        """What the optimizer keeps of each parameter, by name; empty without an optimizer."""
        return {} if self.optimizer is None else self.optimizer.state

    def give_up_graph(self) -> None:
        """Run further steps eagerly, without the CUDA graphs."""
        if self.graph is not None:
            self.graph.release()
            self.graph = None

    def on_any_rank(self, is_so: bool) -> bool:
        """Whether `is_so` is true on any rank; all ranks of a shared step must call this."""
        if self.way is None:
            return is_so
        num_ranks = torch.tensor(int(is_so), device=self.config.device.value)
        dist.all_reduce(num_ranks)
        return bool(num_ranks)

    def loss_scale(self) -> float | None:
        """GradScaler's factor, which falls if and only if a step was skipped; None without a
        scaler. Synchronises.
        """
        return None if self.scaler is None else self.scaler.get_scale()

    def compiled_graphs(self) -> int:
        """Number of graphs that torch.compile has made so far; each recompilation adds one."""
        if self.config.compile is CompileMode.NONE:
            return 0
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])

    def compilation(self, before: Compilation | None = None) -> Compilation | None:
        """What torch.compile has done in this process, since `before` if that is given; None for
        an eager run.
        """
        if self.config.compile is CompileMode.NONE:
            return None
        from torch._dynamo.utils import calculate_time_spent, counters, get_compilation_metrics

        # A compile id is frame/attempt, so attempt 0 is no recompilation. Backward has the id of
        # its forward.
        ids = {str(metrics.compile_id) for metrics in get_compilation_metrics()}
        before = before or Compilation(seconds=0, graphs=0, graph_breaks=0, recompiles=0)
        recompiles = sum(not name.endswith("/0") for name in ids)
        return Compilation(
            seconds=calculate_time_spent()["total_wall_time"] - before.seconds,
            graphs=self.compiled_graphs() - before.graphs,
            graph_breaks=sum(counters["graph_break"].values()) - before.graph_breaks,
            recompiles=recompiles - before.recompiles,
        )

    def memory_now(self, moment: MomentName) -> MemoryMoment:
        """Bytes of parameters, gradients and optimizer state now, for the record; `moment` says
        when that is.
        """
        trained = self._trained()
        gradients = [tensor.grad for tensor in trained if tensor.grad is not None]
        state: list[Tensor] = []
        for values in self.optimizer_state().values():
            state += filter(torch.is_tensor, values.values())
        on_gpu = self.config.device is Device.CUDA
        return MemoryMoment(
            moment=moment,
            allocated_bytes=torch.cuda.memory_allocated() if on_gpu else None,
            parameters_bytes=_bytes(trained),
            gradients_bytes=_bytes(gradients),
            optimizer_state_bytes=_bytes(state),
        )

    def _trained(self) -> list[Tensor]:
        """The parameters that this rank keeps, whole or in part, and their copies in low
        precision.
        """
        tensors = [*self.model.parameters()]
        for weight in getattr(self.model, "weights", ()):
            copy = None if weight.copy is None else weight.copy.leaf
            parts = (weight.master, weight.remainder, copy)
            tensors += [part for part in parts if part is not None]
        return list({id(tensor): tensor for tensor in tensors}.values())


def reset_memory() -> dict[str, int]:
    """The counters of PyTorch's CUDA allocator now; their peaks start again from here."""
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_stats()


def memory_since(before: dict[str, int], graph_peak_bytes: int | None = None) -> Memory:
    """The work of PyTorch's CUDA allocator since `reset_memory` returned `before`.

    A replayed CUDA graph allocates nothing; its peak is that of its capture.
    """
    after = torch.cuda.memory_stats()
    return Memory(
        peak_allocated_bytes=max(after["allocated_bytes.all.peak"], graph_peak_bytes or 0),
        peak_reserved_bytes=after["reserved_bytes.all.peak"],
        segments_allocated=after["segment.all.allocated"] - before["segment.all.allocated"],
        alloc_retries=after["num_alloc_retries"] - before["num_alloc_retries"],
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors; a tensor that PyTorch has sharded counts with this rank's part."""
    num_bytes = 0
    for tensor in tensors:
        part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        num_bytes += part.nbytes
    return num_bytes


def with_own_vocabulary(config: RunConfig, model: nn.Module) -> RunConfig:
    """The configuration with the vocabulary that the user's own model turns out to have.

    A vocabulary that was asked for, other than the size's usual one, is kept.
    """
    tokens = torch.zeros(
        config.batch_size,
        config.model.context_length,
        dtype=torch.int64,
        device=config.device.value,
    )
    usual = SIZES.get(config.size, SIZES["tiny"]).vocab_size
    asked: int | None = config.model.vocab_size
    if asked == usual:
        asked = None
    low_precision = autocast(config.precision, config.device)
    vocab_size = vocabulary_of(model, tokens, low_precision, asked)
    return replace(config, model=replace(config.model, vocab_size=vocab_size))
