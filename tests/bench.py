"""What the agent costs, in figures: `python tests/bench.py`. Not collected by pytest.

A row is a function under `@row` that returns its measured figures; add one below the others.
`python tests/bench.py WORD...` measures only the rows whose function's name holds one of the words.
The exit code is 1 if a figure is above twice its target (another machine, a busy one), else 0.
"""

import compileall
import contextlib
import functools
import inspect
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import requests

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import agent
import flaky_server

ROOT = Path(__file__).resolve().parent.parent
CHUNK = 64 * 1024
STREAM_BYTES = 20_000_000
TRIES = 3
STARTS = 15  # of a program that does next to nothing
CLEANUP = contextlib.ExitStack()  # what several rows use, until the table is printed


class Figures(NamedTuple):
    """What a row measured: ours, what it is compared with, and the most that their ratio may be."""

    ours: float
    bare: float
    target: float
    unit: str = "s CPU"


class Missing(Exception):
    """The machine lacks what a row compares with."""


ROWS: list[Callable[[], Figures]] = []


def row(measure: Callable[[], Figures]) -> Callable[[], Figures]:
    """A function whose docstring is the name of a line of the table."""
    ROWS.append(measure)
    return measure


def cpu(work: Callable[[], object]) -> float:
    """CPU seconds of one run, the best of three."""
    best = float("inf")
    for _ in range(TRIES):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


def walls(*works: Callable[[], object], tries: int = TRIES) -> list[float]:
    """Seconds of one run of each, the best of some in turn, after one that warms up."""
    best = [float("inf")] * len(works)
    for attempt in range(tries + 1):
        for at, work in enumerate(works):
            began = time.perf_counter()
            work()
            if attempt:
                best[at] = min(best[at], time.perf_counter() - began)
    return best


def new_folder() -> Path:
    """An empty folder that goes away at the end."""
    return Path(CLEANUP.enter_context(tempfile.TemporaryDirectory(prefix="agent-bench-"))).resolve()


def clean_environment(home: Path) -> dict[str, str]:
    """What the programs see: nothing of the user's settings."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
    }


def git(folder: Path, *words: str) -> None:
    """Run git there."""
    subprocess.run(["git", *words], cwd=folder, env=clean_environment(folder), check=True)


# -- reading a stream


Delta = dict[str, object]


def small_events(delta_of: Callable[[str], Delta], size: int = STREAM_BYTES) -> bytes:
    """A stream of events of about 150 bytes, as OpenAI sends them, with its end."""

    def event(delta: Delta, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        body = {"id": "chatcmpl-0123456789", "object": "chat.completion.chunk", "model": "m-1"}
        text = json.dumps({**body, "choices": [choice]}, separators=(",", ":"))
        return b"data: " + text.encode() + b"\n\n"

    count = size // len(event(delta_of(" word99999")))
    words = [event(delta_of(f" word{number}")) for number in range(count)]  # no piece comes twice
    return b"".join(words) + event({}, "stop") + b"data: [DONE]\n\n"


def text(word: str) -> Delta:
    """A piece of the answer."""
    return {"content": word}


def thought(word: str) -> Delta:
    """A piece of the reasoning."""
    return {"reasoning_content": word}


def argument(word: str) -> Delta:
    """A piece of a call's arguments."""
    return {"tool_calls": [{"index": 0, "function": {"arguments": word}}]}


def named_argument(word: str) -> Delta:
    """The same from a server that repeats the name each time."""
    function = {"name": "write_file", "arguments": word}
    return {"tool_calls": [{"index": 0, "id": "call_1", "function": function}]}


def chunks(stream: bytes) -> Iterator[bytes]:
    """The stream as a socket would hand it out."""
    for at in range(0, len(stream), CHUNK):
        yield stream[at : at + CHUNK]


class Body:
    """As much of a response as the client looks at."""

    def __init__(self, stream: bytes) -> None:
        self.raw, self.headers = self, dict[str, str]()
        self.parts = itertools.chain(chunks(stream), itertools.repeat(b""))

    def read1(self, size: int) -> bytes:
        """The next bytes; b"" at the end."""
        return next(self.parts)


