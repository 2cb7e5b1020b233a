"""`fastest` makes a valid step of every other one, changes nothing that was asked for, and
follows its rule.
"""

import itertools
import operator
import random
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cs336 import tried_imports
from cs336.commands.configure import NamedGpu, make_fast_config
from cs336.config import (
    SIZES,
    Attention,
    CompileMode,
    Device,
    Mode,
    ModelConfig,
    OptimizerKind,
    Parallel,
    Precision,
    Profiler,
    RunConfig,
    SdpaBackend,
)
from cs336.model.fast import packages
from cs336.model.fast.choose import best_sdpa_backend, describe_fast, fastest, missing_packages
from cs336.model.fast.packages import (
    FLASH_4,
    OF_PACKAGE,
    QUACK,
    VERSIONS,
    check_packages,
    is_installed,
    why_unusable,
)

H200, A100, V100, NEW = (
    "NVIDIA H200",
    "NVIDIA A100-SXM4-80GB",
    "Tesla V100-SXM2-32GB",
    "NVIDIA Q1000",
)
CHOSEN = (
    "precision",
    "optimizer",
    "compile",
    "compile_blocks",
    "pad_vocabulary",
    "cast_once",
    "split_masters",
    "fused_loss",
    "fused_blocks",
    "bf16_embedding",
    "bf16_stream",
    "cuda_graph",
)
FIXED = tuple(field.name for field in fields(RunConfig) if field.name not in (*CHOSEN, "model"))
SHAPE = tuple(
    field.name for field in fields(ModelConfig) if field.name not in ("attention", "sdpa_backend")
)


def make(size="small", device=Device.CUDA, **changes):
    return RunConfig(size=size, model=SIZES[size], device=device, **changes)


def model_with(**changes):
    return replace(SIZES["small"], **changes)


@pytest.mark.parametrize("device_name", [None, H200, A100, V100, NEW, "AMD EPYC"])
@pytest.mark.parametrize("size", SIZES)
def test_every_step_has_a_valid_fast_one_with_all_that_was_asked_for(size, device_name):
    asked = {
        "seed": 3,
        "batch_size": 2,
        "warmup_steps": 1,
        "measured_steps": 7,
        "tokens": "x.npy",
        "repeat": 2,
        "learning_rate": 1e-5,
        "ranges": False,
        "checkpoint_blocks": 2,
    }
    settings = [
        {},
        asked,
        {"sync_phases": True},
        {"profiler": Profiler.KINETO},
        {"model_factory": "a:b"},
        {"precision": Precision.FP16},
        {"compile": CompileMode.REDUCE_OVERHEAD},
        {"pad_vocabulary": 64},
        {"optimizer": OptimizerKind.FOREACH},
    ]
    of_fixed, of_shape = operator.attrgetter(*FIXED), operator.attrgetter(*SHAPE)
    cases = list(itertools.product(Device, Mode, settings))
    cases += [(Device.CUDA, mode, {"profiler": Profiler.MEMORY}) for mode in Mode]
    for device, mode, changes in cases:
        config = make(size, device, mode=mode, **changes)
        fast = fastest(config, device_name)  # a RunConfig checks itself
        assert of_fixed(fast) == of_fixed(config)
        assert of_shape(fast.model) == of_shape(config.model)
        assert fastest(fast, device_name) == fast, "there is nothing left to make faster"


def test_the_rule_on_an_h200():
    fast = fastest(make("gpt2"), H200)
    assert {name: getattr(fast, name) for name in CHOSEN} == {
        "precision": "bf16",
        "optimizer": "fused",
        "compile": "default",
        "compile_blocks": True,
        "pad_vocabulary": 128,
        "cast_once": True,
        "split_masters": True,
        "fused_loss": True,
        "fused_blocks": True,
        "bf16_embedding": True,
        "bf16_stream": True,
        "cuda_graph": True,
    }
    assert (fast.model.attention, fast.model.sdpa_backend) == (Attention.SDPA, SdpaBackend.CUDNN)
    asked = model_with(attention=Attention.SDPA, sdpa_backend=SdpaBackend.EFFICIENT)
    assert fastest(replace(make(), model=asked), H200).model == asked


