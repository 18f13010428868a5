"""The agent on a real terminal: a pty, typed keys, Ctrl-C and the screen."""

import argparse
import dataclasses
import io
import json
import os
import random
import re
import signal
import stat
import string
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from conftest import (
    KEY,
    NAP,
    Terminal,
    alive,
    prompts,
    put_session,
    results,
    roles,
    session_files,
    talk,
    until,
)
from test_providers import Routes, listing

import agent
from agent import (
    COMMANDS,
    PROVIDERS,
    Agent,
    Always,
    Person,
    Question,
    Repl,
    Screen,
    Settings,
    build_agent,
    load,
)
from flaky_server import FlakyServer

HINT = re.compile(r"[Cc]trl-[CD]|exit")
CUT = "[cut by the user]"
NOT_STARTED = "cancelled by the user before it ran"


def call(name: str, **arguments: object) -> dict:
    """A script step in which the model calls one tool."""
    return {"call": name, "arguments": arguments}


def batch(*steps: dict) -> dict:
    """A script step in which the model makes several calls at once."""
    return {"calls": [{"name": step["call"], "arguments": step["arguments"]} for step in steps]}


def ask(screen, text: str) -> None:
    """Type a prompt at the prompt."""
    screen.prompt()
    screen.send(text + "\r")


def leave(screen) -> None:
    """Leave at the prompt and see that the terminal is as it was."""
    ask(screen, "exit")
    assert (screen.wait(), termios.tcgetattr(screen.slave)) == (0, screen.settings)


def test_a_question_is_answered_at_the_prompt(terminal):
    with FlakyServer(["PONG", "PANG"]) as server:
        screen = terminal(server=server)
        ask(screen, "ping")
        screen.expect("PONG")
        ask(screen, "pang?")
        screen.expect("PANG")
        leave(screen)
    assert prompts(server.requests[1]) == ["ping", "pang?"]


def test_text_streams_as_it_comes(terminal):
    with FlakyServer([{"text": "alpha beta gamma delta epsilon zeta", "hold_after": 2}]) as server:
        screen = terminal(server=server)
        ask(screen, "letters")
        until(server.holding.is_set)
        screen.expect("alpha")
        assert "epsilon" not in screen.text
        server.release()
        screen.expect("epsilon")
        leave(screen)


def test_a_prompt_on_the_command_line_of_a_terminal_is_answered_and_ends(terminal):
    with FlakyServer(["PONG"]) as server:
        screen = terminal("ping", server=server)
        screen.expect("PONG")
        assert (screen.wait(), prompts(server.requests[0])) == (0, ["ping"])
    assert termios.tcgetattr(screen.slave) == screen.settings


def test_a_session_is_resumed_at_the_prompt(terminal, workspace):
    put_session(workspace, "20260101-100000-aaaa", talk("first?", "first."))
    with FlakyServer(["PONG"]) as server:
        screen = terminal("--resume", server=server)
        ask(screen, "go on")
        screen.expect("PONG")
        leave(screen)
    assert (prompts(server.requests[0]), len(session_files(workspace))) == (["first?", "go on"], 1)


# -- Ctrl-C --------------------------------------------------------------------------------------


