"""Every part of the course's questions has its answer: its numbers are those of the records, its commands valid."""

import json
import math
import re
import shlex
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from cs336_systems import cli
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.commands.flags import parse
from cs336_systems.commands.sweep import SweepArguments
from cs336_systems.config import (
    SIZES,
    Attention,
    CompileMode,
    Device,
    Mode,
    OptimizerKind,
    Parallel,
    Phase,
    Precision,
    Profiler,
)  # fmt: skip
from cs336_systems.record import Measurement, MemoryMoment, Moment, RankRecord, Traffic, load_records
from cs336_systems.report.page import questions
from cs336_systems.report.page.answers import attention
from cs336_systems.report.page.answers.answer import Material
from cs336_systems.report.page.collection import Collection, block_id
from cs336_systems.report.page.commands import command_for
from cs336_systems.report.page.whole import collection_page
from cs336_systems.report.page.write import Figure, Page, Prose, TableBlock, to_html
from cs336_systems.report.results import Results
from cs336_systems.report.sections.kernels.entries import Profiled
from cs336_systems.studies.attention_records import Implementation
from tests.committed import DATA, load_committed
from tests.report.making import H200, make_config, make_failure, make_record
from tests.report.page.test_browser import chromium  # noqa: F401 (a fixture)
from tests.report.sections.kernels.profiles import make_gather, make_shared
from tests.report.studies import make_cell, make_failed, make_result, make_study

FIRST_HALF = {
    "Benchmarking script": 3,
    "Nsight Systems": 5,
    "Accumulation in mixed precision": 1,
    "Mixed precision": 3,
    "Memory": 6,
    "Activation checkpointing": 2,
    "Attention in PyTorch": 1,
    "Compilation": 2,
    "Flash attention": 1,
}
"""Parts of the assignment's problems, as the handout has them."""
INTERRUPTED = {Path("e2e_benchmark/compile"), Path("parallel/kineto_profiles/xl")}
"""Sweeps that the time limit of the machine ended before their last runs."""
MIB, GIB = 2**20, 2**30
COURSE = ("small", "medium", "large", "xl", "2.7B")


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    return load_committed(tmp_path_factory.mktemp("committed") / "data")


@pytest.fixture(scope="module")
def material(collection):
    return Material.of(collection)


@pytest.fixture(scope="module")
def answers(material):
    return {part.id: part.answer(material) for problem in questions.PROBLEMS for part in problem.parts}


def records_of(answer):
    """The records of the directory that the answer rests on, as they lie on the disk."""
    return [json.loads(path.read_bytes()) for path in sorted((DATA / answer.places[0][0] / "runs").glob("*.json"))]


def profiles_of(answer, kind):
    """The explained profiles of that directory, by the configuration of their records."""
    directory = DATA / answer.places[0][0]
    return {path.stem: json.loads(path.read_bytes()) for path in sorted((directory / kind).glob("*.json"))}


def is_plain(config):
    return config.get("profiler", "none") == "none"


def mean_ms(record, phase):
    [times] = [each["times_s"] for each in record["measurements"] if each["phase"] == phase]
    return 1e3 * statistics.fmean(times)


def numbers(answer):
    return [float(found.replace(",", "")) for text in answer.sentences for found in re.findall(r"\d[\d,]*\.?\d*", text)]


def ends(values):
    return min(values), max(values)


def says(answer, *values, digits=3):
    """Whether the sentences have each of the values, to this many digits."""
    found = numbers(answer)
    missing = [
        value
        for value in values
        if not any(math.isclose(each, value, rel_tol=0.51 * 10 ** (1 - digits)) for each in found)
    ]
    assert not missing, (missing, answer.sentences)


def by(table, *keys):
    """The rows of values of a table by these keys."""
    return {tuple(row[key] for key in keys): row for row in table.values}


def test_every_part_of_the_handout_has_a_place_in_its_order():
    first = {problem.title: len(problem.parts) for problem in questions.PROBLEMS[: len(FIRST_HALF)]}
    assert first == FIRST_HALF
    assert len({part.id for problem in questions.PROBLEMS for part in problem.parts}) == sum(
        len(problem.parts) for problem in questions.PROBLEMS
    )


def test_every_part_is_answered_from_data_or_says_what_to_run(answers):
    for problem in questions.PROBLEMS[: len(FIRST_HALF)]:
        for part in problem.parts:
            answer = answers[part.id]
            assert part.command
            assert answer is None or (answer.sentences and (answer.places or answer.lacking)), part.id
    answered = [name for name, answer in answers.items() if answer is not None]
    assert len(answered) >= sum(FIRST_HALF.values()) - FIRST_HALF["Flash attention"]


def test_without_results_every_part_says_what_to_run(tmp_path):
    chapter = questions.questions_chapter(Collection(root=tmp_path))
    for problem, own in zip(questions.PROBLEMS, chapter.chapters, strict=True):
        proses = [block for block in own.blocks if isinstance(block, Prose)]
        assert sum(bool(prose.heading) for prose in proses) == len(problem.parts)
        said = [command for prose in proses for _, command in prose.commands]
        assert said == [part.command for part in problem.parts]
    to_html(Page(title="nothing", chapters=[chapter]))


