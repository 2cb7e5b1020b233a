"""Traces the real step of a configuration; as a process of its own it is asked for tapes by lines
of standard input.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, BinaryIO
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import Parallel, Phase, RunConfig
from ..costs.internals import address_of
from ..costs.shards import owned_elements
from ..costs.tape import Category, Form, Tape, TraceError
from ..costs.trace import Dispatch, StepTrace
from ..costs.traces import FORKING, Asked, encoded, is_compiled
from ..costs.tracing import tracing
from ..model.blocks import copy_of_kinds, keep_kinds
from ..model.trainable import make_model, make_of_user
from ..model.user_code import checked_module, is_our_message, load_factory, told
from ..model_file import is_model_file
from ..posix_needed import IS_POSIX
from ..torch_needed import torch_version
from .clock import StepTimes
from .own_step import as_if_available, note_gradients, note_state, own_steps
from .step import TrainingStep

PARTIAL_ROWS = 264
"""Rows of partial sums over a tensor's rows: two programs for each multiprocessor of a Hopper
GPU (`num_programs`).
"""
MAX_SUMS = 4
"""Most gradients of vectors that one kernel of the fast model computes beside that of its input."""
STEPS = 2
"""Steps until the steady state: the optimizer makes its state in the first."""
STEPS_OF_DDP = 4
"""PyTorch's DDP replaces its buckets in the third step, when the order of the gradients is
known.
"""


def traced(config: RunConfig, axes: Mapping[str, int]) -> Tape:
    """The tape of the steps of one rank until the steady state.

    If the step of a user's own model needs data, the tape has the reason and the parameters; if the
    model cannot be used, the reason alone. That of a step which the user wrote as a function has no
    parameters.
    """
    factory = config.model_factory
    parameters: list[tuple[list[str], list[str]]] = []
    try:
        if factory is not None:
            # outside of the modes below, which slow imports down
            load_factory(factory)
        known = _known_model(config)
        patches = _with_chunks if factory is None else _as_of_whole_sequences
        with tracing(axes, OF_FAST, compiles=is_compiled(config)) as trace:
            made, kinds = _made(config, known, trace)
            if isinstance(made, nn.Module):
                parameters = _parameters(made, trace)
                # of a user's model the first rank, as a way of the user's may share the
                # optimizer's state otherwise; of ours the one that keeps most
                ours = made if factory is None else None
                with one_of_the_ranks(config, ours) as rank, patches(trace):
                    tape = _steps(config, made, trace, rank)
                tape.blocks = kinds
            else:
                with patches(trace):
                    tape = own_steps(made, trace)
            if factory is not None:
                tape.places, tape.owners = trace.places, trace.owners
                tape.again, tape.graphs = trace.again, trace.graphs
            if is_compiled(config):
                tape.compiler = (torch_version() or "").partition("+")[0]
    except TraceError as error:
        tape = Tape(failure=_reason(error))
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        return Tape(failure=_reason(error))
    tape.parameters = parameters
    return tape


Kinds = list[int]
"""The kind of each block that a whole model has."""


def _made(
    config: RunConfig, known: tuple[nn.Module, Kinds] | None, trace: StepTrace
) -> tuple[nn.Module | Callable[[], object], Kinds]:
    """The model with as many blocks as the configuration asks for, the one that is `known` or else
    a new one, or the step that the user wrote as a function; and the kinds of all blocks.
    """
    if known is not None:
        trace.adopt(known[0])
        return known
    if config.model_factory is None:
        model = make_model(config)
        return model, keep_kinds(model, config.blocks) if config.blocks else []
    with as_if_available():
        made = make_of_user(config, config.model_factory)
    if not isinstance(made, nn.Module) and not config.blocks:
        return made, []
    model = checked_module(made).to(config.device.value)
    return model, keep_kinds(model, config.blocks) if config.blocks else []


def _known_model(config: RunConfig) -> tuple[nn.Module, Kinds] | None:
    """A few blocks of a configuration file's model, which is made once for all its tapes, as making
    hundreds of layers takes longer than a step of two blocks. None for others: what a user's
    factory makes may be nothing that can be copied.
    """
    if not config.blocks or not is_model_file(config.model_factory):
        return None
    whole = _model_without_data(config.with_defaults("blocks", "checkpoint_blocks"))
    return copy_of_kinds(whole, config.blocks)


@lru_cache(maxsize=1)
def _model_without_data(config: RunConfig) -> nn.Module:
    """The model, with tensors of meta."""
    with tracing({}):
        return make_model(config)


def _steps(config: RunConfig, model: nn.Module, trace: StepTrace, rank: int) -> Tape:
    """The tape of the steps of this rank, traced one after the other."""
    _refuse_recurrence(model)
    trace.routing.tokens = config.batch_size * config.model.context_length
    step = TrainingStep(config, model, rank=rank)
    step.scaler = None  # it would read a value; its scalars are left out
    order: dict[int, None] = {}  # in which backward makes the parameters' gradients
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, place=place: order.setdefault(place))
        for place, parameter in enumerate(model.parameters())
        if parameter.requires_grad and not config.is_shared
    ]
    _skip_all_reduce_of_ddp(step)
    trace.note_named(Category.PARAMETERS, step.model.named_parameters())
    trace.note_named(Category.BUFFERS, step.model.named_buffers())
    parameter_bytes = _bytes_kept(step.model.parameters())
    for _ in range(STEPS_OF_DDP if config.parallel is Parallel.DDP else STEPS):
        # kept until the next step has its own, as in a measured run
        _, loss = step(_Clock(trace, step))
        # a plan, which asks for a few blocks, needs no nodes; counting them searches all objects
        if config.model_factory is not None and not config.blocks:
            trace.note_graphs()
        for hook in hooks:
            hook.remove()
    tape = trace.tape()
    tape.gradient_order = [*order]
    del loss
    if (traced_bytes := tape.bytes_of(Category.PARAMETERS)) != parameter_bytes:
        raise TraceError(
            f"the trace has {traced_bytes:,} bytes of parameters, and the model "
            f"{parameter_bytes:,}: a fault of this program"
        )
    return tape


def _refuse_recurrence(model: nn.Module) -> None:
    """Raise TraceError for PyTorch's recurrent layers: a trace shows an operation for each token in
    the place of cuDNN's few kernels.
    """
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            raise TraceError(
                f"{path or 'the model'}: cuDNN computes nn.{type(module).__name__} by kernels of "
                "its own, whose time and memory are not known; its parameters and optimizer state "
                "can be counted nevertheless"
            )


def _bytes_kept(parameters: Iterable[Tensor]) -> int:
    """Bytes of the parameters on this rank; tied ones, and parts of one tensor, share their
    memory.
    """
    sizes = {}
    for parameter in parameters:
        storage = getattr(parameter, "_local_tensor", parameter).untyped_storage()
        sizes[address_of(storage)] = storage.nbytes()
    return sum(sizes.values())


def _parameters(model: nn.Module, trace: StepTrace) -> list[tuple[list[str], list[str]]]:
    """The names of each parameter, and the sizes of its axes, in the model's order."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [
        (names[parameter], [trace.names.product(side) for side in parameter.shape])
        for parameter in names
    ]


