"""The sandbox for real: each wall is run into, and beside it stands what must go through.

`box` is an agent whose commands run in the sandbox, in a folder that holds one of everything that
is protected; `fresh` one in a folder with nothing but a repository; `plain` one without sandbox,
the control that says what a command does where no wall is. They live as long as the module: a
command costs a few milliseconds. `box("command")` is the result as the model sees it.

The folders are in the home that the system knows for the user, whatever $HOME says: the sandbox
has a /tmp of its own.
"""

import base64
import dataclasses
import hashlib
import importlib.util
import json
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import socketserver
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import NAP, Terminal, alive, inside, nothing_runs_in, results, until

from agent import (
    AgentError,
    Sandbox,
    Settings,
    build_agent,
    decide,
    make_policy,
    trusted_program,
)
from flaky_server import FlakyServer

BWRAP = shutil.which("bwrap", path="/usr/bin:/bin:/usr/local/bin") or ""
FLAGS = """--unshare-user --unshare-pid --unshare-ipc --unshare-uts --unshare-net --disable-userns
--cap-drop ALL --new-session --die-with-parent --ro-bind / / --dev /dev --proc /proc
--tmpfs /tmp --tmpfs /run""".split()


def why_not() -> str:
    """Why the sandbox can not be tested on this machine, "" when it can."""
    if sys.platform != "linux" or not BWRAP:
        return "bubblewrap is not installed"
    tried = subprocess.run([BWRAP, *FLAGS, "true"], capture_output=True, text=True)
    return f"bubblewrap does not work here: {tried.stderr.strip()}" if tried.returncode else ""


WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it works")

PYTHON = shlex.quote(os.path.realpath(sys.executable))  # a virtual environment may be in /tmp
SLEEP, SLEEPER = f"sleep {NAP}", f"sleep\0{NAP}"
TWIN = "readable-twin-of-a-secret"
SECRET = "do-not-read-this-4711"  # what secret files hold here
CAPS = "grep CapEff /proc/self/status | tr -d '\\t'"
NO_CAPS = "CapEff:0000000000000000\n[exit code 0]"
NOTHING = "(no output)\n[exit code 0]"
GIT = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "PATH": os.environ["PATH"]}


class Box:
    """An agent in a folder; called with a command, it is what the model gets as the result."""

    def __init__(self, root: Path, house: object, environ: dict | None = None, **fields) -> None:
        self.events: list[tuple[str, dict]] = []
        self.root = root
        known = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(house)}
        known = {name: value for name, value in (known | (environ or {})).items() if value}
        usual = {"mode": "auto", "unattended": True, "sandbox": "on", "save_session": False}
        usual |= {"model": "m", "base_url": "http://127.0.0.1:9/v1", "api_key": "k"}
        self.settings = Settings(workspace=str(root), environ=known, **(usual | fields))
        self.agent = build_agent(self.settings, emit=self.report)

    def report(self, kind: str, **event: object) -> None:
        """Keep an event."""
        self.events.append((kind, event))

    def __call__(self, command: str, timeout: int = 20, **arguments: object) -> str:
        """Run a command with the tool of the model."""
        function = self.agent.tools["bash"].function
        return function(command=command, timeout=timeout, **arguments)

    @property
    def state(self) -> str:
        """What the init event says of the sandbox."""
        return next(event["sandbox"] for kind, event in self.events if kind == "init")


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that is not in /tmp, removed at the end, when nothing runs in it."""
    own = pwd.getpwuid(os.getuid()).pw_dir
    base = own if os.access(own, os.W_OK) else "/var/tmp"
    folder = Path(tempfile.mkdtemp(prefix=".agent-sandbox-", dir=base))
    yield folder
    nothing_runs_in(folder)
    for path in folder.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def boxes() -> Iterator[Callable[..., Box]]:
    """Build agents that are closed at the end of the module."""
    made: list[Box] = []

    def build(root: Path, house: object, **fields) -> Box:
        made.append(Box(root, house, **fields))
        return made[-1]

    yield build
    for box in made:
        box.agent.close()


@pytest.fixture
def one_box() -> Iterator[Callable[..., Box]]:
    """Build agents that are closed at the end of the test."""
    made: list[Box] = []

    def build(root: Path, house: object, **fields) -> Box:
        made.append(Box(root, house, **fields))
        return made[-1]

    yield build
    for box in made:
        box.agent.close()


def some_long(cases: list[str], of: int, quick: int = 1) -> list:
    """The cases as parameters: of so many in a row only the first ones are in the quick tier."""
    marks = [() if n % of < quick else pytest.mark.long for n in range(len(cases))]
    return [pytest.param(case, marks=mark) for case, mark in zip(cases, marks, strict=True)]


# -- what stands in the folders

PROTECTED_FILES = """.git/config .git/config.worktree .git/info/attributes .git/hooks/pre-commit
.git/modules/lib/config linked/.git nested/.git/config nested/.git/hooks/post-commit
.agent/notes.txt .vscode/tasks.json .idea/workspace.xml .devcontainer/devcontainer.json
.github/workflows/ci.yml .husky/pre-commit .mcp.json .pre-commit-config.yaml .npmrc .pypirc
.claude/settings.json .codex/config.toml .cursor/mcp.json .agents/skills/x.md AGENTS.md CLAUDE.md
.envrc .gitmodules .bashrc .bash_profile .profile .zshrc sub/.envrc sub/.vscode/launch.json
sub/AGENTS.md sub/deep/.mcp.json sub/deep/.github/workflows/ci.yml""".split()
PROTECTED_FOLDERS = """.git/hooks .git/modules nested/.git/hooks .agent .vscode .idea .devcontainer
.github/workflows .husky .claude .codex .cursor .agents sub/.vscode""".split()
HOLDERS = ".git .git/info .github nested/.git linked sub sub/deep sub/deep/.github".split()
SECRET_FILES = """.env .env.local .env.production sub/.env id_rsa id_dsa id_ecdsa sub/id_ed25519
.netrc .git-credentials""".split()
KEY_FILES = "server.pem site.pk8 deploy_key sub/host.rsa sub/id_work".split()  # PEM in them
READABLE_FILES = ".env.example sub/.env.sample env id_rsa.pub notes.txt sub/netrc".split()
HOME_SECRETS = """.ssh/key .aws/credentials .gnupg/ring .kube/config .docker/config.json
.azure/token .config/gcloud/token .config/agent/env .netrc .git-credentials""".split()
HOME_READABLE = "notes.txt .gitconfig .config/other/settings .sshrc kube/config".split()


def put(folder: Path, names: list[str], text: str) -> None:
    """Write files with this text and their own name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text} {name}\n")


def git(folder: Path, *words: str) -> str:
    """Run git on the host, with no configuration but the repository's."""
    command = ["git", "-C", str(folder), *words]
    done = subprocess.run(command, env=GIT, capture_output=True, text=True, check=True)
    return done.stdout


def repository(folder: Path, *, template: bool = True) -> Path:
    """A repository with one commit; without a template it has neither hooks nor info."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main", *([] if template else ["--template="]))
    git(folder, "config", "user.name", "t")
    git(folder, "config", "user.email", "t@example.com")
    (folder / "first.txt").write_text("first\n")
    git(folder, "add", "first.txt")
    git(folder, "commit", "-qm", "first")
    return folder


def tree(folder: Path) -> dict[str, tuple]:
    """All that a folder holds: kind and mode, where a link leads, a fingerprint of the content."""
    found: dict[str, tuple] = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        what = os.readlink(path) if stat.S_ISLNK(mode) else ""
        if stat.S_ISREG(mode):
            what = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = (oct(mode), what)
    return found


def seen(path: Path) -> tuple[bytes, int, int]:
    """A file's content, mode and time."""
    found = path.stat()
    return path.read_bytes(), found.st_mode, found.st_mtime_ns


@pytest.fixture(scope="module")
def house(place) -> Path:
    """A home with credentials, and with files that only look like them."""
    folder = place / "home"
    put(folder, HOME_SECRETS, SECRET)
    put(folder, HOME_READABLE, "readable")
    (folder / ".gitconfig").write_text("[user]\n\tname = readable\n")
    return folder


@pytest.fixture(scope="module")
def box(place, house, boxes) -> Box:
    """An agent in the sandbox, in a repository that holds one of everything."""
    root = repository(place / "boxed" / "work")
    repository(root / "nested")
    (root / "linked").mkdir()
    own = [".git/config", "nested/.git/config"]
    put(root, [name for name in PROTECTED_FILES if name not in own], "# before")
    put(root, SECRET_FILES, SECRET)
    put(root, KEY_FILES, f"-----BEGIN PRIVATE KEY-----\nMIIE {SECRET}")
    put(root, READABLE_FILES, "readable")
    put(root, ["got/config", "payload/pre-commit", ".got/hooks/old", ".anv"], f"{TWIN} evil")
    (root / ".agent").chmod(0o700)
    (root / ".gitmodules").write_text('[submodule "lib"]\n\tpath = lib\n')
    (root / ".git/config.worktree").write_text("[extra]\n\tkey = before\n")
    (root / ".gitignore").write_text("\n".join([*SECRET_FILES, *KEY_FILES, "nested", "linked\n"]))
    (root / ".git/hooks/pre-commit").unlink()  # a name in it that no file has
    (root / ".git/hooks/pre-push").write_text("#!/bin/sh\n# before\n")
    put(place, ["other/notes.txt", "boxed/work-evil/notes.txt"], "other")
    return boxes(root, house, environ={"WALL": "a  b\n\u00fc"})


@pytest.fixture(scope="module")
def plain(place, house, boxes) -> Box:
    """An agent without sandbox: the control."""
    root = repository(place / "plain" / "work")
    return boxes(root, house, environ={"WALL": "a  b\n\u00fc"}, sandbox="off")


