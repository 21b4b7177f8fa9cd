"""What the tests of dashboards share."""

from tests.dashboards.prometheus_of_demo import demo_prometheus

__all__ = ["demo_prometheus"]
