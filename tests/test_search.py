"""Section 6, search: what `grep` and `list_files` find, what they leave out and how they say so.

Calls go through the agent's loop: a scripted model asks for them, and the next request carries the
results. Three folders of programs serve as PATH: "rg" (git and rg), "git" (git alone), "none". What
is found must be the same with each of them, and the same as a straightforward reference: Python's
`re` on each line, and git itself for what is ignored.
"""

import fnmatch
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import inside, results, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent import Settings, build_agent, concealed
from flaky_server import FlakyServer

Call = tuple[str, dict[str, Any]]
MOST_CHARS = 20_000  # of one result
QUIET_GIT = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "HOME": "/nonexistent"}
BOMS = (b"\xff\xfe", b"\xfe\xff")


# -- calls, and what their results say


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of folders for PATH: rg, git, none."""
    base = tmp_path_factory.mktemp("programs")
    for name, inner in {"rg": ("rg", "git"), "git": ("git",), "none": ()}.items():
        (base / name).mkdir()
        for program in inner:
            found = shutil.which(program)
            if found is None:
                pytest.skip(f"{program} is not installed")
            (base / name / program).symlink_to(found)
    return base


@pytest.fixture
def paths(programs: Path) -> dict[str, str]:
    """PATH by the name of its best program."""
    return {name: str(programs / name) for name in ("rg", "git", "none")}


class Model:
    """A model that makes the calls it is given, and an agent that runs them in a folder."""

    def __init__(self, folder: Path, path: str | None = None, **environ: str) -> None:
        self.calls: list[dict[str, Any]] = []
        self.server = FlakyServer(self.script()).start()
        known = {"PATH": path or os.environ["PATH"], "LANG": "C.UTF-8", **QUIET_GIT, **environ}
        options = {"save_session": False, "bare": True, "compact_at": 0, "environ": known}
        options |= {"sandbox": "off"}
        place = {"base_url": self.server.url, "workspace": str(folder)}
        made = Settings(model="m", api_key="k", mode="auto", max_turns=0, **place, **options)
        self.agent = build_agent(made)

    def script(self) -> Iterator[Any]:
        """Its replies: the calls, and when their results are there the end of the turn."""
        while True:
            yield {"calls": self.calls}
            yield "done"

    def use(self, calls: Iterable[Call]) -> list[str]:
        """The results of the calls of one reply."""
        self.calls = [{"name": name, "arguments": arguments} for name, arguments in calls]
        self.agent.run("go")
        sent = self.server.requests[-1]
        assert sent.problems == []
        return results(sent)[-len(self.calls) :]

    def close(self) -> None:
        """End both."""
        self.agent.close()
        self.server.close()


def use(folder: Path, calls: Iterable[Call], path: str | None = None, **environ: str) -> list[str]:
    """The results of the calls of one reply of a new model."""
    with closing(Model(folder, path, **environ)) as model:
        return model.use(calls)


def ask(folder: Path, tool: str, programs: str | None = None, **arguments: Any) -> str:
    """The result of one call."""
    return use(folder, [(tool, arguments)], programs)[0]


def split(text: str) -> tuple[list[str], str]:
    """What was found, line by line, and the note in brackets below it."""
    lines = text.split("\n")
    end = len(lines)
    while end and re.match(r"\[.* .*\]$|\(no ", lines[end - 1]):
        end -= 1
    return lines[:end], "\n".join(lines[end:])


def found(text: str) -> list[str]:
    """What was found, line by line."""
    return split(text)[0]


def skipped(text: str) -> str:
    """The part of the note that says what was skipped."""
    return split(text)[1].lower().partition("skipped")[2]


def counted(text: str, word: str) -> int:
    """The number that the note gives for a kind of what was skipped; 0 if it names none."""
    number = re.search(rf"(\d+)[^,;\d]*{word}", skipped(text))
    return int(number[1]) if number else 0


def all_pages(model: Model, calls: list[Call]) -> list[list[str]]:
    """What each call finds on all its pages together."""
    taken: list[list[str]] = [[] for _ in calls]
    todo = {n: (name, dict(arguments)) for n, (name, arguments) in enumerate(calls)}
    while todo:
        texts = model.use(todo.values())
        for n, text in zip(list(todo), texts, strict=True):
            lines, note = split(text)
            taken[n] += lines
            more = re.search(r"offset=(\d+)", note)
            if more is None:
                del todo[n]
                continue
            assert int(more[1]) == len(taken[n]), f"{todo[n]} goes on at the wrong place: {note}"
            todo[n][1]["offset"] = int(more[1])
    return taken


def write(folder: Path, files: dict[str, str | bytes]) -> None:
    """Make files, with the folders that they lie in."""
    for name, content in files.items():
        target = os.path.join(os.fsencode(folder), os.fsencode(name))
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)


def git(folder: Path, *words: str, **options: Any) -> str:
    """Run git in a folder; what it says."""
    person = ["-c", "user.name=T", "-c", "user.email=t@example.org"]
    environ = {"PATH": os.environ["PATH"], **QUIET_GIT}
    command = ["git", *person, "-c", "init.defaultBranch=main", *words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, **options)
    assert done.returncode == 0 or options.get("check") is False, done.stderr
    return os.fsdecode(done.stdout)


def in_git(folder: Path) -> list[str]:
    """The files that git knows or does not ignore, sorted."""
    return sorted(git(folder, "ls-files", "-coz", "--exclude-standard").split("\0")[:-1])


# -- list_files: patterns, order, pages

TREE = (
    ".github/workflows/ci.yml .hidden README.md a.py docs/a.md docs/deep/b.md"
    " src/.env.example src/__init__.py src/a.py src/sub/b.py src/sub/deep/c.py test_a.py"
).split()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A model for a folder with these files."""
    folder = tmp_path_factory.mktemp("tree")
    write(folder, dict.fromkeys(TREE, "needle\n"))
    with closing(Model(folder)) as model:
        yield model


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        pytest.param({}, TREE, id="all"),
        pytest.param({"pattern": "*"}, TREE, id="star"),
        pytest.param({"pattern": "**"}, TREE, id="two stars"),
        pytest.param({"pattern": "a.py"}, ["a.py", "src/a.py"], id="name at any depth"),
        pytest.param(
            {"pattern": "*.md"}, ["README.md", "docs/a.md", "docs/deep/b.md"], id="*.md anywhere"
        ),
        pytest.param({"pattern": "src/*.py"}, ["src/__init__.py", "src/a.py"], id="one folder"),
        pytest.param(
            {"pattern": "src/**/*.py"},
            ["src/__init__.py", "src/a.py", "src/sub/b.py", "src/sub/deep/c.py"],
            id="src/**/*.py",
        ),
        pytest.param({"pattern": "**/b.*"}, ["docs/deep/b.md", "src/sub/b.py"], id="**/b.*"),
        pytest.param({"pattern": "**/a.py"}, ["a.py", "src/a.py"], id="** may be no folder"),
        pytest.param({"pattern": "docs/**"}, ["docs/a.md", "docs/deep/b.md"], id="all below"),
        pytest.param({"pattern": "*/*/c.py"}, [], id="a star stops at a slash"),
        pytest.param({"pattern": "src/*/deep/*"}, ["src/sub/deep/c.py"], id="star as a folder"),
        pytest.param(
            {"path": "src/sub", "pattern": "?.py"},
            ["src/sub/b.py", "src/sub/deep/c.py"],
            id="one character",
        ),
        pytest.param({"pattern": "[b-c].py"}, ["src/sub/b.py", "src/sub/deep/c.py"], id="class"),
        pytest.param({"pattern": "[!a-b].py"}, ["src/sub/deep/c.py"], id="no class"),
        pytest.param(
            {"pattern": ".github/workflows/*.yml"}, [".github/workflows/ci.yml"], id="dots G07"
        ),
        pytest.param({"pattern": "*.yml"}, [".github/workflows/ci.yml"], id="below dots G07"),
        pytest.param({"pattern": ".*"}, [".hidden", "src/.env.example"], id="dot files"),
        pytest.param({"path": ".github"}, [".github/workflows/ci.yml"], id="a dot folder"),
        pytest.param({"path": "docs"}, ["docs/a.md", "docs/deep/b.md"], id="path"),
        pytest.param({"path": "./docs/"}, ["docs/a.md", "docs/deep/b.md"], id="./path/"),
        pytest.param({"path": "src", "pattern": "b.py"}, ["src/sub/b.py"], id="path and name"),
        pytest.param({"path": "src", "pattern": "sub/*"}, ["src/sub/b.py"], id="below the path"),
        pytest.param({"path": "src/a.py"}, ["src/a.py"], id="a file"),
        pytest.param({"pattern": "nothing.*"}, [], id="none"),
    ],
)
def test_a_pattern_finds_exactly_these_files(
    tree: Model, where: dict[str, str], expected: list[str]
) -> None:
    listed, searched = tree.use([("list_files", where), ("grep", {"regex": "d", **where})])
    assert found(listed) == expected
    assert found(searched) == [f"{name}:1:needle" for name in expected]


def test_all_is_sorted_by_the_whole_relative_path(workspace: Path) -> None:
    names = [
        "a/x",
        "a-b/x",
        "a.txt",
        "a b/x",
        "A/x",
        "a/b/x",
        "é",
        "z",
        "Z",
        "a0",
        "_",
        "日",
        "a/-",
    ]
    write(workspace, dict.fromkeys(names, "k\n"))
    listed, searched = use(workspace, [("list_files", {}), ("grep", {"regex": "k"})])
    assert found(listed) == sorted(names)
    assert found(searched) == [f"{name}:1:k" for name in sorted(names)]


@pytest.mark.parametrize("name", ["list_files", "grep"])
def test_pages_are_together_everything_once_and_each_carries_the_total(
    workspace: Path, paths: dict[str, str], name: str
) -> None:
    names = [f"{n * 7919 % 1000:03}/a_long_name_that_fills_the_page_{n % 7}" for n in range(1000)]
    write(workspace, dict.fromkeys(names, "needle\n"))
    expected = sorted(names) if name == "list_files" else [f"{n}:1:needle" for n in sorted(names)]
    call = (name, {} if name == "list_files" else {"regex": "needle"})
    first, again = (use(workspace, [call], paths[path])[0] for path in ("rg", "git"))
    assert first == again
    assert re.search(rf"1-{len(found(first))} of 1,?000\b.*offset={len(found(first))}\b", first)
    with closing(Model(workspace, paths["rg"])) as model:
        assert all_pages(model, [call]) == [expected]
        (last,) = model.use([(name, {**call[1], "offset": 995})])
    assert found(last) == expected[995:]
    assert re.search(r"996-1,?000 of 1,?000\b", last) and "offset=" not in last


def test_a_grep_with_many_matches_gives_the_total_on_every_page(workspace: Path) -> None:
    write(workspace, dict.fromkeys("abc", "needle in a line of some length\nhay\n" * 313))
    with closing(Model(workspace)) as model:
        (text,) = model.use([("grep", {"regex": "needle"})])
        (lines,) = all_pages(model, [("grep", {"regex": "needle"})])
    last = len(found(text))
    assert re.search(rf"\[matches 1-{last} of 939; .*offset={last}\]", text), split(text)[1]
    assert lines == [
        f"{name}:{n}:needle in a line of some length" for name in "abc" for n in range(1, 627, 2)
    ]


