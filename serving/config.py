"""Options of the server, each checked where it is read."""

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from sharding.launchers import LaunchError, add_process_options, find_processes
from sharding.options import PartitionOptions, add_partition_options, partition_options
from sharding.placement import TablePlacement, add_placement_options, placement_options

DEFAULT_CONTEXT = 4096  # tokens of a request unless told otherwise: caches are allocated for it
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes the engine is built for.

    Attributes:
      max_model_len: most tokens of a request; None for the model's own limit, at most
        `DEFAULT_CONTEXT`.
      max_num_seqs: most requests that run at once.
      max_num_batched_tokens: most tokens of one step.
      kv_cache_memory_bytes: bytes of all caches; None for what the sizes above need at most.
      prefix_cache: whether requests reuse the caches of equal beginnings.
      prefix_replay: whether that includes beginnings whose window is gone, an approximation.
      decoder_replay: whether late layers compute a prompt's last window alone.
      partition: how the model is spread over devices.
      placement: where Engram tables, the embedding and routed experts are.
    """

    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int | None
    prefix_cache: bool = True
    prefix_replay: bool = False
    decoder_replay: bool = False
    partition: PartitionOptions = PartitionOptions()
    placement: TablePlacement = TablePlacement()

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory that routed experts of all devices take at most."""
        return self.placement.cpu_offload_bytes * self.partition.devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where and how the server listens.

    Attributes:
      host, port: the address; port 0 takes a free one.
      served_model_names: names of the model in the API; empty for a name made from `model`.
      api_key: what /v1 routes ask for, or None.
      max_body_bytes: larger request bodies are refused.
      max_choices: requests with more prompts times choices are refused.
      log_requests: log prompts and options of requests.
      shutdown_timeout: seconds that open requests get to finish after SIGTERM.
    """

    host: str
    port: int
    served_model_names: tuple[str, ...]
    api_key: str | None
    max_body_bytes: int
    max_choices: int
    log_requests: bool
    shutdown_timeout: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """The processes of a server that has several; all None to ask the launcher.

    Attributes:
      coordinator: host:port of process 0.
      count: processes in all.
      index: this one.
    """

    coordinator: str | None = None
    count: int | None = None
    index: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Everything given on the command line.

    `model` is None for the tiny random model, `processes` for a server of one process.
    """

    model: Path | None
    engine: EngineOptions
    server: ServerOptions
    processes: ProcessOptions | None = None


class _Parser(argparse.ArgumentParser):
    """Prints a usage error as one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; --help lists the options", file=sys.stderr)
        sys.exit(2)


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    wanted = f"at least {least}" if most is None else f"from {least} to {most}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {wanted}")
        return value

    return read


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:iB|B)?", text)
    value = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; give bytes, or a number with K, M or G such as 512M"
        )
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0")
    return value


def _not_empty(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("it must not be empty")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m serving.main",
        description="OpenAI-compatible server for a DeepSeek-V4.1 checkpoint.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        type=_not_empty,
        metavar="DIR",
        help="checkpoint directory in the released layout; a tiny random model if left out",
    )
    listen = parser.add_argument_group("server")
    listen.add_argument("--host", type=_not_empty, default="127.0.0.1", help="%(default)s")
    listen.add_argument(
        "--port", type=_whole(0, 65535), default=8000, help="%(default)s; 0 takes a free one"
    )
    listen.add_argument(
        "--served-model-name",
        type=_not_empty,
        nargs="+",
        default=[],
        metavar="NAME",
        help="names of the model in the API; the first is reported; the directory's if left out",
    )
    listen.add_argument(
        "--api-key", type=_not_empty, metavar="KEY", help="bearer key of the /v1 routes; none"
    )
    listen.add_argument(
        "--max-body-bytes",
        type=_bytes,
        default=32 * 2**20,
        metavar="N",
        help="largest request body; 32M",
    )
    listen.add_argument(
        "--max-choices",
        type=_whole(1),
        default=1024,
        metavar="N",
        help="most prompts times n in one request; %(default)s",
    )
    listen.add_argument(
        "--enable-log-requests",
        action="store_true",
        help="log the prompt and the options of every request",
    )
    listen.add_argument(
        "--shutdown-timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="what open requests get to finish after SIGTERM; %(default)s",
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--max-model-len",
        type=_whole(2),
        metavar="N",
        help=f"most tokens of a request; the model's limit, at most {DEFAULT_CONTEXT}",
    )
    engine.add_argument(
        "--max-num-seqs",
        type=_whole(1),
        default=16,
        metavar="N",
        help="most requests that run at once; %(default)s",
    )
    engine.add_argument(
        "--max-num-batched-tokens",
        type=_whole(1),
        default=256,
        metavar="N",
        help="most tokens of one step; %(default)s",
    )
    engine.add_argument(
        "--kv-cache-memory-bytes",
        type=_bytes,
        metavar="N",
        help="bytes of all caches, such as 512M; what the sizes above need at most if left out",
    )
    engine.add_argument(
        "--no-enable-prefix-caching",
        dest="prefix_cache",
        action="store_false",
        help="compute every prompt whole, instead of reusing the caches of equal beginnings",
    )
    engine.add_argument(
        "--prefix-replay",
        action="store_true",
        help="reuse equal beginnings also where their sliding window is gone, and compute it "
        "again: an approximation that depends on what is cached",
    )
    engine.add_argument(
        "--decoder-replay",
        action="store_true",
        help="layers from the last KV source on compute a prompt's last window alone: faster on "
        "long prompts, and an approximation",
    )
    add_placement_options(engine)
    engine.add_argument(
        "--engram-prefault",
        action="store_true",
        help="read memory-mapped Engram tables before the server is ready",
    )
    add_partition_options(parser)
    hosts = parser.add_argument_group("several processes, one a host")
    hosts.add_argument(
        "--distributed",
        action="store_true",
        help="join the processes that Kubernetes, Slurm or Open MPI started; process 0 serves",
    )
    add_process_options(hosts)
    return parser


def _processes(parser: argparse.ArgumentParser, given: argparse.Namespace) -> ProcessOptions | None:
    options = ProcessOptions(
        coordinator=given.coordinator, count=given.processes, index=given.process
    )
    if options == ProcessOptions():
        return options if given.distributed else None
    try:
        find_processes({}, **dataclasses.asdict(options))
    except LaunchError as error:
        parser.error(str(error))
    return options


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; wrong usage prints one line and exits with status 2."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.max_num_batched_tokens < given.max_num_seqs:
        parser.error(
            f"argument --max-num-batched-tokens: {given.max_num_batched_tokens} is below "
            f"--max-num-seqs {given.max_num_seqs}; a step holds a token of every running request"
        )
    return Options(
        model=None if given.model is None else Path(given.model),
        engine=EngineOptions(
            max_model_len=given.max_model_len,
            max_num_seqs=given.max_num_seqs,
            max_num_batched_tokens=given.max_num_batched_tokens,
            kv_cache_memory_bytes=given.kv_cache_memory_bytes,
            prefix_cache=given.prefix_cache,
            prefix_replay=given.prefix_replay,
            decoder_replay=given.decoder_replay,
            partition=partition_options(parser, given),
            placement=placement_options(given, engram_prefault=given.engram_prefault),
        ),
        server=ServerOptions(
            host=given.host,
            port=given.port,
            served_model_names=tuple(given.served_model_name),
            api_key=given.api_key,
            max_body_bytes=given.max_body_bytes,
            max_choices=given.max_choices,
            log_requests=given.enable_log_requests,
            shutdown_timeout=given.shutdown_timeout,
        ),
        processes=_processes(parser, given),
    )
