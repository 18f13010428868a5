"""Providers: their table, changing between its rows, servers on this machine, their windows."""

import http.server
import json
import signal
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from conftest import KEY, put_session, session_files, talk, until

from agent import (
    KEY_NAMES,
    LOCAL_PROVIDERS,
    PROVIDERS,
    Client,
    ProviderError,
    Settings,
    Transcript,
    UsageError,
    build_agent,
    connection_reason,
    find_local_server,
    model_ids,
    network_error,
    problems,
    redirect_text,
    root_hint,
)
from flaky_server import FlakyServer

PORTS = {"ollama": 11434, "lmstudio": 1234, "llamacpp": 8080, "vllm": 8000}
HOSTED = sorted(set(PROVIDERS) - set(PORTS))
CANARY = "sk-canary-0123456789abcdef"
OLD = "20260101-100000-aaaa"
NO_ENDPOINT = {"AGENT_BASE_URL": None, "AGENT_API_KEY": None, "AGENT_MODEL": None}


class Routes:
    """A server of fixed answers: path -> (status, value), or a value; the rest is 404.

    `asked` holds (method, path, body) of each request.
    """

    def __init__(self, answers: dict[str, Any], port: int = 0) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        asked = self.asked

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                asked.append((self.command, self.path, json.loads(self.rfile.read(size) or "null")))
                found = answers.get(self.path, (404, {"error": {"message": "not found"}}))
                status, value = found if isinstance(found, tuple) else (200, found)
                raw = (value if isinstance(value, str) else json.dumps(value)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            do_GET = do_POST = answer

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def __enter__(self) -> "Routes":
        threading.Thread(target=self.http.serve_forever, args=(0.005,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.http.shutdown()
        self.http.server_close()


def listing(*ids: str, **fields: object) -> dict[str, Any]:
    """What /v1/models answers; the fields go to the first model."""
    rows = [{"id": name, "object": "model"} for name in ids]
    return {"object": "list", "data": [rows[0] | fields, *rows[1:]]}


def ask(screen, text: str) -> None:
    """Type a line at the prompt."""
    screen.prompt()
    screen.send(text + "\r")


def leave(screen) -> None:
    """Leave at the prompt."""
    ask(screen, "exit")
    assert screen.wait() == 0


@pytest.fixture
def free_ports() -> None:
    """Skip where a real server, or another test run, has one of the ports of the local rows."""
    for port in PORTS.values():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                pytest.skip(f"port {port} of this machine is in use")


# -- the table -----------------------------------------------------------------------------------


def test_the_table_has_the_rows_that_were_promised():
    promised = "openai openrouter groq nvidia deepseek mistral gemini together xai"
    assert set(promised.split()) | set(PORTS) <= set(PROVIDERS)
    assert set(LOCAL_PROVIDERS) == set(PORTS)
    urls = [row.base_url for row in PROVIDERS.values()]
    assert len(set(urls)) == len(urls)


@pytest.mark.parametrize("name", HOSTED)
def test_a_hosted_row_has_a_secure_address_a_key_variable_and_a_model(name):
    row = PROVIDERS[name]
    address = urlsplit(row.base_url)
    assert (address.scheme, address.port, row.base_url.endswith("/")) == ("https", None, False)
    assert row.key_name == f"{name.upper()}_API_KEY" and row.key_name in KEY_NAMES
    assert row.model != ""


@pytest.mark.parametrize("name, port", PORTS.items())
def test_a_local_row_is_on_loopback_and_needs_no_key(name, port):
    row = PROVIDERS[name]
    assert row.base_url == f"http://127.0.0.1:{port}/v1"
    assert (row.key_name, row.model) == ("", "")


class Proxy(socketserver.ThreadingTCPServer):
    """A proxy that notes where it should connect to, and refuses."""

    daemon_threads = True

    def __init__(self) -> None:
        self.wanted: list[str] = []
        super().__init__(("127.0.0.1", 0), ProxyHandler)

    @property
    def url(self) -> str:
        """For HTTPS_PROXY."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class ProxyHandler(socketserver.StreamRequestHandler):
    """One request to the proxy."""

    def handle(self) -> None:
        self.server.wanted.append(self.rfile.readline().decode())
        self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A proxy through which nothing leaves this machine."""
    with Proxy() as made:
        threading.Thread(target=made.serve_forever, args=(0.005,), daemon=True).start()
        yield made
        made.shutdown()


@pytest.mark.parametrize("name", HOSTED)
def test_the_flag_decides_the_host_and_the_key_variable_of_the_row_is_enough(
    start_agent, proxy, name
):
    env = NO_ENDPOINT | {"HTTPS_PROXY": proxy.url, PROVIDERS[name].key_name: CANARY}
    agent = start_agent("--provider", name, "hi", env=env)
    until(lambda: proxy.wanted)
    agent.send_signal(signal.SIGINT)
    out, err = agent.communicate(timeout=60)
    host = urlsplit(PROVIDERS[name].base_url).hostname
    assert proxy.wanted[0].startswith(f"CONNECT {host}:443 ")
    assert (agent.returncode, out, CANARY in err) == (130, "", False)


@pytest.mark.parametrize("name", HOSTED)
def test_a_hosted_row_without_a_key_names_its_variable(run_agent, name):
    done = run_agent("--provider", name, "hi", env=NO_ENDPOINT)
    assert (done.returncode, done.stdout) == (41, "")
    assert PROVIDERS[name].key_name in done.stderr


def test_a_key_in_the_env_file_of_the_user_is_used(run_agent, home):
    (home / ".config/agent").mkdir(parents=True)
    (home / ".config/agent/env").write_text(f"# keys\nexport OPENAI_API_KEY='{CANARY}'\n")
    with FlakyServer(["ok"], key=CANARY) as server:
        done = run_agent("hi", server=server, env={"AGENT_API_KEY": None})
    assert (done.returncode, done.stdout) == (0, "ok\n")


def test_the_model_that_answered_is_kept_with_the_reply(run_agent, workspace):
    with FlakyServer([{"text": "ok", "model": "served-7b"}]) as server:
        done = run_agent("--json", "hi", server=server)
    [path] = session_files(workspace)
    reply = json.loads(path.read_text())["messages"][-1]
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert "served-7b" in reply["_"].values() and "flaky-1" in reply["_"].values()
    assert [e["model"] for e in events if e["type"] == "usage"] == ["served-7b"]


# -- this machine --------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_proxy_stands_between_the_agent_and_this_machine(run_agent, variable, host):
    with FlakyServer(["ok"]) as server:
        url = server.url.replace("127.0.0.1", host)
        env = {variable: "http://127.0.0.1:9", "AGENT_BASE_URL": url, "AGENT_MODEL": None}
        done = run_agent("hi", server=server, env=env)
    assert (done.returncode, done.stdout) == (0, "ok\n")


@pytest.mark.parametrize("name, port", PORTS.items())
def test_a_server_on_a_known_port_is_found(free_ports, name, port):
    with FlakyServer([], port=port):
        assert find_local_server(30.0) == name


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param("<html>It works!</html>", id="a web page"),
        pytest.param({"hello": "world"}, id="other JSON"),
        pytest.param({"data": {"id": "x"}}, id="no list"),
        pytest.param({"data": [{"name": "x"}]}, id="no ids"),
        pytest.param({"data": ["x"]}, id="no objects"),
        pytest.param({"data": []}, id="no models"),
        pytest.param([], id="a list"),
        pytest.param((500, listing("x")), id="a failure"),
        pytest.param((302, listing("x")), id="a redirect"),
    ],
)
def test_a_server_of_another_kind_is_not_taken_for_one(free_ports, answer):
    with Routes({"/v1/models": answer}, port=8080) as other, FlakyServer([], port=8000):
        assert find_local_server(30.0) == "vllm"
        assert [path for _, path, _ in other.asked] == ["/v1/models"]


def test_all_ports_are_asked_at_once_and_silence_is_not_waited_for(free_ports):
    listeners = [socket.create_server(("127.0.0.1", port)) for port in PORTS.values()]
    began = time.monotonic()
    found = find_local_server()
    took = time.monotonic() - began
    for listener in listeners:
        listener.close()
    assert (found, took < 9) == ("", True)  # a client that waits for an answer takes 10 seconds


def test_without_key_and_url_a_terminal_uses_the_server_of_this_machine(free_ports, terminal):
    with FlakyServer(["PONG"], port=11434) as server:
        screen = terminal(env=NO_ENDPOINT)
        assert "ollama" in screen.prompt()
        screen.send("ping\r")
        screen.expect("PONG")
        leave(screen)
    assert [request["model"] for request in server.requests] == ["flaky-1"]


def test_without_a_terminal_no_server_is_looked_for(free_ports, run_agent):
    with FlakyServer(["never"], port=11434) as server:
        done = run_agent("hi", env=NO_ENDPOINT)
    assert (done.returncode, done.stdout, server.requests) == (41, "", [])


# -- the next step -------------------------------------------------------------------------------


def test_without_a_key_a_terminal_gets_four_lines(free_ports, terminal):
    screen = terminal(env=NO_ENDPOINT)
    assert screen.wait() == 41
    missing, to_set, looked, demo = screen.text.strip().splitlines()
    assert "https://api.openai.com/v1" in missing
    assert all(word in to_set for word in ("OPENAI_API_KEY", "AGENT_API_KEY", "agent/env"))
    assert all(f"{name} ({port})" in looked for name, port in PORTS.items())
    assert "agent --demo" in demo
    assert (
        max(map(len, screen.text.splitlines())) <= 81
    )  # one line each on 80 columns, with its \\r


def test_a_server_that_runs_is_named_but_not_taken_for_the_provider_that_was_chosen(
    free_ports, terminal
):
    with FlakyServer(["never"], port=1234) as server:
        screen = terminal("--provider", "groq", "hi", env=NO_ENDPOINT)
        assert screen.wait() == 41
    assert "GROQ_API_KEY" in screen.text and "--provider lmstudio" in screen.text
    assert server.requests == []


def test_without_a_key_and_a_terminal_it_is_one_line_that_claims_no_search(run_agent):
    done = run_agent("hi", env=NO_ENDPOINT)
    [line] = done.stderr.splitlines()
    assert (done.returncode, "OPENAI_API_KEY" in line, "ollama" in line) == (41, True, False)


@pytest.mark.parametrize(
    "env, file, place",
    [
        pytest.param({"AGENT_API_KEY": "sk-1"}, "", "AGENT_API_KEY in the environment", id="env"),
        pytest.param({}, "OPENAI_API_KEY=sk-2", "OPENAI_API_KEY in ~/.config/agent/env", id="file"),
        pytest.param({}, "", "OPENAI_API_KEY or AGENT_API_KEY (also in ~", id="none"),
    ],
)
def test_a_refused_key_is_named_with_its_place(run_agent, home, env, file, place):
    (home / ".config/agent").mkdir(parents=True)
    (home / ".config/agent/env").write_text(file)
    with FlakyServer(["never"], key="right") as server:
        done = run_agent("hi", server=server, env={"AGENT_API_KEY": None} | env)
    assert (done.returncode, len(done.stderr.splitlines())) == (41, 1)
    assert place in done.stderr and "sk-" not in done.stderr


@pytest.mark.parametrize(
    "answer, ids",
    [
        ({"data": [{"id": "a"}, {"id": "b/c:d"}, {"id": "a"}]}, ["a", "b/c:d"]),
        ([{"id": "a"}], ["a"]),  # Together
        ({"data": [{"id": None}, {"id": {}}, {"id": " "}, {"id": "two\nlines"}]}, ["two lines"]),
        ({"data": []}, []),
        ({"models": [{"name": "a"}]}, None),
        ({"data": "a"}, None),
        (["a"], None),
        ([{"name": "a"}], None),
        (None, None),
    ],
)
def test_the_ids_of_a_list_of_models_are_words_or_it_is_none(answer, ids):
    assert model_ids(answer) == ids


NEAR = "the nearest of its models: big-2, big-2-mini"


@pytest.mark.parametrize(
    "status, error, hint",
    [
        pytest.param(404, "The model `big-3` does not exist", NEAR, id="OpenAI"),
        pytest.param(400, "big-3 is not a valid model ID", NEAR, id="OpenRouter"),
        pytest.param(400, "Invalid model: big-3", NEAR, id="Mistral"),
        pytest.param(400, "Model Not Exist", NEAR, id="DeepSeek"),
        pytest.param(404, "not found", NEAR, id="bare"),
        pytest.param(403, "No access to model `big-3`", NEAR, id="OpenAI, a project"),
        pytest.param(401, "This key can only access models=['x'], not big-3", NEAR, id="LiteLLM"),
        pytest.param(400, "`big-3` has been decommissioned", NEAR, id="Groq"),
        pytest.param(400, "unexpected model name format", NEAR, id="Gemini"),
        pytest.param(400, "No models loaded. Please load one", NEAR, id="LM Studio"),
        pytest.param(410, "big-3 has reached its end of life", NEAR, id="gone"),
        pytest.param(400, "temperature is out of range", "", id="another fault"),
        pytest.param(400, "big-31 is out of range", "", id="another word"),
    ],
)
def test_a_wrong_model_is_told_with_the_nearest_that_there_are(tmp_path, status, error, hint):
    answers = {
        "/v1/chat/completions": (status, {"error": {"message": error}}),
        "/v1/models": listing("tiny", "big-2-mini", "big-2"),
    }
    heard: list[str] = []
    with Routes(answers) as server:
        known = Settings(base_url=server.url, model="big-3", workspace=str(tmp_path))
        agent = build_agent(known, emit=lambda kind, **data: heard.append(data.get("text", "")))
        result = agent.run("hi")
        agent.close()
    [line] = filter(None, heard)
    code = 41 if status in (401, 403) else 1
    assert (result.exit_code, error in line, "nearest" in line) == (code, True, bool(hint))
    assert hint in line


@pytest.mark.parametrize(
    "location, hint",
    [
        pytest.param("https://b.c/x/chat/completions", "set --base-url https://b.c/x", id="moved"),
        pytest.param("/v2/chat/completions", "set --base-url http://a.b/v2", id="relative"),
        pytest.param("//u:pw@b.c/login?t=secret", "perhaps --base-url http://b.c/v1", id="login"),
        pytest.param("/login", "check the base URL", id="login here"),
        pytest.param("http://[b", "to nowhere", id="no address"),
        pytest.param("", "to nowhere", id="none"),
    ],
)
def test_a_redirect_says_what_to_set_and_shows_no_secret(location, hint):
    text = redirect_text("http://a.b/v1", "http://a.b/v1/chat/completions", location)
    assert hint in text
    assert "pw" not in text and "secret" not in text


@pytest.mark.parametrize(
    "url, hint",
    [
        pytest.param("http://h:1", "--base-url http://h:1/v1", id="root"),
        pytest.param("http://h/v1/chat/completions", "--base-url http://h/v1", id="whole"),
        pytest.param("http://h/v1", "check the base URL", id="right"),
        pytest.param("http://h/v1beta/openai", "check the base URL", id="Gemini"),
    ],
)
def test_a_base_url_that_is_no_root_is_mended_in_the_hint(url, hint):
    assert root_hint(url).endswith(hint)


def test_a_proxy_that_wants_a_password_is_named_without_one(run_agent):
    with Routes({"http://api.example.com/v1/chat/completions": (407, "")}) as proxy:
        url = proxy.url.removesuffix("/v1")
        env = {"HTTP_PROXY": url.replace("//", "//joe:s3cret@")}
        done = run_agent("--base-url", "http://api.example.com/v1", "hi", env=env)
    first, *_ = done.stderr.splitlines()
    assert (done.returncode, f"{url} of HTTP_PROXY" in first, "407" in first) == (1, True, True)
    assert "s3cret" not in done.stderr


def test_a_proxy_that_is_not_there_is_named_without_its_password(start_agent):
    env = {"HTTPS_PROXY": "http://joe:s3cret@127.0.0.1:9"}
    agent = start_agent("--provider", "openai", "hi", env=env)
    line = agent.stderr.readline()
    agent.send_signal(signal.SIGINT)
    agent.communicate(timeout=60)
    assert "http://127.0.0.1:9 of HTTPS_PROXY" in line and "s3cret" not in line


SSL = "(Caused by SSLError({}(1, '[{}: X] {} (_ssl.c:1006)')))"
VERIFY = "certificate verify failed: "


@pytest.mark.parametrize(
    "text, reason, hint",
    [
        ((VERIFY + "self-signed certificate"), "self-signed certificate;", "REQUESTS_CA_BUNDLE"),
        ((VERIFY + "Hostname mismatch, not valid for 'a.b'."), "for 'a.b';", "check the host"),
        ("wrong version number", "wrong version number;", "perhaps it is http://"),
    ],
)
def test_a_connection_that_is_not_secure_says_why_and_what_to_look_at(text, reason, hint):
    name = "SSL: WRONG_VERSION_NUMBER" if "version" in text else "SSL"
    told = requests.exceptions.SSLError(SSL.format("SSLError", name, text))
    error = network_error(told, "https://a.b/v1")
    assert isinstance(error, ProviderError) and error.exit_code == 1
    assert reason in str(error) and hint in str(error) and "_ssl" not in str(error)


def test_a_base_url_that_holds_a_password_is_refused_without_it():
    with pytest.raises(UsageError) as caught:
        Settings(base_url="http://joe:s3cret@127.0.0.1:9/v1")
    assert "password" in str(caught.value) and "s3cret" not in str(caught.value)


def test_a_local_server_that_is_not_started_is_told_with_its_command():
    refused = OSError("Connection refused")
    assert "ollama serve" in connection_reason(refused, "http://localhost:11434/v1")
    assert "api.b:443" in connection_reason(refused, "https://api.b/v1")


# -- /provider and /model ------------------------------------------------------------------------


def test_provider_goes_on_with_another_row_and_takes_no_reasoning_along(free_ports, terminal):
    first = {"text": "PONG", "reasoning": "a private thought"}
    with FlakyServer([first]) as old, FlakyServer(["PANG"], port=1234) as new:
        screen = terminal(server=old)
        ask(screen, "ping")
        screen.expect("PONG")
        ask(screen, "/provider lmstudio")
        assert "127.0.0.1:1234" in screen.prompt()
        screen.send("pang\r")
        screen.expect("PANG")
        ask(screen, "/status")
        assert "127.0.0.1:1234" in screen.prompt()
        screen.send("exit\r")
        assert screen.wait() == 0
    [request] = new.requests
    assert (len(old.requests), request.problems) == (1, [])
    assert [m["content"] for m in request["messages"][1:]] == ["ping", "PONG", "pang"]
    assert b"private thought" not in request.raw


@pytest.mark.parametrize(
    "line, named",
    [
        pytest.param("/provider nosuch", "openrouter", id="unknown: the rows are named"),
        pytest.param("/provider groq", "GROQ_API_KEY", id="no key: its variable is named"),
        pytest.param("/provider vllm", "8000", id="nobody listens"),
    ],
)
def test_a_provider_that_can_not_be_used_changes_nothing(free_ports, terminal, line, named):
    with FlakyServer(["PONG"]) as server:
        screen = terminal(server=server, env={"AGENT_API_KEY": None})
        ask(screen, line)
        assert named in screen.prompt()
        screen.send("ping\r")
        screen.expect("PONG")
        leave(screen)
    assert [request["model"] for request in server.requests] == ["flaky-1"]


def test_provider_alone_names_the_rows(terminal):
    with FlakyServer([]) as server:
        screen = terminal(server=server)
        ask(screen, "/provider")
        shown = screen.prompt()
        screen.send("exit\r")
        assert screen.wait() == 0
    assert [name for name in PROVIDERS if name not in shown] == []


def test_what_a_provider_refused_is_still_known_on_the_way_back(tmp_path):
    keys = {"OPENAI_API_KEY": KEY, "GROQ_API_KEY": KEY}
    model, quirk = PROVIDERS["openai"].model, "no_stream_options"
    known = {"provider": "openai", "api_key": KEY, "model": model, "keys": keys}
    agent = build_agent(Settings(**known, workspace=str(tmp_path), environ={}))
    agent.client.learned.add(quirk)
    had = []
    for name in ("groq", "openai"):
        agent.set_provider(name)
        had.append(quirk in agent.client.learned)
    agent.close()
    assert had == [False, True]


def test_model_alone_lists_what_the_server_has(terminal):
    with Routes({"/v1/models": listing("m-1", "big-2", "odd\x1b]0;title\x07-3")}) as server:
        screen = terminal(env={"AGENT_BASE_URL": server.url, "AGENT_MODEL": "mine-9"})
        ask(screen, "/model")
        shown = screen.prompt()
        screen.send("exit\r")
        assert screen.wait() == 0
    assert [name for name in ("m-1", "big-2", "-3", "mine-9") if name not in shown] == []
    assert "\x1b]0;title" not in screen.output


def test_model_alone_says_which_is_used_where_the_server_lists_none(terminal):
    with Routes({}) as server:
        screen = terminal(env={"AGENT_BASE_URL": server.url, "AGENT_MODEL": "mine-9"})
        ask(screen, "/model")
        shown = screen.prompt()
        screen.send("exit\r")
        assert screen.wait() == 0
    assert f"mine-9 at {server.url}" in shown and "lists no models" in shown


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(listing("m-1", f"m-{CANARY}"), id="as a model"),
        pytest.param((401, {"error": {"message": f"wrong key {CANARY}"}}), id="in a refusal"),
        pytest.param(f"<html>{CANARY}</html>", id="on a page"),
    ],
)
def test_a_key_in_a_list_of_models_is_not_shown(terminal, answer):
    with Routes({"/v1/models": answer}) as server:
        env = {"AGENT_BASE_URL": server.url, "AGENT_MODEL": "mine-9", "AGENT_API_KEY": CANARY}
        screen = terminal(env=env)
        ask(screen, "/model")
        leave(screen)
    assert server.asked == [("GET", "/v1/models", None)]
    assert CANARY not in screen.output


