"""The files of studies of ceilings: an earlier study is kept, and ceilings are found by the name of their device."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from cs336_systems.config import Precision
from cs336_systems.costs.calls import Collective
from cs336_systems.costs.curves import Curves
from cs336_systems.costs.hardware import bare_name
from cs336_systems.files import encode_json, write_atomically
from cs336_systems.studies.ceilings_records import CeilingsStudy, Launch, ProductPrecision
from cs336_systems.studies.records import read_study
from cs336_systems.sweep.store import time_stamp

FILE_NAME = "ceilings.json"


def keep_earlier(directory: Path, study: CeilingsStudy) -> Path | None:
    """Copy the directory's present study, if it differs, to a file beside it that is named after the time.

    Return the path of the copy, or None. The present file stays until the new study replaces it, so that other
    processes always find one.
    """
    present = directory / FILE_NAME
    if not present.is_file() or (data := present.read_bytes()) == encode_json(study):
        return None
    kept = present.with_name(f"{present.stem}-before-{time_stamp()}{present.suffix}")
    write_atomically(kept, data)
    return kept


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best that studies have measured on each device; the rates of a step are reported as shares of it."""

    studies: tuple[CeilingsStudy, ...] = ()
    _curves: dict[str, Curves | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By the name of the device, once they were asked for, so that predictions from them can be kept."""

    @property
    def device_names(self) -> list[str]:
        """The devices that were measured, without the manufacturer's name."""
        return list(dict.fromkeys(bare_name(study.device_name) for study in self.studies))

    def flops_per_s(self, device_name: str, precision: Precision | ProductPrecision) -> float | None:
        """Highest rate of matmuls that any study of this device measured, or None."""
        name, wanted = bare_name(device_name), ProductPrecision(precision)
        found = (study.product_ceiling(wanted) for study in self.studies if bare_name(study.device_name) == name)
        return max((rate for rate in found if rate is not None), default=None)

    def curves(self, device_name: str) -> Curves | None:
        """The times from which those of steps are predicted: of the first study of this device that has them.

        The kernels of steps are those of all its studies, so that sizes can be measured one after the other. The time
        of a launch is the median over the studies, since the same devices are in machines with faster and slower hosts:
        over those that have timed the launches of a step, if there are any.
        """
        name = bare_name(device_name)
        if name not in self._curves:
            self._curves[name] = self._joined_curves(name)
        return self._curves[name]

    def _joined_curves(self, name: str) -> Curves | None:
        studies = [study for study in self.studies if bare_name(study.device_name) == name]
        found = [curves for study in studies if (curves := study.curves()) is not None]
        if not found:
            return None
        first, *others = found
        matmuls = {
            precision: (*own, *(each for other in others for each in other.matmuls[precision] if each.form is not None))
            for precision, own in first.matmuls.items()
        }
        passes = next((each.passes for each in found if each.passes), {})
        gap_s = next((each.queued_gap_s for each in found if each.queued_gap_s is not None), None)
        hosts = [each for each in studies if each.launch_s(Launch.STEP) is not None] or studies
        return replace(
            first, matmuls=matmuls, passes=passes, queued_gap_s=gap_s, collectives=self.collectives(name),
            launch_s=median(time_s for each in hosts if (time_s := each.host_call_s) is not None),
        )  # fmt: skip

    def collectives(self, device_name: str) -> dict[int, dict[Collective, dict[int, float]]]:
        """Times of collectives among several devices of this name, by the number of ranks."""
        name = bare_name(device_name)
        studies = [study for study in self.studies if bare_name(study.device_name) == name]
        numbers = sorted({cell.world_size for study in studies for cell in study.reductions})
        found = {ranks: self.collective_times(name, ranks) for ranks in numbers}
        return {ranks: times for ranks, times in found.items() if times}

    def collective_times(self, device_name: str, ranks: int) -> dict[Collective, dict[int, float]]:
        """Times of each collective among `ranks` devices of this name, by bytes, from the study with most sizes."""
        name = bare_name(device_name)
        found: dict[Collective, dict[int, float]] = {}
        for study in self.studies:
            if bare_name(study.device_name) == name:
                for kind, times in study.collective_times(ranks).items():
                    found[kind] = max(found.get(kind, {}), times, key=len)
        return found


NO_CEILINGS = Ceilings()


def load_ceilings(directory: Path) -> Ceilings:
    """The study in `directory`, which need not exist, or those in its folders; raise RecordError for a damaged one."""
    return Ceilings(tuple(read_study(path, CeilingsStudy) for path in ceilings_files(directory)))


def ceilings_files(directory: Path) -> list[Path]:
    """The file of the study in `directory`, or the files of those in its folders."""
    own = directory / FILE_NAME
    return [own] if own.exists() else sorted(directory.glob(f"*/{FILE_NAME}"))


def ceilings_beside(results: Path) -> Path:
    """The directory of ceilings that belongs to results in OUTPUT/KIND/NAME.

    That is OUTPUT/ceilings; if it does not exist, `ceilings` beside OUTPUT, which is then a group of results.
    """
    output = results.resolve().parent.parent
    own, beside = output / "ceilings", output.parent / "ceilings"
    return beside if beside.is_dir() and not own.is_dir() else own
