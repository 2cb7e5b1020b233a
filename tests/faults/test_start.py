"""What a sweep costs before anything is measured: nearly nothing, and no torch in the parent."""

import resource
import subprocess
import sys

import pytest

from tests.faults.harness import ROOT


@pytest.mark.speed
@pytest.mark.parametrize("script", ["benchmark.py", "benchmark_sweep.py"])
def test_help_answers_in_well_under_a_second(script):
    times_s = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, str(ROOT / script), "--help"], capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # of the processor, because how busy the machine is with other tests is not what is asked
        times_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0
        assert "--context-length" in done.stdout
    assert min(times_s) < 1.0
