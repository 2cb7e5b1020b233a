"""Forecasts of models that nobody here wrote: peaks measured on an H100, and PyTorch's own count
of FLOPs.
"""

import json
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode

from cs336.cli import main
from cs336.config import SIZES, UNSIZED, Device, LossKind, Precision, RunConfig
from cs336.costs import traces
from cs336.costs.fit import fits, largest_batch, largest_context
from cs336.costs.memory import predict_memory
from cs336.costs.tape import Category
from cs336.costs.time import costs_by_module
from cs336.costs.tracing import tracing
from cs336.measure import traced
from cs336.model.trainable import checkpoint_each_block
from cs336.model.transformer import TransformerLM
from cs336.model.user_code import logits_of

D, V, LAYERS, LENGTH = 32, 70, 3, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.qkv, self.proj = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in self.qkv(self.ln(x)).split(D, dim=-1)
        )
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return x + self.proj((weights @ v).transpose(1, 2).flatten(2))


class NanoGPT(nn.Module):
    """nanoGPT's interface, its tied head, and its longest context."""

    longest = LENGTH

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, D), nn.Embedding(self.longest, D)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.lm_head = nn.Linear(D, V, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        assert idx.shape[1] <= self.longest
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        return logits, None if targets is None else F.cross_entropy(
            logits.flatten(0, 1), targets.flatten()
        )


class OfOneLength(NanoGPT):
    """Takes whole sequences alone."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        assert idx.shape[1] == self.longest
        return super().forward(idx, targets)


class OfPositions(NanoGPT):
    """Says nothing of its longest context: a GPU would look up what is not in its table."""

    longest = 10**6

    def __init__(self) -> None:
        super().__init__()
        self.wpe = nn.Embedding(LENGTH, D)


class Router(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x


class Routed(NanoGPT):
    def __init__(self) -> None:
        super().__init__()
        self.h.append(Router())


@pytest.fixture(autouse=True)
def nothing_is_traced_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_traced", {})


def run_of(name: str, length: int = LENGTH, **settings: object) -> RunConfig:
    config = RunConfig(
        size=UNSIZED,
        model=replace(SIZES["tiny"], context_length=length),
        batch_size=4,
        device=Device.CUDA,
        model_factory=f"{__name__}:{name}",
        **settings,
    )
    traces.prepare([config])
    return config


def llama(attention: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=16,
            hidden_size=1024,
            intermediate_size=2816,
            num_attention_heads=16,
            num_key_value_heads=4,
            vocab_size=32_000,
            use_cache=False,
            attn_implementation=attention,
        )
    )


def gpt2(attention: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            attn_implementation=attention,
        )
    )


def gpt2_eager() -> nn.Module:
    return gpt2("eager")


def gpt2_sdpa() -> nn.Module:
    return gpt2("sdpa")


def llama_eager() -> nn.Module:
    return llama("eager")


def llama_sdpa() -> nn.Module:
    return llama("sdpa")


@pytest.mark.parametrize(
    ("name", "fp32_gib", "bf16_gib"),
    [
        ("gpt2_eager", 9.981, 9.961),
        ("gpt2_sdpa", 7.734, 6.591),
        ("llama_eager", 13.638, 14.002),
        ("llama_sdpa", 13.603, 7.935),
    ],
)
def test_peaks_of_transformers_are_those_measured_on_an_h100(
    name: str, fp32_gib: float, bf16_gib: float
) -> None:
    """In fp32 no fused kernel takes Llama's grouped queries. Imported within a trace,
    transformers draws no weights.
    """
    transformers = pytest.importorskip("transformers")
    assert all(hasattr(transformers, name) for name in ("GPT2LMHeadModel", "LlamaForCausalLM")), (
        "imported by asking"
    )
    for precision, gib in ((Precision.FP32, fp32_gib), (Precision.BF16, bf16_gib)):
        prediction = predict_memory(run_of(name, 1024, precision=precision))
        assert prediction is not None
        assert prediction.peak.allocated_bytes / 2**30 == pytest.approx(gib, rel=0.01)


@pytest.mark.parametrize("loss", LossKind)
def test_flops_by_module_are_those_that_pytorch_counts(loss: LossKind) -> None:
    model, tokens = NanoGPT(), torch.zeros(4, LENGTH, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens)[1].backward()
    counts = {
        name: sum(by_operation.values()) for name, by_operation in counter.get_flop_counts().items()
    }
    by_module = costs_by_module(run_of("NanoGPT", loss=loss))
    step = {path: costs.forward_flops + costs.backward_flops for path, costs in by_module.items()}
    assert sum(step.values()) == counts["Global"]
    assert step["h.*.qkv"] == sum(counts[f"NanoGPT.h.{layer}.qkv"] for layer in range(LAYERS))
    assert step["lm_head"] == counts["NanoGPT.lm_head"]
    assert sum(costs.parameters for costs in by_module.values()) == sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert by_module["h.*.proj"].parameters == LAYERS * (D * D + D)


def small(kind: str, **settings: object) -> nn.Module:
    """A model of transformers with two layers, whose matmuls PyTorch's counter sees one by one."""
    import transformers

    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "vocab_size": 254,
        "use_cache": False,
        "attn_implementation": "eager",
    }
    config = getattr(transformers, f"{kind}Config")(**sizes | settings)
    return getattr(
        transformers, f"{ {'GPT2': 'GPT2LMHeadModel'}.get(kind, f'{kind}ForCausalLM') }"
    )(config)


