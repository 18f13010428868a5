"""Section 4, the client: bytes to events, fragments to a reply, errors, retries, what is sent.

The letters behind the ids of the rows are those of the survey of real servers that the rows
imitate. `C` is one event with one delta, `T` one with a fragment of a tool call.
"""

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    TryLater,
    build_agent,
    error_codes,
    error_words,
    read_events,
    read_lines,
    tool,
)
from flaky_server import FlakyServer

ROOT = Path(__file__).resolve().parent.parent
KEY = "sk-test-0123456789abcdef"
DONE = b"data: [DONE]\n\n"
NAMES = ("ls", "write", "edit_existing", "list_files", "read_file")
TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": "ls",
                "description": "List.",
                "parameters": {"type": "object", "properties": {}},
            },
        }
    ]
)
SENTENCE = "The quick brown fox jumps over the lazy dog."
quick = settings(max_examples=30, deadline=None, database=None)
thorough = settings(max_examples=3000, deadline=None, database=None)


def chunk(choices: list[Any], **more: Any) -> bytes:
    """One event with these choices."""
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


def C(delta: dict[str, Any], finish: str | None = None) -> bytes:
    """One event with one delta."""
    return chunk([{"index": 0, "delta": delta, "finish_reason": finish}])


def item(index: Any, id: Any, name: Any, args: Any) -> dict[str, Any]:
    """A tool call item; what is `...` is absent."""
    function = {"name": name, "arguments": args}
    function = {key: value for key, value in function.items() if value is not ...}
    fields = {"index": index, "id": id, "function": function or ...}
    return {key: value for key, value in fields.items() if value is not ...}


def T(index: Any = ..., id: Any = ..., name: Any = ..., args: Any = ...) -> bytes:
    """One event with one fragment of a tool call."""
    return C({"tool_calls": [item(index, id, name, args)]})


def stop(reason: str | None = "tool_calls") -> bytes:
    """The end of a stream."""
    return C({}, reason) + DONE


def question() -> Transcript:
    """The shortest transcript that can be sent."""
    made = Transcript([{"role": "system", "content": "Be short."}])
    made.add_user("hi")
    return made


def converse(*steps: Any, **options: Any) -> SimpleNamespace:
    """One request to a server that follows the script: the reply or the error, and what was said.

    The transcript has the reply, if there is one; `calls` are its calls. Nothing really waits.
    """
    said = SimpleNamespace(reply=None, error=None, calls=[], events=[], waits=[], took=0.0)
    began = time.monotonic()
    options = {"sleep": said.waits.append, "jitter": lambda: 0.0, **options}
    with FlakyServer(list(steps), key=KEY) as said.server:
        known = Settings(base_url=said.server.url, api_key=KEY, model="flaky-1", environ={})
        client = Client(known, lambda kind, **data: said.events.append((kind, data)), **options)
        said.transcript = question()
        try:
            said.reply = client.complete(said.transcript, TOOLS, NAMES)
            said.calls = said.transcript.add_reply(said.reply.message)
        except (ProviderError, TryLater) as error:
            said.error = error
        except ValueError:  # an empty reply is not stored
            said.calls = []
        finally:
            client.close()
    said.took = time.monotonic() - began
    said.text = "".join(data["text"] for kind, data in said.events if kind == "text")
    said.retries = [data for kind, data in said.events if kind == "retry"]
    assert [problem for request in said.server.requests for problem in request.problems] == []
    return said


def streamed(*events: bytes) -> dict[str, Any]:
    """A step that sends exactly these bytes."""
    return {"raw": b"".join(events)}


def called(said: SimpleNamespace) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of each call."""
    return [(call.name, call.arguments) for call in said.calls]


# -- the reader


def events_of(chunks: Iterable[bytes]) -> list[tuple[str, str]]:
    """The events of a stream that arrives in these chunks."""
    return list(read_events(read_lines(chunks)))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(b"data: a\n\ndata: b\n\n", [("", "a"), ("", "b")], id="LF"),
        pytest.param(b"data: a\r\n\r\ndata: b\r\n\r\n", [("", "a"), ("", "b")], id="CRLF C4"),
        pytest.param(b"data: a\r\rdata: b\r\r", [("", "a"), ("", "b")], id="CR C4"),
        pytest.param(b"data: a\r\n\ndata: b\r\r\n", [("", "a"), ("", "b")], id="mixed ends"),
        pytest.param(b"\xef\xbb\xbfdata: a\n\n", [("", "a")], id="BOM C16"),
        pytest.param(b": ping\n\n: ping\ndata: a\n: x\n\n", [("", "a")], id="comments C1"),
        pytest.param(b"data:a\n\ndata:  b\n\n", [("", "a"), ("", " b")], id="one blank C3"),
        pytest.param(b"data: {\ndata: }\n\n", [("", "{\n}")], id="data of several lines C5"),
        pytest.param(b"data: {\r\ndata: }\r\n\r\n", [("", "{\n}")], id="the same with CRLF"),
        pytest.param(b"data: a\n\ndata: b", [("", "a"), ("", "b")], id="no blank line at the end"),
        pytest.param(b"event: error\ndata: x\n\n", [("error", "x")], id="event name C21"),
        pytest.param(b"event: a\n\ndata: x\n\n", [("", "x")], id="the name ends with its event"),
        pytest.param(b"id: 7\nretry: 9\ndata: a\n\n", [("", "a")], id="other fields"),
        pytest.param(b"data: a:b\n\n", [("", "a:b")], id="colon in the value"),
        pytest.param(b"\n\n\n\n", [], id="only blank lines"),
        pytest.param(b"", [], id="nothing"),
        pytest.param(b"data: \xff\n\n", [("", "\ufffd")], id="no UTF-8"),
        pytest.param(
            "data: a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\n\n".encode(),
            [("", "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg")],
            id="separators that end no line C11",
        ),
    ],
)
def test_bytes_become_events(data: bytes, expected: list[tuple[str, str]]) -> None:
    each = [bytes([byte]) for byte in data]
    assert events_of([data]) == expected
    assert events_of(each) == expected
    assert events_of(piece for byte in each for piece in (b"", byte)) == expected


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The data in pieces, some of them perhaps empty."""
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


PLACES = st.lists(st.integers(0, 10_000), max_size=12)
LINE = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12)


