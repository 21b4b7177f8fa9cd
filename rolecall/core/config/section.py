"""Base of all sections of a job file (frozen, finite, unknown keys are rejected), and their kinds of numbers."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


PositiveInt = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Ratio = Annotated[float, Field(ge=0, le=1)]
