"""The attention grid on a CPU: closed forms against torch's own counts, and failures put in on purpose."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count

from cs336_systems.commands.attention import AttentionArguments
from cs336_systems.commands.flags import parse
from cs336_systems.config import Device, Phase, Precision
from cs336_systems.record import RecordError
from cs336_systems.studies import attention_study
from cs336_systems.studies.attention_cell import full_attention, make_attention, measure_cell
from cs336_systems.studies.attention_records import (
    AttentionCell,
    AttentionGrid,
    AttentionStudy,
    CellMemory,
    CellResult,
    CellStatus,
    Implementation,
    encode_study,
    matmul_flops,
    naive_saved_bytes,
    read_study,
)
from cs336_systems.studies.attention_study import run_attention_study

ROOT = Path(__file__).parents[2]
SMALL = AttentionGrid(
    device=Device.CPU, batch_size=2, d_heads=(4,), context_lengths=(8, 16, 32), implementations=(Implementation.NAIVE,),
    passes=3, warmup_passes=2, timeout_s=60.0,
)  # fmt: skip
FAILING_CONTEXT = 16


def cell_of(implementation: Implementation, d_head: int = 4, context_length: int = 8) -> AttentionCell:
    return AttentionCell(
        implementation=implementation, precision=Precision.FP32, d_head=d_head, context_length=context_length
    )


def inputs_of(grid: AttentionGrid, cell: AttentionCell) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (grid.batch_size, cell.context_length, cell.d_head)
    return [torch.randn(shape, generator=generator, requires_grad=True) for _ in range(3)]


# What stands in for measure_cell in the worker: found there by name, so at the top of the module.
def tell_process(grid: AttentionGrid, cell: AttentionCell) -> CellResult:
    """No measurement, but the worker's process number in place of the first pass's time."""
    return CellResult(cell=cell, status=CellStatus.OK, first_pass_s=float(os.getpid()))


def out_of_memory(*_inputs: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of")


def run_out_of_memory(grid: AttentionGrid, cell: AttentionCell) -> CellResult:
    if cell.context_length == FAILING_CONTEXT:
        return measure_cell(grid, cell, out_of_memory)
    return tell_process(grid, cell)


def exit_at_once(grid: AttentionGrid, cell: AttentionCell) -> CellResult:
    if cell.context_length == FAILING_CONTEXT:
        os._exit(3)
    return tell_process(grid, cell)


def fault(grid: AttentionGrid, cell: AttentionCell) -> CellResult:
    if cell.context_length == FAILING_CONTEXT:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    return tell_process(grid, cell)


def be_killed(grid: AttentionGrid, cell: AttentionCell) -> CellResult:
    if cell.context_length == FAILING_CONTEXT:
        os.kill(os.getpid(), signal.SIGKILL)
    return tell_process(grid, cell)


HANGING = ["sleep", "601"]


def wait_until_it_hangs(objects: list[object], timeout: float) -> list[object]:
    """As multiprocessing's, but the time is up as soon as a worker hangs, and not before."""
    while not (ready := wait(objects, timeout=0.05)):
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.cmdline() == HANGING:
                    return []
    return ready


def hang(grid: AttentionGrid, cell: AttentionCell) -> CellResult:
    """Hangs with a child in a session of its own, whose number it prints."""
    if cell.context_length == FAILING_CONTEXT:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print(child.pid, flush=True)
        subprocess.run(HANGING)
    return tell_process(grid, cell)


def fail_on_the_device(grid: AttentionGrid, cell: AttentionCell) -> CellResult:
    if cell.context_length == FAILING_CONTEXT:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return tell_process(grid, cell)


FAULTS = {
    run_out_of_memory: (CellStatus.OOM, "out of memory"),
    exit_at_once: (CellStatus.CRASHED, "ended with status 3"),
    fault: (CellStatus.CRASHED, "died of SIGSEGV"),
    be_killed: (CellStatus.KILLED, "SIGKILL"),
    hang: (CellStatus.TIMEOUT, "raise --timeout-s"),
    fail_on_the_device: (CellStatus.CUDA_ERROR, "illegal memory access"),
}


