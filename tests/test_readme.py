"""What README.md says, against the program."""

import html
import json
import re
import shutil
import subprocess
import sys

import picture
import pytest
from conftest import ROOT

import agent

README = (ROOT / "README.md").read_text()


def names(pattern: str, text: str) -> set[str]:
    """What the pattern finds in a text."""
    return set(re.findall(pattern, text))


def part(title: str) -> str:
    """A chapter."""
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_the_readme_has_at_most_200_lines():
    assert README.count("\n") <= 200


def test_the_table_of_flags_names_what_help_names():
    told = subprocess.check_output([sys.executable, str(ROOT / "agent.py"), "--help"], text=True)
    flag = r"(?<![\w-])--?[a-z][a-z-]*"
    known = names(flag, "".join(re.findall(r"(?m)^  -.*?(?=  |$)", told)))
    rows = [row for row in part("Settings").split("\n") if row.startswith("| `-")]
    assert names(flag, "".join(row.split(" | ")[0] for row in rows)) == known


def test_the_chapter_on_the_terminal_names_every_command():
    known = {name.removeprefix("do_") for name in dir(agent.Repl) if name.startswith("do_")}
    assert names(r"`/([a-z]+)", part("In the terminal")) == known


def test_the_list_of_events_is_that_of_the_schema():
    schema = json.loads((ROOT / "tests" / "events.schema.json").read_text())
    told = part("Unattended").split("`--json`:")[1].split("their fields")[0]
    told = told.replace("(last: `status`", "")  # from here on its fields
    assert re.findall(r"`([a-z_]+)`", told)[:15] == [
        "type",
        "ts",
        *schema["properties"]["type"]["enum"],
    ]


def test_every_name_of_the_environment_and_of_the_config_is_told():
    words = names(r"\b[A-Za-z_]+\b", part("Settings") + part("Permissions and sandbox"))
    config = set(agent.CONFIG_TYPES) - {"sandbox", "context", "compact_at", "mode", "base_url"}
    assert {*agent.ENVIRONMENT, "AGENT_API_KEY", *config} - words == set()


def test_the_tools_are_those_that_the_model_gets(tmp_path):
    settings = agent.Settings(base_url="http://127.0.0.1:9", model="m", workspace=str(tmp_path))
    made = agent.build_agent(settings)
    made.close()
    assert re.findall(r"`([a-z_]+)`", part("Tools").split("\n\n")[0].split(".")[0]) == [*made.tools]


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("tmux"), reason="tmux is not installed")
def test_the_picture_is_what_the_demo_shows_today():
    drawn = picture.drawn(picture.session())
    assert shown_in(drawn) == shown_in(picture.PICTURE.read_text())


def shown_in(svg: str) -> list[str]:
    """The texts of a picture, in order."""
    return [html.unescape(text) for text in re.findall(r"<text [^>]*>([^<]*)</text>", svg)]


def test_the_picture_is_there_and_asks_no_other_server():
    name = names(r"!\[[^\]]*\]\(([^)]*)\)", README)
    svg = picture.PICTURE.read_text()
    assert (name, "url(http" in svg, "@import" in svg) == ({".github/session.svg"}, False, False)
    assert "The test passes now." in " ".join(shown_in(svg)).replace("\xa0", " ")
