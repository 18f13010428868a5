"""Signals at every place, at random moments, and Ctrl-Z: real processes, terminals and signals.

A signal is sent when something shows that the place is reached: a request that the server holds,
a file, a line on the screen. Only the fuzz picks its moments at random, by the number of events
or questions so far: `SIGNAL_SEED=1234 pytest tests/test_signals.py` picks others than CI does.
"""

import fcntl
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import NAP, Terminal, alive, put_session, results, session_files, talk, until

from agent import (
    Person,
    Repl,
    Screen,
    Settings,
    Stop,
    build_agent,
    new_session,
    problems,
    state_folder,
)
from flaky_server import FlakyServer

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
LATER = {"status": 429, "headers": {"Retry-After": "30"}, "body": {"error": {"message": "later"}}}
COMMAND = f"touch begun; sleep {NAP} & sleep {NAP}"
HOOK = f'[hooks]\n{{}} = ["/bin/sh", "-c", "touch begun; sleep {NAP} & sleep {NAP}"]\n'


def call(name: str, **arguments: object) -> dict:
    """A step in which the model calls one tool."""
    return {"call": name, "arguments": arguments}


def many(*steps: dict) -> dict:
    """A step in which the model calls several tools at once."""
    return {"calls": [{"name": step["call"], "arguments": step["arguments"]} for step in steps]}


@dataclass
class Scene:
    """What a place needs, and what shows that it is reached."""

    server: FlakyServer
    workspace: Path
    site: socket.socket
    asked: list[socket.socket] = field(default_factory=list)

    def holds(self) -> None:
        """The server holds a request."""
        until(self.server.holding.is_set)

    def begun(self) -> None:
        """A command or a hook runs, with what it started."""
        until(lambda: (self.workspace / "begun").exists() and len(alive(f"sleep\0{NAP}")) > 1)

    def waits(self) -> None:
        """The agent waits before it asks again."""
        until(lambda: self.server.replies == [429])

    def fetches(self) -> None:
        """Two pages were asked for and do not come."""
        self.asked += [self.site.accept()[0] for _ in range(2)]


@dataclass
class Place:
    """One row of the table: the script up to the place, and what shows that it is reached."""

    steps: list[Any]
    reached: Callable[[Scene], None]
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    config: str = ""
    history: bool = False  # resume a session of some length


PLACES = {
    "connected": Place([{"text": "one two", "hold": "before"}], Scene.holds),
    "text": Place([{"text": "one two three", "hold_after": 1}], Scene.holds),
    "reasoning": Place(
        [{"reasoning": "hm hm", "text": "one two three", "hold_after": 0}], Scene.holds
    ),
    "half a call": Place(
        [call("bash", command="touch a b c d e f") | {"hold_after": 1}], Scene.holds
    ),
    "retry wait": Place([LATER], Scene.waits),
    "command": Place(
        [many(call("bash", command=COMMAND), call("bash", command="touch second"))], Scene.begun
    ),
    "background job": Place(
        [call("bash", command=COMMAND.replace("sleep", "setsid sleep") + " &")]
        + [{"text": "one two", "hold": "before"}],
        Scene.begun,
    ),
    "fetches": Place(
        [many(call("fetch_url", url="{site}/a"), call("fetch_url", url="{site}/b"))],
        Scene.fetches,
        args=("--allow", "fetch_url http://127.0.0.1:*"),
    ),
    "before_tool": Place(
        [call("write_file", path="a", content="a")], Scene.begun, config=HOOK.format("before_tool")
    ),
    "after_tool": Place(
        [call("write_file", path="a", content="a")], Scene.begun, config=HOOK.format("after_tool")
    ),
    "on_stop": Place(["one two"], Scene.begun, config=HOOK.format("on_stop")),
    "summary": Place(
        [{"text": "a note", "hold": "before"}],
        Scene.holds,
        args=("--resume",),
        env={"AGENT_COMPACT_AT": "9000"},
        history=True,
    ),
}


