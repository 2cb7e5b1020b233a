"""What is said of drawn files that lack a part of what their program did.

The oracle is the drawing: the lengths of the kernels, which way each awaited copy goes, what was
left out of the file.
"""

import random
import re
from pathlib import Path
from statistics import median

import pytest

from cs336.analysis.kernels.explain import explain
from cs336.analysis.kernels.step_profile import StepProfile, Work
from cs336.report.sections.kernels.compared import compared_traces
from cs336.report.sections.kernels.entry import Explained
from cs336.report.sections.kernels.findings import findings
from cs336.report.sections.kernels.tables import phase_rows, phases
from tests.analysis.kernels.kineto_files import Event, complete, write_trace

HOST = (7, 100)
COPIES = {
    "Memcpy DtoH (Device -> Pageable)": ".item()",
    "Memcpy DtoH (Device -> Pinned)": ".item()",
    "Memcpy HtoD (Pageable -> Device)": ".to(device)",
    "Memcpy HtoD (Host -> Device)": ".to(device)",
    "Memcpy HtoD (Pinned -> Device)": "",
    "Memcpy DtoD (Device -> Device)": "",
}
"""What a program of PyTorch does that waits for a copy of this name, where the name tells it."""
QUESTIONS = (".item()", ".to(device)", "torch.cuda.synchronize()")


class Drawn:
    """A host that launches kernels on one stream, with what happens in the order of time."""

    def __init__(self, seed: int) -> None:
        self.rng, self.now, self.number = random.Random(seed), 1_000, 0
        self.events: list[Event] = []
        self.ran: list[tuple[int, int]] = []
        """Start and end of each kernel."""

    def call(self, name: str, duration: int) -> None:
        self.number += 1
        args = {"correlation": self.number}
        self.events.append(complete("cuda_runtime", name, *HOST, self.now, duration, **args))
        self.now += duration

    def kernel(self, name: str = "my_kernel") -> None:
        """Launch a kernel, which runs when the one before it is done."""
        self.call("cudaLaunchKernel", self.rng.randint(2_000, 9_000))
        behind = self.ran[-1][1] if self.ran else 0
        start = max(self.now + 2_000, behind + self.rng.randint(500, 2_000))
        self.ran.append((start, start + self.rng.randint(1_000, 90_000)))
        place = {"device": 0, "stream": 7, "correlation": self.number}
        self.events.append(complete("kernel", name, 0, 7, start, self.ran[-1][1] - start, **place))

    def copy(self, call: str, name: str, duration: int) -> None:
        """Make a call that copies when the kernels before it are done."""
        start = max([self.now + 1_000, *(end for _, end in self.ran[-1:])])
        self.call(call, start + 3_000 - self.now if "Async" not in call else duration)
        place = {"device": 0, "stream": 7, "correlation": self.number}
        self.events.append(complete("gpu_memcpy", name, 0, 7, start, 2_000, **place))
        self.ran.append((start, start + 2_000))

    def wait(self, name: str) -> None:
        self.call(name, max(self.ran[-1][1] + 1_000 - self.now, 5_000))

    def explained(self, folder: Path) -> StepProfile:
        return explain(write_trace(folder / "t.json", self.events))


def texts(profile: StepProfile) -> list[str]:
    return [finding.text for finding in findings(Explained(profile=profile))]


def lines(profile: StepProfile) -> list[str]:
    """The notes below the table of phases."""
    (table,) = phases([Explained(profile=profile)]).tables
    return list(table.notes)


@pytest.mark.parametrize("seed", range(30))
def test_a_file_without_steps_has_none_that_is_limited_or_timed(seed: int, tmp_path: Path) -> None:
    drawn = Drawn(seed)
    for _ in range(drawn.rng.choice([1, 2, 3, 10, 40])):
        drawn.kernel(drawn.rng.choice(["a_kernel", "b_kernel", "c_kernel"]) + str(drawn.number))
        drawn.now += drawn.rng.choice([100, 20_000, 200_000])
    if drawn.rng.random() < 0.3:
        drawn.events = [event for event in drawn.events if event["cat"] == "kernel"]
    profile = drawn.explained(tmp_path)
    assert profile.is_whole_trace
    busy = sum(end - start for start, end in drawn.ran)
    length = drawn.ran[-1][1] - drawn.ran[0][0]
    said = texts(profile)
    for text in said:
        assert "The GPU is the limit" not in text
        assert not re.search(r"\bstep's?\b", text.replace("in step 0", "")), text
    if busy >= 0.8 * length:
        assert "What it does outside of them is not seen" in said[0]
    # how long the host worked is not known: the file begins with the first kernel
    assert "The CPU takes" not in said[0]
    for row in phase_rows(Explained(profile=profile)):
        assert row["host_mean_ms"] is row["host_per_launch_ms"] is None
    (timed,) = [line for line in lines(profile) if line.startswith("From the first kernel")]
    assert float(timed.split()[-2].replace(",", "")) == pytest.approx(length / 1e6, rel=1e-3)
    assert not any("by the host's clock" in line for line in lines(profile))


