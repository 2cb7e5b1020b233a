"""The operations of a step with fused blocks in CUDA graphs, as `--fast` computes it, in launch order.

The list follows model/fast/ kernel by kernel. A matmul with an activation in it is taken to be as long as without,
and FlashAttention 4 as long as the kernel of the ceilings, cuDNN's on a Hopper GPU, which takes longer in backward.
costs/fast_memory.py has the memory of such a step.
"""

from cs336_systems.config import (
    PACKED_MULTIPLE,
    Arch,
    Attention,
    Mode,
    OptimizerKind,
    Phase,
    RunConfig,
    SdpaBackend,
)
from cs336_systems.costs.accounting import (
    ADAMW_BYTES,
    Component,
    only_copied,
    parameters_by_component,
    saved_by_moments,
    split_parameters,
)
from cs336_systems.costs.forecast.parameters import axes
from cs336_systems.costs.forecast.tape import Form, Tape
from cs336_systems.costs.shards import FP32_BYTES, HALF_BYTES

PARTIAL_ROWS = 264
"""Rows of partial sums over a tensor's rows: two programs for each of a Hopper GPU's multiprocessors."""


def is_fast_step(config: RunConfig) -> bool:
    """Whether this module lists the step's operations: steps with everything that `--fast` chooses, but no checkpoints.

    The list has one order, so steps that update weights at the same time as backward are not covered.
    """
    model = config.model
    settings = (
        config.fused_blocks, config.fused_loss, config.compile_blocks, config.cuda_graph,
        config.mode is not Mode.TRAIN or config.optimizer is OptimizerKind.FUSED,
        model.attention is Attention.SDPA and model.sdpa_backend is not SdpaBackend.MATH,
        model.d_ff % PACKED_MULTIPLE == 0,
    )  # fmt: skip
    others = config.fp8, config.checkpoint_blocks, config.loss_chunks > 1, config.update_in_backward
    return all(settings) and not any(others)


def fast_tape(config: RunConfig) -> Tape:
    """The operations of one step in the steady state, on a tape without tensors."""
    step = _FastStep(config)
    step.run()
    return step.tape


