"""edit_file, write_file and read_file: what they do to the bytes of a file and what they say.

Every call comes from a scripted model and goes through the whole loop. The ids of the rows (E01,
R03 ...) are those of the catalogue of faults that other agents were reported for.
"""

import ast
import fcntl
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, results, until
from hypothesis import given, settings
from hypothesis import strategies as st

from agent import Settings, build_agent
from flaky_server import FlakyServer

ENVIRON = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": "/nonexistent"}
MORE = re.compile(r"\[lines (\d+)-(\d+) of (\d+); go on with start=(\d+)\]$")
SHOWN = re.compile(r"^[^\w\n]*(\d+): (.*)$", re.M)
NO_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1"}  # a limit for files would cut it
quick = settings(max_examples=20, deadline=None, database=None)
thorough = settings(max_examples=600, deadline=None, database=None)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def play(folder: Path, *steps: Any, ask: Any = None, **options: Any) -> list[str]:
    """Let a model take these steps in the folder, in mode auto; the results of its calls."""
    with FlakyServer([*steps, "done"]) as server:
        place = {"environ": ENVIRON, "workspace": str(folder)}
        fields = {"mode": "auto", "sandbox": "off", **place, **options}
        known = Settings(base_url=server.url, model="m", api_key="k", **fields)
        agent = build_agent(known, ask=ask)
        try:
            agent.run("go")
        finally:
            agent.close()
    assert [p for request in server.requests for p in request.problems] + server.errors == []
    return results(server.requests[-1])


def edit(old: str, new: str, path: str = "f", **more: Any) -> dict[str, Any]:
    """A step that edits."""
    return {"call": "edit_file", "arguments": {"path": path, "old": old, "new": new, **more}}


def write(content: str, path: str = "f") -> dict[str, Any]:
    """A step that writes."""
    return {"call": "write_file", "arguments": {"path": path, "content": content}}


def read(path: str = "f", **more: Any) -> dict[str, Any]:
    """A step that reads."""
    return {"call": "read_file", "arguments": {"path": path, **more}}


def batch(*steps: dict[str, Any]) -> dict[str, Any]:
    """One reply with several calls."""
    return {"calls": [{"name": step["call"], "arguments": step["arguments"]} for step in steps]}


def after(action: Callable[[], Any], step: Any) -> Callable[[Any], Any]:
    """The step, once something else has happened on the machine."""

    def take(request: Any) -> Any:
        action()
        return step

    return take


def appended(path: Path, text: str) -> Callable[[], Any]:
    """The action of a user who adds a text to a file."""
    return lambda: path.write_bytes(path.read_bytes() + text.encode())


def edited(folder: Path, data: bytes, old: str, new: str, **more: Any) -> tuple[bytes, str]:
    """Edit a file that holds this; what it holds then, and what was said."""
    (folder / "f").write_bytes(data)
    [text] = play(folder, edit(old, new, **more))
    return (folder / "f").read_bytes(), text


