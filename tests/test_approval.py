"""The permission question: what it shows, which answers count, and what nobody there means.

The dialogues run the real program on a pty. `asked` waits until it listens for an answer; what it
says is looked at in its words and not in its layout. What would do harm is never run here: it is
only decided on.
"""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import prompts, results, session_files, until
from test_sandbox import WHY_NOT

from agent import (
    Always,
    Settings,
    build_agent,
    make_policy,
    offered_rules,
    parse_rule,
    tool,
    unfit_rule,
)
from flaky_server import FlakyServer

LISTENS = re.compile(r"(?:[:?>)\]] |bash [^\r\n]*\*)$")  # The end of a question or of a rule.
KILL_LINE = "\x15"


def call(name: str, **arguments: object) -> dict:
    """A script step in which the model calls one tool."""
    return {"call": name, "arguments": arguments}


def batch(*steps: dict) -> dict:
    """A script step in which the model makes several calls at once."""
    return {"calls": [{"name": step["call"], "arguments": step["arguments"]} for step in steps]}


def asked(screen) -> str:
    """Wait until the program listens for an answer; return what it wrote since the last time."""

    def listens() -> bool:
        while screen.read(0.02):
            continue
        assert screen.process.poll() is None, f"it ended; the screen:\n{screen.text}"
        stat = Path(f"/proc/{screen.process.pid}/stat").read_text()
        sleeps = stat.rsplit(")", 1)[1].split()[0] == "S"
        return sleeps and bool(LISTENS.search(screen.text, screen.seen)) and not screen.read(0)

    try:
        until(listens, 60)
    except AssertionError:
        pytest.fail(f"no question; the screen:\n{screen.text}")
    shown, screen.seen = screen.text[screen.seen :], len(screen.text)
    return shown.replace("\r\n", "\n")


def beside(shown: str, said: str = "") -> str:
    """What a question says beside the line of the call and the command itself, in lower case."""
    question = re.sub(r"(?m)^.*→.*$", "", shown)
    return (question.replace(said, " ") if said else question).lower()


def answer_then(screen, server, keys: str) -> str:
    """Give an answer that may be asked about again: then say no. Returns the next call's question.

    The question behind it must be that of another step of the model.
    """
    before = len(server.requests)
    screen.send(keys)
    shown = asked(screen)
    if len(server.requests) == before:
        screen.send("n\r")
        shown = asked(screen)
    assert len(server.requests) > before
    return shown


def to_the_end(screen) -> None:
    """The turn ends with its answer, and the program with 0."""
    screen.expect("PONG", 60)
    assert screen.wait(60) == 0


@pytest.fixture
def tools_env(tmp_path: Path) -> dict[str, str]:
    """An environment with a `pytest` that only writes down how it was called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "pytest"
    program.write_text('#!/bin/sh\necho "pytest $*" >> ran.txt\n')
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Write the user's config file; returns the environment that finds it."""

    def write(text: str) -> dict[str, str]:
        folder = tmp_path / "config" / "agent"
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(text)
        return {"XDG_CONFIG_HOME": str(folder.parent)}

    return write


# -- what the question shows ---------------------------------------------------------------------

SHOWN = [
    ("cd deep-folder && touch made.txt", {}, ["deep-folder"]),
    ("cd deep-folder && echo x > b.txt", {}, ["deep-folder/b.txt"]),
    ("echo 'two  blanks' > out/report.txt", {}, ["out/report.txt"]),
    ("touch net.txt", {"network": True}, ["network"]),
    ("cp one.txt two.txt", {}, ["bash cp *"]),
]
HIDING = "touch e1.txt \x1b[8m; touch e2.txt \u202e\u200b\U000e0041"


