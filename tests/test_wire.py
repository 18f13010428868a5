"""Section 4 against the odd servers of the field: the cases are data in tests/wire.

tests/wire/README.md says how a case is written. Here each one is played by the flaky server over
HTTP, and what the client makes of it is compared. Then: no split of the bytes changes a reply, a
well-behaved stream comes through as it was meant, and what a server refuses is mended once.
"""

import base64
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
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
    build_agent,
    heal,
    read_events,
    read_lines,
)
from flaky_server import FlakyServer, validate

FOLDER = Path(__file__).parent / "wire"
KEY = "sk-wire-0123456789abcdef"
OFFERED = ["ls", "write", "edit_existing", "list_files", "read_file", "bash"]
OPEN_SECONDS = 10.0  # how long a socket that stays open stays open
quick = settings(max_examples=30, deadline=None, database=None)
thorough = settings(max_examples=3000, deadline=None, database=None)


def load(*names: str) -> list[dict[str, Any]]:
    """The cases of these files."""
    return [case for name in names for case in json.loads((FOLDER / f"{name}.json").read_text())]


ANSWERS = load("a_calls", "b_end", "c_framing", "d_reasoning", "e_errors")
REQUESTS = load("f_request", "g_adaptation")


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


def recorder(events: list[tuple[str, dict[str, Any]]]) -> Any:
    """An `emit` that keeps what it is told."""

    def emit(kind: str, **fields: Any) -> None:
        events.append((kind, fields))

    return emit


def converse(case: dict[str, Any], *more: Any, first: Any = None) -> SimpleNamespace:
    """One request to a server that plays the case (or a step) and then the other steps."""
    said = SimpleNamespace(reply=None, error=None, calls=[], events=[], waits=[])
    offered = case.get("offered", OFFERED)
    with FlakyServer([first or step_of(case), *more], key=KEY) as said.server:
        known = Settings(
            base_url=said.server.url,
            api_key=KEY,
            model="flaky-1",
            context=case.get("window", 0),
            environ={},
        )
        client = Client(known, recorder(said.events), sleep=said.waits.append, jitter=lambda: 0.0)
        transcript = Transcript([{"role": "system", "content": "Be short."}])
        transcript.add_user("hi")
        began = time.monotonic()
        patience = threading.Timer(OPEN_SECONDS, said.server.release)
        patience.start()
        try:
            said.reply = client.complete(transcript, tools_json(offered), offered)
            said.stored = said.reply.message
            if said.stored["content"] or said.stored.get("tool_calls"):
                at = len(transcript.messages)
                said.calls = transcript.add_reply(said.reply.message)
                said.stored = transcript.messages[at]
        except (ProviderError, TryLater) as error:
            said.error = error
        said.took = time.monotonic() - began
        patience.cancel()
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
    assert (said.waits, said.retries) == ([], [])
    assert len(said.server.requests) <= expect.get("at_most", 1)
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
    message = said.stored
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
        assert said.text == content, "what was shown is not what is stored"
    assert all(words in content for words in expect.get("text_has", []))
    if "reasoning" in expect:
        assert said.thought == expect["reasoning"]
    if "reasoning_details" in expect:
        assert message.get("reasoning_details") == expect["reasoning_details"]
    if "usage" in expect:
        known = {name: said.reply.usage.get(name) for name in expect["usage"]}
        assert known == expect["usage"]


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


# -- the flaky server has a name for each of these shapes


QUICK = "The quick brown fox jumps over the lazy dog."
READ, LIST = ("read_file", {"path": "README.md"}), ("list_files", {"path": "."})
READ_ONE = {"name": "read_file", "arguments": {"path": "README.md"}}
READ_TWO = {"name": "read_file", "arguments": {"path": "docs"}}
CUT_READ = {"name": "read_file", "arguments": {}}
MADE: dict[str, list[str]] = {
    "text": """no_last_line_end json_reply_as_stream json_lines no_blank_lines named_events crlf_cut
    gzip_announced gzip_unannounced reasoning_key reasoning_details message_beside_delta
    nulls_for_choices""".split(),
    "one call": """late_fragment id_late name_late name_empty type_missing function_null
    arguments_placeholder call_resent""".split(),
    "two calls": """index_and_id_missing index_text index_zero_without_ids one_event""".split(),
    "retry": "bare_error_finish error_string error_flat overload_text spliced".split(),
    "empty": ["only_comments"],
    "quota": ["usage_limit"],
    "filtered": ["prompt_filtered"],
    "overflow": "context_overflow_llama too_large_for_a_minute".split(),
    "fatal": "error_list error_nested".split(),
}


