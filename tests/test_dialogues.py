"""Dialogues: a person at a terminal, with the extra `ui` and without it.

Each test is a conversation from the first prompt to the last one: what is typed, and what comes of
it in requests, files and sessions; of the screen only words are looked at, never how they are
drawn. `dialogue` runs it plain in the quick tier and with the extra in the slow one, `either` in
both ways in both tiers. `leave` sees that the terminal is as it was and each transcript valid.
"""

import base64
import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    ESCAPES,
    NAP,
    alive,
    prompts,
    put_session,
    results,
    roles,
    session_files,
    talk,
    until,
)

from agent import problems
from flaky_server import FlakyServer

BEGIN, END = "\ue000", "\ue001"  # the terminal begins, or ends, to mark what is pasted
LIMIT = 60.0  # seconds; only tells a hang
QUESTION = re.compile(rf"\?\s+\[y(?:es)?/n(?:/a)?(?:/d)?\][\s{BEGIN}{END}]*$")
long = pytest.mark.long


class Talk:
    """One conversation with the agent on a terminal; `text` is what it showed, without codes."""

    def __init__(self, screen: Any, ui: bool) -> None:
        self.screen, self.ui, self.seen = screen, ui, 0

    @property
    def text(self) -> str:
        """All that was shown, with a letter where marking begins and ends."""
        marked = self.screen.output.replace("\x1b[?2004h", BEGIN).replace("\x1b[?2004l", END)
        return ESCAPES.sub("", marked)

    def match(self, pattern: str | re.Pattern[str]) -> str:
        """Read until this is behind what was expected last; returns all up to its end."""
        deadline = time.monotonic() + LIMIT
        while not (found := re.compile(pattern).search(self.text, self.seen)):
            over = self.screen.process.poll() is not None and not self.screen.read(0.1)
            if over or time.monotonic() > deadline:
                raise AssertionError(f"no {pattern!r}; over: {over}; the screen:\n{self.text}")
            self.screen.read(0.1)
        start, self.seen = self.seen, found.end()
        return self.text[start : self.seen]

    def expect(self, text: str) -> str:
        """Read until the text was shown."""
        return self.match(re.escape(text))

    def prompt(self, draft: str = "") -> str:
        """Wait until a line can be typed, behind this draft; what was shown before it."""
        drawn = rf"{BEGIN}[^{END}>]*>[ \b]*" if self.ui else rf"(?:^|[\r\n{BEGIN}{END}]|\^C)> "
        shown = self.match(drawn + re.escape(draft) + ("" if self.ui or draft else "$"))
        if self.ui:  # keys are read one by one there, Ctrl-C too
            until(lambda: not termios.tcgetattr(self.screen.slave)[3] & termios.ISIG)
        self.screen.listens()
        return shown

    def next_line(self) -> None:
        """Enter in a prompt that goes on; then the next line is typed, and is not part of a paste.

        Readline gives the terminal back between two lines, and begins to mark pastes anew.
        """
        self.send("\r")
        self.match("\n" if self.ui else rf"\n[^{BEGIN}]*{BEGIN}")
        self.screen.listens()

    def question(self) -> str:
        """Wait for a question of permission; what was shown before it, with it."""
        shown = self.match(QUESTION)
        self.screen.listens()
        return shown

    def send(self, keys: str) -> None:
        """Press keys; Enter is a carriage return."""
        self.screen.send(keys)

    def type(self, text: str) -> None:
        """Type words that are then to be seen."""
        self.send(text)
        self.expect(text)
        self.screen.listens()

    def say(self, text: str, answer: str = "") -> str:
        """A line at the prompt, and what is shown up to the answer."""
        self.prompt()
        self.send(text + "\r")
        return self.expect(answer) if answer else ""

    def queue(self, text: str) -> None:
        """A line while a turn runs, until it is shown as queued."""
        self.send(text + "\r")
        word = re.escape(text)
        self.match(rf"(?is){word}.{{0,80}}queued|queued.{{0,80}}{word}")

    def modes(self) -> list[Any]:
        """The modes of the terminal."""
        return termios.tcgetattr(self.screen.slave)

    def leave(self, keys: str = "exit\r") -> None:
        """Leave at the prompt: the terminal is as it was, each session valid."""
        self.prompt()
        self.send(keys)
        assert (self.screen.wait(), self.modes()) == (0, self.screen.settings)


@pytest.fixture
def opened(terminal: Callable, workspace: Path) -> Iterator[Callable]:
    """Start a conversation; at the end all sessions that were left are valid."""

    def start(*args: str, ui: bool, **more: Any) -> Talk:
        return Talk(terminal(*args, ui=ui, **more), ui)

    yield start
    kept = [json.loads(path.read_text()) for path in session_files(workspace)]
    assert [problem for session in kept for problem in problems(session["messages"])] == []


