"""`cs336 plan`: its sentences and rows against each other and against hand-made ceilings; what is
not known is refused.
"""

import csv
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cs336.cli import main
from cs336.commands import account
from cs336.commands.plan import PlanArguments
from cs336.config import SIZES
from cs336.costs.accounting import count_parameters
from cs336.costs.fit import CUDA_CONTEXT_BYTES, NCCL_BYTES
from cs336.costs.traces import traced_elsewhere
from cs336.files import encode_json
from cs336.report.sections.plan import TOP
from cs336.studies.ceilings_files import REFERENCE
from cs336.studies.ceilings_rows import LaunchCell, LaunchKind, Stream
from tests.report.ceilings import (
    CollectiveCell,
    lasting,
    make_ceilings,
    product_at,
    square,
    stream_at,
)

MIB, GIB = 2**20, 2**30
RUN = ["--size", "8B", "--gpus", "64xH100", "--tokens", "1T"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This machine has none, and no ceilings."""
    monkeypatch.setattr(account, "first_gpu", lambda: None)
    monkeypatch.chdir(tmp_path)


def plan(*words: str | Path) -> int:
    return main(["plan", *map(str, words)])


def written(directory: Path, name: str = "plan") -> list[dict[str, str]]:
    with (directory / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def ceilings_at(directory: Path, spread: float = 0.0) -> Path:
    """Ceilings of a device that reaches 800 TFLOP/s in bf16, and 200 GB/s on the bus among two.

    The slowest loop of a product takes `spread` longer than the fastest.
    """
    products = [product_at(square(side), 800, spread=spread) for side in (512, 1024, 2048, 16384)]
    streams = [stream_at(4000, 2**30, stream) for stream in (Stream.COPY, Stream.ADAMW)]
    launches = [
        LaunchCell(launch=launch, timing=lasting(1e-6))
        for launch in (LaunchKind.EAGER, LaunchKind.GRAPH)
    ]
    reductions = [
        CollectiveCell(num_bytes=64 * MIB, world_size=2, timing=lasting(64 * MIB / 200e9))
    ]
    directory.mkdir()
    study = make_ceilings(products, streams, launches, reductions)
    (directory / "ceilings.json").write_bytes(encode_json(study))
    return directory


def test_the_first_sentences_follow_from_the_fastest_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*RUN, "--price", "2.5", "--output", tmp_path) == 0
    fits, how_long, how_much, stands, *_ = capsys.readouterr().out.splitlines()
    fastest = written(tmp_path)[0]
    step_s = float(fastest["step_ms"]) / 1e3
    tokens = 2**22
    days = 1e12 / tokens * step_s / 86_400
    used, whole = re.findall(r"([\d.]+) of (\d+) GiB", fits)[0]
    assert float(used) == pytest.approx(float(fastest["peak_gib"]), rel=1e-2)
    assert whole == "80"
    assert float(re.findall(r"([\d.]+) days", how_long)[0]) == pytest.approx(days, rel=1e-2)
    hours, price = re.findall(r"([\d,]+) GPU-hours; ([\d,]+)", how_much)[0]
    assert float(hours.replace(",", "")) == pytest.approx(64 * 24 * days, rel=1e-2)
    assert float(price.replace(",", "")) == pytest.approx(2.5 * 64 * 24 * days, rel=1e-2)
    assert "InfiniBand" in stands
    for row in written(tmp_path):
        parts = ("compute", "exposed", "bubble", "optimizer")
        assert float(row["step_ms"]) == pytest.approx(
            sum(float(row[f"{part}_ms"]) for part in parts)
        )
        ranks = [int(row[axis]) for axis in ("data", "shard", "tensor", "pipeline", "context")]
        product = 1
        for number in ranks:
            product *= number
        assert product == 64
        share = int(row["micro_batch"]) * int(row["accumulate"])
        assert ranks[0] * ranks[1] * share * 4096 == tokens


@pytest.mark.parametrize("seed", range(5))
def test_a_row_of_fast_is_what_account_says_of_its_command(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(seed)
    gpus, name = (1, 2, 8, 4, 3)[seed], chance.choice(("H100", "H200"))
    words = ["--size", chance.choice(("tiny", "small", "gpt2")), "--num-layers", "2"]
    words += ["--context-length", chance.choice(("64", "256", "1024"))]
    words += ["--global-batch", str(gpus * chance.choice((1, 2, 6)))]
    words += ["--fp8", "tensor"] if seed % 2 else []
    fast = [*words, "--gpus", f"{gpus}x{name}", "--fast", "--output", tmp_path]
    with traced_elsewhere():  # as here shapes are checked by a decorator
        assert plan(*fast) == 0
    rows = written(tmp_path)
    assert rows
    for row in rows:
        capsys.readouterr()
        command = row["run_by"].removeprefix("cs336 benchmark ").split()
        assert "--fast" in command
        assert main(["account", *command, "--device-name", name, "--json"]) == 0
        forecast = json.loads(capsys.readouterr().out)
        assert float(row["step_ms"]) == pytest.approx(1e3 * forecast["time"]["step_s"])
        outside_bytes = CUDA_CONTEXT_BYTES + (NCCL_BYTES if gpus > 1 else 0)
        peak_bytes = forecast["memory"]["peak"]["allocated_bytes"] + outside_bytes
        assert float(row["peak_gib"]) == pytest.approx(peak_bytes / GIB)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "1T", "--days", "10"], "--days is not searched with --fast"),
        (["--fp8", "blocks"], "--fp8 tensor, got blocks"),
        (["--model", "mine:make"], "--fast is for this project's models"),
    ],
)
def test_fast_refuses(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*words, "--gpus", "8xH100", "--fast") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("columns", [72, 80, 100, 160])
def test_each_layout_has_one_line_of_the_table(
    columns: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert plan(*RUN, "--output", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("─"))
    assert max(map(len, lines[: begin + TOP])) <= columns
    for number, row in enumerate(written(tmp_path)[:TOP], start=begin + 1):
        assert re.match(rf"{re.escape(row['layout'])} +{row['micro_batch']} ", lines[number])


def test_no_row_of_the_front_is_slower_and_larger_than_another(tmp_path: Path) -> None:
    assert plan(*RUN, "--output", tmp_path) == 0
    rows = [(float(row["step_ms"]), float(row["peak_gib"])) for row in written(tmp_path)]
    assert rows == sorted(rows)
    assert [peak for _, peak in rows] == sorted((peak for _, peak in rows), reverse=True)
    assert (tmp_path / "plots" / "layouts.png").stat().st_size > 0


@pytest.mark.parametrize(("spread", "is_in_doubt"), [(0.001, False), (0.5, True)])
def test_times_from_ceilings_in_doubt_are_marked(
    spread: float, is_in_doubt: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = ceilings_at(tmp_path / "h200", spread)
    assert plan("--size", "small", "--gpus", "2", "--ceilings", directory) == 0
    said = capsys.readouterr().out
    assert ("? marks a forecast" in " ".join(said.split())) is is_in_doubt
    assert "measured on" in said
    assert "collectives among 2 measured" in said


def test_a_data_sheet_is_marked_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--gpus", "8xB200", "--size", "small") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "data sheet" in said
    assert REFERENCE in said


def test_what_does_not_fit_is_said_before_any_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters, gradients and moments of 8 billion take more than one GPU has."""
    assert plan("--size", "8B", "--gpus", "1xH100") == 0
    first, *others = capsys.readouterr().out.splitlines()
    needed = float(re.findall(r"takes ([\d,.]+) of 80 GiB", first)[0].replace(",", ""))
    assert needed > 16 * count_parameters(SIZES["8B"]) / GIB
    assert not any("How long" in line for line in others)


def test_the_budget_and_the_batch_are_kept(tmp_path: Path) -> None:
    words = [*RUN, "--output", tmp_path]
    assert plan(*words, "--budget-gib", "40", "--global-batch", "2M") == 0
    for row in written(tmp_path):
        assert float(row["peak_gib"]) <= 40
        ranks = int(row["data"]) * int(row["shard"])
        sequences = ranks * int(row["micro_batch"]) * int(row["accumulate"])
        assert sequences * 4096 == pytest.approx(2e6, rel=64 * 4096 / 2e6 / 2)
    assert plan(*words, "--global-batch", "128") == 0
    row = written(tmp_path)[0]
    ranks = int(row["data"]) * int(row["shard"])
    assert ranks * int(row["micro_batch"]) * int(row["accumulate"]) == 128


def factors_of_two(number: int) -> int:
    return (number & -number).bit_length()


@pytest.mark.parametrize("gpus", [1, 7, 8, 12, 100, 1000])
@pytest.mark.parametrize("context_length", [1000, 4096])
@pytest.mark.parametrize("tokens", [None, "4M", "1.3M"])
def test_a_batch_in_tokens_is_one_that_gpus_can_divide(
    gpus: int, context_length: int, tokens: str | None
) -> None:
    """By trying all multiples: within 5 % none has more factors of 2."""
    wanted = 2**22 if tokens is None else 1e6 * float(tokens[:-1])
    wanted /= context_length
    asked = PlanArguments(gpus=f"{gpus}xH100", tokens=1e12, global_batch=tokens)
    given = asked.batch(context_length).sequences(gpus)
    multiple = gpus if wanted >= gpus else 1
    near = [
        shares
        for shares in range(1, 2 * round(wanted / multiple) + 2)
        if abs(shares * multiple - wanted) <= 0.05 * wanted
    ]
    shares = given // multiple
    assert given % multiple == 0
    if near:
        assert shares in near
        assert factors_of_two(shares) == max(map(factors_of_two, near))
    else:
        assert abs(given - wanted) <= multiple / 2
    in_sequences = replace(asked, global_batch=str(122 * gpus))
    assert in_sequences.batch(context_length).sequences(gpus) == 122 * gpus


@pytest.mark.parametrize(("tokens", "steps"), [(1, 1), (2**22, 1), (2**22 + 1, 2), (3 * 2**22, 3)])
def test_the_last_step_is_whole(
    tokens: int, steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--size", "small", "--gpus", "8xH100", "--price", "1000", "--tokens", str(tokens)]
    assert plan(*words, "--output", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.search(rf"; {steps} steps?;", lines[1])
    step_s = float(written(tmp_path)[0]["step_ms"]) / 1e3
    hours, price = re.findall(r"([\d.]+) GPU-hours; ([\d.]+)", lines[2])[0]
    assert float(hours) == pytest.approx(steps * step_s * 8 / 3600, rel=5e-3)
    assert float(price) == pytest.approx(1000 * steps * step_s * 8 / 3600, rel=5e-3)


def test_help_shows_every_flag_of_the_first_questions(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the examples in the same help, and those that refusals tell to give."""
    with pytest.raises(SystemExit):
        plan("--help")
    said = capsys.readouterr().out
    examples = " ".join(re.findall(r"^  cs336 plan (.+)", said, re.MULTILINE))
    for flag in (*re.findall(r"--[a-z-]+", examples), "--days", "--budget-gib", "--global-batch"):
        assert re.search(rf"^\W*{flag} ", said, re.MULTILINE), flag


@pytest.mark.parametrize(
    ("words", "days", "smaller"),
    [
        (["--size", "small", "--tokens", "10B"], 0.08, lambda gpus: range(1, gpus)),
        (["--size", "8B", "--tokens", "1T"], 12, lambda gpus: [8, gpus - 16, gpus - 8]),
    ],
)
def test_fewer_gpus_than_the_answer_take_longer_than_the_days(
    words: list[str],
    days: float,
    smaller: Callable[[int], Sequence[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By plans of these numbers; the answers are no powers of 2."""
    assert plan(*words, "--gpus", "8xH100", "--days", str(days)) == 0
    gpus = int(re.findall(r"^([\d,]+) such GPUs", capsys.readouterr().out, re.MULTILINE)[0])
    assert gpus & (gpus - 1)
    seconds = {"days": 86_400, "hours": 3600, "minutes": 60}
    times = []
    for count in (*smaller(gpus), gpus):
        assert plan(*words, "--gpus", f"{count}xH100") == 0
        number, unit = re.findall(r"How long: ([\d.,]+) (\w+)", capsys.readouterr().out)[0]
        times.append(float(number.replace(",", "")) * seconds[unit])
    assert times[-1] <= days * 86_400 < min(times[:-1])


def test_commands_that_run_a_row_are_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The row of a single GPU, whose command describes the step that was planned."""
    assert plan("--size", "small", "--gpus", "1xH100", "--output", tmp_path) == 0
    assert f": {written(tmp_path)[0]['run_by']}" in capsys.readouterr().out.replace("\n", " ")
    words = {row["run_by"] for row in written(tmp_path) if row["accumulate"] == "1"}
    (command,) = [word for word in words if word.startswith("cs336") and "check" not in word]
    assert main(["account", *command.split()[2:], "--device-name", "H100"]) == 0


def test_account_has_the_time_that_a_plan_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a layout that a way of --parallel runs, among GPUs whose collectives nobody measured."""
    model = ["--size", "small", "--context-length", "512"]
    words = [*model, "--gpus", "8xH100", "--global-batch", "32", "--output", tmp_path]
    assert plan(*words) == 0
    wanted = {"shard": "8", "micro_batch": "4", "checkpoint": "0"}
    (row,) = [row for row in written(tmp_path) if wanted.items() <= row.items()]
    capsys.readouterr()
    step = ["--precision", "bf16", "--attention", "sdpa", "--optimizer", "fused"]
    way = ["--batch-size", "4", "--parallel", "fsdp", "--ranks", "8", "--device-name", "H100"]
    assert main(["account", *model, *step, *way, "--json"]) == 0
    time = json.loads(capsys.readouterr().out)["time"]
    assert 1e3 * time["step_s"] == pytest.approx(float(row["step_ms"]), rel=0.02)


def test_the_derivation_has_a_row_for_each_collective(tmp_path: Path) -> None:
    assert plan("--size", "8B", "--gpus", "64xH100", "--derive", "--output", tmp_path) == 0
    rows = written(tmp_path, "derivation")
    assert {row["part"] for row in rows} == {"one block", "feed-forward network"}
    assert {row["pass"] for row in rows} == {"forward", "backward"}
    for row in rows:
        beside = float(row["computed_ms"]), float(row["overlapped_ms"]), float(row["summed_ms"])
        assert beside[0] <= beside[1] <= beside[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needed the name of the GPU"),
        (["--gpus", "many"], "--gpus must be a number"),
        (["--gpus", "0xH100"], "--gpus must be a number"),
        (["--gpus", f"{10**9}xH100"], "1,048,576"),
        (["--gpus", "8xTPU"], "GPU 'TPU' is not known"),
        (["--gpus", "2x4090"], "--node-gb-per-s"),
        (["--gpus", "8xB200", "--precision", "fp32"], "nothing is known of B200 at fp32"),
        (["--gpus", "16xMI300X"], "--network-gb-per-s"),
        (["--gpus", "8xH200", "--network-gb-per-s", "nan"], "--network-gb-per-s"),
        (["--gpus", "8xH200", "--node-gb-per-s", "-1"], "--node-gb-per-s"),
        (["--gpus", "8xH200", "--device-name", "H100"], "--device-name"),
        (["--gpus", "8xH200", "--days", "3"], "--days needs --tokens"),
        (["--gpus", "8xH200", "--global-batch", "some"], "some"),
        (["--gpus", "8xH200", "--precision", "fp16"], "fp16"),
        (["--gpus", "8xH200", "--size", "huge"], "unknown size"),
        (["--gpus", "8xH200", "--fp8", "mx"], "--fp8 mx"),
        (["--gpus", "8xA100-SXM4-80GB", "--fp8", "tensor"], "--fp8 tensor"),
        (["--gpus", "8xH200", "--fp8", "tensor", "--precision", "fp32"], "--precision fp32"),
        (["--gpus", "8xH200", "--compile", "default", "--fp8", "tensor"], "leave --compile out"),
        (["--gpus", "8xH200", "--compile", "reduce-overhead"], "only --compile default"),
        (["--gpus", "8xH200", "--compile", "default", "--model", "mine:make"], "of your own"),
    ],
    ids=lambda value: repr(value)[-40:],
)
def test_what_cannot_be_answered_is_refused_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"error: [^\n]+\n", printed.err)
    assert said in printed.err
