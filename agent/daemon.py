"""The command: `python -m rolecall.agent --node NODE --data-dir DIR --token-file FILE`.

Exit code 0 after SIGTERM, SIGINT or the end of the parent process; 2 for a wrong argument, a directory that another
agent holds, or a port that is taken.
"""

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rolecall.agent.node import Agent, AgentSettings, DirectoryInUse
from rolecall.core.errors import BadId
from rolecall.core.ids import NodeId, checked_id

INTERVAL_SECONDS_MIN, INTERVAL_SECONDS_MAX = 0.02, 60.0


def _node(text: str) -> NodeId:
    try:
        return NodeId(checked_id(text, "node"))
    except BadId as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not INTERVAL_SECONDS_MIN <= value <= INTERVAL_SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {INTERVAL_SECONDS_MIN} to {INTERVAL_SECONDS_MAX} seconds")
    return value


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m rolecall.agent", description="Watches the processes of one node.")
    p.add_argument("--node", type=_node, required=True, help="name of this node, for example node-3")
    p.add_argument("--data-dir", type=Path, required=True, help="its directory: pages, events, socket, agent.json")
    p.add_argument("--token-file", type=Path, required=True, help="file with the run's token")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback only)")
    p.add_argument("--port", type=int, default=0, help="port to listen on (default 0: any free one)")
    p.add_argument("--interval", type=_interval, default=0.2, help="seconds between two looks (default 0.2)")
    p.add_argument("--raylet-pid", type=int, help="raylet of this node; else raylet.json in the data directory")
    p.add_argument("--raylet-start", type=int, help="its start time in clock ticks (field 22 of /proc/PID/stat)")
    p.add_argument("--parent-pid", type=int, help="process whose end ends the agent")
    p.add_argument("--parent-start", type=int, help="its start time in clock ticks")
    p.add_argument("--proc", type=Path, default=Path("/proc"), help=argparse.SUPPRESS)
    return p


def _pair(p: argparse.ArgumentParser, what: str, pid: int | None, start: int | None) -> tuple[int, int] | None:
    if pid is None and start is None:
        return None
    if pid is None or start is None:
        p.error(f"--{what}-pid and --{what}-start belong together")
    return pid, start


def _settings(argv: Sequence[str] | None) -> AgentSettings:
    p = _parser()
    a = p.parse_args(argv)
    try:
        token = a.token_file.read_text().strip()
    except OSError as e:
        p.error(f"--token-file: {e}")
    if not token:
        p.error(f"--token-file: {a.token_file} is empty")
    return AgentSettings(
        node=a.node,
        data_dir=a.data_dir,
        token=token,
        host=a.host,
        port=a.port,
        interval_seconds=a.interval,
        raylet=_pair(p, "raylet", a.raylet_pid, a.raylet_start),
        parent=_pair(p, "parent", a.parent_pid, a.parent_start),
        proc=a.proc,
    )


def main(argv: Sequence[str] | None = None) -> int:
    settings = _settings(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        agent = Agent(settings)
    except (DirectoryInUse, OSError) as e:
        print(f"rolecall agent: {e}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    agent.run()
    return 0
