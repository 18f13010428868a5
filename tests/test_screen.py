"""What is on the screen: both ways of showing the same events, long answers, odd text, the bell.

events.jsonl was written by `agent --json` in front of a FlakyServer: a retry, reasoning, calls of
each outcome, an answer with all that Markdown has, a compaction, a Ctrl-C. Only `approval` and
`queued`, which need a person, come from Python.
"""

import contextlib
import fcntl
import io
import itertools
import json
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ESCAPES, Terminal, alive, nothing_runs_in, until

import agent
from flaky_server import FlakyServer

Event = tuple[str, dict[str, Any]]
PATHS = ["plain", "ui"]
SGR = re.compile(r"\x1b\[[0-9;:]*m")
BOXES = re.compile(r"[\u2500-\u259f|]")  # what tables, quotes and headings are framed with

DONE = {"status": "done", "exit_code": 0, "text": "", "session_id": "", "turns": 1, "ms": 1}
DONE |= {"usage": {}, "denied": []}


def screens(path: str, out: Any) -> Any:
    """The screen that shows events on this terminal."""
    return agent.Screen(out, out) if path == "plain" else agent.UiScreen(out, out)


def show(path: str, events: list[Event], rows: int = 24, columns: int = 200) -> str:
    """All that a screen writes to a terminal of this size for these events."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    pieces: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # The other end is closed.
            while piece := os.read(master, 65536):
                pieces.append(piece)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with open(slave, "w", encoding="utf-8") as out:
        screen = screens(path, out)
        for kind, data in [*events, ("result", DONE)]:
            screen.typed(**data) if kind == "typed" else screen.emit(kind, **data)
        with screen.quiet():
            out.flush()
    reader.join(60)
    os.close(master)
    return b"".join(pieces).decode("utf-8", "replace")


def words_of(output: str) -> str:
    """The words of the output, one blank between them, without frames and escape codes."""
    return " ".join(BOXES.sub(" ", ESCAPES.sub("", output)).split())


def call(name: str, **arguments: object) -> dict[str, Any]:
    """A script step in which the model calls one tool."""
    return {"call": name, "arguments": arguments}


def test_a_command_is_followed_from_its_own_first_line_behind_a_check(tmp_path):
    with open(tmp_path / "out", "w+", encoding="utf-8") as out:
        screen = agent.Screen(out, out)
        screen.emit("tool_output", id="check", text="left of the check")
        screen.emit("tool_output", id="1", text="begun\n")
        screen.follow()
        assert (out.seek(0), out.read()) == (0, "    begun\n")


def test_what_a_check_printed_is_not_shown_behind_a_turn_that_was_cut_off(tmp_path):
    with open(tmp_path / "out", "w+", encoding="utf-8") as out:
        screen = agent.Screen(out, out)
        with contextlib.suppress(KeyboardInterrupt), screen.turn(None):
            screen.emit("tool_output", id="check", text="begun\n")
            timer = screen.follows
            raise KeyboardInterrupt
        timer.join(60)
        assert (out.seek(0), out.read()) == (0, "")


# -- a terminal that only remembers ----------------------------------------------------------------

PIECES = re.compile(
    r"\x1b\[(?P<args>[0-9;:?<>=]*)[ -/]*(?P<end>[@-~])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|\x1b[()].|\x1b(?P<other>[^\[\]])|(?P<control>[\x00-\x1f\x7f])|(?P<text>[^\x00-\x1f\x7f]+)"
)


class Paper:
    """A terminal for text of narrow characters: its lines, and where the cursor went up.

    `climbs` holds each (rows up, row it would reach, first row of the screen, last row so far);
    `odd` each sequence that a program which only appends has no use for.
    """

    def __init__(self, rows: int = 24, columns: int = 80) -> None:
        self.rows, self.columns = rows, columns
        self.lines = [""]
        self.row = self.column = self.top = self.last = 0
        self.climbs: list[tuple[int, int, int, int]] = []
        self.odd: list[str] = []

    def feed(self, output: str) -> "Paper":
        """Take in all output."""
        for found in PIECES.finditer(output):
            if found["text"]:
                self.put(found["text"])
            elif found["end"]:
                self.sequence(found["args"], found["end"], found[0])
            elif found["control"]:
                self.control(found["control"])
            elif found["other"] and found["other"] not in "=>":
                self.odd.append(found[0])
        return self

    def put(self, text: str) -> None:
        """Write over what stands here; a full line goes on in the next one."""
        while text:
            if self.column == self.columns:
                self.down(1)
                self.column = 0
            piece, text = text[: self.columns - self.column], text[self.columns - self.column :]
            line = self.lines[self.row].ljust(self.column)
            end = self.column + len(piece)
            self.lines[self.row] = line[: self.column] + piece + line[end:]
            self.column = end

    def down(self, count: int, *, scrolls: bool = True) -> None:
        """The cursor goes down; at the end of the screen all moves up, if it may."""
        self.row = self.row + count
        if not scrolls:
            self.row = min(self.row, self.top + self.rows - 1)
        self.top = max(self.top, self.row - self.rows + 1)
        self.last = max(self.last, self.row)
        self.lines += [""] * (self.row + 1 - len(self.lines))

    def control(self, character: str) -> None:
        """Line ends, tabs and the like."""
        if character == "\n":
            self.down(1)
        elif character == "\r":
            self.column = 0
        elif character == "\b":
            self.column = max(0, self.column - 1)
        elif character == "\t":
            self.column = min(self.columns - 1, self.column // 8 * 8 + 8)

    def sequence(self, args: str, end: str, whole: str) -> None:
        """Moves and erasures; colours and modes leave the lines as they are."""
        number = int(args) if args.isdigit() else 0
        count = max(1, number)
        line = self.lines[self.row]
        if end in "AF":
            self.climbs.append((count, self.row - count, self.top, self.last))
            self.row = max(self.top, self.row - count)
        elif end in "BE":
            self.down(count, scrolls=False)
        elif end in "CD":
            step = count if end == "C" else -count
            self.column = min(self.columns - 1, max(0, self.column + step))
        elif end == "K":
            kept = {0: line[: self.column], 1: " " * self.column + line[self.column :], 2: ""}
            self.lines[self.row] = kept[number]
        elif end == "J" and number == 0:
            self.lines[self.row :] = [line[: self.column]]
        elif end == "G":
            self.column = count - 1
        elif end not in "mhlnct":
            self.odd.append(whole)
        self.column = 0 if end in "EF" else self.column
        self.lines += [""] * (self.row + 1 - len(self.lines))


FULL_SCREEN = re.compile(
    r"\x1b\[\?(?:47|1047|1048|1049)[hl]|\x1b\[[23]J|\x1b\[[0-9;]*[Hf]|\x1b\[[0-9;]*r|\x1b[c78M]"
)


def appends_only(output: str, rows: int = 24, columns: int = 80) -> Paper:
    """Check that nothing above the live region is touched; returns what stands there at the end."""
    paper = Paper(rows, columns).feed(output)
    too_far = [c for c in paper.climbs if c[0] > rows - 2 or c[1] < max(c[2], c[3] - (rows - 2))]
    assert (FULL_SCREEN.findall(output), paper.odd, too_far) == ([], [], [])
    return paper


@pytest.mark.parametrize(
    "output",
    [
        pytest.param("a\r\n" * 40 + "\x1b[23A", id="above the screen"),
        pytest.param("a\r\n" * 40 + "\x1b[12A\x1b[11A", id="in two steps"),
        pytest.param("a\r\nb\r\n\x1b[3A", id="above the first line"),
        pytest.param("a\x1b[?1049hb", id="another screen"),
        pytest.param("a\x1b[2Jb", id="clear"),
        pytest.param("a\x1b[Hb", id="home"),
        pytest.param("a\x1b7b\x1b8", id="a saved place"),
        pytest.param("a\x1b[3Lb", id="lines put between"),
    ],
)
def test_going_back_is_noticed(output):
    with pytest.raises(AssertionError):
        appends_only(output)


def test_a_live_region_is_none_of_that():
    drawn = "region\r\n" * 22
    paper = appends_only("a\r\n" * 40 + drawn + "\x1b[22A\r\x1b[J" + "b\r\n" + "x" * 81)
    assert paper.lines == [*["a"] * 40, "b", "x" * 80, "x"]


WIPE = "\x1b[K\n"


@pytest.mark.parametrize(
    ("old", "above", "rows", "size", "written"),
    [
        pytest.param("", "", "", (80, 24), "", id="nothing"),
        pytest.param("", "", "a b", (80, 24), "\ra\nb\r", id="begins"),
        pytest.param("", "z", "", (80, 24), "\rz\n", id="without one"),
        pytest.param("a b", "", "a b", (80, 24), "", id="the same"),
        pytest.param(
            "a b c", "", "a x c", (80, 24), "\x1b[1A\r\x1b[Kx\x1b[1B\r", id="one row is another"
        ),
        pytest.param(
            "a b c",
            "",
            "x b y",
            (80, 24),
            "\x1b[2A\r\x1b[Kx\x1b[2B\r\x1b[Ky\r",
            id="two are",
        ),
        pytest.param("a b", "", "a b c d", (80, 24), "\nc\nd\r", id="more rows"),
        pytest.param(
            "a b", "", "x b c", (80, 24), "\x1b[1A\r\x1b[Kx\x1b[1B\nc\r", id="another and more"
        ),
        pytest.param(
            "a b c",
            "",
            "a b",
            (80, 24),
            f"\r\x1b[2A{WIPE * 2}\x1b[K\r\x1b[2Aa\nb\r",
            id="less rows",
        ),
        pytest.param(
            "a b", "z", "c", (80, 24), f"\r\x1b[1A{WIPE}\x1b[K\r\x1b[1Az\nc\r", id="a line above"
        ),
        pytest.param("a b", "", "", (80, 24), f"\r\x1b[1A{WIPE}\x1b[K\r\x1b[1A", id="ends"),
        pytest.param("a", "", "", (80, 24), "\r\x1b[K\r", id="a single row ends"),
        pytest.param(
            f"{'a' * 79} b",
            "",
            "c",
            (40, 24),
            f"\r\x1b[2A{WIPE * 2}\x1b[K\r\x1b[2Ac\r",
            id="narrower",
        ),
        pytest.param(
            " ".join(["a" * 79] * 5),
            "",
            "c",
            (20, 6),
            f"\r\x1b[5A{WIPE * 5}\x1b[K\r\x1b[5Ac\r",
            id="higher than the window",
        ),
        pytest.param(
            "a b", "", "a b", (90, 24), f"\r\x1b[1A{WIPE}\x1b[K\r\x1b[1Aa\nb\r", id="wider"
        ),
    ],
)
def test_the_cursor_goes_up_only_inside_the_region(old, above, rows, size, written):
    region = agent.Region()
    region.frame([], old.split(), 80, 24)
    text = region.frame(above.split(), rows.split(), *size)
    assert text.count("\x1b[?7l") == text.count("\x1b[?7h")  # in between no row is broken
    assert re.sub(r"\x1b\[\?7[lh]", "", text) == written


# -- both screens show the same events -------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded() -> list[Event]:
    """The events of a real run, as they were emitted."""
    lines = (Path(__file__).parent / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    return [(event.pop("type"), event) for event in events if event.pop("ts")]


@pytest.fixture(scope="module")
def shown(recorded: list[Event]) -> Callable[[str], str]:
    """What a screen writes for the recorded events; each is asked once."""
    known: dict[str, str] = {}

    def output(path: str) -> str:
        if path not in known:
            known[path] = show(path, recorded)
        return known[path]

    return output


def of(events: list[Event], kind: str) -> list[dict[str, Any]]:
    """The events of a kind."""
    return [data for name, data in events if name == kind]


def answers(events: list[Event]) -> list[str]:
    """The texts of the replies, whole."""
    groups = itertools.groupby(events, key=lambda event: event[0])
    return ["".join(data["text"] for _, data in some) for kind, some in groups if kind == "text"]


def test_the_recorded_events_are_of_every_kind(recorded):
    kinds = "init text reasoning tool_use approval tool_output tool_result retry compacted"
    assert {kind for kind, _ in recorded} == {*kinds.split(), *"queued notice usage result".split()}
    statuses = {data["status"] for data in of(recorded, "tool_result")}
    assert statuses == {"ok", "error", "denied", "cancelled"}


MARKUP = re.compile(r"</?[a-z]+>|```\w*|[#*`~>|]+(?=\s|$)|[*`~]|(?m:^[-\s|]+$)|\[[ x]\]|[\[\]()]")


@pytest.mark.parametrize("path", PATHS)
def test_each_word_of_the_answer_is_shown_by_both(path, shown, recorded):
    answer = MARKUP.sub(" ", "\n".join(answers(recorded)))
    expected = re.findall(r"[\w.:/-]*\w", answer)
    output = words_of(shown(path))
    assert len(expected) > 80
    assert [word for word in expected if word not in output] == []


@pytest.mark.parametrize("path", PATHS)
def test_each_call_is_shown_with_its_outcome_by_both(path, shown, recorded):
    output = words_of(shown(path))
    for data in of(recorded, "tool_use"):
        first = next(iter(data["arguments"].values()), "")
        assert data["name"] in output and " ".join(first.split()[:2]) in output
    for text in ("missing.txt does not exist", "nobody is there to approve it"):
        assert text in output
    assert "interrupted by the user" in output or "cancelled" in output


@pytest.mark.parametrize("path", PATHS)
def test_what_is_said_beside_the_answer_is_shown_by_both(path, shown, recorded):
    output = words_of(shown(path))
    [retry], [compacted] = of(recorded, "retry"), of(recorded, "compacted")
    expected = [data["text"] for kind in ("notice", "queued") for data in of(recorded, kind)]
    expected += [retry["reason"], str(compacted["messages_before"]), compacted["archive"]]
    # Of a command's output what it ended with; of one that was stopped, that it was.
    failed = next(
        data["content"] for data in of(recorded, "tool_result") if "Trace" in data["content"]
    )
    expected.append(failed.split("\n")[-2])
    assert [text for text in expected if text not in output] == []


@pytest.mark.parametrize("path", PATHS)
def test_two_answers_of_a_turn_do_not_share_a_line(path, recorded):
    counted = of(recorded, "usage")[0]
    events = [("text", {"text": "first"}), ("usage", counted), ("text", {"text": "second"})]
    lines = appends_only(show(path, events), columns=200).lines
    assert [line for line in lines if line] == ["first", "second"]


def test_the_spinner_counts_down_to_the_next_try(tmp_path):
    with open(tmp_path / "out", "w") as out:
        screen = agent.UiScreen(out, out, clock=lambda: 3.0)
        screen.again = 7.0
        assert "waiting, 4 s left · 3 s · Ctrl-C stops" in screen.spinner(80)


def test_plain_has_no_escape_byte_and_nothing_that_goes_back(shown):
    output = shown("plain")
    assert re.findall(r"[\x00-\x07\x08\x0b-\x0c\x0e-\x1f]|\r(?!\n)", output) == []


@pytest.mark.parametrize("path", PATHS)
def test_both_are_append_only(path, shown):
    lines = appends_only(shown(path), columns=200).lines
    assert "Last-words of it." in "\n".join(lines)


@pytest.mark.parametrize("path", PATHS)
def test_a_finished_answer_stands_there_once(path, shown):
    text = "\n".join(appends_only(shown(path), columns=200).lines)
    words = ["Heading-beta", "item-two", "nested-three", "docstring-words", "cell-four"]
    assert {word: text.count(word) for word in [*words, "Last-words"]} == dict.fromkeys(
        [*words, "Last-words"], 1
    )


DOCUMENTS = [
    pytest.param("A Vec<String> of Map<Key, Value> here", "Vec<String> Map<Key,", id="generics"),
    pytest.param("say <b>aloud</b> <br/> now", "aloud now", id="html in a line"),
    pytest.param("<div>\nin-a-block\n</div>\n\nbehind", "in-a-block behind", id="html block"),
    pytest.param("see [the page](https://e.org/x?a=1)", "page https://e.org/x?a=1", id="link"),
    pytest.param("see <https://e.org/auto>", "https://e.org/auto", id="bare link"),
    pytest.param("a [ref][1]\n\n[1]: https://e.org/ref", "ref", id="reference"),
    pytest.param("![picture](https://e.org/p.png)", "picture", id="image"),
    pytest.param("[red]x[/red] [/nope] :smile: [b", "[red]x[/red] [/nope] :smile: [b", id="tags"),
    pytest.param("a * b * c and __init__.py", "a * b * c", id="stars"),
    pytest.param("```\nnever closed", "never closed", id="open fence"),
    pytest.param("~~~ruby\nputs 1\n~~~", "puts 1", id="tildes"),
    pytest.param("```nosuchlanguage\n[x] = <y>\n```", "[x] = <y>", id="unknown language"),
    pytest.param("```md\n# title\n* a\n```", "# title * a", id="Markdown as code"),
    pytest.param("| a1 | b1 |\n|:--|--:|\n| c1 | `d1` |\n", "a1 b1 c1 d1", id="table"),
    pytest.param(
        "|" + "a|" * 150 + "\n|" + "-|" * 150 + "\n|" + "b|" * 149 + "last1|", "last1", id="columns"
    ),
    pytest.param(f"| a |\n|---|\n| {'x' * 300}end1 |", "x" * 300 + "end1", id="a word in a table"),
    pytest.param("| only1 | a2 | pipe3 |", "only1 a2 pipe3", id="no table"),
    pytest.param("1. one1\n2. two2\n\n   still2\n3. three3", "one1 two2 still2 three3", id="list"),
    pytest.param("- a1\n  - b1\n    - c1\n      - d1", "a1 b1 c1 d1", id="deep list"),
    pytest.param("- a1\n\n  ```sh\n  ls x1\n  ```\n- b1", "a1 ls x1 b1", id="code in a list"),
    pytest.param("> a1\n> > b1\n\nc1", "a1 b1 c1", id="quotes"),
    pytest.param("Title1\n======\n\nText1\n\n---\nend1", "Title1 Text1 end1", id="lines under"),
    pytest.param("#### deep1\n\n###### deeper1", "deep1 deeper1", id="small headings"),
    pytest.param("one1  \ntwo1\\\nthree1", "one1 two1 three1", id="hard breaks"),
    pytest.param("one1\r\n\r\n- two1\r\n- three1\r\n", "one1 two1 three1", id="CRLF"),
    pytest.param("\n\n\nfirst1\n\n\n\n\nlast1\n\n\n", "first1 last1", id="blank lines"),
    pytest.param("- [ ] todo1\n- [x] done1", "[ ] todo1 [x] done1", id="tasks"),
    pytest.param("$x_1^2$ and \\(y\\) 5 < 6 & 7 > 2", "5 < 6 & 7 > 2", id="formula"),
    pytest.param("a\tb1\n\n\tcode1", "b1 code1", id="tabs"),
    pytest.param("x" * 500 + "\n\nend1", "end1", id="one long word"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("text, expected", DOCUMENTS)
def test_no_form_of_markdown_loses_a_word(path, text, expected):
    deltas = re.findall(r"\S+\s*|\s+", text)
    output = words_of(show(path, [*(("text", {"text": delta}) for delta in deltas)]))
    words = iter(expected.split())
    assert [word for word in words if word not in output] == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
def test_the_pieces_in_which_an_answer_comes_change_nothing(path, recorded, size):
    answer = max(answers(recorded), key=len)
    pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
    results = []
    for deltas in (pieces, [answer]):
        output = show(path, [("text", {"text": delta}) for delta in deltas])
        results.append(words_of("\n".join(appends_only(output, columns=200).lines)))
    assert results[0] == results[1]


# -- what is hostile -------------------------------------------------------------------------------

HOSTILE = [
    "\x1b]0;owned\x07",
    "\x1b]52;c;aGk=\x07",
    "\x1b]8;;http://evil.example\x1b\\",
    "\x1b]9;owned\x1b\\",
    "\x1b[2J",
    "\x1b[77A",
    "\x1b[?1049h",
    "\x1b[6n",
    "\x1b[31;7m",
    "\x1bP+q544e\x1b\\",
    "\x1bc",
    "\x1b",
    "\x9b2J",
    "\x9d0;owned\x9c",
    "\rover",
    "\b\b\b\bover",
    "\x07",
    "\x0e",
    "\x05",
    "\x00",
    "\x7f",
    "\u202e",
    "\u2066",
    "\u200b",
    "\ufeff",
    "\U000e0041",
    "&#27;[2J",
    "&#x1b;]0;owned&#7;",
    "&#155;2J",
    "&#8238;",
    "&ZeroWidthSpace;",
]
# What a screen of ours may write itself.
OURS = re.compile(r"\x1b\[(?:[0-9;]*[mABCDEFGK]|0?J|\?(?:7|25|2026)[hl])|\r\n|\r|\n|\t")
NEVER = re.compile(
    "[\0-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e0fff]"
)


def result(status: str, content: str, name: str = "bash") -> list[Event]:
    """A call and its result."""
    arguments = {"command": "true"}
    judged = {"decision": "allow", "rule": "it only reads", "ms": 3}
    told = {"id": "call_1", "name": name, "status": status, "content": content}
    return [
        ("tool_use", {"id": "call_1", "name": name, "arguments": arguments}),
        ("tool_result", told | judged),
    ]


def use(name: str, **arguments: str) -> list[Event]:
    """A call that begins."""
    return [("tool_use", {"id": "call_1", "name": name, "arguments": arguments})]


def said(text: str) -> list[Event]:
    """A part of an answer."""
    return [("text", {"text": text + "\n\n"})]


def retried(reason: str) -> list[Event]:
    """A request that is tried again."""
    times = {"attempt": 1, "of": 4, "delay": 1.0, "restarts_reply": False}
    return [("retry", times | {"reason": reason})]


def output_of(text: str) -> list[Event]:
    """What a running command prints, and its end."""
    begin, end = result("ok", text + "\n[exit code 0]")
    return [begin, ("tool_output", {"id": "call_1", "text": text + "\n"}), end]


def edited(old: str, new: str) -> list[Event]:
    """A file that a call has written, or changed, unasked."""
    id = {"id": "call_1", "name": "edit_file" if old else "write_file"}
    arguments = {"path": "a", "old": old, "new": new} if old else {"path": "a", "content": new}
    done = {"status": "ok", "content": "done", "decision": "allow", "rule": "", "ms": 1}
    return [("tool_use", {**id, "arguments": arguments}), ("tool_result", {**id, **done})]


PLACES = [
    pytest.param(lambda p: said(f"left{p}right"), id="text"),
    pytest.param(lambda p: [("text", {"text": c}) for c in f"left{p}right\n\n"], id="cut text"),
    pytest.param(lambda p: said(f"# left{p}right"), id="heading"),
    pytest.param(lambda p: said(f"```sh\nleft{p}right\n```"), id="code"),
    pytest.param(lambda p: said(f"```{p}\nleft\n```"), id="language"),
    pytest.param(lambda p: said(f"a `left{p}right` b"), id="inline code"),
    pytest.param(lambda p: said(f"| a | b |\n|---|---|\n| left{p} | right |"), id="table"),
    pytest.param(lambda p: said(f"- left{p}right\n  - more{p}"), id="list"),
    pytest.param(lambda p: said(f"> left{p}right"), id="quote"),
    pytest.param(lambda p: said(f"[left{p}](https://e.org)"), id="link"),
    pytest.param(lambda p: said(f"[left](<https://e.org/{p}>)"), id="link target"),
    pytest.param(lambda p: said(f'[left](https://e.org "{p}")'), id="link title"),
    pytest.param(lambda p: said(f"![left](<https://e.org/{p}>)"), id="image"),
    pytest.param(lambda p: said(f"<b title='{p}'>left</b>"), id="html"),
    pytest.param(lambda p: use("bash", command=f"left{p}right"), id="argument"),
    pytest.param(lambda p: use("read_file", path=f"left{p}.txt"), id="file name"),
    pytest.param(lambda p: use("bash", **{"command": "left", f"x{p}": p}), id="parameter"),
    pytest.param(lambda p: use(f"left{p}", path="a"), id="tool"),
    pytest.param(lambda p: output_of(f"left{p}right"), id="output"),
    pytest.param(lambda p: result("error", f"error: left{p}right"), id="error"),
    pytest.param(lambda p: result("denied", f"denied: left{p}right"), id="denied"),
    pytest.param(lambda p: [("notice", {"level": "error", "text": f"left{p}right"})], id="notice"),
    pytest.param(lambda p: [("queued", {"text": f"left{p}right"})], id="queued"),
    pytest.param(lambda p: retried(f"left{p}right"), id="retry"),
    pytest.param(lambda p: edited("", f"left{p}right"), id="written"),
    pytest.param(lambda p: edited(f"left{p}right", "b"), id="replaced"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("place", PLACES)
def test_nothing_that_steers_a_terminal_reaches_it(path, place):
    output = show(path, [event for payload in HOSTILE for event in place(payload)])
    raw = [payload for payload in HOSTILE if payload in output and payload[0] not in "&\x1b"]
    raw += [payload for payload in HOSTILE if payload[:1] == "\x1b" < payload and payload in output]
    own = OURS if path == "ui" else re.compile(r"\r\n")
    assert (raw, NEVER.findall(own.sub("", output))) == ([], [])
    assert output.count("left") >= len(HOSTILE)


def test_of_a_progress_line_the_last_state_is_shown():
    pieces = [("tool_output", {"id": "call_1", "text": f"\rload {n}0 %"}) for n in (1, 2, 3)]
    output = show("ui", [*use("bash", command="pip"), *pieces, ("typed", {"text": "x"})])
    assert ("load 30 %" in output, "load 10 %" in output) == (True, False)


def test_of_a_long_line_that_is_typed_the_end_is_shown():
    screen = agent.UiScreen(io.StringIO(), io.StringIO())
    screen.busy = True
    screen.typed("begin " + "x" * 300 + " end")
    row = SGR.sub("", screen.body(40, 22)[1])
    assert (row[:3], row[-5:], len(row)) == ("> …", "x end", 39 + 1)


@pytest.mark.parametrize("payload", HOSTILE, ids=ascii)
def test_the_rows_below_an_answer_can_not_steer_the_terminal(payload):
    screen = agent.UiScreen(io.StringIO(), io.StringIO())
    screen.busy = True
    screen.typed(f"left{payload}right")
    screen.emit("tool_use", id="1", name=f"left{payload}", arguments={"a": payload})
    screen.emit("tool_output", id="1", text=f"{payload}\nleft")
    screen.emit("reasoning", text=f"left{payload}right")
    rows = [SGR.sub("", row) for row in screen.body(80, 22)]
    assert (NEVER.findall("".join(rows)), "".join(rows).count("left")) == ([], 4)


@pytest.mark.parametrize("most", [1, 2, 5, 22])
def test_the_region_has_no_more_rows_than_it_may(most):
    screen = agent.UiScreen(io.StringIO(), io.StringIO())
    screen.busy = True
    screen.emit("text", text="a\nb\nc")
    screen.typed("left")
    for number in range(30):
        screen.emit("tool_use", id=str(number), name="bash", arguments={"command": "x"})
        screen.emit("tool_output", id=str(number), text="one\ntwo\n")
    rows = screen.body(80, most)
    assert (len(rows), "Ctrl-C stops" in SGR.sub("", rows[max(0, most - 3)])) == (most, True)


@pytest.mark.parametrize("payload", HOSTILE, ids=ascii)
def test_a_line_too_long_for_the_region_can_not_steer_the_terminal(payload):
    out = io.StringIO()
    screen = agent.UiScreen(out, out)
    screen.emit("text", text="word " * 1000 + f"left{payload}right")
    screen.draw()
    shown = OURS.sub("", out.getvalue())
    assert (NEVER.findall(shown), "left" in shown) == ([], True)


class Tty(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        """Yes."""
        return True


@pytest.mark.parametrize(
    ("out", "shown"), [(Tty(), "a\\u{1b}[2Jb\\u{0}\n"), (io.StringIO(), "a\x1b[2Jb\ufffd\n")]
)
def test_an_answer_at_once_is_as_it_came_only_where_no_terminal_is(out, shown):
    agent.Screen(out, io.StringIO(), streams=False).answer("a\x1b[2Jb\0")
    assert out.getvalue() == shown


@pytest.mark.parametrize("path", PATHS)
def test_what_is_typed_and_what_is_thought_can_not_steer_the_terminal_either(path):
    events: list[Event] = []
    for payload in HOSTILE:
        events += [("reasoning", {"text": f"hm{payload}"}), ("typed", {"text": f"ty{payload}"})]
    output = show(path, [*events, ("notice", {"level": "info", "text": "left"})])
    own = OURS if path == "ui" else re.compile(r"\r\n")
    assert (NEVER.findall(own.sub("", output)), "left" in output) == ([], True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("place", PLACES[:4] + PLACES[5:6] + PLACES[7:9] + PLACES[14:16])
def test_tags_of_the_renderer_are_only_text(path, place):
    output = words_of(show(path, place("[red]A[/red] [/nope] :smile: [@click=x]B")))
    words = ["[red]A[/red]", "[/nope]", ":smile:", "[@click=x]B"]
    assert [word for word in words if word not in output] == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("place", PLACES[18:])
def test_tags_of_the_renderer_are_only_text_beside_the_answer_too(path, place):
    output = words_of(show(path, place("[red]A[/red] [/nope] :smile: [@click=x]B")))
    words = ["[red]A[/red]", "[/nope]", ":smile:", "[@click=x]B"]
    assert [word for word in words if word not in output] == []


def hostile_run(workspace: Path) -> list[Any]:
    """A script that shows hostile text at every place of a real run; what it needs is made."""
    name = "n\x1b]0;owned\x07\u202e.txt"
    (workspace / name).write_text("left \x1b]0;owned\x07 old\n")
    new = "left \x1b[77A\rover \u202e new"
    return [
        call("list_files"),
        call("edit_file", path=name, old="left \x1b]0;owned\x07 old", new=new),
        call("bash", command="printf 'out\\033]0;owned\\007 \\033[77A \\342\\200\\256\\n'"),
        "**bold** \x1b]52;c;aGk=\x07 [left\x1b[77A](https://e.org) `a\x1b]0;owned\x07`\n\nPONG",
    ]


@pytest.mark.parametrize("ui", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_real_run_lets_nothing_through_either(terminal, workspace, ui):
    with FlakyServer(hostile_run(workspace)) as server:
        screen = terminal("go", "--mode", "auto", "--sandbox", "off", server=server, ui=ui)
        screen.expect("PONG")
        assert screen.wait() == 0
    assert re.findall(r"\x1b\]|\x07|\x1b\[77A|\rover|[\u202e\x9b]", screen.output) == []
    assert ("1b" in screen.text, bool(SGR.search(screen.output))) == (True, ui)


# -- long answers ----------------------------------------------------------------------------------

COUNT = 3000


def numbered(form: str, count: int = COUNT, between: str = "\n", start: int = 0) -> str:
    """Lines with a number each, in this form."""
    return between.join(form.format(f"row-{n}x") for n in range(start, count))


def rows_in(text: str) -> list[int]:
    """The numbers of all lines that stand there, in order."""
    return [int(number) for number in re.findall(r"row-(\d+)x", text)]


LONG = {
    "lines": numbered("{} alpha"),
    "paragraphs": numbered("{} alpha beta", between="\n\n"),
    "code": f"Some code:\n\n```python\n{numbered('print(`{}`)'.replace('`', chr(34)))}\n```\n",
    "unknown code": f"```\n{numbered('{} | alpha')}\n```\nand text",
    "list": numbered("- {} alpha"),
    "numbered list": numbered("1. {} alpha"),
    "loose list": numbered("- {} alpha", between="\n\n"),
    "quote": numbered("> {} alpha"),
    "headings": numbered("## {} alpha", between="\n\n"),
    "table": "| a | b |\n|---|---|\n" + numbered("| {} | alpha |"),
    "blocks of code": numbered("```sh\necho {}\n```", between="\n"),
    "one line": numbered("{}", count=9000, between=" "),
    "one word": numbered("{}", count=9000, between=""),
}
COUNTS = {"one line": 9000, "one word": 9000}
QUICK = {"lines"}
KINDS = [
    pytest.param(kind, id=kind, marks=[] if kind in QUICK else [pytest.mark.long]) for kind in LONG
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_answer_is_only_appended(terminal, kind):
    with FlakyServer([LONG[kind] + "\n\nLAST-WORD"]) as server:
        screen = terminal("go", server=server, ui=True)
        screen.expect("LAST-WORD")
        assert screen.wait() == 0
    lines = appends_only(screen.output).lines
    text = "".join(line.strip() for line in lines) if kind in COUNTS else "\n".join(lines)
    assert rows_in(text) == list(range(COUNTS.get(kind, COUNT)))
    # A redraw for each word would be hundreds of times the text; one for each tick is far less.
    assert len(screen.output) < 30 * len(LONG[kind]) + 200_000


@pytest.mark.parametrize("kind", [pytest.param("paragraphs", marks=pytest.mark.long)])
def test_a_block_that_is_finished_is_not_printed_again(terminal, kind):
    with FlakyServer([LONG[kind] + "\n\nLAST-WORD"]) as server:
        screen = terminal("go", server=server, ui=True)
        screen.expect("LAST-WORD")
        screen.wait()
    order = rows_in(screen.text)
    last = {number: place for place, number in enumerate(order)}
    first = {number: place for place, number in reversed([*enumerate(order)])}
    assert [n for n in range(COUNT - 1) if last[n] > first[n + 1]] == []


def test_blocks_of_each_kind_are_rendered_and_finished_ones_printed_once(terminal):
    kinds = ["{} **strong-{}**", "## {}", "- {}", "```python\ndef f(): return '{}'\n```", "> {}"]
    blocks = [form.replace("{}", f"row-{n}x") for n, form in enumerate(kinds * 12)]
    with FlakyServer(["\n\n".join(blocks) + "\n\nLAST-WORD"]) as server:
        screen = terminal("go", server=server, ui=True)
        screen.expect("LAST-WORD")
        screen.wait()
    text = re.sub(r"strong-row-\d+x", "", "\n".join(appends_only(screen.output).lines))
    assert rows_in(text) == list(range(len(blocks)))
    assert re.findall(r"\*\*|```|^## ", text, re.MULTILINE) == []
    code = next(line for line in screen.output.split("\n") if "return" in SGR.sub("", line))
    assert len(SGR.findall(code)) > 4 and "\x1b[1" in screen.output


# -- no escape codes -------------------------------------------------------------------------------

HIDES = [
    pytest.param({"NO_COLOR": "1"}, "", id="NO_COLOR"),
    pytest.param({"TERM": "dumb"}, "", id="dumb", marks=pytest.mark.long),
    pytest.param({"TERM": ""}, "", id="TERM is empty", marks=pytest.mark.long),
    pytest.param({"TERM": None}, "", id="no TERM", marks=pytest.mark.long),
    pytest.param({}, "> out.txt", id="stdout is a file", marks=pytest.mark.long),
    pytest.param({}, "2> err.txt", id="stderr is a file", marks=pytest.mark.long),
    pytest.param({}, "| cat > out.txt", id="stdout is a pipe", marks=pytest.mark.long),
    pytest.param({}, "2>&1 | cat > out.txt", id="both are a pipe", marks=pytest.mark.long),
    pytest.param({}, "--bare", id="bare", marks=pytest.mark.long),
]


@pytest.fixture
def shell(workspace: Path, environment: Callable, tmp_path: Path) -> Iterator[Callable]:
    """Start `agent ...` by a shell on a terminal, with the packages of the extra."""
    started: list[Terminal] = []

    def start(line: str, server: FlakyServer, changes: dict[str, str | None]) -> Terminal:
        command = f"{shlex.quote(sys.executable)} -m agent {line}"
        env = environment(server, changes, ui=True)
        started.append(Terminal(["/bin/sh", "-c", command], workspace, env))
        return started[-1]

    yield start
    for screen in started:
        screen.close()
    assert [screen.text for screen in started if "Traceback" in screen.text] == []
    nothing_runs_in(tmp_path)


def all_output(screen: Terminal, workspace: Path) -> str:
    """What came on the terminal and what went into files."""
    screen.read(0.05)
    files = [workspace / name for name in ("out.txt", "err.txt")]
    return screen.output + "".join(f.read_text("utf-8", "replace") for f in files if f.exists())


def colourful(workspace: Path) -> list[Any]:
    """A script with a bit of everything that is shown in colours elsewhere."""
    (workspace / "a.txt").write_text("old line\n")
    return [
        {"status": 429, "headers": {"Retry-After": "0"}, "body": {"error": {"message": "later"}}},
        {"reasoning": "hm", **call("edit_file", path="a.txt", old="old", new="new")},
        call("read_file", path="missing.txt"),
        call("bash", command="printf '\\033[31mred\\033[0m\\n'"),
        "# Title\n\n**bold** `code`\n\n```python\nx = 1\n```\n\nPONG",
    ]


# Marks that the line editor needs for pastes; `--bare` leaves out packages, not the terminal.
LINE_EDITOR = re.compile(r"\x1b\[(?:\?(?:2004|1034)[hl]|\d*[CDK])")


ASCII = pytest.param({"PYTHONIOENCODING": "ascii"}, "", id="ASCII", marks=pytest.mark.long)


@pytest.mark.parametrize("changes, redirection", [*HIDES, ASCII])
def test_one_shot_writes_no_escape_byte_where_none_is_wanted(
    shell, workspace, changes, redirection
):
    with FlakyServer(colourful(workspace)) as server:
        screen = shell(f"--mode auto --sandbox off go {redirection}", server, changes)
        screen.wait()
        output = all_output(screen, workspace)
    assert ("PONG" in output, "\x1b" in output) == (True, False)


@pytest.mark.long
@pytest.mark.parametrize("changes, redirection", HIDES)
def test_a_dialogue_writes_no_escape_byte_where_none_is_wanted(
    shell, workspace, changes, redirection
):
    with FlakyServer(colourful(workspace)) as server:
        screen = shell(f"--mode auto --sandbox off {redirection}", server, changes)
        screen.send("hi\r")
        until(lambda: "PONG" in all_output(screen, workspace))
        screen.send("/help\r")
        until(lambda: "/exit" in all_output(screen, workspace))
        screen.send("/exit\r")
        screen.wait()
        output = all_output(screen, workspace)
    kept = LINE_EDITOR.sub("", output) if redirection == "--bare" else output
    assert "\x1b" not in kept


def test_elsewhere_the_same_run_is_in_colours(shell, workspace):
    with FlakyServer(colourful(workspace)) as server:
        screen = shell("--mode auto --sandbox off go", server, {})
        screen.wait()
    assert len(SGR.findall(screen.output)) > 10
    assert "\x1b[31mred" not in screen.output


# -- while it works --------------------------------------------------------------------------------

READY = re.compile(r"(?:^|[\r\n])> ")
ELAPSED = re.compile(r"(?<![\d.])[1-9]\d*(?:\.\d)? ?s\b|\d:\d[1-9]")


def ask(screen: Terminal, text: str) -> None:
    """Type a prompt at the prompt, whoever reads it."""
    screen.match(READY)
    screen.listens()
    screen.send(text + "\r")


def leave(screen: Terminal) -> None:
    """Leave at the prompt and see that the terminal is as it was."""
    ask(screen, "/exit")
    assert (screen.wait(), termios.tcgetattr(screen.slave)) == (0, screen.settings)
    assert left_modes(screen.output) == []


def left_modes(output: str) -> list[str]:
    """The modes that were changed and not put back; the cursor is on and all others are off."""
    last = dict(re.findall(r"\x1b\[\?(\d+)([hl])", output))
    usual = {"25": "h", "7": "h", "12": "l", "1034": "h"}
    return [mode + how for mode, how in last.items() if how != usual.get(mode, "l")]


def test_waiting_shows_the_time_and_the_state_of_things(terminal):
    with FlakyServer(["PONG", {"text": "PANG", "hold": "before"}]) as server:
        screen = terminal("--sandbox", "off", server=server, ui=True)
        ask(screen, "ping")
        screen.expect("PONG")
        start = screen.seen
        ask(screen, "pang?")
        until(server.holding.is_set)
        screen.match(ELAPSED)
        status = screen.text[start:]
        server.release()
        screen.expect("PANG")
        leave(screen)
    parts = ["flaky-1", r"\bask\b", r"sandbox|\boff\b", r"\d ?%", r"unpriced|\$\d"]
    assert [part for part in parts if not re.search(part, status)] == []
    appends_only(screen.output)


def test_a_running_command_is_watched(terminal, workspace):
    command = "echo live-$((40+2)); while [ ! -e go ]; do sleep 0.02; done; echo end-$((40+3))"
    with FlakyServer([call("bash", command=command), "PONG"]) as server:
        screen = terminal("go", "--mode", "auto", "--sandbox", "off", server=server, ui=True)
        screen.expect("live-42")
        assert "end-43" not in screen.text
        (workspace / "go").touch()
        screen.expect("PONG")
        assert (screen.wait(), termios.tcgetattr(screen.slave)) == (0, screen.settings)
    assert left_modes(screen.output) == []
    appends_only(screen.output)


@pytest.mark.long
def test_a_command_that_prints_much_is_shown_as_one_call(terminal):
    command = "for n in $(seq 3000); do echo row-${n}x; done"
    with FlakyServer([call("bash", command=command), "PONG"]) as server:
        screen = terminal("go", "--mode", "auto", "--sandbox", "off", server=server, ui=True)
        screen.expect("PONG")
        screen.wait()
    left = "\n".join(appends_only(screen.output).lines)
    assert (left.count("bash("), len(rows_in(left)) < 40) == (1, True)


@pytest.mark.parametrize("ui", [False, True], ids=PATHS)
def test_an_edit_is_a_diff_and_a_call_one_line_that_show_tells_whole(terminal, workspace, ui):
    (workspace / "a.txt").write_text("kept\nold line\n")
    steps = [
        call("edit_file", path="a.txt", old="old line", new="new line"),
        call("bash", command="seq -f number-%g 300"),
    ]
    with FlakyServer([*steps, "PONG"]) as server:
        screen = terminal("--mode", "auto", "--sandbox", "off", server=server, ui=ui)
        ask(screen, "edit")
        shown = screen.expect("PONG")
        ask(screen, "/show")
        whole = screen.expect("number-300")
        ask(screen, "/show 2")
        screen.expect("a.txt")
        ask(screen, "/diff")
        screen.expect("+new line")
        leave(screen)
    assert ("\x1b[32m+new line\x1b[0m\r\n" in screen.output.rpartition("/diff")[2]) is ui
    assert re.search(r"-\s{0,3}old line", shown) and re.search(r"\+\s{0,3}new line", shown)
    assert re.search(r"number-1\s", whole) and re.search(r"number-150\s", whole)
    assert "\x07" not in screen.output
    rows = re.split(r"[\r\n]+", screen.output)
    for change in (r"[\s\d]*-\s{0,3}old line", r"[\s\d]*\+\s{0,3}new line"):
        row = next(row for row in rows if re.match(change, ESCAPES.sub("", row)))
        assert bool(SGR.search(row)) is ui


# -- the bell --------------------------------------------------------------------------------------
# For a turn of over 10 s there is no shorter way yet: once its length is a parameter, the two long
# tests here can be quick ones in this process.


def config(home: Path, text: str) -> None:
    """The user's config file."""
    folder = home / ".config" / "agent"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(text)


