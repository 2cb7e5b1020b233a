"""An optimizer of any class, shared out among the ranks by parameter."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..costs.shards import next_owner
from ..model.optimizer import EagerOptimizer


class ShardedOptimizer(EagerOptimizer):
    """`optimizer_cls(params, **kwargs)`; each rank updates the parameters it owns (ZeRO-1,
    Rajbhandari et al. 2020).

    Each rank must have the whole gradients of the parameters that it owns, as after data
    parallelism. Every parameter goes to the rank that owns the fewest elements so far, so that the
    shares are about equal. Hyperparameters are those of `param_groups`, so learning-rate schedulers
    work as usual. Saving and loading its state is left out.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        **kwargs: Any,  # noqa: ANN401 (hyperparameters of any optimizer)
    ) -> None:
        """`optimizer_cls` makes this rank's optimizer of the parameters that the rank owns;
        `kwargs` are its hyperparameters.
        """
        self._make, self._settings = optimizer_cls, kwargs
        self._rank = dist.get_rank()
        self._ranks = dist.get_world_size()
        self._sizes = [0] * self._ranks
        """Elements that each rank owns."""
        self._owner: dict[nn.Parameter, int] = {}
        self._local: torch.optim.Optimizer | None = None
        """None as long as this rank owns no parameter."""
        self._local_groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Groups of all parameters, each with the group of those that this rank owns."""
        super().__init__(params, kwargs)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> float | None:
        """Update the parameters of this rank, then broadcast every parameter with a gradient from
        its owner.

        `kwargs` are given to the step of the optimizer, as in the course's interface.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, local in self._local_groups:
            local.update({name: value for name, value in group.items() if name != "params"})
        if self._local is not None:
            self._local.step(**kwargs)
        updated = [parameter for parameter in self._owner if parameter.grad is not None]
        sent = [parameter.detach().contiguous() for parameter in updated]
        works = [
            dist.broadcast(values, src=self._owner[parameter], async_op=True)
            for parameter, values in zip(updated, sent, strict=True)
        ]
        for work in works:
            work.wait()
        for parameter, values in zip(updated, sent, strict=True):
            if values.data_ptr() != parameter.data_ptr():
                parameter.copy_(values)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and give each of its parameters to the rank that owns the fewest elements
        so far; every rank must add the same group.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        # the optimizer's own defaults complete the group. A rank that owns no parameter has no
        # optimizer to read them from, so each makes a throwaway one, of an empty parameter
        empty = [nn.Parameter(parameter[:0]) for parameter in group["params"][:1]]
        throwaway = self._make(empty, **self._settings)
        for name, value in throwaway.defaults.items():
            group.setdefault(name, value)
        for parameter in group["params"]:
            self._owner[parameter] = next_owner(self._sizes, parameter.numel())
        owned = [parameter for parameter in group["params"] if self._owner[parameter] == self._rank]
        if not owned:
            return
        local = {**group, "params": owned}
        if self._local is None:
            self._local = self._make([local], **self._settings)
            self.state = self._local.state
        else:
            self._local.add_param_group(local)
        self._local_groups.append((group, self._local.param_groups[-1]))
