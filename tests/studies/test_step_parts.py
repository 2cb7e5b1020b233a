"""Parts of a profiled step: FLOPs that torch counts, bytes by hand, times of one step."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import ClassTimes
from cs336_systems.config import Attention, ModelConfig, OptimizerKind, Precision, RunConfig
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.studies.step_parts import step_parts
from tests.report.ceilings import BF16, FP8
from tests.report.sections.kernels.profiles import make_module, make_products, make_profile

FORWARD, BACKWARD, OPTIMIZER = LaunchPhase.FORWARD, LaunchPhase.BACKWARD, LaunchPhase.OPTIMIZER
MODEL = ModelConfig(vocab_size=11, context_length=8, d_model=16, d_ff=24, num_layers=2, num_heads=4)
CONFIG = RunConfig(size="custom", model=MODEL, batch_size=3)
TOKENS = 3 * 8
STREAM = TOKENS * 16
SCORES = 2 * 3 * 4 * 8 * 8
LINEAR, FFN = "linear layers, products alone", "feed-forward, all kernels"
ELEMENTS = {
    "QKV": 2 * (4 * STREAM + 3 * 16 * 16),  # in, three out, three weights
    "output": 2 * (2 * STREAM + 16 * 16),
    "feed-forward": 2 * (2 * STREAM + 3 * TOKENS * 24 + 3 * 16 * 24),  # in, out, what w1 and w3 make and w2 takes
    "head": STREAM + 16 * 11 + TOKENS * 11,
}


def by_name(parts):
    return {(part.name, part.phase): part for part in parts.parts}


@pytest.fixture
def parts():
    """Of two steps, in which linear layers take 3 ms forward and 8 ms backward."""
    return by_name(step_parts(make_profile(), CONFIG))


def test_flops_are_those_that_torch_counts(parts):
    """Linear layers are products of matrices (mm), scores and values of batches of them (bmm)."""
    model = TransformerLM(MODEL)
    with FlopCounterMode(display=False) as forward:
        logits = model(torch.zeros(3, 8, dtype=torch.long))
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    for phase, counter in ((FORWARD, forward), (BACKWARD, backward)):
        counts = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
        batched = sum(count for name, count in counts.items() if "bmm" in name)
        assert parts[LINEAR, phase].flops == sum(counts.values()) - batched
        assert parts["scores, products alone", phase].flops + parts["values, products alone", phase].flops == batched
    with FlopCounterMode(display=False) as layer:
        model.layers[0].ffn(torch.zeros(3, 8, 16))
    assert parts[FFN, FORWARD].flops == 2 * layer.get_total_flops()


def test_least_bytes_by_hand(parts):
    assert parts[LINEAR, FORWARD].moved_bytes == 4 * sum(ELEMENTS.values())
    assert parts[LINEAR, BACKWARD].moved_bytes == 8 * sum(ELEMENTS.values())
    assert parts[FFN, FORWARD].moved_bytes == 4 * ELEMENTS["feed-forward"]
    assert parts["scores, products alone", FORWARD].moved_bytes == 4 * (2 * 2 * STREAM + SCORES)
    assert parts["softmax", FORWARD].moved_bytes == 4 * 2 * SCORES
    assert parts["softmax", BACKWARD].moved_bytes == 4 * 3 * SCORES
    assert parts["softmax", FORWARD].flops == 5 * SCORES
    assert parts["norms", FORWARD].moved_bytes == 4 * 2 * 5 * STREAM  # two in each block and the last
    parameters = sum(parameter.numel() for parameter in TransformerLM(MODEL).parameters())
    assert parts["optimizer", OPTIMIZER].moved_bytes == 28 * parameters
    half = by_name(step_parts(make_profile(), replace(CONFIG, precision=Precision.BF16)))
    assert half[LINEAR, FORWARD].moved_bytes == 2 * sum(ELEMENTS.values())
    assert half["norms", FORWARD].moved_bytes == parts["norms", FORWARD].moved_bytes


def test_times_are_those_of_one_step(parts):
    times_ms = {key: part.time_s * 1e3 for key, part in parts.items()}
    assert times_ms == pytest.approx({
        (LINEAR, FORWARD): 1.5, (LINEAR, BACKWARD): 4,
        ("scores, products alone", FORWARD): 0.75, ("values, products alone", FORWARD): 0.75,
        ("scores, products alone", BACKWARD): 2, ("values, products alone", BACKWARD): 2,
        (FFN, FORWARD): 1.5, (FFN, BACKWARD): 4,
        ("softmax", FORWARD): 0.5, ("softmax", BACKWARD): 1,
        ("norms", FORWARD): 1, ("optimizer", OPTIMIZER): 5,
    })  # fmt: skip
    # head and norms backward are in no range of the profile: no part, not one without time


def test_products_that_cannot_be_told_apart_are_one_part():
    profile = make_profile(
        attention=(), products=(make_products(FORWARD, 0, 0, unknown=8, unknown_ms=6), make_products(OPTIMIZER, 1, 1))
    )
    parts = by_name(step_parts(profile, CONFIG))
    whole = parts["all products", FORWARD]
    assert whole.time_s == pytest.approx(0.003)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        TransformerLM(MODEL)(torch.zeros(3, 8, dtype=torch.long))
    assert whole.flops == counter.get_total_flops()
    assert not any(name == LINEAR for name, _ in parts)


def test_fused_attention_computes_its_scores_again_and_keeps_them_to_itself():
    classes = tuple(
        ClassTimes(kind=KernelClass.ATTENTION, phase=phase, count=2, total_s=0.002) for phase in (FORWARD, BACKWARD)
    )
    fused = replace(CONFIG, model=replace(MODEL, attention=Attention.SDPA))
    parts = by_name(step_parts(make_profile(attention=(), classes=classes), fused))
    forward, backward = parts["fused attention", FORWARD], parts["fused attention", BACKWARD]
    assert forward.flops == 2 * 2 * 3 * 8 * 8 * 16 * 2  # two products in two layers
    assert backward.flops == 2.5 * forward.flops
    assert forward.moved_bytes == 4 * 2 * 4 * STREAM  # queries, keys, values, output
    assert backward.moved_bytes == 4 * 2 * 8 * STREAM


@pytest.fixture
def fused():
    """Two steps in which fused attention takes 1 ms forward and 3 backward, and no other part has a time."""
    times = {FORWARD: 0.002, BACKWARD: 0.006}
    classes = tuple(
        ClassTimes(kind=KernelClass.ATTENTION, phase=phase, count=2, total_s=total_s)
        for phase, total_s in times.items()
    )
    profile = make_profile(attention=(), classes=classes, modules=(), products=(), phases=())
    return step_parts(profile, replace(CONFIG, model=replace(MODEL, attention=Attention.SDPA)))


def test_fused_attention_is_counted_as_causal_too(fused):
    """By counting: of 8 x 8 pairs of a query and a key those in which the key is not the later one."""
    pairs = sum(key <= query for query in range(8) for key in range(8))
    for part in fused.parts:
        assert part.causal_flops == part.flops * pairs / 64
    assert all(part.causal_flops is None for part in step_parts(make_profile(), CONFIG).parts)


def test_norms_of_the_blocks_are_computed_again_with_them():
    """The last one, before the head, is in no checkpoint."""
    modules = (make_module(("ln_final", "norm"), BACKWARD, 2, 4),)
    config = replace(CONFIG, checkpoint_blocks=2)
    part = by_name(step_parts(make_profile(modules=modules), config))["norms", BACKWARD]
    assert part.moved_bytes == 4 * (3 * 5 + 2 * 4) * STREAM
    assert part.flops == (9 * 5 + 4 * 4) * STREAM


FP8_MODEL = ModelConfig(vocab_size=11, context_length=16, d_model=16, d_ff=32, num_layers=2, num_heads=4)
FP8_CONFIG = RunConfig(
    size="custom", model=FP8_MODEL, batch_size=3, precision=Precision.BF16, optimizer=OptimizerKind.FUSED,
    cast_once=True, fp8=True,
)  # fmt: skip


def fp8_parts():
    modules = (*make_profile().modules, make_module(("lm_head",), FORWARD, 2, 4))
    return step_parts(make_profile(modules=modules), FP8_CONFIG)


def test_blocks_in_fp8_are_on_its_roof_and_the_head_is_not():
    """A byte an element of x, hidden and the weights, and 2 for what w1, w3 and w2 make; gradients of results are
    factors of both products of backward."""
    parts = by_name(fp8_parts())
    tokens = 3 * 16
    factors, results = 2 * (tokens * (16 + 32) + 3 * 16 * 32), 2 * tokens * (2 * 32 + 16)
    assert parts[FFN, FORWARD].precision is parts[FFN, BACKWARD].precision is FP8
    assert parts[FFN, FORWARD].moved_bytes == factors + 2 * results
    assert parts[FFN, BACKWARD].moved_bytes == (results + results + factors) + 2 * factors
    head = parts["head, all kernels", FORWARD]
    assert head.precision is BF16
    assert head.moved_bytes == 2 * (tokens * 16 + 16 * 11 + tokens * 11)
    assert parts["scores, products alone", FORWARD].precision is BF16


def test_a_model_of_ones_own_and_no_steps_are_refused():
    with pytest.raises(ValueError, match=r"got model_factory 'my\.module:make'"):
        step_parts(make_profile(), replace(CONFIG, model_factory="my.module:make"))
    with pytest.raises(ValueError, match=r"small\.nsys-rep holds no steps"):
        step_parts(make_profile(num_steps=0), CONFIG)


def test_products_of_two_precisions_are_left_out_by_name():
    unknown = make_profile(products=(make_products(FORWARD, 0, 0, unknown=8, unknown_ms=6),))
    for parts, left_out in ((fp8_parts(), LINEAR), (step_parts(unknown, FP8_CONFIG), "all products")):
        assert parts.mixed == (left_out,)
        assert left_out not in {part.name for part in parts.parts}
    assert step_parts(make_profile(), CONFIG).mixed == ()
