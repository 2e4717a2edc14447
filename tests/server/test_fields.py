"""What becomes of fields: the official clients' types are the oracle of what must be accepted."""

import logging
import types
import typing
from collections.abc import Iterator
from typing import Any, NotRequired, Required

import anthropic.types as anthropic_types
import anthropic.types.beta as beta_types
import openai.types.chat as openai_types
import openai.types.responses as response_types
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params, response_input_item_param
from openai.types.shared_params import Reasoning as TheirReasoning
from pydantic import TypeAdapter, ValidationError
from typing_extensions import is_typeddict

from hmt.server import fields
from hmt.server.anthropic.schemas import (
    Counted,
    MessagesBody,
    OfferedTool,
    OutputConfig,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from hmt.server.fields import Fields, nearest
from hmt.server.openai.messages import Message, Part
from hmt.server.openai.schemas import ChatBody, CompletionBody, EmbeddingsBody, StreamOptions
from hmt.server.openai.tools import Tool
from hmt.server.responses.items import (
    CallItem,
    InputPart,
    ItemReference,
    MessageItem,
    OutputItem,
    ReasoningItem,
)
from hmt.server.responses.schemas import Reasoning, ResponsesBody, TextConfig, TextFormat
from hmt.server.responses.tools import CustomTool, FunctionTool, NamespaceTool

# The schema of each official request, and of its variants that hold only text.
REQUESTS = [
    (chat_params.CompletionCreateParamsNonStreaming, ChatBody),
    (chat_params.CompletionCreateParamsStreaming, ChatBody),
    (completion_create_params.CompletionCreateParamsNonStreaming, CompletionBody),
    (completion_create_params.CompletionCreateParamsStreaming, CompletionBody),
    (embedding_create_params.EmbeddingCreateParams, EmbeddingsBody),
    (message_create_params.MessageCreateParamsNonStreaming, MessagesBody),
    (message_create_params.MessageCreateParamsStreaming, MessagesBody),
    (beta_params.MessageCreateParamsNonStreaming, MessagesBody),
    (message_count_tokens_params.MessageCountTokensParams, Counted),
    (response_create_params.ResponseCreateParamsNonStreaming, ResponsesBody),
    (response_create_params.ResponseCreateParamsStreaming, ResponsesBody),
    (response_types.EasyInputMessageParam, MessageItem),
    (response_input_item_param.Message, MessageItem),
    (response_types.ResponseOutputMessageParam, MessageItem),
    (response_types.ResponseFunctionToolCallParam, CallItem),
    (response_types.ResponseCustomToolCallParam, CallItem),
    (response_input_item_param.FunctionCallOutput, OutputItem),
    (response_types.ResponseCustomToolCallOutputParam, OutputItem),
    (response_types.ResponseReasoningItemParam, ReasoningItem),
    (response_input_item_param.ItemReference, ItemReference),
    (response_types.FunctionToolParam, FunctionTool),
    (response_types.CustomToolParam, CustomTool),
    (response_types.NamespaceToolParam, NamespaceTool),
    (response_types.ResponseFormatTextJSONSchemaConfigParam, TextFormat),
]
# What the server cannot do at all; every other member of a union is tried.
NOT_SERVED = (
    "Image", "Audio", "File", "Document", "Search", "Custom", "Server", "Web", "Bash", "Code",
    "TextEditor", "Memory", "Computer", "MCP", "Mcp", "Container", "Browser", "ToolReference",
    "Toolset", "Compaction", "MidConv", "Advisor", "Fallback", "Connector", "ThreadContinue",
    "ToolSearch", "ToolAddition", "ToolRemoval", "ToolChange",
)  # fmt: skip
# Required parts whose types say less than their documents.
KNOWN: dict[str, Any] = {
    "id": "call_1", "tool_call_id": "call_1", "tool_use_id": "call_1", "name": "f",
    "arguments": "{}", "input_schema": {"type": "object"}, "schema": {"type": "object"},
    "budget_tokens": 1024, "max_tokens": 5, "stream": True, "model": "m", "prompt": "Hello",
}  # fmt: skip


def members(kind: Any) -> list[Any]:
    """Of a union those that can be served."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return [kind]
    found = [one for member in typing.get_args(kind) for one in members(member)]
    return [one for one in found if not any(word in str(one) for word in NOT_SERVED)]


def plain(kind: Any) -> Any:
    """Without Required, NotRequired and Annotated."""
    while typing.get_origin(kind) in (Required, NotRequired, typing.Annotated):
        kind = typing.get_args(kind)[0]
    return kind


def values(kind: Any, name: str = "") -> st.SearchStrategy[Any]:
    """JSON of an official type; its optional fields are absent or null."""
    kind = plain(kind)
    if name in KNOWN:
        return st.just(KNOWN[name])
    if is_typeddict(kind):
        return objects(kind)
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(one, name) for one in members(kind) if one is not type(None)])
    if origin is typing.Literal:
        return st.sampled_from(inside)
    if origin is dict:
        return st.just({})
    if inside:  # lists, iterables, sequences
        return st.lists(values(inside[0]), min_size=1, max_size=2)
    return {
        str: st.just("x"), int: st.just(1), float: st.just(1.0), bool: st.booleans(),
        object: st.just({}),
    }[kind]  # fmt: skip


def objects(kind: Any) -> st.SearchStrategy[dict[str, Any]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    needed = [name for name, hint in hints.items() if typing.get_origin(hint) is Required]
    required = {name: values(hints[name], name) for name in needed}
    optional = {name: st.none() for name in hints if name not in required}
    return st.fixed_dictionaries(required, optional=optional)


def is_sound(kind: type[Fields], body: dict[str, Any]) -> bool:
    """Whether a body is as the documents want it where the types leave it open.

    Anthropic's messages have content, thoughts and calls are the assistant's, results the user's.
    A response has a model and input, a result its call.
    """
    if issubclass(kind, ResponsesBody):
        return bool(body.get("model") and body.get("input"))
    if issubclass(kind, OutputItem):
        return body.get("call_id") is not None
    if not issubclass(kind, Counted):
        return True
    speakers = {"thinking": "assistant", "redacted_thinking": "assistant",
                "tool_use": "assistant", "tool_result": "user"}  # fmt: skip
    for message in body["messages"]:
        content = message.get("content")
        if content is None:
            return False
        blocks = content if isinstance(content, list) else []
        if any(speakers.get(one["type"], message["role"]) != message["role"] for one in blocks):
            return False
    return True


@pytest.mark.parametrize(("theirs", "ours"), REQUESTS, ids=lambda kind: kind.__name__)
def test_no_official_request_is_refused(theirs: Any, ours: type[Fields]) -> None:
    @settings(max_examples=150, deadline=None)
    @given(objects(theirs))
    def accepted(body: dict[str, Any]) -> None:
        if is_sound(ours, body):
            ours.model_validate(body)

    accepted()


PARTS = [
    (openai_types.ChatCompletionAssistantMessageParam, Message),
    (openai_types.ChatCompletionUserMessageParam, Message),
    (openai_types.ChatCompletionFunctionMessageParam, Message),
    (openai_types.ChatCompletionStreamOptionsParam, StreamOptions),
    (openai_types.ChatCompletionContentPartTextParam, Part),
    (openai_types.ChatCompletionContentPartRefusalParam, Part),
    (openai_types.ChatCompletionFunctionToolParam, Tool),
    (beta_types.BetaSystemMessageParam, Turn),
    (beta_types.BetaUserMessageParam, Turn),
    (beta_types.BetaOutputConfigParam, OutputConfig),
    (beta_types.BetaToolParam, OfferedTool),
    (beta_types.BetaTextBlockParam, TextBlock),
    (beta_types.BetaThinkingBlockParam, ThinkingBlock),
    (beta_types.BetaToolUseBlockParam, ToolUseBlock),
    (beta_types.BetaToolResultBlockParam, ToolResultBlock),
    (beta_types.BetaThinkingConfigEnabledParam, Thinking),
    (response_types.ResponseInputTextParam, InputPart),
    (response_types.ResponseInputImageParam, InputPart),
    (response_types.ResponseOutputTextParam, InputPart),
    (response_types.ResponseTextConfigParam, TextConfig),
    (TheirReasoning, Reasoning),
]


@pytest.mark.parametrize(("theirs", "ours"), REQUESTS + PARTS, ids=lambda kind: kind.__name__)
def test_every_official_field_has_been_thought_of(theirs: Any, ours: type[Fields]) -> None:
    known = {*ours.accepted(), *ours.IGNORED, *ours.REFUSED}
    assert set(typing.get_type_hints(theirs)) - known == set()


FUNCTION = {"name": "f", "arguments": "{}"}
ANSWERS: list[dict[str, Any]] = [
    {"content": "x"},
    {"content": None},
    {"content": "x", "annotations": []},
    {"content": None, "refusal": "No."},
    {"content": None, "tool_calls": []},
    {"content": None, "tool_calls": [{"id": "c", "type": "function", "function": FUNCTION}]},
    {"content": None, "function_call": FUNCTION},
]


@pytest.mark.parametrize("fields_", ANSWERS, ids=str)
def test_an_answer_can_be_sent_back(fields_: dict[str, Any]) -> None:
    answer = openai_types.ChatCompletionMessage(role="assistant", **fields_)
    for back in (answer.model_dump(), answer.model_dump(exclude_none=True), answer.to_dict()):
        message = Message.model_validate(back).plain()
        assert message["content"] == (answer.content or answer.refusal or "")
        called = answer.tool_calls or answer.function_call
        assert ("tool_calls" in message) == bool(called)
        if called:
            assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_the_streams_own_calls_can_be_sent_back() -> None:
    call = openai_types.chat_completion_chunk.ChoiceDeltaToolCall(
        index=0, id="c", type="function",
        function=openai_types.chat_completion_chunk.ChoiceDeltaToolCallFunction(**FUNCTION),
    )  # fmt: skip
    message = Message.model_validate({"role": "assistant", "tool_calls": [call.model_dump()]})
    assert message.plain()["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    ]


def test_anthropics_answer_can_be_sent_back() -> None:
    blocks = TypeAdapter(list[anthropic_types.ContentBlock]).validate_python([
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "It is", "citations": None},
        {"type": "tool_use", "id": "c", "name": "f", "input": {}},
    ])  # fmt: skip
    answer = {"role": "assistant", "content": [block.model_dump() for block in blocks]}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "late"}
    question = {"role": "user", "content": "What is late?"}
    body = {"model": "m", "max_tokens": 5, "messages": [question, answer, {"role": "user",
            "content": [result]}]}  # fmt: skip
    said = MessagesBody.model_validate(body).chat[1]
    assert (said["content"], said["reasoning_content"]) == ("It is", "Hm.")


CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "f"}}
ACCEPTED: list[tuple[type[Fields], dict[str, Any]]] = [
    (ChatBody, {"reasoning_effort": effort})
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max")
] + [
    (ChatBody, fields_)
    for fields_ in (
        {"verbosity": "low"}, {"top_logprobs": 0}, {"tool_choice": "auto"}, {"tools": []},
        {"metadata": {"n": 1}}, {"user": 5}, {"prediction": {"type": "content", "content": "x"}},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream_options": {"include_usage": False}}, {"n": None}, {"service_tier": "scale"},
        {"chat_template_kwargs": {"enable_thinking": False, "deep": [{"a": None}]}},
        {"max_tokens": -1}, {"max_completion_tokens": -1}, {"min_tokens": 3},
        {"stop_token_ids": [1, 2]}, {"repeat_penalty": 1.1}, {"repeat_last_n": 64},
        {"repetition_penalty": 1.2, "repeat_penalty": 1.2, "repeat_last_n": -1},
        # What front ends send with everything switched off.
        {"mirostat": 0, "mirostat_tau": 5, "typical_p": 1, "tfs_z": 1.0, "xtc_probability": 0,
         "dry_multiplier": 0, "dry_base": 1.75, "top_n_sigma": -1, "samplers": [],
         "do_sample": True, "skip_special_tokens": True, "best_of": 1, "use_beam_search": False,
         "functions": [], "include_reasoning": True, "reasoning_format": "auto"},
        {"never_heard_of": {"by": "anybody"}, "nothing": None, "temprature": None},
        {"tools": [TOOL | {"cache_control": {"type": "ephemeral"}}], "tool_choice": {
            "type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}},
    )
] + [
    (MessagesBody, {"max_tokens": 5} | fields_)
    for fields_ in (
        {"thread": {"type": "create"}}, {"output_config": {"effort": "high"}},
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        {"metadata": {"user_id": "u", "x": 1}}, {"thinking": {"type": "between_tools"}},
        {"tools": [{"name": "f", "input_schema": {}, "eager_input_streaming": True,
                    "allowed_callers": ["direct"], "defer_loading": True, "input_examples": [{}]}]},
    )
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields_"), ACCEPTED, ids=str)
def test_what_must_be_accepted(kind: type[Fields], fields_: dict[str, Any]) -> None:
    kind.model_validate(CHAT | fields_)


REFUSED: list[tuple[type[Fields], dict[str, Any], str]] = [
    (ChatBody, {"audio": {"voice": "x"}}, "audio"),
    (ChatBody, {"logits_processors": ["x"]}, "logits_processors"),
    (ChatBody, {"use_beam_search": True}, "use_beam_search"),
    (ChatBody, {"best_of": 2}, "best_of"),
    (ChatBody, {"web_search_options": {}}, "web_search_options"),
    (ChatBody, {"functions": [{"name": "f"}]}, "functions"),
    (ChatBody, {"guided_json": {}}, "guided_json"),
    (ChatBody, {"mirostat": 2}, "mirostat"),
    (ChatBody, {"typical_p": 0.9}, "typical_p"),
    (ChatBody, {"extra_body": {"top_k": 1}}, "extra_body"),
    (ChatBody, {"chat_template": "{{ 1 }}"}, "chat_template"),
    (ChatBody, {"enable_thinking": False}, "enable_thinking"),
    (ChatBody, {"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
    (ChatBody, {"response_format": {"type": "json_object", "schema": {}}}, "schema"),
    (MessagesBody, {"max_tokens": 5, "mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    (MessagesBody, {"max_tokens": 5, "compaction": {}}, "compaction"),
    (MessagesBody, {"max_tokens": 5, "tools": [{"name": "f", "input_schema": {},
     "allowed_callers": ["code_execution_20250825"]}]}, "allowed_callers"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields_", "param"), REFUSED, ids=str)
def test_what_would_change_the_answer_is_refused(
    kind: type[Fields], fields_: dict[str, Any], param: str
) -> None:
    with pytest.raises(ValidationError) as error:
        kind.model_validate(CHAT | fields_)
    (told,) = error.value.errors()
    assert (told["type"], told["ctx"]["param"]) == ("unsupported", param)
    assert len(told["msg"]) > 10


RESPONSE = {"model": "m", "input": "Hi"}
SEARCH = {"type": "web_search", "external_web_access": True}
ITEMS_ACCEPTED: list[dict[str, Any]] = [
    # As Codex and the AI SDK send them.
    {"store": False, "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"},
     "prompt_cache_key": "k", "client_metadata": {"a": "b"}, "tool_choice": "auto"},
    {"tools": [SEARCH, {"type": "image_generation", "output_format": "png"}]},
    {"truncation": "disabled", "background": False, "metadata": {"n": 1}, "conversation": None},
    {"input": [{"role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
               {"type": "web_search_call", "id": "w", "status": "completed"}]},
    {"input": None, "previous_response_id": "resp_1"},
]  # fmt: skip


@pytest.mark.parametrize("fields_", ITEMS_ACCEPTED, ids=str)
def test_what_must_be_accepted_of_responses(fields_: dict[str, Any]) -> None:
    ResponsesBody.model_validate(RESPONSE | fields_)


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True, "messages": [
        {"role": "assistant", "content": "It"}]}, "add_generation_prompt"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"max_tokens": 0}, ""),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}}},
     "tool_choice"),
    ({f"unknown_{n}": 1 for n in range(33)}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("fields_", "param"), CONTRADICTIONS, ids=str)
def test_what_contradicts_itself_is_refused(fields_: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as error:
        ChatBody.model_validate(CHAT | fields_)
    assert [told["ctx"]["param"] for told in error.value.errors()] == [param]


@pytest.mark.parametrize(("name", "meant"), [
    ("temprature", "temperature"), ("max_token", "max_tokens"), ("maxTokens", "max_tokens"),
    ("Temperature", "temperature"), ("topK", "top_k"), ("top-p", "top_p"), ("seeds", "seed"),
    ("frequency_penality", "frequency_penalty"), ("tool_choise", "tool_choice"),
    ("mesages", "messages"), ("logprob", "logprobs"),
])  # fmt: skip
def test_a_misspelt_field_is_refused(name: str, meant: str) -> None:
    with pytest.raises(ValidationError, match=f"did you mean '{meant}'"):
        ChatBody.model_validate(CHAT | {name: 1})


def distance(left: str, right: str) -> int:
    """Levenshtein's, with swaps of neighbours, by its recursive definition."""
    if not left or not right:
        return len(left) + len(right)
    best = min(
        distance(left[:-1], right) + 1,
        distance(left, right[:-1]) + 1,
        distance(left[:-1], right[:-1]) + (left[-1] != right[-1]),
    )
    if len(left) > 1 and len(right) > 1 and left[-2:] == right[-1] + right[-2]:
        best = min(best, distance(left[:-2], right[:-2]) + 1)
    return best


@settings(max_examples=200, deadline=None)
@given(st.text("abc", max_size=5), st.text("abc", max_size=5))
def test_distances_are_right(left: str, right: str) -> None:
    assert fields._distance(left, right) == distance(left, right)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["temperature", "max_tokens", "messages", "stop_token_ids"]), st.data())