def names(folder: Path) -> list[str]:
    """What lies in a folder, without the agent's own."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name != ".agent")


def failed(text: str) -> bool:
    """Whether a result says that the call did not do its work."""
    return text.startswith(("error: ", "denied: "))


# -- an edit changes its place and nothing else --------------------------------------------------


UTF_16 = "\ufeffé=1\r\n🙂 two\r\n"
SJIS = "設定=1\nn=1\n".encode("shift-jis")


@pytest.mark.parametrize(
    ("data", "old", "new", "expected"),
    [
        pytest.param(b"a\r\nb\r\n", "a", "A", b"A\r\nb\r\n", id="E01 CRLF"),
        pytest.param(b"a\r\nb\r\nc", "c", "C", b"a\r\nb\r\nC", id="E01 CRLF, no end"),
        pytest.param(b"x\r\ny\r\n", "x\ny", "x\nz", b"x\r\nz\r\n", id="E02 lines of CRLF"),
        pytest.param(b"x\r\ny\r\n", "y\n", "z\nw\n", b"x\r\nz\r\nw\r\n", id="E02 one more"),
        pytest.param(b"x\r\ny\r\n", "x\n", "", b"y\r\n", id="E02 one less"),
        pytest.param(b"a\r\nb\nc", "c", "C", b"a\r\nb\nC", id="E03 mixed"),
        pytest.param(b"a\nb\r\nc\n", "b\nc", "B\nC", b"a\nB\r\nC\n", id="E03 a CRLF region"),
        pytest.param(b"a\r\nb\nc\r\n", "b\nc", "B\nC", b"a\r\nB\nC\r\n", id="E03 an LF region"),
        pytest.param(b"a\rb\rc", "b", "B", b"a\rB\rc", id="bare CR"),
        pytest.param(b"a\rb\r\nc\nd\r", "c", "C", b"a\rb\r\nC\nd\r", id="CR, CRLF and LF"),
        pytest.param(b"a\r\r\nb\r\r\n", "b", "B", b"a\r\r\nB\r\r\n", id="CR CR LF"),
        pytest.param(b"n=1\n# caf\xe9\n", "n=1", "n=2", b"n=2\n# caf\xe9\n", id="E06 Latin-1"),
        pytest.param(b"\xd6\xd0 n=1\n", "n=1", "n=2", b"\xd6\xd0 n=2\n", id="E06 GBK"),
        pytest.param(SJIS, "n=1", "n=2", SJIS.replace(b"n=1", b"n=2"), id="E06 Shift-JIS"),
        pytest.param(b"\xed\xa0\xbd n\n", "n", "m", b"\xed\xa0\xbd m\n", id="E06 half a pair"),
        pytest.param(b"\xff\n\xc3 n", "n", "m", b"\xff\n\xc3 m", id="E06 stray bytes"),
        pytest.param(b"\xef\xbf\xbd n", "n", "m", b"\xef\xbf\xbd m", id="U+FFFD of the user"),
        pytest.param(b"\xef\xbb\xbfhello\n", "hello", "bye", b"\xef\xbb\xbfbye\n", id="E09 BOM"),
        pytest.param(b"\xef\xbb\xbfa\r\nb", "a\nb", "b\na", b"\xef\xbb\xbfb\r\na", id="E09 CRLF"),
        pytest.param(b"n = 1", "1", "2", b"n = 2", id="E13 no final newline"),
        pytest.param(b"n = 1\n\n", "1", "2", b"n = 2\n\n", id="E13 two of them"),
        pytest.param(b"p\n", "p", 're.compile(r"[\\"\']")', b're.compile(r"[\\"\']")\n', id="E16"),
        pytest.param(b"'%s'\n", "'%s'", "‘%s’", "‘%s’\n".encode(), id="E17 straight to curly"),
        pytest.param("‘a’\n".encode(), "‘a’", "'a'", b"'a'\n", id="E17 curly to straight"),
        pytest.param(b"p\n", "p", 'printf("hi\\n");', b'printf("hi\\n");\n', id="E32 backslash-n"),
        pytest.param(b"p\n", "p", "x='\\u0000'", b"x='\\u0000'\n", id="E32 \\u0000"),
        pytest.param(b"a\\nb\n", "a\\nb", "a\\tb", b"a\\tb\n", id="E32 an escape is found"),
        pytest.param(b"x\n", "x", r"\g<0>\1\d$&$1{}%s&", b"\\g<0>\\1\\d$&$1{}%s&\n", id="E33"),
        pytest.param(b"abc a.c\n", "a.c", "x", b"abc x\n", id="E33 old is no regex"),
        pytest.param(b"3: foo()\n", "3: foo()", "3: bar()", b"3: bar()\n", id="E29 a real prefix"),
        pytest.param(b"a b  \n", "b  \n", "b\n", b"a b\n", id="trailing blanks are bytes"),
        pytest.param(b"\ta\n", "\ta", "\t\ta\t", b"\t\ta\t\n", id="tabs are bytes"),
        pytest.param(b"a\x0cb\n", "b", "c", b"a\x0cc\n", id="R09 form feed"),
        pytest.param("a\u2028b\n".encode(), "b", "c", "a\u2028c\n".encode(), id="R09 U+2028"),
        pytest.param("e\u0301 é\n".encode(), "é", "e", "e\u0301 e\n".encode(), id="no NFC"),
        pytest.param("a\u00a0b\n".encode(), "b", "c", "a\u00a0c\n".encode(), id="NBSP stays"),
    ],
)
def test_an_edit_changes_exactly_its_place(
    workspace: Path, data: bytes, old: str, new: str, expected: bytes
) -> None:
    after, text = edited(workspace, data, old, new)
    assert (after, failed(text)) == (expected, False), text


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(
    ("old", "new"),
    [("é=1", "ü=2"), ("two", "🙂🙂"), ("é=1\n🙂", "a\nb\nc"), ("two\n", "2")],
    ids=["letter", "pair", "lines", "end"],
)
def test_an_edit_keeps_the_encoding_of_utf_16(
    workspace: Path, codec: str, old: str, new: str
) -> None:
    after, _ = edited(workspace, UTF_16.encode(codec), old, new)
    expected = UTF_16.replace(old.replace("\n", "\r\n"), new.replace("\n", "\r\n"))
    assert after == expected.encode(codec)


@pytest.mark.parametrize(
    ("data", "old", "new"),
    [
        pytest.param(b"caf\xe9 n=1\n", "n=1", "ü=1", id="E07 Latin-1"),
        pytest.param(SJIS, "n=1\n", "n=1\n名前=2\n", id="E07 Shift-JIS"),
        pytest.param("設定=1\n".encode("gbk"), "=1", "=“1”", id="E07 GBK"),
        pytest.param(b"caf\xe9 n=1\n", "café", "coffee", id="old in another encoding"),
        pytest.param("\ufeffn=1".encode("utf-32-le"), "n=1", "n=2", id="UTF-32-LE"),
        pytest.param("\ufeffn=1".encode("utf-32-be"), "n=1", "n=2", id="UTF-32-BE"),
        pytest.param("n=1".encode("utf-16-le"), "n", "m", id="UTF-16 without a mark"),
        pytest.param(b"n=1\n\0", "n=1", "n=2", id="NUL"),
        pytest.param(b"PK\x03\x04\0\0 n=1", "n=1", "n=2", id="zip"),
    ],
)
def test_what_can_not_be_edited_without_loss_is_left_alone(
    workspace: Path, data: bytes, old: str, new: str
) -> None:
    after, text = edited(workspace, data, old, new)
    assert (after, text[:7]) == (data, "error: ")


def test_half_a_character_at_the_end_of_utf_16_is_kept_or_the_edit_refused(workspace: Path) -> None:
    data = "\ufeffab".encode("utf-16-le") + b"x"
    after, text = edited(workspace, data, "a", "c")
    assert after == (data if failed(text) else data.replace(b"a", b"c"))


@pytest.mark.parametrize(
    ("data", "old", "new", "expected"),
    [
        pytest.param(b"k v k k\n", "k", "K", b"K v K K\n", id="three places"),
        pytest.param(b"k", "k", "kk", b"kk", id="new holds old"),
        pytest.param(b"a\r\nb\na\n", "a\n", "c\n", b"c\r\nb\nc\n", id="each its line end"),
        pytest.param(b"\xe9 a a", "a", "b", b"\xe9 b b", id="Latin-1"),
        pytest.param(b"a.a", "a", "\\1", b"\\1.\\1", id="literal"),
    ],
)
def test_an_edit_of_all_places_changes_each(
    workspace: Path, data: bytes, old: str, new: str, expected: bytes
) -> None:
    assert edited(workspace, data, old, new, all=True)[0] == expected


def test_an_edit_of_very_many_places_does_not_take_long(workspace: Path) -> None:
    begun = time.monotonic()
    after, _ = edited(workspace, b"old line\r\n" * 20_000, "old", "new", all=True)
    assert after == b"new line\r\n" * 20_000
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("word", ["false", "False", "0", "no", False, 0])
def test_all_can_be_turned_off_in_any_spelling(workspace: Path, word: object) -> None:
    after, text = edited(workspace, b"kk", "k", "K", all=word)
    assert (after, text[:7]) == (b"kk", "error: ")


@pytest.mark.parametrize(
    ("data", "old", "numbers"),
    [
        pytest.param(b"aaa", "aa", "1, 1", id="E18 overlapping"),
        pytest.param(b"x = 1\n" * 3, "x = 1\nx = 1", "1, 2", id="E18 lines"),
        pytest.param(b"a\n\n\n\nb\n", "\n\n", "1, 2, 3", id="E18 blank lines"),
        pytest.param(b"x\r\n" * 3, "x\nx", "1, 2", id="E18 CRLF"),
        pytest.param(b"k\nv\nk\nk\n", "k", "1, 3, 4", id="E18 three places"),
        pytest.param(b"\x0ck\n\x0c\nk\n", "k", "1, 3", id="R09 form feed"),
        pytest.param("\u2028k\n\x85k\n".encode(), "k", "1, 2", id="R09 U+2028"),
        pytest.param(b"k\rk\nk", "k", "1, 1, 2", id="R09 bare CR"),
    ],
)
def test_an_edit_that_fits_several_places_names_their_lines(
    workspace: Path, data: bytes, old: str, numbers: str
) -> None:
    after, text = edited(workspace, data, old, "new")
    assert (after, text[:7]) == (data, "error: ")
    assert re.search(rf"\b{numbers.count(',') + 1}\b.*\b{numbers}\b", text), text


@pytest.mark.parametrize(
    ("data", "old", "new", "words"),
    [
        pytest.param(b"abc", "", "X", "empty", id="E19"),
        pytest.param(b"", "", "X", "empty", id="E19 in an empty file"),
        pytest.param(b"x=1\n", "x=1", "x=1", "same", id="E20"),
        pytest.param(b"x\r\ny\r\n", "x\ny", "x\r\ny", "same|change", id="E20 but for the CR"),
    ],
)
@pytest.mark.parametrize("every", [False, True])
def test_an_edit_that_is_none_changes_nothing_and_says_so(
    workspace: Path, data: bytes, old: str, new: str, words: str, every: bool
) -> None:
    after, text = edited(workspace, data, old, new, all=every)
    assert (after, text[:7]) == (data, "error: ")
    assert re.search(words, text, re.I), text


# -- a miss says what would fit ------------------------------------------------------------------


MISSES = [
    pytest.param("\tif x:\n\t\ty()\n", "    if x:\n        y()", "tabs", 1, id="E14 tabs"),
    pytest.param("    if x:\n        y()\n", "\tif x:\n\t\ty()", "tabs", 1, id="E14 blanks"),
    pytest.param("a\n\tx\ty\n", "\tx    y", "tabs", 2, id="E14 a tab inside"),
    pytest.param("a:\n    b(c)\n    d(e)\n", "  b(c)\n  d(e)", "indentation", 2, id="E34 indent"),
    pytest.param("a:\n\t\tb(c)\n\t\td()\n", "\tb(c)\n\td()", "indentation", 2, id="E34 deeper"),
    pytest.param("a\nReturn Foo(a)\n", "return foo(a)", "case", 2, id="E34 case"),
    pytest.param("a\nb(c)  \nd(e)\n", "b(c)\nd(e)", "trailing", 2, id="E34 trailing blanks"),
    pytest.param("a\nb(c)\nd(e)\n", "b(c) \nd(e)", "trailing", 2, id="E34 blanks in old"),
    pytest.param("a\nsay(“hi”)\n", 'say("hi")', "quotes", 2, id="E17 curly quotes"),
    pytest.param("a\nit's so\n", "it’s so", "quotes", 2, id="E17 straight quotes"),
    pytest.param("a\r\n\tif x:\r\n\t\ty()\r\n", "  if x:\n    y()", "tabs", 2, id="E14 CRLF"),
]


@pytest.mark.parametrize(("text", "old", "word", "line"), MISSES)
def test_a_miss_shows_the_nearest_lines_and_why_they_differ(
    workspace: Path, text: str, old: str, word: str, line: int
) -> None:
    after, said = edited(workspace, text.encode(), old, "new")
    assert (after, said[:7]) == (text.encode(), "error: ")
    assert word in said.lower() and re.search(r"\bf\b", said), said
    assert line in [int(number) for number, _ in SHOWN.findall(said)], said


def plain(shown: str) -> str:
    """A line as it is in the file, from how an error shows it."""
    try:
        return str(ast.literal_eval(shown))
    except (SyntaxError, ValueError):
        return shown.replace("\\t", "\t").replace("\\r", "\r")


@pytest.mark.parametrize(("text", "old", "word", "line"), MISSES)
def test_a_call_that_copies_what_the_error_shows_succeeds(
    workspace: Path, text: str, old: str, word: str, line: int
) -> None:
    def corrected(request: Any) -> dict[str, Any]:
        lines = [plain(shown) for _, shown in SHOWN.findall(results(request)[0])]
        return edit("\n".join(lines).removesuffix("\r"), "new")

    (workspace / "f").write_bytes(text.encode())
    said = play(workspace, edit(old, "new"), corrected)
    assert failed(said[0]) and not failed(said[1]), said
    assert b"new" in (workspace / "f").read_bytes()


@pytest.mark.parametrize(
    ("text", "old", "new", "word"),
    [
        pytest.param("foo()\nbar()\n", "1: foo()", "1: baz()", "line number", id="E29 one line"),
        pytest.param("a\nfoo()\nbar()\n", "2: foo()\n3: bar()", "2: x()", "line number", id="E29"),
        pytest.param("x = 2\n", "x = 1", "x = 2", "already", id="E34 already applied"),
        pytest.param("a\r\nx = 2\r\ny\r\n", "x = 1\ny", "x = 2\ny", "already", id="in CRLF"),
    ],
)
def test_a_miss_names_a_copied_number_and_an_edit_that_is_already_made(
    workspace: Path, text: str, old: str, new: str, word: str
) -> None:
    after, said = edited(workspace, text.encode(), old, new)
    assert (after, said[:7]) == (text.encode(), "error: ")
    assert word in said.lower(), said


def test_a_miss_in_a_file_that_changed_since_it_was_read_says_so(workspace: Path) -> None:
    path = workspace / "f"
    path.write_text("x = 1\n")
    change = after(lambda: path.write_text("total = sum(rows)\n"), edit("x = 1", "x = 2"))
    said = play(workspace, read(), change)[1]
    assert said.startswith("error: ") and "changed" in said
    assert path.read_text() == "total = sum(rows)\n"


def test_a_miss_in_a_long_file_shows_the_line_and_stays_short(workspace: Path) -> None:
    lines = [f"value_{n} = compute(row, {n})" for n in range(20_000)]
    old = "value_15000 = compute(row,15000)\n"
    begun = time.monotonic()
    _, said = edited(workspace, "\n".join(lines).encode(), old, "x")
    assert "15001" in [number for number, _ in SHOWN.findall(said)], said
    assert len(said) < 4000 and time.monotonic() - begun < 20


@pytest.mark.parametrize(
    ("text", "old"),
    [
        pytest.param("x" * 3_000_000, "y" * 50, id="one huge line"),
        pytest.param("a b c d e\n" * 200_000, "a b c d  e\n" * 500, id="many equal lines"),
        pytest.param("\n" * 300_000, "x\n" * 300, id="blank lines"),
        pytest.param("short\n", "long line of a big old\n" * 20_000, id="a huge old"),
    ],
)
def test_a_miss_is_answered_soon_and_briefly_whatever_the_sizes(
    workspace: Path, text: str, old: str
) -> None:
    begun = time.monotonic()
    after, said = edited(workspace, text.encode(), old, "x")
    assert (after, said[:7], len(said) < 8000) == (text.encode(), "error: ", True)
    assert time.monotonic() - begun < 20


def test_a_miss_with_nothing_like_it_is_still_an_error_that_names_the_file(workspace: Path) -> None:
    after, said = edited(workspace, b"abc\n", "quite another thing", "z")
    assert after == b"abc\n" and re.match(r"error: .*\bf\b", said), said


# -- mode, owner, links --------------------------------------------------------------------------


TOOLS = [edit("old", "new"), write("new\n")]


@pytest.mark.parametrize("step", TOOLS, ids=["edit", "write"])
@pytest.mark.parametrize("mode", [0o755, 0o600, 0o444, 0o640, 0o4755, 0o2711])
def test_a_changed_file_keeps_its_mode(workspace: Path, step: Any, mode: int) -> None:
    (workspace / "f").write_text("old\n")
    (workspace / "f").chmod(mode)
    play(workspace, step)
    kept = stat.S_IMODE((workspace / "f").stat().st_mode)
    assert ((workspace / "f").read_text(), oct(kept)) == ("new\n", oct(mode))


@needs_root
@pytest.mark.parametrize("step", TOOLS, ids=["edit", "write"])
def test_a_changed_file_keeps_its_owner(workspace: Path, step: Any) -> None:
    (workspace / "f").write_text("old\n")
    (workspace / "f").chmod(0o640)
    os.chown(workspace / "f", 1234, 2345)
    play(workspace, step)
    now = (workspace / "f").stat()
    assert (workspace / "f").read_text() == "new\n"
    assert (now.st_uid, now.st_gid, stat.S_IMODE(now.st_mode)) == (1234, 2345, 0o640)


@needs_root
def test_a_file_whose_owner_can_not_be_kept_is_written_in_place(
    run_agent: Any, scratch: Path
) -> None:
    other = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    if subprocess.run([*other, sys.executable, "-c", "import requests"], cwd="/").returncode:
        pytest.skip("another user can not run this Python")
    (scratch / "f").write_text("old\n")
    (scratch / "f").chmod(0o666)
    os.chown(scratch, 65534, 65534)
    before = (scratch / "f").stat()
    with FlakyServer([edit("old", "new"), "done"]) as server:
        env = {"HOME": str(scratch)}
        run_agent("--yes", "go", server=server, cwd=scratch, env=env, under=other)
    now = (scratch / "f").stat()
    assert (scratch / "f").read_text() == "new\n"
    assert (now.st_uid, now.st_mode, now.st_ino) == (0, before.st_mode, before.st_ino)


@pytest.fixture
def umask() -> Iterator[Callable[[int], None]]:
    """Set the umask; it is as before at the end."""
    before = os.umask(0o022)
    os.umask(before)
    yield lambda value: (os.umask(value), None)[1]
    os.umask(before)


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o027, 0o077])
def test_a_new_file_gets_the_mode_that_the_umask_leaves(
    workspace: Path, umask: Callable[[int], None], mask: int
) -> None:
    umask(mask)
    play(workspace, write("x", "n.txt"))
    assert oct(stat.S_IMODE((workspace / "n.txt").stat().st_mode)) == oct(0o666 & ~mask)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("#!/bin/sh\n", id="E11 no BOM"),
        pytest.param("x=1", id="E13 no newline at the end"),
        pytest.param("\n\n x \n\n", id="blank lines and blanks"),
        pytest.param("a\r\nb\rc\n", id="line ends as sent"),
        pytest.param("é 設定 🙂 \u2028 \x0c \x85 e\u0301", id="any character"),
        pytest.param("\\n \\u0041 \\x41 \n \\g<0> $1 %s", id="E32 escapes"),
        pytest.param("", id="empty"),
    ],
)
def test_a_new_file_holds_exactly_what_was_sent(workspace: Path, content: str) -> None:
    [said] = play(workspace, write(content, "new/deep/file.txt"))
    assert (workspace / "new/deep/file.txt").read_bytes() == content.encode()
    assert not failed(said) and names(workspace / "new/deep") == ["file.txt"]


@pytest.mark.parametrize("step", TOOLS, ids=["edit", "write"])
@pytest.mark.parametrize(
    ("count", "words"),
    [(2, "2 hard links, both changed"), (3, "3 hard links, all changed")],
)
def test_all_names_of_a_file_change_and_the_result_says_so(
    workspace: Path, tmp_path: Path, step: Any, count: int, words: str
) -> None:
    others = [tmp_path / "outside", workspace / "g"][: count - 1]
    (workspace / "f").write_text("old\n")
    for other in others:
        other.hardlink_to(workspace / "f")
    before = (workspace / "f").stat()
    [said] = play(workspace, step)
    now = (workspace / "f").stat()
    assert words in said and [path.read_text() for path in others] == ["new\n"] * len(others)
    assert (now.st_ino, now.st_mode, now.st_nlink) == (before.st_ino, before.st_mode, count)


def test_a_file_with_one_name_says_nothing_of_links(workspace: Path) -> None:
    after, said = edited(workspace, b"old\n", "old", "new")
    assert after == b"new\n" and "link" not in said


@pytest.mark.parametrize(
    "path",
    ["node_modules/p/i.js", "sub/node_modules/i.js", ".venv/lib/i.py", "venv/i.py", "env/lib/i.py"],
)
@pytest.mark.parametrize("step", [edit("old", "new"), write("new")], ids=["edit", "write"])
@pytest.mark.parametrize(("answer", "text"), [("y", "new"), ("n", "old"), (None, "old")])
def test_a_hard_link_in_an_installed_package_is_asked_for(
    workspace: Path, tmp_path: Path, path: str, step: Any, answer: str | None, text: str
) -> None:
    store, asked = tmp_path / "store.js", []
    (workspace / path).parent.mkdir(parents=True)
    (workspace / path.split("/")[0] / "pyvenv.cfg").write_text("home = /usr/bin\n")
    store.write_text("old")
    (workspace / path).hardlink_to(store)
    step = {**step, "arguments": {**step["arguments"], "path": path}}
    [said] = play(workspace, step, ask=lambda question: asked.append(question) or answer)
    assert (len(asked), store.read_text()) == (1, text), said
    assert failed(said) == (text == "old")


def test_only_hard_links_are_asked_for_there(workspace: Path) -> None:
    (workspace / "node_modules").mkdir()
    (workspace / "node_modules" / "i.js").write_text("old")
    play(workspace, edit("old", "new", "node_modules/i.js"))
    assert (workspace / "node_modules" / "i.js").read_text() == "new"


@pytest.mark.parametrize("step", TOOLS, ids=["edit", "write"])
@pytest.mark.parametrize(
    ("link", "target"),
    [("f", "real"), ("f", "sub/real"), ("f", "other"), ("sub", "folder")],
    ids=["beside", "in a folder", "a link to a link", "a folder"],
)
def test_a_link_is_followed_and_stays(workspace: Path, step: Any, link: str, target: str) -> None:
    for name in ("real", "sub/real" if link == "f" else "folder/f"):
        (workspace / name).parent.mkdir(exist_ok=True)
        (workspace / name).write_text("old\n")
    (workspace / "other").symlink_to("real")
    (workspace / link).symlink_to(target)
    path = link if link == "f" else "sub/f"
    play(workspace, {**step, "arguments": {**step["arguments"], "path": path}})
    assert (workspace / path).read_text() == "new\n"
    assert [(workspace / name).readlink() for name in (link, "other")] == [
        Path(target),
        Path("real"),
    ]


@pytest.mark.parametrize("step", [edit("old", "new"), write("new\n"), read()])
@pytest.mark.parametrize("target", ["../outside", "folder/../../outside"])
def test_a_link_that_leads_out_is_not_followed(
    workspace: Path, tmp_path: Path, step: Any, target: str
) -> None:
    (tmp_path / "outside").write_text("old\n")
    (workspace / "folder").mkdir()
    (workspace / "f").symlink_to(target)
    [said] = play(workspace, step)
    assert failed(said) and "old" not in said.removeprefix("error: ")
    assert ((tmp_path / "outside").read_text(), (workspace / "f").is_symlink()) == ("old\n", True)


# -- a kill, a full disk, what they leave --------------------------------------------------------


def test_a_file_left_by_a_kill_goes_away_at_the_next_write_there(workspace: Path) -> None:
    (workspace / "sub").mkdir()
    for name in ("sub/.0123456789ab.agent-tmp", "sub/.ba9876543210.agent-tmp"):
        (workspace / name).write_text("half")
    play(workspace, write("x", "sub/f"))
    assert names(workspace / "sub") == ["f"]


def test_the_file_of_a_write_that_still_runs_and_files_of_others_stay(workspace: Path) -> None:
    others = [".0123456789.agent-tmp", ".0123456789ab.agent-tmp.txt", "0123456789ab.agent-tmp"]
    for name in (*others, ".aaaaaaaaaaaa.agent-tmp"):
        (workspace / name).write_text("mine")
    with (workspace / ".aaaaaaaaaaaa.agent-tmp").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        play(workspace, write("x"))
        assert names(workspace) == sorted([*others, ".aaaaaaaaaaaa.agent-tmp", "f"])
    play(workspace, edit("x", "y"))
    assert names(workspace) == sorted([*others, "f"])


def test_odd_things_with_the_name_of_a_left_file_do_no_harm(
    workspace: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").write_text("precious")
    (workspace / ".0123456789ab.agent-tmp").symlink_to(tmp_path / "outside")
    (workspace / ".1123456789ab.agent-tmp").mkdir()
    os.mkfifo(workspace / ".2123456789ab.agent-tmp")
    [said] = play(workspace, write("x"))
    assert (failed(said), (workspace / "f").read_text()) == (False, "x")
    assert (tmp_path / "outside").read_text() == "precious"


def test_a_left_file_is_not_listed(workspace: Path) -> None:
    for name in (".0123456789ab.agent-tmp", "f", ".hidden"):
        (workspace / name).write_text("needle")
    listed, found = play(
        workspace,
        {"call": "list_files", "arguments": {}},
        {"call": "list_files", "arguments": {"pattern": "*.agent-tmp"}},
    )
    assert "agent-tmp" not in listed and ".hidden" in listed
    assert "0123456789ab" not in found


def test_a_kill_in_the_middle_of_a_write_leaves_the_old_file_or_the_new_one(
    start_agent: Any, workspace: Path
) -> None:
    old = b"needle\n" + b"a line of the file\n" * 1_500_000
    (workspace / "f").write_bytes(old)
    with FlakyServer([edit("needle", "thread")]) as server:
        agent = start_agent("--yes", "go", server=server)
        until(lambda: agent.poll() is not None or [*workspace.glob(".*.agent-tmp")] or gone(server))
        agent.kill()
        agent.wait()
    assert (workspace / "f").read_bytes() in (old, old.replace(b"needle", b"thread"))
    play(workspace, write("x", "g"))
    assert names(workspace) == ["f", "g"]


def gone(server: FlakyServer) -> bool:
    """Whether the call is over: its result was sent."""
    return len(server.requests) > 1


@pytest.mark.parametrize("links", [1, 2])
def test_a_write_that_fails_half_way_leaves_the_old_bytes(
    run_agent: Any, workspace: Path, links: int
) -> None:
    old = b"needle\n" + b"x\n" * 150_000
    (workspace / "f").write_bytes(old)
    if links == 2:
        (workspace / "g").hardlink_to(workspace / "f")
    small = ("bash", "-c", 'ulimit -f 450; exec "$@"', "bash")
    with FlakyServer([edit("needle", "y" * 250_000), "done"]) as server:
        run_agent("--yes", "go", server=server, under=small, env=NO_BYTECODE)
    assert results(server.requests[-1])[0].startswith("error: ")
    assert [(workspace / name).read_bytes() == old for name in names(workspace)] == [True] * links


# -- two changes of one file ---------------------------------------------------------------------


def test_two_edits_of_one_file_in_one_reply_both_land(workspace: Path) -> None:
    lines = [f"{n}\n" for n in range(1, 101)]
    (workspace / "f").write_text("".join(lines))
    play(workspace, batch(edit("\n50\n", "\nFIFTY\n"), edit("\n75\n", "\nSEVENTY-FIVE\n")))
    lines[49], lines[74] = "FIFTY\n", "SEVENTY-FIVE\n"
    assert (workspace / "f").read_text() == "".join(lines)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param([edit("a", "b"), edit("b", "c"), edit("c", "d")], b"d\r\n", id="a chain"),
        pytest.param([edit("a", "b"), edit("b", "c", "link")], b"c\r\n", id="through a link"),
        pytest.param([edit("a", "b"), edit("b", "c", "./sub/../f")], b"c\r\n", id="another name"),
        pytest.param([edit("a", "b"), edit("b", "c", "hard")], b"c\r\n", id="a hard link"),
        pytest.param([write("x y\n"), edit("y", "z")], b"x z\n", id="written, then edited"),
        pytest.param([edit("a", "b"), write("x\n")], b"x\n", id="edited, then written"),
        pytest.param([write("x\n"), write("y\n")], b"y\n", id="written twice"),
        pytest.param([edit("no", "b"), edit("a", "c")], b"c\r\n", id="the first one fails"),
    ],
)
def test_changes_of_one_file_in_one_reply_are_made_in_order(
    workspace: Path, steps: list[Any], expected: bytes
) -> None:
    (workspace / "f").write_bytes(b"a\r\n")
    (workspace / "sub").mkdir()
    (workspace / "link").symlink_to("f")
    (workspace / "hard").hardlink_to(workspace / "f")
    play(workspace, batch(*steps))
    assert (workspace / "f").read_bytes() == expected


# -- a file that the model has not seen as it is -------------------------------------------------


def with_link(folder: Path) -> Path:
    """A file that the model has read, under two names."""
    (folder / "f").write_text("one\n")
    (folder / "link").symlink_to("f")
    return folder / "f"


@pytest.mark.parametrize(
    ("seen", "written"),
    [
        (read(), write("mine\n")),
        (read("link"), write("mine\n")),
        (read(), write("mine\n", "link")),
        (read("./f"), write("mine\n")),
        (read(start=1, end=1), write("mine\n")),
        (write("one\n"), write("mine\n")),
        (edit("one", "1"), write("mine\n")),
    ],
    ids=["read", "by a link", "through a link", "another name", "a range", "written", "edited"],
)
def test_a_file_that_the_user_changed_since_is_not_overwritten(
    workspace: Path, seen: Any, written: Any
) -> None:
    path = with_link(workspace)
    change = after(appended(path, "by the user\n"), written)
    said = play(workspace, seen, change)[1]
    assert said.startswith("error: ") and "changed" in said
    assert path.read_text().endswith("\nby the user\n")


def test_reading_it_again_permits_the_write(workspace: Path) -> None:
    path = with_link(workspace)
    change = after(appended(path, "two\n"), write("mine\n"))
    said = play(workspace, read(), change, read(), write("mine\n"))
    assert [failed(text) for text in said] == [False, True, False, False]
    assert path.read_text() == "mine\n"


def test_a_change_of_the_same_size_and_time_is_noticed(workspace: Path) -> None:
    def change() -> None:
        before = path.stat()
        path.write_text("two\n")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    path = with_link(workspace)
    said = play(workspace, read(), after(change, write("mine\n")))[1]
    assert (failed(said), path.read_text()) == (True, "two\n")


def test_a_change_by_a_command_of_the_model_is_one_that_it_has_not_seen(workspace: Path) -> None:
    path = with_link(workspace)
    command = {"call": "bash", "arguments": {"command": "echo two >> f"}}
    said = play(workspace, read(), command, write("mine\n"))[2]
    assert (failed(said), path.read_text()) == (True, "one\ntwo\n")


def test_a_touch_and_a_change_that_was_taken_back_are_no_change(workspace: Path) -> None:
    def touch() -> None:
        path.write_text("for a moment\n")
        path.write_text("one\n")
        os.utime(path, (0, 0))

    path = with_link(workspace)
    said = play(workspace, read(), after(touch, write("mine\n")))[1]
    assert (failed(said), path.read_text()) == (False, "mine\n")


def test_own_changes_are_seen_and_a_file_that_was_read_may_be_replaced(workspace: Path) -> None:
    path = with_link(workspace)
    steps = [read(), write("two\n"), edit("two", "three"), write("four\n"), write("five\n")]
    said = play(workspace, *steps)
    assert ([failed(text) for text in said], path.read_text()) == ([False] * 5, "five\n")


def test_an_edit_beside_a_change_of_the_user_keeps_both(workspace: Path) -> None:
    path = with_link(workspace)
    change = after(appended(path, "two\n"), edit("one", "1"))
    said = play(workspace, read(), change)
    assert (failed(said[1]), path.read_text()) == (False, "1\ntwo\n")


def test_an_edit_does_not_hide_a_change_that_the_model_has_not_seen(workspace: Path) -> None:
    path = with_link(workspace)
    change = after(appended(path, "two\n"), edit("one", "1"))
    said = play(workspace, read(), change, write("mine\n"))
    assert (failed(said[2]), path.read_text()) == (True, "1\ntwo\n")


def test_what_the_model_saw_is_known_in_a_resumed_session(run_agent: Any, workspace: Path) -> None:
    path = with_link(workspace)
    (workspace / "g").write_text("one\n")
    with FlakyServer([batch(read(), read("g")), "done"]) as server:
        run_agent("--yes", "look", server=server)
    appended(path, "by the user\n")()
    with FlakyServer([batch(write("mine\n"), write("mine\n", "g")), "done"]) as server:
        run_agent("--yes", "--resume", "go on", server=server)
    said = results(server.requests[-1])[-2:]
    assert [failed(text) for text in said] == [True, False] and "changed" in said[0]
    assert (path.read_text(), (workspace / "g").read_text()) == ("one\nby the user\n", "mine\n")


# -- write_file over what is there ---------------------------------------------------------------


@pytest.mark.parametrize("nothing", ["", "\n", " \n\t \r\n"], ids=["empty", "a line", "blanks"])
def test_a_file_is_not_emptied_by_one_call_but_by_the_same_call_again(
    workspace: Path, nothing: str
) -> None:
    kept = []
    (workspace / "f").write_text("three kilobytes\n" * 200)
    again = after(lambda: kept.append((workspace / "f").stat().st_size), write(nothing))
    said = play(workspace, write(nothing), again)
    assert ([failed(text) for text in said], kept) == ([True, False], [3200])
    assert "again" in said[0] and (workspace / "f").read_bytes() == nothing.encode()


def test_to_empty_one_file_is_not_to_empty_another(workspace: Path) -> None:
    for name in ("f", "g"):
        (workspace / name).write_text("full\n")
    said = play(workspace, write(""), write("", "g"), write(" "), write("new\n"), write(""))
    assert [failed(text) for text in said] == [True, True, True, False, True]
    assert [(workspace / name).read_text() for name in ("f", "g")] == ["new\n", "full\n"]


@pytest.mark.parametrize("data", [None, b"", b" \n"], ids=["new", "empty", "blank"])
def test_where_there_is_nothing_nothing_can_be_written(workspace: Path, data: bytes | None) -> None:
    if data is not None:
        (workspace / "f").write_bytes(data)
    [said] = play(workspace, write(""))
    assert (failed(said), (workspace / "f").read_bytes()) == (False, b"")


@pytest.mark.parametrize(
    ("data", "content", "expected", "word"),
    [
        pytest.param(b"a\r\nb\r\n", "a\nc\n", b"a\nc\n", "CRLF", id="CRLF"),
        pytest.param(b"\xef\xbb\xbfa\n", "é\n", b"\xef\xbb\xbf\xc3\xa9\n", "", id="E09 BOM"),
        pytest.param("é".encode("utf-16"), "ü\n", "ü\n".encode("utf-16"), "", id="E08 UTF-16"),
        pytest.param(
            "\ufeffa".encode("utf-16-be"), "🙂", "\ufeff🙂".encode("utf-16-be"), "", id="BE"
        ),
        pytest.param(b"caf\xe9\n", "café\n", "café\n".encode(), "UTF-8", id="E08 Latin-1"),
        pytest.param("設定".encode("gbk"), "設\n", "設\n".encode(), "UTF-8", id="E08 GBK"),
    ],
)
def test_a_replaced_file_keeps_its_encoding_or_the_result_says_what_it_lost(
    workspace: Path, data: bytes, content: str, expected: bytes, word: str
) -> None:
    (workspace / "f").write_bytes(data)
    said = play(workspace, read(), write(content))[1]
    assert ((workspace / "f").read_bytes(), failed(said)) == (expected, False)
    assert word in said


@pytest.mark.parametrize(
    ("data", "content"), [(b"a\r\n", "b\r\n"), (b"a\n", "b\n"), (b"a", "b\n"), (None, "b\n")]
)
def test_line_ends_that_stay_are_not_spoken_of(
    workspace: Path, data: bytes | None, content: str
) -> None:
    if data:
        (workspace / "f").write_bytes(data)
    [said] = play(workspace, write(content))
    assert (workspace / "f").read_bytes() == content.encode() and "CRLF" not in said


@pytest.mark.parametrize(
    ("content", "noted"),
    [
        pytest.param("a\\nb\\nc", True, id="E31 no real newline"),
        pytest.param('a\\nb\nprint("\\n")\n', False, id="E32 real ones too"),
        pytest.param("a b", False, id="none at all"),
    ],
)
def test_visible_escapes_are_written_as_sent_and_noted_where_they_look_wrong(
    workspace: Path, content: str, noted: bool
) -> None:
    [said] = play(workspace, write(content))
    assert (workspace / "f").read_bytes() == content.encode()
    assert ("\\n" in said) == noted, said


# -- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "a b.txt",
        "-n",
        "%41.txt",
        'it\'s "so".txt',
        "@file",
        "#x",
        "é.txt",
        "e\u0301.txt",
        "$HOME",
        "a;b",
        "~backup",
        "[x].txt",
        "日本.txt",
        "a\nb",
        "...",
        "x:1",
    ],
)
def test_a_name_of_any_form_is_taken_literally(workspace: Path, name: str) -> None:
    said = play(workspace, write("one\n", name), edit("one", "two", name), read(name))
    assert ([failed(text) for text in said], said[2]) == ([False] * 3, "1: two")
    assert names(workspace) == [name] and (workspace / name).read_text() == "two\n"


def test_a_path_may_be_absolute_or_have_detours(workspace: Path) -> None:
    (workspace / "sub dir").mkdir()
    paths = [f"{workspace}/sub dir/f", "sub dir/f", "./sub dir//f", "sub dir/../sub dir/f"]
    said = play(workspace, write("x", paths[0]), *(read(path) for path in paths))
    assert said[1:] == ["1: x"] * 4


def test_a_tilde_is_the_home_folder(workspace: Path) -> None:
    home = workspace / "home"
    home.mkdir()
    environ = {**ENVIRON, "HOME": str(home)}
    said = play(workspace, write("x", "~/t.txt"), read("~/t.txt"), environ=environ)
    assert (said[1], names(home), names(workspace)) == ("1: x", ["t.txt"], ["home"])


@pytest.mark.parametrize("path", ["~/t.txt", "../t.txt", "/etc/t.txt"])
def test_what_lies_outside_is_refused_and_makes_no_folder(
    workspace: Path, tmp_path: Path, path: str
) -> None:
    environ = {**ENVIRON, "HOME": str(tmp_path)}
    said = play(workspace, write("x", path), read(path), environ=environ)
    assert [failed(text) for text in said] == [True, True]
    assert (names(workspace), (tmp_path / "t.txt").exists()) == ([], False)


# -- read_file -----------------------------------------------------------------------------------


def odd_things(folder: Path) -> None:
    """What is no regular file."""
    (folder / "folder").mkdir()
    (folder / "folder" / "inner.txt").touch()
    os.mkfifo(folder / "pipe")
    os.mknod(folder / "socket", stat.S_IFSOCK | 0o600)
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "broken").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")


ODD = {
    "folder": "list_files",
    "pipe": "pipe",
    "socket": "socket",
    "zero": "outside|device",
    "/dev/zero": "outside|device",
    "/dev/stdin": "outside|device",
    "/proc/self/environ": "outside|device",
    "broken": "exist|nowhere",
    "loop": "loop|link",
}


def test_what_is_no_file_is_answered_at_once_and_usefully(run_agent: Any, workspace: Path) -> None:
    odd_things(workspace)
    with FlakyServer([batch(*(read(path) for path in ODD)), "done"]) as server:
        run_agent("--yes", "go", server=server)
    said = dict(zip(ODD, results(server.requests[-1]), strict=True))
    useless = {path: said[path] for path in ODD if not re.search(ODD[path], said[path], re.I)}
    assert ([text for text in said.values() if not failed(text)], useless) == ([], {})


@pytest.mark.parametrize("step", TOOLS, ids=["edit", "write"])
def test_what_is_no_file_is_not_written_either(run_agent: Any, workspace: Path, step: Any) -> None:
    odd_things(workspace)
    steps = [{**step, "arguments": {**step["arguments"], "path": path}} for path in ODD]
    before = [(path.name, path.lstat().st_mode) for path in sorted(workspace.iterdir())]
    steps = [step for step in steps if step["arguments"]["path"] != "broken"]
    with FlakyServer([batch(*steps), "done"]) as server:
        run_agent("--yes", "go", server=server)
    assert [text for text in results(server.requests[-1]) if not failed(text)] == []
    now = [(path.name, path.lstat().st_mode) for path in sorted(workspace.iterdir())]
    assert [row for row in now if row[0] != ".agent"] == before


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        pytest.param(b"PK\x03\x04\0\0", "zip", id="R07 zip"),
        pytest.param(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n\0", "pdf", id="R07 PDF"),
        pytest.param(b"%PDF-1.4\n1 0 obj << >> endobj\n", "pdf", id="R07 PDF without NUL"),
        pytest.param(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "png", id="R07 PNG"),
        pytest.param(b"\x1f\x8b\x08\0\0\0\0\0", "gzip", id="R07 gzip"),
        pytest.param(b"\x7fELF\x02\x01\x01\0", "elf", id="R07 ELF"),
        pytest.param(b"\0\1\2\3", "binary", id="R07 unknown"),
        pytest.param("\ufeffa".encode("utf-32-le"), "binary", id="UTF-32"),
    ],
)
def test_a_binary_file_is_named_with_its_size_and_kind(
    workspace: Path, data: bytes, kind: str
) -> None:
    (workspace / "a.ods").write_bytes(data)
    [said] = play(workspace, read("a.ods"))
    assert said.startswith("error: ") and "a.ods" in said
    assert kind in said.lower() and re.search(rf"\b{len(data)}\b", said), said


def test_a_nul_far_behind_never_reaches_the_model(workspace: Path) -> None:
    (workspace / "f").write_bytes(b"line\n" * 2000 + b"a\0b\n" + b"line\n" * 2000)
    for said in play(workspace, read(), read(start=1990, end=2010), read(start=2001, end=2001)):
        assert "\0" not in said


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(b"caf\xe9\n", "1: caf", id="R17 Latin-1"),
        pytest.param(b"\xd6\xd0 x\n", "1: ", id="R16 GBK"),
        pytest.param(b"\xed\xa0\xbd x\n", "1: ", id="R16 half a pair"),
        pytest.param("\ufeffé\r\nb\r\n".encode("utf-16-le"), "1: é\n2: b", id="UTF-16-LE"),
        pytest.param("\ufeffé\nb".encode("utf-16-be"), "1: é\n2: b", id="UTF-16-BE"),
        pytest.param(b"\xef\xbb\xbfa\n", "1: a", id="BOM"),
        pytest.param(b"a\r\nb\r\n", "1: a\n2: b", id="CRLF"),
        pytest.param(b"a\n\n", "1: a\n2: ", id="an empty line at the end"),
        pytest.param(b"\n", "1: ", id="one empty line"),
    ],
)
def test_any_text_can_be_read_as_valid_unicode(workspace: Path, data: bytes, expected: str) -> None:
    (workspace / "f").write_bytes(data)
    [said] = play(workspace, read())
    assert said.startswith(expected) and said.encode().decode() == said
    assert ("\ufeff" in said, "\r" in said) == (False, False)


def test_what_can_be_read_can_be_edited(workspace: Path) -> None:
    (workspace / "f").write_bytes(b"caf\xe9\nn=1\n")
    said = play(workspace, read(), edit("n=1", "n=2"), read())
    assert [text.split("\n")[1] for text in (said[0], said[2])] == ["2: n=1", "2: n=2"]
    assert (workspace / "f").read_bytes() == b"caf\xe9\nn=2\n"


ODD_LINES = "a\n\x0c\nb\n\nx='a\u2028b'\n\x85\x1c\x0b\ncr\rcr\nwindows\r\n\ttab\nNEEDLE\nlast"


@pytest.mark.parametrize("end", ["", "\n"], ids=["no newline at the end", "newline at the end"])
def test_the_numbers_of_lines_are_those_of_grep_and_of_the_other_tools(
    workspace: Path, end: str
) -> None:
    (workspace / "f").write_text(ODD_LINES + end, newline="")
    command = ["grep", "-n", "", "f"]
    grep = subprocess.run(command, cwd=workspace, capture_output=True, env=ENVIRON, check=True)
    numbers = [
        line.split(b":")[0].decode() for line in grep.stdout.removesuffix(b"\n").split(b"\n")
    ]
    find = {"call": "grep", "arguments": {"regex": "NEEDLE"}}
    whole, found, one, missed = play(
        workspace, read(), find, read(start=10, end=10), edit("needle", "x")
    )
    assert [line.split(":")[0] for line in whole.split("\n")] == numbers
    assert (found.split("\n")[0], one) == ("f:10:NEEDLE", "10: NEEDLE")
    assert ("10", "NEEDLE") in [(number, plain(text)) for number, text in SHOWN.findall(missed)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({"start": "10", "end": "11"}, "10: line 10\n11: line 11", id="R11 texts"),
        pytest.param({"start": 10.0, "end": "11.0"}, "10: line 10\n11: line 11", id="R11 floats"),
        pytest.param({"start": 100}, "100: line 100", id="the last line"),
        pytest.param({"start": -3, "end": 1}, "1: line 1", id="before the first"),
        pytest.param({"start": 99, "end": 999}, "99: line 99\n100: line 100", id="behind the last"),
    ],
)
def test_a_range_may_be_given_in_any_form_of_number(
    workspace: Path, given: dict[str, Any], expected: str
) -> None:
    (workspace / "f").write_text("".join(f"line {n}\n" for n in range(1, 101)))
    assert play(workspace, read(**given)) == [expected]


def pages(folder: Path, **first: Any) -> list[str]:
    """Read f page by page as the results say; all of them."""
    seen: list[str] = []

    def go_on(request: Any) -> Any:
        seen.append(results(request)[-1])
        more = MORE.search(seen[-1])
        return read(start=int(more[4])) if more else "done"

    play(folder, read(**first), *[go_on] * 60, compact_at=0)
    return seen


@pytest.mark.parametrize("width", [30, 1500], ids=["short lines", "long lines"])
def test_a_long_file_comes_in_pages_that_together_are_the_file(workspace: Path, width: int) -> None:
    lines = [f"{n} ".ljust(width, "x") for n in range(1, 501)]
    (workspace / "f").write_text("\n".join(lines) + "\n")
    seen = pages(workspace, start=1, end=500)
    shown = [line for page in seen for line in page.split("\n") if re.match(r"\d+: ", line)]
    assert shown == [f"{n}: {line}" for n, line in enumerate(lines, 1)]
    assert max(map(len, seen)) <= 20_000 and len(seen) < 60


def test_a_page_says_which_lines_it_holds_of_how_many_and_where_to_go_on(workspace: Path) -> None:
    (workspace / "f").write_text("".join(f"line {n}\n" for n in range(1, 5001)))
    first, second = pages(workspace)[:2]
    start, end, total, following = map(int, MORE.search(first).groups())  # type: ignore[union-attr]
    assert (start, total, following) == (1, 5000, end + 1)
    assert first.split("\n")[-2] == f"{end}: line {end}"
    assert MORE.search(second)[1] == str(following)  # type: ignore[index]
    assert second.split("\n")[0] == f"{following}: line {following}"


@pytest.mark.parametrize(
    "name", ["m.js", "it's a file.js", "-n.js", "$(touch x).js", "sub dir/m.js"]
)
@pytest.mark.parametrize("before", [0, 2], ids=["the first line", "the third line"])
def test_the_rest_of_a_long_line_comes_by_the_command_that_is_named(
    workspace: Path, name: str, before: int
) -> None:
    line = "".join(f"{n:07}," for n in range(1000))
    (workspace / name).parent.mkdir(exist_ok=True)
    (workspace / name).write_text("first\n" * before + line + "\nnext\n")
    [said] = play(workspace, read(name))
    shown = said.split("\n")[before].removeprefix(f"{before + 1}: ")[:2000]
    [command] = re.findall(r"sed -n .*?\| *cut -b *[\d-]+", said)
    rest = subprocess.check_output(["bash", "-c", command], cwd=workspace, text=True)
    assert shown + rest.removesuffix("\n") == line
    assert said.endswith(f"\n{before + 2}: next") and len(said) < 3000


def test_no_character_of_a_long_line_is_lost_where_characters_are_several_bytes(
    workspace: Path,
) -> None:
    line = "".join(chr(0x4E00 + n) for n in range(6000))
    (workspace / "f").write_text(line + "\n")
    [said] = play(workspace, read())
    [command] = re.findall(r"sed -n .*?\| *cut -b *[\d-]+", said)
    rest = subprocess.check_output(["bash", "-c", command], cwd=workspace, env=ENVIRON)
    text = rest.decode(errors="ignore").removesuffix("\n")
    assert line.endswith(text) and len(text) >= 4000


def test_a_line_of_megabytes_gives_its_beginning(workspace: Path) -> None:
    (workspace / "f").write_text("x" * 5_000_000 + "\nnext\n")
    first, second = play(workspace, read(start=1, end=1), read(start=2))
    assert len(first) < 3000 and first.startswith("1: " + "x" * 1000)
    assert second == "2: next"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("src/lib/field.tsx", "src/lib/field.ts"),
        ("src/lib/feild.ts", "src/lib/field.ts"),
        ("src/lib/Field.ts", "src/lib/field.ts"),
        ("lib/field.ts", "src/lib/field.ts"),
        ("field.ts", "src/lib/field.ts"),
        ("src/field.ts", "src/lib/field.ts"),
        ("readme.md", "README.md"),
    ],
)
def test_a_path_that_does_not_exist_is_answered_with_similar_ones(
    workspace: Path, wrong: str, right: str
) -> None:
    for name in ("src/lib/field.ts", "README.md", "other/thing.py"):
        (workspace / name).parent.mkdir(parents=True, exist_ok=True)
        (workspace / name).touch()
    for said in play(workspace, read(wrong), edit("a", "b", wrong)):
        assert said.startswith("error: ") and wrong in said
        assert right in said and "thing.py" not in said, said


def test_few_of_many_similar_names_are_offered(workspace: Path) -> None:
    for n in range(100):
        (workspace / f"test_{n:03}.py").touch()
    [said] = play(workspace, read("test_100.py"))
    assert 1 <= len(re.findall(r"test_0\d\d\.py", said)) <= 5


# -- what a read costs ---------------------------------------------------------------------------


PROBE = """
import json, sys
from pathlib import Path
from agent import Settings, build_agent
from flaky_server import FlakyServer