# -- history of one row, sent to another ---------------------------------------------------------

THOUGHT = "PRIVATE-THOUGHT"
QUIRKS = {
    "openai": {},
    "deepseek": {"reasoning": THOUGHT},
    "vllm": {"fault": "reasoning_key", "reasoning": THOUGHT},
    "openrouter": {"fault": "reasoning_details", "reasoning": THOUGHT},
    "gemini": {"fault": "thought_signature"},
    "together": {"fault": "id_duplicate"},  # Kimi: the same ids in each turn
    "groq": {"id": "call_" + "x" * 59},
    "ollama": {"fault": "index_and_id_missing"},
    "llamacpp": {"fault": "arguments_dict"},
    "xai": {"fault": "id_missing", "text": "I look."},
}
WISHES = {
    "openai": "wants_short_ids",
    "groq": "refuses_reasoning",
    "mistral": "wants_ids_of_nine",
    "gemini": "wants_names_of_results",
    "vertex": "wants_signatures",
    "deepseek": "wants_reasoning",
    "llamacpp": "wants_alternating_roles",
    "lmstudio": "refuses_null_content",
    "anthropic": "refuses_tool_turns",
    "together": "refuses_text_with_calls",
    "xai": None,
}


def made(server: FlakyServer, folder: Path, notices: list[str], **known: Any) -> Any:
    """An agent that talks to the server."""
    settings = {"base_url": server.url, "model": "m-1", "mode": "plan", "environ": {}}

    def emit(kind: str, **fields: Any) -> None:
        if kind == "notice":
            notices.append(fields["text"])

    return build_agent(Settings(workspace=str(folder), **settings), emit=emit, **known)


