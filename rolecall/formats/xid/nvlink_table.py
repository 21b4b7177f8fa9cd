"""Rows that tell an NVLink XID's meaning from the words in its line, as plain values; `nvlink.py` reads them.

From NVIDIA's XID catalogue (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html): the sheet "XID
144-150 Decode", and the text of WORKFLOW_NVLINK_ERR for XID 74. Numbers and NVIDIA's words for actions are theirs, the
rest ours.
"""

NONFATAL, FATAL, LINK_FATAL = "non-fatal", "fatal", "link fatal"
ANY = -1
"""A row for every status."""

Row = tuple[int, str, str, str]  # error status (`ANY`: each), immediate action, investigatory action, severity

_COUNTED = ("IGNORE", "IGNORE", NONFATAL)
_TO_SUPPORT = ("IGNORE", "CONTACT_SUPPORT", NONFATAL)
_RESET = ("RESET_GPU", "CONTACT_SUPPORT", FATAL)
_OF_154 = ("XID_154_EVAL", "CONTACT_SUPPORT", NONFATAL)
_OF_154_LINK = ("XID_154_EVAL", "CHECK_NVLINK_FAILURE_FLOW", NONFATAL)
_OF_154_ONLY = ("XID_154_EVAL", "IGNORE", NONFATAL)
_SOFTWARE: Row = (0x80000000, *_TO_SUPPORT)  # raised by software, in every unit of 145 to 148 but one

_TLW: tuple[Row, ...] = ((0x1, *_COUNTED), (0x2, *_TO_SUPPORT), (0x4, *_RESET), _SOFTWARE)

UNITS: tuple[tuple[int, tuple[str, ...], int, int, tuple[Row, ...]], ...] = (
    # XID, names in the line (before R575, from R575 on), bits 0 to 9 before R575, bits 0 to 6 from R575 on, rows
    (
        144,
        ("SAW_MVB",),
        0b0000100001,
        0b0000001,
        (
            (0x1, *_TO_SUPPORT),
            (0x2, *_RESET),
            (0x4, *_COUNTED),
            (0x8, *_TO_SUPPORT),
            (0x10, *_RESET),
            (0x20, *_COUNTED),
        ),
    ),
    (145, ("RLW_CTRL",), 0b0001100010, 0b0000011, (_SOFTWARE,)),
    (
        145,
        ("RLW_REMAP",),
        0b0010000010,
        0b0000100,
        (
            (0x1, *_OF_154),
            (0x2, *_OF_154),
            (0x4, *_OF_154_LINK),
            (0x8, *_OF_154_LINK),
            (0x10, *_OF_154_LINK),
            (0x20, *_OF_154_LINK),
            (0x40, *_RESET),
            (0x80, *_RESET),
            (0x100, *_COUNTED),
            (0x200, *_COUNTED),
            _SOFTWARE,
        ),
    ),
    (145, ("RLW_RSPCOL",), 0b0010100010, 0b0000101, ((0x1, *_COUNTED), (0x2, *_RESET), _SOFTWARE)),
    (
        145,
        ("RLW_RXPIPE",),
        0b0011000010,
        0b0000110,
        ((0x1, *_TO_SUPPORT), (0x2, *_TO_SUPPORT), (0x4, *_TO_SUPPORT), (0x8, *_TO_SUPPORT), _SOFTWARE),
    ),
    (
        145,
        ("RLW_SRC_TRACK",),
        0b0011100010,
        0b0000111,
        (
            (0x1, *_RESET),
            (0x2, *_COUNTED),
            (0x4, *_OF_154_ONLY),
            (0x8, *_OF_154_ONLY),
            (0x10, *_RESET),
            (0x20, *_RESET),
            _SOFTWARE,
        ),
    ),
    (
        145,
        ("RLW_TAGSTATE",),
        0b0100000010,
        0b0001000,
        (
            (0x1, *_COUNTED),
            (0x2, *_RESET),
            (0x10000, *_COUNTED),
            (0x20000, *_RESET),
            (0x100000, *_RESET),
            _SOFTWARE,
        ),
    ),
    (146, ("TLW_CTRL",), 0b0100100011, 0b0001001, _TLW),
    (146, ("TLW_RX", "TLW_RX_PIPE0"), 0b0101000011, 0b0001010, _TLW),
    (146, ("TLW_RX", "TLW_RX_PIPE1"), 0b0101000011, 0b0001011, _TLW),
    (146, ("TLW_TX", "TLW_TX_PIPE0"), 0b0101100011, 0b0001100, _TLW),
    (146, ("TLW_TX", "TLW_TX_PIPE1"), 0b0101100011, 0b0001101, _TLW),
    (147, ("TREX",), 0b0110000100, 0b0001110, ((0x1, *_TO_SUPPORT), _SOFTWARE)),
    (148, ("NVLPW_CTRL", "NVLPW"), 0b0000000101, 0b0001111, (_SOFTWARE,)),
    (
        149,
        ("NETIR", "NETIR_INT"),
        0b0000000110,
        0b0011000,
        ((ANY, "RESET_GPU", "SYMPATHETIC_REPORT_SOLO", LINK_FATAL),),
    ),
    (
        149,
        ("NETIR_BER_EVENT",),
        0b1000100110,
        0b0010011,
        tuple((status, "IGNORE", "INVESTIGATE_LINK_SI_AND_CABLES", NONFATAL) for status in range(4)),
    ),
    (
        149,
        ("NETIR_MFDE_EVENT",),
        0b1001000110,
        0b0010100,
        ((0x1, *_RESET), (0x3, *_COUNTED), (0x4, *_RESET), (0x5, *_RESET), (0x7, *_RESET)),
    ),
    (150, ("MSE Degraded", "MSE_DEGRADED"), 0, 0, ((0x0, *_RESET), (0xFFFFFFFF, *_RESET))),
    (150, ("MSE_WATCHDOG",), 0, 0, ((0x0, *_RESET),)),
)
"""Of a unit that is none of these, or a status without a row, the line's own Fatal or Nonfatal decides."""

