"""Section 2: the messages of a session are valid after every operation (DESIGN, T1 to T9)."""

import copy
import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from agent import (
    Client,
    Settings,
    Transcript,
    clean,
    cut_point,
    heal,
    new_session,
    open_session,
    problems,
    read_json_object,
    state_folder,
)
from flaky_server import validate

SYSTEM = {"role": "system", "content": "be brief"}
NOT_RUN = "not run"
INTERRUPTED = "interrupted: this may have run in part"
CANCELLED = "cancelled by the user before it ran"
PLAIN = settings(
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
QUICK = settings(PLAIN, max_examples=75)
LONG = settings(PLAIN, max_examples=5000)


def user(text: Any = "go") -> dict:
    """What the user said."""
    return {"role": "user", "content": text}


def says(text: Any) -> dict:
    """A reply that calls nothing."""
    return {"role": "assistant", "content": text}


def call(call_id: Any, arguments: Any = "{}", name: Any = "bash") -> dict:
    """One call as it stands in a message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def asks(*calls: Any, content: Any = None) -> dict:
    """A reply that calls tools; a word stands for a plain call with that id."""
    made = [call(item) if isinstance(item, str) else item for item in calls]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(call_id: Any, text: Any = "ok") -> dict:
    """The answer to a call."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def silent(kind: str, **fields: Any) -> None:
    """Take an event and do nothing."""


def new_client() -> Client:
    """A client of a server that is never asked."""
    return Client(Settings(model="flaky-1", base_url="http://127.0.0.1:9/v1", api_key="x"), silent)


def body_of(messages: list) -> dict:
    """The request that these messages and one more prompt would make."""
    transcript = Transcript(copy.deepcopy(messages))
    transcript.add_user("next")
    return json.loads(new_client().body(transcript, ""))


def refused(messages: list) -> list[str]:
    """What the strict server finds wrong with the request made of these messages."""
    return validate(body_of(messages))


def begun(*messages: dict) -> Transcript:
    """A transcript with a system message and a prompt, and these behind them."""
    return Transcript([SYSTEM, user(), *copy.deepcopy(list(messages))])


# -- problems ------------------------------------------------------------------------------------

VALID = [
    pytest.param([SYSTEM], id="only the system message"),
    pytest.param([SYSTEM, user(), says("done")], id="a question and its answer"),
    pytest.param([SYSTEM, user(), user("more")], id="two prompts in a row"),
    pytest.param([SYSTEM, says("hello")], id="a reply first"),
    pytest.param([SYSTEM, user(), asks("a"), result("a")], id="one call"),
    pytest.param(
        [SYSTEM, user(), asks("a", "b", content="two"), result("a"), result("b"), says("done")],
        id="two calls",
    ),
    pytest.param(
        [SYSTEM, user(), asks("a"), result("a"), asks("b"), result("b")], id="two steps in a row"
    ),
    pytest.param(
        [SYSTEM, user(), asks(call("a", ' { "x" : [1, "\u2028"] } ')), result("a")],
        id="arguments with blanks",
    ),
    pytest.param(
        [SYSTEM, user(), asks(call("a", '{"x":"\\ud83d\\ude00"}')), result("a")],
        id="a pair of escapes",
    ),
    pytest.param([SYSTEM, user("\U0001f600 caf\u00e9")], id="emoji"),
    pytest.param(
        [SYSTEM, user(), {**says("x"), "_": {"model": "m", "endpoint": "e"}}], id="private key"
    ),
    pytest.param(
        [SYSTEM, user(), {**says("x"), "reasoning_content": "hm"}], id="reasoning is kept"
    ),
    pytest.param(
        [SYSTEM, user(), asks("a"), {**result("a"), "name": "bash"}], id="a name in a result"
    ),
    pytest.param(
        [SYSTEM, user(), asks({**call("a"), "extra_content": {"sig": "x"}}), result("a")],
        id="a foreign key in a call is kept",
    ),
]

BROKEN = [
    pytest.param([], "T1", id="empty"),
    pytest.param([user()], "T1", id="no system message"),
    pytest.param([user(), SYSTEM], "T1", id="system message second"),
    pytest.param([SYSTEM, user(), SYSTEM], "T1", id="two system messages"),
    pytest.param([SYSTEM, {"role": "robot", "content": "x"}], "T1", id="unknown role"),
    pytest.param([SYSTEM, {"content": "x"}], "T1", id="no role"),
    pytest.param([SYSTEM, user(), asks("a")], "T2", id="no result at the end"),
    pytest.param([SYSTEM, user(), asks("a"), user()], "T2", id="no result before a prompt"),
    pytest.param([SYSTEM, user(), asks("a", "b"), result("a")], "T2", id="one of two results"),
    pytest.param(
        [SYSTEM, user(), asks("a"), user("note"), result("a")], "T2", id="something in between"
    ),
    pytest.param(
        [SYSTEM, user(), asks("a", "b"), result("b"), result("a")], "T3", id="wrong order"
    ),
    pytest.param([SYSTEM, user(), result("a")], "T3", id="a result without a call"),
    pytest.param(
        [SYSTEM, user(), asks("a"), result("a"), result("a")], "T3", id="two results of a call"
    ),
    pytest.param(
        [SYSTEM, user(), asks("a"), result("x"), says("y")], "T3", id="a result of another call"
    ),
    pytest.param(
        [SYSTEM, user(), asks("a"), {"role": "tool", "content": "x"}], "T3", id="result without id"
    ),
    pytest.param([SYSTEM, user(), asks("a", "a"), result("a"), result("a")], "T4", id="id twice"),
    pytest.param(
        [SYSTEM, user(), asks("a"), result("a"), asks("a"), result("a")],
        "T4",
        id="id twice over turns",
    ),
    pytest.param([SYSTEM, user(), asks(call("")), result("")], "T4", id="empty id"),
    pytest.param([SYSTEM, user(), asks(call(7)), result(7)], "T4", id="id is a number"),
    pytest.param(
        [SYSTEM, user(), asks({**call("a"), "type": "custom"}), result("a")], "T4", id="other type"
    ),
    pytest.param([SYSTEM, user(), asks(call("a", "{")), result("a")], "T4", id="cut arguments"),
    pytest.param([SYSTEM, user(), asks(call("a", "")), result("a")], "T4", id="no arguments"),
    pytest.param([SYSTEM, user(), asks(call("a", "[]")), result("a")], "T4", id="a list"),
    pytest.param([SYSTEM, user(), asks(call("a", {"x": 1})), result("a")], "T4", id="an object"),
    pytest.param([SYSTEM, user(), asks(call("a", '{"x":NaN}')), result("a")], "T4", id="NaN"),
    pytest.param([SYSTEM, user(), asks(call("a", name=None)), result("a")], "T4", id="no name"),
    pytest.param([SYSTEM, user(), asks()], "T4", id="empty list of calls"),
    pytest.param([SYSTEM, user(), asks(content="x")], "T4", id="text and an empty list of calls"),
    pytest.param([SYSTEM, user(), {**says("x"), "tool_calls": {}}], "T4", id="calls are no list"),
    pytest.param([SYSTEM, user(), asks(None)], "T4", id="a call is null"),
    pytest.param(
        [SYSTEM, user(), asks({"id": "a", "type": "function"}), result("a")], "T4", id="no function"
    ),
    pytest.param([SYSTEM, user([{"type": "text", "text": "x"}])], "T4", id="a list of parts"),
    pytest.param([SYSTEM, user(), says("")], "T5", id="empty reply"),
    pytest.param([SYSTEM, user(), says(None)], "T5", id="reply of null"),
    pytest.param([SYSTEM, user(""), says("x")], "T5", id="empty prompt"),
    pytest.param([SYSTEM, user("\ud83d")], "T9", id="lone surrogate"),
    pytest.param([SYSTEM, user("a\0b")], "T9", id="NUL"),
    pytest.param(
        [SYSTEM, user(), asks(call("a", name="\ud83d")), result("a")],
        "T9",
        id="surrogate in a name",
    ),
    pytest.param(
        [SYSTEM, user(), asks(call("a", '{"x":"\\ud83d"}')), result("a")],
        "T4 T9",
        id="escaped lone surrogate in arguments",
    ),
    pytest.param(
        [SYSTEM, user(), asks(call("a", '{"x":"\\u0000"}')), result("a")],
        "T4 T9",
        id="escaped NUL in arguments",
    ),
]


@pytest.mark.parametrize("messages", VALID)
def test_a_valid_list_has_no_problems_and_the_server_takes_it(messages):
    assert (problems(messages), refused(messages)) == ([], [])


@pytest.mark.parametrize("messages, invariants", BROKEN)
def test_a_broken_list_has_a_problem_named_after_its_invariant(messages, invariants):
    names = {problem.split(":")[0] for problem in problems(messages)}
    assert names & set(invariants.split())


@pytest.mark.parametrize("garbage", [None, 7, "text", [], ["x"], True], ids=repr)
def test_a_message_that_is_no_object_is_a_problem_and_no_crash(garbage):
    assert problems([SYSTEM, garbage, user()]) != []
    assert problems([garbage]) != []


# -- heal ----------------------------------------------------------------------------------------

HEALED = [
    pytest.param(
        [SYSTEM, user(), asks("a", "b"), user("more"), result("b", "B"), result("a", "A")],
        [SYSTEM, user(), asks("a", "b"), result("a", "A"), result("b", "B"), user("more")],
        id="results behind a prompt",
    ),
    pytest.param(
        [SYSTEM, user(), asks("a", "b"), result("b", "B"), result("a", "A")],
        [SYSTEM, user(), asks("a", "b"), result("a", "A"), result("b", "B")],
        id="results in the wrong order",
    ),
    pytest.param(
        [SYSTEM, user(), result("x"), says("done")],
        [SYSTEM, user(), says("done")],
        id="result without a call",
    ),
    pytest.param(
        [SYSTEM, user(), asks("a"), result("a", "first"), result("a", "again"), says("done")],
        [SYSTEM, user(), asks("a"), result("a", "first"), says("done")],
        id="second result of a call",
    ),
    pytest.param(
        [SYSTEM, user(), asks(call("a", "{")), result("a")],
        [SYSTEM, user(), asks(call("a", "{}")), result("a")],
        id="cut arguments",
    ),
    pytest.param(
        [SYSTEM, user(), asks(call("a", {"x": 1})), result("a")],
        [SYSTEM, user(), asks(call("a", '{"x":1}')), result("a")],
        id="arguments as an object",
    ),
    pytest.param(
        [SYSTEM, user(), asks(call("a", '{"x":"\\ud83d"}')), result("a")],
        [SYSTEM, user(), asks(call("a", '{"x":"\ufffd"}')), result("a")],
        id="escaped lone surrogate",
    ),
    pytest.param(
        [SYSTEM, user(), asks({"id": "a", "function": call("a")["function"]}), result("a")],
        [SYSTEM, user(), asks("a"), result("a")],
        id="no type",
    ),
    pytest.param(
        [SYSTEM, user(), says(""), says(None), says("done")],
        [SYSTEM, user(), says("done")],
        id="empty replies",
    ),
    pytest.param(
        [SYSTEM, user(), asks(content="done")],
        [SYSTEM, user(), says("done")],
        id="empty list of calls",
    ),
    pytest.param(
        [SYSTEM, user([{"type": "text", "text": "a"}, {"type": "image_url"}, "b"]), says("x")],
        [SYSTEM, user("ab"), says("x")],
        id="content in parts",
    ),
    pytest.param(
        [SYSTEM, None, user(), 7, "text", [], says("done")],
        [SYSTEM, user(), says("done")],
        id="what is no message",
    ),
    pytest.param(
        [SYSTEM, user("caf\udce9 \ud83d\ude00 a\0b"), says("x")],
        [SYSTEM, user("caf\ufffd \U0001f600 a\ufffdb"), says("x")],
        id="surrogates and NUL",
    ),
]


@pytest.mark.parametrize("damaged, healed", HEALED)
def test_heal_repairs_what_can_be_repaired(damaged, healed):
    found, notes = heal(damaged)
    assert (found, bool(notes)) == (healed, True)


@pytest.mark.parametrize("messages", VALID)
def test_heal_leaves_a_valid_list_equal_and_has_nothing_to_say(messages):
    assert heal(messages) == (messages, [])


def test_a_valid_reply_that_leaves_out_its_content_is_left_equal_too():
    bare = {"role": "assistant", "tool_calls": [call("a")]}
    messages = [SYSTEM, user(), bare, result("a")]
    assert (problems(messages), refused(messages)) == ([], [])
    assert heal(messages) == (messages, [])


def test_a_lost_result_is_answered_as_unknown_and_never_as_not_run():
    healed, notes = heal([SYSTEM, user(), asks("a", "b"), result("b"), user("more")])
    assert [message.get("tool_call_id") for message in healed[3:5]] == ["a", "b"]
    assert "may have run" in healed[3]["content"]
    assert (healed[4], healed[5], len(notes) > 0) == (result("b"), user("more"), True)


def test_a_list_without_a_system_message_gets_one_in_front():
    healed, _ = heal([user(), says("done")])
    assert (healed[0]["role"], healed[1:]) == ("system", [user(), says("done")])


def test_ids_that_repeat_over_turns_are_renamed_together_with_their_results():
    turn = [asks("a"), result("a", "one"), asks("a"), result("a", "two")]
    healed, _ = heal([SYSTEM, user(), *turn])
    ids = [message["tool_calls"][0]["id"] for message in healed[2::2]]
    assert healed[2:] == [asks(ids[0]), result(ids[0], "one"), asks(ids[1]), result(ids[1], "two")]
    assert (ids[0], len(set(ids))) == ("a", 2)


def test_equal_and_missing_ids_in_one_reply_are_paired_by_position():
    texts = ["one", "two", "three", "four"]
    reply = asks(call("a"), call("a"), call(""), call(None))
    given_ids = ["a", "a", "", None]
    answers = [result(i, text) for i, text in zip(given_ids, texts, strict=True)]
    healed, _ = heal([SYSTEM, user(), reply, *answers])
    assert [message["content"] for message in healed[3:]] == texts
    assert (problems(healed), len(healed)) == ([], 7)


def test_a_call_without_any_shape_does_not_keep_heal_from_the_rest():
    odd = [None, 7, {}, {"function": "bash"}, {"function": ["x"]}, {"id": {"a": 1}}, call("a")]
    healed, notes = heal([SYSTEM, user(), asks(*odd), result("a", "A"), says("done")])
    assert (problems(healed), refused(healed), len(notes) > 0) == ([], [], True)
    assert [m["content"] for m in healed if m.get("tool_call_id") == "a"] == ["A"]


def test_a_second_system_message_becomes_something_else_and_its_text_stays():
    healed, _ = heal([SYSTEM, user(), {"role": "system", "content": "a rule"}, says("done")])
    assert problems(healed) == []
    assert any("a rule" in (message["content"] or "") for message in healed)


# -- heal, over random lists ---------------------------------------------------------------------

TEXTS = st.text(st.sampled_from('ab \n"\\{}\u00e9\u2028\ufeff\U0001f600'), min_size=1, max_size=8)
ODD = [
    *[None, "", 0, True, [], {}, "x", ["x"], [None], [{}], "user", "tool", "assistant", "system"],
    *["id0", "id1", "\ud83d", "\ude00", "caf\udce9", "a\0b", {"a\0": {"b": "\ud83d"}}],
    *["{", "null", "[1]", '{"a":NaN}', '{"a":"\\ud83d"}', '"{}"', '{"a":1}{"a":2}', "{'a': 1}"],
    *[[{"type": "text", "text": "part"}], [{"id": "id0", "function": "x"}], [call("id0", "{")]],
    *[[{"id": "id1", "function": []}], [call(7), call(7)], [call(None)], {"function": call("z")}],
]


@st.composite
def conversations(draw) -> list[dict]:
    """A valid list of messages."""
    messages, numbers = [SYSTEM], itertools.count()
    for kind in draw(st.lists(st.sampled_from(["user", "text", "calls"]), max_size=6)):
        if kind == "calls":
            ids = [f"id{next(numbers)}" for _ in range(draw(st.integers(1, 4)))]
            messages.append(asks(*ids, content=draw(st.none() | TEXTS)))
            messages += [result(call_id, draw(TEXTS)) for call_id in ids]
        else:
            messages.append(user(draw(TEXTS)) if kind == "user" else says(draw(TEXTS)))
    return copy.deepcopy(messages)


def places(messages: list) -> list[dict]:
    """Every object in the messages that a damage may change: messages, calls, functions."""
    found = [message for message in messages if isinstance(message, dict)]
    for message in list(found):
        calls = message.get("tool_calls")
        found += [item for item in calls if isinstance(item, dict)] if type(calls) is list else []
    return found + [o["function"] for o in found if isinstance(o.get("function"), dict)]


def damage(draw, messages: list) -> None:
    """Break the messages in one way, in place."""
    at, to = draw(st.integers(0, len(messages) - 1)), draw(st.integers(0, len(messages)))
    kind = draw(st.sampled_from(["lose", "twice", "move", "strange", "change", "change", "drop"]))
    if kind == "lose":
        messages.pop(at)
    elif kind in ("twice", "move"):
        moved = copy.deepcopy(messages[at]) if kind == "twice" else messages.pop(at)
        messages.insert(to, moved)
    elif kind == "strange":
        messages[at] = draw(st.sampled_from([None, 7, "text", [], {}, [user()]]))
    elif found := places(messages):
        place = draw(st.sampled_from(found))
        key = draw(st.sampled_from([*place, "tool_calls", "tool_call_id", "content", "name"]))
        value = copy.deepcopy(draw(st.sampled_from(ODD)))
        place.pop(key, None) if kind == "drop" else place.update({key: value})


@st.composite
def damaged_lists(draw) -> list:
    """A valid list that was edited by hand, by another tool, or by a bad night."""
    messages = draw(conversations())
    for _ in range(draw(st.integers(1, 4))):
        if messages:
            damage(draw, messages)
    return messages


def check_heal(damaged: list) -> None:
    """What heal owes to a list of any kind."""
    before = copy.deepcopy(damaged)
    healed, notes = heal(damaged)
    assert damaged == before, "heal changed the list that it was given"
    assert problems(healed) == []
    assert refused(healed) == []
    assert heal(healed) == (healed, [])
    assert (notes != []) == (healed != damaged)


def check_agreement(messages: list) -> None:
    """What has no problem for the agent has none for a strict server, and is not healed."""
    if not problems(messages):
        assert refused(messages) == []
        assert heal(messages) == (messages, [])


@QUICK
@given(damaged_lists())
def test_heal_makes_any_damaged_list_valid_and_is_idempotent(damaged):
    check_heal(damaged)


@pytest.mark.long
@LONG
@given(damaged_lists())
def test_heal_makes_any_damaged_list_valid_and_is_idempotent_long(damaged):
    check_heal(damaged)


@QUICK
@given(conversations())
def test_heal_leaves_any_valid_list_equal(messages):
    assert (problems(messages), heal(messages)) == ([], (messages, []))


@pytest.mark.parametrize(
    "message",
    [
        pytest.param({**user(), "tool_calls": [call("a")]}, id="a prompt with calls"),
        pytest.param({**user(), "tool_call_id": "a"}, id="a prompt with the id of a call"),
        pytest.param({**says("x"), "tool_call_id": "a"}, id="a reply with the id of a call"),
        pytest.param({**says("x"), "tool_calls": None}, id="a reply with calls of null"),
        pytest.param({**user(), "reasoning_content": "hm"}, id="a prompt with reasoning"),
        pytest.param({**user(), "_": {"model": "m"}}, id="a prompt with a private key"),
    ],
)
def test_keys_in_strange_places_are_a_problem_or_are_not_sent(message):
    check_agreement([SYSTEM, user(), message])
    check_heal([SYSTEM, user(), message, message])


@QUICK
@given(damaged_lists())
def test_the_server_refuses_nothing_that_problems_lets_pass(messages):
    check_agreement(messages)


@pytest.mark.long
@LONG
@given(damaged_lists())
def test_the_server_refuses_nothing_that_problems_lets_pass_long(messages):
    check_agreement(messages)


# -- cut_point -----------------------------------------------------------------------------------

TWO_STEPS = [
    *[SYSTEM, user(), asks("a", "b"), result("a"), result("b")],
    *[asks("c"), result("c"), says("done"), user("more")],
]


@pytest.mark.parametrize(
    "wanted, cut",
    [
        pytest.param(0, 0, id="the system message stays"),
        pytest.param(1, 1, id="before the first prompt"),
        pytest.param(2, 2, id="before a reply with calls"),
        pytest.param(3, 2, id="not between a call and its results"),
        pytest.param(4, 2, id="not between two results"),
        pytest.param(5, 5, id="before the second step"),
        pytest.param(6, 5, id="not before its result"),
        pytest.param(7, 7, id="before the answer"),
        pytest.param(8, 8, id="before a prompt"),
        pytest.param(99, 8, id="far behind the end"),
    ],
)
def test_a_cut_is_made_only_before_a_prompt_or_a_reply(wanted, cut):
    assert cut_point(TWO_STEPS, wanted) == cut


def test_there_is_nothing_to_cut_in_short_lists():
    assert [cut_point(TWO_STEPS[:length], 9) <= 1 for length in (1, 2)] == [True, True]
    assert cut_point([], 3) <= 1


@QUICK
@given(conversations(), st.integers(0, 30))
def test_what_stays_behind_any_cut_is_valid_and_the_cut_is_the_last_possible(messages, wanted):
    cut = cut_point(messages, wanted)
    between = messages[cut + 1 : wanted + 1]
    assert cut <= wanted
    assert cut <= 1 or problems([SYSTEM, *messages[cut:]]) == []
    assert {message["role"] for message in between} <= {"tool"} or cut <= 1


# -- clean text and arguments --------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, cleaned",
    [
        pytest.param("", "", id="nothing"),
        pytest.param("plain\n\t text", "plain\n\t text", id="ASCII"),
        pytest.param("caf\u00e9 \u2028 \U0001f600", "caf\u00e9 \u2028 \U0001f600", id="Unicode"),
        pytest.param("caf\udce9", "caf\ufffd", id="a byte of argv"),
        pytest.param("\ud83d", "\ufffd", id="high surrogate at the end"),
        pytest.param("\ud83dx", "\ufffdx", id="high surrogate"),
        pytest.param("\ude00x", "\ufffdx", id="low surrogate"),
        pytest.param("\ud83d\ude00", "\U0001f600", id="a pair"),
        pytest.param("\ude00\ud83d", "\ufffd\ufffd", id="a pair the wrong way round"),
        pytest.param("\ud83d\ud83d\ude00", "\ufffd\U0001f600", id="a lone one before a pair"),
        pytest.param("a\0b", "a\ufffdb", id="NUL"),
        pytest.param("\u00e9\0\ud83d", "\u00e9\ufffd\ufffd", id="NUL and surrogate"),
    ],
)
def test_text_is_made_valid_unicode(text, cleaned):
    assert clean(text) == cleaned


