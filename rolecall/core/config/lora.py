"""Section `lora` of a job file: adapters are trained in place of the whole model."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rolecall.core.config.section import Section

ALL_LINEAR = "all-linear"


class LoraSettings(Section):
    """Low-rank adapters (arXiv 2106.09685) of the model folder's linear layers, through `peft`. A merged layer's weight
    is W + alpha / rank * B A; W stays as it is. There is no dropout, because replicas must compute the same numbers."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rows of A and columns of B."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of the adapters: their product counts alpha / rank times."""
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Last parts of the names of linear layers, such as q_proj and v_proj. all-linear: all but the output layer."""

    @field_validator("target_modules", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        """One reason, where pydantic would give one for each of the two types."""
        if value == ALL_LINEAR or (
            isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value)
        ):
            return value
        raise ValueError(f"expected {ALL_LINEAR}, or a list of names such as [q_proj, v_proj]")