def test_one_wrong_letter_is_noticed(name: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(name) - 1))
    letter = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz0"))
    for wrong in (name[:place] + letter + name[place + 1 :], name[:place] + name[place + 1 :],
                  name[:place] + letter + name[place:]):  # fmt: skip
        assert wrong == name or nearest(ChatBody, wrong) is not None


@pytest.mark.parametrize("name", [
    "mode", "title", "tags", "id", "ttl", "trace", "tool", "response", "stream_usage", "character",
    "preset", "api_key", "headers", "caching", "litellm_call_id", "num_retries", "deployment_id",
    "organization", "conversation_id", "thread_id", "project", "x" * 10_000,
])  # fmt: skip
def test_other_names_are_no_misspellings(name: str) -> None:
    ChatBody.model_validate(CHAT | {name: 1})


@pytest.fixture
def log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[pytest.LogCaptureFixture]:
    monkeypatch.setattr(fields, "_logged", set())
    with caplog.at_level(logging.WARNING, "hmt"):
        yield caplog


def test_an_unknown_field_is_named_once_without_its_value(log: pytest.LogCaptureFixture) -> None:
    for secret in ("hunter2", "hunter3"):
        ChatBody.model_validate(CHAT | {"never_heard_of": secret, "user": secret})
    (line,) = log.messages
    assert "never_heard_of" in line and "hunter" not in line


def test_clients_cannot_fill_the_log(log: pytest.LogCaptureFixture) -> None:
    for number in range(300):
        ChatBody.model_validate(CHAT | {f"zz{number}\n" + "z" * 1000: 1})
    assert len(log.messages) == 101 and "others are not" in log.messages[-1]
    assert max(map(len, log.messages)) < 200
    assert not any("\n" in line for line in log.messages)
