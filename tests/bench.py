"""What the agent costs, in figures: `python tests/bench.py`. Not collected by pytest.

A row is a function under `@row` that returns its measured figures; add one below the others. The
exit code is 1 if a figure is above twice its target (another machine, a busy one), else 0.
"""

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import agent

CHUNK = 64 * 1024
STREAM_BYTES = 20_000_000
TRIES = 3


class Figures(NamedTuple):
    """What a row measured: ours, what it is compared with, and the most that their ratio may be."""

    ours: float
    bare: float
    target: float
    unit: str = "s CPU"


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


# -- reading a stream


Delta = dict[str, object]


def small_events(delta_of: Callable[[str], Delta], size: int = STREAM_BYTES) -> bytes:
    """A stream of events of about 150 bytes, as OpenAI sends them, with its end."""

    def event(delta: Delta, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        body = {"id": "chatcmpl-0123456789", "object": "chat.completion.chunk", "model": "m-1"}
        text = json.dumps({**body, "choices": [choice]}, separators=(",", ":"))
        return b"data: " + text.encode() + b"\n\n"

    words = [event(delta_of(f" word{number}")) for number in range(100)]
    count = size // sum(map(len, words))
    return b"".join(words * count) + event({}, "stop") + b"data: [DONE]\n\n"


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
        self.raw = self
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


# -- the table


def main() -> int:
    """Measure every row and print the table."""
    print(f"{'':56}{'ours':>8}{'bare':>8}{'ratio':>8}{'target':>8}")
    bad = 0
    for measure in ROWS:
        found = measure()
        ratio = found.ours / found.bare
        figures = f"{found.ours:8.2f}{found.bare:8.2f}{ratio:8.2f}{found.target:8.1f}"
        mark = "" if ratio <= found.target else "  above the target"
        print(f"{measure.__doc__:56}{figures}  {found.unit}{mark}", flush=True)
        bad |= ratio > 2 * found.target
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