def test_ctrl_c_while_the_model_streams_keeps_what_it_said(terminal):
    with FlakyServer([{"text": "one two three four five six", "hold_after": 3}, "PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, "count")
        until(server.holding.is_set)
        screen.expect("one")
        screen.interrupt()
        ask(screen, "ping")
        screen.expect("PONG")
        leave(screen)
    said = server.requests[1]["messages"][2]["content"]
    assert roles(server.requests[1]) == ["system", "user", "assistant", "user"]
    assert said.startswith("one") and said.endswith(CUT) and "six" not in said


def test_ctrl_c_before_the_first_word_adds_no_reply(terminal):
    with FlakyServer([{"text": "one two three", "hold": "before"}, "PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, "count")
        until(server.holding.is_set)
        screen.interrupt()
        ask(screen, "ping")
        screen.expect("PONG")
        leave(screen)
    assert "assistant" not in roles(server.requests[1])
    assert "count" in prompts(server.requests[1])[0] and "ping" in prompts(server.requests[1])[-1]


def test_ctrl_c_in_the_middle_of_a_call_does_not_run_it(terminal, workspace):
    step = call("write_file", path="a.txt", content="some words to be written") | {"hold_after": 1}
    with FlakyServer([step, "PONG"]) as server:
        screen = terminal("--mode", "auto", server=server)
        ask(screen, "write")
        until(server.holding.is_set)
        screen.interrupt()
        ask(screen, "ping")
        screen.expect("PONG")
        leave(screen)
    assert (results(server.requests[1]), (workspace / "a.txt").exists()) == ([], False)


def test_ctrl_c_while_a_command_runs_ends_it_and_cancels_the_rest(terminal, workspace):
    step = batch(
        call("bash", command=f"echo begun; sleep {NAP} & sleep {NAP}"),
        call("bash", command="touch second.txt"),
        call("read_file", path="third.txt"),
    )
    with FlakyServer([step, "PONG"]) as server:
        screen = terminal("--mode", "auto", server=server)
        ask(screen, "run")
        until(lambda: len(alive(NAP)) >= 2)
        screen.interrupt()
        ask(screen, "ping")
        screen.expect("PONG")
        assert alive(NAP) == []
        leave(screen)
    first, second, third = results(server.requests[1])
    assert "begun" in first and "not run" not in first
    assert (second, third) == (NOT_STARTED, NOT_STARTED)
    assert not (workspace / "second.txt").exists()


def test_ctrl_c_ends_a_command_that_ignores_it(terminal):
    command = f"trap '' INT TERM HUP; echo begun; sleep {NAP}; sleep {NAP}; echo never"
    with FlakyServer([call("bash", command=command), "PONG"]) as server:
        screen = terminal("--mode", "auto", server=server)
        ask(screen, "run")
        until(lambda: alive(f"sleep\0{NAP}"))
        screen.interrupt()
        ask(screen, "ping")
        screen.expect("PONG")
        assert alive(NAP) == []
        leave(screen)
    assert "begun" in results(server.requests[1])[0]


def test_ctrl_c_twice_in_a_row_while_a_command_runs_harms_nothing(terminal, run_agent, workspace):
    step = batch(call("bash", command=f"sleep {NAP}"), call("bash", command="touch b.txt"))
    with FlakyServer([step, "PONG"]) as server:
        screen = terminal("--mode", "auto", server=server)
        ask(screen, "run")
        until(lambda: alive(NAP))
        screen.send("\x03\x03")
        until(lambda: not alive(NAP))
        screen.close()
        done = run_agent("--resume", "ping", server=server)
    assert (done.stdout, len(results(server.requests[1]))) == ("PONG\n", 2)
    assert not (workspace / "b.txt").exists()


STUBBORN = f"trap 'touch asked' TERM; trap '' INT; echo begun; while :; do sleep {NAP}; done"


def interrupt_twice(screen, workspace: Path) -> None:
    """Ctrl-C while a command runs, and once more while it does not want to end."""
    until(lambda: alive(f"sleep\0{NAP}"))
    screen.interrupt()
    until((workspace / "asked").exists)
    screen.interrupt()


def test_a_second_ctrl_c_leaves_nothing_of_a_command_that_does_not_want_to_end(terminal, workspace):
    with FlakyServer([call("bash", command=STUBBORN), "PONG"]) as server:
        screen = terminal("--mode", "auto", server=server)
        ask(screen, "run")
        interrupt_twice(screen, workspace)
        ask(screen, "ping")
        screen.expect("PONG")
        assert alive(NAP) == []
        leave(screen)
    lines = results(server.requests[1])[0].splitlines()
    assert (lines[0], lines[-1][:25]) == ("begun", "[interrupted by the user;")


def test_a_second_ctrl_c_leaves_nothing_of_a_command_of_the_user(terminal, workspace):
    with FlakyServer(["PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, f"!{STUBBORN}")
        interrupt_twice(screen, workspace)
        ask(screen, "ping")
        screen.expect("PONG")
        assert alive(NAP) == []
        leave(screen)
    lines = prompts(server.requests[0])[-1].splitlines()
    assert lines[:2] == [f"[the user ran: {STUBBORN}]", "begun"]
    assert lines[-3:] == ["[interrupted]", "", "ping"]


def working(request: dict) -> dict | str:
    """A model that appends its number, twice a prompt, and answers anything but `go` with PONG."""
    last = [m["content"] for m in request["messages"] if m["role"] == "user"][-1]
    number = len(results(request))
    if last != "go":
        return "PONG"
    if request["messages"][-1]["role"] == "tool" and number % 4 == 0:
        return "a few words to stream at the end"
    names = [f"echo {n} >> effects.txt; sleep 0.03" for n in (number, number + 1)]
    return batch(*(call("bash", command=name) for name in names))


def interrupt_at_random(screen, server, workspace: Path, count: int) -> None:
    """Ctrl-C at random moments of a turn; each gives the prompt back and tells no lie."""
    seed = int(os.environ.get("KILL_SEED", random.randrange(1_000_000)))
    print(f"KILL_SEED={seed}")
    chance = random.Random(seed)
    screen.prompt()
    for _ in range(count):
        before = len(server.requests)
        screen.send("go\r")
        until(lambda before=before: len(server.requests) > before)
        time.sleep(chance.uniform(0, 0.3))
        screen.interrupt()
        screen.settle()  # The turn may have been over: then there are two prompts.
    screen.send("ping\r")
    screen.expect("PONG")
    leave(screen)
    written = workspace / "effects.txt"
    effects = written.read_text().split() if written.exists() else []
    texts = dict(zip(map(str, range(1000)), results(server.requests[-1]), strict=False))
    assert [n for n in effects if re.search("not run|before it ran", texts[n])] == []


def test_ctrl_c_at_three_random_moments(terminal, workspace):
    with FlakyServer([working] * 99) as server:
        interrupt_at_random(terminal("--mode", "auto", server=server), server, workspace, 3)


@pytest.mark.long
def test_ctrl_c_at_thirty_random_moments(terminal, workspace):
    with FlakyServer([working] * 999) as server:
        interrupt_at_random(terminal("--mode", "auto", server=server), server, workspace, 30)


def test_ctrl_c_at_the_permission_question_cancels_the_calls(terminal, workspace):
    step = batch(call("write_file", path="a.txt", content="a"), call("bash", command="touch b.txt"))
    with FlakyServer([step, "PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, "write")
        screen.question()
        screen.interrupt()
        ask(screen, "ping")
        screen.expect("PONG")
        leave(screen)
    first, second = results(server.requests[1])
    assert first == NOT_STARTED or first.startswith("denied: ")
    assert (second, (workspace / "a.txt").exists(), (workspace / "b.txt").exists()) == (
        NOT_STARTED,
        False,
        False,
    )


def test_ctrl_c_during_a_retry_wait_gives_the_prompt_back(terminal):
    step = {
        "status": 429,
        "headers": {"Retry-After": "30"},
        "body": {"error": {"message": "later"}},
    }
    with FlakyServer([step, "PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, "hi")
        screen.expect("30")
        screen.interrupt()
        screen.prompt(25)  # less than the wait
        screen.send("ping\r")
        screen.expect("PONG")
        leave(screen)
    assert (server.replies, "assistant" in roles(server.requests[1])) == ([429, 200], False)


def test_ctrl_c_twice_at_the_empty_prompt_leaves_and_says_how_to_come_back(terminal, workspace):
    with FlakyServer(["PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, "ping")
        screen.expect("PONG")
        screen.prompt()
        screen.interrupt()
        assert HINT.search(screen.prompt())
        screen.interrupt()
        assert screen.wait() in (0, 130)
    assert f"agent --resume {session_files(workspace)[0].stem}" in screen.text
    assert termios.tcgetattr(screen.slave) == screen.settings


def test_ctrl_c_clears_a_draft_and_does_not_leave(terminal):
    with FlakyServer(["PONG"]) as server:
        screen = terminal(server=server)
        screen.prompt()
        screen.send("a draft")
        screen.expect("a draft")
        screen.listens()
        screen.interrupt()
        ask(screen, "ping")
        screen.expect("PONG")
        leave(screen)
    assert prompts(server.requests[0]) == ["ping"]


@pytest.mark.parametrize(
    "keys", ["exit\r", "/exit\r", "\x04"], ids=["exit", "slash exit", "ctrl-d"]
)
def test_leaving_says_how_to_come_back(terminal, workspace, keys):
    with FlakyServer(["PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, "ping")
        screen.expect("PONG")
        screen.prompt()
        screen.send(keys)
        assert screen.wait() == 0
    assert f"agent --resume {session_files(workspace)[0].stem}" in screen.text
    assert (termios.tcgetattr(screen.slave), len(server.requests)) == (screen.settings, 1)


def test_a_closed_window_ends_the_agent_and_its_command(terminal, workspace):
    with FlakyServer([call("bash", command=f"echo begun; sleep {NAP}")]) as server:
        screen = terminal("--mode", "auto", server=server)
        ask(screen, "run")
        until(lambda: alive(NAP))
        screen.hang_up()
        assert screen.process.wait(60) in (129, -1)
        until(lambda: not alive(NAP), 30)
    [path] = session_files(workspace)
    [result] = results(json.loads(path.read_text()))
    assert "not run" not in result and result != "cancelled by the user before it ran"


def test_a_closed_window_at_the_prompt_ends_the_agent(terminal):
    with FlakyServer([]) as server:
        screen = terminal(server=server)
        screen.prompt()
        screen.hang_up()
        assert screen.process.wait(60) in (0, 129, -1)


def test_sigterm_at_the_prompt_gives_the_terminal_back(terminal):
    with FlakyServer([]) as server:
        screen = terminal(server=server)
        screen.prompt()
        screen.process.terminate()
        assert screen.wait() == 143
    assert termios.tcgetattr(screen.slave) == screen.settings


# -- permission ----------------------------------------------------------------------------------


def test_y_permits_what_was_shown(terminal, workspace):
    (workspace / "a.txt").write_text("kept\nold line\n")
    with FlakyServer(
        [call("write_file", path="a.txt", content="kept\nnew line\n"), "PONG"]
    ) as server:
        screen = terminal(server=server)
        ask(screen, "write")
        shown = screen.question()
        screen.send("y\r")
        screen.expect("PONG")
        leave(screen)
    assert "-old line" in shown and "+new line" in shown and "a.txt" in shown
    assert (workspace / "a.txt").read_text() == "kept\nnew line\n"


def test_an_edit_is_shown_as_a_diff_and_a_command_as_it_is(terminal, workspace):
    (workspace / "a.txt").write_text("kept\nold line\n")
    step = batch(
        call("edit_file", path="a.txt", old="old", new="new"),
        call("bash", command="touch b.txt # why"),
    )
    with FlakyServer([step, "PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, "edit")
        edit = screen.question()
        screen.send("yes\r")
        command = screen.question()
        screen.send("y\r")
        screen.expect("PONG")
        leave(screen)
    assert "-old line" in edit and "+new line" in edit
    assert "touch b.txt # why" in command
    assert (workspace / "a.txt").read_text() == "kept\nnew line\n" and (
        workspace / "b.txt"
    ).exists()


@pytest.mark.parametrize(
    "keys, reason",
    [
        pytest.param("n\r", "", id="n"),
        pytest.param("\r", "", id="nothing"),
        pytest.param("yikes\r", "yikes", id="begins with y"),
        pytest.param("use spaces, please\r", "use spaces, please", id="a reason"),
        pytest.param("\x04", "", id="end of file"),
    ],
)
def test_anything_but_yes_is_no(terminal, workspace, keys, reason):
    with FlakyServer([call("write_file", path="a.txt", content="a"), "PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, "write")
        screen.question()
        screen.send(keys)
        screen.expect("PONG")
        leave(screen)
    [result] = results(server.requests[1])
    assert (result[:8], reason in result, (workspace / "a.txt").exists()) == (
        "denied: ",
        True,
        False,
    )


def test_what_was_typed_before_the_question_does_not_answer_it(terminal, workspace):
    step = call("write_file", path="a.txt", content="a") | {"hold": "before"}
    with FlakyServer([step, "PONG", "PANG", "PANG"]) as server:
        screen = terminal(server=server)
        ask(screen, "write")
        until(server.holding.is_set)
        screen.send("y\r")
        screen.expect("y")
        server.release()
        screen.question()
        screen.send("n\r")
        screen.expect("PONG")
        screen.match(
            re.compile(r"[\r\n]> ")
        )  # What was typed too early may stand there as a draft.
    assert results(server.requests[1])[0].startswith("denied: ")
    assert not (workspace / "a.txt").exists()


@pytest.mark.parametrize(
    "keys, rule",
    [
        pytest.param(["a\r", "\r"], "bash touch *", id="Enter"),
        pytest.param(["a\r", "1\r"], "bash touch a.txt", id="a number"),
        pytest.param(["a\r", "bash touch ?.txt\r"], "bash touch ?.txt", id="typed"),
        pytest.param(["a\r", "bash *\r", "9\r", "2\r"], "bash touch *", id="refused"),
        pytest.param(["a\r", "n\r", "y\r"], "", id="given up"),
    ],
)
def test_a_keeps_a_rule_for_the_session(terminal, workspace, keys, rule):
    steps = [call("bash", command=f"touch {name}") for name in ("a.txt", "b.txt")]
    with FlakyServer([*steps, "PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, "touch")
        assert screen.question().endswith("[y/n/a] ")
        for key in keys:
            screen.send(key)
            screen.match(re.compile(r"(?:, n: |\[y/n/a\] )$|PONG"))
        if rule in ("", "bash touch a.txt"):  # the second one is asked again
            screen.send("n\r")
            screen.expect("PONG")
        leave(screen)
    rows = [json.loads(x) for x in (workspace / ".agent" / "audit.jsonl").read_text().splitlines()]
    wide = rule not in ("", "bash touch a.txt")
    assert (rows[0]["by"], rows[1]["rule"]) == (
        "person",
        rule if wide else "ask mode: touch is not known to only read",
    )
    assert [(workspace / name).exists() for name in ("a.txt", "b.txt")] == [True, wide]


def test_a_long_command_wants_a_whole_yes(terminal, workspace):
    with FlakyServer([call("bash", command="true\n" * 500 + "touch a.txt"), "PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, "touch")
        shown = screen.question()
        screen.send("y\r")
        screen.question()
        assert not (workspace / "a.txt").exists()
        screen.send("yes\r")
        screen.expect("PONG")
        leave(screen)
    assert "481 whole lines" in shown and "touch a.txt" in shown and shown.endswith("[yes/n/d] ")
    assert (workspace / "a.txt").exists()


def test_a_long_diff_is_shown_whole_on_d(terminal, workspace):
    content = "".join(f"line {n}.\n" for n in range(400))
    with FlakyServer([call("write_file", path="a.txt", content=content), "PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, "write")
        cut = screen.question()
        screen.send("d\r")
        whole = screen.question()
        screen.send("n\r")
        screen.expect("PONG")
        leave(screen)
    assert ("+line 200." in cut, "+line 399." in cut, "left out" in cut) == (False, True, True)
    assert [f"+line {n}." in whole for n in range(400)] == [True] * 400


def test_what_can_not_be_seen_is_shown(terminal):
    command = "echo a\u00a0\u202e\u3164\x1b[2K\r" + " " * 60 + "; touch a.txt"
    with FlakyServer([call("bash", command=command), "PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, "write")
        shown = screen.question()
        screen.send("n\r")
        screen.expect("PONG")
        leave(screen)
    assert r"echo a\u{a0}\u{202e}\u{3164}\u{1b}[2K\u{d}[60 blanks]; touch a.txt" in shown


@pytest.mark.parametrize(
    "keys",
    ["y\ry\r", "\x1b[200~y\r\x1b[201~", "\x1b[200~y\x1b[201~\r"],
    ids=["two lines", "marked line", "marked word"],
)
def test_a_paste_is_never_a_yes(terminal, workspace, keys):
    with FlakyServer([call("bash", command="touch a.txt"), "PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, "touch")
        screen.question()
        screen.send(keys)
        screen.expect("PONG")
        screen.process.terminate()
        screen.wait()
    assert results(server.requests[1])[0].startswith("denied: ")
    assert not (workspace / "a.txt").exists()


def test_one_shot_on_a_terminal_asks_too(terminal, workspace):
    with FlakyServer([call("bash", command="touch a.txt"), "PONG"]) as server:
        screen = terminal("do it", server=server)
        screen.question()
        screen.send("y\r")
        screen.expect("PONG")
        assert screen.wait() == 0
    assert (workspace / "a.txt").exists()


@pytest.mark.parametrize("flag", ["--yes", "-p", "--json"])
def test_a_flag_for_unattended_use_means_nobody_is_asked(terminal, flag):
    with FlakyServer([call("note", text="a line"), "PONG"]) as server:
        screen = terminal(flag, "hi", server=server)
        screen.expect("PONG")
        screen.wait()
    assert "not kept: nobody to confirm" in results(server.requests[1])[0]


@pytest.mark.parametrize("mode", ["ask", "auto"])
@pytest.mark.parametrize("answer, kept", [("y", True), ("n", False)], ids=["y", "n"])
def test_a_note_is_kept_only_after_a_yes(terminal, workspace, mode, answer, kept):
    with FlakyServer([call("note", text="tests run with make"), "PONG"]) as server:
        screen = terminal("--mode", mode, server=server)
        ask(screen, "note it")
        assert "tests run with make" in screen.question()
        screen.send(answer + "\r")
        screen.expect("PONG")
        leave(screen)
    notes = workspace / "AGENTS.md"
    assert (notes.exists() and "tests run with make" in notes.read_text()) == kept


def test_writing_agents_md_asks_a_human_even_in_auto_mode(terminal, workspace):
    with FlakyServer([call("write_file", path="AGENTS.md", content="obey\n"), "PONG"]) as server:
        screen = terminal("--mode", "auto", server=server)
        ask(screen, "write")
        assert "obey" in screen.question()
        screen.send("y\r")
        screen.expect("PONG")
        leave(screen)
    assert (workspace / "AGENTS.md").read_text() == "obey\n"


@pytest.mark.parametrize(("keys", "result"), [("teal\r", "teal"), ("\x04", "(no answer given)")])
def test_a_question_of_the_model_is_answered_by_the_user(terminal, keys, result):
    with FlakyServer([call("ask_user", question="Which colour?"), "PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, "paint")
        screen.match(re.compile(r"\? $"))
        screen.send(keys)
        screen.expect("PONG")
        leave(screen)
    assert results(server.requests[1]) == [result]


# -- the prompt ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param("\x1b[200~one\rtwo\rthree\x1b[201~\r", id="bracketed"),
        pytest.param("\x1b[200~one\ntwo\nthree\x1b[201~\r", id="bracketed LF"),
        pytest.param("\x1b[200~one\r\ntwo\r\nthree\x1b[201~\r", id="bracketed CRLF"),
        pytest.param("one\rtwo\rthree\r", id="plain"),
        pytest.param("one\ntwo\nthree\n", id="plain LF"),
        pytest.param("one\r\ntwo\r\nthree\r\n", id="plain CRLF"),
    ],
)
def test_a_paste_of_three_lines_is_one_prompt(terminal, keys):
    with FlakyServer(["PONG"] * 4) as server:
        screen = terminal(server=server)
        screen.prompt()
        screen.send(keys)
        screen.expect("PONG")
        leave(screen)
    [[prompt]] = [prompts(request) for request in server.requests]
    assert [line for line in prompt.splitlines() if line.strip()] == ["one", "two", "three"]


@pytest.mark.parametrize("keys", ["one\r\x04", "one\rtwo\r\x04", "one\rtwo\x04"])
def test_ctrl_d_right_behind_a_prompt_sends_it_and_leaves(terminal, keys):
    with FlakyServer(["PONG"]) as server:
        screen = terminal(server=server)
        screen.prompt()
        screen.send(keys)
        screen.expect("PONG")
        assert screen.wait() == 0
    assert prompts(server.requests[0]) == ["one\ntwo" if "two" in keys else "one"]


def test_a_paste_with_the_line_ends_of_windows_is_its_lines_and_nothing_else(terminal):
    with FlakyServer(["PONG"] * 3) as server:
        screen = terminal(server=server)
        screen.prompt()
        screen.send("c1\r\nc2\r\nc3\r\n")
        screen.expect("PONG")
        leave(screen)
    assert [prompts(request) for request in server.requests] == [["c1\nc2\nc3"]]


def test_help_names_the_commands_and_asks_nobody(terminal):
    with FlakyServer([]) as server:
        screen = terminal(server=server)
        ask(screen, "/help")
        shown = screen.prompt()
        screen.send("/exit\r")
        assert screen.wait() == 0
    names = ["/help", "/model", "/mode", "/status", "/compact", "/sessions", "/exit"]
    assert ([name for name in names if name not in shown], server.requests) == ([], [])


def test_model_changes_the_model_of_the_next_request(terminal):
    with FlakyServer(["PONG", "PANG"]) as server:
        screen = terminal(server=server)
        ask(screen, "/model")
        assert "flaky-1" in screen.prompt()
        screen.send("ping\r")
        screen.expect("PONG")
        ask(screen, "/model other-2")
        ask(screen, "pang")
        screen.expect("PANG")
        leave(screen)
    assert [request["model"] for request in server.requests] == ["flaky-1", "other-2"]


def test_mode_changes_what_is_permitted_and_the_model_is_told(terminal, workspace):
    with FlakyServer(["PONG", call("write_file", path="a.txt", content="a"), "PANG"]) as server:
        screen = terminal(server=server)
        ask(screen, "ping")
        screen.expect("PONG")
        ask(screen, "/mode plan")
        ask(screen, "write")
        screen.expect("PANG")
        leave(screen)
    assert results(server.requests[2])[0].startswith("denied: ")
    assert "plan" in prompts(server.requests[1])[-1]
    assert server.requests[1]["messages"][0] == server.requests[0]["messages"][0]
    assert not (workspace / "a.txt").exists()


@pytest.mark.parametrize("line", ["/mode turbo", "/frobnicate now"])
def test_an_unknown_command_or_mode_is_not_sent_to_the_model(terminal, line):
    with FlakyServer([]) as server:
        screen = terminal(server=server)
        ask(screen, line)
        assert line.split()[0] in screen.prompt()
        screen.send("exit\r")
        assert (screen.wait(), server.requests) == (0, [])


def test_status_and_sessions_name_the_session(terminal, workspace):
    put_session(workspace, "20260101-100000-aaaa", talk("an older question", "done"))
    with FlakyServer(["PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, "ping")
        screen.expect("PONG")
        ask(screen, "/status")
        status = screen.prompt()
        screen.send("/sessions\r")
        listed = screen.prompt()
        screen.send("exit\r")
        assert screen.wait() == 0
    new = session_files(workspace)[-1].stem
    assert "flaky-1" in status and new in status
    assert new in listed and "20260101-100000-aaaa" in listed and "an older question" in listed


def test_compact_with_little_to_compact_gives_the_prompt_back(terminal):
    with FlakyServer(["PONG", "a short hand-over note", "PANG"]) as server:
        screen = terminal(server=server)
        ask(screen, "ping")
        screen.expect("PONG")
        ask(screen, "/compact")
        ask(screen, "pang")
        screen.match(re.compile("PANG|hand-over"))
        leave(screen)
    assert prompts(server.requests[-1])[-1] == "pang"


def test_an_exclamation_mark_runs_a_command_for_the_user(terminal, workspace):
    with FlakyServer([]) as server:
        screen = terminal("--mode", "plan", server=server)
        ask(screen, "!echo local-$((40+2)); touch made.txt")
        screen.expect("local-42")
        leave(screen)
    assert ((workspace / "made.txt").exists(), server.requests) == (True, [])


def test_an_empty_line_sends_nothing(terminal):
    with FlakyServer(["PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, "")
        ask(screen, "   ")
        ask(screen, "ping")
        screen.expect("PONG")
        leave(screen)
    assert [prompts(request) for request in server.requests] == [["ping"]]


def test_an_error_of_the_server_gives_the_prompt_back(terminal):
    step = {"status": 400, "body": {"error": {"message": "the moon is in the way"}}}
    with FlakyServer([step, "PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, "hi")
        screen.expect("the moon is in the way")
        ask(screen, "ping")
        screen.expect("PONG")
        leave(screen)
    assert prompts(server.requests[1])[-1].endswith("ping")


def test_a_call_is_one_line_with_its_outcome_under_it(terminal, workspace):
    (workspace / "a.txt").write_text("alpha\n")
    with FlakyServer([call("read_file", path="a.txt"), "PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, "read")
        shown = screen.expect("PONG")
        leave(screen)
    assert re.search(r"→ read_file\(.*a\.txt.*\)\s*\r?\n", shown)


@pytest.mark.parametrize("change", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["NO_COLOR", "dumb"])
def test_colours_can_be_turned_off(terminal, workspace, change):
    with FlakyServer([call("bash", command="touch a.txt"), "**PONG**"]) as server:
        screen = terminal("do it", server=server, env=change)
        screen.question()
        screen.send("n\r")
        screen.expect("PONG")
        screen.wait()
    assert re.findall(r"\x1b\[[0-9;]*m", screen.output) == []


# -- what the extra shows ------------------------------------------------------------------------


class Paper:
    """What a terminal of 24 rows and 80 columns shows in the end; knows only the codes we use."""

    def __init__(self, text: str) -> None:
        self.rows, self.at, self.column, self.highest = [""], 0, 0, 0
        text = re.sub(r"\x1b\[\?7[lh]", "", text)  # no row of the region is broken
        for code, letter, char in re.findall(r"\x1b\[([\d;]*)([ABKm])|([^\a])", text, re.DOTALL):
            if letter:
                self.move(letter, int(code) if letter in "AB" else 0)
            else:
                self.print(char)

    def move(self, letter: str, count: int) -> None:
        """One code; those of colours are not seen."""
        self.highest = max(self.highest, count if letter == "A" else 0)
        self.at += -count if letter == "A" else count
        if letter == "K":
            self.rows[self.at] = self.rows[self.at][: self.column]

    def print(self, what: str) -> None:
        """One character."""
        assert what.isprintable() or what in "\r\n", f"a code that is not known: {what!r}"
        if what in "\r\n":
            self.column = 0
            self.at += what == "\n"
            self.rows += [""] * (self.at == len(self.rows))
        else:
            row = self.rows[self.at].ljust(self.column)
            self.rows[self.at] = row[: self.column] + what + row[self.column + 1 :]
            self.column += 1


def shown_by_ui(events: list[dict], size: int = 7) -> Paper:
    """The screen after these events, the text in pieces."""
    out = io.StringIO()
    screen = agent.UiScreen(out, out)
    for event in events:
        text = event.get("text", "") if event["kind"] == "text" else ""
        for at in range(0, len(text), size):
            screen.emit("text", text=text[at : at + size])
        if not text:
            screen.emit(**event)
    screen.emit("result")
    return Paper(out.getvalue())


ANSWER = """\
# Why

It *fails* because of `x`:
second line

- one
- two
    - deep

1. first

```python
def f():

    return 1
```

| a | b |
|---|---|
| 1 | 2 |

> quoted

List<int> ![a](b.png)
"""
ANSWER_ROWS = """\
Why

It fails because of x:
second line

 • one
 • two
    • deep

 1 first

  def f():

      return 1

 a  b
 ────
 1  2

▌ quoted

List<int> ![a](b.png)
"""


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_an_answer_is_shown_as_markdown_however_it_comes(size):
    paper = shown_by_ui([{"kind": "text", "text": ANSWER}], size)
    assert "\n".join(row.rstrip() for row in paper.rows) == ANSWER_ROWS


LISTED = [f"- {number}" for number in range(10)]


@pytest.mark.parametrize("size", [1, 10_000])
@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        pytest.param("a\nb\n\nc\n", ["a\nb", "c"], id="paragraphs"),
        pytest.param("a\r\n\r\nb", ["a", "b"], id="CRLF"),
        pytest.param("a\n# B\n## C\nd", ["a", "# B", "## C", "d"], id="headings"),
        pytest.param("- a\n\n- b\n  c\n\nd\n", ["- a", "- b\n  c", "d"], id="items apart"),
        pytest.param("- a\nb\n\n\tc\nd", ["- a\nb\n\n\tc\nd"], id="an item of two parts"),
        pytest.param(
            "\n".join(LISTED), [*map("\n".join, (LISTED[:8], LISTED[8:]))], id="a long list"
        ),
        pytest.param("a\n```\n\nb\n```\nc", ["a", "```\n\nb\n```", "c"], id="code"),
        pytest.param("````\n```\n````\nx", ["````\n```\n````", "x"], id="a fence in a fence"),
        pytest.param("~~~\n~~~ a\n~~~\nx", ["~~~\n~~~ a\n~~~", "x"], id="no end of a fence"),
        pytest.param(
            "- a\n  ```\n\n  y\n  ```\n- b", ["- a\n  ```\n\n  y\n  ```\n- b"], id="inside"
        ),
        pytest.param("```py\nx", ["```py\nx"], id="cut off"),
    ],
)
def test_a_block_ends_where_what_follows_can_not_change_it(text, blocks, size):
    made = agent.Blocks()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    ended = [block for piece in pieces for block in made.add(piece)] + made.finish()
    assert [block for block, _ in ended] == blocks
    assert [joined for _, joined in ended] == [block.startswith("- 8") for block in blocks]


@pytest.mark.parametrize(
    "gap", ["\n", "\n- ", *(pytest.param(gap, marks=pytest.mark.long) for gap in ("\n\n", " "))]
)
def test_a_long_answer_is_printed_once_and_the_cursor_stays_in_the_region(gap):
    text = gap.join(f"number {n};" for n in range(3000))
    paper = shown_by_ui([{"kind": "text", "text": text}], 300)
    assert re.findall(r"\d+(?=;)", "\n".join(paper.rows)) == [str(n) for n in range(3000)]
    assert paper.highest <= 22


@pytest.mark.parametrize(
    ("status", "content", "line"),
    [
        pytest.param("ok", "a\nb\n[exit code 0]", "✓ bash(ls)  b", id="ok"),
        pytest.param("ok", "a\n[exit code 2]", "✗ bash(ls)  exit code 2: a", id="exit code"),
        pytest.param("error", "error: no such file", "✗ bash(ls)  no such file", id="error"),
        pytest.param("denied", "denied: mode plan", "⊘ bash(ls)  mode plan", id="denied"),
        pytest.param("cancelled", "[interrupted]", "■ bash(ls)  interrupted", id="cancelled"),
    ],
)
def test_a_call_is_one_line_that_tells_its_outcome(status, content, line):
    call = {"id": "1", "name": "bash"}
    events = [
        {"kind": "tool_use", **call, "arguments": {"command": "ls"}},
        {"kind": "tool_output", "id": "1", "text": "a\n"},
        {"kind": "tool_result", **call, "status": status, "content": content, "ms": 10},
    ]
    assert shown_by_ui(events).rows == [line, ""]


def test_an_edit_that_nobody_was_asked_about_is_shown_as_a_diff():
    call = {"id": "1", "name": "edit_file"}
    edit = {"path": "a.py", "old_string": "a\nb", "new": "a\nc"}
    done = {"status": "ok", "content": "edited a.py", "ms": 10}
    events = [
        {"kind": "tool_use", **call, "arguments": edit},
        {"kind": "tool_result", **call, **done},
    ]
    assert shown_by_ui(events).rows == [
        "✓ edit_file(a.py)  edited a.py",
        "   a",
        "  -b",
        "  +c",
        "",
    ]


def test_no_code_of_a_model_or_a_tool_reaches_the_terminal():
    evil = "\x1b]0;title\x07\x1b[2J\x9b5A\r`\x1b[1m` [x](http://e\x1b[3m)"
    call = {"id": "1", "name": f"write_file{evil}"}
    events = [
        {
            "kind": "text",
            "text": f"{evil}\n\n```{evil}\n{evil}\n```\n\n| {evil} |\n|--|\n| {evil} |\n",
        },
        {"kind": "reasoning", "text": evil},
        {"kind": "tool_use", **call, "arguments": {evil: evil}},
        {"kind": "tool_output", "id": "1", "text": evil},
        {"kind": "tool_result", **call, "status": "ok", "content": evil, "ms": 10},
        {"kind": "notice", "level": "error", "text": evil},
        {"kind": "queued", "text": evil},
    ]
    assert "title" in "".join(shown_by_ui(events).rows)


def test_a_turn_has_a_spinner_and_leaves_nothing_of_it(terminal):
    with FlakyServer([{"text": "PONG **bold**", "hold": "before"}]) as server:
        screen = terminal(server=server, ui=True)
        ask(screen, "ping")
        until(server.holding.is_set)
        screen.match(re.compile(r"thinking · \d+ s"))
        screen.expect("flaky-1 · ask · sandbox off")
        server.release()
        screen.expect("PONG bold")
        leave(screen)
    assert "?1049" not in screen.output and "\x1b[2J" not in screen.output


def test_a_question_stands_apart_from_what_was_said():
    out = io.StringIO()
    screen = agent.UiScreen(out, out)
    screen.emit("text", text="words")
    screen.emit("tool_use", id="1", name="bash", arguments={"command": "make"})
    question = agent.Question("approve", "make", id="1")
    assert [screen.question(question, "make") for _ in range(2)] == ["\nmake", "make"]


def test_an_edit_in_a_question_has_colours(terminal):
    with FlakyServer([call("write_file", path="a.txt", content="word\n"), "PONG"]) as server:
        screen = terminal(server=server, ui=True)
        ask(screen, "write")
        assert "+word" in screen.question()
        screen.send("y\r")
        screen.expect("✓ write_file(a.txt)")
        screen.expect("PONG")
        leave(screen)
    assert "\x1b[32m+word\x1b[0m" in screen.output and screen.text.count("+word") == 1


@pytest.mark.parametrize("change", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_without_colours_the_extra_shows_nothing(terminal, change):
    with FlakyServer(["PONG **bold**"]) as server:
        screen = terminal("ping", server=server, ui=True, env=change)
        screen.expect("PONG **bold**")
        assert (screen.wait(), "\x1b" in screen.output) == (0, False)


def test_the_output_of_a_command_is_shown_while_it_runs(terminal):
    with FlakyServer([call("bash", command=f"echo begun; sleep {NAP}")]) as server:
        screen = terminal("--yes", "run", server=server)
        screen.expect("    begun")
        screen.interrupt()
        assert (screen.wait(), screen.text.count("begun\r\n")) == (130, 1)


@pytest.mark.long
@pytest.mark.parametrize("ui", [False, True])
def test_show_prints_the_whole_of_a_call(terminal, ui):
    many = [call("bash", command="seq 30"), call("bash", command="echo last")]
    with FlakyServer([batch(*many), "PONG"]) as server:
        screen = terminal("--mode", "auto", server=server, ui=ui)
        ask(screen, "run")
        screen.expect("PONG")
        ask(screen, "/show 2")
        assert "command: seq 30" in screen.expect("\r\n17\r\n")
        ask(screen, "/show 3")
        screen.expect("there are 2 calls")
        leave(screen)
    assert ui or screen.text.count("[27 more lines, /show]\r\n") == 1


@pytest.mark.parametrize("kind", [Screen, agent.UiScreen])
@pytest.mark.parametrize(
    ("seconds", "bell", "rings"), [(11.0, True, 1), (9.0, True, 0), (11.0, False, 0)]
)
def test_a_long_turn_rings_at_its_end(at_prompt, seconds, bell, rings, kind):
    master, slave = os.openpty()
    now = [0.0]
    with FlakyServer([]) as server, open(slave, "w") as err, open(master):
        screen = kind(io.StringIO(), err, bell=bell, clock=lambda: now[0])
        with screen.turn(at_prompt(server).agent):
            now[0] = seconds
        screen.write(err, ".")
        shown = b""
        while not shown.endswith(b"."):
            shown += os.read(master, 100)
    assert shown == b"\a" * rings + b"."


def test_nothing_rings_where_no_terminal_is():
    err = io.StringIO()
    agent.Screen(err, err, bell=True).ring()
    assert err.getvalue() == ""


@pytest.mark.parametrize(
    ("environ", "takes"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
        ({"TERM": "xterm", "NO_COLOR": "0"}, False),
        ({"TERM": "dumb"}, False),
        ({"TERM": ""}, False),
        ({}, False),
    ],
)
def test_codes_are_for_a_terminal_that_is_named_and_a_user_who_wants_them(environ, takes):
    assert agent.takes_codes(environ) == takes


def test_a_question_rings_unless_the_config_says_no(terminal, home):
    for rings in (1, 0):
        with FlakyServer([call("bash", command="touch a"), "PONG"]) as server:
            screen = terminal("run", server=server)
            screen.question()
            screen.send("n\r")
            assert (screen.wait(), screen.output.count("\a")) == (0, rings)
        config = home / ".config" / "agent"
        config.mkdir(parents=True, exist_ok=True)
        (config / "config.toml").write_text("bell = false\n")


def test_no_file_is_left_in_the_home_folder_but_the_history(terminal, home: Path):
    with FlakyServer(["PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, "ping")
        screen.expect("PONG")
        leave(screen)
    left = [path for path in home.rglob("*") if path.is_file()]
    assert [path for path in left if "agent" not in str(path.relative_to(home))] == []
    assert [oct(path.stat().st_mode & 0o777) for path in left if path.stat().st_mode & 0o077] == []
    assert os.listdir(home) in (
        [],
        [".config"],
        [".local"],
        [".config", ".local"],
        [".local", ".config"],
    )


def test_another_session_is_gone_on_with_and_the_first_is_free(terminal, workspace):
    put_session(workspace, "20260101-100000-aaaa", talk("an older question", "its answer"))
    with FlakyServer(["PONG", "PANG", "PENG"]) as server:
        screen = terminal(server=server)
        ask(screen, "ping")
        screen.expect("PONG")
        ask(screen, "/resume")
        assert "> an older question" in screen.expect("its answer")
        ask(screen, "go on")
        screen.expect("PANG")
        ask(screen, "/fork 1")
        screen.expect("stays as session 20260101-100000-aaaa")
        ask(screen, "differently")
        screen.expect("PENG")
        leave(screen)
    sent = [prompts(request) for request in server.requests]
    assert sent[:2] == [["ping"], ["an older question", "go on"]]
    assert (sent[2][0], sent[2][-1].split("\n")[-1]) == ("an older question", "differently")
    assert len(session_files(workspace)) == 3


def test_a_session_is_named_and_exported_once(terminal, workspace):
    script = [call("read_file", path="missing.txt"), "PONG"]
    with FlakyServer(script) as server:
        screen = terminal(server=server)
        ask(screen, "ping")
        screen.expect("PONG")
        for line, shown in {"/rename A title": "title: A title", "/export x.md": "private"}.items():
            ask(screen, line)
            screen.expect(shown)
        ask(screen, "/export x.md")
        screen.expect("there already")
        leave(screen)
    text = (workspace / "x.md").read_text()
    assert (text.startswith("# A title\n"), text.endswith("PONG\n")) == (True, True)
    assert "## User\n\nping\n\n## Assistant\n\n- `read_file(missing.txt)`: error: " in text
    assert stat.S_IMODE((workspace / "x.md").stat().st_mode) == 0o600


# -- commands ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Prompt:
    """The prompt of an agent without a terminal: what is typed there, and what it says."""

    agent: Agent
    root: Path
    answers: list[str]
    asked: list[Question] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.err = io.StringIO()
        self.repl = Repl(self.agent, Person(Screen(io.StringIO(), self.err), io.StringIO()))
        self.agent.ask = self.answer

    def answer(self, question: Question) -> str:
        """The next answer of the person."""
        self.asked.append(question)
        return self.answers.pop(0)

    def __call__(self, *lines: str) -> str:
        """Type lines; returns what is said to the last."""
        for line in lines:
            self.err.seek(0)
            self.err.truncate()
            self.repl.take(line)
        return self.err.getvalue()

    def put(self, name: str, text: str | bytes, folder: str = ".agents") -> None:
        """A custom command of the project, or of the user."""
        path = self.root / folder / "commands" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.fixture
def at_prompt(tmp_path):
    """Start agents of a server, each at a prompt."""
    made = []

    def start(server, answers=(), **options):
        (tmp_path / "work").mkdir(exist_ok=True)
        places = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "work" / "config")}
        fixed = {"model": "flaky-1", "base_url": server.url, "api_key": "x"}
        fixed |= {"workspace": str(tmp_path / "work"), "environ": {"PATH": "/none", **places}}
        made.append(build_agent(Settings(**{**fixed, **options})))
        return Prompt(made[-1], tmp_path / "work", list(answers))

    yield start
    for one in made:
        one.close()


USERS = "config/agent"  # where the user's own commands are below the root of a Prompt


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ("/mode a", ["ask", "auto"]),
        ("/mode ask a", []),
        ("say /mode a", []),
        ("/edit see @a", ["@a.py"]),
        ("see (@s", ['@"s p.txt"', '@"src/']),
        ('see @"s p', ['@"s p.txt"']),
        ("me@a", []),
    ],
)
def test_a_word_before_the_cursor_is_completed(at_prompt, before, found):
    with FlakyServer([]) as server:
        say = at_prompt(server)
        for name in ("a.py", "s p.txt", "src/b.py"):
            (say.root / name).parent.mkdir(exist_ok=True)
            (say.root / name).touch()
        assert say.repl.complete(before) == found


def test_what_is_secret_ignored_or_odd_completes_nothing(at_prompt):
    with FlakyServer(["PONG"]) as server:
        say = at_prompt(server, environ={"PATH": os.environ["PATH"]}, deny=("read_file no.txt",))
        subprocess.run(["git", "init", "-q"], cwd=say.root, check=True)
        for name in (".env", "a.log", 'q"x.txt', "n\x1b.txt", "\u202etxt", "no.txt", "yes.txt"):
            (say.root / name).write_text("a\n")
        (say.root / ".gitignore").write_text("*.log\n")
        found = say.repl.complete("see @")
        assert say.repl.complete("@none/a") == say.repl.complete("@../") == []
        say("ping")
        assert say.repl.complete("/resume ") == []
    assert found == ["@.gitignore", "@yes.txt"]


def test_help_lists_every_command_in_a_group_within_80_columns(at_prompt):
    with FlakyServer([]) as server:
        say = at_prompt(server)
        say.put("mine.md", "---\ndescription: " + "long " * 30 + "\n---\nDo it.")
        shown = say("/help")
    grouped = " ".join(COMMANDS.values()).split()
    there = [name.removeprefix("do_") for name in dir(Repl) if name.startswith("do_")]
    lines = shown.splitlines()
    assert [name for name in there if f"\n  /{name} " not in shown or name not in grouped] == []
    assert (max(map(len, lines)), [x.split()[0] for x in lines if x.endswith("...")]) == (
        80,
        ["/mine"],
    )
    assert say("/help /rename") == "/rename TITLE  give this session a title\n"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("/hlep", "did you mean /help?"),
        ("/Help", "did you mean /help?"),
        ("/help?", "did you mean /help?"),
        ("/sess", "did you mean /sessions?"),
        ("/quit", "did you mean /exit?"),
        ("/Review-2 a.py", "did you mean /review-2?"),
        ("/xyzzy a.py", "/help lists them"),
        ("/", "/help lists them"),
    ],
)
def test_an_unknown_command_names_the_nearest_and_is_not_sent(at_prompt, typed, hint):
    with FlakyServer([]) as server:
        say = at_prompt(server)
        say.put("review-2.md", "Review.")
        name = typed.split()[0]
        assert say(typed) == f"agent: there is no command {name}; {hint}\n"
    assert server.requests == []


@pytest.mark.parametrize("typed", ["/usr/bin/foo is broken", "/* a comment */", "//", "/etc/hosts"])
def test_what_begins_like_a_path_is_a_prompt(at_prompt, typed):
    with FlakyServer(["PONG"]) as server:
        at_prompt(server)(typed)
    assert prompts(server.requests[0]) == [typed]


def test_a_command_that_takes_no_argument_says_so(at_prompt):
    with FlakyServer([]) as server:
        say = at_prompt(server)
        shown = say("/clear everything")
    assert shown == "agent: /clear takes no argument, and nothing was done\n"


def test_a_model_that_is_not_listed_is_taken_and_the_nearest_is_named(at_prompt):
    with FlakyServer(["PONG"]) as server:
        say = at_prompt(server)
        assert say.repl.choices("model") == ["flaky-1"]
        last = say("/model Flaky-2").splitlines()[-1]
        say("ping")
    assert last == "agent: the endpoint does not list this model; nearest: flaky-1"
    assert server.requests[0]["model"] == "Flaky-2"


def test_the_history_is_a_private_file_with_a_line_for_each_entry(tmp_path):
    path, again = tmp_path / "history", tmp_path / "none" / "history"
    person, other, lost = (
        Person(Screen(io.StringIO(), io.StringIO()), io.StringIO(), place)
        for place in (path, path, again)
    )
    person.mask = lambda text: text.replace("secret", "***")
    for text in ("one", "one", "two\nlines\n", "a secret", " \n"):
        assert (person.remember(text), lost.remember(text)) == (text, text)
    other.read_history()
    assert path.read_text() == "one\ntwo\u2028lines\na ***\n"
    assert (stat.S_IMODE(path.stat().st_mode), again.parent.exists()) == (0o600, False)
    assert person.entries == lost.entries == ["one", "two\nlines", "a secret"]
    assert (other.entries, lost.history) == (["one", "two\nlines", "a ***"], again)


@pytest.mark.parametrize("count", [2, 1003])
def test_the_newest_entries_of_a_history_stay_and_half_a_line_is_ended(tmp_path, count):
    rows = [str(number) for number in range(count)]
    (tmp_path / "history").write_text("\n".join(rows))
    screen = Screen(io.StringIO(), io.StringIO())
    person = Person(screen, io.StringIO(), tmp_path / "history")
    person.read_history()
    assert person.entries == (tmp_path / "history").read_text().split() == rows[-1000:]
    assert (tmp_path / "history").read_text().endswith(f"{count - 1}\n")


def test_a_history_that_is_no_file_is_said_once_and_left_alone(tmp_path):
    (tmp_path / "history").mkdir()
    err = io.StringIO()
    person = Person(Screen(io.StringIO(), err), io.StringIO(), tmp_path / "history")
    person.read_history()
    person.remember("one")
    assert (person.history, person.entries) == (None, ["one"])
    assert (err.getvalue()[:19], err.getvalue().count("\n")) == ("agent: no history: ", 1)


@pytest.mark.parametrize(
    ("script", "draft", "said"),
    [
        pytest.param(r'printf "\n a\r\nb\n\n" > "$1"', " a\nb", "", id="writes"),
        pytest.param('printf b >> "$1"', "textb", "", id="goes on"),
        pytest.param('printf b >> "$1"; exit 3', "text", "agent: /bin/sh ended with 3", id="fails"),
        pytest.param(': > "$1"', "", "agent: the editor left nothing", id="nothing"),
        pytest.param('rm "$1"', "text", "agent: /bin/sh: ", id="removes"),
    ],
)
def test_what_an_editor_leaves_is_the_draft_and_no_file_stays(at_prompt, script, draft, said):
    before = signal.getsignal(signal.SIGINT)
    with FlakyServer([]) as server:
        (say := at_prompt(server)).agent.close()
        (say.root / "edit").write_text(script)
        environ = {"PATH": "/usr/bin:/bin", "VISUAL": "/bin/sh edit", "EDITOR": "/bin/false"}
        say = at_prompt(server, environ={**environ, "HOME": str(say.root)})
        shown = say("/edit text")
        left = [path.name for path in say.root.rglob("prompt-*")]
    assert (say.repl.person.draft, shown[: len(said) or None], left) == (draft, said, [])
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize(
    ("queue", "said", "rest"),
    [
        (["a", "b\nc", "/mode plan", "d"], "a\nb\nc", ["/mode plan", "d"]),
        (["a", "!ls"], "a", ["!ls"]),
        (["exit", "a"], "", ["exit", "a"]),
        (["exit now", "/usr/bin"], "exit now\n/usr/bin", []),
    ],
)
def test_the_running_turn_takes_what_is_queued_before_the_first_command(
    at_prompt, queue, said, rest
):
    with FlakyServer([]) as server:
        repl = at_prompt(server).repl
        repl.queue = list(queue)
        assert (repl.typed(), repl.queue) == (said, rest)
        assert [repl.next() for _ in rest] == rest


def test_what_is_queued_behind_a_turn_that_failed_stands_at_the_prompt(at_prompt):
    with FlakyServer([{"status": 400, "body": {}}]) as server:
        say = at_prompt(server)
        person, say.repl.queue = say.repl.person, ["first", "/status"]
        person.draft, person.ended = "half", True
        shown = say("go")
    assert (person.draft, person.ended, say.repl.queue) == ("first\n/status\nhalf", False, [])
    assert shown.count("agent: what was queued was not sent; it stands at the prompt\n") == 1


EVIL = "left\x1b[2J\u202e"
SEEN = "left\\u{1b}[2J\\u{202e}"


def test_no_code_of_a_model_a_title_or_an_answer_reaches_what_is_printed(at_prompt):
    with FlakyServer([f"PONG {EVIL}"]) as server:
        say, out = at_prompt(server, model=EVIL), io.StringIO()
        say(EVIL, "/export x.md")
        agent.show_sessions(say.root, Screen(out, say.err))
        texts = [say.repl.screen.status_text(say.agent), out.getvalue(), say("/status")]
        texts.append((say.root / "x.md").read_text())
    assert [(SEEN in text, "\x1b" in text, "\u202e" in text) for text in texts] == [
        (True, False, False)
    ] * 4


def test_no_code_of_a_command_reaches_what_is_said_of_it(tmp_path, capsys):
    known = Settings(workspace=str(tmp_path), environ={"HOME": str(tmp_path)})
    agent.explain_permission(known, f"echo {EVIL}", Screen(io.StringIO(), io.StringIO()))
    shown = capsys.readouterr().out
    assert (SEEN in shown, "\x1b" in shown, "\u202e" in shown) == (True, False, False)


def test_no_code_of_a_question_reaches_the_terminal():
    reader, writer = os.pipe()
    os.write(writer, b"yes\n")
    os.close(writer)
    err = io.StringIO()
    with open(reader) as stdin:
        answer = Person(Screen(io.StringIO(), err), stdin).ask(Question("answer", EVIL))
    assert (answer, err.getvalue()) == ("yes", f"{SEEN}? ")


def test_of_very_many_models_the_first_are_shown_and_all_can_be_completed(at_prompt):
    with Routes({"/v1/models": listing(*(f"m{number}" for number in range(3000)))}) as server:
        say = at_prompt(server)
        lines = say("/model").splitlines()
        offered = say.repl.complete("/model m2999")
    assert (len(lines), lines[-1].split(":")[0]) == (1002, "  and 2,000 more")
    assert offered == ["m2999"]


def test_where_no_models_are_listed_the_choice_is_empty_and_asked_once(at_prompt):
    with FlakyServer([]) as server:
        gone = server.url
    say = at_prompt(argparse.Namespace(url=gone))
    assert (say.repl.choices("model"), say.agent.client.ids) == ([], [])
    assert len(say("/model other").splitlines()) == 1
    assert "nothing listens" in say("/model").splitlines()[-1]


def test_a_provider_without_a_key_names_what_to_set_and_changes_nothing(at_prompt):
    with FlakyServer([]) as server:
        say = at_prompt(server)
        shown = say("/provider groq")
        assert shown.startswith("agent: no key for groq: put GROQ_API_KEY=... into ")
        assert (shown.count("\n"), say.agent.client.endpoint) == (1, server.url)


def test_a_provider_gets_no_key_of_another_one_and_there_is_a_way_back(at_prompt):
    keys = {"AGENT_API_KEY": "sk-agent-1", "OPENAI_API_KEY": "sk-openai-2"}
    with FlakyServer([]) as server:
        say, had = at_prompt(server, api_key="sk-agent-1", keys=keys), []
        assert "no key for groq" in say("/provider groq")
        for name in ("openai", server.url):
            assert name in say.repl.choices("provider") and name in say(
                f"/provider {name}", "/provider"
            )
            had.append((say.agent.client.key, say.agent.client.model))
    assert had == [("sk-openai-2", PROVIDERS["openai"].model), ("sk-agent-1", "flaky-1")]


@pytest.mark.parametrize(
    "typed", ["/allow", "/mode", "/model", "/rename", "/show", "/resume", "/x"]
)
def test_a_key_that_is_typed_into_a_command_is_not_shown(at_prompt, typed):
    key = "sk-canary-0123456789abcdef"
    with FlakyServer(["PONG"]) as server:
        say = at_prompt(server, api_key=key)
        shown = say("hi", f"{typed} {key}") + say("/status") + say("/sessions")
    assert key not in shown and "flaky-1" in shown


def test_no_command_shows_a_key_that_stands_in_a_file_or_is_the_model(at_prompt):
    key = "sk-canary-0123456789abcdef"
    write = call("write_file", path="a.txt", content="a\n")
    with FlakyServer([write, "PONG"]) as server:
        say = at_prompt(server, api_key=key, model=key, mode="auto", sandbox="off")
        say("hi")
        (say.root / "a.txt").write_text(f"key = {key}\n")
        commands = ("/diff", "/status", "/cost", "/model", "/provider", "/show")
        shown = "".join(map(say, commands))
    assert key not in shown and "+key = " in shown


def test_what_the_users_command_prints_can_hide_nothing(at_prompt):
    with FlakyServer([]) as server:
        say = at_prompt(server)
        say("!printf 'a\\xe2\\x80\\xaeb\\xc2\\x9bc\\n'")
    assert say.repl.screen.out.getvalue() == "a\\u{202e}bc\n"


def test_a_call_that_was_clipped_is_shown_whole_and_in_its_place(at_prompt):
    calls = [call("write_file", path=f"{n}.txt", content=n * 3) for n in ("a", "b")]
    with FlakyServer([*calls, "PONG"]) as server:
        say = at_prompt(server, mode="auto", sandbox="off")
        say("hi")
        kept = say.agent.transcript.messages
        at = next(n for n, m in enumerate(kept) if m["role"] == "tool")
        say.agent.session.unwritten += [kept[at]]
        kept[at] = {**kept[at], "content": "[clipped]"}
        shown = say("/show 2"), say("/show"), say("/show 0")
    assert "a.txt" in shown[0] and "[clipped]" not in shown[0]
    assert "b.txt" in shown[1] and "there are 2 calls" in shown[2]


def test_a_terminal_that_is_gone_holds_nothing():
    reader, writer = os.pipe()
    with open(reader) as stream:
        stream.isatty = lambda: True  # as it was a moment ago
        assert agent.drain(stream) == ""
    os.close(writer)


RULED = [
    call("write_file", path="a.txt", content="a"),
    "PONG",
    call("write_file", path="a.txt", content="b"),
    "PANG",
]


def test_a_typed_rule_holds_over_a_clear_and_deny_beats_it(at_prompt):
    with FlakyServer(RULED) as server:
        say = at_prompt(server)
        say("/allow write_file a.txt", "/clear", "one", "/deny write_file *.txt", "two")
        shown = say("/deny")
        assert (say.asked, (say.root / "a.txt").read_text()) == ([], "a")
    assert results(server.requests[-1])[-1].startswith("denied: ")
    assert shown == "  allow  write_file a.txt  (/allow)\n  deny   write_file *.txt  (/deny)\n"
    assert "/deny" not in json.dumps(server.requests[-1]["messages"])


def test_typed_rules_add_up_and_one_that_permits_much_says_so(at_prompt):
    with FlakyServer([]) as server:
        say = at_prompt(server)
        assert "agent: " in say("/allow bash git *", "/allow bash *")
        assert say("/deny bash *") == "deny bash *: holds until you leave\n"
        shown = say("/allow")
    assert shown.splitlines() == [
        "  allow  bash git *  (/allow)",
        "  allow  bash *  (/allow)",
        "  deny   bash *  (/deny)",
    ]


def test_a_typed_rule_lifts_what_a_flag_lifts(at_prompt):
    with FlakyServer([call("read_file", path=".env"), "PONG"]) as server:
        say = at_prompt(server)
        (say.root / ".env").write_text("A=1\n")
        say("/allow read_file .env", "read it")
    assert "A=1" in results(server.requests[-1])[0]


@pytest.mark.parametrize("typed", ["/allow foo", "/deny bash", "/allow (x) y"])
def test_a_rule_that_is_none_is_refused(at_prompt, typed):
    with FlakyServer([]) as server:
        say = at_prompt(server)
        assert "is not of the form 'tool pattern'" in say(typed)
        assert say("/allow").startswith("no rules")


def test_always_ends_with_the_session_as_its_question_says(at_prompt):
    step = call("write_file", path="a.txt", content="1")
    with FlakyServer([step, "PONG", step, "PANG"]) as server:
        say = at_prompt(server, [Always(("write_file a.txt",)), "n"])
        assert "write_file a.txt  (approved in this session" in say(
            "one", "/mode auto", "/mode ask", "/allow"
        )
        assert say("/clear", "/allow").startswith("no rules")
        say("two")
    assert len(say.asked) == 2


def test_an_error_of_the_disk_is_one_line_without_its_number(at_prompt):
    with FlakyServer([]) as server:
        shown = at_prompt(server)("/export " + "x" * 300)
    assert shown == f"agent: {'x' * 80}: File name too long\n"


def test_a_rule_for_a_tool_that_is_not_there_says_so(at_prompt):
    with FlakyServer([]) as server:
        say = at_prompt(server)
        assert "no tool 'Bash'" in say("/deny Bash rm *")
        assert say("/deny * secrets/**").count("\n") == 1


def test_rules_say_where_they_come_from(tmp_path):
    folder = tmp_path / ".config" / "agent"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('allow = ["bash make *"]\nask = ["bash git *"]\n')
    flags = ["--deny", "* secrets/**", "--base-url", "http://127.0.0.1:9", "-m", "m"]
    settings, _ = load([*flags, "-w", str(tmp_path)], {"HOME": str(tmp_path)})
    made = build_agent(settings)
    made.approved.append("bash touch *")
    found = [(text, origin.split(";")[0]) for _, text, origin in made.rules()]
    made.close()
    assert found == [
        ("bash make *", "config.toml"),
        ("bash git *", "config.toml"),
        ("* secrets/**", "--deny"),
        ("bash touch *", "approved in this session"),
    ]


def test_cost_adds_up_by_model_in_one_session(at_prompt):
    usage = {"prompt_tokens": 1000, "completion_tokens": 10, "total_tokens": 1010}
    with FlakyServer([{"text": "a", "usage": usage}] * 2) as server:
        say = at_prompt(server, prices={"flaky-1": (1.0, 1.0, 2.0)})
        rows = say("one", "/model other", "two", "/cost").splitlines()
        assert say("/status").splitlines()[-2:] == rows[:2]
        shown = say("/clear", "/cost")
        assert shown.startswith("tokens: 0 in") and shown.split("\n")[0].endswith("; $0")
    assert "2,000 in" in rows[0] and rows[0].endswith("$0.0010 and 1 unpriced")
    assert rows[2:4] == [
        "  flaky-1: 1,000 in (0 % cached), 10 out; $0.0010",
        "  other: 1,000 in (0 % cached), 10 out; unpriced",
    ]


def test_clear_begins_anew_and_names_the_way_back(at_prompt):
    with FlakyServer(["PONG", "PANG"]) as server:
        say = at_prompt(server)
        before = say.agent.session.id
        last = say("ping", "/mode plan", "/clear")
        say("pang")
        state = (say.agent.mode, say.repl.choices("resume"))
    assert (last, state) == (
        f"a new conversation; the one before: /resume {before}\n",
        ("plan", [before]),
    )
    assert (
        prompts(server.requests[1])[0].endswith("pang") and len(server.requests[1]["messages"]) == 2
    )


def test_clear_without_sessions_begins_anew(at_prompt):
    with FlakyServer(["PONG", "PANG"]) as server:
        say = at_prompt(server, save_session=False)
        assert say("/clear") == "a new conversation\n"
        last = say("ping", "/clear")
        say("pang")
    assert last == "a new conversation; the one before is not kept\n"
    assert prompts(server.requests[1]) == ["pang"]


def test_copy_feeds_the_program_that_is_there(at_prompt, tmp_path):
    program = tmp_path / "bin" / "xclip"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\n/bin/cat > "{tmp_path}/copied"\necho "$@" >> "{tmp_path}/copied"\n'
    )
    program.chmod(0o700)
    with FlakyServer(["PONG é"]) as server:
        environ = {"PATH": str(program.parent), "DISPLAY": ":0", "HOME": str(tmp_path)}
        say = at_prompt(server, environ=environ)
        assert say("/copy") == "agent: there is no answer to copy yet\n"
        assert say("ping", "/copy") == "copied 6 characters with xclip\n"
    assert (tmp_path / "copied").read_text() == "PONG é-selection clipboard\n"


class Tty(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        """Yes."""
        return True


@pytest.mark.parametrize(
    ("display", "code", "size", "how"),
    [
        pytest.param(":0", 0, 9, "with xclip", id="a program"),
        pytest.param("", 0, 9, "by way of the terminal, if it permits that", id="no display"),
        pytest.param(":0", 1, 9, "by way of the terminal, if it permits that", id="it fails"),
        pytest.param("", 0, 75_001, "the answer has 75,001 bytes", id="large"),
    ],
)
def test_copy_takes_the_first_way_that_there_is(tmp_path, display, code, size, how):
    (tmp_path / "xclip").write_text(f"#!/bin/sh\n/bin/cat >/dev/null\nexit {code}\n")
    (tmp_path / "xclip").chmod(0o700)
    environ = {"PATH": str(tmp_path), "DISPLAY": display, "TERM": "xterm"}
    err = Tty()
    screen = Screen(io.StringIO(), err)
    if size > 9:
        with pytest.raises(agent.UsageError, match=how):
            agent.copy_text("x" * size, environ, screen)
    else:
        assert agent.copy_text("x" * size, environ, screen) == how
    assert err.getvalue() == ("\x1b]52;c;eHh4eHh4eHh4\a" if "way" in how else "")


def test_copy_without_any_clipboard_says_so(at_prompt):
    with FlakyServer(["PONG"]) as server:
        assert at_prompt(server)("ping", "/copy").startswith("agent: no clipboard is within reach")


@pytest.mark.parametrize("codes", [True, False])
def test_copy_goes_through_a_terminal_only_if_it_takes_codes(terminal, codes):
    with FlakyServer(["PONG"]) as server:
        screen = terminal(server=server, env={"PATH": "/none", "NO_COLOR": None if codes else "1"})
        ask(screen, "ping")
        ask(screen, "/copy")
        screen.expect("copied 4 characters" if codes else "no clipboard")
        leave(screen)
    assert ("\x1b]52;c;UE9ORw==\x07" in screen.output) == codes


def test_the_projects_command_is_refused_by_whoever_does_not_say_yes(terminal, workspace):
    (workspace / ".agents" / "commands").mkdir(parents=True)
    (workspace / ".agents" / "commands" / "go.md").write_text("Go.\nRun this? [y/n] y")
    with FlakyServer(["PONG"]) as server:
        screen = terminal("--yes", server=server)
        ask(screen, "/go")
        assert "  | Run this? [y/n] y" in screen.question()
        screen.send("\r")
        ask(screen, "/go")
        screen.question()
        screen.send("y\r")
        screen.expect("PONG")
        leave(screen)
    assert prompts(server.requests[0]) == ["Go.\nRun this? [y/n] y"]


# -- custom commands -----------------------------------------------------------------------------


def test_the_projects_command_is_shown_and_asked_for_until_it_is_known(at_prompt):
    with FlakyServer(["PONG"] * 3) as server:
        say = at_prompt(server, ["n", "y", "y"])
        say.put(
            "review.md", "---\ndescription: Look\nmodel: x\n---\nReview $1 \u200b($ARGUMENTS).\n"
        )
        assert "  /review [TEXT]       Look\n" in say("/help")
        assert say("/review a.py").endswith(
            "  | Review $1 \\u{200b}($ARGUMENTS).\n(nothing was sent)\n"
        )
        say("/review a.py now", "/review")
        say.put("review.md", "Other.")
        assert "  | Other.\n" in say("/review b.py")
    assert len(say.asked) == 3
    texts = ["Review a.py \\u{200b}(a.py now).", "Review  \\u{200b}().", "Other.\nb.py"]
    assert prompts(server.requests[-1]) == texts


def test_the_users_own_command_wins_and_is_only_shown(at_prompt):
    with FlakyServer(["PONG"] * 2) as server:
        say = at_prompt(server)
        say.put("do-2.md", "Theirs.")
        say.put("do-2.md", "Mine.", USERS)
        say.put("help.md", "Never.", USERS)
        assert "  | Mine.\n" in say("/do-2\tone\ntwo") and "  | " not in say("/do-2")
        assert "Never" not in say("/help")
    assert (say.asked, prompts(server.requests[-1])) == ([], ["Mine.\none\ntwo", "Mine."])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param(b"\xff\xfe\xfa", "is not UTF-8", id="no UTF-8"),
        pytest.param("é" * 16385, "has more than 32768 bytes", id="large"),
        pytest.param("---\ndescription: x\n---\n \n", "holds no prompt", id="empty"),
        pytest.param(None, "is outside the workspace", id="a link out"),
    ],
)
def test_a_command_file_that_can_not_be_used_is_refused_in_one_line(at_prompt, tmp_path, text, why):
    with FlakyServer([]) as server:
        say = at_prompt(server)
        say.put("x.md", "")
        (tmp_path / "out.md").write_text("Outside.")
        if text is None:
            (say.root / ".agents/commands/x.md").unlink()
            (say.root / ".agents/commands/x.md").symlink_to(tmp_path / "out.md")
        else:
            say.put("x.md", text)
        shown = say("/x")
        assert "  /x [TEXT]            (.agents/commands/x.md " in say("/help")
    assert shown.startswith(f"agent: .agents/commands/x.md {why}") and shown.count("\n") == 1


def test_only_what_is_typed_behind_a_custom_command_names_files(at_prompt):
    with FlakyServer(["PONG"]) as server:
        say = at_prompt(server, ["y"])
        for name in ("a.txt", "b.txt"):
            (say.root / name).write_text(f"what stands in {name}\n")
        say.put("x.md", "Read @a.txt and $1.")
        say("/x @b.txt")
    (prompt,) = prompts(server.requests[0])
    assert prompt.startswith("Read @a.txt and @b.txt.\n\n[file: b.txt]\n")
    assert prompt.count("[file: ") == 1


def test_the_projects_command_is_asked_for_in_each_session(at_prompt):
    with FlakyServer(["PONG"] * 3) as server:
        say = at_prompt(server, ["y", "n"])
        say.put("x.md", f"Read{' ' * 50}this.")
        assert "  | Read[50 blanks]this.\n" in say("/x") and "  | " not in say("/x")
        assert "(nothing was sent)" in say("/clear", "/x")
    assert (len(say.asked), len(server.requests)) == (2, 2)


def test_bare_knows_no_custom_commands(at_prompt):
    with FlakyServer([]) as server:
        say = at_prompt(server, bare=True)
        say.put("x.md", "X.", USERS)
        assert say("/x").startswith("agent: there is no command /x")


# -- typing while a turn runs --------------------------------------------------------------------

HELD = call("read_file", path="a.txt") | {"hold": "before"}


LONG_PLAIN = [pytest.param("plain", marks=pytest.mark.long), "ui"]
LONG_UI = ["plain", pytest.param("ui", marks=pytest.mark.long)]


@pytest.fixture(params=["plain", "ui"])
def typing(request, terminal):
    """Start the agent with either way to read what is typed, its first request held."""

    def start(server) -> Terminal:
        screen = terminal(server=server, ui=request.param == "ui")
        ask(screen, "go")
        until(server.holding.is_set)
        return screen

    return start


@pytest.mark.parametrize("typing", LONG_PLAIN, indirect=True)
def test_a_line_typed_in_a_turn_is_queued_and_sent_behind_the_step(typing, workspace):
    with FlakyServer([HELD, "PONG"]) as server:
        screen = typing(server)
        screen.send("use p\u00f6rt\x7ft 8080\r")
        screen.expect("queued: use p\u00f6rt 8080")
        screen.send("unfin")
        screen.expect("unfin")
        server.release()
        screen.expect("PONG")
        screen.match(re.compile(r"(?s)unpriced.*> unfin"))
        screen.send("ished\x15exit\r")
        assert (screen.wait(), termios.tcgetattr(screen.slave)) == (0, screen.settings)
    assert roles(server.requests[1])[-2:] == ["tool", "user"]
    assert prompts(server.requests[1]) == ["go", "use p\u00f6rt 8080"]
    assert history(workspace).read_text().splitlines() == ["go", "use p\u00f6rt 8080", "exit"]


@pytest.mark.parametrize("typing", LONG_UI, indirect=True)
def test_half_a_line_goes_on_in_the_turn_of_what_was_queued(typing):
    with FlakyServer([HELD, "PONG", {"text": "PANG", "hold": "before"}, "PUNG"]) as server:
        screen = typing(server)
        for line in ("/status", "second"):
            screen.send(f"{line}\r")
            screen.expect(f"queued: {line}")
        screen.send("half")
        screen.expect("half")
        server.release()
        until(lambda: len(server.requests) == 3 and server.holding.is_set())
        screen.send(" a line\r")
        screen.expect("queued: half a line")
        server.release()
        screen.expect("PUNG")
        leave(screen)
    assert prompts(server.requests[3]) == ["go", "second", "half a line"]


def test_at_the_prompt_too_the_answer_is_written_to_a_file(at_prompt):
    with FlakyServer(["PONG"]) as server:
        say, out = at_prompt(server), io.StringIO()
        screen = Screen(out, say.err, streams=False)
        Repl(say.agent, Person(screen, io.StringIO())).take("ping")
    assert (out.getvalue(), "PONG" in say.err.getvalue()) == ("PONG\n", False)


@pytest.mark.parametrize("typing", LONG_UI, indirect=True)
def test_commands_wait_for_the_end_of_the_turn_and_keep_their_place(typing):
    with FlakyServer([HELD, "PONG", "PANG"]) as server:
        screen = typing(server)
        for line in ("first", "/mode plan", "second", "exit"):
            screen.send(f"{line}\r")
            screen.expect(f"queued: {line}")
        server.release()
        screen.expect("PONG")
        screen.expect("mode: plan")
        screen.expect("> second")
        assert (screen.wait(), termios.tcgetattr(screen.slave)) == (0, screen.settings)
    assert [len(prompts(request)) for request in server.requests] == [1, 2, 3]


@pytest.mark.parametrize("typing", LONG_PLAIN, indirect=True)
def test_ctrl_c_gives_back_what_was_queued(typing):
    with FlakyServer([HELD, "PONG"]) as server:
        screen = typing(server)
        for line in ("first", "/status"):
            screen.send(f"{line}\r")
            screen.expect(f"queued: {line}")
        screen.interrupt()
        screen.expect("(cancelled)")
        screen.expect("was not sent")
        screen.expect("> first")
        screen.listens()
        screen.send("\r")
        screen.expect("PONG")
        leave(screen)
    assert prompts(server.requests[1]) == ["go", "first\n/status"]


@pytest.mark.parametrize("typing", LONG_PLAIN, indirect=True)
def test_what_was_queued_or_begun_before_a_question_does_not_answer_it(typing, workspace):
    step = call("write_file", path="a.txt", content="a") | {"hold": "before"}
    with FlakyServer([step, "PONG"]) as server:
        screen = typing(server)
        screen.send("y\r")
        screen.expect("queued: y")
        screen.send("y")
        server.release()
        screen.question()
        screen.send("n\r")
        screen.expect("PONG")
        screen.match(re.compile(r"(?s)unpriced.*> y"))
        screen.send("\x15exit\r")
        assert (screen.wait(), termios.tcgetattr(screen.slave)) == (0, screen.settings)
    assert results(server.requests[1])[0].startswith("denied: ")
    assert prompts(server.requests[1]) == ["go", "y"]
    assert not (workspace / "a.txt").exists()


@pytest.mark.parametrize(
    "keys, text",
    [
        pytest.param("one\r\ntwo\r\n", "one\ntwo", id="CRLF"),
        pytest.param("one\rtwo\rthree\r", "one\ntwo\nthree", id="lines", marks=pytest.mark.long),
        pytest.param("\x1b[Aone\r", "one", id="an arrow", marks=pytest.mark.long),
    ],
)
def test_what_comes_at_once_is_one_text(typing, keys, text):
    with FlakyServer([HELD, "PONG"]) as server:
        screen = typing(server)
        screen.send(keys)
        screen.expect("queued: one")
        server.release()
        screen.expect("PONG")
        leave(screen)
    assert prompts(server.requests[1]) == ["go", text]


@pytest.mark.parametrize("typing", ["ui"], indirect=True)
def test_a_marked_paste_is_one_text_and_keys_edit_it(typing):
    with FlakyServer([HELD, "PONG"]) as server:
        screen = typing(server)
        screen.send("wrong\x15two words\x17\x1b[200~a\r\n\tb\rc\x1b[201~")
        screen.match(re.compile(r"> two a.*b.*c"))
        screen.send("\x1b[D\x1b\r")
        screen.expect("queued: two a")
        server.release()
        screen.expect("PONG")
        leave(screen)
    assert prompts(server.requests[1]) == ["go", "two a\n\tb\nc"]


@pytest.mark.parametrize(
    ("live", "keys", "queued", "left", "ended"),
    [
        pytest.param(True, "ab\x7fc\r", ["ac"], "", False, id="backspace"),
        pytest.param(True, "one two  \x17x", [], "one x", False, id="a word"),
        pytest.param(True, "\x1b[200~a\nb\x1b[201~\x15c\r", ["c"], "", False, id="a line"),
        pytest.param(True, "one\rtwo\x15\x7f\x17x", ["one"], "x", False, id="not what is sent"),
        pytest.param(True, "\x1b[A\x1bOBa\x1bb\x01c", [], "ac", False, id="other keys"),
        pytest.param(True, "a\x04b\rc", ["ab"], "c", False, id="Ctrl-D in a line"),
        pytest.param(True, "a\r\x04b\r", ["a"], "", True, id="Ctrl-D"),
        pytest.param(True, "x\x1b[200~a\r\nb\rc\x1b[201~", [], "xa\nb\nc", False, id="paste"),
        pytest.param(True, "a\r\rb\r\r", ["a\n\nb"], "", False, id="an empty line"),
        pytest.param(False, "a\r\rb\r\r", ["a\nb"], "", False, id="CRLF in line mode"),
        pytest.param(False, "a\r\rb\r", ["a\n\nb"], "", False, id="an empty line there"),
        pytest.param(True, " \r\r", [], "", False, id="blanks"),
    ],
)
def test_keys_while_a_turn_runs_edit_the_line_and_enter_hands_it_over(
    live, keys, queued, left, ended
):
    out, told = io.StringIO(), []
    person = Person((agent.UiScreen if live else Screen)(out, out), io.StringIO())
    typist = agent.Typist(person, told.append, agent.Signals())
    assert typist.edit(keys) == ""
    assert (told, typist.line, person.ended) == (queued, left, ended)


def test_a_paste_whose_end_has_not_come_is_kept_for_it():
    out, told = io.StringIO(), []
    typist = agent.Typist(
        Person(agent.UiScreen(out, out), io.StringIO()), told.append, agent.Signals()
    )
    assert (typist.edit("a\x1b[200~b\rc"), typist.line, told) == ("\x1b[200~b\rc", "a", [])
    assert (typist.edit("\x1b[200~b\rc\x1b[201~\r"), typist.line) == ("", "")
    assert told == ["ab\nc"]


def test_retry_asks_again_and_says_when_there_is_nothing(terminal):
    with FlakyServer(["PONG", "PANG"]) as server:
        screen = terminal(server=server)
        ask(screen, "/retry")
        screen.expect("agent: there is nothing to ask again")
        ask(screen, "ping")
        screen.expect("PONG")
        ask(screen, "/retry")
        screen.expect("PANG")
        leave(screen)
    assert server.requests[0]["messages"] == server.requests[1]["messages"]


@pytest.mark.parametrize("typing", LONG_UI, indirect=True)
def test_ctrl_d_in_a_turn_leaves_behind_it(typing):
    with FlakyServer([HELD, "PONG"]) as server:
        screen = typing(server)
        screen.send("last\r")
        screen.expect("queued: last")
        screen.send("\x04")
        until(lambda: not screen.read(0.1))
        server.release()
        screen.expect("PONG")
        assert (screen.wait(), termios.tcgetattr(screen.slave)) == (0, screen.settings)
    assert prompts(server.requests[1]) == ["go", "last"]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)]
)
def test_a_signal_leaves_the_terminal_as_it_was(typing, number):
    with FlakyServer([HELD]) as server:
        screen = typing(server)
        screen.send("half")
        screen.expect("half")
        screen.process.send_signal(number)
        assert (screen.wait(), termios.tcgetattr(screen.slave)) == (128 + number, screen.settings)
        assert re.findall(r"\x1b\[\?2004([hl])", screen.output)[-1:] in ([], ["l"])


def type_on(screen, letters: str, chance: random.Random, server: FlakyServer) -> None:
    """Type letters at random moments, and let the server go on at one of them."""
    at = chance.randrange(len(letters))
    for letter in letters[:at]:
        screen.send(letter)
        screen.read(chance.random() / 100)
    server.release()
    for letter in letters[at:]:
        screen.send(letter)
        screen.read(chance.random() / 100)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(int(os.environ.get("TYPING_SEEDS", "6"))))
def test_no_key_is_lost_where_a_question_comes_and_where_the_turn_ends(typing, seed):
    """All that was typed stands in the answer to the question or in the next prompt, in order."""
    chance, letters = random.Random(seed), string.ascii_letters
    step = call("write_file", path="a.txt", content="a") | {"hold": "before"}
    with FlakyServer([step, {"text": "PONG", "hold": "before"}, "PANG"]) as server:
        screen = typing(server)
        type_on(screen, letters[:26], chance, server)
        screen.match(re.compile(r"\[y/n/a\] "))
        until(lambda: not screen.read(0.1))
        screen.send("\r")
        until(lambda: len(server.requests) == 2 and server.holding.is_set())
        type_on(screen, letters[26:], chance, server)
        screen.match(re.compile(r"(?s)unpriced.*?> "))
        until(lambda: not screen.read(0.25))
        screen.send("\r")
        screen.expect("PANG")
        leave(screen)
    answer = results(server.requests[1])[0].removeprefix("denied: the user said").lstrip(": ")
    answer = "" if answer == "no" else answer
    draft = prompts(server.requests[2])[-1]
    assert draft == "".join(letter for letter in letters if letter not in answer)
    assert answer in letters


# -- writing: with readline, and with the extra's line editor -------------------------------------

PLAIN = pytest.mark.parametrize(
    "ui", [pytest.param(False, id="plain"), pytest.param(True, id="ui", marks=pytest.mark.long)]
)
UI = pytest.mark.parametrize(
    "ui", [pytest.param(False, id="plain", marks=pytest.mark.long), pytest.param(True, id="ui")]
)


def history(workspace: Path) -> Path:
    """The file of what was typed."""
    return workspace / ".agent" / "history"


@UI
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param("\x1b[200~one\rtwo\rthree\x1b[201~\r", id="bracketed", marks=pytest.mark.long),
        pytest.param("one\r\ntwo\r\nthree\r\n", id="CRLF", marks=pytest.mark.long),
        pytest.param("one\x1b\rtwo\x1b\rthree\r", id="Alt-Enter"),
    ],
)
def test_lines_that_are_pasted_or_made_are_one_prompt(terminal, workspace, ui, keys):
    with FlakyServer(["PONG"] * 3) as server:
        screen = terminal(server=server, ui=ui)
        screen.prompt()
        screen.send(keys)
        screen.expect("PONG")
        leave(screen)
    assert [prompts(request) for request in server.requests] == [["one\ntwo\nthree"]]
    assert history(workspace).read_text() == "one\u2028two\u2028three\nexit\n"
    shown = screen.text[: screen.text.index("PONG")]
    assert [word for word in ("one", "two", "three") if word not in shown] == []


@UI
def test_a_backslash_at_the_end_goes_on_in_the_next_line(terminal, ui):
    with FlakyServer(["PONG"]) as server:
        screen = terminal(server=server, ui=ui)
        screen.prompt()
        before = screen.output.count("\x1b[?2004h")
        screen.send("one\\\r")
        if ui:
            screen.match(re.compile(r"> one\s*\n"))
        while not ui and screen.output.count("\x1b[?2004h") == before:
            assert screen.read(60)
        screen.send("two\r")
        screen.expect("PONG")
        leave(screen)
    assert prompts(server.requests[0]) == ["one\ntwo"]


@PLAIN
def test_what_was_typed_is_there_after_a_kill_and_holds_no_key(terminal, workspace, ui):
    with FlakyServer(["PONG"] * 5) as server:
        screens = [terminal(server=server, ui=ui) for _ in range(2)]  # two at the same time
        for name, screen in zip(("first", "second"), screens, strict=True):
            ask(screen, f"{name} with {KEY}")
            screen.expect("PONG")
            screen.process.kill()
            screen.wait()
        screen = terminal(server=server, ui=ui)
        screen.prompt()
        screen.send("\x1b[A\x1b[A\r")
        screen.expect("PONG")
        leave(screen)
    assert prompts(server.requests[-1]) == ["first with [masked]"]
    lines = ["first with [masked]", "second with [masked]", "first with [masked]", "exit"]
    assert history(workspace).read_text().splitlines() == lines
    assert stat.S_IMODE(history(workspace).stat().st_mode) == 0o600


@UI
def test_a_cleared_draft_is_in_the_history_and_ctrl_r_finds_it(terminal, ui):
    with FlakyServer(["PONG", "PANG"]) as server:
        screen = terminal(server=server, ui=ui)
        screen.prompt()
        screen.send("a draft of mine")
        screen.expect("mine")
        screen.listens()
        screen.interrupt()
        ask(screen, "ping")
        screen.expect("PONG")
        screen.prompt()
        screen.send("\x12of mi\r")
        screen.expect("PANG")
        leave(screen)
    assert prompts(server.requests[1]) == ["ping", "a draft of mine"]


@UI
def test_tab_completes_commands_and_files(terminal, workspace, ui):
    (workspace / "alpha one.txt").write_text("the first letter")
    with FlakyServer(["PONG"]) as server:
        screen = terminal(server=server, ui=ui)
        ask(screen, "/stat\t")
        screen.expect("model: flaky-1")
        ask(screen, "see @al\t")
        screen.expect("PONG")
        leave(screen)
    text = 'see @"alpha one.txt"\n\n[file: alpha one.txt]\n1: the first letter'
    assert prompts(server.requests[0]) == [text]


@pytest.mark.parametrize("change", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["NO_COLOR", "dumb"])
def test_without_codes_the_line_editor_writes_none_either(terminal, workspace, change):
    (workspace / "alpha.txt").touch()
    (workspace / "alto.txt").touch()
    with FlakyServer(["PONG"]) as server:
        screen = terminal(server=server, env=change, ui=True)
        ask(screen, "wrong\x01\x0b你\x7fsee @a\t\tp\t")  # also where it moves in the line
        screen.expect("PONG")
        leave(screen)
    assert "\x1b" not in screen.output
    assert prompts(server.requests[0])[0].startswith("see @alpha.txt\n")


@pytest.mark.parametrize("kind", ["link", "tracked"])
def test_a_history_that_is_not_ours_is_neither_read_nor_written(terminal, workspace, kind):
    other = workspace.parent / "other"
    other.write_text("rm -rf x\n")
    history(workspace).parent.mkdir(mode=0o700)
    if kind == "link":
        history(workspace).symlink_to(other)
    else:
        history(workspace).write_text("rm -rf x\n")
        for line in (["init", "-q"], ["add", "-f", ".agent/history"]):
            subprocess.run(["git", *line], cwd=workspace, check=True)
    with FlakyServer([]) as server:
        screen = terminal(server=server)
        assert "history" in screen.prompt()
        screen.send("\x1b[A\r")
        leave(screen)
    assert (history(workspace).read_text(), server.requests) == ("rm -rf x\n", [])


@UI
def test_what_the_editor_leaves_is_the_draft_of_the_next_prompt(terminal, tmp_path, ui):
    (tmp_path / "add.py").write_text("import sys\nopen(sys.argv[1], 'a').write('\\nand more\\n')")
    editor = f"{sys.executable} {tmp_path / 'add.py'}"
    with FlakyServer(["PONG"]) as server:
        screen = terminal(server=server, env={"EDITOR": editor, "VISUAL": ""}, ui=ui)
        ask(screen, "/edit begun")
        screen.expect("and more")
        screen.listens()
        assert server.requests == []
        screen.send("\r")
        screen.expect("PONG")
        leave(screen)
    assert prompts(server.requests[0]) == ["begun\nand more"]


@pytest.mark.parametrize(
    ("editor", "shown"),
    [
        pytest.param("sh -c 'rm $0; mkfifo $0'", "sh: no regular file", id="pipe"),
        pytest.param("", "set VISUAL or EDITOR", id="unset", marks=pytest.mark.long),
        pytest.param("false", "ended with 1", id="fails", marks=pytest.mark.long),
        pytest.param("no-such-editor", "No such file", id="missing", marks=pytest.mark.long),
        pytest.param("rm", "rm: No such file", id="removes", marks=pytest.mark.long),
    ],
)
def test_without_an_editor_the_text_stays(terminal, editor, shown):
    with FlakyServer(["PONG"]) as server:
        screen = terminal(server=server, env={"VISUAL": editor})
        ask(screen, "/edit keep this")
        screen.expect(shown)
        screen.expect("> keep this")
        screen.send("\r")
        screen.expect("PONG")
        leave(screen)
    assert prompts(server.requests[0]) == ["keep this"]


def test_vi_keys_are_those_of_readline_settings(terminal, home):
    (home / ".inputrc").write_text("set editing-mode emacs\n  Set Editing-Mode vi\n")
    with FlakyServer(["PONG"]) as server:
        screen = terminal(server=server, ui=True)
        screen.prompt()
        screen.send("ping pang\x1bbcwpong\r")
        screen.expect("PONG")
        ask(screen, "exit")
        assert screen.wait() == 0
    assert prompts(server.requests[0]) == ["ping pong"]


def test_a_signal_at_the_prompt_of_the_line_editor_keeps_the_draft(terminal, workspace):
    with FlakyServer([]) as server:
        screen = terminal(server=server, ui=True)
        screen.prompt()
        screen.send("half a thought")
        screen.expect("thought")
        screen.process.terminate()
        assert (screen.wait(), termios.tcgetattr(screen.slave)) == (143, screen.settings)
    assert history(workspace).read_text() == "half a thought\n"
