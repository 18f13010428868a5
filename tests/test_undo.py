"""/undo and /diff: what the file tools changed is taken back, and nothing else.

Most tests sit at a terminal: a scripted model changes files, a person types /undo. `say` types a
line and answers whatever is asked until the prompt is there again.
"""

import json
import os
import re
import resource
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import inside, prompts, results, session_files, until

from agent import Settings, build_agent, problems, resume_session
from flaky_server import FlakyServer

ENVIRON = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": "/nonexistent"}
WAITS = re.compile(r"(?:^|[\r\n])> $|\[y/n(?:/a)?\] $")


def edit(old: str, new: str, path: str = "f") -> dict[str, Any]:
    """A step that edits."""
    return {"call": "edit_file", "arguments": {"path": path, "old": old, "new": new}}


def write(content: str, path: str = "f") -> dict[str, Any]:
    """A step that writes."""
    return {"call": "write_file", "arguments": {"path": path, "content": content}}


def bash(command: str) -> dict[str, Any]:
    """A step that runs a command."""
    return {"call": "bash", "arguments": {"command": command}}


def batch(*steps: dict[str, Any]) -> dict[str, Any]:
    """One reply with several calls."""
    return {"calls": [{"name": step["call"], "arguments": step["arguments"]} for step in steps]}


def begin(terminal: Any, server: FlakyServer, *words: str, mode: str = "auto") -> Any:
    """The agent at its prompt."""
    screen = terminal("--mode", mode, *words, server=server)
    screen.prompt()
    return screen


def say(screen: Any, line: str, answer: str = "n") -> str:
    """Type a line and answer every question; what was shown until the next prompt."""
    screen.send(line + "\r")
    shown = screen.match(WAITS)
    while shown.endswith("] "):
        screen.listens()
        screen.send(answer + "\r")
        shown += screen.match(WAITS)
    screen.listens()
    return shown


def leave(screen: Any) -> None:
    """Leave at the prompt."""
    screen.send("exit\r")
    assert screen.wait() == 0


def turns(folder: Path, *scripts: list[Any], **options: Any) -> list[str]:
    """Run one prompt per script, without a terminal; the ids of the sessions that there are."""
    with FlakyServer([step for script in scripts for step in [*script, "done"]]) as server:
        place = {"environ": ENVIRON, "workspace": str(folder)}
        fields = {"mode": "auto", "sandbox": "off", **place, **options}
        known = Settings(base_url=server.url, model="flaky-1", api_key="k", **fields)
        agent = build_agent(known)
        try:
            for number, _ in enumerate(scripts, 1):
                agent.run(f"prompt {number}")
        finally:
            agent.close()
    said = results(server.requests[-1])
    assert [text for text in said if text.startswith(("error: ", "denied: "))] == []
    return [path.stem for path in session_files(folder)]


def resumed(terminal: Any, line: str, *words: str, answer: str = "n", mode: str = "auto") -> str:
    """Resume the session, type a line, leave; what was shown."""
    with FlakyServer([]) as server:
        screen = begin(terminal, server, "--resume", *words, mode=mode)
        shown = say(screen, line, answer)
        leave(screen)
    assert server.requests == []
    return shown


def snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    """All in a folder but the agent's own: bytes or target, mode, owner and number of names."""
    rows = {}
    for path in sorted(folder.rglob("*")):
        known = path.lstat()
        if ".agent" in path.relative_to(folder).parts:
            continue
        what = path.readlink() if path.is_symlink() else path.is_file() and path.read_bytes()
        names = known.st_nlink if path.is_file() else 0
        rows[str(path.relative_to(folder))] = (
            what,
            oct(known.st_mode),
            (known.st_uid, known.st_gid),
            names,
        )
    return rows


def undone(terminal: Any, folder: Path, *steps: Any, answer: str = "n") -> str:
    """One turn of these steps and /undo: all is as before; what /undo said."""
    before = snapshot(folder)
    with FlakyServer([*steps, "done"]) as server:
        screen = begin(terminal, server)
        say(screen, "change it", answer="y")
        assert snapshot(folder) != before
        shown = say(screen, "/undo", answer)
        leave(screen)
    assert snapshot(folder) == before
    return shown


# -- what comes back -----------------------------------------------------------------------------


FILES = {
    "plain": b"old\n",
    "no end": b"old",
    "crlf": b"a\r\nold\r\n",
    "mixed": b"a\r\nold\nb\rc",
    "latin": b"caf\xe9 old\n",
    "bom": b"\xef\xbb\xbfold\n",
    "utf-16": "\ufeffé old\r\n".encode("utf-16-le"),
    "large": b"old\n" + b"x" * 300_000,
}


