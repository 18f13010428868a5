"""Loops, announcements and empty replies; memory (AGENTS.md); switching model and mode.

`stage` builds an agent in front of a scripted server, in this process; what a user sees of it is
looked at in real processes and on a terminal.
"""

import itertools
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stages
from conftest import prompts, put_session, results, roles, session_files

from agent import Agent, project_folders, shortened, tool
from flaky_server import FlakyServer, Pause, Reply

LONG = pytest.mark.long
OLD = "20260101-100000-aaaa"


class Stage(stages.Stage):
    """With what these tests ask it for."""

    @property
    def results(self) -> list[str]:
        """The results of all calls, in order."""
        return results({"messages": self.agent.transcript.messages})

    def reason(self) -> str:
        """Why it ended, as the last notice of an error says."""
        return [data["text"] for data in self.of("notice") if data["level"] == "error"][-1]

    def system(self) -> str:
        """The system message of the last request."""
        return self.server.requests[-1]["messages"][0]["content"]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    """Build agents; at the end all is closed, and every request and transcript was valid."""
    yield from stages.stages(tmp_path, Stage)


@tool(needs="read")
def echo(text: str = "", times: int = 1) -> str:
    """Say it again.

    text: what to say
    times: how often
    """
    return text * times


@tool(needs="read")
def same(text: str = "") -> str:
    """Give the same for every text.

    text: anything
    """
    return "nothing found"


@tool(needs="read")
def bad(text: str = "") -> str:
    """Fail in the same way for every text but `ok`.

    text: anything
    """
    if text == "ok":
        return "fine"
    raise RuntimeError("the disk is offline" if not text.startswith("other") else text)


