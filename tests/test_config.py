"""What can be configured, what cannot, and the file names that follow from it."""

import hashlib
import itertools
import re
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import Any

import pytest

from cs336_systems.config import (
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
    Profiler,
    RunConfig,
    SdpaBackend,
)
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


def test_the_presets_are_the_published_ones() -> None:
    assert {n: (m.d_model, m.d_ff, m.num_layers, m.num_heads) for n, m in SIZES.items()} == PUBLISHED
    for name, model in SIZES.items():
        gpt2 = name.startswith("gpt2")
        assert model.arch is (Arch.GPT2 if gpt2 else Arch.CS336)
        vocab_size = 50_257 if gpt2 else 151_936 if name == "8B" else 10_000
        assert (model.vocab_size, model.context_length) == (vocab_size, 1024 if gpt2 else 512)
        assert model.rope_theta == 10_000
    with pytest.raises(TypeError):
        SIZES["tiny"] = SIZES["small"]


@pytest.mark.parametrize("value", [0, -1, -(10**18)])
@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_a_shape_smaller_than_one_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be at least 1, got {value}$"):
        shape(**{name: value})


@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_a_shape_that_no_machine_holds_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        run(shape(**{name: 10**18}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 10, "num_heads": 4}, "d_model must be divisible by num_heads, got 10 and 4"),
        ({"d_model": 6, "num_heads": 2}, "must be even, got 6 / 2 = 3"),
        ({"rope_theta": 0.0}, "rope_theta must be positive and finite, got 0.0"),
        ({"rope_theta": -1.0}, "rope_theta must be positive"),
        ({"rope_theta": float("inf")}, "rope_theta must be positive and finite, got inf"),
        ({"rope_theta": float("nan")}, "rope_theta must be positive and finite, got nan"),
        ({"sdpa_backend": SdpaBackend.FLASH}, "sdpa_backend flash needs attention sdpa, got attention naive"),
    ],
)
def test_a_shape_that_contradicts_itself_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        shape(**changes)


def test_only_rope_needs_an_even_head() -> None:
    assert shape(arch=Arch.GPT2, d_model=6, num_heads=2).d_head == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": -1}, "batch_size must be at least 1, got -1"),
        ({"batch_size": 10**18}, "check batch_size"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"warmup_steps": 10**18}, "warmup_steps + measured_steps must be at most 1000000"),
        ({"measured_steps": 0}, "measured_steps must be at least 1, got 0"),
        ({"measured_steps": 10**18}, "warmup_steps + measured_steps must be at most 1000000"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": 2**63}, "seed must be below 2**63"),
        ({"repeat": -1}, "repeat must be at least 0, got -1"),
        ({"compile_blocks": True}, "--compile-blocks needs a mode, as in --compile default, got --compile none"),
        (
            {"compile_blocks": True, "compile": CompileMode.DEFAULT, "model_factory": "a:b"},
            "--compile-blocks needs this project's model, got --model 'a:b'",
        ),
        ({"precision": Precision.TF32}, "--precision tf32 needs --device cuda, got --device cpu"),
        ({"tokens": "/data/\udcff.npy"}, "tokens"),
    ],
)
def test_a_run_that_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run(**changes)


@pytest.mark.parametrize(
    "factory",
    ["", "os", "os:", ":system", "a b:c", "a/b:c", "../a:b", "a.b:c d", "a:b()", "a..b:c", ".a:b", "a:b.", "a:b\0"],
)
def test_a_factory_is_a_dotted_name_in_a_dotted_module(factory: str) -> None:
    with pytest.raises(ValueError, match=r"model must be package\.module:factory"):
        run(model_factory=factory)


@pytest.mark.parametrize("factory", ["model:make", "package.module:factory", "m:Class.method"])
def test_a_factory_of_the_right_form_is_not_imported(factory: str) -> None:
    assert run(model_factory=factory).model_factory == factory


def test_configurations_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        run().seed = 1
    with pytest.raises(FrozenInstanceError):
        shape().d_model = 1


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


def test_keys_are_unique_and_safe_file_names_over_a_large_grid() -> None:
    grid = [
        RunConfig(
            size=size, model=replace(SIZES[size], context_length=context_length, attention=attention),
            batch_size=batch_size, mode=mode, precision=precision, optimizer=optimizer, warmup_steps=warmup_steps,
            compile=compile_mode, device=Device.CUDA, repeat=repeat,
        )
        for size, context_length, attention, batch_size, mode, precision, optimizer, warmup_steps, compile_mode, repeat
        in itertools.product(
            ("tiny", "2.7B", "gpt2-medium"), (128, 1024), Attention, (1, 16), Mode, Precision, OptimizerKind,
            (0, 5), (CompileMode.NONE, CompileMode.MAX_AUTOTUNE_NO_CUDAGRAPHS), (0, 12),
        )
    ]  # fmt: skip
    keys = [config.key for config in grid]
    assert len(grid) == 3 * 2 * 2 * 2 * 4 * 4 * 3 * 2 * 2 * 2
    assert len({key.lower() for key in keys}) == len(grid), "unique where case does not count, too"
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}", key) for key in keys)


HOSTILE = [
    "../../x",
    "/etc/x",
    "a/b",
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
]


def test_hostile_text_makes_a_plain_and_unique_key() -> None:
    """As a record from elsewhere may have it."""
    keys = [run(size=text).key for text in HOSTILE] + [run(tokens=text).key for text in HOSTILE]
    assert all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,120}", key) for key in keys)
    assert len(set(keys)) == len(keys)


