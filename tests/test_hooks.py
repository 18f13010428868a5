"""Hooks (sections 8 and 11) and the audit: the user's programs and functions around each call.

Most tests run the agent in this process with `Settings(hooks=...)`; those of the config file and
of Ctrl-C start the real program. What the interface of hooks is made of stands in `sh`, `reply`
and `add_hook`; the tests look for values and not for the names of keys.
"""

import json
import os
import re
import resource
import select
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import NAP, alive, results, session_files, until
from test_sandbox import WHY_NOT

from agent import Settings, append_private, build_agent, tool
from flaky_server import FlakyServer

SECRET = "sk-Test0123456789abcdefXYZ"
TOKEN = "ghp_0123456789abcdefghijABCDEFGHIJ012345"


def call(name: str, **arguments: object) -> dict:
    """A script step in which the model calls one tool."""
    return {"call": name, "arguments": arguments}


def write(name: str, content: str = "x\n") -> dict:
    """A step that writes a file."""
    return call("write_file", path=name, content=content)


def batch(*steps: dict) -> dict:
    """A script step in which the model makes several calls at once."""
    return {"calls": [{"name": step["call"], "arguments": step["arguments"]} for step in steps]}


def sh(text: str, *words: object) -> tuple[str, ...]:
    """A hook that is a line of shell, with its words."""
    return ("/bin/sh", "-c", text, "hook", *map(str, words))


def reply(**arguments: object) -> str:
    """What a before_tool hook prints to change the arguments of a call."""
    return json.dumps({"arguments": arguments})


def add_hook(agent: Any, kind: str, function: Callable[..., Any]) -> None:
    """Put a function of Python among the hooks of an agent."""
    agent.hooks.setdefault(kind, []).append(function)


def holds(value: Any, *wanted: object) -> bool:
    """Whether all these are among the values of an object, at any depth."""
    found: list[Any] = []

    def walk(inner: Any) -> None:
        found.append(inner)
        for item in inner.values() if isinstance(inner, dict) else ():
            walk(item)

    walk(value)
    return all(item in found for item in wanted)


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[..., SimpleNamespace]]:
    """Run a script in this process; returns the result, the texts and the events of the run."""
    root = tmp_path / "root"
    root.mkdir()

    def run(script: list, *, ask: Any = None, tools: Any = (), setup: Any = None, **more: Any):
        events: list[tuple[str, dict]] = []
        environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        known = {"mode": "auto", "sandbox": "off", "workspace": str(root), "environ": environ}
        with FlakyServer(script) as server:
            settings = Settings(base_url=server.url, api_key="x", model="flaky-1", **(known | more))
            agent = build_agent(
                settings, tools, emit=lambda kind, **data: events.append((kind, data)), ask=ask
            )
            try:
                if setup is not None:
                    setup(agent)
                result = agent.run("go")
            finally:
                agent.close()
        assert [reason for request in server.requests for reason in request.problems] == []
        texts = results(server.requests[-1])
        return SimpleNamespace(
            result=result, texts=texts, events=events, root=root, session=agent.session.id
        )

    yield run


def files(root: Path) -> list[str]:
    """The names of all files but the agent's own, sorted."""
    found = [path for path in root.rglob("*") if path.is_file()]
    return sorted(path.name for path in found if ".agent" not in path.parts)


def warnings(done: SimpleNamespace, stderr: str = "") -> list[str]:
    """What was said about hooks that failed."""
    texts = [d["text"] for kind, d in done.events if kind == "notice" and d["level"] != "info"]
    about = re.compile("hook|callback|before_tool|after_tool|on_stop")
    return [text for text in [*texts, *stderr.splitlines()] if about.search(text)]


# -- programs ------------------------------------------------------------------------------------


def put_config(folder: Path, **hooks: tuple[str, ...]) -> dict[str, str]:
    """Write a user config with these hooks; returns the environment that finds it."""
    (folder / "agent").mkdir(parents=True)
    lines = [f"{name} = {json.dumps(argv)}" for name, argv in hooks.items()]
    (folder / "agent" / "config.toml").write_text("\n".join(["[hooks]", *lines, ""]))
    return {"XDG_CONFIG_HOME": str(folder)}


