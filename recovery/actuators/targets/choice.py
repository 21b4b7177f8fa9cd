"""From the configuration to its target."""

from rolecall.core.config.actuators import ActuatorConfig
from rolecall.recovery.actuators.targets.command import Command
from rolecall.recovery.actuators.targets.target import Target


def target_of(config: ActuatorConfig) -> Target:
    return Command(config)
