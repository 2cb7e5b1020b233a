"""Plans of any model: its blocks against the whole model's tape, its parameters against published
numbers, experts against the modules of a rank and closed forms.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cs336.config import SIZES, Attention, Device, OptimizerKind, Phase, Precision, RunConfig
from cs336.costs.blocks import blocks_of_model
from cs336.costs.hardware import find_device
from cs336.costs.kernels import ProductPrecision
from cs336.costs.layout import Layout, layouts
from cs336.costs.layout_cost import LayoutCost, layout_cost
from cs336.costs.layout_memory import Rank, fullest_rank_bytes
from cs336.costs.memory import allocated_levels, rounded_bytes
from cs336.costs.rank_operations import rank_operations
from cs336.costs.ranks_time import SPEED_BESIDE, Links
from cs336.costs.recipes import Recipe
from cs336.costs.tape import FP8_BYTES, OperationKind, phases_of
from cs336.costs.time import factors_of
from cs336.costs.traces import prepare, tape_of
from cs336.studies.ceilings_files import data_sheet_curves

pytest.importorskip("transformers")
CONFIGURATIONS = Path(__file__).parents[1] / "configurations"
H100 = find_device("H100 80GB HBM3")
assert H100 is not None
CURVES = data_sheet_curves(H100)
LINKS = Links(gpus_per_node=8, node_bytes_per_s=300e9, network_bytes_per_s=40e9)
SMALL = {
    "vocab_size": 320,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
MIXTRAL = SMALL | {
    "model_type": "mixtral",
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
DEEPSEEK = SMALL | {
    "model_type": "deepseek_v3",
    "intermediate_size": 384,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 2,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
QWEN = SMALL | {
    "model_type": "qwen3",
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "use_sliding_window": True,
    "sliding_window": 64,
    "max_window_layers": 3,
}


def run(path: Path, **changes: object) -> RunConfig:
    config = RunConfig(
        size="own",
        model=replace(SIZES["small"], attention=Attention.SDPA, context_length=256),
        device=Device.CUDA,
        precision=Precision.BF16,
        optimizer=OptimizerKind.FUSED,
        model_factory=f"hf:{path}",
    )
    return replace(config, **changes)


def made(directory: Path, settings: dict[str, object], **changes: object) -> RunConfig:
    path = directory / "config.json"
    path.write_text(json.dumps(settings | changes))
    return run(path)


def cost(config: RunConfig, links: Links = LINKS, **layout: int | bool) -> LayoutCost:
    forecast = layout_cost(config, Layout(**layout), CURVES, links)
    assert isinstance(forecast, LayoutCost), forecast
    return forecast


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [
        ("llama3_8b", 8_030_261_248, 8_030_261_248),
        ("llama3_70b", 70_553_706_496, 70_553_706_496),
        ("mixtral_8x7b", 46_702_792_704, 12_879_925_248),
        ("deepseek_v3", 671_026_404_352, None),
    ],
)
def test_known_models_have_their_parameters(name: str, parameters: int, active: int | None) -> None:
    model = blocks_of_model(run(CONFIGURATIONS / f"{name}.json"))
    assert model.parameters == parameters
    if active is not None:
        assert model.active_parameters == active
    # DeepSeek-V3's report: 37B of 671B are activated for each token
    assert model.active_parameters == pytest.approx(active or 37e9, rel=0.02)


@pytest.mark.parametrize("settings", [MIXTRAL, DEEPSEEK, QWEN], ids=lambda one: one["model_type"])
@pytest.mark.parametrize("checkpoint", [0, 1])
def test_blocks_make_the_step_of_the_whole_model(
    tmp_path: Path, settings: dict[str, object], checkpoint: int
) -> None:
    """The same matmuls, and the same peak, as the tape of all blocks; blocks of two kinds may free
    in another order what a phase no longer needs.
    """
    config = replace(made(tmp_path, settings), batch_size=4, checkpoint_blocks=checkpoint)
    prepare([config])
    tape = tape_of(config)
    rank = Rank(config=config, layout=Layout(micro_batch=4, checkpoint=checkpoint))
    for phase, _, (first, stop) in phases_of(tape, -1):
        if phase not in (Phase.FORWARD, Phase.BACKWARD):
            continue
        (all_blocks,) = rank.stages
        usual = rank.steps[0].launches[phase]
        launched = len(usual.of_one) - len(usual.block)
        launched += sum(len(rank.steps[kind].launches[phase].block) for kind in all_blocks)
        assert launched == stop - first
    sizes = [rounded_bytes(spec.size_bytes) for spec in tape.specs]
    levels = allocated_levels(tape, [sizes[kind] for kind in tape.tensors])
    whole = max(levels[tape.steps[-1][0][1] :])
    layout = Layout(micro_batch=4, checkpoint=checkpoint)
    assert fullest_rank_bytes(config, layout) == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize(("tensor", "expert"), [(1, 2), (1, 8), (2, 4)])
def test_a_rank_has_the_parameters_of_its_part_of_the_module(
    tmp_path: Path, tensor: int, expert: int
) -> None:
    """Against the modules that transformers makes: each rank has some of the experts, and, of a
    tensor group, its part of all other matrices.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    config = made(tmp_path, MIXTRAL)
    settings = {name: value for name, value in MIXTRAL.items() if name != "model_type"}
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**settings))
    kept = 0
    for name, parameter in model.named_parameters():
        part = parameter
        if ".experts." in name:
            part = parameter.chunk(expert * tensor)[0]
        elif parameter.ndim > 1:
            part = parameter.chunk(tensor, dim=-1)[0]
        kept += part.numel()
    rank = Rank(config=config, layout=Layout(tensor=tensor, expert=expert, stage=1))
    (kinds,) = rank.stages
    assert rank.elements(kinds, is_kept=False) == kept


