"""Make the picture of the README: the demo in a real terminal with the extra `ui`, as an SVG.

    python tests/picture.py

needs tmux, and writes .github/session.svg.
"""

import io
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / ".github" / "session.svg"
COLUMNS, ROWS = 150, 60  # of the terminal: no line of the demo is cut
END = "demo: "
SECONDS = 60.0


def capture(folder: Path) -> str:
    """The demo's screen when it has ended, with its colours."""
    tmux = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
    keep = ("PATH", "LANG", "TMPDIR")
    env = {name: os.environ[name] for name in keep if name in os.environ}
    env |= {"HOME": str(folder), "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    # What comes behind it keeps the pane until the picture is taken.
    demo = [sys.executable, str(ROOT / "agent.py"), "--demo"]
    words = [*demo, ";", "read", "_"]
    size = ["-x", str(COLUMNS), "-y", str(ROWS)]
    shell = " ".join(words)
    subprocess.run([*tmux, "new-session", "-d", *size, shell], env=env, cwd=folder, check=True)
    try:
        deadline = time.monotonic() + SECONDS
        screen = ""
        while END not in screen:
            if time.monotonic() > deadline:
                raise SystemExit(f"the demo did not end; the screen:\n{screen}")
            time.sleep(0.1)
            show = [*tmux, "capture-pane", "-p", "-e"]
            screen = subprocess.run(show, env=env, capture_output=True, text=True).stdout
        return screen
    finally:
        subprocess.run([*tmux, "kill-server"], env=env)


def session() -> list[str]:
    """The lines of the picture, with their colours."""
    with tempfile.TemporaryDirectory(prefix="agent-picture-") as folder:
        screen = capture(Path(folder))
    screen = screen.replace(f"{sys.executable} ", "python3 ")
    # How long a call took, if it was over a second, tells more of the machine than of us.
    screen = re.sub(r"(?m)  \d+\.\d s(?=\x1b|$)", "", screen)
    return ["$ agent --demo", *screen.rstrip().split("\n")]


def drawn(lines: list[str]) -> str:
    """The lines as an SVG that asks no other server for its letters."""
    texts = [Text.from_ansi(line) for line in lines]
    width = max(text.cell_len for text in texts)
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    for text in texts:
        console.print(text)
    svg = console.export_svg(title="agent", unique_id="session")
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(drawn(session()))
