"""Small traces of known sums, changed as files are changed by the programs that handle them.

Each is read with the same sums, or refused in one line that names what the file is.
"""

import copy
import gzip
import io
import json
import random
import zipfile
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from cs336.analysis.columns import ProfileError
from cs336.analysis.kernels.attribution import attribute
from cs336.analysis.kernels.explain import explain, summarise
from cs336.analysis.kernels.readers import read_trace
from cs336.analysis.kernels.trace import Trace
from tests.analysis.kernels.kineto_files import OTHERS, Event, complete, write_trace

NO_NUMBERS = ("NaN", "nan", "Infinity", "-Infinity", "inf", "-inf", "NAN", "-nan", "Inf")
NAMES = ("gemm", "my_kernel", "NaN_fill", 'says "inf", and NaN: 1', "-Infinity", "nan", "a, [inf]")
Sums = dict[str, tuple[int, int]]
"""Launches and nanoseconds by the name of the kernel."""


def drawn_events(generator: random.Random) -> tuple[list[Event], Sums]:
    """A loop of one to three steps, and the sums over its kernels."""
    events: list[Event] = copy.deepcopy(list(OTHERS))
    counts: Counter[str] = Counter()
    times_ns: Counter[str] = Counter()
    now, number = 1_000, 1
    for step in range(generator.randint(1, 3)):
        begin = now
        for _ in range(generator.randint(1, 8)):
            name, duration = generator.choice(NAMES), generator.randint(1_001, 9_999)
            counts[name] += 1
            times_ns[name] += duration
            numbers = {"correlation": number, "External id": number}
            now += duration + generator.randint(1, 50)
            events += [
                complete("cuda_runtime", "cudaLaunchKernel", 7, 100, now - 900, 3, **numbers),
                complete("cpu_op", "aten::x", 7, 100, now - 901, 9, **{"External id": number}),
                complete("kernel", name, 0, 7, now, duration, device=0, stream=7, **numbers),
            ]
            now += duration
            number += 1
        name = f"ProfilerStep#{step}"
        host = (7, 100, begin - 950, now - begin)
        events.append(complete("user_annotation", name, *host, **{"External id": 10**6 + step}))
    return events, {name: (counts[name], times_ns[name]) for name in counts}


def as_object(events: list[Event]) -> str:
    return json.dumps({"schemaVersion": 1, "traceEvents": events, "traceName": "inf, NaN"})


def with_no_numbers(events: list[Event], generator: random.Random) -> str:
    """The trace with words for what is no number in arguments that nobody reads."""
    for event in generator.sample(events, k=min(4, len(events))):
        args = event.setdefault("args", {})
        assert isinstance(args, dict)
        args[generator.choice(["loss", "NaN", "occupancy %"])] = f"@{generator.choice(NO_NUMBERS)}@"
    text = as_object(events)
    for word in NO_NUMBERS:
        text = text.replace(f'"@{word}@"', word)
    return text


def without_bracket(events: list[Event], generator: random.Random) -> str:
    return json.dumps(events)[:-1] + generator.choice(["", ",", ",\n", "\n"])


def with_texts(events: list[Event], generator: random.Random) -> str:
    """All times, or all numbers of arguments, as texts."""
    keys = generator.choice([("ts", "dur"), ("correlation", "stream", "device"), ("tid",)])
    for event in events:
        args = event.get("args")
        for holder in (event, args if isinstance(args, dict) else {}):
            for key in keys:
                if isinstance(holder.get(key), int | float):
                    holder[key] = str(holder[key])
    return generator.choice([as_object, json.dumps])(events)


def with_copies(events: list[Event], generator: random.Random) -> str:
    again = generator.sample(events, k=generator.randint(1, len(events)))
    events += again
    generator.shuffle(events)
    return as_object(events)


def shuffled(events: list[Event], generator: random.Random) -> str:
    generator.shuffle(events)
    return as_object(events)


def indented(events: list[Event], generator: random.Random) -> str:
    indent = generator.choice([1, 4, "\t"])
    return json.dumps(generator.choice([events, {"traceEvents": events}]), indent=indent)


def zipped(events: list[Event], generator: random.Random) -> bytes:
    content = as_object(events).encode()
    if generator.random() < 0.5:
        return gzip.compress(content, mtime=0)
    return archive({"t.json": generator.choice([content, gzip.compress(content, mtime=0)])})


