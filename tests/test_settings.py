"""Section 1: defaults < the user's config file < environment < flags, and the command line."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent import (
    PROVIDERS,
    AgentError,
    Settings,
    UsageError,
    build_agent,
    load,
    wanted_format,
)
from flaky_server import FlakyServer

ID = "20250102-030405-ab12"


@pytest.fixture
def loaded(tmp_path: Path) -> Callable:
    """Load settings with a home folder of its own; config and env are the texts of its files."""

    def run(*argv: str, config: str = "", env: str = "", **environ: str) -> Settings:
        folder = tmp_path / ".config" / "agent"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("config.toml", config), ("env", env)):
            if text:
                (folder / name).write_text(text)
        return load(list(argv), {"HOME": str(tmp_path), **environ})[0]

    return run


@pytest.fixture
def parsed(tmp_path: Path) -> Callable:
    """What the command line says, apart from the settings."""
    return lambda *argv: load(list(argv), {"HOME": str(tmp_path)})[1]


def picked(settings: Settings, *names: str) -> tuple:
    """Some fields of the settings."""
    return tuple(getattr(settings, name) for name in names)


def model_of(settings: Settings) -> str:
    """The model that an agent with these settings would ask."""
    agent = build_agent(settings)
    agent.close()
    return agent.client.model


# -- layers --------------------------------------------------------------------------------------


def test_without_any_setting_the_defaults_hold(loaded):
    settings = loaded()
    assert picked(settings, "endpoint", "api_key", "mode", "workspace") == (
        "https://api.openai.com/v1",
        "",
        "ask",
        ".",
    )
    assert picked(settings, "max_turns", "compact_at", "context") == (100, 0.75, 0)
    assert picked(settings, "allow", "deny", "save_session", "bare") == ((), (), True, False)


@pytest.mark.parametrize(
    "field, config, variable, flag, values",
    [
        pytest.param(
            "model", 'model = "c"', ("AGENT_MODEL", "e"), ("--model", "f"), "c e f", id="model"
        ),
        pytest.param(
            "mode",
            'mode = "plan"',
            ("AGENT_MODE", "ask"),
            ("--mode", "auto"),
            "plan ask auto",
            id="mode",
        ),
        pytest.param(
            "base_url",
            'base_url = "http://c/v1"',
            ("AGENT_BASE_URL", "http://e/v1"),
            ("--base-url", "http://f/v1"),
            "http://c/v1 http://e/v1 http://f/v1",
            id="base_url",
        ),
        pytest.param(
            "provider",
            'provider = "groq"',
            ("AGENT_PROVIDER", "xai"),
            ("--provider", "mistral"),
            "groq xai mistral",
            id="provider",
        ),
        pytest.param(
            "context",
            "context = 1000",
            ("AGENT_CONTEXT", "2000"),
            ("--context", "3000"),
            "1000 2000 3000",
            id="context",
        ),
    ],
)
def test_each_layer_wins_over_those_below_it(loaded, field, config, variable, flag, values):
    layers = [{"config": config}, dict([variable])]
    found = [getattr(loaded(config=config), field)]
    found.append(getattr(loaded(config=config, **layers[1]), field))
    found.append(getattr(loaded(*flag, config=config, **layers[1]), field))
    assert [str(value) for value in found] == values.split()


def test_the_environment_has_the_workspace_and_a_flag_wins_over_it(loaded):
    found = [loaded(AGENT_WORKSPACE="/e"), loaded("-w", "/f", AGENT_WORKSPACE="/e")]
    found += [loaded("-C", "/g"), loaded("--workspace", "/h")]
    assert [settings.workspace for settings in found] == ["/e", "/f", "/g", "/h"]


@pytest.mark.parametrize(
    "text, number",
    [
        pytest.param("0.6", 0.6, id="share of the window"),
        pytest.param("1", 1.0, id="the whole window"),
        pytest.param("50000", 50000.0, id="characters"),
        pytest.param("0", 0.0, id="off"),
    ],
)
def test_compact_at_is_a_share_a_size_or_off(loaded, text, number):
    assert loaded(AGENT_COMPACT_AT=text).compact_at == number
    assert loaded(config=f"compact_at = {text}").compact_at == number


def test_the_environment_wins_over_the_config_for_compact_at(loaded):
    assert loaded(config="compact_at = 0.5", AGENT_COMPACT_AT="0").compact_at == 0.0


def test_rules_of_the_config_and_of_flags_add_up(loaded):
    config = 'allow = ["bash ls"]\nask = ["bash make"]\ndeny = ["* secrets/**"]'
    settings = loaded("--allow", "bash a", "--deny", "bash d", "--allow", "bash b", config=config)
    assert settings.allow == ("bash ls", "bash a", "bash b")
    assert picked(settings, "ask", "deny") == (("bash make",), ("* secrets/**", "bash d"))


def test_an_empty_variable_counts_as_unset(loaded):
    names = ("AGENT_MODEL", "AGENT_MODE", "AGENT_BASE_URL", "AGENT_PROVIDER", "AGENT_CONTEXT")
    names += ("AGENT_WORKSPACE", "AGENT_COMPACT_AT", "AGENT_API_KEY", "OPENAI_BASE_URL")
    settings = loaded(**dict.fromkeys(names, ""))
    assert dataclasses.asdict(settings) | {"environ": 0} == dataclasses.asdict(loaded()) | {
        "environ": 0
    }


def test_xdg_config_home_moves_the_config(loaded, tmp_path):
    folder = tmp_path / "elsewhere" / "agent"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('model = "there"')
    found = loaded(config='model = "here"', XDG_CONFIG_HOME=str(tmp_path / "elsewhere"))
    assert found.model == "there"


def test_bare_leaves_the_config_out(loaded):
    settings = loaded("--bare", config='model = "c"\ndeny = ["bash ls"]')
    assert picked(settings, "model", "deny", "bare") == ("", (), True)


def test_bare_does_not_even_read_a_broken_config(loaded):
    assert loaded("--bare", config="modle = 1").bare


def test_nothing_in_a_project_configures_the_agent(loaded, tmp_path):
    project = tmp_path / "project"
    (project / ".agent").mkdir(parents=True)
    (project / ".env").write_text("AGENT_API_KEY=stolen\nAGENT_MODE=auto\n")
    for name in (".agent/config.toml", "config.toml", ".agent.toml"):
        (project / name).write_text('mode = "auto"\nbase_url = "http://evil/v1"')
    settings = loaded("-w", str(project))
    assert picked(settings, "api_key", "mode", "base_url") == ("", "ask", "")


def test_a_project_that_is_the_current_folder_does_not_configure_it_either(loaded, tmp_path):
    home = tmp_path / ".config"
    home.mkdir()
    (tmp_path / ".env").write_text("AGENT_API_KEY=stolen\n")
    (tmp_path / "config.toml").write_text('mode = "auto"')
    assert picked(loaded("-w", str(tmp_path)), "api_key", "mode") == ("", "ask")


# -- endpoint, key and model ---------------------------------------------------------------------

ROWS = [
    pytest.param("openai", "https://api.openai.com/v1", "OPENAI_API_KEY", id="openai"),
    pytest.param(
        "openrouter", "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY", id="openrouter"
    ),
    pytest.param("groq", "https://api.groq.com/openai/v1", "GROQ_API_KEY", id="groq"),
    pytest.param("nvidia", "https://integrate.api.nvidia.com/v1", "NVIDIA_API_KEY", id="nvidia"),
    pytest.param("deepseek", "https://api.deepseek.com/v1", "DEEPSEEK_API_KEY", id="deepseek"),
    pytest.param("mistral", "https://api.mistral.ai/v1", "MISTRAL_API_KEY", id="mistral"),
    pytest.param(
        "gemini",
        "https://generativelanguage.googleapis.com/v1beta/openai",
        "GEMINI_API_KEY",
        id="gemini",
    ),
    pytest.param("together", "https://api.together.xyz/v1", "TOGETHER_API_KEY", id="together"),
    pytest.param("xai", "https://api.x.ai/v1", "XAI_API_KEY", id="xai"),
]
LOCAL = [
    pytest.param("ollama", 11434, id="ollama"),
    pytest.param("lmstudio", 1234, id="lmstudio"),
    pytest.param("llamacpp", 8080, id="llamacpp"),
    pytest.param("vllm", 8000, id="vllm"),
]


@pytest.mark.parametrize("name, url, variable", ROWS)
def test_a_provider_has_its_url_and_its_own_key(loaded, name, url, variable):
    settings = loaded("--provider", name, **{variable: "own"})
    assert picked(settings, "endpoint", "api_key") == (url, "own")


@pytest.mark.parametrize("name, url, variable", ROWS)
def test_a_provider_has_a_default_model(loaded, tmp_path, name, url, variable):
    settings = loaded("--provider", name, "--no-session", "-w", str(tmp_path), **{variable: "own"})
    assert model_of(settings) == PROVIDERS[name].model != ""


@pytest.mark.parametrize("name, port", LOCAL)
def test_a_local_provider_needs_no_key(loaded, name, port):
    settings = loaded("--provider", name)
    assert settings.endpoint in (f"http://127.0.0.1:{port}/v1", f"http://localhost:{port}/v1")
    assert settings.api_key == ""


@pytest.mark.parametrize(
    "provider, environ, key",
    [
        pytest.param("groq", "AGENT_API_KEY GROQ_API_KEY OPENAI_API_KEY", "agent", id="agent"),
        pytest.param("groq", "GROQ_API_KEY OPENAI_API_KEY", "groq", id="the provider's own"),
        pytest.param("groq", "OPENAI_API_KEY", "openai", id="OpenAI's as the last"),
        pytest.param("groq", "XAI_API_KEY", "", id="never another provider's"),
        pytest.param("openai", "GROQ_API_KEY OPENAI_API_KEY", "openai", id="OpenAI"),
        pytest.param("xai", "GROQ_API_KEY XAI_API_KEY", "xai", id="xAI"),
    ],
)
def test_the_key_falls_back_in_order(loaded, provider, environ, key):
    names = {name: name.split("_")[0].lower() for name in environ.split()}
    assert loaded("--provider", provider, **names).api_key == key


def test_a_key_loses_the_blanks_and_line_ends_around_it(loaded):
    assert loaded(AGENT_API_KEY=" sk-1\r\n").api_key == "sk-1"


@pytest.mark.parametrize(
    "argv, config, environ, endpoint",
    [
        pytest.param((), "", {}, "http://other/v1", id="when nothing else is set"),
        pytest.param((), "", {"AGENT_BASE_URL": "http://e/v1"}, "http://e/v1", id="below the URL"),
        pytest.param(
            (),
            "",
            {"AGENT_PROVIDER": "groq"},
            "https://api.groq.com/openai/v1",
            id="below the provider",
        ),
        pytest.param((), 'base_url = "http://c/v1"', {}, "http://c/v1", id="below the config"),
        pytest.param(
            (),
            'provider = "xai"',
            {},
            "https://api.x.ai/v1",
            id="below the provider of the config",
        ),
        pytest.param(("--base-url", "http://f/v1"), "", {}, "http://f/v1", id="below a flag"),
        pytest.param(
            ("--provider", "openai"), "", {}, "https://api.openai.com/v1", id="below --provider"
        ),
    ],
)
def test_openai_base_url_counts_last(loaded, argv, config, environ, endpoint):
    settings = loaded(*argv, config=config, OPENAI_BASE_URL="http://other/v1", **environ)
    assert settings.endpoint == endpoint


def test_a_layer_that_names_an_endpoint_replaces_the_one_below(loaded):
    config = 'provider = "groq"'
    by_url = loaded("--base-url", "http://f/v1", config=config, GROQ_API_KEY="groq")
    by_name = loaded("--provider", "xai", AGENT_BASE_URL="http://e/v1", XAI_API_KEY="xai")
    assert picked(by_url, "endpoint", "api_key") == ("http://f/v1", "")
    assert picked(by_name, "endpoint", "api_key") == ("https://api.x.ai/v1", "xai")


def test_a_provider_and_a_url_of_one_layer_belong_together(loaded):
    config = 'provider = "groq"\nbase_url = "http://proxy/v1"'
    settings = loaded(config=config, GROQ_API_KEY="groq", OPENAI_API_KEY="openai")
    assert picked(settings, "endpoint", "api_key") == ("http://proxy/v1", "groq")


def test_the_url_of_a_known_provider_is_known_by_it(loaded, tmp_path):
    settings = loaded(AGENT_BASE_URL="https://api.groq.com/openai/v1/", GROQ_API_KEY="groq")
    named = dataclasses.replace(settings, workspace=str(tmp_path), save_session=False)
    assert (settings.api_key, model_of(named)) == ("groq", PROVIDERS["groq"].model)


def test_the_model_of_an_unknown_url_is_the_first_that_the_server_lists(loaded, tmp_path):
    with FlakyServer([]) as server:
        settings = loaded("--no-session", "-w", str(tmp_path), AGENT_BASE_URL=server.url)
        assert model_of(settings) == "flaky-1"


def test_a_model_that_is_set_is_taken_without_asking_the_server(loaded, tmp_path):
    url = "http://127.0.0.1:9/v1"
    settings = loaded("--no-session", "-w", str(tmp_path), "-m", "mine", AGENT_BASE_URL=url)
    assert model_of(settings) == "mine"


def test_an_endpoint_has_no_slash_at_its_end(loaded):
    assert loaded("--base-url", "http://f/v1//").endpoint == "http://f/v1"


# -- the files of the user -----------------------------------------------------------------------


def test_every_config_key_that_is_built_is_taken(loaded):
    text = 'model = "m"\nprovider = "groq"\nbase_url = "http://c/v1"\nmode = "plan"\n'
    text += 'context = 9\ncompact_at = 0\nallow = ["bash a"]\nask = ["bash b"]\ndeny = ["bash c"]\n'
    settings = loaded(config=text + 'fetch_hosts = ["example.org"]\n')
    names = ("model", "provider", "base_url", "mode", "context", "compact_at")
    assert picked(settings, *names) == ("m", "groq", "http://c/v1", "plan", 9, 0.0)
    rules = picked(settings, "allow", "ask", "deny", "fetch_hosts")
    assert rules == (("bash a",), ("bash b",), ("bash c",), ("example.org",))
    assert loaded(config='[hooks]\non_stop = ["a", "b"]').hooks == {"on_stop": ("a", "b")}
    prices = (
        '[prices."a"]\ninput = 2\noutput = 8.5\n[prices."b"]\ninput = 2\ncached = 1\noutput = 8'
    )
    assert loaded(config=prices).prices == {"a": (2, 2, 8.5), "b": (2, 1, 8)}


@pytest.mark.parametrize(
    "text, key",
    [
        pytest.param('modle = "m"', "modle", id="typo"),
        pytest.param("model = 7", "model", id="number for text"),
        pytest.param('context = "8k"', "context", id="text for a number"),
        pytest.param("context = true", "context", id="truth for a number"),
        pytest.param("context = 8.5", "context", id="fraction"),
        pytest.param('compact_at = "off"', "compact_at", id="text for a fraction"),
        pytest.param("compact_at = true", "compact_at", id="truth for a fraction"),
        pytest.param('allow = "bash ls"', "allow", id="text for a list"),
        pytest.param('deny = ["bash ls", 7]', "deny", id="number in a list"),
        pytest.param('[ask]\nx = "bash ls"', "ask", id="table for a list"),
        pytest.param('[models]\nx = "y"', "models", id="unknown table"),
        pytest.param('mode = "fast"', "mode", id="unknown mode"),
        pytest.param('provider = "opnai"', "provider", id="unknown provider"),
        pytest.param("context = -1", "context", id="negative number"),
        pytest.param("compact_at = nan", "compact_at", id="no number"),
        pytest.param("hooks = 3", "hooks", id="no table"),
        pytest.param('[hooks]\nbefore = ["a"]', "hooks.before", id="unknown event"),
        pytest.param('[hooks]\non_stop = "a b"', "hooks.on_stop", id="text for an argv"),
        pytest.param("[hooks]\non_stop = []", "hooks.on_stop", id="empty argv"),
        pytest.param("prices = 3", "prices", id="no table of prices"),
        pytest.param('[prices."m"]\ninput = nan\noutput = 1', "input", id="price that is none"),
        pytest.param('[prices."m"]\ninput = "1"\noutput = 1', "input", id="price as text"),
        pytest.param('[prices."m"]\ninput = 1\noutput = -1', "output", id="negative price"),
        pytest.param('[prices."m"]\ninput = 1', "output", id="price missing"),
        pytest.param("[prices.m-4.1]\ninput = 1", 'prices."m-4"', id="model without quotes"),
    ],
)
def test_an_error_in_the_config_is_a_usage_error_that_names_the_key(loaded, text, key):
    with pytest.raises(UsageError, match=key) as caught:
        loaded(config=text)
    assert (caught.value.exit_code, "\n" in str(caught.value)) == (2, False)


@pytest.mark.parametrize(
    "text", ['modle = "m"', "model = 7", "model = ", "deny = [7]", 'a = "\x00"'], ids=repr
)
def test_an_error_in_the_config_names_the_file(loaded, tmp_path, text):
    with pytest.raises(UsageError) as caught:
        loaded(config=text)
    assert f"{tmp_path}/.config/agent/config.toml" in str(caught.value)


def test_a_config_that_can_not_be_read_is_named(loaded, tmp_path):
    (tmp_path / ".config" / "agent" / "config.toml").mkdir(parents=True)
    with pytest.raises(UsageError, match="agent/config.toml"):
        loaded()


def test_a_config_that_is_no_utf8_is_named(loaded, tmp_path):
    loaded()
    (tmp_path / ".config" / "agent" / "config.toml").write_bytes(b'model = "caf\xe9"')
    with pytest.raises(UsageError, match="agent/config.toml"):
        loaded()


@pytest.mark.parametrize(
    "line, key",
    [
        pytest.param("AGENT_API_KEY=sk-1", "sk-1", id="plain"),
        pytest.param("  AGENT_API_KEY = sk-1  ", "sk-1", id="blanks"),
        pytest.param("export AGENT_API_KEY=sk-1", "sk-1", id="export"),
        pytest.param('AGENT_API_KEY="sk-1"', "sk-1", id="double quotes"),
        pytest.param("AGENT_API_KEY='sk-1'", "sk-1", id="single quotes"),
        pytest.param("# comment\n\nAGENT_API_KEY=sk-1\n", "sk-1", id="comment and empty line"),
        pytest.param("AGENT_API_KEY=sk=1==", "sk=1==", id="equals signs in the key"),
        pytest.param("OPENAI_API_KEY=sk-2", "sk-2", id="another name"),
        pytest.param("#AGENT_API_KEY=sk-1", "", id="commented out"),
    ],
)
def test_keys_may_stand_in_the_env_file(loaded, line, key):
    assert loaded(env=line).api_key == key


def test_the_environment_wins_over_the_env_file(loaded):
    env = "AGENT_API_KEY=file\nAGENT_MODEL=file"
    settings = loaded(env=env, AGENT_API_KEY="process")
    assert picked(settings, "api_key", "model") == ("process", "file")


def test_keys_of_the_env_file_do_not_enter_the_environment_of_commands(loaded, tmp_path):
    assert dict(loaded(env="GROQ_API_KEY=secret", LANG="C").environ) == {
        "HOME": str(tmp_path),
        "LANG": "C",
    }


def test_a_line_that_is_no_assignment_is_named_with_its_number(loaded):
    with pytest.raises(UsageError, match=r"agent/env:2\b"):
        loaded(env="AGENT_MODEL=m\nsk-lost\n")


@pytest.mark.parametrize(
    "name, value",
    [
        pytest.param("AGENT_CONTEXT", "8k", id="context"),
        pytest.param("AGENT_CONTEXT", "1.5", id="fraction of a token"),
        pytest.param("AGENT_COMPACT_AT", "off", id="compact_at"),
    ],
)
def test_a_number_in_the_environment_that_is_none_is_named(loaded, name, value):
    with pytest.raises(UsageError, match=f"{name}.*{value}"):
        loaded(**{name: value})


@pytest.mark.parametrize(
    "name, value",
    [
        pytest.param("AGENT_MODE", "fast", id="mode"),
        pytest.param("AGENT_PROVIDER", "opnai", id="provider"),
        pytest.param("AGENT_BASE_URL", "localhost:8000", id="URL without a scheme"),
        pytest.param("AGENT_CONTEXT", "-1", id="negative window"),
        pytest.param("AGENT_COMPACT_AT", "-0.5", id="negative share"),
        pytest.param("AGENT_COMPACT_AT", "nan", id="share that is no number"),
    ],
)
def test_a_value_in_the_environment_that_makes_no_sense_is_a_usage_error(loaded, name, value):
    with pytest.raises(UsageError) as caught:
        loaded(**{name: value})
    assert (caught.value.exit_code, "\n" in str(caught.value)) == (2, False)


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_a_byte_order_mark_in_the_files_of_the_user_is_passed_over(loaded, tmp_path, end):
    loaded()
    folder = tmp_path / ".config" / "agent"
    (folder / "config.toml").write_bytes(f'\ufeffmodel = "m"{end}context = 9{end}'.encode())
    (folder / "env").write_bytes(f"\ufeffAGENT_API_KEY=sk-1{end}AGENT_MODE=plan{end}".encode())
    names = ("model", "context", "api_key", "mode")
    assert picked(loaded(), *names) == ("m", 9, "sk-1", "plan")


# -- the settings themselves ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, name",
    [
        pytest.param({"mode": "fast"}, "mode", id="mode"),
        pytest.param({"mode": ""}, "mode", id="no mode"),
        pytest.param({"provider": "opnai"}, "provider", id="provider"),
        pytest.param({"base_url": "api.example.org/v1"}, "URL", id="no scheme"),
        pytest.param({"base_url": "ftp://example.org"}, "URL", id="other scheme"),
        pytest.param({"base_url": "https://"}, "URL", id="no host"),
        pytest.param({"max_turns": -1}, "max_turns", id="negative steps"),
        pytest.param({"context": -1}, "context", id="negative window"),
        pytest.param({"compact_at": -0.1}, "compact_at", id="negative share"),
        pytest.param({"compact_at": float("nan")}, "compact_at", id="share that is no number"),
        pytest.param({"timeout": float("inf")}, "timeout", id="time without an end"),
        pytest.param({"check": " "}, "check", id="blank check"),
        pytest.param({"prices": {"m": (1.0, 1.0)}}, 'prices."m"', id="price missing"),
        pytest.param({"prices": {"m": (1.0, 1.0, float("nan"))}}, 'prices."m"', id="no price"),
    ],
)
def test_settings_that_make_no_sense_are_refused_where_they_are_made(values, name):
    with pytest.raises(UsageError, match=name) as caught:
        Settings(**values)
    assert isinstance(caught.value, AgentError)


@pytest.mark.parametrize("name", ["max_turns", "context", "compact_at"])
@pytest.mark.parametrize("value", [None, "5", "", True, False], ids=repr)
def test_a_number_of_the_settings_that_is_none_is_refused_with_its_name(name, value):
    with pytest.raises(UsageError, match=name) as caught:
        Settings(**{name: value})
    assert caught.value.exit_code == 2


KEYS = [
    pytest.param("sk-abc\nsk-SECRET", id="newline"),
    pytest.param("sk-\u2019SECRET", id="typographic quote"),
    pytest.param("sk-\u043a\u043b\u044e\u0447-SECRET", id="other letters"),
    pytest.param("sk-SECRET\r\tx", id="tab"),
    pytest.param("sk SECRET", id="blank"),
    pytest.param("sk-\udcffSECRET", id="byte that is no text"),
    pytest.param("sk-\0SECRET", id="NUL"),
]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(loaded, key):
    calls = [lambda: Settings(api_key=key), lambda: loaded("x", AGENT_API_KEY=key)]
    for refused in calls:
        with pytest.raises(UsageError, match="key") as caught:
            refused()
        assert ("SECRET" in str(caught.value), "\n" in str(caught.value)) == (False, False)


def test_settings_can_not_be_changed_and_never_show_the_key():
    settings = Settings(api_key="sk-secret", environ={"OPENAI_API_KEY": "sk-secret"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.mode = "auto"
    assert "sk-secret" not in repr(settings)


# -- the command line: options and the prompt ----------------------------------------------------


@pytest.mark.parametrize(
    "argv, prompt",
    [
        pytest.param([], [], id="none"),
        pytest.param(["fix", "the", "bug"], ["fix", "the", "bug"], id="words"),
        pytest.param(["fix the bug"], ["fix the bug"], id="one word with blanks"),
        pytest.param(["fix", "--yes", "the", "bug"], ["fix", "the", "bug"], id="option between"),
        pytest.param(["fix", "-m", "x", "it", "-y", "now"], ["fix", "it", "now"], id="two between"),
        pytest.param(["--yes", "fix"], ["fix"], id="option before"),
        pytest.param(["fix", "--yes"], ["fix"], id="option behind"),
        pytest.param(["-"], ["-"], id="a dash"),
        pytest.param(["-y", "-"], ["-"], id="a dash behind an option"),
        pytest.param(["- fix the bug"], ["- fix the bug"], id="bullet"),
        pytest.param(["-fix the bug"], ["-fix the bug"], id="dash and words"),
        pytest.param(["--- a/x\n+++ b/x"], ["--- a/x\n+++ b/x"], id="diff"),
        pytest.param(["---\ntitle: x\n---"], ["---\ntitle: x\n---"], id="front matter"),
        pytest.param(["--yes please do it"], ["--yes please do it"], id="begins like an option"),
        pytest.param(["-y please"], ["-y please"], id="begins like a short option"),
        pytest.param(["--foo=1 is what?"], ["--foo=1 is what?"], id="unknown option and words"),
        pytest.param(["-\tx"], ["-\tx"], id="dash and tab"),
        pytest.param(["-x\ny"], ["-x\ny"], id="dash and line end"),
        pytest.param(["fix", "- a", "--yes", "- b"], ["fix", "- a", "- b"], id="bullets and words"),
        pytest.param(["--", "--yes"], ["--yes"], id="end of options"),
        pytest.param(["--", "-fix"], ["-fix"], id="a word that looks like an option"),
        pytest.param(["fix", "--", "-m", "--mode"], ["fix", "-m", "--mode"], id="words on both"),
        pytest.param(["--", "a", "--", "b"], ["a", "--", "b"], id="only the first ends options"),
        pytest.param(["--yes", "--"], [], id="nothing behind the end"),
        pytest.param(["--resume", "--", ID], [ID], id="the end behind --resume"),
        pytest.param(["a=b", "x@y", "#1"], ["a=b", "x@y", "#1"], id="other signs"),
    ],
)
def test_the_prompt_is_what_is_no_option(parsed, argv, prompt):
    assert parsed(*argv).prompt == prompt


@pytest.mark.parametrize(
    "argv, resume, prompt",
    [
        pytest.param(["fix"], None, ["fix"], id="not asked for"),
        pytest.param(["--resume"], "", [], id="alone"),
        pytest.param(["-r"], "", [], id="short and alone"),
        pytest.param(["--resume", ID], ID, [], id="a whole id"),
        pytest.param(["-r", ID, "go on"], ID, ["go on"], id="short, id and prompt"),
        pytest.param(["--resume", "20250102", "x"], "20250102", ["x"], id="eight digits"),
        pytest.param(["--resume", "20250102-0304"], "20250102-0304", [], id="part of the time"),
        pytest.param(
            ["--resume", "20250102-030405-"], "20250102-030405-", [], id="dash at the end"
        ),
        pytest.param(["--resume", "20250102-030405-a"], "20250102-030405-a", [], id="one hex"),
        pytest.param(["--resume", "2025010"], "", ["2025010"], id="seven digits are a word"),
        pytest.param(["--resume", "1234-567"], "", ["1234-567"], id="seven digits and a dash"),
        pytest.param(["--resume", "deadbeef"], "", ["deadbeef"], id="only letters"),
        pytest.param(["--resume", "ab12"], "", ["ab12"], id="only the end of an id"),
        pytest.param(
            ["--resume", f"{ID}a"], "", [f"{ID}a"], id="five hex digits behind the last dash"
        ),
        pytest.param(["--resume", "20250102xyz"], "", ["20250102xyz"], id="other letters"),
        pytest.param(["--resume", "20250102 was fine"], "", ["20250102 was fine"], id="a sentence"),
        pytest.param(["--resume", ID + ".json"], "", [ID + ".json"], id="a file name"),
        pytest.param(["--resume", "fix", "it"], "", ["fix", "it"], id="words"),
        pytest.param(["--resume", "--yes", "fix"], "", ["fix"], id="another option"),
        pytest.param(["--resume", "- go on"], "", ["- go on"], id="bullet"),
        pytest.param(["--yes", "--resume", "what did you do?"], "", ["what did you do?"], id="doc"),
        pytest.param(["fix", "--resume"], "", ["fix"], id="behind the prompt"),
        pytest.param(["fix", "--resume", ID, "it"], ID, ["fix", "it"], id="between words"),
        pytest.param(["--resume=abc", "x"], "abc", ["x"], id="by an equals sign: always"),
        pytest.param(["--resume=", ID], "", [ID], id="nothing behind the equals sign"),
        pytest.param(["-c", "go on"], "", ["go on"], id="--continue takes no id"),
        pytest.param(["--continue", ID], "", [ID], id="--continue and a number"),
        pytest.param(["-c", "--resume=abc"], "abc", [], id="both"),
    ],
)
def test_the_word_behind_resume_is_an_id_only_if_it_looks_like_one(parsed, argv, resume, prompt):
    found = parsed(*argv)
    assert (found.resume, found.prompt) == (resume, prompt)


@pytest.mark.parametrize(
    "word",
    "--ye --yess --mod --res --resum=1 --resum --contin --no-sess --json-x --max --allo --ver"
    " --he --frobnicate -Z --- ---foo -fix --base_url --Yes".split(),
)
def test_unknown_options_and_abbreviations_are_errors(parsed, word):
    with pytest.raises(UsageError) as caught:
        parsed(word, "x")
    assert (caught.value.exit_code, "\n" in str(caught.value)) == (2, False)


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(["--mode"], id="value missing"),
        pytest.param(["--mode", "fast"], id="unknown mode"),
        pytest.param(["--mode="], id="empty mode"),
        pytest.param(["--mode=plan it"], id="mode and words"),
        pytest.param(["--output-format", "xml"], id="unknown format"),
        pytest.param(["--max-turns", "many"], id="steps that are no number"),
        pytest.param(["--max-turns", "-1"], id="negative steps"),
        pytest.param(["--context", "1.5"], id="fraction"),
        pytest.param(["--provider", "opnai"], id="unknown provider"),
        pytest.param(["--base-url", "localhost"], id="URL without a scheme"),
        pytest.param(["--yes=1"], id="value for a switch"),
        pytest.param(["--timeout", "0"], id="no time"),
        pytest.param(["--max-budget-usd", "nan"], id="money that is no number"),
        pytest.param(["--max-tokens-total", "-5"], id="negative tokens"),
        pytest.param(["--check", " "], id="blank check"),
    ],
)
def test_a_bad_value_of_an_option_is_a_usage_error_in_one_line(loaded, argv):
    with pytest.raises(UsageError) as caught:
        loaded(*argv, "x")
    assert (caught.value.exit_code, "\n" in str(caught.value)) == (2, False)


@pytest.mark.parametrize(
    "argv, field, value",
    [
        pytest.param(
            ["--append-system-prompt=be very brief"],
            "append_system_prompt",
            "be very brief",
            id="words behind an equals sign",
        ),
        pytest.param(
            ["--append-system-prompt=a=b c"], "append_system_prompt", "a=b c", id="equals inside"
        ),
        pytest.param(
            ["--append-system-prompt", "- be brief"],
            "append_system_prompt",
            "- be brief",
            id="a value that begins with a dash",
        ),
        pytest.param(["--workspace=/tmp/my dir"], "workspace", "/tmp/my dir", id="folder"),
        pytest.param(["-w", "/tmp/my dir"], "workspace", "/tmp/my dir", id="short"),
        pytest.param(["--allow=bash ls *"], "allow", ("bash ls *",), id="rule"),
        pytest.param(["--allow", "bash a b"], "allow", ("bash a b",), id="rule in its own word"),
        pytest.param(["--deny=* x y/**", "--deny=b c"], "deny", ("* x y/**", "b c"), id="twice"),
        pytest.param(["--tools", "bash, grep"], "tools", ("bash", "grep"), id="list of tools"),
        pytest.param(["--exclude-tools=bash,grep"], "exclude_tools", ("bash", "grep"), id="not"),
        pytest.param(["--max-turns", "0"], "max_turns", 0, id="no limit"),
        pytest.param(["--max-steps", "7"], "max_turns", 7, id="alias"),
        pytest.param(["--timeout", "1.5"], "timeout", 1.5, id="time"),
        pytest.param(["--check", "make test"], "check", "make test", id="check"),
        pytest.param(["--no-session"], "save_session", False, id="no session"),
        pytest.param(["--network"], "network", True, id="network"),
        pytest.param(["-y"], "mode", "auto", id="-y"),
        pytest.param(["--yes"], "mode", "auto", id="--yes"),
        pytest.param(["--yolo"], "mode", "auto", id="--yolo"),
        pytest.param(["-m", "a/b:free"], "model", "a/b:free", id="model"),
    ],
)
def test_an_option_sets_its_field(loaded, argv, field, value):
    assert getattr(loaded(*argv, "x"), field) == value


@pytest.mark.parametrize(
    "argv, output",
    [
        pytest.param([], "text", id="default"),
        pytest.param(["--json"], "stream-json", id="--json"),
        pytest.param(["--output-format", "json"], "json", id="json"),
        pytest.param(["--output-format=stream-json"], "stream-json", id="stream-json"),
    ],
)
def test_json_is_short_for_stream_json(parsed, argv, output):
    assert parsed(*argv, "x").output_format == wanted_format([*argv, "x"]) == output


@pytest.mark.parametrize(
    "argv, output",
    [
        pytest.param(["--json", "--frobnicate"], "stream-json", id="a wrong flag"),
        pytest.param(["--output-format", "yaml"], "text", id="a wrong format"),
        pytest.param(["--output-format"], "text", id="no format"),
        pytest.param(["--json", "--output-format=text"], "text", id="the last one"),
        pytest.param(["--output-format", "json", "--", "--json"], "json", id="words of a prompt"),
    ],
)
def test_the_format_is_known_also_where_the_command_line_is_wrong(argv, output):
    assert wanted_format(argv) == output


@pytest.mark.parametrize(
    "argv, named",
    [
        pytest.param(["--keep"], "--keep", id="keep"),
        pytest.param(["--fork"], "--fork", id="fork"),
        pytest.param(["--no-session", "-c"], "--no-session", id="nothing to go on with"),
        pytest.param(["--json", "--sessions"], "a JSON format", id="a list of sessions"),
        pytest.param(["--json", "--demo"], "a JSON format", id="the demo"),
        pytest.param(["--json", "--explain-permission", "ls"], "a JSON format", id="a judgement"),
    ],
)
def test_flags_that_make_no_sense_together_are_a_usage_error(parsed, argv, named):
    with pytest.raises(UsageError, match=f"^{named}"):
        parsed(*argv)


def test_words_that_argparse_could_mistake_keep_their_place(parsed):
    words: list[Any] = ["a", "-x y", "b", "--model", "m", "--z z", "--", "-c", "- d"]
    found = parsed(*words)
    assert (found.prompt, found.model) == (["a", "-x y", "b", "--z z", "-c", "- d"], "m")


@pytest.mark.parametrize("flag", ["--tools", "--exclude-tools"])
@pytest.mark.parametrize("names", ["", ",", " , ,"], ids=repr)
def test_a_list_of_tools_without_a_name_is_a_usage_error_that_names_the_flag(loaded, flag, names):
    for argv in ([flag, names], [f"{flag}={names}"]):
        with pytest.raises(UsageError, match=flag) as caught:
            loaded(*argv, "x")
        assert (caught.value.exit_code, "\n" in str(caught.value)) == (2, False)


@pytest.mark.parametrize(
    ("more", "warned"),
    [pytest.param({}, 1, id="all"), pytest.param({"exclude_tools": ("note",)}, 0, id="some")],
)
def test_a_rule_whose_tool_is_mistyped_is_one_warning_unless_tools_are_left_out(
    tmp_path, more, warned
):
    rules = {"deny": ("wrte_file docs/**", "* secrets/**"), "allow": ("bash make test",)}
    settings = Settings(
        "m", base_url="http://127.0.0.1:9", workspace=str(tmp_path), **rules, **more
    )
    told: list[str] = []
    build_agent(settings, emit=lambda kind, **data: told.append(data.get("text", ""))).close()
    assert len([text for text in told if "no tool 'wrte_file'" in text]) == warned


@pytest.mark.parametrize(
    ("environ", "file", "flags", "place"),
    [
        pytest.param(
            {"AGENT_API_KEY": "a"},
            "",
            (),
            "it came from AGENT_API_KEY in the environment",
            id="own",
        ),
        pytest.param(
            {},
            "GROQ_API_KEY=b",
            ("--provider", "groq"),
            "it came from GROQ_API_KEY in ~/.config/agent/env",
            id="file",
        ),
        pytest.param(
            {"GROQ_API_KEY": "a"},
            "GROQ_API_KEY=b",
            ("--provider", "groq"),
            "it came from GROQ_API_KEY in the environment",
            id="both",
        ),
        pytest.param(
            {},
            "",
            ("--provider", "groq"),
            "set GROQ_API_KEY or AGENT_API_KEY (also in ~/.config/agent/env)",
            id="none",
        ),
    ],
)
def test_the_place_of_a_key_is_the_one_it_came_from(tmp_path, environ, file, flags, place):
    folder = tmp_path / ".config" / "agent"
    folder.mkdir(parents=True)
    (folder / "env").write_text(f"{file}\n")
    made, _ = load([*flags, "hi"], {"HOME": str(tmp_path), **environ})
    assert made.key_place == place