def read_as_the_client(stream: bytes) -> agent.Reply:
    """Everything that the client does with the bytes of a reply, down to the resolved message."""
    settings = agent.Settings(base_url="http://127.0.0.1:1/v1", environ={})
    return agent.Client(settings, lambda kind, **data: None)._read(Body(stream), [])


def read_bare(stream: bytes) -> str:
    """The least that any client must do: split at newlines, parse the same JSON, keep the text."""
    texts, rest = [], b""
    for chunk in chunks(stream):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                texts.append(delta.get("content", ""))
    return "".join(texts)


def against_the_bare_loop(stream: bytes) -> Figures:
    """What the client costs, and what the bare loop costs."""
    return Figures(cpu(lambda: read_as_the_client(stream)), cpu(lambda: read_bare(stream)), 2.0)


@row
def reading_text() -> Figures:
    """reading 20 MB of text in small events / a bare loop"""
    stream = small_events(text)
    reply = read_as_the_client(stream)
    assert reply.message["content"] == read_bare(stream), "the two read different texts"
    return against_the_bare_loop(stream)


@row
def reading_thoughts() -> Figures:
    """reading 20 MB of reasoning / a bare loop"""
    return against_the_bare_loop(small_events(thought))


@row
def reading_arguments() -> Figures:
    """reading 20 MB of a call's arguments / a bare loop"""
    return against_the_bare_loop(small_events(argument))