def test_the_files_of_the_last_turn_come_back_byte_by_byte(terminal: Any, workspace: Path) -> None:
    for name, data in FILES.items():
        (workspace / name).write_bytes(data)
    shown = undone(terminal, workspace, batch(*(edit("old", "new", name) for name in FILES)))
    assert [name for name in FILES if name not in shown] == []
    assert "not undone" not in shown


def test_a_file_that_was_changed_several_times_comes_back_as_it_was_first(
    terminal: Any, workspace: Path
) -> None:
    (workspace / "f").write_bytes(b"one\r\n")
    (workspace / "g").write_bytes(b"caf\xe9\r\n")
    (workspace / "h").write_bytes(b"full\n")
    steps = [edit("one", "two"), edit("two", "three"), write("four\n"), edit("none", "x")]
    more = [write("café\n", "g"), edit("é", "e", "g"), write("", "h"), write("", "h")]
    undone(terminal, workspace, batch(*steps), *more)


def test_mode_and_owner_come_back(terminal: Any, workspace: Path) -> None:
    modes = [0o755, 0o600, 0o444, 0o640]
    for mode in modes:
        path = workspace / f"{mode:o}"
        path.write_text("old\n")
        if os.geteuid() == 0:
            os.chown(path, 1234, 2345)
        path.chmod(mode)
    undone(terminal, workspace, batch(*(edit("old", "new", f"{mode:o}") for mode in modes)))


def test_links_of_both_kinds_stay_and_all_names_are_restored(
    terminal: Any, workspace: Path
) -> None:
    (workspace / "sub").mkdir()
    for name in ("a", "b", "sub/c"):
        (workspace / name).write_text("old\n")
    (workspace / "sub/second").hardlink_to(workspace / "a")
    (workspace / "link").symlink_to("b")
    (workspace / "folder").symlink_to("sub")
    paths = ["sub/second", "link", "folder/c"]
    undone(terminal, workspace, batch(*(edit("old", "new", path) for path in paths)))
    assert (workspace / "a").samefile(workspace / "sub/second")


def test_files_that_were_made_go_away_with_the_folders_made_for_them(
    terminal: Any, workspace: Path
) -> None:
    (workspace / "sub").mkdir()
    paths = ["new.txt", "sub/new.txt", "one/two/three.txt", "one/four.txt", "a b/é.txt"]
    undone(
        terminal,
        workspace,
        batch(*(write("x\n", path) for path in paths)),
        edit("x", "y", "new.txt"),
    )


def test_a_folder_that_holds_something_of_the_user_by_now_stays(
    terminal: Any, workspace: Path
) -> None:
    turns(workspace, [write("x\n", "one/two/three.txt")])
    (workspace / "one/user.txt").write_text("mine\n")
    resumed(terminal, "/undo")
    assert list(snapshot(workspace)) == ["one", "one/user.txt"]


def test_a_file_that_a_command_removed_after_the_edit_comes_back(
    terminal: Any, workspace: Path
) -> None:
    (workspace / "f").write_text("old\n")
    undone(terminal, workspace, edit("old", "new"), bash("rm f"), answer="y")


# -- how many turns ------------------------------------------------------------------------------


def test_turns_are_undone_one_by_one_or_several_at_once(terminal: Any, workspace: Path) -> None:
    seen = []
    (workspace / "f").write_text("start\n")
    script = [word for n in range(1, 5) for word in (write(f"turn {n}\n"), f"said {n}")]
    with FlakyServer(script) as server:
        screen = begin(terminal, server)
        for n in range(1, 5):
            say(screen, f"prompt {n}")
        for line in ("/undo", "/undo 2", "/undo 1"):
            say(screen, line)
            seen.append((workspace / "f").read_text())
        leave(screen)
    assert seen == ["turn 3\n", "turn 1\n", "start\n"]


def test_what_is_done_after_an_undo_can_be_undone_too(terminal: Any, workspace: Path) -> None:
    seen = []
    (workspace / "f").write_text("start\n")
    script = [word for n in (1, 2, 3) for word in (write(f"turn {n}\n"), "said")]
    with FlakyServer(script) as server:
        screen = begin(terminal, server)
        for line in ("one", "two", "/undo", "three", "/undo", "/undo"):
            say(screen, line)
            seen.append((workspace / "f").read_text().strip())
        leave(screen)
    assert seen == ["turn 1", "turn 2", "turn 1", "turn 3", "turn 1", "start"]


def test_a_turn_without_changes_is_a_turn(terminal: Any, workspace: Path) -> None:
    (workspace / "f").write_text("old\n")
    with FlakyServer([edit("old", "new"), "done", "just words", "PONG"]) as server:
        screen = begin(terminal, server)
        for line in ("change", "talk", "/undo"):
            say(screen, line)
        assert (workspace / "f").read_text() == "new\n"
        say(screen, "next")
        leave(screen)
    assert [text for text in prompts(server.requests[-1]) if "talk" in text] == []
    assert "change" in prompts(server.requests[-1])[0]


