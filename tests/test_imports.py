"""What a command imports, and when: the packages that take half a second and more, in a fresh
process.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = f"""
import gc, sys
gc.disable()  # collections traverse all that is imported, and at the end of Python too
sys.path.insert(0, {str(ROOT)!r})
from cs336 import cli
{{}}
gc.freeze()
"""


def passes(code: str, directory: Path) -> None:
    script = SCRIPT.format(code)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=directory, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_help_and_what_needs_no_run_import_neither_torch_nor_drawing_nor_data_frames(
    tmp_path: Path,
) -> None:
    code = """
def status(command, argv):
    try:
        return command(argv)
    except SystemExit as end:
        return end.code


assert status(cli.main, ["account"]) == 0
assert status(cli.main, ["--help"]) == 0  # which imports the flags of every command
for command in (cli.benchmark, cli.sweep, cli.precision):
    assert status(command, ["--help"]) == 0
found = {"torch", "pandas", "matplotlib", "scipy"} & set(sys.modules)
assert not found, found
assert status(cli.main, ["plan", "--size", "8B", "--tokens", "1T", "--gpus", "8xB200"]) == 0
found = {"torch", "pandas", "matplotlib"} & set(sys.modules)
assert not found, found
"""
    passes(code, tmp_path)


def test_an_eager_run_imports_no_compiler_and_no_step_imports_anything(tmp_path: Path) -> None:
    code = """
SMALL = [
    "--device",
    "cpu",
    "--vocab-size",
    "11",
    "--context-length",
    "8",
    "--d-model",
    "8",
    "--num-heads",
    "2",
]
compiler, tables = "torch._dynamo", {"pandas", "matplotlib"}
others = {
    "rich.console",
    *(
        f"cs336.{name}"
        for name in (
            "model.fast.model",
            "parallel.data_parallel",
            "measure.memory",
            "sweep.run",
            "studies.ceilings_records",
        )
    ),
}  # of fast, shared, profiled and several runs, and of printing
first = set()  # all that was loaded when the first step ended
loaded = set()  # of these, when the last step ended
steps = []  # of each, what it imported

import cs336.measure.step

call = cs336.measure.step.TrainingStep.__call__


def watched(self, clock):
    before = set(sys.modules)
    result = call(self, clock)
    steps.append(set(sys.modules) - before)
    first.update(() if first else sys.modules)
    loaded.update({compiler, *tables} & set(sys.modules))
    return result


cs336.measure.step.TrainingStep.__call__ = watched
from types import SimpleNamespace

sys.modules["cs336.report.terminal"] = SimpleNamespace(print_measured=lambda *_: None)
for flags in ([], ["--mixed-precision"], ["--mode", "inference"]):
    assert cli.benchmark([*SMALL, "--warmup-steps", "2", "--measured-steps", "2", *flags]) == 0
    assert len(steps) == 4 and not any(steps[2:]), steps
    assert not loaded, loaded
    steps.clear()
assert not others & first, others & first
assert not {compiler, "matplotlib"} & set(sys.modules)

FUSED = (
    "--mixed-precision --optimizer fused --attention sdpa --cast-once --split-masters "
    "--fused-loss --fused-blocks --fused-activations --packed-attention --bf16-stream"
).split()
WIDE = [*SMALL, "--d-model", "128", "--d-ff", "128"]
assert cli.benchmark([*WIDE, "--warmup-steps", "2", "--measured-steps", "2", *FUSED]) == 0
assert "cs336.model.fast.model" in sys.modules and compiler not in sys.modules
steps.clear()

# what needs the compiler imports it before the first step, which may be a measured one
unwarmed = [*SMALL, "--checkpoint-blocks", "1", "--warmup-steps", "0", "--measured-steps", "1"]
assert cli.benchmark(unwarmed) == 0
assert compiler in sys.modules and not any(steps), steps
"""
    passes(code, tmp_path)


PACKAGE = """
import gc, inspect, torch
if "recompile_limit" not in inspect.signature(torch.compile).parameters:
    torch._dynamo.config.recompile_limit = 64
collects = gc.isenabled()
compiled = torch.compile(lambda: "compiled", dynamic=False, recompile_limit=64)


@torch.compiler.disable
def avoided():
    return "avoided"


@torch.compile(dynamic=True)
def decorated():
    return "decorated"
"""


def test_a_package_that_decorates_for_the_compiler_is_imported_without_it(tmp_path: Path) -> None:
    """As QuACK does, and afterwards PyTorch is as it was, also if the import fails."""
    (tmp_path / "decorating.py").write_text(PACKAGE)
    code = """
import torch
from cs336.model.fast.packages import without_compiler

gc.enable()
before = torch.compile, torch.compiler.disable
sys.path.insert(0, ".")
with without_compiler():
    import decorating
try:
    with without_compiler():
        import decorating_that_is_not_there
except ImportError:
    pass
assert before == (torch.compile, torch.compiler.disable) and gc.isenabled()
assert "torch._dynamo" not in sys.modules and not decorating.collects
results = decorating.compiled(), decorating.avoided(), decorating.decorated()
assert results == ("compiled", "avoided", "decorated")
import torch._dynamo

with without_compiler():
    assert before == (torch.compile, torch.compiler.disable)
"""
    passes(code, tmp_path)
