"""The hand-written and generated Markdown pages of the repository, and the commands that their shell blocks name."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).parents[2]
PAGES = {
    str(p.relative_to(ROOT)): p
    for folder in (ROOT, ROOT / "docs", ROOT / "deploy")
    for p in sorted(folder.glob("*.md") if folder == ROOT else folder.rglob("*.md"))
}


def commands(text: str) -> Iterator[str]:
    """Every `rolecall ...` line of the page's shell blocks, continuation lines joined, comments removed."""
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|;|\|", line):
                if part.strip().startswith("rolecall "):
                    yield part.strip()


def complaint(command: str) -> str:
    """What is wrong with a command; "" if the command line would accept its words and options."""
    from rolecall.cli.main import app

    try:
        words = shlex.split(command, comments=True)[1:]
    except ValueError as e:
        return str(e)
    found: Any = typer.main.get_command(app)
    while children := getattr(found, "commands", None):
        if not words or words[0].startswith("-"):
            break
        if words[0] not in children:
            return f"no such command: {words[0]}"
        found = children[words.pop(0)]
    options = {o for p in found.params for o in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}
    if getattr(found, "context_settings", {}).get("ignore_unknown_options"):
        return ""
    unknown = {w.partition("=")[0] for w in words if w.startswith("--") and w != "--"} - options
    return f"it has no {', '.join(sorted(unknown))}" if unknown else ""