@contextmanager
def _as_of_whole_sequences(_trace: StepTrace) -> Iterator[None]:
    """Let transformers find that no row of a batch has several sequences, as in eager training.

    It reads the values of positions to find that out (find_packed_sequence_indices in
    masking_utils.py). A trace has no values, and transformers would then make a mask.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None:
        yield
        return
    # a Mock with a return value would keep its arguments, which are tensors of the step
    with mock.patch.object(masks, "find_packed_sequence_indices", lambda *_, **__: None):  # noqa: PT008
        yield


def _expand(trace: StepTrace, call: Dispatch) -> None:
    """Count the first matmul of a fused feed-forward network: x (rows, inner) times the transposed
    weight.
    """
    x, weight = call.ins[:2]
    rows, inner = x.shape
    trace.matmul(Form.FORWARD, (rows, inner, len(weight)), x.element_size())


def _contract_backward(trace: StepTrace, call: Dispatch) -> None:
    """Count the matmul that gives the gradient of the hidden activations, and the sums over rows
    that give the bias's.
    """
    gradient, weight = call.ins[:2]
    rows, inner = gradient.shape
    trace.matmul(Form.INPUT, (rows, inner, weight.shape[1]), gradient.element_size())
    _add_sums(trace, call.outs[1].numel())


def _attend(trace: StepTrace, call: Dispatch) -> None:
    """Count the attention kernel whose first input is q, k and v packed as (batch, seq, 3
    d_model).
    """
    (batch, seq, width), heads = call.ins[0].shape, call.args[1]
    trace.attention(
        Form.ATTENTION, batch * heads, (seq, width // 3 // heads, seq), call.ins[0].element_size()
    )


def _attend_backward(trace: StepTrace, call: Dispatch) -> None:
    """Note attention's backward, then the pass that turns q and k back, or else the two passes that
    add up the gradient of a bias.
    """
    gradient, packed, *_ = call.ins
    (batch, seq, width), rotations, heads = packed.shape, call.args[4], call.args[5]
    trace.attention(
        Form.ATTENTION_BACKWARD,
        batch * heads,
        (seq, width // 3 // heads, seq),
        packed.element_size(),
    )
    trace.moves([gradient] * (2 if rotations is None else 4))
    _add_sums(trace, call.outs[1].numel())


def _with_sums(trace: StepTrace, call: Dispatch) -> None:
    """Note a pass over all tensors, and the kernel that adds up partial sums over rows for the
    gradients of vectors.
    """
    trace.moves([*call.ins, *call.outs])
    most = MAX_SUMS * call.ins[0].shape[-1]
    _add_sums(trace, sum(size for size in map(Tensor.numel, call.outs) if 1 < size <= most))


def _add_sums(trace: StepTrace, count: int) -> None:
    """Note that a kernel reads partial sums of `count` columns, if there are any."""
    if count:
        trace.moves([torch.empty(PARTIAL_ROWS, count, device="meta")])


def _lookup_backward(trace: StepTrace, call: Dispatch) -> None:
    """Note that the weight's gradient is filled with zeros, and that each token's is read and added
    to a row of it, which reads and writes the row.
    """
    gradient = max(call.ins, key=lambda tensor: tensor.nbytes)
    rows = torch.empty(gradient.shape, dtype=call.outs[0].dtype, device="meta")
    trace.moves(call.outs)
    trace.moves([gradient, rows, rows])


def _losses(trace: StepTrace, call: Dispatch) -> None:
    """Record the bytes that the cross-entropy kernel moves: logits move twice if they are
    overwritten by their gradients.
    """
    trace.moves([*call.ins, *(call.ins[:1] if call.args["WRITE_GRADIENTS"] else ())])


OF_FAST = {
    "expand": _expand,
    "contract_backward": _contract_backward,
    "attend": _attend,
    "attend_backward": _attend_backward,
    "add_norm_backward": _with_sums,
    "bias_gelu_backward": _with_sums,
    "lookup_backward": _lookup_backward,
    "lookup": lambda trace, call: trace.moves([*call.outs, *call.outs]),
    "_cross_entropy_losses": _losses,
    # leaves logits alone if it is 1
    "_cross_entropy_scale": lambda trace, call: trace.moves(call.ins[1:]),
}
"""Operators and Triton kernels of the fast model that do otherwise than read and write each of
their tensors once.
"""


class _Clock:
    """A clock that takes no times: it tells the trace which phase begins, and which tensors are
    gradients or the optimizer's state.
    """

    def __init__(self, trace: StepTrace, step: TrainingStep) -> None:
        """Stand in for a step's clock: the ends of phases tell `trace` to which phase operations
        belong.
        """
        self._trace, self._step = trace, step
        self._next = iter([*step.config.launched_phases, Phase.STEP])

    def start(self) -> None:
        """Begin the first phase in the trace."""
        self._trace.begin(next(self._next))

    def lap(self, phase: Phase, end: object = None) -> None:  # noqa: ARG002 (of the protocol)
        """End a phase: note which tensors are gradients and optimizer state by now, and begin the
        next phase in the trace.
        """
        trace = self._trace
        note_gradients(trace, self._step.model)
        if phase is Phase.OPTIMIZER:
            note_state(trace, self._step.optimizer_state(), [self._step.model])
        trace.begin(next(self._next))

    def stop(self) -> StepTimes:
        """Times of 0, since a traced step computes nothing."""
        return StepTimes(step_s=0.0, host_s=0.0, phases_s={})


@contextmanager
def one_of_the_ranks(config: RunConfig, model: nn.Module | None = None) -> Iterator[int]:
    """Context in which this process acts as one of the run's ranks, without the others; it yields
    the number of that rank.

    With a sharded optimizer and a `model`, that is the rank with the largest share of the
    optimizer's state, else rank 0.
    """
    rank = 0
    if config.shard_optimizer and model is not None:
        counts = [parameter.numel() for parameter in model.parameters()]
        owned = owned_elements(counts, config.ranks)
        rank = owned.index(max(owned))
    if not config.is_shared:
        yield rank
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.ranks)
    try:
        with ExitStack() as patches:
            for where, name, what in _as_one_of(config.ranks):
                patches.enter_context(mock.patch.object(where, name, what))
            yield rank
    finally:
        dist.destroy_process_group()


def _as_one_of(ranks: int) -> list[tuple[object, str, object]]:
    """Places, names and stand-ins of the functions that would need the other ranks."""
    from ..parallel import collectives, data_parallel, exchange

    gather, scatter = exchange.start_gather, exchange.CollectiveExchange.scatter

    def of_all_ranks(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
        """The tensors of all ranks, for which this rank's stand in."""
        return [[*tensors] for _ in range(ranks)]

    def start_gather(*tensors: Any) -> list[_KeepsTensors]:  # noqa: ANN401
        """Start the collectives, and keep their tensors alive until they are waited for, as NCCL
        does.
        """
        return [_KeepsTensors(work, *tensors) for work in gather(*tensors)]

    def start_scatter(*tensors: Any) -> _KeepsTensors:  # noqa: ANN401
        """Scatter; what is returned keeps the tensors until it is waited for, as NCCL does."""
        return _KeepsTensors(scatter(*tensors), *tensors)

    return [
        (dist, "get_backend", lambda *_: "nccl"),
        (dist, "broadcast_object_list", lambda *_, **__: None),
        (collectives, "check_same_gradients", lambda *_: None),
        (data_parallel, "of_all_ranks", of_all_ranks),
        (exchange, "of_all_ranks", of_all_ranks),
        (exchange, "start_gather", start_gather),
        (exchange.CollectiveExchange, "scatter", start_scatter),
        (torch.nn.parallel.distributed, "_verify_param_shape_across_processes", lambda *_: None),
    ]


