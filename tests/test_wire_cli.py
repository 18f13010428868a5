"""The fifteen deviations that matter most, and the key, through the real command line.

Each test looks at four things: the exit code, stdout, that every request was valid (the fixtures
assert it for the server's side) and that what is stored is valid and says what happened.
"""

import http.server
import json
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import prompts, put_session, results, roles, session_files, talk, until

from agent import problems
from flaky_server import FlakyServer

OLD = "20260101-100000-aaaa"
CANARY = "sk-canary-0123456789abcdef"
ODD = "one\u2028two\u2029three\x85four caf\xe9 \u4e16\u754c \u2705 \U0001f44b\U0001f3fd!"


def call(name: str, **arguments: object) -> dict:
    """A script step in which the model calls one tool."""
    return {"call": name, "arguments": arguments}


def both(**extra: object) -> dict:
    """A script step in which the model reads a.txt and b.txt."""
    calls = [{"name": "read_file", "arguments": {"path": path}} for path in ("a.txt", "b.txt")]
    return {"calls": calls} | extra


def stored(workspace: Path) -> list[dict]:
    """The messages of the only session behind the system message; the whole of it is valid."""
    [path] = session_files(workspace)
    messages = json.loads(path.read_text())["messages"]
    assert problems(messages) == []
    return messages[1:]


def said(workspace: Path) -> list[tuple[str, str | None]]:
    """What is stored, as (role, content)."""
    return [(message["role"], message["content"]) for message in stored(workspace)]


def events(stdout: str, kind: str) -> list[dict]:
    """The events of one kind in the output of --json."""
    found = [json.loads(line) for line in stdout.splitlines()]
    return [event for event in found if event["type"] == kind]


# -- 1 to 3: streams, errors, fragments ----------------------------------------------------------


@pytest.mark.parametrize("fault", ["cut_call", "cut_chunk", "reset", "spliced", "html", "empty"])
def test_a_broken_stream_runs_nothing_and_leaves_nothing_behind(run_agent, workspace, fault):
    step = call("write_file", path="a.txt", content="half") | {"text": "I write.", "fault": fault}
    with FlakyServer([step, "whole"]) as server:
        done = run_agent("--yes", "hi", server=server)
    good = [("user", "hi"), ("assistant", "whole")]
    fatal = fault == "html"  # a wrong address does not go away
    expected = (1, "", good[:1], 1) if fatal else (0, "whole\n", good, 2)
    assert (done.returncode, done.stdout, said(workspace), len(server.requests)) == expected
    assert not (workspace / "a.txt").exists()


@pytest.mark.parametrize(
    "step, code",
    [
        pytest.param({"fault": "error_in_200", "text": "half"}, 0, id="502 in mid-stream"),
        pytest.param({"fault": "error_event"}, 0, id="an event of the name error"),
        pytest.param({"fault": "error_finish", "text": "half of it"}, 0, id="a finish_reason"),
        pytest.param({"fault": "json_error_200"}, 0, id="a JSON body"),
        pytest.param({"fault": "error_in_200", "code": 400, "message": "no such field"}, 1, id="4"),
        pytest.param({"fault": "json_error_200", "code": 401, "message": "no"}, 41, id="the key"),
    ],
)
def test_an_error_inside_a_200_is_what_the_same_status_is(run_agent, workspace, step, code):
    with FlakyServer([step, "whole"]) as server:
        done = run_agent("hi", server=server)
    good = [("user", "hi"), ("assistant", "whole")]
    expected = (code, "", good[:1]) if code else (0, "whole\n", good)
    assert (done.returncode, done.stdout, said(workspace)) == expected
    assert len(server.requests) == (1 if code else 2)
    assert step.get("message", "") in done.stderr


def test_no_chaos_of_indexes_and_ids_loses_or_mixes_a_call(run_agent, workspace):
    (workspace / "a.txt").write_text("alpha\n")
    (workspace / "b.txt").write_text("beta\n")
    faults = "index_missing index_and_id_missing index_always_zero index_text one_event".split()
    faults += "id_missing id_duplicate id_duplicate interleaved index_zero_without_ids".split()
    with FlakyServer([*(both(fault=fault) for fault in faults), "done"]) as server:
        done = run_agent("hi", server=server)
    told = results(server.requests[-1])
    ids = [item["id"] for m in stored(workspace) for item in m.get("tool_calls", [])]
    assert (done.returncode, done.stdout, len(server.requests)) == (0, "done\n", len(faults) + 1)
    assert [text.split("\n")[0] for text in told] == ["1: alpha", "1: beta"] * len(faults)
    assert len(set(ids)) == len(ids) == 2 * len(faults)


