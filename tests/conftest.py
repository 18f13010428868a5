"""What the tests share: the agent as a process, the agent on a terminal, nothing left behind.

Nothing here knows the agent's code. A test gets it through three fixtures:

    run_agent("hi", server=server)     run it to its end: returncode, stdout, stderr
    start_agent("hi", server=server)   start it: a Popen to be signalled, read and waited for
    terminal("--mode", "ask", server=server)   start it under a pty: expect, send, interrupt, wait

Each makes sure that no traceback was shown, that the server found nothing wrong with any
request, and that no process stays.
"""

import codecs
import fcntl
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis.configuration import set_hypothesis_home_dir

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

KEY = "test-key"
NAP = f"9{os.getpid():08}.5"  # Seconds to sleep that no command of another test run has.
ESCAPES = re.compile(
    r"\x1b(?:\[[0-9;?<>=]*[@-~]?|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[()][0-9A-Z]?|[=>78]?)|[\x01\x02\x07]"
)
PROMPT = re.compile(r"(?:^|[\r\n])> $")
QUESTION = re.compile(r"\? \[y(?:es)?/n(?:/a)?(?:/d)?\] $")
# Popen did setsid; this makes fd 0 the controlling terminal and then becomes the command.
ADOPT = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execv(sys.argv[1], sys.argv[1:])"
)


HYPOTHESIS_FOLDER = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker of the slow tier known; what Hypothesis keeps goes away with the run."""
    folder = tempfile.TemporaryDirectory(prefix="hypothesis-")
    config.stash[HYPOTHESIS_FOLDER] = folder
    set_hypothesis_home_dir(folder.name)
    config.addinivalue_line("markers", "long: the full counts; run with `pytest -m long`")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Here and not in a clean-up of the configuration, which the workers of xdist leave out."""
    session.config.stash[HYPOTHESIS_FOLDER].cleanup()


