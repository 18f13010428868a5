"""What scripts rely on: JSON lines, exit codes, stdin, closed pipes, the first run.

Every run is a real process. `check_events(lines)` says what is wrong with the output of
`--output-format stream-json`, by the schema in events.schema.json; any test may use it.
"""

import argparse
import array
import errno
import fcntl
import io
import itertools
import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import (
    ESCAPES,
    KEY,
    NAP,
    ROOT,
    alive,
    prompts,
    put_session,
    session_files,
    talk,
    until,
)
from test_providers import Routes, listing

from agent import (
    NOBODY,
    PIPE_BYTES,
    JsonScreen,
    Person,
    Screen,
    Settings,
    Signals,
    UsageError,
    build_agent,
    load,
    problems,
    read_stdin,
    report_failure,
    run_once,
    show_refusal,
)
from flaky_server import FlakyServer

LONG = pytest.mark.long
SCHEMA = json.loads((Path(__file__).parent / "events.schema.json").read_text())
EVENT = jsonschema.Draft202012Validator(SCHEMA)
SURROGATE = re.compile("[\0\ud800-\udfff]")

AT_ONCE = {"Retry-After": "0"}
OLD, MISSING = "20260101-100000-aaaa", "20990101-000000-ffff"
NO_KEY = {"AGENT_API_KEY": None, "AGENT_BASE_URL": None, "AGENT_MODEL": None}
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
PROXY_WORD = "hunter2"


# -- the schema ----------------------------------------------------------------------------------


def refuse(constant: str) -> None:
    """JSON has no NaN and no Infinity."""
    raise ValueError(f"{constant} is no JSON")


def strings(value: Any) -> Iterator[str]:
    """All texts in a JSON value, names of fields too."""
    if isinstance(value, str):
        yield value
    for inner in value if isinstance(value, list) else ():
        yield from strings(inner)
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield name
        yield from strings(inner)


def event_problems(event: Any) -> list[str]:
    """What is wrong with one event."""
    found = [f"{error.json_path}: {error.message}" for error in EVENT.iter_errors(event)]
    return found + [f"no valid text: {text!r}" for text in strings(event) if SURROGATE.search(text)]


def order_problems(events: list[dict]) -> Iterator[str]:
    """What is wrong with the events as a whole: first, last, and calls with their results."""
    kinds = [event["type"] for event in events]
    if (kinds[:1], kinds[-1:]) != (["init"], ["result"]):
        yield f"it does not begin with init and end with result: {kinds}"
    if (kinds.count("init"), kinds.count("result")) != (1, 1):
        yield f"init and result do not come once each: {kinds}"
    open_calls: dict[str, str] = {}
    for event in events:
        if event["type"] == "tool_use":
            open_calls[event["id"]] = event["name"]
        if event["type"] == "tool_result" and open_calls.pop(event["id"], "") != event["name"]:
            yield f"a result without its call, or a second one: {event['id']}"


def check_events(lines: Iterable[str]) -> list[str]:
    """What is wrong with the lines of one run of stream-json; an empty list if nothing."""
    found, events = [], []
    for n, line in enumerate(lines, 1):
        try:
            events.append(json.loads(line, parse_constant=refuse))
        except ValueError as error:
            found.append(f"line {n}: {error}: {line!r}")
            continue
        found += [f"line {n}: {problem}" for problem in event_problems(events[-1])]
    return found or list(order_problems(events))


def events_of(stdout: str) -> list[dict]:
    """The events on stdout, which holds nothing else."""
    *lines, rest = stdout.split("\n")
    assert (rest, check_events(lines)) == ("", [])
    return [json.loads(line) for line in lines]


SAMPLES: dict[str, dict[str, Any]] = {
    "init": {
        "session_id": OLD,
        "model": "m",
        "base_url": "http://127.0.0.1:1/v1",
        "root": "/work",
        "mode": "ask",
        "sandbox": "off: not asked for",
        "version": "1",
    },
    "text": {"text": "a"},
    "reasoning": {"text": "a"},
    "queued": {"text": "a"},
    "tool_use": {"id": "c1", "name": "bash", "arguments": {}},
    "approval": {"id": "c1", "name": "bash", "reason": "", "answer": "yes"},
    "tool_output": {"id": "c1", "text": "a"},
    "tool_result": {
        "id": "c1",
        "name": "bash",
        "status": "ok",
        "content": "",
        "decision": "allow",
        "rule": "",
        "ms": 0,
    },
    "retry": {"attempt": 1, "of": 4, "delay": 0.5, "reason": "x", "restarts_reply": False},
    "compacted": {
        "messages_before": 9,
        "messages_after": 3,
        "tokens_before": 9,
        "tokens_after": 3,
        "archive": "",
    },
    "notice": {"level": "info", "text": "a"},
    "usage": {
        "model": "m",
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "cached_tokens": 0,
        "cost_usd": None,
        "estimated": True,
    },
    "result": {
        "status": "done",
        "exit_code": 0,
        "text": "",
        "session_id": "",
        "turns": 1,
        "usage": {},
        "ms": 1,
        "denied": [{"name": "bash", "arguments": {}, "reason": "no", "rule": ""}],
    },
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_the_schema_wants_every_field_and_its_type_and_lets_others_be(kind):
    whole = {"type": kind, "ts": 1.5} | SAMPLES[kind]
    assert event_problems(whole) == event_problems(whole | {"later": [1]}) == []
    for name in whole:
        assert event_problems({k: v for k, v in whole.items() if k != name}) != [], name
        assert event_problems(whole | {name: ["x"]}) != [], name
    assert set(SAMPLES) == set(SCHEMA["properties"]["type"]["enum"])


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        pytest.param("tool_result", {"status": "failed"}, id="a status of a result"),
        pytest.param("tool_result", {"decision": "maybe"}, id="a decision"),
        pytest.param("result", {"status": "failed"}, id="a status of the run"),
        pytest.param("result", {"exit_code": 4}, id="a code that is none"),
        pytest.param("result", {"exit_code": 1}, id="a code that is not of the status"),
        pytest.param("result", {"ms": 1.5}, id="half a millisecond"),
        pytest.param("init", {"sandbox": "off"}, id="no reason"),
        pytest.param("notice", {"level": "debug"}, id="a level"),
        pytest.param("retry", {"attempt": 0}, id="a count"),
        pytest.param("usage", {"estimated": 1}, id="a number for a truth"),
        pytest.param("text", {"text": "\ud800"}, id="a lone surrogate"),
        pytest.param("text", {"type": "banner"}, id="another type"),
    ],
)
def test_the_schema_finds_a_value_that_is_none(kind, change):
    assert event_problems({"type": kind, "ts": 1.5} | SAMPLES[kind] | change) != []


def test_the_check_finds_what_is_no_json_and_what_is_not_first_or_last():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    rows = {k: json.dumps({"type": k, "ts": 1.5} | sample) for k, sample in SAMPLES.items()}
    init, text, last = rows["init"], rows["text"], rows["result"]
    good = [init, text, rows["tool_use"], rows["tool_result"], text, last]
    assert check_events(good) == []
    bad = [[], [last], [init], [text, init, last], [init, last, text], [init, init, last]]
    bad += [[init, "a warning", last], [init, "", last], [init, '{"ts": NaN}', last]]
    bad += [[init, rows["tool_result"], last], [*good[:4], rows["tool_result"], last]]
    assert [lines for lines in bad if check_events(lines) == []] == []


def test_events_with_a_person_there_and_of_a_compaction_are_of_the_schema(tmp_path):
    heard: list[dict] = []

    def note(kind: str, **data: Any) -> None:
        heard.append({"type": kind, "ts": 1.0, **data})

    def model(request: dict) -> Any:
        return "Task: talk." if "tools" not in request else "word " * 400

    script = itertools.chain([call("write_file", path="a", content="a\n")], itertools.repeat(model))
    with FlakyServer(script) as server:
        known = Settings(base_url=server.url, model="m", workspace=str(tmp_path), sandbox="off")
        agent = build_agent(known, emit=note, ask=lambda question: "y")
        codes = [agent.run(f"prompt {n}").exit_code for n in range(6)]
        agent.compact()
        agent.close()
    kinds = {event["type"] for event in heard}
    assert (codes, {"approval", "compacted"} <= kinds) == ([0] * 6, True)
    assert [problem for event in heard for problem in event_problems(event)] == []