# -- 4: history ----------------------------------------------------------------------------------


def test_a_history_with_orphans_is_repaired_before_it_is_sent(run_agent, workspace):
    calls = [
        {"id": i, "type": "function", "function": {"name": "bash", "arguments": "{}"}} for i in "ab"
    ]
    damage = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "user", "content": "still there?"},
        {"role": "tool", "tool_call_id": "b", "content": "found"},
        {"role": "tool", "tool_call_id": "never called", "content": "orphan"},
    ]
    put_session(workspace, OLD, talk("first", "second") + damage)
    with FlakyServer(["ok"]) as server:
        done = run_agent("--resume", "go on", server=server)
    [request] = server.requests
    order = ["user", "assistant", "assistant", "tool", "tool", "user", "user"]
    assert (done.returncode, done.stdout) == (0, "ok\n")
    assert roles(request) == ["system", *order]
    assert results(request)[0].startswith("interrupted") and results(request)[1:] == ["found"]
    assert [role for role, _ in said(workspace)] == [*order, "assistant"]
    assert "dropped" in done.stderr or "repaired" in done.stderr


def test_arguments_that_are_no_json_object_stay_in_no_history(run_agent, workspace):
    raws = ["{bad", "", "[1]", "null", '{"a":NaN}', {"path": "a.txt"}]
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "read_file", "arguments": raw}}
        for n, raw in enumerate(raws)
    ]
    answers = [{"role": "tool", "tool_call_id": c["id"], "content": "x"} for c in calls]
    reply = {"role": "assistant", "content": None, "tool_calls": calls}
    put_session(workspace, OLD, [*talk("one", "two"), reply, *answers])
    bad = call("write_file", path="a.txt", content="a") | {"fault": "arguments_malformed"}
    with FlakyServer([bad, "ok"]) as server:
        done = run_agent("--yes", "--resume", "go on", server=server)
    sent = [
        item["function"]["arguments"]
        for message in server.requests[-1]["messages"]
        for item in message.get("tool_calls", [])
    ]
    assert (done.returncode, done.stdout) == (0, "ok\n")
    assert [json.loads(text) for text in sent] == [{}, {}, {}, {}, {}, {"path": "a.txt"}, {}]
    last = results(server.requests[-1])[-1]
    assert last.startswith("error: ") and "a.txt" in last
    assert [role for role, _ in said(workspace)][-4:] == ["user", "assistant", "tool", "assistant"]


# -- 5 to 7: the end of a reply, its text --------------------------------------------------------


@pytest.mark.parametrize("fault", ["length", "length_whole_call"])
def test_a_call_cut_by_the_length_is_not_run_and_the_model_is_told(run_agent, workspace, fault):
    step = call("write_file", path="a.txt", content="half") | {"text": "I write.", "fault": fault}
    with FlakyServer([step, "in parts, then"]) as server:
        done = run_agent("--yes", "hi", server=server)
    note = prompts(server.requests[1])[-1]
    assert (done.returncode, done.stdout) == (0, "in parts, then\n")
    assert "cut" in note and "small" in note
    assert said(workspace) == [
        ("user", "hi"),
        ("assistant", "I write."),
        ("user", note),
        ("assistant", "in parts, then"),
    ]
    assert not (workspace / "a.txt").exists()


def test_empty_replies_end_the_turn_but_not_the_session(run_agent, workspace):
    with FlakyServer([{"fault": "empty_reply", "times": 2}, "here I am"]) as server:
        failed = run_agent("hi", server=server)
        kept = said(workspace)
        done = run_agent("--resume", "and now?", server=server)
    assert (failed.returncode, failed.stdout, kept) == (1, "", [("user", "hi")])
    assert "agent --resume" in failed.stderr
    assert (done.returncode, done.stdout) == (0, "here I am\n")
    assert said(workspace) == [("user", "hi"), ("user", "and now?"), ("assistant", "here I am")]


@pytest.mark.parametrize("fault", ["split_bytes", "unicode_separators", "close_delimited"])
def test_separators_and_characters_that_are_split_over_reads_come_through(
    run_agent, workspace, fault
):
    write = call("write_file", path="a.txt", content=ODD)
    with FlakyServer([write, {"fault": fault, "text": ODD}]) as server:
        done = run_agent("--yes", "hi", server=server)
    assert (done.returncode, done.stdout) == (0, ODD + "\n")
    assert said(workspace)[-1] == ("assistant", ODD)
    assert (workspace / "a.txt").read_bytes() == ODD.encode()


