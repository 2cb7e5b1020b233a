"""Forecasts of whole models beside those of SimuMax for the same layout and device:
`python -m tests.costs.simumax_rows DIR`, with a checkout of MooreThreads/SimuMax at 4dcaae5 in DIR,
writes `data/published/forecast/simumax.csv`. SimuMax needs pandas, sympy and matplotlib.
"""

import contextlib
import importlib
import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cs336.config import SIZES, Attention, Device, OptimizerKind, Precision, RunConfig
from cs336.costs.blocks import blocks_of_model
from cs336.costs.hardware import find_device
from cs336.costs.layout import Layout
from cs336.costs.layout_cost import LayoutCost, layout_cost
from cs336.costs.networks import links_of
from cs336.report.formats import to_csv
from cs336.studies.ceilings_files import data_sheet_curves

TESTS = Path(__file__).parents[1]
FILE = TESTS.parent / "data" / "published" / "forecast" / "simumax.csv"
DEVICE = "B200"
CONTEXT = 4096
MICRO_BATCHES = 8
CASES = {
    "llama3-8b": ("llama3_8b", Layout(tensor=2, shard=4, stage=1, accumulate=MICRO_BATCHES)),
    "llama3-70b": ("llama3_70b", Layout(tensor=8, accumulate=MICRO_BATCHES)),
    "mixtral-8x7b": ("mixtral_8x7b", Layout(expert=8, stage=1, accumulate=MICRO_BATCHES)),
    "deepseekv3": ("deepseek_v3", Layout(expert=64, stage=1, accumulate=MICRO_BATCHES)),
}
"""By SimuMax's names of models: the configuration file here, and the layout."""
COLUMNS = ("model", "layout", "gpus", "device", "quantity", "unit")
COLUMNS += ("simumax", "ours", "difference_percent", "cause")
UNITS = {"T": 1e12, "s": 1e3, "ms": 1.0, "GB": 1.0}
"""SimuMax's units: of FLOPs, of times in ms, and of GiB, which it calls GB."""
EXPLAINED_PERCENT = 5
PADDED = (
    "SimuMax counts every block as one with experts, without routers, and pads the vocabulary "
    "(param_numel of core/config.py)"
)
EAGER = (
    "activations of eager modules of transformers: norms and activation functions keep each "
    "intermediate result, the residual stream and the logits are in fp32; SimuMax has Megatron's "
    "fused kernels in bf16. The state of the model is the same"
)
OPTIMIZER = (
    "SimuMax adds zeroing, scaling, two norms and clipping of gradients and the copy to bf16 to "
    "the update (optim_time of its answer); ours is AdamW's update alone"
)
EAGER_EXPERTS = f"{EAGER}. Autocast leaves tokens and matmuls of experts in fp32"
CAUSES = {
    **{(name, "parameters"): PADDED for name in CASES},
    **{(name, "optimizer"): OPTIMIZER for name in CASES},
    ("llama3-8b", "memory"): EAGER,
    ("llama3-70b", "memory"): EAGER,
    ("mixtral-8x7b", "memory"): EAGER_EXPERTS,
    ("deepseekv3", "memory"): EAGER_EXPERTS,
    **{
        (name, "computing"): "SimuMax has efficiencies of B200's matmuls as they were measured, by "
        "shape where it has the shape and 0.49 of the peak elsewhere, of experts 0.30 "
        "(configs/system/b200_bf16_ceperm.json), and fused kernels for what lies between; ours are "
        "an H200's, faster by what was measured of large matmuls on both (reached_bf16 of "
        "data_sheets.csv), with eager passes"
        for name in CASES
    },
    **{
        (
            name,
            "communication",
        ): "SimuMax's links of a node reach 0.60 to 0.74 of 900 GB/s and have "
        "latencies; ours reach what two H200 do of theirs, by message size, and gradients are "
        "reduced beside the last backward pass, which SimuMax does not overlap"
        for name in CASES
    },
    ("deepseekv3", "communication"): "all-to-alls of 64 ranks go over the network: SimuMax gives a "
    "node of eight GPUs 200 GB/s, 25 for each; ours 0.8 of an adapter of 50 GB/s for each",
}
"""Of differences by model and quantity, as far as SimuMax's code and files tell."""
CAUSES |= {(name, "time"): "the sum of computing and communication: see there" for name in CASES}


