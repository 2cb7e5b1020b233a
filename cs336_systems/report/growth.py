"""In what the costs of a step have grown since those that were kept, and which module has grown."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..costs.step_costs import Costs, module_of
from .column import Column
from .section import Table, make_table
from .words import GIB, GIGA, MIB, TERA, count, significant

WORKSPACE = "workspace in 1-byte elements"
QUANTITIES = {
    "kept_nodes": "keeps {} nodes of autograd more from step to step",
    "kept_bytes": "keeps {} more from step to step",
    "saved_bytes": "saves {} more",
    "held_bytes": "holds {} more between steps",
    "recomputed_flops": "computes {} more a second time",
    "flops": "computes {} more",
    "operations": "dispatches {} operations more",
    "made_bytes": "allocates {} more",
    "peak_bytes": "has {} more at the peak",
}
"""What is said of a module that has grown in a quantity; the first that has grown is the headline,
as those after it follow from it.
"""
NOISE = dict.fromkeys(QUANTITIES, 0.001) | {"kept_nodes": 0.0, "kept_bytes": 0.0}
"""Growth of a quantity that is no news: the peak falls on other tensors when a name lives for a
line longer, and an optimizer counts its steps in 4 bytes for each parameter.
"""
MOST = 0.75
"""Share of its growth from which on a part of a module is named in place of the module."""


UNITS: dict[str, dict[str, float]] = {
    "bytes": {"GiB": GIB, "MiB": MIB, "KiB": 2**10},
    "flops": {"TFLOP": TERA, "GFLOP": GIGA, "MFLOP": 1e6},
}
COLUMNS = [
    Column("step", key="step", numeric=False, write=str),
    Column("quantity", key="quantity", numeric=False, write=str),
    Column("was", key="before", write=str),
    Column("is", key="now", write=str),
    Column("change", key="change", write="{:+.1%}".format),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """One quantity of a step that has grown."""

    quantity: str
    before: int
    now: int
    module: str
    """The innermost module that has most of the growth."""
    cause: str
    """What has grown most in it."""

    def __str__(self) -> str:
        more = QUANTITIES[self.quantity].format(_written(self.quantity, self.now - self.before))
        cause = f": {self.cause}" if self.cause else ""
        before, now = _written(self.quantity, self.before), _written(self.quantity, self.now)
        return f"{self.module or 'the step'} {more}{cause} ({now} in all, was {before})"


def growths(before: Costs, now: Costs) -> list[Growth]:
    """The quantities that have grown, of those that both have, the headline first."""
    renamed = _renamed(before, now)
    grown = []
    for quantity in QUANTITIES:
        if quantity not in before or quantity not in now:
            continue
        old, new = before[quantity], now[quantity]
        total_before, total_now = total(old), total(new)
        if total_now <= total_before * (1 + NOISE[quantity]):
            continue
        more = Counter[str](new)
        for part, amount in old.items():
            # the part as it is named now
            module = module_of(part)
            more[renamed.get(module, module) + part[len(module) :]] -= amount
        more = Counter({part: more[part] for part in more if not part.endswith(WORKSPACE)})
        module = _innermost(more)
        growth = Growth(
            quantity=quantity,
            before=total_before,
            now=total_now,
            module=module,
            cause=_cause(more, module),
        )
        grown.append(growth)
    return grown


def total(parts: Mapping[str, int]) -> int:
    """The sum of all parts but workspaces of libraries, which are as large for any step; at least
    0, as a step that frees what an earlier one left keeps nothing.
    """
    amounts = [amount for part, amount in parts.items() if not part.endswith(WORKSPACE)]
    return max(0, sum(amounts))


def _renamed(before: Costs, now: Costs) -> dict[str, str]:
    """New names of modules: those of which only one side has the name are taken for each other, in
    the order in which they run, if they are as many.
    """
    # dictionaries keep the order in which modules dispatch operations
    old = dict.fromkeys(map(module_of, before.get("operations", {})))
    new = dict.fromkeys(map(module_of, now.get("operations", {})))
    gone = [module for module in old if module not in new]
    come = [module for module in new if module not in old]
    if len(gone) != len(come):
        return {}
    return dict(zip(gone, come, strict=True))


def _innermost(more: Mapping[str, int]) -> str:
    """The innermost module that has most of the growth; empty if it is spread over the step."""
    grown = Counter[str]()
    for part, amount in more.items():
        grown[module_of(part)] += amount
    path: list[str] = []
    while True:
        depth = len(path)
        parts = Counter[tuple[str, ...]]()
        for module, amount in grown.items():
            names = module.split(".")
            if names[:depth] == path:
                parts[tuple(names[: depth + 1])] += amount
        (inner, amount), *_ = [*parts.most_common(1), ((), 0)]
        # what the module itself has, beside its parts, has its name too
        if amount <= 0 or amount < MOST * sum((+parts).values()) or len(inner) == depth:
            return ".".join(path)
        path = [*inner]


def _cause(more: Mapping[str, int], module: str) -> str:
    """What has grown most in a module, and of what it was if that is gone."""
    parts = Counter[str]()
    for part, amount in more.items():
        inner = module_of(part)
        if inner == module or inner.startswith(f"{module}.") or not module:
            parts[part[len(inner) + 2 :]] += amount
    (what, amount), *_ = [*parts.most_common(1), ("", 0)]
    operator = what.partition(" in ")[0]
    for other, gone in parts.items():
        if other != what and other.partition(" in ")[0] == operator and gone < 0:
            return f"{what}, was {other.removeprefix(operator).strip()}"
    return what if amount > 0 else ""


def _written(quantity: str, value: float) -> str:
    """An amount of a quantity with its unit."""
    *_, kind = quantity.split("_")
    for unit, size in UNITS.get(kind, {}).items():
        if abs(value) >= size:
            return f"{significant(value / size, 3)} {unit}"
    return f"{count(value)} {kind}" if kind in UNITS else count(value)


def costs_table(before: Mapping[str, Costs], now: Mapping[str, Costs]) -> Table:
    """The costs of steps beside those that were kept, if any were."""
    rows, notes = [], []
    for name, costs in now.items():
        kept = before.get(name)
        for quantity in reversed(QUANTITIES):
            value = total(costs[quantity])
            earlier = None if kept is None or quantity not in kept else total(kept[quantity])
            row = {
                "step": name,
                "quantity": quantity.removesuffix("_bytes").replace("_", " "),
                "before": None if earlier is None else _written(quantity, earlier),
                "now": _written(quantity, value),
                "change": value / earlier - 1 if earlier else None,
            }
            if value or earlier:
                rows.append(row)
        if kept is not None:
            notes += [f"{name}: {growth}." for growth in growths(kept, costs)[:1]]
    return make_table("Costs of steps", COLUMNS, rows, notes)
