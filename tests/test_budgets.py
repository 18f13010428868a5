"""Budgets, --check, and what a run costs: told once, a soft landing, the right exit code.

`stage` builds an agent in front of a scripted server, in this process; what a user sees of it is
looked at in real processes and on a terminal.
"""

import http.server
import itertools
import json
import os
import re
import signal
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stages
from conftest import NAP, alive, prompts, results, until

from agent import (
    Settings,
    Signals,
    TimeUp,
    UsageError,
    build_agent,
    in_time,
    load,
    report_unraisable,
    told_usage,
    tool,
)
from flaky_server import FlakyServer, Pause, Reply

LAST = "this is the last request"
AT_ONCE = {"Retry-After": "0"}
LONG = pytest.mark.long
PRICED = {"flaky-1": (1.0, 0.25, 10.0)}  # USD per million tokens: input, cached, output
CONFIG = '[prices."flaky-1"]\ninput = 1.0\ncached = 0.25\noutput = 10.0\n'
USED = {
    "prompt_tokens": 12_345,
    "completion_tokens": 1_234,
    "prompt_tokens_details": {"cached_tokens": 9_876},
}
COST = ((12_345 - 9_876) * 1.0 + 9_876 * 0.25 + 1_234 * 10.0) / 1e6


class Stage(stages.Stage):
    """With what these tests ask it for."""

    def last_sent(self) -> str:
        """The last message of the last request."""
        return self.server.requests[-1]["messages"][-1]["content"]

    def marks(self) -> list[int]:
        """How often each request says that it is the last one."""
        return [str(request["messages"]).count(LAST) for request in self.server.requests]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    """Build agents; at the end all is closed, and every request and transcript was valid."""
    yield from stages.stages(tmp_path, Stage)


@pytest.fixture
def config(home: Path) -> Path:
    """A config of the user that knows what the model costs."""
    path = home / ".config" / "agent" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(CONFIG)
    return path


@tool(needs="read")
def echo(text: str = "") -> str:
    """Say it again.

    text: what to say
    """
    return text


@tool(needs="run")
def act(text: str = "") -> str:
    """Do something.

    text: what
    """
    return f"did {text}"


def say(*texts: str, name: str = "echo", **extra: Any) -> dict[str, Any]:
    """A step that calls a tool once for each text."""
    return {"calls": [{"name": name, "arguments": {"text": text}} for text in texts]} | extra


def shell(command: str, **extra: Any) -> dict[str, Any]:
    """A step with a command."""
    return {"call": "bash", "arguments": {"command": command}} | extra


def time_is_over(one: Stage) -> None:
    """At this moment all the time of a prompt is used up."""
    one.agent.budgets.began -= 1_000
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.25)


def write(path: str, **extra: Any) -> dict[str, Any]:
    """A step that writes a file."""
    return {"call": "write_file", "arguments": {"path": path, "content": "x\n"}} | extra


def counts(prompt: int, completion: int, **more: Any) -> dict[str, Any]:
    """A usage object."""
    return {"prompt_tokens": prompt, "completion_tokens": completion} | more


def numbered(count: int) -> list[Any]:
    """Steps that each call a tool with another text and use 100 tokens."""
    return [say(f"step {n}", usage=counts(90, 10)) for n in range(1, count + 1)]


def errors_of(one: Stage) -> list[str]:
    """The notices of what went wrong."""
    return [data["text"] for data in one.of("notice") if data["level"] == "error"]


def usage_line(text: str) -> str:
    """The one line that says what a turn used."""
    [line] = [line for line in text.splitlines() if line.startswith("tokens: ")]
    return line


# Each is used up by the tenth of the steps of numbered(), and nine tenths of it by the ninth.
TEN_STEPS = [
    pytest.param({"max_turns": 10}, id="steps"),
    pytest.param({"max_tokens_total": 990}, id="tokens"),
    pytest.param(
        {"max_budget_usd": 0.00099, "prices": {"flaky-1": (1.0, 1.0, 1.0)}},
        id="money",
    ),
]


TOKENS = [TEN_STEPS[1], *(pytest.param(*p.values, id=p.id, marks=LONG) for p in TEN_STEPS[::2])]


# -- told once, the last request, resumable ------------------------------------------------------


@pytest.mark.parametrize("budget", TEN_STEPS)
def test_a_budget_is_told_once_at_nine_tenths_and_ends_with_one_report(
    stage: Callable[..., Stage], budget: dict[str, Any]
) -> None:
    last = say("forbidden", name="act", text="I did ten steps.", usage=counts(90, 10))
    one = stage([*numbered(10), last, "never"], tools=[echo, act], **budget)
    result = one.run()
    assert (result.status, result.exit_code, result.text) == ("limit", 53, "I did ten steps.")
    texts = results(one.server.requests[9])
    assert [n for n, text in enumerate(texts, 1) if text != f"step {n}"] == [9]
    assert texts[8].startswith("step 9\n") and LAST not in texts[8]
    assert (one.marks(), LAST in one.last_sent()) == ([0] * 10 + [1], True)
    assert [data["name"] for data in one.of("tool_use")].count("act") == 0
    assert one.server.requests[10]["tools"] == one.server.requests[0]["tools"]


@pytest.mark.parametrize("budget", TOKENS)
def test_below_nine_tenths_of_a_budget_nothing_is_said(
    stage: Callable[..., Stage], budget: dict[str, Any]
) -> None:
    one = stage([*numbered(8), {"text": "done", "usage": counts(1, 1)}], tools=[echo], **budget)
    result = one.run()
    assert (result.status, result.exit_code, result.text) == ("done", 0, "done")
    assert results(one.server.requests[-1]) == [f"step {n}" for n in range(1, 9)]


@pytest.mark.parametrize("budget", TOKENS)
def test_an_answer_that_uses_a_budget_up_is_an_answer(
    stage: Callable[..., Stage], budget: dict[str, Any]
) -> None:
    one = stage([*numbered(9), {"text": "done", "usage": counts(90, 10)}], tools=[echo], **budget)
    result = one.run()
    assert (result.status, result.exit_code, result.text) == ("done", 0, "done")
    assert len(one.server.requests) == 10


