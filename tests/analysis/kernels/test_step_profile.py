"""A profile that was kept is read again as it was, or refused in one line: it may have been
changed by hand.
"""

import json
from pathlib import Path

import pytest

from cs336.analysis.columns import ProfileError
from cs336.analysis.kernels.step_profile import encode_profile, read_profile, write_profile
from tests.report.sections.kernels.profiles import make_cpu_profile, make_profile


@pytest.mark.parametrize("make", [make_profile, make_cpu_profile])
def test_what_was_written_is_read(make, tmp_path: Path) -> None:
    write_profile(make(), tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == make()


def changed(path: Path, place: tuple[str | int, ...], value: object) -> Path:
    """A file whose profile has that value in that place."""
    content = json.loads(encode_profile(make_profile()))
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("pictured", "step"), -1),
        (("pictured", "wall_s"), -1.0),
        (("format_version",), 99),
        (("num_steps",), 0),
        (("num_steps",), 1),
        (("num_steps",), 3),
        (("step_s",), []),
        (("phases", 1, "wall_s"), [0.012]),
        (("phases", 2, "launches", 0), -10),
        (("kernel_s",), 1e300),
        (("phases",), []),
        (("work",), "nothing"),
        # phases and what is left hold 77 kernels and 61.5 ms
        (("num_kernels",), 76),
        (("kernel_s",), 0.0616),
        (("left", "outside"), 2),
    ],
    ids=str,
)
def test_a_profile_that_contradicts_itself_is_refused(
    place: tuple[str | int, ...], value: object, tmp_path: Path
) -> None:
    with pytest.raises(ProfileError, match="step profile"):
        read_profile(changed(tmp_path / "p.json", place, value))


def test_the_sums_that_miss_the_whole_are_said(tmp_path: Path) -> None:
    with pytest.raises(
        ProfileError, match=r"hold 77 kernels and 0\.061500000 s, needed all 78 and 0\.061500000 s"
    ):
        read_profile(changed(tmp_path / "p.json", ("num_kernels",), 78))
