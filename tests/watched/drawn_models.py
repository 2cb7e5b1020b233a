"""Models of drawn loops: each spends the time of a clock that nothing else moves, in forward and in
backward.
"""

import threading
from collections import defaultdict
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cs336.config import Phase

VOCABULARY, WIDTH = 11, 8


class Clock:
    """A clock with the truth beside it: the phase that the program is in is said where it calls."""

    def __init__(self):
        self.now_ns = 0
        self.phases = [Phase.OTHER]
        self.steps, self.between = [], []
        """Of each step that ended well: the seconds of its phases, of those before it."""
        self.tokens, self.has_before = [], False
        self.thread = threading.get_ident()
        self._step, self._before, self._tokens = None, defaultdict(float), 0

    def read(self):
        return self.now_ns

    @torch.compiler.disable
    def spend(self, ms):
        self.now_ns += round(1e6 * ms)
        times = self._before if self._step is None else self._step
        # what another thread does meanwhile is no phase of the step
        is_here = threading.get_ident() == self.thread
        times[self.phases[-1] if is_here else Phase.OTHER] += ms / 1e3

    @contextmanager
    def within(self, phase):
        self.phases.append(phase)
        try:
            yield
        finally:
            self.phases.pop()

    def train_on(self, tokens):
        """Note tokens that a forward pass of training is given."""
        self._tokens += tokens

    @contextmanager
    def step(self):
        self._step, self._tokens = defaultdict(float), 0
        try:
            yield
        except BaseException:
            data = self._step.pop(Phase.DATA, 0.0)
            self._before[Phase.DATA] += data
            self._before[Phase.OTHER] += sum(self._step.values())
            self._step = None
            raise
        self.steps.append(dict(self._step))
        self.between.append(dict(self._before) if self.has_before else None)
        self.tokens.append(self._tokens)
        self.has_before = True
        self._step, self._before = None, defaultdict(float)

    def forget(self):
        """What comes before the next step is not told."""
        self.has_before = False


class Slow(torch.autograd.Function):
    """The identity, whose backward takes a while, or raises."""

    @staticmethod
    def forward(ctx, values, model):
        ctx.model = model
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.model.clock.spend(ctx.model.backward_ms)
        ctx.model.fail("backward")
        return gradient, None


class Base(nn.Module):
    """What all drawn models do: spend time, fail when told to, and slow their backward."""

    def __init__(self, clock, draw):
        super().__init__()
        self.clock, self.is_checkpointed = clock, draw.checkpoint
        self.forward_ms, self.backward_ms = draw.forward_ms, draw.backward_ms
        self.fault = None

    def __getstate__(self):
        # a clock is no part of a model that is saved
        return super().__getstate__() | {"clock": Clock()}

    @torch.compiler.disable
    def fail(self, where):
        if self.fault is not None and self.fault[0] == where:
            error, self.fault = self.fault[1], None
            raise error

    def slowed(self, hidden):
        self.clock.spend(self.forward_ms)
        self.fail("forward")
        return Slow.apply(hidden, self)

    def last(self, head, hidden):
        if self.is_checkpointed is None:
            return head(hidden)
        return checkpoint(head, hidden, use_reentrant=self.is_checkpointed)


class Lookup(nn.Module):
    """An embedding of the user's own class."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, ids):
        return self.weight[ids]


class Tokens(Base):
    """Embedding and head; with positions, the context is known."""

    def __init__(self, clock, draw):
        super().__init__(clock, draw)
        own = draw.model == "own embedding"
        self.embedding = Lookup() if own else nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(32, WIDTH) if draw.model == "positions" else None
        self.mixer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        hidden = self.embedding(ids)
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(ids.shape[-1]))
        return self.last(self.head, self.slowed(self.mixer(hidden)))


class Closing(Tokens):
    """Calls its layers in a function that refers to them, which no copy of the model has."""

    def __init__(self, clock, draw):
        super().__init__(clock, draw)
        mixer, slowed = self.mixer, self.slowed
        self.mixed = lambda hidden: slowed(mixer(hidden))

    def forward(self, ids):
        return self.last(self.head, self.mixed(self.embedding(ids)))


class Functional(Base):
    """The table is the model's own parameter: no module looks tokens up."""

    def __init__(self, clock, draw):
        super().__init__(clock, draw)
        self.table = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        return self.head(self.slowed(functional.embedding(ids, self.table)))


class Attentive(Base):
    """PyTorch's own attention or recurrence, which says whether the batch comes first."""

    def __init__(self, clock, draw):
        super().__init__(clock, draw)
        first = draw.model.endswith("batch first")
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.is_recurrent = draw.model.startswith("recurrent")
        if self.is_recurrent:
            self.mixer = nn.GRU(WIDTH, WIDTH, batch_first=first)
        else:
            self.mixer = nn.MultiheadAttention(WIDTH, 2, batch_first=first)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        hidden = self.embedding(ids)
        given = (hidden,) if self.is_recurrent else (hidden, hidden, hidden)
        return self.last(self.head, self.slowed(self.mixer(*given)[0]))


class Named(Base):
    """Given names, as models of Hugging Face are: the labels come first in the batch."""

    def __init__(self, clock, draw):
        super().__init__(clock, draw)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, labels=None, input_ids=None, attention_mask=None):
        return self.last(self.head, self.slowed(self.embedding(input_ids)))


class Dictionary(Named):
    """Given the batch itself."""

    def forward(self, batch):
        return super().forward(**batch)


class Floats(Base):
    """A model of numbers: it has no tokens."""

    def __init__(self, clock, draw):
        super().__init__(clock, draw)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, values):
        return self.last(self.head, self.slowed(self.layers(values)))


class Energy(Floats):
    """Its output is a gradient that forward computes: backward within forward."""

    @torch.enable_grad()
    def forward(self, values):
        values = values.clone().requires_grad_()
        energy = self.layers(values).square().sum()
        with self.clock.within(Phase.BACKWARD):
            (force,) = torch.autograd.grad(Slow.apply(energy, self), values, create_graph=True)
        return self.last(self.head, self.slowed(force))


class Bare(Base):
    """Without parameters: what is trained is its input."""

    def forward(self, values):
        return self.slowed(values).tanh()


MODELS = {
    "embedding": Tokens,
    "own embedding": Tokens,
    "positions": Tokens,
    "closing": Closing,
    "functional": Functional,
    "attention batch first": Attentive,
    "attention": Attentive,
    "recurrent batch first": Attentive,
    "recurrent": Attentive,
    "named": Named,
    "dictionary": Dictionary,
    "floats": Floats,
    "energy": Energy,
    "bare": Bare,
}
