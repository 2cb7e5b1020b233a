"""Makes a plug-in for a test: a distribution with entry points in a directory on the path."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest


def install(
    monkeypatch: pytest.MonkeyPatch, directory: Path, source: str, points: Mapping[str, str]
) -> None:
    """Install the distribution `some-plugin` with the module `some_plugin` for the test's time.

    The source is the module's; `points` maps a group to the name of its object in the module.
    """
    (directory / "some_plugin.py").write_text(source)
    metadata = directory / "some_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: some-plugin\nVersion: 1.0\n")
    entries = [f"[{group}]\nmine = some_plugin:{name}\n" for group, name in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(entries))
    monkeypatch.syspath_prepend(directory)
    monkeypatch.delitem(sys.modules, "some_plugin", raising=False)
