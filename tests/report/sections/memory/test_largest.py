"""What is said of the largest allocations against a count of each allocation in the raw events of a snapshot."""

import pickle
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.analysis.memory.explain import explain_memory
from cs336_systems.analysis.memory.profile import Place
from cs336_systems.report.sections.memory.words import NUM_NAMES, largest_words
from tests.analysis.memory.programs import Program
from tests.analysis.memory.snapshots import MIB, frame
from tests.report.sections.memory.profiles import SAVED, make_like

SIZES = (9 * MIB, 7 * MIB, 5 * MIB)
LINES = (43, 448, 565, 453, 420)
SENTENCE = re.compile(r"(?P<count>once|[\d,]+ times) (?P<bytes>[\d,]+) bytes \([^)]*\): (?P<uses>.*)")
USE = re.compile(r"(?:([\d,]+) )?temporary(?: at (\S+) \w+)?")
OTHERS = re.compile(r", (\d+) others?$")


def counts_of(path: Path) -> dict[int, Counter[str]]:
    """By size: how many allocations each innermost line asked for; empty for those without a stack."""
    (events,) = pickle.loads(path.read_bytes())["device_traces"]
    counts: dict[int, Counter[str]] = {}
    for event in events:
        if event["action"] == "alloc":
            inner = event["frames"][0] if event["frames"] else None
            place = f"project/{inner['name']}.py:{inner['line']}" if inner else ""
            counts.setdefault(event["size"], Counter())[place] += 1
    return counts


def number(text: str | None) -> int:
    return 1 if text == "once" else int((text or "0").removesuffix(" times").replace(",", ""))


def check(part: str, counts: Counter[str]) -> None:
    """That the words say nothing of the allocations of one size but what their count says."""
    sentence = SENTENCE.fullmatch(part)
    assert sentence is not None, part
    assert number(sentence["count"]) == counts.total()
    others = OTHERS.search(sentence["uses"])
    uses = OTHERS.sub("", sentence["uses"]).split(", ")
    found = {use[2] or "": number(use[1] or str(counts.total())) for use in map(USE.fullmatch, uses) if use}
    assert len(found) == len(uses) == min(len(counts), NUM_NAMES)
    assert all(counts[place] == count for place, count in found.items())
    assert sum(found.values()) + (int(others[1]) if others else 0) == counts.total()
    assert sorted(found.values(), reverse=True) == [count for _, count in counts.most_common(NUM_NAMES)]


def place(line: int) -> Place:
    return Place(file="lm/model.py", line=line, function="f")


@pytest.mark.parametrize("seed", range(5))
def test_each_place_has_its_own_count(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    stacks: list[Any] = [[], *([frame("forward", line), frame("main", rng.randrange(9))] for line in LINES)]
    program = Program()
    program.record()
    for _ in range(300):
        allocated = program.malloc(rng.choice(SIZES), frames=rng.choices(stacks, range(1, 7))[0])
        program.free(allocated)
    program.malloc(3 * MIB, frames=stacks[1])  # once, of one place
    for _ in range(3):
        program.malloc(2 * MIB, frames=stacks[2])
        program.malloc(MIB, frames=[])
    path = program.write(tmp_path)
    parts = largest_words(explain_memory(path).largest, 6).split("; ")
    counts = counts_of(path)
    assert [number(part.split(" bytes")[0].split(" ")[-1]) for part in parts] == sorted(counts, reverse=True)
    assert max(map(len, counts.values())) == len(stacks)
    for part, of_size in zip(parts, sorted(counts, reverse=True), strict=True):
        check(part, counts[of_size])


def test_each_use_has_its_own_count() -> None:
    """Of 16, 9 saved at one place, 6 temporary at two and one in another phase; beyond four uses only how many."""
    rows = [
        make_like(7, 9, category=SAVED, phase="forward", places=(place(1),)),
        make_like(7, 4, phase="forward", places=(place(2),)),
        make_like(7, 2, phase="forward", places=(place(3),)),
        make_like(7, 1, phase="backward"),
    ]
    assert largest_words(rows, 1) == (
        "16 times 7,340,032 bytes (7.00 MiB): 9 saved activations in forward at lm/model.py:1 f, 4 temporary in "
        "forward at lm/model.py:2 f, 2 temporary in forward at lm/model.py:3 f, 1 temporary in backward"
    )
    more = [make_like(7, 1000, phase=name) for name in ("a", "b")]
    assert largest_words([*more, *rows], 1).endswith(" 4 temporary in forward at lm/model.py:2 f, 3 others")


def test_blocks_of_several_sizes_are_not_all_as_large_as_the_largest() -> None:
    rows = [make_like(7, 2), make_like(8, 1, requested_bytes=7 * MIB)]
    assert "(7.00 MiB, in blocks of up to 8.00 MiB)" in largest_words(rows, 1)
    assert "(7.00 MiB, in a block of 8.00 MiB)" in largest_words(rows[1:], 1)