@pytest.fixture
def scene(workspace: Path, tmp_path: Path):
    """Put a place together: the server with its script, files, and what to start the agent with."""
    scenes: list[Scene] = []
    with socket.create_server(("127.0.0.1", 0)) as site:
        site.settimeout(60)

        def build(place: Place, *more: Any) -> tuple[Scene, dict[str, str]]:
            url = f"http://127.0.0.1:{site.getsockname()[1]}"
            steps = json.loads(json.dumps(place.steps).replace("{site}", url))
            scenes.append(Scene(FlakyServer([*steps, *more]).start(), workspace, site))
            folder = tmp_path / "config" / "agent"
            folder.mkdir(parents=True)
            (folder / "config.toml").write_text(place.config)
            if place.history:
                talks = [
                    message for n in range(9) for message in talk(f"{n} why? " * 99, "x " * 999)
                ]
                messages = talks[:1] + [m for m in talks if m["role"] != "system"]
                put_session(workspace, "20260101-100000-aaaa", messages)
            env = place.env | {"XDG_CONFIG_HOME": str(folder.parent)}
            return scenes[-1], env

        yield build
        for one in scenes:
            one.server.close()
            for sock in one.asked:
                sock.close()


def sealed(workspace: Path) -> list[dict]:
    """The messages of the one session on disk: valid, and nothing half written beside it."""
    [path] = session_files(workspace)
    messages = json.loads(path.read_text())["messages"]
    assert problems(messages) == []
    assert [p.name for p in path.parent.iterdir() if ".tmp" in p.name] == []
    return messages


def rows(quick: set[tuple[str, signal.Signals]], numbers: Any = tuple(CODES)) -> list[Any]:
    """Each place with each signal; those that are not named belong to the long tier."""
    return [
        pytest.param(
            name,
            number,
            id=f"{name}-{number.name}",
            marks=[] if (name, number) in quick else pytest.mark.long,
        )
        for name in PLACES
        for number in numbers
    ]


ONE_SHOT = {
    ("text", signal.SIGHUP),
    ("fetches", signal.SIGTERM),
    ("background job", signal.SIGINT),
    ("on_stop", signal.SIGTERM),
    ("summary", signal.SIGINT),
}


@pytest.mark.parametrize("name, number", rows(ONE_SHOT))
def test_a_signal_ends_a_run_at_every_place(start_agent, scene, workspace, name, number):
    place = PLACES[name]
    now, env = scene(place)
    agent = start_agent("--yes", "--json", *place.args, "go on", server=now.server, env=env)
    place.reached(now)
    agent.send_signal(number)
    out, err = agent.communicate(timeout=60)
    last = json.loads(out.splitlines()[-1])
    assert (agent.returncode, "Traceback" in err) == (CODES[number], False)
    assert (last["type"], last["status"], last["exit_code"]) == (
        "result",
        "cancelled",
        CODES[number],
    )
    until(lambda: not alive(NAP))
    assert sealed(workspace)[-1]["role"] in ("user", "assistant", "tool")
    assert not (workspace / "second").exists()


def shown_modes(screen: Any) -> tuple[Any, bool]:
    """The modes of the terminal, and whether it was asked to mark what is pasted."""
    marks = re.findall(r"\x1b\[\?2004([hl])", screen.output)
    return termios.tcgetattr(screen.slave), marks[-1:] == ["h"]


def leave_as_it_was(screen: Any, code: int) -> None:
    """The process ends with this code and the terminal is as it was."""
    assert screen.wait() == code
    assert shown_modes(screen) == (screen.settings, False)


REPL = {("command", signal.SIGINT), ("before_tool", signal.SIGINT)}


