"""Links from a value to the dashboard of its role, replica or node, with the same time range and run."""

from rolecall.dashboards.grafana.board import GPUS, NETWORK, REPLICA, ROLES, to
from rolecall.dashboards.grafana.panels import Link

# Series links use `__field.labels`, table links `__data.fields`.
SERIES_TO_ROLE = Link(title="This role", url=to(ROLES, "var-role=${__field.labels.role}"))
SERIES_TO_REPLICA = Link(
    title="Compare this replica with its peers",
    url=to(REPLICA, "var-role=${__field.labels.role}", "var-replica=${__field.labels.replica}"),
)
ROW_TO_REPLICA = Link(
    title="Compare this replica with its peers",
    url=to(REPLICA, "var-role=${__data.fields.role}", "var-replica=${__data.fields.replica}"),
)
ROW_TO_GPUS = Link(title="GPUs of its node", url=to(GPUS, "var-node=${__data.fields.node}"))
ROW_TO_NETWORK = Link(title="Network of its node", url=to(NETWORK, "var-node=${__data.fields.node}"))


def incidents(address: str) -> tuple[Link, ...]:
    """Link to the Incidents page of `rolecall dashboard`, if its address is known."""
    return (Link(title="Incidents of this run", url=address.rstrip("/") + "/incidents"),) if address else ()
