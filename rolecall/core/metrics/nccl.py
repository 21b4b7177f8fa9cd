"""Rows of the metric catalogue: NCCL: RAS and Inspector.

The label `communicator` is NCCL's hash of it, and is given to a limited number of communicators at a time.
"""

from rolecall.core.metrics.metric import NODE, Metric, MetricScope, row


def _nccl(name: str, help_: str) -> Metric:
    return row(MetricScope.NCCL, NODE, f"nccl_{name}", help_)


RAS_UP = _nccl("ras_up", "1 if a process of this node answered as NCCL RAS, 0 if none listens (no job) or it fails")
RAS_ANSWERS = _nccl("ras_answers_total", "Answers of RAS that could be read")
RAS_BAD = _nccl("ras_answers_bad_total", "Queries to RAS without a readable answer")
RAS_REPAIRED = _nccl("ras_answers_repaired_total", "Answers of RAS whose JSON had to be repaired")
RAS_EMPTY = _nccl("ras_answers_without_counts_total", "Answers of RAS in which all counts are 0: not used")
COMMUNICATORS = _nccl("communicators", "Communicators of the whole job, as known to RAS")
RANKS = _nccl("communicator_ranks{communicator}", "Ranks that the communicator has")
MISSING = _nccl("communicator_missing_ranks{communicator}", "Ranks that RAS could not reach")
DEAD = _nccl("communicator_dead_ranks{communicator}", "Ranks that RAS considers dead")
LAUNCHED = _nccl(
    "communicator_collectives_launched_total{communicator,collective}",
    "Collectives launched by the rank that launched most",
)
BEHIND = _nccl(
    "communicator_collectives_behind{communicator}", "Collectives by which the last rank is behind the first"
)
SUSPICIOUS = _nccl(
    "communicator_suspicious{communicator}", "1 if the ranks have diverged without progress for the confirmation time"
)
OPERATIONS = _nccl("inspector_operations_total{collective}", "Finished operations that the Inspector recorded")
EXECUTION = _nccl("inspector_seconds_total{collective}", "Execution time of these operations")
MESSAGE_BYTES = _nccl("inspector_message_bytes_total{collective}", "Message sizes of these operations")
BUS_BYTES = _nccl(
    "inspector_bus_bytes_total{collective}",
    "Bus bandwidth times execution time; by the time it is the mean bus bandwidth in bytes a second",
)
LINES = _nccl("inspector_lines_total", "Lines of the Inspector's files that were read")
LINES_BAD = _nccl("inspector_lines_bad_total", "Lines that were truncated or malformed")
SKIPPED = _nccl("inspector_skipped_bytes_total", "Bytes skipped because files grew faster than they are read")
DROPPED = _nccl("inspector_dropped_total", "Operations that the Inspector reports as dropped")
BUSY_GPU = _nccl(
    "inspector_bus_bandwidth_bytes{gpu,collective}",
    "Bus bandwidth in bytes a second, of the Inspector's text file; the lowest of a GPU's communicators and sizes",
)
TIME_GPU = _nccl(
    "inspector_execution_seconds{gpu,collective}",
    "Mean execution time, of the Inspector's text file; the longest of a GPU's communicators and sizes",
)

NCCL_METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""Every row above, in order."""
