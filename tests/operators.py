"""Which operators PyTorch dispatches, and whether a custom one is well made."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Counts the operators that are called while it is open, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def check_operator(operator: Any, *given: Any) -> None:
    """PyTorch's own checks of its schema, its gradients, and its shapes without data."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, given, test_utils=checks)
