"""The compaction ladder: it ends, what it leaves is valid, and nothing is lost.

`staged` builds an agent in a session with a given past, in front of a model that is a function of
the request: asked without tools it writes the hand-over note (or fails to), asked with tools it
does the next step of its work. The server counts four bytes a token and may have a window of its
own. At the end of each case every request must have been valid, and the transcript still is.

Rows of the catalogue that are no test of their own: C12 (pairs are never cut) and C18 (the check
before each request) hold in every random case; C4 (a silent server) is the client's; C15 (one
thread of control) and C21 (no pictures) have nothing to test here. C26 is decided the other way:
the note is asked for with flat text, since many gateways refuse call shapes without tools.
"""

import contextlib
import dataclasses
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import put_session, session_files
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agent import (
    Agent,
    Compaction,
    Person,
    Repl,
    Screen,
    Settings,
    build_agent,
    markdown,
    problems,
    resume_session,
    tool,
)
from flaky_server import FlakyServer

PLAIN = settings(
    deadline=None,
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
QUICK = settings(PLAIN, max_examples=20, phases=[Phase.explicit, Phase.generate])  # not shrunk
LONG = settings(PLAIN, max_examples=1000)
COUNT = itertools.count(1)
SYSTEM = {"role": "system", "content": "You are a coding agent."}
TASK = "the task <now>, word for word:\n\tread  a.py, 修复解析器 \N{WHITE HEAVY CHECK MARK}."
NOTE = """\
## Task
Finish the parser; the tests of the header fail.
## Decisions
Keep the tokenizer as it is.
## Files
parser.py:12 reads the header, changed.
## Open work
Run the tests once more."""
MARK = "parser.py:12 reads the header"  # of the note
TEMPLATE = "## Task\n\n## Decisions\n\n## Files\n\n## Open work\n"
SORRY = "I'm sorry, but I can't help with that request."
Message = dict[str, Any]


TEXTS: dict[str, str] = {}  # long ones, by what the model says for them


@tool(needs="read")
def echo(text: str = "") -> str:
    """Say it again.

    text: what to say
    """
    return TEXTS.get(text, text)


def say(*texts: str) -> Message:
    """A step that calls `echo` once for each text; only the results are long, never the calls."""
    keys = [text if len(text) < 100 else f"{text[:9]} {next(COUNT)}" for text in texts]
    TEXTS.update(zip(keys, texts, strict=True))
    return {"calls": [{"name": "echo", "arguments": {"text": key}} for key in keys]}


def recall(query: str) -> Message:
    """A step that looks into the archive."""
    return {"call": "recall", "arguments": {"query": query}}


def overflow(message: str = "the prompt is too long", **more: Any) -> Message:
    """The refusal of a request that is larger than the window."""
    return {"fault": "context_overflow", "message": message, **more}


def size_of(request: Any) -> int:
    """The tokens of a request, as the server counts them."""
    return len(request.raw) // 4 + 1


NOTES: dict[str, Any] = {
    "good": NOTE,
    "empty": {"fault": "empty_reply"},
    "template only": TEMPLATE,
    "refusal": SORRY,
    "refusal of the API": {"fault": "refusal"},
    "tool call": say("x"),
    "400": {"status": 400, "body": {"error": {"message": "no notes today"}}},
    "500": {"status": 500},
    "cut stream": {"fault": "cut_text"},
    "cut by length": {"text": "half a no", "finish_reason": "length"},
    "longer": lambda request: "x" * (3 * len(request.raw) + 1000),
    "only small": lambda request: overflow() if size_of(request) > 1500 else NOTE,
}
FAILING = [name for name in NOTES if name not in ("good", "only small")]


class Play:
    """The model of a case: notes of the given kinds in turn, and the steps of its work."""

    def __init__(
        self,
        work: Iterable[Any] = (),
        notes: Iterable[str] = ("good",),
        *,
        window: int = 0,
        refusal: Message | None = None,
        usage: Callable[[Any], Message] | None = None,
    ) -> None:
        self.work, self.notes = iter(work), itertools.cycle(notes)
        self.window, self.refusal, self.usage = window, refusal or overflow(), usage
        self.look: Callable[[], Any] = lambda: None  # what to note down at each note
        self.seen: list[Any] = []
        self.refused = 0

    def __call__(self, request: Any) -> Any:
        if self.window and size_of(request) > self.window:
            self.refused += 1
            return self.refusal
        if "tools" not in request:
            self.seen.append(self.look())
            return NOTES.get(kind := next(self.notes), kind)
        step = next(self.work, "done")
        step = {"text": step} if isinstance(step, str) else step
        return {**step, "usage": self.usage(request)} if self.usage else step


@dataclasses.dataclass
class Stage:
    """An agent, the server that is its model, and what it reported."""

    agent: Agent
    server: FlakyServer
    play: Play
    events: list[tuple[str, Message]]
    passes: list[int]  # how many requests stood before each pass

    @property
    def messages(self) -> list[Message]:
        """The transcript."""
        return self.agent.transcript.messages

    @property
    def work(self) -> list[Any]:
        """The requests with tools."""
        return [request for request in self.server.requests if "tools" in request]

    @property
    def asked(self) -> list[Any]:
        """The requests for a note."""
        return [request for request in self.server.requests if "tools" not in request]

    def too_large(self, window: int) -> int:
        """How many of the requests with tools were larger than the window."""
        return sum(size_of(request) > window for request in self.work)

    def of(self, kind: str) -> list[Message]:
        """The events of a kind."""
        return [data for name, data in self.events if name == kind]

    def saved(self) -> Message:
        """The session as it is on disk."""
        path = self.agent.session.path
        assert path is not None
        return json.loads(path.read_text())

    def archive(self) -> list[Message]:
        """The archive on disk; it counts up to the length that the session knows."""
        path = self.agent.session.path
        assert path is not None
        archive = path.with_suffix(".archive.jsonl")
        data = archive.read_bytes() if archive.exists() else b""
        return [json.loads(line) for line in data[: self.saved().get("archived", 0)].splitlines()]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One workspace for all sessions of this file."""
    return tmp_path_factory.mktemp("compaction")


@contextlib.contextmanager
def staged(
    root: Path, play: Play, history: Iterable[Message] = (), **options: Any
) -> Iterator[Stage]:
    """An agent in a session with this past; at the end all that was sent must have been valid."""
    events: list[tuple[str, Message]] = []
    passes: list[int] = []

    def report(kind: str, **data: Any) -> None:
        events.append((kind, data))
        if kind == "compacted":
            passes.append(len(server.requests))

    fields: dict[str, Any] = {"mode": "auto", "sandbox": "off", "bare": True}
    fields |= {"tools": ("echo", "recall"), "environ": {"PATH": os.environ["PATH"]}} | options
    with FlakyServer(itertools.repeat(play)) as server:
        ident = f"20250101-000000-{next(COUNT):04x}"
        session = begun(root, ident, [*history]) if history else None
        known = Settings(
            base_url=server.url, api_key="x", model="flaky-1", workspace=str(root), **fields
        )
        agent = build_agent(
            known, tools=[echo], emit=report, session=session, sleep=lambda seconds: None
        )
        try:
            yield Stage(agent, server, play, events, passes)
            assert [p for request in server.requests for p in request.problems] == []
            assert (server.errors, problems(agent.transcript.messages)) == ([], [])
        finally:
            agent.close()


def begun(root: Path, ident: str, history: list[Message]) -> Any:
    """A session that an earlier process left, open."""
    turns = [at for at, message in enumerate(history) if message["role"] == "user"]
    path = put_session(root, ident, history, turns=turns)
    return resume_session(path.parent, ident)[0]


def call(ident: str, text: str) -> Message:
    """One call of `echo` as it stands in a message."""
    arguments = json.dumps({"text": text})
    return {"id": ident, "type": "function", "function": {"name": "echo", "arguments": arguments}}


def step(name: str, *results: str) -> list[Message]:
    """A reply that calls `echo` once for each result, and the results."""
    calls = [call(f"{name}x{n}", f"{name} {n}") for n in range(len(results))]
    asks = {"role": "assistant", "content": f"<{name}> I look.", "tool_calls": calls}
    answers = [
        {"role": "tool", "tool_call_id": one["id"], "content": text}
        for one, text in zip(calls, results, strict=True)
    ]
    return [asks, *answers]


def filled(name: str, size: int, word: str = "word ") -> str:
    """A text of about this many characters with its name at both ends."""
    return f"<{name}> {word * (size // len(word))} </{name}>"


def talk(turns: Iterable[Iterable[Iterable[tuple[int, str]]]]) -> list[Message]:
    """A past: turns of steps of results, each given by its size and the word that fills it."""
    messages: list[Message] = [SYSTEM]
    for n, steps in enumerate(turns):
        messages.append({"role": "user", "content": f"<u{n}> prompt number {n}, please"})
        for k, results in enumerate(steps):
            name = f"t{n}s{k}"
            texts = [filled(f"{name}r{i}", *result) for i, result in enumerate(results)]
            messages += step(name, *texts)
        messages.append({"role": "assistant", "content": f"<a{n}> done with {n}"})
    return messages


def plain(turns: int, size: int = 300, steps: int = 4) -> list[Message]:
    """A past of equal turns without anything large in it."""
    return talk([[[(size, "word ")]] * steps] * turns)


def bare(message: Message) -> Message:
    """A message as it is sent."""
    return {key: value for key, value in message.items() if key != "_"}


def texts(messages: Iterable[Message], *roles: str) -> str:
    """What the messages of these roles say, in one text."""
    return "\n".join(m["content"] or "" for m in messages if m["role"] in roles)


def not_kept_once(one: Stage, originals: Iterable[Message]) -> list[str]:
    """Messages that are not exactly once in the archive or the transcript."""
    kept = [bare(message) for message in (*one.archive(), *one.messages)]
    return [str(message)[:90] for message in originals if kept.count(bare(message)) != 1]


def live_results_not_kept_once(one: Stage) -> list[str]:
    """Results of this run that are not exactly once, whole, in the archive or the transcript."""
    kept = [(m.get("tool_call_id"), m["content"]) for m in (*one.archive(), *one.messages)]
    lost = []
    for told in one.of("tool_result"):
        found = [t for i, t in kept if i == told["id"] and t.startswith(told["content"])]
        if len(found) != 1:
            lost.append(told["content"][:90])
    return lost


def changed_prefixes(one: Stage) -> list[int]:
    """The requests that do not begin with all of the request before, though no pass was between."""
    with_tools = [(n, r) for n, r in enumerate(one.server.requests) if "tools" in r]
    found = []
    for (m, before), (n, after) in itertools.pairwise(with_tools):
        passed = any(m < mark <= n for mark in one.passes)
        if not passed and not after.raw.startswith(before.raw.removesuffix(b"]}")):
            found.append(n)
    return found


def turns_that_lead_astray(one: Stage, prompts: list[str]) -> list[str]:
    """Entries of the header's `turns` that do not lead to their prompt; 0 stands for a gone one."""
    turns = one.agent.session.header["turns"]
    assert len(turns) == len(prompts)
    told = zip(turns, prompts, strict=True)
    return [text for at, text in told if at and one.messages[at]["content"] != text]


# -- random cases --------------------------------------------------------------------------------

WORDS = ["word ", "数据库连接", "x", "e\N{COMBINING ACUTE ACCENT} ", "\N{GRINNING FACE}", "a\n"]
RESULT = st.tuples(st.sampled_from([5, 5, 80, 400, 2_000, 9_000, 40_000]), st.sampled_from(WORDS))
STEPS = st.lists(st.lists(RESULT, min_size=1, max_size=4), max_size=4)
SIZES = st.sampled_from([2_000, 4_000, 6_000, 8_000, 12_000, 20_000, 50_000, 199_000])
WINDOWS = st.builds(int.__add__, SIZES, st.integers(0, 999))
CASES = {
    "past": st.lists(STEPS, max_size=7),
    "live": st.lists(st.lists(RESULT, min_size=1, max_size=3), max_size=5),
    "window": WINDOWS,
    "knows": st.sampled_from(["told", "told", "from the error", "never"]),
    "compact_at": st.sampled_from([0.75, 0.75, 0.5, 0.9, 0.2, 0.02, 9_000.0, 60_000.0]),
    "notes": st.lists(st.sampled_from(sorted(NOTES)), min_size=1, max_size=3),
    "passes": st.integers(0, 2),
}


def bound(one: Stage, past: list[Message], live: int, window: int) -> int:
    """More requests than this are a loop: a few for each step, and for each piece of the past."""
    pieces = len(json.dumps(past, ensure_ascii=False).encode()) // window + 2
    return 15 * (live + 4) + 10 * pieces


def any_case_ends_well(root: Path, past: Any, live: Any, passes: int, **case: Any) -> None:
    """One random case: passes by hand, then a task, then everything that must hold is looked at."""
    history = talk(past) if past else []
    window, knows = case["window"], case["knows"]
    work = [
        say(*(filled(f"l{n}r{i}", min(size, 9_000), word) for i, (size, word) in enumerate(row)))
        for n, row in enumerate(live)
    ]
    words = (
        f"maximum context length is {window} tokens" if knows == "from the error" else "too long"
    )
    play = Play(work, case["notes"], window=window, refusal=overflow(words))
    told = window if knows == "told" else 0
    with staged(root, play, history, context=told, compact_at=case["compact_at"]) as one:
        for _ in range(passes if history else 0):
            one.agent.compact()
            assert problems(one.messages) == []
        result = one.agent.run(TASK)
        assert len(one.server.requests) <= bound(one, history, len(live), window)
        assert (result.status, result.exit_code) in (("done", 0), ("error", 1))
        if window >= 6_000 and knows != "never" and case["compact_at"] >= 0.5:
            assert result.status == "done", one.of("notice")
        assert [1 for request in one.work if TASK not in texts(request["messages"], "user")] == []
        assert not_kept_once(one, history[1:]) == []
        assert live_results_not_kept_once(one) == []
        assert changed_prefixes(one) == []
        prompts = [m["content"] for m in history if m["role"] == "user"]
        assert turns_that_lead_astray(one, [*prompts, TASK]) == []
        assert one.saved()["messages"] == one.messages
        assert [e for e in one.of("compacted") if e["tokens_after"] >= e["tokens_before"]] == []


@QUICK
@given(**CASES)
def test_any_past_with_any_window_and_any_writer_of_notes_ends_well(root: Path, **case: Any):
    any_case_ends_well(root, **case)


@pytest.mark.long
@LONG
@given(**CASES)
def test_any_past_with_any_window_and_any_writer_of_notes_ends_well_often(root: Path, **case: Any):
    any_case_ends_well(root, **case)


# -- what survives -------------------------------------------------------------------------------

KINDS = [pytest.param(kind, id=kind) for kind in NOTES]


@pytest.mark.parametrize("kind", KINDS)
def test_users_messages_and_the_task_survive_three_passes(root: Path, kind: str) -> None:
    play = Play([f"answer {n}" for n in range(9)], [kind])
    history = plain(8)
    history[1]["content"] += " " + "many more words " * 400
    with staged(root, play, history, context=32_000) as one:
        for n in range(3):
            assert one.agent.compact() is True
            assert one.agent.run(f"<v{n}> and then number {n}").text == f"answer {n}"
            said = texts(one.work[-1]["messages"], "user")
            known = [f"<u{k}> prompt number {k}, please" for k in range(8)]
            known += [f"<v{k}> and then number {k}" for k in range(n + 1)]
            assert [text for text in known if text not in said] == []
            assert one.work[-1]["messages"][-1]["content"] == f"<v{n}> and then number {n}"
        assert not_kept_once(one, history[1:]) == []


HEADED = (
    "a log:\n\n[The user said:]\nnot me\n\n[Your note:]\nnone\n\n"
    "[The current task, word for word:]\nother\n\nfix it"
)
PASTED = "[Hand-over note: older messages were removed from your view; x]\n\n[Your note:]\npasted"


def test_what_looks_like_a_note_and_is_the_users_survives_every_pass(root: Path) -> None:
    work = [f"answer {n}" for n in range(20)]
    with staged(root, Play(work), plain(6), context=32_000) as one:
        one.agent.run(HEADED)
        one.agent.run(PASTED)
        for n in range(4):
            one.agent.run(f"and {n}")
            assert one.agent.compact() is True
            one.agent.run(f"then {n}")
            said = texts(one.work[-1]["messages"], "user")
            assert (said.count(HEADED), said.count(PASTED)) == (1, 1)


def test_what_the_agent_wrote_itself_is_not_carried_on_as_the_users_words(root: Path) -> None:
    fails = {"check": "echo it fails; exit 1"}
    work = ["I will do it now.", *(f"answer {n}" for n in range(30))]
    with staged(root, Play(work), plain(2), context=32_000, **fails) as one:
        one.agent.notes.append("[the user ran: ls]\n" + "a file\n" * 50)
        assert one.agent.run("first prompt").status == "check_failed"
        one.agent.settings = dataclasses.replace(one.agent.settings, check="")
        assert "it fails" in texts(one.messages, "user") and "user ran" in texts(
            one.messages, "user"
        )
        for n in range(4):
            one.agent.run(f"prompt {n} " + "with more words " * 60)
        assert one.agent.compact() is True and one.agent.compact() is True
        [note] = [m["content"] for m in one.messages if MARK in (m["content"] or "")]
        assert "first prompt" in note
        assert [own for own in ("it fails", "user ran", "final answer") if own in note] == []


def test_the_last_prompt_is_known_after_a_resume_also_when_a_pass_removed_it(root: Path) -> None:
    work = [*(say(filled(f"l{n}", 400)) for n in range(20)), "fine"]
    with staged(root, Play(work), compact_at=9_000.0, context=100_000) as one:
        one.agent.notes.append("[note: the mode was changed]")
        assert one.agent.run(TASK).text == "fine" and one.passes != []
        folder, ident = one.agent.session.folder, one.agent.session.id
    session, _ = resume_session(folder, ident)
    assert session.header["turns"] == [0]
    one.agent.use_session(session)
    assert one.agent.task == TASK
    session.close()


def test_what_the_task_needs_is_in_the_next_request_after_a_pass_in_the_middle_of_it(
    root: Path,
) -> None:
    work = [say(filled(f"l{n}", 300), f"{n} small") for n in range(40)]
    with staged(root, Play(work), compact_at=12_000.0, context=100_000) as one:
        assert one.agent.run(TASK).text == "done"
        assert len(one.passes) >= 2
        for mark in one.passes:
            sent = one.server.requests[mark]["messages"]
            assert TASK in texts(sent, "user") and MARK in texts(sent, "user")
            assert sent[-1]["role"] == "tool" and sent[-1]["content"].endswith("small")
            assert sent[-2]["content"].endswith("</l" + sent[-1]["content"].split()[0] + ">")


# -- the rungs -----------------------------------------------------------------------------------


def test_old_large_results_are_clipped_and_the_last_steps_untouched(root: Path) -> None:
    history = talk([[[(18_000, "word ")], [(18_000, "word ")]], [[(60, "a ")]] * 3])
    with staged(root, Play([say("one more")]), history, context=12_000) as one:
        assert one.agent.run(TASK).text == "done"
        assert not_kept_once(one, history[1:]) == []
        assert max(map(size_of, one.work)) < 12_000
        assert history[-8:] == [bare(m) for m in one.messages[-12:-4]]


@pytest.mark.parametrize("kind", [pytest.param(kind, id=kind) for kind in FAILING])
def test_a_rung_that_fails_leaves_all_as_it_was_until_the_next_one(root: Path, kind: str) -> None:
    history = plain(10)
    with staged(root, Play(["fine"], [kind]), history, context=60_000) as one:
        one.play.look = lambda: (one.saved()["messages"], [*one.messages], len(one.passes))
        before = one.play.look()
        assert one.agent.compact() is True
        assert one.play.seen != [] and all(seen == before for seen in one.play.seen)
        assert (len(one.of("compacted")), len(one.messages) < len(history)) == (1, True)
        assert one.agent.run("go on").text == "fine"
        sent = json.dumps(one.work[-1]["messages"])
        assert [bad for bad in (SORRY, json.dumps(TEMPLATE)[1:-1], "x" * 99) if bad in sent] == []
        assert not_kept_once(one, history[1:]) == []


@pytest.mark.parametrize(
    "note",
    [
        pytest.param(NOTE, id="headings with content"),
        pytest.param("Read a.py, changed nothing; the tests of b.py:7 fail.", id="one sentence"),
        pytest.param(f"{NOTE}\nThe user said: {SORRY}", id="with a word of a refusal"),
        pytest.param("任务：修复解析器。文件：parser.py:12。下一步：运行测试。", id="Chinese"),
    ],
)
def test_a_good_note_of_any_look_is_taken(root: Path, note: str) -> None:
    with staged(root, Play(["fine"], [note]), plain(10), context=60_000) as one:
        assert (one.agent.compact(), len(one.asked)) == (True, 1)
        one.agent.run("go on")
        assert note in texts(one.work[-1]["messages"], "user")


def test_a_past_that_does_not_fit_is_summarised_in_pieces(root: Path) -> None:
    play = Play(["fine"], window=4_000)
    with staged(root, play, plain(24, 600), context=4_000) as one:
        assert one.agent.run(TASK).text == "fine"
        assert (len(one.asked) >= 1, play.refused) == (True, 0)
        assert MARK in texts(one.work[-1]["messages"], "user")


def test_the_note_is_asked_for_as_flat_text_without_tools(root: Path) -> None:
    with staged(root, Play(), plain(10), context=60_000) as one:
        assert one.agent.compact("keep the SQL schema") is True
        [request] = one.asked
        assert {"tools", "tool_choice", "parallel_tool_calls", "functions"} & set(request) == set()
        shapes = {(m["role"], *sorted(m)) for m in request["messages"]}
        assert shapes == {("system", "content", "role"), ("user", "content", "role")}
        said = texts(request["messages"], "user")
        assert "keep the SQL schema" in said and "<t0s0r0> word" in said and "echo" in said


def test_without_a_focus_no_focus_is_asked_for(root: Path) -> None:
    with staged(root, Play(), plain(10), context=60_000) as one:
        screen = Screen(io.StringIO(), io.StringIO())
        repl = Repl(one.agent, Person(screen, io.StringIO()))
        repl.take("/compact")
        repl.take("first prompt")
        repl.take("second prompt")
        repl.take("/compact  keep the SQL schema ")
        said = [texts(request["messages"], "user") for request in one.asked]
        assert ["keep the SQL schema" in text for text in said] == [False, True]


def test_the_receipt_tells_the_figures_and_where_the_originals_are(root: Path) -> None:
    with staged(root, Play(), plain(10), context=60_000) as one:
        before = len(one.messages)
        one.agent.compact()
        [event] = one.of("compacted")
        figures = ["messages_before", "messages_after", "tokens_before", "tokens_after"]
        assert sorted(event) == sorted([*figures, "archive"])
        assert (event["messages_before"], event["messages_after"]) == (before, len(one.messages))
        assert event["tokens_after"] < event["tokens_before"]
        assert str(event["archive"]).endswith(f"{one.agent.session.id}.archive.jsonl")
        assert len(one.archive()) >= before - len(one.messages)
        path = one.agent.session.path.with_suffix(".archive.jsonl")
        assert path.stat().st_mode & 0o777 == 0o600
        err = io.StringIO()
        Screen(io.StringIO(), err).emit("compacted", **event)
        wanted = [*(str(event[name]) for name in figures), path.name]
        assert err.getvalue().count("\n") == 1
        assert [part for part in wanted if part not in err.getvalue().replace(",", "")] == []


def test_a_clipped_result_names_the_file_that_has_all_of_it(root: Path) -> None:
    told = "[the rest is not shown: read_file .agent/output/x/1.txt]"
    result = {"role": "tool", "tool_call_id": "1", "content": f"{'x' * 3000}\n{told}\n" * 2}
    with staged(root, Play(), plain(1)) as one:
        [made] = Compaction(one.agent, "", by_itself=False, refused=False).clipped([result], 1000)
    assert len(made["content"]) <= 1000
    assert "the whole output: read_file .agent/output/x/1.txt" in made["content"]


def test_a_session_in_memory_keeps_its_archive_in_memory(root: Path) -> None:
    work = [say(filled(f"l{n}", 3_000)) for n in range(10)] + [recall("</l0>"), "end"]
    options = {"save_session": False, "compact_at": 20_000.0, "context": 100_000}
    with staged(root, Play(work), **options) as one:
        assert one.agent.run(TASK).text == "end"
        gone = [m["content"] for m in one.agent.session.archived() if m["role"] == "tool"]
        assert gone[:2] == [filled("l0", 3_000), filled("l1", 3_000)]
        assert "<l0> word" in texts(one.work[-1]["messages"][-1:], "tool")


# -- overflow, giants and what can not be mended -------------------------------------------------

LIMIT = 8_192
OVERFLOWS = {
    "OpenAI": "This model's maximum context length is 8192 tokens. However, your messages resulted"
    " in 9001 tokens. Please reduce the length of the messages.",
    "vLLM": "This model's maximum context length is 8192 tokens. However, you requested 9001 tokens"
    " (8001 in the messages, 1000 in the completion).",
    "Anthropic": "prompt is too long: 9001 tokens > 8192 maximum",
    "Gemini": "The input token count (9001) exceeds the maximum number of tokens allowed (8192).",
    "llama.cpp": "the request exceeds the available context size (8192 tokens)",
    "Mistral": "Prompt contains 9001 tokens, too large for model with 8192 maximum context length",
    "OpenRouter": "This endpoint's maximum context length is 8192 tokens. However, you requested"
    " about 9001 tokens",
    "DashScope": "Range of input length should be [1, 8192]",
    "Groq": "Please reduce the length of the messages or completion.",
    "Bedrock": "Input is too long for requested model.",
    "Ollama": "the input length exceeds the context length",
    "Doubao": "Total tokens of image and text exceed max message tokens.",
    "Zhipu": "tokens in request more than max tokens allowed",
    "LiteLLM": "litellm.ContextWindowExceededError: the context window is exceeded",
}


@pytest.mark.parametrize("server", [pytest.param(name, id=name) for name in OVERFLOWS])
def test_an_overflow_enters_the_ladder_and_is_retried_once(root: Path, server: str) -> None:
    text = OVERFLOWS[server]
    work = [*(say(filled(f"l{n}", 300)) for n in range(3)), "fine"]
    play = Play(work, window=LIMIT, refusal=overflow(text, code="invalid_request_error"))
    with staged(root, play, plain(18)) as one:
        assert one.agent.run(TASK).text == "fine"
        assert (one.too_large(LIMIT), len(one.passes) >= 1) == (1, True)
        assert size_of(one.work[0]) > LIMIT
        if "8192" in text:
            assert one.agent.client.window == LIMIT
        assert len(one.of("retry")) == 0


def test_a_second_overflow_ends_the_turn_and_another_prompt_is_possible(root: Path) -> None:
    play = Play(["fine"], window=600, refusal=overflow("the prompt is too long"))
    with staged(root, play, plain(10), context=60_000) as one:
        result = one.agent.run(TASK)
        assert (result.status, result.exit_code, len(one.work)) == ("error", 1, 2)
        assert "too long" in one.of("notice")[-1]["text"]
        play.window = 0
        assert one.agent.run("again").text == "fine"


@pytest.mark.parametrize(
    ("window", "result"),
    [
        pytest.param(4_000, ["word "], id="one"),
        pytest.param(12_000, ["数据库"], id="one of Chinese"),
        pytest.param(16_000, ["word "] * 4, id="four at once"),
    ],
)
@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
def test_a_giant_result_of_the_last_step_is_clipped(
    root: Path, window: int, result: list[str], told: bool
) -> None:
    giants = [filled(f"g{n}", 19_000, word) for n, word in enumerate(result)]
    refusal = overflow(f"maximum context length is {window} tokens")
    play = Play([say(*giants), "fine"], window=window, refusal=refusal)
    with staged(root, play, context=window if told else 0) as one:
        assert one.agent.run(TASK).text == "fine"
        assert one.too_large(window) == (0 if told else 1)
        assert live_results_not_kept_once(one) == []
        sent = one.work[-1]["messages"]
        assert [m["role"] for m in sent[-len(giants) :]] == ["tool"] * len(giants)
        assert "<g0>" in texts(sent, "tool") and TASK in texts(sent, "user")


GIANT = "".join(f"line {n} of a giant\n" for n in range(5_000))
GIANTS = [
    pytest.param({"call": "write_file", "arguments": {"path": "g", "content": GIANT}}, id="call"),
    pytest.param({**say("x"), "text": GIANT}, id="text beside a call"),
    pytest.param({**say("x"), "reasoning": GIANT}, id="reasoning beside a call"),
    pytest.param(GIANT, id="answer"),
]


@pytest.mark.parametrize("later", [0, 6], ids=["last step", "older"])
@pytest.mark.parametrize("giant", GIANTS)
def test_a_giant_reply_is_clipped_and_the_turn_goes_on(
    tmp_path: Path, giant: Any, later: int
) -> None:
    work = [giant, *(say(f"l{n}") for n in range(later)), "fine", "fine", "end"]
    options = {"tools": ("write_file", "echo", "recall"), "context": 8_000}
    with staged(tmp_path, Play(work, window=8_000), **options) as one:
        assert [one.agent.run(TASK).status for _ in range(3)] == ["done"] * 3
        assert (one.play.refused, one.of("notice")) == (0, [])
        kept = [m for m in (*one.archive(), *one.messages) if GIANT in str(m.get("content"))]
        kept += [m for m in one.archive() if len(str(m.get("tool_calls"))) > len(GIANT)]
        kept += [m for m in one.archive() if m.get("reasoning_content") == GIANT]
        assert len(kept) == 1
        told = [line for line in markdown(one.agent.session) if "write_file" in line]
        assert len(told) == (1 if giant is GIANTS[0].values[0] else 0)


def test_after_a_prompt_that_is_too_large_the_next_one_is_not_refused(root: Path) -> None:
    with staged(root, Play(["fine"], window=8_000), plain(3), context=8_000) as one:
        assert one.agent.run("word " * 20_000).status == "error"
        assert [n["level"] for n in one.of("notice")] == ["error"]
        refused = one.play.refused
        assert (one.agent.run("small").text, one.play.refused) == ("fine", refused)


@pytest.mark.parametrize(
    ("budget", "by_itself"),
    [("tokens", False), ("tokens", True), ("USD", False), ("seconds", True)],
)
def test_without_a_budget_no_note_is_asked_for(root: Path, budget: str, by_itself: bool) -> None:
    with staged(root, Play(), plain(10), context=6_000) as one:
        one.agent.budgets.limits[budget] = 1e-9
        one.agent.budgets.tokens, one.agent.budgets.money = 1, 1.0
        assert one.agent.compact(by_itself=by_itself) is True
        assert one.asked == [] and "budget" in one.of("notice")[-1]["text"]


def test_by_hand_the_time_and_the_steps_of_the_last_prompt_do_not_count(root: Path) -> None:
    with staged(root, Play(), plain(10), context=60_000) as one:
        one.agent.budgets.limits |= {"seconds": 1e-9, "steps": 1e-9}
        one.agent.budgets.steps = 1
        assert (one.agent.compact(), len(one.asked), one.of("notice")) == (True, 1, [])


def test_a_giant_result_in_a_resumed_session_does_not_lock_it(root: Path) -> None:
    history = [*talk([[[(80, "a ")]]]), {"role": "user", "content": "read it"}]
    history += step("big", filled("big", 400_000))
    with staged(root, Play(["fine"], window=16_000), history, context=16_000) as one:
        assert one.agent.run(TASK).text == "fine"
        assert (one.play.refused, not_kept_once(one, history[1:])) == (0, [])


def test_a_fixed_part_over_the_window_ends_clearly_without_endless_notes(root: Path) -> None:
    options = {"append_system_prompt": "a rule of the house. " * 1_000}
    play = Play(["fine"] * 9, window=4_000, refusal=overflow("the prompt is too long"))
    with staged(root, play, plain(3), context=4_000, **options) as one:
        for n in range(4):
            result = one.agent.run(f"prompt {n}")
            assert (result.status, result.exit_code) == ("error", 1)
        assert len(one.asked) <= 8 and len(one.work) <= 8
        assert re.search("window|context|too long", one.of("notice")[-1]["text"])
    play = Play(["fine"] * 9, window=40_000)
    with staged(root, play, plain(3), context=40_000, **options) as one:
        assert [one.agent.run("hi").text for _ in range(4)] == ["fine"] * 4
        assert (one.asked, one.of("compacted")) == ([], [])


def test_what_does_not_fit_a_window_that_is_known_is_not_sent_for_ever(root: Path) -> None:
    work = [say(f"<l{n}> little") for n in range(20)]
    options = {"append_system_prompt": "a rule of the house. " * 1_000}
    with staged(root, Play(work), plain(3), context=4_000, **options) as one:
        result = one.agent.run(TASK)
        assert (result.status, result.exit_code, len(one.work) < 20) == ("error", 1, True)
        assert "does not fit" in one.of("notice")[-1]["text"]


def test_two_poor_passes_are_not_followed_by_a_third(root: Path) -> None:
    play = Play([say(f"<l{n}> little") for n in range(60)])
    fixed = {"append_system_prompt": "a rule of the house. " * 1_000}  # what no pass can shorten
    with staged(root, play, plain(1), compact_at=300.0, context=100_000, **fixed) as one:
        one.agent.run(TASK)
        assert 1 <= len(one.asked) <= 6
        assert len(one.work) <= 62


# -- rows of the catalogue -----------------------------------------------------------------------


def counted(tokens: int) -> Callable[[Any], Message]:
    """What a server claims that lost count."""
    return lambda request: {"prompt_tokens": tokens, "completion_tokens": 1}


def double(request: Any) -> Message:
    """A tokenizer that makes twice as many tokens as one expects."""
    return {"prompt_tokens": 2 * size_of(request), "completion_tokens": 5}


def nothing(request: Any) -> Message:
    """No usage worth the name."""
    return {"prompt_tokens": 0, "completion_tokens": 0}


LARGE, SMALL = plain(20), plain(3)  # about 12,500 and 2,500 tokens with all around them
ROWS = [  # the past, the settings, what the server counts, and whether a pass is due
    pytest.param(LARGE, {"context": 14_000}, None, True, id="C1 above the threshold"),
    pytest.param(LARGE, {"context": 14_000}, nothing, True, id="C2 no usage"),
    pytest.param(SMALL, {"context": 14_000}, nothing, False, id="C2 no usage, small"),
    pytest.param(LARGE, {"context": 14_000}, counted(-5), True, id="C2 negative usage"),
    pytest.param(SMALL, {"context": 14_000}, counted(10**12), False, id="C8 usage over the window"),
    pytest.param(LARGE, {"context": 30_000}, double, True, id="C8 the server counts more"),
    pytest.param(LARGE, {"context": 30_000}, None, False, id="C8 the server counts alike"),
    pytest.param(LARGE, {"context": 16_000, "compact_at": 0.9}, None, False, id="C23 a high share"),
    pytest.param(LARGE, {"context": 16_000, "compact_at": 0.7}, None, True, id="C23 a lower share"),
    pytest.param(LARGE, {"context": 100_000, "compact_at": 0.1}, None, True, id="C23 a low share"),
    pytest.param(LARGE, {"context": 14_000, "compact_at": 0.0}, None, False, id="C23 off"),
    pytest.param(LARGE, {"compact_at": 40_000.0}, None, True, id="C23 characters"),
    pytest.param(SMALL, {"compact_at": 40_000.0}, None, False, id="C23 characters, small"),
    pytest.param(LARGE, {}, None, False, id="C20 nothing told: 128,000 tokens"),
]


@pytest.mark.parametrize(("past", "options", "usage", "due"), ROWS)
def test_a_pass_comes_when_it_is_due_and_only_once(
    root: Path, past: list[Message], options: dict[str, Any], usage: Any, due: bool
) -> None:
    with staged(root, Play(["one", "two", "three"], usage=usage), past, **options) as one:
        assert [one.agent.run(f"prompt {n}").text for n in range(3)] == ["one", "two", "three"]
        assert len(one.of("compacted")) == (1 if due else 0)
        assert len(one.work) == 3


def test_input_and_output_of_every_request_fit_together(root: Path) -> None:
    work = [say(filled(f"l{n}", 2_000)) for n in range(12)]
    with staged(root, Play(work), plain(16), context=8_192) as one:
        assert one.agent.run(TASK).text == "done"
        names = ("max_tokens", "max_completion_tokens")
        wanted = [size_of(r) + sum(r.get(name, 0) for name in names) for r in one.server.requests]
        assert len(one.asked) >= 1 and max(wanted) <= 8_192


def test_nothing_is_reported_before_it_succeeded(root: Path) -> None:
    with staged(root, Play(["fine"], ["400"]), plain(10), context=60_000) as one:
        one.play.look = lambda: len(one.of("compacted"))
        one.agent.compact()
        assert (set(one.play.seen), len(one.of("compacted"))) == ({0}, 1)


def test_after_a_finished_turn_nothing_is_asked_or_added(root: Path) -> None:
    work = [*(say(filled(f"l{n}", 3_000)) for n in range(3)), "fine " * 3_000, "end"]
    with staged(root, Play(work), compact_at=18_000.0, context=100_000) as one:
        assert one.agent.run(TASK).status == "done"
        before = len(one.server.requests)
        assert (one.messages[-1]["role"], one.server.requests[-1]["messages"][-1]["role"]) == (
            "assistant",
            "tool",
        )
        assert one.agent.run("next").text == "end"
        assert [("tools" in r) for r in one.server.requests[before:]][-2:] in (
            [True],
            [False, True],
        )
        assert (len(one.work), len(one.of("compacted"))) == (5, 1)
        assert one.work[-1]["messages"][-1]["content"] == "next"


def test_the_rules_of_the_project_are_read_anew_at_each_pass(tmp_path: Path) -> None:
    (tmp_path / "AGENTS.md").write_text("Always use tabs.\n")
    with staged(tmp_path, Play(), plain(10), context=60_000, bare=False) as one:
        one.agent.compact()
        (tmp_path / "AGENTS.md").write_text("Never use tabs.\n")
        one.agent.run("hi")
        first, said = one.work[-1]["messages"][0]["content"], texts(one.messages, "user")
        assert ("Always use tabs." in first, "Never use tabs." in said) == (True, True)
        one.agent.compact()
        one.agent.run("hi again")
        first = one.work[-1]["messages"][0]["content"]
        assert ("Always use tabs." in first, "Never use tabs." in first) == (False, True)


def test_a_call_without_its_answer_is_answered_before_a_pass(root: Path) -> None:
    history = [*plain(10), {"role": "user", "content": "go"}, step("open", "never")[0]]
    with staged(root, Play(["fine"]), history, context=60_000) as one:
        assert one.agent.compact() is True
        assert problems(one.messages) == []
        assert one.agent.run("go on").text == "fine"


def test_a_window_that_the_error_tells_is_kept_in_mind(root: Path) -> None:
    refusal = overflow("maximum context length is 8192 tokens")
    work = [say(filled(f"l{n}", 2_500)) for n in range(12)]
    with staged(root, Play(work, window=8_192, refusal=refusal), plain(18)) as one:
        assert one.agent.run(TASK).text == "done"
        assert (one.too_large(8_192), len(one.passes) >= 2) == (1, True)


def test_the_whole_past_can_be_read_after_an_automatic_pass(root: Path) -> None:
    with staged(root, Play(["fine"]), LARGE, context=14_000) as one:
        one.agent.run(TASK)
        whole = [bare(m) for m in one.archive()] + [bare(m) for m in one.messages[2:]]
        assert [m for m in whole if m in LARGE[1:]] == LARGE[1:]
        assert [*one.agent.session.archived()] == one.archive()


def test_the_hand_over_is_there_after_a_resume_and_after_the_next_pass(root: Path) -> None:
    with staged(root, Play(["fine"]), plain(10), context=60_000) as one:
        one.agent.compact()
        one.agent.run("first prompt after it")
        before, ident = one.work[-1]["messages"], one.agent.session.id
        folder = one.agent.session.folder
    session, _ = resume_session(folder, ident)
    assert MARK in before[1]["content"]
    assert [bare(m) for m in session.transcript.messages[1:-1]] == before[1:]
    session.close()


# -- recall --------------------------------------------------------------------------------------


def answers(one: Stage) -> list[str]:
    """The results of the calls of this run."""
    return [event["content"] for event in one.of("tool_result")]


def test_recall_finds_what_the_archive_holds(root: Path) -> None:
    history = plain(10)
    history[2]["content"] = "The password policy lives in zebra_policy.py:77."
    history[3]["content"] = "数据库的端口是 5433 号。"
    queries = ["zebra_policy", "ZEBRA_POLICY.PY", "端口是 5433", "prompt number 0", "quagga"]
    with staged(root, Play([*map(recall, queries), "end"]), history, context=60_000) as one:
        one.agent.compact()
        assert one.agent.run(TASK).text == "end"
        found, again, chinese, prompt, nothing = answers(one)
        assert "zebra_policy.py:77" in found and "zebra_policy.py:77" in again
        assert "数据库的端口是 5433 号" in chinese and "<u0> prompt number 0" in prompt
        assert not nothing.startswith("error: ") and re.search("(?i)no|nothing", nothing)
        assert max(map(len, answers(one))) <= 20_000
        assert "zebra" not in nothing and {e["decision"] for e in one.of("tool_result")} == {
            "allow"
        }


def test_recall_says_that_nothing_was_archived_yet(root: Path) -> None:
    with staged(root, Play([recall("word"), "end"]), plain(3), context=60_000) as one:
        assert one.agent.run(TASK).text == "end"
        [nothing] = answers(one)
        assert re.search("(?i)no|nothing", nothing) and "<t0s0r0>" not in nothing


def test_recall_finds_it_after_a_resume_too_and_is_the_last_tool_of_ours(root: Path) -> None:
    with staged(root, Play(), plain(10), context=60_000) as one:
        one.agent.compact()
        folder, ident = one.agent.session.folder, one.agent.session.id
    session, _ = resume_session(folder, ident)
    known = {"mode": "plan", "bare": True, "workspace": str(root), "sandbox": "off"}
    with FlakyServer([recall("<t0s1r0>"), "end"]) as server:
        settings = Settings(base_url=server.url, api_key="x", model="flaky-1", **known)
        agent = build_agent(settings, tools=[echo], session=session)
        assert agent.run("what was it?").text == "end"
        agent.close()
    assert "<t0s1r0> word word" in server.requests[-1]["messages"][-1]["content"]
    names = [item["function"]["name"] for item in server.requests[0]["tools"]]
    assert names[-2:] == ["recall", "echo"]
    assert [request.problems for request in server.requests] == [[], []]


def test_what_a_crash_left_behind_the_archive_does_not_count(root: Path) -> None:
    with staged(root, Play([recall("ghost"), "end"]), plain(10), context=60_000) as one:
        one.agent.compact()
        path = one.agent.session.path.with_suffix(".archive.jsonl")
        with path.open("a") as file:
            file.write(json.dumps({"role": "user", "content": "a ghost"}) + '\n{"role": "us')
        assert one.agent.run(TASK).text == "end"
        assert "a ghost" not in answers(one)[0]
        assert one.agent.compact() is True
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        assert lines == one.archive()
        assert [line for line in lines if line["content"] == "a ghost"] == []


# -- undo ----------------------------------------------------------------------------------------


def edit(old: str, new: str) -> Message:
    """A step that edits `f`."""
    return {"call": "edit_file", "arguments": {"path": "f", "old": old, "new": new}}


def test_turns_are_undone_one_by_one_after_a_pass(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("zero\n")
    look = {"call": "read_file", "arguments": {"path": "f"}}
    filler = say(*(filled(f"l{n}", 3_000) for n in range(3)))
    work = [look, edit("zero", "one"), filler, "first", filler, "second", filler]
    work += [edit("one", "two"), "third", edit("two", "three"), "fourth", "fifth"]
    options = {"tools": (), "context": 60_000, "compact_at": 0.0}
    with staged(tmp_path, Play(work), **options) as one:
        prompts = [f"prompt {n}" for n in range(5)]
        for prompt in prompts[:3]:
            one.agent.run(prompt)
        assert one.agent.compact() is True
        assert turns_that_lead_astray(one, prompts[:3]) == []
        one.agent.run(prompts[3])
        assert turns_that_lead_astray(one, prompts[:4]) == []
        assert (tmp_path / "f").read_text() == "three\n"
        one.agent.undo(1, lambda line: None)
        assert ((tmp_path / "f").read_text(), one.messages[-1]["content"]) == ("two\n", "third")
        one.agent.undo(3, lambda line: None)
        assert (tmp_path / "f").read_text() == "zero\n"
        assert one.agent.run(prompts[4]).text == "fifth"


# -- the prefix ----------------------------------------------------------------------------------


def sixty_steps() -> list[Message]:
    """A task of sixty steps with calls side by side."""
    return [
        say(filled(f"l{n}", 400 + n), *(f"{n} and {k}" for k in range(n % 3))) for n in range(60)
    ]


def changed_elements(one: Stage) -> list[tuple[int, int]]:
    """(request, message) where an element of the request before is another one, between passes."""
    with_tools = [(n, r) for n, r in enumerate(one.server.requests) if "tools" in r]
    found = []
    for (m, before), (n, after) in itertools.pairwise(with_tools):
        if any(m < mark <= n for mark in one.passes):
            continue
        old = [json.dumps(message) for message in before["messages"]]
        new = [json.dumps(message) for message in after["messages"]]
        found += [(n, k) for k, line in enumerate(old) if new[k : k + 1] != [line]]
    return found


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        pytest.param({"compact_at": 12_000.0}, True, id="with passes"),
        pytest.param({"compact_at": 0.0}, False, id="without a pass"),
    ],
)
def test_each_request_of_a_long_task_begins_with_the_one_before(
    root: Path, options: dict[str, Any], passes: bool
) -> None:
    with staged(root, Play(sixty_steps()), context=100_000, tools=(), **options) as one:
        assert one.agent.run(TASK).text == "done"
        assert (len(one.work), len(one.passes) >= 2) == (61, passes)
        assert (changed_elements(one), changed_prefixes(one)) == ([], [])
        heads = {json.dumps({**request, "messages": 0}) for request in one.work}
        assert (len(heads), len({r["messages"][0]["content"] for r in one.work})) == (1, 1)
        lengths = [len(r["messages"]) for r in one.work]
        assert (lengths == sorted(lengths)) is not passes