def figures():
    memory = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
    read = Path("/proc/self/io").read_text().split("rchar:")[1].split()[0]
    return int(memory) * 1024, int(read)

seen = []
def step(name, arguments):
    return lambda request: (seen.append(figures()), {"call": name, "arguments": arguments})[1]
steps = [step(*call) for call in json.loads(sys.argv[1])]
with FlakyServer([*steps, lambda request: (seen.append(figures()), "done")[1]]) as server:
    agent = build_agent(Settings(base_url=server.url, model="m", api_key="k", mode="auto"))
    agent.run("go")
    agent.close()
texts = [m["content"] for m in server.requests[-1]["messages"] if m["role"] == "tool"]
rows = zip(texts, seen, seen[1:])
print(json.dumps([[text, b[0] - a[0], b[1] - a[1]] for text, a, b in rows]))
"""


def costs(folder: Path, *steps: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Per call of a fresh process: the result, the growth of the memory and the bytes read."""
    calls = json.dumps([[step["call"], step["arguments"]] for step in steps])
    command = [sys.executable, "-c", PROBE, calls]
    env = {**ENVIRON, "PYTHONPATH": str(ROOT)}
    out = subprocess.check_output(command, cwd=folder, env=env, timeout=300)
    return [tuple(row) for row in json.loads(out)]


