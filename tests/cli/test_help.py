"""The help: `-h` everywhere, commands in panels, nothing cut at 80 columns."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from rolecall.cli.main import RootHelp, app, main

ROOT: Any = typer.main.get_command(app)


def _commands(command: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from _commands(child, (*path, name))


@pytest.mark.parametrize("path", list(_commands()), ids=" ".join)
def test_help_fits_into_80_columns_and_cuts_nothing(path: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*path, "-h"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Usage: rolecall") and "-h, --help" in text
    listing = text.partition("Examples:")[0]
    usage = listing.partition("\n\n")[0]
    assert not any(sign in usage for sign in ("[[", "{", "......")) and not re.search(
        r"<(str|path|int|float|list)", text
    )
    assert not [line for line in text.splitlines() if len(line) > 80]
    assert not [line for line in listing.splitlines() if line.endswith(("...", "…")) and "Usage" not in line]


def test_every_command_is_in_one_panel() -> None:
    listed = [name for names in RootHelp.panels.values() for name in names]
    assert sorted(listed) == sorted(set(listed)), "in one"
    assert set(listed) == {name for name, command in ROOT.commands.items() if not command.hidden}
    assert list(RootHelp.panels) == ["Observe", "Act", "Run", "Offline", "Export"]


def test_the_first_sentence_of_a_command_is_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["node", "-h"]) == 0
    assert "results are compared bit by bit." in " ".join(capsys.readouterr().out.split())


def test_a_command_on_a_run_takes_it_as_option_or_as_argument() -> None:
    """`--run` everywhere; the argument RUN where nothing else is given without an option."""
    for path in _commands():
        command = ROOT
        for name in path:
            command = command.commands[name]
        options = {option for p in command.params for option in p.opts}
        arguments = [p.name for p in command.params if p.param_type_name == "argument"]
        if "--runs" not in options or path[:1] in (("demo",), ("run",)) or path == ("watch", "agents"):
            continue
        assert "--run" in options, shlex.join(path)
        assert arguments and (arguments == ["run"] or "run" not in arguments), shlex.join(path)
