"""Sections 4, 6 and 8, calls: arguments that are almost JSON, names that are almost right, and
calls that run at once.

`go(step, ...)` runs one prompt: a scripted model sends the step and then says that it is done.
Arguments that are a text go over the wire exactly so. Whether calls run at once is shown by
barriers that only open when all have come, never by the clock.
"""

import ast
import asyncio
import json
import os
import re
import signal
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import results, session_files, until

from agent import Settings, build_agent, mend_object, problems, tool
from flaky_server import FlakyServer

PATIENCE = 30  # Seconds after which something hangs.


@dataclass
class Run:
    """What came of a prompt."""

    server: FlakyServer
    status: str = ""
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def results(self) -> list[str]:
        """What the model was told of its calls."""
        return results(self.server.requests[-1])

    @property
    def calls(self) -> list[tuple[str, Any]]:
        """The calls as the model sees them again: names and parsed arguments."""
        made = [c["function"] for m in self.messages for c in m.get("tool_calls", ())]
        return [(function["name"], json.loads(function["arguments"])) for function in made]


@pytest.fixture
def go(workspace: Path) -> Iterator[Callable[..., Run]]:
    """Run a prompt in the workspace; at the end every request was valid."""
    servers: list[FlakyServer] = []

    def run(*script: Any, extra: Any = (), ask: Any = None, emit: Any = None, **more: Any) -> Run:
        server = FlakyServer([*script, *["done"] * 5]).start()
        servers.append(server)
        made = Run(server)

        def report(kind: str, **data: Any) -> None:
            made.events.append((kind, data))
            if emit is not None:
                emit(kind, **data)

        place = {"workspace": str(workspace), "bare": True}
        fields = {"mode": "auto", "sandbox": "off", **place, **more}
        environ = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        known = Settings(base_url=server.url, model="m", api_key="k", environ=environ, **fields)
        agent = build_agent(known, tools=extra, emit=report, ask=ask)
        try:
            made.status = agent.run("go").status
            made.messages = agent.transcript.messages
        finally:
            agent.close()
        assert problems(made.messages) == []
        return made

    yield run
    for server in servers:
        server.close()
    assert [reason for server in servers for r in server.requests for reason in r.problems] == []
    assert [error for server in servers for error in server.errors + server.bad] == []


