"""An engine that says what a test tells it to, and a client of the application around it."""

import asyncio
import contextlib
import json

from starlette.testclient import TestClient

from dsv41_jax.checkpoint.tiny_tokenizer import EOS, tiny_tokenizer
from serving.api.app import create_app
from serving.api.context import ApiOptions, Context
from serving.api.metrics import Metrics
from serving.detokenizer import TextStream
from serving.engine import EngineStats
from serving.grammar import GrammarCompiler
from serving.request import RequestError, RequestOutput, TokenLogprob
from serving.tokenizer import Tokenizer

MODEL = "fake"
MAX_MODEL_LEN = 128


def make_tokenizer():
    return Tokenizer(tiny_tokenizer().to_str())


class FakeEngine:
    """Samples `script(request)`, ends at EOS or the length; the text is the real detokenizer's."""

    def __init__(self, tokenizer, script, *, pause=0.0):
        self.tokenizer, self.script, self.pause = tokenizer, script, pause
        self.is_alive = True
        self.failure = None
        self.requests = []
        self.running = set()
        self.resets = 0
        self.cached = 0
        self.eos = tokenizer.token_id(EOS)
        self.grammars = GrammarCompiler(
            tokenizer.vocabulary, vocab_size=tokenizer.vocab_size, eos_token_id=self.eos
        )

    def check(self, request):
        if request.request_id in self.running:
            raise RequestError("request id is in use", param="request_id")
        if request.sampling.grammar is not None:
            self.grammars.compile(request.sampling.grammar)

    def stats(self):
        return EngineStats(
            num_running=len(self.running),
            num_waiting=0,
            kv_cache_usage=0.5,
            num_prompt_tokens=3,
            num_generation_tokens=4,
            num_preemptions=0,
            num_steps=0,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            num_finished={},
            step_tokens={3: 2, 200: 1},
        )

    def reset_prefix_cache(self):
        self.resets += 1

    async def generate(self, request):
        self.requests.append(request)
        self.running.add(request.request_id)
        try:
            async for output in self._outputs(request):
                yield output
        finally:
            self.running.discard(request.request_id)

    async def _outputs(self, request):
        sampling = request.sampling
        stream = TextStream(
            self.tokenizer.vocabulary,
            skip_special_tokens=sampling.skip_special_tokens,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )
        of_prompt = None
        if sampling.prompt_logprobs is not None:
            rest = request.prompt_token_ids[1:]
            of_prompt = (None, *(self._logprob(t, sampling.prompt_logprobs) for t in rest))
        if sampling.max_tokens == 0:
            yield RequestOutput(
                request.request_id, finish_reason="length", prompt_logprobs=of_prompt
            )
            return
        for count, token in enumerate(self.script(request), 1):
            await asyncio.sleep(self.pause)
            if self.failure is not None:
                if isinstance(self.failure, Exception):
                    raise self.failure
                yield RequestOutput(request.request_id, finish_reason=self.failure)
                return
            reason = stop = None
            text = ""
            if token == self.eos and not sampling.ignore_eos:
                reason = "stop"
            else:
                text, stop = stream.push(token)
                if stop is not None:
                    reason = "stop"
                elif count == sampling.max_tokens:
                    reason = "length"
            if reason is not None and stop is None:
                rest, stop = stream.finish()
                text += rest
            wanted = sampling.logprobs
            yield RequestOutput(
                request.request_id,
                token_ids=(token,),
                text=text,
                logprobs=None if wanted is None else (self._logprob(token, wanted),),
                prompt_logprobs=of_prompt if count == 1 else None,
                num_cached_tokens=self.cached,
                begin_time=request.arrival_time + 0.25,
                finish_reason=reason,
                stop_reason=stop,
            )
            if reason is not None:
                return
        await asyncio.Event().wait()

    def _logprob(self, token, alternatives):
        top = tuple((token + i, -0.5 - i) for i in range(alternatives))
        return TokenLogprob(token, -0.5, 1, top)


def says(tokenizer, text, *, end=True):
    """A script: `text`, whose special tokens are real ones, and EOS."""
    tokens = tokenizer.encode(text) + ([tokenizer.token_id(EOS)] if end else [])
    return lambda request: tokens


@contextlib.contextmanager
def client_of(engine, **options):
    """A client of an application around `engine`."""
    defaults = {
        "model_names": (MODEL, "alias"),
        "model_root": "/models/fake",
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": engine.tokenizer.vocab_size,
    }
    context = Context(
        engine=engine,
        tokenizer=engine.tokenizer,
        options=ApiOptions(**(defaults | options)),
        metrics=Metrics(model_name=MODEL, max_model_len=MAX_MODEL_LEN, stats=engine.stats),
    )
    with TestClient(create_app(context)) as client:
        client.context = context
        yield client


def events_of(response):
    """The JSON events of a stream that ended as it should."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
