import math
import random
import statistics
from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from cs336.config import (
    SIZES,
    Arch,
    Attention,
    CompileMode,
    Device,
    Mode,
    Parallel,
    Precision,
    SdpaBackend,
)
from cs336.costs.accounting import mfu, step_flops
from cs336.costs.memory import predict_memory
from cs336.costs.time import step_time
from cs336.record import Measurement, Phase, Status, Traffic, WarningCode
from cs336.report import configurations
from cs336.report.configurations import over_warmup, step_results
from cs336.report.identity import names_of
from cs336.report.quantities import Gain, StepResult
from cs336.report.sections.steps import results_table
from cs336.studies.ceilings_files import Ceilings
from cs336.studies.ceilings_rows import CollectiveCell
from tests.report.ceilings import lasting, make_ceilings, make_rates, product_at, square
from tests.report.making import CODES, make_config, make_failure, make_record

CONTRACT = """
size, arch, d_model, d_ff, num_layers, num_heads, vocab_size, context_length, batch_size, mode,
precision, attention, compile, optimizer, world_size, device_name, warmup_steps, measured_steps,
status, error, forward_mean_ms, forward_std_ms, backward_mean_ms, backward_std_ms,
optimizer_mean_ms, optimizer_std_ms, step_mean_ms, step_std_ms, step_cv, step_median_ms,
step_min_ms, step_ci95_low_ms, step_ci95_high_ms, tokens_per_s, model_tflops_per_s, mfu,
peak_allocated_gib, peak_reserved_gib, warnings, predicted_peak_gib, ceiling_share, data_mean_ms,
data_std_ms, checkpoint_blocks, pad_vocabulary, cast_once, cuda_graph, learning_rate, fused_loss,
fp8, fused_blocks, predicted_step_ms, predicted_step_error, phases, ranges, tokens, seed,
rope_theta, processes"""
OF_RANKS = ", communication_mean_ms, communication_std_ms, sent_mib, predicted_collectives_ms"


def names_in(text):
    return [name.strip() for name in text.replace("\n", " ").split(",")]


def only_row(*records):
    (row,) = step_results(records)
    return row


@pytest.mark.parametrize(("ranks", "more"), [(1, ""), (2, OF_RANKS)])
def test_columns_are_those_of_the_contract(ranks, more):
    parallel = Parallel.DDP if more else Parallel.NONE
    row = only_row(make_record(make_config(parallel=parallel, ranks=ranks), (0.1,)))
    assert StepResult.csv_keys([row]) == names_in(CONTRACT + more)


