import json

import fake_engine
import pytest
from fake_engine import FakeEngine, client_of, says


@pytest.fixture(scope="module")
def tokenizer():
    return fake_engine.make_tokenizer()


@pytest.fixture
def engine(tokenizer):
    return FakeEngine(tokenizer, says(tokenizer, "x"))


@pytest.fixture
def client(engine):
    with client_of(engine) as client:
        yield client


def test_models_are_listed_and_retrieved_under_every_name(client):
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["fake", "alias"]
    card = client.get("/v1/models/alias").json()
    assert card == listed["data"][1]
    assert card["object"] == "model" and card["max_model_len"] == fake_engine.MAX_MODEL_LEN
    assert isinstance(card["created"], int) and card["owned_by"]
    missing = client.get("/v1/models/org/none")
    assert missing.status_code == 404
    assert missing.json()["error"]["param"] == "model"


def test_health_is_empty_and_503_once_the_engine_is_dead(client, engine):
    for method, path in (("get", "/health"), ("get", "/ping"), ("post", "/ping")):
        response = getattr(client, method)(path)
        assert (response.status_code, response.content) == (200, b"")
    engine.is_alive = False
    assert client.get("/health").json()["error"]["type"] == "ServiceUnavailableError"


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/reset_prefix_cache"), ("POST", "/flush_cache"), ("GET", "/flush_cache")],
)
def test_the_prefix_cache_is_reset_whatever_the_body(client, engine, method, path):
    answer = client.request(method, path, content=b"{nonsense")
    assert (answer.status_code, answer.json()) == (200, {"success": True})
    assert engine.resets == 1


def test_server_and_tokenizer_tell_about_themselves(engine):
    told = {"tokenizer_info": {"eos_token": "</s>"}, "server_info": {"version": "1"}}
    with client_of(engine, **told) as client:
        for name, content in told.items():
            assert client.get(f"/{name}").json() == content


def test_version_and_load(client):
    assert set(client.get("/version").json()) == {"version"}
    assert client.get("/load").json() == {"server_load": 0}


def test_metrics_have_vllms_names_and_labels(client):
    client.post("/v1/completions", json={"prompt": "hi"})
    text = client.get("/metrics").text
    labels = '{engine="0",model_name="fake"}'
    assert f"vllm:kv_cache_usage_perc{labels} 0.5" in text
    assert f"vllm:generation_tokens_total{labels} 4.0" in text
    assert f"vllm:e2e_request_latency_seconds_count{labels} 1.0" in text
    assert f"vllm:time_to_first_token_seconds_count{labels} 1.0" in text
    for phase in ("queue", "inference", "prefill", "decode"):
        assert f"vllm:request_{phase}_time_seconds_count{labels} 1.0" in text
    assert f"vllm:request_queue_time_seconds_sum{labels} 0.2" in text
    assert f"vllm:request_params_n_sum{labels} 1.0" in text
    assert f"vllm:prefix_cache_hits_total{labels} 0.0" in text
    assert f"vllm:iteration_tokens_total_sum{labels} 206.0" in text
    assert 'vllm:iteration_tokens_total_bucket{engine="0",le="100.0",model_name="fake"} 2' in text
    assert 'vllm:cache_config_info{engine="0"} 1.0' in text
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",' in text
    assert client.head("/metrics").status_code == 200


def test_tokenize_and_detokenize_are_inverse(client, tokenizer):
    body = client.post("/tokenize", json={"prompt": "Hi <｜User｜>"}).json()
    assert body["count"] == len(body["tokens"]) and body["token_strs"] is None
    assert body["tokens"] == tokenizer.encode("Hi <｜User｜>")
    assert body["max_model_len"] == fake_engine.MAX_MODEL_LEN
    text = client.post("/detokenize", json={"tokens": body["tokens"]}).json()
    assert text == {"prompt": "Hi <｜User｜>"}


def test_tokenize_gives_token_strings_when_asked(client):
    body = client.post("/tokenize", json={"prompt": "Hi", "return_token_strs": True}).json()
    assert "".join(body["token_strs"]) == "Hi"