@tool(needs="run")
def act(text: str = "") -> str:
    """Do something.

    text: what
    """
    return f"did {text}"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A step in which the model calls one tool."""
    return {"call": name, "arguments": arguments}


def say(*texts: str, name: str = "echo", **extra: Any) -> dict[str, Any]:
    """A step that calls a tool once for each text."""
    return {"calls": [{"name": name, "arguments": {"text": text}} for text in texts]} | extra


def fails(count: int, word: str = "try") -> list[Any]:
    """Steps that each call the tool that fails, with another argument."""
    return [say(f"{word} {n}", name="bad") for n in range(count)]


def noted(texts: list[str], plain: str) -> list[int]:
    """The numbers, from 1, of the results to which a note was added."""
    return [n for n, text in enumerate(texts, 1) if text.startswith(plain + "\n[")]


# -- the same again ------------------------------------------------------------------------------


def test_the_third_equal_call_is_noted_and_the_fifth_ends_the_turn(
    stage: Callable[..., Stage],
) -> None:
    one = stage([say("a")] * 9, tools=[echo])
    result = one.run()
    assert (result.status, result.exit_code, len(one.server.requests)) == ("error", 1, 5)
    assert (noted(one.results, "a"), len(one.results)) == ([3], 5)
    assert "echo" in one.reason()


@pytest.mark.parametrize(
    ("steps", "requests", "at"),
    [
        pytest.param([say("a"), say("b")] * 24, 40, [20], id="two by turns"),
        pytest.param([say("a", "b"), say("b", "a")] * 24, 20, [19], id="two in one reply"),
        pytest.param([*map(say, "xxy" + "abcbacabcacb" * 8)], 62, [33], id="three in any order"),
        pytest.param(
            [
                {"call": "echo", "arguments": {"text": "a", "times": 1}},
                {"call": "echo", "arguments": {"times": "1", "text": "a"}},
            ]
            * 9,
            5,
            [3],
            id="in other words",
        ),
    ],
)
def test_equal_calls_with_others_between_are_a_loop_while_nothing_new_comes(
    stage: Callable[..., Stage], steps: list[Any], requests: int, at: list[int]
) -> None:
    one = stage(steps, tools=[echo])
    assert (one.run().status, len(one.server.requests)) == ("error", requests)
    assert [n for n, text in enumerate(one.results, 1) if "\n[" in text] == at


def test_the_same_check_after_each_edit_is_no_loop(stage: Callable[..., Stage]) -> None:
    check = call("bash", command="echo '1 failed'; exit 1")
    steps = [[call("write_file", path="a.py", content=f"{n}\n"), check] for n in range(12)]
    one = stage([*itertools.chain(*steps), "done"])
    assert one.run().status == "done"
    assert [text for text in one.results if "[note" in text] == []


@LONG
def test_after_the_note_the_model_may_do_something_else(stage: Callable[..., Stage]) -> None:
    one = stage([*[say("a")] * 4, say("b"), *[say("a")] * 2, "done"], tools=[echo])
    assert (one.run().status, noted(one.results, "a")) == ("done", [3])


def test_equal_results_of_different_calls_are_no_loop(stage: Callable[..., Stage]) -> None:
    steps = [say(f"{n}", name="same") for n in range(12)]
    one = stage([*steps, say(*map(str, range(12)), name="same"), "done"], tools=[same])
    assert one.run().status == "done"
    assert one.results == ["nothing found"] * 24


def test_polling_that_changes_is_no_loop_and_polling_that_does_not_is(
    stage: Callable[..., Stage],
) -> None:
    count = itertools.count(1)

    @tool(needs="read")
    def poll(still: bool = False) -> str:
        """Look how far it is.

        still: do not move
        """
        return "0 %" if still else f"{next(count)} %"

    one = stage([*[call("poll")] * 12, "done", *[call("poll", still=True)] * 9], tools=[poll])
    assert [one.run().status, one.run().status] == ["done", "error"]
    assert one.results[:12] == [f"{n} %" for n in range(1, 13)]
    assert len(one.results) == 17


@LONG
def test_polling_a_command_is_no_loop_while_its_output_changes(
    stage: Callable[..., Stage],
) -> None:
    step = call("bash", command="echo x >> log; wc -l < log")
    one = stage([*[step] * 8, "done"])
    assert one.run().status == "done"
    assert [text.split()[0] for text in one.results] == [str(n) for n in range(1, 9)]


@LONG
def test_a_loop_is_a_1_with_a_reason_and_the_way_back(run_agent):
    with FlakyServer([call("list_files")] * 9) as server:
        done = run_agent("--output-format", "json", "hi", server=server)
    told = json.loads(done.stdout)
    assert (done.returncode, told["status"], told["exit_code"]) == (1, "error", 1)
    assert "list_files" in done.stderr
    assert f"agent --resume {told['session_id']}" in done.stderr.strip().splitlines()[-1]
    assert len(server.requests) == 5


# -- the same error ------------------------------------------------------------------------------


def test_the_same_error_is_noted_at_eight_and_ends_the_turn_at_ten_whatever_the_arguments(
    stage: Callable[..., Stage],
) -> None:
    one = stage(fails(20), tools=[bad])
    result = one.run()
    plain = one.results[0]
    assert (result.status, result.exit_code, len(one.server.requests)) == ("error", 1, 10)
    assert (noted(one.results, plain), len(one.results)) == ([8], 10)
    assert [text for text in one.results[:7] if text != plain] == []
    assert "bad" in one.reason()


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            [*fails(7), say("ok", name="bad"), *fails(7)], id="a success between", marks=LONG
        ),
        pytest.param([*fails(7), say("other", name="bad"), *fails(7)], id="another error between"),
        pytest.param(
            [say(f"other {n}", name="bad") for n in range(12)], id="other errors", marks=LONG
        ),
        pytest.param(fails(7), id="seven"),
    ],
)
def test_errors_that_are_not_eight_times_the_same_in_a_row_are_not_noted(
    stage: Callable[..., Stage], script: list[Any]
) -> None:
    one = stage([*script, "done"], tools=[bad])
    assert one.run().status == "done"
    assert [text for text in one.results if "\n[" in text] == []


@LONG
def test_after_the_note_a_success_lets_the_turn_go_on(stage: Callable[..., Stage]) -> None:
    one = stage([*fails(9), say("ok", name="bad"), *fails(7), "done"], tools=[bad])
    assert (one.run().status, noted(one.results, one.results[0])) == ("done", [8])


def test_arguments_that_are_no_json_are_one_error_whatever_they_are(
    stage: Callable[..., Stage],
) -> None:
    one = stage([*({"call": "bad", "arguments": f'{{"a": "{n}'} for n in range(12))], tools=[bad])
    assert (one.run().exit_code, len(one.server.requests)) == (1, 10)
    assert [n for n, text in enumerate(one.results, 1) if "\n[" in text] == [8]


def test_errors_of_one_reply_count_and_the_model_gets_to_see_the_note(
    stage: Callable[..., Stage],
) -> None:
    texts = [f"try {n}" for n in range(9)]
    one = stage([say(*texts, name="bad"), "done"], tools=[bad])
    assert (one.run().status, noted(one.results, one.results[0])) == ("done", [8])


def test_more_errors_of_one_reply_than_end_a_turn_are_told_first(
    stage: Callable[..., Stage],
) -> None:
    texts = [f"try {n}" for n in range(12)]
    one = stage([say(*texts, name="bad"), say("ok", name="bad"), "done"], tools=[bad])
    assert one.run().status == "done"


@tool(needs="read")
def quote(text: str = "") -> str:
    """Show what a command said once.

    text: which one
    """
    return "it failed\n[exit code 1]"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param("bash", [{"command": f"false {n}"} for n in range(9)], id="no word"),
        pytest.param("quote", [{"text": f"{n}"} for n in range(9)], id="the look of a command"),
    ],
)
def test_what_says_nothing_of_an_error_is_none(
    stage: Callable[..., Stage], name: str, arguments: list[dict[str, str]]
) -> None:
    calls = [{"name": name, "arguments": given} for given in arguments]
    one = stage([{"calls": calls}, "done"], tools=[quote])
    assert (one.run().status, len({*one.results})) == ("done", 1)
    assert one.results[0].endswith("[exit code 1]")


@LONG
def test_a_row_of_errors_does_not_reach_over_prompts(stage: Callable[..., Stage]) -> None:
    one = stage([*fails(7), "done", *fails(7), "done"], tools=[bad])
    assert [one.run().status, one.run().status] == ["done", "done"]
    assert [text for text in one.results if "\n[" in text] == []


@pytest.mark.parametrize("path", ["{}.txt", "the same.txt"])
def test_denials_are_no_loop_however_many_there_are(stage: Callable[..., Stage], path: str) -> None:
    steps = [call("write_file", path=path.format(n), content="x") for n in range(14)]
    one = stage([*steps, "done"], mode="ask")
    result = one.run()
    assert (result.status, result.exit_code, len(result.denied)) == ("needs_permission", 77, 14)
    assert [text for text in one.results if not text.startswith("denied: ")] == []
    assert [text for text in one.results if "\n[" in text] == []


def test_denials_between_errors_neither_count_nor_break_the_row(
    stage: Callable[..., Stage],
) -> None:
    denied = [call("write_file", path=f"{n}.txt", content="x") for n in range(5)]
    one = stage([*fails(4), *denied, *fails(4, "then"), "done"], mode="ask", tools=[bad])
    assert one.run().status == "needs_permission"
    assert noted(one.results, one.results[0]) == [13]


# -- one line without end ------------------------------------------------------------------------


ENOUGH = 40_000  # deltas: more than the buffers of a connection hold


class Endless(FlakyServer):
    """A server whose first replies repeat their deltas for ever; then the script begins."""

    def __init__(self, script: Any, *deltas: dict[str, str], times: int = 1) -> None:
        super().__init__(script)
        self.deltas, self.times, self.sent = deltas, times, 0

    def next_actions(self, request: Any) -> Any:
        """A reply without end, or one of the script."""
        if len(self.requests) > self.times:
            return super().next_actions(request)
        return self.forever(Reply({}, request, self))

    def forever(self, reply: Reply) -> Iterator[Any]:
        """The same again; a test that fails must not last for ever."""
        self.sent = 0
        for delta in itertools.islice(itertools.cycle(self.deltas), ENOUGH):
            yield reply.event(delta)
            yield Pause(0.0001)
            self.sent += 1


TEXT = [{"content": "I will look at "}, {"content": "the file now.\n"}]
LINE = [{"content": "and so on\n"}]
THOUGHTS = [{"reasoning_content": "Hm, wait. Let me "}, {"reasoning_content": "think again.\n"}]
FOREVER = [
    pytest.param(LINE, id="text"),
    pytest.param(THOUGHTS, id="reasoning"),
    pytest.param(TEXT, id="a line in two parts", marks=LONG),
    pytest.param(
        [{"content": f"step {n}, and " * 8} for n in range(25)], id="a long piece", marks=LONG
    ),
]


@pytest.mark.parametrize("deltas", FOREVER)
def test_a_line_that_is_repeated_without_end_is_cut_and_the_model_told_once(
    stage: Callable[..., Stage], deltas: list[dict[str, str]]
) -> None:
    server = Endless(["All is done: nothing is left."], *deltas)
    one = stage(server)
    result = one.run()
    assert (result.status, result.text) == ("done", "All is done: nothing is left.")
    assert (len(server.requests), roles(server.requests[1])[-1]) == (2, "user")
    assert server.sent < ENOUGH


@pytest.mark.parametrize("kind", ["content", "arguments"])
def test_a_reply_without_end_is_cut_whatever_it_says(
    stage: Callable[..., Stage], kind: str
) -> None:
    texts = [f"{n} and " for n in range(ENOUGH)]
    part = {"index": 0, "id": "c", "function": {"name": "act"}}
    deltas: list[dict[str, Any]] = [{"content": text} for text in texts]
    if kind == "arguments":
        deltas = [{"tool_calls": [{"index": 0, "function": {"arguments": t}}]} for t in texts]
        deltas[0] = {"tool_calls": [part]}
    server = Endless([AFTER], *deltas)
    one = stage(server, tools=[act])
    one.agent.client.most_bytes = 200_000
    assert (one.run().text, one.results) == (AFTER, [])
    assert (len(server.requests), server.sent < ENOUGH) == (2, True)
    assert len(shortened("".join(texts))) < 60_000


@pytest.mark.parametrize(
    "deltas",
    [
        pytest.param(LINE, id="text"),
        pytest.param(THOUGHTS, id="reasoning", marks=LONG),
    ],
)
def test_a_line_that_is_repeated_again_ends_the_turn(
    stage: Callable[..., Stage], deltas: list[dict[str, str]]
) -> None:
    server = Endless(["next"], *deltas, times=2)
    one = stage(server)
    result = one.run()
    assert (result.status, result.exit_code, len(server.requests)) == ("error", 1, 2)
    assert re.search("repeat|same line|one line", one.reason())
    assert one.run("and now?").text == "next"


def test_calls_between_make_nothing_better_of_a_line_that_is_repeated(
    stage: Callable[..., Stage],
) -> None:
    again = "and so on\n" * 1000
    one = stage([again, say("x"), again, "never"], tools=[echo])
    assert (one.run().exit_code, len(one.server.requests)) == (1, 3)
    assert "repeated itself" in one.reason()


def test_nothing_of_a_reply_that_repeats_a_line_is_run(stage: Callable[..., Stage]) -> None:
    text = "and so on\n" * 1000
    one = stage([say("x", name="act", text=text), say("y", name="act"), "done"], tools=[act])
    assert one.run().status == "done"
    assert ([event["arguments"] for event in one.of("tool_use")], one.results) == (
        [{"text": "y"}],
        ["did y"],
    )


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("".join(f"line {n}\n" for n in range(400)), id="numbered"),
        pytest.param("".join(f"| {n % 7} | a |\n" for n in range(400)), id="a table"),
        pytest.param("yes\n" * 10, id="ten times", marks=LONG),
        pytest.param("if a:\n    b()\n\n" * 12, id="a few lines of code"),
        pytest.param(f"{'-' * 2000}\n", id="a long line", marks=LONG),
        pytest.param("word " * 4000, id="a filler"),
    ],
)
def test_lines_that_are_similar_or_a_few_are_an_answer(
    stage: Callable[..., Stage], text: str
) -> None:
    one = stage([text, "never"])
    result = one.run()
    assert (result.status, result.text.strip(), len(one.server.requests)) == (
        "done",
        text.strip(),
        1,
    )


def test_what_is_written_to_a_file_may_repeat_a_line(stage: Callable[..., Stage]) -> None:
    content = "0, 0, 0, 0\n" * 2000
    one = stage([call("write_file", path="zeros.csv", content=content), "done"])
    assert (one.run().status, (one.root / "zeros.csv").read_text()) == ("done", content)


# -- announcements -------------------------------------------------------------------------------


ANNOUNCED = [
    "I will do it now.",
    "I'll do it now.",
    "I'll run the build now.",
    "I will now run the tests.",
    "I will run the build.",
    "Let me look at the file.",
    "Let me check the config first.",
    "Let me search for usages of `foo`...",
    "Let me try a different approach.",
    "Now I'll fix the bug in stats.py.",
    "Now let me run the tests to verify.",
    "I'm going to update the README.",
    "I am now going to install the dependencies.",
    "Next, I will edit app.py.",
    "Next, I'll update the tests:",
    "First, let me read the test file:",
    "Okay, I'll create the file now.",
    "I'll start by listing the files.",
    "I'll go ahead and apply the change.",
    "The bug is in line 6. Let me fix it.",
    "I found the problem: the range ends one too early. I'll correct that now.",
    "The test fails because of a typo.\n\nLet me fix the typo and run it again.",
    "I see two places that use it.\n\n- a.py\n- b.py\n\nNow I will change both.",
    "Sure! I'll take a look at the code.",
    "I\u2019ll now write the fix.",
    "Let\u2019s run the test suite.",
    "Ich f\u00fchre jetzt die Tests aus.",
    "Ich werde nun die Datei \u00e4ndern.",
    "Je vais maintenant lancer les tests.",
    "Voy a ejecutar las pruebas ahora.",
    "I'll handle that now.",
    "Let me figure out why it fails.",
    "Let me run `make done` now.",
    "I'll fix the problem: the range is off by one.",
    "Let's run it once more.",
    "我现在运行测试。",
    "Doing it now.",
    "Working on it now.",
    "Going to run the build now.",
    "Okay, running the tests now...",
    "I need to check the file first.",
]
ANSWERS = [
    "Done. The tests pass.",
    "I fixed the bug in stats.py; the tests pass now.",
    "I ran the build and it works now.",
    "I've updated the README. Let me know if anything is missing.",
    "Let me know if you want me to run the tests.",
    "Let me know if there is anything else.",
    "If you have further questions, I'll be happy to help.",
    "Should I run the tests now?",
    "Would you like me to fix it?",
    "Shall I go on and change both files?",
    "Which of the two do you mean? I will change it then.",
    "If you want, I'll add a test.",
    "When you have confirmed, I will delete the files.",
    "I will not change the file, as you asked.",
    "I won't touch the file.",
    "I can not run the tests: the command was denied.",
    "I would now run the tests, but that was not permitted.",
    "I could not find the file, so I changed nothing.",
    "You will now have to restart the server.",
    "Next, you should run `make`.",
    "Next steps: run the build, then deploy.",
    "The function will return None.",
    "The script will now run every hour.",
    'The log says: "I will now restart".',
    "42",
    "Yes.",
    "Fertig: die Tests laufen durch.",
    "Soll ich die Tests jetzt ausf\u00fchren?",
    "C'est fait: les tests passent.",
    "\u00bfQuieres que ejecute las pruebas ahora?",
    "I'll wait for your decision.",
    "I will proceed only with explicit approval.",
    "I will open a pull request when the CI is green.",
    "I'll continue as soon as the file is there.",
    "As you wish: I will change nothing.",
    "I updated the file; I'll open a PR on request.",
    "Remaining: 2 files. In the next session I will change b.py.",
    "Let me check my memory: yes, tabs.",
    "Let's check: 2 + 2 = 4.",
    'A polite reply: "Thank you. I will look into it."',
    '{"status": "done", "message": "I will run the build"}',
    "To check it, run:\n\n```sh\nmake test\n```",
    "Ich werde auf deine Entscheidung warten.",
    "Je vais attendre la réponse.",
    "Voy a esperar su decisión.",
    "我会等待下一步的决定。",
    "这会让我们更快。",
    "I need to see the log first.",
]
AFTER = "All is done: nothing is left."


def nudged(one: Stage, texts: list[str]) -> list[str]:
    """Those of the texts after which the model was asked once more, each as a prompt's answer."""
    found = []
    for number, text in enumerate(texts):
        before = len(one.server.requests)
        result = one.run(f"case {number}")
        assert (result.status, len(one.server.requests) - before) in (("done", 1), ("done", 2))
        if len(one.server.requests) - before == 2:
            assert result.text == AFTER, text
            found.append(text)
    return found


