"""Kernels in the place of a CUDA graph's memsets: on a simulated driver, and on a GPU."""

import random
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cs336_systems.model.fast import graph_memsets
from cs336_systems.model.fast.graph_memsets import replace_memsets


class Node(int):
    """A node's handle."""


@dataclass(frozen=True)
class Memset:
    dst: int
    value: int = 0
    elementSize: int = 1  # noqa: N815  (the driver's name)
    width: int = 8
    height: int = 1


@dataclass
class Graph:
    """What a node does, by its handle, and the pairs of nodes of which one waits for the other."""

    work: dict[Node, Any] = field(default_factory=dict)
    edges: list[tuple[Node, Node]] = field(default_factory=list)

    def raw_cuda_graph(self) -> "Graph":
        return self


class Driver(ModuleType):
    """The calls on graphs of the driver for CUDA 13 or, with `suffix` _v2, for CUDA 12."""

    CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_MEMSET="memset")
    CUgraphEdgeData = SimpleNamespace

    def __init__(self, suffix: str) -> None:
        super().__init__("cuda.bindings.driver")
        self.num_nodes = 0
        self.with_attributes: list[Node] = []
        self.version = 12030
        self.graph_of: dict[Node, Graph] = {}
        for name in ("cuGraphGetEdges", "cuGraphAddDependencies"):
            setattr(self, name + suffix, getattr(self, f"_{name}"))

    def cuDriverGetVersion(self) -> Any:  # noqa: N802
        return 0, self.version

    def add(self, graph: Graph, work: Any) -> Node:
        node = Node(1000 + self.num_nodes)
        self.num_nodes += 1
        graph.work[node], self.graph_of[node] = work, graph
        return node

    def CUgraph(self, graph: Graph) -> Graph:  # noqa: N802
        return graph

    def cuGraphGetNodes(self, graph: Graph, count: int = 0) -> Any:  # noqa: N802
        shuffled = random.Random(0).sample(sorted(graph.work), len(graph.work))
        return 0, shuffled[:count], len(graph.work)

    def cuGraphNodeGetType(self, node: Node) -> Any:  # noqa: N802
        return 0, "memset" if isinstance(self.graph_of[node].work[node], Memset) else "kernel"

    def cuGraphMemsetNodeGetParams(self, node: Node) -> Any:  # noqa: N802
        return 0, self.graph_of[node].work[node]

    cuGraphKernelNodeGetParams = cuGraphMemsetNodeGetParams  # noqa: N815

    def cuGraphAddKernelNode(self, graph: Graph, before: list[Node], count: int, work: Any) -> Any:  # noqa: N802
        assert not before
        return 0, self.add(graph, work)

    def cuGraphKernelNodeCopyAttributes(self, target: Node, source: Node) -> Any:  # noqa: N802
        assert self.graph_of[target].work[target] == self.graph_of[source].work[source]
        self.with_attributes.append(target)
        return (0,)

    def _cuGraphGetEdges(self, graph: Graph, count: int = 0) -> Any:  # noqa: N802
        begins, ends = ([edge[side] for edge in graph.edges[:count]] for side in (0, 1))
        return 0, begins, ends, [None] * count, len(graph.edges)

    def _cuGraphAddDependencies(  # noqa: N802
        self, graph: Graph, begins: list[Node], ends: list[Node], plain: list[Any], count: int
    ) -> Any:
        assert len(begins) == len(ends) == len(plain) == count
        graph.edges += zip(begins, ends, strict=True)
        return (0,)

    def cuGraphDestroyNode(self, node: Node) -> Any:  # noqa: N802
        graph = self.graph_of[node]
        del graph.work[node]
        graph.edges = [edge for edge in graph.edges if node not in edge]
        return (0,)