def ours(file: str, layout: Layout) -> dict[str, float]:
    """What we foretell of a layout, by quantity."""
    config = RunConfig(
        size="own",
        model=replace(SIZES["small"], attention=Attention.SDPA, context_length=CONTEXT),
        device=Device.CUDA,
        precision=Precision.BF16,
        optimizer=OptimizerKind.FUSED,
        model_factory=f"hf:{TESTS / 'configurations' / file}.json",
    )
    device = find_device(DEVICE)
    assert device is not None
    links, _ = links_of(DEVICE, device, {}, gpus=layout.gpus)
    cost = layout_cost(config, layout, data_sheet_curves(device), links)
    assert isinstance(cost, LayoutCost), cost
    return {
        "parameters": blocks_of_model(config).parameters,
        "FLOPs of a GPU": cost.flops / layout.gpus / 1e12,
        "memory": cost.peak_bytes / 2**30,
        "computing": 1e3 * cost.time.compute_s,
        "communication": 1e3 * sum(cost.time.exposed_s.values()),
        "optimizer": 1e3 * cost.time.optimizer_s,
        "time": 1e3 * cost.step_s,
    }


def simumax(directory: Path, name: str, layout: Layout) -> dict[str, float]:
    """What SimuMax foretells of it."""
    config: Any = importlib.import_module("simumax.core.config")
    model: Any = importlib.import_module("simumax.core.perf_llm").PerfLLM()
    configs = directory / "configs"
    strategy = json.loads((configs / "strategy" / "ep8_pp1_dp8_mbs1.json").read_text())
    strategy |= {
        "world_size": layout.gpus,
        "tp_size": layout.tensor,
        "ep_size": layout.expert,
        "micro_batch_num": layout.accumulate,
        "enable_recompute": False,
    }
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder, "strategy.json")
        path.write_text(json.dumps(strategy))
        of_model = config.ModelConfig.init_from_config_file(configs / "models" / f"{name}.json")
        system = configs / "system" / "b200_bf16_ceperm.json"
        model.configure(
            strategy_config=config.StrategyConfig.init_from_config_file(str(path)),
            model_config=of_model,
            system_config=config.SystemConfig.init_from_config_file(system),
        )
        model.run_estimate()
        memory, cost = model.analysis_mem().data, model.analysis_cost().data
    parts = {key: in_units(text) for key, text in cost["breakdown_result"].items()}
    flops = cost["compute_details"]["model_flops"]
    return {
        "parameters": model.model_config.param_numel,
        "FLOPs of a GPU": in_units(flops) / 1e12,
        "memory": in_units(memory["peak_mem"]),
        "computing": parts["fwd_compute_time"] + parts["bwd_compute_time"],
        "communication": sum(value for key, value in parts.items() if "exposed" in key),
        "optimizer": parts["optim_time"],
        "time": in_units(cost["duration_time_per_iter"]),
    }


def in_units(text: str) -> float:
    """The number of a text of SimuMax, such as `1.5 s`."""
    number, unit = re.fullmatch(r"(-?[\d.]+) ?(\w*)", text.strip()).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


def table(directory: Path) -> Iterator[list[object]]:
    """A row for each quantity of each model."""
    units = {"parameters": "", "FLOPs of a GPU": "TFLOP", "memory": "GiB"}
    for name, (file, layout) in CASES.items():
        others, here = simumax(directory, name, layout), ours(file, layout)
        for quantity, value in here.items():
            percent = 100 * (value / others[quantity] - 1)
            cause = ""
            if abs(percent) > EXPLAINED_PERCENT or (quantity == "parameters" and percent):
                cause = CAUSES.get((name, quantity), "not known")
            yield [
                *(name, layout.label, layout.gpus, DEVICE, quantity, units.get(quantity, "ms")),
                *(others[quantity], value, percent, cause),
            ]


def main() -> None:
    """Write the table, and print it."""
    directory = Path(sys.argv[1])
    sys.path.insert(0, str(directory))
    rows = [*table(directory)]
    FILE.write_text(to_csv(COLUMNS, rows))
    for row in rows:
        sys.stdout.write(f"{row[0]} {row[4]}: {row[6]} {row[7]} {row[8]:.2f} % {row[9]}\n")


if __name__ == "__main__":
    main()
