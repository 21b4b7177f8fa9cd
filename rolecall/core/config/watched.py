"""Configuration of a watch over a job that rolecall did not start (`rolecall watch agents --config FILE`)."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rolecall.core.config.actuators import ActuatorConfig
from rolecall.core.config.job import DetectorConfig, RecoveryConfig, problems_of, read_yaml_file
from rolecall.core.config.section import Seconds, Section
from rolecall.core.errors import ConfigError


class WatchedConfig(Section):
    """Without a file: mode observe, and nothing acts."""

    recovery: RecoveryConfig = RecoveryConfig()
    """As in a job file. Mode observe, the default, tells what it would do."""
    detector: DetectorConfig = DetectorConfig()
    """As in a job file."""
    actuator: ActuatorConfig | None = None
    """What replaces a replica. null: nothing acts; on-call is told what to do."""
    deadline_seconds: Seconds = 300.0
    """Of one action, all its calls together."""


def parse_watched(value: Any, source: str = "") -> WatchedConfig:
    """Raises ConfigError: with every problem, each `path: reason`."""
    if not isinstance(value, dict):
        raise ConfigError([f"(top): expected a mapping, got {type(value).__name__}"], source)
    try:
        config = WatchedConfig.model_validate(value)
    except ValidationError as e:
        raise ConfigError(problems_of(e), source) from None
    if config.recovery.mode != "observe" and config.actuator is None:
        raise ConfigError([f"recovery.mode: {config.recovery.mode} needs an actuator"], source)
    return config


def load_watched(path: Path) -> WatchedConfig:
    """Raises ConfigError: the file cannot be read, is not YAML, or has problems."""
    return parse_watched(read_yaml_file(path), str(path))