@pytest.mark.parametrize(
    ("budget", "flag"),
    [
        pytest.param({"max_turns": 1}, "--max-turns", id="steps"),
        pytest.param({"max_tokens_total": 50}, "--max-tokens-total", id="tokens"),
        pytest.param({"max_budget_usd": 1e-5, "prices": PRICED}, "--max-budget-usd", id="money"),
    ],
)
def test_a_budget_that_one_reply_uses_up_is_only_told_to_be_over(
    stage: Callable[..., Stage], budget: dict[str, Any], flag: str
) -> None:
    one = stage([*numbered(1), "report", "never"], tools=[echo], **budget)
    result = one.run()
    assert (result.status, result.exit_code, result.text) == ("limit", 53, "report")
    assert one.marks() == [0, 1]
    assert flag in errors_of(one)[-1]


def test_several_budgets_are_told_together_once_and_end_with_one_report(
    stage: Callable[..., Stage],
) -> None:
    one = stage(
        [*numbered(10), "report", "never"],
        tools=[echo],
        max_turns=10,
        max_tokens_total=990,
        timeout=600.0,
        max_budget_usd=0.00099,
        prices={"flaky-1": (1.0, 1.0, 1.0)},
    )
    assert one.run().exit_code == 53
    texts = results(one.server.requests[9])
    assert [n for n, text in enumerate(texts, 1) if text != f"step {n}"] == [9]
    assert one.marks() == [0] * 10 + [1]


@pytest.mark.parametrize(
    ("budget", "flag"),
    [
        pytest.param({"max_turns": 3, "max_tokens_total": 10_000}, "--max-turns", id="steps"),
        pytest.param({"max_turns": 50, "max_tokens_total": 250}, "--max-tokens-total", id="tokens"),
    ],
)
def test_of_several_budgets_the_first_that_is_used_up_ends_the_turn_and_is_named(
    stage: Callable[..., Stage], budget: dict[str, Any], flag: str
) -> None:
    one = stage([*numbered(3), "report", "never"], tools=[echo], **budget)
    assert one.run().exit_code == 53
    assert one.marks() == [0, 0, 0, 1]
    assert flag in errors_of(one)[-1]


def test_tokens_count_for_as_long_as_the_agent_runs_and_steps_for_one_prompt(
    stage: Callable[..., Stage],
) -> None:
    step = say("a", usage=counts(40, 10))
    end = {"text": "done", "usage": counts(40, 10)}
    one = stage([step, end, step, end, "never"], tools=[echo], max_turns=2, max_tokens_total=150)
    assert [one.run().exit_code, one.run().exit_code] == [0, 53]
    assert one.marks() == [0, 0, 0, 1]


@LONG
def test_a_retry_costs_no_tokens_and_no_money(stage: Callable[..., Stage]) -> None:
    again = {"status": 503, "headers": AT_ONCE}
    end = {"text": "done", "usage": counts(40, 10)}
    script = [again, say("a", usage=counts(40, 10)), again, end]
    one = stage(script, tools=[echo], max_tokens_total=110)
    result = one.run()
    assert (result.status, len(one.server.requests)) == ("done", 4)
    assert (result.usage["prompt_tokens"], result.usage["completion_tokens"]) == (80, 20)


@pytest.mark.parametrize(
    ("total", "code"),
    [
        pytest.param(100_000, 0, id="enough", marks=LONG),
        pytest.param(5_000, 53, id="used up by the summary"),
    ],
)
def test_the_tokens_of_a_summary_count(stage: Callable[..., Stage], total: int, code: int) -> None:
    def model(request: Any) -> Any:
        if "tools" not in request:
            note = "Task: look at words. Decisions: none. Files: none. Open work: the next word."
            return {"text": note, "usage": counts(4_000, 2_000)}
        return {"text": f"{len(request['messages'])} {'word ' * 800}", "usage": counts(10, 10)}

    one = stage(itertools.repeat(model), max_tokens_total=total)
    assert [one.run(f"prompt {n}").exit_code for n in range(5)] == [0] * 5
    one.agent.compact()
    assert any("tools" not in request for request in one.server.requests)
    assert one.run("next").exit_code == code


def test_a_person_is_asked_and_may_let_it_go_on(stage: Callable[..., Stage]) -> None:
    asked: list[str] = []
    answers = iter(["y", "n"])
    one = stage(
        [*numbered(4), "report", "never"],
        tools=[echo],
        max_tokens_total=150,
        ask=lambda question: asked.append(question.text) or next(answers),
    )
    result = one.run()
    assert (result.status, result.exit_code, result.text) == ("limit", 53, "report")
    assert (len(asked), sum(one.marks())) == (2, 1)


def test_what_a_person_added_is_told_at_nine_tenths_too_and_ends_with_the_prompt(
    stage: Callable[..., Stage],
) -> None:
    asked: list[str] = []
    script = [*numbered(19), "one", *numbered(10), "two"]
    one = stage(script, tools=[echo], max_turns=10, ask=lambda q: asked.append(q.text) or "y")
    assert one.run().text == "one"
    texts = results(one.server.requests[-1])
    assert [n for n, text in enumerate(texts, 1) if text != f"step {n}"] == [9, 18]
    assert (one.run().text, len(asked)) == ("two", 2)


def test_after_a_no_a_person_may_still_let_the_next_prompt_go_on(
    stage: Callable[..., Stage],
) -> None:
    answers = iter(["n", *["y"] * 9])
    end = {"text": "fine", "usage": counts(40, 10)}
    one = stage(
        [*numbered(1), "report", end],
        tools=[echo],
        max_tokens_total=50,
        ask=lambda question: next(answers),
    )
    assert [one.run().text, one.run().text] == ["report", "fine"]


FLAGS = [
    pytest.param(["--max-tokens-total", "9"], "true", id="tokens"),
    pytest.param(["--max-turns", "1"], "true", id="steps", marks=LONG),
    pytest.param(["--max-budget-usd", "0.000001"], "true", id="money", marks=LONG),
    pytest.param(["--timeout", "3"], f"sleep {NAP}", id="time", marks=LONG),
]


@pytest.mark.parametrize(("flags", "command"), FLAGS)
def test_json_tells_the_limit_and_the_session_goes_on_later(run_agent, config, flags, command):
    with FlakyServer([shell(f"echo begun; {command}"), "report", "PONG"]) as server:
        done = run_agent("--yes", "--output-format", "json", *flags, "work", server=server)
        later = run_agent("--resume", "go on", server=server)
    told = json.loads(done.stdout)
    assert (done.returncode, told["status"], told["exit_code"]) == (53, "limit", 53)
    assert (told["text"], told["turns"] >= 1) == ("report", True)
    assert f"agent --resume {told['session_id']}" in done.stderr.strip().splitlines()[-1]
    assert LAST in server.requests[1]["messages"][-1]["content"]
    assert (later.returncode, later.stdout) == (0, "PONG\n")
    assert prompts(server.requests[2])[-1].splitlines()[-1] == "go on"
    assert "begun" in results(server.requests[2])[0]


