"""kill -9 at random moments, resume, and look at what the requests and the disk say.

The task has 12 steps with parallel calls. The model decides by the history alone what comes
next, as a real one does, so that it goes on after each resume. Each bash call appends its own
number to `effects.txt`: what happened can be compared with what is claimed.

`KILL_SEED=1234 pytest tests/test_kill.py` repeats the moments of a run that failed and
printed this seed.
"""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
from conftest import NAP, inside, results, session_files, until

from flaky_server import FlakyServer

STEPS = 12
DONE = "All steps are done."
NUMBER = re.compile(r"number=(\d+)")


def calls_of(message: dict) -> list[dict]:
    """The tool calls of a message."""
    return message.get("tool_calls") or []


def next_step(request: dict) -> dict | str:
    """The model: look at the history, do the next step of the task or say that it is done."""
    replies = [message for message in request["messages"] if calls_of(message)]
    number = sum(len(calls_of(message)) for message in replies)
    if len(replies) >= STEPS:
        return DONE
    commands = [
        f": number={n}; echo {n} >> effects.txt; sleep 0.03" for n in range(number, number + 3)
    ]
    calls = [{"name": "bash", "arguments": {"command": command}} for command in commands]
    calls.insert(1, {"name": "read_file", "arguments": {"path": "notes.txt"}})
    return {"calls": calls, "text": f"Step {len(replies) + 1}."}


def outcomes(messages: list[dict]) -> dict[int, str]:
    """The result of each bash call of the task, by its number."""
    texts = {
        message["tool_call_id"]: message["content"]
        for message in messages
        if message["role"] == "tool"
    }
    found = {}
    for call in (call for message in messages for call in calls_of(message)):
        number = NUMBER.search(call["function"]["arguments"])
        if number:
            found[int(number[1])] = texts[call["id"]]
    return found


def effects(workspace: Path) -> list[int]:
    """The numbers of the calls that did their work, in order."""
    path = workspace / "effects.txt"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def false_claims(workspace: Path) -> list[str]:
    """What the session on disk says that did not happen as it says."""
    [path] = session_files(workspace)
    done = effects(workspace)
    claims = []
    for number, text in outcomes(json.loads(path.read_text())["messages"]).items():
        unknown = "interrupted" in text
        if number in done and re.search("not run|before it ran", text):
            claims.append(f"{number} was done, but: {text}")
        if number not in done and not unknown and not re.search("not run|before it ran", text):
            claims.append(f"{number} was not done, but: {text}")
    return claims


def lost_results(requests: list[dict]) -> list[str]:
    """Results that one request carried and a later one carries no more, or changed."""
    known: dict[str, str] = {}
    lost = []
    for request in requests:
        now = {m["tool_call_id"]: m["content"] for m in request["messages"] if m["role"] == "tool"}
        lost += [ident for ident, text in known.items() if now.get(ident) != text]
        known = now
    return lost


def kill_and_resume(start_agent, run_agent, workspace: Path, kills: int, seed: int) -> None:
    """Run the task, kill the agent at random moments, resume, check all after each kill."""
    chance = random.Random(seed)
    (workspace / "notes.txt").write_text("a note\n")
    with FlakyServer([next_step] * 200) as server:
        words = ["do the task"]
        for _ in range(kills):
            agent = start_agent("--yes", *words, server=server)
            aim = len(server.requests) + chance.randint(1, 3)
            until(
                lambda aim=aim, agent=agent: len(server.requests) >= aim or agent.poll() is not None
            )
            time.sleep(chance.uniform(0, 0.3))
            agent.send_signal(signal.SIGKILL)
            agent.wait(60)
            until(lambda: not inside(workspace), 30)  # The children of the killed agent end too.
            assert false_claims(workspace) == []
            words = ["--resume", "go on"]
        done = run_agent("--yes", *words, server=server)
    last = server.requests[-1]
    assert (done.returncode, done.stdout) == (0, DONE + "\n")
    assert [request.problems for request in server.requests if request.problems] == []
    assert lost_results(server.requests) == []
    assert false_claims(workspace) == []
    assert len(effects(workspace)) == len(set(effects(workspace)))
    assert len([m for m in last["messages"] if calls_of(m)]) == STEPS
    assert set(outcomes(last["messages"])) >= set(effects(workspace))
    assert len(results(last)) == STEPS * 4


def the_seed(offset: int) -> int:
    """A random seed, or the one that was asked for; printed, so that a failure can be repeated."""
    seed = int(os.environ.get("KILL_SEED", random.randrange(1_000_000))) + offset
    print(f"KILL_SEED={seed - offset} (part {offset})")
    return seed


def test_a_task_that_is_killed_five_times_is_finished_without_a_lie(
    start_agent, run_agent, workspace
):
    kill_and_resume(start_agent, run_agent, workspace, 5, the_seed(0))


@pytest.mark.long
@pytest.mark.parametrize("part", range(1, 7))
def test_a_task_that_is_killed_thirty_times_is_finished_without_a_lie(
    start_agent, run_agent, workspace, part
):
    kill_and_resume(start_agent, run_agent, workspace, 5, the_seed(part))


def test_a_kill_while_a_command_runs_is_reported_as_an_interruption(
    start_agent, run_agent, workspace
):
    command = f"echo 0 >> effects.txt; sleep {NAP}"
    names = [
        {"name": "bash", "arguments": {"command": command}},
        {"name": "bash", "arguments": {"command": "touch b"}},
    ]
    with FlakyServer([{"calls": names}, "back"]) as server:
        agent = start_agent("--yes", "run", server=server)
        until((workspace / "effects.txt").exists)
        agent.send_signal(signal.SIGKILL)
        agent.wait(60)
        until(lambda: not inside(workspace), 30)
        done = run_agent("--yes", "--resume", "go on", server=server)
    first, second = results(server.requests[1])
    assert (done.returncode, done.stdout, (workspace / "b").exists()) == (0, "back\n", False)
    assert "interrupted: this may have run" in first and "not run" in second


def test_a_kill_while_the_model_streams_loses_only_the_reply(start_agent, run_agent, workspace):
    with FlakyServer([{"text": "one two three", "hold_after": 1}, "back"]) as server:
        agent = start_agent("a question", server=server)
        until(server.holding.is_set)
        agent.send_signal(signal.SIGKILL)
        agent.wait(60)
        done = run_agent("--resume", "go on", server=server)
    asked = [m["content"] for m in server.requests[1]["messages"] if m["role"] == "user"]
    assert (done.returncode, done.stdout, len(session_files(workspace))) == (0, "back\n", 1)
    assert "a question" in asked[0] and "go on" in asked[-1]


def test_a_kill_leaves_no_temporary_file_behind_the_next_start(start_agent, run_agent, workspace):
    with FlakyServer([{"text": "one two three", "hold_after": 1}, "back"]) as server:
        agent = start_agent("a question", server=server)
        until(server.holding.is_set)
        agent.send_signal(signal.SIGKILL)
        agent.wait(60)
        run_agent("--resume", "go on", server=server)
    [path] = session_files(workspace)
    names = {entry.name for entry in path.parent.iterdir()}
    assert names <= {path.name, f"{path.stem}.bak", f"{path.stem}.lock"}
