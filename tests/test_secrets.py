"""Secrets of the user: withheld from commands, masked in text, real on the disk; our own files.

The values below are made up. `KEY` is the agent's own key, `TOKEN` a credential in the user's
environment. What is shown, sent and kept must hold `[masked]` where they stood.
"""

import json
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, results, session_files

from agent import Secrets, Settings, build_agent
from flaky_server import FlakyServer

MASK = "[masked]"
KEY = "sk-own-" + "4f9a8b7c" * 3
TOKEN = "ghp_" + "a1B2c3D4e5" * 4
YES: dict[str, Any] = {"mode": "auto", "unattended": True}


@dataclass
class Deeds:
    """One prompt to its end: how it ended, the results of the calls, what was sent and reported."""

    result: Any
    results: list[str]
    requests: list[Any]
    events: list[tuple[str, dict[str, Any]]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        return [fields for name, fields in self.events if name == kind]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A call of a tool."""
    return {"name": name, "arguments": arguments}


def bash(command: str) -> dict[str, Any]:
    """A call that runs a command."""
    return call("bash", command=command)


def act(root: Path, *steps: Any, environ: Any = None, emit: Any = None, **more: Any) -> Deeds:
    """Let the real agent, with nobody there, make calls in one reply, or play these steps."""
    events: list[tuple[str, dict[str, Any]]] = []

    def report(kind: str, **fields: Any) -> None:
        events.append((kind, fields))
        if emit is not None:
            emit(kind, **fields)

    calls = bool(steps) and isinstance(steps[0], dict) and "name" in steps[0]
    script = [{"calls": list(steps)}, "done"] if calls else list(steps)
    base = {"PATH": os.environ["PATH"], "HOME": str(root.parent), "LANG": "C.UTF-8"}
    base |= {"AGENT_API_KEY": KEY, "GITHUB_TOKEN": TOKEN}
    with FlakyServer(script) as server:
        known = {"base_url": server.url, "api_key": KEY, "model": "m", "sandbox": "off", **YES}
        known |= {"workspace": str(root), "environ": base | (environ or {}), **more}
        agent = build_agent(Settings(**known), emit=report, sleep=lambda seconds: None)
        try:
            result = agent.run("go")
        finally:
            agent.close()
    assert [problem for request in server.requests for problem in request.problems] == []
    sent = results(server.requests[-1]) if server.requests else []
    return Deeds(result, sent, server.requests, events)


def kept(root: Path) -> str:
    """All text of the agent's own files but the before-images and the outputs."""
    files = [path for path in (root / ".agent").rglob("*") if path.is_file()]
    apart = (root / ".agent/undo", root / ".agent/output")
    texts = [path.read_text() for path in files if not set(apart) & set(path.parents)]
    return "\n".join(texts)


# -- what commands see ---------------------------------------------------------------------------

WITHHELD = {
    "AGENT_API_KEY": KEY,
    "OPENAI_API_KEY": "sk-proj-" + "Ab12" * 8,
    "GEMINI_API_KEY": "a1",
    "GITHUB_TOKEN": TOKEN,
    "NPM_TOKEN": "npm_" + "x1Y2" * 9,
    "AWS_SECRET_ACCESS_KEY": "wJalr/K7MDENG+" + "bPx1" * 6,
    "DB_PASSWORD": "correct horse",
    "STRIPE_SECRET_KEY": "sk_live_" + "9a8B" * 6,
    "client_secret": "q1w2e3r4t5y6u7i8",
    "OPENAI_API_KEY_2": "a2",
    "GH_TOKEN_READ": "a3",
    "DOCKER_AUTH_CONFIG": "{}",
    "MAIL_PASSWORDS": "a4",
    "HOOK": "https://hooks.slack.com/services/T0/B0/x",
    "OTHER": "gsk_" + "a1B2" * 10,
    "HEADER": "Bearer abcdefghijklmnop",
    "NEUTRAL": "ghp_" + "Z9y8X7w6V5" * 4,  # by its value
    "PLAIN": "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1r\n-----END OPENSSH PRIVATE KEY-----",
}
VISIBLE = {
    "LANG": "C.UTF-8",
    "VIRTUAL_ENV": "/opt/venv",
    "JAVA_HOME": "/usr/lib/jvm/java-17-openjdk-amd64",
    "GOPATH": "/opt/go",
    "CARGO_HOME": "/opt/cargo",
    "NODE_ENV": "test",
    "TZ": "Europe/Berlin",
    "TOKENIZERS_PARALLELISM": "false",
    "MAX_TOKENS": "4096",
    "SKIP_AUTH": "1",
    "MONKEY": "banana",
    "AUTHOR": "me",
    "KEYMAP": "us",
    "BUILD_ID": "a3f5c2d19b7e4860a3f5c2d19b7e4860",
}


def seen_by_commands(root: Path, **more: Any) -> dict[str, str]:
    """The environment of a command, from the disk: there nothing is masked."""
    act(root, bash("env -0 > seen"), environ=WITHHELD | VISIBLE, **more)
    rows = (root / "seen").read_text().rstrip("\0").split("\0")
    return dict(row.split("=", 1) for row in rows)


def test_commands_see_the_users_variables_without_the_credentials(workspace: Path) -> None:
    seen = seen_by_commands(workspace)
    assert {name: seen.get(name) for name in VISIBLE} == VISIBLE
    assert [name for name in WITHHELD if name in seen] == []
    assert [value for value in WITHHELD.values() if value in seen.values()] == []
    assert (seen["PATH"], seen["HOME"]) == (os.environ["PATH"], str(workspace.parent))


def test_env_keep_names_what_commands_may_see(workspace: Path) -> None:
    seen = seen_by_commands(workspace, env_keep=("GITHUB_TOKEN", "DB_PASSWORD"))
    names = [name for name in WITHHELD if name in seen]
    assert names == ["GITHUB_TOKEN", "DB_PASSWORD"]
    assert (seen["GITHUB_TOKEN"], seen["DB_PASSWORD"]) == (TOKEN, "correct horse")


def test_the_process_above_a_command_has_no_credential_either(workspace: Path) -> None:
    peek = "import os, shutil\nshutil.copy(f'/proc/{os.getppid()}/environ', 'seen')\n"
    (workspace / "peek.py").write_text(peek)
    done = act(workspace, bash(f"{sys.executable} -S peek.py && true"))
    assert done.results == ["(no output)\n[exit code 0]"]
    seen = (workspace / "seen").read_bytes()
    assert b"PATH=" in seen
    assert [value for value in (KEY, TOKEN) if value.encode() in seen] == []


# -- what is masked ------------------------------------------------------------------------------

NOTES = f"key: {KEY}\ntoken: {TOKEN}\nplain: visible\n"


def test_nothing_that_is_shown_sent_or_kept_holds_a_secret_and_the_disk_holds_the_real_bytes(
    run_agent: Callable[..., Any], workspace: Path
) -> None:
    for name in ("notes.txt", "old.txt"):
        (workspace / name).write_text(NOTES)
    calls = [
        call("read_file", path="notes.txt"),
        call("grep", regex="key:|token:", path="notes.txt"),
        bash("cat notes.txt"),
        bash("cat notes.txt >&2; exit 3"),
        bash(f"echo {TOKEN} > from-command; cat no-{KEY}"),
        call("write_file", path="new.txt", content=f"a {KEY}\nb {TOKEN}\n"),
        call("edit_file", path="old.txt", old="plain: visible", new=f"again: {KEY}"),
        call("read_file", path=f"no-{KEY}"),
    ]
    first = {"text": f"I found {KEY}", "reasoning": f"the token is {TOKEN}", "calls": calls}
    with FlakyServer([first, f"it was {KEY} and {TOKEN}"], key=KEY) as server:
        env = {"AGENT_API_KEY": KEY, "GITHUB_TOKEN": TOKEN}
        done = run_agent("--json", "--yes", "--sandbox", "off", "hi", server=server, env=env)
    told = results(server.requests[1])
    assert (done.returncode, len(told)) == (0, len(calls))
    places = {
        "stdout": done.stdout,
        "stderr": done.stderr,
        "sent": json.dumps(server.requests[1]["messages"]),
        "kept": kept(workspace),
    }
    assert [n for n, text in places.items() if KEY in text or TOKEN in text] == []
    assert [text.count(MASK) for text in told[:4]] == [2, 2, 2, 2]
    assert "plain: visible" in told[0] and f"key: {MASK}" in told[0]
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[-1]["text"] == f"it was {MASK} and {MASK}"
    assert MASK in "".join(event["text"] for event in events if event["type"] == "tool_output")
    assert MASK in (workspace / ".agent/audit.jsonl").read_text()
    assert (workspace / "new.txt").read_text() == f"a {KEY}\nb {TOKEN}\n"
    assert (workspace / "old.txt").read_text() == NOTES.replace("plain: visible", f"again: {KEY}")
    assert (workspace / "from-command").read_text() == f"{TOKEN}\n"
    images = [
        path.read_bytes() for path in (workspace / ".agent/undo").rglob("*") if path.is_file()
    ]
    assert NOTES.encode() in images


def test_only_long_values_with_letters_and_digits_are_masked(workspace: Path) -> None:
    values = {
        "A_TOKEN": "abc123def456ghi",  # 15 characters
        "B_PASSWORD": "correcthorsebatterystaple",  # letters
        "C_SECRET": "12345678901234567890",  # digits
        "D_TOKEN": "abc123def456ghi7",
    }
    environ = {"E_SECRET": "first line\nsecond0123456789abcd\n"}
    lines = "".join(f"{name} is {value}\n" for name, value in values.items())
    (workspace / "notes.txt").write_text(lines + "path /usr/lib/jvm/java-17-openjdk-amd64\n")
    environ |= values | {"JAVA_HOME": "/usr/lib/jvm/java-17-openjdk-amd64"}
    command = (
        "cat notes.txt; echo +second0123456789abcd; env | grep -cE 'TOKEN|PASSW|SECRET' || true"
    )
    done = act(workspace, bash(command), environ=environ)
    expected = lines.replace(values["D_TOKEN"], MASK) + "path /usr/lib/jvm/java-17-openjdk-amd64\n"
    assert done.results == [f"{expected}+{MASK}\n0\n[exit code 0]"]


def test_a_write_that_holds_the_mark_is_refused_and_says_why(workspace: Path) -> None:
    (workspace / "old.txt").write_text("a\n")
    calls = [
        call("write_file", path="new.txt", content=f"key = {MASK}\n"),
        call("read_file", path="old.txt"),
        call("edit_file", path="old.txt", old="a", new=f"b {MASK}"),
        call("write_file", path="fine.txt", content="masked [mask] [Masked]\n"),
        call("edit_file", path="old.txt", old="a", new="c"),
    ]
    done = act(workspace, *calls)
    refused = [done.results[0], done.results[2]]
    assert [text.startswith(("denied: ", "error: ")) and MASK in text for text in refused] == [
        True,
        True,
    ]
    assert not (workspace / "new.txt").exists()
    assert (workspace / "fine.txt").read_text() == "masked [mask] [Masked]\n"
    assert (workspace / "old.txt").read_text() == "c\n"


def streamed(*deltas: str) -> dict[str, Any]:
    """A reply whose text comes in exactly these deltas."""
    parts = [{"delta": {"content": text}, "finish_reason": None} for text in deltas]
    parts.append({"delta": {}, "finish_reason": "stop"})
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    events = [json.dumps({**head, "choices": [{"index": 0, **part}]}) for part in parts]
    raw = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
    return {"raw": raw, "headers": {"Content-Type": "text/event-stream"}}


@pytest.mark.parametrize("size", [1, 3, 20])
def test_a_key_that_comes_in_pieces_is_masked_and_all_else_is_shown(
    workspace: Path, size: int
) -> None:
    said = f"see {KEY}: and sk-own-4f9 and {TOKEN}"
    done = act(workspace, streamed(*(said[at : at + size] for at in range(0, len(said), size))))
    expected = f"see {MASK}: and sk-own-4f9 and {MASK}"
    shown = [fields["text"] for fields in done.of("text")]
    assert ("".join(shown), done.result.text) == (expected, expected)
    assert [text for text in shown if "4f9a8b" in text or "a1B2c3" in text] == []


def test_a_key_is_masked_though_a_notice_comes_amid() -> None:
    told: list[str] = []
    emit = Secrets([KEY]).events(lambda kind, **data: told.append(data["text"]))
    for kind, text in (("text", KEY[:9]), ("notice", "n"), ("text", KEY[9:]), ("usage", "u")):
        emit(kind, text=text)
    assert told == ["n", MASK, "u"]


def test_output_that_is_cut_inside_a_key_is_masked_too(workspace: Path) -> None:
    head, tail = KEY[:12], KEY[12:]
    script = f"echo begin; printf '%s' {head}; until [ -e go ]; do sleep 0.01; done; echo {tail}"

    def emit(kind: str, **fields: Any) -> None:
        if kind == "tool_output" and "begin" in fields["text"]:
            (workspace / "go").touch()

    done = act(workspace, bash(script), emit=emit)
    shown = "".join(fields["text"] for fields in done.of("tool_output"))
    assert (shown, done.results) == (f"begin\n{MASK}\n", [f"begin\n{MASK}\n[exit code 0]"])


REFUSALS = [
    pytest.param([{"status": 400}], 1, id="refused"),
    pytest.param([{"status": 401}], 41, id="key refused"),
    pytest.param([{"status": 503, "headers": {"Retry-After": "0"}}, "ok"], 0, id="retried"),
]


@pytest.mark.parametrize(("steps", "exit_code"), REFUSALS)
def test_an_error_of_the_provider_that_echoes_the_key_is_masked(
    workspace: Path, steps: list[Any], exit_code: int
) -> None:
    body = {"error": {"message": f"Incorrect key {KEY} or {TOKEN}", "type": "x", "code": None}}
    done = act(workspace, {**steps[0], "body": body}, *steps[1:])
    told = json.dumps([done.events, done.result.text]) + kept(workspace)
    assert (KEY in told, TOKEN in told, MASK in told) == (False, False, True)
    assert done.result.exit_code == exit_code


def test_a_crash_file_and_its_message_are_masked(
    run_agent: Callable[..., Any], workspace: Path, tmp_path: Path
) -> None:
    fault = (
        "import os\nraise RuntimeError('boom ' + os.environ['OPENAI_API_KEY'] + os.environ['T'])\n"
    )
    (tmp_path / "trap/requests").mkdir(parents=True)
    (tmp_path / "trap/requests/__init__.py").write_text(fault.replace("'T'", "'GITHUB_TOKEN'"))
    env = {"PYTHONPATH": f"{tmp_path / 'trap'}{os.pathsep}{ROOT}", "GITHUB_TOKEN": TOKEN}
    keys = {"AGENT_API_KEY": None, "OPENAI_API_KEY": KEY, "AGENT_BASE_URL": "http://127.0.0.1:9/v1"}
    done = run_agent("--json", "hi", env=env | keys)
    (crash,) = (workspace / ".agent").glob("crash-*.txt")
    texts = [done.stdout + done.stderr, crash.read_text()]
    assert [("boom" in text, KEY in text, TOKEN in text) for text in texts] == [
        (True, False, False)
    ] * 2
    assert (f"boom {MASK}{MASK}" in texts[1], done.returncode) == (True, 1)
    assert stat.S_IMODE(crash.stat().st_mode) == 0o600


def test_in_text_format_the_answer_is_masked_and_output_can_not_steer_the_terminal(
    run_agent: Callable[..., Any], workspace: Path
) -> None:
    (workspace / "notes.txt").write_text(f"{KEY} \x1b]0;title\x07 \x1b[8mhidden\n")
    (workspace / "ok\x1b[2K\rsafe.txt").write_text("x\n")
    calls = [
        bash("printf '\\033]52;c;QQ==\\a\\033[2J\\033[8mshown\\033P1$q\\033\\\\\\n'"),
        call("read_file", path="notes.txt"),
        call("list_files"),
        bash("printf 'failed \\033]8;;http://h/\\a \\302\\2332K\\n'; exit 1"),
        call("read_file", path="no\x1b]52;c;QQ==\x07such"),
    ]
    with FlakyServer([{"calls": calls}, f"the key is {KEY}"], key=KEY) as server:
        env = {"AGENT_API_KEY": KEY}
        done = run_agent("--yes", "--sandbox", "off", "hi", server=server, env=env)
    assert (done.returncode, done.stdout) == (0, f"the key is {MASK}\n")
    assert [char for char in "\x1b\x07\x9b\x90" if char in done.stderr] == []
    assert KEY not in done.stderr
    assert results(server.requests[1])[0] == "shown\n[exit code 0]"


@pytest.mark.long
def test_under_a_terminal_output_can_not_steer_it(
    terminal: Callable[..., Any], workspace: Path
) -> None:
    commands = ["printf '\\033]52;c;QQ==\\a'; exit 1", "printf '\\033[8mhidden\\n'; exit 1"]
    with FlakyServer([{"calls": [bash(text) for text in commands]}, "the end"]) as server:
        screen = terminal("--yes", "--sandbox", "off", "go", server=server)
        screen.expect("the end")
        assert screen.wait() == 0
    assert ("\x1b]52" in screen.output, "\x1b[8m" in screen.output) == (False, False)


# -- our own files -------------------------------------------------------------------------------


def test_our_files_are_for_the_user_alone_whatever_the_umask(
    start_agent: Callable[..., Any], workspace: Path
) -> None:
    (workspace / "f").write_text("old\n")
    calls = [
        call("read_file", path="f"),
        call("edit_file", path="f", old="old", new="new"),
        bash("seq 1 20000"),
    ]
    with FlakyServer([{"calls": calls}, "done"]) as server:
        flags = ("--yes", "--sandbox", "off")
        started = start_agent(*flags, "hi", server=server, umask=0)
        out, _ = started.communicate(timeout=60)
    state = workspace / ".agent"
    modes = {
        str(path.relative_to(state)): stat.S_IMODE(path.lstat().st_mode)
        for path in state.rglob("*")
    }
    assert (started.returncode, out, stat.S_IMODE(state.stat().st_mode)) == (0, "done\n", 0o700)
    assert {"audit.jsonl", "sessions", "undo", "output"} <= {name.split("/")[0] for name in modes}
    odd = {name: oct(mode) for name, mode in modes.items() if mode & 0o077}
    assert odd == {}


def linked(root: Path) -> None:
    """`.agent` leads elsewhere."""
    (root.parent / "elsewhere").mkdir()
    (root / ".agent").symlink_to("../elsewhere")


def opened(root: Path) -> None:
    """Everybody may write into `.agent`."""
    (root / ".agent").mkdir()
    (root / ".agent").chmod(0o777)


def contents(root: Path) -> list[str]:
    """The names of all files in the state folder and in where it may lead."""
    folders = (root / ".agent/", root.parent / "elsewhere")
    return [path.name for folder in folders for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("build", [linked, opened])
def test_a_state_folder_that_may_be_somebody_elses_is_not_used_and_named_once(
    workspace: Path, build: Callable[[Path], None]
) -> None:
    build(workspace)
    done = act(workspace, call("write_file", path="f", content="x\n"), bash("seq 1 20000"))
    notices = [fields["text"] for fields in done.of("notice") if ".agent" in fields["text"]]
    assert (done.result.exit_code, done.result.text, len(notices)) == (0, "done", 1)
    assert (done.of("init")[0]["session_id"], done.result.session_id) == ("", "")
    assert ((workspace / "f").read_text(), contents(workspace)) == ("x\n", [])


def test_nothing_is_kept_through_a_link_in_the_state_folder(workspace: Path) -> None:
    linked_folders = ("sessions", "undo", "output")
    (workspace / ".agent").mkdir(mode=0o700)
    (workspace.parent / "elsewhere").mkdir()
    for name in linked_folders:
        (workspace / ".agent" / name).symlink_to("../../elsewhere")
    done = act(workspace, call("write_file", path="f", content="x\n"), bash("seq 1 20000"))
    assert (done.result.exit_code, done.result.text) == (0, "done")
    assert list((workspace.parent / "elsewhere").iterdir()) == []


def test_a_state_folder_of_an_earlier_version_is_used(workspace: Path) -> None:
    (workspace / ".agent").mkdir(mode=0o755)
    done = act(workspace, call("write_file", path="f", content="x\n"))
    assert [text for fields in done.of("notice") if ".agent" in (text := fields["text"])] == []
    assert [path.stem for path in session_files(workspace)] == [done.result.session_id]


@pytest.mark.long
@pytest.mark.parametrize("build", [linked, opened])
def test_the_program_goes_on_without_its_state_folder(
    run_agent: Callable[..., Any], workspace: Path, build: Callable[[Path], None]
) -> None:
    build(workspace)
    with FlakyServer(["hello"]) as server:
        done = run_agent("hi", server=server)
    named = [line for line in done.stderr.splitlines() if ".agent" in line]
    assert (done.returncode, done.stdout, len(named)) == (0, "hello\n", 1)
    assert contents(workspace) == []


# -- text that nobody sees -----------------------------------------------------------------------

TAGS = "".join(chr(0xE0000 + ord(char)) for char in "create")
UNSEEN = {
    "tags": TAGS,
    "zero width space": "\u200b",
    "right to left": "\u202e",
    "isolate": "\u2066",
    "word joiner": "\u2060",
    "filler": "\u3164",
    "letter mark": "\u061c",
}  # fmt: skip


@pytest.mark.parametrize("hidden", UNSEEN.values(), ids=UNSEEN)
def test_invisible_characters_in_the_notes_are_escaped_and_reported(
    workspace: Path, hidden: str
) -> None:
    text = f"# Nötes 漢字 👍\nUse tabs.{hidden}\n"
    (workspace / "AGENTS.md").write_text(text)
    done = act(workspace, call("list_files"))
    system = done.requests[0]["messages"][0]["content"]
    assert ("# Nötes 漢字 👍" in system, hidden[0] in system) == (True, False)
    assert f"{ord(hidden[0]):x}" in system.lower()
    notices = [fields["text"] for fields in done.of("notice") if "AGENTS.md" in fields["text"]]
    assert len(notices) == 1 and "invisible" in notices[0]
    assert (workspace / "AGENTS.md").read_text() == text


@pytest.mark.parametrize("hidden", UNSEEN.values(), ids=UNSEEN)
def test_invisible_characters_in_output_are_escaped_and_reported(
    workspace: Path, hidden: str
) -> None:
    (workspace / "f").write_text(f"é 漢字 👍{hidden}\n")
    done = act(workspace, bash("cat f"))
    (told,) = done.results
    assert ("é 漢字 👍" in told, hidden[0] in told) == (True, False)
    assert f"{ord(hidden[0]):x}" in told.lower()
    reported = told + "".join(fields["text"] for fields in done.of("notice"))
    assert "invisible" in reported


def test_ordinary_text_in_notes_and_output_is_not_reported(workspace: Path) -> None:
    text = "# Nötes — “漢字” 👍 مرحبا\n\tUse tabs.\n"
    (workspace / "AGENTS.md").write_text(text)
    done = act(workspace, bash("cat AGENTS.md"))
    assert text.strip() in done.requests[0]["messages"][0]["content"]
    assert done.results == [f"{text}[exit code 0]"]
    assert "invisible" not in json.dumps(done.of("notice"))
