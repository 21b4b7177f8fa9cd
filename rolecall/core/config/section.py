"""Base of all sections of a job file (frozen, finite, unknown keys are rejected), and types of several of them."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer

from rolecall.core.journal.database import checked_url, redacted


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


PositiveInt = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Ratio = Annotated[float, Field(ge=0, le=1)]
RecoveryMode = Literal["observe", "approve", "act"]
JournalUrl = Annotated[
    str | None,
    AfterValidator(lambda url: None if url is None else checked_url(url)),
    # For run.json and the report; `RunDir.database_path` has the whole URL.
    PlainSerializer(lambda url: None if url is None else redacted(url)),
]
"""Location of a journal; its password is not dumped."""
