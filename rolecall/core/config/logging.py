"""Section `logging` of a job file: where the run's metrics go beside its journal."""

from typing import Any

from pydantic import model_validator

from rolecall.core.config.section import Section


class WandbConfig(Section):
    """Weights & Biases. Its own environment variables (`WANDB_API_KEY`, `WANDB_MODE=offline`) apply."""

    project: str
    """Project that the run is added to."""
    entity: str | None = None
    """User or team. null: the default one of the API key."""


class MlflowConfig(Section):
    tracking_uri: str | None = None
    """Server, or file: store. null: MLflow's own default, or `MLFLOW_TRACKING_URI`."""
    experiment: str = "rolecall"
    """Experiment that the run is added to; created if it does not exist."""


class LoggingConfig(Section):
    """Metrics of steps and evaluations for other tools. They are read from the journal by a process of their own, which
    cannot delay or end the run."""

    tensorboard: bool = False
    """Write event files to `tensorboard/` in the run's directory."""
    wandb: WandbConfig | None = None
    """Log to Weights & Biases."""
    mlflow: MlflowConfig | None = None
    """Log to MLflow."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tools in use; each is also the name of its Python package."""
        return tuple(name for name in ("tensorboard", "wandb", "mlflow") if getattr(self, name))

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        return {} if value is None else value
