"""Answers about accumulation, data types and layer norm, from a study of precision."""

from pathlib import Path

from cs336_systems.config import Device, Precision
from cs336_systems.report.page.answers.answer import Answer, Material
from cs336_systems.report.page.commands import command_for
from cs336_systems.report.sections.precision import is_lost, library_words, loss_words, sum_sentences
from cs336_systems.studies.precision_records import NormalisedActivations, ObservedDtype, PrecisionStudy

TOY = "ToyModel"


def _study(material: Material) -> tuple[Path, PrecisionStudy] | None:
    """The study that a GPU was observed in, the fullest of several."""
    found = material.collection.precision.items()
    return max(found, key=lambda pair: (pair[1].gpu is not None, len(pair[1].layer_norm), str(pair[0])), default=None)


def _answer(material: Material, directory: Path, sentences: list[str], place: str, lacking: str = "") -> Answer:
    study = material.collection.precision[directory]
    where = "" if study.gpu is None else f", {study.gpu}"
    return Answer(
        sentences=sentences,
        places=[(directory, place)],
        commands=[command_for(material.collection, directory)],
        conditions=f"PyTorch {study.torch}{where}",
        lacking=lacking,
    )


def accumulation(material: Material) -> Answer | None:
    """0.01 added a thousand times, in fp32 and fp16."""
    if (found := _study(material)) is None or not found[1].accumulation:
        return None
    directory, study = found
    rows = [row for row in study.accumulation if "bf16" not in (row.sum_dtype, row.addend_dtype)]
    totals = ", ".join(
        f"{row.total:.4f} (sum {row.sum_dtype}, addends {row.addend_dtype}{', cast first' if row.cast else ''})"
        for row in rows
    )
    sentences = [f"{rows[0].addend} added {rows[0].count} times gives {totals}."] if rows else []
    sentences += [
        *sum_sentences(study.accumulation, [Precision.FP16]),
        "So sums belong in fp32 even where the addends are in 16 bits: what a low precision loses in each addition "
        "adds up, and the larger the sum, the coarser are its numbers.",
    ]
    return _answer(material, directory, sentences, "accumulation")


def data_types(material: Material) -> Answer | None:
    """Data types of the toy model under fp16 autocast, on the GPU if it was observed there."""
    if (found := _study(material)) is None:
        return None
    directory, study = found
    rows = [row for row in study.dtypes if row.model == TOY and row.precision is Precision.FP16]
    if not rows:
        return None
    device = Device.CUDA if any(row.device is Device.CUDA for row in rows) else Device.CPU
    seen = [row for row in rows if row.device is device]
    types = ", ".join(f"{row.quantity} {row.dtype}" for row in seen)
    sentences = [
        f"Under fp16 autocast on {device.value}: {types}.",
        "Autocast keeps the parameters in fp32 and casts copies of them for matrix products; gradients have the data "
        "type of their parameters, and the loss is computed in fp32.",
        *_other_device(rows, seen, device),
    ]
    lacking = "the same on a GPU" if device is Device.CPU else ""
    return _answer(material, directory, sentences, "dtypes", lacking=lacking)


def _other_device(rows: list[ObservedDtype], seen: list[ObservedDtype], device: Device) -> list[str]:
    """What another device does otherwise."""
    types = {row.quantity: row.dtype for row in seen}
    differ = [row for row in rows if row.device is not device and types.get(row.quantity) != row.dtype]
    return [f"On {row.device.value} {row.quantity} is in {row.dtype}." for row in differ]


def layer_norm(material: Material) -> Answer | None:
    """Which part of layer norm is sensitive, and whether it is with bf16."""
    if (found := _study(material)) is None or not found[1].layer_norm:
        return None
    directory, study = found
    sentences = [
        "Sensitive is the variance, a mean of squares: the square of a large deviation is beyond the largest number of "
        "fp16, that of a small one below its smallest.",
        *(loss_words(row) for row in study.layer_norm if is_lost(row)),
        *library_words(study.layer_norm),
        *_with_bf16(study.layer_norm),
    ]
    return _answer(material, directory, sentences, "layer_norm")


def _with_bf16(rows: tuple[NormalisedActivations, ...]) -> list[str]:
    """Whether bf16 has the range that fp16 lacks."""
    own = [row for row in rows if row.dtype == "bf16"]
    lost = [row for row in rows if row.dtype == "fp16" and row.variance is None]
    held = [row for row in own if row.variance is not None]
    if not lost or len(held) < len(own):
        return []
    return [
        "bf16 has the range of fp32, so no square overflows; but it has 8 significant bits, so activations that differ "
        "little from a large mean become equal. So autocast computes layer norm in fp32 with bf16 too, on a GPU."
    ]