def small_gpt2() -> nn.Module:
    return small("GPT2", n_inner=160, n_positions=1100)


def small_llama() -> nn.Module:
    return small("Llama", num_key_value_heads=2)


def small_gemma2() -> nn.Module:
    return small("Gemma2", num_key_value_heads=2, head_dim=32, sliding_window=128)


class LongNanoGPT(NanoGPT):
    longest = 1100


class OfOurs(TransformerLM):
    """This project's model, as if a user had written it."""

    def __init__(self, context_length: int) -> None:
        super().__init__(replace(SIZES["tiny"], context_length=context_length))


@pytest.mark.parametrize("name", ["small_gpt2", "small_llama", "small_gemma2", "LongNanoGPT"])
def test_a_model_of_others_has_its_flops_and_parameters_at_any_length(name: str) -> None:
    """At lengths that divide its widths, or are one less than their divisors, above all."""
    if name != "LongNanoGPT":
        pytest.importorskip("transformers")
    draw = random.Random(name)
    lengths = sorted(
        {2, 127, *(draw.randint(2, 1100) for _ in range(5)), *draw.sample((64, 95, 128, 253), 3)}
    )
    model = globals()[name]()
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    flops = []
    for length in lengths:
        config = run_of(name, length)
        with FlopCounterMode(display=False) as counter:
            logits_of(model(torch.zeros(1, length, dtype=torch.long))).sum().backward()
        of_modules = sum(
            module.forward_flops + module.backward_flops
            for module in costs_by_module(config).values()
        )
        assert of_modules == config.batch_size * counter.get_total_flops()
        assert traces.tape_of(config).bytes_of(Category.PARAMETERS) == parameter_bytes
        flops.append(counter.get_total_flops())
    assert flops == sorted({*flops})


def test_what_fits_of_a_model_is_traced_on_both_sides_of_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    trace_all = traced.trace_all
    monkeypatch.setattr(traced, "trace_all", lambda asked: calls.append(asked) or trace_all(asked))
    draw = random.Random(0)
    for _ in range(2):
        config, memory_bytes = (
            run_of("OfOurs", draw.randint(20, 90)),
            draw.randint(1150, 2500) * 2**20,
        )
        del calls[:]
        size, length = largest_batch(config, memory_bytes), largest_context(config, memory_bytes)
        assert len(calls) <= 24
        monkeypatch.setattr(traces, "_traced", {})
        for more in (0, 1):
            larger = replace(config, batch_size=size + more)
            longer = replace(config, model=replace(config.model, context_length=length + more))
            traces.prepare([larger, longer])
            assert [fits(more_of_it, memory_bytes) for more_of_it in (larger, longer)] == [
                more == 0
            ] * 2


@pytest.mark.parametrize("name", ["NanoGPT", "OfOneLength", "OfPositions"])
def test_the_longest_context_is_one_that_the_model_takes(name: str) -> None:
    config = run_of(name)
    assert largest_batch(config, 2**30) > 4
    assert largest_context(config, 2**30) == LENGTH
    longer = replace(config, model=replace(config.model, context_length=LENGTH + 1))
    assert traces.why_untraced(longer)
    assert predict_memory(longer) is None


