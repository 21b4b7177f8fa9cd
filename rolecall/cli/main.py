"""The `rolecall` command. Each command imports what it needs when it runs.

Exit codes: 0 success; 1 a fault, a failed check or an open incident; 2 wrong usage, a command that is refused,
unreadable input, or a file or database that cannot be used; 3 a defect of rolecall; 130 interrupted.
"""

import errno
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from rolecall.cli import dashboard, diagnose, grafana, job, node, notify, operators, run, simulate, watch
from rolecall.cli.options import HelpGroup, fill_closed_streams, out
from rolecall.core.errors import (
    CommandRefused,
    ConfigError,
    InvalidId,
    JournalCorrupt,
    JournalError,
    NotEnoughNodes,
    RolecallError,
    RunNotFound,
    UnreadableInput,
)
from rolecall.core.journal.database import redacted
from rolecall.core.text import plain

logger = logging.getLogger(__name__)


class RootHelp(HelpGroup):
    panels = {  # noqa: RUF012
        "Observe": ("status", "incidents", "watch", "dashboard", "users", "agent", "exec", "env", "doctor", "notify"),
        "Act": ("pause", "resume", "replace", "approve", "reject", "hold", "lift", "review", "node"),
        "Run": ("demo", "run", "up", "down", "inject"),
        "Offline": ("diagnose", "fit", "simulate", "replay", "audit"),
        "Export": ("export", "report", "incident", "record", "grafana"),
    }


app = typer.Typer(
    cls=RootHelp,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

USAGE_ERRORS = (InvalidId, ConfigError, JournalError, RunNotFound, NotEnoughNodes, UnreadableInput, CommandRefused)
EXTRAS = {"altair": "reports", "vl_convert": "reports"} | dict.fromkeys(
    ("numpy", "polars", "safetensors", "sklearn"), "detector"
)
"""Package -> the smallest extra that brings it: diagnosing needs neither torch nor Ray."""
TRACEBACK_ENV = "ROLECALL_TRACEBACK"
"""If set, a defect prints its traceback. A process with a log (`watch`) always logs it."""


def _complain(error: object) -> None:
    # Messages quote job files and Ray: none of their control characters may reach the terminal.
    for n, line in enumerate(redacted(str(error)).splitlines() or [""]):
        typer.echo(("rolecall: " if n == 0 else "") + plain(line), err=True)


for part in (run.app, operators.app, diagnose.app, run.results, node.app, job.app, dashboard.app):
    app.add_typer(part)
for name, group in (
    ("watch", watch.watch),
    ("record", watch.record),
    ("node", node.node),
    ("notify", notify.notify),
    ("users", dashboard.users),
    ("grafana", grafana.app),
    ("simulate", simulate.app),
):
    app.add_typer(group, name=name)


def _print_version(asked: bool) -> None:
    if asked:
        out(f"rolecall {version('rolecall')}")
        raise typer.Exit


@app.callback()
def _rolecall(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Keep LLM RL post-training runs productive while machines fail: diagnose and replace the replica at fault."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; every error is one clear message, never a traceback."""
    fill_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without a character shows a replacement
    try:
        result = app(args=list(sys.argv[1:] if argv is None else argv), standalone_mode=False, prog_name="rolecall")
    except typer.Exit as error:
        return int(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except RolecallError as error:
        _complain(error)
        if isinstance(error, JournalCorrupt):
            from rolecall.views.audit import offer

            if left := offer(error):
                _complain(left)
        return 2 if isinstance(error, USAGE_ERRORS) else 1
    except BrokenPipeError:
        # The reader (`| head`) closed the pipe. The interpreter's final flush must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - last resort: the user gets one message
        return _show_failure(error)
    return int(result or 0)


def _show_failure(error: Exception) -> int:
    """Report an error that was not raised on purpose; returns the exit code."""
    if logging.root.handlers:
        logger.error("the command failed", exc_info=error)
    elif os.environ.get(TRACEBACK_ENV):
        traceback.print_exception(error)
    show = getattr(error, "show", None)
    if show is not None:  # a usage error of click
        show()
        return int(getattr(error, "exit_code", 2))
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("rolecall"):
        extra = EXTRAS.get(str(error.name).partition(".")[0], "all")
        _complain(f"{error.name} is not installed; in a clone of rolecall: pip install '.[{extra}]'")
        return 2
    if isinstance(error, OSError) and error.filename is not None:
        _complain(f"{os.fsdecode(error.filename)}: {error.strerror}")
        return 2
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        _complain(f"{error.strerror}: free some space and try again")
        return 2
    _complain(f"{type(error).__name__}: {error}\nThis is a defect of rolecall; set {TRACEBACK_ENV}=1 for a traceback.")
    return 3
