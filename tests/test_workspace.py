"""Section 5, the workspace: paths that stay inside, changes that keep every other byte, commands.

Every file is real and lies in `tmp_path / "ws"`; `tmp_path / "out"` is what must not be reached.
"""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agent import (
    KEY_NAMES,
    PROVIDERS,
    Capture,
    Change,
    OutsideError,
    Secrets,
    Settings,
    ToolError,
    Workspace,
    build_agent,
    codec_of,
    command_environment,
    is_binary,
    protected_row,
    secret_name,
    trusted_program,
)

ROOT = Path(__file__).resolve().parent.parent
quick = settings(max_examples=40, deadline=None, database=None)
thorough = settings(max_examples=3000, deadline=None, database=None)
ENVIRON = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    """A workspace with a home inside it, beside a folder that is outside."""
    (tmp_path / "ws").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret").write_text("secret")
    made = Workspace(tmp_path / "ws", {**ENVIRON, "HOME": str(tmp_path / "out")})
    yield made
    made.host.close()


def until(condition: Callable[[], object], seconds: float = 20.0) -> object:
    """Wait until the condition holds and return what it says."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.01)
    return value


# -- paths


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.txt", "a.txt"),
        ("./sub/../a.txt", "a.txt"),
        ("new/deep/file", "new/deep/file"),
        (".", "."),
        ("inside", "a.txt"),
        ("folder/b.txt", "sub/b.txt"),
        ("..a", "..a"),
        ("a b\n.txt", "a b\n.txt"),
    ],
)
def test_a_path_inside_is_resolved(workspace: Workspace, text: str, expected: str) -> None:
    root = workspace.root
    (root / "sub").mkdir()
    (root / "a.txt").touch()
    (root / "inside").symlink_to("a.txt")
    (root / "folder").symlink_to(root / "sub")
    assert workspace.safe_path(text) == root / expected
    assert workspace.safe_path(str(root / text)) == root / expected


@pytest.mark.parametrize(
    "text",
    [
        "..",
        "../out/secret",
        "../ws-evil/s",
        "{tmp}/ws-evil/s",
        "{tmp}/out/secret",
        "sub/../../out/secret",
        "/etc/passwd",
        "/",
        "/proc/self/environ",
        "/proc/self/root/etc/passwd",
        "/dev/fd/0",
        "~",
        "~/secret",
        "a\0b",
        "",
        "link",
        "folder/secret",
        "folder/new",
        "hop",
        "loop/x",
        "x" * 5000,
    ],
)
def test_a_path_that_leads_out_or_nowhere_is_refused(workspace: Workspace, text: str) -> None:
    root, tmp = workspace.root, workspace.root.parent
    (tmp / "ws-evil").mkdir()
    (tmp / "ws-evil" / "s").write_text("secret")
    (root / "link").symlink_to(tmp / "out" / "secret")
    (root / "folder").symlink_to(tmp / "out")
    (root / "hop").symlink_to("link")
    (root / "loop").symlink_to("loop")
    with pytest.raises(ToolError):
        workspace.read(workspace.safe_path(text.format(tmp=tmp)))


def test_home_is_where_the_environment_says(tmp_path: Path) -> None:
    made = Workspace(tmp_path, {"HOME": str(tmp_path / "home")})
    assert made.safe_path("~/.profile") == tmp_path / "home" / ".profile"


def test_a_workspace_that_is_reached_by_a_link_is_the_same_place(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    made = Workspace(tmp_path / "link", {})
    assert made.safe_path(str(tmp_path / "link" / "a")) == tmp_path / "real" / "a"


# -- the one opener


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def make_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero: it never ends
    except PermissionError:
        pytest.skip("making a device needs root")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(make_fifo, "named pipe", id="FIFO"),
        pytest.param(make_socket, "", id="socket"),
        pytest.param(make_device, "device", id="device"),
        pytest.param(Path.mkdir, "folder", id="folder"),
        pytest.param(lambda path: None, "does not exist", id="nothing"),
    ],
)
def test_only_a_regular_file_is_opened(
    workspace: Workspace, make: Callable[[Path], None], words: str
) -> None:
    make(workspace.root / "thing")
    with pytest.raises(ToolError, match=rf"thing.*{words}"):
        workspace.read(workspace.safe_path("thing"))


def swap_folder(root: Path) -> None:
    (root / "sub" / "f").unlink()
    (root / "sub").rmdir()
    (root / "sub").symlink_to(root.parent / "out")


def swap_file(root: Path) -> None:
    (root / "sub" / "f").unlink()
    (root / "sub" / "f").symlink_to(root.parent / "out" / "f")


@pytest.mark.parametrize("swap", [swap_folder, swap_file])
def test_a_link_that_is_swapped_in_after_the_check_is_not_read_through(
    workspace: Workspace, swap: Callable[[Path], None]
) -> None:
    (workspace.root / "sub").mkdir()
    (workspace.root / "sub" / "f").write_text("mine")
    (workspace.root.parent / "out" / "f").write_text("secret")
    path = workspace.safe_path("sub/f")
    swap(workspace.root)
    with pytest.raises(ToolError):
        workspace.read(path)


@pytest.mark.parametrize("swap", [swap_folder, swap_file])
def test_a_link_that_is_swapped_in_after_the_check_is_not_written_through(
    workspace: Workspace, swap: Callable[[Path], None]
) -> None:
    outside = workspace.root.parent / "out" / "f"
    (workspace.root / "sub").mkdir()
    (workspace.root / "sub" / "f").write_text("mine")
    outside.write_text("mine")  # the same bytes, so that only the opener can object
    change = Change(workspace.safe_path("sub/f"), b"mine", b"changed", "edited")
    swap(workspace.root)
    with pytest.raises(ToolError):
        workspace.apply(change)
    assert outside.read_text() == "mine"


def test_a_parent_that_becomes_a_link_does_not_get_new_files(workspace: Workspace) -> None:
    path = workspace.safe_path("sub/new")
    (workspace.root / "sub").symlink_to(workspace.root.parent / "out")
    with pytest.raises(ToolError):
        workspace.apply(Change(path, None, b"x", "created"))
    assert not (workspace.root.parent / "out" / "new").exists()


# -- changes


def changed(workspace: Workspace, name: str, after: bytes) -> str:
    """Make a change of a file that is planned from what it holds now."""
    path = workspace.safe_path(name)
    return workspace.apply(Change(path, workspace.read_if_there(path), after, "changed"))


def test_a_new_file_gets_its_folders_and_the_mode_of_the_umask(workspace: Workspace) -> None:
    before = os.umask(0o027)
    try:
        changed(workspace, "a/b/new.txt", b"text")
    finally:
        os.umask(before)
    made = workspace.root / "a" / "b" / "new.txt"
    assert made.read_bytes() == b"text"
    assert stat.S_IMODE(made.stat().st_mode) == 0o640
    assert [path.name for path in made.parent.iterdir()] == ["new.txt"]


@pytest.mark.parametrize("mode", [0o755, 0o600, 0o444, 0o4711], ids=oct)
def test_a_change_keeps_the_mode(workspace: Workspace, mode: int) -> None:
    path = workspace.root / "s.sh"
    path.write_text("old")
    path.chmod(mode)
    changed(workspace, "s.sh", b"new")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", mode)


def test_a_change_keeps_the_owner(workspace: Workspace) -> None:
    path = workspace.root / "a"
    path.write_text("old")
    try:
        os.chown(path, 12345, 23456)
    except PermissionError:
        pytest.skip("giving a file away needs root")
    changed(workspace, "a", b"new")
    assert (path.read_text(), path.stat().st_uid, path.stat().st_gid) == ("new", 12345, 23456)


def test_a_change_through_a_link_changes_the_target_and_keeps_the_link(
    workspace: Workspace,
) -> None:
    target, link = workspace.root / "target", workspace.root / "link"
    target.write_text("old")
    link.symlink_to("target")
    changed(workspace, "link", b"new")
    assert (os.readlink(link), target.read_text()) == ("target", "new")


def test_a_change_of_a_file_with_two_names_changes_both(workspace: Workspace) -> None:
    one, two = workspace.root / "one", workspace.root / "two"
    one.write_text("a longer old text")
    os.link(one, two)
    assert "2" in changed(workspace, "one", b"new")
    assert (one.read_text(), two.read_text()) == ("new", "new")
    assert one.stat().st_ino == two.stat().st_ino


def other_text(path: Path) -> None:
    path.write_text("somebody else's")


@pytest.mark.parametrize(
    ("before", "meanwhile"),
    [
        pytest.param(b"planned from", other_text, id="changed"),
        pytest.param(b"planned from", Path.unlink, id="removed"),
        pytest.param(None, other_text, id="created"),
    ],
)
def test_a_change_is_refused_when_the_file_is_no_longer_what_it_was_planned_from(
    workspace: Workspace, before: bytes | None, meanwhile: Callable[[Path], None]
) -> None:
    path = workspace.root / "f"
    if before is not None:
        path.write_bytes(before)
    change = Change(path, before, b"after", "edited f")
    meanwhile(path)
    now = path.read_bytes() if path.exists() else None
    with pytest.raises(ToolError, match="f .*changed"):
        workspace.apply(change)
    assert (path.read_bytes() if path.exists() else None) == now


SMALL_DISK = """
import resource, sys
from pathlib import Path
from agent import Change, ToolError, Workspace
workspace = Workspace(Path(sys.argv[1]), {})
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    workspace.apply(Change(workspace.root / "f", b"old", b"x" * 5000, "edited"))
except ToolError as error:
    print(error)
