"""The tensors of whole steps: the model, forward and loss, backward, the optimizer, and what is kept between steps."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from cs336_systems.config import Arch, Attention, Device, Mode, OptimizerKind, Phase, RunConfig
from cs336_systems.costs.accounting import ADAMW_BYTES
from cs336_systems.costs.forecast.backward import BackwardTape
from cs336_systems.costs.forecast.forward import STREAM, Saved
from cs336_systems.costs.forecast.parameters import WEIGHTS, axes, parameter_shapes
from cs336_systems.costs.forecast.tape import LIKE_ITSELF, Category, Kind, Operation, Pass, Tape
from cs336_systems.costs.forecast.ways import WAYS
from cs336_systems.costs.shards import FP32_BYTES, HEAD, LOOKUP

LOGITS = "batch T vocabulary"
INT64_BYTES = 8
SCALAR = "1"
TENSORS_OF_ADAMW = (2, 3, 2, 3, 2, 2, 4)
"""Tensors that each kernel of AdamW reads and writes: decay, first moment, second (two), root, epsilon, update."""
TENSORS_OF_FOREACH = (*TENSORS_OF_ADAMW[:5], 2, 2, 4)
"""PyTorch's foreach AdamW divides the root by its bias correction in a kernel of its own."""
FOREACH_CHUNK = 65_536
"""Elements per thread block of a foreach kernel (kChunkSize of PyTorch's MultiTensorApply.cuh)."""
FOREACH_BLOCKS = 320
"""Thread blocks in one launch of a foreach kernel (depth_to_max_blocks of the same file)."""
SAVED_OF_BLOCK = {Arch.CS336: 29, Arch.GPT2: 28}
"""Number of tensors that autograd saves for one block, including its parameters and tables that all blocks share."""
SAVED_OF_FUSED_ATTENTION = 2
"""Number of tensors that fused attention saves on a GPU but not on a CPU: its random state, though it draws no numbers.

Backward's formulas name them in PyTorch's derivatives.yaml: rng_state and unused of flash, else philox_seed and
philox_offset.
"""
LAUNCHES_TO_PACK = 1.0
"""Time that the host needs in forward for one tensor that a checkpoint does not save, in kernel launches.

This time and the three below were measured on a CPU with narrow models of 16 blocks, in checkpoints of 1 to 16 blocks.
There a launch took 5.2 to 6.0 us, noting a tensor 5.4, and saving it in backward and finding it again 12. A checkpoint
took 95 us more in forward and 140 in backward.
"""
LAUNCHES_TO_UNPACK = 2.25
"""Time that the host needs in backward to save such a recomputed tensor and to find it again, in launches."""
LAUNCHES_OF_CHECKPOINT = 18
"""Time that the host needs to begin and to end a checkpoint in forward, in launches."""
LAUNCHES_OF_CHECKPOINT_BACKWARD = 26
"""Time that the host needs to begin and to end the recomputation of a checkpoint, in launches."""
WITHOUT_COST = (
    "seed", "repeat", "learning_rate", "warmup_steps", "measured_steps", "sync_phases", "ranges", "tokens", "profiler",
)  # fmt: skip
"""Settings that change no operation and no tensor. Configurations that differ only in these share one tape."""


def tape_of(config: RunConfig) -> Tape:
    """The steps of a run until the steady state; the forecasts of memory and of time read the same tape."""
    return _tape_of(as_costed(config))


def as_costed(config: RunConfig) -> RunConfig:
    """The configuration without the settings that change no forecast of a step."""
    return replace(config, size="").with_defaults(*WITHOUT_COST)


@lru_cache(maxsize=32)
def _tape_of(config: RunConfig) -> Tape:
    if config.is_shared:
        return _written(config)
    # on one rank a step has the same tensors and operations whatever their sizes
    model = replace(config.model, vocab_size=8, context_length=8, d_model=8, d_ff=8, num_heads=2)
    return _written(replace(config, batch_size=1, model=model)).resized(axes(config))


@lru_cache(maxsize=32)
def _written(config: RunConfig) -> Tape:
    step = StepTape(config)
    step.set_up()
    for _ in range(step.way.steps):
        step.run()
    step.tape.repeat()
    return step.tape


