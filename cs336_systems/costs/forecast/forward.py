"""The tensors that the layers of this project's model make in forward, and which of them stay for backward.

It follows `model/transformer.py` line by line as PyTorch (2.11 to 2.13) runs it eagerly on a GPU: which copies the
products need, what autocast casts, what the nodes of autograd's graph keep, when Python lets go. More than one head,
position and sequence are assumed: for one, some copies are views.
"""

from cs336_systems.config import Arch, Attention, ModelConfig, Precision, RunConfig, SdpaBackend
from cs336_systems.costs.forecast.tape import Category, Tape

CUBLAS_WORKSPACE_BYTES = 32 * 2**20
"""PyTorch's default for a Hopper GPU, `:4096:8`, allocated for each thread that calls cuBLAS: forward's and autograd's.

Other GPUs get 8,519,680 bytes. Confirmed by the peaks of inference on an H200, which it completes to the byte.
"""
FP32_BYTES = 4
HALF_BYTES = 2

WEIGHTS = {
    "q": "d_model d_model",
    "k": "d_model d_model",
    "v": "d_model d_model",
    "output": "d_model d_model",
    "w1": "d_ff d_model",
    "w2": "d_model d_ff",
    "w3": "d_ff d_model",
    "lm_head": "vocabulary d_model",
}
"""Shapes of the linear layers' weights, (d_out, d_in)."""

STREAM = "batch T d_model"
HIDDEN = "batch T d_ff"
SCORES = "batch heads T T"

Saved = dict[str, int]
"""Handles of what one block's part of the graph keeps, by name."""


