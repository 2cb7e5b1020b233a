"""What a drawn program does, how it names its ranges, and what its file lacks."""

import random
import tomllib
from collections.abc import Mapping
from dataclasses import make_dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

Part = StrEnum(
    "Part",
    "FORWARD LOSS BACKWARD WEIGHTS OPTIMIZER ZERO_GRAD CLIP EVALUATION DATA STEP PREFILL DECODE "
    "CLOSURE",
)
"""A part of a program, whether a range of the file names it or not."""
PHASES = tuple(Part)[:9]
"""Parts that kernels can be of."""
Pause = StrEnum("Pause", "NOTHING RANGE COLLECTOR ALLOCATION COMPILING WAITING DATA PREPARING")
"""What keeps the host from launching."""
TABLES = tomllib.loads(Path(__file__).with_name("drawn_programs.toml").read_text())
STYLES: Mapping[str, Mapping[str, str]] = TABLES["styles"]
_OPTIONS: dict[str, list[Any]] = TABLES["options"]
_OPTIONS["cut"] = [tuple(bounds) for bounds in _OPTIONS["cut"]]  # TOML has lists only
Plan = make_dataclass(
    "Plan",
    ["seed", "kind", "style", *((name, Any, values[0]) for name, values in _OPTIONS.items())],
    frozen=True,
    kw_only=True,
)
"""One of the choices of each option of `drawn_programs.toml`, which says what they are."""


def draw(seed: int) -> Plan:
    """The plan of this seed, without what its other parts forbid."""
    random_, kinds = random.Random(seed), TABLES["kinds"]
    kind = random_.choices(list(kinds), [of_kind["weight"] for of_kind in kinds.values()])[0]
    drawn: dict[str, Any] = {"style": random_.choice(kinds[kind]["styles"])}
    for name, values in _OPTIONS.items():
        if kind == "training" or name not in kinds["training"]["options"]:
            drawn[name] = random_.choice(values)
    plan = Plan(seed=seed, kind=kind, **drawn)
    if plan.style == "lightning":
        plan = replace(plan, micro_batches=1, ranks=1, optimizer="torch", graph="", hides="")
        plan = replace(plan, zero_grad="between", side_stream=False, reads_in_forward=False)
    if plan.is_nsys:
        plan = replace(plan, ranks=1)
    if plan.ranks > 1:
        plan = replace(plan, devices=1, limit=random_.choice(("ranks", plan.limit)))
        if random_.random() < 0.6:
            plan = replace(plan, cut=(0.0, 1.0), dropped="")
    if plan.ranks > 1 or plan.micro_batches > 1:
        plan = replace(plan, graph="")
    if plan.graph:
        plan = replace(plan, reads_in_forward=False)
    if plan.micro_batches == 1 or plan.style not in ("torch", "hashes"):
        plan = replace(plan, steps_of_micro=False)
    return plan