def test_statistics_of_one_process_agree_with_numpy_and_scipy():
    times_s = np.array([0.101, 0.099, 0.104, 0.098, 0.1])
    config = make_config(context_length=256, batch_size=3)
    row = only_row(make_record(config, tuple(times_s), peak_bytes=3 * 2**29, codes=CODES))
    expected = {
        "forward_mean_ms": times_s.mean() / 4 * 1e3,
        "backward_std_ms": times_s.std(ddof=1) / 2 * 1e3,
        "optimizer_mean_ms": times_s.mean() / 8 * 1e3,
        "step_mean_ms": times_s.mean() * 1e3,
        "step_std_ms": times_s.std(ddof=1) * 1e3,
        "step_cv": times_s.std(ddof=1) / times_s.mean(),
        "step_median_ms": 100.0,
        "step_min_ms": 98.0,
        "tokens_per_s": 3 * 256 / times_s.mean(),
        "model_tflops_per_s": step_flops(config) / times_s.mean() / 1e12,
        "mfu": mfu(step_flops(config) / times_s.mean(), "NVIDIA H200", Precision.FP32),
        "peak_allocated_gib": 1.5,
        "peak_reserved_gib": 3.0,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert (row["status"], row["error"], row["warnings"]) == ("ok", None, "unstable;drift")
    assert row["mfu"] is not None
    assert row["ceiling_share"] is None
    # it takes several processes
    assert (row["step_ci95_low_ms"], row["step_ci95_high_ms"]) == (None, None)


def test_the_share_of_a_measured_ceiling_is_that_of_the_runs_own_device_and_precision():
    """1.602 TFLOP in 10 ms, of 500 TFLOP/s."""
    bf16 = make_record(
        make_config(precision=Precision.BF16, context_length=512, batch_size=4), (0.01,)
    )
    fp32 = make_record(make_config(context_length=512, batch_size=4), (0.01,))
    ceilings = Ceilings(
        (
            make_ceilings([product_at(square(512), 500)]),
            make_ceilings([product_at(square(512), 50)], device_name="NVIDIA H100"),
        )
    )
    rows = {row["precision"]: row for row in step_results([bf16, fp32], ceilings)}
    assert rows["bf16"]["ceiling_share"] == pytest.approx(160.2 / 500, rel=1e-3)
    assert rows["fp32"]["ceiling_share"] is None


@pytest.mark.parametrize(
    ("device", "name"), [(Device.CUDA, "NVIDIA H200"), (Device.CPU, "AMD EPYC")]
)
def test_a_step_stands_beside_its_forecast_on_the_device_that_measured_it(device, name):
    """Measured 25 % longer than its forecast, which is 20 % of that too short; without ceilings
    there is none.
    """
    ceilings = Ceilings((make_rates(1e-3, device=device, device_name=name),))
    config = replace(make_config("tiny", 16), device=device)
    predicted_s = step_time(config, ceilings.curves(name)).step_s
    other = make_record(replace(config, batch_size=1), [predicted_s], device_name="NVIDIA A10")
    failed = make_failure(replace(config, batch_size=2), device_name=name)
    own = make_record(config, [predicted_s, 1.5 * predicted_s], device_name=name)
    rows = step_results([own, other, failed], ceilings)
    measured, alone, lost = (
        next(row for row in rows if row["batch_size"] == size) for size in (4, 1, 2)
    )
    assert measured["predicted_step_ms"] == pytest.approx(1e3 * predicted_s)
    assert measured["predicted_step_error"] == pytest.approx(-0.2)
    assert (alone["predicted_step_ms"], alone["predicted_step_error"]) == (None, None)
    assert lost["predicted_step_ms"] > 0
    assert lost["predicted_step_error"] is None


def test_repeats_are_pooled_over_processes():
    runs = [(0.10, 0.12), (0.20, 0.22, 0.24), (0.30,)]
    row = only_row(*(make_record(make_config(repeat=i), times) for i, times in enumerate(runs)))
    means = [statistics.mean(times) for times in runs]
    squares = sum(
        (time - mean) ** 2 for times, mean in zip(runs, means, strict=True) for time in times
    )
    half_width = scipy.stats.t.ppf(0.975, 2) * statistics.stdev(means) / math.sqrt(3)
    assert row["step_mean_ms"] == pytest.approx(1e3 * statistics.mean(means))
    assert row["step_std_ms"] == pytest.approx(1e3 * math.sqrt(squares / (1 + 2 + 0)))
    assert row["step_median_ms"] == pytest.approx(210)
    assert row["step_min_ms"] == pytest.approx(100)
    assert row["step_ci95_high_ms"] - row["step_mean_ms"] == pytest.approx(1e3 * half_width)
    assert row["step_mean_ms"] - row["step_ci95_low_ms"] == pytest.approx(1e3 * half_width)


def test_the_same_record_twice_is_one_process():
    record = make_record(make_config(), (0.1, 0.2))
    assert (step_results([record, record])) == (step_results([record]))


def test_a_single_time_has_neither_deviation_nor_interval():
    row = only_row(make_record(make_config(), (0.1,)))
    unknown = ("step_std_ms", "step_cv", "step_ci95_low_ms", "step_ci95_high_ms", "forward_std_ms")
    assert [row[name] for name in unknown] == [None] * 5
    assert row["step_mean_ms"] == pytest.approx(100)


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
def test_a_failed_run_has_a_row_and_no_quantity(status):
    row = only_row(make_failure(make_config(), status, "why"))
    assert (row.status, row.error, row["size"]) == (status, "why", "small")
    names = names_in(CONTRACT)
    measured = names[names.index("forward_mean_ms") : names.index("predicted_peak_gib")]
    assert {row[name] for name in (*measured, "device_name")} == {None}


def test_a_failed_repeat_shows_beside_the_times_of_the_others():
    config = make_config()
    row = only_row(
        make_failure(replace(config, repeat=2), Status.CRASHED, "later"),
        make_record(config, (0.1, 0.1), codes=[WarningCode.DRIFT]),
        make_failure(replace(config, repeat=1), Status.KILLED, "first"),
    )
    assert (row["status"], row["error"]) == ("killed", "first")
    assert row["warnings"] == "drift;2-of-3-repeats-failed"
    assert row["step_mean_ms"] == pytest.approx(100)


@pytest.mark.parametrize("seed", range(10))
def test_processes_that_differ_by_more_than_chance_put_their_mean_in_doubt(seed):
    """Drawn means of quiet processes: the warning is there from 15 % between any two of them, and
    the deviation of a gain, which is of steps, is then left out.
    """
    rng = random.Random(seed)
    means_s = [0.1 * (1 + rng.choice([0, 0.05, 0.12, 0.17, 1])) for _ in range(rng.randint(1, 4))]
    config = make_config()
    row = only_row(
        *(
            make_record(replace(config, repeat=repeat), (mean_s * 0.999, mean_s * 1.001))
            for repeat, mean_s in enumerate(means_s)
        )
    )
    are_apart = max(means_s) / min(means_s) > 1.149
    assert row["warnings"] == ("processes-apart" if are_apart else None)
    gain = Gain.over(row, row, 1)
    assert (gain.std is None, gain.is_doubted) == (are_apart, are_apart)


def test_devices_are_not_pooled_and_a_nameless_failure_joins_the_only_one():
    config = make_config()
    one, two = make_record(config, (0.1,)), make_record(config, (0.3,), device_name="NVIDIA A100")
    nameless = make_failure(replace(config, repeat=1))
    means_ms = [result.step_mean_ms for result in step_results([one, two])]
    assert means_ms == pytest.approx([300, 100])
    assert len(step_results([one, nameless])) == 1
    assert len(step_results([one, two, nameless])) == 3


def test_unknown_hardware_has_no_mfu_and_an_own_model_no_flops():
    unknown = only_row(make_record(make_config(), (0.1,), device_name="Abacus"))
    assert unknown["mfu"] is None
    assert unknown["model_tflops_per_s"] is not None
    own = only_row(make_record(make_config(model_factory="pkg.mod:make"), (0.1,), peak_bytes=None))
    assert [own[name] for name in ("mfu", "model_tflops_per_s", "peak_allocated_gib")] == [None] * 3
    assert own["arch"] == "pkg.mod:make"


OWN = {"model_factory": "pkg.mod:make"}


def test_the_inside_of_an_own_model_is_not_claimed():
    """What the factory was offered is said to be that; the tokens and the vocabulary it has to
    keep to.
    """
    own = only_row(make_record(make_config("tiny", **OWN), (0.1,)))
    assert [own[name] for name in ("d_model", "d_ff", "num_layers", "num_heads", "attention")] == [
        None
    ] * 5
    assert own["size"] == "make tiny"
    assert (own["vocab_size"], own["context_length"], own["batch_size"]) == (10_000, 128, 4)


def test_an_own_model_that_takes_no_sizes_has_its_name_alone():
    own = only_row(make_record(make_config("own", **OWN), (0.1,)))
    assert (own["size"], own["vocab_size"]) == ("make", None)


def test_own_models_that_were_offered_different_shapes_are_told_apart():
    """In results.csv, where every text says what made the difference, and in the pictures."""
    shape = {"d_model": 64, "d_ff": 96, "num_layers": 3, "num_heads": 2}
    changes = {
        "make tiny": {},
        "make, d_model 64, d_ff 96, num_layers 3, num_heads 2": shape,
        "make, d_model 64, d_ff 96, num_layers 5, num_heads 2": shape | {"num_layers": 5},
        "make tiny, attention sdpa": {"attention": Attention.SDPA},
        "make tiny, attention sdpa, sdpa_backend flash": {
            "attention": Attention.SDPA,
            "sdpa_backend": SdpaBackend.FLASH,
        },
        "make tiny, arch gpt2": {"arch": Arch.GPT2},
        "make tiny, rope_theta 1e+06": {"rope_theta": 1e6},
    }
    records = [
        make_record(make_config("tiny" if "tiny" in text else "custom", model=model, **OWN), (0.1,))
        for text, model in changes.items()
    ]
    results = step_results(records)
    assert {result["size"] for result in results} == set(changes)
    assert len({*names_of([result.identity for result in results])}) == len(changes)
    gpt2 = only_row(make_record(make_config("gpt2", **OWN), (0.1,)))
    assert gpt2["size"] == "make gpt2", "of GPT-2's architecture, as the preset is"


def test_modes_without_a_phase_leave_its_columns_empty():
    row = only_row(make_record(make_config(mode=Mode.FORWARD), (0.1,)))
    assert (row["backward_mean_ms"], row["optimizer_mean_ms"]) == (None, None)
    record = make_record(make_config(tokens="tokens.npy"), (0.1,))
    data = Measurement(Phase.DATA, (0.001,))
    found = only_row(replace(record, measurements=(data, *record.measurements)))
    assert (found["data_mean_ms"], found["step_mean_ms"]) == pytest.approx((1, 100))
    assert row["data_mean_ms"] is None


def test_a_record_that_is_ok_without_times_is_not_fatal():
    record = make_record(make_config(), (0.1,))
    assert only_row(replace(record, measurements=()))["step_mean_ms"] is None
    assert only_row(make_record(make_config(), (0.0, 0.0)))["tokens_per_s"] is None


def test_attention_and_compile_say_what_was_chosen():
    flash = {"attention": Attention.SDPA, "sdpa_backend": SdpaBackend.FLASH}
    configs = {
        "naive none": make_config(),
        "sdpa none": make_config(model={"attention": Attention.SDPA}),
        "sdpa-flash default": make_config(model=flash, compile=CompileMode.DEFAULT),
        "naive default-blocks": make_config(compile=CompileMode.DEFAULT, compile_blocks=True),
    }
    for expected, config in configs.items():
        row = only_row(make_failure(config))
        assert f"{row['attention']} {row['compile']}" == expected


def test_rows_stand_in_the_order_of_the_presets(monkeypatch):
    # forecasts would take minutes, for so many
    monkeypatch.setattr(configurations, "prepare_forecasts", lambda _: None)
    sizes = [name for name, model in SIZES.items() if model.arch is Arch.CS336]
    ordered = [
        make_config(size, context, precision=precision, mode=mode, warmup_steps=warmup)
        for size in (*sizes, "custom")
        for context in (64, 128, 1024)
        for precision in Precision
        for mode in Mode
        for warmup in (0, 5, 10)
    ]
    shuffled = random.Random(0).sample(ordered, len(ordered))
    assert [result.config for result in step_results(map(make_failure, shuffled))] == ordered


def test_speed_up_is_over_the_same_configuration_in_fp32(grid):
    results = step_results(grid)
    bf16 = [result for result in results if result["precision"] == "bf16"]
    assert [result.speed_up for result in bf16] == [pytest.approx(2)] * 3 + [None]
    assert bf16[0].gain(("precision",)).std == pytest.approx(2 * math.sqrt(2) * 0.1)
    assert {result.speed_up for result in results if result["precision"] == "fp32"} == {None}


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"sync_phases": True},
        {"warmup_steps": 4},
        {"model_factory": "a:b"},
        {"batch_size": 2},
    ],
    ids=str,
)
def test_speed_up_compares_no_two_runs_that_differ_in_more(other):
    records = [
        make_record(make_config(**other), (0.2,)),
        make_record(make_config(precision=Precision.BF16), (0.1,)),
    ]
    assert {result.speed_up for result in step_results(records)} == {None}


