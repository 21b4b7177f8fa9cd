"""Layout of the state page: 4096 bytes that one process writes about itself and its node's agent reads.

The page is an array of 8-byte words (native byte order: writer and reader share a machine) followed by text areas.
Everything but `BEATS` is under a sequence lock: `SEQUENCE` is odd during a write, and grows with each.
Only the ticker thread writes `BEATS`. Standard library only: training processes import this.
"""

import hashlib
import hmac
import struct

PAGE_BYTES = 4096
PAGE_MODE = 0o640
"""The agent may run as another user of the job's group."""
MAGIC = b"ROLECALL"
LAYOUT_VERSION = 1
"""Grows when a word or area moves; a reader refuses a version it does not know."""

# Words: signed integers, or floats where it says so.
W_MAGIC = 0
W_LAYOUT = 1
W_SEQUENCE = 2
W_BEATS = 3
W_PID = 4
W_START_TICKS = 5
W_RANK = 6
W_INCARNATION = 7
W_WORK_TID = 8  # native id of the thread that reports progress
W_EPOCH = 9
W_PHASE_SINCE = 10  # float
W_PHASE_ENTRIES = 11
W_STEP = 12
W_POLICY_VERSION = 13
W_PROGRESS = 14
W_PROGRESS_AT = 15  # float
W_COLLECTIVES_ENTERED = 16
W_COLLECTIVES_DONE = 17
W_BUSY_SECONDS = 18  # float
W_WORK_UNITS = 19
W_TOKENS = 20
W_REQUESTS_ACTIVE = 21
W_LOSS = 22  # float
W_GRAD_NORM = 23  # float
W_REWARD = 24  # float
W_EXCEPTIONS = 25  # how many exceptions were reported; the text areas hold the last
W_EXCEPTION_STEP = 26
W_EXCEPTION_AT = 27  # float
W_FINISHED = 28  # 1 once the process has announced an intended exit
W_IDENTITIES = 29  # writes of the identity: 1 after start, 2 after a promotion
W_UNFINITE = 30  # how often loss, gradient norm or reward were NaN or infinite
W_JUMPS = 31  # how often one of them jumped (jumps.py)
W_HEALTHS = 32  # reports of policy health; 0: the health words are undefined
W_ENTROPY = 33
W_CLIP_FRACTION_LOW = 34
W_CLIP_FRACTION_HIGH = 35
W_RATIO_MEAN = 36
W_RATIO_MAX = 37
W_KL_SAMPLER = 38
W_RESPONSE_LENGTH = 39
W_TRUNCATED_FRACTION = 40
W_FILTERED_FRACTION = 41
W_LOG_RATIO_MAX = 42
W_EXCHANGES = 43  # how often this rank began to wait for the other ranks of its replica
W_EXCHANGE_SECONDS = 44  # float: waited for them inside units of work
W_TOKENS_HELD = 45  # rollout: tokens of the requests that it holds
W_LOADING_SECONDS = 46  # float: of the busy seconds, those in which a job loaded data
W_COLLECTIVES_ISSUED = 47  # of the job's default process group, by torch's count; -1: unknown
W_COLLECTIVES_AT_STEP = 48  # the same at the end of the last step
W_COLLECTIVES_AT_BEGIN = 49  # the same at the beginning of the next one; -1: not begun
W_UNCAUGHT = 50  # 1: the last exception ends this process, nothing caught it
NUM_WORDS = 64

HEALTH_WORDS = {
    "entropy": W_ENTROPY,
    "clip_fraction_low": W_CLIP_FRACTION_LOW,
    "clip_fraction_high": W_CLIP_FRACTION_HIGH,
    "ratio_mean": W_RATIO_MEAN,
    "ratio_max": W_RATIO_MAX,
    "kl_sampler": W_KL_SAMPLER,
    "response_length": W_RESPONSE_LENGTH,
    "truncated_fraction": W_TRUNCATED_FRACTION,
    "filtered_fraction": W_FILTERED_FRACTION,
    "log_ratio_max": W_LOG_RATIO_MAX,
}
"""Words of the policy-health metrics, all floats; valid if `W_HEALTHS` is not 0."""

# Text areas: UTF-8, up to the first zero byte. (offset, length in bytes)
A_PHASE = (512, 32)
A_REPLICA = (544, 96)
A_PROOF = (640, 64)  # identity_proof() in hex
A_FINISH_REASON = (704, 256)
A_EXCEPTION_FINGERPRINT = (960, 64)
A_EXCEPTION_TYPE = (1024, 256)
A_EXCEPTION_WHERE = (1280, 512)
A_EXCEPTION_MESSAGE = (1792, 2000)  # 500 characters of up to 4 bytes

EXCEPTION_TEXTS = struct.Struct("64s256s512s2000s")
"""The four texts of an exception, which follow each other from A_EXCEPTION_FINGERPRINT on."""

INTERPRETER_ENDED = "the interpreter ended"
"""Reason of a finish that nobody announced: no exception went uncaught, but the exit code may still tell of a fault."""

UNCAUGHT = "uncaught"
"""Detail of an exception that nothing caught: it ends the process."""

MESSAGE_CHARACTERS_MAX = 500


def padded(text: str, length: int) -> bytes:
    """`text` as exactly `length` bytes, truncated at a character boundary."""
    raw = text.encode("utf-8", "replace")
    if len(raw) > length:
        raw = raw[:length].decode("utf-8", "ignore").encode("utf-8")
    return raw.ljust(length, b"\0")


def fitting(text: str, length: int) -> bytes:
    """`text` in at most `length` bytes, truncated at a character boundary."""
    raw = text.encode("utf-8", "replace")
    return raw if len(raw) <= length else padded(text, length)


def text_of(raw: bytes) -> str:
    """The text in an area; damaged bytes are replaced, never an error."""
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")


def identity_proof(secret: str, *, replica: str, rank: int, incarnation: int, pid: int, start_ticks: int) -> str:
    """HMAC-SHA256 in hex, written on the page: requires the secret issued for this rank and incarnation."""
    text = f"page:{replica}:{rank}#{incarnation}@{pid}:{start_ticks}"
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def page_name(pid: int, start_ticks: int) -> str:
    return f"{pid}-{start_ticks}.page"
