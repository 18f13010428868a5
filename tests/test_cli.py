"""The command line as users and scripts see it: real processes, real files, real signals."""

import hashlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import (
    KEY,
    NAP,
    ROOT,
    alive,
    inside,
    prompts,
    put_session,
    results,
    roles,
    session_files,
    talk,
    until,
)

from agent import JsonScreen, Screen, Signals, Stop
from flaky_server import FlakyServer

OLDER, NEWER, NEWEST = "20260101-100000-aaaa", "20260102-100000-bbbb", "20260103-100000-cccc"
AT_ONCE = {"Retry-After": "0"}


def call(name: str, **arguments: object) -> dict:
    """A script step in which the model calls one tool."""
    return {"call": name, "arguments": arguments}


def batch(*steps: dict, **extra: object) -> dict:
    """A script step in which the model makes several calls at once."""
    calls = [{"name": step["call"], "arguments": step["arguments"]} for step in steps]
    return {"calls": calls} | extra


def refusal(status: int, words: str, **extra: object) -> dict:
    """A script step in which the server refuses in its own words."""
    return {"status": status, "body": {"error": {"message": words, "type": "x"}}} | extra


def last_line(text: str) -> str:
    """The last line of a text that holds something."""
    return text.strip().splitlines()[-1]


def the_session(workspace: Path) -> dict:
    """The content of the only session of the workspace."""
    [path] = session_files(workspace)
    return json.loads(path.read_text())


