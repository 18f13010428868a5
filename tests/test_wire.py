"""Section 4 against the odd servers of the field: the cases are data in tests/wire.

tests/wire/README.md says how a case is written. Here each one is played by the flaky server over
HTTP, and what the client makes of it is compared. Then: no split of the bytes changes a reply, a
well-behaved stream comes through as it was meant, and what a server refuses is mended once.
"""

import base64
import itertools
import json
import re
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent import (
    Client,
    ContextOverflow,
    KeyRefused,
    ProviderError,
    Resolver,
    Settings,
    Transcript,
    Transient,
    TryLater,
    read_events,
    read_lines,
)
from flaky_server import FlakyServer

FOLDER = Path(__file__).parent / "wire"
KEY = "sk-wire-0123456789abcdef"
OFFERED = ["ls", "write", "edit_existing", "list_files", "read_file", "bash"]
OPEN_SECONDS = 10.0  # how long a socket that stays open stays open
quick = settings(max_examples=60, deadline=None, database=None)
thorough = settings(max_examples=3000, deadline=None, database=None)


def load(*names: str) -> list[dict[str, Any]]:
    """The cases of these files."""
    return [case for name in names for case in json.loads((FOLDER / f"{name}.json").read_text())]


ANSWERS = load("a_calls", "b_end", "c_framing")


def table(cases: list[dict[str, Any]]) -> Any:
    """One parameter a case."""
    return pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in cases])


def tools_json(names: list[str]) -> str:
    """The offered tools as a request carries them."""
    schema = {"type": "object", "properties": {}}
    functions = [{"name": n, "description": f"Do {n}.", "parameters": schema} for n in names]
    return json.dumps([{"type": "function", "function": function} for function in functions])


# -- a case as a step of the flaky server


def body_of(case: dict[str, Any]) -> bytes:
    """The bytes of the body."""
    if "body_base64" in case:
        return base64.b64decode(case["body_base64"])
    body = case["body"]
    return ("".join(body) if isinstance(body, list) else str(body)).encode()


def pieces_of(case: dict[str, Any]) -> Iterator[bytes]:
    """The body in the given sizes, the last of them as often as needed; else in its parts."""
    body = body_of(case)
    parts = case.get("body")
    if "chunks" not in case and isinstance(parts, list):
        yield from (part.encode() for part in parts)
        return
    sizes = case.get("chunks", [len(body)])
    at = 0
    for size in itertools.chain(sizes, itertools.repeat(sizes[-1])):
        if at >= len(body):
            return
        yield body[at : at + size]
        at += size


MOMENT = re.compile(r"@(http_date|iso|epoch|epoch_ms)\+(\d+)")


def moment(found: re.Match[str]) -> str:
    """`@http_date+40` is the moment in forty seconds, in that form."""
    at = time.time() + int(found[2])
    return {
        "http_date": formatdate(at, usegmt=True),
        "iso": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at)),
        "epoch": str(int(at)),
        "epoch_ms": str(int(at * 1000)),
    }[found[1]]


def step_of(case: dict[str, Any]) -> dict[str, Any]:
    """The step that sends exactly what the case says."""
    kind = "text/event-stream" if case.get("status", 200) == 200 else "application/json"
    headers = {"Content-Type": kind, **case.get("headers", {})}
    headers = {name: MOMENT.sub(moment, value) for name, value in headers.items()}
    body, end = body_of(case), case.get("after_body", "end")
    framing = case.get("framing", "chunked")
    if framing == "chunked":
        headers["Transfer-Encoding"] = "chunked"
        body = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces_of(case) if p)
        body += b"0\r\n\r\n" if end == "end" else b""
    elif framing == "length":
        headers["Content-Length"] = str(len(body) + (9 if end == "cut" else 0))
    if framing == "close" or end != "end":
        headers["Connection"] = "close"
    step = {"raw": body, "headers": headers, "status": case.get("status", 200)}
    return {**step, "hold_after": 1 << 30} if end == "open" else step


def converse(case: dict[str, Any], *more: Any) -> SimpleNamespace:
    """One request to a server that plays the case and then the other steps."""
    said = SimpleNamespace(reply=None, error=None, calls=[], events=[], waits=[])
    offered = case.get("offered", OFFERED)
    with FlakyServer([step_of(case), *more], key=KEY) as said.server:
        known = Settings(
            base_url=said.server.url,
            api_key=KEY,
            model="flaky-1",
            context=case.get("window", 0),
            environ={},
        )
        emit = lambda kind, **fields: said.events.append((kind, fields))  # noqa: E731
        client = Client(known, emit, sleep=said.waits.append, jitter=lambda: 0.0)
        transcript = Transcript([{"role": "system", "content": "Be short."}])
        transcript.add_user("hi")
        began = time.monotonic()
        try:
            said.reply = client.complete(transcript, tools_json(offered), offered)
            if said.reply.message["content"] or said.reply.message.get("tool_calls"):
                said.calls = transcript.add_reply(said.reply.message)
        except (ProviderError, TryLater) as error:
            said.error = error
        said.took = time.monotonic() - began
        client.close()
    said.text = "".join(fields["text"] for kind, fields in said.events if kind == "text")
    said.thought = "".join(fields["text"] for kind, fields in said.events if kind == "reasoning")
    said.retries = [fields for kind, fields in said.events if kind == "retry"]
    assert [problem for request in said.server.requests for problem in request.problems] == []
    return said


