"""Generated reference pages are fresh."""

import pytest

from tools.reference_pages import COMMAND, FOLDER, PAGES


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_generated_page_is_fresh(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), f"run: {COMMAND}"


def test_every_command_and_its_options_are_on_the_page() -> None:
    import typer

    from rolecall.cli.main import app

    page = (FOLDER / "cli.md").read_text()
    pending = [(("rolecall",), typer.main.get_command(app))]
    while pending:
        path, command = pending.pop()
        pending += [((*path, n), c) for n, c in getattr(command, "commands", {}).items() if not c.hidden]
        if len(path) > 1:
            section = page.partition(f"# `{' '.join(path)}`\n")[2].partition("\n##")[0]
            shown = [p for p in command.params if not getattr(p, "hidden", False)]
            assert all(option in section for p in shown for option in p.opts if option.startswith("-")), path


def test_every_field_of_a_job_file_has_a_meaning() -> None:
    rows = [r for r in (FOLDER / "job-file.md").read_text().splitlines() if r.startswith("| `")]
    assert len(rows) > 50 and [r for r in rows if r.endswith("|  |")] == []