@pytest.mark.parametrize("code, status", [(143, "cancelled"), (1, "error")])
@pytest.mark.parametrize("only_result", [False, True])
def test_a_failure_behind_init_ends_its_session_and_nothing_comes_behind_it(
    only_result, code, status
):
    out = io.StringIO()
    screen = Screen(io.StringIO(), io.StringIO())
    events = JsonScreen(out, screen, Signals(), only_result=only_result)
    events.emit("init", **SAMPLES["init"])
    report_failure(argparse.Namespace(events=events, settings=None), "the end", code)
    for kind in ("notice", "result"):
        events.emit(kind, **SAMPLES[kind])
    told = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [row["type"] for row in told] == ["init", "result"][only_result:]
    assert {name: told[-1][name] for name in ("session_id", "status", "exit_code", "text")} == {
        "session_id": OLD,
        "status": status,
        "exit_code": code,
        "text": "the end",
    }


# -- one table of runs, in each format -----------------------------------------------------------


def call(name: str, **arguments: object) -> dict:
    """A script step in which the model calls one tool."""
    return {"call": name, "arguments": arguments}


def batch(*steps: dict, **extra: object) -> dict:
    """A script step in which the model makes several calls at once."""
    calls = [{"name": step["call"], "arguments": step["arguments"]} for step in steps]
    return {"calls": calls} | extra


def refusal(status: int, **extra: object) -> dict:
    """A script step in which the server refuses."""
    return {"status": status, "body": {"error": {"message": "the moon is in the way"}}} | extra


@dataclass(frozen=True)
class Run:
    """One way in which a run goes, and how it has to end."""

    steps: list[Any]
    code: int
    status: str
    answer: str = ""  # what stands on stdout in the format text
    args: tuple[str, ...] = ()
    env: dict[str, str | None] = field(default_factory=dict)
    config: str = ""
    kinds: str = ""  # types of events that have to be among them
    before: Callable[[Path], object] = lambda workspace: None


def long_history(workspace: Path) -> None:
    """A session that is worth a compaction."""
    talks = [message for n in range(9) for message in talk(f"{n} why? " * 99, "x " * 999)]
    put_session(workspace, OLD, talks[:1] + [m for m in talks if m["role"] != "system"])


def broken_session(workspace: Path) -> None:
    """A session file that holds no session, and no backup beside it."""
    put_session(workspace, OLD, talk("a", "b")).write_bytes(b'{"version": 1, "messa\xff')


def no_state(workspace: Path) -> None:
    """A file in the place of the folder: nothing can be kept, not even by root."""
    (workspace / ".agent").write_text("I am a file.\n")


ODD = "one\u2028two\u2029three\x85four red \u202e \U0001f44b\U0001f3fd caf\u00e9"
ODD_BYTES = r"printf 'a\000b \355\240\275 \377 \033[2J \360\237\221\213\r\n\342\200\250x\n'"
WORK = batch(
    call("write_file", path="a.txt", content="alpha\n"),
    call("edit_file", path="a.txt", old="alpha", new="beta"),
    call("bash", command="echo out; echo err >&2; exit 3"),
    call("read_file", path="missing.txt"),
    call("bash", command="touch denied.txt"),
    reasoning="hm hm",
    text="I look.",
)
HOOKS = '[hooks]\nafter_tool = ["/bin/false"]\non_stop = ["/no/such/program"]\n'
PRICE = '[prices."flaky-1"]\ninput = 1.0\ncached = 1.0\noutput = 1.0\n'
TOUCH = call("bash", command="touch made.txt")
READ = call("list_files", path=".")
USED = {"usage": {"prompt_tokens": 90, "completion_tokens": 10}}
NOT_LOCAL = {"AGENT_BASE_URL": "https://models.invalid/v1"}
RUNS = {
    "work": Run(
        [refusal(429, headers=AT_ONCE), WORK, "All is done."],
        0,
        "done",
        "All is done.\n",
        args=("--yes", "--deny", "bash touch *", "--check", "cat a.txt"),
        config=HOOKS,
        kinds="text reasoning tool_use tool_output tool_result retry notice usage",
    ),
    "nothing but words": Run(["hello"], 0, "done", "hello\n", kinds="text usage"),
    "odd text": Run(
        [
            call("bash", command=ODD_BYTES) | {"text": ODD, "reasoning": "r\ud800\0"},
            call("bash", command="echo '\ud83d' \ude00 \0"),
            {"text": f"{ODD} half \ud83d of it\0"},
        ],
        0,
        "done",
        f"{ODD} half \ufffd of it\ufffd\n",
        args=("--yes",),
        kinds="text reasoning tool_use tool_output tool_result",
    ),
    "odd names of tools": Run(
        [
            *(call(name) for name in ("bash\n; ls", "f\u00fc\u202e", "x" * 200, "\ud800", "a b")),
            call("bash", command=["ls"]),
            call("read_file", path={"\ud800": "\0"}),
            {"fault": "arguments_malformed"} | call("write_file", path="a", content="b"),
            "I give up.",
        ],
        0,
        "done",
        "I give up.\n",
        args=("--yes",),
        kinds="tool_use tool_result",
    ),
    "compaction": Run(
        [{"text": "Task: to talk."}, "done"],
        0,
        "done",
        "done\n",
        args=("--resume",),
        env={"AGENT_COMPACT_AT": "9000"},
        kinds="compacted",
        before=long_history,
    ),
    "nothing is kept": Run(["ok"], 0, "done", "ok\n", args=("--no-session",)),
    "no state folder": Run([TOUCH, "ok"], 0, "done", "ok\n", args=("--yes",), before=no_state),
    "denied": Run(
        [batch(TOUCH, READ), "I could not."],
        77,
        "needs_permission",
        "I could not.\n",
        kinds="tool_use tool_result",
    ),
    "check fails": Run(
        ["done", "done", "really done", "never"],
        3,
        "check_failed",
        "really done\n",
        args=("--check", "echo no; false", "--max-turns", "3"),
        kinds="notice",
    ),
    "turns": Run([READ, "report"], 53, "limit", "report\n", args=("--max-turns", "1")),
    "tokens": Run([READ | USED, "report"], 53, "limit", "report\n", ("--max-tokens-total", "50")),
    "money": Run(
        [READ | USED, "report"],
        53,
        "limit",
        "report\n",
        args=("--max-budget-usd", "0.00001"),
        config=PRICE,
    ),
    "time": Run(
        [call("bash", command=f"echo begun; sleep {NAP}"), "report"],
        53,
        "limit",
        "report\n",
        args=("--yes", "--timeout", "6"),
        kinds="tool_output tool_result",
    ),
    "loop": Run([READ] * 20, 1, "error", kinds="tool_result notice"),
    "empty replies": Run([{"fault": "empty_reply", "times": 2}], 1, "error", kinds="notice"),
    "content filter": Run([{"fault": "content_filter", "text": "one two three"}], 1, "error"),
    "prompt filter": Run([{"fault": "prompt_filtered"}], 1, "error"),
    "400": Run([refusal(400)], 1, "error", kinds="notice"),
    "404": Run([refusal(404)], 1, "error", kinds="notice"),
    "a web page": Run([{"fault": "html"}], 1, "error"),
    "401": Run([refusal(401)], 41, "error", kinds="notice"),
    "403": Run([refusal(403)], 41, "error", kinds="notice"),
    "429": Run([refusal(429, headers=AT_ONCE, times=9)], 75, "error", kinds="retry notice"),
    "500": Run([refusal(500, headers=AT_ONCE, times=9)], 75, "error", kinds="retry notice"),
    "broken stream": Run(
        [{"fault": "cut_text", "text": "half of this never comes", "times": 9}],
        75,
        "error",
        kinds="text retry notice",
    ),
    "refused connection": Run(
        ["never"],
        75,
        "error",
        env={"AGENT_BASE_URL": "http://127.0.0.1:9/v1"},
        kinds="retry notice",
    ),
    "no key": Run(["never"], 41, "error", env={"AGENT_API_KEY": None} | NOT_LOCAL),
    "a wrong id": Run(["never"], 1, "error", args=(f"--resume={MISSING}",)),
    "a damaged session": Run(
        ["never"], 1, "error", args=(f"--resume={OLD}",), before=broken_session
    ),
    "a flag that is none": Run(["never"], 2, "error", args=("--frobnicate",)),
    "a value that is none": Run(["never"], 2, "error", args=("--max-turns", "many")),
    "a mode that is none": Run(["never"], 2, "error", env={"AGENT_MODE": "turbo"}),
    "a tool that is none": Run(["never"], 2, "error", args=("--tools", "nosuch")),
    "no price": Run(["never"], 2, "error", args=("--max-budget-usd", "1")),
    "no workspace": Run(["never"], 2, "error", args=("-w", "no/such/folder")),
    "a config that is none": Run(["never"], 2, "error", config="modle = 1\n"),
}


