"""What HTTP leaves of the engine's throughput: prints both and their ratio, from one run.

Usage: python -m serving.bench.http_share [--model DIR] [--repeats N] ...

One engine answers the same requests in turn in this process and over HTTP, asked by a second
process. Both ways are timed in turn; what is reported is the median of the pairs' ratios.
"""

import argparse
import asyncio
import dataclasses
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from serving.api.app import create_app
from serving.bench.client import BenchError
from serving.bench.protocol import Protocol
from serving.config import parse_options
from serving.main import bind, make_context
from serving.request import Request, SamplingParams
from serving.startup import Serving, StartupError, start

ENOUGH = 0.8  # of the engine's throughput


def say(line: str) -> None:
    """Print one line."""
    print(line, flush=True)


async def _answer(serving: Serving, prompts: Sequence[Sequence[int]], protocol: Protocol) -> int:
    """Generates all answers, some at a time; returns the number of tokens."""
    waiting = iter(enumerate(prompts))
    total = 0

    async def work() -> None:
        nonlocal total
        for number, prompt in waiting:
            request = Request(
                request_id=f"{time.monotonic_ns()}-{number}",
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(
                    max_tokens=protocol.output_tokens, temperature=0.0, ignore_eos=True
                ),
                arrival_time=time.monotonic(),
            )
            async for output in serving.engine.generate(request):
                total += len(output.token_ids)

    await asyncio.gather(*(work() for _ in range(protocol.concurrency)))
    return total


def in_process(serving: Serving, protocol: Protocol, *, round_number: int) -> float:
    """Output tokens per second of the engine alone."""
    prompts = protocol.prompts(serving.config.vocab_size, round_number=round_number)
    asyncio.run(_answer(serving, prompts[: protocol.warmups], protocol))
    serving.engine.reset_prefix_cache()
    began = time.perf_counter()
    total = asyncio.run(_answer(serving, prompts[protocol.warmups :], protocol))
    return total / (time.perf_counter() - began)


@contextmanager
def _listening(serving: Serving, listener: socket.socket) -> Iterator[str]:
    """Serves the engine from a thread of its own; yields the address."""
    context = make_context(serving, parse_options([]).server)
    server = uvicorn.Server(
        uvicorn.Config(create_app(context), log_config=None, access_log=False, lifespan="off")
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def over_http(url: str, protocol: Protocol, *, seed: int) -> float:
    """Output tokens per second as a client in another process sees them.

    Raises:
      BenchError: the client failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "run"
        command = [sys.executable, "-m", "serving.bench", "--base-url", url, "--save", str(saved)]
        command += ["--input-len", str(protocol.input_tokens), "--seed", str(seed)]
        command += ["--output-len", str(protocol.output_tokens)]
        command += ["--concurrency", str(protocol.concurrency)]
        command += ["--num-warmups", str(protocol.warmups), "--num-prompts", str(protocol.requests)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"the client failed: {(done.stderr or done.stdout).strip()[-300:]}")
        run = json.loads(saved.with_suffix(".json").read_text(encoding="utf-8"))["runs"][0]
    return run["figures"]["output_throughput"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; returns 0, 1 if HTTP leaves too little, 3 if it cannot run."""
    parser = argparse.ArgumentParser(prog="python -m serving.bench.http_share")
    parser.add_argument("--model", help="checkpoint directory; the tiny random model if left out")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args(arguments)
    protocol = Protocol(
        input_tokens=given.input_len,
        output_tokens=given.output_len,
        concurrency=given.concurrency,
        requests=given.num_prompts,
    )
    options = parse_options(["--max-model-len", str(given.input_len + given.output_len + 1)])
    try:
        serving = start(None if given.model is None else Path(given.model), options.engine, say)
        alone, served = [], []
        with bind("127.0.0.1", 0) as listener, _listening(serving, listener) as url:
            for number in range(given.repeats):
                alone.append(in_process(serving, protocol, round_number=number))
                served.append(over_http(url, protocol, seed=protocol.seed + number))
        serving.engine.shutdown()
    except (BenchError, StartupError) as error:
        print(f"serving.bench.http_share: {error}", file=sys.stderr)
        return 3
    shares = [over / bare for over, bare in zip(served, alone, strict=True)]
    share = statistics.median(shares)
    say(f"protocol: {dataclasses.asdict(protocol)}")
    say(f"engine in process: {statistics.median(alone):.1f} output tokens/s {_rounded(alone)}")
    say(f"over HTTP:         {statistics.median(served):.1f} output tokens/s {_rounded(served)}")
    say(f"HTTP over engine:  {share:.1%} (at least {ENOUGH:.0%} is wanted)")
    return 0 if share >= ENOUGH else 1


def _rounded(values: Sequence[float]) -> str:
    return f"({', '.join(f'{value:.1f}' for value in values)})"


if __name__ == "__main__":
    sys.exit(main())
