"""One step of training, or the part of it that the mode asks for, told to a clock phase by phase."""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float, Int
from torch import Tensor, nn

from cs336_systems.config import CompileMode, Mode, ModelConfig, Phase, RunConfig
from cs336_systems.measure.clock import Clock, StepTimes
from cs336_systems.measure.precision import AUTOCAST_DTYPES, autocast, check_dtypes, make_grad_scaler
from cs336_systems.model.annotate import annotate
from cs336_systems.model.batches import Batch, make_batches
from cs336_systems.model.fast.cross_entropy import fused_cross_entropy
from cs336_systems.model.fast.master_adamw import MasterAdamW
from cs336_systems.model.fast.step_graph import StepGraph
from cs336_systems.model.fast.weights import Weight, cast_linear_weights, drop_gradients
from cs336_systems.model.optimizer import make_optimizer
from cs336_systems.model.transformer import TransformerLM, num_parameters
from cs336_systems.ranges import Range

Loss = Callable[[Tensor, Tensor], Tensor]
"""The mean loss of a batch, from its tokens and its targets."""


def load_factory(name: str) -> Callable[..., nn.Module]:
    """Import `package.module:factory`, looking in the current directory too; raise ValueError where it is not there."""
    module_name, _, attribute = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--model {name}: {error}") from error
    if not callable(found):
        raise ValueError(f"--model {name}: needed a callable that makes a model, got {type(found).__name__}")
    return found


def call_factory(factory: Callable[..., nn.Module], model: ModelConfig) -> nn.Module:
    """Call the factory with the fields of `model` that its signature names."""
    known = {field.name: getattr(model, field.name) for field in fields(model)}
    parameters = inspect.signature(factory).parameters.values()
    missing = [p.name for p in parameters if p.name not in known and p.default is p.empty and p.kind not in (2, 4)]
    if missing:
        raise ValueError(f"the model factory needs {', '.join(missing)}; what there is: {', '.join(known)}")
    made = factory(**{p.name: known[p.name] for p in parameters if p.name in known})
    if not isinstance(made, nn.Module):
        raise ValueError(f"the model factory must return a torch.nn.Module, got {type(made).__name__}")
    return made


def make_model(config: RunConfig) -> nn.Module:
    """The model of the configuration, made and initialised on its device."""
    with torch.device(config.device.value):
        if config.model_factory is None:
            model = TransformerLM(config.model)
            if config.checkpoint_blocks:
                importlib.import_module("torch._dynamo")  # the first checkpoint imports it otherwise, in a step
            model.checkpoint_blocks = config.checkpoint_blocks
            model.lm_head.multiple = config.pad_vocabulary
            return model
        return call_factory(load_factory(config.model_factory), config.model).to(config.device.value)


def compile_loss(loss: Loss, model: nn.Module, config: RunConfig) -> Loss:
    """What computes the loss of a batch, with `model` in it, compiled as the configuration says; itself for `none`."""
    if config.compile is CompileMode.NONE:
        return loss
    mode = None if config.compile is CompileMode.DEFAULT else config.compile.value
    if config.compile_blocks:
        for block in cast(TransformerLM, model).layers:
            block.compile(mode=mode)
        return loss
    return cast(Loss, torch.compile(loss, mode=mode))