@pytest.mark.parametrize(
    ("size", "fp8", "is_rounded"),
    [
        ("small", False, True),
        ("gpt2", False, True),
        ("medium", False, False),
        ("gpt2-xl", False, False),
        ("gpt2-xl", True, True),
    ],
)
def test_the_stream_is_in_bf16_where_losses_have_passed_the_gate(size, fp8, is_rounded):
    asked = {"fp8": True} if fp8 else {}
    fast = make_fast_config(Device.CUDA, asked, NamedGpu(H200), size=size, batch_size=4, **asked)
    assert fast.fused_blocks
    assert fast.fp8 == fp8
    assert fast.bf16_stream == is_rounded


IN_FP8 = {
    "precision": Precision.BF16,
    "cast_once": True,
    "optimizer": OptimizerKind.FUSED,
    "fp8": True,
}
ASKED_FOR_FLASH = {"model": model_with(attention=Attention.SDPA, sdpa_backend=SdpaBackend.FLASH)}
WITH_PACKAGES = {
    "H200": (H200, {}, True, True),
    "H100": ("NVIDIA H100 80GB HBM3", {}, True, True),
    "A100": (A100, {}, False, False),
    "B200": ("NVIDIA B200", {}, False, False),
    "unknown": (None, {}, False, False),
    "odd width": (H200, {"model": model_with(d_ff=3076)}, False, True),
    "heads of 80": (H200, {"model": replace(SIZES["2.7B"], context_length=128)}, True, False),
    "heads of 96": (H200, {"model": model_with(num_heads=8)}, True, True),
    "heads of 128": (H200, {"model": model_with(num_heads=6)}, True, True),
    "asked for flash": (H200, ASKED_FOR_FLASH, True, False),
    "own model": (H200, {"model_factory": "a:b"}, False, False),
    "fp8": (H200, IN_FP8, False, True),
    "two ranks": (H200, {"parallel": Parallel.DDP_FLAT, "ranks": 2}, True, True),
    "sharded": (H200, {"parallel": Parallel.FSDP, "ranks": 2}, False, True),
    "PyTorch's FSDP": (H200, {"parallel": Parallel.FSDP2, "ranks": 2}, False, False),
    "fp16": (H200, {"precision": Precision.FP16}, True, True),
}
"""Devices, what is asked for, and whether activations are fused and attention is packed where
both packages are.
"""


@pytest.mark.parametrize("name", WITH_PACKAGES)
def test_packages_are_used_on_hopper_where_their_kernels_fit(monkeypatch, name):
    device_name, changes, fuses, packs = WITH_PACKAGES[name]
    config = replace(make("xl"), **changes)
    fast = fastest(config, device_name)
    assert not fast.fused_activations
    assert not fast.packed_attention
    for package, expected in ((QUACK, (fuses, False)), (FLASH_4, (False, packs))):
        monkeypatch.setattr(packages, "is_installed", lambda wanted, only=package: wanted == only)
        fast = fastest(config, device_name)
        assert (fast.fused_activations, fast.packed_attention) == expected
        words = describe_fast(fast)
        assert ("activations within matmuls" in words, "FlashAttention 4" in words) == expected
        assert fastest(fast, device_name) == fast


def test_a_package_is_installed_only_in_a_tested_version(monkeypatch):
    """The project asks for no other: its requirements allow the tested versions, and none of
    those beside them.
    """
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    asked = {
        requirement.name: requirement.specifier
        for requirement in map(Requirement, project["optional-dependencies"]["fused"])
    }
    near = {
        QUACK: ("0.6.5", "0.6.9", "0.5.9", "0.7.0"),
        FLASH_4: ("4.0.0b36", "4.0.0b35", "4.0.0b37", "4.0.0"),
    }
    monkeypatch.setattr(packages, "import_failure", lambda *_: None)
    for package, version in (
        (package, version) for package, versions in near.items() for version in versions
    ):
        monkeypatch.setattr(packages, "version_of", {package: version}.get)
        assert is_installed(package) is asked[package].contains(version, prereleases=True), version