"""


def test_a_full_disk_leaves_the_old_file_and_nothing_else(workspace: Workspace) -> None:
    (workspace.root / "f").write_text("old")
    command = [sys.executable, "-c", SMALL_DISK, str(workspace.root)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("f: File too large\n", "")
    assert [path.name for path in workspace.root.iterdir()] == ["f"]
    assert (workspace.root / "f").read_text() == "old"


# -- bytes


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param("grüße\n".encode(), id="UTF-8"),
        pytest.param(b"\xef\xbb\xbfhello\n", id="BOM"),
        pytest.param(b"caf\xe9\r\n", id="latin-1"),
        pytest.param("設定=1\n".encode("shift-jis"), id="Shift-JIS"),
        pytest.param("\ufeffhi é\n".encode("utf-16-le"), id="UTF-16 LE"),
        pytest.param("\ufeffhi é\n".encode("utf-16-be"), id="UTF-16 BE"),
        pytest.param(b"\xff\xfeodd", id="UTF-16 mark, odd length"),
        pytest.param(b"\xff\xfe\x00\xd8", id="UTF-16 with half a pair"),
        pytest.param(b"\xed\xa0\x80", id="a surrogate in UTF-8"),
    ],
)
def test_the_codec_of_a_file_gives_its_bytes_back(data: bytes) -> None:
    codec = codec_of(data)
    assert codec.encode(codec.decode(data)) == data


@quick
@given(st.binary(max_size=200))
def test_any_bytes_survive_being_text(data: bytes) -> None:
    codec = codec_of(data)
    assert codec.encode(codec.decode(data)) == data


OLD, NEW = "<<OLD>>", "new"
PIECE = st.one_of(
    st.binary(max_size=30),
    st.text(max_size=15).map(lambda text: text.encode()),
    st.sampled_from([b"\r\n", b"\n", b"\r", b"\t", b"\xef\xbb\xbf", b"caf\xe9", b"a\r\nb\nc\r"]),
)
AROUND = st.lists(PIECE, max_size=6).map(b"".join)


@pytest.fixture(scope="module")
def edit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Change]]:
    """Plan an edit of a file that holds these bytes, with the tool itself."""
    folder = tmp_path_factory.mktemp("edits")
    known = Settings(base_url="http://127.0.0.1:9/v1", model="m", workspace=str(folder))
    agent = build_agent(replace(known, save_session=False, environ={}))

    def plan(data: bytes, old: str, new: str) -> Change:
        (folder / "f").write_bytes(data)
        return agent.tools["edit_file"].function("f", old, new)

    yield plan
    agent.close()


def check_outside_is_kept(edit: Callable[..., Change], before: bytes, after: bytes) -> None:
    """Edit a file between two pieces; what the plan writes must keep both to the byte."""
    data = before + OLD.encode() + after
    assume(data.count(OLD.encode()) == 1 and b"\0" not in data)
    assume(not data.startswith((b"\xff\xfe", b"\xfe\xff")) and not is_binary(data))
    plan = edit(data, OLD, NEW)
    assert (plan.before, plan.after) == (data, before + NEW.encode() + after)


@quick
@given(AROUND, AROUND)
def test_an_edit_never_changes_a_byte_outside(
    edit: Callable[..., Change], before: bytes, after: bytes
) -> None:
    check_outside_is_kept(edit, before, after)


@pytest.mark.long
@thorough
@given(AROUND, AROUND)
def test_an_edit_never_changes_a_byte_outside_thoroughly(
    edit: Callable[..., Change], before: bytes, after: bytes
) -> None:
    check_outside_is_kept(edit, before, after)


ENDS = st.sampled_from(["\n", "\r\n"])
LINES = st.lists(
    st.tuples(st.text("abé \t\u2028\x0c", max_size=5), ENDS).map("".join), max_size=5
).map("".join)


@quick
@given(before=LINES, after=LINES, ends=st.lists(ENDS, min_size=1, max_size=3))
def test_an_edit_of_several_lines_takes_the_line_ends_of_what_it_replaces(
    edit: Callable[..., Change], before: str, after: str, ends: list[str]
) -> None:
    region = "".join(f"x{n}{end}" for n, end in enumerate(ends))
    old, new = region.replace("\r\n", "\n"), "y\nz\n"
    plan = edit(f"{before}{region}{after}".encode(), old, new)
    head, tail = before.encode(), after.encode()
    middle = plan.after[len(head) : len(plan.after) - len(tail)]
    assert plan.after == head + middle + tail
    assert middle.replace(b"\r\n", b"\n") == new.encode()
    if len(set(ends)) == 1:
        assert middle == new.replace("\n", ends[0]).encode()


# -- secrets

PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA\n"


@pytest.mark.parametrize(
    ("path", "secret"),
    [
        (".env", True),
        ("a/b/.ENV.local", True),
        ("/abs/.envs/production", True),
        (".env.example", False),
        ("a/.env.local.dist", False),
        ("env/.environ.py/../x", True),
        ("ID_ED25519", True),
        ("id_rsa.pub", False),
        ("x/.netrc", True),
        ("environment", False),
    ],
)
def test_a_secret_is_told_by_its_name(path: str, secret: bool) -> None:
    assert bool(secret_name(path)) == secret


@pytest.mark.parametrize(
    ("path", "outcome"),
    [
        ("sub/.Agent/x", "deny"),
        (".git/hooks", "deny"),
        (".git/CONFIG.lock", "deny"),
        (".g\u200cit/config", "deny"),
        ("a/../../b", "deny"),
        ("/etc/hosts", "deny"),
        (".git/HEAD", "human"),
        (".vscode", "human"),
        ("docs/AGENTS.md", "human"),
        ("src/agent/x.py", ""),
        ("docs/config", ""),
    ],
)
def test_a_written_path_falls_under_its_row(path: str, outcome: str) -> None:
    assert (protected_row(path) or [""])[0] == outcome


def test_a_secret_is_refused_by_each_of_its_names_and_its_content(workspace: Workspace) -> None:
    root, home = workspace.root, Path(workspace.home)
    (root / "key.txt").write_text(f"mine\n{PEM}")
    (root / "about.md").write_text("It begins with `-----BEGIN RSA PRIVATE KEY-----`.\n")
    (root / ".env").write_text("A=1\n")
    (root / "link").symlink_to(".env")
    os.link(root / ".env", root / "hard")
    (home / ".ssh").mkdir()
    (root / "ssh").symlink_to(home / ".ssh")
    names = ["key.txt", "link", "hard", "ssh/config", "~/.ssh/x", "~/.config/agent/env", "about.md"]
    assert [bool(workspace.is_secret(name)) for name in names] == [True] * 6 + [False]
    assert workspace.names("link") == ["link", ".env"]
    assert [workspace.secret_below("."), workspace.secret_below(".", "", str.isalpha)] == [
        ".env",
        "",
    ]


def test_the_opener_refuses_secrets_unless_they_are_lifted(workspace: Workspace) -> None:
    for name, text in {".env": "A=1\n", "key.pem": PEM, "plain": "x\n"}.items():
        (workspace.root / name).write_text(text)
    for name in (".env", "key.pem"):
        with pytest.raises(OutsideError, match="is never read"):
            workspace.read(workspace.safe_path(name))
    workspace.lifted = frozenset([".env", "key.pem"])
    texts = [workspace.read(workspace.safe_path(n)) for n in (".env", "key.pem", "plain")]
    assert texts == [b"A=1\n", PEM.encode(), b"x\n"]


def test_a_plan_for_a_path_that_is_protected_is_not_carried_out(workspace: Workspace) -> None:
    (workspace.root / ".git" / "hooks").mkdir(parents=True)
    for name in (".git/hooks/pre-commit", ".agent/x"):
        with pytest.raises(OutsideError, match="is never written"):
            workspace.apply(Change(workspace.root / name, None, b"x", ""))
    workspace.apply(Change(workspace.root / ".git/description", None, b"x", ""))
    assert not (workspace.root / ".git/hooks/pre-commit").exists()


def test_settings_of_a_repository_that_run_programs_are_named(workspace: Workspace) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(workspace.root), *words], check=True, capture_output=True)

    assert workspace.git_programs() == ""
    git("init", "-q")
    (workspace.root / "more").write_text('[diff "x"]\n\ttextconv = cat\n')
    found = [workspace.git_programs()]
    for key, value in {"filter.z.clean": "cat", "include.path": "../more"}.items():
        git("config", key, value)
        found.append(workspace.git_programs())
        git("config", "--unset", key)
    hook = workspace.root / ".git/hooks/post-index-change"
    hook.write_text("#!/bin/sh\n")
    hook.chmod(0o755)
    found.append(workspace.git_programs())
    hook.rename(workspace.root / "post-index-change")
    git("config", "core.hooksPath", ".")
    (workspace.root / "part").mkdir()
    found.append(Workspace(workspace.root / "part", workspace.environ).git_programs())
    assert found == ["", "filter.z.clean", "include.path", *["hooks/post-index-change"] * 2]


def test_our_own_git_is_never_one_of_the_workspace(tmp_path: Path) -> None:
    bin_ = tmp_path / "ws" / ".venv" / "bin"
    bin_.mkdir(parents=True)
    (bin_ / "git").write_text(f"#!/bin/sh\n: >{tmp_path}/MARKER\n")
    (bin_ / "git").chmod(0o755)
    (tmp_path / "ws" / ".gitignore").write_text("*.o\n")
    (tmp_path / "ws" / "git").symlink_to(bin_ / "git")
    for path in (f"{bin_}:{os.environ['PATH']}", f".venv/bin:{os.environ['PATH']}", "", str(bin_)):
        made = Workspace(tmp_path / "ws", {"PATH": path})
        assert (made.walk(made.root).names, made.git_programs()) == ([".gitignore"], "")
    assert not (tmp_path / "MARKER").exists()
    assert subprocess.run([bin_ / "git"]).returncode == 0 and (tmp_path / "MARKER").exists()


def test_credentials_are_withheld_by_name_and_by_value() -> None:
    secret = {"MY_TOKEN": "1", "DB": "postgres://u:pw@h/d", "X": "ghp_" + "a" * 36, "AWS_KEY": "k"}
    plain = {"JAVA_HOME": "/jdk", "AWS_REGION": "eu", "REMOTE": "ssh://git@host/x", "PWD": "/x"}
    made = command_environment({**secret, **plain, "BASH_ENV": "./e.sh"}, ["AWS_KEY"])
    assert {n for n in (*secret, *plain, "BASH_ENV") if n in made} == {*plain, "AWS_KEY"}
    assert (made["GIT_CONFIG_KEY_0"], made["GIT_CONFIG_VALUE_0"]) == ("core.fsmonitor", "false")


def test_a_secret_is_masked_also_where_it_comes_in_pieces() -> None:
    secrets = Secrets(["own-key1", "short"], ["withheld0123456789", "onlyletterslonger"])
    text = "own-key1 short withheld0123456789 onlyletterslonger own-key"
    masked = "[masked] short [masked] onlyletterslonger own-key"
    assert secrets.mask(text) == masked
    for size in range(1, 12):
        seen: list[tuple[str, str]] = []
        emit = secrets.events(lambda kind, text="", seen=seen: seen.append((kind, text)))
        for at in range(0, len(text), size):
            emit("text", text=text[at : at + size])
        emit("usage")
        assert ("".join(piece for _, piece in seen), seen[-1][0]) == (masked, "usage")


# -- commands


def run(workspace: Workspace, command: str, timeout: float = 30.0) -> tuple[int | None, str]:
    """Exit code and output of a command."""
    capture = Capture(None)
    code, _ = workspace.host.run(command, timeout, capture, lambda data: None)
    capture.close()
    return code, capture.text()


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """One workspace, and so one host, for all commands that leave nothing behind."""
    made = Workspace(tmp_path_factory.mktemp("shell"), ENVIRON)
    yield made
    made.host.close()


def alive(tag: str) -> list[int]:
    """Ids of the living processes with the tag in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if tag.encode() in (folder / "cmdline").read_bytes() and folder.name != "self":
                found.append(int(folder.name))
        except OSError:  # it ended meanwhile
            continue
    return [pid for pid in found if pid != os.getpid()]


