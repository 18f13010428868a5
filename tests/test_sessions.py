"""Section 3: one JSON file a session, saved whole or not at all, and held by one process."""

import contextlib
import fcntl
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import agent
from agent import (
    Agent,
    Session,
    SessionError,
    Settings,
    Transcript,
    allow_tracked,
    build_agent,
    calls_of,
    fork_session,
    hold,
    list_sessions,
    new_session,
    open_session,
    problems,
    prune_sessions,
    read_session,
    remove_session,
    resume_session,
    sessions_above,
    state_folder,
    tracked_by_git,
)
from flaky_server import FlakyServer

ROOT = Path(__file__).resolve().parent.parent
NOW = 1735786800.0
SYSTEM = {"role": "system", "content": "be brief"}
TALK = [SYSTEM, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
OLD, MIDDLE, NEW = "20250101-101010-aaaa", "20250102-101010-bbbb", "20250103-101010-cccc"

# What a second process does; each says a word when it is ready.
HOLD = """
import sys, agent, pathlib
session, notes = agent.open_session(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
session.close()
"""
SAVE_FOR_EVER = """
import sys, agent, pathlib
session, notes = agent.open_session(pathlib.Path(sys.argv[1]))
while True:
    session.transcript.add_user("x" * 1000)
    session.save()
    print(len(session.transcript.messages), flush=True)
"""
MAKE_SESSIONS = """
import sys, agent, pathlib
print("ready", flush=True)
sys.stdin.readline()
for _ in range(15):
    session = agent.new_session(pathlib.Path(sys.argv[1]), {}, float(sys.argv[2]))
    session.save()
    print(session.id, flush=True)
    session.close()
"""
FULL_DISK = """
import json, resource, sys, agent
notices = []
def emit(kind, **data):
    notices.extend([data["text"]] if kind == "notice" else [])
made = agent.build_agent(agent.Settings(model="flaky-1", base_url=sys.argv[1], api_key="x",
                                        workspace=sys.argv[2]), emit=emit)
path, limits = made.session.path, resource.getrlimit(resource.RLIMIT_FSIZE)
made.run("one")
before = path.read_bytes()
resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
second = made.run("two " * 500)
kept = path.read_bytes() == before
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
third = made.run("three")
saved = json.loads(path.read_bytes())["messages"] == made.transcript.messages
made.close()
print(json.dumps([second.status, second.text, third.text, kept, saved, len(notices)]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a project's sessions."""
    return state_folder(tmp_path) / "sessions"


def stored(folder: Path, ident: str, messages: Any = TALK, **header: Any) -> Path:
    """A session file as an earlier run left it; a later id is newer."""
    path = folder / f"{ident}.json"
    fields = {"version": 1, "id": ident, "created": 0, "updated": 0, "title": "hi"} | header
    path.write_text(json.dumps({**fields, "messages": messages}))
    day = int(ident[6:8])
    os.utime(path, (NOW + day, NOW + day))
    return path


def loaded(path: Path) -> dict:
    """What a session file holds."""
    return json.loads(path.read_bytes())


def forked(folder: Path) -> Session:
    """A fork of the newest session."""
    fork, _ = resume_session(folder, "", fork=True)
    assert fork is not None
    return fork


def mode(path: Path) -> str:
    """The permissions of a file or folder."""
    return oct(stat.S_IMODE(path.lstat().st_mode))


def new_agent(
    url: str, root: Path, session: Session | None = None, *, emit: Any = None, **options: Any
) -> Agent:
    """An agent that works in the folder."""
    fixed = {"base_url": url, "api_key": "x", "workspace": str(root)}
    settings = Settings(**{"model": "flaky-1", **options, **fixed})
    return build_agent(settings, session=session, emit=emit)


def collector(notices: list[dict]) -> Callable[..., None]:
    """An event callback that keeps the notices."""
    return lambda kind, **data: notices.extend([data] if kind == "notice" else [])


def file_of(made: Agent) -> Path:
    """The session file of an agent."""
    assert made.session.path is not None
    return made.session.path


# -- the file ------------------------------------------------------------------------------------


def test_a_session_file_has_the_promised_keys_and_one_message_a_line(tmp_path):
    with FlakyServer([{"call": "list_files", "arguments": {}}, "done\n\u2028"]) as server:
        made = new_agent(server.url, tmp_path)
        made.run("look around")
        made.close()
    path = file_of(made)
    value, lines = loaded(path), path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    keys = "version id created updated root model base_url title usage files messages"
    assert set(value) >= set(keys.split())
    assert [json.loads(line.rstrip(",")) for line in lines[1:-1]] == value["messages"]
    assert (value["version"], value["id"], value["title"]) == (1, path.stem, "look around")
    names = (value["root"], value["model"], value["base_url"])
    assert names == (str(tmp_path), "flaky-1", server.url)


def test_the_messages_of_the_file_are_the_transcript_with_the_system_message_as_sent(tmp_path):
    with FlakyServer([{"call": "list_files", "arguments": {}}, "done"]) as server:
        made = new_agent(server.url, tmp_path)
        made.run("look around")
        made.close()
    messages = loaded(file_of(made))["messages"]
    assert messages == made.transcript.messages
    assert messages[0] == server.requests[-1]["messages"][0]
    roles = [message["role"] for message in messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]


@pytest.mark.skipif(not shutil.which("jq"), reason="jq is not installed")
def test_jq_and_grep_can_read_a_session_file(tmp_path, folder):
    path = folder / f"{OLD}.json"
    session = new_session(folder, {"title": "caf\u00e9"}, NOW)
    session.transcript = Transcript(TALK)
    session.save()
    session.close()
    path = session.folder / f"{session.id}.json"
    query = ["jq", "-r", ".title, (.messages | length), .messages[2].content", str(path)]
    assert subprocess.check_output(query, text=True) == "caf\u00e9\n3\nhello\n"
    found = subprocess.check_output(["grep", '"assistant"', str(path)], text=True)
    assert json.loads(found.rstrip(",\n")) == TALK[2]


def test_an_id_is_the_time_and_four_hex_digits_and_names_the_file(folder):
    session = new_session(folder, {}, NOW)
    session.save()
    session.close()
    day, clock, tail = session.id.split("-")
    assert (len(day), len(clock), len(tail)) == (8, 6, 4)
    assert (day.isdigit(), clock.isdigit(), int(tail, 16) >= 0) == (True, True, True)
    assert (folder / f"{session.id}.json").exists()


def test_files_are_for_the_user_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        with FlakyServer(["one", "two"]) as server:
            made = new_agent(server.url, tmp_path)
            made.run("hi")
            made.run("more")
            made.session.archive(TALK)
            made.close()
    finally:
        os.umask(before)
    state = tmp_path / ".agent"
    found = {mode(path) for path in state.rglob("*") if path.is_file()}
    assert (found, {mode(state), mode(state / "sessions")}) == ({"0o600"}, {"0o700"})


def test_git_does_not_see_the_folder_and_the_users_own_ignore_file_is_not_touched(tmp_path):
    (tmp_path / ".gitignore").write_text("*.pyc\n")
    stored(state_folder(tmp_path) / "sessions", OLD)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    status = ["git", "-C", str(tmp_path), "status", "--porcelain", "--untracked-files=all"]
    assert subprocess.check_output(status, text=True) == "?? .gitignore\n"
    assert (tmp_path / ".gitignore").read_text() == "*.pyc\n"
    assert (tmp_path / ".agent" / ".gitignore").read_text().split() == ["*"]


@pytest.mark.parametrize("kind", ["file", "link to a folder", "link to nothing"])
def test_a_state_folder_that_is_no_plain_folder_is_refused_and_left_alone(tmp_path, kind):
    target = tmp_path / "elsewhere"
    root = tmp_path / "project"
    root.mkdir()
    if kind == "file":
        (root / ".agent").write_text("mine")
    else:
        (root / ".agent").symlink_to(target)
    if kind == "link to a folder":
        target.mkdir()
    with pytest.raises(SessionError, match=r"\.agent"):
        state_folder(root)
    assert kind == "file" or not target.exists() or list(target.iterdir()) == []


@pytest.mark.parametrize(
    "mode, used", [(0o700, True), (0o755, True), (0o775, False), (0o707, False)]
)
def test_a_state_folder_that_others_can_write_is_not_used(tmp_path, mode, used):
    (tmp_path / ".agent").mkdir()
    (tmp_path / ".agent").chmod(mode)
    if used:
        assert state_folder(tmp_path).is_dir()
        return
    with pytest.raises(SessionError, match="can be written by others"):
        state_folder(tmp_path)
    assert list((tmp_path / ".agent").iterdir()) == []


def test_a_link_in_place_of_a_session_file_or_its_temporary_file_is_not_written_through(
    tmp_path, folder
):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    session = new_session(folder, {}, NOW)
    for name in (f"{session.id}.json", f"{session.id}.json.tmp"):
        (folder / name).symlink_to(victim)
    with contextlib.suppress(OSError):  # refusing is as good
        session.save()
    session.close()
    assert victim.read_text() == "mine"


# -- save and load -------------------------------------------------------------------------------


def test_what_is_saved_is_what_is_loaded(folder):
    session = new_session(folder, {"title": "caf\u00e9", "usage": {"prompt_tokens": 3}}, NOW)
    session.transcript = Transcript([*TALK, {"role": "user", "content": "\U0001f600\n\u2028\x7f"}])
    session.save()
    session.close()
    again, notes = open_session(folder / f"{session.id}.json")
    again.close()
    assert (again.transcript.messages, notes) == (session.transcript.messages, [])
    assert again.header == session.header


def test_unknown_keys_are_kept_in_the_header_in_messages_and_in_calls(folder):
    call = {"id": "a", "type": "function", "function": {"name": "x", "arguments": "{}"}, "sig": [1]}
    reply = {"role": "assistant", "content": None, "tool_calls": [call], "mood": "good"}
    talk = [*TALK, reply, {"role": "tool", "tool_call_id": "a", "content": "ok", "at": 7}]
    path = stored(folder, OLD, talk, pinned=True, tags={"a": [1, None]})
    session, notes = open_session(path)
    session.save()
    session.close()
    value = loaded(path)
    assert (value["messages"], notes) == (talk, [])
    assert (value["pinned"], value["tags"]) == (True, {"a": [1, None]})


def test_a_bare_list_of_messages_is_a_session(folder):
    path = folder / f"{OLD}.json"
    path.write_text(json.dumps(TALK))
    session, notes = open_session(path)
    session.save()
    session.close()
    value = loaded(path)
    assert (value["messages"], value["version"], value["id"], notes) == (TALK, 1, OLD, [])


def test_a_file_without_a_version_and_without_a_header_is_taken(folder):
    path = folder / f"{OLD}.json"
    path.write_text(json.dumps({"messages": TALK}))
    session, _ = open_session(path)
    session.close()
    assert (session.id, session.transcript.messages) == (OLD, TALK)


def test_the_id_is_the_name_of_the_file_so_that_cp_forks(folder):
    path = stored(folder, OLD)
    copied = folder / f"{NEW}.json"
    shutil.copy(path, copied)
    before = path.read_bytes()
    session, _ = open_session(copied)
    session.transcript.add_user("only in the copy")
    session.save()
    session.close()
    assert (session.id, path.read_bytes() == before) == (NEW, True)
    assert (loaded(copied)["id"], len(loaded(copied)["messages"])) == (NEW, 4)


def test_a_copy_under_any_name_is_a_session(folder):
    shutil.copy(stored(folder, OLD), folder / "before the rewrite.json")
    session, notices = resume_session(folder, "before")
    assert session is not None
    session.close()
    assert (session.id, notices) == ("before the rewrite", [])


def test_odd_values_in_the_header_do_not_end_a_run(tmp_path, folder):
    odd = {"usage": None, "files": [], "title": 7, "model": 7, "base_url": None, "root": []}
    path = stored(folder, OLD, **odd)
    session, _ = open_session(path)
    with FlakyServer(["done"]) as server:
        made = new_agent(server.url, tmp_path, session)
        result = made.run("go on")
        made.close()
    assert (result.status, result.text) == ("done", "done")
    assert [message["content"] for message in loaded(path)["messages"]][-2:] == ["go on", "done"]


def test_a_session_in_memory_leaves_nothing(tmp_path):
    with FlakyServer(["one", "two"]) as server:
        made = new_agent(server.url, tmp_path, save_session=False)
        made.run("hi")
        result = made.run("more")
        made.close()
    assert (result.text, list(tmp_path.iterdir())) == ("two", [])


def test_a_session_that_never_began_leaves_no_file(tmp_path):
    with FlakyServer([]) as server:
        new_agent(server.url, tmp_path).close()
    assert list((tmp_path / ".agent" / "sessions").iterdir()) == []


def test_a_project_that_moved_still_has_its_sessions(tmp_path):
    (tmp_path / "old").mkdir()
    stored(state_folder(tmp_path / "old") / "sessions", OLD, root=str(tmp_path / "old"))
    moved = (tmp_path / "old").rename(tmp_path / "new")
    session, notices = resume_session(moved / ".agent" / "sessions", "")
    with FlakyServer(["done"]) as server:
        made = new_agent(server.url, moved, session)
        made.run("go on")
        made.close()
    assert (notices, loaded(file_of(made))["root"]) == ([], str(moved))
    assert str(moved) in server.requests[0]["messages"][0]["content"]


def test_the_model_of_a_session_is_kept_only_at_its_own_endpoint(tmp_path, folder):
    with FlakyServer([]) as server:
        at_home = stored(folder, OLD, model="chosen", base_url=server.url)
        foreign = stored(folder, NEW, model="chosen", base_url="http://127.0.0.1:9/v1")
        found = []
        for path in (at_home, foreign):
            made = new_agent(server.url, tmp_path, open_session(path)[0], model="")
            found.append((made.client.model, made.client.endpoint))
            made.close()
    assert found == [("chosen", server.url), ("flaky-1", server.url)]


ODD_HEADERS = [
    pytest.param({"usage": {"prompt_tokens": None}}, id="usage null"),
    pytest.param({"usage": {"prompt_tokens": "5", "completion_tokens": [1]}}, id="usage as text"),
    pytest.param({"usage": {"prompt_tokens": True, "x": {}}}, id="usage of other kinds"),
    pytest.param({"files": {"a.txt": 5, "b": None}}, id="files"),
    pytest.param({"created": "x", "updated": []}, id="times"),
    pytest.param({"title": ["a"]}, id="title"),
    pytest.param({"version": 1.0}, id="version 1.0"),
    pytest.param({"turns": ["x", -5, 10**12, None, True]}, id="turns"),
    pytest.param({"turns": {"a": 1}}, id="turns as an object"),
    pytest.param({"notes": ["../..", "/etc", "\0", "a" * 5000, 5]}, id="notes"),
    pytest.param({"root": ["x"], "model": 5, "base_url": {}}, id="information"),
    pytest.param({"archived": -5}, id="archived below zero"),
    pytest.param({"archived": "all"}, id="archived as text"),
    pytest.param({"unarchived": [5, {"role": 1}]}, id="unarchived"),
    pytest.param({"usage": [], "files": [1], "title": 5}, id="lists"),
]


@pytest.mark.parametrize("odd", ODD_HEADERS)
def test_an_odd_header_does_not_end_a_run(tmp_path, folder, odd):
    (tmp_path / "a.txt").write_text("x\n")
    path = stored(folder, OLD, **odd)
    notices: list[dict] = []
    script = [{"call": "write_file", "arguments": {"path": "b", "content": "x"}}, "done"]
    with FlakyServer(script) as server:
        session, notes = open_session(path)
        made = new_agent(server.url, tmp_path, session, mode="auto", emit=collector(notices))
        result = made.run("go on")
        made.close()
    assert (result.status, result.text, notes, notices) == ("done", "done", [], [])
    assert [request.problems for request in server.requests] == [[], []]
    assert loaded(path)["usage"]["prompt_tokens"] >= result.usage["prompt_tokens"] > 0


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param({"_": "x"}, id="_ is a text"),
        pytest.param({"_": [1]}, id="_ is a list"),
        pytest.param({"_": None}, id="_ is null"),
        pytest.param({"_": {"endpoint": ["{url}"], "model": 7}}, id="odd origin"),
        pytest.param(
            {"_": {"endpoint": "{url}", "model": "flaky-1"}, "reasoning_content": 5},
            id="reasoning is a number",
        ),
        pytest.param(
            {"_": {"endpoint": "{url}", "model": "flaky-1"}, "reasoning": {"a": 1}},
            id="reasoning is an object",
        ),
    ],
)
def test_odd_keys_beside_a_reply_are_kept_and_not_sent(tmp_path, folder, extra):
    with FlakyServer(["done"]) as server:
        extra = json.loads(json.dumps(extra).replace("{url}", server.url))
        reply = {"role": "assistant", "content": "hello", **extra}
        path = stored(folder, OLD, [*TALK[:2], reply])
        made = new_agent(server.url, tmp_path, open_session(path)[0])
        assert made.run("go on").text == "done"
        made.close()
    assert server.requests[0]["messages"][2] == {"role": "assistant", "content": "hello"}
    assert (server.requests[0].problems, loaded(path)["messages"][2]) == ([], reply)