def fill(path: Path, megabytes: int, line: bytes = b"a line of 16 ch\n") -> None:
    """Make a file of so many megabytes of text."""
    block = line * (2**20 // len(line))
    with path.open("wb") as file:
        for _ in range(megabytes):
            file.write(block)


def check_a_big_file(folder: Path, megabytes: int) -> None:
    """Reads at the front and at the end of a big text, and of one line as big: flat memory."""
    fill(folder / "text", megabytes)
    fill(folder / "line", megabytes, b"x" * 1024)
    (folder / "small").write_text("a line of 16 ch\n" * 3000)
    last = megabytes * 2**16
    rows = costs(
        folder,
        *(read("small"), read("text", start=1, end=5), read("line", start=1, end=1)),
        *(read("text"), read("text", start=last, end=last), read("line", start=2)),
    )
    assert [text[:8] for text, _, _ in rows[1:5]] == [
        "1: a lin",
        "1: xxxxx",
        "1: a lin",
        f"{last}: "[:8],
    ]
    assert [growth for _, growth, _ in rows[1:] if growth > 24 * 2**20] == []


def test_the_memory_of_a_read_does_not_grow_with_the_file(workspace: Path) -> None:
    check_a_big_file(workspace, 64)


@pytest.mark.long
def test_the_memory_of_a_read_does_not_grow_with_a_file_of_a_gigabyte(workspace: Path) -> None:
    check_a_big_file(workspace, 1024)


@pytest.mark.long
def test_the_memory_of_a_read_does_not_grow_with_a_sparse_gigabyte(workspace: Path) -> None:
    (workspace / "text").write_bytes(b"first\nsecond\n" + b"x\n" * 5000)
    os.truncate(workspace / "text", 2**30)
    rows = costs(workspace, read("text", start=1, end=1), read("text", start=2, end=5))
    assert [text[:8] for text, _, _ in rows] == ["1: first", "2: secon"]
    assert [growth for _, growth, _ in rows if growth > 24 * 2**20] == []


def test_a_range_near_the_front_costs_the_same_whatever_the_size_of_the_file(
    workspace: Path,
) -> None:
    fill(workspace / "some", 24)
    fill(workspace / "more", 72)
    ranges = [{"start": 1, "end": 5}, {"start": 2000, "end": 2100}, {"start": 2000}]
    rows = costs(workspace, *(read(name, **r) for r in ranges for name in ("some", "more")))
    taken = [size for _, _, size in rows]
    pairs = zip(taken[::2], taken[1::2], strict=True)
    assert [pair for pair in pairs if abs(pair[0] - pair[1]) > 2**18] == []
    assert max(taken) < 2**22


def test_a_page_of_a_file_too_big_to_count_names_the_next_start(workspace: Path) -> None:
    fill(workspace / "f", 24)
    said = play(workspace, read(), read(start=2000))
    for text, first in zip(said, (1, 2000), strict=True):
        lines = text.split("\n")
        last = int(lines[-2].split(":")[0])
        assert re.fullmatch(rf"\[more lines follow[:;] go on with start={last + 1}\]", lines[-1])
        assert lines[0].startswith(f"{first}: ") and len(lines) == last - first + 2


# -- any file, any edit --------------------------------------------------------------------------


PLAIN = "abc =()\"'\\\t\x0c\x0b\x1c"
LETTERS = {
    "latin-1": PLAIN + "éüß\x85\xa0",
    "utf-8": PLAIN + "éü設🙂\u2028\u2029\x85\u0301\ufffd",
    "utf-8-sig": PLAIN + "éü設🙂\u2028\x85",
    "utf-16-le": PLAIN + "éü設🙂\u2028\x85",
    "utf-16-be": PLAIN + "éü設🙂\u2028\x85",
}
MARKS = {"utf-8-sig": "\ufeff", "utf-16-le": "\ufeff", "utf-16-be": "\ufeff"}
ENDS = [["\n"], ["\r\n"], ["\r"], ["\n", "\r\n"], ["\n", "\r\n", "\r"]]


@st.composite
def texts(draw: Any, codec: str, ends: list[str]) -> str:
    """Some lines, each with an end, and the beginning of one more."""
    line = st.text(LETTERS[codec], max_size=8)
    lines = draw(st.lists(st.tuples(line, st.sampled_from(ends)), max_size=5))
    return "".join(a + b for a, b in lines) + draw(line)


@st.composite
def edits(draw: Any) -> tuple[str, str, str, str, str]:
    """Codec, what is before, the place of the edit, what is behind, and what replaces it."""
    codec = draw(st.sampled_from(list(LETTERS)))
    ends = draw(st.sampled_from(ENDS))
    first = "é " if codec == "latin-1" else ""  # so that it is no UTF-8
    before, behind = first + draw(texts(codec, ends)), draw(texts(codec, ends))
    places = st.lists(st.sampled_from([*ends, "x"]), max_size=3).map("".join)
    inner = draw(places.filter(lambda text: "\r\r\n" not in text))  # its second CR is whose?
    new = draw(texts(codec, ["\n"]))
    return codec, before, f"<<{inner}>>", behind, new.replace("\ufffd", "")


def unified(text: str) -> str:
    """The text as the model sees it: lines end with a newline."""
    return text.replace("\r\n", "\n")


def check_an_edit(case: tuple[str, str, str, str, str]) -> None:
    """Edit a file through the whole loop; all bytes around the edit are as before."""
    codec, before, old, behind, new = case
    coded = codec.removesuffix("-sig")
    data = [(MARKS.get(codec, "") + before).encode(coded), old.encode(coded), behind.encode(coded)]
    with tempfile.TemporaryDirectory() as name:
        after, said = edited(Path(name), b"".join(data), unified(old), new)
    if codec == "latin-1" and not new.isascii():
        assert (after, failed(said)) == (b"".join(data), True)
        return
    assert not failed(said), said
    assert (after[: len(data[0])], after[len(after) - len(data[2]) :]) == (data[0], data[2])
    middle = after[len(data[0]) : len(after) - len(data[2])].decode(coded)
    assert unified(middle) == new
    ends = {end for end in re.findall("\r\n|\n|\r", old) if end != "\r"}
    if len(ends) == 1:
        assert middle == new.replace("\n", ends.pop())


@quick
@given(edits())
def test_no_byte_outside_an_edit_changes(case: tuple[str, str, str, str, str]) -> None:
    check_an_edit(case)


@pytest.mark.long
@thorough
@given(edits())
def test_no_byte_outside_an_edit_changes_in_many_more_files(
    case: tuple[str, str, str, str, str],
) -> None:
    check_an_edit(case)


def check_a_new_file(content: str) -> None:
    """What is written and then read is what was sent, line by line."""
    with tempfile.TemporaryDirectory() as name:
        said = play(Path(name), write(content), read())[1]
        assert (Path(name) / "f").read_bytes() == content.encode()
    lines = content.removesuffix("\n").split("\n") if content else []
    shown = [f"{n}: {line.removesuffix(chr(13))}" for n, line in enumerate(lines, 1)]
    assert said.split("\n") == shown or not content


CONTENT = texts("utf-8", ["\n", "\r\n", "\r"]).map(lambda text: text.replace("\ufffd", ""))


@quick
@given(CONTENT)
def test_a_new_file_of_any_text_is_exactly_what_was_sent(content: str) -> None:
    check_a_new_file(content)


@pytest.mark.long
@settings(thorough, max_examples=300)
@given(CONTENT)
def test_a_new_file_of_many_more_texts_is_exactly_what_was_sent(content: str) -> None:
    check_a_new_file(content)


# -- what odd files and odd calls have met -------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        pytest.param(
            "def a():\n    pass\n\ndef b():\n    fo()\n", "    foo()", "    pass", id="far above"
        ),
        pytest.param(
            "def f(x):\n    if not x:\n        return None\n\n\n    return g(x, 1)\n",
            "    return g(x)",
            "    return None",
            id="a part of another line",
        ),
        pytest.param("a()\n}\n\n\n\n\n  yy()\n", "  y();\n  yy();\n}", "}", id="a brace"),
    ],
)
def test_a_new_text_that_stands_elsewhere_is_no_edit_that_was_made(
    workspace: Path, text: str, old: str, new: str
) -> None:
    after, said = edited(workspace, text.encode(), old, new)
    assert (after, said[:7]) == (text.encode(), "error: ")
    assert "already" not in said, said


