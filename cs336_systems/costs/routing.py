# ruff: noqa: ANN401 (operators get whatever PyTorch passes)
"""Sizes that depend on data, where tokens choose experts: every expert is taken to be chosen as
often as any other.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage

CHOICES = {"topk": (2, 1), "argmax": (1, 0), "multinomial": (9, 0)}
"""Operators that choose along an axis, by default the last: the axis's place among the arguments,
and the choice's among the results.
"""
REDUCTIONS = frozenset(["sum", "any", "amax", "count_nonzero"])
KEPT = frozenset(
    ["_to_copy", "clone", "index", "index_select", "gather", "sort", "cat", "gt", "ne", "ge"]
)
"""Operators whose result has what was known of their first argument."""


class Routing:
    """Knows of tensors of choices among how many they are, and of masks which share of them is
    set.
    """

    def __init__(self) -> None:
        """Start with nothing known of the experts that tokens choose."""
        self.is_assumed = False
        """Whether any size was taken to be balanced."""
        self.tokens = 0
        """Tokens of a step."""
        self.idle_parameters = Fraction(0)
        """Parameters of experts that a token does not choose, on average."""
        self.counts: set[int] = set()
        """Numbers of tokens that experts were given one by one."""
        self._choices: WeakKeyDictionary[UntypedStorage, int] = WeakKeyDictionary()
        self._shares: WeakKeyDictionary[UntypedStorage, Fraction] = WeakKeyDictionary()

    def note(self, name: str, ins: Sequence[Tensor], args: Any, outs: Sequence[Tensor]) -> None:
        """Note what follows of an operator's results from what is known of its arguments."""
        if not ins or not outs:
            return
        known, made = ins[0].untyped_storage(), outs[0].untyped_storage()
        if name in CHOICES:
            place, result = CHOICES[name]
            axis = args[place] if place < len(args) else -1
            self._choices[outs[result].untyped_storage()] = ins[0].shape[axis]
        elif name == "eq" and known in self._choices:
            self._shares[made] = Fraction(1, self._choices[known])
        elif name in REDUCTIONS and known in self._shares:
            self._shares[made] = Fraction(1)  # nothing is chosen by nobody
        elif name in KEPT:
            if known in self._choices:
                self._choices[made] = self._choices[known]
            if known in self._shares:
                self._shares[made] = self._shares[known]

    def note_experts(self, rows: Fraction | int, weights: int) -> None:
        """Note that each of these weights was multiplied by so many rows, of one token each."""
        if self.tokens:
            self.idle_parameters += weights * (1 - Fraction(rows, self.tokens))

    def answer(self, name: str, args: Any) -> Tensor | None:
        """The result of an operator whose size depends on data; None where the data are no
        choices.
        """
        if name == "nonzero":
            return self._positions(args[0])
        if name == "bincount" and args[0].untyped_storage() in self._choices:
            self.is_assumed = True
            among = self._choices[args[0].untyped_storage()]
            least, more = divmod(args[0].numel(), among)
            length = max(among, *args[2:3])
            counts = [least + 1] * more + [least] * (among - more) + [0] * (length - among)
            return torch.tensor(counts)
        return None

    def _positions(self, mask: Tensor) -> Tensor | None:
        """Result of `nonzero` on a mask of chosen experts, as if tokens were spread evenly over
        experts; None for any other mask.

        Its values are known only for a mask of experts all of which are chosen.
        """
        share = self._shares.get(mask.untyped_storage())
        if share is None:
            return None
        self.is_assumed = True
        if share == 1 and mask.dim() == 1:
            # the experts that are chosen, over which the model may loop
            return torch.arange(len(mask))[:, None]
        count = round(share * mask.numel())
        self.counts.add(count)
        return torch.empty((count, mask.dim()), dtype=torch.int64, device="meta")
