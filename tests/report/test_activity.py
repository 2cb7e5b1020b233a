"""Columns of how busy the GPU was, and what lies between tensor pipes and MFU."""

import re
from dataclasses import replace

import pytest

from cs336.config import Attention, Precision
from cs336.costs.accounting import Component, forward_flops
from cs336.costs.time import uncounted_flops
from cs336.record import Activity
from cs336.report.configurations import step_results
from cs336.report.quantities import StepResult
from cs336.report.sections.steps import results_section, results_table
from tests.report.making import make_config, make_record

ACTIVITY = Activity(
    span_s=1.0,
    sm_share=0.9,
    tensor_share=0.61,
    dram_share=0.2,
    nvlink_bytes_per_s=45e9,
    pcie_bytes_per_s=1e9,
    pcie_peak_bytes_per_s=50e9,
)
KEYS = ["tensor_share", "sm_share", "dram_share", "nvlink_share", "pcie_share"]


def result_of(activity, **fields):
    record = make_record(make_config(precision=Precision.BF16, **fields), (0.02, 0.02))
    (result,) = step_results([replace(record, activity=activity)])
    return result


def test_shares_are_of_the_peaks_of_links():
    result = result_of(ACTIVITY)
    # NVLink of an H200 moves 450 GB/s in one direction
    assert [result[key] for key in KEYS] == pytest.approx([0.61, 0.9, 0.2, 0.1, 0.02])


def test_columns_are_left_out_where_no_run_has_them():
    known, unknown = result_of(ACTIVITY), result_of(None)
    assert not {*KEYS} & {*StepResult.csv_keys([unknown])}
    assert {*KEYS} < {*StepResult.csv_keys([unknown, known])}
    assert {*KEYS} < {*results_section([known]).rows[0]}
    assert "tensor pipes" not in {head.name for head in results_table([unknown]).headings}
    assert "tensor pipes" in {head.name for head in results_table([known]).headings}


@pytest.mark.parametrize("attention", Attention)
@pytest.mark.parametrize("group", [0, 1])
def test_uncounted_flops_are_closed_forms(attention, group):
    config = make_config(
        precision=Precision.BF16, model={"attention": attention}, checkpoint_blocks=group
    )
    flops, context = forward_flops(config.model, config.batch_size), config.model.context_length
    scores, layers = flops[Component.SCORES], sum(flops.values()) - flops[Component.HEAD]
    uncounted = uncounted_flops(config)
    # a checkpoint computes its blocks again, but for the last matmul, whose result nothing needs
    again = group * (layers - flops[Component.FFN] // 3)
    is_fused = attention is Attention.SDPA
    assert uncounted.recomputed == again + is_fused * scores
    # forward has two matmuls and backward five, of which each skips the later keys
    matmuls = is_fused * (7 + 2 * group)
    assert uncounted.skipped == matmuls * scores * (context - 1) // (2 * context)


@pytest.mark.parametrize("attention", Attention)
def test_named_differences_add_up(attention):
    fields = {"model": {"attention": attention}, "checkpoint_blocks": 1}
    result = result_of(ACTIVITY, context_length=2048, **fields)
    (sentence,) = [text for text in results_table([result]).findings if "MFU" in text]
    points = [float(number) for number in re.findall(r"([+-]\d+\.\d)", sentence)]
    assert sum(points) == pytest.approx(100 * (0.61 - result.mfu), abs=0.05 * len(points))
    assert ("masked attention" in sentence) == (attention is Attention.SDPA)


def test_nothing_is_said_of_tensor_pipes_in_fp32():
    record = make_record(make_config(), (0.02, 0.02))
    (result,) = step_results([replace(record, activity=ACTIVITY)])
    assert not [text for text in results_table([result]).findings if "MFU" in text]
