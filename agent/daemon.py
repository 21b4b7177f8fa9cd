"""The command `rolecall agent`: watch every signal of one node.

Without arguments the node is named after the host, data goes to the default directory (data_dir.py), and the agent
listens on 127.0.0.1:9477. `--ranks-only` is how the bundled runtime starts the agents of its nodes: it
watches registered processes only and loads neither pydantic nor any other collector.

`rolecall agent token` prints the node's token, which it creates if there is none.

Exit code 0 after SIGTERM, SIGINT or the end of the parent process; 2 for a wrong argument, a data directory that
another agent uses, or a port that is taken.
"""

import argparse
import errno
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolecall.agent.collectors.process.exits import WatchRefused
from rolecall.agent.data_dir import TOKEN_NAME, access_of, refuse_foreign, token_of
from rolecall.agent.node import Agent, AgentSettings, DirectoryInUse
from rolecall.core.errors import ConfigError, InvalidId
from rolecall.core.ids import NodeId, checked_id
from rolecall.core.rundir import bearer_token
from rolecall.core.text import os_reason

LOOPBACK = "127.0.0.1"
HEALTH_SOCKET_NAME = "nvhcd.sock"
NUM_DESCRIPTORS = 4096
"""Soft limit to set, where the hard limit allows: 256 watched processes, collectors with open files, connections."""
HELP_COLUMNS = 80
INTERVAL_SECONDS_MIN, INTERVAL_SECONDS_MAX = 0.02, 60.0


def _node(text: str) -> NodeId:
    try:
        return NodeId(checked_id(text.lower(), "node"))
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


class _Help(argparse.RawDescriptionHelpFormatter):
    """As the other commands' help, which the agent starts without."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=HELP_COLUMNS)

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, "Usage: " if prefix is None else prefix)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rolecall agent",
        usage="rolecall agent [OPTIONS] [token]",
        description="  Run the agent of this node: serve its metrics, events and evidence over\n"
        "  HTTP until SIGTERM or Ctrl-C.\n\n"
        "  Exit code 0: stopped; 2: wrong usage, or another agent has the directory\n  or the port.",
        epilog="""  Examples:
    rolecall agent                         # every default
    rolecall agent token                   # this node's token; creates it
    rolecall agent --explain > agent.yaml  # a configuration file to edit
    rolecall agent --config /etc/rolecall/agent.yaml
    rolecall agent --node gpu-017 --host 10.0.0.17 --port 9477""",
        formatter_class=_Help,
        add_help=False,
    )
    arguments, options = parser.add_argument_group("Arguments"), parser.add_argument_group("Options")
    arguments.add_argument(
        "action",
        nargs="?",
        choices=("token",),
        help="Print the node's token (created if there is none) and exit.",
        metavar="token",
    )
    options.add_argument(
        "--bearer",
        action="store_true",
        help="With `token`: the line that --credentials of `rolecall watch agents` takes.",
    )
    options.add_argument("--config", type=Path, help="agent.yaml; the options below override it.", metavar="FILE")
    options.add_argument(
        "--explain", action="store_true", help="Print an agent.yaml with every key and its meaning, and exit."
    )
    options.add_argument("--node", type=_node, help="Name of this node (default: host name).")
    options.add_argument(
        "--data-dir",
        type=Path,
        help="Events, cursors, socket and token (default: $ROLECALL_AGENT_DIR, else /var/lib/rolecall as root, else "
        "~/.local/state/rolecall).",
        metavar="DIR",
    )
    options.add_argument(
        "--token-file", type=Path, help="File with the access token (default: DIR/token).", metavar="FILE"
    )
    options.add_argument("--host", help="Address to listen on (default: 127.0.0.1).")
    options.add_argument("--port", type=_port, help="Port to listen on (default: 9477; 0: any free one).")
    options.add_argument(
        "--interval", type=_interval, help="Seconds between samples of the ranks (default: 1).", metavar="SECONDS"
    )
    options.add_argument("-h", "--help", action="help", help="Show this message and exit.")
    # Of the bundled runtime and of tests.
    parser.add_argument("--ranks-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--raylet-pid", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--raylet-start", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parent-start", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--proc", type=Path, help=argparse.SUPPRESS)
    return parser


def _pair(parser: argparse.ArgumentParser, what: str, pid: int | None, start: int | None) -> tuple[int, int] | None:
    if pid is None and start is None:
        return None
    if pid is None or start is None:
        parser.error(f"--{what}-pid and --{what}-start belong together")
    return pid, start


def _token(parser: argparse.ArgumentParser, path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as e:
        parser.error(f"--token-file: {path}: {os_reason(e)}")
    if not token:
        parser.error(f"--token-file: {path} is empty")
    return token


def _settings(argv: Sequence[str] | None) -> AgentSettings | None:
    """None: there is nothing to run, the answer has been printed."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.explain:
        from rolecall.agent.settings import explain

        print(explain(), end="")
        return None
    if arguments.bearer and arguments.action != "token":
        parser.error("--bearer belongs to `rolecall agent token`")
    if not arguments.ranks_only:
        return _of_the_node(parser, arguments)
    missing = [f"--{n.replace('_', '-')}" for n in ("node", "data_dir", "token_file") if getattr(arguments, n) is None]
    if missing:
        parser.error(f"--ranks-only needs {', '.join(missing)}")
    return AgentSettings(
        node=arguments.node,
        data_dir=arguments.data_dir,
        token=_token(parser, arguments.token_file),
        host=arguments.host or LOOPBACK,
        port=arguments.port or 0,
        interval_seconds=arguments.interval or 0.2,
        raylet=_pair(parser, "raylet", arguments.raylet_pid, arguments.raylet_start),
        parent=_pair(parser, "parent", arguments.parent_pid, arguments.parent_start),
        proc=arguments.proc or Path("/proc"),
    )


