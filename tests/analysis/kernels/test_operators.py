"""Time by operator, shape, module and function, of files that torch.profiler wrote and of drawn
ones; FLOPs and bytes against PyTorch's own counter.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from cs336.analysis.kernels.attribution import attribute
from cs336.analysis.kernels.explain import summarise
from cs336.analysis.kernels.operators import work_of
from cs336.analysis.kernels.readers import read_trace
from cs336.analysis.kernels.step_profile import StepProfile
from cs336.report.sections.kernels.operators import operators_section
from tests.analysis.kernels.kineto_files import Event, complete, write_trace
from tests.analysis.kernels.tracing import ns


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(functional.gelu(self.wide(x))) + x


def recorded(work: Callable[[], object], path: Path) -> Path:
    """The trace of the work on this machine's CPU."""
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True, with_modules=True
    ) as profiler:
        work()
    profiler.export_chrome_trace(str(path))
    return path


def profile_of(path: Path) -> StepProfile:
    return summarise(attribute(read_trace(path)), source="file")


def add_up(profile: StepProfile) -> None:
    """All three tables hold all kernels of the steps, to the nanosecond."""
    whole = sum(ns(time) for phase in profile.phases for time in phase.kernel_s)
    for parts in (profile.operators, profile.modules, profile.places):
        assert sum(ns(part.total_s) for part in parts) == whole


def test_modules_and_functions_of_a_real_program_have_forward_and_backward(tmp_path: Path) -> None:
    """Autograd's nodes have neither frames nor modules: they follow their operators of forward."""
    torch.manual_seed(0)
    network = nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(network.parameters())

    def train() -> None:
        for _ in range(2):
            network(torch.randn(16, 24)).sum().backward()
            optimizer.step()

    explained = profile_of(recorded(train, tmp_path / "real.json"))
    add_up(explained)
    products = {
        name: [part for part in explained.operators if part.name == f"aten::{name}"]
        for name in ("addmm", "mm")
    }
    # in a step 4 products of forward, and 8 of backward without the gradient of the data
    assert sum(part.calls for part in products["addmm"]) == 2 * 4
    assert sum(part.calls for part in products["mm"]) == 2 * 7
    one = 2 * 16 * 24 * 40
    assert sum(part.flops or 0 for part in (*products["addmm"], *products["mm"])) == 2 * 11 * one
    of_phase: dict[str, Counter[str]] = {}
    for module in explained.modules:
        of_phase.setdefault(module.phase, Counter())[module.path[-1] if module.path else ""] += 1
    for phase in ("forward", "backward"):
        assert of_phase[phase].keys() >= {f"Linear_{number}" for number in range(4)}
    places = [part.place for part in explained.places if part.place is not None]
    assert {place.file for place in places} == {"kernels/test_operators.py"}
    line = Block.forward.__code__.co_firstlineno
    assert line in {place.line for place in places if place.function == "forward"}


QUERIES = torch.ones(2, 3, 8, 16)
OPERATORS: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "mm": ("aten::mm", lambda: torch.ones(6, 5) @ torch.ones(5, 7)),
    "bmm": ("aten::bmm", lambda: torch.bmm(torch.ones(4, 6, 5), torch.ones(4, 5, 7))),
    "addmm": (
        "aten::addmm",
        lambda: functional.linear(torch.ones(3, 2, 5), torch.ones(7, 5), torch.ones(7)),
    ),
    "convolution": (
        "aten::mkldnn_convolution",
        lambda: functional.conv2d(
            torch.ones(2, 6, 9, 11), torch.ones(8, 3, 3, 2), stride=2, padding=1, groups=2
        ),
    ),
    "attention": (
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        lambda: functional.scaled_dot_product_attention(QUERIES, QUERIES, QUERIES),
    ),
}


@pytest.mark.parametrize("kind", OPERATORS)
def test_flops_are_those_that_torch_counts(kind: str, tmp_path: Path) -> None:
    name, work = OPERATORS[kind]
    # the counter does not know the fused kernel of a CPU
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        work()
    explained = profile_of(recorded(work, tmp_path / "real.json"))
    rows = [part for part in explained.operators if part.flops is not None]
    if kind == "convolution" and not torch.backends.mkldnn.is_available():
        pytest.skip("this machine convolves by matmuls")
    assert [part.name for part in rows] == [name]
    assert rows[0].flops == counter.get_total_flops()


