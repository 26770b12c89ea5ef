"""The connections of process 0 with the others: steps go out, news of an end comes back.

One TCP connection to each of the others, for messages with their length before them. Who joins
proves that it is of this run by a secret that the run shares by other means. Nothing is
encrypted: the network between the hosts of a run is trusted, as it is with their tensors.
"""

import contextlib
import dataclasses
import hmac
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping

SECRET_BYTES = 32
_LENGTH = struct.Struct(">BQ")  # kind, bytes
_INDEX = struct.Struct(">I")
_MOST = 2**30  # bytes of a message
_HELLO_SECONDS = 10.0  # for a connection to say who it is
STEP, END, FAILED, CLOSING = range(4)  # kinds; the last two come from the others


class ChannelError(Exception):
    """A connection that cannot be made, or that is lost."""


@dataclasses.dataclass(frozen=True)
class News:
    """How a process ends: its exit status, and the reason where it is not the ordinary end."""

    status: int
    reason: str = ""

    def encode(self) -> bytes:
        """The status in a byte, then the reason."""
        return bytes([self.status]) + self.reason.encode()

    @classmethod
    def decode(cls, body: bytes) -> "News":
        """What `encode` was given; a body without a status is a failure."""
        return cls(body[0] if body else 1, body[1:].decode(errors="replace"))


class LeaderChannel:
    """Process 0's end of all connections; `broadcast` and `end` are for one thread at a time."""

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        """
        Args:
          connections: with every other process, by its index.
        """
        self._connections = dict(connections)
        self._ended = threading.Event()

    def watch(self, heard: Callable[[int, int, News], None]) -> None:
        """Tells about the others, from threads of their own, until `end`.

        Args:
          heard: takes a process's index, `FAILED` or `CLOSING`, and its news. A lost connection
            is `FAILED` too.
        """
        for index, connection in self._connections.items():
            threading.Thread(
                target=self._read, args=(index, connection, heard), daemon=True
            ).start()

    def broadcast(self, step: bytes) -> None:
        """Sends a step to all.

        Raises:
          ChannelError: one is lost.
        """
        self._send(STEP, step)

    def end(self, news: News) -> None:
        """Tells all that this was the last step, and sends nothing more."""
        self._ended.set()
        for connection in self._connections.values():
            try:
                _send(connection, END, news.encode())
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                continue  # it is gone already

    def close(self) -> None:
        """Hangs up."""
        self._ended.set()
        for connection in self._connections.values():
            _hang_up(connection)

    def _send(self, kind: int, body: bytes) -> None:
        for index, connection in self._connections.items():
            try:
                _send(connection, kind, body)
            except OSError as error:
                raise ChannelError(f"process {index} is lost: {error}") from error

    def _read(
        self, index: int, connection: socket.socket, heard: Callable[[int, int, News], None]
    ) -> None:
        while True:
            try:
                kind, body = _receive(connection)
            except (OSError, ChannelError) as error:
                if not self._ended.is_set():
                    heard(index, FAILED, News(1, f"its connection is lost: {error}"))
                return
            heard(index, kind, News.decode(body))


class FollowerChannel:
    """Another process's end of its connection with process 0."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._steps: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def watch(self, ended: Callable[[News], None]) -> None:
        """Begins to read.

        Args:
          ended: called on the reading thread, if process 0 gives a reason why it ends, or is
            lost.
        """
        threading.Thread(target=self._read, args=(ended,), daemon=True).start()

    def receive(self) -> bytes | None:
        """Waits for the next step; None after the last."""
        return self._steps.get()

    def tell(self, kind: int, news: News) -> None:
        """Tells process 0 `FAILED` or `CLOSING`; a lost connection is left to the reader."""
        with self._lock:
            try:
                _send(self._connection, kind, news.encode())
            except OSError:
                return

    def close(self) -> None:
        """Hangs up."""
        _hang_up(self._connection)

    def _read(self, ended: Callable[[News], None]) -> None:
        while True:
            try:
                kind, body = _receive(self._connection)
            except (OSError, ChannelError) as error:
                return ended(News(1, f"process 0 is lost: {error}"))
            if kind == STEP:
                self._steps.put(body)
                continue
            news = News.decode(body)
            if news == News(0):
                return self._steps.put(None)
            return ended(News(news.status, f"process 0 has ended: {news.reason}"))


def listen() -> tuple[socket.socket, int, bytes]:
    """A socket on a free port of all addresses, the port, and a new secret."""
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", 0))
    return listener, listener.getsockname()[1], secrets.token_bytes(SECRET_BYTES)


def accept(listener: socket.socket, secret: bytes, count: int, timeout: float) -> LeaderChannel:
    """Waits for processes 1 to count - 1; connections of others are closed.

    Raises:
      ChannelError: some did not come in time.
    """
    found: dict[int, socket.socket] = {}
    until = time.monotonic() + timeout
    while len(found) < count - 1:
        listener.settimeout(max(0.01, until - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            missing = ", ".join(str(i) for i in range(1, count) if i not in found)
            raise ChannelError(
                f"processes {missing} did not connect to port {listener.getsockname()[1]} within "
                f"{timeout:g} seconds: let the hosts of the run reach each other on all ports"
            ) from None
        index = _hello(connection, secret, count)
        if index is None or index in found:
            connection.close()
        else:
            found[index] = connection
    return LeaderChannel(found)


def connect(host: str, port: int, secret: bytes, index: int, timeout: float) -> FollowerChannel:
    """Joins process 0.

    Raises:
      ChannelError: it cannot be reached.
    """
    try:
        connection = socket.create_connection((host, port), timeout)
        connection.sendall(secret + _INDEX.pack(index))
    except OSError as error:
        raise ChannelError(
            f"process 0 cannot be reached at {host}:{port} ({error}): let the hosts of the run "
            "reach each other on all ports"
        ) from error
    _prepare(connection)
    return FollowerChannel(connection)


def _hello(connection: socket.socket, secret: bytes, count: int) -> int | None:
    """The index of a process of this run; None for anybody else."""
    connection.settimeout(_HELLO_SECONDS)
    try:
        hello = _exactly(connection, SECRET_BYTES + _INDEX.size)
    except (OSError, ChannelError):
        return None
    (index,) = _INDEX.unpack(hello[SECRET_BYTES:])
    if not hmac.compare_digest(hello[:SECRET_BYTES], secret) or not 0 < index < count:
        return None
    _prepare(connection)
    return index


def _prepare(connection: socket.socket) -> None:
    """Sends at once, waits without limit, and notices a host that is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is lost already
        connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
    connection.close()


def _send(connection: socket.socket, kind: int, body: bytes) -> None:
    connection.sendall(_LENGTH.pack(kind, len(body)) + body)


def _receive(connection: socket.socket) -> tuple[int, bytes]:
    kind, length = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if kind not in (STEP, END, FAILED, CLOSING) or length > _MOST:
        raise ChannelError(f"kind {kind} of {length} bytes is no message")
    return kind, _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 2**20))
        if not part:
            raise ChannelError("it was closed")
        parts += part
    return bytes(parts)
