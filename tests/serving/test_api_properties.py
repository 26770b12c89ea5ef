"""Whatever the OpenAPI document allows, and what it does not, is answered without a 5xx."""

import pathlib

import fake_engine
import hypothesis
import pytest
import schemathesis
from fake_engine import FakeEngine, client_of
from hypothesis import HealthCheck
from hypothesis import strategies as st

from dsv41_jax.hf_config import load_config
from serving.api.app import create_app
from serving.api.context import ApiOptions, Context
from serving.api.metrics import Metrics
from serving.async_engine import AsyncEngine
from serving.tokenizer import Tokenizer

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
FEW_REQUESTS = 60
REQUESTS = 500
MANY_REQUESTS = 5000
STREAM = "text/event-stream"


@pytest.fixture(scope="module")
def app():
    tokenizer = fake_engine.make_tokenizer()
    # Ends by length alone, whatever the request says about EOS.
    tokens = tokenizer.encode("</think>Some text, and <b>more</b> of it.\n") * 20
    engine = FakeEngine(tokenizer, lambda request: tokens)
    with client_of(engine, max_choices=16, max_model_len=96) as client:
        yield client.app


def check(case, response):
    assert response.status_code < 500, (case.method, case.path, case.body, response.text)
    kind = "".join(response.headers.get("content-type", []))
    if kind.startswith(STREAM):
        assert b'"InternalServerError"' not in response.content, (case.body, response.text)
    elif case.path == "/metrics" or not response.content:
        return
    elif response.status_code >= 400:
        error = response.json()["error"]
        assert error["message"] and error["code"] == response.status_code
        assert "Traceback" not in response.text


def ask(app, requests):
    """Sends random requests to every operation."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [result.ok() for result in schema.get_all_operations()]
    heavy = [operation for operation in operations if operation.method.upper() == "POST"]
    sent = set()

    # Twice as often those with a body.
    @hypothesis.given(data=st.data())
    @hypothesis.settings(
        max_examples=requests,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    def property_holds(data):
        operation = data.draw(st.sampled_from([*operations, *heavy]))
        mode = data.draw(st.sampled_from(list(schemathesis.GenerationMode)))
        try:
            strategy = operation.as_strategy(generation_mode=mode)
            case = data.draw(strategy)
        except (hypothesis.errors.Unsatisfiable, schemathesis.errors.SchemathesisError):
            hypothesis.reject()  # nothing wrong can be said about an operation without input
        sent.add(case.path)
        check(case, case.call())

    property_holds()
    return sent


def test_no_random_request_is_answered_with_a_5xx(app):
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses"} <= ask(app, REQUESTS)


def test_the_real_engine_answers_random_requests_too(engine):
    running = AsyncEngine(engine)
    try:
        context = Context(
            engine=running,
            tokenizer=Tokenizer.open(GOLDEN / "tiny_b"),
            options=ApiOptions(
                model_names=("tiny",),
                model_root="",
                max_model_len=engine.limits.max_model_len,
                vocab_size=load_config(GOLDEN / "tiny_b").vocab_size,
                max_choices=2,
            ),
            metrics=Metrics(model_name="tiny", max_model_len=160, stats=running.stats),
        )
        ask(create_app(context), FEW_REQUESTS)
        assert running.is_alive
        stats = running.stats()
        assert stats.num_running == stats.num_waiting == 0
    finally:
        running.shutdown()


@pytest.mark.full
def test_no_request_of_many_is_answered_with_a_5xx(app):
    ask(app, MANY_REQUESTS)