def call(name: str, arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    """A step with one call; arguments that are a text are sent as they are."""
    return {"call": name, "arguments": arguments, **more}


def calls(*pairs: tuple[str, Any]) -> dict[str, Any]:
    """A step with several calls."""
    return {"calls": [{"name": name, "arguments": arguments} for name, arguments in pairs]}


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a workspace, without the agent's own."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


# -- what is read without loss for every tool (T01, T02) -----------------------------------------


def fenced(text: str) -> str:
    return f"```json\n{text}\n```"


def doubled(text: str) -> str:
    return json.dumps(text)


ODD_TEXTS = {
    "newline": "a\nb",
    "tab": "\ta",
    "CRLF": "a\r\nb\r\n",
    "control": "a\x01\x1b[0m\x7fb",
    "a fence": "```json\n{}\n```\n",
    "an object": '{"path": "g", "content": "x"}',
    "a text in quotes": '"quoted"',
    "backslashes": "C:\\new\\table \\d+ \\\\",
    "almost JSON": "{'a': True, 'b': [1,],}",
    "letters": "Grüße, 中文 😀",
    "long": "line\n" * 5000,
}
ODD_FORMS = {
    "plain": lambda arguments: json.dumps(arguments),
    "raw control characters": lambda arguments: re.sub(
        r"(?<!\\)((?:\\\\)*)\\(?:u00[01][0-9a-f]|[ntr])",
        lambda m: m[1] + json.loads(f'"{m[0][len(m[1]) :]}"'),
        json.dumps(arguments),
    ),
    "fence": lambda arguments: fenced(json.dumps(arguments)),
    "fence without a name": lambda arguments: f"```\n{json.dumps(arguments)}\n```",
    "fence and blanks": lambda arguments: f"\n {fenced(json.dumps(arguments, indent=2))} \n",
    "double": lambda arguments: doubled(json.dumps(arguments)),
    "blanks around": lambda arguments: f" \n\t{json.dumps(arguments)}\r\n ",
}
ODD_PAIRS = [
    pytest.param(form, text, id=f"{name}-{what}")
    for name, form in ODD_FORMS.items()
    for what, text in ODD_TEXTS.items()
]


@pytest.mark.parametrize(("form", "text"), ODD_PAIRS)
def test_odd_forms_of_arguments_lose_nothing_when_a_file_is_written(
    workspace: Path, go: Callable[..., Run], form: Any, text: str
) -> None:
    arguments = {"path": "f", "content": text}
    run = go(call("write_file", form(arguments)))
    assert (contents(workspace), run.status) == ({"f": text.encode()}, "done"), run.results
    assert run.calls == [("write_file", arguments)]


@pytest.mark.parametrize("form", ODD_FORMS.values(), ids=ODD_FORMS)
@pytest.mark.parametrize(
    ("name", "arguments", "after"),
    [
        ("edit_file", {"path": "f", "old": "one\n\ttwo", "new": "1\n\t2\n"}, b"1\n\t2\n\n"),
        ("bash", {"command": "cat > f <<'X'\n\ta\nb\nX\n"}, b"\ta\nb\n"),
        ("put", {"path": "f", "text": "a\n\tb"}, b"a\n\tb"),
    ],
    ids=["edit_file", "bash", "a tool of the user"],
)
def test_odd_forms_of_arguments_are_the_same_for_every_tool(
    workspace: Path, go: Callable[..., Run], form: Any, name: str, arguments: Any, after: bytes
) -> None:
    @tool(needs="run")
    def put(path: str, text: str) -> str:
        """Put a text into a file.

        path: which
        text: what
        """
        (workspace / path).write_bytes(text.encode())
        return "ok"

    (workspace / "f").write_bytes(b"one\n\ttwo\n")
    run = go(call(name, form(arguments)), extra=[put])
    assert contents(workspace) == {"f": after}, run.results
    assert run.calls == [(name, arguments)]


@pytest.mark.parametrize(
    "form",
    [
        lambda text: doubled(doubled(text)),
        lambda text: fenced(doubled(text)),
        lambda text: doubled(fenced(text)),
        lambda text: '"' + text.replace('"', '\\"') + '"',
    ],
    ids=["three times", "fence around double", "fence inside", "raw newlines inside double"],
)
def test_odd_forms_may_be_combined_and_are_read_or_refused_but_never_half_read(
    workspace: Path, go: Callable[..., Run], form: Any
) -> None:
    text = '{"path": "f", "content": "a\nb"}'
    (result,) = go(call("write_file", form(text))).results
    if result.startswith("error: "):
        assert contents(workspace) == {} and "JSON" in result
    else:
        assert contents(workspace) == {"f": b"a\nb"}


@pytest.mark.parametrize("raw", ["", " ", "null", "{}", '"{}"', "```json\n{}\n```"])
def test_no_arguments_are_no_arguments(go: Callable[..., Run], raw: str) -> None:
    run = go(call("list_files", raw))
    assert (run.results, run.calls) == (["(no files match * in .)"], [("list_files", {})])


# -- what is repaired for tools that only read (T03, T05) ----------------------------------------


@tool(needs="read")
def echo(text: str, items: list[str] | None = None, flag: bool = False, n: int = 0) -> str:
    """Say it again.

    text: what
    items: more
    flag: whether
    n: how often
    """
    return repr((text, items, flag, n))


REPAIRED = [
    pytest.param('{"text": "a",}', ("a", None, False, 0), id="comma"),
    pytest.param('{"text": "a" , \n}', ("a", None, False, 0), id="comma and blanks"),
    pytest.param('{"text": "a", "items": ["b", "c",],}', ("a", ["b", "c"], False, 0), id="commas"),
    pytest.param('{"text": "a,}", "items": [",]",],}', ("a,}", [",]"], False, 0), id="in texts"),
    pytest.param("{'text': 'a'}", ("a", None, False, 0), id="quotes"),
    pytest.param("{'text': \"it's\"}", ("it's", None, False, 0), id="both quotes"),
    pytest.param("{'text': 'say \"hi\"'}", ('say "hi"', None, False, 0), id="quotes inside"),
    pytest.param('{"text": "a", "flag": True}', ("a", None, True, 0), id="True"),
    pytest.param('{"text": "a", "flag": False, "n": 2}', ("a", None, False, 2), id="False"),
    pytest.param('{"text": "a", "items": None}', ("a", None, False, 0), id="None"),
    pytest.param('{"text": "True, None", "flag": True,}', ("True, None", None, True, 0), id="both"),
    pytest.param("{'text': 'null true', 'flag': True}", ("null true", None, True, 0), id="words"),
    pytest.param(r'{"text": "\d+"}', (r"\d+", None, False, 0), id="escape"),
    pytest.param(r'{"text": "a\.b\(\w*\)"}', (r"a\.b\(\w*\)", None, False, 0), id="escapes"),
    pytest.param(r'{"text": "\\w\d"}', (r"\w\d", None, False, 0), id="a right one and a wrong"),
    pytest.param(r'{"text": "C:\Users\x"}', (r"C:\Users\x", None, False, 0), id="path"),
    pytest.param(r'{"text": "\s\"x\""}', (r'\s"x"', None, False, 0), id="quotes beside it"),
]


@pytest.mark.parametrize(("raw", "expected"), REPAIRED)
def test_what_is_clear_is_repaired_for_a_tool_that_reads(
    go: Callable[..., Run], raw: str, expected: tuple[Any, ...]
) -> None:
    run = go(call("echo", raw), extra=[echo])
    assert [ast.literal_eval(text) for text in run.results] == [expected]
    assert run.calls[0][1]["text"] == expected[0]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (r'{"regex": "\d{3}"}', ["f:2:tel 555"]),
        (r'{"regex": "^\w+\(\)$", "path": "f",}', ["f:1:main()"]),
        ("{'regex': 'MAIN', 'ignore_case': True}", ["f:1:main()"]),
    ],
)
def test_a_search_with_almost_right_arguments_finds_the_lines(
    workspace: Path, go: Callable[..., Run], raw: str, expected: list[str]
) -> None:
    (workspace / "f").write_text("main()\ntel 555\n")
    assert go(call("grep", raw)).results == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [("{'text': 'it\\'s'}", "it's"), ("{'text': 'a\\nb'}", "a\nb"), ("{'text': '\\d'}", "\\d")],
)
def test_an_escape_in_quotes_of_python_is_read_right_or_not_at_all(
    go: Callable[..., Run], raw: str, expected: str
) -> None:
    (result,) = go(call("echo", raw), extra=[echo]).results
    told = re.match("error: .*JSON", result) is not None
    assert told or ast.literal_eval(result) == (expected, None, False, 0)


# A right escape beside a wrong one: was \b the backspace that JSON says, or a border of a word?
@pytest.mark.parametrize(
    "raw", [r'{"regex": "\bmain\b\d"}', r'{"regex": "\d\bfoo"}', r'{"path": "C:\new\d"}']
)
def test_a_repair_never_looks_for_something_else(
    workspace: Path, go: Callable[..., Run], raw: str
) -> None:
    (workspace / "f").write_text("main1\n1 foo\n")
    (result,) = go(call("grep" if "regex" in raw else "read_file", raw)).results
    found = result.startswith("f:") or "C:\\new\\d" in result
    assert found or re.match("error: .*JSON", result), result


NOT_CLEAR = {
    "cut in a text": '{"text": "a',
    "cut behind it": '{"text": "a"',
    "cut behind a comma": '{"text": "a",',
    "cut in a list": '{"text": "a", "items": ["b"',
    "cut in Python": "{'text': 'a",
    "an object and words": '{"text": "a"} and then',
    "words and an object": 'Here: {"text": "a"}',
    "no value": '{"text": }',
    "no quotes": "{text: a}",
    "an expression": "{'text': 'a' + 'b'}",
    "a call": "{'text': str(1)}",
    "a list": '["a"]',
    "a text": '"a"',
    "a number": "42",
    "words": "text=a",
    "a quote inside": '{"text": "say "hi" to"}',
    "a comma too many": '{"text": "a",, "n": 1}',
    "a comma too few": '{"text": "a" "n": 1}',
    "a tag": "<text>a</text>",
}


