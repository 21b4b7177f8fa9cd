"""Base of all sections of a job file (frozen, finite, unknown keys are rejected), and types of several of them."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


PositiveInt = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Ratio = Annotated[float, Field(ge=0, le=1)]
RecoveryMode = Literal["observe", "approve", "act"]
