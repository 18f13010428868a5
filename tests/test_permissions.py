"""Section 7, permissions: what a call may do, decided from the call, the mode and the rules.

`judge` gives the outcome of one call under a mode and rules as a user writes them. Nothing here
runs anything: the commands are texts. The numbers in the ids are rows of the survey of published
weaknesses (security.md), after which the commands are made.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agent import (
    NotSimple,
    Policy,
    Settings,
    UsageError,
    Workspace,
    build_agent,
    decide,
    explain,
    make_policy,
    offered_rules,
    parse_rule,
    path_match,
    permitting_rules,
    split_command,
)
from flaky_server import FlakyServer

quick = settings(max_examples=200, deadline=None, database=None)
NEEDS = {
    "read_file": "read",
    "grep": "read",
    "write_file": "write",
    "edit_file": "write",
    "bash": "run",
    "ticket": "run",
    "fetch_url": "net",
    "web_search": "net",
}


def policy_of(mode: str = "ask", **rules: Any) -> Policy:
    """The policy of a run with these rules."""
    return make_policy(Settings(environ={}, **rules), mode)


def judge(name: str, subject: str, mode: str = "ask", **rules: Any) -> str:
    """The outcome of one call."""
    return decide(policy_of(mode, **rules), name, NEEDS[name], subject).outcome


# -- modes


@pytest.mark.parametrize(
    ("name", "subject", "plan", "ask", "auto"),
    [
        pytest.param("read_file", "src/a.py", "allow", "allow", "allow", id="reading"),
        pytest.param("grep", "src", "allow", "allow", "allow", id="searching"),
        pytest.param("bash", "ls -l src", "allow", "allow", "allow", id="simple and reads only"),
        pytest.param("write_file", "src/a.py", "deny", "ask", "allow", id="writing"),
        pytest.param("edit_file", "a", "deny", "ask", "allow", id="editing"),
        pytest.param("bash", "make", "deny", "ask", "allow", id="running"),
        pytest.param("bash", "echo $(id)", "deny", "ask", "allow", id="not a simple command"),
        pytest.param("ticket", '{"number":7}', "deny", "ask", "allow", id="a tool of the user"),
    ],
)
def test_a_mode_decides_what_no_rule_names(
    name: str, subject: str, plan: str, ask: str, auto: str
) -> None:
    outcomes = [judge(name, subject, mode) for mode in ("plan", "ask", "auto")]
    assert outcomes == [plan, ask, auto]


@pytest.mark.parametrize("name", ["fetch_url", "web_search"])
def test_the_network_is_asked_for_and_in_auto_no_yes_is_enough(name: str) -> None:
    outcomes = [judge(name, "https://example.com/x", mode) for mode in ("plan", "ask", "auto")]
    assert outcomes[:2] == ["ask", "ask"]
    assert outcomes[2] in ("human", "deny")


@pytest.mark.parametrize(
    ("rules", "url", "expected"),
    [
        pytest.param({"network": True}, "https://example.com/", True, id="--network"),
        pytest.param({"fetch_hosts": ("example.com",)}, "https://example.com/x", True, id="host"),
        pytest.param({"fetch_hosts": ("example.com",)}, "https://EXAMPLE.com/", True, id="case"),
        pytest.param({"fetch_hosts": ("example.com",)}, "http://example.com:8/", True, id="port"),
        pytest.param({"fetch_hosts": ("example.com",)}, "https://evil.com/", False, id="other"),
        pytest.param(
            {"fetch_hosts": ("example.com",)}, "https://example.com.evil.com/", False, id="suffix"
        ),
        pytest.param(
            {"fetch_hosts": ("example.com",)}, "https://example.com@evil.com/", False, id="user"
        ),
        pytest.param(
            {"fetch_hosts": ("example.com",)}, "https://evil.com/?example.com", False, id="query"
        ),
        pytest.param({"fetch_hosts": ()}, "https://example.com/", False, id="empty list, row 99"),
        pytest.param(
            {"allow": ("fetch_url https://example.com/*",)},
            "https://example.com/a",
            True,
            id="rule",
        ),
        pytest.param(
            {"allow": ("fetch_url https://example.com/*",)},
            "https://evil.com/a",
            False,
            id="rule 2",
        ),
        pytest.param(
            {"network": True, "deny": ("fetch_url *evil*",)}, "https://evil.com/", False, id="deny"
        ),
    ],
)
@pytest.mark.parametrize("mode", ["plan", "ask", "auto"])
def test_the_user_opens_the_network_wholly_or_by_host(
    rules: dict[str, Any], url: str, expected: bool, mode: str
) -> None:
    assert (judge("fetch_url", url, mode, **rules) == "allow") is expected


# -- the order of rules


@pytest.mark.parametrize(
    ("name", "subject", "rules", "expected"),
    [
        pytest.param("bash", "make", {"allow": ("bash make",)}, "allow", id="allow over mode"),
        pytest.param(
            "bash", "make", {"allow": ("bash make",), "ask": ("bash make",)}, "ask", id="ask first"
        ),
        pytest.param(
            "bash",
            "make",
            {"allow": ("bash make",), "ask": ("bash make",), "deny": ("bash m*",)},
            "deny",
            id="deny first",
        ),
        pytest.param("bash", "ls", {"deny": ("bash ls",)}, "deny", id="deny what reads only"),
        pytest.param("bash", "ls", {"ask": ("bash ls",)}, "ask", id="ask what reads only"),
        pytest.param("read_file", "a", {"deny": ("read_file a",)}, "deny", id="deny reading"),
        pytest.param("read_file", "a", {"ask": ("read_file *",)}, "ask", id="ask reading"),
        pytest.param("write_file", "a", {"allow": ("write_file a",)}, "allow", id="allow writing"),
        pytest.param(
            "write_file", "AGENTS.md", {"allow": ("write_file *",)}, "human", id="human over allow"
        ),
        pytest.param(
            "write_file", "AGENTS.md", {"ask": ("write_file *",)}, "human", id="human over ask"
        ),
        pytest.param(
            "write_file", "AGENTS.md", {"deny": ("write_file *",)}, "deny", id="deny over human"
        ),
        pytest.param(
            "write_file",
            "AGENTS.md",
            {"allow": ("write_file AGENTS.md",)},
            "allow",
            id="the exact name lifts the human",
        ),
        pytest.param(
            "write_file",
            "AGENTS.md",
            {"allow": ("write_file AGENTS.md",), "deny": ("* AGENTS.md",)},
            "deny",
            id="deny over the exact name",
        ),
        pytest.param(
            "write_file",
            ".agent/sessions/x.json",
            {"allow": ("write_file .agent/sessions/x.json",)},
            "deny",
            id="built-in deny over the exact name",
        ),
        pytest.param(
            "ticket", '{"number":7}', {"allow": ("ticket *",)}, "allow", id="a tool of the user"
        ),
        pytest.param(
            "write_file", "a", {"allow": ("edit_file a",)}, "ask", id="a rule of another tool"
        ),
        pytest.param("bash", "make", {"allow": ("* make",)}, "ask", id="a path is no command"),
    ],
)
def test_rules_are_taken_in_order(
    name: str, subject: str, rules: dict[str, Any], expected: str
) -> None:
    assert judge(name, subject, **rules) == expected


@pytest.mark.parametrize("mode", ["ask", "auto"])
def test_a_denial_holds_in_every_mode_that_may_do_more(mode: str) -> None:
    assert judge("bash", "rm -r x", mode, deny=("bash rm *",)) == "deny"
    assert judge("write_file", "docs/a", mode, deny=("write_file docs/**",)) == "deny"


def test_a_rule_to_ask_holds_in_auto_too() -> None:
    assert judge("bash", "make x", "auto", ask=("bash make *",)) == "ask"


@pytest.mark.parametrize("name", ["write_file", "bash"])
def test_no_allow_rule_makes_plan_mode_write(name: str) -> None:
    assert judge(name, "touch", "plan", allow=(f"{name} touch",)) == "deny"


@pytest.mark.parametrize("text", ["bash", "", "  ", "bash ", "(x) y", "ba sh|x"[:2]])
def test_a_rule_without_its_form_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="rule"):
        parse_rule(text)


def test_a_decision_names_the_rule_or_the_reason() -> None:
    made = decide(policy_of(deny=("bash rm *",)), "bash", "run", "ls; rm -r x")
    assert (made.outcome, made.rule) == ("deny", "bash rm *")
    assert "bash rm *" in made.reason
    assert decide(policy_of(), "bash", "run", "make").reason


# -- commands


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("ls", [["ls"]]),
        ("  ls   -l  ", [["ls", "-l"]]),
        ("a && b || c; d | e |& f\ng", [["a"], ["b"], ["c"], ["d"], ["e"], ["f"], ["g"]]),
        ("a&&b", [["a"], ["b"]]),
        ("grep 'a b' \"c d\" e'f'\"g\"", [["grep", "a b", "c d", "efg"]]),
        ("grep '$(x) `y` ; &' f", [["grep", "$(x) `y` ; &", "f"]]),
        ("ls 2>&1", [["ls"]]),
        ("ls >/dev/null 2>&1", [["ls"]]),
        ("ls 2>/dev/null | wc", [["ls"], ["wc"]]),
        ("ls\n\n\nwc", [["ls"], ["wc"]]),
        ("git log --format=x", [["git", "log", "--format=x"]]),
        ("echo a'", None),
        ('echo "a', None),
        ('echo "$A"', None),
        ('echo "`a`"', None),
        ("echo $A", None),
        ("echo a > b", None),
        ("echo a >b", None),
        ("echo 3>/dev/null/x", None),
        ("A=1 ls", None),
        ("(ls)", None),
        ("{ ls; }", None),
        ("! ls", None),
        ("ls *", None),
        ("ls a?", None),
        ("ls [a]", None),
        ("ls {a,b}", None),
        ("ls ~", None),
        ("ls \\a", None),
        ("ls # b", None),
        ("f() { ls; }", None),
        ("if true; then ls; fi", None),
        ("cat <<E\nx\nE", None),
        ("cat <<< x", None),
        ("cat <(ls)", None),
        ("ls\r\nwc", None),
        ("ls \x00", None),
        ("l\x1bs", None),
        ("t\u043euch a", None),
        ("touch\u00a0a", None),
        ("ls \uff41", None),
        ("ls 'b\uff41' \u00e9", [["ls", "b\uff41", "\u00e9"]]),
        ("ls; " * 40, None),
        ("ls " + "x" * 9000, None),
    ],
)
def test_a_command_is_split_into_plain_words_or_not_at_all(
    command: str, expected: list[list[str]] | None
) -> None:
    try:
        found: list[list[str]] | None = split_command(command)
    except NotSimple:
        found = None
    assert found == expected


READS_ONLY = [
    "ls",
    "ls -la src",
    "pwd",
    "cat a.txt",
    "cat -n 'a b.txt'",
    "head -n 5 a.txt",
    "tail -n 5 a.txt",
    "wc -l a.txt b.txt",
    "stat a.txt",
    "file a.txt",
    "grep -n TODO src/a.py",
    "ls && pwd",
    "ls; wc -l a.txt",
    "cat a.txt | head -n 3",
    "cat a.txt | grep x | wc -l",
    "ls missing 2>/dev/null",
    "ls missing 2>&1",
    "ls src\npwd",
]


@pytest.mark.parametrize("mode", ["plan", "ask", "auto"])
@pytest.mark.parametrize("command", READS_ONLY)
def test_an_ordinary_command_that_reads_only_is_allowed(command: str, mode: str) -> None:
    assert judge("bash", command, mode) == "allow"


# A command that must never be allowed in mode `ask`, whatever harmless command a rule allows.
TRICKY = {
    "1": "git status; touch MARKER",
    "2": "git status && rm MARKER",
    "3": "git nosuch || touch MARKER",
    "pipe": "git status | sh",
    "pipe both": "git status |& sh",
    "5": "git status & touch MARKER",
    "6 newline": "git status\ntouch MARKER",
    "6 comment": "git status # ok\ntouch MARKER",
    "6 CRLF": "git status\r\ntouch MARKER",
    "6 CR": "git status\rtouch MARKER",
    "7": "cd src && touch MARKER",
    "9 substitution": "git status $(touch MARKER)",
    "9 backticks": "git status `touch MARKER`",
    "9 quoted": 'git log --grep "$(touch MARKER)"',
    "10 in": "git status <(touch MARKER)",
    "10 out": "echo x > >(touch MARKER)",
    "11 here-string": "bash <<< 'touch MARKER'",
    "11 heredoc": "cat <<E\n$(touch MARKER)\nE",
    "13 eval": "eval 'touch MARKER'",
    "13 source": "echo 'touch MARKER' > s; . ./s",
    "14": "echo a; touch MARKER",
    "15": "git commit -m x > MARKER",
    "16": "GIT_EXTERNAL_DIFF='touch MARKER;:' git diff",
    "16 pager": "GIT_PAGER='touch MARKER; cat' git -p status",
    "17": "export GIT_EXTERNAL_DIFF='touch MARKER;:'; git diff",
    "17 declare": "declare -x PATH=./b; git diff",
    "20 BASH_ENV": "BASH_ENV=./e.sh bash -c true",
    "20 PATH": "PATH=./b:$PATH git status",
    "21": "env touch MARKER",
    "21 path": "/usr/bin/env touch MARKER",
    "21 -S": "env -S 'touch MARKER'",
    "23": "busybox touch MARKER",
    "24 python": "python3 -c \"open('MARKER','w')\"",
    "24 perl": "perl -e 'open F, \">MARKER\"'",
    "24 awk": "awk 'BEGIN{system(\"touch MARKER\")}'",
    "26 >": "git status > MARKER",
    "26 >>": "git status >> MARKER",
    "26 >|": "git status >| MARKER",
    "26 &>": "git status &> MARKER",
    "26 2>": "git status 2> MARKER",
    "26 <>": "git status <> MARKER",
    "26 leading": "> MARKER git status",
    "26 ls": "ls > MARKER",
    "26 ls joined": "ls>MARKER",
    "26 cat": "cat a.txt 1>MARKER",
    "26 null": "ls >/dev/null/../../MARKER",
    "27 diff": "git diff --output=MARKER",
    "27 log": "git log --output=MARKER",
    "27 archive": "git archive -o MARKER HEAD",
    "28": "git -c diff.external='touch MARKER;:' diff",
    "28 alias": "git -c alias.x='!touch MARKER' x",
    "29 git-dir": "git --git-dir=sub status",
    "29 -C": "git -C sub status",
    "30": "git -p status",
    "31": "git diff --ext-diff",
    "33": "git ls-remote --upload-pack='touch MARKER;false' .",
    "35": "git branch -D x",
    "35 push": "git push origin +main",
    "36 exec": "find . -maxdepth 0 -exec touch MARKER ';'",
    "36 delete": "find . -name MARKER -delete",
    "36 fprint": "find . -fprint MARKER",
    "37 w": "sed -n 'w MARKER' a.txt",
    "37 e": "sed '1e touch MARKER' a.txt",
    "37 -i": "sed -i s/a/b/ a.txt",
    "39 uniq": "uniq a.txt MARKER",
    "39 tee": "cat a.txt | tee MARKER",
    "39 dd": "dd of=MARKER",
    "39 split": "split a.txt MARKER",
    "39 xxd": "xxd -r - MARKER",
    "41": "rg --pre ./p.sh hello a.txt",
    "42 tar": "tar cf /dev/null a.txt --checkpoint=1 --checkpoint-action=exec='touch MARKER'",
    "42 make": "make --eval='x:;touch MARKER' x",
    "42 vim": "vim -c ':w MARKER' a.txt",
    "44": "sort${IFS}-oMARKER${IFS}a.txt",
    "44 plain": "sort -oMARKER a.txt",
    "45": "curl -o MARKER file:///etc/hostname",
    "46 pytest": "pytest",
    "46 npm": "npm test",
    "47": "touch${IFS}MARKER",
    "50 braces": "{touch,MARKER}",
    "50 glob": "/usr/bin/tou?h MARKER",
    "50 variables": "a=tou;b=ch;$a$b MARKER",
    "50 base64": "echo dG91Y2ggTUFSS0VS|base64 -d|sh",
    "51 root": "rm -rf /",
    "51 home": 'rm -r -f "$HOME"',
    "52 look-alike": "t\u043euch MARKER",
    "52 blank": "ls\u00a0MARKER",
    "52 semicolon": "ls\uff1btouch MARKER",
    "quote": "ls '",
    "escape": "ls \\\n touch MARKER",
    "control": "ls \x1b[2K\rsafe",
    "xargs": "ls | xargs touch",
    "command": "command touch MARKER",
    "builtin": "builtin eval touch MARKER",
    "exec": "exec touch MARKER",
    "alias": "alias ls='touch MARKER'; ls",
    "trap": "trap 'touch MARKER' EXIT",
    "function": "ls() { touch MARKER; }; ls",
    "printf -v": "printf -v 'a[$(touch MARKER)]' x",
    "test": "test -v 'a[$(touch MARKER)]'",
    "read-only outside": "cat /etc/passwd",
    "read-only parent": "cat ../secret",
    "read-only list": "wc --files0-from=/etc/passwd",
    "read-only list 2": "du --files0-from=/etc/passwd",
    "read-only patterns": "grep -f/etc/passwd a.txt",
    "read-only magic": "file -m/etc/passwd a.txt",
    "read-only compiles": "file -C -m a.txt",
    "read-only home": "cat ~/.ssh/id_rsa",
    "read-only quoted home": "ls '~'/x",
    "no end": "tail -f a.txt",
    "history": "echo !$",
    "relative ls": "./ls",
    "path ls": "sub/ls a",
    "time": "time touch MARKER",
    "coproc": "coproc touch MARKER",
    "if": "if touch MARKER; then ls; fi",
    "subshell": "(touch MARKER)",
    "arithmetic": "(( a[$(touch MARKER)] ))",
    "brackets": "[[ -v a[$(touch MARKER)] ]]",
    "network": "getent hosts secret.example.invalid",
    "device": "ls > /dev/tcp/127.0.0.1/9",
    "ls 94": "ping -c 1 secret.example.invalid",
}
HARMLESS = ("bash git status*", "bash cd *", "bash echo *", "bash ls *", "bash cat *", "bash true")
# These are what the rules above allow; a quoted ~ is a name like any other.
RULED = {"read-only outside", "read-only parent", "read-only quoted home"}


@pytest.mark.parametrize("command", TRICKY.values(), ids=TRICKY)
def test_a_tricky_command_is_never_allowed(command: str) -> None:
    assert judge("bash", command) in ("ask", "human", "deny")


@pytest.mark.parametrize("command", TRICKY.values(), ids=TRICKY)
def test_a_tricky_command_is_never_allowed_in_plan_mode(command: str) -> None:
    assert judge("bash", command, "plan") == "deny"


@pytest.mark.parametrize(
    "command",
    [pytest.param(command, id=key) for key, command in TRICKY.items() if key not in RULED],
)
def test_a_tricky_command_is_not_let_through_by_rules_for_harmless_ones(command: str) -> None:
    assert judge("bash", command, allow=HARMLESS) in ("ask", "human", "deny")


@pytest.mark.parametrize(
    "command",
    [
        "git status && rm MARKER",
        "rm MARKER",
        "rm",
        "ls; rm -r x",
        "ls\nrm x",
        "ls | rm x",
        "'rm' x",
        "r''m x",
        "rm   x",
    ],
)
def test_a_denied_command_is_denied_wherever_it_stands(command: str) -> None:
    assert judge("bash", command, "auto", deny=("bash rm *",)) == "deny"


@pytest.mark.parametrize(
    ("pattern", "command", "expected"),
    [
        ("pytest *", "pytest", "allow"),
        ("pytest *", "pytest -q tests", "allow"),
        ("pytest *", "pytest-3 x", "ask"),
        ("pytest*", "pytest-3 x", "allow"),
        ("pytest", "pytest -q", "ask"),
        ("pytest *", "PYTEST", "ask"),
        ("pytest *", "xpytest", "ask"),
        ("pytest *", "cd x && pytest", "allow"),
        ("pytest *", "cd .. && pytest", "ask"),
        ("pytest *", "pytest && pytest -q", "allow"),
        ("pytest *", "pytest && ls", "allow"),
        ("pytest *", "pytest && make", "ask"),
        ("pytest *", "pytest 2>&1 | tail -n 5", "allow"),
        ("pytest *", "pytest > log", "ask"),
        ("pytest a b", "pytest  'a'  b", "allow"),
        ("git commit -m *", "git commit -m 'a b c'", "allow"),
        ("make [ab]", "make a", "allow"),
        ("make [ab]", "make c", "ask"),
    ],
)
def test_a_rule_takes_the_words_of_one_command(pattern: str, command: str, expected: str) -> None:
    assert judge("bash", command, allow=(f"bash {pattern}",)) == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("git add \uff41.txt", "ask"),
        ("git add \uff0d\uff0dall", "ask"),
        ("git log \uff1b touch x", "ask"),
        ("git add a\uff0fb", "ask"),
        ("git add '\uff41.txt'", "allow"),
        ("git add \u00e9.txt \u65e5\u672c", "allow"),
        ("git add a.txt", "allow"),
    ],
)
def test_a_rule_does_not_take_a_word_that_looks_like_another(command: str, expected: str) -> None:
    assert judge("bash", command, allow=("bash git *",)) == expected


@pytest.mark.parametrize(
    "command",
    [
        "true; rm x > log",
        "true; rm x 2>err",
        "rm x >/dev/null 2>&1; true",
        ">log rm x",
        "(rm x)",
        "{ rm x; }",
        "( (rm x) )",
        "if true; then rm x; fi",
        "if rm x; then true; fi",
        "for f in *; do rm $f; done",
        "while rm x; do true; done",
        "case x in x) rm x;; esac",
        "f() { rm x; }; f",
        "X=1 rm x",
        "A=1 B='2' rm x",
        "! rm x",
        "sudo rm x",
        "nohup rm x &",
        "env rm x",
        "env -i A=1 rm x",
        "time rm x",
        "command rm x",
        "exec rm x",
        "ls | xargs rm",
        "echo $(rm x)",
        'echo "$(rm x)"',
        "echo `rm x`",
        "diff <(rm x) y",
        "r\\m x",
        "rm $(ls)",
        "rm *",
        "true\nrm x",
        "true && rm x || false",
    ],
)
@pytest.mark.parametrize("mode", ["ask", "auto"])
def test_a_denied_command_is_denied_inside_what_is_more_than_plain_words(
    command: str, mode: str
) -> None:
    assert judge("bash", command, mode, deny=("bash rm *",)) == "deny"


@pytest.mark.parametrize(
    "command",
    [
        "rmdir x",
        "git rm x",
        "./rm.py x > log",
        "make rm",
        "(make rm)",
        "if true; then rmdir x; fi",
        "X=1 make",
        "X=rm make x",
        "nice make rm",
        "echo $(git rm x)",
        "cat rm > x",
        "cat x > rm",
        "a=$(ls); echo $a",
        "python -c 'print(1)' | tee x",
    ],
)
def test_a_command_that_only_looks_like_a_denied_one_is_none(command: str) -> None:
    assert judge("bash", command, "auto", deny=("bash rm *",)) == "allow"
    assert judge("bash", command, "auto") == "allow"


# -- commands in a real folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A project with a secret, a link to it and a folder."""
    root = tmp_path_factory.mktemp("project")
    (root / "src").mkdir()
    for name in ("a.txt", "src/a.py", ".env", ".env.example"):
        (root / name).write_text("x")
    (root / "notes").symlink_to(".env")
    yield Workspace(root, {"HOME": str(root.parent / "home"), "PATH": os.environ["PATH"]})