@pytest.fixture(scope="module")
def fresh(place, house, boxes) -> Box:
    """An agent in the sandbox, in a repository without anything else, with a session."""
    root = repository(place / "fresh" / "work", template=False)
    return boxes(root, house, save_session=True)


def attempts(table: dict[str, str], path: str) -> str:
    """A command that tries all of the table on a path and names what went through."""
    lines = [f"({text.replace('@', path)}) 2>/dev/null && echo {n}" for n, text in table.items()]
    return "\n".join([*lines, "rm -f new1 new2", "echo end"])


def went_through(*names: str) -> str:
    """The result of attempts of which these succeeded."""
    return "\n".join([*names, "end"]) + "\n[exit code 0]"


ON_FILES = {
    "append": "echo evil >> @",
    "empty": ": > @",
    "mode": "chmod 777 @",
    "time": "touch -d @0 @",
    "link": "echo evil > new1; ln -fT new1 @",
    "symlink": "ln -sfnT new1 @",
    "replace": "echo evil > new2; mv -fT new2 @",
    "rename": "mv -T @ @.away && mv -T @.away @",
    "remove": "unlink @",
}
ON_FILES["time"] = "touch -t 200001010000 @"
ON_FOLDERS = {
    "file": "echo evil > @/evil",
    "folder": "mkdir @/evil.d",
    "mode": "chmod 777 @",
    "rename": "mv -T @ @.away && mv -T @.away @",
}


# -- the files of the disk


@pytest.mark.parametrize(
    "path", some_long([name for name in PROTECTED_FILES if name != ".git/hooks/pre-commit"], 3, 2)
)
def test_a_protected_file_is_neither_changed_nor_removed_nor_renamed(box, path):
    before = seen(box.root / path)
    assert box(attempts(ON_FILES, path)) == went_through()
    assert seen(box.root / path) == before
    assert not (box.root / f"{path}.away").exists()


@pytest.mark.parametrize("path", ["src/file", ".got/hooks/file", "got/config2"])
def test_an_ordinary_file_is_changed_removed_and_renamed(box, path):
    box(f"mkdir -p src; echo before > {path}")
    assert box(attempts(ON_FILES, path)) == went_through(*ON_FILES)
    assert not (box.root / path).exists()


@pytest.mark.parametrize("path", PROTECTED_FOLDERS)
def test_a_protected_folder_is_neither_changed_nor_renamed(box, path):
    before = tree(box.root / path)
    assert box(attempts(ON_FOLDERS, path)) == went_through()
    assert tree(box.root / path) == before


@pytest.mark.parametrize("path", HOLDERS)
def test_the_folder_that_holds_a_protected_name_is_not_renamed_but_written(box, path):
    table = {name: ON_FOLDERS[name] for name in ("file", "rename")}
    assert box(attempts(table, path)) == went_through("file")
    assert (box.root / path / "evil").read_text() == "evil\n"
    (box.root / path / "evil").unlink()


@pytest.mark.parametrize("path", ["src", ".git/objects", ".git/refs", ".got/hooks"])
def test_an_ordinary_folder_is_changed_and_renamed(box, path):
    command = f"mkdir -p {path}; {attempts(ON_FOLDERS, path)}; rm {path}/evil; rmdir {path}/evil.d"
    assert box(command) == went_through(*ON_FOLDERS)


def test_moving_a_folder_further_up_brings_no_other_file_to_the_protected_name(box):
    assert "[exit code " in box(
        "mkdir top top/mid; echo a > top/mid/b; mv sub sub2; mkdir -p sub/deep; "
        "echo evil > sub/deep/.mcp.json; mv sub2 back"
    )
    box("rm -r top")
    assert (box.root / "sub/deep/.mcp.json").read_text() == "# before sub/deep/.mcp.json\n"


def test_git_can_do_all_that_leaves_hooks_and_configuration_alone(box):
    steps = """git checkout -q -b side; echo a > a.txt; git add a.txt; git commit -qm a
    git tag one; git tag -am two two; git checkout -q main; git merge -q --no-ff -m m side
    echo b >> a.txt; git stash -q; git stash pop -q; git commit -qam b; git mv a.txt c.txt
    git commit -qm c; git rebase -q --root; git reset -q HEAD~1; git add c.txt; git commit -qam d
    git gc -q; git fsck >/dev/null 2>&1; git add -A . ':!*.envrc'; git commit -qm all
    git log -1 --format=%s"""
    assert box(f"set -e; {steps}") == "all\n[exit code 0]"
    assert git(box.root, "log", "-1", "--format=%s") == "all\n"


def test_git_sees_inside_what_it_sees_outside(box):
    outside = git(box.root, "status", "--porcelain", "--ignored", "--untracked-files=all")
    inner = box("git status --porcelain --ignored --untracked-files=all")
    assert inner == f"{outside or '(no output)' + chr(10)}[exit code 0]"


@pytest.mark.parametrize(
    "command",
    [
        "git config user.name evil",
        "git config --local core.hooksPath payload",
        "git config alias.x '!true'",
        "git config --unset user.name",
        "git config --worktree extra.key evil",
        "git -C nested config core.fsmonitor true",
        "git remote add evil ../elsewhere",
    ],
)
def test_git_does_not_write_its_configuration(box, command):
    before = seen(box.root / ".git/config")
    assert box(f"{command} 2>/dev/null; test $? != 0").endswith("[exit code 0]")
    assert seen(box.root / ".git/config") == before
    assert box("git config --file got/config user.name fine; cat got/config").endswith(
        "[exit code 0]"
    )


@pytest.mark.parametrize(
    "path",
    ["other/notes.txt", "boxed/work-evil/notes.txt", "home/notes.txt", "home/.bashrc", "new.txt"],
)
def test_nothing_outside_the_workspace_is_written(box, place, path):
    before = tree(place / "other"), tree(place / "boxed/work-evil"), tree(place / "home")
    assert box(attempts(ON_FILES, shlex.quote(str(place / path)))) == went_through()
    assert not (place / "new.txt").exists()
    assert (tree(place / "other"), tree(place / "boxed/work-evil"), tree(place / "home")) == before


def test_without_the_sandbox_the_same_attempts_outside_succeed(plain, place):
    put(place, ["control/notes.txt"], "control")
    path = shlex.quote(str(place / "control/notes.txt"))
    assert plain(attempts(ON_FILES, path)) == went_through(*ON_FILES)


def test_no_folder_of_the_system_is_writable_but_the_workspace_and_tmp(box):
    folders = "/ /bin /etc /usr /usr/local /usr/bin /var /var/lib /root /home /opt /boot"
    command = f'for f in {folders} . /tmp ~ ..; do test -w "$f" && echo "$f"; done; true'
    assert box(command) == ".\n/tmp\n[exit code 0]"


@pytest.mark.parametrize(
    "command",
    [
        "ln -sfn {out} way; echo evil > way/evil",
        "ln -sfn {out}/notes.txt way.txt; echo evil > way.txt",
        "echo evil > ../../other/evil",
        "ln {out}/notes.txt near.txt; echo evil > near.txt",
        "cd {out} && echo evil > evil",
        "echo evil > /proc/self/cwd/../../other/evil",
        "echo evil > /proc/1/root{out}/evil",
        "exec 9< {out}; echo evil > /proc/self/fd/9/evil",
        "mv ../work ../gone",
        "mount --bind . {out}; mount -o remount,rw,bind {out}; echo evil > {out}/evil",
        "umount .git/config; umount -l .git/hooks; echo evil > .git/hooks/evil",
        "rm -f got/c; ln .git/config got/c && echo evil >> got/c",
        "ln -sfn ../.git/hooks got/h; echo evil > got/h/evil",
        "mkdir got/new && mv .git/hooks got/new",
        "mv .github got/new.github",
        "cp -al .git got/copy && echo evil >> got/copy/config",
    ],
)
def test_no_link_and_no_mount_leads_out(box, place, command):
    out = place / "other"
    before = tree(out), tree(box.root / ".git/hooks"), seen(box.root / ".git/config")
    box(command.format(out=shlex.quote(str(out))))
    after = tree(out), tree(box.root / ".git/hooks"), seen(box.root / ".git/config")
    assert after == before
    assert box.root.is_dir()


def test_links_inside_the_workspace_work(box):
    command = "mkdir -p src; echo a > src/a; ln -sfn src way2; echo b > way2/b; ln -f src/a src/c"
    assert box(f"{command}; echo c >> src/c; cat way2/a src/b") == "a\nc\nb\n[exit code 0]"


def test_a_file_tool_does_not_follow_a_link_that_a_command_made_to_the_outside(box, place):
    box(f"ln -sfn {shlex.quote(str(place / 'other'))} lure; ln -sfn got lure2")
    write = box.agent.tools["write_file"].function
    with pytest.raises(AgentError):
        write(path="lure/MARKER", content="evil\n")
    assert "got/fine.txt" in str(write(path="lure2/fine.txt", content="fine\n"))
    assert not (place / "other/MARKER").exists()
    box("rm lure lure2")


# -- secrets


@pytest.mark.parametrize("path", some_long(SECRET_FILES, 3))
def test_a_secret_of_the_workspace_is_not_read_by_any_way(box, path):
    before = seen(box.root / path)
    ways = f"""cat {path}; cat < {path}; cp {path} got/copy; cat got/copy; ln -sfn $PWD/{path} way3
    cat way3; ln {path} got/hard; cat got/hard; mv {path} got/moved; cat got/moved; tac {path}
    cat /proc/self/root$PWD/{path} /proc/1/cwd/{path}; umount {path}; chmod 644 {path}; cat {path}
    {PYTHON} -ISc "print(open('{path}').read())"; tar cf - {path}; grep -rs do-not-read .
    rm -f got/copy got/hard got/moved"""
    assert SECRET not in box(ways)
    assert seen(box.root / path) == before


