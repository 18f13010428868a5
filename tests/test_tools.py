"""Section 6, tools: functions as schemas, arguments as values, and what each built-in tool says.

`use(name, **arguments)` runs one call through the agent, as a reply of a model would, and returns
the text of its result. Every file is real and lies in the workspace.
"""

import importlib.util
import json
import os
import re
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
import typing
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest

from agent import Settings, ToolError, UsageError, build_agent, make_tool, tool

ENVIRON = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": "/nonexistent"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The workspace."""
    (tmp_path / "ws").mkdir()
    return tmp_path / "ws"


@pytest.fixture
def build(root: Path) -> Iterator[Callable[..., Any]]:
    """Make an agent that works in the workspace; it is closed at the end of the test."""
    made = []

    def make(*, tools: Any = (), emit: Any = None, ask: Any = None, **options: Any) -> Any:
        fields = {"mode": "auto", "save_session": False, "bare": True, "environ": ENVIRON}
        fields = {**fields, "sandbox": "off", "workspace": str(root), **options}
        known = Settings(base_url="http://127.0.0.1:9/v1", model="m", **fields)
        made.append(build_agent(known, tools=tools, emit=emit, ask=ask))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


def call(agent: Any, name: str, arguments: Any) -> str:
    """Run one call as a reply asks for it; the text of its result."""
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    item = {"id": f"c{len(agent.transcript.messages)}", "type": "function"}
    item["function"] = {"name": name, "arguments": raw}
    reply = {"role": "assistant", "content": None, "tool_calls": [item]}
    for one in agent.transcript.add_reply(reply):
        agent.run_call(one)
    return agent.transcript.messages[-1]["content"]


@pytest.fixture
def use(build: Callable[..., Any]) -> Callable[..., str]:
    """Run calls of one agent in mode auto."""
    agent = build()
    return lambda name, **arguments: call(agent, name, arguments)


# -- from a function to a schema


@tool(needs="read")
def ticket(
    number: int,
    words: list[str],
    kind: Literal["bug", "wish"] = "bug",
    share: float = 0.5,
    loud: bool = False,
    title: str | None = None,
) -> str:
    """Look up a ticket
    in the tracker.

    Not for the model.

    number: the ticket's number
    words: what to look for,
        one by one
    kind: which kind
    share: how much
    loud: whether to shout
    title: part of the title
    """
    return f"{number} {words} {kind} {share} {loud} {title}"


def test_a_function_becomes_exactly_this_schema(build: Callable[..., Any]) -> None:
    schema = build(tools=[ticket]).tools["ticket"].schema()
    assert schema == {
        "type": "function",
        "function": {
            "name": "ticket",
            "description": "Look up a ticket in the tracker.",
            "parameters": {
                "type": "object",
                "properties": {
                    "number": {"type": "integer", "description": "the ticket's number"},
                    "words": {
                        "type": "array",
                        "description": "what to look for, one by one",
                        "items": {"type": "string"},
                    },
                    "kind": {
                        "type": "string",
                        "description": "which kind",
                        "enum": ["bug", "wish"],
                    },
                    "share": {"type": "number", "description": "how much"},
                    "loud": {"type": "boolean", "description": "whether to shout"},
                    "title": {"type": "string", "description": "part of the title"},
                },
                "required": ["number", "words"],
            },
        },
    }


PARAMETERS = {
    "read_file": (["path"], ["start", "end"]),
    "list_files": ([], ["path", "pattern", "offset"]),
    "grep": (["regex"], ["path", "pattern", "ignore_case", "context", "offset"]),
    "write_file": (["path", "content"], []),
    "edit_file": (["path", "old", "new"], ["all"]),
    "bash": (["command"], ["timeout", "network"]),
    "ask_user": (["question"], []),
    "note": (["text"], []),
    "web_search": (["query"], ["max_results"]),
    "fetch_url": (["url"], ["start"]),
    "recall": (["query"], []),
}


def test_the_built_in_tools_have_the_names_and_parameters_of_the_contract(
    build: Callable[..., Any],
) -> None:
    shapes = {}
    for made in build().tools.values():
        parameters = made.schema()["function"]["parameters"]
        required = parameters["required"]
        shapes[made.name] = (required, [n for n in parameters["properties"] if n not in required])
    assert shapes == PARAMETERS


def test_schemas_hold_only_keywords_that_every_provider_takes(build: Callable[..., Any]) -> None:
    known = {"type", "description", "items", "enum"}
    for made in build(tools=[ticket]).tools.values():
        parameters = made.schema()["function"]["parameters"]
        assert set(parameters) == {"type", "properties", "required"}
        assert all(set(shape) <= known for shape in parameters["properties"].values())
        assert all(shape["description"] for shape in parameters["properties"].values())


# Functions that can not be tools; only their being offered to an agent is an error.


def without_annotation(number) -> str:
    """Look.

    number: which
    """
    return ""


def with_a_strange_annotation(number: dict[str, int]) -> str:
    """Look.

    number: which
    """
    return ""


def with_two_kinds(number: int | str) -> str:
    """Look.

    number: which
    """
    return ""


def with_an_unknown_name(number: "Nowhere") -> str:
    """Look.

    number: which
    """
    return ""


def without_help(number: int) -> str:
    """Look."""
    return ""


def with_help_for_nothing(number: int) -> str:
    """Look.

    number: which
    colour: of what
    """
    return ""


def without_docstring(number: int) -> str:
    return ""


def with_a_star(*numbers: int) -> str:
    """Look.

    numbers: which
    """
    return ""


def ünlawful(number: int) -> str:
    """Look.

    number: which
    """
    return ""


def bash(number: int) -> str:
    """Look.

    number: which
    """
    return ""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (without_annotation, "number"),
        (with_a_strange_annotation, "number"),
        (with_two_kinds, "number"),
        (with_an_unknown_name, "Nowhere"),
        (without_help, "number"),
        (with_help_for_nothing, "colour"),
        (without_docstring, "docstring"),
        (with_a_star, "numbers"),
        (ünlawful, "name"),
        (bash, "bash"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_definition_fails_when_the_agent_is_built(
    build: Callable[..., Any], function: Any, words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        build(tools=[tool(needs="read")(function)])
    assert function.__name__ in str(caught.value)


def test_unknown_needs_fail_when_the_agent_is_built(build: Callable[..., Any]) -> None:
    def look() -> str:
        """Look."""
        return ""

    with pytest.raises(UsageError, match="look.*everything"):
        build(tools=[tool(needs="everything")(look)])


def test_a_tool_that_says_nothing_of_its_needs_runs_something(build: Callable[..., Any]) -> None:
    @tool
    def look() -> str:
        """Look."""
        return "seen"

    assert build(tools=[look]).tools["look"].needs == "run"
    assert call(build(tools=[look], mode="ask"), "look", {}).startswith("denied: ")


def test_a_marked_function_is_still_a_function() -> None:
    assert ticket(7, [], title="x") == "7 [] bug 0.5 False x"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tools": ("bash", "grep")}, ["grep", "bash"]),
        ({"exclude_tools": tuple(PARAMETERS)[2:]}, ["read_file", "list_files"]),
    ],
    ids=["only these", "not these"],
)
def test_the_user_chooses_the_tools(
    root: Path, options: dict[str, Any], expected: list[str]
) -> None:
    known = Settings(base_url="http://127.0.0.1:9/v1", model="m", workspace=str(root), **options)
    agent = build_agent(known)
    agent.close()
    assert list(agent.tools) == expected


