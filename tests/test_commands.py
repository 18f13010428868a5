"""Commands as the model runs them: nothing hangs, nothing is left, nothing is lost or made up.

`play(*steps)` lets a scripted model take the steps, as one turn of an agent in mode auto, and
returns the results of its calls as the model saw them. A step that is a text is a command.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from conftest import NAP, alive, children, nothing_runs_in, processes, results, until

from agent import Capture, CommandHost, Settings, build_agent, plain_text
from flaky_server import FlakyServer

ENVIRON = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": "/nonexistent"}
SLEEP = f"sleep {NAP}"
SLEEPER = f"sleep\0{NAP}"
PYTHON = shlex.quote(sys.executable)
DAEMON = f"""{PYTHON} -ISc "import os
os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0)
os.execvp('sleep', ['sleep', '{NAP}'])" """
DEAF = f"trap '' TERM HUP INT QUIT; {SLEEP}; {SLEEP}"
SLEEPS = rf"until grep -qsaP '^sleep\x00{NAP}' /proc/[0-9]*/cmdline; do sleep 0.01; done"
# Five processes that stay behind: a plain one and four that take some pains to.
JOBS = f"""{SLEEP} & setsid {SLEEP} >/dev/null 2>&1 & nohup env -i {SLEEP} & {DAEMON}
(cd /; setsid bash -c "{DEAF}" &)
echo up"""


LIFT = ("git-history", "git-checkout", "git-clean")  # which ask a human, and nobody is there


def bash(command: str, timeout: int = 20) -> dict:
    """A step in which the model runs a command."""
    return {"call": "bash", "arguments": {"command": command, "timeout": timeout}}


def sleepers(count: int = 1) -> list[int]:
    """Wait until that many processes sleep for this test run; their ids."""
    return until(lambda: len(found := alive(SLEEPER)) >= count and found)


