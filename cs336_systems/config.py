"""What to run: the shape of the model, the settings of the step, the size presets."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from math import inf
from types import MappingProxyType
from typing import Annotated, Any

from .settings import ByDevice, Rule, Setting, check, declared, in_words, make_choices, non_defaults

MAX_PARAMETERS = 10**12
"""Most parameters of a model. In fp32 they take 4 TB, which fit no device, so a larger number is
a typing error.
"""
MAX_ELEMENTS = 2**42
"""Bound on the elements of the logits and of one block's attention scores, for the same reason."""
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
WATCHED = "watch"
"""Module part of `model_factory` in records of loops that were watched: watch:name has no
factory.
"""
EAGER_STEPS_BEFORE_GRAPH = 3
"""Eager steps before a CUDA graph is recorded: one compiles, one makes the optimizer's state,
one runs with both.
"""


class Arch(StrEnum):
    """Family of the model: the course's (RMSNorm, SwiGLU, RoPE) or GPT-2's."""

    CS336 = "cs336"
    GPT2 = "gpt2"


class Mode(StrEnum):
    """How much of a training step runs."""

    INFERENCE = "inference"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward-backward"
    TRAIN = "train"


class Phase(StrEnum):
    """A part of a step that has its own time; STEP is the whole, by the host's clock."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer"
    STEP = "step"


class Precision(StrEnum):
    """Precision of the matmuls; parameters are always fp32."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"


class Attention(StrEnum):
    """Scores, softmax and values as separate operations, or PyTorch's fused attention."""

    NAIVE = "naive"
    SDPA = "sdpa"


class SdpaBackend(StrEnum):
    """Which of PyTorch's fused attention kernels to allow; auto lets PyTorch choose."""

    AUTO = "auto"
    FLASH = "flash"
    CUDNN = "cudnn"
    EFFICIENT = "efficient"
    MATH = "math"


class OptimizerKind(StrEnum):
    """AdamW written out, one tensor at a time, PyTorch's foreach or fused AdamW, or the user's
    own optimizer.
    """

    ADAMW = "adamw"
    FOREACH = "foreach"
    FUSED = "fused"
    OWN = "own"


class CompileMode(StrEnum):
    """Mode of torch.compile; none is eager."""

    NONE = "none"
    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    MAX_AUTOTUNE_NO_CUDAGRAPHS = "max-autotune-no-cudagraphs"


class Shards(StrEnum):
    """What each rank keeps a part of, and of its gradients and optimizer state."""

    NOTHING = "nothing"
    MATRICES = "the elements of matrices, and vectors whole"
    ROWS = "the rows of all parameters"


class Parallel(StrEnum):
    """How several ranks share a step: not at all, by one of our ways or PyTorch's to average the
    gradients of whole models (ddp), or of models whose parameters are sharded (fsdp).
    """

    NONE = "none"
    DDP_NAIVE = "ddp-naive"
    DDP_FLAT = "ddp-flat"
    DDP_OVERLAP = "ddp-overlap"
    DDP_PUSH = "ddp-push"
    DDP = "ddp"
    FSDP = "fsdp"
    FSDP_PUSH = "fsdp-push"
    FSDP2 = "fsdp2"
    OWN = "own"

    @property
    def exchange(self) -> "ExchangeRules":
        """What its ranks exchange in a step, and when."""
        return EXCHANGES.get(self, ExchangeRules())

    @property
    def shards_parameters(self) -> bool:
        """Whether each rank keeps only its part of the parameters, their gradients and the
        optimizer's state.
        """
        return self.exchange.shards is not Shards.NOTHING

    @property
    def is_fsdp(self) -> bool:
        """Whether each rank has its part of every matrix, and vectors whole: our fully sharded
        data parallelism.
        """
        return self.exchange.shards is Shards.MATRICES

    @property
    def takes_any_tensor(self) -> bool:
        """Whether gradients of other tensors than parameters can be averaged, and CUDA graphs
        can hold collectives.
        """
        return self not in (Parallel.DDP, Parallel.FSDP2, Parallel.OWN)

    @property
    def writes_to_others(self) -> bool:
        """Whether a rank writes to the other ranks' memory itself, and so must see their GPUs."""
        return self.exchange.copies


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRules:
    """What the ranks of a way exchange in a step, and when; its forecast follows from this."""

    shards: Shards = Shards.NOTHING
    """Of what each rank keeps a part. Else whole gradients are averaged."""
    copies: bool = False
    """Whether ranks copy into each other's memory, instead of calling collectives."""
    bucket_bytes: float | None = 0
    """Gradients are averaged together up to this size: 0 for each alone, infinite for all, None
    for that of `bucket_mib`.
    """
    first_bucket_bytes: float | None = None
    """Size of the first bucket, if it is another one."""
    starts_in_backward: bool = True
    """Whether gradients are averaged during backward, each bucket once it is complete."""
    ends_in_backward: bool = False
    """Whether backward itself waits for all averages, and not a call after it."""
    units_ahead: int = 0
    """Units of sharded parameters that are gathered ahead of the one that computes."""
    keeps_last_unit: bool = False
    """Whether the last unit of forward stays gathered for backward, which begins with it."""