def there(place: Workspace, command: str, mode: str = "ask", **rules: Any) -> str:
    """The outcome of a command in a folder."""
    state = {k: rules.pop(k) for k in ("approved", "changed", "sandboxed") if k in rules}
    policy = make_policy(Settings(environ={}, **rules), mode, place, **state)
    return decide(policy, "bash", "run", command).outcome


@pytest.mark.parametrize(
    ("command", "ask", "auto"),
    [
        ("cd src && cat a.py", "allow", "allow"),
        ("cd src | cat ../../x", "ask", "allow"),
        ("ls; cd src & cat a.py", "ask", "allow"),
        ("cd .. && ls", "ask", "allow"),
        ("cd src && git status", "ask", "allow"),
        ("grep -rn --include='*.py' x .", "allow", "allow"),
        ("grep -rn x .", "deny", "deny"),
        ("rg x", "allow", "allow"),
        ("rg --hidden x", "deny", "deny"),
        ("cat notes", "deny", "deny"),
        ("git show HEAD:.env", "deny", "deny"),
        ("python -c \"open('.env')\"", "deny", "deny"),
        ("cat .e*", "deny", "deny"),
        ("git commit -m 'hide .env: done'", "ask", "allow"),
        ("echo .env >> .gitignore", "ask", "allow"),
        ("rm -rf src/..", "deny", "deny"),
        ("rm -rf src/*", "ask", "allow"),
        ("git checkout a.txt", "human", "human"),
        ("git checkout main", "ask", "allow"),
        ("echo x > ../y", "deny", "deny"),
    ],
)
def test_a_command_is_judged_by_what_it_touches(
    place: Workspace, command: str, ask: str, auto: str
) -> None:
    assert [there(place, command, mode) for mode in ("ask", "auto")] == [ask, auto]