@QUICK
@given(st.text(st.characters() | st.sampled_from("\0\ud83d\ude00\udce9")))
def test_clean_text_can_be_encoded_and_cleaning_twice_changes_nothing(text):
    cleaned = clean(text)
    assert cleaned.encode("utf-8").decode("utf-8") == cleaned == clean(cleaned)
    assert "\0" not in cleaned


@QUICK
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_valid_text_is_not_changed(text):
    assert clean(text) == text


@pytest.mark.parametrize(
    "raw, arguments",
    [
        pytest.param('{"a":1}', {"a": 1}, id="an object"),
        pytest.param({"a": 1}, {"a": 1}, id="an object that is no string"),
        pytest.param("", {}, id="empty"),
        pytest.param("  \n", {}, id="blank"),
        pytest.param(None, {}, id="missing"),
        pytest.param("null", {}, id="null"),
        pytest.param('{"a":"x\ny\tz"}', {"a": "x\ny\tz"}, id="raw control characters"),
        pytest.param('```json\n{"a":1}\n```', {"a": 1}, id="a code fence"),
        pytest.param('"{\\"a\\":1}"', {"a": 1}, id="encoded twice"),
        pytest.param('{"a":"\\ud83d\\ude00"}', {"a": "\U0001f600"}, id="a pair of escapes"),
        pytest.param('{"a":"\\ud83d"}', {"a": "\ufffd"}, id="a lone escape"),
        pytest.param('{"a\\u0000":"\\u0000"}', {"a\ufffd": "\ufffd"}, id="escaped NUL"),
    ],
)
def test_arguments_that_lose_nothing_are_read(raw, arguments):
    assert read_json_object(raw) == (arguments, "")


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param('{"path": "a', id="cut in a string"),
        pytest.param('{"a":1,', id="cut behind a comma"),
        pytest.param('{"a":1,}', id="trailing comma"),
        pytest.param("{'a': 1}", id="single quotes"),
        pytest.param('{"a":1}{"a":2}', id="two objects"),
        pytest.param('{"a":1} and so on', id="text behind it"),
        pytest.param("[1]", id="a list"),
        pytest.param([1], id="a list that is no string"),
        pytest.param("7", id="a number"),
        pytest.param(7, id="a number that is no string"),
        pytest.param('"text"', id="a string"),
        pytest.param('{"a":NaN}', id="NaN"),
        pytest.param('{"a":-Infinity}', id="Infinity"),
        pytest.param("[" * 100_000, id="endless nesting"),
    ],
)
def test_arguments_that_are_no_object_are_an_error_and_never_a_guess(raw):
    arguments, error = read_json_object(raw)
    assert (arguments, error != "") == ({}, True)


