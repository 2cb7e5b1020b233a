"""What can be configured, what cannot, and the file names that follow from it."""

import hashlib
import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

from cs336.config import (
    SIZES,
    Arch,
    Attention,
    CompileMode,
    Device,
    Mode,
    ModelConfig,
    OptimizerKind,
    Phase,
    Precision,
    RunConfig,
)
from cs336.config.step import MOST_BF16_SUMS
from tests.neighbours import each_configuration

SHAPE_NAMES = ("vocab_size", "context_length", "d_model", "d_ff", "num_layers", "num_heads")
# CS336 assignment 2 (2025 and 2026) and Radford et al. 2019: d_model, d_ff, num_layers, num_heads.
PUBLISHED = {
    "tiny": (128, 512, 2, 4),
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
    "xl": (1600, 6400, 48, 25),
    "2.7B": (2560, 10240, 32, 32),
    "8B": (4096, 11008, 34, 32),
    "10B": (4608, 12288, 50, 36),
    "gpt2": (768, 3072, 12, 12),
    "gpt2-medium": (1024, 4096, 24, 16),
    "gpt2-large": (1280, 5120, 36, 20),
    "gpt2-xl": (1600, 6400, 48, 25),
}


def shape(**changes: object) -> ModelConfig:
    return ModelConfig(**{"d_model": 8, "d_ff": 12, "num_layers": 2, "num_heads": 2, **changes})


def run(model: ModelConfig | None = None, **changes: object) -> RunConfig:
    return RunConfig(**{"size": "custom", "model": model or shape(), **changes})


def test_published_presets_are_as_published() -> None:
    assert {
        n: (m.d_model, m.d_ff, m.num_layers, m.num_heads) for n, m in SIZES.items()
    }.items() >= PUBLISHED.items()
    for name in PUBLISHED:
        model = SIZES[name]
        gpt2 = name.startswith("gpt2")
        assert model.arch is (Arch.GPT2 if gpt2 else Arch.CS336)
        vocab_size = 50_257 if gpt2 else 151_936 if name == "8B" else 10_000
        assert (model.vocab_size, model.context_length) == (vocab_size, 1024 if gpt2 else 512)
        assert model.rope_theta == 10_000
    with pytest.raises(TypeError):
        SIZES["tiny"] = SIZES["small"]


@pytest.mark.parametrize("value", [0, -(10**18), 10**18])
@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_a_shape_that_cannot_be_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        run(shape(**{name: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 10, "num_heads": 4}, "d_model must be divisible by num_heads, got 10 and 4"),
        ({"d_model": 6, "num_heads": 2}, "must be even, got 6 / 2 = 3"),
        *(
            ({"rope_theta": value}, "rope_theta must be positive and finite")
            for value in (0.0, -1.0, math.inf, math.nan)
        ),
        ({"sdpa_backend": "flash"}, "sdpa_backend flash needs attention sdpa, got attention naive"),
    ],
)
def test_a_shape_that_contradicts_itself_is_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        shape(**changes)
    assert shape(arch=Arch.GPT2, d_model=6, num_heads=2).d_head == 3, "only RoPE needs an even head"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 10**18}, "check batch_size"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"warmup_steps": 10**18}, "warmup_steps + measured_steps must be at most 1000000"),
        ({"measured_steps": 0}, "measured_steps must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": 2**63}, f"seed must be at most {2**63 - 1}"),
        ({"repeat": -1}, "repeat must be at least 0, got -1"),
        ({"learning_rate": 0.0}, "learning_rate must be between 0 and 1, got 0.0"),
        ({"learning_rate": math.nan}, "learning_rate must be between 0 and 1, got nan"),
        ({"pad_vocabulary": 0}, "pad_vocabulary must be at least 1, got 0"),
        ({"pad_vocabulary": 10**6}, "pad_vocabulary must be at most 65536, got 1000000"),
        ({"tokens": "/data/\udcff.npy"}, "tokens needs a file name that is valid UTF-8"),
        *(
            ({"model_factory": name}, "model must be package.module:factory")
            for name in (
                "os",
                "os:",
                ":system",
                "a b:c",
                "../a:b",
                "a.b:c d",
                "a:b()",
                "a..b:c",
                "a:b.",
                "a:b\0",
            )
        ),
        ({"mode": "sleep"}, "'sleep' is not a valid Mode"),
    ],
)
def test_a_value_out_of_bounds_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run(**changes)


def test_a_factory_is_not_imported() -> None:
    assert run(model_factory="nowhere.to_be:Found.make").model_factory == "nowhere.to_be:Found.make"


