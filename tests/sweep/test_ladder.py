"""The rungs differ by one change each, and the gate tells the same training from another one."""

import itertools
import json
from dataclasses import fields, replace

import pytest
import torch

from cs336.config import (
    SIZES,
    Arch,
    Attention,
    CompileMode,
    Device,
    Mode,
    ModelConfig,
    OptimizerKind,
    Precision,
    RunConfig,
    SdpaBackend,
)
from cs336.files import FileError
from cs336.measure.clock import make_clock
from cs336.measure.step import TrainingStep
from cs336.model.fast import fp8
from cs336.model.fast.packages import FLASH_4, QUACK
from cs336.sweep.ladder import (
    BOUNDS,
    FP8_BOUND,
    GATE_STEPS,
    chosen,
    gate_learning_rate,
    judge,
    read_ladder,
    rungs,
    write_ladder,
)

H200 = "NVIDIA H200"
GPT2 = RunConfig(
    size="gpt2", model=SIZES["gpt2"], batch_size=16, device=Device.CUDA, learning_rate=1e-5
)
XL = RunConfig(size="xl", model=SIZES["xl"], batch_size=4, device=Device.CUDA, learning_rate=1e-5)
TINY = RunConfig(size="tiny", model=replace(SIZES["tiny"], context_length=128))


def flat(config):
    run = {
        field.name: getattr(config, field.name)
        for field in fields(RunConfig)
        if field.name != "model"
    }
    return run | {
        f"model.{field.name}": getattr(config.model, field.name) for field in fields(ModelConfig)
    }


def changed(before, after):
    a, b = flat(before), flat(after)
    return {name: b[name] for name in a if a[name] != b[name]}


def names(ladder):
    return [rung.name for rung in ladder]


# The rungs


def test_each_rung_of_gpt2_on_an_h200_is_one_change_more():
    ladder = rungs(GPT2, H200)
    steps = [changed(a.config, b.config) for a, b in itertools.pairwise(ladder)]
    assert dict(zip(names(ladder)[1:], steps, strict=True)) == {
        "tf32": {"precision": "tf32"},
        "bf16": {"precision": "bf16"},
        "compile": {"compile": "default"},
        "attention": {"model.attention": "sdpa", "model.sdpa_backend": "flash"},
        "vocabulary": {"pad_vocabulary": 128},
        "fused": {"optimizer": "fused"},
        "cudnn": {"model.sdpa_backend": "cudnn"},
        "cast-once": {"cast_once": True},
        "graph": {"cuda_graph": True},
        "blocks": {"compile_blocks": True},
        "fused-loss": {"fused_loss": True},
        "fused-blocks": {"fused_blocks": True},
        "split": {"split_masters": True},
        "embedding": {"bf16_embedding": True},
        "stream": {"bf16_stream": True},
        "moments": {"bf16_moments": True},
    }
    assert changed(GPT2, ladder[0].config) == {"optimizer": "foreach"}
    assert all(rung.change for rung in ladder)


@pytest.mark.parametrize(
    ("base", "device_name", "has_rung"),
    [
        (XL, H200, True),
        (XL, "NVIDIA L40S", True),
        (XL, "NVIDIA A100-SXM4-80GB", False),
        (XL, None, False),
        (replace(XL, model_factory="a:b"), H200, False),
        (replace(XL, device=Device.CPU), H200, False),
        (replace(XL, model=SIZES["large"]), H200, False),
        (replace(XL, model=replace(SIZES["large"], vocab_size=25_000)), H200, True),
    ],
    ids=["Hopper", "Ada", "Ampere", "unknown device", "own model", "CPU", "0.97B", "1.01B"],
)
def test_large_models_have_a_rung_for_fp8_on_devices_that_have_it(base, device_name, has_rung):
    ladder = rungs(base, device_name)
    assert ("fp8" in names(ladder)) is has_rung
    odd = replace(
        base, batch_size=1, model=replace(base.model, context_length=base.model.context_length + 4)
    )
    assert "fp8" not in names(rungs(odd, device_name)), "products would be in bf16 all the same"
    if has_rung:
        number = names(ladder).index("fp8")
        assert changed(ladder[number - 1].config, ladder[number].config) == {"fp8": True}