def turn(quirk: dict[str, Any]) -> list[Any]:
    """The script of a turn that reads a file, the call with the quirk, and then says a word."""
    return [{"call": "read_file", "arguments": {"path": "a.txt"}} | quirk, "done"]


def replies_of(request: Any) -> list[dict[str, Any]]:
    """The messages of the assistant in a request."""
    return [message for message in request["messages"] if message["role"] == "assistant"]


def foreign_keys(request: Any) -> set[str]:
    """The keys of replies and of their calls that not every server knows."""
    replies = replies_of(request)
    calls = [item for reply in replies for item in reply.get("tool_calls", [])]
    known = {"role", "content", "tool_calls", "id", "type", "function"}
    return {key for item in [*replies, *calls] for key in item} - known


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("quirk", QUIRKS)
def test_the_history_of_one_provider_is_taken_by_another(workspace, quirk, wish):
    (workspace / "a.txt").write_text("alpha\n")
    strict = {"fault": WISHES[wish], "times": 2, "text": "taken"} if WISHES[wish] else "taken"
    notices: list[str] = []
    with (
        FlakyServer(turn(QUIRKS[quirk]) + turn(QUIRKS[quirk])) as old,
        FlakyServer([strict]) as new,
    ):
        agent = made(old, workspace, notices)
        assert [agent.run("look").text, agent.run("again").text] == ["done", "done"]
        before = json.dumps(agent.transcript.messages)
        other = made(new, workspace, notices, session=agent.session)
        assert other.run("go on").text == "taken"
        after = json.dumps(agent.transcript.messages[: len(json.loads(before))])
        agent.client.close()
        other.close()
    [*refused, taken] = new.requests
    assert [r.problems for r in new.requests + old.requests if r.problems] == []
    assert len(refused) <= 1 and len(notices) == len(refused)
    assert foreign_keys(taken) == ({"reasoning_content"} if wish == "deepseek" else set())
    assert THOUGHT.encode() not in taken.raw
    assert json.loads(after)[1:] == json.loads(before)[1:]
    assert problems(agent.transcript.messages) == []