BELLS = [
    pytest.param("", {}, True, 1, id="ui"),
    pytest.param("bell = false\n", {}, True, 0, id="off", marks=pytest.mark.long),
    pytest.param("bell = true\n", {}, False, 1, id="plain", marks=pytest.mark.long),
    pytest.param("", {"NO_COLOR": "1"}, True, 1, id="NO_COLOR", marks=pytest.mark.long),
    pytest.param("bell = false\n", {}, False, 0, id="plain, off", marks=pytest.mark.long),
]


@pytest.mark.parametrize("text, changes, ui, count", BELLS)
def test_a_question_that_waits_rings_once(terminal, home, text, changes, ui, count):
    config(home, text)
    with FlakyServer([call("bash", command="touch a.txt"), "PONG"]) as server:
        screen = terminal("go", "--sandbox", "off", server=server, ui=ui, env=changes)
        screen.match(re.compile(r"\[y/n/a\]"))
        screen.listens()
        rung = screen.output.count("\x07")
        screen.send("y\r")
        screen.expect("PONG")
        assert screen.wait() == 0
    assert (rung, screen.output.count("\x07")) == (count, count)


LONG_TURN = call("bash", command="sleep 10.5", timeout=60)


@pytest.mark.long
@pytest.mark.parametrize("text, changes, ui, count", [BELLS[0], BELLS[-1]])
def test_a_long_turn_rings_at_its_end(terminal, home, text, changes, ui, count):
    config(home, text)
    with FlakyServer([LONG_TURN, "PONG"]) as server:
        screen = terminal("go", "--yes", "--sandbox", "off", server=server, ui=ui, env=changes)
        assert screen.wait(120) == 0
    assert ("PONG" in screen.text, screen.output.count("\x07")) == (True, count)


