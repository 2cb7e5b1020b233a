"""Imports go one way, and what reads results or watches over runs starts without torch."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "cs336_systems"

# From the bottom up: a module imports, at its top or inside a function, from lower levels only.
# "analysis.*" stands for all modules of that folder that are not named elsewhere; they may import each other.
LEVELS = (
    ("", "analysis", "analysis.kernels", "analysis.memory", "commands", "prediction", "shortcuts"),
    ("report", "report.ceilings", "report.kernels", "report.ladder", "report.memory", "studies"),
    ("inert", "setting_words"),
    (
        "config",
        "counting",
        "ranges",
        "process",
        "outputs",
        "os_errors",
        "locks",
        "statistics",
        "report.formats",
        "json_files",
        "saying",
        "tokens",
    ),
    ("hardware", "record", "nsys_run", "advice", "prediction.*"),
    ("memory_model", "accounting", "napkin", "nvml", "quality", "store", "inputs"),
    ("studies.attention_records", "studies.fusion_records", "studies.ceilings_records", "studies.ceilings_files"),
    ("planning", "fast"),
    ("ladder",),
    ("analysis.*",),
    ("analysis.kernels.*", "analysis.memory.*"),
    ("profiling", "precision", "optimizer", "clock", "data", "failure", "counters", "rope"),
    ("shortcuts.sums_kernel",),
    (
        "shortcuts.cross_entropy_kernel",
        "shortcuts.joint_kernel",
        "shortcuts.fused_blocks_kernel",
        "shortcuts.lookup_kernel",
    ),
    ("shortcuts.fp8", "shortcuts.joint", "shortcuts.fused_blocks", "shortcuts.lookup"),
    ("layers", "environment", "shortcuts.step_graph", "shortcuts.cross_entropy"),
    ("model",),
    ("shortcuts.weights",),
    ("shortcuts.adamw_kernel",),
    ("shortcuts.master_adamw",),
    ("step", "report.*"),
    ("report.kernels.*", "report.memory.*", "report.ceilings.*"),
    ("report.terminal",),
    ("report.ladder.*",),
    ("memory_recording",),
    ("watching",),
    ("run_progress",),
    ("measurement", "studies.precision", "studies.fusion_ops", "studies.ceilings_timing", "studies.ceilings_ranks"),
    ("worker", "studies.precision_tables", "studies.fusion_study", "studies.ceilings_study"),
    ("isolation",),
    ("studies.attention_cell",),
    ("interrupts", "studies.attention_study"),
    ("sweep",),
    ("commands.outcome",),
    ("commands.device",),
    ("commands.flags",),
    ("commands.*",),
    ("cli",),
    ("preload", "__main__"),
)

NEEDS_TORCH = {
    "profiling", "precision", "optimizer", "clock", "data", "failure", "counters", "rope", "layers", "model", "step",
    "memory_recording",
    "shortcuts.adamw_kernel", "shortcuts.cross_entropy", "shortcuts.cross_entropy_kernel", "shortcuts.fp8",
    "shortcuts.fused_blocks", "shortcuts.fused_blocks_kernel", "shortcuts.joint", "shortcuts.joint_kernel",
    "shortcuts.lookup", "shortcuts.lookup_kernel", "shortcuts.step_graph", "shortcuts.sums_kernel",
    "shortcuts.weights", "shortcuts.master_adamw", "watching", "run_progress", "measurement", "worker", "preload",
    "studies.precision", "studies.precision_tables", "studies.fusion_ops", "studies.fusion_study",
    "studies.attention_cell", "studies.ceilings_timing", "studies.ceilings_ranks", "studies.ceilings_study",
}  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name below the package."""
    base = ROOT / PACKAGE
    files = [path for path in base.rglob("*.py") if "__pycache__" not in path.parts]
    names = [path.relative_to(base).with_suffix("").as_posix().replace("/", ".") for path in files]
    return {name.removesuffix("__init__").removesuffix("."): path for name, path in zip(names, files, strict=True)}


def level(module: str) -> int | None:
    for wanted in (module, f"{module.rpartition('.')[0]}.*"):
        for number, names in enumerate(LEVELS):
            if wanted in names:
                return number
    return None


