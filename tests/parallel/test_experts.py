"""Experts over two processes: what their all-to-alls carry, beside the forecast's."""

from dataclasses import replace

import pytest

from cs336.config import SIZES, Attention, Device, OptimizerKind, Precision, RunConfig
from cs336.costs.hardware import find_device
from cs336.costs.layout import Layout
from cs336.costs.layout_cost import LayoutCost, layout_cost
from cs336.costs.ranks_time import Links
from cs336.files import encode_json
from cs336.studies.ceilings_files import data_sheet_curves

pytest.importorskip("transformers")
BATCH, LENGTH = 2, 64
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("checkpoint", [0, 1])
def test_the_all_to_alls_of_a_step_carry_what_the_forecast_says(
    two, checkpoint: int, tmp_path
) -> None:
    """Bytes that leave a rank for the other one, in forward, again between checkpoints, and in
    backward: at a byte a second they are the seconds of the forecast.
    """
    file = tmp_path / "config.json"
    file.write_bytes(encode_json(MIXTRAL))
    config = RunConfig(
        size="own",
        model=replace(SIZES["small"], attention=Attention.SDPA, context_length=LENGTH),
        device=Device.CUDA,
        precision=Precision.BF16,
        optimizer=OptimizerKind.FUSED,
        model_factory=f"hf:{file}",
    )
    h100 = find_device("H100 80GB HBM3")
    assert h100 is not None
    layout = Layout(expert=2, micro_batch=BATCH, checkpoint=checkpoint)
    links = Links(gpus_per_node=2, node_bytes_per_s=1.0)
    cost = layout_cost(config, layout, data_sheet_curves(h100), links)
    assert isinstance(cost, LayoutCost), cost
    blocks = MIXTRAL["num_hidden_layers"]
    sent = two.call("tests.parallel.experts:bytes_sent", MIXTRAL, BATCH * LENGTH, checkpoint)
    assert sent == [cost.time.exposed_s["expert"] / blocks] * 2