@pytest.mark.parametrize("measure", FAULTS, ids=lambda measure: measure.__name__)
def test_a_failure_is_a_row_and_the_next_cell_has_a_process_of_its_own(
    measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    if measure is hang:
        monkeypatch.setattr(attention_study, "wait", wait_until_it_hangs)
    before, failed, after = run_attention_study(SMALL, measure=measure).results
    status, words = FAULTS[measure]
    assert (before.status, failed.status, after.status) == (CellStatus.OK, status, CellStatus.OK)
    assert words in failed.failure.message
    assert failed.failure.where == "naive"
    assert failed.failure.requested_bytes == (8 * 2**30 if measure is run_out_of_memory else None)
    assert before.first_pass_s != after.first_pass_s
    if measure is hang:
        assert not psutil.pid_exists(int(failed.failure.log_tail))


def test_healthy_cells_share_a_process_for_each_implementation_and_precision() -> None:
    grid = replace(
        SMALL,
        implementations=(Implementation.NAIVE, Implementation.MATH),
        precisions=(Precision.FP32, Precision.BF16),
    )
    results = run_attention_study(grid, measure=tell_process).results
    groups: dict[tuple[str, str], set[float]] = {}
    for result in results:
        groups.setdefault((result.cell.implementation, result.cell.precision), set()).add(result.first_pass_s)
    assert [len(processes) for processes in groups.values()] == [1] * 4
    assert len(set().union(*groups.values())) == 4


def test_a_kernel_that_there_is_not_is_a_row_and_no_failure() -> None:
    grid = replace(SMALL, implementations=(Implementation.EFFICIENT, Implementation.FLASH), context_lengths=(8, 16))
    study = run_attention_study(grid)
    assert [result.status for result in study.results] == [CellStatus.UNAVAILABLE] * 2 + [CellStatus.OK] * 2
    assert "viable backend" in study.results[0].failure.message
    assert study.available(Precision.FP32) == [Implementation.FLASH]
    assert all(result.status.is_result for result in study.results)


def test_a_whole_study_keeps_every_time_and_says_where_it_was() -> None:
    progress: list[AttentionStudy] = []
    study = run_attention_study(replace(SMALL, d_heads=(8, 4), precisions=(Precision.BF16,)), progress.append)
    assert [(r.cell.context_length, r.cell.d_head) for r in study.results] == [
        (8, 4), (8, 8), (16, 4), (16, 8), (32, 4), (32, 8),
    ]  # fmt: skip
    assert [len(seen.results) for seen in progress] == [1, 2, 3, 4, 5, 6]
    assert progress[-1] == study
    assert study.environment.identity.torch == torch.__version__
    for result in study.results:
        assert [m.phase for m in result.measurements] == [Phase.FORWARD, Phase.BACKWARD]
        assert all(len(m.times_s) == 3 and m.min_s > 0 for m in result.measurements)
        assert result.memory is None  # there is no allocator to ask: unknown, not 0
        assert result.first_pass_s > 0
        assert result.compile_s is None


def test_the_parent_needs_no_torch_and_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "study.py"
    script.write_text("""
import sys
import psutil
from cs336_systems.studies.attention_records import *
from cs336_systems.studies.attention_study import run_attention_study
from cs336_systems.config import Device

def interrupt(study):
    if len(study.results) == 2:
        raise KeyboardInterrupt

if __name__ == "__main__":
    grid = AttentionGrid(device=Device.CPU, batch_size=1, d_heads=(4,), context_lengths=(8, 16, 32),
                         implementations=(Implementation.NAIVE,), passes=1, warmup_passes=1)
    assert [r.status for r in run_attention_study(grid).results] == ["ok"] * 3
    try:
        run_attention_study(grid, interrupt)
    except KeyboardInterrupt:
        pass
    assert "torch" not in sys.modules
    server, = [p for p in psutil.Process().children() if p.children() or "forkserver" in " ".join(p.cmdline())]
    assert not server.children()
""")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_what_a_killed_worker_leaves_is_cleaned_up_without_a_word(tmp_path: Path) -> None:
    """Such as the semaphores of the compiler. One is a file on Linux, whose end can be seen."""
    script = tmp_path / "study.py"
    script.write_text("""
import multiprocessing, sys
from pathlib import Path
from cs336_systems.studies.attention_records import *
from cs336_systems.studies.attention_study import run_attention_study
from cs336_systems.config import Device

KEPT = []

def measure(grid, cell):
    from cs336_systems.studies.attention_cell import measure_cell
    KEPT.append(multiprocessing.get_context("spawn").Semaphore())
    Path(sys.argv[1]).write_text(KEPT[0]._semlock.name)
    return measure_cell(grid, cell)

if __name__ == "__main__":
    grid = AttentionGrid(device=Device.CPU, batch_size=1, d_heads=(4,), context_lengths=(8,),
                         implementations=(Implementation.NAIVE,), passes=1, warmup_passes=1)
    assert [r.status for r in run_attention_study(grid, measure=measure).results] == ["ok"]
""")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "name")], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    name = (tmp_path / "name").read_text()
    assert not Path(f"/dev/shm/sem.{name.removeprefix('/')}").exists()