@pytest.mark.long
@pytest.mark.parametrize("redirection, count", [("2> err.txt", 0), ("> out.txt", 1)])
def test_the_bell_is_for_a_terminal_at_stderr(shell, workspace, redirection, count):
    with FlakyServer([LONG_TURN, "PONG"]) as server:
        screen = shell(f"--yes --sandbox off go {redirection}", server, {})
        screen.wait(120)
        output = all_output(screen, workspace)
    assert ("PONG" in output, output.count("\x07")) == (True, count)


def test_nobody_is_asked_where_only_the_output_is_a_terminal(shell, workspace):
    with FlakyServer([call("write_file", path="a.txt", content="a"), "PONG"]) as server:
        screen = shell("go </dev/null", server, {})
        assert screen.wait() == 77
    assert ("PONG" in screen.text, "? [" in screen.text) == (True, False)


def test_what_is_typed_under_one_shot_is_not_echoed_and_left_to_the_shell(shell, workspace):
    items = "\n".join(f"- item {n}" for n in range(6))
    with FlakyServer([{"text": f"# one\n\n{items}", "hold_after": 14}]) as server:
        screen = shell("go; read line; echo got-$line", server, {})
        until(server.holding.is_set)
        screen.expect("item 3")
        screen.send("typed-words\r")
        screen.expect("·")
        server.release()
        screen.expect("got-typed-words")
        screen.wait()
    rows = [row.strip() for row in appends_only(screen.output).lines]
    assert screen.output.count("typed-words") == 1
    assert [row for row in rows if "item" in row] == [f"• item {n}" for n in range(6)]


