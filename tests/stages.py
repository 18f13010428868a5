"""An agent in this process in front of a scripted server, for tests that look at what it did."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agent import Agent, Settings, build_agent, problems
from flaky_server import FlakyServer


@dataclasses.dataclass
class Stage:
    """An agent, the server that is its model, and what it reported."""

    agent: Agent
    server: FlakyServer
    root: Path
    events: list[tuple[str, dict[str, Any]]]

    def run(self, prompt: str = "go") -> Any:
        """One prompt to its end."""
        return self.agent.run(prompt)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        return [data for name, data in self.events if name == kind]


def stages(folder: Path, form: type[Any]) -> Iterator[Callable[..., Any]]:
    """What builds agents as this kind of Stage.

    At the end all is closed, and every request and transcript was valid.
    """
    made: list[Any] = []

    def build(
        script: Any, *, tools: Any = (), emit: Any = None, ask: Any = None, **more: Any
    ) -> Any:
        events: list[tuple[str, dict[str, Any]]] = []

        def report(kind: str, **data: Any) -> None:
            events.append((kind, data))
            if emit is not None:
                emit(kind, **data)

        server = script if isinstance(script, FlakyServer) else FlakyServer(script)
        server.start()
        fields = {"mode": "auto", "sandbox": "off", "workspace": str(folder), "model": "flaky-1"}
        fields |= {"environ": {"PATH": os.environ["PATH"]}} | more
        known = Settings(base_url=server.url, api_key="x", **fields)
        agent = build_agent(known, tools=tools, emit=report, ask=ask)
        made.append(form(agent, server, Path(fields["workspace"]), events))
        return made[-1]

    yield build
    for one in made:
        one.agent.close()
        one.server.close()
    assert [p for one in made for request in one.server.requests for p in request.problems] == []
    assert [error for one in made for error in one.server.errors] == []
    assert [p for one in made for p in problems(one.agent.transcript.messages)] == []
