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
    Precision,
    RunConfig,
)
from cs336.costs.curves import Curves
from cs336.costs.depth import of_depth
from cs336.costs.hardware import find_device
from cs336.costs.layout import Layout
from cs336.costs.layout_cost import layout_cost
from cs336.costs.networks import links_of
from cs336.costs.recipes import Recipe
from cs336.costs.time import has_large_matmuls
from cs336.costs.traces import one_tracer
from cs336.report.formats import to_csv
from cs336.studies.ceilings_files import data_sheet_curves, load_ceilings

FORECAST = Path(__file__).parents[2] / "data" / "published" / "forecast"
GIB = 2**30
HARDWARE = {"H100 96GB HBM2e 500 W": "H100 80GB HBM3"}
"""Boards without a data sheet here, and the one that is asked in their place."""
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
COLUMNS = (
    *("name", "context", "micro_batch", "accumulate", "hardware", "gpus", "precision", "layout"),
    *("published", "foretold", "error_percent", "published_gib", "foretold_gib"),
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
    if row["checkpoint"] == "selective":
        return "selective checkpoints"
    if not row["experts"] and int(row["d_head"]) * int(row["heads"]) != int(row["d_model"]):
        return "heads that are not d_model wide together"
    return ""


def model_of(row: Row) -> ModelConfig:
    """The model of a row: gated ones are of architecture cs336, others of gpt2."""
    if row["experts"]:  # its configuration file says the rest
        usual = SIZES["small"]
        return replace(usual, context_length=int(row["context"]), attention=Attention.SDPA)
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
    )


def file_of(row: Row, folder: Path) -> str:
    """The model of a row with experts: its configuration file, with as many layers as the row
    says.
    """
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
        "checkpoint": int(row["checkpoint"] == "full"),
        "fp8": RECIPES.get(row["precision"]),
    }
    ways = int(row["tensor"]) * int(row["pipeline"]) * int(row["context_parallel"])
    replicas = int(row["gpus"]) // ways
    if row["experts"]:
        # experts are divided by ranks of tensor groups too, and all else by the optimizer's shards
        numbers["expert"] = max(1, int(row["expert_parallel"]) // numbers["tensor"])
        return Layout(**numbers, shard=replicas // numbers["expert"], stage=1)
    if row["shard"] == "optimizer only" or int(row["context_parallel"]) > 1:
        return Layout(**numbers, shard=replicas, stage=1)
    if not row["shard"].isdigit():
        return Layout(**numbers, data=replicas)
    shards = min(int(row["shard"]), replicas)
    return Layout(**numbers, shard=shards, data=replicas // shards)


def assumed(row: Row) -> str:
    """What the forecast takes otherwise than the row."""
    words = []
    if row["hardware"] in HARDWARE:
        words.append(f"rates of {HARDWARE[row['hardware']]}")
    if row["checkpoint"] == "not said":
        words.append("no checkpoints")
    if row["compile"] != "no":
        words.append("eager")
    if row["experts"]:
        words.append("tokens sorted by transformers' own passes")
    return ", ".join(words)


def curves_of(name: str, config: RunConfig) -> tuple[Curves, str]:
    """Shipped ceilings of a device, or its data sheet."""
    device = find_device(name)
    assert device is not None, name
    measured = load_ceilings(FORECAST.parent / "none").curves(name)
    if measured is not None and has_large_matmuls(of_depth(config, 1), measured):
        return measured, "this card elsewhere"
    return data_sheet_curves(device), "data sheet"


def foretold(row: Row, folder: Path) -> dict[str, object]:
    """A row with its forecast; the folder is for configuration files."""
    answer: dict[str, object] = {name: row.get(name) for name in COLUMNS if name in row}
    answer |= {"published": float(row["tokens_per_s_per_gpu"]), "published_gib": row["peak_gib"]}
    if reason := why_not_asked(row):
        return answer | {"not_asked": reason}
    config = RunConfig(
        size="custom",
        model=model_of(row),
        device=Device.CUDA,
        precision=Precision.BF16 if row["precision"] in RECIPES else Precision(row["precision"]),
        optimizer=OptimizerKind.FUSED,
        batch_size=int(row["micro_batch"]),
        model_factory=file_of(row, folder) if row["experts"] else None,
    )
    name = HARDWARE.get(row["hardware"], row["hardware"])
    curves, stands_on = curves_of(name, config)
    layout = layout_of(row)
    links, _ = links_of(name, find_device(name), {}, gpus=layout.gpus)
    cost = layout_cost(config, layout, curves, links)
    answer["layout"] = layout.label
    if isinstance(cost, str):
        return answer | {"not_asked": cost}
    tokens = layout.global_batch * config.model.context_length
    seconds = cost.step_s
    if "forward and backward" in row["name"]:
        seconds = cost.time.compute_s
    rate = tokens / seconds / layout.gpus
    published = float(row["tokens_per_s_per_gpu"])
    if row["simumax_gib"]:
        other = float(row["simumax_tokens_per_s_per_gpu"])
        answer |= {
            "simumax_error_percent": 100 * (other / published - 1),
            "simumax_gib": float(row["simumax_gib"]),
        }
    return answer | {
        "foretold": rate,
        "error_percent": 100 * (rate / published - 1),
        "foretold_gib": cost.peak_bytes / GIB,
        "stands_on": stands_on,
        "assumed": assumed(row),
    }


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
    yield f"{asked} of {len(answers)} asked"


def main() -> None:
    """Write every row with its forecast, and print how far they are off."""
    with one_tracer(), TemporaryDirectory() as folder:
        answers = [foretold(row, Path(folder)) for row in rows()]
    cells = [[answer.get(name) for name in COLUMNS] for answer in answers]
    (FORECAST / "public_rows.csv").write_text(to_csv(COLUMNS, cells))
    sys.stdout.write("\n".join(summary(answers)) + "\n")


if __name__ == "__main__":
    main()