@pytest.mark.parametrize("raw", NOT_CLEAR.values(), ids=NOT_CLEAR)
def test_what_is_not_clear_is_not_run_and_the_model_is_told_what_and_where(
    go: Callable[..., Run], raw: str
) -> None:
    run = go(call("echo", raw), extra=[echo])
    (result,) = run.results
    assert result.startswith("error: ") and "JSON" in result
    assert "missing" not in result.lower()
    assert [type(arguments) for _, arguments in run.calls] == [dict]
    assert run.status == "done"


# -- what is never repaired (T06, T07, T08) ------------------------------------------------------


ALMOST = {
    "comma": lambda text: text[:-1] + ",}",
    "quotes": lambda text: text.replace('"', "'"),
    "True": lambda text: text[:-1] + ', "x": True}',
    "escape": lambda text: text.replace("@", r"\d"),
    "cut": lambda text: text[:-1],
    "cut in the text": lambda text: text[:-4],
}
WRITES = {
    "write_file": {"path": "new", "content": "x@y"},
    "edit_file": {"path": "f", "old": "one", "new": "two@"},
    "bash": {"command": "echo @ > new"},
    "note": {"text": "a note @"},
    "changes": {"text": "a@b"},
    "runs": {"text": "a@b"},
    "asks": {"text": "a@b"},
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("form", ALMOST.values(), ids=ALMOST)
def test_arguments_of_what_has_effects_are_never_repaired(
    workspace: Path, go: Callable[..., Run], form: Any, name: str
) -> None:
    ran: list[str] = []
    (workspace / "f").write_text("one\n")
    step = call(name, form(json.dumps(WRITES[name])))
    run = go(step, extra=with_effects(ran), ask=lambda question: "y")
    (result,) = run.results
    assert (ran, contents(workspace)) == ([], {"f": b"one\n"})
    assert result.startswith("error: ") and "JSON" in result and "missing" not in result.lower()
    assert re.search(r"(?i)(line|column|char|position)\D{0,3}\d", result), "the place is missing"
    assert run.calls == [(name, {})]


def with_effects(ran: list[str]) -> list[Any]:
    """A tool for each need but read; each keeps what it was called with."""

    def make(name: str, needs: str) -> Any:
        def act(text: str) -> str:
            """Act.

            text: how
            """
            ran.append(text)
            return "did it"

        act.__name__ = name
        return tool(needs=needs)(act)

    return [make("changes", "write"), make("runs", "run"), make("asks", "net")]


CUT_REPLIES = {
    "length": {"fault": "length"},
    "length behind a whole call": {"fault": "length_whole_call"},
    "labelled as whole": {"fault": "cut_call_labelled_whole"},
    "length, said plainly": {"finish_reason": "length"},
    "a content filter": {"finish_reason": "content_filter"},
}
CUT_ARGUMENTS = {
    "right": '{"text": "a b c"}',
    "almost": '{"text": "a b c",}',
    "fenced": '```json\n{"text": "a b c"}\n```',
    "doubled": '"{\\"text\\": \\"a b c\\"}"',
}


@pytest.mark.parametrize("raw", CUT_ARGUMENTS.values(), ids=CUT_ARGUMENTS)
@pytest.mark.parametrize("reply", CUT_REPLIES.values(), ids=CUT_REPLIES)
@pytest.mark.parametrize("name", ["echoes", "changes", "runs"])
def test_of_a_cut_reply_nothing_is_run(
    workspace: Path, go: Callable[..., Run], name: str, reply: dict[str, Any], raw: str
) -> None:
    ran: list[str] = []

    @tool(needs="read")
    def echoes(text: str) -> str:
        """Say it again.

        text: what
        """
        ran.append(text)
        return text

    go({**call(name, raw), **reply}, extra=[echoes, *with_effects(ran)])
    assert ran == []


@pytest.mark.long
def test_of_a_reply_whose_stream_broke_nothing_is_run(go: Callable[..., Run]) -> None:
    ran: list[str] = []
    step = {**call("runs", CUT_ARGUMENTS["almost"]), "fault": "cut_call"}
    run = go(step, "in whole, then", extra=with_effects(ran))
    assert (ran, run.status, run.calls) == ([], "done", [])


@pytest.mark.parametrize("name", ["write_file", "grep", "bash", "ask_user", "nothing"])
def test_a_malformed_call_does_not_spoil_the_session(go: Callable[..., Run], name: str) -> None:
    raw = '{"path": "a\\q", \ud83d "x'
    run = go(call(name, raw), call("list_files", "{}"))
    assert run.status == "done"
    assert run.results[0].startswith("error: ")
    assert [arguments for _, arguments in run.calls] == [{}, {}]


# -- missing, unknown and wrong parameters (T10, T11, T16) ---------------------------------------


NEEDED = {
    "read_file": {"path": "f"},
    "grep": {"regex": "x"},
    "write_file": {"path": "new", "content": "x"},
    "edit_file": {"path": "f", "old": "one", "new": "two"},
    "bash": {"command": "echo x > new"},
    "ask_user": {"question": "what?"},
    "note": {"text": "x"},
    "web_search": {"query": "x"},
    "fetch_url": {"url": "http://127.0.0.1:9/"},
    "list_files": {},
}
WRONG_CALLS = [
    *(
        pytest.param(name, {k: v for k, v in given.items() if k != gone}, gone, id=f"{name}-{gone}")
        for name, given in NEEDED.items()
        for gone in given
    ),
    *(
        pytest.param(name, given | {"bogus": 1}, "bogus", id=f"{name}-unknown")
        for name, given in NEEDED.items()
    ),
    *(
        pytest.param(name, given | {wrong: {"a": [1]}}, wrong, id=f"{name}-{wrong} of a wrong kind")
        for name, given in NEEDED.items()
        for wrong in given
    ),
    pytest.param("read_file", {"path": "f", "start": "ten"}, "start", id="no number"),
    pytest.param("bash", {"command": ["echo", "x"]}, "command", id="a list for a text"),
    pytest.param("bash", {"command": "echo x > new", "timeout": "soon"}, "timeout", id="no time"),
    pytest.param("edit_file", {**NEEDED["edit_file"], "all": "perhaps"}, "all", id="no yes or no"),
    pytest.param("grep", {"regex": "x", "ignore_case": "maybe"}, "ignore_case", id="nor this"),
]


@pytest.mark.parametrize(("name", "given", "culprit"), WRONG_CALLS)
def test_a_wrong_call_runs_nothing_and_is_answered_with_the_signature(
    workspace: Path, go: Callable[..., Run], name: str, given: dict[str, Any], culprit: str
) -> None:
    (workspace / "f").write_text("one\n")
    run = go(call(name, given), ask=lambda question: "y")
    (result,) = run.results
    assert contents(workspace) == {"f": b"one\n"}
    assert result.startswith("error: ") and culprit in result
    assert re.search(rf"\b{name}\([^()]*\)", result), f"no signature: {result}"


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("write_file", {"file_path": "f", "content": "x"}),
        ("write_file", {"filePath": "f", "content": "x"}),
        ("write_file", {"file": "f", "content": "x"}),
        ("write_file", {"filename": "f", "content": "x"}),
        ("write_file", {"path": "f", "contents": "x"}),
        ("edit_file", {"file_path": "f", "old_string": "one", "new_string": "x"}),
        ("edit_file", {"filePath": "f", "oldText": "one", "newText": "x"}),
        ("edit_file", {"path": "f", "old_str": "one", "new_str": "x"}),
        ("edit_file", {"path": "f", "oldString": "one", "newString": "x", "replaceAll": False}),
        ("edit_file", {"path": "f", "old": "one", "new": "x", "replace_all": "true"}),
        ("bash", {"cmd": "printf x > f"}),
    ],
)
def test_names_that_models_invent_for_parameters_do_what_was_meant(
    workspace: Path, go: Callable[..., Run], name: str, given: dict[str, Any]
) -> None:
    (workspace / "f").write_text("one")
    if name == "write_file":
        (workspace / "f").unlink()
    run = go(call(name, given))
    assert contents(workspace) == {"f": b"x"}, run.results


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("write_file", {"path": "f", "file_path": "g", "content": "x"}),
        ("write_file", {"file_path": "f", "filename": "g", "content": "x"}),
        ("edit_file", {"path": "f", "old": "one", "old_string": "two", "new": "x"}),
        ("bash", {"command": "printf x > f", "cmd": "printf y > f"}),
    ],
)
def test_two_names_for_one_parameter_with_two_values_run_nothing(
    workspace: Path, go: Callable[..., Run], name: str, given: dict[str, Any]
) -> None:
    (workspace / "f").write_text("one two")
    (result,) = go(call(name, given)).results
    assert result.startswith("error: ") and contents(workspace) == {"f": b"one two"}