@pytest.mark.parametrize("seed", range(60))
def test_only_a_copy_that_is_waited_for_tells_why_the_host_waits(seed: int, tmp_path: Path) -> None:
    """`hipMemcpyWithStream` and PyTorch's copies to the device wait too, and are no `.item()`."""
    drawn = Drawn(seed)
    expected = set()
    for step in range(3):
        begin = drawn.now
        for _ in range(3):
            drawn.kernel()
        if step == 0:
            name = drawn.rng.choice(list(COPIES))
            way = drawn.rng.choice(["async", "itself", "no copy", "device"])
            ends_with = drawn.rng.choice(["cudaStreamSynchronize", "cudaEventSynchronize"])
        if way == "itself":
            drawn.copy("hipMemcpyWithStream", name, 0)
            expected.add(COPIES[name])
        elif way == "async":
            drawn.copy("cudaMemcpyAsync", name, 3_000)
            drawn.wait(ends_with)
            expected.add(COPIES[name])
        elif way == "no copy":
            drawn.wait(ends_with)
        else:
            drawn.wait("cudaDeviceSynchronize")
            expected.add("torch.cuda.synchronize()")
        for _ in range(2):
            drawn.kernel()
        drawn.now = max(drawn.now, drawn.ran[-1][1]) + 10_000
        drawn.events += [
            complete(
                "user_annotation", "ProfilerStep#" + str(step), *HOST, begin, drawn.now - begin
            ),
            complete("user_annotation", "forward", *HOST, begin + 1, drawn.now - begin - 2),
        ]
        drawn.now += 10_000
    profile = drawn.explained(tmp_path)
    (text,) = [text for text in texts(profile) if text.startswith("The host waits")]
    asked = {question for question in QUESTIONS if question in text}
    assert asked == expected - {""}
    assert ("Is there" in text) is bool(asked)


@pytest.mark.parametrize("seed", range(20))
def test_operators_that_launched_on_a_device_are_not_its_work(seed: int, tmp_path: Path) -> None:
    """Where the file has no kernels, the time of operators is that of a CPU's work only if nothing
    shows a device.
    """
    rng = random.Random(seed)
    evidence = rng.choice(["", "", "call", "nccl", "other call"])
    events, now = [], 1_000
    for step in range(3):
        begin = now
        for name in rng.choices(["aten::add", "aten::mul", "aten::mm"], k=rng.randint(5, 20)):
            duration = rng.randint(5_000, 50_000)
            events.append(complete("cpu_op", name, *HOST, now, duration))
            if evidence == "call":
                events.append(complete("cuda_runtime", "cudaLaunchKernel", *HOST, now + 1, 99))
            now += duration + 100
        if evidence == "nccl":
            events.append(complete("user_annotation", "nccl:all_reduce", *HOST, now, 500))
        if evidence == "other call":
            events.append(complete("cuda_runtime", "cudaGetDevice", *HOST, now + 1, 99))
        now += 1_000
        step_name = f"ProfilerStep#{step}"
        events.append(complete("user_annotation", step_name, *HOST, begin, now - begin))
        events.append(complete("user_annotation", "forward", *HOST, begin + 1, now - begin - 2))
        now += 1_000
    profile = explain(write_trace(tmp_path / "t.json", events))
    assert profile.work is Work.OPERATORS
    lacks_device = evidence in ("call", "nccl")
    assert profile.lacks_device is lacks_device
    assert any("whose work is not in the file" in note for note in profile.notes) is lacks_device
    if lacks_device:
        assert not any("torch.compile" in text or "at most" in text for text in texts(profile))


@pytest.mark.parametrize("seed", range(10))
def test_launches_without_a_kernel_put_all_in_doubt(seed: int, tmp_path: Path) -> None:
    """Also where no kernel is there at all: then no gain and no idle time is told."""
    drawn = Drawn(seed)
    for _ in range(3):
        begin = drawn.now
        for _ in range(drawn.rng.randint(2, 6)):
            drawn.kernel()
        drawn.copy("hipMemcpyWithStream", "Memcpy DtoH (Device -> Host)", 0)
        drawn.kernel()
        drawn.wait("cudaDeviceSynchronize")
        for name in (f"ProfilerStep#{begin}", "forward"):
            drawn.events.append(complete("user_annotation", name, *HOST, begin, drawn.now - begin))
        drawn.now += 10_000
    share = drawn.rng.choice([0.0, 0.3])
    events = drawn.events
    drawn.events = []
    for event in events:
        if event["cat"] != "kernel" or drawn.rng.random() < share:
            drawn.events.append(event)
    profile = drawn.explained(tmp_path)
    assert any("events were lost" in doubt for doubt in profile.doubts)
    said = texts(profile)
    assert said[0].startswith("In doubt")
    # idle time may hold the kernels that the file lacks
    assert not any("stands out" in text or "at most" in text for text in said)


