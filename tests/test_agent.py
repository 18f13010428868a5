"""Section 8, the agent: the loop, seals, approvals, budgets, compaction, events.

`stage` builds an agent in front of a scripted server; at the end of each test every request that
the server got must have been valid.
"""

import asyncio
import dataclasses
import hashlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stages
from conftest import NAP, alive, until

from agent import (
    Always,
    Session,
    Settings,
    Transcript,
    UsageError,
    build_agent,
    open_session,
    problems,
    promises,
    raised,
    tool,
)
from flaky_server import FlakyServer

ROOT = Path(__file__).resolve().parent.parent
INTERRUPTED = "interrupted: this may have run in part"
CANCELLED = "cancelled by the user before it ran"


class Stage(stages.Stage):
    """With what these tests ask it for."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The transcript."""
        return self.agent.transcript.messages

    def sent(self, at: int = -1) -> list[dict[str, Any]]:
        """The messages of a request."""
        return self.server.requests[at]["messages"]

    def saved(self) -> dict[str, Any]:
        """The session as it is on disk."""
        (path,) = (self.root / ".agent" / "sessions").glob("*.json")
        return json.loads(path.read_text())


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    """Build agents; at the end all is closed, and every request and transcript was valid."""
    yield from stages.stages(tmp_path, Stage)


def results(messages: list[dict[str, Any]]) -> list[str]:
    """The results of calls, in order."""
    return [message["content"] for message in messages if message["role"] == "tool"]


def users(messages: list[dict[str, Any]]) -> list[str]:
    """What the user said, in order."""
    return [message["content"] for message in messages if message["role"] == "user"]


def without_private(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as they are sent."""
    return [{key: value for key, value in m.items() if key != "_"} for m in messages]


@tool(needs="read")
def echo(text: str = "") -> str:
    """Say it again.

    text: what to say
    """
    return text


@tool(needs="read")
def fail(text: str = "") -> str:
    """Fail.

    text: why
    """
    raise RuntimeError(text)


@tool(needs="run")
def act(text: str = "") -> str:
    """Do something.

    text: what
    """
    return f"did {text}"


def say(*texts: str, name: str = "echo") -> dict[str, Any]:
    """A step that calls a tool once for each text."""
    return {"calls": [{"name": name, "arguments": {"text": text}} for text in texts]}


def run_bash(command: str) -> dict[str, Any]:
    """A step with a command."""
    return {"call": "bash", "arguments": {"command": command}}


def write(path: str, content: str = "x\n") -> dict[str, Any]:
    """A step that writes a file."""
    return {"call": "write_file", "arguments": {"path": path, "content": content}}


# -- the example of the contract


def test_the_example_of_the_contract_works(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)

    @tool(needs="read")
    def ticket(number: int) -> str:
        """Look up a ticket.

        number: the ticket's number
        """
        return f"#{number}: open"

    with FlakyServer(
        [{"call": "ticket", "arguments": {"number": 7}}, "Ticket 7 is open."]
    ) as server:
        agent = build_agent(
            Settings(model="gpt-4o-mini", base_url=server.url, api_key="x"),
            tools=[ticket],
            emit=lambda kind, **data: None,
            ask=None,
        )
        result = agent.run("what is the state of ticket 7?")
        agent.close()
    assert (result.text, result.status, result.exit_code) == ("Ticket 7 is open.", "done", 0)
    assert results(server.requests[1]["messages"]) == ["#7: open"]
    assert result.usage["prompt_tokens"] > 0 and result.usage["completion_tokens"] > 0
    assert [request.problems for request in server.requests] == [[], []]


# -- the loop


def test_an_answer_without_calls_ends_the_turn(stage: Callable[..., Stage]) -> None:
    one = stage(["Hello."])
    result = one.run("hi")
    assert (result.text, result.status, result.exit_code, result.turns) == ("Hello.", "done", 0, 1)
    assert [message["role"] for message in one.messages] == ["system", "user", "assistant"]
    assert [message["role"] for message in one.sent()] == ["system", "user"]


def test_the_calls_of_a_reply_are_answered_in_order_whatever_each_does(
    stage: Callable[..., Stage],
) -> None:
    calls = [
        {"name": "echo", "arguments": {"text": "one"}, "id": "a"},
        {"name": "fail", "arguments": {"text": "no luck"}, "id": "b"},
        {"name": "nothing", "arguments": {}, "id": "c"},
        {"name": "echo", "arguments": '{"text": "tw', "id": "d"},
        {"name": "echo", "arguments": {"words": "x"}, "id": "e"},
        {"name": "echo", "arguments": {"text": "three"}, "id": "f"},
    ]
    one = stage([{"calls": calls}, "done"], tools=[echo, fail])
    assert one.run().status == "done"
    answers = [message for message in one.sent() if message["role"] == "tool"]
    assert [message["tool_call_id"] for message in answers] == list("abcdef")
    texts = [message["content"] for message in answers]
    assert (texts[0], texts[5]) == ("one", "three")
    assert [text[:7] for text in texts[1:5]] == ["error: "] * 4
    assert "RuntimeError" in texts[1] and "no luck" in texts[1]


def test_an_unknown_tool_is_answered_with_the_known_ones(stage: Callable[..., Stage]) -> None:
    one = stage([{"call": "open_file", "arguments": {}}, "done"])
    one.run()
    (text,) = results(one.sent())
    assert text.startswith("error: ")
    assert [name for name in ("open_file", *one.agent.tools) if name not in text] == []


def test_malformed_arguments_are_not_run_and_the_reason_goes_back(
    stage: Callable[..., Stage],
) -> None:
    raw = '{"text": "rm -rf build'
    one = stage([{"call": "act", "arguments": raw}, "done"], tools=[act])
    one.run()
    (text,) = results(one.sent())
    assert text.startswith("error: ")
    assert raw in text and "line 1 column 10" in text
    assert one.sent()[2]["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param("", "(no output)", id="nothing"),
        pytest.param("a\0b\ud83dc", "a\ufffdb\ufffdc", id="no valid text"),
        pytest.param("\ud83d\ude00", "\U0001f600", id="a pair of surrogates"),
        pytest.param({"a": [1, "ü"]}, '{"a":[1,"ü"]}', id="an object"),
        pytest.param(None, "null", id="None"),
        pytest.param(7, "7", id="a number"),
    ],
)
def test_what_a_tool_returns_becomes_text(
    stage: Callable[..., Stage], value: Any, expected: str
) -> None:
    @tool(needs="read")
    def give() -> str:
        """Give."""
        return value

    one = stage([{"call": "give", "arguments": {}}, "done"], tools=[give])
    one.run()
    assert results(one.sent()) == [expected]


def test_a_result_is_capped(stage: Callable[..., Stage]) -> None:
    @tool(needs="read")
    def give() -> str:
        """Give."""
        return "head" + "x" * 100_000 + "tail"

    one = stage([{"call": "give", "arguments": {}}, "done"], tools=[give])
    one.run()
    (text,) = results(one.sent())
    assert len(text) <= 20_000
    assert text.startswith("head") and text.endswith("tail") and "not shown" in text


def test_what_enters_is_valid_text(stage: Callable[..., Stage]) -> None:
    one = stage([{"text": "a\ud83db\0c"}, "done"])
    one.run("caf\udce9\0")
    one.run("again")
    assert users(one.sent())[0] == "caf\ufffd\ufffd"
    assert one.sent()[2]["content"] == "a\ufffdb\ufffdc"


def test_a_second_prompt_goes_on_where_the_first_ended(stage: Callable[..., Stage]) -> None:
    one = stage(["first", "second"])
    one.run("one")
    assert one.run("two").text == "second"
    assert users(one.sent()) == ["one", "two"]


def test_usage_is_added_up_over_the_requests(stage: Callable[..., Stage]) -> None:
    steps = [say("a"), say("b"), {"text": "done"}]
    for n, step in enumerate(steps, 1):
        step["usage"] = {"prompt_tokens": 100 * n, "completion_tokens": n}
    one = stage([*steps, {"text": "more", "usage": {"prompt_tokens": 1, "completion_tokens": 1}}])
    first, second = one.run().usage, one.run().usage
    assert (first["prompt_tokens"], first["completion_tokens"]) == (600, 6)
    assert (second["prompt_tokens"], second["completion_tokens"]) == (1, 1)
    assert one.saved()["usage"]["prompt_tokens"] == 601
    assert [event["prompt_tokens"] for event in one.of("usage")] == [100, 200, 300, 1]


@pytest.mark.parametrize(
    ("step", "code"),
    [
        pytest.param({"status": 401, "body": {"error": {"message": "bad key"}}}, 41, id="401"),
        pytest.param({"status": 404, "body": {"error": {"message": "no model"}}}, 1, id="404"),
        pytest.param({"status": 429, "headers": {"Retry-After": "0"}, "times": 9}, 75, id="429"),
        pytest.param({"fault": "insufficient_quota"}, 1, id="quota"),
    ],
)
def test_a_request_that_fails_ends_the_turn_and_not_the_session(
    stage: Callable[..., Stage], step: dict[str, Any], code: int
) -> None:
    one = stage([say("kept"), step], tools=[echo])
    result = one.run("one")
    assert (result.status, result.exit_code, result.text) == ("error", code, "")
    assert results(one.saved()["messages"]) == ["kept"]
    assert one.of("notice")[-1]["level"] == "error"


def test_after_a_failed_request_the_next_prompt_is_sent(stage: Callable[..., Stage]) -> None:
    one = stage([{"status": 404}, "fine"])
    one.run("one")
    assert one.run("two").text == "fine"
    assert users(one.sent()) == ["one", "two"]


@pytest.mark.parametrize("prompt", [None, 5, b"x", ["a"]], ids=repr)
def test_a_prompt_that_is_no_text_is_refused_and_the_next_one_is_taken(
    stage: Callable[..., Stage], prompt: Any
) -> None:
    one = stage(["hello"])
    with pytest.raises(UsageError, match="text"):
        one.run(prompt)
    assert (one.run("hi").text, users(one.sent())) == ("hello", ["hi"])


@pytest.mark.parametrize("depth", [600, 3000])
def test_arguments_that_are_nested_without_end_are_an_error_for_the_model(
    stage: Callable[..., Stage], depth: int
) -> None:
    raw = '{"text": ' + "[" * depth + "]" * depth + "}"
    one = stage([{"call": "echo", "arguments": raw}, "done"], tools=[echo])
    assert one.run().text == "done"
    (text,) = results(one.sent())
    assert text.startswith("error: ")


def test_a_tool_that_would_end_the_program_is_an_error_and_the_turn_goes_on(
    stage: Callable[..., Stage],
) -> None:
    @tool(needs="read")
    def leave() -> str:
        """Leave."""
        sys.exit(3)

    calls = [{"name": name, "arguments": {}} for name in ("leave", "echo")]
    one = stage([{"calls": calls}, "done"], tools=[leave, echo])
    assert one.run().text == "done"
    assert results(one.sent()) == ["error: the tool tried to end the program", "(no output)"]


# -- seal first, fill in after


def reading(root: Path, seen: list[Any], needs: str) -> Any:
    """A tool that keeps what the session file says while it runs."""

    @tool(needs=needs)
    def look(text: str = "") -> str:
        """Look.

        text: nothing
        """
        (path,) = (root / ".agent" / "sessions").glob("*.json")
        seen.append(results(json.loads(path.read_text())["messages"]))
        return f"saw {text}"

    return look


def test_while_a_call_runs_the_disk_says_that_it_may_have_run(
    tmp_path: Path, stage: Callable[..., Stage]
) -> None:
    seen: list[Any] = []
    look = reading(tmp_path, seen, "run")
    one = stage([say("a", "b", name="look"), "done"], tools=[look])
    one.run()
    assert seen == [[INTERRUPTED, "not run"], ["saw a", INTERRUPTED]]
    assert results(one.saved()["messages"]) == ["saw a", "saw b"]


def test_a_call_that_waits_for_approval_has_not_run(
    tmp_path: Path, stage: Callable[..., Stage]
) -> None:
    seen: list[Any] = []

    def ask(question: Any) -> str:
        (path,) = (tmp_path / ".agent" / "sessions").glob("*.json")
        seen.append(results(json.loads(path.read_text())["messages"]))
        return "y"

    one = stage([write("a"), "done"], mode="ask", ask=ask)
    one.run()
    assert seen == [["not run"]]


def test_the_session_is_saved_before_the_first_request_and_after_each_reply(
    tmp_path: Path, stage: Callable[..., Stage]
) -> None:
    seen: list[int] = []

    def look(request: Any) -> Any:
        (path,) = (tmp_path / ".agent" / "sessions").glob("*.json")
        seen.append(len(json.loads(path.read_text())["messages"]))
        return say("a", "b") if len(seen) < 3 else "done"

    one = stage([look] * 3, tools=[echo])
    one.run()
    assert seen == [2, 5, 8]
    assert len(one.saved()["messages"]) == 9


# -- Ctrl-C


def interrupt() -> None:
    """A real Ctrl-C, for the main thread."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def interrupt_when(ready: Callable[[], Any]) -> None:
    """Wait in a thread, then interrupt the main thread once."""
    threading.Thread(target=lambda: ready() and interrupt(), daemon=True).start()


@tool(needs="run")
def stopped(text: str = "") -> str:
    """Be interrupted.

    text: nothing
    """
    signal.raise_signal(signal.SIGINT)
    return "too late"


def test_ctrl_c_in_a_tool_seals_it_and_what_did_not_begin(stage: Callable[..., Stage]) -> None:
    calls = [{"name": name, "arguments": {}} for name in ("act", "stopped", "act", "act")]
    one = stage([{"calls": calls}, "on we go"], tools=[act, stopped])
    result = one.run()
    assert (result.status, result.exit_code) == ("cancelled", 130)
    texts = results(one.saved()["messages"])
    assert (texts[0], texts[2:]) == ("did ", [CANCELLED, CANCELLED])
    assert texts[1].startswith("[interrupted") and "may have" in texts[1]
    assert one.run("and now?").text == "on we go"
    assert results(one.sent()) == texts


def test_ctrl_c_while_a_command_runs_keeps_its_output(stage: Callable[..., Stage]) -> None:
    def emit(kind: str, **data: Any) -> None:
        if kind == "tool_output":
            signal.raise_signal(signal.SIGINT)

    command = {"command": "echo so far; sleep 1000", "timeout": 1000}
    one = stage([{"call": "bash", "arguments": command}, "next"], emit=emit)
    result = one.run()
    (text,) = results(one.saved()["messages"])
    assert (result.status, result.exit_code) == ("cancelled", 130)
    assert text.startswith("so far\n[interrupted")
    assert one.of("tool_result")[0]["status"] == "cancelled"
    assert one.run("again").text == "next"


def test_ctrl_c_in_the_stream_keeps_the_text_with_a_mark(stage: Callable[..., Stage]) -> None:
    def emit(kind: str, **data: Any) -> None:
        if kind == "text" and data["text"].startswith("two"):
            signal.raise_signal(signal.SIGINT)

    one = stage([{"text": "one two three four", "hold_after": 2}, "next"], emit=emit)
    assert one.run().exit_code == 130
    assert one.saved()["messages"][-1]["content"].split() == "one two [cut by the user]".split()
    assert one.run("again").text == "next"
    assert one.sent()[-2]["content"].endswith("[cut by the user]")


@pytest.mark.parametrize("hold", [{"hold": "before"}, {"hold_after": 0}, {"reasoning": "Hm. Hm."}])
def test_ctrl_c_before_any_text_adds_nothing(
    stage: Callable[..., Stage], hold: dict[str, Any]
) -> None:
    def emit(kind: str, **data: Any) -> None:
        if kind == "reasoning":
            interrupt()

    def step(request: Any) -> Any:
        if "reasoning" not in hold:
            interrupt()
        return {"text": "late", "hold_after": 1} | hold

    one = stage([step, "next"], emit=emit)
    assert one.run("one").status == "cancelled"
    assert [message["role"] for message in one.saved()["messages"]] == ["system", "user"]
    assert one.run("two").text == "next"
    assert users(one.sent()) == ["one", "two"]


def test_ctrl_c_in_a_half_received_call_stores_no_call(stage: Callable[..., Stage]) -> None:
    call = {"text": "I look. ", "call": "act", "arguments": {"text": "x" * 100}, "hold_after": 4}
    one = stage([call, "next"], tools=[act])
    interrupt_when(lambda: one.server.holding.wait(60))
    assert one.run().status == "cancelled"
    assert "tool_calls" not in one.saved()["messages"][-1]
    assert one.run("again").text == "next"


def test_ctrl_c_while_it_waits_to_try_again(stage: Callable[..., Stage]) -> None:
    asleep = threading.Event()

    def emit(kind: str, **data: Any) -> None:
        if kind == "retry":
            interrupt_when(lambda: not asleep.wait(0.1))  # a moment after this event

    one = stage([{"status": 429, "headers": {"Retry-After": "200"}}, "next"], emit=emit)
    assert one.run().exit_code == 130
    assert one.run("again").text == "next"


def test_ctrl_c_at_the_question_runs_nothing(stage: Callable[..., Stage], tmp_path: Path) -> None:
    def ask(question: Any) -> str:
        signal.raise_signal(signal.SIGINT)
        return "y"

    calls = [{"name": "write_file", "arguments": {"path": p, "content": "x"}} for p in "ab"]
    one = stage([{"calls": calls}, "next"], mode="ask", ask=ask)
    assert one.run().exit_code == 130
    assert results(one.saved()["messages"]) == [CANCELLED, CANCELLED]
    assert not (tmp_path / "a").exists()
    assert one.run("again").text == "next"


def test_a_cancelled_turn_does_not_cancel_the_next(stage: Callable[..., Stage]) -> None:
    one = stage(
        [{"call": "stopped", "arguments": {}}, say("a", name="act"), "done"], tools=[act, stopped]
    )
    one.run()
    result = one.run("again")
    assert (result.status, result.exit_code, results(one.messages)[1]) == ("done", 0, "did a")


class Interrupted(Session):
    """A session whose first save behind a reply meets a Ctrl-C."""

    met = False

    def save(self, *, sync: bool = False) -> None:
        """Save, and be interrupted once."""
        super().save(sync=sync)
        if not self.met and self.transcript.messages[-1]["role"] == "assistant":
            self.met = True
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_during_the_save_behind_a_reply_keeps_its_text_once(
    stage: Callable[..., Stage],
) -> None:
    one = stage(["hello world", "next"])
    first = one.agent.session
    first.close()
    session = Interrupted(Transcript(), first.header, first.folder)
    one.agent.use_session(session)
    result = one.run("hi")
    assert (result.status, result.exit_code, session.met) == ("cancelled", 130, True)
    texts = [message["content"] for message in one.saved()["messages"][1:]]
    assert texts == ["hi", "hello world"]
    assert one.run("again").text == "next"


# -- approvals


def test_nobody_there_is_no_and_the_turn_goes_on(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    one = stage([write("a"), "I could not."], mode="ask")
    result = one.run()
    (text,) = results(one.sent())
    assert text.startswith("denied: ")
    assert (result.status, result.exit_code, result.text) == (
        "needs_permission",
        77,
        "I could not.",
    )
    (row,) = result.denied
    assert (row["name"], row["rule"]) == ("write_file", "write_file a")
    assert row["arguments"] == {"path": "a", "content": "x\n"}
    assert row["reason"] in text
    assert not (tmp_path / "a").exists()


def test_a_denied_call_leaves_the_others(stage: Callable[..., Stage]) -> None:
    calls = [
        {"name": "bash", "arguments": {"command": "make"}},
        {"name": "echo", "arguments": {"text": "fine"}},
    ]
    one = stage([{"calls": calls}, "done"], mode="ask", tools=[echo])
    one.run()
    first, second = results(one.sent())
    assert (first[:8], second) == ("denied: ", "fine")


def test_what_a_rule_denies_is_no_matter_for_a_human(stage: Callable[..., Stage]) -> None:
    step = {"call": "bash", "arguments": {"command": "make"}}
    asked: list[Any] = []
    one = stage([step, "done"], deny=("bash make",), ask=asked.append)
    result = one.run()
    assert results(one.sent())[0].startswith("denied: ")
    assert (result.status, result.exit_code, asked) == ("done", 0, [])


@pytest.mark.parametrize("path", ["../out", "/etc/hostname", "link"])
@pytest.mark.parametrize("name", ["read_file", "write_file"])
def test_a_path_outside_is_denied_without_a_question(
    stage: Callable[..., Stage], tmp_path: Path, path: str, name: str
) -> None:
    (tmp_path / "link").symlink_to("/etc/hostname")
    arguments = {"path": path} | ({"content": "x"} if name == "write_file" else {})
    asked: list[Any] = []
    one = stage([{"call": name, "arguments": arguments}, "done"], mode="ask", ask=asked.append)
    result = one.run()
    assert results(one.sent())[0].startswith(("denied: ", "error: "))
    assert (result.status, asked) == ("done", [])


def test_a_command_is_shown_as_it_will_run(stage: Callable[..., Stage]) -> None:
    asked: list[Any] = []
    step = {"call": "bash", "arguments": {"command": "echo $((1+1)) >  f"}}
    one = stage([step, "done"], mode="ask", ask=lambda q: asked.append(q) or "y")
    one.run()
    (question,) = asked
    assert (question.kind, question.name) == ("approve", "bash")
    assert "echo $((1+1)) >  f" in question.text
    assert (one.root / "f").read_text() == "2\n"


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        pytest.param(
            write("new", "a\nb\n"), "--- /dev/null\n+++ b/new\n@@ -0,0 +1,2 @@\n+a\n+b\n", id="new"
        ),
        pytest.param(
            write("f", "one\n2\n"),
            "--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n",
            id="replaced",
        ),
        pytest.param(
            {"call": "edit_file", "arguments": {"path": "f", "old": "two", "new": "2"}},
            "--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n",
            id="edited",
        ),
    ],
)
def test_a_change_is_shown_as_a_unified_diff(
    stage: Callable[..., Stage], step: dict[str, Any], expected: str
) -> None:
    asked: list[Any] = []
    one = stage([step, "done"], mode="ask", ask=lambda q: asked.append(q) or "n")
    (one.root / "f").write_text("one\ntwo\n")
    one.run()
    assert [question.text for question in asked] == [expected]
    assert (one.root / "f").read_text() == "one\ntwo\n"


