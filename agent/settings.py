"""`agent.yaml`: what an operator sets for the agent of a node, and the collectors that it enables. Everything has a
default; unknown keys are refused.

`rolecall agent --config agent.yaml`; `--explain` prints each key with its meaning. The agents of a bundled
run (`--ranks-only`) do not import this module, and so not pydantic.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator, model_validator

from rolecall.agent.collectors.base import Collector
from rolecall.agent.data_dir import default_data_dir
from rolecall.agent.registry import Registry
from rolecall.core.config.job import problems_of, read_yaml_file
from rolecall.core.config.section import Section
from rolecall.core.errors import ConfigError
from rolecall.core.ids import NodeId, checked_id, role_of, split_replica

Interval = Annotated[float, Field(ge=0.2, le=300.0)]


class CollectorSection(Section):
    enabled: bool = True
    """Run this collector."""
    interval_seconds: Interval = 1.0
    """Seconds between polls. A larger value saves CPU and detects later."""


class GpuSection(CollectorSection):
    library: str = ""
    """Path of libnvidia-ml.so.1; empty: the system's."""
    events: bool = True
    """Wait for XIDs and the driver's recovery action in a thread of its own."""
    dcgm: bool = True
    """Serve `/metrics/dcgm` with dcgm-exporter's names. False where a dcgm-exporter runs on the node."""


class KernelLogSection(CollectorSection):
    interval_seconds: Interval = 0.2
    """Minimum seconds between polls, each of which waits for a line."""
    path: Path = Path("/dev/kmsg")
    """The kernel's ring buffer, or a file of a syslog daemon."""


class NetworkSection(CollectorSection):
    interfaces: tuple[str, ...] = ()
    """Virtual interfaces (bond0) to watch beside the hardware ones."""


class StorageSection(CollectorSection):
    interval_seconds: Interval = 5.0
    mounts: tuple[Path, ...] = ()
    """Network file systems to watch beside all local ones. A dead server blocks its reader."""


class RasSection(CollectorSection):
    interval_seconds: Interval = 10.0
    address: str = ""
    """Address of NCCL's RAS thread; empty: NCCL_RAS_ADDR of the agent's environment, else localhost:28028."""
    confirm_seconds: Annotated[float, Field(ge=10.0, le=3600.0)] = 60.0
    """How long ranks of a communicator must differ without progress before it is an event."""


class InspectorSection(CollectorSection):
    enabled: bool = False
    interval_seconds: Interval = 5.0
    folder: Path = Path("/var/run/nccl-inspector")
    """Directory of NCCL Inspector's files (NCCL_INSPECTOR_DUMP_DIR)."""


class JobsSection(CollectorSection):
    interval_seconds: Interval = 2.0
    rules: dict[str, Any] | None = None
    """Rules that find ranks of uninstrumented jobs, before the built-in ones. null: the built-in ones."""


class RaySection(CollectorSection):
    interval_seconds: Interval = 0.25
    """Seconds between looks at which workers of Ray have ended; Ray's logs are read for those only."""


class OrphansSection(CollectorSection):
    interval_seconds: Interval = 10.0
    """Seconds between looks at all processes of the node. An orphan is reported once it was one in two of them."""


class ExporterSection(CollectorSection):
    enabled: bool = False
    interval_seconds: Interval = 5.0
    url: str = ""
    """URL of its page; empty: its usual port on this node."""


class DcgmExporterSection(ExporterSection):
    hostname: str = ""
    """Name of this node in the exporter's page, if the page covers several; empty: `node`."""


class EngineServerSection(Section):
    url: str
    """URL of a vLLM or SGLang server on this node, such as http://127.0.0.1:8000. SGLang needs `--enable-metrics`."""
    replica: str
    """The replica that it serves, such as rollout/3."""
    rank: Annotated[int, Field(ge=0)] = 0
    """The rank that it serves."""

    @field_validator("replica")
    @classmethod
    def _replica(cls, value: str) -> str:
        split_replica(value)
        return value