class TrainingStep:
    """Forward, backward and optimizer of one model on one device; each call is one step."""

    def __init__(self, config: RunConfig, model: nn.Module | None = None) -> None:
        self.config = config
        self.model = make_model(config) if model is None else model
        parameters = ((f"parameter {name}", parameter.dtype) for name, parameter in self.model.named_parameters())
        check_dtypes(config.precision, [("PyTorch's default type", torch.get_default_dtype()), *parameters])
        self.model.train(config.mode is not Mode.INFERENCE)
        self.batches = make_batches(config)
        self.scaler = make_grad_scaler(config.precision, config.device)
        self.num_parameters = num_parameters(self.model)
        self.weights: tuple[Weight, ...] = ()
        """With their copies; empty where every step casts the parameters."""
        if config.cast_once:
            self.weights = cast_linear_weights(self.model, AUTOCAST_DTYPES[config.precision], fp8=config.fp8)
        if config.fused_blocks:
            cast(TransformerLM, self.model).fuse_blocks()
        self.optimizer = self._make_optimizer()
        self.phase = Phase.DATA
        """What the step is at, for whoever has to say where it failed."""
        self.loss: Float[Tensor, ""]
        """Of the last step; in a graph it stays where it is, to be overwritten by the next."""
        self._loss = compile_loss(self._loss_of, self.model, config)
        self._criterion = _make_criterion(config)
        self._grad = torch.no_grad if config.mode is Mode.INFERENCE else contextlib.nullcontext
        recorded = tuple(phase for phase in config.phases if phase is not Phase.DATA)
        self.graph = StepGraph(self._phases, recorded, self._captured) if config.cuda_graph else None

    def _make_optimizer(self) -> torch.optim.Optimizer | None:
        config = self.config
        if config.mode is not Mode.TRAIN:
            return None
        if config.cast_once:
            return MasterAdamW(self.weights, config.learning_rate)
        return make_optimizer(
            config.optimizer, self.model.parameters(), lr=config.learning_rate, capturable=config.cuda_graph
        )

    def __call__(self, clock: Clock) -> tuple[StepTimes, Float[Tensor, ""]]:
        """Run one step by `clock`; return its times and its loss, still on the device."""
        if self.config.compile is CompileMode.REDUCE_OVERHEAD:
            torch.compiler.cudagraph_mark_step_begin()
        with annotate(Range.STEP):
            self.phase = Phase.DATA
            clock.start()
            batch = self.batches()
            if self.config.tokens is not None:
                clock.lap(Phase.DATA)
            self.phase = Phase.FORWARD
            if self.graph:
                self.graph(batch, clock.lap)
            else:
                self._run(batch, clock)
            times = clock.stop()
        # before a capture too: gradients that it found would be added to in every replay
        if self.config.mode is Mode.FORWARD_BACKWARD:
            self.model.zero_grad(set_to_none=True)
            drop_gradients(self.weights)
        return times, self.loss

    def _run(self, batch: Batch, clock: Clock) -> None:
        for phase in self._phases(batch):
            clock.lap(phase)

    def _phases(self, batch: Batch) -> Iterator[Phase]:
        """Launch the phases that the mode asks for, one after the other."""
        mode = self.config.mode
        loss = self.forward(batch)
        self.loss = loss.detach()
        check_dtypes(self.config.precision, [("the loss", loss.dtype)])  # that of the logits, or autocast's float32
        yield Phase.FORWARD
        if mode in (Mode.FORWARD_BACKWARD, Mode.TRAIN):
            self.phase = Phase.BACKWARD
            with annotate(Range.BACKWARD):
                self.backward(loss)
                del loss  # frees what is left of the graph, which takes the host milliseconds that belong to backward
            yield Phase.BACKWARD
        if mode is Mode.TRAIN:
            self.phase = Phase.OPTIMIZER
            self.update()
            yield Phase.OPTIMIZER

    def forward(self, batch: Batch) -> Float[Tensor, ""]:
        """Mean cross-entropy of the next tokens; autocast spans the model and the loss, and nothing else."""
        with self._grad(), annotate(Range.FORWARD), autocast(self.config.precision, self.config.device):
            return self._loss(*batch)

    # below, plain tensors: the compiler cannot trace the shape checks of tests
    def _loss_of(self, tokens: Tensor, targets: Tensor) -> Tensor:
        config = self.config
        # these criteria cut off the surplus themselves, in their kernels
        if config.fused_loss or config.compile_blocks:
            model = cast(TransformerLM, self.model)
            logits = model.lm_head(model.hidden(tokens), with_surplus=True)
        else:
            logits = check_logits(self.model(tokens), targets, config.model.vocab_size)
        with annotate(Range.LOSS):
            return self._criterion(logits, targets, config.model.vocab_size)

    def logits(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq vocab"]:
        """What the model, in the precision and with the weights of this step, makes of `tokens`."""
        with torch.no_grad(), autocast(self.config.precision, self.config.device):
            return cast(Tensor, self.model(tokens))

    def backward(self, loss: Float[Tensor, ""]) -> None:
        """Gradients of the loss, scaled where the precision needs it."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def update(self) -> None:
        """Optimizer step, and gradients dropped."""
        assert self.optimizer is not None
        with annotate(Range.OPTIMIZER):
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)

    def loss_scale(self) -> float | None:
        """GradScaler's factor, which falls exactly when a step was skipped; None without one. Synchronises."""
        return None if self.scaler is None else self.scaler.get_scale()

    def _captured(self) -> None:
        if isinstance(self.optimizer, MasterAdamW):
            self.optimizer.captured()


Criterion = Callable[[Tensor, Tensor, int], Tensor]
"""The mean loss of logits, of which only so many columns count."""


def _make_criterion(config: RunConfig) -> Criterion:
    if config.fused_loss:
        return fused_cross_entropy
    return torch.compile(_cross_entropy) if config.compile_blocks else _cross_entropy


def _cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    if logits.shape[-1] > vocab_size:
        logits = logits[..., :vocab_size]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def check_logits(logits: object, targets: Tensor, vocab_size: int) -> Tensor:
    """The logits; raise ValueError where a user's own model returned something else."""
    if not isinstance(logits, Tensor) or logits.shape != (*targets.shape, vocab_size):
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"the model must return logits of shape {(*targets.shape, vocab_size)}, got {found}")
    return logits