@pytest.mark.parametrize("name, number", rows(REPL, (signal.SIGINT, signal.SIGTERM)))
def test_ctrl_c_gives_the_prompt_back_and_other_signals_end(
    terminal, scene, workspace, name, number
):
    place = PLACES[name]
    now, env = scene(place, "PONG")
    screen = terminal("--mode", "auto", *place.args, server=now.server, env=env)
    screen.prompt()
    screen.send("go on\r")
    place.reached(now)
    if number != signal.SIGINT:
        screen.process.send_signal(number)
        leave_as_it_was(screen, CODES[number])
    else:
        screen.interrupt()
        screen.expect("(cancelled)")
        screen.prompt()
        until(lambda: name == "background job" or not alive(f"sleep\0{NAP}"))
        screen.send("\x04")
        leave_as_it_was(screen, 0)
    until(lambda: not alive(NAP))
    sealed(workspace)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param("", id="empty"),
        pytest.param("half a line", id="half", marks=pytest.mark.long),
        pytest.param("!" + COMMAND + "\r", id="a command of the user", marks=pytest.mark.long),
        pytest.param("ask\r", id="question", marks=pytest.mark.long),
        pytest.param("which\r", id="ask_user", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long), None]
)
def test_a_signal_or_a_closed_window_ends_the_agent_wherever_it_reads(
    terminal, workspace, keys, number
):
    step = (
        call("ask_user", question="Which one?") if "which" in keys else call("bash", command="ls")
    )
    with FlakyServer([call("bash", command="touch x") if "ask" in keys else step]) as server:
        screen = terminal("--mode", "ask", server=server)
        screen.prompt()
        screen.send(keys)
        if keys.startswith("!"):
            until(lambda: (workspace / "begun").exists() and alive(f"sleep\0{NAP}"))
        elif keys:
            screen.match(re.compile(r"half a line$|\[y/n.*\] $|Which one\? $"))
            screen.listens()
        if number is None:
            screen.hang_up()
            assert screen.process.wait(60) == 129
        else:
            screen.process.send_signal(number)
            leave_as_it_was(screen, CODES[number])
    until(lambda: not alive(NAP))
    assert not (workspace / "x").exists() and not list(workspace.rglob("*.tmp"))


def test_sigterm_behind_ctrl_c_ends_the_agent_with_143(start_agent, workspace):
    stubborn = f"trap 'touch asked' TERM; touch begun; while :; do sleep {NAP}; done"
    with FlakyServer([call("bash", command=stubborn)]) as server:
        agent = start_agent("--yes", "go", server=server)
        until((workspace / "begun").exists)
        agent.send_signal(signal.SIGINT)
        until((workspace / "asked").exists)
        for number in (signal.SIGTERM, signal.SIGINT):
            agent.send_signal(number)
        assert agent.wait(60) == 143
    until(lambda: not alive(NAP))
    assert "interrupted by the user" in sealed(workspace)[-1]["content"]


@pytest.mark.parametrize(
    "under, number",
    [
        pytest.param("trap '' HUP", signal.SIGHUP, id="nohup"),
        pytest.param("trap '' INT", signal.SIGINT, id="a job of a script", marks=pytest.mark.long),
    ],
)
def test_what_was_ignored_at_the_start_stays_ignored(start_agent, workspace, under, number):
    shell = ["/bin/sh", "-c", f'{under}; exec "$@"', "sh"]
    with FlakyServer([{"text": "one two three", "hold_after": 1}]) as server:
        agent = start_agent("count", server=server, under=shell)
        until(server.holding.is_set)
        agent.send_signal(number)
        server.release()
        out, _ = agent.communicate(timeout=60)
    assert (agent.returncode, out) == (0, "one two three\n")