# -- files that are no sessions ------------------------------------------------------------------

UNREADABLE = [
    pytest.param(b"", id="empty"),
    pytest.param(b"{", id="cut"),
    pytest.param(b'{"version": 1, "messages": [{"role": "sys', id="cut in a message"),
    pytest.param(b"{}", id="no messages"),
    pytest.param(b'{"version": 1, "messages": {}}', id="messages that are no list"),
    pytest.param(b'"text"', id="a text"),
    pytest.param(b"null", id="null"),
    pytest.param(b"\xff\xfe\x00", id="no text"),
    pytest.param(b'{"messages": ["\xe9"]}', id="no UTF-8"),
    pytest.param(b"[" * 100_000, id="endless nesting"),
    pytest.param(b'{"version": 2, "messages": []}', id="newer version"),
    pytest.param(b'{"version": 99, "messages": [], "new": 1}', id="much newer version"),
    pytest.param(b'{"version": "2.0", "messages": []}', id="version of another kind"),
]


@pytest.mark.parametrize("data", UNREADABLE)
def test_a_file_that_is_no_session_is_named_skipped_and_left_alone(folder, data):
    stored(folder, OLD)
    path = folder / f"{NEW}.json"
    path.write_bytes(data)
    session, notices = resume_session(folder, "")
    assert session is not None
    session.close()
    assert (session.id, path.read_bytes() == data, len(notices)) == (OLD, True, 1)
    assert f"{NEW}.json" in notices[0]
    assert "\n" not in notices[0]


