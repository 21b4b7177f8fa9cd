"""Ports as sysfs shows them, written where a test wants them."""

from collections.abc import Mapping
from pathlib import Path


def port(
    root: Path,
    nic: str = "mlx5_0",
    *,
    state: str = "4: ACTIVE",
    phys_state: str = "5: LinkUp",
    rate: str = "400 Gb/sec (4X NDR)",
    link_layer: str = "InfiniBand",
    counters: Mapping[str, int | str] | None = None,
    hw_counters: Mapping[str, int | str] | None = None,
) -> Path:
    """A port's files, written anew; counters that are not named stay as they are."""
    folder = root / nic / "ports" / "1"
    files: dict[str, int | str] = {"state": state, "phys_state": phys_state, "rate": rate, "link_layer": link_layer}
    files |= {f"counters/{k}": v for k, v in (counters or {}).items()}
    files |= {f"hw_counters/{k}": v for k, v in (hw_counters or {}).items()}
    for name, value in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{value}\n")
    return folder
