"""The ladder where its rungs count: on a GPU, by the command, with real compilers, graphs and a
real lack of memory.
"""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(600)]


def climb(directory, *words):
    """The rows of ladder.csv by rung, of a ladder run as a user types it."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "cs336", "ladder", "--device", "cuda", "--name", "x", *words],
        env=os.environ | {"PYTHONPATH": path},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=580,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    with (directory / "data" / "ladder" / "x" / "ladder.csv").open() as file:
        return {row["rung"]: row for row in csv.DictReader(file)}


def test_rungs_pass_the_gate_and_give_their_reasons(tmp_path):
    rows = climb(
        tmp_path,
        "--size",
        "small",
        "--context-length",
        "256",
        "--batch-size",
        "4",
        "--repeats",
        "1",
        "--rungs",
        "bf16",
        "cast-once",
        "graph",
        "fused-blocks",
    )
    assert list(rows) == ["fp32", "bf16", "cast-once", "graph", "fused-blocks"]
    assert {(row["status"], row["gate"]) for row in rows.values()} == {("ok", "passed")}
    launches = {name: float(row["launches_per_step"]) for name, row in rows.items()}
    busy = {name: float(row["busy_share"]) for name, row in rows.items()}
    assert launches["cast-once"] < launches["bf16"] / 2, (
        "compiled, fused attention, fused AdamW, no casts"
    )
    assert launches["graph"] == pytest.approx(launches["cast-once"], abs=3), (
        "the same kernels, replayed"
    )
    assert launches["fused-blocks"] < launches["graph"], (
        "additions, gains and biases have no kernels of their own"
    )
    assert all(0 < share <= 1 for share in busy.values())
    assert busy["graph"] > busy["bf16"], "a graph does not wait for the host"
    assert [row["compile_s"] != "" for row in rows.values()] == [False] * 2 + [True] * 3
    assert all(float(row["peak_allocated_gib"]) > 16 * 128e6 / 2**30 for row in rows.values()), (
        "16 bytes a parameter"
    )
    assert float(rows["fused-blocks"]["speed_up_over_first"]) > 1