@LONG
@pytest.mark.parametrize(("flags", "command"), FLAGS)
def test_text_prints_the_report_and_stream_json_ends_with_the_result(
    run_agent, config, flags, command
):
    script = [shell(command), "report"]
    with FlakyServer(script * 2) as server:
        plain = run_agent("--yes", "-p", *flags, "work", server=server)
        lines = run_agent("--yes", "--json", *flags, "work", server=server)
    events = [json.loads(line) for line in lines.stdout.splitlines()]
    assert (plain.returncode, plain.stdout) == (53, "report\n")
    assert (lines.returncode, events[-1]["type"], events[-1]["status"]) == (53, "result", "limit")
    assert flags[0] in plain.stderr


@pytest.mark.parametrize(("flags", "command"), FLAGS)
def test_in_the_repl_a_budget_asks_to_go_on(terminal, config, flags, command):
    def model(request: dict) -> Any:
        last = request["messages"][-1]
        if LAST in last["content"]:
            return "REPORT"
        return "PONG" if last["role"] == "tool" else shell(command)

    with FlakyServer([model] * 9) as server:
        screen = terminal("--mode", "auto", *flags, server=server)
        # What was used in the prompt before counts too: then nothing is left for a report.
        counts_on = flags[0] in ("--max-tokens-total", "--max-budget-usd")
        end = "nothing was sent" if counts_on else "REPORT"
        for answer, shown in (("y", "PONG"), ("n", end)):
            screen.prompt()
            screen.send("work\r")
            screen.question()
            screen.send(f"{answer}\r")
            screen.expect(shown)
        screen.prompt()
        screen.send("exit\r")
        assert screen.wait() == 0
    marks = [str(request["messages"]).count(LAST) for request in server.requests]
    reports = int(end == "REPORT")
    assert (sum(marks), marks[-1]) == (reports, reports)


# -- time ----------------------------------------------------------------------------------------


class Endless(FlakyServer):
    """A server whose replies never end, until it is told that this is the last request."""

    over: Callable[[], None]  # is called behind some words

    def next_actions(self, request: Any) -> Any:
        """A reply of the script for the report, else words for ever."""
        if LAST in request["messages"][-1]["content"]:
            return super().next_actions(request)
        return self.words(Reply({}, request, self))

    def words(self, reply: Reply) -> Iterator[Any]:
        """Other words each time; a test that fails must not last for ever."""
        for n in range(20_000):
            if n == 9:
                self.over()
            yield reply.event({"content": f"word {n} of many\n"})
            yield Pause(0.01)


@pytest.mark.long
def test_a_timeout_ends_a_running_command_with_its_children_and_keeps_its_output(
    stage: Callable[..., Stage],
) -> None:
    begun = shell(f"echo begun; sleep {NAP} & sleep {NAP}")
    one = stage([begun, "report", "never"], timeout=3.0)
    result = one.run()
    assert (result.status, result.exit_code, result.text) == ("limit", 53, "report")
    assert results(one.server.requests[1])[0].startswith("begun\n")
    assert one.marks() == [0, 1]
    until(lambda: not alive(NAP))
    assert "--timeout" in errors_of(one)[-1]


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param({"text": "one two three four", "hold_after": 2}, id="a silent stream"),
        pytest.param({"text": "x", "hold": "before"}, id="no answer"),
        pytest.param({"status": 429, "headers": {"Retry-After": "90"}}, id="a retry wait"),
        pytest.param({"fault": "keepalive_stall"}, id="comments"),
        pytest.param(say("x", name="act") | {"hold_after": 1}, id="a call"),
    ],
)
def test_a_timeout_ends_a_wait_and_asks_for_the_report(
    stage: Callable[..., Stage], wait: dict[str, Any]
) -> None:
    def model(request: Any) -> Any:
        threading.Timer(0.1, time_is_over, [one]).start()  # whatever it has got by then
        return wait

    one = stage([model, "report", "never"], tools=[act], timeout=600.0)
    result = one.run()
    assert (result.status, result.exit_code, result.text) == ("limit", 53, "report")
    assert (one.marks(), LAST in one.last_sent()) == ([0, 1], True)
    assert one.of("tool_use") == []


def test_a_timeout_ends_a_stream_without_end(stage: Callable[..., Stage]) -> None:
    server = Endless(["report", "never"])
    one = stage(server, timeout=600.0)
    server.over = lambda: time_is_over(one)
    result = one.run()
    assert (result.status, result.exit_code, result.text) == ("limit", 53, "report")
    assert one.marks() == [0, 1]


def test_a_timeout_ends_a_question_and_the_call_is_not_run(stage: Callable[..., Stage]) -> None:
    def ask(question: Any) -> str:
        if question.name:  # a call; the other question is whether to go on
            time_is_over(one)
            threading.Event().wait(60)
        return "n"

    one = stage([shell("touch ran"), "report", "never"], mode="ask", ask=ask, timeout=600.0)
    result = one.run()
    assert (result.status, result.exit_code, result.text) == ("limit", 53, "report")
    assert (one.marks(), (one.root / "ran").exists()) == ([0, 1], False)


@LONG
def test_a_timeout_ends_a_question_on_the_terminal(terminal, workspace):
    def model(request: dict) -> Any:
        return "REPORT" if LAST in request["messages"][-1]["content"] else shell("touch ran")

    with FlakyServer([model] * 4) as server:
        screen = terminal("--timeout", "3", server=server)
        screen.prompt()
        screen.send("work\r")
        assert "touch ran" in screen.question()
        screen.question()  # whether to go on
        screen.send("n\r")
        screen.expect("REPORT")
        screen.prompt()
        screen.send("exit\r")
        assert (screen.wait(), (workspace / "ran").exists()) == (0, False)


def test_the_report_has_its_time_when_other_budgets_are_used_up_as_well(
    stage: Callable[..., Stage],
) -> None:
    def work(request: Any) -> Any:
        threading.Timer(0.1, time_is_over, [one]).start()  # whatever runs by then
        return shell(f"sleep {NAP}")

    report = {"text": "report", "hold": "before"}
    one = stage([work, report], timeout=600.0, max_turns=1)
    known = threading.Timer(0.2, one.server.release)
    threading.Thread(target=lambda: one.server.holding.wait(60) and known.start()).start()
    assert (one.run().text, one.marks()) == ("report", [0, 1])