def test_pages_with_context_show_every_match_once(workspace: Path) -> None:
    write(workspace, {"f": "".join(f"{'x' if n % 9 else 'needle'} {n}\n" for n in range(9000))})
    seen: list[str] = []
    given_: dict[str, Any] = {"regex": "needle", "context": 2, "offset": 0}
    with closing(Model(workspace)) as model:
        while given_["offset"] is not None:
            lines, note = split(model.use([("grep", given_)])[0])
            seen += [line for line in lines if re.match(r"f:\d+:", line)]
            more = re.search(r"offset=(\d+)", note)
            assert not more or int(more[1]) > given_["offset"]
            given_["offset"] = int(more[1]) if more else None
    assert seen == [f"f:{n + 1}:needle {n}" for n in range(0, 9000, 9)]


def test_the_same_call_says_the_same_whenever_it_is_made(
    workspace: Path, paths: dict[str, str]
) -> None:
    write(workspace, {f"{n * 37 % 101}/{n}.txt": f"needle {n}\n" * 3 for n in range(300)})
    calls = [("grep", {"regex": "needle", "offset": 100}), ("list_files", {"offset": 50})]
    texts = {tuple(use(workspace, calls * 3, paths[name])) for name in ("rg", "git") * 2}
    assert len(texts) == 1
    assert len({text for answers in texts for text in answers}) == 2


def test_a_path_that_does_not_exist_is_an_error_that_names_it(workspace: Path) -> None:
    write(workspace, {"source/a.py": "x\n"})
    calls = [("list_files", {"path": "sorce"}), ("grep", {"regex": "x", "path": "sorce"})]
    for text in use(workspace, calls):
        assert text.startswith("error: ") and "sorce" in text and "not exist" in text


# -- what is always skipped, and what is not

SKIPPED = (
    ".git .agent node_modules .venv venv __pycache__ .mypy_cache .pytest_cache .ruff_cache .tox"
).split()


@pytest.mark.parametrize("where", ["", "deep/down/"], ids=["at the top", "deep"])
def test_some_folders_are_always_skipped_and_the_result_names_them(
    workspace: Path, where: str
) -> None:
    write(workspace, {f"{where}{name}/p/j.js": "needle\n" for name in SKIPPED})
    write(workspace, {"a.txt": "needle\n"})
    listed, searched = use(workspace, [("list_files", {}), ("grep", {"regex": "needle"})])
    assert (found(listed), found(searched)) == (["a.txt"], ["a.txt:1:needle"])
    for text in (skipped(listed), skipped(searched)):
        assert "node_modules" in text or "folders" in text


@pytest.mark.parametrize("name", [name for name in SKIPPED if name not in (".git", ".agent")])
def test_one_skipped_folder_is_said_to_be_skipped(workspace: Path, name: str) -> None:
    write(workspace, {f"sub/{name}/p/j.js": "needle\n"})
    text = ask(workspace, "grep", regex="needle")
    assert found(text) == [] and re.search(rf"{re.escape(name)}|1 folder", skipped(text)), text


def test_a_file_with_the_name_of_a_skipped_folder_is_found(workspace: Path) -> None:
    names = sorted(set(SKIPPED) - {".git", ".agent"})
    write(workspace, dict.fromkeys(names, "needle\n"))
    listed, searched = use(workspace, [("list_files", {}), ("grep", {"regex": "needle"})])
    assert found(listed) == names
    assert found(searched) == [f"{name}:1:needle" for name in names]


@pytest.mark.parametrize("name", [".git", "node_modules", ".venv", "__pycache__", "sub/venv"])
def test_a_skipped_folder_that_is_named_is_searched(workspace: Path, name: str) -> None:
    write(workspace, {f"{name}/p/j.js": "needle\n", "a.txt": "needle\n"})
    places = [name, f"./{name}/", f"{name}/p", f"{name}/p/j.js", f"{workspace}/{name}/p"]
    calls = [("list_files", {"path": place}) for place in places]
    texts = use(workspace, calls + [("grep", {"regex": "need", "path": p}) for p in places])
    expected = [[f"{name}/p/j.js"]] * 5 + [[f"{name}/p/j.js:1:needle"]] * 5
    assert [found(text) for text in texts] == expected


def test_nothing_found_is_said_together_with_what_was_skipped(workspace: Path) -> None:
    write(workspace, {"a.txt": "x\n", "b.log": "needle\n", ".gitignore": "*.log\n"})
    calls = [("list_files", {"pattern": "*.js"}), ("grep", {"regex": "needle"})]
    listed, searched = use(workspace, calls)
    assert listed.startswith("(no files match ") and "*.js" in listed
    assert searched.startswith("(no match ") and "needle" in searched
    assert counted(searched, "ignored") == 1


def test_where_nothing_was_skipped_nothing_is_said_about_it(workspace: Path) -> None:
    write(workspace, {"a.txt": "needle\n", "sub/b.txt": "needle\n"})
    calls = [("list_files", {}), ("grep", {"regex": "needle"}), ("grep", {"regex": "nothing"})]
    assert ["skipped" in text for text in use(workspace, calls)] == [False, False, False]


# -- what git ignores


@pytest.fixture(params=["no repository", "repository"])
def repository(request: pytest.FixtureRequest, workspace: Path) -> Path:
    """A workspace; what is ignored must be the same in both."""
    if request.param == "repository":
        git(workspace, "init", "-q")
    return workspace


def test_what_is_ignored_is_left_out_and_counted(repository: Path) -> None:
    write(repository, {".gitignore": "*.log\n", "a.txt": "needle\n", "d/b.txt": "needle\n"})
    write(repository, dict.fromkeys(["x.log", "y.log", "d/z.log"], "needle\n"))
    listed, searched = use(repository, [("list_files", {}), ("grep", {"regex": "needle"})])
    assert found(listed) == [".gitignore", "a.txt", "d/b.txt"]
    assert found(searched) == ["a.txt:1:needle", "d/b.txt:1:needle"]
    assert (counted(listed, "ignored"), counted(searched, "ignored")) == (3, 3)


def test_an_ignored_folder_is_left_out_and_said(repository: Path) -> None:
    write(repository, {".gitignore": "out/\n", "a": "needle\n", "out/b": "needle\n", "out/d/c": ""})
    listed, searched = use(repository, [("list_files", {}), ("grep", {"regex": "needle"})])
    assert (found(listed), found(searched)) == ([".gitignore", "a"], ["a:1:needle"])
    assert counted(listed, "ignored") >= 1 and counted(searched, "ignored") >= 1


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        pytest.param("out", ["out/a.txt", "out/deep/b.txt"], id="a folder"),
        pytest.param("./out/", ["out/a.txt", "out/deep/b.txt"], id="with slashes"),
        pytest.param("out/deep", ["out/deep/b.txt"], id="inside a folder"),
        pytest.param("out/deep/b.txt", ["out/deep/b.txt"], id="a file inside a folder"),
        pytest.param("scripts/sub", ["scripts/sub/x.sh"], id="a folder by its parent"),
        pytest.param("scripts/run.sh", ["scripts/run.sh"], id="a file by its folder"),
        pytest.param("x.log", ["x.log"], id="a file by its name"),
        pytest.param("src", ["src/main.c"], id="src is not ignored, src/main.log is"),
    ],
)
def test_an_ignored_path_that_is_named_is_searched(
    repository: Path, where: str, expected: list[str]
) -> None:
    names = "scripts/run.sh scripts/sub/x.sh out/a.txt out/deep/b.txt x.log src/main.c src/main.log"
    lists = {".gitignore": "scripts/*\nout/\n*.log\n"}
    write(repository, lists | dict.fromkeys(names.split(), "k\n"))
    calls = [("list_files", {"path": where}), ("grep", {"regex": "k", "path": where})]
    listed, searched = use(repository, calls)
    assert found(listed) == expected
    assert found(searched) == [f"{name}:1:k" for name in expected]


@pytest.mark.parametrize("where", ["scripts", "scripts/"])
def test_a_folder_in_which_all_is_ignored_is_not_said_to_hold_nothing(
    repository: Path, where: str
) -> None:
    write(repository, {".gitignore": "scripts/*\n", "scripts/a.sh": "k\n", "scripts/b.sh": "k\n"})
    calls = [("list_files", {"path": where}), ("grep", {"regex": "k", "path": where})]
    for text, name in zip(use(repository, calls), ("", ":1:k"), strict=True):
        shown = [f"scripts/a.sh{name}", f"scripts/b.sh{name}"]
        assert found(text) == shown or counted(text, "ignored") == 2


def test_without_git_what_is_ignored_is_left_out_or_said_to_be_there(
    repository: Path, paths: dict[str, str]
) -> None:
    write(repository, {".gitignore": "*.log\n", "a.txt": "k\n", "x.log": "k\n"})
    searched = ask(repository, "grep", paths["none"], regex="^k")
    left_out = found(searched) == ["a.txt:1:k"] and counted(searched, "ignored") == 1
    assert left_out or re.search(r"\bgit", split(searched)[1])


def test_the_list_of_the_clone_is_respected(workspace: Path, paths: dict[str, str]) -> None:
    git(workspace, "init", "-q")
    write(workspace, {".git/info/exclude": "mine.txt\n", "mine.txt": "k\n", "ours.txt": "k\n"})
    for name in ("rg", "git"):
        text = ask(workspace, "grep", paths[name], regex="k")
        assert (found(text), counted(text, "ignored")) == (["ours.txt:1:k"], 1)


def test_a_tracked_file_is_never_ignored(workspace: Path, paths: dict[str, str]) -> None:
    git(workspace, "init", "-q")
    write(
        workspace, {"kept.log": "k\n", "out/kept.txt": "k\n", "free.log": "k\n", "out/free": "k\n"}
    )
    git(workspace, "add", "kept.log", "out/kept.txt")
    write(workspace, {".gitignore": "*.log\nout/\n"})
    listed, searched = use(workspace, [("list_files", {}), ("grep", {"regex": "k"})], paths["rg"])
    assert found(listed) == [".gitignore", "kept.log", "out/kept.txt"]
    assert found(searched)[-2:] == ["kept.log:1:k", "out/kept.txt:1:k"]


def test_the_repository_may_begin_above_the_workspace(
    workspace: Path, paths: dict[str, str]
) -> None:
    git(workspace, "init", "-q")
    write(workspace, {".gitignore": "*.log\n/part/out\n", "above.txt": "k\n"})
    write(workspace / "part", {"a.txt": "k\n", "b.log": "k\n", "out/c.txt": "k\n", "d/out": "k\n"})
    for name in ("rg", "git"):
        assert found(ask(workspace / "part", "list_files", paths[name])) == ["a.txt", "d/out"]
        assert found(ask(workspace / "part", "grep", paths[name], regex="k")) == [
            "a.txt:1:k",
            "d/out:1:k",
        ]


def test_a_workspace_that_an_outer_repository_ignores_is_searched(
    workspace: Path, paths: dict[str, str]
) -> None:
    git(workspace, "init", "-q")
    write(workspace, {".gitignore": "scratch/\n", "scratch/a.txt": "k\n", "scratch/d/b.txt": "k\n"})
    for name in ("rg", "git"):
        folder = workspace / "scratch"
        assert found(ask(folder, "list_files", paths[name])) == ["a.txt", "d/b.txt"]
        assert found(ask(folder, "grep", paths[name], regex="k")) == ["a.txt:1:k", "d/b.txt:1:k"]


