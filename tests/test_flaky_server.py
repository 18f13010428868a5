"""flaky_server.py: what it refuses, what it sends, how it holds, and the command."""

from __future__ import annotations

import contextlib
import copy
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

import flaky_server
from flaky_server import FAULTS, FlakyServer, Recorded, replay, validate

DONE = b"data: [DONE]\n\n"
ONE = {"call": "ls", "arguments": {"a": 1}, "id": "x"}
TWO = {"calls": [ONE, {"name": "cat", "arguments": {"b": 2}, "id": "y"}]}
ENDLESS = ("stall", "keepalive_stall", "open_after_done")
BROKEN = ("cut_chunk", "reset", "drop")


def base() -> dict[str, Any]:
    """A request that every provider accepts and that shows all that is legal."""
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1}'}}
    other = {"id": "c2", "type": "function", "function": {"name": "cat", "arguments": "{}"}}
    function = {"name": "ls", "description": "List.", "parameters": {"type": "object"}}
    return {
        "model": "m",
        "stream": True,
        "tools": [{"type": "function", "function": function}],
        "messages": [
            {"role": "system", "content": "be good"},
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": None, "tool_calls": [call, other]},
            {"role": "tool", "tool_call_id": "c1", "content": "a"},
            {"role": "tool", "tool_call_id": "c2", "content": "b"},
            {"role": "assistant", "content": "done"},
            {"role": "user", "content": "more"},
        ],
    }


def changed(*path: Any, to: Any) -> dict[str, Any]:
    """The base body with one value replaced or added."""
    body = base()
    place: Any = body
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return body


def without(*path: Any) -> dict[str, Any]:
    """The base body with one key or element removed."""
    body = base()
    place: Any = body
    for step in path[:-1]:
        place = place[step]
    del place[path[-1]]
    return body


def ask(server: FlakyServer, **more: Any) -> requests.Response:
    """One chat request; keys of the body can be added."""
    body = {"model": "m", "stream": True, "messages": base()["messages"][:2], **more}
    return requests.post(f"{server.url}/chat/completions", json=body, timeout=60)


def once(step: Any, **more: Any) -> requests.Response:
    """The answer of a new server to its first request."""
    with FlakyServer([step]) as server:
        return ask(server, **more)


@contextlib.contextmanager
def wire(server: FlakyServer) -> Iterator[socket.socket]:
    """A socket on which a chat request was sent."""
    raw = json.dumps({"model": "m", "stream": True, "messages": base()["messages"][:2]})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall((head + raw).encode())
        yield connection


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    """Everything up to and including the mark; what there was, if the connection ends."""
    seen = b""
    while mark not in seen and (part := connection.recv(65536)):
        seen += part
    return seen


def chat_in_background(server: FlakyServer) -> tuple[threading.Thread, list[requests.Response]]:
    """A request in a thread, and the list its answer will be in."""
    answers: list[requests.Response] = []
    thread = threading.Thread(target=lambda: answers.append(ask(server)), daemon=True)
    thread.start()
    return thread, answers


def events(body: bytes) -> list[Any]:
    """The parsed events of a stream; DONE as the string."""
    found = []
    for block in body.decode().split("\n\n"):
        found += [line[6:] for line in block.split("\n") if line.startswith("data: ")]
    return [text if text == "[DONE]" else json.loads(text) for text in found]


def deltas(body: bytes) -> list[dict[str, Any]]:
    """The deltas of a stream without the one that only names the role."""
    choices = [e["choices"][0] for e in events(body) if e != "[DONE]" and e.get("choices")]
    return [c["delta"] for c in choices if c["delta"] and "role" not in c["delta"]]


def text_of(body: bytes) -> str:
    """The text of a stream."""
    return "".join(delta.get("content") or "" for delta in deltas(body))


def finish_of(body: bytes) -> list[str]:
    """Every finish_reason of a stream."""
    choices = [e["choices"][0] for e in events(body) if e != "[DONE]" and e.get("choices")]
    return [c["finish_reason"] for c in choices if c["finish_reason"]]


def items_of(body: bytes) -> list[tuple[Any, ...]]:
    """Every tool call item of a stream as (index, id, name, arguments); `-` where absent."""
    items = [item for delta in deltas(body) for item in delta.get("tool_calls", [])]
    found = []
    for item in items:
        function = item["function"]
        pair = function.get("name", "-"), function.get("arguments", "-")
        found.append((item.get("index", "-"), item.get("id", "-"), *pair))
    return found


# -- Validate


def test_a_body_that_obeys_every_rule_has_no_problems() -> None:
    assert validate(base()) == []


MESSAGES = "messages"
CALL = (MESSAGES, 2, "tool_calls", 0)
TOOL = ("tools", 0)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(changed("stream_options", to={"include_usage": True}), id="usage"),
        pytest.param(changed("tool_choice", to="auto"), id="choice-word"),
        pytest.param(
            changed("tool_choice", to={"type": "function", "function": {"name": "ls"}}),
            id="choice-tool",
        ),
        pytest.param(changed("temperature", to=0), id="temperature"),
        pytest.param(changed("max_tokens", to=100), id="max-tokens"),
        pytest.param(changed(MESSAGES, 2, "content", to="text and calls"), id="text-and-calls"),
        pytest.param(without(MESSAGES, 2, "content"), id="calls-without-content"),
        pytest.param(changed(MESSAGES, 5, "reasoning_content", to="hm"), id="reasoning"),
        pytest.param(changed(MESSAGES, 5, "reasoning_details", to=[{}]), id="details"),
        pytest.param(changed(MESSAGES, 1, "content", to="Grüße \U0001f44b"), id="emoji"),
        pytest.param(changed(*CALL, "extra_content", to={}), id="signature"),
        pytest.param(changed(MESSAGES, to=base()[MESSAGES][:5]), id="ends-with-tool"),
        pytest.param(without("tools"), id="history-with-calls-but-no-tools"),
    ],
)
def test_what_is_legal_has_no_problems(body: dict[str, Any]) -> None:
    assert validate(body) == []