@pytest.fixture(params=[pytest.param(False, id="plain"), pytest.param(True, id="ui", marks=long)])
def dialogue(request: pytest.FixtureRequest, opened: Callable) -> Callable:
    """Start a conversation; with the extra only in the slow tier."""
    return functools.partial(opened, ui=request.param)


@pytest.fixture(params=[False, True], ids=["plain", "ui"])
def either(request: pytest.FixtureRequest, opened: Callable) -> Callable:
    """Start a conversation, with the extra and without it in both tiers."""
    return functools.partial(opened, ui=request.param)


def call(name: str, **arguments: object) -> dict:
    """A step in which the model calls one tool."""
    return {"call": name, "arguments": arguments}


def wait_for(path: Path) -> dict:
    """A step in which the model runs a command that ends when a file is there."""
    return call("bash", command=f"touch begun; until [ -e {path.name} ]; do sleep 0.02; done")


def script(folder: Path, name: str, text: str) -> str:
    """A program of the user."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


# -- writing -------------------------------------------------------------------------------------

THREE = "one\ntwo\nthree"
PASTES = {
    "\x1b[200~one\rtwo\rthree\x1b[201~\r": THREE,
    "\x1b[200~one\ntwo\nthree\x1b[201~\r": THREE,
    "\x1b[200~one\r\ntwo\r\nthree\x1b[201~\r": THREE,
    "one\rtwo\rthree\r": THREE,
    "one\ntwo\nthree\n": THREE,
    "one\r\ntwo\r\nthree\r\n": THREE,
    "\x1b[200~look:\r/exit\r!touch made.txt\x1b[201~\r": "look:\n/exit\n!touch made.txt",
    "look:\r/exit\r!touch made.txt\r": "look:\n/exit\n!touch made.txt",
    "\x1b[200~if x:\r\ty = 1\x1b[201~\r": "if x:\n\ty = 1",
    "\x1b[200~docker run \\\r  it\x1b[201~\r": "docker run \\\n  it",
    "\x1b[200~你好\r🙂 שלום\x1b[201~\r": "你好\n🙂 שלום",
    "\x1b[200~one\r\n\r\ntwo\r\n\x1b[201~\r": "one\n\ntwo",
    "see \x1b[200~one\r\n\ttwo\x1b[201~ and\x1b[200~\x1b[201~ \x1b[200~3\n4\x1b[201~.\r": (
        "see one\n\ttwo and 3\n4."
    ),
    "a c\x1b[D\x1b[200~b\r\n\x1b[201~\r": "a b\nc",
    "\x1b[200~one\r\n\x1b[201~\x1b[200~two\x1b[201~X\x7f\r": "one\ntwo",
}


def test_a_paste_of_lines_is_one_prompt_and_one_request(either, workspace):
    answers = [f"PONG{number}." for number in range(len(PASTES))]
    with FlakyServer(answers) as server:
        screen = either(server=server)
        for keys, answer in zip(PASTES, answers, strict=True):
            screen.prompt()
            screen.send(keys)
            screen.expect(answer)
        screen.leave()
    assert [prompts(request)[-1] for request in server.requests] == list(PASTES.values())
    assert not (workspace / "made.txt").exists()


def test_alt_enter_and_a_backslash_begin_a_line_and_backspace_takes_a_whole_letter(dialogue):
    with FlakyServer(["PONG1", "PONG2", "PONG3", "PONG4"]) as server:
        screen = dialogue(server=server)
        screen.say("one\x1b\rtwo", "PONG1")
        screen.prompt()
        screen.type("one\\")
        screen.next_line()
        screen.send("two\r")
        screen.expect("PONG2")
        screen.say("你好\x7f", "PONG3")
        screen.say("a🙂\x7f\x7fb", "PONG4")
        screen.leave()
    said = [prompts(request)[-1] for request in server.requests]
    assert said == ["one\ntwo", "one\ntwo", "你", "b"]


def test_what_was_typed_comes_back_in_the_next_process(dialogue, workspace):
    with FlakyServer(["PONG1", "PONG2", "PANG1", "PANG2", "PANG3"]) as server:
        screen = dialogue(server=server)
        screen.say("an alpha line", "PONG1")
        screen.say("\x1b[200~one\rtwo\x1b[201~", "PONG2")
        screen.prompt()
        screen.type("a cleared draft")
        screen.screen.interrupt()
        screen.leave("\x04")
        screen = dialogue(server=server)
        screen.say("\x1b[A", "PANG1")
        screen.say("\x1b[A\x1b[A", "PANG2")
        find(screen, "alph", "an alpha line")
        screen.expect("PANG3")
        screen.leave("\x04")
    said = [prompts(request)[-1] for request in server.requests]
    assert said == ["an alpha line", "one\ntwo", "a cleared draft", "one\ntwo", "an alpha line"]
    history = workspace / ".agent" / "history"
    assert "one\u2028two" in history.read_text(encoding="utf-8")
    assert history.stat().st_mode & 0o777 == 0o600


def find(screen: Talk, part: str, whole: str) -> None:
    """Ctrl-R, a part of an older line, and Enter."""
    screen.prompt()
    screen.send("\x12" + part)
    screen.match(whole[whole.index(part) + len(part) :])
    screen.screen.listens()
    screen.send("\r")


@pytest.fixture
def tree(workspace: Path) -> Path:
    """A repository with files of which some are ignored, some secret, and with commands."""
    subprocess.run(["git", "init", "-q"], cwd=workspace, check=True)
    files = {".gitignore": "data.log\n", "data.txt": "the data\n", "data.log": "ignored\n"}
    files |= {"id_rsa": "a key\n", "id_list.txt": "the list\n"}
    for name, text in (files | {".agents/commands/review.md": "Review with care.\n"}).items():
        path = workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    put_session(workspace, "20250101-100000-aaaa", talk("an older question", "its answer"))
    return workspace


def test_tab_completes_commands_models_files_and_sessions(dialogue, tree):
    with FlakyServer(["PONG1", "PONG2", "PONG3"]) as server:
        screen = dialogue(server=server, env={"AGENT_MODEL": "other-2"})
        for line, rest, shown in [
            ("/comp\t", "/compact", "nothing to compact"),
            ("/model fl\t", "flaky-1", "model: flaky-1"),
            ("read @dat\t", "@data.txt", "PONG1"),
            ("read @id\t", "@id_list.txt", "PONG2"),
            ("/resume 2025\t", "20250101-100000-aaaa", "its answer"),
        ]:
            screen.prompt()
            screen.send(line)
            screen.expect(rest)
            screen.send("\r")
            assert "no command" not in screen.expect(shown)
        screen.say("go on", "PONG3")
        screen.leave()
    first, second, third = server.requests
    assert (first["model"], prompts(third)) == ("flaky-1", ["an older question", "go on"])
    assert "the data" in prompts(first)[-1] and "the list" in prompts(second)[-1]
    assert "ignored" not in str(first) and "a key" not in str(second)


@long
def test_tab_completes_the_commands_of_the_project_and_nothing_that_is_ignored(dialogue, tree):
    with FlakyServer(["PONG"]) as server:
        screen = dialogue(server=server)
        screen.prompt()
        screen.send("/rev\t")
        screen.expect("/review")
        screen.send("\r")
        screen.question()
        screen.send("y\r")
        screen.expect("PONG")
        screen.prompt()
        screen.send("/nothing-like-this\t@data.l\t")
        screen.expect("@data.l")
        screen.screen.listens()
        screen.screen.interrupt()
        screen.leave()
    assert "Review with care." in prompts(server.requests[0])[-1]
    assert "data.log" not in screen.text


def test_a_path_puts_its_file_into_the_prompt_when_it_may_be_read(dialogue, workspace, tmp_path):
    (workspace / "data.txt").write_text("text of the data\n")
    (workspace / ".env").write_text("TOKEN=text-of-the-secret\n")
    (tmp_path / "outside.txt").write_text("text from outside\n")
    (workspace / "link.txt").symlink_to(tmp_path / "outside.txt")
    line = "see @data.txt and @.env and @../outside.txt and @link.txt and @nobody"
    with FlakyServer(["PONG1", "PONG2"]) as server:
        screen = dialogue(server=server)
        screen.say(line, "PONG1")
        screen.say("mail bob@data.txt of it", "PONG2")
        screen.leave()
    sent = prompts(server.requests[0])[0]
    assert sent.startswith(line) and "text of the data" in sent
    assert "text-of-the-secret" not in sent and "text from outside" not in sent
    assert prompts(server.requests[1])[1] == "mail bob@data.txt of it"


# -- the editor ----------------------------------------------------------------------------------


def test_the_editor_gives_its_text_to_the_prompt_and_a_failing_one_loses_nothing(
    dialogue, workspace, tmp_path
):
    failing = "[ -e fail ] && exit 3"
    writes = '[ "$1" = --wait ] && printf "alpha\\nbeta\\n" > "$2" && printf "%s" "$2" > where'
    environ = {
        "VISUAL": script(tmp_path, "good", f"{failing}\n{writes}") + " --wait",
        "EDITOR": script(tmp_path, "wrong", "touch wrong"),
    }
    with FlakyServer(["PONG1", "PONG2"]) as server:
        screen = dialogue(server=server, env=environ)
        screen.say("/edit")
        screen.prompt("alpha")
        assert server.requests == []
        screen.send("\r")
        screen.expect("PONG1")
        (workspace / "fail").touch()
        screen.say("/edit")
        screen.match("(?i)edit.*(3|fail)|(3|fail).*edit")
        screen.say("ping", "PONG2")
        screen.leave()
    assert prompts(server.requests[1]) == ["alpha\nbeta", "ping"]
    assert not (workspace / "wrong").exists()
    assert not Path((workspace / "where").read_text()).exists()


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="none"),
        pytest.param({"EDITOR": "no-such-editor-here"}, id="missing", marks=long),
    ],
)
def test_without_an_editor_it_is_said_what_to_set(dialogue, environ):
    with FlakyServer(["PONG"]) as server:
        screen = dialogue(server=server, env=environ)
        screen.say("/edit")
        shown = screen.prompt()
        screen.send("ping\r")
        screen.expect("PONG")
        screen.leave()
    assert environ.get("EDITOR", "EDITOR") in shown.replace("/edit", "")
    assert prompts(server.requests[0]) == ["ping"]


@long
def test_ctrl_c_belongs_to_an_editor_that_goes_on(dialogue, workspace, tmp_path):
    lines = "trap 'touch caught' INT\ntouch editing\nuntil [ -e go ]; do sleep 0.02; done"
    editor = script(tmp_path, "patient", lines + '\nprintf "kept words" > "$1"')
    with FlakyServer(["PONG"]) as server:
        screen = dialogue(server=server, env={"EDITOR": editor})
        screen.say("/edit")
        until((workspace / "editing").exists)
        screen.screen.interrupt()
        until((workspace / "caught").exists)
        (workspace / "go").touch()
        screen.prompt("kept words")
        screen.send("\r")
        screen.expect("PONG")
        screen.leave()
    assert prompts(server.requests[0]) == ["kept words"]


def test_the_keys_of_vi_are_there_when_readline_is_set_so(dialogue, home):
    (home / ".inputrc").write_text("set editing-mode vi\n")
    with FlakyServer(["PONG"]) as server:
        screen = dialogue(server=server)
        screen.prompt()
        screen.type("a small worldX")
        for keys in ("\x1b", "x", "b", "i", "wide ", "\r"):
            screen.send(keys)
        screen.expect("PONG")
        screen.leave()
    assert prompts(server.requests[0]) == ["a small wide world"]


# -- typing while a turn runs ------------------------------------------------------------------


def test_a_queued_line_is_the_next_user_message_of_the_same_turn(either, workspace):
    (workspace / "a.txt").write_text("old\n")
    step = call("write_file", path="a.txt", content="new\n") | {"hold": "before"}
    with FlakyServer([step, "PONG", "PANG"]) as server:
        screen = either("--mode", "auto", server=server)
        screen.say("write")
        until(server.holding.is_set)
        screen.queue("also this")
        assert len(server.requests) == 1
        server.release()
        screen.expect("PONG")
        assert (workspace / "a.txt").read_text() == "new\n"
        screen.say("/undo")
        screen.say("ping", "PANG")
        screen.leave()
    assert roles(server.requests[1]) == ["system", "user", "assistant", "tool", "user"]
    assert prompts(server.requests[1]) == ["write", "also this"]
    assert "also this" not in str(server.requests[2]["messages"])
    assert (workspace / "a.txt").read_text() == "old\n"


def test_queued_lines_keep_their_order_and_a_queued_command_is_none_of_them(dialogue, workspace):
    with FlakyServer([wait_for(workspace / "go"), "PONG", "PANG"]) as server:
        screen = dialogue("--mode", "auto", server=server)
        screen.say("run")
        until((workspace / "begun").exists)
        for line in ("first words", "second words", "/status"):
            screen.queue(line)
        (workspace / "go").touch()
        screen.expect("PONG")
        screen.match(rf"session:? +{session_files(workspace)[0].stem}")
        screen.say("ping", "PANG")
        screen.leave()
    assert roles(server.requests[1])[:5] == ["system", "user", "assistant", "tool", "user"]
    said = "\n".join(prompts(server.requests[1])[1:])
    assert said.split("\n") == ["first words", "second words"]
    assert "/status" not in str(server.requests[-1]["messages"])
    assert prompts(server.requests[-1])[-1] == "ping"


@long
def test_a_line_that_is_queued_while_the_last_words_come_is_answered_in_the_same_turn(dialogue):
    step = {"text": "one two three four", "hold_after": 2}
    with FlakyServer([step, "PONG", "PANG"]) as server:
        screen = dialogue(server=server)
        screen.say("count")
        until(server.holding.is_set)
        screen.queue("more words")
        server.release()
        screen.expect("PONG")
        screen.say("/undo")
        screen.say("ping", "PANG")
        screen.leave()
    assert prompts(server.requests[1]) == ["count", "more words"]
    assert server.requests[1]["messages"][2]["content"] == "one two three four"
    assert not {"count", "more words"} & set(prompts(server.requests[2]))


@long
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param("\x1b[200~one\rtwo\rthree\x1b[201~\r", id="marked"),
        pytest.param("one\rtwo\rthree\r", id="plain"),
        pytest.param("one\r\ntwo\r\nthree\r\n", id="CRLF"),
    ],
)
def test_a_paste_while_a_turn_runs_is_queued_whole(dialogue, workspace, keys):
    with FlakyServer([wait_for(workspace / "go"), "PONG"]) as server:
        screen = dialogue("--mode", "auto", server=server)
        screen.say("run")
        until((workspace / "begun").exists)
        screen.send(keys)
        screen.match("(?is)queued.*three|three.*queued")
        (workspace / "go").touch()
        screen.expect("PONG")
        screen.leave()
    said = "\n".join(prompts(server.requests[1])[1:])
    assert [line for line in said.split("\n") if line] == ["one", "two", "three"]


def test_a_queued_line_answers_no_question_and_a_later_yes_does(dialogue, workspace):
    first, second = (call("write_file", path=name, content="x") for name in ("a.txt", "b.txt"))
    with FlakyServer([first | {"hold": "before"}, second, "PONG"]) as server:
        screen = dialogue(server=server)
        screen.say("write")
        until(server.holding.is_set)
        screen.queue("y")
        server.release()
        assert "a.txt" in screen.question()
        assert not (workspace / "a.txt").exists()
        screen.send("n\r")
        assert "b.txt" in screen.question()
        screen.send("y\r")
        screen.expect("PONG")
        screen.leave()
    assert [(workspace / name).exists() for name in ("a.txt", "b.txt")] == [False, True]
    assert prompts(server.requests[1]) == ["write", "y"]
    assert results(server.requests[1])[0].startswith("denied: ")


def test_an_unfinished_line_is_no_answer_and_waits_at_the_next_prompt(dialogue, workspace):
    step = call("write_file", path="a.txt", content="x") | {"hold": "before"}
    with FlakyServer([step, "PONG", "PANG"]) as server:
        screen = dialogue(server=server)
        screen.say("write")
        until(server.holding.is_set)
        screen.send("half a thou")
        screen.expect("half a thou")
        server.release()
        screen.question()
        screen.send("y\r")
        screen.expect("PONG")
        screen.prompt("half a thou")
        screen.send("ght\r")
        screen.expect("PANG")
        screen.leave()
    assert (workspace / "a.txt").read_text() == "x"
    assert [prompts(request)[-1] for request in server.requests] == ["write"] * 2 + [
        "half a thought"
    ]


def test_ctrl_c_gives_a_queued_line_back(dialogue):
    with FlakyServer([{"text": "one two", "hold": "before"}, "PONG"]) as server:
        screen = dialogue(server=server)
        screen.say("count")
        until(server.holding.is_set)
        screen.queue("my own words")
        screen.screen.interrupt()
        screen.prompt("my own words")
        assert len(server.requests) == 1
        screen.send("\r")
        screen.expect("PONG")
        screen.leave()
    assert prompts(server.requests[1])[-1].split("\n")[-1] == "my own words"


@long
def test_an_error_of_the_server_gives_a_queued_line_back(dialogue):
    step = {"status": 400, "body": {"error": {"message": "the moon"}}, "hold": "before"}
    with FlakyServer([step, "PONG"]) as server:
        screen = dialogue(server=server)
        screen.say("count")
        until(server.holding.is_set)
        screen.queue("my own words")
        server.release()
        screen.expect("the moon")
        screen.prompt("my own words")
        screen.send("\r")
        screen.expect("PONG")
        screen.leave()
    assert prompts(server.requests[1])[-1].split("\n")[-1] == "my own words"


# -- approval ------------------------------------------------------------------------------------


def test_an_edit_is_shown_as_a_diff_before_it_is_made(dialogue, workspace):
    (workspace / "a.txt").write_text("kept\nold line\n")
    step = call("edit_file", path="a.txt", old="old line", new="new line")
    with FlakyServer([step, "PONG"]) as server:
        screen = dialogue(server=server)
        screen.say("edit")
        shown = screen.question()
        assert (workspace / "a.txt").read_text() == "kept\nold line\n"
        screen.send("y\r")
        screen.expect("PONG")
        screen.leave()
    assert re.search(r"-\s*old line", shown) and re.search(r"\+\s*new line", shown)
    assert "a.txt" in shown and (workspace / "a.txt").read_text() == "kept\nnew line\n"


# -- Ctrl-C --------------------------------------------------------------------------------------


def reach_draft(screen: Talk, server: FlakyServer) -> None:
    """A draft at the prompt."""
    screen.type("a draft")


def reach_menu(screen: Talk, server: FlakyServer) -> None:
    """What a word can be completed to is on the screen."""
    screen.send("/co\t\t")
    screen.expect("copy")


def reach_stream(screen: Talk, server: FlakyServer) -> None:
    """The model speaks."""
    screen.send("count\r")
    until(server.holding.is_set)
    screen.expect("one")


def reach_question(screen: Talk, server: FlakyServer) -> None:
    """A question of permission waits."""
    screen.send("write it\r")
    screen.question()


def reach_command(screen: Talk, server: FlakyServer, line: str = "run it") -> None:
    """A command runs."""
    screen.send(line + "\r")
    until(lambda: alive(f"sleep\0{NAP}"))


def reach_retry(screen: Talk, server: FlakyServer) -> None:
    """The agent waits until it may ask again."""
    screen.send("again\r")
    until(lambda: 429 in server.replies)


def reach_compaction(screen: Talk, server: FlakyServer) -> None:
    """The model writes the hand-over note."""
    screen.send("/compact\r")
    until(server.holding.is_set)


LATER = {"status": 429, "headers": {"Retry-After": "30"}, "body": {"error": {"message": "later"}}}
PLACES: dict[str, tuple[list[Any], Callable[..., None]]] = {
    "compaction": ([{"text": "a note", "hold": "before"}], reach_compaction),
    "draft": ([], reach_draft),
    "stream": ([{"text": "one two three four", "hold_after": 2}], reach_stream),
    "menu": ([], reach_menu),
    "question": ([call("write_file", path="AGENTS.md", content="obey\n")], reach_question),
    "command": ([call("bash", command=f"sleep {NAP}")], reach_command),
    "retry": ([LATER], reach_retry),
    "editor": ([], functools.partial(reach_command, line="/edit")),
    "own command": ([], functools.partial(reach_command, line=f"!sleep {NAP}")),
}


@pytest.mark.parametrize(
    "places",
    [
        pytest.param(list(PLACES), id="all"),
        *(pytest.param([name], id=name, marks=long) for name in PLACES),
    ],
)
def test_ctrl_c_gives_the_prompt_back_at_each_place(dialogue, workspace, tmp_path, places):
    past = [talk(f"question {n}?", f"answer {n}. " * 900)[1:] for n in range(8)]
    put_session(workspace, "20250101-100000-aaaa", sum(past, talk("first?", "first.")))
    steps = [step for name in places for step in PLACES[name][0]]
    editor = script(tmp_path, "editor", f"exec sleep {NAP}")
    with FlakyServer([*steps, "PONG"]) as server:
        screen = dialogue("--mode", "auto", "--resume", server=server, env={"VISUAL": editor})
        screen.prompt()
        modes = screen.modes()
        for name in places:
            PLACES[name][1](screen, server)
            screen.screen.interrupt()
            screen.prompt()
            assert (name, screen.modes(), alive(NAP)) == (name, modes, [])
            server.wait_idle()
        screen.send("ping\r")
        screen.expect("PONG")
        screen.leave()
    assert prompts(server.requests[-1])[-1].split("\n")[-1] == "ping"
    assert not (workspace / "AGENTS.md").exists()
    assert "question 7?" in str(server.requests[-1]["messages"])


# -- resize --------------------------------------------------------------------------------------


def test_another_size_of_the_window_costs_no_letter(dialogue, workspace):
    step = {"text": "alpha beta gamma delta epsilon", "hold_after": 2}
    with FlakyServer([step, "PONG"]) as server:
        screen = dialogue(server=server)
        screen.prompt()
        screen.type("half a thou")
        for size in ((24, 40), (10, 20), (40, 132)):
            termios.tcsetwinsize(screen.screen.master, size)
        screen.send("ght\r")
        until(server.holding.is_set)
        screen.expect("alpha")
        for size in ((24, 40), (10, 30), (24, 80)):
            termios.tcsetwinsize(screen.screen.master, size)
        server.release()
        screen.expect("epsilon")
        screen.say("ping", "PONG")
        screen.leave()
    assert prompts(server.requests[1]) == ["half a thought", "ping"]
    assert server.requests[1]["messages"][2]["content"] == step["text"]


# -- commands ------------------------------------------------------------------------------------


def test_retry_copy_clear_and_an_unknown_command(dialogue, workspace, tmp_path):
    clip = tmp_path / "clip"
    names = ("wl-copy", "xclip", "xsel", "pbcopy")
    for name in names:
        script(tmp_path, name, f"cat > {clip}")
    path = f"{tmp_path}:{os.environ['PATH']}"
    with FlakyServer(["PONG", "PANG", "PENG"]) as server:
        screen = dialogue(server=server, env={"PATH": path, "DISPLAY": ":9"})
        screen.say("/retry")
        screen.say("/hlep", "/help")
        screen.say("/copy")
        screen.prompt()
        assert server.requests == []
        screen.send("ping\r")
        screen.expect("PONG")
        screen.say("/retry", "PANG")
        screen.say("/copy")
        screen.prompt()
        code = base64.b64encode(b"PANG").decode()
        copied = code in screen.screen.output or (clip.exists() and clip.read_text() == "PANG")
        screen.send("/clear\r")
        screen.expect(session_files(workspace)[0].stem)
        screen.say("anew", "PENG")
        screen.leave()
    assert copied
    assert [prompts(request) for request in server.requests] == [["ping"], ["ping"], ["anew"]]
    assert [roles(request) for request in server.requests] == [["system", "user"]] * 3
    kept = [json.loads(file.read_text())["messages"] for file in session_files(workspace)]
    assert {messages[-1]["content"] for messages in kept} == {"PANG", "PENG"}


def test_show_prints_the_whole_of_a_call(dialogue, workspace):
    (workspace / "a.txt").write_text("the only line\n")
    steps = [call("bash", command="seq -f row-%.0f. 1000"), call("read_file", path="a.txt")]
    with FlakyServer([*steps, "PONG"]) as server:
        screen = dialogue("--mode", "auto", server=server)
        screen.say("count", "PONG")
        screen.say("/show")
        last = screen.prompt()
        screen.send("/show 2\r")
        first = screen.prompt()
        screen.send("/show 99\r")
        screen.leave()
    assert "the only line" in last and "row-" not in last
    assert [n for n in range(1, 1001) if f"row-{n}." not in first] == []
    assert len(server.requests) == 3


def test_allow_and_deny_are_rules_for_the_session(dialogue, workspace):
    touched = [call("bash", command=f"touch {name}.txt") for name in "abcd"]
    pairs = [step for touch in touched for step in (touch, f"PONG {touch['arguments']}")]
    with FlakyServer(pairs) as server:
        screen = dialogue(server=server)
        screen.say("first")
        screen.question()
        screen.send("n\r")
        screen.expect("PONG")
        for command in ("/allow bash touch *", "/deny bash touch c*"):
            screen.say(command)
        for line in ("second", "third", "fourth"):
            assert "[y/n" not in screen.say(line, "PONG")
        screen.say("/allow", "bash touch *")
        screen.leave()
    assert [(workspace / f"{n}.txt").exists() for n in "abcd"] == [False, True, False, True]
    assert results(server.requests[-1])[2].startswith("denied: ")


def test_a_rule_that_is_none_is_refused_and_changes_nothing(dialogue, workspace):
    with FlakyServer([call("bash", command="touch a.txt"), "PONG"]) as server:
        screen = dialogue(server=server)
        screen.say("/allow no_such_tool *", "no_such_tool")
        screen.say("/deny no_such_tool *", "no_such_tool")
        screen.say("touch")
        screen.question()
        screen.send("y\r")
        screen.expect("PONG")
        screen.leave()
    assert (workspace / "a.txt").exists()


def put_command(folder: Path, name: str, text: str) -> None:
    """A command of one's own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text)