def test_a_chosen_tool_that_is_not_there_is_named(root: Path) -> None:
    known = Settings(base_url="http://127.0.0.1:9/v1", model="m", workspace=str(root))
    with pytest.raises(UsageError, match="sing"):
        build_agent(Settings(**{**vars(known), "exclude_tools": ("sing",)}))


@pytest.mark.parametrize(
    "annotation",
    [
        pytest.param("int[", id="no expression"),
        pytest.param("int.foo", id="no attribute"),
        pytest.param("1/0", id="no value"),
        pytest.param("int()()", id="no call"),
        pytest.param({"a": 1}, id="object"),
        pytest.param([int], id="list of a type"),
        pytest.param(7, id="number"),
        pytest.param(list, id="list of anything"),
        pytest.param(vars(typing)["List"], id="typing.List of anything"),
        pytest.param(list[list[int]], id="list of lists"),
        pytest.param(list[Literal["a"]], id="list of choices"),
        pytest.param(Literal[()], id="no choice"),
        pytest.param(dict, id="dict"),
        pytest.param(int | str | None, id="two kinds or none"),
        pytest.param(None, id="None"),
        pytest.param(typing.Any, id="Any"),
        pytest.param(typing.TypeVar("Some"), id="type variable"),
    ],
)
def test_an_annotation_that_is_no_kind_of_argument_fails_when_the_agent_is_built(
    build: Callable[..., Any], annotation: Any
) -> None:
    def look(number):
        """Look.

        number: which
        """

    look.__annotations__["number"] = annotation
    with pytest.raises(UsageError, match="look") as caught:
        build(tools=[tool(needs="read")(look)])
    assert "\n" not in str(caught.value)


@tool(needs="read")
def join(path: list[str]) -> str:
    """Join.

    path: the parts
    """
    return "/".join(path)


@tool(needs="write")
def cut(path: int) -> str:
    """Cut a path.

    path: the number of the path
    """
    return f"cut {path}"


@tool(needs="read")
def tell(path: str | None = None) -> str:
    """Tell.

    path: of what
    """
    return f"told {path}"


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("join", {"path": ["a", "b"]}, "a/b"),
        ("cut", {"path": 5}, "cut 5"),
        ("tell", {"path": None}, "told None"),
        ("tell", {"path": "a"}, "told a"),
    ],
    ids=["list", "number", "none", "text"],
)
@pytest.mark.parametrize("rules", [(), ("* secrets/**",)], ids=["no rule", "a rule for paths"])
def test_a_parameter_named_path_may_be_of_any_kind(
    build: Callable[..., Any], name: str, given: Any, expected: str, rules: tuple[str, ...]
) -> None:
    assert call(build(tools=[join, cut, tell], deny=rules), name, given) == expected


# -- from arguments to values


BASE = {"number": 1, "words": []}
DEFAULTS = {"number": 1, "words": []}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({"number": 10}, {"number": 10}, id="integer"),
        pytest.param({"number": "10"}, {"number": 10}, id="integer as text"),
        pytest.param({"number": " 10 "}, {"number": 10}, id="with blanks"),
        pytest.param({"number": 10.0}, {"number": 10}, id="whole number"),
        pytest.param({"number": "10.0"}, {"number": 10}, id="whole number as text"),
        pytest.param({"share": 1}, {"share": 1.0}, id="number"),
        pytest.param({"share": "0.25"}, {"share": 0.25}, id="number as text"),
        pytest.param({"loud": True}, {"loud": True}, id="boolean"),
        pytest.param({"loud": "true"}, {"loud": True}, id="true"),
        pytest.param({"loud": "True"}, {"loud": True}, id="True"),
        pytest.param({"loud": "false"}, {"loud": False}, id="false T16"),
        pytest.param({"loud": "False"}, {"loud": False}, id="False T16"),
        pytest.param({"loud": "0"}, {"loud": False}, id="0 as text T16"),
        pytest.param({"loud": 0}, {"loud": False}, id="0"),
        pytest.param({"loud": "no"}, {"loud": False}, id="no T16"),
        pytest.param({"title": 7}, {"title": "7"}, id="number for text"),
        pytest.param({"title": ""}, {"title": ""}, id="empty text"),
        pytest.param({"title": None}, {}, id="null is the default"),
        pytest.param({"loud": None}, {}, id="null is the default"),
        pytest.param({"words": ["a", "b"]}, {"words": ["a", "b"]}, id="list"),
        pytest.param({"words": [1]}, {"words": ["1"]}, id="list of numbers for text"),
        pytest.param({"kind": "wish"}, {"kind": "wish"}, id="choice"),
    ],
)
def test_an_argument_becomes_a_value_of_its_kind(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    bound = make_tool(ticket).bind({**BASE, **given})
    assert bound == {**DEFAULTS, **expected}
    assert [type(bound[key]) for key in expected] == [type(expected[key]) for key in expected]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        pytest.param({"number": "ten"}, "number", id="no number"),
        pytest.param({"number": 1.5}, "number", id="no whole number"),
        pytest.param({"number": True}, "number", id="a boolean is no number"),
        pytest.param({"number": [1]}, "number", id="a list is no number"),
        pytest.param({"number": "inf"}, "number", id="infinity is no integer"),
        pytest.param({"share": "much"}, "share", id="no number"),
        pytest.param({"loud": "perhaps"}, "loud", id="neither true nor false"),
        pytest.param({"loud": 2}, "loud", id="2 is no boolean"),
        pytest.param({"title": ["a"]}, "title", id="a list is no text"),
        pytest.param({"title": {"a": 1}}, "title", id="an object is no text"),
        pytest.param({"words": "a"}, "words", id="a text is no list"),
        pytest.param({"words": [["a"]]}, "words", id="a list of lists"),
        pytest.param({"kind": "joke"}, "kind", id="no choice"),
        pytest.param({"colour": "red"}, "colour", id="unknown"),
        pytest.param({"requires_approval": False}, "requires_approval", id="unknown, row 91"),
    ],
)
def test_an_argument_that_can_not_be_its_kind_is_an_error_that_names_it(
    given: dict[str, Any], name: str
) -> None:
    with pytest.raises(ToolError, match=name):
        make_tool(ticket).bind({**BASE, **given})