@pytest.mark.parametrize("quirk", QUIRKS)
def test_another_model_of_the_same_server_gets_no_extras_and_the_first_one_gets_its_own_back(
    workspace, quirk
):
    (workspace / "a.txt").write_text("alpha\n")
    with FlakyServer([*turn(QUIRKS[quirk]), "at home", "abroad", "back"]) as server:
        agent = made(server, workspace, [])
        agent.run("look")
        agent.run("and")
        agent.set_model("m-2")
        agent.run("go on")
        agent.set_model("m-1")
        agent.run("and back")
        agent.close()
    _, _, home, abroad, back = server.requests
    assert [request["model"] for request in server.requests[2:]] == ["m-1", "m-2", "m-1"]
    assert (foreign_keys(abroad), foreign_keys(back)) == (set(), foreign_keys(home))
    count = len(home["messages"])
    assert back["messages"][:count] == home["messages"]


# -- the window ----------------------------------------------------------------------------------

MODELS, SHOW, PROPS = "/v1/models", "/api/show", "/props"
TRAINED = {"general.architecture": "llama", "llama.context_length": 131072}


def models(**fields: object) -> dict[str, Any]:
    """A list in which another model, with another window, stands before and behind ours."""
    others = [{"id": name, **dict.fromkeys(fields, 4444)} for name in ("a-0", "z-9")]
    return {MODELS: {"data": [others[0], {"id": "m-1", **fields}, others[1]]}}


