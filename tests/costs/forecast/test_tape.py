import pytest

from cs336_systems.config import Phase
from cs336_systems.costs.forecast.tape import Category, Tape


def test_bytes_are_the_product_that_the_formula_shows() -> None:
    tape = Tape({"batch": 3, "T": 5, "d_ff": 7})
    handle = tape.new(Category.ACTIVATIONS, "hidden", "2 batch T d_ff", 2)
    spec = tape.specs[handle]
    assert spec.formula == "2 x batch x T x d_ff x 2"
    assert spec.size_bytes == 2 * 3 * 5 * 7 * 2
    assert tape.specs[tape.new(Category.ACTIVATIONS, "hidden", "2 batch T d_ff", 2)] is spec


def test_a_tensor_is_freed_when_the_last_reference_goes() -> None:
    tape = Tape({"T": 4})
    tape.begin(Phase.FORWARD)
    first = tape.new(Category.ACTIVATIONS, "first", "T", 4)
    second = tape.new(Category.ACTIVATIONS, "second", "T T", 4)
    assert tape.keep(first) == first
    tape.drop(first, second)
    tape.begin(Phase.BACKWARD)
    tape.drop(first)
    assert tape.events == [Phase.FORWARD, first, second, ~second, Phase.BACKWARD, ~first]
    with pytest.raises(AssertionError):
        tape.drop(first)


def test_an_axis_without_a_size_is_our_own_mistake() -> None:
    with pytest.raises(KeyError, match="heads"):
        Tape({"T": 4}).new(Category.ACTIVATIONS, "scores", "heads T T", 4)