LONG = "".join(f"    line_{n} = {n}\n" for n in range(40))


@pytest.mark.parametrize(
    ("data", "old", "words"),
    [
        pytest.param(LONG, LONG.replace("line_30 = 30", "line_30 = 31"), "31: .*line_30", id="far"),
        pytest.param(LONG, LONG.replace("    line_30", "  line_30"), "31: .*line_30", id="indent"),
        pytest.param("if a < b && c:\n", "if a &lt; b &amp;&amp; c:", "html", id="HTML"),
        pytest.param("a\nb\n", "a\\nb", "line end", id="a line end as two characters"),
        pytest.param("cafe\u0301 = 1\n", "caf\u00e9 = 1", "1: .*accents|accents", id="NFD"),
        pytest.param("a\u200b = 1\n", "a = 1", "invisible", id="zero width space"),
        pytest.param(b"x = 1\ncaf\xe9 = 1\n", "caf\ufffd = 1", "not utf-8", id="Latin-1"),
        pytest.param("foo()\nbar()\n", "1: fob()\n2: bar()", "line number(.|\n)*foo", id="a typo"),
    ],
)
def test_a_miss_tells_what_old_may_be_instead(
    workspace: Path, data: str | bytes, old: str, words: str
) -> None:
    before = data if isinstance(data, bytes) else data.encode()
    after, said = edited(workspace, before, old, "new")
    assert (after, said[:7]) == (before, "error: ")
    assert re.search(words, said, re.I), said


