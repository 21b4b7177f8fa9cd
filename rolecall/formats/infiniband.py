"""Parses the sysfs files of an InfiniBand or RoCE port: `<device>/ports/<n>/{state, phys_state, rate, ...}`.

Formats: the kernel's Documentation/ABI/stable/sysfs-class-infiniband and drivers/infiniband/core/sysfs.c. Used by the
agent (up to once a second) and by the detector (on copies of the tree).
"""

import re
from dataclasses import dataclass

GIGABIT_BYTES = 1e9 / 8
UP_STATES = frozenset({4, 5})
"""ACTIVE and ACTIVE_DEFER."""
STATES = {0: "NOP", 1: "DOWN", 2: "INIT", 3: "ARMED", 4: "ACTIVE", 5: "ACTIVE_DEFER"}
PHYSICAL_STATES = {
    1: "Sleep",
    2: "Polling",
    3: "Disabled",
    4: "PortConfigurationTraining",
    5: "LinkUp",
    6: "LinkErrorRecovery",
    7: "Phy Test",
}
UNKNOWN = "unknown"
_STATE = re.compile(r"(\d):\s*([A-Za-z_ ]{1,40})\Z")
_RATE = re.compile(r"(\d{1,5}(?:\.\d{1,3})?) Gb/sec(?: \((\d{1,2})X(?: ([A-Z0-9]{1,8}))?\))?\Z")

DATA_WORD_BYTES = 4
"""What `port_rcv_data` and `port_xmit_data` count in."""

SATURATES_AT = {
    **dict.fromkeys(("local_link_integrity_errors", "excessive_buffer_overrun_errors"), 2**4 - 1),
    **dict.fromkeys(
        ("link_error_recovery", "link_downed", "port_xmit_constraint_errors", "port_rcv_constraint_errors"), 2**8 - 1
    ),
    **dict.fromkeys(
        (
            *("symbol_error", "port_rcv_errors", "port_rcv_remote_physical_errors", "port_rcv_switch_relay_errors"),
            *("port_xmit_discards", "VL15_dropped"),
        ),
        2**16 - 1,
    ),
    **dict.fromkeys(
        ("port_xmit_data", "port_rcv_data", "port_xmit_packets", "port_rcv_packets", "port_xmit_wait"), 2**32 - 1
    ),
}
"""Largest value by counter, where it stays until it is cleared (IBTA specification, attribute PortCounters)."""

FAULT_COUNTERS = frozenset(
    {
        *("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_xmit_discards"),
        *("local_link_integrity_errors", "excessive_buffer_overrun_errors", "port_rcv_remote_physical_errors"),
        *("rnr_nak_retry_err", "roce_slow_restart", "out_of_sequence", "packet_seq_err", "local_ack_timeout_err"),
        *("np_cnp_sent", "np_ecn_marked_roce_packets", "rp_cnp_handled", "rp_cnp_ignored", "out_of_buffer"),
    }
)
"""Counters, over all drivers, that indicate a bad link or congestion."""


@dataclass(frozen=True, slots=True)
class Rate:
    """`num_lanes` and `speed` (`NDR`) are 0 and empty where the kernel does not say them."""

    bytes_per_second: float
    num_lanes: int = 0
    speed: str = ""

    def __str__(self) -> str:
        lanes = f" ({self.num_lanes}X{' ' + self.speed if self.speed else ''})" if self.num_lanes else ""
        return f"{self.bytes_per_second / GIGABIT_BYTES:g} Gb/s{lanes}"


def parse_state(text: str | None) -> int | None:
    """The number of `4: ACTIVE` or `5: LinkUp`; None if it is not of that form."""
    found = _STATE.match(text) if text else None
    return int(found.group(1)) if found else None


def parse_rate(text: str | None) -> Rate | None:
    """Of `400 Gb/sec (4X NDR)`; None if it is not of that form."""
    found = _RATE.match(text) if text else None
    if found is None or not float(found.group(1)):
        return None
    return Rate(float(found.group(1)) * GIGABIT_BYTES, int(found.group(2) or 0), found.group(3) or "")
