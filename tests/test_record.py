"""Records survive the way to disk and back; whatever else lies there is a clear error and
nothing more.
"""

import errno
import json
import os
import threading
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cs336.config import (
    SIZES,
    Arch,
    Attention,
    CompileMode,
    Device,
    Mode,
    ModelConfig,
    OptimizerKind,
    Phase,
    Precision,
    Profiler,
    RunConfig,
    SdpaBackend,
)
from cs336.files import MAX_BYTES, write_atomically
from cs336.loop_record import (
    Cause,
    Fit,
    Holder,
    LoopFlops,
    LoopRank,
    LoopRecord,
    MemoryGrowth,
    OutOfMemory,
    Pause,
    SlowStep,
)
from cs336.record import (
    FORMAT_VERSION,
    RUNS,
    Activity,
    Compilation,
    Durations,
    Environment,
    Failure,
    GpuState,
    Identity,
    Input,
    Measurement,
    Memory,
    MemoryMoment,
    MomentName,
    RankRecord,
    RecordError,
    RunRecord,
    RunWarning,
    Status,
    Telemetry,
    Traffic,
    Wait,
    WarningCode,
    encode_record,
    load_records,
    read_record,
    write_record,
)
from tests.neighbours import each_configuration
from tests.publish import publish

CONFIG = RunConfig(
    size="custom",
    model=ModelConfig(
        arch=Arch.GPT2,
        vocab_size=11,
        context_length=8,
        d_model=16,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        rope_theta=9.5,
        attention=Attention.SDPA,
        sdpa_backend=SdpaBackend.MATH,
    ),
    batch_size=2,
    mode=Mode.FORWARD,
    precision=Precision.FP16,
    optimizer=OptimizerKind.FUSED,
    compile=CompileMode.REDUCE_OVERHEAD,
    compile_blocks=True,
    device=Device.CUDA,
    warmup_steps=2,
    measured_steps=3,
    seed=2**63 - 1,
    sync_phases=True,
    ranges=False,
    tokens="täglich 日\t\"'\\.npy",
    repeat=4,
    profiler=Profiler.KINETO,
    checkpoint_blocks=2,
    pad_vocabulary=64,
    learning_rate=1 / 3,
)
STATE = GpuState(
    sm_clock_hz=1_980_000_000,
    max_sm_clock_hz=2_000_000_000,
    memory_clock_hz=3_000_000_000,
    power_w=700.25,
    temperature_c=-1,
    throttle_reasons=("power cap", "hardware thermal"),
    other_processes=2,
)
FULL = RunRecord(
    config=CONFIG,
    status=Status.OK,
    started_at="2026-01-02T03:04:05+00:00",
    format_version=FORMAT_VERSION,
    failure=Failure(
        message="no\nway\0",
        where="step 3",
        requested_bytes=2**40,
        free_bytes=0,
        signal="SIGKILL",
        traceback="a\nb",
        log_tail="<script>",
    ),
    measurements=(
        Measurement(Phase.FORWARD, (0.1, 1 / 3, 5e-324)),
        Measurement(Phase.STEP, (0.2, 0.5, 1e-9)),
    ),
    warmup_times_s=(1.5, 1e9),
    host_times_s=(0.1, 0.2, 0.3),
    between_s=(0.01, 0.02),
    seen=LoopRecord(
        tokens=(2**40, 0),
        context_lengths=(1, 8),
        padding_tokens=3,
        masked_tokens=5,
        between_data_s=(0.0, 1e-9),
        flops=LoopFlops(per_step=2.0**60, recomputed_per_step=0.5, modules_with_hooks=2),
        not_traced="a reason",
        slow_steps=(
            SlowStep(
                number=1,
                excess_s=1e-3,
                where="forward",
                backward_s=2e-4,
                pauses=(Pause(cause=Cause.DATA, seconds=1e-4, count=2, details=("a", "b")),),
            ),
        ),
        growth=MemoryGrowth(bytes_per_step=0.5, since_step=2, to_step=9, holders=("a list",)),
        syncs_per_update=4,
        out_of_memory=OutOfMemory(
            step=-1,
            doing="forward",
            requested_bytes=2**40,
            line="a.py:1",
            called_at="b.py:2",
            module="layers.0",
            allocated_bytes=1,
            reserved_bytes=2,
            total_bytes=3,
            room_bytes=4,
            others_bytes=5,
            holders=(Holder(category="activations", module="layers.*", held_bytes=1, count=2),),
            batch_size=6,
            fits=(Fit(batch_size=2, is_checkpointed=True, peak_bytes=2**40, reserved_bytes=3),),
            traced_batches=(1, 2),
            assumptions=("one",),
            not_foretold="a reason",
        ),
        rank=LoopRank(
            rank=1,
            world_size=2,
            run="x",
            own_s=0.25,
            first_step=3,
            late_steps=(SlowStep(number=0, excess_s=2.0, where="data"),),
        ),
        other_ranks=(LoopRank(rank=2, world_size=4, run="y", own_s=0.5),),
    ),
    host_phases=(Measurement(Phase.FORWARD, (0.05, 0.25, 0.0)),),
    losses=(9.25, None, -0.0),
    skipped_steps=1,
    collector_on=False,
    num_parameters=2**53 + 1,
    memory=Memory(
        peak_allocated_bytes=2**53 + 1,
        peak_reserved_bytes=1,
        first_step_peak_allocated_bytes=2,
        segments_allocated=3,
        alloc_retries=4,
    ),
    failed_rank=3,
    moments=(
        MemoryMoment(
            moment=MomentName.BEFORE_OPTIMIZER,
            allocated_bytes=2**40,
            parameters_bytes=1,
            gradients_bytes=2,
            optimizer_state_bytes=3,
        ),
    ),
    ranks=(
        RankRecord(
            rank=1,
            measurements=(Measurement(Phase.STEP, (0.2, 0.5)),),
            warmup_times_s=(2.5,),
            host_times_s=(0.1, 0.2),
            losses=(None, 1.5),
            device_uuid="GPU-2",
            warnings=(RunWarning(code=WarningCode.DRIFT, message="up"),),
        ),
    ),
    traffic=(Traffic(collective="allreduce", count=2, payload_bytes=2**40, sent_bytes=2**40 + 1),),
    compilation=Compilation(seconds=0.1, graphs=2, graph_breaks=3, recompiles=4),
    telemetry=Telemetry(before=STATE, after=replace(STATE, power_w=0.1), energy_per_step_j=0.3),
    activity=Activity(
        span_s=1.5,
        sm_share=0.9,
        tensor_share=0.6,
        dram_share=0.25,
        nvlink_bytes_per_s=1e9,
        pcie_bytes_per_s=1e8,
        pcie_peak_bytes_per_s=63e9,
    ),
    environment=Environment(
        identity=Identity(
            device_name="NVIDIA H100", driver="580.1", torch="2.13.0", code="0123456789abcdef"
        ),
        device_uuid="GPU-1",
        device_memory_bytes=2**36,
        cuda="13.0",
        cudnn="91002",
        quack="0.6.5",
        flash_attention_4="4.0.0b36",
        python="3.11.7",
        platform="Linux",
        host="node-1",
        cpu="AMD",
        cpu_count=2,
        load_1min=0.5,
        torch_threads=1,
        float32_matmul_precision="highest",
        allow_tf32_matmul=False,
        allow_tf32_cudnn=True,
        git_commit="f" * 40,
        git_dirty=True,
        package_version="1.0",
    ),
    inputs=(
        Input(name="source of a.b:c", state="0123456789abcdef"),
        Input(name="token file t.npy", state=None),
    ),
    durations=Durations(
        setup_s=1.0,
        warmup_s=2.0,
        measured_s=3.0,
        total_s=6.5,
        waits=(Wait(what="importing PyTorch", seconds=0.5),),
    ),
    warnings=tuple(RunWarning(code=code, message=f"about {code}") for code in WarningCode),
)


