"""Small synthetic panels: independent noise over peers, with what a test plants."""

import numpy as np

from rolecall.detector.panels.panel import Machine, Panel, PanelShape


def noise(
    *,
    machines: int = 8,
    metrics: int = 6,
    ticks: int = 700,
    seed: int = 0,
    interval_seconds: float = 1.0,
    role: str = "trainer",
    names: tuple[str, ...] = (),
) -> Panel:
    """Standard normal values about 10 x the metric's number, one machine a node."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((metrics, ticks, machines), dtype=np.float32)
    values += 10 * np.arange(1, metrics + 1, dtype=np.float32)[:, None, None]
    shape = PanelShape(
        role=role,
        metrics=names or tuple(f"m{i}" for i in range(metrics)),
        machines=tuple(Machine(node=f"n{i:03d}", replica=f"{role}/{i}") for i in range(machines)),
        interval_seconds=interval_seconds,
    )
    return Panel(shape=shape, at=1e9 + interval_seconds * np.arange(ticks, dtype=np.float64), values=values)
