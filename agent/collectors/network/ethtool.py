"""NIC driver statistics by ioctl, as in `ethtool -S`: the only source of priority flow control counters.

Reading needs no privileges (net/ethtool/ioctl.c: GSSET_INFO, GSTRINGS and GSTATS); a container sandbox or a virtual NIC
may still refuse, which yields none. Layouts: include/uapi/linux/ethtool.h."""

import ctypes
import fcntl
import socket
import struct
from collections.abc import Callable

SIOCETHTOOL = 0x8946
ETHTOOL_GSTRINGS = 0x1B
ETHTOOL_GSTATS = 0x1D
ETHTOOL_GSSET_INFO = 0x37
ETH_SS_STATS = 1
STRING_BYTES = 32
NUM_STATISTICS_MAX = 16_384
"""mlx5 with 128 queues has about 4,000."""
SLACK = 4096
"""Spare entries: the kernel writes all current statistics regardless of the requested number, and queues may have been
added since that number was read."""

Ioctl = Callable[[str, bytearray], None]
"""Queries an interface's driver; the response overwrites the request. Raises OSError."""


def kernel_ioctl(interface: str, request: bytearray) -> None:
    buffer = (ctypes.c_char * len(request)).from_buffer(request)
    ifreq = struct.pack("16sP16x", interface.encode()[:15], ctypes.addressof(buffer))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        fcntl.ioctl(control.fileno(), SIOCETHTOOL, ifreq)


class EthtoolStatistics:
    """`read(interface)`: statistics by name; empty where the driver has none or access is refused."""

    def __init__(self, ioctl: Ioctl = kernel_ioctl) -> None:
        self._ioctl = ioctl
        self._names: dict[str, tuple[str, ...]] = {}

    def read(self, interface: str, wanted: Callable[[str], bool]) -> dict[str, int]:
        """Only statistics whose name is `wanted`."""
        try:
            number = self._number(interface)
            if not 0 < number <= NUM_STATISTICS_MAX:
                return {}
            names = self._names.get(interface, ())
            if len(names) != number:
                names = self._names[interface] = self._read_names(interface, number)
            if len(names) != number:
                return {}
            request = bytearray(8 + 8 * (number + SLACK))
            struct.pack_into("=II", request, 0, ETHTOOL_GSTATS, number)
            self._ioctl(interface, request)
        except (OSError, struct.error):
            return {}
        answered = struct.unpack_from("=I", request, 4)[0]
        if answered != number:  # the queues changed just now: names and numbers do not match
            self._names.pop(interface, None)
            return {}
        values = struct.unpack_from(f"={number}Q", request, 8)
        return {name: value for name, value in zip(names, values, strict=True) if wanted(name)}

    def forget(self, interface: str) -> None:
        self._names.pop(interface, None)

    def _number(self, interface: str) -> int:
        request = bytearray(struct.pack("=IIQI", ETHTOOL_GSSET_INFO, 0, 1 << ETH_SS_STATS, 0))
        self._ioctl(interface, request)
        _, _, mask, number = struct.unpack("=IIQI", request)
        return int(number) if mask else 0

    def _read_names(self, interface: str, number: int) -> tuple[str, ...]:
        request = bytearray(12 + STRING_BYTES * (number + SLACK))
        struct.pack_into("=III", request, 0, ETHTOOL_GSTRINGS, ETH_SS_STATS, number)
        self._ioctl(interface, request)
        if struct.unpack_from("=I", request, 8)[0] != number:
            return ()
        parts = (request[12 + STRING_BYTES * n : 12 + STRING_BYTES * (n + 1)] for n in range(number))
        return tuple(bytes(p).partition(b"\0")[0].decode("ascii", "replace").strip() for p in parts)