@pytest.mark.parametrize(
    "answers, window",
    [
        pytest.param(models(context_length=200000), 200000, id="OpenRouter, Together"),
        pytest.param(models(max_model_len=32768), 32768, id="vLLM"),
        pytest.param(models(context_window=131072), 131072, id="Groq"),
        pytest.param(models(max_context_length=65536), 65536, id="Mistral, LM Studio"),
        pytest.param(
            models(max_context_length=131072, loaded_context_length=8192), 8192, id="as loaded"
        ),
        pytest.param({SHOW: {"model_info": TRAINED}}, 131072, id="Ollama, trained"),
        pytest.param({SHOW: {"parameters": "stop  x\nnum_ctx   8192"}}, 8192, id="Ollama, set"),
        pytest.param(
            {SHOW: {"model_info": TRAINED, "parameters": "num_ctx 8192"}}, 8192, id="Ollama, both"
        ),
        pytest.param(
            {PROPS: {"default_generation_settings": {"n_ctx": 4096}}}, 4096, id="llama.cpp"
        ),
        pytest.param(
            models(meta={"n_ctx_train": 131072})
            | {PROPS: {"default_generation_settings": {"n_ctx": 4096}}},
            4096,
            id="llama.cpp, smaller than trained",
        ),
        pytest.param(models(owned_by="x") | {SHOW: {"model_info": TRAINED}}, 131072, id="mixed"),
        pytest.param({}, 0, id="nothing"),
        pytest.param(models(context_length=None, max_model_len=0), 0, id="null and zero"),
        pytest.param(models(context_length=True), 0, id="true"),
        pytest.param(models(context_length="many"), 0, id="a word"),
        pytest.param(models(context_length=-1), 0, id="negative"),
        pytest.param({MODELS: {"data": [{"id": "z", "context_length": 9999}]}}, 0, id="another"),
        pytest.param({MODELS: {"data": "x"}, SHOW: [], PROPS: "<html>"}, 0, id="odd shapes"),
        pytest.param({MODELS: (500, models(context_length=9999)[MODELS])}, 0, id="a failure"),
        pytest.param({SHOW: {"model_info": [1], "parameters": {"num_ctx": 1}}}, 0, id="odd show"),
        pytest.param({MODELS: {"data": [None, {"id": 7}, []]}}, 0, id="odd rows"),
    ],
)
def test_the_window_is_read_where_the_endpoint_offers_it(answers, window):
    with Routes(answers) as server:
        known = Settings(base_url=server.url, model="m-1", environ={})
        client = Client(known, lambda kind, **data: None)
        assert client.read_window() == window
        client.close()
    shown = [body for method, path, body in server.asked if (method, path) == ("POST", SHOW)]
    assert [body["model"] for body in shown] in ([], ["m-1"])