def test_parallelism_on_paper_is_limited_by_the_ceilings_that_are_there(answers):
    """C / W in a node, by hand from the studies of the device, and the ranks of which each has so many tokens."""
    answer = answers["parallelism"]
    studies = [json.loads(path.read_bytes()) for path in sorted(DATA.glob("ceilings/*/ceilings.json"))]
    device = json.loads((DATA / answer.places[0][0] / "ceilings.json").read_bytes())["environment"]["identity"]
    rates, buses = [], []
    for study in studies:
        if study["environment"]["identity"]["device_name"] == device["device_name"]:
            for cell in study["products"]:
                if cell["precision"] == "bf16" and "loops" in cell["timing"]:
                    loops, shape = cell["timing"]["loops"], cell["shape"]
                    flops = 2 * shape["rows"] * shape["inner"] * shape["columns"]
                    rates.append(flops / (statistics.median(loops["times_s"]) / loops["count"]))
            for cell in study["reductions"]:
                passes = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}.get(
                    cell.get("collective", "all-reduce")
                )
                if passes and "loops" in cell["timing"]:
                    loops, ranks = cell["timing"]["loops"], cell["world_size"]
                    sent = passes * cell["num_bytes"] * (ranks - 1) / ranks
                    buses.append(sent / (statistics.median(loops["times_s"]) / loops["count"]))
    least = max(max(rates) / max(buses), max(rates) / 400e9)
    says(answer, least, 2 * least)
    ranks = next(row["most_ranks"] for row in answer.tables[0].values if row["way"] == "fsdp")
    assert ranks == pytest.approx(2**22 / least * 8 / 7, abs=8)


def parsed(command):
    """The arguments that the program makes of the command line."""
    words = shlex.split(command)
    if words[0] == "python":
        name = {"benchmark_sweep.py": "sweep", "precision.py": "precision"}[words[1]]
        words = [name, *words[2:]]
    else:
        words = words[1:]
    return parse(
        cli._arguments(words[0]), words[0], cli._sides_apart(words[1:]) if words[0] == "compare" else words[1:]
    )


def test_every_command_is_a_valid_command_line(answers, two_gpus):
    commands = {part.command for problem in questions.PROBLEMS for part in problem.parts if part.command}
    made = {command for answer in answers.values() if answer is not None for command in answer.commands}
    assert made
    for command in commands | made:
        for one in command.split(" && "):
            parsed(one)


def test_the_command_of_a_sweep_plans_the_runs_that_its_records_are_of(collection, two_gpus, monkeypatch):
    """Of all directories, those that no question chooses too; an interrupted sweep lacks the last runs of its plan."""
    monkeypatch.setattr("cs336_systems.commands.sweep.resolve_device", lambda asked: Device.CUDA)
    planned = 0
    for directory in collection.sweeps:
        command = command_for(collection, directory)
        if not command.startswith("python benchmark_sweep.py") or "--fast" in command or "--cuda-graph" in command:
            continue
        plans = [list(dict.fromkeys(parsed(one).plan().configs)) for one in command.split(" && ")]
        records, _ = load_records(DATA / directory / "runs")
        measured = {record.config for record in records}
        missing = {config for configs in plans for config in configs} - measured
        assert measured <= {config for configs in plans for config in configs}, command
        assert bool(missing) == (directory in INTERRUPTED), command
        assert not missing or any({*configs[-len(missing) :]} == missing for configs in plans), command
        planned += 1
    assert planned > 10


def test_times_of_all_sizes_are_those_of_the_records(answers):
    answer = answers["benchmarking-b"]
    records = {
        record["config"]["size"]: record
        for record in records_of(answer)
        if record["config"]["model"]["context_length"] == 512 and record["config"].get("precision", "fp32") == "fp32"
    }
    rows = by(answer.tables[0], "size")
    assert {size for (size,) in rows} == {*COURSE}
    for (size,), row in rows.items():
        for phase in ("forward", "backward", "optimizer", "step"):
            assert row[f"{phase}_mean_ms"] == pytest.approx(mean_ms(records[size], phase), rel=1e-9)
    ratios = [mean_ms(record, "backward") / mean_ms(record, "forward") for record in records.values()]
    shares = [100 * mean_ms(record, "optimizer") / mean_ms(record, "step") for record in records.values()]
    says(answer, min(ratios), max(ratios), min(shares), max(shares))
    both = [1 + ratio for ratio in ratios]
    says(answers["benchmarking-a"], min(both), max(both))


def test_warm_up_steps_are_those_of_the_records(answers):
    answer = answers["benchmarking-c"]
    rows = by(answer.tables[0], "size", "warmup_steps")
    seen = 0
    for record in records_of(answer):
        row = rows[record["config"]["size"], record["config"].get("warmup_steps", 5)]
        [times] = [each["times_s"] for each in record["measurements"] if each["phase"] == "step"]
        assert row["step_mean_ms"] == pytest.approx(1e3 * statistics.fmean(times))
        assert row["first_step_ms"] == pytest.approx(1e3 * times[0])
        assert row["step_cv"] == pytest.approx(statistics.stdev(times) / statistics.fmean(times))
        enough = rows[record["config"]["size"], 5]["step_mean_ms"] / 1e3
        if row["warmup_steps"] != 5:
            says(answer, statistics.fmean(times) / enough)
        if row["warmup_steps"] == 0:
            says(answer, times[0] / enough)
        seen += 1
    assert seen == len(rows) >= 8