def test_the_question_shows_what_will_run_where_and_why(terminal, workspace, config):
    for name in ("deep-folder", "out"):
        (workspace / name).mkdir()
    (workspace / "a.txt").write_text("kept\nold line\n")
    steps = [call("bash", command=command, **more) for command, more, _ in SHOWN]
    steps += [
        call("write_file", path="a.txt", content="kept\nnew \x1b[8mline\u202e\n"),
        call("write_file", path="Makefile", content="all:\n\ttrue\n"),
        call("bash", command=HIDING),
    ]
    with FlakyServer([*steps, "PONG"]) as server:
        screen = terminal("go", server=server, env=config('ask = ["bash cp *"]\n'))
        for number, (command, _, words) in enumerate(SHOWN):
            shown = asked(screen)
            assert command in shown
            assert [word for word in words if word not in beside(shown, command)] == [], shown
            screen.send("y\r" if number == 0 else "n\r")
        diff = asked(screen)
        screen.send("y\r")
        assert "runs later" in beside(asked(screen))
        screen.send("n\r")
        hiding = asked(screen)
        screen.send("n\r")
        to_the_end(screen)
    assert "-old line" in diff and "+new " in diff and "[8mline" in diff and " kept" in diff
    assert "touch e1.txt" in hiding and "[8m; touch e2.txt" in hiding
    raw = ["\x1b[8m", "\u202e", "\u200b", "\U000e0041"]
    assert [text for text in raw if text in screen.output] == []
    made = sorted(path.name for path in workspace.rglob("*.txt") if ".agent" not in path.parts)
    assert made == ["a.txt", "made.txt"]
    assert (workspace / "deep-folder" / "made.txt").exists()
    assert (workspace / "a.txt").read_text() == "kept\nnew \x1b[8mline\u202e\n"


def lines_of(count: int, last: str) -> str:
    """A command of so many lines that reads only, but for the last one."""
    return "\n".join([*(f"echo r-{number:02}" for number in range(1, count)), last])


def test_what_is_long_is_shown_by_its_ends_and_needs_more_than_a_y(terminal, workspace):
    wide = f"touch third.txt {'x' * 1500} middle {'x' * 1500} ; touch fourth.txt"
    steps = [
        call("bash", command=lines_of(40, "touch first.txt")),
        call("bash", command=lines_of(40, "touch second.txt")),
        call("bash", command=wide),
        call("write_file", path="mid.txt", content=rows(150)),
        call("write_file", path="big.txt", content=rows(400)),
    ]
    with FlakyServer([*steps, "PONG"]) as server:
        screen = terminal("go", server=server)
        first = beside(asked(screen))
        assert "echo r-01\n" in first and "touch first.txt" in first and "echo r-20" not in first
        assert re.search(r"\d\D{0,20}line|line\D{0,20}\d", first)
        assert "touch second.txt" in answer_then(screen, server, "y\r")
        screen.send("yes\r")
        third = beside(asked(screen))
        assert "touch third.txt" in third and "touch fourth.txt" in third
        assert " middle " not in third and re.search(r"\d\D{0,20}char|char\D{0,20}\d", third)
        screen.send("n\r")
        middle = asked(screen)
        assert [n for n in range(1, 151) if f"+row-{n:03}\n" not in middle] == []
        screen.send("n\r")
        big = asked(screen)
        assert "+row-001\n" in big and "+row-400\n" in big and "+row-200\n" not in big
        screen.send("d\r")
        whole = asked(screen)
        assert [n for n in range(1, 401) if f"+row-{n:03}\n" not in whole] == []
        assert len(server.requests) == 5
        screen.send("y\r")
        to_the_end(screen)
    denied = [text.startswith("denied: ") for text in results(server.requests[-1])]
    assert denied == [True, False, True, True, False]
    made = sorted(path.name for path in workspace.glob("*.txt"))
    assert (made, (workspace / "big.txt").read_text()) == (["big.txt", "second.txt"], rows(400))


def rows(count: int) -> str:
    """A text of so many lines."""
    return "".join(f"row-{number:03}\n" for number in range(1, count + 1))