@pytest.mark.parametrize("answer", ["y", "yes", "Y", " Yes \n"])
def test_yes_lets_it_run(stage: Callable[..., Stage], answer: str) -> None:
    one = stage([write("a"), "done"], mode="ask", ask=lambda question: answer)
    result = one.run()
    assert (one.root / "a").read_text() == "x\n"
    assert (result.exit_code, result.denied) == (0, [])
    assert one.of("approval")[0]["answer"] == "yes"


@pytest.mark.parametrize(
    "answer", ["n", "no", "", "  ", None, "yy", "yes please", "ja", "1", "use b instead"]
)
def test_anything_but_yes_is_no(stage: Callable[..., Stage], answer: str | None) -> None:
    one = stage([write("a"), "done"], mode="ask", ask=lambda question: answer)
    result = one.run()
    (text,) = results(one.sent())
    assert text.startswith("denied: ")
    assert not (one.root / "a").exists()
    assert (result.status, one.of("approval")[0]["answer"]) == ("done", "no")
    if (answer or "").strip() not in ("", "n", "no"):
        assert answer in text  # what else was said is the reason


def test_an_answer_holds_for_one_call(stage: Callable[..., Stage]) -> None:
    answers = iter(["y", "n"])
    calls = [{"name": "act", "arguments": {"text": "x"}}] * 2
    one = stage([{"calls": calls}, "done"], mode="ask", ask=lambda q: next(answers), tools=[act])
    one.run()
    assert [text[:5] for text in results(one.sent())] == ["did x", "denie"]


def test_a_host_is_asked_for_once(stage: Callable[..., Stage]) -> None:
    asked: list[str] = []
    urls = ["http://127.0.0.1:9/a", "http://127.0.0.1:9/b"]
    calls = [{"name": "fetch_url", "arguments": {"url": url}} for url in urls]
    one = stage([{"calls": calls}, "done"], mode="ask", ask=lambda q: asked.append(q.text) or "y")
    one.run()
    assert asked == urls[:1]


@pytest.mark.parametrize("mode", ["ask", "auto"])
@pytest.mark.parametrize("unattended", [False, True])
def test_writing_agents_md_asks_a_human_in_every_mode(
    stage: Callable[..., Stage], mode: str, unattended: bool
) -> None:
    asked: list[Any] = []
    options = {"mode": mode, "unattended": unattended}
    one = stage([write("AGENTS.md"), "done"], ask=lambda q: asked.append(q) or "n", **options)
    one.run()
    two = stage([write("AGENTS.md"), "done"], **options)
    assert (len(asked), two.run().exit_code) == (1, 77)
    assert not (one.root / "AGENTS.md").exists()


def test_a_file_that_changes_while_the_person_reads_the_diff_is_left_alone(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    def ask(question: Any) -> str:
        (tmp_path / "f").write_text("by the user")
        return "y"

    one = stage([write("f"), "done"], mode="ask", ask=ask)
    one.run()
    assert results(one.sent())[0].startswith("error: ")
    assert (tmp_path / "f").read_text() == "by the user"


def test_plan_mode_refuses_writes_and_goes_on(stage: Callable[..., Stage]) -> None:
    asked: list[Any] = []
    one = stage([write("a"), "Here is the plan."], mode="plan", ask=asked.append)
    result = one.run()
    assert results(one.sent())[0].startswith("denied: ")
    assert (result.status, asked, (one.root / "a").exists()) == ("done", [], False)


@pytest.mark.parametrize(
    ("step", "rule"),
    [
        pytest.param(write("AGENTS.md"), "write_file AGENTS.md", id="AGENTS.md"),
        pytest.param(write(".env"), "write_file .env", id="secret"),
        pytest.param({"call": "note", "arguments": {"text": "x"}}, "note AGENTS.md", id="note"),
    ],
)
@pytest.mark.parametrize("ruled", [False, True], ids=["no rule", "a rule that names it"])
def test_in_plan_mode_neither_a_person_nor_a_rule_makes_it_write(
    stage: Callable[..., Stage], step: Any, rule: str, ruled: bool
) -> None:
    asked: list[Any] = []
    allow = (rule,) if ruled else ()
    one = stage([step, "done"], mode="plan", allow=allow, ask=lambda q: asked.append(q) or "y")
    result = one.run()
    assert results(one.sent()) == ["denied: plan mode only reads"]
    assert (result.status, result.exit_code, asked) == ("done", 0, [])
    assert [path.name for path in one.root.iterdir()] == [".agent"]


@pytest.mark.parametrize("answer", [True, 1, b"y", ["y"], {"y": "y"}], ids=repr)
def test_what_is_no_text_is_no_yes_and_the_turn_goes_on(
    stage: Callable[..., Stage], answer: Any
) -> None:
    one = stage([write("a"), "done"], mode="ask", ask=lambda question: answer)
    result = one.run()
    assert (result.status, results(one.sent())) == ("done", ["denied: the user said no"])
    assert not (one.root / "a").exists()


def test_a_question_that_fails_is_no_yes_and_the_turn_goes_on(
    stage: Callable[..., Stage], capsys: Any
) -> None:
    def ask(question: Any) -> str:
        raise OSError("the terminal is gone")

    calls = [{"name": "write_file", "arguments": {"path": n, "content": ""}} for n in "ab"]
    one = stage([{"calls": calls}, "done"], mode="ask", ask=ask)
    result = one.run()
    assert (result.status, results(one.sent())) == ("done", ["denied: the user said no"] * 2)
    assert [path.name for path in one.root.iterdir()] == [".agent"]
    assert capsys.readouterr().err.count("the terminal is gone") == 1


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        pytest.param(
            write("new", ""), "--- /dev/null\n+++ b/new\n(an empty file)\n", id="an empty new file"
        ),
        pytest.param(
            write("f", "one\n"),
            "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-one\n\\ No newline at end of file\n+one\n",
            id="a newline is added at the end",
        ),
        pytest.param(
            write("g", "one"),
            "--- a/g\n+++ b/g\n@@ -1 +1 @@\n-one\n+one\n\\ No newline at end of file\n",
            id="the newline at the end goes away",
        ),
    ],
)
def test_a_change_that_can_hardly_be_seen_is_shown(
    stage: Callable[..., Stage], step: Any, expected: str
) -> None:
    asked: list[str] = []
    one = stage([step, "done"], mode="ask", ask=lambda q: asked.append(q.text) or "n")
    (one.root / "f").write_text("one")
    (one.root / "g").write_text("one\n")
    one.run()
    assert asked == [expected]


# -- budgets and loops


def numbered_steps(count: int) -> list[Any]:
    """Steps that each call a tool with another text."""
    return [say(f"step {n}") for n in range(1, count + 1)]


def test_a_budget_is_announced_and_ends_with_one_request_for_a_report(
    stage: Callable[..., Stage],
) -> None:
    last = {**say("forbidden", name="act"), "text": "I did ten steps."}
    one = stage([*numbered_steps(10), last], tools=[echo, act], max_turns=10)
    result = one.run()
    assert (result.status, result.exit_code, result.text) == ("limit", 53, "I did ten steps.")
    texts = results(one.sent())
    assert [n for n, text in enumerate(texts, 1) if text != f"step {n}"] == [9, 10]
    assert texts[8].startswith("step 9\n") and "this is the last request" not in texts[8]
    assert texts[9].startswith("step 10\n") and "this is the last request" in texts[9]
    assert len(one.server.requests) == 11
    assert one.server.requests[10]["tools"] == one.server.requests[0]["tools"]
    assert results(one.messages)[10].startswith("not run")
    assert [data for data in one.of("tool_use") if data["name"] == "act"] == []


