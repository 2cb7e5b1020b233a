"""The choices of settings, and the phases of a step."""

from enum import StrEnum


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
    def shards_parameters(self) -> bool:
        """Whether each rank keeps only its part of the parameters, their gradients and the
        optimizer's state.
        """
        return self.is_fsdp or self is Parallel.FSDP2

    @property
    def is_fsdp(self) -> bool:
        """Whether each rank has its part of every matrix, and vectors whole: our fully sharded
        data parallelism.
        """
        return self in (Parallel.FSDP, Parallel.FSDP_PUSH)

    @property
    def takes_any_tensor(self) -> bool:
        """Whether gradients of other tensors than parameters can be averaged, and CUDA graphs
        can hold collectives.
        """
        return self not in (Parallel.DDP, Parallel.FSDP2, Parallel.OWN)

    @property
    def writes_to_others(self) -> bool:
        """Whether a rank writes to the other ranks' memory itself, and so must see their GPUs."""
        return self in (Parallel.DDP_PUSH, Parallel.FSDP_PUSH)


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
