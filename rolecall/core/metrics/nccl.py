"""Rows of the metric catalogue: NCCL: RAS and Inspector.

The label `communicator` is NCCL's hash of it, and is given to a limited number of communicators at a time.
"""

from rolecall.core.metrics.metric import GPU, NODE, Metric, MetricScope, MetricType

_COMMUNICATOR = (*NODE, "communicator")
_COLLECTIVE = (*NODE, "collective")
_G, _C = MetricType.GAUGE, MetricType.COUNTER


def _nccl(name: str, type_: MetricType, unit: str, help_: str, labels: tuple[str, ...] = NODE) -> Metric:
    return Metric(
        name=f"rolecall_nccl_{name}", type=type_, unit=unit, help=help_, labels=labels, subject=MetricScope.NCCL
    )


RAS_UP = _nccl(
    "ras_up", _G, "", "1 if a process of this node answered as NCCL RAS, 0 if none listens (no job) or it fails"
)
RAS_ANSWERS = _nccl("ras_answers_total", _C, "", "Answers of RAS that could be read")
RAS_BAD = _nccl("ras_answers_bad_total", _C, "", "Queries to RAS without a readable answer")
RAS_REPAIRED = _nccl("ras_answers_repaired_total", _C, "", "Answers of RAS whose JSON had to be repaired")
RAS_EMPTY = _nccl("ras_answers_without_counts_total", _C, "", "Answers of RAS in which all counts are 0: not used")
COMMUNICATORS = _nccl("communicators", _G, "", "Communicators of the whole job, as known to RAS")
RANKS = _nccl("communicator_ranks", _G, "", "Ranks that the communicator has", _COMMUNICATOR)
MISSING = _nccl("communicator_missing_ranks", _G, "", "Ranks that RAS could not reach", _COMMUNICATOR)
DEAD = _nccl("communicator_dead_ranks", _G, "", "Ranks that RAS considers dead", _COMMUNICATOR)
LAUNCHED = _nccl(
    "communicator_collectives_launched_total",
    _C,
    "",
    "Collectives launched by the rank that launched most",
    (*_COMMUNICATOR, "collective"),
)
BEHIND = _nccl(
    "communicator_collectives_behind", _G, "", "Collectives by which the last rank is behind the first", _COMMUNICATOR
)
SUSPICIOUS = _nccl(
    "communicator_suspicious",
    _G,
    "",
    "1 if the ranks have diverged without progress for the confirmation time",
    _COMMUNICATOR,
)

OPERATIONS = _nccl("inspector_operations_total", _C, "", "Finished operations that the Inspector recorded", _COLLECTIVE)
EXECUTION = _nccl("inspector_seconds_total", _C, "seconds", "Execution time of these operations", _COLLECTIVE)
MESSAGE_BYTES = _nccl("inspector_message_bytes_total", _C, "bytes", "Message sizes of these operations", _COLLECTIVE)
BUS_BYTES = _nccl(
    "inspector_bus_bytes_total",
    _C,
    "bytes",
    "Bus bandwidth times execution time; by the time it is the mean bus bandwidth in bytes a second",
    _COLLECTIVE,
)
LINES = _nccl("inspector_lines_total", _C, "", "Lines of the Inspector's files that were read")
LINES_BAD = _nccl("inspector_lines_bad_total", _C, "", "Lines that were truncated or malformed")
SKIPPED = _nccl(
    "inspector_skipped_bytes_total", _C, "bytes", "Bytes skipped because files grew faster than they are read"
)
DROPPED = _nccl("inspector_dropped_total", _C, "", "Operations that the Inspector reports as dropped")
BUSY_GPU = _nccl(
    "inspector_bus_bandwidth_bytes",
    _G,
    "bytes",
    "Bus bandwidth in bytes a second, of the Inspector's text file; the lowest of a GPU's communicators and sizes",
    (*GPU, "collective"),
)
TIME_GPU = _nccl(
    "inspector_execution_seconds",
    _G,
    "seconds",
    "Mean execution time, of the Inspector's text file; the longest of a GPU's communicators and sizes",
    (*GPU, "collective"),
)

NCCL_METRICS: tuple[Metric, ...] = (
    RAS_UP,
    RAS_ANSWERS,
    RAS_BAD,
    RAS_REPAIRED,
    RAS_EMPTY,
    COMMUNICATORS,
    RANKS,
    MISSING,
    DEAD,
    LAUNCHED,
    BEHIND,
    SUSPICIOUS,
    OPERATIONS,
    EXECUTION,
    MESSAGE_BYTES,
    BUS_BYTES,
    LINES,
    LINES_BAD,
    SKIPPED,
    DROPPED,
    BUSY_GPU,
    TIME_GPU,
)
