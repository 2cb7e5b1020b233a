"""What to run: the shape of the model, the settings of the step, the size presets."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from types import MappingProxyType

from cs336_systems.setting_words import in_words

MAX_PARAMETERS = 10**12
"""More fp32 parameters than this (4 TB) fit no device there is: surely a slip of the keyboard."""
MAX_ELEMENTS = 2**42
"""Bound on the elements of the logits and of one block's attention scores, for the same reason."""
FP8_MULTIPLE = 16
"""Of which all sizes of a product in fp8 must be multiples, for cuBLAS."""
MAX_PADDING = 2**16
"""Multiple to pad a vocabulary to: above any that a kernel likes."""
EAGER_STEPS_BEFORE_GRAPH = 3
"""Before a step is recorded: compiling, the optimizer's state, and a step that finds both there."""
OWN_MODEL_ONLY = (
    "compile_blocks", "checkpoint_blocks", "pad_vocabulary", "cast_once", "fused_loss", "fused_blocks", "fp8",
)  # fmt: skip
"""Settings that change the inside of this project's model, and of no other."""

LABELLED_FIRST = (
    "attention", "sdpa_backend", "optimizer", "compile", "compile_blocks", "model_factory", "profiler",
    "checkpoint_blocks", "pad_vocabulary", "cast_once", "fused_loss", "fused_blocks", "fp8", "cuda_graph",
    "warmup_steps",
)  # fmt: skip
"""Settings that a label says before all others."""

Need = tuple[str, bool, str, str, bool]
"""A setting, whether it is set, what it needs, what is there instead, and whether that will do."""


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
    OPTIMIZER = "optimizer"
    STEP = "step"


class Precision(StrEnum):
    """Arithmetic of the matrix products; parameters are always fp32."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"


class Attention(StrEnum):
    """Scores, softmax and values each on its own, or PyTorch's fused attention."""

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
    """AdamW written out, one tensor at a time, or PyTorch's foreach or fused AdamW."""

    ADAMW = "adamw"
    FOREACH = "foreach"
    FUSED = "fused"


class CompileMode(StrEnum):
    """Mode of torch.compile; none is eager."""

    NONE = "none"
    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    MAX_AUTOTUNE_NO_CUDAGRAPHS = "max-autotune-no-cudagraphs"


class Profiler(StrEnum):
    """Who watches the measured steps: nobody, Nsight Systems (from outside), torch.profiler (Kineto), or the
    allocator's own history."""

    NONE = "none"
    NSYS = "nsys"
    KINETO = "kineto"
    MEMORY = "memory"


