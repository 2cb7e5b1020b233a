"""Tables of the precision study show what was observed."""

import msgspec
import torch

from cs336.config import Device, Precision
from cs336.report.sections.study import dtype_section, layer_norm_section, precision_sections
from cs336.studies.precision import accumulation_study, normalise
from cs336.studies.records import NORM_INPUT, NORM_OUTPUT, ObservedDtype, PrecisionStudy
from tests.committed import DATA


def observed(quantity: str, device: Device, precision: Precision, dtype: str) -> ObservedDtype:
    return ObservedDtype(
        model="ToyModel", device=device, precision=precision, quantity=quantity, dtype=dtype
    )


def test_what_is_in_one_type_in_every_case_is_said() -> None:
    rows = [
        observed(quantity, device, precision, dtype or precision.value)
        for quantity, device, dtype in [
            (NORM_INPUT, Device.CPU, ""),
            (NORM_OUTPUT, Device.CPU, ""),
            (NORM_INPUT, Device.CUDA, ""),
            (NORM_OUTPUT, Device.CUDA, "fp32"),
            ("loss", Device.CPU, "fp32"),
            ("loss", Device.CUDA, "fp32"),
        ]
        for precision in (Precision.FP16, Precision.BF16)
    ]
    assert dtype_section(rows).tables[0].findings == (
        "In fp32 in every case on cpu and cuda: loss.",
        "In the autocast type in every case on cpu and cuda: layer norm's input.",
    )


def test_a_variance_beyond_the_largest_number_is_shown_as_such() -> None:
    large = [
        normalise(0.0, 300.0, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ]
    variances = [row[2] for row in layer_norm_section(large).tables[0].rows]
    assert variances == ["9e+04", "beyond fp16", "9.01e+04"], "bf16 has 90,112 and 89,600"


def test_sums_are_first_and_a_study_of_an_earlier_version_has_no_layer_norm() -> None:
    rows = (
        observed("a", Device.CPU, Precision.FP16, "fp16"),
        observed("a", Device.CPU, Precision.BF16, "bf16"),
    )
    study = PrecisionStudy(torch="2.11.0", gpu=None, accumulation=accumulation_study(), dtypes=rows)
    sums, dtypes = precision_sections(study)
    assert (sums.name, dtypes.name) == ("accumulation", "dtypes")
    assert [row[3] for row in sums.tables[0].rows][:4] == [
        "10.0001",
        "9.9531",
        "10.0021",
        "10.0021",
    ]


def test_a_quantity_that_one_model_lacks_is_an_empty_cell() -> None:
    rows = [
        observed("a", Device.CPU, Precision.FP16, "fp16"),
        observed("b", Device.CPU, Precision.BF16, "bf16"),
    ]
    assert dtype_section(rows).tables[0].rows == (
        ("ToyModel", "a", "fp16", ""),
        ("ToyModel", "b", "", "bf16"),
    )


def test_a_cpu_s_data_types_are_not_given_for_a_gpu_s() -> None:
    """The published study has both devices: where they differ is what the note must tell of a
    CPU alone.
    """
    study = msgspec.json.decode(
        (DATA / "precision/precision.json").read_bytes(), type=PrecisionStudy
    )
    seen: dict[str, set[tuple[Device, bool]]] = {}
    for row in study.dtypes:
        seen.setdefault(row.quantity, set()).add((row.device, row.dtype == "fp32"))
    differing = [
        name for name, kinds in seen.items() if kinds == {(Device.CPU, False), (Device.CUDA, True)}
    ]
    assert (
        len(differing)
        == sum(len({is_fp32 for _, is_fp32 in kinds}) > 1 for kinds in seen.values())
        > 0
    )
    alone = [row for row in study.dtypes if row.device is Device.CPU]
    notes = [
        " ".join(dtype_section(rows).tables[0].findings[:-2]) for rows in (alone, study.dtypes)
    ]
    assert [name in notes[0] for name in (*differing, "H200")] == [True] * len(differing) + [
        "H200" in str(study.gpu)
    ]
    assert not notes[1]
