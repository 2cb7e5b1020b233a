"""The operations of the fast step, against a profile of it, closed forms, and what the model's modules launch."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.config import SIZES, Arch, Device, Mode, ModelConfig, Phase, RunConfig
from cs336_systems.costs.accounting import Component, component_flops, count_parameters, parameters_by_component
from cs336_systems.costs.tape import MATMULS_OF, Operation
from cs336_systems.costs.time import is_fast_step, operations, step_time
from cs336_systems.model.fast.choose import fastest
from cs336_systems.record import read_record
from cs336_systems.studies.ceilings_files import load_ceilings

DATA = Path(__file__).parents[2] / "data" / "published"
PROFILES = DATA / "kineto_profiles/train_fast"
KERNELS_OF_BACKWARD = 3
"""Of cuDNN's attention, where other backends have one or two: a kernel before, and one after it."""
MODEL = ModelConfig(vocab_size=80, context_length=16, d_model=48, d_ff=96, num_layers=3, num_heads=4)


def fast(model: ModelConfig = MODEL, **fields: Any) -> RunConfig:
    return fastest(RunConfig(size="custom", model=model, batch_size=2, device=Device.CUDA, **fields), "NVIDIA H200")


def kernels(config: RunConfig) -> dict[Phase, list[Operation]]:
    return operations(config)


@pytest.mark.parametrize("size", ["small", "xl"])
def test_each_phase_launches_what_a_profile_of_it_has(size: str) -> None:
    (record,) = [read_record(path) for path in (PROFILES / "runs").glob(f"{size}_*") if "bf16" in path.name][:1]
    (path,) = (PROFILES / "kernels").glob(f"{size}_*")
    profile = json.loads(path.read_text())
    counted: Counter[str] = Counter()
    for kernel in profile["kernels"]:
        if kernel["phase"] is not None:
            counted[kernel["phase"]] += kernel["count"] / profile["num_steps"]
    found = kernels(record.config)
    assert is_fast_step(record.config)
    more = {Phase.BACKWARD: (KERNELS_OF_BACKWARD - 1) * SIZES[size].num_layers}
    assert {phase: len(each) + more.get(phase, 0) for phase, each in found.items()} == counted


@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("mode", [Mode.INFERENCE, Mode.TRAIN])
def test_matmuls_have_the_flops_of_the_closed_form(arch: Arch, mode: Mode) -> None:
    config = fast(replace(MODEL, arch=arch), mode=mode)
    assert config.pad_vocabulary == 1, "else there are more FLOPs"
    flops = dict.fromkeys((Phase.FORWARD, Phase.BACKWARD), 0)
    for phase, found in kernels(config).items():
        for each in found:
            rows, inner, columns = each.sides
            flops[phase] = flops.get(phase, 0) + MATMULS_OF.get(each.form, 1) * 2 * each.batch * rows * inner * columns
    parts = component_flops(config)
    scores = next(part.forward for part in parts if part.component is Component.SCORES)
    assert flops[Phase.FORWARD] == sum(part.forward for part in parts)
    # fused attention computes its scores again
    assert flops[Phase.BACKWARD] == sum(part.backward for part in parts) + (scores if flops[Phase.BACKWARD] else 0)


@pytest.mark.parametrize("arch", Arch)
def test_the_optimizer_moves_26_or_28_bytes_a_parameter_and_a_second_gradient_of_a_tied_table(arch: Arch) -> None:
    """26 of those whose master is split."""
    model = replace(MODEL, arch=arch)
    parts = parameters_by_component(model)
    tied = parts[Component.HEAD] if arch is Arch.GPT2 else 0
    split = count_parameters(model) - parts[Component.EMBEDDING] - parts[Component.NORMS] - tied
    for config, saved in ((fast(model), 2 * split), (replace(fast(model), split_masters=False), 0)):
        moved = sum(each.moved_bytes for each in kernels(config)[Phase.OPTIMIZER]) - 8  # the count of steps
        assert moved == 28 * count_parameters(model) + 4 * tied - saved


@pytest.mark.parametrize("arch", Arch)
def test_fused_activations_save_two_passes_a_block(arch: Arch) -> None:
    """Of a hidden activation h: SwiGLU reads 2 h and writes h, backward reads 3 h and writes 2 h; GELU 2 h and 3 h."""
    plain = fast(replace(MODEL, arch=arch))
    fused = replace(plain, fused_activations=True)
    hidden = 2 * plain.batch_size * MODEL.context_length * MODEL.d_ff
    of_phase = (2, 3) if arch is Arch.GPT2 else (3, 5)
    for phase, passes in zip((Phase.FORWARD, Phase.BACKWARD), of_phase, strict=True):
        before, after = kernels(plain)[phase], kernels(fused)[phase]
        assert len(before) - len(after) == MODEL.num_layers
        saved = sum(each.moved_bytes for each in before) - sum(each.moved_bytes for each in after)
        assert saved == pytest.approx(MODEL.num_layers * passes * hidden, rel=0.05)  # and the bias


def test_a_padded_vocabulary_is_computed() -> None:
    config = fast(replace(MODEL, vocab_size=81))
    assert config.pad_vocabulary == 128
    (head,) = [each for each in kernels(config)[Phase.FORWARD] if each.sides[2] == 128]
    assert head.sides == (32, 48, 128)


@pytest.mark.parametrize(
    "change",
    [{"checkpoint_blocks": 1}, {"fp8": True}, {"cuda_graph": False}, {"fused_blocks": False}, {"loss_chunks": 2}],
    ids=str,
)
def test_a_part_of_it_is_not_predicted(change: dict[str, Any]) -> None:
    curves = load_ceilings(DATA / "ceilings").curves("NVIDIA H200")
    assert curves is not None
    assert step_time(fast(), curves) is not None
    assert step_time(replace(fast(), **change), curves) is None
