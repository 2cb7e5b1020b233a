"""Settings that make the same step faster, or let it take less memory."""

from dataclasses import dataclass
from typing import Annotated

from ..choices import CompileMode, Profiler, SdpaBackend
from ..rules import (
    BF16,
    CAST_ONCE,
    FUSED_BLOCKS,
    FUSED_OPTIMIZER,
    ON_GPU,
    OUR_MODEL,
    SDPA,
    TRAINING,
    UNSCALED,
    needs,
)
from ..settings import Rule, Setting, shortcut
from .step import StepSettings

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
MAX_PADDING = 2**16
"""Largest multiple that a vocabulary may be padded to; no kernel needs a larger one."""
EAGER_STEPS_BEFORE_GRAPH = 3
"""Eager steps before a CUDA graph is recorded: one compiles, one makes the optimizer's state,
one runs with both.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortcutSettings(StepSettings):
    """A step with its shortcuts."""

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
        shortcut(
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
                Rule(
                    lambda run: not run.fp8 or run.compile is CompileMode.NONE,
                    "{flag} cannot be combined with --fp8 and --compile {config.compile}: PyTorch "
                    "2.11 saves for backward all that linear layers in fp8 write, although a "
                    "checkpoint would compute it again",
                ),
            ),
            group="memory",
        ),
    ] = False
    keep_hidden: Annotated[
        int,
        shortcut(
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
        shortcut(
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
        shortcut(
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
        shortcut(
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
        shortcut(
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
        shortcut(
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
        shortcut(
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
        shortcut(
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
        shortcut(
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
        shortcut(
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
    bf16_embedding: Annotated[
        bool,
        shortcut(
            "Look tokens up in a bf16 copy of the embedding's table, which is that of the head if "
            "both are one weight. The table's gradient is added up in fp32 and kept in bf16, and "
            "the fp32 master can be split, so that ranks exchange half of the bytes or a third. "
            "Needs --fused-blocks.",
            note="embedding in bf16",
            rules=(FUSED_BLOCKS,),
        ),
    ] = False
    bf16_stream: Annotated[
        bool,
        shortcut(
            "Keep the residual stream and its gradient in bf16, in the place of fp32 under "
            "autocast: the kernels of norms move half of the bytes or two thirds, and what "
            "backward reads of the stream takes half of the memory. Needs --fused-blocks.",
            note="residual stream in bf16",
            rules=(FUSED_BLOCKS,),
        ),
    ] = False
    bf16_moments: Annotated[
        bool,
        shortcut(
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
        shortcut(
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
    update_in_backward: Annotated[bool, shortcut(note="weights updated during backward")] = False
    """In records of earlier versions only: no flag asks for it, and no step does it."""
    expandable_segments: Annotated[
        bool,
        shortcut(
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
    def needs_fast_model(self) -> bool:
        """Whether a setting asks for what only the fast model can do; fused blocks and fp8 need
        weights cast once.
        """
        is_fast = self.cast_once or self.fused_loss or self.compile_blocks
        has_checkpoints = self.checkpoint_blocks > 0 and self.model_factory is None
        return is_fast or has_checkpoints or self.pad_vocabulary > 1