@pytest.mark.parametrize(
    ("name", "given", "parts"),
    [
        ("read_file", {}, ["path", "read_file(path, start?, end?)"]),
        ("bash", {"command": ["ls"]}, ["command", "string"]),
        ("write_file", {"path": "a"}, ["content", "write_file(path, content)"]),
        ("grep", {"regex": "x", "depth": 3}, ["depth", "grep(regex, path?"]),
    ],
    ids=["missing", "wrong kind", "second missing", "unknown"],
)
def test_a_call_with_wrong_arguments_says_what_the_tool_takes(
    use: Callable[..., str], name: str, given: dict[str, Any], parts: list[str]
) -> None:
    text = use(name, **given)
    assert text.startswith("error: ")
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize("raw", ["", "null", "{}", "  ", '"{}"', "```json\n{}\n```"])
def test_no_arguments_in_any_form_are_no_arguments(build: Callable[..., Any], raw: str) -> None:
    assert call(build(), "list_files", raw) == "(no files match * in .)"


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("read_file", {"file_path": "f"}),
        ("read_file", {"filePath": "f"}),
        ("read_file", {"file": "f"}),
        ("read_file", {"filename": "f"}),
        ("bash", {"cmd": "cat f"}),
        ("edit_file", {"path": "f", "old_string": "old", "new_string": "new"}),
        ("edit_file", {"path": "f", "old_str": "old", "new_str": "new"}),
        ("edit_file", {"file_path": "f", "oldText": "old", "newText": "new"}),
        ("edit_file", {"path": "f", "old": "o", "new": "0", "replace_all": "true"}),
        ("write_file", {"file_path": "f", "content": "x"}),
        ("grep", {"query": "old", "path": "f"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_names_that_models_invent_are_understood(
    root: Path, use: Callable[..., str], name: str, given: dict[str, str]
) -> None:
    (root / "f").write_text("old\n")
    assert not use(name, **given).startswith(("error: ", "denied: "))


def test_a_pattern_is_not_taken_for_the_regex_when_both_are_there(
    root: Path, use: Callable[..., str]
) -> None:
    (root / "a.py").write_text("x\n")
    (root / "a.txt").write_text("x\n")
    assert use("grep", regex="x", pattern="*.py") == "a.py:1:x"


HUGE = "9" * 400


@pytest.mark.parametrize(
    ("name", "raw", "expected"),
    [
        ("read_file", f'{{"path": "f", "start": {HUGE}}}', "(f has 3 lines)"),
        ("read_file", f'{{"path": "f", "start": -{HUGE}}}', "1: x\n2: y\n3: x"),
        ("read_file", f'{{"path": "f", "end": {HUGE}}}', "1: x\n2: y\n3: x"),
        ("read_file", f'{{"path": "f", "start": "{HUGE}"}}', "error: start must be integer, not"),
        ("read_file", '{"path": "f", "start": 1e400}', "error: the arguments are not a JSON"),
        ("read_file", f'{{"path": "f", "start": {"9" * 5000}}}', "error: the arguments are not a"),
        ("list_files", f'{{"offset": {HUGE}}}', "(there are no files behind 999"),
        ("grep", f'{{"regex": "x", "context": {HUGE}}}', "f:1:x\nf-2-y\nf:3:x"),
        ("bash", f'{{"command": "echo hi", "timeout": {HUGE}}}', "hi\n[exit code 0]"),
        ("ticket", f'{{"number": 1, "words": [], "share": {HUGE}}}', "error: share must be number"),
        ("ticket", f'{{"number": 1, "words": [], "loud": {HUGE}}}', "error: loud must be boolean"),
        ("ticket", f'{{"number": {HUGE}, "words": []}}', f"{HUGE} [] bug 0.5 False None"),
    ],
    ids="start|below 1|end|text|float|5000 digits|offset|context|timeout|share|bool|int".split("|"),
)
def test_a_number_of_any_length_is_taken_or_refused_in_words(
    root: Path, build: Callable[..., Any], name: str, raw: str, expected: str
) -> None:
    (root / "f").write_text("x\ny\nx\n")
    assert call(build(tools=[ticket]), name, raw).startswith(expected)


# -- read_file


ODD_LINES = "a\n\x0c\nb\n\nx='a\u2028b'\n\x85\x1c\nwindows\r\n\ttab\nNEEDLE\nlast"


@pytest.mark.parametrize("end", ["", "\n"], ids=["no newline at the end", "newline at the end"])
def test_lines_are_numbered_as_grep_numbers_them(
    root: Path, use: Callable[..., str], end: str
) -> None:
    (root / "f").write_text(ODD_LINES + end, newline="")
    command = ["grep", "-n", "", "f"]
    done = subprocess.run(command, cwd=root, capture_output=True, env=ENVIRON, check=True)
    lines = done.stdout.decode().replace("\r\n", "\n").removesuffix("\n").split("\n")
    expected = [re.sub(r"^(\d+):", r"\1: ", line) for line in lines]
    assert use("read_file", path="f").split("\n") == expected
    assert use("grep", regex="NEEDLE") == "f:9:NEEDLE"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(b"", "(the file is empty)", id="empty"),
        pytest.param(b"\n", "1: ", id="one empty line"),
        pytest.param(b"a\n\n", "1: a\n2: ", id="an empty line at the end"),
        pytest.param(b"\xef\xbb\xbfa\n", "1: a", id="BOM"),
        pytest.param(b"caf\xe9\n", "1: caf\ufffd", id="no UTF-8 R16"),
        pytest.param(b"a\r\nb\r\n", "1: a\n2: b", id="CRLF"),
        pytest.param("\ufeffé\nb\n".encode("utf-16-le"), "1: é\n2: b", id="UTF-16"),
    ],
)
def test_a_file_is_read_as_text(
    root: Path, use: Callable[..., str], data: bytes, expected: str
) -> None:
    (root / "f").write_bytes(data)
    assert use("read_file", path="f") == expected


def test_a_range_of_lines_is_read(root: Path, use: Callable[..., str]) -> None:
    (root / "f").write_text("".join(f"line {n}\n" for n in range(1, 101)))
    assert use("read_file", path="f", start="10", end=11.0) == "10: line 10\n11: line 11"
    assert use("read_file", path="f", start=100) == "100: line 100"
    assert "100 lines" in use("read_file", path="f", start=101)


def test_a_long_file_comes_in_pages_that_together_are_the_file(
    root: Path, use: Callable[..., str]
) -> None:
    lines = [f"the line with the number {n}" for n in range(1, 3001)]
    (root / "f").write_text("\n".join(lines) + "\n")
    seen, start = [], 1
    while start:
        text = use("read_file", path="f", start=start)
        assert len(text) <= 20_000
        seen += [line for line in text.split("\n") if re.match(r"\d+: ", line)]
        found = re.search(r"\[.*start=(\d+)\]$", text)
        start = int(found[1]) if found else 0
    assert seen == [f"{n}: {line}" for n, line in enumerate(lines, 1)]


def test_a_huge_line_is_cut_and_says_how_to_get_the_rest(
    root: Path, use: Callable[..., str]
) -> None:
    (root / "m.js").write_text("x" * 5_000_000 + "\nnext\n")
    text = use("read_file", path="m.js")
    assert len(text) < 3000
    assert text.endswith("\n2: next")
    assert str(5_000_000 - 2000) in text and "cut -b" in text


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("none.tsx", "does not exist.*none.ts"),
        ("folder", "folder.*list_files"),
        ("pipe", "named pipe"),
        ("zip", "binary file .6 bytes"),
        ("../out", "outside"),
        ("", "path"),
    ],
)
def test_what_can_not_be_read_is_explained(
    root: Path, use: Callable[..., str], path: str, words: str
) -> None:
    (root / "none.ts").touch()
    (root / "folder").mkdir()
    os.mkfifo(root / "pipe")
    (root / "zip").write_bytes(b"PK\x03\x04\x00\x00")
    text = use("read_file", path=path)
    assert re.match(rf"(error|denied): .*{words}", text), text


