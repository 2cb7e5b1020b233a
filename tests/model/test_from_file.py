"""Models by their configuration files, against what transformers makes of them, PyTorch's counter,
and parameters that others have published.
"""

import csv
import json
import random
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from cs336.cli import main
from cs336.commands.configure import config_of, make_config
from cs336.config import SIZES, Attention, Device, Mode, RunConfig
from cs336.costs import traces
from cs336.costs.fit import CUDA_CONTEXT_BYTES
from cs336.costs.time import costs_by_module
from cs336.measure.inputs import source_of
from cs336.model.trainable import make_model
from cs336.model.user_code import load_factory

transformers = pytest.importorskip("transformers")
DENSE = ("Llama", "Qwen2", "Qwen3", "Gemma2", "Mistral", "Phi", "Olmo2", "GPT2")
EXPERTS = ("Mixtral", "Qwen3Moe", "DeepseekV3")
LENGTH = 48


def drawn(kind: str, seed: int) -> Any:
    """A small configuration of this kind, with sizes that differ."""
    draw = random.Random(f"{kind} {seed}")
    kv_heads = draw.choice([1, 2, 4])
    values: dict[str, Any] = {
        "hidden_size": draw.choice([64, 96, 160]),
        "num_hidden_layers": draw.choice([2, 3]),
        "num_attention_heads": 4,
        "intermediate_size": draw.choice([72, 104, 200]),
        "vocab_size": draw.choice([101, 256, 311]),
        "max_position_embeddings": draw.choice([64, 128]),
        "pad_token_id": None,
    }
    if kind not in ("GPT2", "Phi"):
        values["num_key_value_heads"] = kv_heads
    if kind in ("Llama", "Qwen3", "Gemma2"):
        values["head_dim"] = draw.choice([16, 32])
    if kind in ("Gemma2", "Mistral"):
        values["sliding_window"] = draw.choice([16, 32])
    if kind in ("Llama", "Qwen2", "Qwen3"):
        values["tie_word_embeddings"] = draw.choice([True, False])
    if kind == "GPT2":
        values["n_inner"] = values.pop("intermediate_size")
    if kind == "Mixtral":
        values |= {"num_local_experts": draw.choice([3, 8]), "num_experts_per_tok": 2}
    if kind == "Qwen3Moe":
        experts = draw.choice([4, 6])
        values |= {"num_experts": experts, "num_experts_per_tok": draw.choice([1, 3])}
        values |= {"moe_intermediate_size": 40}
    if kind == "DeepseekV3":
        values |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
        values |= {"q_lora_rank": 24, "kv_lora_rank": 16, "moe_intermediate_size": 40}
        values |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
        values |= {"first_k_dense_replace": 1, "num_key_value_heads": 4}
    return getattr(transformers, f"{kind}Config")(**values)


def made_by_transformers(config: Any) -> nn.Module:
    """The model that transformers makes itself, whose matmuls PyTorch's counter sees one by one."""
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )


def written(config: Any, folder: Path) -> str:
    config.save_pretrained(folder)
    return f"hf:{folder}"


def run_of(name: str, **settings: object) -> RunConfig:
    given = {"model_factory": name, "size": "small", "batch_size": 2} | settings
    return config_of(Device.CUDA, given, {}, fast=False)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", [*DENSE, *EXPERTS])
def test_a_file_has_the_parameters_and_flops_of_the_model_that_transformers_makes(
    kind: str, seed: int, tmp_path: Path
) -> None:
    """Each token chooses as many experts as another, so that their FLOPs do not depend on data."""
    config = drawn(kind, seed)
    run = run_of(
        written(config, tmp_path), context_length=LENGTH, attention="naive", mode=Mode.FORWARD
    )
    traces.prepare([run])
    assert not traces.why_untraced(run)
    model = made_by_transformers(config)
    costs = costs_by_module(run)
    assert sum(module.parameters for module in costs.values()) == sum(
        parameter.numel() for parameter in model.parameters()
    )
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, LENGTH, dtype=torch.int64), use_cache=False)
    flops = sum(module.forward_flops or 0 for module in costs.values())
    assert flops == counter.get_total_flops()
    if kind in EXPERTS:
        experts = [parameter for parameter in model.parameters() if parameter.dim() == 3]
        weights = sum(parameter.numel() for parameter in experts)
        idle = 1 - config.num_experts_per_tok / len(experts[0])
        assert traces.idle_parameters(run) == round(weights * idle)