def test_the_error_of_broken_arguments_says_where_they_are_broken():
    assert "char 12" in read_json_object('{"path": "a"')[1]


# -- a reply comes in ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw, stored, arguments",
    [
        pytest.param(' { "a" : 1.0 } ', ' { "a" : 1.0 } ', {"a": 1.0}, id="to the byte"),
        pytest.param({"a": "\u00e9"}, '{"a":"\u00e9"}', {"a": "\u00e9"}, id="object"),
        pytest.param("", "{}", {}, id="empty"),
        pytest.param(None, "{}", {}, id="null"),
        pytest.param('{"a":"x\ny"}', '{"a":"x\\ny"}', {"a": "x\ny"}, id="control character"),
        pytest.param('{"a":"\\ud83d"}', '{"a":"\ufffd"}', {"a": "\ufffd"}, id="lone escape"),
        pytest.param('"{\\"a\\":1}"', '{"a":1}', {"a": 1}, id="encoded twice"),
    ],
)
def test_arguments_are_stored_as_an_object_in_a_string(raw, stored, arguments):
    transcript = begun()
    [made] = transcript.add_reply(asks(call("a", raw)))
    assert transcript.messages[2:] == [asks(call("a", stored)), result("a", NOT_RUN)]
    assert (made.id, made.name, made.arguments, made.error) == ("a", "bash", arguments, "")