class StepTape:
    """Writes steps of one configuration onto a tape: call `set_up` once, then `run` for each step.

    With `checkpoint_blocks` K > 0 only the input of every K blocks is saved, and backward recomputes the blocks, as
    torch.utils.checkpoint (not reentrant) around every K blocks does.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config, self.checkpoint_blocks = config, config.checkpoint_blocks
        self.tape = Tape(axes(config))
        self.way = WAYS[config.parallel](config, self.tape)
        self.layers = BackwardTape(config, self.tape, self.way)
        self._has_graph = config.mode is not Mode.INFERENCE
        self._has_state = False
        self._last_loss: int | None = None
        self._blocks: dict[int, Saved] = {}
        """Tensors that each block has saved for backward, by the block's index."""
        self._inputs: list[int] = []
        """Inputs of the checkpoints, in the order of forward."""
        self._ends: Saved = {}
        """Tensors that the layers after the blocks have saved: final norm, head and loss."""

    def set_up(self) -> None:
        """Parameters, the tables that all layers share, and the batch."""
        parameters = {
            name: self._new(Category.PARAMETERS, "parameters", shape)
            for name, shape in parameter_shapes(self.config.model).items()
        }
        if self.layers.gpt2:
            self.tape.drop(self._new(Category.PARAMETERS, "head before it is tied", WEIGHTS["lm_head"]))
        else:
            self._new(Category.BUFFERS, "rotations", "T d_head")
        if self.config.model.attention is Attention.NAIVE:
            ones = self._new(Category.BUFFERS, "mask", "T T", 1)
            self._new(Category.BUFFERS, "mask", "T T", 1)  # its lower triangle, which stays
            self.tape.drop(ones)
        for _ in ("tokens", "targets"):
            self._new(Category.BUFFERS, "tokens and targets", "batch T", INT64_BYTES)
        self.way.set_up(parameters)

    def run(self) -> None:
        """One step in the configuration's mode."""
        tape, mode = self.tape, self.config.mode
        tape.begin(Phase.FORWARD)
        self.way.begin_step()
        loss = self._forward()
        self.way.end_forward()
        if mode in (Mode.FORWARD_BACKWARD, Mode.TRAIN):
            tape.begin(Phase.BACKWARD)
            self._backward()
            self.way.end_backward()
            if self.config.is_shared:
                tape.begin(Phase.COMMUNICATION)
                self.way.finish()
        if mode is Mode.TRAIN:
            tape.begin(Phase.OPTIMIZER)
            self._update()
        tape.begin(Phase.STEP)
        self._clear(loss)

    def _clear(self, loss: int) -> None:
        """End the step: its loss replaces the last step's, and everything that the graph still holds is freed."""
        for saved in (*self._blocks.values(), self._ends):  # where backward has not consumed it
            self.layers.release(saved, *list(saved))
        self.tape.drop(*self._inputs)
        self.way.drop_gradients()
        self._blocks, self._inputs = {}, []
        if self._last_loss is not None:
            self.tape.drop(self._last_loss)
        self._last_loss = loss

    def save_one_block(self) -> Saved:
        """The tensors that one block saves for its backward, its input included."""
        saved: Saved = {}
        x = self._new(Category.ACTIVATIONS, "residual stream", STREAM, self.layers.stream_bytes)
        self.layers.block(0, x, saved)
        return saved

    def _new(
        self,
        category: Category,
        label: str,
        shape: str,
        element_bytes: int = FP32_BYTES,
        reads: Sequence[int] | None = None,
        how: Pass = Pass.COPY,
    ) -> int:
        return self.tape.new(category, label, shape, element_bytes, reads=reads, how=how)

    def _forward(self) -> int:
        tape, layers = self.tape, self.layers
        layers.thread = "forward"
        ends = self._ends if self._has_graph else None
        self.way.before_forward(LOOKUP)
        x = self._new(Category.ACTIVATIONS, "residual stream", STREAM, layers.stream_bytes, reads=(LIKE_ITSELF,))
        if layers.gpt2:
            tokens = x
            x = self._new(Category.ACTIVATIONS, "residual stream", STREAM, layers.stream_bytes, reads=(tokens,))
            tape.drop(tokens)
        self.way.after_forward(LOOKUP)
        for index in range(self.config.model.num_layers):
            self.way.before_forward(str(index))
            out = layers.block(index, x, self._saved_of(index, x))
            assert out is not None
            self.way.after_forward(str(index))
            tape.drop(x)
            x = out
        normed = layers.norm("ln_final", x, ends)
        self.way.before_forward(HEAD)
        logits = layers.linear("lm_head", normed, ends, LOGITS, "logits", cast=True, category=Category.LOSS)
        self.way.after_forward(HEAD)
        tape.drop(normed, x)
        loss = self._loss(ends)
        layers.end_autocast()
        tape.drop(logits)
        return loss

    def _saved_of(self, index: int, x: int) -> Saved | None:
        """Where block `index` saves tensors for backward; None without a graph and with checkpoints, which save `x`."""
        if not self._has_graph:
            return None
        if not self.checkpoint_blocks:
            return self._blocks.setdefault(index, {})
        self.tape.views(round(LAUNCHES_TO_PACK * self._saved_of_block))
        if index % self.checkpoint_blocks == 0:
            self.tape.views(LAUNCHES_OF_CHECKPOINT)
            self._inputs.append(self.tape.keep(x))
        return None

    @property
    def _saved_of_block(self) -> int:
        on_gpu = self.config.device is Device.CUDA
        return SAVED_OF_BLOCK[self.config.model.arch] + SAVED_OF_FUSED_ATTENTION * (on_gpu and self.layers.is_fused)

    def _loss(self, ends: Saved | None) -> int:
        """Cross-entropy: the log-softmax has the logits' type; under autocast the log-likelihood needs fp32."""
        tape = self.tape
        log_softmax = self._new(
            Category.LOSS, "log-softmax of logits", LOGITS, self.layers.element_bytes, reads=(LIKE_ITSELF,)
        )
        wide = tape.keep(log_softmax)
        if self.layers.autocast:
            tape.drop(wide)
            wide = self._new(Category.LOSS, "log-softmax in fp32", LOGITS, reads=(log_softmax,), how=Pass.WIDEN)
        loss, weight = (self._new(Category.LOSS, "loss and its weight", SCALAR) for _ in range(2))
        tape.pass_over(loss, weight)  # which picks one element of each row
        if ends is not None:
            ends |= {"log_softmax": tape.keep(log_softmax), "wide": tape.keep(wide), "weight": tape.keep(weight)}
        tape.drop(log_softmax, wide, weight)
        return loss

    def _backward(self) -> None:
        tape, layers = self.tape, self.layers
        layers.thread = "backward"
        seed = self._new(Category.LOSS, "gradient of the loss", SCALAR)
        self.way.begin_backward()
        logits = self._loss_backward()
        self.way.before_backward(HEAD)
        gradient = self._head_backward(logits)
        for index in reversed(range(self.config.model.num_layers)):
            self.way.before_backward(str(index))
            branch = layers.branch_off(gradient)
            if index not in self._blocks:
                self._compute_again(index)
            layers.block_backward(index, gradient, branch, self._blocks.pop(index))
            self.way.after_backward(str(index))
        self._embedding_backward(gradient)
        tape.drop(seed)

    def _loss_backward(self) -> int:
        tape, layers = self.tape, self.layers
        likelihood = self._new(Category.LOSS, "gradient of log-softmax", LOGITS, reads=())
        layers.release(self._ends, "wide", "weight")
        if layers.autocast:
            narrow = self._new(
                Category.LOSS, "gradient of log-softmax, cast", LOGITS, layers.element_bytes, reads=(likelihood,)
            )
            tape.drop(likelihood)
            likelihood = narrow
        made = (likelihood, self._ends["log_softmax"])
        logits = self._new(Category.LOSS, "gradient of logits", LOGITS, layers.element_bytes, reads=made)
        tape.drop(likelihood)
        layers.release(self._ends, "log_softmax")
        return logits

    def _head_backward(self, logits: int) -> int:
        layers = self.layers
        normed = layers.linear_backward("lm_head", logits, self._ends, STREAM)
        return layers.norm_backward("ln_final", normed, self._ends)

    def _compute_again(self, last: int) -> None:
        """Recompute the checkpoint that ends with block `last`, on backward's thread, until everything is saved."""
        tape, layers = self.tape, self.layers
        x = self._inputs.pop()
        tape.views(LAUNCHES_OF_CHECKPOINT_BACKWARD)
        for index in range(last // self.checkpoint_blocks * self.checkpoint_blocks, last + 1):
            tape.views(round(LAUNCHES_TO_UNPACK * self._saved_of_block))
            self.way.before_forward(str(index))
            out = layers.block(index, x, self._blocks.setdefault(index, {}), stop_early=index == last)
            self.way.after_forward(str(index))
            tape.drop(x)
            if out is not None:
                x = out
        layers.end_autocast()

    def _embedding_backward(self, gradient: int) -> None:
        tape, layers = self.tape, self.layers
        is_low = "embedding" in self.way.low
        if not layers.gpt2:
            table = layers.new_gradient("vocabulary d_model", is_low, reads=(gradient,))
            tape.drop(gradient)
            self.way.graded("embedding", table)
            return
        positions = self._new(
            Category.TEMPORARIES, "gradient of positions", "T d_model", layers.stream_bytes, reads=(gradient,)
        )
        of_positions = layers.new_gradient("T d_model", is_low)
        tape.drop(positions)
        self.way.graded("positions", of_positions)
        table = self._new(
            Category.TEMPORARIES,
            "gradient of the embedding",
            "vocabulary d_model",
            layers.stream_bytes,
            reads=(gradient,),
        )
        tape.drop(gradient)
        total, layers.of_head = layers.of_head, None
        assert total is not None
        if not layers.autocast or HEAD in self.way.low:
            # the head's gradient is a view, so the sum is a tensor of its own
            of_head, total = total, layers.new_gradient("vocabulary d_model", is_low, reads=(total, table))
            tape.drop(of_head)
        tape.drop(table)
        self.way.graded("embedding", total)

    def _update(self) -> None:
        """AdamW: one tensor at a time (adamw), all at once with a temporary for each (foreach), or in place (fused)."""
        kind = self.config.optimizer
        shapes: Iterable[str] = self.way.updated.values()
        if self._has_state and kind is OptimizerKind.ADAMW:
            shapes = dict.fromkeys(shapes)  # temporaries of one shape take each other's place
        temporaries = []
        if not self._has_state and kind is not OptimizerKind.ADAMW:
            for shape in shapes:
                self._make_state(shape)
        for shape in shapes:
            if not self._has_state and kind is OptimizerKind.ADAMW:
                self._make_state(shape)
            if kind is not OptimizerKind.FUSED:
                temporaries.append(self._new(Category.OPTIMIZER_WORKSPACE, "roots of second moments", shape))
            if kind is OptimizerKind.ADAMW:
                self.tape.drop(temporaries.pop())
        self.tape.drop(*reversed(temporaries))
        self._launch_update(kind)
        self.way.drop_gradients()
        self._has_state = True

    def _launch_update(self, kind: OptimizerKind) -> None:
        """The kernels of an update; a foreach kernel covers as many elements as PyTorch gives to one launch."""
        shapes = tuple(self.way.updated.values())
        if kind is OptimizerKind.FUSED:
            self.tape.launch(_fused_update, shapes)
        elif kind is OptimizerKind.ADAMW:
            for shape in shapes:
                for tensors in TENSORS_OF_ADAMW:
                    self.tape.pass_of(tensors * FP32_BYTES, shape)
        else:
            for tensors in TENSORS_OF_FOREACH:
                self.tape.launch(_foreach_pass, shapes, tensors)

    def _make_state(self, shape: str) -> None:
        if self.config.optimizer is OptimizerKind.FUSED:
            self._new(Category.OPTIMIZER_STATE, "step counts", SCALAR)
        for moment in ("first", "second"):
            self._new(Category.OPTIMIZER_STATE, f"{moment} moments", shape)


def _fused_update(tape: Tape, shapes: Sequence[str]) -> Operation:
    return Operation(kind=Kind.ADAMW, moved_bytes=ADAMW_BYTES * sum(map(tape.size, shapes)))


def _foreach_pass(tape: Tape, shapes: Sequence[str], tensors: int) -> Operation:
    counts = [tape.size(shape) for shape in shapes]
    launches = -(-sum(-(-count // FOREACH_CHUNK) for count in counts) // FOREACH_BLOCKS)
    return Operation(kind=Kind.PASS, moved_bytes=tensors * FP32_BYTES * sum(counts) // launches, launches=launches)