@pytest.mark.parametrize(
    "body, word",
    [
        pytest.param([], "not a JSON object", id="list"),
        pytest.param(without("model"), "model", id="no-model"),
        pytest.param(changed("model", to=""), "model", id="empty-model"),
        pytest.param(without(MESSAGES), "messages", id="no-messages"),
        pytest.param(changed(MESSAGES, to=[]), "messages", id="empty-messages"),
        pytest.param(changed(MESSAGES, to={}), "messages", id="messages-no-list"),
        pytest.param(changed("_", to=1), "unknown key '_'", id="private-key"),
        pytest.param(changed("top_k", to=1), "unknown key 'top_k'", id="unknown-key"),
        pytest.param(changed("stream", to="yes"), "stream: wrong type", id="stream-type"),
        pytest.param(changed("temperature", to=True), "temperature: wrong", id="temperature"),
        pytest.param(changed("tools", to=[]), "empty", id="tools-empty"),
        pytest.param(changed("tools", to=[1]), "tools[0]", id="tool-no-object"),
        pytest.param(changed(*TOOL, "type", to="x"), "type", id="tool-type"),
        pytest.param(changed(*TOOL, "function", "name", to="a.b"), "name", id="tool-name"),
        pytest.param(changed(*TOOL, "function", "name", to="a" * 65), "name", id="tool-long"),
        pytest.param(changed("tools", to=base()["tools"] * 2), "twice", id="tool-twice"),
        pytest.param(without(*TOOL, "function", "description"), "description", id="no-desc"),
        pytest.param(changed(*TOOL, "function", "parameters", to=[]), "parameters", id="params"),
        pytest.param(changed(*TOOL, "function", "_", to=1), "unknown key", id="tool-private"),
        pytest.param({**without("tools"), "tool_choice": "auto"}, "without tools", id="choice"),
        pytest.param(changed("tool_choice", to="maybe"), "tool_choice", id="choice-word"),
        pytest.param(changed("tool_choice", to={"function": 1}), "tool_choice", id="choice-odd"),
        pytest.param(
            {**without("tools"), "parallel_tool_calls": True}, "without tools", id="parallel"
        ),
        pytest.param(
            {**changed("stream", to=False), "stream_options": {}}, "without stream", id="options"
        ),
        pytest.param(
            {**base(), "max_tokens": 1, "max_completion_tokens": 1}, "exclude", id="two-limits"
        ),
    ],
)
def test_a_broken_body_is_refused_with_the_reason(body: Any, word: str) -> None:
    assert any(word in problem for problem in validate(body)), validate(body)


@pytest.mark.parametrize(
    "body, word",
    [
        pytest.param(without(MESSAGES, 0), "T1", id="no-system"),
        pytest.param(changed(MESSAGES, 6, "role", to="system"), "T1", id="late-system"),
        pytest.param(changed(MESSAGES, 1, "role", to="system"), "T1", id="two-system"),
        pytest.param(changed(MESSAGES, 1, "role", to="developer"), "role", id="role"),
        pytest.param(changed(MESSAGES, 1, "role", to=["user"]), "role", id="role-type"),
        pytest.param(changed(MESSAGES, 1, to="hi"), "not an object", id="no-object"),
        pytest.param(changed(MESSAGES, 1, "_", to={}), "unknown key '_'", id="private"),
        pytest.param(changed(MESSAGES, 1, "tool_calls", to=[]), "unknown key", id="user-calls"),
        pytest.param(changed(MESSAGES, 1, "name", to="a b"), "name", id="name"),
        pytest.param(changed(MESSAGES, 1, "content", to=""), "content", id="user-empty"),
        pytest.param(changed(MESSAGES, 1, "content", to=None), "content", id="user-null"),
        pytest.param(changed(MESSAGES, 3, "content", to=""), "content", id="tool-empty"),
        pytest.param(changed(MESSAGES, 3, "content", to=["a"]), "content", id="tool-list"),
        pytest.param(changed(MESSAGES, 5, "content", to=""), "T5", id="reply-empty"),
        pytest.param(changed(MESSAGES, 5, "content", to=None), "T5", id="reply-null"),
        pytest.param(changed(MESSAGES, 5, "content", to=[]), "content", id="reply-parts"),
        pytest.param(changed(MESSAGES, 5, "tool_calls", to=[]), "T5", id="no-calls"),
        pytest.param(changed(MESSAGES, 5, "reasoning", to=1), "reasoning", id="reasoning"),
        pytest.param(changed(MESSAGES, to=base()[MESSAGES][:6]), "last message", id="last"),
    ],
)
def test_a_broken_message_is_refused_with_the_reason(body: Any, word: str) -> None:
    assert any(word in problem for problem in validate(body)), validate(body)


def shuffled(*order: int) -> dict[str, Any]:
    """The base body with its messages in this order, left out or repeated."""
    return changed(MESSAGES, to=[copy.deepcopy(base()[MESSAGES][n]) for n in order])


@pytest.mark.parametrize(
    "body, word",
    [
        pytest.param(without(*CALL, "id"), "id", id="no-id"),
        pytest.param(changed(*CALL, "id", to=""), "T4", id="empty-id"),
        pytest.param(changed(*CALL, "id", to=7), "T4", id="id-type"),
        pytest.param(changed(*CALL, "id", to="c2"), "duplicate", id="id-in-one-reply"),
        pytest.param(shuffled(0, 1, 2, 3, 4, 2, 3, 4), "duplicate", id="id-in-two-replies"),
        pytest.param(changed(*CALL, "type", to="x"), "T4", id="type"),
        pytest.param(changed(*CALL, "index", to=0), "unknown key", id="index"),
        pytest.param(changed(*CALL, "function", to=None), "T4", id="no-function"),
        pytest.param(changed(*CALL, "function", "name", to="a.b"), "name", id="name"),
        pytest.param(changed(*CALL, "function", "_", to=1), "unknown key", id="private"),
        pytest.param(changed(*CALL, "function", "arguments", to={}), "T4", id="object"),
        pytest.param(changed(*CALL, "function", "arguments", to=""), "T4", id="empty"),
        pytest.param(changed(*CALL, "function", "arguments", to='{"a'), "T4", id="cut"),
        pytest.param(changed(*CALL, "function", "arguments", to="[1]"), "T4", id="list"),
        pytest.param(changed(*CALL, "function", "arguments", to='{"a":NaN}'), "NaN", id="nan"),
        pytest.param(changed(*CALL, "function", "arguments", to='{"a":' * 9999), "T4", id="nested"),
        pytest.param(shuffled(0, 1, 2, 3, 5, 6), "T2", id="one-answer-missing"),
        pytest.param(shuffled(0, 1, 2, 6), "T2", id="no-answer"),
        pytest.param(shuffled(0, 1, 2), "T2", id="no-answer-at-the-end"),
        pytest.param(shuffled(0, 1, 2, 4, 3, 6), "T2", id="wrong-order"),
        pytest.param(shuffled(0, 1, 2, 3, 6, 4), "T2", id="user-between"),
        pytest.param(shuffled(0, 1, 2, 3, 4, 4), "T3", id="answered-twice"),
        pytest.param(shuffled(0, 1, 3), "T3", id="answer-without-call"),
        pytest.param(changed(MESSAGES, 3, "tool_call_id", to="zz"), "T3", id="foreign-answer"),
        pytest.param(without(MESSAGES, 3, "tool_call_id"), "tool_call_id", id="answer-no-id"),
    ],
)
def test_a_broken_call_or_answer_is_refused_with_the_reason(body: Any, word: str) -> None:
    assert any(word in problem for problem in validate(body)), validate(body)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(changed(MESSAGES, 1, "content", to="a\ud83d"), id="surrogate"),
        pytest.param(changed(MESSAGES, 3, "content", to="a\0b"), id="nul"),
        pytest.param(changed("response_format", to={"\udc00": 1}), id="surrogate-in-a-key"),
        pytest.param(changed(MESSAGES, 5, "reasoning_details", to=[{"a": ["\0"]}]), id="deep"),
        pytest.param(
            changed(*CALL, "function", "arguments", to='{"a": "\\ud83d"}'), id="in-arguments"
        ),
        pytest.param(
            changed(*CALL, "function", "arguments", to='{"\\u0000": 1}'), id="arguments-key"
        ),
    ],
)
def test_text_that_is_no_unicode_is_refused_anywhere(body: Any) -> None:
    assert any("T9" in problem for problem in validate(body)), validate(body)