@pytest.mark.parametrize(
    ("device_name", "changes", "backend"),
    [
        (H200, {}, SdpaBackend.CUDNN),
        ("NVIDIA H100 80GB HBM3", {}, SdpaBackend.CUDNN),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", {}, SdpaBackend.CUDNN),
        ("NVIDIA GH200 480GB", {}, SdpaBackend.CUDNN),
        ("NVIDIA B200", {}, SdpaBackend.CUDNN),
        (H200, {"context_length": 32_768}, SdpaBackend.CUDNN),
        (H200, {"d_model": 768, "num_heads": 6}, SdpaBackend.CUDNN),
        (H200, {"d_model": 768, "num_heads": 4}, SdpaBackend.FLASH),
        (H200, {"d_model": 768, "num_heads": 64}, SdpaBackend.FLASH),
        (H200, {"d_model": 774, "num_heads": 3}, SdpaBackend.AUTO),
        (A100, {}, SdpaBackend.FLASH),
        (V100, {}, SdpaBackend.AUTO),
        (NEW, {}, SdpaBackend.AUTO),
        (None, {}, SdpaBackend.AUTO),
    ],
)
def test_attention_by_device_and_shape(device_name, changes, backend):
    """Head widths: 768 / 6 = 128, 768 / 4 = 192, 768 / 64 = 12 (no multiple of 8), 774 / 3 =
    258.
    """
    assert best_sdpa_backend(model_with(**changes), Device.CUDA, device_name) is backend


def test_a_cpu_keeps_precision_and_compilation_as_asked():
    plain = make("tiny", Device.CPU)
    fast = fastest(plain, "AMD EPYC")
    assert fast == replace(
        plain, optimizer=OptimizerKind.FUSED, model=replace(plain.model, attention=Attention.SDPA)
    )
    asked = replace(plain, precision=Precision.BF16, compile=CompileMode.DEFAULT)
    assert (fastest(asked, None).precision, fastest(asked, None).compile) == (
        Precision.BF16,
        CompileMode.DEFAULT,
    )


def test_a_gpu_without_bf16_keeps_its_precision():
    fast = fastest(make(precision=Precision.FP16), V100)
    assert (fast.precision, fast.cast_once, fast.cuda_graph) == (Precision.FP16, False, False)
    assert fastest(make(), V100).precision is Precision.FP32
    assert fastest(make(precision=Precision.FP16), NEW).precision is Precision.BF16


AUTOTUNED = CompileMode.MAX_AUTOTUNE_NO_CUDAGRAPHS


@pytest.mark.parametrize(
    ("asked", "name", "chosen"),
    [
        *(
            ({"mode": mode, "optimizer": OptimizerKind.FOREACH}, "optimizer", OptimizerKind.FOREACH)
            for mode in (Mode.INFERENCE, Mode.FORWARD, Mode.FORWARD_BACKWARD)
        ),
        ({}, "compile", CompileMode.DEFAULT),
        ({"compile": CompileMode.REDUCE_OVERHEAD}, "compile", CompileMode.DEFAULT),
        ({"compile": AUTOTUNED}, "compile", AUTOTUNED),
        ({"profiler": Profiler.MEMORY}, "cuda_graph", False),
        *(({"warmup_steps": steps}, "cuda_graph", steps > 3) for steps in (0, 3, 4)),
    ],
)
def test_what_is_asked_for_and_still_useful_stays(asked, name, chosen):
    assert getattr(fastest(make(**asked), H200), name) == chosen


@pytest.mark.parametrize("way", Parallel)
def test_on_several_ranks_only_what_works_there_is_chosen(way):
    own_ddp = "a:b" if way is Parallel.OWN else None
    config = RunConfig(
        size="small", model=SIZES["small"], device=Device.CUDA, parallel=way, own_ddp=own_ddp
    )
    fast = fastest(config, "NVIDIA H200")
    assert (fast.precision, fast.model.attention) == (Precision.BF16, Attention.SDPA)
    assert (
        fast.cuda_graph
        == fast.cast_once
        == fast.fused_blocks
        == (way not in (Parallel.DDP, Parallel.FSDP2, Parallel.OWN))
    )
    assert fast.compile_blocks
    of_factory = fastest(replace(config, model_factory="a:b"), "NVIDIA H200")
    assert (of_factory.compile is CompileMode.NONE) == way.shards_parameters