def minimal() -> RunRecord:
    return RunRecord(
        config=RunConfig(size="tiny", model=SIZES["tiny"]),
        status=Status.OOM,
        started_at="2026-01-02T03:04:05+00:00",
    )


def at_default(value: object, path: str = "record") -> list[str]:
    """Fields of `value`, and of the dataclasses in it, that hold their default."""
    found: list[str] = []
    for field in fields(value):
        item, name = getattr(value, field.name), f"{path}.{field.name}"
        if field.default is not MISSING and item == field.default:
            found.append(name)
        if is_dataclass(item):
            found += at_default(item, name)
    return found


def test_a_record_with_every_field_survives_the_way_to_disk_and_back(tmp_path: Path) -> None:
    assert [name for name in at_default(FULL) if not name.startswith("record.config.")] == [
        "record.loop",
        "record.format_version",
    ]
    for config in {FULL.config, *each_configuration()}:
        record = replace(FULL, config=config)
        path = write_record(record, tmp_path)
        assert path == tmp_path / f"{config.key}.json"
        assert read_record(path) == record
        path.unlink()
    assert not list(tmp_path.iterdir()), "nothing temporary is left"


def test_a_record_of_a_failure_has_no_times_and_needs_little(tmp_path: Path) -> None:
    record = read_record(write_record(minimal(), tmp_path))
    assert record == minimal()
    assert record.measurement(Phase.STEP) is None
    assert FULL.measurement(Phase.STEP) is FULL.measurements[1]
    assert FULL.measurement(Phase.BACKWARD) is None


