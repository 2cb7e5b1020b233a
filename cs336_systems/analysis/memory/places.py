"""The lines of the program itself in a call stack, without those of libraries."""

import re

from cs336_systems.analysis.memory.device_memory import Stack
from cs336_systems.analysis.memory.profile import Place

MAX_PLACES = 6
NUM_PARTS = 2
"""Parts of a file's path that are kept; the others say more about the machine than about the program."""
_TORCH = re.compile(r"(?:^|[/\\](?:site|dist)-packages[/\\])torch[/\\]")
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3[^/\\]*[/\\]")


def places_of(stack: Stack) -> tuple[Place, ...]:
    """The innermost calls in Python code outside of PyTorch; those in other packages only if there are no others."""
    of_python = [frame for frame in stack if frame.filename.endswith(".py") and not _TORCH.search(frame.filename)]
    own = [frame for frame in of_python if not _INSTALLED.search(frame.filename)] or of_python
    return tuple(
        Place(file="/".join(re.split(r"[/\\]", frame.filename)[-NUM_PARTS:]), line=frame.line, function=frame.name)
        for frame in own[:MAX_PLACES]
    )