def test_the_places_that_were_replaced_are_counted_without_those_that_overlap(
    workspace: Path,
) -> None:
    after, said = edited(workspace, b"aaaa", "aa", "b", all=True)
    assert after == b"bb"
    assert re.search(r"\b2\b", said) and not re.search(r"\b3\b", said), said


@pytest.mark.parametrize("end", ["", "\n"], ids=["no line end", "line end"])
def test_utf_16_of_odd_length_is_shown_with_its_number_of_lines(workspace: Path, end: str) -> None:
    text = f"hé\nzwei{end}"
    (workspace / "f").write_bytes(text.encode("utf-16") + b"A")
    shown, far = play(workspace, read(), read(start=500))
    count = 3 if end else 2
    assert [line for line, _ in SHOWN.findall(shown)] == [str(n) for n in range(1, count + 1)]
    assert shown.startswith("1: hé\n2: zwei") and re.search(rf"\b{count} lines", far), far


@pytest.mark.parametrize(("start", "end"), [(50, 3), (2, 1)])
def test_a_range_that_ends_before_it_begins_is_said_to_do_so(
    workspace: Path, start: int, end: int
) -> None:
    (workspace / "f").write_text("x\n" * 100)
    [said] = play(workspace, read(start=start, end=end))
    assert re.search(rf"\b{end}\b.*before.*\b{start}\b", said), said