def files_in(folder: Path) -> list[str]:
    """Every file below the folder, relative, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# -- prompt and stdin ----------------------------------------------------------------------------


def test_a_prompt_is_answered_on_stdout_alone(run_agent):
    with FlakyServer(["hello there"], key=KEY) as server:
        done = run_agent("hi", server=server)
    assert (done.returncode, done.stdout) == (0, "hello there\n")
    assert [prompts(request) for request in server.requests] == [["hi"]]
    assert server.requests[0]["model"] == "flaky-1"


def test_stdout_carries_only_the_final_answer(run_agent, workspace):
    (workspace / "a.txt").write_text("alpha\n")
    step = call("read_file", path="a.txt") | {"text": "Let me look."}
    with FlakyServer([step, "It says alpha."]) as server:
        done = run_agent("-p", "what is in a.txt?", server=server)
    assert (done.returncode, done.stdout) == (0, "It says alpha.\n")


def test_options_may_stand_between_the_words_of_the_prompt(run_agent):
    with FlakyServer(["yes"]) as server:
        done = run_agent("say", "--mode", "plan", "hello", "-m", "other", "there", server=server)
    assert done.returncode == 0
    assert server.requests[0]["model"] == "other"
    assert prompts(server.requests[0])[0].startswith("say hello there")


@pytest.mark.parametrize(
    "words, prompt",
    [
        pytest.param(["- fix the bug"], "- fix the bug", id="bullet"),
        pytest.param(["--yes please do it"], "--yes please do it", id="looks like a flag"),
        pytest.param(["---\ntitle: x"], "---\ntitle: x", id="front matter"),
        pytest.param(["-x\nsecond"], "-x\nsecond", id="newline"),
        pytest.param(["--", "--yes"], "--yes", id="after two dashes"),
        pytest.param(["fix", "--", "-x", "now"], "fix -x now", id="between words"),
    ],
)
def test_a_prompt_may_start_with_a_dash(run_agent, words, prompt):
    with FlakyServer(["ok"]) as server:
        done = run_agent(*words, server=server)
    assert (done.returncode, done.stdout) == (0, "ok\n")
    assert prompts(server.requests[0]) == [prompt]


@pytest.mark.parametrize(
    "flag", ["--keep", "--ye", "--yess", "--resum", "--frobnicate", "-Z", "-fix"]
)
def test_an_unknown_flag_is_a_usage_error(run_agent, flag):
    with FlakyServer(["never"]) as server:
        done = run_agent(flag, "hi", server=server)
    assert (done.returncode, done.stdout, server.requests) == (2, "", [])
    assert flag in done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--mode", "turbo"], id="mode"),
        pytest.param(["--output-format", "xml"], id="format"),
        pytest.param(["--max-turns", "many"], id="number"),
        pytest.param(["--provider", "nosuch"], id="provider"),
    ],
)
def test_a_wrong_value_of_a_flag_is_a_usage_error(run_agent, flags):
    with FlakyServer(["never"]) as server:
        done = run_agent(*flags, "hi", server=server)
    assert (done.returncode, done.stdout, server.requests) == (2, "", [])
    assert flags[1] in done.stderr


def test_a_dash_reads_the_prompt_from_stdin(run_agent):
    with FlakyServer(["ok"]) as server:
        done = run_agent("-", server=server, input="line one\nline two\n")
    assert (done.returncode, done.stdout) == (0, "ok\n")
    assert prompts(server.requests[0])[0].strip() == "line one\nline two"


def test_a_dash_waits_for_the_end_of_a_slow_pipe(start_agent):
    with FlakyServer(["ok"]) as server:
        agent = start_agent("-", server=server, stdin=subprocess.PIPE)
        agent.stdin.write("early ")
        agent.stdin.flush()
        time.sleep(1.3)  # Longer than data beside a prompt argument is waited for.
        out, _ = agent.communicate("late", 20)
    assert (agent.returncode, out, prompts(server.requests[0])) == (0, "ok\n", ["early late"])


def test_piped_data_is_appended_to_the_prompt(run_agent):
    with FlakyServer(["ok"]) as server:
        done = run_agent("explain", server=server, input="ValueError: bad\n")
    [prompt] = prompts(server.requests[0])
    assert done.returncode == 0
    assert prompt.startswith("explain")
    assert prompt.rstrip().endswith("ValueError: bad") or "ValueError: bad" in prompt


def test_an_open_silent_pipe_is_not_waited_for(start_agent):
    with FlakyServer(["ok"]) as server:
        agent = start_agent("hi", server=server, stdin=subprocess.PIPE)
        assert agent.wait(60) == 0
        assert (agent.stdout.read(), prompts(server.requests[0])) == ("ok\n", ["hi"])


def test_what_comes_behind_a_silence_is_not_in_the_prompt_and_that_is_told(start_agent):
    with FlakyServer(["ok"]) as server:
        agent = start_agent("hi", server=server, stdin=subprocess.PIPE)
        agent.stdin.write("early")
        agent.stdin.flush()
        assert agent.wait(60) == 0
        told = agent.stderr.readline()
    assert prompts(server.requests[0]) == ["hi\n\nearly"]
    assert told == "agent: the prompt has the first 5 bytes of stdin: its writer is not done\n"


def test_more_data_than_a_prompt_takes_is_cut_and_that_is_told(start_agent, tmp_path):
    (tmp_path / "big.txt").write_bytes(b"x" * 10_000_001)
    with FlakyServer(["ok"]) as server, (tmp_path / "big.txt").open() as big:
        agent = start_agent("hi", server=server, stdin=big)
        out, err = agent.communicate(timeout=60)
    assert (agent.returncode, out, "the first 10,000,000 bytes of stdin" in err) == (
        0,
        "ok\n",
        True,
    )
    assert len(prompts(server.requests[0])[0]) == len("hi\n\n") + 10_000_000


@pytest.mark.parametrize("words, code", [(["hi"], 0), (["-"], 2)], ids=["prompt", "dash"])
def test_a_stdin_that_can_not_be_read_is_no_traceback(start_agent, tmp_path, words, code):
    with FlakyServer(["ok"]) as server, (tmp_path / "out.txt").open("w") as only_written:
        agent = start_agent(*words, server=server, stdin=only_written)
        _, err = agent.communicate(timeout=60)
    assert (agent.returncode, len(err.splitlines()), "Traceback" in err) == (code, 1, False)


@pytest.mark.parametrize("flags", [["-p"], ["--json"], ["--output-format", "json"]])
def test_without_a_prompt_a_terminal_is_not_waited_for(terminal, flags):
    screen = terminal(*flags, env={"AGENT_BASE_URL": "http://127.0.0.1:9/v1"})
    assert (screen.wait(), "no prompt" in screen.text) == (2, True)


def test_print_shows_only_the_final_answer_also_on_a_terminal(terminal):
    step = call("read_file", path="a.txt") | {"text": "Let me look."}
    with FlakyServer([step, "It says alpha."]) as server:
        screen = terminal("-p", "what?", server=server)
        assert screen.wait() == 0
    assert ("Let me look." in screen.text, "It says alpha." in screen.text) == (False, True)


def test_nothing_piped_and_no_prompt_sends_nothing(run_agent):
    with FlakyServer(["never"]) as server:
        done = run_agent(server=server)
    assert (done.stdout, server.requests) == ("", [])


def test_a_lone_surrogate_on_the_command_line_becomes_valid_text(run_agent):
    with FlakyServer(["ok"]) as server:
        done = run_agent(b"caf\xe9 please", server=server)
    [prompt] = prompts(server.requests[0])
    assert (done.returncode, server.requests[0].problems) == (0, [])
    assert prompt == "caf\ufffd please"


def test_piped_bytes_that_are_not_unicode_become_valid_text(start_agent):
    with FlakyServer(["ok"]) as server:
        agent = start_agent("-", server=server, stdin=subprocess.PIPE, encoding=None, errors=None)
        out, _ = agent.communicate(b"caf\xe9 \xed\xa0\xbd a\0b", 20)
    [prompt] = prompts(server.requests[0])
    assert (agent.returncode, out, server.requests[0].problems) == (0, b"ok\n", [])
    assert prompt.startswith("caf\ufffd ")


# -- keys, refusals, retries ---------------------------------------------------------------------


def test_no_key_and_no_server_says_what_to_set(run_agent):
    done = run_agent("hi", env={"AGENT_API_KEY": None})
    assert (done.returncode, done.stdout) == (41, "")
    assert "AGENT_API_KEY" in done.stderr


def test_a_local_server_needs_no_key(run_agent):
    with FlakyServer(["ok"]) as server:
        done = run_agent("hi", server=server, env={"AGENT_API_KEY": None})
    assert (done.returncode, done.stdout) == (0, "ok\n")


def test_the_variables_of_openai_are_a_fallback(run_agent):
    names = {"AGENT_BASE_URL": None, "AGENT_API_KEY": None, "OPENAI_API_KEY": "second"}
    with FlakyServer(["ok"], key="second") as server:
        done = run_agent("hi", server=server, env=names | {"OPENAI_BASE_URL": server.url})
    assert (done.returncode, done.stdout) == (0, "ok\n")


def test_without_a_model_the_first_of_the_server_is_taken(run_agent):
    with FlakyServer(["ok"]) as server:
        done = run_agent("hi", server=server, env={"AGENT_MODEL": None})
    assert (done.returncode, server.requests[0]["model"]) == (0, "flaky-1")


@pytest.mark.parametrize(
    "status, code",
    [
        pytest.param(401, 41, id="401"),
        pytest.param(403, 41, id="403"),
        pytest.param(400, 1, id="400"),
        pytest.param(404, 1, id="404"),
    ],
)
def test_a_refusal_ends_at_once_with_the_words_of_the_server(run_agent, status, code):
    with FlakyServer([refusal(status, "the moon is in the way"), "never"]) as server:
        done = run_agent("hi", server=server)
    assert (done.returncode, done.stdout, len(server.requests)) == (code, "", 1)
    assert "the moon is in the way" in done.stderr


def test_a_wrong_key_is_refused_with_41(run_agent):
    with FlakyServer(["never"], key="right") as server:
        done = run_agent("hi", server=server, env={"AGENT_API_KEY": "wrong"})
    assert (done.returncode, done.stdout, server.replies) == (41, "", [401])


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
def test_a_passing_failure_is_retried_four_times_and_each_time_announced(run_agent, status):
    step = refusal(status, "come back later", headers=AT_ONCE, times=5)
    with FlakyServer([step, "never"]) as server:
        done = run_agent("hi", server=server)
    assert (done.returncode, done.stdout, server.replies) == (75, "", [status] * 5)
    assert done.stderr.count(str(status)) >= 4 or done.stderr.count("come back later") >= 4
    assert "come back later" in done.stderr
    assert "--resume" in last_line(done.stderr)


def test_the_retry_events_count_to_four(run_agent):
    step = refusal(503, "come back later", headers=AT_ONCE, times=5)
    with FlakyServer([step]) as server:
        done = run_agent("--json", "hi", server=server)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    retries = [event for event in events if event["type"] == "retry"]
    assert [event["attempt"] for event in retries] in ([1, 2, 3, 4], [2, 3, 4, 5])
    assert {event["of"] for event in retries} <= {4, 5}
    assert all(event["delay"] < 1 and event["reason"] for event in retries)
    assert (events[-1]["type"], events[-1]["status"], events[-1]["exit_code"]) == (
        "result",
        "error",
        75,
    )


def test_a_success_after_a_rate_limit_is_a_success(run_agent):
    with FlakyServer([refusal(429, "slow down", headers=AT_ONCE), "made it"]) as server:
        done = run_agent("hi", server=server)
    assert (done.returncode, done.stdout, server.replies) == (0, "made it\n", [429, 200])
    assert "slow down" in done.stderr or "429" in done.stderr


def test_an_empty_account_is_not_asked_again(run_agent):
    with FlakyServer([{"fault": "insufficient_quota"}, "never"]) as server:
        done = run_agent("hi", server=server)
    assert (done.stdout, len(server.requests)) == ("", 1)
    assert done.returncode in (1, 41, 75)
    assert "quota" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "step",
    [
        pytest.param({"fault": "cut_text", "text": "half of this never comes"}, id="cut_text"),
        pytest.param({"fault": "reset", "text": "half of this never comes"}, id="reset"),
        pytest.param({"fault": "drop"}, id="drop"),
        pytest.param({"fault": "error_in_200", "code": 503, "message": "overloaded"}, id="error"),
    ],
)
def test_a_reply_that_broke_off_is_asked_again(run_agent, step):
    with FlakyServer([step, "whole"]) as server:
        done = run_agent("hi", server=server)
    first, second = server.requests
    assert (done.returncode, done.stdout) == (0, "whole\n")
    assert first["messages"] == second["messages"]


def test_a_call_that_broke_off_is_not_run(run_agent, workspace):
    step = {"fault": "cut_call"} | call("bash", command="touch ran.txt")
    with FlakyServer([step, "whole"]) as server:
        done = run_agent("--yes", "hi", server=server)
    assert (done.returncode, done.stdout, results(server.requests[1])) == (0, "whole\n", [])
    assert not (workspace / "ran.txt").exists()


def test_a_call_of_a_reply_that_was_cut_by_the_length_limit_is_not_run(run_agent, workspace):
    step = {"fault": "length"} | call("write_file", path="ran.txt", content="x" * 200)
    with FlakyServer([step, "in parts, then"]) as server:
        done = run_agent("--yes", "hi", server=server)
    assert (done.stdout, len(server.requests)) == ("in parts, then\n", 2)
    assert not (workspace / "ran.txt").exists()


def test_a_redirect_is_reported_and_not_followed(run_agent):
    with FlakyServer([{"fault": "redirect"}, "never"]) as server:
        done = run_agent("hi", server=server)
    assert (done.returncode, done.stdout, len(server.requests)) == (1, "", 1)
    assert "redirect" in done.stderr.lower() or "302" in done.stderr


def test_a_netrc_entry_does_not_replace_the_key(run_agent, home):
    (home / ".netrc").write_text("machine 127.0.0.1 login eve password mallory\n")
    (home / ".netrc").chmod(0o600)
    with FlakyServer(["ok"], key=KEY) as server:
        done = run_agent("hi", server=server)
    assert (done.returncode, done.stdout) == (0, "ok\n")
    assert server.requests[0].headers.get("Authorization") == f"Bearer {KEY}"


def test_the_key_appears_nowhere(run_agent, workspace):
    script = [
        call("bash", command="env; echo key=$AGENT_API_KEY"),
        refusal(401, "wrong key sk-SECRET-77"),
    ]
    with FlakyServer(script) as server:
        done = run_agent("--yes", "hi", server=server, env={"AGENT_API_KEY": "sk-SECRET-77"})
    written = [path.read_bytes() for path in workspace.rglob("*") if path.is_file()]
    assert done.returncode == 41
    assert [text for text in written if b"sk-SECRET-77" in text] == []
    assert [request for request in server.requests if b"sk-SECRET-77" in request.raw] == []
    assert "sk-SECRET-77" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "key",
    [
        pytest.param("sk-abc\nsk-SECRET-77", id="newline"),
        pytest.param("sk-\u2019SECRET-77\u2019", id="typographic quote"),
        pytest.param("\u043a\u043b\u044e\u0447-SECRET-77", id="other letters"),
        pytest.param("sk-\udcffSECRET-77", id="no text"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_a_key_that_no_header_can_carry_is_one_line_that_does_not_show_it(
    run_agent, workspace, home, flags, key
):
    with FlakyServer(["never"]) as server:
        done = run_agent(*flags, "hi", server=server, env={"AGENT_API_KEY": key})
    assert (done.returncode, len(done.stderr.splitlines()), server.requests) == (2, 1, [])
    assert "key" in done.stderr and "SECRET-77" not in done.stderr + done.stdout
    assert files_in(workspace) + files_in(home) == []


# -- tools, modes, rules -------------------------------------------------------------------------


def test_yes_runs_the_tools_for_real(run_agent, workspace):
    (workspace / "old.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\r\nc\r\n")
    step = batch(
        call("write_file", path="sub/new.txt", content="one\ntwo\n"),
        call("edit_file", path="old.txt", old="b", new="B"),
        call("bash", command="printf made > made.txt; echo out; echo err >&2; exit 3"),
    )
    with FlakyServer([step, "done"]) as server:
        done = run_agent("--yes", "do it", server=server)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert (workspace / "sub/new.txt").read_bytes() == b"one\ntwo\n"
    assert (workspace / "old.txt").read_bytes() == b"\xef\xbb\xbfa\r\nB\r\nc\r\n"
    assert (workspace / "made.txt").read_bytes() == b"made"
    assert re.search(r"out\nerr\n.*\b3\b\W*$", results(server.requests[1])[2], re.DOTALL)


CHANGES = [
    pytest.param(call("bash", command="touch made.txt"), id="bash"),
    pytest.param(call("write_file", path="made.txt", content="x"), id="write_file"),
    pytest.param(call("edit_file", path="kept.txt", old="keep", new="lose"), id="edit_file"),
]


@pytest.mark.parametrize("step", CHANGES)
def test_with_nobody_there_a_change_is_denied_and_the_turn_goes_on(run_agent, workspace, step):
    (workspace / "kept.txt").write_text("keep\n")
    with FlakyServer([step, "I could not."]) as server:
        done = run_agent("change it", server=server)
    [result] = results(server.requests[1])
    assert (done.returncode, done.stdout, result[:8]) == (77, "I could not.\n", "denied: ")
    assert "--allow" in done.stderr and "--resume" in last_line(done.stderr)
    assert (files_in(workspace)[-1], (workspace / "kept.txt").read_text()) == ("kept.txt", "keep\n")


@pytest.mark.parametrize("step", CHANGES)
def test_the_rule_that_was_named_permits_the_change(run_agent, workspace, step):
    (workspace / "kept.txt").write_text("keep\n")
    with FlakyServer([step, "I could not."]) as server:
        denied = run_agent("change it", server=server)
    rule = shlex.split(denied.stderr[denied.stderr.index("--allow") :].splitlines()[0])[1]
    with FlakyServer([step, "done"]) as server:
        done = run_agent("--allow", rule, "change it", server=server)
    assert (done.returncode, done.stdout, "--allow" in done.stderr) == (0, "done\n", False)
    assert (workspace / "made.txt").exists() or (workspace / "kept.txt").read_text() == "lose\n"


def test_an_open_silent_pipe_does_not_make_the_agent_wait_for_a_yes(start_agent, workspace):
    with FlakyServer([call("bash", command="touch made.txt"), "I could not."]) as server:
        agent = start_agent("change it", server=server, stdin=subprocess.PIPE)
        assert agent.wait(60) == 77
    assert not (workspace / "made.txt").exists()


@pytest.mark.parametrize("step", CHANGES)
def test_plan_mode_refuses_changes(run_agent, workspace, step):
    (workspace / "kept.txt").write_text("keep\n")
    with FlakyServer([step, "a plan"]) as server:
        done = run_agent("--mode", "plan", "change it", server=server)
    [result] = results(server.requests[1])
    assert (done.stdout, result[:8]) == ("a plan\n", "denied: ")
    assert done.returncode in (0, 77)  # CONTRACT: plan says "no", and 77 is for "needed a human".
    assert (files_in(workspace)[-1], (workspace / "kept.txt").read_text()) == ("kept.txt", "keep\n")


@pytest.mark.parametrize("mode", ["plan", "ask", "auto"])
def test_reading_works_in_each_mode(run_agent, workspace, mode):
    (workspace / "a.txt").write_text("alpha\nbeta\n")
    step = batch(
        call("read_file", path="a.txt"),
        call("list_files"),
        call("grep", regex="bet", path="a.txt"),
        call("bash", command="cat a.txt"),
    )
    with FlakyServer([step, "read"]) as server:
        done = run_agent("--mode", mode, "read it", server=server)
    read, listed, found, shown = results(server.requests[1])
    assert (done.returncode, done.stdout) == (0, "read\n")
    assert "1: alpha\n2: beta" in read and "a.txt" in listed
    assert "a.txt:2:beta" in found and "alpha\nbeta" in shown


def test_an_allow_rule_permits_exactly_what_it_names(run_agent, workspace):
    (workspace / "keep.txt").write_text("keep")
    step = batch(
        call("bash", command="touch a.txt"),
        call("bash", command="touch b.txt && rm keep.txt"),
        call("bash", command="touch c.txt; touch 'd e.txt'"),
        call("bash", command="TOUCH f.txt"),
        call("write_file", path="g.txt", content="g"),
    )
    with FlakyServer([step, "some of it"]) as server:
        done = run_agent("--allow", "bash touch *", "do it", server=server)
    denied = [result.startswith("denied: ") for result in results(server.requests[1])]
    assert (done.returncode, denied) == (77, [False, True, False, True, True])
    names = [name for name in files_in(workspace) if not name.startswith(".agent")]
    assert names == ["a.txt", "c.txt", "d e.txt", "keep.txt"]


def test_a_deny_rule_holds_even_under_yes(run_agent, workspace):
    step = batch(
        call("bash", command="touch a.txt"),
        call("write_file", path="secret/b.txt", content="b"),
        call("write_file", path="c.txt", content="c"),
    )
    rules = ["--deny", "bash touch *", "--deny", "write_file secret/**"]
    with FlakyServer([step, "some of it"]) as server:
        done = run_agent("--yes", *rules, "do it", server=server)
    denied = [result.startswith("denied: ") for result in results(server.requests[1])]
    assert denied == [True, True, False]
    assert done.returncode in (0, 77)
    assert [name for name in files_in(workspace) if not name.startswith(".agent")] == ["c.txt"]


OUTSIDE = [
    pytest.param("../outside.txt", id="dots"),
    pytest.param("{outside}", id="absolute"),
    pytest.param("link.txt", id="symlink"),
    pytest.param("folder/outside.txt", id="symlinked folder"),
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_outside_the_workspace_is_refused(run_agent, workspace, path):
    outside = workspace.parent / "outside.txt"
    outside.write_text("hidden words\n")
    (workspace / "link.txt").symlink_to(outside)
    (workspace / "folder").symlink_to(workspace.parent)
    name = path.format(outside=outside)
    step = batch(
        call("read_file", path=name),
        call("grep", regex="hidden", path=name),
        call("write_file", path=name, content="new"),
        call("edit_file", path=name, old="hidden", new="open"),
    )
    with FlakyServer([step, "no way"]) as server:
        done = run_agent("--yes", "read it", server=server)
    texts = results(server.requests[1])
    assert [text for text in texts if not text.startswith(("error: ", "denied: "))] == []
    assert [text for text in texts if "hidden words" in text] == []
    assert (done.stdout, outside.read_text()) == ("no way\n", "hidden words\n")


def test_malformed_arguments_are_not_run_and_leave_valid_history(run_agent, workspace):
    step = {"fault": "arguments_malformed"} | call("bash", command="touch ran.txt")
    with FlakyServer([step, "again, then"]) as server:
        done = run_agent("--yes", "hi", server=server)
    [asked] = [m["tool_calls"] for m in server.requests[1]["messages"] if m.get("tool_calls")]
    [result] = results(server.requests[1])
    assert (done.returncode, done.stdout, asked[0]["function"]["arguments"]) == (
        0,
        "again, then\n",
        "{}",
    )
    assert result.startswith("error: ") and "JSON" in result
    assert not (workspace / "ran.txt").exists()


def test_an_unknown_tool_is_answered_and_the_turn_goes_on(run_agent):
    with FlakyServer([call("execute_python", code="1"), "sorry"]) as server:
        done = run_agent("--yes", "hi", server=server)
    [result] = results(server.requests[1])
    assert (done.returncode, done.stdout, result[:7]) == (0, "sorry\n", "error: ")
    assert "execute_python" in result and "read_file" in result


def test_one_failure_does_not_cancel_the_calls_beside_it(run_agent):
    step = batch(
        call("bash", command="false"),
        call("read_file", path="no"),
        call("bash", command="echo fine"),
    )
    with FlakyServer([step, "ok"]) as server:
        done = run_agent("--yes", "hi", server=server)
    _, missing, echoed = results(server.requests[1])
    assert (done.returncode, missing[:7], "fine" in echoed) == (0, "error: ", True)


def test_odd_bytes_in_the_output_of_a_command_make_valid_requests(run_agent, workspace):
    (workspace / "odd.bin").write_bytes(b"x\0y\xed\xa0\xbd\xe9\n")
    step = batch(
        call("bash", command=r"printf 'a\0b \355\240\275 \351 end\n'"),
        call("bash", command="cat odd.bin"),
        call("read_file", path="odd.bin"),
        call("grep", regex="x", path="."),
    )
    with FlakyServer([step, "ok"]) as server:
        done = run_agent("--yes", "hi", server=server)
    assert (done.returncode, done.stdout, server.requests[1].problems) == (0, "ok\n", [])
    assert "end" in results(server.requests[1])[0]


def test_a_command_reads_nothing_and_has_no_terminal(run_agent):
    command = (
        "cat; test -t 0 && echo terminal; (echo x > /dev/tty) 2>/dev/null && echo tty; echo end"
    )
    with FlakyServer([call("bash", command=command), "ok"]) as server:
        done = run_agent("--yes", "hi", server=server)
    [result] = results(server.requests[1])
    assert (done.returncode, "tty" in result, "terminal" in result, "end" in result) == (
        0,
        False,
        False,
        True,
    )


def test_a_timeout_ends_the_group_and_keeps_the_output(run_agent):
    command = f"echo begun; sleep {NAP} & sleep {NAP}; echo never"
    with FlakyServer([call("bash", command=command, timeout=1), "ok"]) as server:
        done = run_agent("--yes", "hi", server=server)
    [result] = results(server.requests[1])
    assert (done.returncode, "begun" in result) == (0, True)
    assert "never\n" not in result
    assert alive(NAP) == []


def dig(folder: Path, depth: int, text: str) -> None:
    """Make folders in one another, as many as asked, and a file at the bottom."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    with open(os.open("bottom", os.O_WRONLY | os.O_CREAT, dir_fd=here), "w") as file:
        file.write(text)
    os.close(here)