# -- the terminal afterwards -----------------------------------------------------------------------


@pytest.mark.parametrize("ui", [True, pytest.param(False, marks=pytest.mark.long)])
def test_after_ctrl_c_in_a_stream_the_terminal_is_as_it_was(terminal, ui):
    text = "# one\n\ntwo **three\nfour five** six\n\n```python\nseven eight nine"
    with FlakyServer([{"text": text, "hold_after": 9}, "PONG"]) as server:
        screen = terminal(server=server, ui=ui)
        ask(screen, "count")
        until(server.holding.is_set)
        screen.expect("five")
        screen.listens()
        # Else the kernel takes away what was written and not read, of a region amid its drawing.
        assert bool(termios.tcgetattr(screen.slave)[3] & termios.NOFLSH) is ui
        screen.interrupt()
        ask(screen, "ping")
        screen.expect("PONG")
        leave(screen)
    lines = "\n".join(appends_only(screen.output).lines)
    assert [lines.count(word) for word in ("two", "five", "PONG")] == [1, 1, 1]


ENDINGS = [
    pytest.param("\x03", 130, id="ctrl-c"),
    pytest.param("term", 143, id="SIGTERM"),
]


@pytest.mark.long
@pytest.mark.parametrize("how, code", ENDINGS)
@pytest.mark.parametrize("step", [{"hold_after": 2}, {"hold": "before"}], ids=["text", "waiting"])
def test_a_signal_ends_one_shot_and_leaves_the_terminal_as_it_was(terminal, how, code, step):
    with FlakyServer([{"text": "alpha beta gamma delta"} | step]) as server:
        screen = terminal("go", server=server, ui=True)
        until(server.holding.is_set)
        screen.match(ELAPSED if "hold" in step else re.compile("beta"))
        screen.listens()
        screen.process.terminate() if how == "term" else screen.send(how)
        assert screen.wait() == code
    assert termios.tcgetattr(screen.slave) == screen.settings
    assert left_modes(screen.output) == []
    appends_only(screen.output)