@pytest.mark.parametrize("mode", ["auto", "plan"])
def test_with_nothing_to_undo_it_is_said(terminal: Any, mode: str) -> None:
    with FlakyServer([]) as server:
        screen = begin(terminal, server, mode=mode)
        shown = [say(screen, "/undo"), say(screen, "/undo 3")]
        leave(screen)
    said = [bool(re.search("nothing|plan", text.lower())) for text in shown]
    assert (said, server.requests) == ([True, True], [])


def test_what_is_no_number_of_turns_undoes_nothing(terminal: Any, workspace: Path) -> None:
    with FlakyServer([write("x\n"), "done"]) as server:
        screen = begin(terminal, server)
        say(screen, "change it")
        for word in ("x", "0", "-1", "1.5", "1 2"):
            say(screen, f"/undo {word}", answer="y")
            assert (workspace / "f").exists(), word
        say(screen, "/undo")
        leave(screen)
    assert not (workspace / "f").exists()


def test_help_names_both_commands(terminal: Any) -> None:
    with FlakyServer([]) as server:
        screen = begin(terminal, server)
        shown = say(screen, "/help")
        leave(screen)
    assert "/undo" in shown and "/diff" in shown


# -- the conversation ----------------------------------------------------------------------------


def test_the_turns_leave_the_conversation_and_a_copy_of_it_stays(
    terminal: Any, workspace: Path
) -> None:
    folder = workspace / ".agent" / "sessions"
    with FlakyServer(["said 1", write("x\n"), "said 2", write("y\n"), "said 3", "PONG"]) as server:
        screen = begin(terminal, server)
        for line in ("first", "second", "third", "/undo 2", "fourth"):
            say(screen, line)
        leave(screen)
    last = server.requests[-1]
    gone = json.dumps(last["messages"])
    assert [word for word in ("second", "third", "said 2", "said 3") if word in gone] == []
    assert "first" in prompts(last)[0] and "fourth" in prompts(last)[-1]
    texts = [path.read_text() for path in folder.iterdir() if path.suffix == ".json"]
    assert sorted(("second" in text, "fourth" in text) for text in texts) == [
        (False, True),
        (True, False),
    ]


def test_both_sessions_are_valid_after_an_undo(terminal: Any, workspace: Path) -> None:
    turns(workspace, [write("x\n")], [batch(write("y\n"), bash("true"))])
    resumed(terminal, "/undo")
    saved = [json.loads(path.read_text())["messages"] for path in session_files(workspace)]
    assert [problems(messages) for messages in saved] == [[], []]
    assert sorted("prompt 2" in json.dumps(messages) for messages in saved) == [False, True]


def test_an_undone_turn_does_not_come_back_with_a_resume(terminal: Any, workspace: Path) -> None:
    [ident] = turns(workspace, [write("x\n")], [write("y\n")])
    resumed(terminal, "/undo")
    with FlakyServer(["PONG"]) as server:
        screen = begin(terminal, server, f"--resume={ident}")
        say(screen, "go on")
        leave(screen)
    sent = json.dumps(server.requests[-1]["messages"])
    assert ("prompt 1" in sent, "prompt 2" in sent) == (True, False)


def test_commands_of_the_undone_turns_are_named_as_not_undone(
    terminal: Any, workspace: Path
) -> None:
    script = [bash("touch a.txt"), "done", batch(write("x\n"), bash("touch b.txt")), "done"]
    with FlakyServer(script) as server:
        screen = begin(terminal, server)
        say(screen, "first")
        say(screen, "second")
        shown = [say(screen, "/undo"), say(screen, "/undo")]
        leave(screen)
    assert [("touch a" in text, "touch b" in text) for text in shown] == [
        (False, True),
        (True, False),
    ]
    assert ["not undone" in text for text in shown] == [True, True]
    assert list(snapshot(workspace)) == ["a.txt", "b.txt"]


# -- files that changed since --------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "text"), [("n", "new\nmine\n"), ("y", "old\n")])
def test_a_file_that_the_user_changed_since_is_asked_for(
    terminal: Any, workspace: Path, answer: str, text: str
) -> None:
    for name in ("f", "g"):
        (workspace / name).write_text("old\n")
    turns(workspace, [batch(edit("old", "new"), edit("old", "new", "g"))])
    (workspace / "f").write_text("new\nmine\n")
    shown = resumed(terminal, "/undo", answer=answer)
    assert len(re.findall(r"\[y/n", shown)) == 1 and re.search(r"\bf\b", shown)
    assert [(workspace / name).read_text() for name in ("f", "g")] == [text, "old\n"]


