"""Sections of the actuators: one class each, chosen by `kind`."""

from string import Formatter
from typing import Annotated, Literal

from pydantic import Field, field_validator

from rolecall.core.config.section import Seconds, Section

COMMAND_FIELDS = frozenset(
    {"replica", "role", "index", "incarnation", "node", "rank", "pid", "start_ticks", "job", "incident", "because"}
)


def _checked_template(text: str) -> str:
    """Raises ValueError: it has a field that is not known, or is no template."""
    for _, name, _, _ in Formatter().parse(text):
        if name is not None and name not in COMMAND_FIELDS:
            known = ", ".join(f"{{{f}}}" for f in sorted(COMMAND_FIELDS))
            raise ValueError(f"{{{name}}} is not known here, only {known}; write {{{{ for a brace")
    return text


class CommandActuator(Section):
    """Replaces a replica by a command of your own: for whatever has a command line or an API of its own."""

    kind: Literal["command"]
    replace: Annotated[list[str], Field(min_length=1)]
    """Program and arguments, without a shell. Exit code 0: the replica was ended, and its replacement starts by itself
    or was started. Arguments may contain {replica}, {role}, {index}, {incarnation}, {node}, {job}, {incident},
    {because}, and {rank}, {pid}, {start_ticks} of the process with the lowest rank."""
    move: list[str] | None = None
    """The same for a fault that stays with the node: the replacement must start on another one. null: such faults page
    on-call."""
    also_ends: Literal["nothing", "node", "job"] = "nothing"
    """Which other replicas the command takes down: those on the same node, or all of the same job."""
    repeatable: bool = False
    """A second call for the same fault does no harm. Otherwise, if the watch dies during the call, its successor pages
    on-call instead of calling again. The command gets the same ROLECALL_ACTION_KEY both times."""
    call_seconds: Seconds = 60.0
    """The command is ended after this time, and the action has failed."""

    @field_validator("replace", "move")
    @classmethod
    def _templates(cls, argv: list[str] | None) -> list[str] | None:
        for text in argv or ():
            _checked_template(text)
        if argv is not None and (not argv or not argv[0]):
            raise ValueError("expected a program and its arguments")
        return argv


ActuatorConfig = CommandActuator
"""With a second actuator: `Annotated[CommandActuator | ..., Field(discriminator="kind")]`."""