def put_project_hooks(workspace: Path, marker: Path) -> None:
    """Write hooks into a project, in all places where a config might be looked for."""
    argv = sh('touch "$1"', marker)
    names = [".agent/config.toml", "config.toml", "agent.toml", ".config/agent/config.toml"]
    for name in [*names, ".agent.toml", "agent/config.toml"]:
        path = workspace / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(f"[hooks]\nbefore_tool = {json.dumps(argv)}\n")
    for name in (".agent/hooks/before_tool", ".git/hooks/before_tool", "hooks/before_tool"):
        path = workspace / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\ntouch '{marker}'\n")
        path.chmod(0o755)


def test_hooks_of_the_user_get_each_call_as_json_and_those_of_a_project_do_not_run(
    run_agent, workspace, tmp_path
):
    out = tmp_path / "out"
    out.mkdir()
    put_project_hooks(workspace, tmp_path / "project-marker")
    env = put_config(
        tmp_path / "config",
        before_tool=sh('cat > "$1"; printf %s "$2" > "$1.word"', out / "before", "a b $HOME; 'c'"),
        after_tool=sh('cat > "$1"', out / "after"),
        on_stop=sh('cat > "$1"', out / "stop"),
    )
    step = call("edit_file", path="a.txt", old="one", new="two")
    (workspace / "a.txt").write_text("one\n")
    with FlakyServer([step, "PONG"]) as server:
        done = run_agent("--yes", "go", server=server, env=env)
    assert (done.returncode, done.stdout) == (0, "PONG\n")
    assert (workspace / "a.txt").read_text() == "two\n"
    before, after, stop = [json.loads((out / n).read_text()) for n in ("before", "after", "stop")]
    assert holds(before, "edit_file", step["arguments"])
    assert holds(after, "edit_file", step["arguments"], results(server.requests[1])[0])
    assert isinstance(stop, dict)
    assert (out / "before.word").read_text() == "a b $HOME; 'c'"
    assert not (tmp_path / "project-marker").exists()


def test_bare_runs_no_hook(run_agent, workspace, tmp_path):
    marker = tmp_path / "marker"
    touch = sh('touch "$1"', marker)
    env = put_config(tmp_path / "config", before_tool=touch, after_tool=touch, on_stop=touch)
    with FlakyServer([write("a.txt"), "PONG"]) as server:
        done = run_agent("--bare", "--yes", "go", server=server, env=env)
    assert (done.returncode, files(workspace), marker.exists()) == (0, ["a.txt"], False)


@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        'before_tool = "touch marker"',
        "before_tool = [1]",
        'before_tol = ["true"]',
    ],
)
def test_a_hook_that_is_no_list_of_words_is_named_and_nothing_starts(run_agent, tmp_path, text):
    env = put_config(tmp_path / "config")
    path = tmp_path / "config" / "agent" / "config.toml"
    path.write_text(f"[hooks]\n{text}\n")
    with FlakyServer(["PONG"]) as server:
        done = run_agent("go", server=server, env=env)
    assert (done.returncode, len(server.requests)) == (2, 0)
    assert text.split()[0] in done.stderr


def test_exit_2_blocks_the_call_and_its_words_go_to_the_model(play) -> None:
    says = 'echo "not that one"; echo "ask Ann" >&2; head -c 3000000 /dev/zero >&2; exit 2'
    hook = sh(f"grep -q blocked && {{ {says}; }}; exit 0")
    done = play(
        [batch(write("blocked.txt"), write("free.txt")), "PONG"], hooks={"before_tool": hook}
    )
    first, second = done.texts
    assert first.startswith("denied: ") and "ask Ann" in first
    assert not second.startswith(("denied: ", "error: "))
    assert (files(done.root), done.result.status) == (["free.txt"], "done")


