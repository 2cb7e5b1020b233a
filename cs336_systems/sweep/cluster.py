"""A sweep on a Ray cluster: every run is a task of Ray, and this process alone writes records.

Ray places the tasks, starts a task whose machine dies on another one, and brings back what a task
returns: plain bytes, which are a `Reply` in MessagePack. A task measures as a local sweep does, in
a fresh process that a fork server starts; that process does not load Ray.
"""

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar
from uuid import uuid4

# Ray reads them when it is imported; without the second, a run for which memory is too small would
# have endless tries
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_task_oom_retries": "0"}

import msgspec
import psutil
import ray.experimental.internal_kv
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..analysis.kernels import has_nsys
from ..config import Device, Profiler, RunConfig
from ..files import error_in_words, write_atomically
from ..measure.environment import identity
from ..measure.nvml import alike, visible_gpus
from ..record import Failure, Identity, RunRecord, Status
from ..temporary import temporary_directory
from ..text import counted
from ..torch_needed import require_torch
from . import store
from .isolation import Interrupts, fork_server, preload_to_explain, spare_children
from .keep import Keeper, Listener, resume
from .process import adopt_orphans, when_it_ends
from .run import Loop, Outcome, measure_one, num_slots, outcome

T = TypeVar("T")
MAX_TRIES = 3
"""How often Ray starts a run whose machine or process dies each time."""
_TICK_S = 1.0
_HEAD_S = 10.0
"""How long a process of Ray may take to accept a connection, and to answer it."""
_ANSWER_S = 15.0
"""How long all machines together may take to describe themselves; of one that is silent for longer,
the runs themselves find out whether it has what the sweep needs.
"""
_RAY_S = 20.0
"""How long a call of Ray may take in which Ray waits for nothing but its own processes."""
_SPARE_S = 60.0
"""How much longer than its time limit a run may take, with all that Ray does for it."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of gRPC sends first; a server, such as Ray, sends such settings too (RFC 9113,
3.4).
"""


class Node(msgspec.Struct, frozen=True):
    """A machine's description of itself."""

    identity: Identity
    has_nsys: bool
    """Whether Nsight Systems is installed."""


class Needs(msgspec.Struct, frozen=True):
    """What a sweep requires of its machines."""

    identity: Identity | None = None
    """Conditions in which all machines must be alike; None if they may differ, or before the
    first machine is known.
    """
    require_device: str | None = None
    """Part of the name of the device that machines must have, without regard to case."""
    nsys: bool = False
    """Whether a run is to be profiled by Nsight Systems."""

    def why_left_out(self, node: Node) -> str | None:
        """Why the sweep does not use the machine; None if it does."""
        if (self.require_device or "").casefold() not in node.identity.device_name.casefold():
            return f"it has {node.identity.device_name}, needed {self.require_device}"
        if self.nsys and not node.has_nsys:
            return "it has no nsys on the PATH, which --nsys needs"
        if self.identity is None:
            return None
        different = [
            f"{name} is {present}, needed {needed}"
            for name, present, needed in store.differences(node.identity, self.identity)
        ]
        return f"{'; '.join(different)}; --allow-mixed uses it too" if different else None


class Request(msgspec.Struct, frozen=True):
    """A run to measure."""

    config: RunConfig
    timeout_s: float
    needs: Needs
    key: str
    """Where the task notes in Ray's store on which machine it runs, after those where it was
    started before.
    """


class Reply(msgspec.Struct, frozen=True):
    """What a task returns."""

    refused: str | None = None
    """Why the machine has not measured the run; None if it has."""
    files: dict[str, bytes] = {}
    """Contents of the files that the run has left, by their names."""


def describe(device: str) -> bytes:
    """The task that describes its machine for runs on the device: a `Node` in JSON; `null`
    without such a device.
    """
    if device == Device.CUDA and os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        # so some Rays hide GPUs from a task that asks for none
        del os.environ["CUDA_VISIBLE_DEVICES"]
    gpu = next(iter(visible_gpus()), None) if device == Device.CUDA else None
    if device == Device.CUDA and gpu is None:
        return b"null"
    require_torch("measuring")
    return msgspec.json.encode(Node(identity(Device(device), gpu), has_nsys()))


