"""The promises of STYLE.md and DESIGN.md about the layout of `agent.py`."""

import ast
import functools
import os
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import agent

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = (ROOT / "agent.py", ROOT / "flaky_server.py")
SOURCE = PRODUCT[0].read_text(encoding="utf-8")
LINES = SOURCE.split("\n")
TREE = ast.parse(SOURCE)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DOCSTRING = ast.get_docstring(TREE, clean=False) or ""
BANNER = re.compile(r"# == (\d+)\. (\w+) =+")
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = [node for node in ast.walk(TREE) if isinstance(node, Function)]
# What is not the standard library; urllib3 comes with requests, which lets its errors through.
HOUSE = {"requests", "urllib3", "ddgs", "trafilatura", "flaky_server", "rich", "prompt_toolkit"}
TOP_LEVEL = {"agent.py", "flaky_server.py", "tests", "README.md", "pyproject.toml", ".gitignore"}
LOOK = """
import sys, threading
before = set(sys.modules)
import agent
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
found = loaded - sys.stdlib_module_names - {"agent"}
assert not found, found
assert threading.active_count() == 1, threading.enumerate()
"""

LATER = """
import sys
before = set(sys.modules)
import agent
later = {value._module for value in vars(agent).values() if type(value) is agent.Later}
assert len(later) > 10, later
assert not later & (set(sys.modules) - before), later & (set(sys.modules) - before)
"""


def length(function: Function) -> int:
    """The lines of a function with its docstring, without its decorators."""
    return (function.end_lineno or 0) - function.lineno + 1


def place(node: ast.AST, name: str = "") -> str:
    """Where a node stands, for the message of a test that fails."""
    return f"line {node.lineno}: {name or getattr(node, 'name', '')}"


@functools.cache
def banners() -> list[tuple[int, str, int]]:
    """Number, name and line of each section."""
    found = enumerate(map(BANNER.fullmatch, LINES), 1)
    return [(int(match[1]), match[2], line) for line, match in found if match]


def section_of(line: int) -> int:
    """The number of the section in which a line stands; 0 for the top of the file."""
    return max((number for number, _, start in banners() if start <= line), default=0)


# -- the file at a glance ------------------------------------------------------------------------


def test_the_contents_list_names_the_sections_with_the_numbers_of_their_banners():
    listed = re.findall(r"^ +(\d+)\. (\w+)  +\S", DOCSTRING, re.MULTILINE)
    assert [(int(n), name) for n, name in listed] == [(n, name) for n, name, _ in banners()]


def test_the_sections_are_those_of_the_design_in_its_order():
    names = "Settings Transcript Sessions Client Workspace Tools Permissions Agent Extras Terminal"
    design = dict(enumerate([*names.split(), "Main"], 1))
    found = [(number, name) for number, name, _ in banners()]
    assert found == sorted(found)
    assert {number: design[number] for number, _ in found} == dict(found)
    assert set(design) - set(dict(found)) <= {9}  # Extras come later


def test_each_banner_is_79_columns_wide_and_has_a_preface_of_at_most_eight_lines():
    for _, name, line in banners():
        preface = 0
        while LINES[line + preface].startswith("#"):
            preface += 1
        assert (name, len(LINES[line - 1]), preface <= 8) == (name, 79, True)


def test_the_docstring_has_at_most_45_lines_and_its_five_parts():
    assert len(DOCSTRING.strip().split("\n")) <= 45
    for part in ("Contents", "Vocabulary", "Left out on purpose"):
        assert part in DOCSTRING


def test_no_line_is_longer_than_100_columns():
    long = [
        f"{path.name}:{number}"
        for path in PRODUCT
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
        if len(line) > 100
    ]
    assert long == []


def test_the_checkers_are_never_waived_in_a_line():
    waiver = re.compile(r"#\s*(?:noqa|type:\s*ignore|pragma|fmt:|mypy:|pyright:|ruff:)")
    texts = [path.read_text(encoding="utf-8") for path in PRODUCT]
    assert [waiver.findall(text) for text in texts] == [[], []]