@row
def reading_named_arguments() -> Figures:
    """reading 2 MB of them, the name in each event / a bare loop"""
    # A rare shape that takes the long way through the resolver: the row shows that it stays linear.
    return against_the_bare_loop(small_events(named_argument, STREAM_BYTES // 10))._replace(
        target=4.0
    )


# -- searching a tree


FOLDERS, FILES_IN_EACH = 400, 50
RARE = "quicksilver"
REGEXES = {
    "a rare literal": RARE,
    "a frequent literal": "return",
    "words and groups": r"def (\w+)\((\w+), (\w+)\):",
}
WORDS = "user order item price total index cache entry value label field token query state".split()


def source_lines(dice: random.Random) -> list[str]:
    """A stock of lines as they stand in sources."""

    def line() -> str:
        a, b, c = (dice.choice(WORDS) for _ in range(3))
        forms = (
            f"def {a}_{b}({c}, {a}):",
            f"    return {a}.{b}[{c}]",
            f"    {a}_{b} = self.{c}({a}, {dice.randrange(1000)})",
            f"    if {a} is not None and {b} > {dice.randrange(100)}:",
            f"        raise ValueError(f'no {a} for {{{b}}}')",
            f"    # The {a} of an {b} comes before its {c}, see {a}_{c}.",
            f"class {a.title()}{b.title()}:",
            f"import {a}.{b} as {c}",
            f"    for {a} in {b}.{c}():",
            f"        {a}[{dice.randrange(9)}] = {{'{b}': {c}, '{c}': True}}",
            "",
        )
        return dice.choice(forms)

    return [line() for _ in range(3000)]


@functools.cache
def tree() -> Path:
    """A repository of 20,000 files of 1 to 3 KB, with ignored files and dependencies as well."""
    folder, dice = new_folder(), random.Random(4)
    stock = source_lines(dice)
    endings = ("py", "js", "c", "md", "txt")
    for number in range(FOLDERS):
        below = folder / f"part{number % 20:02}" / f"module{number:03}"
        below.mkdir(parents=True)
        for at in range(FILES_IN_EACH):
            lines = dice.choices(stock, k=dice.randrange(35, 100))
            lines += [f"{RARE} = {at}"] * (number % 50 == 7 and at == 3)
            (below / f"{dice.choice(WORDS)}{at:02}.{endings[at % 5]}").write_text("\n".join(lines))
        (below / "trace.log").write_text(f"{RARE}\n" * 50)
    for number in range(1000):
        package = folder / "node_modules" / f"package{number}"
        package.mkdir(parents=True)
        (package / "index.js").write_text(f"return {RARE}\n" * 50)
    (folder / ".gitignore").write_text("*.log\nnode_modules/\nbuild/\n/dist\n*.tmp\n")
    git(folder, "init", "--quiet")
    git(folder, "-c", "core.compression=0", "add", "--all")
    return folder


def path_without_rg() -> str:
    """A folder for PATH with what a search may call, and no rg."""
    folder = new_folder()
    for name in ("git", "bash", "sh"):
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return str(folder)


def searcher(path: str) -> agent.Agent:
    """A built agent in the tree that finds programs on this path."""
    environ = clean_environment(new_folder()) | {"PATH": path}
    options = {"workspace": str(tree()), "save_session": False, "environ": environ}
    built = agent.build_agent(
        agent.Settings(base_url="http://127.0.0.1:1/v1", model="m", **options)
    )
    CLEANUP.callback(built.close)
    return built


def ripgrep(*words: str) -> list[str]:
    """The lines that rg prints in the tree."""
    done = subprocess.run(["rg", *words], cwd=tree(), capture_output=True, text=True)
    return done.stdout.splitlines()


def against_rg(built: agent.Agent, name: str, target: float, cases: dict[str, dict]) -> Figures:
    """The worst ratio over some calls, each given with what it asks of rg."""
    if not shutil.which("rg"):
        raise Missing("rg is not installed")
    call, worst = built.tools[name].function, None
    for label, case in cases.items():
        found = walls(
            lambda case=case: call(**case["call"]), lambda case=case: ripgrep(*case["rg"])
        )
        figures = Figures(*found, target, f"s, {label}" if label else "s")
        worst = max(worst or figures, figures, key=lambda each: each.ours / each.bare)
    return worst


def grep_against_rg(path: str, target: float) -> Figures:
    """The agent's grep with this path."""
    built = searcher(path)
    cases = {}
    for label, regex in REGEXES.items():
        cases[label] = {"call": {"regex": regex}, "rg": ("-n", regex, ".")}
        told, found = built.tools["grep"].function(regex), ripgrep(*cases[label]["rg"])
        if regex == RARE:
            wrong = {line.removeprefix("./") for line in found} ^ {*told.splitlines()}
            wrong = {line for line in wrong if RARE in line}
            assert not wrong, f"grep and rg differ in {len(wrong)} lines: {sorted(wrong)[:2]}"
        else:
            says = told.replace(",", "")[-200:]
            assert str(len(found)) in says, f"rg has {len(found)} lines for {regex}; ...{says!r}"
    return against_rg(built, "grep", target, cases)


def list_against_rg(path: str, target: float) -> Figures:
    """The agent's list_files with this path."""
    built = searcher(path)
    told = built.tools["list_files"].function()
    count = len(ripgrep("--files", "--hidden", "--glob", "!.git"))
    assert str(count) in told.replace(",", ""), f"rg has {count} files; ...{told[-100:]!r}"
    return against_rg(built, "list_files", target, {"": {"call": {}, "rg": ("--files",)}})


@row
def searching() -> Figures:
    """grep in 20,000 files / the process rg"""
    return grep_against_rg(os.environ["PATH"], 4.0)


@row
def searching_without_rg() -> Figures:
    """grep in 20,000 files where rg is not found / rg"""
    return grep_against_rg(path_without_rg(), 8.0)


@row
def listing() -> Figures:
    """list_files of 20,000 files / the process rg --files"""
    return list_against_rg(os.environ["PATH"], 3.0)


@row
def listing_without_rg() -> Figures:
    """list_files of 20,000 where rg is not found / rg --files"""
    return list_against_rg(path_without_rg(), 8.0)


# -- the bare loop: what the whole program is compared with, a program of its own


def bare_schema(name: str, *parameters: str) -> dict[str, Any]:
    """A tool as the API wants it."""
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": parameters}
    function = {"name": name, "description": f"Call {name}.", "parameters": schema}
    return {"type": "function", "function": function}


def bare_tool(name: str, given: dict[str, str]) -> str:
    """Run a command in the shell of the agent, read a file or edit it."""
    if name == "bash":
        pipes = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }
        options = {"shell": True, "executable": "/bin/bash", "text": True, "timeout": 60}
        done = subprocess.run(given["command"], **pipes, **options)
        return f"{done.stdout}[exit code {done.returncode}]"
    with open(given["path"], encoding="utf-8", newline="") as file:
        text = file.read()
    if name == "read_file":
        return "".join(f"{n}: {line}" for n, line in enumerate(text.splitlines(True), 1))
    if text.count(given["old"]) != 1:
        return "error: old is not there exactly once"
    with open(given["path"], "w", encoding="utf-8", newline="") as file:
        file.write(text.replace(given["old"], given["new"]))
    return "edited"


