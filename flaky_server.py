"""The strictest and the worst model provider in the world, on 127.0.0.1.

A scripted OpenAI-compatible server for tests, demos and bug reports. It answers each POST to
/v1/chat/completions with the next step of a script, checks every request as a strict provider
would (400 with the reason; a request that is refused uses up no step) and records what it got.
Nothing in it is random unless a fault says so, and then the seed decides.

    with FlakyServer(["hello", {"call": "bash", "arguments": {"command": "ls"}}]) as server:
        ...                            # a client of server.url
    server.requests[0]["messages"]     # what it sent

Contents

1. Validate    what a strict provider refuses; (T1) is an invariant of DESIGN.md
2. Reply       a step of the script becomes the events of a stream
3. Faults      the ways in which real servers break that stream
4. Server      FlakyServer: the script, the records, hold and release
5. Wire        one connection: bytes, silence, resets
6. Command     python -m flaky_server

A step is a text or an object with one of: text; call and arguments; calls (a list of name,
arguments, id) and perhaps text; status, headers, body; fault; raw, headers. In Python it may
also be a function of the request that returns a step. Optional in every object: usage,
reasoning, finish_reason, model; delay (seconds before the first byte); times (repeat the step);
hold "before" (wait before the status line); hold_after N (wait after N deltas of text or
arguments; 0: after the headers). What waits goes on at server.release().
"""

from __future__ import annotations

import argparse
import http.server
import itertools
import json
import math
import os
import random
import re
import select
import signal
import socket
import socketserver
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self, cast

Message = dict[str, Any]
Step = Any  # a str, a dict or a function of the request; see the module docstring

# == 1. Validate ==============================================================
# Written without a look at agent.py, so that the two can disagree. T6, T7 and T8 are not here: one
# request does not show them. Every problem names its place and, where there is one, its invariant.

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
SURROGATE = re.compile("[\ud800-\udfff]")
NUMBER = (int, float)

KINDS: list[tuple[Any, str]] = [
    (str, "model user reasoning_effort"),
    (list, "messages tools"),
    (bool, "stream parallel_tool_calls"),
    (dict, "stream_options response_format"),
    (int, "max_tokens max_completion_tokens seed"),
    (NUMBER, "temperature top_p"),
    ((str, dict), "tool_choice"),
    ((str, list), "stop"),
]
BODY_KEYS = {key: kinds for kinds, keys in KINDS for key in keys.split()}
MESSAGE_KEYS = {
    "system": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "tool": {"role", "content", "name", "tool_call_id"},
    "assistant": {"role", "content", "name", "tool_calls"}
    | {"reasoning_content", "reasoning", "reasoning_details"},
}


def validate(body: Any, seen_ids: set[str] | None = None) -> list[str]:
    """What a strict provider refuses in this request body; an empty list if nothing.

    `seen_ids`, if given, holds call ids that are taken already; those of the body are added.
    """
    if not isinstance(body, dict):
        return ["the body is not a JSON object"]
    messages = body.get("messages")
    found = [*_body_problems(body), *_tools_problems(body.get("tools")), *_choice_problems(body)]
    if not isinstance(messages, list) or not messages:
        return found + ["messages: a non-empty list is required"] + list(_text_problems(body, ""))
    for n, message in enumerate(messages):
        found += (f"messages[{n}]{problem}" for problem in _message_problems(n, message))
    found += _id_problems(messages, set() if seen_ids is None else seen_ids)
    found += _pairing_problems(messages)
    if _role(messages[0]) != "system":
        found.append("messages[0]: the first message is not the system message (T1)")
    if _role(messages[-1]) not in ("user", "tool"):
        found.append(f"messages[{len(messages) - 1}]: the last message is not of user or tool")
    return found + list(_text_problems(body, ""))


def _role(message: Any) -> Any:
    """The role, None if the message is no object."""
    return message.get("role") if isinstance(message, dict) else None