def of_length(count: int) -> str:
    """A command of so many characters; what it touches is `limit.txt`."""
    front = "touch limit.txt # "
    return front + "x" * (count - len(front))


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "enough"),
    [
        pytest.param(of_length(2000), True, id="2000 characters"),
        pytest.param(of_length(2001), False, id="2001 characters"),
        pytest.param(lines_of(20, "touch limit.txt"), True, id="20 lines"),
        pytest.param(lines_of(21, "touch limit.txt"), False, id="21 lines"),
        pytest.param(" " * 4000 + "touch limit.txt", False, id="84: blanks before"),
        pytest.param("true;" * 500 + " touch limit.txt", False, id="84: steps before"),
    ],
)
def test_y_is_enough_up_to_the_limits_of_what_is_shown_whole(terminal, workspace, command, enough):
    other = call("bash", command="touch other.txt")
    with FlakyServer([call("bash", command=command), other, "PONG"]) as server:
        screen = terminal("go", server=server)
        assert "touch limit.txt" in beside(asked(screen))
        assert "touch other.txt" in answer_then(screen, server, "y\r")
        screen.send("y\r")
        to_the_end(screen)
    made = sorted(path.name for path in workspace.glob("*.txt"))
    assert made == ["limit.txt", "other.txt"][not enough :]


# -- answers -------------------------------------------------------------------------------------

PASTES = [
    pytest.param("y\ry\r", id="lines"),
    pytest.param("y\ntouch b\n", id="LF"),
    pytest.param("y\r\ny\r\n", id="CRLF"),
    pytest.param("yes\ryes\ryes\r", id="yes"),
    pytest.param("\x1b[200~y\ry\r\x1b[201~", id="bracketed"),
    pytest.param("\x1b[200~y\r\x1b[201~\r", id="bracketed line"),
]


def write(name: str, **more: Any) -> dict:
    """A step that writes one file."""
    return call("write_file", path=name, content=f"{name}\n") | more


def test_only_a_line_begun_after_the_question_is_an_answer(terminal, workspace):
    steps = [write("a.txt", hold="before"), write("b.txt", hold="before")]
    steps += [write(f"{name}.txt") for name in "cdefgh"]
    with FlakyServer([*steps, "PONG"]) as server:
        screen = terminal("go", server=server)
        until(server.holding.is_set, 60)
        screen.send("y\r")  # A whole line before the question ...
        screen.expect("y")
        server.release()
        assert "a.txt" in asked(screen)
        screen.send("n\r")
        until(server.holding.is_set, 60)
        screen.expect("n")
        screen.send("y")  # ... or its beginning, and Enter behind it.
        screen.expect("y")
        server.release()
        assert "b.txt" in asked(screen)
        assert "c.txt" in answer_then(screen, server, "\r")
        assert "d.txt" in answer_then(screen, server, "y\ry\r")  # A paste.
        assert "e.txt" in answer_then(screen, server, "\x04")  # The end of input.
        screen.send("use spaces, please\r")
        assert "f.txt" in asked(screen)
        screen.send("a better name\r")
        assert "g.txt" in asked(screen)
        screen.send("yikes\r")
        assert "h.txt" in asked(screen)
        screen.send("y\r")
        to_the_end(screen)
    found = results(server.requests[-1])
    assert [text[:8] == "denied: " for text in found] == [True] * 7 + [False]
    words = ["use spaces, please", "a better name", "yikes"]
    assert [word in text for word, text in zip(words, found[4:7], strict=True)] == [True] * 3
    assert [path.name for path in workspace.glob("*.txt")] == ["h.txt"]


@pytest.mark.long
@pytest.mark.parametrize("keys", PASTES)
def test_a_paste_of_several_lines_is_no_yes(terminal, workspace, keys):
    with FlakyServer([write("a.txt"), write("b.txt"), "PONG"]) as server:
        screen = terminal("go", server=server)
        asked(screen)
        assert "b.txt" in answer_then(screen, server, keys)
        screen.send("y\r")
        to_the_end(screen)
    assert [path.name for path in workspace.glob("*.txt")] == ["b.txt"]