def test_a_private_key_is_not_read_under_any_name_that_keys_have(box):
    found = box("find . -type f -exec grep -ac '^MIIE\\|^readable ' {} + 2>/dev/null | grep -v :0")
    named = {line.partition(":")[0].removeprefix("./") for line in found.splitlines()[:-1]}
    assert named == set(READABLE_FILES)


@pytest.mark.parametrize("path", READABLE_FILES)
def test_what_only_looks_like_a_secret_of_the_workspace_is_read(box, path):
    assert box(f"cat {path}") == f"readable {path}\n[exit code 0]"


@pytest.mark.parametrize("path", HOME_SECRETS)
def test_credentials_of_the_home_are_not_read(box, house, path):
    text = box(f"cat ~/{path} {house}/{path}; ls -RA ~/{Path(path).parent}; tar cf - -C ~ {path}")
    assert (SECRET in text, (house / path).read_text()) == (False, f"{SECRET} {path}\n")


@pytest.mark.parametrize("path", HOME_READABLE)
def test_the_rest_of_the_home_is_read(box, house, path):
    assert box(f"cat ~/{path}") == f"{(house / path).read_text()}[exit code 0]"


def test_without_the_sandbox_the_same_commands_read_the_credentials(plain):
    texts = [plain(f"cat ~/{path}") for path in HOME_SECRETS]
    assert texts == [f"{SECRET} {path}\n[exit code 0]" for path in HOME_SECRETS]


def test_credentials_behind_a_link_are_not_read_under_either_name(one_box, place, tmp_path):
    folder = place / "linked-home"
    put(folder, ["real/aws/credentials", ".config/agent/env", "elsewhere/agent/env"], SECRET)
    (folder / ".aws").symlink_to("real/aws")
    (tmp_path / "work").mkdir()
    box = one_box(tmp_path / "work", folder, environ={"XDG_CONFIG_HOME": str(folder / "elsewhere")})
    text = box("cat ~/.aws/credentials ~/real/aws/credentials ~/elsewhere/agent/env; echo end")
    assert (SECRET in text, text.endswith("end\n[exit code 0]")) == (False, True)


@pytest.mark.long
def test_a_secret_of_the_workspace_is_hidden_by_all_its_names(one_box, tmp_path):
    key = f"-----BEGIN OPENSSH PRIVATE KEY-----\n{TWIN}\n"
    for name in ("conf/prod.txt", "deploy_rsa", "server-key", "x.pk8"):
        put(tmp_path / "work", [name], key)
    (tmp_path / "work/.env").symlink_to("conf/prod.txt")
    box = one_box(tmp_path / "work", tmp_path / "home")
    for name in ("deploy_rsa", "server-key", "x.pk8", "conf/prod.txt", ".env"):
        assert TWIN not in box(f"cat {name}")
    assert TWIN not in box("mv conf moved; cat moved/prod.txt")


def test_the_home_may_be_the_workspace_and_keeps_its_secrets(one_box, tmp_path):
    names = [".config/agent/env", ".config/gh/token", ".local/share/keyrings/k", ".ssh/id_rsa"]
    put(tmp_path, [*names, ".docker/.envrc"], SECRET)
    box = one_box(tmp_path, tmp_path)
    told = box(f"mv .config c; mv .local l; cat {' '.join(names)} c/*/* l/*/*/* .docker/.envrc")
    assert SECRET not in told
    assert [name for name in names if not (tmp_path / name).exists()] == []
    assert box("touch .local/made && ls") == NOTHING


@pytest.mark.parametrize("name", [".venv", ".env"])
def test_an_active_virtual_environment_of_the_workspace_is_written(one_box, tmp_path, name):
    put(tmp_path, [f"{name}/pyvenv.cfg", f"{name}/bin/activate"], "home =")
    environ = {"VIRTUAL_ENV": f"{tmp_path}/{name}", "PATH": f"{tmp_path}/{name}/bin:/usr/bin:/bin"}
    box = one_box(tmp_path, tmp_path / "home", environ=environ)
    assert box(f"touch {name}/made {name}/bin/tool; ls {name}/bin") == (
        "activate\ntool\n[exit code 0]"
    )


def test_what_the_user_names_in_sandbox_read_is_read_but_not_written(one_box, place, tmp_path):
    folder = place / "reading-home"
    put(folder, [".kube/config", ".aws/credentials"], SECRET)
    put(tmp_path, ["extra/notes.txt", "work/a"], "extra")
    fields = {"sandbox_read": (str(folder / ".kube"), str(tmp_path / "extra"))}
    box = one_box(tmp_path / "work", folder, **fields)
    extra = shlex.quote(str(tmp_path / "extra"))
    assert box(f"cat ~/.kube/config {extra}/notes.txt") == (
        f"{SECRET} .kube/config\nextra extra/notes.txt\n[exit code 0]"
    )
    assert SECRET not in box("cat ~/.aws/credentials")
    assert box(attempts(ON_FOLDERS, extra)) == went_through()


# -- protected names that a command makes

NEW_NAMES = """.envrc .env .env.local .gitmodules .bashrc .profile .zshrc .vscode/tasks.json
.idea/runs/x.xml .devcontainer/devcontainer.json .github/workflows/ci.yml .husky/pre-commit
.mcp.json .pre-commit-config.yaml .npmrc .pypirc .claude/settings.json .codex/config.toml
.cursor/mcp.json .agents/skills/x.md AGENTS.md CLAUDE.md .git/hooks/pre-commit
.git/info/attributes .git/config.worktree .git/modules/lib/config module/.git a/b/c/.envrc
a/b/.vscode/tasks.json a/b/.github/workflows/x.yml .VSCode/tasks.json agents.MD""".split()
ORDINARY_NAMES = """vscode/tasks.json .github/ISSUE_TEMPLATE.md .gitignore .editorconfig Makefile
conftest.py package.json hooks/pre-commit workflows/ci.yml .git/refs/heads/other .git/info/exclude
agents/x.md docs/AGENTS.md.txt""".split()


def quarantined(root: Path, text: str) -> list[Path]:
    """The files in quarantine with this text."""
    files = (root / ".agent/quarantine").rglob("*")
    return [path for path in files if path.is_file() and path.read_text() == text]


def armed(root: Path) -> list[str]:
    """The names in a workspace, not in its `.agent`, that `.envrc` and `.vscode` have."""
    found = [folder.relative_to(root) for folder in root.rglob("*")]
    return [str(p) for p in found if p.name in (".envrc", ".vscode") and p.parts[0] != ".agent"]


@pytest.mark.parametrize("path", some_long(NEW_NAMES, 3, 2))
def test_a_new_protected_name_goes_to_quarantine_and_the_result_names_it(fresh, path):
    text = f"new {path}\n"
    made = f"mkdir -p $(dirname {path}) && echo 'new {path}' > {path} && cat {path}"
    result = fresh(made)
    assert result.startswith(text) or text in result
    assert result.endswith("[exit code 0]")
    assert "quarantine" in result
    assert any(part in result for part in (path, str(Path(path).parent)))
    assert not (fresh.root / path).exists()
    assert len(quarantined(fresh.root, text)) == 1
    assert fresh("echo on") == "on\n[exit code 0]"


@pytest.mark.parametrize("path", ORDINARY_NAMES)
def test_a_new_ordinary_name_stays(fresh, path):
    assert fresh(f"mkdir -p $(dirname {path}) && git rev-parse HEAD > {path}") == NOTHING
    assert (fresh.root / path).read_text() == git(fresh.root, "rev-parse", "main")
    fresh(f"rm {path}")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("echo x > keep; ln -sfn keep .envrc", id="symbolic link"),
        pytest.param("echo x > keep; ln -s /etc/passwd .envrc", id="link to the outside"),
        pytest.param("echo x > keep; ln keep .envrc", id="hard link"),
        pytest.param("echo x > keep; mkdir real; ln -s real .vscode", id="link to a folder"),
        pytest.param("echo x > keep; mkdir .vscode", id="empty folder"),
        pytest.param("echo x > keep; mkfifo .envrc", id="fifo"),
        pytest.param("echo x > keep; echo x > .envrc; chmod 0 .envrc", id="unreadable file"),
        pytest.param("echo x > keep; mkdir -p .vscode/a; chmod 0 .vscode", id="unreadable folder"),
        pytest.param("echo x > keep; mkdir d1; echo x > d1/.envrc; mv d1 d2", id="renamed folder"),
        pytest.param("echo x > keep; mkdir -p 'a  b'; echo x > 'a  b/.envrc'", id="blanks"),
        pytest.param("echo x > keep; mkdir $'n\\nl'; echo x > $'n\\nl/.envrc'", id="newline"),
        pytest.param("echo x > keep; mkdir $'\\xff'; echo x > $'\\xff/.envrc'", id="not UTF-8"),
        pytest.param("echo x > keep; mkdir .x; echo x > .x/.envrc; chmod 500 .x", id="no writing"),
        pytest.param(
            "echo x > keep; for i in {1..60}; do mkdir down; cd down; done; echo x > .envrc",
            id="deep",
        ),
        pytest.param(
            "echo x > keep; mkdir many; for i in {1..40}; do mkdir many/$i; "
            "echo x > many/$i/.envrc; done",
            id="many",
        ),
        pytest.param("echo x > keep; echo x > .envrc; exit 3", id="failed"),
        pytest.param("echo x > keep; echo x > .envrc; kill -9 $$", id="killed"),
        pytest.param("echo x > keep; echo x > .envrc; kill -9 $PPID; sleep 0.2", id="host killed"),
    ],
)
def test_nothing_protected_stays_however_it_came(fresh, command):
    try:
        text = fresh(command)
    except AgentError as error:  # the host was killed
        text = str(error)
    assert armed(fresh.root) == []
    assert (fresh.root / "keep").read_text() == "x\n"
    assert "quarantine" in text or "quarantine" in fresh("true")
    fresh("chmod -R u+rwX .x; rm -rf keep real d2 a* n* down many .x $'\\xff'")


