"""`python -m serving.bench`: the published serving protocol against a server."""

import argparse
import contextlib
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

from serving.bench.client import BenchError, Server
from serving.bench.compare import Ratio, compare_pairs, compare_saved, interleaved
from serving.bench.own_server import own_server
from serving.bench.plot import plot
from serving.bench.protocol import Protocol, Run, run_protocol
from serving.bench.report import Setting, as_text, client_machine, rows, save

_FOREIGN_VOCABULARY = 32000  # ids of most vocabularies, where the server does not tell its size


def say(line: str) -> None:
    """Print one line."""
    print(line, flush=True)


def _count(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m serving.bench",
        description="Random prompts, streamed and timed. Without --base-url the server is started "
        "here, with the options that follow --.",
        allow_abbrev=False,
    )
    parser.add_argument("--base-url", metavar="URL", help="an OpenAI-compatible server")
    parser.add_argument(
        "--compare", metavar="URL", help="a second server, run in turn with the first (A B A B)"
    )
    parser.add_argument("--repeats", type=_count, default=5, help="pairs of --compare; %(default)s")
    parser.add_argument(
        "--compare-saved",
        type=Path,
        nargs=2,
        metavar=("A.json", "B.json"),
        help="compare two saved runs and ask no server",
    )
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument("--model", metavar="NAME", help="the first listed if left out")
    parser.add_argument("--input-len", type=_count, nargs="+", default=[512, 2048], metavar="N")
    parser.add_argument("--output-len", type=_count, default=128, metavar="N")
    parser.add_argument("--concurrency", type=_count, default=4, metavar="N")
    parser.add_argument("--num-warmups", type=_count, default=4, metavar="N")
    parser.add_argument("--num-prompts", type=_count, default=16, metavar="N")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--vocab-size", type=_count, metavar="N", help="prompt ids are below; the model's"
    )
    parser.add_argument("--save", type=Path, metavar="PATH", help="writes PATH.json and PATH.md")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="writes a picture")
    parser.add_argument("server", nargs="*", metavar="-- OPTION", help="of the server started here")
    return parser


class _Target:
    """A server with a model to ask."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self.server = Server(url, api_key=options.api_key)
        card = self.server.model()
        self.model = options.model or card["id"]
        self.vocab_size = options.vocab_size or card.get("vocab_size") or _FOREIGN_VOCABULARY

    def run(self, protocol: Protocol, number: int) -> Run:
        """One round of a protocol."""
        return run_protocol(
            self.server, self.model, protocol, vocab_size=self.vocab_size, round_number=number
        )

    def setting(self) -> Setting:
        """Where the figures come from."""
        status, about = self.server.ask("GET", "/server_info")
        return Setting(
            url=self.server.url,
            model=self.model,
            server=about if status == 200 and isinstance(about, dict) else {},
            client=client_machine(),
            date=datetime.date.today().isoformat(),
        )


def _show_ratios(title: str, ratios: Sequence[Ratio]) -> None:
    say(f"\n{title}: B over A, 95 % interval")
    say(as_text([["figure", "ratio", "interval", ""], *(ratio.line() for ratio in ratios)]))


def _show_failures(runs: Sequence[Run]) -> int:
    errors = [timing.error for run in runs for timing in run.timings if timing.error is not None]
    for error in errors[:3]:
        say(f"failed: {error}")
    return 1 if errors else 0


def _measure(url: str, options: argparse.Namespace, protocols: Sequence[Protocol]) -> int:
    target = _Target(url, options)
    runs = [target.run(protocol, 0) for protocol in protocols]
    say(f"\n{target.model} at {target.server.url}")
    say(as_text(rows(runs)))
    if options.save is not None:
        for path in save(options.save, target.setting(), runs):
            say(f"saved {path}")
    if options.plot is not None:
        plot(options.plot, runs, title=target.model)
        say(f"saved {options.plot}")
    return _show_failures(runs)


def _compare(url: str, options: argparse.Namespace, protocols: Sequence[Protocol]) -> int:
    a, b = _Target(url, options), _Target(options.compare, options)
    # The same ids for both, so that a pair differs in the server alone.
    a.vocab_size = b.vocab_size = min(a.vocab_size, b.vocab_size)
    status = 0
    for protocol in protocols:
        pairs = interleaved(
            lambda number, protocol=protocol: a.run(protocol, number),
            lambda number, protocol=protocol: b.run(protocol, number),
            repeats=options.repeats,
        )
        for name, runs in zip("AB", zip(*pairs, strict=True), strict=True):
            say(f"\n{name}: {(a if name == 'A' else b).server.url}")
            say(as_text(rows(runs)))
            status = max(status, _show_failures(runs))
        _show_ratios(f"input {protocol.input_tokens}", compare_pairs(pairs))
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 0, 1 if a request failed, or 3 if it cannot run."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.server and options.base_url:
        parser.error("options after -- are of a server started here; leave out --base-url")
    protocols = [
        Protocol(
            input_tokens=length,
            output_tokens=options.output_len,
            concurrency=options.concurrency,
            warmups=options.num_warmups,
            requests=options.num_prompts,
            seed=options.seed,
        )
        for length in options.input_len
    ]
    try:
        if options.compare_saved is not None:
            for length, ratios in compare_saved(*options.compare_saved).items():
                _show_ratios(f"input {length}", ratios)
            return 0
        with contextlib.ExitStack() as stack:
            url = options.base_url or stack.enter_context(own_server(options.server, say))
            work = _measure if options.compare is None else _compare
            return work(url, options, protocols)
    except BenchError as error:
        print(f"serving.bench: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