@pytest.mark.parametrize(
    ("command", "rules", "expected"),
    [
        ("cat .env", {"allow": ("read_file .env",)}, "allow"),
        ("cat .env", {"allow": ("bash cat .env",)}, "allow"),
        ("cat .env", {"allow": ("bash cat *", "read_file *", "read_file notes")}, "deny"),
        ("cat .env", {"allow": ("bash cat .env",), "deny": ("read_file .env",)}, "deny"),
        ("git push", {"allow": ("bash git push",)}, "allow"),
        ("git push -f", {"allow": ("bash git push *",)}, "human"),
        ("git push", {"approved": ("bash git push",)}, "human"),
        ("git push", {"lift": ("git-push",)}, "ask"),
        ("pytest -q", {"approved": ("bash pytest *",)}, "allow"),
        ("pytest -q", {"allow": ("bash pytest *",), "changed": True}, "ask"),
        ("pytest", {"allow": ("bash pytest *",), "changed": True, "sandboxed": True}, "allow"),
    ],
)
def test_a_rule_lifts_what_it_names(
    place: Workspace, command: str, rules: dict[str, Any], expected: str
) -> None:
    assert there(place, command, **rules) == expected


def test_always_is_offered_from_the_narrowest_rule_on_and_not_for_what_runs_anything() -> None:
    offers = [offered_rules(policy_of(), "bash", c) for c in ("pytest -q", "git commit -m x")]
    assert offers[0] == ["bash pytest -q", "bash pytest *"]
    assert offers[1] == ["bash git commit -m x", "bash git commit *"]
    never = ("python x.py", "bash x", "env pytest", "npm exec x", "git -C x commit", "git push")
    assert [offered_rules(policy_of(), "bash", command) for command in never] == [[]] * 6


