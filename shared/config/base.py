"""The base of all configuration: strict, frozen, described by its docstrings."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A frozen section: an unknown key is an error, and field docstrings become the schema's descriptions."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )
