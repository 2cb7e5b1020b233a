"""Forecasts of models that nobody here wrote: peaks measured on an H100, and PyTorch's own count of FLOPs."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.cli import main
from cs336_systems.config import SIZES, UNSIZED, Device, LossKind, Precision, RunConfig
from cs336_systems.costs import traces
from cs336_systems.costs.memory import largest_batch, largest_context, predict_memory
from cs336_systems.costs.time import costs_by_module
from cs336_systems.model.trainable import checkpoint_each_block

D, V, LAYERS, LENGTH = 32, 70, 3, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.qkv, self.proj = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.ln(x)).split(D, dim=-1))
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
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class OfOneLength(NanoGPT):
    """Takes whole sequences alone."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        assert idx.shape[1] == self.longest
        return super().forward(idx, targets)


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
        size=UNSIZED, model=replace(SIZES["tiny"], context_length=length), batch_size=4, device=Device.CUDA,
        model_factory=f"{__name__}:{name}", **settings,  # type: ignore[arg-type]
    )  # fmt: skip
    traces.prepare([config])
    return config


def llama(attention: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        num_hidden_layers=16, hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=32_000, use_cache=False, attn_implementation=attention,
    ))  # fmt: skip


def gpt2(attention: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, attn_implementation=attention
    ))  # fmt: skip


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
        ("gpt2_eager", 9.981, 9.961), ("gpt2_sdpa", 7.734, 6.591),
        ("llama_eager", 13.638, 14.002), ("llama_sdpa", 13.603, 7.935),
    ],
)  # fmt: skip
def test_peaks_of_transformers_are_those_measured_on_an_h100(name: str, fp32_gib: float, bf16_gib: float) -> None:
    """In fp32 no fused kernel takes Llama's grouped queries. Imported within a trace, transformers draws no weights."""
    transformers = pytest.importorskip("transformers")
    assert all(hasattr(transformers, name) for name in ("GPT2LMHeadModel", "LlamaForCausalLM")), "imported by asking"
    for precision, gib in ((Precision.FP32, fp32_gib), (Precision.BF16, bf16_gib)):
        found = predict_memory(run_of(name, 1024, precision=precision))
        assert found is not None
        assert found.peak.allocated_bytes / 2**30 == pytest.approx(gib, rel=0.01)


@pytest.mark.parametrize("loss", LossKind)
def test_flops_by_module_are_those_that_pytorch_counts(loss: LossKind) -> None:
    model, tokens = NanoGPT(), torch.zeros(4, LENGTH, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens)[1].backward()
    counts = {name: sum(each.values()) for name, each in counter.get_flop_counts().items()}
    found = costs_by_module(run_of("NanoGPT", loss=loss))
    step = {path: costs.forward_flops + costs.backward_flops for path, costs in found.items()}
    assert sum(step.values()) == counts["Global"]
    assert step["h.*.qkv"] == sum(counts[f"NanoGPT.h.{layer}.qkv"] for layer in range(LAYERS))
    assert step["lm_head"] == counts["NanoGPT.lm_head"]
    assert sum(costs.parameters for costs in found.values()) == sum(each.numel() for each in model.parameters())
    assert found["h.*.proj"].parameters == LAYERS * (D * D + D)


def test_one_trace_serves_all_sizes_that_the_model_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    config, exact = run_of("NanoGPT"), predict_memory(run_of("OfOneLength"))
    monkeypatch.setattr(traces, "prepare", lambda _: None)
    found = predict_memory(config)
    assert found is not None
    assert exact is not None
    assert found.peak.allocated_bytes == exact.peak.allocated_bytes
    assert found.after_bytes == exact.after_bytes
    assert largest_batch(config, 2**30) > 4
    assert largest_context(config, 2**30) > LENGTH, "the memory alone is asked"


def test_a_model_of_one_length_is_forecast_for_that_length_alone() -> None:
    config = run_of("OfOneLength")
    assert predict_memory(config) is not None
    assert predict_memory(replace(config, model=replace(config.model, context_length=32))) is None
    assert largest_batch(config, 2**30) > 4
    assert largest_context(config, 2**30) is None


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
    kept = [sum(part.size_bytes for part in peak.peak.parts if ".h." in part.label or "h.*" in part.label)
            for peak in peaks if peak is not None]  # fmt: skip
    assert kept[1] < kept[0] / 2
    with pytest.raises(ValueError, match="needs blocks in a"):
        checkpoint_each_block(Block())


def test_no_model_of_a_user_is_traced_unless_that_is_asked_for() -> None:
    config = replace(run_of("NanoGPT"), model_factory=f"{__name__}:none_such")
    assert predict_memory(config) is None


def test_an_account_of_what_cannot_be_traced_has_the_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["account", "--model", f"{__name__}:Routed", "--context-length", str(LENGTH), "--fit",
                 "--device-name", "H100 80GB HBM3"]) == 0  # fmt: skip
    said = capsys.readouterr()
    (line,) = [line for line in said.err.splitlines() if "no forecast" in line]
    assert re.search(r"h\.\*: aten::_local_scalar_dense needs the values", line)
    assert f"{sum(each.numel() for each in Routed().parameters()):,}" in said.out


def test_an_account_of_a_user_s_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["account", "--model", f"{__name__}:NanoGPT", "--context-length", str(LENGTH), "--module-depth", "1",
                 "--device-name", "H100 80GB HBM3", "--fit"]) == 0  # fmt: skip
    said = capsys.readouterr().out
    for word in ("this configuration", "h.*", "Predicted time of a step", "Launches are the limit", "moved forward"):
        assert word in said
    assert "d_model" not in said
