"""Section 3 on a bad day: damage, kills, full disks, second processes, moves, pruning, commands.

test_sessions.py says what a session file is; here something happens to it. The property test at
the end draws whole lives of a project: turns, kills at any moment, resumes, forks, cut files.
"""

import contextlib
import inspect
import io
import json
import os
import re
import resource
import shutil
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
from conftest import prompts, put_session, results, session_files, talk, until
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import agent
from agent import (
    Agent,
    Person,
    Repl,
    Screen,
    Session,
    SessionError,
    Settings,
    Transcript,
    build_agent,
    list_sessions,
    new_session,
    open_session,
    problems,
    resume_session,
    state_folder,
    tool,
)
from flaky_server import FlakyServer

DAY = 86_400
NOW = 1767225600.0
OLD, MIDDLE, NEW = "20250101-101010-aaaa", "20250102-101010-bbbb", "20250103-101010-cccc"
SYSTEM = {"role": "system", "content": "be brief"}
TALK = [SYSTEM, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
LATER = [*TALK, {"role": "user", "content": "more"}, {"role": "assistant", "content": "well"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a project's sessions."""
    return state_folder(tmp_path) / "sessions"


def whole(ident: str, messages: Any = TALK, **header: Any) -> bytes:
    """The bytes of a session file, one message a line."""
    fields = {"version": 1, "id": ident, "created": 0, "updated": 0, "title": "hi"} | header
    lines = ",\n".join(json.dumps(message) for message in messages)
    return (json.dumps(fields)[:-1] + ', "messages": [\n' + lines + "\n]}\n").encode()


def put(folder: Path, ident: str, data: bytes | None = None, *, backup: Any = None) -> Path:
    """A session file as an earlier run left it, perhaps with its backup; a later id is newer."""
    path = folder / f"{ident}.json"
    path.write_bytes(whole(ident) if data is None else data)
    if backup is not None:
        path.with_suffix(".bak").write_bytes(whole(ident, backup))
    when = NOW + int(ident[6:8])
    os.utime(path, (when, when))
    return path


def loaded(path: Path) -> dict:
    """What a session file holds."""
    return json.loads(path.read_bytes())


def taken(folder: Path, wanted: str = "", *, fork: bool = False) -> tuple[str, list, list[str]]:
    """Resume and let go: which session, its messages, and what was said."""
    session, notices = resume_session(folder, wanted, fork=fork)
    assert session is not None, notices
    session.close()
    return session.id, session.transcript.messages, notices


def contents(folder: Path) -> set[bytes]:
    """What the files of a folder hold, whatever their names."""
    return {path.read_bytes() for path in folder.iterdir() if path.is_file()}


def mode(path: Path) -> str:
    """The permissions of a file or folder."""
    return oct(stat.S_IMODE(path.lstat().st_mode))


def new_agent(url: str, root: Path, session: Session | None = None, **options: Any) -> Agent:
    """An agent that works in the folder and never waits."""
    extra = {key: options.pop(key) for key in ("tools", "emit") if key in options}
    fixed = {"model": "flaky-1", "base_url": url, "api_key": "x", "workspace": str(root)}
    made = Settings(**{**fixed, **options})
    return build_agent(made, session=session, sleep=lambda seconds: None, **extra)


def prompt_of(agent: Agent) -> tuple[Repl, io.StringIO]:
    """A prompt without a terminal, and what it says."""
    err = io.StringIO()
    return Repl(agent, Person(Screen(io.StringIO(), err), io.StringIO())), err


def lines_with(text: str, *words: str) -> list[str]:
    """The lines of a text that hold one of the words."""
    return [line for line in text.splitlines() if any(word in line for word in words)]


# -- damaged files -------------------------------------------------------------------------------

WHOLE = whole(NEW, LATER)
DAMAGED = [
    pytest.param(b"", id="0 bytes"),
    pytest.param(WHOLE[:1], id="one byte"),
    pytest.param(WHOLE[:40], id="cut in the header"),
    pytest.param(WHOLE[: len(WHOLE) * 6 // 10], id="cut at 60 %"),
    pytest.param(WHOLE[: WHOLE.rindex(b"\n", 0, -4)], id="cut between two messages"),
    pytest.param(WHOLE[:-3], id="the end is missing"),
    pytest.param(b"\0" * len(WHOLE), id="zeros of a power cut"),
    pytest.param(WHOLE[:200] + b"\0" * 100 + WHOLE[300:], id="zeros inside"),
    pytest.param(WHOLE + WHOLE[-30:], id="a stale tail"),
    pytest.param(WHOLE.replace(b'"hello"', b'"\xff\xfe"'), id="no UTF-8"),
    pytest.param(bytes(range(256)) * 16, id="binary"),
    pytest.param(b"[" * 100_000, id="nested without end"),
]
FOREIGN = [
    pytest.param(b"{}", id="empty object"),
    pytest.param(b"null", id="null"),
    pytest.param(b'"text"', id="a text"),
    pytest.param(b'{"name": "x", "dependencies": {}}', id="another program's"),
    pytest.param(b'{"version": 1, "messages": {}}', id="messages that are no list"),
]
NEWER_VERSION = b'{"version": 2, "messages": [], "new": [1]}\n'


@pytest.mark.parametrize("wanted", ["", NEW, NEW[:8]], ids=["newest", "id", "prefix"])
@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_session_goes_on_from_its_backup_and_its_bytes_are_kept(folder, data, wanted):
    put(folder, OLD)
    path = put(folder, NEW, data, backup=TALK)
    ident, messages, notices = taken(folder, wanted)
    assert (ident, messages, len(notices)) == (NEW, TALK, 1)
    assert path.with_suffix(".damaged").read_bytes() == data
    assert f"{NEW}.damaged" in notices[0] and "\n" not in notices[0]
    assert taken(folder, wanted) == (NEW, TALK, []), "once is enough"


@pytest.mark.parametrize("data", DAMAGED)
def test_a_fork_of_a_damaged_session_goes_on_from_its_backup(folder, data):
    put(folder, OLD)
    put(folder, NEW, data, backup=TALK)
    for wanted in ("", NEW):
        session, notices = resume_session(folder, wanted, fork=True)
        assert session is not None
        session.save()
        session.close()
        assert (session.transcript.messages, session.id in (OLD, NEW)) == (TALK, False)
        assert data in contents(folder)
        assert [NEW in notice for notice in notices] in ([True], []), notices
        (folder / f"{session.id}.json").unlink()


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_session_without_a_good_backup_is_named_and_left_alone(folder, data):
    put(folder, OLD)
    path = put(folder, NEW, data)
    for backup in (None, b"", b'{"version": 1, "mess'):
        if backup is not None:
            path.with_suffix(".bak").write_bytes(backup)
        for fork in (False, True):
            with pytest.raises(SessionError, match=f"{NEW}.json") as caught:
                resume_session(folder, NEW, fork=fork)
            assert "\n" not in str(caught.value)
        ident, messages, notices = taken(folder)
        assert (ident, messages, [NEW in notice for notice in notices]) == (OLD, TALK, [True])
        assert (path.read_bytes() == data, path.with_suffix(".damaged").exists()) == (True, False)


@pytest.mark.parametrize("fork", [False, True], ids=["resume", "fork"])
@pytest.mark.parametrize("wanted", ["", NEW], ids=["newest", "id"])
@pytest.mark.parametrize("data", FOREIGN)
def test_the_bytes_of_a_file_that_is_no_session_are_never_lost(folder, data, wanted, fork):
    """Beside a backup it may count as damaged or as foreign; without one it is left alone."""
    put(folder, OLD)
    path = put(folder, NEW, data, backup=TALK)
    with contextlib.suppress(SessionError):
        assert [NEW in notice for notice in taken(folder, wanted, fork=fork)[2]] == [True]
    assert data in contents(folder)
    for left in folder.glob(f"{NEW}*"):
        left.unlink()
    put(folder, NEW, data)
    with pytest.raises(SessionError, match=NEW):
        resume_session(folder, NEW, fork=fork)
    assert (taken(folder)[0], path.read_bytes()) == (OLD, data)


@pytest.mark.parametrize("fork", [False, True], ids=["resume", "fork"])
@pytest.mark.parametrize("backup", [None, TALK], ids=["alone", "with a backup"])
def test_a_newer_version_is_no_damage_and_left_alone(folder, backup, fork):
    put(folder, OLD)
    path = put(folder, NEW, NEWER_VERSION, backup=backup)
    before = {entry.name: entry.read_bytes() for entry in folder.glob(f"{NEW}.[jb]*")}
    with pytest.raises(SessionError, match="newer version"):
        resume_session(folder, NEW, fork=fork)
    _, messages, notices = taken(folder, fork=fork)
    assert (messages, [NEW in notice for notice in notices]) == (TALK, [True])
    assert {entry.name: entry.read_bytes() for entry in folder.glob(f"{NEW}.[jb]*")} == before
    assert (path.exists(), path.with_suffix(".damaged").exists()) == (True, False)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(json.dumps(LATER).encode(), id="a bare list"),
        pytest.param(whole(NEW, LATER, pinned=True, tags={"a": [1]}), id="unknown keys"),
        pytest.param(json.dumps({"messages": LATER}).encode(), id="no header"),
        pytest.param(json.dumps(json.loads(WHOLE), indent=4).encode(), id="indented"),
        pytest.param(b"\n \t" + WHOLE.replace(b"\n", b"\r\n"), id="line ends of Windows"),
    ],
)
def test_what_is_whole_is_taken_as_it_is_also_beside_a_backup(folder, data):
    path = put(folder, NEW, data, backup=TALK)
    assert taken(folder) == (NEW, LATER, [])
    session, _ = open_session(path)
    session.save()
    session.close()
    assert (loaded(path)["messages"], loaded(path).get("pinned")) == (
        LATER,
        True if b"pinned" in data else None,
    )
    assert not path.with_suffix(".damaged").exists()


def test_a_second_damage_keeps_the_second_bytes_too(folder):
    path = put(folder, NEW, b"first {", backup=TALK)
    assert taken(folder, NEW)[1] == TALK
    path.write_bytes(b"second {")
    assert taken(folder, NEW)[1] == TALK
    assert b"second {" in contents(folder)


def test_a_damaged_session_that_another_process_holds_is_not_moved(folder):
    put(folder, OLD)
    held, _ = open_session(put(folder, NEW, backup=TALK))
    path = put(folder, NEW, b"{", backup=TALK)
    assert (taken(folder)[0], path.read_bytes()) == (OLD, b"{")
    with pytest.raises(SessionError, match="--fork"):
        resume_session(folder, NEW)
    assert (path.read_bytes(), path.with_suffix(".damaged").exists()) == (b"{", False)
    held.close()
    assert taken(folder)[:2] == (NEW, TALK), "free again, it falls back"


def test_all_that_belongs_to_a_damaged_session_is_for_the_user_alone(folder):
    before = os.umask(0)
    try:
        put(folder, NEW, b"{", backup=TALK)
        for path in folder.iterdir():
            path.chmod(0o600)
        taken(folder)
    finally:
        os.umask(before)
    assert {mode(path) for path in folder.iterdir()} == {"0o600"}


def test_a_damaged_session_is_resumed_by_the_program_with_one_line(run_agent, workspace):
    path = put_session(workspace, NEW, LATER)
    path.with_suffix(".bak").write_bytes(path.read_bytes())
    data = path.read_bytes()[:-70]
    path.write_bytes(data)
    with FlakyServer(["on"]) as server:
        done = run_agent("--resume", "go on", server=server)
    assert (done.returncode, done.stdout, prompts(server.requests[0])) == (
        0,
        "on\n",
        ["hi", "more", "go on"],
    )
    assert len(lines_with(done.stderr, "damaged")) == 1
    assert path.with_suffix(".damaged").read_bytes() == data
    assert loaded(path)["messages"][-1]["content"] == "on"


# -- the archive ---------------------------------------------------------------------------------


def archived(session: Session) -> list[dict]:
    """What a session has in its archive."""
    return list(session.archived())


def lines_of(path: Path) -> list[dict]:
    """The messages of an archive file."""
    return [json.loads(line) for line in path.read_bytes().decode().splitlines()]


@pytest.mark.parametrize(
    "left",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b'{"role": "user", "cont', id="half a line"),
        pytest.param(b'{"role": "user", "content": "never saved"}\n', id="a whole line"),
        pytest.param(b'{"role": "user"}\n\xff\xfe{"ro', id="a line and a half"),
        pytest.param(b"\0" * 5000, id="zeros"),
    ],
)
def test_what_a_crash_left_in_the_archive_is_cut_off_before_the_next_line(folder, left):
    session = new_session(folder, {}, NOW)
    session.transcript = Transcript(TALK)
    session.archive(LATER[1:3])
    session.save()
    session.close()
    path = folder / f"{session.id}.archive.jsonl"
    with path.open("ab") as file:
        file.write(left)
    again, notes = open_session(folder / f"{session.id}.json")
    assert (archived(again), notes) == (LATER[1:3], [])
    again.archive(LATER[3:])
    again.save()
    assert (archived(again), lines_of(path), mode(path)) == (LATER[1:], LATER[1:], "0o600")
    again.close()


def test_an_archive_whose_session_was_never_saved_does_not_count(folder):
    session = new_session(folder, {}, NOW)
    session.transcript = Transcript(LATER)
    session.save()
    session.archive(LATER[1:3])
    session.close()  # killed before the save: the messages are still in the session
    again, _ = open_session(folder / f"{session.id}.json")
    assert (archived(again), again.transcript.messages) == ([], LATER)
    again.archive(LATER[1:3])
    again.save()
    assert lines_of(folder / f"{session.id}.archive.jsonl") == archived(again) == LATER[1:3]
    again.close()


def test_a_session_in_memory_keeps_its_archive_in_memory(tmp_path):
    session = new_session(None, {}, NOW)
    session.archive(TALK[1:])
    session.archive(LATER[3:])
    assert (archived(session), list(tmp_path.iterdir())) == (LATER[1:], [])


def test_an_archive_that_is_missing_or_cut_is_no_crash(folder):
    session = new_session(folder, {}, NOW)
    session.transcript = Transcript(TALK)
    session.archive(LATER[1:])
    session.save()
    session.close()
    path = folder / f"{session.id}.archive.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    again, _ = open_session(folder / f"{session.id}.json")
    assert archived(again)[:3] == LATER[1:4]
    path.unlink()
    assert archived(again) == []
    again.archive(LATER[3:])
    assert archived(again)[-2:] == LATER[3:]
    again.close()


# -- a kill, an abnormal end ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "end",
    [
        pytest.param({"status": 400, "body": {"error": {"message": "no"}}, "times": 9}, id="400"),
        pytest.param({"status": 500, "body": {"error": {"message": "no"}}, "times": 9}, id="500"),
        pytest.param({"fault": "empty_reply", "times": 9}, id="empty replies"),
    ],
)
def test_a_turn_that_ends_badly_keeps_all_that_was_done_before(tmp_path, end):
    steps = [{"call": "list_files", "arguments": {"offset": n}} for n in range(4)]
    with FlakyServer([*steps, end, "never"]) as server:
        made = new_agent(server.url, tmp_path)
        result = made.run("look around")
        made.close()
    again, notes = open_session(made.session.folder / f"{made.session.id}.json")
    again.close()
    kept = [m["content"] for m in again.transcript.messages if m["role"] == "tool"]
    assert (result.status, len(kept), notes) == ("error", 4, [])
    assert kept == results(server.requests[4])