def test_one_line_of_a_huge_file_is_read_at_once(root: Path, use: Callable[..., str]) -> None:
    with (root / "big").open("wb") as file:
        file.write(b"first\n")
        file.write(b"x\n" * 8000)
        file.truncate(50_000_000_000)  # sparse: it takes no room on the disk
    assert use("read_file", path="big", start=1, end=1).startswith("1: first")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({"start": -5}, "1: x\n2: y\n3: x", id="start below 1"),
        pytest.param({"start": 0, "end": 1}, "1: x", id="start 0"),
        pytest.param({"end": 0}, "1: x", id="end 0"),
        pytest.param({"end": -7}, "1: x", id="end below 0"),
        pytest.param({"start": 2, "end": 99}, "2: y\n3: x", id="end behind the last line"),
        pytest.param({"start": 4}, "(f has 3 lines)", id="start behind the last line"),
        pytest.param({"start": 5, "end": 2}, "(f has 3 lines)", id="end before start"),
    ],
)
def test_lines_out_of_range_are_brought_into_range_or_counted(
    root: Path, use: Callable[..., str], given: dict[str, int], expected: str
) -> None:
    (root / "f").write_text("x\ny\nx\n")
    assert use("read_file", path="f", **given) == expected


# -- list_files and grep

SKIPPED = (
    "[skipped: 3 folders (.venv, __pycache__, node_modules); a path that names one is searched]"
)


@pytest.fixture
def tree(root: Path) -> Path:
    """A small project, with folders that are no part of it."""
    names = """a.py src/b.py src/deep/c.py src/c.txt .github/workflows/ci.yml .hidden docs/README.md
    .git/config node_modules/p/j.py .venv/lib/v.py __pycache__/x.py .agent/sessions/s.json"""
    for name in names.split():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"text of {name}\n")
    return root


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param({"pattern": "*.py"}, "a.py src/b.py src/deep/c.py", id="name at any depth"),
        pytest.param({"pattern": "src/*.py"}, "src/b.py", id="with a slash one level"),
        pytest.param({"pattern": "src/**"}, "src/b.py src/c.txt src/deep/c.py", id="all below"),
        pytest.param(
            {"pattern": "**/*.py"}, "a.py src/b.py src/deep/c.py", id="any folders, also none"
        ),
        pytest.param({"pattern": "**/c.*"}, "src/c.txt src/deep/c.py", id="any folder"),
        pytest.param({"pattern": "?.py"}, "a.py src/b.py src/deep/c.py", id="one character"),
        pytest.param({"pattern": "[ab].py"}, "a.py src/b.py", id="class"),
        pytest.param({"pattern": "[!a].py"}, "src/b.py src/deep/c.py", id="negated class"),
        pytest.param(
            {"pattern": ".github/workflows/*.yml"}, ".github/workflows/ci.yml", id="dot folder G07"
        ),
        pytest.param({"pattern": ".*"}, ".hidden", id="dot file"),
        pytest.param(
            {"path": "src"}, "src/b.py src/c.txt src/deep/c.py", id="a folder of the workspace"
        ),
        pytest.param({"path": "src", "pattern": "deep/*"}, "src/deep/c.py", id="below the folder"),
        pytest.param({"path": "src", "pattern": "src/*.py"}, "src/b.py", id="from the root"),
    ],
)
def test_files_are_listed_by_pattern(
    tree: Path, use: Callable[..., str], arguments: dict[str, str], expected: str
) -> None:
    found = use("list_files", **arguments).removesuffix(f"\n{SKIPPED}")
    assert found.split("\n") == expected.split()


def test_all_files_are_listed_but_not_what_is_no_part_of_the_project(
    tree: Path, use: Callable[..., str]
) -> None:
    expected = ".github/workflows/ci.yml .hidden a.py docs/README.md src/b.py src/c.txt"
    assert use("list_files").split("\n") == [*expected.split(), "src/deep/c.py", SKIPPED]


def test_nothing_found_is_said_and_no_error(tree: Path, use: Callable[..., str]) -> None:
    assert use("list_files", pattern="*.rs") == f"(no files match *.rs in .)\n{SKIPPED}"
    assert use("list_files", path="nowhere").startswith("error: ")


@pytest.mark.parametrize("name", ["list_files", "grep"])
def test_pages_hold_each_row_once_in_the_same_order(
    root: Path, use: Callable[..., str], name: str
) -> None:
    for n in range(2000):
        (root / f"file-with-a-long-name-{n:04}").write_text("match\n")
    wanted, seen, offset = {"regex": "match"} if name == "grep" else {}, [], 0
    while offset is not None:
        text = use(name, offset=offset, **wanted)
        assert len(text) <= 20_000
        seen += [line for line in text.split("\n") if line.startswith("file")]
        found = re.search(r"of 2000; .*offset=(\d+)\]$", text)
        offset = int(found[1]) if found else None
    rows = [f"file-with-a-long-name-{n:04}" for n in range(2000)]
    assert seen == [f"{row}:1:match" if name == "grep" else row for row in rows]


def test_odd_things_in_a_tree_neither_block_nor_loop(root: Path, use: Callable[..., str]) -> None:
    (root / "d").mkdir()
    (root / "d" / "up").symlink_to("..")
    (root / "broken").symlink_to("nowhere")
    (root / "out").symlink_to("/etc/passwd")
    os.mkfifo(root / "pipe")
    (root / "f").write_text("root:\n")
    (root / "zip").write_bytes(b"root:\0")
    skipped = "[skipped: 4 links, pipes or devices, 1 binary]"
    assert use("grep", regex="root:") == f"f:1:root:\n{skipped}"
    assert "f" in use("list_files").split("\n")


LINES = "one\nTwo\nthree\nfour\nfive\nTWO\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param({"regex": "T"}, "f:2:Two\nf:6:TWO", id="case counts"),
        pytest.param(
            {"regex": "two", "ignore_case": True}, "f:2:Two\nf:6:TWO", id="case does not count"
        ),
        pytest.param({"regex": "^t.*e$"}, "f:3:three", id="line by line"),
        pytest.param({"regex": "four", "path": "f"}, "f:4:four", id="one file has its name too"),
        pytest.param(
            {"regex": "four", "context": 1}, "f-3-three\nf:4:four\nf-5-five", id="context"
        ),
        pytest.param(
            {"regex": "Two|four", "context": 1},
            "f-1-one\nf:2:Two\nf-3-three\nf:4:four\nf-5-five",
            id="contexts that touch",
        ),
        pytest.param({"regex": "seven"}, "(no match for seven in .)", id="no match"),
        pytest.param({"regex": "T", "pattern": "*.py"}, "(no match for T in .)", id="no file"),
    ],
)
def test_lines_are_found(
    root: Path, use: Callable[..., str], arguments: dict[str, Any], expected: str
) -> None:
    (root / "f").write_text(LINES)
    assert use("grep", **arguments) == expected


@pytest.mark.parametrize("regex", ["foo(", "[", "*", "a{2,1}"])
def test_an_invalid_regex_is_an_error_with_the_reason(use: Callable[..., str], regex: str) -> None:
    text = use("grep", regex=regex)
    assert text.startswith("error: ")
    assert re.search("position|repeat|range", text), text


