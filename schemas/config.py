"""What all models of a recipe have in common: their base, and the kinds of numbers and texts that they hold."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Probability = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Function = Annotated[str, Field(pattern=r"^.+:[A-Za-z_]\w*$")]
"""`module:function` or `path/to/file.py:function`."""


class Config(BaseModel):
    """Base of every recipe model: frozen, strict about unknown keys, documented by the strings under the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