def test_after_a_kill_at_the_prompt_the_last_reply_is_there_and_shown(
    terminal, run_agent, workspace
):
    with FlakyServer(["PONG", "PANG"]) as server:
        screen = terminal(server=server)
        screen.prompt()
        screen.send("ping\r")
        screen.expect("PONG")
        screen.prompt()
        screen.process.send_signal(signal.SIGKILL)
        screen.process.wait(60)
        done = run_agent("--resume", "pang", server=server)
    sent = [message["content"] for message in server.requests[1]["messages"][1:]]
    assert (done.returncode, sent[:2], sent[2].endswith("pang")) == (0, ["ping", "PONG"], True)
    [path] = session_files(workspace)
    assert len(lines_with(done.stderr, path.stem, "ping")) == 1, "one line says what is resumed"


# It says "hit" only where the next signal finds it inside the `try`.
SAVE_UNDER_SIGNALS = """
import signal, sys, agent, pathlib
session, notes = agent.open_session(pathlib.Path(sys.argv[1]))
hits, told = [], 0
def stop(number, frame):
    hits.append(number)
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, stop)
print("saving", flush=True)
while told < 50:
    try:
        while told < 50:
            if told < len(hits):
                told = len(hits)
                print("hit", flush=True)
            session.transcript.add_user("x" * 100)
            session.save()
    except KeyboardInterrupt:
        continue
"""


