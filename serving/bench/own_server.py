"""A server of our own for the time of a benchmark."""

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

from serving.bench.client import BenchError

_STOP_SECONDS = 60


@contextlib.contextmanager
def own_server(options: Sequence[str], say: Callable[[str], None]) -> Iterator[str]:
    """Starts `serving.main` on a free port and ends it afterwards.

    Args:
      options: of the server.
      say: takes its lines of progress.

    Yields:
      Its address.

    Raises:
      BenchError: it ended before it was ready.
    """
    command = [sys.executable, "-m", "serving.main", "--port", "0", *options]
    errors = tempfile.TemporaryFile("w+")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        url = None
        for line in process.stdout:
            say(line.rstrip("\n"))
            ready = re.match(r"ready: (\S+) serves ", line)
            if ready:
                url = ready[1]
                break
        if url is None:
            status = process.wait()
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["it said nothing"])[-1]
            raise BenchError(f"the server ended with status {status} before it was ready: {last}")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        errors.close()
