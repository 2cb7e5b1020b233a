"""A memory profile is read as it was written; one that was changed by hand is refused in one line."""

import json
from pathlib import Path

import pytest

from cs336_systems.analysis.columns import ProfileError
from cs336_systems.analysis.memory.profile import encode_memory_profile, read_memory_profile, write_memory_profile
from cs336_systems.cli import main
from tests.report.sections.memory.profiles import make_bare, make_inference, make_memory, make_oom


@pytest.mark.parametrize("make", [make_memory, make_inference, make_bare, make_oom])
def test_what_was_written_is_read(make, tmp_path: Path) -> None:
    write_memory_profile(make(), tmp_path / "p.json")
    assert read_memory_profile(tmp_path / "p.json") == make()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("peak", "allocated_bytes"), 0), (("peak", "categories"), []), (("peak", "categories", 0, "num_bytes"), -1),
        (("boundaries", 2, "allocated_bytes"), 1), (("boundaries", 0, "categories", 1, "num_bytes"), 10**30),
        (("timeline", "time_s"), []), (("timeline", "time_s"), [0.0]), (("timeline", "categories"), ["gradients"]),
        (("timeline", "num_bytes"), []), (("timeline", "num_bytes", 1), [5]), (("timeline", "reserved_bytes"), []),
        (("largest", 0, "count"), -5), (("work", "events"), "many"), (("peak", "phase"), None),
    ],
    ids=str,
)  # fmt: skip
def test_a_profile_that_contradicts_itself_is_refused(
    place: tuple[str | int, ...], value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(encode_memory_profile(make_memory()))
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path = tmp_path / "p.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match="memory profile"):
        read_memory_profile(path)
    assert main(["memory", str(path), "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
