"""Private names of PyTorch: this test names the one that is gone, and what fails without it."""

import ast
from pathlib import Path

import pytest

import cs336
from cs336.costs.internals import INTERNALS, internal

PACKAGE = Path(cs336.__file__).parent
PLACES = [*(PACKAGE / "costs").glob("*.py"), PACKAGE / "measure" / "traced.py"]
FAKE_GROUP = "torch.testing._internal.distributed.fake_pg"
"""Of PyTorch's own tests; ranks that are not there are traced with it."""


@pytest.mark.parametrize("path", INTERNALS)
def test_pytorch_has_the_private_name(path: str) -> None:
    assert internal(path) is not None, INTERNALS[path]


def private_names(path: Path) -> set[str]:
    """Names below `torch` of which a part is private, without operators."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return {
        name
        for name in names
        if name.startswith("torch.")
        and not name.startswith("torch.ops.")
        and any(part.startswith("_") for part in name.split("."))
    }


def test_all_private_names_stand_in_one_place() -> None:
    elsewhere = {
        (path.name, name)
        for path in PLACES
        if path.name != "internals.py"
        for name in private_names(path)
        if name not in INTERNALS and not name.startswith(FAKE_GROUP)
    }
    assert elsewhere == set()
