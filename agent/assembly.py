"""Which collectors an `agent.yaml` asks for. Each is imported only when it is to run."""

from pathlib import Path

from rolecall.agent.collectors.collector import Collector
from rolecall.agent.registry import Registry
from rolecall.agent.settings import AgentFile
from rolecall.core.ids import NodeId


def collectors_of(file: AgentFile, node: NodeId, data_dir: Path, registry: Registry) -> list[Collector]:
    """In the order of the file's keys."""
    found: list[Collector] = []
    return found