POSITIONS = {
    "as they are": lambda length, _: torch.arange(length),
    "of a cache": lambda length, rows: torch.arange(1, length) + rows // 2,
    "of a longer range": lambda length, rows: torch.arange(2 * rows)[:length],
    "cut in place": lambda length, rows: torch.arange(length).clamp_(max=rows - 1),
    "cut": lambda length, rows: torch.arange(length).clamp(max=rows - 1),
    "repeated": lambda length, _: torch.arange(length)[None].expand(3, -1).long(),
    "backwards": lambda length, _: torch.arange(length - 1, -1, -1),
    "buckets": lambda length, rows: torch.arange(length) % rows,
}


@pytest.mark.parametrize("make", POSITIONS.values(), ids=POSITIONS)
def test_positions_that_a_table_does_not_have_are_refused_as_with_values(
    make: Callable[[int, int], Tensor],
) -> None:
    draw = random.Random(0)
    for _ in range(10):
        rows, length = draw.randint(4, 20), draw.randint(2, 20)
        for look_up in (F.embedding, lambda index, table: table[index]):
            failures = []
            for place in ("cpu", "cuda"):
                with tracing({}) if place == "cuda" else nullcontext(), torch.device(place):
                    try:
                        look_up(make(length, rows), torch.empty(rows, 2))
                    except IndexError as error:
                        failures.append(error)
            assert len(failures) != 1, f"{length} positions, {rows} rows: {failures}"


def test_checkpoints_of_own_blocks_change_the_memory_alone() -> None:
    plain, saving, tokens = NanoGPT(), NanoGPT(), torch.arange(LENGTH)[None]
    saving.load_state_dict(plain.state_dict())
    checkpoint_each_block(saving)
    for model in (plain, saving):
        loss = model(tokens, tokens)[1]
        assert loss is not None
        loss.backward()
    for one, other in zip(plain.parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    peaks = [predict_memory(run_of("NanoGPT", checkpoint_blocks=blocks)) for blocks in (0, 1)]
    kept = [
        sum(
            part.size_bytes
            for part in peak.peak.parts
            if ".h." in part.label or "h.*" in part.label
        )
        for peak in peaks
        if peak is not None
    ]
    assert kept[1] < kept[0] / 2
    with pytest.raises(ValueError, match="needs blocks in a"):
        checkpoint_each_block(Block())


def test_no_model_of_a_user_is_traced_unless_that_is_asked_for() -> None:
    config = replace(run_of("NanoGPT"), model_factory=f"{__name__}:none_such")
    assert predict_memory(config) is None


class LossAlone(NanoGPT):
    def forward(self, idx: Tensor) -> Tensor:
        return super().forward(idx)[0].sum()


class OfImages(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(3, 4, 3)


@pytest.mark.parametrize("name", ["LossAlone", "OfImages"])
def test_a_model_that_cannot_be_used_is_refused_in_one_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["account", "--model", f"{__name__}:{name}", "--context-length", str(LENGTH)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert (
        len([line for line in said.err.splitlines() if name in line and "tracing" not in line]) == 1
    )


def test_what_was_not_traced_has_no_flops(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["account", "--model", f"{__name__}:Routed", "--context-length", str(LENGTH), "--json"]
        )
        == 0
    )
    parts = json.loads(capsys.readouterr().out)["parts"]
    for part in parts:
        assert part["parameters"]
        assert all(part[key] is None for key in part if key not in ("component", "parameters"))


def test_an_account_of_what_cannot_be_traced_has_the_parameters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(
            [
                "account",
                "--model",
                f"{__name__}:Routed",
                "--context-length",
                str(LENGTH),
                "--fit",
                "--device-name",
                "H100 80GB HBM3",
            ]
        )
        == 0
    )
    said = capsys.readouterr()
    (line,) = [line for line in said.err.splitlines() if "no forecast" in line]
    assert re.search(r"h\.\*: aten::_local_scalar_dense needs the values", line)
    assert f"{sum(each.numel() for each in Routed().parameters()):,}" in said.out


def test_an_account_of_a_user_s_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "account",
                "--model",
                f"{__name__}:NanoGPT",
                "--context-length",
                str(LENGTH),
                "--module-depth",
                "1",
                "--device-name",
                "H100 80GB HBM3",
                "--fit",
                "--details",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    for word in (
        "this configuration",
        "h.*",
        "Predicted time of a step",
        "Launches are the limit",
        "moved forward",
    ):
        assert word in said
    assert "d_model" not in said