@pytest.mark.long
def test_a_window_closed_at_the_question_is_no(terminal, workspace):
    with FlakyServer([batch(write("a.txt"), write("b.txt")), "PONG"]) as server:
        screen = terminal("go", server=server)
        asked(screen)
        screen.hang_up()
        screen.process.wait(60)
    assert list(workspace.glob("*.txt")) == []


# -- always --------------------------------------------------------------------------------------


def typed_rule(screen, text: str) -> None:
    """Type a rule in the place of the one that is offered."""
    screen.send(f"{KILL_LINE}{text}\r")
    screen.match(re.compile(re.escape(text) + r"[^\n]*\n"), 60)


def test_always_holds_for_what_its_rule_names_and_for_this_session(
    terminal, workspace, tools_env, tmp_path
):
    commands = ["pytest", "pytest", "pytest -q x", "touch a.txt", "touch a.txt", "touch b.txt"]
    commands += ["touch c.txt", "touch c2.txt", "touch d.txt"]
    steps = [call("bash", command=command) for command in commands]
    with FlakyServer([*steps, "PONG"]) as server:
        screen = terminal("go", server=server, env=tools_env)
        shown = asked(screen)
        screen.send("a\r")
        shown += asked(screen)
        assert re.search(r"bash pytest(?! \*)", shown) and "bash pytest *" in shown
        screen.send("\r")  # Enter keeps the one with ` *`.
        assert "touch a.txt" in asked(screen)
        screen.send("a\r")
        assert "bash touch a.txt" in asked(screen)
        typed_rule(screen, "1")  # The narrowest.
        assert "touch b.txt" in asked(screen)
        screen.send("n\r")
        assert "touch c.txt" in asked(screen)
        screen.send("a\r")
        asked(screen)
        typed_rule(screen, "bash touch c*")
        assert "touch d.txt" in asked(screen)
        screen.send("n\r")
        to_the_end(screen)
    assert (workspace / "ran.txt").read_text() == "pytest \npytest \npytest -q x\n"
    made = sorted(path.name for path in workspace.glob("?*.txt"))
    assert made == ["a.txt", "c.txt", "c2.txt", "ran.txt"]
    [path] = session_files(workspace)
    assert "bash pytest *" not in path.read_text() and "touch c*" not in path.read_text()
    claim = {name: ["bash pytest *"] for name in ("approved", "approvals", "allow", "always")}
    path.write_text(json.dumps(json.loads(path.read_text()) | claim))
    with FlakyServer([call("bash", command="pytest"), "PONG"]) as server:
        screen = terminal("--resume", path.stem, "again", server=server, env=tools_env)
        assert "pytest" in asked(screen)
        screen.send("n\r")
        to_the_end(screen)
    assert prompts(server.requests[0]) == ["go", "again"]
    assert (workspace / "ran.txt").read_text() == "pytest \npytest \npytest -q x\n"


def once_more(request: dict) -> dict | str:
    """A model that touches u.txt for the prompt `again`, and says PONG to all else."""
    last = request["messages"][-1]
    if last["role"] == "user" and last["content"].endswith("again"):
        return call("bash", command="touch u.txt")
    return "PONG"


def test_no_always_for_what_runs_anything(terminal, workspace):
    python = call("bash", command="python3 -c \"open('p.txt', 'a').write('x')\"")
    steps = [python, python, call("bash", command="touch t.txt")]
    with FlakyServer([*steps, *[once_more] * 5]) as server:
        screen = terminal(server=server)
        asked(screen)
        screen.send("go\r")
        assert "python3" in asked(screen)
        assert "python3" in answer_then(screen, server, "a\r")
        screen.send("y\r")
        assert "touch t.txt" in asked(screen)
        screen.send("a\r")
        asked(screen)
        typed_rule(screen, "bash *")
        asked(screen)  # It says no, and asks for another rule or goes on without.
        screen.interrupt()
        assert "^C\r\n" in screen.prompt(60)
        screen.send("again\r")
        assert "touch u.txt" in asked(screen)
        screen.send("n\r")
        screen.expect("PONG", 60)
    assert (workspace / "p.txt").read_text() == "x"
    assert [path.name for path in workspace.glob("[tu].txt")] == []