def test_a_command_is_explained_part_by_part_with_what_would_change_it() -> None:
    assert explain(policy_of(), "ls; git push") == [
        "allow: ls",
        "    ls only reads",
        "human: git push",
        "    it publishes commits (built-in git-push)",
        "    --allow 'bash git push' would change it",
        "decision: human (it publishes commits)",
    ]
    assert explain(policy_of(), "'")[0] == "ask: '"


def test_an_unknown_name_in_lift_is_refused() -> None:
    with pytest.raises(UsageError, match="git-push"):
        policy_of(lift=("git push",))


# -- paths


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("docs/**", "docs/a.md", True),
        ("docs/**", "docs/a/b.md", True),
        ("docs/**", "src/docs/a.md", False),
        ("docs/*", "docs/a.md", True),
        ("docs/*", "docs/a/b.md", False),
        ("*.md", "a.md", True),
        ("*.md", "docs/a.md", False),
        ("**/*.md", "a.md", True),
        ("**/*.md", "docs/a/b.md", True),
        ("**", "any/thing", True),
        ("a?c", "abc", True),
        ("a?c", "a/c", False),
        ("[ab].md", "b.md", True),
        ("[!ab].md", "b.md", False),
        ("a.md", "axmd", False),
        ("Docs/A.md", "dOCS/a.MD", True),
        ("a", "a/b", False),
        ("a", "a\n", False),
    ],
)
def test_a_pattern_takes_paths(pattern: str, path: str, expected: bool) -> None:
    assert path_match(pattern, path) is expected
    outcome = judge("write_file", path, allow=(f"write_file {pattern}",))
    assert outcome == ("allow" if expected else "ask")


