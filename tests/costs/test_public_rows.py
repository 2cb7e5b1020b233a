"""The published table of others' throughputs beside ours leaves no row out."""

import csv
from dataclasses import replace

import pytest

from cs336.config import SIZES, Arch, Attention, Device, Phase, Precision, RunConfig
from cs336.costs.layout import Layout
from cs336.costs.tape import OperationKind
from cs336.costs.time import operations
from tests.costs.public_rows import FORECAST, LOSS_BYTES, layout_of, model_of, rows, why_not_asked


def test_every_public_row_is_foretold_or_says_why_not() -> None:
    with (FORECAST / "public_rows.csv").open() as file:
        answers = list(csv.DictReader(file))
    asked = rows()
    assert [answer["name"] for answer in answers] == [row["name"] for row in asked]
    for row, answer in zip(asked, answers, strict=True):
        assert bool(answer["foretold"]) is not bool(answer["not_asked"])
        assert answer["source"] == row["source"]
        if answer["foretold"]:
            error = 100 * (float(answer["foretold"]) / float(row["tokens_per_s_per_gpu"]) - 1)
            assert abs(float(answer["error_percent"]) - error) < 1e-3


def test_layouts_of_rows_have_as_many_gpus() -> None:
    for row in rows():
        if not why_not_asked(row):
            layout = layout_of(row)
            assert isinstance(layout, Layout)
            assert layout.gpus == int(row["gpus"])


def test_the_loss_of_this_project_moves_as_much_as_is_taken_away_for_others() -> None:
    model = replace(
        SIZES["small"], arch=Arch.GPT2, vocab_size=50_368, num_layers=1, attention=Attention.SDPA
    )
    config = RunConfig(
        size="custom", model=model, device=Device.CUDA, precision=Precision.BF16, batch_size=4
    )
    logits = config.batch_size * model.context_length * model.vocab_size
    moved = 0.0
    phases = operations(config)
    for operation in (*phases[Phase.FORWARD], *phases[Phase.BACKWARD]):
        each = operation.moved_bytes / logits
        # passes over the logits move whole bytes for each; the table of tokens is 3/8 of them
        if operation.kind is OperationKind.PASS and round(each) and abs(each % 1) < 1e-3:
            moved += each
    assert moved == pytest.approx(LOSS_BYTES, rel=0.01)


def test_models_of_rows_have_the_parameters_that_their_source_says() -> None:
    """MPT has learned positions; biases, which the shapes leave out, are under 0.1 % of it."""
    counted = 0
    for row in rows():
        if row["parameters"]:
            model = model_of(row)
            parameters = model.num_layers * model.d_model * (4 * model.d_model + 2 * model.d_ff)
            parameters += (model.vocab_size + model.context_length) * model.d_model
            assert parameters == pytest.approx(int(row["parameters"]), rel=1e-3)
            counted += 1
    assert counted == 70 + 139


NEMO_TFLOPS = {
    ("GPT3-5B", 64): 736,
    ("GPT3-20B", 64): 750,
    ("GPT3-175B", 128): 782,
    ("GPT3-175B", 512): 842,
    ("LLAMA2-7B", 8): 776,
    ("LLAMA2-13B", 16): 754,
    ("LLAMA2-70B", 64): 759,
    ("Nemotron-8B", 64): 653,
    ("Nemotron-22B", 64): 554,
    ("Nemotron-340B", 128): 678,
    ("LLAMA3-8B", 8): 697,
    ("LLAMA3-70B", 64): 738,
}
"""TFLOP per second of a GPU in NeMo's table, by model and GPUs, beside the tokens that rows have.
The table names no shapes.
"""


def test_shapes_of_nemo_s_models_have_the_flops_that_it_says() -> None:
    """A multiply-add of each weight and of each pair of tokens, three times, as 2 FLOPs."""
    checked = set()
    for row in rows():
        key = row["name"], int(row["gpus"])
        if not row["source"].startswith("NVIDIA/NeMo ") or key not in NEMO_TFLOPS:
            continue
        d_model, layers, context = (int(row[name]) for name in ("d_model", "layers", "context"))
        of_heads = 2 * d_model * (1 + int(row["kv_heads"]) / int(row["heads"]))
        of_network = (3 if row["gated"] == "1" else 2) * int(row["d_ff"])
        weights = layers * d_model * (of_heads + of_network) + int(row["vocab"]) * d_model
        scores = 2 * layers * context * d_model
        flops = 6 * (weights + scores) * float(row["tokens_per_s_per_gpu"])
        # both figures are rounded, to three digits at the least
        assert flops / 1e12 == pytest.approx(NEMO_TFLOPS[key], rel=0.002)
        checked.add(key)
    assert checked == set(NEMO_TFLOPS)
