"""Facts of this node for `rolecall doctor`. An unreadable value is a fact, too; `doctor.py` does the checks.

adjtimex(2), modes 0, reads the kernel's clock discipline without changing it: state, and the error that it may have.
The offset of another agent's clock is its wall time minus the midpoint of request and response; its error is at most
half the round trip.
"""

import ctypes
import http.client
import json
import os
import platform
import re
import resource
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from stat import S_IWGRP
from typing import Any, Final
from urllib.parse import urlsplit

from rolecall.agent.data_dir import SOCKET_NAME, default_data_dir
from rolecall.agent.evidence import find_py_spy
from rolecall.agent.local_access import own_authorization, reached, served_url
from rolecall.core.clock import Clock, SystemClock
from rolecall.core.config.job import read_yaml_file
from rolecall.core.errors import ConfigError
from rolecall.core.http import HttpFailed, is_loopback, request
from rolecall.node.doctor import RAY_CLEANUP, ClockOffset, NodeFacts

ASK_SECONDS: Final = 3.0
ANSWER_BYTES_MAX: Final = 64 * 1024
ENVIRON_BYTES_MAX: Final = 256 * 1024
NVIDIA_VENDOR: Final = "0x10de"
DISPLAY_CLASS: Final = "0x03"
"""PCI base class of display controllers; without a monitor, too (3D controller)."""
MICROSECONDS: Final = 1e-6
DEFAULT_PORT: Final = 9477
DEFAULT_KERNEL_LOG: Final = "/dev/kmsg"
NVML_SECONDS: Final = 30.0
"""Without the persistence daemon a node with eight GPUs takes some ten seconds."""
PAGE_BYTES_MAX: Final = 4 << 20
PAGES_MAX: Final = 8
ASKED_AT_ONCE: Final = 32
FAILURES: Final = (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError)
"""Raised when the agent does not answer, or another server does."""
_DOWN = re.compile(r'^rolecall_probe_up\{[^}]*probe="(\w+)"[^}]*\} 0(?:\.0)?$', re.MULTILINE)


def read_facts(
    config: Path | None,
    pid: int | None,
    root: Path = Path("/"),
    *,
    agents: str = "",
    credentials: Path | None = None,
) -> NodeFacts:
    """`config`: the agent's file; `pid`: whose environment is read; `root`: of `/proc`, `/sys` and `/dev`.
    `agents`: others, as `watch agents` takes them; `credentials`: for those that want a user.

    Raises:
        ConfigError: `config` or `credentials` cannot be read, `agents` names none, or there is no process `pid` whose
            environment can be read.
    """
    settings = _settings(config)
    others = _others(agents, credentials)
    data_dir = Path(settings.get("data_dir") or default_data_dir(os.geteuid(), os.environ))
    token_file = settings.get("token_file")
    own = own_authorization(data_dir, Path(token_file) if token_file else None)
    host = str(settings.get("host", "127.0.0.1"))
    scheme = "https" if settings.get("web_config_file") else "http"
    named = f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.get('port', DEFAULT_PORT)}"
    served = served_url(data_dir) or named
    url = reached(served)
    gpu, kernel_log = _section(settings, "gpu"), _section(settings, "kernel_log")
    log = str(kernel_log.get("path", DEFAULT_KERNEL_LOG)) if kernel_log.get("enabled", True) else ""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    clock_state, clock_error_seconds = read_clock()
    free_bytes, free_inodes = _free(data_dir)
    return NodeFacts(
        is_root=os.geteuid() == 0,
        kernel=platform.release(),
        gpu_devices=sum(p.name.removeprefix("nvidia").isdecimal() for p in (root / "dev").glob("nvidia[0-9]*")),
        pci_gpus=_pci_gpus(root / "sys/bus/pci/devices"),
        driver=_driver(root / "proc/driver/nvidia/version"),
        nvml=within(NVML_SECONDS, _nvml) if gpu.get("enabled", True) else "",
        nvml_wanted=bool(gpu.get("enabled", True)),
        kmsg=_kmsg(root / log.lstrip("/")) if log else "",
        kernel_log=log,
        py_spy=find_py_spy() is not None,
        ptrace_scope=_integer(root / "proc/sys/kernel/yama/ptrace_scope"),
        agent=ask_agent(url),
        agent_url=url,
        probes_down=down_probes(url, own),
        open_to_network="" if served.startswith("https:") or is_loopback(urlsplit(served).hostname or "") else served,
        socket=(data_dir / SOCKET_NAME).exists(),
        socket_uid=_owner(data_dir / SOCKET_NAME),
        socket_gid=_group(data_dir / SOCKET_NAME),
        rank_uid=None if pid is None else _owner(root / "proc" / str(pid)),
        rank_gids=frozenset() if pid is None else _groups(root / "proc" / str(pid) / "status"),
        hidepid=_hidepid(root / "proc/self/mounts"),
        data_dir=str(data_dir),
        data_dir_exists=data_dir.is_dir(),
        data_dir_error=_data_dir_error(data_dir),
        free_bytes=free_bytes,
        free_inodes=free_inodes,
        environ=dict(os.environ) if pid is None else _environ_of(root / "proc" / str(pid) / "environ", pid),
        raylets=_raylets(root / "proc"),
        clock_state=clock_state,
        clock_error_seconds=clock_error_seconds,
        clock_offsets=others,
        pressure=(root / "proc/pressure/cpu").exists(),
        pidfd=_pidfd(),
        files_soft=soft,
        files_hard=hard,
    )