def stream_bytes(
    events: list[tuple[str, list[str]]], end: str, comment: str, mark: bytes, whole: bool
) -> bytes:
    """The events as a server writes them."""
    text = ""
    for name, lines in events:
        fields = [f": {comment}"] + ([f"event: {name}"] if name else [])
        text += end.join([*fields, *(f"data: {line}" for line in lines), "", ""])
    return mark + (text if whole else text.removesuffix(end)).encode()


def check_any_split(events: list[Any], end: str, places: list[int], rest: list[Any]) -> None:
    data = stream_bytes(events, end, *rest)
    expected = [(name, "\n".join(lines)) for name, lines in events]
    assert events_of(cut(data, places)) == expected


SPLITS = {
    "events": st.lists(st.tuples(LINE, st.lists(LINE, min_size=1, max_size=3)), max_size=4),
    "end": st.sampled_from(["\n", "\r\n", "\r"]),
    "places": PLACES,
    "rest": st.tuples(LINE, st.sampled_from([b"", b"\xef\xbb\xbf"]), st.booleans()),
}


@quick
@given(**SPLITS)
def test_any_split_of_a_stream_gives_the_same_events(
    events: list[Any], end: str, places: list[int], rest: list[Any]
) -> None:
    check_any_split(events, end, places, rest)


@pytest.mark.long
@thorough
@given(**SPLITS)
def test_any_split_of_a_stream_gives_the_same_events_thoroughly(
    events: list[Any], end: str, places: list[int], rest: list[Any]
) -> None:
    check_any_split(events, end, places, rest)


@quick
@given(st.lists(st.sampled_from([b"\r", b"\n", b"data:", b" ", b"x", b"\xf0\x9f\x98\x80"])), PLACES)
def test_any_split_of_any_bytes_gives_the_same_lines(parts: list[bytes], places: list[int]) -> None:
    data = b"".join(parts)
    assert list(read_lines(cut(data, places))) == list(read_lines([data]))


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
def test_a_line_is_handed_on_before_the_next_chunk_is_read(end: bytes) -> None:
    read = []

    def chunks() -> Iterator[bytes]:
        for piece in (b"one" + end, b"two" + end):
            read.append(piece)
            yield piece

    lines = read_lines(chunks())
    assert (next(lines), len(read)) == (b"one", 1)
    assert (next(lines), len(read)) == (b"two", 2)


# -- the resolver


WHOLE = [
    pytest.param([T(0, "a", "ls", "{}")], [("ls", {})], id="plain"),
    pytest.param(
        [T(0, "a", "ls", ""), T(0, ..., ..., '{"p'), T(0, ..., ..., '":1}')],
        [("ls", {"p": 1})],
        id="fragments",
    ),
    pytest.param(
        [T(0, "a", "ls", '{"p"'), T(1, "b", "write", '{"q"'), T(0, args=":1}"), T(1, args=":2}")],
        [("ls", {"p": 1}), ("write", {"q": 2})],
        id="interleaved",
    ),
    pytest.param([T(..., "c1", "ls", "{}")], [("ls", {})], id="index missing A1"),
    pytest.param(
        [T(..., "c1", "ls", '{"a"'), T(..., ..., ..., ":1}"), T(..., "c2", "ls", '{"a":2}')],
        [("ls", {"a": 1}), ("ls", {"a": 2})],
        id="index missing, two calls A1",
    ),
    pytest.param(
        [T(..., ..., "ls", '{"a":1}'), T(..., ..., "ls", '{"a":2}')],
        [("ls", {"a": 1}), ("ls", {"a": 2})],
        id="neither index nor id, two complete calls A1",
    ),
    pytest.param(
        [T(..., ..., "ls", '{"a"'), T(..., ..., ..., ":1}")],
        [("ls", {"a": 1})],
        id="neither index nor id, fragments A2",
    ),
    pytest.param(
        [T(0, "a", "write", '{"p":1}'), T(0, "b", "write", '{"p":2}')],
        [("write", {"p": 1}), ("write", {"p": 2})],
        id="index always zero A3",
    ),
    pytest.param(
        [T(0, "a", "ls", ""), T(0, "b", "write", '{"p":2}')],
        [("ls", {}), ("write", {"p": 2})],
        id="index always zero, the first without arguments A3",
    ),
    pytest.param(
        [T(0, "k0", "ls", ""), T(0, "k1", "", "{"), T(0, "k2", "", "}")],
        [("ls", {})],
        id="restless ids A4",
    ),
    pytest.param(
        [T(0, "k0", "ls", '{"p"'), T(0, "k1", "ls", ":1}")],
        [("ls", {"p": 1})],
        id="restless ids with the name A5",
    ),
    pytest.param(
        [T(0, "a", "edit_ex"), T(0, ..., "isting"), T(0, ..., ..., "{}")],
        [("edit_existing", {})],
        id="name split A6",
    ),
    pytest.param(
        [T(0, "a", "ls", '{"p"'), T(0, ..., "ls", ":1}")], [("ls", {"p": 1})], id="name repeated"
    ),
    pytest.param(
        [T(0, "a", "edit"), T(0, ..., "edit_existing", "{}")],
        [("edit_existing", {})],
        id="name cumulative",
    ),
    pytest.param([T(0, ..., "ls", "{"), T(0, "a", ..., "}")], [("ls", {})], id="id comes late A7"),
    pytest.param(
        [T(0, "a", "ls", '{"p"'), T(0, ..., "", ":1}")], [("ls", {"p": 1})], id="empty name A8"
    ),
    pytest.param(
        [T(0, "a", "ls", '{"p"'), T(0, None, None, ":1"), T(0, None, None, None), T(0, args="}")],
        [("ls", {"p": 1})],
        id="nulls A10",
    ),
    pytest.param([T(1, ..., "ls", "{}")], [("ls", {})], id="never an id A11"),
    pytest.param(
        [T(0, "a", "ls", p) for p in ('{"a"', '{"a":1', '{"a":1}')],
        [("ls", {"a": 1})],
        id="cumulative A12",
    ),
    pytest.param(
        [T(0, "a", "ls", '{"a":1}'), T(0, "a", "ls", '{"a":1}')],
        [("ls", {"a": 1})],
        id="sent twice A13",
    ),
    pytest.param(
        [T(0, "a", "ls", '{"q":"A"}'), T(0, "a", "ls", '{"q":"B"}')],
        [("ls", {"q": "A"}), ("ls", {"q": "B"})],
        id="two objects under one index A14",
    ),
    pytest.param(
        [T(0, "a", "ls", {"cmd": "ls"})], [("ls", {"cmd": "ls"})], id="arguments as an object A15"
    ),
    pytest.param([T(0, "a", "ls", "")], [("ls", {})], id="arguments empty A17"),
    pytest.param([T(0, "a", "ls", " \n")], [("ls", {})], id="arguments blank A17"),
    pytest.param([T(0, "a", "ls")], [("ls", {})], id="arguments absent A17"),
    pytest.param([T(0, "a", "ls", "null")], [("ls", {})], id="arguments null T01"),
    pytest.param([T(1, "a", "ls", "{}")], [("ls", {})], id="index from one A19"),
    pytest.param(
        [T(0, "x:0", "ls", '{"p":1}'), T(1, "x:0", "ls", '{"p":2}')],
        [("ls", {"p": 1}), ("ls", {"p": 2})],
        id="ids repeat in one message A21",
    ),
    pytest.param(
        [T(0, "a", "ls", '"{\\"p\\":'), T(0, ..., ..., '1}"')],
        [("ls", {"p": 1})],
        id="double-encoded",
    ),
    pytest.param(
        [T(0, "a", "ls", '{"p":"one\ntwo\tthree"}')],
        [("ls", {"p": "one\ntwo\tthree"})],
        id="raw control characters T02",
    ),
    pytest.param(
        [C({"tool_calls": None}), T(0, "a", "ls", "{}"), C({"tool_calls": []})],
        [("ls", {})],
        id="tool_calls null and empty",
    ),
    pytest.param(
        [T(0, "a", "ls", "{"), C({"tool_calls": [{"index": 0, "function": None}]}), T(0, args="}")],
        [("ls", {})],
        id="function null",
    ),
    pytest.param(
        [C({"function_call": {"name": "ls"}}), C({"function_call": {"arguments": '{"p":1}'}})],
        [("ls", {"p": 1})],
        id="function_call of the old API",
    ),
]