def play(step: dict[str, Any]) -> SimpleNamespace:
    """`converse` with a step of the flaky server instead of a case."""
    return converse({}, "recovered", first=step)


@pytest.mark.parametrize(
    ("fault", "kind"), [(fault, kind) for kind, faults in MADE.items() for fault in faults]
)
def test_a_shape_that_the_flaky_server_makes_is_taken_as_it_was_meant(
    fault: str, kind: str
) -> None:
    said = play({"fault": fault})
    if kind == "text":
        check_reply(said, {"text": QUICK})
    elif kind.endswith("calls") or kind == "one call":
        expected = [READ, LIST][: 1 + (kind == "two calls")]
        calls = [{"name": name, "arguments": arguments} for name, arguments in expected]
        check_reply(said, {"calls": calls})
    elif kind == "retry":
        check_retry(said, {})
    elif kind == "empty":
        check_empty(said)
    else:
        check_error(said, {"error": kind})


@pytest.mark.parametrize(
    ("fault", "expect"),
    [
        ("announced_nothing", {"text": "", "announced": True}),
        ("bad_utf8", {"text": "\ufffd\ufffd" + " \ufffd".join(QUICK.split(" "))}),
        ("surrogates_cut", {"text": QUICK + "\U0001f600"}),
        ("cut_call_labelled_whole", {"calls": [{**CUT_READ, "malformed": True}]}),
        ("arguments_of_two_calls", {"calls": [READ_ONE, READ_TWO]}),
    ],
)
def test_a_damaged_shape_of_the_flaky_server_says_what_is_left(
    fault: str, expect: dict[str, Any]
) -> None:
    check_reply(play({"fault": fault}), expect)


# -- a well-behaved stream comes through as it was meant


ODD = ["<", "<think>", "</think>", "<tool_call>", "{", "}{", "\u2028", "\x85", "\\ud83d", '"', "\n"]
PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=10)
PROSE = st.lists(st.one_of(PLAIN, st.sampled_from(ODD)), max_size=8).map("".join)
VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), PROSE),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(PROSE, inner, max_size=3)),
    max_leaves=6,
)
CALL = st.tuples(st.sampled_from(OFFERED), st.dictionaries(PROSE, VALUE, max_size=3))
WELL = {
    "prose": PROSE,
    "thought": PROSE,
    "calls": st.lists(CALL, max_size=3),
    "places": PLACES,
    "order": st.randoms(use_true_random=False),
}


