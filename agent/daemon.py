"""The command: `rolecall agent --config agent.yaml`, or `python -m rolecall.agent --node NODE --data-dir DIR
--token-file FILE`, which looks at registered processes only: so the bundled runtime starts the agents of its nodes.

Exit code 0 after SIGTERM, SIGINT or the end of the parent process; 2 for a wrong argument, a directory that another
agent holds, or a port that is taken.
"""

import argparse
import logging
import os
import resource
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkstemp

from rolecall.agent.collectors.process.exits import WatchRefused
from rolecall.agent.node import Agent, AgentSettings, DirectoryInUse
from rolecall.core.errors import ConfigError, InvalidId
from rolecall.core.ids import NodeId, checked_id

LOOPBACK = "127.0.0.1"
NUM_DESCRIPTORS = 4096
"""Raised to, where the hard limit allows: of 256 processes, three collectors that keep files open, and connections."""
INTERVAL_SECONDS_MIN, INTERVAL_SECONDS_MAX = 0.02, 60.0


def _node(text: str) -> NodeId:
    try:
        return NodeId(checked_id(text, "node"))
    except InvalidId as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= 65_535):
        raise argparse.ArgumentTypeError(f"{text!r}: expected 0 to 65535")
    return int(text)


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not INTERVAL_SECONDS_MIN <= value <= INTERVAL_SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {INTERVAL_SECONDS_MIN} to {INTERVAL_SECONDS_MAX} seconds")
    return value


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="rolecall agent", description="Watches one node.")
    p.add_argument("--config", type=Path, help="agent.yaml: every signal of the node; the arguments below overrule it")
    p.add_argument("--explain", action="store_true", help="print an agent.yaml with each key and its meaning")
    p.add_argument("--node", type=_node, help="name of this node, for example node-3")
    p.add_argument("--data-dir", type=Path, help="its directory: pages, events, socket, agent.json")
    p.add_argument("--token-file", type=Path, help="file with the run's token")
    p.add_argument("--host", help="address to listen on (default: loopback only)")
    p.add_argument("--port", type=_port, help="port to listen on (default without --config: any free one)")
    p.add_argument("--interval", type=_interval, help="seconds between two looks at processes (default 0.2)")
    p.add_argument("--raylet-pid", type=int, help="raylet of this node; else raylet.json in the data directory")
    p.add_argument("--raylet-start", type=int, help="its start time in clock ticks (field 22 of /proc/PID/stat)")
    p.add_argument("--parent-pid", type=int, help="process whose end ends the agent")
    p.add_argument("--parent-start", type=int, help="its start time in clock ticks")
    p.add_argument("--proc", type=Path, help=argparse.SUPPRESS)
    return p


def _pair(p: argparse.ArgumentParser, what: str, pid: int | None, start: int | None) -> tuple[int, int] | None:
    if pid is None and start is None:
        return None
    if pid is None or start is None:
        p.error(f"--{what}-pid and --{what}-start belong together")
    return pid, start


def _token(p: argparse.ArgumentParser, path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as e:
        p.error(f"--token-file: {e}")
    if not token:
        p.error(f"--token-file: {path} is empty")
    return token


def _settings(argv: Sequence[str] | None) -> AgentSettings | None:
    """None: nothing is to run, what was asked for has been printed."""
    p = _parser()
    a = p.parse_args(argv)
    if a.explain:
        from rolecall.agent.settings import explain

        print(explain(), end="")
        return None
    if a.config is not None:
        return _from_file(p, a)
    missing = [f"--{n.replace('_', '-')}" for n in ("node", "data_dir", "token_file") if getattr(a, n) is None]
    if missing:
        p.error(f"without --config these are needed: {', '.join(missing)}")
    return AgentSettings(
        node=a.node,
        data_dir=a.data_dir,
        token=_token(p, a.token_file),
        host=a.host or LOOPBACK,
        port=a.port or 0,
        interval_seconds=a.interval or 0.2,
        raylet=_pair(p, "raylet", a.raylet_pid, a.raylet_start),
        parent=_pair(p, "parent", a.parent_pid, a.parent_start),
        proc=a.proc or Path("/proc"),
    )


def _from_file(p: argparse.ArgumentParser, a: argparse.Namespace) -> AgentSettings:
    """Raises:
    ConfigError: of the file, or of the file with TLS and users.
    OSError: a token cannot be made in the data directory.
    """
    from rolecall.agent.assembly import collectors_of
    from rolecall.agent.settings import load_agent_file

    file = load_agent_file(a.config)
    node, data_dir = a.node or NodeId(file.node), a.data_dir or file.data_dir
    token_file = a.token_file or file.token_file
    web = None
    if file.web_config_file is not None:
        from rolecall.agent.http.web_config import load_web_config

        web = load_web_config(a.config.parent / file.web_config_file)
    return AgentSettings(
        node=node,
        data_dir=data_dir,
        token=_token(p, token_file) if token_file else _own_token(data_dir),
        host=a.host or file.host,
        port=file.port if a.port is None else a.port,
        interval_seconds=a.interval or file.interval_seconds,
        raylet=_pair(p, "raylet", a.raylet_pid, a.raylet_start),
        parent=_pair(p, "parent", a.parent_pid, a.parent_start),
        proc=a.proc or file.proc,
        cgroup_root=file.sys / "fs" / "cgroup",
        collectors=lambda registry: collectors_of(file, node, data_dir, registry),
        tls=web.tls.context if web and web.tls else None,
        allows=web.auth.allows if web and web.auth else None,
    )


def _own_token(data_dir: Path) -> str:
    """The token in the data directory, made at the first start (mode 0600).

    Raises:
        ConfigError: what lies there is empty: with it anybody could speak for anybody.
        OSError: it can be neither read nor made.
    """
    path = data_dir / "token"
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        descriptor, name = mkstemp(prefix=".token.", dir=data_dir)
        whole = Path(name)
        with os.fdopen(descriptor, "w") as f:
            f.write(secrets.token_hex(32) + "\n")
        # A crash leaves the whole of it, or nothing; of two agents that start at once the first one's counts for both.
        try:
            os.link(whole, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            whole.replace(path)
        whole.unlink(missing_ok=True)
    token = path.read_text().strip()
    if not token:
        raise ConfigError([f"{path}: empty: remove it, and another is made"])
    return token


def _allow_descriptors() -> None:
    """A process that is watched takes four descriptors; the usual limit of a shell is 1,024 in all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = NUM_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(NUM_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def main(argv: Sequence[str] | None = None) -> int:
    _allow_descriptors()
    try:
        settings = _settings(argv)
        if settings is None:
            return 0
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        agent = Agent(settings)
    except (ConfigError, DirectoryInUse, OSError) as e:
        print(f"rolecall agent: {e}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    try:
        agent.run()
    except WatchRefused as e:
        print(f"rolecall agent: {e}", file=sys.stderr)
        return 2
    return 0
