"""The parts of a start, against sleeps of known length."""

import contextlib
import time

import pytest

from cs336 import waits

SHORT_S, LONG_S = 0.02, 0.05


@pytest.fixture(autouse=True)
def _nothing_before():
    waits.taken()
    yield
    waits.taken()


def test_a_part_inside_another_is_taken_out_of_its_time() -> None:
    begun = time.perf_counter()
    with waits.waiting_for("outer"):
        time.sleep(SHORT_S)
        for _ in range(2):
            with waits.waiting_for("inner"):
                time.sleep(LONG_S)
    whole_s = time.perf_counter() - begun
    parts = waits.taken()
    assert list(parts) == ["inner", "outer"]
    assert parts["inner"] >= 2 * LONG_S
    assert SHORT_S <= parts["outer"] <= whole_s - 2 * LONG_S
    assert sum(parts.values()) <= whole_s
    assert waits.taken() == {}


def test_a_part_that_an_exception_leaves_ends_with_the_one_around_it() -> None:
    with contextlib.suppress(KeyError), waits.waiting_for("outer"):
        waits.begin("inner")
        raise KeyError
    waits.end()  # without any part
    assert set(waits.taken()) == {"outer", "inner"}


def test_each_part_is_told_when_it_begins_and_when_it_goes_on() -> None:
    told: list[str] = []
    waits.tell(told.append)
    with waits.waiting_for("outer"), waits.waiting_for("inner", "of 3"):
        pass
    waits.tell(lambda _: None)
    assert told == ["outer", "inner: of 3", "outer"]


def test_what_came_before_is_the_rest_since_the_process_began() -> None:
    with waits.waiting_for("known"):
        time.sleep(SHORT_S)
    waits.note_since_start("before")
    parts = waits.taken()
    since_s = time.time() - waits.psutil.Process().create_time()
    # the kernel keeps the start of a process in hundredths of a second
    assert sum(parts.values()) == pytest.approx(since_s, abs=0.5)