@pytest.mark.parametrize(("deltas", "expected"), WHOLE)
def test_fragments_become_calls(deltas: list[bytes], expected: list[Any]) -> None:
    said = converse(streamed(*deltas, stop()))
    ids = [call.id for call in said.calls]
    assert called(said) == expected
    assert all(ids) and len(set(ids)) == len(ids)
    assert [call.error for call in said.calls] == [""] * len(ids)


@pytest.mark.parametrize(("deltas", "expected"), WHOLE)
def test_resolved_calls_are_sent_back_in_a_form_that_strict_servers_take(
    deltas: list[bytes], expected: list[Any]
) -> None:
    said = converse(streamed(*deltas, stop()))
    with FlakyServer(["ok"]) as server:
        known = Settings(base_url=server.url, model="flaky-1", environ={})
        client = Client(known, lambda kind, **data: None)
        client.complete(said.transcript, TOOLS, NAMES)
        client.close()
    assert server.requests[0].problems == []


def test_ids_that_are_there_are_kept_and_the_first_one_counts() -> None:
    said = converse(
        streamed(T(0, "k0", "ls", ""), T(0, "k1", "", "{}"), T(1, "b", "ls", "{}"), stop())
    )
    assert [call.id for call in said.calls] == ["k0", "b"]


def test_an_id_of_an_earlier_turn_is_replaced_in_call_and_result() -> None:
    transcript = question()
    for _ in range(2):
        call = {"id": "exec:0", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
        transcript.add_reply({"role": "assistant", "content": None, "tool_calls": [call]})
    ids = [m["tool_calls"][0]["id"] for m in transcript.messages if m["role"] == "assistant"]
    answered = [m["tool_call_id"] for m in transcript.messages if m["role"] == "tool"]
    assert ids == answered
    assert ids[0] == "exec:0" != ids[1]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        pytest.param('{"path": "a"', "Expecting ',' delimiter: line 1 column 13", id="cut"),
        pytest.param('{"path":"a",}', "line 1 column 13", id="trailing comma T03"),
        pytest.param("[1]", "an object was expected, not list", id="a list"),
        pytest.param("{'a': 1}", "line 1 column 2", id="single quotes L8"),
    ],
)
def test_arguments_that_are_no_object_are_stored_as_none_with_the_reason(
    raw: str, words: str
) -> None:
    said = converse(streamed(T(0, "a", "ls", raw), stop()))
    (call,) = said.calls
    assert call.arguments == {}
    assert words in call.error and raw in call.error
    assert said.transcript.messages[2]["tool_calls"][0]["function"]["arguments"] == "{}"


JSON_OBJECT = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=6,
    ),
    max_size=4,
)


