"""docs/agent.md speaks of every path, event and key that there is."""

import dataclasses
import re
from pathlib import Path
from typing import Any, cast

import pytest

from rolecall.agent.routes import Routes
from rolecall.agent.settings import AgentFile, explain
from rolecall.core.config import Section
from rolecall.core.telemetry import AgentEventKind

DOC = (Path(__file__).parent.parent.parent / "docs" / "agent.md").read_text()


def _paths() -> list[str]:
    nothing = {f.name: cast(Any, None) for f in dataclasses.fields(Routes)}
    return sorted(Routes(**nothing).table())


@pytest.mark.parametrize("path", _paths())
def test_every_path_is_told(path: str) -> None:
    assert re.search(rf"^\| `{re.escape(path)}[`?]", DOC, re.MULTILINE)


@pytest.mark.parametrize("kind", AgentEventKind)
def test_every_kind_of_event_is_told(kind: AgentEventKind) -> None:
    rows = [line.split("|")[1] for line in DOC.splitlines() if line.startswith("| `")]
    assert any(f"`{kind}`" in row for row in rows)


def test_every_collector_is_told() -> None:
    sections = [n for n, f in AgentFile.model_fields.items() if isinstance(f.get_default(), Section)]
    assert len(sections) > 5
    rows = [line.split("|")[1] for line in DOC.splitlines() if line.startswith("| `")]
    assert [n for n in sections if not any(f"`{n}`" in row for row in rows)] == []


def test_the_configuration_is_what_explain_prints() -> None:
    printed = re.sub(r'^node: ".*"$', 'node: "gpu-017"', explain(), flags=re.MULTILINE)
    assert f"```yaml\n{printed}```" in DOC, "paste what `rolecall agent --explain` prints, with node gpu-017"