@pytest.mark.long
def test_signals_during_the_saves_of_a_large_session_leave_a_file_that_reads(folder, child):
    turn = [{"role": "user", "content": "q" * 2000}, {"role": "assistant", "content": "a" * 2000}]
    path = put(folder, OLD, whole(OLD, [SYSTEM, *turn * 5000]))
    process = child(SAVE_UNDER_SIGNALS, path)
    assert process.stdout.readline() == "saving\n"
    inode = path.stat().st_ino
    for _ in range(50):
        until(lambda old=inode: path.stat().st_ino != old or process.poll() is not None)
        inode = path.stat().st_ino
        assert len(loaded(path)["messages"]) > 10_000
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "hit\n"
    assert process.wait(60) == 0
    ident, messages, notices = taken(folder)
    assert (ident, len(messages) > 10_001, notices) == (OLD, True, [])
    session, _ = open_session(path)
    session.save()
    session.close()
    assert list(folder.glob("*.tmp")) == []


# -- disks ---------------------------------------------------------------------------------------

SMALL_DISK = """
import json, os, pathlib, sys, agent
notices = []
def emit(kind, **data):
    notices.extend([data["text"]] if kind == "notice" else [])
made = agent.build_agent(agent.Settings(model="flaky-1", base_url=sys.argv[1], api_key="x",
                                        workspace=sys.argv[2]), emit=emit)
path = made.session.path
made.run("one")
before = path.read_bytes()
filler = pathlib.Path(sys.argv[2], ".agent", "filler")
with open(filler, "wb", buffering=0) as file:
    try:
        while file.write(b"x" * 4096):
            pass
    except OSError as error:
        full = error.errno
second = made.run("two " * 2000)
kept = path.read_bytes() == before
third = made.run("three")
said = len(notices)
filler.unlink()
fourth = made.run("four")
made.close()
again, notes = agent.open_session(path)
again.close()
same = again.transcript.messages == made.transcript.messages
left = sorted(entry.name for entry in path.parent.glob("*.tmp"))
print(json.dumps([full, kept, second.text, third.text, said, fourth.text, same, notes, left]))
"""


@pytest.mark.long
def test_a_disk_that_is_really_full_keeps_the_old_file_and_takes_the_new_one_later(
    workspace, child
):
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        pytest.skip("bubblewrap is missing: no small disk for this test")
    disk = workspace / ".agent"
    disk.mkdir(mode=0o700)
    small = ("--perms", "0700", "--size", "262144", "--tmpfs", str(disk))
    with FlakyServer(["1", "2", "3", "4"]) as server:
        under = (bwrap, "--dev-bind", "/", "/", *small)
        output, _ = child(SMALL_DISK, server.url, workspace, under=under).communicate(timeout=60)
    assert json.loads(output) == [28, True, "2", "3", 1, "4", True, [], []]
    assert list(disk.iterdir()) == []


@pytest.mark.long
def test_a_session_on_a_read_only_disk_is_left_as_it_is_and_the_work_goes_on(run_agent, workspace):
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        pytest.skip("bubblewrap is missing: no read-only mount for this test")
    path = put_session(workspace, OLD, talk("older?", "older."))
    before = path.read_bytes()
    mount = [bwrap, "--dev-bind", "/", "/", "--ro-bind", str(workspace), str(workspace)]
    with FlakyServer(["ok", "ok"]) as server:
        done = run_agent("--resume", "go on", server=server, under=mount)
        free = run_agent("--resume", "go on", server=server)
    assert (done.returncode, done.stdout, free.returncode) == (0, "ok\n", 0), done.stderr
    assert 1 <= len(lines_with(done.stderr, ".agent", ".json", ".lock")) <= 3
    assert prompts(server.requests[1]) == ["older?", "go on"], "nothing had come to it"
    assert path.read_bytes() != before


def test_a_folder_that_can_not_be_read_is_said_and_the_work_goes_on(run_agent, workspace):
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        pytest.skip("bubblewrap is missing: root may read everything")
    put_session(workspace, OLD, talk("older?", "older."))
    folder = workspace / ".agent" / "sessions"
    folder.chmod(0)
    anyone = [bwrap, "--unshare-user", "--uid", "1000", "--gid", "1000", "--dev-bind", "/", "/"]
    with FlakyServer(["ok"]) as server:
        done = run_agent("hello", server=server, under=anyone)
        again = run_agent("--resume", "go on", server=server, under=anyone)
    listed = run_agent("--sessions", under=anyone)
    folder.chmod(0o700)
    assert [run.returncode for run in (done, again, listed)] == [0, 1, 1], done.stderr
    for run in (done, again, listed):
        assert len(lines_with(run.stderr, "sessions can not be read")) == 1, run.stderr


# -- several processes ---------------------------------------------------------------------------


def test_when_all_sessions_are_held_a_fork_is_offered(folder):
    held = [open_session(put(folder, ident))[0] for ident in (OLD, NEW)]
    session, notices = resume_session(folder, "")
    assert (session, any("--fork" in notice for notice in notices)) == (None, True)
    assert taken(folder, fork=True)[1] == TALK
    held[0].close()
    assert taken(folder)[0] == OLD, "the one that is free"
    held[1].close()


def test_each_further_resume_takes_the_newest_one_that_is_left(folder):
    for ident in (OLD, MIDDLE, NEW):
        put(folder, ident)
    opened, told = zip(*(resume_session(folder, "") for _ in range(4)), strict=True)
    assert [session and session.id for session in opened] == [NEW, MIDDLE, OLD, None]
    assert [len(notices) for notices in told] == [0, 1, 1, 1], told
    for session in opened[:3]:
        session.close()


def test_a_lock_that_was_removed_underneath_costs_nobody_a_message(folder):
    """The one that has the session goes on; another is refused or gets a valid session."""
    path = put(folder, NEW)
    first, _ = open_session(path)
    path.with_suffix(".lock").unlink()
    first.transcript.add_user("kept")
    first.save()
    with contextlib.suppress(SessionError):
        second, notes = open_session(path)
        assert (second.transcript.messages[-1]["content"], notes) == ("kept", [])
        second.close()
    first.save()
    first.close()
    ident, messages, notices = taken(folder)
    assert (ident, messages, notices) == (NEW, [*TALK, {"role": "user", "content": "kept"}], [])


