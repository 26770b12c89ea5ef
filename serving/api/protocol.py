"""Request bodies: types and field names; ranges are checked where they are used."""

from typing import Annotated, Any, TypeVar

import orjson
import pydantic
from starlette.requests import Request as HttpRequest

from serving.api.errors import ApiError, bad_request

Model = TypeVar("Model", bound=pydantic.BaseModel)
TokenIds = list[int]
Number = Annotated[float, pydantic.Field(allow_inf_nan=False)]


class _Body(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class StreamOptions(_Body):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(_Body):
    """What completions and chats have in common; null is the same as left out."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logprob_token_ids: list[int] | None = None
    structured_outputs: dict[str, Any] | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: Number | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    thinking_token_budget: int | None = None
    stream_interval: int | None = None
    lora_request: Any = None
    kv_transfer_params: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    logits_processors: Any = None
    vllm_xargs: Any = None
    add_special_tokens: bool | None = None
    detokenize: bool | None = None
    spaces_between_special_tokens: bool | None = None
    user: str | None = None


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    prompt: str | list[str] | TokenIds | list[TokenIds] | None = None
    prompt_embeds: Any = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    response_format: dict[str, Any] | None = None


class ChatFields(_Body):
    """The fields of a chat that make its prompt; `serving.chat` checks what they hold."""

    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    response_format: Any = None
    thinking: Any = None
    reasoning_effort: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template: str | None = None
    documents: list[Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class ChatBody(ChatFields, GenerationBody):
    """Body of POST /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None


class TokenizeBody(ChatFields):
    """Body of POST /tokenize: a prompt, or the fields of a chat."""

    model: str | None = None
    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Body):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


def _explain(error: pydantic.ValidationError) -> ApiError:
    """The first fault, in one sentence."""
    faults = error.errors(include_url=False, include_context=False)
    first = faults[0]
    param = str(first["loc"][0]) if first["loc"] else None
    same = [fault for fault in faults if fault["loc"][:1] == first["loc"][:1]]
    if param is None:
        return bad_request("the body must be a JSON object")
    if first["type"] == "missing":
        return bad_request(f"{param} is missing", param)
    reasons = dict.fromkeys(fault["msg"].removeprefix("Input should be ") for fault in same)
    where = "".join(
        f"[{key}]" if isinstance(key, int) else f".{key}"
        for key in first["loc"][1:]
        if len(same) == 1
    )
    return bad_request(f"{param}{where} should be {' or '.join(reasons)}", param)


async def read_body(request: HttpRequest, model: type[Model], *, limit: int) -> Model:
    """Read and check a JSON body.

    Args:
      request: the HTTP request.
      model: what it should hold.
      limit: most bytes.

    Raises:
      ApiError: 400 for a wrong content type, malformed JSON or a wrong type, naming the field;
        413 for a body over the limit.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise bad_request(
            f"the content type is {media_type or 'missing'}; it must be application/json"
        )
    chunks = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise ApiError(413, f"the body is larger than {limit} bytes")
        chunks.append(chunk)
    try:
        content = orjson.loads(b"".join(chunks))
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error
    try:
        return model.model_validate(content)
    except pydantic.ValidationError as error:
        raise _explain(error) from error


def json_body(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads `model`, without references."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, list):
            return [inline(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inline(definitions[node["$ref"].rpartition("/")[2]])
        return {key: inline(value) for key, value in node.items()}

    content = {"application/json": {"schema": inline(schema)}}
    return {"requestBody": {"required": True, "content": content}}
