"""The connection to a Ray cluster, and calls of Ray that do not wait for ever."""

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import TypeVar

import ray
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray.exceptions import RayError

from ...temporary import temporary_directory
from .. import store

T = TypeVar("T")
HEAD_S = 10.0
"""How long a process of Ray may take to accept a connection, and to answer it."""
RAY_S = 20.0
"""How long a call of Ray may take in which Ray waits for nothing but its own processes."""
RESUMES = "; finished runs are kept, and the same command goes on"
"""End of a message about a cluster that is lost."""
_END_S = 1.0
"""How long Ray may take to end after an error."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of gRPC sends first; a server, such as Ray, sends such settings too (RFC 9113,
3.4).
"""


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """While open, this process is connected, as a driver, to the Ray cluster at `address`; "auto"
    is the cluster that this machine belongs to.

    Raises SweepError if no cluster is there, and for errors of Ray while the connection is open.
    What Ray prints to standard output is dropped, because standard output is for results.
    """
    hint = ""
    try:
        address = checked_address(address)
        with (
            Path(os.devnull).open("w", encoding="utf-8") as nowhere,
            contextlib.redirect_stdout(nowhere),
            temporary_directory() as directory,
        ):
            hint = " (if it asks for a token: RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN)"
            _connect(address, directory)
            hint = ""
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # after an error, ray.shutdown often hangs too
                    promptly(ray.shutdown, HEAD_S if sys.exc_info()[0] is None else _END_S)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        if isinstance(error, store.SweepError):
            raise
        raise store.SweepError(
            f"no connection to the Ray cluster {address}: {in_a_line(error)}{hint}{RESUMES}"
        ) from error


def _connect(address: str, directory: Path) -> None:
    """Connect this process to the cluster, and send it the package by a link in `directory`."""
    # Ray names what it sends by its folder, which a checkout names differently.
    folder = directory / "cs336"
    folder.symlink_to(Path(__file__).parents[2])
    # Ray warns that it sets no handler of signals, as it is not called in the main thread
    logging.getLogger("ray").setLevel(logging.ERROR)
    connect = partial(
        ray.init,
        address,
        configure_logging=False,
        log_to_driver=False,
        runtime_env={"py_modules": [str(folder)]},
    )
    promptly(connect)


def promptly(call: Callable[[], T], patience_s: float = RAY_S) -> T:
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


def checked_address(address: str) -> str:
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
        connection = socket.create_connection((host.strip("[]"), int(port)), HEAD_S)
    except OSError as error:
        raise OSError(f"nothing listens at {address} ({error.strerror or error})") from error
    is_grpc = False
    with connection, contextlib.suppress(OSError):
        connection.sendall(_HELLO)
        is_grpc = connection.recv(9)[3:4] == b"\4"
    if not is_grpc and not os.environ.get("RAY_USE_TLS"):
        raise OSError(f"what listens at {address} does not answer as Ray does")
    return address


def in_a_line(error: BaseException) -> str:
    """The first line of the error's message, or the name of its type if it has no message."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