class _KeepsTensors:
    """A collective that keeps its tensors until it is waited for, as NCCL's do."""

    def __init__(self, work: Any, *tensors: object) -> None:  # noqa: ANN401
        """`work` is a running collective, and `tensors` are what it reads and writes."""
        self._work, self._tensors = work, tensors

    def wait(self) -> None:
        """Wait for the collective, and release its tensors."""
        self._work.wait()
        self._tensors = ()


def _skip_all_reduce_of_ddp(step: TrainingStep) -> None:
    """Let PyTorch's DDP, if the step has it, take each bucket of gradients as averaged without a
    collective, because a trace runs in one process.
    """
    ddp = getattr(step.way, "module", None)
    sent_last: list[Tensor] = []
    """The bucket that was sent last: NCCL keeps its memory until the next one is sent."""

    # register_comm_hook wants these very annotations
    def take_as_averaged(
        _: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        """Communication hook that returns the bucket's gradients unchanged, and at once."""
        sent_last[:] = [bucket.buffer()]
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    if isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
        ddp.register_comm_hook(None, take_as_averaged)


class _ListedAdamW:
    """Stands in for ChunkedAdamW: tells the trace what an update reads and writes."""

    def __init__(
        self,
        trace: StepTrace,
        masters: Sequence[Tensor],
        firsts: Sequence[Tensor],
        seconds: Sequence[Tensor],
        copies: Sequence[Tensor],
        *_: object,
    ) -> None:
        """List the tensors that the optimizer's kernel reads and then writes; it computes nothing
        here.
        """
        self._trace = trace
        read, written = [*masters, *firsts, *seconds], [*masters, *firsts, *seconds, *copies]
        # a split master is read with its copy, of which it is the remainder (weights.py)
        if masters[0].dtype is torch.int16:
            read = written
        self._moved = [*read, *written]

    def __call__(self, gradients: Sequence[Sequence[Tensor]], *_: object, **__: object) -> None:
        """Record that an update reads and writes all these tensors, and reads the gradients."""
        self._trace.moves([*self._moved, *itertools.chain.from_iterable(gradients)])

    def upload(self) -> None: ...


@contextmanager
def _with_chunks(trace: StepTrace) -> Iterator[None]:
    """Let the fast model run without its packages, and its AdamW tell the trace which tensors an
    update moves: its kernel finds tensors by addresses, so the trace does not see them. The
    compiler makes one kernel of a maximum and of the arithmetic around it, as for fp8's scales.
    """
    try:
        from ..model.fast import adamw_kernel, fp8, model
    except ImportError:  # without Triton
        yield
        return

    def largest_of_rows(x: Tensor) -> Tensor:
        """The largest magnitudes of rows, by one kernel that reads them."""
        rows = x.new_empty(len(x))
        trace.moves([x, rows])
        return rows

    def scale_of(largest: Tensor) -> Tensor:
        """The scale that these magnitudes give, by one kernel."""
        scale = largest.new_empty((), dtype=torch.float32)
        trace.moves([largest, scale])
        return scale

    with (
        mock.patch.object(adamw_kernel, "ChunkedAdamW", partial(_ListedAdamW, trace)),
        mock.patch.object(fp8, "_largest_of_rows", largest_of_rows),
        mock.patch.object(fp8, "scale_of", scale_of),
        mock.patch.object(model, "check_device", return_value=None),
    ):
        yield


def trace_all(asked: Asked) -> dict[str, bytes]:
    """The tapes that are asked for, by name, as they are kept."""
    return {name: encoded(traced(config, axes)) for name, (config, axes) in asked.items()}


def _reason(error: BaseException) -> str:
    """Why a step could not be traced, in one line: this program's own message, or the error in the
    user's code and where it came from.
    """
    if isinstance(error, SystemExit):
        return f"its code ends the process (sys.exit({error.code!r}))"
    if is_our_message(error):
        return str(error).splitlines()[0]
    return told(error)


def _answer(answers: BinaryIO, asked: Asked, *, forks: bool) -> None:
    """Write a line with the tapes that are asked for. If this process forks, a copy of it traces
    them, which loads the user's modules anew.
    """
    copy = os.fork() if forks else 0
    if copy == 0:
        _write(answers, trace_all(asked))
        if forks:
            os._exit(0)
        return
    _, status = os.waitpid(copy, 0)
    if status:
        code = os.waitstatus_to_exitcode(status)
        failure = encoded(Tape(failure=f"the process that traced it ended with status {code}"))
        _write(answers, dict.fromkeys(asked, failure))


def _write(answers: BinaryIO, tapes: Mapping[str, bytes]) -> None:
    """Write the tapes as a line of JSON."""
    answers.write(msgspec.json.encode(tapes) + b"\n")
    answers.flush()


if __name__ == "__main__":
    # copies, which no process that the user's code starts inherits
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # where the user's code prints
    is_forking = IS_POSIX and FORKING in sys.argv[1:]
    if is_forking:
        import_module("torch._dynamo")  # by which most meta kernels go; once for all copies
    with suppress(BrokenPipeError):  # the process that asks has ended
        for line in questions:
            _answer(answers, msgspec.json.decode(line, type=Asked), forks=is_forking)