def test_a_file_is_not_emptied_by_the_same_call_twice_in_one_reply(workspace: Path) -> None:
    (workspace / "f").write_text("a\n")
    said = play(workspace, batch(write(""), write("")))
    assert [failed(text) for text in said] == [True, True]
    assert (workspace / "f").read_text() == "a\n"


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize(
    ("step", "expected"),
    [
        pytest.param(write("\ufeffdef\n"), "def\n", id="written"),
        pytest.param(edit("abc", "\ufeffdef"), "def\n", id="in new"),
        pytest.param(edit("\ufeffabc", "def"), "def\n", id="in old"),
    ],
)
def test_a_mark_is_not_doubled(workspace: Path, codec: str, step: Any, expected: str) -> None:
    (workspace / "f").write_bytes("abc\n".encode(codec))
    [said] = play(workspace, step)
    assert (workspace / "f").read_bytes() == expected.encode(codec), said


def test_a_folder_of_the_name_tilde_is_meant_where_there_is_one(
    workspace: Path, home: Path
) -> None:
    (workspace / "~").mkdir()
    (workspace / "~/n").write_text("old\n")
    (home / "n").write_text("old\n")
    steps = [read("~/n"), edit("old", "new", "~/n")]
    said = play(workspace, *steps, environ={**ENVIRON, "HOME": str(home)})
    assert [text for text in said if failed(text)] == []
    assert [(folder / "n").read_text() for folder in (workspace / "~", home)] == ["new\n", "old\n"]