def test_a_rule_may_begin_with_the_current_folder() -> None:
    assert judge("write_file", "docs/a", allow=("write_file ./docs/*",)) == "allow"


@pytest.mark.parametrize(
    "command",
    [
        "cat secrets/a",
        "cat ./secrets/a",
        "cat 'secrets/a'",
        'cat "secrets/a"',
        "ls; cat secrets/a",
        "cat SECRETS/A",
        "cat x/../secrets/a",
        "echo x > secrets/a",
        "echo x >secrets/a",
        "echo x >>secrets/a",
        "cat <secrets/a",
        "grep --file=secrets/a x",
        "tar cf x secrets/a",
        "cat {root}/secrets/a",
    ],
)
@pytest.mark.parametrize("mode", ["plan", "ask", "auto"])
def test_a_path_that_is_denied_to_all_tools_is_denied_to_commands(
    tmp_path: Path, command: str, mode: str
) -> None:
    made = agent_in(tmp_path, mode=mode, deny=("* secrets/**",))
    outcome = made.judge(made.tools["bash"], {"command": command.format(root=tmp_path)}).outcome
    made.close()
    assert outcome == "deny"


@pytest.mark.parametrize("name", ["read_file", "write_file", "edit_file"])
@pytest.mark.parametrize("path", ["secrets/a", "Secrets/A", "secrets/deep/a"])
def test_a_path_that_is_denied_to_all_tools_is_denied_to_each(name: str, path: str) -> None:
    assert judge(name, path, "auto", deny=("* secrets/**",)) == "deny"