def measure(request: bytes) -> bytes:
    """The task of a `Request`: measure the run on this machine, on the GPUs that Ray has chosen."""
    asked = msgspec.json.decode(request, type=Request)
    config, needs = asked.config, asked.needs
    place = ray.get_runtime_context().get_node_id()
    kv = ray.experimental.internal_kv
    kv._internal_kv_put(
        asked.key, (kv._internal_kv_get(asked.key) or b"") + place.encode() + b" ", overwrite=True
    )
    _prepare()
    try:
        # Ray has set it; a local run has PyTorch's own number
        if "OMP_NUM_THREADS" not in psutil.Process().environ():
            os.environ.pop("OMP_NUM_THREADS", None)
        gpus = alike(visible_gpus()) if config.device is Device.CUDA else ()
        if len(gpus) < (width := num_slots(config)) and config.device is Device.CUDA:
            raise store.SweepError(
                f"it has {len(gpus)} GPUs of one kind that Ray gives to the run, needed {width}"
            )
        node = Node(identity(config.device, next(iter(gpus), None)), not needs.nsys or has_nsys())
        if (why := needs.why_left_out(node)) is not None:
            raise store.SweepError(why)
        with temporary_directory() as scratch, store.exclusive_gpus(gpus):
            runs = scratch / "runs"
            runs.mkdir()
            measure_one(
                config, runs, timeout_s=asked.timeout_s, gpus=gpus or (None,), explains=False
            )
            files = {
                path.name: path.read_bytes() for path in _paths(config, runs) if path.is_file()
            }
            return msgspec.msgpack.encode(Reply(files=files))
    except KeyboardInterrupt:
        os._exit(1)  # Ray ends this process, and starts the run elsewhere
    except Exception as error:  # the driver would unpickle an exception
        why = str(error) or type(error).__name__
        if isinstance(error, OSError):
            why = error_in_words(error)
        return msgspec.msgpack.encode(Reply(refused=why))


@cache
def _prepare() -> None:
    """Let this process of Ray end with the one that has started it, and what it starts not import
    Ray's program.

    Without the former, Ray lets a task go on for ever where it dies. The first call of
    `fork_server` must come before this process adopts orphans, as the shell that removes temporary
    files is to be one.
    """
    fork_server()
    when_it_ends(os.getppid(), partial(os._exit, 1))
    with contextlib.suppress(AttributeError):
        del sys.modules["__main__"].__file__


def _paths(config: RunConfig, runs: Path) -> list[Path]:
    """Paths of all files that the run may leave. The record is the last: it implies that the
    others are there.
    """
    return [*store.raw_profile_paths(config, runs), runs / f"{config.key}.json"]


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """While open, this process is connected, as a driver, to the Ray cluster at `address`; "auto"
    is the cluster that this machine belongs to.

    Raises SweepError if no cluster is there, and for errors of Ray while the connection is open.
    What Ray prints to standard output is dropped, because standard output is for results.
    """
    hint = ""
    try:
        address = _checked(address)
        with (
            Path(os.devnull).open("w", encoding="utf-8") as nowhere,
            contextlib.redirect_stdout(nowhere),
            temporary_directory() as directory,
        ):
            # Ray names what it sends by its folder, which a checkout names differently.
            folder = directory / "cs336"
            folder.symlink_to(Path(__file__).parents[1])
            hint = " (if it asks for a token: RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN)"
            package = {"py_modules": [str(folder)]}
            # Ray warns that it sets no handler of signals, as it is not called in the main thread
            logging.getLogger("ray").setLevel(logging.ERROR)
            _promptly(
                partial(
                    ray.init,
                    address,
                    configure_logging=False,
                    log_to_driver=False,
                    runtime_env=package,
                )
            )
            hint = ""
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # after an error, ray.shutdown often hangs too
                    _promptly(ray.shutdown, _HEAD_S if sys.exc_info()[0] is None else _TICK_S)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        if isinstance(error, store.SweepError):
            raise
        raise store.SweepError(
            f"no connection to the Ray cluster {address}: {_in_a_line(error)}{hint}; finished "
            "runs are kept, and the same command goes on"
        ) from error


def _promptly(call: Callable[[], T], patience_s: float = _RAY_S) -> T:
    """What the call to Ray returns; raise OSError if it takes longer, as one of Ray's processes
    hangs.
    """
    future: Future[T] = Future()

    def answer() -> None:
        """Make the call, and hand its result or its exception to the future."""
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=answer, daemon=True).start()
    if not wait([future], patience_s).done:
        # Ray's own end would wait too, and Python's crash, as threads of Ray still wait
        atexit.register(os._exit, 1)
        atexit.register(print, end="", flush=True)
        raise OSError(f"Ray did not answer here within {patience_s:g} s")
    return future.result()