def bare_reply(session: requests.Session, messages: list[dict], tools: list[dict]) -> dict:
    """Send the messages and read the streamed reply."""
    body = {"model": os.environ["AGENT_MODEL"], "messages": messages, "tools": tools}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    url = os.environ["AGENT_BASE_URL"] + "/chat/completions"
    texts: list[str] = []
    calls: dict[int, dict] = {}
    with session.post(url, json=body, stream=True, timeout=300) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                texts.append(choice["delta"].get("content") or "")
                for item in choice["delta"].get("tool_calls", ()):
                    function = {"name": item["function"].get("name"), "arguments": ""}
                    new = {"id": item.get("id"), "type": "function", "function": function}
                    call = calls.setdefault(item["index"], new)
                    call["function"]["arguments"] += item["function"]["arguments"]
    message = {"role": "assistant", "content": "".join(texts) or None}
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def bare_loop() -> None:
    """An agent of fifty lines: asks, runs what it is told to, prints what happens."""
    parameters = {"bash": ("command",), "read_file": ("path",), "edit_file": ("path", "old", "new")}
    tools = [bare_schema(name, *names) for name, names in parameters.items()]
    messages: list[dict] = [{"role": "system", "content": "You are a coding agent."}]
    messages.append({"role": "user", "content": sys.argv[1]})
    session = requests.Session()
    session.headers["Authorization"] = "Bearer " + os.environ["AGENT_API_KEY"]
    while True:
        reply = bare_reply(session, messages, tools)
        messages.append(reply)
        if "tool_calls" not in reply:
            break
        for call in reply["tool_calls"]:
            name, given = call["function"]["name"], json.loads(call["function"]["arguments"])
            result = bare_tool(name, given)
            print(name, given, result[:200], flush=True)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    print(reply["content"], flush=True)


# -- the programs as installed, and the server


START = (
    "import sys\nfrom {module} import {name}\nif __name__ == '__main__':\n    sys.exit({name}())\n"
)
LAUNCH = """
import json, os, sys, time
began = time.monotonic()
outputs = [(os.POSIX_SPAWN_DUP2, 2, 1)]
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=outputs)
status, usage = os.wait4(pid, 0)[1:]
code = os.waitstatus_to_exitcode(status)
cpu = usage.ru_utime + usage.ru_stime
print(json.dumps([began, time.monotonic(), cpu, usage.ru_maxrss / 1024, code]))
"""  # A small process: the memory of the one that starts a program counts as the program's.


@functools.cache
def installed() -> Path:
    """What pip makes of a package: the modules with their bytecode, and scripts that start them.

    Copied, not installed by pip, which would fetch what it builds with. The bare loop is put
    beside the agent as a module of the same kind.
    """
    folder = new_folder()
    (folder / "lib").mkdir()
    for name in ("agent.py", "flaky_server.py"):
        shutil.copy(ROOT / name, folder / "lib" / name)
    parts = map(inspect.getsource, (bare_schema, bare_tool, bare_reply, bare_loop))
    imports = "from __future__ import annotations\nimport json, os, subprocess, sys\n"
    bare = "\n\n".join([imports + "import requests\n", *parts])
    (folder / "lib" / "bare.py").write_text(bare)
    assert compileall.compile_dir(folder / "lib", quiet=1)
    (folder / "agent").write_text(START.format(module="agent", name="main"))
    (folder / "bare").write_text(START.format(module="bare", name="bare_loop"))
    help_of_a_bare_parser = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    (folder / "help").write_text(help_of_a_bare_parser)
    return folder


