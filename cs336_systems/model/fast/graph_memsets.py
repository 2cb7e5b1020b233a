"""Replaces the memsets of a CUDA graph by kernels.

cuBLAS and cuDNN zero counters and sums by memsets before some of their kernels. In a graph, on an H200, a kernel begins
0.5 us after another kernel, but 3 to 6 us after a memset.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

INTEGERS = {1: ("|u1", ctypes.c_uint8), 2: ("<i2", ctypes.c_int16), 4: ("<i4", ctypes.c_int32)}
"""Integer types, as NumPy and ctypes name them, by the size in bytes of the element that a memset repeats."""
OLDEST_DRIVER = 12030
"""Version number of CUDA 12.3's driver; older drivers lack the calls that return the data of a graph's edges."""
MOST_BYTES = 2**20
"""Larger memsets are kept: the gap after one is short compared with the memset itself."""


# cuda-bindings has no types
Driver = Any
"""The module cuda.bindings.driver."""
Handle = Any
"""A graph or a node of the driver."""
Row = Any
"""Parameters of a memset along one row of memory."""


def replace_memsets(graph: torch.cuda.CUDAGraph) -> int:
    """Replace memsets of a captured graph by kernels that write the same, and return how many were replaced.

    The graph must keep its nodes (`keep_graph=True`) and not be instantiated yet. Memsets of several rows or of more
    than MOST_BYTES are kept. All are kept if the driver is older than CUDA 12.3's, or without the package cuda-bindings
    (on Linux a dependency of PyTorch for CUDA). Raises RuntimeError if the driver refuses a call.
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        return 0
    if _call(driver.cuDriverGetVersion)[0] < OLDEST_DRIVER:
        return 0
    whole = driver.CUgraph(graph.raw_cuda_graph())
    memset = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
    nodes = [node for node in _nodes(driver, whole) if _call(driver.cuGraphNodeGetType, node)[0] == memset]
    written = [(node, *_call(driver.cuGraphMemsetNodeGetParams, node)) for node in nodes]
    rows = {node: row for node, row in written if row.height == 1 and 0 < row.width * row.elementSize <= MOST_BYTES}
    if not rows:
        return 0
    fills = capture_fills(list(rows.values()))
    chain = list(_chain(driver, driver.CUgraph(fills.raw_cuda_graph())))
    edges = _edges(driver, whole)
    kernels = {}
    for node, fill in zip(rows, chain, strict=True):
        (parameters,) = _call(driver.cuGraphKernelNodeGetParams, fill)
        (kernel,) = _call(driver.cuGraphAddKernelNode, whole, [], 0, parameters)
        _call(driver.cuGraphKernelNodeCopyAttributes, kernel, fill)  # such as the priority of the stream
        kernels[int(node)] = kernel
    edges = [(begin, end) for begin, end in edges if {int(begin), int(end)} & kernels.keys()]
    begins, ends = ([kernels.get(int(edge[side]), edge[side]) for edge in edges] for side in (0, 1))
    plain = [driver.CUgraphEdgeData() for _ in edges]
    _call(_newest(driver, "cuGraphAddDependencies"), whole, begins, ends, plain, len(edges))
    for node in rows:
        _call(driver.cuGraphDestroyNode, node)
    return len(rows)


def capture_fills(rows: Sequence[Row]) -> torch.cuda.CUDAGraph:
    """A graph of kernels, one after the other, each of which writes what the memset of one row would write."""
    elements = [_elements(row) for row in rows]
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=-1)):  # as a step's graphs are captured
        for each, row in zip(elements, rows, strict=True):
            each.fill_(INTEGERS[row.elementSize][1](row.value).value)
    return graph


class _Memory:
    """Device memory that PyTorch did not allocate, in a form that `torch.as_tensor` takes."""

    def __init__(self, row: Row) -> None:
        self.__cuda_array_interface__ = {
            "shape": (row.width,), "typestr": INTEGERS[row.elementSize][0], "data": (int(row.dst), False), "version": 3,
        }  # fmt: skip


def _elements(row: Row) -> Tensor:
    elements = torch.as_tensor(_Memory(row), device="cuda")
    assert elements.data_ptr() == int(row.dst), "PyTorch copies memory of another device"
    return elements


def _chain(driver: Driver, graph: Handle) -> Iterator[Handle]:
    """The nodes, in their order, of a graph in which each node has at most one predecessor and one successor."""
    after = {int(begin): end for begin, end in _edges(driver, graph)}
    ends = {int(end) for end in after.values()}
    (node,) = (node for node in _nodes(driver, graph) if int(node) not in ends)
    while node is not None:
        yield node
        node = after.get(int(node))


def _nodes(driver: Driver, graph: Handle) -> list[Handle]:
    _, count = _call(driver.cuGraphGetNodes, graph)
    nodes: list[Handle] = _call(driver.cuGraphGetNodes, graph, count)[0]
    return nodes


def _edges(driver: Driver, graph: Handle) -> list[tuple[Handle, Handle]]:
    get = _newest(driver, "cuGraphGetEdges")
    begins, ends, *_ = _call(get, graph, _call(get, graph)[-1])
    return list(zip(begins, ends, strict=True))


def _newest(driver: Driver, name: str) -> Callable[..., Any]:
    """The version of a driver call that takes edge data; cuda-bindings for CUDA 12 gives it the suffix _v2."""
    found: Callable[..., Any] = getattr(driver, f"{name}_v2", None) or getattr(driver, name)
    return found


def _call(function: Callable[..., Any], *arguments: object) -> list[Any]:
    results: list[Any]
    error, *results = function(*arguments)
    if int(error):
        raise RuntimeError(f"{function.__name__} failed: {error.name}")
    return results