MANY_TURNS = """
import sys, agent
made = agent.build_agent(agent.Settings(model="flaky-1", base_url=sys.argv[1], api_key="x",
                                        workspace=sys.argv[2], mode="auto", sandbox="off"))
for number in range(12):
    assert made.run(f"turn {number}").text == "ok"
made.close()
print(made.session.id)
"""


@pytest.mark.long
def test_four_processes_in_one_project_never_show_a_reader_half_a_file(workspace, child):
    def reply(request: dict) -> Any:
        if request["messages"][-1]["role"] == "tool":
            return "ok"
        return {"call": "read_file", "arguments": {"path": "a.txt"}}

    (workspace / "a.txt").write_text("alpha\n" * 500)
    with FlakyServer([reply] * 200) as server:
        started = [child(MANY_TURNS, server.url, workspace) for _ in range(4)]
        while any(process.poll() is None for process in started):
            for path in session_files(workspace):
                assert loaded(path)["id"] == path.stem
        ids = {process.communicate(timeout=60)[0].strip() for process in started}
    assert [process.returncode for process in started] == [0] * 4
    assert ids == {path.stem for path in session_files(workspace)}
    turns = [len(prompts(loaded(path))) for path in session_files(workspace)]
    audit = (workspace / ".agent" / "audit.jsonl").read_text()
    rows = [json.loads(line) for line in audit.splitlines()]
    assert (turns, len(rows)) == ([12] * 4, 48)
    assert [request.problems for request in server.requests if request.problems] == []


# -- large sessions ------------------------------------------------------------------------------

LARGE = """
import json, pathlib, resource, sys, agent
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
folder = pathlib.Path(sys.argv[1])
base = peak()
if sys.argv[2] == "list":
    entries, notices = agent.list_sessions(folder)
    told = [entries[0].messages, notices]
else:
    session, notices = agent.resume_session(folder, "")
    session.transcript.add_user("more")
    session.save()
    session.close()
    told = [len(session.transcript.messages), notices]
print(json.dumps([*told, peak() - base]))
"""


def put_large(folder: Path) -> Path:
    """A session of 5,001 messages and a little over 50 MB."""
    text = 'word caf\u00e9 "quoted" \\ \n' * 840
    turn = [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]
    path = put(folder, NEW, whole(NEW, [SYSTEM, *turn * 2500]))
    assert path.stat().st_size > 50_000_000
    return path


@pytest.mark.long
def test_a_session_of_50_megabytes_is_listed_and_resumed_in_bounded_memory(folder, child):
    path = put_large(folder)
    size = path.stat().st_size
    for what, messages, most in (("list", 5001, 4), ("resume", 5002, 8)):
        output, _ = child(LARGE, folder, what).communicate(timeout=600)
        found, notices, memory = json.loads(output)
        assert (found, notices, memory < most * size) == (messages, [], True), (what, memory)
    assert sum(entry.stat().st_size for entry in folder.iterdir()) < 2.5 * size
    assert len(loaded(path)["messages"]) == 5002


TIMES = """
import json, pathlib, sys, time, agent
def cost(work):
    best = 1e9
    for _ in range(3):
        begun = time.process_time()
        work()
        best = min(best, time.process_time() - begun)
    return best
session, _ = agent.resume_session(pathlib.Path(sys.argv[1]), "")
session.save()
def encode():
    return json.dumps(session.transcript.messages, ensure_ascii=False).encode()
print(cost(session.save) / cost(encode))
session.close()
"""


@pytest.mark.long
def test_saving_again_costs_no_more_than_encoding_everything_a_few_times(folder, child):
    put_large(folder)
    output, _ = child(TIMES, folder).communicate(timeout=600)
    assert float(output) < 4


# -- where the project is ------------------------------------------------------------------------


def test_a_model_is_told_once_that_the_project_moved(tmp_path):
    (tmp_path / "old").mkdir()
    old = tmp_path / "old"
    put(state_folder(old) / "sessions", NEW, whole(NEW, root=str(old)))
    new = old.rename(tmp_path / "new")
    with FlakyServer(["a", "b", "c"]) as server:
        for words in (["one", "two"], ["three"]):
            session, _ = resume_session(new / ".agent" / "sessions", "")
            made = new_agent(server.url, new, session)
            for text in words:
                made.run(text)
            made.close()
    said = prompts(server.requests[2])
    assert str(old) in said[1] and str(new) in said[1] and "one" in said[1]
    assert [str(old) in text for text in said] == [False, True, False, False]
    assert prompts(server.requests[1]) == said[:3]


@pytest.mark.parametrize("header", [{}, {"root": None}, {"root": ["x"]}, {"root": "."}])
def test_a_project_that_did_not_move_or_never_said_where_it_is_gets_its_prompt_alone(
    tmp_path, folder, header
):
    known = {"root": str(tmp_path)} if header == {"root": "."} else header
    session, _ = open_session(put(folder, NEW, whole(NEW, **known)))
    with FlakyServer(["a"]) as server:
        made = new_agent(server.url, tmp_path, session)
        made.run("one")
        made.close()
    assert prompts(server.requests[0]) == ["hi", "one"]


def test_a_start_in_a_folder_below_names_the_nearest_project_above(run_agent, workspace):
    inner = workspace / "sub" / "deep" / "deeper"
    inner.mkdir(parents=True)
    for place in (workspace, workspace / "sub"):
        put_session(place, OLD, talk("older?", "older."))
    (workspace / "sub" / "deep" / ".agent" / "sessions").mkdir(parents=True, mode=0o700)
    with FlakyServer(["new", "again"]) as server:
        done = run_agent("--resume", "go on", server=server, cwd=inner)
        again = run_agent("--resume", "go on", server=server, cwd=inner)
    assert (done.returncode, done.stdout, len(session_files(inner))) == (0, "new\n", 1)
    assert prompts(server.requests[0]) == ["go on"]
    named = f"agent -C {workspace / 'sub'} --resume"
    assert (len(lines_with(done.stderr, named)), f"{workspace} " in done.stderr) == (1, False)
    assert (prompts(server.requests[1])[0], named in again.stderr) == ("go on", False)


# -- pruning -------------------------------------------------------------------------------------

SIZE = 1_000_000  # of a session with all that belongs to it, but for a few thousand bytes
FAMILY = ("sessions/{}.json", "sessions/{}.bak", "sessions/{}.lock", "undo/{}/journal")
IDS = [f"2025010{n}-101010-{n:04x}" for n in range(1, 5)]


def aged(folder: Path, ident: str, days: float) -> list[Path]:
    """A session that was used last so many days before NOW; all the paths that belong to it."""
    state = folder.parent
    paths = [state / name.format(ident) for name in FAMILY]
    for path in paths:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(whole(ident) if path.suffix == ".json" else b"")
    for name in (f"sessions/{ident}.archive.jsonl", f"output/{ident}/call-1.txt"):
        paths.append(state / name)
        paths[-1].parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with paths[-1].open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, SIZE // 2)
    for path in (*paths, state / "undo" / ident, state / "output" / ident):
        os.utime(path, (NOW - days * DAY, NOW - days * DAY))
    return paths


def pruned(folder: Path, sizes: float = 200, *, days: float = 30, keep: str = "") -> str:
    """Prune down to so many sessions' sizes; the limits are known by their defaults."""
    known = inspect.signature(agent.prune_sessions).parameters
    named = {parameter.default: name for name, parameter in known.items()}
    limits = {named[30]: days, named[200_000_000]: int(sizes * SIZE)}
    text = agent.prune_sessions(folder, NOW, keep=keep, **limits)
    assert "\n" not in text
    return text