# -- functions -----------------------------------------------------------------------------------


def test_no_function_is_longer_than_40_lines():
    assert [place(f) for f in FUNCTIONS if length(f) > 40] == []


def test_the_median_function_has_about_ten_lines_and_nine_in_ten_are_under_30():
    lengths = [length(function) for function in FUNCTIONS]
    short = sum(1 for lines in lengths if lines < 30)
    assert 6 <= statistics.median(lengths) <= 14
    assert short / len(lengths) >= 0.9


def is_tool(function: Function) -> bool:
    """Whether a function is offered to the model: its parameters are those of the contract."""
    return any("tool" in ast.unparse(decorator) for decorator in function.decorator_list)


def positional(function: Function) -> list[str]:
    """The parameters that may be given by position, without self."""
    given = function.args
    names = [arg.arg for arg in (*given.posonlyargs, *given.args)]
    return [name for name in names if name not in ("self", "cls")]


def test_no_function_has_more_than_five_positional_parameters():
    assert [place(f) for f in FUNCTIONS if len(positional(f)) > 5 and not is_tool(f)] == []


def nesting(node: ast.AST, depth: int = 0) -> int:
    """The deepest block inside a node; an elif is no deeper, a function inside starts anew."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.Lambda | ast.ClassDef):
            continue
        chained = isinstance(node, ast.If) and [child] == node.orelse and isinstance(child, ast.If)
        deepest = max(deepest, nesting(child, depth + (isinstance(child, BLOCKS) and not chained)))
    return deepest


def test_no_block_is_nested_deeper_than_three():
    assert [place(f) for f in FUNCTIONS if nesting(f) > 3] == []


def test_the_measure_of_nesting_counts_blocks_and_not_chains():
    chain = "def f():\n if a: 0\n elif b: 1\n elif c:\n  for x in y: 2\n else: 3"
    deep = "def f():\n if a:\n  for b in c:\n   with d:\n    try: 1\n    finally: 2"
    assert [nesting(ast.parse(text).body[0]) for text in (chain, deep)] == [2, 4]


def public(body: list[ast.stmt], name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The public classes and functions of a file, and the public methods of such classes."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield f"{name}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{node.name}.")


def test_each_public_class_and_function_says_in_a_line_what_it_is():
    missing = [name for name, node in public(TREE.body) if not ast.get_docstring(node)]
    assert missing == []


def test_signatures_are_annotated():
    bare = [
        place(function, arg.arg)
        for function in FUNCTIONS
        for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        if arg.annotation is None and arg.arg not in ("self", "cls")
    ]
    assert bare + [place(f) for f in FUNCTIONS if f.returns is None] == []


# -- what is not done ----------------------------------------------------------------------------


def test_there_is_no_global():
    assert [place(node, "global") for node in ast.walk(TREE) if isinstance(node, ast.Global)] == []


def caught() -> list[tuple[str, ast.ExceptHandler]]:
    """The names that each handler catches; "" for a bare except."""
    handlers = [node for node in ast.walk(TREE) if isinstance(node, ast.ExceptHandler)]
    found = []
    for handler in handlers:
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        found += [(ast.unparse(kind) if kind else "", handler) for kind in kinds]
    return found


def test_exceptions_are_caught_broadly_in_exactly_three_places():
    names = [name for name, _ in caught()]
    counts = [names.count(name) for name in ("Exception", "BaseException", "")]
    assert counts == [3, 0, 0]


def test_the_three_broad_places_are_in_the_agent_and_in_main():
    broad = [section_of(handler.lineno) for name, handler in caught() if name == "Exception"]
    assert set(broad) <= {8, 11}
    assert 11 in broad


def test_no_exception_is_swallowed_without_a_word():
    silent = [
        place(handler, name)
        for name, handler in caught()
        if [type(node) for node in handler.body] == [ast.Pass]
    ]
    assert silent == []


def test_the_environment_is_read_only_where_settings_and_main_are():
    readers = {
        section_of(node.lineno)
        for node in ast.walk(TREE)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
    }
    assert readers <= {1, 11}


def test_only_the_terminal_and_main_print():
    names = ("print", "input", "sys.stdout", "sys.stderr", "sys.stdin")
    places = {
        section_of(node.lineno)
        for node in ast.walk(TREE)
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in names
    }
    assert places <= {10, 11}


# -- imports and references ----------------------------------------------------------------------


def imported(node: ast.AST) -> list[str]:
    """The packages that an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    return [node.module.split(".")[0]] if isinstance(node, ast.ImportFrom) and node.module else []