def test_kernels_are_those_of_the_traces(answers):
    """Of training steps alone, and of their forward or of the whole step; see tests of what the tables hold."""
    steps = [
        profile
        for name, profile in profiles_of(answers["nsys-a"], "kernels").items()
        if re.match(r"(small|xl)_ctx(256|512|1024)_b4_train_", name)
    ]
    shown = {"a": {"forward"}, "b": {"forward"}, "c": {"forward"}, "d": {"forward", "step"}, "e": {"forward"}}
    for part, phases in shown.items():
        (table,) = answers[f"nsys-{part}"].tables
        rows = by(table, "size", "context_length", "of" if part == "b" else "phase")
        assert {key[:2] for key in rows} == {(size, length) for size in ("small", "xl") for length in (256, 512, 1024)}
        assert {key[2] for key in rows} == phases
        assert len(rows) == len(steps) * len(phases)

    def shares(kind, *phases):
        for profile in steps:
            chosen = [row for row in profile["classes"] if not phases or row["phase"] in phases]
            own = sum(row["total_s"] for row in chosen if row["kind"] == kind)
            yield 100 * own / sum(row["total_s"] for row in chosen)

    says(answers["nsys-c"], *ends([*shares("element-wise", "forward")]))
    says(answers["nsys-d"], *ends([*shares("matrix product", "forward")]), *ends([*shares("matrix product")]))


def test_sums_and_layer_norm_are_those_of_the_record(answers):
    study = json.loads((DATA / answers["accumulation"].places[0][0] / "precision.json").read_bytes())
    for row in study["accumulation"]:
        if row["sum_dtype"] != "bf16" and row["addend_dtype"] != "bf16":
            says(answers["accumulation"], row["total"], digits=5)
    text = " ".join(answers["mixed-precision-a"].sentences)
    for row in study["dtypes"]:
        if (row["model"], row["device"], row["precision"]) == ("ToyModel", "cuda", "fp16"):
            assert f"{row['quantity']} {row['dtype']}" in text
    lost = [row for row in study["layer_norm"] if row["dtype"] == "fp16" and row["variance"] is None]
    says(answers["mixed-precision-b"], *(row["scale"] ** 2 for row in lost))


def test_speed_ups_of_bf16_are_those_of_the_records(answers):
    answer = answers["mixed-precision-c"]
    steps = {}
    for record in records_of(answer):
        config = record["config"]
        key = (config["size"], config["model"]["context_length"])
        steps.setdefault(key, {})[config.get("precision", "fp32")] = mean_ms(record, "step")
    gains = {key: own["fp32"] / own["bf16"] for key, own in steps.items()}
    says(answer, *ends(gains.values()), gains["small", 512], gains["2.7B", 512])
    rows = by(answer.tables[0], "size", "precision")
    for size in COURSE:
        assert rows[size, "bf16"]["speed_up"] == pytest.approx(gains[size, 512])


def test_peaks_are_those_of_the_records(answers):
    rows = by(answers["memory-c"].tables[0], "size", "context_length", "precision")
    seen = 0
    for record in records_of(answers["memory-c"]):
        config = record["config"]
        if not is_plain(config):
            continue
        row = rows[config["size"], config["model"]["context_length"], config.get("precision", "fp32")]
        peak = row[f"{config.get('mode', 'train')} peak_allocated_gib"]
        assert peak == (record["memory"]["peak_allocated_bytes"] / GIB if record["status"] == "ok" else None)
        seen += 1
    assert seen >= 48
    train, alone = (f"{mode} peak_allocated_gib" for mode in ("train", "inference"))
    full = by(answers["memory-b"].tables[0], "size", "context_length")
    says(answers["memory-b"], *ends([row[train] / row[alone] for row in full.values() if row[train]]))
    for mode in (train, alone):
        of_mixed = [
            row[mode] / rows[size, context, "fp32"][mode]
            for (size, context, precision), row in rows.items()
            if precision == "bf16" and row[mode]
        ]
        says(answers["memory-c"], *ends(of_mixed))
    for name, profile in profiles_of(answers["memory-c"], "memory").items():
        if name.startswith(("xl_ctx512_b4_train_", "2.7B_ctx512_b4_train_")):
            [held] = [row for row in profile["peak"]["categories"] if row["category"] == "saved activations"]
            says(answers["memory-c"], held["num_bytes"] / GIB)