# -- 8 to 10: waiting ----------------------------------------------------------------------------


def test_a_stall_with_keep_alives_can_be_interrupted_at_once(start_agent, workspace):
    with FlakyServer([{"fault": "keepalive_stall"}]) as server:
        agent = start_agent("hi", server=server)
        until(lambda: server.replies)
        agent.send_signal(signal.SIGINT)
        out, _ = agent.communicate(timeout=60)
    assert (agent.returncode, out, said(workspace)) == (130, "", [("user", "hi")])


class Pings(http.server.BaseHTTPRequestHandler):
    """The first request gets one word and then comments for ever, each later one a whole reply."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(time.monotonic())
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.say({"content": "whole"})
        while len(self.server.asked) == 1:
            self.wfile.write(b": ping\n\n")
            time.sleep(0.2)
        self.say({}, "stop")

    def say(self, delta: dict, finish: str | None = None) -> None:
        """One event."""
        event = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.long
def test_a_stall_with_keep_alives_ends_after_two_minutes_and_is_asked_again(run_agent, workspace):
    """The limit is a constant, and a real process has a real clock: this one waits."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pings) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, args=(0.005,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        done = run_agent("hi", env={"AGENT_BASE_URL": url}, timeout=1200)
        server.shutdown()
    [first, second] = server.asked
    assert (done.returncode, done.stdout) == (0, "whole\n")
    assert said(workspace) == [("user", "hi"), ("assistant", "whole")]
    assert 120 <= second - first < 240


def test_every_form_of_retry_after_is_waited_for(run_agent, workspace):
    forms = [
        ({"Retry-After": "0.2"}, 0.2),
        ({"Retry-After-Ms": "150", "Retry-After": "9"}, 0.15),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0),
        ({"X-RateLimit-Remaining-Requests": "0", "X-RateLimit-Reset-Requests": "250ms"}, 0.25),
    ]
    with FlakyServer([*({"status": 429, "headers": h} for h, _ in forms), "whole"]) as server:
        done = run_agent("--json", "hi", server=server)
    waited = [event["delay"] for event in events(done.stdout, "retry")]
    assert (done.returncode, waited) == (0, [delay for _, delay in forms])
    assert said(workspace) == [("user", "hi"), ("assistant", "whole")]


@pytest.mark.parametrize("value", ["57600", "Fri, 31 Dec 2099 23:59:59 GMT"])
def test_a_wait_of_hours_is_reported_and_not_slept_through(run_agent, workspace, value):
    with FlakyServer([{"status": 429, "headers": {"Retry-After": value}}]) as server:
        done = run_agent("hi", server=server)
    assert (done.returncode, done.stdout, len(server.requests)) == (75, "", 1)
    assert "wait" in done.stderr and "agent --resume" in done.stderr
    assert said(workspace) == [("user", "hi")]


def test_an_empty_account_ends_the_turn_whatever_the_headers_promise(run_agent, workspace):
    body = {"error": {"message": "You exceeded your current quota.", "code": "insufficient_quota"}}
    step = {"status": 429, "headers": {"Retry-After": "1"}, "body": body}
    with FlakyServer([step, "never"]) as server:
        done = run_agent("hi", server=server)
    assert (done.returncode, done.stdout, len(server.requests)) == (1, "", 1)
    assert "You exceeded your current quota." in done.stderr
    assert said(workspace) == [("user", "hi")]


# -- 11: overflow --------------------------------------------------------------------------------


def long_talk(workspace: Path) -> None:
    """A session of ten questions with long answers."""
    rounds = [m for n in range(10) for m in talk(f"question {n}", f"answer {n} " * 200)[1:]]
    put_session(workspace, OLD, [*talk("first", "second"), *rounds])


def test_an_overflow_is_compacted_and_asked_once_more(run_agent, workspace):
    long_talk(workspace)
    with FlakyServer([{"fault": "context_overflow"}, "the note", "after"]) as server:
        done = run_agent("--json", "--resume", "go on", server=server)
    refused, summary, again = server.requests
    [compacted] = events(done.stdout, "compacted")
    assert (done.returncode, events(done.stdout, "result")[0]["text"]) == (0, "after")
    assert ("tools" in summary, "tools" in again) == (False, True)
    assert len(again.raw) < len(refused.raw) and "the note" in prompts(again)[0]
    assert compacted["messages_after"] < compacted["messages_before"] == len(refused["messages"])
    assert said(workspace)[-2:] == [("user", "go on"), ("assistant", "after")]
    archive = workspace / ".agent/sessions" / f"{OLD}.archive.jsonl"
    assert "question 0" in archive.read_text()