def test_a_last_report_without_calls_ends_the_same_way(stage: Callable[..., Stage]) -> None:
    one = stage([say("a"), "That is all."], tools=[echo], max_turns=1)
    result = one.run()
    assert (result.status, result.exit_code, result.text) == ("limit", 53, "That is all.")
    assert "this is the last request" in one.sent()[-1]["content"]


def test_an_answer_within_the_budget_is_no_limit(stage: Callable[..., Stage]) -> None:
    one = stage([say("a"), "done"], tools=[echo], max_turns=2)
    assert one.run().exit_code == 0


def test_a_budget_counts_for_each_prompt_anew(stage: Callable[..., Stage]) -> None:
    one = stage([say("a"), "done", say("b"), "done"], tools=[echo], max_turns=2)
    assert [one.run().exit_code, one.run().exit_code] == [0, 0]


def test_no_limit_is_no_limit(stage: Callable[..., Stage]) -> None:
    one = stage([*numbered_steps(120), "done"], tools=[echo], max_turns=0)
    result = one.run()
    assert (result.status, result.turns) == ("done", 121)
    assert results(one.sent()) == [f"step {n}" for n in range(1, 121)]


def test_retries_do_not_count_as_steps(stage: Callable[..., Stage]) -> None:
    again = {"status": 503, "headers": {"Retry-After": "0"}}
    one = stage([again, say("a"), again, again, "done"], tools=[echo], max_turns=2)
    result = one.run()
    assert (result.status, result.turns, len(one.server.requests)) == ("done", 2, 5)


def test_a_person_may_let_the_turn_go_on(stage: Callable[..., Stage]) -> None:
    answers = iter(["y", "n"])
    one = stage(
        [*numbered_steps(4), "report"], tools=[echo], max_turns=2, ask=lambda q: next(answers)
    )
    result = one.run()
    assert (result.status, result.exit_code, result.text) == ("limit", 53, "report")
    assert len(one.server.requests) == 5


def costly(step: dict[str, Any], tokens: int, **more: Any) -> dict[str, Any]:
    """A step that the server says took so many tokens."""
    return {**step, "usage": {"prompt_tokens": tokens, "completion_tokens": 0, **more}}


NEARLY, LAST = "are used; come to an end", "this is the last request"


def over(one: Stage) -> None:
    """At this moment all the time of a prompt is used up."""
    one.agent.budgets.began -= 1_000
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.25)


@pytest.mark.parametrize(
    ("limits", "unit"),
    [
        ({"max_tokens_total": 1000}, "1,000 tokens"),
        ({"max_budget_usd": 0.002, "prices": {"flaky-1": (2.0, 2.0, 8.0)}}, "0.002 USD"),
    ],
)
def test_tokens_and_money_are_budgets_too(
    stage: Callable[..., Stage], limits: dict[str, Any], unit: str
) -> None:
    script = [costly(say(f"step {n}"), 450) for n in (1, 2, 3)]
    one = stage([*script, costly({"text": "report"}, 100)], tools=[echo], **limits)
    result = one.run()
    assert (result.status, result.exit_code, result.text) == ("limit", 53, "report")
    first, second, third = results(one.sent())
    assert (first, second.count(NEARLY), third.count(LAST)) == ("step 1", 1, 1)
    assert unit in second and unit in third and LAST not in second
    again = one.run("more")
    assert (again.status, again.exit_code, len(one.server.requests)) == ("limit", 53, 4)
    assert users(one.messages) == ["go"]


def test_an_answer_that_crosses_a_budget_is_an_answer(stage: Callable[..., Stage]) -> None:
    one = stage([costly({"text": "done"}, 5000)], max_tokens_total=1000)
    assert one.run().exit_code == 0


def test_a_person_gives_as_much_again(stage: Callable[..., Stage]) -> None:
    asked: list[str] = []
    script = [costly(say("a"), 5000), costly(say("b"), 900), "done"]
    one = stage(
        script,
        tools=[echo],
        max_tokens_total=1000,
        ask=lambda question: asked.append(question.text) or "y",
    )
    assert one.run().exit_code == 0
    assert asked == ["5,000 tokens are used. Go on?"]
    assert NEARLY in results(one.messages)[1]


def test_the_end_of_the_time_ends_a_command_and_leaves_a_report(
    stage: Callable[..., Stage],
) -> None:
    before = signal.getsignal(signal.SIGALRM)

    def emit(kind: str, **data: Any) -> None:
        if kind == "tool_output":
            over(one)

    one = stage([run_bash(f"echo early; sleep {NAP}"), "report"], timeout=600.0, emit=emit)
    result = one.run()
    assert (result.status, result.exit_code, result.text) == ("limit", 53, "report")
    (text,) = results(one.sent())
    assert text.startswith("early\n[ended: the time budget") and LAST in text
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    until(lambda: not alive(NAP))


def test_the_end_of_the_time_ends_a_stream_without_an_end(stage: Callable[..., Stage]) -> None:
    def emit(kind: str, **data: Any) -> None:
        if kind == "text" and not users(one.messages)[1:]:
            over(one)

    one = stage([{"fault": "stall"}, "report"], timeout=600.0, emit=emit)
    assert (one.run().exit_code, one.messages[-1]["content"]) == (53, "report")
    assert one.messages[2]["content"].endswith("[cut by the user]")
    assert LAST in users(one.sent())[-1]


def test_a_report_that_does_not_come_ends_the_turn_as_well(stage: Callable[..., Stage]) -> None:
    def emit(kind: str, **data: Any) -> None:
        if kind == "tool_output" or (kind == "text" and one.of("tool_output")):
            over(one)

    script = [{"text": "I look.", **run_bash(f"echo up; sleep {NAP}")}, {"fault": "stall"}]
    one = stage(script, timeout=600.0, emit=emit)
    assert one.agent.budgets.report_seconds == 60
    result = one.run()
    assert (result.status, result.exit_code) == ("limit", 53)
    assert result.text.startswith("The quick")


def test_the_end_of_the_time_is_no_approval(stage: Callable[..., Stage]) -> None:
    def ask(question: Any) -> str:
        if question.name:
            over(one)
            time.sleep(60)
        return "y" if question.name else "n"

    one = stage([write("a"), "report"], mode="ask", ask=ask, timeout=600.0)
    assert (one.run().exit_code, (one.root / "a").exists()) == (53, False)
    assert results(one.messages)[0].startswith("not run: the budget is used up")


def test_in_another_thread_the_time_is_looked_at_between_steps(
    stage: Callable[..., Stage],
) -> None:
    @tool(needs="read")
    def wait() -> str:
        """Take all the time."""
        one.agent.budgets.began -= 1_000
        return "waited"

    script = [{"call": "wait", "arguments": {}}, "report"]
    one = stage(script, tools=[wait], timeout=600.0)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(one.run()))
    thread.start()
    thread.join()
    assert (found[0].exit_code, found[0].text) == (53, "report")


def test_without_a_price_a_budget_of_money_is_refused(stage: Callable[..., Stage]) -> None:
    with pytest.raises(UsageError, match=r'\[prices\."flaky-1"\]'):
        stage(["never"], max_budget_usd=1.0)
    one = stage(["yes"], max_budget_usd=1.0, prices={"flaky-1": (1.0, 1.0, 1.0)})
    with pytest.raises(UsageError, match=r'\[prices\."other"\]'):
        one.agent.set_model("other")
    assert (one.agent.client.model, one.run().text) == ("flaky-1", "yes")


@pytest.mark.parametrize(
    ("told", "prices", "cost"),
    [
        ({"cost": 0.25}, {"flaky-1": (2.0, 1.0, 8.0)}, 0.25),
        ({"prompt_tokens_details": {"cached_tokens": 600}}, {"flaky-1": (2.0, 1.0, 8.0)}, 0.0014),
        ({}, {"other": (2.0, 1.0, 8.0)}, None),
        ({"cost": "0.25"}, {}, None),
        ({"cost": -1}, {}, None),
    ],
)
def test_what_a_reply_costs_is_told_or_reckoned_or_unpriced(
    stage: Callable[..., Stage], told: dict[str, Any], prices: dict[str, Any], cost: Any
) -> None:
    one = stage([costly({"text": "done"}, 1000, **told)], prices=prices)
    assert (one.run().usage["cost_usd"], one.of("usage")[0]["cost_usd"]) == (cost, cost)
    total = one.saved()["usage"]
    assert (total.get("cost_usd"), total.get("unpriced")) == (cost, None if cost else 1)
    assert one.agent.figures(total).endswith(f"${cost:.4f}" if cost else "; unpriced")


def test_a_server_that_tells_no_tokens_gets_estimates_that_are_marked(
    stage: Callable[..., Stage],
) -> None:
    one = stage([{"text": "done", "usage": {"prompt_tokens": 0, "completion_tokens": 0}}])
    assert one.run().usage["prompt_tokens"] > 500
    assert re.fullmatch(
        r"tokens: ~[\d,]+ in \(0 % cached\), ~\d+ out; window ~1 %; unpriced",
        one.agent.figures(one.agent.usage),
    )


FIX = run_bash("touch ok")


@pytest.mark.parametrize(
    ("script", "check", "more", "expected"),
    [
        pytest.param(["done"], "true", {}, ("done", 0, "done", 1), id="passes"),
        pytest.param(["no", FIX, "yes"], "test -e ok", {}, ("done", 0, "yes", 3), id="mended"),
        pytest.param(list("abcdefg"), "nosuch", {}, ("check_failed", 3, "f", 6), id="idle"),
        pytest.param([FIX, "r"], "test -e ok", {"max_turns": 1}, ("done", 0, "r", 2), id="limit"),
        pytest.param(
            [FIX, "r"], "false", {"max_turns": 1}, ("check_failed", 3, "r", 2), id="limit, fails"
        ),
        pytest.param(
            ["a", "b"], "false", {"max_turns": 1}, ("check_failed", 3, "a", 1), id="no budget left"
        ),
        pytest.param([say("x")] * 9, "true", {}, ("done", 0, "", 5), id="loop"),
        pytest.param([{"status": 401}], "true", {}, ("error", 41, "", 1), id="key refused"),
        pytest.param([write(".git/hooks/x"), "d"], "true", {}, ("done", 0, "d", 2), id="refused"),
    ],
)
def test_the_check_has_the_last_word(
    stage: Callable[..., Stage], script: list[Any], check: str, more: Any, expected: Any
) -> None:
    one = stage(script, check=check, tools=[echo], **more)
    result = one.run()
    requests = len(one.server.requests)
    assert (result.status, result.exit_code, result.text, requests) == expected


def test_the_model_reads_what_the_check_printed(stage: Callable[..., Stage]) -> None:
    one = stage(["a", FIX, "b"], check="test -e ok || { seq 9999; echo {end}; exit 7; }")
    assert one.run().exit_code == 0
    said = users(one.messages)[1]
    assert said.endswith("\n{end}\n[exit code 7]") and "not shown" in said and len(said) < 20_000
    assert {event["id"] for event in one.of("tool_output")} == {"check"}


def test_ctrl_c_in_the_check_ends_it_and_all_that_it_started(stage: Callable[..., Stage]) -> None:
    def emit(kind: str, **data: Any) -> None:
        if kind == "tool_output":
            os.kill(os.getpid(), signal.SIGINT)

    one = stage(["done"], check=f"sleep {NAP} & echo up; sleep {NAP}", emit=emit)
    assert one.run().exit_code == 130
    until(lambda: not alive(NAP))


def test_equal_calls_with_equal_results_get_a_note_and_then_an_end(
    stage: Callable[..., Stage],
) -> None:
    one = stage([say("same")] * 9, tools=[echo])
    result = one.run()
    texts = results(one.messages)
    assert (result.status, result.exit_code) == ("error", 1)
    assert (texts[:2], texts[3:]) == (["same", "same"], ["same", "same"])
    assert texts[2].startswith("same\n[")
    assert len(one.server.requests) == 5
    assert "five" in one.of("notice")[-1]["text"] or "5" in one.of("notice")[-1]["text"]


def test_equal_calls_in_one_reply_are_a_loop_too_once_the_note_was_read(
    stage: Callable[..., Stage],
) -> None:
    one = stage([say(*["same"] * 7), say("same", "same")], tools=[echo])
    assert one.run().exit_code == 1
    texts = results(one.messages)
    assert [text.split("\n")[0] for text in texts[:8]] == ["same"] * 8
    assert [text.startswith("same\n[note") for text in texts].index(True) == 2
    assert [text[:7] for text in texts[8:]] == ["not run"]


def test_equal_failures_are_a_loop_too(stage: Callable[..., Stage]) -> None:
    one = stage([{"call": "nothing", "arguments": {}}] * 9)
    assert one.run().exit_code == 1
    assert len(one.server.requests) == 5


def test_polling_with_changing_results_is_no_loop(stage: Callable[..., Stage]) -> None:
    count = itertools.count(1)

    @tool(needs="read")
    def poll() -> str:
        """Poll."""
        return f"{next(count)} %"

    one = stage([{"call": "poll", "arguments": {}}] * 8 + ["done"], tools=[poll])
    assert one.run().status == "done"
    assert results(one.sent()) == [f"{n} %" for n in range(1, 9)]


def test_calls_that_alternate_are_no_loop(stage: Callable[..., Stage]) -> None:
    one = stage([say("a"), say("b")] * 4 + ["done"], tools=[echo])
    assert one.run().status == "done"
    assert results(one.sent()) == ["a", "b"] * 4


def test_a_loop_does_not_reach_over_prompts(stage: Callable[..., Stage]) -> None:
    one = stage([say("a"), say("a"), "done"] * 3, tools=[echo])
    assert [one.run().status for _ in range(3)] == ["done"] * 3
    assert results(one.messages) == ["a"] * 6


@tool(needs="read")
def broken(number: int) -> str:
    """Fail.

    number: anything
    """
    raise ValueError("boom" if number >= 0 else f"boom {number}")


def failing(*numbers: int) -> dict[str, Any]:
    """One reply with a call that fails, for each number."""
    return {"calls": [{"call": "broken", "arguments": {"number": n}} for n in numbers]}


def test_the_same_failure_with_other_arguments_is_noted_and_then_ends_the_turn(
    stage: Callable[..., Stage],
) -> None:
    one = stage([failing(n) for n in range(20)], tools=[broken])
    result = one.run()
    texts = results(one.messages)
    assert (result.status, result.exit_code, len(texts)) == ("error", 1, 10)
    assert [at for at, text in enumerate(texts) if "[note" in text] == [7]


def test_a_row_of_failures_does_not_end_before_the_note_was_read(
    stage: Callable[..., Stage],
) -> None:
    one = stage(
        [failing(*range(12)), say("other"), failing(*range(12)), "done"], tools=[echo, broken]
    )
    assert one.run().text == "done"
    two = stage([failing(*range(12)), failing(1, 2), "done"], tools=[broken])
    assert (two.run().exit_code, len(two.server.requests)) == (1, 2)


