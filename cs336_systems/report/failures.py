"""Where in the user's own code a run failed, from the traceback in its record."""

import re

from cs336_systems.record import RunRecord

_FRAME = re.compile(r'^  File "([^"\n]+)", line (\d+).*\n(?:    .*\n|  \[Previous .*\n)*', re.MULTILINE)
_NOT_THE_USERS = ("cs336_systems/", "importlib/", "<frozen importlib", "torch/")
"""Beginnings of the paths, in a record's traceback, of files that are not the user's."""


def own_traceback(record: RunRecord) -> str:
    """The traceback of a failed run of the user's own model, reduced to the user's files; empty for other runs."""
    traceback = record.failure.traceback if record.failure is not None and record.config.model_factory else None
    if traceback is None or not any(_is_users(frame) for frame in _FRAME.finditer(traceback)):
        return ""
    return _FRAME.sub(lambda frame: frame[0] if _is_users(frame) else "", traceback)


def own_place(record: RunRecord) -> str:
    """The innermost file and line of the user's own code, in the model's package if possible; empty for other runs."""
    frames = list(_FRAME.finditer(own_traceback(record)))
    package = (record.config.model_factory or "").partition(":")[0].partition(".")[0]
    nearest = [frame for frame in frames if frame[1].startswith((f"{package}.py", f"{package}/"))] or frames
    return f"{nearest[-1][1]}, line {nearest[-1][2]}" if nearest else ""


def _is_users(frame: re.Match[str]) -> bool:
    return not frame[1].startswith(_NOT_THE_USERS)
