"""Settings of the step itself: its model, batch, mode, precision, optimizer and loss."""

from dataclasses import dataclass, fields
from typing import Annotated

from ..choices import CompileMode, Device, LossKind, Mode, OptimizerKind, Precision, Profiler
from ..model_file import is_model_file
from ..rules import (
    GRADIENTS,
    NOT_OF_A_MODULE,
    OUR_MODEL,
    OWN_MODEL,
    UNSCALED,
    is_import_name,
    needs,
)
from ..settings import ByDevice, Rule, Setting, shortcut
from ..shapes import SIZES, ModelConfig

MOST_BF16_SUMS = 128
"""Most micro-batches whose gradients are added up in bf16: half of those after which equal ones no
longer add anything, as bf16 has 8 bits.
"""
MODULE_DEPTH = 3
"""Usual number of levels of modules that have ranges, in models that have no ranges of their
own.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """The step that is run, before what makes it faster and before it is shared among ranks."""

    size: Annotated[
        str,
        Setting(
            f"Preset: {', '.join(SIZES)}.",
            metavar="NAME",
            plural="sizes",
            word="",
            label=0,
            by_device=ByDevice(
                gpu="small",
                cpu="tiny",
                gpu_sweep=("small", "medium", "large", "xl", "2.7B"),
                cpu_sweep=("tiny",),
            ),
            csv_place=1,
            noted="never",
            is_common=True,
            leads_flags=True,
        ),
    ]
    """Name of the preset that `model` came from, or `custom`."""
    model: ModelConfig
    batch_size: Annotated[
        int,
        Setting(
            "Sequences in a batch.",
            plural="batch_size",
            label=4,
            least=1,
            heading="batch",
            note="batch {}",
            csv_place=9,
            name_place=3,
            noted="always",
            is_common=True,
        ),
    ] = 4
    accumulate_steps: Annotated[
        int,
        Setting(
            "Micro-batches of a step, each of --batch-size sequences: forward and backward run for "
            "each, their gradients are added up, and the optimizer runs once. With --cast-once, as "
            f"with --fast, they are added up in bf16, at most {MOST_BF16_SUMS} of them.",
            plural="accumulate_steps",
            least=1,
            most=2**16,
            heading="micro-batches",
            label=4,
            note="{} micro-batches a step",
            rules=(
                GRADIENTS,
                Rule(
                    lambda run: run.parallel.adds_micro_batches,
                    "{flag} cannot be combined with --parallel {config.parallel}, which "
                    "exchanges gradients in every backward pass",
                ),
                Rule(
                    lambda run: run.compile is not CompileMode.REDUCE_OVERHEAD,
                    "{flag} cannot be combined with --compile reduce-overhead, whose graphs "
                    "overwrite the gradients of the micro-batch before",
                ),
                Rule(
                    lambda run: not run.cast_once or run.accumulate_steps <= MOST_BF16_SUMS,
                    "{flag} must be at most "
                    f"{MOST_BF16_SUMS} with --cast-once, which adds up gradients in bf16: small "
                    "ones would no longer change a larger sum. Use a larger --batch-size, or leave "
                    "out --cast-once (and --fast)",
                ),
            ),
        ),
    ] = 1
    mode: Annotated[
        Mode,
        Setting(
            "How much of a step: inference (no graph), forward (with the graph), "
            "forward-backward, train.",
            plural="modes",
            word="",
            label=0,
            csv_place=10,
            name_place=1,
            noted="always",
            is_common=True,
            leads_flags=True,
        ),
    ] = Mode.TRAIN
    precision: Annotated[
        Precision,
        Setting(
            "fp32 (true fp32), tf32, bf16 or fp16 (autocast around forward and loss).",
            plural="precisions",
            several="With fp32 and another, the tables get a speed-up column.",
            chosen_by_fast=True,
            word="",
            label=0,
            rules=(
                needs(
                    "--device cuda",
                    lambda run: run.precision is not Precision.TF32 or run.device is Device.CUDA,
                    "--device {config.device}",
                    subject="--precision tf32",
                ),
            ),
            csv_place=11,
            name_place=2,
            noted="always",
            is_common=True,
            leads_flags=True,
        ),
    ] = Precision.FP32
    device: Annotated[
        Device, Setting(word="", label=None, named_last=True, noted="never", always_in_csv=True)
    ] = Device.CPU
    warmup_steps: Annotated[
        int,
        Setting(
            "Steps before the timed ones.",
            plural="warmup_steps",
            several="Several make a warm-up study.",
            least=0,
            heading="warm-up",
            label=2,
            note="{} warm-up steps",
            notes={1: "1 warm-up step"},
            noted="always",
            always_in_csv=True,
            without_cost=True,
            is_common=True,
            leads_flags=True,
        ),
    ] = 5
    optimizer: Annotated[
        OptimizerKind,
        Setting(
            "adamw: written out, one tensor at a time. foreach, fused: PyTorch's. own: that of "
            "--own-optimizer.",
            plural="optimizer",
            chosen_by_fast=True,
            word="",
            note="{} optimizer",
            rules=(
                needs(
                    "--own-optimizer",
                    lambda run: run.optimizer is not OptimizerKind.OWN or run.own_optimizer,
                    "none",
                ),
            ),
            csv_place=14,
            noted="always",
            is_common=True,
        ),
    ] = OptimizerKind.ADAMW
    own_optimizer: Annotated[
        str | None,
        Setting(
            "Your own optimizer as package.module:Class, a torch.optim.Optimizer; or a sharded "
            "one, whose optimizer_cls is that of a rank's share (torch.optim.AdamW). A sweep has "
            "it beside --optimizer.",
            metavar="MODULE:CLASS",
            default="none",
            word="",
            column="",
            rules=(
                Rule(
                    lambda run: is_import_name(run.own_optimizer),
                    NOT_OF_A_MODULE + "{config.own_optimizer!r}",
                ),
                UNSCALED,
                Rule(
                    lambda run: not run.shard_optimizer,
                    "{flag} cannot be combined with --shard-optimizer, ours",
                ),
            ),
            used_with=("optimizer", (OptimizerKind.OWN,)),
        ),
    ] = None
    compile: Annotated[
        CompileMode,
        shortcut(
            "Mode of torch.compile; none is eager.",
            plural="compile",
            chosen_by_fast=True,
            note="compile {}",
            csv_place=13,
            noted="first",
            is_common=True,
        ),
    ] = CompileMode.NONE
    compile_blocks: Annotated[
        bool,
        shortcut(
            "Compile each block on its own instead of the whole model, which takes seconds "
            "instead of tens of seconds.",
            column="",
            rules=(
                OUR_MODEL,
                needs(
                    "a mode, as in --compile default",
                    lambda run: run.compile is not CompileMode.NONE,
                    "--compile {config.compile}",
                ),
            ),
        ),
    ] = False
    model_factory: Annotated[
        str | None,
        Setting(
            "Your own model: package.module:factory, or hf:PATH of a config.json from which "
            "transformers makes it with random weights. The factory is called with the arguments "
            f"that its signature names, of {', '.join(size.name for size in fields(ModelConfig))}. "
            "Its model maps int64 tokens (batch, sequence) to logits (batch, sequence, "
            "vocabulary).",
            flag="model",
            metavar="MODULE:FACTORY",
            default="this project's model",
            word="",
            column="",
            rules=(
                Rule(
                    lambda run: (
                        is_model_file(run.model_factory) or is_import_name(run.model_factory)
                    ),
                    "model must be package.module:factory or hf:PATH, got {config.model_factory!r}",
                ),
            ),
            is_common=True,
        ),
    ] = None
    blocks: Annotated[
        tuple[int, ...] | None,
        Setting(
            rules=(
                Rule(
                    lambda run: isinstance(run.blocks, tuple) and run.model_factory is not None,
                    "blocks are kinds of those of your own model, got {config.blocks!r}",
                ),
            )
        ),
    ] = None
    """Blocks that are left of a user's own model, by the numbers of their kinds, where one of each
    kind stands for the others; None for all.
    """
    loss: Annotated[
        LossKind,
        Setting(
            "cross-entropy of the logits, or model: the loss that your own model returns when its "
            "forward is given `targets` (the next tokens) or `labels` (the tokens).",
            word="loss",
            note="loss of the {}",
            rules=(OWN_MODEL,),
        ),
    ] = LossKind.CROSS_ENTROPY
    module_depth: Annotated[
        int,
        Setting(
            "How many levels of your own model's modules have ranges of their own in profiles.",
            least=0,
            label=6,
            note="modules to depth {}",
            rules=(OWN_MODEL,),
            without_cost=True,
        ),
    ] = MODULE_DEPTH
    profiler: Annotated[
        Profiler,
        Setting(
            word="",
            rules=(
                needs(
                    "--device cuda, whose kernels it sees (--profile has a CPU's operators)",
                    lambda run: run.profiler is not Profiler.NSYS or run.device is Device.CUDA,
                    "--device {config.device}",
                    subject="--nsys",
                ),
                needs(
                    "--device cuda, as it records PyTorch's CUDA allocator (cs336 account "
                    "--details foretells it)",
                    lambda run: run.profiler is not Profiler.MEMORY or run.device is Device.CUDA,
                    "--device {config.device}",
                    subject="--memory",
                ),
            ),
            csv_place=30,
            name_place=16,
            noted="never",
            without_cost=True,
        ),
    ] = Profiler.NONE
    """A profiled run is slower, so it is a run of its own, and its times are never published."""
