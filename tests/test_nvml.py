"""What the driver says, in our units; which GPUs are meant; machines that say little or nothing."""

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pynvml
import pytest

from cs336_systems import nvml
from cs336_systems.nvml import Gpu, GpuMonitor, select, usable_gpu_bytes, visible_gpus

GPUS = [
    Gpu(index=i, uuid=uuid, name="NVIDIA H100", memory_bytes=2**36, driver="580.1")
    for i, uuid in enumerate(["GPU-11aa", "GPU-11bb", "GPU-22cc", "GPU-33dd"])
]
# What CUDA makes of CUDA_VISIBLE_DEVICES on a machine with the GPUs above.
VISIBLE = {
    "": [], "-1": [], "no": [], "4": [], "0": [0], "2,0": [2, 0], " 1 , 0 ": [1, 0], "0,1,2,3": [0, 1, 2, 3],
    "0,-1,1": [0], "0,9,1": [0], "0,,1": [0], "0,0": [], "1,0,1": [], "GPU-22cc": [2], "GPU-22": [2], "GPU-11": [],
    "GPU-33dd,GPU-11aa": [3, 0], "GPU-33dd,GPU-99": [3], "GPU-33dd,GPU-33": [], "MIG-11aa": [], "0,GPU-22cc": [0],
    "GPU-22cc,0": [2], "0,GPU-11aa": [0],
}  # fmt: skip


def parsed_by_torch(visible: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """PyTorch's own reading, made to count devices without a context."""
    import torch

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    entries = torch.cuda._parse_visible_devices()
    if entries and isinstance(entries[0], str):
        return torch.cuda._transform_uuid_to_ordinals(entries, [gpu.uuid for gpu in GPUS])
    return [entry for i, entry in enumerate(entries) if all(earlier < len(GPUS) for earlier in entries[: i + 1])]


@pytest.mark.parametrize("visible", VISIBLE)
def test_the_gpus_meant_are_those_that_torch_would_see(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed_by_torch(visible, monkeypatch) == VISIBLE[visible]
    assert [gpu.index for gpu in select(GPUS, visible)] == VISIBLE[visible]


# Run in a process of its own, where CUDA has not looked at the environment yet.
COUNT_DEVICES = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
count = ctypes.c_int(0)
print(0 if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) else count.value)
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "visible", ["", "-1", "0", " 0 ", "0,0", "0,-1", "9,0", "GPU", "PREFIX", "UUID,UUID", "0,UUID", "UUID,0"]
)
def test_the_gpus_meant_are_those_that_cuda_sees(visible: str) -> None:
    uuid = visible_gpus()[0].uuid
    visible = visible.replace("PREFIX", uuid[:12]).replace("UUID", uuid)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible}
    counted = subprocess.check_output([sys.executable, "-c", COUNT_DEVICES], env=environment)
    assert len(visible_gpus(visible)) == int(counted)


@pytest.fixture
def forget_driver() -> Iterator[None]:
    nvml._initialised.cache_clear()
    yield
    nvml._initialised.cache_clear()


@pytest.mark.usefixtures("forget_driver")
@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_without_a_driver_there_is_no_gpu_and_no_error(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert visible_gpus() == ()
    assert visible_gpus("0") == ()


def unsupported(*_: object, **__: object) -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, forget_driver: None) -> SimpleNamespace:
    """A driver with two GPUs whose answers a test may change."""
    answers = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: f"GPU-{index}",
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetUUID=lambda handle: handle,
        nvmlDeviceGetName=lambda handle: "NVIDIA H100 80GB HBM3",
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetMemoryInfo=lambda handle, version=1: SimpleNamespace(
            total=85_520_809_984, reserved=680_000_000 if version == pynvml.nvmlMemory_v2 else None
        ),
        nvmlDeviceGetClockInfo=lambda handle, kind: {pynvml.NVML_CLOCK_SM: 1755, pynvml.NVML_CLOCK_MEM: 2619}[kind],
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: {pynvml.NVML_CLOCK_SM: 1980}[kind],
        nvmlDeviceGetPowerUsage=lambda handle: 698_250,
        nvmlDeviceGetTemperature=lambda handle, kind: 61,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: ["this one"],
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 1_234_567,
    )
    for name in vars(answers):
        monkeypatch.setattr(
            pynvml, name, lambda *arguments, name=name, **options: getattr(answers, name)(*arguments, **options)
        )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return answers