def test_each_speed_up_is_over_the_first_value_of_one_setting_alone():
    """Eager and naive takes 1.2 s; attention makes it 2 times as fast, compilation 3 times, the
    optimizer 1.5 times.
    """
    made = {
        (attention, compiled, optimizer): make_record(
            make_config(model={"attention": attention}, compile=compiled, optimizer=optimizer),
            (1.2 / speed,),
        )
        for attention, compiled, optimizer, speed in [
            ("naive", "none", "adamw", 1),
            ("sdpa", "none", "adamw", 2),
            ("naive", "default", "adamw", 3),
            ("sdpa", "default", "adamw", 6),
            ("sdpa", "default", "fused", 9),
        ]
    }
    results = step_results(made.values())
    rows = {(row["attention"], row["compile"], row["optimizer"]): row for row in results}
    expected = {
        ("naive", "none", "adamw"): (None, None, None),
        ("sdpa", "none", "adamw"): (2, None, None),
        ("naive", "default", "adamw"): (None, 3, None),
        ("sdpa", "default", "adamw"): (2, 3, None),
        ("sdpa", "default", "fused"): (None, None, 1.5),
    }
    for name, values in expected.items():
        columns = ("attention_speed_up", "compile_speed_up", "optimizer_speed_up")
        assert [rows[name][key] for key in columns] == pytest.approx(list(values))
    assert {result.speed_up for result in results} == {None}