def policy() -> Any:
    """The policy of a run in ask mode without rules."""
    return make_policy(Settings(environ={}), "ask")


def test_the_narrowest_useful_rules_are_offered() -> None:
    assert list(offered_rules(policy(), "bash", "pytest")) == ["bash pytest", "bash pytest *"]
    offered = list(offered_rules(policy(), "bash", "touch a.txt"))
    assert (offered[0], offered[-1][-2:]) == ("bash touch a.txt", " *")
    assert "write_file docs/a.md" in offered_rules(policy(), "write_file", "docs/a.md")
    assert [unfit_rule(rule) for rule in offered] == [""] * len(offered)


@pytest.mark.parametrize(
    "command",
    [
        "python3 x.py",
        "python x.py",
        "python3.11 x.py",
        "/usr/bin/python3 x.py",
        "node a.js",
        "perl a.pl",
        "ruby a.rb",
        "bash run.sh",
        "sh run.sh",
        "zsh run.sh",
        "bash -c 'touch x'",
        "env touch x",
        "timeout 5 touch x",
        "nice touch x",
        "nohup touch x",
        "xargs touch",
        "sudo touch x",
        "eval touch",
        "exec touch x",
        "touch $(id)",
    ],
)
def test_no_rule_is_offered_for_what_runs_anything(command: str) -> None:
    assert list(offered_rules(policy(), "bash", command)) == []


@pytest.mark.parametrize(
    "rule",
    [
        "bash *",
        "bash **",
        "* *",
        "* **",
        "write_file **",
        "bash python3 *",
        "bash python3 x.py",
        "bash python *",
        "bash sh *",
        "bash bash *",
        "bash /bin/sh *",
        "bash node *",
        "bash perl *",
        "bash env *",
        "bash sudo *",
        "bash xargs *",
        "bash timeout *",
        "bash nice *",
        "bash",
        "",
    ],
)
def test_a_rule_that_permits_anything_is_not_kept(rule: str) -> None:
    assert unfit_rule(rule) != ""


@pytest.mark.parametrize(
    "rule",
    [
        "bash pytest",
        "bash pytest *",
        "bash pytest -q tests/*",
        "bash touch a.txt",
        "bash git commit *",
        "bash make test",
        "write_file docs/**",
        "edit_file src/a.py",
        "fetch_url https://example.com/*",
    ],
)
def test_a_rule_that_says_what_it_permits_is_kept(rule: str) -> None:
    assert (unfit_rule(rule), parse_rule(rule).text) == ("", rule)


# -- nobody there --------------------------------------------------------------------------------


def allow_flags(stderr: str) -> list[str]:
    """The `--allow` flags that stderr names, as a shell would take them."""
    lines = [line for line in stderr.splitlines() if "--allow" in line]
    words = [shlex.split(line[line.index("--allow") :]) for line in lines]
    return [word for line in words for word in line]


ODD = [
    call("write_file", path="docs/it's a [file].txt", content="1\n"),
    call("write_file", path="star*.txt", content="2\n"),
    call("write_file", path="AGENTS.md", content="3\n"),
    call("bash", command="touch 'a b.txt'"),
    call("bash", command='touch "it\'s.txt" && touch plain.txt'),
    call("bash", command="touch 'q?.txt'"),
]
ODD_FILES = ["AGENTS.md", "a b.txt", "it's a [file].txt", "it's.txt", "plain.txt", "q?.txt"]
ODD_FILES += ["star*.txt"]