def test_memory_over_time_and_of_a_block_are_those_of_the_profiles(answers):
    profiles = profiles_of(answers["memory-a"], "memory")
    [alone] = [own for name, own in profiles.items() if name.startswith("xl_ctx512_b4_inference_fp32")]
    [step] = [own for name, own in profiles.items() if name.startswith("xl_ctx512_b4_train_fp32")]
    for profile in (alone, step):
        last = [phase for phase in profile["phases"] if phase["step"] == profile["phases"][-1]["step"]]
        says(answers["memory-a"], *(phase[key] / GIB for phase in last for key in ("end_bytes", "peak_bytes")))
    largest = max(row["requested_bytes"] for row in step["largest"])
    says(answers["memory-e"], largest, digits=9)
    says(answers["memory-e"], sum(row["count"] for row in step["largest"] if row["requested_bytes"] == largest))
    saved = sorted(block["saved_bytes"] for block in step["blocks"])
    block = step["blocks"][0]
    assert saved[0] == saved[-1]
    five = [tensor["num_bytes"] for tensor in block["saved"][:5]]
    says(answers["memory-f"], saved[0], block["gradient_bytes"], digits=9)
    says(answers["memory-f"], *(100 * each / saved[0] for each in five))
    d_model, d_ff = SIZES["xl"].d_model, SIZES["xl"].d_ff
    weights = 4 * d_model**2 + 3 * d_model * d_ff + 2 * d_model
    assert block["gradient_bytes"] == 4 * weights


def test_the_residual_stream_has_its_closed_form(answers):
    for d_model, context in ((1600, 512), (1600, 2048), (2560, 128), (2560, 2048)):
        says(answers["memory-d"], 4 * context * d_model * 4 / MIB, digits=4)


def test_checkpoints_are_those_of_the_records_and_of_the_closed_form(answers):
    answer = answers["checkpointing-b"]
    rows = {row["checkpoint_blocks"]: row for row in answer.tables[0].values}
    for record in records_of(answer):
        config = record["config"]
        if config.get("precision", "fp32") == "fp32" and config.get("checkpoint_blocks", 0) in rows:
            row = rows[config.get("checkpoint_blocks", 0)]
            assert row["peak_allocated_gib"] == pytest.approx(record["memory"]["peak_allocated_bytes"] / GIB)
            assert row["step_mean_ms"] == pytest.approx(mean_ms(record, "step"))
    assert {1, 2, 4, 8} <= {*rows}
    says(answer, *(rows[blocks][key] for blocks in (1, 8) for key in ("peak_allocated_gib", "step_mean_ms")))
    predicted = {row["blocks"]: row["xl"] for row in answer.tables[1].values}
    assert min((blocks for blocks in predicted if blocks), key=predicted.__getitem__) == 1
    says(answer, predicted[1] / GIB, predicted[2] / GIB)
    profiles = profiles_of(answers["checkpointing-a"], "memory")
    [longest] = [own for name, own in profiles.items() if name.startswith("xl_ctx2048_b4_train_fp32")]
    saved, entered, blocks = longest["blocks"][0]["saved_bytes"], 4 * 2048 * 1600 * 4, 48
    says(answers["checkpointing-a"], blocks * saved / GIB, (blocks * entered + saved) / GIB,
         (math.log2(blocks) * entered + saved) / GIB)  # fmt: skip


def cells_of(answer):
    study = json.loads((DATA / answer.places[0][0] / "attention.json").read_bytes())
    return {
        tuple(own["cell"][key] for key in ("implementation", "d_head", "context_length")): own
        for own in study["results"]
    }


def test_attention_is_that_of_the_record(answers):
    cells, rows = cells_of(answers["attention"]), by(answers["attention"].tables[0], "d_head", "context_length")
    assert len(rows) == 20
    for (d_head, context), row in rows.items():
        cell = cells["naive", d_head, context]
        assert row["forward_mean_ms"] == pytest.approx(mean_ms(cell, "forward"))
        assert row["backward_mean_ms"] == pytest.approx(mean_ms(cell, "backward"))
        assert row["before_backward_mib"] == cell["memory"]["before_backward_bytes"] / MIB
    for phase in ("forward", "backward"):
        says(answers["attention"], *(mean_ms(cells["naive", 128, context], phase) for context in (256, 16384)))
        last = mean_ms(cells["naive", 128, 16384], phase)
        says(answers["attention"], last / mean_ms(cells["naive", 128, 8192], phase))
    weights, queries = 8 * 16384**2 * 4, 8 * 16384 * 128 * 4
    says(answers["attention"], (weights + 2 * queries) / MIB, weights / MIB, digits=4)
    for phase in ("forward", "backward"):
        gains = {
            context: mean_ms(cells["naive", 128, context], phase) / mean_ms(cells["compiled", 128, context], phase)
            for context in (256, 1024, 4096, 8192, 16384)
        }
        says(answers["compile-a"], *ends(gains.values()))


def test_the_compiled_model_is_that_of_the_records(answers):
    answer = answers["compile-b"]
    sizes = {}
    for record in records_of(answer):
        sides = sizes.setdefault(record["config"]["size"], {})
        sides.setdefault(record["config"].get("compile", "none"), []).append(record)
    pairs = [sides for sides in sizes.values() if len(sides) == 2]
    assert len(pairs) >= 3
    for phase in ("forward", "backward", "step"):
        means = [{name: statistics.fmean(mean_ms(each, phase) for each in own) for name, own in sides.items()}
                 for sides in pairs]  # fmt: skip
        gains = [sides["none"] / sides["default"] for sides in means]
        says(answer, min(gains), max(gains))