ALL = RunConfig(
    size="custom",
    model=ModelConfig(d_model=128, d_ff=64, num_layers=2, num_heads=2, attention=Attention.SDPA),
    precision=Precision.BF16,
    device=Device.CUDA,
    optimizer=OptimizerKind.FUSED,
    compile=CompileMode.DEFAULT,
    compile_blocks=True,
    pad_vocabulary=64,
    cast_once=True,
    split_masters=True,
    fused_loss=True,
    loss_chunks=2,
    fused_blocks=True,
    fused_activations=True,
    packed_attention=True,
    bf16_embedding=True,
    bf16_stream=True,
    bf16_moments=True,
    cuda_graph=True,
)
"""All shortcuts that go together."""
NO_COPIES: dict[str, object] = {
    "split_masters": False,
    "loss_chunks": 1,
    "fused_blocks": False,
    "fused_activations": False,
    "packed_attention": False,
    "bf16_embedding": False,
    "bf16_stream": False,
    "bf16_moments": False,
}
SELECTIVE: dict[str, object] = {
    "checkpoint_blocks": 1,
    "selective_checkpoints": True,
    "fused_activations": False,
}
FP8: dict[str, object] = {"fp8": True, "fused_activations": False}
REFUSED: tuple[tuple[dict[str, object], str], ...] = (
    (
        {"compile": "none"},
        "--compile-blocks needs a mode, as in --compile default, got --compile none",
    ),
    ({"model_factory": "a:b"}, "--compile-blocks needs this project's model, got --model 'a:b'"),
    ({"compile_blocks": False}, "--fused-loss needs --compile-blocks, as a whole model"),
    ({"optimizer": "adamw"}, "--cast-once needs --optimizer fused, got --optimizer adamw"),
    ({"precision": "tf32"}, "--cast-once needs --precision bf16, got --precision tf32"),
    (
        {"accumulate_steps": MOST_BF16_SUMS + 1},
        f"--accumulate-steps must be at most {MOST_BF16_SUMS} with --cast-once",
    ),
    (
        {"model": replace(ALL.model, d_model=132)},
        "--cast-once needs a d_model that is a multiple of 8",
    ),
    ({"cast_once": False}, "--split-masters needs --cast-once, got none"),
    ({"mode": "forward"}, "--split-masters needs --mode train, got --mode forward"),
    (
        {"mode": "forward", "split_masters": False},
        "--bf16-moments needs --mode train, got --mode forward",
    ),
    ({"fused_loss": False}, "--loss-chunks needs --fused-loss, got none"),
    ({"fused_blocks": False}, "--fused-activations needs --fused-blocks, got none"),
    (
        {"fused_blocks": False, "fused_activations": False},
        "--packed-attention needs --fused-blocks, got none",
    ),
    (
        {"model": replace(ALL.model, d_ff=60)},
        "--fused-activations needs a d_ff that is a multiple of 8",
    ),
    (
        {"checkpoint_blocks": 1, "selective_checkpoints": True},
        "cannot be combined with --selective-checkpoints",
    ),
    (
        {**SELECTIVE, "checkpoint_blocks": 2},
        "needs --checkpoint-blocks 1, as each block is a checkpoint, got --check",
    ),
    (
        {**SELECTIVE, **FP8, "packed_attention": False},
        "--selective-checkpoints cannot be combined with --fp8 and --compile default",
    ),
    ({"keep_hidden": 1}, "--keep-hidden needs --selective-checkpoints, got none"),
    ({**SELECTIVE, "keep_hidden": 3}, "--keep-hidden 3 is more than the 2 blocks of the model"),
    (
        {"model": replace(ALL.model, attention="naive")},
        "--packed-attention needs --attention sdpa, got --attention",
    ),
    (
        {"model": replace(ALL.model, sdpa_backend="math")},
        "cannot be combined with --sdpa-backend math",
    ),
    ({"model": replace(ALL.model, num_heads=4)}, "needs heads of a width in (64, 96, 128)"),
    ({"fp8": True}, "--fused-activations cannot be combined with --fp8"),
    (
        {**FP8, "batch_size": 3, "model": replace(ALL.model, context_length=8)},
        "got batch_size x context_length = 24",
    ),
    ({**NO_COPIES, **FP8, "cast_once": False}, "--fp8 needs --cast-once, got none"),
    ({"warmup_steps": 3}, "at least --warmup-steps 4: it records the step after 3 others, got 3"),
    ({"device": "cpu"}, "--cuda-graph needs --device cuda, got --device cpu"),
    ({"profiler": "memory"}, "--cuda-graph cannot be combined with --memory"),
    (
        {**NO_COPIES, "cast_once": False, "precision": "fp16"},
        "whose loss is not scaled, got --precision fp16",
    ),
    (
        {"compile": "reduce-overhead"},
        "a mode of --compile without graphs of its own, got --compile reduce-overhead",
    ),
    (
        {"shard_optimizer": True},
        "--shard-optimizer needs a way that leaves all gradients to each rank",
    ),
    ({"ranks": 2}, "--ranks needs a way to share a step"),
    ({"parallel": "ddp"}, "--parallel ddp cannot be combined with --cuda-graph yet"),
    (
        {"parallel": "ddp-push", "cuda_graph": False, "expandable_segments": True},
        "ranks open each other's memory",
    ),
    (
        {
            "parallel": "ddp-flat",
            "cuda_graph": False,
            "split_masters": False,
            "bf16_moments": False,
            "mode": "forward",
        },
        "--parallel needs gradients, so --mode forward-backward or train, got --mode forward",
    ),
    ({"parallel": "fsdp", "cuda_graph": False, "shard_optimizer": True}, "got --parallel fsdp"),
    ({"loss": "model"}, "loss needs your own model"),
    (
        {"parallel": "fsdp", "sync_phases": True},
        "with --cuda-graph cannot be combined with --sync-phases",
    ),
)


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(ALL, **changes)


