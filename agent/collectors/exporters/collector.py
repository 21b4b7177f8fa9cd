"""Other exporters instead of our own collectors: dcgm-exporter for GPUs, node_exporter for network and disks.

A node that already runs them needs no second NVML client: their series become metrics of our catalogue, in our units.
Series without an equivalent are left out. Values are as old as the exporter's own interval (dcgm-exporter: 30 s by
default).
"""

import re
from collections.abc import Iterable, Mapping

from prometheus_client.samples import Sample

from rolecall.agent.collectors.base import CollectorReading, CollectorUnavailable
from rolecall.agent.collectors.exporters.node_exporter import NodeExporterPage
from rolecall.agent.collectors.exporters.scrape import DEADLINE_SECONDS, Scraper, parse_address
from rolecall.agent.collectors.gpu.dcgm import SERIES
from rolecall.agent.collectors.gpu.queries import THROTTLE_REASONS, Key
from rolecall.core.ids import NodeId
from rolecall.core.metrics.gpu import GPU_METRICS
from rolecall.core.metrics.metric import Metric, MetricValue

DCGM_URL = "http://localhost:9400/metrics"
NODE_URL = "http://localhost:9100/metrics"
INTERVAL_SECONDS = 5.0
NUM_GPUS_MAX = 64


_GPU_METRICS = {m.name.removeprefix("rolecall_gpu_"): m for m in GPU_METRICS}
_INFO, _UP, _MIG, _THROTTLE = (_GPU_METRICS[n] for n in ("info", "up", "mig_enabled", "throttle_active"))
_MEBI = 1.0 / (1 << 20)

_DCGM_KEYS: Mapping[str, tuple[Key, float]] = {
    **{s.name: (s.key, s.scale) for s in SERIES},
    "DCGM_FI_DEV_FB_TOTAL": (("memory_total_bytes",), _MEBI),
    "DCGM_FI_DEV_ENFORCED_POWER_LIMIT": (("power_limit_watts",), 1.0),
    "DCGM_FI_DEV_MAX_SM_CLOCK": (("sm_clock_max_hertz",), 1e-6),
    "DCGM_FI_DEV_PCIE_LINK_GEN": (("pcie_link_generation",), 1.0),
    "DCGM_FI_DEV_PCIE_MAX_LINK_GEN": (("pcie_link_generation_max",), 1.0),
    "DCGM_FI_DEV_PCIE_LINK_WIDTH": (("pcie_link_width",), 1.0),
    "DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH": (("pcie_link_width_max",), 1.0),
    "DCGM_FI_PROF_NVLINK_TX_BYTES": (("nvlink_transmit_bytes_per_second",), 1.0),
    "DCGM_FI_PROF_NVLINK_RX_BYTES": (("nvlink_receive_bytes_per_second",), 1.0),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP_NS": (("throttle_seconds_total", "sw_power_cap"), 1e9),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_SYNC_BOOST_NS": (("throttle_seconds_total", "sync_boost"), 1e9),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS": (("throttle_seconds_total", "sw_thermal"), 1e9),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS": (("throttle_seconds_total", "hw_thermal"), 1e9),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS": (("throttle_seconds_total", "hw_power_brake"), 1e9),
}
"""DCGM's name to our key and divisor. Units follow dcgm_fields.h: violations are in nanoseconds, although the HELP of
older exporters says otherwise (NVIDIA/dcgm-exporter#589)."""
_DCGM_RULES: dict[str, tuple[Metric, tuple[str, ...], float]] = {
    name: (_GPU_METRICS[key[0]], key[1:], scale) for name, (key, scale) in _DCGM_KEYS.items()
}
_REASON_MASKS = frozenset({"DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS"})
_INT32_BLANK, _FP64_BLANK, _INT64_BLANK = 0x7FFFFFF0, float(1 << 47), float((1 << 63) - 16)
_GPU = re.compile(r"[0-9]{1,3}\Z")


def _is_blank(value: float) -> bool:
    """DCGM's blank values: missing, not supported or not permitted (dcgm_structs.h)."""
    return (
        not -_INT64_BLANK < value < _INT64_BLANK  # NaN too
        or _INT32_BLANK <= value <= _INT32_BLANK + 3
        or _FP64_BLANK <= value <= _FP64_BLANK + 3
    )