@quick
@given(st.lists(st.tuples(JSON_OBJECT, PLACES), min_size=1, max_size=3), st.randoms())
def test_a_normal_stream_is_never_damaged_by_the_rescue_of_odd_ones(
    calls: list[Any], random: Any
) -> None:
    resolver, queues = Resolver(NAMES), []
    for index, (arguments, places) in enumerate(calls):
        pieces = cut(json.dumps(arguments).encode(), places)
        first = item(index, f"id{index}", NAMES[index], "")
        rest = [item(index, ..., ..., piece.decode()) for piece in pieces]
        queues.append([first, *rest])
    order = [index for index, queue in enumerate(queues) for _ in queue]
    random.shuffle(order)
    for index in order:
        delta = {"tool_calls": [queues[index].pop(0)]}
        resolver.add({"choices": [{"delta": delta}]})
    resolver.add({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    made = question().add_reply(resolver.resolve().message)
    expected = {NAMES[index]: arguments for index, (arguments, _) in enumerate(calls)}
    assert {call.name: call.arguments for call in made} == clean_objects(expected)
    assert [call.error for call in made] == [""] * len(calls)


def clean_objects(value: Any) -> Any:
    """The value with U+FFFD for NUL, as all text enters (T9)."""
    return json.loads(json.dumps(value).replace("\\u0000", "\ufffd"))


# -- which replies are trusted


def ran(folder: Path, *events: bytes) -> tuple[list[int], list[str]]:
    """The numbers that a reply's calls of `hit` were really run with, and the kinds of events."""
    numbers, kinds = [], []

    @tool(needs="run")
    def hit(number: int) -> str:
        """Hit.

        number: which
        """
        numbers.append(number)
        return "done"

    def emit(kind: str, **data: Any) -> None:
        kinds.append(kind)

    with FlakyServer([streamed(*events), "fine", "fine"]) as server:
        known = Settings(
            base_url=server.url,
            model="flaky-1",
            mode="auto",
            workspace=str(folder),
            save_session=False,
            environ={},
        )
        agent = build_agent(known, tools=[hit], emit=emit)
        agent.client = Client(known, emit, sleep=lambda seconds: None)
        agent.run("go")
        agent.close()
    assert [problem for request in server.requests for problem in request.problems] == []
    return numbers, kinds


HIT = [T(0, "a", "hit", '{"number":'), T(0, args=" 1}")]
HALF = [T(0, "a", "hit", '{"number":')]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([*HIT, stop("tool_calls")], [1], id="tool_calls"),
        pytest.param([*HIT, stop("stop")], [1], id="stop B1"),
        pytest.param([*HIT, stop("function_call")], [1], id="function_call"),
        pytest.param([*HIT, stop("eos")], [1], id="unknown word"),
        pytest.param([*HIT, stop("")], [1], id="empty word"),
        pytest.param([*HIT, DONE], [1], id="no reason, but DONE B6"),
        pytest.param([*HIT, C({}, "tool_calls")], [1], id="a reason, but no DONE"),
        pytest.param([*HALF, C({}, "stop"), T(0, args="2}"), DONE], [2], id="late fragment B13"),
        pytest.param(
            [
                *HALF,
                chunk(
                    [
                        {
                            "index": 0,
                            "delta": {"tool_calls": [item(0, ..., ..., "3}")]},
                            "finish_reason": "tool_calls",
                        }
                    ]
                ),
                DONE,
            ],
            [3],
            id="fragment and reason in one event B15",
        ),
        pytest.param([*HALF, stop("length")], [], id="length, cut B3"),
        pytest.param([*HIT, stop("length")], [], id="length, although it parses B4"),
        pytest.param([*HIT, stop("content_filter")], [], id="content filter B10"),
        pytest.param([*HALF, stop("tool_calls")], [], id="cut, labelled as whole B5"),
        pytest.param([*HIT], [], id="clean end without reason and DONE B7"),
        pytest.param([*HALF], [], id="clean end in the middle of a call B7"),
        pytest.param(
            [
                *HIT,
                chunk(
                    [{"index": 0, "delta": {}, "finish_reason": "error"}],
                    error={"code": 502, "message": "x"},
                ),
                DONE,
            ],
            [],
            id="error B9",
        ),
        pytest.param(
            [*HIT, b'data: {"error": {"code": 502, "message": "x"}, "choices": []}\n\n'],
            [],
            id="error event behind a whole call C20",
        ),
        pytest.param([C({"content": "x"}), stop("tool_calls")], [], id="announced, none there B12"),
    ],
)
def test_calls_run_only_when_they_are_whole_and_the_end_is_trusted(
    tmp_path: Path, events: list[bytes], expected: list[int]
) -> None:
    assert ran(tmp_path, *events)[0] == expected


# -- the faults of the flaky server


EMOJI = "Grüße, 世界 \N{WHITE HEAVY CHECK MARK} \N{WAVING HAND SIGN}\U0001f3fd!"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("crlf", SENTENCE),
        ("cr", SENTENCE),
        ("no_space", SENTENCE),
        ("comments", SENTENCE),
        ("multi_line_data", SENTENCE),
        ("bom", SENTENCE),
        ("split_bytes", EMOJI),
        ("chopped", EMOJI),
        ("close_delimited", SENTENCE),
        ("unicode_separators", "one\u2028two\u2029three\u0085four\x0bfive"),
        ("usage_first_chunk_empty_choices", SENTENCE),
        ("json_reply", SENTENCE),
        ("no_done", SENTENCE),
        ("no_finish", SENTENCE),
        ("late_tail", SENTENCE),
        ("content_parts", SENTENCE),
        ("refusal", "I cannot help with that."),
        ("open_after_done", SENTENCE),
    ],
)
def test_a_good_reply_in_an_odd_form_is_taken_as_it_was_meant(fault: str, text: str) -> None:
    said = converse({"fault": fault})
    assert said.error is None
    assert (said.reply.message["content"], said.text) == (text, text)
    assert (said.reply.end, said.retries, said.server.replies) == ("complete", [], [200])
    assert said.took < 20  # a client that waits for the end of an open socket takes two minutes


def test_a_second_choice_does_not_get_between_the_words_of_the_first() -> None:
    said = converse({"fault": "two_choices"})
    assert SENTENCE in said.reply.message["content"]


@pytest.mark.parametrize(
    "fault",
    """finish_stop_with_calls finish_with_fragment index_from_one id_churn name_split name_repeated
    null_fields arguments_dict arguments_cumulative arguments_twice arguments_double_encoded
    legacy_function_call thought_signature""".split(),
)
def test_one_call_in_an_odd_form_is_taken_as_it_was_meant(fault: str) -> None:
    said = converse({"fault": fault, "call": "read_file", "arguments": {"path": "ü {1}.md"}})
    assert called(said) == [("read_file", {"path": "ü {1}.md"})]


@pytest.mark.parametrize(
    "fault", ["index_missing", "index_always_zero", "id_missing", "id_duplicate", "interleaved"]
)
def test_two_calls_in_an_odd_form_are_taken_as_they_were_meant(fault: str) -> None:
    said = converse({"fault": fault})
    expected = [("read_file", {"path": "README.md"}), ("list_files", {"path": "."})]
    assert called(said) == expected
    assert len({call.id for call in said.calls}) == 2