def test_as_many_sums_in_bf16_as_are_allowed_add_up() -> None:
    """Equal gradients add nothing after 256 of them; half of that is allowed."""
    total = torch.zeros((), dtype=torch.bfloat16)
    sums = []
    for _ in range(300):
        total = total + 1
        sums.append(total.item())
    assert sums[:MOST_BF16_SUMS] == list(range(1, MOST_BF16_SUMS + 1))
    assert sums[-1] == 2 * MOST_BF16_SUMS


def test_every_mode_times_its_phases() -> None:
    forward, backward, optimizer = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER
    assert run(mode=Mode.INFERENCE).phases == (forward,)
    assert run(mode=Mode.FORWARD).phases == (forward,)
    assert run(mode=Mode.FORWARD_BACKWARD).phases == (forward, backward)
    assert run(mode=Mode.TRAIN).phases == (forward, backward, optimizer)
    assert run(mode=Mode.FORWARD, tokens="x.npy").phases == (Phase.DATA, forward)


def test_every_setting_changes_the_key() -> None:
    configs = set(each_configuration())
    assert len(configs) > len(fields(RunConfig)) + len(fields(ModelConfig))
    assert len({config.key for config in configs}) == len(configs)


HOSTILE = (
    "../../x",
    "/etc/x",
    "a\\b",
    "",
    ".hidden",
    "-rf",
    "x" * 300,
    "a\0b",
    "a\nb",
    "<b>|x",
    "CON:",
    "Größe",
)


def test_hostile_text_makes_a_plain_and_unique_key() -> None:
    """As a record from elsewhere may have it."""
    keys = [run(size=text).key for text in HOSTILE] + [run(tokens=text).key for text in HOSTILE]
    assert all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,120}", key) for key in keys)
    assert len(set(keys)) == len(keys)


def test_the_key_is_a_digest_of_what_differs_from_the_defaults() -> None:
    """Written out by hand, so that no change of the code takes finished records for those of
    another run.
    """
    run_part = '{"measured_steps": 3, "mode": "forward", "size": "tiny"}'
    model_part = (
        '{"context_length": 64, "d_ff": 512, "d_model": 128, "num_heads": 4, "num_layers": 2}'
    )
    digest = hashlib.sha256(f"[{run_part}, {model_part}]".encode()).hexdigest()[:10]
    config = RunConfig(
        size="tiny",
        model=replace(SIZES["tiny"], context_length=64),
        mode=Mode.FORWARD,
        measured_steps=3,
        repeat=7,
    )
    assert config.key == f"tiny_ctx64_b4_forward_fp32_{digest}_r7"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterModelConfig(ModelConfig):
    """The shape as a later version might have it."""

    dropout: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterRunConfig(RunConfig):
    """The run as a later version might have it."""

    activation_checkpointing: bool = False


def test_a_field_added_later_leaves_keys_as_they_are() -> None:
    model = {"d_model": 8, "d_ff": 12, "num_layers": 2, "num_heads": 2}
    now = RunConfig(size="custom", model=ModelConfig(**model), seed=3)
    later = LaterRunConfig(size="custom", model=LaterModelConfig(**model), seed=3)
    assert later.key == now.key
    assert replace(later, activation_checkpointing=True).key != now.key
    assert replace(later, model=LaterModelConfig(**model, dropout=0.1)).key != now.key


def test_repeats_share_their_configuration() -> None:
    first, second = run(), run(repeat=1)
    assert first.key != second.key
    assert first.configuration == second.configuration == first


def test_the_label_says_what_is_unusual() -> None:
    small = replace(SIZES["small"], context_length=64)
    assert (
        RunConfig(size="small", model=small, mode=Mode.FORWARD).label == "small ctx 64 forward fp32"
    )
    config = RunConfig(
        size="small",
        model=replace(small, attention=Attention.SDPA),
        precision=Precision.BF16,
        optimizer=OptimizerKind.FUSED,
        warmup_steps=2,
        batch_size=8,
        repeat=3,
    )
    assert config.label == "small ctx 64 train bf16 sdpa fused warm-up 2 batch 8 #3"
    assert (
        "d_model 128"
        in replace(config, size="custom", model=replace(small, d_model=128, num_heads=2)).label
    )


def test_a_choice_may_be_named_by_a_string() -> None:
    """It compares equal to the choice, and must then be the same one wherever something is
    remembered by it.
    """
    named = run(
        ModelConfig(d_model=8, d_ff=8, num_layers=1, num_heads=2, attention="sdpa"),
        mode="inference",
    )
    assert named.mode is Mode.INFERENCE
    assert named.model.attention is Attention.SDPA