@pytest.mark.parametrize(("gains", "words"), [
    ([2, 3], ["faster at all contexts"]),
    ([1.01, 0.99], ["about as fast at all contexts"]),
    ([0.5, 0.6, 2, 3], ["faster from context 512 on", "slower at the 2 shorter ones"]),
    ([0.5, 2, 0.6, 3], ["faster at context 1024", "of the 3 shorter ones", "2 slower", "1 faster"]),
    ([0.5, 2], ["faster at context 256", "slower at the shorter one"]),
])  # fmt: skip
def test_where_a_kernel_turns_faster_is_told_from_the_longest_context_down(gains, words):
    told = attention._where({128 * 2**number: gain for number, gain in enumerate(gains)})
    assert all(word in told for word in words), told


def test_steps_on_several_ranks_are_compared_by_the_way_and_by_what_is_sharded(tmp_path):
    """Communication is a tenth of the naive step and a fortieth of the overlapped; memory and times are given."""

    def made(way, step_s, gib, communication_s=0.0, **settings):
        config = make_config("xl", 512, parallel=way, ranks=2, **settings)
        record = make_record(config, [step_s] * 3, peak_bytes=gib * 2**30)
        return replace(
            record, measurements=(*record.measurements, Measurement(Phase.COMMUNICATION, (communication_s,) * 3))
        )

    def keeping(record, *states):
        """Each rank with this much of optimizer's state and a gibibyte of parameters, in all two more than that."""
        ranks = [
            RankRecord(
                rank=rank, measurements=(), warmup_times_s=(), host_times_s=(), losses=(),
                moments=tuple(
                    MemoryMoment(moment=moment, allocated_bytes=(3 + held) * GIB, parameters_bytes=GIB,
                                 gradients_bytes=0, optimizer_state_bytes=held * GIB)
                    for moment, held in ((Moment.INITIALISED, 0), (Moment.AFTER_OPTIMIZER, state))
                ),
            )
            for rank, state in enumerate(states)
        ]  # fmt: skip
        return replace(record, ranks=tuple(ranks))

    def sending(record, num_bytes):
        traffic = Traffic(collective="allreduce", count=1, payload_bytes=num_bytes, sent_bytes=num_bytes)
        return replace(record, traffic=(traffic,))

    overlapped = sending(made(Parallel.DDP_OVERLAP, 0.4, 40, 0.01), 20 * MIB)
    sharded = sending(made(Parallel.DDP_OVERLAP, 0.44, 30, shard_optimizer=True), 36 * MIB)
    sweeps = {
        Path("ways"): Results(records=[made(Parallel.DDP_NAIVE, 0.5, 42, 0.05), overlapped]),
        Path("optimizer"): Results(
            records=[
                keeping(overlapped, 8, 8),
                keeping(sharded, 3, 5),
            ]
        ),
        Path("parameters"): Results(records=[overlapped, made(Parallel.FSDP, 0.6, 20)]),
    }
    material = Material.of(Collection(root=tmp_path, sweeps=sweeps))
    asked = ("ddp", "optimizer-sharding", "fsdp")
    parts = [part for problem in questions.PROBLEMS for part in problem.parts if part.id in asked]
    found = {part.id: part.answer(material) for part in parts}
    assert [found[part].places[0][0].name for part in asked] == ["ways", "optimizer", "parameters"]
    says(found["ddp"], 400, 500, 2.5, 10)
    says(found["optimizer-sharding"], 1.1, 0.75, 1.8)
    says(found["fsdp"], 20, 40, 0.5, 400, 600)
    assert "--profile" in found["fsdp"].sentences[-1]
    assert [len(found[part].tables[0].rows) for part in asked] == [2, 2, 2]
    [commands] = found["optimizer-sharding"].commands
    measured = [parse(SweepArguments, "sweep", shlex.split(command)[2:]) for command in commands.split(" && ")]
    assert [sweep.step.shard_optimizer for sweep in measured] == [False, True]
    moments = found["optimizer-sharding"].tables[1]
    states = ["0 bytes", "8.00 GiB", "0 bytes", "5.00 GiB"]
    allocated = ["3.00 GiB", "11.00 GiB", "3.00 GiB", "8.00 GiB"]
    assert [row[-5:] for row in moments.rows] == [
        ("1.00 GiB", "0 bytes", state, "2.00 GiB", whole) for state, whole in zip(states, allocated, strict=True)
    ]
    assert not any(found[part].lacking for part in asked)


