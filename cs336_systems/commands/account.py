"""`cs336 account`: what a step costs, from its configuration alone."""

from dataclasses import dataclass, field
from typing import Annotated

from cs336_systems.commands.flags import (
    Flat,
    ModelArguments,
    StepArguments,
    Switch,
    make_config,
    one_precision,
    unset,
)
from cs336_systems.commands.outcome import OK, UsageError, checked
from cs336_systems.config import Device, Mode, OptimizerKind, Precision, RunConfig
from cs336_systems.nvml import visible_gpus

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class AccountArguments:
    """Say what a training step costs without running it: parameters, FLOPs, and the peak of memory by what it holds.

    For an eager step on a GPU; no GPU and no torch are needed. Memory is predicted for NVIDIA Hopper: elsewhere up to
    48 MiB less is taken.
    """

    size: str = "small"
    """Preset: tiny, small, medium, large, xl, 2.7B, 10B, gpt2, gpt2-medium, gpt2-large, gpt2-xl."""
    context_length: Annotated[int | None, unset("INT", "512, and 1024 for gpt2")] = None
    """Tokens in a sequence."""
    batch_size: int = 4
    """Sequences in a batch."""
    mode: Mode = Mode.TRAIN
    """How much of a step: inference, forward, forward-backward, train."""
    precision: Precision = Precision.FP32
    """fp32, tf32, bf16 or fp16 (autocast around forward and loss)."""
    mixed_precision: Switch = False
    """Short for --precision bf16."""
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    """adamw: written out, one tensor at a time. foreach, fused: PyTorch's."""
    model: Flat[ModelArguments] = field(default_factory=ModelArguments)
    fit: Switch = False
    """Say the largest batch, and the longest context, that fit."""
    memory_gib: Annotated[float | None, unset("GIB", "this machine's GPU")] = None
    """Memory of the GPU for --fit (GiB)."""
    top: int = 12
    """Rows of the peak's contents to show."""

    def config(self) -> RunConfig:
        """The run that these flags mean; raise ValueError where they mean none."""
        return make_config(
            self.model, StepArguments(batch_size=self.batch_size, optimizer=self.optimizer), Device.CUDA,
            size=self.size,
            context_length=self.context_length,
            mode=self.mode,
            precision=one_precision(self.precision, self.mixed_precision),
            warmup_steps=5,
        )  # fmt: skip

    def memory_bytes(self) -> int | None:
        """Memory of the GPU that is to hold the step; None without --fit. Raises ValueError where none is known."""
        if not self.fit:
            return None
        if self.memory_gib is not None:
            if not 0 < self.memory_gib < 1e6:
                raise ValueError(f"--memory-gib must be positive and below a million, got {self.memory_gib}")
            return round(self.memory_gib * GIB)
        if not (gpus := visible_gpus()):
            raise ValueError("--fit needs --memory-gib on a machine without an NVIDIA GPU")
        return gpus[0].memory_bytes


def run(arguments: AccountArguments) -> int:
    """Print the tables."""
    config, memory_bytes = checked(arguments.config), checked(arguments.memory_bytes)
    if config.model_factory is not None:
        raise UsageError("the cost of a model of your own is not known from its flags: leave --model out")
    from cs336_systems.report.account import account_tables
    from cs336_systems.report.terminal import print_table

    for table in account_tables(config, memory_bytes, arguments.top):
        print_table(table)
    return OK
