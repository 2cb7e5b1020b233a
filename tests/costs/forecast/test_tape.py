from dataclasses import astuple, replace

import pytest

from cs336_systems.config import SIZES, Attention, Device, Mode, OptimizerKind, Parallel, Phase, Precision, RunConfig
from cs336_systems.costs.forecast.step import StepTape, tape_of
from cs336_systems.costs.forecast.tape import Category, Tape
from cs336_systems.costs.forecast.ways import WAYS


def test_bytes_are_the_product_that_the_formula_shows() -> None:
    tape = Tape({"batch": 3, "T": 5, "d_ff": 7})
    handle = tape.new(Category.ACTIVATIONS, "hidden", "2 batch T d_ff", 2)
    spec = tape.spec(handle)
    assert spec.formula == "2 x batch x T x d_ff x 2"
    assert spec.size_bytes == 2 * 3 * 5 * 7 * 2
    assert tape.spec(tape.new(Category.ACTIVATIONS, "hidden", "2 batch T d_ff", 2)) is spec


def test_a_tensor_is_freed_when_the_last_reference_goes() -> None:
    tape = Tape({"T": 4})
    tape.begin(Phase.FORWARD)
    first = tape.new(Category.ACTIVATIONS, "first", "T", 4)
    second = tape.new(Category.ACTIVATIONS, "second", "T T", 4)
    assert tape.keep(first) == first
    tape.drop(first, second)
    tape.begin(Phase.BACKWARD)
    tape.drop(first)
    assert tape.events == [first, second, ~second, ~first]
    assert tape.steps == [[(Phase.FORWARD, 0, 0), (Phase.BACKWARD, 3, 0)]]
    with pytest.raises(AssertionError):
        tape.drop(first)


def test_an_axis_without_a_size_is_our_own_mistake() -> None:
    with pytest.raises(KeyError, match="heads"):
        Tape({"T": 4}).new(Category.ACTIVATIONS, "scores", "heads T T", 4)


TINY = RunConfig(size="tiny", model=SIZES["tiny"], device=Device.CUDA)


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        replace(TINY, precision=Precision.BF16, batch_size=3, checkpoint_blocks=1),
        replace(TINY, model=replace(SIZES["gpt2"], num_layers=2), optimizer=OptimizerKind.FOREACH),
        replace(TINY, model=replace(SIZES["tiny"], attention=Attention.SDPA), optimizer=OptimizerKind.FUSED),
        replace(TINY, model=replace(SIZES["tiny"], context_length=77, d_ff=200), mode=Mode.INFERENCE),
        *(replace(TINY, parallel=way, ranks=3) for way in WAYS if way is not Parallel.NONE),
    ],
)
def test_the_tape_of_a_run_is_as_if_each_step_were_written_for_its_own_sizes(config: RunConfig) -> None:
    step = StepTape(config)
    step.set_up()
    for _ in range(step.way.steps + 1):
        step.run()
    found = tape_of(config)
    assert found.events == step.tape.events
    assert found.steps == step.tape.steps
    handles = range(len(step.tape.tensors))
    assert [astuple(found.spec(each)) for each in handles] == [astuple(step.tape.spec(each)) for each in handles]
    wanted = [astuple(step.tape.operations[each]) for each in step.tape.launches]
    assert [astuple(found.operations[each]) for each in found.launches] == wanted
