"""The agent's rules know the actors of the real packages by the names of their classes. Nothing of them is imported."""

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from rolecall.agent.collectors.process.discovery import ProcessFacts, parse_discovery

CLASSES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "openrlhf": {
        "openrlhf-trainer": ("PolicyModelActor",),
        "openrlhf-critic": ("CriticModelActor",),
        "openrlhf-reference": ("ReferenceModelActor",),
        "openrlhf-reward": ("RewardModelActor",),
        "openrlhf-rollout": ("RolloutRayActor",),
        "openrlhf-controller": ("PPOTrainer", "PPOTrainerAsync", "TrainingActor", "GenerateSamplesActor"),
    },
    "verl": {
        "verl-trainer": ("WorkerDict", "ActorRolloutRefWorker"),
        "verl-reward": ("RewardLoopWorker",),
        "verl-rollout": ("vLLMHttpServer", "SGLangHttpServer", "TRTLLMHttpServer"),
        "verl-agent-loop": ("AgentLoopWorker", "AgentLoopWorkerTQ"),
        "verl-controller": ("TaskRunnerV1", "TaskRunner", "FullyAsyncTaskRunner", "FullyAsyncTrainer"),
    },
}
"""Package -> rule -> classes that Ray runs; a worker that holds several is `FusedWorker_...` in verl."""


@pytest.mark.parametrize("package", CLASSES)
def test_each_class_is_there_and_found_by_its_rule(package: str) -> None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    defined = {
        name
        for path in Path(spec.origin).parent.rglob("*.py")
        for name in re.findall(r"^\s*class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    for rule, names in CLASSES[package].items():
        for name in names:
            found = parse_discovery({}).find(ProcessFacts(arguments=(f"ray::{name}.run",)))
            assert name in defined and found is not None and found.rule == rule, name
