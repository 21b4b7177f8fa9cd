"""Commands that make the ranks of any job report by themselves: exec, env."""

import os
import shlex
from typing import Annotated

import typer

from rolecall.cli.options import Commands, examples, out
from rolecall.core.errors import CommandRefused, ConfigError

app = Commands()


@app.command(
    "exec",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=examples(
        "rolecall exec -- torchrun --nproc-per-node 8 train.py",
        "srun rolecall exec -- python train.py",
    ),
)
def execute(
    command: Annotated[list[str], typer.Argument(help="The job's command, unchanged.", metavar="-- COMMAND")],
) -> None:
    """Run a training job whose ranks report their steps.

    The command takes this process's place, in an environment where every Python rank below it registers with the agent
    of its node and reports its steps through torch's hooks. The job's code is not changed and needs no agent to run.

    Exit code: that of the command; 2: it cannot be run."""
    from rolecall.agent.autostart.environment import job_environment

    if not command[0]:
        raise ConfigError(["COMMAND: the name of the program is empty"])
    try:
        os.execvpe(command[0], command, {**os.environ, **job_environment(os.environ)})
    except OSError as e:
        raise CommandRefused(f"{command[0]}: {e.strerror}") from e


@app.command(
    epilog=examples('eval "$(rolecall env)"        # in a job script, before its command'),
)
def env() -> None:
    """Print the environment of `rolecall exec` as exports.

    For job scripts, container entry points and Ray's env_vars, where no command can be put in front.

    Exit code 0."""
    from rolecall.agent.autostart.environment import job_environment

    for name, value in job_environment(os.environ).items():
        out(f"export {name}={shlex.quote(value)}")