def test_a_second_overflow_ends_the_turn(run_agent, workspace):
    long_talk(workspace)
    overflow = {"fault": "context_overflow"}
    with FlakyServer([overflow, "the note", overflow, "never"]) as server:
        done = run_agent("--resume", "go on", server=server)
    assert (done.returncode, done.stdout, len(server.requests)) == (1, "", 3)
    assert "8192" in done.stderr
    assert said(workspace)[-1] == ("user", "go on")


def test_an_overflow_that_nothing_can_mend_is_one_request(run_agent, workspace):
    with FlakyServer([{"fault": "context_overflow"}, "never"]) as server:
        done = run_agent("hi", server=server)
    assert (done.returncode, done.stdout, len(server.requests)) == (1, "", 1)
    assert said(workspace) == [("user", "hi")]


# -- 12: reasoning -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault, carried",
    [
        pytest.param(None, {"reasoning_content": "Hm, look."}, id="reasoning_content"),
        pytest.param("reasoning_key", {"reasoning": "Hm, look."}, id="reasoning"),
        pytest.param(
            "reasoning_details",
            {
                "reasoning": "Hm, look.",
                "reasoning_details": [
                    {
                        "type": "reasoning.text",
                        "index": 0,
                        "text": "Hm, look.",
                        "signature": "c2lnbmF0dXJl",
                    }
                ],
            },
            id="reasoning_details",
        ),
    ],
)
def test_reasoning_goes_back_as_it_came_and_to_no_other_model(run_agent, workspace, fault, carried):
    step = call("read_file", path="a.txt") | {"reasoning": "Hm, look.", "text": "I look."}
    with FlakyServer([step | ({"fault": fault} if fault else {}), "done", "other"]) as server:
        done = run_agent("hi", server=server)
        again = run_agent("--resume", "-m", "flaky-2", "go on", server=server)
    extras = [
        {key: value for key, value in request["messages"][2].items() if "reasoning" in key}
        for request in server.requests[1:]
    ]
    assert (done.returncode, done.stdout, again.stdout) == (0, "done\n", "other\n")
    assert "Hm, look." not in done.stdout
    assert extras == [carried, {}]
    assert {k: v for k, v in stored(workspace)[1].items() if "reasoning" in k} == carried


# -- 14 and 15: text that servers refuse, roles that they want -----------------------------------


def test_surrogates_and_nul_in_output_arguments_and_text_are_sent_by_nobody(run_agent, workspace):
    (workspace / "odd.txt").write_bytes(b"x \xed\xa0\xbd y\n")
    script = [
        call("bash", command=r"printf 'a\000b \355\240\275 \377 \360\237\221\213\n'"),
        call("bash", command="echo '\ud83d' \ude00"),
        call("read_file", path="odd.txt"),
        {"text": "half \ud83d of it\0"},
        "ok",
    ]
    with FlakyServer(script) as server:
        done = run_agent("--yes", "hi", server=server)
        again = run_agent("--yes", "--resume", "go on", server=server)
    told = results(server.requests[-1])
    assert (done.returncode, done.stdout) == (0, "half \ufffd of it\ufffd\n")
    assert (again.returncode, again.stdout) == (0, "ok\n")
    assert "\U0001f44b" in told[0] and told[0].startswith("a\ufffdb ")
    assert [m for m in stored(workspace) if "\0" in json.dumps(m, ensure_ascii=False)] == []


ROLES = [
    pytest.param("wants_alternating_roles", [], id="two user messages"),
    pytest.param(
        "refuses_user_after_tool",
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "bash", "arguments": "{}"},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "found"},
        ],
        id="a user message behind a result",
    ),
]


@pytest.mark.parametrize("fault, tail", ROLES)
def test_roles_that_must_alternate_are_mended_once_and_on_the_wire_only(
    run_agent, workspace, fault, tail
):
    tail = tail or [{"role": "user", "content": "unanswered"}]
    put_session(workspace, OLD, talk("first", "second") + tail)
    look = call("read_file", path="a.txt") | {"fault": fault}
    script = [{"fault": fault}, look, {"fault": fault, "text": "done"}]
    with FlakyServer(script) as server:
        done = run_agent("--json", "--resume", "go on", server=server)
    notices = [event["text"] for event in events(done.stdout, "notice")]
    assert (done.returncode, events(done.stdout, "result")[0]["text"]) == (0, "done")
    assert server.replies == [400, 200, 200]
    assert len([text for text in notices if "adapted" in text]) == 1
    assert stored(workspace)[2 : 2 + len(tail)] == tail
    assert said(workspace)[2 + len(tail)] == ("user", "go on")