def test_a_tree_of_1200_folders_in_one_another_is_listed_and_searched(run_agent, workspace):
    bottom = "d/" * 1200 + "bottom"
    script = [
        batch(call("list_files"), call("grep", regex="needle"), call("read_file", path=bottom)),
        call("read_file", path="botom"),
        "ok",
    ]
    try:
        dig(workspace, 1200, "needle\n")
        with FlakyServer(script) as server:
            done = run_agent("hi", server=server)
    finally:
        subprocess.run(["rm", "-rf", str(workspace / "d")], check=True)
    missing = f"error: botom does not exist; similar: {bottom}"
    found = [bottom, f"{bottom}:1:needle", "1: needle", missing]
    assert (done.returncode, done.stdout, results(server.requests[2])) == (0, "ok\n", found)


# What no rule sees through: `rm -rf` of the workspace or of its state is denied.
REMOVE = "python3 -c 'import shutil, sys; shutil.rmtree(sys.argv[1])'"


def test_a_workspace_that_a_command_removed_is_an_error_for_the_model(run_agent, workspace):
    script = [
        call("bash", command=f"{REMOVE} {workspace}; echo gone"),
        batch(call("write_file", path="a.txt", content="x"), call("read_file", path="a.txt")),
        call("bash", command="echo on"),
        "ok",
    ]
    with FlakyServer(script) as server:
        done = run_agent("--yes", "--sandbox", "off", "hi", server=server)
    gone, *errors, last = results(server.requests[3])
    assert (done.returncode, done.stdout, workspace.exists()) == (0, "ok\n", False)
    assert gone == "gone\n[exit code 0]"
    assert [text.startswith("error: a.txt") for text in errors] == [True, True]
    assert str(workspace) in last and "No such file" in last
    assert done.stderr.count("can not be saved") == 1