def test_a_command_of_the_project_is_shown_and_asked_for_before_its_first_use(
    dialogue, workspace, home
):
    commands = workspace / ".agents" / "commands"
    put_command(commands, "review", "Review with care.\n!`touch made.txt`\n")
    put_command(commands, "status", "Not the built-in one.\n")
    put_command(home / "config" / "agent" / "commands", "mine", "My own words.\n")
    with FlakyServer(["PONG1", "PONG2", "PONG3"]) as server:
        screen = dialogue(server=server, env={"XDG_CONFIG_HOME": str(home / "config")})
        for answer in ("n", "y"):
            screen.say("/review")
            assert "Review with care." in screen.question()
            assert server.requests == []
            screen.send(answer + "\r")
        screen.expect("PONG1")
        assert "[y/n" not in screen.say("/review", "PONG2")
        assert "[y/n" not in screen.say("/mine", "PONG3")
        screen.say("/status", "flaky-1")
        screen.leave()
    said = prompts(server.requests[2])
    assert [text.split("\n")[0] for text in said] == ["Review with care."] * 2 + ["My own words."]
    assert (len(server.requests), (workspace / "made.txt").exists()) == (3, False)


@long
def test_a_command_of_the_project_that_changed_is_shown_again(dialogue, workspace):
    commands = workspace / ".agents" / "commands"
    put_command(commands, "review", "Review with care.\n")
    with FlakyServer(["PONG"]) as server:
        screen = dialogue(server=server)
        screen.say("/review")
        screen.question()
        screen.send("y\r")
        screen.expect("PONG")
        put_command(commands, "review", "Obey somebody else.\n")
        screen.say("/review")
        assert "Obey somebody else." in screen.question()
        screen.send("n\r")
        screen.leave()
    assert len(server.requests) == 1


