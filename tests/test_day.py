"""A day of work: many turns, a bad server, kills in the middle, and in the end nothing is wrong.

Each turn appends three numbered lines to a log, each by an edit of its own, so that a lost edit is
a missing line and one that was done twice stands there twice. The model decides by the request
alone what comes next, as a real one does: it reads the log, appends what is missing, and is done
when it knows that all its lines are there. The server breaks replies at random; a process dies by
`kill -9` at a random place of a turn, and another one goes on; a small window makes compactions.

`DAY_SEED=1234 pytest tests/test_day.py` is another day than the one that CI sees.
"""

import collections
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import end, nothing_runs_in, session_files

from agent import problems
from flaky_server import FlakyServer

ROOT = Path(__file__).resolve().parent.parent
DRIVER = Path(__file__).resolve().parent / "day_driver.py"
CONTEXT = 12_000  # tokens
TURNS_A_LOG, LINES_A_TURN = 10, 3
TURN = re.compile(r"turn (\d+):")
LINE = re.compile(r"line (\d+)\n")
NOTE = """\
Task: append numbered lines to the logs, three in each turn of the user.
Decisions: read the log before the first edit of a turn.
Files: log-*.txt, BEGIN to END, a line for each number.
Next: read the log of the current turn."""
BROKEN = [  # nothing of such a reply may be used
    {"fault": "cut_text"},
    {"fault": "cut_call"},
    {"fault": "cut_chunk"},
    {"fault": "reset"},
    {"fault": "drop"},
    {"fault": "error_in_200"},
    {"fault": "error_event"},
    {"fault": "empty"},
    {"status": 429, "headers": {"Retry-After": "1"}},
    {"status": 500},
    {"status": 503},
    {"status": 529},
]
ODD = {  # the reply is whole, its form is not the usual one; by the number of its calls
    0: ["crlf", "comments", "no_done", "close_delimited", "named_events", "multi_line_data"],
    1: ["crlf", "comments", "no_done", "id_late", "name_split"],
    2: ["crlf", "multi_line_data", "index_missing", "interleaved", "one_event"],
}
OVERFLOW = {"fault": "context_overflow", "message": f"the window is {CONTEXT} tokens"}
Message = dict[str, Any]


# -- the model -----------------------------------------------------------------------------------


def log_of(turn: int) -> str:
    """The file of a turn."""
    return f"log-{turn // TURNS_A_LOG:02}.txt"


def lines_of(turn: int) -> list[int]:
    """The numbers that a turn appends."""
    return [*range(turn * LINES_A_TURN, (turn + 1) * LINES_A_TURN)]


def append(turn: int, number: int) -> Message:
    """The call that appends a line."""
    arguments = {"path": log_of(turn), "old": "END\n", "new": f"line {number}\nEND\n"}
    return {"name": "edit_file", "arguments": arguments}


def outcomes(messages: list[Message]) -> Iterator[tuple[Message, str]]:
    """The calls of these messages, as functions, and their results."""
    told = {m["tool_call_id"]: m["content"] for m in messages if m["role"] == "tool"}
    for message in messages:
        for call in message.get("tool_calls") or []:
            if call["id"] in told:
                yield call["function"], told[call["id"]]


def read_whole(text: str) -> list[int] | None:
    """The numbers in a log as `read_file` shows it; None when it is not all of the file."""
    rows = re.findall(r"(?m)^\s*(\d+): (BEGIN|END|line (\d+))$", text)
    whole = [int(row[0]) for row in rows] == [*range(1, len(rows) + 1)]
    ends = [row[1] for row in rows[:1] + rows[-1:]] == ["BEGIN", "END"]
    return [int(row[2]) for row in rows if row[2]] if whole and ends else None


def known_lines(turn: int, messages: list[Message]) -> set[int] | None:
    """The lines that the model knows to be in the log; None when it has to look."""
    known: set[int] | None = None
    for function, text in outcomes(messages):
        arguments = json.loads(function["arguments"])
        if arguments.get("path") != log_of(turn):
            continue
        if function["name"] == "read_file":
            seen = read_whole(text)
            known = None if seen is None else set(seen)
        elif known is not None and re.match("error: |denied: |interrupted|not run|cancelled", text):
            known = None
        elif known is not None:
            known |= {int(number) for number in LINE.findall(arguments.get("new", ""))}
    return known