def _checked(address: str) -> str:
    """The address as HOST:PORT; raise OSError if nothing listens there, or not Ray, for which
    Ray would wait long.
    """
    # the cluster that this machine belongs to; it may have died, as Ray keeps its last address
    if address == "auto":
        try:
            address = str(canonicalize_bootstrap_address_or_die("auto"))
        except ConnectionError:
            raise OSError(
                "this machine belongs to none; `ray start` makes it part of one"
            ) from None
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), _HEAD_S)
    except OSError as error:
        raise OSError(f"nothing listens at {address} ({error.strerror or error})") from error
    is_grpc = False
    with connection, contextlib.suppress(OSError):
        connection.sendall(_HELLO)
        is_grpc = connection.recv(9)[3:4] == b"\4"
    if not is_grpc and not os.environ.get("RAY_USE_TLS"):
        raise OSError(f"what listens at {address} does not answer as Ray does")
    return address


def _in_a_line(error: BaseException) -> str:
    """The first line of the error's message, or the name of its type if it has no message."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine of the cluster as a sweep that begins now sees it."""

    id: str
    host: str
    address: str
    count: float
    """Number of its GPUs as Ray counts them, or of its cores if CPUs are measured."""
    node: Node | None
    refused: str | None
    """Why the sweep does not use it; None if it does."""

    def runs_at_once(self, device: Device) -> int:
        """How many ranks the machine runs at a time: one on each GPU, or one on its CPU."""
        if self.refused is not None:
            return 0
        return int(self.count) if device is Device.CUDA else 1


def look(device: Device, needs: Needs, *, allow_mixed: bool) -> tuple[list[Machine], Needs]:
    """All machines of the cluster, and what a sweep requires of those that join later.

    If `needs` names no identity, the machines that have most slots choose it, unless all may be
    mixed.
    """
    alive = _alive()
    # its process goes on to measure, not on a GPU
    task = ray.remote(max_calls=int(device is Device.CUDA))(describe)
    answers = {
        name: task.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False),
        ).remote(device.value)
        for name in alive
    }
    _ready([*answers.values()], _ANSWER_S)

    def machines(needs: Needs) -> list[Machine]:
        """All machines of the cluster with what they answered, each refused if it does not meet
        `needs`.
        """
        return [
            _machine(name, alive[name], answer, device, needs) for name, answer in answers.items()
        ]

    slots: Counter[Identity] = Counter()
    for machine in machines(needs):
        if machine.node is not None and machine.refused is None:
            slots[machine.node.identity] += machine.runs_at_once(device)
    if needs.identity is None and not allow_mixed and slots:
        needs = msgspec.structs.replace(needs, identity=slots.most_common(1)[0][0])
    return sorted(machines(needs), key=attrgetter("host", "address", "id")), needs


def _ready(references: list[Any], patience_s: float, least: int | None = None) -> list[Any]:
    """What tasks have returned and Ray has brought here, after this time or once so many are
    here, which may be all.
    """
    if not references:
        time.sleep(patience_s)
        return []
    waiting = partial(
        ray.wait, references, num_returns=least or len(references), timeout=patience_s
    )
    return [*_promptly(waiting, patience_s + _RAY_S)[0]]


def _alive() -> dict[str, dict[str, Any]]:
    """The machines of the cluster, by id; raise OSError if its head or Ray on this machine has
    died or hangs.
    """

    def find() -> dict[str, dict[str, Any]]:
        """Ray's nodes that are alive, by their id; raise OSError if this machine's node is not
        among them.
        """
        context = ray.get_runtime_context()
        _checked(context.gcs_address)
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        if (here := alive.get(context.get_node_id())) is None:
            raise OSError(
                "Ray has died on this machine, and takes along what was started from here"
            )
        _checked(f"{here['NodeManagerAddress']}:{here['NodeManagerPort']}")
        return alive

    return _promptly(find)


