"""The traces in a directory: which ones are the ranks of one run."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ..columns import ProfileError
from .kineto_events import Distributed, read_distributed

_ENDINGS = (".json", ".json.gz", ".zip", ".sqlite", ".nsys-rep")
_RANK_IN_NAME = re.compile(r"rank[_-]?(\d{1,6})(?!\d)", re.ASCII)
"""The rank in a file's name, for traces that do not hold it: rank3_trace.json, rank-3.json.gz."""
MAX_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class _File:
    path: Path
    rank: int | None
    run: tuple[int, str]
    """World size and backend; ranks of one run have the same."""


def files_of_run(directory: Path) -> dict[int | None, Path]:
    """By rank, the traces of the one run in the directory or in its folders; the rank is None for
    a lone trace that does not name it.

    Raises ProfileError where there is no trace, or where there are several runs, which are named.
    """
    files = list(_files(directory))
    if not files:
        raise ProfileError(
            directory, "needed a directory with traces of torch.profiler or nsys, found none in it"
        )
    runs = _runs(files)
    if len(runs) > 1:
        names = [str(run[0].path.relative_to(directory)) for run in runs[:MAX_NAMED]]
        more = ", ..." if len(runs) > MAX_NAMED else ""
        raise ProfileError(
            directory,
            f"needed the traces of one run, got {len(runs)} that share no run "
            f"({', '.join(names)}{more}): name one file, or the folder of one run",
        )
    return {file.rank: file.path for file in runs[0]}


def _files(directory: Path) -> Iterator[_File]:
    """The traces in the directory and in the folders in it, by name."""
    for path in sorted((*directory.glob("*"), *directory.glob("*/*"))):
        if not path.name.endswith(_ENDINGS) or not path.is_file():
            continue
        if path.suffix == ".nsys-rep" and path.with_suffix(".sqlite").is_file():
            continue  # its export is there
        is_json = path.suffix not in (".sqlite", ".nsys-rep")
        info = read_distributed(path) if is_json else Distributed()
        if info is not None:
            rank = info.rank
            if rank is None and (name := _RANK_IN_NAME.search(path.name)):
                rank = int(name[1])
            yield _File(path=path, rank=rank, run=(info.world_size or 0, info.backend))


def _runs(files: Sequence[_File]) -> list[list[_File]]:
    """The files of each run, by rank.

    Files of one world size and backend are one run if their ranks differ. Otherwise each folder is
    one, as torchtitan writes one for each time that it profiles; and where a folder has a rank
    twice, or a file has no rank, nothing shows which files belong together.
    """
    runs = []
    for of_run in _grouped(files, lambda file: file.run):
        if _is_one(of_run):
            runs.append(of_run)
            continue
        for of_folder in _grouped(of_run, lambda file: file.path.parent):
            if _is_one(of_folder):
                runs.append(of_folder)
            else:
                runs += [[file] for file in of_folder]
    return runs


def _is_one(files: Sequence[_File]) -> bool:
    """Whether each file is another rank, or there is one file."""
    ranks = {file.rank for file in files}
    return len(files) == 1 or (len(ranks) == len(files) and None not in ranks)


def _grouped(files: Sequence[_File], key: Callable[[_File], Any]) -> list[list[_File]]:
    """The files of each key, and among these by rank."""
    ordered = sorted(files, key=lambda file: -1 if file.rank is None else file.rank)
    ordered.sort(key=key)
    return [list(group) for _, group in groupby(ordered, key)]