@pytest.fixture
def tag(tmp_path: Path) -> Iterator[str]:
    """A word that marks processes; those that have it are ended at the end of the test."""
    word = f"tag-{os.getpid()}-{time.monotonic_ns()}"
    yield word
    for pid in alive(word):
        os.kill(pid, signal.SIGKILL)


def sleeper(tag: str) -> str:
    """A command that sleeps for long under the name of the tag."""
    return f"bash -c 'exec -a {tag} sleep 1000'"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        pytest.param("true", (0, ""), id="nothing"),
        pytest.param("exit 3", (3, ""), id="exit code"),
        pytest.param("false; echo last", (0, "last\n"), id="the last one counts"),
        pytest.param("kill -9 $$", (-9, ""), id="signal"),
        pytest.param("echo a; echo b >&2; echo c", (0, "a\nb\nc\n"), id="both streams in order"),
        pytest.param("echo {a,b}; cat <(echo c)", (0, "a b\nc\n"), id="real bash B23"),
        pytest.param("printf 'no end'", (0, "no end"), id="no newline at the end"),
        pytest.param("printf 'a\\377b'", (0, "a\ufffdb"), id="no UTF-8 B25"),
        pytest.param("printf 'a\\0b'", (0, "a\ufffdb"), id="NUL"),
        pytest.param("printf '\\033[32mok\\033[0m\\033[?25l'", (0, "ok"), id="colours B24"),
        pytest.param("printf '\\033]52;c;QQ==\\a\\033]0;x\\033\\\\ok'", (0, "ok"), id="OSC"),
        pytest.param(
            "printf '1%%\\r50%%\\r100%%\\ndone\\r\\n'", (0, "100%\ndone\n"), id="progress"
        ),
        pytest.param("head -c 3 /dev/zero | wc -c", (0, "3\n"), id="pipe"),
    ],
)
def test_a_command_gives_its_exit_code_and_its_output(
    shell: Workspace, command: str, expected: tuple[int, str]
) -> None:
    assert run(shell, command) == expected