@pytest.mark.long
def test_ctrl_c_while_a_command_is_watched_leaves_the_terminal_as_it_was(terminal):
    with FlakyServer([call("bash", command="echo live-$((40+2)); sleep 300"), "PONG"]) as server:
        screen = terminal("--mode", "auto", "--sandbox", "off", server=server, ui=True)
        ask(screen, "run")
        screen.expect("live-42")
        screen.interrupt()
        ask(screen, "ping")
        screen.expect("PONG")
        leave(screen)
    appends_only(screen.output)


# -- a real terminal -------------------------------------------------------------------------------


class Pane:
    """The agent in a pane of tmux; what it wrote stays when it has ended."""

    def __init__(self, folder: Path, command: list[str], cwd: Path, env: dict[str, str]) -> None:
        self.socket, self.env = folder / "tmux", env
        self.command, self.cwd = command, cwd
        lines = ["set -g history-limit 100000", "set -g remain-on-exit on", "set -g status off"]
        lines += ["set -g remain-on-exit-format ''", "set -g escape-time 0"]
        lines += ["set -g default-terminal screen-256color"]
        (folder / "tmux.conf").write_text("\n".join(lines) + "\n")

    def tmux(self, *args: object) -> str:
        """What a command of tmux prints."""
        where = ["-S", str(self.socket), "-f", str(self.socket.parent / "tmux.conf")]
        done = subprocess.run(
            ["tmux", "-u", *where, *map(str, args)],
            env=self.env,
            capture_output=True,
            encoding="utf-8",
            check=True,
        )
        return done.stdout

    def start(self, columns: int, rows: int) -> None:
        """Begin with a window of this size."""
        line = shlex.join(["exec", *self.command])
        self.tmux("new-session", "-d", "-x", columns, "-y", rows, "-c", self.cwd, line)

    def text(self) -> str:
        """All lines from the first one on; a line that was wrapped is one line."""
        return self.tmux("capture-pane", "-p", "-J", "-S", "-")

    def wait(self) -> str:
        """All lines when the agent has ended."""
        until(lambda: self.tmux("display-message", "-p", "#{pane_dead}").strip() == "1")
        return self.text()

    def close(self) -> None:
        """End it, and wait until it is gone."""
        self.tmux("kill-server")
        until(lambda: not alive(str(self.socket)))


