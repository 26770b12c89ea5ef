import fake_engine
import pytest
from fake_engine import FakeEngine, client_of, events_of, says

from dsv41_jax.checkpoint.tiny_tokenizer import BOS


@pytest.fixture(scope="module")
def tokenizer():
    return fake_engine.make_tokenizer()


@pytest.fixture
def engine(tokenizer):
    return FakeEngine(tokenizer, says(tokenizer, "one two three"))


@pytest.fixture
def client(engine):
    with client_of(engine) as client:
        yield client


def complete(client, **body):
    response = client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 100, **body})
    assert response.status_code == 200, response.text
    return response


def test_a_completion_has_the_documented_shape(client, tokenizer):
    body = complete(client, model="fake").json()
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert body["model"] == "fake" and isinstance(body["created"], int)
    assert body["choices"] == [
        {
            "index": 0,
            "text": "one two three",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "prompt_logprobs": None,
        }
    ]
    generated = len(tokenizer.encode("one two three")) + 1
    prompt = len(tokenizer.encode("Hello"))
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_max_tokens_is_16_unless_given(client, engine):
    client.post("/v1/completions", json={"prompt": "Hello"})
    assert engine.requests[0].sampling.max_tokens == 16


def test_max_tokens_beyond_the_context_is_limited_to_the_room_left(client, engine, tokenizer):
    complete(client, max_tokens=10_000)
    room = fake_engine.MAX_MODEL_LEN - len(tokenizer.encode("Hello"))
    assert engine.requests[0].sampling.max_tokens == room


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ([65, 66], [[65, 66]]),
        ([[65, 66], [67]], [[65, 66], [67]]),
    ],
)
def test_prompts_come_as_strings_or_ids_one_or_many(client, engine, tokenizer, prompt, expected):
    body = complete(client, prompt=prompt).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    sent = sorted(engine.requests, key=lambda request: request.request_id)
    wanted = [tuple(tokenizer.encode(e) if isinstance(e, str) else e) for e in expected]
    assert [request.prompt_token_ids for request in sent] == wanted


def test_choices_are_numbered_prompt_first_and_have_seeds_of_their_own(client, engine):
    body = complete(client, prompt=["ab", "cd"], n=3, seed=7).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4, 5]
    sent = sorted(engine.requests, key=lambda request: request.request_id)
    assert [request.sampling.seed for request in sent] == [7, 8, 9, 7, 8, 9]


def test_a_completion_prompt_recognizes_special_tokens_and_gets_no_bos(client, engine, tokenizer):
    complete(client, prompt="<｜User｜>x")
    user, *rest = engine.requests[0].prompt_token_ids
    assert user == tokenizer.token_id("<｜User｜>")
    assert rest == tokenizer.encode_plain("x")


def test_sampling_options_reach_the_engine(client, engine):
    complete(
        client,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        seed=-3,
        stop=["x", "y"],
        stop_token_ids=[5],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        ignore_eos=False,
        min_tokens=2,
        max_tokens=9,
    )
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.5,
        0.9,
        0,
        0.1,
    )
    assert (sampling.seed, sampling.stop, sampling.stop_token_ids) == (-3, ("x", "y"), (5,))
    assert sampling.include_stop_str_in_output and not sampling.skip_special_tokens
    assert (sampling.min_tokens, sampling.max_tokens) == (2, 9)


def test_null_is_the_same_as_left_out_and_unknown_fields_are_ignored(client):
    complete(client, temperature=None, n=None, stop=None, suffix=None, best_of=1, whatever={"a": 1})


def test_neutral_values_of_unsupported_options_are_accepted(client):
    complete(
        client,
        presence_penalty=0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias={},
        bad_words=[],
        use_beam_search=False,
        length_penalty=1.0,
        suffix="",
        priority=0,
        response_format={"type": "text"},
        best_of=1,
        guided_json=None,
        logits_processors=[],
        vllm_xargs={},
        add_special_tokens=False,
        detokenize=True,
        spaces_between_special_tokens=False,
    )


