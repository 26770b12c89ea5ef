"""A runner whose next token depends on everything a request keeps, read through its pages."""

import dataclasses
import zlib

import numpy as np

from dsv41_jax.sampling import NUM_ALTERNATIVES, Sampled
from serving.detokenizer import Vocabulary
from serving.request import Request, SamplingParams
from sharding.cache_sizes import CacheSizes
from sharding.limits import EngineLimits

VOCAB_SIZE = 97
EOS = 1
LETTERS = Vocabulary(
    tuple(chr(33 + i).encode() if i > 2 else b"" for i in range(VOCAB_SIZE)), frozenset({0, 1, 2})
)


@dataclasses.dataclass(frozen=True)
class ToyStep:
    sampled: Sampled

    def result(self):
        return self.sampled


class ToyRunner:
    """Keeps (token, position) in paged pools; a row that was overwritten fails its check."""

    def __init__(self, limits, cache_sizes=None, *, eos=EOS):
        full = limits.max_num_seqs * limits.columns
        self.limits = limits
        self.cache_sizes = cache_sizes or CacheSizes(
            window_pages=full, global_pages=full, slots=limits.max_num_seqs
        )
        self.vocab_size, self.eos_token_id, self.look_back = VOCAB_SIZE, eos, 3
        self.looks_ahead, self.expected, self.closed = True, [], False
        size = limits.page_size
        self.window = np.full((self.cache_sizes.window_pages * size, 2), -1)
        self.global_ = np.full((self.cache_sizes.global_pages * size, 2), -1)
        self.open_group = np.full((self.cache_sizes.slots, 2), -1)
        self.steps = []

    def expect(self, rows):
        self.expected.append(rows)

    def close(self):
        self.closed = True

    def submit(self, rows, sampling):
        assert sum(len(r.token_ids) for r in rows) <= self.limits.max_num_batched_tokens
        assert sum(r.logits for r in rows) <= self.limits.logit_rows
        assert len({r.slot for r in rows}) == len(rows) <= self.limits.max_num_seqs
        self.steps.append(rows)
        for request in rows:
            for offset, token in enumerate(request.token_ids):
                position = request.start + offset
                for pool, pages in self._pools(request):
                    pool[self._row(pages, position)] = token, position
        logits = []
        for request in rows:
            for offset in range(len(request.token_ids)):
                logits.append(self._logits(request, request.start + offset))
            del logits[len(logits) - len(request.token_ids) : len(logits) - request.logits]
        return ToyStep(self._sample(np.array(logits).reshape(-1, VOCAB_SIZE), sampling))

    def _pools(self, request):
        return (self.window, request.window_pages), (self.global_, request.global_pages)

    def _row(self, pages, position):
        page = pages[position // self.limits.page_size]
        assert page >= 0, f"position {position} is on a page that is not held"
        return page * self.limits.page_size + position % self.limits.page_size

    def _logits(self, request, position):
        table = request.global_pages
        kept = np.array([self.global_[self._row(table, p)] for p in range(position + 1)])
        assert (kept[:, 1] == np.arange(position + 1)).all()
        first = max(0, position - self.limits.sliding_window + 1)
        for p in range(first, position + 1):
            assert (self.window[self._row(request.window_pages, p)] == kept[p]).all()
        if position == request.start:
            known = np.concatenate([np.full(3, -1), kept[:position, 0]])[-3:]
            assert (known == request.history).all()
            if position % 2:
                assert self.open_group[request.slot, 0] == kept[position - 1, 0]
        self.open_group[request.slot, position % 2] = kept[position, 0]
        seed = zlib.crc32(kept[:, 0].astype(np.int64).tobytes())
        return np.random.default_rng(seed).normal(scale=2, size=VOCAB_SIZE).astype(np.float32)

    def _sample(self, logits, sampling):
        rows, count = self.limits.logit_rows, len(logits)
        tokens, logprobs, ranks = np.zeros(rows, np.int32), np.zeros(rows), np.zeros(rows, np.int32)
        top_ids = np.zeros((rows, NUM_ALTERNATIVES), np.int32)
        top = np.zeros((rows, NUM_ALTERNATIVES))
        logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        for row in range(count):
            allowed = self._changed(logits[row], sampling, row)
            if sampling.temperature[row] > 0:
                key = (int(sampling.seed[row]), int(sampling.step[row]))
                allowed = allowed / sampling.temperature[row]
                allowed = allowed + np.random.default_rng(key).gumbel(size=VOCAB_SIZE)
            target = sampling.target[row]
            tokens[row] = allowed.argmax() if target < 0 else target
            order = np.argsort(-logp[row], kind="stable")
            logprobs[row] = logp[row, tokens[row]]
            ranks[row] = 1 + list(order).index(tokens[row])
            top_ids[row], top[row] = order[:NUM_ALTERNATIVES], logp[row, order[:NUM_ALTERNATIVES]]
        watched = np.take_along_axis(logp, np.maximum(sampling.watched[:count], 0), 1)
        return Sampled(tokens, logprobs, ranks, top_ids, top, watched)

    def _changed(self, logits, sampling, row):
        changed, place = logits.copy(), sampling.change_row[row]
        if place < 0:
            return changed
        table = sampling.changes
        for token, divisor, bias in zip(
            table.ids[place], table.divisor[place], table.bias[place], strict=True
        ):
            if token >= 0:
                old = changed[token]
                changed[token] = (old / divisor if old > 0 else old * divisor) + bias
        bits = np.unpackbits(table.allowed[place].view(np.uint8), bitorder="little")
        return np.where(bits[:VOCAB_SIZE] == 1, changed, -np.inf)


def toy_limits(**changes):
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    return EngineLimits(**(sizes | {"page_size": 4, "sliding_window": 8} | changes))


def toy_request(request_id, prompt, *, priority=0, cache_salt=None, **sampling):
    options = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | sampling
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**options),
        priority=priority,
        cache_salt=cache_salt,
    )


def run_all(engine, requests):
    """Serves `requests` together; returns their outputs by id."""
    outputs = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    return outputs


def tokens_of(outputs):
    return [token for output in outputs for token in output.token_ids]


def text_of(outputs):
    return "".join(output.text for output in outputs)
