"""What to run: the settings of a step, with choices and shapes, which others import from here."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import itemgetter
from types import MappingProxyType
from typing import Annotated, Any

from .choices import (
    Arch,
    Attention,
    CompileMode,
    Device,
    LossKind,
    Mode,
    OptimizerKind,
    Parallel,
    Phase,
    Precision,
    Profiler,
    SdpaBackend,
)
from .model_file import is_model_file
from .rules import (
    BF16,
    CAST_ONCE,
    FUSED_BLOCKS,
    FUSED_OPTIMIZER,
    NOT_OF_A_MODULE,
    ON_GPU,
    OUR_MODEL,
    SDPA,
    TRAINING,
    UNSCALED,
    WHOLE_GRADIENTS,
    is_import_name,
    is_unicode,
    needs,
    not_with,
)
from .settings import ByDevice, Rule, Setting, check, declared, in_words, make_choices, non_defaults
from .shapes import MAX_PARAMETERS, SIZES, ModelConfig

__all__ = (
    "BUCKET_MIB",
    "EAGER_STEPS_BEFORE_GRAPH",
    "FLASH_4_HEADS",
    "FP8_MULTIPLE",
    "MAX_ELEMENTS",
    "MAX_MEASURED_RANKS",
    "MAX_PADDING",
    "MAX_PARAMETERS",
    "MAX_RANKS",
    "MODULE_DEPTH",
    "OF_SEVERAL_RANKS",
    "PACKED_MULTIPLE",
    "SETTINGS",
    "SIZES",
    "UNSIZED",
    "USED_WITH",
    "Arch",
    "Attention",
    "CompileMode",
    "Device",
    "LossKind",
    "Mode",
    "ModelConfig",
    "OptimizerKind",
    "Parallel",
    "Phase",
    "Precision",
    "Profiler",
    "RunConfig",
    "SdpaBackend",
    "is_import_name",
)

MAX_ELEMENTS = 2**42
"""Bound on the elements of the logits and of one block's attention scores, which fit no device
either.
"""
FP8_MULTIPLE = 16
"""All sizes of a matmul in fp8 must be multiples of this, for cuBLAS."""
PACKED_MULTIPLE = 8
"""Copies in bf16 need a d_model that is a multiple of this: then each part of a packed one
begins at 16 bytes.
"""
FLASH_4_HEADS = 64, 96, 128
"""Widths of heads for FlashAttention 4, whose gradient of the queries is wrong on Hopper for a
width of 80.
"""
MAX_RANKS = 2**20
"""Most ranks of one step, more than any step has had: a step of many ranks is predicted, and not
measured.
"""
MAX_MEASURED_RANKS = 64
"""Most ranks of a measured step: they are processes of one machine, which has at most 16 GPUs,
or more CPU cores.
"""
BUCKET_MIB = 25
"""Usual MiB of gradients that are averaged together, as in PyTorch's DistributedDataParallel."""
MAX_PADDING = 2**16
"""Largest multiple that a vocabulary may be padded to; no kernel needs a larger one."""
MODULE_DEPTH = 3
"""Usual number of levels of modules that have ranges, in models that have no ranges of their
own.
"""
UNSIZED = "own"
"""`size` of a user's own model whose factory takes no sizes."""
EAGER_STEPS_BEFORE_GRAPH = 3
"""Eager steps before a CUDA graph is recorded: one compiles, one makes the optimizer's state,
one runs with both.
"""