def test_the_leaderboard_s_step_is_the_fastest_of_those_on_two_gpus(tmp_path):
    """One with half the context, which takes less time, is another step."""
    model = {"attention": Attention.SDPA}
    settings = {"batch_size": 1, "precision": Precision.BF16, "ranks": 2, "optimizer": OptimizerKind.FUSED}
    steps = {
        make_config("8B", 32_768, parallel=Parallel.FSDP, model=model, **settings): 5.25,
        make_config("8B", 32_768, parallel=Parallel.DDP_OVERLAP, shard_optimizer=True, model=model, **settings): 4.75,
        make_config("8B", 16_384, parallel=Parallel.FSDP, model=model, **settings): 1.5,
    }
    records = [make_record(config, [step_s] * 3, peak_bytes=127 * GIB) for config, step_s in steps.items()]
    (part,) = (part for problem in questions.PROBLEMS for part in problem.parts if part.id == "leaderboard")
    for own, lacking in ((records, False), (records[2:], True)):
        answer = part.answer(Material.of(Collection(root=tmp_path, sweeps={Path("8B"): Results(records=own)})))
        says(answer, *((1.5,) if lacking else (4.75, 127)))
        assert bool(answer.lacking) == lacking
        assert len(answer.tables[0].rows) == (1 if lacking else 2)


def test_exposed_communication_and_late_gathers_are_told_from_profiles_of_the_same_runs(tmp_path):
    """9 ms of collectives of which 5 are exposed; of two gathers in two steps one is late, by 3 ms."""
    late = (make_gather("layers.0", LaunchPhase.FORWARD, (2, 2), (-3, 1), (3, 0)),)
    configs = [make_config("xl", 512, parallel=way, ranks=2) for way in (Parallel.DDP_NAIVE, Parallel.FSDP)]
    flat = make_config("xl", 512, parallel=Parallel.DDP_FLAT, ranks=2)
    plain = {config: make_record(config, [0.5] * 3, peak_bytes=GIB) for config in (*configs, flat)}
    entries = []
    for config, gathers in zip(configs, ((), late), strict=True):
        watched = replace(config, profiler=Profiler.KINETO)
        profile = make_shared(gathers=gathers)
        entries.append(
            Profiled(config=watched, profile=profile, plain=plain[config], profiled=make_record(watched, [0.6] * 3))
        )
    results = Results(records=[*plain.values(), *(entry.profiled for entry in entries)], kernels=entries)
    material = Material.of(Collection(root=tmp_path, sweeps={Path("ways"): results}))
    found = {
        part.id: part.answer(material)
        for problem in questions.PROBLEMS
        for part in problem.parts
        if part.id in ("ddp", "fsdp")
    }
    says(found["ddp"], 100 * 5 / 9)
    (table,) = found["ddp"].tables
    exposed = [heading.name for heading in table.headings].index("exposed")
    assert [row[exposed] for row in table.rows] == ["5.000", ""]
    assert "0.500 of 1.00 gathers" in found["fsdp"].sentences[-1]
    assert "1.50 ms" in found["fsdp"].sentences[-1]


def test_results_with_the_course_settings_on_a_gpu_are_chosen_before_others(tmp_path):
    """Not the newest, the largest, or the first by name: a laptop's sweep is chosen only where there is no other."""
    laptop = [
        make_record(replace(make_config("tiny", length), device=Device.CPU), [0.5, 0.6], device_name="a laptop")
        for length in (64, 128, 256, 512)
    ]
    gpu = [make_record(make_config("small", 512), [0.1, 0.2])]
    sweeps = {Path("a"): Results(records=laptop), Path("b"): Results(records=gpu), Path("c"): Results(records=laptop)}
    times = questions.PROBLEMS[0].parts[1]
    both = Collection(root=tmp_path, sweeps=sweeps)
    assert times.answer(Material.of(both)).places[0][0] == Path("b")
    alone = times.answer(Material.of(Collection(root=tmp_path, sweeps={Path("a"): Results(records=laptop)})))
    assert alone.places[0][0] == Path("a")
    assert "tiny" in alone.conditions or "tiny" in str(alone.tables[0].rows)
    assert "a laptop" in alone.conditions
    assert all(size in alone.lacking for size in COURSE)


def test_of_equal_settings_more_runs_and_then_newer_ones_are_chosen(tmp_path):
    def sweep(*sizes, day=1):
        records = [make_record(make_config(size, 512, measured_steps=10), [0.1] * 10) for size in sizes]
        return Results(records=[replace(record, started_at=f"2026-01-0{day}T00:00:00Z") for record in records])

    one, two, newer = sweep("small", day=3), sweep("small", "xl", day=1), sweep("small", "xl", day=2)
    times = questions.PROBLEMS[0].parts[1]
    for sweeps in ([one, two, newer], [newer, two, one]):
        names = [Path(str(number)) for number in range(len(sweeps))]
        collection = Collection(root=tmp_path, sweeps=dict(zip(names, sweeps, strict=True)))
        assert times.answer(Material.of(collection)).places[0][0] == names[sweeps.index(newer)]