def left(paths: dict[str, list[Path]]) -> list[str]:
    """The sessions that are whole; of all others nothing is there."""
    found = {ident: [path.exists() for path in family] for ident, family in paths.items()}
    assert [ident for ident, there in found.items() if len(set(there)) > 1] == []
    return [ident for ident, there in found.items() if all(there)]


@pytest.mark.parametrize(
    "ages, sizes, kept",
    [
        pytest.param([4, 3, 2, 1], 0.5, "1234", id="too much but young"),
        pytest.param([60, 50, 40, 31], 10, "1234", id="old but little"),
        pytest.param([60, 50, 40, 31], 2.5, "34", id="oldest first, no more than needed"),
        pytest.param([31, 40, 60, 50], 2.5, "12", id="the age is that of the last use"),
        pytest.param([60, 50, 40, 31], 0.1, "", id="all"),
        pytest.param([60, 50, 2, 1], 0.5, "34", id="the young ones stay over the limit"),
        pytest.param([30.1, 29.9, 29.8, 1], 0.1, "234", id="to the hour"),
        pytest.param([60, 0, -1, -400], 0.1, "234", id="a clock that was ahead"),
        pytest.param([20000, 19000, 1, 1], 2.1, "34", id="from the year 1970"),
    ],
)
def test_old_sessions_are_pruned_beyond_a_size(folder, ages, sizes, kept):
    paths = {ident: aged(folder, ident, days) for ident, days in zip(IDS, ages, strict=True)}
    text = pruned(folder, sizes)
    assert left(paths) == [ident for ident in IDS if ident[7] in kept]
    assert (bool(text), pruned(folder, sizes)) == (len(kept) < 4, "")


def test_the_defaults_are_30_days_and_200_megabytes(folder):
    paths = {ident: aged(folder, ident, 300) for ident in IDS[:2]}
    assert (agent.prune_sessions(folder, NOW), left(paths)) == ("", IDS[:2])
    with paths[IDS[0]][-2].open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 200_000_000)
    assert agent.prune_sessions(folder, NOW + 0.0) != ""
    assert IDS[0] not in left(paths) or IDS[1] not in left(paths)


def test_a_session_that_is_held_or_to_be_kept_is_not_pruned(folder):
    paths = {ident: aged(folder, ident, 60) for ident in IDS}
    held, _ = open_session(paths[IDS[0]][0])
    pruned(folder, 0.1, keep=IDS[2])
    assert left(paths) == [IDS[0], IDS[2]]
    held.close()
    for path in paths[IDS[0]]:
        os.utime(path, (NOW - 60 * DAY, NOW - 60 * DAY))
    assert (pruned(folder, 0.1) != "", left(paths)) == (True, [])


def test_what_a_session_left_that_is_gone_is_pruned_too(folder):
    paths = {ident: aged(folder, ident, days) for ident, days in zip(IDS, (60, 1), strict=False)}
    for ident in IDS[:2]:
        for path in list(folder.glob(f"{ident}.*")):
            path.unlink()
            paths[ident].remove(path)
    assert (pruned(folder, 0.1) != "", left(paths)) == (True, [IDS[1]])


def test_pruning_touches_nothing_else(folder):
    """The other files of the project's state are old and large too, and stay."""
    paths = {IDS[0]: aged(folder, IDS[0], 60)}
    others = [folder.parent / name for name in ("audit.jsonl", "history", "quarantine/1/x", "own")]
    others += [folder / "notes.txt", folder.parent / ".gitignore", folder.parent.parent / "a.py"]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        os.utime(path, (0, 0))
    assert (pruned(folder, 0.1) != "", left(paths)) == (True, [])
    assert [path for path in others if not path.exists()] == []


@pytest.mark.parametrize(
    "name, is_folder",
    [
        ("sessions/{}.json", False),
        ("sessions/{}.archive.jsonl", False),
        ("undo/{}", True),
        ("output/{}", True),
        ("undo", True),
        ("output", True),
    ],
)
def test_pruning_follows_no_link(tmp_path, folder, name, is_folder):
    aged(folder, IDS[0], 60)
    beside = aged(folder, IDS[1], 60)[0]
    outside, path = tmp_path / "outside", folder.parent / name.format(IDS[0])
    path.rename(outside)
    path.symlink_to(outside)
    if is_folder and "{" in name:
        inner = outside / "deep" / "mine.txt"
        inner.parent.mkdir()
        inner.write_text("mine")
    before = sorted(str(entry) for entry in outside.rglob("*"))
    pruned(folder, 0.1)
    assert (outside.exists(), beside.exists()) == (True, False)
    assert sorted(str(entry) for entry in outside.rglob("*")) == before


def test_pruning_where_there_is_nothing_makes_nothing(tmp_path):
    assert (pruned(tmp_path / ".agent" / "sessions", 0.1), list(tmp_path.iterdir())) == ("", [])


def test_a_start_prunes_and_says_so_in_one_line(run_agent, workspace):
    gone = put_session(workspace, OLD, talk("older?", "older."))
    kept = put_session(workspace, NEW, talk("newer?", "newer."))
    with gone.with_suffix(".archive.jsonl").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 201_000_000)
    for path in gone.parent.iterdir():
        os.utime(path, (DAY, DAY))
    os.utime(kept)
    with FlakyServer(["ok"]) as server:
        done = run_agent("hi", server=server)
    assert (done.returncode, done.stdout) == (0, "ok\n")
    assert ([path.exists() for path in (gone, kept)], len(session_files(workspace))) == (
        [False, True],
        2,
    )
    assert len(lines_with(done.stderr, "prune", "removed", "30 days")) == 1


# -- clocks --------------------------------------------------------------------------------------


def test_a_clock_that_goes_back_breaks_neither_order_nor_ages(run_agent, workspace):
    for ident, when in ((OLD, 4e9), (MIDDLE, 1e9), (NEW, 1e9), ("20250104-101010-dddd", -1e6)):
        path = put_session(workspace, ident, talk("older?", "older."))
        os.utime(path, (when, when))
    entries, notices = list_sessions(workspace / ".agent" / "sessions")
    order = [entry.id for entry in entries]
    assert (order, notices) == ([OLD, NEW, MIDDLE, "20250104-101010-dddd"], [])
    done = run_agent("--sessions")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert (done.returncode, [row[0] for row in rows]) == (0, order)
    assert [row[1] for row in rows if not re.fullmatch(r"\d+[smhd]", row[1])] == []


# -- tools that are gone -------------------------------------------------------------------------


def test_a_session_with_calls_of_a_tool_that_is_gone_goes_on(tmp_path, folder):
    call = {"id": "a", "type": "function", "function": {"name": "ticket", "arguments": "{}"}}
    old = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    old.append({"role": "tool", "tool_call_id": "a", "content": "#7: open"})
    session, notes = open_session(put(folder, NEW, whole(NEW, [*TALK, *old])))
    with FlakyServer([{"call": "ticket", "arguments": {}}, "done"]) as server:
        made = new_agent(server.url, tmp_path, session)
        result = made.run("go on")
        made.close()
    first, second = results(server.requests[1])
    assert (result.status, notes, first) == ("done", [], "#7: open")
    assert second.startswith("error: ") and "ticket" in second and "read_file" in second
    assert [request.problems for request in server.requests] == [[], []]


# -- commands at the prompt ----------------------------------------------------------------------


def typed(screen: Any, text: str) -> str:
    """Type a line at the prompt; what was shown until the next prompt."""
    screen.send(text + "\r")
    return screen.prompt()


def leave(screen: Any) -> None:
    """Leave at the prompt."""
    screen.send("exit\r")
    assert screen.wait() == 0