@pytest.mark.parametrize("data", UNREADABLE)
@pytest.mark.parametrize("fork", [False, True], ids=["resume", "fork"])
def test_a_file_that_is_no_session_can_not_be_resumed_or_forked_by_its_id(folder, data, fork):
    stored(folder, OLD)
    path = folder / f"{NEW}.json"
    path.write_bytes(data)
    for _ in range(2):  # the lock is free again
        with pytest.raises(SessionError, match=f"{NEW}.json") as caught:
            resume_session(folder, NEW, fork=fork)
    assert (caught.value.exit_code, "\n" in str(caught.value)) == (1, False)
    assert (path.read_bytes() == data, len(list(folder.glob("*.json")))) == (True, 2)


@pytest.mark.parametrize("version", [None, 0, -3, "1", [1], 1.5])
def test_a_version_that_is_none_is_refused_and_not_called_newer(folder, version):
    path = stored(folder, OLD, version=version)
    before = path.read_bytes()
    with pytest.raises(SessionError, match=f"{OLD}.json") as caught:
        open_session(path)
    assert ("newer" in str(caught.value), path.read_bytes() == before) == (False, True)


def test_a_newer_version_says_that_it_is_newer(folder):
    path = folder / f"{NEW}.json"
    path.write_text('{"version": 2, "messages": []}')
    with pytest.raises(SessionError, match="newer version"):
        open_session(path)


def test_what_is_no_file_is_named_and_skipped(folder):
    stored(folder, OLD)
    (folder / f"{NEW}.json").mkdir()
    (folder / f"{MIDDLE}.json").symlink_to("nowhere")
    session, notices = resume_session(folder, "")
    assert session is not None
    session.close()
    named = [name for name in (MIDDLE, NEW) if any(name in notice for notice in notices)]
    assert (session.id, named) == (OLD, [MIDDLE, NEW])