def test_files_of_a_repository_inside_the_repository_are_found(
    workspace: Path, paths: dict[str, str]
) -> None:
    for folder in (workspace, workspace / "inner", workspace / "free"):
        folder.mkdir(exist_ok=True)
        git(folder, "init", "-q")
        write(folder, {"a.txt": "k\n", "b.log": "k\n", ".gitignore": "*.log\n"})
        git(folder, "add", "a.txt")
        git(folder, "commit", "-q", "-m", "first")
    git(workspace, "add", "inner", check=False)  # as git does it to those who forget
    expected = ["a.txt:1:k", "free/a.txt:1:k", "inner/a.txt:1:k"]
    for name in ("rg", "git"):
        assert found(ask(workspace, "grep", paths[name], regex="k")) == expected


def test_a_second_working_tree_of_a_repository_is_searched(
    workspace: Path, tmp_path: Path, paths: dict[str, str]
) -> None:
    git(workspace, "init", "-q")
    write(workspace, {"a.txt": "k\n", ".gitignore": "*.log\n"})
    git(workspace, "add", ".")
    git(workspace, "commit", "-q", "-m", "first")
    git(workspace, "worktree", "add", "-q", str(tmp_path / "second"))
    write(tmp_path / "second", {"b.log": "k\n", "c.txt": "k\n"})
    for name in ("rg", "git"):
        text = ask(tmp_path / "second", "grep", paths[name], regex="^k")
        assert found(text) == ["a.txt:1:k", "c.txt:1:k"]


def test_a_file_that_git_knows_but_that_is_gone_or_in_conflict_is_told_as_it_is(
    workspace: Path, paths: dict[str, str]
) -> None:
    git(workspace, "init", "-q")
    write(workspace, {"gone.txt": "k\n", "both.txt": "k\n"})
    git(workspace, "add", ".")
    git(workspace, "commit", "-q", "-m", "first")
    for branch in ("other", "mine"):
        git(workspace, "checkout", "-q", "-b", branch, "main")
        write(workspace, {"both.txt": f"k {branch}\n"})
        git(workspace, "commit", "-q", "-a", "-m", branch)
    git(workspace, "merge", "-q", "other", check=False)
    (workspace / "gone.txt").unlink()
    listed, searched = use(workspace, [("list_files", {}), ("grep", {"regex": "k"})], paths["rg"])
    assert found(listed) == ["both.txt"]
    assert found(searched) == ["both.txt:2:k mine", "both.txt:4:k other"]


def test_names_that_git_would_quote_come_as_they_are(
    workspace: Path, paths: dict[str, str]
) -> None:
    git(workspace, "init", "-q")
    names = ["a b.txt", "b'.txt", 'c".txt', "d\\e.txt", "ünï.txt", "日本/語.txt"]
    write(workspace, dict.fromkeys(names, "k\n"))
    git(workspace, "add", "a b.txt", "ünï.txt", 'c".txt')
    for name in ("rg", "git"):
        assert found(ask(workspace, "list_files", paths[name])) == sorted(names)
        lines = found(ask(workspace, "grep", paths[name], regex="k"))
        assert lines == [f"{name}:1:k" for name in sorted(names)]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param({".git/index": b"garbage"}, id="the index"),
        pytest.param({".git/HEAD": b""}, id="the head"),
        pytest.param({".git/config": b"[core\n"}, id="the configuration"),
        pytest.param({".git/config": b"[core]\nrepositoryformatversion = 99\n"}, id="too new"),
    ],
)
def test_where_git_can_not_read_its_repository_its_lists_are_respected_all_the_same(
    workspace: Path, paths: dict[str, str], damage: dict[str, bytes]
) -> None:
    git(workspace, "init", "-q")
    write(workspace, {".gitignore": "*.log\n", "a.txt": "k\n", "b.log": "k\n", "d/c.txt": "k\n"})
    git(workspace, "add", ".")
    write(workspace, damage)
    for name in ("rg", "git"):
        text = ask(workspace, "grep", paths[name], regex="^k")
        assert found(text) == ["a.txt:1:k", "d/c.txt:1:k"]


def test_variables_of_a_git_hook_do_not_turn_the_search_to_another_repository(
    workspace: Path, tmp_path: Path, paths: dict[str, str]
) -> None:
    for folder in (workspace, tmp_path / "other"):
        folder.mkdir(exist_ok=True)
        git(folder, "init", "-q")
    write(workspace, {".gitignore": "*.log\n", "a.txt": "k\n", "b.log": "k\n"})
    write(tmp_path / "other", {"elsewhere.txt": "k\n"})
    git(tmp_path / "other", "add", ".")
    hook = {"GIT_DIR": str(tmp_path / "other/.git"), "GIT_WORK_TREE": str(tmp_path / "other")}
    hook |= {"GIT_INDEX_FILE": str(tmp_path / "other/.git/index"), "GIT_PREFIX": "x/"}
    calls = [("list_files", {}), ("grep", {"regex": "^k"})]
    listed, searched = use(workspace, calls, paths["rg"], **hook)
    assert (found(listed), found(searched)) == ([".gitignore", "a.txt"], ["a.txt:1:k"])


def test_a_search_runs_no_program_that_the_repository_names(
    workspace: Path, tmp_path: Path, paths: dict[str, str]
) -> None:
    git(workspace, "init", "-q")
    write(workspace, {"a.txt": "k\n", ".gitattributes": "*.txt filter=f\n"})
    git(workspace, "add", "a.txt")
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n/usr/bin/touch {tmp_path}/ran\n/bin/touch {tmp_path}/ran\n")
    program.chmod(0o755)
    for key in ("core.fsmonitor", "filter.f.clean", "filter.f.smudge", "core.sshCommand"):
        git(workspace, "config", key, str(program))
    git(workspace, "config", "core.untrackedCache", "true")
    listed, searched = use(workspace, [("list_files", {}), ("grep", {"regex": "k"})], paths["rg"])
    assert (found(listed), found(searched)) == ([".gitattributes", "a.txt"], ["a.txt:1:k"])
    assert not (tmp_path / "ran").exists()


def test_lists_that_only_rg_knows_change_nothing(workspace: Path, paths: dict[str, str]) -> None:
    names = ("a.txt", "b.txt", "c.txt", "d.txt")
    write(workspace, dict.fromkeys(names, "k\n"))
    write(workspace, {".ignore": "a.txt\n", ".rgignore": "b.txt\n", ".fdignore": "c.txt\n"})
    for name in ("rg", "git"):
        lines = found(ask(workspace, "grep", paths[name], regex="^k"))
        assert lines == [f"{name}:1:k" for name in names]


# Each is a .gitignore; two blanks or a line end between them, ⏎ is a line end in one.
IGNORED = r"""
*.log  /a.txt  a.txt  build/  build  /build/  src/build  **/build  build/**  build/*
build/../a.txt  build/*⏎!build/keep/  build/*⏎!build/keep  build/⏎!build/keep/y.txt  *⏎!*.py
*⏎!*/⏎!*.py  !a.txt  *.log⏎!debug.log  debug.log⏎!debug.log⏎*.log  *.txt⏎!?.txt⏎a.txt  !*⏎*.py
one/*⏎!one/target  /*  /*⏎!/src  /*⏎!/src/⏎/src/*⏎!/src/build  *  **  ***  /  //  !  /**  /**/
**/  */  **/*  *⏎!a/b/c  doc/frotz  doc/frotz/  /doc/  **/frotz  **/frotz/  a/**/d.txt  a/**
a/**/  **/bar  foo/**/bar  foo/*  foo/*/bar  foo/**/  foo/**bar  foo/bar  /foo/bar  oo/bar
foo/ba?  foo//bar  f**/bar  foo/**/**/bar  *.[lo]*  [a-b].txt  [!a].txt  [^a].txt  ?.txt  ?.?xt
a?c  a*c  a**c  *a*  a[/]b  a?b/c  a*b/c  a**/c  x[1].txt  x\[1\].txt  x[[]1].txt  x\[*  *1]*
*\]  [\x]*  [a  [a-\]b].txt  []-]*  []x]*  [!]a]*  [z-a].txt  [[:upper:]]*  [[:digit:]a]*
[[:alpha:]].txt  [![:lower:]]*  deb[t-v]g.log  src/ma[!a-h]n.py  .d?r  \#hash  #hash  \!bang
!bang  sp ace.txt  sp*.txt  sp\ ace.txt  case.txt  CASE.TXT  *.TXT  *.txt  **.txt  .*  .dir/
.hid  .dir  target  target/  /two/target/  two/**  two/**/f  */f  */*/f  t*t  **/target/f  a/b/
a/b/c  b/c  **/c/d.txt  a/**b/c  a/*/c  a/*/c/  a/b/**/d.txt  src/**/z.txt  /src/*.log  */a.log
/**/z.txt  **/**/z.txt  **/src/**  *.o  \*.log  back\\s  back\s  *\\*  \a.txt  a\.txt  a.txt\
a.txt/  é.txt  ./a.txt  {a,b}.txt  d*.log  *bug*  [d]ebug.log  # *.log⏎*.o  *.log⏎#*.o⏎⏎⏎*.py
.gitignore  *.log⏎!*.log⏎src/*.log  src⏎!src/a.log  src/*⏎!src/main.py  *.txt⏎!/*.txt
*.txt⏎!a/b/c/*.txt  **/a.txt
"""
NESTED: list[dict[str, str | bytes]] = [
    {".gitignore": "*.log\n", "src/.gitignore": "!a.log\n"},
    {".gitignore": "!a.log\n", "src/.gitignore": "a.log\n"},
    {"src/.gitignore": "/build\n"},
    {"src/.gitignore": "*\n!.gitignore\n"},
    {"src/.gitignore": "*.py\n", ".gitignore": "!*.py\n"},
    {".gitignore": "src/\n", "src/.gitignore": "!*\n"},
    {"a/.gitignore": "b/c/d.txt\n"},
    {"a/.gitignore": "b\n", "a/b/.gitignore": "!c\n"},
    {"a/b/.gitignore": "/c/\n!/c/d.txt\n"},
    {"a/b/.gitignore": "/c/*\n!/c/d.txt\n"},
    {"foo/.gitignore": "foo/bar\n/bar\n"},
    {"two/target/.gitignore": "*\n"},
    {".gitignore": "*.log", "build/.gitignore": b"\xef\xbb\xbf*.o\n"},
    {".gitignore": "*.log\r\nbuild/\r\n"},
    {".gitignore": "a.txt   \n*.o\t\n"},
    {".gitignore": "trail\\ \ntrail \n"},
    {".gitignore": "trail \n"},
    {".gitignore": "  a.txt\n"},
    {".gitignore": b"\xff.txt\n\xe9*\n*.log\n"},
    {".gitignore": ""},
    {".gitignore/a": "not a file"},
]
CASES: list[dict[str, str | bytes]] = [
    *(
        {".gitignore": text.replace("⏎", "\n") + "\n"}
        for text in re.split("  |\n", IGNORED)
        if text
    ),
    *NESTED,
]
FILES = """a.txt|b.log|debug.log|build/x.o|build/keep/y.txt|src/build/z.txt|src/a.log|src/main.py
a/doc/frotz/r.txt|doc/frotz/q.txt|foo/bar|foo/b/a/bar|sp ace.txt|#hash|trail |!bang|back\\s|a1c|]
Case.TXT|.hid|.dir/f|x[1].txt|é.txt|a/b/c/d.txt|one/target|two/target/f"""
FEW_FILES = "a|b/a|b/c/a.txt|ab.txt|.txt|c/b/abc|!a|ab/c"