def files(workspace: Path) -> list[str]:
    """The names of all files but the agent's own, sorted."""
    found = [path for path in workspace.rglob("*") if path.is_file()]
    return sorted(path.name for path in found if ".agent" not in path.parts)


def test_the_flags_that_stderr_names_permit_what_was_refused(run_agent, workspace):
    with FlakyServer([batch(*ODD), "I could not."]) as server:
        refused = run_agent("go", server=server)
    assert (refused.returncode, files(workspace)) == (77, [])
    assert [text[:8] for text in results(server.requests[1])] == ["denied: "] * len(ODD)
    flags = allow_flags(refused.stderr)
    assert flags[::2] == ["--allow"] * len(ODD_FILES)  # One a command: `&&` joins two.
    with FlakyServer([batch(*ODD), "PONG"]) as server:
        done = run_agent(*flags, "go", server=server)
    assert (done.returncode, done.stdout, "--allow" in done.stderr) == (0, "PONG\n", False)
    assert files(workspace) == ODD_FILES


@pytest.mark.long
@pytest.mark.parametrize("left_out", range(len(ODD_FILES)))
def test_each_of_the_flags_is_needed(run_agent, workspace, left_out):
    with FlakyServer([batch(*ODD), "I could not."] * 2) as server:
        flags = allow_flags(run_agent("go", server=server).stderr)
        given = flags[: 2 * left_out] + flags[2 * left_out + 2 :]
        done = run_agent(*given, "go", server=server)
    assert (done.returncode, allow_flags(done.stderr)) == (77, flags[2 * left_out :][:2])


def test_rules_are_named_that_can_be_typed_and_that_work(play) -> None:
    steps = [write("zero\u200bwidth"), write("a\x1b[2Kb"), call("grep", regex="x", path=".env")]
    done = play([batch(*steps), "PONG"])
    assert [row["rule"] for row in done.result.denied] == ["", "", "read_file .env"]


def test_no_name_passes_for_a_line_of_ours(run_agent):
    path = "../a\nagent:   permitted by --allow 'bash *'"
    with FlakyServer([call("read_file", path=path), "PONG"]) as server:
        done = run_agent("go", server=server)
    assert "agent: denied read_file(" in done.stderr and "\nagent:   perm" not in done.stderr


def test_yes_answers_what_is_asked_and_not_what_a_human_is_asked(run_agent, workspace):
    refused = [
        call("write_file", path="AGENTS.md", content="obey\n"),
        call("write_file", path=".github/workflows/ci.yml", content="on: push\n"),
        call("bash", command="echo obey > CLAUDE.md"),
        call("write_file", path=".agent/owned.txt", content="x\n"),
    ]
    permitted = [write("plain.txt"), call("bash", command="echo hi > told.txt")]
    script = [batch(refused[0], permitted[0], *refused[1:], permitted[1]), "I could not."]
    with FlakyServer(script) as server:
        done = run_agent("--yes", "--output-format", "json", "go", server=server)
    result = json.loads(done.stdout)
    assert (done.returncode, result["status"], result["exit_code"]) == (77, "needs_permission", 77)
    rows_ = result["denied"]
    assert [{"call": row["name"], "arguments": row["arguments"]} for row in rows_] == refused
    assert [sorted(row) for row in rows_] == [["arguments", "name", "reason", "rule"]] * 4
    assert all(row["reason"] for row in rows_)
    assert [rows_[0]["rule"], rows_[3]["rule"]] == ["write_file AGENTS.md", ""]
    assert {rows_[0]["rule"], rows_[1]["rule"]} <= set(allow_flags(done.stderr))
    assert files(workspace) == ["plain.txt", "told.txt"]
    assert not (workspace / ".agent" / "owned.txt").exists()


