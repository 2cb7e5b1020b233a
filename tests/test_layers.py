"""Imports go one way, folder by folder, and reading results needs no torch."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = "cs336_systems"
PACKAGE = "cs336"

FOLDERS = (
    "costs",
    "analysis",
    "model",
    "parallel",
    "measure",
    "sweep",
    "studies",
    "report",
    "watched",
    "commands",
)
"""From the bottom up, with a module that has a place among folders: each imports from itself, from
those before it, and from BASE.
"""
BASE = (
    "posix_needed",
    "torch_needed",
    "",
    "interrupt",
    "temporary",
    "text",
    "plugins",
    "files",
    "ranges",
    "settings",
    "waits",
    "tried_imports",
    "choices",
    "model_file",
    "shapes",
    "rules",
    "config.step",
    "config.shortcuts",
    "config.ranks",
    "config.run",
    "config",
    "subject",
    "loop_record",
    "record",
)
"""Modules of the package root that every folder may import, from the bottom up."""
TOP = ("tested_step", "pytest_plugin", "cli", "start", "__main__")
TORCH_FREE = ("costs", "analysis", "sweep", "report", "commands")
"""Folders whose modules start where there is no torch, as those of the package root do."""
ELSEWHERE = (
    "sweep.worker",
    "sweep.ranks",
    "sweep.cluster.connection",
    "sweep.cluster.driver",
    "sweep.cluster.machines",
    "sweep.cluster.task",
    "costs.graphs",
    "costs.internals",
    "costs.compiling",
    "costs.on_cuda",
    "costs.operators",
    "costs.positions",
    "costs.trace",
    "costs.tracing",
    "costs.routing",
    "watched",
)
"""Modules of such a place that run in the processes that measure or train, or in one that needs
Ray.
"""


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name below the package."""
    base = ROOT / FOLDER
    files = [path for path in base.rglob("*.py") if "__pycache__" not in path.parts]
    names = [path.relative_to(base).with_suffix("").as_posix().replace("/", ".") for path in files]
    return {
        name.removesuffix("__init__").removesuffix("."): path
        for name, path in zip(names, files, strict=True)
    }


def rank(module: str) -> tuple[int, int]:
    """A module imports from lower and equal ranks only."""
    folder = module.partition(".")[0]
    if folder in FOLDERS:
        return 1, FOLDERS.index(folder)
    return (0, BASE.index(module)) if module in BASE else (2, TOP.index(module))


def imports(tree: ast.AST, at_top: bool, package: str = PACKAGE) -> Iterator[str]:
    """Full names that a module in `package` imports; with `at_top`, only when it is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif not (at_top and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            yield from imports(node, at_top, package)


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
def imported(module: str) -> frozenset[str]:
    path = modules()[module]
    inner = module if path.name == "__init__.py" else module.rpartition(".")[0]
    package = f"{PACKAGE}.{inner}".rstrip(".")
    found = within(imports(ast.parse(path.read_text()), at_top=False, package=package))
    # the package itself offers `watch`, on demand
    return frozenset(found - {"watched"} if not module else found)


def test_imports_go_down() -> None:
    above = [
        (module, other)
        for module in sorted(modules())
        for other in imported(module)
        if rank(other) > rank(module)
    ]
    assert above == [], "a module imports another that stands above it"


def test_no_import_comes_back() -> None:
    order = graphlib.TopologicalSorter({name: imported(name) for name in modules()})
    assert set(order.static_order()) == set(modules())


def test_a_cycle_would_be_found() -> None:
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter({"a": {"b"}, "b": {"a"}}).static_order())
    tree = ast.parse("import cs336.cli\ndef f():\n    from cs336 import config, record\n")
    assert within(imports(tree, at_top=True)) == {"cli"}
    assert within(imports(tree, at_top=False)) == {"cli", "config", "record"}


def test_scripts_import_the_command_line_only() -> None:
    for script in ("benchmark.py", "benchmark_sweep.py", "precision.py"):
        tree = ast.parse((ROOT / script).read_text())
        assert within(imports(tree, at_top=False)) == {"start"}, script
        assert {name.partition(".")[0] for name in imports(tree, at_top=False)} == {
            "sys",
            PACKAGE,
        }, script


def test_results_are_read_and_sweeps_are_run_without_torch() -> None:
    """In fact and not only by the source: no third package may bring torch along either."""
    free = [
        name
        for name in sorted(modules())
        if "." not in name or name.partition(".")[0] in TORCH_FREE
    ]
    free = [name for name in free if name not in ELSEWHERE]
    code = f"""
import sys
sys.modules["torch"] = sys.modules["ray"] = None  # importing them is now an ImportError
for name in {[f"{PACKAGE}.{name}".rstrip(".") for name in free]}:
    __import__(name)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