PUBLISHED = {
    "Mixtral 8x7B": (
        {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336}
        | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
        46_702_792_704,
    ),
    "Llama 3 70B": (
        {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672}
        | {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
        | {"vocab_size": 128256},
        70_553_706_496,
    ),
    "DeepSeek-V3": (
        {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432}
        | {"moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128}
        | {"num_key_value_heads": 128, "vocab_size": 129280, "n_routed_experts": 256}
        | {"n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
        | {"first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512}
        | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
        | {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
        | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        # without the biases by which the router balances: 256 in 58 layers, which no optimizer has
        671_026_419_200 - 58 * 256,
    ),
}
"""Facts of published models, and the parameters that their model cards count."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_parameters(name: str, tmp_path: Path) -> None:
    values, parameters = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    run = make_config(Device.CUDA, size="small", model_factory=f"hf:{tmp_path / 'config.json'}")
    with torch.device("meta"):
        from cs336.model.user_code import call_factory, load_factory

        model = call_factory(load_factory(run.model_factory), run.model)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_no_code_beside_the_file_runs_and_nothing_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    marker = tmp_path / "was run"
    code = f"open({str(marker)!r}, 'w')\nclass Evil: ...\n"
    (tmp_path / "evil.py").write_text(code)
    config = drawn("Llama", 0)
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    names = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": names}))
    model = make_model(replace(run_of(f"hf:{file}", context_length=8), device=Device.CPU))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not marker.exists()


REFUSED = {
    "none": (None, "config.json"),
    "text": ("not JSON", "JSON"),
    "a list": ("[]", "model_type"),
    "no type": ("{}", "model_type"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_describes_no_model_is_refused_before_anything_is_imported(
    name: str, tmp_path: Path
) -> None:
    text, word = REFUSED[name]
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=word):
        run_of(f"hf:{file}")


def why(values: dict[str, object], folder: Path, **settings: object) -> str:
    (folder / "config.json").write_text(json.dumps(values))
    run = run_of(f"hf:{folder}", **settings)
    traces.prepare([run])
    return traces.why_untraced(run)


def test_a_model_that_transformers_does_not_have_is_named(tmp_path: Path) -> None:
    reason = why({"model_type": "none_such", "auto_map": {"AutoConfig": "a.B"}}, tmp_path)
    assert "'none_such'" in reason


def test_a_model_that_is_no_language_model_is_named(tmp_path: Path) -> None:
    assert "'vit'" in why({"model_type": "vit"}, tmp_path)


RELATIVES = ("Bart", "Bert", "GPT2", "Llama", "Mistral", "Qwen2", "Whisper")
"""Kinds of which transformers has a causal language model, and others."""


@pytest.mark.parametrize("kind", RELATIVES)
def test_only_the_model_that_the_file_names_is_made(kind: str, tmp_path: Path) -> None:
    """Of all models of the kind, the causal one alone, and that one in any capitals."""
    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[getattr(transformers, f"{kind}Config")]
    others = [
        name
        for name in dir(transformers)
        if name.startswith(f"{kind}For") and name != causal.__name__
    ]
    config = getattr(transformers, f"{kind}Config")()
    for named in others:
        config.architectures = [named]
        with pytest.raises(ValueError, match=f"(?s)describes {named}.*{causal.__name__}"):
            load_factory(written(config, tmp_path))
    assert len(others) > 1
    for named in (causal.__name__, causal.__name__.upper()):
        config.architectures = [named]
        assert callable(load_factory(written(config, tmp_path)))


@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
def test_a_plan_of_a_file_has_its_parameters_and_the_peak_of_its_own_trace(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one GPU: that of all blocks, which `account` traces."""
    config = drawn(kind, 0)
    step = ["--model", written(config, tmp_path), "--context-length", str(LENGTH)]
    words = ["--gpus", "1xH100", "--global-batch", "2", "--output", str(tmp_path)]
    assert main(["plan", *step, *words]) == 0
    said = capsys.readouterr().out
    parameters = sum(parameter.numel() for parameter in made_by_transformers(config).parameters())
    assert said.startswith(f"Parameters: {parameters:,}")
    with (tmp_path / "plan.csv").open() as file:
        planned = [row for row in csv.DictReader(file) if row["micro_batch"] == "2"]
    whole = next(row for row in planned if row["checkpoint"] == "0")
    settings = ["--batch-size", "2", "--precision", "bf16", "--optimizer", "fused"]
    assert main(["account", *step, *settings, "--device-name", "H100", "--json"]) == 0
    traced = json.loads(capsys.readouterr().out)
    allocated_bytes = traced["memory"]["peak"]["allocated_bytes"] + CUDA_CONTEXT_BYTES
    assert float(whole["peak_gib"]) * 2**30 == pytest.approx(allocated_bytes, abs=2**20)
    assert float(whole["step_ms"]) == pytest.approx(1e3 * traced["time"]["step_s"], rel=0.05)


def test_a_file_without_the_sizes_of_a_model_is_refused(tmp_path: Path) -> None:
    reason = why({"model_type": "llama", "rope_theta": 10_000}, tmp_path)
    for size in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"):
        assert size in reason


@pytest.mark.parametrize("kind", [*DENSE, *EXPERTS])
def test_sizes_that_a_file_lacks_are_named_and_no_others(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What save_pretrained writes is whole; then a size is taken out."""
    config = drawn(kind, 1)
    name = written(config, tmp_path)
    load_factory(name)
    assert capsys.readouterr().err == ""
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    del values["vocab_size"]
    file.write_text(json.dumps(values))
    load_factory(name)
    default = type(config)().vocab_size
    assert capsys.readouterr().err.endswith(f"own: `vocab_size` {default:,}\n")


def test_a_context_beyond_the_model_s_positions_is_refused(tmp_path: Path) -> None:
    config = drawn("Llama", 0)
    name = written(config, tmp_path)
    assert run_of(name).model.context_length == config.max_position_embeddings
    longer = run_of(name, context_length=config.max_position_embeddings + 1)
    traces.prepare([longer])
    assert str(config.max_position_embeddings) in traces.why_untraced(longer)


def test_without_transformers_the_error_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = written(drawn("Llama", 0), tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(ValueError, match="pip install transformers"):
        run_of(name)


def test_a_flag_that_the_file_decides_is_refused_and_attention_is_not(tmp_path: Path) -> None:
    name = written(drawn("Llama", 0), tmp_path)
    assert run_of(name).model.attention is Attention.SDPA
    assert run_of(name, attention="naive").model.attention is Attention.NAIVE
    for flag, value in (("num_layers", 7), ("d_ff", 128), ("size", "xl")):
        with pytest.raises(ValueError, match="would do nothing"):
            run_of(name, **{flag: value})
    assert run_of(name).model == replace(
        SIZES["small"], context_length=run_of(name).model.context_length, attention=Attention.SDPA
    )


@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
def test_a_model_that_computes_attention_eagerly_where_fused_was_asked_is_named(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PyTorch's fused attention is called, or it is said that it is not."""
    name = written(drawn(kind, 0), tmp_path)
    calls = 0

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal calls
            calls += "scaled_dot_product" in str(function)
            return function(*args, **(kwargs or {}))

    model = make_model(replace(run_of(name, attention="sdpa"), device=Device.CPU))
    with Counter():
        model(torch.zeros(1, LENGTH, dtype=torch.long))
    said = capsys.readouterr().err
    assert (calls == 0) is ("no fused attention" in said)
    assert (calls == 0) is (kind == "Gemma2")


def test_what_a_run_depended_on_changes_with_the_file(tmp_path: Path) -> None:
    name = written(drawn("Llama", 0), tmp_path)
    before = source_of(name)
    written(drawn("Llama", 1), tmp_path)
    assert source_of(name) != before
