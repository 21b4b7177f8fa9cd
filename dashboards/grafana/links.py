"""Links from a value to where it is explained: overview, role, replica, node, each with the time and the run as they are."""

from rolecall.dashboards.grafana.board import GPUS, NETWORK, REPLICA, ROLES, to
from rolecall.dashboards.grafana.panels import Link

# Of a series: `__field.labels`. Of a row of a table: `__data.fields`.
SERIES_TO_ROLE = Link(title="This role", url=to(ROLES, "var-role=${__field.labels.role}"))
SERIES_TO_REPLICA = Link(
    title="This replica against its peers",
    url=to(REPLICA, "var-role=${__field.labels.role}", "var-replica=${__field.labels.replica}"),
)
ROW_TO_REPLICA = Link(
    title="This replica against its peers",
    url=to(REPLICA, "var-role=${__data.fields.role}", "var-replica=${__data.fields.replica}"),
)
ROW_TO_GPUS = Link(title="GPUs of its node", url=to(GPUS, "var-node=${__data.fields.node}"))
ROW_TO_NETWORK = Link(title="Network of its node", url=to(NETWORK, "var-node=${__data.fields.node}"))


def incidents(address: str) -> tuple[Link, ...]:
    """To the incidents of rolecall's own dashboard, where its address is known."""
    return (Link(title="Incidents of this run", url=address.rstrip("/") + "/incidents"),) if address else ()