def rows(quick: str) -> list[Any]:
    """Each run; those that are not named, with a comma between, belong to the long tier."""
    chosen = quick.split(", ")
    assert set(chosen) <= set(RUNS)
    return [pytest.param(n, id=n, marks=[] if n in chosen else LONG) for n in RUNS]


@pytest.fixture
def play(run_agent: Callable, workspace: Path, tmp_path: Path) -> Callable:
    """Play a run with some more flags; the session that it left is valid."""

    def run(one: Run, *flags: str, **more: Any) -> subprocess.CompletedProcess:
        one.before(workspace)
        folder = tmp_path / "config" / "agent"
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(one.config)
        env = {"XDG_CONFIG_HOME": str(folder.parent)} | one.env
        with FlakyServer(one.steps) as server:
            done = run_agent(*flags, *one.args, "hi", server=server, env=env, **more)
        if one.before is not broken_session:
            sound(workspace)
        return done

    return run


def sound(workspace: Path) -> list[dict]:
    """The messages of the one session that is there, which are valid; none if there is none."""
    found = [json.loads(path.read_text())["messages"] for path in session_files(workspace)]
    assert len(found) <= 1 and [p for messages in found for p in problems(messages)] == []
    return found[0] if found else []


STREAM = (
    "work, odd names of tools, compaction, denied, check fails, tokens, loop, 401, 429, "
    "a wrong id, a flag that is none"
)


@pytest.mark.parametrize("name", rows(STREAM))
def test_every_line_of_stream_json_is_an_event_of_the_schema(play, name):
    one = RUNS[name]
    done = play(one, "--json")
    events = events_of(done.stdout)
    last, kinds = events[-1], {event["type"] for event in events}
    assert (done.returncode, last["exit_code"], last["status"]) == (one.code, one.code, one.status)
    assert set(one.kinds.split()) - kinds == set()
    assert one.answer in ("", last["text"] + "\n")
    assert done.stderr.strip() != "" or one.code == 0


# One run for each code, and those of which the object tells more.
OBJECTS = (
    "work, odd text, denied, check fails, turns, loop, 401, 429, no key, a damaged session, "
    "a value that is none, no workspace"
)


@pytest.mark.parametrize(
    "name", [row for row in rows("denied, a value that is none") if row.id in OBJECTS.split(", ")]
)
def test_json_prints_the_result_alone(play, name):
    one = RUNS[name]
    done = play(one, "--output-format", "json")
    [line, rest] = done.stdout.split("\n")
    result = json.loads(line)
    assert (rest, event_problems(result), result["type"]) == ("", [], "result")
    assert (done.returncode, result["exit_code"], result["status"]) == (
        one.code,
        one.code,
        one.status,
    )
    assert len(result["denied"]) == (1 if name in ("work", "denied") else 0)


def way_back(workspace: Path) -> str:
    """The command that resumes the one session of the workspace."""
    [path] = session_files(workspace)
    return f"agent --resume {path.stem}"


WAITS = ("refused connection", "broken stream")  # a quarter of a minute each, as with --json


@pytest.mark.parametrize(
    "name",
    [row for row in rows("work, loop, a flag that is none, 429, turns") if row.id not in WAITS],
)
def test_text_prints_the_answer_alone_and_behind_1_53_75_and_77_the_way_back(play, workspace, name):
    one = RUNS[name]
    done = play(one)
    assert (done.returncode, done.stdout) == (one.code, one.answer)
    started = one.before is not broken_session and f"--resume={MISSING}" not in one.args
    if one.code in (1, 53, 75, 77) and started:
        assert done.stderr.strip().splitlines()[-1].endswith(way_back(workspace))
    if one.code == 0 and one.before is not no_state:
        assert "agent --resume" not in done.stderr


PLACES = {
    "a stream": {"text": "one two three four", "hold_after": 2},
    "a call": call("bash", command="ls -l a b c d e") | {"hold_after": 1},
    "a command": call("bash", command=f"echo begun; sleep {NAP} & sleep {NAP}"),
}


@pytest.mark.parametrize(
    ("number", "place"),
    [
        pytest.param(number, place, marks=[] if (number, place) in quick else LONG)
        for quick in [
            {
                (signal.SIGINT, "a stream"),
                (signal.SIGTERM, "a command"),
                (signal.SIGHUP, "a stream"),
            }
        ]
        for number in CODES
        for place in PLACES
    ],
)
@pytest.mark.parametrize("flags", [["--json"], []], ids=["stream-json", "text"])
def test_a_signal_is_the_strongest_code_and_the_lines_end_with_the_result(
    start_agent, workspace, number, place, flags
):
    with FlakyServer([PLACES[place]]) as server:
        agent = start_agent(*flags, "--yes", "go", server=server)
        until(lambda: server.holding.is_set() or len(alive(f"sleep\0{NAP}")) > 1)
        agent.send_signal(number)
        out, err = agent.communicate(timeout=60)
    last = events_of(out)[-1] if flags else {"status": "cancelled"}
    assert (agent.returncode, last["status"]) == (CODES[number], "cancelled")
    assert ("Traceback" in err, out if not flags else "") == (False, "")
    until(lambda: not alive(NAP))
    assert sound(workspace) != []


# -- which code when two apply -------------------------------------------------------------------

PASS, FAIL = {"check": "true"}, {"check": "false"}
AGAIN = refusal(503, headers=AT_ONCE, times=9)
EMPTY = {"fault": "empty_reply", "times": 2}
PAIRS = {
    "denied, and the model is done": ([TOUCH, "ok"], {}, 77),
    "denied, then a budget": ([TOUCH, "report"], {"max_turns": 1}, 53),
    "denied, then tokens": ([TOUCH | USED, "report"], {"max_tokens_total": 50}, 53),
    "denied, then 401": ([TOUCH, refusal(401)], {}, 41),
    "denied, then 403": ([TOUCH, refusal(403)], {}, 41),
    "denied, then overload": ([TOUCH, AGAIN], {}, 75),
    "denied, then 404": ([TOUCH, refusal(404)], {}, 1),
    "denied, then a loop": ([TOUCH, *[READ] * 20], {}, 1),
    "denied, then empty": ([TOUCH, EMPTY], {}, 1),
    "denied, then a filter": ([TOUCH, {"fault": "content_filter", "text": "a b c"}], {}, 1),
    "denied, a check passes": ([TOUCH, "ok"], PASS, 0),
    "denied, a check fails": ([TOUCH, *["ok"] * 9], FAIL | {"max_turns": 3}, 3),
    "a budget, a check passes": ([READ, "report"], PASS | {"max_turns": 1}, 0),
    "a budget, a check fails": ([READ, "report"], FAIL | {"max_turns": 1}, 3),
    "tokens, a check passes": ([READ | USED, "report"], PASS | {"max_tokens_total": 50}, 0),
    "tokens, a check fails": ([READ | USED, "report"], FAIL | {"max_tokens_total": 50}, 3),
    "denied, a budget, a check passes": ([TOUCH, "report"], PASS | {"max_turns": 1}, 0),
    "denied, a budget, a check fails": ([TOUCH, "report"], FAIL | {"max_turns": 1}, 3),
    "a loop, a check passes": ([READ] * 20, PASS, 0),
    "a loop, a check fails": ([READ] * 20, FAIL, 3),
    "empty, a check passes": ([EMPTY], PASS, 0),
    "empty, a check fails": ([EMPTY], FAIL, 3),
    "401 and a check": ([refusal(401)], PASS, 41),
    "overload and a check": ([AGAIN], PASS, 75),
    "404 and a check": ([refusal(404)], PASS, 1),
    "a check fails, then 401": (["ok", refusal(401)], FAIL, 41),
    "a check fails, then overload": (["ok", AGAIN], FAIL, 75),
    "a check fails, then 404": (["ok", refusal(404)], FAIL, 1),
    "overload at the report": ([READ, AGAIN], {"max_turns": 1}, 75),
    "401 at the report": ([READ, refusal(401)], {"max_turns": 1}, 41),
    "a loop, then a budget": ([READ] * 20, {"max_turns": 3}, 53),
}
PAIR_ROWS = [pytest.param(*row, id=name) for name, row in PAIRS.items()]