def imports(tree: ast.AST, at_top: bool) -> Iterator[str]:
    """Full names that `tree` imports; with `at_top`, only those that importing the module itself runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            assert node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (at_top and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            yield from imports(node, at_top)


def within(names: Iterator[str]) -> set[str]:
    """Of imported names, the modules of this package."""
    found = set()
    for name in names:
        if name == PACKAGE or name.startswith(f"{PACKAGE}."):
            inner = name.removeprefix(PACKAGE).removeprefix(".")
            # `from package.module import function` imports the module
            found.add(inner if inner in modules() else inner.rpartition(".")[0])
    return found


@cache
def imported(module: str, at_top: bool) -> frozenset[str]:
    return frozenset(within(imports(ast.parse(modules()[module].read_text()), at_top)))


def outside(module: str) -> set[str]:
    """Packages of others that importing the module imports."""
    return {name.partition(".")[0] for name in imports(ast.parse(modules()[module].read_text()), at_top=True)}


def test_every_module_has_a_level_and_every_level_a_module() -> None:
    missing = [name for name in modules() if level(name) is None]
    assert not missing, f"put {missing} where they belong in LEVELS of {__file__}"
    named = {name for names in LEVELS for name in names if not name.endswith("*")}
    assert named <= set(modules())
    assert len([name for names in LEVELS for name in names]) == len({name for names in LEVELS for name in names})


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_go_down(module: str) -> None:
    folder = module.rpartition(".")[0]
    for other in imported(module, at_top=False):
        siblings = folder and folder == other.rpartition(".")[0]
        assert level(other) < level(module) or (siblings and level(other) == level(module)), (
            f"{module} imports {other}, which is not below it"
        )


def test_no_import_comes_back() -> None:
    order = graphlib.TopologicalSorter({name: imported(name, at_top=False) for name in modules()})
    assert set(order.static_order()) == set(modules())


def test_a_cycle_would_be_found() -> None:
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter({"a": {"b"}, "b": {"a"}}).static_order())
    tree = ast.parse("import cs336_systems.cli\ndef f():\n    from cs336_systems import config, worker\n")
    assert within(imports(tree, at_top=True)) == {"cli"}
    assert within(imports(tree, at_top=False)) == {"cli", "config", "worker"}


def test_scripts_import_the_command_line_only() -> None:
    for script in ("benchmark.py", "benchmark_sweep.py", "precision.py"):
        tree = ast.parse((ROOT / script).read_text())
        assert within(imports(tree, at_top=False)) == {"cli"}, script
        assert {name.partition(".")[0] for name in imports(tree, at_top=False)} == {"sys", PACKAGE}, script


def test_what_needs_torch_is_known_from_the_source() -> None:
    reached = {name for name in modules() if "torch" in outside(name)}
    while more := {name for name in modules() if imported(name, at_top=True) & reached} - reached:
        reached |= more
    assert reached == NEEDS_TORCH


def test_everything_else_starts_where_there_is_no_torch() -> None:
    """In fact and not only by the source: no third package may bring torch along either."""
    free = [f"{PACKAGE}.{name}".rstrip(".") for name in sorted(modules()) if name not in NEEDS_TORCH]
    code = f"""
import sys
sys.modules["torch"] = None  # importing it is now an ImportError
for name in {free}:
    __import__(name)
assert {PACKAGE + ".sweep"!r} in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_what_is_measured_with_is_part_of_the_identity() -> None:
    """A new module that takes part in a step changes the digest that keeps unlike records apart."""
    from cs336_systems.environment import MEASURING_FILES

    reached = {"measurement"}
    while more := set().union(*(imported(name, at_top=False) for name in reached)) - reached:
        reached |= more
    around = {
        "", "shortcuts", "record", "nvml",
        "environment", "quality", "advice", "statistics", "ranges", "failure", "memory_recording",
        "analysis.memory.notes", "analysis.columns", "analysis.files", "json_files", "inert", "saying",
        "setting_words",
    }  # fmt: skip
    # they see a step from outside, or are there in profiled runs alone, whose times are not published
    assert {f"{name.replace('.', '/')}.py" for name in reached - around} == set(MEASURING_FILES)