PROTECTED = [
    *((path, "deny") for path in (".agent/sessions/x.json", ".Agent/config.json", ".agent")),
    *((path, "deny") for path in (".git/hooks/pre-commit", ".git/config", "sub/.GIT/hooks/x")),
    *((path, "human") for path in ("AGENTS.md", "sub/AGENTS.md", "agents.MD", ".envrc", ".env")),
    *((path, "human") for path in (".vscode/tasks.json", ".github/workflows/ci.yml", ".mcp.json")),
]


@pytest.mark.parametrize(("path", "expected"), PROTECTED)
@pytest.mark.parametrize("mode", ["ask", "auto"])
@pytest.mark.parametrize("name", ["write_file", "edit_file"])
def test_a_protected_path_needs_more_than_a_mode(
    name: str, path: str, mode: str, expected: str
) -> None:
    assert judge(name, path, mode) == expected
    assert judge(name, path, mode, allow=(f"{name} **", "* **")) == expected


@pytest.mark.parametrize("path", [path for path, _ in PROTECTED])
def test_a_protected_path_is_not_written_in_plan_mode(path: str) -> None:
    assert judge("write_file", path, "plan") in ("deny", "human")


@pytest.mark.parametrize("path", ["src/agents.py", "agent/x", "git/config", "env", "AGENTS.md.txt"])
def test_what_only_looks_like_a_protected_path_is_not_one(path: str) -> None:
    assert judge("write_file", path, "auto") == "allow"


def agent_in(root: Path, **options: Any) -> Any:
    """An agent whose workspace is this folder."""
    fields = {"base_url": "http://127.0.0.1:9/v1", "model": "m", "save_session": False}
    environ = {"PATH": os.environ["PATH"]}
    return build_agent(Settings(**fields, workspace=str(root), environ=environ, **options))


