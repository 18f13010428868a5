"""The agent as a process that can be killed: a prompt a line on stdin, an event a line on stdout.

    python day_driver.py URL WORKSPACE CONTEXT [ID]

With an ID it goes on with that session. It is the real agent without the start-up of the command
line; the waits before a retry are left out.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from agent import Settings, build_agent, resume_session


def report(kind: str, **data: Any) -> None:
    """One event, written at once: what is on the pipe was reported."""
    if kind not in ("text", "reasoning"):
        sys.stdout.write(json.dumps({"type": kind, **data}) + "\n")
        sys.stdout.flush()


def main(url: str, workspace: str, context: str, ident: str = "") -> None:
    """Take prompts until stdin ends."""
    session = None
    if ident:
        session, notices = resume_session(Path(workspace) / ".agent" / "sessions", ident)
        report("resumed", notices=notices)
    settings = Settings(
        base_url=url,
        api_key="x",
        model="flaky-1",
        mode="auto",
        sandbox="off",
        bare=True,
        workspace=workspace,
        context=int(context),
        environ={"PATH": os.environ["PATH"]},
    )
    agent = build_agent(settings, emit=report, session=session, sleep=lambda seconds: None)
    try:
        for line in sys.stdin:
            agent.run(json.loads(line))
    finally:
        agent.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
