"""Every YAML block of the pages is valid: as the file that its keys belong to, or it is another program's."""

import re
from typing import Any

import pytest

from rolecall.agent.collectors.process.discovery import parse_discovery
from rolecall.agent.settings import AgentFile
from rolecall.core.config.job import JobConfig, parse_job, read_yaml
from rolecall.core.config.watched import WatchedConfig, parse_watched
from rolecall.simulate.settings import SimulationSettings, parse_settings
from rolecall.watch.panels import QueriesConfig
from tests.docs.pages import PAGES

BLOCKS = [
    (name, number, block)
    for name, path in sorted(PAGES.items())
    for number, block in enumerate(re.findall(r"^ *```yaml\n(.*?)^ *```", path.read_text(), re.DOTALL | re.MULTILINE))
]
FOREIGN = {
    "alerting": "Prometheus",
    "slack_configs": "Alertmanager",
    "resources": "kustomize",
    "targets": "Prometheus, file_sd_configs",
    "replica": "the default arms, which a test compares with the code",
    "tls_server_config": "the format of Prometheus' exporters",
}
"""First key of a block -> whose it is."""
ONLY_WATCHED = {"actuator", "orphans", "deadline_seconds", "nvsentinel"}
MINIMAL_JOB = {"model": {"path": "model"}, "data": {"path": "train.jsonl"}, "reward": "exact"}
"""What sections for a model and data of one's own need beside them."""


def kind_of(value: Any) -> str:
    """The file that a block belongs to; empty: unknown."""
    if isinstance(value, list):
        return "rules" if value and "role" in value[0] else FOREIGN.get(next(iter(value[0])), "")
    keys = set(value)
    if (first := next(iter(value))) in FOREIGN:
        return FOREIGN[first]
    if keys & ONLY_WATCHED and keys <= set(WatchedConfig.model_fields):
        return "watch file"
    for name, section in (("agent file", AgentFile), ("job file", JobConfig), ("simulation file", SimulationSettings)):
        if keys <= set(section.model_fields):
            return name
    return "queries" if keys <= set(QueriesConfig.model_fields) else ""


def check(value: Any) -> None:
    """Raises: it is not valid."""
    match kind_of(value):
        case "":
            raise AssertionError(f"no file has these keys: {list(value)}")
        case "rules":
            parse_discovery({"rules": value, "defaults": False})
        case "agent file":
            parse_discovery(AgentFile.model_validate(value).jobs.rules or {})
        case "watch file":
            parse_watched({"roles": ["rollout"], **value})
        case "job file":
            needs_data = {"data", "evaluation", "environment", "reward", "lora"} & set(value)
            parse_job({**(MINIMAL_JOB if needs_data else {}), **value})
        case "simulation file":
            parse_settings(value)
        case "queries":
            QueriesConfig.model_validate(value)


@pytest.mark.parametrize(("name", "number", "block"), BLOCKS, ids=[f"{name}-{n}" for name, n, _ in BLOCKS])
def test_it_is_valid(name: str, number: int, block: str) -> None:
    check(read_yaml(block))


@pytest.mark.parametrize(
    "block",
    ["actuator: {kind: command}", "jobs: {rules: {rule: []}}", "recovery: {mode: acts}", "colour: red"],
)
def test_a_mistake_is_noticed(block: str) -> None:
    with pytest.raises(Exception, match=r"replace|rule|mode|colour"):
        check(read_yaml(block))
