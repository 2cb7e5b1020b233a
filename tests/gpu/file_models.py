"""Twenty small models of transformers by their configuration files: what is foretold of each, and
what a GPU measures.

    python -m tests.gpu.file_models foretell                draws the models and writes FORECASTS
    python -m tests.gpu.file_models measure OUT.csv         on a GPU: measured beside foretold

FORECASTS are committed before anything is measured; both need transformers.
"""

import csv
import json
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from cs336.config import (
    SIZES,
    UNSIZED,
    Attention,
    Device,
    OptimizerKind,
    Phase,
    Precision,
    RunConfig,
)
from cs336.costs.memory import predict_memory
from cs336.costs.ranks_time import predicted_time
from cs336.costs.time import prepare_forecasts
from cs336.costs.traces import idle_parameters, own_parameters, why_untraced
from cs336.studies.ceilings_files import load_ceilings_or_warn

FORECASTS = Path(__file__).parents[2] / "data/published/forecast/files.json"
SEED = 20261129
DEVICES = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
GROUPED = ("num_key_value_heads", (2, 4))
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_inner": None},
    "gpt_neox": {},
    "llama": {"tie_word_embeddings": (True, False)},
    "mistral": {"sliding_window": (128, 256)},
    "qwen2": {"tie_word_embeddings": (True, False)},
    "qwen3": {"head_dim": (64, 128)},
    "gemma": {"head_dim": (64, 256)},
    "gemma2": {"head_dim": (64, 128), "sliding_window": (128, 256)},
    "gemma3_text": {"head_dim": (64, 128), "sliding_window": (128, 256)},
    "phi": {},
    "phi3": {"sliding_window": (None, 256)},
    "olmo2": {},
    "starcoder2": {"sliding_window": (None, 256)},
    "cohere": {},
    "granite": {},
    "mixtral": {"num_local_experts": (4, 8), "num_experts_per_tok": (2,)},
    "qwen2_moe": {
        "num_experts": (8, 16),
        "num_experts_per_tok": (2, 4),
        "moe_intermediate_size": (256, 384),
        "shared_expert_intermediate_size": (512,),
    },
    "qwen3_moe": {
        "num_experts": (8, 16),
        "num_experts_per_tok": (2, 4),
        "moe_intermediate_size": (256, 384),
    },
    "olmoe": {"num_experts": (8, 16), "num_experts_per_tok": (2, 4)},
    "deepseek_v3": {
        "n_routed_experts": (8, 16),
        "num_experts_per_tok": (2, 4),
        "moe_intermediate_size": (256, 384),
        "n_group": (4,),
        "topk_group": (2,),
        "q_lora_rank": (256, 384),
        "kv_lora_rank": (128, 256),
        "first_k_dense_replace": (1,),
    },
}
"""The twenty kinds, with what is drawn of each beside its widths."""
UNGROUPED = ("gpt2", "gpt_neox", "phi", "deepseek_v3")


def drawn_file(kind: str, draw: random.Random) -> dict[str, Any]:
    """A configuration file of this kind."""
    heads = draw.choice((8, 12, 16))
    values: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": 64 * heads,
        "num_hidden_layers": draw.choice((6, 8, 10)),
        "num_attention_heads": heads,
        "intermediate_size": draw.choice((1536, 2048, 2816)),
        "vocab_size": draw.choice((16_384, 32_000, 50_257)),
        "max_position_embeddings": 2048,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind not in UNGROUPED:
        values["num_key_value_heads"] = draw.choice((2, 4))
    if kind == "deepseek_v3":
        values["num_key_value_heads"] = heads
    for name, choices in KINDS[kind].items():
        if choices is not None:
            values[name] = draw.choice(choices)
    return values


def drawn_rows() -> list[dict[str, Any]]:
    """The twenty models with the step of each, all from one seed."""
    draw = random.Random(SEED)
    rows = []
    for number, kind in enumerate(KINDS):
        row = {
            "file": drawn_file(kind, draw),
            "context_length": draw.choice((384, 512, 768, 1024)),
            "batch_size": draw.choice((4, 6, 8)),
            "precision": ("fp32", "bf16")[number % 2],
            "attention": draw.choice(("sdpa", "sdpa", "naive")),
        }
        rows.append(row)
    return rows


def config_of(row: dict[str, Any], directory: Path) -> RunConfig:
    """The run of a row, whose configuration file is written to this directory."""
    folder = directory / row["file"]["model_type"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(row["file"]))
    model = replace(
        SIZES["small"], context_length=row["context_length"], attention=Attention(row["attention"])
    )
    return RunConfig(
        size=UNSIZED,
        model=model,
        batch_size=row["batch_size"],
        device=Device.CUDA,
        precision=Precision(row["precision"]),
        optimizer=OptimizerKind.FUSED,
        warmup_steps=2,
        measured_steps=5,
        model_factory=f"hf:{folder}",
    )


def foretell(directory: Path) -> None:
    """Write the forecasts of all rows."""
    ceilings = load_ceilings_or_warn(directory / "none")
    rows = drawn_rows()
    for row in rows:
        config = config_of(row, directory)
        prepare_forecasts([config], of_users=True)
        memory = predict_memory(config)
        if memory is None:
            row["failure"] = why_untraced(config)
            print(row)
            continue
        parameters = sum(own_parameters(config).values())
        row["parameters"] = parameters
        row["active_parameters"] = parameters - (idle_parameters(config) or 0)
        row["predicted_peak_bytes"] = memory.peak.allocated_bytes
        row["predicted_first_step_peak_bytes"] = memory.first_step_peak.allocated_bytes
        row["predicted_reserved_bytes"] = memory.reserved_bytes
        for name in DEVICES:
            curves = ceilings.curves(name)
            time = None if curves is None else predicted_time(config, curves)
            step_ms = None if time is None else 1e3 * time.step_s
            row[f"predicted_step_ms_{name.split()[1]}"] = step_ms
        print(row["file"]["model_type"], f"{memory.peak.allocated_bytes / 2**30:.3f} GiB")
    lines = ",\n".join(json.dumps(row) for row in rows)
    FORECASTS.write_text(f"[\n{lines}\n]\n")


def measure_all(directory: Path, output: Path) -> None:
    """Run the step of each row, and write what was measured beside what was foretold."""
    import torch

    from cs336.measure.run import measure

    rows = []
    for row in json.loads(FORECASTS.read_text()):
        record = measure(config_of(row, directory))
        torch.cuda.empty_cache()
        file = row.pop("file")
        line = {"model": file["model_type"], "gpu": torch.cuda.get_device_name()}
        line |= row | {"status": str(record.status)}
        if record.memory is not None:
            peak, reserved = (record.memory.peak_allocated_bytes, record.memory.peak_reserved_bytes)
            line["peak_bytes"], line["reserved_bytes"] = peak, reserved
            line["peak_error_%"] = 100 * (row["predicted_peak_bytes"] / peak - 1)
            line["reserved_error_%"] = 100 * (row["predicted_reserved_bytes"] / reserved - 1)
            step = record.measurement(Phase.STEP)
            line["step_ms"] = None if step is None else 1e3 * step.median_s
        elif record.failure is not None:
            line["failure"] = record.failure.message
        print(line, flush=True)
        rows.append(line)
    names = list(dict.fromkeys(name for line in rows for name in line))
    with output.open("w", newline="") as file_:
        writer = csv.DictWriter(file_, names)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        if sys.argv[1:2] == ["measure"]:
            measure_all(Path(scratch), Path(sys.argv[2]))
        else:
            foretell(Path(scratch))