@pytest.mark.parametrize(
    ("rule", "path", "expected"),
    [
        pytest.param("write_file docs/**", "docs/../src/a", "deny", id="dots"),
        pytest.param("write_file src/**", "link/a", "deny", id="through a link"),
        pytest.param("write_file src/**", "./src/a", "allow", id="the same place"),
        pytest.param("write_file src/**", "{root}/src/a", "allow", id="absolute"),
    ],
)
def test_a_rule_sees_where_a_path_leads(
    tmp_path: Path, rule: str, path: str, expected: str
) -> None:
    for folder in ("src", "docs", "secrets"):
        (tmp_path / folder).mkdir()
    (tmp_path / "link").symlink_to("secrets")
    agent = agent_in(tmp_path, allow=(rule,), deny=("write_file secrets/**",))
    arguments = {"path": path.format(root=tmp_path), "content": ""}
    outcome = agent.judge(agent.tools["write_file"], arguments).outcome
    agent.close()
    assert (outcome == "allow") is (expected == "allow")


def test_a_denied_path_is_denied_through_a_link_and_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / ".secret").write_text("x")
    (tmp_path / "notes").symlink_to(".secret")
    agent = agent_in(tmp_path, deny=("read_file .secret",))
    by_link, by_name = agent_in(tmp_path, deny=("read_file notes",)), agent
    tool = agent.tools["read_file"]
    outcomes = [made.judge(tool, {"path": "notes"}).outcome for made in (by_name, by_link)]
    agent.close()
    by_link.close()
    assert outcomes == ["deny", "deny"]


# -- the rule that would permit it


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        ("bash", "make"),
        ("bash", "make test; ./run 'a b'"),
        ("bash", "cd sub && make && ls"),
        ("bash", "git commit -m 'fix [x] and *?'"),
        ("bash", "git push origin main"),
        ("bash", "sort -o out a.txt"),
        ("bash", "pytest -q 2>&1 | tail -n 5"),
        ("bash", "touch a\ntouch b"),
        ("write_file", "src/a.py"),
        ("write_file", "odd [name]*?.py"),
        ("edit_file", "src/a.py"),
        ("write_file", "AGENTS.md"),
        ("write_file", ".github/workflows/ci.yml"),
        ("ticket", '{"words":["a*","[b]"]}'),
        ("fetch_url", "https://example.com/a?b=[c]*"),
        ("web_search", '{"query":"why?"}'),
    ],
)
@pytest.mark.parametrize("mode", ["ask", "auto"])
def test_the_suggested_rules_permit_the_call(name: str, subject: str, mode: str) -> None:
    rules = tuple(permitting_rules(policy_of(mode), name, subject))
    assert judge(name, subject, mode, allow=rules) == "allow"


@pytest.mark.parametrize(
    ("name", "subject", "rules"),
    [
        ("fetch_url", "https://example.com/a", ["fetch_url https://example.com/a"]),
        ("web_search", '{"query":"why"}', ['web_search {"query":"why"}']),
        ("write_file", "a.py", []),
        ("bash", "make", []),
    ],
)
def test_in_plan_mode_rules_permit_the_network_alone(
    name: str, subject: str, rules: list[str]
) -> None:
    assert permitting_rules(policy_of("plan"), name, subject) == rules


@pytest.mark.parametrize(
    ("name", "subject", "other"),
    [
        ("bash", "make a*", "make ab"),
        ("bash", "make test", "make test x"),
        ("bash", "make 'a b'", "make a c"),
        ("bash", "make [ab]", "make a"),
        ("write_file", "src/*.py", "src/a.py"),
        ("write_file", "src/[a].py", "src/a.py"),
        ("fetch_url", "https://example.com/a?b", "https://example.com/axb"),
    ],
)
def test_the_suggested_rules_permit_no_other_call(name: str, subject: str, other: str) -> None:
    rules = tuple(permitting_rules(policy_of(), name, subject))
    assert judge(name, other, allow=rules) == "ask"


WORD = st.text("ab*?[]! '-./~", min_size=1, max_size=6)


@quick
@given(st.lists(st.lists(WORD, min_size=1, max_size=3), min_size=1, max_size=3))
def test_rules_that_are_suggested_for_a_command_permit_it(parts: list[list[str]]) -> None:
    quoted = [["make", *(f'"{word}"' for word in words if "!" not in word)] for words in parts]
    command = "; ".join(" ".join(words) for words in quoted)
    rules = tuple(permitting_rules(policy_of(), "bash", command))
    assert not rules or judge("bash", command, allow=rules) == "allow"


@quick
@given(st.text("ab/*?[]!.-AGENTSmd", min_size=1, max_size=12))
def test_the_suggested_rules_permit_any_path(path: str) -> None:
    path = path.strip("/") or "a"
    assume(not os.path.normpath(path).startswith(".."))
    rules = tuple(permitting_rules(policy_of(), "write_file", path))
    assert judge("write_file", path, allow=rules) == "allow"


def test_no_rule_is_suggested_where_none_would_help() -> None:
    assert permitting_rules(policy_of(), "bash", "echo $(id) > a") == []