def test_resuming_at_the_prompt_shows_the_last_exchange_and_commands_name_the_session(
    terminal, workspace
):
    long = "first words " + "and more " * 4000 + "\x1b[2J"
    path = put_session(workspace, OLD, [*talk("early?", "early."), *talk("last?", long)[1:]])
    with FlakyServer(["PONG"]) as server:
        screen = terminal("--resume", server=server)
        shown = screen.prompt()
        renamed = typed(screen, "/rename paint it \u00e9cru")
        listed = typed(screen, "/sessions")
        typed(screen, "/rename")
        typed(screen, "ping")
        leave(screen)
    assert "last?" in shown and "first words" in shown and "early." not in shown
    assert (len(shown) < 6000, "\x1b[2J" in screen.output) == (True, False)
    assert "there is no command" not in renamed
    assert OLD in listed and "paint it \u00e9cru" in lines_with(listed, OLD)[0]
    assert (loaded(path)["title"], prompts(loaded(path))[-1]) == ("paint it \u00e9cru", "ping")


def test_resume_at_the_prompt_changes_to_another_session_and_lets_the_old_one_go(
    terminal, workspace
):
    for ident in (OLD, MIDDLE, NEW):
        put_session(workspace, ident, talk(f"{ident}?", f"{ident}."))
    folder = workspace / ".agent" / "sessions"
    held, _ = open_session(folder / f"{MIDDLE}.json")
    with FlakyServer(["PONG"]) as server:
        screen = terminal(f"--resume={NEW}", server=server)
        screen.prompt()
        refused = typed(screen, f"/resume {MIDDLE}")
        unknown = typed(screen, "/resume 20990101")
        shown = typed(screen, "/resume")
        assert taken(folder, NEW)[1][1]["content"] == f"{NEW}?", "free again"
        with pytest.raises(SessionError):
            open_session(folder / f"{OLD}.json")
        typed(screen, "ping")
        leave(screen)
    held.close()
    assert str(os.getpid()) in refused and "20990101" in unknown
    assert f"{OLD}?" in shown and f"{OLD}." in shown
    assert prompts(server.requests[0]) == [f"{OLD}?", "ping"]
    assert [len(loaded(path)["messages"]) for path in session_files(workspace)] == [5, 3, 3]


@pytest.mark.long
def test_resume_at_the_prompt_takes_an_id_or_says_that_there_is_no_other(terminal, workspace):
    with FlakyServer(["PONG", "PANG"]) as server:
        screen = terminal(server=server)
        screen.prompt()
        nothing = typed(screen, "/resume")
        for ident in (OLD, NEW):
            put_session(workspace, ident, talk(f"{ident}?", f"{ident}."))
        shown = typed(screen, f"/resume {OLD}")
        typed(screen, "ping")
        typed(screen, f"/resume {NEW[:8]}")
        typed(screen, "pang")
        leave(screen)
    assert (nothing.strip() != "/resume", f"{OLD}." in shown) == (True, True)
    assert [prompts(request)[0] for request in server.requests] == [f"{OLD}?", f"{NEW}?"]
    assert [path.stem for path in session_files(workspace)] == [OLD, NEW]


def test_a_fork_at_an_earlier_turn_leaves_the_session_and_all_files_alone(terminal, workspace):
    step = {"call": "write_file", "arguments": {"path": "a.txt", "content": "kept\n"}}
    with FlakyServer(["ONE", step, "TWO", "THREE"]) as server:
        screen = terminal("--mode", "auto", "--sandbox", "off", server=server)
        screen.prompt()
        typed(screen, "first")
        typed(screen, "second")
        [old] = session_files(workspace)
        wrong = typed(screen, "/fork x")
        before = loaded(old)["messages"]
        typed(screen, "/fork 1")
        typed(screen, "third")
        leave(screen)
    [new] = [path for path in session_files(workspace) if path != old]
    assert ("x" in wrong.replace("/fork x", "", 1), loaded(old)["messages"]) == (True, before)
    said = [prompt.splitlines()[-1] for prompt in prompts(server.requests[3])]
    assert (said, results(server.requests[3])) == (["first", "third"], [])
    assert ((workspace / "a.txt").read_text(), loaded(new)["id"]) == ("kept\n", new.stem)
    assert prompts(loaded(old)) == ["first", "second"]


@pytest.mark.long
@pytest.mark.parametrize(
    "line, kept",
    [
        ("/fork", ["first", "second", "third"]),
        ("/fork 0", ["first", "second", "third"]),
        ("/fork 2", ["first"]),
        ("/fork 3", []),
    ],
)
def test_a_fork_at_the_prompt_is_a_copy_without_the_last_turns(terminal, workspace, line, kept):
    with FlakyServer(["1", "2", "3", "4"]) as server:
        screen = terminal(server=server)
        screen.prompt()
        for text in ("first", "second", "third"):
            typed(screen, text)
        [old] = session_files(workspace)
        before = loaded(old)["messages"]
        typed(screen, line)
        assert taken(old.parent, old.stem)[2] == [], "it is free"
        typed(screen, "on")
        leave(screen)
    said = [prompt.splitlines()[-1] for prompt in prompts(server.requests[3])]
    assert (said, loaded(old)["messages"]) == ([*kept, "on"], before)
    assert len(session_files(workspace)) == 2


@pytest.mark.long
@pytest.mark.parametrize("line", ["/fork -1", "/fork 1.5", "/fork all", "/fork 4"])
def test_a_fork_that_can_not_be_made_makes_nothing(terminal, workspace, line):
    with FlakyServer(["1", "2", "3"]) as server:
        screen = terminal(server=server)
        screen.prompt()
        typed(screen, "first")
        typed(screen, "second")
        said = typed(screen, line)
        typed(screen, "on")
        leave(screen)
    assert (len(said.splitlines()) > 1, len(session_files(workspace))) == (True, 1)
    assert prompts(server.requests[2]) == ["first", "second", "on"]


def put_compacted(workspace: Path) -> Session:
    """A session whose first turn is in its archive, with a long result of a tool."""
    call = {"id": "a", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    call["function"]["arguments"] = '{"command": "make all"}'
    first = [
        {"role": "user", "content": "build it, please"},
        {"role": "assistant", "content": "I build it.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "cc -c a.c\n" * 1500},
        {"role": "assistant", "content": "It is **built**."},
    ]
    session = new_session(state_folder(workspace) / "sessions", {"title": "build it"}, NOW)
    note = {"role": "user", "content": "[Hand-over note] it was built"}
    session.transcript = Transcript([SYSTEM, note, *talk("and now?", "Now we test.")[1:]])
    session.archive(first)
    session.save()
    session.close()
    return session


def test_an_export_is_markdown_of_all_that_was_said_also_before_a_compaction(terminal, workspace):
    ident = put_compacted(workspace).id
    (workspace / "mine.md").write_text("mine\n")
    with FlakyServer([]) as server:
        screen = terminal("--resume", server=server)
        screen.prompt()
        said = typed(screen, "/export")
        typed(screen, "/export short.md")
        taken_name = typed(screen, "/export mine.md")
        again = typed(screen, "/export")
        outside = typed(screen, "/export ../x.md")
        leave(screen)
    path = workspace / f"session-{ident}.md"
    text = path.read_text()
    order = ["build it, please", "I build it.", "make all", "It is **built**.", "and now?"]
    places = [text.index(part) for part in [*order, "Now we test."]]
    assert (places, len(text) < 8000, mode(path)) == (sorted(places), True, "0o600")
    assert path.name in said and "private" in said
    assert (workspace / "short.md").read_text() == text
    assert ((workspace / "mine.md").read_text(), path.read_text()) == ("mine\n", text)
    assert "mine.md" in taken_name and path.name in again and "x.md" in outside
    assert not (workspace.parent / "x.md").exists()


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        pytest.param("a\n```py\nx = 1", "a\n```py\nx = 1\n```", id="open fence"),
        pytest.param("~~~~\n```\n~~~", "~~~~\n```\n~~~\n~~~~", id="other fence"),
        pytest.param("```\nx\n````\n`y`", "```\nx\n````\n`y`", id="closed fence"),
        pytest.param("```x``` is code", "```x``` is code", id="no fence"),
        pytest.param("\x1b[31mred\r\nline", "\\u{1b}[31mred\nline", id="control characters"),
    ],
)
def test_an_export_is_readable_whatever_was_said(tmp_path, said, kept):
    session = new_session(None, {"title": "a\n# b"}, NOW)
    session.unwritten = [{"role": "user", "content": said}, {"role": "tool"}]
    odd = [{"id": 5, "function": 5}, {"function": {"name": "x", "arguments": "`" * 3}}]
    session.unwritten.append({"role": "assistant", "content": 5, "tool_calls": odd})
    repl, _ = prompt_of(new_agent("http://127.0.0.1:9/v1", tmp_path, session))
    repl.take("/export x.md")
    repl.take("/export .")
    text = (tmp_path / "x.md").read_text()
    assert text.startswith("# a\n\nSession ")
    assert f"\n## User\n\n{kept}\n\n## Assistant\n\n- `None()`: \n- `x()`: \n" in text
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["x.md"]