@pytest.mark.parametrize(
    "raw", ['{"path": "a', "[1]", "{'a': 1}", '{"a":NaN}', [1], {"a": float("inf")}], ids=repr
)
def test_arguments_that_can_not_be_read_are_stored_empty_and_the_call_says_why(raw):
    transcript = begun()
    [made] = transcript.add_reply(asks(call("a", raw)))
    assert transcript.messages[2:] == [asks("a"), result("a", NOT_RUN)]
    assert (made.arguments, made.error != "") == ({}, True)
    assert refused(transcript.messages) == []


def test_the_error_of_a_call_holds_the_raw_text_and_the_position():
    [made] = begun().add_reply(asks(call("a", '{"path": "a"')))
    assert '{"path": "a"' in made.error
    assert "char 12" in made.error


def test_a_reply_is_sealed_in_one_step_with_a_placeholder_for_each_call():
    transcript = begun()
    reply = asks("a", "b", content="both")
    made = transcript.add_reply(reply)
    assert [one.id for one in made] == ["a", "b"]
    assert transcript.messages[2:] == [reply, result("a", NOT_RUN), result("b", NOT_RUN)]


def test_missing_and_repeated_ids_become_unique_in_the_reply_and_in_the_session():
    transcript = begun(asks("a"), result("a"))
    odd = [{**call("x"), "id": value} for value in ("a", "b", "b", "", None)]
    odd.append({"type": "function", "function": {"name": "bash", "arguments": "{}"}})
    ids = [made.id for made in transcript.add_reply(asks(*odd))]
    assert (ids[1], len(set(ids) | {"a"}), all(ids)) == ("b", 7, True)
    assert [m["tool_call_id"] for m in transcript.messages[5:]] == ids
    assert (problems(transcript.messages), refused(transcript.messages)) == ([], [])


