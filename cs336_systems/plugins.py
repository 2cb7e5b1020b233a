"""What other installed distributions add to this program, by entry points.

A distribution offers an object under a group such as `cs336.readers`; whoever needs the objects of
a group calls `load`. An entry point is imported then and not before, so that commands which do not
need it neither wait for it nor fail because of it.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .text import inert_line


class PluginError(ValueError):
    """A distribution's entry point cannot be loaded; the message names the distribution."""


def load(group: str, kind: type = object) -> list[Any]:
    """The objects, each an instance of `kind`, that installed distributions offer in the group.

    They come in the order of the names of distributions and entry points, which is the same in
    every process. Raises PluginError for an entry point that fails to import or is something else.
    """
    points = sorted(entry_points(group=group), key=lambda point: (_distribution(point), point.name))
    return [_object(point, kind) for point in points]


def _distribution(point: EntryPoint) -> str:
    """Name of the distribution that offers the entry point; empty if that is not known."""
    return "" if point.dist is None else point.dist.name


def _object(point: EntryPoint, kind: type) -> object:
    """Import what the entry point names; raise PluginError unless it is an instance of `kind`."""
    where = f"plug-in {_distribution(point)} ({point.group}: {point.value})"
    try:
        value = point.load()
    except Exception as error:  # the import runs the plug-in's code, which may raise anything
        problem = f"cannot be loaded ({type(error).__name__}: {error})"
        raise PluginError(inert_line(f"{where}: {problem}: mend or uninstall it")) from error
    if not isinstance(value, kind):
        needed = f"needed an instance of {kind.__name__}, got {type(value).__name__}"
        raise PluginError(inert_line(f"{where}: {needed}: mend or uninstall it"))
    return value