def test_a_stop_string_ends_the_text_and_is_named(client):
    choice = complete(client, stop=" two").json()["choices"][0]
    assert choice["text"] == "one"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " two")


def test_length_is_reported(client):
    choice = complete(client, max_tokens=2).json()["choices"][0]
    assert choice["finish_reason"] == "length"


def test_echo_puts_the_prompt_first(client):
    assert complete(client, echo=True).json()["choices"][0]["text"] == "Helloone two three"


def test_echo_of_ids_decodes_them(client, tokenizer):
    ids = tokenizer.encode("Hello")
    body = complete(client, prompt=ids, echo=True).json()
    assert body["choices"][0]["text"] == "Helloone two three"


def test_echo_with_logprobs_covers_prompt_and_output(client, tokenizer):
    choice = complete(client, echo=True, logprobs=2).json()["choices"][0]
    logprobs = choice["logprobs"]
    count = len(tokenizer.encode("Hello")) + len(tokenizer.encode("one two three")) + 1
    assert [len(entries) for entries in logprobs.values()] == [count] * 4
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1] == -0.5
    assert "".join(logprobs["tokens"]).startswith("Helloone two three")
    starts = logprobs["text_offset"]
    for token, start in zip(logprobs["tokens"][:-1], starts[:-1], strict=True):
        assert choice["text"][start : start + len(token)] == token


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("skipped", [False, True])
def test_text_offsets_count_what_is_in_the_text(client, engine, tokenizer, skipped, stream):
    engine.script = says(tokenizer, f"a{BOS}é b")
    options = {"logprobs": 0, "echo": True, "skip_special_tokens": skipped, "stream": stream}
    response = complete(client, prompt=f"{BOS}Hi", **options)
    chunks = events_of(response) if stream else [response.json()]
    choices = [chunk["choices"][0] for chunk in chunks]
    text = "".join(choice["text"] for choice in choices)
    assert text == f"{BOS}Hia{'' if skipped else BOS}é b"
    of = [choice["logprobs"] for choice in choices]
    tokens = [token for part in of for token in part["tokens"]]
    offsets = [offset for part in of for offset in part["text_offset"]]
    for token, offset in zip(tokens[:-1], offsets[:-1], strict=True):
        if "\ufffd" not in token and not (skipped and offset and token == BOS):
            assert text[offset : offset + len(token)] == token
    assert offsets[-1] == len(text)


def test_max_tokens_0_with_echo_only_scores_the_prompt(client, tokenizer):
    body = complete(client, max_tokens=0, echo=True, logprobs=1).json()
    assert body["choices"][0]["text"] == "Hello"
    assert body["usage"]["completion_tokens"] == 0
    assert len(body["choices"][0]["logprobs"]["tokens"]) == len(tokenizer.encode("Hello"))


def test_logprobs_0_gives_the_sampled_token_only(client):
    top = complete(client, logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert all(len(table) == 1 for table in top)


def test_prompt_logprobs_are_tables_by_token_id(client, tokenizer):
    choice = complete(client, prompt_logprobs=1).json()["choices"][0]
    first, second, *_ = choice["prompt_logprobs"]
    token = tokenizer.encode("Hello")[1]
    assert first is None
    assert second[str(token)]["rank"] == 1 and second[str(token)]["logprob"] == -0.5


def test_tokens_can_be_named_by_their_ids(client, tokenizer):
    choice = complete(client, logprobs=1, return_tokens_as_token_ids=True).json()["choices"][0]
    first = tokenizer.encode("one two three")[0]
    assert choice["logprobs"]["tokens"][0] == f"token_id:{first}"


def test_a_stream_sends_a_chunk_per_token_and_ends_with_done(client, tokenizer):
    response = complete(client, stream=True)
    chunks = events_of(response)
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert len(chunks) == len(tokenizer.encode("one two three")) + 1
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one two three"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_the_sum_over_the_prompts_each_counted_once(client, engine, stream):
    engine.cached = 2
    body = {"prompt": ["abc", "def", "ghi"], "n": 2}
    if stream:
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        answer = events_of(complete(client, **body, **usage))[-1]
    else:
        answer = complete(client, **body).json()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}