PROMOTED_UNIT = "RLW_RXPIPE"
PROMOTED_STATUS = (0x1, 0x2, 0x4)
PROMOTED_BITS = (1 << 10, 1 << 7)
"""In this unit these statuses ask for RESET_GPU where this bit of the first word is set (before R575, from R575 on)."""

LINK_DOWN_UNIT = (149, ("NETIR_LINK_EVT", "NETIR_LINK_DOWN"), 0b0111000110, 0b0010001)
LINK_DOWN: dict[int, tuple[str, str, str]] = {
    0b000000: ("RESET_GPU", "SYMPATHETIC_REPORT_SOLO", LINK_FATAL),
    0b000001: ("RESET_GPU", "REPORT_ISSUE", LINK_FATAL),
    **dict.fromkeys((0b000010, 0b000100, 0b001010), ("RESET_GPU", "INVESTIGATE_LINK_SI", LINK_FATAL)),
    **dict.fromkeys((0b001111, 0b010001, 0b010110), ("RESET_GPU", "INVESTIGATE_SW_USER", LINK_FATAL)),
    **dict.fromkeys((0b010000, 0b010010), ("RESET_GPU", "INVESTIGATE_SW_USER_LINK_SI", LINK_FATAL)),
    **dict.fromkeys((0b010101, *range(0b100000, 0b100110)), ("RESET_GPU", "INVESTIGATE_PEER_DEVICE", LINK_FATAL)),
    0b100110: ("IGNORE", "INVESTIGATE_SW_USER", LINK_FATAL),
    0b101000: ("IGNORE", "INVESTIGATE_HOST", FATAL),
    **dict.fromkeys((0b101010, 0b101011), ("RESET_GPU", "INVESTIGATE_LINK_SI_AND_CABLES", LINK_FATAL)),
}
"""By bits 20 to 25 of the first word: why the link went down. Its status says nothing."""

REGISTER_SIGNS: dict[int, tuple[tuple[str, tuple[int, ...]], ...]] = {
    0: (
        ("harmless", (0, 23, 30)),
        ("consequence", (1, 20)),
        ("ecc", (4, 5)),
        ("connection", (8, 9, 12, 16, 17, 24, 28)),
        ("signal", (21, 22)),
        ("repeated", (27, 29)),
    ),
    2: (("ecc", (0, 1, 2, 6)), ("unexpected", (13,)), ("diagnose", (16, 19)), ("repeated", (17, 18))),
    3: (("consequence", (16, 17)), ("fabric", (18,))),
    4: (("ecc", (18, 19, 21, 22, 24, 25, 27, 28)), ("threshold", (20, 23, 26, 29))),
}
"""Of an XID 74: by register (the first, third, fourth and fifth of its seven say something) what its bits are a sign
of. NVIDIA gives them for Hopper; other bits are `unexpected`."""