# -- no codes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ui", "change"),
    [
        pytest.param(True, {"NO_COLOR": "1"}, id="ui NO_COLOR"),
        pytest.param(True, {"TERM": "dumb"}, id="ui dumb", marks=long),
        pytest.param(False, {"NO_COLOR": "1"}, id="plain NO_COLOR", marks=long),
        pytest.param(False, {"TERM": "dumb"}, id="plain dumb", marks=long),
    ],
)
def test_a_whole_dialogue_without_an_escape_code(opened, workspace, ui, change):
    step = call("edit_file", path="a.txt", old="old", new="new") | {"hold": "before"}
    (workspace / "a.txt").write_text("old\n")
    with FlakyServer([step, "**PONG**\n\n```python\nx = 1\n```\n"]) as server:
        screen = opened(server=server, ui=ui, env=change)
        screen.ui = False  # the prompt is the plain one
        screen.say("edit")
        until(server.holding.is_set)
        screen.queue("more words")
        server.release()
        screen.question()
        screen.send("y\r")
        screen.expect("x = 1")
        screen.say("/help", "/help")
        screen.leave()
    assert (workspace / "a.txt").read_text() == "new\n"
    assert ("\x1b" in screen.screen.output, prompts(server.requests[1])[1]) == (
        False,
        "more words",
    )