def test_of_equal_settings_the_gpu_of_most_results_is_chosen_and_said(tmp_path):
    """The sweep of another GPU is newer, has more sizes, and xl in bf16; most runs are of the H200, in fewer sweeps."""

    def sweep(device_name, *configs, day):
        records = [make_record(config, [0.1] * 10, device_name=device_name) for config in configs]
        return Results(records=[replace(record, started_at=f"2026-01-0{day}T00:00:00Z") for record in records])

    full = [make_config(size, 512, measured_steps=10) for size in ("small", "xl")]
    half = [replace(config, precision=Precision.BF16) for config in full]
    warmed = [replace(full[0], warmup_steps=steps) for steps in (0, 1, 2, 3, 4, 6, 7)]
    tiny = make_config("tiny", 512, measured_steps=10)
    on_cpu = [replace(tiny, device=Device.CPU, seed=seed) for seed in range(20)]
    sweeps = {
        Path("old"): sweep(H200, *full, half[0], day=1),
        Path("new"): sweep("NVIDIA H100 80GB HBM3", *full, *half, tiny, day=2),
        Path("newer"): sweep("NVIDIA H100 80GB HBM3", tiny, day=3),
        Path("newest"): sweep("NVIDIA H100 80GB HBM3", tiny, day=4),
        Path("warmup"): sweep(H200, *warmed, day=1),
        Path("cpu"): sweep("AMD EPYC", *on_cpu, day=1),
    }
    found = Collection(root=tmp_path, sweeps=sweeps)
    answers = {
        part.id: part.answer(Material.of(found)) for problem in questions.PROBLEMS for part in problem.parts
    }  # fmt: skip
    assert Material.of(found).gpus == [H200, "NVIDIA H100 80GB HBM3"]
    assert answers["benchmarking-b"].places[0][0] == Path("old")
    assert answers["benchmarking-b"].conditions.startswith(H200)
    assert answers["mixed-precision-c"].places[0][0] == Path("new")
    assert answers["mixed-precision-c"].conditions.startswith("NVIDIA H100 80GB HBM3")

    def introduced(collection):
        (block,) = questions.questions_chapter(collection).blocks
        return " ".join(text for text, _ in block.paragraphs)

    assert f"measured on {H200} and NVIDIA H100 80GB HBM3" in introduced(found)
    assert f"{H200}, which has the most runs" in introduced(found)
    others = {path: own for path, own in sweeps.items() if not path.name.startswith("new")}
    alone = Collection(root=tmp_path, sweeps=others)
    assert "measured on" not in introduced(alone)


def test_phases_that_contradict_their_step_are_in_no_answer(tmp_path):
    """Such a run has a step alone, and a compiled one beside it has no gain by phase."""
    eager = make_record(make_config("small", 512), [0.1, 0.2])
    compiled = make_record(make_config("small", 512, compile=CompileMode.DEFAULT), [0.1, 0.2])
    wrong = [
        replace(
            record, measurements=tuple(Measurement(each.phase, (0.2, 0.2)) for each in record.measurements)
        )
        for record in (eager, compiled)
    ]  # fmt: skip
    material = Material.of(Collection(root=tmp_path, sweeps={Path("a"): Results(records=wrong)}))
    found = {part.id: part.answer(material) for problem in questions.PROBLEMS for part in problem.parts}
    assert found["benchmarking-a"] is None
    assert found["benchmarking-b"] is None
    assert not any("By phase" in text for text in found["compile-b"].sentences)
    assert found["compile-b"].tables[0].values[0]["step_mean_ms"] == pytest.approx(200)


def test_a_precision_without_times_is_not_asked(tmp_path):
    """An interrupted study may have no cell in fp32 that ended well."""
    failed, timed = (make_cell("naive", 64, 512, precision) for precision in (Precision.FP32, Precision.BF16))
    study = make_study(make_failed(failed), make_result(timed))
    material = Material.of(Collection(root=tmp_path, attention={Path("a"): study}))
    [part] = next(problem for problem in questions.PROBLEMS if problem.title == "Attention in PyTorch").parts
    [row] = part.answer(material).tables[0].values
    assert row["precision"] is Precision.BF16


def test_where_every_run_ran_out_of_memory_the_peaks_say_so(tmp_path):
    modes = (Mode.INFERENCE, Mode.TRAIN)
    records = [make_failure(make_config("2.7B", 2048, mode=mode), device_name=H200) for mode in modes]
    material = Material.of(Collection(root=tmp_path, sweeps={Path("a"): Results(records=records)}))
    [peaks] = [part for problem in questions.PROBLEMS for part in problem.parts if part.id == "memory-b"]
    [row] = peaks.answer(material).tables[0].rows
    assert row[2:] == ("out of memory", "out of memory")


def test_the_chapter_has_tables_with_identifiers_of_their_own(collection):
    chapter = questions.questions_chapter(collection)
    tables = [block.id for own in chapter.chapters for block in own.blocks if isinstance(block, TableBlock)]
    assert len(tables) == len(set(tables)) > 5