@pytest.mark.parametrize(
    ("word", "after"),
    [
        *((word, b"x x") for word in (True, "true", "True", "TRUE", "yes", "1", 1)),
        *((word, b"a a") for word in (False, "false", "False", "FALSE", "no", "0", 0)),
        *((word, b"a a") for word in ("perhaps", 2, "", [], {})),
    ],
)
def test_all_is_only_on_when_it_says_so(
    workspace: Path, go: Callable[..., Run], word: Any, after: bytes
) -> None:
    (workspace / "f").write_bytes(b"a a")
    run = go(call("edit_file", {"path": "f", "old": "a", "new": "x", "all": word}))
    assert contents(workspace) == {"f": after}
    assert run.results[0].startswith("error: ") is (after == b"a a")


# -- names of tools (T13, T15) -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("Read_File", {"path": "f"}, "1: one"),
        ("READ_FILE", {"path": "f"}, "1: one"),
        ("readFile", {"path": "f"}, "1: one"),
        ("ReadFile", {"path": "f"}, "1: one"),
        ("functions.read_file", {"path": "f"}, "1: one"),
        ("functions.readFile", {"path": "f"}, "1: one"),
        ("default_api:grep", {"regex": "n"}, "f:1:one"),
        ("default_api:Grep", {"regex": "n"}, "f:1:one"),
        ("default_api.list_files", {}, "f"),
        ("List_Files", {}, "f"),
        ("BASH", {"command": "cat f"}, "one\n[exit code 0]"),
        ("Bash", {"command": "cat f"}, "one\n[exit code 0]"),
        (" bash ", {"command": "cat f"}, "one\n[exit code 0]"),
    ],
)
def test_a_name_in_other_case_or_with_a_prefix_is_the_tool(
    workspace: Path, go: Callable[..., Run], name: str, arguments: Any, expected: str
) -> None:
    (workspace / "f").write_text("one\n")
    run = go(call(name, arguments))
    assert run.results == [expected]
    assert [arguments for _, arguments in run.calls] == [arguments]


def two_tools() -> list[Any]:
    """Two tools whose names differ in nothing but case."""

    @tool(needs="read")
    def ticket() -> str:
        """The one."""
        return "small"

    @tool(needs="read")
    def Ticket() -> str:
        """The other."""
        return "large"

    return [ticket, Ticket]


@pytest.mark.parametrize(("name", "expected"), [("ticket", "small"), ("Ticket", "large")])
def test_the_exact_name_comes_first(go: Callable[..., Run], name: str, expected: str) -> None:
    assert go(call(name), extra=two_tools()).results == [expected]


@pytest.mark.parametrize("name", ["TICKET", "functions.TICKET"])
def test_a_name_that_fits_two_tools_is_neither(go: Callable[..., Run], name: str) -> None:
    (result,) = go(call(name), extra=two_tools()).results
    assert result.startswith("error: ")
    assert [tool_name for tool_name in ("ticket", "Ticket") if tool_name not in result] == []


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("open_file", "read_file"),
        ("read_files", "read_file"),
        ("Read", "read_file"),
        ("wirte_file", "write_file"),
        ("file_edit", "edit_file"),
        ("grep_search", "grep"),
        ("execute_bash", "bash"),
        ("ls_files", "list_files"),
        ("websearch", "web_search"),
        ("fetch", "fetch_url"),
    ],
)
def test_an_unknown_tool_is_answered_with_the_nearest_names(
    go: Callable[..., Run], name: str, near: str
) -> None:
    run = go(call(name, {"path": "f"}))
    (result,) = run.results
    if name == "websearch":  # Near enough to be the tool itself.
        assert result.startswith(("error: ", "denied: "))
    else:
        assert result.startswith("error: ") and name in result and near in result
    assert run.status == "done"