@pytest.mark.parametrize("checkpoint", [0, 1])
@pytest.mark.parametrize(("tensor", "expert"), [(1, 4), (1, 8), (2, 4)])
def test_tokens_are_sent_to_their_experts_and_back(
    tmp_path: Path, tensor: int, expert: int, checkpoint: int
) -> None:
    """tokens x top-k x width x 2 bytes x (1 - 1 / ranks), twice a pass of each block."""
    config = made(tmp_path, MIXTRAL)
    links = Links(gpus_per_node=8, node_bytes_per_s=1e9)
    forecast = cost(
        config,
        links,
        tensor=tensor,
        expert=expert,
        stage=1,
        micro_batch=2,
        accumulate=3,
        checkpoint=checkpoint,
    )
    ranks = tensor * expert
    sent_bytes = 2 * 256 * 2 * 128 * 2 / tensor * (1 - 1 / ranks)
    calls = 3 * 4 * 2 * (2 + checkpoint)
    assert forecast.time.exposed_s["expert"] == pytest.approx(calls * sent_bytes / 1e9)


@pytest.mark.parametrize("recipe", list(Recipe))
def test_experts_are_multiplied_in_fp8_by_a_recipe(tmp_path: Path, recipe: Recipe) -> None:
    """tokens x top-k x 3 matrices of width x d_ff in forward, and twice that in backward; the
    router, whose 8 columns hardware does not take in fp8, and attention are not.
    """
    config = made(tmp_path, MIXTRAL)
    layout = Layout(expert=2, micro_batch=2, fp8=recipe)
    rank = Rank(config=config, layout=layout)
    multiplied = 2 * 256 * 2 * 3 * 128 * 192
    for phase, times in ((Phase.FORWARD, 1), (Phase.BACKWARD, 2)):
        keys = rank.steps[0].launches[phase].block
        operations = rank_operations(keys, rank.names, 1, 1, 2, "128", recipe)
        matmuls = [one for one in operations if one.is_matmul and one.batch > 1]
        of_experts = [one for one in matmuls if one.kind is OperationKind.MATMUL]
        assert {one.element_bytes for one in of_experts} == {FP8_BYTES}
        assert sum(one.multiplications for one in of_experts) == times * multiplied