def test_a_damaged_transcript_is_healed_once_and_the_original_is_kept(folder):
    call = {"id": "a", "type": "function", "function": {"name": "x", "arguments": "{"}}
    damaged = [*TALK, {"role": "assistant", "content": None, "tool_calls": [call]}, 7]
    path = stored(folder, OLD, damaged)
    before = path.read_bytes()
    session, notes = open_session(path)
    session.close()
    assert (len(notes) > 0, problems(loaded(path)["messages"])) == (True, [])
    assert path.with_suffix(".bak").read_bytes() == before
    again, notes = open_session(path)
    again.close()
    assert notes == []


NESTED = '{"messages": [{"role": "user", "content": %s}]}' % ("[" * 700 + "]" * 700)
LIST = "import sys, agent; sys.exit(agent.main(['--sessions']))"


@pytest.mark.parametrize("fork", [False, True], ids=["resume", "fork"])
def test_a_session_that_is_nested_without_end_is_named_skipped_and_left_alone(folder, fork):
    stored(folder, OLD)
    path = folder / f"{NEW}.json"
    path.write_text(NESTED)
    for _ in range(2):  # the lock is free again
        with pytest.raises(SessionError, match=f"{NEW}.json"):
            resume_session(folder, NEW, fork=fork)
    session, notices = resume_session(folder, "", fork=fork)
    assert session is not None
    session.close()
    assert session.transcript.messages == TALK
    assert ([NEW in notice for notice in notices], path.read_text()) == ([True], NESTED)


def test_a_pipe_among_the_sessions_is_named_and_never_waited_for(tmp_path, folder, child):
    stored(folder, OLD)
    os.mkfifo(folder / "z.json")
    process = child(LIST)
    output, _ = process.communicate(timeout=60)
    session, notices = resume_session(folder, "")
    assert session is not None
    session.close()
    assert (process.returncode, output.split()[0], session.id) == (0, OLD, OLD)
    assert ["z.json" in notice for notice in notices] == [True]


# -- which session ------------------------------------------------------------------------------


def test_sessions_are_listed_newest_first_with_what_is_in_them(folder):
    stored(folder, OLD, title="first")
    stored(folder, NEW, [SYSTEM], title="third")
    stored(folder, MIDDLE, title="second")
    entries, notices = list_sessions(folder)
    rows = [(entry.id, entry.messages, entry.title) for entry in entries]
    assert rows == [(NEW, 1, "third"), (MIDDLE, 3, "second"), (OLD, 3, "first")]
    assert notices == []


def test_other_files_in_the_folder_are_no_sessions(folder):
    stored(folder, OLD)
    for name in ("lock", "bak", "archive.jsonl", "json.tmp", "bak.tmp"):
        (folder / f"{OLD}.{name}").write_text("x")
    entries, notices = list_sessions(folder)
    assert ([entry.id for entry in entries], notices) == ([OLD], [])


def test_there_is_nothing_to_resume_in_an_empty_folder(tmp_path, folder):
    assert (resume_session(folder, ""), list_sessions(folder)) == ((None, []), ([], []))
    assert list_sessions(tmp_path / "missing") == ([], [])


@pytest.mark.parametrize(
    "wanted, found",
    [
        pytest.param("", NEW, id="the newest"),
        pytest.param(OLD, OLD, id="a whole id"),
        pytest.param("20250102", MIDDLE, id="the day"),
        pytest.param("20250101-1", OLD, id="the beginning"),
    ],
)
def test_a_session_is_found_by_the_beginning_of_its_id(folder, wanted, found):
    for ident in (NEW, OLD, MIDDLE):
        stored(folder, ident)
    session, notices = resume_session(folder, wanted)
    assert session is not None
    session.close()
    assert (session.id, notices) == (found, [])


def test_the_newest_session_is_the_one_that_was_used_last(folder):
    stored(folder, NEW)
    session, _ = open_session(stored(folder, OLD))
    session.save()
    session.close()
    found, _ = resume_session(folder, "")
    assert found is not None
    found.close()
    assert found.id == OLD


def test_a_whole_id_is_found_beside_a_longer_one(folder):
    stored(folder, OLD)
    shutil.copy(stored(folder, OLD), folder / f"{OLD}-copy.json")
    session, _ = resume_session(folder, OLD)
    assert session is not None
    session.close()
    assert session.id == OLD