def test_a_command_that_is_not_there_says_so(shell: Workspace) -> None:
    code, text = run(shell, "no-such-command")
    assert code == 127
    assert "no-such-command: command not found" in text


def test_every_command_begins_in_the_root_and_with_fresh_variables(shell: Workspace) -> None:
    (shell.root / "sub").mkdir()
    assert run(shell, "cd sub; export A=1; pwd") == (0, f"{shell.root}/sub\n")
    assert run(shell, "pwd; echo $A") == (0, f"{shell.root}\n\n")


def test_a_very_long_command_runs(shell: Workspace) -> None:
    code, text = run(shell, f"echo {'x' * 100_000}")
    assert (code, len(text)) == (0, 100_001)


def test_a_command_that_is_too_long_for_the_system_is_a_failure_and_not_the_end(
    shell: Workspace,
) -> None:
    code, text = run(shell, f"echo {'x' * 300_000}")
    assert (code, "too long" in text) == (127, True)
    assert run(shell, "echo on") == (0, "on\n")


def test_a_command_has_no_terminal_and_no_input(shell: Workspace) -> None:
    command = "read x; echo $?; test -t 0; echo $?; (: </dev/tty) 2>/dev/null; echo $?; cat"
    assert run(shell, command) == (0, "1\n1\n1\n")


