"""The files of studies of ceilings, which are found by the name of their device.

Ceilings of a few devices come with the program (costs/devices), so that forecasts of these are the
same everywhere.
"""

import functools
import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import median

from ..analysis.warnings import in_doubt, may_be_in_doubt
from ..config import Device
from ..costs.communication import Collective
from ..costs.curves import Curves, transferred_curves, with_fp8
from ..costs.hardware import DeviceSpec, bare_name, find_device
from ..costs.kernels import Matmul, MatmulPrecision
from ..costs.tape import MATMULS_OF
from ..record import RecordError
from ..text import print_aside
from .ceilings_records import CeilingsStudy
from .ceilings_rows import LaunchKind
from .records import read_study

FILE_NAME = "ceilings.json"
SHIPPED = Path(__file__).parents[1] / "costs" / "devices"
"""Folders of the devices whose ceilings come with the program; each file is a study's,
compressed by gzip.
"""
SUFFIX = ".json.gz"
DOUBTED_SHARE = 0.25
"""Share of the cells of a device's studies from which on forecasts are in doubt if these cells
are.
"""

CollectiveTimes = dict[int, dict[Collective, dict[int, float]]]
"""Seconds of each collective by the number of ranks and by the bytes of the tensor."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best that studies have measured on each device; the rates of a step are reported as
    shares of it.
    """

    studies: tuple[CeilingsStudy, ...] = ()
    """Those that the user has measured, which take precedence over the shipped ones."""
    has_shipped: bool = False
    """Whether ceilings that come with the program stand in where the user has measured none."""
    _curves: dict[str, Curves | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Curves by the name of the device, made once, because predictions are cached by the object."""

    @property
    def measured_names(self) -> list[str]:
        """The GPUs that the user has measured, without the manufacturer's name."""
        gpus = [study for study in self.studies if study.grid.device is Device.CUDA]
        return list(dict.fromkeys(bare_name(study.device_name) for study in gpus))

    @property
    def device_names(self) -> list[str]:
        """The GPUs with ceilings, without the manufacturer's name; those that the user has
        measured come first.
        """
        names = self.measured_names
        if self.has_shipped:
            folders = {path.parent.name for path in SHIPPED.glob(f"*/*{SUFFIX}")}
            names += [folder.replace("-", " ") for folder in sorted(folders)]
        return list(dict.fromkeys(names))

    def _studies_of(self, device_name: str) -> Iterator[tuple[CeilingsStudy, ...]]:
        """The user's studies of the device, then the shipped ones, if these may stand in."""
        name = bare_name(device_name)
        yield tuple(study for study in self.studies if bare_name(study.device_name) == name)
        if self.has_shipped:
            yield shipped(name)

    def flops_per_s(self, device_name: str, precision: MatmulPrecision) -> float | None:
        """Highest rate of matmuls that any study of this device measured, or None."""
        for studies in self._studies_of(device_name):
            matmuls = chain.from_iterable(study.products for study in studies)
            rates = [matmul.flops_per_s for matmul in matmuls if matmul.precision == precision]
            if known := [rate for rate in rates if rate is not None]:
                return max(known)
        return None

    def curves(self, device_name: str) -> Curves | None:
        """The times from which those of steps are predicted: of the first study of this device that
        has them.

        The kernels of steps are those of all its studies, so that sizes can be measured one after
        the other. The time of a launch is the median over the studies, since the same devices are
        in machines with faster and slower hosts: over those that have timed the launches of a step,
        if they are at least half of them.
        """
        name = bare_name(device_name)
        if name not in self._curves:
            self._curves[name] = None
            for is_shipped, studies in enumerate(self._studies_of(name)):
                curves = _joined_curves(studies)
                if curves is not None:
                    device = find_device(name)
                    curves = with_fp8(curves, device)
                    self._curves[name] = replace(
                        curves,
                        has_newer_attention=device is None or device.has_newer_attention,
                        matmuls=_with_attention(name, curves),
                        is_shipped=bool(is_shipped),
                        collectives=self.collectives(name),
                    )
                    break
        return self._curves[name]

    def collectives(self, device_name: str) -> CollectiveTimes:
        """Times of collectives among devices of this name, by ranks and bytes: of the study with
        most sizes of each.
        """
        by_ranks: CollectiveTimes = {}
        for studies in self._studies_of(device_name):
            for study in studies:
                for (ranks, collective), times_s in study.collective_times().items():
                    of_ranks = by_ranks.setdefault(ranks, {})
                    of_ranks[collective] = max(of_ranks.get(collective, {}), times_s, key=len)
            if by_ranks:
                break
        return by_ranks


NO_CEILINGS = Ceilings()
NO_CEILINGS_HERE = Ceilings(has_shipped=True)
REFERENCE = "H200"
"""The device whose efficiencies stand in for those of devices without ceilings."""


def _joined_curves(studies: tuple[CeilingsStudy, ...]) -> Curves | None:
    """The curves of the first study that has any, with what the others add; see `curves`."""
    curves_of_studies = list(filter(None, (study.curves() for study in studies)))
    if not curves_of_studies:
        return None
    first, *others = curves_of_studies
    matmuls = dict(first.matmuls)
    for other in others:
        for precision, measured in other.matmuls.items():
            # matmuls with a form are kernels of a step; squares are those of the first study alone
            matmuls[precision] += tuple(matmul for matmul in measured if matmul.form is not None)
    passes = [curves.passes for curves in curves_of_studies if curves.passes]
    gaps_s = [
        curves.queued_gap_s for curves in curves_of_studies if curves.queued_gap_s is not None
    ]
    hosts = [study for study in studies if study.launch_s(LaunchKind.STEP) is not None]
    if 2 * len(hosts) < len(studies):
        hosts = list(studies)
    calls_s = [study.host_call_s for study in hosts if study.host_call_s is not None]
    return replace(
        first,
        matmuls=matmuls,
        passes=passes[0] if passes else {},
        queued_gap_s=gaps_s[0] if gaps_s else None,
        is_in_doubt=_is_doubted(studies),
        launch_s=median(calls_s),
    )


def data_sheet_curves(device: DeviceSpec) -> Curves:
    """Times of a device that reaches as much of its data sheet as the REFERENCE does."""
    reference = NO_CEILINGS_HERE.curves(REFERENCE)
    source = find_device(REFERENCE)
    assert reference is not None
    assert source is not None
    return transferred_curves(reference, source, device)


def _with_attention(
    device_name: str, curves: Curves
) -> Mapping[MatmulPrecision, tuple[Matmul, ...]]:
    """The measured kernels, with the fused attention that was measured on a REFERENCE, if the
    device has the same chip: kernels of attention depend little on memory.
    """
    device, source = find_device(device_name), find_device(REFERENCE)
    reference = _joined_curves(shipped(REFERENCE))
    if device is None or source is None or reference is None or device is source:
        return curves.matmuls
    if not device.has_chip_of(source):
        return curves.matmuls
    elsewhere = transferred_curves(reference, source, device).matmuls
    matmuls: dict[MatmulPrecision, tuple[Matmul, ...]] = {}
    for precision, measured in curves.matmuls.items():
        known = {(matmul.form, matmul.shape) for matmul in measured}
        more = [
            matmul
            for matmul in elsewhere.get(precision, ())
            if matmul.form in MATMULS_OF and (matmul.form, matmul.shape) not in known
        ]
        matmuls[precision] = (*measured, *more) if measured else measured
    return matmuls


def _is_doubted(studies: tuple[CeilingsStudy, ...]) -> bool:
    """Whether warnings doubt more than DOUBTED_SHARE of the times."""
    num_timed = 0
    scattered = []
    for timing in chain.from_iterable(study.timings for study in studies):
        if timing.loops is not None:
            num_timed += 1
            if may_be_in_doubt(timing.loops.times_s):
                scattered.append(timing)
    most = DOUBTED_SHARE * num_timed
    # judging them takes longer than many a forecast, and most studies have few of them
    if len(scattered) <= most:
        return False
    doubts = [in_doubt(warning.code for warning in timing.warnings) for timing in scattered]
    return sum(doubts) > most


def load_ceilings(directory: Path) -> Ceilings:
    """The study in `directory`, which need not exist, or those in its folders; raise RecordError
    for a damaged one.

    Ceilings that come with the program stand in for devices that have none there.
    """
    studies = tuple(read_study(path, CeilingsStudy) for path in ceilings_files(directory))
    return Ceilings(studies, has_shipped=True)


def load_ceilings_or_warn(directory: Path) -> Ceilings:
    """The ceilings measured into `directory`; if one is damaged, print a warning and use none."""
    try:
        return load_ceilings(directory)
    except RecordError as error:
        print_aside(f"warning: no share of a measured ceiling: {error}")
        return NO_CEILINGS


@functools.cache
def shipped(device_name: str) -> tuple[CeilingsStudy, ...]:
    """The studies of this device that come with the program, in the order of the folders that
    they were measured in.
    """
    folder = SHIPPED / bare_name(device_name).replace(" ", "-")
    # without the suffix, so that NAME comes before NAME-2, as a directory NAME does
    files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.name.removesuffix(SUFFIX))
    return tuple(
        read_study(path, CeilingsStudy, gzip.decompress(path.read_bytes())) for path in files
    )


def ceilings_files(directory: Path) -> list[Path]:
    """The file of the study in `directory`, or the files of those in its folders."""
    file = directory / FILE_NAME
    return [file] if file.exists() else sorted(directory.glob(f"*/{FILE_NAME}"))


def ceilings_beside(results: Path) -> Path:
    """The directory of ceilings that belongs to results in OUTPUT/KIND/NAME.

    That is OUTPUT/ceilings; if it does not exist, `ceilings` beside OUTPUT, which is then a group
    of results.
    """
    output = results.resolve().parent.parent
    inside, beside = output / "ceilings", output.parent / "ceilings"
    return beside if beside.is_dir() and not inside.is_dir() else inside