def test_ids_that_are_taken_elsewhere_are_duplicates_and_new_ones_are_added() -> None:
    seen = {"c2"}
    assert validate(base(), seen) == ["messages[2]: duplicate call id 'c2' (T4)"]
    assert seen == {"c1", "c2"}


def test_the_validator_survives_any_json() -> None:
    rng = random.Random(1)
    values: list[Any] = [None, 0, True, "", "x", [], {}, [[]], {"function": 1}, [{"id": []}]]

    def mutate(value: Any) -> Any:
        if rng.random() < 0.08:
            return rng.choice(values)
        if isinstance(value, dict):
            return {key: mutate(item) for key, item in value.items()}
        return [mutate(item) for item in value] if isinstance(value, list) else value

    for _ in range(2000):
        assert all(isinstance(problem, str) for problem in validate(mutate(base())))


# -- Requests and answers


def test_text_is_streamed_in_words_and_ends_with_done() -> None:
    body = once("hello big world").content
    assert [delta["content"] for delta in deltas(body)] == ["hello ", "big ", "world"]
    assert finish_of(body) == ["stop"]
    assert body.endswith(DONE)


def test_a_call_is_streamed_in_fragments() -> None:
    body = once({**ONE, "text": "see:"}).content
    start, *rest = items_of(body)
    assert (text_of(body), start) == ("see:", (0, "x", "ls", ""))
    assert [item[3] for item in rest] == ['{"', 'a"', ":1", "}"]
    assert finish_of(body) == ["tool_calls"]


def test_two_calls_without_ids_get_ids_that_are_never_used_again() -> None:
    step = {"calls": [{"name": "ls"}, {"call": "cat", "arguments": '{"raw": '}]}
    with FlakyServer([step, step]) as server:
        items = [item for _ in range(2) for item in items_of(ask(server).content)]
    assert [item[1] for item in items if item[1] != "-"] == ["call_1", "call_2", "call_3", "call_4"]


def test_an_id_that_the_history_has_is_not_given_again() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "a"}
    body = once({"call": "ls"}, messages=[*base()[MESSAGES][:2], reply, answer]).content
    assert items_of(body)[0][1] == "call_2"


def test_a_request_without_stream_gets_a_whole_completion() -> None:
    answer = once({**ONE, "text": "see", "reasoning": "hm"}, stream=False).json()
    function = {"name": "ls", "arguments": '{"a":1}'}
    assert answer["choices"][0] == {
        "index": 0,
        "finish_reason": "tool_calls",
        "message": {
            "role": "assistant",
            "content": "see",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "x", "type": "function", "function": function}],
        },
    }


def test_reasoning_model_and_finish_reason_can_be_given() -> None:
    body = once({"text": "hi", "reasoning": "hm", "model": "q", "finish_reason": "eos"}).content
    assert deltas(body) == [{"reasoning_content": "hm"}, {"content": "hi"}]
    assert (events(body)[0]["model"], finish_of(body)) == ("q", ["eos"])


def test_usage_comes_in_a_last_chunk_only_if_asked_for() -> None:
    step = {"text": "hi", "usage": {"prompt_tokens": 7}}
    assert "usage" not in once(step).text
    *_, last, done = events(once(step, stream_options={"include_usage": True}).content)
    assert (last["choices"], done) == ([], "[DONE]")
    assert last["usage"] == {"total_tokens": 8, "prompt_tokens": 7, "completion_tokens": 1}


def test_the_same_script_gives_the_same_bytes() -> None:
    step = {"fault": "chopped", "text": "some words " * 20}
    assert once(step, stream_options={"include_usage": True}).content == (
        once(step, stream_options={"include_usage": True}).content
    )


@pytest.mark.parametrize(
    "body, kind",
    [
        pytest.param({"error": "x"}, "application/json", id="dict"),
        pytest.param([{"error": "x"}], "application/json", id="list"),
        pytest.param("<html>", "text/html; charset=utf-8", id="html"),
        pytest.param("slow down", "text/plain; charset=utf-8", id="text"),
    ],
)
def test_a_status_step_sends_status_headers_and_body(body: Any, kind: str) -> None:
    answer = once({"status": 529, "headers": {"retry-after": "3"}, "body": body})
    said = answer.text if isinstance(body, str) else answer.json()
    assert (answer.status_code, answer.headers["Retry-After"], said) == (529, "3", body)
    assert answer.headers["Content-Type"] == kind


def test_a_status_step_can_be_repeated() -> None:
    with FlakyServer([{"status": 503, "times": 2}, "ok"]) as server:
        assert [ask(server).status_code for _ in range(4)] == [503, 503, 200, 400]
        assert server.replies == [503, 503, 200, 400]


def test_a_raw_text_can_hold_bytes_that_are_no_utf_8() -> None:
    assert once({"raw": json.loads('"data: \\udcff"')}).content == b"data: \xff"


@pytest.mark.parametrize("raw", ["data: x\n\n", b"data: x\n\n"])
def test_a_raw_step_sends_exactly_these_bytes(raw: Any) -> None:
    answer = once({"raw": raw, "headers": {"content-type": "text/x"}})
    assert (answer.content, answer.headers["Content-Type"]) == (b"data: x\n\n", "text/x")


def test_a_function_of_the_request_is_a_step() -> None:
    def echo(request: Recorded) -> Any:
        return {"text": request["messages"][-1]["content"]}

    assert text_of(once(echo).content) == "go"


