"""Private names of PyTorch that the trace of steps uses: all of them, with what fails without each.

PyTorch may change them in any version.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch

from .tape import TraceError

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
    "torch._C._autograd": "tensors cannot be on a GPU that is not there",
    "torch._C.DispatchKey": "the autocast of CUDA is not applied",
    "torch._C.DispatchKeySet": "the autocast of CUDA is not applied",
    "torch._C._dispatch_tls_set_dispatch_key_excluded": "the autocast of CUDA is not applied",
    "torch._C._IncludeDispatchKeyGuard": "the autocast of CUDA is not applied",
    "torch._C._ExcludeDispatchKeyGuard": "the autocast of CUDA is applied to its own results",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "gradients are missing from compiled steps",
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
TorchDispatchMode = internal("torch.utils._python_dispatch.TorchDispatchMode")
FakeTensor = internal("torch._subclasses.fake_tensor.FakeTensor")
determinism_checks = internal("torch.utils.checkpoint._allowed_determinism_checks_to_fns")
tensor_module = internal("torch._tensor")
DispatchKey = internal("torch._C.DispatchKey")
DispatchKeySet = internal("torch._C.DispatchKeySet")
exclude_key = internal("torch._C._dispatch_tls_set_dispatch_key_excluded")
including_keys = internal("torch._C._IncludeDispatchKeyGuard")
excluding_keys = internal("torch._C._ExcludeDispatchKeyGuard")
is_made_of_others = internal("torch._C._dispatch_has_kernel_for_dispatch_key")
operators_of_key = internal("torch._C._dispatch_get_registrations_for_dispatch_key")


def address_of(storage: torch.UntypedStorage) -> int:
    """The address of a storage, the same for all tensors that share it."""
    return int(storage._cdata)


GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
"""The symbol of c10::impl::device_guard_impl_registry, which has a guard for each device."""
COMPILER_INTERNALS = {
    "Unsupported": "torch._dynamo.exc.Unsupported",
    "BackendCompilerFailed": "torch._dynamo.exc.BackendCompilerFailed",
    "dynamo_config": "torch._dynamo.config",
    "detect_fake_mode": "torch._dynamo.utils.detect_fake_mode",
    "bindings": "torch._C",
    "guards": "torch._C._dynamo.guards",
    "aot_config": "torch._functorch.config",
    "config": "torch._inductor.config",
    "compile_fx": "torch._inductor.compile_fx",
    "joint_passes": "torch._inductor.compile_fx._recursive_joint_graph_passes",
    "CudaInterface": "torch._dynamo.device_interface.CudaInterface",
    "Folder": "torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder",
    "pad_mm": "torch._inductor.fx_passes.pad_mm",
    "scheduler": "torch._inductor.scheduler",
    "AsyncCompile": "torch._inductor.async_compile.AsyncCompile",
    "triton_utils": "torch.utils._triton",
    "tree_map": "torch.utils._pytree.tree_map",
    "map_aggregate": "torch.fx.node.map_aggregate",
    "rms_norm": "torch._decomp.decompositions._fused_rms_norm",
    "rms_norm_backward": "torch._decomp.decompositions._fused_rms_norm_backward",
}
"""Names inside torch.compile that the trace of compiled steps uses, by their names there."""


@cache
def compiler_internals() -> SimpleNamespace:
    """The objects of COMPILER_INTERNALS, whose import takes seconds; raise TraceError that says
    which of them this PyTorch does not have.
    """
    objects = {}
    for name, path in COMPILER_INTERNALS.items():
        try:
            objects[name] = resolve_name(path)
        except (ImportError, AttributeError) as error:
            raise TraceError(
                f"PyTorch {torch.__version__} has no {path}, so compiled steps cannot be traced: "
                "use another version of PyTorch"
            ) from error
    return SimpleNamespace(**objects)


@contextmanager
def device_guard_of_cuda() -> Iterator[None]:
    """While open, code in C++ finds a guard for tensors of a GPU, which has nothing to do.

    A build of PyTorch for the CPU has none, and indexing a tensor that only seems to be on a GPU
    would end in an error. That of meta takes its place, in the table where builds for CUDA have
    theirs (c10/core/impl/DeviceGuardImplInterface.h). Raises TraceError if there is no such table.
    """
    kinds = internal("torch._C._autograd").DeviceType
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        table = (ctypes.c_void_p * len(kinds.__members__)).in_dll(library, GUARDS)
    except (OSError, ValueError) as error:
        raise TraceError(
            f"compiled steps cannot be traced with PyTorch {torch.__version__} on {sys.platform}: "
            f"{error}"
        ) from error
    has_own = table[kinds.CUDA.value] is not None
    if not has_own:
        table[kinds.CUDA.value] = table[kinds.Meta.value]
    try:
        yield
    finally:
        if not has_own:
            table[kinds.CUDA.value] = None
