"""Configuration of a watch over a job that rolecall did not start (`rolecall watch agents --config FILE`)."""

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rolecall.core.config.actuators import (
    ActuatorConfig,
    KubeRayActuator,
    KubernetesServer,
    MilesActuator,
    ReaperConfig,
    TorchftActuator,
    VerlActuator,
)
from rolecall.core.config.job import DetectorConfig, RecoveryConfig, problems_of, read_yaml_file
from rolecall.core.config.section import JournalUrl, RecoveryMode, Seconds, Section
from rolecall.core.errors import ConfigError
from rolecall.core.ids import ID_PATTERN

_TAG = re.compile(r"^actuator\.(?!kind:)\w+(?=[.:])")
"""pydantic puts the value of `actuator.kind` into the path of a problem."""


class WatchedDetectorConfig(DetectorConfig):
    """As in a job file, with other defaults."""

    poll_seconds: Seconds = 0.5
    """Interval of requests for samples, which delays findings from samples by half of it; longer over hundreds of
    agents. Events are not delayed."""
    first_unit_seconds: Seconds = 1800.0
    """Deadline of a phase that its role was never seen to finish, as the first step of a job: loading a large model,
    compiling and a first generation take many minutes. A phase that was seen less than eight times has 120 s, or three
    times its longest, if that is more."""


class NvSentinelConfig(KubernetesServer):
    """Reads what NVSentinel says of the nodes of an incident, from their Node objects; changes nothing."""

    label_prefix: str = "k8saas.nvidia.com/"
    """`labelPrefix` of its fault-quarantine."""


class WatchedConfig(Section):
    """Without a file: mode observe, and nothing acts."""

    recovery: RecoveryConfig = RecoveryConfig()
    """As in a job file. Mode observe, the default, says what it would do."""
    detector: WatchedDetectorConfig = WatchedDetectorConfig()
    """As in a job file, but `poll_seconds` is 0.5, `first_unit_seconds` 1800."""
    actuator: ActuatorConfig | None = None
    """What replaces a replica. null: none is replaced; on-call is told what to do."""
    roles: tuple[str, ...] = ()
    """Roles whose replicas may be replaced, as [rollout]; needed with an actuator. A replica of another role, of this
    job or of another one on the same nodes, is never touched: on-call is paged."""
    orphans: ReaperConfig | None = None
    """What ends engine processes whose server is gone, with or without an actuator: in mode act, or once approved.
    null: the page to on-call has the command that ends each."""
    deadline_seconds: Seconds = 300.0
    """Of one action, all its calls together."""
    nvsentinel: NvSentinelConfig | None = None
    """Whether NVSentinel has cordoned the nodes of an incident, and why, becomes evidence of it. null: not read."""
    journal: JournalUrl = None
    """As in a job file: postgresql://USER@HOST/DATABASE, for watches on several hosts of which one leads, and for
    folders of runs on a network file system, where SQLite must not be used. null: a SQLite file in the run directory.
    """

    @property
    def orphans_mode(self) -> RecoveryMode:
        """Of incidents of orphans."""
        return (self.orphans.mode if self.orphans is not None else None) or self.recovery.mode


def parse_watched(value: Any, source: str = "") -> WatchedConfig:
    """Raises ConfigError: with every problem, each `path: reason`."""
    if not isinstance(value, dict):
        raise ConfigError([f"(top): expected a mapping, got {type(value).__name__}"], source)
    try:
        config = WatchedConfig.model_validate(value)
    except ValidationError as e:
        raise ConfigError([_TAG.sub("actuator", problem) for problem in problems_of(e)], source) from None
    problems = []
    if config.recovery.mode != "observe" and config.actuator is None:
        orphans = "; for orphans alone set orphans.mode" if config.orphans is not None else ""
        problems.append(f"recovery.mode: {config.recovery.mode} needs an actuator{orphans}")
    if config.actuator is not None and not config.roles:
        problems.append("roles: name the roles whose replicas may be replaced, for example [rollout]")
    problems += [f"roles: {role!r} is no role" for role in config.roles if not ID_PATTERN.fullmatch(role)]
    if isinstance(config.actuator, KubeRayActuator) and config.actuator.wait_seconds > config.deadline_seconds / 2:
        problems.append(
            "actuator.wait_seconds: must be at most half of deadline_seconds: workersToDelete is cleared then"
        )
    if isinstance(config.actuator, VerlActuator) and config.actuator.begin_seconds >= config.deadline_seconds:
        problems.append(
            "actuator.begin_seconds: must be shorter than deadline_seconds: after it, a new engine has to start"
        )
    match config.actuator:
        case MilesActuator(cells=named) | TorchftActuator(groups=named):
            field = "cells" if isinstance(config.actuator, MilesActuator) else "groups"
            problems += [f"roles: {r} is not in actuator.{field}" for r in config.roles if r not in named]
        case VerlActuator(roles=known):
            problems += [f"roles: {r} is not in actuator.roles" for r in config.roles if r not in known]
    for section in (config.actuator, getattr(config.actuator, "processes", None), config.orphans):
        longest = getattr(section, "call_seconds", 0.0) + getattr(section, "grace_seconds", 0.0)
        if longest > config.deadline_seconds:
            problems.append(f"deadline_seconds: must be at least {longest:g}, as long as one call may take")
    if problems:
        raise ConfigError(problems, source)
    return config


def load_watched(path: Path) -> WatchedConfig:
    """Raises ConfigError: the file cannot be read, is not YAML, has no content, or has problems."""
    value = read_yaml_file(path)
    if value is None:
        raise ConfigError(
            ["the file has no content; a watch file is a mapping, as `recovery: {mode: observe}`"], str(path)
        )
    return parse_watched(value, str(path))