@pytest.mark.parametrize("wanted", ["2025", "20250909", "aaaa", "*", "../x"])
def test_an_id_that_fits_none_or_two_is_an_error_in_one_line_that_names_it(folder, wanted):
    stored(folder, OLD)
    stored(folder, NEW)
    with pytest.raises(SessionError) as caught:
        resume_session(folder, wanted)
    text = str(caught.value)
    assert (caught.value.exit_code, wanted in text, "\n" in text) == (1, True, False)


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
@pytest.mark.parametrize(
    "words",
    [["--resume"], [f"--resume={OLD}"], ["-c", "--fork"], ["--fork", f"--resume={OLD}"]],
    ids=" ".join,
)
def test_a_session_that_git_tracks_is_not_resumed_without_a_humans_yes(tmp_path, words):
    stored(state_folder(tmp_path) / "sessions", OLD, [SYSTEM, {"role": "user", "content": "evil"}])
    for command in (["init", "-q"], ["add", "-f", ".agent"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    with FlakyServer(["done"]) as server:
        run_agent(server.url, tmp_path, "--yes", *words, "hi")
        listed = run_agent(server.url, tmp_path, "--sessions")
    sent = [message["content"] for body in server.requests for message in body["messages"]]
    assert ("evil" in sent, OLD in listed) == (False, True)


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
@pytest.mark.parametrize(
    "name",
    ["undo/{}/journal", "output/{}/a.txt", "sessions/{}.archive.jsonl", "sessions/{}.bak"],
)
def test_a_session_whose_other_files_git_tracks_came_with_the_repository_too(tmp_path, name):
    path = stored(state_folder(tmp_path) / "sessions", OLD)
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q"], check=True)
    environ = {"PATH": os.environ["PATH"]}
    assert not tracked_by_git(path, environ)
    allow_tracked(path, None, environ)
    other = tmp_path / ".agent" / name.format(OLD)
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_text("{}\n")
    subprocess.run(["git", "-C", str(tmp_path), "add", "-f", str(other)], check=True)
    assert tracked_by_git(path, environ)
    for ask in (None, lambda question: "n"):
        with pytest.raises(SessionError, match=f"{OLD}.*needs a human's yes"):
            allow_tracked(path, ask, environ)
    allow_tracked(path, lambda question: "y", environ)


def run_agent(url: str, root: Path, *args: str) -> str:
    """Run the program in a folder, with nobody there; returns its output."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(root)}
    env |= {"AGENT_BASE_URL": url, "AGENT_API_KEY": "x", "AGENT_MODEL": "flaky-1"}
    command = [sys.executable, "-m", "agent", *args]
    pipes: dict = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=root, env=env, timeout=60, **pipes)
    return done.stdout + done.stderr


# -- locks ---------------------------------------------------------------------------------------


def test_a_session_that_another_process_holds_names_that_process(folder, child):
    path = stored(folder, OLD)
    holder = child(HOLD, path)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(SessionError, match=rf"\b{holder.pid}\b.*--fork"):
        open_session(path)


def test_the_newest_session_that_nobody_holds_is_resumed(folder, child):
    stored(folder, OLD)
    newest = stored(folder, NEW)
    assert child(HOLD, newest).stdout.readline() == "held\n"
    session, notices = resume_session(folder, "")
    assert session is not None
    session.close()
    assert (session.id, len(notices), NEW in notices[0]) == (OLD, 1, True)


def test_when_all_sessions_are_held_there_is_none_to_resume(folder, child):
    path = stored(folder, OLD)
    assert child(HOLD, path).stdout.readline() == "held\n"
    before = path.read_bytes()
    session, notices = resume_session(folder, "")
    assert (session, len(notices), path.read_bytes() == before) == (None, 1, True)


def test_the_lock_of_a_process_that_was_killed_is_free(folder, child):
    path = stored(folder, OLD)
    holder = child(HOLD, path)
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.wait(60)
    assert path.with_suffix(".lock").exists()
    session, notes = open_session(path)
    session.close()
    assert (session.id, notes) == (OLD, [])


def test_a_session_is_free_when_its_process_closed_it(folder, child):
    path = stored(folder, OLD)
    holder = child(HOLD, path)
    holder.communicate("\n", timeout=60)
    session, _ = open_session(path)
    session.close()
    assert session.id == OLD


def test_a_lock_file_with_any_text_in_it_is_only_a_file(folder):
    path = stored(folder, OLD)
    path.with_suffix(".lock").write_text("1\n")
    session, _ = open_session(path)
    session.close()
    assert session.id == OLD


def test_one_process_can_not_open_a_session_twice(folder):
    path = stored(folder, OLD)
    session, _ = open_session(path)
    with pytest.raises(SessionError, match=str(os.getpid())):
        open_session(path)
    session.close()


def test_saving_keeps_the_lock_and_never_replaces_its_file(folder):
    session = new_session(folder, {}, NOW)
    lock = folder / f"{session.id}.lock"
    before = lock.stat().st_ino
    for _ in range(3):
        session.save()
    with pytest.raises(SessionError):
        open_session(folder / f"{session.id}.json")
    assert lock.stat().st_ino == before
    session.close()


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_lock_that_can_not_be_taken_is_named_and_the_session_skipped(tmp_path, folder, kind):
    stored(folder, OLD)
    lock = stored(folder, NEW).with_suffix(".lock")
    lock.mkdir() if kind == "folder" else lock.symlink_to(tmp_path / "victim")
    session, notices = resume_session(folder, "")
    assert session is not None
    session.close()
    assert (session.id, len(notices), NEW in notices[0]) == (OLD, 1, True)
    assert not (tmp_path / "victim").exists()


# -- ids and forks -------------------------------------------------------------------------------


def test_processes_that_start_in_the_same_second_get_different_ids(folder, child):
    started = [child(MAKE_SESSIONS, folder, NOW) for _ in range(20)]
    assert [process.stdout.readline() for process in started] == ["ready\n"] * 20
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    ids = [line for process in started for line in process.communicate(timeout=60)[0].split()]
    assert (len(ids), len(set(ids)), len({ident[:15] for ident in ids})) == (300, 300, 1)


def test_an_id_that_is_held_but_has_no_file_yet_is_not_given_again(folder):
    sessions = [new_session(folder, {}, NOW) for _ in range(200)]
    ids = {session.id for session in sessions}
    for session in sessions:
        session.close()
    assert (len(ids), list(folder.iterdir())) == (200, [])


def test_a_fork_leaves_the_original_as_it_is_to_the_byte(folder):
    path = stored(folder, OLD, pinned=True)
    before = path.read_bytes()
    fork = forked(folder)
    fork.transcript.add_user("only in the fork")
    fork.save()
    fork.close()
    value = loaded(folder / f"{fork.id}.json")
    assert (path.read_bytes() == before, fork.id != OLD) == (True, True)
    assert value["messages"] == [*TALK, {"role": "user", "content": "only in the fork"}]
    assert (value["id"], value["pinned"], value["title"]) == (fork.id, True, "hi")


def test_a_session_that_is_held_can_be_forked(folder, child):
    path = stored(folder, OLD)
    assert child(HOLD, path).stdout.readline() == "held\n"
    fork = forked(folder)
    fork.save()
    fork.close()
    assert loaded(folder / f"{fork.id}.json")["messages"] == TALK


def test_a_fork_of_a_damaged_session_is_healed_and_the_original_is_not(folder):
    path = stored(folder, OLD, [*TALK, {"role": "tool", "tool_call_id": "x", "content": "lost"}])
    before = path.read_bytes()
    fork = forked(folder)
    fork.close()
    assert (fork.transcript.messages, path.read_bytes() == before) == (TALK, True)


# -- when it is saved ----------------------------------------------------------------------------


def wire(message: dict) -> dict:
    """A stored message without what is never sent."""
    return {key: value for key, value in message.items() if key != "_"}


def test_the_disk_is_never_behind_a_request(tmp_path):
    level = []

    def reply(request: dict) -> Any:
        [path] = (tmp_path / ".agent" / "sessions").glob("*.json")
        level.append([wire(message) for message in loaded(path)["messages"]] == request["messages"])
        return {"call": "list_files", "arguments": {}} if len(level) < 3 else "done"

    with FlakyServer([reply] * 3) as server:
        made = new_agent(server.url, tmp_path)
        assert made.run("look around").text == "done"
        made.close()
    assert level == [True, True, True]


def test_the_backup_is_the_session_as_it_stood_when_the_last_turn_began(tmp_path):
    with FlakyServer(["one", {"call": "list_files", "arguments": {}}, "two"]) as server:
        made = new_agent(server.url, tmp_path)
        made.run("hi")
        before = file_of(made).read_bytes()
        made.run("more")
        made.close()
    assert file_of(made).with_suffix(".bak").read_bytes() == before
    assert file_of(made).read_bytes() != before


def test_what_a_crash_left_in_the_archive_does_not_count_and_is_cut_off(folder):
    session = new_session(folder, {}, 0.0)
    session.transcript.replace(TALK)
    session.archive(TALK[:1])
    session.save()
    session.archive(TALK[1:2])
    session.close()
    again, _ = open_session(session.path)
    assert list(again.archived()) == TALK[:1]
    again.archive(TALK[2:3])
    assert list(again.archived()) == [TALK[0], TALK[2]]
    again.close()


def test_an_archive_that_can_not_be_written_keeps_no_session_from_being_saved(folder):
    session = new_session(folder, {}, NOW)
    blocked = folder / f"{session.id}.archive.jsonl"
    blocked.mkdir()
    session.transcript.replace(TALK)
    session.unwritten = TALK[1:2]
    session.save()
    session.close()
    copy, _ = fork_session(session.path)
    again, notes = open_session(session.path)
    assert (notes, list(again.archived()), list(copy.archived())) == ([], TALK[1:2], TALK[1:2])
    blocked.rmdir()
    again.save()
    assert "unarchived" not in loaded(session.path)
    assert (list(again.archived()), again.unwritten) == (TALK[1:2], [])
    copy.close()
    again.close()


def test_a_call_that_was_compacted_keeps_its_id_to_itself(tmp_path, folder):
    session = new_session(folder, {}, NOW)
    session.transcript.replace(TALK)
    call = {"id": "call_0", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    session.archive([{"role": "assistant", "content": '"id":"no"', "tool_calls": [call]}])
    session.save()
    session.close()
    copy, _ = fork_session(session.path)
    for one in (copy, open_session(session.path)[0]):
        with FlakyServer(
            [{"call": "list_files", "id": "call_0", "arguments": {}}, "done"]
        ) as server:
            made = new_agent(server.url, tmp_path, one)
            made.run("go on")
            made.close()
        ids = [call["id"] for message in made.transcript.messages for call in calls_of(message)]
        assert ids and "call_0" not in ids
        assert one.archived_ids() == {"call_0"}


def test_removed_messages_are_added_to_the_archive_one_a_line(folder):
    session = new_session(folder, {}, NOW)
    session.archive(TALK[:2])
    session.archive([{"role": "assistant", "content": "a\n\ud83d"}])
    session.close()
    lines = (folder / f"{session.id}.archive.jsonl").read_bytes().decode().splitlines()
    assert [json.loads(line)["role"] for line in lines] == ["system", "user", "assistant"]
    assert json.loads(lines[1]) == TALK[1]


# -- a disk that refuses, a process that dies ----------------------------------------------------


def test_what_an_interrupted_save_left_behind_is_harmless(folder):
    path = stored(folder, OLD)
    left = folder / f"{OLD}.json.tmp"
    left.write_text('{"version": 1, "messages": [{"role": "sys')
    session, notes = open_session(path)
    session.save()
    session.close()
    assert (loaded(path)["messages"], notes) == (TALK, [])
    assert (left.exists(), len(list_sessions(folder)[0])) == (False, 1)


def test_a_temporary_file_of_others_does_not_open_the_session_to_them(folder):
    path = stored(folder, OLD)
    left = folder / f"{OLD}.json.tmp"
    left.touch()
    left.chmod(0o644)
    session, _ = open_session(path)
    session.save()
    session.close()
    assert mode(path) == "0o600"


class Synced(Session):
    """A session that remembers how it was saved."""

    saves: list[bool]

    def save(self, *, sync: bool = False) -> None:
        """As it is."""
        self.saves.append(sync)
        super().save(sync=sync)


def test_what_a_turn_left_is_brought_to_the_disk_at_its_end(folder, tmp_path):
    plain = new_session(folder, {}, NOW)
    session = Synced(plain.transcript, plain.header, folder)
    session.lock, session.saves = plain.lock, []
    script = [{"call": "list_files", "arguments": {}}, "one"]
    with FlakyServer(script) as server:
        made = new_agent(server.url, tmp_path, session)
        made.run("hi")
        made.close()
    assert (session.saves[-1], any(session.saves[:-1])) == (True, False)


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file can be written meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_lock_that_can_be_taken_but_not_written_is_held(folder):
    with full_disk():
        first = hold(folder / f"{OLD}.lock")
    assert (first is not None, hold(folder / f"{OLD}.lock")) == (True, None)
    os.close(first)


def test_a_save_that_is_killed_leaves_the_old_or_the_new_file(folder, child):
    path = stored(folder, OLD, [*TALK, *({"role": "user", "content": "x" * 1000},) * 1500])
    for lines in (1, 2, 3, 5, 8):
        process = child(SAVE_FOR_EVER, path)
        last = [process.stdout.readline() for _ in range(lines)][-1]
        process.kill()
        last = (process.communicate(timeout=60)[0] or last).split()[-1]
        session, notes = open_session(path)
        session.close()
        assert len(session.transcript.messages) - int(last) in (0, 1)
        assert notes == []


def test_a_full_disk_keeps_the_old_file_and_the_run_goes_on_with_one_notice(tmp_path, child):
    (tmp_path / "work").mkdir()
    with FlakyServer(["one", {"call": "list_files", "arguments": {}}, "two", "three"]) as server:
        output, _ = child(FULL_DISK, server.url, tmp_path / "work").communicate(timeout=60)
    assert json.loads(output) == ["done", "two", "three", True, True, 1]


@pytest.mark.parametrize("kind", ["a folder in place of the temporary file", "no folder any more"])
def test_a_disk_that_refuses_is_one_notice_and_the_run_goes_on(tmp_path, kind):
    notices: list[dict] = []
    script = ["one", {"call": "list_files", "arguments": {}}, "two", "three"]
    with FlakyServer(script) as server:
        made = new_agent(server.url, tmp_path, emit=collector(notices))
        made.run("hi")
        before = file_of(made).read_bytes()
        give_back = refuse_writes(file_of(made), kind)
        second = made.run("more")
        give_back()
        kept = file_of(made).read_bytes() == before
        assert (second.status, second.text, kept, len(notices)) == ("done", "two", True, 1)
        assert made.run("and now").text == "three"
        made.close()
    assert loaded(file_of(made))["messages"] == made.transcript.messages


def refuse_writes(path: Path, kind: str) -> Callable[[], object]:
    """Make each save of a session fail, for root too; returns what undoes it."""
    if kind.startswith("a folder"):
        blocker = path.with_name(path.name + ".tmp")
        blocker.mkdir()
        return blocker.rmdir
    aside = path.parent.rename(path.parent.with_name("aside"))
    path.parent.write_text("in the way")

    def give_back() -> None:
        path.parent.unlink()
        aside.rename(path.parent)

    return give_back


def test_a_save_that_fails_raises_and_leaves_the_old_file(folder):
    session, _ = open_session(stored(folder, OLD))
    path = folder / f"{OLD}.json"
    before = path.read_bytes()
    give_back = refuse_writes(path, "a folder")
    session.transcript.add_user("more")
    with pytest.raises(OSError):
        session.save()
    give_back()
    session.close()
    assert path.read_bytes() == before


def test_surrogates_never_break_a_save(folder):
    session = new_session(folder, {"title": "caf\udce9", "root": "/w\udcff"}, NOW)
    session.transcript = Transcript([*TALK, {"role": "user", "content": "\ud83d caf\udce9"}])
    session.save()
    session.close()
    again, _ = open_session(folder / f"{session.id}.json")
    again.close()
    assert len(again.transcript.messages) == 4
    assert (problems(again.transcript.messages), again.header["title"][:3]) == ([], "caf")


def test_a_prompt_of_bytes_that_are_no_text_is_sent_and_saved(tmp_path):
    with FlakyServer(["done"]) as server:
        made = new_agent(server.url, tmp_path)
        result = made.run("caf\udce9 \ud83d\ude00\0")
        made.close()
    assert (result.status, server.requests[0].problems) == ("done", [])
    assert loaded(file_of(made))["messages"][1]["content"] == "caf\ufffd \U0001f600\ufffd"


def test_a_file_with_escaped_surrogates_is_healed_on_load(folder):
    path = stored(folder, OLD, [*TALK, {"role": "user", "content": "\ud83d x"}])
    session, notes = open_session(path)
    session.close()
    assert session.transcript.messages[-1] == {"role": "user", "content": "\ufffd x"}
    assert (len(notes) > 0, read_session(path)[1]) == (True, session.transcript.messages)


def test_all_that_start_at_once_in_a_new_project_get_its_folder(tmp_path):
    for number in range(100):
        root = tmp_path / str(number)
        root.mkdir()
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(state_folder, [root] * 4)) == {root / ".agent"}
        assert set((root / ".agent/.gitignore").read_text().splitlines()) == {"*"}


# -- the backup of a damaged file ----------------------------------------------------------------

DAMAGED = [
    pytest.param(b"", id="empty"),
    pytest.param(b'{"version": 1, "messages": [\n{"role": "us', id="cut"),
    pytest.param(b'{"name": "foreign", "version": "1.0"}', id="foreign"),
    pytest.param(b"[1, 2]", id="foreign list"),
    pytest.param(NESTED.encode(), id="nested"),
]


@pytest.mark.parametrize("wanted", ["", OLD], ids=["newest", "by id"])
@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_session_goes_on_from_its_backup_and_is_kept(folder, data, wanted):
    path = stored(folder, OLD)
    path.rename(path.with_suffix(".bak"))
    path.write_bytes(data)
    session, [notice] = resume_session(folder, wanted)
    assert session is not None
    session.close()
    assert (session.id, session.transcript.messages, loaded(path)["messages"]) == (OLD, TALK, TALK)
    assert path.with_suffix(".damaged").read_bytes() == data
    assert path.name in notice and "backup" in notice and f"{OLD}.damaged" in notice


def test_a_backup_is_not_replaced_by_the_damaged_file_while_the_disk_refuses(folder):
    path = stored(folder, OLD)
    shutil.copy(path, path.with_suffix(".bak"))
    path.write_bytes(b"")
    give_back = refuse_writes(path, "a folder")
    session, notices = open_session(path)
    session.keep_backup()
    give_back()
    session.close()
    assert (len(notices), loaded(path.with_suffix(".bak"))["messages"]) == (2, TALK)
    assert path.with_suffix(".damaged").read_bytes() == b""


def test_a_second_damaged_file_does_not_take_the_place_of_the_first(folder):
    path = stored(folder, OLD)
    shutil.copy(path, path.with_suffix(".bak"))
    for data in (b"one", b"two"):
        path.write_bytes(data)
        open_session(path)[0].close()
    kept = [path.with_suffix(end).read_bytes() for end in (".damaged", ".damaged2")]
    assert kept == [b"one", b"two"]


def test_a_damaged_file_that_is_kept_already_is_not_kept_once_more(folder):
    path = stored(folder, OLD)
    path.rename(path.with_suffix(".bak"))
    path.write_text("{")
    with full_disk():
        open_session(path)[0].close()
    session, _ = open_session(path)
    session.close()
    assert [file.name for file in folder.glob("*.damaged*")] == [f"{OLD}.damaged"]
    assert (loaded(path)["messages"], path.with_suffix(".damaged").read_text()) == (TALK, "{")


def test_a_copy_of_a_damaged_session_is_made_from_its_backup_and_touches_nothing(folder):
    path = stored(folder, OLD)
    shutil.copy(path, path.with_suffix(".bak"))
    path.write_bytes(b"")
    fork = forked(folder)
    fork.close()
    assert (fork.transcript.messages, path.read_bytes()) == (TALK, b"")
    assert not path.with_suffix(".damaged").exists()


@pytest.mark.parametrize("cut", [None, 24], ids=["whole", "cut"])
def test_a_newer_version_is_not_replaced_by_its_backup(folder, cut):
    path = stored(folder, OLD)
    shutil.copy(path, path.with_suffix(".bak"))
    data = b'{"version": 2, "messages": {"shape": "unknown"}}'[:cut]
    path.write_bytes(data)
    with pytest.raises(SessionError, match="newer version"):
        open_session(path)
    assert path.read_bytes() == data


def test_when_the_backup_is_bad_too_both_are_named(folder):
    path = stored(folder, OLD)
    path.write_bytes(b"")
    path.with_suffix(".bak").write_bytes(b"{}")
    with pytest.raises(SessionError, match=rf"{OLD}.json .*{OLD}.bak "):
        open_session(path)
    assert path.read_bytes() == b""


# -- long lists, long sessions -------------------------------------------------------------------


@pytest.mark.parametrize(
    "spoil, note, count",
    [
        pytest.param(lambda data: data, "", 3, id="sound"),
        pytest.param(lambda data: json.dumps(json.loads(data), indent=1).encode(), "", 3, id="jq"),
        pytest.param(lambda data: data[:-4], "damaged", 3, id="cut"),
        pytest.param(lambda data: data.replace(b"hello", b"\0" * 5), "damaged", 3, id="torn"),
    ],
)
def test_the_list_counts_the_messages_and_sees_damage(folder, spoil, note, count):
    session, _ = open_session(stored(folder, OLD))
    session.save()
    session.keep_backup()
    session.save()
    session.close()
    path = folder / f"{OLD}.json"
    path.write_bytes(spoil(path.read_bytes()))
    [entry], notices = list_sessions(folder)
    assert (entry.messages, entry.note.split(";")[0], notices) == (count, note, [])


def test_an_answer_in_the_middle_is_all_that_is_encoded_again():
    transcript = Transcript(TALK)
    calls = [{"id": f"c{n}", "function": {"name": "x", "arguments": "{}"}} for n in range(9)]
    transcript.add_reply({"role": "assistant", "content": None, "tool_calls": calls})
    before = list(transcript.encodings())
    transcript.answer("c3", "done")
    after = list(transcript.encodings())
    assert [at for at in range(len(after)) if after[at] is not before[at]] == [7]
    transcript.replace([SYSTEM, {"role": "user", "content": "note"}, *transcript.messages[3:]])
    assert all(a is b for a, b in zip(transcript.encodings()[2:], after[3:], strict=True))


# -- locks and files of sessions that are gone ---------------------------------------------------


def test_a_lock_whose_file_is_removed_meanwhile_is_taken_anew(folder, child):
    script = "import sys, agent, pathlib; print(agent.hold(pathlib.Path(sys.argv[1])), flush=True)"
    path = folder / f"{OLD}.lock"
    first = hold(path)
    path.unlink()
    second = hold(path)
    assert first is not None and second is not None
    assert child(script, path).communicate(timeout=60)[0] == "None\n"
    os.close(first)
    os.close(second)


def test_a_session_that_could_not_be_opened_is_not_held(folder):
    path = folder / f"{OLD}.json"
    path.write_text("{")
    with pytest.raises(SessionError):
        open_session(path)
    free = hold(path.with_suffix(".lock"))
    assert free is not None
    os.close(free)


def test_a_session_whose_folder_was_removed_is_held_again_with_the_next_save(folder):
    session, _ = open_session(stored(folder, OLD))
    shutil.rmtree(folder.parent)
    session.save()
    assert hold(folder / f"{OLD}.lock") is None
    session.close()


def test_the_session_that_one_is_in_is_no_other_one(folder):
    stored(folder, OLD)
    stored(folder, NEW)
    other, _ = resume_session(folder, "", beside=NEW)
    assert other is not None and other.id == OLD
    other.close()
    with pytest.raises(SessionError, match="that you are in"):
        resume_session(folder, NEW, beside=NEW)


def old_session(folder: Path, ident: str, days: float, size: int = 1000) -> list[Path]:
    """All that belongs to a session that was used last some days before NOW."""
    path = stored(folder, ident)
    files = [path, *(path.with_suffix(end) for end in (".bak", ".damaged", ".archive.jsonl"))]
    for part in ("undo", "output"):
        inner = folder.parent / part / ident
        inner.mkdir(parents=True)
        files.append(inner / "x")
    for file in files[1:]:
        file.write_bytes(b"x" * size)
    os.utime(path, (NOW - days * 86400,) * 2)
    return files


def test_the_oldest_sessions_go_with_all_that_is_theirs_until_the_rest_is_small_enough(folder):
    oldest, older, fresh = (
        old_session(folder, ident, days) for ident, days in ((NEW, 50), (OLD, 40), (MIDDLE, 29))
    )
    line = prune_sessions(folder, NOW, most=13_000)
    there = [all(map(Path.exists, files)) for files in (oldest, older, fresh)]
    assert there == [False, True, True] and not any(map(Path.exists, oldest))
    assert "1 session" in line and "\n" not in line
    assert prune_sessions(folder, NOW, most=13_000) == ""
    prune_sessions(folder, NOW, most=0)
    assert [any(map(Path.exists, files)) for files in (oldest, older, fresh)] == [
        False,
        False,
        True,
    ]


def test_what_is_open_kept_or_behind_a_link_is_not_pruned(folder, child, tmp_path):
    held, kept = old_session(folder, OLD, 50), old_session(folder, NEW, 50)
    assert child(HOLD, held[0]).stdout.readline() == "held\n"
    os.utime(held[0], (NOW - 50 * 86400,) * 2)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    (folder.parent / "undo" / MIDDLE).symlink_to(tmp_path / "precious")
    assert prune_sessions(folder, NOW, keep=NEW, most=0) == ""
    assert all(map(Path.exists, [*held, *kept, tmp_path / "precious" / "file"]))


def test_only_one_process_prunes_at_a_time(folder):
    old_session(folder, OLD, 40)
    other = os.open(folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert (prune_sessions(folder, NOW, most=0), [p.stem for p in folder.glob("*.json")]) == (
        "",
        [OLD],
    )
    os.close(other)
    assert prune_sessions(folder, NOW, most=0) != ""


def test_a_session_that_was_used_meanwhile_is_not_pruned(folder):
    [path, *rest] = old_session(folder, OLD, 50)
    own = agent.session_parts(folder.parent)[OLD]
    assert remove_session(folder, own, OLD, path.stat().st_mtime - 1) is False
    assert all(map(Path.exists, [path, *rest]))


def test_folders_of_sessions_that_are_gone_are_pruned_too(folder):
    files = old_session(folder, OLD, 50)
    for file in files[:4]:
        file.unlink()
    for file in files[4:]:
        os.utime(file.parent, (NOW - 50 * 86400,) * 2)
    assert prune_sessions(folder, NOW, most=0) != ""
    assert not any(file.parent.exists() for file in files[4:])


def test_half_a_save_is_gone_after_the_next_start_but_not_that_of_an_open_session(folder):
    session, _ = open_session(stored(folder, OLD))
    left = [folder / f"{ident}.json.tmp" for ident in (OLD, NEW)]
    for path in left:
        path.write_text("{")
    assert prune_sessions(folder, NOW) == ""
    assert [path.exists() for path in left] == [True, False]
    session.close()


def test_a_copy_ends_before_the_last_turns_and_has_the_archive(folder):
    more = [*TALK, {"role": "user", "content": "more"}, {"role": "assistant", "content": "done"}]
    path = stored(folder, OLD, more, turns=[1, 3], archived=16)
    path.with_suffix(".archive.jsonl").write_bytes(b'{"role":"user"}\ncut off')
    fork, _ = fork_session(path, 1)
    fork.save()
    fork.close()
    assert (fork.transcript.messages, fork.header["turns"]) == (TALK, [1])
    assert (folder / f"{fork.id}.archive.jsonl").read_bytes() == b'{"role":"user"}\n'
    with pytest.raises(SessionError, match="2 turns"):
        fork_session(path, 3)
    with pytest.raises(SessionError, match="compacted"):
        fork_session(stored(folder, NEW, more, turns=[1, 2]), 1)


def test_a_fork_is_offered_only_where_no_session_is_free_for_being_open(folder):
    session, _ = open_session(stored(folder, NEW))
    (folder / f"{OLD}.json").write_text("{")
    nothing, notices = resume_session(folder, "")
    session.close()
    assert (nothing, len(notices), any("no session is free" in n for n in notices)) == (
        None,
        2,
        False,
    )


def test_a_lock_that_can_not_be_taken_again_is_not_let_go_of_twice(folder):
    session, _ = open_session(stored(folder, OLD))
    shutil.rmtree(folder)
    session.header["id"] = "x" * 300  # no disk has room for that name
    with pytest.raises(SessionError, match="can not lock"):
        session.save()
    assert session.lock is None


def test_a_session_in_a_folder_above_is_named(tmp_path, folder):
    stored(folder, OLD)
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    with FlakyServer(["done"]) as server:
        listed = run_agent(server.url, inner, "--sessions")
        by_id = run_agent(server.url, inner, f"--resume={OLD}", "hi")
        told = run_agent(server.url, inner, "--resume", "hi")
    assert f"agent -C {tmp_path} --resume" in told
    assert str(tmp_path) in listed and str(tmp_path) in by_id
    assert len(server.requests) == 1


def test_a_session_above_that_others_could_have_put_there_is_not_named(tmp_path, folder):
    stored(folder, OLD)
    assert sessions_above(tmp_path / "a") != ""
    folder.parent.chmod(0o777)
    assert sessions_above(tmp_path / "a") == ""


def test_the_model_is_told_once_that_the_project_moved(tmp_path, folder):
    session, _ = open_session(stored(folder, OLD, root="/old/place"))
    with FlakyServer(["one", "two"]) as server:
        made = new_agent(server.url, tmp_path, session)
        made.run("go on")
        made.run("and now")
        made.close()
    told = [
        message["content"]
        for message in server.requests[1]["messages"]
        if message["role"] == "user"
    ]
    assert ["/old/place" in text and str(tmp_path) in text for text in told] == [False, True, False]