def _machine(
    name: str,
    listed: dict[str, Any],
    answer: Any,  # noqa: ANN401
    device: Device,
    needs: Needs,
) -> Machine:
    """The machine as Ray has `listed` it, with its answer to `describe`, and whether the sweep
    uses it.
    """
    node, refused, count = None, None, _count(listed, device)
    try:
        node = msgspec.json.decode(ray.get(answer, timeout=0), type=Node | None)
        refused = "it has no NVIDIA GPU" if node is None else needs.why_left_out(node)
    except ray.exceptions.GetTimeoutError:
        pass  # its runs find out
    except (RayError, msgspec.DecodeError, TypeError, RecursionError) as error:
        refused = _in_a_line(error)
    if not count:
        refused = f"Ray counts none of its {'GPUs' if device is Device.CUDA else 'cores'}"
    return Machine(
        id=name,
        host=str(listed["NodeManagerHostname"]),
        address=str(listed["NodeManagerAddress"]),
        count=count,
        node=node,
        refused=refused,
    )


def _count(listed: dict[str, Any], device: Device) -> float:
    """How many of its GPUs, or of its cores if CPUs are measured, Ray counts."""
    return float(listed["Resources"].get("GPU" if device is Device.CUDA else "CPU", 0))


def sweep_on_cluster(
    configs: Sequence[RunConfig],
    directory: Path,
    listener: Listener,
    *,
    address: str,
    timeout_s: float,
    fresh: bool,
    allow_mixed: bool,
    require_device: str | None,
    wait_nodes_s: float,
) -> Outcome:
    """Measure those of `configs` that have no result in `directory` yet, on the machines of the
    cluster at `address`.

    The caller holds the directory's lock. Raises SweepError and LockedError as `run_sweep` does,
    and SweepError if there is no machine for `wait_nodes_s`.
    """
    runs = store.make_writable(directory / "runs")
    with contextlib.ExitStack() as stack:
        keeper, todo, unexplained, present = resume(
            configs, runs, listener, fresh=fresh, allow_mixed=allow_mixed
        )
        adopt_orphans()
        preload_to_explain()
        interrupts = stack.enter_context(Interrupts())
        explainer = Loop(keeper, (None,), timeout_s, interrupts, deque(unexplained))
        stack.callback(explainer.end)
        if todo:
            with connected(address):
                spare_children()
                interrupts.at_once = False
                nsys = any(config.profiler is Profiler.NSYS for config in todo)
                needs = Needs(identity=present, require_device=require_device, nsys=nsys)
                _Driver(keeper, explainer, todo, wait_nodes_s, needs, allow_mixed).run()
        explainer.run(())  # what is left; the machines are free for others
        return outcome(keeper, interrupted=interrupts.count > 0)


