"""What all sections of the schema have in common: they are frozen and strict, they refuse unknown keys, and a key says
whether it may change when a run is continued, and whether its value is a path to read or an id of the Hugging Face hub.
"""

from __future__ import annotations

import typing
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

# `Field(..., json_schema_extra=MAY_CHANGE)`: the key, or the whole section, may differ when a run is continued, because
# it changes nothing of what is learned from a step (another layout: to rounding). All other keys must stay.
MAY_CHANGE: JsonDict = {"may_change": True}
# The value is a file or folder that is read (`loader.py`), or the id of a model (`Qwen/Qwen3-0.6B`), or of a
# dataset or a file in one.
HUB_MODEL: JsonDict = {"input": "model"}
HUB_DATASET: JsonDict = {"input": "dataset"}
LOCAL_INPUT: JsonDict = {"input": "local"}


class Section(BaseModel):
    """A part of a run's configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class UserFunction(Section):
    """A function of yours that takes the place of a built-in part of a run (docs/hooks.md)."""

    function: str = Field(min_length=1, description="package.module:function.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Passed to the function as keyword arguments after its own."
    )


def _named(given: Any) -> Any:
    """Turn a name into the function that it stands for."""
    return {"function": given} if isinstance(given, str) else given


Hook = Annotated[UserFunction, BeforeValidator(_named, json_schema_input_type=str | UserFunction)]
"""A function's name, or its name with options."""


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class inside `X`, `X | None` or `tuple[X, ...]`; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in typing.get_args(annotation) if (found := section_of(inner)) is not None), None)


def input_kind(field: FieldInfo) -> str | None:
    """Return `model` or `dataset` if the key names an input that may be an id of the Hugging Face hub, `local` if it
    names one that may not, else None.
    """
    kind = field.json_schema_extra.get("input") if isinstance(field.json_schema_extra, dict) else None
    return kind if isinstance(kind, str) else None


def may_change(model: type[BaseModel], key: str) -> bool:
    """Return whether the dotted `key` of `model` may differ when a run is continued, because the key or a section
    around it is marked.
    """
    section: type[BaseModel] | None = model
    for part in key.split("."):
        field = None if section is None else section.model_fields.get(part)
        if field is None:
            return False
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("may_change"):
            return True
        section = section_of(field.annotation)
    return False