# What costs most in the quick tier: how many cases of a test belong to it, the others are long.
QUICK_CASES = {
    "test_a_file_of_three_gigabytes_is_searched_or_counted_in_flat_memory": 0,
    "test_a_catastrophic_regex_ends_in_an_error_and_the_next_calls_work": 0,
    "test_memory_stays_flat_whatever_a_flood_consists_of": 0,
    "test_a_wait_is_counted_down_on_a_terminal": 0,
    "test_a_page_of_hostile_shape_is_read_in_time": 2,
    "test_a_miss_is_answered_soon_and_briefly_whatever_the_sizes": 1,
    "test_the_history_of_one_provider_is_taken_by_another": 25,
    "test_a_key_that_the_server_echoes_is_shown_nowhere": 4,
    "test_a_page_may_say_its_letters_itself": 2,
    "test_with_an_rg_that_fails_the_results_are_the_same": 1,
    "test_a_signal_during_a_catastrophic_search_leaves_no_process": 1,
    "test_a_name_is_taken_literally": 1,
    "test_a_kill_in_the_middle_of_a_write_can_be_undone": 1,
    "test_what_the_user_set_for_rg_does_not_change_a_search": 1,
    "test_a_flood_without_end_is_cut_by_the_timeout_with_its_last_lines": 0,
    "test_the_flag_decides_the_host_and_the_key_variable_of_the_row_is_enough": 2,
    "test_a_session_is_resumed": 3,
    "test_a_signal_while_a_command_runs_ends_its_whole_group": 1,
    "test_what_another_reader_would_lose_is_kept": 1,
    "test_a_skipped_folder_that_is_named_is_searched": 2,
    "test_odd_forms_of_arguments_lose_nothing_when_a_file_is_written": 25,
    "test_an_error_inside_a_200_is_what_the_same_status_is": 2,
    "test_a_broken_stream_runs_nothing_and_leaves_nothing_behind": 2,
    "test_commands_run_also_when_the_program_was_replaced_meanwhile": 1,
    "test_a_paste_of_three_lines_is_one_prompt": 2,
    "test_the_rule_that_was_named_permits_the_change": 1,
    "test_a_key_that_a_command_prints_is_shown_and_sent_nowhere": 1,
    "test_reasoning_goes_back_as_it_came_and_to_no_other_model": 1,
    "test_what_can_not_be_read_is_counted_and_the_rest_is_found": 1,
    "test_a_signal_while_the_model_streams_leaves_a_valid_session": 1,
    "test_no_proxy_stands_between_the_agent_and_this_machine": 2,
    "test_anything_but_yes_is_no": 2,
    "test_the_plain_reader_needs_no_more_than_its_time": 1,
    "test_a_prompt_may_start_with_a_dash": 2,
    "test_an_ignored_path_that_is_named_is_searched": 6,
    "test_git_fails_at_once_where_it_would_open_an_editor": 2,
    "test_a_passing_failure_is_retried_four_times_and_each_time_announced": 1,
    "test_a_note_is_kept_only_after_a_yes": 1,
    "test_a_name_that_turns_out_to_be_this_machine_gets_no_request": 2,
    "test_reading_works_in_each_mode": 1,
    "test_a_session_that_git_tracks_is_not_resumed_without_a_humans_yes": 1,
    "test_a_reply_that_broke_off_is_asked_again": 1,
    "test_a_session_that_may_have_come_with_the_repository_needs_a_human": 1,
    "test_a_path_outside_the_workspace_is_refused": 1,
    "test_a_background_job_ends_with_the_agent": 1,
    "test_a_background_process_holds_nobody_up_and_is_named": 4,
    "test_every_job_ends_with_the_agent": 1,
    "test_a_regex_that_is_too_deep_ends_neither_the_search_nor_the_agent": 1,
    "test_a_refusal_ends_at_once_with_the_words_of_the_server": 1,
    "test_the_workspace_may_be_another_folder": 1,
    "test_a_flag_for_unattended_use_means_nobody_is_asked": 1,
    "test_leaving_says_how_to_come_back": 1,
    "test_a_match_in_a_huge_line_shows_the_window_around_it": 2,
    "test_output_that_can_not_be_written_is_an_error_in_one_line": 2,
    "test_separators_and_characters_that_are_split_over_reads_come_through": 1,
    "test_a_hosted_row_without_a_key_names_its_variable": 2,
    "test_a_key_in_a_list_of_models_is_not_shown": 1,
    "test_a_provider_that_can_not_be_used_changes_nothing": 1,
    "test_plan_mode_refuses_changes": 1,
    "test_a_fork_leaves_the_old_session_alone": 1,
    "test_yes_is_not_a_human_who_allows_a_change_of_agents_md": 1,
    "test_json_is_printed_on_failure_too": 1,
    "test_with_nobody_there_a_change_is_denied_and_the_turn_goes_on": 1,
    "test_a_damaged_journal_damages_no_file": 1,
    "test_a_key_that_no_header_can_carry_is_one_line_that_does_not_show_it": 2,
    "test_every_job_ends_with_the_conversation": 1,
    "test_what_a_server_sends_is_read_or_explained": 2,
    "test_ctrl_c_ends_the_whole_tree_and_keeps_the_output": 2,
    "test_a_failure_that_mentions_a_withheld_key_says_so": 3,
    "test_the_last_line_says_how_it_ended": 6,
    "test_one_skipped_folder_is_said_to_be_skipped": 3,
    "test_a_protected_file_is_restored_only_after_a_yes": 1,
    "test_a_write_that_fails_half_way_leaves_the_old_bytes": 1,
    "test_a_mistake_in_the_config_is_named_in_one_line": 2,
    "test_a_page_keeps_its_links_tables_code_and_lists": 1,
    "test_a_page_loses_what_is_no_text": 1,
    "test_diff_shows_odd_files_without_harm": 1,
    "test_an_odd_journal_ends_neither_the_undo_nor_the_agent": 1,
    "test_an_unknown_flag_is_a_usage_error": 2,
    "test_the_trace_of_a_crash_holds_no_key": 1,
    "test_a_match_that_is_huge_or_empty_in_a_huge_line_is_shown_in_part": 2,
    "test_the_file_of_a_flood_stops_at_50_megabytes_and_the_result_says_so": 0,
    "test_a_timeout_ends_what_does_not_want_to_end": 0,
    "test_a_dash_waits_for_the_end_of_a_slow_pipe": 0,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the slow tier out unless it was asked for."""
    seen: dict[str, int] = {}
    for item in items:
        name = getattr(item, "originalname", item.name)
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > QUICK_CASES.get(name, len(items)):
            item.add_marker(pytest.mark.long)
    if "long" in config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


# -- looking at what is there --------------------------------------------------------------------


def until(condition: Callable[[], object], timeout: float = 20.0) -> object:
    """Wait until the condition is true and return what it said; fail after the timeout."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout} s in vain"
        time.sleep(0.01)
    return value


def processes(matches: Callable[[Path], bool]) -> list[int]:
    """Ids of the other living processes whose /proc folder matches."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and matches(folder):
                found.append(int(folder.name))
        except OSError:  # It ended while we looked at it.
            continue
    return found


def alive(marker: str) -> list[int]:
    """Ids of the processes with the marker in their command line (a zombie has none)."""
    return processes(lambda folder: marker.encode() in (folder / "cmdline").read_bytes())


def inside(folder: Path) -> list[int]:
    """Ids of the processes that work in the folder or name it in their command line."""
    name = str(folder)

    def matches(process: Path) -> bool:
        cwd = os.readlink(process / "cwd")
        return (
            cwd == name
            or cwd.startswith(name + "/")
            or name.encode() in (process / "cmdline").read_bytes()
        )

    return processes(matches)


def children() -> list[int]:
    """Ids of the living children of the test run."""

    def matches(process: Path) -> bool:
        state, parent = (process / "stat").read_text().rsplit(")", 1)[1].split()[:2]
        return state != "Z" and int(parent) == os.getpid()

    return processes(matches)


def session_files(workspace: Path) -> list[Path]:
    """The session files of a workspace, oldest name first."""
    return sorted((workspace / ".agent" / "sessions").glob("*.json"))


def put_session(workspace: Path, ident: str, messages: list[dict], **keys: object) -> Path:
    """Write a session as an earlier run would have left it; a later id is a later session."""
    day = f"{ident[:4]}-{ident[4:6]}-{ident[6:8]}T{ident[9:11]}:{ident[11:13]}:{ident[13:15]}+00:00"
    body = {
        "version": 1,
        "id": ident,
        "created": day,
        "updated": day,
        "root": str(workspace),
        "model": "flaky-1",
    }
    body |= {
        "base_url": "",
        "title": messages[1]["content"],
        "usage": {},
        "files": {},
        "messages": messages,
    } | keys
    path = workspace / ".agent" / "sessions" / f"{ident}.json"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=1))
    stamp = time.mktime(time.strptime(ident[:15], "%Y%m%d-%H%M%S"))
    os.utime(path, (stamp, stamp))
    return path


def talk(question: str, answer: str) -> list[dict]:
    """The messages of a session with one question and its answer."""
    system = {"role": "system", "content": "You are a coding agent."}
    return [system, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def results(request: dict) -> list[str]:
    """The results of tool calls that a request carries, in order."""
    return [message["content"] for message in request["messages"] if message["role"] == "tool"]


def prompts(request: dict) -> list[str]:
    """What the user said, in order, as a request carries it."""
    return [message["content"] for message in request["messages"] if message["role"] == "user"]


def roles(request: dict) -> list[str]:
    """The roles of the messages of a request."""
    return [message["role"] for message in request["messages"]]


# -- the agent as a process ----------------------------------------------------------------------


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """An empty folder for the agent to work in."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty home folder."""
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def environment(home: Path) -> Callable[..., dict[str, str]]:
    """Build the clean environment of an agent; a change to None removes the variable."""

    def build(
        server: object = None, changes: dict[str, str | None] | None = None
    ) -> dict[str, str]:
        clean: dict[str, str | None] = {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "HOME": str(home),
            "TERM": "xterm",
            "PYTHONPATH": str(ROOT),
            "AGENT_API_KEY": KEY,
            "AGENT_MODEL": "flaky-1",
            "AGENT_BASE_URL": getattr(server, "url", None),
        }
        return {
            name: value for name, value in (clean | (changes or {})).items() if value is not None
        }

    return build


@pytest.fixture
def start_agent(tmp_path: Path, workspace: Path, environment: Callable) -> Iterator[Callable]:
    """Start the agent as a child; at the end of the test it is gone and left nothing running."""
    started: list[subprocess.Popen] = []
    servers = []

    def start(
        *args, server=None, cwd=None, env=None, stdin=subprocess.DEVNULL, under=(), **options
    ) -> subprocess.Popen:
        command = [*under, sys.executable, "-m", "agent", *args]
        texts = {
            "encoding": "utf-8",
            "errors": "replace",
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        place = {"cwd": cwd or workspace, "env": environment(server, env)}
        started.append(subprocess.Popen(command, stdin=stdin, **(texts | place | options)))
        servers.append(server)
        return started[-1]

    yield start
    for process in started:
        end(process)
    assert [
        reason for server in servers if server for r in server.requests for reason in r.problems
    ] == []
    nothing_runs_in(tmp_path)


@pytest.fixture
def run_agent(start_agent: Callable) -> Callable:
    """Run the agent to its end: a CompletedProcess with text, and never a traceback."""

    def run(
        *args, server=None, input=None, cwd=None, env=None, timeout=60, under=()
    ) -> subprocess.CompletedProcess:
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        process = start_agent(*args, server=server, cwd=cwd, env=env, stdin=stdin, under=under)
        try:
            out, err = process.communicate(input, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            pytest.fail(f"still running after {timeout} s\nstdout: {out}\nstderr: {err}")
        assert "Traceback" not in out + err, err
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run


def end(process: subprocess.Popen) -> None:
    """End a child if it still runs, and close its pipes."""
    if process.poll() is None:
        process.kill()
    process.wait(10)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream:
            stream.close()


def nothing_runs_in(folder: Path) -> None:
    """Fail, and end them, if processes still work in the folder after a moment."""
    deadline = time.monotonic() + 5
    while (left := inside(folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid in left]
    for pid in left:
        os.kill(pid, 9)
    assert lines == [], "processes were left behind"


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """At the end of the run the tests have no child and no process that works in their folders."""
    before = set(children())
    yield
    deadline = time.monotonic() + 5
    while (left := set(children()) - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == set(), "children of the test run are left"


# -- the agent on a terminal ---------------------------------------------------------------------


class Terminal:
    """The agent under a terminal of 24 rows and 80 columns; `output` is all that it wrote."""

    def __init__(self, command: list[str], cwd: Path, env: dict[str, str]):
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.settings = termios.tcgetattr(self.slave)
        self.output = ""
        self.seen = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        adopt = [sys.executable, "-I", "-S", "-c", ADOPT, *command]
        ends = {"stdin": self.slave, "stdout": self.slave, "stderr": self.slave}
        self.process = subprocess.Popen(adopt, cwd=cwd, env=env, start_new_session=True, **ends)

    @property
    def text(self) -> str:
        """All output without escape codes, bells and the marks of readline."""
        return ESCAPES.sub("", self.output)

    def read(self, seconds: float) -> bool:
        """Take in what comes within the time; False when nothing came."""
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        self.output += self.decoder.decode(os.read(self.master, 65536))
        return True

    def match(self, pattern: re.Pattern, timeout: float = 20) -> str:
        """Read until the pattern is behind what was expected last; return all up to its end."""
        deadline = time.monotonic() + timeout
        while not (found := pattern.search(self.text, self.seen)):
            over = self.process.poll() is not None and not self.read(0.1)
            if over or time.monotonic() > deadline:
                state = f"ended with {self.process.returncode}" if over else f"{timeout} s are over"
                raise AssertionError(f"no {pattern.pattern!r} ({state}); the screen:\n{self.text}")
            self.read(0.1)
        start, self.seen = self.seen, found.end()
        return self.text[start : self.seen]

    def expect(self, text: str, timeout: float = 20) -> str:
        """Read until the text is behind what was expected last; return all up to its end."""
        return self.match(re.compile(re.escape(text)), timeout)

    def prompt(self, timeout: float = 20) -> str:
        """Wait for the input prompt and return what was written before it."""
        shown = self.match(PROMPT, timeout)
        self.listens()
        return shown

    def question(self, timeout: float = 20) -> str:
        """Wait for a permission question and return what was written before it."""
        shown = self.match(QUESTION, timeout)
        self.listens()
        return shown

    def listens(self) -> None:
        """Wait until the process sleeps: input() shows its prompt a moment before it listens,
        and a signal in that moment is seen by Python only at the next key."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        until(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] in "SZ")

    def settle(self, timeout: float = 20) -> None:
        """Wait until nothing more comes and the input prompt is the last thing on the screen."""
        deadline = time.monotonic() + timeout
        while self.read(0.25) or not PROMPT.search(self.text):
            assert time.monotonic() < deadline, f"no prompt; the screen:\n{self.text}"
        self.seen = len(self.text)

    def send(self, text: str) -> None:
        """Type the text; Enter is a carriage return."""
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        """Type Ctrl-C."""
        self.send("\x03")

    def wait(self, timeout: float = 20) -> int:
        """Read to the end of the process and return its exit code."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running; the screen:\n{self.text}"
            self.read(0.05)
        while self.read(0):
            continue
        return self.process.returncode

    def hang_up(self) -> None:
        """Close the window."""
        os.close(self.slave)
        os.close(self.master)
        self.slave = self.master = -1

    def close(self) -> None:
        """End the process by its id and give the terminal back."""
        end(self.process)
        if self.master >= 0:
            self.hang_up()


@pytest.fixture
def terminal(tmp_path: Path, workspace: Path, environment: Callable) -> Iterator[Callable]:
    """Start the agent under a terminal; at the end it is gone and no traceback was seen."""
    open_terminals: list[Terminal] = []
    servers = []

    def start(*args, server=None, cwd=None, env=None) -> Terminal:
        command = [sys.executable, "-m", "agent", *args]
        open_terminals.append(Terminal(command, cwd or workspace, environment(server, env)))
        servers.append(server)
        return open_terminals[-1]

    yield start
    for screen in open_terminals:
        screen.close()
    assert [screen.text for screen in open_terminals if "Traceback" in screen.text] == []
    assert [
        reason for server in servers if server for r in server.requests for reason in r.problems
    ] == []
    nothing_runs_in(tmp_path)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder outside every workspace, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="agent-test-"))
    yield folder
    shutil.rmtree(folder)