def test_an_injected_sleep_is_found_in_forward_alone() -> None:
    def slow(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return full_attention(q, k, v)

    result = measure_cell(SMALL, cell_of(Implementation.NAIVE), slow)
    assert result.measurement(Phase.FORWARD).min_s >= 0.1
    assert result.measurement(Phase.BACKWARD).min_s < 0.05


@torch._dynamo.config.patch(recompile_limit=1)
def test_compiling_starts_afresh_for_every_shape() -> None:
    """torch.compile gives up on a function after some shapes, here after the first, and then raises."""
    for context_length in (8, 16):
        result = measure_cell(SMALL, cell_of(Implementation.COMPILED, context_length=context_length))
        assert result.status is CellStatus.OK
        assert result.compile_s == result.first_pass_s > 0


def test_causal_attention_is_compiled_in_a_worker() -> None:
    grid = replace(SMALL, causal=True, context_lengths=(8,), implementations=(Implementation.COMPILED,))
    (result,) = run_attention_study(grid).results
    assert result.failure is None
    assert result.compile_s > result.measurement(Phase.FORWARD).mean_s


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "implementation", [Implementation.NAIVE, Implementation.SDPA, Implementation.FLASH, Implementation.MATH]
)
def test_every_implementation_computes_what_the_definition_says(implementation: Implementation, causal: bool) -> None:
    grid, cell = replace(SMALL, causal=causal), cell_of(implementation, d_head=4, context_length=6)
    inputs = inputs_of(grid, cell)
    q, k, v = (x.detach().double().numpy() for x in inputs)
    expected = np.zeros_like(q)
    for batch in range(2):
        for query in range(6):
            keys = range(query + 1 if causal else 6)
            weights = [math.exp(q[batch, query] @ k[batch, key] / 2) for key in keys]
            weighted = sum(w * v[batch, key] for w, key in zip(weights, keys, strict=True))
            expected[batch, query] = weighted / sum(weights)
    output = make_attention(grid, cell)(*inputs)
    np.testing.assert_allclose(output.detach().numpy(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d_head", "context_length"), [(4, 8), (16, 3)])
def test_what_written_out_attention_saves_is_what_autograd_keeps(
    causal: bool, d_head: int, context_length: int
) -> None:
    grid = replace(SMALL, batch_size=3, causal=causal)
    cell = cell_of(Implementation.NAIVE, d_head, context_length)
    inputs = inputs_of(grid, cell)
    given = {x.untyped_storage().data_ptr() for x in inputs}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given and tensor.dtype is not torch.bool:  # the causal mask is an input too
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = make_attention(grid, cell)(*inputs)
    assert naive_saved_bytes(grid, cell) == sum(kept.values()) + output.nbytes


def test_flops_are_those_that_torch_counts() -> None:
    cell = cell_of(Implementation.NAIVE, 16, 24)
    with FlopCounterMode(display=False) as forward:
        output = make_attention(SMALL, cell)(*(inputs := inputs_of(SMALL, cell)))
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(output, inputs, torch.ones_like(output))
    assert matmul_flops(SMALL, cell, Phase.FORWARD) == forward.get_total_flops()
    assert matmul_flops(SMALL, cell, Phase.BACKWARD) == backward.get_total_flops()
    shape = (2, 1, 24, 16)
    flash = cell_of(Implementation.FLASH, 16, 24)
    assert matmul_flops(SMALL, flash, Phase.BACKWARD) == sdpa_backward_flop_count(shape, shape, shape, shape)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d_heads": ()}, "d_heads needs at least one"),
        ({"implementations": ()}, "implementations needs"),
        ({"batch_size": 0}, "at least 1"),
        ({"context_lengths": (8, -1)}, "at least 1, got one of -1"),
        ({"passes": 0}, "passes"),
        ({"context_lengths": (10**9,)}, "use smaller"),
        ({"d_heads": (10**18,)}, "use smaller"),
        ({"timeout_s": float("nan")}, "timeout_s must be positive"),
    ],
    ids=str,
)
def test_a_grid_that_cannot_be_meant_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(SMALL, **changes)