EXCHANGES = {
    Parallel.DDP_NAIVE: ExchangeRules(starts_in_backward=False),
    Parallel.DDP_FLAT: ExchangeRules(starts_in_backward=False, bucket_bytes=inf),
    Parallel.DDP_OVERLAP: ExchangeRules(bucket_bytes=None),
    Parallel.DDP_PUSH: ExchangeRules(copies=True),
    # the first bucket of PyTorch's is smaller, so that its all-reduce starts early
    Parallel.DDP: ExchangeRules(bucket_bytes=None, first_bucket_bytes=2**20, ends_in_backward=True),
    Parallel.FSDP: ExchangeRules(shards=Shards.MATRICES, units_ahead=2, keeps_last_unit=True),
    Parallel.FSDP_PUSH: ExchangeRules(
        shards=Shards.MATRICES, copies=True, units_ahead=2, keeps_last_unit=True
    ),
    Parallel.FSDP2: ExchangeRules(shards=Shards.ROWS, units_ahead=1, ends_in_backward=True),
}
"""The ways whose steps are forecast: all but a user's own."""


class LossKind(StrEnum):
    """Cross-entropy of the logits, or the loss that a user's own model computes itself."""

    CROSS_ENTROPY = "cross-entropy"
    MODEL = "model"


class Profiler(StrEnum):
    """Profiler of the measured steps: none, Nsight Systems, torch.profiler (Kineto), or the
    allocator's history.
    """

    NONE = "none"
    NSYS = "nsys"
    KINETO = "kineto"
    MEMORY = "memory"


class Device(StrEnum):
    """Where the step runs."""

    CPU = "cpu"
    CUDA = "cuda"