def test_a_missing_package_is_named_and_refused_where_asked_for(monkeypatch):
    fast = fastest(make("xl"), H200)
    assert (fast.fused_activations, fast.packed_attention) == (False, False)
    monkeypatch.setattr(packages, "version_of", {QUACK: None, FLASH_4: "4.0.0b35"}.get)
    assert [note.split(", as ")[1].split(" (")[0] for note in missing_packages(fast, H200)] == [
        f"{QUACK} is not installed",
        f"{FLASH_4} is installed in version 4.0.0b35, and was tested in 4.0.0b36",
    ]
    assert [*missing_packages(fast, A100)] == []
    flash = replace(
        make(), model=model_with(attention=Attention.SDPA, sdpa_backend=SdpaBackend.FLASH)
    )
    assert len([*missing_packages(fastest(flash, H200), H200)]) == 1, (
        "who names a kernel does not miss another"
    )
    for name, package in (("fused_activations", QUACK), ("packed_attention", FLASH_4)):
        config = replace(fast, **{name: True})
        with pytest.raises(
            ValueError, match=rf"^--{name.replace('_', '-')} needs {package}.*pip install"
        ):
            check_packages(config)
        check_packages(replace(config, device=Device.CPU, cuda_graph=False))


def draw_asked(chance):
    """A step that somebody might ask --fast for."""
    size = chance.choice(["small", "xl", "2.7B", "8B", "gpt2", "gpt2-xl"])
    contexts = [512, 1024] if size.startswith("gpt2") else [512, 1024, 8192, 32768]
    modes = [Mode.TRAIN, Mode.TRAIN, Mode.INFERENCE, Mode.FORWARD_BACKWARD]
    asked = {
        "size": size,
        "context_length": chance.choice(contexts),
        "batch_size": chance.choice([1, 4, 16]),
        "mode": chance.choice(modes),
    }
    ways = [way for way in Parallel if way is not Parallel.OWN]
    if asked["mode"] is Mode.TRAIN and chance.random() < 0.7:
        asked |= {"parallel": chance.choice(ways), "ranks": chance.choice([1, 2, 8])}
        if asked["parallel"] is Parallel.NONE:
            asked["ranks"] = 1
    for switch, share in {"fp8": 0.3, "expandable_segments": 0.2, "cuda_graph": 0.2}.items():
        if chance.random() < share:
            asked[switch] = True
    return asked


def test_what_is_chosen_for_little_memory_is_a_step_whose_missing_packages_are_named(monkeypatch):
    """Checkpoints and expandable segments that the memory asks for are chosen after --fast's own
    rules, so the same rules must not be put on top of them.
    """
    monkeypatch.setattr(packages, "version_of", lambda package: None)
    chance, with_checkpoints, refused = random.Random(62), 0, 0
    for _ in range(300):
        asked = draw_asked(chance)
        settings = {**asked}
        gpu = NamedGpu(chance.choice([H200, A100, NEW]), 2**30 * chance.choice([24, 80, 140]))
        try:
            fast = make_fast_config(Device.CUDA, asked, gpu, **settings)
        except ValueError:
            refused += 1
            continue
        with_checkpoints += fast.checkpoint_blocks > 0
        notes = [*missing_packages(fast, gpu.name)]
        on_hopper = gpu.name == H200 and fast.fused_blocks
        assert len(notes) <= len(OF_PACKAGE) * on_hopper, (asked, notes)
        assert describe_fast(fast)
    assert with_checkpoints > 30
    assert refused < 150