@pytest.mark.parametrize(
    ("package", "base", "name", "fields"),
    [
        (QUACK, GPT2, "activations", {"fused_activations": True}),
        (QUACK, XL, "activations", {"fused_activations": True}),
        (FLASH_4, GPT2, "packed", {"packed_attention": True}),
        (
            FLASH_4,
            replace(GPT2, model=replace(GPT2.model, d_model=160, num_heads=2)),
            "packed",
            None,
        ),
    ],
    ids=["GELU", "SwiGLU", "heads of 64", "heads of 80"],
)
def test_packages_that_are_installed_give_hopper_a_rung_more(
    monkeypatch, package, base, name, fields
):
    without = names(rungs(base, H200))
    monkeypatch.setattr("cs336.model.fast.packages.is_installed", lambda wanted: wanted == package)
    ladder = rungs(base, H200)
    steps = {b.name: changed(a.config, b.config) for a, b in itertools.pairwise(ladder)}
    assert steps.get(name) == fields
    assert [each for each in names(ladder) if each != name] == without
    assert steps.get("fp8", {}).get("fused_activations", False) is False
    assert name not in names(rungs(base, "NVIDIA A100-SXM4-80GB"))


@pytest.mark.parametrize("base", [TINY, GPT2, XL])
def test_a_rung_says_of_attention_only_what_it_chose(base) -> None:
    """The attention of a user's own model is not seen, and not changed."""
    for factory in (None, "a:b"):
        told = [rung.change for rung in rungs(replace(base, model_factory=factory), H200)]
        assert any("attention" in words for words in told) is (factory is None)


@pytest.mark.parametrize(
    ("base", "device_name", "left_out"),
    [
        (replace(GPT2, model=replace(GPT2.model, vocab_size=50_304)), H200, {"vocabulary"}),
        (GPT2, "NVIDIA A100-SXM4-80GB", {"cudnn"}),
        (replace(GPT2, model=replace(GPT2.model, num_heads=4)), H200, {"cudnn"}),
        (GPT2, None, {"cudnn"}),
        (
            replace(GPT2, model_factory="a:b"),
            H200,
            {
                "attention",
                "vocabulary",
                "cudnn",
                "cast-once",
                "graph",
                "blocks",
                "fused-loss",
                "fused-blocks",
                "split",
                "embedding",
                "stream",
                "moments",
            },
        ),
        (
            TINY,
            "AMD EPYC",
            {
                "tf32",
                "vocabulary",
                "cudnn",
                "cast-once",
                "graph",
                "fused-loss",
                "fused-blocks",
                "split",
                "embedding",
                "stream",
                "moments",
            },
        ),
    ],
    ids=["nice already", "A100", "wide heads", "unknown device", "own model", "CPU"],
)
def test_what_does_not_apply_is_left_out(base, device_name, left_out):
    every = names(rungs(GPT2, H200))
    assert names(rungs(base, device_name)) == [name for name in every if name not in left_out]


def test_shortcuts_of_the_base_are_taken_away_and_the_rest_stays():
    fast = replace(
        TINY,
        model=replace(TINY.model, attention=Attention.SDPA, sdpa_backend=SdpaBackend.MATH),
        mode=Mode.TRAIN,
        precision=Precision.BF16,
        compile=CompileMode.DEFAULT,
        compile_blocks=True,
        optimizer=OptimizerKind.FUSED,
        pad_vocabulary=64,
        cast_once=True,
        fp8=True,
        seed=3,
        tokens="some.npy",
        warmup_steps=7,
        measured_steps=19,
        batch_size=5,
    )
    first = rungs(fast)[0].config
    assert changed(TINY, first) == {
        "seed": 3,
        "tokens": "some.npy",
        "warmup_steps": 7,
        "measured_steps": 19,
        "batch_size": 5,
        "optimizer": "foreach",
    }