def test_a_command_is_a_process_group_of_its_own(shell: Workspace) -> None:
    assert run(shell, "cut -d ' ' -f 5 /proc/$$/stat | grep -cx $$") == (0, "1\n")


ON_A_TERMINAL = """
import os, sys
from pathlib import Path
from agent import Capture, Workspace
os.open(sys.argv[2], os.O_RDWR)  # the first terminal of a session becomes its own
os.close(os.open("/dev/tty", os.O_RDWR))
workspace = Workspace(Path(sys.argv[1]), {"PATH": sys.argv[3]})
capture = Capture(None)
workspace.host.run("exec 3<>/dev/tty", 10, capture, lambda data: None)
workspace.host.close()
print(capture.text())
"""


def test_a_command_has_not_the_terminal_of_the_agent_either(tmp_path: Path) -> None:
    master, slave = os.openpty()
    argv = [sys.executable, "-c", ON_A_TERMINAL, str(tmp_path), os.ttyname(slave)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*argv, os.environ["PATH"]],
        env=environ,
        capture_output=True,
        text=True,
        timeout=30,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(master)
    os.close(slave)
    assert "/dev/tty: No such device or address" in done.stdout, done.stderr


def test_git_does_not_wait_for_an_editor_or_a_password(shell: Workspace) -> None:
    code, text = run(shell, "echo $GIT_TERMINAL_PROMPT $PAGER $GIT_PAGER; $EDITOR x")
    assert (code, text) == (1, "0 cat cat\n")


def test_the_keys_of_the_agent_are_not_in_the_environment(tmp_path: Path) -> None:
    names = {"AGENT_API_KEY", *(row.key_name for row in PROVIDERS.values() if row.key_name)}
    environ = {**ENVIRON, **dict.fromkeys(names, "sk-secret-value"), "OTHER": "kept"}
    made = Workspace(tmp_path, environ)
    code, text = run(made, "env; tr '\\0' '\\n' </proc/$PPID/environ")
    made.host.close()
    assert names <= set(KEY_NAMES)
    assert ("sk-secret-value" in text, text.count("OTHER=kept")) == (False, 2)