def test_a_summary_takes_no_time_of_the_report(stage: Callable[..., Stage]) -> None:
    def model(request: Any) -> Any:
        if "tools" not in request:
            time_is_over(one)
            return {"text": "Files: one and another", "hold_after": 2}
        last = LAST in str(request["messages"][-1])
        return "report" if last else f"{len(request['messages'])} {'word ' * 800}"

    one = stage(itertools.repeat(model), timeout=600.0, context=9000)
    ended = next(result for n in range(20) if (result := one.run(f"prompt {n}")).exit_code)
    assert (ended.exit_code, ended.text, one.marks()[-1]) == (53, "report", 1)
    assert ["tools" in request for request in one.server.requests].count(False) == 1


def test_a_time_that_is_over_at_once_leaves_the_report(stage: Callable[..., Stage]) -> None:
    one = stage(["report"], timeout=1e-9)
    result = one.run()
    assert (result.exit_code, result.text, one.marks()) == (53, "report", [1])


def test_ctrl_c_while_the_end_of_the_time_is_saved_is_not_lost(
    stage: Callable[..., Stage],
) -> None:
    def emit(kind: str, **data: Any) -> None:
        if kind == "tool_output" and one.agent.budgets.used()["seconds"] < 10_000:
            one.agent.budgets.began -= 10_000
            signal.raise_signal(signal.SIGALRM)
        elif kind == "tool_result":  # what is saved next is refused, and that is reported
            one.agent.session.path.unlink()
            one.agent.session.path.mkdir()
        elif kind == "notice":
            signal.raise_signal(signal.SIGINT)

    one = stage([shell(f"echo begun; sleep {NAP}"), "report"], timeout=10_000.0)
    one.agent.emit = one.agent.shell.emit = emit
    assert (one.run().exit_code, len(one.server.requests)) == (130, 1)


def test_the_end_of_the_time_inside_a_finalizer_is_no_signal_to_be_sent_again() -> None:
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    report_unraisable(Signals(), types.SimpleNamespace(exc_value=TimeUp()))
    left = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert left == timers


def test_time_is_told_at_nine_tenths_too(stage: Callable[..., Stage]) -> None:
    count = itertools.count(1)

    @tool(needs="read")
    def tick() -> str:
        """Take a tenth of the time."""
        one.agent.budgets.began -= 1_000
        return f"tick {next(count)}"

    ticks = [{"call": "tick", "arguments": {}}] * 9
    one = stage([*ticks, "done"], tools=[tick], timeout=10_000.0)
    result = one.run()
    assert (result.status, result.exit_code, sum(one.marks())) == ("done", 0, 0)
    texts = results(one.server.requests[-1])
    assert [n for n, text in enumerate(texts, 1) if text != f"tick {n}"] == [9]


def test_time_leaves_no_timer_behind(stage: Callable[..., Stage]) -> None:
    before = signal.getsignal(signal.SIGALRM)
    one = stage(["one", "two"], timeout=600.0)
    assert [one.run().text, one.run().text] == ["one", "two"]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    one.agent.close()
    assert signal.getsignal(signal.SIGALRM) == before


def test_a_timer_of_the_caller_comes_back() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 900.0)
        assert in_time(600.0, lambda: "done", Signals()) == "done"
        assert 600.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 900.0
        signal.raise_signal(signal.SIGALRM)
        assert rung == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_note_never_changes_a_result_that_was_sent(stage: Callable[..., Stage]) -> None:
    one = stage([say("a"), "never"], tools=[echo], max_turns=1)
    one.run()
    messages = one.agent.transcript.messages
    one.agent.transcript.replace(messages[: 1 + [m["role"] for m in messages].index("tool")])
    before = dict(one.agent.transcript.messages[-1])
    one.agent.sent = one.agent.transcript.messages[-1]
    one.agent.tell("[note: late]")
    last = one.agent.transcript.messages[-2:]
    assert (last[0], last[1]["content"]) == (before, "[note: late]")


def test_an_agent_in_another_thread_may_have_a_timeout(stage: Callable[..., Stage]) -> None:
    one = stage(["fine"], timeout=600.0)
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(one.run()), daemon=True)
    thread.start()
    thread.join(60)
    assert [(result.status, result.text) for result in ended] == [("done", "fine")]


# -- money ---------------------------------------------------------------------------------------