def test_an_id_that_was_used_before_a_resume_is_not_used_again():
    transcript = Transcript([SYSTEM, user(), asks("a"), result("a")])
    [made] = transcript.add_reply(asks("a"))
    assert made.id != "a"


def test_everything_else_of_a_reply_is_kept_verbatim():
    transcript = begun()
    odd = {**call("a"), "extra_content": {"google": {"thought_signature": "s"}}}
    reply = {**asks(odd, content="text"), "reasoning_content": "hm", "_": {"model": "m"}}
    transcript.add_reply(reply)
    assert transcript.messages[2] == reply


def test_a_call_without_a_type_gets_one():
    transcript = begun()
    transcript.add_reply(asks({"id": "a", "function": {"name": "bash", "arguments": "{}"}}))
    assert transcript.messages[2:] == [asks("a"), result("a", NOT_RUN)]


@pytest.mark.parametrize("content", [None, ""], ids=repr)
@pytest.mark.parametrize("extra", [{}, {"tool_calls": []}, {"tool_calls": None}], ids=repr)
def test_a_reply_without_content_and_without_calls_is_not_stored(content, extra):
    transcript = begun()
    with pytest.raises(ValueError, match="T5"):
        transcript.add_reply({**says(content), **extra})
    assert transcript.messages == [SYSTEM, user()]