class Device(StrEnum):
    """Where the step runs."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only Transformer language model."""

    arch: Arch = Arch.CS336
    vocab_size: int = 10_000
    context_length: int = 512
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    rope_theta: float = 10_000.0
    attention: Attention = Attention.NAIVE
    sdpa_backend: SdpaBackend = SdpaBackend.AUTO

    def __post_init__(self) -> None:
        _make_choices(self)
        for name in ("vocab_size", "context_length", "d_model", "d_ff", "num_layers", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model must be divisible by num_heads, got {self.d_model} and {self.num_heads}")
        if self.arch is Arch.CS336 and self.d_head % 2:
            raise ValueError(
                "RoPE rotates pairs, so d_model / num_heads must be even, "
                f"got {self.d_model} / {self.num_heads} = {self.d_head}"
            )
        if not 0 < self.rope_theta < float("inf"):
            raise ValueError(f"rope_theta must be positive and finite, got {self.rope_theta}")
        if self.sdpa_backend is not SdpaBackend.AUTO and self.attention is not Attention.SDPA:
            raise ValueError(f"sdpa_backend {self.sdpa_backend} needs attention sdpa, got attention {self.attention}")
        matrices = 4 * self.d_model**2 + (3 if self.arch is Arch.CS336 else 2) * self.d_model * self.d_ff
        parameters = self.num_layers * matrices + 2 * self.vocab_size * self.d_model
        if parameters > MAX_PARAMETERS:
            raise ValueError(
                f"the model would hold about {parameters:.1e} parameters, more than {MAX_PARAMETERS:.0e}: "
                "check d_model, d_ff, num_layers and vocab_size"
            )

    @property
    def d_head(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One configuration to measure: everything that a fresh process needs to know."""

    size: str
    """Name of the preset that `model` came from, or `custom`."""
    model: ModelConfig
    batch_size: int = 4
    mode: Mode = Mode.TRAIN
    precision: Precision = Precision.FP32
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    compile: CompileMode = CompileMode.NONE
    compile_blocks: bool = False
    """Compile each block on its own instead of the whole model."""
    checkpoint_blocks: int = 0
    """Keep only the input of every so many blocks for backward (of fused ones stream and branch), and compute the rest
    again; 0 keeps everything."""
    pad_vocabulary: int = 1
    """Compute logits for a vocabulary rounded up to a multiple of this, and leave the surplus out of the loss."""
    cast_once: bool = False
    """Keep the weights of linear layers in bf16, and their fp32 masters with the optimizer, which writes both: autocast
    casts no weight and no gradient."""
    fused_loss: bool = False
    """Cross-entropy that reads the logits once and turns them into their gradient in place; in low precision it leaves
    out the copies in fp32."""
    fused_blocks: bool = False
    """Add branches to the residual stream in the kernels of the norms that read the sum, biases in GELU's, and the
    gradients of the embedding to their rows in one pass, in no fixed order. Backward keeps the sums, in fp32: a few
    percent of the memory."""
    fp8: bool = False
    """Compute the linear layers of the blocks in fp8, with scales found anew in every step, where widths and tokens are
    multiples of 16. The model's FLOPs are the same, and MFU stays a share of the peak in bf16."""
    cuda_graph: bool = False
    """Record the step as CUDA graphs, one for each phase, and replay these."""
    learning_rate: float = 1e-3
    """Of AdamW."""
    device: Device = Device.CPU
    warmup_steps: int = 5
    measured_steps: int = 10
    seed: int = 0
    sync_phases: bool = False
    """Synchronise after every phase (the textbook way) instead of recording events on the stream."""
    ranges: bool = True
    """Annotate the step with NVTX ranges."""
    tokens: str | None = None
    """Token file (.npy, one axis of integers) to read batches from; None means random tokens."""
    model_factory: str | None = None
    """`package.module:factory` of the user's own model; None means this project's TransformerLM."""
    profiler: Profiler = Profiler.NONE
    """A profiled run is slower, so it is a run of its own, and its times are never published."""
    repeat: int = 0
    """Which of several fresh processes of the same configuration this is, from 0."""

    def __post_init__(self) -> None:
        _make_choices(self)
        least_values = {
            "batch_size": 1, "checkpoint_blocks": 0, "pad_vocabulary": 1, "warmup_steps": 0, "measured_steps": 1,
            "seed": 0, "repeat": 0,
        }  # fmt: skip
        for name, least in least_values.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.warmup_steps + self.measured_steps > 1_000_000:
            raise ValueError(
                f"warmup_steps + measured_steps must be at most 1000000, got {self.warmup_steps + self.measured_steps}"
            )
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2**63, got {self.seed}")
        tokens = self.batch_size * self.model.context_length
        elements = tokens * max(
            self.model.vocab_size, self.model.num_heads * self.model.context_length, self.model.d_ff
        )
        if elements > MAX_ELEMENTS:
            raise ValueError(
                f"one tensor of the step would hold {elements:.1e} elements, more than {MAX_ELEMENTS:.0e}: "
                "check batch_size, context_length and vocab_size"
            )
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"learning_rate must be between 0 and 1, got {self.learning_rate}")
        if self.pad_vocabulary > MAX_PADDING:
            raise ValueError(f"pad_vocabulary must be at most {MAX_PADDING}, got {self.pad_vocabulary}")
        self._check_together()
        if self.fp8 and (misfit := fp8_misfit(self.model, self.batch_size)):
            raise ValueError(misfit)
        if self.tokens is not None and not _is_unicode(self.tokens):
            raise ValueError(f"tokens needs a file name that is valid UTF-8, got {self.tokens!r}; rename the file")
        if self.model_factory is not None and not _is_factory(self.model_factory):
            raise ValueError(f"model must be package.module:factory, got {self.model_factory!r}")

    def _check_together(self) -> None:
        """Raise ValueError, in the words of the command line, where settings do not go with each other."""
        for flag, is_set, needed, found, is_met in (*self._needs_of_shortcuts(), *self._needs_of_the_device()):
            if is_set and not is_met:
                raise ValueError(f"--{flag.replace('_', '-')} needs {needed}, got {found}")

    def _needs_of_shortcuts(self) -> Iterator[Need]:
        precision, compiled = f"--precision {self.precision}", f"--compile {self.compile}"
        for name in OWN_MODEL_ONLY:
            is_set = getattr(self, name) != _default(name)
            yield name, is_set, "this project's model", f"--model {self.model_factory!r}", self.model_factory is None
        has_mode = self.compile is not CompileMode.NONE
        yield "compile_blocks", self.compile_blocks, "a mode, as in --compile default", compiled, has_mode
        for name in ("cast_once", "fp8"):
            is_bf16 = self.precision is Precision.BF16
            yield name, getattr(self, name), "--precision bf16", precision, is_bf16
        for name in ("fused_blocks", "fp8"):
            yield name, getattr(self, name), "--cast-once", "none", self.cast_once
        unscaled, is_unscaled = "a precision whose loss is not scaled", self.precision is not Precision.FP16
        for name in ("fused_loss", "cuda_graph"):
            yield name, getattr(self, name), unscaled, precision, is_unscaled
        apart = "--compile-blocks, as a whole model has its loss compiled in"
        yield "fused_loss", self.fused_loss, apart, compiled, self.compile_blocks or not has_mode
        optimizer = f"--optimizer {self.optimizer}"
        fuses = self.mode is not Mode.TRAIN or self.optimizer is OptimizerKind.FUSED
        for name in ("cast_once", "cuda_graph"):
            yield name, getattr(self, name), "--optimizer fused", optimizer, fuses
        ungraphed = self.compile is not CompileMode.REDUCE_OVERHEAD
        yield "cuda_graph", self.cuda_graph, "a mode of --compile without graphs of its own", compiled, ungraphed
        seen = "another profiler, as a replayed graph allocates nothing"
        yield "cuda_graph", self.cuda_graph, seen, "--memory", self.profiler is not Profiler.MEMORY
        least = EAGER_STEPS_BEFORE_GRAPH + 1
        warm = f"at least --warmup-steps {least}: it records the step after {EAGER_STEPS_BEFORE_GRAPH} others"
        yield "cuda_graph", self.cuda_graph, warm, str(self.warmup_steps), self.warmup_steps >= least

    def _needs_of_the_device(self) -> Iterator[Need]:
        needed, found, is_met = "--device cuda", f"--device {self.device}", self.device is Device.CUDA
        yield "cuda_graph", self.cuda_graph, needed, found, is_met
        yield "precision tf32", self.precision is Precision.TF32, needed, found, is_met
        kernels = f"{needed}, whose kernels it sees (--profile has a CPU's operators)"
        yield "nsys", self.profiler is Profiler.NSYS, kernels, found, is_met
        allocator = f"{needed}, as it records PyTorch's CUDA allocator"
        yield "memory", self.profiler is Profiler.MEMORY, allocator, found, is_met

    @property
    def key(self) -> str:
        """File name of this run's record: readable, unique among configurations, safe on every file system."""
        # a record from elsewhere may call its size anything
        size = re.sub(r"[^A-Za-z0-9.-]+", "-", self.size).lstrip(".-")[:32]
        shape = f"{size}_ctx{self.model.context_length}_b{self.batch_size}_{self.mode}_{self.precision}"
        return f"{shape}_{self.digest}_r{self.repeat}"

    @property
    def digest(self) -> str:
        """Ten hexadecimal digits that all repeats of this run share, and no other run has."""
        chosen = json.dumps([_non_defaults(self.configuration), _non_defaults(self.model)], sort_keys=True)
        return hashlib.sha256(chosen.encode()).hexdigest()[:10]

    @property
    def configuration(self) -> "RunConfig":
        """The same run as repeat 0: what all repeats of it share."""
        return replace(self, repeat=0)

    @property
    def unprofiled(self) -> "RunConfig":
        """The same run without a profiler."""
        return replace(self, profiler=Profiler.NONE)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases that this run times, in order, without the whole step."""
        phases = {
            Mode.INFERENCE: (Phase.FORWARD,),
            Mode.FORWARD: (Phase.FORWARD,),
            Mode.FORWARD_BACKWARD: (Phase.FORWARD, Phase.BACKWARD),
            Mode.TRAIN: (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER),
        }[self.mode]
        return phases if self.tokens is None else (Phase.DATA, *phases)

    @property
    def label(self) -> str:
        """A few words for people: what runs now, with all that differs from the defaults but the device."""
        preset = SIZES.get(self.size)
        model = {field.name: (getattr(self.model, field.name), field.default) for field in fields(self.model)}
        unusual = {name: value for name, (value, usual) in model.items() if value != getattr(preset, name, usual)}
        others = unusual | _non_defaults(self.configuration)
        first = {
            "size": self.size, "context_length": self.model.context_length, "mode": self.mode,
            "precision": self.precision, **{name: others[name] for name in LABELLED_FIRST if name in others},
        }  # fmt: skip
        rest = {name: value for name, value in others.items() if name not in (*first, "device")}
        last = {"repeat": self.repeat} if self.repeat else {}
        return " ".join(in_words(name, value) for name, value in {**first, **rest, **last}.items())


def fp8_misfit(model: ModelConfig, batch_size: int) -> str:
    """Why a step of these sizes would compute products in bf16 all the same; empty where it would not."""
    tokens = batch_size * model.context_length
    sizes = {"batch_size x context_length": tokens, "d_model": model.d_model, "d_ff": model.d_ff}
    wrong = [f"{name} = {size}" for name, size in sizes.items() if size % FP8_MULTIPLE]
    return f"fp8 needs sizes that are multiples of {FP8_MULTIPLE}, got {', '.join(wrong)}" if wrong else ""


def _non_defaults(config: "RunConfig | ModelConfig") -> dict[str, object]:
    """Scalar fields that differ from their defaults, so that a field added later leaves earlier keys as they are."""
    values = ((field, getattr(config, field.name)) for field in fields(config))
    return {
        field.name: value for field, value in values if value != field.default and not isinstance(value, ModelConfig)
    }


def _make_choices(config: "RunConfig | ModelConfig") -> None:
    """Make plain strings the choices that they name, which are told apart by identity; ValueError for other strings."""
    for field in fields(config):
        if isinstance(field.default, StrEnum):
            object.__setattr__(config, field.name, type(field.default)(getattr(config, field.name)))


def _default(name: str) -> object:
    return next(field.default for field in fields(RunConfig) if field.name == name)


def _is_unicode(text: str) -> bool:
    """False for bytes of a file name that Python smuggled in as lone surrogates, which no JSON holds."""
    return text.encode(errors="ignore").decode() == text


def _is_factory(text: str) -> bool:
    module, separator, factory = text.partition(":")
    return bool(separator) and all(part.isidentifier() for part in [*module.split("."), *factory.split(".")])


def _preset(d_model: int, d_ff: int, num_layers: int, num_heads: int) -> ModelConfig:
    return ModelConfig(d_model=d_model, d_ff=d_ff, num_layers=num_layers, num_heads=num_heads)


def _gpt2_preset(d_model: int, num_layers: int, num_heads: int) -> ModelConfig:
    return ModelConfig(
        arch=Arch.GPT2, vocab_size=50_257, context_length=1024,
        d_model=d_model, d_ff=4 * d_model, num_layers=num_layers, num_heads=num_heads,
    )  # fmt: skip


SIZES: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "tiny": _preset(128, 512, 2, 4),
        "small": _preset(768, 3072, 12, 12),
        "medium": _preset(1024, 4096, 24, 16),
        "large": _preset(1280, 5120, 36, 20),
        "xl": _preset(1600, 6400, 48, 25),
        "2.7B": _preset(2560, 10240, 32, 32),
        "10B": _preset(4608, 12288, 50, 36),
        "gpt2": _gpt2_preset(768, 12, 12),
        "gpt2-medium": _gpt2_preset(1024, 24, 16),
        "gpt2-large": _gpt2_preset(1280, 36, 20),
        "gpt2-xl": _gpt2_preset(1600, 48, 25),
    }
)
"""The presets by name (CS336 assignment 2, table 1; Radford et al. 2019, table 2)."""
