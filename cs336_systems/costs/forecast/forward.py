"""The tensors that the layers of this project's model make in forward, and which of them are saved for backward.

It follows `model/transformer.py` line by line as PyTorch (2.11 to 2.13) runs it eagerly on a GPU: the copies that
matmuls need, what autocast casts, what autograd's graph saves, when Python drops its references. It assumes more than
one head, position and sequence: with one, some copies are views.
"""

from collections.abc import Sequence

from cs336_systems.config import Arch, Attention, ModelConfig, Precision, RunConfig, SdpaBackend
from cs336_systems.costs.forecast.parameters import WEIGHTS
from cs336_systems.costs.forecast.tape import LIKE_ITSELF, Category, Form, Pass, Tape
from cs336_systems.costs.forecast.ways import InPlace
from cs336_systems.costs.shards import FP32_BYTES, HALF_BYTES

CUBLAS_WORKSPACE_BYTES = 32 * 2**20
"""PyTorch's default on a Hopper GPU, `:4096:8`, for each thread that calls cuBLAS: Python's and autograd's.

Other GPUs get 8,519,680 bytes. With this size, predicted peaks of inference on an H200 are right to the byte.
"""

VIEWS_OF_LINEAR = 3
"""Views in a linear layer: the weight transposed, the input flattened, the result unflattened."""
VIEWS_OF_HEADS = 8
"""Two views each split the heads of queries, keys and values and put them before positions; two merge the output's."""
VIEWS_OF_ROTATION = 7
"""Views in RoPE: pairs of features, and rotations with an axis for heads; both as complex numbers; the result as real
numbers, its pairs flattened, and the split into queries and keys."""
VIEWS_OF_NAIVE = 12
"""Views in naive attention: keys transposed, scores detached; in both matmuls two of each factor, one of the result."""
STREAM = "batch T d_model"
HIDDEN = "batch T d_ff"
SCORES = "batch heads T T"

Saved = dict[str, int]
"""Handles of the tensors that autograd's graph saves for one block, by name."""