def test_requests_and_the_optional_packages_are_the_only_foreign_ones():
    names = {name for node in ast.walk(TREE) for name in imported(node)}
    assert names - set(sys.stdlib_module_names) <= HOUSE
    assert "requests" in names


def test_foreign_packages_are_imported_inside_functions():
    inside = {node for function in FUNCTIONS for node in ast.walk(function)}
    guarded = [n for n in TREE.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n)]
    inside |= {node for block in guarded for node in ast.walk(block)}
    outside = [node for node in ast.walk(TREE) if node not in inside]
    names = {name for node in outside for name in imported(node)}
    assert names & HOUSE == set()


def test_importing_the_file_does_nothing(tmp_path):
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    before = sorted(os.listdir(ROOT))
    command = [sys.executable, "-W", "error", "-c", LOOK]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (list(tmp_path.iterdir()), sorted(os.listdir(ROOT))) == ([], before)


def bound(node: ast.AST) -> set[str]:
    """The names that a function makes its own: parameters, assignments, imports, definitions."""
    names = set()
    for child in ast.walk(node):
        if isinstance(child, ast.arg):
            names.add(child.arg)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            names.add(child.id)
        elif isinstance(child, ast.alias):
            names.add((child.asname or child.name).split(".")[0])
        elif child is not node and isinstance(child, Function | ast.ClassDef | ast.ExceptHandler):
            names.add(child.name or "")
    return names


def references(node: ast.AST) -> Iterator[ast.Name]:
    """The names that a part of the file takes from its top level, annotations included."""
    if isinstance(node, ast.ClassDef):
        for part in ast.iter_child_nodes(node):
            yield from references(part)
        return
    own = bound(node) if isinstance(node, Function) else set()
    names = [child for child in ast.walk(node) if isinstance(child, ast.Name)]
    yield from (name for name in names if isinstance(name.ctx, ast.Load) and name.id not in own)


def definitions(tree: ast.Module) -> dict[str, int]:
    """The names that the file defines at its top level, with the line of the definition."""
    found: dict[str, int] = {}
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef):
            found.setdefault(node.name, node.lineno)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for child in ast.walk(node):
                if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                    found.setdefault(child.id, child.lineno)
    return found


def test_a_section_uses_only_those_above_it():
    lines = definitions(TREE)
    downward = [
        f"line {name.lineno} (section {section_of(name.lineno)}) uses {name.id}"
        for node in TREE.body
        for name in references(node)
        if section_of(lines.get(name.id, 0)) > section_of(name.lineno)
    ]
    assert downward == []


def test_the_search_for_references_sees_bodies_defaults_and_annotations():
    text = "def f(a: A, b=B) -> C:\n x = D\n return [x, a, E.e]\nclass G(H):\n i: I = J"
    found = {name.id for node in ast.parse(text).body for name in references(node)}
    assert found == set("ABCDEHIJ")


# -- the system prompt ---------------------------------------------------------------------------