@pytest.mark.parametrize(
    ("pricing", "price"),
    [
        pytest.param(
            {"prompt": "0.000002", "completion": "0.000008", "input_cache_read": "0.0000005"},
            (2, 0.5, 8),
            id="as OpenRouter tells it",
        ),
        pytest.param({"prompt": 2e-6, "completion": "0"}, (2, 2, 0), id="no cached price"),
        pytest.param({"prompt": "-1", "completion": "-1"}, None, id="it depends"),
        pytest.param({"prompt": "nan", "completion": "1e999"}, None, id="no numbers"),
        pytest.param({"prompt": [], "completion": True}, None, id="odd kinds"),
        pytest.param("free", None, id="a word"),
    ],
)
def test_prices_are_read_where_the_endpoint_lists_them(pricing, price):
    with Routes(models(pricing=pricing)) as server:
        known = Settings(base_url=server.url, model="m-1", environ={}, max_budget_usd=1.0)
        client = Client(known, lambda kind, **data: None)
        if price is None:
            with pytest.raises(UsageError, match=r'\[prices\."m-1"\]'):
                client.price("m-1", must=True)
        else:
            assert client.price("m-1", must=True) == pytest.approx(price)
        client.close()


def status_of(terminal: Callable, *flags: str, env: dict[str, Any]) -> str:
    """What /status shows at the first prompt."""
    screen = terminal(*flags, env=env)
    ask(screen, "/status")
    shown = screen.prompt()
    screen.send("exit\r")
    assert screen.wait() == 0
    return shown