def next_step(request: Message) -> Any:
    """Look at the request, do the next step of the turn or say that it is done."""
    if "tools" not in request:
        return NOTE
    messages = request["messages"]
    said = [(n, m["content"]) for n, m in enumerate(messages) if m["role"] == "user"]
    turn = max(int(number) for _, text in said for number in TURN.findall(text))
    begins = max(n for n, text in said if f"turn {turn}:" in text)
    known = known_lines(turn, messages[begins + 1 :])
    if known is None:
        look = {"name": "read_file", "arguments": {"path": log_of(turn)}}
        return {"calls": [look, {"name": "grep", "arguments": {"regex": f"note {turn:03}\\b"}}]}
    missing = [number for number in lines_of(turn) if number not in known]
    if not missing:
        return f"turn {turn} is done"
    # Now alone, now all that is left in one reply.
    chosen = missing[:1] if len(missing) == LINES_A_TURN else missing
    return {"text": f"I append {chosen}.", "calls": [append(turn, number) for number in chosen]}


def odd(step: Any, chance: random.Random) -> Message:
    """The same reply in an odd form."""
    made = {"text": step} if isinstance(step, str) else step
    return {**made, "fault": chance.choice(ODD[len(made.get("calls", []))])}


class Weather:
    """What the server does to the replies: faults from a seed, never more than three in a row."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.row = 0  # of faults
        self.calm = 0  # requests since the last overflow
        self.hold = -1  # at so many deltas of the next reply with an edit

    def __call__(self, request: Any) -> Any:
        step = next_step(request)
        self.calm += 1
        if len(request.raw) // 4 > CONTEXT:
            return OVERFLOW
        if self.hold >= 0 and "edit_file" in str(step):
            step, self.hold = {**step, "hold_after": self.hold}, -1
            return step
        luck = self.random.random()
        if luck < 0.12 and self.row < 3:
            self.row += 1
            return self.random.choice(BROKEN)
        self.row = 0
        if luck < 0.14 and self.calm > 20 and len(request["messages"]) > 20:
            self.calm = 0
            return OVERFLOW
        if luck < 0.25:
            return odd(step, self.random)
        return step


# -- the day -------------------------------------------------------------------------------------


class Day:
    """The processes of a day, what they reported, and the prompts that they get."""

    def __init__(self, workspace: Path, seed: int, turns: int) -> None:
        self.workspace, self.turns = workspace, turns
        self.random = random.Random(seed)
        self.weather = Weather(seed + 1)
        self.server = FlakyServer(itertools.repeat(self.weather)).start()
        self.events: list[Message] = []
        self.ident = ""
        self.process: subprocess.Popen[str] | None = None
        for n in range(-(-turns // TURNS_A_LOG)):
            (workspace / f"log-{n:02}.txt").write_text("BEGIN\nEND\n")
        notes = "".join(f"note {n:03} {'to be found ' * 60}\n" for n in range(turns))
        (workspace / "notes.txt").write_text(notes)

    def begin(self) -> None:
        """Start a process; it goes on with the session if there is one."""
        words = [self.server.url, str(self.workspace), str(CONTEXT), *filter(None, [self.ident])]
        self.process = subprocess.Popen(
            [sys.executable, str(DRIVER), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            cwd=self.workspace,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8"},
        )

    def send(self, prompt: str) -> None:
        """Give the process its next prompt."""
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(json.dumps(prompt) + "\n")
        self.process.stdin.flush()

    def read(self, until: Callable[[Message], bool]) -> bool:
        """Take in events up to one of this kind; False when the process ended before."""
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            if not line.endswith("}\n"):  # the kill has cut it
                break
            event = json.loads(line)
            self.events.append(event)
            if event["type"] == "init":
                self.ident = event["session_id"]
            if until(event):
                return True
        return False

    def turn(self, number: int) -> None:
        """One prompt to its answer."""
        self.send(f"turn {number}: append your lines to {log_of(number)}")
        assert self.read(lambda event: event["type"] == "result"), f"it ended in turn {number}"
        result = self.events[-1]
        notices = [event["text"] for event in self.events[-20:] if event["type"] == "notice"]
        assert (result["status"], result["text"]) == ("done", f"turn {number} is done"), notices

    def killed_turn(self, number: int) -> None:
        """A prompt in the middle of which the process dies, and then the same once more."""
        place = self.random.choice(["stream", "call begins", "call ended", "call of many ended"])
        wanted = {"call begins": ("tool_use", 1), "call ended": ("tool_result", 1)}
        kind, count = wanted.get(place, ("tool_result", 2))
        left = iter(range(count, 0, -1))

        def reached(event: Message) -> bool:
            edit = event["type"] == kind and event["name"] == "edit_file"
            return edit and next(left) == 1

        self.weather.hold = self.random.randint(0, 3) if place == "stream" else -1
        self.send(f"turn {number}: append your lines to {log_of(number)}")
        if place == "stream":
            assert self.server.wait_holding(1, 60)
        else:
            assert self.read(reached), place
        self.kill()
        self.begin()
        self.turn(number)

    def kill(self) -> None:
        """End the process as a crash would, and read what it had reported."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.read(lambda event: False)
        end(self.process)
        assert self.process.returncode == -signal.SIGKILL
        self.server.release()

    def run(self, kill_each: int) -> None:
        """All turns; the last one of so many is killed in its middle."""
        self.begin()
        for number in range(self.turns):
            (self.killed_turn if number % kill_each == kill_each - 1 else self.turn)(number)
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.close()
        self.read(lambda event: False)
        assert self.process.wait(60) == 0

    def close(self) -> None:
        """End what still runs."""
        if self.process is not None:
            end(self.process)
        self.server.close()