def test_a_function_that_fails_is_answered_with_400_and_kept() -> None:
    with FlakyServer([lambda request: request["nothing"]]) as server:
        answer = ask(server)
        assert (answer.status_code, server.errors) == (400, [answer.json()["error"]["message"]])
        assert "KeyError: 'nothing'" in server.errors[0]


def test_an_exhausted_script_is_noticed() -> None:
    with FlakyServer() as server:
        answer = ask(server)
    message = answer.json()["error"]["message"]
    assert (answer.status_code, message) == (400, "flaky_server: the script has ended")


def test_an_invalid_request_is_told_why_and_uses_up_no_step() -> None:
    with FlakyServer(["still here"]) as server:
        answer = ask(server, messages=[{"role": "user", "content": "hi"}])
        assert (answer.status_code, text_of(ask(server).content)) == (400, "still here")
        assert "(T1)" in answer.json()["error"]["message"]
        assert [bool(request.problems) for request in server.requests] == [True, False]


def test_a_request_is_recorded_as_it_came() -> None:
    before = time.monotonic()
    with FlakyServer(["ok"], key="k") as server:
        body = json.dumps({"model": "m", "messages": base()[MESSAGES][:2]})
        headers = {"Authorization": "Bearer k", "X-Test": "1"}
        requests.post(f"{server.url}/chat/completions", data=body, headers=headers, timeout=60)
        (request,) = server.requests
    assert request == json.loads(body)
    assert (request.raw, request.path) == (body.encode(), "/v1/chat/completions")
    assert (request.headers.get("x-test"), request.problems) == ("1", [])
    assert before <= request.at <= time.monotonic()


@pytest.mark.parametrize(
    "raw, reason",
    [
        pytest.param(b"{", "Expecting", id="json"),
        pytest.param(b'{"a": "\xff"}', "utf-8", id="utf-8"),
        pytest.param(b'{"a": NaN}', "NaN", id="nan"),
        pytest.param(b"[]", "not a JSON object", id="list"),
        pytest.param(b"", "Expecting", id="nothing"),
        pytest.param(b"[" * 100000, "recursion", id="deep"),
    ],
)
def test_a_body_that_does_not_parse_is_kept_apart(raw: bytes, reason: str) -> None:
    with FlakyServer(["ok"]) as server:
        answer = requests.post(f"{server.url}/chat/completions", data=raw, timeout=60)
        assert (answer.status_code, server.requests, server.bad[0][0]) == (400, [], raw)
        assert reason in server.bad[0][1]


def test_a_surrogate_escape_in_the_raw_json_is_refused() -> None:
    with FlakyServer(["ok"]) as server:
        answer = ask(server, user="\ud83d")
        assert b"\\ud83d" in server.requests[0].raw
        assert "T9" in answer.json()["error"]["message"]


def test_the_key_is_demanded_everywhere() -> None:
    with FlakyServer(["ok"], key="k") as server:
        assert (ask(server).status_code, ask(server).json()["error"]["code"]) == (
            401,
            "invalid_api_key",
        )
        models = f"{server.url}/models"
        assert requests.get(models, timeout=60).status_code == 401
        good = requests.get(models, headers={"Authorization": "Bearer k"}, timeout=60)
    assert good.json() == {"object": "list", "data": [{"id": "flaky-1", "object": "model"}]}


@pytest.mark.parametrize(
    "method, path",
    [("GET", "/"), ("POST", "/models"), ("PUT", "/chat/completions"), ("GET", "/responses")],
)
def test_anything_else_is_a_404_in_json(method: str, path: str) -> None:
    with FlakyServer(["ok"]) as server:
        answer = requests.request(method, server.url + path, json={}, timeout=60)
        assert (answer.status_code, server.replies) == (404, [])
        assert answer.json()["error"]["message"] == "not found"


def test_one_connection_serves_many_requests() -> None:
    with FlakyServer([{"status": 500}, "a", ONE]) as server, requests.Session() as session:
        body = {"model": "m", "stream": True, "messages": base()[MESSAGES][:2]}
        url = f"{server.url}/chat/completions"
        answers = [session.post(url, json=body, timeout=60).status_code for _ in range(3)]
        assert answers == [500, 200, 200]
        assert len(server._connections) == 1


@pytest.mark.parametrize(
    "script",
    [
        pytest.param([7], id="number"),
        pytest.param([{}], id="empty"),
        pytest.param([{"txt": "typo"}], id="no-kind"),
        pytest.param([{"text": "a", "hold_afer": 1}], id="unknown-key"),
        pytest.param([{"text": 1}], id="type"),
        pytest.param([{"fault": "nonsense"}], id="fault"),
        pytest.param([{"calls": [{"arguments": {}}]}], id="call-without-name"),
        pytest.param([{"text": "a", "hold": "after"}], id="hold"),
    ],
)
def test_a_script_with_an_error_is_refused_at_once(script: Any) -> None:
    with pytest.raises(ValueError):
        FlakyServer(script)


def test_an_endless_script_is_read_as_it_is_used() -> None:
    with FlakyServer(f"reply {n}" for n in range(10**9)) as server:
        texts = [text_of(ask(server).content) for _ in range(3)]
    assert texts == ["reply 0", "reply 1", "reply 2"]


# -- Hold, release, leave, close


@pytest.mark.parametrize(
    "step, seen",
    [
        pytest.param({"text": "one two three", "hold_after": 2}, b'"two "', id="text"),
        pytest.param({**ONE, "hold_after": 1}, b'"arguments":"{', id="call"),
        pytest.param({"text": "one", "hold_after": 9}, DONE, id="more-than-there-are"),
        pytest.param({"text": "one", "hold_after": 0}, b"\r\n\r\n", id="after-the-headers"),
    ],
)
def test_a_stream_holds_after_so_many_deltas(step: Any, seen: bytes) -> None:
    with FlakyServer([step]) as server, wire(server) as connection:
        assert server.holding.wait(60)
        before = read_until(connection, seen)
        assert before.endswith((b"\n\n\r\n", b"\r\n\r\n"))
        assert seen != b"\r\n\r\n" or b"data" not in before
        server.release()
        assert read_until(connection, b"0\r\n\r\n").endswith(b"0\r\n\r\n")


def test_a_hold_before_sends_not_even_the_status_line() -> None:
    with FlakyServer([{"text": "ok", "hold": "before"}]) as server, wire(server) as connection:
        assert server.holding.wait(60)
        assert server.replies == []
        server.release()
        assert read_until(connection, b"\r\n").startswith(b"HTTP/1.1 200")