def install(monkeypatch: pytest.MonkeyPatch, driver: ModuleType) -> None:
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings), ("cuda.bindings.driver", driver)):
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("suffix", ["", "_v2"])
@pytest.mark.parametrize("seed", range(20))
def test_the_graph_keeps_its_order_and_what_it_writes(seed: int, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random graphs: memsets at the ends, one after the other, between kernels, and some that remain."""
    draw, driver = random.Random(seed), Driver(suffix)
    install(monkeypatch, driver)

    def capture_fills(rows: list[Memset]) -> Graph:
        graph = Graph()
        nodes = [driver.add(graph, ("fill", row)) for row in rows]
        graph.edges = list(pairwise(nodes))
        return graph

    monkeypatch.setattr(graph_memsets, "capture_fills", capture_fills)
    graph, remaining = Graph(), [Memset(0, height=2), Memset(0, width=0), Memset(0, width=2**19, elementSize=4)]
    nodes = [
        driver.add(graph, draw.choice([f"kernel {number}", Memset(number), Memset(number), *remaining]))
        for number in range(draw.randrange(2, 12))
    ]
    pairs = [(begin, end) for number, end in enumerate(nodes) for begin in nodes[:number]]
    graph.edges = [pair for pair in pairs if draw.random() < 0.4]
    one_row = [work for work in graph.work.values() if isinstance(work, Memset) and work not in remaining]
    after = {node: ("fill", work) if work in one_row else work for node, work in graph.work.items()}
    expected = sorted((str(after[begin]), str(after[end])) for begin, end in graph.edges)

    assert replace_memsets(graph) == len(one_row)  # type: ignore[arg-type]
    assert sorted(map(str, graph.work.values())) == sorted(map(str, after.values()))
    assert set(driver.with_attributes) == {node for node, work in graph.work.items() if isinstance(work, tuple)}
    assert sorted((str(graph.work[begin]), str(graph.work[end])) for begin, end in graph.edges) == expected


def test_a_call_that_the_driver_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusal(int):
        name = "CUDA_ERROR_INVALID_VALUE"

    driver = Driver("")
    install(monkeypatch, driver)

    def cuGraphGetNodes(*_: object) -> Any:  # noqa: N802
        return Refusal(1), None, None

    monkeypatch.setattr(driver, "cuGraphGetNodes", cuGraphGetNodes)
    with pytest.raises(RuntimeError, match=r"cuGraphGetNodes.*CUDA_ERROR_INVALID_VALUE"):
        replace_memsets(Graph())  # type: ignore[arg-type]


@pytest.mark.parametrize("has_package", [False, True], ids=["no package", "old driver"])
def test_nothing_is_replaced_without(has_package: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, graph = Driver("_v2"), Graph()
    driver.version = 12020
    install(monkeypatch, driver)
    if not has_package:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    graph.work[Node(1)] = Memset(dst=1)
    assert replace_memsets(graph) == 0  # type: ignore[arg-type]
    assert list(graph.work.values()) == [Memset(dst=1)]


@pytest.mark.gpu
def test_a_graph_without_memsets_writes_what_memsets_write() -> None:
    """Every size of elements, addresses that are no multiples, values with the highest bit, and several rows."""
    driver = pytest.importorskip("cuda.bindings.driver")
    runtime = pytest.importorskip("cuda.bindings.runtime")
    buffers = [torch.ones(4096, dtype=torch.uint8, device="cuda") for _ in range(4)]
    byte, half, word, rows = (buffer.data_ptr() for buffer in buffers)
    sums = torch.empty(4, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        runtime.cudaMemsetAsync(byte + 5, 200, 3001, stream)
        driver.cuMemsetD16Async(half + 2, 0xFE01, 333, stream)
        driver.cuMemsetD32Async(word + 4, 0xFF000002, 1000, stream)
        runtime.cudaMemset2DAsync(rows, 64, 7, 20, 30, stream)
        for number, buffer in enumerate(buffers):
            sums[number] = buffer.sum()
    expected = [
        3001 * 200 + 1095, 333 * (0xFE + 1) + 4096 - 666, 1000 * (0xFF + 2) + 96, 600 * 7 + 4096 - 600
    ]  # fmt: skip
    assert replace_memsets(graph) == 3
    assert replace_memsets(graph) == 0
    graph.instantiate()
    for _ in range(2):
        for buffer in buffers:
            buffer.fill_(1)
        graph.replay()
        assert sums.tolist() == expected