@pytest.mark.parametrize(("steps", "budget", "code"), PAIR_ROWS)
def test_of_two_codes_the_stronger_one_counts(tmp_path, steps, budget, code):
    heard: list[dict] = []
    with FlakyServer(steps) as server:
        known = Settings(base_url=server.url, model="m", workspace=str(tmp_path), **budget)
        agent = build_agent(known, emit=lambda kind, **data: heard.append({"type": kind, **data}))
        result = agent.run("go")
        agent.close()
    assert (result.exit_code, heard[-1]["type"]) == (code, "result")
    assert event_problems({"ts": 1.0} | heard[-1]) == []
    assert [p for request in server.requests for p in request.problems] == []


@LONG
@pytest.mark.parametrize(("steps", "budget", "code"), PAIR_ROWS[::3])
def test_of_two_codes_the_stronger_one_is_that_of_the_process(run_agent, steps, budget, code):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in budget.items()]
    with FlakyServer(steps) as server:
        done = run_agent("--json", *flags, "go", server=server)
    last = events_of(done.stdout)[-1]
    assert (done.returncode, last["exit_code"]) == (code, code)
    assert len(last["denied"]) == steps.count(TOUCH) + steps.count(TOUCH | USED)


HELD = {"text": "one two three", "hold_after": 1}
AFTER_WHAT = {
    "a denial": ([TOUCH, HELD], []),
    "the end of a budget": ([READ, HELD], ["--max-turns", "1"]),
    "a check that failed": (["ok", HELD], ["--check", "false"]),
    "a retry": ([refusal(503, headers=AT_ONCE), HELD], []),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "a denial" else LONG) for n in AFTER_WHAT],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=LONG)])
def test_a_signal_is_stronger_than_all_that_was_before_it(start_agent, name, number):
    steps, flags = AFTER_WHAT[name]
    with FlakyServer(steps) as server:
        agent = start_agent("--json", *flags, "go", server=server)
        until(server.holding.is_set)
        agent.send_signal(number)
        out, _ = agent.communicate(timeout=60)
    last = events_of(out)[-1]
    assert (agent.returncode, last["status"]) == (CODES[number], "cancelled")
    assert len(last["denied"]) == steps.count(TOUCH)


@pytest.mark.parametrize(
    ("args", "env", "code"),
    [
        pytest.param(["--frobnicate", "hi"], NO_KEY, 2, id="a wrong flag and no key"),
        pytest.param(["--mode", "x", f"--resume={MISSING}", "hi"], {}, 2, id="and no session"),
        pytest.param(["--fork", "hi"], NO_KEY, 2, id="a fork of nothing and no key"),
        pytest.param([], NO_KEY, 2, id="no prompt and no key"),
        pytest.param(["-w", "no/such", "hi"], NO_KEY, 2, id="no workspace and no key"),
        pytest.param([f"--resume={MISSING}", "hi"], NO_KEY, 41, id="no key and no session"),
    ],
)
@LONG
def test_usage_is_stronger_than_a_missing_key_and_that_than_the_rest(run_agent, args, env, code):
    done = run_agent(*args, env=env)
    assert (done.returncode, done.stdout) == (code, "")


class Full(io.StringIO):
    """A file on a disk that has no room."""

    def write(self, text: str) -> int:
        """Nothing can be written."""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def once(
    folder: Path, step: Any, out: Any, words: list[str], piped: str = "", *, err: Any = None
) -> tuple[int, str]:
    """A one-shot run in this process: its code, and what the model got."""
    with FlakyServer([step, "ok"]) as server:
        known = Settings(base_url=server.url, model="m", workspace=str(folder), sandbox="off")
        agent = build_agent(known)
        flags = argparse.Namespace(prompt=words, print=True, output_format="text")
        person = Person(Screen(out, err or io.StringIO()), io.StringIO())
        code = run_once(agent, "\n\n".join([*words, piped]).strip(), person, flags)
        agent.close()
    return code, prompts(server.requests[0])[0]


def test_only_the_words_of_a_one_shot_prompt_name_files(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"what stands in {name}\n")
    code, prompt = once(tmp_path, "ok", io.StringIO(), ["see", "@a.txt"], "and @b.txt")
    assert (code, re.findall(r"\[file: (.*)\]", prompt)) == (0, ["a.txt"])
    assert once(tmp_path, "ok", io.StringIO(), [], "see @b.txt") == (0, "see @b.txt")


def test_the_way_back_names_the_workspace_where_it_is_not_here(tmp_path):
    err, folder = io.StringIO(), tmp_path / "a b"
    folder.mkdir()
    assert once(folder, TOUCH, io.StringIO(), ["go"], err=err)[0] == 77
    (path,) = session_files(folder)
    back = f"agent: to go on: agent --workspace '{folder}' --resume {path.stem}"
    assert err.getvalue().splitlines()[-1] == back


@pytest.mark.parametrize("step, code", [("ok", 1), (TOUCH, 77), (refusal(401), 41)])
def test_an_answer_that_can_not_be_written_is_a_1_where_nothing_else_is(tmp_path, step, code):
    assert once(tmp_path, step, Full(), ["go"])[0] == code


# -- 77: each refused call with the rule that permits it -----------------------------------------

REFUSED = {
    "a command": (call("bash", command="touch new.txt"), "new.txt"),
    "a compound command": (call("bash", command="touch 'b c.txt' && mkdir -p d"), "b c.txt"),
    "quotes": (call("bash", command="""touch "it's.md" 'q"q.md'"""), 'q"q.md'),
    "a backslash": (call("bash", command="touch 'b\\c.txt'"), "b\\c.txt"),
    "a dollar": (call("bash", command="touch '$HOME `x`.txt'"), "$HOME `x`.txt"),
    "a wildcard": (call("bash", command="touch 'star*.txt'"), "star*.txt"),
    "two lines": (call("bash", command="touch l1.txt\ntouch l2.txt"), "l2.txt"),
    "a new file": (call("write_file", path="sub/w.txt", content="w\n"), "sub/w.txt"),
    "a name with brackets": (call("write_file", path="[a]/x y.txt", content="w\n"), "[a]/x y.txt"),
    "a name with a quote": (call("write_file", path="it's.txt", content="w\n"), "it's.txt"),
    "an upper case name": (call("write_file", path="README.TXT", content="w\n"), "README.TXT"),
    "a name with a dash": (call("write_file", path="-n.txt", content="w\n"), "-n.txt"),
    "AGENTS.md": (call("write_file", path="AGENTS.md", content="be brief\n"), "AGENTS.md"),
}


def named_rules(stderr: str) -> list[str]:
    """The --allow flags that stderr names, as words for a command line."""
    lines = [line[line.index("--allow ") :] for line in stderr.splitlines() if "--allow " in line]
    words = [word for line in lines for word in shlex.split(line)]
    pairs = [words[n : n + 2] for n, word in enumerate(words) if word == "--allow"]
    return [word for pair in pairs if " " in pair[-1] for word in pair]  # a rule: "tool pattern"