def fragments(text: str, places: list[int]) -> list[str]:
    """The text in pieces."""
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def delta_event(delta: dict[str, Any], finish: str | None = None) -> bytes:
    """One event of a stream that does everything right."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def call_events(items: list[dict[str, Any]], places: list[int], order: Any) -> list[bytes]:
    """The events of all calls: each one in order, the calls perhaps in turns."""
    queues = []
    for index, item in enumerate(items):
        name, arguments = item["function"]["name"], item["function"]["arguments"]
        first = {**item, "index": index, "function": {"name": name, "arguments": ""}}
        rest = [
            {"index": index, "function": {"arguments": p}} for p in fragments(arguments, places)
        ]
        queues.append([first, *rest])
    turns = [n for n, queue in enumerate(queues) for _ in queue]
    order.shuffle(turns)
    turns = [*range(len(queues)), *turns]  # calls are announced in the order of their indexes
    return [delta_event({"tool_calls": [queues[n].pop(0)]}) for n in turns if queues[n]]


def check_well_behaved(
    prose: str, thought: str, calls: list[Any], places: list[int], order: Any
) -> None:
    items = [
        {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": text}}
        for n, (name, text) in enumerate((name, json.dumps(value)) for name, value in calls)
    ]
    text = f"A{prose}"
    events = [delta_event({"reasoning_content": part}) for part in fragments(thought, places)]
    events += [delta_event({"role": "assistant", "content": p}) for p in fragments(text, places)]
    events += call_events(items, places, order)
    events += [delta_event({}, "tool_calls" if items else "stop"), b"data: [DONE]\n\n"]
    message, end, announced, _ = outcome(cut(b"".join(events), places))
    assert (message["content"], end, announced) == (text, "complete", False)
    assert message.get("tool_calls", []) == items
    assert message.get("reasoning_content", "") == thought


@quick
@given(**WELL)
def test_a_stream_of_a_well_behaved_server_is_never_changed(
    prose: str, thought: str, calls: list[Any], places: list[int], order: Any
) -> None:
    check_well_behaved(prose, thought, calls, places, order)


@pytest.mark.long
@thorough
@given(**WELL)
def test_a_stream_of_a_well_behaved_server_is_never_changed_thoroughly(
    prose: str, thought: str, calls: list[Any], places: list[int], order: Any
) -> None:
    check_well_behaved(prose, thought, calls, places, order)


# -- what a server refuses; the names are those of tests/wire


def messages_of(request: dict[str, Any], role: str = "") -> list[dict[str, Any]]:
    """The messages of a request, perhaps of one role only."""
    return [message for message in request["messages"] if role in ("", message["role"])]


def items_of(request: dict[str, Any]) -> list[dict[str, Any]]:
    """All calls of a request."""
    return [item for message in messages_of(request) for item in message.get("tool_calls") or ()]


def callers(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The assistant messages that call."""
    return [message for message in messages_of(request) if message.get("tool_calls")]


def ids_match(request: dict[str, Any], pattern: str) -> bool:
    """Has every call an id of this form?"""
    return all(re.fullmatch(pattern, item["id"]) for item in items_of(request))


def is_object(text: Any) -> bool:
    """Is this a JSON object in a string?"""
    try:
        return isinstance(text, str) and isinstance(json.loads(text), dict)
    except ValueError:
        return False


def neighbours(request: dict[str, Any], first: str, second: str) -> bool:
    """Does a message of the second role follow one of the first?"""
    roles = [message["role"] for message in messages_of(request)]
    return (first, second) in itertools.pairwise(roles)


def text_in(request: dict[str, Any], pattern: str) -> bool:
    """Is this in the JSON of the request, as characters or as an escape?"""
    plain = json.dumps(request["messages"], ensure_ascii=False)
    return re.search(pattern, plain) is not None


