"""From the configuration to its target."""

from rolecall.core.config.actuators import (
    ActuatorConfig,
    CommandActuator,
    KubeRayActuator,
    KubernetesActuator,
    MilesActuator,
    ProcessesActuator,
    SlurmActuator,
    TorchftActuator,
    VerlActuator,
)
from rolecall.recovery.actuators.targets.command import Command
from rolecall.recovery.actuators.targets.kuberay import KubeRay
from rolecall.recovery.actuators.targets.kubernetes import Kubernetes
from rolecall.recovery.actuators.targets.miles import Miles
from rolecall.recovery.actuators.targets.processes import Processes
from rolecall.recovery.actuators.targets.slurm import Slurm
from rolecall.recovery.actuators.targets.target import Target
from rolecall.recovery.actuators.targets.torchft import Torchft
from rolecall.recovery.actuators.targets.verl import Verl


def target_of(config: ActuatorConfig) -> Target:
    match config:
        case CommandActuator():
            return Command(config)
        case ProcessesActuator():
            return Processes(config)
        case SlurmActuator():
            return Slurm(config)
        case KubernetesActuator():
            return Kubernetes(config)
        case KubeRayActuator():
            return KubeRay(config)
        case MilesActuator():
            return Miles(config)
        case VerlActuator():
            return Verl(config)
        case TorchftActuator():
            return Torchft(config)
