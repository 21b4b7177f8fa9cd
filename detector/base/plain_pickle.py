"""Reads a pickle of plain data without the pickle module: nothing in it can be imported or called.

The file may come from a compromised machine. Only the opcodes of plain data are supported: numbers, text, lists, dicts
with text keys, and tuples of scalars. Any other opcode is refused by name, and so is any input that needs more memory
than a small multiple of the file size. The result may reference one list many times, so callers must bound what they
traverse.
"""

import pickletools
import re
import struct
from typing import Any, NoReturn

from rolecall.core.errors import ReadingStopped
from rolecall.detector.base.read_budget import Check, no_check

NUM_CONTAINERS_MAX = 4_000_000
"""Limit on lists, dicts and tuples: one pickle byte can create a container of 232 bytes."""
NUM_MEMO_MAX = 4_000_000
NUM_OPCODES_MAX = 20_000_000
"""Takes a few seconds. A complete Flight Recorder entry has about seventy."""
READ_BYTES_MAX = 768 << 20
"""Limit on the estimated memory of one read, unless its caller has less left."""
CONTAINER_BYTES, MEMO_BYTES, OPCODE_BYTES, TEXT_FACTOR = 232, 96, 32, 4
"""Upper estimates: a dict of up to five items; a place in the memo; what any other opcode leaves; bytes of a decoded
character per byte of the file."""
CHECK_OPCODES = 1 << 16
"""Memory and time are checked after this many opcodes: about 30 ms, and at most 15 MB."""
DEPTH_MAX = 1000
"""Maximum nesting of marks. A dump has five levels."""
NUM_CHARACTERS_MAX = 200
"""Length at which quoted text is truncated."""
MAGIC = re.compile(rb"\x80[\x02-\x05]")

_INT, _FLOAT = struct.Struct("<i"), struct.Struct(">d")
_UINT16, _UINT32, _UINT64 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_ATOMS = {str, int, float, bool, type(None)}
_CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}


def safe(text: str) -> str:
    """Text for terminals and logs: printable ASCII, everything else escaped, truncated."""
    if text.isascii() and text.isprintable():
        return text[:NUM_CHARACTERS_MAX]
    return text[:NUM_CHARACTERS_MAX].encode("unicode_escape").decode("ascii")


class UnsafePickle(Exception):
    """Reason why a pickle was rejected. Messages that begin with `refused` concern opcodes outside plain data."""


def loads(data: bytes, *, bytes_max: int = READ_BYTES_MAX, check: Check = no_check) -> Any:
    """The value of a pickle of protocol 2 to 5. `check` is called during the work. Raises UnsafePickle: also if reading
    it would take more memory than `bytes_max`."""
    if not MAGIC.match(data):
        raise UnsafePickle("a pickle of an unknown protocol")
    try:
        value, end = _run(data, bytes_max, check)
    except (IndexError, struct.error):
        raise UnsafePickle("it is cut short, or damaged") from None
    except KeyError:
        raise UnsafePickle("not a readable pickle: it refers to a value that it does not contain") from None
    except ReadingStopped:
        raise
    except (TypeError, ValueError) as e:  # the wrong kind of value, text in no encoding
        raise UnsafePickle(f"not a readable pickle: {safe(str(e))}") from None
    if end != len(data):
        raise UnsafePickle("something follows the end of the pickle")
    return value