PLAIN = ("encoder_forward_kernel3", "ampere_bf16_gemm_tn", "gelu_forward_kernel2", "copy_kernel")
BACKWARD = ("gelu_backward_inplace_kernel", "layernorm_backward_kernel10", "wte_bwd_kernel")
UPDATE = ("adamw_kernel3", "sgd_momentum_kernel", "lamb_kernel")


@pytest.mark.parametrize("seed", range(12))
def test_names_of_kernels_are_told_where_they_are_all_that_shows_training(
    seed: int, tmp_path: Path
) -> None:
    """As of llm.c, which launches forward, backward and updates on one thread, without ranges."""
    drawn = Drawn(seed)
    counts = []
    for names, least in ((PLAIN, 3), (BACKWARD, 0), (UPDATE, 0)):
        counts.append(drawn.rng.randint(least, 12))
        for _ in range(counts[-1]):
            drawn.kernel(drawn.rng.choice(names))
    profile = drawn.explained(tmp_path)
    (note,) = [note for note in profile.notes if note.startswith("The phases are not seen")]
    _, backward, updates = counts
    told = [f"{backward} of backward"] * bool(backward) + [f"{updates} of an optimizer"] * bool(
        updates
    )
    said = re.search(r"though of (\d+) kernels (.*) are so by their names", note)
    assert (said is not None) is bool(told)
    if said:
        assert int(said[1]) == sum(counts)
        assert said[2].split(" and ") == told


@pytest.mark.parametrize("seed", range(8))
def test_unlike_devices_and_unlike_steps_are_said_to_be_so(seed: int, tmp_path: Path) -> None:
    """Each file has ranges of PyTorch's around its steps, or a loop that repeats shows them."""
    rng = random.Random(seed)
    profiles = []
    for side in range(2):
        drawn = Drawn(seed)
        has_ranges, device = rng.random() < 0.5, rng.choice(["NVIDIA H200", "AMD Instinct MI300X"])
        for step in range(6):
            begin = drawn.now
            for kernel in ("a_kernel", "b_kernel", "c_kernel", "d_kernel", "e_kernel"):
                drawn.kernel(kernel)
            drawn.now = drawn.ran[-1][1] + 10_000
            if has_ranges:
                name = f"ProfilerStep#{step}"
                length = drawn.now - begin
                drawn.events.append(complete("user_annotation", name, *HOST, begin, length))
        path = tmp_path / f"{side}.json"
        profiles.append(
            explain(write_trace(path, drawn.events, deviceProperties=[{"name": device}]))
        )
    a, b = profiles
    codes = {finding.code for finding in compared_traces(a, b, 5).findings}
    assert ("devices" in codes) is (a.device_names != b.device_names)
    assert ("unlike steps" in codes) is (a.steps_from != b.steps_from)


@pytest.mark.parametrize("seed", range(20))
def test_a_mean_that_is_like_no_step_is_said_to_be_so(seed: int, tmp_path: Path) -> None:
    drawn = Drawn(seed)
    lengths, odd = [], drawn.rng.randrange(5)
    for step in range(drawn.rng.randint(2, 5)):
        begin = drawn.now
        for _ in range(4):
            drawn.kernel()
        drawn.wait("cudaDeviceSynchronize")
        if step == odd:
            drawn.now += drawn.rng.choice([0, 1_000_000, 40_000_000])
        name = f"ProfilerStep#{step}"
        lengths.append(drawn.now - begin)
        drawn.events.append(complete("user_annotation", name, *HOST, begin, lengths[-1]))
        drawn.now += 10_000
    said = [text for text in texts(drawn.explained(tmp_path)) if text.startswith("No step is")]
    *others, longest = sorted(lengths)
    is_uneven = longest >= 10 * median(others)
    assert len(said) == is_uneven
    if said:
        assert f"step {lengths.index(longest)} takes" in said[0]


@pytest.mark.parametrize("seed", range(20))
def test_many_late_launches_are_told_from_a_few_long_ones(seed: int, tmp_path: Path) -> None:
    """A first launch that loads code takes long once: fewer kernels would not save it."""
    drawn = Drawn(seed)
    is_once = drawn.rng.random() < 0.5
    count = drawn.rng.randint(8, 30)
    late = drawn.rng.randrange(1, count)
    for kernel in range(count):
        # the host prepares each launch for longer than a kernel lasts
        drawn.now += drawn.rng.randint(10_000, 20_000)
        is_late = is_once and kernel == late
        drawn.call("cudaLaunchKernel", drawn.rng.randint(3, 9) * (1_000_000 if is_late else 1_000))
        start = drawn.now + 2_000
        drawn.ran.append((start, start + 2_000))
        place = {"device": 0, "stream": 7, "correlation": drawn.number}
        drawn.events.append(complete("kernel", "my_kernel", 0, 7, start, 2_000, **place))
    said = texts(drawn.explained(tmp_path))[0]
    assert said.startswith("The CPU is the limit")
    assert ("A few long idle times" in said) is is_once
    assert ("A faster GPU does not help" in said) is not is_once