def _settings(config: Path | None) -> Mapping[str, Any]:
    """Reads only addresses and paths of the agent: the agent itself validates the rest."""
    if config is None:
        return {}
    value = read_yaml_file(config)
    if value is not None and not isinstance(value, dict):
        raise ConfigError([f"(top): expected a mapping, got {type(value).__name__}"], str(config))
    return value or {}


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = settings.get(name)
    return value if isinstance(value, dict) else {}


def _others(agents: str, credentials: Path | None) -> tuple[ClockOffset, ...]:
    """Raises ConfigError."""
    if not agents:
        return ()
    from rolecall.watch.agents import entries_of, is_file, listed, url_of
    from rolecall.watch.panels import authorization

    entries = entries_of(Path(agents)) if is_file(agents) else listed(agents)
    return clock_offsets({entry: url_of(entry) for entry in entries}, authorization(credentials, {}))


def _owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except OSError:
        return None


def _group(path: Path) -> int | None:
    """The group that may write to it."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_gid if stat.st_mode & S_IWGRP else None


def _groups(status: Path) -> frozenset[int]:
    """The effective and the supplementary groups of a process (proc(5))."""
    rows = dict(line.partition(":")[::2] for line in _text(status).splitlines())
    return frozenset(int(n) for n in (*rows.get("Gid", "").split()[1:2], *rows.get("Groups", "").split()))


def _hidepid(mounts: Path) -> str:
    """`1`, `2`, `invisible`...; empty: all processes are seen."""
    for line in _text(mounts).splitlines():
        parts = line.split(" ")
        if len(parts) >= 4 and parts[1] == "/proc":
            found = [o.removeprefix("hidepid=") for o in parts[3].split(",") if o.startswith("hidepid=")]
            return found[0] if found and found[0] not in ("0", "off") else ""
    return ""


def ask_agent(url: str) -> str:
    """`ok`, what is wrong with the answer, or empty without a listener."""
    try:
        status, body = request(
            "GET", url.rstrip("/") + "/healthz", deadline_seconds=ASK_SECONDS, bytes_max=ANSWER_BYTES_MAX
        )
    except HttpFailed as error:
        if error.refused:
            return ""
        # Behind TLS of its own authority, or with client certificates: a listener exists, which is enough.
        return "ok" if url.startswith("https:") and "CERTIFICATE" in str(error).upper() else str(error)
    if status == HTTPStatus.UNAUTHORIZED:
        return "ok"  # an agent of another version
    try:
        health = json.loads(body)
        if status == HTTPStatus.OK and health["ok"] is True:
            return "ok"
        if health == {"ok": False}:  # the public response of an agent with users
            return "it is not healthy: its newest sample is too old"
        return f"it is not healthy: its newest sample is {float(health['newest_round_age_seconds']):.0f} s old"
    except (ValueError, KeyError, TypeError):
        return "no agent: another server answers there"


class _Timex(ctypes.Structure):
    """The head of `struct timex` (adjtimex(2)), with room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


def read_clock() -> tuple[int | None, float | None]:
    """State of the kernel's clock and its maximum error, seconds; None: unknown."""
    timex = _Timex()
    try:
        state = int(ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)))
    except (OSError, AttributeError):
        return None, None
    return (None, None) if state < 0 else (state, timex.maxerror * MICROSECONDS)


def within(seconds: float, ask: Callable[[], str]) -> str:
    """The answer of `ask`, or a message without one: NVML hangs when a GPU has fallen off the bus."""
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), name="doctor-nvml", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else f"no answer within {seconds:g} s"


def _nvml() -> str:
    try:
        pynvml = import_module("pynvml")
    except ImportError as e:
        return f"{e}"
    try:
        pynvml.nvmlInit()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as e:
        return str(e)
    return ""


def _kmsg(path: Path) -> str:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as e:
        return e.strerror or str(e)
    return ""


def _pci_gpus(devices: Path) -> int:
    try:
        found = list(devices.iterdir())
    except OSError:
        return 0
    return sum(_text(d / "vendor") == NVIDIA_VENDOR and _text(d / "class").startswith(DISPLAY_CLASS) for d in found)