@pytest.mark.parametrize(
    ("reason", "rule", "more"),
    [
        pytest.param("no\nagent: all is well", "", [], id="lines of its own"),
        pytest.param(
            NOBODY,
            "bash touch a\nbash touch 'b c'",
            ["permitted by --allow 'bash touch a' --allow 'bash touch '\"'\"'b c'\"'\"''"],
            id="two rules",
        ),
        pytest.param(NOBODY, "", ["no --allow rule can permit it without --network"], id="none"),
    ],
)
def test_a_refusal_is_a_line_and_what_permits_it(reason, rule, more):
    err, arguments = io.StringIO(), {"command": "x", "network": True}
    row = {"name": "bash", "arguments": arguments, "reason": reason, "rule": rule}
    show_refusal(row, Screen(io.StringIO(), err))
    shown = reason.replace("\n", "\\n")
    first = f"agent: denied bash(x, network=true): {shown}"
    assert err.getvalue().splitlines() == [first, *(f"agent:   {line}" for line in more)]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(list(REFUSED), id="all in one reply"),
        *(pytest.param([name], id=name, marks=LONG) for name in REFUSED),
    ],
)
def test_each_refused_call_is_named_with_the_rule_that_really_permits_it(
    run_agent, workspace, names
):
    steps = [batch(*(REFUSED[name][0] for name in names)), "I could not."]
    with FlakyServer(steps) as server:
        denied = run_agent("go", server=server)
    made = [workspace / REFUSED[name][1] for name in names]
    assert (denied.returncode, denied.stdout) == (77, "I could not.\n")
    assert [path for path in made if path.exists()] == []
    assert denied.stderr.strip().splitlines()[-1].endswith(way_back(workspace))
    flags = named_rules(denied.stderr)
    with FlakyServer(steps) as server:
        done = run_agent(*flags, "go", server=server)
    assert (done.returncode, "--allow" in done.stderr) == (0, False)
    assert [path for path in made if not path.exists()] == []


@LONG
@pytest.mark.parametrize("command", ["echo a > made.txt", "touch $(echo made.txt)"])
def test_a_call_is_named_with_a_rule_that_permits_it_or_with_that_there_is_none(
    run_agent, workspace, command
):
    steps = [call("bash", command=command), "no"]
    with FlakyServer(steps) as server:
        denied = run_agent("go", server=server)
    flags = named_rules(denied.stderr)
    assert (denied.returncode, flags != [] or "no --allow rule" in denied.stderr) == (77, True)
    with FlakyServer(steps) as server:
        done = run_agent(*flags, "go", server=server)
    permitted = bool(flags)
    assert (done.returncode, (workspace / "made.txt").exists()) == (
        0 if permitted else 77,
        permitted,
    )


@LONG
def test_the_rule_of_one_call_permits_no_other(run_agent, workspace):
    with FlakyServer([REFUSED["a command"][0], "no"]) as server:
        flags = named_rules(run_agent("go", server=server).stderr)
    with FlakyServer([batch(REFUSED["a command"][0], REFUSED["a wildcard"][0]), "no"]) as server:
        done = run_agent(*flags, "go", server=server)
    there = [(workspace / REFUSED[name][1]).exists() for name in ("a command", "a wildcard")]
    assert (done.returncode, there) == (77, [True, False])
    assert (len(named_rules(done.stderr)), len(flags)) == (2, 2)


@LONG
def test_a_call_that_was_refused_often_is_named_once_and_several_are_named_each(run_agent):
    steps = [batch(TOUCH, call("bash", command="touch b")), TOUCH, "no"]
    with FlakyServer(steps) as server:
        done = run_agent("go", server=server)
    rules = named_rules(done.stderr)[1::2]
    assert (done.returncode, len(rules), len(set(rules))) == (77, 2, 2)