def test_gpus_are_those_of_the_environment_unless_told(
    driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [gpu.uuid for gpu in visible_gpus()] == ["GPU-0", "GPU-1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.uuid for gpu in visible_gpus()] == ["GPU-1"]
    assert [gpu.uuid for gpu in visible_gpus("0")] == ["GPU-0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == ()


def test_a_driver_that_answers_in_bytes_is_understood(driver: SimpleNamespace) -> None:
    driver.nvmlDeviceGetName = lambda handle: b"Tesla V100"
    assert visible_gpus()[0].name == "Tesla V100"


def test_a_gpu_that_shares_the_host_s_memory_has_no_size_of_its_own(driver: SimpleNamespace) -> None:
    driver.nvmlDeviceGetMemoryInfo = unsupported
    assert [(gpu.name, gpu.memory_bytes) for gpu in visible_gpus()] == [("NVIDIA H100 80GB HBM3", None)] * 2


def test_what_programs_can_have_is_without_what_the_driver_keeps(driver: SimpleNamespace) -> None:
    assert visible_gpus()[0].usable_bytes == 85_520_809_984 - 680_000_000 == usable_gpu_bytes()
    driver.nvmlDeviceGetMemoryInfo = unsupported
    assert usable_gpu_bytes() is None


def test_units_are_si(driver: SimpleNamespace) -> None:
    state = GpuMonitor("GPU-0").state()
    assert state.sm_clock_hz == 1_755_000_000
    assert state.max_sm_clock_hz == 1_980_000_000
    assert state.memory_clock_hz == 2_619_000_000
    assert state.power_w == 698.25
    assert state.temperature_c == 61
    assert GpuMonitor("GPU-0").energy_j() == 1234.567


@pytest.mark.parametrize(
    ("constant", "reasons"),
    [
        ("nvmlClocksThrottleReasonSwPowerCap", ("power cap",)),
        ("nvmlClocksThrottleReasonHwSlowdown", ("hardware slowdown",)),
        ("nvmlClocksThrottleReasonSwThermalSlowdown", ("software thermal",)),
        ("nvmlClocksThrottleReasonHwThermalSlowdown", ("hardware thermal",)),
        ("nvmlClocksThrottleReasonHwPowerBrakeSlowdown", ("power brake",)),
        # These mean an idle GPU or a clock that somebody asked for.
        ("nvmlClocksThrottleReasonGpuIdle", ()),
        ("nvmlClocksThrottleReasonApplicationsClocksSetting", ()),
        ("nvmlClocksThrottleReasonSyncBoost", ()),
        ("nvmlClocksEventReasonDisplayClockSetting", ()),
        ("nvmlClocksThrottleReasonNone", ()),
    ],
)
def test_throttling_has_the_names_of_nvml_s_own_bits(
    driver: SimpleNamespace, constant: str, reasons: tuple[str, ...]
) -> None:
    bits = getattr(pynvml, constant)
    driver.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: bits
    assert GpuMonitor("GPU-0").state().throttle_reasons == reasons
    driver.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: bits | pynvml.nvmlClocksThrottleReasonSwPowerCap
    assert GpuMonitor("GPU-0").state().throttle_reasons == tuple(dict.fromkeys(("power cap", *reasons)))


@pytest.mark.parametrize(("running", "own", "others"), [(1, 1, 0), (3, 1, 2), (0, 1, 0), (2, 0, 2)])
def test_company_is_counted_without_this_process(driver: SimpleNamespace, running: int, own: int, others: int) -> None:
    driver.nvmlDeviceGetComputeRunningProcesses = lambda handle: list(range(running))
    assert GpuMonitor("GPU-0").processes() == running
    assert GpuMonitor("GPU-0").state(own).other_processes == others


def test_energy_that_is_not_counted_is_unknown(driver: SimpleNamespace) -> None:
    driver.nvmlDeviceGetTotalEnergyConsumption = unsupported
    assert GpuMonitor("GPU-0").energy_j() is None


@pytest.mark.gpu
def test_the_driver_says_what_cuda_says() -> None:
    import torch

    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    gpus = visible_gpus()
    assert [gpu.name for gpu in gpus] == [p.name for p in properties]
    assert [gpu.uuid for gpu in gpus] == [f"GPU-{p.uuid}" for p in properties]
    for gpu, p in zip(gpus, properties, strict=True):
        assert gpu.memory_bytes == pytest.approx(p.total_memory, rel=0.02), "the driver keeps some for itself"
    torch.zeros(1, device="cuda")
    assert GpuMonitor(gpus[0].uuid).processes() >= 1