def test_a_half_installed_package_is_done_without(tmp_path, monkeypatch):
    """Its name and version are there, and only importing it tells that what it imports is not."""
    package, path, source, said = (
        FLASH_4,
        "flash_attn/cute/interface.py",
        "import libcute",
        "No module named 'libcute'",
    )
    for parent in [*(tmp_path / path).parents][: path.count("/")]:
        parent.mkdir(parents=True, exist_ok=True)
        (parent / "__init__.py").touch()
    (tmp_path / path).write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        packages, "version_of", lambda name: VERSIONS[name] if name == package else None
    )
    monkeypatch.setattr(packages, "is_installed", is_installed)
    tried_imports.import_failure.cache_clear()
    assert said in why_unusable(package)
    fast = fastest(make("xl"), H200)
    assert (fast.fused_activations, fast.packed_attention) == (False, False)
    assert any(said in note for note in missing_packages(fast, H200))
    setting = next(name for name, needed in OF_PACKAGE.items() if needed == package)
    with pytest.raises(ValueError, match=f"--{setting.replace('_', '-')} needs {package}.*{said}"):
        check_packages(replace(fast, **{setting: True}))
    tried_imports.import_failure.cache_clear()


SHARDED_8B = {
    "size": "8B",
    "context_length": 32_768,
    "batch_size": 1,
    "parallel": Parallel.DDP_OVERLAP,
    "shard_optimizer": True,
    "ranks": 2,
    "fp8": True,
}
OWN = {"size": "small", "model_factory": "own:make", "parallel": Parallel.FSDP, "ranks": 2}
AS_ASKED = {
    "CPU": (Device.CPU, {"size": "tiny"}),
    "own model with sharded parameters": (Device.CUDA, OWN),
}


@pytest.mark.parametrize("name", AS_ASKED)
def test_blocks_that_nothing_compiles_are_left_so_when_that_is_asked(name, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("def make(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    device, settings = AS_ASKED[name]
    asked = settings | {"compile": CompileMode.NONE}
    assert make_fast_config(device, asked, NamedGpu(H200), **asked).compile is CompileMode.NONE


OUR_WAYS = [way for way in Parallel if way.takes_any_tensor]


@pytest.mark.parametrize("compile_mode", [CompileMode.NONE, CompileMode.DEFAULT])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("size", ["gpt2", "8B"])
@pytest.mark.parametrize("way", OUR_WAYS)
def test_what_is_asked_of_the_compiler_is_what_comes_or_is_refused(way, size, fp8, compile_mode):
    """It is no error to ask for what --fast does by itself."""
    h200 = NamedGpu(H200, 150_110_011_392)
    settings = {"size": size, "batch_size": 1, "parallel": way, "fp8": fp8}
    settings |= {"ranks": 1 if way is Parallel.NONE else 2}
    by_itself = make_fast_config(Device.CUDA, settings, h200, **settings)
    asked = settings | {"compile": compile_mode}
    if by_itself.compile is compile_mode:
        assert make_fast_config(Device.CUDA, asked, h200, **asked) == by_itself
    elif by_itself.has_nothing_to_compile:
        assert make_fast_config(Device.CUDA, asked, h200, **asked).compile is compile_mode
    else:
        with pytest.raises(ValueError, match="leave out --compile"):
            make_fast_config(Device.CUDA, asked, h200, **asked)


def test_selective_checkpoints_that_memory_asks_for_exclude_compiled_blocks_in_fp8():
    """PyTorch 2.11 drops them there. Blocks in bf16, or with enough memory, are compiled."""
    h200 = NamedGpu(H200, 150_110_011_392)
    chosen = make_fast_config(Device.CUDA, SHARDED_8B, h200, **SHARDED_8B)
    assert chosen.selective_checkpoints
    assert chosen.compile is CompileMode.NONE
    for changes in ({"fp8": False}, {"context_length": 512}):
        settings = SHARDED_8B | changes
        assert make_fast_config(Device.CUDA, settings, h200, **settings).compile_blocks
    asked = SHARDED_8B | {"compile": CompileMode.DEFAULT}
    with pytest.raises(ValueError, match="selective checkpoints"):
        make_fast_config(Device.CUDA, asked, h200, **asked)