@pytest.mark.parametrize("name", ["BASH", "Bash", "functions.bash", "default_api:Bash"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"mode": "plan"}, id="plan"),
        pytest.param({"deny": ("bash rm *",)}, id="a rule"),
        pytest.param({"mode": "ask"}, id="nobody there"),
        pytest.param({"exclude_tools": ("bash",)}, id="a tool that is not offered"),
        pytest.param({"tools": ("read_file",)}, id="others only"),
    ],
)
def test_another_spelling_of_a_name_is_no_way_around_a_refusal(
    workspace: Path, go: Callable[..., Run], name: str, options: dict[str, Any]
) -> None:
    (workspace / "x").write_text("precious")
    (result,) = go(call(name, {"command": "rm x"}), **options).results
    assert re.match("(denied|error): ", result)
    assert contents(workspace) == {"x": b"precious"}


@pytest.mark.parametrize(
    ("name", "arguments", "rule"),
    [
        ("Read_File", {"path": "secret"}, "read_file secret"),
        ("functions.read_file", {"path": "secret"}, "read_file secret"),
        ("readFile", {"file_path": "./a/../secret"}, "read_file secret"),
        ("Write_File", {"path": "secret", "content": "x"}, "write_file *"),
        ("functions.edit_file", {"path": "secret", "old": "hush", "new": ""}, "edit_file sec*"),
    ],
)
def test_a_rule_holds_for_every_spelling_of_a_name(
    workspace: Path, go: Callable[..., Run], name: str, arguments: Any, rule: str
) -> None:
    (workspace / "secret").write_text("hush")
    (result,) = go(call(name, arguments), deny=(rule,)).results
    assert result.startswith("denied: ") and "hush" not in result
    assert contents(workspace) == {"secret": b"hush"}


# -- calls that run at once ----------------------------------------------------------------------


def meeting(count: int, needs: str = "read") -> Any:
    """A tool that comes back only when so many of its calls run at once."""
    barrier = threading.Barrier(count)

    @tool(needs=needs)
    def meet(url: str) -> str:
        """Meet the others.

        url: a name
        """
        barrier.wait(PATIENCE)
        return f"met {url}"

    return meet


def each(name: str, *texts: str, key: str = "url") -> list[tuple[str, Any]]:
    """A call of the tool for each text."""
    return [(name, {key: text}) for text in texts]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_calls_that_read_run_at_once(go: Callable[..., Run], count: int) -> None:
    names = [f"n{n}" for n in range(count)]
    run = go(calls(*each("meet", *names)), extra=[meeting(count)])
    assert run.results == [f"met {name}" for name in names]


def test_calls_that_use_the_net_run_at_once_and_beside_those_that_read(
    go: Callable[..., Run],
) -> None:
    barrier = threading.Barrier(4)

    def make(name: str, needs: str) -> Any:
        def look(n: int) -> str:
            """Look.

            n: which
            """
            barrier.wait(PATIENCE)
            return f"{name} {n}"

        look.__name__ = name
        return tool(needs=needs)(look)

    tools = [make("here", "read"), make("there", "net")]
    order = ["here", "there", "there", "here"]
    step = calls(*((name, {"n": n}) for n, name in enumerate(order)))
    assert go(step, extra=tools, network=True).results == ["here 0", "there 1", "there 2", "here 3"]


def test_results_come_in_the_order_of_the_calls_whichever_ends_first(
    go: Callable[..., Run],
) -> None:
    ended = [threading.Event() for _ in range(6)]
    order: list[int] = []

    @tool(needs="read")
    def last_first(n: int) -> str:
        """End behind the next one.

        n: which
        """
        assert n == 5 or ended[n + 1].wait(PATIENCE)
        order.append(n)
        ended[n].set()
        return f"result {n}"

    run = go(calls(*(("last_first", {"n": n}) for n in range(6))), extra=[last_first])
    assert run.results == [f"result {n}" for n in range(6)]
    assert order == [5, 4, 3, 2, 1, 0]
    answered = [m["tool_call_id"] for m in run.messages if m["role"] == "tool"]
    asked = [c["id"] for m in run.messages for c in m.get("tool_calls", ())]
    assert answered == asked


@pytest.mark.parametrize("bad", [0, 1, 3])
@pytest.mark.parametrize("error", [ValueError("bad luck"), SystemExit(3), RecursionError("deep")])
def test_a_call_that_fails_leaves_the_others_their_results(
    go: Callable[..., Run], bad: int, error: BaseException
) -> None:
    barrier = threading.Barrier(4)

    @tool(needs="read")
    def try_it(n: int) -> str:
        """Try.

        n: which
        """
        barrier.wait(PATIENCE)
        if n == bad:
            raise error
        return f"fine {n}"

    run = go(calls(*(("try_it", {"n": n}) for n in range(4))), extra=[try_it])
    assert run.status == "done"
    assert run.results[bad].startswith("error: ")
    assert [text for n, text in enumerate(run.results) if n != bad] == [
        f"fine {n}" for n in range(4) if n != bad
    ]


def test_calls_that_can_not_run_leave_the_others_running_at_once(
    workspace: Path, go: Callable[..., Run]
) -> None:
    step = calls(
        ("meet", {"url": "a"}),
        ("open_file", {"path": "f"}),
        ("meet", '{"url": "cut'),
        ("read_file", {"path": "/etc/passwd"}),
        ("fetch_url", {"url": "http://198.51.100.1/"}),
        ("meet", {"bogus": 1}),
        ("meet", {"url": "b"}),
    )
    run = go(step, extra=[meeting(2)])
    heads = [text.split(" ")[0] for text in run.results]
    assert heads == ["met", "error:", "error:", "denied:", "denied:", "error:", "met"]