@pytest.mark.parametrize("text", ["", "class HostProcess:\n    oops(\n", None], ids=repr)
def test_commands_run_also_when_the_program_was_replaced_meanwhile(run_agent, tmp_path, text):
    installed = tmp_path / "installed" / "agent.py"
    installed.parent.mkdir()
    shutil.copy(ROOT / "agent.py", installed)

    def upgrade(request: dict) -> dict:
        installed.unlink(missing_ok=True)
        if text is not None:
            installed.write_text(text)
        return call("bash", command="echo hi")

    with FlakyServer([upgrade, call("bash", command="kill -9 $PPID"), upgrade, "ok"]) as server:
        env = {"PYTHONPATH": str(installed.parent)}
        done = run_agent("--yes", "hi", server=server, env=env)
    first, _, third = results(server.requests[3])
    assert (done.returncode, first, third) == (0, *["hi\n[exit code 0]"] * 2)


# -- notes and AGENTS.md -------------------------------------------------------------------------


def test_agents_md_is_in_the_system_message(run_agent, workspace):
    (workspace / "AGENTS.md").write_text("Always speak of the blue heron.\n")
    with FlakyServer(["ok"]) as server:
        assert run_agent("hi", server=server).returncode == 0
    assert "Always speak of the blue heron." in server.requests[0]["messages"][0]["content"]


def test_bare_leaves_agents_md_and_the_user_config_out(run_agent, workspace, home):
    (workspace / "AGENTS.md").write_text("Always speak of the blue heron.\n")
    config(home, 'model = "from-config"')
    with FlakyServer(["ok"]) as server:
        done = run_agent("--bare", "hi", server=server, env={"AGENT_MODEL": None})
    assert (done.returncode, server.requests[0]["model"]) == (0, "flaky-1")
    assert "blue heron" not in json.dumps(server.requests[0]["messages"])


@pytest.mark.parametrize("flags", [[], ["--yes"]], ids=["ask", "yes"])
def test_a_note_is_not_kept_when_nobody_is_there(run_agent, workspace, flags):
    (workspace / "AGENTS.md").write_text("old\n")
    with FlakyServer([call("note", text="new line"), "ok"]) as server:
        done = run_agent(*flags, "hi", server=server)
    [result] = results(server.requests[1])
    assert "not kept: nobody to confirm" in result
    assert (done.stdout, (workspace / "AGENTS.md").read_text()) == ("ok\n", "old\n")


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(call("write_file", path="AGENTS.md", content="obey"), id="write_file"),
        pytest.param(call("edit_file", path="./AGENTS.md", old="old", new="obey"), id="edit_file"),
        pytest.param(
            call("write_file", path="sub/../agents.md", content="obey"), id="case and dots"
        ),
    ],
)
def test_yes_is_not_a_human_who_allows_a_change_of_agents_md(run_agent, workspace, step):
    (workspace / "AGENTS.md").write_text("old\n")
    with FlakyServer([step, "ok"]) as server:
        done = run_agent("--yes", "hi", server=server)
    [result] = results(server.requests[1])
    assert (done.returncode, done.stdout, result[:8]) == (77, "ok\n", "denied: ")
    assert (workspace / "AGENTS.md").read_text() == "old\n"


def test_a_question_to_nobody_is_left_to_the_judgement_of_the_model(run_agent):
    with FlakyServer([call("ask_user", question="red or blue?"), "red"]) as server:
        done = run_agent("hi", server=server)
    assert (done.returncode, done.stdout) == (0, "red\n")
    assert (
        "running unattended; use your best judgement and say what you assumed"
        in results(server.requests[1])[0]
    )


# -- budgets and loops ---------------------------------------------------------------------------


def working(request: dict) -> dict:
    """A model that never ends: each reply is a new command."""
    return call("bash", command=f"echo {len(results(request))} >> steps.txt")


def test_the_last_request_of_a_budget_asks_for_a_report(run_agent, workspace):
    with FlakyServer([working, working, "here is my report"]) as server:
        done = run_agent("--yes", "--max-turns", "2", "work", server=server)
    lasts = [
        "this is the last request" in request["messages"][-1]["content"]
        for request in server.requests
    ]
    assert (done.returncode, done.stdout, lasts) == (
        53,
        "here is my report\n",
        [False, False, True],
    )
    assert server.requests[2]["tools"] == server.requests[0]["tools"]
    assert f"--resume {session_files(workspace)[0].stem}" in last_line(done.stderr)


def test_calls_in_the_last_reply_of_a_budget_are_not_run(run_agent, workspace):
    with FlakyServer([working] * 5) as server:
        done = run_agent("--yes", "--max-turns", "3", "work", server=server)
    assert (done.returncode, len(server.requests)) == (53, 4)
    assert (workspace / "steps.txt").read_text() == "0\n1\n2\n"
    with FlakyServer(["rested"]) as server:
        assert run_agent("--yes", "--resume", "go on", server=server).stdout == "rested\n"
    assert server.requests[0].problems == []


def test_a_call_that_is_repeated_gets_a_note_and_then_ends_the_turn(run_agent, workspace):
    (workspace / "a.txt").write_text("alpha\n")
    with FlakyServer([call("read_file", path="a.txt")] * 9) as server:
        done = run_agent("hi", server=server)
    first, second, third, fourth = results(server.requests[4])[:4]
    assert (done.returncode, len(server.requests), first) == (1, 5, second)
    assert third.startswith(first) and len(third) > len(first)
    assert "--resume" in last_line(done.stderr)


def test_a_repeated_call_with_new_results_is_no_loop(run_agent, workspace):
    step = call("bash", command="echo x >> n.txt; wc -l < n.txt")
    with FlakyServer([step] * 7 + ["seven"]) as server:
        done = run_agent("--yes", "hi", server=server)
    assert (done.returncode, done.stdout, (workspace / "n.txt").read_text()) == (
        0,
        "seven\n",
        "x\n" * 7,
    )


def test_an_empty_reply_is_asked_again_once(run_agent):
    with FlakyServer([{"fault": "empty_reply"}, "something"]) as server:
        done = run_agent("hi", server=server)
    assert (done.returncode, done.stdout, len(server.requests)) == (0, "something\n", 2)


def test_two_empty_replies_end_the_turn(run_agent):
    with FlakyServer([{"fault": "empty_reply"}] * 2 + ["never"]) as server:
        done = run_agent("hi", server=server)
    assert (done.returncode, done.stdout, len(server.requests)) == (1, "", 2)
    assert "--resume" in last_line(done.stderr)


# -- sessions ------------------------------------------------------------------------------------


def test_a_session_file_has_the_shape_that_was_promised(run_agent, workspace):
    (workspace / "a.txt").write_text("alpha\n")
    (workspace / ".gitignore").write_text("mine\n")
    with FlakyServer([call("read_file", path="a.txt"), "It says alpha."]) as server:
        run_agent("what is in a.txt?", server=server)
    [path] = session_files(workspace)
    body = json.loads(path.read_text())
    keys = {
        "version",
        "id",
        "created",
        "updated",
        "root",
        "model",
        "base_url",
        "title",
        "usage",
        "files",
        "messages",
    }
    assert (keys <= set(body), body["version"], body["id"]) == (True, 1, path.stem)
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", path.stem)
    assert (body["root"], body["model"], body["base_url"]) == (
        str(workspace),
        "flaky-1",
        server.url,
    )
    assert body["files"] == {"a.txt": hashlib.sha256(b"alpha\n").hexdigest()}
    assert isinstance(body["usage"], dict) and body["title"].startswith("what is in a.txt?")
    public = [{key: value for key, value in m.items() if key != "_"} for m in body["messages"]]
    assert public[:-1] == server.requests[1]["messages"]
    assert (public[-1]["role"], public[-1]["content"]) == ("assistant", "It says alpha.")
    lines = [line.rstrip(",") for line in path.read_text().splitlines() if '"role"' in line]
    assert [json.loads(line) for line in lines] == body["messages"]
    assert (workspace / ".gitignore").read_text() == "mine\n"


def test_session_files_are_for_the_user_alone(run_agent, workspace):
    with FlakyServer(["ok"]) as server:
        run_agent("hi", server=server)
    home = workspace / ".agent"
    modes = {
        str(p.relative_to(home)): stat.S_IMODE(p.stat().st_mode) for p in [home, *home.rglob("*")]
    }
    folders = {name for name in modes if (home / name).is_dir()}
    assert {
        name: oct(mode)
        for name, mode in modes.items()
        if mode != (0o700 if name in folders else 0o600)
    } == {}
    assert (home / ".gitignore").read_text().strip() == "*"


