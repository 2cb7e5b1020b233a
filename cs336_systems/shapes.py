"""The shape of the model, and the presets of its size."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

from .choices import Arch, Attention, SdpaBackend
from .settings import ByDevice, Rule, Setting, check, make_choices

MAX_PARAMETERS = 10**12
"""Most parameters of a model. In fp32 they take 4 TB, which fit no device, so a larger number is
a typing error.
"""
_PRESET = "the preset's"
"""Shown in the help as the default of settings that the size decides."""


def _inner_size(text: str, name: str, csv_place: int) -> Setting:
    """Declare a size of the model that the preset implies unless it is given; `text` is its help,
    `name` its heading.
    """
    return Setting(
        text,
        default=_PRESET,
        least=1,
        heading=name,
        label=4,
        csv_place=csv_place,
        noted="never",
        implied_by_size=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only Transformer language model."""

    arch: Annotated[
        Arch,
        Setting(
            word="", label=4, note="{} architecture", csv_place=2, name_place=15, noted="always"
        ),
    ] = Arch.CS336
    vocab_size: Annotated[
        int,
        Setting(
            "Entries of the vocabulary (tokens).",
            default=_PRESET,
            least=1,
            heading="vocab_size",
            label=4,
            note="vocabulary of {}",
            csv_place=7,
            implied_by_size=True,
            binds_own_model=True,
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
            csv_place=8,
            noted="never",
            binds_own_model=True,
            is_common=True,
            leads_flags=True,
        ),
    ] = 512
    d_model: Annotated[int, _inner_size("Width of the residual stream (elements).", "d_model", 3)]
    d_ff: Annotated[int, _inner_size("Width of the feed-forward layer (elements).", "d_ff", 4)]
    num_layers: Annotated[int, _inner_size("Blocks, one after the other.", "num_layers", 5)]
    num_heads: Annotated[int, _inner_size("Attention heads; must divide d_model.", "num_heads", 6)]
    num_kv_heads: Annotated[
        int,
        Setting(
            "Heads of keys and values, each shared by as many heads of queries (grouped queries); "
            "must divide --num-heads. Architecture cs336 only.",
            default="as many as --num-heads",
            least=0,
            label=4,
            heading="kv heads",
            note="{} heads of keys and values",
            rules=(
                Rule(
                    lambda model: model.arch is Arch.CS336,
                    "{flag} needs a size of architecture cs336, got {config.arch}",
                ),
                Rule(
                    lambda model: model.num_heads % model.num_kv_heads == 0,
                    "{flag} must divide the number of heads, got {config.num_kv_heads} and "
                    "{config.num_heads}",
                ),
            ),
        ),
    ] = 0
    """0 where every head of queries has keys and values of its own."""
    rope_theta: Annotated[
        float,
        Setting(
            "Base of the rotary position embedding's wavelengths.",
            default="10000.0",
            heading="rope_theta",
            label=4,
            note="RoPE theta {}",
            rules=(
                Rule(
                    lambda model: 0 < model.rope_theta < float("inf"),
                    "rope_theta must be positive and finite, got {config.rope_theta}",
                ),
            ),
            csv_place=44,
        ),
    ] = 10_000.0
    attention: Annotated[
        Attention,
        Setting(
            "naive: scores, softmax and values one by one. sdpa: PyTorch's fused attention.",
            plural="attention",
            chosen_by_fast=True,
            word="",
            note="{} attention",
            csv_place=12,
            noted="always",
            is_common=True,
        ),
    ] = Attention.NAIVE
    sdpa_backend: Annotated[
        SdpaBackend,
        Setting(
            "Which kernel sdpa may use; auto lets PyTorch choose.",
            word="",
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
        """Turn strings into members of enumerations; raise ValueError for sizes that make no
        model.
        """
        make_choices(self)
        if self.num_kv_heads == self.num_heads:  # the same model has the same key
            object.__setattr__(self, "num_kv_heads", 0)
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
        feed_forward_matrices = 3 if self.arch is Arch.CS336 else 2
        of_block = 4 * self.d_model**2 + feed_forward_matrices * self.d_model * self.d_ff
        parameters = self.num_layers * of_block + 2 * self.vocab_size * self.d_model
        if parameters > MAX_PARAMETERS:
            raise ValueError(
                f"the model would hold about {parameters:.1e} parameters, more than "
                f"{MAX_PARAMETERS:.0e}: check d_model, d_ff, num_layers and vocab_size"
            )

    @property
    def d_head(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values, of all heads."""
        return (self.num_kv_heads or self.num_heads) * self.d_head


def _preset(
    d_model: int, d_ff: int, num_layers: int, num_heads: int, vocab_size: int = 10_000
) -> ModelConfig:
    """A size of the course's model, with its context length of 512."""
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        d_ff=d_ff,
        num_layers=num_layers,
        num_heads=num_heads,
    )


def _gpt2_preset(d_model: int, num_layers: int, num_heads: int) -> ModelConfig:
    """A size of GPT-2, with its vocabulary and context length."""
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