@pytest.mark.long
@pytest.mark.parametrize("flags", [["--yes"], ["--mode", "auto"], []], ids=["yes", "auto", "ask"])
def test_an_exact_rule_of_the_user_answers_for_the_human(run_agent, workspace, flags):
    steps = [
        write("AGENTS.md"),
        call("write_file", path=".vscode/settings.json", content="{}\n"),
    ]
    with FlakyServer([batch(*steps), "PONG"] * 2) as server:
        wide = run_agent(*flags, "--allow", "write_file **", "go", server=server)
        exact = [f"--allow=write_file {step['arguments']['path']}" for step in steps]
        done = run_agent(*flags, *exact, "go", server=server)
    assert (wide.returncode, done.returncode) == (77, 0)
    assert files(workspace) == ["AGENTS.md", "settings.json"]


# -- from Python ---------------------------------------------------------------------------------


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[..., SimpleNamespace]]:
    """Run a script in this process with a function as the person; returns what came of it."""
    root = tmp_path / "root"
    root.mkdir()

    def run(script: list, ask: Any = None, *, tools: Any = (), **more: Any) -> SimpleNamespace:
        events: list[tuple[str, dict]] = []
        environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        known = {"mode": "ask", "sandbox": "off", "workspace": str(root), "environ": environ}
        with FlakyServer(script) as server:
            settings = Settings(base_url=server.url, api_key="x", model="flaky-1", **(known | more))
            agent = build_agent(
                settings, tools, emit=lambda kind, **data: events.append((kind, data)), ask=ask
            )
            try:
                result = agent.run("go")
            finally:
                agent.close()
        assert [reason for request in server.requests for reason in request.problems] == []
        texts = results(server.requests[-1])
        return SimpleNamespace(result=result, texts=texts, events=events, root=root)

    yield run


def test_nothing_but_the_word_is_a_yes(play) -> None:
    answers = [
        True,
        1,
        b"y",
        object(),
        ["y"],
        {"y": "y"},
        "",
        OSError("gone"),
        SystemExit(0),
        "y",
        " YES\n",
    ]
    waiting = iter(answers)

    def ask(question: Any) -> Any:
        answer = next(waiting)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    names = [f"{number:02}.txt" for number in range(len(answers))]
    done = play([batch(*map(write, names)), "PONG"], ask)
    assert files(done.root) == names[-2:]
    assert [text[:8] == "denied: " for text in done.texts] == [True] * 9 + [False] * 2
    said = [data["answer"] for kind, data in done.events if kind == "approval"]
    assert (said, done.result.exit_code) == (["no"] * 9 + ["yes"] * 2, 0)


def test_a_question_carries_the_command_the_reason_and_the_rules(play, tools_env) -> None:
    asked_: list[Any] = []
    command = "pytest   -q  'a  b'"
    steps = [call("bash", command=c) for c in (command, "pytest", "python3 x.py")]
    environ = tools_env | {"HOME": "/nowhere"}
    done = play([batch(*steps), "PONG"], lambda q: asked_.append(q) or "y", environ=environ)
    assert [(q.kind, q.name, bool(q.reason)) for q in asked_] == [("approve", "bash", True)] * 3
    assert command in asked_[0].text
    assert [list(q.rules) for q in asked_[1:]] == [["bash pytest", "bash pytest *"], []]
    reasons = [(d["id"], d["reason"]) for kind, d in done.events if kind == "approval"]
    assert reasons == [(q.id, q.reason) for q in asked_]
    assert (done.root / "ran.txt").read_text() == "pytest -q a  b\npytest \n"


def test_always_from_python_is_kept_for_the_run_unless_it_permits_anything(play) -> None:
    asked_: list[str] = []
    answers = {
        "touch a.txt": Always(("bash touch a*",)),
        "mkdir b": Always(("bash *",)),
        "mkdir c": "n",
    }

    def ask(question: Any) -> Any:
        asked_.append(question.text)
        return next(answer for command, answer in answers.items() if command in question.text)

    steps = [call("bash", command=c) for c in ("touch a.txt", "touch aa.txt", "mkdir b", "mkdir c")]
    done = play([batch(*steps), "PONG"], ask)
    assert len(asked_) == 3
    assert files(done.root) == ["a.txt", "aa.txt"]
    assert not (done.root / "c").exists()


