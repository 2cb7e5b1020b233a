"""Memory recorded on a real GPU: every category against a closed form, every sum against the
allocator's own count.
"""

from dataclasses import replace

import pytest
import torch

from cs336.analysis.memory.explain import explain_memory
from cs336.analysis.memory.profile import Category
from cs336.config import (
    SIZES,
    Attention,
    Device,
    Mode,
    OptimizerKind,
    Precision,
    Profiler,
    RunConfig,
)
from cs336.costs.accounting import count_parameters
from cs336.costs.memory import predicted_peak_bytes
from cs336.measure.nvml import usable_gpu_bytes
from cs336.measure.run import measure
from cs336.record import Status

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def config_of(size="small", context_length=256, **changes):
    attention = changes.pop("attention", Attention.NAIVE)
    shape = {"context_length": context_length, "attention": attention}
    model = replace(SIZES[size], **shape)
    return RunConfig(
        size=size,
        model=model,
        device=Device.CUDA,
        warmup_steps=3,
        measured_steps=2,
        profiler=Profiler.MEMORY,
        **changes,
    )


def recorded(config, tmp_path):
    record = measure(config, profile=tmp_path / "snapshot.pickle")
    return record, explain_memory(tmp_path / "snapshot.pickle")


def requested(moment, category):
    return next(
        (entry.requested_bytes for entry in moment.categories if entry.category is category), 0
    )


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("attention", Attention)
def test_categories_add_up_and_are_what_the_closed_form_says(mode, precision, attention, tmp_path):
    config = config_of(mode=mode, precision=precision, attention=attention)
    record, profile = recorded(config, tmp_path)
    assert record.status is Status.OK, record.failure
    num_parameters = count_parameters(config.model)
    assert len(profile.boundaries) == 2 * (1 + len(config.phases))
    for moment in profile.boundaries:
        assert (
            sum(entry.num_bytes for entry in moment.categories)
            == moment.allocated_bytes
            == moment.counted_bytes
        )
        assert (
            sum(entry.requested_bytes for entry in moment.categories)
            == moment.counted_requested_bytes
        )
        assert requested(moment, Category.PARAMETERS) == 4 * num_parameters
        if mode is Mode.TRAIN:
            assert requested(moment, Category.OPTIMIZER_STATE) == 8 * num_parameters
        if moment.phase == "backward":
            assert requested(moment, Category.GRADIENTS) == 4 * num_parameters
    assert record.memory is not None
    assert profile.peak.allocated_bytes == record.memory.peak_allocated_bytes
    assert profile.peak.allocated_bytes == pytest.approx(
        predicted_peak_bytes(config), rel=0.03, abs=64 * 2**20
    )


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_what_a_checkpoint_keeps_is_its_input(blocks, tmp_path):
    config = config_of(checkpoint_blocks=blocks)
    record, profile = recorded(config, tmp_path)
    assert record.status is Status.OK, record.failure
    end_of_forward = next(moment for moment in profile.boundaries if moment.phase == "forward")
    saved = requested(end_of_forward, Category.SAVED)
    model, tokens = config.model, config.batch_size * config.model.context_length
    inputs = -(-model.num_layers // blocks) * tokens * model.d_model * 4
    # beside them what the final norm, the head and the loss save: x, its norm, logits twice, and
    # small change
    rest = tokens * (2 * model.d_model + 2 * model.vocab_size) * 4
    assert inputs < saved < inputs + 1.1 * rest
    assert profile.peak.allocated_bytes == pytest.approx(
        predicted_peak_bytes(config), rel=0.03, abs=64 * 2**20
    )


def test_low_precision_copies_are_a_category_of_their_own(tmp_path):
    config = config_of(precision=Precision.BF16, optimizer=OptimizerKind.FUSED, cast_once=True)
    _, profile = recorded(config, tmp_path)
    start, model = profile.boundaries[0], config.model
    linear = (
        count_parameters(model)
        - model.vocab_size * model.d_model
        - (2 * model.num_layers + 1) * model.d_model
    )
    assert requested(start, Category.AUTOCAST_COPIES) == 2 * linear
    assert requested(start, Category.PARAMETERS) == 4 * count_parameters(model)


def test_running_out_of_memory_leaves_its_evidence(tmp_path):
    limit = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(3 * 2**30 / limit)
    try:
        record, profile = recorded(config_of(context_length=512), tmp_path)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert record.status is Status.OOM
    assert profile.work.out_of_memory >= 1
    assert profile.peak.allocated_bytes <= 3 * 2**30


def test_what_programs_can_have_is_what_cuda_says():
    assert usable_gpu_bytes() == pytest.approx(torch.cuda.mem_get_info()[1], abs=64 * 2**20)