# -- stdin ---------------------------------------------------------------------------------------


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe for stdin whose reading end stays open here: what was not read yet can be counted."""
    reader, writer = os.pipe()
    ends = [reader, writer]
    yield reader, writer
    for end in ends:
        try:
            os.close(end)
        except OSError:  # The test closed it.
            continue


def waiting(descriptor: int) -> int:
    """How many bytes wait in a pipe or terminal."""
    count = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0]


@pytest.mark.parametrize(
    ("words", "prompt"),
    [
        pytest.param(["-"], "early late", id="a dash"),
        pytest.param([], "early late", id="no prompt", marks=LONG),
    ],
)
def test_what_comes_in_pieces_is_read_to_its_end(start_agent, pipe, words, prompt):
    reader, writer = pipe
    with FlakyServer(["ok"]) as server:
        agent = start_agent(*words, server=server, stdin=reader)
        os.write(writer, b"early ")
        until(lambda: waiting(reader) == 0)  # It was read, and more is waited for.
        assert server.requests == []
        os.write(writer, b"late")
        os.close(writer)
        out, _ = agent.communicate(timeout=60)
    assert (agent.returncode, out, prompts(server.requests[0])) == (0, "ok\n", [prompt])


@LONG
@pytest.mark.parametrize("words", [["hi"], ["-p", "hi"]], ids=["text", "print"])
def test_the_request_is_sent_while_a_silent_pipe_is_still_open(start_agent, pipe, words):
    reader, _ = pipe
    with FlakyServer([{"text": "ok", "hold": "before"}]) as server:
        agent = start_agent(*words, server=server, stdin=reader)
        until(server.holding.is_set)
        assert agent.poll() is None
        server.release()
        assert agent.wait(60) == 0
    assert prompts(server.requests[0]) == ["hi"]


def test_a_loop_with_while_read_runs_once_for_each_line(start_agent, workspace):
    (workspace / "list").write_text("first\nsecond one\nthird\n")
    loop = 'while read -r x; do "$@" "$x" || exit 9; done < list'
    with FlakyServer(["ok"] * 3) as server:
        agent = start_agent("--no-session", server=server, under=["/bin/sh", "-c", loop, "sh"])
        out, _ = agent.communicate(timeout=60)
    asked = [prompts(request)[0] for request in server.requests]
    assert (agent.returncode, out) == (0, "ok\n" * 3)
    assert asked == ["first", "second one", "third"]


@pytest.mark.parametrize(
    ("words", "redirection", "code"),
    [
        pytest.param(["hi"], "<&-", 0, id="closed"),
        pytest.param([], "<&-", 2, id="closed, no prompt", marks=LONG),
        pytest.param(["-"], "<&-", 2, id="closed, a dash", marks=LONG),
        pytest.param([], "</dev/null", 2, id="nothing, no prompt"),
        pytest.param(["-p"], "</dev/null", 2, id="nothing, print", marks=LONG),
        pytest.param(["-"], "</dev/null", 2, id="nothing, a dash", marks=LONG),
        pytest.param([""], "</dev/null", 2, id="an empty prompt", marks=LONG),
        pytest.param([" \n"], "</dev/null", 2, id="a blank prompt", marks=LONG),
        pytest.param([], "<blank", 2, id="a blank file", marks=LONG),
        pytest.param(["hi"], "<blank", 0, id="a prompt and a blank file", marks=LONG),
    ],
)
def test_without_anything_to_read_a_prompt_is_enough_and_no_prompt_is_a_2(
    start_agent, workspace, words, redirection, code
):
    (workspace / "blank").write_text(" \n\t\n")
    under = ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh"]
    with FlakyServer(["ok"]) as server:
        agent = start_agent(*words, server=server, under=under)
        out, err = agent.communicate(timeout=60)
    sent = [prompts(request) for request in server.requests]
    assert (agent.returncode, out, sent) == ((2, "", []) if code else (0, "ok\n", [["hi"]]))
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("size", "at", "whole", "found"),
    [
        pytest.param(5, 0, False, (5, ""), id="a file"),
        pytest.param(5, 1, False, (0, ""), id="a file in use"),
        pytest.param(5, 1, True, (4, ""), id="the rest of it"),
        pytest.param(PIPE_BYTES, 0, False, (PIPE_BYTES, ""), id="large"),
        pytest.param(PIPE_BYTES + 1, 0, False, (PIPE_BYTES, "it holds more than that"), id="more"),
    ],
)
def test_a_file_at_stdin_is_read_as_far_as_it_belongs_to_the_prompt(
    tmp_path, size, at, whole, found
):
    (tmp_path / "in").touch()
    os.truncate(tmp_path / "in", size)
    with open(tmp_path / "in", "rb") as stdin:
        stdin.seek(at)
        data, cut = read_stdin(stdin, whole=whole)
    assert (len(data), cut) == found


def test_a_stdin_that_can_not_be_read_is_a_usage_error_where_it_is_the_prompt(tmp_path):
    with open(tmp_path / "in", "wb") as stdin:
        assert read_stdin(stdin, whole=False) == (b"", "")
        with pytest.raises(UsageError, match="stdin can not be read"):
            read_stdin(stdin, whole=True)


@LONG
@pytest.mark.parametrize("words", [["explain"], ["-"], []], ids=["prompt", "dash", "nothing"])
def test_piped_bytes_of_every_value_become_valid_text(start_agent, words):
    raw = b"head " + bytes(range(256)) + b"\xed\xa0\xbd tail"
    with FlakyServer(["ok"]) as server:
        pipes = {"stdin": subprocess.PIPE, "encoding": None, "errors": None}
        agent = start_agent(*words, server=server, **pipes)
        out, _ = agent.communicate(raw, 60)
    [prompt] = prompts(server.requests[0])
    assert (agent.returncode, out, server.requests[0].problems) == (0, b"ok\n", [])
    assert (
        prompt.startswith(" ".join([*words, "head "]) if words == ["-"] else "") or "head" in prompt
    )
    assert prompt.rstrip().endswith("tail") and "abcdefghijklmnopqrstuvwxyz" in prompt


@LONG
def test_a_pipe_of_many_megabytes_is_whole_or_said_to_be_cut(run_agent):
    with FlakyServer(["ok"] * 9) as server:
        done = run_agent("sum", server=server, input="0123456789abcde\n" * 700_000 + "THE END")
    whole = any(b"THE END" in request.raw for request in server.requests)
    assert whole or re.search(
        r"cut|truncat|too (long|large)|window|first .* (bytes|char)", done.stderr
    )


# -- stdout and stderr that are closed, full or left ---------------------------------------------


@pytest.mark.parametrize(
    ("flags", "redirection", "code"),
    [
        pytest.param([], ">&-", (0, 1), id="text, no stdout"),
        pytest.param(["--json"], ">&-", (0, 1), id="stream-json, no stdout", marks=LONG),
        pytest.param([], "2>&-", (0,), id="text, no stderr", marks=LONG),
        pytest.param(["--json"], "2>&-", (0,), id="stream-json, no stderr", marks=LONG),
        pytest.param([], "<&- >&- 2>&-", (0, 1), id="text, nothing"),
        pytest.param(["--json"], "<&- >&- 2>&-", (0, 1), id="stream-json, nothing", marks=LONG),
        pytest.param([], ">/dev/full", (1,), id="text, full", marks=LONG),
        pytest.param(["--json"], "2>/dev/full", (0,), id="stream-json, full stderr", marks=LONG),
        pytest.param([], ">/dev/full 2>/dev/full", (1,), id="text, both full", marks=LONG),
        pytest.param([], ">list 2>&1", (0,), id="one file", marks=LONG),
    ],
)
def test_without_an_open_stream_the_work_is_done_and_the_session_is_saved(
    start_agent, workspace, flags, redirection, code
):
    under = ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh"]
    steps = [call("write_file", path="a.txt", content="alpha\n"), call("bash", command="echo out")]
    with FlakyServer([*steps, "ok"]) as server:
        agent = start_agent(*flags, "--yes", "go", server=server, under=under)
        out, err = agent.communicate(timeout=60)
    assert agent.returncode in code and len(server.requests) == 3
    assert "Traceback" not in out + err
    assert (workspace / "a.txt").read_bytes() == b"alpha\n"
    assert sound(workspace)[-1]["content"] == "ok"
    if redirection.startswith("2>"):  # Only stdout is left to be read.
        assert (events_of(out)[-1]["text"] if flags else out.strip()) == "ok"


@pytest.mark.parametrize("flags", [["--json", "hi"], ["--output-format", "json", "--wrong"]])
def test_a_folder_that_was_removed_under_the_agent_is_a_2_in_json_too(run_agent, flags):
    gone = 'mkdir gone; cd gone; rmdir "$PWD"; exec "$@"'
    done = run_agent(*flags, under=["/bin/sh", "-c", gone, "sh"])
    last = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, last["exit_code"], event_problems(last)) == (2, 2, [])


@pytest.mark.parametrize(
    ("env", "word", "code"),
    [
        pytest.param({"PYTHONPATH": f"stubs:{ROOT}"}, "pip install requests", 1, id="no requests"),
        pytest.param({"PYTHONOPTIMIZE": "2"}, "PYTHONOPTIMIZE", 2, id="no docstrings"),
    ],
)
def test_a_python_that_lacks_something_is_one_line_that_names_it(
    run_agent, workspace, env, word, code
):
    (workspace / "stubs").mkdir()
    stub = 'raise ModuleNotFoundError("No module named requests", name="requests")\n'
    (workspace / "stubs" / "requests.py").write_text(stub)
    done = run_agent("hi", env=env | {"AGENT_BASE_URL": "http://127.0.0.1:9/v1"})
    assert (done.returncode, done.stdout, word in only(done.stderr.splitlines())) == (
        code,
        "",
        True,
    )


def test_help_for_a_reader_that_left_is_no_complaint(start_agent):
    reader, writer = os.pipe()
    os.close(reader)
    agent = start_agent("--help", stdout=writer)
    os.close(writer)
    assert (agent.communicate(timeout=60)[1], agent.returncode) == ("", 0)


LATE = """
import os, sys
from agent import main

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        for number in (1, 2, 15):
            kill(pid, number)