@pytest.mark.long
def test_a_timeout_keeps_the_output_and_ends_the_whole_tree(workspace: Workspace, tag: str) -> None:
    inner = sleeper(tag)
    run(workspace, "true")
    command = f"echo begun; ({inner} & {inner} & wait) & setsid {inner} & {inner}"
    assert run(workspace, command, timeout=1) == (None, "begun\n")
    assert until(lambda: not alive(tag))


def test_a_timeout_ends_what_does_not_want_to_end(workspace: Workspace, tag: str) -> None:
    run(workspace, "true")
    loop = f"trap '' TERM INT HUP; echo begun; while :; do bash -c 'exec -a {tag} sleep 0.1'; done"
    assert run(workspace, loop, timeout=1) == (None, "begun\n")
    assert until(lambda: not alive(tag))


def test_a_timeout_lets_the_command_say_its_last_words(shell: Workspace) -> None:
    run(shell, "true")
    command = "trap 'echo bye; exit' TERM; echo begun; while :; do sleep 0.05; done"
    code, text = run(shell, command, timeout=1)
    assert (code, text.split("\n")[0], text.split("\n")[-2]) == (None, "begun", "bye")


@pytest.mark.long
def test_the_command_after_a_timeout_is_not_disturbed(workspace: Workspace, tag: str) -> None:
    run(workspace, f"(sleep 0.2; echo late) & {sleeper(tag)}", timeout=0.5)
    assert run(workspace, "sleep 0.3; echo mine; exit 4") == (4, "mine\n")


AGENT = """
import signal, sys
from pathlib import Path
from agent import Capture, Workspace
workspace = Workspace(Path(sys.argv[1]), {"PATH": sys.argv[3]})
capture = Capture(None)
try:
    workspace.host.run(sys.argv[2], 1000, capture, lambda data: None)
except KeyboardInterrupt as stop:
    print("stopped:", getattr(stop, "output", None), flush=True)
    code, left = workspace.host.run("echo next", 10, capture, lambda data: None)
    print("next:", code, left, flush=True)
workspace.host.close()
"""


@pytest.fixture
def agent_process(workspace: Workspace) -> Iterator[Callable[[str], subprocess.Popen]]:
    """Start a process that runs one command through the host; gone at the end of the test."""
    started = []

    def start(command: str) -> subprocess.Popen:
        argv = [sys.executable, "-c", AGENT, str(workspace.root), command, os.environ["PATH"]]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(argv, env=environ, **pipes))
        until((workspace.root / "begun").exists)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_ctrl_c_keeps_the_output_ends_the_tree_and_leaves_the_host_of_use(
    agent_process: Callable[[str], subprocess.Popen], tag: str
) -> None:
    inner = sleeper(tag)
    process = agent_process(f"echo so far; setsid {inner} & {inner} & touch begun; wait")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (out, err) == ("stopped: so far\n\nnext: 0 []\n", "")
    assert until(lambda: not alive(tag))


def test_when_the_agent_is_killed_everything_ends(
    agent_process: Callable[[str], subprocess.Popen], tag: str
) -> None:
    inner = sleeper(tag)
    process = agent_process(f"setsid {inner} & ({inner} &) ; touch begun; {inner}")
    until(lambda: len(alive(tag)) >= 3)
    process.kill()
    process.wait()
    assert until(lambda: not alive(tag))


def test_a_background_job_does_not_hold_the_call_and_lives_until_the_end(
    workspace: Workspace, tag: str
) -> None:
    began = time.monotonic()
    capture = Capture(None)
    code, left = workspace.host.run(f"{sleeper(tag)} & echo hi", 60, capture, lambda data: None)
    assert (code, capture.text(), len(left)) == (0, "hi\n", 1)
    assert time.monotonic() - began < 30
    assert until(lambda: alive(tag)) == [pid for pid, _ in left]
    assert run(workspace, f"kill -0 {left[0][0]}") == (0, "")
    workspace.host.close()
    assert alive(tag) == []


def test_a_background_job_that_prints_on_does_not_block(workspace: Workspace) -> None:
    job = "(for n in $(seq 20000); do echo 0123456789; done; touch ready) &"
    assert run(workspace, job)[0] == 0
    assert until((workspace.root / "ready").exists)