def test_two_files_of_one_name_are_both_kept(fresh):
    texts = ["echo one > .mcp.json", "echo two > .mcp.json"]
    assert all("quarantine" in fresh(text) for text in texts)
    assert [len(quarantined(fresh.root, text)) for text in ("one\n", "two\n")] == [1, 1]


def test_what_a_link_leads_to_is_not_taken_into_quarantine(fresh, place):
    put(place, ["tempting/.envrc", "tempting/.vscode/tasks.json"], "outside")
    before = tree(place / "tempting")
    assert fresh(f"ln -s {place}/tempting lure; ls -A lure/.vscode").endswith("[exit code 0]")
    assert tree(place / "tempting") == before
    (fresh.root / "lure").unlink()


JOB = (
    "(echo $BASHPID > pid; until test -e go; do sleep 0.01; done; echo job > .envrc; exec sleep 60)"
)


@pytest.mark.parametrize("kind", ["link", "inner link", "writable", "file"])
def test_without_a_quarantine_protected_names_get_others(one_box, tmp_path, kind):
    state, out = tmp_path / "work/.agent", tmp_path / "out"
    out.mkdir()
    put(tmp_path / "work", [".agent"] if kind == "file" else ["notes.txt"], "x")
    if kind == "link":
        state.symlink_to(out)
    elif kind != "file":
        state.mkdir()
        state.chmod(0o777 if kind == "writable" else 0o700)
    if kind == "inner link":
        (state / "quarantine").symlink_to(out)
    box = one_box(tmp_path / "work", tmp_path / "home")
    told = box("echo a > .envrc; git init -q made; git -C made config core.pager x")
    assert re.findall(r"quarantined-\w+-(\S+).sample", told) == [".envrc", "config"]
    assert not (box.root / ".envrc").exists() and not (box.root / "made/.git/config").exists()
    assert (list(out.iterdir()), box("true")) == ([], NOTHING)


def test_a_folder_that_can_not_be_looked_into_does_not_stay(one_box, tmp_path):
    put(tmp_path / "work/users", ["a"], "a")
    listed = os.scandir

    def scandir(path):
        if str(path).endswith(("shut", "users")):  # root reads all
            raise PermissionError(13, "Permission denied")
        return listed(path)

    box = one_box(tmp_path / "work", tmp_path / "home")
    box.agent.workspace.host.guarded.scandir = scandir
    assert "quarantine" in box("mkdir -p shut/.vscode")
    assert sorted(os.listdir(box.root)) == [".agent", "users"]


def test_what_a_job_makes_between_two_commands_is_found_after_the_next(fresh):
    fresh(f"{JOB} &>/dev/null & until test -s pid; do sleep 0.01; done")
    (fresh.root / "go").touch()
    until((fresh.root / ".envrc").exists)
    end = "p=$(cat pid); rm pid go; kill $p; while kill -0 $p; do sleep 0.01; done 2>/dev/null"
    assert "quarantine" in fresh(end)
    assert (armed(fresh.root), len(quarantined(fresh.root, "job\n"))) == ([], 1)


def test_what_a_job_made_last_is_found_when_the_session_ends(one_box, tmp_path):
    box = one_box(tmp_path, "/nonexistent")
    box(f"{JOB} &>/dev/null &")
    (tmp_path / "go").touch()
    until((tmp_path / ".envrc").exists)
    box.agent.close()
    assert armed(tmp_path) == []


def test_what_the_user_makes_between_two_commands_stays_and_is_protected(fresh):
    fresh("echo on")
    (fresh.root / ".npmrc").write_text("the user's\n")
    fresh("cat .npmrc; echo evil >> .npmrc; echo evil > other; mv other .npmrc; rm -f other")
    assert (fresh.root / ".npmrc").read_text() == "the user's\n"
    (fresh.root / ".npmrc").unlink()


def test_a_repository_that_a_command_makes_stays_without_hooks_and_helpers(fresh):
    made = """mkdir inner; cd inner; git init -q -b main .; git config user.name me
    git config user.email me@example.com; git commit -q --allow-empty -m one
    git config core.fsmonitor 'touch MARKER'; git config core.hooksPath ../evil
    git config alias.x '!touch MARKER'; git config filter.z.clean 'touch MARKER'
    git config diff.external 'touch MARKER'; git config core.sshCommand 'touch MARKER'
    git config include.path ../evil.cfg; mkdir -p .git/hooks; echo x > .git/hooks/pre-commit
    chmod +x .git/hooks/pre-commit"""
    text = fresh(made)
    assert text.endswith("[exit code 0]")
    names = git(fresh.root, "config", "--file", "inner/.git/config", "--name-only", "--list")
    kept, helpers = (
        {"user.name", "user.email", "core.bare"},
        "fsmonitor hooks alias filter diff ssh",
    )
    assert kept <= set(names.split())
    assert [word for word in [*helpers.split(), "include"] if word in names] == []
    assert not (fresh.root / "inner/.git/hooks/pre-commit").exists()
    assert re.search("hooks|pre-commit", text)
    assert git(fresh.root / "inner", "log", "--format=%s") == "one\n"


def test_a_repository_that_a_command_made_is_protected_from_the_next_command(fresh):
    fresh("git init -q -b main later; cd later; git config user.name me")
    fresh("cd later; git config core.fsmonitor true; mkdir .git/hooks; echo x > .git/hooks/evil")
    names = git(fresh.root, "config", "--file", "later/.git/config", "--name-only", "--list")
    assert ("user.name" in names, "fsmonitor" in names) == (True, False)
    assert not (fresh.root / "later/.git/hooks/evil").exists()
    commit = "git -c user.name=a -c user.email=a@b commit -q --allow-empty -m two"
    assert fresh(f"cd later; {commit}; git log --format=%s") == "two\n[exit code 0]"


def test_a_cloned_repository_works(fresh):
    text = fresh("git clone -q . copy; cd copy; git log --format=%s; git remote")
    assert text.startswith("first\norigin\n") or "first\norigin\n" in text
    assert git(fresh.root / "copy", "log", "--format=%s") == "first\n"


# -- nothing is left on the host


def test_a_workspace_looks_before_during_and_after_as_if_there_were_no_sandbox(one_box, place):
    root = place / "bare" / "work"
    put(root, ["src/a.txt", "closed/b.txt", "closed/.envrc", "locked/c.txt", ".env"], "x")
    (root / "closed").chmod(0o555)
    (root / "locked").chmod(0)
    before = tree(root)
    box = one_box(root, "/nonexistent")
    listing = box("find . -path ./locked -prune -o -print | sort")
    assert listing.splitlines()[:-1] == sorted(
        [".", *(f"./{n}" for n in before if n[:6] != "locked")]
    )
    assert box("grep -c x src/a.txt closed/b.txt") == ("src/a.txt:1\nclosed/b.txt:1\n[exit code 0]")
    assert tree(root) == before
    box.agent.close()
    assert tree(root) == before


def test_a_state_folder_that_a_command_makes_configures_nothing(one_box, tmp_path):
    box = one_box(tmp_path, "/nonexistent")
    text = box("mkdir -p .agent/sessions && echo x | tee .agent/sessions/a .agent/b > plain.txt")
    assert text.endswith("[exit code 0]")
    assert not (tmp_path / ".agent/b").exists()
    assert not (tmp_path / ".agent/sessions/a").exists()
    assert (tmp_path / "plain.txt").read_text() == "x\n"


# -- network


class Pong(socketserver.BaseRequestHandler):
    """Says pong to whoever connects."""

    def handle(self) -> None:
        """Answer and count."""
        self.server.seen.append(self.client_address)
        self.request.sendall(b"pong\n")


@pytest.fixture(scope="module")
def listener() -> Iterator[socketserver.TCPServer]:
    """A server on the host's loopback."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Pong) as server:
        server.seen = []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def connect(listener: socketserver.TCPServer) -> str:
    """A command that connects to the server of the host."""
    return f"(exec 3<>/dev/tcp/127.0.0.1/{listener.server_address[1]} && cat <&3) 2>/dev/null"


SERVE = f"""{PYTHON} -ISc "import socket
server = socket.create_server(('127.0.0.1', 0))
open('port.new', 'w').write(str(server.getsockname()[1]))
__import__('os').rename('port.new', 'port')
while True:
    with server.accept()[0] as client: client.sendall(b'inner pong')" >/dev/null 2>&1 &