def test_chosen_rungs_keep_all_changes_below_them():
    ladder = rungs(GPT2, H200)
    some = chosen(ladder, ["cast-once", "bf16"])
    assert names(some) == ["fp32", "bf16", "cast-once"]
    by_name = {rung.name: rung for rung in ladder}
    assert [rung.config for rung in some] == [by_name[name].config for name in names(some)]
    between = names(ladder)[names(ladder).index("bf16") + 1 : names(ladder).index("cast-once") + 1]
    assert some[2].change == ", ".join(by_name[name].change for name in between)
    assert chosen(ladder, names(ladder)) == ladder
    with pytest.raises(
        ValueError, match=r"no rung 'fp8' for this model.*installed; there are: fp32, tf32, bf16, "
    ):
        chosen(ladder, ["bf16", "fp8"])
    with pytest.raises(ValueError, match=r"no rung 'fp9'; there are: fp32, tf32, bf16, "):
        chosen(ladder, ["fp9"])


# The file


def test_a_ladder_is_read_as_it_was_written(tmp_path):
    ladder = rungs(GPT2, H200)
    write_ladder(ladder, tmp_path / "ladder.json")
    assert read_ladder(tmp_path / "ladder.json") == ladder


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"format_version": 99}, "newer"), ({"rungs": []}, "at least one rung")],
    ids=str,
)
def test_a_file_that_is_no_ladder_is_refused_by_name(changes, said, tmp_path):
    path = tmp_path / "ladder.json"
    write_ladder(rungs(GPT2, H200), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(FileError, match=rf"ladder\.json.*{said}"):
        read_ladder(path)


# The gate, by hand: the reference falls from 12 to 10, so that a distance of 0.01 is 0.005 of the
# fall

FALLING = [12 - 2 * step / (GATE_STEPS - 1) for step in range(GATE_STEPS)]


def off(*changes):
    """FALLING with (step, difference) pairs added."""
    losses = list(FALLING)
    for step, difference in changes:
        losses[step] += difference
    return losses


@pytest.mark.parametrize(
    ("precision", "losses", "last", "largest", "passed"),
    [
        (Precision.FP32, off(), 0, 0, True),
        (Precision.FP32, off((7, 0.0018)), 0, 0.0009, True),
        (Precision.FP32, off((7, -0.0022)), 0, 0.0011, False),
        (Precision.TF32, off((-1, 0.0038)), 0.0019, 0.0019, True),
        (Precision.TF32, off((-1, 0.0042)), 0.0021, 0.0021, False),
        (Precision.BF16, off((0, 0.008), (-1, -0.002)), 0.001, 0.004, True),
        (Precision.BF16, off((0, 0.012), (-1, -0.002)), 0.001, 0.006, False),
    ],
)
def test_the_gate_by_hand(precision, losses, last, largest, passed):
    gate = judge(precision, [losses], [FALLING])
    assert (gate.last, gate.largest) == (pytest.approx(last), pytest.approx(largest))
    assert gate.passed is passed
    assert gate.loss == pytest.approx(losses[-1])
    assert gate.bound == BOUNDS[precision]


def test_of_several_processes_the_worst_counts_and_the_reference_is_a_mean():
    gate = judge(
        Precision.BF16, [off(), off((-1, 0.02)), off((3, -0.03))], [off((3, 0.01)), off((3, -0.01))]
    )
    assert gate.last == pytest.approx(0.01)
    assert gate.largest == pytest.approx(0.015)
    assert gate.loss == pytest.approx(10 + 0.02 / 3)
    assert gate.passed is False


@pytest.mark.parametrize(
    ("processes", "references", "said"),
    [
        ([FALLING], [], "the reference has no 20 finite losses"),
        ([FALLING], [[*FALLING[:-1], None]], "the reference has no 20 finite losses"),
        ([FALLING], [[12.0] * GATE_STEPS], "falls by less than 0.1%"),
        ([], [FALLING], "there are no 20 losses"),
        ([FALLING, FALLING[:19]], [FALLING], "there are no 20 losses"),
    ],
    ids=["none", "not finite", "flat", "no process", "short process"],
)
def test_without_enough_losses_there_is_no_verdict(processes, references, said):
    gate = judge(Precision.BF16, processes, references)
    assert gate.passed is None
    assert said in gate.missing


def test_losses_that_are_not_finite_fail():
    gate = judge(Precision.BF16, [FALLING, [*FALLING[:4], None, *FALLING[5:]]], [FALLING])
    assert (gate.passed, gate.loss, gate.largest) == (False, None, None)


# The gate on real training

SHAPE = ModelConfig(
    vocab_size=503, context_length=64, d_model=64, d_ff=192, num_layers=2, num_heads=2
)
SMALL = RunConfig(
    size="custom",
    model=SHAPE,
    batch_size=4,
    optimizer=OptimizerKind.FOREACH,
    learning_rate=gate_learning_rate(SHAPE.d_model),
)


def train(config, fault=None):
    """Losses of the first steps, the step broken by `fault` before the first."""
    torch.manual_seed(config.seed)
    step = TrainingStep(config)
    if fault is not None:
        fault(step)
    clock = make_clock(config)
    return [step(clock)[1].item() for _ in range(GATE_STEPS)]


def of(arch, seed):
    return replace(SMALL, model=replace(SHAPE, arch=arch), seed=seed)


@pytest.fixture(scope="module")
def expected():
    """Losses of the first rung, made once for each architecture and seed."""
    known = {}

    def losses(arch, seed):
        if (arch, seed) not in known:
            known[arch, seed] = train(of(arch, seed))
        return known[arch, seed]

    return losses


CAST_ONCE = {
    "precision": Precision.BF16,
    "optimizer": OptimizerKind.FUSED,
    "pad_vocabulary": 128,
    "cast_once": True,
}


@pytest.mark.parametrize(
    "changes", [{"optimizer": OptimizerKind.ADAMW}, CAST_ONCE], ids=["AdamW", "cast once"]
)
def test_the_same_training_passes_well_within_the_bound(expected, changes):
    config = replace(of(Arch.CS336, 0), **changes)
    gate = judge(config.precision, [train(config)], [expected(Arch.CS336, 0)])
    assert gate.passed
    assert gate.largest < gate.bound / 2


def see_the_future(step):
    step.model.mask.fill_(True)


def shift_the_targets(step):
    batches = step.batches
    step.batches = lambda: (batches()[0], batches()[1].roll(1, dims=1))


def never_update(step):
    step.update = lambda: step.optimizer.zero_grad()


def keep_old_gradients(step):
    step.optimizer.zero_grad = lambda set_to_none=True: None


def scale_gradients_down(step):
    """As if a loss scale of 2^16 had been taken out of them twice."""
    backward = step.backward
    step.backward = lambda loss: backward(loss / 2**16)


def lose_the_last_block(step):
    for parameter in step.model.layers[-1].parameters():
        parameter.requires_grad_(False)


FAULTS = (
    see_the_future,
    shift_the_targets,
    never_update,
    keep_old_gradients,
    scale_gradients_down,
    lose_the_last_block,
)


@pytest.mark.parametrize(
    ("arch", "fault"),
    # the one that is least off for gpt2
    [*((Arch.CS336, fault) for fault in FAULTS), (Arch.GPT2, see_the_future)],
)
def test_another_training_fails_even_the_widest_bound(expected, arch, fault):
    gate = judge(Precision.BF16, [train(of(arch, 0), fault)], [expected(arch, 0)], fp8=True)
    assert gate.bound == max(*BOUNDS.values(), FP8_BOUND)
    assert gate.passed is False, gate


IN_FP8 = {**CAST_ONCE, "fp8": True}


def test_training_in_fp8_passes_its_own_bound_alone(expected):
    losses = train(replace(of(Arch.CS336, 1), **IN_FP8))
    assert judge(Precision.BF16, [losses], [expected(Arch.CS336, 1)], fp8=True).passed
    assert not judge(Precision.BF16, [losses], [expected(Arch.CS336, 1)]).passed


def test_a_wrong_cast_to_fp8_fails_the_bound(expected, monkeypatch):
    casts = fp8._fp8_casts
    monkeypatch.setattr(
        fp8, "_fp8_casts", lambda x, unit, transposes: casts(x, 1.1 * unit, transposes)
    )
    losses = train(replace(of(Arch.CS336, 0), **IN_FP8))
    gate = judge(Precision.BF16, [losses], [expected(Arch.CS336, 0)], fp8=True)
    assert gate.passed is False, gate