_shortcut = partial(Setting, is_shortcut=True)
"""Declares a setting that makes the same step faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One configuration to measure, complete enough for a fresh process to run it.

    To add a setting, add a field here, with its declaration, and the code that obeys it.
    """

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
            "each, their gradients are added up, and the optimizer runs once.",
            plural="accumulate_steps",
            least=1,
            most=2**16,
            heading="micro-batches",
            label=4,
            note="{} micro-batches a step",
            rules=(
                needs(
                    "gradients, so --mode forward-backward or train",
                    lambda run: run.mode in (Mode.FORWARD_BACKWARD, Mode.TRAIN),
                    "--mode {config.mode}",
                ),
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
                    lambda run: not (run.cast_once and run.parallel.shards_parameters),
                    "{flag} cannot be combined with --cast-once and --parallel "
                    "{config.parallel} together yet: leave out one of them",
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
        _shortcut(
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
        _shortcut(
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
            "Your own model as package.module:factory, or hf:PATH of a configuration file "
            "(config.json) from which transformers makes it, with random weights. A factory is "
            "called with those of "
            f"{', '.join(size.name for size in fields(ModelConfig))} that its signature names; "
            "the model it returns maps int64 (batch, sequence) to logits (batch, sequence, "
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
            rules=(
                needs(
                    "your own model, as in --model package.module:factory",
                    lambda run: run.loss is LossKind.CROSS_ENTROPY or run.model_factory is not None,
                    "none",
                ),
            ),
        ),
    ] = LossKind.CROSS_ENTROPY
    module_depth: Annotated[
        int,
        Setting(
            "How many levels of your own model's modules have ranges of their own in profiles.",
            least=0,
            label=6,
            note="modules to depth {}",
            rules=(
                needs(
                    "your own model, as in --model package.module:factory",
                    lambda run: run.model_factory is not None,
                    "none",
                ),
            ),
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
                    "--device cuda, as it records PyTorch's CUDA allocator",
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
    checkpoint_blocks: Annotated[
        int,
        Setting(
            "Activation checkpointing: save only the input of each group of this many blocks "
            "(with --fused-blocks, the residual stream and the branch), and recompute the rest in "
            "backward; 0 saves everything.",
            plural="checkpoint_blocks",
            several="Several make a study of what it costs and saves.",
            least=0,
            default="0, and with --fast 1 where the step does not fit",
            word="checkpoint",
            rules=(
                needs(
                    "1 for your own model, as what it does between its blocks is not known",
                    lambda run: run.model_factory is None or run.checkpoint_blocks == 1,
                    "{config.checkpoint_blocks}",
                ),
            ),
            note="a checkpoint every {} blocks",
            notes={0: "no checkpoints", 1: "a checkpoint every block"},
            csv_place=20,
            leads_flags=True,
        ),
    ] = 0
    selective_checkpoints: Annotated[
        bool,
        _shortcut(
            "Selective activation checkpointing (Korthikanti et al. 2022), for long contexts: "
            "checkpoints also save q, k, v and the result of attention, so that backward does not "
            "compute attention again. Needs --checkpoint-blocks 1, --fused-blocks and fused "
            "attention.",
            word="selective",
            note="selective checkpoints",
            rules=(
                OUR_MODEL,
                needs(
                    "--checkpoint-blocks 1, as each block is a checkpoint",
                    lambda run: run.checkpoint_blocks == 1,
                    "--checkpoint-blocks {config.checkpoint_blocks}",
                ),
                SDPA,
                FUSED_BLOCKS,
            ),
            group="memory",
        ),
    ] = False
    keep_hidden: Annotated[
        int,
        _shortcut(
            "Of this many blocks, selective checkpoints also save the result of the first matmul "
            "of the feed-forward network, which is most of what they recompute. Needs "
            "--selective-checkpoints.",
            default="0, and with --fast as many as fit",
            least=0,
            word="keep hidden",
            note="{} blocks keep hidden activations",
            rules=(
                needs("--selective-checkpoints", lambda run: run.selective_checkpoints, "none"),
                Rule(
                    lambda run: run.keep_hidden <= run.model.num_layers,
                    "{flag} {config.keep_hidden} is more than the {config.model.num_layers} "
                    "blocks of the model",
                ),
            ),
            group="memory",
        ),
    ] = 0
    pad_vocabulary: Annotated[
        int,
        _shortcut(
            "Compute logits for a vocabulary rounded up to a multiple of this; the loss leaves "
            "the added logits out.",
            chosen_by_fast=True,
            least=1,
            most=MAX_PADDING,
            rules=(OUR_MODEL,),
            word="padded to",
            note="vocabulary padded to a multiple of {}",
            notes={1: "vocabulary not padded"},
            csv_place=21,
        ),
    ] = 1
    cast_once: Annotated[
        bool,
        _shortcut(
            "Keep a bf16 copy of each linear layer's weights beside the fp32 masters, so that "
            "autocast need not cast them in every step. The optimizer updates both.",
            note="weights cast once",
            rules=(
                OUR_MODEL,
                BF16,
                FUSED_OPTIMIZER,
                needs(
                    f"a d_model that is a multiple of {PACKED_MULTIPLE}, with which q, k and v "
                    "are one matmul",
                    lambda run: run.model.d_model % PACKED_MULTIPLE == 0,
                    "{config.model.d_model}",
                ),
                Rule(
                    lambda run: not run.model.num_kv_heads,
                    "{flag} cannot be combined with --num-kv-heads, as its q, k and v are equally "
                    "wide",
                ),
            ),
            csv_place=22,
        ),
    ] = False
    split_masters: Annotated[
        bool,
        _shortcut(
            "Of each fp32 master store only its bf16 copy and the 16 bits that the copy lacks, "
            "which give the master to the last bit: 2 bytes less for each parameter, and 2 bytes "
            "less to read and write in each update. Masters that the model reads itself stay "
            "whole. Needs --cast-once.",
            note="masters split",
            rules=(CAST_ONCE, TRAINING),
        ),
    ] = False
    fused_loss: Annotated[
        bool,
        _shortcut(
            "Fused cross-entropy: forward overwrites the logits with their gradient, which saves "
            "time and memory; in low precision no fp32 copy of the logits is made.",
            note="fused loss",
            rules=(
                OUR_MODEL,
                UNSCALED,
                needs(
                    "--compile-blocks, as a whole model has its loss compiled in",
                    lambda run: run.compile_blocks or run.compile is CompileMode.NONE,
                    "--compile {config.compile}",
                ),
            ),
            csv_place=25,
        ),
    ] = False
    loss_chunks: Annotated[
        int,
        _shortcut(
            "Compute logits and their loss for this many parts of the tokens, one part after the "
            "other, each with its gradients, so that forward holds the logits of one part only. "
            "The head's gradient is added up in bf16. Needs --fused-loss and --cast-once.",
            default="1, and with --fast more where memory is scarce",
            least=1,
            word="loss chunks",
            note="loss in {} parts",
            rules=(needs("--fused-loss", lambda run: run.fused_loss, "none"), CAST_ONCE),
        ),
    ] = 1
    fused_blocks: Annotated[
        bool,
        _shortcut(
            "Fused kernels between the matmuls: residual addition with norm, bias with GELU, and "
            "the embedding's backward in one pass, whose sums may differ in the last bit from "
            "step to step. The sums of the residual stream are saved for backward in fp32, which "
            "takes a few percent of the memory. Needs --cast-once.",
            rules=(OUR_MODEL, CAST_ONCE),
            note="fused blocks",
            csv_place=27,
        ),
    ] = False
    fused_activations: Annotated[
        bool,
        _shortcut(
            "Compute GELU or SwiGLU within the matmul before it, and its derivative within the "
            "matmul of backward, so that they have no kernels of their own. On a GPU this needs "
            "QuACK's matmuls (pip install '.[fused]') and the Hopper generation; --fast uses it "
            "where it finds both. Needs --fused-blocks.",
            note="activations within matmuls",
            rules=(
                FUSED_BLOCKS,
                needs(
                    f"a d_ff that is a multiple of {PACKED_MULTIPLE}, as its matmuls load it",
                    lambda run: run.model.d_ff % PACKED_MULTIPLE == 0,
                    "{config.model.d_ff}",
                ),
                Rule(
                    lambda run: not run.selective_checkpoints,
                    "{flag} cannot be combined with --selective-checkpoints, which compute the "
                    "activation again",
                ),
                Rule(
                    lambda run: not run.fp8,
                    "{flag} cannot be combined with --fp8, whose matmuls are others",
                ),
            ),
        ),
    ] = False
    packed_attention: Annotated[
        bool,
        _shortcut(
            "Compute attention with FlashAttention 4, in the place of the kernel that "
            "--sdpa-backend names; in forward cuDNN computes the shapes for which it is faster. "
            "Queries, keys and values are read where one matmul has written them side by side, "
            "and their gradients are written side by side. On a GPU this needs the package (pip "
            "install '.[fused]') and the Hopper generation; --fast uses it where it finds both, "
            "unless --sdpa-backend is given. Needs --fused-blocks and --attention sdpa.",
            note="FlashAttention 4 on packed heads",
            rules=(
                FUSED_BLOCKS,
                SDPA,
                Rule(
                    lambda run: run.model.sdpa_backend is not SdpaBackend.MATH,
                    "{flag} cannot be combined with --sdpa-backend math, which writes attention "
                    "out",
                ),
                needs(
                    f"heads of a width in {FLASH_4_HEADS}, for which FlashAttention 4's gradients "
                    "were checked",
                    lambda run: run.model.d_head in FLASH_4_HEADS,
                    "{config.model.d_head}",
                ),
            ),
        ),
    ] = False
    fp8: Annotated[
        bool,
        _shortcut(
            "Compute the linear layers of the blocks in fp8, with scales computed anew in every "
            "step. It is for large models, on Ada, Hopper and newer GPUs. It rounds more coarsely "
            "than bf16, so --fast uses it only together with this flag. MFU is still the share of "
            "the bf16 peak.",
            note="blocks in fp8",
            rules=(
                OUR_MODEL,
                BF16,
                CAST_ONCE,
                Rule(lambda run: not run.fp8_misfit, "{config.fp8_misfit}"),
            ),
            csv_place=26,
        ),
    ] = False
    bf16_stream: Annotated[
        bool,
        _shortcut(
            "Keep the residual stream and its gradient in bf16, in the place of fp32 under "
            "autocast: the kernels of norms move half of the bytes or two thirds, and what "
            "backward reads of the stream takes half of the memory. Needs --fused-blocks.",
            note="residual stream in bf16",
            rules=(FUSED_BLOCKS,),
        ),
    ] = False
    bf16_moments: Annotated[
        bool,
        _shortcut(
            "Keep AdamW's two moments in bf16, rounded up or down at random so that they are "
            "right on average: 4 bytes less for each parameter, and 20 bytes in the place of 28 "
            "to read and write in each step. The weights that are updated stay in fp32. Losses "
            "differ a little, so --fast uses it only together with this flag. Needs --cast-once.",
            note="AdamW's moments in bf16",
            rules=(CAST_ONCE, TRAINING),
        ),
    ] = False
    cuda_graph: Annotated[
        bool,
        _shortcut(
            "Record the step as CUDA graphs, one for each phase, and replay these. Needs at least "
            f"--warmup-steps {EAGER_STEPS_BEFORE_GRAPH + 1}.",
            word="graph",
            note="each phase a CUDA graph",
            rules=(
                UNSCALED,
                FUSED_OPTIMIZER,
                needs(
                    "a mode of --compile without graphs of its own",
                    lambda run: run.compile is not CompileMode.REDUCE_OVERHEAD,
                    "--compile {config.compile}",
                ),
                Rule(
                    lambda run: run.profiler is not Profiler.MEMORY,
                    "{flag} cannot be combined with --memory: a replayed graph allocates nothing",
                ),
                needs(
                    f"at least --warmup-steps {EAGER_STEPS_BEFORE_GRAPH + 1}: it records the step "
                    f"after {EAGER_STEPS_BEFORE_GRAPH} others",
                    lambda run: run.warmup_steps > EAGER_STEPS_BEFORE_GRAPH,
                    "{config.warmup_steps}",
                ),
                ON_GPU,
            ),
            csv_place=23,
        ),
    ] = False
    update_in_backward: Annotated[bool, _shortcut(note="weights updated during backward")] = False
    """In records of earlier versions only: no flag asks for it, and no step does it."""
    expandable_segments: Annotated[
        bool,
        _shortcut(
            "Let PyTorch's allocator grow its segments, so that hardly any memory is lost in gaps "
            "between tensors, for steps that almost fill the GPU.",
            note="expandable segments",
            rules=(
                ON_GPU,
                Rule(
                    lambda run: run.profiler is not Profiler.MEMORY,
                    "{flag} cannot be combined with --memory: its history is that of fixed "
                    "segments",
                ),
                Rule(
                    lambda run: not run.parallel.writes_to_others,
                    "{flag} cannot be combined with --parallel {config.parallel}, whose ranks "
                    "open each other's memory",
                ),
                Rule(
                    lambda run: not (run.cuda_graph and run.is_shared),
                    "{flag} cannot be combined with --cuda-graph on several ranks: NCCL registers "
                    "what a graph sends",
                ),
            ),
            group="memory",
        ),
    ] = False
    parallel: Annotated[
        Parallel,
        Setting(
            "Share each step among --ranks processes, each with its own batch. Ours: ddp-naive "
            "(one all-reduce for each parameter after backward), ddp-flat (one for all), "
            "ddp-overlap (during backward), ddp-push (during backward, by copies to the other "
            "GPUs, which slow computing less than all-reduces do), fsdp (parameters sharded, "
            "gathered ahead of use), fsdp-push (the same by copies from and to the other GPUs). "
            "PyTorch's: ddp (DistributedDataParallel), fsdp2 (fully_shard). own: that of "
            "--own-ddp.",
            plural="parallel",
            word="",
            note="{}",
            rules=(
                needs(
                    "gradients, so --mode forward-backward or train",
                    lambda run: run.mode in (Mode.FORWARD_BACKWARD, Mode.TRAIN),
                    "--mode {config.mode}",
                ),
                not_with(
                    "--cuda-graph",
                    lambda run: run.cuda_graph,
                    only=lambda run: not run.parallel.takes_any_tensor,
                ),
                not_with(
                    "--cast-once",
                    lambda run: run.cast_once,
                    only=lambda run: not run.parallel.takes_any_tensor,
                ),
                Rule(
                    lambda run: not (run.is_shared and run.cuda_graph and run.sync_phases),
                    "{flag} {config.parallel} with --cuda-graph cannot be combined with "
                    "--sync-phases: one graph holds backward and communication",
                ),
                needs(
                    "--own-ddp", lambda run: run.parallel is not Parallel.OWN or run.own_ddp, "none"
                ),
                not_with(
                    "--compile reduce-overhead",
                    lambda run: run.compile is CompileMode.REDUCE_OVERHEAD,
                ),
                not_with(
                    "--memory",
                    lambda run: run.profiler is Profiler.MEMORY,
                    only=lambda run: run.parallel is Parallel.FSDP2,
                ),
                needs(
                    "--compile-blocks, as parameters are gathered between the blocks",
                    lambda run: (
                        not run.parallel.shards_parameters
                        or run.compile_blocks
                        or run.compile is CompileMode.NONE
                    ),
                    "--compile {config.compile}",
                ),
                not_with(
                    "--precision fp16",
                    lambda run: run.precision is Precision.FP16,
                    only=lambda run: run.parallel.shards_parameters,
                ),
            ),
            group="parallel",
            is_common=True,
        ),
    ] = Parallel.NONE
    ranks: Annotated[
        int,
        Setting(
            "Processes that share a step, each with a GPU of its own, or all on the CPU. The "
            "batch size is that of each. In a sweep of several ways, none is one process. One "
            "rank exchanges with itself.",
            default="1, to be given with --parallel",
            plural="ranks",
            least=1,
            most=MAX_RANKS,
            note="{} ranks",
            rules=(
                needs(
                    "a way to share a step, as in --parallel ddp-overlap",
                    lambda run: run.parallel is not Parallel.NONE,
                    "--parallel {config.parallel}",
                ),
            ),
            group="parallel",
            is_common=True,
        ),
    ] = 1
    own_ddp: Annotated[
        str | None,
        Setting(
            "Your own way to share a step as package.module:Class: made with the module (and "
            "bucket_size_mb, if it takes that), called like it; finish_gradient_synchronization() "
            "comes after backward. It may shard parameters. A sweep has it beside --parallel.",
            metavar="MODULE:CLASS",
            default="none",
            word="",
            column="",
            rules=(
                Rule(
                    lambda run: is_import_name(run.own_ddp), NOT_OF_A_MODULE + "{config.own_ddp!r}"
                ),
            ),
            used_with=("parallel", (Parallel.OWN,)),
        ),
    ] = None
    bucket_mib: Annotated[
        int,
        Setting(
            "MiB of gradients that ddp-overlap averages together, or an own way that asks; 0: "
            "each parameter alone.",
            plural="bucket_mib",
            least=0,
            most=2**20,
            note="buckets of {} MiB",
            used_with=("parallel", (Parallel.DDP_OVERLAP, Parallel.OWN)),
        ),
    ] = BUCKET_MIB
    shard_optimizer: Annotated[
        bool,
        Setting(
            "Keep on each rank the optimizer's state of only its share of the parameters; after "
            "the optimizer's step the ranks exchange what they updated.",
            plural="",
            note="sharded optimizer",
            rules=(WHOLE_GRADIENTS, TRAINING, UNSCALED),
            group="parallel",
        ),
    ] = False
    learning_rate: Annotated[
        float,
        Setting(
            "Learning rate of AdamW.",
            word="lr",
            label=4,
            note="learning rate {}",
            rules=(
                Rule(
                    lambda run: 0 < run.learning_rate < 1,
                    "learning_rate must be between 0 and 1, got {config.learning_rate}",
                ),
            ),
            csv_place=24,
            without_cost=True,
        ),
    ] = 1e-3
    measured_steps: Annotated[
        int,
        Setting(
            "Steps that are timed, after the warm-up.",
            least=1,
            heading="steps",
            label=4,
            note="{} measured steps",
            notes={1: "1 measured step"},
            noted="always",
            always_in_csv=True,
            without_cost=True,
            is_common=True,
        ),
    ] = 10
    sync_phases: Annotated[
        bool,
        Setting(
            "Synchronise after every phase, the textbook way, instead of recording events on the "
            "stream.",
            label=5,
            column="phases",
            cells={False: "by events", True: "synchronised"},
            csv_place=40,
            without_cost=True,
        ),
    ] = False
    ranges: Annotated[
        bool,
        Setting(
            "Annotate the step with NVTX ranges.",
            label=5,
            cells={False: "off", True: "on"},
            csv_place=41,
            without_cost=True,
        ),
    ] = True
    tokens: Annotated[
        str | None,
        Setting(
            "Token file to read batches from (.npy, one axis of integers).",
            metavar="FILE",
            default="random tokens",
            label=5,
            cells={None: "random"},
            rules=(
                Rule(
                    lambda run: is_unicode(run.tokens),
                    "tokens needs a file name that is valid UTF-8, got {config.tokens!r}; rename "
                    "the file",
                ),
            ),
            csv_place=42,
            without_cost=True,
            is_common=True,
        ),
    ] = None
    seed: Annotated[
        int,
        Setting(
            "Seed of the weights and the tokens.", least=0, label=4, csv_place=43, without_cost=True
        ),
    ] = 0
    repeat: Annotated[
        int,
        Setting(
            least=0,
            word="#",
            label=6,
            csv_place=31,
            named_last=True,
            noted="never",
            without_cost=True,
        ),
    ] = 0
    """Which of several fresh processes of the same configuration this is, from 0."""

    def __post_init__(self) -> None:
        """Turn strings into members of enumerations, reset settings that have no effect to their
        defaults, and raise ValueError for a configuration that cannot be run.
        """
        make_choices(self)
        for part, setting in declared(self):
            if setting.used_with is not None:
                other, values = setting.used_with
                if getattr(self, other) not in values:
                    object.__setattr__(self, part.name, part.default)
        check(self)
        if self.warmup_steps + self.measured_steps > 1_000_000:
            raise ValueError(
                "warmup_steps + measured_steps must be at most 1000000, got "
                f"{self.warmup_steps + self.measured_steps}"
            )
        tokens = self.batch_size * self.model.context_length
        widths = [self.model.vocab_size, self.model.d_ff]
        if self.model.attention is Attention.NAIVE:  # fused attention keeps no scores
            widths.append(self.model.num_heads * self.model.context_length)
        elements = tokens * max(widths)
        if elements > MAX_ELEMENTS:
            raise ValueError(
                f"one tensor of the step would hold {elements:.1e} elements, more than "
                f"{MAX_ELEMENTS:.0e}: check batch_size, context_length and vocab_size"
            )

    @property
    def fp8_misfit(self) -> str:
        """Why `fp8` is refused: sizes that fp8 matmuls do not take, so they would run in bf16.
        Empty if all fit.
        """
        tokens = self.batch_size * self.model.context_length
        sizes = {
            "batch_size x context_length": tokens,
            "d_model": self.model.d_model,
            "d_ff": self.model.d_ff,
        }
        wrong = [f"{name} = {size}" for name, size in sizes.items() if size % FP8_MULTIPLE]
        if not wrong:
            return ""
        return f"fp8 needs sizes that are multiples of {FP8_MULTIPLE}, got {', '.join(wrong)}"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, those of all micro-batches and ranks together."""
        sequences = self.ranks * self.accumulate_steps * self.batch_size
        return sequences * self.model.context_length

    @property
    def key(self) -> str:
        """File name of this run's record: readable, unique among configurations, safe on every
        file system.
        """
        # a record from elsewhere may call its size anything
        size = re.sub(r"[^A-Za-z0-9.-]+", "-", self.size).lstrip(".-")[:32]
        shape = (
            f"{size}_ctx{self.model.context_length}_b{self.batch_size}_{self.mode}_{self.precision}"
        )
        return f"{shape}_{self.digest}_r{self.repeat}"

    @property
    def digest(self) -> str:
        """Ten hexadecimal digits that all repeats of this run share, and no other run has."""
        chosen = json.dumps(
            [non_defaults(self.configuration), non_defaults(self.model)], sort_keys=True
        )
        return hashlib.sha256(chosen.encode()).hexdigest()[:10]

    @property
    def configuration(self) -> "RunConfig":
        """The same run with repeat 0, which is equal for all repeats of a configuration."""
        return self.with_defaults("repeat")

    @property
    def without_shortcuts(self) -> "RunConfig":
        """The same run without shortcuts: settings that make the same step faster, and seldom
        raise its memory.
        """
        shortcuts = [part.name for part, setting in declared(self) if setting.is_shortcut]
        return self.with_defaults(*shortcuts)

    def with_defaults(self, *names: str) -> "RunConfig":
        """The same run with these settings at their defaults."""
        declarations = type(self).__dataclass_fields__
        defaults: dict[str, Any] = {name: declarations[name].default for name in names}
        is_changed = any(getattr(self, name) != value for name, value in defaults.items())
        return replace(self, **defaults) if is_changed else self

    @property
    def unprofiled(self) -> "RunConfig":
        """The same run without a profiler."""
        return self.with_defaults("profiler")

    @property
    def without_graph(self) -> "RunConfig":
        """The same run without CUDA graphs."""
        return self.with_defaults("cuda_graph")

    @property
    def alone(self) -> "RunConfig":
        """The same training step, run by one process and not shared among ranks."""
        return self.with_defaults(*OF_SEVERAL_RANKS)

    @property
    def needs_fast_model(self) -> bool:
        """Whether a setting asks for what only the fast model can do; fused blocks and fp8 need
        weights cast once.
        """
        is_fast = self.cast_once or self.fused_loss or self.compile_blocks
        has_checkpoints = self.checkpoint_blocks > 0 and self.model_factory is None
        return is_fast or has_checkpoints or self.pad_vocabulary > 1

    @property
    def has_nothing_to_compile(self) -> bool:
        """Whether the blocks are matmuls and ready kernels alone, and graphs launch them.

        torch.compile would fuse nothing there, and importing it and compiling take seconds. In fp8
        it fuses the scales, and with checkpoints the residual additions. Steps of several ranks
        were measured with compiled blocks only.
        """
        has_more = self.fp8 or self.checkpoint_blocks or self.is_shared
        return self.fused_blocks and self.cuda_graph and not has_more

    @property
    def is_shared(self) -> bool:
        """Whether ranks share each step; one rank alone can too, and then exchanges with itself."""
        return self.parallel is not Parallel.NONE

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases that this run times, in order, without the whole step."""
        phases: tuple[Phase, ...] = {
            Mode.INFERENCE: (Phase.FORWARD,),
            Mode.FORWARD: (Phase.FORWARD,),
            Mode.FORWARD_BACKWARD: (Phase.FORWARD, Phase.BACKWARD),
            Mode.TRAIN: (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER),
        }[self.mode]
        if self.is_shared:
            after = phases.index(Phase.BACKWARD) + 1
            phases = (*phases[:after], Phase.COMMUNICATION, *phases[after:])
        return phases if self.tokens is None else (Phase.DATA, *phases)

    @property
    def launched_phases(self) -> tuple[Phase, ...]:
        """The phases that are launched in a step, in order: those of each micro-batch, and what
        follows the last. Ranks that shard parameters exchange gradients in every micro-batch.
        """
        micro_batch = [Phase.FORWARD, Phase.BACKWARD]
        if self.parallel.shards_parameters:
            micro_batch.append(Phase.COMMUNICATION)
        phases = [phase for phase in self.phases if phase is not Phase.DATA]
        return (*micro_batch * (self.accumulate_steps - 1), *phases)

    @property
    def label(self) -> str:
        """A few words that describe the run to people: every setting that differs from its default,
        except the device.
        """
        preset = SIZES.get(self.size)
        words: list[tuple[int, str]] = []

        def add_words(name: str, setting: Setting, value: object, usual: object) -> None:
            """Add the setting in words, with its place in the label (`setting.label`).

            Place 0 is always shown and None never; others only with a value that is not the usual
            one, which is the preset's for a size of the model, and else the default.
            """
            if setting.label == 0 or (setting.label is not None and value != usual):
                words.append((setting.label, in_words(name, setting, value)))

        for part, setting in declared(self):
            if part.name != "model":
                add_words(part.name, setting, getattr(self, part.name), part.default)
                continue
            for size, of_model in declared(self.model):
                if self.size != UNSIZED or of_model.binds_own_model:
                    usual = getattr(preset, size.name, size.default)
                    add_words(size.name, of_model, getattr(self.model, size.name), usual)
        words.sort(key=itemgetter(0))
        return " ".join(word for _, word in words)


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        part.name: setting
        for part, setting in (*declared(RunConfig), *declared(ModelConfig))
        if part.name != "model"
    }
)
"""The declarations of all settings of a run, by their names."""
USED_WITH = {
    name: setting.used_with for name, setting in SETTINGS.items() if setting.used_with is not None
}
"""Settings that only have an effect with some values of another one: that one, and its values."""
OF_SEVERAL_RANKS = tuple(
    name
    for name, setting in SETTINGS.items()
    if setting.group == "parallel" or USED_WITH.get(name, ("",))[0] == "parallel"
)
"""Settings that say how ranks share a step, `parallel` first."""