def test_status_shows_the_window_that_the_server_tells(terminal):
    with Routes(models(max_model_len=32768)) as server:
        shown = status_of(terminal, env={"AGENT_BASE_URL": server.url, "AGENT_MODEL": "m-1"})
    assert "of 32768 tokens" in shown


def test_status_marks_a_window_that_nobody_tells(terminal):
    with Routes({}) as server:
        shown = status_of(terminal, env={"AGENT_BASE_URL": server.url, "AGENT_MODEL": "m-1"})
    assert "of ~128000 tokens" in shown


def test_a_window_that_the_user_tells_is_not_asked_for(terminal):
    with Routes(models(max_model_len=32768)) as server:
        env = {"AGENT_BASE_URL": server.url, "AGENT_MODEL": "m-1"}
        shown = status_of(terminal, "--context", "5000", env=env)
    assert ("of 5000 tokens" in shown, server.asked) == (True, [])


def test_a_window_is_read_anew_for_another_model(terminal):
    rows = [{"id": "m-1", "max_model_len": 32768}, {"id": "m-2", "max_model_len": 65536}]
    with Routes({MODELS: {"data": rows}}) as server:
        screen = terminal(env={"AGENT_BASE_URL": server.url, "AGENT_MODEL": "m-1"})
        for line in ("/status", "/model m-2"):
            ask(screen, line)
        ask(screen, "/status")
        shown = screen.prompt()
        screen.send("exit\r")
        assert screen.wait() == 0
    assert "of 65536 tokens" in shown


def test_a_window_learned_from_an_overflow_is_shown(terminal, workspace):
    rounds = [m for n in range(10) for m in talk(f"question {n}", f"answer {n} " * 200)[1:]]
    put_session(workspace, OLD, [*talk("first", "second"), *rounds])
    with FlakyServer([{"fault": "context_overflow"}, "the note", "PONG"]) as server:
        screen = terminal("--resume", server=server)
        ask(screen, "ping")
        screen.expect("PONG")
        ask(screen, "/status")
        shown = screen.prompt()
        screen.send("exit\r")
        assert screen.wait() == 0
    assert "of 8192 tokens" in shown