def test_holding_is_over_after_the_release() -> None:
    with FlakyServer([{"text": "ok", "hold_after": 0}] * 2) as server:
        for _ in range(2):
            thread, answers = chat_in_background(server)
            assert server.holding.wait(60)
            server.release()
            thread.join(60)
            assert (text_of(answers[0].content), server.holding.is_set()) == ("ok", False)


def test_a_release_frees_all_that_hold() -> None:
    with FlakyServer(
        [{"text": "ok", "hold": "before"}, {"text": "ok", "hold": "before"}]
    ) as server:
        first, second = chat_in_background(server), chat_in_background(server)
        assert server.wait_holding(2)
        server.release()
        for thread, answers in (first, second):
            thread.join(60)
            assert text_of(answers[0].content) == "ok"


@pytest.mark.parametrize(
    "step",
    [
        {"text": "a b", "hold_after": 1},
        *({"fault": name} for name in ENDLESS),
        {"text": "a", "delay": 99},
    ],
    ids=str,
)
def test_a_client_that_leaves_ends_the_answer(step: Any) -> None:
    with FlakyServer([step]) as server:
        with wire(server) as connection:
            if "delay" not in step:
                assert read_until(connection, b"\n\n")
        assert server.wait_idle()
        assert (server.holding.is_set(), server.errors) == (False, [])


@pytest.mark.parametrize("fault", [*ENDLESS, "hold"])
def test_closing_the_server_ends_what_waits(fault: str) -> None:
    step = {"text": "a b", "hold_after": 1} if fault == "hold" else {"fault": fault}
    with FlakyServer([step]) as server, wire(server) as connection:
        read_until(connection, b"data: " if fault != "keepalive_stall" else b": ping")
        started = time.monotonic()
        server.close()
        assert read_until(connection, b"never") is not None
        assert time.monotonic() - started < 30


def test_a_delay_comes_before_the_first_byte() -> None:
    started = time.monotonic()
    assert text_of(once({"text": "late", "delay": 0.15}).content) == "late"
    assert time.monotonic() - started >= 0.15


def test_a_closed_server_refuses_and_can_start_again_at_its_port() -> None:
    server = FlakyServer(["a", "b"])
    with server:
        assert text_of(ask(server).content) == "a"
        port = server.port
    with pytest.raises(requests.ConnectionError):
        ask(server)
    with server:
        assert (server.port, text_of(ask(server).content)) == (port, "b")


# -- Faults


@pytest.mark.parametrize("fault", sorted(set(FAULTS) - {*ENDLESS, *BROKEN}))
def test_every_fault_works_with_and_without_text_and_calls(fault: str) -> None:
    given: list[Any] = [{}, {"text": "some words"}, ONE, {**TWO, "text": "both"}]
    with FlakyServer([{"fault": fault, **step} for step in given]) as server:
        for _ in given:
            assert ask(server, user="x").status_code in (200, 400, 404, 429)
        assert (len(server.replies), server.errors) == (4, [])
        assert FAULTS[fault].__doc__


@pytest.mark.parametrize(
    "fault, text, finish, done",
    [
        pytest.param("cut_text", "one two ", [], False, id="cut_text"),
        pytest.param("length_text", "one two ", ["length"], True, id="length_text"),
        pytest.param("content_filter", "one two ", ["content_filter"], True, id="content_filter"),
        pytest.param("no_done", "one two three four", ["stop"], False, id="no_done"),
        pytest.param("no_finish", "one two three four", [], True, id="no_finish"),
        pytest.param("late_tail", "one two three four", ["stop"], True, id="late_tail"),
        pytest.param("empty_reply", "", ["stop"], True, id="empty_reply"),
        pytest.param("empty", "", [], False, id="empty"),
        pytest.param("only_done", "", [], True, id="only_done"),
        pytest.param(
            "announced_missing_call", "one two three four", ["tool_calls"], True, id="announced"
        ),
        pytest.param("error_finish", "one two ", ["error"], True, id="error_finish"),
    ],
)
def test_a_stream_ends_as_the_fault_says(
    fault: str, text: str, finish: list[str], done: bool
) -> None:
    answer = once({"fault": fault, "text": "one two three four"})
    body = answer.content
    assert (text_of(body), finish_of(body), body.endswith(DONE)) == (text, finish, done)
    assert (answer.status_code, answer.headers["Content-Type"]) == (200, "text/event-stream")


PARTS = ['{"', 'a"', ":1", "}"]
START = (0, "x", "ls", "")
SECOND = [(1, "y", "cat", ""), (1, "-", "-", '{"'), (1, "-", "-", 'b"'), (1, "-", "-", ":2")]
SECOND += [(1, "-", "-", "}")]
FIRST = [START, *((0, "-", "-", part) for part in PARTS)]


def mapped(items: list[Any], **fixed: Any) -> list[Any]:
    """The items with some of their fields replaced; index and id in continuations too."""
    names = ("index", "id", "name", "arguments")
    return [tuple(fixed.get(name, old) for name, old in zip(names, i, strict=True)) for i in items]


@pytest.mark.parametrize(
    "fault, expected, finish",
    [
        pytest.param("cut_call", FIRST[:3], [], id="cut_call"),
        pytest.param("length", FIRST[:3], ["length"], id="length"),
        pytest.param("length_whole_call", FIRST, ["length"], id="length_whole_call"),
        pytest.param("finish_stop_with_calls", FIRST, ["stop"], id="finish_stop_with_calls"),
        pytest.param("finish_with_fragment", FIRST, ["tool_calls"], id="finish_with_fragment"),
        pytest.param("index_from_one", mapped(FIRST, index=1), ["tool_calls"], id="from_one"),
        pytest.param(
            "id_churn",
            [
                (0, "k0", "ls", ""),
                *((0, f"k{n}", "", part) for n, part in enumerate(PARTS, 1)),
            ],
            ["tool_calls"],
            id="id_churn",
        ),
        pytest.param(
            "name_split",
            [(0, "x", "l", ""), (0, "-", "s", "-"), *FIRST[1:]],
            ["tool_calls"],
            id="name_split",
        ),
        pytest.param("name_repeated", mapped(FIRST, name="ls"), ["tool_calls"], id="repeated"),
        pytest.param(
            "null_fields",
            [START, *mapped(FIRST[1:], id=None, name=None)],
            ["tool_calls"],
            id="null_fields",
        ),
        pytest.param("arguments_empty", [START], ["tool_calls"], id="arguments_empty"),
        pytest.param("type_missing", FIRST, ["tool_calls"], id="type_missing"),
        pytest.param("cut_call_labelled_whole", FIRST[:3], ["tool_calls"], id="cut as whole"),
        pytest.param("late_fragment", FIRST, ["tool_calls"], id="late_fragment"),
        pytest.param(
            "name_empty", [START, *mapped(FIRST[1:], name="")], ["tool_calls"], id="name_empty"
        ),
        pytest.param(
            "id_late",
            [(0, "-", "ls", ""), *FIRST[1:-1], (0, "x", "-", "}")],
            ["tool_calls"],
            id="id_late",
        ),
        pytest.param(
            "name_late",
            [(0, "x", "-", ""), (0, "-", "ls", PARTS[0]), *FIRST[2:]],
            ["tool_calls"],
            id="name_late",
        ),
        pytest.param(
            "call_resent", [*FIRST, (0, "x", "ls", '{"a":1}')], ["tool_calls"], id="call_resent"
        ),
    ],
)
def test_the_items_of_one_call_are_as_the_fault_says(
    fault: str, expected: list[Any], finish: list[str]
) -> None:
    body = once({"fault": fault, **ONE}).content
    assert (items_of(body), finish_of(body)) == (expected, finish)


