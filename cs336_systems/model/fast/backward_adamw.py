"""AdamW that updates weights while backward still computes the gradients of others."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cs336_systems.model.fast.master_adamw import MasterAdamW
from cs336_systems.model.fast.weights import Weight

BUCKET_ELEMENTS = 2**22
"""Least number of elements in a full bucket; updating so many takes 29 us at an H200's 4.09 TB/s."""
TWICE = "backward came twice before the optimizer's step, and the first one has updated weights already"
OTHER_GRADIENTS = "backward made other gradients than in the first step"


class BackwardAdamW(MasterAdamW):
    """MasterAdamW that updates each bucket of weights as soon as backward has made all their gradients.

    On a GPU the updates run on a stream of their own. They are memory-bound and backward's matmuls are compute-bound,
    so overlapping them saves time where a matmul leaves multiprocessors idle. The first step updates all weights after
    backward, and divides them into buckets in the order in which their gradients became ready. From then on `step` only
    waits for the updates. Raises RuntimeError unless every step has one backward, for the same tensors as the first.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        lr: float = 1e-3,
        bucket_elements: int = BUCKET_ELEMENTS,
        *,
        moments: torch.dtype = torch.float32,
        splits: bool = False,
    ) -> None:
        super().__init__(weights, lr, moments=moments, splits=splits)
        self._bucket_elements = bucket_elements
        self._stream = torch.cuda.Stream() if self._steps.is_cuda else None
        self._ready: dict[int, None] = {}
        """Ids of the leaves whose gradients this backward has computed, in the order in which they became ready."""
        self._buckets: list[_Bucket] = []
        for leaf in {id(place.leaf): place.leaf for weight in weights for place in weight.places}.values():
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(self._note)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Wait for the updates that backward has started; in the first step, update all weights."""
        del closure
        if not self._buckets:
            super().step()
            self._kernels.clear()  # these update all weights at once; from now on each bucket has its own
            self._buckets = self._make_buckets()
        elif any(bucket.missing for bucket in self._buckets):
            raise RuntimeError(OTHER_GRADIENTS)
        elif self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._ready.clear()
        for bucket in self._buckets:
            bucket.missing = set(bucket.leaves)

    def _note(self, leaf: Tensor) -> None:
        """Note that this leaf's gradient is ready, and update the buckets that this completes."""
        if id(leaf) in self._ready:
            raise RuntimeError(TWICE)
        self._ready[id(leaf)] = None
        waiting = [(number, bucket) for number, bucket in enumerate(self._buckets, 1) if id(leaf) in bucket.leaves]
        if self._buckets and not waiting:
            raise RuntimeError(OTHER_GRADIENTS)
        with torch.no_grad(), self._beside_backward():
            if len(self._ready) == 1 and self._buckets:
                self._steps += 1
            for number, bucket in waiting:
                bucket.missing.remove(id(leaf))
                if not bucket.missing:
                    self._update(bucket.weights, number)

    @contextlib.contextmanager
    def _beside_backward(self) -> Iterator[None]:
        """Launch on the stream of updates, after everything that backward has launched so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def _make_buckets(self) -> "list[_Bucket]":
        """Buckets of the weights, in the order in which the last gradient of each became ready."""
        order = {leaf: number for number, leaf in enumerate(self._ready)}
        leaves = [[id(place.leaf) for place in weight.places if id(place.leaf) in order] for weight in self._weights]
        last = {number: max(order[leaf] for leaf in own) for number, own in enumerate(leaves) if own}
        found = [_Bucket()]
        for number in sorted(last, key=last.__getitem__):
            if found[-1].num_elements >= self._bucket_elements:
                found.append(_Bucket())
            found[-1].add(self._weights[number], leaves[number])
        return found


class _Bucket:
    """Weights that are updated together."""

    def __init__(self) -> None:
        self.weights: list[Weight] = []
        self.num_elements = 0
        self.leaves: set[int] = set()
        """Ids of the leaves whose gradients the bucket needs."""
        self.missing: set[int] = set()
        """Ids of the leaves whose gradients this backward has not computed yet."""

    def add(self, weight: Weight, leaves: Sequence[int]) -> None:
        """Add a weight, and the ids of the leaves whose gradients it needs."""
        self.weights.append(weight)
        self.num_elements += weight.shape.numel()
        self.leaves.update(leaves)
