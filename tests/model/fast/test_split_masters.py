"""Masters that are stored as their bf16 copies and what these lack."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cs336_systems.config import Mode, RunConfig
from cs336_systems.measure.clock import HostClock
from cs336_systems.measure.counters import memory_now
from cs336_systems.measure.step import TrainingStep
from cs336_systems.model.fast.master_adamw import MasterAdamW
from cs336_systems.model.fast.model import FastLM
from cs336_systems.model.fast.weights import joined_values, split_values
from cs336_systems.record import Moment
from tests.model.fast.test_weights import AUTOCAST, MODELS, fast, make

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SPLIT = replace(AUTOCAST, cast_once=True, split_masters=True)


def any_bits(count: int) -> Tensor:
    """fp32 values with random bits: of every magnitude, subnormal and infinite ones and NaN among them."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64).to(torch.int32)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, torch.finfo(torch.float32).max, 2.0**-149, -(2.0**-130)])
    return torch.cat([bits.view(torch.float32), special])


@pytest.mark.parametrize("device", DEVICES)
def test_a_value_is_known_to_the_last_bit_from_its_halves(device: str) -> None:
    values = any_bits(2**18).to(device)
    narrow, remainder = split_values(values)
    assert (narrow.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    found, is_nan = joined_values(narrow, remainder), values.isnan()
    assert is_nan.any()
    assert torch.equal(found[~is_nan].view(torch.int32), values[~is_nan].view(torch.int32))
    assert found[is_nan].isnan().all()
    assert narrow[is_nan].isnan().all()


def test_a_copy_is_rounded_as_pytorch_rounds_but_for_halves() -> None:
    """PyTorch rounds a number half way between two to the even one."""
    values = any_bits(2**18)
    values = values[~values.isnan()]
    is_half = (values.view(torch.int32) & 0xFFFF) == 0x8000
    found = split_values(values)[0]
    assert torch.equal(found[~is_half], values[~is_half].bfloat16())
    halves = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 2.0**-134])
    assert split_values(halves)[0].tolist() == [1 + 2.0**-7, 1 + 2.0**-6, -1 - 2.0**-7, 2.0**-133]


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_gradients_give_the_same_masters(name: str, device: str, fp8: bool, moments: torch.dtype) -> None:
    """To the last bit on a CPU; on a GPU the two are different kernels."""
    model = make(name).to(device)
    models = [FastLM(copy.deepcopy(model), replace(AUTOCAST, cast_once=True, fp8=fp8)) for _ in range(2)]
    optimizers = [
        MasterAdamW(each.weights, lr=0.01, weight_decay=0.1, moments=moments, splits=each is models[1])
        for each in models
    ]
    before = {key: value.clone() for key, value in models[0].state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for one, other in zip(models[0].weights, models[1].weights, strict=True):
            for place, same in ((one.copy, other.copy), (one.read, other.read)):
                if place is not None and same is not None:
                    place.leaf.grad = torch.randn(place.leaf.shape, generator=generator).to(place.leaf)
                    same.leaf.grad = place.leaf.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    away = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 1e-6, "atol": 1e-7}
    expected, found = (each.state_dict() for each in models)
    torch.testing.assert_close(found, expected, **away)
    assert not any(torch.equal(found[key], value) for key, value in before.items())
    split = [weight for weight in models[1].weights if weight.remainder is not None]
    assert len(split) >= 7 * len(models[1].layers)
    for weight in split:
        assert weight.copy is not None
        assert torch.equal(weight.copy.values, split_values(weight.values())[0].view(-1))
        assert weight.largest is None or weight.largest == weight.copy.values.abs().max()


def test_only_what_the_model_reads_as_a_copy_is_split() -> None:
    for name in MODELS:
        model = fast(make(name))
        names = {parameter: key for key, parameter in model.named_parameters()}
        MasterAdamW(model.weights, splits=True)
        assert {names[weight.master] for weight in model.weights if weight.remainder is None} == {
            key
            for key in names.values()
            if key.startswith(("token_embeddings", "positions")) or key.split(".")[-2].startswith("ln")
        }
        for weight in model.weights:
            assert weight.master.numel() == (weight.shape.numel() if weight.remainder is None else 0)


