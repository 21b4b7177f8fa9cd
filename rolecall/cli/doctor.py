"""The command `rolecall doctor`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rolecall.cli.options import CredentialsOption, JsonOption, examples, show
from rolecall.core.text import plain

app = typer.Typer()


@app.command(
    epilog=examples(
        "rolecall doctor",
        "rolecall doctor --config /etc/rolecall/agent.yaml --nhc",
        "rolecall doctor --agents http://node-2:9477       # compare clocks",
    )
)
def doctor(
    config: Annotated[Path | None, typer.Option("--config", help="agent.yaml of this node's agent.")] = None,
    pid: Annotated[int | None, typer.Option(min=1, help="A rank: check its NCCL settings.")] = None,
    agents: Annotated[
        str, typer.Option(help="Other agents, as in `rolecall watch agents`: compare their clocks with this node's.")
    ] = "",
    credentials: CredentialsOption = None,
    nhc: Annotated[
        bool, typer.Option("--nhc", help="Node-health-check exit codes: 0 ok, 1 warning, 2 broken, 3 unknown.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Check this node and print fixes.

    Checks whether the node can be watched.

    Exit code 1 if something is broken."""
    from rolecall.node.doctor import NHC_CODES, CheckLevel, examine, lines, worst
    from rolecall.node.facts import read_facts

    checks = examine(read_facts(config, pid, agents=agents, credentials=credentials))
    level = worst(checks)
    value = {"level": str(level), "checks": [{**asdict(c), "level": str(c.level)} for c in checks]}
    show(as_json, value, map(plain, lines(checks)))
    return NHC_CODES[level] if nhc else int(level is CheckLevel.BROKEN)
