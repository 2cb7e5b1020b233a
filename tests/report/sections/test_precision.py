"""Tables and sentences of the precision study say what was observed."""

import torch

from cs336_systems.config import Device, Precision
from cs336_systems.report.sections.precision import (
    accumulation_section,
    dtype_section,
    interpret_accumulation,
    interpret_dtypes,
    interpret_layer_norm,
    layer_norm_section,
    precision_sections,
)
from cs336_systems.studies.precision import accumulation_study, normalise
from cs336_systems.studies.precision_records import NORM_INPUT, NORM_OUTPUT, ObservedDtype, PrecisionStudy


def observed(quantity: str, device: Device, precision: Precision, dtype: str) -> ObservedDtype:
    return ObservedDtype(model="ToyModel", device=device, precision=precision, quantity=quantity, dtype=dtype)


def test_sentences_on_sums_hold_the_observed_values() -> None:
    text = " ".join(interpret_accumulation(accumulation_study()))
    assert "The fp16 sum misses 10 by -0.0469, an fp32 sum of the same addends by +0.0021, all of it" in text
    assert "from storing 0.01 as 0.010002" in text
    assert "The bf16 sum stands still at 4 after 350 additions" in text
    assert "The fp16 sum stands still" not in text


def test_sentences_on_dtypes_follow_what_was_observed() -> None:
    rows = [
        observed(quantity, device, precision, dtype or precision.value)
        for quantity, device, dtype in [
            (NORM_INPUT, Device.CPU, ""), (NORM_OUTPUT, Device.CPU, ""),
            (NORM_INPUT, Device.CUDA, ""), (NORM_OUTPUT, Device.CUDA, "fp32"),
            ("loss", Device.CPU, "fp32"), ("loss", Device.CUDA, "fp32"),
        ]
        for precision in (Precision.FP16, Precision.BF16)
    ]  # fmt: skip
    assert interpret_dtypes(rows) == [
        "In fp32 in every case: loss.",
        "In the autocast type in every case: layer norm's input.",
        "fp16 and bf16 are used in the same places.",
        "In fp32 on cuda only: layer norm's output (ln).",
        "Layer norm on cpu: fp16 in, fp16 out.",
        "Layer norm on cpu: bf16 in, bf16 out.",
        "Layer norm on cuda: fp16 in, fp32 out.",
        "Layer norm on cuda: bf16 in, fp32 out.",
    ]
    assert "different places" in interpret_dtypes([*rows, observed("x", Device.CPU, Precision.BF16, "fp32")])[2]


def test_sentences_on_layer_norm_name_what_each_type_loses() -> None:
    large, small, close = (
        [normalise(*kind, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
        for kind in ((0.0, 300.0), (0.0, 2**-14), (1024.0, 1.0))
    )
    lost = {
        name: [sentence for sentence in interpret_layer_norm(rows) if "of activations" in sentence]
        for name, rows in {"large": large, "small": small, "close": close}.items()
    }
    assert {name: len(sentences) for name, sentences in lost.items()} == {"large": 1, "small": 1, "close": 1}
    assert all("In fp16" in lost[name][0] for name in ("large", "small"))
    assert "In bf16" in lost["close"][0]
    variances = [row[2] for row in layer_norm_section(large).tables[0].rows]
    assert variances == ["9e+04", "beyond fp16", "9.01e+04"], "bf16 has 90,112 and 89,600"


def test_a_study_of_an_earlier_version_has_no_layer_norm() -> None:
    rows = (observed("a", Device.CPU, Precision.FP16, "fp16"), observed("a", Device.CPU, Precision.BF16, "bf16"))
    study = PrecisionStudy(torch="2.11.0", gpu=None, accumulation=accumulation_study(), dtypes=rows)
    assert [section.name for section in precision_sections(study)] == ["accumulation", "dtypes"]


def test_a_quantity_that_one_model_lacks_is_an_empty_cell() -> None:
    rows = [
        observed("a", Device.CPU, Precision.FP16, "fp16"),
        observed("b", Device.CPU, Precision.BF16, "bf16"),
    ]
    assert dtype_section(rows).tables[0].rows == (("ToyModel", "a", "fp16", ""), ("ToyModel", "b", "", "bf16"))


def test_sums_table_has_the_courses_four_first() -> None:
    results = [row[3] for row in accumulation_section(accumulation_study()).tables[0].rows]
    assert results[:4] == ["10.0001", "9.9531", "10.0021", "10.0021"]