@pytest.mark.parametrize(
    ("fault", "restarts"),
    [
        ("cut_text", True),
        ("cut_call", False),
        ("cut_chunk", True),
        ("reset", True),
        ("drop", False),
        ("empty", False),
        ("json_error_200", False),
        ("error_in_200", False),
        ("error_event", False),
        ("error_finish", True),
    ],
)
def test_a_broken_reply_is_asked_again_and_nothing_of_it_is_kept(
    fault: str, restarts: bool
) -> None:
    said = converse({"fault": fault}, "whole")
    assert said.reply.message["content"] == "whole"
    assert said.calls == []
    assert said.waits == [1.0]
    (retry,) = said.retries
    assert (retry["attempt"], retry["of"], retry["delay"]) == (1, 4, 1.0)
    assert retry["restarts_reply"] is restarts
    assert retry["reason"]
    assert said.server.requests[0]["messages"] == said.server.requests[1]["messages"]


@pytest.mark.parametrize(
    ("pause", "asked"), [pytest.param("0", 2, id="once more"), pytest.param("30", 1, id="no time")]
)
def test_a_quiet_request_is_tried_only_once_more_and_never_beyond_its_time(
    pause: str, asked: int
) -> None:
    later = {"status": 503, "headers": {"Retry-After": pause}}
    with FlakyServer([later] * 4 + ["never"], key=KEY) as server:
        known = Settings(base_url=server.url, api_key=KEY, model="flaky-1", environ={})
        client = Client(known, lambda *_, **__: None, sleep=lambda _: None)
        with pytest.raises(TryLater):
            client.complete(question(), quiet=20.0)
        client.close()
    assert len(server.requests) == asked


def test_an_overflow_makes_a_known_window_only_smaller() -> None:
    client = Client(Settings(base_url="http://127.0.0.1:9/v1", context=8000), lambda *_, **__: None)
    sizes = []
    for told in (0, 9000, 4000):
        client.learn_window(told)
        sizes.append(client.window)
    assert sizes == [8000, 8000, 4000]


def test_a_stream_of_comments_alone_is_silence() -> None:
    clock = itertools.count(0, 50)  # fifty seconds pass whenever somebody looks
    said = converse({"fault": "keepalive_stall"}, "whole", clock=lambda: float(next(clock)))
    assert said.reply.message["content"] == "whole"
    assert [retry["reason"] for retry in said.retries] == ["no data for 120 s"]


def test_a_slow_stream_with_data_is_no_silence() -> None:
    clock = itertools.count(0, 50)
    said = converse({"fault": "comments"}, clock=lambda: float(next(clock)))
    assert (said.reply.message["content"], said.retries) == (SENTENCE, [])


@pytest.mark.parametrize(
    ("fault", "end"),
    [("length", "length"), ("length_whole_call", "length"), ("length_text", "length")]
    + [("content_filter", "filtered")],
)
def test_a_reply_that_was_cut_says_so(fault: str, end: str) -> None:
    said = converse({"fault": fault})
    assert (said.reply.end, said.retries) == (end, [])


def test_reasoning_is_reported_apart_from_the_text() -> None:
    said = converse({"text": "yes", "reasoning": "Let me see."})
    thoughts = "".join(data["text"] for kind, data in said.events if kind == "reasoning")
    assert (thoughts, said.text) == ("Let me see.", "yes")
    assert said.reply.message["content"] == "yes"


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_both_names_of_reasoning_are_read(key: str) -> None:
    said = converse(streamed(C({key: "h"}), C({key: "m"}), C({"content": "Hi"}), stop("stop")))
    thoughts = "".join(data["text"] for kind, data in said.events if kind == "reasoning")
    assert (thoughts, said.text, said.reply.message[key]) == ("hm", "Hi", "hm")


def test_usage_is_kept() -> None:
    usage = {"prompt_tokens": 11, "completion_tokens": 7}
    said = converse({"text": "yes", "usage": {**usage, "prompt_tokens_details": {}}})
    assert {key: said.reply.usage[key] for key in usage} == usage


@pytest.mark.parametrize(
    "choices",
    [
        pytest.param([], id="empty"),
        pytest.param(None, id="null"),
        pytest.param([{"index": 0, "delta": None}], id="delta null"),
    ],
)
def test_events_without_choices_are_passed_over(choices: Any) -> None:
    odd = b"data: " + json.dumps({"choices": choices}).encode() + b"\n\n"
    said = converse(streamed(odd, C({"content": "Hi"}), odd, stop("stop")))
    assert (said.reply.message["content"], said.retries) == ("Hi", [])


def test_two_events_spliced_into_one_another_are_asked_again() -> None:
    spliced = b'data: {"choices":[{"delta":{"role":"adata: {"id":1}\n\n'
    said = converse(streamed(C({"content": "a"}), spliced, stop("stop")), "whole")
    assert (said.reply.message["content"], len(said.retries)) == ("whole", 1)


@pytest.mark.parametrize(
    "usage",
    [
        pytest.param('{"prompt_tokens": Infinity, "completion_tokens": 3}', id="infinite"),
        pytest.param('{"prompt_tokens": NaN, "completion_tokens": 3}', id="no number"),
        pytest.param('{"prompt_tokens": 1e400, "completion_tokens": 3}', id="too large"),
        pytest.param('{"prompt_tokens": -7, "completion_tokens": 3}', id="negative"),
        pytest.param('{"prompt_tokens": "7", "completion_tokens": 3}', id="a text"),
        pytest.param('{"prompt_tokens": null, "completion_tokens": 3}', id="null"),
        pytest.param('{"prompt_tokens": {"a": 1}, "completion_tokens": 3}', id="an object"),
    ],
)
def test_a_count_of_tokens_that_is_none_is_not_counted(usage: str) -> None:
    last = b'data: {"choices": [], "usage": ' + usage.encode() + b"}\n\n"
    said = converse(streamed(C({"content": "Hi"}), C({}, "stop"), last, DONE))
    assert (said.reply.message["content"], said.retries) == ("Hi", [])
    assert said.reply.usage == {"completion_tokens": 3, "cached_tokens": 0}


# -- errors


FATAL = [
    pytest.param(400, ProviderError, 1, id="400"),
    pytest.param(401, KeyRefused, 41, id="401"),
    pytest.param(403, KeyRefused, 41, id="403"),
    pytest.param(404, ProviderError, 1, id="404"),
    pytest.param(422, ProviderError, 1, id="422"),
]