def ignoring(folder: Path, cases: list[dict[str, str | bytes]], files: str) -> None:
    """A folder for each case, all with the same files, and a repository around them."""
    for n, lists in enumerate(cases):
        write(folder / str(n), dict.fromkeys(re.split(r"[|\n]", files), "k\n") | lists)
    git(folder, "init", "-q")


def disagreements(
    folder: Path, cases: list[dict[str, str | bytes]], path: str
) -> list[tuple[dict[str, str | bytes], list[str], list[str]]]:
    """The cases in which it is not as git says: the lists, what is lost, what is too much.

    Once as a repository, once as none: then git is asked before its folder goes away.
    """
    names = in_git(folder)
    expected = [[name for name in names if name.startswith(f"{n}/")] for n in range(len(cases))]
    calls = [("list_files", {"path": str(n)}) for n in range(len(cases))]
    texts = use(folder, calls, path)
    shutil.rmtree(folder / ".git")
    texts += use(folder, calls, path)
    rows = zip(cases * 2, expected * 2, map(found, texts), strict=True)
    return [
        (lists, sorted(set(want) - set(have)), sorted(set(have) - set(want)))
        for lists, want, have in rows
        if want != have
    ]


def test_what_is_ignored_is_what_git_ignores(
    tmp_path_factory: pytest.TempPathFactory, paths: dict[str, str]
) -> None:
    folder = tmp_path_factory.mktemp("ignoring")
    ignoring(folder, CASES, FILES)
    assert disagreements(folder, CASES, paths["git"]) == []


PARTS = st.sampled_from(["a", "b", "c", "*", "**", "?", "/", "!", "\\", "[ab]", "[!a]", ".", "txt"])
LISTS = st.lists(st.lists(PARTS, max_size=6).map("".join), min_size=1, max_size=3).map("\n".join)


def same_as_git(folder: Path, texts: list[str], path: str) -> None:
    """Random lists are read as git reads them."""
    shutil.rmtree(folder, ignore_errors=True)
    cases: list[dict[str, str | bytes]] = [{".gitignore": text} for text in texts]
    ignoring(folder, cases, FEW_FILES)
    assert disagreements(folder, cases, path) == []


ANY = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=5, **ANY)
@given(texts=st.lists(LISTS, min_size=12, max_size=12))
def test_random_lists_are_read_as_git_reads_them(
    tmp_path: Path, paths: dict[str, str], texts: list[str]
) -> None:
    same_as_git(tmp_path / "lists", texts, paths["git"])


@pytest.mark.long
@settings(max_examples=60, **ANY)
@given(texts=st.lists(LISTS, min_size=40, max_size=40))
def test_many_random_lists_are_read_as_git_reads_them(
    tmp_path: Path, paths: dict[str, str], texts: list[str]
) -> None:
    same_as_git(tmp_path / "lists", texts, paths["git"])


# -- grep: lines, context, huge lines


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        pytest.param(0, "3:hit 5:hit 11:hit", id="none"),
        pytest.param(1, "2-b 3:hit 4-d 5:hit 6-f 10-j 11:hit 12-l", id="one"),
        pytest.param(3, "1-a 2-b 3:hit 4-d 5:hit 6-f 7-g 8-h 9-i 10-j 11:hit 12-l", id="three"),
    ],
)
def test_context_lines_are_shown_once_and_marked(
    workspace: Path, context: int, expected: str
) -> None:
    write(workspace, {"f": "a b hit d hit f g h i j hit l".replace(" ", "\n")})
    lines = found(ask(workspace, "grep", regex="hit", context=context))
    assert [line for line in lines if line != "--"] == [
        f"f{word[0]}{word}" if word[0] in ":-" else f"f{re.sub('[0-9]+', '', word)[0]}{word}"
        for word in expected.split()
    ]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"a\n\x0c\nb\nNEEDLE\n", id="form feed R09"),
        pytest.param("x='a\u2028b'\nNEEDLE\n".encode(), id="line separator R09"),
        pytest.param(b"a\x0bb\x1cc\x1dd\x1ee\n\x0b\nNEEDLE", id="vertical tab, separators"),
        pytest.param("a\u0085b\u2029c\nNEEDLE\n".encode(), id="next line, paragraph"),
        pytest.param(b"a\rb\rc\nNEEDLE\n", id="bare CR"),
        pytest.param(b"a\r\n\r\nb\r\r\nNEEDLE\r\n", id="CRLF"),
        pytest.param(b"\n\n\n\nNEEDLE\n", id="blank lines"),
        pytest.param(b"\xff\xfe\n\xe9\x85\nNEEDLE\n".replace(b"\xff\xfe", b"\xe8"), id="Latin-1"),
        pytest.param(b"a\n" + b"b" * 9000 + b"\0\nNEEDLE\n", id="NUL far behind"),
    ],
)
@pytest.mark.parametrize("path", ["rg", "git"])
def test_a_line_has_the_number_that_grep_and_the_reader_give_it(
    workspace: Path, paths: dict[str, str], data: bytes, path: str
) -> None:
    write(workspace, {"f": data})
    command = ["grep", "-na", "NEEDLE", "f"]
    done = subprocess.run(command, cwd=workspace, capture_output=True, check=True)
    number = done.stdout.split(b":")[0].decode()
    place = {"path": "f", "start": number, "end": number}
    calls = [("grep", {"regex": "NEEDLE$"}), ("read_file", place)]
    searched, read = use(workspace, calls, paths[path])
    assert found(searched) == [f"f:{number}:NEEDLE"]
    assert read.split("\n")[0] == f"{number}: NEEDLE"


HUGE = {
    "start": "<stats>" + "b" * 600_000,
    "middle": "a" * 300_000 + "<stats>" + "b" * 300_000,
    "end": "a" * 600_000 + "<stats>",
    "wide characters": "語" * 300_000 + "<stats>" + "😀" * 300_000,
    "many": "<stats>" * 90_000,
    "escapes": "\x1b[1m" * 100_000 + "<stats>" + "\\" * 100_000,
}


@pytest.mark.parametrize("where", HUGE)
def test_a_match_in_a_huge_line_shows_the_window_around_it(
    workspace: Path, paths: dict[str, str], where: str
) -> None:
    write(workspace, {"three.min.js": f"short\n{HUGE[where]}\nstats\n"})
    text, same = (ask(workspace, "grep", paths[name], regex="st[a]ts") for name in ("rg", "git"))
    huge, last = found(text)
    assert huge.startswith("three.min.js:2:") and last == "three.min.js:3:stats"
    assert "<stats>" in huge and len(huge) < 2_000
    assert same == text


@pytest.mark.parametrize("regex", ["a+", ".*", "^a.*b$", "(?=a)", "$", r"\b", "a*?"])
def test_a_match_that_is_huge_or_empty_in_a_huge_line_is_shown_in_part(
    workspace: Path, regex: str
) -> None:
    write(workspace, {"f": "a" * 400_000 + "b\n"})
    (line,) = found(ask(workspace, "grep", regex=regex))
    assert re.match("f:1:.*(a|b)", line) and len(line) < 2_000


def test_a_huge_line_beside_a_match_is_cut_too(workspace: Path) -> None:
    write(workspace, {"f": "x" * 300_000 + "\nneedle\n" + "y" * 300_000 + "\n"})
    before, hit, after = found(ask(workspace, "grep", regex="needle", context=1))
    assert hit == "f:2:needle"
    assert before.startswith("f-1-") and after.startswith("f-3-")
    assert max(len(before), len(after)) < 2_000


def test_hundreds_of_huge_lines_stay_within_one_result_and_are_counted(workspace: Path) -> None:
    line = "x" * 4_000 + "needle" + "y" * 4_000 + "\n"
    write(workspace, dict.fromkeys("abc", line * 200))
    text = ask(workspace, "grep", regex="needle")
    assert len(text) <= MOST_CHARS
    assert all("needle" in line for line in found(text))
    assert re.search(rf"1-{len(found(text))} of 600\b.*offset=", split(text)[1])


def test_a_match_deep_in_a_large_file_has_its_number(workspace: Path) -> None:
    line = b"the quick brown fox jumps over the lazy dog\n"
    write(workspace, {"log": line * 500_000 + b"NEEDLE here\n" + line * 10})
    assert found(ask(workspace, "grep", regex="NEEDLE")) == ["log:500001:NEEDLE here"]
    assert found(ask(workspace, "grep", regex="^N.*here$")) == ["log:500001:NEEDLE here"]


# -- grep: regexes that are wrong

INVALID = {
    "parenthesis G06": "foo(",
    "doubled backslashes G06": r"cy\\.visit\\(",
    "call": "print(x",
    "closing": "a)",
    "bracket": "[",
    "class": "[z-a]",
    "nothing to repeat": "*.py",
    "twice": "a**",
    "plus first": "+x",
    "range": "a{2,1}",
    "escape": r"\p{L}+",
    "escape at the end": "a\\",
    "unknown escape": r"\Qa.b\E",
    "group of another language": "(?<name>x)",
    "unknown group": "(?P=x)",
    "backreference": r"(a)\2",
    "lookbehind": "(?<=a+)b",
    "flags in the middle": "a(?i)b",
    "repeated too often": "a{99999999999999999999}",
}


@pytest.mark.parametrize("regex", INVALID.values(), ids=INVALID.keys())
def test_an_invalid_regex_is_an_error_with_pythons_reason_and_a_hint(
    tree: Model, regex: str
) -> None:
    with pytest.raises((re.error, OverflowError)) as caught:
        re.compile(regex)
    (text,) = tree.use([("grep", {"regex": regex})])
    assert text.startswith("error: ")
    assert getattr(caught.value, "msg", str(caught.value)) in text
    assert re.search("escape|literal|backslash", text, re.IGNORECASE)


@pytest.mark.parametrize(
    "regex",
    [
        pytest.param("(" * 5_000 + "a" + ")" * 5_000, id="5,000 groups"),
        pytest.param("(?:" * 3_000 + "a" + ")?" * 3_000, id="3,000 options"),
        pytest.param("(?=" * 3_000 + "a" + ")" * 3_000, id="3,000 lookaheads"),
    ],
)
def test_a_regex_that_is_too_deep_ends_neither_the_search_nor_the_agent(
    run_agent: Callable[..., Any], workspace: Path, regex: str
) -> None:
    write(workspace, {"f": "a\n"})
    deep = {"call": "grep", "arguments": {"regex": regex}}
    plain = {"call": "grep", "arguments": {"regex": "a"}}
    with FlakyServer([deep, plain, "done"]) as server:
        done = run_agent("go", server=server)
    assert (done.returncode, done.stdout) == (0, "done\n")
    first, second = results(server.requests[2])
    assert first.startswith("error: ") or found(first) == ["f:1:a"]
    assert found(second) == ["f:1:a"]


def test_a_regex_that_python_warns_about_is_searched_without_a_warning_on_the_screen(
    run_agent: Callable[..., Any], workspace: Path
) -> None:
    write(workspace, {"f": "a]\nl\n:]\n"})
    script = [
        {"call": "grep", "arguments": {"regex": regex}} for regex in ("[[:alpha:]]", "a--b|[a||b]")
    ]
    with FlakyServer([*script, "done"]) as server:
        done = run_agent("go", server=server)
    assert found(results(server.requests[1])[0]) == ["f:1:a]", "f:3::]"]
    assert found(results(server.requests[2])[1]) == ["f:1:a]"]
    assert (done.returncode, "Warning" in done.stderr) == (0, False)


# -- grep: regexes that do not end

EVIL = "a" * 40 + "!"
NEXT = {"calls": [{"name": "grep", "arguments": {"regex": "(a+)!"}}, {"name": "list_files"}]}


