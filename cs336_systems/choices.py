"""The choices of settings, and the phases of a step."""

from dataclasses import dataclass
from enum import StrEnum
from math import inf


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

    @property
    def has_backward(self) -> bool:
        """Whether gradients are computed."""
        return self in (Mode.FORWARD_BACKWARD, Mode.TRAIN)


class Phase(StrEnum):
    """A part of a step that has its own time; STEP is the whole, by the host's clock."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer"
    OTHER = "other"
    """What is in none of the others, in a watched loop: a loss outside of the model, logging."""
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
    def takes_any_tensor(self) -> bool:
        """Whether gradients of other tensors than parameters can be averaged, and CUDA graphs
        can hold collectives.
        """
        return self not in (Parallel.DDP, Parallel.FSDP2, Parallel.OWN)

    @property
    def adds_micro_batches(self) -> bool:
        """Whether gradients of several backward passes can be added up before the optimizer."""
        return self not in (Parallel.FSDP_PUSH, Parallel.OWN)

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