@pytest.mark.parametrize(("status", "kind", "code"), FATAL)
def test_what_will_not_go_away_ends_at_once_with_the_words_of_the_server(
    status: int, kind: type, code: int
) -> None:
    said = converse({"status": status, "body": {"error": {"message": "no such luck"}}})
    assert (type(said.error), said.error.exit_code) == (kind, code)
    assert "no such luck" in str(said.error)
    assert (said.waits, said.events, len(said.server.requests)) == ([], [], 1)


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
def test_what_may_go_away_is_tried_four_times_more_with_longer_waits(status: int) -> None:
    body = {"error": {"message": "one moment"}}
    said = converse({"status": status, "body": body, "times": 9})
    assert (type(said.error), said.error.exit_code) == (TryLater, 75)
    assert "one moment" in str(said.error)
    assert said.waits == [1.0, 2.0, 4.0, 8.0]
    assert [retry["attempt"] for retry in said.retries] == [1, 2, 3, 4]
    assert len(said.server.requests) == 5


def test_a_retry_is_announced_with_all_its_fields() -> None:
    said = converse({"status": 503, "body": {"error": {"message": "busy"}}}, "ok")
    (event,) = said.events[:1]
    kind, fields = event
    assert (kind, sorted(fields)) == (
        "retry",
        ["attempt", "delay", "of", "reason", "restarts_reply"],
    )
    assert "busy" in fields.pop("reason")
    assert fields == {"attempt": 1, "of": 4, "delay": 1.0, "restarts_reply": False}


def test_jitter_lengthens_the_waits_within_the_cap() -> None:
    said = converse({"status": 500, "times": 9}, jitter=lambda: 1.0)
    bases = [1.0, 2.0, 4.0, 8.0]
    pairs = zip(bases, said.waits, strict=True)
    assert all(base < wait <= min(30.0, 2 * base) for base, wait in pairs)


def test_nobody_listening_is_a_network_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    waits: list[float] = []
    known = Settings(base_url=f"http://127.0.0.1:{port}/v1", model="m", environ={})
    client = Client(known, lambda *a, **d: None, sleep=waits.append, jitter=lambda: 0.0)
    with pytest.raises(TryLater, match="nothing listens") as caught:
        client.complete(question())
    client.close()
    assert (caught.value.exit_code, waits) == (75, [1.0, 2.0, 4.0, 8.0])


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        pytest.param({"Retry-After": "7"}, 7.0, id="seconds"),
        pytest.param({"Retry-After": "0"}, 0.0, id="zero"),
        pytest.param({"Retry-After": "1.5"}, 1.5, id="fraction"),
        pytest.param({"Retry-After": "300"}, 300.0, id="the longest"),
        pytest.param({"retry-after-ms": "1500"}, 1.5, id="milliseconds"),
        pytest.param({"retry-after-ms": "250", "Retry-After": "9"}, 0.25, id="both E7"),
        pytest.param({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0, id="past date E4"),
        pytest.param({"Retry-After": "Wed, 21 Oct 2015 07:28:00 -0000"}, 0.0, id="naive date E4"),
        pytest.param({"Retry-After": "soon"}, 1.0, id="nonsense"),
        pytest.param({"Retry-After": ""}, 1.0, id="empty"),
    ],
)
def test_the_server_says_how_long_to_wait(headers: dict[str, str], expected: float) -> None:
    said = converse({"status": 429, "headers": headers}, "ok")
    assert said.reply.message["content"] == "ok"
    assert said.waits == [expected]
    assert said.retries[0]["delay"] == expected


def test_the_server_may_say_it_with_a_date() -> None:
    date = formatdate(time.time() + 100, usegmt=True)
    said = converse({"status": 429, "headers": {"Retry-After": date}}, "ok")
    assert 80 < said.waits[0] <= 101


@pytest.mark.parametrize(
    "headers",
    [{"Retry-After": "301"}, {"Retry-After": "57600"}, {"retry-after-ms": "300001"}],
    ids=["301 s", "16 h", "ms"],
)
def test_a_server_that_asks_for_more_than_five_minutes_ends_the_wait_at_once(
    headers: dict[str, str],
) -> None:
    said = converse({"status": 429, "headers": headers})
    assert (type(said.error), said.error.exit_code) == (TryLater, 75)
    assert (said.waits, said.retries, len(said.server.requests)) == ([], [], 1)
    assert str(int(headers.get("Retry-After", "300"))) in str(said.error)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param({"fault": "insufficient_quota"}, id="429 E1"),
        pytest.param(
            {"status": 403, "body": {"error": {"code": "insufficient_quota", "message": "quota"}}},
            id="403 E1",
        ),
        pytest.param({"fault": "error_in_200", "code": "insufficient_quota"}, id="in a stream"),
        pytest.param(
            {"status": 429, "body": {"error": {"type": "usage_limit_reached", "message": "x"}}},
            id="usage_limit_reached E3",
        ),
    ],
)
def test_an_empty_account_is_not_asked_again(step: dict[str, Any]) -> None:
    said = converse(step)
    assert isinstance(said.error, ProviderError)
    assert (said.waits, len(said.server.requests)) == ([], 1)


def test_the_word_quota_in_a_rate_limit_is_no_empty_account() -> None:
    words = "Quota exceeded for requests per minute, see billing"
    said = converse({"status": 429, "body": {"error": {"code": 429, "message": words}}}, "ok")
    assert said.reply.message["content"] == "ok"


OVERFLOWS = [
    "This model's maximum context length is 8192 tokens. However, you requested 9001 tokens",
    "prompt is too long: 210000 tokens > 200000 maximum",
    "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000",
    "the request exceeds the available context size (32768 tokens)",
    "The input token count (1200000) exceeds the maximum number of tokens allowed",
    "Please reduce the length of the messages or completion",
    "Your input exceeds the context window of this model",
]


