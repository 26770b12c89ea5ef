"""A small HTTP client that times streamed completions of any OpenAI-compatible server."""

import dataclasses
import http.client
import json
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

_TIMEOUT = 600.0  # seconds without a byte


class BenchError(Exception):
    """The benchmark cannot run; the message is one line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One request, in seconds from its start.

    Attributes:
      prompt_tokens, completion_tokens: as the server counted them.
      first: when the first chunk came.
      last: when the last one did.
      gaps: between chunks.
      end_to_end: when the stream ended.
      error: why it failed, or None.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    gaps: tuple[float, ...] = ()
    end_to_end: float = 0.0
    error: str | None = None

    @property
    def per_token(self) -> float | None:
        """Mean seconds per token after the first; None for a single one."""
        after = self.completion_tokens - 1
        return (self.last - self.first) / after if after > 0 else None


class Server:
    """The address of a server, and what is asked of it."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """Check the address.

        Raises:
          BenchError: it is not one of http or https.
        """
        parts = urllib.parse.urlsplit(url.rstrip("/").removesuffix("/v1"))
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise BenchError(f"{url!r} is not an address such as http://127.0.0.1:8000")
        self.url = urllib.parse.urlunsplit(parts)
        self._parts = parts
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def _connect(self) -> http.client.HTTPConnection:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(self._parts.hostname, self._parts.port, timeout=_TIMEOUT)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON (None if it is none) of one request.

        Raises:
          BenchError: the server does not answer.
        """
        connection = self._connect()
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, self._parts.path + path, data, self._headers)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise BenchError(f"{self.url} does not answer {method} {path}: {error}") from error
        finally:
            connection.close()
        try:
            return answer.status, json.loads(content)
        except ValueError:
            return answer.status, None

    def model(self) -> dict[str, Any]:
        """The first model that is served.

        Raises:
          BenchError: none is listed.
        """
        status, body = self.ask("GET", "/v1/models")
        if status != 200 or not isinstance(body, dict) or not body.get("data"):
            raise BenchError(f"{self.url} lists no model (status {status} of GET /v1/models)")
        return body["data"][0]

    def complete(self, model: str, prompt: Sequence[int], *, max_tokens: int) -> Timing:
        """Stream one greedy completion of exactly `max_tokens` tokens, timed."""
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = self._connect()
        start = time.perf_counter()
        try:
            connection.request(
                "POST", f"{self._parts.path}/v1/completions", json.dumps(body), self._headers
            )
            answer = connection.getresponse()
            if answer.status != 200:
                text = answer.read(400).decode(errors="replace")
                return Timing(error=f"status {answer.status}: {text}")
            return _timed(_events(answer), start)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Timing(error=f"{type(error).__name__}: {error}")
        finally:
            connection.close()


def _events(answer: http.client.HTTPResponse) -> Iterator[tuple[float, dict[str, Any]]]:
    """Events of a stream with the moment each came; comments and the end mark are left out."""
    for line in answer:
        if not line.startswith(b"data:"):
            continue
        now = time.perf_counter()
        data = line[5:].strip()
        if data != b"[DONE]":
            yield now, json.loads(data)


def _timed(events: Iterator[tuple[float, dict[str, Any]]], start: float) -> Timing:
    moments = []
    usage: dict[str, Any] = {}
    for now, data in events:
        if "error" in data:
            return Timing(error=f"in the stream: {data['error']}")
        usage = data.get("usage") or usage
        if data.get("choices"):
            moments.append(now)
    if not moments:
        return Timing(error="the stream was empty")
    return Timing(
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", len(moments)),
        first=moments[0] - start,
        last=moments[-1] - start,
        gaps=tuple(b - a for a, b in zip(moments, moments[1:], strict=False)),
        end_to_end=time.perf_counter() - start,
    )
