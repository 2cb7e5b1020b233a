"""Which matmuls and attention kernels `cs336 ceilings` measures, so that the model of kernels
(costs/kernels.py) knows the rates between them: sides spread evenly over what people train.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count as count_from
from itertools import islice, product

from ..config import FP8_MULTIPLE
from ..costs.kernels import ProductPrecision
from ..costs.tape import Form

ALPHA = 1.2207440846057596
"""Root of x^4 = x + 1, whose powers are the steps of a sequence that fills a cube evenly (Roberts
2018, "the unreasonable effectiveness of quasirandom sequences").
"""
MOST_MULTIPLICATIONS = {
    ProductPrecision.FP32: 2**38,
    ProductPrecision.TF32: 2**40,
    ProductPrecision.BF16: 2**41,
    ProductPrecision.FP8: 2**41,
}
"""Of one matmul. The largest take about 10 ms on an H100."""
MOST_OF_SCORES = {
    ProductPrecision.FP32: 2**37,
    ProductPrecision.TF32: 2**37,
    ProductPrecision.BF16: 2**43,
}
"""Multiplications of the scores of attention. Fused attention in fp32 reaches some 20 TFLOP/s."""
MOST_ELEMENTS = 2**29
"""Of one matrix, or of one batch of matrices."""
TOKENS = 128, 2**16
SIDES = 256, 2**15
"""Least and largest side of a matmul that is its number of tokens, or a width of the model."""
VOCABULARY = 2**17
"""Largest output of a linear layer; every LM_HEAD-th matmul has an output beyond SIDES."""
LM_HEAD = 7
UNALIGNED = 9
UNALIGNED_BATCHED = 3
"""Every so many matmuls have a side that is not a multiple of 8."""
BATCHED = (
    (Form.FORWARD, "positions d_head positions"),
    (Form.INPUT, "positions positions d_head"),
    (Form.WEIGHT, "positions positions d_head"),
    (Form.WEIGHT, "d_head positions positions"),
)
"""Batched matmuls of attention that is written out, with the names of their sides."""
POSITIONS = 64, 2**12
HEADS_OF_BATCH = 8, 2**9
D_HEADS = 64, 128, 256
FEW_POSITIONS, MANY_POSITIONS = 2**13, 2**18
"""Positions of all heads in two measurements of attention: one leaves many multiprocessors idle.
It is made for one width of heads.
"""
GROUPED = 4, 8192
"""Queries of a key, and the context of attention with grouped queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShape:
    """Form and sides of one kernel, as in KernelCell."""

    form: Form
    batch: int = 1
    rows: int
    inner: int
    columns: int
    queries_per_key: int = 1

    @property
    def multiplications(self) -> int:
        """Multiplications of a matmul, or of the scores of attention, masked ones included."""
        return self.batch * self.rows * self.inner * self.columns

    @property
    def largest_matrix(self) -> int:
        """Elements of the largest of the three matrices, of a whole batch."""
        sides = sorted((self.rows, self.inner, self.columns))
        return self.batch * sides[1] * sides[2]


def _between(limits: tuple[int, int], share: float, multiple: int) -> int:
    """The multiple that lies, by logarithms, at this share of the way between the limits."""
    low, high = limits
    length: float = low * (high / low) ** share
    return max(multiple, round(length / multiple) * multiple)