MINIMUM = {"model", "messages", "stream", "stream_options", "tools"}
SENT_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id"}
REFUSES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "always": lambda r: True,
    "limit_of_tokens": lambda r: "max_tokens" in r or "max_completion_tokens" in r,
    "empty_tools": lambda r: r.get("tools") == [],
    "tool_choice": lambda r: "tool_choice" in r,
    "parallel_tool_calls": lambda r: "parallel_tool_calls" in r,
    "stream_options": lambda r: "stream_options" in r,
    "keys_beyond_the_minimum": lambda r: bool(set(r) - MINIMUM),
    "unknown_keys_of_messages": lambda r: any(set(m) - SENT_KEYS for m in messages_of(r)),
    "key_refusal": lambda r: any("refusal" in m for m in messages_of(r)),
    "role_developer": lambda r: bool(messages_of(r, "developer")),
    "several_system_messages": lambda r: [m["role"] for m in messages_of(r)].count("system") != 1,
    "empty_content_with_calls": lambda r: any(m.get("content") == "" for m in callers(r)),
    "null_content": lambda r: any(m.get("content") is None for m in messages_of(r)),
    "blank_content": lambda r: any(
        isinstance(m.get("content"), str) and not m["content"].strip() for m in messages_of(r)
    ),
    "text_with_calls": lambda r: any(m.get("content") for m in callers(r)),
    "empty_list_of_calls": lambda r: any(m.get("tool_calls") == [] for m in messages_of(r)),
    "empty_results": lambda r: any(not m["content"] for m in messages_of(r, "tool")),
    "results_without_name": lambda r: any(not m.get("name") for m in messages_of(r, "tool")),
    "broken_pairs": lambda r: any("T2" in p or "T3" in p for p in validate(r)),
    "repeated_ids": lambda r: len({i["id"] for i in items_of(r)}) != len(items_of(r)),
    "lone_surrogates": lambda r: text_in(r, "[\ud800-\udfff]|\\\\ud[89a-f]"),
    "nul_characters": lambda r: text_in(r, r"\\u0000"),
    "arguments_that_do_not_parse": lambda r: any(
        not is_object(i["function"]["arguments"]) for i in items_of(r)
    ),
    "calls_without_type": lambda r: any(i.get("type") != "function" for i in items_of(r)),
    "illegal_names": lambda r: any(
        not re.fullmatch("[A-Za-z0-9_-]{1,64}", i["function"]["name"]) for i in items_of(r)
    ),
    "ids_not_of_nine": lambda r: not ids_match(r, "[A-Za-z0-9]{9}"),
    "ids_over_40": lambda r: not ids_match(r, ".{1,40}"),
    "ids_with_odd_characters": lambda r: not ids_match(r, "[A-Za-z0-9_-]+"),
    "tool_turns": lambda r: bool(messages_of(r, "tool") or callers(r)),
    "user_after_tool": lambda r: neighbours(r, "tool", "user"),
    "equal_neighbours": lambda r: any(neighbours(r, role, role) for role in ("user", "assistant")),
    "calls_without_signature": lambda r: any("extra_content" not in i for i in items_of(r)),
    "has_extra_content": lambda r: any("extra_content" in i for i in items_of(r)),
    "lacks_extra_content": lambda r: any("extra_content" not in i for i in items_of(r)),
    "has_reasoning": lambda r: any("reasoning" in m for m in messages_of(r)),
    "lacks_reasoning": lambda r: any("reasoning" not in m for m in callers(r)),
    "has_reasoning_content": lambda r: any("reasoning_content" in m for m in messages_of(r)),
    "lacks_reasoning_content": lambda r: any(not m.get("reasoning_content") for m in callers(r)),
    "calls_without_reasoning_content": lambda r: any(
        "reasoning_content" not in m for m in callers(r)
    ),
    "has_reasoning_details": lambda r: any("reasoning_details" in m for m in messages_of(r)),
    "lacks_reasoning_details": lambda r: any(not m.get("reasoning_details") for m in callers(r)),
}