def test_the_text_of_a_reply_enters_as_valid_unicode():
    transcript = begun()
    transcript.add_reply(asks(call("a", name="b\0"), content="\ud83d\ude00 \ud83d"))
    assert transcript.messages[2] == asks(call("a", name="b\ufffd"), content="\U0001f600 \ufffd")


def test_the_reply_that_was_handed_in_is_not_changed():
    reply = asks(call("a", {"x": 1}), call("a", "{"))
    before = copy.deepcopy(reply)
    begun().add_reply(reply)
    assert reply == before


# -- the life of a call --------------------------------------------------------------------------


def test_a_call_reads_interrupted_while_it_runs_and_its_result_afterwards():
    transcript = begun()
    transcript.add_reply(asks("a", "b"))
    transcript.begin("a")
    assert transcript.messages[3:] == [result("a", INTERRUPTED), result("b", NOT_RUN)]
    transcript.answer("a", "done")
    assert transcript.messages[3:] == [result("a", "done"), result("b", NOT_RUN)]


def test_a_cancel_keeps_what_ran_and_says_that_the_rest_never_did():
    transcript = begun()
    transcript.add_reply(asks("a", "b", "c"))
    transcript.answer("a", "done")
    transcript.begin("b")
    transcript.cancel_waiting()
    texts = [message["content"] for message in transcript.messages[3:]]
    assert texts == ["done", INTERRUPTED, CANCELLED]


def test_a_second_cancel_changes_nothing():
    transcript = begun()
    transcript.add_reply(asks("a"))
    transcript.cancel_waiting()
    before = copy.deepcopy(transcript.messages)
    transcript.cancel_waiting()
    assert transcript.messages == before


def test_an_empty_result_is_sent_as_text():
    transcript = begun()
    transcript.add_reply(asks("a"))
    transcript.answer("a", "")
    assert (problems(transcript.messages), refused(transcript.messages)) == ([], [])
    assert transcript.messages[3]["content"] != NOT_RUN


def test_results_and_prompts_enter_as_valid_unicode():
    transcript = begun()
    transcript.add_reply(asks("a"))
    transcript.answer("a", "caf\udce9\0")
    transcript.add_user("\ud83d\ude00 \ud83d")
    assert transcript.messages[3:] == [result("a", "caf\ufffd\ufffd"), user("\U0001f600 \ufffd")]


def test_a_note_goes_into_the_last_result_and_makes_no_message_of_its_own():
    transcript = begun(asks("a"), result("a", "done"))
    transcript.append_note("[note: come to an end]")
    assert transcript.messages[3:] == [result("a", "done\n[note: come to an end]")]