@pytest.mark.parametrize("message", OVERFLOWS)
def test_a_request_that_is_too_large_is_recognised_by_its_words(message: str) -> None:
    said = converse({"status": 400, "body": {"error": {"message": message}}})
    assert (type(said.error), said.error.exit_code) == (ContextOverflow, 1)
    assert message in str(said.error)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param({"fault": "context_overflow"}, id="OpenAI E12"),
        pytest.param(
            {
                "status": 500,
                "body": {"error": {"type": "exceed_context_size_error", "message": "too big"}},
            },
            id="llama.cpp E11",
        ),
        pytest.param(
            {"fault": "error_in_200", "code": "context_length_exceeded", "message": "too big"},
            id="in a stream",
        ),
    ],
)
def test_a_request_that_is_too_large_is_recognised_by_its_code(step: dict[str, Any]) -> None:
    said = converse(step)
    assert (type(said.error), len(said.server.requests)) == (ContextOverflow, 1)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param({"error": {"message": "x", "code": "c"}}, ("x", "c"), id="OpenAI"),
        pytest.param([{"error": {"code": 400, "message": "x"}}], ("x", "400"), id="Gemini"),
        pytest.param({"object": "error", "message": "x", "code": "32"}, ("x", "32"), id="Mistral"),
        pytest.param({"error": "x"}, ("x", ""), id="a string"),
        pytest.param({"detail": [{"msg": "x"}]}, ("x", ""), id="FastAPI"),
        pytest.param({"success": False, "error": {"message": "x"}}, ("x", ""), id="wrapped"),
        pytest.param("x", ("x", ""), id="no object"),
        pytest.param([], ("", ""), id="nothing"),
    ],
)
def test_the_words_of_an_error_are_found_in_every_shape(body: Any, expected: Any) -> None:
    assert (error_words(body), (error_codes(body) + [""])[0]) == expected


def test_the_words_of_a_provider_behind_a_router_are_found() -> None:
    inner = {"message": "Provider returned error", "metadata": {"raw": '{"why": "too hot"}'}}
    said = converse({"status": 400, "body": {"error": inner}})
    assert "Provider returned error" in str(said.error) and "too hot" in str(said.error)


@pytest.mark.parametrize("metadata", [None, "x", 5, ["x"], {"raw": None}], ids=repr)
def test_odd_metadata_beside_an_error_changes_nothing(metadata: Any) -> None:
    body = {"error": {"message": "bad field", "metadata": metadata}}
    refused = converse({"status": 400, "body": body})
    assert (type(refused.error), len(refused.server.requests)) == (ProviderError, 1)
    assert "bad field" in str(refused.error)
    limited = converse({"status": 429, "headers": {"Retry-After": "0"}, "body": body}, "ok")
    streamed_error = b"data: " + json.dumps(body).encode() + b"\n\n"
    inside = converse(streamed(C({"content": "a"}), streamed_error), "ok")
    for said in (limited, inside):
        assert said.reply.message["content"] == "ok"
        assert ["bad field" in retry["reason"] for retry in said.retries] == [True]


def test_an_error_page_is_shown_without_its_tags() -> None:
    said = converse({"status": 404, "body": "<html><h1>Not  here</h1></html>"})
    assert "Not here" in str(said.error) and "<" not in str(said.error)


def test_a_web_page_as_reply_is_a_wrong_address_and_not_asked_again() -> None:
    said = converse({"fault": "html"})
    assert isinstance(said.error, ProviderError)
    assert said.server.url in str(said.error)
    assert (said.waits, len(said.server.requests)) == ([], 1)


# -- the key and the address


ECHO = f"Incorrect API key provided: {KEY}."


@pytest.mark.parametrize(
    "step",
    [
        pytest.param({"status": 401, "body": {"error": {"message": ECHO}}}, id="401"),
        pytest.param({"status": 400, "body": ECHO}, id="400 as text"),
        pytest.param({"status": 429, "body": {"error": {"message": ECHO}}, "times": 9}, id="429"),
        pytest.param({"fault": "redirect", "location": f"/login?key={KEY}"}, id="redirect"),
        pytest.param({"fault": "error_in_200", "code": 400, "message": ECHO}, id="in a stream"),
        pytest.param({"fault": "context_overflow", "message": ECHO}, id="overflow"),
        pytest.param(
            {"status": 400, "body": {"error": {"message": "x", "metadata": {"raw": ECHO}}}},
            id="behind a router",
        ),
    ],
)
def test_the_key_is_in_no_error_and_no_event(step: dict[str, Any]) -> None:
    said = converse(step)
    assert said.error is not None
    assert KEY not in f"{said.error}{said.events}"


def test_the_key_is_not_shown_with_the_settings() -> None:
    assert KEY not in repr(Settings(api_key=KEY, environ={"AGENT_API_KEY": KEY}))


NETRC = """
import sys
from agent import Client, Settings, Transcript
settings = Settings(base_url=sys.argv[1], api_key=sys.argv[2], model="m")
client = Client(settings, lambda kind, **data: None)
transcript = Transcript([{"role": "system", "content": "s"}])
transcript.add_user("hi")
client.complete(transcript)
client.close()
"""


@pytest.mark.parametrize(("key", "sent"), [(KEY, f"Bearer {KEY}"), ("", None)])
def test_an_entry_in_netrc_does_not_replace_the_key(
    tmp_path: Path, key: str, sent: str | None
) -> None:
    (tmp_path / ".netrc").write_text("default login somebody password else\n")
    (tmp_path / ".netrc").chmod(0o600)
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with FlakyServer(["ok"]) as server:
        command = [sys.executable, "-c", NETRC, server.url, key]
        subprocess.run(command, env=environ, check=True, timeout=30, stdout=subprocess.DEVNULL)
    assert server.requests[0].headers.get("Authorization") == sent


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_reported_and_not_followed(status: int) -> None:
    with FlakyServer(["secret"]) as other:
        target = f"{other.url}/chat/completions"
        said = converse({"status": status, "headers": {"Location": target}, "body": ""})
        assert other.requests == []
    assert isinstance(said.error, ProviderError)
    assert target in str(said.error)
    assert len(said.server.requests) == 1


