"""The server's own process, used by the openai client, and by clients that hang up."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Literal

import anthropic
import httpx
import openai
import pydantic
import pytest

ROOT = pathlib.Path(__file__).parents[2]
SLOTS = 8
PAGE = 16  # tokens, of the tiny model


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """The server as a user starts it, without a model, on a free port."""
    cache = tmp_path_factory.mktemp("cache")
    command = [sys.executable, "-m", "serving.main", "--port", "0", "--served-model-name", "tiny"]
    command += ["--max-model-len", "2048", "--max-num-seqs", str(SLOTS)]
    command += ["--max-num-batched-tokens", "64"]
    errors = (cache / "stderr").open("w+")
    server = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(cache), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
    server.lines = []
    server.errors = errors
    try:
        for line in server.stdout:
            server.lines.append(line.rstrip("\n"))
            if line.startswith("ready"):
                break
        yield server
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
        errors.close()


@pytest.fixture(scope="module")
def url(process):
    assert process.lines and process.lines[-1].startswith("ready"), process.lines
    return re.fullmatch(r"ready: (http://127.0.0.1:\d+) serves tiny", process.lines[-1])[1]


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="anything", max_retries=0) as client:
        yield client


def running(url):
    text = httpx.get(f"{url}/metrics").text
    pattern = r"^vllm:num_requests_(?:running|waiting)\{.*\} (.*)$"
    return sum(float(value) for value in re.findall(pattern, text, re.MULTILINE))


def wait_until_idle(url):
    deadline = time.monotonic() + 30
    while running(url) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running(url) == 0


def complete(client, prompt, tokens, **options):
    """Streams a completion to its end; returns its text and its number of chunks."""
    stream = client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
        **options,
    )
    texts = [chunk.choices[0].text for chunk in stream]
    return "".join(texts), len(texts)


def test_the_server_says_what_it_serves_and_when_it_is_ready(process, url):
    assert "RANDOM weights" in process.lines[0]
    assert any(line.startswith("compiling") for line in process.lines)
    assert httpx.get(f"{url}/health").status_code == 200


def test_models_are_listed(client):
    [model] = client.models.list()
    assert model.id == "tiny" and model.max_model_len == 2048
    assert client.models.retrieve("tiny").id == "tiny"


def test_completions_are_reproducible_and_counted(client):
    def create():
        return client.completions.create(
            model="tiny", prompt="Hello world", max_tokens=6, seed=5, logprobs=2, echo=True
        )

    one, other = create(), create()
    assert one.choices[0].text == other.choices[0].text
    assert one.choices[0].text.startswith("Hello world")
    assert one.usage.completion_tokens <= 6
    assert len(one.choices[0].logprobs.tokens) == one.usage.total_tokens


def test_a_stream_says_the_same_as_an_answer_one_token_at_a_time(client):
    whole = client.completions.create(
        model="tiny", prompt="abc", max_tokens=9, temperature=0, extra_body={"ignore_eos": True}
    )
    text, chunks = complete(client, "abc", 9)
    assert text == whole.choices[0].text and chunks == 9


def test_echoed_logprobs_are_those_of_generation(client):
    options = {"model": "tiny", "max_tokens": 5, "temperature": 0, "logprobs": 1}
    generated = client.completions.create(
        prompt=[70, 71, 72], extra_body={"return_tokens_as_token_ids": True}, **options
    ).choices[0]
    ids = [int(name.removeprefix("token_id:")) for name in generated.logprobs.tokens]
    scored = client.completions.create(prompt=[70, 71, 72, *ids], echo=True, **options)
    echoed = scored.choices[0].logprobs.token_logprobs[3 : 3 + len(ids)]
    assert echoed == generated.logprobs.token_logprobs


def test_chats_answer_and_stream(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    options = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options)
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert message.reasoning_content == message.reasoning
    assert whole.usage.completion_tokens_details.reasoning_tokens <= 12
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    # The second time the prompt's beginning is cached.
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert reasoning == message.reasoning_content


def test_a_chat_may_offer_tools(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], tools=[tool], max_tokens=3
    )
    assert answer.choices[0].finish_reason in ("length", "stop", "tool_calls")


SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["n", "ok"],
    "additionalProperties": False,
}
GREET = {
    "type": "function",
    "function": {
        "name": "greet",
        "parameters": {
            "type": "object",
            "properties": {"who": {"enum": ["world", "moon"]}, "count": {"enum": [1, 2]}},
            "required": ["who", "count"],
        },
    },
}
OFF = {"thinking": {"type": "disabled"}}


def ask(client, messages, *, text=None, extra=None, **options):
    """One greedy turn; `text` is what the assistant has to say."""
    forced = {"structured_outputs": {"choice": [text]}} if text else {}
    return client.chat.completions.create(
        model="tiny",
        messages=messages,
        temperature=0,
        max_tokens=300,
        extra_body=forced | (extra or {}),
        **options,
    )


def test_a_json_schema_holds_and_is_parsed(client):
    class Answer(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        ok: bool
        kind: Literal["a", "b"]

    answer = client.chat.completions.parse(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        response_format=Answer,
        max_tokens=300,
        extra_body=OFF,
    )
    assert isinstance(answer.choices[0].message.parsed, Answer)
    for seed in range(3):
        text = client.completions.create(
            model="tiny",
            prompt="x",
            max_tokens=400,
            seed=seed,
            extra_body={"structured_outputs": {"json": SCHEMA}},
        )
        value = json.loads(text.choices[0].text)
        assert set(value) == {"n", "ok"} and 0 <= value["n"] <= 99


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "greet"}}]
)
def test_a_forced_call_is_made_and_fits_its_schema(client, choice):
    messages = [{"role": "user", "content": "Hi"}]
    options = {"tools": [GREET], "tool_choice": choice, "parallel_tool_calls": False}
    answer = ask(client, messages, extra=OFF, **options)
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "greet"
    assert arguments["who"] in ("world", "moon") and arguments["count"] in (1, 2)
    with client.chat.completions.stream(
        model="tiny", messages=messages, temperature=0, max_tokens=300, extra_body=OFF, **options
    ) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert streamed.function.arguments == call.function.arguments


def test_strict_tools_are_parsed(client):
    class Greet(pydantic.BaseModel):
        who: Literal["world", "moon"]

    tool = openai.pydantic_function_tool(Greet)
    answer = client.chat.completions.parse(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
        extra_body=OFF,
    )
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Greet)


def test_bans_and_biases_hold(client):
    def tokens(**extra):
        answer = client.completions.create(
            model="tiny",
            prompt="x",
            max_tokens=20,
            logprobs=0,
            seed=3,
            extra_body={"ignore_eos": True, "return_token_ids": True} | extra,
        )
        return answer.choices[0].token_ids

    free = tokens()
    assert set(tokens(allowed_token_ids=[70, 71])) <= {70, 71}
    assert set(tokens(logit_bias={"75": 100})) == {75}
    assert free[0] not in tokens(logit_bias={str(free[0]): -100})
    assert set(tokens(allowed_token_ids=[70, 71], bad_words=["e"])) <= {70, 71}
    assert tokens(repetition_penalty=1.0, presence_penalty=0.0) == free


def test_chat_logprobs_add_up(client):
    answer = ask(client, [{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy


def test_responses_answer_stream_and_are_parsed(client):
    class Answer(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        ok: bool

    options = {"model": "tiny", "input": "Hi", "max_output_tokens": 300, "extra_body": OFF}
    whole = client.responses.create(temperature=0, **options)
    assert whole.status in ("completed", "incomplete")
    with client.responses.stream(temperature=0, **options) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert text == whole.output_text
    parsed = client.responses.parse(text_format=Answer, **options)
    assert isinstance(parsed.output_parsed, Answer)
    flat = {"type": "function", **GREET["function"]}
    called = client.responses.create(
        tools=[flat], tool_choice="required", parallel_tool_calls=False, **options
    )
    assert [item.type for item in called.output] == ["function_call"]


def test_anthropics_client_is_served_too(url):
    with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as client:
        options = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 300,
            "thinking": {"type": "disabled"},
        }
        message = client.messages.create(extra_body={"temperature": 0}, **options)
        with client.messages.stream(extra_body={"temperature": 0}, **options) as stream:
            assert "".join(stream.text_stream) == "".join(b.text for b in message.content)
        counted = client.messages.count_tokens(
            model="tiny", messages=options["messages"], thinking={"type": "disabled"}
        )
        assert counted.input_tokens == message.usage.input_tokens
        tool = {"name": "greet", "input_schema": GREET["function"]["parameters"]}
        called = client.messages.create(tools=[tool], tool_choice={"type": "any"}, **options)
        assert called.stop_reason == "tool_use" and called.content[0].input["count"] in (1, 2)
        with pytest.raises(anthropic.BadRequestError, match="temperature is 3"):
            client.messages.create(extra_body={"temperature": 3}, **options)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("tools", [[GREET], None])
def test_a_three_turn_chat_reuses_the_turns_before(client, url, thinking, tools):
    httpx.post(f"{url}/reset_prefix_cache")
    end = httpx.post(f"{url}/tokenize", json={"prompt": "</think>"}).json()["tokens"][0]
    # Thinking ends at once, and what is said is the same after decoding and encoding again.
    extra = {"logit_bias": {str(end): 100}} if thinking else OFF
    options = {"extra": extra} | ({"tools": tools} if tools else {})
    messages = [{"role": "system", "content": f"{thinking} {bool(tools)} " + "rules " * 20}]
    reusable = 0
    for turn, text in enumerate(("The first answer is short.", "So is this.", "And this.")):
        messages.append({"role": "user", "content": f"Question {turn}?"})
        answer = ask(client, messages, text=text, **options)
        assert answer.choices[0].message.content == text
        usage = answer.usage
        assert usage.prompt_tokens_details.cached_tokens >= reusable - PAGE
        assert usage.prompt_tokens_details.cached_tokens % PAGE == 0
        messages.append({"role": "assistant", "content": text, "reasoning_content": ""})
        # Without tools the end of the prompt differs once the turn's thinking is dropped; the
        # last token of an answer is not computed.
        kept = usage.total_tokens - 1 if tools or not thinking else usage.prompt_tokens - 1
        reusable = kept
    assert usage.prompt_tokens_details.cached_tokens > 0


def test_tool_turns_are_reused(client, url):
    httpx.post(f"{url}/reset_prefix_cache")
    messages = [{"role": "user", "content": "Greet. " * 10}]
    options = {"tools": [GREET], "extra": OFF}
    first = ask(client, messages, tool_choice="required", parallel_tool_calls=False, **options)
    message = first.choices[0].message
    call = message.tool_calls[0].model_dump(exclude={"index"})
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "done"},
    ]
    second = ask(client, messages, text="Done.", **options)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.total_tokens - 1 - PAGE


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.NotFoundError, match="The model `other` does not exist"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature is 3.0"):
        client.completions.create(model="tiny", prompt="x", temperature=3)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens"):
        client.completions.create(model="tiny", prompt=[5] * 3000)


def test_32_streams_at_once_equal_their_solo_runs(client, url):
    jobs = [("word " * (1 + number % 7) + str(number), 3 + number % 11) for number in range(32)]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda job: complete(client, *job), jobs))
    assert together == [complete(client, *job) for job in jobs]
    wait_until_idle(url)


def test_clients_that_hang_up_free_their_slots(client, url):
    def start(number):
        body = {"prompt": "x" * (number + 1), "max_tokens": 1000, "ignore_eos": True}
        if number % 2:
            with contextlib.suppress(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/completions", json=body, timeout=2)
            return
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as answer:
            next(answer.iter_lines())

    with concurrent.futures.ThreadPoolExecutor(2 * SLOTS) as pool:
        list(pool.map(start, range(2 * SLOTS)))
    wait_until_idle(url)
    assert complete(client, "x", 3)[1] == 3


def test_a_second_server_on_the_port_is_refused(url, process):
    port = url.rpartition(":")[2]
    command = [sys.executable, "-m", "serving.main", "--port", port]
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert second.returncode == 3
    assert second.stderr == (
        f"serving.main: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    )


def test_a_signal_answers_what_is_open_and_ends_with_status_0(url, process):
    body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
        while not running(url):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert answer.result().json()["usage"]["completion_tokens"] == 60
    assert process.wait(timeout=60) == 0
    process.errors.seek(0)
    assert "Traceback" not in process.errors.read()