def answering(texts: list[str]) -> Iterator[Callable[[Any], str]]:
    """A model that answers `case N` with a text, and anything else with AFTER."""

    def model(request: Any) -> str:
        asked = re.search(r"case (\d+)\Z", request["messages"][-1]["content"])
        return texts[int(asked[1])] if asked else AFTER

    return itertools.repeat(model)


def test_the_tables_of_announcements_and_answers_are_as_long_as_was_promised():
    assert (len(set(ANNOUNCED)), len(set(ANSWERS))) == (41, 48)


def test_who_announces_and_calls_nothing_is_told_once_when_nobody_is_there(
    stage: Callable[..., Stage],
) -> None:
    one = stage(answering(ANNOUNCED), save_session=False)
    assert sorted(set(ANNOUNCED) - set(nudged(one, ANNOUNCED))) == []


def test_who_answers_is_not_told_anything(stage: Callable[..., Stage]) -> None:
    one = stage(answering(ANSWERS), save_session=False)
    assert nudged(one, ANSWERS) == []


def test_who_announces_in_the_repl_is_not_told_anything(stage: Callable[..., Stage]) -> None:
    one = stage(answering(ANNOUNCED), save_session=False, ask=lambda question: "y")
    assert nudged(one, ANNOUNCED) == []


def test_an_announcement_is_followed_by_the_call(stage: Callable[..., Stage]) -> None:
    one = stage(["I will do it now.", say("it", name="act"), AFTER], tools=[act])
    assert (one.run().text, one.results) == (AFTER, ["did it"])
    assert roles(one.server.requests[1]) == ["system", "user", "assistant", "user"]


