"""What the driver says, in our units; which GPUs are meant; machines that say little or nothing."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from cs336.costs.hardware import find_device
from cs336.measure import nvml
from cs336.measure.nvml import (
    Gpu,
    GpuMonitor,
    select,
    usable_gpu_bytes,
    visible_gpus,
    why_none_visible,
)
from tests.fake_nvml import WHOLE_BYTES, Slice, fake_driver, unsupported

GPUS = [
    Gpu(index=i, uuid=uuid, name="NVIDIA H100", memory_bytes=2**36, driver="580.1")
    for i, uuid in enumerate(["GPU-11aa", "GPU-11bb", "GPU-22cc", "GPU-33dd"])
]
# What CUDA makes of CUDA_VISIBLE_DEVICES on a machine with the GPUs above.
VISIBLE = {
    "": [],
    "-1": [],
    "no": [],
    "4": [],
    "0": [0],
    "2,0": [2, 0],
    " 1 , 0 ": [1, 0],
    "0,1,2,3": [0, 1, 2, 3],
    "0,-1,1": [0],
    "0,,1": [0],
    "0,0": [],
    "GPU-22cc": [2],
    "GPU-22": [2],
    "GPU-11": [],
    "GPU-33dd,GPU-11aa": [3, 0],
    "GPU-33dd,GPU-99": [3],
    "GPU-33dd,GPU-33": [],
    "MIG-11aa": [],
    "GPU-22cc,0": [2],
    "0,GPU-11aa": [0],
}


def parsed_by_torch(visible: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """PyTorch's own reading, made to count devices without a context."""
    import torch

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    entries = torch.cuda._parse_visible_devices()
    if entries and isinstance(entries[0], str):
        return torch.cuda._transform_uuid_to_ordinals(entries, [gpu.uuid for gpu in GPUS])
    return [
        entry
        for i, entry in enumerate(entries)
        if all(earlier < len(GPUS) for earlier in entries[: i + 1])
    ]


@pytest.mark.parametrize("visible", VISIBLE)
def test_the_gpus_meant_are_those_that_torch_would_see(
    visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parsed_by_torch(visible, monkeypatch) == VISIBLE[visible]
    assert [gpu.index for gpu in select(GPUS, visible)] == VISIBLE[visible]


@pytest.fixture
def forget_driver() -> Iterator[None]:
    nvml._initialised.cache_clear()
    yield
    nvml._initialised.cache_clear()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, forget_driver: None) -> SimpleNamespace:
    """A driver with two GPUs whose answers a test may change."""
    return fake_driver(monkeypatch)


A, B = (
    Slice("MIG-aa01", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 * 2**30),
    Slice("MIG-bb02", "?", 40 * 2**30),
)


@pytest.fixture
def sliced(driver: SimpleNamespace) -> SimpleNamespace:
    """The first of the two GPUs is in MIG mode, with two slices and room for more."""
    driver.slices["GPU-0"] = [A, None, B]
    return driver


# What CUDA makes of CUDA_VISIBLE_DEVICES there: one slice, and no GPU beside a slice (NVIDIA's MIG
# user guide).
SLICED = {
    None: ["MIG-aa01"],
    "0": ["MIG-aa01"],
    "1": ["GPU-1"],
    "0,1": ["MIG-aa01"],
    "1,0": ["MIG-aa01"],
    "2": [],
    "MIG-aa01": ["MIG-aa01"],
    "MIG-bb02": ["MIG-bb02"],
    "MIG-b": ["MIG-bb02"],
    "MIG-bb02,MIG-aa01": ["MIG-bb02"],
    "MIG-": [],
    "MIG-cc": [],
    "MIG-aa01,MIG-aa01": [],
    "GPU-0": ["MIG-aa01"],
    "GPU-1": ["GPU-1"],
    "": [],
}


