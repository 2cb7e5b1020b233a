"""Tables, answers and files over several profiled runs, made of hand-made profiles and records."""

import csv
from dataclasses import replace

import pytest
import torch
from matplotlib.image import imread

from cs336_systems.analysis.kernels.step_profile import write_profile
from cs336_systems.config import Arch, CompileMode, Phase, Precision, Profiler
from cs336_systems.model.transformer import Linear, TransformerLM
from cs336_systems.report.entries import labels
from cs336_systems.report.formats import WRITERS
from cs336_systems.report.sections.kernels.shares import expected_linear
from cs336_systems.report.sections.kernels.sweep import Profiled, load_profiled, sweep_tables, write_kernel_sweep
from cs336_systems.sweep.store import kernel_profile_path
from tests.report.making import HOSTILE, make_config, make_failure, make_record
from tests.report.sections.kernels.profiles import (
    BACKWARD,
    FORWARD,
    GEMM_A,
    OPTIMIZER,
    UNKNOWN,
    make_cpu_profile,
    make_inference,
    make_kernels,
    make_products,
    make_profile,
)

TABLES = ("phases", "classes", "products", "slowdown", "attention", "top_kernels")


def entry(profile=None, step_s=(0.030, 0.032), plain_s=(0.024, 0.026), size="small", **fields):
    """A run under nsys; the forward of a plain run takes a quarter of its step."""
    config = make_config(size, profiler=Profiler.NSYS, **fields)
    plain = None if plain_s is None else make_record(config.unprofiled, plain_s)
    profiled = make_record(config, step_s)
    return Profiled(config=config, profile=profile or make_profile(), plain=plain, profiled=profiled)


def written(entries, directory):
    """Rows of each CSV file by name."""
    found = {}
    for path in write_kernel_sweep(entries, directory):
        if path.suffix == ".csv":
            with path.open(newline="") as file:
                found[path.stem] = list(csv.DictReader(file))
    return found