def evil_search(regex: str, **more: Any) -> dict[str, Any]:
    """A step of a script."""
    return {"call": "grep", "arguments": {"regex": regex, **more}}


def cpu_seconds(pid: int) -> float:
    """What a process and its living children have used."""
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:  # It ended while we looked at it.
            continue
        if pid in (int(stat.parent.name), int(fields[1])):
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def busy(pid: int) -> None:
    """Wait until the process is at it."""
    before = cpu_seconds(pid)
    until(lambda: cpu_seconds(pid) > before + 0.5)


def ends_with_an_error(run_agent: Callable[..., Any], step: dict[str, Any], **more: Any) -> str:
    """Run a search that does not end by itself, and another one after it; the first result."""
    with FlakyServer([step, NEXT, "done"]) as server:
        start = time.monotonic()
        done = run_agent("go", server=server, timeout=60, **more)
        took = time.monotonic() - start
    assert (done.returncode, done.stdout) == (0, "done\n")
    *first, searched, listed = results(server.requests[2])
    assert found(searched)[0] == f"0:1:{EVIL}" and found(listed)[0] == "0"
    assert took < 25
    return first[0]


def test_a_catastrophic_regex_ends_in_an_error_and_the_next_calls_work(
    run_agent: Callable[..., Any], workspace: Path
) -> None:
    write(workspace, {str(n): f"{EVIL}\n" * 3 for n in range(5)})
    text = ends_with_an_error(run_agent, evil_search("(a+)+$"))
    assert text.startswith("error: ")
    assert re.search(r"\b10\b|too long|second", text)


@pytest.mark.long
@pytest.mark.parametrize(
    ("regex", "more"),
    [
        pytest.param("(a|a)*$", {}, id="alternatives"),
        pytest.param(r"^(\w+\s?)*$", {}, id="words"),
        pytest.param("(a+)+$", {"context": 3, "pattern": "*[0-9]"}, id="context and pattern"),
        pytest.param(r"(a*)*\1b", {}, id="backreference"),
    ],
)
def test_every_catastrophic_regex_ends_in_an_error(
    run_agent: Callable[..., Any], workspace: Path, regex: str, more: dict[str, Any]
) -> None:
    write(workspace, {str(n): f"{EVIL}\n" for n in range(3)})
    assert ends_with_an_error(run_agent, evil_search(regex, **more)).startswith("error: ")


@pytest.mark.long
def test_catastrophic_regexes_side_by_side_take_the_time_of_one(
    run_agent: Callable[..., Any], workspace: Path
) -> None:
    write(workspace, {"0": f"{EVIL}\n"})
    calls = [{"name": "grep", "arguments": {"regex": f"(a+)+[x{n}]"}} for n in range(3)]
    assert ends_with_an_error(run_agent, {"calls": calls}).startswith("error: ")


@pytest.mark.parametrize(
    "regex",
    [
        pytest.param(r"^func .*\n(?:.*\n){0,40}?.*id", id="over lines G03"),
        pytest.param("(x+x+)+y", id="not here"),
        pytest.param("a.*b.*c.*d", id="polynomial"),
    ],
)
def test_a_regex_that_only_looks_dangerous_is_searched(workspace: Path, regex: str) -> None:
    write(workspace, {"f": "func a\n  id\n" * 500 + f"{EVIL}\n", "g": "abcd\n"})
    text = ask(workspace, "grep", regex=regex)
    assert found(text) == (["g:1:abcd"] if regex.startswith("a") else [])
    assert "error" not in text


def test_ctrl_c_ends_a_catastrophic_search_at_once_and_the_session_goes_on(
    terminal: Callable[..., Any], workspace: Path
) -> None:
    write(workspace, {"0": f"{EVIL}\n"})
    with FlakyServer([evil_search("(a+)+$"), NEXT, "fine"]) as server:
        screen = terminal(server=server)
        screen.prompt()
        screen.send("go\r")
        screen.expect("grep")
        busy(screen.process.pid)
        start = time.monotonic()
        screen.interrupt()
        screen.prompt()
        assert time.monotonic() - start < 8
        screen.send("again\r")
        screen.expect("fine")
        screen.prompt()
        screen.send("\x04")
        assert screen.wait() == 0
    assert found(results(server.requests[2])[1]) == [f"0:1:{EVIL}"]


@pytest.mark.parametrize(
    ("number", "code", "seconds"),
    [
        pytest.param(signal.SIGINT, 130, 8, id="SIGINT"),
        pytest.param(signal.SIGTERM, 143, 8, id="SIGTERM"),
        pytest.param(signal.SIGKILL, -9, 20, id="SIGKILL", marks=pytest.mark.long),
    ],
)
def test_a_signal_during_a_catastrophic_search_leaves_no_process(
    start_agent: Callable[..., Any], workspace: Path, number: int, code: int, seconds: int
) -> None:
    write(workspace, {"0": f"{EVIL}\n"})
    with FlakyServer([evil_search("(a+)+$"), "done"]) as server:
        process = start_agent("go", server=server)
        until(lambda: server.requests)
        busy(process.pid)
        start = time.monotonic()
        process.send_signal(number)
        assert process.wait(60) == code
        until(lambda: not inside(workspace), timeout=seconds)
        assert time.monotonic() - start < seconds


# -- what is no text, no file or not to be read


def test_binary_files_are_skipped_and_counted_and_utf_16_is_no_binary(
    workspace: Path, paths: dict[str, str]
) -> None:
    write(workspace, {"a.ods": b"PK\x03\x04\0\0needle\n", "b": b"needle\n\0", "c": "needle\n"})
    write(workspace, {"d": "needle\n".encode("utf-16"), "e": "needle\n".encode("utf-16-le")})
    write(workspace, {"f": b"needle\n" + b"x" * 9_000 + b"\0", "g": b"\0" * 9_000 + b"needle\n"})
    for name in ("rg", "git"):
        text = ask(workspace, "grep", paths[name], regex="needle")
        assert found(text) == ["c:1:needle", "d:1:needle", "f:1:needle"]
        assert counted(text, "binary") == 3  # those that hold the text as it stands


def test_a_binary_file_that_is_named_is_said_to_be_one(workspace: Path) -> None:
    write(workspace, {"a.png": b"\x89PNG\0needle\n"})
    text = ask(workspace, "grep", regex="needle", path="a.png")
    assert found(text) == [] and "binary" in text


def test_what_is_no_regular_file_is_left_out_and_counted(
    workspace: Path, paths: dict[str, str]
) -> None:
    write(workspace, {"d/a.txt": "needle\n"})
    os.mkfifo(workspace / "pipe")
    (workspace / "d" / "nope").symlink_to("nowhere")
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        here = os.open(workspace, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{here}/s")
        os.close(here)
        for name in ("rg", "git"):
            calls = [("list_files", {}), ("grep", {"regex": "needle"})]
            listed, searched = use(workspace, calls, paths[name])
            assert (found(listed), found(searched)) == (["d/a.txt"], ["d/a.txt:1:needle"])
            for text in (listed, searched):
                assert sum(map(int, re.findall(r"\d+", skipped(text)))) == 3, text


@pytest.mark.parametrize("tool", ["list_files", "grep"])
def test_a_pipe_that_is_named_is_said_at_once_to_be_one(workspace: Path, tool: str) -> None:
    os.mkfifo(workspace / "pipe")
    given_ = {"path": "pipe"} | ({"regex": "x"} if tool == "grep" else {})
    text = ask(workspace, tool, **given_)
    assert re.search(r"named pipe|regular file|pipes or devices", text) and ":1:" not in text


@pytest.mark.parametrize("known", ["no repository", "untracked", "tracked"])
def test_links_in_circles_and_out_of_the_workspace_are_not_followed(
    workspace: Path, tmp_path: Path, paths: dict[str, str], known: str
) -> None:
    write(tmp_path, {"outside/secret.txt": "needle\n", "work/lp/d/a.txt": "needle\n"})
    for link, target in {"up": "..", "self": "self", "out": str(tmp_path / "outside")}.items():
        (workspace / "lp/d" / link).symlink_to(target)
    (workspace / "file").symlink_to(tmp_path / "outside/secret.txt")
    if known != "no repository":
        git(workspace, "init", "-q")
    if known == "tracked":
        git(workspace, "add", ".")
    for name in ("rg", "git"):
        calls = [("list_files", {}), ("grep", {"regex": "needle"})]
        listed, searched = use(workspace, calls, paths[name])
        assert (found(listed), found(searched)) == (["lp/d/a.txt"], ["lp/d/a.txt:1:needle"])


@pytest.mark.parametrize("where", ["lp/d/out", "file", "../outside", "lp/d/out/secret.txt"])
@pytest.mark.parametrize("tool", ["list_files", "grep"])
def test_a_link_out_of_the_workspace_is_refused(
    workspace: Path, tmp_path: Path, tool: str, where: str
) -> None:
    write(tmp_path, {"outside/secret.txt": "needle\n", "work/lp/d/a.txt": "needle\n"})
    (workspace / "lp/d/out").symlink_to(tmp_path / "outside")
    (workspace / "file").symlink_to(tmp_path / "outside/secret.txt")
    given_ = {"path": where} | ({"regex": "needle"} if tool == "grep" else {})
    text = ask(workspace, tool, **given_)
    assert text.startswith(("error: ", "denied: ")) and ":1:needle" not in text


# Gives up the right of root to read what it may not, and becomes the command.
POWERLESS = """
import ctypes, os, sys
for power in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH; 24 is PR_CAPBSET_DROP
    ctypes.CDLL(None).prctl(24, power, 0, 0, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def powerless(tmp_path: Path) -> list[str]:
    """What to put before a command so that it can not read files of mode 0, also for root."""
    under = [sys.executable, "-c", POWERLESS]
    probe = tmp_path / "probe"
    probe.touch(mode=0)
    if subprocess.run([*under, "cat", str(probe)], stderr=subprocess.DEVNULL).returncode == 0:
        pytest.skip("this user reads every file")
    return under


@pytest.mark.parametrize("repository", [False, True], ids=["no repository", "repository"])
@pytest.mark.parametrize("path", ["rg", "git"])
def test_what_can_not_be_read_is_counted_and_the_rest_is_found(
    run_agent: Callable[..., Any],
    workspace: Path,
    paths: dict[str, str],
    powerless: list[str],
    path: str,
    repository: bool,
) -> None:
    write(workspace, dict.fromkeys(["a", "dark/b", "dim", "z/c"], "needle\n"))
    if repository:
        git(workspace, "init", "-q")
    (workspace / "dark").chmod(0)
    (workspace / "dim").chmod(0)
    script = [evil_search("needle"), {"call": "list_files"}, evil_search("n", path="dim"), "done"]
    with FlakyServer(script) as server:
        done = run_agent("go", server=server, under=powerless, env={"PATH": paths[path]})
    (workspace / "dark").chmod(0o755)
    searched, listed, named = results(server.requests[3])
    assert (done.returncode, found(searched)) == (0, ["a:1:needle", "z/c:1:needle"])
    assert found(listed) == ["a", "dim", "z/c"]
    sums = [sum(map(int, re.findall(r"(\d+) unreadable", text))) for text in (searched, listed)]
    assert sums == [2, 1]
    assert re.search("permission|unreadable", named, re.IGNORECASE)


# Runs the command and writes down the most memory, in KiB, that it or a child of it has held.
MEASURE = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[2:])
open(sys.argv[1], "w").write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(code)
"""


@pytest.mark.parametrize("path", ["rg", "git"])
@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"", id="all zero G14"),
        pytest.param(b"needle in a log\n" * 1_000, id="text, a hole", marks=pytest.mark.long),
    ],
)
def test_a_file_of_three_gigabytes_is_searched_or_counted_in_flat_memory(
    run_agent: Callable[..., Any],
    workspace: Path,
    tmp_path: Path,
    paths: dict[str, str],
    head: bytes,
    path: str,
) -> None:
    write(workspace, {"x.log": head, "z.txt": "needle\n"})
    os.truncate(workspace / "x.log", 3 << 30)
    with (workspace / "x.log").open("ab") as file:
        file.write(b"\nneedle\n")
    measure = [sys.executable, "-c", MEASURE, str(tmp_path / "memory")]
    calls = [evil_search("needle$"), {"call": "list_files"}, "done"]
    with FlakyServer(calls) as server:
        done = run_agent("go", server=server, under=measure, env={"PATH": paths[path]}, timeout=200)
    searched, listed = results(server.requests[2])
    assert (done.returncode, found(listed)) == (0, ["x.log", "z.txt"])
    if "skipped" in searched or not head:
        assert (found(searched), counted(searched, "")) == (["z.txt:1:needle"], 1)
    else:
        assert found(searched) == ["x.log:1002:needle", "z.txt:1:needle"]
    assert int((tmp_path / "memory").read_text()) < 300_000