until test -s port; do sleep 0.01; done"""


def test_the_network_of_the_host_is_not_there(box, plain, listener):
    before = len(listener.seen)
    assert box(connect(listener)) == "(no output)\n[exit code 1]"
    assert box("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '") == "lo\n[exit code 0]"
    assert len(listener.seen) == before
    assert plain(connect(listener)) == "pong\n[exit code 0]"


def test_loopback_works_from_one_call_to_the_next(box):
    assert "still running" in box(SERVE)
    text = box('cat < "/dev/tcp/127.0.0.1/$(cat port)"; rm port')
    assert text == "inner pong\n[exit code 0]"


def test_a_test_suite_with_a_loopback_server_passes(box):
    (box.root / "test_loop.py").write_text(LOOP_TEST)
    assert box(f"{PYTHON} -m unittest -q test_loop 2>&1 | tail -1") == "OK\n[exit code 0]"


LOOP_TEST = """import http.server, tempfile, threading, unittest, urllib.request
class Loop(unittest.TestCase):
    def test_loop(self):
        handler = http.server.SimpleHTTPRequestHandler
        handler.log_message = lambda *_: None
        server = http.server.ThreadingHTTPServer(("localhost", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://localhost:{server.server_port}/first.txt"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.assertEqual(opener.open(url).read(), b"first\\n")
        server.shutdown(); server.server_close()
        with tempfile.NamedTemporaryFile() as file: file.write(b"x")
"""


def test_a_command_with_network_reaches_it_and_nothing_else_is_open(box, listener):
    assert box(connect(listener), network=True) == "pong\n[exit code 0]"
    assert box(CAPS, network=True) == NO_CAPS
    table = {"hook": "echo evil > .git/hooks/evil", "config": "echo evil >> .git/config"}
    table |= {"home": "echo evil > ~/evil", "vscode": "echo evil > .vscode/evil"}
    result = box(attempts(table | {"src": "mkdir -p src && echo a > src/a"}, ""), network=True)
    assert result == went_through("src")
    assert SECRET not in box("cat .env ~/.ssh/key ~/.aws/credentials", network=True)
    new = box("echo x > net.txt; mkdir lib; echo x > lib/.mcp.json", network=True)
    assert ("quarantine" in new, (box.root / "lib/.mcp.json").exists()) == (True, False)
    assert box(connect(listener)) == "(no output)\n[exit code 1]"


def test_the_network_is_for_who_said_yes(listener, tmp_path):
    call = {"call": "bash", "arguments": {"command": connect(listener), "network": True}}
    plainly = {"call": "bash", "arguments": {"command": connect(listener)}}
    asked, answers = [], iter(["y", "n"])

    def ask(question) -> str:
        asked.append(question)
        return next(answers)

    before = len(listener.seen)
    with FlakyServer([call, plainly, call, "done"]) as server:
        fields = {"model": "m", "api_key": "k", "mode": "auto", "sandbox": "on"}
        environ = {"PATH": os.environ["PATH"]}
        settings = Settings(base_url=server.url, workspace=str(tmp_path), environ=environ, **fields)
        agent = build_agent(settings, ask=ask)
        agent.run("go")
        agent.close()
    first, second, third = results(server.requests[-1])
    assert (first, second) == ("pong\n[exit code 0]", "(no output)\n[exit code 1]")
    assert (third.startswith("denied: "), len(asked)) == (True, 2)
    assert len(listener.seen) == before + 1


def test_with_nobody_there_the_flag_for_the_network_is_named(run_agent):
    call = {"call": "bash", "arguments": {"command": "touch a", "network": True}}
    with FlakyServer([call, "done"] * 2) as server:
        done = run_agent("--yes", "go", server=server)
        again = run_agent("--yes", "--network", "go", server=server)
    assert (done.returncode, "--network" in done.stderr, again.returncode) == (77, True, 0)


SOCKET = f"""{PYTHON} -ISc "import socket, sys
way = socket.socket(socket.AF_UNIX)
way.connect(sys.argv[1].replace('@', chr(0)))
print('in')" """


@pytest.mark.parametrize("where", ["@", "/run", "/tmp"])
def test_a_socket_of_the_host_is_not_reached(box, plain, where):
    name = f"agent-test-{os.getpid()}.sock"
    if where != "@" and not os.access(where, os.W_OK):
        pytest.skip(f"{where} is not writable for this user")
    path = f"@{name}" if where == "@" else f"{where}/{name}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.replace("@", "\0"))
        try:
            server.listen()
            command = f"{SOCKET} {path} 2>/dev/null"
            assert box(command) == "(no output)\n[exit code 1]"
            assert box(command, network=True) == "(no output)\n[exit code 1]" or where == "@"
            assert plain(command) == "in\n[exit code 0]"
        finally:
            if where != "@":
                Path(path).unlink()


def test_run_is_empty_and_no_variable_leads_to_a_socket(one_box, place, tmp_path):
    names = {"SSH_AUTH_SOCK": "/run/agent.sock", "DOCKER_HOST": "unix:///run/docker.sock"}
    box = one_box(tmp_path, place, environ=names | {"OTHER": "kept"})
    text = box("ls -A /run; ls -A /var/run/; echo $SSH_AUTH_SOCK$DOCKER_HOST$OTHER")
    assert text == "kept\n[exit code 0]"


# -- processes


@pytest.fixture
def neighbour() -> Iterator[None]:
    """A process of the same user on the host, with a name and an environment."""
    environ = {"PATH": os.environ["PATH"], "WALL_NEIGHBOUR": "1"}
    process = subprocess.Popen(["sleep", NAP], env=environ)
    until(lambda: alive(SLEEPER))
    yield
    process.kill()
    process.wait()


def test_no_process_of_the_host_is_seen(box, plain, neighbour):
    looks = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -ac 'sleep 9'"
    reads = "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -ac ^WALL_NEIGHBOUR="
    assert [int(plain(command).split()[0]) > 0 for command in (looks, reads)] == [True, True]
    assert int(box(reads).split()[0]) == 0
    assert SLEEP not in box("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert box("test $PPID -lt 100 && ls /proc | grep -c '^[0-9]*$' | grep -qx '[0-9]'") == NOTHING


@pytest.mark.parametrize(
    "command, expected",
    [
        pytest.param(CAPS, NO_CAPS, id="no capability"),
        pytest.param(
            "grep NoNewPrivs /proc/self/status | tr -d '\\t'",
            "NoNewPrivs:1\n[exit code 0]",
            id="no new privileges",
        ),
        pytest.param("unshare -Ur true 2>/dev/null || echo no", "no\n[exit code 0]", id="user ns"),
        pytest.param("unshare -m true 2>/dev/null || echo no", "no\n[exit code 0]", id="mount ns"),
        pytest.param(
            f"{BWRAP} --bind / / true 2>/dev/null || echo no", "no\n[exit code 0]", id="nested"
        ),
        pytest.param("ls /proc/self/fd | xargs", "0 1 2 3\n[exit code 0]", id="descriptors"),
        pytest.param("cut -d ' ' -f 7 /proc/self/stat", "0\n[exit code 0]", id="no terminal"),
        pytest.param(
            "(: < /dev/tty) 2>/dev/null || echo no", "no\n[exit code 0]", id="no /dev/tty"
        ),
        pytest.param("ls /dev/pts", "ptmx\n[exit code 0]", id="no terminals of others"),
        pytest.param("ls -A /dev/shm /dev/mqueue 2>/dev/null | grep -v :", "*", id="shared memory"),
        pytest.param(
            "ls /dev | grep -xE 'sd.*|vd.*|nvme.*|mem|fuse|kvm|kmsg'",
            "(no output)\n[exit code 1]",
            id="no devices",
        ),
        pytest.param(
            "for f in {kernel/core_pattern,kernel/domainname,vm/drop_caches,kernel/modprobe}; do "
            "test -w /proc/sys/$f && echo $f; done; test -w /proc/sysrq-trigger",
            "(no output)\n[exit code 1]",
            id="no setting of the kernel",
        ),
    ],
)
def test_a_command_has_no_power_over_the_machine(box, command, expected):
    text = box(command)
    assert text == expected if expected != "*" else "agent-test" not in text


TYPE = f"""{PYTHON} -ISc "import fcntl, glob, os, termios
done = 0
for name in [0, 1, 2, '/dev/tty', '/dev/console', *glob.glob('/dev/pts/[0-9]*')]:
    try: fcntl.ioctl(name if type(name) is int else os.open(name, 2), termios.TIOCSTI, b'x')
    except OSError: continue
    done += 1
print('typed', done)" """


def test_a_command_does_not_type_into_a_terminal(box):
    assert box(TYPE) == "typed 0\n[exit code 0]"


def test_no_open_file_of_the_agent_is_inherited(one_box, place, tmp_path):
    path = place / "open.txt"
    path.write_text(SECRET)
    descriptor = os.open(path, os.O_RDWR)
    os.set_inheritable(descriptor, True)
    try:
        text = one_box(tmp_path, place)("ls -l /proc/[0-9]*/fd 2>/dev/null; echo end")
    finally:
        os.close(descriptor)
    assert ("open.txt" in text, text.endswith("end\n[exit code 0]")) == (False, True)


def test_tmp_is_private_and_shared_between_the_calls(box, plain):
    with tempfile.NamedTemporaryFile(dir="/tmp", prefix="agent-test-") as file:
        look = f"test -e {file.name} && echo seen || echo no"
        assert (box(look), plain(look)) == ("no\n[exit code 0]", "seen\n[exit code 0]")
    name = f"/tmp/agent-test-inner-{os.getpid()}"
    assert box(f"echo kept > {name}") == NOTHING
    assert not Path(name).exists()
    assert box(f"cat {name}; rm {name}") == "kept\n[exit code 0]"
    assert box('mktemp >/dev/null && mkdir -p "${XDG_CACHE_HOME:-$HOME/.cache}/x"') == NOTHING


def test_a_temporary_folder_of_the_user_is_not_needed(one_box, place, tmp_path):
    box = one_box(tmp_path, place, environ={"TMPDIR": "/var/tmp/not-there"})
    make = f"{PYTHON} -ISc 'import tempfile; tempfile.TemporaryFile()'"
    assert box(f"f=$(mktemp) && echo a > $f && cat $f && {make}") == "a\n[exit code 0]"


def test_a_job_lives_from_call_to_call_and_can_be_ended(box):
    text = box(f"{SLEEP} & echo up")
    pid = re.match(r"up\n\[still running in the background: pid (\d+) \(", text)[1]
    until(lambda: len(alive(SLEEPER)) == 1)
    assert box(f"kill -0 {pid} && kill {pid}") == NOTHING
    until(lambda: not alive(SLEEPER))


def test_jobs_of_both_hosts_end_with_the_session(one_box, tmp_path):
    box = one_box(tmp_path, "/nonexistent")
    for network in (False, True):
        box(
            f"{SLEEP} & setsid {SLEEP} >/dev/null 2>&1 & (nohup {SLEEP} &>/dev/null &)",
            network=network,
        )
    until(lambda: len(alive(SLEEPER)) == 6)
    box.agent.close()
    until(lambda: not alive(SLEEPER))


@pytest.mark.long
def test_what_is_left_of_a_command_that_took_too_long_is_ended(fresh):
    text = fresh(f"setsid {SLEEP} & echo begun; {SLEEP}", timeout=1)
    assert text.startswith("begun\n[timed out after 1 s")
    until(lambda: not alive(SLEEPER))
    assert fresh(CAPS) == NO_CAPS


@pytest.mark.parametrize("command", ["kill -9 $PPID; sleep 0.2", "kill $PPID; sleep 0.1"])
def test_the_wall_stands_again_after_its_host_was_ended(fresh, command):
    try:
        fresh(command)
    except AgentError:
        pass
    assert fresh(CAPS) == NO_CAPS
    assert fresh(attempts(ON_FOLDERS, ".agent")) == went_through()


# -- all else is as without a sandbox


@pytest.mark.parametrize(
    "command",
    [
        "exit 255",
        "exit 256",
        "kill -SEGV $$",
        "kill -TERM $$",
        "./no-program",
        "/etc/passwd",
        "false | true",
        "exec false",
        "echo '",
        "trap 'exit 9' EXIT; exit 1",
        "seq 1 100000 | head -3",
        "seq 1 100000",
        "head -c 3000000 /dev/zero | tr '\\0' x",
        "printf 'a\\0b\\xffc\\x1b[31md\\re'",
        "echo out; echo err >&2; echo out",
        "cat",
        "read line; echo $?",
        "umask; ulimit -a",
        "echo $- $0 $# $SHLVL",
        "grep -E '^Sig(Blk|Ign)' /proc/self/status",
        "basename $PWD; test $PWD -ef . && echo same; readlink /proc/self/cwd | xargs basename",
        'echo "$HOME|$LANG|$WALL|$PATH"; whoami; id -u; id -g',
        "nice; hostname; date +%Z",
        "cat <(echo sub); echo text > /dev/null; head -c 4 /dev/zero | wc -c; echo e >/dev/stderr",
        "head -c 4 /dev/urandom | wc -c; echo full > /dev/full",
        "exec 9>&1; echo nine >&9",
        "(exit 7) & wait $!; echo $?",
        "exec >&- 2>&-; exit 3",
        "mkdir -p made; echo a > made/a; ls -l made | cut -c 1-10; rm -r made",
        "git log -1 --format=%an; git check-ignore x; echo $?; git diff --stat HEAD first.txt",
        "type -t git python3 sed awk; command -v git",
        "shopt login_shell; echo ${BASH_VERSION%%.*}; locale 2>&1 | head -1",
    ],
)
def test_a_command_does_the_same_as_without_the_sandbox(box, plain, command):
    (box.root / "made").mkdir(exist_ok=True)
    assert box(command) == plain(command)


def test_what_a_command_makes_belongs_to_the_user_with_the_usual_mode(box, plain):
    shown = []
    for one in (box, plain):
        one("rm -f mine; umask 027; echo a > mine; chmod +x mine")
        found = (one.root / "mine").stat()
        shown.append((found.st_uid, found.st_gid, oct(found.st_mode)))
        (one.root / "mine").unlink()
    assert shown[0] == shown[1]


def test_a_long_output_is_kept_whole_for_the_model(fresh):
    text = fresh("seq 1 100000")
    (name,) = re.findall(r"read_file (\S+?)[\s\]]", text)
    assert (fresh.root / name).read_text().splitlines()[-1] == "100000"
    assert "quarantine" not in text


def test_output_comes_while_the_command_runs(box):
    start = len(box.events)
    box("echo one; sleep 0.05; echo two")
    shown = [event["text"] for kind, event in box.events[start:] if kind == "tool_output"]
    assert "".join(shown) == "one\ntwo\n"


# -- where the workspace may be

CHECK = """echo a > made && cat made; cat ~/.ssh/key 2>/dev/null; (echo evil > .git/hooks/evil) 2>&-
(echo evil > ../evil) 2>&-; git commit -q --allow-empty -m two && git log -1 --format=%s"""


def check_place(box: Box) -> None:
    """The workspace is written, committed in, and walled."""
    assert (box(CHECK), box(CAPS)) == ("a\ntwo\n[exit code 0]", NO_CAPS)
    assert (box.root / "made").read_text() == "a\n"
    assert not (box.root / ".git/hooks/evil").exists()
    assert not (box.root / "../evil").exists()


ODD = "a b'\"\u00fc $(x)\n-\\/work"


@pytest.mark.parametrize(
    "base, name",
    [
        pytest.param("/tmp", "home/work", id="in a home in tmp"),
        pytest.param("/tmp", ODD, id="odd characters in tmp"),
        pytest.param("", "home", id="the home itself"),
        pytest.param("", "home/work", id="in the home", marks=pytest.mark.long),
        pytest.param("", ODD, id="odd characters", marks=pytest.mark.long),
        pytest.param("/var/tmp", "work", id="the other tmp", marks=pytest.mark.long),
        pytest.param("/tmp", "home", id="the home itself in tmp", marks=pytest.mark.long),
        pytest.param("/tmp", "--ro-bind/--", id="looks like an option", marks=pytest.mark.long),
        pytest.param("/tmp", f"{'w' * 200}/{'x' * 200}", id="long", marks=pytest.mark.long),
    ],
)
def test_the_workspace_may_be_in_any_place(one_box, place, base, name):
    with tempfile.TemporaryDirectory(prefix="agent-test-", dir=base or place) as folder:
        root = repository(Path(folder) / name)
        put(Path(folder), ["home/.ssh/key"], SECRET)
        box = one_box(root, Path(folder) / "home")
        check_place(box)
        box.agent.close()


@pytest.mark.long
@pytest.mark.parametrize("home_folder", [None, "/", "/nonexistent", "/dev/null", "relative"])
def test_the_home_may_be_missing_or_odd(one_box, tmp_path, home_folder):
    box = one_box(repository(tmp_path / "work"), "", environ={"HOME": home_folder})
    check_place(box)


def test_a_workspace_named_through_a_link_is_the_folder_behind_it(one_box, place):
    root = repository(place / "behind" / "work")
    (place / "front").symlink_to(root)
    box = one_box(place / "front", place / "no-home")
    assert box("pwd -P; echo a > made") == f"{root}\n[exit code 0]"
    box.agent.close()
    assert (root / "made").read_text() == "a\n"


@pytest.mark.parametrize("base", ["tmp", "home"])
def test_a_worktree_is_a_workspace(one_box, place, tmp_path, base):
    trees = (tmp_path if base == "tmp" else place) / "trees"
    main = repository(trees / "main")
    git(main, "worktree", "add", "-q", "../side")
    root = trees / "side"
    before = tree(main / ".git/hooks"), seen(main / ".git/config")
    box = one_box(root, place / "no-home")
    assert box("git status --porcelain; git log --format=%s") == "first\n[exit code 0]"
    assert box(attempts(ON_FILES, ".git")) == went_through()
    assert box(attempts(ON_FOLDERS, "../main/.git/hooks")) == went_through()
    assert box(attempts(ON_FILES, "../main/.git/config")) == went_through()
    assert (tree(main / ".git/hooks"), seen(main / ".git/config")) == before
    assert box("echo a > made; cat made first.txt") == "a\nfirst\n[exit code 0]"


def test_a_working_tree_that_git_adds_stays_and_no_other_pointer(one_box, tmp_path):
    root = repository(tmp_path / "work")
    box = one_box(root, tmp_path / "home")
    assert box("git worktree add -q w/one -b one; git worktree add -q w/two -b two") == NOTHING
    commit = "git -c user.name=a -c user.email=a@b commit -q --allow-empty -m two"
    assert box(f"cd w/one && {commit}; git log -1 --format=%s") == "two\n[exit code 0]"
    told = box("git worktree add -q w/odd -b odd; unlink w/odd/.git; echo gitdir: /x > w/odd/.git")
    assert ("w/odd/.git" in told, (root / "w/odd/.git").exists()) == (True, False)
    swap = "mv .git/worktrees/late old && mkdir evil && ln -s ../../evil .git/worktrees/late"
    told = box(f"git worktree add -q w/late -b late && {swap}")
    assert ("w/late/.git" in told, (root / "w/late/.git").exists()) == (True, False)
    assert (root / "w/two/.git").exists()


@pytest.mark.parametrize("base", ["tmp", "home"])
def test_a_part_of_a_repository_is_read_and_the_result_says_why_no_more(
    one_box, place, tmp_path, base
):
    whole = repository((tmp_path if base == "tmp" else place) / "whole")
    (whole / "part").mkdir()
    box = one_box(whole / "part", tmp_path / "home")
    assert box("git log --format=%s; git status --porcelain") == "first\n[exit code 0]"
    assert "git's own folder is outside" in box("echo a > made; git add made")
    assert (box("cat made"), git(whole, "status", "--porcelain")) == (
        "a\n[exit code 0]",
        "?? part/\n",
    )


def test_a_note_on_the_sandbox_is_true(one_box, tmp_path):
    put(tmp_path / "work", [".env"], SECRET)
    box = one_box(tmp_path / "work", tmp_path / "home")
    lost = "echo 'os.environ: name or service not known'; exit 1"
    assert "network=true" in box(lost)
    assert "[hidden from commands: .env]" in box("cat .env")
    assert box(lost, network=True).split("\n")[1:] == ["[exit code 1]"]
    box.agent.workspace.host.online = True
    assert box(lost).split("\n")[1:] == ["[exit code 1]"]


@pytest.mark.parametrize("root", ["/", "/proc/self", "/sys"])
def test_a_workspace_that_no_wall_can_be_around_is_said_to_be_one(root):
    assert Sandbox(Path(root), GIT, ()).trouble == f"the workspace is {root}"


BACKEND = """import os, zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    note = "hello-1.dist-info/"
    files = {"hello.pth": os.getcwd(), note + "METADATA": "Metadata-Version: 2.1\\nName: hello\\n"
             "Version: 1\\n", note + "WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\n"
             "Tag: py3-none-any\\n"}
    files[note + "RECORD"] = "".join(name + ",,\\n" for name in files)
    with zipfile.ZipFile(os.path.join(folder, "hello-1-py3-none-any.whl"), "w") as wheel:
        for name, text in files.items(): wheel.writestr(name, text)
    return "hello-1-py3-none-any.whl"
"""


@pytest.mark.long
def test_an_unpacked_package_is_installed_in_place(one_box, place, tmp_path):
    if not importlib.util.find_spec("pip"):
        pytest.skip("this Python has no pip")
    lines = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    lines += '[project]\nname = "hello"\nversion = "1"\n'
    (tmp_path / "pyproject.toml").write_text(lines)
    (tmp_path / "backend.py").write_text(BACKEND)
    box = one_box(tmp_path, place, sandbox_read=(sys.prefix, sys.base_prefix))
    options = "--no-index --disable-pip-version-check --prefix inst"
    for more in ("", "--no-build-isolation"):
        pip = f"rm -rf inst; {shlex.quote(sys.executable)} -m pip install -q {options} {more} -e ."
        text = box(pip, timeout=120)
        found = [path.read_text() for path in tmp_path.glob("inst/lib/*/site-packages/hello.pth")]
        assert (found, text.splitlines()[-1]) == ([str(tmp_path)], "[exit code 0]"), text


# -- spellings that rules alone can not catch

# `.g#t` is `.git`, where the wall is, or `.got`, where the same command must succeed; `%64` is
# the base64 of a copying command.
HOOKS = {
    "a variable": "d=.g#t; cp payload/pre-commit $d/hooks/",
    "pieces": 'a=.g; b=#t; c=hooks; cat payload/pre-commit > "$a$b/$c/pre-commit"',
    "a class": "cp payload/pre-commit .g[#]t/h*ks/",
    "base64": "echo %64 | base64 -d > s.sh; bash s.sh",
    "python": f"{PYTHON} -ISc \"open('.g' + '#t/hooks/pre-commit', 'w').write('evil')\"",
    "awk": 'awk \'BEGIN { print "evil" > (".g" "#t/hooks/pre-commit") }\'',
    "a script": "printf 'cp payload/pre-commit .g#t/ho%s/' oks > s.sh; bash s.sh",
    "a link": "ln -sfn .g#t way4; cp payload/pre-commit way4/hooks/",
    "pushd": 'pushd .g#t; pushd hooks; cp "$OLDPWD/../payload/pre-commit" .',
    "tar": "d=g#t; tar -C payload -cf x.tar pre-commit; tar -C .$d/hooks -xf x.tar",
    "find": "find .g#t -name hooks -exec cp payload/pre-commit '{}' ';'",
    "xargs": "d=.g#t; echo $d/hooks | xargs cp payload/pre-commit",
    "eval": "eval \"$(echo 'cp payload/pre-commit .g#t/ho'oks/)\"",
    "a here-string": "bash <<< 'cp payload/pre-commit .g#t/h\"oo\"ks/'",
    "a function": 'f() { cp payload/pre-commit "$1/hooks"; }; f .g#t',
    "a job": "d=.g#t; (cp payload/pre-commit $d/hooks/) & wait",
    "a moved parent": "d=.g#t; mv $d $d.2; mkdir -p $d/hooks; cp payload/* $d/hooks",
}
READS = {
    "a glob": "cat .#n*",
    "a class": "cat .[#]nv",
    "a variable": 'd=#nv; cat ".$d"',
    "python": f"{PYTHON} -ISc \"print(open('.#' + 'nv').read())\"",
    "all files": "for f in .#*; do test -f $f && cat $f; done",
    "tar": "d=#nv; tar cf - .$d | tr -d '\\0'",
    "find": "find . -maxdepth 1 -name '.#n?' -exec cat '{}' ';'",
}


def spelled(template: str, letter: str) -> str:
    """The command for `.git` or `.env` (i, e), or for their harmless twins (o, a)."""
    copying = base64.b64encode(f"cp payload/pre-commit .g{letter}t/hooks/".encode()).decode()
    return template.replace("%64", copying).replace("#", letter)


SPELLINGS = {f"hook: {name}": spelled(text, "i") for name, text in HOOKS.items()}
SPELLINGS |= {f"secret: {name}": spelled(text, "e") for name, text in READS.items()}
# Rules are a tripwire: the wall is in the two tests below.
UNSEEN = {"hook: base64", "hook: python", "hook: awk", "hook: a script", "hook: a link"}
UNSEEN |= {"hook: find", "secret: python"}
EXPECTED = pytest.mark.xfail(reason="rules alone can not see it", strict=True)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(text, id=name, marks=EXPECTED if name in UNSEEN else ())
        for name, text in SPELLINGS.items()
    ],
)
def test_rules_alone_catch_it(box, command):
    policy = make_policy(box.settings, "auto", box.agent.workspace, sandboxed=True)
    assert decide(policy, "bash", "run", command).outcome in ("deny", "human")


@pytest.mark.parametrize("template", HOOKS.values(), ids=HOOKS.keys())
def test_the_sandbox_catches_what_rules_do_not_see_being_written(box, template):
    before = tree(box.root / ".git/hooks")
    box(f"rm -f .got/hooks/pre-commit s.sh x.tar; {spelled(template, 'o')}")
    assert "evil" in (box.root / ".got/hooks/pre-commit").read_text()
    box(spelled(template, "i"))
    assert tree(box.root / ".git/hooks") == before


@pytest.mark.parametrize("template", READS.values(), ids=READS.keys())
def test_the_sandbox_catches_what_rules_do_not_see_being_read(box, template):
    assert TWIN in box(spelled(template, "a"))
    assert SECRET not in box(spelled(template, "e"))


# -- on, off and why


@pytest.mark.parametrize(
    "mode, sandbox, on",
    [("auto", "on", True), ("ask", "on", True), ("auto", "auto", True), ("ask", "auto", False)]
    + [("auto", "off", False)],
)
def test_the_first_event_says_whether_commands_are_in_the_sandbox(
    one_box, tmp_path, mode, sandbox, on
):
    box = one_box(tmp_path, "/nonexistent", mode=mode, sandbox=sandbox)
    state = box.agent.workspace.sandbox_state
    assert (box.state, state == "on", on or state.startswith("off: ")) == (state, on, True)
    assert (box(CAPS) == NO_CAPS) == on or os.getuid() != 0
    assert [event for kind, event in box.events if kind == "notice"] == []


def test_the_sandbox_is_switched_while_the_agent_runs(one_box, tmp_path, listener):
    box = one_box(tmp_path, "/nonexistent", sandbox="off")
    heard = [box(connect(listener))]
    for wanted in (True, False):
        box.agent.workspace.use_sandbox(wanted)
        heard.append(box(connect(listener)))
    pong, no = "pong\n[exit code 0]", "(no output)\n[exit code 1]"
    assert heard == [pong, no, pong]


def test_an_unknown_state_is_refused(tmp_path):
    with pytest.raises(AgentError):
        Settings(sandbox="perhaps", workspace=str(tmp_path))
    assert dataclasses.replace(Settings(), sandbox="off").sandbox == "off"


def hidden() -> tuple[str, ...]:
    """What to run a program under so that it finds no bubblewrap."""
    return (
        BWRAP,
        "--die-with-parent",
        "--dev-bind",
        "/",
        "/",
        "--ro-bind",
        os.devnull,
        BWRAP,
        "--",
    )


def nested() -> tuple[str, ...]:
    """What to run a program under so that bubblewrap is there and does not work."""
    flags = ("--unshare-user", "--disable-userns", "--dev-bind", "/", "/", "--proc", "/proc")
    return (BWRAP, "--die-with-parent", *flags, "--")


def events_of(text: str) -> list[dict]:
    """The events of a JSON stream."""
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def fake(workspace, tmp_path) -> str:
    """A PATH with a bubblewrap of the workspace, and one of another user, before the real one."""
    folders = [workspace / "bin", tmp_path / "foreign", tmp_path / "linking"]
    for folder in folders[:2]:
        folder.mkdir()
        (folder / "bwrap").write_text(f"#!/bin/sh\ntouch {workspace}/FAKE\nexit 1\n")
        (folder / "bwrap").chmod(0o755)
    if os.getuid() == 0:
        os.chown(folders[1] / "bwrap", 65534, 65534)
    folders[2].mkdir()
    (folders[2] / "bwrap").symlink_to(folders[0] / "bwrap")
    return ":".join([".", "bin", *map(str, folders), os.environ["PATH"]])


RUN = {"call": "bash", "arguments": {"command": f"echo a > made; {CAPS}"}}


@pytest.mark.parametrize(
    "under", [hidden, pytest.param(nested, marks=pytest.mark.long)], ids=["missing", "broken"]
)
def test_on_refuses_to_start_where_it_can_not_work(run_agent, workspace, fake, under):
    with FlakyServer([RUN, "done"]) as server:
        flags = ("--yes", "--sandbox", "on", "go")
        done = run_agent(*flags, server=server, under=under(), env={"PATH": fake})
        assert (done.returncode not in (0, 77), server.requests) == (True, [])
    assert "sandbox" in done.stderr
    assert not (workspace / "FAKE").exists()


@pytest.mark.parametrize(
    "under", [hidden, pytest.param(nested, marks=pytest.mark.long)], ids=["missing", "broken"]
)
def test_auto_says_once_why_there_is_none_and_goes_on(run_agent, workspace, fake, under):
    with FlakyServer([RUN, RUN, "done"]) as server:
        flags = ("--yes", "--json", "go")
        done = run_agent(*flags, server=server, under=under(), env={"PATH": fake})
        events = events_of(done.stdout)
    told = [e for e in events if e["type"] == "notice" and "sandbox" in e["text"].lower()]
    assert re.match(r"off: \S", events[0]["sandbox"])
    assert (len(told), done.returncode, events[-1]["status"]) == (1, 0, "done")
    assert (workspace / "made").read_text() == "a\n"
    assert not (workspace / "FAKE").exists()


def test_no_bubblewrap_but_that_of_the_system_is_used(run_agent, workspace, fake):
    with FlakyServer([RUN, "done"]) as server:
        done = run_agent("--yes", "--json", "go", server=server, env={"PATH": fake})
        assert results(server.requests[-1]) == [NO_CAPS]
    assert (done.returncode, events_of(done.stdout)[0]["sandbox"]) == (0, "on")
    assert ((workspace / "made").read_text(), (workspace / "FAKE").exists()) == ("a\n", False)


def test_mode_auto_at_the_prompt_puts_the_next_command_into_the_sandbox(terminal):
    script = [{"call": "bash", "arguments": {"command": c}} for c in (CAPS, TYPE, "ls /dev/pts")]
    with FlakyServer([*script, "all is done"]) as server:
        screen = terminal("--mode", "ask", server=server)
        screen.prompt()
        screen.send("/mode auto\r")
        screen.prompt()
        screen.send("go\r")
        screen.expect("all is done")
        screen.prompt()
        assert results(server.requests[-1]) == [
            NO_CAPS,
            "typed 0\n[exit code 0]",
            "ptmx\n[exit code 0]",
        ]
        screen.send("/exit\r")
        assert screen.wait() == 0


@pytest.mark.long
def test_a_person_sees_why_there_is_no_sandbox(tmp_path, workspace, environment):
    with FlakyServer(["hello"]) as server:
        command = [*hidden(), sys.executable, "-m", "agent", "--mode", "auto"]
        screen = Terminal(command, workspace, environment(server))
        try:
            assert "sandbox" in screen.prompt().lower()
            screen.send("/exit\r")
            assert screen.wait() == 0
        finally:
            screen.close()
    nothing_runs_in(tmp_path)


# -- the agent as a process


def both(request: dict) -> dict:
    """A model that starts a job and then waits for a command that does not end."""
    first = request["messages"][-1]["role"] == "user"
    command = f"{SLEEP} & setsid {SLEEP} & touch begun; test -w /etc || echo walled"
    return {"call": "bash", "arguments": {"command": command if first else SLEEP, "timeout": 600}}


@pytest.mark.parametrize("number, code", [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_nothing_is_left_when_the_agent_is_ended(start_agent, workspace, number, code):
    with FlakyServer([both, both]) as server:
        process = start_agent("--yes", "--sandbox", "on", "go", server=server)
        until(lambda: len(alive(SLEEPER)) == 3 and len(server.requests) == 2)
        assert "walled" in results(server.requests[-1])[0]
        process.send_signal(number)
        assert process.wait(60) == code
        until(lambda: not alive(SLEEPER))
    until(lambda: not inside(workspace))
    assert sorted(path.name for path in workspace.iterdir()) == [".agent", "begun"]


@pytest.mark.long
def test_the_key_of_the_agent_is_in_no_environment_that_commands_can_read(run_agent):
    look = "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -ac ^AGENT_API_KEY="
    script = [{"call": "bash", "arguments": {"command": look}}, "done"]
    heard = []
    for sandbox in ("on", "off"):
        with FlakyServer(script) as server:
            assert run_agent("--yes", "--sandbox", sandbox, "go", server=server).returncode == 0
            heard += [int(results(server.requests[-1])[0].split()[0]) > 0]
    assert heard == [False, True]


# -- races


@pytest.mark.long
def test_a_job_that_swaps_folders_does_not_bring_quarantine_to_the_outside(fresh, place):
    put(place, ["victim/.envrc", "victim/.vscode/tasks.json"], "outside")
    before = tree(place / "victim")
    swap = f"""(while test ! -e stop; do mkdir -p lure; echo x > lure/.envrc; mkdir -p lure/.vscode
    mv lure old; ln -s {place}/victim lure; unlink lure; rm -rf old; done; touch stopped) &>out &"""
    fresh(swap)
    for _ in range(100):
        fresh("true")
    fresh("touch stop; until test -e stopped; do sleep 0.01; done; rm -rf stop stopped lure old")
    assert tree(place / "victim") == before
    assert armed(fresh.root) == []


# -- the program, and the walls of macOS ---------------------------------------------------------


@pytest.fixture
def program(place) -> Iterator[Path]:
    """A program in a folder of its own, that only its owner can change."""
    folder = Path(tempfile.mkdtemp(dir=place))
    shutil.copy(shutil.which("true"), folder / "bwrap")
    for path in (folder / "bwrap", folder):
        path.chmod(0o755)
    yield folder / "bwrap"
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda path: os.chown(path, 12345, 12345), id="another's"),
        pytest.param(lambda path: os.chown(path.parent, 12345, 12345), id="another's folder"),
        pytest.param(lambda path: path.chmod(0o757), id="written by all"),
        pytest.param(lambda path: path.chmod(0o775), id="written by a group"),
        pytest.param(lambda path: path.parent.chmod(0o777), id="folder written by all"),
    ],
)
@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a program of root's")
def test_a_program_that_others_can_change_builds_no_walls(program, tmp_path, spoil):
    assert trusted_program([str(program)], tmp_path) == str(program)
    spoil(program)
    assert trusted_program([str(program)], tmp_path) == ""
    assert trusted_program([str(program), BWRAP], tmp_path) == os.path.realpath(BWRAP)