# -- a real screen -------------------------------------------------------------------------------


class Tmux:
    """The agent in a window of tmux: a real terminal that can be looked at."""

    def __init__(self, folder: Path, env: dict[str, str], args: tuple[str, ...]) -> None:
        self.command = ["tmux", "-f", os.devnull, "-S", str(folder / "tmux")]
        command = [sys.executable, "-m", "agent", *args]
        words = [f"{name}={value}" for name, value in env.items() if name != "TERM"]
        size = ["-x", "80", "-y", "24", "-c", str(folder / "work")]
        self.run(
            "new-session", "-d", *size, "env", "-u", "TMUX", "-u", "NO_COLOR", *words, *command
        )

    def run(self, *args: str) -> str:
        """One command of tmux."""
        environ = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TERM": "xterm"}
        done = subprocess.run(
            [*self.command, *args], env=environ, capture_output=True, text=True, timeout=LIMIT
        )
        return done.stdout

    def keys(self, *keys: str) -> None:
        """Press keys by their names, as tmux knows them."""
        self.run("send-keys", *keys)

    def lines(self) -> list[str]:
        """All lines, also those that went out at the top, without blanks at their ends."""
        return [line.rstrip() for line in self.run("capture-pane", "-p", "-S", "-").split("\n")]

    def shows(self, text: str) -> None:
        """Wait until the text is on the screen."""
        until(lambda: text in "\n".join(self.lines()))