@pytest.mark.parametrize(
    "fault, expected",
    [
        pytest.param("index_missing", mapped(FIRST + SECOND, index="-"), id="index_missing"),
        pytest.param("id_missing", mapped(FIRST + SECOND, id="-"), id="id_missing"),
        pytest.param(
            "index_and_id_missing", mapped(FIRST + SECOND, index="-", id="-"), id="neither"
        ),
        pytest.param(
            "index_text", mapped(FIRST, index="0") + mapped(SECOND, index="1"), id="index_text"
        ),
        pytest.param(
            "index_zero_without_ids",
            [(0, "", "ls", '{"a":1}'), (0, "", "cat", '{"b":2}')],
            id="index_zero_without_ids",
        ),
        pytest.param(
            "one_event", [(0, "x", "ls", '{"a":1}'), (1, "y", "cat", '{"b":2}')], id="one_event"
        ),
        pytest.param(
            "id_duplicate",
            mapped(FIRST[:1], id="exec:0")
            + FIRST[1:]
            + mapped(SECOND[:1], id="exec:0")
            + SECOND[1:],
            id="id_duplicate",
        ),
        pytest.param(
            "index_always_zero",
            [(0, "x", "ls", '{"a":1}'), (0, "y", "cat", '{"b":2}')],
            id="index_always_zero",
        ),
        pytest.param(
            "interleaved",
            [item for pair in zip(FIRST, SECOND, strict=True) for item in pair],
            id="interleaved",
        ),
    ],
)
def test_the_items_of_two_calls_are_as_the_fault_says(fault: str, expected: list[Any]) -> None:
    assert items_of(once({"fault": fault, **TWO}).content) == expected


@pytest.mark.parametrize(
    "fault, fragments",
    [
        pytest.param("arguments_dict", [{"a": 1}], id="dict"),
        pytest.param(
            "arguments_cumulative", ['{"', '{"a"', '{"a":1', '{"a":1}', '{"a":1}'], id="cumulative"
        ),
        pytest.param("arguments_twice", ['{"a":1}', '{"a":1}'], id="twice"),
        pytest.param("arguments_double_encoded", ['"{\\', '"a\\', '":1', '}"'], id="double"),
        pytest.param("arguments_malformed", ['{"', 'a"', ":1", ",,"], id="malformed"),
        pytest.param("arguments_placeholder", ["{}", *PARTS], id="placeholder"),
        pytest.param("arguments_of_two_calls", ['{"a":1}', '{"path":"docs"}'], id="of two calls"),
    ],
)
def test_the_arguments_are_as_the_fault_says(fault: str, fragments: list[Any]) -> None:
    body = once({"fault": fault, **ONE}).content
    assert [item[3] for item in items_of(body)] == ["", *fragments]


@pytest.mark.parametrize(
    "fault, changed_bytes",
    [
        pytest.param("crlf", lambda plain: plain.replace(b"\n", b"\r\n"), id="crlf"),
        pytest.param("cr", lambda plain: plain.replace(b"\n", b"\r"), id="cr"),
        pytest.param("no_space", lambda plain: plain.replace(b"data: ", b"data:"), id="no_space"),
        pytest.param("bom", lambda plain: b"\xef\xbb\xbf" + plain, id="bom"),
        pytest.param("open_after_done", lambda plain: plain, id="open_after_done"),
        pytest.param("close_delimited", lambda plain: plain, id="close_delimited"),
        pytest.param("split_bytes", lambda plain: plain, id="split_bytes"),
        pytest.param("chopped", lambda plain: plain, id="chopped"),
        pytest.param(
            "comments",
            lambda plain: plain.replace(b"data: ", b": OPENROUTER PROCESSING\n\ndata: "),
            id="comments",
        ),
    ],
)
def test_only_the_bytes_differ_from_a_plain_stream(
    fault: str, changed_bytes: Callable[[bytes], bytes]
) -> None:
    plain, text = once("Grüße \U0001f44b").content, "Grüße \U0001f44b"
    with FlakyServer([{"fault": fault, "text": text}]) as server, wire(server) as connection:
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.read(len(changed_bytes(plain))) == changed_bytes(plain)
        answer.close()


def test_split_bytes_are_chunks_of_one_byte() -> None:
    with FlakyServer([{"fault": "split_bytes"}]) as server, wire(server) as connection:
        head, _, body = read_until(connection, b"\r\n0\r\n\r\n").partition(b"\r\n\r\n")
        assert b"chunked" in head
        assert set(body.removesuffix(b"0\r\n\r\n")[::6]) == {ord("1")}


def test_a_close_delimited_body_has_neither_chunks_nor_a_length() -> None:
    with FlakyServer([{"fault": "close_delimited"}]) as server, wire(server) as connection:
        head, _, body = read_until(connection, b"never").lower().partition(b"\r\n\r\n")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head and b"content-length" not in head
        assert body.startswith(b"data: {") and body.endswith(DONE.lower())


def test_gzip_is_not_announced() -> None:
    answer = once({"fault": "gzip_unannounced", "text": "packed"})
    assert "Content-Encoding" not in answer.headers
    assert answer.content.startswith(b"\x1f\x8b")
    assert text_of(zlib.decompress(answer.content, wbits=31)) == "packed"


def test_multi_line_data_joins_to_json() -> None:
    first, *_, last, _ = once({"fault": "multi_line_data", "text": "hi"}).text.split("\n\n")
    lines = first.split("\n")
    assert len(lines) > 5 and all(line.startswith("data: ") for line in lines)
    assert json.loads("\n".join(line[6:] for line in lines))["model"] == "m"
    assert last == "data: [DONE]"