IDENT = "{id}"


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--resume", "go on"], id="--resume"),
        pytest.param(["--continue", "go on"], id="--continue"),
        pytest.param(["-c", "go", "on"], id="-c"),
        pytest.param(["-r", NEWER, "go on"], id="-r ID"),
        pytest.param(["--resume", NEWER, "go", "on"], id="--resume ID"),
        pytest.param([f"--resume={NEWER}", "go on"], id="--resume=ID"),
        pytest.param(["-r", NEWER[:8], "go on"], id="eight digits"),
        pytest.param([f"--resume={NEWER[:13]}", "go on"], id="prefix"),
    ],
)
def test_a_session_is_resumed(run_agent, workspace, words):
    put_session(workspace, OLDER, talk("older?", "older."))
    path = put_session(workspace, NEWER, talk("newer?", "newer."))
    with FlakyServer(["going on"]) as server:
        done = run_agent(*words, server=server)
    sent = [message["content"] for message in server.requests[0]["messages"][1:]]
    assert (done.returncode, done.stdout) == (0, "going on\n")
    assert sent[:2] == ["newer?", "newer."] and sent[2].startswith("go on") and len(sent) == 3
    assert json.loads(path.read_text())["messages"][-1]["content"] == "going on"
    assert [path.stem for path in session_files(workspace)] == [OLDER, NEWER]


def test_a_prompt_behind_resume_is_no_id(run_agent, workspace):
    path = put_session(workspace, OLDER, talk("first?", "first."))
    with FlakyServer(["nothing"]) as server:
        done = run_agent("--yes", "--resume", "what did you do?", server=server)
    assert (done.returncode, done.stdout, session_files(workspace)) == (0, "nothing\n", [path])
    assert prompts(server.requests[0])[-1].startswith("what did you do?")


def test_the_second_run_goes_on_where_the_first_one_stopped(run_agent, workspace):
    with FlakyServer([call("bash", command="echo x >> n.txt"), "first", "second"]) as server:
        run_agent("--yes", "one", server=server)
        done = run_agent("--yes", "--resume", "two", server=server)
    assert (done.returncode, done.stdout, (workspace / "n.txt").read_text()) == (
        0,
        "second\n",
        "x\n",
    )
    expected = ["system", "user", "assistant", "tool", "assistant", "user"]
    assert (roles(server.requests[2]), len(session_files(workspace))) == (expected, 1)


def test_the_session_as_it_was_before_the_last_turn_is_kept_beside_it(run_agent, workspace):
    with FlakyServer(["first", "second"]) as server:
        run_agent("one", server=server)
        before = the_session(workspace)["messages"]
        run_agent("--resume", "two", server=server)
    [path] = session_files(workspace)
    assert json.loads(path.with_suffix(".bak").read_text())["messages"] == before


def test_the_whole_output_of_a_command_is_kept_and_can_be_read(run_agent, workspace):
    def read(request: dict) -> dict:
        path = re.search(r"\.agent/output/\S+?\.txt", results(request)[0])[0]
        return call("read_file", path=path, start=9000, end=9001)

    with FlakyServer([call("bash", command="seq 1 20000; exit 7"), read, "ok"]) as server:
        done = run_agent("--yes", "count", server=server)
    clipped, page = results(server.requests[2])
    assert (done.returncode, len(clipped) <= 20_000) == (0, True)
    assert clipped.startswith("1\n2\n") and re.search(r"\n20000\n.*\b7\b\W*$", clipped)
    assert "9000: 9000\n9001: 9001" in page


def test_finished_results_survive_a_server_that_goes_away(run_agent, workspace):
    script = [
        call("bash", command="echo x >> n.txt"),
        refusal(500, "gone", headers=AT_ONCE, times=5),
        "back",
    ]
    with FlakyServer(script) as server:
        first = run_agent("--yes", "one", server=server)
        done = run_agent("--yes", "--resume", "go on", server=server)
    assert (first.returncode, done.returncode, done.stdout) == (75, 0, "back\n")
    assert results(server.requests[-1]) == results(server.requests[1])
    assert (workspace / "n.txt").read_text() == "x\n"


@pytest.mark.parametrize(
    "wanted, named",
    [
        pytest.param("20991231", "20991231", id="none"),
        pytest.param("2026010", "2026010", id="two"),
        pytest.param("nonsense", "nonsense", id="nonsense"),
    ],
)
def test_an_id_that_fits_none_or_two_is_an_error(run_agent, workspace, wanted, named):
    put_session(workspace, OLDER, talk("older?", "older."))
    put_session(workspace, NEWER, talk("newer?", "newer."))
    with FlakyServer(["never"]) as server:
        done = run_agent(f"--resume={wanted}", "go on", server=server)
    assert (done.returncode, done.stdout, server.requests) == (1, "", [])
    assert named in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_nothing_to_resume_is_a_notice_and_a_new_session(run_agent, workspace):
    with FlakyServer(["ok"]) as server:
        done = run_agent("--resume", "go on", server=server)
    assert (done.returncode, done.stdout, len(session_files(workspace))) == (0, "ok\n", 1)
    assert prompts(server.requests[0]) == ["go on"]
    assert "resume" in done.stderr.lower()


@pytest.mark.parametrize(
    "words", [["--resume"], ["--continue"], ["-r", OLDER]], ids=["resume", "continue", "id"]
)
def test_a_fork_leaves_the_old_session_alone(run_agent, workspace, words):
    old = put_session(workspace, OLDER, talk("first?", "first."))
    before = old.read_bytes()
    with FlakyServer(["another way"]) as server:
        done = run_agent(*words, "--fork", "go on", server=server)
    [new] = [path for path in session_files(workspace) if path != old]
    body = json.loads(new.read_text())
    assert (done.returncode, done.stdout, old.read_bytes()) == (0, "another way\n", before)
    assert (len(body["messages"]), body["id"], prompts(body)[0]) == (5, new.stem, "first?")


def as_bare_repository(folder: Path) -> None:
    """Make a folder a bare repository of its own, in which nothing is tracked."""
    for name in ("objects", "refs"):
        (folder / name).mkdir()
    (folder / "HEAD").write_text("ref: refs/heads/main\n")
    (folder / "config").write_text("[core]\n\tbare = false\n\tworktree = .\n")


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda folder: None, id="git tells"),
        pytest.param(lambda folder: (folder / ".git/index").write_bytes(b"x"), id="no index"),
        pytest.param(lambda folder: (folder / ".git/HEAD").write_bytes(b""), id="no head"),
        pytest.param(lambda folder: as_bare_repository(folder / ".agent"), id="a bare one inside"),
    ],
)
def test_a_session_that_may_have_come_with_the_repository_needs_a_human(
    run_agent, workspace, damage
):
    put_session(workspace, OLDER, talk("evil?", "evil."))
    for words in (["init", "-q"], ["add", "-f", ".agent"]):
        subprocess.run(["git", *words], cwd=workspace, check=True)
    damage(workspace)
    with FlakyServer(["hello"]) as server:
        done = run_agent("--yes", "--resume", "go on", server=server)
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert prompts(server.requests[0]) == ["go on"]
    assert OLDER in done.stderr and "human" in done.stderr


def test_sessions_are_listed_without_a_key(run_agent, workspace):
    put_session(workspace, OLDER, talk("paint it red", "done"))
    put_session(workspace, NEWER, talk("paint it blue", "done"))
    done = run_agent("--sessions", env={"AGENT_API_KEY": None})
    assert done.returncode == 0
    lines = {
        ident: line
        for line in done.stdout.splitlines()
        for ident in (OLDER, NEWER)
        if ident in line
    }
    assert "paint it red" in lines[OLDER] and "paint it blue" in lines[NEWER]
    assert "3" in lines[OLDER].replace(OLDER, "") or "2" in lines[OLDER].replace(OLDER, "")


def test_no_session_keeps_nothing_on_disk(run_agent, workspace):
    (workspace / "a.txt").write_text("alpha\n")
    with FlakyServer([call("read_file", path="a.txt"), "alpha"]) as server:
        done = run_agent("--no-session", "hi", server=server)
    assert (done.returncode, done.stdout, files_in(workspace)) == (0, "alpha\n", ["a.txt"])


def test_a_session_that_another_process_holds_is_not_taken(run_agent, start_agent, workspace):
    put_session(workspace, OLDER, talk("older?", "older."))
    with FlakyServer([{"text": "one two three", "hold_after": 1}]) as server:
        holder = start_agent("first", server=server)
        until(server.holding.is_set)
        [held] = [path.stem for path in session_files(workspace) if path.stem != OLDER]
        with FlakyServer(["not taken"]) as other:
            done = run_agent("--resume", "go on", server=other)
            by_name = run_agent(f"--resume={held}", "go on", server=other)
        server.release()
        assert (holder.wait(60), holder.stdout.read()) == (0, "one two three\n")
    assert (done.returncode, prompts(other.requests[0])) == (0, ["older?", "go on"])
    assert (by_name.returncode, len(other.requests)) == (1, 1)