# -- names that are hard to write down

HARD_NAMES: list[tuple[bytes, str]] = [
    (b"odd/byte~\xff~", "not UTF-8"),
    (b"odd/cut~\xe6\x97~", "a character cut in two"),
    (b"odd/newline~\nb.txt:1:forged~", "a line end"),
    (b"odd/cr~\r~", "a carriage return"),
    (b"odd/escape~\x1b[31m~", "an escape code"),
    (b"odd/surrogate~\xed\xa0\x80~", "a surrogate"),
]


def plain(line: str) -> str:
    """A line of a result; of an odd name only what stands before the odd part."""
    return re.sub(r"^\W*(odd/[a-z]+)~.*~['\"]?(?=$|:|-)", r"\1", line, flags=re.DOTALL)


@pytest.mark.parametrize("path", ["rg", "git", "none"])
@pytest.mark.parametrize("repository", [False, True], ids=["no repository", "repository"])
def test_a_name_that_is_no_text_takes_one_line_and_breaks_nothing(
    workspace: Path, paths: dict[str, str], path: str, repository: bool
) -> None:
    write(workspace, {"b.txt": "hay\n", "z.txt": "needle\n"})
    write(workspace, {os.fsdecode(name): "needle\n" for name, _ in HARD_NAMES})
    if repository:
        git(workspace, "init", "-q")
        git(workspace, "add", ".")
    calls = [("list_files", {}), ("grep", {"regex": "needle"})]
    listed, searched = use(workspace, calls, paths[path])
    odd = sorted(name.decode("latin-1").split("~")[0] for name, _ in HARD_NAMES)
    assert [plain(line) for line in found(listed)] == ["b.txt", *odd, "z.txt"]
    assert [plain(line) for line in found(searched)] == [f"{n}:1:needle" for n in [*odd, "z.txt"]]


NAMES = """-|-v|--version|-e foo.txt|--files|a b.txt| lead|tail |quote's.txt|double".txt|*.txt
[x].txt|back\\slash.txt|ünï.txt|日本.txt|#hash|~tilde|~|$HOME.txt|!bang|with,comma|%41.txt|{a,b}.txt|a;b
x[1].txt|a&b|?|é.txt"""


@pytest.mark.parametrize("path", ["rg", "git"])
@pytest.mark.parametrize("more", [0, 300], ids=["few files", "many files"])
def test_a_name_is_taken_literally(
    workspace: Path, paths: dict[str, str], path: str, more: int
) -> None:
    names = sorted(re.split(r"[|\n]", NAMES))
    write(workspace, dict.fromkeys(names, "needle\n") | {f"{n}/{n}": "" for n in range(more)})
    places = [{"path": f"./{name}" if name[0] == "~" else name} for name in names]
    calls: list[Call] = [("grep", {"regex": "needle"})]
    calls += [("list_files", place) for place in places]
    calls += [("grep", {"regex": "needle", **place}) for place in places]
    texts = use(workspace, calls, paths[path])
    lines = [f"{name}:1:needle" for name in names]
    assert [found(text) for text in texts] == [lines, *([n] for n in names), *([n] for n in lines)]


# -- the same with rg and without it, and as Python's re finds it

LINES = """alpha beta|Alpha BETA|foo|foo()|foo bar foo||FOO|def parse_date(text):
    return foo(a, b)||\tif x:|trailing  |a.c abc a+c|x = 1|x=10|2024-01-31 12:30
v1.2.3|user@example.org|http://example.org/a?b=c&d|\\path\\to\\n|say "hi" it's
[section]|{brace} a{2}|(paren)|$HOME ^caret|# comment|// TODO: fix me|aaa|aaaa b
abab abba|naïve café|nai\u0308ve cafe\u0301|ÜBER über|straße STRASSE STRA\u1e9eE
\u212a kelvin K k|\u017f long s S|dotless \u0131 dotted \u0130 I i|ς σ Σ
\u00b5 \u03bc \u039c|\u01c5 \u01c6 \u01c4|\ufb01 \ufb05 \ufb06|日本語 テスト
😀 smile 👩\u200d👩\u200d👧|zero\u200bwidth join\u200der|nb\u00a0sp|ideo\u3000graphic
\u0663 \uff13 \u00b2 \u00bd \u2167|soft\u00adhyphen|under_score __init__|a\x0bb|\x0c
a\x1cb\x1db\x1eb\x1fb|a\x85b|a\u2028b\u2029c|\x1b[31mred\x1b[0m|\x7f del|bell\x07
~key~ z q j @ `tick`|zzz QQQ xyzzy|in\ufeffside|\ufffd lost|end of file|-- dash
a/b/c.py:12: x|\u1c80 \u0412 \u0432|\ua64a \u1c88|\u03f4 \u03b8 \u0398
\u2126 \u03c9 \u03a9|\u212b \u00e5 \u00c5|\u1e9b \u1e61"""
SOME = re.split(r"[|\n]", LINES)
TEXT = "\n".join(SOME) + "\n"
CORPUS: dict[str, str | bytes] = {
    "utf8.txt": TEXT,
    "crlf.txt": TEXT.replace("\n", "\r\n"),
    "cr.txt": b"foo\rbar\r\nfoo\r\r\n\r\nend\r",
    "mixed.txt": b"foo\r\nbar\nfoo \rbaz\n\r\n\n x\r\n",
    "bom.txt": "\ufefffoo\nbar\n\ufefffoo\n",
    "bom-crlf.txt": "\ufeff\r\nfoo\r\n",
    "utf16le.txt": ("\ufeff" + TEXT).encode("utf-16-le"),
    "utf16be.txt": ("\ufeff" + TEXT).encode("utf-16-be"),
    "utf16-crlf.txt": "\ufefffoo\r\nünï\r\n\r\n".encode("utf-16-le"),
    "utf16-odd.txt": "\ufefffoo\nbar".encode("utf-16-le") + b"x",
    "utf16-half.txt": b"\xff\xfe" + "foo\n".encode("utf-16-le") + b"\x3d\xd8b\0\n\0",
    "utf16-bare.bin": "foo\nbar\n".encode("utf-16-le"),
    "utf16-empty.txt": b"\xff\xfe",
    "latin1.txt": b"caf\xe9\nfoo\xff bar\n\xe9\n\xfc\xfcber na\xefve\n\xa0\n\xb5\n",
    "gbk.txt": "中文 foo\n测试\n".encode("gbk"),
    "cut.txt": b"foo\xe2\x82\nbar\xf0\x9f\x98\n\xe2\x28\xa1 caf\xc3",
    "overlong.txt": b"\xc0\xafx\n\xed\xa0\x80y\n\xf4\x90\x80\x80z\n\xfe\xff\xfe foo\n",
    "empty.txt": b"",
    "newline.txt": b"\n",
    "newlines.txt": b"\n\n\n",
    "crlfs.txt": b"\r\n\r\n",
    "cr-only.txt": b"\r",
    "no-end.txt": b"bar\nfoo",
    "binary.bin": b"foo\0bar\nfoo\n",
    "last-nul.bin": b"foo\n" + b"x" * 8187 + b"\0\nfoo\n",
    "late-nul.txt": b"foo\n" + b"x" * 8188 + b"\0\nfoo\n\0foo\nbar\n",
    "far-nul.txt": (b"- " * 800 + b"\n") * 6 + b"\0\nalpha\n",
    "long.txt": "x" * 2_000 + "foo" + "y" * 2_000 + "\nfoo\n" + "é" * 900 + "bar\r\n",
    "later.txt": ("- " * 800 + "\n") * 45 + "alpha foo \u212a\n",
    "page.txt": "a\x0c\n\x0c\nfoo\x0cbar\n",
    "sub/deep/a.txt": "foo\nalpha\n",
    ".hidden/.dot": "foo\n",
    "__init__.py": "def parse_date(text):\r\n    return foo\r\n",
    **dict.fromkeys((name for name in re.split(r"[|\n]", NAMES) if ":" not in name), "foo q\n"),
    **{os.fsdecode(name): "foo\nalpha\n" for name, _ in HARD_NAMES},
    **{f"many/{n:03}": SOME[n % len(SOME)] for n in range(150)},
}