@pytest.fixture
def pane(scratch: Path, workspace: Path, environment: Callable, tmp_path: Path) -> Iterator:
    """Start the agent in tmux, with the packages of the extra."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    started: list[Pane] = []

    def start(*args: str, server: FlakyServer, columns: int = 80, rows: int = 24) -> Pane:
        command = [sys.executable, "-m", "agent", *args]
        started.append(Pane(scratch, command, workspace, environment(server, ui=True)))
        started[-1].start(columns, rows)
        return started[-1]

    yield start
    for one in started:
        one.close()
    nothing_runs_in(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["paragraphs", "code", "loose list", "table", "one word"])
def test_in_tmux_each_line_of_a_long_answer_stands_once(pane, kind):
    with FlakyServer([LONG[kind]]) as server:
        text = pane("go", server=server).wait()
    if kind in COUNTS:
        text = re.sub(r"\s", "", text)
    assert rows_in(text) == list(range(COUNTS.get(kind, COUNT)))


WIDE = {
    "CJK": "你好世界这是一个测试",
    "long CJK": "漢字" * 60 + "終",
    "Hangul": "안녕하세요세계",
    "full width": "ｆｕｌｌｗｉｄｔｈ",
    "emoji": "🎉🚀✨",
    "joined emoji": "👩‍👩‍👧family",  # tmux keeps 21 bytes of a character, one more child is lost
    "flag": "🇩🇪flag",
    "skin": "👍🏽skin",
    "combining": "cafe\u0301-x\u0304y",
    "Hebrew": "שלוםעולם",
    "Arabic": "مرحبابالعالم",
    "Hindi": "नमस्ते",
    "Thai": "สวัสดี",
    "Greek": "Ωμέγα",
}
FORMS = ["{}", "- {}", "**{}** and", "`{}`", "> {}", "## {}", "```\n{}\n```"]
JOINERS = re.compile(r"\\u\{200[cd]\}|\\u200[cd]|[\u200c\u200d\ufe0f\s]")


@pytest.mark.parametrize("columns", [80, pytest.param(40, marks=pytest.mark.long)])
def test_wide_and_odd_letters_are_all_there(pane, columns):
    blocks = [
        f"a{n}b\n\n" + form.format(word + f"c{n}d")
        for n, (form, word) in enumerate((form, word) for form in FORMS for word in WIDE.values())
    ]
    with FlakyServer(["\n\n".join(blocks)]) as server:
        text = JOINERS.sub("", BOXES.sub("", pane("go", server=server, columns=columns).wait()))
    words = [f"{JOINERS.sub('', word)}" for _ in FORMS for word in WIDE.values()]
    expected = [f"{word}c{n}d" for n, word in enumerate(words)]
    assert [word for word in expected if text.count(word) != 1] == []
    assert [n for n in range(len(words)) if text.count(f"a{n}b") != 1] == []


@pytest.mark.long
@pytest.mark.parametrize("columns", [80, 40])
def test_wide_letters_in_a_table_are_all_there(pane, columns):
    cells = [word for word in WIDE.values() if len(word) < 12]
    table = "| a | b |\n|---|---|\n" + "\n".join(f"| {word} | x |" for word in cells)
    with FlakyServer([table]) as server:
        text = JOINERS.sub("", BOXES.sub("", pane("go", server=server, columns=columns).wait()))
    assert [word for word in cells if JOINERS.sub("", word) not in text] == []


@pytest.mark.long
@pytest.mark.parametrize("columns, rows", [(40, 10), (20, 5), (10, 3), (200, 50)])
def test_terminals_of_any_size_show_each_line_once(pane, columns, rows):
    parts = ["# row-0x", "row-1x is **row-2x**", "- row-3x\n- row-4x", "```sh\nrow-5x\n```"]
    lines = [numbered("{}", 40, "\n").replace("row-", "row-1000"), "the end"]
    with FlakyServer(["\n\n".join([*parts, *lines])]) as server:
        text = re.sub(r"\s", "", pane("go", server=server, columns=columns, rows=rows).wait())
    assert rows_in(text) == [*range(6), *(int(f"1000{n}") for n in range(40))]


SIZES = [
    pytest.param(40, 24, id="narrower"),
    pytest.param(120, 24, id="wider", marks=pytest.mark.long),
    pytest.param(80, 8, id="lower", marks=pytest.mark.long),
    pytest.param(80, 50, id="higher", marks=pytest.mark.long),
    pytest.param(30, 6, id="both smaller", marks=pytest.mark.long),
]
FINISHED = numbered("{} alpha", 20, "\n\n")
RESIZED = {
    "a paragraph": f"{FINISHED}\n\n{numbered('{}', 60, ' ', 20)}",
    "code": f"{FINISHED}\n\n```sh\n{numbered('{}', 60, start=20)}\n```",
    "list": f"{FINISHED}\n\n{numbered('- {}', 60, start=20)}",
}


@pytest.mark.parametrize("columns, rows", SIZES)
@pytest.mark.parametrize(
    "kind", ["a paragraph", *(pytest.param(k, marks=pytest.mark.long) for k in ("code", "list"))]
)
def test_a_window_that_changes_its_size_loses_and_doubles_nothing(pane, columns, rows, kind):
    text = RESIZED[kind]
    before = len(re.findall(r"\S+\s*|\s+", text[: text.index("row-40x")]))
    with FlakyServer([{"text": text + "\n\nLAST-WORD", "hold_after": before}]) as server:
        window = pane("go", server=server)
        until(server.holding.is_set)
        until(lambda: "row-38x" in window.text())
        window.tmux("resize-window", "-x", columns, "-y", rows)
        server.release()
        window.wait()
        window.tmux("resize-window", "-x", 80, "-y", 24)
        shown = re.sub(r"\s", "", window.text())
    found = rows_in(shown)
    if rows < 24 and (kind != "a paragraph" or columns < 80):
        # A part of the open block may have left the screen for good: it may stand there again.
        assert found[:20] == [*range(20)] and len(found) <= 60 + 22
        found = [*dict.fromkeys(reversed(found))][::-1]
    assert (found, shown.count("LAST-WORD")) == ([*range(60)], 1)


@pytest.mark.long
def test_a_pane_looks_the_same_after_an_answer_however_often_it_was_resized(pane):
    with FlakyServer([{"text": numbered("{} alpha", 60, "\n\n"), "hold_after": 100}]) as server:
        window = pane("go", server=server)
        until(lambda: "row-48x" in window.text())
        for columns, rows in [(40, 10), (100, 30), (20, 5), (80, 24), (33, 11), (80, 24)]:
            window.tmux("resize-window", "-x", columns, "-y", rows)
        server.release()
        shown = re.sub(r"\s", "", window.wait())
    assert rows_in(shown) == [*range(60)]