def test_include_usage_adds_a_last_chunk_without_choices(client, tokenizer):
    chunks = events_of(complete(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(tokenizer.encode("one two three")) + 1
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_continuous_usage_stats_put_usage_in_every_chunk(client):
    chunks = events_of(
        complete(
            client,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [*range(1, len(chunks)), len(chunks) - 1]


def test_a_stream_of_several_choices_marks_each_chunk(client):
    chunks = events_of(complete(client, stream=True, prompt=["a", "b"], n=2))
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == dict.fromkeys(range(4), "one two three")


def test_a_stream_with_echo_begins_with_the_prompt(client):
    chunks = events_of(complete(client, stream=True, echo=True, logprobs=1))
    assert chunks[0]["choices"][0]["text"].startswith("Hello")
    offsets = [o for c in chunks for o in c["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == sorted(offsets) and offsets[0] == 0


def test_a_failing_engine_is_a_500_without_details(client, engine):
    engine.failure = RuntimeError("secret detail")
    response = client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 500
    assert response.json() == {
        "error": {
            "message": "Internal server error",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
    }


def test_an_aborted_request_is_a_503(client, engine):
    engine.failure = "abort"
    response = client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "ServiceUnavailableError"


def test_a_failure_before_the_first_token_of_a_stream_is_a_plain_error(client, engine):
    engine.failure = "error"
    response = client.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/json"


def test_a_failure_in_a_running_stream_is_an_event_and_then_done(tokenizer):
    engine = FakeEngine(tokenizer, says(tokenizer, "one two three"))

    def script(request):
        for count, token in enumerate(tokenizer.encode("one two three")):
            if count == 2:
                engine.failure = "error"
            yield token

    engine.script = script
    with client_of(engine) as client:
        chunks = events_of(complete(client, stream=True))
    assert chunks[-1]["error"]["code"] == 500 and len(chunks) > 1
    assert engine.running == set()


def test_penalties_biases_and_bans_reach_the_engine(client, engine, tokenizer):
    complete(
        client,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        logit_bias={"5": -100, "7": 2.5},
        allowed_token_ids=[3, 4, 3],
        bad_words=["bad"],
        priority=-3,
        cache_salt="me",
    )
    request = engine.requests[-1]
    sampling = request.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.repetition_penalty == 1.2
    assert sampling.logit_bias == ((5, -100.0), (7, 2.5))
    assert sampling.allowed_token_ids == (3, 4)
    words = [tokenizer.encode_plain("bad"), tokenizer.encode_plain(" bad")]
    assert sampling.bad_words == tuple(tuple(word) for word in words)
    assert (request.priority, request.cache_salt) == (-3, "me")


@pytest.mark.parametrize(
    ("outputs", "kind", "text"),
    [
        ({"json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"json": '{"type": "object"}'}, "json_schema", '{"type": "object"}'),
        ({"json_object": True}, "json_object", ""),
        ({"regex": "[ab]+"}, "regex", "[ab]+"),
        ({"choice": ["a", "b"]}, "choice", '["a", "b"]'),
        ({"grammar": 'start: "a"'}, "lark", 'start: "a"'),
    ],
)
def test_structured_outputs_become_grammars(client, engine, outputs, kind, text):
    complete(client, structured_outputs=outputs)
    grammar = engine.requests[-1].sampling.grammar
    assert (grammar.kind, grammar.text, grammar.starts_after) == (kind, text, None)


def test_token_ids_come_when_asked(client, engine, tokenizer):
    [choice] = complete(client, return_token_ids=True).json()["choices"]
    assert choice["prompt_token_ids"] == tokenizer.encode("Hello")
    assert choice["token_ids"] == engine.script(None)
    chunks = events_of(complete(client, return_token_ids=True, stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["prompt_token_ids"] == tokenizer.encode("Hello")
    assert all("prompt_token_ids" not in choice for choice in choices[1:])
    assert [token for choice in choices for token in choice["token_ids"]] == engine.script(None)