def _calls(message: Any) -> list[Message]:
    """The tool calls of a message that are objects at all."""
    calls = message.get("tool_calls") if _role(message) == "assistant" else None
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _function_name(item: Any) -> Any:
    """The name of a tool or of a choice of one, None if there is none."""
    function = item.get("function") if isinstance(item, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _legal_name(name: Any) -> bool:
    """Would every provider take this name of a tool?"""
    return isinstance(name, str) and NAME.fullmatch(name) is not None


def _filled(value: Any) -> bool:
    """Is this a string with something in it?"""
    return isinstance(value, str) and value != ""


def _body_problems(body: Message) -> Iterator[str]:
    """Unknown keys, wrong types, and keys that need another one."""
    for key, value in body.items():
        kinds = BODY_KEYS.get(key)
        if kinds is None:
            yield f"unknown key {key!r} in the body"
        elif not isinstance(value, kinds) or (kinds is not bool and isinstance(value, bool)):
            yield f"{key}: wrong type {type(value).__name__}"
    if not _filled(body.get("model")):
        yield "model: a non-empty string is required"
    for key in ("tool_choice", "parallel_tool_calls"):
        if key in body and "tools" not in body:
            yield f"{key} without tools"
    if "stream_options" in body and body.get("stream") is not True:
        yield "stream_options without stream"
    options = body.get("stream_options")
    if isinstance(options, dict) and set(options) - {"include_usage"}:
        yield "stream_options: unknown key"
    if "max_tokens" in body and "max_completion_tokens" in body:
        yield "max_tokens and max_completion_tokens exclude each other"


def _choice_problems(body: Message) -> Iterator[str]:
    """The rules for `tool_choice`: a known word or the name of an offered tool."""
    choice = body.get("tool_choice")
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        yield f"tool_choice: unknown value {choice!r}"
    if isinstance(choice, dict):
        tools = body.get("tools")
        offered = [_function_name(tool) for tool in (tools if isinstance(tools, list) else [])]
        if _function_name(choice) is None or _function_name(choice) not in offered:
            yield f"tool_choice: no tool is named {_function_name(choice)!r}"


def _tools_problems(tools: Any) -> Iterator[str]:
    """The rules for the list of offered tools."""
    if tools == []:
        yield "tools must not be an empty list"
    names: set[Any] = set()
    for n, tool in enumerate(tools if isinstance(tools, list) else []):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or set(tool) != {"type", "function"}:
            yield f"tools[{n}]: not an object of type and function"
            continue
        if tool["type"] != "function":
            yield f"tools[{n}]: type is not function"
        if set(function) - {"name", "description", "parameters", "strict"}:
            yield f"tools[{n}]: unknown key in the function"
        name = function.get("name")
        if not _legal_name(name):
            yield f"tools[{n}]: name {name!r} does not match {NAME.pattern}"
        elif name in names:
            yield f"tools[{n}]: the name {name!r} is used twice"
        else:
            names.add(name)
        if not _filled(function.get("description")):
            yield f"tools[{n}]: description is missing"
        parameters = function.get("parameters")
        if not isinstance(parameters, dict) or parameters.get("type") != "object":
            yield f"tools[{n}]: parameters is not a schema of type object"


def _message_problems(n: int, message: Any) -> Iterator[str]:
    """The rules for one message by itself; each problem continues "messages[n]"."""
    if not isinstance(message, dict):
        yield ": not an object"
        return
    role = message.get("role")
    known = MESSAGE_KEYS.get(role) if isinstance(role, str) else None
    if known is None:
        yield f": unknown role {role!r}"
        return
    for key in message:
        if key not in known:
            yield f": unknown key {key!r} for role {role}"
    if role == "system" and n > 0:
        yield ": a second system message, or one that is not first (T1)"
    if "name" in message and not _legal_name(message["name"]):
        yield f".name: does not match {NAME.pattern}"
    if role == "assistant":
        yield from _assistant_problems(message)
    elif not _filled(message.get("content")):
        yield f".content: must be a non-empty string for role {role}"
    if role == "tool" and not _filled(message.get("tool_call_id")):
        yield ".tool_call_id: must be a non-empty string"


def _assistant_problems(message: Message) -> Iterator[str]:
    """The rules for a reply of the model: content or calls, and every call well-formed."""
    content, calls = message.get("content"), message.get("tool_calls")
    if content is not None and not isinstance(content, str):
        yield ".content: must be a string or null"
    for key in ("reasoning", "reasoning_content"):
        if key in message and not isinstance(message[key], str):
            yield f".{key}: must be a string"
    if not isinstance(message.get("reasoning_details", []), list):
        yield ".reasoning_details: must be a list"
    if "tool_calls" not in message:
        if not content:
            yield ": neither content nor tool_calls (T5)"
    elif not isinstance(calls, list) or not calls:
        yield ".tool_calls: must be a non-empty list, or absent (T5)"
    else:
        for n, call in enumerate(calls):
            yield from (f".tool_calls[{n}]{problem}" for problem in _call_problems(call))


def _call_problems(call: Any) -> Iterator[str]:
    """The rules for one tool call (T4)."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        yield ": not an object with a function (T4)"
        return
    if set(call) - {"id", "type", "function", "extra_content"}:
        yield ": unknown key in the call"
    if set(function) - {"name", "arguments"}:
        yield ".function: unknown key"
    if not _filled(call.get("id")):
        yield ".id: must be a non-empty string (T4)"
    if call.get("type") != "function":
        yield ".type: must be function (T4)"
    if not _legal_name(function.get("name")):
        yield f".function.name: does not match {NAME.pattern}"
    try:
        arguments = parse_json(function.get("arguments"))
    except ValueError as error:
        yield f".function.arguments: not JSON in a string (T4): {error}"
        return
    if not isinstance(arguments, dict):
        yield ".function.arguments: not a JSON object (T4)"
    yield from _text_problems(arguments, ".function.arguments")


def _id_problems(messages: list[Any], seen: set[str]) -> Iterator[str]:
    """Call ids that are used twice (T4)."""
    for n, message in enumerate(messages):
        for call in _calls(message):
            call_id = call.get("id")
            if not isinstance(call_id, str):
                continue
            if call_id in seen:
                yield f"messages[{n}]: duplicate call id {call_id!r} (T4)"
            seen.add(call_id)


def _pairing_problems(messages: list[Any]) -> Iterator[str]:
    """Calls without their answer, answers without their call, wrong order (T2, T3)."""
    pending: list[Any] = []
    for n, message in enumerate(messages):
        if _role(message) == "tool":
            call_id = message.get("tool_call_id")
            if not pending:
                yield f"messages[{n}]: a tool message without its call (T3)"
            elif call_id == pending[0]:
                pending.pop(0)
            elif call_id in pending:
                yield f"messages[{n}]: the answer to {call_id!r} is out of order (T2)"
                pending.remove(call_id)
            else:
                yield f"messages[{n}]: {call_id!r} is no call of the message before (T3)"
            continue
        if pending:
            yield f"messages[{n}]: calls {pending} must be answered before this message (T2)"
        pending = [call.get("id") for call in _calls(message)]
    if pending:
        yield f"calls {pending} must be answered: the messages end without it (T2)"


def _text_problems(value: Any, place: str) -> Iterator[str]:
    """Strings and keys that are no valid Unicode or hold NUL, at any depth (T9)."""
    left = [(value, place)]  # a list, not recursion: the nesting is the client's choice
    while left:
        value, place = left.pop()
        if isinstance(value, dict):
            left += ((key, f"{place} key") for key in value)
            left += ((item, f"{place}.{key}".lstrip(".")) for key, item in value.items())
        elif isinstance(value, list):
            left += ((item, f"{place}[{n}]") for n, item in enumerate(value))
        elif isinstance(value, str):
            if "\0" in value:
                yield f"{place}: NUL character (T9)"
            if SURROGATE.search(value):
                yield f"{place}: lone surrogate (T9)"


def parse_json(text: Any) -> Any:
    """The value of a JSON text; ValueError for anything else, NaN and endless nesting too."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (RecursionError, TypeError) as error:
        raise ValueError(str(error)) from error


# == 2. Reply =================================================================
# A reply is a stream of actions. Bytes are one write, flushed at once; before the first bytes
# the headers go out, a default Head if none was given.


@dataclass(frozen=True)
class Head:
    """The status line and headers. Without a length or `Connection: close` the body is chunked."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Pause:
    """Wait so many seconds, less if the client leaves."""

    seconds: float


class Do(Enum):
    """Actions without a parameter."""

    HOLD = "wait for release(), the client's leaving or the server's end"
    CLOSE = "close the connection here, without an end of the body"
    RESET = "end the connection with a TCP reset"


Action = bytes | Head | Pause | Do
Actions = Iterable[Action]

DONE = b"data: [DONE]\n\n"
SILENCE = Pause(math.inf)
CREATED = 1_700_000_000  # constant: replies must not depend on the clock
SENTENCE = "The quick brown fox jumps over the lazy dog."
COUNTED = re.compile(rb'"(?:content|arguments|refusal)":(?!""|null)')


class Recorded(dict[str, Any]):
    """The parsed body of a request, with what else is known about the request."""

    def __init__(self, body: Message, raw: bytes, path: str, headers: Any) -> None:
        super().__init__(body)
        self.raw = raw
        self.path = path
        self.headers = headers
        self.problems: list[str] = []
        self.at = time.monotonic()


def dumps(value: Any) -> bytes:
    """Compact JSON, raw UTF-8 unless the text holds lone surrogates."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if SURROGATE.search(text):
        text = json.dumps(value, separators=(",", ":"))
    return text.encode()


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(value) + b"\n\n"


def words(text: str) -> list[str]:
    """The text in small deltas: `a bc` -> `a `, `bc`."""
    return re.findall(r"\S+\s*|\s+", text)


def pieces(text: str, count: int = 4) -> list[str]:
    """The text in at most `count` fragments of equal length."""
    size = max(1, -(-len(text) // count))
    return [text[at : at + size] for at in range(0, len(text), size)]


def half(items: list[Any]) -> list[Any]:
    """The first half, at least one."""
    return items[: max(1, len(items) // 2)]


def content(texts: Iterable[str]) -> list[Message]:
    """Deltas of text."""
    return [{"content": text} for text in texts]


def json_body(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Actions:
    """A whole JSON body."""
    return whole(dumps(value), status, {"Content-Type": "application/json"} | (headers or {}))


def whole(body: bytes, status: int, headers: dict[str, str]) -> Actions:
    """A body of known length."""
    return [Head(status, {"Content-Length": str(len(body))} | headers), body]


def error_body(message: str, kind: str = "invalid_request_error", code: Any = None) -> Message:
    """OpenAI's form of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def held(actions: Actions, after: int) -> Iterator[Action]:
    """The same actions, with a HOLD after `after` deltas of text or arguments, or at the end.

    It never comes before the headers: `hold: before` is for that.
    """
    count, started, done = 0, False, False
    for action in actions:
        if isinstance(action, bytes) and count >= after and not done:
            if not started:
                yield Head()
            yield Do.HOLD
            done = True
        yield action
        started = started or isinstance(action, (bytes, Head))
        count += isinstance(action, bytes) and COUNTED.search(action) is not None
    if not done:
        yield Do.HOLD


class Reply:
    """What one step makes the model say, and the events that say it."""

    def __init__(self, step: Message, request: Recorded, server: FlakyServer) -> None:
        self.step, self.request, self.server = step, request, server
        self.id = f"chatcmpl-{len(server.requests)}"
        self.model = step.get("model") or request["model"]
        self.text: str = step.get("text") or ""
        self.calls = [self.call(item) for item in step.get("calls", [])]
        if "call" in step:
            self.calls.append(self.call(step))

    def call(self, item: Message) -> Message:
        """A tool call of the API; arguments given as a string are sent as they are."""
        arguments = item.get("arguments", {})
        text = arguments if isinstance(arguments, str) else dumps(arguments).decode()
        function = {"name": item.get("name") or item["call"], "arguments": text}
        call_id = item.get("id") or self.server.new_id()
        return {"id": call_id, "type": "function", "function": function}

    def actions(self) -> Actions:
        """The reply as the request wants it, streamed or whole."""
        return self.stream() if self.request.get("stream") else json_body(self.completion())

    def usage(self) -> Message:
        """The step's usage, or a deterministic estimate with every count in it."""
        said = self.text + "".join(dumps(call).decode() for call in self.calls)
        prompt, completion = len(self.request.raw) // 4 + 1, len(said) // 4 + 1
        counts = {"prompt_tokens": prompt, "completion_tokens": completion}
        counts |= self.step.get("usage", {})
        known = [counts[name] for name in ("prompt_tokens", "completion_tokens")]
        return {"total_tokens": sum(n for n in known if isinstance(n, NUMBER))} | counts

    def finish(self, default: str) -> str:
        """The step's finish_reason, else the default."""
        return self.step.get("finish_reason") or default

    def completion(self) -> Message:
        """The answer to a request without `stream`."""
        message: Message = {"role": "assistant", "content": self.text or None}
        if self.step.get("reasoning"):
            message["reasoning_content"] = self.step["reasoning"]
        if self.calls:
            message["tool_calls"] = self.calls
        reason = self.finish("tool_calls" if self.calls else "stop")
        choice = {"index": 0, "message": message, "finish_reason": reason}
        head = {"id": self.id, "object": "chat.completion", "created": CREATED}
        return head | {"model": self.model, "choices": [choice], "usage": self.usage()}

    def chunk(self, choices: list[Message], **extra: Any) -> Message:
        """The object of one event."""
        head = {"id": self.id, "object": "chat.completion.chunk", "created": CREATED}
        return head | {"model": self.model, "choices": choices} | extra

    def event(self, delta: Message, finish: str | None = None, index: int = 0) -> bytes:
        """One event with one delta."""
        return sse(self.chunk([{"index": index, "delta": delta, "finish_reason": finish}]))

    def opening(self, n: int, call: Message, arguments: str = "") -> Message:
        """The delta that announces call number `n`."""
        function = {"name": call["function"]["name"], "arguments": arguments}
        item = {"index": n, "id": call["id"], "type": "function", "function": function}
        return {"tool_calls": [item]}

    def fragment(self, n: int, text: Any) -> Message:
        """A delta with a part of the arguments of call number `n`."""
        return {"tool_calls": [{"index": n, "function": {"arguments": text}}]}

    def call_deltas(self, calls: list[Message], first: int = 0) -> list[Message]:
        """All deltas of these calls, one call behind the other."""
        deltas = []
        for n, call in enumerate(calls, first):
            deltas.append(self.opening(n, call))
            fragments = pieces(call["function"]["arguments"])
            deltas += [self.fragment(n, fragment) for fragment in fragments]
        return deltas

    def deltas(self) -> list[Message]:
        """All deltas: reasoning, text, calls."""
        thoughts = [{"reasoning_content": text} for text in words(self.step.get("reasoning") or "")]
        return thoughts + content(words(self.text)) + self.call_deltas(self.calls)

    def events(self, deltas: list[Message] | None = None) -> Iterator[bytes]:
        """The events of a reply that never ends."""
        yield self.event({"role": "assistant", "content": ""})
        yield from map(self.event, self.deltas() if deltas is None else deltas)

    def stream(
        self, deltas: list[Message] | None = None, reason: str = "", done: bytes = DONE
    ) -> Iterator[bytes]:
        """The events of a whole reply: the deltas, the finish_reason, the usage, the end."""
        deltas = self.deltas() if deltas is None else deltas
        called = any("tool_calls" in delta for delta in deltas)
        yield from self.events(deltas)
        yield from self.ending(reason or ("tool_calls" if called else "stop"), done)

    def ending(self, reason: str, done: bytes = DONE) -> Iterator[bytes]:
        """The finish_reason, the usage and, unless it is empty, the end."""
        yield self.event({}, self.finish(reason))
        yield from self.usage_events()
        if done:
            yield done

    def usage_events(self) -> list[bytes]:
        """The chunk with the usage, if the request asked for it."""
        if not (self.request.get("stream_options") or {}).get("include_usage"):
            return []
        return [sse(self.chunk([], usage=self.usage()))]


# == 3. Faults ================================================================


class Fault(Reply):
    """The faults: each method is one, its docstring says what the client sees.

    They take text and calls from the step and have something to say without. The letters are
    the rows of a survey of what real servers send: A calls, B finish_reason, C bytes,
    D reasoning, E errors, F requests.
    """

    def __init__(self, step: Message, request: Recorded, server: FlakyServer) -> None:
        super().__init__(step, request, server)
        self.given = self.text
        if not self.text and not self.calls:
            self.text = SENTENCE

    def _some(self, count: int = 1) -> list[Message]:
        """The calls of the step, filled up to `count`."""
        return self.calls + [self.call(item) for item in CALLS[len(self.calls) : count]]

    def _calling(self, deltas: list[Message], reason: str = "") -> Iterator[bytes]:
        """A whole reply with the given text, if any, and these deltas of calls."""
        return self.stream(content(words(self.given)) + deltas, reason)

    def _each(self, change: Callable[[Message], Any], count: int = 1) -> Iterator[bytes]:
        """A reply whose tool call items have all been changed."""
        deltas = self.call_deltas(self._some(count))
        for delta in deltas:
            change(delta["tool_calls"][0])
        return self._calling(deltas)

    def _fragments(self, fragments: Callable[[str], Iterable[Any]]) -> Iterator[bytes]:
        """A reply with one call whose arguments arrive as these fragments."""
        call = self._some()[0]
        sent = [self.fragment(0, part) for part in fragments(call["function"]["arguments"])]
        return self._calling([self.opening(0, call), *sent])

    def _error(self, code: Any, message: str) -> Message:
        """The error that the step describes, else this one."""
        return {"code": self.step.get("code", code), "message": self.step.get("message", message)}

    def _items(self, items: Iterable[Message]) -> Iterator[bytes]:
        """A whole reply with one delta for each of these items of calls."""
        return self._calling([{"tool_calls": [item]} for item in items])

    def _refusal(self, wrong: bool, message: str) -> Actions:
        """400 with this message if the request is wrong, else the reply of the step."""
        return json_body(error_body(message), 400) if wrong else self.actions()

    def _callers(self) -> list[Message]:
        """The messages of the request that call."""
        return [message for message in self.request["messages"] if _calls(message)]

    def _followers(self) -> set[tuple[Any, Any]]:
        """Every pair of roles that stand behind one another in the request."""
        return set(itertools.pairwise(_role(message) for message in self.request["messages"]))

    # The stream ends too early, or never.

    def cut_text(self) -> Actions:
        """Half the text, then a clean end without finish_reason and [DONE] (B7)."""
        return self.events(half(self.deltas()))

    def cut_call(self) -> Actions:
        """Half of a call's arguments, then a clean end (B7)."""
        return self.events(content(words(self.given)) + self.call_deltas(self._some())[:-2])

    def cut_chunk(self) -> Actions:
        """Half the text, then the connection closes without the last chunk (E17)."""
        return [*self.events(half(self.deltas())), Do.CLOSE]

    def reset(self) -> Actions:
        """Half the text, then a TCP reset."""
        return [*self.events(half(self.deltas())), Do.RESET]

    def drop(self) -> Actions:
        """The connection closes before the status line (E16)."""
        return [Do.CLOSE]

    def stall(self) -> Actions:
        """A few deltas, then silence until the client leaves (E20)."""
        return [*self.events(self.deltas()[:3]), SILENCE]

    def keepalive_stall(self) -> Actions:
        """Comments for ever and nothing else (E19)."""
        while True:
            yield b": ping\n\n"
            yield Pause(0.05)

    def open_after_done(self) -> Actions:
        """A whole reply with [DONE], then the socket stays open (C9)."""
        return [*self.stream(), SILENCE]

    def no_done(self) -> Actions:
        """A finish_reason and a clean end, but no [DONE]."""
        return self.stream(done=b"")

    def no_finish(self) -> Actions:
        """[DONE], but never a finish_reason (B6)."""
        return [*self.events(), *self.usage_events(), DONE]

    def no_last_line_end(self) -> Actions:
        """[DONE], but neither a line end nor a blank line behind it."""
        return self.stream(done=DONE.rstrip())

    # The finish_reason does not fit.

    def length(self) -> Actions:
        """Half of a call's arguments and finish_reason length (B3)."""
        return self._calling(self.call_deltas(self._some())[:-2], "length")

    def length_whole_call(self) -> Actions:
        """A call that parses, but finish_reason length (B4)."""
        return self._calling(self.call_deltas(self._some()), "length")

    def length_text(self) -> Actions:
        """Half the text and finish_reason length."""
        return self.stream(half(self.deltas()), "length")

    def content_filter(self) -> Actions:
        """Half the text and finish_reason content_filter (B10)."""
        return self.stream(half(self.deltas()), "content_filter")

    def finish_stop_with_calls(self) -> Actions:
        """A call, but finish_reason stop (B1)."""
        return self._calling(self.call_deltas(self._some()), "stop")

    def announced_missing_call(self) -> Actions:
        """Text and finish_reason tool_calls, but no call (B12)."""
        return self.stream(reason="tool_calls")

    def announced_nothing(self) -> Actions:
        """finish_reason tool_calls, but neither text nor call (B12)."""
        return self.stream([], "tool_calls")

    def cut_call_labelled_whole(self) -> Actions:
        """Half of a call's arguments, but finish_reason tool_calls (B5)."""
        return self._calling(self.call_deltas(self._some())[:-2], "tool_calls")

    def bare_error_finish(self) -> Actions:
        """Half the text and finish_reason error without an error (B9)."""
        return self.stream(half(self.deltas()), "error")

    def late_tail(self) -> Actions:
        """The second half of the text behind finish_reason stop (B13)."""
        deltas = self.deltas()
        first = half(deltas)
        yield from self.stream(first, "stop", done=b"")
        yield from [*map(self.event, deltas[len(first) :]), DONE]

    def late_fragment(self) -> Actions:
        """The last fragments of a call behind finish_reason tool_calls (B13)."""
        deltas = content(words(self.given)) + self.call_deltas(self._some())
        yield from self.stream(deltas[:-2], "tool_calls", done=b"")
        yield from [*map(self.event, deltas[-2:]), DONE]

    def finish_with_fragment(self) -> Actions:
        """The last fragment of a call and the finish_reason in one chunk (B15)."""
        *deltas, last = self.call_deltas(self._some())
        yield from self.events(content(words(self.given)) + deltas)
        yield from [self.event(last, "tool_calls"), *self.usage_events(), DONE]

    # Errors that look like replies, and the other way round.

    def error_in_200(self) -> Actions:
        """An error object as an event of a 200 stream; code, message (C20)."""
        before = self.events() if self.given else []
        return [*before, sse({"error": self._error(502, "Upstream failed"), "choices": []})]

    def error_string(self) -> Actions:
        """An event whose error is a string; message (C20)."""
        error = self._error(None, "model runner has unexpectedly stopped")
        return [*(self.events() if self.given else []), sse({"error": error["message"]})]

    def error_flat(self) -> Actions:
        """An error without a key of that name as an event, as from vLLM; code, message (C20)."""
        before = self.events() if self.given else []
        error = self._error(500, "Failed inside")
        return [*before, sse({"object": "error", "type": "InternalServerError"} | error), DONE]

    def error_event(self) -> Actions:
        """An event of the type error, without a key of that name; message (C21)."""
        before = self.events() if self.given else []
        payload = {"type": "overloaded_error"} | self._error(529, "Overloaded")
        return [*before, b"event: error\n" + sse(payload)]

    def error_finish(self) -> Actions:
        """finish_reason error with the error beside the choices (B9)."""
        choice = {"index": 0, "delta": {}, "finish_reason": "error"}
        error = self._error(502, "Provider disconnected")
        return [*self.events(half(self.deltas())), sse(self.chunk([choice], error=error)), DONE]

    def json_error_200(self) -> Actions:
        """An error as application/json with status 200; code, message (C17)."""
        return json_body({"error": {"type": "server_error"} | self._error(500, "Failed inside")})

    def json_reply(self) -> Actions:
        """A whole JSON completion where a stream was asked for (C17)."""
        return json_body(self.completion())

    def json_reply_as_stream(self) -> Actions:
        """A whole JSON completion that is headed as a stream (C17)."""
        return json_body(self.completion(), headers={"Content-Type": "text/event-stream"})

    def json_lines(self) -> Actions:
        """The events as bare lines of JSON, without data: and [DONE]."""
        return (event[6:-1] for event in self.stream(done=b""))

    def html(self) -> Actions:
        """A login page with status 200 (C18)."""
        page = b"<!DOCTYPE html>\n<html><title>Log in</title><p>Please log in.</html>\n"
        return whole(page, 200, {"Content-Type": "text/html; charset=utf-8"})

    def empty(self) -> Actions:
        """A 200 stream without any event (C19)."""
        return [Head()]

    def only_done(self) -> Actions:
        """A 200 stream with nothing but [DONE] (C19)."""
        return [DONE]

    def only_comments(self) -> Actions:
        """A 200 stream with nothing but comments (C19)."""
        return [b": ping\n\n"] * 3

    def overload_text(self) -> Actions:
        """The words of an overload as the text of a good reply (E10)."""
        return self.stream(content([OVERLOAD]))

    def empty_reply(self) -> Actions:
        """finish_reason stop, but no text and no call."""
        return self.stream([])

    def redirect(self) -> Actions:
        """302 to a login page; location."""
        return whole(b"", 302, {"Location": self.step.get("location", "/login")})

    def context_overflow(self) -> Actions:
        """400 context_length_exceeded as from OpenAI (E12); code, message."""
        said = (
            "This model's maximum context length is 8192 tokens. However, your messages resulted "
            "in 9001 tokens. Please reduce the length of the messages."
        )
        error = self._error("context_length_exceeded", said)
        return json_body(error_body(error["message"], code=error["code"]), 400)

    def context_overflow_llama(self) -> Actions:
        """400 exceed_context_size_error with n_ctx as from llama.cpp (E11)."""
        said = "the request exceeds the available context size, try increasing it"
        error = self._error(400, said) | {"type": "exceed_context_size_error"}
        return json_body({"error": {**error, "n_prompt_tokens": 9001, "n_ctx": 8192}}, 400)

    def too_large_for_a_minute(self) -> Actions:
        """429 that looks like a rate limit, but no wait is long enough (E15)."""
        said = "Request too large on tokens per minute (TPM): Limit 6000, Requested 14810"
        body = error_body(said, "tokens", "rate_limit_exceeded")
        return json_body(body, 429, {"Retry-After": "1"})

    def usage_limit(self) -> Actions:
        """429 that will not go away soon: usage_limit_reached (E3)."""
        return json_body(error_body("The usage limit was reached.", "usage_limit_reached"), 429)

    def prompt_filtered(self) -> Actions:
        """400 content_filter as from Azure (B11)."""
        said = "The response was filtered due to the prompt."
        return json_body(error_body(said, "", "content_filter"), 400)

    def error_list(self) -> Actions:
        """400 whose body is a list, as from Gemini; code, message (E23)."""
        return json_body([{"error": self._error(400, "Unknown name. Cannot find field.")}], 400)

    def error_nested(self) -> Actions:
        """400 with the real error as text inside the error, as from OpenRouter; message (E23)."""
        raw = dumps({"error": self._error(400, "tools.0: bad schema")}).decode()
        inner = {"code": 400, "message": "Provider returned error", "metadata": {"raw": raw}}
        return json_body({"error": inner}, 400)

    def insufficient_quota(self) -> Actions:
        """429 that will not go away: insufficient_quota (E1)."""
        said = "You exceeded your current quota, please check your plan and billing details."
        return json_body(error_body(said, "insufficient_quota", "insufficient_quota"), 429)

    # The request has to be changed; with `times: 2` the second one gets the reply.

    def refuses_stream_options(self) -> Actions:
        """400 for stream_options (C28)."""
        said = "Unrecognized request argument supplied: stream_options"
        return self._refusal("stream_options" in self.request, said)

    def refuses_reasoning(self) -> Actions:
        """400 for any form of reasoning in the history (D5)."""
        keys = {key for message in self.request["messages"] for key in message if key in EXTRAS}
        said = f"for 'role:assistant' the property '{', '.join(sorted(keys))}' is unsupported"
        return self._refusal(bool(keys), said)

    def wants_reasoning(self) -> Actions:
        """400 if a message with calls lacks its reasoning_content (D3)."""
        said = "The `reasoning_content` in the thinking mode must be passed back to the API."
        return self._refusal(any("reasoning_content" not in m for m in self._callers()), said)

    def wants_signatures(self) -> Actions:
        """400 if a call lacks its extra_content (D9)."""
        calls = [call for message in self._callers() for call in _calls(message)]
        said = "Function call is missing a thought_signature in functionCall parts."
        return self._refusal(any("extra_content" not in call for call in calls), said)

    def wants_ids_of_nine(self) -> Actions:
        """400 unless every call id is nine letters or digits, as from Mistral (A22)."""
        ids = [str(call.get("id")) for message in self._callers() for call in _calls(message)]
        odd = [i for i in ids if not re.fullmatch("[A-Za-z0-9]{9}", i)]
        said = f"Tool call id was {odd[:1]} but must be a-z, A-Z, 0-9, with a length of 9."
        return self._refusal(bool(odd), said)

    def wants_short_ids(self) -> Actions:
        """400 if a call id has more than 40 characters, as from OpenAI (A23)."""
        ids = [str(call.get("id")) for message in self._callers() for call in _calls(message)]
        said = "Invalid 'messages[2].tool_calls[0].id': string too long. The maximum length is 40."
        return self._refusal(any(len(i) > 40 for i in ids), said)

    def refuses_null_content(self) -> Actions:
        """400 if the content of a message is null (F6)."""
        null = any(message.get("content") is None for message in self.request["messages"])
        return self._refusal(null, "Invalid value for 'content': expected a string, got null.")

    def refuses_text_with_calls(self) -> Actions:
        """400 if a message has both text and calls, as from Mistral (F7)."""
        said = "Assistant message must have either content or tool_calls, but not both."
        return self._refusal(any(message.get("content") for message in self._callers()), said)

    def wants_alternating_roles(self) -> Actions:
        """400 if two messages of the user or two of the assistant stand together (F12)."""
        equal = {("user", "user"), ("assistant", "assistant")} & self._followers()
        said = "Conversation roles must alternate user/assistant/user/assistant/..."
        return self._refusal(bool(equal), said)

    def refuses_user_after_tool(self) -> Actions:
        """400 if a user message stands behind a result, as from Mistral (F13)."""
        said = "Unexpected role 'user' after role 'tool'"
        return self._refusal(("tool", "user") in self._followers(), said)

    def refuses_tool_turns(self) -> Actions:
        """400 for any call and any result in the history (F19)."""
        said = "messages: tool_use ids were found without tool_result blocks"
        return self._refusal(bool(self._callers()), said)

    def wants_names_of_results(self) -> Actions:
        """400 if a result lacks the name of its tool, as from Gemini."""
        results = [m for m in self.request["messages"] if _role(m) == "tool"]
        said = "GenerateContentRequest.contents[2].parts[0].function_response.name: Name is empty."
        return self._refusal(any(not m.get("name") for m in results), said)

    # Bytes and framing.

    def crlf(self) -> Actions:
        """Lines end with CR LF (C4)."""
        return (event.replace(b"\n", b"\r\n") for event in self.stream())

    def cr(self) -> Actions:
        """Lines end with CR alone (C4)."""
        return (event.replace(b"\n", b"\r") for event in self.stream())

    def no_space(self) -> Actions:
        """No space behind "data:" (C3)."""
        return (event.replace(b"data: ", b"data:", 1) for event in self.stream())

    def comments(self) -> Actions:
        """A comment before every event (C1)."""
        return (b": OPENROUTER PROCESSING\n\n" + event for event in self.stream())

    def multi_line_data(self) -> Actions:
        """The JSON of an event spread over several data lines (C5)."""
        for event in self.stream(done=b""):
            lines = json.dumps(json.loads(event[6:]), indent=0).split("\n")
            yield "".join(f"data: {line}\n" for line in lines).encode() + b"\n"
        yield DONE

    def no_blank_lines(self) -> Actions:
        """Every event is one line, and no blank line ends it."""
        return (event[:-1] for event in self.stream())

    def named_events(self) -> Actions:
        """Every event has a name, an id and a ping before it."""
        mark = b"event: ping\ndata: {}\n\nevent: message\nid: 1\nretry: 3000\n"
        return (mark + event for event in self.stream())

    def crlf_cut(self) -> Actions:
        """Lines end with CR LF, and every CR ends a chunk (C14)."""
        for event in self.stream():
            yield from (line for line in re.split(rb"(?<=\r)", event.replace(b"\n", b"\r\n")))

    def spliced(self) -> Actions:
        """An event begins in the middle of another one (C7)."""
        first, *rest = self.stream()
        return [first, first.rstrip()[:-20] + rest[0], *rest[1:]]

    def bad_utf8(self) -> Actions:
        """A byte that is no UTF-8 in front of every text."""
        key = b'"content":"'
        return (event.replace(key, key + b"\xff") for event in self.stream())

    def surrogates_cut(self) -> Actions:
        """The two halves of an escaped character in two events."""
        halves = [rb"\ud83d", rb"\ude00"]
        parts = [self.event({"content": "?"}).replace(b"?", each) for each in halves]
        return itertools.chain([*self.events(), *parts], self.ending("stop"))

    def bom(self) -> Actions:
        """A byte order mark before the first event (C16)."""
        return itertools.chain([b"\xef\xbb\xbf"], self.stream())

    def unicode_separators(self) -> Actions:
        """Raw U+2028, U+2029, U+0085 and vertical tab inside the text (C11)."""
        text = self.given or "one\u2028two\u2029three\u0085four\x0bfive"
        stream = self.stream(content(words(text)))
        return (event.replace(rb"\u000b", b"\x0b") for event in stream)

    def split_bytes(self) -> Actions:
        """Every byte is a write and a chunk of its own (C12)."""
        whole_stream = b"".join(self.stream(content(words(self.given or EMOJI))))
        return [bytes([byte]) for byte in whole_stream]

    def chopped(self) -> Actions:
        """Chunks of random sizes that respect no event and no character; the seed decides."""
        rest = b"".join(self.stream(content(words(self.given or EMOJI))))
        while rest:
            size = self.server.random.randint(1, 40)
            yield rest[:size]
            rest = rest[size:]

    def close_delimited(self) -> Actions:
        """No chunks and no length: the end of the connection ends the body (C13)."""
        return itertools.chain([Head(headers={"Connection": "close"})], self.stream())

    def gzip_unannounced(self) -> Actions:
        """The body is compressed, no header says so (C15)."""
        packer = zlib.compressobj(wbits=31)
        for event in self.stream():
            yield packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH)
        yield packer.flush()

    def gzip_announced(self) -> Actions:
        """The body is compressed although nobody asked, and a header says so (C15)."""
        headers = {"Content-Encoding": "gzip"}
        return itertools.chain([Head(headers=headers)], self.gzip_unannounced())

    # The deltas of calls.

    def index_missing(self) -> Actions:
        """Two calls without any index (A1)."""
        return self._each(lambda item: item.pop("index"), 2)

    def index_and_id_missing(self) -> Actions:
        """Two calls with neither index nor id (A2)."""

        def change(item: Message) -> None:
            item.pop("index")
            item.pop("id", None)

        return self._each(change, 2)

    def index_text(self) -> Actions:
        """The index is a number in a string."""
        return self._each(lambda item: item.update(index=str(item["index"])), 2)

    def index_zero_without_ids(self) -> Actions:
        """Two calls, each in one piece, both with index 0 and an empty id (A3)."""
        calls = [{**call, "id": ""} for call in self._some(2)]
        return self._calling([self.opening(0, c, c["function"]["arguments"]) for c in calls])

    def one_event(self) -> Actions:
        """Two whole calls in one event, as from Mistral."""
        items = [{**call, "index": n} for n, call in enumerate(self._some(2))]
        return self._calling([{"tool_calls": items}])

    def index_always_zero(self) -> Actions:
        """Two calls, each in one piece, both with index 0 (A3)."""
        calls = self._some(2)
        return self._calling([self.opening(0, c, c["function"]["arguments"]) for c in calls])

    def index_from_one(self) -> Actions:
        """The first index is 1 (A19)."""
        return self._each(lambda item: item.update(index=item["index"] + 1))

    def id_missing(self) -> Actions:
        """Two calls without any id (A11)."""
        return self._each(lambda item: item.pop("id", None), 2)

    def id_late(self) -> Actions:
        """The id comes with the last fragment only (A7)."""
        call = self._some()[0]
        first, *rest = [delta["tool_calls"][0] for delta in self.call_deltas([call])]
        opening = {key: value for key, value in first.items() if key != "id"}
        return self._items([opening, *rest[:-1], {**rest[-1], "id": call["id"]}])

    def id_duplicate(self) -> Actions:
        """Two calls with the same id (A21)."""
        calls = [{**call, "id": "exec:0"} for call in self._some(2)]
        return self._calling(self.call_deltas(calls))

    def id_churn(self) -> Actions:
        """Every fragment of one call has a new id and an empty name (A4)."""
        count = itertools.count()

        def change(item: Message) -> None:
            item["id"] = f"k{next(count)}"
            item["function"].setdefault("name", "")

        return self._each(change)

    def name_split(self) -> Actions:
        """The name arrives in two halves (A6)."""
        call = self._some()[0]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        first, *rest = pieces(name, 2)
        start = self.opening(0, {**call, "function": {"name": first}})
        more = [{"tool_calls": [{"index": 0, "function": {"name": part}}]} for part in rest]
        return self._calling([start, *more, *(self.fragment(0, p) for p in pieces(arguments))])

    def name_late(self) -> Actions:
        """The name comes behind the id, with the first fragment (A7)."""
        first, second, *rest = [delta["tool_calls"][0] for delta in self.call_deltas(self._some())]
        name = first["function"].pop("name")
        return self._items(
            [first, {**second, "function": {"name": name} | second["function"]}, *rest]
        )

    def name_empty(self) -> Actions:
        """Every later fragment has an empty name (A8)."""
        return self._each(lambda item: item["function"].setdefault("name", ""))

    def name_repeated(self) -> Actions:
        """Every fragment repeats the name."""
        name = self._some()[0]["function"]["name"]
        return self._each(lambda item: item["function"].update(name=name))

    def null_fields(self) -> Actions:
        """What a fragment does not need is there and null (A10)."""

        def change(item: Message) -> None:
            item |= {"id": item.get("id"), "type": item.get("type")}
            item["function"].setdefault("name", None)

        return self._each(change)

    def type_missing(self) -> Actions:
        """No item has a type (A26)."""
        return self._each(lambda item: item.pop("type", None))

    def function_null(self) -> Actions:
        """An item without a function and lists of no items between the fragments."""
        items = [delta["tool_calls"][0] for delta in self.call_deltas(self._some())]
        empty: list[Message] = [{"tool_calls": None}, {"tool_calls": []}]
        null = [{"index": 0, "function": None}]
        return self._calling([{"tool_calls": [i]} for i in items] + empty + [{"tool_calls": null}])

    def arguments_dict(self) -> Actions:
        """The arguments are an object, not a string (A15)."""
        return self._fragments(lambda arguments: [json.loads(arguments)])

    def arguments_cumulative(self) -> Actions:
        """Every fragment repeats all before it, the last comes twice (A12)."""
        return self._fragments(lambda a: [*itertools.accumulate(pieces(a)), a])

    def arguments_placeholder(self) -> Actions:
        """An empty object before the real arguments (Anthropic behind a converter)."""
        return self._fragments(lambda arguments: ["{}", *pieces(arguments)])

    def arguments_of_two_calls(self) -> Actions:
        """The objects of two calls under one index and id (A14)."""
        return self._fragments(lambda arguments: [arguments, '{"path":"docs"}'])

    def call_resent(self) -> Actions:
        """The call in fragments, then once more as a whole (A13)."""
        call = self._some()[0]
        again = self.opening(0, call, call["function"]["arguments"])
        return self._calling([*self.call_deltas([call]), again])

    def arguments_twice(self) -> Actions:
        """The whole arguments are sent twice."""
        return self._fragments(lambda arguments: [arguments, arguments])

    def arguments_double_encoded(self) -> Actions:
        """The arguments are a JSON string that holds the JSON object."""
        return self._fragments(lambda arguments: pieces(json.dumps(arguments)))

    def arguments_empty(self) -> Actions:
        """A call whose arguments stay the empty string (A17)."""
        call = self.calls[0] if self.calls else self.call({"call": "list_files"})
        return self._calling([self.opening(0, call)])

    def arguments_malformed(self) -> Actions:
        """The arguments are whole but no JSON."""
        return self._fragments(lambda arguments: pieces(arguments[:-1] + ",,"))

    def interleaved(self) -> Actions:
        """Two calls whose fragments alternate."""
        each = [self.call_deltas([call], n) for n, call in enumerate(self._some(2))]
        rows = itertools.zip_longest(*each)
        return self._calling([delta for row in rows for delta in row if delta])

    def legacy_function_call(self) -> Actions:
        """A function_call of the API before tools."""
        function = self._some()[0]["function"]
        first = {"name": function["name"], "arguments": ""}
        rest = [{"arguments": part} for part in pieces(function["arguments"])]
        return self._calling([{"function_call": f} for f in [first, *rest]], "function_call")

    def call_as_text(self) -> Actions:
        """The call stands in the text as <tool_call>, finish_reason stop (A27)."""
        function = self._some()[0]["function"]
        call = {"name": function["name"], "arguments": json.loads(function["arguments"])}
        text = f"{self.given}<tool_call>\n{json.dumps(call)}\n</tool_call>"
        return self.stream(content(words(text)))

    def thought_signature(self) -> Actions:
        """The item of the call carries extra_content with a signature (D9)."""
        extra = {"google": {"thought_signature": "c2lnbmF0dXJl"}}
        return self._each(lambda item: "id" in item and item.update(extra_content=extra))

    # The deltas of text.

    def content_parts(self) -> Actions:
        """The content is a list of parts, one of them thinking (C25)."""
        thought = [{"type": "text", "text": self.step.get("reasoning", "Hm.")}]
        parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": self.text}]
        return self.stream([{"content": parts}])

    def reasoning_key(self) -> Actions:
        """Reasoning under the name `reasoning` (D1)."""
        thoughts = [{"reasoning": text} for text in words(self.step.get("reasoning", "Hm."))]
        return self.stream(thoughts + content(words(self.text)) + self.call_deltas(self.calls))

    def reasoning_details(self) -> Actions:
        """Reasoning twice, also as fragments of a list; the signature comes last (D8)."""
        block = {"type": "reasoning.text", "index": 0}
        thoughts = [
            {"reasoning": text, "reasoning_details": [{**block, "text": text}]}
            for text in words(self.step.get("reasoning", "Hm."))
        ]
        thoughts.append({"reasoning_details": [{**block, "signature": "c2lnbmF0dXJl"}]})
        return self.stream(thoughts + content(words(self.text)) + self.call_deltas(self.calls))

    def message_beside_delta(self) -> Actions:
        """Every event also has the message so far, the last one with an empty delta."""
        said = ""
        for text in [*words(self.text), ""]:
            said += text
            message = {"role": "assistant", "content": said}
            delta = {"content": text} if text else {}
            yield sse(self.chunk([{"index": 0, "delta": delta, "message": message}]))
        yield from self.stream(self.call_deltas(self.calls))

    def think_tags(self) -> Actions:
        """Reasoning in <think> tags inside the text, the tags cut in two (D10)."""
        text = f"<think>{self.step.get('reasoning', 'Hm.')}</think>{self.text}"
        return self.stream(content(pieces(text, len(text) // 4)))

    def refusal(self) -> Actions:
        """The text comes as refusal, the content is null (D12)."""
        said = words(self.given or "I cannot help with that.")
        return self.stream([{"content": None, "refusal": text} for text in said])

    def two_choices(self) -> Actions:
        """A second choice between the deltas of the first."""
        yield self.event({"role": "assistant", "content": ""})
        for delta in self.deltas():
            yield from [self.event({"content": "other "}, index=1), self.event(delta)]
        yield from [self.event({}, "stop", index=1), *self.ending("stop")]

    def nulls_for_choices(self) -> Actions:
        """Events whose choices, choice or delta is null between the deltas (C23)."""
        nulls = [{"choices": None}, {"choices": [None]}, {"choices": [{"index": 0, "delta": None}]}]
        for event in self.stream():
            yield from [*map(sse, nulls), event]

    def usage_first_chunk_empty_choices(self) -> Actions:
        """The first chunk has no choices, but a filter report and usage (C23)."""
        first = sse(self.chunk([], prompt_filter_results=[], usage=self.usage()))
        return itertools.chain([first], self.stream())


CALLS = [
    {"name": "read_file", "arguments": {"path": "README.md"}},
    {"name": "list_files", "arguments": {"path": "."}},
]
EXTRAS = ("reasoning", "reasoning_content", "reasoning_details")
OVERLOAD = "Selected model is at capacity. Please try a different model."
EMOJI = "Grüße, 世界 \N{WHITE HEAVY CHECK MARK} \N{WAVING HAND SIGN}\U0001f3fd!"
FAULTS: dict[str, Callable[[Fault], Actions]] = {
    name: method for name, method in vars(Fault).items() if not name.startswith("_")
}


# The demo of the agent: a small project with a bug, and a model that finds it.

DEMO_FILES = {
    "stats.py": '''\
"""Small statistics."""


def moving_average(values, width):
    """The mean of each window of `width` neighbours."""
    return [sum(values[i : i + width]) / width for i in range(len(values) - width)]
''',
    "test_stats.py": """\
import unittest

from stats import moving_average


class MovingAverage(unittest.TestCase):
    def test_every_window_counts(self):
        self.assertEqual(moving_average([1, 2, 3, 4], 2), [1.5, 2.5, 3.5])


if __name__ == "__main__":
    unittest.main()
""",
}


def demo_script(test: str) -> list[Any]:
    """What the scripted model does: a rate limit first, then the work."""
    old, new = "range(len(values) - width)]", "range(len(values) - width + 1)]"
    return [
        {
            "status": 429,
            "headers": {"Retry-After": "1"},
            "body": {"error": {"message": "slow down"}},
        },
        {"text": "I look at the project first.", "call": "list_files", "arguments": {}},
        {"text": "Now the failing test.", "call": "bash", "arguments": {"command": test}},
        {"call": "read_file", "arguments": {"path": "stats.py"}},
        {
            "text": "The last window is left out: the range ends one too early.",
            "call": "edit_file",
            "arguments": {"path": "stats.py", "old": old, "new": new},
        },
        {"text": "Again the test.", "call": "bash", "arguments": {"command": test}},
        "Fixed: the range ended one window too early (stats.py, line 6). The test passes now.",
    ]


# == 4. Server ================================================================

STEP_KINDS = {"text", "call", "calls", "reasoning", "status", "raw", "fault"}
STEP_TYPES: list[tuple[Any, str]] = [
    (str, "text call reasoning fault id finish_reason model hold message location"),
    (int, "status times hold_after"),
    (dict, "headers usage"),
    (list, "calls"),
    ((str, bytes), "raw"),
    ((str, dict, list), "body"),
    ((str, int), "code"),
    (NUMBER, "delay"),
    (object, "arguments"),
]
STEP_KEYS = {key: kinds for kinds, keys in STEP_TYPES for key in keys.split()}


class FlakyServer:
    """A scripted provider on 127.0.0.1; see the module docstring for the script.

    A list is checked at once (ValueError); any other iterable is read as it is used, so it may
    be endless. `log` gets one line per request. `requests` are the chat requests that parse, `bad`
    the bodies that do not, with the reason; `replies` the status codes sent to chat requests;
    `errors` what went wrong in the script's functions or here. `holding` is set while something
    waits for release(). A client that left is noticed within 10 ms: call wait_idle() before the
    next wait for `holding`.
    """

    def __init__(
        self,
        script: Iterable[Step] | None = None,
        seed: int = 0,
        port: int = 0,
        key: str | None = None,
        *,
        log: Callable[[str], None] | None = None,
    ) -> None:
        if isinstance(script, (str, dict)):
            raise TypeError("a script is a list of steps")
        steps = [] if script is None else script
        listed = isinstance(steps, (list, tuple))
        self._script: Iterator[Step] = iter([check_step(s) for s in steps] if listed else steps)
        self._guard = threading.Condition()
        self._releases: set[threading.Event] = set()
        self._connections: set[socket.socket] = set()
        self._ids: set[str] = set()
        self._id_count = itertools.count(1)
        self._active = 0
        self._http: _Http | None = None
        self.seed, self.port, self.key, self.log = seed, port, key, log
        self.random = random.Random(seed)
        self.requests: list[Recorded] = []
        self.bad: list[tuple[bytes, str]] = []
        self.replies: list[int] = []
        self.errors: list[str] = []
        self.holding = threading.Event()
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        """The base URL for a client, once the server has started."""
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> Self:
        """Bind and serve in a thread of its own; OSError if the port is taken."""
        self.closing.clear()
        self._http = _Http(("127.0.0.1", self.port), _Handler)
        self._http.flaky = self
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.005,), daemon=True).start()
        return self

    def close(self) -> None:
        """Stop; every open connection ends now, also those that hold or stall."""
        if self._http is None:
            return
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()
        self._http = None
        with self._guard:
            for connection in self._connections:
                hang_up(connection)
        self.wait_idle()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def release(self) -> None:
        """Let everything that holds go on."""
        with self._guard:
            self.holding.clear()
            for event in self._releases:
                event.set()
            self._releases.clear()

    def wait_idle(self, timeout: float = 5.0) -> bool:
        """Wait until no request is being answered; False if that took too long."""
        with self._guard:
            return self._guard.wait_for(lambda: self._active == 0, timeout)

    def wait_holding(self, count: int = 1, timeout: float = 5.0) -> bool:
        """Wait until so many requests hold; False if that took too long."""
        with self._guard:
            return self._guard.wait_for(lambda: len(self._releases) >= count, timeout)

    def new_id(self) -> str:
        """A call id that this server has neither sent nor seen."""
        with self._guard:
            made = next(i for n in self._id_count if (i := f"call_{n}") not in self._ids)
            self._ids.add(made)
            return made

    # From here on: for the threads that answer.

    def begin(self, connection: socket.socket) -> None:
        """A connection is open."""
        with self._guard:
            self._connections.add(connection)
            if self.closing.is_set():
                hang_up(connection)

    def end(self, connection: socket.socket) -> None:
        """A connection has ended."""
        with self._guard:
            self._connections.discard(connection)

    def busy(self, change: int) -> None:
        """One more request (or, with -1, one less) is being answered."""
        with self._guard:
            self._active += change
            self._guard.notify_all()

    def hold(self, event: threading.Event) -> None:
        """Somebody waits for this event."""
        with self._guard:
            self._releases.add(event)
            self._guard.notify_all()
            self.holding.set()

    def unhold(self, event: threading.Event) -> None:
        """Nobody waits for this event any more."""
        with self._guard:
            self._releases.discard(event)
            if not self._releases:
                self.holding.clear()

    def answer(self, raw: bytes, path: str, headers: Any) -> tuple[Actions, list[str]]:
        """Record a chat request and decide what it gets; also the problems found."""
        try:
            body = parse_json(raw.decode())
            reason = "" if isinstance(body, dict) else "the body is not a JSON object"
        except ValueError as error:
            reason = str(error)
        if reason:
            with self._guard:
                self.bad.append((raw, reason))
            return json_body(error_body(f"invalid body: {reason}"), 400), [reason]
        request = Recorded(body, raw, path, headers)
        request.problems = validate(request)
        with self._guard:
            self.requests.append(request)
            messages = body.get("messages")
            for message in messages if isinstance(messages, list) else []:
                self._ids.update(i for c in _calls(message) if isinstance(i := c.get("id"), str))
        if not self.allows(headers):
            return json_body(KEY_REFUSED, 401), ["wrong key"]
        if request.problems:
            reason = f"invalid request: {'; '.join(request.problems)}"
            return json_body(error_body(reason), 400), request.problems
        return self.next_actions(request), []

    def allows(self, headers: Any) -> bool:
        """Does the request carry the key, if one is needed?"""
        return self.key is None or headers.get("Authorization") == f"Bearer {self.key}"

    def next_actions(self, request: Recorded) -> Actions:
        """The next step of the script as actions."""
        with self._guard:
            step = next(self._script, None)
            if isinstance(step, dict) and step.get("times", 1) > 1:
                again = itertools.repeat({**step, "times": 1}, step["times"] - 1)
                self._script = itertools.chain(again, self._script)
        if step is None:
            return json_body(error_body("flaky_server: the script has ended"), 400)
        try:
            while callable(step):
                step = step(request)
            return step_actions(check_step(step), request, self)
        except Exception as error:  # a step of the user's; a thread has nobody to raise it to
            reason = f"flaky_server: the step failed: {type(error).__name__}: {error}"
            self.errors.append(reason)
            return json_body(error_body(reason), 400)


KEY_REFUSED = error_body("Incorrect API key provided.", code="invalid_api_key")


def check_step(step: Step) -> Step:
    """The step itself; ValueError if the server would not know what to do with it."""
    if isinstance(step, str) or callable(step):
        return step
    if not isinstance(step, dict) or not STEP_KINDS & set(step):
        raise ValueError(f"not a step: {step!r}")
    if "fault" in step and step["fault"] not in FAULTS:
        raise ValueError(f"unknown fault {step['fault']!r}")
    for key, value in step.items():
        if key not in STEP_KEYS or not isinstance(value, STEP_KEYS[key]):
            raise ValueError(f"unknown key or wrong type: {key!r} in the step {step!r}")
    for item in step.get("calls", []):
        if not isinstance(item, dict) or not _filled(item.get("name") or item.get("call")):
            raise ValueError(f"a call without a name in the step {step!r}")
    if step.get("hold") not in (None, "before"):
        raise ValueError(f'hold: the only value is "before", not {step["hold"]!r}')
    return step


def step_actions(step: Step, request: Recorded, server: FlakyServer) -> Actions:
    """The actions of a step, with its delay and its holds."""
    step = {"text": step} if isinstance(step, str) else step
    actions: Actions
    if "fault" in step:
        actions = FAULTS[step["fault"]](Fault(step, request, server))
    elif "raw" in step or "status" in step:
        actions = fixed_actions(step)
    else:
        actions = Reply(step, request, server).actions()
    if "hold_after" in step:
        actions = held(actions, step["hold_after"])
    first: list[Action] = [Do.HOLD] if step.get("hold") == "before" else []
    return itertools.chain(first, [Pause(step.get("delay", 0))], actions)


def fixed_actions(step: Message) -> Actions:
    """A step that gives the status, the headers and the body itself."""
    status, headers = step.get("status", 200), step.get("headers", {})
    if "raw" in step:
        raw = (
            step["raw"]
            if isinstance(step["raw"], bytes)
            else step["raw"].encode(errors="surrogateescape")
        )
        return [Head(status, headers), raw]
    phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else f"status {status}"
    body = step.get("body", error_body(phrase, "server_error"))
    if not isinstance(body, str):
        return json_body(body, status, headers)
    kind = "text/html" if body.lstrip().startswith("<") else "text/plain"
    return whole(body.encode(), status, {"Content-Type": f"{kind}; charset=utf-8"} | headers)


def replay(path: str | Path) -> list[Step]:
    """The steps that say again what the model said in a saved session.

    The file is a session of agent.py or a bare list of messages. OSError, ValueError.
    """
    saved = parse_json(Path(path).read_text(encoding="utf-8"))
    messages = saved.get("messages") if isinstance(saved, dict) else saved
    replies = [m for m in messages if _role(m) == "assistant"] if isinstance(messages, list) else []
    steps = [check_step(step) for step in map(replay_step, replies) if step]
    if not steps:
        raise ValueError("not a session: no list of messages with a reply in it")
    return steps


def replay_step(message: Message) -> Message:
    """One assistant message as a step, empty if it says nothing."""
    step: Message = {}
    functions = [(call.get("id"), call.get("function")) for call in _calls(message)]
    calls = [{"id": call_id, **item} for call_id, item in functions if isinstance(item, dict)]
    if calls:
        step["calls"] = calls
    for key, source in (("text", "content"), ("reasoning", "reasoning_content")):
        if _filled(message.get(source)):
            step[key] = message[source]
    return step


# == 5. Wire ==================================================================


class Gone(Exception):
    """The client has left, or the server closes: stop answering."""


def hang_up(connection: socket.socket) -> None:
    """End a connection that another thread may be using."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it had ended already


def has_left(connection: socket.socket) -> bool:
    """Has the client closed its side?"""
    try:
        readable, _, _ = select.select([connection], [], [], 0)
        return bool(readable) and not connection.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


class _Http(http.server.ThreadingHTTPServer):
    """The listener. One daemon thread per connection."""

    daemon_threads = True
    request_queue_size = 64
    flaky: FlakyServer

    def server_bind(self) -> None:
        """Bind without the look-up of the host's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep what went wrong in a thread; a client that leaves is nothing wrong."""
        error = sys.exc_info()[1]
        if not isinstance(error, (ConnectionError, Gone)):
            self.flaky.errors.append(repr(error))


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection: reads requests and plays actions."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    @property
    def flaky(self) -> FlakyServer:
        """The server this connection belongs to."""
        return cast(_Http, self.server).flaky

    def setup(self) -> None:
        """Register the connection."""
        super().setup()
        self.flaky.begin(self.connection)

    def finish(self) -> None:
        """Forget the connection."""
        self.flaky.end(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Silent; `FlakyServer.log` is told instead."""

    def do_POST(self) -> None:
        """Answer a chat request; anything else is not found."""
        length = self.headers.get("Content-Length", "")
        self.close_connection |= not length.isdigit()  # where the next request begins is unknown
        raw = self.rfile.read(int(length)) if length.isdigit() else b""
        if self.command != "POST" or self.path.partition("?")[0] != "/v1/chat/completions":
            self.perform(NOT_FOUND, [])
            return
        actions, problems = self.flaky.answer(raw, self.path, self.headers)
        self.perform(actions, problems, self.flaky.replies)

    def do_GET(self) -> None:
        """Answer GET /v1/models; anything else is not found."""
        if self.path.partition("?")[0] != "/v1/models":
            self.perform(NOT_FOUND, [])
        elif not self.flaky.allows(self.headers):
            self.perform(json_body(KEY_REFUSED, 401), ["wrong key"])
        else:
            self.perform(MODELS, [])

    do_PUT = do_PATCH = do_DELETE = do_POST

    def perform(
        self, actions: Actions, problems: list[str], replies: list[int] | None = None
    ) -> None:
        """Play the actions to the end, or until the client leaves."""
        self.status = 0
        self.chunked = False
        self.replies = [] if replies is None else replies
        self.flaky.busy(1)
        try:
            for action in actions:
                self.play(action)
            if not self.status:
                self.play(Head())
            if self.chunked:
                self.wfile.write(b"0\r\n\r\n")
        except (ConnectionError, Gone):
            self.close_connection = True
        finally:
            self.flaky.busy(-1)
            if self.flaky.log:
                said = "; ".join(problems)
                self.flaky.log(f"{self.command} {self.path} {self.status or 'no status'} {said}")

    def play(self, action: Action) -> None:
        """One action. Raises Gone where the connection ends."""
        if isinstance(action, Pause):
            self.wait(action.seconds)
        elif isinstance(action, Head):
            self.send_head(action)
        elif action is Do.HOLD:
            self.hold()
        elif isinstance(action, bytes):
            if not self.status:
                self.send_head(Head())
            self.write(action)
        else:
            if action is Do.RESET:
                self.reset()
            raise Gone

    def send_head(self, head: Head) -> None:
        """The status line and the headers."""
        headers = {"Content-Type": "text/event-stream"}
        for name, value in head.headers.items():
            headers[name.title()] = str(value)
        framed = {"Content-Length", "Transfer-Encoding"} & set(headers)
        self.chunked = not framed and headers.get("Connection") != "close"
        self.status = head.status
        self.replies.append(head.status)
        self.send_response(head.status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def write(self, part: bytes) -> None:
        """Bytes of the body, as a chunk of their own if it is chunked."""
        if part:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part) if self.chunked else part)

    def hold(self) -> None:
        """Wait for release()."""
        released = threading.Event()
        self.flaky.hold(released)
        try:
            self.wait(math.inf, released)
        finally:
            self.flaky.unhold(released)

    def wait(self, seconds: float, until: threading.Event | None = None) -> None:
        """Wait for the time or the event; Gone if the client leaves or the server closes."""
        end = time.monotonic() + seconds
        until = until or threading.Event()
        while not until.is_set() and (left := end - time.monotonic()) > 0:
            if self.flaky.closing.is_set() or has_left(self.connection):
                raise Gone
            until.wait(min(left, 0.01))

    def reset(self) -> None:
        """Close the socket so that the client sees a reset, not an end."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.flaky.end(self.connection)
        os.close(self.connection.detach())  # close() alone waits for rfile, behind a FIN


NOT_FOUND = json_body(error_body("not found"), 404)
MODELS = json_body({"object": "list", "data": [{"id": "flaky-1", "object": "model"}]})


# == 6. Command ===============================================================

CANNED = "Hello! I am a very small model with one sentence, but it is all yours."


def main(argv: list[str] | None = None) -> int:
    """Serve until Ctrl-C (130). 1: the port is taken; 2: usage, or a file that is no script."""
    options = arguments().parse_args(argv)
    if options.list:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` leaves early
        for name, fault in FAULTS.items():
            print(f"{name:32} {fault.__doc__}")
        return 0
    try:
        script = chosen_script(options)
    except (OSError, ValueError) as error:
        print(f"flaky_server: {options.script or options.replay}: {error}", file=sys.stderr)
        return 2
    server = FlakyServer(script, options.seed, options.port, log=log_line)
    try:
        server.start()
    except (OSError, OverflowError) as error:
        print(f"flaky_server: port {options.port}: {error}", file=sys.stderr)
        return 1
    try:
        print(f"{server.url}\nseed {server.seed}", flush=True)
        threading.Event().wait()
        return 0
    except KeyboardInterrupt:
        return 130
    finally:
        server.close()


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        "flaky_server", description="A scripted, strict, flaky provider."
    )
    parser.add_argument("--port", type=int, default=8931, help="default 8931; 0: any free one")
    parser.add_argument("--seed", type=int, default=0, help="for the faults that are random")
    parser.add_argument("--list", action="store_true", help="list the faults and end")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--script", metavar="FILE.json", help="answer from a list of steps")
    source.add_argument("--replay", metavar="SESSION.json", help="answer as a saved session did")
    source.add_argument("--fault", metavar="NAME", choices=FAULTS, help="begin with this fault")
    return parser


def chosen_script(options: argparse.Namespace) -> Iterable[Step]:
    """The script that the command line asks for; a 429 and then friendly words by default."""
    if options.replay:
        return replay(options.replay)
    if options.script:
        script = parse_json(Path(options.script).read_text(encoding="utf-8"))
        if not isinstance(script, list):
            raise ValueError("not a list of steps")
        return [check_step(step) for step in script]
    first: Step = {"status": 429, "headers": {"Retry-After": "1"}}
    if options.fault:
        first = {"fault": options.fault}
    return itertools.chain([first], itertools.repeat(CANNED))


def log_line(line: str) -> None:
    """One line on stderr."""
    print(line.rstrip(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