def test_an_announcement_after_calls_is_one_too(stage: Callable[..., Stage]) -> None:
    one = stage([say("a"), "Let me fix it now.", AFTER], tools=[echo])
    assert (one.run().text, len(one.server.requests)) == (AFTER, 3)


def test_two_announcements_end_the_turn(stage: Callable[..., Stage]) -> None:
    one = stage(["I will do it now.", "I will do it now.", "never"])
    result = one.run()
    assert (result.status, result.exit_code, len(one.server.requests)) == ("error", 1, 2)
    assert one.reason() != ""


def test_a_plan_may_end_with_what_will_be_done(stage: Callable[..., Stage]) -> None:
    plan = "I will edit app.py first, and then I will run the tests."
    one = stage([plan, plan], mode="plan")
    result = one.run()
    assert (result.status, result.exit_code, result.text) == ("done", 0, plan)


@LONG
def test_a_run_that_only_announces_is_a_1(run_agent):
    with FlakyServer(["I will do it now."] * 4) as server:
        done = run_agent("--yes", "--output-format", "json", "do it", server=server)
    assert (done.returncode, json.loads(done.stdout)["status"]) == (1, "error")
    assert len(server.requests) == 2


@LONG
def test_a_prompt_on_the_command_line_of_a_terminal_is_a_run_and_not_the_repl(terminal):
    with FlakyServer(["I will do it now.", AFTER]) as server:
        screen = terminal("do it", server=server)
        screen.expect(AFTER)
        assert (screen.wait(), len(server.requests)) == (0, 2)