def test_tokenize_renders_a_chat_as_the_chat_route_does(client, engine):
    chat = {"messages": [{"role": "user", "content": "hi"}], "thinking": {"type": "disabled"}}
    tokens = client.post("/tokenize", json=chat).json()["tokens"]
    client.post("/v1/chat/completions", json=chat)
    assert tuple(tokens) == engine.requests[0].prompt_token_ids


def test_request_ids_are_taken_over_or_made(client):
    assert client.get("/health", headers={"X-Request-Id": "abc"}).headers["x-request-id"] == "abc"
    made = [client.get("/health").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    too_long = client.get("/health", headers={"X-Request-Id": "a" * 200})
    assert len(too_long.headers["x-request-id"]) == 32


def test_the_request_id_is_part_of_the_answers_id(client):
    response = client.post(
        "/v1/completions", json={"prompt": "hi"}, headers={"X-Request-Id": "abc"}
    )
    assert response.json()["id"] == "cmpl-abc"


def test_every_origin_is_allowed(client):
    response = client.get("/health", headers={"Origin": "http://example.com"})
    assert response.headers["access-control-allow-origin"] == "*"
    preflight = client.options(
        "/v1/completions",
        headers={"Origin": "http://example.com", "Access-Control-Request-Method": "POST"},
    )
    assert preflight.status_code == 200


def test_any_key_passes_when_none_is_configured(client):
    for value in ("Bearer ", "Bearer x", "nonsense"):
        assert client.get("/v1/models", headers={"Authorization": value}).status_code == 200


def test_an_api_key_guards_v1_only(engine):
    with client_of(engine, api_key="secret") as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            response = client.get("/v1/models", headers=headers)
            assert response.status_code == 401
            assert response.json()["error"] == {
                "message": "the API key is missing or wrong",
                "type": "Unauthorized",
                "param": None,
                "code": 401,
            }
            assert response.headers["x-request-id"]
        right = {"Authorization": "Bearer secret"}
        assert client.get("/v1/models", headers=right).status_code == 200
        assert client.get("/health").status_code == 200
        preflight = {"Origin": "http://a", "Access-Control-Request-Method": "GET"}
        assert client.options("/v1/models", headers=preflight).status_code == 200


def test_a_closing_server_refuses_new_requests(client):
    client.context.open_requests.closing = True
    for stream in (False, True):
        response = client.post("/v1/completions", json={"prompt": "hi", "stream": stream})
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "the server is shutting down"
    assert client.get("/health").status_code == 503


def test_the_openapi_document_describes_the_bodies(client):
    document = client.get("/openapi.json").json()
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]
    schema = body["content"]["application/json"]["schema"]
    assert "prompt" in schema["properties"]
    assert "$ref" not in str(schema)


def test_two_requests_may_have_one_id(client, engine):
    for _ in range(2):
        client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "abc"})
    first, second = engine.requests
    assert first.request_id != second.request_id


def test_each_request_is_logged_as_one_line_without_its_prompt(client, caplog):
    with caplog.at_level("INFO", logger="serving.access"):
        client.post("/v1/completions", json={"prompt": "SECRET"}, headers={"X-Request-Id": "abc"})
        client.get("/health")
    [record] = caplog.records
    entry = json.loads(record.message)
    assert entry["request_id"] == "abc" and entry["status"] == 200
    assert (entry["method"], entry["path"]) == ("POST", "/v1/completions")
    assert "SECRET" not in record.message


def test_prompts_are_logged_when_asked(engine, caplog):
    with client_of(engine, log_requests=True) as client:
        with caplog.at_level("INFO", logger="serving.api"):
            client.post("/v1/completions", json={"prompt": "SECRET", "seed": 5})
    [record] = [r for r in caplog.records if r.name == "serving.api"]
    entry = json.loads(record.message)
    assert entry["prompt"] == "SECRET" and entry["sampling"]["seed"] == 5


def test_long_prompts_are_encoded_like_short_ones(client, tokenizer):
    text = "word " * 5000
    body = client.post("/tokenize", json={"prompt": text}).json()
    assert body["tokens"] == tokenizer.encode(text)
