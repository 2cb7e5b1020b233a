"""The tensors that backward makes, and when it frees what forward saved.

Each function consumes the gradient of its output and returns the gradient of its input. If a tensor was used more than
once, autograd's engine adds its gradients, in place unless the first of them is a view.
"""

from collections.abc import Sequence

from cs336_systems.config import Attention, RunConfig
from cs336_systems.costs.forecast.forward import HIDDEN, SCORES, STREAM, ForwardTape, Saved
from cs336_systems.costs.forecast.parameters import WEIGHTS
from cs336_systems.costs.forecast.tape import LIKE_ITSELF, Category, Form, Pass, Tape
from cs336_systems.costs.forecast.ways import InPlace
from cs336_systems.costs.shards import FP32_BYTES

GRADIENT = "gradient of the residual stream"
VIEWS_OF_LINEAR_BACKWARD = 6
"""Views in a linear layer's backward: four transposes, two to flatten the gradient and unflatten the input's."""
VIEWS_OF_ROTATION_BACKWARD = 7
"""Views in RoPE's backward, as many as in forward."""
VIEWS_OF_FUSED_BACKWARD = 9
"""Two views each split or merge the heads of the gradients of queries, keys, values and output; one is detached."""
VIEWS_OF_NAIVE_BACKWARD = 20
"""The eight views of heads above; for each matmul of forward, two transposes, the gradient flattened, and two results
unflattened; the keys transposed, and the softmax detached."""


