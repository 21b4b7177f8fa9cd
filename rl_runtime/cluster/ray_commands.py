"""Command lines and settings of Ray's own processes, for a loopback cluster without Ray's Python agents.

Derived from `ray._private.services.start_gcs_server` and `start_raylet` of Ray 2.60.
"""

import base64
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from rolecall.core.errors import ConfigError
from rolecall.core.ids import NodeId
from rolecall.core.rundir import RunDir

RAY_VERSION = "2.60"
"""The only version with these command lines; another one would fail during the start."""
LOOPBACK = "127.0.0.1"
LIFELINE = "lifeline"
"""Name of the pipe in the session's parent folder, held open only by the supervisor."""
OBJECT_STORE_BYTES = 80_000_000
"""A node's object store; Ray's minimum is 75 MB. The file is sparse: messages stay under 100 KB and travel inline."""
NODE_CAPACITY = 1000
"""Capacity of the resource named after the node; an actor takes one unit."""

RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise Ray replaces 127.0.0.1 by the address of an interface.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # A killed raylet is declared dead after 10 x 200 ms, because each check fails at once. A healthy one may answer
    # late on a machine whose two cores run engines and trainers: a threshold of 2 declared such nodes dead, 10 x 1 s
    # does not.
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "200",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "10",
    # Recovery decides which process to end, not Ray's memory monitor.
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray's default of 15 starves the run when the machine has other load.
    "RAY_worker_niceness": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "OMP_NUM_THREADS": "1",
}


def check_ray(installed: str | None = None) -> None:
    """`installed` overrides the installed version in tests.

    Raises:
        ConfigError: Ray is missing, or its version is not supported.
    """
    try:
        found = installed or version("ray")
    except PackageNotFoundError:
        found = "none"
    if found.split(".")[:2] != RAY_VERSION.split("."):
        wanted = f"pip install 'ray=={RAY_VERSION}.*'"
        raise ConfigError([f"(installation): needs Ray {RAY_VERSION}, found {found}; install it with: {wanted}"])


def ray_environment(run: RunDir) -> dict[str, str]:
    """Environment of every Ray process of the run. The token itself is stored only in its file."""
    return {**RAY_SETTINGS, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(run.token_path)}


def gcs_command(*, node_id: str, session: Path, logs: Path, commit: str) -> list[str]:
    """Command line of the one GCS; it picks a free port and writes it into the session folder."""
    return [
        str(_binary("gcs/gcs_server")),
        f"--log_dir={logs}",
        f"--config_list={base64.b64encode(b'{}').decode()}",
        "--gcs_server_port=0",
        "--metrics-agent-port=-1",
        f"--node-ip-address={LOOPBACK}",
        f"--session-name={session.name}",
        f"--ray-commit={commit}",
        f"--session-dir={session}",
        f"--node-id={node_id}",
    ]


def raylet_command(
    *,
    node: NodeId,
    node_id: str,
    cluster_id: str,
    gcs_address: str,
    session: Path,
    logs: Path,
    store: Path,
    head: bool,
    num_gpus: int = 0,
) -> list[str]:
    """Command line of one raylet, including that of its workers."""
    workers = _ray_folder() / "_private" / "workers"
    raylet_socket, store_socket = session / "sockets" / f"raylet.{node}", session / "sockets" / f"store.{node}"
    worker = [
        sys.executable,
        str(workers / "setup_worker.py"),
        str(workers / "default_worker.py"),
        f"--node-ip-address={LOOPBACK}",
        "--node-manager-port=RAY_NODE_MANAGER_PORT_PLACEHOLDER",
        f"--object-store-name={store_socket}",
        f"--raylet-name={raylet_socket}",
        "--redis-address=None",
        "--metrics-agent-port=-1",
        "--logging-rotate-bytes=10000000",
        "--logging-rotate-backup-count=2",
        "--runtime-env-agent-port=0",
        f"--gcs-address={gcs_address}",
        f"--session-name={session.name}",
        f"--temp-dir={session.parent}",
        "--webui=None",
        f"--cluster-id={cluster_id}",
        "RAY_WORKER_DYNAMIC_OPTION_PLACEHOLDER",
    ]
    # Options that Ray adds to an agent's command become arguments of the shell, which ignores them.
    waits_for_raylet = ["/bin/sh", "-c", "exec cat"]
    waits_for_supervisor = ["/bin/sh", "-c", f"exec cat < {session.parent / LIFELINE}"]
    return [
        str(_binary("raylet/raylet")),
        f"--raylet_socket_name={raylet_socket}",
        f"--store_socket_name={store_socket}",
        "--object_manager_port=0",
        "--min_worker_port=0",
        "--max_worker_port=0",
        "--node_manager_port=0",
        f"--node_id={node_id}",
        f"--node_ip_address={LOOPBACK}",
        "--maximum_startup_concurrency=2",
        f"--static_resource_list={node},{NODE_CAPACITY},memory,1000000000,object_store_memory,{OBJECT_STORE_BYTES}"
        + (f",GPU,{num_gpus}" if num_gpus else ""),
        f"--python_worker_command={subprocess.list2cmdline(worker)}",
        "--java_worker_command=",
        "--cpp_worker_command=",
        "--native_library_path=",
        f"--temp_dir={session.parent}",
        f"--session_dir={session}",
        f"--log_dir={logs}",
        f"--resource_dir={session / 'runtime_resources'}",
        "--metrics-agent-port=-1",
        "--metrics_export_port=-1",
        "--runtime_env_agent_port=0",
        f"--object_store_memory={OBJECT_STORE_BYTES}",
        f"--plasma_directory={store}",
        f"--fallback_directory={session.parent}",
        "--ray-debugger-external=0",
        f"--gcs-address={gcs_address}",
        f"--session-name={session.name}",
        "--labels=",
        f"--cluster-id={cluster_id}",
        "--num_prestart_python_workers=0",
        f"--dashboard_agent_command={subprocess.list2cmdline(waits_for_raylet)}",
        f"--runtime_env_agent_command={subprocess.list2cmdline(waits_for_supervisor)}",
        f"--node-name={node}",
        *(["--head"] if head else []),
    ]


def _ray_folder() -> Path:
    found = find_spec("ray")
    assert found is not None and found.origin is not None, "the extra [runtime] brings Ray"
    return Path(found.origin).parent


def _binary(path: str) -> Path:
    return _ray_folder() / "core" / "src" / "ray" / path


def store_folder(num_nodes: int, fallback: Path) -> Path:
    """Shared memory unless it is too small (64 MB in containers): writing beyond its size raises SIGBUS."""
    shm = Path("/dev/shm")
    enough = shm.is_dir() and shutil.disk_usage(shm).free > 2 * num_nodes * OBJECT_STORE_BYTES
    return shm if enough else fallback