@pytest.mark.parametrize("settings", [{}, {"fused_blocks": True, "fused_loss": True}, {"checkpoint_blocks": 1}])
@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_same_training(name: str, settings: dict[str, object]) -> None:
    config = replace(SPLIT, model=MODELS[name], **settings)  # type: ignore[arg-type]
    expected, found = (losses_of(replace(config, split_masters=split), make(name)) for split in (False, True))
    assert found[:3] == expected[:3], "before one of 65,536 updates rounds a half to another side"
    assert found == pytest.approx(expected, rel=1e-3)
    assert found[-1] < found[0]


def losses_of(config: RunConfig, model: torch.nn.Module) -> list[float]:
    step = TrainingStep(config, model)
    return [step(HostClock())[1].item() for _ in range(8)]


@pytest.mark.parametrize("name", MODELS)
def test_two_bytes_less_are_kept_of_each_element_of_a_remainder(name: str) -> None:
    whole, split = (
        TrainingStep(replace(SPLIT, model=MODELS[name], split_masters=each), make(name)) for each in (False, True)
    )
    before, after = (memory_now(step, Moment.INITIALISED).parameters_bytes for step in (whole, split))
    assert before - after == sum(w.remainder.nbytes for w in split.model.weights if w.remainder is not None) > 0


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_have_whole_masters(name: str) -> None:
    """Saved and loaded; the optimizer goes on from what was loaded, in the tensors whose addresses it knows."""
    plain, step = make(name, seed=1), TrainingStep(replace(SPLIT, model=MODELS[name]), make(name, seed=2))
    step(HostClock())
    addresses = [weight.remainder.data_ptr() for weight in step.model.weights if weight.remainder is not None]
    expected = {key: value.clone() for key, value in plain.state_dict().items()}
    step.model.load_state_dict(expected)
    saved = step.model.state_dict()
    assert list(saved) == list(expected)
    assert all(torch.equal(saved[key], expected[key]) for key in expected)
    make(name, seed=3).load_state_dict(saved)
    assert addresses == [w.remainder.data_ptr() for w in step.model.weights if w.remainder is not None]
    assert all(weight.master.numel() == 0 for weight in step.model.weights if weight.remainder is not None)
    tokens = torch.randint(37, (2, 16), generator=torch.Generator().manual_seed(1))
    logits, wanted = step.logits(tokens), plain(tokens)
    assert (logits - wanted).norm() / wanted.norm() < 0.02


def test_a_checkpoint_without_some_weights_or_of_another_shape_leaves_these_as_they_are() -> None:
    step = TrainingStep(SPLIT, make("cs336"))
    step(HostClock())
    before = step.model.state_dict()
    some = {key: torch.zeros_like(value) for key, value in before.items() if key != "layers.0.ffn.w2.weight"}
    step.model.load_state_dict(some, strict=False)
    after = step.model.state_dict()
    assert torch.equal(after["layers.0.ffn.w2.weight"], before["layers.0.ffn.w2.weight"])
    assert not after["layers.0.ffn.w1.weight"].any()
    with pytest.raises(RuntimeError, match=r"size mismatch for lm_head.weight"):
        step.model.load_state_dict({**before, "lm_head.weight": torch.zeros(3, 3)})
    assert torch.equal(step.model.state_dict()["lm_head.weight"], after["lm_head.weight"])


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"cast_once": False}, "--cast-once"),
        ({"mode": Mode.FORWARD}, "--mode train"),
    ],
    ids=str,
)
def test_what_it_needs(changes: dict[str, object], needed: str) -> None:
    with pytest.raises(ValueError, match=needed):
        replace(SPLIT, **changes)  # type: ignore[arg-type]