class BackwardTape(ForwardTape):
    """Writes the layers of one model onto a tape, forward and backward."""

    def __init__(self, config: RunConfig, tape: Tape, way: InPlace) -> None:
        super().__init__(config, tape, way)
        self.of_head: int | None = None
        """Gradient of a tied head, which waits for that of the embedding."""

    def branch_off(self, gradient: int) -> int:
        """The gradient of the residual stream as input to a branch's backward, in the type of its matmuls."""
        if self.stream_bytes == self.element_bytes:
            return self.tape.keep(gradient)
        return self._narrow(gradient, GRADIENT, STREAM, keep=True)

    def block_backward(self, index: int, gradient: int, branch: int, saved: Saved) -> None:
        """Turn the gradient after the block into the gradient before it, in place; `branch` is from `branch_off`."""
        if self.gpt2:
            branch = self._gelu_mlp_backward(index, branch, saved)
        else:
            branch = self._swiglu_backward(index, branch, saved)
        self._join(f"{index}.ln2", branch, saved)
        branch = self._attention_backward(index, self.branch_off(gradient), saved)
        self._join(f"{index}.ln1", branch, saved)

    def _join(self, norm: str, branch: int, saved: Saved) -> None:
        """Backward of the norm, whose result is added in place to the gradient of the residual stream."""
        change = self.norm_backward(norm, branch, saved)
        self.tape.pass_over(change, change, change)
        self.tape.drop(change)

    def norm_backward(self, name: str, gradient: int, saved: Saved) -> int:
        """Backward of a norm, from the gradient of its output in the type of matmuls; without its small buffers for
        partial sums over rows.
        """
        if self.norm_bytes > self.element_bytes:
            gradient = self._replace(GRADIENT, STREAM, gradient, element_bytes=self.norm_bytes, how=Pass.WIDEN)
        x = saved[f"{name} input"]
        out = self.temporary(GRADIENT, STREAM, self.norm_bytes, reads=(gradient, x))
        self.tape.pass_over(gradient, x, calls=0)  # a second kernel, for the gradients of its parameters
        parameters = (name, f"{name}.bias") if self.gpt2 else (name,)
        self.tape.views(len(parameters))  # each gradient is detached
        made = [self.new_gradient("d_model", name in self.way.low) for _ in parameters]
        self.tape.drop(gradient)
        statistics = (f"{name} mean", f"{name} scale") if self.gpt2 else (f"{name} scale",)
        self.release(saved, f"{name} input", *statistics)
        if self.stream_bytes < self.norm_bytes:
            out = self._replace(GRADIENT, STREAM, out, element_bytes=self.stream_bytes)
        for parameter, of_parameter in zip(parameters, made, strict=True):
            self.way.graded(parameter, of_parameter)
        return out

    def linear_backward(
        self, name: str, gradient: int, saved: Saved, shape: str, onto: int | None = None, in_place: bool = False
    ) -> int:
        """Gradients of weight, bias and input; the input's is added to `onto`, the gradient from its other use."""
        self.claim_workspace()
        weight, is_low = WEIGHTS[name.rpartition(".")[2]], name in self.way.low
        with_bias = self.gpt2 and "." in name
        made = [(name, self._parameter_gradient(weight, is_low), weight)]
        x = self.temporary("gradient of a matmul's input", shape)
        columns, inner = weight.split()
        self.tape.views(VIEWS_OF_LINEAR_BACKWARD + 1)  # the gradient is detached
        self.tape.matmul(Form.WEIGHT, columns, "batch T", inner, self.element_bytes)
        self.tape.matmul(Form.INPUT, "batch T", columns, inner, self.element_bytes)
        if with_bias:
            bias, of_bias = f"{name}.bias", weight.split()[0]
            self.tape.pass_over(gradient)
            self.tape.views(2)  # a vector, which is detached
            made.append((bias, self._parameter_gradient(of_bias, bias in self.way.low), of_bias))
        self.tape.drop(gradient)
        self.release(saved, f"{name} input", *([f"{name} copy"] if self.autocast and not is_low else []))
        if onto is not None:
            total = onto if in_place else self.temporary("gradient of a matmul's input", shape, reads=(x, onto))
            if in_place:
                self.tape.pass_over(onto, onto, x)
            self.tape.drop(x, *([] if in_place else [onto]))
            x = total
        for parameter, of_parameter, axes in made if self.autocast else reversed(made):
            if self.autocast and parameter not in self.way.low:
                narrow, of_parameter = of_parameter, self.new_gradient(axes, reads=(of_parameter,), how=Pass.WIDEN)
                self.tape.drop(narrow)
            if self.gpt2 and parameter == "lm_head":
                self.of_head = of_parameter
            else:
                self.way.graded(parameter, of_parameter)
        return x

    def _parameter_gradient(self, shape: str, is_low: bool = False) -> int:
        """The gradient as the matmul makes it; under autocast an fp32 copy replaces it later, unless it `is_low`."""
        is_replaced = self.autocast and not is_low
        category = Category.TEMPORARIES if is_replaced else Category.GRADIENTS
        label = "gradient of a parameter, to be cast" if is_replaced else "gradients of parameters"
        return self.tape.new(category, label, shape, self.element_bytes)

    def new_gradient(
        self, shape: str, is_low: bool = False, reads: Sequence[int] | None = None, how: Pass = Pass.COPY
    ) -> int:
        """Gradient of a parameter, in fp32 or low."""
        element_bytes = self.element_bytes if is_low else FP32_BYTES
        return self.tape.new(Category.GRADIENTS, "gradients of parameters", shape, element_bytes, reads=reads, how=how)

    def _swiglu_backward(self, index: int, gradient: int, saved: Saved) -> int:
        hidden = self.linear_backward(f"{index}.w2", gradient, saved, HIDDEN)
        gate = self.temporary("gradient of w3's output", HIDDEN, reads=(hidden, saved["gated"]))
        gated = self.temporary("gradient of SiLU's output", HIDDEN, reads=(hidden, saved["gate"]))
        self.tape.drop(hidden)
        self.release(saved, "gate", "gated")
        x = self.linear_backward(f"{index}.w3", gate, saved, STREAM)
        up = self.temporary("gradient of w1's output", HIDDEN, reads=(gated, saved["up"]))
        self.tape.drop(gated)
        self.release(saved, "up")
        return self.linear_backward(f"{index}.w1", up, saved, STREAM, onto=x)

    def _gelu_mlp_backward(self, index: int, gradient: int, saved: Saved) -> int:
        hidden = self.linear_backward(f"{index}.w2", gradient, saved, HIDDEN)
        up = self.temporary("gradient of w1's output", HIDDEN, reads=(hidden, saved["up"]))
        self.tape.drop(hidden)
        self.release(saved, "up")
        return self.linear_backward(f"{index}.w1", up, saved, STREAM)

    def _attention_backward(self, index: int, gradient: int, saved: Saved) -> int:
        values = self.linear_backward(f"{index}.output", gradient, saved, STREAM)
        if self.is_fused:
            q, k, v = self._fused_backward(values, saved)
        elif self.model.attention is Attention.NAIVE:
            q, k, v = self._naive_backward(values, saved)
        else:
            q, k, v = self._math_backward(values, saved)
        rotated = None if self.gpt2 else self._rotate_backward(q, k)
        x = self.linear_backward(f"{index}.v", self._merge(v), saved, STREAM)
        if rotated is None:
            x = self.linear_backward(f"{index}.k", self._merge(k), saved, STREAM, onto=x)
            return self.linear_backward(f"{index}.q", self._merge(q), saved, STREAM, onto=x, in_place=True)
        x = self.linear_backward(f"{index}.k", self.tape.keep(rotated), saved, STREAM, onto=x)
        return self.linear_backward(f"{index}.q", rotated, saved, STREAM, onto=x, in_place=True)

    def _merge(self, gradient: int) -> int:
        """Merge the heads; a fused kernel has written them merged already."""
        return (
            gradient
            if self.is_fused
            else self._replace("gradient of heads, merged", STREAM, gradient, how=Pass.STRIDED)
        )

    def _rotate_backward(self, q: int, k: int) -> int:
        label, pairs = "gradient of queries and keys", "2 batch T d_model"
        joined = self._replace(label, pairs, q, k)
        wide = self.widen(joined, label, pairs)
        conjugate = self.temporary("rotations, conjugated", "T d_head", FP32_BYTES, reads=(LIKE_ITSELF,))
        self.tape.views(VIEWS_OF_ROTATION_BACKWARD)
        rotated = self._replace(label, pairs, conjugate, wide, element_bytes=FP32_BYTES)
        return self._narrow(rotated, label, pairs)

    def _naive_backward(self, values: int, saved: Saved) -> tuple[int, int, int]:
        self.tape.views(VIEWS_OF_NAIVE_BACKWARD)
        rows = self._replace("gradient of heads, split", STREAM, values, how=Pass.STRIDED)
        v, weights = self.temporary("gradient of values", STREAM), self.temporary("gradient of weights", SCORES)
        self.matmul_of_heads(Form.WEIGHT, "T", "T", "d_head")
        self.matmul_of_heads(Form.FORWARD, "T", "d_head", "T")
        self.tape.drop(rows)
        self.release(saved, "v_rows", "weights")
        wide = self.widen(weights, "gradient of weights", SCORES)
        made = (LIKE_ITSELF, saved["softmax"])
        scores = self._replace("gradient of scores", SCORES, wide, element_bytes=FP32_BYTES, reads=made)
        self.release(saved, "softmax")
        scores = self._narrow(scores, "gradient of scores", SCORES)
        k, q = (self.temporary(f"gradient of {name}", STREAM) for name in ("keys", "queries"))
        self.matmul_of_heads(Form.WEIGHT, "d_head", "T", "T")
        self.matmul_of_heads(Form.INPUT, "T", "T", "d_head")
        self.tape.drop(scores)
        self.release(saved, "k_rows", "q_rows")
        return self._replace("gradient of queries", STREAM, q), k, v

    def _math_backward(self, values: int, saved: Saved) -> tuple[int, int, int]:
        heads = self.widen(values, "gradient of heads", STREAM)
        rows = self._replace("gradient of heads, split", STREAM, heads, element_bytes=FP32_BYTES)
        v = self.temporary("gradient of values", STREAM, FP32_BYTES)
        weights = self.temporary("gradient of weights", SCORES, FP32_BYTES)
        self.tape.drop(rows)
        self.release(saved, "v_rows", "weights")
        scores = self._replace("gradient of scores", SCORES, weights, element_bytes=FP32_BYTES)
        self.release(saved, "softmax")
        k, q = (self.temporary(f"gradient of {name}", STREAM, FP32_BYTES) for name in ("keys", "queries"))
        self.tape.drop(scores)
        self.release(saved, "k_rows", "q_rows")
        k = self._replace("gradient of keys", STREAM, k, element_bytes=FP32_BYTES)
        q = self._replace("gradient of queries", STREAM, q, element_bytes=FP32_BYTES)
        v, k, q = (self._narrow(x, "gradient of heads", STREAM) for x in (v, k, q))
        return q, k, v

    def _fused_backward(self, values: int, saved: Saved) -> tuple[int, int, int]:
        """Workspaces: flash sums the queries' gradient in fp32; the efficient kernel multiplies output and gradient.

        cuDNN's workspace is not documented; that of flash is assumed.
        """
        q, k, v = (self.temporary(f"gradient of {name}", STREAM) for name in ("queries", "keys", "values"))
        sums = self.temporary("row sums of output x gradient", "batch heads T128", FP32_BYTES)
        shape = "batch heads T128 d_head32" if self.autocast else STREAM
        workspace = self.temporary("workspace of fused attention", shape, FP32_BYTES)
        self.tape.views(VIEWS_OF_FUSED_BACKWARD)
        self.tape.attention(Form.ATTENTION_BACKWARD, "8 batch T d_model", self.element_bytes)
        self.tape.drop(sums, workspace, values)
        self.release(saved, "q_heads", *(["k_heads"] if self.gpt2 else []), "v_heads", "values", "sums")
        return q, k, v

    def _replace(
        self,
        label: str,
        shape: str,
        *old: int,
        element_bytes: int | None = None,
        reads: Sequence[int] | None = None,
        how: Pass = Pass.COPY,
    ) -> int:
        """A tensor that one kernel makes of `reads`, by default of `old`, of which the references are dropped."""
        made = self.temporary(label, shape, element_bytes, reads=old if reads is None else reads, how=how)
        self.tape.drop(*old)
        return made

    def widen(self, x: int, label: str, shape: str) -> int:
        """Cast a gradient from autocast's type to fp32, after a matmul."""
        return self._replace(label, shape, x, element_bytes=FP32_BYTES, how=Pass.WIDEN) if self.autocast else x

    def _narrow(self, x: int, label: str, shape: str, keep: bool = False) -> int:
        """Cast a gradient to autocast's type, for a matmul; with `keep` the fp32 one is kept too."""
        if not self.autocast:
            return self.tape.keep(x) if keep else x
        return self._replace(label, shape, *([] if keep else [x]), reads=(x,))

    def release(self, saved: Saved, *names: str) -> None:
        """Drop the named saved tensors, after the node of autograd's graph that saved them has run."""
        self.tape.drop(*(saved.pop(name) for name in names))