def test_a_lone_session_that_is_held_leads_to_a_new_one(run_agent, start_agent, workspace):
    with FlakyServer([{"text": "one two three", "hold_after": 1}]) as server:
        holder = start_agent("first", server=server)
        until(server.holding.is_set)
        with FlakyServer(["new"]) as other:
            done = run_agent("--resume", "go on", server=other)
        server.release()
        assert holder.wait(60) == 0
    assert (done.returncode, prompts(other.requests[0]), len(session_files(workspace))) == (
        0,
        ["go on"],
        2,
    )


BROKEN = {
    "20990101-100000-dead": b'{"version": 1, "messages": [{"role": "us',
    "20990102-100000-dead": b"",
    "20990103-100000-dead": b'{"version": 99, "messages": []}',
    "20990104-100000-dead": b'{"version": 1, "messages": "none"}',
    "20990105-100000-dead": b"\xff\xfe\x00not text",
}


def test_broken_session_files_are_named_skipped_and_left_alone(run_agent, workspace):
    put_session(workspace, OLDER, talk("older?", "older."))
    paths = {
        workspace / ".agent/sessions" / f"{ident}.json": data for ident, data in BROKEN.items()
    }
    for path, data in paths.items():
        path.write_bytes(data)
    with FlakyServer(["ok"]) as server:
        done = run_agent("--resume", "go on", server=server)
    assert (done.returncode, prompts(server.requests[0])) == (0, ["older?", "go on"])
    assert [ident for ident in BROKEN if ident not in done.stderr] == []
    assert {path: path.read_bytes() for path in paths} == paths


@pytest.mark.parametrize("ident", BROKEN)
def test_a_broken_session_that_is_asked_for_is_one_line_and_left_alone(run_agent, workspace, ident):
    path = workspace / ".agent/sessions" / f"{ident}.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(BROKEN[ident])
    with FlakyServer(["never"]) as server:
        done = run_agent(f"--resume={ident}", "go on", server=server)
    assert (done.returncode, done.stdout, server.requests) == (1, "", [])
    assert ident in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert path.read_bytes() == BROKEN[ident]


def test_a_bare_list_of_messages_is_a_session_and_unknown_keys_are_kept(run_agent, workspace):
    path = put_session(workspace, OLDER, talk("older?", "older."), colour="green")
    bare = workspace / ".agent/sessions" / f"{NEWEST}.json"
    bare.write_text(json.dumps(talk("bare?", "bare.")))
    with FlakyServer(["ok", "ok"]) as server:
        run_agent(f"--resume={NEWEST}", "go on", server=server)
        run_agent(f"--resume={OLDER}", "go on", server=server)
    assert [prompts(request)[0] for request in server.requests] == ["bare?", "older?"]
    assert json.loads(path.read_text())["colour"] == "green"


def test_a_damaged_history_is_healed_before_it_is_sent(run_agent, workspace):
    calls = [{"id": "a", "type": "function", "function": {"name": "bash", "arguments": "{bad"}}]
    damage = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "content": ""},
    ]
    put_session(workspace, OLDER, talk("older?", "older\ud83d.") + damage)
    with FlakyServer(["ok"]) as server:
        done = run_agent("--resume", "go on", server=server)
    assert (done.returncode, done.stdout, server.requests[0].problems) == (0, "ok\n", [])
    assert len(results(server.requests[0])) == 1


def test_a_state_folder_that_a_command_removed_is_made_again(run_agent, workspace):
    script = [
        call("bash", command=f"cd .ag*; {REMOVE} $PWD; echo gone"),
        call("bash", command="seq 1 9000; echo on"),
        "first",
        "second",
    ]
    with FlakyServer(script) as server:
        done = run_agent("--yes", "one", server=server)
        again = run_agent("--resume", "two", server=server)
    folder = workspace / ".agent"
    assert (done.returncode, done.stdout, again.stdout) == (0, "first\n", "second\n")
    assert "can not" not in done.stderr + again.stderr
    said = [prompt.splitlines()[-1] for prompt in prompts(server.requests[3])]
    assert (said, len(results(server.requests[3]))) == (["one", "two"], 2)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "sessions")]
    assert (modes, (folder / ".gitignore").read_text()) == ([0o700, 0o700], "*\n")
    assert stat.S_IMODE(session_files(workspace)[0].stat().st_mode) == 0o600


def test_a_link_in_place_of_the_sessions_is_one_notice_and_not_written_through(
    run_agent, workspace, tmp_path
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (workspace / ".agent").mkdir(mode=0o700)
    (workspace / ".agent" / "sessions").symlink_to(elsewhere)
    with FlakyServer([call("bash", command="seq 1 9000"), "ok"]) as server:
        done = run_agent("--yes", "hi", server=server)
    notices = [line for line in done.stderr.splitlines() if ".agent" in line]
    assert (done.returncode, done.stdout, len(notices)) == (0, "ok\n", 1)
    assert "sessions" in notices[0] and "not kept" in notices[0]
    assert list(elsewhere.iterdir()) == []


# -- workspace and config ------------------------------------------------------------------------


def test_a_workspace_that_does_not_exist_is_one_line(run_agent):
    with FlakyServer(["never"]) as server:
        done = run_agent("-w", "no/such/place", "hi", server=server)
    assert (done.stdout, server.requests, done.returncode in (1, 2)) == ("", [], True)
    assert "no/such/place" in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("flag", ["-w", "-C", "--workspace"])
def test_the_workspace_may_be_another_folder(run_agent, workspace, flag):
    place = workspace / "inner"
    place.mkdir()
    with FlakyServer([call("bash", command="pwd > here.txt"), "ok"]) as server:
        done = run_agent(flag, "inner", "--yes", "hi", server=server)
    assert (done.returncode, (place / "here.txt").read_text()) == (0, f"{place}\n")
    assert (len(session_files(place)), session_files(workspace)) == (1, [])


def config(home: Path, text: str) -> Path:
    """Write the user's config file."""
    path = home / ".config" / "agent" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text, named",
    [
        pytest.param('modle = "x"', "modle", id="typo"),
        pytest.param('context = "big"', "context", id="wrong type"),
        pytest.param('allow = "bash ls"', "allow", id="not a list"),
        pytest.param("allow = [1]", "allow", id="wrong item"),
        pytest.param('mode = "turbo"', "mode", id="wrong value"),
        pytest.param("model = ", "config.toml", id="unreadable"),
    ],
)
def test_a_mistake_in_the_config_is_named_in_one_line(run_agent, home, text, named):
    config(home, text)
    with FlakyServer(["never"]) as server:
        done = run_agent("hi", server=server)
    assert (done.returncode, done.stdout, server.requests) == (2, "", [])
    assert named in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_the_config_is_weaker_than_the_environment_and_that_than_a_flag(run_agent, home):
    config(home, 'model = "from-config"')
    with FlakyServer(["1", "2", "3"]) as server:
        run_agent("hi", server=server, env={"AGENT_MODEL": None})
        run_agent("hi", server=server, env={"AGENT_MODEL": "from-environment"})
        run_agent("hi", "-m", "from-flag", server=server, env={"AGENT_MODEL": "from-environment"})
    models = [request["model"] for request in server.requests]
    assert models == ["from-config", "from-environment", "from-flag"]


def test_xdg_config_home_is_where_the_config_is(run_agent, tmp_path):
    config(tmp_path / "elsewhere", 'model = "from-xdg"')
    env = {"AGENT_MODEL": None, "XDG_CONFIG_HOME": str(tmp_path / "elsewhere/.config")}
    with FlakyServer(["ok"]) as server:
        run_agent("hi", server=server, env=env)
    assert server.requests[0]["model"] == "from-xdg"


def test_where_nothing_can_be_saved_one_notice_is_given_and_the_work_goes_on(run_agent, workspace):
    (workspace / ".agent").write_text(
        "I am a file.\n"
    )  # Stands for a read-only disk: works for root too.
    (workspace / "a.txt").write_text("alpha\n")
    script = [
        call("bash", command="echo x >> n.txt"),
        call("read_file", path="a.txt"),
        "It says alpha.",
    ]
    with FlakyServer(script) as server:
        done = run_agent("--yes", "hi", server=server)
    notices = [line for line in done.stderr.splitlines() if ".agent" in line]
    assert (done.returncode, done.stdout, len(notices)) == (0, "It says alpha.\n", 1)
    assert (workspace / ".agent").read_text() == "I am a file.\n"