def test_a_server_in_the_background_answers_the_next_command(workspace: Workspace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve = f"{sys.executable} -m http.server {port} --bind 127.0.0.1 >log 2>&1 &"
    code, _ = run(workspace, serve)
    ask = f"until (: </dev/tcp/127.0.0.1/{port}) 2>/dev/null; do sleep 0.05; done; echo up"
    assert (code, run(workspace, ask, timeout=20)) == (0, (0, "up\n"))


def test_a_timeout_spares_the_background_jobs_of_earlier_commands(
    workspace: Workspace, tag: str
) -> None:
    run(workspace, f"{sleeper(tag)} & true")
    run(workspace, "sleep 1000", timeout=0.3)
    assert len(alive(tag)) == 1
    workspace.host.close()
    assert alive(tag) == []


def test_a_command_that_kills_its_host_is_an_error_and_the_next_one_works(
    workspace: Workspace,
) -> None:
    with pytest.raises(ToolError, match="ended"):
        run(workspace, "kill -9 $PPID")
    assert run(workspace, "echo on") == (0, "on\n")


def test_what_is_left_of_a_command_that_kills_its_host_ends_with_it(
    workspace: Workspace, tag: str
) -> None:
    with pytest.raises(ToolError, match="ended"):
        run(workspace, f"kill -9 $PPID; {sleeper(tag)}")
    workspace.host.close()
    assert until(lambda: not alive(tag), 30)


def test_a_command_that_kills_its_whole_group_spares_the_agent(shell: Workspace) -> None:
    assert run(shell, "kill -15 0; sleep 20")[0] == -15
    assert run(shell, "echo on") == (0, "on\n")


def test_output_is_handed_on_while_the_command_runs(workspace: Workspace) -> None:
    seen: list[bytes] = []

    def take(data: bytes) -> None:
        seen.append(data)
        (workspace.root / "go").touch()

    command = "echo one; until test -e go; do sleep 0.01; done; echo two"
    code, _ = workspace.host.run(command, 20, Capture(None), take)
    assert (code, seen[0], b"".join(seen)) == (0, b"one\n", b"one\ntwo\n")


def flood(workspace: Workspace, command: str) -> tuple[Capture, int]:
    """Run a command that prints much: the capture and the most memory that Python took."""
    capture = Capture(workspace.root / "out" / "all.txt")
    run(workspace, "true")  # what the host takes to start is not measured
    tracemalloc.start()
    try:
        workspace.host.run(command, 60, capture, lambda data: None)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    capture.close()
    return capture, most


@pytest.mark.parametrize(
    "source", ["yes", "cat /dev/zero | tr '\\0' x"], ids=["lines", "no line end"]
)
def test_a_flood_keeps_memory_flat_and_the_file_whole(workspace: Workspace, source: str) -> None:
    capture, most = flood(workspace, f"{source} | head -c 20000000; echo; echo END")
    written = (workspace.root / "out" / "all.txt").read_bytes()
    assert len(written) == capture.size == 20_000_005
    assert written.endswith(b"\nEND\n") and capture.text().endswith("\nEND\n")
    assert len(capture.text()) < 200_000
    assert most < 5_000_000


def test_what_is_not_shown_of_a_flood_is_counted(workspace: Workspace) -> None:
    capture, _ = flood(workspace, "seq 1 100000")
    whole = "".join(f"{n}\n" for n in range(1, 100_001))
    head, gap, tail = re.split(r"\n\[\.\.\. (\d+) bytes not shown \.\.\.\]\n", capture.text())
    assert whole.startswith(head) and whole.endswith(tail)
    assert len(head) + int(gap) + len(tail) == len(whole)


def test_the_output_file_is_private(workspace: Workspace) -> None:
    flood(workspace, "seq 1 100000")
    folder = workspace.root / "out"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "all.txt")]
    assert modes == [0o700, 0o600]


def test_closing_twice_and_closing_unused_is_harmless(tmp_path: Path) -> None:
    made = Workspace(tmp_path, ENVIRON)
    made.host.close()
    assert run(made, "echo hi") == (0, "hi\n")
    made.host.close()
    made.host.close()


def test_a_closed_host_starts_again_when_it_is_needed(workspace: Workspace) -> None:
    run(workspace, "true")
    workspace.host.close()
    assert run(workspace, "echo again") == (0, "again\n")


def test_nothing_of_the_host_is_left_after_closing(workspace: Workspace, tag: str) -> None:
    held: list[Any] = run(workspace, f"echo $PPID; (setsid {sleeper(tag)} &)")[1].split()
    workspace.host.close()
    assert not Path(f"/proc/{held[0]}").exists()
    assert alive(tag) == []


