"""What a step costs by modules, and what is said when it grows: seeded regressions and harmless
rewritings of small steps.
"""

import itertools
import sys
from dataclasses import replace
from functools import cache
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cs336.commands.configure import make_config
from cs336.config import Device
from cs336.costs import traces
from cs336.costs.step_costs import Costs, KeptCosts, module_of, read_costs, step_costs, write_costs
from cs336.costs.tape import Tape
from cs336.measure.traced import traced
from cs336.report.growth import Growth, costs_table, growths

from .step_versions import PROGRAMS, REGRESSIONS, drawn

CONFIG = make_config(Device.CUDA, size="small")
BATCH = CONFIG.batch_size
"""What factories get that take a `batch_size`."""
NUMBERS = itertools.count()
QUICK = ("softmax in fp32", "lost checkpoint", "loss kept in a list", "gradients not freed")


def module_from(text: str) -> ModuleType:
    """A module of its own for the source, which a configuration can name."""
    module = ModuleType(f"step_version_{next(NUMBERS)}")
    exec(compile(text, module.__name__, "exec"), module.__dict__)
    return module


def tape_of(text: str) -> Tape:
    """The tape of the step that the source makes."""
    module = module_from(text)
    name = module.__name__
    sys.modules[name] = module
    try:
        tape = traced(replace(CONFIG, model_factory=f"{name}:make"), {})
    finally:
        del sys.modules[name]
    assert tape.steps, tape.failure
    return tape


def costs_of(text: str) -> Costs:
    return step_costs(tape_of(text))


@cache
def base_costs(name: str) -> Costs:
    return costs_of(PROGRAMS[name].text())


def grown(name: str) -> list[Growth]:
    """What has grown by a regression."""
    regression = REGRESSIONS[name]
    text = PROGRAMS[regression.program].text(**regression.lines)
    return growths(base_costs(regression.program), costs_of(text))


def some(names: tuple[str, ...], every: object) -> list[object]:
    """The quick ones, and the others for those who have minutes."""
    others = [pytest.param(one, marks=pytest.mark.long) for one in every if one not in names]
    return [*names, *others]


@pytest.mark.parametrize("name", some(QUICK, REGRESSIONS))
def test_a_regression_is_told_with_its_module(name: str) -> None:
    regression = REGRESSIONS[name]
    headline, *_ = grown(name)
    assert headline.module in regression.modules, headline
    assert regression.quantity in ("", headline.quantity), headline
    assert regression.cause in headline.cause, headline


@pytest.mark.parametrize("seed", some((101, 102, 104, 110), range(100, 300)))
def test_a_harmless_rewriting_raises_no_alarm(seed: int) -> None:
    name, text = drawn(seed)
    assert growths(base_costs(name), costs_of(text)) == [], text


def test_flops_and_saved_bytes_are_those_of_a_real_step() -> None:
    program = PROGRAMS["mlp"]
    module = module_from(program.text(clip=""))
    model = module.Perceptron()
    x, y = torch.randn(BATCH, 20), torch.randn(BATCH)
    saved = dict[int, int]()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
    costs = costs_of(program.text(clip=""))
    assert sum(costs["flops"].values()) == counter.get_total_flops()
    # input and target are there before the pass; the loss itself, and its unreduced copy, are left
    inside = [x.untyped_storage().data_ptr(), y.untyped_storage().data_ptr()]
    of_pass = sum(amount for address, amount in saved.items() if address not in inside)
    of_model = sum(
        amount
        for part, amount in costs["saved_bytes"].items()
        if not module_of(part).startswith("(")
    )
    assert of_model == of_pass


def test_checkpoints_run_the_matmuls_of_blocks_again() -> None:
    """Each once, also the last of a block, as the mask of dropout follows it; the head not."""
    again = base_costs("checkpointed")["recomputed_flops"]
    tokens, width, blocks = BATCH * 32, 48, 3
    products = 2 * blocks * tokens * width**2
    assert again["layers.*.attn.qkv: matmul"] == 3 * products
    assert again["layers.*.attn.out: matmul"] == products
    assert again["layers.*.ffn.up: matmul"] == 4 * products
    assert again["layers.*.ffn.down: matmul"] == 4 * products
    assert "head: matmul" not in again
    assert not base_costs("lm")["recomputed_flops"]


STEP_OF = """
import torch
from torch import nn

def make():
    model = nn.Linear(3, 3, device="{device}")

    def step():
        loss = model(torch.ones(2, 3, device="{device}")).sum()
        loss.backward()
        {more}

    return step
"""


@pytest.mark.parametrize(
    ("device", "more", "told"),
    [
        ("cpu", "", "no tensor on a GPU"),
        ("cuda", "loss.item()", "needs the values"),
        ("cuda", "raise KeyError(7)", "KeyError: 7"),
    ],
)
def test_why_a_step_cannot_be_traced(device: str, more: str, told: str) -> None:
    module = module_from(STEP_OF.format(device=device, more=more))
    sys.modules[module.__name__] = module
    tape = traced(replace(CONFIG, model_factory=f"{module.__name__}:make"), {})
    del sys.modules[module.__name__]
    assert told in tape.failure
    assert not tape.steps


def test_a_step_that_keeps_tensors_is_not_repeated() -> None:
    """A tape as it is decoded has a third step only if that can be told from the second."""
    program = PROGRAMS["conv"]
    for lines, number in (({}, 3), (REGRESSIONS["features kept by the model"].lines, 2)):
        tape = tape_of(program.text(**lines))
        assert len(traces._decoded(traces.encoded(tape)).steps) == number


def test_costs_are_kept_and_shown(tmp_path) -> None:
    path = tmp_path / "kept.json"
    assert read_costs(path).steps == {}
    costs = base_costs("mlp")
    write_costs(path, KeptCosts(), {"b": costs, "a": costs})
    assert read_costs(path).steps == {"a": costs, "b": costs}
    assert read_costs(path).torch == torch.__version__
    for versions in ("1.0", "1.0 or 1.1", f"1.0 or {torch.__version__}"):
        kept = KeptCosts(torch=versions, steps={"a": costs, "b": costs})
        write_costs(path, kept, {"a": costs})
        assert {*str(read_costs(path).torch).split(" or ")} == {
            *versions.split(" or "),
            torch.__version__,
        }, "b stays of an older one"
        write_costs(path, kept, {"a": costs, "b": costs, "c": costs})
        assert read_costs(path).torch == torch.__version__
    doubled = {quantity: dict(parts) for quantity, parts in costs.items()}
    doubled["operations"] = {part: 2 * count for part, count in costs["operations"].items()}
    (row,) = [
        row
        for row in costs_table({"a": costs}, {"a": doubled}).values
        if row["quantity"] == "operations"
    ]
    assert row["change"] == 1
    path.write_text('{"format_version": 1, "steps": 3}')
    with pytest.raises(ValueError, match=str(path)):
        read_costs(path)