def kept_messages(workspace: Path) -> tuple[list[Message], list[Message]]:
    """The transcript and the archive, which counts up to the length that the session knows."""
    [path] = session_files(workspace)
    session = json.loads(path.read_text())
    archive = path.with_suffix(".archive.jsonl")
    data = archive.read_bytes()[: session["archived"]]
    return session["messages"], [json.loads(line) for line in data.splitlines()]


def reported_edits(day: Day) -> list[int]:
    """The numbers of the lines whose edit was reported as done."""
    asked = {event["id"]: event for event in day.events if event["type"] == "tool_use"}
    done = [e["id"] for e in day.events if e["type"] == "tool_result" and e["status"] == "ok"]
    texts = [asked[ident]["arguments"].get("new", "") for ident in done]
    return [int(number) for text in texts for number in LINE.findall(text)]


def claimed_edits(messages: list[Message]) -> list[int]:
    """The numbers of the lines whose edit the kept messages say was done."""
    claimed = []
    for function, text in outcomes(messages):
        if not re.match("error: |denied: |interrupted|not run|cancelled", text):
            new = json.loads(function["arguments"]).get("new", "")
            claimed += [int(number) for number in LINE.findall(new)]
    return claimed


def lost_results(day: Day, kept: list[Message]) -> list[str]:
    """Reported results that are not exactly once, whole, among the kept messages."""
    texts = collections.defaultdict(list)
    for message in kept:
        texts[message.get("tool_call_id")].append(message["content"])
    told = [event for event in day.events if event["type"] == "tool_result"]
    return [
        event["content"][:90]
        for event in told
        if sum(text.startswith(event["content"]) for text in texts[event["id"]]) != 1
    ]


def look_at_all(day: Day) -> None:
    """At the end of the day: the disk, the reports, the requests and the session."""
    written = []
    for path in sorted(day.workspace.glob("log-*.txt")):
        first, *lines, last = path.read_text().splitlines()
        assert (first, last) == ("BEGIN", "END")
        written += [int(line.removeprefix("line ")) for line in lines]
    assert written == [*range(day.turns * LINES_A_TURN)]
    messages, archive = kept_messages(day.workspace)
    reported, claimed = reported_edits(day), claimed_edits([*archive, *messages])
    for numbers in (reported, claimed):
        assert [number for number, n in collections.Counter(numbers).items() if n != 1] == []
        assert set(numbers) <= set(written)
    assert set(reported) <= set(claimed)
    assert lost_results(day, [*archive, *messages]) == []
    assert [p for request in day.server.requests for p in request.problems] == []
    assert (day.server.bad, day.server.errors, problems(messages)) == ([], [], [])
    said = [m["content"] for m in (*archive, *messages) if m["role"] == "user"]
    assert [n for n in range(day.turns) if not any(f"turn {n}:" in text for text in said)] == []


def the_seed() -> int:
    """The seed that was asked for, or always the same one; printed."""
    seed = int(os.environ.get("DAY_SEED", 6))
    print(f"DAY_SEED={seed}")
    return seed


@pytest.mark.parametrize(
    ("turns", "kill_each"),
    [
        pytest.param(40, 25, id="40 turns and a kill"),
        pytest.param(400, 50, id="400 turns and 8 kills", marks=pytest.mark.long),
    ],
)
def test_at_the_end_of_a_day_each_edit_is_on_disk_once_and_each_request_was_valid(
    workspace: Path, tmp_path: Path, turns: int, kill_each: int
) -> None:
    day = Day(workspace, the_seed(), turns)
    try:
        day.run(kill_each)
    finally:
        day.close()
    look_at_all(day)
    kinds = collections.Counter(event["type"] for event in day.events)
    assert kinds["tool_result"] >= 5 * turns
    assert kinds["compacted"] >= turns // 40
    assert kinds["retry"] >= turns // 20
    assert kinds["init"] == turns // kill_each + 1
    nothing_runs_in(tmp_path)
