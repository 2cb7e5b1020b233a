"""What the flags mean on a machine with a GPU and without, what they cannot mean, and where
results go.
"""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from cs336.cli import main, sweep
from cs336.commands import configure, machine
from cs336.commands import parse as parser
from cs336.commands import sweep as sweep_module
from cs336.commands.benchmark import BenchmarkArguments
from cs336.commands.flags import MAX_NAME_LENGTH, SETTING_FIELDS
from cs336.commands.plan import PlanArguments
from cs336.commands.sweep import SweepArguments, default_name
from cs336.config import SIZES, Device, Mode, ModelConfig, Phase, Precision, Profiler, RunConfig
from cs336.costs.time import step_time
from cs336.measure import nvml
from cs336.measure.nvml import Gpu
from cs336.model.fast.choose import fastest
from cs336.record import load_records
from cs336.settings import flag_of
from cs336.studies.ceilings_files import load_ceilings
from tests.neighbours import make_bases, neighbours, settings_of

ROOT = Path(__file__).parents[2]
DATA = ROOT / "data" / "published"
H100 = Gpu(index=0, uuid="GPU-1", name="NVIDIA H100 80GB HBM3", memory_bytes=2**36, driver="580.1")


def see(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu) -> None:
    for module in (configure, machine, nvml, sweep_module):
        monkeypatch.setattr(module, "visible_gpus", lambda: gpus)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> None:
    see(monkeypatch, H100)


@cache
def parse(kind: type, flags: str) -> object:
    return parser.parse(kind, "command", shlex.split(flags))


def one(flags: str = "") -> RunConfig:
    return parse(BenchmarkArguments, flags).config()


def grid(flags: str = "") -> list[RunConfig]:
    return list(parse(SweepArguments, flags).plan().configs)


def name(flags: str = "") -> str:
    return default_name(parse(SweepArguments, flags))


def test_without_flags_a_cpu_trains_and_sweeps_tiny() -> None:
    assert one() == RunConfig(
        size="tiny", model=replace(SIZES["tiny"], context_length=128), device=Device.CPU
    )
    assert (one().mode, one().precision, one().batch_size) == (Mode.TRAIN, Precision.FP32, 4)
    assert (one().warmup_steps, one().measured_steps) == (5, 10)
    assert grid() == [
        replace(one(), model=replace(one().model, context_length=length))
        for length in (64, 128, 256)
    ]


@pytest.mark.usefixtures("gpu")
def test_without_flags_a_gpu_trains_small_and_sweeps_the_assignment_s_grid() -> None:
    assert one() == RunConfig(
        size="small", model=replace(SIZES["small"], context_length=512), device=Device.CUDA
    )
    assert (one("--device cpu").size, one("--device cpu").device) == ("tiny", Device.CPU)
    assert one("--device cuda") == one()
    expected = [
        (size, length)
        for size in ("small", "medium", "large", "xl", "2.7B")
        for length in (128, 256, 512)
    ]
    assert sorted((c.size, c.model.context_length) for c in grid()) == sorted(expected)
    assert {(c.device, c.mode, c.precision) for c in grid()} == {
        (Device.CUDA, Mode.TRAIN, Precision.FP32)
    }


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


NO_TOKENS = {
    b"hello, world\n": "got b'hello,'",
    b"": "got 0",
    saved(np.zeros(129, np.uint16))[:-1]: "not a .npy file of numbers .mmap length is greater",
    saved(np.zeros(200)): "needed one axis of integers, found 1 axes of float64",
    saved(np.zeros((20, 20), np.int32)): "found 2 axes of int32",
    saved(np.zeros(128, np.int32)): "needed more than context_length = 128 tokens, found 128",
}
"""Contents of files that a step of tiny on a CPU, at context 128, cannot take for tokens, and
what is said of them.
"""


def test_a_token_file_that_is_none_is_said_before_any_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for content, problem in NO_TOKENS.items():
        Path("t.npy").write_bytes(content)
        with pytest.raises(ValueError, match=f"^--tokens t.npy: .*{problem}"):
            one("--tokens t.npy")


def typed(config: RunConfig) -> str:
    """The flags of a configuration of another shape than its preset's."""
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in NO_FLAG}
    values |= {
        f.name: getattr(config.model, f.name) for f in fields(config.model) if f.name not in NO_FLAG
    }
    words = ["--size tiny", *(["--model " + config.model_factory] if config.model_factory else [])]
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words += (
                [] if value == (name == "ranges") else [f"--{flag}" if value else f"--no-{flag}"]
            )
        elif value is not None:
            words.append(f"--{flag} {value}")
    return " ".join(words)


