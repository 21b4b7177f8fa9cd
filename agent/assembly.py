"""The collectors that an `agent.yaml` enables. Each is imported only if it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rolecall.agent.collectors.base import Collector
from rolecall.agent.registry import Registry
from rolecall.agent.settings import AgentFile
from rolecall.core.errors import ConfigError
from rolecall.core.ids import NodeId


def collectors_of(file: AgentFile, node: NodeId, data_dir: Path, registry: Registry) -> list[Collector]:
    """In the order of the file's keys.

    Raises:
        ConfigError: invalid rules, address or URL.
    """
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
    from rolecall.formats.xid.xid import xid

    merger = XidMerger()
    library = Path(file.gpu.library) if file.gpu.library else None
    events = GpuEventsCollector(
        library=library,
        merge=merger.merge,
        decode=lambda code: {"mnemonic": xid(code).mnemonic, "action": str(xid(code).immediate)},
    )
    gpus = GpuCollector(
        node,
        library=library,
        interval_seconds=file.gpu.interval_seconds,
        last_xid=events.last_xid,
        xid_text=lambda code: xid(code).meaning,
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
        from rolecall.agent.collectors.exporters.collector import DCGM_URL, dcgm_exporter

        section = file.dcgm_exporter
        interval, url = section.interval_seconds, section.url or DCGM_URL
        with _blamed_on("dcgm_exporter"):
            found.append(dcgm_exporter(node, url=url, hostname=section.hostname, interval_seconds=interval))
    if file.node_exporter.enabled:
        from rolecall.agent.collectors.exporters.collector import NODE_URL, node_exporter

        url, interval = file.node_exporter.url or NODE_URL, file.node_exporter.interval_seconds
        with _blamed_on("node_exporter"):
            found.append(node_exporter(node, url=url, interval_seconds=interval))
    if file.vllm.enabled and file.vllm.engines:
        from rolecall.agent.collectors.engine.vllm import Endpoint, VllmCollector

        engines = tuple(Endpoint(e.url, e.replica.partition("/")[0], e.replica, e.rank) for e in file.vllm.engines)
        found.append(VllmCollector(node, lambda: engines, interval_seconds=file.vllm.interval_seconds))
