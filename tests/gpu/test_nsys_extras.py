"""The handout's command of nsys, on a program whose truth it writes itself."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cs336.analysis.kernels.explain import explain
from cs336.analysis.kernels.phases import LaunchPhase
from cs336.analysis.kernels.step_profile import StepProfile

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(300)]

HANDOUT = (
    "--trace=cuda,cudnn,cublas,osrt,nvtx",
    "--pytorch=functions-trace,autograd-shapes-nvtx",
    "--cudabacktrace=all",
    "--python-backtrace=cuda",
    "--gpu-metrics-devices=0",
    "--cuda-memory-usage=true",
)
NUM_STEPS = 4
PROGRAM = """
import json, sys, torch
weights = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
values = torch.randn(2**28, device="cuda")
for _ in range(NUM_STEPS):
    with torch.cuda.nvtx.range("forward"):
        for _ in range(20):
            weights @ weights
        torch.cuda.synchronize()
    with torch.cuda.nvtx.range("optimizer"):
        for _ in range(20):
            values.mul_(1.5)
        torch.cuda.synchronize()
json.dump(torch.cuda.memory_stats()["reserved_bytes.all.peak"], open(sys.argv[1], "w"))
""".replace("NUM_STEPS", str(NUM_STEPS))
LINE_OF_UPDATE = PROGRAM[: PROGRAM.index("values.mul_")].count("\n") + 1
LIBRARIES_BYTES = 256 << 20
"""cuBLAS takes 64 MiB for each of its handles, and up to as much again."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[StepProfile, int]:
    """The explained report, and the most bytes that PyTorch's allocator had reserved."""
    nsys = shutil.which("nsys")
    assert nsys, "this machine should have nsys"
    directory = tmp_path_factory.mktemp("handout")
    program, truth = directory / "program.py", directory / "truth.json"
    program.write_text(PROGRAM)
    report = directory / "report.nsys-rep"
    command = [nsys, "profile", *HANDOUT, f"--output={report}", sys.executable]
    subprocess.run([*command, str(program), str(truth)], check=True, timeout=200)
    return explain(Path(report)), int(json.loads(truth.read_text()))


def test_tensor_cores_are_active_in_matmuls_alone(recorded: tuple[StepProfile, int]) -> None:
    counters = recorded[0].counters
    seen = "\n".join(
        f"{mean.counter}, {mean.phase}: {mean.share:.3f}, {mean.count}" for mean in counters
    )
    shares = {(mean.counter, mean.phase): mean.share for mean in counters}
    matmuls = shares["Tensor Active", LaunchPhase.FORWARD]
    updates = shares["Tensor Active", LaunchPhase.OPTIMIZER]
    # one of the samples at each of a phase's edges may be of the phase beside it
    samples = {mean.count for mean in counters if mean.phase is LaunchPhase.OPTIMIZER}
    assert matmuls > 0.3, seen
    assert updates <= 2 * NUM_STEPS / min(samples), seen
    # an update in place reads as much as it writes, near the memory's limit
    reads = shares["DRAM Read Bandwidth", LaunchPhase.OPTIMIZER]
    writes = shares["DRAM Write Bandwidth", LaunchPhase.OPTIMIZER]
    assert reads + writes > 0.5, seen
    # those edges count for either, and so does what a refresh or a cache holds back
    assert abs(reads - writes) <= 0.2 * max(reads, writes) + 2 * NUM_STEPS / min(samples), seen


def test_reserved_memory_is_the_allocators_and_that_of_libraries(
    recorded: tuple[StepProfile, int],
) -> None:
    profile, of_pytorch = recorded
    peaks = {(peak.kind, peak.phase): peak.peak_bytes for peak in profile.reserved}
    assert 0 <= peaks["Device", None] - of_pytorch <= LIBRARIES_BYTES


def test_kernels_of_an_update_belong_to_its_line(recorded: tuple[StepProfile, int]) -> None:
    counts = {row.place and row.place.line: row.count for row in recorded[0].places}
    assert counts[LINE_OF_UPDATE] == NUM_STEPS * 20