# -- what the client makes of an answer


ERRORS: dict[str, type[Exception]] = {
    "fatal": ProviderError,
    "filtered": ProviderError,
    "quota": ProviderError,
    "key": KeyRefused,
    "overflow": ContextOverflow,
    "later": TryLater,
}


@table(ANSWERS)
def test_an_answer_of_the_field_is_taken_as_it_was_meant(case: dict[str, Any]) -> None:
    expect = case["expect"]
    said = converse(case, "recovered")
    if expect.get("error") == "retry":
        check_retry(said, expect)
    elif expect.get("error") == "empty":
        check_empty(said)
    elif "error" in expect:
        check_error(said, expect)
    else:
        check_reply(said, expect)
    assert said.took < OPEN_SECONDS


def check_retry(said: SimpleNamespace, expect: dict[str, Any]) -> None:
    """The answer was thrown away and asked for again, after the wait that was asked for."""
    assert said.error is None
    assert said.reply.message["content"] == "recovered"
    assert said.calls == []
    (retry,) = said.retries
    assert expect.get("contains", "").lower() in retry["reason"].lower()
    if "after" in expect:
        assert said.waits == [pytest.approx(expect["after"], abs=2)]


def check_empty(said: SimpleNamespace) -> None:
    """Nothing was said: asked again here, or handed to the loop as nothing."""
    assert said.error is None
    content = said.reply.message["content"]
    assert said.calls == []
    assert content == "recovered" or not (content or "").strip()


def check_error(said: SimpleNamespace, expect: dict[str, Any]) -> None:
    """The turn ends at once with an error of this kind and in these words."""
    kind = ERRORS[expect["error"]]
    assert said.reply is None, "the answer was not taken for an error"
    assert isinstance(said.error, kind)
    if kind is ProviderError:
        assert not isinstance(said.error, (KeyRefused, ContextOverflow))
    assert expect.get("contains", "").lower() in str(said.error).lower()
    assert (said.waits, said.retries, len(said.server.requests)) == ([], [], 1)
    if "limit" in expect:
        assert said.error.limit == expect["limit"]


def call_of(call: Any, item: dict[str, Any]) -> dict[str, Any]:
    """A call as a case writes it."""
    extra = {key: value for key, value in item.items() if key not in ("id", "type", "function")}
    found = {"name": call.name, "arguments": call.arguments}
    found |= {"malformed": True} if call.error else {}
    return found | ({"extra": extra} if extra else {})


def check_reply(said: SimpleNamespace, expect: dict[str, Any]) -> None:
    """The first answer was taken, and it says what the case says."""
    assert (said.error, said.retries) == (None, [])
    message = said.reply.message
    content = message["content"] or ""
    end = expect.get("end", "complete")
    assert said.reply.end == end
    assert said.reply.announced is expect.get("announced", False)
    if "calls" in expect or end == "complete":
        items = message.get("tool_calls", [])
        found = [call_of(*pair) for pair in zip(said.calls, items, strict=True)]
        assert found == expect.get("calls", [])
        ids = [call.id for call in said.calls]
        assert all(ids) and len(set(ids)) == len(ids)
    if "text" in expect:
        assert content == expect["text"]
    assert all(words in content for words in expect.get("text_has", []))
    assert said.text == content, "what was shown is not what is stored"
    if "reasoning" in expect:
        assert said.thought == expect["reasoning"]
    for key in ("reasoning_details", "usage"):
        if key in expect:
            found = message.get(key) if key == "reasoning_details" else said.reply.usage
            assert {**found} if key == "usage" else found == expect[key]


# -- bytes may arrive in any pieces


def outcome(chunks: list[bytes]) -> Any:
    """What reader and resolver make of a stream: the reply, or why there is none."""
    resolver = Resolver(OFFERED)
    for name, text in read_events(read_lines(chunks)):
        if text.strip() == "[DONE]":
            resolver.done = True
            break
        try:
            value = json.loads(text, strict=False)
        except ValueError:
            value = None
        if name != "error" and isinstance(value, dict):
            resolver.add(value)
    try:
        reply = resolver.resolve()
    except Transient as failure:
        return str(failure)
    return reply.message, reply.end, reply.announced, reply.usage


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The data in pieces, some of them perhaps empty."""
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


STREAMS = [
    case
    for case in ANSWERS
    if "error" not in case["expect"]
    and "body_base64" not in case
    and body_of(case).lstrip(b"\xef\xbb\xbf\r\n").startswith((b"data:", b":", b"event:", b"id:"))
]
PLACES = st.lists(st.integers(0, 10_000), max_size=12)


def check_any_split(case: dict[str, Any], places: list[int]) -> None:
    data = body_of(case)
    assert outcome(cut(data, places)) == outcome([data])


@quick
@given(st.sampled_from(STREAMS), PLACES)
def test_any_split_of_the_bytes_gives_the_same_reply(
    case: dict[str, Any], places: list[int]
) -> None:
    check_any_split(case, places)


@pytest.mark.long
@thorough
@given(st.sampled_from(STREAMS), PLACES)
def test_any_split_of_the_bytes_gives_the_same_reply_thoroughly(
    case: dict[str, Any], places: list[int]
) -> None:
    check_any_split(case, places)


@table(STREAMS)
def test_a_stream_byte_by_byte_gives_the_same_reply(case: dict[str, Any]) -> None:
    data = body_of(case)
    assert outcome([bytes([byte]) for byte in data]) == outcome([data])
