# ruff: noqa: ANN401 (compilers get and return whatever PyTorch passes)
"""torch.compile in a trace: inductor compiles the step for a GPU that is not there, and the code
that it writes runs with meta tensors.

Inductor's own passes, partitioner, scheduler and code generator decide what forward saves, which
operations are one kernel, and when buffers are made, reused and freed. So a trace has the very
tensors of a compiled step. Only the kernels in Triton are not compiled: each is noted with the
bytes that inductor says it moves. Where inductor would time kernels on the GPU to choose one, a
matmul is computed by cuBLAS, and its sides are padded if they are not aligned.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor

from .hopper import HOPPER
from .internals import (
    FakeTensor,
    TorchDispatchMode,
    compiler_internals,
    device_guard_of_cuda,
    without_modes,
)
from .on_cuda import as_decomposed, clear_copies
from .tape import TraceError
from .trace import GPU, StepTrace, tensors_in

META, CPU = torch.device("meta"), torch.device("cpu")
PLACES = "meta", "cuda"
MANY = 2**20
MOVED = re.compile(r"'kernel_num_gb': ([0-9.e+-]+)")
"""Gigabytes that a kernel reads and writes, in the source that inductor writes for it."""
WITHIN = "the compiled graph"
"""Stands for the module in the labels of tensors: kernels of a compiled graph are of several."""
_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
"""What inductor has made of graphs, by all that it depends on: a block is the same graph in models
of any depth, and between checkpoints too.
"""


def _on(device: torch.device) -> Callable[[Any], Any]:
    """A function that gives a tensor, or device, of meta or the GPU as one of this device, and
    anything else as it is.
    """

    def moved(value: Any) -> Any:
        """The value on the device."""
        if isinstance(value, Tensor) and value.device.type in PLACES:
            return torch.empty_strided(
                value.shape,
                value.stride(),
                dtype=value.dtype,
                device=device,
                requires_grad=value.requires_grad,
            )
        if isinstance(value, (torch.device, str)) and str(value).partition(":")[0] in PLACES:
            return device
        return value

    return moved


class Compiler:
    """Stands in for torch.compile while a step is traced."""

    noting: ClassVar[StepTrace]
    """The trace that notes what compiled code launches, which may be of an earlier trace."""

    def __init__(
        self,
        trace: StepTrace,
        suspended: Callable[[], AbstractContextManager[None]],
        resumed: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Note what compiled functions launch in `trace`. Its modes are off while `suspended`,
        within which they are `resumed` for what is compiled.
        """
        if find_spec("triton") is None:
            raise TraceError("compiling for a GPU needs Triton: `pip install triton`")
        self._trace, self._suspended, self._resumed = trace, suspended, resumed
        self._torch = compiler_internals()
        self._compile = torch.compile
        self._has_gradients = True
        self._shows_gpu = False
        """Whether fake tensors of meta are shown as the GPU's: to Dynamo, which runs the model's
        code.
        """

    def __call__(self, function: Any = None, **options: Any) -> Any:
        """The function, which is compiled when it is called first; without one, a decorator."""
        if function is None:
            return lambda decorated: self(decorated, **options)
        compiled = self._compile(function, backend=self._backend, fullgraph=True)

        def run(*args: Any, **kwargs: Any) -> Any:
            """Call the compiled function; raise TraceError if it is not one graph."""
            self._has_gradients = torch.is_grad_enabled()
            # Dynamo's tensors are on the GPU, of which autograd would ask for the driver
            # each trace compiles the same code anew, which Dynamo refuses after some times
            # and results that are kept for tensors of meta would be on the GPU that is shown
            limits = self._torch.dynamo_config.patch(
                recompile_limit=MANY,
                accumulated_recompile_limit=MANY,
                fake_tensor_cache_enabled=False,
                automatic_dynamic_shapes=False,
            )
            with self._suspended(), self._on_absent_gpu(), torch.no_grad(), limits:
                self._shows_gpu = True
                try:
                    return compiled(*args, **kwargs)  # type: ignore[no-untyped-call]
                except self._torch.Unsupported as error:
                    reason = str(error).strip().splitlines()[0]
                    raise TraceError(
                        f"torch.compile makes several graphs of the step: {reason}"
                    ) from error
                except self._torch.BackendCompilerFailed as error:
                    reason = str(error.inner_exception).strip().partition("\n")[0]
                    raise TraceError(f"inductor does not compile the step: {reason}") from error

        return run

    def _backend(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """Compile a graph of Dynamo's for the GPU; what is returned runs its code in the trace."""
        self._shows_gpu, Compiler.noting = False, self._trace
        key = (*_identity(graph, inputs), self._has_gradients)
        compiled = _compiled.get(key) or self._compiled(graph, inputs)
        if all(node.op != "get_attr" for node in graph.graph.nodes):  # of which no text tells all
            _compiled[key] = compiled
        clear_copies()

        def run(*args: Any) -> Any:
            """Run the graph's code, of which the trace notes tensors and kernels."""
            grad = torch.set_grad_enabled(self._has_gradients)
            with self._resumed(), self._trace.within(WITHIN), grad:
                return compiled(*args)

        return run

    def _compiled(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """What inductor makes of a graph."""
        inductor = self._torch
        settings = inductor.config.patch(
            force_disable_caches=True, compile_threads=1, profile_bandwidth=True
        )
        lazily = inductor.aot_config.patch(force_non_lazy_backward_lowering=True)
        with settings, lazily, torch.set_grad_enabled(self._has_gradients):
            inputs = self._moved(graph, inputs, META)
            made: Callable[..., Any] = inductor.compile_fx.compile_fx(
                graph, inputs, inner_compile=self._inner
            )
        return made

    def _moved(self, graph: Any, inputs: Any, device: torch.device) -> Any:
        """Put a graph on the device, and return its inputs there.

        AOTAutograd traces on meta, as autograd takes no tensors of a device without a driver.
        """
        moved = _on(device)
        nodes = graph.graph.nodes
        names = [name for name in ("val", "example_value") if any(name in n.meta for n in nodes)]
        values = [node.meta.get(name) for node in nodes for name in names]
        with self._torch.detect_fake_mode([*inputs, *values]):
            for node in nodes:
                for name in names:
                    if name in node.meta:
                        node.meta[name] = self._torch.tree_map(moved, node.meta[name])
                node.args = self._torch.map_aggregate(node.args, moved)
                node.kwargs = self._torch.map_aggregate(node.kwargs, moved)
            inputs = [*map(moved, inputs)]
        graph.recompile()
        return inputs

    def _inner(self, graph: Any, inputs: Any, **options: Any) -> Any:
        """Compile forward's or backward's graph, whose inputs AOTAutograd has on meta."""
        with self._torch.detect_fake_mode(inputs):
            inputs = [*map(_on(GPU), inputs)]
        return self._torch.compile_fx.compile_fx_inner(graph, inputs, **options)

    def _joint_passes(self, graph: Any, *args: Any, **kwargs: Any) -> Any:
        """Inductor's passes over forward and backward together, of a graph on the GPU."""
        self._moved(graph, (), GPU)
        return self._torch.joint_passes(graph, *args, **kwargs)

    @contextmanager
    def _on_absent_gpu(self) -> Iterator[None]:
        """While open, inductor finds a GPU and Triton's driver, and what it writes calls the
        trace.
        """
        inductor = self._torch
        # which has taken functions from torch.cuda when it was imported
        interface = inductor.CudaInterface
        taken = [name for name in _CUDA if hasattr(interface, name)]
        instead: list[tuple[Any, Mapping[str, Any]]] = [
            (torch.cuda, _CUDA),
            (interface, {name: staticmethod(_CUDA[name]) for name in taken}),
            (inductor.bindings, {"_cuda_getCurrentRawStream": lambda *_: 0}),
            (inductor.scheduler, {"has_triton": lambda *_: True}),
            (inductor.triton_utils, {"triton_hash_with_backend": lambda *_: ""}),
            (inductor.compile_fx, {"_recursive_joint_graph_passes": self._joint_passes}),
            (inductor.pad_mm, {"has_triton": lambda *_: True, "_should_pad": self._is_padded}),
            (inductor.AsyncCompile, {"triton": self._kernel}),
            (
                inductor.Folder,
                {name: _on_host(getattr(inductor.Folder, name)) for name in _FOLDING},
            ),
            (FakeTensor, {"__new__": self._fake_tensor(FakeTensor.__new__)}),
            (inductor.guards, {"_empty_strided_cuda": _empty_strided}),
        ]
        with ExitStack() as patches:
            for place, functions in instead:
                for name, function in functions.items():
                    patches.enter_context(mock.patch.object(place, name, function, create=True))
            patches.enter_context(as_decomposed())
            patches.enter_context(device_guard_of_cuda())
            yield

    def _is_padded(self, _: Any, left: Tensor, right: Tensor, *__: Any) -> bool:
        """Whether inductor pads a matmul, whose sides are not aligned and can be padded: on the GPU
        it times both, and the padded one is faster unless the matmul is limited by memory.
        """
        (rows, inner), columns = left.shape[-2:], right.shape[-1]
        computes: bool = self._torch.pad_mm.is_mm_compute_bound(rows, inner, columns, left.dtype)
        return computes

    def _fake_tensor(self, new: Callable[..., Any]) -> Callable[..., Any]:
        """The function that makes fake tensors, which shows those of meta on the GPU to Dynamo."""

        def shown(value: Any) -> Any:
            """The GPU in place of meta."""
            return GPU if self._shows_gpu and value == META else value

        def make(kind: Any, *args: Any, **kwargs: Any) -> Any:
            """Make a fake tensor."""
            named = {name: _device_or(value, shown) for name, value in kwargs.items()}
            return new(kind, *[_device_or(value, shown) for value in args], **named)

        return make

    def _kernel(self, _: str, source: str, *__: Any, **___: Any) -> Any:
        """Stands in for a kernel in Triton: a call is noted with the bytes that it moves."""
        said = MOVED.search(source)
        moved_bytes = None if said is None else round(1e9 * float(said[1]))

        def run(*args: Any, **_: Any) -> None:
            """Note that the kernel is launched."""
            with without_modes():  # which would show meta tensors on a GPU
                Compiler.noting.fused(moved_bytes, [*tensors_in(args)])

        return SimpleNamespace(run=run)


def _identity(graph: Any, inputs: Any) -> Iterator[Any]:
    """All that decides what inductor makes of a graph: its text with all sizes, which inputs have
    gradients, and what is switched on around it.
    """
    yield graph.print_readable(print_output=False, include_stride=True, include_device=True)
    yield tuple(isinstance(value, Tensor) and value.requires_grad for value in inputs)
    yield torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    backends = torch.backends.cuda
    yield backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled()
    yield backends.cudnn_sdp_enabled(), backends.math_sdp_enabled()


def _device_or(value: Any, shown: Callable[[torch.device], Any]) -> Any:
    """A device as it is shown, and anything else as it is."""
    return shown(value) if isinstance(value, torch.device) else value


class _OnHost(TorchDispatchMode):  # type: ignore[misc]
    """Makes on the host what is asked for on the GPU."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        on_host = {}
        for name, value in (kwargs or {}).items():
            on_host[name] = CPU if value == GPU else value
        return function(*args, **on_host)


_FOLDING = "__init__", "_deduce_value"
"""Methods by which inductor computes operations on constants, whose values it needs."""


def _on_host(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, whose tensors are on the host."""

    def run(*args: Any, **kwargs: Any) -> Any:
        """Run the method."""
        with _OnHost():
            return method(*args, **kwargs)

    return run


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    """A buffer of the compiled code, without data."""
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


_CUDA: dict[str, Any] = {
    "_DeviceGuard": lambda *_: nullcontext(),
    "_get_device_properties": lambda *_: HOPPER,
    "_lazy_init": lambda: None,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "get_device_capability": lambda *_: (HOPPER.major, HOPPER.minor),
    "get_device_properties": lambda *_: HOPPER,
    "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    "is_bf16_supported": lambda *_, **__: True,
    "set_device": lambda *_: None,
    "set_rng_state": lambda *_: None,
    "synchronize": lambda *_: None,
}
"""torch.cuda of that GPU, as far as Dynamo and inductor ask for it."""