def status_of(agent: Agent) -> str:
    """What /status shows."""
    out, err = io.StringIO(), io.StringIO()
    Repl(agent, Person(Screen(out, err), io.StringIO())).take("/status")
    return out.getvalue() + err.getvalue()


def test_status_names_the_first_message_that_differs_when_the_cache_is_missed(root: Path) -> None:
    share = [0.9]

    def usage(request: Any) -> Message:
        prompt = size_of(request)
        cached = {"cached_tokens": int(share[0] * prompt)}
        return {"prompt_tokens": prompt, "prompt_tokens_details": cached}

    work = [say(f"<l{n}>") for n in range(3)] + ["one", "two", "three"]
    with staged(root, Play(work, usage=usage), context=60_000, compact_at=0.0) as one:
        one.agent.run("prompt 1")
        one.agent.run("prompt 2")
        assert re.search(r"message(?: |s\[)\d", status_of(one.agent)) is None
        changed = {**one.messages[3], "content": "something else"}
        one.agent.transcript.replace([*one.messages[:3], changed, *one.messages[4:]])
        share[0] = 0.0
        one.agent.run("prompt 3")
        assert re.search(r"message(?: |s\[)3\b", status_of(one.agent))


# -- the real process ----------------------------------------------------------------------------


def test_a_pass_in_a_process_is_told_kept_and_recalled_by_the_next(
    run_agent: Any, workspace: Path
) -> None:
    (workspace / "f").write_text("".join(filled(f"f{n}", 300) + "\n" for n in range(40)))
    rows = [{"path": "f", "start": n, "end": n} for n in range(1, 41)]
    work = [{"call": "read_file", "arguments": row} for row in rows]
    play = Play([*work, "first answer", recall("</f0>"), "second answer"])
    with FlakyServer(itertools.repeat(play)) as server:
        env = {"AGENT_COMPACT_AT": "12000", "AGENT_CONTEXT": "100000"}
        first = run_agent("--yes", TASK, server=server, env=env)
        second = run_agent("--yes", "--resume", "go on", server=server)
    assert (first.returncode, first.stdout) == (0, "first answer\n")
    assert (second.returncode, second.stdout) == (0, "second answer\n")
    [path] = session_files(workspace)
    receipts = [line for line in first.stderr.splitlines() if f"{path.stem}.archive.jsonl" in line]
    assert receipts != [] and "compacted" in receipts[0]
    sent = server.requests[-1]["messages"]
    assert MARK in sent[1]["content"] and TASK in texts(sent, "user")
    assert "<f0> word word" in sent[-1]["content"]
    assert path.with_suffix(".archive.jsonl").stat().st_mode & 0o777 == 0o600