# -- the sandbox


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A repository whose commands run in the sandbox; what is planted in its home must not show."""
    base = tmp_path_factory.mktemp("sandbox")
    root, home = base / "ws", base / "home"
    for name in (".ssh/key", ".aws/credentials", ".config/agent/env", ".netrc", "notes"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(f"planted {name}\n")
    for name in (".env", ".vscode/tasks.json", "sub/.envrc", "AGENTS.md", "plain"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("before\n")
    (root / "CLAUDE.md").symlink_to("AGENTS.md")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    names = {"GIT_AUTHOR_NAME": "a", "GIT_COMMITTER_NAME": "a", "EMAIL": "a@example.com"}
    made = Workspace(root, {**ENVIRON, **names, "HOME": str(home), "SSH_AUTH_SOCK": "/run/s"})
    made.use_sandbox(True)
    if made.sandbox_state != "on":
        pytest.skip(made.sandbox_state)
    yield made
    made.host.close()


def told(workspace: Workspace) -> str:
    """What the sandbox has to tell since it was last asked."""
    notes, workspace.host.notes = workspace.host.notes, []
    return "\n".join(notes)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        pytest.param("echo x > made && rm made", 0, id="the workspace is writable"),
        pytest.param('echo x > /tmp/a && echo x > "$TMPDIR/b"', 0, id="so is the private tmp"),
        pytest.param("git add plain && git commit -qm x", 0, id="git commit works"),
        pytest.param("cat ~/notes /etc/passwd", 0, id="the rest of the disk can be read"),
        pytest.param("mv plain plain2 && mv plain2 plain", 0, id="other names can be moved"),
        pytest.param("touch ~/x", 1, id="but not written: home"),
        pytest.param("[ -w /usr ] || [ -w /etc/passwd ]", 1, id="nor elsewhere"),
        pytest.param("cat ~/.ssh/key", 1, id="keys are hidden"),
        pytest.param("cat ~/.aws/credentials", 1, id="credentials are hidden"),
        pytest.param("cat ~/.netrc", 1, id="netrc is hidden"),
        pytest.param("cat ~/.config/agent/env", 1, id="our settings are hidden"),
        pytest.param("cat .env", 1, id="a secret of the workspace is hidden"),
        pytest.param("echo x >> .git/config", 1, id="git config is read-only"),
        pytest.param("touch .git/hooks/post-checkout", 1, id="git hooks are read-only"),
        pytest.param("mv .git moved", 1, id="git can not be moved away"),
        pytest.param("mv sub moved", 1, id="nor another holder"),
        pytest.param("echo x >> .vscode/tasks.json", 1, id="a protected folder is read-only"),
        pytest.param("echo x >> sub/.envrc", 1, id="a protected file deep down is read-only"),
        pytest.param("echo x >> CLAUDE.md", 1, id="also through a link"),
        pytest.param("cat /proc/1/environ", 1, id="the host's environment is closed"),
        pytest.param("[ -w /proc/sys/kernel/core_pattern ]", 1, id="kernel settings are closed"),
        pytest.param("unshare -Ur true", 1, id="no namespaces inside"),
        pytest.param("exec 3<>/dev/tcp/192.0.2.1/80", 1, id="no network"),
        pytest.param('[ -z "$SSH_AUTH_SOCK" ] && [ -z "$(ls /run)" ]', 0, id="no sockets"),
    ],
)
def test_what_a_command_may_do_in_the_sandbox(inside, command, code):
    assert run(inside, command)[0] == code
    assert told(inside) == ""


def test_capabilities_and_descriptors_are_none(inside):
    command = "grep -E '^(CapEff|NoNewPrivs)' /proc/self/status; ls /proc/self/fd"
    none = "CapEff:\t0000000000000000\nNoNewPrivs:\t1\n0\n1\n2\n3\n"  # 3: what ls reads
    assert run(inside, command) == (0, none)


def test_jobs_loopback_and_tmp_last_from_call_to_call(inside):
    serve = f"{sys.executable} -m http.server 8123 --bind 127.0.0.1 --directory /tmp"
    assert run(inside, f"echo kept > /tmp/page; {serve} >/dev/null 2>&1 & sleep 0.2")[0] == 0
    fetch = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8123/page').read())"
    wait = f'until {sys.executable} -c "{fetch}" 2>/dev/null; do sleep 0.05; done'
    assert run(inside, wait) == (0, "b'kept\\n'\n")
    [(pid, line)] = inside.host.jobs()
    inside.host.stop(pid)
    assert ("http.server" in line, inside.host.jobs()) == (True, [])


@pytest.mark.parametrize("name", [".envrc", ".husky/pre-commit", "a/b/.mcp.json", "c/.agent/x"])
def test_a_protected_name_that_a_command_makes_is_moved_away(inside, name):
    code, _ = run(inside, f"mkdir -p {Path(name).parent} fine; echo x > {name}; echo x > fine/x")
    place = re.search(r"\.agent/quarantine/[\d-]+", told(inside))
    assert (code, (inside.root / name).exists(), place is not None) == (0, False, True)
    assert place and (inside.root / place[0] / name).read_text() == "x\n"
    assert (inside.root / "fine/x").exists()


def test_a_protected_link_is_put_back(inside):
    run(inside, "rm CLAUDE.md; echo evil > CLAUDE.md")
    assert os.readlink(inside.root / "CLAUDE.md") == "AGENTS.md"
    assert "CLAUDE.md" in told(inside)


def test_a_new_repository_stays_without_hooks_and_helpers(inside):
    evil = "git config core.fsmonitor 'touch M'; echo 'touch M' > .git/hooks/post-checkout"
    run(inside, f"git init -q new; cd new; git config user.name bob; {evil}")
    config = (inside.root / "new/.git/config").read_text()
    hooks = [path.suffix for path in (inside.root / "new/.git/hooks").iterdir()]
    assert ("bob" in config, "fsmonitor" in config, set(hooks)) == (True, False, {".sample"})
    assert "core.fsmonitor" in told(inside)
    assert run(inside, "cd new; git config core.pager evil")[0] != 0


def test_what_the_user_and_the_file_tools_write_is_left_alone_and_then_kept(inside):
    (inside.root / ".npmrc").write_text("by hand\n")
    assert run(inside, "echo x >> .npmrc")[0] == 1
    inside.apply(Change(inside.root / ".pypirc", None, b"by a tool\n", ""))
    assert run(inside, "cat .npmrc .pypirc; echo x >> .pypirc")[0] == 1
    assert (told(inside), (inside.root / ".pypirc").read_text()) == ("", "by a tool\n")


def test_what_a_job_makes_between_commands_is_found(inside):
    wait = "while [ ! -e go ]; do sleep 0.02; done"
    run(inside, f"({wait}; echo x > .gitmodules; exec sleep 60) >/dev/null 2>&1 &")
    (inside.root / "go").touch()
    assert until((inside.root / ".gitmodules").exists)
    run(inside, "true")
    assert (".gitmodules" in told(inside), (inside.root / ".gitmodules").exists()) == (True, False)
    for pid, _ in inside.host.jobs():
        inside.host.stop(pid)


def test_without_a_sandbox_the_state_says_why(workspace):
    workspace.host.sandbox.program = ""
    workspace.use_sandbox(True)
    assert workspace.sandbox_state == "off: no bubblewrap (bwrap) of root's is installed"
    assert run(workspace, "echo on") == (0, "on\n")


def test_a_program_of_the_workspace_is_no_sandbox(tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o777)
    assert trusted_program([str(fake)], tmp_path) == ""
