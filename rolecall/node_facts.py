"""Facts of this node for `rolecall doctor`. Whatever cannot be read is a fact, too; nothing here judges.

adjtimex(2), modes 0, reads the kernel's clock discipline without changing it: state, and the error that it may have.
"""

import ctypes
import http.client
import json
import os
import platform
import resource
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import yaml

from rolecall.agent.evidence import find_py_spy
from rolecall.core.errors import ConfigError
from rolecall.doctor import NodeFacts

ASK_SECONDS: Final = 3.0
ANSWER_BYTES_MAX: Final = 64 * 1024
ENVIRON_BYTES_MAX: Final = 256 * 1024
NVIDIA_VENDOR: Final = "0x10de"
DISPLAY_CLASS: Final = "0x03"
"""PCI base class of display controllers; without a monitor, too (3D controller)."""
MICROSECONDS: Final = 1e-6
DEFAULT_PORT: Final = 9477
DEFAULT_DATA_DIR: Final = Path("/var/lib/rolecall")


def read_facts(config: Path | None, pid: int | None, root: Path = Path("/")) -> NodeFacts:
    """`config`: the agent's file; `pid`: whose environment is looked at; `root`: of `/proc`, `/sys` and `/dev`.

    Raises:
        ConfigError: `config` cannot be read, or there is no process `pid` whose environment can be.
    """
    settings = _settings(config)
    data_dir = Path(settings.get("data_dir", DEFAULT_DATA_DIR))
    host = str(settings.get("host", "127.0.0.1"))
    port = settings.get("port", DEFAULT_PORT)
    reached = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    url = f"{'https' if settings.get('web_config_file') else 'http'}://{reached}:{port}"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    clock_state, clock_error_seconds = read_clock()
    free_bytes, free_inodes = _free(data_dir)
    return NodeFacts(
        is_root=os.geteuid() == 0,
        kernel=platform.release(),
        gpu_devices=sum(p.name.removeprefix("nvidia").isdecimal() for p in (root / "dev").glob("nvidia[0-9]*")),
        pci_gpus=_pci_gpus(root / "sys/bus/pci/devices"),
        driver=_driver(root / "proc/driver/nvidia/version"),
        nvml=_nvml(),
        kmsg=_kmsg(root / "dev/kmsg"),
        py_spy=find_py_spy() is not None,
        ptrace_scope=_integer(root / "proc/sys/kernel/yama/ptrace_scope"),
        agent=ask_agent(url),
        agent_url=url,
        socket=(data_dir / "agent.sock").exists(),
        data_dir=str(data_dir),
        data_dir_error=_data_dir_error(data_dir),
        free_bytes=free_bytes,
        free_inodes=free_inodes,
        environ=dict(os.environ) if pid is None else _environ_of(root / "proc" / str(pid) / "environ", pid),
        clock_state=clock_state,
        clock_error_seconds=clock_error_seconds,
        pressure=(root / "proc/pressure/cpu").exists(),
        pidfd=_pidfd(),
        files_soft=soft,
        files_hard=hard,
    )


def _settings(config: Path | None) -> Mapping[str, Any]:
    """Only where the agent listens and keeps its things: the agent itself checks the rest."""
    if config is None:
        return {}
    try:
        value = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise ConfigError([f"(file): {e}"], str(config)) from None
    if value is not None and not isinstance(value, dict):
        raise ConfigError([f"(top): expected a mapping, got {type(value).__name__}"], str(config))
    return value or {}


def ask_agent(url: str) -> str:
    """`ok`, what is wrong with the answer, or empty where nobody listens."""
    parts = urlsplit(url)
    try:
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=ASK_SECONDS)
    except ValueError as e:
        return str(e)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        body = answer.read(ANSWER_BYTES_MAX)
    except ConnectionRefusedError:
        return ""
    except TimeoutError:
        return f"no answer within {ASK_SECONDS:g} s"
    except (OSError, http.client.HTTPException) as e:
        # Behind TLS of its own authority, or with client certificates: somebody listens, and that is enough.
        return "ok" if parts.scheme == "https" and "CERTIFICATE" in str(e).upper() else f"{type(e).__name__}: {e}"
    finally:
        connection.close()
    if answer.status == http.client.UNAUTHORIZED:
        return "ok"
    try:
        said = json.loads(body)
        if answer.status == http.client.OK and said["ok"] is True:
            return "ok"
        return f"it is not well: its newest look is {float(said['newest_round_age_seconds']):.0f} s old"
    except (ValueError, KeyError, TypeError):
        return "what answers there is no agent"


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
    """State of the kernel's clock and the largest error it may have, seconds; None: it does not say."""
    timex = _Timex()
    try:
        state = int(ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)))
    except (OSError, AttributeError):
        return None, None
    return (None, None) if state < 0 else (state, timex.maxerror * MICROSECONDS)


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
    if not path.is_dir():
        return "no such directory"
    return "" if os.access(path, os.W_OK | os.X_OK) else "not writable for this user"


def _free(path: Path) -> tuple[int | None, int | None]:
    try:
        stat = os.statvfs(path)
    except OSError:
        return None, None
    # File systems without a table of inodes (btrfs) say 0 of 0.
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