def test_a_match_in_a_huge_line_is_shown_with_what_is_around_it(
    root: Path, use: Callable[..., str]
) -> None:
    (root / "m.js").write_text("a" * 300_000 + "<stats>" + "b" * 300_000 + "\n")
    text = use("grep", regex="stats")
    assert text.startswith("m.js:1:")
    assert "aaa<stats>bbb" in text and len(text) < 1000


def test_grep_finds_the_lines_that_grep_finds(root: Path, use: Callable[..., str]) -> None:
    (root / "f").write_bytes((ODD_LINES + "\n").encode() + b"caf\xe9 a\n")
    command = ["grep", "-na", "a", "f"]
    done = subprocess.run(command, cwd=root, capture_output=True, env=ENVIRON, check=True)
    numbers = [line.split(":")[0] for line in done.stdout.decode("latin-1").split("\n") if line]
    assert [line.split(":")[1] for line in use("grep", regex="a").split("\n")] == numbers


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("list_files", {"offset": -1}, "e\nf"),
        ("list_files", {"offset": 2}, "(there are no files behind 2)"),
        ("list_files", {"offset": 1}, "f\n[files 2-2 of 2]"),
        ("grep", {"regex": "x", "offset": -5}, "f:1:x\nf:3:x"),
        ("grep", {"regex": "x", "offset": 10**9}, "(there are no matches behind 1000000000)"),
        ("grep", {"regex": "x", "context": -1}, "f:1:x\nf:3:x"),
        ("grep", {"regex": "x", "context": -1, "offset": 1}, "f:3:x\n[matches 2-2 of 2]"),
    ],
    ids="files below|files behind|files page|below|behind|context below|context and page".split(
        "|"
    ),
)
def test_offsets_and_contexts_out_of_range_are_brought_into_range_or_counted(
    root: Path, use: Callable[..., str], name: str, given: dict[str, Any], expected: str
) -> None:
    (root / "e").touch()
    (root / "f").write_text("x\ny\nx\n")
    assert use(name, **given) == expected


def test_a_context_of_millions_of_lines_shows_few_and_takes_no_memory(
    root: Path, use: Callable[..., str]
) -> None:
    (root / "f").write_text("\n" * 500 + "needle\n" + "\n" * 500)
    tracemalloc.start()
    try:
        lines = use("grep", regex="needle", context=3_000_000).split("\n")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    middle = len(lines) // 2
    assert (lines[middle], lines[0]) == ("f:501:needle", f"f-{501 - middle}-")
    assert 10 <= middle <= 100
    assert most < 10_000_000


@pytest.mark.parametrize(
    ("rule", "name", "given", "expected"),
    [
        pytest.param("grep secrets/**", "grep", {"regex": "k"}, "b:1:k", id="grep finds"),
        pytest.param("grep secrets/**", "list_files", {}, "b\nsecrets/a", id="not for list_files"),
        pytest.param("list_files secrets/**", "list_files", {}, "b", id="list_files lists"),
        pytest.param("read_file secrets/**", "grep", {"regex": "k"}, "b:1:k", id="what is read"),
        pytest.param(
            "list_files .", "list_files", {}, "denied: the rule deny 'list_files .'", id="left out"
        ),
        pytest.param(
            "list_files .",
            "list_files",
            {"path": "."},
            "denied: the rule deny 'list_files .'",
            id="said",
        ),
        pytest.param("list_files .", "grep", {"regex": "k"}, "b:1:k\nsecrets/a:1:k", id="not grep"),
    ],
)
def test_a_denied_path_is_not_searched_also_where_the_call_does_not_name_it(
    root: Path, build: Callable[..., Any], rule: str, name: str, given: Any, expected: str
) -> None:
    (root / "secrets").mkdir()
    (root / "secrets" / "a").write_text("k\n")
    (root / "b").write_text("k\n")
    assert call(build(deny=(rule,)), name, given) == expected


# -- write_file


def test_a_written_file_holds_what_was_sent_and_the_bytes_are_reported(
    root: Path, use: Callable[..., str]
) -> None:
    text = "a\r\nü\\n\\u0000 “quoted” \\g<0>"
    said = use("write_file", path="new/f.txt", content=text)
    assert (root / "new" / "f.txt").read_bytes() == text.encode()
    assert "new/f.txt" in said and f"{len(text.encode())} bytes" in said
    assert "no newline" in said


def test_an_empty_file_can_be_written(root: Path, use: Callable[..., str]) -> None:
    assert "0 bytes" in use("write_file", path="empty", content="")
    assert (root / "empty").read_bytes() == b""


def test_a_file_that_is_replaced_keeps_its_mode_and_encoding(
    root: Path, use: Callable[..., str]
) -> None:
    (root / "f").write_text("\ufeffé", encoding="utf-16-le")
    (root / "f").chmod(0o755)
    use("write_file", path="f", content="ü")
    assert (root / "f").read_bytes() == "\ufeffü".encode("utf-16-le")
    assert stat.S_IMODE((root / "f").stat().st_mode) == 0o755


@pytest.mark.parametrize("path", ["folder", "pipe", "../out", "folder/../../out", "/tmp/x"])
def test_a_file_is_not_written_where_no_file_can_be(
    root: Path, use: Callable[..., str], path: str
) -> None:
    (root / "folder").mkdir()
    os.mkfifo(root / "pipe")
    assert use("write_file", path=path, content="x").startswith(("error: ", "denied: "))
    assert sorted(p.name for p in root.iterdir()) == ["folder", "pipe"]
    assert not (root.parent / "out").exists()


def test_a_file_that_changed_since_it_was_read_is_not_replaced_blindly(
    root: Path, use: Callable[..., str]
) -> None:
    (root / "f").write_text("one\n")
    use("read_file", path="f")
    (root / "f").write_text("one\ntwo, by the user\n")
    text = use("write_file", path="f", content="mine\n")
    assert text.startswith("error: ") and "changed" in text
    assert (root / "f").read_text() == "one\ntwo, by the user\n"
    use("read_file", path="f")
    assert use("write_file", path="f", content="mine\n").startswith("replaced f")


@pytest.mark.parametrize("lost", ["\0", "\ufffd", "\ud83d"], ids=["NUL", "U+FFFD", "half a pair"])
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("write_file", {"path": "f", "content": "new{}\n"}),
        ("write_file", {"path": "g", "content": "{}"}),
        ("edit_file", {"path": "f", "old": "old", "new": "n{}w"}),
    ],
    ids=["replaced", "created", "edited"],
)
def test_a_text_in_which_a_character_was_lost_is_not_written(
    root: Path, use: Callable[..., str], name: str, given: dict[str, str], lost: str
) -> None:
    (root / "f").write_text("old\n")
    text = use(name, **{key: value.replace("{}", lost) for key, value in given.items()})
    assert text.startswith("error: ") and "U+FFFD" in text
    assert {path.name: path.read_bytes() for path in root.iterdir()} == {"f": b"old\n"}


def test_a_file_that_holds_a_replacement_character_may_keep_it(
    root: Path, use: Callable[..., str]
) -> None:
    (root / "f").write_text("caf\ufffd old\n")
    use("edit_file", path="f", old="\ufffd old", new="\ufffd new")
    assert (root / "f").read_text() == "caf\ufffd new\n"


# -- edit_file


def edited(
    root: Path, use: Callable[..., str], data: bytes, old: str, new: str, **more: Any
) -> tuple[bytes, str]:
    """Edit a file that holds this; what it holds then, and what was said."""
    (root / "f").write_bytes(data)
    text = use("edit_file", path="f", old=old, new=new, **more)
    return (root / "f").read_bytes(), text