def archive(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as written:
        for name, content in files.items():
            written.writestr(name, content)
    return made.getvalue()


def with_time_of_no_number(events: list[Event], generator: random.Random) -> str:
    kernels = [event for event in events if event.get("cat") == "kernel" and "dur" in event]
    generator.choice(kernels)[generator.choice(["ts", "dur"])] = "@"
    return as_object(events).replace('"@"', generator.choice(NO_NUMBERS))


def as_lines(events: list[Event], generator: random.Random) -> str:
    if generator.random() < 0.5:
        return "\n".join(map(json.dumps, events))
    return "\n".join([as_object(events)] * 2)


def cut_gzip(events: list[Event], generator: random.Random) -> bytes:
    whole = gzip.compress(as_object(events).encode(), mtime=0)
    return whole[: generator.randrange(20, len(whole))]


def cut(events: list[Event], generator: random.Random) -> str:
    text = as_object(events)
    return text[: generator.randrange(2, len(text) - 1)]


def two_in_one(events: list[Event], _: random.Random) -> bytes:
    return archive(dict.fromkeys(("a.json", "b.json"), as_object(events).encode()))


def without_events(_: list[Event], generator: random.Random) -> str:
    return generator.choice(['{"traceEvents": []}', "[]", '{"traceEvents": [], "a": 1}'])


Change = Callable[[list[Event], random.Random], str | bytes]
READ: tuple[Change, ...] = (
    lambda events, _: as_object(events),
    lambda events, _: json.dumps(events),
    with_no_numbers,
    without_bracket,
    with_texts,
    with_copies,
    shuffled,
    indented,
    zipped,
)
REFUSED: dict[Change, str] = {
    with_time_of_no_number: "need times within",
    as_lines: "JSON lines",
    cut_gzip: "not a whole compressed file",
    cut: "truncated",
    two_in_one: "got 2 files",
    without_events: "no kernels",
}


def sums_of(path: Path) -> Sums:
    """The sums over kernels in the profile of the file."""
    profile = summarise(attribute(read_trace(path)), source=path.name)
    kernels = [kernel for kernel in profile.kernels if kernel.phase is None]
    return {kernel.name: (kernel.count, round(kernel.total_s * 1e9)) for kernel in kernels}


def read_or_refused(path: Path) -> Trace | None:
    """The trace, whose kernels have their places too; None if it was refused, in one line."""
    try:
        trace = read_trace(path)
        attribute(trace)
    except ProfileError as refusal:
        lines = str(refusal).splitlines()
    else:
        return trace
    assert len(lines) == 1
    return None


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("seed", range(10))
def test_changed_files_are_read_with_the_same_sums(seed: int, tmp_path: Path) -> None:
    for number, change in enumerate(READ):
        generator = random.Random(f"{seed} {number}")
        events, expected = drawn_events(generator)
        assert sums_of(write(tmp_path / "t.json", change(events, generator))) == expected, change


@pytest.mark.parametrize("seed", range(10))
def test_what_cannot_be_read_is_named_in_one_line(seed: int, tmp_path: Path) -> None:
    for number, (change, said) in enumerate(REFUSED.items()):
        generator = random.Random(f"{seed} {number}")
        events, _ = drawn_events(generator)
        path = write(tmp_path / "t.json", change(events, generator))
        with pytest.raises(ProfileError) as refusal:
            read_trace(path)
        assert said in str(refusal.value), change
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("seed", range(10))
def test_a_list_that_was_cut_says_so(seed: int, tmp_path: Path) -> None:
    """It is read only up to a whole event, and what is lacking is a doubt."""
    generator = random.Random(seed)
    events, expected = drawn_events(generator)
    text = json.dumps(events)
    for length in generator.sample(range(2, len(text) - 1), k=20):
        path = write(tmp_path / "t.json", text[:length])
        trace = read_or_refused(path)
        if trace is None:
            continue
        assert any("no end" in note for note in trace.notes)
        for name, (count, _) in sums_of(path).items():
            assert count <= expected[name][0]


NOISE = b'0123456789"{}[],:eE-. \\xNaninf\n\xff\0'


ODD_VALUES = (None, "5", "x", "", 7, 7.5, -3, 0, 10**20, [], {}, True, "NaN", "0x10")


def _with_odd_values(events: list[Event], generator: random.Random) -> bytes:
    """The trace, where keys of some events are lacking or have another value."""
    for event in generator.sample(events, k=generator.randint(1, 3)):
        args = event.get("args")
        holder = generator.choice([event, args if isinstance(args, dict) and args else event])
        key = generator.choice(list(holder))
        if generator.random() < 0.3:
            del holder[key]
        else:
            holder[key] = generator.choice(ODD_VALUES)
    return as_object(events).encode()


def _damaged(content: bytes, generator: random.Random) -> bytes:
    made = bytearray(content)
    for _ in range(generator.choice([1, 2, 5])):
        start = generator.randrange(len(made))
        end = min(len(made), start + generator.choice([1, 1, 8, 200]))
        piece = bytes(generator.choices(NOISE, k=generator.randint(0, 3)))
        made[start:end] = generator.choice([b"", piece, made[start:end] * 2])
    return bytes(made)


@pytest.mark.parametrize("seed", range(10))
def test_a_damaged_file_is_read_or_refused(seed: int, tmp_path: Path) -> None:
    """Never another exception; where it still is JSON, the sums are those of Python's reader."""
    generator = random.Random(seed)
    for _ in range(15):
        events, _ = drawn_events(generator)
        if generator.random() < 0.3:
            content = _damaged(json.dumps({"traceEvents": events}).encode(), generator)
        else:
            content = _with_odd_values(events, generator)
        path = write(tmp_path / "t.json", content)
        trace = read_or_refused(path)
        if trace is None or trace.is_of_host:
            continue
        try:
            known = json.loads(content)["traceEvents"]
        except (ValueError, KeyError):
            continue
        names = [trace.strings[name] for name in trace.kernels.name]
        read: Sums = {}
        for name, time_ns in zip(names, trace.kernels.duration_ns.tolist(), strict=True):
            count, total_ns = read.get(name, (0, 0))
            read[name] = (count + 1, total_ns + time_ns)
        assert read == _sums_by_json(known)


def _sums_by_json(events: list[Event]) -> Sums:
    """Launches and time of the kernels by Python's JSON, each of several equal ones once."""
    counts: Counter[str] = Counter()
    times_ns: Counter[str] = Counter()
    seen = set()
    for event in events:
        text = json.dumps(event, sort_keys=True)
        if event.get("cat") != "kernel" or event.get("dur") is None or text in seen:
            continue
        seen.add(text)
        counts[str(event["name"])] += 1
        times_ns[str(event["name"])] += round(Fraction(str(event["dur"])) * 1000)
    return {name: (counts[name], times_ns[name]) for name in counts}


@pytest.mark.parametrize("seed", range(20))
def test_lost_times_and_an_update_of_one_launch(seed: int, tmp_path: Path) -> None:
    """A drawn share of the kernels, in whole microseconds, has lost its time; the optimizer is one
    launch, which lasts as long as its call.
    """
    draw = random.Random(seed)
    lost, call_us, steps = draw.choice([0.02, 0.5, 1.0]), draw.randint(2, 9), draw.randint(3, 6)
    main, autograd = 1, 2
    events, correlation, now = [], 0, 0

    def launch(thread: int, name: str, lasts_us: int) -> None:
        nonlocal correlation, now
        correlation, now = correlation + 1, now + 100
        args = {"correlation": correlation, "External id": correlation}
        call: Event = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": args}
        events.append(call | {"pid": 9, "tid": thread, "ts": now, "dur": call_us})
        on_gpu = args | {"device": 0, "stream": 7}
        kernel: Event = {"ph": "X", "cat": "kernel", "name": name, "args": on_gpu}
        events.append(kernel | {"pid": 0, "tid": 7, "ts": now + 50, "dur": lasts_us})

    for _ in range(steps):
        for _ in range(20):
            launch(main, "ampere_sgemm", 40)
        for _ in range(20):
            launch(autograd, "ampere_sgemm_dgrad", 40)
        launch(main, "multi_tensor_apply_kernel<FusedAdamMathFunctor>", 40)
    kernels = [event for event in events if event["cat"] == "kernel"]
    without = draw.sample(kernels, int(lost * len(kernels)))
    for event in without:
        event["dur"] = 0
    profile = explain(write_trace(tmp_path / "trace.json", events))
    doubt = [note for note in profile.notes if "kernels last no time" in note]
    assert bool(doubt) is (lost > 0.1)
    updates = [phase for phase in profile.phases if phase.phase.value == "optimizer"]
    assert {round(time * 1e6) for phase in updates for time in phase.host_s} == {call_us}