def test_an_export_that_the_disk_does_not_take_leaves_nothing(tmp_path):
    session = new_session(None, {}, NOW)
    session.transcript.replace([SYSTEM, {"role": "user", "content": "x" * 100_000}])
    repl, err = prompt_of(new_agent("http://127.0.0.1:9/v1", tmp_path, session))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        repl.take("/export x.md")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in err.getvalue() and list(tmp_path.iterdir()) == []
    repl.take("/export x.md")
    assert (tmp_path / "x.md").stat().st_size > 100_000


@pytest.mark.parametrize("line", ["/rename other", "/fork"])
def test_what_the_model_was_not_told_yet_is_not_lost(tmp_path, folder, line):
    path = put(folder, NEW, whole(NEW, root="/elsewhere"))
    with FlakyServer(["ok"]) as server:
        repl, err = prompt_of(new_agent(server.url, tmp_path, open_session(path)[0]))
        repl.take("!echo seen")
        repl.take(line)
        if line != "/fork":  # a start later
            repl.agent.close()
            repl, err = prompt_of(new_agent(server.url, tmp_path, open_session(path)[0]))
        repl.take("go on")
        repl.agent.close()
    told = server.requests[0]["messages"][-1]["content"]
    assert "this project was at /elsewhere" in told, err.getvalue()
    assert ("[the user ran: echo seen]" in told) == (line == "/fork")


@pytest.mark.parametrize(
    "line", ["/fork -1", "/undo x", "/fork " + "9" * 5000, "/undo " + "9" * 5000]
)
def test_what_is_no_number_of_turns_is_one_line(tmp_path, line):
    repl, err = prompt_of(new_agent("http://127.0.0.1:9/v1", tmp_path))
    repl.take(line)
    assert "takes a number of turns" in err.getvalue() and len(err.getvalue()) < 200


def test_an_export_shows_results_as_they_were_before_they_were_clipped():
    call = {"id": "1", "type": "function", "function": {"name": "grep", "arguments": "{}"}}
    asks = {"role": "assistant", "content": "", "tool_calls": [call]}
    whole, clipped = (
        {"role": "tool", "tool_call_id": "1", "content": text} for text in ("whole", "clipped")
    )
    session = Session(Transcript([*TALK[:2], asks, clipped]), {"id": OLD}, None)
    session.unwritten = [whole]
    text = "\n".join(agent.markdown(session))
    assert ("whole" in text, "clipped" in text) == (True, False)


def test_what_an_older_session_holds_of_a_secret_is_not_exported(tmp_path):
    environ = {"PATH": os.environ["PATH"], "MY_TOKEN": "sk-zebra-0123456789abcdef"}
    known = {"base_url": "http://127.0.0.1:9/v1", "api_key": "x", "model": "flaky-1"}
    made = build_agent(Settings(**known, workspace=str(tmp_path), environ=environ))
    made.session.unwritten = [{"role": "user", "content": f"it is {environ['MY_TOKEN']}"}]
    screen = agent.Screen(io.StringIO(), io.StringIO())
    agent.Repl(made, agent.Person(screen, io.StringIO())).take("/export all.md")
    made.close()
    assert "it is [masked]" in (tmp_path / "all.md").read_text()


def test_a_copy_without_its_last_turns_says_so_to_the_model(tmp_path):
    with FlakyServer(["one", "two", "three"]) as server:
        known = {"base_url": server.url, "api_key": "x", "model": "flaky-1"}
        made = build_agent(Settings(**known, workspace=str(tmp_path)))
        assert [made.run("first").text, made.run("second").text] == ["one", "two"]
        screen = agent.Screen(io.StringIO(), io.StringIO())
        agent.Repl(made, agent.Person(screen, io.StringIO())).take("/fork 1")
        made.run("third")
        made.close()
    first, last = prompts(server.requests[-1])
    assert (first, last.endswith("\nthird"), "without its end" in last) == ("first", True, True)


def test_what_was_approved_and_counted_in_a_session_ends_with_it(tmp_path, folder):
    known = {"base_url": "http://127.0.0.1:9/v1", "api_key": "x", "model": "flaky-1"}
    made = build_agent(Settings(**known, workspace=str(tmp_path)))
    made.hosts.add("example.org")
    made.approved.append("bash make *")
    made.lost.add("the session can not be saved")
    made.filled = (9000, False)
    other = new_session(folder, {}, NOW)
    made.session.close()
    made.use_session(other)
    left = (made.hosts, made.approved, made.lost, made.filled)
    made.close()
    assert left == (set(), [], set(), (0, False))


class Keyboard(io.StringIO):
    """A terminal on which nothing more is typed."""

    def isatty(self) -> bool:
        """As it says."""
        return True


@pytest.mark.parametrize(("stdin", "code"), [(Keyboard, 0), (io.StringIO, 129)])
def test_the_end_of_input_is_a_farewell_only_on_a_terminal(tmp_path, stdin, code):
    known = {"base_url": "http://127.0.0.1:9/v1", "api_key": "x", "model": "flaky-1"}
    made = build_agent(Settings(**known, workspace=str(tmp_path)))
    screen = agent.Screen(io.StringIO(), io.StringIO())
    assert agent.Repl(made, agent.Person(screen, stdin())).run() == code
    made.close()


@pytest.mark.long
@pytest.mark.parametrize("name", ["link.md", "dead.md", "out/x.md"])
def test_an_export_is_not_written_through_a_link(terminal, workspace, tmp_path, name):
    put_compacted(workspace)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("mine\n")
    (workspace / "link.md").symlink_to(victim / "file")
    (workspace / "dead.md").symlink_to(victim / "none")
    (workspace / "out").symlink_to(victim)
    (workspace / "docs").mkdir()
    with FlakyServer([]) as server:
        screen = terminal("--resume", server=server)
        screen.prompt()
        typed(screen, f"/export {name}")
        typed(screen, "/export docs/x.md")
        leave(screen)
    assert {path.name: path.read_text() for path in victim.iterdir()} == {"file": "mine\n"}
    assert "It is **built**." in (workspace / "docs" / "x.md").read_text()