def test_what_a_parent_blocked_or_ignored_reaches_neither_us_nor_commands(start_agent, workspace):
    odd = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    odd += "; signal.pthread_sigmask(signal.SIG_BLOCK, [1, 2, 15])"
    odd += "; os.execv(sys.argv[1], sys.argv[1:])"
    show = call(
        "bash", command="grep -E 'Sig(Blk|Ign)' /proc/self/status | rev | cut -c 1-6; exit 3"
    )
    with FlakyServer([show, {"text": "one two three", "hold_after": 1}]) as server:
        under = [os.sys.executable, "-c", odd]
        agent = start_agent("--yes", "--mode", "auto", "go", server=server, under=under)
        until(server.holding.is_set)
        agent.send_signal(signal.SIGINT)
        _, err = agent.communicate(timeout=60)
    assert (agent.returncode, "timed out" in err) == (130, False)
    assert results(server.requests[1])[0].split() == ["000000", "000000", "[exit", "code", "3]"]


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.long) for n in list(CODES)[1:])],
)
def test_a_signal_before_there_is_a_model_is_one_line(start_agent, number):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        agent = start_agent("hi", env={"AGENT_BASE_URL": url, "AGENT_MODEL": None})
        with silent.accept()[0]:
            agent.send_signal(number)
            out, err = agent.communicate(timeout=60)
    assert (agent.returncode, out, err) == (CODES[number], "", "agent: cancelled\n")