@pytest.mark.parametrize(
    ("data", "old", "new", "expected"),
    [
        pytest.param(b"a\r\nb\r\n", "a", "A", b"A\r\nb\r\n", id="CRLF E01"),
        pytest.param(b"x\r\ny\r\n", "x\ny", "x\nz", b"x\r\nz\r\n", id="lines of CRLF E02"),
        pytest.param(b"x\r\ny\r\n", "x\r\ny", "x\r\nz", b"x\r\nz\r\n", id="CRLF in the call"),
        pytest.param(b"x\ny\n", "x\r\ny", "x\r\nz", b"x\nz\n", id="CRLF in the call, LF here"),
        pytest.param(b"x\r\ny\r\n", "x", "x\nz", b"x\r\nz\r\ny\r\n", id="a new line in CRLF"),
        pytest.param(b"a\r\nb\nc", "c", "C", b"a\r\nb\nC", id="mixed E03"),
        pytest.param(b"a\r\nb\nc\n", "b\nc", "B\nC", b"a\r\nB\nC\n", id="mixed, the region LF"),
        pytest.param(b"n=1\n# caf\xe9\n", "n=1", "n=2", b"n=2\n# caf\xe9\n", id="latin-1 E06"),
        pytest.param(b"\xef\xbb\xbfhello\n", "hello", "bye", b"\xef\xbb\xbfbye\n", id="BOM E09"),
        pytest.param(
            "\ufeffé=1\n".encode("utf-16-be"),
            "é=1",
            "ü=2",
            "\ufeffü=2\n".encode("utf-16-be"),
            id="UTF-16",
        ),
        pytest.param(b"q\n", "q", "[\"']", b"[\"']\n", id="quotes stay E16"),
        pytest.param(b"'%s'\n", "'%s'", "‘%s’", "‘%s’\n".encode(), id="quotes can change E17"),
        pytest.param(b"p\n", "p", 'f("hi\\n");', b'f("hi\\n");\n', id="backslash-n stays E32"),
        pytest.param(b"p\n", "p", "x='\\u0000'", b"x='\\u0000'\n", id="\\u0000 stays E32"),
        pytest.param(b"x\n", "x", r"\g<0>\1\d$&", b"\\g<0>\\1\\d$&\n", id="literal E33"),
        pytest.param(b"a.c abc\n", "a.c", "x", b"x abc\n", id="old is no regex"),
        pytest.param(b"a\nb\n", "a\n", "", b"b\n", id="new may be empty"),
        pytest.param(b"x", "x", "y", b"y", id="no newline at the end"),
    ],
)
def test_an_edit_changes_exactly_its_place(
    root: Path, use: Callable[..., str], data: bytes, old: str, new: str, expected: bytes
) -> None:
    after, text = edited(root, use, data, old, new)
    assert after == expected
    assert text.startswith("edited f: ") and f"{len(expected)} bytes" in text


@pytest.mark.parametrize(
    ("data", "old", "new", "words"),
    [
        pytest.param(b"aaa", "aa", "b", r"2 .*lines 1, 1", id="overlapping E18"),
        pytest.param(b"x = 1\n" * 3, "x = 1\nx = 1", "y", r"2 .*lines 1, 2", id="lines E18"),
        pytest.param(b"a\n\n\n\nb\n", "\n\n", "\n", r"3 .*lines 1, 2, 3", id="blank lines E18"),
        pytest.param(b"k\nv\nk\nk\n", "k", "K", r"3 .*lines 1, 3, 4", id="three places"),
        pytest.param(b"abc", "", "X", "empty.*write_file", id="empty E19"),
        pytest.param(b"x=1\n", "x=1", "x=1", "same", id="no change E20"),
        pytest.param(
            b"def f():\n    return foo(a, b)\n",
            "return foo(a,b)",
            "return 1",
            r"(?s)not occur.*2: .*return foo\(a, b\)",
            id="nearly E34",
        ),
        pytest.param(
            b"\tif x:\n\t\ty()\n", "    if x:\n        y()", "z", r"(?s)tab.*\\t\\ty", id="tabs E14"
        ),
        pytest.param(b"abc\n", "quite another thing", "z", "not occur", id="nothing like it"),
        pytest.param(b"caf\xe9 n=1\n", "n=1", "ü=1", "UTF-8", id="no room for ü E07"),
        pytest.param(b"PK\0\1 a", "a", "b", "binary", id="binary"),
        pytest.param(b"a\r\nb", "a\n\r\nb", "z", "not occur", id="line ends that are not there"),
    ],
)
def test_an_edit_that_is_not_clear_changes_nothing_and_says_why(
    root: Path, use: Callable[..., str], data: bytes, old: str, new: str, words: str
) -> None:
    after, text = edited(root, use, data, old, new)
    assert after == data
    assert text.startswith("error: ")
    assert re.search(words, text), text


@pytest.mark.parametrize(
    ("data", "old", "new", "expected"),
    [
        pytest.param(b"k v k k\n", "k", "K", b"K v K K\n", id="three places"),
        pytest.param(b"aaa", "aa", "X", b"Xa", id="overlapping"),
        pytest.param(b"a\r\nb\na\n", "a\n", "c\nd\n", b"c\r\nd\r\nb\nc\nd\n", id="each its ends"),
        pytest.param(b"k", "k", "kk", b"kk", id="once"),
    ],
)
def test_an_edit_of_all_places_changes_each(
    root: Path, use: Callable[..., str], data: bytes, old: str, new: str, expected: bytes
) -> None:
    assert edited(root, use, data, old, new, all=True)[0] == expected


def test_all_may_be_turned_off_with_a_word(root: Path, use: Callable[..., str]) -> None:
    after, text = edited(root, use, b"kk", "k", "K", all="false")
    assert (after, text[:7]) == (b"kk", "error: ")


def test_an_edit_keeps_the_mode(root: Path, use: Callable[..., str]) -> None:
    (root / "f").write_text("#!/bin/sh\n")
    (root / "f").chmod(0o755)
    use("edit_file", path="f", old="sh", new="bash")
    assert stat.S_IMODE((root / "f").stat().st_mode) == 0o755


def test_an_edit_of_what_is_not_there_names_what_is(root: Path, use: Callable[..., str]) -> None:
    (root / "field.ts").touch()
    text = use("edit_file", path="field.tsx", old="a", new="b")
    assert re.match("error: field.tsx does not exist.*field.ts", text)


def test_two_edits_of_one_file_in_one_reply_are_both_made(
    root: Path, build: Callable[..., Any]
) -> None:
    (root / "f").write_text("".join(f"{n}\n" for n in range(1, 101)))
    items = [
        {
            "id": old,
            "function": {
                "name": "edit_file",
                "arguments": json.dumps({"path": "f", "old": f"\n{old}\n", "new": f"\n{new}\n"}),
            },
        }
        for old, new in (("50", "FIFTY"), ("75", "SEVENTY-FIVE"))
    ]
    agent = build()
    agent.run_calls(agent.transcript.add_reply({"content": None, "tool_calls": items}))
    lines = (root / "f").read_text().split("\n")
    assert (lines[49], lines[74], len(lines)) == ("FIFTY", "SEVENTY-FIVE", 101)


