"""Models that keep tensors outside of themselves: tracing leaves none without data there."""

import random
import sys
import threading
from functools import lru_cache
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from cs336 import watch
from cs336.watched.kept_state import kept_state

WIDTH, LENGTH = 8, 3
TABLES, HISTORY = {}, []
LAST = None


@lru_cache(maxsize=2)
def table(length, device):
    return torch.ones(length, 1, device=device)


class Base(nn.Module):
    """Keeps tensors in its class, and in functions with a cache."""

    tables, history, last = {}, [], None

    @staticmethod
    @lru_cache(maxsize=2)
    def static(length, device):
        return torch.ones(length, 1, device=device)

    @classmethod
    @lru_cache(maxsize=2)
    def of_class(cls, length, device):
        return torch.ones(length, 1, device=device)

    @lru_cache(maxsize=2)  # noqa: B019 (what some models do)
    def method(self, length, device):
        return torch.ones(length, 1, device=device)

    @property
    @lru_cache(maxsize=2)  # noqa: B019
    def plain(self):
        return torch.ones(LENGTH, 1)


def function(model, length, device):
    return table(length, device)


def static(model, length, device):
    return model.static(length, device)


def of_class(model, length, device):
    return model.of_class(length, device)


def method(model, length, device):
    return model.method(length, device)


def plain(model, length, device):
    return model.plain


def variable(model, length, device):
    global LAST
    before, LAST = LAST, torch.ones(length, 1, device=device)
    return LAST if before is None else before


def dictionary(model, length, device):
    for tables in (TABLES, Base.tables):
        before = tables.get("last")
        tables[device] = tables["last"] = torch.ones(length, 1, device=device)
    return tables["last"] if before is None else before


def listed(model, length, device):
    for history in (HISTORY, Base.history):
        history.append(torch.ones(length, 1, device=device))
        history[0] = torch.ones(length, 1, device=device)
    return history[-1]


def attribute(model, length, device):
    Base.last = torch.ones(length, 1, device=device)
    return Base.last


WAYS = (function, static, of_class, method, plain, variable, dictionary, listed, attribute)


class Model(Base):
    def __init__(self, way):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)
        self.way = way

    def forward(self, x):
        return self.layer(x) * self.way(self, x.shape[0], x.device)


def forget():
    global LAST
    LAST = Base.last = None
    for container in (TABLES, HISTORY, Base.tables, Base.history):
        container.clear()
    for cached in caches():
        cached.cache_clear()


def caches():
    names = vars(Base)
    return [
        table,
        names["static"].__func__,
        names["of_class"].__func__,
        names["method"],
        names["plain"].fget,
    ]


def kept():
    """What is kept outside of the model: sizes of caches, and the tensors."""
    tensors = [LAST, Base.last, *HISTORY, *Base.history]
    for tables in (TABLES, Base.tables):
        tensors += [*tables, *tables.values()]
    return [cached.cache_info() for cached in caches()], tensors


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_a_trace_keeps_outside_of_the_model_is_gone(way, tmp_path):
    results = []
    for is_watched in (False, True):
        forget()
        torch.manual_seed(0)
        model = Model(way)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watched = watch(model, optimizer, warmup_steps=0, output=tmp_path, every=0)
        for _ in range(3):
            with watched.step():
                loss = model(torch.ones(LENGTH, WIDTH)).square().sum()
                loss.backward()
                optimizer.step()
            if is_watched:
                watched.record()
        watched.remove()
        infos, tensors = kept()
        assert not any(isinstance(value, torch.Tensor) and value.is_meta for value in tensors)
        results.append((loss.item(), infos, len(tensors)))
    assert results[0] == results[1]


def test_other_threads_keep_their_cache():
    forget()
    usual = table(LENGTH, "cpu")
    with kept_state([Model(function)]):
        assert table(LENGTH, "meta").is_meta
        assert table(LENGTH, "cpu") is not usual
        assert table(LENGTH, "cpu") is table(LENGTH, "cpu")
        seen = []
        thread = threading.Thread(target=lambda: seen.append(table(LENGTH, "cpu")))
        thread.start()
        thread.join()
        assert seen == [usual]
    assert table(LENGTH, "cpu") is usual
    assert table.cache_info().currsize == 1


def test_names_are_put_back_when_the_trace_fails(monkeypatch):
    module = ModuleType("theirs")
    module.cached = cached = lru_cache(lambda length: torch.ones(length))
    module.last = last = torch.ones(2)
    monkeypatch.setitem(sys.modules, "theirs", module)
    model = nn.Sequential()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()

    def failing():
        with kept_state([model]):
            assert module.cached is not cached
            module.last = module.new = torch.ones(2, device="meta")
            torch.rand(1), random.random(), np.random.rand()
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert module.cached is cached
    assert module.last is last
    assert not hasattr(module, "new")
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])