def test_unicode_separators_are_raw_in_the_bytes() -> None:
    body = once({"fault": "unicode_separators"}).content
    assert all(raw in body for raw in ("\u2028".encode(), "\u2029".encode(), b"\xc2\x85", b"\x0b"))


def test_a_reset_comes_after_some_text() -> None:
    with FlakyServer([{"fault": "reset", "text": "a b"}]) as server, wire(server) as connection:
        assert b'"a "' in read_until(connection, b'"a "')
        with pytest.raises(ConnectionResetError):
            read_until(connection, b"never")


def test_a_cut_chunk_is_an_incomplete_body() -> None:
    with pytest.raises(requests.exceptions.ChunkedEncodingError):
        once({"fault": "cut_chunk"})


def test_a_drop_sends_nothing() -> None:
    with FlakyServer([{"fault": "drop"}]) as server, wire(server) as connection:
        assert read_until(connection, b"never") == b""
        assert server.replies == []


def test_a_keepalive_stall_sends_comments_for_ever() -> None:
    with FlakyServer([{"fault": "keepalive_stall"}]) as server, wire(server) as connection:
        seen = b"".join(read_until(connection, b": ping") for _ in range(4))
        assert b"data" not in seen


@pytest.mark.parametrize(
    "step, status, kind, words",
    [
        pytest.param(
            {"fault": "json_error_200", "code": "bad", "message": "no luck"},
            200,
            "application/json",
            ['"code":"bad"', '"message":"no luck"'],
            id="json_error_200",
        ),
        pytest.param({"fault": "html"}, 200, "text/html", ["<!DOCTYPE html>"], id="html"),
        pytest.param(
            {"fault": "json_reply", "text": "hi"},
            200,
            "application/json",
            ['"object":"chat.completion"', '"content":"hi"'],
            id="json_reply",
        ),
        pytest.param(
            {"fault": "context_overflow"},
            400,
            "application/json",
            ["maximum context length is 8192", '"code":"context_length_exceeded"'],
            id="context_overflow",
        ),
        pytest.param(
            {"fault": "insufficient_quota"},
            429,
            "application/json",
            ['"code":"insufficient_quota"'],
            id="insufficient_quota",
        ),
        pytest.param(
            {"fault": "error_in_200", "code": 503, "message": "over", "text": "a"},
            200,
            "text/event-stream",
            ['"content":"a"', 'data: {"error":{"code":503,"message":"over"},"choices":[]}\n\n'],
            id="error_in_200",
        ),
        pytest.param(
            {"fault": "error_event", "message": "over"},
            200,
            "text/event-stream",
            ["event: error\ndata: {", '"message":"over"'],
            id="error_event",
        ),
    ],
)
def test_an_error_or_a_foreign_body_is_as_the_fault_says(
    step: Any, status: int, kind: str, words: list[str]
) -> None:
    answer = once(step)
    assert answer.status_code == status
    assert answer.headers["Content-Type"].startswith(kind)
    assert [word for word in words if word not in answer.text] == []


def test_a_redirect_leads_to_a_page_that_is_not_there() -> None:
    answer = once({"fault": "redirect"})
    assert [hop.status_code for hop in answer.history] == [302]
    assert (answer.status_code, answer.url.endswith("/login")) == (404, True)


def with_ids(first: str, second: str) -> dict[str, Any]:
    """The base body with other call ids."""
    text = json.dumps(base()).replace('"c1"', json.dumps(first))
    return json.loads(text.replace('"c2"', json.dumps(second)))


def beside_calls(**keys: Any) -> dict[str, Any]:
    """The base body with more keys in the message that calls."""
    body = base()
    body["messages"][2] |= keys
    return body


def of_roles(*roles: str) -> dict[str, Any]:
    """The base body with plain messages of these roles."""
    body = base()
    body["messages"][1:] = [{"role": role, "content": "x"} for role in roles]
    return body


def after_results(role: str) -> dict[str, Any]:
    """The base body with a message of this role behind the results."""
    body = base()
    body["messages"][5] = {"role": role, "content": "x"}
    return body


def named_results() -> dict[str, Any]:
    """The base body whose results bear the names of their tools."""
    body = base()
    body["messages"][3]["name"], body["messages"][4]["name"] = "ls", "cat"
    return body


def signed_calls() -> dict[str, Any]:
    """The base body whose calls bear signatures."""
    body = base()
    for call in body["messages"][2]["tool_calls"]:
        call["extra_content"] = {"google": {"thought_signature": "QjY0"}}
    return body


@pytest.mark.parametrize(
    "fault, wrong, right",
    [
        ("refuses_stream_options", changed("stream_options", to={"include_usage": True}), base()),
        ("refuses_reasoning", beside_calls(reasoning="hm"), base()),
        ("wants_reasoning", base(), beside_calls(reasoning_content="")),
        ("wants_signatures", base(), signed_calls()),
        ("wants_ids_of_nine", base(), with_ids("abcdefgh1", "abcdefgh2")),
        ("wants_short_ids", with_ids("c" * 41, "c2"), with_ids("c" * 40, "c2")),
        ("refuses_null_content", base(), beside_calls(content="")),
        ("refuses_text_with_calls", beside_calls(content="x"), base()),
        ("wants_alternating_roles", of_roles("user", "user"), base()),
        ("refuses_user_after_tool", after_results("user"), base()),
        ("refuses_tool_turns", base(), of_roles("user", "assistant", "user")),
        ("wants_names_of_results", base(), named_results()),
    ],
)
def test_a_request_is_refused_until_it_has_the_form_that_the_fault_wants(
    fault: str, wrong: dict[str, Any], right: dict[str, Any]
) -> None:
    with FlakyServer([{"fault": fault, "text": "fine", "times": 2}]) as server:
        assert ask(server, **wrong).status_code == 400
        assert text_of(ask(server, **right).content) == "fine"
    assert server.requests[0].problems == []


def test_a_legacy_function_call_has_no_tool_calls() -> None:
    body = once({"fault": "legacy_function_call", **ONE}).content
    parts = [delta["function_call"] for delta in deltas(body)]
    assert (parts[0], "".join(p["arguments"] for p in parts)) == (
        {"name": "ls", "arguments": ""},
        '{"a":1}',
    )
    assert finish_of(body) == ["function_call"]


def test_a_call_as_text_stands_in_the_content() -> None:
    text = text_of(once({"fault": "call_as_text", **ONE}).content)
    assert text == '<tool_call>\n{"name": "ls", "arguments": {"a": 1}}\n</tool_call>'