@pytest.fixture
def unattended(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Let an agent whom nobody watches make one call; its result."""

    def run(name: str, arguments: dict[str, Any], **options: Any) -> Any:
        with FlakyServer([{"call": name, "arguments": arguments}, "done"]) as server:
            fields = {"base_url": server.url, "model": "m", "workspace": str(tmp_path)}
            agent = build_agent(
                Settings(**fields, environ={"PATH": os.environ["PATH"]}, **options), tools=[]
            )
            result = agent.run("go")
            agent.close()
        return result

    yield run


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("bash", {"command": "touch 'a b' && touch c"}),
        ("write_file", {"path": "new [1].txt", "content": "x"}),
        ("note", {"text": "remember"}),
        ("write_file", {"path": "AGENTS.md", "content": "x"}),
    ],
    ids=["command", "file", "note", "AGENTS.md"],
)
def test_what_a_run_reports_as_permitting_really_permits(
    unattended: Callable[..., Any], name: str, arguments: dict[str, Any]
) -> None:
    refused = unattended(name, arguments)
    assert (refused.status, refused.exit_code) == ("needs_permission", 77)
    (row,) = json.loads(json.dumps(refused.denied))
    rules = tuple(row["rule"].split("\n"))
    allowed = unattended(name, arguments, allow=rules)
    assert (allowed.status, allowed.exit_code, allowed.denied) == ("done", 0, [])


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [({"path": "a", "content": "x"}, 0), ({"path": "AGENTS.md", "content": "x"}, 77)],
    ids=["ask", "ask a human"],
)
def test_yes_answers_ask_and_never_ask_a_human(
    unattended: Callable[..., Any], arguments: dict[str, Any], exit_code: int
) -> None:
    result = unattended("write_file", arguments, mode="ask", unattended=True)
    assert result.exit_code == exit_code


@pytest.fixture(scope="module")
def vault(tmp_path_factory) -> Workspace:
    """A folder with secrets in it, without a repository; below it one with a part as workspace."""
    root = tmp_path_factory.mktemp("vault")
    for name in ("d1", "d2", "docs", "part/.git", "part/src"):
        (root / name).mkdir(parents=True)
    for name in (".env", "d1/.env"):
        (root / name).write_text("KEY=1\n")
    for name in ("a.txt", "docs/k.txt", "d2/b.txt", ".env.example"):
        (root / name).write_text("text\n")
    key = "-----BEGIN PRIVATE KEY-----\nMIIB\n-----END PRIVATE KEY-----\n"
    (root / "docs/k.txt").write_text(key)
    return Workspace(root, {"PATH": os.environ["PATH"], "HOME": str(root / "home")})


@pytest.mark.parametrize(
    ("command", "outcome"),
    [
        ("rg --hidden -g '!.git/*' S", "deny"),
        ("rg --hidden -g '!docs/*' S", "deny"),
        ("grep -r --exclude='docs/*' S .", "deny"),
        ("rg --hidden --iglob '.ENV' S", "deny"),
        ("rg --hidden -g '[^a]env' S", "deny"),
        ("grep -r --exclude=.env --include=.env S .", "deny"),
        ("grep -r --include='*.py' S .", "allow"),
        ("rg --hidden -g '*.py' S", "allow"),
        ("rg S d2", "allow"),
        ("git log -L1,2:.env", "deny"),
        ("git log -L1,2:../x", "ask"),
        ("git log -L1,2:a.txt", "allow"),
        ("git diff d1 d2", "deny"),
        ("git diff a.txt d2", "allow"),
        ("git diff", "allow"),
        ("cp .env.example .env", "human"),
        ("touch .env", "human"),
        ("cp .env a.txt", "deny"),
        ("mv .env b.txt", "deny"),
        ("mv a.txt .env", "human"),
        ("touch \x1b[8mx", "human"),
        ("see IN_TEXT", "ask"),
        ("git commit -m 'gооd'", "ask"),
        ("git commit -m 'привет мир'", "ask"),
        ("curl -o .agent/x http://127.0.0.1:9/", "deny"),
        ("sed -n '١,٥p' a.txt", "ask"),
    ],
)
def test_a_command_is_judged_by_what_it_would_show_or_write(vault, command, outcome):
    assert decide(make_policy(Settings(), "ask", vault), "bash", "run", command).outcome == outcome


@pytest.mark.parametrize(
    ("command", "outcome"),
    [
        ("grep -r S .", "deny"),
        ("grep -r S d1", "allow"),
        ("pytest > /tmp/log", "allow"),
        ("touch /tmp/y", "allow"),
        ("touch /var/y", "deny"),
    ],
)
def test_the_sandbox_hides_names_and_has_a_folder_of_its_own(vault, command, outcome):
    policy = make_policy(Settings(), "auto", vault, sandboxed=True)
    assert decide(policy, "bash", "run", command).outcome == outcome


def test_a_path_in_a_commit_is_asked_for_where_the_repository_is_above(vault):
    part = Workspace(vault.root / "part/src", vault.environ)
    policies = [make_policy(Settings(), "ask", place) for place in (vault, part)]
    told = [decide(policy, "bash", "run", "git show HEAD:a.txt") for policy in policies]
    assert told[1].outcome == "ask"


def test_the_running_agent_is_only_written_by_a_human_or_as_the_project():
    folder = Path(sys.modules["agent"].__file__).parent
    within = make_policy(Settings(), "auto", Workspace(folder.parent, {}))
    itself = f"{folder.name}/agent.py"
    assert decide(within, "write_file", "write", itself).outcome == "human"
    assert decide(within, "write_file", "write", f"{itself}.txt").outcome == "allow"
    project = make_policy(Settings(), "auto", Workspace(folder, {}))
    assert decide(project, "write_file", "write", "agent.py").outcome == "allow"


def test_the_row_for_control_characters_is_lifted_by_its_name(vault):
    lifted = make_policy(Settings(lift=("control",)), "auto", vault)
    assert decide(lifted, "bash", "run", "touch \x1b[8mx").outcome == "allow"