def test_a_window_learned_from_an_overflow_decides_when_to_compact(workspace):
    rounds = [m for n in range(10) for m in talk(f"question {n}", f"answer {n} " * 200)[1:]]
    script = [{"fault": "context_overflow"}, "the note", "one", "another note", "two"]
    with FlakyServer(script) as server:
        agent = made(server, workspace, [])
        agent.transcript.replace([*agent.transcript.messages, *rounds])
        assert agent.run("go on").text == "one"
        assert agent.run("long " * 5000).text == "two"
        agent.close()
    assert ["tools" in request for request in server.requests] == [True, False, True, False, True]


def test_the_key_stands_in_no_address():
    with Routes({}) as server:
        known = Settings(base_url=server.url, model="m-1", api_key=KEY, environ={})
        client = Client(known, lambda kind, **data: None)
        client.read_window()
        client.close()
    paths = [path for _, path, _ in server.asked]
    assert MODELS in paths and [path for path in paths if KEY in path] == []


# -- what a row knows of its endpoint before the first refusal


def sent_by(name: str, model: str) -> list[dict[str, Any]]:
    """The messages of a session with a tool turn and then a prompt, as this provider gets them."""
    call = {"name": "ls", "arguments": "{}"}
    calls = [{"id": "call_with_a_long_id", "type": "function", "function": call}]
    transcript = Transcript([{"role": "system", "content": "Be short."}])
    transcript.add_user("list")
    for made in transcript.add_reply({"role": "assistant", "content": None, "tool_calls": calls}):
        transcript.answer(made.id, "README.md")
    transcript.add_user("stop that")
    client = Client(Settings(provider=name, model=model, environ={}), lambda kind, **data: None)
    return json.loads(client.body(transcript, ""))["messages"]


def test_mistral_gets_ids_of_nine_characters_and_a_reply_between_result_and_prompt():
    messages = sent_by("mistral", "mistral-large-latest")
    assert [m["role"] for m in messages] == "system user assistant tool assistant user".split()
    call_id = messages[2]["tool_calls"][0]["id"]
    assert (len(call_id), call_id.isalnum(), messages[3]["tool_call_id"]) == (9, True, call_id)


@pytest.mark.parametrize(
    ("name", "model", "marked"),
    [
        ("openrouter", "anthropic/claude-sonnet-4.5", True),
        ("openrouter", "openai/gpt-4.1", False),
        ("openai", "anthropic/x", False),
    ],
)
def test_only_anthropic_models_behind_openrouter_get_a_cache_mark(name, model, marked):
    first, *others = sent_by(name, model)
    part = {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}
    assert first["content"] == ([part] if marked else "Be short.")
    assert "cache_control" not in json.dumps(others)


def test_a_connection_that_is_not_secure_is_told_once_and_not_tried_again():
    with FlakyServer([]) as server:  # speaks no TLS
        waits: list[float] = []
        known = Settings(base_url=server.url.replace("http:", "https:"), model="m", environ={})
        client = Client(known, lambda kind, **data: None, sleep=waits.append)
        transcript = Transcript(
            [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}]
        )
        with pytest.raises(ProviderError, match=r"no secure connection.*REQUESTS_CA_BUNDLE"):
            client.complete(transcript)
        client.close()
    assert waits == []


def test_a_wait_is_counted_down_on_a_terminal(terminal):
    with FlakyServer([{"status": 429, "headers": {"Retry-After": "3"}}, "PONG"]) as server:
        screen = terminal(server=server)
        ask(screen, "ping")
        screen.expect("retry 1 of 4 in 3.0 s")
        screen.expect("2 s ")
        screen.expect("PONG")
        leave(screen)


@pytest.mark.parametrize(
    "words", [[], pytest.param(["hi"], marks=pytest.mark.long)], ids=["REPL", "prompt"]
)
@pytest.mark.parametrize(
    "ui", [False, pytest.param(True, marks=pytest.mark.long)], ids=["plain", "ui"]
)
def test_no_key_in_a_terminal_is_four_lines(free_ports, terminal, words, ui):
    screen = terminal(*words, env=NO_ENDPOINT, ui=ui)
    assert screen.wait() == 41
    lines = screen.text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    letters = "".join(filter(str.isalpha, screen.text.lower()))
    assert (len(lines), [line for line in lines if not line.strip()]) == (4, [])
    assert [name for name in ("AGENT_API_KEY", "--demo") if name not in screen.text] == []
    assert [row for row in ("ollama", "lmstudio", "llamacpp", "vllm") if row not in letters] == []