def test_a_causal_mask_counts_the_pairs_that_it_leaves(tmp_path: Path) -> None:
    explained = profile_of(
        recorded(
            lambda: functional.scaled_dot_product_attention(
                QUERIES, QUERIES, QUERIES, is_causal=True
            ),
            tmp_path / "real.json",
        )
    )
    pairs = sum(row + 1 for row in range(8))
    assert sum(part.flops or 0 for part in explained.operators) == 2 * 2 * 2 * 3 * 16 * pairs


@pytest.mark.parametrize(
    "shape",
    [
        "",
        "[",
        "[[],[],[]]",
        '[[[4,-1],[1,4]],["float","float"],[]]',
        '[[[4,3],[4,3]],["float","float"],[]]',
        '[[[[4,3]],[3,4]],["TensorList","float"],[]]',
        '[[[4,"x"],[3,4]],["float","float"],[]]',
        '[[[4,3]],["float"],[]]',
    ],
)
def test_what_the_shape_does_not_say_is_not_known(shape: str) -> None:
    assert work_of("aten::mm", shape) == {}


def test_least_bytes_are_those_of_arguments_and_results() -> None:
    types = '["c10::BFloat16","c10::BFloat16"]'
    assert work_of("aten::mm", f"[[[6,5],[5,7]],{types},[]]")["bytes"] == 2 * (30 + 35 + 42)
    assert work_of("aten::add", f"[[[6,5],[5]],{types},[]]") == {"bytes": 2 * (30 + 5 + 30)}
    assert work_of("aten::copy_", '[[[6],[6]],["c10::BFloat16","float"],[]]') == {"bytes": 36}
    assert work_of("aten::embedding", f"[[[100,5],[7]],{types},[]]") == {}


def on_device(calls: list[tuple[str, list[list[int]], int]], path: Path) -> Path:
    """A trace in which each call of an operator launches one kernel of so many ns."""
    events: list[Event] = []
    for number, (name, dims, duration) in enumerate(calls, start=1):
        start = number * 10**7
        shapes = {"Input Dims": dims, "Input type": ["c10::BFloat16"] * len(dims)}
        ids = {"External id": number, "correlation": number}
        if name:
            events.append(
                complete("cpu_op", name, 7, 7, start, 1000, **{"External id": number, **shapes})
            )
        events.append(complete("cuda_runtime", "cudaLaunchKernel", 7, 7, start + 10, 20, **ids))
        events.append(
            complete(
                "kernel",
                f"kernel {number}",
                0,
                7,
                start + 2000,
                duration,
                device=0,
                stream=7,
                **ids,
            )
        )
    return write_trace(path, events)


def test_the_most_lost_time_is_first(tmp_path: Path) -> None:
    """The long kernel loses little: at 8192 cubed an H200 needs 1.11 ms (989.5 TFLOP/s)."""
    large, small = [[8192, 8192], [8192, 8192]], [[64, 64], [64, 64]]
    calls = [("aten::mm", large, 1_400_000), ("aten::mm", small, 1_000_000), ("", [], 500_000)]
    explained = profile_of(on_device(calls, tmp_path / "trace.json"))
    rows = operators_section(explained).rows
    assert [row["shape"] for row in rows] == ["64x64, 64x64", "8192x8192, 8192x8192", "not seen"]
    assert sum(ns(row["ms_per_step"] / 1e3) for row in rows) == sum(call[2] for call in calls)
    assert rows[1]["tflops_per_s"] == pytest.approx(2 * 8192**3 / 1.4e-3 / 1e12)
    for row in rows[:2]:
        limit = row["limit_tflops_per_s"]
        assert 0 < row["lost_ms_per_step"] < row["ms_per_step"]
        # by the FLOPs where these take longest
        if row["shape"].startswith("8192"):
            least_ms = 2 * 8192**3 / limit / 1e9
            assert row["lost_ms_per_step"] == pytest.approx(1.4 - least_ms)
    assert rows[2]["lost_ms_per_step"] is None
