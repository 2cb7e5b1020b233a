"""Published training throughputs of others beside what layouts foretell: `python -m
tests.costs.public_rows` writes `data/published/forecast/public_rows.csv` from
`public_training_rows.csv`, with every row; those that are not asked say why.
"""

import csv
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from cs336.config import (
    SIZES,
    Arch,
    Attention,
    Device,
    ModelConfig,
    OptimizerKind,
    Parallel,
    Phase,
    Precision,
    RunConfig,
    SdpaBackend,
)
from cs336.costs.accounting import ADAMW_BYTES
from cs336.costs.curves import Curves, transferred_curves
from cs336.costs.hardware import find_device
from cs336.costs.layout import FSDP_PASSES, SELECTIVE, Layout
from cs336.costs.layout_cost import layout_cost
from cs336.costs.memory import predicted_peak_bytes
from cs336.costs.networks import links_of
from cs336.costs.ranks_time import predicted_time
from cs336.costs.recipes import Recipe
from cs336.costs.tape import Form
from cs336.costs.time import prepare_forecasts
from cs336.costs.traces import one_tracer
from cs336.report.formats import to_csv
from cs336.studies.ceilings_files import data_sheet_curves, load_ceilings

FORECAST = Path(__file__).parents[2] / "data" / "published" / "forecast"
GIB = 2**30
BOARDS = {"H100 96GB HBM2e 500 W": ("H100 80GB HBM3", 2.4e12, (500 / 700) ** (1 / 3))}
"""Boards without a data sheet here: the one that is asked in their place, their bandwidth, and
their rates over its. Large matmuls run at the power limit, and power is as the cube of the clock,
with which voltage rises: 0.89 at 500 W of 700. torchtitan says of its own that they lie between
those of an H100 SXM and of an H100 NVL, which are 1 and 0.84.
"""
TRITON_SLOWER = {Form.ATTENTION: 1.4, Form.ATTENTION_BACKWARD: 2.0}
"""How many times as long as FlashAttention 2 its predecessor's port to Triton takes: Dao 2023
(section 4.1) has 1.3 to 1.5 in forward, and about 2 in backward.
"""
UNFUSED_BYTES = 92
"""Bytes for each parameter of AdamW that is a pass for each operation, as Composer's
`DecoupledAdamW` and PyTorch's `foreach` are: decay, or none; both moments, their root, its two
scalings and the update take 80, and the norm and the clipping of gradients 12.
"""
METRICS_BYTES = 2 * (2 + 4 + 4 + 4)
"""Bytes for each logit of a micro-batch with which Composer's `LanguageCrossEntropy` and
`LanguagePerplexity`, which llm-foundry's models compute of what they train on, cast logits to fp32
and take the logarithm of their softmax.
"""
LOSS_BYTES, FUSED_LOSS_BYTES = 26, 2 + 2 + 2
"""Bytes for each logit of the loss and its gradient: of this project's, as its tapes have them, and
of flash-attn's `CrossEntropyLoss`, which llm-foundry's models have by default
(`modeling_mpt.py` at each commit that has changed its tables): it reads logits in bf16, once more
in backward, and writes their gradient.
"""
CONFIGURATIONS = Path(__file__).parents[1] / "configurations"
FILES = {
    "deepseekv2": "deepseek_v2",
    "deepseekv3": "deepseek_v3",
    "qwen3_30b_a3b": "qwen3_30b_a3b",
    "qwen3_235b_a22b": "qwen3_235b_a22b",
}
"""Configuration files of models with experts, by the rows' names."""
RECIPES = {"fp8": Recipe.TENSOR, "mxfp8": Recipe.MX}
"""Recipes of rows whose blocks are in fp8; what is said to be fp8 has one scale a tensor."""
CHECKPOINTS = {"full": 1, "selective": SELECTIVE}
COLUMNS = (
    *("name", "context", "micro_batch", "accumulate", "hardware", "gpus", "precision", "layout"),
    *("published", "foretold", "error_percent", "low", "high", "inside"),
    *("published_gib", "foretold_gib"),
    *("simumax_error_percent", "simumax_gib", "stands_on"),
    *("not_asked", "assumed", "source"),
)
Row = Mapping[str, str]


def rows() -> list[Row]:
    """The published rows."""
    with (FORECAST / "public_training_rows.csv").open() as file:
        return list(csv.DictReader(file))