def waiting(pipe: Any) -> int:
    """The bytes that nobody has read yet."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4), sys.byteorder)


@pytest.mark.long
@pytest.mark.parametrize("number", CODES)
def test_a_reader_that_stalls_does_not_hold_the_end_up(start_agent, workspace, number):
    with FlakyServer([{"text": "word " * 99_999}]) as server:
        agent = start_agent("--json", "count", server=server)
        until(lambda: waiting(agent.stdout) > 60_000)  # The pipe is full, but for a piece.
        agent.send_signal(number)
        codes = {CODES[number]}
        if number == signal.SIGINT:  # The last one may come when the end has left it to the system.
            until(lambda: agent.poll() is not None or agent.send_signal(number))
            codes.add(-number)
        assert agent.wait(60) in codes
    sealed(workspace)


# -- random moments ------------------------------------------------------------------------------


def the_chance(offset: int) -> random.Random:
    """Random numbers from a seed that was asked for, or that is always the same; printed."""
    seed = int(os.environ.get("SIGNAL_SEED", 6))
    print(f"SIGNAL_SEED={seed} (part {offset})")
    return random.Random(seed + offset)


def working(request: dict) -> dict | str:
    """A model that works for ever: commands, writes, reads at once, and now and then a fault."""
    number = len(results(request))
    if [m["content"] for m in request["messages"] if m["role"] == "user"][-1] == "ping":
        return "PONG"
    echo = call("bash", command=f"echo {number}; sleep 0.02; echo {number} >> effects.txt")
    reads = [call("read_file", path="n.txt"), call("grep", regex="n", path="n.txt")]
    steps = {
        0: many(*reads, echo) | {"text": f"Step {number}, with a few words."},
        1: many(call("write_file", path=f"f{number}.txt", content="x\n"), *reads),
        2: many(echo, call("bash", command=f"sleep {NAP} & echo {number}")),
    }
    return steps[number % 3]


def faulty() -> list[Any]:
    """The script of a fuzz: each eighth request is refused for a moment."""
    busy = {"status": 429, "headers": {"Retry-After": "0.05"}, "body": {"error": {"message": "x"}}}
    return [busy if n % 8 == 3 else working for n in range(5000)]


def interrupted_runs(start_agent, server: FlakyServer, workspace: Path, count: int, part: int):
    """Runs of one session, each ended at a random event by one signal or two."""
    chance = the_chance(part)
    for at in range(count):
        resume = ["--resume"] if at else []
        agent = start_agent("--yes", "--json", *resume, "go", server=server)
        for _ in range(chance.randint(1 if at else 2, 25)):  # the first has a session by then
            agent.stdout.readline()
        numbers = [chance.choice(list(CODES)) for _ in range(chance.choice([1, 1, 2]))]
        for number in numbers:
            if agent.poll() is None:
                agent.send_signal(number)
        out, err = agent.communicate(timeout=60)
        codes = {CODES[number] for number in numbers}
        if numbers[0] != signal.SIGINT:
            codes -= {130}
        assert agent.returncode in codes, (err, numbers)
        assert "Traceback" not in err and json.loads(out.splitlines()[-1])["type"] == "result"
        until(lambda: not alive(NAP))
        sealed(workspace)


def fuzz(start_agent, run_agent, workspace: Path, count: int, part: int) -> None:
    """Interrupted runs, and a last one that the server accepts and that tells no lie."""
    (workspace / "n.txt").write_text("a note\n")
    with FlakyServer(faulty()) as server:
        interrupted_runs(start_agent, server, workspace, count, part)
        done = run_agent("--yes", "--resume", "ping", server=server)
    assert (done.returncode, done.stdout) == (0, "PONG\n")
    assert [request.problems for request in server.requests if request.problems] == []
    written = workspace / "effects.txt"
    effects = written.read_text().split() if written.exists() else []
    texts = results(server.requests[-1])
    assert [n for n in effects if re.search("not run|before it ran", texts[int(n)])] == []


def test_a_run_that_is_interrupted_at_random_goes_on_each_time(start_agent, run_agent, workspace):
    fuzz(start_agent, run_agent, workspace, 3, 0)


@pytest.mark.long
@pytest.mark.parametrize("part", range(1, 11))
def test_a_run_that_is_interrupted_a_hundred_times_goes_on(start_agent, run_agent, workspace, part):
    fuzz(start_agent, run_agent, workspace, 10, part)


def interrupted_turns(screen: Any, server: Any, workspace: Path, count: int, part: int) -> None:
    """Turns at a terminal, each interrupted behind a random number of answers, at once or later."""
    chance = the_chance(100 + part)
    screen.prompt()
    for _ in range(count):
        before = len(server.requests)
        screen.send("go\r")
        until(lambda before=before: len(server.requests) > before)
        for _ in range(chance.randint(0, 3)):
            screen.question()
            screen.send("y\r")
        if chance.random() < 0.5:
            screen.match(re.compile("[→←]|Step|retry|" + re.escape("? [y")))
        screen.interrupt()
        screen.expect("(cancelled)")
        screen.settle()
        sealed(workspace)


def fuzz_at_a_terminal(terminal, workspace: Path, count: int, part: int) -> None:
    """Interrupted turns, a last one that is answered, and a terminal as it was."""
    (workspace / "n.txt").write_text("a note\n")
    with FlakyServer(faulty()) as server:
        screen = terminal(server=server)
        interrupted_turns(screen, server, workspace, count, part)
        screen.send("ping\r")
        screen.expect("PONG")
        screen.prompt()
        screen.send("\x04")
        leave_as_it_was(screen, 0)
    assert [request.problems for request in server.requests if request.problems] == []
    until(lambda: not alive(NAP))


@pytest.mark.long
def test_turns_that_are_interrupted_at_random_give_the_prompt_back(terminal, workspace):
    fuzz_at_a_terminal(terminal, workspace, 3, 0)


@pytest.mark.long
@pytest.mark.parametrize("part", range(1, 11))
def test_turns_that_are_interrupted_a_hundred_times_give_the_prompt_back(terminal, workspace, part):
    fuzz_at_a_terminal(terminal, workspace, 10, part)


@pytest.mark.long
def test_a_save_of_a_large_session_is_interrupted_at_any_moment_without_a_trace(tmp_path):
    """By a timer: the file is the old or the new one, and nothing lies beside it."""
    chance, folder = the_chance(500), state_folder(tmp_path) / "sessions"
    session = new_session(folder, {}, 0.0)
    session.transcript.set_system("x")
    session.transcript.add_user("y" * 10_000_000)
    session.save()
    path, shown = session.path, 2
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for at in range(50):
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0001, 0.04))
                session.transcript.add_user(f"{at}")
                while True:
                    session.save()
            [kept] = [p for p in folder.iterdir() if p.suffix != ".lock"]
            messages = json.loads(path.read_text())["messages"]
            assert (kept, shown <= len(messages) <= at + 3) == (path, True)
            shown = len(messages)
    finally:
        signal.signal(signal.SIGALRM, before)
        session.close()


# -- Ctrl-Z --------------------------------------------------------------------------------------


class Shell(Terminal):
    """An interactive bash on a terminal, in which the agent is started."""

    def run(self, line: str) -> None:
        """Type a command at the prompt of bash."""
        self.match(re.compile(r"bash\$ $"))
        self.send(line + "\r")

    def modes(self) -> str:
        """The modes that the commands of bash find."""
        self.run("stty -g")
        return self.match(re.compile(r"[0-9a-f]+(:[0-9a-f]+){5,}(?=\r?\n)"))[-300:].split()[-1]


@pytest.fixture
def shell(workspace: Path, environment: Callable):
    """Start bash with the environment of an agent; it ends with all that it started."""
    shells: list[Shell] = []

    def start(server: FlakyServer, *, ui: bool = False) -> Shell:
        env = environment(server, {"PS1": "bash$ ", "HISTFILE": "/dev/null"}, ui=ui)
        bash = ["/bin/bash", "--norc", "--noprofile", "-i"]
        shells.append(Shell(bash, workspace, env))
        return shells[-1]

    yield start
    for one in shells:
        one.close()
    assert [one.text for one in shells if "Traceback" in one.text] == []


def stop_and_go_on(screen: Shell, before: str) -> None:
    """Ctrl-Z; bash has its terminal, with its own modes; fg."""
    screen.send("\x1a")
    screen.expect("Stopped")
    assert screen.modes() == before
    screen.run("fg")


def test_ctrl_z_gives_the_terminal_to_the_shell_and_fg_goes_on(shell, workspace):
    text = {"text": "one two three", "hold_after": 1}
    with FlakyServer([text, call("bash", command="touch a.txt"), "PONG"]) as server:
        screen = shell(server)
        before = screen.modes()
        screen.run("python3 -m agent --mode ask")
        screen.prompt()
        screen.send("half")
        screen.expect("half")
        screen.send("\x1a")
        screen.expect("Stopped")
        assert screen.modes() == before
        screen.run("fg")
        screen.expect("> half")
        screen.send(" a line\r")
        until(server.holding.is_set)
        stop_and_go_on(screen, before)
        server.release()
        screen.expect("three")
        screen.prompt()
        screen.send("go\r")
        screen.question()
        stop_and_go_on(screen, before)
        screen.question()
        screen.send("y\r")
        screen.expect("PONG")
        screen.prompt()
        screen.send("\x04")
        assert screen.modes() == before
    assert server.requests[0]["messages"][-1]["content"] == "half a line"
    assert (workspace / "a.txt").exists()


@pytest.mark.parametrize(
    "ui", [pytest.param(False, id="plain", marks=pytest.mark.long), pytest.param(True, id="ui")]
)
def test_ctrl_z_amid_a_line_typed_in_a_turn(shell, ui):
    with FlakyServer([{"text": "one two three", "hold_after": 1}, "PONG"]) as server:
        screen = shell(server, ui=ui)
        before = screen.modes()
        screen.run(f"{sys.executable} -m agent")
        screen.prompt()
        screen.send("go\r")
        until(server.holding.is_set)
        screen.send("first\r")
        screen.expect("queued: first")
        stop_and_go_on(screen, before)
        screen.match(re.compile(r"-m agent.*\n"))
        screen.send("second\r")
        screen.expect("queued: second")
        screen.send("\x1a")
        screen.expect("Stopped")
        screen.run("bg")
        screen.run("echo not f''or us")
        screen.expect("not for us")
        screen.run("fg")
        screen.match(re.compile(r"-m agent.*\n"))
        server.release()
        screen.expect("PONG")
        screen.prompt()
        screen.send("\x04")
        assert screen.modes() == before
    assert server.requests[1]["messages"][-1]["content"] == "first\nsecond"


@pytest.mark.long
def test_a_command_that_ended_while_we_were_stopped_has_its_result(shell, workspace):
    command = "touch begun; while ! [ -e go ]; do sleep 0.02; done; echo over; touch over"
    with FlakyServer([call("bash", command=command, timeout=9), "PONG"]) as server:
        screen = shell(server)
        before = screen.modes()
        screen.run("python3 -m agent --yes")
        screen.prompt()
        screen.send("go\r")
        until((workspace / "begun").exists)
        screen.send("\x1a")
        screen.expect("Stopped")
        assert screen.modes() == before
        (workspace / "go").touch()
        until((workspace / "over").exists)
        screen.run("fg")
        screen.expect("PONG")
        screen.prompt()
        screen.send("\x04")
        assert screen.modes() == before
    assert results(server.requests[1])[0].startswith("over")


LISTENS = """
import os, signal, threading, time
import agent
agent.install_signals(agent.Signals())
for _ in range(3):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except agent.Stop:
        time.sleep(sum(agent.WAKE_SECONDS) + 0.1)
