"""Generates the reference pages that come from code: `python -m tools.reference_pages` writes them, a test compares.

A page is added by one entry of `PAGES`. The command line is walked, so a new command needs no change here.
"""

import contextlib
import inspect
import io
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
COMMAND = "python -m tools.reference_pages"


_EXIT_CODES = """Exit codes: 0 success; 1 a fault, a failed check or an incident left open; 2 wrong usage or unreadable
input; 3 a defect of rolecall; 130 interrupted.
"""


def cli_page() -> str:
    """`cli.md`: every command with its usage, help, arguments and options."""
    import typer

    from rolecall.cli.main import app

    root = typer.main.get_command(app)
    parts = [
        "# Command line\n",
        f"Generated from the command definitions by `{COMMAND}`.\n",
        _EXIT_CODES,
    ]
    parts += _command(root, ("rolecall",))
    return "\n".join(parts)


def _command(command: Any, path: tuple[str, ...]) -> Iterator[str]:
    children: Mapping[str, Any] = getattr(command, "commands", {})
    if len(path) > 1:
        context = command.context_class(command, info_name=" ".join(path))
        yield f"{'##' if len(path) == 2 else '###'} `{' '.join(path)}`\n"
        yield _help(command.help) + "\n"
        yield f"```text\n{_usage(command.get_usage(context))}\n```\n"
        records = [r for p in command.params if (r := p.get_help_record(context)) is not None]
        if not command.params and not children:
            yield f"```text\n{_printed_help(path)}\n```\n"
        if records:
            rows = [f"| {_cell(f'`{name}`')} | {_cell(_escaped(text))} |" for name, text in records]
            yield "| parameter | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"
    for name in sorted(children):
        if not children[name].hidden:
            yield from _command(children[name], (*path, name))


def _printed_help(path: tuple[str, ...]) -> str:
    """What `--help` prints, for a command that parses its own arguments."""
    from rolecall.cli.main import main

    printed, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*path[1:], "--help"])
    finally:
        os.environ.pop("COLUMNS")
        os.environ.update({} if columns is None else {"COLUMNS": columns})
    return printed.getvalue().strip()


def _usage(text: str) -> str:
    """One line without click's doubled brackets."""
    return re.sub(r"\{(\S+?)\}", r"\1", " ".join(text.split()[1:]).replace("[[", "[").replace("]]", "]"))


def _help(text: str | None) -> str:
    """Help text as Markdown: `\\b` blocks and indented examples become code blocks."""
    lines = inspect.cleandoc(text or "").replace("\b", "").splitlines()
    blocks, code = list[str](), list[str]()
    for line in [*lines, "end"]:
        if code and not line.strip():
            code.append("")
        elif line.startswith("  ") and line.strip():
            code.append(line)
        else:
            if code:
                blocks += ["```sh", *textwrap.dedent("\n".join(code)).strip().splitlines(), "```", ""]
                code = []
            blocks.append(_escaped(line))
    return "\n".join(blocks[:-1]).strip()


def _escaped(text: str) -> str:
    return re.sub(r"(?<!`)<([\w-]+)>(?!`)", r"`<\1>`", text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def job_file_page() -> str:
    """`job-file.md`: every section and field of a job file."""
    from rolecall.core.config.job import JobConfig

    head = f"""# Job file

Generated from `rolecall/core/config/` by `{COMMAND}`.

`rolecall run JOB.yaml` reads a YAML mapping. Every field has a default. Unknown keys are refused; all problems are reported
at once as `path: reason` with exit code 2, and nothing is started.

```yaml
name: parity
num_steps: 200
roles: {{trainer: 2, rollout: 3, reward: 2}}
recovery: {{mode: act, horizon_seconds: 3600, webhook_url: "http://127.0.0.1:9999/hook"}}
```

## Top level

"""  # noqa: E501
    return head + "\n".join(_section(JobConfig, ()))


def agent_file_page() -> str:
    """`agent-file.md`: `agent.yaml` as `rolecall agent --explain` prints it, for root on a node called gpu-017."""
    from rolecall.agent.settings import explain

    printed = re.sub(r'^node: ".*"$', 'node: "gpu-017"', explain(), flags=re.MULTILINE)
    printed = re.sub(r"^data_dir: .*$", "data_dir: /var/lib/rolecall", printed, flags=re.MULTILINE)
    printed = re.sub(r"^data_dir: .*$", "data_dir: /var/lib/rolecall", printed, flags=re.MULTILINE)
    return f"""# Agent configuration file

Generated from `agent/settings.py` by `{COMMAND}`.

`rolecall agent --config agent.yaml` reads this file; `rolecall agent --explain` prints it. Every key has a default, and
unknown keys are refused with all problems at once. Command-line options override the file. What the collectors read:
[the node agent](agent.md).

```yaml
{printed}```
"""


def _section(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[str]:
    if path:
        yield f"\n## `{'.'.join(path)}`\n"
        own = inspect.getdoc(model) if model.__doc__ and model.__doc__ != BaseModel.__doc__ else ""
        if own:
            yield own + "\n"
    rows, nested = list[str](), list[tuple[str, type[BaseModel]]]()
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            nested.append((name, annotation))
        else:
            rows.append(f"| `{name}` | {_type(field)} | {_default(field)} | {_cell(field.description or '')} |")
    if rows:
        yield "| field | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows)
    for name, inner in nested:
        yield from _section(inner, (*path, name))


def _type(field: FieldInfo) -> str:
    text = _type_name(field.annotation)
    names = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [f"{names[n]} {getattr(m, n)}" for m in field.metadata for n in names if getattr(m, n, None) is not None]
    return _cell(", ".join([text, *limits]))


def _type_name(annotation: Any) -> str:
    if annotation is None or annotation is type(None):
        return "null"
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{a}`" for a in typing.get_args(annotation))
    if typing.get_origin(annotation) is typing.Annotated:
        return _type_name(typing.get_args(annotation)[0])
    arguments = typing.get_args(annotation)
    if arguments and typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(_type_name(a) for a in arguments)
    members = getattr(annotation, "__members__", None)
    if members is not None:
        return " or ".join(f"`{m.value}`" for m in members.values())
    names = {int: "integer", float: "number", str: "text", bool: "true or false"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "null"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def metrics_page() -> str:
    from rolecall.core.metrics.catalogue import markdown

    return markdown()


def events_page() -> str:
    from rolecall.core.journal.payloads import markdown

    return markdown()


PAGES: Mapping[str, Callable[[], str]] = {
    "agent-file.md": agent_file_page,
    "cli.md": cli_page,
    "events.md": events_page,
    "job-file.md": job_file_page,
    "metrics.md": metrics_page,
}


def main() -> None:
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())


if __name__ == "__main__":
    main()
