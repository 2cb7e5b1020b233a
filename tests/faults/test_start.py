"""What a sweep costs before anything is measured: nearly nothing, and no torch in the parent."""

import subprocess
import sys
import time

import pytest

from tests.faults.harness import ROOT


@pytest.mark.parametrize("script", ["benchmark.py", "benchmark_sweep.py"])
def test_help_answers_in_half_a_second(script):
    times_s = []
    for _ in range(3):
        started = time.monotonic()
        done = subprocess.run([sys.executable, str(ROOT / script), "--help"], capture_output=True, text=True)
        times_s.append(time.monotonic() - started)
        assert done.returncode == 0
        assert "--context-length" in done.stdout
    assert min(times_s) < 0.5