@pytest.mark.long
def test_the_commands_of_a_session_that_is_not_kept_say_so_or_work(terminal, workspace):
    with FlakyServer(["PONG", "PANG"]) as server:
        screen = terminal("--no-session", server=server)
        screen.prompt()
        typed(screen, "ping")
        said = [typed(screen, line) for line in ("/sessions", "/rename x", "/fork", "/resume")]
        typed(screen, "/export out.md")
        typed(screen, "pang")
        leave(screen)
    assert [len(text.splitlines()) > 1 for text in said][0] is True
    assert (prompts(server.requests[1]), session_files(workspace)) == (["ping", "pang"], [])
    assert "PONG" in (workspace / "out.md").read_text()


# -- any life of a project -----------------------------------------------------------------------


def within(wanted: list[str], texts: list[str]) -> bool:
    """Whether all that is wanted stands in the texts, in this order."""
    rest = iter(texts)
    return all(any(one in text for text in rest) for one in wanted)


class Project:
    """A project with its sessions, and what was said in each turn that came to its end."""

    def __init__(self, root: Path, url: str, plan: list) -> None:
        root.mkdir()
        self.root, self.url, self.plan = root, url, plan
        self.folder = state_folder(root) / "sessions"
        self.states: list[dict[str, bytes]] = []  # the disk at moments of the last turn
        self.done: dict[str, list[str]] = {}
        self.turns = 0
        self.start(None)

    def start(self, session: Session | None) -> None:
        """A process begins."""

        @tool(needs="run")
        def work(step: int) -> str:
            """Do the work.

            step: its number
            """
            self.look()
            return f"worked {step}"

        options: dict = {"tools": [work], "mode": "auto", "sandbox": "off"}
        self.agent = new_agent(self.url, self.root, session, **options)
        self.done.setdefault(self.agent.session.id, [])
        self.check()

    def look(self) -> None:
        """Remember what a kill at this moment would leave."""
        names = [path for path in self.folder.iterdir() if path.suffix != ".lock"]
        self.states.append({path.name: path.read_bytes() for path in names})

    @property
    def id(self) -> str:
        return self.agent.session.id

    def check(self) -> None:
        """What is in memory is valid and holds each turn that was done."""
        messages = self.agent.transcript.messages
        texts = [m["content"] or "" for m in messages if m["role"] in ("user", "assistant")]
        assert problems(messages) == []
        assert within(self.done[self.id], texts), (self.done[self.id], texts)

    def turn(self, steps: list[str], kill: int | None) -> None:
        """A prompt; `kill`: the process dies at one of its moments, and another one resumes."""
        self.turns += 1
        self.states.clear()
        self.plan[:] = [self.look, *steps]
        known, prompt = self.id, f"prompt {self.turns}."
        result = self.agent.run(prompt)
        if kill is None:
            if result.status == "done":
                self.done[known] += [prompt, result.text]
            self.check()
            return
        state = self.states[kill % len(self.states)]
        self.agent.close()
        for path in self.folder.iterdir():
            path.unlink()
        for name, data in state.items():
            (self.folder / name).write_bytes(data)
        self.resume(known)

    def resume(self, wanted: str, *, fork: bool = False) -> list[str]:
        """The process ends, another one goes on; with nothing kept yet it begins anew."""
        self.agent.close()
        if not list(self.folder.glob("*.json")):
            self.start(None)
            return []
        before = {path: path.read_bytes() for path in self.folder.glob("*.json")}
        session, notices = resume_session(self.folder, wanted, fork=fork)
        assert session is not None
        if fork:
            assert {path: path.read_bytes() for path in before} == before
            [source] = [i for i in self.done if not wanted or i.startswith(wanted)][-1:]
            said = [m["content"] or "" for m in session.transcript.messages]
            fits = [done for done in self.done.values() if within(done, said)]
            self.done[session.id] = list(self.done[source] if wanted else max(fits, key=len))
        self.start(session)
        return notices

    def damage(self, part: int) -> None:
        """The file of the session is cut; only the last turn may be gone."""
        self.agent.close()
        path = self.folder / f"{self.id}.json"
        if not path.exists() or not path.with_suffix(".bak").exists():
            self.resume(self.id if path.exists() else "")
            return
        data, expected = path.read_bytes(), loaded(path.with_suffix(".bak"))["messages"]
        cut = data[: (len(data) - 3) * part // 100]
        path.write_bytes(cut)
        said = [m["content"] or "" for m in expected]
        before = self.done[self.id]
        assert within(before[:-2], said), "the backup is older than one turn"
        self.done[self.id] = before if within(before, said) else before[:-2]
        notices = self.resume(self.id)
        assert len(notices) == 1 and cut in contents(self.folder)
        assert self.agent.transcript.messages[1:] == expected[1:]


STEPS = st.lists(
    st.sampled_from(["call", "calls", "cut_text", "cut_call", "refused", "empty_reply"]), max_size=3
)
EVENTS = st.one_of(
    st.tuples(st.just("turn"), STEPS, st.none()),
    st.tuples(st.just("turn"), STEPS, st.integers(0, 9)),
    st.tuples(st.just("resume"), st.sampled_from(["newest", "same", "first"]), st.booleans()),
    st.tuples(st.just("damage"), st.integers(0, 100), st.none()),
)
WORK = {"name": "work", "arguments": {"step": 1}}
REFUSED = {"status": 400, "body": {"error": {"message": "no", "type": "x"}}}
SCRIPT = {
    "call": {"call": "work", "arguments": {"step": 2}},
    "calls": {"calls": [WORK, {"name": "list_files", "arguments": {}}, WORK], "text": "all"},
    "cut_text": {"fault": "cut_text", "text": "half of it"},
    "cut_call": {"fault": "cut_call", "calls": [WORK]},
    "refused": REFUSED,
    "empty_reply": {"fault": "empty_reply"},
}


PLAIN_LIFE = [("turn", ["call"], None)] * 3 + [("damage", 60, None), ("turn", ["calls"], 2)]
PLAIN_LIFE += [("resume", "same", True), ("turn", [], None), ("turn", [], 0), ("damage", 0, None)]


def live(root: Path, url: str, plan: list, events: list) -> None:
    """One life of a project."""
    project = Project(root, url, plan)
    for kind, what, more in events:
        if kind == "turn":
            project.turn(what, more)
        elif kind == "damage":
            project.damage(what)
        else:
            wanted = {"newest": "", "same": project.id, "first": min(project.done)}[what]
            there = (project.folder / f"{wanted}.json").exists()
            project.resume(wanted if there else "", fork=more)
    project.agent.close()
    for path in project.folder.glob("*.json"):
        assert problems(loaded(path)["messages"]) == []
    assert list(project.folder.glob("*.tmp")) == []


def lives(tmp_path: Path, count: int, most: int) -> None:
    """Draw lives; no request in any of them is refused by a strict server."""
    plan: list = []
    number = iter(range(1_000_000))

    def reply(request: dict) -> Any:
        if plan and callable(plan[0]):
            plan[0]()  # each request is a moment at which the process may be killed
        step = plan.pop(1) if len(plan) > 1 else ""
        return SCRIPT.get(step, f"answer {len(request['messages'])}.")

    with FlakyServer([reply] * 200_000) as server:
        options = {
            "deadline": None,
            "database": None,
            "report_multiple_bugs": False,
            "derandomize": True,
        }

        @settings(max_examples=count, suppress_health_check=list(HealthCheck), **options)
        @example(PLAIN_LIFE)
        @given(st.lists(EVENTS, min_size=min(most, 5), max_size=most))
        def check(events: list) -> None:
            root = tmp_path / str(next(number))
            live(root, server.url, plan, events)
            shutil.rmtree(root)

        check()
        assert [request.problems for request in server.requests if request.problems] == []


def test_any_life_of_a_project_sends_valid_requests_and_loses_no_turn(tmp_path):
    lives(tmp_path, 6, 8)


@pytest.mark.long
def test_any_life_of_a_project_sends_valid_requests_and_loses_no_turn_long(tmp_path):
    lives(tmp_path, 100, 30)
