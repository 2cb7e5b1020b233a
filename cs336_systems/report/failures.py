"""Where in the user's own code a run or a cell failed, from the traceback in its record."""

import re

from cs336_systems.record import Failure, RunRecord

_FRAME = re.compile(r'^  File "([^"\n]+)", line (\d+).*\n(?:    .*\n|  \[Previous .*\n)*', re.MULTILINE)
_NOT_THE_USERS = ("cs336_systems/", "importlib/", "<frozen importlib", "torch/", "triton/")
"""Beginnings of the paths, in a record's traceback, of files that are not the user's."""


def own_traceback(record: RunRecord) -> str:
    """The traceback of a failed run of the user's own model, reduced to the user's files; empty for other runs."""
    return _of_the_user(record.failure) if record.config.model_factory else ""


def own_place(record: RunRecord) -> str:
    """The innermost file and line of the user's own code, in the model's package if possible; empty for other runs."""
    return place_in(record.config.model_factory, record.failure) if record.config.model_factory else ""


def _of_the_user(failure: Failure | None) -> str:
    """The traceback reduced to the user's files; empty if it has none."""
    traceback = failure.traceback if failure is not None else None
    if traceback is None or not any(_is_users(frame) for frame in _FRAME.finditer(traceback)):
        return ""
    return _FRAME.sub(lambda frame: frame[0] if _is_users(frame) else "", traceback)


def place_in(name: str, failure: Failure | None) -> str:
    """The innermost file and line of the user's own code, in the package of `name` if possible; empty if none."""
    frames = list(_FRAME.finditer(_of_the_user(failure)))
    package = name.partition(":")[0].partition(".")[0]
    nearest = [frame for frame in frames if frame[1].startswith((f"{package}.py", f"{package}/"))] or frames
    return f"{nearest[-1][1]}, line {nearest[-1][2]}" if nearest else ""


def _is_users(frame: re.Match[str]) -> bool:
    return not frame[1].startswith(_NOT_THE_USERS)