class Shop:
    """A server whose list of models tells prices; every chat gets the same answer."""

    def __init__(self, *models: dict[str, Any]) -> None:
        self.chats: list[dict[str, Any]] = []
        chats = self.chats
        message = {"role": "assistant", "content": "hello"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        reply = {"id": "1", "object": "chat.completion", "created": 1, "model": "flaky-1"}
        reply |= {"choices": choices, "usage": counts(1000, 100)}

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                listed = self.path == "/v1/models"
                self.send(200 if listed else 404, {"object": "list", "data": models})

            def do_POST(self) -> None:
                chats.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send(200, reply)

            def send(self, status: int, value: Any) -> None:
                raw = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def __enter__(self) -> "Shop":
        threading.Thread(target=self.http.serve_forever, args=(0.005,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.http.shutdown()
        self.http.server_close()


def model_row(pricing: Any = None, name: str = "flaky-1") -> dict[str, Any]:
    """A row of /models; with prices as OpenRouter tells them."""
    row = {"id": name, "object": "model"}
    return row if pricing is None else row | {"pricing": pricing}


def outcome(settings: Settings) -> tuple[int, str, Any]:
    """Exit code, what was said, and the usage of one prompt; a refusal to build is a 2 as well."""
    said: list[str] = []
    agent = None
    try:
        agent = build_agent(settings, emit=lambda kind, **data: said.append(str(data.get("text"))))
        result = agent.run("hi")
        return result.exit_code, "\n".join(said), result.usage
    except UsageError as error:
        return error.exit_code, str(error), None
    finally:
        if agent is not None:
            agent.close()


def shopping(url: str, folder: Path, **more: Any) -> Settings:
    """Settings for a Shop."""
    fields = {"base_url": url, "api_key": "x", "model": "flaky-1", "workspace": str(folder)}
    return Settings(**fields, environ={"PATH": os.environ["PATH"]}, **more)


def test_a_table_of_prices_makes_money_of_tokens(stage: Callable[..., Stage]) -> None:
    one = stage([say("a", usage=USED), {"text": "b", "usage": USED}], tools=[echo], prices=PRICED)
    result = one.run()
    assert [event["cost_usd"] for event in one.of("usage")] == [pytest.approx(COST)] * 2
    assert result.usage == {
        "prompt_tokens": 24_690,
        "completion_tokens": 2_468,
        "cached_tokens": 19_752,
        "cost_usd": pytest.approx(2 * COST),
    }


def test_a_cost_that_the_reply_reports_wins_over_the_table(stage: Callable[..., Stage]) -> None:
    used = USED | {"cost": 0.25}
    one = stage([say("a", usage=used), {"text": "b", "usage": used}], tools=[echo], prices=PRICED)
    assert one.run().usage["cost_usd"] == pytest.approx(0.5)
    assert [event["cost_usd"] for event in one.of("usage")] == [0.25, 0.25]


def test_a_reported_cost_needs_no_table(stage: Callable[..., Stage]) -> None:
    one = stage([{"text": "a", "usage": USED | {"cost": 0.0625}}])
    assert one.run().usage["cost_usd"] == 0.0625


@pytest.mark.parametrize(
    ("told", "cost"),
    [
        pytest.param("0.5", 2e-5, id="in a string"),
        pytest.param(0, 0.0, id="nothing"),
        pytest.param(-1, 2e-5, id="below zero"),
        pytest.param("much", 2e-5, id="words"),
        pytest.param({"total": 1}, 2e-5, id="a table"),
        pytest.param(True, 2e-5, id="yes"),
    ],
)
def test_a_cost_that_is_no_amount_is_none(
    stage: Callable[..., Stage], told: Any, cost: float
) -> None:
    one = stage([{"text": "a", "usage": counts(10, 1, cost=told)}], prices=PRICED)
    assert one.run().usage["cost_usd"] == pytest.approx(cost)


@pytest.mark.parametrize(
    ("used", "cached", "guessed"),
    [
        pytest.param(counts(100, 5, prompt_tokens_details={"cached_tokens": 900}), 100, False),
        pytest.param(counts(100, 5, prompt_tokens_details={"cached_tokens": -1}), 0, False),
        pytest.param(counts(100, 5, prompt_tokens_details=["x"]), 0, False),
        pytest.param(counts(100, True), 0, True),
        pytest.param({"prompt_tokens": -5, "completion_tokens": "7"}, 0, True),
        pytest.param({"prompt_tokens": 1e30, "completion_tokens": None}, 0, True),
    ],
)
def test_counts_that_can_not_be_are_none(
    stage: Callable[..., Stage], used: Any, cached: int, guessed: bool
) -> None:
    one = stage([{"text": "a", "usage": used}], prices=PRICED)
    assert (one.run().usage["cached_tokens"], one.of("usage")[0]["estimated"]) == (cached, guessed)


def test_a_reported_cost_uses_a_budget_up(stage: Callable[..., Stage]) -> None:
    step = say("a", usage=counts(1, 1, cost=0.75))
    one = stage([step, "report"], tools=[echo], prices=PRICED, max_budget_usd=0.5)
    assert (one.run().exit_code, one.marks()) == (53, [0, 1])


def test_zeros_of_a_server_that_does_not_count_are_estimated(stage: Callable[..., Stage]) -> None:
    one = stage([{"text": "a", "usage": counts(0, 0)}])
    used = one.run().usage
    assert (one.of("usage")[0]["estimated"], used["prompt_tokens"] > 0) == (True, True)


def test_an_unknown_price_is_none_and_never_zero(stage: Callable[..., Stage]) -> None:
    one = stage([{"text": "a", "usage": USED}], prices={"another": (1.0, 1.0, 1.0)})
    result = one.run()
    assert (result.status, result.usage["cost_usd"]) == ("done", None)
    assert [event["cost_usd"] for event in one.of("usage")] == [None]
    assert '"cost_usd": null' in json.dumps(one.of("result")[0]["usage"])


@pytest.mark.parametrize(
    ("pricing", "cost"),
    [
        pytest.param({"prompt": "0.000002", "completion": "0.00001"}, 0.003, id="text"),
        pytest.param(
            {"prompt": "0.000002", "completion": "0.00001", "input_cache_read": "0.000001"},
            0.003,
            id="with a price of what is cached",
            marks=LONG,
        ),
        pytest.param({"prompt": "0", "completion": "0"}, 0.0, id="for nothing"),
        pytest.param(
            {"prompt": "2e-06", "completion": "1e-05", "image": "x"}, 0.003, id="more", marks=LONG
        ),
    ],
)
def test_the_list_of_models_may_tell_the_price(tmp_path: Path, pricing: Any, cost: float) -> None:
    with Shop(model_row({"prompt": "9", "completion": "9"}, "zoo"), model_row(pricing)) as shop:
        code, _, usage = outcome(shopping(shop.url, tmp_path, max_budget_usd=1.0))
    assert (code, len(shop.chats), usage["cost_usd"]) == (0, 1, pytest.approx(cost))


@pytest.mark.parametrize(
    "pricing",
    [
        pytest.param(None, id="none"),
        pytest.param({}, id="empty", marks=LONG),
        pytest.param({"prompt": "-1", "completion": "-1"}, id="it depends"),
        pytest.param({"prompt": "0.1"}, id="half of it", marks=LONG),
        pytest.param({"prompt": "nan", "completion": "inf"}, id="no numbers", marks=LONG),
        pytest.param({"prompt": "much", "completion": None}, id="words"),
        pytest.param(["0.1", "0.2"], id="a list", marks=LONG),
    ],
)
def test_a_price_that_nobody_tells_is_refused_before_any_chat_with_a_budget_and_not_without(
    tmp_path: Path, pricing: Any
) -> None:
    with Shop(model_row(pricing)) as shop:
        code, said, _ = outcome(shopping(shop.url, tmp_path, max_budget_usd=1.0))
        assert (code, shop.chats, '[prices."flaky-1"]' in said) == (2, [], True)
        free = outcome(shopping(shop.url, tmp_path))
        named = outcome(shopping(shop.url, tmp_path, max_budget_usd=1.0, prices=PRICED))
    assert (free[0], free[2]["cost_usd"]) == (0, None)
    assert (named[0], named[2]["cost_usd"]) == (0, pytest.approx(0.002))


def test_the_config_wins_over_the_list_of_models(tmp_path: Path) -> None:
    with Shop(model_row({"prompt": "9", "completion": "9"})) as shop:
        code, _, usage = outcome(shopping(shop.url, tmp_path, max_budget_usd=1.0, prices=PRICED))
    assert (code, usage["cost_usd"]) == (0, pytest.approx(0.002))


def test_another_model_without_a_price_is_not_asked_under_a_budget(
    stage: Callable[..., Stage],
) -> None:
    one = stage(["one", "two"], max_budget_usd=1.0, prices=PRICED)
    assert one.run().exit_code == 0
    try:
        one.agent.set_model("other")
        code, said = one.run().exit_code, errors_of(one)[-1]
    except UsageError as error:
        code, said = error.exit_code, str(error)
    assert (code, '[prices."other"]' in said) == (2, True)
    assert [request["model"] for request in one.server.requests] == ["flaky-1"]


@LONG
def test_a_money_budget_with_an_unknown_price_is_a_usage_error(run_agent):
    with FlakyServer(["never"]) as server:
        done = run_agent("--max-budget-usd", "1", "hi", server=server)
        odd = run_agent("--max-budget-usd", "1", "-m", 'a"b/c', "hi", server=server)
    assert (done.returncode, done.stdout, server.requests) == (2, "", [])
    assert '[prices."flaky-1"]' in done.stderr
    assert (odd.returncode, r'[prices."a\"b/c"]' in odd.stderr) == (2, True)


@LONG
def test_a_money_budget_with_a_price_in_the_config_works(run_agent, config):
    with FlakyServer([{"text": "ok", "usage": USED}] * 2) as server:
        done = run_agent("--max-budget-usd", "1", "--json", "hi", server=server)
        config.write_text("")
        free = run_agent("--json", "hi", server=server)
    first, second = (
        {event["type"]: event for event in map(json.loads, run.stdout.splitlines())}
        for run in (done, free)
    )
    assert (done.returncode, first["usage"]["cost_usd"]) == (0, pytest.approx(COST))
    assert first["result"]["usage"]["cost_usd"] == pytest.approx(COST)
    assert (second["usage"]["cost_usd"], second["result"]["usage"]["cost_usd"]) == (None, None)


# -- values that are none ------------------------------------------------------------------------


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., Settings]:
    """Load settings with a home folder of its own; config is the text of its file."""

    def run(*argv: str, config: str = "") -> Settings:
        folder = tmp_path / ".config" / "agent"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(config)
        return load(list(argv), {"HOME": str(tmp_path)})[0]

    return run


@pytest.mark.parametrize("value", ["0", "-1", "many", "nan", ""])
@pytest.mark.parametrize("flag", ["--max-tokens-total", "--max-budget-usd", "--timeout"])
def test_a_budget_that_is_no_number_above_zero_is_refused(
    loaded: Callable[..., Settings], flag: str, value: str
) -> None:
    with pytest.raises((UsageError, SystemExit)) as caught:
        loaded(f"{flag}={value}", "hi")
    assert getattr(caught.value, "exit_code", getattr(caught.value, "code", 0)) == 2


def test_half_a_token_is_refused_and_half_a_second_is_not(
    loaded: Callable[..., Settings],
) -> None:
    with pytest.raises((UsageError, SystemExit)):
        loaded("--max-tokens-total=1.5", "hi")
    known = loaded("--timeout=0.5", "--max-budget-usd=0.01", "--max-tokens-total=7", "hi")
    assert (known.timeout, known.max_budget_usd, known.max_tokens_total) == (0.5, 0.01, 7)
    none = loaded("hi")
    assert (none.timeout, none.max_budget_usd, none.max_tokens_total, none.check) == (0, 0, 0, "")


@pytest.mark.parametrize("value", [-1, float("nan"), "1", True, None])
@pytest.mark.parametrize("name", ["max_tokens_total", "max_budget_usd", "timeout"])
def test_settings_refuse_a_budget_that_is_none(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        Settings(**{name: value})


def test_prices_are_read_and_cached_is_input_where_nothing_is_said(
    loaded: Callable[..., Settings],
) -> None:
    text = '[prices."a/b:free"]\ninput = 2\noutput = 8.5\n' + CONFIG
    assert dict(loaded("hi", config=text).prices) == {
        "a/b:free": (2.0, 2.0, 8.5),
        "flaky-1": (1.0, 0.25, 10.0),
    }
    assert dict(loaded("--bare", "hi", config=text).prices) == {}
    assert dict(loaded("hi").prices) == {}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("prices = 1", id="a number"),
        pytest.param("prices = []", id="a list"),
        pytest.param("[prices]\nm = 1", id="one number for a model"),
        pytest.param("[prices.m]\ninput = '1'\noutput = 1", id="text"),
        pytest.param("[prices.m]\ninput = true\noutput = 1", id="yes"),
        pytest.param("[prices.m]\ninput = -1\noutput = 1", id="below zero"),
        pytest.param("[prices.m]\ninput = nan\noutput = 1", id="no number"),
        pytest.param("[prices.m]\ninput = 1\noutput = inf", id="without end"),
        pytest.param("[prices.m]\ninput = 1\noutput = 1\ncashed = 1", id="unknown key"),
        pytest.param("[prices.m]\ninput = 1", id="nothing for output"),
        pytest.param("[prices.m]\noutput = 1", id="nothing for input"),
    ],
)
def test_prices_that_are_none_are_refused_by_name(
    loaded: Callable[..., Settings], text: str
) -> None:
    with pytest.raises(UsageError, match=r"config\.toml: .*prices"):
        loaded("hi", config=text)


# -- the check -----------------------------------------------------------------------------------


COUNTED = "echo x >> ran; "


def ran(one: Stage) -> int:
    """How often the check was run."""
    path = one.root / "ran"
    return len(path.read_text().split()) if path.exists() else 0


def test_a_check_that_passes_is_a_success(stage: Callable[..., Stage]) -> None:
    one = stage(["done", "never"], check=f"{COUNTED}true")
    result = one.run()
    assert (result.status, result.exit_code, result.text, ran(one)) == ("done", 0, "done", 1)
    assert len(one.server.requests) == 1


def test_a_check_that_fails_goes_back_until_the_model_has_mended_it(
    stage: Callable[..., Stage],
) -> None:
    check = f"{COUNTED}test -f fixed || {{ echo no file is fixed; exit 4; }}"
    one = stage(["done", write("fixed"), "really done", "never"], check=check)
    result = one.run()
    assert (result.status, result.exit_code, result.text) == ("done", 0, "really done")
    assert (ran(one), len(one.server.requests)) == (2, 3)
    told = one.server.requests[1]["messages"][-1]
    assert (told["role"], "no file is fixed" in told["content"]) == ("user", True)
    notices = [data["text"] for data in one.of("notice")]
    failed = "--check failed:\nno file is fixed\n[exit code 4]"
    assert notices == [runs := f"--check runs: {check}", failed, runs, "--check passed"]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("echo broken; false", id="it fails", marks=LONG),
        pytest.param("echo broken; no-such-program-of-ours", id="a program that is missing"),
        pytest.param("echo broken; kill -9 $$", id="a signal", marks=LONG),
    ],
)
def test_a_check_that_never_passes_is_a_3(stage: Callable[..., Stage], command: str) -> None:
    one = stage(itertools.repeat("done"), check=command, max_turns=3)
    result = one.run()
    assert (result.status, result.exit_code) == ("check_failed", 3)
    assert "broken" in one.server.requests[1]["messages"][-1]["content"]
    assert one.of("result")[0]["status"] == "check_failed"