class EnginesSection(CollectorSection):
    interval_seconds: Interval = 5.0
    """Seconds between polls. The engine renders its page in the loop that serves requests, so poll rarely."""
    servers: tuple[EngineServerSection, ...] = ()
    """vLLM and SGLang servers whose metrics are read and joined with role, replica and rank."""


class NodeHealthSection(Section):
    """Answers NVRx's `ft_launcher --ft-node-health-check-endpoint`: whether ranks may start on this node."""

    enabled: bool = False
    """Serve it. Needs the package grpcio."""
    socket: Path | None = None
    """Unix socket to listen on; any user who can enter its folder may ask. null: `nvhcd.sock` in `data_dir`, which only
    the agent's user and group can enter."""
    watch: Annotated[str, Field(pattern=r"^(https?://[^/?#]+)?$")] = ""
    """URL of a watch (`--metrics`) whose incidents and quarantines count, too. Empty: only the agent's own events."""


class AgentFile(Section):
    node: str = Field(default_factory=lambda: socket.gethostname().lower(), validate_default=True)
    """Name of this node; use the name that Slurm, Kubernetes or Prometheus uses. Capitals become small letters."""
    host: str = "127.0.0.1"
    """Address to listen on. Outside loopback set `web_config_file` for TLS and users."""
    port: Annotated[int, Field(ge=0, le=65535)] = 9477
    """Port to listen on; 0: any free one."""
    data_dir: Path = Field(default_factory=lambda: default_data_dir(os.geteuid(), os.environ))
    """Events, cursors, state pages and the registration socket. Default: $ROLECALL_AGENT_DIR, else
    /var/lib/rolecall as root, else `rolecall` in $XDG_STATE_HOME (~/.local/state)."""
    token_file: Path | None = None
    """File with the token for evidence and registrations. null: created in `data_dir` at the first start."""
    web_config_file: Path | None = None
    """TLS and users in the format of Prometheus' exporters (docs/reference/agent.md)."""
    interval_seconds: Annotated[float, Field(ge=0.02, le=60.0)] = 1.0
    """Seconds between polls of registered processes."""
    gpu: GpuSection = GpuSection()
    kernel_log: KernelLogSection = KernelLogSection()
    network: NetworkSection = NetworkSection()
    infiniband: CollectorSection = CollectorSection()
    storage: StorageSection = StorageSection()
    nccl_ras: RasSection = RasSection()
    nccl_inspector: InspectorSection = InspectorSection()
    jobs: JobsSection = JobsSection()
    ray: RaySection = RaySection()
    """Why actors of Ray died, from Ray's logs of this node."""
    orphans: OrphansSection = OrphansSection()
    """Engine processes whose server is gone, and which keep their GPU's memory."""
    dcgm_exporter: DcgmExporterSection = DcgmExporterSection()
    """Read a dcgm-exporter instead of NVML; set gpu.enabled to false."""
    node_exporter: ExporterSection = ExporterSection()
    """Read a node_exporter instead of network, infiniband and storage; set their enabled to false."""
    engines: EnginesSection = EnginesSection()
    """Inference engines of this node."""
    node_health: NodeHealthSection = NodeHealthSection()
    """NVRx's node health check."""
    proc: Path = Path("/proc")
    """The host's /proc; in a container perhaps /host/proc."""
    sys: Path = Path("/sys")
    """The host's /sys."""
    rootfs: Path = Path("/")
    """The host's root file system; in a container perhaps /host/root. The storage collector reads file systems
    there."""

    @model_validator(mode="after")
    def _one_reader(self) -> "AgentFile":
        if self.gpu.enabled and self.dcgm_exporter.enabled:
            raise ValueError("gpu and dcgm_exporter would both report the GPUs: set enabled of one to false")
        if (self.network.enabled or self.infiniband.enabled or self.storage.enabled) and self.node_exporter.enabled:
            names = "network, infiniband, storage"
            raise ValueError(f"{names} and node_exporter would both report the node: set enabled of the first to false")
        return self

    @field_validator("node")
    @classmethod
    def _node(cls, value: str) -> str:
        return checked_id(value.lower(), "node")