def test_a_read_only_disk_is_one_notice(run_agent, workspace):
    """Also an existing state folder can not be used there; root, too, is stopped by the mount."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        pytest.skip("bubblewrap is missing: no read-only mount for this test")
    put_session(workspace, OLDER, talk("old", "yes"))
    before = files_in(workspace)
    mount = [bwrap, "--dev-bind", "/", "/", "--ro-bind", str(workspace), str(workspace)]
    with FlakyServer([call("write_file", path="a.txt", content="x"), "ok"]) as server:
        done = run_agent("--yes", "hi", server=server, under=mount)
    assert (done.returncode, done.stdout, files_in(workspace)) == (0, "ok\n", before)
    assert "Read-only file system" in results(server.requests[1])[0]
    assert len([line for line in done.stderr.splitlines() if ".agent" in line]) == 1


def test_a_full_disk_with_a_state_folder_is_one_notice_and_the_work_goes_on(run_agent, workspace):
    """The limit for files stands for the full disk: no byte can be written to any."""
    put_session(workspace, OLDER, talk("old", "yes"))
    (workspace / ".agent" / ".gitignore").write_text("*\n")
    limit = ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash"]
    step = batch(
        call("write_file", path="a.txt", content="x"), call("bash", command="seq 1 9000 | tail -1")
    )
    with FlakyServer([step, "ok"]) as server:
        done = run_agent("--yes", "hi", server=server, under=limit)
    written, printed = results(server.requests[1])
    assert (done.returncode, done.stdout, printed) == (0, "ok\n", "9000\n[exit code 0]")
    assert (written, (workspace / "a.txt").exists()) == ("error: a.txt: File too large", False)
    assert len([line for line in done.stderr.splitlines() if ".agent" in line]) == 1
    assert [path.stem for path in session_files(workspace)] == [OLDER]


@pytest.mark.parametrize(
    ("choice", "code", "answer"),
    [("on", 1, ""), ("auto", 0, "ok\n"), ("off", 0, "ok\n")],
)
def test_where_the_sandbox_does_not_work_only_on_refuses_to_start(run_agent, choice, code, answer):
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        pytest.skip("bubblewrap is not installed")
    nested = [bwrap, "--dev-bind", "/", "/", "--unshare-user", "--disable-userns"]
    with FlakyServer([call("bash", command="echo x"), "ok"]) as server:
        done = run_agent("--yes", "--sandbox", choice, "hi", server=server, under=nested)
    lines = [line for line in done.stderr.splitlines() if "sandbox" in line]
    assert (done.returncode, done.stdout, len(lines)) == (code, answer, int(choice != "off"))


# -- JSON ----------------------------------------------------------------------------------------


def test_json_is_one_result_object(run_agent, workspace):
    with FlakyServer(["hello"]) as server:
        done = run_agent("--output-format", "json", "hi", server=server)
    result = json.loads(done.stdout)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1)
    fields = {
        key: result[key]
        for key in ("type", "status", "exit_code", "text", "session_id", "turns", "denied")
    }
    assert fields == {
        "type": "result",
        "status": "done",
        "exit_code": 0,
        "text": "hello",
        "session_id": session_files(workspace)[0].stem,
        "turns": 1,
        "denied": [],
    }
    assert isinstance(result["usage"], dict) and result["ms"] >= 0 and "ts" in result


def test_json_lists_what_was_denied(run_agent):
    with FlakyServer([call("bash", command="touch a.txt"), "could not"]) as server:
        done = run_agent("--output-format", "json", "hi", server=server)
    result = json.loads(done.stdout)
    [denied] = result["denied"]
    assert (done.returncode, result["status"], result["exit_code"]) == (77, "needs_permission", 77)
    assert (denied["name"], denied["arguments"]) == ("bash", {"command": "touch a.txt"})
    assert {"reason", "rule"} <= set(denied)


@pytest.mark.parametrize(
    "script, status, code",
    [
        pytest.param([refusal(401, "no")], "error", 41, id="key"),
        pytest.param([refusal(404, "no")], "error", 1, id="error"),
        pytest.param([working, "report"], "limit", 53, id="limit"),
    ],
)
def test_json_is_printed_on_failure_too(run_agent, script, status, code):
    with FlakyServer(script) as server:
        done = run_agent("--json", "--yes", "--max-turns", "1", "hi", server=server)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    result = events[-1]
    assert (events[0]["type"], result["type"], done.returncode) == ("init", "result", code)
    assert (result["status"], result["exit_code"]) == (status, code)


def test_stream_json_is_one_event_a_line(run_agent, workspace):
    (workspace / "a.txt").write_text("alpha\n")
    script = [
        call("read_file", path="a.txt"),
        call("bash", command="echo out"),
        "It says alpha, really.",
    ]
    with FlakyServer(script) as server:
        done = run_agent("--output-format", "stream-json", "--yes", "hi", server=server)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, [event for event in events if "ts" not in event]) == (0, [])
    fields = {"session_id", "model", "base_url", "root", "mode", "sandbox", "version"}
    assert (events[0]["type"], fields <= set(events[0])) == ("init", True)
    assert (events[0]["model"], events[0]["root"], events[0]["mode"]) == (
        "flaky-1",
        str(workspace),
        "auto",
    )
    assert "".join(e["text"] for e in events if e["type"] == "text") == "It says alpha, really."
    used = [(e["id"], e["name"], e["arguments"]) for e in events if e["type"] == "tool_use"]
    assert [entry[1:] for entry in used] == [
        ("read_file", {"path": "a.txt"}),
        ("bash", {"command": "echo out"}),
    ]
    back = [e for e in events if e["type"] == "tool_result"]
    assert [(e["id"], e["name"], e["status"]) for e in back] == [(i, n, "ok") for i, n, _ in used]
    assert [e["content"] for e in back] == results(server.requests[2])
    assert {"decision", "rule", "ms"} <= set(back[0])
    shown = [(e["id"], e["text"]) for e in events if e["type"] == "tool_output"]
    assert shown == [(used[1][0], "out\n")]
    assert (events[-1]["type"], events[-1]["turns"]) == ("result", 3)
    assert len([e for e in events if e["type"] == "usage"]) == 3


@pytest.mark.parametrize(
    "words, code",
    [
        pytest.param(["--frobnicate", "hi"], 2, id="unknown flag"),
        pytest.param(["--output-format=json", "--mode=turbo", "hi"], 2, id="only the result"),
        pytest.param(["--allow", "nonsense", "hi"], 2, id="rule, and no key"),
        pytest.param(["--tools", "nosuch", "hi"], 2, id="tool, and no key"),
        pytest.param(["--sessions"], 2, id="no run"),
        pytest.param(["hi"], 41, id="no key"),
    ],
)
def test_what_ends_before_the_run_is_told_in_json_too(run_agent, words, code):
    done = run_agent("--json", *words, env={"AGENT_API_KEY": None})
    told = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = ["result"] if "--output-format=json" in words else ["init", "result"]
    assert (done.returncode, [event["type"] for event in told]) == (code, kinds)
    assert (told[-1]["exit_code"], told[-1]["status"], told[-1]["turns"]) == (code, "error", 0)
    assert told[0].get("mode", "ask") == "ask" and "cost_usd" in told[-1]["usage"]


def test_json_is_utf8_whatever_the_terminal_takes(start_agent):
    with FlakyServer(["snow \u2603"]) as server:
        agent = start_agent("--json", "hi", server=server, env={"PYTHONIOENCODING": "ascii"})
        out, _ = agent.communicate(timeout=60)
    assert json.loads(out.splitlines()[-1])["text"] == "snow \u2603"


def test_live_output_has_the_id_of_its_call(run_agent):
    odd = call("bash", command="echo out") | {"id": "functions.bash:0"}
    with FlakyServer([odd, "ok"]) as server:
        done = run_agent("--json", "--yes", "hi", server=server)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert {e["id"] for e in told if e["type"].startswith("tool_")} == {"functions.bash:0"}


def test_behind_the_result_nothing_comes_and_a_signal_cuts_no_line():
    out, signals = io.StringIO(), Signals()
    events = JsonScreen(out, Screen(out, io.StringIO()), signals, only_result=False)
    events.emit("init", session_id="x")
    signals.waiting.append(130)  # as if it came amid the line
    with pytest.raises(Stop):
        events.emit("result", exit_code=0)
    events.emit("notice", level="info", text="late")
    kinds = [json.loads(line)["type"] for line in out.getvalue().splitlines()]
    assert (kinds, events.exit_code) == (["init", "result"], 0)


@pytest.mark.long
def test_json_is_short_for_stream_json(run_agent):
    shapes = []
    for flags in (["--json"], ["--output-format", "stream-json"]):
        with FlakyServer(["one two three"]) as server:
            done = run_agent(*flags, "hi", server=server)
        shapes.append([(e["type"], sorted(e)) for e in map(json.loads, done.stdout.splitlines())])
    assert shapes[0] == shapes[1]


# -- signals and closed pipes --------------------------------------------------------------------

SIGNALS = [
    pytest.param(signal.SIGINT, 130, id="SIGINT"),
    pytest.param(signal.SIGTERM, 143, id="SIGTERM"),
    pytest.param(signal.SIGHUP, 129, id="SIGHUP"),
]


@pytest.mark.parametrize("number, code", SIGNALS)
def test_a_signal_while_the_model_streams_leaves_a_valid_session(
    run_agent, start_agent, workspace, number, code
):
    with FlakyServer([{"text": "one two three four five six", "hold_after": 3}, "back"]) as server:
        agent = start_agent("--json", "count", server=server)
        until(lambda: '"one ' in agent.stdout.readline())
        agent.send_signal(number)
        _, err = agent.communicate(timeout=60)
        done = run_agent("--resume", "go on", server=server)
    assert (agent.returncode, "Traceback" in err, done.stdout) == (code, False, "back\n")
    said = [m["content"] for m in server.requests[1]["messages"] if m["role"] == "assistant"]
    assert [
        text for text in said if not (text.startswith("one") and text.endswith("[cut by the user]"))
    ] == []
    assert said or number != signal.SIGINT
    assert len(session_files(workspace)) == 1


@pytest.mark.parametrize("number, code", SIGNALS)
def test_a_signal_while_a_command_runs_ends_its_whole_group(
    run_agent, start_agent, workspace, number, code
):
    step = batch(
        call("bash", command=f"echo begun; sleep {NAP} & (sleep {NAP} & sleep {NAP}); echo never"),
        call("bash", command="touch second.txt"),
    )
    with FlakyServer([step, "back"]) as server:
        agent = start_agent("--yes", "run it", server=server)
        until(lambda: len(alive(NAP)) >= 3)
        agent.send_signal(number)
        _, err = agent.communicate(timeout=60)
        until(lambda: not alive(NAP), 30)
        done = run_agent("--yes", "--resume", "go on", server=server)
    first, second = results(server.requests[1])
    assert (agent.returncode, "Traceback" in err, done.stdout) == (code, False, "back\n")
    assert "begun" in first and "not run" not in first
    assert (second, (workspace / "second.txt").exists()) == (
        "cancelled by the user before it ran",
        False,
    )


STUBBORN = f"trap 'touch asked' TERM; trap '' INT HUP; echo begun; while :; do sleep {NAP}; done"


@pytest.mark.parametrize("number, code", SIGNALS[:2])
def test_a_second_signal_while_a_stubborn_command_ends_loses_nothing_it_printed(
    run_agent, start_agent, workspace, number, code
):
    step = batch(call("bash", command=STUBBORN), call("bash", command="touch second.txt"))
    with FlakyServer([step, "back"]) as server:
        agent = start_agent("--yes", "run it", server=server)
        until(lambda: alive(f"sleep\0{NAP}"))
        agent.send_signal(number)
        until((workspace / "asked").exists)
        agent.send_signal(number)
        _, err = agent.communicate(timeout=60)
        left = alive(NAP)
        done = run_agent("--yes", "--resume", "go on", server=server)
    first, second = results(server.requests[1])
    assert (agent.returncode, "Traceback" in err, left, done.stdout) == (code, False, [], "back\n")
    ends = first.splitlines()[0], first.splitlines()[-1]
    assert ends == ("begun", "[interrupted by the user; it may have had effects]")
    assert second == "cancelled by the user before it ran"
    assert not (workspace / "second.txt").exists()


def test_an_interrupt_during_a_retry_wait_ends_the_wait(start_agent):
    with FlakyServer([refusal(429, "later", headers={"Retry-After": "30"})]) as server:
        agent = start_agent("hi", server=server)
        until(lambda: agent.stderr.readline())  # The announcement: from here on it waits.
        agent.send_signal(signal.SIGINT)
        _, err = agent.communicate(timeout=60)
    assert (agent.returncode, "Traceback" in err, len(server.requests)) == (130, False, 1)


def test_an_interrupt_is_a_cancelled_result_in_json(start_agent):
    with FlakyServer([{"text": "one two three", "hold_after": 1}]) as server:
        agent = start_agent("--json", "hi", server=server)
        until(server.holding.is_set)
        agent.send_signal(signal.SIGINT)
        out, _ = agent.communicate(timeout=60)
    result = json.loads(out.splitlines()[-1])
    assert (agent.returncode, result["type"], result["status"], result["exit_code"]) == (
        130,
        "result",
        "cancelled",
        130,
    )


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_a_closed_stdout_is_no_traceback(start_agent, flags):
    with FlakyServer(["x" * 200_000]) as server:
        agent = start_agent(*flags, "hi", server=server)
        agent.stdout.close()
        err = agent.stderr.read()
        agent.wait(60)
    assert ("Traceback" in err, "Exception ignored" in err) == (False, False)


def test_a_reader_that_takes_one_byte_is_no_traceback(start_agent, tmp_path):
    with FlakyServer(["x" * 200_000]) as server:
        agent = start_agent("hi", server=server)
        assert agent.stdout.read(1) == "x"
        agent.stdout.close()
        err = agent.stderr.read()
        agent.wait(60)
    assert ("Traceback" in err, "Exception ignored" in err) == (False, False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "flags",
    [["hi"], ["--json", "hi"], ["--output-format", "json", "hi"], ["--sessions"]],
    ids=["text", "stream-json", "json", "sessions"],
)
def test_output_that_can_not_be_written_is_an_error_in_one_line(start_agent, workspace, flags):
    """Behind it only the way back."""
    put_session(workspace, OLDER, talk("old", "yes"))
    with FlakyServer(["ok"]) as server, Path("/dev/full").open("w") as full:
        agent = start_agent(*flags, server=server, stdout=full)
        _, err = agent.communicate(timeout=60)
    first, *rest = err.splitlines()
    assert (agent.returncode, "No space left on device" in first) == (1, True)
    assert [line[: line.find(" 2")] for line in rest] == (
        [] if flags == ["--sessions"] else ["agent: to go on: agent --resume"]
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_an_answer_that_came_out_whole_is_no_error_where_stderr_is_full(start_agent):
    with FlakyServer(["ok"]) as server, Path("/dev/full").open("w") as full:
        agent = start_agent("hi", server=server, stderr=full)
        out, _ = agent.communicate(timeout=60)
    assert (agent.returncode, out) == (0, "ok\n")


@pytest.mark.parametrize("prefix", ["", "setsid", "nohup"])
def test_a_background_job_ends_with_the_agent(run_agent, workspace, prefix):
    command = f"{prefix} sleep {NAP} > /dev/null 2>&1 & echo started"
    with FlakyServer([call("bash", command=command), "ok"]) as server:
        done = run_agent("--yes", "hi", server=server)
    assert (done.returncode, "started" in results(server.requests[1])[0]) == (0, True)
    until(lambda: not alive(NAP), 30)
    assert inside(workspace) == []


# -- what works with nothing there ---------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_version_and_help_do_not_import_requests(run_agent, tmp_path, flag):
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "requests.py").write_text("raise ImportError('imported')\n")
    env = {"PYTHONPATH": f"{trap}{os.pathsep}{ROOT}", "AGENT_API_KEY": None}
    done = run_agent(flag, env=env)
    assert done.returncode == 0
    assert re.search(r"\d+\.\d+" if flag == "--version" else r"--resume", done.stdout)


def test_help_names_no_flag_that_is_not_there(run_agent):
    help_text = run_agent("--help", env={"AGENT_API_KEY": None}).stdout
    flags = {
        "--resume",
        "--continue",
        "--fork",
        "--no-session",
        "--sessions",
        "--yes",
        "--mode",
        "--allow",
        "--deny",
    }
    flags |= {
        "--max-turns",
        "--workspace",
        "--print",
        "--output-format",
        "--json",
        "--bare",
        "--demo",
        "--version",
    }
    flags |= {"--model", "--provider", "--base-url"}
    assert {flag for flag in flags if flag not in help_text} == set()


def test_a_missing_requests_is_one_line(run_agent, tmp_path):
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "requests.py").write_text("raise ModuleNotFoundError('no requests here')\n")
    with FlakyServer(["never"]) as server:
        done = run_agent("hi", server=server, env={"PYTHONPATH": f"{trap}{os.pathsep}{ROOT}"})
    assert (done.returncode != 0, done.stdout, "requests" in done.stderr) == (True, "", True)


def test_the_demo_works_and_leaves_nothing_behind(run_agent, workspace, home, scratch):
    env = {"AGENT_API_KEY": None, "AGENT_MODEL": None, "TMPDIR": str(scratch)}
    done = run_agent("--demo", env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (files_in(scratch), files_in(workspace), files_in(home)) == ([], [], [])
    assert list(scratch.iterdir()) == []


@pytest.mark.long
def test_the_demo_keeps_its_folder_when_asked(run_agent, scratch):
    done = run_agent("--demo", "--keep", env={"AGENT_API_KEY": None, "TMPDIR": str(scratch)})
    kept = [path for path in scratch.iterdir() if path.is_dir()]
    assert (done.returncode, len(kept)) == (0, 1)
    assert str(kept[0]) in done.stdout + done.stderr


def test_importing_the_agent_does_nothing(tmp_path, environment):
    code = "import sys, agent; print('requests' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


MAIN_JOB_TEST = """
import unittest