@LONG
def test_json_tells_that_the_check_failed(run_agent):
    with FlakyServer(["done"] * 4) as server:
        done = run_agent(
            "--output-format", "json", "--max-turns", "2", "--check", "false", "hi", server=server
        )
    told = json.loads(done.stdout)
    assert (done.returncode, told["status"], told["exit_code"]) == (3, "check_failed", 3)


@LONG
def test_stdout_of_a_check_is_not_stdout_of_the_run(run_agent, workspace):
    with FlakyServer(["done", write("fixed"), "mended"]) as server:
        check = "echo noise; echo more >&2; test -f fixed"
        done = run_agent("--yes", "--check", check, "hi", server=server)
    assert (done.returncode, done.stdout) == (0, "mended\n")
    assert "noise" in prompts(server.requests[1])[-1]


def test_what_a_check_prints_goes_back_clipped(stage: Callable[..., Stage]) -> None:
    check = "echo HEAD; yes lines | head -c 300000; echo TAIL; false"
    one = stage(itertools.repeat("done"), check=check, max_turns=2)
    assert one.run().exit_code == 3
    told = one.server.requests[1]["messages"][-1]["content"]
    assert ("HEAD" in told, "TAIL" in told, 1_000 < len(told) < 22_000) == (True, True, True)


def test_no_rule_and_no_mode_keeps_the_users_own_check_from_running(
    stage: Callable[..., Stage],
) -> None:
    one = stage([shell("touch forbidden"), "done"], mode="plan", deny=("bash *",), check=COUNTED)
    result = one.run()
    assert (result.status, result.exit_code, ran(one)) == ("done", 0, 1)
    assert not (one.root / "forbidden").exists()
    assert [event["name"] for event in one.of("tool_use")] == ["bash"]