@pytest.fixture
def tmux(tmp_path: Path, workspace: Path, environment: Callable) -> Iterator[Callable]:
    """Start the agent in tmux; its server ends with the test."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    with contextlib.ExitStack() as ends:

        def start(*args: str, server: FlakyServer, ui: bool) -> Tmux:
            screen = Tmux(tmp_path, environment(server, {"PWD": str(workspace)}, ui=ui), args)
            ends.callback(screen.run, "kill-server")
            return screen

        yield start


@long
@pytest.mark.parametrize("ui", [False, True], ids=["plain", "ui"])
def test_on_a_real_screen_each_line_stands_once(tmux, workspace, ui):
    rows = [f"row {n} of the answer" for n in range(1, 61)]
    answer = "Here:\n\n```\n" + "\n".join(rows) + "\n```\n\nThat is all.\n"
    with FlakyServer([{"text": answer, "hold_after": 150}, "PONG"]) as server:
        screen = tmux(server=server, ui=ui)
        screen.shows(">")
        screen.keys("你好", "BSpace", "Enter")
        until(server.holding.is_set)
        screen.shows("row 20 of")
        screen.run("resize-window", "-x", "100", "-y", "24")
        server.release()
        screen.shows("That is all.")
        screen.shows("unpriced")  # the turn is over
        screen.keys("half a thou")
        screen.shows("> half a thou")
        screen.run("resize-window", "-x", "40", "-y", "24")
        screen.keys("ght", "Enter")
        screen.shows("PONG")
        shown = "\n".join(screen.lines())
    assert prompts(server.requests[1]) == ["你", "half a thought"]
    assert [shown.count(row) for row in rows] == [1] * 60
    assert shown.count("half a thought") == 1 and "你好" not in shown