late = Late()
sys.exit(main(["--sessions"]))
"""


def test_a_signal_while_python_is_on_its_way_out_does_not_change_the_code(tmp_path):
    """Python itself puts the default actions back before its modules go."""
    known = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    run = [sys.executable, "-c", LATE]
    assert subprocess.run(run, cwd=tmp_path, env=known, capture_output=True).returncode == 0


@LONG
@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize("name", ["denied", "turns", "401", "404"])
def test_a_stderr_that_takes_nothing_changes_neither_code_nor_answer(play, name, redirection):
    one = RUNS[name]
    done = play(one, under=["/bin/sh", "-c", f'exec "$@" {redirection}', "sh"])
    assert (done.returncode, done.stdout, done.stderr) == (one.code, one.answer, "")


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "stream-json"])
@pytest.mark.parametrize("when", ["before", pytest.param("in mid-stream", marks=LONG)])
def test_a_reader_that_left_costs_neither_the_session_nor_a_traceback(
    start_agent, workspace, flags, when
):
    held = {"hold": "before"} if when == "before" else {"hold_after": 3}
    with FlakyServer([{"text": "word " * 2_000} | held]) as server:
        agent = start_agent(*flags, "hi", server=server)
        until(server.holding.is_set)
        agent.stdout.close()
        server.release()
        err = agent.stderr.read()
        agent.wait(60)
    assert ("Traceback" in err, "Exception ignored" in err) == (False, False)
    assert agent.returncode in (0, 1, 141)
    assert [message["role"] for message in sound(workspace)][:2] == ["system", "user"]


# -- prompts that look like flags ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "prompt"),
    [
        pytest.param(["- a"], "- a", id="a bullet"),
        pytest.param(["-\ta"], "-\ta", id="a tab"),
        pytest.param(["-\n"], "-\n", id="a dash and a line end"),
        pytest.param(["-1 + 2"], "-1 + 2", id="a number"),
        pytest.param(["--help me please"], "--help me please", id="help"),
        pytest.param(["-h is what?"], "-h is what?", id="short help"),
        pytest.param(["--version of python?"], "--version of python?", id="version"),
        pytest.param(["-m is a flag"], "-m is a flag", id="a flag with a value"),
        pytest.param(["-p what does it do"], "-p what does it do", id="a flag without one"),
        pytest.param(["--resume what?"], "--resume what?", id="resume"),
        pytest.param(["-- x"], "-- x", id="two dashes and a space"),
        pytest.param(["---\na: b\n---\nfix"], "---\na: b\n---\nfix", id="front matter"),
        pytest.param(["--- a/x\n+++ b/x"], "--- a/x\n+++ b/x", id="a diff"),
        pytest.param(["-e one", "-f two"], "-e one -f two", id="two of them"),
        pytest.param(["--yes", "- a"], "- a", id="behind a flag"),
        pytest.param(["- a", "--yes"], "- a", id="before a flag"),
        pytest.param(["--", "-"], None, id="a dash behind two"),
        pytest.param(["--", "--help"], "--help", id="help behind two"),
        pytest.param(["--", "-x", "--", "y"], "-x -- y", id="two dashes twice"),
        pytest.param(["fix", "-", "now"], "fix - now", id="a dash between words"),
        pytest.param(["\u2014yes"], "\u2014yes", id="another dash"),
        pytest.param(["\u2212x"], "\u2212x", id="a minus"),
    ],
)
def test_a_word_with_a_space_is_a_prompt_whatever_it_begins_with(tmp_path, words, prompt):
    settings, flags = load(words, {"HOME": str(tmp_path), "OPENAI_API_KEY": "x"})
    said = " ".join(flags.prompt)
    assert prompt is None or said == prompt
    assert (settings.mode, flags.print, flags.resume) == (
        "auto" if "--yes" in words else "ask",
        False,
        None,
    )


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--append-system-prompt", "- be brief"], id="a word of its own"),
        pytest.param(["--append-system-prompt=- be brief"], id="in the same word"),
    ],
)
def test_the_value_of_a_flag_may_look_like_a_prompt(tmp_path, words):
    settings, flags = load([*words, "hi"], {"HOME": str(tmp_path), "OPENAI_API_KEY": "x"})
    assert (flags.prompt, "- be brief" in vars(settings).values()) == (["hi"], True)


@pytest.mark.parametrize(
    "word",
    [
        "---",
        pytest.param("-xyz", marks=LONG),
        pytest.param("--prin", marks=LONG),
        pytest.param("--j", marks=LONG),
        pytest.param("--Yes", marks=LONG),
    ],
)
def test_a_flag_that_is_none_is_a_2_and_named(run_agent, word):
    with FlakyServer(["never"]) as server:
        done = run_agent(word, "hi", server=server)
    assert (done.returncode, done.stdout, server.requests) == (2, "", [])
    assert word.split("=")[0] in done.stderr


# -- --print and progress ------------------------------------------------------------------------

LOOK = call("read_file", path="a.txt") | {"text": "Let me look.", "reasoning": "hm"}


def drained(master: int) -> str:
    """All that was written to a terminal whose other end is closed."""
    pieces = []
    try:
        while piece := os.read(master, 65536):
            pieces.append(piece)
    except OSError:  # Linux tells the end of a terminal in this way.
        pass
    return b"".join(pieces).decode()


@pytest.mark.parametrize("ui", [False, pytest.param(True, marks=LONG)], ids=["plain", "ui"])
def test_print_puts_only_the_answer_on_stdout_also_where_that_is_a_terminal(
    start_agent, workspace, ui
):
    (workspace / "a.txt").write_text("alpha\n")
    master, slave = pty.openpty()
    env = {"PYTHONPATH": str(ROOT)} if ui else {}
    with FlakyServer([LOOK, "It says alpha."]) as server:
        agent = start_agent("-p", "what?", server=server, stdout=slave, env=env)
        os.close(slave)
        shown = drained(master)
        err = agent.stderr.read()
        agent.wait(60)
    os.close(master)
    assert (agent.returncode, ESCAPES.sub("", shown)) == (0, "It says alpha.\r\n")
    assert "a.txt" in err and "\x1b" not in err


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["-p"], id="text"),
        pytest.param(["--output-format", "json"], id="json"),
        pytest.param(["--json"], id="stream-json", marks=LONG),
    ],
)
def test_progress_is_on_stderr_in_every_format(run_agent, workspace, flags):
    (workspace / "a.txt").write_text("alpha\n")
    steps = [refusal(429, headers=AT_ONCE), LOOK, "It says alpha."]
    with FlakyServer(steps) as server:
        done = run_agent(*flags, "what?", server=server)
    lines = [line for line in done.stderr.splitlines() if "read_file" in line and "a.txt" in line]
    assert (done.returncode, bool(lines)) == (0, True)
    assert "the moon is in the way" in done.stderr and "\x1b" not in done.stdout + done.stderr
    assert flags != ["-p"] or done.stdout == "It says alpha.\n"
    assert flags != ["--json"] or events_of(done.stdout)[-1]["text"] == "It says alpha."


# -- it never waits for a person -----------------------------------------------------------------

QUESTIONS = batch(
    call("ask_user", question="Which one?"),
    call("note", text="be brief"),
    call("write_file", path="AGENTS.md", content="be brief\n"),
    call("bash", command="touch made.txt; read -r x; cat"),
    call("bash", command="curl http://127.0.0.1:9/", network=True),
    call("fetch_url", url="http://example.invalid/"),
    call("web_search", query="a"),
)


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        pytest.param([], 53, id="nobody"),
        pytest.param(["--json"], 53, id="json", marks=LONG),
        pytest.param(["-p", "--mode", "plan"], 53, id="plan", marks=LONG),
    ],
)
def test_no_question_waits_at_an_open_pipe(start_agent, pipe, workspace, flags, code):
    reader, _ = pipe
    with FlakyServer([QUESTIONS, READ, "report"]) as server:
        agent = start_agent(*flags, "--max-turns", "2", "go", server=server, stdin=reader)
        out, err = agent.communicate(timeout=60)
    assert (agent.returncode, len(server.requests), "Traceback" in err) == (code, 3, False)
    assert "report" in out and not (workspace / "AGENTS.md").exists()


@pytest.mark.parametrize(
    ("flag", "code"),
    [
        pytest.param("-p", 77, id="print"),
        pytest.param("--json", 77, id="json", marks=LONG),
        pytest.param("--yes", 77, id="yes", marks=LONG),
        pytest.param("--output-format=json", 77, id="one object", marks=LONG),
    ],
)
@pytest.mark.parametrize("ui", [False, pytest.param(True, marks=LONG)], ids=["plain", "ui"])
def test_on_a_terminal_a_flag_for_scripts_means_that_nothing_is_asked(
    terminal, workspace, flag, code, ui
):
    with FlakyServer([QUESTIONS, "I could not."]) as server:
        screen = terminal(flag, "go", server=server, ui=ui)
        assert screen.wait() == code
    assert "I could not." in screen.text and "? [y" not in screen.text
    assert not (workspace / "AGENTS.md").exists()


def test_in_a_one_shot_run_on_a_terminal_the_end_of_a_budget_is_no_question(terminal):
    with FlakyServer([READ, "report"]) as server:
        screen = terminal("--max-turns", "1", "go", server=server)
        assert screen.wait() == 53
    assert "report" in screen.text


@pytest.mark.parametrize("flags", [["-p"], pytest.param(["-p", "--yes"], marks=LONG)], ids=str)
def test_print_without_a_prompt_at_a_terminal_does_not_wait_for_one(terminal, flags):
    with FlakyServer(["never"]) as server:
        screen = terminal(*flags, server=server)
        assert screen.wait(30) == 2
    assert server.requests == []


CONTROLLED = (
    "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR)); os.execv(sys.argv[2], sys.argv[2:])"
)


def test_a_terminal_that_is_none_of_the_three_streams_is_left_alone(start_agent, workspace):
    master, slave = pty.openpty()
    name = os.ttyname(slave)
    under = [sys.executable, "-I", "-S", "-c", CONTROLLED, name]
    with FlakyServer([batch(TOUCH, call("note", text="x")), HELD]) as server:
        agent = start_agent("go", server=server, under=under, start_new_session=True)
        os.write(master, b"yes\r")  # There for whoever would read it.
        until(server.holding.is_set)
        links = {os.readlink(p) for p in Path(f"/proc/{agent.pid}/fd").iterdir() if p.is_symlink()}
        left = waiting(slave)
        server.release()
        out, _ = agent.communicate(timeout=60)
    os.close(slave)
    shown = drained(master)
    os.close(master)
    assert (agent.returncode, out, left) == (77, "one two three\n", len("yes\n"))
    assert {"/dev/tty", name} & links == set()
    assert shown in ("yes\r\n", "")  # The echo of what was typed, or nothing is left of it.
    assert not (workspace / "made.txt").exists()


# -- the first run -------------------------------------------------------------------------------


def complaint(stderr: str) -> str:
    """The one line on stderr, besides the announced retries and the way back."""
    lines = stderr.splitlines()
    return only([n for n in lines if "agent --resume" not in n and not n.startswith("retry ")])


def only(lines: list[str]) -> str:
    """The one line that is there."""
    assert len(lines) == 1, lines
    return lines[0]


@LONG
@pytest.mark.parametrize("name", ["groq", "openrouter", "deepseek"])
def test_no_key_for_a_row_in_a_terminal_names_its_variable(terminal, name):
    screen = terminal("--provider", name, "hi", env=NO_KEY)
    assert (screen.wait(), f"{name.upper()}_API_KEY" in screen.text) == (41, True)


@pytest.mark.parametrize(
    "flags", [[], pytest.param(["--json"], marks=LONG), pytest.param(["--yes"], marks=LONG)]
)
def test_no_key_without_a_terminal_is_one_line(run_agent, flags):
    done = run_agent(*flags, "hi", env=NO_KEY)
    line = only(done.stderr.splitlines())
    assert (done.returncode, "AGENT_API_KEY" in line, "--demo" in line) == (41, True, True)


@pytest.mark.parametrize("flags", [[], pytest.param(["--json"], marks=LONG)])
def test_a_wrong_key_is_one_line_that_names_what_to_set(run_agent, flags):
    with FlakyServer(["never"], key="right") as server:
        done = run_agent(*flags, "hi", server=server, env={"AGENT_API_KEY": "sk-WRONG-77"})
    line = complaint(done.stderr)
    assert (done.returncode, "_API_KEY" in line, "sk-WRONG-77" in line) == (41, True, False)


IDS = ("gpt-4o", "gpt-4o-mini", "llama-3.1-8b-instruct", "qwen2.5-coder")


def unknown_model(status: int, text: str, **more: object) -> tuple[int, dict]:
    """How a server says that it does not know a model."""
    return status, {"error": {"message": text, **more}}


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(
            unknown_model(404, "The model `gpt-4o-mimi` does not exist", code="model_not_found"),
            id="openai",
        ),
        pytest.param(
            unknown_model(404, "model 'gpt-4o-mimi' not found, try pulling it first"),
            id="ollama",
            marks=LONG,
        ),
        pytest.param(
            unknown_model(400, "gpt-4o-mimi is not a valid model ID"), id="openrouter", marks=LONG
        ),
        pytest.param((404, "404 page not found"), id="no JSON", marks=LONG),
    ],
)
def test_a_wrong_model_is_one_line_with_the_nearest_of_the_endpoint(run_agent, answer):
    routes = {"/v1/models": listing(*IDS), "/v1/chat/completions": answer}
    with Routes(routes) as server:
        env = {"AGENT_BASE_URL": server.url, "AGENT_MODEL": "gpt-4o-mimi"}
        done = run_agent("hi", env=env)
    line = complaint(done.stderr)
    assert (done.returncode, done.stdout, "llama" in line) == (1, "", False)
    assert "gpt-4o-mini" in line


@LONG
@pytest.mark.parametrize(
    "models",
    [
        pytest.param((404, "no"), id="none is listed"),
        pytest.param("<html>", id="a web page"),
        pytest.param(listing(*(f"model-{n}" for n in range(2_000))), id="two thousand"),
        pytest.param(listing("\u202egpt-4o-mimi\x1b[31m\n2"), id="an id that is no word"),
    ],
)
def test_a_wrong_model_is_one_line_whatever_the_list_is(run_agent, models):
    refused = unknown_model(404, "The model does not exist", code="model_not_found")
    with Routes({"/v1/models": models, "/v1/chat/completions": refused}) as server:
        env = {"AGENT_BASE_URL": server.url, "AGENT_MODEL": "gpt-4o-mimi"}
        done = run_agent("hi", env=env)
    line = complaint(done.stderr)
    assert (done.returncode, done.stdout, len(line) < 1_000) == (1, "", True)
    assert "\x1b" not in line and "\u202e" not in line


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "http://no-such-host.invalid/v1"])
def test_no_network_is_a_75_that_names_the_address(tmp_path, url):
    heard: list[tuple[str, dict]] = []
    known = Settings(base_url=url, api_key=KEY, model="m", workspace=str(tmp_path))
    agent = build_agent(known, emit=lambda k, **d: heard.append((k, d)), sleep=lambda seconds: None)
    result = agent.run("hi")
    agent.close()
    errors = [d["text"] for k, d in heard if k == "notice" and d["level"] == "error"]
    host = url.split("/")[2]
    assert (result.exit_code, len(errors)) == (75, 1)
    assert (
        host.split(":")[0] in errors[0]
        and "\n" not in errors[0]
        and "object at 0x" not in errors[0]
    )


@LONG
@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "http://no-such-host.invalid/v1"])
def test_no_network_is_one_line_behind_the_retries(run_agent, url):
    done = run_agent("hi", env={"AGENT_BASE_URL": url})
    line = complaint(done.stderr)
    assert (done.returncode, done.stdout) == (75, "")
    assert url.split("/")[2].split(":")[0] in line


def behind(proxy: str, scheme: str = "http") -> dict[str, str]:
    """The environment of an agent whose endpoint is elsewhere and whose proxy is this."""
    address = f"http://someone:{PROXY_WORD}@{proxy}"
    return {"AGENT_BASE_URL": f"{scheme}://models.invalid/v1", f"{scheme.upper()}_PROXY": address}


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param((407, "<html>Proxy Authentication Required</html>"), id="407"),
        pytest.param("<html>Please log in to the hotel</html>", id="a portal", marks=LONG),
    ],
)
def test_a_proxy_that_refuses_is_one_line_without_its_password(run_agent, workspace, answer):
    with Routes({"http://models.invalid/v1/chat/completions": answer}) as proxy:
        done = run_agent("hi", env=behind(proxy.url.split("/")[2]))
    line = complaint(done.stderr)
    written = [path for path in workspace.rglob("*") if path.is_file()]
    assert (len(proxy.asked), done.returncode in (1, 41), done.stdout) == (1, True, "")
    assert "proxy" in line.lower() or "PROXY" in line
    assert PROXY_WORD not in done.stderr
    assert [path for path in written if PROXY_WORD.encode() in path.read_bytes()] == []


@LONG
@pytest.mark.parametrize(
    ("scheme", "flags"), [("http", []), ("https", ["--json"])], ids=["text", "json"]
)
def test_a_proxy_that_is_not_there_is_named_without_its_password(run_agent, scheme, flags):
    done = run_agent(*flags, "hi", env=behind("127.0.0.1:9", scheme))
    line = complaint(done.stderr)
    assert (done.returncode, PROXY_WORD in done.stderr + done.stdout) == (75, False)
    assert "proxy" in line.lower()


@pytest.mark.parametrize("status", [302, *(pytest.param(n, marks=LONG) for n in (301, 307, 308))])
def test_a_redirect_is_one_line_that_names_where_to_and_nothing_goes_there(run_agent, status):
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.setblocking(False)
        place = f"http://127.0.0.1:{other.getsockname()[1]}/v1/chat/completions"
        step = {"status": status, "headers": {"Location": place}, "body": ""}
        with FlakyServer([step, "never"]) as server:
            done = run_agent("hi", server=server)
        with pytest.raises(BlockingIOError):
            other.accept()
    line = complaint(done.stderr)
    assert (done.returncode, done.stdout, len(server.requests)) == (1, "", 1)
    assert place.removesuffix("/chat/completions") in line and KEY not in done.stderr