# Two blanks or a line end stand between them.
REGEXES = r"""
foo  bar  FOO  alpha beta  parse_date  return foo\(a, b\)  foo\(\)  a\.c  a.c  x = 1  \[section\]
\{brace\}  \\path  \\  \\n  /  //  "hi"  it's  #  @  ~  `  \$HOME  \^caret  &  %  !  =  -  --  -v
--files  -e foo  z  q  xyzzy  Q  K  k  kelvin  ſ  s  S  İ  ı  i  I  dotless  ß  ẞ  ss  straße
STRASSE  σ  ς  Σ  µ  μ  ǅ  ǆ  ﬁ  ﬅ  fi  é  É  ü  Ü  über  café  cafe  naïve  nai  日  日本
テスト  😀  👩  в  ᲀ  θ  ϴ  ω  Ω  å  Å  ṡ  ẛ  [abc]  [^abc]  [a-z]  [^a-z]  [A-Z]+  [0-9]{2}
[a-zA-Z_]\w*  [é-ü]  [^\x00-\x7f]  [^ -~]  [\w.]+@  [\[\]]  []a]  [^\W\d_]+  [i]  [k]  [K]  [s-t]
[h-j]x  [^k]$  [\s\d]  [-a]  [\\]  [.]  [α-ω]  [\u0130-\u0131]  [\x0b\x0c]  ^foo  foo$  ^foo$  ^
$  ^$  ^\s*$  \A  \Z  \Afoo  foo\Z  ^.$  ^..$  \s$  \S$  [^a]$  bar$  ^end  ^\ufefffoo  x$
\bfoo\b  \bfoo  foo\b  \Boo  oo\B  \b  \B  \bé  \b日  \bK\b  k\b  \bs\b  \w+  ^\w+$  ^\W+$
\W\b\w  \bnai\w+\b  \bin  \d  \d+  \D  \d{4}-\d\d  ^\d$  \s  \S  \s\s  a\sb  a\Sb  \s{2}  \w\s\w
\W  ^\w  \w$  \d\s\d  ^\D+$  \t  \r  \x0c  foo|bar  foo|$  ^foo|bar$  (foo|bar)+
alpha|beta|gamma  (a|b)(c|d)  |  foo|  (?:foo|fo)o?  z|q|j  qq|jj  TODO|FIXME  a*  a+  a?  a{2}
a{2,}  a{,2}b  a{2,3}b  a*?b  a+?  (ab)+  (ab){2}  (?:ab){1,2}  .*  .+  .?  .{3}  ^.{4}$  o{2}
a{2  {  }  a{  x{0}  a{0,0}  a++  a*+b  (?>a+)b  foo(?=\()  foo(?!\()  (?<=foo)b  (?<!f)oo
(?<= )foo  (?!)  (?=)  (a)\1  (\w)\1  (ab)\1  (?P<c>[a-z])(?P=c)  (\w+) \1  ((a)b)\1\2  (foo).*\1
(.)(.)\2\1  (foo)?(?(1)bar|baz)  (?i)foo  (?i)k  (?i)ſ  (?i)straße  (?s).  (?s)foo.  (?m)^foo$
(?x) f o o  (?x)foo # c  (?a)\w+$  (?a)\bé  (?i:F)oo  (?-i:f)oo  (?im)^ALPHA  (?ai)k  (?u)\d
(?a)\d  (?s:.)$  (?:)  ()  (?#c)foo  (?a)\s\S  (?ia)[a-z]$  \x66oo  \u00e9  \u212a  \U0001f600
\141  \N{LATIN SMALL LETTER E WITH ACUTE}  \a  \f  \v  \n  foo\n  a|\n  [\n]  [^\n]  [^\r]
foo\r?  foo[^\n]  \r$  \.py  \.  \-  \/  \:  \ foo  \x1b\[  [\x1c-\x1f]  \u2028  a.b  \x85  ^\x85
\#  \0  \x00  caf.  caf.$  caf\W  caf\w  foo.bar  foo\Wbar  foo[^x]bar  \ufffd  \ufffd.
^.\ufffd?$  [\ufffd]  caf\ufffd  q  ^foo q$  o q  f.*q  (f|b)oo  (?:alpha|beta) (?:BETA|beta)
.*foo  foo.*  .*foo.*  ^.*$  \w+\(.*\)  \S+@\S+  \.\w+:  https?://[^\s]+  [A-Za-z]+_[a-z]+
__\w+__  ^\s+return  ^(\s*)def\s  \d+:\d+  fo{2}  fo{1,2}b?  foo{0}  foo+ bar  ab{}  a{,}b  fo*o
al(?:ph)?a  al(?:ph|pl)a  de(f|l) \w+_date  foo.bar.foo  [f]oo  f[o]o  fo[o]  alpha|be.a|^x
(?:)foo  foo()  foo\b.*\bbar  say ["']hi  sa.? "hi"  \x61lpha  alph\x61  al\160ha  hTTp
STRASSE|foo  foo|  foo\Z|end  v\d+(\.\d+)*  "[^"]*"  '[^']*'  a/b/c\.py
"""
BLANKS = [
    "a b",
    "foo bar",
    "foo bar|alpha",
    "x = [0-9]",
    "x = 1$",
    "q @",
    "def |FIXME",
    "key",
    " ",
    "  ",
    "   ",
    " $",
    "^ ",
    "(?x)foo | bar",
    "foo  ",
    "[ ]{2}$",
]
SEARCHES = [
    {"regex": regex, "ignore_case": ignore_case}
    for regex in dict.fromkeys([*(r for r in re.split("  +|\n", REGEXES) if r), *BLANKS])
    for ignore_case in (False, True)
]


def decode(data: bytes) -> str | None:
    """The text of a file; None if it is binary."""
    if data.startswith(BOMS):
        return data.decode("utf-16", "replace")
    return None if b"\0" in data[:8192] else data.decode("utf-8-sig", "replace")


def lines_of(data: bytes) -> list[str]:
    """The lines of a file."""
    lines = (decode(data) or "").split("\n")
    return [line.removesuffix("\r") for line in lines[: -1 if lines[-1] == "" else None]]


def short(line: str) -> str:
    """A line of a result; of a long one, of which a window is shown, the name and the number."""
    shown = plain(line)
    return shown if len(shown) < 200 else shown[: shown.index(":", shown.index(":") + 1) + 1]


def reference(files: dict[str, list[str]], search: dict[str, Any]) -> list[str]:
    """What a search must find in the lines of files."""
    with warnings.catch_warnings(action="ignore"):
        wanted = re.compile(search["regex"], re.IGNORECASE if search["ignore_case"] else 0)
    return [
        short(f"{name}:{number}:{line}".replace("\0", "\ufffd"))  # a NUL can not be sent
        for name in sorted(files)
        for number, line in enumerate(files[name], 1)
        if wanted.search(line)
    ]


Answers = dict[tuple[str, bool], list[str]]


def answers(model: Model, searches: list[dict[str, Any]]) -> Answers:
    """What each search finds on all its pages."""
    gathered = all_pages(model, [("grep", search) for search in searches])
    keys = [(search["regex"], search["ignore_case"]) for search in searches]
    return dict(zip(keys, gathered, strict=True))


def many_answers(folder: Path, searches: list[dict[str, Any]], path: str) -> Answers:
    """The same for many searches, in replies of forty calls."""
    gathered: Answers = {}
    for at in range(0, len(searches), 40):
        with closing(Model(folder, path)) as model:
            gathered |= answers(model, searches[at : at + 40])
    return gathered


def differences(expected: Answers, have: Answers) -> list[tuple[tuple[str, bool], Any, Any]]:
    """The searches with other results: up to three lines that are lost, and that are too many."""
    return [
        (
            key,
            [line for line in expected[key] if line not in have[key]][:3],
            [line for line in have[key] if line not in expected[key]][:3],
        )
        for key in expected
        if have[key] != expected[key]
    ]