def test_fields_that_are_missing_or_unknown_are_no_obstacle(tmp_path: Path) -> None:
    """A record of an earlier or of a later version of the same format."""
    data = json.loads(encode_record(minimal()))
    del data["skipped_steps"], data["warnings"], data["config"]["repeat"]
    data["added_later"] = data["config"]["added_later"] = [{"deep": [1, 2]}]
    (tmp_path / "x.json").write_text(json.dumps(data))
    assert read_record(tmp_path / "x.json") == minimal()


@pytest.mark.parametrize("rest", [{}, {"config": "elsewhere", "status": 3}])
def test_a_newer_format_is_told_from_a_broken_one(tmp_path: Path, rest: dict[str, object]) -> None:
    path = tmp_path / "x.json"
    path.write_text(
        json.dumps(json.loads(encode_record(FULL)) | {"format_version": FORMAT_VERSION + 1} | rest)
    )
    with pytest.raises(
        RecordError, match=rf"^{path}: format version 2 is newer than this program's 1; update it$"
    ):
        read_record(path)


def changed(*path: str | int, to: object) -> bytes:
    """The full record with one value changed."""
    data = json.loads(encode_record(FULL))
    inner = data
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = to
    return json.dumps(data).encode()


def removed(name: str) -> bytes:
    data = json.loads(encode_record(FULL))
    del data[name]
    return json.dumps(data).encode()


TEXT = encode_record(FULL)
BROKEN = {
    "empty": b"",
    "nul bytes": b"\0" * 4096,
    "nul byte inside a string": TEXT.replace(b"NVIDIA", b"NVI\0DIA"),
    "list": b"[]",
    "not utf-8": TEXT.replace(b"NVIDIA", b"\xff\xfe"),
    "lone surrogate": TEXT.replace(b"NVIDIA", b"\\ud800"),
    "a comma too many": TEXT.rstrip()[:-1] + b",}",
    "nan": changed("durations", "setup_s", to=float("nan")),
    "overflow": TEXT.replace(b"5e-324", b"1e999"),
    "a warm-up beyond all sums": changed("warmup_times_s", to=[1e300]),
    "a count beyond all machines": changed("num_parameters", to=10**400),
    "a negative size": changed("memory", "peak_allocated_bytes", to=-1),
    "without config": removed("config"),
    "without version": removed("format_version"),
    "size a number": changed("config", "size", to=7),
    "d_model a string": changed("config", "model", "d_model", to="8"),
    "d_model 0": changed("config", "model", "d_model", to=0),
    "seed too large": changed("config", "seed", to=2**63),
    "factory is code": changed("config", "model_factory", to="os:system('true')"),
    "phase unknown": changed("measurements", 0, "phase", to="sideways"),
    "a negative time": changed("measurements", 0, "times_s", to=[0.1, -0.1]),
    "a time beyond all sums": changed("measurements", 0, "times_s", to=[1e308, 1e308]),
    "loss a string": changed("losses", to=["0.5"]),
    "environment without identity": changed("environment", to={}),
    "deep lists": b"[" * 1_000_000,
    "deep in an unknown field": b'{"format_version":1,"x":'
    + b"[" * 100_000
    + b"]" * 100_000
    + b"}",
    "deep in a known field": changed("losses", to="DEEP").replace(
        b'"DEEP"', b"[" * 100_000 + b"]" * 100_000
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_record_is_a_clear_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(BROKEN[name])
    with pytest.raises(RecordError) as caught:
        read_record(path)
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < len(str(path)) + 300
    assert "\n" not in str(caught.value)


def test_a_record_cut_anywhere_is_an_error(tmp_path: Path) -> None:
    path, text = tmp_path / "x.json", encode_record(minimal()).rstrip()
    for end in (*range(0, len(text) - 30, 13), *range(len(text) - 30, len(text))):
        path.write_bytes(text[:end])
        with pytest.raises(RecordError):
            read_record(path)


def test_a_file_larger_than_any_record_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(
        RecordError, match=f"1099511627776 bytes are more than a record .* ever has .{MAX_BYTES}."
    ):
        read_record(path)


def test_what_is_no_file_is_an_error_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "directory.json").mkdir()
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nothing")
    for name in ("fifo.json", "directory.json", "dangling.json", "missing.json", "nul\0.json"):
        with pytest.raises(RecordError, match=r"a directory|no regular file|No such file"):
            read_record(tmp_path / name)


def test_a_directory_gives_its_records_and_its_problems(tmp_path: Path) -> None:
    first, second = minimal(), replace(minimal(), config=replace(minimal().config, repeat=1))
    write_record(second, tmp_path)
    write_record(first, tmp_path)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "old.json.invalid").write_text("{")
    (tmp_path / f".{first.key}.json.1.tmp").write_text("{")
    (tmp_path / "results.csv").write_text("size\n")
    records, problems = load_records(tmp_path)
    assert records == [first, second]
    assert [problem.path.name for problem in problems] == ["broken.json"]
    assert load_records(tmp_path / "nothing here") == ([], [])