class ForwardTape:
    """Writes the forward of one model's layers onto a tape.

    Each layer puts what backward needs into `saved` (nothing if it is None). Its caller drops the layer's input.
    """

    def __init__(self, config: RunConfig, tape: Tape, way: InPlace) -> None:
        self.model: ModelConfig = config.model
        self.tape, self.way = tape, way
        self.gpt2 = config.model.arch is Arch.GPT2
        self.autocast = config.precision in (Precision.BF16, Precision.FP16)
        self.element_bytes = HALF_BYTES if self.autocast else FP32_BYTES
        self.stream_bytes = way.stream_bytes
        """Bytes per element of the residual stream."""
        self.norm_bytes = FP32_BYTES if self.gpt2 else way.stream_bytes
        """Bytes per element of a norm's result: autocast runs LayerNorm in fp32, and leaves RMSNorm as it is."""
        self.copies: dict[str, int] = {}
        """Autocast's cache of low-precision copies of parameters, by name, which lasts until autocast ends."""
        self.thread = "forward"
        """The thread that launches kernels: Python's in forward, autograd's own in backward."""
        self._threads_with_workspace: set[str] = set()

    def block(self, index: int, x: int, saved: Saved | None, stop_early: bool = False) -> int | None:
        """One Transformer block on the residual stream `x`, which the caller drops; return the block's output.

        With `stop_early`, for a checkpoint that is recomputed, it stops once everything is saved and returns None.
        """
        tape = self.tape
        normed = self.norm(f"{index}.ln1", x, saved)
        change = self.attention(index, normed, saved)
        tape.drop(normed)
        middle = tape.new(Category.ACTIVATIONS, "residual stream", STREAM, self.stream_bytes, reads=(x, change))
        tape.drop(change)
        normed = self.norm(f"{index}.ln2", middle, saved)
        ffn = self.gelu_mlp if self.gpt2 else self.swiglu
        last = ffn(index, normed, saved, stop_early)
        tape.drop(normed)
        out = None
        if last is not None:
            out = tape.new(Category.ACTIVATIONS, "residual stream", STREAM, self.stream_bytes, reads=(middle, last))
            tape.drop(last)
        tape.drop(middle)
        return out

    def norm(self, name: str, x: int, saved: Saved | None) -> int:
        """RMSNorm saves its input and 1 / rms, LayerNorm also the mean; the next matmul saves the output."""
        x = self.tape.keep(x)
        if self.stream_bytes < self.norm_bytes:
            wide = self.tape.new(Category.ACTIVATIONS, "input of norms, cast", STREAM, self.norm_bytes, reads=(x,))
            self.tape.drop(x)
            x = wide
        normed = self.tape.new(Category.ACTIVATIONS, "output of norms", STREAM, self.norm_bytes, reads=(x,))
        self._save(saved, **{f"{name} input": x})
        for statistic in ("mean", "scale")[0 if self.gpt2 else 1 :]:
            made = self.tape.new(Category.ACTIVATIONS, "statistics of norms", "batch T", FP32_BYTES)
            self._save(saved, **{f"{name} {statistic}": made})
            self.tape.drop(made)
        self.tape.drop(x)
        return normed

    def attention(self, index: int, normed: int, saved: Saved | None) -> int:
        tape = self.tape
        x = self._cast_normed(normed)
        q, k, v = (self.linear(f"{index}.{name}", x, saved, STREAM, "queries, keys, values") for name in "qkv")
        tape.views(VIEWS_OF_HEADS if saved is None else VIEWS_OF_HEADS + 1)  # what attention saves is detached
        heads = (q, k) if self.gpt2 else (self._rotate(q, k),)
        if self.model.attention is Attention.NAIVE:
            values = self._naive(saved)
        elif self.model.sdpa_backend is SdpaBackend.MATH:
            values = self._math(saved)
        else:
            values = self._fused(heads, v, saved)
        merged = (
            tape.keep(values)
            if self.is_fused
            else self.activation("heads merged", STREAM, reads=(values,), how=Pass.STRIDED)
        )
        change = self.linear(f"{index}.output", merged, saved, STREAM, "output of attention")
        tape.drop(merged, x, *heads, v, values)
        return change

    @property
    def is_fused(self) -> bool:
        """Whether attention is one kernel (flash, cuDNN, efficient), whose output heads are merged without a copy."""
        return self.model.attention is Attention.SDPA and self.model.sdpa_backend is not SdpaBackend.MATH

    def _rotate(self, q: int, k: int) -> int:
        """RoPE on queries and keys in one tensor, computed in fp32."""
        both, pairs = "queries and keys", "2 batch T d_model"
        joined = self.temporary(f"{both}, joined", pairs, reads=(q, k))
        wide = [self.widened(f"{both} in fp32", pairs, joined)] if self.autocast else []
        self.tape.views(VIEWS_OF_ROTATION)
        factors = wide or [joined]
        rotated = self.tape.new(Category.ACTIVATIONS, f"{both}, rotated", pairs, FP32_BYTES, reads=factors)
        if self.autocast:
            wide.append(rotated)
            rotated = self.activation(f"{both}, rotated", pairs, reads=(rotated,))
        self.tape.drop(joined, *wide, q, k)
        return rotated

    def _naive(self, saved: Saved | None) -> int:
        tape = self.tape
        tape.views(VIEWS_OF_NAIVE)
        scaled = self.temporary("scaled queries", STREAM, reads=(LIKE_ITSELF,))
        k = self.activation("keys, copied", STREAM, reads=(LIKE_ITSELF,), how=Pass.STRIDED)
        q = self.activation("scaled queries, copied", STREAM, reads=(scaled,), how=Pass.STRIDED)
        scores = self.temporary("scores", SCORES)
        self.matmul_of_heads(Form.FORWARD, "T", "d_head", "T")
        self._save(saved, q_rows=q, k_rows=k)
        tape.drop(q, scaled, k)
        inverted = self.temporary("inverted mask", "T T", 1, reads=(LIKE_ITSELF,))
        tape.pass_over(scores, scores, inverted, how=Pass.MASKED)
        tape.drop(inverted)
        wide = self.widened("scores in fp32", SCORES, scores) if self.autocast else None
        softmax = tape.new(
            Category.ACTIVATIONS, "softmax output", SCORES, FP32_BYTES, reads=(LIKE_ITSELF,), how=Pass.SOFTMAX
        )
        self._save(saved, softmax=softmax)
        if wide is not None:
            tape.drop(wide)
        weights = (
            self.activation("softmax output, cast", SCORES, reads=(softmax,)) if self.autocast else tape.keep(softmax)
        )
        v_rows = self.activation("values, copied", STREAM, reads=(LIKE_ITSELF,), how=Pass.STRIDED)
        values = self.temporary("heads", STREAM)
        self.matmul_of_heads(Form.INPUT, "T", "T", "d_head")
        self._save(saved, weights=weights, v_rows=v_rows)
        tape.drop(v_rows, weights, scores, softmax)
        return values

    def _math(self, saved: Saved | None) -> int:
        """PyTorch's `math` backend: fp32 also under autocast, queries and keys both scaled, with an additive mask."""
        tape = self.tape
        wide = [self.temporary("heads in fp32", STREAM, FP32_BYTES) for _ in "qkv"] if self.autocast else []
        scaled = self.temporary("scaled queries", STREAM, FP32_BYTES)
        allowed = [self.temporary("mask", "T T", 1) for _ in ("all", "lower triangle")]
        mask = self.temporary("mask to add", "T T", FP32_BYTES)
        tape.drop(*allowed)
        scaled_k = self.temporary("scaled keys", STREAM, FP32_BYTES)
        q = tape.new(Category.ACTIVATIONS, "scaled queries, copied", STREAM, FP32_BYTES)
        k = tape.new(Category.ACTIVATIONS, "scaled keys, copied", STREAM, FP32_BYTES)
        scores = self.temporary("scores", SCORES, FP32_BYTES)
        self._save(saved, q_rows=q, k_rows=k)
        tape.drop(q, k, scaled_k)
        masked = self.temporary("masked scores", SCORES, FP32_BYTES)
        tape.drop(scores)
        softmax = tape.new(Category.ACTIVATIONS, "softmax output", SCORES, FP32_BYTES)
        tape.drop(masked)
        cast = [self.temporary("softmax output, cast", SCORES)] if self.autocast else []
        v_rows = tape.new(Category.ACTIVATIONS, "values, copied", STREAM, FP32_BYTES)
        values = self.temporary("heads", STREAM, FP32_BYTES)
        self._save(saved, softmax=softmax, weights=softmax, v_rows=v_rows)
        tape.drop(v_rows, softmax)
        if self.autocast:
            values, wide = self.temporary("heads", STREAM), [*wide, values]
        tape.drop(scaled, mask, *wide, *cast)
        return values

    def _fused(self, heads: tuple[int, ...], v: int, saved: Saved | None) -> int:
        """Flash, cuDNN or efficient: saves inputs, output and the logarithm of each row's sum, but no scores."""
        values = self.activation("output of fused attention", STREAM)
        self.tape.attention(Form.ATTENTION, "4 batch T d_model", self.element_bytes)
        sums = self.tape.new(Category.ACTIVATIONS, "logarithms of softmax sums", "batch heads T", FP32_BYTES)
        names = ("q_heads", "k_heads") if self.gpt2 else ("q_heads",)
        self._save(saved, **dict(zip(names, heads, strict=True)), v_heads=v, values=values, sums=sums)
        self.tape.drop(sums)
        return values

    def swiglu(self, index: int, normed: int, saved: Saved | None, stop_early: bool) -> int | None:
        x = self._cast_normed(normed)
        up = self.linear(f"{index}.w1", x, saved, HIDDEN, "output of w1")
        gated = self.activation("output of SiLU", HIDDEN, reads=(up,))
        self._save(saved, up=up)
        self.tape.drop(up)
        gate = self.linear(f"{index}.w3", x, saved, HIDDEN, "output of w3")
        hidden = self.activation("input of w2", HIDDEN, reads=(gated, gate))
        self._save(saved, gated=gated, gate=gate)
        self.tape.drop(gated, gate)
        out = self._last_matmul(index, hidden, saved, stop_early)
        self.tape.drop(hidden, x)
        return out

    def gelu_mlp(self, index: int, normed: int, saved: Saved | None, stop_early: bool) -> int | None:
        up = self.linear(f"{index}.w1", normed, saved, HIDDEN, "output of w1", cast=True)
        hidden = self.activation("input of w2", HIDDEN, reads=(up,))
        self._save(saved, up=up)
        self.tape.drop(up)
        out = self._last_matmul(index, hidden, saved, stop_early)
        self.tape.drop(hidden)
        return out

    def _last_matmul(self, index: int, x: int, saved: Saved | None, stop_early: bool) -> int | None:
        if stop_early:
            self._keep_factors(f"{index}.w2", x, saved, cast=False)
            return None
        return self.linear(f"{index}.w2", x, saved, STREAM, "output of the feed-forward network")

    def linear(
        self,
        name: str,
        x: int,
        saved: Saved | None,
        shape: str,
        label: str,
        cast: bool = False,
        category: Category = Category.ACTIVATIONS,
    ) -> int:
        """x W^T; with `cast`, `x` is in fp32, and autocast makes a copy of it."""
        self._keep_factors(name, x, saved, cast)
        out = self.tape.new(category, label, shape, self.element_bytes)
        columns, inner = WEIGHTS[name.rpartition(".")[2]].split()
        self.tape.views(VIEWS_OF_LINEAR)
        self.tape.matmul(Form.FORWARD, "batch T", inner, columns, self.element_bytes)
        self.claim_workspace()
        return out

    def _keep_factors(self, name: str, x: int, saved: Saved | None, cast: bool) -> None:
        weight = WEIGHTS[name.rpartition(".")[2]]
        if self.autocast:
            if self.gpt2 and "." in name:
                self._copy_parameter(f"{name}.bias", weight.split()[0])
            if name not in self.way.low:
                self._copy_parameter(name, weight)
                self._save(saved, **{f"{name} copy": self.copies[name]})
        x = self._cast_normed(x) if cast else self.tape.keep(x)
        self._save(saved, **{f"{name} input": x})
        self.tape.drop(x)

    def _copy_parameter(self, name: str, shape: str) -> None:
        if name not in self.copies:
            label = "biases" if name.endswith("bias") else "weights"
            self.copies[name] = self.tape.new(
                Category.WEIGHT_COPIES, f"{label} in half precision", shape, HALF_BYTES, reads=(LIKE_ITSELF,) * 2
            )

    def end_autocast(self) -> None:
        """Drop autocast's copies; autograd's graph may still hold them."""
        self.tape.drop(*self.copies.values())
        self.copies.clear()

    def claim_workspace(self) -> None:
        """Make cuBLAS's workspace at the first matmul of a thread; it is never freed."""
        if self.thread not in self._threads_with_workspace:
            self._threads_with_workspace.add(self.thread)
            self.tape.new(Category.LIBRARY_WORKSPACE, "cuBLAS workspace", str(CUBLAS_WORKSPACE_BYTES), 1)

    def matmul_of_heads(self, form: Form, rows: str, inner: str, columns: str) -> None:
        """Launch a matmul for each head of each sequence."""
        self.tape.matmul(form, rows, inner, columns, self.element_bytes, batch="batch heads")

    def activation(self, label: str, shape: str, reads: Sequence[int] | None = None, how: Pass = Pass.COPY) -> int:
        """A tensor in the type of matmuls, which autograd's graph may save."""
        return self.tape.new(Category.ACTIVATIONS, label, shape, self.element_bytes, reads=reads, how=how)

    def temporary(
        self,
        label: str,
        shape: str,
        element_bytes: int | None = None,
        reads: Sequence[int] | None = None,
        how: Pass = Pass.COPY,
    ) -> int:
        """A tensor that autograd's graph does not save; by default in the type of matmuls."""
        element_bytes = element_bytes or self.element_bytes
        return self.tape.new(Category.TEMPORARIES, label, shape, element_bytes, reads=reads, how=how)

    def widened(self, label: str, shape: str, narrow: int) -> int:
        """A copy in fp32 of a tensor in autocast's type, which autograd's graph does not save."""
        return self.temporary(label, shape, FP32_BYTES, reads=(narrow,), how=Pass.WIDEN)

    def _cast_normed(self, normed: int) -> int:
        """The output of a norm in the type of matmuls: a copy, or one more reference to it if it has the type."""
        if self.norm_bytes == self.element_bytes:
            return self.tape.keep(normed)
        return self.activation("input of matmuls, cast", STREAM, reads=(normed,))

    def _save(self, saved: Saved | None, **handles: int) -> None:
        if saved is not None:
            saved.update((name, self.tape.keep(handle)) for name, handle in handles.items())