def test_the_own_kernel_is_compared_in_the_precision_and_at_the_shapes_that_both_have(tmp_path):
    """Naive takes 2 + 5 ms, own half of it; at 2048 naive has no memory. A study without own is not asked."""
    cells = [make_cell(name, 64, context) for name in ("naive", "own") for context in (512, 1024, 2048)]
    cells.append(make_cell("own", 64, 512, Precision.BF16))
    halves = {"forward_s": (0.00099, 0.001, 0.00101), "backward_s": (0.00249, 0.0025, 0.00251)}
    results = [
        make_failed(cell)
        if (cell.implementation, cell.context_length) == (Implementation.NAIVE, 2048)
        else make_result(cell, **(halves if cell.implementation is Implementation.OWN else {}))
        for cell in cells
    ]
    study = make_study(*results, implementations=(Implementation.NAIVE, Implementation.OWN), batch_size=1, causal=True)
    without = make_study(*results[:2])
    studies = {Path("attention/a"): without, Path("attention/b"): study, Path("attention/c"): without}
    [part] = next(problem for problem in questions.PROBLEMS if problem.title == "Flash attention").parts
    answer = part.answer(Material.of(Collection(root=tmp_path, attention=studies)))
    assert answer.places[0][0] == Path("attention/b")
    rows = by(answer.tables[0], "precision", "context_length")
    assert {*rows} == {("fp32", 512), ("fp32", 1024), ("fp32", 2048), ("bf16", 512)}
    by_context = {context: row for (precision, context), row in rows.items() if precision == "fp32"}
    assert by_context[1024]["naive together_mean_ms"] == pytest.approx(7)
    assert by_context[1024]["own together_mean_ms"] == pytest.approx(3.5)
    assert by_context[2048]["naive forward_mean_ms"] is None
    [told] = [text for text in answer.sentences if "times as fast as naive" in text]
    assert "own is 2.00 times as fast" in told
    assert "faster at all contexts" in told
    assert [table.values[0]["context_length"] for table in answer.tables] == [512, 512, 512]
    assert "bf16 at contexts 128" in answer.lacking
    assert "65536" in answer.lacking
    arguments = parsed(answer.commands[0])
    assert (arguments.own, arguments.causal, arguments.batch_size) == ("mine:flash", True, 1)


def both_ms(cell):
    return mean_ms(cell, "forward") + mean_ms(cell, "backward")


def test_the_own_kernel_of_data_is_that_of_the_record(answers):
    answer = answers["flash-attention"]
    study = json.loads((DATA / answer.places[0][0] / "attention.json").read_bytes())
    cells = {
        tuple(own["cell"][key] for key in ("implementation", "precision", "context_length")): own
        for own in study["results"]
        if own["cell"]["d_head"] == 128 and own["status"] == "ok"
    }
    for precision in ("bf16", "fp32"):
        contexts = [key[2] for key in cells if key[:2] == ("own", precision)]
        gains = [
            both_ms(cells["naive", precision, context]) / both_ms(cells["own", precision, context])
            for context in contexts
        ]
        says(answer, *ends(gains))
        last = max(contexts)
        best = min(both_ms(cell) for key, cell in cells.items() if key[0] != "own" and key[1:] == (precision, last))
        own_ms = both_ms(cells["own", precision, last])
        says(answer, own_ms, best, own_ms / best)
    for phase, table in zip(("forward", "backward"), answer.tables, strict=False):
        for row in table.values:
            for name in ("flash", "cudnn", "own"):
                if (cell := cells.get((name, row["precision"], row["context_length"]))) is not None:
                    assert row[f"{name} {phase}_mean_ms"] == pytest.approx(mean_ms(cell, phase))
    for row in answer.tables[0].values:
        cell = cells["naive", row["precision"], row["context_length"]]
        assert row["naive forward_mean_ms"] == pytest.approx(mean_ms(cell, "forward"))


def test_pictures_that_an_answer_names_are_on_the_page(collection):
    directory = Path("memory_profiles/h200")
    own = Collection(root=DATA, sweeps={directory: collection.sweeps[directory]})
    [part] = [part for problem in questions.PROBLEMS for part in problem.parts if part.id == "memory-a"]
    pictures = part.answer(Material.of(own)).pictures
    assert [("inference" in name, "train" in name) for _, (_, name) in pictures] == [(True, False), (False, True)]

    def figures(chapters):
        for chapter in chapters:
            yield from (block.id for block in chapter.blocks if isinstance(block, Figure))
            yield from figures(chapter.chapters)

    assert {block_id(*place) for _, place in pictures} <= {*figures(collection_page(own).chapters)}


@pytest.mark.browser
def test_a_question_leads_to_its_table_and_has_its_command_to_copy(chromium, tmp_path):  # noqa: F811
    """The table is in a chapter that is closed until then; the console stays empty."""
    gpu, laptop = (
        Results(records=[make_record(make_config(size, 512), [0.1, 0.2])]) for size in ("small", "tiny")
    )  # fmt: skip
    page = tmp_path / "index.html"
    page.write_text(to_html(collection_page(Collection(root=tmp_path, sweeps={Path("x/a"): gpu, Path("x/b"): laptop}))))
    tab, said = chromium.new_page(viewport={"width": 400, "height": 900}), []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.goto(page.as_uri())
    questions_of_times = tab.locator("#questions-1")
    assert "--context-lengths 512 --name a" in questions_of_times.locator("pre").first.inner_text()
    table = tab.locator("[id='x/a/results']")
    assert not table.is_visible()
    questions_of_times.locator("a[href='#x/a/results']").first.click()
    table.wait_for(state="visible")
    assert "small" in table.inner_text()
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400
    assert said == []