def test_a_compacted_list_takes_the_place_of_the_whole_and_ids_stay_taken():
    transcript = begun(asks("a"), result("a"), says("done"))
    transcript.replace([SYSTEM, user("[Hand-over note]"), says("done")])
    assert transcript.messages == [SYSTEM, user("[Hand-over note]"), says("done")]
    assert [json.loads(line) for line in transcript.lines()] == transcript.messages
    transcript.add_user("more")
    assert transcript.add_reply(asks("a"))[0].id != "a"


def test_the_system_message_is_replaced_and_never_doubled():
    transcript = Transcript()
    transcript.set_system("one")
    transcript.add_user("go")
    transcript.set_system("two \ud83d")
    assert transcript.messages == [{"role": "system", "content": "two \ufffd"}, user()]


# -- T8: what is sent ----------------------------------------------------------------------------


def requests_of_a_task(client: Client, transcript: Transcript) -> list[dict]:
    """The bodies of the requests of a turn with two steps of calls, and of the turn after it."""
    bodies = [client.body(transcript, "")]
    for number in range(2):
        made = transcript.add_reply(asks("a", call("a", "{"), content=f"step {number}"))
        transcript.begin(made[0].id)
        transcript.answer(made[0].id, f"caf\u00e9 {number}")
        transcript.answer(made[1].id, f"error: {made[1].error}")
        bodies.append(client.body(transcript, ""))
    transcript.append_note("[note: last]")
    transcript.add_reply({**says("done"), "reasoning_content": "hm", "_": {"model": "other"}})
    transcript.add_user("more")
    return [json.loads(body) for body in [*bodies, client.body(transcript, "")]]


def test_each_request_begins_element_by_element_with_the_one_before():
    bodies = requests_of_a_task(new_client(), begun())
    for body, after in itertools.pairwise(bodies[:3]):
        assert after["messages"][: len(body["messages"])] == body["messages"]
    assert [{**body, "messages": []} for body in bodies] == [{**bodies[0], "messages": []}] * 4
    assert [validate(body) for body in bodies] == [[], [], [], []]


def test_what_is_sent_depends_on_the_saved_messages_alone():
    client, transcript = new_client(), begun()
    requests_of_a_task(client, transcript)
    saved = json.loads(json.dumps(transcript.messages))
    assert new_client().body(Transcript(saved), "") == client.body(transcript, "")


def test_a_result_that_is_filled_in_after_a_request_is_sent_as_it_is_now():
    client, transcript = new_client(), begun()
    transcript.add_reply(asks("a"))
    client.body(transcript, "")
    transcript.answer("a", "done")
    assert json.loads(client.body(transcript, ""))["messages"][-1] == result("a", "done")


def test_private_keys_and_reasoning_of_another_model_are_never_sent():
    foreign = {**says("x"), "reasoning_content": "hm", "_": {"model": "m", "endpoint": "e"}}
    assert body_of([SYSTEM, user(), foreign])["messages"][2] == says("x")


# -- random lives --------------------------------------------------------------------------------

PROMPTS = st.sampled_from(["go", "", "caf\udce9", "a\0b", "\U0001f600\n\u2028", "[" * 50])
RESULTS = st.sampled_from(["done", "\ud83d", "x\0", "error: no", "line\n" * 50, "\U0001f600"])
IDS = st.sampled_from(["a", "b", "c", "", None, 7, "\ud83d"]) | st.integers(0, 999).map(
    "n{}".format
)
ARGUMENTS = st.sampled_from(
    ["{}", '{"a": "\\ud83d"}', "{", "", None, {"a": "\0"}, "[1]", "null", '{"a":NaN}', '"{}"', [1]]
)
NAMES = st.sampled_from(["bash", "read_file", "", None, "two words", "x" * 90, "\ud83d"])
CALLS = st.lists(st.builds(call, IDS, ARGUMENTS, NAMES), max_size=5)
CRASH = st.sampled_from(["", "", "", "", "before the save", "after the save"])