def load_agent_file(path: Path) -> AgentFile:
    """Raises ConfigError: the file cannot be read, is not YAML, or has problems: all of them, each `path: reason`."""
    value = read_yaml_file(path)
    if value is not None and not isinstance(value, dict):
        raise ConfigError([f"(top): expected a mapping, got {type(value).__name__}"], str(path))
    try:
        return AgentFile.model_validate(value or {})
    except ValidationError as e:
        raise ConfigError(problems_of(e), str(path)) from None


def default_agent_file(node: str | None = None) -> AgentFile:
    """Every default; `node` in place of the host name. Raises ConfigError: the host name is not a valid node name."""
    try:
        return AgentFile() if node is None else AgentFile(node=node)
    except ValidationError as e:
        raise ConfigError([f"{p}; name this node with --node" for p in problems_of(e)]) from None


def explain(section: type[Section] = AgentFile, indent: str = "") -> str:
    """Every key with its default and meaning, as a file that could be loaded."""
    lines = []
    for name, field in section.model_fields.items():
        for line in (field.description or "").splitlines():
            lines.append(f"{indent}# {line.strip()}")
        default = field.get_default(call_default_factory=True)
        if isinstance(default, Section):
            lines += [f"{indent}{name}:", explain(type(default), indent + "  ").rstrip("\n")]
        else:
            lines.append(f"{indent}{name}: {_yaml(default)}")
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


# Each collector is imported only if it runs.


def collectors_of(file: AgentFile, node: NodeId, data_dir: Path, registry: Registry) -> list[Collector]:
    """In the order of the file's keys. Raises ConfigError: invalid rules, address or URL."""
    found: list[Collector] = []
    _add_gpus(file, node, data_dir, registry, found)
    _add_network(file, node, found)
    with _blamed_on("nccl_ras"):
        _add_nccl(file, node, found)
    if file.jobs.enabled:
        from rolecall.agent.collectors.process.discovery import parse_discovery
        from rolecall.agent.collectors.process.uninstrumented import UninstrumentedJobCollector

        rules = parse_discovery(file.jobs.rules or {})
        interval = file.jobs.interval_seconds
        found.append(UninstrumentedJobCollector(registry, node, rules, interval_seconds=interval, proc=file.proc))
    if file.ray.enabled:
        from rolecall.agent.collectors.process.ray_workers import RayWorkersCollector

        interval = file.ray.interval_seconds
        found.append(RayWorkersCollector(registry.registrations, interval_seconds=interval, proc=file.proc))
    if file.orphans.enabled:
        from rolecall.agent.collectors.process.orphans import OrphansCollector

        found.append(OrphansCollector(node, interval_seconds=file.orphans.interval_seconds, proc=file.proc))
    _add_exporters(file, node, found)
    return found