@dataclass(slots=True)
class _Driver:
    """Has the runs measured until nothing is left to do, or a signal interrupts the sweep."""

    keeper: Keeper
    explainer: Loop
    """Explains profiles on this machine; if CPUs are measured, after all runs."""
    todo: Sequence[RunConfig]
    wait_nodes_s: float
    needs: Needs
    allow_mixed: bool
    _waiting: deque[RunConfig] = field(default_factory=deque)
    """The widest first, because the GPUs that they need would otherwise never be free at the
    same time.
    """
    _running: dict[Any, tuple[RunConfig, float, str]] = field(default_factory=dict)
    """Runs that Ray has, by what it will return, each with the time at which Ray got it, and the
    key of its place.
    """
    _deaths: Counter[RunConfig] = field(default_factory=Counter)
    """How often a run had died before a machine refused it, after which Ray counts its starts
    anew.
    """
    _keys: str = field(default_factory=lambda: f"cs336-{uuid4()}-")
    """How the keys of this sweep begin."""
    _left_out: set[str] = field(default_factory=set)
    """Ids of the machines that the sweep does not use, or that are lost."""
    _there: dict[str, str] = field(default_factory=dict)
    """Hosts of the machines that the sweep uses, by id."""
    _lost_s: dict[str, float] = field(default_factory=dict)
    """When machines were lost whose runs Ray may not have started elsewhere yet, by id."""
    _worked_s: float = field(default_factory=monotonic)
    """When a machine was last there that had slots for a run."""
    _cores: float = 0.0
    """How many cores a run on a CPU takes: all of its machine."""

    def run(self) -> None:
        """Measure all runs on the machines of the cluster; raise SweepError if no machine could be
        used for too long.
        """
        self._waiting.extend(sorted(self.todo, key=num_slots, reverse=True))
        used: list[Machine] = []
        while not used and not self.explainer.interrupts.count:
            machines, self.needs = look(self._device, self.needs, allow_mixed=self.allow_mixed)
            used = [machine for machine in machines if self._is_used(machine)]
            widths = [machine.runs_at_once(self._device) for machine in used]
            self._check_patience(max(widths, default=0))
            if not used:
                time.sleep(_TICK_S)
        for cores, _ in Counter(machine.count for machine in used).most_common(1):
            self._cores = cores
        measure_task = ray.remote(max_calls=0)(measure)
        while (self._waiting or self._running) and not self.explainer.interrupts.count:
            slots = self._slots(_alive())
            self._submit(measure_task, slots)
            for reference in _ready([*self._running], _TICK_S, least=1):
                self._take(reference, *self._running.pop(reference))
            self._ask_again()
            if self.explainer.is_busy and self._device is Device.CUDA:
                self.explainer.step(0.0)
            self._check_patience(max(slots.values(), default=0))
            self.keeper.listener.tick()
        delete = ray.experimental.internal_kv._internal_kv_del
        _promptly(partial(delete, self._keys, del_by_prefix=True))

    @property
    def _device(self) -> Device:
        """The device of all runs."""
        return self.todo[0].device

    def _is_used(self, machine: Machine) -> bool:
        """Whether the sweep uses the machine; a machine that does not meet its needs is left out
        from now on.
        """
        if machine.refused is None:
            # where an earlier look found that it could not be used
            self._left_out.discard(machine.id)
        else:
            self._leave_out(machine.id, machine.host, machine.refused)
        return machine.refused is None

    def _leave_out(self, name: str, host: str, why: str) -> None:
        """Have Ray place no run on the machine with this id, and tell the listener why, once."""
        if name not in self._left_out:
            self._left_out.add(name)
            self._there.pop(name, None)
            self.keeper.listener.noted(f"{host} is not used: {why}")

    def _places(self, key: str) -> list[str]:
        """Ids of the machines where the run with this key has begun, the last being where it is;
        none if it waits.
        """
        noted = _promptly(partial(ray.experimental.internal_kv._internal_kv_get, key)) or b""
        return noted.decode().split()

    def _ask_again(self) -> None:
        """Give Ray again what does not end, although its machine was lost a while ago, or it must
        have ended long ago.

        Ray does not notice the former while connections to the machine stay open, nor that a
        process is stopped. Runs that have noted no machine, as they wait or have only just begun,
        lose nothing.
        """
        now_s = monotonic()
        gone = {name for name, lost_s in self._lost_s.items() if now_s - lost_s >= _RAY_S}
        for reference, (config, started_s, key) in [*self._running.items()]:
            is_late = now_s - started_s >= MAX_TRIES * (self.explainer.timeout_s + _SPARE_S)
            place = "".join(self._places(key)[-1:]) if gone or is_late else ""
            if is_late or (gone and place in {"", *gone}):
                del self._running[reference]
                ray.cancel(reference, force=True)
                self._waiting.append(config)
                if place in self._there:
                    self._leave_out(place, self._there[place], "a run there does not end")
        for name in gone:
            del self._lost_s[name]

    def _slots(self, alive: dict[str, dict[str, Any]]) -> dict[str, int]:
        """How many ranks each machine in use can run at once; notes the machines that join and
        that are lost.
        """
        slots, on_gpu = {}, self._device is Device.CUDA
        for name, listed in alive.items():
            host, count = str(listed["NodeManagerHostname"]), _count(listed, self._device)
            if not on_gpu and count not in (0, self._cores):
                why = f"Ray counts {count:g} of its cores, needed {self._cores:g} as of the others"
                self._leave_out(name, host, why)
            if count and name not in self._left_out:
                slots[name] = int(count) if on_gpu else 1
                if name not in self._there:
                    self._there[name] = host
                    self.keeper.listener.noted(
                        f"{host} joins: {counted(slots[name], 'run')} at a time"
                    )
        for name in self._there.keys() - alive.keys():
            self._lost_s[name] = monotonic()
            # else a run may wait for what Ray has asked of it, while its connections are open
            self._left_out.add(name)
            self.keeper.listener.noted(
                f"{self._there.pop(name)} is lost; Ray starts what ran there elsewhere"
            )
        return slots

    def _submit(self, task: Any, slots: dict[str, int]) -> None:  # noqa: ANN401
        """Give Ray as many runs as the machines have slots for, so that runs which Ray has are
        in progress.
        """
        free = sum(slots.values()) - sum(num_slots(config) for config, *_ in self._running.values())
        most = max(slots.values(), default=0)
        selector = None
        if self._left_out:
            selector = {"ray.io/node-id": f"!in({','.join(self._left_out)})"}
        for config in [config for config in self._waiting if num_slots(config) <= most]:
            if (width := num_slots(config)) > free:
                # a narrower run may fit, and the machine for this one may be held by another job
                continue
            free -= width
            self._waiting.remove(config)
            on_cpu = self._device is Device.CPU
            needed = {"num_cpus": self._cores} if on_cpu else {"num_cpus": 0, "num_gpus": width}
            key = f"{self._keys}{uuid4()}"
            request = Request(config, self.explainer.timeout_s, self.needs, key)
            retries = MAX_TRIES - 1 - self._deaths[config]
            options = {**needed, "max_retries": retries, "label_selector": selector}
            reference = task.options(**options).remote(msgspec.json.encode(request))
            self._running[reference] = config, monotonic(), key
            self.keeper.listener.started(config, None)

    def _take(self, reference: object, config: RunConfig, started_s: float, key: str) -> None:
        """Keep the record and the profile of a run that has ended, or give the run to another
        machine.
        """
        elapsed_s = monotonic() - started_s
        try:
            reply = _decoded(_promptly(partial(ray.get, reference)), config)
            why = reply.refused
        except (ray.exceptions.LocalRayletDiedError, ray.exceptions.RaySystemError):
            raise
        except RayError as error:
            tries = f"given up by Ray, which starts a run {MAX_TRIES} times at most"
            failure = Failure(message=f"{tries}: {_in_a_line(error)}")
            self.keeper.finish(self.keeper.fail(config, Status.KILLED, failure, elapsed_s))
            return
        except (ValueError, TypeError, RecursionError) as error:
            why = f"no reply of a run: {error}"
        if why is None:
            record = self._kept(config, reply.files, elapsed_s)
            self.keeper.finish(record)
            self.explainer.explain_later(record)
        elif places := self._places(key):
            *died, place = places
            self._deaths[config] += len(died)
            self._leave_out(place, self._there.get(place, place), why)
            self._waiting.appendleft(config)
        else:
            self.keeper.finish(self.keeper.refuse(config, why, elapsed_s))

    def _kept(self, config: RunConfig, files: dict[str, bytes], elapsed_s: float) -> RunRecord:
        """Write the files that a run has left on its machine into this directory, and return its
        record once checked.
        """
        try:
            (self.keeper.runs / f"{config.key}.json").unlink(missing_ok=True)
            store.fresh_profile_path(config, self.keeper.runs)
            for path in _paths(config, self.keeper.runs):
                if path.name in files:
                    write_atomically(path, files[path.name])
        except OSError as error:
            raise store.SweepError(error_in_words(error)) from error
        return self.keeper.read(config, elapsed_s)

    def _check_patience(self, most: int) -> None:
        """Raise SweepError if for too long no machine has had slots for any run; `most` is how
        many one has now.
        """
        left = [*self._waiting, *(config for config, *_ in self._running.values())]
        needed = min(map(num_slots, left), default=0)
        if needed <= most:
            self._worked_s = monotonic()
        elif monotonic() - self._worked_s >= self.wait_nodes_s:
            raise store.SweepError(
                f"no machine for the {counted(len(left), 'run')} left within "
                f"{self.wait_nodes_s:g} s: needed {needed} slot(s) on one, found {most}; finished "
                "runs are kept, and the same command goes on"
            )


def _decoded(data: bytes, config: RunConfig) -> Reply:
    """The reply of a task, decoded from msgpack. Raises ValueError or TypeError for data that
    cannot be a reply about this run.
    """
    reply = msgspec.msgpack.decode(data, type=Reply)
    names = [path.name for path in _paths(config, Path("runs"))]
    for name in reply.files:
        if name not in names:
            raise ValueError(f"needed files among {', '.join(names)}, got {name[:80]!r}")
    if reply.refused is None and names[-1] not in reply.files:
        raise ValueError("needed a record, got none")
    return reply