class _FastStep:
    """Writes the operations of one step; bytes are those that a kernel reads and writes if nothing is read twice."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.gpt2 = config, config.model.arch is Arch.GPT2
        self.vocabulary = -(-config.model.vocab_size // config.pad_vocabulary) * config.pad_vocabulary
        self.tape = Tape(axes(config) | {"vocabulary": self.vocabulary})
        self.stream = self.tape.size("batch T d_model")
        """Elements of the residual stream."""
        self.hidden = self.tape.size("batch T d_ff")
        self.logits = self.tape.size("batch T vocabulary")
        self.factors = 1 if self.gpt2 else 2
        """Results of the feed-forward network's first matmul: w1 and w3 of SwiGLU, or one."""
        self.rotated = 2 if config.packed_attention else 3
        """Parts of q, k and v that RoPE's kernel reads and writes: it leaves v alone where they are packed."""

    def run(self) -> None:
        """One step in the configuration's mode."""
        tape, mode = self.tape, self.config.mode
        tape.begin(Phase.FORWARD)
        self._forward()
        if mode in (Mode.FORWARD_BACKWARD, Mode.TRAIN):
            tape.begin(Phase.BACKWARD)
            self._backward()
        if mode is Mode.TRAIN:
            tape.begin(Phase.OPTIMIZER)
            self._update()

    def _forward(self) -> None:
        tape = self.tape
        tape.pass_of(2 * FP32_BYTES * self.stream)  # the looked up rows
        if self.gpt2:
            tape.pass_of(2 * FP32_BYTES * self.stream)  # plus positions
        tape.pass_of(HALF_BYTES * self.stream)  # a branch of zeros
        for _ in range(self.config.model.num_layers):
            self._add_norm()
            self._linear("3 d_model", "d_model")
            if not self.gpt2:
                tape.pass_of(2 * HALF_BYTES * self.rotated * self.stream)  # heads rotated, and cut if not packed
            tape.attention(Form.ATTENTION, "4 batch T d_model", HALF_BYTES)
            self._linear("d_model", "d_model")
            self._add_norm()
            self._linear(f"{self.factors} d_ff", "d_model")
            if not self.config.fused_activations:
                tape.pass_of(HALF_BYTES * (self.factors + 1) * self.hidden)  # SwiGLU, or GELU
            self._linear("d_model", "d_ff")
        self._add_norm()
        self._linear("vocabulary", "d_model")
        writes = self.config.mode is not Mode.INFERENCE  # the logits become their own gradient
        tape.pass_of(HALF_BYTES * (2 if writes else 1) * self.logits)
        tape.pass_of(FP32_BYTES * tape.size("batch T"))  # their mean

    def _backward(self) -> None:
        tape = self.tape
        tape.pass_of(FP32_BYTES)  # the gradient of the loss
        tape.pass_of(FP32_BYTES)  # scaling of the logits' gradient by it, which leaves the logits alone if it is 1
        self._linear_backward("vocabulary", "d_model")
        self._add_norm_backward(is_last=True)
        for _ in range(self.config.model.num_layers):
            self._linear_backward("d_model", "d_ff")
            if not self.config.fused_activations:
                tape.pass_of(HALF_BYTES * (2 * self.factors + 1) * self.hidden)
            if self.gpt2:
                self._reduce(1, "d_ff")
            self._linear_backward(f"{self.factors} d_ff", "d_model")
            self._add_norm_backward()
            self._linear_backward("d_model", "d_model")
            tape.attention(Form.ATTENTION_BACKWARD, "8 batch T d_model", HALF_BYTES)
            if self.gpt2:
                # the gradient of a bias: with packed heads two tensors are read, else q, k and v are packed as well
                tape.pass_of((2 if self.config.packed_attention else 6) * HALF_BYTES * self.stream)
                self._reduce(3, "d_model")
            else:
                tape.pass_of(2 * HALF_BYTES * self.rotated * self.stream)
            self._linear_backward("3 d_model", "d_model")
            self._add_norm_backward()
        if self.gpt2:
            tape.pass_of(FP32_BYTES * (self.stream + tape.size("T d_model")))  # positions, summed over the batch
        tape.pass_of(FP32_BYTES * self.config.model.vocab_size * self.config.model.d_model)  # zeros
        tape.pass_of(3 * FP32_BYTES * self.stream)  # to which each token's gradient is added

    def _update(self) -> None:
        """AdamW for weights with copies, for those without, and for a tied table, which has two gradients.

        Its kernel reads and writes each tensor in order, as a copy does.
        """
        parts = parameters_by_component(self.config.model)
        alone = parts[Component.EMBEDDING] + parts[Component.NORMS]
        tied = parts[Component.HEAD] if self.gpt2 else 0
        self.tape.pass_of(2 * FP32_BYTES)  # the number of steps
        each = ADAMW_BYTES - saved_by_moments(self.config)
        of_copied = each * only_copied(self.config.model) - HALF_BYTES * split_parameters(self.config)
        for moved_bytes in (of_copied, each * alone, (each + FP32_BYTES) * tied):
            if moved_bytes:
                self.tape.pass_of(moved_bytes)

    def _linear(self, columns: str, inner: str) -> None:
        """x W^T; a bias is added by the same kernel, or later."""
        self.tape.matmul(Form.FORWARD, "batch T", inner, columns, HALF_BYTES)

    def _linear_backward(self, columns: str, inner: str) -> None:
        """Gradients of weight and input."""
        self.tape.matmul(Form.WEIGHT, columns, "batch T", inner, HALF_BYTES)
        self.tape.matmul(Form.INPUT, "batch T", columns, inner, HALF_BYTES)

    def _add_norm(self) -> None:
        """Reads stream and branch, writes their sum and its norm."""
        self.tape.pass_of(2 * (FP32_BYTES + HALF_BYTES) * self.stream)

    def _add_norm_backward(self, *, is_last: bool = False) -> None:
        """Reads the sum and the gradients of norm and stream, writes the gradients of branch and stream.

        After the last norm nothing reads the stream, so it has no gradient there.
        """
        wide = 2 if is_last else 3
        self.tape.pass_of((wide * FP32_BYTES + 2 * HALF_BYTES) * self.stream)
        self._reduce(3 if self.gpt2 else 1, "d_model")

    def _reduce(self, sums: int, width: str) -> None:
        """Add up partial sums over rows, for the gradients of gains and biases."""
        self.tape.pass_of(FP32_BYTES * sums * PARTIAL_ROWS * self.tape.size(width))