@contextmanager
def _blamed_on(key: str) -> Iterator[None]:
    """Turns a collector's ValueError into a ConfigError under `key`."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as e:
        raise ConfigError([f"{key}: {e}"]) from None


def _add_gpus(file: AgentFile, node: NodeId, data_dir: Path, registry: Registry, found: list[Collector]) -> None:
    """GPUs and the kernel log, which report the same XIDs."""
    from rolecall.agent.collectors.gpu.collector import GpuCollector
    from rolecall.agent.collectors.gpu.events import GpuEventsCollector
    from rolecall.agent.collectors.gpu.xid_merger import XidCollector, XidMerger

    merger = XidMerger()
    library = Path(file.gpu.library) if file.gpu.library else None
    events = GpuEventsCollector(library=library, merger=merger)
    gpus = GpuCollector(
        node,
        library=library,
        interval_seconds=file.gpu.interval_seconds,
        last_xid=events.last_xid,
        reported_action=events.reported_action,
        dcgm_lines=file.gpu.dcgm,
    )

    def gpu_of(pci: str) -> int | None:
        return next((g.index for g in gpus.gpus if g.pci == pci), None)

    if file.gpu.enabled:
        found.append(gpus)
        if file.gpu.events:
            found.append(events)
    if file.kernel_log.enabled:
        from rolecall.agent.collectors.kernel.collector import WAIT_SECONDS, KernelLogCollector

        found.append(
            KernelLogCollector(
                node=node,
                merger=merger,
                path=file.kernel_log.path,
                state_file=data_dir / "kernel_log.json",
                gpu_of=gpu_of,
                process_of=registry.live_process,
                interval_seconds=file.kernel_log.interval_seconds,
                wait_seconds=WAIT_SECONDS,
                proc=file.proc,
            )
        )
    if file.kernel_log.enabled or (file.gpu.enabled and file.gpu.events):
        found.append(XidCollector(merger, node=node, state_file=data_dir / "xids.json"))


def _add_network(file: AgentFile, node: NodeId, found: list[Collector]) -> None:
    if file.network.enabled:
        from rolecall.agent.collectors.network.collector import NetworkCollector

        found.append(
            NetworkCollector(
                node,
                interfaces=file.network.interfaces,
                root=file.sys / "class" / "net",
                # /proc/net shows the reader's network namespace; in a container the host's is that of its init process.
                proc_net=file.proc / ("net" if file.proc == Path("/proc") else "1/net"),
                interval_seconds=file.network.interval_seconds,
            )
        )
    if file.infiniband.enabled:
        from rolecall.agent.collectors.network.infiniband import InfinibandCollector

        root = file.sys / "class" / "infiniband"
        found.append(InfinibandCollector(node, root=root, interval_seconds=file.infiniband.interval_seconds))
    if file.storage.enabled:
        from rolecall.agent.collectors.storage.collector import StorageCollector

        found.append(
            StorageCollector(
                node,
                mounts=map(str, file.storage.mounts),
                proc=file.proc,
                rootfs=file.rootfs,
                block=file.sys / "block",
                interval_seconds=file.storage.interval_seconds,
            )
        )


def _add_nccl(file: AgentFile, node: NodeId, found: list[Collector]) -> None:
    if file.nccl_ras.enabled:
        from rolecall.agent.collectors.nccl.ras import NcclRasCollector

        ras = file.nccl_ras
        interval, confirm = ras.interval_seconds, ras.confirm_seconds
        found.append(NcclRasCollector(node, ras.address, interval_seconds=interval, confirm_seconds=confirm))
    if file.nccl_inspector.enabled:
        from rolecall.agent.collectors.nccl.inspector import NcclInspectorCollector

        interval = file.nccl_inspector.interval_seconds
        found.append(NcclInspectorCollector(node, file.nccl_inspector.folder, interval_seconds=interval))


def _add_exporters(file: AgentFile, node: NodeId, found: list[Collector]) -> None:
    if file.dcgm_exporter.enabled:
        from rolecall.agent.collectors.exporters.collector import DCGM_URL, DcgmPage, ExporterCollector

        section = file.dcgm_exporter
        url, page, interval = section.url or DCGM_URL, DcgmPage(node, section.hostname), section.interval_seconds
        with _blamed_on("dcgm_exporter"):
            found.append(ExporterCollector(node, "dcgm_exporter", url, page, dcgm=True, interval_seconds=interval))
    if file.node_exporter.enabled:
        from rolecall.agent.collectors.exporters.collector import NODE_URL, ExporterCollector
        from rolecall.agent.collectors.exporters.node_exporter import NodeExporterPage

        url, interval = file.node_exporter.url or NODE_URL, file.node_exporter.interval_seconds
        theirs = NodeExporterPage(node)
        with _blamed_on("node_exporter"):
            found.append(ExporterCollector(node, "node_exporter", url, theirs, interval_seconds=interval))
    if file.engines.enabled and file.engines.servers:
        from rolecall.agent.collectors.engine.collector import EngineCollector, EngineEndpoint

        servers = [EngineEndpoint(e.url, role_of(e.replica), e.replica, e.rank) for e in file.engines.servers]
        found.append(EngineCollector(node, servers, interval_seconds=file.engines.interval_seconds))