# -- bash


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        pytest.param("echo hi", "hi\n[exit code 0]", id="output"),
        pytest.param("true", "(no output)\n[exit code 0]", id="none"),
        pytest.param("echo a; echo b >&2; exit 3", "a\nb\n[exit code 3]", id="both streams"),
        pytest.param("printf x", "x\n[exit code 0]", id="no newline at the end"),
        pytest.param("kill -9 $$", "(no output)\n[ended by signal 9]", id="signal"),
        pytest.param("(echo bad; exit 1) | tail -1", "bad\n[exit code 0]", id="neutral B22"),
        pytest.param("printf '\\377'", "\ufffd\n[exit code 0]", id="no UTF-8"),
    ],
)
def test_the_exit_code_stands_last(use: Callable[..., str], command: str, expected: str) -> None:
    assert use("bash", command=command) == expected


@pytest.mark.long
def test_a_timeout_stands_last_and_the_output_is_kept(use: Callable[..., str]) -> None:
    text = use("bash", command="echo PROGRESS; sleep 1000", timeout=1)
    first, last = text.split("\n")
    assert first == "PROGRESS"
    assert re.search("timed out after 1 s", last)


def test_the_exit_code_stands_last_also_behind_a_flood(use: Callable[..., str]) -> None:
    text = use("bash", command="seq 1 20000; echo FATAL; exit 1")
    assert len(text) <= 20_000
    assert text.startswith("1\n2\n3\n")
    assert text.endswith("\n19999\n20000\nFATAL\n[exit code 1]")
    assert re.search(r"\d+ (characters|bytes) not shown", text)


@pytest.mark.parametrize("lines", [5000, 60_000], ids=["clipped", "far too much"])
def test_the_whole_of_a_clipped_output_can_be_read(
    root: Path, build: Callable[..., Any], lines: int
) -> None:
    agent = build(save_session=True)
    text = call(agent, "bash", {"command": f"seq 1 {lines}"})
    named = re.search(r"read_file (\.agent/output/\S+?/\S+?\.txt)", text)
    assert named, text[-300:]
    assert (root / named[1]).read_text() == "".join(f"{n}\n" for n in range(1, lines + 1))
    assert stat.S_IMODE((root / named[1]).stat().st_mode) == 0o600
    assert call(agent, "read_file", {"path": named[1], "start": 3000, "end": 3000}) == "3000: 3000"


def test_a_background_job_is_named_and_does_not_hold_the_call(use: Callable[..., str]) -> None:
    began = time.monotonic()
    text = use("bash", command="sleep 1000 & echo hi")
    assert re.fullmatch(r"hi\n\[still running.*pid \d+.*\]\n\[exit code 0\]", text), text
    assert time.monotonic() - began < 30


def test_live_output_is_reported_with_the_id_of_the_call(build: Callable[..., Any]) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    agent = build(emit=lambda kind, **data: events.append((kind, data)))
    call(agent, "bash", {"command": "echo one; echo two"})
    live = [data for kind, data in events if kind == "tool_output"]
    (use,) = [data for kind, data in events if kind == "tool_use"]
    assert "".join(data["text"] for data in live) == "one\ntwo\n"
    assert {data["id"] for data in live} == {use["id"]}


@pytest.mark.parametrize("timeout", [0, -5, 10_000_000])
def test_an_odd_timeout_is_brought_into_range(use: Callable[..., str], timeout: int) -> None:
    assert use("bash", command="echo hi", timeout=timeout) == "hi\n[exit code 0]"


BEAT = "n=$(wc -l <beat); until [ $(wc -l <beat) -gt $((n + 2)) ]; do sleep 0.02; done"


@pytest.mark.long
@pytest.mark.parametrize(
    "job", ["({}) >/dev/null 2>&1 &", "setsid bash -c '{}' >/dev/null 2>&1 &"], ids=["&", "setsid"]
)
def test_a_background_loop_belongs_to_the_call_that_began_it(
    root: Path, use: Callable[..., str], job: str
) -> None:
    (root / "beat").touch()
    loop = job.replace("{}", "while sleep 0.05 || touch died; do echo >>beat; done")
    assert "still running in the background" in use("bash", command=loop)
    assert use("bash", command=f"{BEAT}; echo hi") == "hi\n[exit code 0]"
    assert use("bash", command="sleep 1000", timeout=1).endswith("background long commands with &]")
    assert use("bash", command=f"{BEAT}; echo on", timeout=20) == "on\n[exit code 0]"
    assert not (root / "died").exists()


# -- the person


UNATTENDED = "running unattended; use your best judgement and say what you assumed"


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        pytest.param(None, UNATTENDED, id="nobody there"),
        pytest.param(lambda question: None, UNATTENDED, id="gone"),
        pytest.param(lambda question: "", "(no answer given)", id="empty"),
        pytest.param(lambda question: "  \n", "(no answer given)", id="blank"),
        pytest.param(lambda question: "blue", "blue", id="answer"),
        pytest.param(lambda question: f"re: {question.text}", "re: Which?", id="the question"),
        pytest.param(lambda question: True, UNATTENDED, id="no text"),
        pytest.param(lambda question: b"blue", UNATTENDED, id="bytes"),
        pytest.param(lambda question: 1 / 0, UNATTENDED, id="a failure"),
    ],
)
def test_the_user_is_asked(build: Callable[..., Any], ask: Any, expected: str) -> None:
    assert call(build(ask=ask), "ask_user", {"question": "Which?"}) == expected


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        pytest.param(None, "- one two\n", id="new"),
        pytest.param("# Notes", "# Notes\n- one two\n", id="no newline at the end"),
        pytest.param("# Notes\n", "# Notes\n- one two\n", id="newline at the end"),
    ],
)
def test_a_note_is_one_line_that_a_person_agreed_to(
    root: Path, build: Callable[..., Any], before: str | None, expected: str
) -> None:
    asked = []
    if before is not None:
        (root / "AGENTS.md").write_text(before)
    agent = build(ask=lambda question: asked.append(question.text) or "y")
    call(agent, "note", {"text": "one\n two"})
    assert (root / "AGENTS.md").read_text() == expected
    assert len(asked) == 1 and "+- one two" in asked[0]


@pytest.mark.parametrize("mode", ["ask", "auto"])
@pytest.mark.parametrize("unattended", [False, True])
def test_a_note_is_not_kept_when_nobody_can_confirm_it(
    root: Path, build: Callable[..., Any], mode: str, unattended: bool
) -> None:
    agent = build(mode=mode, unattended=unattended)
    assert call(agent, "note", {"text": "obey"}) == "not kept: nobody to confirm"
    assert not (root / "AGENTS.md").exists()


def test_a_note_that_the_person_refuses_is_not_kept(root: Path, build: Callable[..., Any]) -> None:
    text = call(build(ask=lambda question: "n"), "note", {"text": "obey"})
    assert text.startswith("denied: ")
    assert not (root / "AGENTS.md").exists()


# -- the web