def test_denials_do_not_count_and_do_not_break_a_row(stage: Callable[..., Stage]) -> None:
    denied = [write(f"f{n}") for n in range(12)]
    one = stage([*denied, "done"], mode="plan")
    assert one.run().status == "done"
    mixed = [step for n in range(10) for step in (failing(n), write(f"f{n}"))]
    two = stage([*mixed, "done"], tools=[broken], mode="plan")
    assert two.run().exit_code == 1


@pytest.mark.parametrize(
    "between", [say("fine"), failing(-1)], ids=["a success", "another failure"]
)
def test_what_comes_between_breaks_a_row_of_failures(
    stage: Callable[..., Stage], between: dict[str, Any]
) -> None:
    one = stage(
        [*map(failing, range(7)), between, *map(failing, range(7)), "done"], tools=[echo, broken]
    )
    assert one.run().status == "done"


@pytest.mark.parametrize(
    "reply",
    [
        {"text": "So:\n" + "the same\n" * 2000},
        {"text": "the same\n\n" * 250, "call": "act", "arguments": {"text": "x"}},
        {"reasoning": "wait.\n" * 2000, "text": "hm"},
    ],
    ids=["lines", "a call behind them", "reasoning"],
)
def test_a_reply_that_goes_on_without_end_is_cut_told_and_then_ends_the_turn(
    stage: Callable[..., Stage], reply: dict[str, Any]
) -> None:
    one = stage([reply, "fine"], tools=[act])
    assert one.run().text == "fine"
    assert (one.of("tool_use"), len(users(one.messages))) == ([], 2)
    assert max(len(text) for text in map(str, one.messages[1:])) < 400
    two = stage([reply, reply, "never"], tools=[act])
    assert (two.run().exit_code, len(two.server.requests)) == (1, 2)


SIMILAR = {
    "table": "".join(f"| {n} | 0 | 0 |\n" for n in range(800)),
    "diff": "".join(f"-old {n}\n+new {n}\n" for n in range(400)),
    "rulers": f"{'-' * 900}\ntext\n{'=' * 2000}\n",
    "199 lines": "the same\n" * 199,
    "many words": "word " * 12_000,
}


@pytest.mark.parametrize("text", SIMILAR.values(), ids=SIMILAR)
def test_lines_that_are_only_similar_are_an_answer(stage: Callable[..., Stage], text: str) -> None:
    assert stage([text]).run().text == text


ANNOUNCEMENTS = [
    "I will do it now.",
    "I will now run the tests.",
    "Let me look at the config first.",
    "Let me read `agent.py` to understand the structure:",
    "I see the problem. Let me fix that.",
    "I'm now running the tests...",
    "Running the tests now.",
    "Checking the logs...",
    "Now let me run the test suite to verify that it passes.",
    "First, I'll examine the project structure.",
    "Sure! I'll add the function right away.",
    "I need to look at more files. Let me search for the usages:",
    "I fixed the first bug. Now I'll fix the second one.",
    "Let me run this:\n```bash\npytest -q\n```",
    "I will proceed with the implementation. This may take a moment.",
    "Let me check if the file exists.",
    "**Let me run the tests.**",
    "I’ll check that for you.",
    "Now I need to update the tests:",
    "Here is the corrected version of it:",
    "Ich werde jetzt die Tests ausführen.",
    "Ich schaue mir jetzt die Datei an.",
    "Je vais maintenant exécuter les tests.",
    "Voy a ejecutar las pruebas ahora.",
    "Vou executar os testes agora.",
    "Ora eseguo i test.",
    "我现在来运行测试。",
    "これからテストを実行します。",
    "Сейчас я запущу тесты.",
    "지금 테스트를 실행하겠습니다.",
    "Why does it fail? Let me check the log.",
    "I'll look at your code now. 🚀",
]
ANSWERS = [
    "4",
    "The test passes now.",
    "I fixed the bug in `mean()`: the divisor was off by one. All 12 tests pass.",
    "I fixed the typo. Let me know if you want me to run the tests as well.",
    "Should I delete the old file? I will wait for your answer.",
    "I will not change the other files.",
    "I'll leave the configuration as it is.",
    "Understood. I will use tabs from now on.",
    "I will remember that.",
    "The build needs network access, which was denied. If you permit it, I will run it again.",
    "Once you have set the key, I can run the integration tests.",
    "I could not run the tests: pytest is not installed. You will need to install it first.",
    "To run it yourself:\n```bash\npython app.py\n```",
    "You can start it with:\n```\nmake run\n```",
    "Here is the function:\n```python\ndef f(x):\n    return x + 1\n```",
    "1. Read the file\n2. Change the constant\n3. Run the tests",
    "I would look at the cache first.",
    "Nothing to do now.",
    "Everything works now.",
    "Running the server works now.",
    "Running `make test` takes about a minute.",
    'The comment says "I will fix this later".',
    'The log says: "Let me check the file".',
    "I'll stop here because the budget is used up.",
    "Which of the two do you want?",
    "The server is running on port 8000.",
    "I have checked the logs and will report only what matters: there were 3 errors.",
    "The plan is to move the parser into its own module; nothing was changed yet.",
    "First, the cache is filled. Then the rows are read.",
    "Der Fehler ist behoben, alle Tests laufen jetzt durch.",
    "Ich habe die Datei geändert und die Tests ausgeführt.",
    "Ich werde künftig Tabs verwenden.",
    "J'ai corrigé le bug ; tous les tests passent.",
    "已经修复,测试全部通过。",
    "修正しました。テストはすべて通ります。",
    "Готово: ошибка исправлена, тесты проходят.",
    "I'll let you know when it is finished.",
    "Before I go on I need your decision: keep the old API or drop it.",
    "With this change the agent will run the tests by itself.",
    "If the tests fail again, I will look into the cache.",
    "I'll make sure to use tabs.",
    "This function will read the file and then update the table.",
    "It will now check the input first.",
    "services:\n  web:",
    "The tests pass and I will now consider this finished.",
    "My name is agent; I will read, search, edit and run what your task needs.",
    "I'm running on Linux as root.",
    "I can run it, but I'd rather not: it deletes files.",
]


def test_an_announcement_at_the_end_is_told_from_an_answer() -> None:
    assert [text for text in ANNOUNCEMENTS if not promises(text)] == []
    assert [text for text in ANSWERS if promises(text)] == []


@pytest.mark.parametrize("ask, mode", [(None, "auto"), (None, "plan"), (lambda q: "y", "auto")])
def test_an_announcement_without_a_call_is_asked_for_once_where_nobody_answers(
    stage: Callable[..., Stage], ask: Any, mode: str
) -> None:
    one = stage(["I will do it now.", say("a"), "I'll fix it now.", "done"], ask=ask, mode=mode)
    alone = ask is None and mode == "auto"
    assert one.run().text == ("done" if alone else "I will do it now.")
    assert len(users(one.messages)) == (3 if alone else 1)


def test_two_announcements_in_a_row_end_the_turn(stage: Callable[..., Stage]) -> None:
    one = stage(["I will do it now.", "Let me do it now.", "never"])
    result = one.run()
    assert (result.exit_code, result.text, len(one.server.requests)) == (1, "Let me do it now.", 2)


def test_what_asyncio_cancels_with_is_an_error_of_the_tool(stage: Callable[..., Stage]) -> None:
    @tool(needs="read")
    def cancelled() -> str:
        """Cancel."""
        raise asyncio.CancelledError

    one = stage([{"call": "cancelled", "arguments": {}}, "done"], tools=[cancelled])
    assert one.run().text == "done"
    assert results(one.messages)[0].startswith("error: CancelledError")


# -- replies that are no answer


@pytest.mark.parametrize(
    "empty", [{"fault": "empty_reply"}, {"fault": "only_done"}, {"reasoning": "Hm."}]
)
def test_an_empty_reply_is_asked_again_once_and_then_reported(
    stage: Callable[..., Stage], empty: dict[str, Any]
) -> None:
    one = stage([empty, empty])
    result = one.run()
    assert (result.status, result.exit_code, len(one.server.requests)) == ("error", 1, 2)
    assert [message["role"] for message in one.messages] == ["system", "user"]
    assert "empty" in one.of("notice")[-1]["text"]


@pytest.mark.parametrize("calls, asked", [(0, 0), (1, 1)])
def test_an_empty_reply_may_be_followed_by_an_answer(
    stage: Callable[..., Stage], calls: int, asked: int
) -> None:
    one = stage([*[say("a")] * calls, {"fault": "empty_reply"}, "fine"], tools=[echo])
    assert one.run().text == "fine"
    assert one.sent(calls) == one.sent(calls + 1)[: len(one.sent(calls))]
    assert len(users(one.sent())) == 1 + asked  # behind a result the model is told


def test_a_second_empty_reply_behind_a_result_ends_the_turn(stage: Callable[..., Stage]) -> None:
    one = stage([say("a"), {"fault": "empty_reply"}, "\n ", "never"], tools=[echo])
    result = one.run()
    assert (result.status, result.exit_code, len(one.server.requests)) == ("error", 1, 3)


@pytest.mark.parametrize("fault", ["length", "length_whole_call"])
def test_a_call_that_was_cut_is_not_run_and_the_model_is_told(
    stage: Callable[..., Stage], fault: str
) -> None:
    cut = {"fault": fault, "text": "I act.", "call": "act", "arguments": {"text": "all of it"}}
    one = stage([cut, "In parts, then."], tools=[act])
    assert one.run().text == "In parts, then."
    assert one.of("tool_use") == []
    assert one.sent()[-1]["role"] == "user" and "cut" in one.sent()[-1]["content"]


def test_replies_that_are_cut_again_and_again_end_the_turn(stage: Callable[..., Stage]) -> None:
    cut = {"fault": "length", "call": "act", "arguments": {"text": "all of it"}}
    one = stage([cut] * 9, tools=[act])
    result = one.run()
    assert (result.status, result.exit_code) == ("error", 1)
    assert len(one.server.requests) < 6


def test_a_content_filter_ends_the_turn_at_once(stage: Callable[..., Stage]) -> None:
    one = stage([{"fault": "content_filter"}])
    result = one.run()
    assert (result.status, result.exit_code, len(one.server.requests)) == ("error", 1, 1)
    assert "content filter" in one.of("notice")[-1]["text"]


def test_a_call_that_was_announced_and_did_not_come_is_asked_for(
    stage: Callable[..., Stage],
) -> None:
    one = stage(
        [{"fault": "announced_missing_call", "text": "I look."}, say("a"), "done"], tools=[echo]
    )
    assert one.run().text == "done"
    assert [m["role"] for m in one.sent(1)] == ["system", "user", "assistant", "user"]


def test_a_model_that_only_announces_calls_does_not_go_on_for_ever(
    stage: Callable[..., Stage],
) -> None:
    one = stage([{"fault": "announced_missing_call", "text": "I look."}] * 20)
    one.run()
    assert len(one.server.requests) <= 5


@pytest.mark.parametrize("calls", [0, 1])
def test_an_empty_reply_at_the_end_of_the_budget_changes_nothing_that_was_sent(
    stage: Callable[..., Stage], calls: int
) -> None:
    script = [*numbered_steps(calls), {"fault": "empty_reply"}, say("x"), "report"]
    one = stage(script, tools=[echo], max_turns=calls + 1)
    assert one.run().text == "report"
    requests = one.server.requests
    assert len(requests) == calls + 3
    for before, after in itertools.pairwise(requests):
        assert after["messages"][: len(before["messages"])] == before["messages"]


# -- compaction


BIG = "word " * 800  # 4,000 characters


def long_task(steps: int) -> Callable[[Any], Any]:
    """A model that calls a tool in so many steps; asked without tools it writes a note."""
    count = itertools.count(1)

    def model(request: Any) -> Any:
        if "tools" not in request:
            return "NOTE: read a.py, changed nothing."
        n = next(count)
        return "done" if n > steps else say(f"{n:03} {BIG}", f"{n:03}")

    return model


def compactions(one: Stage) -> list[Any]:
    """The requests for a note."""
    return [request for request in one.server.requests if "tools" not in request]


def test_a_long_turn_is_compacted_before_the_request_that_would_be_too_large(
    stage: Callable[..., Stage],
) -> None:
    one = stage(itertools.repeat(long_task(12)), tools=[echo], compact_at=20_000.0)
    result = one.run("the task, word for word")
    assert (result.status, result.text) == ("done", "done")
    sizes = [len(r.raw) for r in one.server.requests if "tools" in r]
    fixed = len(json.dumps(one.server.requests[0]["tools"])) + len(one.messages[0]["content"])
    assert len(compactions(one)) >= 2
    assert max(sizes) < 20_000 + fixed + 10_000
    assert len(one.of("compacted")) == len(compactions(one))


def test_after_a_compaction_the_task_and_the_last_step_stand_word_for_word(
    stage: Callable[..., Stage],
) -> None:
    one = stage(itertools.repeat(long_task(3)), tools=[echo], compact_at=25_000.0)
    one.run("the task, word for word")
    before, note, after = (one.sent(at) for at in (2, 3, 4))
    assert (len(compactions(one)), note[1]["content"] != "") == (1, True)
    assert after[0] == before[0]
    assert "NOTE: read a.py, changed nothing." in after[1]["content"]
    assert "the task, word for word" in "".join(users(after))
    assert after[2]["role"] == "assistant"
    assert after[-3:] == without_private(one.messages[-4:-1])
    assert results(after)[-2:] == [f"003 {BIG}", "003"]


def test_a_compaction_neither_loses_nor_changes_a_message(stage: Callable[..., Stage]) -> None:
    one = stage(itertools.repeat(long_task(3)), tools=[echo], compact_at=25_000.0)
    one.run("the task")
    (path,) = (one.root / ".agent" / "sessions").glob("*.archive.jsonl")
    archived = [json.loads(line) for line in path.read_text().splitlines()]
    whole = [*archived, *one.messages[2:]]
    assert [message["role"] for message in whole] == [
        "user",
        *["assistant", "tool", "tool"] * 3,
        "assistant",
    ]
    assert results(whole) == [f"001 {BIG}", "001", f"002 {BIG}", "002", f"003 {BIG}", "003"]
    assert without_private(whole)[: len(one.sent(2)) - 1] == one.sent(2)[1:]


def test_the_note_is_asked_for_with_the_old_messages_as_text_and_without_tools(
    stage: Callable[..., Stage],
) -> None:
    one = stage(itertools.repeat(long_task(8)), tools=[echo], compact_at=20_000.0)
    one.run("the task, word for word")
    request = compactions(one)[0]
    assert [message["role"] for message in request["messages"]] == ["system", "user"]
    assert "tool_choice" not in request and "tools" not in request
    text = request["messages"][1]["content"]
    assert "the task, word for word" in text and "001 word word" in text and "echo" in text


