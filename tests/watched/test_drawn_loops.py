"""Loops drawn at random, each run with `watch` and without."""

import pytest

from tests.watched.drawn_loops import drawn, false_statements, one_rank

DRAWS, IN_A_TEST, MANY = 300, 30, 1000


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    with one_rank(tmp_path_factory.mktemp("group")):
        yield


def false_of(seeds, output):
    false = {}
    for seed in seeds:
        if said := false_statements(drawn(seed), output):
            false[seed] = said
    return false


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, DRAWS, IN_A_TEST))
def test_watching_changes_nothing_and_says_nothing_false(first, tmp_path, no_pictures):
    assert not false_of(range(first, first + IN_A_TEST), tmp_path)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_of_many_loops_too(tmp_path, no_pictures):
    assert not false_of(range(DRAWS, DRAWS + MANY), tmp_path)