def test_many_files_are_read_at_once_as_one_by_one(workspace: Path, go: Callable[..., Run]) -> None:
    for n in range(12):
        (workspace / f"f{n}").write_text(f"line of {n}\n" * 300)
    wanted = [("read_file", {"path": f"f{n}"}) for n in range(12)]
    wanted += [("grep", {"regex": f"of {n}$"}) for n in range(12)]
    wanted += [("list_files", {"pattern": f"f{n}*"}) for n in range(12)]
    one_by_one = go(*(call(name, arguments) for name, arguments in wanted))
    assert go(calls(*wanted)).results == one_by_one.results
    assert len(set(one_by_one.results)) == 36


def test_more_calls_than_there_may_be_threads_are_all_answered(go: Callable[..., Run]) -> None:
    run = go(calls(*(("echo", {"text": str(n)}) for n in range(300))), extra=[echo])
    assert [ast.literal_eval(text)[0] for text in run.results] == [str(n) for n in range(300)]


def test_a_write_waits_for_what_stands_before_it_and_holds_what_stands_behind(
    workspace: Path, go: Callable[..., Run]
) -> None:
    (workspace / "f").write_text("old\n")
    read, write = ("read_file", {"path": "f"}), ("edit_file", {"path": "f", "old": "o", "new": "O"})
    again = ("bash", {"command": "printf new > f"})
    run = go(calls(read, read, write, read, ("grep", {"regex": "ld"}), again, read))
    assert [text.split("\n")[0] for text in run.results[:2]] == ["1: old"] * 2
    assert [run.results[n] for n in (3, 4, 6)] == ["1: Old", "f:1:Old", "1: new"]


def test_nothing_runs_beside_what_has_effects(go: Callable[..., Run]) -> None:
    running: list[str] = []
    seen: list[list[str]] = []

    def make(name: str, needs: str) -> Any:
        def act(n: int) -> str:
            """Act.

            n: which
            """
            running.append(name)
            seen.append(sorted(running))
            running.remove(name)
            return name

        act.__name__ = name
        return tool(needs=needs)(act)

    tools = [make("reads", "read"), make("writes", "write"), make("runs", "run")]
    order = ["reads", "writes", "reads", "reads", "runs", "runs", "writes", "reads"] * 5
    run = go(calls(*((name, {"n": n}) for n, name in enumerate(order))), extra=tools)
    assert run.results == order
    alone = [names for names in seen if "writes" in names or "runs" in names]
    assert [names for names in alone if len(names) > 1] == []
    assert len(alone) == sum(name != "reads" for name in order)


@pytest.mark.parametrize("count", [2, 20])
def test_edits_of_one_file_in_one_reply_all_land(
    workspace: Path, go: Callable[..., Run], count: int
) -> None:
    (workspace / "f").write_text("".join(f"{n}.\n" for n in range(1, 101)))
    wanted = range(50, 50 + count)
    run = go(calls(*(("edit_file", edit(n)) for n in wanted)))
    assert [text for text in run.results if text.startswith("error: ")] == []
    lines = (f"LINE {n}." if n in wanted else f"{n}." for n in range(1, 101))
    assert (workspace / "f").read_text() == "".join(f"{line}\n" for line in lines)


def edit(n: int) -> dict[str, str]:
    """An edit of the line with the number."""
    return {"path": "f", "old": f"\n{n}.\n", "new": f"\nLINE {n}.\n"}


def test_commands_of_one_reply_run_one_after_another(
    workspace: Path, go: Callable[..., Run]
) -> None:
    command = "n=$(cat f); sleep 0.05; echo $((n + 1)) > f"
    (workspace / "f").write_text("0\n")
    go(calls(*[("bash", {"command": command})] * 4))
    assert (workspace / "f").read_text() == "4\n"


# -- questions, threads and events ---------------------------------------------------------------


def test_all_questions_come_first_in_order_and_then_all_runs_at_once(
    go: Callable[..., Run],
) -> None:
    asked: list[tuple[str, int]] = []
    began: list[str] = []
    barrier = threading.Barrier(3)

    @tool(needs="net")
    def pull(url: str) -> str:
        """Pull.

        url: from where
        """
        began.append(url)
        barrier.wait(PATIENCE)
        return f"pulled {url}"

    def ask(question: Any) -> str:
        asked.append((question.text, len(began)))
        return "n" if "b.example" in question.text else "y"

    urls = [f"http://{name}.example/" for name in "abcd"]
    run = go(calls(*each("pull", *urls)), extra=[pull], mode="ask", ask=ask)
    assert [count for _, count in asked] == [0, 0, 0, 0]
    assert [url for url, (text, _) in zip(urls, asked, strict=True) if url not in text] == []
    assert [text.split(" ")[0] for text in run.results] == ["pulled", "denied:", "pulled", "pulled"]


def test_a_question_to_the_user_stands_alone(go: Callable[..., Run]) -> None:
    began: list[str] = []
    heard: list[tuple[bool, list[str]]] = []

    @tool(needs="read")
    def look(url: str) -> str:
        """Look.

        url: where
        """
        began.append(url)
        return url

    def ask(question: Any) -> str:
        heard.append((threading.current_thread() is threading.main_thread(), sorted(began)))
        return f"answer to {question.text}"

    question = [("ask_user", {"question": f"q{n}?"}) for n in range(2)]
    run = go(calls(*each("look", "a", "b"), *question, *each("look", "c")), extra=[look], ask=ask)
    assert heard == [(True, ["a", "b"]), (True, ["a", "b"])]
    assert run.results == ["a", "b", "answer to q0?", "answer to q1?", "c"]


def test_only_the_main_thread_reports_and_the_threads_of_calls_end_with_the_program(
    go: Callable[..., Run],
) -> None:
    reporters: set[threading.Thread] = set()
    threads: list[threading.Thread] = []
    barrier = threading.Barrier(3)

    @tool(needs="read")
    def look(url: str) -> str:
        """Look.

        url: where
        """
        threads.append(threading.current_thread())
        barrier.wait(PATIENCE)
        return url

    def emit(kind: str, **data: Any) -> None:
        reporters.add(threading.current_thread())

    go(calls(*each("look", *"abc")), extra=[look], emit=emit)
    assert (reporters, [t.daemon for t in threads]) == ({threading.main_thread()}, [True] * 3)
    for thread in threads:
        thread.join(PATIENCE)
    assert [thread.is_alive() for thread in threads] == [False] * 3