def test_a_check_may_fail_often_while_the_model_works(
    stage: Callable[..., Stage],
) -> None:
    steps = [step for name in "abcd" for step in ("done", write(name))]
    one = stage([*steps, "really done"], check="test -f d")
    assert one.run().text == "really done"


def test_what_a_check_said_is_saved_before_it_is_sent(stage: Callable[..., Stage]) -> None:
    def second(request: Any) -> str:
        [path] = (one.root / ".agent" / "sessions").glob("*.json")
        saved = json.loads(path.read_bytes())["messages"][-1]["content"]
        assert saved == request["messages"][-1]["content"]
        return "done"

    one = stage(["done", second, *["done"] * 4, "never"], check="false")
    assert (one.run().exit_code, len(one.server.requests)) == (3, 6)


def test_a_check_has_a_minute_however_short_the_timeout_is(stage: Callable[..., Stage]) -> None:
    one = stage(["done", "report"], check="sleep 0.5; echo x > late", timeout=0.3)
    assert (one.run().exit_code, (one.root / "late").exists()) == (0, True)


def test_what_a_check_prints_is_masked(stage: Callable[..., Stage]) -> None:
    environ = {"PATH": os.environ["PATH"], "MY_TOKEN": "sk-zebra-0123456789abcdef"}
    check = "echo sk-zebra-01234567'89abcdef'; false"
    one = stage(itertools.repeat("done"), check=check, max_turns=2, environ=environ)
    assert one.run().exit_code == 3
    told = one.server.requests[1]["messages"][-1]["content"]
    assert ("[masked]" in told, "zebra-0123456789" in told) == (True, False)


def test_each_prompt_has_its_verdict(stage: Callable[..., Stage]) -> None:
    one = stage(["one", "two", "report"], check="test ! -f broken", max_turns=1)
    assert one.run().exit_code == 0
    (one.root / "broken").write_text("")
    assert one.run().exit_code == 3


WEAKER = [
    pytest.param([say("a"), "report"], {"max_turns": 1}, id="a budget"),
    pytest.param([say("a"), "report"], {"max_tokens_total": 1}, id="tokens", marks=LONG),
    pytest.param([write("a"), "done", "done"], {"mode": "ask", "max_turns": 2}, id="a denial"),
    pytest.param([say("a")] * 9, {}, id="a loop", marks=LONG),
    pytest.param([{"fault": "empty_reply"}] * 9, {}, id="empty replies", marks=LONG),
]


@pytest.mark.parametrize(
    ("check", "ended"), [("true", ("done", 0)), ("false", ("check_failed", 3))]
)
@pytest.mark.parametrize(("script", "more"), WEAKER)
def test_the_verdict_is_stronger_than_how_the_model_ended(
    stage: Callable[..., Stage], script: Any, more: Any, check: str, ended: tuple[str, int]
) -> None:
    one = stage([*script, *["done"] * 9], tools=[echo], check=check, **more)
    result = one.run()
    assert (result.status, result.exit_code) == ended
    assert len(result.denied) == (more.get("mode") == "ask")


@tool(needs="read")
def interrupt() -> str:
    """As if somebody pressed Ctrl-C."""
    signal.raise_signal(signal.SIGINT)
    return "never"


STRONGER = [
    pytest.param({"status": 401, "body": {"error": {"message": "bad key"}}}, 41, id="key"),
    pytest.param({"status": 429, "headers": AT_ONCE, "times": 9}, 75, id="later", marks=LONG),
    pytest.param(
        {"status": 404, "body": {"error": {"message": "no model"}}}, 1, id="error", marks=LONG
    ),
    pytest.param({"call": "interrupt", "arguments": {}}, 130, id="interrupted"),
]