_PRESET = "the preset's"
"""Shown in the help as the default of settings that the size decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only Transformer language model."""

    arch: Annotated[Arch, Setting(word="", note="{} architecture")] = Arch.CS336
    vocab_size: Annotated[
        int,
        Setting(
            "Entries of the vocabulary (tokens).",
            default=_PRESET,
            least=1,
            heading="vocab_size",
            note="vocabulary of {}",
        ),
    ] = 10_000
    context_length: Annotated[
        int,
        Setting(
            "Tokens in a sequence.",
            default="1024 for gpt2",
            plural="context_lengths",
            least=1,
            heading="context",
            word="ctx",
            label=0,
            by_device=ByDevice(
                gpu=512, cpu=128, gpu_sweep=(128, 256, 512), cpu_sweep=(64, 128, 256)
            ),
        ),
    ] = 512
    d_model: Annotated[
        int,
        Setting(
            "Width of the residual stream (elements).", default=_PRESET, least=1, heading="d_model"
        ),
    ]
    d_ff: Annotated[
        int,
        Setting(
            "Width of the feed-forward layer (elements).", default=_PRESET, least=1, heading="d_ff"
        ),
    ]
    num_layers: Annotated[
        int, Setting("Blocks, one after the other.", default=_PRESET, least=1, heading="num_layers")
    ]
    num_heads: Annotated[
        int,
        Setting(
            "Attention heads; must divide d_model.", default=_PRESET, least=1, heading="num_heads"
        ),
    ]
    rope_theta: Annotated[
        float,
        Setting(
            "Base of the rotary position embedding's wavelengths.",
            default="10000.0",
            heading="rope_theta",
            note="RoPE theta {}",
            rules=(
                Rule(
                    lambda model: 0 < model.rope_theta < float("inf"),
                    "rope_theta must be positive and finite, got {config.rope_theta}",
                ),
            ),
        ),
    ] = 10_000.0
    attention: Annotated[
        Attention,
        Setting(
            "naive: scores, softmax and values one by one. sdpa: PyTorch's fused attention.",
            plural="attention",
            chosen_by_fast=True,
            word="",
            label=1,
            note="{} attention",
        ),
    ] = Attention.NAIVE
    sdpa_backend: Annotated[
        SdpaBackend,
        Setting(
            "Which kernel sdpa may use; auto lets PyTorch choose.",
            word="",
            label=1,
            column="",
            rules=(
                Rule(
                    lambda model: model.attention is Attention.SDPA,
                    "sdpa_backend {config.sdpa_backend} needs attention sdpa, got attention "
                    "{config.attention}",
                ),
            ),
        ),
    ] = SdpaBackend.AUTO

    def __post_init__(self) -> None:
        make_choices(self)
        check(self)
        if self.d_model % self.num_heads:
            raise ValueError(
                f"d_model must be divisible by num_heads, got {self.d_model} and {self.num_heads}"
            )
        if self.arch is Arch.CS336 and self.d_head % 2:
            raise ValueError(
                "RoPE rotates pairs, so d_model / num_heads must be even, "
                f"got {self.d_model} / {self.num_heads} = {self.d_head}"
            )
        matrices = (
            4 * self.d_model**2 + (3 if self.arch is Arch.CS336 else 2) * self.d_model * self.d_ff
        )
        parameters = self.num_layers * matrices + 2 * self.vocab_size * self.d_model
        if parameters > MAX_PARAMETERS:
            raise ValueError(
                f"the model would hold about {parameters:.1e} parameters, more than "
                f"{MAX_PARAMETERS:.0e}: check d_model, d_ff, num_layers and vocab_size"
            )

    @property
    def d_head(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads


def _preset(
    d_model: int, d_ff: int, num_layers: int, num_heads: int, vocab_size: int = 10_000
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        d_ff=d_ff,
        num_layers=num_layers,
        num_heads=num_heads,
    )


def _gpt2_preset(d_model: int, num_layers: int, num_heads: int) -> ModelConfig:
    return ModelConfig(
        arch=Arch.GPT2,
        vocab_size=50_257,
        context_length=1024,
        d_model=d_model,
        d_ff=4 * d_model,
        num_layers=num_layers,
        num_heads=num_heads,
    )


SIZES: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "tiny": _preset(128, 512, 2, 4),
        "small": _preset(768, 3072, 12, 12),
        "medium": _preset(1024, 4096, 24, 16),
        "large": _preset(1280, 5120, 36, 20),
        "xl": _preset(1600, 6400, 48, 25),
        "2.7B": _preset(2560, 10240, 32, 32),
        "8B": _preset(4096, 11008, 34, 32, vocab_size=151_936),
        "10B": _preset(4608, 12288, 50, 36),
        "gpt2": _gpt2_preset(768, 12, 12),
        "gpt2-medium": _gpt2_preset(1024, 24, 16),
        "gpt2-large": _gpt2_preset(1280, 36, 20),
        "gpt2-xl": _gpt2_preset(1600, 48, 25),
    }
)
"""The presets by name (CS336 assignment 2, table 1 and, for 8B, its leaderboard; Radford et al.
2019, table 2).
"""


# rules that several settings share


def _needs(needed: str, is_met: Callable[[Any], bool], found: str, subject: str = "{flag}") -> Rule:
    return Rule(is_met, f"{subject} needs {needed}, got {found}")


_OUR_MODEL = _needs(
    "this project's model",
    lambda run: run.model_factory is None,
    "--model {config.model_factory!r}",
)
_NOT_OF_A_MODULE = "{flag} must be package.module:Class, got "
_BF16 = _needs(
    "--precision bf16",
    lambda run: run.precision is Precision.BF16,
    "--precision {config.precision}",
)
_UNSCALED = _needs(
    "a precision whose loss is not scaled",
    lambda run: run.precision is not Precision.FP16,
    "--precision {config.precision}",
)
_FUSED_OPTIMIZER = _needs(
    "--optimizer fused",
    lambda run: run.mode is not Mode.TRAIN or run.optimizer is OptimizerKind.FUSED,
    "--optimizer {config.optimizer}",
)
_WHOLE_GRADIENTS = _needs(
    "a way that leaves all gradients to each rank (--parallel ddp-naive, ddp-flat, ddp-overlap, "
    "ddp-push or ddp)",
    lambda run: run.parallel is not Parallel.NONE and not run.parallel.shards_parameters,
    "--parallel {config.parallel}",
)