def test_the_system_prompt_is_text_of_at_most_60_lines_without_a_clock(tmp_path):
    from agent import Settings, build_agent

    texts = []
    for _ in range(2):
        url = "http://127.0.0.1:9/v1"
        settings = Settings(model="m", base_url=url, api_key="x", workspace=str(tmp_path))
        made = build_agent(settings)
        made.close()
        texts.append(made.transcript.messages[0]["content"])
    assert texts[0] == texts[1]
    assert len(texts[0].split("\n")) <= 60
    assert re.search(r"\b20\d\d\b|\d\d:\d\d", texts[0].replace(str(tmp_path), "")) is None


# -- the package ---------------------------------------------------------------------------------


def test_the_file_can_be_run_without_being_installed():
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///\n", SOURCE, re.MULTILINE)
    assert block is not None
    text = "".join(line[2:] + "\n" for line in block[1].splitlines())
    assert tomllib.loads(text) == {"requires-python": ">=3.11", "dependencies": ["requests"]}


def test_the_distribution_is_the_two_files_with_one_dependency_and_one_command():
    project = PROJECT["project"]
    fixed = [project[key] for key in ("name", "requires-python", "dependencies", "scripts")]
    assert fixed == ["onefile-agent", ">=3.11", ["requests"], {"agent": "agent:main"}]
    assert sorted(PROJECT["tool"]["setuptools"]["py-modules"]) == ["agent", "flaky_server"]


def test_the_extras_are_the_web_the_terminal_and_what_the_tests_need():
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras["web"]) == {"ddgs", "trafilatura", "lxml_html_clean"}
    assert set(extras["ui"]) == {"rich", "prompt_toolkit"}
    assert set(extras["test"]) >= {"pytest", "hypothesis", "ruff"}
    assert set(extras["test"]) & {"mypy", "pyright"}


def test_there_is_one_version_and_it_stands_in_the_file(tmp_path):
    [version] = re.findall(r'^__version__ = "(\d+\.\d+\.\d+\w*)"$', SOURCE, re.MULTILINE)
    assert "version" not in PROJECT["project"]
    assert "version" in PROJECT["project"]["dynamic"]
    attribute = PROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    command = [sys.executable, str(ROOT / "agent.py"), "--version"]
    shown = subprocess.check_output(command, cwd=tmp_path, text=True)
    assert (attribute, shown) == ("agent.__version__", f"agent {version}\n")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no git checkout")
def test_the_top_level_of_the_repository_holds_exactly_what_was_agreed():
    listed = subprocess.check_output(["git", "-C", str(ROOT), "ls-files", "-z"], text=True)
    names = {path.split("/")[0] for path in listed.rstrip("\0").split("\0")}
    hidden = {name for name in names if name.startswith(".")} - TOP_LEVEL
    assert names - hidden == TOP_LEVEL


def test_importing_the_file_imports_none_of_what_is_put_off(tmp_path):
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-S", "-c", LATER]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_the_file_compiles_no_regex():
    outside = (node for node in TREE.body if not isinstance(node, ast.ClassDef | ast.FunctionDef))
    made = [node for top in outside for node in ast.walk(top) if isinstance(node, ast.Call)]
    assert [node.lineno for node in made if ast.unparse(node.func) == "re.compile"] == []


def test_what_only_the_checkers_import_is_there_for_the_program_too():
    blocks = [node for node in TREE.body if isinstance(node, ast.If)]
    [block] = [node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING"]
    named = [node for node in block.body if isinstance(node, ast.Import | ast.ImportFrom)]
    named = [node for node in named if getattr(node, "module", "") != "typing"]
    names = {alias.name for node in named for alias in node.names}
    assert names - {"requests", "ctypes"} <= set(vars(agent))


def test_a_dataclass_that_is_made_at_its_first_use_is_a_dataclass():
    for look in ("is_dataclass(S)", "replace(S(), mode='plan')", "asdict(S())", "fields(S)"):
        code = f"from dataclasses import *; from agent import Settings as S; assert {look}"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