class Run(NamedTuple):
    """One run of a program: seconds of a clock that all processes share, seconds of CPU, MB."""

    began: float
    ended: float
    cpu: float
    memory: float
    code: int


def launch(command: Sequence[str], folder: Path, env: dict[str, str]) -> Run:
    """Run an installed program to its end in the folder."""
    words = [sys.executable, str(installed() / command[0]), *command[1:]]
    launcher = [sys.executable, "-I", "-S", "-c", LAUNCH, *words]
    env = clean_environment(new_folder()) | {"PYTHONPATH": str(installed() / "lib")} | env
    ends: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    with tempfile.TemporaryFile("w+") as log:
        ends |= {"stderr": log, "start_new_session": True}
        with subprocess.Popen(launcher, cwd=folder, env=env, text=True, **ends) as process:
            try:
                run = Run(*json.loads(process.communicate()[0]))
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
        log.seek(0)
        assert run.code == 0, f"{command} ended with {run.code}: {log.read()[-2000:]}"
    return run


class Stopwatch(flaky_server.FlakyServer):
    """A server that notes when requests come, without the checks, which grow with the session."""

    def __init__(self, script: list[dict]) -> None:
        super().__init__(script)
        self.at: list[float] = []

    def answer(self, raw: bytes, path: str, headers: Any) -> tuple[flaky_server.Actions, list[str]]:
        """The next step, whatever the request says."""
        self.at.append(time.monotonic())
        body = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
        return self.next_actions(flaky_server.Recorded(body, raw, path, headers)), []


def serve(script: list[dict], ours: Any, theirs: Any) -> None:
    """The server's process: say the address, wait, say when the requests came."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    theirs.close()  # so that our end is told when the other process has gone
    with contextlib.suppress(EOFError), Stopwatch(script) as server:
        ours.send(server.url)
        ours.recv()
        ours.send(server.at)
    os._exit(0)


@contextlib.contextmanager
def serving(script: list[dict]) -> Iterator[tuple[str, list[float]]]:
    """A server in a process of its own: its address, and a list of the times, filled at the end."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(script, theirs, ours), daemon=True)
    process.start()
    theirs.close()
    times: list[float] = []
    try:
        yield ours.recv(), times
        ours.send("enough")
        times += ours.recv()
    finally:
        ours.close()
        process.terminate()
        process.join()


# -- the whole program


KINDS = 4  # of steps in the scripted task
LATE = 10  # so many steps of each kind at the end are looked at
UNLIMITED = ("--max-turns", "0", "--context", "1000000")  # the bare loop does not compact either
SIDES = {"ours": ("agent", "--yes", *UNLIMITED, "go"), "bare": ("bare", "go")}


def task_step(number: int) -> dict[str, Any]:
    """A step of the task; no two are equal."""
    part, count = number // KINDS % 20, number // KINDS // 20
    path = f"src/part{part}.py"
    edit = {"path": path, "old": f"count = {count}\n", "new": f"count = {count + 1}\n"}
    return [
        {"call": "bash", "arguments": {"command": f"echo step {number}"}},
        {"call": "read_file", "arguments": {"path": path}},
        {"call": "edit_file", "arguments": edit},
        {"call": "bash", "arguments": {"command": f"true {number}"}},
    ][number % KINDS]