def refusing(case: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """A step that refuses what the case says, and answers everything else."""
    return lambda request: case["refuse_with"] if REFUSES[case["when"]](request) else "ok"


def stored(message: dict[str, Any], endpoint: str) -> dict[str, Any]:
    """A message of a case as it stands in a transcript: `from` says which model it is of."""
    kept = {key: value for key, value in message.items() if key != "from"}
    place = {
        "here": (endpoint, "flaky-1"),
        "another model": (endpoint, "flaky-2"),
        "elsewhere": ("https://elsewhere.example/v1", "flaky-1"),
    }.get(message.get("from", ""))
    return kept | {"_": dict(zip(("endpoint", "model"), place, strict=True))} if place else kept


class Talk:
    """A client, its server and a transcript with the history of a case."""

    def __init__(self, case: dict[str, Any], server: FlakyServer) -> None:
        self.case, self.server = case, server
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.waits: list[float] = []
        known = Settings(base_url=server.url, api_key=KEY, model="flaky-1", environ={})
        self.client = Client(known, recorder(self.events), sleep=self.waits.append)
        history = [stored(message, known.endpoint) for message in case["history"]]
        history.insert(0, {"role": "system", "content": "Be short."})
        self.transcript = Transcript(heal(history)[0] if case.get("heal") else history)

    def ask(self) -> str:
        """One reply; its text."""
        offered = self.case.get("tools", OFFERED)
        tools = tools_json(offered) if offered else ""
        reply = self.client.complete(self.transcript, tools, offered)
        self.transcript.add_reply(reply.message)
        return str(reply.message["content"])

    def notices(self) -> list[str]:
        """The notices so far."""
        return [fields["text"] for kind, fields in self.events if kind == "notice"]


@table([case for case in REQUESTS if "error" not in case["expect"]])
def test_a_request_has_the_form_that_the_server_wants(case: dict[str, Any]) -> None:
    expect = case["expect"]
    with FlakyServer(itertools.repeat(refusing(case))) as server:
        talk = Talk(case, server)
        assert talk.ask() == "ok"
        assert (len(server.requests), len(talk.notices())) == (
            expect["requests"],
            expect["notices"],
        )
        accepted = server.requests[-1]["messages"]
        talk.transcript.add_user("and next?")
        assert talk.ask() == "ok"
        talk.client.close()
    assert len(server.requests) == expect["requests"] + 1, "the form was not remembered"
    assert len(talk.notices()) == expect["notices"]
    assert server.requests[-1]["messages"][: len(accepted)] == accepted
    assert talk.waits == []
    said = json.dumps(server.requests[-1]["messages"], ensure_ascii=False)
    assert [words for words in expect.get("keeps", []) if words not in said] == []
    assert [problem for request in server.requests for problem in request.problems] == []


@table([case for case in REQUESTS if "error" in case["expect"]])
def test_what_can_not_be_mended_is_reported_in_the_words_of_the_server(
    case: dict[str, Any],
) -> None:
    expect = case["expect"]
    with FlakyServer(itertools.repeat(refusing(case))) as server:
        talk = Talk(case, server)
        with pytest.raises(ProviderError, match=re.escape(expect["contains"])):
            talk.ask()
        talk.client.close()
    assert len(server.requests) <= expect["at_most"]
    assert talk.waits == []
    assert [problem for request in server.requests for problem in request.problems] == []


# -- what needs more than one answer


def run_turns(folder: Path, script: Any, *turns: Any) -> tuple[FlakyServer, list[str], Any]:
    """Prompts, or functions of the agent, one after the other: the server, notices, last result."""
    events: list[tuple[str, dict[str, Any]]] = []
    with FlakyServer(script) as server:
        known = Settings(
            base_url=server.url,
            model="flaky-1",
            mode="auto",
            workspace=str(folder),
            save_session=False,
            environ={},
        )
        agent = build_agent(known, emit=recorder(events))
        for turn in turns:
            result = turn(agent) if callable(turn) else agent.run(turn)
        agent.close()
    assert [problem for request in server.requests for problem in request.problems] == []
    return server, [fields["text"] for kind, fields in events if kind == "notice"], result


def test_what_was_learned_counts_for_one_model_only(tmp_path: Path) -> None:
    case = next(case for case in REQUESTS if case["id"].startswith("G1 stream_options, OpenAI"))
    server, _, result = run_turns(
        tmp_path,
        itertools.repeat(refusing(case)),
        "one",
        "two",
        lambda agent: agent.set_model("flaky-2"),
        "three",
    )
    assert result.text == "ok"
    had = [(request["model"], "stream_options" in request) for request in server.requests]
    learned = [("flaky-1", True), ("flaky-1", False), ("flaky-1", False)]
    assert had == [*learned, ("flaky-2", True), ("flaky-2", False)]


LONG = "word " * 20_000


@pytest.mark.parametrize(
    ("tokens", "warned"),
    [
        pytest.param(4096, 1, id="the prompt was cut E14"),
        pytest.param(24_000, 0, id="a plausible count"),
        pytest.param(0, 0, id="no count"),
    ],
)
def test_a_prompt_that_was_cut_in_silence_is_noticed_once(
    tmp_path: Path, tokens: int, warned: int
) -> None:
    said = {"text": "ok", "usage": {"prompt_tokens": tokens, "completion_tokens": 1}}
    _, notices, result = run_turns(tmp_path, itertools.repeat(said), LONG, "and now?")
    assert result.text == "ok"
    assert len([text for text in notices if "OLLAMA_CONTEXT_LENGTH" in text]) == warned


def test_a_connection_that_went_stale_is_opened_again_at_once() -> None:
    case = {"history": [{"role": "user", "content": "hi"}]}
    with FlakyServer(["one", {"fault": "drop"}, "two"]) as server:
        talk = Talk(case, server)
        assert talk.ask() == "one"
        talk.transcript.add_user("go on")
        assert talk.ask() == "two"
        talk.client.close()
    assert (talk.waits, len(server.requests)) == ([], 3)


def test_a_fresh_connection_that_breaks_is_no_stale_one() -> None:
    case = {"history": [{"role": "user", "content": "hi"}]}
    with FlakyServer([{"fault": "drop"}, "one"]) as server:
        talk = Talk(case, server)
        assert talk.ask() == "one"
        talk.client.close()
    assert len(talk.waits) == 1


def test_a_stale_connection_is_excused_once_only() -> None:
    case = {"history": [{"role": "user", "content": "hi"}]}
    with FlakyServer(["one", {"fault": "drop"}, {"fault": "drop"}, "two"]) as server:
        talk = Talk(case, server)
        talk.ask()
        talk.transcript.add_user("go on")
        assert talk.ask() == "two"
        talk.client.close()
    assert (len(talk.waits), len(server.requests)) == (1, 4)


@pytest.mark.parametrize("sign", [": ping\n\n", "data:\n\n", "event: ping\ndata: {}\n\n"])
def test_signs_of_life_without_data_do_not_hold_off_the_clock(sign: str) -> None:
    now = itertools.count(0, 50)  # fifty seconds pass whenever somebody looks
    case = {"history": [{"role": "user", "content": "hi"}]}
    with FlakyServer([step_of({"body": [sign] * 400, "after_body": "open"}), "whole"]) as server:
        talk = Talk(case, server)
        talk.client.clock = lambda: float(next(now))
        patience = threading.Timer(OPEN_SECONDS, server.release)
        patience.start()
        assert talk.ask() == "whole"
        patience.cancel()
        talk.client.close()
    (retry,) = [fields for kind, fields in talk.events if kind == "retry"]
    assert "120 s" in retry["reason"]


def schema_keys(schema: dict[str, Any]) -> set[str]:
    """All keywords of a schema, at any depth; names of properties are none."""
    inner = [*schema.get("properties", {}).values(), *filter(None, [schema.get("items")])]
    return set(schema).union(*map(schema_keys, inner))


def test_the_schemas_of_the_tools_hold_nothing_that_a_provider_refuses(tmp_path: Path) -> None:
    server, _, _ = run_turns(tmp_path, ["ok"], "hi")
    functions = [tool["function"] for tool in server.requests[0]["tools"]]
    assert all(re.fullmatch("[A-Za-z0-9_-]{1,64}", function["name"]) for function in functions)
    used = set().union(*(schema_keys(function["parameters"]) for function in functions))
    assert used <= {"type", "description", "properties", "required", "items", "enum"}  # F21


def test_an_event_larger_than_every_buffer_is_read() -> None:
    delta = {
        "choices": [{"index": 0, "delta": {"content": "x" * 300_000}, "finish_reason": "stop"}]
    }
    case = {"body": [f"data: {json.dumps(delta)}\n\n", "data: [DONE]\n\n"], "chunks": [65_536]}
    said = converse(case)
    assert (len(said.text), said.retries) == (300_000, [])


def test_all_ids_of_cases_differ() -> None:
    ids = [case["id"] for case in ANSWERS + REQUESTS]
    assert sorted(ids) == sorted(set(ids))


def test_every_predicate_is_used() -> None:
    assert set(REFUSES) == {case["when"] for case in REQUESTS}