def test_the_key_is_a_digest_of_what_differs_from_the_defaults() -> None:
    """Written out by hand, so that no change of the code takes finished records for those of another run."""
    run_part = '{"measured_steps": 3, "mode": "forward", "size": "tiny"}'
    model_part = '{"context_length": 64, "d_ff": 512, "d_model": 128, "num_heads": 4, "num_layers": 2}'
    digest = hashlib.sha256(f"[{run_part}, {model_part}]".encode()).hexdigest()[:10]
    config = RunConfig(
        size="tiny", model=replace(SIZES["tiny"], context_length=64), mode=Mode.FORWARD, measured_steps=3, repeat=7
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
    assert RunConfig(size="small", model=small, mode=Mode.FORWARD).label == "small ctx 64 forward fp32"
    config = RunConfig(
        size="small", model=replace(small, attention=Attention.SDPA), precision=Precision.BF16,
        optimizer=OptimizerKind.FUSED, warmup_steps=2, batch_size=8, repeat=3,
    )  # fmt: skip
    assert config.label == "small ctx 64 train bf16 sdpa fused warm-up 2 batch 8 #3"
    assert "d_model 128" in replace(config, size="custom", model=replace(small, d_model=128, num_heads=2)).label


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pad_vocabulary": 0}, "pad_vocabulary must be at least 1, got 0"),
        ({"pad_vocabulary": 10**6}, "pad_vocabulary must be at most 65536, got 1000000"),
        ({"learning_rate": 0.0}, "learning_rate must be between 0 and 1, got 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate must be between 0 and 1, got nan"),
        ({"cast_once": True}, "--cast-once needs --precision bf16, got --precision fp32"),
        (
            {"cast_once": True, "precision": Precision.BF16},
            "--cast-once needs --optimizer fused, got --optimizer adamw",
        ),
        ({"cast_once": True, "model_factory": "a:b"}, "--cast-once needs this project's model, got --model 'a:b'"),
        ({"fp8": True, "precision": Precision.BF16}, "--fp8 needs --cast-once, got none"),
        ({"fp8": True}, "--fp8 needs --precision bf16, got --precision fp32"),
        (
            {
                "fp8": True,
                "precision": Precision.BF16,
                "cast_once": True,
                "batch_size": 3,
                "optimizer": OptimizerKind.FUSED,
                "model": shape(d_model=16, context_length=8, d_ff=40),
            },
            "fp8 needs sizes that are multiples of 16, got batch_size x context_length = 24, d_ff = 40",
        ),
        ({"fp8": True, "model_factory": "a:b"}, "--fp8 needs this project's model, got --model 'a:b'"),
        ({"pad_vocabulary": 64, "model_factory": "a:b"}, "--pad-vocabulary needs this project's model"),
        ({"cuda_graph": True, "optimizer": OptimizerKind.FUSED}, "--cuda-graph needs --device cuda, got --device cpu"),
        ({"cuda_graph": True, "device": Device.CUDA}, "--cuda-graph needs --optimizer fused, got --optimizer adamw"),
        *(
            ({"cuda_graph": True, "device": Device.CUDA, "optimizer": OptimizerKind.FUSED, **other}, said)
            for other, said in (
                ({"precision": Precision.FP16}, "a precision whose loss is not scaled, got --precision fp16"),
                (
                    {"compile": CompileMode.REDUCE_OVERHEAD},
                    "a mode of --compile without graphs of its own, got --compile reduce",
                ),
                (
                    {"profiler": Profiler.MEMORY},
                    "--cuda-graph cannot be combined with --memory: a replayed graph allocates nothing",
                ),
                ({"warmup_steps": 3}, "at least --warmup-steps 4: it records the step after 3 others, got 3"),
            )
        ),
    ],
)
def test_what_makes_a_step_faster_must_go_with_the_rest(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(**settings)


@pytest.mark.parametrize(
    ("shape", "settings", "said"),
    [
        ({}, {"fused_blocks": False}, "needs --fused-blocks, got none"),
        ({"attention": Attention.NAIVE}, {}, "needs --attention sdpa, got --attention naive"),
        ({"sdpa_backend": SdpaBackend.MATH}, {}, "cannot be combined with --sdpa-backend math"),
        ({"num_heads": 4}, {}, r"needs heads of a width in \(64, 96, 128\).*, got 32"),
    ],
)
def test_what_flash_attention_4_on_packed_heads_needs(
    shape: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    model = ModelConfig(d_model=128, d_ff=8, num_layers=1, num_heads=2, attention=Attention.SDPA)
    half: dict[str, Any] = {
        "precision": Precision.BF16,
        "optimizer": OptimizerKind.FUSED,
        "cast_once": True,
        "fused_blocks": True,
    }
    run(model, **half, packed_attention=True)
    with pytest.raises(ValueError, match=f"--packed-attention {said}"):
        run(replace(model, **shape), **half | settings, packed_attention=True)


def test_a_choice_may_be_named_by_a_string() -> None:
    """It compares equal to the choice, and must then be the same one wherever something is remembered by it."""
    named = run(ModelConfig(d_model=8, d_ff=8, num_layers=1, num_heads=2, attention="sdpa"), mode="inference")
    assert named.mode is Mode.INFERENCE
    assert named.model.attention is Attention.SDPA
    with pytest.raises(ValueError, match="'sleep' is not a valid Mode"):
        run(mode="sleep")