def task_folder() -> Path:
    """A small repository to work in."""
    folder = new_folder()
    (folder / "src").mkdir()
    stock = source_lines(random.Random(4))
    for part in range(20):
        lines = [f"# part {part}", "count = 0", *stock[part * 60 : part * 60 + 60]]
        (folder / "src" / f"part{part}.py").write_text("\n".join(lines) + "\n")
    git(folder, "init", "--quiet")
    return folder


class Task(NamedTuple):
    """What a run of the task cost: seconds, MB, seconds to the first request, a late step's."""

    wall: float
    memory: float
    first: float
    late: float


def work(side: str, steps: int) -> tuple[Task, dict[str, bytes]]:
    """One run of the scripted task; also the files it leaves."""
    folder = task_folder()
    script = [*map(task_step, range(steps)), {"text": "done"}]
    with serving(script) as (url, at):
        env = {"AGENT_BASE_URL": url, "AGENT_MODEL": "m", "AGENT_API_KEY": "k"}
        run = launch(SIDES[side], folder, env)
    assert len(at) == steps + 1, f"{side}: {len(at)} requests for {steps} steps"
    times = [later - earlier for earlier, later in itertools.pairwise(at)][-KINDS * LATE :]
    late = sum(statistics.median(times[kind::KINDS] or [0]) for kind in range(KINDS)) / KINDS
    files = {path.name: path.read_bytes() for path in folder.glob("src/*")}
    return Task(run.ended - run.began, run.memory, at[0] - run.began, late), files


@functools.cache
def task(steps: int, tries: int = TRIES) -> tuple[Task, Task]:
    """The least of each figure over some runs in turn: ours, the bare loop's."""
    runs: dict[str, list[Task]] = {side: [] for side in SIDES}
    for _ in range(tries):
        left = []
        for side in SIDES:
            cost, files = work(side, steps)
            runs[side].append(cost)
            left.append(files)
        assert left[0] == left[1], "the two leave different files"
    ours, bare = (Task(*map(min, zip(*costs, strict=True))) for costs in runs.values())
    return ours, bare


@row
def task_of_50() -> Figures:
    """a task of 50 steps / a loop of requests and subprocess"""
    ours, bare = task(50)
    return Figures(ours.wall, bare.wall, 1.4, "s")


@row
def task_of_50_memory() -> Figures:
    """its peak memory"""
    ours, bare = task(50)
    return Figures(ours.memory, bare.memory, 1.4, "MB")


@row
def task_of_500() -> Figures:
    """a task of 500 steps / the same loop"""
    ours, bare = task(500)
    return Figures(ours.wall, bare.wall, 1.4, "s")


@row
def task_of_500_memory() -> Figures:
    """its peak memory"""
    ours, bare = task(500)
    return Figures(ours.memory, bare.memory, 1.4, "MB")


@row
def task_of_500_late_step() -> Figures:
    """one of its last steps"""
    ours, bare = task(500)
    return Figures(1000 * ours.late, 1000 * bare.late, 1.4, "ms")


@row
def start() -> Figures:
    """start to first request / the same loop"""
    ours, bare = task(0, STARTS)
    return Figures(1000 * ours.first, 1000 * bare.first, 1.25, "ms")


@row
def help_text() -> Figures:
    """--help / a Python with argparse that prints its help"""
    folder = new_folder()
    pairs = [
        [1000 * launch((name, "--help"), folder, {}).cpu for name in ("agent", "help")]
        for _ in range(STARTS)
    ]
    ours, bare = map(min, zip(*pairs, strict=True))
    return Figures(ours, bare, 1.6, "ms CPU")


# -- the sandbox


START_MS, COMMAND_MS = 100.0, 10.0  # what it may cost


def commands(folder: Path, *, sandbox: bool) -> Callable[[], object]:
    """Runs `true` as the agent does, in the sandbox or not."""
    made = agent.Workspace(folder, clean_environment(new_folder()))
    CLEANUP.callback(made.host.close)
    made.use_sandbox(sandbox)
    if sandbox and made.sandbox_state != "on":
        raise Missing(made.sandbox_state)
    return lambda: made.host.run("true", 60, agent.Capture(None), lambda data: None)