def gone() -> bool:
    """Whether soon nobody sleeps for this test run."""
    deadline = time.monotonic() + 30
    while (left := alive(SLEEPER)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


def last_line(text: str) -> str:
    """The last line of a result."""
    return text.split("\n")[-1]


def hung(number: int, frame: object) -> None:
    """What the alarm does."""
    raise TimeoutError("the agent hangs")


@pytest.fixture
def alarm() -> Iterator[None]:
    """End a test in which the agent hangs."""
    signal.signal(signal.SIGALRM, hung)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


@pytest.fixture
def play(alarm, tmp_path, workspace):
    """Let the model take the steps: the results of its calls, in order."""

    def run(*steps, emit=None, environ=None, turns=1, **fields) -> list[str]:
        script = [bash(step) if isinstance(step, str) else step for step in steps]
        settings = {
            "model": "m",
            "api_key": "k",
            "mode": "auto",
            "sandbox": "off",
            "workspace": str(workspace),
        }
        settings |= {"environ": ENVIRON | (environ or {}), "lift": LIFT} | fields
        with FlakyServer([*script, "done"]) as server:
            agent = build_agent(Settings(base_url=server.url, **settings), emit=emit)
            try:
                ends = [agent.run("go").status for _ in range(turns)]
            finally:
                agent.close()
        assert [server.errors, [r.problems for r in server.requests if r.problems]] == [[], []]
        assert ends[-1] == "done"
        return results(server.requests[-1])

    yield run
    nothing_runs_in(tmp_path)
    for pid in (left := alive(SLEEPER)):
        os.kill(pid, signal.SIGKILL)
    assert left == []


def obey(request: dict) -> dict | str:
    """A model that runs what the user says, once."""
    last = request["messages"][-1]
    return "done" if last["role"] == "tool" else bash(last["content"])


@pytest.fixture(scope="module")
def shell_agent(tmp_path_factory) -> Iterator:
    """One agent for all commands that leave nothing behind, and what it printed meanwhile."""
    live: list[str] = []

    def emit(kind: str, **event: str) -> None:
        live.extend([event["text"]] if kind == "tool_output" else [])

    root = str(tmp_path_factory.mktemp("shell"))
    with FlakyServer([obey] * 1000) as server:
        settings = {
            "model": "m",
            "api_key": "k",
            "mode": "auto",
            "sandbox": "off",
            "environ": ENVIRON,
        }
        agent = build_agent(Settings(base_url=server.url, workspace=root, **settings), emit=emit)
        yield agent, server, live
        agent.close()
    assert [server.errors, [r.problems for r in server.requests if r.problems]] == [[], []]


@pytest.fixture
def shell(alarm, shell_agent):
    """Run a command with the agent that is there for all: its result and its live output."""

    def run(command: str) -> tuple[str, str]:
        agent, server, live = shell_agent
        live.clear()
        assert agent.run(command).status == "done"
        return results(server.requests[-1])[-1], "".join(live)

    return run


def say(screen, text: str) -> None:
    """Type a line at the prompt that was waited for last."""
    screen.send(text + "\r")
    screen.expect(text)


def answer(screen, text: str) -> str:
    """Type a line and wait for the next prompt: what was written in between."""
    say(screen, text)
    return screen.prompt().removesuffix("> ").strip()


def with_jobs(terminal, server):
    """An agent on a terminal whose model has started jobs."""
    screen = terminal("--mode", "auto", "--sandbox", "off", server=server)
    screen.prompt()
    assert "PONG" in answer(screen, "go")
    return screen


def leave(screen) -> None:
    """Leave at the prompt."""
    say(screen, "/exit")
    assert screen.wait() == 0


# -- how a command ends


@pytest.mark.parametrize(
    "command, expected",
    [
        pytest.param("exit 255", "[exit code 255]", id="the highest code"),
        pytest.param("exit 256", "[exit code 0]", id="only eight bits"),
        pytest.param("./no-program", "[exit code 127]", id="not there"),
        pytest.param("/etc/passwd", "[exit code 126]", id="no program"),
        pytest.param("kill -SEGV $$", "[ended by signal 11]", id="crash"),
        pytest.param("trap 'exit 9' EXIT; exit 1", "[exit code 9]", id="trap"),
        pytest.param("exec false", "[exit code 1]", id="exec"),
        pytest.param("false | true", "[exit code 0]", id="no pipefail B22"),
        pytest.param("seq 1 100000 | head -3", "[exit code 0]", id="head closes the pipe B22"),
        pytest.param("exec >&- 2>&-; sleep 0.2; exit 3", "[exit code 3]", id="output closed"),
        pytest.param("exec >/dev/null; sleep 0.2; exit 4", "[exit code 4]", id="output elsewhere"),
        pytest.param("echo '", "[exit code 2]", id="syntax"),
        pytest.param("--version", "[exit code 127]", id="looks like an option of bash"),
        pytest.param("-x", "[exit code 127]", id="looks like a flag of bash"),
        pytest.param("echo [exit code 0]; exit 5", "[exit code 5]", id="the output lies B27"),
        pytest.param("printf '[exit code 0]'; exit 5", "[exit code 5]", id="and has no line end"),
    ],
)
def test_the_last_line_says_how_it_ended(shell, command, expected):
    assert last_line(shell(command)[0]) == expected


def test_an_odd_command_is_answered_and_the_next_one_runs(play):
    odd = ["", " \n", "# nothing", "cat <<EOF", "echo a\0b", "echo \udce9", "echo a\r\necho b\r\n"]
    odd += ["(", "!", "\\", "exit"]
    texts = play(*(step for n, command in enumerate(odd) for step in (command, f"echo on {n}")))
    assert texts[1::2] == [f"on {n}\n[exit code 0]" for n in range(len(odd))]
    fits = re.compile(r"error: |(?s:.*)\n\[exit code \d+\]$")
    assert [pair for pair in zip(odd, texts[::2], strict=True) if not fits.match(pair[1])] == []


@pytest.mark.parametrize(
    "command, expected",
    [
        ("[[ abc == a*c && x < y ]] && echo yes", "yes"),
        ("list=(a b c); echo ${list[-1]^^} ${#list[@]}", "C 3"),
        ("source <(echo 'echo from $BASH_SUBSHELL'); wait $!", "from 0"),
        ("yes | head -1; echo ${PIPESTATUS[0]}", "y\n141"),
        ("echo one |& cat; printf -v x %03d 7; echo $x", "one\n007"),
        ("ls /proc/self/fd | xargs", "0 1 2 3"),
        ("grep SigBlk /proc/self/status | tr -d '0\\t'", "SigBlk:"),
        ("cut -d ' ' -f 7 /proc/self/stat; test -t 1 || test -t 2 || echo none", "0\nnone"),
    ],
    ids="test arrays source SIGPIPE printf files signals terminal".split(),
)
def test_it_is_real_bash_in_a_clean_process(shell, command, expected):
    assert shell(command)[0] == f"{expected}\n[exit code 0]"


def test_nothing_but_files_carries_over_and_the_model_is_told_so(play, workspace):
    seen = []

    def look(request: dict) -> dict:
        tools = [tool["function"] for tool in request["tools"]]
        seen.extend(tool["description"] for tool in tools if tool["name"] == "bash")
        return bash(
            "mkdir sub; cd sub; umask 0; set -e; alias ls=false; ulimit -n 9; A=1; f() { :; }"
        )

    wanted = "pwd; umask; echo $- ${A-none} $(ulimit -n); type -t ls f"
    _, second = play(look, wanted)
    expected = subprocess.run(["bash", "-c", wanted], cwd=workspace, capture_output=True, text=True)
    assert second == f"{expected.stdout}[exit code {expected.returncode}]"
    assert "workspace root" in seen[0]


def test_the_name_of_the_workspace_may_be_odd(play, tmp_path):
    folder = tmp_path / "a b'\"ü $(x)\n-"
    folder.mkdir()
    assert play("pwd", workspace=str(folder)) == [f"{folder}\n[exit code 0]"]


# -- one host


def test_a_session_has_one_host_from_its_first_command_on(play):
    before, seen = set(children()), []
    (first, second) = play(
        {"call": "list_files", "arguments": {}},
        lambda request: seen.append(set(children()) - before) or bash("echo $PPID"),
        lambda request: seen.append(set(children()) - before) or bash("echo 1 $PPID"),
    )[1:]
    host = int(first.split()[0])
    assert (second.split()[:2], seen) == (["1", str(host)], [set(), {host}])
    assert host not in children()


def test_the_host_buries_the_orphans(play):
    def zombies(host: str) -> list[int]:
        def matches(folder: Path) -> bool:
            state, parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            return (state, parent) == ("Z", host)

        return processes(matches)

    def step(request: dict) -> dict:
        until(lambda: not zombies(results(request)[0].split()[0]))
        return bash("echo on")

    orphans = "echo $PPID; for n in {1..100}; do (true & setsid true &); done"
    assert play(orphans, step)[1] == "on\n[exit code 0]"


@pytest.mark.long
def test_a_command_that_kills_around_itself_kills_neither_the_agent_nor_the_next(run_agent):
    names = ["TERM", "HUP", "INT", "QUIT", "USR1", "KILL"]
    steps = []
    for name in names:
        steps += [bash(f"kill -{name} 0; sleep 1; echo alive"), bash(f"echo on {name} 1")]
        steps += [bash(f"kill -{name} $PPID; sleep 0.1"), bash(f"echo on {name} 2")]
    with FlakyServer([*steps, "ok"]) as server:
        done = run_agent("--yes", "--sandbox", "off", "go", server=server)
    texts = results(server.requests[-1])
    assert (done.returncode, done.stdout) == (0, "ok\n")
    assert texts[1::2] == [f"on {name} {n}\n[exit code 0]" for name in names for n in (1, 2)]
    ends = [last_line(text) for text in texts[::4] if "alive" not in text]  # bash survives QUIT
    assert ends == [f"[ended by signal {number}]" for number in (15, 1, 2, 10, 9)]


def test_a_command_that_stops_its_host_holds_nobody_up(run_agent):
    script = [bash(f"kill -STOP $PPID; {SLEEP}", timeout=1), bash("echo on"), "ok"]
    with FlakyServer(script) as server:
        done = run_agent("--yes", "--sandbox", "off", "go", server=server, timeout=60)
    first, second = results(server.requests[-1])
    assert (done.returncode, done.stdout) == (0, "ok\n")
    assert ("exit code" in first, second) == (False, "on\n[exit code 0]")
    assert gone()


def test_nothing_outlives_a_host_that_is_killed(play):
    seen = []

    def after(request: dict) -> dict:
        seen.append(gone())
        return bash("echo on")

    kill = f"(setsid {SLEEP} &); kill -9 $PPID; {SLEEP}"
    jobs = JOBS.replace("env -i ", "")  # what clears its environment can not be found again
    up, killed, on = play(jobs, lambda request: sleepers(5) and bash(kill), after)
    assert (up.split("\n")[0], on, seen) == ("up", "on\n[exit code 0]", [True])
    assert killed.startswith("error: ")


# -- nobody is there to type


@pytest.fixture
def repository(workspace) -> Path:
    """A git repository with two commits, a change in the index and editors that never end."""
    lines = f"""git init -qb main .; git config user.name t; git config user.email t@example.com
    echo a >a; git add a; git commit -qm one; git branch side; echo b >a; git commit -qam two
    git config core.editor '{SLEEP} #'; git config sequence.editor '{SLEEP} #'
    git config core.pager '{SLEEP}'; git config pager.log '{SLEEP}'; echo c >a; git add a"""
    environ = ENVIRON | {"GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["bash", "-ec", lines], cwd=workspace, env=environ, check=True)
    return workspace


def head_of(repository: Path) -> bytes:
    """The history, what is staged and what git is in the middle of."""
    ask = "git log --format=%H%d --all; git diff --cached | cat; git tag; ls .git | grep -i rebase"
    return subprocess.run(["bash", "-c", ask], cwd=repository, capture_output=True).stdout


@pytest.mark.parametrize(
    "command",
    [
        "git commit",
        "git commit --amend",
        "git stash -q; git rebase -i HEAD~1; code=$?; git stash pop -q --index; exit $code",
        "git tag -a v1",
        "git notes add",
        "git branch --edit-description",
        "git checkout -q -f side; git merge --no-ff --edit main; c=$?; git merge --abort;"
        "git checkout -q -f main; echo c >a; git add a; exit $c",
    ],
    ids="commit amend rebase tag notes branch merge".split(),
)
def test_git_fails_at_once_where_it_would_open_an_editor(play, repository, command):
    before = head_of(repository)
    (text,) = play(bash(command, timeout=60))
    assert re.fullmatch(r"\[exit code [1-9]\d*\]", last_line(text)), text
    assert head_of(repository) == before


def test_the_editors_of_the_user_are_not_opened_either(play, repository):
    names = "EDITOR VISUAL GIT_EDITOR GIT_SEQUENCE_EDITOR".split()
    rebase = "git stash -q; git rebase -i HEAD~1"
    steps = [bash(command, timeout=60) for command in ("git commit", rebase, "$EDITOR; $VISUAL")]
    texts = play(*steps, environ=dict.fromkeys(names, f"{SLEEP} #"))
    assert [text for text in texts if not re.search(r"\[exit code [1-9]\d*\]$", text)] == []


def test_a_rebase_that_stopped_does_not_open_an_editor_either(play, repository):
    begin = (
        "git commit -qm three; git checkout -q side; echo d >a; git commit -qam d; git rebase main"
    )
    go_on = "git add a; git rebase --continue"
    first, second = play(begin, bash(go_on, timeout=60))
    assert "CONFLICT" in first
    assert re.fullmatch(r"\[exit code [1-9]\d*\]", last_line(second)), second


def test_a_long_history_comes_whole_and_without_a_pager(play, repository):
    lines = "commit refs/heads/long\ncommitter t <t@example.com> {} +0000\ndata 1\nx\n"
    history = "".join(lines.format(n) for n in range(300))
    subprocess.run(
        ["git", "fast-import", "--quiet"], cwd=repository, input=history.encode(), check=True
    )
    environ = dict.fromkeys(["PAGER", "GIT_PAGER", "MANPAGER", "LESS"], SLEEP)
    one, two = play("git log long --format=%ct", "git -p log long -1 --format=%ct", environ=environ)
    assert one == "".join(f"{n}\n" for n in reversed(range(300))) + "[exit code 0]"
    assert two == "299\n[exit code 0]"


def test_a_program_for_a_person_ends_by_itself(play, repository):
    (repository / "long").write_text("line\n" * 1000)
    sleeping = dict.fromkeys("EDITOR VISUAL PAGER MANPAGER SYSTEMD_PAGER".split(), SLEEP)
    programs = ["less long", "more long", "man bash | tail -3", "crontab -e", "top", "python3"]
    programs += ["systemctl status", "git add -p", "git clean -i", "$EDITOR long; $VISUAL long"]
    programs += ["ssh -o ConnectTimeout=1 127.0.0.1 -p 9", "bash -i", "ed long"]
    texts = play(*(bash(program, timeout=60) for program in programs), environ=sleeping)
    ends = dict(zip(programs, map(last_line, texts), strict=True))
    assert [item for item in ends.items() if not re.fullmatch(r"\[exit code \d+\]", item[1])] == []


@pytest.mark.parametrize(
    "command, words, code",
    [
        pytest.param("read -p 'Ok? ' x || echo EOF", "EOF", 0, id="read"),
        pytest.param("cat; wc -c", "0", 0, id="cat"),
        pytest.param("rm -i f; ls f", "f", 0, id="rm -i"),
        pytest.param(f"{PYTHON} -c 'input()'", "EOFError", 1, id="input"),
        pytest.param("echo x >/dev/tty", "/dev/tty: No such device", 1, id="write to the terminal"),
        pytest.param("read x </dev/tty", "/dev/tty: No such device", 1, id="read the terminal"),
        pytest.param("setsid -wc cat </dev/tty", "/dev/tty: No such device", 1, id="setsid"),
        pytest.param("stty -F /dev/tty sane", "/dev/tty: No such device", 1, id="stty"),
        pytest.param("sh ask-password", "Password: ", 2, id="a password B12"),
    ],
)
def test_who_asks_gets_the_end_of_the_input(shell, command, words, code):
    ask = "printf 'Password: ' >&2; exec </dev/tty || exit 2; read x"
    text, _ = shell(f"touch f; echo {shlex.quote(ask)} >ask-password; {command}")
    assert words in text
    assert last_line(text) == f"[exit code {code}]"


def test_questions_of_programs_are_answered_by_the_environment(play):
    (text,) = play("echo $npm_config_yes $GIT_TERMINAL_PROMPT $PAGER $GIT_PAGER")
    assert text == "true 0 cat cat\n[exit code 0]"


def test_a_password_for_a_signature_can_not_be_given(play, repository):
    program = repository.parent / "gpg"
    program.write_text("#!/bin/sh\nexec </dev/tty || exit 2\nread p\n")
    program.chmod(0o755)
    config = f"-c gpg.program='{program}' -c commit.gpgsign=true -c user.signingkey=x"
    before = head_of(repository)
    (text,) = play(bash(f"git {config} commit -m x", timeout=60))
    assert "gpg failed to sign" in text and last_line(text) == "[exit code 128]"
    assert head_of(repository) == before


class Locked(BaseHTTPRequestHandler):
    """A site that wants a password."""

    def do_GET(self) -> None:
        self.send_response(401)
        self.send_header("WWW-Authenticate", 'Basic realm="x"')
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


def test_git_does_not_ask_for_a_password(play):
    with HTTPServer(("127.0.0.1", 0), Locked) as site:
        thread = threading.Thread(target=site.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{site.server_address[1]}/x.git"
        (text,) = play(bash(f"git ls-remote {url}", timeout=60))
        site.shutdown()
        thread.join()
    assert "terminal prompts disabled" in text
    assert last_line(text) == "[exit code 128]"


def test_a_command_does_not_reach_the_terminal_of_the_agent(terminal):
    steal = "(echo leak$((40+2)) >/dev/tty) || echo no-terminal; (read x </dev/tty) || true"
    with FlakyServer([bash(steal), "PONG"]) as server:
        screen = terminal("--mode", "auto", "--sandbox", "off", server=server)
        screen.prompt()
        assert "PONG" in answer(screen, "go")
        leave(screen)
    assert results(server.requests[1])[0].count("no-terminal\n") == 1
    assert "leak42" not in screen.text


# -- what it printed


@pytest.mark.parametrize(
    "parts, expected",
    [
        pytest.param([r"\033[3", r"2mok\033[", "0m"], "ok", id="colour"),
        pytest.param([r"a\033", "[1mb"], "ab", id="behind the escape"),
        pytest.param([r"\033]0;ti", r"tle\aok"], "ok", id="title"),
        pytest.param([r"\033]8;;http://x\033", r"\\link"], "link", id="hyperlink"),
        pytest.param([r"\033[2K\033[1G\033[?2", "5lx"], "x", id="cursor"),
        pytest.param([r"a\033(", r"Bb\033=c\033>\033M\0337"], "abc", id="short escapes"),
        pytest.param([r"a\033Pq#0;2", r"\033\\b"], "ab", id="device control"),
        pytest.param([r"a\ab\017\016"], "ab", id="bell and shifts"),
        pytest.param([r"\342\202", r"\254 \360\237", r"\230\200"], "€ 😀", id="UTF-8"),
        pytest.param([r"a\377", r"b\355\240\200"], "a\ufffdb\ufffd\ufffd\ufffd", id="no UTF-8 B25"),
        pytest.param([r"one\r", r"\ntwo\r\n"], "one\ntwo", id="line end"),
        pytest.param([r"one\r\r\ntwo\n"], "one\ntwo", id="line end of a terminal"),
        pytest.param([r"1%%\r", r"2%%\r", r"done\n"], "done", id="progress B24"),
        pytest.param(["1%%", r"\r2%%", r"\r3%%"], "3%", id="progress without an end"),
        pytest.param([r"1%%\r", r"2%%\r"], "2%", id="progress with the return behind it"),
        pytest.param([r"get\n1%%\r", r"\033[K2%%", r"\ndone"], "get\n2%\ndone", id="in between"),
        pytest.param([r"|\b", r"/\b", r"-\b", r" ok"], " ok", id="spinner"),
        pytest.param([r"N\bNA\bA"], "NA", id="overstrike"),
    ],
)
def test_what_is_for_a_terminal_is_taken_out_wherever_it_is_split(shell, parts, expected):
    command = "; sleep 0.05; ".join(f"printf -- {shlex.quote(part)}" for part in parts)
    text, live = shell(command)
    assert text == f"{expected}\n[exit code 0]"
    assert re.findall("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", live) == []


def test_every_byte_may_be_printed(play, workspace):
    (workspace / "bytes").write_bytes(bytes(range(256)) * 40 + b"\nEND\n")
    (text,) = play("cat bytes")
    assert text.endswith("\nEND\n[exit code 0]") and "ABCDEFG" in text
    assert "\x1b" not in text and "\0" not in text


def test_output_arrives_while_the_command_runs(start_agent, workspace):
    command = "echo one; until test -e go; do sleep 0.02; done; echo two"
    with FlakyServer([bash(command, timeout=60), "ok"]) as server:
        agent = start_agent("--json", "--yes", "--sandbox", "off", "go", server=server)
        events = [json.loads(agent.stdout.readline())]
        while events[-1]["type"] != "tool_output":
            events.append(json.loads(agent.stdout.readline()))
        (workspace / "go").touch()
        events += [json.loads(line) for line in agent.communicate(timeout=60)[0].splitlines()]
    live = "".join(event["text"] for event in events if event["type"] == "tool_output")
    assert (agent.returncode, live, events[-1]["type"]) == (0, "one\ntwo\n", "result")


GAP = re.compile(r"\d[\d,.]* (bytes|characters|lines) not shown")
FILE = re.compile(r"\.agent/output/[^\s/]+/[^\s/]+\.txt")


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("0123456789", id="short lines"),
        pytest.param("x" * 500_000, id="very long lines"),
        pytest.param("ü€😀" * 50, id="characters of several bytes"),
    ],
)
def test_of_much_output_head_and_tail_are_shown_and_all_of_it_is_kept(play, workspace, line):
    (workspace / "lines").write_text(f"FIRST\n{line}\n" * 2 + f"{line}\n" * (900_000 // len(line)))
    (text,) = play("cat lines; echo FATAL; exit 3")
    gaps = [part for part in text.split("\n") if GAP.search(part)]
    assert (len(gaps), len(text) <= 20_000, "\ufffd" in text) == (1, True, False)
    assert text.startswith("FIRST\n") and "\nFATAL\n" in text[-400:]
    assert last_line(text) == "[exit code 3]"
    kept = (workspace / FILE.search(text)[0]).read_bytes()
    assert kept == (workspace / "lines").read_bytes() + b"FATAL\n"


def test_the_end_of_one_endless_line_is_shown(play):
    (text,) = play("head -c 3000000 /dev/zero | tr '\\0' x; printf 'the end'; exit 1")
    assert len(text) <= 20_000 and text.startswith("xxxx")
    assert text.replace("\n", "")[-400:].count("the end") == 1
    assert last_line(text) == "[exit code 1]"


def test_two_floods_are_kept_in_two_files(play, workspace):
    one, two = play("seq 1 9000", "seq 10001 19000")
    names = [FILE.search(text)[0] for text in (one, two)]
    kept = [(workspace / name).read_text().split("\n")[0] for name in names]
    assert (len(set(names)), kept) == (2, ["1", "10001"])


def test_the_file_of_a_flood_stops_at_50_megabytes_and_the_result_says_so(play, workspace):
    (text,) = play(bash("yes 0123456789 | head -c 60500000; echo END; exit 6", timeout=60))
    path = workspace / FILE.search(text)[0]
    assert 50_000_000 <= path.stat().st_size <= 50 * 2**20
    assert re.search(r"\b50[ \xa0]?M(i?B|egabytes)", text) and GAP.search(text)
    assert text.startswith("0123456789\n") and "\nEND\n" in text[-500:]
    assert last_line(text) == "[exit code 6]"


def test_the_id_of_a_call_does_not_lead_out_of_the_folder(play, workspace):
    odd = ["../../evil", "/tmp/evil", "a/b", "..", "x" * 64]
    items = [{"name": "bash", "arguments": {"command": f"seq {n} 9000"}} for n in range(len(odd))]
    texts = play({"calls": [item | {"id": ident} for item, ident in zip(items, odd, strict=True)]})
    named = [workspace / FILE.search(text)[0] for text in texts]
    assert sorted(named) == sorted(workspace.parent.rglob("*.txt"))
    assert [path.read_text().split("\n")[0] for path in named] == list("01234")
    assert not [path for path in named if not path.is_relative_to(workspace / ".agent" / "output")]


def test_without_a_session_a_flood_names_no_file(play, workspace):
    (text,) = play("seq 1 9000; exit 2", save_session=False)
    assert text.startswith("1\n2\n") and "\n9000\n" in text and last_line(text) == "[exit code 2]"
    assert (GAP.search(text) is None, ".agent/output" in text) == (False, False)
    assert not (workspace / ".agent" / "output").exists()


def test_a_flood_that_can_not_be_kept_is_shown_all_the_same(play, workspace):
    (workspace / ".agent").mkdir(mode=0o700)
    (workspace / ".agent" / "output").write_text("no folder")
    (text,) = play("seq 1 9000; exit 2")
    assert text.startswith("1\n2\n") and "\n9000\n" in text
    assert (last_line(text), FILE.search(text)) == ("[exit code 2]", None)


def peak(pid: int) -> int:
    """The most memory that a process ever had, in bytes."""
    return int(re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) * 1024


ZEROS = "head -c 80000000 /dev/zero | tr '\\0'"


@pytest.mark.parametrize(
    "floods, ends",
    [
        pytest.param([bash("yes", timeout=2)], "timed out", id="yes"),
        pytest.param(
            [
                bash(f"{ZEROS} x"),
                bash("yes 50% | head -c 80000000 | tr '\\n' '\\r'"),
                bash(f"printf '\\033]0;'; {ZEROS} x"),
                bash(f"printf '\\033['; {ZEROS} 1"),
                bash("yes &"),
                bash("sleep 1"),
            ],
            "exit code 0",
            id="no line end, progress, open escapes, a job",
            marks=pytest.mark.long,
        ),
    ],
)
def test_memory_stays_flat_whatever_a_flood_consists_of(start_agent, floods, ends):
    started, peaks = [], []

    def measure(step):
        def take(request: dict):
            until(lambda: started)
            pids = [started[0].pid, int(results(request)[0].split()[0])]
            peaks.append([peak(pid) for pid in pids])
            return step

        return take

    steps = [bash("echo $PPID"), measure(floods[0]), *floods[1:], measure("ok")]
    with FlakyServer(steps) as server:
        started.append(start_agent("--yes", "--sandbox", "off", "go", server=server))
        started[0].communicate(timeout=100)
    texts = results(server.requests[-1])[1:]
    assert [ends in last_line(text) for text in texts] == [True] * len(floods)
    grown = [after - before for before, after in zip(*peaks, strict=True)]
    assert max(grown) < 60_000_000


def test_the_last_lines_are_shown_behind_an_escape_without_end(play):
    flood = "head -c 3000000 /dev/zero | tr '\\0' x"
    (text,) = play(f"printf 'FIRST\\n\\033]0;'; {flood}; printf '\\nEND\\n'; exit 4")
    assert text.startswith("FIRST\n") and text.endswith("\nEND\n[exit code 4]")


# -- timeouts and Ctrl-C

CHAIN = """import os, time
end = time.time() + 20
while time.time() < end:
    os.fork() and os._exit(0)
    os.setsid()
    beat = os.open('beat', os.O_WRONLY | os.O_APPEND)
    os.write(beat, b'x')
    os.close(beat)
    time.sleep(0.02)
"""
TREES = [
    pytest.param(f"{SLEEP} | cat | cat", 1, id="pipeline B02"),
    pytest.param(f"echo {NAP} {NAP} | xargs -n 1 -P 2 sleep", 2, id="xargs"),
    pytest.param(f"(cd /; env -i setsid {SLEEP} &); {SLEEP}", 2, id="own everything"),
    pytest.param(f"{DAEMON}; {SLEEP}", 2, id="daemon"),
    pytest.param(DEAF, 1, id="deaf"),
    pytest.param(f'setsid bash -c "{DEAF}" & {SLEEP}', 2, id="deaf in its own session"),
    pytest.param(f"{SLEEP} & {SLEEPS}; kill -STOP $! $$", 1, id="stopped"),
]


def interrupt_when(ready):
    """A listener that types Ctrl-C, once, when a command has printed and it is ready."""
    typed = []

    def emit(kind: str, **event: object) -> None:
        if kind == "tool_output" and not typed:
            typed.append(ready())
            signal.raise_signal(signal.SIGINT)

    return emit


@pytest.mark.parametrize("tree, count", TREES)
def test_ctrl_c_ends_the_whole_tree_and_keeps_the_output(play, tree, count):
    seen = []
    emit = interrupt_when(lambda: sleepers(count))
    step = bash(f"echo begun; {tree}", timeout=1000)
    (text, on) = play(
        step, lambda request: seen.append(gone()) or bash("echo on"), emit=emit, turns=2
    )
    assert text.startswith("begun\n[interrupted") and "may have" in last_line(text)
    assert (on, seen) == ("on\n[exit code 0]", [True])


def test_a_timeout_ends_the_whole_tree_and_keeps_the_output(play):
    seen = []
    jobs = JOBS.replace("echo up", f"(cd /; env -i setsid {SLEEP} &); {SLEEPS}")
    step = bash(f"printf begun; {jobs}; {SLEEP} & kill -STOP $! $$", timeout=1)
    (text, on) = play(step, lambda request: seen.append(gone()) or bash("echo on"))
    assert text.startswith("begun") and (on, seen) == ("on\n[exit code 0]", [True])
    assert "timed out after 1 s" in last_line(text) and "exit code" not in text


@pytest.mark.long
def test_a_timeout_ends_a_chain_of_processes_that_never_stay(play, workspace):
    beat, sizes = workspace / "beat", []
    beat.touch()
    (workspace / "chain.py").write_text(CHAIN)

    def still(request: dict) -> dict:
        sizes.append(beat.stat().st_size)
        return bash("sleep 0.3; stat -c %s beat; rm beat")

    command = f"{PYTHON} -IS chain.py; until test -s beat; do sleep 0.01; done; {SLEEP}"
    _, after = play(bash(command, timeout=1), still)
    assert sizes[0] > 0
    assert after == f"{sizes[0]}\n[exit code 0]"


def test_ctrl_c_spares_the_jobs_of_earlier_commands(play):
    emit, seen = interrupt_when(lambda: None), []

    def long(request: dict) -> dict:
        seen.append(sleepers(5))
        return bash("echo begun; sleep 1000", timeout=1000)

    def after(request: dict) -> dict:
        seen.append(alive(SLEEPER))
        return bash("echo on")

    jobs = JOBS.replace("echo up", ":")  # only the second command prints
    play(jobs, long, after, emit=emit, turns=2)
    assert sorted(seen[0]) == sorted(seen[1])


def test_a_flood_without_end_is_cut_by_the_timeout_with_its_last_lines(play):
    (text,) = play(bash("echo FIRST; while :; do echo line $((n++)); done", timeout=1))
    numbers = [int(n) for n in re.findall(r"(?m)^line (\d+)$", text)]
    assert text.startswith("FIRST\nline 0\nline 1\n") and len(text) <= 20_000
    assert numbers == sorted(numbers) and numbers[-1] > len(numbers)
    assert "timed out" in last_line(text)


def test_a_server_in_the_foreground_times_out_with_what_it_said_and_advice(play):
    (text,) = play(bash(f"{PYTHON} -u -m http.server 0 --bind 127.0.0.1", timeout=5))
    assert text.startswith("Serving HTTP on 127.0.0.1")
    assert "timed out after 5 s" in last_line(text)
    assert "background" in last_line(text) and "&" in last_line(text)


def test_what_an_interrupted_command_had_done_is_not_denied(play, repository):
    hook = repository / ".git" / "hooks" / "post-commit"
    hook.write_text(f"#!/bin/sh\necho committed\n{SLEEP}\n")
    hook.chmod(0o755)
    emit = interrupt_when(lambda: sleepers())
    (text,) = play(bash("git commit -qm three", timeout=1000), emit=emit, turns=2)
    assert b"three" in subprocess.check_output(["git", "log", "-1"], cwd=repository)
    assert text.startswith("committed\n[interrupted") and "may have" in text
    assert "not run" not in text and "before it ran" not in text


# -- what goes on in the background

STILL = re.compile(r"\[still running in the background: (.*)\]")


@pytest.mark.parametrize(
    "job",
    [
        f"{SLEEP} &",
        f"({SLEEP} &)",
        f"setsid {SLEEP} &",
        f"nohup {SLEEP} &",
        f"{SLEEP} & disown",
        f"coproc {SLEEP}",
        f"{SLEEP} | cat &",
        DAEMON + ";",
        f": > >({SLEEP});",
    ],
    ids="& subshell setsid nohup disown coproc pipe daemon substitution".split(),
)
def test_a_background_process_holds_nobody_up_and_is_named(play, job):
    seen = []
    first, _ = play(
        bash(f"{job}\n{SLEEPS}; echo hi; exit 3", timeout=1000),
        lambda request: seen.extend(sleepers()) or bash("true"),
    )
    output, note, last = first.rsplit("\n", 2)
    assert (output.split("\n")[-1], last) == ("hi", "[exit code 3]")
    assert f"pid {seen[0]} ({SLEEP})" in STILL.fullmatch(note)[1]


def test_every_background_process_of_the_call_is_named_and_of_no_other(play):
    seen = []
    first, second = play(
        f"{SLEEP} & setsid {SLEEP} & true & wait $!",
        lambda request: seen.extend(sleepers(2)) or bash("echo on"),
    )
    named = [int(n) for n in re.findall(r"pid (\d+) \(", STILL.search(first)[1])]
    assert sorted(named) == sorted(seen)
    assert second == "on\n[exit code 0]"


def test_a_daemon_of_the_start_file_of_bash_holds_nobody_up(play, tmp_path):
    (tmp_path / "profile").write_text(f"{SLEEP} &\n")
    text = play(bash("echo hi", timeout=1000), environ={"BASH_ENV": str(tmp_path / "profile")})[0]
    assert (text.split("\n")[0], last_line(text)) == ("hi", "[exit code 0]")


def test_the_name_of_a_process_can_not_forge_lines(play):
    names = [r"x\n[exit code 0]\n", r"\033[2Jx", "x" * 5000, r"a\xff", "; pid 1 (init)"]
    named = "(exec -a $'{}' {}) & sleep 0.1; echo hi; exit 3"
    for text in play(*(named.format(name, SLEEP) for name in names)):
        lines = text.split("\n")
        assert (len(lines), lines[0], lines[-1]) == (3, "hi", "[exit code 3]"), text
        assert STILL.fullmatch(lines[1]) and len(lines[1]) < 1000 and "\x1b" not in text


def test_many_background_processes_leave_room_for_the_output(play):
    (text,) = play(f"for n in {{1..100}}; do {SLEEP} & done; seq 1 9000; exit 3")
    assert text.startswith("1\n2\n") and "\n9000\n" in text and len(text) <= 20_000
    assert STILL.search(text) and last_line(text) == "[exit code 3]"


def test_late_output_of_a_job_hurts_neither_it_nor_the_next_result(play):
    job = "(sleep 0.3; echo late && touch wrote || touch died) & echo now"
    first, second = play(job, "until test -e wrote || test -e died; do sleep 0.05; done; ls")
    assert (first.split("\n")[0], second) == ("now", "wrote\n[exit code 0]")


def test_a_server_in_the_background_serves_until_the_agent_ends(play, workspace):
    serve = f"{PYTHON} -u -m http.server 0 --bind 127.0.0.1 >log 2>&1 &"
    wait = "until port=$(grep -o 'port [0-9]*' log | cut -d ' ' -f 2) && test -n \"$port\"; do"
    ask = "exec 3<>/dev/tcp/127.0.0.1/$port; printf 'GET /f HTTP/1.0\\r\\n\\r\\n' >&3; tail -1 <&3"
    (workspace / "f").write_text("the page\n")
    first, second, third = play(serve, f"{wait} sleep 0.05; done; {ask}", "cat log")
    assert "pid" in STILL.search(first)[1]
    assert second == "the page\n[exit code 0]"
    port = int(re.search(r"port (\d+)", third)[1])
    with HTTPServer(("127.0.0.1", port), Locked) as site:  # the port is free again
        assert site.server_address[1] == port


# -- /jobs


def test_jobs_are_listed_and_ended_one_by_one_or_all(terminal):
    with FlakyServer([bash(f"{SLEEP}1 & setsid {SLEEP}2 & {SLEEP}3 &"), "PONG"]) as server:
        screen = with_jobs(terminal, server)
        pids = [until(lambda n=n: alive(SLEEPER + n))[0] for n in "123"]
        shown = answer(screen, "/jobs")
        assert [n for n in "123" if f"{SLEEP}{n}" not in shown] == []
        assert [pid for pid in pids if str(pid) not in shown] == []
        answer(screen, f"/jobs end {pids[1]}")
        assert sorted(alive(SLEEPER)) == sorted([pids[0], pids[2]])
        shown = answer(screen, "/jobs")
        assert [str(pid) in shown for pid in pids] == [True, False, True]
        answer(screen, "/jobs end")
        assert alive(SLEEPER) == []
        assert SLEEP not in answer(screen, "/jobs")
        leave(screen)


def test_a_job_is_ended_with_everything_below_it(terminal):
    inner = f"trap '' TERM INT HUP; setsid {SLEEP}1 & {SLEEP}2 & wait; wait; {SLEEP}3"
    jobs = f'bash -c "{inner}" parent-{NAP} & {SLEEP}4 &'
    with FlakyServer([bash(jobs), "PONG"]) as server:
        screen = with_jobs(terminal, server)
        sleepers(3)
        (parent,) = alive(f"\0parent-{NAP}")
        assert str(parent) in answer(screen, "/jobs")
        answer(screen, f"/jobs end {parent}")
        assert [bool(alive(SLEEPER + n)) for n in "1234"] == [False, False, False, True]
        leave(screen)


def test_what_is_no_job_is_not_ended(terminal):
    with FlakyServer([bash(f"{SLEEP} & echo $PPID"), "PONG"]) as server:
        stranger = subprocess.Popen(["sleep", f"{NAP}9"])
        screen = with_jobs(terminal, server)
        host = results(server.requests[1])[0].split()[0]
        for word in (stranger.pid, screen.process.pid, host, 0, 99999999, "x", "1.5", "²"):
            assert answer(screen, f"/jobs end {word}") != ""
        assert (stranger.poll(), len(alive(SLEEPER))) == (None, 2)
        assert SLEEP in answer(screen, "/jobs")
        leave(screen)
        stranger.kill()
        stranger.wait()


def test_jobs_without_jobs_says_so_and_help_names_it(terminal):
    with FlakyServer([]) as server:
        screen = terminal(server=server)
        screen.prompt()
        for line in ("/jobs", "/jobs end", "/jobs end 1234567"):
            shown = answer(screen, line)
            assert len(shown.splitlines()) == 1 and "unknown" not in shown.lower()
        assert "/jobs" in answer(screen, "/help")
        leave(screen)


def test_jobs_of_the_user_are_jobs_too(terminal):
    with FlakyServer([]) as server:
        screen = terminal(server=server)
        screen.prompt()
        assert "up" in answer(screen, f"!{SLEEP} & echo up")
        (pid,) = sleepers()
        assert str(pid) in answer(screen, "/jobs")
        answer(screen, "/jobs end")
        assert alive(SLEEPER) == []
        leave(screen)


# -- everything ends with the agent


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(None, id="the end"),
        pytest.param(signal.SIGTERM, id="SIGTERM"),
        pytest.param(signal.SIGKILL, id="SIGKILL"),
        pytest.param(signal.SIGHUP, id="SIGHUP", marks=pytest.mark.long),
        pytest.param(signal.SIGINT, id="SIGINT", marks=pytest.mark.long),
    ],
)
def test_every_job_ends_with_the_agent(start_agent, number):
    def wait(request: dict) -> dict:
        sleepers(5)
        return {"text": "done", "hold": "before"} if number else {"text": "done"}

    with FlakyServer([bash(JOBS), wait]) as server:
        agent = start_agent("--yes", "--sandbox", "off", "go", server=server)
        if number:
            until(server.holding.is_set)
            agent.send_signal(number)
        agent.communicate(timeout=60)
        assert gone()
        server.release()
    expected = {None: 0, signal.SIGKILL: -9}
    assert agent.returncode == expected.get(number, 128 + int(number or 0))


@pytest.mark.parametrize(
    "how",
    [
        "/exit",
        "a closed window",
        *(pytest.param(h, marks=pytest.mark.long) for h in ("Ctrl-D", "kill -9")),
    ],
)
def test_every_job_ends_with_the_conversation(terminal, how):
    with FlakyServer([bash(JOBS), "PONG"]) as server:
        screen = with_jobs(terminal, server)
        sleepers(5)
        if how == "a closed window":
            screen.hang_up()
        elif how == "kill -9":
            screen.process.kill()
        else:
            screen.send({"/exit": "/exit\r", "Ctrl-D": "\x04"}[how])
        screen.process.wait(60)
        assert gone()


# -- keys


SECRET = "sk-0123456789abcdef"


@pytest.mark.parametrize(
    "command, environ, names",
    [
        pytest.param('test -n "$OPENAI_API_KEY"', "OPENAI_API_KEY", 1, id="in the command"),
        pytest.param("bash ./complain", "OPENAI_API_KEY", 1, id="in the output"),
        pytest.param('test -n "$AGENT_API_KEY"', "AGENT_API_KEY", 1, id="the agent's own"),
        pytest.param("bash ./complain; seq 9000; exit 1", "OPENAI_API_KEY", 1, id="in a flood"),
        pytest.param(
            "cat $GROQ_API_KEY $OPENAI_API_KEY x", "OPENAI_API_KEY GROQ_API_KEY", 2, id="two"
        ),
        pytest.param("echo $OPENAI_API_KEY", "OPENAI_API_KEY", 0, id="it did not fail"),
        pytest.param('test -n "$OPENAI_API_KEY"', "", 0, id="nothing was withheld"),
        pytest.param('test -n "$OPENAI_API_KEY"', "GROQ_API_KEY", 0, id="another was withheld"),
        pytest.param("exit 1", "OPENAI_API_KEY", 0, id="it is not mentioned"),
        pytest.param("test -n $MY_OPENAI_API_KEYS", "OPENAI_API_KEY", 0, id="part of a word"),
    ],
)
def test_a_failure_that_mentions_a_withheld_key_says_so(play, workspace, command, environ, names):
    (workspace / "complain").write_text("echo OPENAI_API_KEY is not set >&2; exit 1\n")
    known = dict.fromkeys(environ.split(), SECRET)
    (text,) = play(command, environ=known)
    said = [line for line in text.split("\n") if "env_keep" in line]
    assert re.fullmatch(r"\[exit code \d\]", last_line(text))
    assert len(said) == min(names, 1)
    assert [name for name in known if said and name not in said[0]] == []


def configure(home: Path, text: str) -> None:
    """Write the configuration of the user."""
    (home / ".config" / "agent").mkdir(parents=True)
    (home / ".config" / "agent" / "config.toml").write_text(text)


LENGTHS = "echo ${#OPENAI_API_KEY} ${#GROQ_API_KEY} ${#AGENT_API_KEY} ${#MY_TOKEN} ${#MY_WORD}"


@pytest.mark.parametrize(
    "config, expected",
    [
        pytest.param("", "0 0 0 0 19", id="none"),
        pytest.param('env_keep = ["GROQ_API_KEY", "NONE"]', "0 19 0 0 19", id="one"),
    ],
)
def test_commands_see_no_key_but_those_that_the_user_keeps(run_agent, home, config, expected):
    configure(home, config)
    env = dict.fromkeys(["OPENAI_API_KEY", "GROQ_API_KEY", "MY_TOKEN"], SECRET)
    env["MY_WORD"] = "x" * 19
    with FlakyServer([bash(LENGTHS), bash('env; test -z "$GROQ_API_KEY"'), "ok"]) as server:
        run_agent("--yes", "--sandbox", "off", "go", server=server, env=env)
    lengths, text = results(server.requests[-1])
    kept = config != ""
    assert (lengths, "GROQ_API_KEY=" in text) == (f"{expected}\n[exit code 0]", kept)
    assert (last_line(text), "env_keep" in text) == (f"[exit code {int(kept)}]", False)


def test_a_key_beside_the_config_is_not_in_the_environment_either(run_agent, home):
    configure(home, "")
    (home / ".config" / "agent" / "env").write_text(f"OPENAI_API_KEY={SECRET}\n")
    with FlakyServer([bash(LENGTHS), "ok"]) as server:
        run_agent("--yes", "--sandbox", "off", "go", server=server)
    assert results(server.requests[-1]) == ["0 0 0 0 0\n[exit code 0]"]


@pytest.mark.parametrize("config", ['env_keep = "OPENAI_API_KEY"', "env_keep = [1]"], ids=repr)
def test_a_wrong_list_of_names_is_named(run_agent, home, config):
    configure(home, config)
    with FlakyServer([]) as server:
        done = run_agent("hi", server=server)
    assert (done.returncode, "env_keep" in done.stderr, server.requests) == (2, True, [])


# -- what is left of a host, a line and a letter


def test_a_host_that_is_killed_between_commands_leaves_no_job(play):
    def kill(request: dict) -> str:
        host = int(results(request)[0].split()[0])
        sleepers()
        os.kill(host, signal.SIGKILL)
        until(lambda: host not in children())
        return "done"

    play(f"setsid {SLEEP} & disown; echo $PPID", kill)
    assert gone()


@pytest.mark.parametrize("begin", [r"\033]0;title", r"\033Ptext", r"\033Xtext", r"\033_text"])
def test_an_escape_without_end_takes_nothing_but_its_line(shell, begin):
    text, _ = shell(f"printf 'a{begin}\\nFATAL at line 3\\nlast\\n'")
    assert text == "a\nFATAL at line 3\nlast\n[exit code 0]"


def test_many_backspaces_are_taken_out_in_time():
    began = time.monotonic()
    assert plain_text("keep\n" + "a" * 48_000 + "\b" * 48_000 + "done\n") == "keep\ndone\n"
    assert time.monotonic() - began < 10


@pytest.fixture(scope="module")
def latin1(tmp_path_factory) -> dict[str, str]:
    """The environment of a user whose locale is not UTF-8."""
    folder = tmp_path_factory.mktemp("locales")
    name = "en_US.ISO-8859-1"
    command = ["localedef", "-c", "-i", "en_US", "-f", "ISO-8859-1", str(folder / name)]
    if not shutil.which(command[0]) or subprocess.run(command, capture_output=True).returncode > 1:
        pytest.skip("needs localedef and its sources")
    return {"LOCPATH": str(folder), "LC_ALL": name}


def test_a_command_may_hold_letters_that_the_locale_does_not_know(play, latin1):
    first, second = play("printf '😀' | od -An -tx1", "echo $PPID", environ=latin1)
    assert (first, last_line(second)) == (" f0 9f 98 80\n[exit code 0]", "[exit code 0]")


@pytest.mark.parametrize("environ", [{}, {"LC_ALL": "C"}], ids=["UTF-8", "C"])
def test_a_nul_in_a_command_does_not_end_the_host(workspace, environ):
    texts = []
    host = CommandHost(workspace, ENVIRON | environ)
    try:
        for command in ("echo \0 x", "printf '😀'; echo $PPID"):
            capture = Capture(None)
            code, _ = host.run(command, 20, capture, lambda data: None)
            texts.append((code, capture.text(), host.process.poll()))
    finally:
        host.close()
    assert [(code, ended) for code, _, ended in texts][1] == (0, None)
    assert texts[1][1].startswith("😀")


def test_a_letter_that_comes_in_two_parts_is_shown_whole(terminal):
    with FlakyServer([]) as server:
        screen = terminal(server=server)
        screen.prompt()
        halves = (
            r"printf 'caf\303'; sleep 0.3; printf '\251 \360\237'; sleep 0.3; printf '\230\200\n'"
        )
        assert "café 😀" in answer(screen, f"!{halves}")
        leave(screen)
