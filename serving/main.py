"""`python -m serving.main`: the OpenAI-compatible server."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import uvicorn

from serving.api.app import create_app
from serving.api.context import ApiOptions, Context
from serving.api.health import package_version
from serving.api.metrics import Metrics
from serving.async_engine import AsyncEngine
from serving.config import Options, ProcessOptions, ServerOptions, parse_options
from serving.default_model import cache_directory
from serving.hosts import Follower, HostsError, Leader, Watch, end_process, join, run_follower
from serving.startup import Serving, StartupError, start, start_following
from serving.tokenizer import tokenizer_info
from sharding.fit import allow_memory
from sharding.offload import allow_pinned

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LAST_WORDS = 5.0  # seconds to send the answers of requests that were given up


def say(line: str) -> None:
    """Print one line of progress."""
    print(line, flush=True)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet.

    Raises:
      StartupError: the address is unknown, in use or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return bound


class Server(uvicorn.Server):
    """Says when it is ready, and on SIGTERM or SIGINT answers what is open before it ends."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        context: Context,
        engine: AsyncEngine,
        shutdown_timeout: float,
        ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._open_requests = context.open_requests
        self._engine = engine
        self._shutdown_timeout = shutdown_timeout
        self._ready = ready
        self._closing: asyncio.Task[None] | None = None
        self._signalled = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals on the event loop; the process ends with status 0 after them."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signal)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def close(self) -> None:
        """Refuse new requests and end when the open ones are answered; from any thread."""
        self._loop.call_soon_threadsafe(self._close)

    def _signal(self) -> None:
        """As `close`; at once if it comes again."""
        if self._signalled:
            self._shutdown_timeout = 0.0
        self._signalled = True
        self._close()

    def _close(self) -> None:
        if self._closing is None:
            self._open_requests.closing = True
            self._closing = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        say(f"shutting down: {self._open_requests.count} open requests")
        await self._answered(lambda: self._shutdown_timeout)
        # Those that are left get an output that says so, and answer 503.
        await asyncio.to_thread(self._engine.shutdown)
        await self._answered(lambda: _LAST_WORDS)
        self.should_exit = True

    async def _answered(self, timeout: Callable[[], float]) -> None:
        waited = 0.0
        while self._open_requests.count and waited < timeout():
            await asyncio.sleep(0.05)
            waited += 0.05


def _special_tokens(serving: Serving) -> dict[str, str | None]:
    config, backend = serving.config, serving.tokenizer.backend
    ids = {
        "bos_token": config.bos_token_id,
        "eos_token": config.eos_token_id,
        "pad_token": config.pad_token_id,
    }
    return {name: backend.id_to_token(token) for name, token in ids.items()}


def make_context(serving: Serving, options: ServerOptions) -> Context:
    """What the routes work with."""
    names = options.served_model_names or (serving.name,)
    return Context(
        engine=serving.engine,
        tokenizer=serving.tokenizer,
        options=ApiOptions(
            model_names=names,
            model_root=serving.root,
            max_model_len=serving.max_model_len,
            vocab_size=serving.config.vocab_size,
            api_key=options.api_key,
            max_body_bytes=options.max_body_bytes,
            max_choices=options.max_choices,
            log_requests=options.log_requests,
            tokenizer_info=tokenizer_info(Path(serving.root), _special_tokens(serving)),
            server_info={
                "version": package_version(),
                "jax": jax.__version__,
                "device": jax.devices()[0].device_kind,
                "max_model_len": serving.max_model_len,
            },
        ),
        metrics=Metrics(
            model_name=names[0],
            max_model_len=serving.max_model_len,
            stats=serving.engine.stats,
            cache_info=serving.cache_info,
        ),
    )


def serve(
    options: Options,
    listener: socket.socket,
    leader: Leader | None = None,
    watch: Watch | None = None,
) -> None:
    """Start the model and serve it until a signal comes.

    Args:
      options: of the command line.
      listener: bound to the address.
      leader, watch: this process and the end of the others, where the server has several.

    Raises:
      StartupError: it cannot be served.
    """
    serving = start(options.model, options.engine, say, leader)
    context = make_context(serving, options.server)
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    name = context.model_name
    server = Server(
        uvicorn.Config(
            create_app(context),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
        ),
        context=context,
        engine=serving.engine,
        shutdown_timeout=options.server.shutdown_timeout,
        ready=lambda: say(f"ready: {url} serves {name}"),
    )
    if watch is not None:
        watch.serves(
            fail=serving.engine.fail,
            open_requests=lambda: context.open_requests.count,
            close=server.close,
        )
    try:
        server.run(sockets=[listener])
    finally:
        serving.engine.shutdown()


def serve_with_others(options: Options, processes: ProcessOptions) -> int:
    """Join the other processes; serve as process 0, or follow it. Returns the exit status.

    Raises:
      StartupError: the processes cannot be joined.
    """
    try:
        hosts = join(os.environ, **dataclasses.asdict(processes))
    except HostsError as error:
        if jax.distributed.is_initialized():
            end_process(StartupError.status, str(error))
        raise StartupError(str(error)) from error
    if isinstance(hosts, Follower):
        load = functools.partial(start_following, options.model, options.engine, say, hosts)
        return run_follower(hosts, load)
    watch = Watch(hosts.channel)
    try:
        with bind(options.server.host, options.server.port) as listener:
            serve(options, listener, hosts, watch)
    except StartupError as error:
        watch.end(error.status, str(error))
        end_process(error.status, str(error))
    except SystemExit:  # others may wait for this process in the middle of a step
        reason = "a signal came before the server was ready"
        watch.end(0, reason)
        end_process(0, reason)
    watch.end(0)
    return 0


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Lets a signal that comes before the server listens end the process with status 0."""
    before = {number: signal.signal(number, lambda *_: sys.exit(0)) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server; returns 0 after a signal, 3 if it cannot start, 4 if it does not fit."""
    options = parse_options(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("serving").setLevel(logging.INFO)
    if jax.config.jax_compilation_cache_dir is None:
        # The second start compiles nothing; a program's bits are the same from the cache.
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "compiled"))
    # Both before anything uses a device, as joining other processes does.
    allow_memory()
    if options.engine.pinned_bytes:
        allow_pinned(options.engine.pinned_bytes)
    try:
        with _ending_on_signals():
            if options.processes is not None:
                return serve_with_others(options, options.processes)
            with bind(options.server.host, options.server.port) as listener:
                serve(options, listener)
    except StartupError as error:
        print(f"serving.main: {error}", file=sys.stderr)
        return error.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