class Life(RuleBasedStateMachine):
    """A session that is used, cancelled, killed, compacted and damaged in any order.

    `effects` are the calls whose work was done, `finished` the results that were saved, `sent`
    the messages of the last request since the last compaction or damage.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=folder))
        self.session = new_session(state_folder(self.root) / "sessions", {}, 0.0)
        self.transcript.set_system("be brief")
        self.session.save()
        self.client = new_client()
        self.running = ""
        self.effects: set[str] = set()
        self.finished: dict[str, str] = {}
        self.sent: list[dict] = []

    def teardown(self) -> None:
        """Let go of the lock and leave no file."""
        self.session.close()
        shutil.rmtree(self.root)

    @property
    def transcript(self) -> Transcript:
        return self.session.transcript

    @property
    def idle(self) -> bool:
        """Whether no call is running or waiting."""
        return not self.running and not self.transcript.waiting

    @property
    def path(self) -> Path:
        return self.session.folder / f"{self.session.id}.json"

    def on_disk(self) -> list[dict]:
        """The messages that a crash would leave."""
        return json.loads(self.path.read_bytes())["messages"]

    def reopen(self) -> list[str]:
        """The process is gone and another one resumes; returns what heal had to say."""
        self.session.close()
        self.running, self.client = "", new_client()
        self.session, notes = open_session(self.path)
        return notes

    def crash(self) -> None:
        """Killed: what was saved is there, equal and without any repair."""
        saved = self.on_disk()
        assert (self.reopen(), self.transcript.messages) == ([], saved)

    def saved(self, crash: str) -> bool:
        """Save, unless the process is killed before it; False when it was."""
        if crash == "before the save":
            self.crash()
            return False
        self.session.save()
        return True

    def end_step(self, crash: str) -> None:
        if crash == "after the save":
            self.crash()

    @precondition(lambda self: self.idle)
    @rule(text=PROMPTS, crash=CRASH)
    def the_user_says(self, text, crash):
        self.transcript.add_user(text)
        self.saved(crash)
        self.end_step(crash)

    @precondition(lambda self: self.idle and self.transcript.messages[-1]["role"] in "user tool")
    @rule(calls=CALLS, text=st.sampled_from([None, "", "ok", "\ud83d\ude00 \ud83d"]), crash=CRASH)
    def the_model_replies(self, calls, text, crash):
        body = json.loads(self.client.body(self.transcript, ""))
        assert validate(body) == []
        assert body["messages"][: len(self.sent)] == self.sent, "T8"
        self.sent = body["messages"]
        reply, before = {**says(text), "tool_calls": calls}, list(self.transcript.messages)
        if not calls and not text:
            with pytest.raises(ValueError):
                self.transcript.add_reply(reply)
            assert self.transcript.messages == before
            return
        assert len(self.transcript.add_reply(reply)) == len(calls)
        self.saved(crash)
        self.end_step(crash)

    @precondition(lambda self: self.transcript.waiting and not self.running)
    @rule(crash=CRASH)
    def a_call_begins(self, crash):
        call_id = self.transcript.waiting[0]
        self.transcript.begin(call_id)
        if self.saved(crash):  # only now does the tool run
            self.running = call_id
            self.effects.add(call_id)
        self.end_step(crash)

    @precondition(lambda self: self.running)
    @rule(text=RESULTS, crash=CRASH)
    def the_running_call_ends(self, text, crash):
        call_id, self.running = self.running, ""
        self.transcript.answer(call_id, text)
        if self.saved(crash):
            self.finished[call_id] = clean(text)
        self.end_step(crash)

    @precondition(lambda self: self.transcript.waiting and not self.running)
    @rule(crash=CRASH)
    def a_call_is_denied(self, crash):
        call_id = self.transcript.waiting[0]
        self.transcript.answer(call_id, "denied: no")
        if self.saved(crash):
            self.finished[call_id] = "denied: no"
        self.end_step(crash)

    @rule(partial=st.sampled_from(["", "half a sen"]), crash=CRASH)
    def the_user_cancels(self, partial, crash):
        ran, self.running = self.running, ""
        waiting = [*self.transcript.waiting]
        streaming = not ran and not waiting
        if ran:
            self.transcript.answer(ran, f"output\n{INTERRUPTED}")
        self.transcript.cancel_waiting()
        results = [m for m in self.transcript.messages[-5:] if m["role"] == "tool"]
        texts = {message["tool_call_id"]: message["content"] for message in results}
        assert [texts[call_id] for call_id in waiting] == [CANCELLED] * len(waiting)
        if streaming and partial and self.transcript.messages[-1]["role"] in ("user", "tool"):
            self.transcript.add_reply(says(f"{partial}\n[cut by the user]"))
        self.saved(crash)
        self.end_step(crash)

    @rule()
    def the_process_is_killed(self):
        self.crash()

    @precondition(lambda self: self.idle)
    @rule(wanted=st.integers(0, 40), crash=CRASH)
    def the_older_part_is_compacted(self, wanted, crash):
        messages = self.transcript.messages
        cut = cut_point(messages, wanted)
        if cut <= 1:
            return
        kept = [messages[0], user("[Hand-over note]"), *messages[cut:]]
        self.transcript.replace(kept)
        assert self.transcript.messages == kept
        self.client.forget_projection()
        if self.saved(crash):
            left = {m["tool_call_id"] for m in self.transcript.messages if m["role"] == "tool"}
            self.sent, self.effects = [], self.effects & left
            self.finished = {i: text for i, text in self.finished.items() if i in left}
        self.end_step(crash)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def somebody_edits_the_file(self, data):
        header = json.loads(self.path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            if header["messages"]:
                damage(data.draw, header["messages"])
        expected, _ = heal(header["messages"])
        self.path.write_text(json.dumps(header))
        notes = self.reopen()
        assert bool(notes) == (header["messages"] != expected)
        self.sent, self.effects, self.finished = [], set(), {}

    @invariant()
    def the_transcript_is_valid(self):
        assert problems(self.transcript.messages) == []
        assert refused(self.transcript.messages) == []

    @invariant()
    def the_disk_is_valid_and_says_what_happened(self):
        saved = self.on_disk()
        texts = {m["tool_call_id"]: m["content"] for m in saved if m["role"] == "tool"}
        unsaid = [i for i in self.effects if texts[i] in (NOT_RUN, CANCELLED)]
        assert (problems(saved), unsaid) == ([], [])
        assert {i: texts[i] for i in self.finished} == self.finished


def test_any_life_of_a_session_leaves_it_valid(tmp_path):
    counts = settings(PLAIN, max_examples=20, stateful_step_count=30)
    run_state_machine_as_test(lambda: Life(tmp_path), settings=counts)
    assert os.listdir(tmp_path) == []


@pytest.mark.long
def test_any_life_of_a_session_leaves_it_valid_long(tmp_path):
    counts = settings(PLAIN, max_examples=800, stateful_step_count=60)
    run_state_machine_as_test(lambda: Life(tmp_path), settings=counts)
    assert os.listdir(tmp_path) == []
