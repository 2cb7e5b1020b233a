"""Explains a profiler's file: trace, then the phase, step and module of each kernel, then sums as a `StepProfile`.

`reading.py` reads the file, `attribution.py` places the kernels, and `summary.py` adds them up. A run on several ranks
has one report of nsys, or a trace of torch.profiler for each rank.
"""

from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.util import get_temp_dir
from pathlib import Path
from tempfile import TemporaryDirectory

from cs336_systems.analysis.kernels.attribution import attribute
from cs336_systems.analysis.kernels.nsys_export import export
from cs336_systems.analysis.kernels.parts import AttentionNames
from cs336_systems.analysis.kernels.phases import PhaseNames, check_names
from cs336_systems.analysis.kernels.ranks import by_rank, collectives_of, files_of_others, rank_times, without_rank
from cs336_systems.analysis.kernels.reading import read_trace
from cs336_systems.analysis.kernels.step_profile import StepProfile
from cs336_systems.analysis.kernels.summary import summarise
from cs336_systems.analysis.kernels.trace import Trace
from cs336_systems.config import RunConfig
from cs336_systems.text import inert_line

REPORT_ENDING = ".nsys-rep"


def explain(
    path: Path,
    config: RunConfig | None = None,
    phases: PhaseNames | None = None,
    attention: AttentionNames | None = None,
) -> StepProfile:
    """Explain the profile at `path`; with the run's `config`, attention has its FLOPs too.

    Of a run on several ranks, the profile is of the first, with the times of all. A report of nsys is first exported by
    nsys. Raises ProfileError for a file that is no profile, UnknownRangeError for a range name in `phases` that the
    file does not have, NsysError if nsys is needed and missing.
    """
    own_model = config is not None and config.model_factory is not None
    profiles, collectives = [], []
    for rank, trace in _traces(path):
        check_names(trace, phases or PhaseNames())
        attribution = attribute(trace, phases)
        profile = summarise(
            attribution,
            source=inert_line(path.name),
            model=config.model if config and not own_model else None,
            batch_size=config.batch_size if config and not own_model else None,
            names=attention,
        )
        profiles.append((rank, profile))
        collectives.append(collectives_of(attribution))
    first = profiles[0][1]
    is_of_one = without_rank(path.name) != path.name  # chosen by its user
    if config is not None and len(profiles) < config.ranks and not is_of_one:
        missing = [str(rank) for rank in range(config.ranks) if rank not in dict(profiles)]
        note = f"There is no trace of rank {', '.join(missing)} of {config.ranks}."
        first = replace(first, notes=(*first.notes, note))
    return replace(first, ranks=rank_times(profiles, collectives)) if len(profiles) > 1 else first


def _traces(path: Path) -> Iterator[tuple[int, Trace]]:
    """Each rank and its trace, one after the other; the first alone if there are no others."""
    with TemporaryDirectory(prefix="cs336-", dir=get_temp_dir()) as scratch:  # a sweep that is killed removes it too
        file = export(path, Path(scratch)) if path.suffix == REPORT_ENDING and path.is_file() else path
        trace = read_trace(file)
    if several := by_rank(trace):
        yield from several.items()
        return
    yield 0, trace
    del trace
    for rank, beside in files_of_others(path).items():
        yield rank, read_trace(beside)
