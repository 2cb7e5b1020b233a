"""Modes of fp32 matmuls are set and read back, whatever was set before."""

from multiprocessing.connection import Connection

import pytest
import torch

from cs336.config import Device, Precision
from cs336.measure.precision import apply_math_mode, autocast, math_modes
from cs336.sweep.isolation import WorkerProcess
from cs336.sweep.process import begin_worker

EARLIER_SETTINGS = [
    "pass",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.fp32_precision = 'ieee'",
    "torch.backends.cudnn.fp32_precision = 'tf32'",
    "torch.backends.cudnn.conv.fp32_precision = 'tf32'",
    "torch.backends.cudnn.rnn.fp32_precision = 'ieee'",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.cuda.matmul.fp32_precision = 'ieee'",
]


def read_back(log: Connection) -> None:
    begin_worker(log)
    for earlier in EARLIER_SETTINGS:
        for precision in Precision:
            exec(earlier)
            math_modes()
            apply_math_mode(precision)
            expected = precision is Precision.TF32
            modes = math_modes()
            assert modes == {
                "float32_matmul_precision": "high" if expected else "highest",
                "allow_tf32_matmul": expected,
                "allow_tf32_cudnn": expected,
            }, (earlier, precision, modes)
            assert (torch.backends.cuda.matmul.fp32_precision == "tf32") is expected, (
                earlier,
                precision,
            )
            assert (torch.backends.cudnn.conv.fp32_precision == "tf32") is expected, (
                earlier,
                precision,
            )
            assert (torch.backends.cudnn.rnn.fp32_precision == "tf32") is expected, (
                earlier,
                precision,
            )
    assert not torch.cuda.is_initialized()


def test_modes_are_in_force_whatever_was_set_before_and_cuda_stays_untouched() -> None:
    # A process of its own: the modes are global, and some can never be unset.
    worker = WorkerProcess(read_back)
    assert worker.reap() == 0, worker.log_tail()


def test_every_context_sees_the_parameters_as_they_are_now() -> None:
    weight = torch.ones(1, 1, requires_grad=True)
    products = []
    for _ in range(2):
        with autocast(Precision.BF16, Device.CPU):
            products.append((torch.ones(1, 1) @ weight).item())
        weight.data += 1
    assert products == [1.0, 2.0]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "least", "most"), [(Precision.FP32, 0.0, 2e-6), (Precision.TF32, 5e-5, 5e-3)]
)
def test_the_mode_changes_the_rounding_of_fp32_products_on_a_gpu(
    precision: Precision, least: float, most: float
) -> None:
    # TF32 keeps 10 bits of mantissa, fp32 23: against fp64, the error says which of them computed
    # the product.
    a, b = torch.randn(2, 512, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = a @ b
    before = math_modes()
    try:
        apply_math_mode(precision)
        product = (a.float().cuda() @ b.float().cuda()).double().cpu()
    finally:
        apply_math_mode(Precision.TF32 if before["allow_tf32_matmul"] else Precision.FP32)
    error = ((product - exact).norm() / exact.norm()).item()
    assert least <= error <= most
