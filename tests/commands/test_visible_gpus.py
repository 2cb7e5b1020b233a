"""What the commands make of GPUs that are hidden, cut into slices, or not all of a kind."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cs336 import cli
from cs336.commands.machine import resolve_device
from cs336.config import Device, ModelConfig, Parallel, RunConfig
from cs336.measure import nvml
from cs336.record import load_records
from cs336.studies import runner
from cs336.sweep import run as sweep
from cs336.sweep import store
from cs336.sweep.keep import Listener
from cs336.sweep.run import run_sweep
from cs336.sweep.store import exclusive
from tests.fake_nvml import Slice, fake_driver

pytestmark = pytest.mark.usefixtures("no_pictures")

SMALL = (
    "--vocab-size",
    "11",
    "--d-model",
    "8",
    "--d-ff",
    "16",
    "--num-layers",
    "1",
    "--num-heads",
    "2",
    "--warmup-steps",
    "10",
    "--measured-steps",
    "10",
)
SHAPE = ModelConfig(vocab_size=11, context_length=8, d_model=8, d_ff=16, num_layers=1, num_heads=2)
ONCE = RunConfig(size="custom", model=SHAPE, device=Device.CUDA, warmup_steps=2, measured_steps=2)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """Two H100s, as the driver tells; nothing here gets as far as CUDA."""
    monkeypatch.chdir(tmp_path)
    nvml._initialised.cache_clear()
    yield fake_driver(monkeypatch)
    nvml._initialised.cache_clear()


COMMANDS = {
    "benchmark": lambda: cli.benchmark([*SMALL, "--context-length", "8"]),
    "sweep": lambda: cli.sweep([*SMALL, "--context-lengths", "8"]),
    "ladder": lambda: cli.main(
        ["ladder", *SMALL, "--context-length", "8", "--rungs", "fp32", "--no-reasons"]
    ),
    "compare": lambda: cli.main(
        [
            "compare",
            *[f" {' '.join(SMALL)} --context-length 8"] * 2,
            "--repeats",
            "2",
            "--a-against-a",
        ]
    ),
    "attention": lambda: cli.main(
        [
            "attention",
            "--implementations",
            "naive",
            "--d-heads",
            "16",
            "--context-lengths",
            "8",
            "--passes",
            "2",
        ]
    ),
    "fusion": lambda: cli.main(
        ["fusion", "--ops", "rms_norm", "--width", "8", "--context-length", "8"]
    ),
    "ceilings": lambda: cli.main(
        ["ceilings", "--sizes", "16", "--presets", "tiny", "--memory-mib", "1"]
    ),
    "precision": lambda: cli.precision([]),
}


class FarEnoughError(Exception):
    """It is enough to come as far as the runs."""


@pytest.fixture
def no_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep or a study ends where its first run would begin."""

    def stop(*_: object, **__: object) -> None:
        raise FarEnoughError

    monkeypatch.setattr(sweep, "run_sweep", stop)
    monkeypatch.setattr(runner, "run_study", stop)


@pytest.mark.parametrize("name", COMMANDS)
def test_auto_says_once_that_it_takes_the_cpu_and_why(
    driver: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    name: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    if name in ("benchmark", "precision"):
        assert COMMANDS[name]() == 0
    else:
        request.getfixturevalue("no_runs")
        with pytest.raises(FarEnoughError):
            COMMANDS[name]()
    captured = capsys.readouterr()
    assert (
        captured.err.count(
            "note: --device auto takes the CPU: CUDA_VISIBLE_DEVICES=5 names none of the GPUs"
        )
        == 1
    )
    assert "note:" not in captured.out


@pytest.mark.parametrize("visible", [None, "0", "MIG-aa", "MIG-aa01"])
def test_a_slice_is_a_gpu_to_auto(
    driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, visible: str | None
) -> None:
    driver.slices["GPU-0"] = [Slice("MIG-aa01", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 * 2**30)]
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert resolve_device("auto") is Device.CUDA


class Witness(Listener):
    def __init__(self) -> None:
        self.gpus: list[str] = []

    def started(self, config: RunConfig, gpu: nvml.Gpu | None) -> None:
        assert gpu is not None
        self.gpus.append(gpu.uuid)


@pytest.fixture
def mixed(driver: SimpleNamespace) -> SimpleNamespace:
    """Four GPUs, the second of another kind."""
    driver.nvmlDeviceGetCount = lambda: 4
    driver.nvmlDeviceGetName = lambda handle: (
        "NVIDIA A100-SXM4-40GB" if handle == "GPU-1" else "NVIDIA H200"
    )
    return driver


def test_a_sweep_is_on_gpus_of_one_kind(
    mixed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other is not even taken from others: the runs fail, as there is no CUDA behind this
    driver.
    """
    monkeypatch.setattr(store, "gpu_lock_path", lambda uuid: tmp_path / f"{uuid}.lock")
    witness = Witness()
    with exclusive(tmp_path / "GPU-1.lock", "the other GPU"):
        run_sweep([replace(ONCE, repeat=number) for number in range(6)], tmp_path, witness)
    assert sorted(witness.gpus[:3]) == ["GPU-0", "GPU-2", "GPU-3"]
    assert set(witness.gpus) == {"GPU-0", "GPU-2", "GPU-3"}
    assert len(load_records(tmp_path / "runs")[0]) == 6


def test_runs_on_several_ranks_have_the_gpus_in_their_order(
    driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first GPU is given back after the second had been free all the time."""
    driver.nvmlDeviceGetCount = lambda: 2
    monkeypatch.setattr(store, "gpu_lock_path", lambda uuid: tmp_path / f"{uuid}.lock")
    witness = Witness()
    run_sweep([ONCE, replace(ONCE, parallel=Parallel.DDP_FLAT, ranks=2)], tmp_path, witness)
    assert witness.gpus == ["GPU-0", "GPU-0"]


@pytest.mark.parametrize("name", ["sweep", "ladder", "compare"])
def test_what_is_left_out_is_said_on_standard_error(
    mixed: SimpleNamespace, no_runs: None, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(FarEnoughError):
        COMMANDS[name]()
    captured = capsys.readouterr()
    assert (
        captured.err.count("note: GPU 1 (NVIDIA A100-SXM4-40GB) is left out: it is of another kind")
        == 1
    )
    assert captured.out == ""