def test_the_question_for_a_change_of_many_lines_of_few_kinds_comes_soon(workspace: Path) -> None:
    before, after_ = ([f"{n * step % 150}\n" for n in range(30_000)] for step in (1, 7))
    (workspace / "f").write_text("".join(before))
    asked: list[str] = []
    begun = time.monotonic()
    play(
        workspace,
        write("".join(after_)),
        mode="ask",
        ask=lambda question: (asked.append(question.text), "n")[1],
    )
    assert time.monotonic() - begun < 20
    signs = [line[0] for line in asked[0].splitlines()]
    assert (signs.count("-"), signs.count("+")) == (30_001, 30_001)  # with the names of the file


WRITER = """
import sys
from pathlib import Path
from agent import Change, Workspace
path, before = Path(sys.argv[1]), None
workspace = Workspace(path.parent, {})
for number in range(1000):
    text = str(number).encode()
    workspace.apply(Change(path, before, text, ""))
    before = text
"""


def test_two_agents_that_write_in_one_folder_do_not_disturb_each_other(workspace: Path) -> None:
    place = {"env": {**ENVIRON, "PYTHONPATH": str(ROOT)}, "stderr": subprocess.PIPE}
    command = [sys.executable, "-B", "-c", WRITER]
    writers = [subprocess.Popen([*command, workspace / name], **place) for name in "fg"]
    ends = [(writer.communicate()[1].decode(), writer.returncode) for writer in writers]
    assert ends == [("", 0), ("", 0)]
    assert [(workspace / name).read_text() for name in names(workspace)] == ["999", "999"]


def test_a_write_that_fails_leaves_nothing_half_written_anywhere(
    run_agent: Any, workspace: Path
) -> None:
    (workspace / "f").write_bytes(b"needle\n" + b"x\n" * 150_000)
    small = ("bash", "-c", 'ulimit -f 200; exec "$@"', "bash")
    with FlakyServer([edit("needle", "y"), write("x" * 300_000, "new/deep/g"), "done"]) as server:
        run_agent("--yes", "go", server=server, under=small, env=NO_BYTECODE)
    assert [failed(text) for text in results(server.requests[-1])] == [True, True]
    assert names(workspace) == ["f"]
    assert [path for path in workspace.rglob("*") if "tmp" in path.name] == []