def test_a_thought_signature_is_beside_the_function() -> None:
    first = deltas(once({"fault": "thought_signature", **ONE}).content)[0]["tool_calls"][0]
    assert first["extra_content"] == {"google": {"thought_signature": "c2lnbmF0dXJl"}}


def test_content_parts_hold_thinking_and_text() -> None:
    (delta,) = deltas(once({"fault": "content_parts", "text": "Hi", "reasoning": "h"}).content)
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "h"}]}
    assert delta == {"content": [thinking, {"type": "text", "text": "Hi"}]}


def test_think_tags_are_cut_in_two() -> None:
    body = once({"fault": "think_tags", "text": "Hi", "reasoning": "x"}).content
    assert text_of(body) == "<think>x</think>Hi"
    assert not any("<think>" in delta["content"] for delta in deltas(body))


def test_a_refusal_has_null_content() -> None:
    body = once({"fault": "refusal", "text": "I can not"}).content
    assert deltas(body)[0] == {"content": None, "refusal": "I "}
    assert finish_of(body) == ["stop"]


def test_two_choices_alternate() -> None:
    body = once({"fault": "two_choices", "text": "a b"}).content
    choices = [event["choices"][0] for event in events(body)[:-1]]
    said = [(c["index"], c["delta"].get("content")) for c in choices if c["delta"].get("content")]
    assert said == [(1, "other "), (0, "a "), (1, "other "), (0, "b")]


def test_a_first_chunk_with_usage_has_no_choices() -> None:
    first = events(once({"fault": "usage_first_chunk_empty_choices"}).content)[0]
    assert (first["choices"], first["prompt_filter_results"]) == ([], [])
    assert first["usage"]["total_tokens"] > 0


# -- Replay


def session() -> list[dict[str, Any]]:
    """The messages of a saved session."""
    messages = copy.deepcopy(base()[MESSAGES])
    messages[2] |= {"reasoning_content": "hm", "_": {"model": "m"}}
    return [*messages, {"role": "assistant", "content": None}]


@pytest.mark.parametrize("shape", [lambda m: m, lambda m: {"version": 1, "messages": m}])
def test_a_saved_session_is_said_again(tmp_path: Path, shape: Callable[[Any], Any]) -> None:
    path = tmp_path / "session.json"
    path.write_text(json.dumps(shape(session())))
    calls = [
        {"name": "ls", "arguments": '{"a": 1}', "id": "c1"},
        {"name": "cat", "arguments": "{}", "id": "c2"},
    ]
    assert replay(path) == [{"calls": calls, "reasoning": "hm"}, {"text": "done"}]
    with FlakyServer(replay(path)) as server:
        items = items_of(ask(server).content)
        assert [item[:3] for item in items if item[2] != "-"] == [(0, "c1", "ls"), (1, "c2", "cat")]
        assert text_of(ask(server).content) == "done"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"messages": 1}',
        '[{"role": "assistant"}]',
        '[{"role": "assistant", "tool_calls": [{"function": "x"}]}]',
        '[{"role": "assistant", "tool_calls": [{"function": {}}]}]',
    ],
)
def test_a_file_that_is_no_session_is_a_value_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "session.json"
    path.write_text(text)
    with pytest.raises(ValueError):
        replay(path)


# -- Command


def command(*arguments: str) -> list[str]:
    """The command line of the server."""
    return [sys.executable, "-m", "flaky_server", *arguments]


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command with a free port, and its URL."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    root = Path(flaky_server.__file__).parent
    with subprocess.Popen(command("--port", "0", *arguments), cwd=root, **pipes) as process:
        try:
            assert process.stdout
            url, seed = (process.stdout.readline().strip() for _ in range(2))
            assert seed == ("seed 3" if "--seed" in arguments else "seed 0")
            yield process, url
        finally:
            process.kill()


def post(url: str) -> requests.Response:
    """One chat request to the command."""
    body = {"model": "m", "stream": True, "messages": base()[MESSAGES][:2]}
    return requests.post(f"{url}/chat/completions", json=body, timeout=60)


def ended(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    root = Path(flaky_server.__file__).parent
    done = subprocess.run(command(*arguments), cwd=root, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_the_command_answers_429_and_then_friendly_words_until_ctrl_c() -> None:
    with running("--seed", "3") as (process, url):
        answers = [post(url), post(url), post(url)]
        assert [answer.status_code for answer in answers] == [429, 200, 200]
        assert answers[0].headers["Retry-After"] == "1"
        assert text_of(answers[2].content) == flaky_server.CANNED
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    lines = [f"POST /v1/chat/completions {n}" for n in (429, 200, 200)]
    assert sorted(err.splitlines()) == sorted(lines)  # each connection has a thread of its own


def test_the_command_shows_the_problems_of_a_request() -> None:
    with running() as (process, url):
        requests.post(f"{url}/chat/completions", json={"model": "m"}, timeout=60)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert err == "POST /v1/chat/completions 400 messages: a non-empty list is required\n"


def test_the_command_begins_with_a_fault_or_plays_a_file(tmp_path: Path) -> None:
    script, saved = tmp_path / "script.json", tmp_path / "saved.json"
    script.write_text('["from a file"]')
    saved.write_text(json.dumps(session()[5:6]))
    with running("--fault", "html") as (_, url):
        assert (post(url).text[:9], text_of(post(url).content)) == (
            "<!DOCTYPE",
            flaky_server.CANNED,
        )
    with running("--script", str(script)) as (_, url):
        assert (text_of(post(url).content), post(url).status_code) == ("from a file", 400)
    with running("--replay", str(saved)) as (_, url):
        assert text_of(post(url).content) == "done"


def test_the_command_lists_the_faults() -> None:
    code, out, err = ended("--list")
    assert (code, err, len(out.splitlines())) == (0, "", len(FAULTS))
    assert out.splitlines()[0].split(maxsplit=1) == ["cut_text", FAULTS["cut_text"].__doc__]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(None, id="missing"),
        pytest.param("{", id="json"),
        pytest.param("{}", id="no-list"),
        pytest.param('[{"fault": "nonsense"}]', id="fault"),
    ],
)
def test_a_bad_script_file_is_one_line_and_2(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "script.json"
    if text is not None:
        path.write_text(text)
    code, out, err = ended("--script", str(path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"flaky_server: {path}: ")


def test_a_taken_port_is_one_line_and_1() -> None:
    with FlakyServer() as server:
        code, out, err = ended("--port", str(server.port))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert f"port {server.port}" in err


def test_an_import_starts_nothing() -> None:
    code = "import threading, flaky_server; print(threading.active_count())"
    root = Path(flaky_server.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1\n", "")
