"""docs/reference/agent.md names every event, collector and rule."""

import re
from pathlib import Path

import pytest
import yaml

from rolecall.agent.collectors.process.discovery import DEFAULTS, Match, ProcessFacts, parse_discovery
from rolecall.agent.settings import AgentFile
from rolecall.core.config.section import Section
from rolecall.core.telemetry import AgentEventKind

DOC = (Path(__file__).parent.parent.parent / "docs" / "reference" / "agent.md").read_text()


@pytest.mark.parametrize("kind", AgentEventKind)
def test_every_kind_of_event_is_reported(kind: AgentEventKind) -> None:
    rows = [line.split("|")[1] for line in DOC.splitlines() if line.startswith("| `")]
    assert any(f"`{kind}`" in row for row in rows)


def test_every_collector_is_reported() -> None:
    sections = [n for n, f in AgentFile.model_fields.items() if isinstance(f.get_default(), Section)]
    assert len(sections) > 5
    rows = [line.split("|")[1] for line in DOC.splitlines() if line.startswith("| `")]
    assert [n for n in sections if not any(f"`{n}`" in row for row in rows)] == []


def test_the_default_rules_are_those_that_run() -> None:
    assert yaml.safe_load(_block("- {name: verl-trainer")) == [dict(rule) for rule in DEFAULTS]


def test_the_own_rule_of_the_docs_is_one() -> None:
    rules = parse_discovery(yaml.safe_load(_block("jobs:\n"))["jobs"]["rules"])
    assert rules.by_job and rules.node_index == 17
    found = rules.find(ProcessFacts(arguments=("ray::MyTrainer(rank=3).step",), environ={"SLURM_JOB_ID": "7"}))
    assert found == Match(rule="my-trainer", role="trainer", replica=0, rank=3, job="7")


def _block(begins: str) -> str:
    [block] = [b for b in re.findall(r"```yaml\n(.*?)```", DOC, re.DOTALL) if b.startswith(begins)]
    return str(block)