def test_each_call_is_reported_once_in_order_with_its_own_result(go: Callable[..., Run]) -> None:
    run = go(calls(*each("meet", *"abcd")), extra=[meeting(4)])
    used = [(data["id"], data["arguments"]["url"]) for k, data in run.events if k == "tool_use"]
    ended = {d["id"]: (d["status"], d["content"]) for k, d in run.events if k == "tool_result"}
    assert [name for _, name in used] == list("abcd")
    assert [ended[ident] for ident, _ in used] == [("ok", f"met {name}") for name in "abcd"]
    assert len([k for k, _ in run.events if k == "tool_result"]) == 4


# -- Ctrl-C --------------------------------------------------------------------------------------


def interrupt() -> None:
    """A real Ctrl-C, for the main thread."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


STOPPED = re.compile(r"(?i)interrupted|cancelled|not run")


def test_ctrl_c_returns_at_once_and_what_comes_late_is_dropped(
    workspace: Path, go: Callable[..., Run]
) -> None:
    barrier, release = threading.Barrier(3), threading.Event()
    threads: list[threading.Thread] = []
    quick = threading.Event()
    released: list[bool] = []  # A thread whose join() was interrupted passes for ended in 3.11.

    @tool(needs="read")
    def slow(n: int) -> str:
        """Wait.

        n: which
        """
        if n == 0:
            quick.set()
            return "quick"
        threads.append(threading.current_thread())
        if barrier.wait(PATIENCE) == 0:
            quick.wait(PATIENCE)
            interrupt()
        released.append(release.wait(PATIENCE))
        return "LATE"

    step = calls(*(("slow", {"n": n}) for n in range(4)), ("bash", {"command": "touch f"}))
    run = go(step, extra=[slow])
    assert (run.status, len(threads), released) == ("cancelled", 3, [])
    before = (json.dumps(run.messages), session_files(workspace)[0].read_bytes())
    release.set()
    until(lambda: released == [True] * 3)
    for thread in threads:
        thread.join(PATIENCE)
    assert (json.dumps(run.messages), session_files(workspace)[0].read_bytes()) == before
    texts = [m["content"] for m in run.messages if m["role"] == "tool"]
    assert texts[0] == "quick" or STOPPED.search(texts[0])
    assert [text for text in texts[1:] if not STOPPED.search(text) or "LATE" in text] == []
    assert (len(texts), contents(workspace)) == (5, {})


def test_after_ctrl_c_the_next_prompt_gets_none_of_the_late_results(workspace: Path) -> None:
    barrier, release = threading.Barrier(3), threading.Event()

    @tool(needs="read")
    def slow(n: int) -> str:
        """Wait.

        n: which
        """
        if n < 0:
            return "second round"
        if barrier.wait(PATIENCE) == 0:
            interrupt()
        release.wait(PATIENCE)
        return "LATE"

    first = calls(*(("slow", {"n": n}) for n in range(3)))
    second = calls(*(("slow", {"n": -1}) for _ in range(2)))
    with FlakyServer([first, second, "done"]) as server:
        fields = {"mode": "auto", "workspace": str(workspace), "bare": True, "environ": {}}
        known = Settings(base_url=server.url, model="m", api_key="k", **fields)
        agent = build_agent(known, tools=[slow])
        assert agent.run("one").exit_code == 130
        release.set()
        assert agent.run("two").status == "done"
        agent.close()
    assert results(server.requests[-1])[3:] == ["second round"] * 2
    assert b"LATE" not in session_files(workspace)[0].read_bytes()
    assert [request.problems for request in server.requests] == [[], [], []]


# -- the web, at once ----------------------------------------------------------------------------


class Waiting(socketserver.BaseRequestHandler):
    """Answers when so many requests have come as the server waits for."""

    def handle(self) -> None:
        head = self.request.recv(65536)
        path = head.split(b" ")[1]
        self.server.arrived.append(path.decode())
        try:
            self.server.barrier.wait(PATIENCE)
        except threading.BrokenBarrierError:
            return
        body = b"page " + path
        kind = b"Content-Type: text/plain\r\nConnection: close\r\n"
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        self.request.sendall(b"HTTP/1.1 200 OK\r\n" + kind + length + body)


@pytest.fixture
def waiting() -> Iterator[Callable[[int], Any]]:
    """A site on 127.0.0.1 that answers only when so many requests have come."""
    servers: list[Any] = []

    def start(count: int) -> Any:
        server: Any = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Waiting)
        server.daemon_threads, server.arrived = True, []
        server.barrier = threading.Barrier(count)
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.barrier.abort()
        server.shutdown()
        server.server_close()


def test_four_pages_are_fetched_at_once(
    go: Callable[..., Run], waiting: Callable[[int], Any]
) -> None:
    site = waiting(4)
    urls = [f"{site.url}/{n}" for n in range(4)]
    run = go(calls(*each("fetch_url", *urls)), fetch_hosts=("127.0.0.1",))
    assert sorted(site.arrived) == ["/0", "/1", "/2", "/3"]
    assert [f"\npage /{n}\n" in text for n, text in enumerate(run.results)] == [True] * 4
    assert [url in text for url, text in zip(urls, run.results, strict=True)] == [True] * 4


def test_ctrl_c_ends_the_program_while_pages_are_on_their_way(
    workspace: Path, start_agent: Callable[..., Any], waiting: Callable[[int], Any]
) -> None:
    site = waiting(9)
    step = calls(*each("fetch_url", *(f"{site.url}/{n}" for n in range(3))))
    with FlakyServer([step, "done"]) as server:
        rule = ("--allow", "fetch_url http://127.0.0.1:*")
        process = start_agent("-p", "go", *rule, server=server)
        until(lambda: len(site.arrived) == 3 or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130, process.stderr.read()
    saved = json.loads(session_files(workspace)[0].read_text())["messages"]
    texts = results({"messages": saved})
    assert problems(saved) == [] and len(texts) == 3
    assert [text for text in texts if not STOPPED.search(text)] == []


# -- the edges of what is read and repaired ------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    ["```json\r\n{}\r\n```", "```{}```", "```json {}```", "\r\n```\r\n{}\r\n```\r\n"],
)
def test_a_fence_may_stand_on_one_line_or_end_its_lines_with_crlf(
    workspace: Path, go: Callable[..., Run], form: str
) -> None:
    arguments = {"path": "f", "content": "```\r\na\r\n```\n"}
    run = go(call("write_file", form.replace("{}", json.dumps(arguments))))
    assert (contents(workspace), run.calls) == (
        {"f": arguments["content"].encode()},
        [("write_file", arguments)],
    )


@pytest.mark.parametrize(
    "raw",
    ['{"text": "a", "n": 1e999,}', "{'text': 'a', 'n': 1e999}", "{'text': 'a', 'n': -1e999,}"],
)
def test_a_number_without_end_is_not_repaired(go: Callable[..., Run], raw: str) -> None:
    run = go(call("echo", raw), extra=[echo])
    (result,) = run.results
    assert result.startswith("error: ") and run.status == "done"
    assert "Infinity" not in json.dumps(run.messages)


AMBIGUOUS = {
    "literals side by side": r'{"regex": "print("")"}',
    "more of them": r'{"regex": "foo(""bar"")"}',
    "two literals": """{'regex': '*.py' '*.js'}""",
    "a key twice": "{'path': 'a', 'path': 'b'}",
    "hex": r'{"path": "caf\xe9.txt"}',
    "a quote of Python": r'{"path": "it\'s.txt"}',
    "a newline beside a wrong one": r'{"path": "C:\new", "regex": "\d"}',
    "a tab beside a wrong one": r'{"regex": "\d", "path": "a\tb"}',
}


@pytest.mark.parametrize("raw", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_what_has_two_readings_is_not_repaired(raw: str) -> None:
    assert mend_object(raw) is None


@pytest.mark.parametrize("text", [r"\d", r"(x)\1", r"C:\Users\x", r"C:\Dir\x", r"a\ b\w"])
def test_a_backslash_with_one_reading_is_repaired(text: str) -> None:
    assert mend_object(f'{{"regex": "{text}"}}') == {"regex": text}
    assert mend_object(r'{"regex": "\\.\w", "path": "' + text + '",}') == {
        "regex": r"\.\w",
        "path": text,
    }


@pytest.mark.parametrize("raw", ["1.10", "1e5", "12345678901234567890.5", "true", "false"])
def test_a_value_that_may_have_been_written_otherwise_is_no_text(
    workspace: Path, go: Callable[..., Run], raw: str
) -> None:
    run = go(call("write_file", f'{{"path": "f", "content": {raw}}}'))
    assert contents(workspace) == {}
    assert re.match("error: .*content", run.results[0])


def test_a_whole_number_is_a_text_where_one_is_wanted(
    workspace: Path, go: Callable[..., Run]
) -> None:
    go(call("write_file", {"path": "f", "content": 12345678901234567890}))
    assert contents(workspace) == {"f": b"12345678901234567890"}


class Odd(BaseException):
    """What no tool should raise."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [GeneratorExit, asyncio.CancelledError, Odd])