@pytest.mark.parametrize("check", ["true", pytest.param("false", marks=LONG)])
@pytest.mark.parametrize(("step", "code"), STRONGER)
def test_the_verdict_does_not_hide_that_the_run_could_not_end(
    stage: Callable[..., Stage], step: Any, code: int, check: str
) -> None:
    one = stage([say("a"), step], tools=[echo, interrupt], check=check)
    assert one.run().exit_code == code


@LONG
def test_a_check_that_hangs_is_ended_by_the_timeout(stage: Callable[..., Stage]) -> None:
    one = stage(itertools.repeat("done"), check=f"echo hung; sleep {NAP}", timeout=2.0)
    one.agent.budgets.check_seconds = 2
    result = one.run()
    assert (result.status, result.exit_code) == ("check_failed", 3)
    assert sum(one.marks()) <= 1
    until(lambda: not alive(NAP))


def test_ctrl_c_in_a_check_gives_the_prompt_back(terminal, workspace):
    with FlakyServer(["done"]) as server:
        screen = terminal("--check", f"touch began; sleep {NAP}", server=server)
        screen.prompt()
        screen.send("work\r")
        screen.expect("--check runs: touch began")
        until((workspace / "began").exists)
        screen.interrupt()
        assert "(cancelled)" in screen.prompt()
        screen.send("exit\r")
        assert (screen.wait(), alive(NAP)) == (0, [])


@LONG
def test_ctrl_c_in_a_check_is_130_and_leaves_nothing(start_agent, workspace):
    with FlakyServer(["done"]) as server:
        agent = start_agent("--check", f"touch began; sleep {NAP}", "hi", server=server)
        until((workspace / "began").exists)
        agent.send_signal(signal.SIGINT)
        agent.communicate(timeout=60)
    assert agent.returncode == 130
    until(lambda: not alive(NAP))


# -- what it cost, as a person sees it -----------------------------------------------------------


def test_the_line_after_a_turn_and_the_status_tell_what_was_used(terminal, config):
    with FlakyServer([{"text": "PONG", "usage": USED}] * 2) as server:
        screen = terminal("--context", "100000", server=server)
        for _ in range(2):
            screen.prompt()
            screen.send("ping\r")
            screen.expect("PONG")
            shown = screen.match(re.compile(r"tokens: [^\r\n]*[\r\n]"))
            line = shown[shown.index("tokens: ") :].rstrip()
            assert line.startswith("tokens: 12,345 in (80 % cached), 1,234 out; window ")
            assert line.endswith(f"; ${COST:.4f}") and "~" not in line
        screen.prompt()
        screen.send("/status\r")
        status = screen.prompt()
        screen.send("exit\r")
        assert screen.wait() == 0
    wanted = ["24,690 in (80 % cached)", "2,468 out", "window ", f"${2 * COST:.4f}"]
    assert [text for text in wanted if text not in status] == []


def test_a_count_that_is_larger_than_the_window_is_not_shown_as_its_use(run_agent):
    with FlakyServer([{"text": "ok", "usage": {"prompt_tokens": 1_000_000}}]) as server:
        done = run_agent("--context", "100000", "hi", server=server)
    assert re.search(r"tokens: 1,000,000 in .*; window ~[1-9] %;", usage_line(done.stderr))


@LONG
def test_one_line_on_stderr_says_what_a_run_used(run_agent, config):
    with FlakyServer([{"text": "ok", "usage": USED}] * 2) as server:
        done = run_agent("--context", "100000", "hi", server=server)
        config.write_text("")
        free = run_agent("--context", "100000", "hi", server=server)
    assert (done.stdout, free.stdout) == ("ok\n", "ok\n")
    known, unknown = usage_line(done.stderr), usage_line(free.stderr)
    assert re.fullmatch(
        r"tokens: 12,345 in \(80 % cached\), 1,234 out; window 1[0-9] %; \$0\.0173", known
    )
    assert known.split("; $")[0] == unknown.split("; unpriced")[0]
    assert ("$" in unknown, unknown.endswith("; unpriced")) == (False, True)


@LONG
def test_what_the_server_does_not_tell_is_marked_as_an_estimate(run_agent, config):
    raw = 'data: {"choices":[{"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\n'
    with FlakyServer([{"raw": raw}, {"raw": raw}, {"text": "ok", "usage": USED}]) as server:
        guessed = run_agent("--context", "100000", "hi", server=server)
        events = run_agent("--context", "100000", "--json", "hi", server=server)
        told = run_agent("--context", "100000", "hi", server=server)
    usage = next(e for e in map(json.loads, events.stdout.splitlines()) if e["type"] == "usage")
    assert ("~" in usage_line(guessed.stderr), usage["estimated"]) == (True, True)
    assert "~" not in usage_line(told.stderr)


@LONG
def test_the_status_of_a_resumed_session_counts_what_was_used_before(terminal, run_agent, config):
    with FlakyServer([{"text": "PONG", "usage": USED}] * 2) as server:
        run_agent("--context", "100000", "ping", server=server)
        screen = terminal("--context", "100000", "--resume", server=server)
        screen.prompt()
        screen.send("ping\r")
        screen.expect("PONG")
        screen.prompt()
        screen.send("/status\r")
        status = screen.prompt()
        screen.send("exit\r")
        assert screen.wait() == 0
    assert "24,690 in" in status and "2,468 out" in status


def test_the_usage_of_a_result_is_the_sum_of_its_events(stage: Callable[..., Stage]) -> None:
    steps = [say("a", usage=counts(100, 7)), say("b", usage=counts(200, 5, cost=0.5))]
    end = {"text": "c", "usage": counts(300, 3)}
    one = stage([*steps, end], tools=[echo], prices={"flaky-1": (1.0, 1.0, 1.0)})
    usage = one.run().usage
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd"):
        assert usage[name] == pytest.approx(sum(event[name] for event in one.of("usage")))
    assert usage["prompt_tokens"] == 600
    assert usage["cost_usd"] == pytest.approx(0.5 + 410e-6)


@pytest.mark.parametrize(
    ("total", "cost"),
    [({}, None), ({"cost_usd": 0.5}, 0.5), ({"cost_usd": 0.5, "unpriced": 1}, None)],
)
def test_the_cost_of_a_run_is_told_only_when_all_of_it_has_a_price(total, cost):
    counted = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
    assert told_usage(total) == counted | {"cost_usd": cost}