def test_what_a_compaction_removes_is_kept_in_the_archive(stage: Callable[..., Stage]) -> None:
    one = stage(itertools.repeat(long_task(8)), tools=[echo], compact_at=20_000.0)
    one.run("the task")
    (path,) = (one.root / ".agent" / "sessions").glob("*.archive.jsonl")
    archived = [json.loads(line) for line in path.read_text().splitlines()]
    texts = {text for text in results(archived) + results(one.messages) if len(text) > 100}
    assert {text[:3] for text in texts} == {f"{n:03}" for n in range(1, 9)}
    assert archived[0]["content"] == "the task"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_compaction_is_reported_with_its_figures(stage: Callable[..., Stage]) -> None:
    one = stage(itertools.repeat(long_task(8)), tools=[echo], compact_at=20_000.0)
    one.run()
    event = one.of("compacted")[0]
    assert set(event) == set(FIELDS["compacted"].split())
    assert (one.root / event["archive"]).read_text().startswith('{"role":"user"')
    assert event["messages_after"] < event["messages_before"]
    assert event["tokens_after"] < event["tokens_before"]


def test_a_compaction_may_be_a_share_of_the_window(stage: Callable[..., Stage]) -> None:
    one = stage(itertools.repeat(long_task(10)), tools=[echo], compact_at=0.5, context=16_000)
    one.run()
    assert len(compactions(one)) >= 1
    assert max(len(r.raw) for r in one.server.requests) / 4 < 16_000


@pytest.mark.parametrize(
    "options", [{"compact_at": 0.0, "context": 1000}, {"compact_at": 1e9}], ids=["off", "roomy"]
)
def test_nothing_is_compacted_without_need(
    stage: Callable[..., Stage], options: dict[str, Any]
) -> None:
    one = stage(itertools.repeat(long_task(8)), tools=[echo], **options)
    one.run()
    assert (compactions(one), one.of("compacted")) == ([], [])


TEMPLATE = "## Decisions\n- none\n\n**Files**\n\n[list them here]\nOpen work: N/A"


@pytest.mark.parametrize(
    "note",
    [
        pytest.param({"status": 400, "body": {"error": {"message": "no notes"}}}, id="fails"),
        pytest.param({"status": 401, "body": {"error": {"message": "no notes"}}}, id="no key"),
        pytest.param({"fault": "empty_reply"}, id="empty"),
        pytest.param(say("x"), id="calls a tool"),
        pytest.param({"text": "half a no", "finish_reason": "length"}, id="cut"),
        pytest.param(TEMPLATE, id="only the template"),
        pytest.param("I'm sorry, but I can't help with that.", id="refused"),
        pytest.param("word " * 4000, id="longer than what it replaces"),
    ],
)
def test_when_the_model_writes_no_note_the_older_part_is_cut_by_rule(
    stage: Callable[..., Stage], note: Any
) -> None:
    work = long_task(8)

    def model(request: Any) -> Any:
        return work(request) if "tools" in request else note

    one = stage(itertools.repeat(model), tools=[echo], compact_at=20_000.0)
    assert one.run("the task").status == "done"
    assert "the task" in one.messages[1]["content"] and len(one.of("compacted")) > 1
    assert max(len(r.raw) for r in one.server.requests) < 60_000
    kept = [*one.agent.session.archived(), *one.messages]
    assert {t[:3] for t in results(kept) if len(t) > 100} == {f"{n:03}" for n in range(1, 9)}


def test_a_threshold_below_the_fixed_part_does_not_ask_for_notes_for_ever(
    stage: Callable[..., Stage],
) -> None:
    one = stage(itertools.repeat(lambda r: "hello" if "tools" in r else "NOTE"), compact_at=100.0)
    assert [one.run("hi").text for _ in range(4)] == ["hello"] * 4
    assert len(compactions(one)) <= 4


@pytest.mark.parametrize("turns", [1, 2, 4])
def test_a_compaction_that_is_reported_has_made_the_conversation_smaller(
    stage: Callable[..., Stage], turns: int
) -> None:
    one = stage(itertools.repeat(long_task(1)), tools=[echo], compact_at=0.0)
    for n in range(turns):
        one.run(f"prompt {n}")
    one.agent.compact()
    assert [e for e in one.of("compacted") if e["tokens_after"] >= e["tokens_before"]] == []


def test_the_text_of_a_note_is_not_shown_as_an_answer(stage: Callable[..., Stage]) -> None:
    one = stage(itertools.repeat(long_task(8)), tools=[echo], compact_at=20_000.0)
    one.run()
    assert "".join(event["text"] for event in one.of("text")) == "done"


def test_ctrl_c_during_a_note_changes_nothing(stage: Callable[..., Stage]) -> None:
    work = long_task(8)

    def model(request: Any) -> Any:
        if "tools" in request:
            return work(request)
        interrupt()
        return {"text": "NOTE", "hold_after": 1}

    one = stage(itertools.repeat(model), tools=[echo], compact_at=20_000.0)
    assert one.run("the task").exit_code == 130
    assert users(one.messages) == ["the task"]
    assert one.messages[-1]["role"] == "tool"
    assert one.of("compacted") == []


def test_a_conversation_is_compacted_when_the_user_says_so(stage: Callable[..., Stage]) -> None:
    script = [say(f"a {BIG}"), "one", say(f"b {BIG}"), "two", say(f"c {BIG}"), "three"]
    one = stage([*script, "NOTE", "four"], tools=[echo])
    for n in range(3):
        one.run(f"prompt {n}")
    one.agent.compact("the colour of the sky")
    assert "the colour of the sky" in one.sent()[1]["content"]
    assert one.run("last prompt").text == "four"
    assert "NOTE" in one.sent()[1]["content"]
    assert [text[:1] for text in results(one.sent())] in (["b", "c"], ["c"])


def test_the_notes_of_the_project_stay_after_a_compaction(stage: Callable[..., Stage]) -> None:
    work = long_task(8)
    (Path(stage([]).root) / "AGENTS.md").write_text("Always use tabs.\n")
    one = stage(itertools.repeat(work), tools=[echo], compact_at=20_000.0)
    one.run()
    assert len(compactions(one)) >= 1
    assert "Always use tabs." in one.sent()[0]["content"]


def talk_of(rounds: int) -> list[dict[str, Any]]:
    """So many questions with long answers."""
    texts = [text for n in range(rounds) for text in (f"question {n}", f"a{n} {BIG}")]
    roles = itertools.cycle(["user", "assistant"])
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def silent(request: Any) -> dict[str, Any]:
    """A note that does not come to its end."""
    return {"text": "NOTE", "hold_after": 1}


def compacting(stage: Callable[..., Stage], note: Any, steps: int = 8, **more: Any) -> Stage:
    """A stage whose model works, and answers a request for a note by what `note` makes of it."""
    work = long_task(steps)

    def model(request: Any) -> Any:
        return work(request) if "tools" in request else note(request)

    return stage(itertools.repeat(model), tools=[echo], **{"compact_at": 20_000.0, **more})


def note_request(request: Any) -> str:
    """What a request for a note asks."""
    return str(request["messages"][1]["content"])


@pytest.mark.long
def test_a_note_that_takes_too_long_is_asked_for_once_more_with_half_the_text(
    stage: Callable[..., Stage],
) -> None:
    one = compacting(stage, silent, steps=3)
    one.agent.summary_seconds = 2.0
    assert one.run("the task").status == "done"
    first, second = map(note_request, compactions(one)[:2])
    assert len(second) < len(first) * 0.75
    assert "bare facts" in one.messages[1]["content"] and len(one.of("compacted")) == 1


def test_after_a_note_that_uses_the_budget_up_comes_the_last_request(
    stage: Callable[..., Stage],
) -> None:
    dear = {"text": "NOTE", "usage": {"prompt_tokens": 10**7, "completion_tokens": 1}}
    one = compacting(stage, lambda _: dear, max_tokens_total=10**6)
    assert one.run("the task").exit_code == 53
    noted = ["tools" not in request for request in one.server.requests].index(True)
    last = one.server.requests[noted + 1 :]
    assert ["this is the last request" in str(each["messages"]) for each in last] == [True]


def test_a_text_larger_than_the_window_is_summed_up_in_pieces(stage: Callable[..., Stage]) -> None:
    notes = (f"NOTE {n}" for n in itertools.count(1))
    one = compacting(stage, lambda _: next(notes), compact_at=0.0, context=9000)
    one.agent.transcript.replace([*one.messages, *talk_of(30)])
    one.agent.compact("the colour")
    asked = [note_request(request) for request in compactions(one)]
    assert 1 < len(asked) <= 8 and max(map(len, asked)) < 9000 * 4
    assert all("Keep above all: the colour" in text for text in asked)
    assert ["Your note so far" in text for text in asked] == [n > 0 for n in range(len(asked))]
    assert f"NOTE {len(asked)}" in one.messages[1]["content"]


def test_what_the_user_said_stands_word_for_word_after_three_compactions(
    stage: Callable[..., Stage],
) -> None:
    one = compacting(stage, lambda _: "NOTE", compact_at=0.0)
    for n in range(3):
        one.agent.transcript.replace([*one.messages, *talk_of(4)])
        one.run(f"prompt {n}\nwith a second line")
        one.agent.compact()
    whole = "\n".join(users(one.messages))
    assert all(f"prompt {n}\nwith a second line" in whole for n in range(3))
    assert whole.count("question 0") == 3 and whole.count("[Hand-over note") == 1


def test_old_results_are_clipped_before_a_note_is_asked_for(stage: Callable[..., Stage]) -> None:
    steps = [run_bash(f"seq {n} 3000") for n in range(1, 8)]
    steps += [run_bash(f"echo {n}") for n in range(3)]
    one = stage([*steps, "done"], compact_at=110_000.0)
    one.run("the task")
    [event] = one.of("compacted")
    assert compactions(one) == [] and event["messages_before"] == event["messages_after"]
    texts = results(one.messages)
    assert all("recall(query)" in text and len(text) <= 1000 for text in texts[:3])
    whole = results(list(one.agent.session.archived()))
    assert len(whole) >= 3 and min(map(len, whole)) > 10_000
    assert one.agent.session.header["turns"] == [1]


def test_one_giant_batch_of_results_is_clipped_and_sent_again(stage: Callable[..., Stage]) -> None:
    calls = {"calls": [{"name": "bash", "arguments": {"command": f"seq {n} 9999"}} for n in "123"]}
    overflow = {"fault": "context_overflow"}
    one = stage([calls, overflow, "done"], compact_at=0.0)
    assert one.run("the task").text == "done"
    assert max(map(len, results(one.sent()))) < 10_000 and users(one.sent()) == ["the task"]


def test_a_fixed_part_over_the_window_ends_with_figures(stage: Callable[..., Stage]) -> None:
    Path(stage([]).root, "AGENTS.md").write_text("rule\n" * 3000)
    one = stage(itertools.repeat({"fault": "context_overflow"}), context=4000)
    result = one.run("hi")
    assert (result.status, result.exit_code, len(one.server.requests)) == ("error", 1, 1)
    last = one.of("notice")[-1]["text"]
    assert all(word in last for word in ("4000", "AGENTS.md: 3", "--context", "--tools"))


@pytest.mark.parametrize(("counted", "times"), [(7000, 1), (0, 0), (3, 0), (10**7, 0)])
def test_a_count_of_the_server_decides_when_it_can_be_true(
    stage: Callable[..., Stage], counted: int, times: int
) -> None:
    told = say("a") | {"usage": {"prompt_tokens": counted}}
    one = stage([told, *["NOTE"] * times, "done"], tools=[echo], context=8000)
    one.agent.transcript.replace([*one.messages, *talk_of(3)])
    assert one.run().text == "done"
    assert len(one.of("compacted")) == times


def test_the_messages_of_a_request_begin_with_those_of_the_one_before(
    stage: Callable[..., Stage],
) -> None:
    steps = [say(f"{n}", name="act" if n % 3 else "echo") for n in range(60)]
    one = stage([*steps, "done"], tools=[echo, act])
    assert one.run().text == "done"
    for before, after in itertools.pairwise(one.server.requests):
        head = before.raw[: before.raw.rindex(b"]}")]
        assert after.raw.startswith(head)
    assert (one.agent.client.differs, one.agent.client.cache_fell) == (None, "")


def cached(text: str, tokens: int) -> dict[str, Any]:
    """A reply whose prompt was cached so far."""
    return {"text": text, "usage": {"prompt_tokens_details": {"cached_tokens": tokens}}}


def test_the_first_message_that_differs_is_named_when_the_cache_is_lost(
    stage: Callable[..., Stage],
) -> None:
    one = stage([cached("a", 900), cached("b", 0), cached("c", 900), cached("d", 0)])
    one.run("one")
    one.run("two")
    assert one.agent.client.cache_fell == "nothing differs: the server dropped its cache"
    one.run("three")
    one.agent.transcript.messages[2] = {"role": "assistant", "content": "other"}
    one.run("four")
    fell = one.agent.client.cache_fell
    assert fell == "message 2 (assistant) differs from the request before"


def test_neither_a_summary_nor_another_model_is_taken_for_the_request_before(
    stage: Callable[..., Stage],
) -> None:
    one = stage([cached("a", 900), "NOTE", cached("b", 0), cached("c", 900), cached("d", 0)])
    one.agent.transcript.replace([*one.messages, *talk_of(8)])
    one.run("one")
    assert one.agent.compact() is True
    one.run("two")
    assert one.agent.client.cache_fell == "message 1 (user) differs from the request before"
    one.run("three")
    one.agent.client.cache_fell = ""
    one.agent.set_model("flaky-2")
    one.run("four")
    assert one.agent.client.cache_fell == ""


def test_recall_finds_what_fits_best_in_what_was_removed(stage: Callable[..., Stage]) -> None:
    one = stage(["NOTE"], tools=[echo], compact_at=0.0)
    recall = one.agent.tools["recall"].function
    assert "nothing was removed" in recall("zebra")
    odd = {"role": "assistant", "content": f"The Zebra is in stripes.py:12.\n{BIG}"}
    one.agent.transcript.replace([*one.messages, *talk_of(3), odd, *talk_of(8)])
    one.agent.compact()
    assert recall("ZEBRA stripes.py").startswith("[message 7, assistant]\nThe Zebra is in")
    assert "no passage" in recall("giraffe") and "not shown" not in recall("word")


NOTES = ["NOTE a.py:12", {"status": 400}, {"fault": "empty_reply"}, say("x"), TEMPLATE]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_the_turns_end_and_the_task_survives(
    stage: Callable[..., Stage], seed: int
) -> None:
    chance = random.Random(seed)
    window = chance.choice([6000, 12_000])
    refusal = f"maximum context length is {window} tokens"

    def model(request: Any) -> Any:
        if len(request.raw) // 4 > window:
            return {"status": 400, "body": {"error": {"message": refusal}}}
        if "tools" not in request:
            return chance.choice(NOTES)
        if chance.random() < 0.2:
            return "done"
        sizes = chance.choices([5, 900, 15_000], k=chance.choice([1, 1, 6]))
        steps = [{"command": f"head -c {n} /dev/zero | tr '\\0' {len(sizes)}"} for n in sizes]
        return {"calls": [{"name": "bash", "arguments": each} for each in steps]}

    told = {"context": chance.choice([0, window]), "compact_at": chance.choice([0.0, 0.75, 9e3])}
    one = stage(itertools.repeat(model), max_turns=12, **told)
    for n in range(3):
        task, before = f"task {n}\n" + "word " * 200, len(one.server.requests)
        assert one.run(task).exit_code in (0, 1, 53)
        assert task in "".join(users(one.messages)) and problems(one.messages) == []
        assert len(one.server.requests) - before < 60