from agent import clip


class Clip(unittest.TestCase):
    def test_a_long_text_keeps_its_end(self):
        text = clip("x" * 99_000 + "THE END")
        self.assertTrue(text.endswith("THE END") and len(text) <= 20_000)
"""
GOOD_CLIP, BAD_CLIP = "{text[len(text) - (room - front) :]}", "{text[front:room]}"


def last_result(request) -> str:
    return request["messages"][-1]["content"]


def read_where_grep_found_it(request) -> dict:
    line = int(last_result(request).split(":")[1])
    return call("read_file", path="agent.py", start=line, end=line + 12)


def edit_what_was_read(request) -> dict:
    row = next(row for row in last_result(request).splitlines() if BAD_CLIP in row)
    old = row.partition(": ")[2]
    return call("edit_file", path="agent.py", old=old, new=old.replace(BAD_CLIP, GOOD_CLIP))


def test_the_agent_greps_reads_edits_and_tests_a_copy_of_itself(run_agent, workspace):
    source = (ROOT / "agent.py").read_text()
    assert source.count(GOOD_CLIP) == 1
    (workspace / "agent.py").write_text(source.replace(GOOD_CLIP, BAD_CLIP))
    (workspace / "test_clip.py").write_text(MAIN_JOB_TEST)
    test = call("bash", command=f"{sys.executable} -B -m unittest -q test_clip")
    script = [
        test,
        call("grep", regex=r"^def clip\(", pattern="*.py"),
        read_where_grep_found_it,
        edit_what_was_read,
        test,
        "Fixed.",
    ]
    with FlakyServer(script) as server:
        done = run_agent("--yes", "fix the failing test", server=server)
    results = [m["content"] for m in server.requests[-1]["messages"] if m["role"] == "tool"]
    assert (done.returncode, done.stdout, len(results)) == (0, "Fixed.\n", 5)
    assert [results[n].splitlines()[-1] for n in (0, 4)] == ["[exit code 1]", "[exit code 0]"]
    assert (workspace / "agent.py").read_text() == source
    assert [request.problems for request in server.requests] == [[]] * 6