@pytest.mark.parametrize(
    "hook",
    [
        pytest.param(sh("echo broken >&2; exit 1"), id="exit 1"),
        pytest.param(sh("exit 127"), id="exit 127"),
        pytest.param(sh("kill -9 $$"), id="killed"),
        pytest.param(("/nowhere/hook",), id="missing"),
        pytest.param(("/etc/hostname",), id="no program", marks=pytest.mark.long),
        pytest.param(("/",), id="a folder", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "kind", ["before_tool", *(pytest.param(k, marks=pytest.mark.long) for k in ("after_tool",))]
)
def test_any_other_failure_warns_once_and_the_call_runs(play, capfd, hook, kind) -> None:
    done = play([batch(write("a.txt"), write("b.txt")), "PONG"], hooks={kind: hook})
    assert (files(done.root), done.result.status) == (["a.txt", "b.txt"], "done")
    assert [text[:8] for text in done.texts if text.startswith(("denied: ", "error: "))] == []
    assert len(warnings(done, capfd.readouterr().err)) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "hook",
    [
        pytest.param(sh("echo no json"), id="words"),
        pytest.param(sh("echo '[1]'"), id="a list"),
        pytest.param(sh("echo '{\"arguments\": 7}'"), id="arguments that are none"),
        pytest.param(sh("printf '\\377\\000'"), id="no text"),
        pytest.param(sh("exec 0<&-; exit 0"), id="reads nothing"),
        pytest.param(sh("head -c 3000000 /dev/zero >&2"), id="much on stderr"),
        pytest.param(sh("head -c 3000000 /dev/zero"), id="much on stdout"),
    ],
)
def test_what_a_hook_prints_that_means_nothing_changes_nothing(play, hook) -> None:
    steps = [write("a.txt"), write("b.txt", "x" * 300_000)]
    done = play([batch(*steps), "PONG"], hooks={"before_tool": hook})
    assert (files(done.root), done.result.status) == (["a.txt", "b.txt"], "done")
    assert (done.root / "a.txt").read_text() == "x\n"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(f"sleep {NAP}", id="waits"),
        pytest.param(
            f"trap '' TERM INT HUP; sleep {NAP}; sleep {NAP}",
            id="ignores signals",
            marks=pytest.mark.long,
        ),
        pytest.param(f"sleep {NAP} & sleep {NAP}", id="in the background", marks=pytest.mark.long),
    ],
)
def test_a_hook_that_takes_too_long_is_ended_and_the_call_runs(play, capfd, text) -> None:
    done = play([write("a.txt"), "PONG"], hooks={"before_tool": sh(text)}, hook_seconds=0.3)
    assert (files(done.root), done.result.status) == (["a.txt"], "done")
    until(lambda: not alive(NAP), 30)
    assert len(warnings(done, capfd.readouterr().err)) == 1


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it works")
def test_a_hook_runs_outside_the_sandbox_that_commands_run_in(play, tmp_path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    hook = sh('touch "$1"', out / "hook")
    steps = [
        call("bash", command=text)
        for text in (f"python3 -c \"open('{out}/c', 'w')\"", "touch inside")
    ]
    asked: list[str] = []
    known = {"sandbox": "on", "hooks": {"before_tool": hook}}
    done = play([batch(*steps), "PONG"], ask=lambda q: asked.append(q.text) or "y", **known)
    assert [path.name for path in out.iterdir()] == ["hook"]
    assert files(done.root) == ["inside"]
    assert [text[-13:] for text in done.texts] == ["[exit code 1]", "[exit code 0]"]


@pytest.mark.long
def test_nobody_waits_for_what_a_hook_left_running(play) -> None:
    hook = sh(f"sleep {NAP} & exit 0")  # It keeps the pipes of the hook open.
    try:
        done = play([write("a.txt"), "PONG"], hooks={"before_tool": hook}, hook_seconds=0.3)
    finally:
        for left in alive(NAP):
            os.kill(left, signal.SIGKILL)
    assert (files(done.root), done.result.status) == (["a.txt"], "done")


def test_a_call_that_a_hook_changed_is_judged_again(play) -> None:
    changes = {"free": "other.txt", "state": ".agent/owned.txt", "outside": "../owned.txt"}
    cases = [f"*{old}*) echo '{reply(path=new, content='y')}' ;;" for old, new in changes.items()]
    hook = sh(f'case "$(cat)" in {" ".join(cases)} esac')
    steps = [write(f"{name}.txt") for name in ("free", "state", "outside", "same")]
    done = play([batch(*steps), "PONG"], hooks={"before_tool": hook})
    denied = [text.startswith("denied: ") for text in done.texts]
    assert (denied, files(done.root)) == ([False, True, True, False], ["other.txt", "same.txt"])
    assert (done.root / "other.txt").read_text() == "y"
    assert not (done.root / ".agent" / "owned.txt").exists()
    assert not (done.root.parent / "owned.txt").exists()


@pytest.mark.parametrize(
    ("answers", "made"),
    [pytest.param("yy", ["other.txt"], id="yes"), pytest.param("nn", [], id="no")],
)
def test_a_person_is_asked_for_the_call_that_will_run(play, answers, made) -> None:
    asked: list[str] = []
    waiting = iter(answers)
    hook = sh(f"echo '{reply(path='other.txt', content='changed')}'")

    def ask(question: Any) -> str:
        asked.append(question.text)
        return next(waiting)

    done = play([write("a.txt"), "PONG"], mode="ask", ask=ask, hooks={"before_tool": hook})
    assert files(done.root) == made
    assert not made or ("other.txt" in asked[-1] and "changed" in asked[-1])


def test_a_hook_that_changes_a_command_brings_no_denied_one(play) -> None:
    hook = sh(
        'case "$(cat)" in '
        f"*first*) echo '{reply(command='touch secret.txt')}' ;;"
        f"*second*) echo '{reply(command='touch open.txt')}' ;; esac"
    )
    steps = [call("bash", command=f"touch {name}.txt") for name in ("first", "second")]
    rules = {"deny": ("bash touch secret*",)}
    done = play([batch(*steps), "PONG"], hooks={"before_tool": hook}, **rules)
    assert [text[:8] == "denied: " for text in done.texts] == [True, False]
    assert files(done.root) == ["open.txt"]


@pytest.mark.parametrize(
    "kind", ["before_tool", *(pytest.param(k, marks=pytest.mark.long) for k in ("after_tool",))]
)
def test_ctrl_c_during_a_hook_ends_the_turn_and_the_hook(start_agent, workspace, tmp_path, kind):
    started = tmp_path / "started"
    text = f'trap "" INT; cat > "$1.part"; mv "$1.part" "$1"; sleep {NAP} & sleep {NAP}'
    env = put_config(tmp_path / "config", **{kind: sh(text, started)})  # All its input came.
    with FlakyServer([write("a.txt"), "PONG"]) as server:
        agent = start_agent("--yes", "go", server=server, env=env)
        until(lambda: agent.poll() is not None or (started.exists() and len(alive(NAP)) >= 2), 60)
        agent.send_signal(signal.SIGINT)
        _, stderr = agent.communicate(timeout=60)
    assert (agent.returncode, "Traceback" in stderr, len(server.requests)) == (130, False, 1)
    until(lambda: not alive(NAP), 30)
    assert files(workspace) == (["a.txt"] if kind == "after_tool" else [])
    [path] = session_files(workspace)
    assert [m["role"] for m in json.loads(path.read_text())["messages"]][-1] == "tool"


# -- functions -----------------------------------------------------------------------------------


def given(values: tuple, named: dict) -> Any:
    """What a function of Python was called with, as one object."""
    return {"values": dict(enumerate(values)), **named}


def test_functions_see_what_programs_see(play) -> None:
    seen: dict[str, list[Any]] = {"before_tool": [], "after_tool": [], "on_stop": []}

    def setup(agent: Any) -> None:
        for kind, calls in seen.items():
            add_hook(agent, kind, lambda *v, calls=calls, **n: calls.append(given(v, n)))

    step = write("a.txt")
    done = play([step, "PONG"], setup=setup)
    assert [len(calls) for calls in seen.values()] == [1, 1, 1]
    assert holds(seen["before_tool"][0], "write_file", step["arguments"])
    assert holds(seen["after_tool"][0], "write_file", step["arguments"], done.texts[0])
    assert files(done.root) == ["a.txt"]


@pytest.mark.parametrize(
    "kind",
    ["before_tool", *(pytest.param(k, marks=pytest.mark.long) for k in ("after_tool", "on_stop"))],
)
@pytest.mark.parametrize(
    "error",
    [ValueError, *(pytest.param(e, marks=pytest.mark.long) for e in (OSError, RecursionError))],
)
def test_a_function_that_fails_never_ends_the_turn(play, capfd, kind, error) -> None:
    def fail(*values: Any, **named: Any) -> None:
        raise error("out of order")

    steps = [batch(write("a.txt"), write("b.txt")), "PONG"]
    done = play(steps, setup=lambda agent: add_hook(agent, kind, fail))
    assert (done.result.status, done.result.text) == ("done", "PONG")
    assert files(done.root) == ["a.txt", "b.txt"]
    assert len(warnings(done, capfd.readouterr().err)) == 1


@pytest.mark.parametrize("answer", [None, True, 0, "", object, {"arguments": None}], ids=repr)
@pytest.mark.long
def test_a_function_that_says_nothing_of_use_changes_nothing(play, answer) -> None:
    steps = [write("a.txt"), "PONG"]
    done = play(steps, setup=lambda agent: add_hook(agent, "before_tool", lambda *_, **__: answer))
    assert (done.result.status, files(done.root)) == ("done", ["a.txt"])


@pytest.mark.parametrize("why", ["no", True, "", 1])
def test_a_function_may_block_with_a_reason_or_without(play, why) -> None:
    answer = {"block": why, "arguments": None}
    done = play(
        [write("a.txt"), "PONG"],
        setup=lambda agent: add_hook(agent, "before_tool", lambda facts: answer),
    )
    reason = why if why == "no" else "a hook does not allow it"
    assert (done.texts, files(done.root)) == ([f"denied: {reason}"], [])


def test_a_call_that_a_function_changed_is_judged_again(play) -> None:
    def change(*values: Any, **named: Any) -> Any:
        text = repr(given(values, named))
        paths = {"free": "other.txt", "state": ".agent/owned.txt"}
        new = [path for name, path in paths.items() if f"{name}.txt" in text]
        return json.loads(reply(path=new[0], content="y")) if new else None

    steps = [batch(write("free.txt"), write("state.txt"), write("same.txt")), "PONG"]
    done = play(steps, setup=lambda agent: add_hook(agent, "before_tool", change))
    assert [text[:8] == "denied: " for text in done.texts] == [False, True, False]
    assert files(done.root) == ["other.txt", "same.txt"]
    assert not (done.root / ".agent" / "owned.txt").exists()


# -- the audit -----------------------------------------------------------------------------------


def audit(root: Path) -> list[dict]:
    """The lines of the audit of a workspace."""
    text = (root / ".agent" / "audit.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_the_audit_has_a_line_for_each_call_with_who_decided(run_agent, workspace):
    (workspace / "a.txt").write_text("one\n")
    steps = [
        (call("read_file", path="a.txt"), ("read_file", "ok", "allow"), ""),
        (write("b.txt"), ("write_file", "denied", "ask"), "ask|nobody"),
        (call("bash", command="touch c.txt"), ("bash", "ok", "allow"), r"bash touch \*"),
        (write("d.txt"), ("write_file", "denied", "deny"), r"write_file d\*"),
        (write("AGENTS.md"), ("write_file", "denied", "human"), ""),
        (call("frobnicate", x=1), ("frobnicate", "error"), ""),
        (call("read_file", path="none.txt"), ("read_file", "error", "allow"), ""),
        (call("read_file", lines="x"), ("read_file", "error"), ""),
        (call("read_file", **{SECRET: 1}), ("read_file", "error"), ""),
        (call("bash", command=f"echo {SECRET} {TOKEN}"), ("bash", "ok", "allow"), ""),
        (write("big.txt", "word " * 40_000), ("write_file", "denied", "ask"), ""),
    ]
    flags = ["--allow", "bash touch *", "--deny", "write_file d*"]
    umask = ("/bin/sh", "-c", 'umask 0; exec "$@"', "sh")
    env = {"AGENT_API_KEY": SECRET, "SOME_TOKEN": TOKEN}
    with FlakyServer([batch(*(step for step, _, _ in steps)), "PONG"]) as server:
        done = run_agent(*flags, "go", server=server, env=env, under=umask)
    lines = audit(workspace)
    [session] = session_files(workspace)
    assert (done.returncode, len(lines)) == (77, len(steps))
    for (step, values, words), line in zip(steps, lines, strict=True):
        assert holds(line, session.stem, *values), (values, line)
        assert re.search(words, json.dumps(line)), (words, line)
        assert (
            step["call"] != "read_file"
            or "path" not in step["arguments"]
            or (step["arguments"]["path"] in json.dumps(line))
        )
    path = workspace / ".agent" / "audit.jsonl"
    modes = [stat.S_IMODE(one.stat().st_mode) for one in (path, path.parent)]
    raw = path.read_text()
    assert (modes, SECRET in raw, TOKEN in raw) == ([0o600, 0o700], False, False)
    assert raw.count("[masked]") >= 2
    assert max(map(len, raw.splitlines())) < 20_000 and "big.txt" in raw and "word word" in raw


@tool(needs="read")
def stop_here() -> str:
    """Be interrupted."""
    raise KeyboardInterrupt


def test_the_audit_says_what_a_person_decided_and_what_was_cancelled(play) -> None:
    answers = iter(["y", "n", "use b.txt"])
    steps = [*map(write, ("y.txt", "n.txt", "c.txt")), call("stop_here"), write("late.txt")]
    script = [batch(*steps), "PONG"]
    done = play(script, mode="ask", ask=lambda question: next(answers), tools=[stop_here])
    lines = audit(done.root)
    assert (done.result.status, files(done.root)) == ("cancelled", ["y.txt"])
    outcomes = ["ok", "denied", "denied", "cancelled"]
    assert [holds(line, outcome) for line, outcome in zip(lines, outcomes, strict=False)] == [
        True
    ] * 4
    decided = [re.search("person|human|user", json.dumps(line)) for line in lines[:3]]
    assert all(decided), lines
    assert [holds(line, done.session) for line in lines] == [True] * len(lines)
    assert not any(holds(line, "ok") for line in lines[3:])


def test_the_audit_grows_and_begins_again_nowhere(play) -> None:
    first = play([write("a.txt"), "PONG"], mode="ask", unattended=True)
    second = play([write("b.txt"), "PONG"], mode="ask", allow=("write_file b.txt",))
    lines = audit(first.root)
    assert [holds(line, "ok", "write_file") for line in lines] == [True, True]
    sessions = [first.session, second.session]
    assert [holds(line, one) for line, one in zip(lines, sessions, strict=True)] == [True, True]
    assert "--yes" in json.dumps(lines[0]) and "write_file b.txt" in json.dumps(lines[1])


def test_a_line_that_the_disk_takes_in_part_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_private(path, "first\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, limits[1]))
    try:
        with pytest.raises(OSError, match="No space"):
            append_private(path, "second\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    append_private(path, "third\n")
    assert path.read_text() == "first\nthird\n"


def test_without_a_session_there_is_no_audit(play) -> None:
    done = play([write("a.txt"), "PONG"], save_session=False)
    assert (files(done.root), (done.root / ".agent" / "audit.jsonl").exists()) == (["a.txt"], False)


@pytest.fixture
def odd_audit(tmp_path: Path) -> Iterator[Callable[[str], Callable[[], bytes]]]:
    """Put something that is no file where the audit goes; returns what tells what got into it."""
    outside, readers = tmp_path / "outside.txt", []
    path = tmp_path / "root" / ".agent" / "audit.jsonl"

    def put(kind: str) -> Callable[[], bytes]:
        path.parent.mkdir(mode=0o700)
        if kind == "a folder":
            path.mkdir()
            return lambda: b"".join(item.name.encode() for item in path.iterdir())
        if kind == "a pipe":
            os.mkfifo(path)
            readers.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            return lambda: os.read(readers[0], 9) if select.select(readers, [], [], 0)[0] else b""
        path.symlink_to(outside)
        if kind == "a link":
            outside.write_text("")
        return lambda: outside.read_bytes() if outside.exists() else b""

    yield put
    for reader in readers:
        os.close(reader)


@pytest.mark.parametrize("kind", ["a link", "a link to nothing", "a folder", "a pipe"])
def test_an_audit_that_is_no_file_gets_nothing_and_the_turn_goes_on(
    play, odd_audit, tmp_path, kind
) -> None:
    written = odd_audit(kind)
    done = play([write("a.txt"), "PONG"])
    assert (done.result.status, files(done.root), written()) == ("done", ["a.txt"], b"")
    assert (tmp_path / "outside.txt").exists() == (kind == "a link")


@pytest.mark.long
def test_the_audit_of_a_hook_names_it_and_the_call_as_it_ran(play) -> None:
    hook = sh(
        'case "$(cat)" in *blocked*) echo no >&2; exit 2 ;;'
        f"*free*) echo '{reply(path='other.txt', content='y')}' ;; esac"
    )
    script = [batch(write("blocked.txt"), write("free.txt")), "PONG"]
    done = play(script, hooks={"before_tool": hook})
    blocked, free = audit(done.root)
    assert holds(blocked, "denied") and "hook" in json.dumps(blocked)
    assert holds(free, "ok") and "other.txt" in json.dumps(free)


def reads_much(request: dict) -> dict | str:
    """A model that reads a file forty times at once, and then answers."""
    steps = [call("read_file", path="a.txt", start=number) for number in range(1, 41)]
    return "PONG" if results(request) else batch(*steps)


@pytest.mark.long
def test_two_programs_at_once_write_whole_lines(start_agent, workspace):
    (workspace / "a.txt").write_text("one\n" * 50)
    with FlakyServer([reads_much] * 4) as server:
        both = [start_agent("go", server=server) for _ in range(2)]
        ends = [(agent.communicate(timeout=60), agent.returncode)[1] for agent in both]
    assert (ends, len(audit(workspace))) == ([0, 0], 80)