def drawn_matmuls(precision: ProductPrecision, count: int) -> Iterator[KernelShape]:
    """`count` matmuls of linear layers in each form, and a quarter as many of each batched one; in
    fp8, which has one layout and no batches, half as many with fast sums and with full ones.
    """
    points = _points()
    if precision is ProductPrecision.FP8:
        for form in (Form.FORWARD, Form.INPUT):
            linear = (_linear(form, number, *point) for number, point in enumerate(points))
            in_fp8 = (shape for shape in linear if is_for_fp8(shape))
            yield from islice(_fitting(precision, in_fp8), count // 2)
        return
    for form in (Form.FORWARD, Form.INPUT, Form.WEIGHT):
        linear = (_linear(form, number, *point) for number, point in enumerate(points))
        yield from islice(_fitting(precision, linear), count)
    for form, names in BATCHED:
        batched = (_batched(form, names, number, *point) for number, point in enumerate(points))
        yield from islice(_fitting(precision, batched), count // 4)


def is_for_fp8(shape: KernelShape) -> bool:
    """Whether the hardware multiplies matrices of these sides in fp8."""
    return shape.inner % FP8_MULTIPLE == 0 and shape.columns % FP8_MULTIPLE == 0


def _points() -> Iterator[tuple[float, float, float]]:
    """Points that fill the unit cube evenly, however many are taken."""
    for number in count_from(1):
        x, y, z = ((0.5 + number / ALPHA**axis) % 1 for axis in (1, 2, 3))
        yield x, y, z


def _fitting(precision: ProductPrecision, shapes: Iterable[KernelShape]) -> Iterator[KernelShape]:
    """Those of the shapes that are neither too slow nor too large."""
    for shape in shapes:
        is_quick = shape.multiplications <= MOST_MULTIPLICATIONS[precision]
        if is_quick and shape.largest_matrix <= MOST_ELEMENTS:
            yield shape


def _linear(form: Form, number: int, x: float, y: float, z: float) -> KernelShape:
    """A matmul of a linear layer, or of its gradients."""
    tokens = _between(TOKENS, x, 8)
    inputs = _between(SIDES, y, 64)
    outputs = _between(SIDES, z, 64)
    if number % LM_HEAD == 0:
        outputs = _between((SIDES[1], VOCABULARY), z, 8)
    elif number % UNALIGNED == 0:
        outputs += 1
    if form is Form.FORWARD:
        return KernelShape(form=form, rows=tokens, inner=inputs, columns=outputs)
    if form is Form.INPUT:
        return KernelShape(form=form, rows=tokens, inner=outputs, columns=inputs)
    return KernelShape(form=form, rows=outputs, inner=tokens, columns=inputs)


def _batched(form: Form, names: str, number: int, x: float, y: float, z: float) -> KernelShape:
    """A batched matmul of attention that is written out."""
    lengths = {
        "positions": _between(POSITIONS, x, 8) - (number % UNALIGNED_BATCHED == 0),
        "d_head": D_HEADS[int(z * len(D_HEADS))],
    }
    rows, inner, columns = (lengths[name] for name in names.split())
    batch = _between(HEADS_OF_BATCH, y, 1)
    return KernelShape(form=form, batch=batch, rows=rows, inner=inner, columns=columns)


def attention_shapes(precision: ProductPrecision, contexts: Sequence[int]) -> Iterator[KernelShape]:
    """Fused attention at these context lengths with few and with many heads, forward and backward;
    in bf16 also with grouped queries. In fp8 there is none.
    """
    if precision is ProductPrecision.FP8:
        return
    d_heads = D_HEADS if precision is ProductPrecision.BF16 else D_HEADS[:2]
    shapes: dict[KernelShape, None] = {}  # a set that keeps the order
    for context, d_head in product(contexts, d_heads):
        most = MOST_OF_SCORES[precision] // (context**2 * d_head)
        positions = [MANY_POSITIONS]
        if d_head == D_HEADS[1]:
            positions.append(FEW_POSITIONS)
        for number in positions if most else ():
            heads = min(most, max(1, number // context))
            shapes |= dict.fromkeys(_both_passes(heads, context, d_head))
    if precision is ProductPrecision.BF16 and contexts:
        queries_per_key, context = GROUPED
        shapes |= dict.fromkeys(_both_passes(32, context, D_HEADS[1], queries_per_key))
    yield from shapes


def _both_passes(
    heads: int, context: int, d_head: int, queries_per_key: int = 1
) -> list[KernelShape]:
    """Forward and backward of one attention."""
    return [
        KernelShape(
            form=form,
            batch=heads,
            rows=context,
            inner=d_head,
            columns=context,
            queries_per_key=queries_per_key,
        )
        for form in (Form.ATTENTION, Form.ATTENTION_BACKWARD)
    ]