def test_only_a_program_of_root_builds_walls(program, tmp_path):
    expected = str(program) if os.getuid() == 0 else ""
    assert trusted_program([str(program)], tmp_path) == expected
    either = expected or os.path.realpath(BWRAP)
    assert trusted_program([str(program), BWRAP], tmp_path) == either


SEATBELT_RULE = re.compile(r'\((allow|deny) ([^()]+?)(?: \((subpath|literal) "([^"]+)"\))?\)')


def ruling(profile: str, operation: str, path: Path) -> str:
    """What the last rule of a macOS profile that fits says of an operation on a path."""
    said = ""
    for word, names, kind, where in SEATBELT_RULE.findall(profile):
        folders = {"": [], "literal": [path], "subpath": [path, *path.parents]}[kind]
        fits = any(re.fullmatch(name.replace("*", ".*"), operation) for name in names.split())
        if names == "default" or (fits and (not kind or Path(where) in folders)):
            said = word
    return said


def test_the_profile_of_macos_builds_the_same_walls(box, house):
    box("true")
    hosts = box.agent.workspace.host
    profile = hosts.sandbox.profile(hosts.sandbox.mounts(hosts.guarded), network=False)

    def allowed(operation: str, folder: Path, names: list[str]) -> list[str]:
        return [name for name in names if ruling(profile, operation, folder / name) == "allow"]

    free = ["new.txt", "first.txt", ".git/index", "sub/new.txt"]
    assert allowed("file-write-data", box.root, free) == free
    assert allowed("file-write-data", box.root, [*PROTECTED_FILES, *PROTECTED_FOLDERS]) == []
    assert allowed("file-write-unlink", box.root, HOLDERS) == []
    assert allowed("file-write-data", house, HOME_READABLE) == []
    assert allowed("file-read-data", box.root, READABLE_FILES) == READABLE_FILES
    assert allowed("file-read-data", house, HOME_READABLE) == HOME_READABLE
    assert allowed("file-read-data", box.root, [*SECRET_FILES, *KEY_FILES]) == []
    assert allowed("file-read-data", house, HOME_SECRETS) == []


def test_the_profile_of_macos_cuts_the_network_off_unless_it_is_asked_for(box):
    sandbox = box.agent.workspace.host.sandbox
    cut, free = (sandbox.profile([], network=network) for network in (False, True))
    assert [rule for rule in cut.split("(") if "network*" in rule] == [
        "deny network*) ",
        "allow network* ",
    ]
    assert ("network*" in free, "(deny network-outbound (remote unix))" in free) == (False, True)


def test_what_a_person_permits_later_is_open_for_the_next_command(place, house, one_box):
    root = repository(place / "later" / "work")
    put(root, [".env", ".mcp.json", ".npmrc"], "before")
    box = one_box(root, house)
    command = "cat .env; for f in .env .mcp.json .npmrc; do echo new >> $f; done"
    assert "before" not in box(command)
    for rule in ("read_file .env", "write_file .env", "write_file .mcp.json"):
        box.agent.add_rule("allow", rule)
    assert box(command).startswith("before .env\n")
    told = {name: "new" in (root / name).read_text() for name in (".env", ".mcp.json", ".npmrc")}
    assert told == {".env": True, ".mcp.json": True, ".npmrc": False}