def test_between_nodes_each_rank_sends_what_other_nodes_experts_get(tmp_path: Path) -> None:
    config = made(tmp_path, MIXTRAL)
    links = Links(gpus_per_node=2, node_bytes_per_s=1e12, network_bytes_per_s=1e9)
    forecast = cost(config, links, expert=8, stage=1)
    sent_bytes = 256 * 2 * 128 * 2 * (1 - 1 / 4)
    assert forecast.time.exposed_s["expert"] == pytest.approx(4 * 2 * 2 * sent_bytes / 1e9)


@pytest.mark.parametrize("bytes_per_s", [1e8, 1e10, 1e12])
def test_beside_another_micro_batch_s_kernels_tokens_take_what_these_lose(
    tmp_path: Path, bytes_per_s: float
) -> None:
    """As long as tokens are sent, kernels run at `SPEED_BESIDE`, and then alone: together they take
    no less than the sending alone.
    """
    config = made(tmp_path, MIXTRAL)
    links = Links(gpus_per_node=8, node_bytes_per_s=bytes_per_s)
    plain, beside = (
        cost(config, links, expert=8, stage=1, accumulate=4, overlaps_experts=overlaps).time
        for overlaps in (False, True)
    )
    sent_s, both_s = plain.exposed_s["expert"], beside.compute_s + beside.exposed_s["expert"]
    assert beside.compute_s == plain.compute_s
    left_s = max(0.0, plain.compute_s - SPEED_BESIDE * sent_s)
    assert both_s == pytest.approx(sent_s + left_s, rel=0.02)


def test_twice_the_blocks_take_twice_as_long(tmp_path: Path) -> None:
    computed = []
    for layers in (4, 8, 16):
        directory = tmp_path / str(layers)
        directory.mkdir()
        config = made(directory, MIXTRAL, num_hidden_layers=layers)
        forecast = cost(config, expert=8, stage=1)
        computed.append(forecast.time.compute_s)
        assert forecast.time.exposed_s["expert"] > 0
    four, eight, sixteen = computed
    assert sixteen - eight == pytest.approx(2 * (eight - four))


def test_experts_on_more_ranks_compute_as_much_and_take_less_memory(tmp_path: Path) -> None:
    """Ranks that share experts multiply as many tokens in all, and keep fewer parameters."""
    config = made(tmp_path, MIXTRAL, hidden_size=512, intermediate_size=1024)
    alone = cost(config, data=8)
    shared = cost(config, expert=8, stage=1)
    assert shared.flops == alone.flops
    assert shared.peak_bytes < alone.peak_bytes
    assert "expert" not in alone.time.exposed_s


def test_layouts_of_a_model_with_experts_divide_them(tmp_path: Path) -> None:
    config = made(tmp_path, MIXTRAL)
    tried = [*layouts(config, 16, 64, LINKS)]
    assert {layout.expert for layout in tried} >= {1, 8}
    for layout in tried:
        assert layout.gpus == 16
        assert layout.global_batch == 64
        assert 8 % layout.expert_ranks == 0
    (tmp_path / "dense").mkdir()
    dense = made(tmp_path / "dense", QWEN)
    assert {layout.expert for layout in layouts(dense, 16, 64, LINKS)} == {1}


def test_without_copies_in_half_precision_experts_wait_for_the_host_and_run_in_fp32(
    tmp_path: Path,
) -> None:
    """A profile of `_grouped_mm` on an H200 (PyTorch 2.11) has a matmul of each expert and a copy
    to the host in fp32, and one kernel in bf16.
    """
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL))
    rank = Rank(config=run(path), layout=Layout())
    keys = rank.steps[0].launches[Phase.FORWARD].block
    for factor_bytes, launches, waits in ((4, 8, True), (2, 1, False)):
        experts = []
        for operation in rank_operations(keys, rank.names, 1, 1, factor_bytes=factor_bytes):
            if operation.is_matmul and 8 in (operation.launches, operation.batch):
                experts.append(operation)
        experts = [one for one in experts if one.kind is OperationKind.MATMUL]
        assert len(experts) == 2  # both inner matrices are one
        for one in experts:
            assert (one.launches, one.waits, one.element_bytes) == (launches, waits, factor_bytes)
        assert {one.launches * one.batch for one in experts} == {8}
        precision = factors_of(experts[0], Precision.BF16)
        assert precision is (ProductPrecision.FP32 if waits else ProductPrecision.BF16)