def _alone(
    flag: str, is_used: Callable[[Any], bool], only: Callable[[Any], bool] = lambda _: True
) -> Rule:
    """A rule against a flag that does not work on several ranks yet; it holds for the runs that
    `only` accepts.
    """
    return Rule(
        lambda run: not (only(run) and is_used(run)),
        f"{{flag}} {{config.parallel}} cannot be combined with {flag} yet: leave out one of them",
    )


_TRAINING = _needs("--mode train", lambda run: run.mode is Mode.TRAIN, "--mode {config.mode}")
_ON_GPU = _needs("--device cuda", lambda run: run.device is Device.CUDA, "--device {config.device}")
_SDPA = _needs(
    "--attention sdpa",
    lambda run: run.model.attention is Attention.SDPA,
    "--attention {config.model.attention}",
)
_CAST_ONCE = _needs("--cast-once", lambda run: run.cast_once, "none")
_FUSED_BLOCKS = _needs("--fused-blocks", lambda run: run.fused_blocks, "none")


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
        ),
    ]
    """Name of the preset that `model` came from, or `custom`."""
    model: ModelConfig
    batch_size: Annotated[
        int,
        Setting(
            "Sequences in a batch.", plural="batch_size", least=1, heading="batch", note="batch {}"
        ),
    ] = 4
    mode: Annotated[
        Mode,
        Setting(
            "How much of a step: inference (no graph), forward (with the graph), "
            "forward-backward, train.",
            plural="modes",
            word="",
            label=0,
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
                _needs(
                    "--device cuda",
                    lambda run: run.precision is not Precision.TF32 or run.device is Device.CUDA,
                    "--device {config.device}",
                    subject="--precision tf32",
                ),
            ),
        ),
    ] = Precision.FP32
    device: Annotated[Device, Setting(word="", label=None)] = Device.CPU
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
            label=1,
            note="{} optimizer",
            rules=(
                _needs(
                    "--own-optimizer",
                    lambda run: run.optimizer is not OptimizerKind.OWN or run.own_optimizer,
                    "none",
                ),
            ),
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
            label=1,
            column="",
            rules=(
                Rule(
                    lambda run: is_import_name(run.own_optimizer),
                    _NOT_OF_A_MODULE + "{config.own_optimizer!r}",
                ),
                _UNSCALED,
                Rule(
                    lambda run: not run.shard_optimizer,
                    "{flag} cannot be combined with --shard-optimizer, ours",
                ),
            ),
        ),
    ] = None
    compile: Annotated[
        CompileMode,
        Setting(
            "Mode of torch.compile; none is eager.",
            plural="compile",
            chosen_by_fast=True,
            is_shortcut=True,
            label=1,
            note="compile {}",
        ),
    ] = CompileMode.NONE
    compile_blocks: Annotated[
        bool,
        Setting(
            "Compile each block on its own instead of the whole model, which takes seconds "
            "instead of tens of seconds.",
            is_shortcut=True,
            label=1,
            column="",
            rules=(
                _OUR_MODEL,
                _needs(
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
            "Your own model as package.module:factory. The factory is called with those of "
            f"{', '.join(each.name for each in fields(ModelConfig))} that its signature names; "
            "the model it returns maps int64 (batch, sequence) to logits (batch, sequence, "
            "vocabulary).",
            flag="model",
            metavar="MODULE:FACTORY",
            default="this project's model",
            word="",
            label=1,
            column="",
            rules=(
                Rule(
                    lambda run: is_import_name(run.model_factory),
                    "model must be package.module:factory, got {config.model_factory!r}",
                ),
            ),
        ),
    ] = None
    loss: Annotated[
        LossKind,
        Setting(
            "cross-entropy of the logits, or model: the loss that your own model returns when its "
            "forward is given `targets` (the next tokens) or `labels` (the tokens).",
            word="loss",
            label=1,
            note="loss of the {}",
            rules=(
                _needs(
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
                _needs(
                    "your own model, as in --model package.module:factory",
                    lambda run: run.model_factory is not None,
                    "none",
                ),
            ),
        ),
    ] = MODULE_DEPTH
    profiler: Annotated[
        Profiler,
        Setting(
            word="",
            label=1,
            rules=(
                _needs(
                    "--device cuda, whose kernels it sees (--profile has a CPU's operators)",
                    lambda run: run.profiler is not Profiler.NSYS or run.device is Device.CUDA,
                    "--device {config.device}",
                    subject="--nsys",
                ),
                _needs(
                    "--device cuda, as it records PyTorch's CUDA allocator",
                    lambda run: run.profiler is not Profiler.MEMORY or run.device is Device.CUDA,
                    "--device {config.device}",
                    subject="--memory",
                ),
            ),
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
            label=1,
            rules=(
                _needs(
                    "1 for your own model, as what it does between its blocks is not known",
                    lambda run: run.model_factory is None or run.checkpoint_blocks == 1,
                    "{config.checkpoint_blocks}",
                ),
            ),
            note="a checkpoint every {} blocks",
            notes={0: "no checkpoints", 1: "a checkpoint every block"},
        ),
    ] = 0
    selective_checkpoints: Annotated[
        bool,
        Setting(
            "Selective activation checkpointing (Korthikanti et al. 2022), for long contexts: "
            "checkpoints also save q, k, v and the result of attention, so that backward does not "
            "compute attention again. Needs --checkpoint-blocks 1, --fused-blocks and fused "
            "attention.",
            is_shortcut=True,
            label=1,
            word="selective",
            note="selective checkpoints",
            rules=(
                _OUR_MODEL,
                _needs(
                    "--checkpoint-blocks 1, as each block is a checkpoint",
                    lambda run: run.checkpoint_blocks == 1,
                    "--checkpoint-blocks {config.checkpoint_blocks}",
                ),
                _SDPA,
                _FUSED_BLOCKS,
            ),
        ),
    ] = False
    keep_hidden: Annotated[
        int,
        Setting(
            "Of this many blocks, selective checkpoints also save the result of the first matmul "
            "of the feed-forward network, which is most of what they recompute. Needs "
            "--selective-checkpoints.",
            default="0, and with --fast as many as fit",
            is_shortcut=True,
            least=0,
            label=1,
            word="keep hidden",
            note="{} blocks keep hidden activations",
            rules=(
                _needs("--selective-checkpoints", lambda run: run.selective_checkpoints, "none"),
                Rule(
                    lambda run: run.keep_hidden <= run.model.num_layers,
                    "{flag} {config.keep_hidden} is more than the {config.model.num_layers} "
                    "blocks of the model",
                ),
            ),
        ),
    ] = 0
    pad_vocabulary: Annotated[
        int,
        Setting(
            "Compute logits for a vocabulary rounded up to a multiple of this; the loss leaves "
            "the added logits out.",
            chosen_by_fast=True,
            is_shortcut=True,
            least=1,
            most=MAX_PADDING,
            rules=(_OUR_MODEL,),
            word="padded to",
            label=1,
            note="vocabulary padded to a multiple of {}",
            notes={1: "vocabulary not padded"},
        ),
    ] = 1
    cast_once: Annotated[
        bool,
        Setting(
            "Keep a bf16 copy of each linear layer's weights beside the fp32 masters, so that "
            "autocast need not cast them in every step. The optimizer updates both.",
            is_shortcut=True,
            label=1,
            note="weights cast once",
            rules=(
                _OUR_MODEL,
                _BF16,
                _FUSED_OPTIMIZER,
                _needs(
                    f"a d_model that is a multiple of {PACKED_MULTIPLE}, with which q, k and v "
                    "are one matmul",
                    lambda run: run.model.d_model % PACKED_MULTIPLE == 0,
                    "{config.model.d_model}",
                ),
            ),
        ),
    ] = False
    split_masters: Annotated[
        bool,
        Setting(
            "Of each fp32 master store only its bf16 copy and the 16 bits that the copy lacks, "
            "which give the master to the last bit: 2 bytes less for each parameter, and 2 bytes "
            "less to read and write in each update. Masters that the model reads itself stay "
            "whole. Needs --cast-once.",
            is_shortcut=True,
            label=1,
            note="masters split",
            rules=(_CAST_ONCE, _TRAINING),
        ),
    ] = False
    fused_loss: Annotated[
        bool,
        Setting(
            "Fused cross-entropy: forward overwrites the logits with their gradient, which saves "
            "time and memory; in low precision no fp32 copy of the logits is made.",
            is_shortcut=True,
            label=1,
            note="fused loss",
            rules=(
                _OUR_MODEL,
                _UNSCALED,
                _needs(
                    "--compile-blocks, as a whole model has its loss compiled in",
                    lambda run: run.compile_blocks or run.compile is CompileMode.NONE,
                    "--compile {config.compile}",
                ),
            ),
        ),
    ] = False
    loss_chunks: Annotated[
        int,
        Setting(
            "Compute logits and their loss for this many parts of the tokens, one part after the "
            "other, each with its gradients, so that forward holds the logits of one part only. "
            "The head's gradient is added up in bf16. Needs --fused-loss and --cast-once.",
            default="1, and with --fast more where memory is scarce",
            is_shortcut=True,
            least=1,
            label=1,
            word="loss chunks",
            note="loss in {} parts",
            rules=(_needs("--fused-loss", lambda run: run.fused_loss, "none"), _CAST_ONCE),
        ),
    ] = 1
    fused_blocks: Annotated[
        bool,
        Setting(
            "Fused kernels between the matmuls: residual addition with norm, bias with GELU, and "
            "the embedding's backward in one pass, whose sums may differ in the last bit from "
            "step to step. The sums of the residual stream are saved for backward in fp32, which "
            "takes a few percent of the memory. Needs --cast-once.",
            is_shortcut=True,
            rules=(_OUR_MODEL, _CAST_ONCE),
            label=1,
            note="fused blocks",
        ),
    ] = False
    fused_activations: Annotated[
        bool,
        Setting(
            "Compute GELU or SwiGLU within the matmul before it, and its derivative within the "
            "matmul of backward, so that they have no kernels of their own. On a GPU this needs "
            "QuACK's matmuls (pip install '.[fused]') and the Hopper generation; --fast uses it "
            "where it finds both. Needs --fused-blocks.",
            is_shortcut=True,
            label=1,
            note="activations within matmuls",
            rules=(
                _FUSED_BLOCKS,
                _needs(
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
        Setting(
            "Compute attention with FlashAttention 4, in the place of the kernel that "
            "--sdpa-backend names; in forward cuDNN computes the shapes for which it is faster. "
            "Queries, keys and values are read where one matmul has written them side by side, "
            "and their gradients are written side by side. On a GPU this needs the package (pip "
            "install '.[fused]') and the Hopper generation; --fast uses it where it finds both, "
            "unless --sdpa-backend is given. Needs --fused-blocks and --attention sdpa.",
            is_shortcut=True,
            label=1,
            note="FlashAttention 4 on packed heads",
            rules=(
                _FUSED_BLOCKS,
                _SDPA,
                Rule(
                    lambda run: run.model.sdpa_backend is not SdpaBackend.MATH,
                    "{flag} cannot be combined with --sdpa-backend math, which writes attention "
                    "out",
                ),
                _needs(
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
        Setting(
            "Compute the linear layers of the blocks in fp8, with scales computed anew in every "
            "step. It is for large models, on Ada, Hopper and newer GPUs. It rounds more coarsely "
            "than bf16, so --fast uses it only together with this flag. MFU is still the share of "
            "the bf16 peak.",
            is_shortcut=True,
            label=1,
            note="blocks in fp8",
            rules=(
                _OUR_MODEL,
                _BF16,
                _CAST_ONCE,
                Rule(lambda run: not run.fp8_misfit, "{config.fp8_misfit}"),
            ),
        ),
    ] = False
    bf16_moments: Annotated[
        bool,
        Setting(
            "Keep AdamW's two moments in bf16, rounded up or down at random so that they are "
            "right on average: 4 bytes less for each parameter, and 20 bytes in the place of 28 "
            "to read and write in each step. The weights that are updated stay in fp32. Losses "
            "differ a little, so --fast uses it only together with this flag. Needs --cast-once.",
            is_shortcut=True,
            label=1,
            note="AdamW's moments in bf16",
            rules=(_CAST_ONCE, _TRAINING),
        ),
    ] = False
    cuda_graph: Annotated[
        bool,
        Setting(
            "Record the step as CUDA graphs, one for each phase, and replay these. Needs at least "
            f"--warmup-steps {EAGER_STEPS_BEFORE_GRAPH + 1}.",
            is_shortcut=True,
            word="graph",
            label=1,
            note="each phase a CUDA graph",
            rules=(
                _UNSCALED,
                _FUSED_OPTIMIZER,
                _needs(
                    "a mode of --compile without graphs of its own",
                    lambda run: run.compile is not CompileMode.REDUCE_OVERHEAD,
                    "--compile {config.compile}",
                ),
                Rule(
                    lambda run: run.profiler is not Profiler.MEMORY,
                    "{flag} cannot be combined with --memory: a replayed graph allocates nothing",
                ),
                _needs(
                    f"at least --warmup-steps {EAGER_STEPS_BEFORE_GRAPH + 1}: it records the step "
                    f"after {EAGER_STEPS_BEFORE_GRAPH} others",
                    lambda run: run.warmup_steps > EAGER_STEPS_BEFORE_GRAPH,
                    "{config.warmup_steps}",
                ),
                _ON_GPU,
            ),
        ),
    ] = False
    update_in_backward: Annotated[
        bool, Setting(is_shortcut=True, label=1, note="weights updated during backward")
    ] = False
    """In records of earlier versions only: no flag asks for it, and no step does it."""
    expandable_segments: Annotated[
        bool,
        Setting(
            "Let PyTorch's allocator grow its segments, so that hardly any memory is lost in gaps "
            "between tensors, for steps that almost fill the GPU.",
            is_shortcut=True,
            label=1,
            note="expandable segments",
            rules=(
                _ON_GPU,
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
            label=1,
            note="{}",
            rules=(
                _needs(
                    "gradients, so --mode forward-backward or train",
                    lambda run: run.mode in (Mode.FORWARD_BACKWARD, Mode.TRAIN),
                    "--mode {config.mode}",
                ),
                _alone(
                    "--cuda-graph",
                    lambda run: run.cuda_graph,
                    only=lambda run: not run.parallel.takes_any_tensor,
                ),
                _alone(
                    "--cast-once",
                    lambda run: run.cast_once,
                    only=lambda run: not run.parallel.takes_any_tensor,
                ),
                Rule(
                    lambda run: not (run.is_shared and run.cuda_graph and run.sync_phases),
                    "{flag} {config.parallel} with --cuda-graph cannot be combined with "
                    "--sync-phases: one graph holds backward and communication",
                ),
                _needs(
                    "--own-ddp", lambda run: run.parallel is not Parallel.OWN or run.own_ddp, "none"
                ),
                _alone(
                    "--compile reduce-overhead",
                    lambda run: run.compile is CompileMode.REDUCE_OVERHEAD,
                ),
                _alone(
                    "--memory",
                    lambda run: run.profiler is Profiler.MEMORY,
                    only=lambda run: run.parallel is Parallel.FSDP2,
                ),
                _needs(
                    "--compile-blocks, as parameters are gathered between the blocks",
                    lambda run: (
                        not run.parallel.shards_parameters
                        or run.compile_blocks
                        or run.compile is CompileMode.NONE
                    ),
                    "--compile {config.compile}",
                ),
                _alone(
                    "--precision fp16",
                    lambda run: run.precision is Precision.FP16,
                    only=lambda run: run.parallel.shards_parameters,
                ),
            ),
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
            label=1,
            note="{} ranks",
            rules=(
                _needs(
                    "a way to share a step, as in --parallel ddp-overlap",
                    lambda run: run.parallel is not Parallel.NONE,
                    "--parallel {config.parallel}",
                ),
            ),
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
            label=1,
            column="",
            rules=(
                Rule(
                    lambda run: is_import_name(run.own_ddp), _NOT_OF_A_MODULE + "{config.own_ddp!r}"
                ),
            ),
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
            label=1,
            note="buckets of {} MiB",
        ),
    ] = BUCKET_MIB
    shard_optimizer: Annotated[
        bool,
        Setting(
            "Keep on each rank the optimizer's state of only its share of the parameters; after "
            "the optimizer's step the ranks exchange what they updated.",
            plural="",
            label=1,
            note="sharded optimizer",
            rules=(_WHOLE_GRADIENTS, _TRAINING, _UNSCALED),
        ),
    ] = False
    learning_rate: Annotated[
        float,
        Setting(
            "Learning rate of AdamW.",
            word="lr",
            note="learning rate {}",
            rules=(
                Rule(
                    lambda run: 0 < run.learning_rate < 1,
                    "learning_rate must be between 0 and 1, got {config.learning_rate}",
                ),
            ),
        ),
    ] = 1e-3
    measured_steps: Annotated[
        int,
        Setting(
            "Steps that are timed, after the warm-up.",
            least=1,
            heading="steps",
            note="{} measured steps",
            notes={1: "1 measured step"},
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
        ),
    ] = False
    ranges: Annotated[
        bool,
        Setting("Annotate the step with NVTX ranges.", label=5, cells={False: "off", True: "on"}),
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
                    lambda run: _is_unicode(run.tokens),
                    "tokens needs a file name that is valid UTF-8, got {config.tokens!r}; rename "
                    "the file",
                ),
            ),
        ),
    ] = None
    seed: Annotated[int, Setting("Seed of the weights and the tokens.", least=0)] = 0
    repeat: Annotated[int, Setting(least=0, word="#", label=6)] = 0
    """Which of several fresh processes of the same configuration this is, from 0."""

    def __post_init__(self) -> None:
        make_choices(self)
        for name, (other, values) in USED_WITH.items():
            if getattr(self, other) not in values:
                object.__setattr__(self, name, type(self).__dataclass_fields__[name].default)
        check(self)
        if self.warmup_steps + self.measured_steps > 1_000_000:
            raise ValueError(
                "warmup_steps + measured_steps must be at most 1000000, got "
                f"{self.warmup_steps + self.measured_steps}"
            )
        tokens = self.batch_size * self.model.context_length
        elements = tokens * max(
            self.model.vocab_size, self.model.num_heads * self.model.context_length, self.model.d_ff
        )
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
        return (
            f"fp8 needs sizes that are multiples of {FP8_MULTIPLE}, got {', '.join(wrong)}"
            if wrong
            else ""
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, those of all ranks together."""
        return self.ranks * self.batch_size * self.model.context_length

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
        return self.with_defaults(
            *(each.name for each, setting in declared(self) if setting.is_shortcut)
        )

    def with_defaults(self, *names: str) -> "RunConfig":
        """The same run with these settings at their defaults."""
        values: dict[str, Any] = {
            name: type(self).__dataclass_fields__[name].default for name in names
        }
        return (
            self
            if all(getattr(self, name) == value for name, value in values.items())
            else replace(self, **values)
        )

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
        """The same step in one process."""
        return self.with_defaults("parallel", "ranks", "shard_optimizer", "own_ddp", "bucket_mib")

    @property
    def needs_fast_model(self) -> bool:
        """Whether a setting asks for what only the fast model can do; fused blocks and fp8 need
        weights cast once.
        """
        is_fast = self.cast_once or self.fused_loss or self.compile_blocks
        has_checkpoints = self.checkpoint_blocks > 0 and self.model_factory is None
        return is_fast or has_checkpoints or self.pad_vocabulary > 1

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
    def label(self) -> str:
        """A few words for people: what runs now, with all that differs from the defaults but the
        device.
        """
        preset = SIZES.get(self.size)
        settings = [
            (getattr(self, each.name), each.default, each.name, setting)
            for each, setting in declared(self)
        ]
        model = [
            (
                getattr(self.model, each.name),
                getattr(preset, each.name, each.default),
                each.name,
                setting,
            )
            for each, setting in declared(self.model)
            if self.size != UNSIZED or each.name in ("context_length", "vocab_size")
        ]
        settings[1:2] = model  # the settings of the model take the place of the field `model`
        said = [
            (setting.label, in_words(name, setting, value))
            for value, usual, name, setting in settings
            if setting.label == 0 or (setting.label is not None and value != usual)
        ]
        return " ".join(words for _, words in sorted(said, key=lambda each: each[0]))


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        each.name: setting
        for kind in (RunConfig, ModelConfig)
        for each, setting in declared(kind)
        if each.name != "model"
    }
)
"""The declarations of all settings of a run, by their names."""


def _is_unicode(text: str) -> bool:
    """False for a file name that is not UTF-8: Python holds it with lone surrogates, which JSON
    cannot represent.
    """
    return text.encode(errors="ignore").decode() == text


USED_WITH: Mapping[str, tuple[str, tuple[Parallel | OptimizerKind, ...]]] = {
    "own_ddp": ("parallel", (Parallel.OWN,)),
    "own_optimizer": ("optimizer", (OptimizerKind.OWN,)),
    "bucket_mib": ("parallel", (Parallel.DDP_OVERLAP, Parallel.OWN)),
}
"""Settings that only have an effect with these values of another one.

With other values they have their defaults, so that runs that do the same have the same key.
"""


def is_import_name(text: str) -> bool:
    """Whether the text has the form package.module:name."""
    module, separator, name = text.partition(":")
    return bool(separator) and all(
        part.isidentifier() for part in [*module.split("."), *name.split(".")]
    )