class ForwardTape:
    """Writes the layers of one model onto a tape.

    Each keeps what backward needs in `saved`, or nothing where that is None, and leaves its input to the caller.
    """

    def __init__(self, config: RunConfig, tape: Tape) -> None:
        self.model: ModelConfig = config.model
        self.tape = tape
        self.gpt2 = config.model.arch is Arch.GPT2
        self.autocast = config.precision in (Precision.BF16, Precision.FP16)
        self.element_bytes = HALF_BYTES if self.autocast else FP32_BYTES
        self.copies: dict[str, int] = {}
        """Autocast's cache: low-precision copies of parameters, by name, until autocast ends."""
        self.thread = "forward"
        """Who launches the kernels: Python in forward, autograd's own thread in backward."""
        self._threads_with_workspace: set[str] = set()

    def block(self, index: int, x: int, saved: Saved | None, stop_early: bool = False) -> int | None:
        """One Transformer block on the residual stream `x`, which stays the caller's.

        With `stop_early`, as when a checkpoint is computed again, it ends where all that is saved is there: None.
        """
        tape = self.tape
        normed = self.norm(f"{index}.ln1", x, saved)
        change = self.attention(index, normed, saved)
        tape.drop(normed)
        middle = tape.new(Category.ACTIVATIONS, "residual stream", STREAM, FP32_BYTES)
        tape.drop(change)
        normed = self.norm(f"{index}.ln2", middle, saved)
        ffn = self.gelu_mlp if self.gpt2 else self.swiglu
        last = ffn(index, normed, saved, stop_early)
        tape.drop(normed)
        out = None
        if last is not None:
            out = tape.new(Category.ACTIVATIONS, "residual stream", STREAM, FP32_BYTES)
            tape.drop(last)
        tape.drop(middle)
        return out

    def norm(self, name: str, x: int, saved: Saved | None) -> int:
        """RMSNorm keeps its input and 1 / rms, LayerNorm also the mean; the output is kept by who multiplies it."""
        normed = self.tape.new(Category.ACTIVATIONS, "output of norms", STREAM, FP32_BYTES)
        self._save(saved, **{f"{name} input": x})
        for statistic in ("mean", "scale")[0 if self.gpt2 else 1 :]:
            made = self.tape.new(Category.ACTIVATIONS, "statistics of norms", "batch T", FP32_BYTES)
            self._save(saved, **{f"{name} {statistic}": made})
            self.tape.drop(made)
        return normed

    def attention(self, index: int, normed: int, saved: Saved | None) -> int:
        tape = self.tape
        x = self._cast(normed)
        q, k, v = (self.linear(f"{index}.{name}", x, saved, STREAM, "queries, keys, values") for name in "qkv")
        heads = (q, k) if self.gpt2 else (self._rotate(q, k),)
        if self.model.attention is Attention.NAIVE:
            values = self._naive(saved)
        elif self.model.sdpa_backend is SdpaBackend.MATH:
            values = self._math(saved)
        else:
            values = self._fused(heads, v, saved)
        merged = tape.keep(values) if self.is_fused else self.activation("heads merged", STREAM)
        change = self.linear(f"{index}.output", merged, saved, STREAM, "output of attention")
        tape.drop(merged, x, *heads, v, values)
        return change

    @property
    def is_fused(self) -> bool:
        """Attention in one kernel (flash, cuDNN, efficient), which gives back heads that need no copy to be merged."""
        return self.model.attention is Attention.SDPA and self.model.sdpa_backend is not SdpaBackend.MATH

    def _rotate(self, q: int, k: int) -> int:
        """RoPE on queries and keys in one tensor, in fp32 whatever comes in."""
        both, pairs = "queries and keys", "2 batch T d_model"
        joined = self.temporary(f"{both}, joined", pairs)
        wide = [self.temporary(f"{both} in fp32", pairs, FP32_BYTES)] if self.autocast else []
        rotated = self.tape.new(Category.ACTIVATIONS, f"{both}, rotated", pairs, FP32_BYTES)
        if self.autocast:
            wide.append(rotated)
            rotated = self.activation(f"{both}, rotated", pairs)
        self.tape.drop(joined, *wide, q, k)
        return rotated

    def _naive(self, saved: Saved | None) -> int:
        tape = self.tape
        scaled = self.temporary("scaled queries", STREAM)
        k, q = self.activation("keys, copied", STREAM), self.activation("scaled queries, copied", STREAM)
        scores = self.temporary("scores", SCORES)
        self._save(saved, q_rows=q, k_rows=k)
        tape.drop(q, scaled, k)
        wide = self.temporary("scores in fp32", SCORES, FP32_BYTES) if self.autocast else None
        softmax = tape.new(Category.ACTIVATIONS, "softmax output", SCORES, FP32_BYTES)
        self._save(saved, softmax=softmax)
        if wide is not None:
            tape.drop(wide)
        weights = self._cast(softmax, "softmax output, cast", SCORES)
        v_rows = self.activation("values, copied", STREAM)
        values = self.temporary("heads", STREAM)
        self._save(saved, weights=weights, v_rows=v_rows)
        tape.drop(v_rows, weights, scores, softmax)
        return values

    def _math(self, saved: Saved | None) -> int:
        """PyTorch's sdpa written out: in fp32 also under autocast, scaled on both sides, with an additive mask."""
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
        """Flash, cuDNN or efficient: no scores; the inputs, the output and the logarithm of each row's sum are kept."""
        values = self.activation("output of fused attention", STREAM)
        sums = self.tape.new(Category.ACTIVATIONS, "logarithms of softmax sums", "batch heads T", FP32_BYTES)
        names = ("q_heads", "k_heads") if self.gpt2 else ("q_heads",)
        self._save(saved, **dict(zip(names, heads, strict=True)), v_heads=v, values=values, sums=sums)
        self.tape.drop(sums)
        return values

    def swiglu(self, index: int, normed: int, saved: Saved | None, stop_early: bool) -> int | None:
        x = self._cast(normed)
        up = self.linear(f"{index}.w1", x, saved, HIDDEN, "output of w1")
        gated = self.activation("output of SiLU", HIDDEN)
        self._save(saved, up=up)
        self.tape.drop(up)
        gate = self.linear(f"{index}.w3", x, saved, HIDDEN, "output of w3")
        product = self.activation("input of w2", HIDDEN)
        self._save(saved, gated=gated, gate=gate)
        self.tape.drop(gated, gate)
        out = self._last_product(index, product, saved, stop_early)
        self.tape.drop(product, x)
        return out

    def gelu_mlp(self, index: int, normed: int, saved: Saved | None, stop_early: bool) -> int | None:
        up = self.linear(f"{index}.w1", normed, saved, HIDDEN, "output of w1", cast=True)
        hidden = self.activation("input of w2", HIDDEN)
        self._save(saved, up=up)
        self.tape.drop(up)
        out = self._last_product(index, hidden, saved, stop_early)
        self.tape.drop(hidden)
        return out

    def _last_product(self, index: int, x: int, saved: Saved | None, stop_early: bool) -> int | None:
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
        """x W^T; `cast` where `x` is in fp32, so that autocast makes a copy of its own."""
        self._keep_factors(name, x, saved, cast)
        out = self.tape.new(category, label, shape, self.element_bytes)
        self.claim_workspace()
        return out

    def _keep_factors(self, name: str, x: int, saved: Saved | None, cast: bool) -> None:
        weight = WEIGHTS[name.rpartition(".")[2]]
        if self.autocast:
            if self.gpt2 and "." in name:
                self._copy_parameter(f"{name}.bias", weight.split()[0])
            self._copy_parameter(name, weight)
            self._save(saved, **{f"{name} copy": self.copies[name]})
        x = self._cast(x) if cast else self.tape.keep(x)
        self._save(saved, **{f"{name} input": x})
        self.tape.drop(x)

    def _copy_parameter(self, name: str, shape: str) -> None:
        if name not in self.copies:
            label = "biases" if name.endswith("bias") else "weights"
            self.copies[name] = self.tape.new(Category.WEIGHT_COPIES, f"{label} in half precision", shape, HALF_BYTES)

    def end_autocast(self) -> None:
        """Autocast forgets its copies; the graph may still hold them."""
        self.tape.drop(*self.copies.values())
        self.copies.clear()

    def claim_workspace(self) -> None:
        """The first product on a thread makes cuBLAS's workspace, which stays."""
        if self.thread not in self._threads_with_workspace:
            self._threads_with_workspace.add(self.thread)
            self.tape.new(Category.LIBRARY_WORKSPACE, "cuBLAS workspace", str(CUBLAS_WORKSPACE_BYTES), 1)

    def activation(self, label: str, shape: str) -> int:
        """A tensor of the type that products have, which the graph may keep."""
        return self.tape.new(Category.ACTIVATIONS, label, shape, self.element_bytes)

    def temporary(self, label: str, shape: str, element_bytes: int | None = None) -> int:
        """A tensor that no graph keeps; by default of the type that products have."""
        return self.tape.new(Category.TEMPORARIES, label, shape, element_bytes or self.element_bytes)

    def _cast(self, x: int, label: str = "input of products, cast", shape: str = STREAM) -> int:
        """An fp32 tensor in autocast's type; one more reference to it where there is no autocast."""
        return self.activation(label, shape) if self.autocast else self.tape.keep(x)

    def _save(self, saved: Saved | None, **handles: int) -> None:
        if saved is not None:
            saved.update((name, self.tape.keep(handle)) for name, handle in handles.items())