@pytest.mark.parametrize("visible", SLICED)
def test_a_slice_is_a_device_and_the_gpu_it_is_of_is_none(
    sliced: SimpleNamespace, visible: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.uuid for gpu in visible_gpus()] == SLICED[visible]


@pytest.mark.parametrize("told", [A, B, replace(B, name="NVIDIA H100 80GB HBM3")])
def test_a_slice_has_its_own_memory_and_no_peak_of_the_whole(
    sliced: SimpleNamespace, told: Slice
) -> None:
    """Whatever name the driver gives it, the whole GPU's among them."""
    sliced.slices["GPU-0"] = [told]
    (gpu,) = visible_gpus()
    assert gpu.memory_bytes == told.memory_bytes < WHOLE_BYTES
    assert usable_gpu_bytes() == told.memory_bytes - 2**20
    assert gpu.slice_of == "GPU-0"
    assert find_device("NVIDIA H100 80GB HBM3") is not None
    assert find_device(gpu.name) is None
    assert "NVIDIA H100 80GB HBM3 MIG " in gpu.name
    assert gpu.name == told.name or gpu.name.endswith(" 40gb")


def test_the_mode_without_a_slice_leaves_nothing_to_compute_on(sliced: SimpleNamespace) -> None:
    sliced.slices["GPU-0"] = [None]
    assert [gpu.uuid for gpu in visible_gpus()] == ["GPU-1"]
    assert why_none_visible() is None
    sliced.slices["GPU-1"] = []
    assert visible_gpus() == ()
    assert "MIG mode" in why_none_visible()
    sliced.nvmlDeviceGetMaxMigDeviceCount = unsupported
    assert visible_gpus() == ()


def test_units_are_si(driver: SimpleNamespace) -> None:
    state = GpuMonitor("GPU-0").state()
    assert state.sm_clock_hz == 1_755_000_000
    assert state.max_sm_clock_hz == 1_980_000_000
    assert state.memory_clock_hz == 2_619_000_000
    assert state.power_w == 698.25
    assert state.temperature_c == 61
    assert GpuMonitor("GPU-0").energy_j() == 1234.567


@pytest.mark.gpu
def test_the_driver_says_what_cuda_says() -> None:
    import torch

    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    gpus = visible_gpus()
    assert [gpu.name for gpu in gpus] == [p.name for p in properties]
    assert [gpu.uuid for gpu in gpus] == [f"GPU-{p.uuid}" for p in properties]
    for gpu, p in zip(gpus, properties, strict=True):
        assert gpu.memory_bytes == pytest.approx(p.total_memory, rel=0.02), (
            "the driver keeps some for itself"
        )
    torch.zeros(1, device="cuda")
    assert GpuMonitor(gpus[0].uuid).processes() >= 1


@pytest.mark.parametrize(
    ("cores", "gpus", "load", "is_said"),
    [
        (32, 2, 3.5, False),
        (32, 2, 28.5, True),
        (2, 1, 0.9, False),
        (2, 1, 1.5, True),
        (4, 0, 1, True),
    ],
)
def test_a_load_is_said_where_it_takes_cores_that_a_step_needs(
    cores: int, gpus: int, load: float, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(total=1, available=1)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(psutil, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(nvml.os, "cpu_count", lambda: cores)
    said = [text.startswith("the load is") for text in nvml.disturbances(GPUS[:gpus])]
    assert said == [True] * is_said


def test_what_may_disturb_a_measurement_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    battery, memory = (
        SimpleNamespace(power_plugged=True),
        SimpleNamespace(total=16 * 2**30, available=8 * 2**30),
    )
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(psutil, "getloadavg", lambda: (0.2, 9.0, 9.0))
    assert nvml.disturbances(()) == []
    monkeypatch.setattr(psutil, "getloadavg", lambda: (3.0, 0.0, 0.0))
    battery.power_plugged, memory.available = False, 2**30
    words = ("load is 3.0", "1.0 of 16.0 GiB", "battery")
    for word, text in zip(words, nvml.disturbances(()), strict=True):
        assert word in text