class DcgmPage:
    """dcgm-exporter's series as GPU metrics.

    A GPU that disappears from the page stays as `up` 0. Of MIG instances, which share a GPU's number, only their
    presence is used. XIDs come from the kernel log: DCGM keeps only the newest code and does not show repeats.
    """

    wanted = frozenset(_DCGM_RULES) | _REASON_MASKS

    def __init__(self, node: NodeId, hostname: str = "") -> None:
        """`hostname`: this node's name in dcgm-exporter, for a page with several hosts; empty: `node`."""
        self._node, self._hostname = node, hostname or node
        self._seen: dict[str, None] = {}  # GPU numbers in order of first appearance

    def values(self, samples: Iterable[Sample]) -> list[MetricValue]:
        """Raises CollectorUnavailable: no GPU of this node on the page."""
        node = self._node
        mine = self._of_this_host([s for s in samples if _GPU.match(s.labels.get("gpu", ""))])
        found: dict[tuple[str, tuple[str, ...]], MetricValue] = {}

        def add(metric: Metric, labels: tuple[str, ...], value: float) -> None:
            # A GPU that pods share has one series per pod, all with the same value.
            found.setdefault((metric.name, labels), MetricValue(metric, labels, value))

        here: dict[str, None] = {}
        for name, labels, value, *_ in mine:
            gpu = labels["gpu"]
            if gpu not in self._seen:
                if len(self._seen) >= NUM_GPUS_MAX:
                    continue
                self._seen[gpu] = None
            if gpu not in here:
                here[gpu] = None
                who = (labels.get("UUID", ""), labels.get("modelName", ""), labels.get("DCGM_FI_DRIVER_VERSION", ""))
                add(_INFO, (node, gpu, *who), 1.0)
            if "GPU_I_ID" in labels:
                add(_MIG, (node, gpu), 1.0)
            elif _is_blank(value) or "nvlink" in labels:
                continue
            elif name in _REASON_MASKS:
                for bit, reason in THROTTLE_REASONS.items():
                    add(_THROTTLE, (node, gpu, reason), float(bool(int(value) & bit)))
            else:
                metric, more, scale = _DCGM_RULES[name]
                add(metric, (node, gpu, *more), value / scale)
        if not here:
            raise CollectorUnavailable("no series of a GPU on this page")
        for gpu in self._seen:
            add(_UP, (node, gpu), float(gpu in here))
        return list(found.values())

    def _of_this_host(self, samples: list[Sample]) -> list[Sample]:
        """This node's samples: all, unless the page has several hosts. Raises CollectorUnavailable."""
        hosts = {_host(s) for s in samples}
        if len(hosts) <= 1:
            return samples
        if self._hostname not in hosts:
            some = ", ".join(sorted(hosts)[:4])
            raise CollectorUnavailable(
                f"the page has {len(hosts)} hosts ({some}), none of which is {self._hostname}: set `hostname`"
            )
        return [s for s in samples if _host(s) == self._hostname]


def _host(sample: Sample) -> str:
    """The label was `Hostname` until May 2026 (NVIDIA/dcgm-exporter#655)."""
    return sample.labels.get("hostname") or sample.labels.get("Hostname", "")


class ExporterCollector:
    """`page` translates the exporter's samples. `dcgm`: the page is also shown unchanged at `/metrics/dcgm`."""

    def __init__(
        self,
        node: NodeId,
        name: str,
        url: str,
        page: DcgmPage | NodeExporterPage,
        *,
        dcgm: bool = False,
        interval_seconds: float = INTERVAL_SECONDS,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        """Raises ValueError: `url` is malformed, or not of this node."""
        self.name, self.interval_seconds = name, interval_seconds
        self._address, self._page, self._dcgm = parse_address(url), page, dcgm
        self._scraper = Scraper(node, name, page.wanted, deadline_seconds=deadline_seconds)

    def read(self, at: float) -> CollectorReading:
        """Raises CollectorUnavailable: the exporter does not answer: address and reason."""
        body, samples = self._scraper.scrape(self._address)
        try:
            values = self._page.values(samples)
        except CollectorUnavailable as e:
            raise CollectorUnavailable(f"{self._address.url}: {e}") from None
        every = (*values, *self._scraper.counts())
        if not self._dcgm:
            return CollectorReading(every)
        return CollectorReading(every, dcgm=lambda: body.decode(errors="replace").rstrip("\n") + "\n")

    def close(self) -> None:
        pass