def why_not_asked(row: Row) -> str:
    """What of a row layouts do not have; empty if it can be asked."""
    if row["name"] == "GPT OSS 120B":
        return "attention with sinks, which transformers does not fuse"
    if row["experts"] and row["name"].lower() not in FILES:
        return "experts of a model without a configuration file here"
    if row["precision"] not in (*RECIPES, "bf16", "fp32"):
        return f"matmuls in {row['precision']}"
    if not row["experts"] and int(row["d_head"]) * int(row["heads"]) != int(row["d_model"]):
        return "heads that are not d_model wide together"
    if row["gated"] == "0" and int(row["kv_heads"]) < int(row["heads"]):
        return "grouped queries in a model without gates"
    return ""


def model_of(row: Row) -> ModelConfig:
    """The model of a row: gated ones are of architecture cs336, others of gpt2."""
    if has_file(row):  # its configuration file says the rest
        attention = Attention.NAIVE if row["attention"] == "naive" else Attention.SDPA
        return replace(SIZES["small"], context_length=int(row["context"]), attention=attention)
    backend = SdpaBackend.AUTO
    if row["attention"] in ("flash", "triton"):
        backend = SdpaBackend.FLASH
    is_gated = row["gated"] == "1"
    kv_heads = int(row["kv_heads"])
    return ModelConfig(
        arch=Arch.CS336 if is_gated else Arch.GPT2,
        vocab_size=int(row["vocab"]),
        context_length=int(row["context"]),
        d_model=int(row["d_model"]),
        d_ff=int(row["d_ff"]),
        num_layers=int(row["layers"]),
        num_heads=int(row["heads"]),
        num_kv_heads=kv_heads if kv_heads < int(row["heads"]) else 0,
        attention=Attention.SDPA,
        sdpa_backend=backend,
    )


def has_file(row: Row) -> bool:
    """Whether the model of a row is asked by a configuration file of transformers: with experts,
    or since transformers' own model ran, with naive attention and dropout.
    """
    return bool(row["experts"]) or row["attention"] == "naive"


def file_of(row: Row, folder: Path) -> str:
    """The configuration file of a row's model, with as many layers as the row says."""
    if not row["experts"]:
        path = folder / f"gpt2_{row['layers']}_{row['d_model']}.json"
        names = {"layers": "n_layer", "d_model": "n_embd", "heads": "n_head", "vocab": "vocab_size"}
        own: dict[str, Any] = {name: int(row[column]) for column, name in names.items()}
        path.write_text(
            json.dumps({"model_type": "gpt2", "n_positions": int(row["context"])} | own)
        )
        return f"hf:{path}"
    name = FILES[row["name"].lower()]
    values = json.loads((CONFIGURATIONS / f"{name}.json").read_text())
    path = folder / f"{name}_{row['layers']}.json"
    values["num_hidden_layers"] = int(row["layers"])
    if int(row["layers"]) == 4:  # SimuMax: "DeepSeekV3 formal rows use dense_layers=1"
        values["first_k_dense_replace"] = 1
    path.write_text(json.dumps(values))
    return f"hf:{path}"