def row(rows, **wanted):
    (found,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return found


def test_phases_beside_the_clock_of_the_plain_run(tmp_path) -> None:
    """Forward: 8 ms wall, 5 ms of kernels; the plain step takes 25 ms, its forward 6.25."""
    rows = written([entry(), entry(precision=Precision.BF16, plain_s=None)], tmp_path)["phases"]
    forward = row(rows, precision="fp32", phase="forward")
    assert float(forward["kernels_per_step"]) == 7
    assert float(forward["kernel_mean_ms"]) == pytest.approx(5)
    assert float(forward["wall_mean_ms"]) == pytest.approx(8)
    assert float(forward["busy_share"]) == pytest.approx(10 / 16)
    assert float(forward["clock_mean_ms"]) == pytest.approx(6.25)
    assert float(forward["wall_over_clock"]) == pytest.approx(8 / 6.25)
    step = row(rows, precision="fp32", phase="step")
    assert float(step["wall_mean_ms"]) == pytest.approx(26)
    assert float(step["clock_mean_ms"]) == pytest.approx(25)
    assert row(rows, precision="bf16", phase="forward")["clock_mean_ms"] == ""
    table = sweep_tables([entry()])[0]
    cells = dict(zip([heading.name for heading in table.headings], table.rows[0], strict=True))
    assert cells == {"phase": "forward", "kernels": "7", "GPU time": "5.000",
                     "wall": "8.000", "GPU busy": "62.5", "clock": "6.250", "wall vs clock": "+28.0"}  # fmt: skip


def test_classes_add_up_to_one_in_each_phase(tmp_path) -> None:
    rows = written([entry(), entry(make_inference(), mode="inference")], tmp_path)["classes"]
    assert [(r["mode"], r["phase"]) for r in rows] == [
        *(("train", phase) for phase in ("forward", "backward", "optimizer", "step")),
        ("inference", "forward"), ("inference", "step"),
    ]  # fmt: skip
    for found in rows:
        assert sum(float(value) for name, value in found.items() if name.endswith("_share")) == pytest.approx(1)
    # 22 of 40 ms
    assert float(row(rows, mode="train", phase="step")["matrix_product_share"]) == pytest.approx(0.55)


@pytest.mark.parametrize("arch", list(Arch))
def test_expected_products_are_those_of_the_model_s_linear_layers(arch: Arch) -> None:
    """One product for each linear layer in forward, and two of those that autograd runs, counted on a real model."""
    config = make_config("tiny", 8, model={"arch": arch, "num_layers": 3})
    model = TransformerLM(config.model)
    layers = sum(isinstance(module, Linear) for module in model.modules())
    assert expected_linear(config, FORWARD) == layers
    logits = model(torch.zeros(1, 8, dtype=torch.long))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        logits.sum().backward()
    count = sum(event.count for event in profiler.key_averages() if event.key == "aten::mm")
    assert expected_linear(config, BACKWARD) == count
    assert expected_linear(config, OPTIMIZER) is None


def test_products_as_expected_or_not(tmp_path) -> None:
    """small has 12 layers: 85 products of linear layers in forward and 170 in backward, over two steps twice that."""
    right = make_profile(products=(make_products(FORWARD, 170, 3, 48, 3), make_products(BACKWARD, 340, 8, 96, 8)))
    unknown = make_profile(products=(make_products(FORWARD, 0, 0, unknown=218, unknown_ms=6),))
    entries = [entry(right), entry(precision=Precision.BF16), entry(unknown, precision=Precision.TF32)]
    rows = written(entries, tmp_path)["products"]
    assert [(r["precision"], r["phase"], r["as_expected"]) for r in rows] == [
        ("fp32", "forward", "yes"), ("fp32", "backward", "yes"),
        ("bf16", "forward", "no"), ("bf16", "backward", "no"), ("tf32", "forward", ""),
    ]  # fmt: skip
    assert [r["linear_expected"] for r in rows] == ["85", "170", "85", "170", "85"]
    assert float(rows[0]["linear_per_step"]) == 85
    assert float(rows[0]["linear_ms_per_step"]) == pytest.approx(1.5)


@pytest.mark.parametrize("changes", [{"compile": CompileMode.DEFAULT}, {"model_factory": "mine:make"}])
def test_nothing_is_expected_of_a_model_that_is_not_known(changes: dict) -> None:
    assert expected_linear(make_config(**changes), FORWARD) is None


def test_slowdown_is_the_profiled_step_over_the_plain_one(tmp_path) -> None:
    """31 over 25 ms; 25 kernels a step."""
    (found,) = written([entry()], tmp_path)["slowdown"]
    assert float(found["plain_step_mean_ms"]) == pytest.approx(25)
    assert float(found["profiled_step_mean_ms"]) == pytest.approx(31)
    assert float(found["slowdown"]) == pytest.approx(31 / 25)
    assert float(found["kernels_per_step"]) == 25
    (alone,) = written([entry(plain_s=None)], tmp_path)["slowdown"]
    assert (alone["plain_step_mean_ms"], alone["slowdown"]) == ("", "")


def test_attention_and_the_longest_kernels(tmp_path) -> None:
    """Softmax 1 ms and products 3 ms over two steps, 0.15 and 6 GFLOP; gemm_a 14 of 40 ms."""
    found = written([entry()], tmp_path)
    forward = row(found["attention"], phase="forward")
    assert float(forward["softmax_ms_per_step"]) == pytest.approx(0.5)
    assert float(forward["products_ms_per_step"]) == pytest.approx(1.5)
    assert float(forward["time_per_flop_ratio"]) == pytest.approx((1 / 3) / (0.15 / 6))
    step = row(found["top_kernels"], of="step")
    assert step["name"] == GEMM_A
    assert float(step["share"]) == pytest.approx(14 / 40)
    assert float(step["total_ms_per_step"]) == pytest.approx(7)
    assert float(step["count_per_step"]) == 8


def test_every_file_is_written_and_none_of_a_table_without_rows(tmp_path) -> None:
    paths = write_kernel_sweep([entry(), entry(context_length=512)], tmp_path)
    endings = ("csv", *WRITERS)
    names = {f"{name}.{ending}" for name in TABLES for ending in endings}
    assert {path.relative_to(tmp_path).as_posix() for path in paths} == names | {
        "answers.md",
        "plots/configurations.png",
    }
    assert imread(tmp_path / "plots" / "configurations.png").ndim == 3
    write_kernel_sweep([entry(make_profile(attention=()))], tmp_path)
    assert not list(tmp_path.glob("attention.*"))
    assert (tmp_path / "phases.md").exists()


def test_no_entries_no_files(tmp_path) -> None:
    assert write_kernel_sweep([], tmp_path / "nothing") == []
    assert not (tmp_path / "nothing").exists()
    assert sweep_tables([]) == []


def test_answers_of_each_configuration_below_what_they_share(tmp_path) -> None:
    """Forward takes 8 ms by the trace, 6.25 and 8 ms by the clock; products have 60 and 90 % of forward."""
    names = {FORWARD: ((GEMM_A, 2, 9), (UNKNOWN, 2, 1))}
    other = make_inference(kernels=make_kernels(names), classes=tuple(
        replace(found, total_s=total_s)
        for found, total_s in zip(make_inference().classes, (0.009, 0.0005, 0.0005), strict=True)
    ))  # fmt: skip
    write_kernel_sweep([entry(), entry(other, context_length=512, plain_s=(0.032, 0.032))], tmp_path)
    text = (tmp_path / "answers.md").read_text()
    assert text.count("\n## ") == 5
    assert text.count("\n**small ctx 128**: ") == text.count("\n**small ctx 512**: ") == 5
    assert (
        "Trace and clock agree within 2 % in 1 of 2 configurations; they differ most in small ctx 128, where the trace "
        "is 28.0 % longer."
    ) in text
    assert "Matrix products take 60.0 % (small ctx 128) to 90.0 % (small ctx 512) of forward, and 55.0 %" in text
    assert "besides matrix products take 10.0 % (small ctx 512) to 40.0 % (small ctx 128) of forward" in text
    write_kernel_sweep([entry()], tmp_path)
    assert "configurations" not in (tmp_path / "answers.md").read_text(), "one configuration needs no summary"


def test_labels_say_what_differs() -> None:
    entries = [entry(), entry(precision=Precision.BF16), entry(context_length=512), entry(size="xl")]
    assert labels(entries) == ["small ctx 128 fp32", "small ctx 128 bf16", "small ctx 512 fp32", "xl ctx 128 fp32"]
    shapes = [entry(size="custom", model={"num_layers": layers}) for layers in (2, 4)]
    assert labels(shapes) == ["custom ctx 128 num_layers 2", "custom ctx 128 num_layers 4"]
    assert labels([entry(), entry(repeat=1)]) == ["small ctx 128 #0", "small ctx 128 #1"]


def test_profiles_are_loaded_with_their_plain_twins(tmp_path, capsys) -> None:
    """Of five records two are plain, one was profiled for memory and one profile is missing, one unreadable."""
    kernel = make_config(profiler=Profiler.NSYS)
    missing, broken = (make_config(profiler=Profiler.NSYS, precision=kind) for kind in (Precision.BF16, Precision.TF32))
    other_device = make_record(kernel.unprofiled, (0.5,), device_name="NVIDIA A100-SXM4-80GB")
    plain = make_record(kernel.unprofiled, (0.02,))
    records = [other_device, plain, make_record(kernel, (0.03,)), make_failure(missing), make_record(broken, (0.03,)),
               make_record(make_config(profiler=Profiler.MEMORY), (0.03,))]  # fmt: skip
    runs = tmp_path / "runs"
    kernel_profile_path(kernel, runs).parent.mkdir()
    write_profile(make_profile(), kernel_profile_path(kernel, runs))
    kernel_profile_path(broken, runs).write_bytes(b"{")
    (found,) = load_profiled(records, tmp_path)
    assert (found.config, found.profile, found.plain, found.profiled) == (kernel, make_profile(), plain, records[2])
    assert found.clock_s(Phase.FORWARD) == pytest.approx(0.005)
    second, first = capsys.readouterr().err.splitlines()  # in the order of the tables: tf32 before bf16
    assert "bf16" in first
    assert "No such file" in first
    assert "the run ended as oom" in first
    assert "tf32" in second
    assert "not a step profile" in second


def test_a_run_without_a_plain_twin_has_no_clock(tmp_path) -> None:
    config = make_config(profiler=Profiler.KINETO)
    kernel_profile_path(config, tmp_path / "runs").parent.mkdir()
    write_profile(make_profile(), kernel_profile_path(config, tmp_path / "runs"))
    records = [make_failure(config.unprofiled), make_record(config, (0.03,))]
    (found,) = load_profiled(records, tmp_path)
    assert found.plain is None
    assert found.clock_s(Phase.STEP) is None


def test_traces_of_a_cpu_speak_of_operators() -> None:
    tables = sweep_tables([entry(make_cpu_profile())])
    headings = [heading.name for table in tables for heading in table.headings]
    assert "operators" in headings
    assert "CPU time" in headings
    assert not any("GPU" in name or "kernel" in name for name in headings)


def test_hostile_names_are_inert_in_every_file(tmp_path) -> None:
    name = HOSTILE + "x" * 8000
    kernels = make_kernels({FORWARD: ((name, 2, 10),)})
    directory = tmp_path / "sweep"
    write_kernel_sweep([entry(make_profile(kernels=kernels, source=name), size=HOSTILE)], directory)
    for ending in ("md", "tex", "typ"):
        text = (directory / f"top_kernels.{ending}").read_text()
        assert not any(character in text for character in "\r\t\0\x1b")
    assert "<" not in (directory / "top_kernels.md").read_text() + (directory / "answers.md").read_text()
    assert r"\input{" not in (directory / "top_kernels.tex").read_text()
    with (directory / "top_kernels.csv").open(newline="") as file:
        assert all(found["name"].startswith("'=HYPERLINK") for found in csv.DictReader(file))
