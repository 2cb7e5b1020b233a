"""AdamW against torch's own, against scalar arithmetic, and under GradScaler."""

import pytest
import torch

from cs336.config import OptimizerKind
from cs336.model.fast.master_adamw import MasterAdamW
from cs336.model.fast.weights import whole
from cs336.model.optimizer import AdamW, make_optimizer
from tests.model.fast.steps import OF_AN_UPDATE
from tests.rounding import of_chain

KINDS = [kind for kind in OptimizerKind if kind is not OptimizerKind.OWN]
SHAPES = ((5, 3), (7,), (2, 1, 3))
# each large enough to show
SETTINGS = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2}


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES
    ]


def set_gradients(params, step):
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def run(optimizer, params, steps):
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_follows_torch(kind, dtype, weight_decay):
    settings = SETTINGS | {"weight_decay": weight_decay}
    ours, theirs = parameters(dtype), parameters(dtype)
    run(make_optimizer(kind, ours, **settings), ours, range(20))
    run(torch.optim.AdamW(theirs, **settings, foreach=False), theirs, range(20))
    allowed = of_chain(dtype, 20 * OF_AN_UPDATE)
    torch.testing.assert_close(ours, theirs, rtol=allowed, atol=allowed * SETTINGS["lr"])


def test_the_optimizer_of_masters_follows_torch():
    ours, theirs = parameters(), parameters()
    run(MasterAdamW([whole("", parameter) for parameter in ours], **SETTINGS), ours, range(20))
    run(torch.optim.AdamW(theirs, **SETTINGS, foreach=False), theirs, range(20))
    allowed = of_chain(torch.float32, 20 * OF_AN_UPDATE)
    torch.testing.assert_close(ours, theirs, rtol=allowed, atol=allowed * SETTINGS["lr"])


def test_steps_on_the_host_alone():
    p = torch.nn.Parameter(torch.empty(3, 2, device="meta"))
    optimizer = AdamW([p])
    for _ in range(2):
        p.grad = torch.empty(3, 2, device="meta")
        optimizer.step()  # a meta tensor has no value to wait for: reading one raises
    assert type(optimizer.state[p]["step"]) is int
    assert optimizer.state[p]["step"] == 2


def test_resumes_from_a_state_dict():
    straight, resumed = parameters(), parameters()
    run(AdamW(straight, **SETTINGS), straight, range(6))
    first = AdamW(resumed, **SETTINGS)
    run(first, resumed, range(3))
    second = AdamW(resumed)
    second.load_state_dict(first.state_dict())
    run(second, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


def test_sparse_gradients_are_refused():
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="dense gradients"):
        AdamW(embedding.parameters()).step()
