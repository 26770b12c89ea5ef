"""`python -m serving.chat verify DIR`: chat vectors against the encoder and the parser."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from serving.chat.released_tokenizer import released_tokenizer_text
from serving.chat.verify import VectorError, verify_directory
from serving.tokenizer import Tokenizer, TokenizerError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 if all vectors pass, 1 if any differs, 3 if it cannot run."""
    parser = argparse.ArgumentParser(prog="python -m serving.chat", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="check the chat vectors of a directory")
    verify.add_argument("directory", type=Path, metavar="DIR", help="encode.json and its siblings")
    verify.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer.json, or a directory with one, to use in place of the released one",
    )
    options = parser.parse_args(arguments)
    try:
        if options.tokenizer is None:
            tokenizer = Tokenizer(released_tokenizer_text())
        else:
            tokenizer = Tokenizer.open(options.tokenizer)
        outcomes = list(verify_directory(options.directory, tokenizer))
    except (TokenizerError, VectorError) as error:
        print(f"serving.chat: {error}", file=sys.stderr)
        return 3
    failed = [outcome for outcome in outcomes if outcome.differences]
    for outcome in failed:
        for difference in outcome.differences:
            print(f"{outcome.file} {outcome.vector}: {difference}")
    for file in dict.fromkeys(outcome.file for outcome in outcomes):
        total = sum(outcome.file == file for outcome in outcomes)
        bad = sum(outcome.file == file for outcome in failed)
        print(f"{file}: {total - bad} of {total} pass")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