@pytest.mark.parametrize(("answer", "left"), [("n", ["made.txt"]), ("y", [])])
def test_a_made_file_that_the_user_changed_since_is_asked_for(
    terminal: Any, workspace: Path, answer: str, left: list[str]
) -> None:
    turns(workspace, [write("made\n", "made.txt")])
    (workspace / "made.txt").write_text("made\nmine\n")
    shown = resumed(terminal, "/undo", answer=answer)
    assert "[y/n" in shown and "made.txt" in shown
    assert list(snapshot(workspace)) == left


def test_a_change_of_the_same_size_and_time_is_noticed(terminal: Any, workspace: Path) -> None:
    turns(workspace, [write("made\n")])
    before = (workspace / "f").stat()
    (workspace / "f").write_text("mine\n")
    os.utime(workspace / "f", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "[y/n" in resumed(terminal, "/undo", answer="n")
    assert (workspace / "f").read_text() == "mine\n"


def test_a_mere_touch_is_not_asked_for(terminal: Any, workspace: Path) -> None:
    turns(workspace, [write("made\n")])
    os.utime(workspace / "f", (0, 0))
    assert "[y/n" not in resumed(terminal, "/undo")
    assert snapshot(workspace) == {}


# -- after an end of any kind --------------------------------------------------------------------


def test_a_resumed_session_undoes_what_it_did_before(terminal: Any, workspace: Path) -> None:
    (workspace / "f").write_text("old\n")
    before = snapshot(workspace)
    turns(workspace, [edit("old", "new")], [edit("new", "newer"), write("x", "sub/g")])
    resumed(terminal, "/undo")
    assert [row[0] for row in snapshot(workspace).values()] == [b"new\n"]
    resumed(terminal, "/undo")
    assert snapshot(workspace) == before


def test_what_was_done_before_a_kill_can_be_undone(
    terminal: Any, start_agent: Any, workspace: Path
) -> None:
    (workspace / "f").write_bytes(b"old\r\n")
    before = snapshot(workspace)
    script = [batch(edit("old", "new"), write("x", "sub/g")), {"text": "one", "hold": "before"}]
    with FlakyServer(script) as server:
        agent = start_agent("--yes", "change it", server=server)
        until(server.holding.is_set)
        agent.send_signal(signal.SIGKILL)
        agent.wait()
    assert len(snapshot(workspace)) == 3
    resumed(terminal, "/undo")
    assert snapshot(workspace) == before


@pytest.mark.parametrize("names", [1, 2], ids=["renamed into place", "written in place"])
def test_a_kill_in_the_middle_of_a_write_can_be_undone(
    terminal: Any, start_agent: Any, workspace: Path, names: int
) -> None:
    path = workspace / "f"
    path.write_bytes(b"needle\n" + b"a line of the file\n" * 1_000_000)
    if names == 2:
        (workspace / "g").hardlink_to(path)
    before, began = snapshot(workspace), path.stat().st_mtime_ns
    with FlakyServer([edit("needle", "thread"), {"text": "one", "hold": "before"}]) as server:
        agent = start_agent("--yes", "change it", server=server)
        until(lambda: path.stat().st_mtime_ns != began or [*workspace.glob(".*.agent-tmp")])
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        until(lambda: not inside(workspace))
    resumed(terminal, "/undo", answer="y")
    rows = {name: row for name, row in snapshot(workspace).items() if ".agent-tmp" not in name}
    assert rows == before


def test_a_turn_that_was_interrupted_can_be_undone(terminal: Any, workspace: Path) -> None:
    (workspace / "f").write_text("old\n")
    before = snapshot(workspace)
    with FlakyServer([edit("old", "new"), {"text": "one two three", "hold_after": 1}]) as server:
        screen = begin(terminal, server)
        screen.send("change it\r")
        until(server.holding.is_set)
        screen.expect("one")
        screen.interrupt()
        screen.prompt()
        say(screen, "/undo")
        leave(screen)
    assert snapshot(workspace) == before


# -- what /undo may not do -----------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "text"), [("n", "new\n"), ("y", "old\n")])
def test_a_protected_file_is_restored_only_after_a_yes(
    terminal: Any, workspace: Path, answer: str, text: str
) -> None:
    (workspace / "AGENTS.md").write_text("old\n")
    with FlakyServer([write("new\n", "AGENTS.md"), "done"]) as server:
        screen = begin(terminal, server)
        say(screen, "change it", answer="y")
        shown = say(screen, "/undo", answer)
        leave(screen)
    assert "[y/n" in shown and "AGENTS.md" in shown
    assert (workspace / "AGENTS.md").read_text() == text


def test_in_mode_plan_nothing_is_undone_and_later_all(terminal: Any, workspace: Path) -> None:
    (workspace / "f").write_text("old\n")
    with FlakyServer([edit("old", "new"), "done"]) as server:
        screen = begin(terminal, server)
        say(screen, "change it")
        say(screen, "/mode plan")
        shown = say(screen, "/undo", answer="y")
        assert ("plan" in shown, (workspace / "f").read_text()) == (True, "new\n")
        say(screen, "/mode auto")
        say(screen, "/undo")
        leave(screen)
    assert (workspace / "f").read_text() == "old\n"


def test_in_mode_ask_a_yes_is_enough(terminal: Any, workspace: Path) -> None:
    (workspace / "f").write_text("old\n")
    with FlakyServer([edit("old", "new"), "done"]) as server:
        screen = begin(terminal, server, mode="ask")
        say(screen, "change it", answer="y")
        say(screen, "/undo", answer="y")
        leave(screen)
    assert (workspace / "f").read_text() == "old\n"


def test_a_path_that_a_rule_denies_by_now_is_not_restored(terminal: Any, workspace: Path) -> None:
    for name in ("f", "g"):
        (workspace / name).write_text("old\n")
    turns(workspace, [batch(edit("old", "new"), edit("old", "new", "g"))])
    shown = resumed(terminal, "/undo", "--deny", "* f", answer="y")
    assert (workspace / "f").read_text() == "new\n" and re.search(r"\bf\b", shown)


FORGED = {
    "aaaaaaaaaa1": ".git/hooks/pre-commit",
    "aaaaaaaaaa2": "../outside/safe",
    "aaaaaaaaaa3": "link/safe",
    "aaaaaaaaaa4": ".git/hooks/post-commit",
    "aaaaaaaaaa5": "sub/../../outside/new",
    "aaaaaaaaaa6": ".agent/sessions/20200101-000000-aaaa.json",
    "bbbbbbbbbb1": ".git/config",
    "bbbbbbbbbb2": "../outside/gone",
}


def forge(folder: Path) -> None:
    """Give other names to the files in what is kept for /undo."""
    count = 0
    for path in [path for path in (folder / ".agent" / "undo").rglob("*") if path.is_file()]:
        data = path.read_bytes()
        for name, forged in FORGED.items():
            count += data.count(name.encode())
            data = data.replace(name.encode(), forged.encode())
        path.write_bytes(data)
    assert count >= len(FORGED), "the names are not where this test looks for them"


def test_a_forged_journal_restores_nothing_where_nothing_may_be_written(
    terminal: Any, workspace: Path, tmp_path: Path
) -> None:
    made = [name for name in FORGED if name[0] == "a"]
    subprocess.run(["git", "init", "-q"], cwd=workspace, check=True)
    for path in ("outside/safe", "outside/gone", "work/.git/hooks/pre-commit", "work/sub/x"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("safe\n")
    (workspace / "link").symlink_to("../outside")
    for name in made:
        (workspace / name).write_text("evil\n")
    steps = [edit("evil", "x", name) if name in made else write("x", name) for name in FORGED]
    turns(workspace, [batch(*steps)])
    forge(workspace)
    before = (snapshot(workspace), snapshot(tmp_path / "outside"))
    resumed(terminal, "/undo", answer="y")
    assert (snapshot(workspace), snapshot(tmp_path / "outside")) == before
    assert not (workspace / FORGED["aaaaaaaaaa6"]).exists()


def test_a_path_that_became_a_link_is_not_restored_through_it(
    terminal: Any, workspace: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (workspace / "sub").mkdir()
    subprocess.run(["git", "init", "-q"], cwd=workspace, check=True)
    for name in ("sub/f", "g", "h"):
        (workspace / name).write_text("evil\n")
        (tmp_path / "outside" / Path(name).name).write_text("x\n")
    turns(workspace, [batch(*(edit("evil", "x", name) for name in ("sub/f", "g", "h")))])
    (workspace / "sub").rename(workspace / "moved")
    (workspace / "sub").symlink_to("../outside")
    for name, target in (("g", "../outside/g"), ("h", ".git/config")):
        (workspace / name).unlink()
        (workspace / name).symlink_to(target)
    before = (snapshot(workspace / ".git"), snapshot(tmp_path / "outside"))
    resumed(terminal, "/undo", answer="y")
    assert (snapshot(workspace / ".git"), snapshot(tmp_path / "outside")) == before


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[: len(data) // 2], id="cut"),
        pytest.param(lambda data: b"\0\xff[" + data, id="no text"),
        pytest.param(lambda data: data.replace(b"old\nold", b"bad\nbad"), id="other bytes"),
    ],
)
def test_a_damaged_journal_damages_no_file(
    terminal: Any, workspace: Path, damage: Callable[[bytes], bytes]
) -> None:
    (workspace / "f").write_bytes(b"old\n" * 1000)
    turns(workspace, [edit("old\n" * 1000, "new\n")])
    kept = [path for path in (workspace / ".agent" / "undo").rglob("*") if path.is_file()]
    assert kept != []
    for path in kept:
        path.write_bytes(damage(path.read_bytes()))
    resumed(terminal, "/undo", answer="y")
    assert (workspace / "f").read_bytes() in (b"new\n", b"old\n" * 1000)


# -- /diff ---------------------------------------------------------------------------------------


def changes(shown: str) -> list[str]:
    """The lines of a diff that were added or removed, and its headers."""
    lines = [line.rstrip() for line in shown.replace("\r", "\n").split("\n")]
    return [line for line in lines if re.match(r"[-+]", line)]


def test_diff_shows_what_the_session_changed_against_what_was_there_first(
    terminal: Any, workspace: Path
) -> None:
    (workspace / "f").write_text("top\nold\nend\n")
    (workspace / "by command").write_text("old\n")
    script = [batch(edit("old", "middle"), bash("echo new > 'by command'")), "done"]
    script += [batch(edit("middle", "newest"), write("made\n", "sub/g")), "done"]
    with FlakyServer(script) as server:
        screen = begin(terminal, server)
        say(screen, "one")
        say(screen, "two")
        shown = say(screen, "/diff")
        leave(screen)
    lines = changes(shown)
    assert [line for line in lines if line[:3] not in ("---", "+++")] == [
        "-old",
        "+newest",
        "+made",
    ]
    assert "@@" in shown and [name for name in ("f", "sub/g") if name not in shown] == []
    assert [line[:3] for line in lines if line[:3] in ("---", "+++")] == ["---", "+++"] * 2


def test_diff_shows_nothing_where_nothing_is_changed_or_all_is_undone(
    terminal: Any, workspace: Path
) -> None:
    (workspace / "f").write_text("old\n")
    with FlakyServer([batch(edit("old", "new"), write("x\n", "g")), "done"]) as server:
        screen = begin(terminal, server)
        shown = [say(screen, "/diff")]
        say(screen, "change it")
        say(screen, "/undo")
        shown.append(say(screen, "/diff"))
        leave(screen)
    assert [changes(text) for text in shown] == [[], []]


def test_diff_of_a_resumed_session_and_of_one_turn_of_two_that_is_undone(
    terminal: Any, workspace: Path
) -> None:
    (workspace / "f").write_text("old\n")
    turns(workspace, [edit("old", "new")], [edit("new", "newer")])
    with FlakyServer([]) as server:
        screen = begin(terminal, server, "--resume")
        shown = [say(screen, "/diff")]
        say(screen, "/undo")
        shown.append(say(screen, "/diff"))
        leave(screen)
    rows = [[line for line in changes(text) if line[:3] not in ("---", "+++")] for text in shown]
    assert rows == [["-old", "+newer"], ["-old", "+new"]]


@pytest.mark.parametrize(
    "data",
    [b"caf\xe9 old\r\n", "\ufeffold\n".encode("utf-16-le"), b"\x1b]0;title\x07\x1b[2J old\n"],
    ids=["Latin-1", "UTF-16", "escape codes"],
)
def test_diff_shows_odd_files_without_harm(terminal: Any, workspace: Path, data: bytes) -> None:
    (workspace / "f").write_bytes(data)
    turns(workspace, [edit("old", "new")])
    with FlakyServer([]) as server:
        screen = begin(terminal, server, "--resume")
        shown = say(screen, "/diff")
        leave(screen)
    rows = [line for line in changes(shown) if line[:3] not in ("---", "+++")]
    assert [("old" in row, "new" in row) for row in rows] == [(True, False), (False, True)]
    assert "\x1b]0;title" not in screen.output and "\x1b[2J old" not in screen.output


# -- what is kept --------------------------------------------------------------------------------


def test_what_is_kept_lies_in_the_folder_of_the_session_and_is_private(workspace: Path) -> None:
    for name in ("f", "g"):
        (workspace / name).write_text("a secret\n")
        (workspace / name).chmod(0o644)
    read = {"call": "read_file", "arguments": {"path": "g"}}
    [ident] = turns(workspace, [edit("a secret", "none"), read])
    folder = workspace / ".agent" / "undo"
    assert [path.name for path in folder.iterdir()] == [ident]
    kept = [folder, *folder.rglob("*")]
    modes = {(path.is_dir(), oct(stat.S_IMODE(path.stat().st_mode))) for path in kept}
    assert modes == {(True, "0o700"), (False, "0o600")}


def test_a_session_that_is_not_kept_leaves_no_old_text_behind(workspace: Path) -> None:
    (workspace / "f").write_text("a secret\n")
    turns(workspace, [edit("a secret", "none")], save_session=False)
    left = [path for path in workspace.rglob("*") if path.is_file()]
    assert [path for path in left if b"a secret" in path.read_bytes()] == []


@pytest.mark.long
def test_a_file_too_large_to_keep_is_not_changed_or_named(
    terminal: Any, run_agent: Any, workspace: Path
) -> None:
    tail = b"a line of the file\n" * 3_000_000
    for name, data in (("large.txt", tail), ("huge.txt", tail), ("small.txt", b"")):
        (workspace / name).write_bytes(b"needle\n" + data)
    names = ("large.txt", "small.txt")
    steps = [*(edit("needle", "thread", name) for name in names), write("x\n", "huge.txt")]
    with FlakyServer([batch(*steps), "done"]) as server:
        run_agent("--yes", "go", server=server)
    shown = resumed(terminal, "/undo", answer="y")
    files = {name: (workspace / name).read_bytes() for name in ("large.txt", "huge.txt")}
    lost = [name for name, data in files.items() if data != b"needle\n" + tail]
    assert (workspace / "small.txt").read_text() == "needle\n"
    assert [name for name in lost if name not in shown] == []


# -- what an undo met where things had gone wrong before -----------------------------------------


def test_a_write_that_failed_is_no_change_of_the_user(
    terminal: Any, run_agent: Any, workspace: Path
) -> None:
    (workspace / "f").write_text("old\n")
    small = ("bash", "-c", 'ulimit -f 100; exec "$@"', "bash")
    with FlakyServer([edit("old", "new"), write("x" * 200_000), "done"]) as server:
        env = {"PYTHONDONTWRITEBYTECODE": "1"}  # the limit would cut it
        run_agent("--yes", "go", server=server, under=small, env=env)
    assert results(server.requests[-1])[1].startswith("error: ")
    assert "[y/n" not in resumed(terminal, "/undo")
    assert (workspace / "f").read_text() == "old\n"


def test_a_write_that_was_killed_before_it_began_is_no_change_of_the_user(
    terminal: Any, workspace: Path
) -> None:
    (workspace / "f").write_text("old\n")
    [ident] = turns(workspace, [edit("old", "new")])
    journal = workspace / ".agent" / "undo" / ident / "journal"
    row = json.loads(journal.read_text())
    announced = row | {"before": row["after"], "after": "0" * len(row["after"])}
    journal.write_text(json.dumps(row) + "\n" + json.dumps(announced) + "\n")
    assert "[y/n" not in resumed(terminal, "/undo")
    assert (workspace / "f").read_text() == "old\n"


def test_on_a_full_disk_nothing_is_undone_and_that_is_said(terminal: Any, workspace: Path) -> None:
    (workspace / "f").write_text("old\n")
    with FlakyServer([edit("old", "new"), "done", "PONG"]) as server:
        screen = begin(terminal, server)
        say(screen, "change it")
        resource.prlimit(screen.process.pid, resource.RLIMIT_FSIZE, (0, 0))
        shown = say(screen, "/undo")
        say(screen, "ping")
        leave(screen)
    assert "File too large" in shown and "nothing was undone" in shown
    assert (workspace / "f").read_text() == "new\n"
    assert "change it" in prompts(server.requests[-1])[0]


def test_a_journal_that_can_not_be_written_is_said_and_the_file_restored(
    terminal: Any, workspace: Path
) -> None:
    (workspace / "f").write_text("old\n")
    [ident] = turns(workspace, [edit("old", "new")])
    folder = workspace / ".agent" / "undo" / ident
    (folder / "journal.tmp" / "x").mkdir(parents=True)  # Works as a read-only folder for root too.
    shown = resumed(terminal, "/undo")
    assert re.search("journal could not be written: .*directory", shown)
    assert (workspace / "f").read_text() == "old\n"


def changed_session(folder: Path, **keys: object) -> None:
    """Change what is in the header of the only session."""
    [path] = session_files(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_turns_of_which_the_first_was_compacted_are_undone_together(
    terminal: Any, workspace: Path
) -> None:
    (workspace / "f").write_text("old\n")
    turns(workspace, [edit("old", "new")], [batch(bash("echo x > g"), edit("new", "newer"))])
    [path] = session_files(workspace)
    begins = json.loads(path.read_text())["turns"]
    changed_session(workspace, turns=[0, begins[1]])
    with FlakyServer(["PONG"]) as server:
        screen = begin(terminal, server, "--resume")
        shown = say(screen, "/undo 2")
        say(screen, "ping")
        leave(screen)
    assert (workspace / "f").read_text() == "old\n"
    assert re.search("not undone: .*echo x > g", shown) and "compacted" in shown
    sent = json.dumps(server.requests[-1]["messages"])
    assert ("prompt 1" in sent, "prompt 2" in sent) == (True, False)


def test_after_a_no_the_next_undo_asks_again(terminal: Any, workspace: Path) -> None:
    (workspace / "f").write_text("old\n")
    turns(workspace, [edit("old", "new")])
    (workspace / "f").write_text("mine\n")
    with FlakyServer([]) as server:
        screen = begin(terminal, server, "--resume")
        first = say(screen, "/undo", "n")
        assert (workspace / "f").read_text() == "mine\n"
        second = say(screen, "/undo", "y")
        leave(screen)
    assert ["[y/n" in shown for shown in (first, second)] == [True, True]
    assert (workspace / "f").read_text() == "old\n"


def test_what_a_no_left_is_undone_after_a_resume_and_nothing_stays_for_diff(
    terminal: Any, workspace: Path
) -> None:
    (workspace / "f").write_text("old\n")
    turns(workspace, [edit("old", "new")])
    (workspace / "f").write_text("mine\n")
    resumed(terminal, "/undo", answer="n")
    with FlakyServer([]) as server:
        screen = begin(terminal, server, "--resume")
        say(screen, "/undo", "y")
        shown = say(screen, "/diff")
        leave(screen)
    assert (changes(shown), (workspace / "f").read_text()) == ([], "old\n")


def test_a_change_of_an_empty_file_is_undone_where_nothing_is_kept(
    terminal: Any, workspace: Path
) -> None:
    (workspace / "f").touch()
    with FlakyServer([write("x\n"), "done"]) as server:
        screen = begin(terminal, server, "--no-session")
        say(screen, "change it")
        say(screen, "/undo")
        leave(screen)
    assert (workspace / "f").read_bytes() == b""


def test_a_line_that_a_kill_has_torn_does_not_swallow_the_next(
    terminal: Any, workspace: Path
) -> None:
    [ident] = turns(workspace, [write("x\n", "made")])
    with (workspace / ".agent" / "undo" / ident / "journal").open("a") as journal:
        journal.write('{"turn": 1, "call": "x", "path": "nf')
    with FlakyServer([write("y\n", "next"), "done"]) as server:
        screen = begin(terminal, server, "--resume")
        say(screen, "go on")
        leave(screen)
    resumed(terminal, "/undo")
    assert list(snapshot(workspace)) == ["made"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_that_a_command_removed_comes_back_to_its_owner(
    terminal: Any, workspace: Path
) -> None:
    (workspace / "f").write_text("old\n")
    os.chown(workspace / "f", 1234, 2345)
    undone(terminal, workspace, edit("old", "new"), bash("rm f"), answer="y")


def odd_folders(journal: Path) -> None:
    """Give what is no name as the name of a folder that was made."""
    journal.write_text(json.dumps(json.loads(journal.read_text()) | {"folders": [1, None]}) + "\n")


def a_pipe(path: Path) -> None:
    """A pipe in place of a file."""
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(odd_folders, id="folders that are numbers"),
        pytest.param(a_pipe, id="a pipe as journal"),
        pytest.param(
            lambda journal: [
                a_pipe(image) for image in journal.parent.iterdir() if image != journal
            ],
            id="pipes as images",
        ),
    ],
)
def test_an_odd_journal_ends_neither_the_undo_nor_the_agent(
    terminal: Any, workspace: Path, damage: Callable[[Path], object]
) -> None:
    (workspace / "f").write_text("old\n")
    [ident] = turns(workspace, [edit("old", "new")])
    damage(workspace / ".agent" / "undo" / ident / "journal")
    resumed(terminal, "/undo", answer="y")
    assert (workspace / "f").read_text() in ("old\n", "new\n")


@pytest.mark.parametrize("begins", [["x"], [None], [1.5], [[1]]], ids=str)
def test_turns_that_begin_nowhere_do_not_end_the_agent(workspace: Path, begins: list[Any]) -> None:
    (workspace / "f").write_text("old\n")
    turns(workspace, [edit("old", "new")])
    changed_session(workspace, turns=begins)
    session, _ = resume_session(workspace / ".agent" / "sessions", "")
    agent = build_agent(
        Settings(
            base_url="http://127.0.0.1:9/v1", model="m", mode="auto", workspace=str(workspace)
        ),
        session=session,
    )
    try:
        agent.undo(1, lambda line: None)
    finally:
        agent.close()
    assert (workspace / "f").read_text() == "old\n"