def test_a_study_comes_back_from_its_file(tmp_path: Path) -> None:
    cells = [cell_of(Implementation.NAIVE, context_length=length) for length in (8, 16)]
    done = replace(
        measure_cell(SMALL, cells[0]),
        memory=CellMemory(before_forward_bytes=1, before_backward_bytes=4, peak_bytes=5),
    )
    missing = CellResult(cell=cells[1], status=CellStatus.UNAVAILABLE)
    study = AttentionStudy(grid=SMALL, results=(done, missing))
    path = tmp_path / "attention.json"
    path.write_bytes(encode_study(study))
    assert read_study(path) == study
    assert done.memory.saved_bytes == 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a study"),
        (b"[" * 100_000, "not a study"),
        (b'{"grid": {}}', "missing required field"),
        (b"\xff\xfe", "not a study"),
    ],
    ids=["empty", "deep", "incomplete", "not text"],
)
def test_a_file_that_is_no_study_is_said_to_be_none(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "attention.json"
    path.write_bytes(data)
    with pytest.raises(RecordError, match=words):
        read_study(path)
    with pytest.raises(RecordError, match="a directory"):
        read_study(tmp_path)


def test_a_study_of_a_newer_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    path.write_bytes(encode_study(AttentionStudy(grid=SMALL, format_version=99)))
    with pytest.raises(RecordError, match="newer"):
        read_study(path)


def test_flags_mean_a_grid() -> None:
    grid = parse(AttentionArguments, "attention", ["--device", "cpu"]).grid()
    assert (grid.batch_size, grid.passes, grid.causal, grid.precisions) == (8, 10, False, (Precision.FP32,))
    assert Implementation.SDPA in grid.implementations
    flags = (
        "--device cpu --d-heads 16 64 --context-lengths 8 --implementations math --precisions bf16 --passes 2 --causal"
    )
    arguments = parse(AttentionArguments, "attention", flags.split())
    assert arguments.grid() == AttentionGrid(
        device=Device.CPU, d_heads=(16, 64), context_lengths=(8,), implementations=(Implementation.MATH,),
        precisions=(Precision.BF16,), passes=2, causal=True,
    )  # fmt: skip
    assert arguments.directory() == Path("data/attention/bf16_cpu")
    with pytest.raises(ValueError, match="--name"):
        replace(arguments, name="../up").directory()
    with pytest.raises(ValueError, match="at least 1"):
        replace(arguments, passes=0).grid()
    with pytest.raises(SystemExit):
        parse(AttentionArguments, "attention", ["--implementations", "nonsense"])
