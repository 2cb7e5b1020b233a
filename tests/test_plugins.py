import sys
from pathlib import Path

import pytest

from cs336.plugins import PluginError, load

from .plugins import install


def test_a_plugin_is_imported_only_when_its_group_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, "A, B = 'first', 2\n", {"cs336.a": "A", "cs336.b": "B"})
    assert load("cs336.nothing") == []
    assert "some_plugin" not in sys.modules
    assert (load("cs336.a"), load("cs336.b", int)) == (["first"], [2])


@pytest.mark.parametrize("source", ["raise OSError('a\\nb')", "", "A = 'text'", "def"])
def test_errors_of_a_plugin_are_one_line_with_its_name(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, source, {"cs336.a": "A"})
    with pytest.raises(PluginError) as raised:
        load("cs336.a", int)
    assert "some-plugin" in str(raised.value)
    assert "\n" not in str(raised.value)
