"""The notebook of examples/ runs on a CPU, cell by cell."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.faults.harness import ROOT

NOTEBOOK = ROOT / "examples" / "start.ipynb"
RUN = """
import subprocess

def shell(command):
    subprocess.run(command, shell=True, check=True)
"""


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def as_python(line: str) -> str:
    """A line of a cell as Python: what is installed is there already, and `!` begins a command."""
    if line.startswith("%pip install"):
        return ""
    return f"shell({line[1:]!r})" if line.startswith("!") else line


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    lines = [as_python(line) for cell in code_cells() for line in cell.splitlines()]
    commands = [line for line in lines if line.startswith("shell(")]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-c", RUN + "\n".join(lines)],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert len(commands) == 2
    trace = json.loads((tmp_path / "trace.json").read_text())
    steps = {event["name"] for event in trace["traceEvents"] if "ProfilerStep" in event["name"]}
    assert len(steps) == 3


def test_the_notebook_is_committed_without_outputs() -> None:
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