def layout_of(row: Row) -> Layout:
    """The layout of a row; the ranks that are left of its GPUs are replicas or shards."""
    numbers: dict[str, Any] = {
        "tensor": int(row["tensor"]),
        "pipeline": int(row["pipeline"]),
        "context": int(row["context_parallel"]),
        "chunks": int(row["chunks"]),
        "micro_batch": int(row["micro_batch"]),
        "accumulate": int(row["accumulate"]),
        "checkpoint": CHECKPOINTS.get(row["checkpoint"], 0),
        "fp8": RECIPES.get(row["precision"]),
        "fp32_reductions": bool(row["fsdp"]),
        "copied_bytes": FSDP_PASSES.get(row["fsdp"], (0, 0)),
        "overlaps_experts": row["expert_overlap"] == "yes",
        "gathers_context": row["source"].startswith("pytorch/torchtitan"),
    }
    ways = int(row["tensor"]) * int(row["pipeline"]) * int(row["context_parallel"])
    replicas = int(row["gpus"]) // ways
    if row["experts"]:
        # experts are divided by ranks of tensor groups too, and all else by the optimizer's shards
        numbers["expert"] = max(1, int(row["expert_parallel"]) // numbers["tensor"])
        return Layout(**numbers, shard=replicas // numbers["expert"], stage=1)
    # Megatron's ranks of a context divide the optimizer's state alone
    is_alone = row["shard"] == "1" and int(row["context_parallel"]) > 1
    if row["shard"] == "optimizer only" or is_alone:
        return Layout(**numbers, shard=replicas, stage=1)
    if row["shard"] == "gradients too":
        return Layout(**numbers, shard=replicas, stage=2)
    if not row["shard"].isdigit():
        return Layout(**numbers, data=replicas)
    # PyTorch's pipelines gather parameters and reduce gradients once in a step
    if numbers["pipeline"] > 1:
        numbers["stage"] = 1
    # a row counts the ranks that share a context among its shards
    shards = min(int(row["shard"]) // int(row["context_parallel"]), replicas)
    return Layout(**numbers, shard=shards, data=replicas // shards)


def assumed(row: Row) -> str:
    """What the forecast takes otherwise than the row."""
    words = []
    if row["hardware"] in BOARDS:
        name, _, share = BOARDS[row["hardware"]]
        words.append(f"{share:.2f} of the rates of {name}")
    if row["attention"] == "triton":
        words.append("Triton's attention slower than FlashAttention 2 by what its paper says")
    if row["fsdp"] and row["precision"] == "bf16":
        words.append("a residual stream in fp32, where FSDP casts all to bf16")
    if row["checkpoint"] == "not said":
        words.append("no checkpoints")
    is_fused = row["precision"] in RECIPES
    if is_fused:
        words.append("passes between matmuls fused to what they must move at least")
    elif row["compile"] != "no":
        words.append("eager")
    if row["experts"] and not is_fused:
        words.append("tokens sorted by transformers' own passes")
    if row["experts"]:
        words.append("tokens sent once for each expert")
    if row["context_parallel"] != "1":
        words.append("ranks of a context attend to equally many keys each")
    if row["compile"] == "fused kernels" and row["tensor"] != "1":
        words.append("no collective of tensor groups beside its matmul")
    if row["left_out"]:
        words.append(f"left out: {row['left_out']}")
    return ", ".join(words)


@cache
def curves_of(name: str) -> tuple[Curves, str]:
    """Shipped ceilings of a device, or its data sheet."""
    known, bytes_per_s, share = BOARDS.get(name, (name, 0.0, 1.0))
    device = find_device(known)
    assert device is not None, name
    measured = load_ceilings(FORECAST.parent / "none").curves(known)
    if measured is None:
        return data_sheet_curves(device), "data sheet"
    if name not in BOARDS:
        return measured, "this card elsewhere"
    board = replace(
        device,
        memory_bandwidth_bytes_per_s=bytes_per_s,
        peak_flops_per_s={one: share * peak for one, peak in device.peak_flops_per_s.items()},
        fp8_peak_flops_per_s=share * (device.fp8_peak_flops_per_s or 0.0),
        reached={},
    )
    return transferred_curves(measured, device, board), "a like card and the data sheet"


@cache
def with_triton(curves: Curves) -> Curves:
    """The curves with the attention of Triton's port where FlashAttention 2 is asked for."""
    slowed = []
    for matmul in curves.matmuls[Precision.BF16]:
        factor = 1.0 if matmul.form is None else TRITON_SLOWER.get(matmul.form, 1.0)
        slowed.append(replace(matmul, time_s=factor * matmul.time_s))
    return replace(curves, matmuls={**curves.matmuls, Precision.BF16: tuple(slowed)})


@cache
def with_unfused(curves: Curves) -> Curves:
    """The curves with an optimizer that is a pass for each operation."""
    more = UNFUSED_BYTES / ADAMW_BYTES
    return replace(curves, adamw={size: curves.pass_s(round(more * size)) for size in curves.adamw})


def foretold(row: Row, folder: Path) -> dict[str, object]:
    """A row with its forecast; the folder is for configuration files."""
    answer: dict[str, object] = {name: row.get(name) for name in COLUMNS if name in row}
    answer |= {"published": float(row["tokens_per_s_per_gpu"]), "published_gib": row["peak_gib"]}
    if reason := why_not_asked(row):
        return answer | {"not_asked": reason}
    config = config_of(row, folder)
    curves, stands_on = curves_of(row["hardware"])
    if row["attention"] == "triton":
        curves = with_triton(curves)
    if row["optimizer"] == "passes":
        curves = with_unfused(curves)
    layout = layout_of(row)
    answer["layout"] = layout.label
    seconds = seconds_of(row, config, layout, curves)
    if isinstance(seconds, str):
        return answer | {"not_asked": seconds}
    likely_s, low_s, high_s, peak_bytes = seconds
    tokens = layout.global_batch * config.model.context_length / layout.gpus
    published = float(row["tokens_per_s_per_gpu"])
    if row["simumax_gib"]:
        other = float(row["simumax_tokens_per_s_per_gpu"])
        answer |= {
            "simumax_error_percent": 100 * (other / published - 1),
            "simumax_gib": float(row["simumax_gib"]),
        }
    return answer | {
        "foretold": tokens / likely_s,
        "error_percent": 100 * (tokens / likely_s / published - 1),
        "low": tokens / high_s,
        "high": tokens / low_s,
        "inside": "yes" if tokens / high_s <= published <= tokens / low_s else "no",
        "foretold_gib": peak_bytes / GIB,
        "stands_on": stands_on,
        "assumed": assumed(row),
    }


def config_of(row: Row, folder: Path) -> RunConfig:
    """The step of a row in one process, or on ranks that each have the whole model if no layout
    has its attention; the folder is for configuration files.
    """
    config = RunConfig(
        size="custom",
        model=model_of(row),
        device=Device.CUDA,
        precision=Precision.BF16 if row["precision"] in RECIPES else Precision(row["precision"]),
        optimizer=OptimizerKind.FUSED,
        batch_size=int(row["micro_batch"]),
        model_factory=file_of(row, folder) if has_file(row) else None,
    )
    if row["attention"] == "naive" and row["gpus"] != "1":
        return replace(config, parallel=Parallel.DDP, ranks=int(row["gpus"]))
    return config


def seconds_of(
    row: Row, config: RunConfig, layout: Layout, curves: Curves
) -> tuple[float, float, float, int] | str:
    """Seconds of a step, its bounds and its peak of memory; or why it is not foretold."""
    name = BOARDS.get(row["hardware"], (row["hardware"],))[0]
    links, _ = links_of(name, find_device(name), {}, gpus=layout.gpus)
    if row["attention"] == "naive":
        prepare_forecasts([config], of_users=True)
        time, peak_bytes = predicted_time(config, curves, links), predicted_peak_bytes(config)
        if time is None or time.low_s is None or time.high_s is None:
            return "the step is not foretold"
        seconds = time.step_s
        if "forward and backward" in row["name"]:
            seconds = time.phases_s[Phase.FORWARD] + time.phases_s[Phase.BACKWARD]
        factors = time.low_s / time.step_s, time.high_s / time.step_s
        return seconds, seconds * factors[0], seconds * factors[1], peak_bytes or 0
    cost = layout_cost(config, layout, curves, links)
    if isinstance(cost, str):
        return cost
    step_s, spread = cost.step_s + loss_and_metrics_s(row, curves), cost.time.spread
    return step_s, step_s / spread, step_s * spread, cost.peak_bytes


def loss_and_metrics_s(row: Row, curves: Curves) -> float:
    """Seconds of a step in which a program computes metrics of its training batch, less those that
    its loss does not take.
    """
    if not row["source"].startswith("mosaicml/llm-foundry"):
        return 0.0
    logits = int(row["micro_batch"]) * int(row["context"]) * int(row["vocab"])
    metrics_s = curves.pass_s(METRICS_BYTES * logits)
    loss_s = curves.pass_s(LOSS_BYTES * logits) - curves.pass_s(FUSED_LOSS_BYTES * logits)
    return int(row["accumulate"]) * (metrics_s - loss_s)


def summary(answers: list[dict[str, object]]) -> Iterator[str]:
    """How far forecasts are off, by source and hardware."""
    groups: dict[str, list[float]] = {}
    for answer in answers:
        error = answer.get("error_percent")
        if isinstance(error, float):
            source = re.split(r"[ @]", str(answer["source"]))[0]
            groups.setdefault(f"{source}, {answer['hardware']}", []).append(abs(error))
    for name, errors in groups.items():
        middle, most = median(errors), max(errors)
        yield f"{name}: {len(errors)} rows, median {middle:.1f} %, at most {most:.1f}"
    asked = sum("error_percent" in answer for answer in answers)
    inside = sum(answer.get("inside") == "yes" for answer in answers)
    yield f"{asked} of {len(answers)} asked, {inside} inside their interval"


def main() -> None:
    """Write every row with its forecast, and print how far they are off."""
    with one_tracer(), TemporaryDirectory() as folder:
        answers = [foretold(row, Path(folder)) for row in rows()]
    cells = [[answer.get(name) for name in COLUMNS] for answer in answers]
    (FORECAST / "public_rows.csv").write_text(to_csv(COLUMNS, cells))
    sys.stdout.write("\n".join(summary(answers)) + "\n")


if __name__ == "__main__":
    main()