class Listing(BaseHTTPRequestHandler):
    """Answers each GET with the bytes that its server has as `body`, or sends it to `place`."""

    def do_GET(self) -> None:
        """Send them as JSON."""
        self.send_response(302 if self.server.place else 200)
        self.send_header("Location", self.server.place)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def listing() -> Iterator[Any]:
    """A server whose list of models is what its `body` says."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Listing)
    server.place = ""
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_key_does_not_follow_a_redirect_of_the_list_of_models(listing: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.setblocking(False)
        listing.place = f"http://127.0.0.1:{other.getsockname()[1]}/v1/models"
        listing.body = b'{"data": [{"id": "x"}]}'
        root = f"http://127.0.0.1:{listing.server_address[1]}/v1"
        client = Client(Settings("m", base_url=root, api_key="k"), lambda kind, **data: None)
        assert client.known_models() == []
        with pytest.raises(ProviderError, match=f"127.0.0.1:{other.getsockname()[1]}"):
            client.models()
        client.close()
        with pytest.raises(BlockingIOError):
            other.accept()


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"data": []}', id="none"),
        pytest.param(b'{"data": null}', id="null"),
        pytest.param(b'{"data": [{}]}', id="one without an id"),
        pytest.param(b'{"data": {"id": 1}}', id="no list"),
        pytest.param(b'{"data": "x"}', id="a text"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"", id="nothing"),
        pytest.param(b'{"data":' + b"[" * 100_000, id="endless nesting"),
    ],
)
def test_an_endpoint_that_lists_no_models_is_an_error_that_names_it(
    tmp_path: Path, listing: Any, body: bytes
) -> None:
    listing.body = body
    url = f"http://127.0.0.1:{listing.server_port}/v1"
    known = Settings(base_url=url, workspace=str(tmp_path), environ={})
    with pytest.raises(ProviderError, match="lists no models") as caught:
        build_agent(known)
    assert (url in str(caught.value), caught.value.exit_code) == (True, 1)


# -- what is sent


def test_a_request_holds_what_it_must_and_the_messages_last() -> None:
    request = converse("ok").server.requests[0]
    assert list(json.loads(request.raw)) == [
        "model",
        "stream",
        "stream_options",
        "tools",
        "messages",
    ]
    assert request["stream"] is True
    assert request["stream_options"] == {"include_usage": True}
    assert request["tools"] == json.loads(TOOLS)
    assert request["messages"] == question().messages


def test_no_tools_are_sent_as_no_key() -> None:
    with FlakyServer(["ok"]) as server:
        client = Client(Settings(base_url=server.url, model="m", environ={}), lambda *a, **d: None)
        client.complete(question())
        client.close()
    assert sorted(server.requests[0]) == ["messages", "model", "stream", "stream_options"]


def test_the_headers_ask_for_plain_bytes() -> None:
    headers = converse("ok").server.requests[0].headers
    assert headers.get("Accept-Encoding") == "identity"
    assert headers.get("Authorization") == f"Bearer {KEY}"
    assert headers.get("Content-Type") == "application/json"


def stored_reply(server: FlakyServer, model: str) -> Transcript:
    """A transcript whose last reply came from this server and model, with all it had to say."""
    client = Client(Settings(base_url=server.url, model=model, environ={}), lambda *a, **d: None)
    transcript = question()
    transcript.add_reply(client.complete(transcript, TOOLS, NAMES).message)
    transcript.add_user("go on")
    client.close()
    return transcript


def sent_again(transcript: Transcript, server: FlakyServer, model: str) -> dict[str, Any]:
    """The last reply as this server gets it."""
    client = Client(Settings(base_url=server.url, model=model, environ={}), lambda *a, **d: None)
    return json.loads(client.body(transcript, TOOLS))["messages"][2]


def test_reasoning_goes_back_only_to_where_it_came_from() -> None:
    with FlakyServer([{"text": "yes", "reasoning": "Hm."}]) as home, FlakyServer() as other:
        transcript = stored_reply(home, "m")
        plain = {"role": "assistant", "content": "yes"}
        assert sent_again(transcript, home, "m") == {**plain, "reasoning_content": "Hm."}
        assert sent_again(transcript, home, "n") == plain
        assert sent_again(transcript, other, "m") == plain


def test_what_a_server_put_beside_a_call_goes_back_only_to_it() -> None:
    with FlakyServer([{"fault": "thought_signature"}]) as home, FlakyServer() as other:
        transcript = stored_reply(home, "m")
        at_home = sent_again(transcript, home, "m")["tool_calls"][0]
        elsewhere = sent_again(transcript, other, "m")["tool_calls"][0]
    extra = at_home.pop("extra_content")
    assert extra == {"google": {"thought_signature": "c2lnbmF0dXJl"}}
    assert at_home == elsewhere


@pytest.mark.parametrize("name", ["browser.tabs.open", "ls -la /", "ü", "x" * 80])
def test_an_invented_name_is_sent_back_in_a_legal_form(name: str) -> None:
    said = converse(streamed(T(0, "a", name, "{}"), stop()))
    assert [call.name for call in said.calls] == [name]
    assert sent_names_are_legal(said.transcript)


def sent_names_are_legal(transcript: Transcript) -> bool:
    """Whether a strict server takes the transcript."""
    with FlakyServer(["ok"]) as server:
        client = Client(Settings(base_url=server.url, model="m", environ={}), lambda *a, **d: None)
        client.complete(transcript, TOOLS, NAMES)
        client.close()
    return server.requests[0].problems == []


def test_a_field_that_the_server_refuses_is_left_out_from_then_on() -> None:
    body = {"error": {"message": "Unknown parameter: 'stream_options'"}}
    with FlakyServer([{"status": 400, "body": body}, "one", "two"]) as server:
        client = Client(Settings(base_url=server.url, model="m", environ={}), lambda *a, **d: None)
        texts = [client.complete(question()).message["content"] for _ in range(2)]
        client.close()
    assert texts == ["one", "two"]
    assert ["stream_options" in request for request in server.requests] == [True, False, False]


# -- in time


@pytest.mark.parametrize("fault", [None, "close_delimited", "crlf", "cr", "comments"])
def test_an_event_is_handed_on_before_the_server_sends_the_next(fault: str | None) -> None:
    seen: list[tuple[str, bool]] = []
    step = {"text": "one two three", "hold_after": 1} | ({"fault": fault} if fault else {})
    with FlakyServer([step]) as server:
        late = threading.Timer(10, server.release)  # ends the test when nothing is handed on
        late.start()

        def emit(kind: str, **data: Any) -> None:
            first = not seen
            seen.append((data["text"], first and server.holding.wait(60)))
            if first:
                late.cancel()
                server.release()

        client = Client(Settings(base_url=server.url, model="m", environ={}), emit)
        reply = client.complete(question())
        client.close()
    assert seen[0] == ("one ", True)
    assert "".join(text for text, _ in seen) == reply.message["content"] == "one two three"
