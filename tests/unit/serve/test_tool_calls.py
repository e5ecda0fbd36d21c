"""Tools over HTTP with the stock `openai` client: call, answer with results, go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from k3ray.serve.prompts import PromptBounds
from tests.support.endpoint import Endpoint, running_endpoint
from tests.support.scripted_router import ScriptedRouter

USER: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter(num_stacks=1)


@pytest.fixture
def endpoint(router: ScriptedRouter) -> Iterator[Endpoint]:
    bounds = PromptBounds(vocab_size=512, context=4096)
    with running_endpoint(router, bounds=bounds) as running:
        yield running


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[OpenAI]:
    url = f"{endpoint.url}/v1"
    with OpenAI(base_url=url, api_key="none", timeout=20.0, max_retries=0) as stock:
        yield stock


@pytest.fixture
def script(endpoint: Endpoint, router: ScriptedRouter) -> list[int]:
    """The model says "so", then calls add twice."""
    special = endpoint.tokenizer.special

    def tag(side: str, text: str) -> list[int]:
        return [special(side), *text.encode(), special("<|sep|>")]

    def argument(key: str, kind: str, value: str) -> list[int]:
        head = tag("<|open|>", f'argument key="{key}" type="{kind}"')
        return [*head, *value.encode(), *tag("<|close|>", "argument")]

    tokens = [
        *b"so", *tag("<|close|>", "response"), *tag("<|open|>", "tools"),
        *tag("<|open|>", 'call tool="add" index="1"'),
        *argument("a", "number", "1"), *argument("note", "string", 'a "b"\u4e16'),
        *tag("<|close|>", "call"),
        *tag("<|open|>", 'call tool="add" index="2"'), *tag("<|close|>", "call"),
        *tag("<|close|>", "tools"), *tag("<|close|>", "message"), special("<|end_of_msg|>"),
    ]  # fmt: skip
    router.token = lambda request, position: tokens[position]
    return tokens


def test_a_whole_answer_with_calls(client: OpenAI, script: list[int]) -> None:
    choice = client.chat.completions.create(
        model="k3", messages=USER, tools=TOOLS, max_tokens=500
    ).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "so"
    calls = choice.message.tool_calls
    assert calls is not None
    assert [call.type for call in calls] == ["function", "function"]
    assert len({call.id for call in calls}) == 2
    arguments = [json.loads(call.function.arguments) for call in calls if call.type == "function"]
    assert arguments == [{"a": 1, "note": 'a "b"\u4e16'}, {}]


def test_the_stream_of_the_client_gives_the_same(client: OpenAI, script: list[int]) -> None:
    with client.chat.completions.stream(
        model="k3", messages=USER, tools=TOOLS, max_tokens=500
    ) as stream:
        pieces = [event.arguments_delta for event in stream
                  if event.type == "tool_calls.function.arguments.delta"]  # fmt: skip
        choice = stream.get_final_completion().choices[0]
    whole = client.chat.completions.create(
        model="k3", messages=USER, tools=TOOLS, max_tokens=500
    ).choices[0]
    assert choice.finish_reason == whole.finish_reason == "tool_calls"
    assert choice.message.content == whole.message.content
    for streamed, asked in zip(
        choice.message.tool_calls or (), whole.message.tool_calls or (), strict=True
    ):
        assert asked.type == "function"
        assert streamed.function.name == asked.function.name
        assert streamed.function.arguments == asked.function.arguments
    assert len(pieces) > 5, "arguments grow while they are written"


def test_results_are_sent_back(
    client: OpenAI, endpoint: Endpoint, router: ScriptedRouter, script: list[int]
) -> None:
    message = client.chat.completions.create(
        model="k3", messages=USER, tools=TOOLS, max_tokens=500
    ).choices[0].message  # fmt: skip
    calls = message.tool_calls or []
    results: Any = [
        {"role": "tool", "tool_call_id": call.id, "content": f"r{place}"}
        for place, call in enumerate(calls)
    ]
    client.chat.completions.create(
        model="k3", messages=[*USER, message, *reversed(results)], tools=TOOLS, max_tokens=1
    )
    prompt = endpoint.tokenizer.decode(router.submitted[-1].prompt, skip_special=False)
    first, second = prompt.index('tool="add" index="1"<|sep|>r0'), prompt.index("r1")
    assert first < second
    asked = endpoint.tokenizer.decode(script, skip_special=False)
    assert asked in prompt, "the model reads its own calls as it wrote them"


def test_one_call_at_a_time(client: OpenAI, script: list[int]) -> None:
    asked: Any = {"model": "k3", "messages": USER, "tools": TOOLS, "max_tokens": 500}
    whole = client.chat.completions.create(**asked, parallel_tool_calls=False)
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls"
    assert len(message.tool_calls or ()) == 1
    usage = whole.usage
    assert usage is not None
    assert usage.completion_tokens < len(script), "the second call was not waited for"
    with client.chat.completions.stream(**asked, parallel_tool_calls=False) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert [call.function.arguments for call in streamed.tool_calls or ()] == [
        call.function.arguments for call in message.tool_calls or () if call.type == "function"
    ]


def test_cut_off_in_a_call(endpoint: Endpoint, script: list[int]) -> None:
    body = {"model": "k3", "messages": USER, "tools": TOOLS, "max_tokens": 100}
    answer = httpx.post(f"{endpoint.url}/v1/chat/completions", json=body).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"a":1')


def test_required_tools_and_thinking_are_said_to_the_model(
    client: OpenAI, endpoint: Endpoint, router: ScriptedRouter
) -> None:
    client.chat.completions.create(
        model="k3", messages=USER, tools=TOOLS, tool_choice="required", max_tokens=1,
        reasoning_effort="low", response_format={"type": "json_object"},
    )  # fmt: skip
    prompt = endpoint.tokenizer.decode(router.submitted[-1].prompt, skip_special=False)
    for said in (
        "`tool_choice=required`",
        "`thinking_effort=low`",
        "`response_format=json_object`",
    ):
        assert said in prompt
    assert prompt.index("thinking-effort") < prompt.index("hi<|close|>")
    assert prompt.index("hi<|close|>") < prompt.index("tool-choice"), "the prefix stays the same"
    assert prompt.endswith("<|open|>think<|sep|>")