# -- the key -------------------------------------------------------------------------------------


def refusal(status: int, words: str, **extra: object) -> dict:
    """A script step in which the server refuses in its own words."""
    return {"status": status, "body": {"error": {"message": words}}} | extra


def shows_no_key(done, *folders: Path) -> None:
    """Neither the output nor a file that the agent wrote holds the key."""
    files = [f for folder in folders for f in (folder / ".agent").rglob("*") if f.is_file()]
    assert CANARY not in done.stdout + done.stderr
    assert [file for file in files if CANARY.encode() in file.read_bytes()] == []
    assert files != []


ASIDE = f"The field {CANARY} is unknown."
ECHO = f"Incorrect API key provided: {CANARY}."
AT_ONCE = {"Retry-After": "0"}


@pytest.mark.parametrize("flags", [[], ["--json"], ["--output-format", "json"]], ids=str)
@pytest.mark.parametrize(
    "step, code",
    [
        pytest.param(refusal(401, ECHO), 41, id="401"),
        pytest.param({"status": 400, "body": f"<p>{ECHO}</p>"}, 41, id="400 as a page"),
        pytest.param(refusal(429, ECHO, headers=AT_ONCE, times=5), 75, id="429"),
        pytest.param(refusal(500, ECHO, headers=AT_ONCE, times=5), 75, id="500"),
        pytest.param({"fault": "error_in_200", "code": 422, "message": ASIDE}, 1, id="in a 200"),
        pytest.param({"fault": "redirect", "location": f"/in?key={CANARY}"}, 1, id="redirect"),
        pytest.param({"fault": "context_overflow", "message": ASIDE}, 1, id="overflow"),
    ],
)
def test_a_key_that_the_server_echoes_is_shown_nowhere(run_agent, workspace, step, code, flags):
    with FlakyServer([step]) as server:
        done = run_agent(*flags, "hi", server=server, env={"AGENT_API_KEY": CANARY})
    assert done.returncode == code
    assert stored(workspace) == [{"role": "user", "content": "hi"}]
    shows_no_key(done, workspace)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(call("bash", command="cat notes.txt"), id="a file by a command"),
        pytest.param(call("read_file", path="notes.txt"), id="a file by a tool"),
        pytest.param(call("bash", command="env; set"), id="the environment of a command"),
        pytest.param(
            call("bash", command="cat /proc/$(cut -d' ' -f4 /proc/$PPID/stat)/environ"),
            id="the environment of the agent",
        ),
        pytest.param(
            call("bash", command=r"tr '\0' '\n' < /proc/$PPID/environ; cat /proc/$PPID/cmdline"),
            id="the process above a command",
        ),
    ],
)
def test_a_key_that_a_command_prints_is_shown_and_sent_nowhere(run_agent, workspace, step):
    (workspace / "notes.txt").write_text(f"key: {CANARY}\n")
    with FlakyServer([step, "done"]) as server:
        done = run_agent("--yes", "--json", "hi", server=server, env={"AGENT_API_KEY": CANARY})
    assert (done.returncode, len(server.requests)) == (0, 2)
    assert [request for request in server.requests if CANARY.encode() in request.raw] == []
    shows_no_key(done, workspace)


@pytest.mark.parametrize("place", ["environment", "env file", "variable of the provider"])
def test_the_trace_of_a_crash_holds_no_key(run_agent, workspace, home, tmp_path, place):
    """A module `requests` that fails with the key in its words stands for any fault of ours."""
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "requests.py").write_text(f"raise RuntimeError('broken {CANARY}')\n")
    name = "GROQ_API_KEY" if place == "variable of the provider" else "AGENT_API_KEY"
    env = {"AGENT_API_KEY": None, "AGENT_PROVIDER": "groq", name: CANARY}
    if place == "env file":
        (home / ".config/agent").mkdir(parents=True)
        (home / ".config/agent/env").write_text(f"AGENT_API_KEY={CANARY}\n")
        env |= {"AGENT_API_KEY": None}
    root = str(Path(sys.modules["agent"].__file__).parent)
    done = run_agent("hi", env=env | {"PYTHONPATH": f"{fake}:{root}"})
    [crash] = (workspace / ".agent").glob("crash-*.txt")
    assert (done.returncode, done.stdout) == (1, "")
    assert "RuntimeError" in crash.read_text()
    shows_no_key(done, workspace)