# -- hooks


def hook(tmp_path: Path, event: str, body: str) -> dict[str, tuple[str, ...]]:
    """A hook of the user's config: `told` is what it reads, `log` a file beside the workspace."""
    head = "import json, os, sys, time; told = json.load(sys.stdin)\n"
    log = tmp_path.parent / f"{tmp_path.name}.log"
    return {event: (sys.executable, "-c", f"{head}log = {str(log)!r}\n{body}")}


def logged(tmp_path: Path) -> str:
    """What hooks wrote."""
    path = tmp_path.parent / f"{tmp_path.name}.log"
    return path.read_text() if path.exists() else ""


TELL = "open(log, 'a').write(json.dumps(told) + '\\n')"


def test_the_hooks_are_told_of_a_call_of_its_result_and_of_the_end(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    hooks = {
        name: argv
        for event in ("before_tool", "after_tool", "on_stop")
        for name, argv in hook(tmp_path, event, TELL).items()
    }
    one = stage([run_bash("echo hi"), "done"], hooks=hooks)
    one.run()
    before, after, end = map(json.loads, logged(tmp_path).splitlines())
    base = {"session_id": one.agent.session.id, "root": str(tmp_path), "mode": "auto"}
    call = {"tool": "bash", "arguments": {"command": "echo hi"}, "decision": "allow"}
    assert before == {"event": "before_tool", **base, **call, "reason": before["reason"]}
    told = {"status": "ok", "content": "hi\n[exit code 0]", "ms": after["ms"]}
    assert after == {**before, "event": "after_tool", **told}
    assert end == {"event": "on_stop", **base, "status": "done", "exit_code": 0, "text": "done"}


def test_a_hook_that_ends_with_2_blocks_the_call_and_says_why(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    body = "sys.stderr.write('not on a Friday\\n'); sys.exit(2)"
    one = stage([write("a"), "done"], hooks=hook(tmp_path, "before_tool", body))
    result = one.run()
    assert (results(one.sent()), result.status) == (["denied: not on a Friday"], "done")
    told = one.of("tool_result")[0]
    assert (told["status"], told["decision"], told["rule"]) == (
        "denied",
        "deny",
        "hook before_tool",
    )
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("argv", "seconds"),
    [
        pytest.param(("/nonexistent/hook",), 60, id="no program"),
        pytest.param(("sh", "-c", "exit 3"), 60, id="another code"),
        pytest.param(("sh", "-c", "sleep 600 & sleep 600"), 0.1, id="time"),
        pytest.param(("sh", "-c", "yes"), 2, id="flood"),
        pytest.param(("sh", "-c", "kill -9 $$"), 60, id="killed"),
        pytest.param(("echo", '{"arguments": 3}'), 60, id="no object"),
        pytest.param(lambda event: 1 / 0, 60, id="exception"),
        pytest.param(lambda event: sys.exit(1), 60, id="exit"),
        pytest.param(lambda event: {"arguments": object()}, 60, id="no JSON"),
    ],
)
def test_a_hook_that_fails_is_reported_once_and_nothing_else_happens(
    stage: Callable[..., Stage], argv: Any, seconds: float
) -> None:
    config = {} if callable(argv) else {"before_tool": argv}
    one = stage([run_bash("echo 1"), run_bash("echo 2"), "done"], hooks=config)
    one.agent.settings = dataclasses.replace(one.agent.settings, hook_seconds=seconds)
    if callable(argv):
        one.agent.hooks = {"before_tool": [argv]}
    result = one.run()
    assert [text[:1] for text in results(one.sent())] == ["1", "2"]
    notices = [n["text"] for n in one.of("notice") if n["level"] == "warning"]
    assert (result.status, len(notices)) == ("done", 1)
    assert notices[0].startswith("the hook before_tool failed")


@pytest.mark.parametrize("python", [False, True])
@pytest.mark.parametrize(
    ("command", "mode", "outcome"),
    [
        pytest.param("touch b", "auto", "done", id="harmless"),
        pytest.param("make", "auto", "denied", id="a rule denies it"),
        pytest.param("touch b", "ask", "asked", id="nobody is there"),
    ],
)
def test_a_call_that_a_hook_changed_is_judged_again(
    stage: Callable[..., Stage], tmp_path: Path, command: str, mode: str, outcome: str, python: bool
) -> None:
    answer = {"arguments": {"cmd": command}}
    config = hook(tmp_path, "before_tool", f"print(json.dumps({answer!r}))")
    options = {"mode": mode, "deny": ("bash make",), "hooks": {} if python else config}
    one = stage([run_bash("pwd"), "done"], **options)
    if python:
        one.agent.hooks = {"before_tool": [lambda event: answer]}
    result = one.run()
    (text,) = results(one.sent())
    assert text.startswith("denied: ") == (outcome != "done")
    assert (tmp_path / "b").exists() == (outcome == "done")
    assert result.exit_code == (77 if outcome == "asked" else 0)


def test_bare_has_no_hooks_and_a_hook_sees_none_of_our_keys(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    body = "open(log, 'a').write(json.dumps(dict(os.environ)) + '\\n')"
    environ = {"PATH": os.environ["PATH"], "AGENT_API_KEY": "sk-1", "MINE": "kept"}
    options = {"hooks": hook(tmp_path, "on_stop", body), "environ": environ}
    stage(["done"], bare=True, **options).run()
    assert logged(tmp_path) == ""
    stage(["done"], **options).run()
    seen = json.loads(logged(tmp_path))
    assert (seen.get("MINE"), "AGENT_API_KEY" in seen) == ("kept", False)


@pytest.mark.parametrize("event", ["before_tool", "after_tool", "on_stop"])
def test_ctrl_c_in_a_hook_ends_the_turn_and_all_that_the_hook_started(
    stage: Callable[..., Stage], tmp_path: Path, event: str
) -> None:
    log, nap = tmp_path.parent / f"{tmp_path.name}.log", f"7{os.getpid():07}.5"
    body = f"import subprocess; subprocess.Popen(['setsid', 'sleep', '{nap}'])\n"
    body += "open(log + '.new', 'w').close(); os.rename(log + '.new', log); time.sleep(600)"
    one = stage([run_bash("touch a"), "done"], hooks=hook(tmp_path, event, body))

    def interrupt() -> None:
        until(log.exists)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    result = one.run()
    thread.join()
    assert (result.status, result.exit_code) == ("cancelled", 130)
    until(lambda: not alive(nap) and not alive(str(log)))
    assert (tmp_path / "a").exists() == (event != "before_tool")
    assert len(one.of("tool_result")) == 1


# -- always, and who decided


def test_always_lasts_as_long_as_the_agent_and_is_stored_nowhere(
    stage: Callable[..., Stage],
) -> None:
    asked: list[Any] = []
    steps = [run_bash(f"touch {name}") for name in "abc"]
    one = stage(
        [*steps, "done"], mode="ask", ask=lambda q: asked.append(q) or Always(("bash touch *",))
    )
    one.run()
    assert (len(asked), one.agent.approved) == (1, ["bash touch *"])
    assert [data["answer"] for data in one.of("approval")] == ["always"]
    assert "touch *" not in json.dumps({**one.saved(), "messages": []})
    one.agent.use_session(one.agent.session)
    assert one.agent.approved == []


@pytest.mark.parametrize(
    "rules",
    [("bash *",), ("bash python x.py",), ("nonsense",), (), (3,), "bash touch *", None],
    ids=str,
)
def test_a_rule_that_always_may_not_stand_for_is_a_no(
    stage: Callable[..., Stage], rules: Any
) -> None:
    one = stage([run_bash("touch a"), "done"], mode="ask", ask=lambda q: Always(rules))
    one.run()
    assert results(one.sent()) == ["denied: the user said no"]
    assert (one.agent.approved, (one.root / "a").exists()) == ([], False)


def test_a_question_shows_what_the_command_does_not(stage: Callable[..., Stage]) -> None:
    asked: list[Any] = []
    step = run_bash("cd sub && touch a > Makefile")
    one = stage([step, "done"], mode="ask", ask=lambda q: asked.append(q) or "n")
    one.run()
    folder, writes, network = asked[0].notes
    assert (folder, "Makefile (runs later)" in writes) == ("in the folder sub", True)
    assert network.startswith("network yes, sandbox off")


def test_each_call_leaves_a_line_that_says_who_decided(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    answers = iter(["y", "not that", Always(("bash touch *",))])
    calls = [write("a"), run_bash("make"), *[run_bash("touch b")] * 2, run_bash("true deny")]
    calls += [{"call": "nothing", "arguments": {}}, run_bash("x" * 3000)]
    one = stage([*calls, "done"], mode="ask", deny=("bash true deny",), ask=lambda q: next(answers))
    one.agent.hooks = {"before_tool": [lambda e: {"block": "no"} if "xx" in str(e) else None]}
    one.run()
    path = tmp_path / ".agent" / "audit.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["tool"], row["decision"], row["by"], row["outcome"]) for row in rows] == [
        ("write_file", "ask", "person", "ok"),
        ("bash", "ask", "person", "denied"),
        ("bash", "ask", "person", "ok"),
        ("bash", "allow", "rule", "ok"),
        ("bash", "deny", "rule", "denied"),
        ("nothing", "deny", "mode", "error"),
        ("bash", "deny", "hook", "denied"),
    ]
    assert rows[3]["rule"] == "bash touch *" and all(row["rule"] for row in rows)
    assert {row["session"] for row in rows} == {one.agent.session.id}
    assert len(rows[6]["arguments"]["command"]) <= 2000
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_audit_follows_no_link_and_a_failure_is_one_warning(
    stage: Callable[..., Stage], tmp_path: Path, scratch: Path
) -> None:
    one = stage([run_bash("true"), run_bash("pwd"), "done"])
    (tmp_path / ".agent" / "audit.jsonl").symlink_to(scratch / "out")
    one.run()
    warnings = [n["text"] for n in one.of("notice") if "audit" in n["text"]]
    assert (len(warnings), (scratch / "out").exists()) == (1, False)


def test_without_a_session_there_is_no_audit(stage: Callable[..., Stage], tmp_path: Path) -> None:
    stage([run_bash("true"), "done"], save_session=False).run()
    assert list(tmp_path.rglob("audit.jsonl")) == []


@pytest.mark.parametrize(
    "step",
    [write("a"), write("AGENTS.md"), write("conftest.py"), run_bash("touch 'a b' && touch c")],
    ids=["write", "human", "runs later", "bash"],
)
def test_the_rules_that_are_named_permit_the_call(stage: Callable[..., Stage], step: Any) -> None:
    first = stage([step, "done"], mode="ask").run()
    (row,) = first.denied
    again = stage([step, "done"], mode="ask", allow=tuple(row["rule"].split("\n"))).run()
    assert (first.exit_code, row["rule"] != "", again.exit_code) == (77, True, 0)


# -- events


FIELDS = {
    "init": "session_id model base_url root mode sandbox version",
    "text": "text",
    "reasoning": "text",
    "tool_use": "id name arguments",
    "approval": "id name reason answer",
    "tool_output": "id text",
    "tool_result": "id name status content decision rule ms",
    "retry": "attempt of delay reason restarts_reply",
    "compacted": "messages_before messages_after tokens_before tokens_after archive",
    "notice": "level text",
    "usage": "model prompt_tokens completion_tokens cached_tokens cost_usd estimated",
    "result": "status exit_code text session_id turns usage ms denied",
}


def rich_run(stage: Callable[..., Stage]) -> Stage:
    """A turn with an event of nearly every kind."""
    script = [
        {"status": 503, "headers": {"Retry-After": "0"}},
        {
            "text": "I look.",
            "reasoning": "Hm.",
            "call": "bash",
            "arguments": {"command": "touch b; ls"},
        },
        {"fault": "empty_reply"},
        write("a"),
        "done",
    ]
    one = stage(script, mode="ask", ask=lambda question: "y")
    one.run()
    return one


def test_events_have_the_fields_of_the_contract(stage: Callable[..., Stage]) -> None:
    one = rich_run(stage)
    kinds = {kind for kind, _ in one.events}
    assert kinds == set(FIELDS) - {"compacted"}
    wrong = [kind for kind, data in one.events if set(data) != set(FIELDS[kind].split())]
    assert wrong == []
    json.dumps(one.events)


def test_events_come_in_the_order_of_what_happens(stage: Callable[..., Stage]) -> None:
    kinds = [kind for kind, _ in rich_run(stage).events]
    order = [kind for kind, _ in itertools.groupby(kinds)]
    call = ["tool_use", "approval", "tool_output", "tool_result"]
    assert order == [
        *["init", "retry", "reasoning", "text", "usage", *call],
        *["usage", "notice", "usage", "tool_use", "approval", "tool_result"],
        *["text", "usage", "result"],
    ]


def test_init_is_the_first_event_and_result_the_last(stage: Callable[..., Stage]) -> None:
    one = stage(["done"])
    result = one.run()
    (first, init), (last, end) = one.events[0], one.events[-1]
    assert (first, last) == ("init", "result")
    assert init["model"] == "flaky-1" and init["base_url"] == one.server.url
    assert init["root"] == str(one.root) and init["mode"] == "auto"
    assert init["session_id"] == end["session_id"] == result.session_id == one.saved()["id"]
    assert init["sandbox"].startswith(("on", "off: "))
    assert end == dataclasses.asdict(result)


def test_the_events_of_a_call_hold_together(stage: Callable[..., Stage]) -> None:
    one = stage([{"call": "echo", "arguments": {"text": "hi"}, "id": "abc"}, "done"], tools=[echo])
    one.run()
    (use,), (result,) = one.of("tool_use"), one.of("tool_result")
    assert use == {"id": "abc", "name": "echo", "arguments": {"text": "hi"}}
    assert (result["id"], result["name"], result["status"]) == ("abc", "echo", "ok")
    assert (result["content"], result["decision"]) == ("hi", "allow")
    assert isinstance(result["ms"], int) and result["ms"] >= 0


@pytest.mark.parametrize(
    ("name", "mode", "status"),
    [("echo", "ask", "ok"), ("fail", "ask", "error"), ("act", "ask", "denied")]
    + [("stopped", "auto", "cancelled")],
)
def test_a_result_says_how_the_call_ended(
    stage: Callable[..., Stage], name: str, mode: str, status: str
) -> None:
    tools = [echo, fail, act, stopped]
    one = stage([say("hi", name=name), "done"], mode=mode, tools=tools)
    one.run()
    assert [event["status"] for event in one.of("tool_result")] == [status]
    assert one.of("tool_result")[0]["content"] == results(one.messages)[0]


def test_usage_that_the_server_does_not_tell_is_estimated(stage: Callable[..., Stage]) -> None:
    raw = b'data: {"choices":[{"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\n'
    one = stage([{"raw": raw}])
    one.run()
    assert one.of("usage")[0]["estimated"] is True


def test_a_callback_that_fails_does_not_end_the_turn(
    stage: Callable[..., Stage], capsys: Any
) -> None:
    def emit(kind: str, **data: Any) -> None:
        raise RuntimeError("broken callback")

    one = stage([say("a", "b"), "done"], tools=[echo], emit=emit)
    result = one.run()
    assert (result.status, results(one.messages)) == ("done", ["a", "b"])
    assert capsys.readouterr().err.count("broken callback") == 1


# -- what is sent


def test_each_request_begins_with_the_one_before(stage: Callable[..., Stage]) -> None:
    texts = ["plain", "ünï → \u2028", "a\tb", "{}"]
    steps = [say(*texts[: 1 + n % 4], f"{n}") for n in range(20)]
    steps[3]["reasoning"], steps[5]["text"] = "Hm.", "Some text."
    steps[7] = {"fault": "thought_signature", "call": "echo", "arguments": {"text": "7"}}
    steps[9] = {"call": "echo", "arguments": '{ "text" :  "odd blanks" }'}
    one = stage([*steps, "done", "more"], tools=[echo])
    one.run()
    one.run("next")
    requests = one.server.requests
    assert len(requests) == 22
    for before, after in itertools.pairwise(requests):
        head = {key: value for key, value in before.items() if key != "messages"}
        assert head == {key: value for key, value in after.items() if key != "messages"}
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert after.raw.startswith(before.raw.removesuffix(b"]}"))


def test_a_change_of_mode_is_told_once_in_the_next_user_message(
    stage: Callable[..., Stage],
) -> None:
    one = stage(["one", "two", "three"])
    one.run("first")
    one.agent.set_mode("plan")
    one.run("second")
    one.run("third")
    first, second, third = users(one.sent())
    assert "plan" in second and second.endswith("second")
    assert (first, third) == ("first", "third")
    assert one.sent()[0] == one.sent(0)[0]


def test_a_mode_that_changes_back_does_not_leave_the_model_with_the_wrong_one(
    stage: Callable[..., Stage],
) -> None:
    one = stage(["one", "two"])
    one.run("first")
    one.agent.set_mode("plan")
    one.agent.set_mode("auto")
    one.agent.set_mode("auto")
    one.run("second")
    assert users(one.sent())[1] == "second"


def test_a_changed_mode_holds_at_once(stage: Callable[..., Stage]) -> None:
    one = stage([write("a"), "done"])
    one.agent.set_mode("plan")
    one.run()
    assert results(one.sent())[0].startswith("denied: ")


def test_the_system_message_holds_what_the_model_must_know(stage: Callable[..., Stage]) -> None:
    (stage([]).root / "AGENTS.md").write_text("Use tabs.\n")
    one = stage(["done"], mode="plan", append_system_prompt="Speak softly.")
    one.run()
    text = one.sent()[0]["content"]
    wanted = [str(one.root), "plan", "Use tabs.", "Speak softly.", "denied"]
    assert [word for word in wanted if word not in text] == []


def test_notes_of_the_project_that_change_are_told_once_in_the_next_user_message(
    stage: Callable[..., Stage],
) -> None:
    one = stage(["one", "two", "three"])
    one.run("first")
    (one.root / "AGENTS.md").write_text("Use tabs from now on.\n")
    one.run("second")
    one.run("third")
    first, second, third = users(one.sent())
    assert "Use tabs from now on." in second and second.endswith("second")
    assert (first, third) == ("first", "third")
    assert one.sent()[0] == one.sent(0)[0]


def test_a_bare_agent_reads_no_notes_of_the_project(stage: Callable[..., Stage]) -> None:
    (stage([]).root / "AGENTS.md").write_text("Use tabs.\n")
    one = stage(["done"], bare=True)
    one.run()
    assert "Use tabs." not in one.sent()[0]["content"]


def test_the_notes_of_the_project_reach_from_the_git_root_down(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    for folder, text in ((tmp_path, "RULE ROOT"), (tmp_path / "a", "RULE A"), (inner, "RULE B")):
        (folder / "AGENTS.md").write_text(text)
    one = stage(["done"], workspace=str(inner), save_session=False)
    one.run()
    text = one.sent()[0]["content"]
    places = [text.find(rule) for rule in ("RULE ROOT", "RULE A", "RULE B")]
    assert -1 not in places and places == sorted(places)


def test_notes_that_are_a_link_to_a_secret_are_not_read(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("TOP SECRET")
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "AGENTS.md").symlink_to("../secret")
    one = stage(["done"], workspace=str(tmp_path / "ws"))
    one.run()
    assert "TOP SECRET" not in one.sent()[0]["content"]


def test_notes_follow_a_link_inside_the_project_unless_it_leads_to_a_secret(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    for name, target in {"one": "docs.md", "two": ".env"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / target).write_text("HOUSE RULE\n")
        (tmp_path / name / "AGENTS.md").symlink_to(target)
    made = [stage(["done"], workspace=str(tmp_path / name)) for name in ("one", "two")]
    assert ["HOUSE RULE" in one.agent.system_text() for one in made] == [True, False]


def test_invisible_text_is_escaped_and_reported_once(stage: Callable[..., Stage]) -> None:
    root = stage([]).root
    (root / "AGENTS.md").write_text("Use tabs.\u200b\n")
    (root / "a").write_text("x\U000e0041y \U0001f468\u200d\U0001f469\n")
    edit = {"path": "a", "old": "x\\u{e0041}y", "new": "z"}
    steps = [{"call": "read_file", "arguments": {"path": "a"}}]
    one = stage([*steps, {"call": "edit_file", "arguments": edit}, "done"])
    one.run()
    read, edited = results(one.messages)
    notices = [data["text"] for data in one.of("notice")]
    assert "Use tabs.\\u{200b}" in one.sent(0)[0]["content"]
    assert read.startswith("1: x\\u{e0041}y \U0001f468\u200d\U0001f469\n[1 invisible characters")
    assert (len(notices), "AGENTS.md holds 1 invisible" in notices[0]) == (1, True)
    assert (edited[:6], (root / "a").read_text()[:2]) == ("edited", "z ")


TOKEN = "tok-ABCDEF0123456789"


def test_a_secret_is_in_no_text_and_what_runs_is_real(stage: Callable[..., Stage]) -> None:
    write = {"path": "f", "content": f"{TOKEN}\n"}
    steps = [
        {"call": "write_file", "arguments": write},
        {"call": "bash", "arguments": {"command": "cat f; printf tok-ABC; sleep 0; cat g"}},
        f"it is {TOKEN}",
    ]
    environ = {"PATH": os.environ["PATH"], "MY_TOKEN": TOKEN}
    one = stage(steps, environ=environ)
    (one.root / "g").write_text("DEF0123456789")
    done = one.run(f"use {TOKEN}")
    assert ((one.root / "f").read_text(), done.text) == (f"{TOKEN}\n", "it is [masked]")
    assert results(one.messages)[1] == "[masked]\n[masked]\n[exit code 0]"
    texts = [json.dumps(one.events, default=str), json.dumps(one.saved()), json.dumps(one.sent())]
    assert [(TOKEN in text, "[masked]" in text) for text in texts] == [(False, True)] * 3
    assert one.saved()["messages"] == one.messages


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("write_file", {"path": "f", "content": "key=[masked]\n"}),
        ("edit_file", {"path": "f", "old": "old", "new": "[masked]"}),
        ("bash", {"command": "echo [masked] > f"}),
        ("note", {"text": "the key is [masked]"}),
    ],
)
def test_the_mask_is_never_written_for_a_secret(
    stage: Callable[..., Stage], name: str, arguments: dict[str, str]
) -> None:
    one = stage([{"call": name, "arguments": arguments}, "done"], allow=("note AGENTS.md",))
    (one.root / "f").write_text("old\n")
    one.run()
    assert "[masked] stands for a secret" in results(one.messages)[0]
    assert ((one.root / "f").read_text(), (one.root / "AGENTS.md").exists()) == ("old\n", False)


def test_a_file_in_which_the_mask_is_a_plain_word_can_be_changed(
    stage: Callable[..., Stage],
) -> None:
    edit = {"path": "f", "old": 'MASK = "[masked]"', "new": 'MARK = "[masked]"'}
    one = stage([{"call": "edit_file", "arguments": edit}, "done"])
    (one.root / "f").write_text('MASK = "[masked]"\n')
    one.run()
    assert (one.root / "f").read_text() == 'MARK = "[masked]"\n'


def test_a_resumed_session_gives_no_secret_away(stage: Callable[..., Stage]) -> None:
    one = stage(["first"])
    one.run(f"use {TOKEN}")
    assert TOKEN in one.saved()["messages"][1]["content"]
    session = Session(Transcript(one.saved()["messages"]), {"id": "x"}, None)
    two = build_agent(
        Settings(base_url=one.server.url, model="flaky-1", environ={"MY_TOKEN": TOKEN}),
        session=session,
    )
    assert users(two.transcript.messages) == ["use [masked]"]
    two.close()


def test_endless_notes_are_cut(stage: Callable[..., Stage]) -> None:
    (stage([]).root / "AGENTS.md").write_text("x" * 200_000)
    one = stage(["done"])
    one.run()
    assert one.sent()[0]["content"].count("x") < 33_000


def lay(root: Path, texts: dict[str, str]) -> None:
    """Write files."""
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def read(path: str) -> dict[str, Any]:
    """A step that reads a file."""
    return {"call": "read_file", "arguments": {"path": path}}


def test_an_override_stands_in_place_of_the_notes_of_its_folder(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    lay(tmp_path, {"AGENTS.md": "PLAIN\n", "AGENTS.override.md": "OVERRIDE\n"})
    one = stage(["one", "two"])
    one.run("first")
    text = one.sent()[0]["content"]
    assert ("OVERRIDE" in text, "PLAIN" in text) == (True, False)
    (tmp_path / "AGENTS.override.md").unlink()
    one.run("second")
    assert "PLAIN" in users(one.sent())[1]


def test_notes_of_deeper_folders_come_once_with_the_first_result_there(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    notes = {"a/AGENTS.md": "RULE A\n", "a/b/AGENTS.md": f"RULE B {TOKEN}\u200b\n"}
    lay(tmp_path, {**notes, "a/b/f": "x\n" * 9000, "c/AGENTS.md": "RULE C\n"})
    steps = [read("a/b/gone"), read("a/b/f"), read("a/b/f"), "done"]
    one = stage(steps, environ={"PATH": os.environ["PATH"], "MY_TOKEN": TOKEN})
    one.run()
    failed, first, second = results(one.messages)
    assert first.index("RULE A") < first.index("RULE B [masked]\\u{200b}")
    assert len(first) <= 20_000 and TOKEN not in json.dumps(one.events, default=str)
    assert ["RULE" in text for text in (failed, second)] == [False, False]
    assert "RULE C" not in json.dumps(one.messages)
    assert all(rule in one.agent.system_text() for rule in ("RULE A", "RULE B"))


@pytest.mark.parametrize("folder", ["ignored", ".hidden", "node_modules/p"])
def test_notes_of_other_people_are_not_loaded(
    stage: Callable[..., Stage], tmp_path: Path, folder: str
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    texts = {f"{folder}/AGENTS.md": "OBEY\n", f"{folder}/f": "x\n", ".gitignore": "ignored/\n"}
    lay(tmp_path, texts)
    one = stage([read(f"{folder}/f"), "done"])
    one.run()
    assert results(one.messages) == ["1: x"]


def test_only_the_notes_that_changed_are_told_and_those_that_are_gone(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    lay(tmp_path, {"AGENTS.md": "TOP\n", "a/AGENTS.md": "OLD\n", "b/AGENTS.md": "LOST\n"})
    lay(tmp_path, {"a/f": "x\n", "b/f": "x\n"})
    one = stage([read("a/f"), read("b/f"), "one", "two", "three"])
    one.run("first")
    lay(tmp_path, {"a/AGENTS.md": "NEW\n"})
    (tmp_path / "b/AGENTS.md").unlink()
    one.run("second")
    one.run("third")
    told = users(one.messages)[1]
    assert ("NEW" in told, "b/AGENTS.md was removed" in told, "TOP" in told) == (True, True, False)
    assert users(one.messages)[2] == "third"


def test_notes_that_came_with_an_undone_turn_come_again(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    lay(tmp_path, {"a/AGENTS.md": "RULE A\n", "a/f": "x\n"})
    one = stage([read("a/f"), "one", read("a/f"), "two"])
    one.run("first")
    one.agent.undo(1, lambda line: None)
    one.run("second")
    assert [text.count("RULE A") for text in results(one.messages)] == [1]


def test_a_line_that_the_model_noted_itself_is_not_told_again(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    lay(tmp_path, {"AGENTS.md": "TOP\n"})
    noted = {"call": "note", "arguments": {"text": "more"}}
    one = stage([noted, "one", "two"], ask=lambda q: "y")
    one.run("first")
    one.run("second")
    assert ((tmp_path / "AGENTS.md").read_text(), users(one.messages)) == (
        "TOP\n- more\n",
        ["first", "second"],
    )


def test_a_session_that_is_resumed_in_another_mode_says_so_once(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    lay(tmp_path, {"a/AGENTS.md": "RULE A\n", "a/f": "x\n"})
    one = stage([read("a/f"), "one", "two", "three"])
    one.run("first")
    one.agent.close()
    (path,) = (tmp_path / ".agent" / "sessions").glob("*.json")
    settings = dataclasses.replace(one.agent.settings, mode="plan")
    two = build_agent(settings, session=open_session(path)[0])
    two.run("second")
    two.run("third")
    told = users(two.transcript.messages)
    assert ("mode is now plan" in told[1], told[2]) == (True, "third")
    assert all(word in two.transcript.messages[0]["content"] for word in ("Mode: plan", "RULE A"))
    two.close()


LOOKED_INTO = """
import os, sys
seen = []
def look(event, args):
    if event in ("os.scandir", "os.listdir"):
        seen.append(os.path.abspath(os.fsdecode(args[0] or ".")))
sys.addaudithook(look)
from agent import Settings, build_agent
made = build_agent(Settings(model="m", base_url=sys.argv[1], api_key="x", workspace=sys.argv[2]))
made.run("hi")
made.close()
print([path for path in seen if path.startswith(sys.argv[3])])
"""


def test_looking_for_notes_that_are_not_there_does_not_search_the_tree(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "work" / "sub" / "deeper").mkdir(parents=True)
    with FlakyServer(["hello"]) as server:
        paths = [str(tmp_path / "work"), str(tmp_path)]
        command = [sys.executable, "-c", LOOKED_INTO, server.url, *paths]
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
        shown = subprocess.check_output(command, env=environ, cwd=ROOT, text=True, timeout=60)
    assert (shown, len(server.requests)) == ("[]\n", 1)


def test_another_model_gets_the_same_messages(stage: Callable[..., Stage]) -> None:
    one = stage([say("a"), "one", "two"], tools=[echo])
    one.run()
    one.agent.set_model("other")
    one.run("next")
    assert [request["model"] for request in one.server.requests] == ["flaky-1", "flaky-1", "other"]
    assert results(one.sent()) == ["a"]


def test_the_session_knows_which_state_of_a_file_the_model_saw(
    stage: Callable[..., Stage],
) -> None:
    edit = {"call": "edit_file", "arguments": {"path": "f", "old": "one", "new": "two"}}
    one = stage([{"call": "read_file", "arguments": {"path": "f"}}, "seen", edit, "done"])
    (one.root / "f").write_text("one\n")
    (one.root / "unseen").write_text("one\n")
    hashes = []
    for _ in range(2):
        one.run()
        hashes.append(one.saved()["files"])
    expected = [{"f": hashlib.sha256(data).hexdigest()} for data in (b"one\n", b"two\n")]
    assert hashes == expected


# -- a disk that refuses


def test_a_disk_that_refuses_is_said_once_and_the_work_goes_on(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    @tool(needs="run")
    def jam() -> str:
        """Put a folder where the file would be written."""
        (path,) = (tmp_path / ".agent" / "sessions").glob("*.json")
        path.with_name(path.name + ".tmp").mkdir()
        return "jammed"

    one = stage([{"call": "jam", "arguments": {}}, say("a"), "done", "on"], tools=[jam, echo])
    result = one.run("first")
    assert (result.status, result.text) == ("done", "done")
    notices = [event for event in one.of("notice") if "saved" in event["text"]]
    assert [event["level"] for event in notices] == ["warning"]
    (folder,) = (tmp_path / ".agent" / "sessions").glob("*.tmp")
    assert results(one.saved()["messages"]) == [INTERRUPTED]
    folder.rmdir()
    one.run("second")
    assert results(one.saved()["messages"]) == ["jammed", "a"]


def test_an_agent_that_keeps_nothing_leaves_nothing(stage: Callable[..., Stage]) -> None:
    one = stage([say("a"), "done"], tools=[echo], save_session=False)
    result = one.run()
    assert (result.status, result.session_id) == ("done", "")
    assert list(one.root.iterdir()) == []


def test_an_agent_that_never_began_leaves_no_session(stage: Callable[..., Stage]) -> None:
    one = stage([])
    one.agent.close()
    assert list((one.root / ".agent" / "sessions").iterdir()) == []


def test_the_key_is_in_no_file_and_no_event(stage: Callable[..., Stage]) -> None:
    body = {"error": {"message": "wrong key sk-test-0123456789"}}
    one = stage([{"status": 401, "body": body}])
    known = dataclasses.replace(one.agent.settings, api_key="sk-test-0123456789")
    two = build_agent(known, emit=lambda kind, **data: one.events.append((kind, data)))
    assert two.run("go").exit_code == 41
    two.close()
    files = [path.read_text() for path in one.root.rglob("*") if path.is_file()]
    assert "sk-test-0123456789" not in "".join([*files, str(one.events)])


# -- what the user says while a turn runs; another answer


def saying(*texts: str) -> Callable[[], str]:
    """What the user typed by the time the loop asks, each time it does."""
    rest = iter(texts)
    return lambda: next(rest, "")


def test_what_is_typed_meanwhile_is_the_message_behind_the_results(
    stage: Callable[..., Stage],
) -> None:
    one = stage([say("a", "b"), say("c"), "done"], tools=[echo], max_turns=10)
    one.agent.typed = saying("no, use port\u200b 8080\nand \ud800 sk-0123456789abcdef", "", "")
    result = one.run()
    roles = [message["role"] for message in one.messages]
    assert roles == ["system", "user", "assistant", "tool", "tool", "user"] + [
        "assistant",
        "tool",
        "assistant",
    ]
    assert users(one.sent(1)) == ["go", "no, use port\u200b 8080\nand \ufffd sk-0123456789abcdef"]
    assert (result.status, result.turns, one.saved()["turns"]) == ("done", 3, [1])


def test_what_is_typed_before_the_end_goes_on_with_the_turn_and_undo_takes_it_back(
    stage: Callable[..., Stage],
) -> None:
    one = stage(["first", "second", "third"])
    one.agent.typed = saying("and?", "more?")
    assert (one.run().text, users(one.messages)) == ("third", ["go", "and?", "more?"])
    one.agent.undo(1, lambda line: None)
    assert [message["role"] for message in one.messages] == ["system"]


def test_what_is_typed_at_the_end_of_a_budget_is_not_taken(stage: Callable[..., Stage]) -> None:
    one = stage([say("a"), "report"], tools=[echo], max_turns=1)
    waiting = ["more"]
    one.agent.typed = lambda: waiting.pop() if waiting else ""
    assert (one.run().status, waiting, users(one.messages)) == ("limit", ["more"], ["go"])


def test_what_is_typed_while_the_check_runs_comes_with_its_outcome(
    stage: Callable[..., Stage],
) -> None:
    one = stage(["done", "again", "thanks"], check="test -e there")
    one.agent.typed = saying("", "look at the log", "", "good")
    (one.root / "there").touch()
    assert one.run().status == "done"
    assert users(one.messages) == ["go", "look at the log", "good"]
    (one.root / "there").unlink()
    two = stage(["done", "again"], check="test -e there || ! touch there")
    two.agent.typed = saying("", "look at the log")
    assert two.run().status == "done"
    assert [text.split("\n")[-1] for text in users(two.messages)] == ["go", "look at the log"]


def test_ctrl_c_at_a_question_about_an_attached_file_loses_nothing(
    stage: Callable[..., Stage],
) -> None:
    one = stage(["first"])
    (one.root / "a.txt").write_text("a")
    one.agent.settings = dataclasses.replace(one.agent.settings, ask=("read_file *",))
    one.agent.ask = lambda question: raised(KeyboardInterrupt())
    one.agent.typed = saying("see @a.txt")
    assert (one.run().status, users(one.messages)) == ("cancelled", ["go", "see @a.txt"])


def test_what_is_typed_is_saved_before_it_is_sent(stage: Callable[..., Stage]) -> None:
    kept: list[str] = []

    def second(request: dict[str, Any]) -> str:
        kept.extend(users(one.saved()["messages"]))
        return "done"

    one = stage([say("a"), second], tools=[echo])
    one.agent.typed = saying("use port 8080")
    one.run("go")
    assert [text.rpartition("\n")[2] for text in kept] == ["go", "use port 8080"]


def test_what_is_typed_begins_the_watch_for_loops_anew(stage: Callable[..., Stage]) -> None:
    one = stage([*[say("a")] * 6, "done"], tools=[echo])
    one.agent.typed = saying("", "", "go on like that", "")
    assert one.run().status == "done"
    told = [("equal call" in text) for text in results(one.messages)]
    assert told == [False, False, True] * 2


def test_what_is_typed_is_the_users_own_in_a_hand_over_note(stage: Callable[..., Stage]) -> None:
    one = stage([say("a" * 4000), "done", "the note that is left"], tools=[echo])
    one.agent.typed = saying("use port 8080")
    one.run("serve it")
    assert one.agent.compact()
    note = next(text for text in users(one.messages) if "Hand-over" in text)
    assert "[The user said:]\nuse port 8080" in note or "use port 8080" in users(one.messages)


def test_an_answer_comes_back_where_another_one_can_not_be_had(
    stage: Callable[..., Stage],
) -> None:
    one = stage(["first", {"status": 401, "body": {}}, "second"])
    one.run("go")
    before = one.saved()["messages"]
    assert (one.agent.again().status, one.saved()["messages"]) == ("error", before)
    assert (one.agent.again().text, one.sent(2)) == ("second", one.sent(0))


def test_again_takes_the_answer_back_and_asks_from_there(stage: Callable[..., Stage]) -> None:
    one = stage([say("a"), "first", "second"], tools=[echo])
    one.run("go")
    spent = one.saved()["usage"]["prompt_tokens"]
    result = one.agent.again()
    assert [*one.root.glob(".agent/sessions/*.bak")] == []  # no turn has begun
    assert (result.text, result.turns, result.status) == ("second", 1, "done")
    assert one.sent(2) == one.sent(1)
    assert "first" not in json.dumps(one.saved()["messages"])
    assert one.saved()["usage"]["prompt_tokens"] > spent
    assert (one.saved()["turns"], one.of("result")[-1]["text"]) == ([1], "second")
    one.agent.undo(1, lambda line: None)
    assert [message["role"] for message in one.messages] == ["system"]


@pytest.mark.parametrize(
    "script, left",
    [
        pytest.param([{"status": 400}, "done"], ["go"], id="an error"),
        pytest.param(
            [{"call": "stopped", "arguments": {}}, "done"], ["go", INTERRUPTED], id="Ctrl-C"
        ),
    ],
)
def test_again_goes_on_where_a_turn_broke_off(
    stage: Callable[..., Stage], script: list[Any], left: list[str]
) -> None:
    one = stage(script, tools=[stopped])
    one.run("go")
    one.agent.set_mode("ask")
    assert one.agent.again().text == "done"
    sent = [message["content"] for message in one.sent() if message["role"] in ("user", "tool")]
    assert "the mode is now ask" in sent[-1]
    assert (len(one.saved()["turns"]), sent[0]) == (1, "go")


def test_again_without_anything_to_answer_says_so(stage: Callable[..., Stage]) -> None:
    one = stage([])
    with pytest.raises(UsageError, match="nothing to ask again"):
        one.agent.again()
    assert one.of("result") == []


# -- files that a prompt names -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "names"),
    [
        pytest.param("read @a.py, and (@src/b.py). @a.py!", ["a.py", "src/b.py"], id="punctuation"),
        pytest.param('see @"c d.txt"', ["c d.txt"], id="a blank"),
        pytest.param("mail me@a.py or @user or @", [], id="no file"),
        pytest.param("`@a.py`\n```\n@a.py\n```", [], id="code"),
        pytest.param("@src", ["src/"], id="a folder"),
        pytest.param("@a.py:3 @src/b.py#L1-L2 @c:3", ["a.py", "src/b.py"], id="lines"),
        pytest.param("看 @a.py， （@src/b.py）。", ["a.py", "src/b.py"], id="wide punctuation"),
    ],
)
def test_a_prompt_names_files_by_an_at(stage, tmp_path, prompt, names):
    put_files(tmp_path)
    one = stage(["PONG"])
    text = one.agent.attach(prompt)
    assert re.findall(r"(?m)^\[file: (.*)\]$", text) == names
    assert text.startswith(prompt)
    one.run(text)
    assert (one.agent.task, one.agent.session.header["title"]) == (prompt, prompt.split("\n")[0])


@pytest.mark.parametrize("name", [".env", "../outside", "binary"])
def test_what_may_not_be_read_is_not_attached(stage, tmp_path, name):
    put_files(tmp_path)
    one = stage([], workspace=str(tmp_path / "src"))
    (tmp_path / "src" / ".env").write_text("KEY=secret")
    (tmp_path / "src" / "binary").write_bytes(b"\0\1\2")
    assert one.agent.attach(f"see @{name}") == f"see @{name}"
    assert [notice["text"].split(":")[0] for notice in one.of("notice")] == [
        f"@{name} is not attached"
    ]


def test_a_file_that_was_attached_can_be_edited_and_is_bounded(stage, tmp_path):
    put_files(tmp_path)
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text("many words\n" * 3000)
    edit = {"call": "edit_file", "arguments": {"path": "a.py", "old": "one", "new": "two"}}
    one = stage([edit, "PONG"])
    one.run(one.agent.attach("change @a.py"))
    assert (tmp_path / "a.py").read_text() == "two\n"
    text = one.agent.attach(" ".join(f"@{number}.txt" for number in range(9)))
    assert (text.count("[file: "), len(text) < 62_000) == (3, True)
    assert "go on with start=" in text
    assert one.agent.attach("@0.txt @1.txt @2.txt @./0.txt").count("[file: ") == 3
    assert [notice["text"].split(":")[0] for notice in one.of("notice")] == [
        "attached",
        "@3.txt and 5 more is not attached",
        "attached",
        "attached",
    ]


def test_of_very_many_files_the_first_are_attached_and_the_rest_is_named(stage, tmp_path):
    names = [f"{number}.txt" for number in range(52)]
    for name in names:
        (tmp_path / name).write_text("a\n")
    one = stage([])
    text = one.agent.attach(" ".join(f"@{name}" for name in names))
    assert re.findall(r"(?m)^\[file: (.*)\]$", text) == names[:50]
    assert [notice["text"].partition(": too")[0] for notice in one.of("notice")] == [
        "@50.txt and 1 more is not attached",
        f"attached: {', '.join(names[:50])}",
    ]


def test_what_is_invisible_in_an_attached_file_is_told(stage, tmp_path):
    (tmp_path / "a.txt").write_text("a\u200bb\n")
    one = stage([])
    assert "a\\u{200b}b" in one.agent.attach("@a.txt")
    assert [notice["text"] for notice in one.of("notice")] == [
        "a.txt holds 1 invisible characters; the model gets them escaped",
        "attached: a.txt",
    ]


def test_a_small_window_takes_less_of_the_files(stage, tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("many words\n" * 600)
    texts = [stage([], context=size).agent.attach("@a.txt @b.txt") for size in (10_000, 20_000)]
    assert [text.count("[file: ") for text in texts] == [1, 2]


def test_a_key_in_a_prompt_or_a_file_that_it_names_goes_nowhere(stage, tmp_path):
    key = "sk-canary-0123456789abcdef"
    (tmp_path / "a.py").write_text(f"KEY = {key}\n")
    one = stage(["PONG"], keys={"OPENAI_API_KEY": key})
    prompt = f"is {key} in @a.py?"
    text = one.agent.attach(prompt)
    one.run(text)
    assert one.agent.task == one.agent.mask(prompt) != prompt
    assert key not in text + json.dumps([one.sent(0), one.of("tool_result")])


def test_what_was_attached_or_refused_is_told_to_hooks_and_stands_in_the_audit(stage, tmp_path):
    put_files(tmp_path)
    (tmp_path / ".env").write_text("KEY=secret")
    told: list[tuple[str, str]] = []
    one = stage([])
    for event in ("before_tool", "after_tool"):
        one.agent.hooks[event] = [lambda facts: told.append((facts["event"], facts["tool"]))]
    one.agent.attach("@a.py @.env")
    rows = [json.loads(row) for row in (tmp_path / ".agent/audit.jsonl").read_text().splitlines()]
    assert [(row["tool"], row["arguments"]["path"], row["outcome"]) for row in rows] == [
        ("read_file", "a.py", "ok"),
        ("read_file", ".env", "denied"),
    ]
    assert told == [("before_tool", "read_file"), ("after_tool", "read_file")]


def put_files(folder: Path) -> None:
    """Files to name."""
    (folder / "src").mkdir()
    (folder / "outside").write_text("not for the model")
    for name, text in {"a.py": "one\n", "src/b.py": "b\n", "c d.txt": "c\n"}.items():
        (folder / name).write_text(text)