def test_published_records_are_lines_which_files_of_later_runs_replace(tmp_path: Path) -> None:
    runs = tmp_path / RUNS
    runs.mkdir()
    first, second = minimal(), replace(minimal(), config=replace(minimal().config, repeat=1))
    texts = [write_record(record, runs).read_bytes() for record in (second, first)]
    publish(tmp_path)
    assert not runs.exists()
    lines = (tmp_path / "runs.jsonl").read_bytes().splitlines()
    # the indented JSON of a file is nothing else than its line
    assert [msgspec.json.format(line) + b"\n" for line in lines] == texts[::-1]
    assert load_records(runs) == ([first, second], [])
    runs.mkdir()
    later = replace(second, started_at="2030-01-01T00:00:00+00:00")
    write_record(later, runs)
    assert load_records(runs) == ([first, later], [])
    with (tmp_path / "runs.jsonl").open("ab") as file:
        file.write(b"{\n")
    records, (problem,) = load_records(runs)
    assert records == [first, later]
    assert str(problem).startswith(f"{tmp_path / 'runs.jsonl'}:3: ")


def test_out_of_memory_is_a_result_and_a_crash_is_not() -> None:
    assert {status for status in Status if status.is_result} == {
        Status.OK,
        Status.UNAVAILABLE,
        Status.OOM,
    }


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_ends_at_any_step_leaves_the_old_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    path = tmp_path / "x.json"
    write_atomically(path, b"old")
    owner = os if step == "fsync" else Path
    with monkeypatch.context() as patch:
        patch.setattr(owner, step, fail)
        with pytest.raises(type(error)):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_a_reader_sees_the_old_bytes_or_the_new_ones(tmp_path: Path) -> None:
    path, contents = tmp_path / "x.json", [bytes([letter]) * 200_000 for letter in b"ab"]
    write_atomically(path, contents[0])
    done = threading.Event()

    def write() -> None:
        for turn in range(60):
            write_atomically(path, contents[turn % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(path.read_bytes())
    writer.join()
    assert seen <= set(contents)


def test_what_is_written_reaches_the_disk_before_its_name_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, Path.replace

    def watched_fsync(descriptor: int) -> None:
        calls.append("sync " + Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def watched_rename(self: Path, target: Path) -> Path:
        calls.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "replace", watched_rename)
    write_atomically(tmp_path / "x.json", b"new")
    assert calls == [f"sync .x.json.{os.getpid()}.tmp", "rename", f"sync {tmp_path.name}"]


@pytest.mark.parametrize("n", [2, 3, 10, 101])
def test_statistics_are_numpy_s(n: int) -> None:
    times = np.random.default_rng(n).lognormal(-5, 0.3, n)
    measurement = Measurement(Phase.STEP, tuple(times.tolist()))
    assert measurement.mean_s == pytest.approx(times.mean(), rel=1e-12)
    assert measurement.stdev_s == pytest.approx(times.std(ddof=1), rel=1e-12)
    assert measurement.median_s == pytest.approx(np.median(times), rel=1e-12)
    assert measurement.min_s == times.min()
    assert measurement.cv == pytest.approx(times.std(ddof=1) / times.mean(), rel=1e-12)


def test_a_single_time_has_no_spread() -> None:
    single = Measurement(Phase.STEP, (0.25,))
    assert (single.mean_s, single.median_s, single.min_s) == (0.25, 0.25, 0.25)
    assert single.stdev_s is None
    assert single.cv is None


def test_a_phase_below_the_clock_s_resolution_has_no_relative_spread() -> None:
    assert Measurement(Phase.DATA, (0.0, 0.0)).stdev_s == 0
    assert Measurement(Phase.DATA, (0.0, 0.0)).cv is None