def test_a_tool_that_ends_by_an_odd_exception_beside_others_has_failed(
    go: Callable[..., Run], error: Any
) -> None:
    @tool(needs="read")
    def odd(n: int) -> str:
        """Raise.

        n: 0 for an error
        """
        if n == 0:
            raise error("gone")
        return f"fine {n}"

    run = go(calls(*(("odd", {"n": n}) for n in range(3))), extra=[odd])
    assert (run.status, run.results[1:]) == ("done", ["fine 1", "fine 2"])
    assert run.results[0].startswith("error: ")
    told = [data["status"] for kind, data in run.events if kind == "tool_result"]
    assert told == ["error", "ok", "ok"]


def test_ctrl_c_leaves_a_lone_call_of_the_net_behind(go: Callable[..., Run]) -> None:
    release, threads = threading.Event(), []
    released: list[bool] = []

    @tool(needs="net")
    def hang(url: str) -> str:
        """Wait, deaf to Ctrl-C like a search for a name.

        url: where
        """
        threads.append(threading.current_thread())
        interrupt()
        try:
            release.wait(PATIENCE)
        except KeyboardInterrupt:
            release.wait(2)
        released.append(release.is_set())
        return "LATE"

    run = go(call("hang", {"url": "http://h.example/"}), extra=[hang], network=True)
    assert (run.status, released) == ("cancelled", [])
    assert threads[0] is not threading.main_thread()
    release.set()
    until(lambda: released == [True])
    threads[0].join(PATIENCE)
    assert "LATE" not in json.dumps(run.messages)


def test_ctrl_c_ends_the_fetch_of_one_silent_page(
    workspace: Path, start_agent: Callable[..., Any], waiting: Callable[[int], Any]
) -> None:
    site = waiting(9)
    with FlakyServer([call("fetch_url", {"url": f"{site.url}/0"}), "done"]) as server:
        rule = ("--allow", "fetch_url http://127.0.0.1:*")
        process = start_agent("-p", "go", *rule, server=server)
        until(lambda: len(site.arrived) == 1 or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130, process.stderr.read()


def test_calls_run_also_where_no_thread_can_be_started(go: Callable[..., Run]) -> None:
    seen = []

    @tool(needs="read")
    def where(n: int) -> str:
        """Say it again.

        n: which
        """
        seen.append(threading.current_thread())
        threading.stack_size(0)
        return f"{n}"

    def no_room(kind: str, **data: Any) -> None:
        if kind == "tool_use":
            threading.stack_size(1 << 46)  # more than there is

    try:
        run = go(calls(*(("where", {"n": n}) for n in range(3))), extra=[where], emit=no_room)
    finally:
        threading.stack_size(0)
    assert (run.status, run.results) == ("done", ["0", "1", "2"])
    assert seen[0] is threading.main_thread()