def test_a_folder_swapped_while_the_person_reads_leads_nowhere(play, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()

    def ask(question: Any) -> str:
        if "first" in question.text:
            folder = tmp_path / "root" / "sub"
            folder.rename(tmp_path / "root" / "old")
            folder.symlink_to(outside)
        return "y"

    (tmp_path / "root" / "sub").mkdir()
    steps = [write("sub/first.txt"), write("second.txt")]
    done = play([batch(*steps), "PONG"], ask)
    assert (list(outside.iterdir()), done.texts[0][:5] == "wrote") == ([], False)
    assert (done.root / "second.txt").read_text() == "second.txt\n"


def test_a_tool_of_the_user_runs_with_the_arguments_that_were_shown(play) -> None:
    ran: list[str] = []

    @tool
    def deploy(place: str, command: str = "") -> str:
        """Deploy.

        place: where to
        command: what to run there
        """
        ran.append(place)
        return "done"

    asked_: list[str] = []
    steps = [call("deploy", place="here\u200b  now"), call("deploy", command="x", place="there")]
    answers = iter(["y", "n"])
    play([batch(*steps), "PONG"], lambda q: asked_.append(q.text) or next(answers), tools=[deploy])
    assert ran == ["here\u200b  now"]
    assert ["now" in asked_[0], "there" in asked_[1]] == [True, True]


def test_a_rule_asks_again_once_what_its_command_runs_was_changed(play, tools_env) -> None:
    asked_: list[Any] = []
    known = {"allow": ("bash pytest *",), "environ": tools_env | {"HOME": "/nowhere"}}
    plain = write("plain.txt")
    later = call("write_file", path="conftest.py", content="# later\n")
    runs = [call("bash", command=f"pytest {number}") for number in range(3)]
    steps = [runs[0], plain, runs[1], later, runs[2]]

    def ask(question: Any) -> str:
        asked_.append(question)
        return "n" if question.name == "bash" else "y"

    done = play([*steps, "PONG"], ask, **known)
    assert [q.name for q in asked_] == ["write_file", "write_file", "bash"]
    assert "pytest 2" in asked_[2].text and "bash pytest *" in asked_[2].reason
    assert (done.root / "ran.txt").read_text() == "pytest 0\npytest 1\n"


def network_notes(play: Callable, **more: Any) -> list[list[str]]:
    """What the questions before two commands say of the network; the second one asks for it."""
    asked_: list[Any] = []
    steps = [call("bash", command="touch a"), call("bash", command="touch b", network=True)]
    play([batch(*steps), "PONG"], lambda q: asked_.append(q) or "n", **more)
    notes = [",".join(q.notes) for q in asked_]
    return [re.findall(r"network \w+", text) for text in notes]


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it works")
def test_a_question_says_no_network_for_a_command_that_is_cut_off(play) -> None:
    assert network_notes(play, sandbox="on") == [["network no"], ["network yes"]]


def test_a_question_says_network_for_every_command_without_a_sandbox(play) -> None:
    assert network_notes(play, sandbox="off") == [["network yes"], ["network yes"]]


def test_a_question_that_only_a_person_may_answer_offers_no_rule(play) -> None:
    asked_: list[Any] = []
    steps = [call("fetch_url", url="http://example.invalid/a"), write("AGENTS.md")]
    for mode in ("ask", "auto"):
        play([batch(*steps), "PONG"], lambda q: asked_.append(q) or "n", mode=mode)
    assert [q.human for q in asked_] == [False, True, True, True]
    offered = ("fetch_url http://example.invalid/a", "fetch_url http://example.invalid/*")
    assert [q.rules for q in asked_] == [offered, (), (), ()]