# -- empty replies, and what will fail for ever --------------------------------------------------


EMPTY = [
    pytest.param({"fault": "empty_reply"}, id="nothing"),
    pytest.param({"reasoning": "Hm."}, id="only thoughts"),
    pytest.param({"text": " \n\u200b"}, id="nothing to be seen"),
]


@pytest.mark.parametrize("empty", EMPTY)
def test_an_empty_reply_after_a_tool_may_be_followed_by_an_answer(
    stage: Callable[..., Stage], empty: dict[str, Any]
) -> None:
    one = stage([say("a"), empty, "fine"], tools=[echo])
    result = one.run()
    assert (result.status, result.text, len(one.server.requests)) == ("done", "fine", 3)


@pytest.mark.parametrize("empty", EMPTY)
def test_two_empty_replies_after_a_tool_end_the_turn_and_not_the_session(
    stage: Callable[..., Stage], empty: dict[str, Any]
) -> None:
    one = stage([say("a"), empty, empty, "next"], tools=[echo])
    result = one.run()
    assert (result.status, result.exit_code, len(one.server.requests)) == ("error", 1, 3)
    assert "empty" in one.reason()
    assert one.run("and now?").text == "next"
    assert one.results == ["a"]


def is_permanent(result: str) -> bool:
    """Does a result say that trying again will not help?"""
    return bool(re.search(r"again.*\bnot help|\bnot help.*again", result.lower(), re.DOTALL))


FAILURES = [
    ("no-such-program-of-ours --version", True),
    ("cd . && no-such-program-of-ours", True),
    ("echo 'git@example.org: Permission denied (publickey).' >&2; exit 128", True),
    ("echo \"fatal: Authentication failed for 'https://example.org/a.git/'\" >&2; exit 128", True),
    ("false", False),
    ("ls no-such-file", False),
    ("echo '1 failed, 3 passed'; exit 1", False),
    ("echo 'Authentication failed' > log; cat log", False),
    ("echo fine", False),
]


def test_a_failure_that_stays_says_that_trying_again_will_not_help(
    stage: Callable[..., Stage],
) -> None:
    calls = [{"name": "bash", "arguments": {"command": command}} for command, _ in FAILURES]
    one = stage([{"calls": calls}, "done"])
    assert one.run().status == "done"
    told = [
        (command, is_permanent(text))
        for (command, _), text in zip(FAILURES, one.results, strict=True)
    ]
    assert told == FAILURES


# -- memory --------------------------------------------------------------------------------------