def test_speed_up_compares_no_two_devices():
    full = make_record(make_config(), (0.2,), device_name="NVIDIA A100")
    fast = make_record(make_config(precision=Precision.BF16), (0.1,))
    assert {result.speed_up for result in step_results([full, fast])} == {None}


def test_over_warmup_keeps_only_what_varies_beside_the_first_step(warmup_records):
    other = make_record(make_config("medium"), (0.1,))
    results = over_warmup(step_results([*warmup_records, other]))
    assert [result.warmup_steps for result in results] == [0, 1, 2, 5]
    first_ms = [result.first_step_ms for result in results]
    assert first_ms == pytest.approx([1000, 200, None, 100])
    means_ms = [result.step_mean_ms for result in results]
    assert means_ms == pytest.approx([400, 400 / 3, None, 100])
    assert [result.status for result in results] == ["ok", "ok", "killed", "ok"]
    assert over_warmup(step_results(warmup_records[:1])) == []


def test_the_predicted_peak_stands_beside_the_measured_one():
    """By another road than the columns': the prediction that the command prints."""
    config = make_config("medium", 256)
    row = only_row(make_record(config, (0.1,), peak_bytes=2**30))
    assert row["predicted_peak_gib"] == predict_memory(config).peak.allocated_bytes / 2**30 > 5
    assert only_row(make_failure(config))["predicted_peak_gib"] == row["predicted_peak_gib"]
    first = predict_memory(config).first_step_peak.allocated_bytes
    cold = only_row(make_record(replace(config, warmup_steps=0), (0.1,)))
    assert cold["predicted_peak_gib"] == max(row["predicted_peak_gib"], first / 2**30)
    assert (
        only_row(make_record(replace(config, device=Device.CPU), (0.1,)))["predicted_peak_gib"]
        is None
    )
    assert (
        only_row(make_record(make_config(model_factory="pkg.mod:make"), (0.1,)))[
            "predicted_peak_gib"
        ]
        is None
    )