def _run(data: bytes, bytes_max: int, check: Check) -> tuple[Any, int]:
    """The value and the end offset of the pickle. The most frequent opcodes come first."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    push, at, num_containers = stack.append, 2, 0
    for number in range(NUM_OPCODES_MAX):
        if number % CHECK_OPCODES == 0:
            check()
            needed = CONTAINER_BYTES * num_containers + MEMO_BYTES * len(memo) + OPCODE_BYTES * number
            refuse_beyond(needed + TEXT_FACTOR * at, bytes_max)
        code = data[at]
        at += 1
        if code == 0x68:  # BINGET
            push(memo[data[at]])
            at += 1
        elif code == 0x4B:  # BININT1
            push(data[at])
            at += 1
        elif code == 0x4A:  # BININT
            push(_INT.unpack_from(data, at)[0])
            at += 4
        elif code == 0x28:  # MARK
            if len(marks) >= DEPTH_MAX:
                raise UnsafePickle("nested too deeply")
            marks.append(len(stack))
        elif code == 0x65:  # APPENDS
            first = _first(marks)
            _a_list(stack[first - 1]).extend(stack[first:])
            del stack[first:]
        elif code == 0x75:  # SETITEMS
            first = _first(marks)
            _set(stack[first - 1], stack[first::2], stack[first + 1 :: 2])
            del stack[first:]
        elif code in (0x5D, 0x7D):  # EMPTY_LIST, EMPTY_DICT
            num_containers = _counted(num_containers)
            push([] if code == 0x5D else {})
        elif code in _CONSTANTS:
            push(_CONSTANTS[code])
        elif code == 0x8A:  # LONG1
            size = data[at]
            if size > 8:
                raise UnsafePickle("refused: it holds a number of more than 64 bits, which no dump needs")
            push(int.from_bytes(_bytes(data, at + 1, size), "little", signed=True))
            at += 1 + size
        elif code == 0x4D:  # BININT2
            push(_UINT16.unpack_from(data, at)[0])
            at += 2
        elif code in (0x58, 0x8C):  # BINUNICODE, SHORT_BINUNICODE
            width, size = (4, _UINT32.unpack_from(data, at)[0]) if code == 0x58 else (1, data[at])
            push(_bytes(data, at + width, size).decode("utf-8", "surrogatepass"))
            at += width + size
        elif code in (0x71, 0x72, 0x94):  # BINPUT, LONG_BINPUT, MEMOIZE
            width = 1 if code == 0x71 else 4 if code == 0x72 else 0
            key = int.from_bytes(_bytes(data, at, width), "little") if width else len(memo)
            if len(memo) >= NUM_MEMO_MAX:
                raise UnsafePickle(f"it remembers more than {NUM_MEMO_MAX:,} values")
            memo[key] = stack[-1]
            at += width
        elif code == 0x6A:  # LONG_BINGET
            push(memo[_UINT32.unpack_from(data, at)[0]])
            at += 4
        elif code in (0x29, 0x85, 0x86, 0x87):  # EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3
            num_containers = _counted(num_containers)
            size = 0 if code == 0x29 else code - 0x84
            if size > len(stack) - (marks[-1] if marks else 0):
                raise IndexError
            items = tuple(stack[len(stack) - size :])
            if not {*map(type, items)} <= _ATOMS:  # hashing or comparing nested tuples can take exponential time
                raise UnsafePickle("refused: it holds a tuple of tuples, lists or dicts, which no dump needs")
            del stack[len(stack) - size :]
            push(items)
        elif code == 0x61:  # APPEND
            value = stack.pop()
            _a_list(stack[-1]).append(value)
        elif code == 0x73:  # SETITEM
            value, name = stack.pop(), stack.pop()
            _set(stack[-1], [name], [value])
        elif code == 0x47:  # BINFLOAT
            push(_FLOAT.unpack_from(data, at)[0])
            at += 8
        elif code == 0x95:  # FRAME: a read-ahead hint
            if _UINT64.unpack_from(data, at)[0] > len(data) - at - 8:
                raise IndexError
            at += 8
        elif code == 0x2E:  # STOP
            if marks or len(stack) != 1:
                raise UnsafePickle("not a readable pickle: it ends inside a value")
            return stack[0], at
        else:
            _refuse(data, at, stack)
    raise UnsafePickle(f"it has more than {NUM_OPCODES_MAX:,} opcodes")


def refuse_beyond(needed_bytes: int, bytes_max: int) -> None:
    """Raises UnsafePickle."""
    if needed_bytes > bytes_max:
        raise UnsafePickle(f"reading it takes more memory than the {bytes_max >> 20:,} MiB that one file may take")


def _first(marks: list[int]) -> int:
    """Stack index of the first item after the newest mark; the container is the item before it."""
    first = marks.pop()
    if first < 1:
        raise IndexError
    return first


def _counted(num_containers: int) -> int:
    if num_containers >= NUM_CONTAINERS_MAX:
        raise UnsafePickle(f"it holds more than {NUM_CONTAINERS_MAX:,} lists and dicts")
    return num_containers + 1


def _bytes(data: bytes, at: int, size: int) -> bytes:
    if size > len(data) - at:
        raise IndexError
    return data[at : at + size]


def _a_list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError("an item is added to a value that is not a list")
    return value


def _set(table: Any, names: list[Any], values: list[Any]) -> None:
    if type(table) is not dict or len(names) != len(values):
        raise TypeError("an item is added to a value that is not a dict")
    if {*map(type, names)} - {str}:
        raise TypeError("a key is not text")
    table.update(zip(names, values, strict=True))


def _refuse(data: bytes, at: int, stack: list[Any]) -> NoReturn:
    """Raises UnsafePickle naming the opcode before `at`, and the global that it references."""
    name = next((known.name for known in pickletools.opcodes if known.code == chr(data[at - 1])), "")
    if not name:
        raise UnsafePickle(f"damaged at byte {at - 1:,}, or cut short")
    if name in ("GLOBAL", "INST", "STACK_GLOBAL"):
        lines = [line.decode("utf-8", "replace") for line in data[at : at + 1000].split(b"\n")[:2]]
        wanted = [str(s) for s in stack[-2:] if type(s) is str] if name == "STACK_GLOBAL" else lines
        raise UnsafePickle(f"refused: it tries to run {safe('.'.join(wanted))}, which no dump needs")
    raise UnsafePickle(f"refused: it holds a {name}, which no dump needs")
