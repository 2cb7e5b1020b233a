"""An optimizer with sharded state: each rank updates some of the parameters and sends them to the others."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.model.optimizer import EagerOptimizer
from cs336_systems.parallel.collectives import wait


class ShardedOptimizer(EagerOptimizer):
    """`optimizer_cls(params, **kwargs)`; each rank updates the parameters it owns (ZeRO-1, Rajbhandari et al. 2020).

    Each rank must have the whole gradients of the parameters that it owns, as after data parallelism. Every parameter
    goes to the rank that owns the fewest elements so far, so that the shares are about equal. Hyperparameters are those
    of `param_groups`, so learning-rate schedulers work as usual. Saving and loading its state is left out.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        **kwargs: Any,  # noqa: ANN401 (hyperparameters of any optimizer)
    ) -> None:
        self._make, self._settings = optimizer_cls, kwargs
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._owned = [0] * self._ranks
        """Elements that each rank owns."""
        self._owner: dict[nn.Parameter, int] = {}
        self._local: torch.optim.Optimizer | None = None
        """None as long as this rank owns no parameter."""
        self._local_groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Groups of all parameters, each with the group of those that this rank owns."""
        super().__init__(params, kwargs)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters of this rank, then broadcast every parameter with a gradient from its owner."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, local in self._local_groups:
            local.update({name: value for name, value in group.items() if name != "params"})
        if self._local is not None:
            self._local.step()
        updated = [each for each in self._owner if each.grad is not None]
        values = [each.detach().contiguous() for each in updated]
        works = [
            dist.broadcast(value, src=self._owner[each], async_op=True)
            for each, value in zip(updated, values, strict=True)
        ]
        for work in works:
            wait(work)
        for each, value in zip(updated, values, strict=True):
            if value.data_ptr() != each.data_ptr():
                each.copy_(value)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Share out the parameters of another group; every rank must add the same."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name, value in self._usual(group["params"]).items():
            group.setdefault(name, value)
        for parameter in group["params"]:
            owner = min(range(self._ranks), key=self._owned.__getitem__)
            self._owner[parameter] = owner
            self._owned[owner] += parameter.numel()
        own = [parameter for parameter in group["params"] if self._owner[parameter] == self._rank]
        if not own:
            return
        local = {**group, "params": own}
        if self._local is None:
            self._local = self._make([local], **self._settings)
            self.state = self._local.state
        else:
            self._local.add_param_group(local)
        self._local_groups.append((group, self._local.param_groups[-1]))

    def _usual(self, parameters: list[nn.Parameter]) -> dict[str, Any]:
        """Default hyperparameters of `optimizer_cls`, for ranks that own no parameter too."""
        return self._make([nn.Parameter(each[:0]) for each in parameters[:1]], **self._settings).defaults