def test_the_time_of_collectives_is_foretold_from_ceilings_of_as_many_ranks():
    """One all-reduce of 4 bytes for each parameter: of 11 MiB, a MiB/ms here, on two of these
    GPUs only.
    """
    cell = CollectiveCell(num_bytes=2**20, world_size=2, timing=lasting(1e-3))
    ceilings = Ceilings((make_ceilings(reductions=(cell,)),))
    for ranks, milliseconds in ((2, 4 * 3_084_928 / 2**20), (4, None)):
        record = make_record(make_config("tiny", parallel=Parallel.DDP_FLAT, ranks=ranks), (0.1,))
        (row,) = step_results([record], ceilings)
        assert row["predicted_collectives_ms"] == (milliseconds and pytest.approx(milliseconds))
    (row,) = list(
        step_results(
            [make_record(make_config("tiny", parallel=Parallel.FSDP, ranks=2), (0.1,))], ceilings
        )
    )
    assert row["predicted_collectives_ms"] is None, "all-gathers were not measured"


Counter = namedtuple("Counter", "energy_per_step_j")
Rank = namedtuple("Rank", "telemetry")


def with_energy(repeat, *energies_j, missing=0):
    """A run with the counters of these GPUs, one for each rank; of `missing` ranks nothing is
    kept.
    """
    ranks = tuple(Rank(Counter(energy_j)) for energy_j in energies_j)
    number = len(ranks) + missing
    parallel = Parallel.DDP if number > 1 else Parallel.NONE
    record = make_record(make_config(repeat=repeat, ranks=number, parallel=parallel), (0.1,))
    return replace(record, telemetry=ranks[0].telemetry, ranks=ranks if number > 1 else ())


def test_the_energy_of_a_step_is_not_known_while_a_rank_is_missing():
    assert only_row(with_energy(0, 10.0, 11.0)).energy_per_step_j == 21
    assert only_row(with_energy(0, 10.0, 11.0, missing=1)).energy_per_step_j is None


def test_what_ranks_send_is_not_0_where_it_was_not_counted():
    record = make_record(make_config(ranks=2, parallel=Parallel.DDP), (0.1,))
    assert only_row(record).sent_mib is None
    sent = Traffic(collective="allreduce", count=1, payload_bytes=2**21, sent_bytes=2**20)
    assert only_row(replace(record, traffic=())).sent_mib == 0
    assert only_row(replace(record, traffic=(sent, sent))).sent_mib == 2


@pytest.mark.parametrize(
    ("energies_j", "expected"),
    [([(10.0,), (14.0,)], 12), ([(10.0, 11.0)], 21), ([(10.0, None)], None), ([(None,)], None)],
)
def test_energy_is_that_of_all_gpus_and_only_the_table_of_a_run_shows_it(energies_j, expected):
    row = only_row(*(with_energy(i, *of_gpus) for i, of_gpus in enumerate(energies_j)))
    assert row.energy_per_step_j == expected
    for has_csv in (True, False):
        names = [heading.name for heading in results_table([row], has_csv=has_csv).headings]
        assert ("energy" in names) is (expected is not None and not has_csv)