def shortened(found_: Answers) -> Answers:
    """The results as the reference gives them."""
    return {key: [concealed(short(line)) for line in lines] for key, lines in found_.items()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the files."""
    folder = tmp_path_factory.mktemp("corpus")
    write(folder, CORPUS)
    return folder


@pytest.fixture(
    scope="module",
    params=[pytest.param(9, id="a ninth"), pytest.param(1, id="all", marks=pytest.mark.long)],
)
def searches(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Every ninth regex, or all; each with and without regard to case."""
    return [search for at, search in enumerate(SEARCHES) if at // 2 % request.param == 0]


@pytest.fixture(scope="module")
def expected(searches: list[dict[str, Any]]) -> Answers:
    """What the reference finds."""
    files = {
        plain(name): lines_of(content.encode() if isinstance(content, str) else content)
        for name, content in CORPUS.items()
    }
    return {(s["regex"], s["ignore_case"]): reference(files, s) for s in searches}


@pytest.fixture(scope="module")
def spied_rg(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PATH with git and an rg that writes a line into `asked` before it searches."""
    folder = tmp_path_factory.mktemp("spied")
    (folder / "git").symlink_to(programs / "git" / "git")
    script = f'#!/bin/sh\necho asked >> "{folder}/asked"\nexec "{programs}/rg/rg" "$@"\n'
    (folder / "rg").write_text(script)
    (folder / "rg").chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def with_rg(corpus: Path, searches: list[dict[str, Any]], spied_rg: Path) -> Answers:
    """What is found with rg on PATH."""
    return many_answers(corpus, searches, str(spied_rg))


@pytest.fixture(scope="module")
def without_rg(corpus: Path, searches: list[dict[str, Any]], programs: Path) -> Answers:
    """What is found without it."""
    return many_answers(corpus, searches, str(programs / "git"))


def test_without_rg_all_regexes_find_what_the_reference_finds(
    expected: Answers, without_rg: Answers
) -> None:
    assert differences(expected, shortened(without_rg)) == []


def test_with_rg_all_regexes_find_what_the_reference_finds(
    expected: Answers, with_rg: Answers
) -> None:
    assert differences(expected, shortened(with_rg)) == []


def test_with_and_without_rg_the_results_are_equal_to_the_letter(
    with_rg: Answers, without_rg: Answers, spied_rg: Path
) -> None:
    assert differences(without_rg, with_rg) == []
    assert (spied_rg / "asked").read_text().count("asked\n") >= 20


def test_the_corpus_tries_what_it_is_meant_to_try(expected: Answers) -> None:
    assert len(expected) >= 80 and len(CORPUS) >= 210
    sizes = [len(lines) for lines in expected.values()]
    assert sum(size == 0 for size in sizes) < len(sizes) // 8
    assert sum(0 < size < 20 for size in sizes) > len(sizes) // 8
    differ = [key for key in expected if key[1] and expected[key] != expected[key[0], False]]
    assert len(differ) > len(sizes) // 16


ATOMS = st.sampled_from(
    r"a b foo k K s ſ i ı é É ü . \. \w \W \d \s \S \b \B ^ $ [ab] [^a] [a-f] [^\W\d] \\ / - \u212a"
    r" foo ab ki éa oo SS [é-ü] z q 1 \t \r \x0c _ @ (a) (?:ab) (?=a) (?!b) (?<=a) (a|b) (fo|o)"
    r" \x85 日 #".split()
)
PIECES = st.tuples(ATOMS, st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,2}", "+?", "*?"]))
SEQUENCES = st.lists(PIECES.map("".join), min_size=1, max_size=4).map("".join)
RANDOM_REGEXES = st.tuples(
    st.sampled_from(["", "", "", "(?i)", "(?a)", "(?s)", "(?m)"]),
    st.lists(SEQUENCES, min_size=1, max_size=2).map("|".join),
    st.sampled_from(["", "", "", "$", r"\b", " "]),
).map("".join)
RANDOM_LINES = st.lists(
    st.lists(
        st.sampled_from(
            "a b k K \u212a s \u017f i \u0131 é É ü fo o z 1 _ . - / \\ @ 日 \x85".split(" ")
        )
        | st.sampled_from([" ", "\t", "\r", "\x0c", "\x1c", "\u2028", "e\u0301", "foo", "\u00a0"]),
        max_size=8,
    ).map("".join),
    max_size=6,
)
ENCODERS: dict[str, Callable[[str], bytes]] = {
    "utf-8": lambda text: text.encode(),
    "bom": lambda text: text.encode("utf-8-sig"),
    "utf-16": lambda text: ("\ufeff" + text).encode("utf-16-be"),
    "latin-1": lambda text: text.encode("latin-1", "replace"),
    "crlf": lambda text: text.replace("\n", "\r\n").encode(),
    "no end": lambda text: text.removesuffix("\n").encode(),
}
RANDOM_FILES = st.dictionaries(st.sampled_from(list(ENCODERS)), RANDOM_LINES, min_size=1)


def compiles(regex: str) -> bool:
    """Whether it is a regular expression."""
    try:
        re.compile(regex)
    except re.error:
        return False
    return True


@pytest.fixture
def agree(workspace: Path, paths: dict[str, str]) -> Iterator[Callable[..., None]]:
    """Check that the same is found with rg, without it and in the reference.

    The folder has so many files that rg is worth its start.
    """
    write(workspace, {f"empty/{n}": b"" for n in range(200)})
    models: dict[str, Model] = {}

    def check(files: dict[str, list[str]], regexes: list[str]) -> None:
        contents = {name: ENCODERS[name]("\n".join(lines) + "\n") for name, lines in files.items()}
        write(workspace, dict.fromkeys(ENCODERS, b"") | contents)
        searches = [{"regex": r, "ignore_case": i} for r in regexes for i in (False, True)]
        lines = {name: lines_of(content) for name, content in contents.items()}
        expected = {(s["regex"], s["ignore_case"]): reference(lines, s) for s in searches}
        for name in ("rg", "git"):
            if name not in models or len(models[name].server.requests) > 200:
                end(models.pop(name, None))
                models[name] = Model(workspace, paths[name])
            assert differences(expected, answers(models[name], searches)) == []

    yield check
    for model in models.values():
        end(model)


def end(model: Model | None) -> None:
    """End a model, if there is one."""
    if model:
        model.close()


MANY_REGEXES = st.lists(RANDOM_REGEXES.filter(compiles), min_size=1, max_size=4, unique=True)


@settings(max_examples=6, **ANY)
@given(files=RANDOM_FILES, regexes=MANY_REGEXES)
def test_random_regexes_find_the_same_with_rg_without_it_and_in_the_reference(
    agree: Callable[..., None], files: dict[str, list[str]], regexes: list[str]
) -> None:
    agree(files, regexes)


@pytest.mark.long
@settings(max_examples=1_000, **ANY)
@given(files=RANDOM_FILES, regexes=MANY_REGEXES)
def test_a_thousand_random_regexes_find_the_same_with_rg_without_it_and_in_the_reference(
    agree: Callable[..., None], files: dict[str, list[str]], regexes: list[str]
) -> None:
    agree(files, regexes)


# -- an rg that is not as it should be

BROKEN = {
    "refuses": '#!/bin/sh\necho "error: unexpected argument" >&2\nexit 2\n',
    "stops half way": '#!/bin/sh\n"{rg}" "$@" | /usr/bin/head -c 7\nexit 2\n',
    "is killed": "#!/bin/sh\nkill -9 $$\n",
    "is no program": "\x7fELF no",
    "may not run": "#!/bin/sh\nexit 0\n",
}


@pytest.mark.parametrize("how", BROKEN)
def test_with_an_rg_that_fails_the_results_are_the_same(
    workspace: Path, tmp_path: Path, programs: Path, how: str
) -> None:
    write(workspace, {f"{n % 20}/{n}.txt": f"needle {n}\nhay\n" for n in range(300)})
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").symlink_to(programs / "git" / "git")
    (tmp_path / "bin/rg").write_text(BROKEN[how].replace("{rg}", f"{programs}/rg/rg"))
    (tmp_path / "bin/rg").chmod(0o644 if how == "may not run" else 0o755)
    calls = [("grep", {"regex": r}) for r in ("needle", "needle 2?7$", "hay$", "nothing at all")]
    expected = use(workspace, calls, str(programs / "git"))
    assert [len(found(text)) for text in expected] == [300, 2, 300, 0]
    assert use(workspace, calls, str(tmp_path / "bin")) == expected


@pytest.mark.long
def test_an_rg_that_hangs_does_not_hang_the_search(
    run_agent: Callable[..., Any], workspace: Path, tmp_path: Path
) -> None:
    write(workspace, {f"{n}.txt": "needle\n" for n in range(300)})
    write(tmp_path, {"bin/rg": "#!/bin/sh\nexec /bin/sleep 600\n"})
    (tmp_path / "bin/rg").chmod(0o755)
    with FlakyServer([evil_search("needle"), "done"]) as server:
        environ = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
        done = run_agent("go", server=server, env=environ, timeout=90)
    (text,) = results(server.requests[1])
    assert done.returncode == 0
    assert text.startswith("error: ") or len(found(text)) == 300


CONFIGURED = [
    "--glob=!*.txt",
    "--invert-match\n--max-depth=1\n--max-filesize=1",
    "--encoding=utf-16\n--word-regexp\n--quiet",
    "--no-such-option",
]


@pytest.mark.parametrize("option", CONFIGURED)
def test_what_the_user_set_for_rg_does_not_change_a_search(
    workspace: Path, tmp_path: Path, paths: dict[str, str], option: str
) -> None:
    write(workspace, {f"{n % 20}/{n}.txt": f"a needle {n}\nNEEDLES\n" for n in range(300)})
    write(tmp_path, {"rc": f"{option}\n"})
    calls = [("grep", {"regex": r}) for r in ("needle", "a need.e 2?7$", "NEEDLE", "nothing")]
    rc = {"RIPGREP_CONFIG_PATH": str(tmp_path / "rc")}
    assert use(workspace, calls, paths["rg"], **rc) == use(workspace, calls, paths["git"])


DASHES = ["-v", "--version", "--files", "-e needle", "--pre=cat", "-f/dev/null", "--", "-"]


@pytest.mark.parametrize("path", ["rg", "git"])
def test_a_regex_and_a_name_that_look_like_options_are_none(
    workspace: Path, paths: dict[str, str], path: str
) -> None:
    write(workspace, {"-l": "".join(f"{text} x\n" for text in DASHES)} | {"--quiet": "nothing\n"})
    calls = [("grep", {"regex": f"{re.escape(text)} x$"}) for text in DASHES]
    texts = use(workspace, calls, paths[path])
    last = {"--": [7], "-": [7, 8]}
    assert [found(text)[-1] for text in texts] == [
        f"-l:{n}:{text} x" for n, text in enumerate(DASHES, 1)
    ], last


# -- what hostile repositories and odd trees have met


def promisor(program: Path, worktree: str) -> str:
    """A configuration by which git would run a program to get what is missing."""
    return (
        f"[core]\n\trepositoryformatversion = 1\n\tbare = false\n\tworktree = {worktree}\n"
        f'\tsshCommand = "{program}"\n[extensions]\n\tpartialClone = origin\n'
        '[remote "origin"]\n\turl = ssh://h/x\n\tpromisor = true\n'
    )


def lacking(folder: Path, config: str) -> Path:
    """Make a repository that lacks the .gitignore of a folder; its .git."""
    write(folder, {"a.py": "k\n", "d/.gitignore": "*.o\n", "d/b.py": "k\n"})
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "x")
    git(folder, "update-index", "--skip-worktree", "d/.gitignore")
    lost = git(folder, "rev-parse", ":d/.gitignore").strip()
    (folder / ".git/objects" / lost[:2] / lost[2:]).unlink()
    (folder / "d/.gitignore").unlink()
    write(folder, {"d/new.py": "k\n"})  # for this git wants to know the list
    (folder / ".git/config").write_text(config)
    return folder / ".git"


@pytest.mark.parametrize("inner", [False, True], ids=["the repository", "a bare one inside"])
def test_a_search_lets_git_fetch_nothing_that_is_missing(
    workspace: Path, tmp_path: Path, inner: bool
) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n/usr/bin/touch {tmp_path}/ran\n")
    program.chmod(0o755)
    docs = workspace / "docs" if inner else workspace
    made = lacking(docs, promisor(program, "." if inner else ".."))
    if inner:
        for path in made.iterdir():
            path.rename(docs / path.name)
        made.rmdir()
        git(workspace, "init", "-q")
    where = {"path": "docs"} if inner else {}
    calls = [("list_files", where), ("grep", {"regex": "^k", **where}), ("list_files", {})]
    texts = use(workspace, [*calls, ("read_file", {"path": "a.pyy"})])
    front = "docs/" if inner else ""
    assert set(found(texts[1])) >= {f"{front}a.py:1:k", f"{front}d/b.py:1:k"}
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
def test_a_pipe_as_the_list_of_what_is_ignored_does_not_hold_the_search(
    run_agent: Callable[..., Any], workspace: Path
) -> None:
    git(workspace, "init", "-q")
    write(workspace, {"a.txt": "k\n"})
    os.mkfifo(workspace / ".gitignore")
    calls = [{"name": "list_files", "arguments": {}}, {"name": "grep", "arguments": {"regex": "k"}}]
    with FlakyServer([{"calls": calls}, "done"]) as server:
        run_agent("go", server=server, timeout=60)
    listed, searched = results(server.requests[-1])
    assert (found(listed), found(searched)) == (["a.txt"], ["a.txt:1:k"])


def test_a_match_across_the_edge_of_a_block_is_found_once_with_its_number(workspace: Path) -> None:
    line = b"y" * (32_000_000 - 3) + b"NEEDLE" + b"y" * 100
    write(workspace, {"f": line + b"\nlast NEEDLE\n"})
    lines = found(ask(workspace, "grep", regex="NEEDLE"))
    assert [line.split(":")[1] for line in lines] == ["1", "2"]
    assert "yNEEDLEy" in lines[0] and lines[1] == "f:2:last NEEDLE"


def test_binary_files_are_counted_alike_with_and_without_rg(
    workspace: Path, paths: dict[str, str]
) -> None:
    write(workspace, {f"{n:03}.txt": f"needle {n}\n" if n % 50 == 0 else "-\n" for n in range(300)})
    write(workspace, {f"{n}.bin": b"\0\1\2" for n in range(3)} | {"n.bin": b"\0needle"})
    calls = [("grep", {"regex": regex}) for regex in ("needle", "NEEDLE", "absent", "need.e")]
    calls += [("grep", {"regex": "NEEDLE", "ignore_case": True})]
    texts = [use(workspace, calls, paths[name]) for name in ("rg", "git")]
    assert texts[0] == texts[1]
    assert [counted(text, "binary") for text in texts[0]] == [1, 0, 0, 1, 1]


@pytest.mark.parametrize("path", ["rg", "git"])
def test_a_comment_in_a_regex_is_no_text_and_what_it_ends_may_be_missing(
    workspace: Path, paths: dict[str, str], path: str
) -> None:
    write(workspace, {f"{n}": "hay\n" for n in range(300)} | {"f": "xa\n", "g": "zz\n"})
    calls = [("grep", {"regex": regex}) for regex in ("xab(?#x)?", "xa(?#y)|zz", "x(?#b)a")]
    texts = use(workspace, calls, paths[path])
    assert [found(text) for text in texts] == [["f:1:xa"], ["f:1:xa", "g:1:zz"], ["f:1:xa"]]


def test_a_pattern_with_many_stars_ends_at_once(
    run_agent: Callable[..., Any], workspace: Path
) -> None:
    write(workspace, {"a" * 200: "k\n"})
    patterns = ("*a*a*a*a*a*b", "*a*a*a*a*a*a", "*aa*a?*[a]*aaa*b", "*a*a*/*a*a*a*b")
    calls = [{"name": "list_files", "arguments": {"pattern": pattern}} for pattern in patterns]
    with FlakyServer([{"calls": calls}, "done"]) as server:
        run_agent("go", server=server, timeout=60)
    listed = [found(text) for text in results(server.requests[-1])]
    assert listed == [[], ["a" * 200], [], []]


def test_random_patterns_mean_what_fnmatch_says(workspace: Path) -> None:
    chance = random.Random(1)
    names = sorted({"".join(chance.choices("ab.", k=chance.randint(1, 7))) for _ in range(150)})
    names = [name for name in names if name.strip(".")]
    pieces = ["*", "*", "?", "a", "b", ".", "[ab]", "[!a]"]
    patterns = {"".join(chance.choices(pieces, k=chance.randint(1, 7))) for _ in range(200)}
    write(workspace, dict.fromkeys(names, ""))
    with closing(Model(workspace)) as model:
        texts = model.use(("list_files", {"pattern": pattern}) for pattern in sorted(patterns))
    for pattern, text in zip(sorted(patterns), texts, strict=True):
        assert found(text) == fnmatch.filter(names, pattern), pattern