NO_FLAG = ("size", "model", "model_factory", "profiler", "repeat", "arch")


def test_every_setting_has_a_flag(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for check in ("check_tokens", "check_factory"):
        monkeypatch.setattr(configure, check, lambda *_: None)
    monkeypatch.setattr("cs336.model.fast.packages.is_installed", lambda _: True)
    bases = make_bases(RunConfig, ModelConfig)
    for where, field in settings_of(bases[0]):
        if field.name not in ("size", "profiler", "repeat", "arch", "update_in_backward", "blocks"):
            pair, *_ = neighbours(bases, where, field.name)
            assert tuple(one(typed(config)) for config in pair) == pair


UNDER_NSYS = "NSYS_PROFILING_SESSION_ID"


def test_a_run_that_nsys_started_is_a_profiled_one(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert one().profiler is Profiler.NONE
    monkeypatch.setenv(UNDER_NSYS, "1")
    assert one().profiler is Profiler.NSYS
    assert one("--device cpu").profiler is Profiler.NONE, (
        "nsys sees no kernels there, and slows next to nothing"
    )
    with pytest.raises(ValueError, match="two profilers"):
        one("--profile")


def test_a_profiled_sweep_runs_each_configuration_without_the_profiler_too(gpu: None) -> None:
    for flag, profiler, folder in (
        ("--nsys", Profiler.NSYS, "nsys_profiles"),
        ("--profile", Profiler.KINETO, "kineto_profiles"),
    ):
        configs = grid(f"--sizes small xl --context-lengths 128 {flag} --repeats 2")
        plain = [config for config in configs if config.profiler is Profiler.NONE]
        assert plain == grid("--sizes small xl --context-lengths 128 --repeats 2")
        profiled = [config for config in configs if config.profiler is profiler]
        assert [config.unprofiled for config in profiled] == [
            config for config in plain if config.repeat == 0
        ]
        assert len(configs) == len(plain) + len(profiled)
        assert parse(SweepArguments, flag).directory().parent == Path("data") / folder
    with pytest.raises(ValueError, match="choose one"):
        grid("--nsys --profile")


def test_a_sweep_is_not_run_under_nsys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(UNDER_NSYS, "1")
    assert sweep(["--output", str(tmp_path / "out")]) == 2
    assert "--nsys" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_grid_is_every_combination_once_sizes_first() -> None:
    configs = grid(
        "--sizes small medium --context-lengths 16 32 --modes forward train --precisions fp32 bf16 "
        "--warmup-steps 0 5"
    )
    seen = [
        (c.size, c.model.context_length, c.mode.value, c.precision.value, c.warmup_steps)
        for c in configs
    ]
    by_hand = [
        (size, length, mode, precision, warmup)
        for size in ("small", "medium")
        for length in (16, 32)
        for mode in ("forward", "train")
        for precision in ("fp32", "bf16")
        for warmup in (0, 5)
    ]
    assert seen == by_hand


def test_what_is_asked_for_twice_runs_once() -> None:
    flags = (
        "--sizes tiny tiny --context-lengths 64 64 --modes train train --precisions bf16 bf16 "
        "--warmup-steps 5 5"
    )
    assert grid(flags) == grid("--sizes tiny --context-lengths 64 --precisions bf16")
    assert len(grid("--mixed-precision --precisions bf16 bf16 --context-lengths 64")) == 1
    same_shape = "--d-model 8 --d-ff 8 --num-layers 1 --num-heads 1 --context-lengths 64"
    assert len(grid(f"--sizes small medium {same_shape}")) == 1, "two presets, made into one shape"
    assert len(grid("--sizes small medium --d-model 960 --num-heads 4 --context-lengths 64")) == 2


def test_repeats_go_forth_and_back() -> None:
    configs = grid("--context-lengths 8 16 --repeats 3")
    order = [(c.model.context_length, c.repeat) for c in configs]
    assert order == [(8, 0), (16, 0), (16, 1), (8, 1), (8, 2), (16, 2)]
    assert len({c.key for c in configs}) == 6


# Names


def test_a_plain_name_is_a_directory_below_the_output_and_no_other_is_taken() -> None:
    for text in ("x", "X-1", "_", "run_2.0+a", "0", "a..b", "x" * MAX_NAME_LENGTH):
        assert (
            SweepArguments(name=text, output=Path("out")).directory()
            == Path("out/e2e_benchmark") / text
        )
    for text in (
        "",
        ".",
        "..",
        "../x",
        "/etc/x",
        "a/b",
        "a\\b",
        "-rf",
        ".hidden",
        "~",
        "a b",
        "a\n",
        "a\0b",
        "$(id)",
        "a*",
        "C:",
        "x" * 101,
        "é",
        "a\u202eb",
        "\udcff",
        "%2e",
    ):
        with pytest.raises(
            ValueError, match=r"^--name must be 1 to 100 letters, digits, [^\n\0]*; got '[^\n\0]*$"
        ):
            SweepArguments(name=text).directory()


def test_a_default_name_says_mode_precision_what_differs_and_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert name() == "train_fp32_cpu"
    assert name("--modes forward train --precisions fp32 bf16") == "forward-train_fp32-bf16_cpu"
    assert name("--mixed-precision") == "train_bf16_cpu"
    assert name("--sizes small medium --repeats 3") == "train_fp32_sizes-small-medium_repeats-3_cpu"
    assert (
        name("--attention sdpa --no-ranges --d-ff 64")
        == "train_fp32_d-ff-64_attention-sdpa_ranges-False_cpu"
    )
    assert (
        name("--output elsewhere --fresh --timeout-s 5 --allow-mixed --dry-run --device cpu")
        == "train_fp32_cpu"
    )
    see(monkeypatch, H100)
    assert name() == "train_fp32_NVIDIA-H100-80GB-HBM3"
    assert name("--device cpu") == "train_fp32_cpu"


def test_long_default_names_differ_where_the_flags_do() -> None:
    long = [name(f"--tokens {'x' * 200}{end}") for end in "ab"]
    assert long[0] != long[1]
    assert all(len(each) == MAX_NAME_LENGTH for each in long)
    assert long[0].startswith("train_fp32_tokens-xxx")
    assert re.search(r"_[0-9a-f]{8}$", long[0])


@pytest.mark.usefixtures("gpu")
def test_the_smallest_run_comes_first_and_what_will_not_fit_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An H100 of 64 GiB: 2.7B at context 512 took 57.7 GiB on an H200, and 10B more than 139
    GiB.
    """
    flags = (
        f"--sizes 10B 2.7B small --context-lengths 512 --output {shlex.quote(str(tmp_path))} "
        "--dry-run"
    )
    assert [config.size for config in grid(flags)] == ["small", "2.7B", "10B"]
    assert sweep(shlex.split(flags)) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"will not fit: (\S+)", printed) == ["10B"]
    assert re.search(
        r"small ctx 512 train fp32, 5 \+ 10 steps, .*predicted peak \d\.\d GiB", printed
    )


@pytest.mark.parametrize("flag", ["fp8", "selective-checkpoints --checkpoint-blocks 1"])
def test_fast_leaves_fused_activations_out_for_what_cannot_be_combined_with_them(
    monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    see(monkeypatch, H100)
    monkeypatch.setattr("cs336.model.fast.packages.is_installed", lambda _: True)
    flags = "--device cuda --size xl --context-length 512 --fast"
    assert one(flags).fused_activations
    other = one(f"{flags} --{flag}")
    assert not other.fused_activations
    assert other.fused_blocks
    with pytest.raises(ValueError, match="--fused-activations cannot be combined with --"):
        one(f"{flags} --fused-activations --{flag}")


def test_one_value_of_a_setting_of_the_step_is_the_run_of_that_value() -> None:
    flags = "--attention sdpa --optimizer fused --compile default --batch-size 8"
    assert grid(f"{flags} --context-lengths 64") == [one(f"{flags} --context-length 64")]
    assert name(
        "--attention sdpa --optimizer fused --batch-size 8 --d-ff 64 --checkpoint-blocks 1 "
        "--repeats 3"
    ) == (
        "train_fp32_checkpoint-blocks-1_repeats-3_d-ff-64_attention-sdpa_batch-size-8_optimizer-fu"
        "sed_cpu"
    ), "where the sweeps of earlier versions are found"
    assert (
        name("--attention naive sdpa --batch-size 4 8")
        == "train_fp32_attention-naive-sdpa_batch-size-4-8_cpu"
    )
    assert name("--compile none none --optimizer adamw adamw --attention naive naive") == name()


def test_ranks_are_a_number_that_is_given() -> None:
    assert [one(f"--parallel ddp-overlap --ranks {ranks}").ranks for ranks in (1, 2)] == [1, 2]
    assert [
        config.ranks for config in grid("--parallel none ddp --ranks 1 2 --context-lengths 8")
    ] == [1, 1, 2]
    assert (one().ranks, one("--ranks 1").ranks) == (1, 1)


SOURCE = """
import functools

def takes(vocab_size, *, attention, d_model, **others): ...
def fixed(vocab_size): ...

class Model:
    def __init__(self, vocab_size, num_layers): ...

@functools.wraps(takes)
def wrapped(*values): ...

partial = functools.partial(takes, attention="naive")
if __name__:
    def sometimes(vocab_size): ...
"""


@pytest.mark.parametrize(
    ("factory", "flags", "refused"),
    [
        ("fixed", "--attention sdpa", "--attention sdpa"),
        ("takes", "--attention sdpa --sdpa-backend math", "--sdpa-backend math"),
        ("takes", "--num-layers 3", "--num-layers 3"),
        ("Model", "--rope-theta 5.5", "--rope-theta 5.5"),
        ("fixed", "--size xl", "--size xl"),
        (
            "fixed",
            "--attention naive --size tiny --vocab-size 7 --context-length 9 --batch-size 2",
            None,
        ),
        ("fixed", "--size gpt2", None),
        ("takes", "--attention sdpa --d-model 96 --size small", None),
        ("Model", "--num-layers 3 --size xl", None),
        ("wrapped", "--attention sdpa", None),
        ("partial", "--attention sdpa", None),
        ("sometimes", "--attention sdpa", None),
    ],
)
def test_a_flag_that_an_own_model_does_not_take_is_refused(
    factory: str, flags: str, refused: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary (of gpt2 another one) shapes the tokens; a source that does not tell what
    it takes is believed.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SOURCE)
    own = f"--model mine:{factory} {flags}"
    if refused is None:
        assert one(own).model_factory == f"mine:{factory}"
        return
    with pytest.raises(ValueError, match=f"{refused} would do nothing.*mine:{factory}"):
        one(own)
    plural = own.replace("--context-length ", "--context-lengths ").replace("--size ", "--sizes ")
    with pytest.raises(ValueError, match="would do nothing"):
        grid(plural)
    assert grid(f"--model mine:{factory}")


@pytest.mark.usefixtures("gpu")
def test_fast_is_the_same_step_chosen_by_rule() -> None:
    fast = one("--size xl --fast --batch-size 2 --seed 3")
    compiled = one("--size xl --fast --batch-size 2 --seed 3 --compile default")
    assert compiled == fastest(one("--size xl --batch-size 2 --seed 3"), H100.name)
    assert fast == compiled.with_defaults("compile", "compile_blocks")
    assert (fast.precision, fast.cast_once, fast.cuda_graph) == (Precision.BF16, True, True)
    assert (fast.model.d_model, fast.batch_size, fast.seed, fast.mode) == (1600, 2, 3, Mode.TRAIN)
    assert one("--fast --memory").profiler is Profiler.MEMORY
    plain, recorded = grid("--fast --sizes small --context-lengths 512 --precisions bf16 --memory")
    assert plain.cuda_graph
    assert recorded == replace(plain, cuda_graph=False, profiler=Profiler.MEMORY, measured_steps=2)
    assert name("--fast") == "train_fast_NVIDIA-H100-80GB-HBM3"


@pytest.mark.usefixtures("gpu")
def test_fast_makes_checkpoints_where_the_step_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An H100 of 64 GiB holds the step of xl at batch 4 and not at batch 32; what is asked for
    stays.
    """
    large = "--size xl --fast --batch-size 32"
    assert one("--size xl --fast").checkpoint_blocks == 0
    assert (one(large).checkpoint_blocks, one(large).selective_checkpoints) == (1, True)
    asked = [one(f"{large} --checkpoint-blocks {blocks}") for blocks in (0, 2)]
    assert [(config.checkpoint_blocks, config.selective_checkpoints) for config in asked] == [
        (0, False),
        (2, False),
    ]
    assert one(
        "--size xl --fast --checkpoint-blocks 1 --selective-checkpoints"
    ).selective_checkpoints
    assert (
        sweep(
            [
                "--fast",
                "--sizes",
                "xl",
                "--batch-size",
                "32",
                "--context-lengths",
                "512",
                "--dry-run",
            ]
        )
        == 0
    )
    said = (
        r", selective checkpoints of which \d+ blocks keep hidden activations \(\d+ GiB without\)\n"
    )
    assert re.search(said, capsys.readouterr().err)


def test_fast_knows_what_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 of 16 bytes for each of 3.41e9 parameters are shared by two GPUs of 64 GiB."""
    see(monkeypatch, H100, replace(H100, index=1, uuid="GPU-2"))
    shared = "--parallel ddp-overlap --ranks 2"
    flags = (shared, f"{shared} --shard-optimizer", "--parallel fsdp --ranks 2")
    assert [
        one(f"--size 2.7B --fast --batch-size 16 {each}").checkpoint_blocks for each in flags
    ] == [1, 0, 0]
    # graphs of collectives and expandable segments exclude each other: the flag that is given
    # decides
    large = f"--size 2.7B --fast --batch-size 16 {shared}"
    for given, chosen in (
        ("", (True, False)),
        ("--cuda-graph", (False, True)),
        ("--expandable-segments", (True, False)),
    ):
        config = one(f"{large} {given}")
        assert (config.expandable_segments, config.cuda_graph) == chosen
    fits = one(f"--size xl --fast {shared} --expandable-segments")
    assert (fits.checkpoint_blocks, fits.expandable_segments, fits.cuda_graph) == (0, True, False)


@pytest.mark.usefixtures("gpu")
def test_fast_takes_shortcuts_that_are_asked_for_besides() -> None:
    fast = one("--size xl --fast --fp8")
    # what fp8 computes beside matmuls is compiled; what it rounds lets the stream be rounded too
    compiled = one("--size xl --fast --compile default")
    assert fast == replace(compiled, fp8=True, bf16_stream=True)
    assert one("--size xl --fast --bf16-moments") == replace(
        one("--size xl --fast"), bf16_moments=True
    )
    assert not one("--size xl --fast").bf16_moments
    assert [config.fp8 for config in grid("--fast --fp8 --sizes xl --context-lengths 128")] == [
        True
    ]
    compiled = one("--size xl --fast --compile default")
    assert one("--size xl --fast --compile-blocks") == compiled
    assert one("--size xl --fast --sync-phases") == replace(
        one("--size xl --fast"), sync_phases=True
    )
    with pytest.raises(
        ValueError, match="--cast-once needs --precision bf16, got --precision fp32"
    ):
        one("--fast --cast-once --device cpu")


CONTRARY = {
    "--attention naive": "attention itself, here sdpa: leave out --attention naive",
    "--optimizer adamw": "optimizer itself, here fused: leave out --optimizer adamw",
    "--compile reduce-overhead": (
        "compile itself, here default: leave out --compile reduce-overhead"
    ),
    ("--vocab-size 50257 --pad-vocabulary 1"): (
        "pad vocabulary itself, here 128: leave out --pad-vocabulary 1"
    ),
    "--precision tf32": "precisions? itself, here bf16: leave out --precisions? tf32",
}
"""What --fast says to flags that it would not heed, on a GPU."""


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("flags", CONTRARY)
def test_fast_refuses_what_it_would_not_heed(flags: str) -> None:
    for make in (one, grid):
        with pytest.raises(ValueError, match=f"^--fast chooses {CONTRARY[flags]}$"):
            make(f"--fast {flags}")
    assert one(flags) != one("--fast"), "without --fast there is nothing to refuse"


@pytest.mark.parametrize("kind", [BenchmarkArguments, SweepArguments], ids=["benchmark", "sweep"])
def test_help_shows_common_flags_and_help_all_every_one(
    kind: type, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(word: str) -> set[str]:
        with pytest.raises(SystemExit, match="0"):
            parse(kind, word)
        return set(re.findall(r"(?m)^. (--[a-z0-9-]+)", capsys.readouterr().out))

    common, every = shown("--help"), shown("--help-all")
    assert common < every
    assert len(common) <= 26
    parts_of_fast = {
        flag_of(name, setting)
        for name, (_, setting) in SETTING_FIELDS.items()
        if setting.is_shortcut and setting.help
    }
    assert parts_of_fast & common == {"--compile"}
    assert parts_of_fast <= every


def test_help_is_as_wide_as_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line breaks of the source are none of the help's: one line holds all that is said of a flag,
    after the flag or below it.
    """
    monkeypatch.setenv("COLUMNS", "2000")
    with pytest.raises(SystemExit, match="0"):
        parse(SweepArguments, "--help-all")
    lines = [line.strip("│").rstrip() for line in capsys.readouterr().out.splitlines()]
    below = [(above, line) for above, line in pairwise(lines) if line.startswith(10 * " ")]
    assert below
    for above, line in below:
        assert re.fullmatch(r" *--\S+( \S+)*", above), (above, line)


@pytest.mark.parametrize(
    ("kind", "plural", "declared"),
    [
        (
            BenchmarkArguments,
            "--sizes small --context-lengths=64",
            "--size small --context-length 64",
        ),
        (SweepArguments, "--size tiny small --mode train", "--sizes tiny small --modes train"),
    ],
    ids=["benchmark", "sweep"],
)
def test_singular_and_plural_are_the_same_flag(kind: type, plural: str, declared: str) -> None:
    assert parse(kind, plural) == parse(kind, declared) != parse(kind, "")


@pytest.mark.parametrize("command", ["kernels", "memory", "report", "compare"])
@pytest.mark.parametrize("flags", ["--tpo 3 {}", "{} --tpo 3", "--tpo=3 {}", "--tpo {}", "-q {}"])
def test_an_unknown_flag_is_named_and_not_the_file_behind_it(
    command: str, flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    path.write_text("{}")
    files = f"{path} {path}" if command == "compare" else str(path)
    assert main([command, *flags.format(files).split()]) == 2
    error = capsys.readouterr().err
    assert ("-q" if "-q" in flags else "--tpo") in error
    assert "file" not in error.lower()
    assert str(path) not in error


def test_a_flag_of_a_step_outside_of_the_quotes_is_sent_into_them(capsys) -> None:
    sides = ["compare", "--size tiny", "--size tiny --seed 1"]
    assert main([*sides, "--measured-steps", "3"]) == 2
    error = capsys.readouterr().err
    assert "stand in the quotes of A and of B, got --measured-steps, 3" in error


# What cannot be meant

BENCHMARK = {
    "--batch-size 0": "--batch-size must be at least 1, got 0",
    "--size smal": "unknown size 'smal'; did you mean small?",
    "--size 2.7b": "unknown size '2.7b'; did you mean 2.7B?",
    "--size ../../x": "unknown size '../../x'. Sizes: tiny, small",
    "--size tiny --num-heads 3": "--d-model must be divisible by --num-heads",
    "--precision tf32 --device cpu": "--precision tf32 needs --device cuda",
    "--mixed-precision --precision fp16": "--mixed-precision means bf16",
    "--model no_such_module:make": "no_such_module",
    "--model tests.own_models:no_such_factory": "no_such_factory",
    "--tokens nowhere.npy": "'nowhere.npy' is no file",
    "--device cuda": "--device cuda needs an NVIDIA GPU",
    "--size tiny --checkpoint-blocks 3": "from 0 to the 2 blocks that tiny has",
    "--parallel ddp-overlap": "--parallel ddp-overlap needs --ranks",
    "--profile --memory": "two profilers cannot watch one process",
}
SWEEP = {
    "--context-lengths 64 0 --dry-run": "--context-length must be at least 1, got 0",
    "--name=../../x": "--name must be",
    "--sizes small tiny --checkpoint-blocks 0 4": "blocks that tiny has",
    "--nsys --profile": "got --nsys and --profile: choose one",
}
BY_PARSER = {
    "benchmark": [
        "--batch-size abc",
        "--batch-size 1.5",
        f"--batch-size {'9' * 5000}",
        "--batch-size",
        "--mode sideways",
        "--no-such-flag",
        "--siz tiny",
        "tiny",
        "--rope-theta pi",
        "--size 'tiny\n\x1b[2J'",
        "--model 'a:b\n'",
        "--model os.system(true)",
    ],
    "sweep": ["--sizes", "--repeats 0", "--repeats 1001", "--timeout-s 0", "--timeout-s nan"],
    "main": [
        "report",
        "report 'nothing here'",
        "report 'nul\0'",
        "report . ..",
        "no-such-command",
        "account --parallel fsdp",
        "compare '--size tiny' '--size ../../x'",
        "compare '--size tiny' '--d-model 0'",
        "compare '--size tiny' '--no-such-flag 1'",
        "compare '--size tiny' not/a/path",
        "compare '--size tiny' /",
        *(
            f"compare '--size tiny' '--size tiny' {flag}"
            for flag in ("--repeats 1", f"--repeats {10**18}", "--timeout-s -1", "--name=../x")
        ),
    ],
}
"""What the parser refuses in its own words, and what is refused in another command's."""
ASK = """
import contextlib, io, json, sys
from cs336 import cli
from tests.conftest import look_once_at_flags
once, answers = look_once_at_flags(), []
next(once)
for command, argv in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = getattr(cli, command)(argv)
        except SystemExit as error:
            status = error.code
    answers.append((status, out.getvalue(), err.getvalue()))
json.dump(answers, sys.stdout)
assert "torch" not in sys.modules
import psutil
assert not psutil.Process().children()
"""


def test_what_cannot_be_meant_is_refused_before_torch_is_imported_or_a_process_started(
    tmp_path: Path,
) -> None:
    """All in one fresh process: one line that names what is wrong, or the parser's box around
    its words.
    """
    lines = [
        (command, shlex.split(flags), f"error: .*{re.escape(words)}.*\n\\Z")
        for command, refused in (("benchmark", BENCHMARK), ("sweep", SWEEP))
        for flags, words in refused.items()
    ]
    lines += [
        (command, shlex.split(flags), r"(?s)\s*\S")
        for command, refused in BY_PARSER.items()
        for flags in refused
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        input=json.dumps([line[:2] for line in lines]),
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for (command, argv, pattern), (status, out, err) in zip(
        lines, json.loads(done.stdout), strict=True
    ):
        assert (status, out) == (2, ""), (command, argv, err)
        assert re.match(pattern, err), (command, argv, err)
        assert "Traceback" not in err, (command, argv)
    assert not list(tmp_path.iterdir())


def test_a_dry_run_says_how_long_each_step_should_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On an H200, whose committed ceilings are beside the results; without ceilings, what would
    measure them.
    """
    flags = shlex.split(f"--output {DATA} --sizes small --context-lengths 128 512 --dry-run")
    see(monkeypatch, replace(H100, name="NVIDIA A100-SXM4-80GB"))
    assert sweep(flags) == 0
    printed = capsys.readouterr()
    assert "predicted step" not in printed.out
    assert "cs336 ceilings" in printed.err
    see(monkeypatch, replace(H100, name="NVIDIA H200"))
    assert sweep(flags) == 0
    printed, said = capsys.readouterr()
    assert not said
    curves = load_ceilings(DATA / "ceilings").curves("NVIDIA H200")
    steps_s = [
        step_time(config, curves).step_s
        for config in grid("--sizes small --context-lengths 128 512")
    ]
    assert [
        float(ms) for ms in re.findall(r"predicted step ([\d.,]+) ms", printed)
    ] == pytest.approx([1e3 * step_s for step_s in steps_s], rel=1e-3)


def test_a_dry_run_says_what_a_fast_step_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As long as it took on an H100 to a fifth, and nearly as much memory; in fp8 too."""
    see(monkeypatch, H100)
    flags = f"--output {DATA} --fast --sizes medium xl --context-lengths 512"
    assert sweep(shlex.split(f"{flags} --dry-run")) == 0
    printed = capsys.readouterr().out
    found = re.findall(
        r": (\w+) ctx .*predicted step ([\d.]+) ms, predicted peak ([\d.]+) GiB", printed
    )
    measured = {
        record.config.size: (
            1e3 * record.measurement(Phase.STEP).median_s,
            record.memory.peak_allocated_bytes / 2**30,
        )
        for record in load_records(DATA / "e2e_benchmark/h100_train_fast/runs")[0]
        if record.config.model.context_length == 512
    }
    assert [size for size, *_ in found] == ["medium", "xl"]
    for size, step_ms, peak_gib in found:
        assert float(step_ms) == pytest.approx(measured[size][0], rel=0.2)
        assert float(peak_gib) == pytest.approx(measured[size][1], rel=0.05)
    assert sweep(shlex.split(f"{flags} --fp8 --dry-run")) == 0
    printed = capsys.readouterr().out
    assert printed.count("predicted step") == 2


@pytest.mark.parametrize(
    ("text", "value"), [("70B", 70e9), ("15T", 15e12), ("1.5m", 1.5e6), ("7e9", 7e9)]
)
def test_a_number_may_end_in_a_scale(text: str, value: float) -> None:
    assert parse(PlanArguments, f"--tokens {text}").tokens == value
