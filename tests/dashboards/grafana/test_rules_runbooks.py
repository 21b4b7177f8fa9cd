"""Every alert has a runbook, every runbook an alert, and every command and dashboard that a runbook names exists."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from rolecall.cli.main import app
from rolecall.dashboards.grafana.export import documents
from tests.dashboards.grafana.rules_cases import ALERTS

FOLDER = Path(__file__).parents[3] / "docs" / "runbooks"
RUNBOOKS = {p.stem: p.read_text() for p in sorted(FOLDER.glob("*.md"))}
SECTIONS = ["Meaning", "Impact", "Automatic response", "Diagnosis", "Mitigation", "When to silence"]
_CODE = re.compile(r"```sh\n(.*?)```|`([^`]+)`", re.DOTALL)
_COMMAND = re.compile(r"(?:^|; )(rolecall [a-z][^#;\n]*)", re.MULTILINE)
_LINK = re.compile(r"\]\((\w+)\.md\)")
_BOARD = re.compile(r"\*(rolecall: [^*]+)\*")


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    assert set(RUNBOOKS) == set(ALERTS)


@pytest.mark.parametrize("name", sorted(RUNBOOKS))
def test_a_runbook_has_all_sections(name: str) -> None:
    text = RUNBOOKS[name]
    assert text.startswith(f"# {name}\n\n## Meaning\n\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    parts = re.split(r"^#.*$", text, flags=re.MULTILINE)
    assert all(part.strip() for part in parts[2:])
    assert "```sh\n" in text
    assert set(_LINK.findall(text)) <= set(RUNBOOKS), "a link to a runbook that does not exist"
    assert set(_BOARD.findall(text)) <= {d["title"] for d in documents()}, "a dashboard that does not exist"
    assert _BOARD.findall(text)


def _commands(text: str) -> list[str]:
    """Commands of rolecall in code blocks and inline code."""
    return [c for block, inline in _CODE.findall(text) for c in _COMMAND.findall(block or inline)]


def _parameters_of(command: str) -> list[Any] | None:
    """Of the command in the CLI; None: there is no such command."""
    words = command.split()[1:]
    found: Any = typer.main.get_command(app)
    while commands := getattr(found, "commands", None):
        if not words or words[0] not in commands:
            return None
        found = commands[words.pop(0)]
    return list(found.params)


def _options_of(command: str) -> set[str]:
    """The options that the CLI knows for it."""
    return {o for p in _parameters_of(command) or () for o in (*p.opts, *p.secondary_opts)} | {"--help"}


def _error_of(command: str) -> str:
    """What is wrong with a command that a runbook names; "" if the CLI accepts it."""
    parameters, given = _parameters_of(command), {*command.split()}
    if parameters is None:
        return "no such command"
    if unknown := {w for w in given if w.startswith("--")} - _options_of(command):
        return f"it has no {', '.join(sorted(unknown))}"
    required = [p for p in parameters if p.required and p.param_type_name == "option" and "--help" not in given]
    missing = [p.opts[0] for p in required if not given & {*p.opts}]
    return f"it needs {', '.join(missing)}" if missing else ""


def _is_on_any_run(command: str) -> bool:
    """It orders something, and would order it in the newest run, whichever that is."""
    orders = "--reason" in _options_of(command) or command.split()[1] in ("approve", "resume")
    return orders and not {"--run", "RUN"} & {*command.split()}


@pytest.mark.parametrize("name", sorted(RUNBOOKS))
def test_the_commands_of_a_runbook_exist(name: str) -> None:
    wrong = {c: why for c in _commands(RUNBOOKS[name]) if (why := _error_of(c))}
    assert not wrong


@pytest.mark.parametrize("name", sorted(RUNBOOKS))
def test_orders_of_a_runbook_and_its_alert_name_the_run(name: str) -> None:
    texts = (RUNBOOKS[name], ALERTS[name].summary, ALERTS[name].description)
    assert not [c for text in texts for c in _commands(text) if _is_on_any_run(c)]


@pytest.mark.parametrize("name", sorted(RUNBOOKS))
def test_a_runbook_with_an_order_that_is_refused_for_watched_jobs_says_so(name: str) -> None:
    text = RUNBOOKS[name]
    if any(c.startswith(("rolecall node drain ", "rolecall replace ")) for c in _commands(text)):
        assert "In a watched job without an [actuator](../howto/replace.md)" in text


def test_an_order_for_any_run_is_found_out() -> None:
    assert _is_on_any_run("rolecall approve DIGEST")
    assert _is_on_any_run("rolecall node drain NODE --reason ...")
    assert not _is_on_any_run("rolecall resume --run RUN")
    assert not _is_on_any_run("rolecall incidents")


def test_a_command_that_does_not_exist_is_found_out() -> None:
    assert _error_of("rolecall repair NODE") == "no such command"
    assert _error_of("rolecall node repair NODE") == "no such command"
    assert _error_of("rolecall resume --really") == "it has no --really"
    assert _error_of("rolecall record run RUN") == "it needs -o"
    assert _error_of("rolecall node return NODE --reason ...") == ""
    assert sum(len(_commands(text)) for text in RUNBOOKS.values()) > 100