def _driver(path: Path) -> str:
    """`NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu ...`: the first word that is a version."""
    for word in _text(path).split("\n", 1)[0].split():
        if word[:1].isdecimal() and "." in word and word.replace(".", "").isdecimal():
            return word
    return ""


def _data_dir_error(path: Path) -> str:
    """The agent creates it where it may."""
    there = _existing(path)
    if path.exists() and not path.is_dir():
        return "not a directory"
    if os.access(there, os.W_OK | os.X_OK):
        return ""
    return "not writable for this user" if there == path else f"cannot be created: {there} is not writable"


def _existing(path: Path) -> Path:
    """`path`, or its nearest parent that exists."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def _free(path: Path) -> tuple[int | None, int | None]:
    try:
        stat = os.statvfs(_existing(path))
    except OSError:
        return None, None
    # File systems without a table of inodes (btrfs) report 0 of 0.
    return stat.f_bavail * stat.f_frsize, stat.f_favail if stat.f_files else None


def _environ_of(path: Path, pid: int) -> dict[str, str]:
    try:
        with path.open("rb") as f:
            raw = f.read(ENVIRON_BYTES_MAX)
    except OSError as e:
        raise ConfigError([f"--pid: the environment of process {pid} cannot be read: {e.strerror}"]) from None
    if b"=" not in raw:
        raise ConfigError([f"--pid: process {pid} has overwritten its environment (an actor of Ray does)"])
    pairs = (part.decode("utf-8", "replace").partition("=") for part in raw.split(b"\0"))
    return {name: value for name, equals, value in pairs if equals}


def _raylets(proc: Path) -> dict[int, bool | None]:
    """Of each raylet of this node, whether its variable says that it cleans up process groups."""
    found: dict[int, bool | None] = {}
    for folder in proc.glob("[0-9]*"):
        if _text(folder / "comm") != "raylet":
            continue
        try:
            environ = (folder / "environ").read_bytes()
        except OSError:
            found[int(folder.name)] = None
            continue
        value = re.search(rf"(?:^|\0){RAY_CLEANUP}=([^\0]*)".encode(), environ)
        found[int(folder.name)] = value is not None and value.group(1).lower() in (b"1", b"true")
    return found


def _pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _integer(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=ASK_SECONDS)


def _get(connection: http.client.HTTPConnection, path: str, authorization: str) -> str:
    """Raises one of FAILURES: no answer, or not 200."""
    connection.request("GET", path, headers={"Authorization": authorization} if authorization else {})
    answer = connection.getresponse()
    body = answer.read(PAGE_BYTES_MAX).decode("utf-8", "replace")
    if answer.status != http.client.OK:
        raise ValueError(f"status {answer.status}")
    return body


def down_probes(url: str, authorization: str) -> dict[str, str]:
    """probe -> reason for each failed probe of the agent at `url`; empty if it does not answer."""
    try:
        with closing(_connect(url)) as connection:
            down = dict.fromkeys(_DOWN.findall(_get(connection, "/metrics", authorization)), "")
            after = 0
            for _ in range(PAGES_MAX if down else 0):
                events = json.loads(_get(connection, f"/v1/events?after={after}", authorization))["events"]
                if not events:
                    break
                after = int(events[-1]["seq"])
                details = [e["detail"] for e in events if e["kind"] == "probe_down"]
                down |= {d["probe"]: str(d["reason"]) for d in details if d["probe"] in down}
            return down
    except FAILURES:
        return {}  # reported by another check


def clock_offsets(
    agents: Mapping[str, str], authorization: str = "", clock: Clock | None = None
) -> tuple[ClockOffset, ...]:
    """`agents`: name -> URL; requested concurrently."""
    wall: Callable[[], float] = (clock or SystemClock()).wall
    with ThreadPoolExecutor(max_workers=ASKED_AT_ONCE) as pool:
        return tuple(pool.map(lambda item: _offset(item[0], item[1], authorization, wall), agents.items()))


def _offset(name: str, url: str, authorization: str, wall: Callable[[], float]) -> ClockOffset:
    try:
        with closing(_connect(url)) as connection:
            _get(connection, "/healthz", authorization)  # connect first: its duration must not count
            asked_at = wall()
            response: Any = json.loads(_get(connection, "/healthz", authorization))
            answered_at = wall()
        if response.keys() == {"ok"}:
            raise ValueError("it requires a user or a token: --credentials")
        offset_seconds = float(response["wall_at"]) - (asked_at + answered_at) / 2
    except FAILURES as e:
        return ClockOffset(agent=name, reason=str(e) or type(e).__name__)
    return ClockOffset(agent=name, seconds=offset_seconds, error_seconds=abs(answered_at - asked_at) / 2)