def put(root: Path, files: dict[str, str]) -> None:
    """Write files below a folder."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_the_chain_goes_from_the_git_root_down_and_an_override_stands_for_its_folder(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    put(tmp_path, {"AGENTS.md": "RULE ROOT", "a/AGENTS.md": "RULE A", "a/b/AGENTS.md": "RULE B"})
    put(tmp_path, {"a/AGENTS.override.md": "RULE MINE", "a/b/c/AGENTS.md": "RULE C"})
    (tmp_path / ".git").mkdir()
    one = stage(["done"], workspace=str(tmp_path / "a" / "b"), save_session=False)
    one.run()
    places = [one.system().find(rule) for rule in ("RULE ROOT", "RULE MINE", "RULE B")]
    assert -1 not in places and places == sorted(places)
    assert ("RULE A" in one.system(), "RULE C" in one.system()) == (False, False)


def test_all_notes_together_are_at_most_32_kib(stage: Callable[..., Stage], tmp_path: Path) -> None:
    put(tmp_path, {"AGENTS.md": "^" * 30_000, "ws/AGENTS.md": "~" * 30_000})
    (tmp_path / ".git").mkdir()
    one = stage(["done"], workspace=str(tmp_path / "ws"), save_session=False)
    one.run()
    first, second = one.system().count("^"), one.system().count("~")
    assert (first, 0 < second <= 32 * 1024 - 30_000) == (30_000, True)


@pytest.mark.parametrize(
    ("data", "known"),
    [
        pytest.param("RULE Ä".encode("utf-16"), "RULE Ä", id="UTF-16"),
        pytest.param(b"\xef\xbb\xbfRULE", "RULE", id="UTF-8 with its mark"),
        pytest.param(
            ("a" + "ä" * 20_000).encode(),
            "a" + "ä" * 16_383 + "\n[cut here: 32768 of 40001 bytes]",
            id="cut inside a character",
        ),
        pytest.param(b"\0\1RULE" * 99, None, id="no text"),
    ],
)
def test_notes_are_read_as_the_text_that_they_are(
    stage: Callable[..., Stage], tmp_path: Path, data: bytes, known: str | None
) -> None:
    (tmp_path / "AGENTS.md").write_bytes(data)
    one = stage(["done"])
    one.run()
    assert [memo.text for memo in one.agent.memory.values()] == [known] * (known is not None)
    assert one.of("notice") == []


def test_notes_above_count_only_in_a_repository_of_the_same_owner(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "ws" / "a").mkdir(parents=True)
    root = tmp_path / "ws"
    assert project_folders(root / "a") == [tmp_path, root, root / "a"]
    assert project_folders(root, {tmp_path / ".git": 0, root: 1}.get) == [root]


TOUCHES = [
    pytest.param(call("read_file", path="sub/a.py"), id="read"),
    pytest.param(call("write_file", path="sub/new.py", content="x = 1\n"), id="write"),
    pytest.param(call("edit_file", path="sub/a.py", old="ONE", new="TWO"), id="edit"),
]


@pytest.mark.parametrize("step", TOUCHES)
def test_notes_of_a_deeper_folder_come_once_with_the_call_that_first_touches_it(
    stage: Callable[..., Stage], tmp_path: Path, step: dict[str, Any]
) -> None:
    put(tmp_path, {"sub/a.py": "ONE\n", "sub/AGENTS.md": "RULE SUB\n", "b.py": "B\n"})
    again = call("read_file", path="sub/a.py")
    one = stage([call("read_file", path="b.py"), step, again, "done", again, "done"])
    assert [one.run().status, one.run().status] == ["done", "done"]
    assert ["RULE SUB" in text for text in one.results] == [False, True, False, False]
    assert "RULE SUB" not in one.system()
    assert not one.results[1].startswith("RULE SUB")


def test_of_calls_in_one_reply_the_first_gets_the_notes(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    put(tmp_path, {f"sub/{name}.py": f"{name}\n" for name in "abc"})
    put(tmp_path, {"sub/AGENTS.md": "RULE SUB\n"})
    calls = [{"name": "read_file", "arguments": {"path": f"sub/{name}.py"}} for name in "abc"]
    one = stage([{"calls": calls}, "done"])
    one.run()
    assert ["RULE SUB" in text for text in one.results] == [True, False, False]
    assert [text[:4] for text in one.results] == ["1: a", "1: b", "1: c"]


def test_deeper_folders_come_outer_first_and_each_once(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    put(tmp_path, {"a/x.py": "x\n", "a/b/c/y.py": "y\n", "d/AGENTS.md": "RULE D\n"})
    put(tmp_path, {"a/AGENTS.md": "RULE ONE\n", "a/b/AGENTS.md": "RULE TWO\n"})
    put(tmp_path, {"a/b/AGENTS.override.md": "RULE MINE\n", "a/b/c/AGENTS.md": "RULE THREE\n"})
    steps = [call("read_file", path=path) for path in ("a/b/c/y.py", "a/x.py", "a/b/c/y.py")]
    one = stage([*steps, "done"])
    one.run()
    first, *rest = one.results
    places = [first.find(rule) for rule in ("RULE ONE", "RULE MINE", "RULE THREE")]
    assert -1 not in places and places == sorted(places)
    assert [rule for rule in ("RULE TWO", "RULE D") if rule in first] == []
    assert [text for text in rest if "RULE" in text] == []


def test_endless_notes_of_a_deeper_folder_leave_room_for_the_file(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    put(tmp_path, {"sub/a.py": "HERE\n", "sub/AGENTS.md": "~" * 200_000})
    one = stage([call("read_file", path="sub/a.py"), "done"])
    one.run()
    assert one.results[0].startswith("1: HERE\n")
    assert 0 < one.results[0].count("~") <= 32 * 1024


def test_deeper_notes_that_lead_to_a_secret_or_out_are_not_followed(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    root = tmp_path / "ws"
    put(tmp_path, {"outside.md": "RULE OUTSIDE\n", "ws/.env": "TOKEN=hidden-thing\n"})
    put(root, {f"{name}/a.py": "x\n" for name in ("one", "two", "three")})
    put(root, {"docs.md": "RULE INSIDE\n"})
    for name, target in (("one", "../.env"), ("two", "../../outside.md"), ("three", "../docs.md")):
        (root / name / "AGENTS.md").symlink_to(target)
    steps = [call("read_file", path=f"{name}/a.py") for name in ("one", "two", "three")]
    one = stage([*steps, "done"], workspace=str(root))
    assert one.run().status == "done"
    secret, outside, inside = one.results
    assert ("hidden-thing" in secret, "RULE OUTSIDE" in outside) == (False, False)
    assert "RULE INSIDE" in inside


@pytest.mark.parametrize(
    ("path", "options", "count"),
    [
        pytest.param("sub/AGENTS.md", {}, 1, id="it is read itself"),
        pytest.param("sub/a.py", {"deny": ("* sub/AGENTS.md",)}, 0, id="it is denied"),
    ],
)
def test_deeper_notes_are_neither_told_twice_nor_against_a_rule(
    stage: Callable[..., Stage], tmp_path: Path, path: str, options: dict[str, Any], count: int
) -> None:
    put(tmp_path, {"sub/a.py": "x\n", "sub/AGENTS.md": "RULE SUB\n"})
    one = stage([call("read_file", path=path), "done"], **options)
    assert one.run().status == "done"
    assert one.results[0].count("RULE SUB") == count


def test_bare_reads_no_memory_at_any_depth(stage: Callable[..., Stage], tmp_path: Path) -> None:
    put(tmp_path, {"AGENTS.md": "RULE ROOT", "sub/AGENTS.md": "RULE SUB", "sub/a.py": "x\n"})
    (tmp_path / "AGENTS.override.md").write_text("RULE MINE")
    one = stage([call("read_file", path="sub/a.py"), "done"], bare=True)
    one.run()
    assert "RULE" not in str(one.server.requests[-1]["messages"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("AGENTS.md", id="the file"),
        pytest.param("AGENTS.override.md", id="a new override"),
        pytest.param("sub/AGENTS.md", id="a deeper file that was loaded"),
    ],
)
def test_notes_that_changed_go_once_into_the_next_user_message(
    stage: Callable[..., Stage], tmp_path: Path, name: str
) -> None:
    put(tmp_path, {"AGENTS.md": "RULE ROOT\n", "sub/AGENTS.md": "RULE SUB\n", "sub/a.py": "x\n"})
    one = stage([call("read_file", path="sub/a.py"), "one", "two", "three"])
    one.run("first")
    (tmp_path / name).write_text("RULE NEW\n")
    one.run("second")
    one.run("third")
    first, second, third = prompts(one.server.requests[-1])
    assert (first, third) == ("first", "third")
    assert (second.count("RULE NEW"), second.endswith("second")) == (1, True)
    assert one.server.requests[0]["messages"][0] == one.server.requests[-1]["messages"][0]


def interrupt(where: Callable[..., Any], event: str, action: Callable[[], Any]) -> None:
    """Carry out the action with a Ctrl-C at the first such event of this function."""

    def watch(frame: Any, kind: str, arg: Any) -> Any:
        if frame.f_code is not where.__code__:
            return None
        if kind == event:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        action()
    except KeyboardInterrupt:
        return
    finally:
        sys.settrace(before)


def test_notes_whose_change_is_found_when_ctrl_c_comes_are_told_once(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    one = stage(["fine", "again"])
    one.agent.run("one")
    (tmp_path / "AGENTS.md").write_text("Use tabs.\n")
    interrupt(Agent.read_notes, "return", lambda: one.agent.run("two"))
    assert one.agent.run("three").text == "again"
    assert json.dumps(one.server.requests[-1]["messages"]).count("Use tabs.") == 1


def test_a_mode_whose_change_ctrl_c_meets_stands_with_its_walls(
    stage: Callable[..., Stage],
) -> None:
    agent = stage([], mode="ask", sandbox="auto").agent
    agent.signals.install([signal.SIGINT])
    try:
        interrupt(Agent.set_walls, "call", lambda: agent.set_mode("auto"))
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert (agent.mode, "only in mode" in agent.workspace.sandbox_state) == ("auto", False)


def test_notes_that_a_person_changes_while_the_model_writes_beside_them_are_told(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    put(tmp_path, {"AGENTS.md": "RULE OLD\n"})

    @tool(needs="read")
    def person() -> str:
        """Change the notes."""
        (tmp_path / "AGENTS.md").write_text("RULE NEW, LONGER\n")
        return "changed"

    step = call("note", text="Use tabs.")
    other = call("write_file", path="x.py", content="x\n")
    one = stage(
        [other, call("person"), other, step, "one", step, "two", "three"],
        tools=[person],
        ask=lambda question: "y",
    )
    for text in ("first", "second", "third"):
        one.run(text)
    first, second, third = prompts(one.server.requests[-1])
    assert (first, third, "RULE NEW" in second) == ("first", "third", True)
    assert ("Use tabs." in second, len(one.results)) == (True, 5)


def test_what_a_note_says_of_itself(stage: Callable[..., Stage], tmp_path: Path) -> None:
    (tmp_path / "AGENTS.override.md").write_text("RULE MINE\n")
    steps = [call("note", text=" \n"), call("note", text="Use tabs."), "done"]
    one = stage(steps, ask=lambda question: "y")
    assert one.run().status == "done"
    assert one.results[0].startswith("error: ")
    assert "AGENTS.override.md" in one.results[1]
    assert (tmp_path / "AGENTS.md").read_text() == "- Use tabs.\n"


def test_what_changed_before_a_compaction_is_in_the_new_system_message(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    (tmp_path / "AGENTS.md").write_text("RULE OLD\n")

    def model(request: Any) -> str:
        note = "Task: words. Decisions: none. Files: none. Open work: the next word."
        return f"{len(request['messages'])} {'word ' * 800}" if "tools" in request else note

    one = stage(itertools.repeat(model))
    for number in range(6):
        one.run(f"prompt {number}")
    (tmp_path / "AGENTS.md").write_text("RULE NEW\n")
    assert one.agent.compact() is True
    one.run("last prompt")
    assert ("RULE NEW" in one.system(), "RULE OLD" in one.system()) == (True, False)
    assert prompts(one.server.requests[-1])[-1] == "last prompt"


def test_a_note_needs_a_human_and_is_one_line(stage: Callable[..., Stage], tmp_path: Path) -> None:
    (tmp_path / "AGENTS.md").write_text("RULE ROOT\n")
    step = call("note", text="Use tabs.\nNot blanks.")
    nobody = stage([step, "done"], unattended=True)
    assert nobody.run().exit_code == 77
    assert (tmp_path / "AGENTS.md").read_text() == "RULE ROOT\n"
    somebody = stage([step, "done"], ask=lambda question: "y")
    assert somebody.run().exit_code == 0
    lines = (tmp_path / "AGENTS.md").read_text().splitlines()
    assert (lines[0], len(lines)) == ("RULE ROOT", 2)
    assert "Use tabs." in lines[1] and "Not blanks." in lines[1]


def test_memory_shows_what_is_loaded_and_the_repl_lets_an_announcement_be(terminal, workspace):
    put(workspace, {"AGENTS.md": "r" * 432, "sub/AGENTS.override.md": "s" * 123})
    put(workspace, {"sub/AGENTS.md": "t" * 77, "deep/AGENTS.md": "u" * 99, "sub/a.py": "x\n"})
    with FlakyServer([call("read_file", path="sub/a.py"), "I will do it now."]) as server:
        screen = terminal(server=server)
        screen.prompt()
        screen.send("/memory\r")
        before = screen.prompt()
        screen.send("look\r")
        screen.expect("I will do it now.")
        screen.prompt()
        screen.send("/memory\r")
        after = screen.prompt()
        screen.send("exit\r")
        assert (screen.wait(), len(server.requests)) == (0, 2)
    assert ("AGENTS.md" in before, "sub/AGENTS" in before) == (True, False)
    assert [text for text in ("432", "sub/AGENTS.override.md", "123") if text not in after] == []
    assert [text for text in ("sub/AGENTS.md", "deep/AGENTS.md") if text in after] == []


@LONG
def test_memory_without_any_says_so(terminal):
    with FlakyServer([]) as server:
        screen = terminal("--bare", server=server)
        screen.prompt()
        screen.send("/memory\r")
        shown = screen.prompt()
        screen.send("exit\r")
        assert (screen.wait(), server.requests) == (0, [])
    assert len(shown.strip().splitlines()) >= 2  # the line that was typed, and an answer


# -- switching -----------------------------------------------------------------------------------


def test_a_resumed_session_has_the_new_notes_and_is_told_of_another_mode_once(run_agent, workspace):
    (workspace / "AGENTS.md").write_text("RULE OLD\n")
    modes = []
    with FlakyServer(["one", "two", "three"]) as server:
        run_agent("--mode", "plan", "first", server=server)
        modes.append(json.loads(session_files(workspace)[0].read_text())["mode"])
        (workspace / "AGENTS.md").write_text("RULE NEW\n")
        for text in ("second", "third"):
            run_agent("--resume", "--mode", "auto", text, server=server)
            modes.append(json.loads(session_files(workspace)[0].read_text())["mode"])
    first, second, third = prompts(server.requests[2])
    assert (first, third, modes) == ("first", "third", ["plan", "auto", "auto"])
    assert (len(re.findall(r"\bauto\b", second)), second.endswith("second")) == (1, True)
    systems = [request["messages"][0]["content"] for request in server.requests]
    assert [("RULE OLD" in text, "RULE NEW" in text) for text in systems] == [
        (True, False),
        (False, True),
        (False, True),
    ]
    assert "RULE" not in second


@LONG
def test_in_the_repl_mode_and_model_change_at_once_and_the_mode_is_told_once(terminal):
    write = call("write_file", path="a.txt", content="x\n")
    with FlakyServer(["PONG", write, "PANG", "PENG"]) as server:
        screen = terminal("--mode", "auto", server=server)
        for line, shown in (
            ("ping", "PONG"),
            ("/mode plan", "plan"),
            ("/model other-2", "other-2"),
            ("pang", "PANG"),
            ("peng", "PENG"),
        ):
            screen.prompt()
            screen.send(f"{line}\r")
            screen.expect(line)  # what was typed
            screen.expect(shown)
        screen.prompt()
        screen.send("exit\r")
        assert screen.wait() == 0
    models = [request["model"] for request in server.requests]
    first, second, third = prompts(server.requests[-1])
    assert models == ["flaky-1", "other-2", "other-2", "other-2"]
    assert results(server.requests[-1])[0].startswith("denied: ")
    assert (first, third, "plan" in second, second.endswith("pang")) == ("ping", "peng", True, True)


def test_a_mode_that_an_undone_turn_told_is_told_again(stage: Callable[..., Stage]) -> None:
    one = stage(["one", "two", "three", "four"])
    one.run("first")
    one.agent.set_mode("ask")
    one.run("second")
    one.agent.undo(1, lambda line: None)
    one.run("third")
    one.run("fourth")
    first, third, fourth = prompts(one.server.requests[-1])
    assert (first, "mode is now ask" in third, fourth) == ("first", True, "fourth")


@pytest.mark.parametrize("content", [pytest.param("", id="empty"), pytest.param(None, id="null")])
@pytest.mark.parametrize(
    "fault",
    [
        "refuses_null_content",
        pytest.param("refuses_text_with_calls", marks=LONG),
        pytest.param("wants_names_of_results", marks=LONG),
    ],
)
def test_calls_without_text_are_taken_by_another_model_t9(
    stage: Callable[..., Stage], fault: str, content: str | None
) -> None:
    one = stage([say("a"), "one", {"fault": fault, "text": "two", "times": 3}], tools=[echo])
    one.run("first")
    [reply] = [m for m in one.agent.transcript.messages if m.get("tool_calls")]
    reply["content"] = content
    one.agent.set_model("other")
    result = one.run("second")
    assert (result.status, result.text) == ("done", "two")
    assert one.server.requests[-1]["model"] == "other"
    assert len(one.server.requests) <= 4


def test_thoughts_go_only_to_the_model_that_had_them_t10(stage: Callable[..., Stage]) -> None:
    steps = [say("a", reasoning="Hm. So."), {"text": "one", "reasoning": "Well."}]
    steps.append({"fault": "refuses_reasoning", "text": "two"})
    one = stage([*steps, {"fault": "wants_reasoning", "text": "three"}], tools=[echo])
    assert one.run().text == "one"
    one.agent.set_model("other")
    assert one.run().text == "two"
    one.agent.set_model("flaky-1")
    assert one.run().text == "three"
    thoughts = [
        [m["reasoning_content"] for m in request["messages"] if "reasoning_content" in m]
        for request in one.server.requests
    ]
    assert (len(thoughts), thoughts[2], thoughts[3][:1]) == (4, [], ["Hm. So."])


@LONG
def test_another_endpoint_gets_no_thoughts_of_the_first_t10(run_agent, workspace):
    script = [call("list_files") | {"reasoning": "Hm."}, "one"]
    with FlakyServer(script) as first, FlakyServer([{"fault": "refuses_reasoning"}]) as second:
        assert run_agent("hi", server=first).returncode == 0
        assert run_agent("--resume", "go on", server=second).returncode == 0
    assert (len(second.requests), "Hm." in str(second.requests[0]["messages"])) == (1, False)
    assert results(second.requests[0]) == results(first.requests[1])


@LONG
def test_calls_of_a_tool_that_is_gone_stay_valid_and_a_new_one_is_answered_a6(run_agent, workspace):
    function = {"name": "gone_tool", "arguments": '{"number":7}'}
    put_session(
        workspace,
        OLD,
        [
            {"role": "system", "content": "You are a coding agent."},
            {"role": "user", "content": "ticket 7?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "#7: open"},
            {"role": "assistant", "content": "It is open."},
        ],
    )
    with FlakyServer([call("gone_tool", number=8), "I see."]) as server:
        done = run_agent("--resume", "and 8?", server=server)
    assert (done.returncode, done.stdout) == (0, "I see.\n")
    assert results(server.requests[0]) == ["#7: open"]
    answer = results(server.requests[1])[1]
    assert (answer.startswith("error: "), "read_file" in answer) == (True, True)