print(threading.active_count())
"""


def test_what_wakes_the_main_thread_up_is_there_for_every_signal():
    ran = subprocess.run([sys.executable, "-c", LISTENS], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("2\n", "")


def test_the_program_can_be_called_in_each_of_its_ways(start_agent, workspace, environment):
    """As a file, and as the function that the installed command calls."""
    ways = [["agent.py"], ["-c", "import sys, agent; sys.exit(agent.main())"]]
    for way in ways:
        with FlakyServer([{"text": "one two three", "hold_after": 1}]) as server:
            root = Path(__file__).resolve().parent.parent
            words = [str(root / word) if word.endswith(".py") else word for word in way]
            agent = subprocess.Popen(
                [os.sys.executable, *words, "count"],
                cwd=workspace,
                env=environment(server),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            until(server.holding.is_set)
            agent.send_signal(signal.SIGINT)
            _, err = agent.communicate(timeout=60)
        assert (agent.returncode, "Traceback" in err) == (130, False)


CALLS = "import sys\nfrom agent import main\nsys.exit(main())\n"


@pytest.mark.parametrize("way", ["a file", "installed"])
def test_ctrl_c_while_the_program_is_being_loaded_is_one_line(environment, tmp_path, way):
    root = Path(__file__).resolve().parent.parent
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "agent").write_text(CALLS)
    (tmp_path / "argparse.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    program = root / "agent.py" if way == "a file" else tmp_path / "bin" / "agent"
    env = environment(None, {"PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"})
    ran = subprocess.run([sys.executable, program, "hi"], env=env, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "agent: cancelled\n")


MASKED = """
import sys
import agent
class Words(list):
    def __iter__(self):
        try:
            raise agent.Stop(130)
        finally:
            raise AttributeError("what argparse lacks after it")
sys.exit(agent.main(Words()))
"""


def test_ctrl_c_that_another_error_hides_is_no_fault_of_ours(environment, tmp_path):
    command = [sys.executable, "-c", MASKED]
    env = environment()
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "agent: cancelled\n")


class Presses(Person):
    """Somebody who presses Ctrl-C three times and then leaves."""

    asked = 0

    def prompt(self) -> str:
        self.asked += 1
        if self.asked == 4:
            return "exit"
        raise Stop(130)


@pytest.mark.parametrize(("pause", "ended"), [(0.5, (130, 2)), (3.0, (0, 4))])
def test_only_a_second_ctrl_c_soon_after_the_first_leaves(tmp_path, pause, ended):
    made = Settings(base_url="http://127.0.0.1:1/v1", model="m", workspace=str(tmp_path), bare=True)
    person = Presses(Screen(io.StringIO(), io.StringIO()), io.StringIO())
    agent = build_agent(made)
    code = Repl(agent, person, clock=lambda: pause * person.asked).run()
    agent.close()
    assert (code, person.asked) == ended