def _of_the_node(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> AgentSettings | None:
    """Settings of an agent with every collector, from agent.yaml or its defaults; None: it was asked for its token.

    Raises:
        ConfigError: of the file, or of the file with TLS and users.
        OSError: no token can be created in the data directory.
    """
    from rolecall.agent.settings import collectors_of, default_agent_file, load_agent_file

    file = default_agent_file(arguments.node) if arguments.config is None else load_agent_file(arguments.config)
    node, data_dir = arguments.node or NodeId(file.node), arguments.data_dir or file.data_dir
    token_file = arguments.token_file or file.token_file
    token = _token(parser, token_file) if token_file else token_of(data_dir)
    if arguments.action == "token":
        print(f"bearer {bearer_token(token)}" if arguments.bearer else token)
        print(access_of(token_file or data_dir / TOKEN_NAME), file=sys.stderr)
        return None
    refuse_foreign(data_dir, os.geteuid())
    web = None
    if arguments.config is not None and file.web_config_file is not None:
        from rolecall.agent.http.web_config import load_web_config

        web = load_web_config(arguments.config.parent / file.web_config_file)
    return AgentSettings(
        node=node,
        data_dir=data_dir,
        token=token,
        host=arguments.host or file.host,
        port=file.port if arguments.port is None else arguments.port,
        interval_seconds=arguments.interval or file.interval_seconds,
        raylet=_pair(parser, "raylet", arguments.raylet_pid, arguments.raylet_start),
        parent=_pair(parser, "parent", arguments.parent_pid, arguments.parent_start),
        proc=arguments.proc or file.proc,
        cgroup_root=file.sys / "fs" / "cgroup",
        collectors=lambda registry: collectors_of(file, node, data_dir, registry),
        tls=web.tls.context if web and web.tls else None,
        allows=web.auth.allows if web and web.auth else None,
        group_registers=True,
        health_socket=(file.node_health.socket or data_dir / HEALTH_SOCKET_NAME) if file.node_health.enabled else None,
        health_watch=file.node_health.watch,
    )


def _allow_descriptors() -> None:
    """Raise the soft limit: a watched process takes four descriptors, a shell usually allows 1,024 in all."""
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
    except (ConfigError, DirectoryInUse) as e:
        return _refused(str(e))
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            return _refused(f"{e.strerror}; stop it, or choose another port: --port PORT (0: any free one)")
        return _refused(f"{os.fsdecode(e.filename)}: {os_reason(e)}" if e.filename else os_reason(e))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    try:
        agent.run()
    except WatchRefused as e:
        return _refused(str(e))
    return 0


def _refused(because: str) -> int:
    print(f"rolecall agent: {because}", file=sys.stderr)
    return 2