class Site(BaseHTTPRequestHandler):
    """A small site; `seen` on the server holds the paths that were asked for."""

    pages: dict[str, tuple[str, bytes]] = {
        "/plain": ("text/plain", b"plain words"),
        "/gbk": ("text/html; charset=gbk", "<p>中文</p>".encode("gbk")),
        "/odd": ("text/html; charset=nonsense", "<p>grün</p>".encode()),
        "/pdf": ("application/pdf", b"%PDF-1.7 \x00\x01\x02" * 1000),
        "/long": ("text/plain", "".join(f"{n:06}\n" for n in range(30_000)).encode()),
        "/html": (
            "text/html; charset=utf-8",
            b"<html><head><title>T</title><script>evil()</script><style>p{}</style></head><body>"
            b"<h1>Head</h1><p>Some <a href='http://x.example/y'>link</a> &amp; more</p>"
            b"<table><tr><th>Plan</th><th>Price</th></tr><tr><td>Pro</td><td>29</td></tr></table>"
            b"</body></html>",
        ),
    }

    def do_GET(self) -> None:
        self.server.seen.append(self.path)
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path == "/endless":
            self.endless()
        elif self.path in self.pages:
            kind, body = self.pages[self.path]
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)
        else:
            self.send_error(404, "Gone fishing")

    def endless(self) -> None:
        """Send text without an end, until the client leaves."""
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        try:
            for _ in range(10_000):
                self.wfile.write(b"x" * 65536)
                self.server.sent += 65536
        except ConnectionError:
            return

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@pytest.fixture
def site() -> Iterator[Any]:
    """The site, on 127.0.0.1."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.daemon_threads, server.seen, server.sent = True, [], 0
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def fetch(build: Callable[..., Any]) -> Callable[..., str]:
    """Fetch pages with the network allowed and 127.0.0.1 named by the user."""
    agent = build(network=True, fetch_hosts=("127.0.0.1",))
    return lambda url, **more: call(agent, "fetch_url", {"url": url, **more})


def test_a_page_comes_as_text_that_is_marked_as_foreign(
    site: Any, fetch: Callable[..., str]
) -> None:
    text = fetch(f"{site.url}/plain")
    found = re.fullmatch(r"<(\S+) (?s:.*)>\nplain words\n</(\S+)>\n\[.*\]", text)
    assert found and found[1] == found[2]
    assert f"{site.url}/plain" in text


def test_the_mark_of_foreign_text_can_not_be_guessed(site: Any, fetch: Callable[..., str]) -> None:
    marks = {fetch(f"{site.url}/plain").split(" ")[0] for _ in range(2)}
    assert len(marks) == 2


@pytest.mark.skipif(
    importlib.util.find_spec("trafilatura") is not None, reason="trafilatura reads pages its way"
)
def test_a_web_page_is_made_readable(site: Any, fetch: Callable[..., str]) -> None:
    text = fetch(f"{site.url}/html")
    assert "Some link (http://x.example/y) & more" in text
    assert re.search(r"Plan \| Price\s*\n\s*(\| )?Pro \| 29", text), text
    assert "evil" not in text and "p{}" not in text and "<" not in text[20:-60]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/gbk", "中文"),
        ("/odd", "grün"),
        ("/pdf", "error: .*application/pdf.*not text"),
        ("/nowhere", "error: .*404"),
        ("/to//plain", "plain words"),
    ],
)
def test_what_a_server_sends_is_read_or_explained(
    site: Any, fetch: Callable[..., str], path: str, words: str
) -> None:
    assert re.search(words, fetch(site.url + path))


def test_a_long_page_comes_in_parts_that_together_are_the_page(
    site: Any, fetch: Callable[..., str]
) -> None:
    seen, start = "", 0
    while start is not None:
        text = fetch(f"{site.url}/long", start=start)
        assert len(text) <= 20_000
        seen += re.search(r"<[^>]*>\n(.*)\n</[^>]*>\n\[", text, re.DOTALL)[1]
        found = re.search(r"of 210000; .*start=(\d+)\]$", text)
        start = int(found[1]) if found else None
    assert seen == Site.pages["/long"][1].decode()


def test_a_page_without_end_is_cut(site: Any, fetch: Callable[..., str]) -> None:
    assert len(fetch(f"{site.url}/endless")) <= 20_000
    assert site.sent < 60_000_000


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://example.com/x",
        "data:text/plain,hi",
        "gopher://example.com/",
        "javascript:alert(1)",
        "//example.com/x",
        "example.com",
        "http://",
        "",
    ],
)
def test_only_web_addresses_are_fetched(fetch: Callable[..., str], url: str) -> None:
    assert re.match("(error|denied): .*http", fetch(url))


@pytest.mark.parametrize(
    "host",
    """localhost 127.0.0.2 0.0.0.0 10.0.0.1 192.168.1.1 172.16.0.1 169.254.169.254 100.64.0.1
    [::1] [::] [fe80::1] [fd00::1] [::ffff:127.0.0.1] 2130706433 0x7f.1 127.1 0177.0.0.1""".split(),
)
def test_a_private_host_is_refused_even_with_the_network_allowed(
    fetch: Callable[..., str], host: str
) -> None:
    text = fetch(f"http://{host}:9/latest/meta-data/")
    assert re.match("(error|denied): .*(public|private)", text), text


@pytest.mark.parametrize("target", ["http://localhost:{port}/plain", "http://169.254.169.254/x"])
def test_a_redirect_to_a_private_host_is_refused(
    site: Any, fetch: Callable[..., str], target: str
) -> None:
    target = target.format(port=site.server_address[1])
    text = fetch(f"{site.url}/to/{target}")
    assert re.match("(error|denied): ", text)
    assert site.seen == [f"/to/{target}"]


def test_a_circle_of_redirects_ends(site: Any, fetch: Callable[..., str]) -> None:
    path = "/to/" * 30 + "/plain"
    assert fetch(site.url + path).startswith("error: ")
    assert len(site.seen) < 15


@pytest.mark.parametrize(
    "url", ["http://user@127.0.0.1:{port}/plain", "http://127.0.0.1:{port}/plain"]
)
def test_without_leave_nothing_is_fetched(site: Any, build: Callable[..., Any], url: str) -> None:
    text = call(build(), "fetch_url", {"url": url.format(port=site.server_address[1])})
    assert text.startswith("denied: ")
    assert site.seen == []


@pytest.mark.skipif(
    importlib.util.find_spec("ddgs") is not None, reason="the package for searches is installed"
)
def test_a_missing_package_is_named_with_how_to_get_it(build: Callable[..., Any]) -> None:
    text = call(build(network=True), "web_search", {"query": "x"})
    assert re.match(r"error: .*ddgs.*pip install .*onefile-agent\[web\]", text), text


NO_PACKAGE = """
import sys
sys.modules["ddgs"] = None
from agent import Settings, build_agent
settings = Settings(base_url="http://127.0.0.1:9/v1", model="m", workspace=sys.argv[1], mode="auto",
    save_session=False, network=True)
agent = build_agent(settings)
reply = {"content": None, "tool_calls": [{"function": {"name": "web_search", "arguments": "x"}}]}
reply["tool_calls"][0]["function"]["arguments"] = '{"query": "x"}'
agent.run_calls(agent.transcript.add_reply(reply))
print(agent.transcript.messages[-1]["content"])
"""


def test_a_missing_package_is_named_wherever_the_tests_run(root: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-c", NO_PACKAGE, str(root)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
    assert done.stdout.startswith("error: ") and "ddgs" in done.stdout
