"""Private names of PyTorch that the trace of steps uses: all of them, with what fails without each.

PyTorch may change them in any version.
"""

from pkgutil import resolve_name
from typing import Any

import torch

INTERNALS = {
    "torch.UntypedStorage._cdata": "tensors that share memory count as several",
    "torch.Tensor._is_view": "autocast's copies of weights are made anew for each use",
    "torch._C.TensorBase": "code that asks for the device of a tensor sees meta, and not CUDA",
    "torch._C.DisableTorchFunction": "the trace's own code takes meta tensors for those of CUDA",
    "torch._C._current_autograd_node": "kernels of backward have no module",
    "torch.autograd.graph._engine_run_backward": "sums of gradients take memory of their own",
    "torch.autograd._engine_run_backward": "backward of a user's own step is not told apart",
    "torch._C._autograd._get_sequence_nr": "kernels of backward have no module",
    "torch._C._FunctionBase._sequence_nr": "kernels of backward have no module",
    "torch._C._distributed_c10d.FakeWork": "collectives return nothing to wait for",
    "torch._subclasses.fake_tensor.FakeTensor": "what DTensor tries out counts as part of the step",
    "torch.utils._python_dispatch.TorchDispatchMode": "no operation is seen",
    "torch.utils.checkpoint._allowed_determinism_checks_to_fns": "checkpointed blocks are refused",
    "torch._tensor": "operators ask modes twice, which takes most of the time of a trace",
    "torch._C.DispatchKey": "the autocast of CUDA is not applied",
    "torch._C.DispatchKeySet": "the autocast of CUDA is not applied",
    "torch._C._dispatch_tls_set_dispatch_key_excluded": "the autocast of CUDA is not applied",
    "torch._C._IncludeDispatchKeyGuard": "the autocast of CUDA is not applied",
    "torch._C._ExcludeDispatchKeyGuard": "the autocast of CUDA is applied to its own results",
    "torch._C._dispatch_get_registrations_for_dispatch_key": (
        "it is not known which operators CUDA casts"
    ),
}
"""What fails in a trace without each private name."""


def internal(path: str) -> Any:  # noqa: ANN401 (it may be anything)
    """The object at this private path inside PyTorch; raise ImportError that says what fails
    without it.
    """
    try:
        return resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"PyTorch {torch.__version__} has no {path}, so steps cannot be traced: without it "
            f"{INTERNALS[path]}; use an earlier version of PyTorch"
        ) from error


TensorBase = internal("torch._C.TensorBase")
without_modes = internal("torch._C.DisableTorchFunction")
current_node = internal("torch._C._current_autograd_node")
run_backward = internal("torch.autograd.graph._engine_run_backward")
next_sequence_number = internal("torch._C._autograd._get_sequence_nr")
FakeWork = internal("torch._C._distributed_c10d.FakeWork")
FakeTensor = internal("torch._subclasses.fake_tensor.FakeTensor")
determinism_checks = internal("torch.utils.checkpoint._allowed_determinism_checks_to_fns")
tensor_module = internal("torch._tensor")
DispatchKey = internal("torch._C.DispatchKey")
DispatchKeySet = internal("torch._C.DispatchKeySet")
exclude_key = internal("torch._C._dispatch_tls_set_dispatch_key_excluded")
including_keys = internal("torch._C._IncludeDispatchKeyGuard")
excluding_keys = internal("torch._C._ExcludeDispatchKeyGuard")
operators_of_key = internal("torch._C._dispatch_get_registrations_for_dispatch_key")


def address_of(storage: torch.UntypedStorage) -> int:
    """The address of a storage, the same for all tensors that share it."""
    return int(storage._cdata)