def first_command(folder: Path) -> float:
    """Milliseconds to the end of the first command in the sandbox, the least of some."""
    times = []
    for _ in range(STARTS):
        run = commands(folder, sandbox=True)
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return 1000 * min(times)


@row
def sandbox_start() -> Figures:
    """first command in the sandbox / what it may take"""
    folder = new_folder()
    git(folder, "init", "--quiet")
    return Figures(first_command(folder), START_MS, 1.0, "ms")


@row
def sandbox_start_in_many_files() -> Figures:
    """the same in 20,000 files / what it may take"""
    return Figures(first_command(tree()), START_MS, 1.0, "ms")


@row
def sandbox_command() -> Figures:
    """what it adds to a command in 20,000 files / what it may"""
    inside, plain = walls(commands(tree(), sandbox=True), commands(tree(), sandbox=False), tries=30)
    return Figures(1000 * (inside - plain), COMMAND_MS, 1.0, "ms")


# -- saving a session


SESSION_BYTES = 1_000_000


@functools.cache
def saved() -> agent.Agent:
    """An agent in a session that was saved: each of its messages has been encoded once."""
    settings = agent.Settings(
        base_url="http://127.0.0.1:1/v1", model="m", workspace=str(new_folder()), environ={}
    )
    built = agent.build_agent(settings)
    CLEANUP.callback(built.close)
    transcript, stock = built.session.transcript, source_lines(random.Random(4))
    for number in range(500):
        function = {"name": "read_file", "arguments": json.dumps({"path": f"part{number}.py"})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        transcript.add_reply({"role": "assistant", "content": None, "tool_calls": [call]})
        room = SESSION_BYTES // 500 - 320
        transcript.answer(f"call_{number}", "\n".join(stock[number : number + 100])[:room])
    built.session.save()
    size = built.session.path.stat().st_size
    assert 0.9 < size / SESSION_BYTES < 1.1, size
    return built


@row
def saving() -> Figures:
    """saving a session of 1 MB / building the request with json.dumps"""
    built = saved()
    body = {"model": "m", "stream": True, "messages": built.transcript.messages}
    ours, bare = walls(built.session.save, lambda: json.dumps(body).encode(), tries=30)
    return Figures(1000 * ours, 1000 * bare, 1.0, "ms")


@row
def saving_against_our_request() -> Figures:
    """saving a session of 1 MB / building the request from encodings"""
    built = saved()  # both copy the same encodings; what is left is the price of a file and rename
    request = functools.partial(built.client.body, built.transcript, built.tools_json)
    ours, bare = walls(built.session.save, request, tries=30)
    return Figures(1000 * ours, 1000 * bare, 5.0, "ms")


# -- the table


def chosen(words: Sequence[str]) -> list[Callable[[], Figures]]:
    """The rows whose function's name holds one of the words; all without words."""
    return [measure for measure in ROWS if not words or any(w in measure.__name__ for w in words)]


def print_row(measure: Callable[[], Figures]) -> bool:
    """Measure and print one line of the table; whether it is wrong or above twice its target."""
    try:
        found = measure()
    except (Missing, AssertionError) as error:
        kind = "left out" if isinstance(error, Missing) else "WRONG"
        print(f"{measure.__doc__:60}  {kind}: {error}", flush=True)
        return kind == "WRONG"
    ratio = found.ours / found.bare
    figures = f"{found.ours:8.2f}{found.bare:8.2f}{ratio:8.2f}{found.target:8.2f}"
    mark = "" if ratio <= found.target else "  above the target"
    print(f"{measure.__doc__:60}{figures}  {found.unit}{mark}", flush=True)
    return ratio > 2 * found.target


def main(words: Sequence[str]) -> int:
    """Measure the rows and print the table."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    print(f"{'':60}{'ours':>8}{'bare':>8}{'ratio':>8}{'target':>8}", flush=True)
    with CLEANUP:
        bad = [measure.__name__ for measure in chosen(words) if print_row(measure)]
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
