"""The bases of all that goes over the wire: frozen models whose attributes' docstrings describe them."""

from pydantic import ConfigDict

from flotilla.shared.schemas.described import Described


class Wire(Described):
    """A body between processes of one fleet, which run the same version: unknown keys are refused."""

    # JSON knows no infinities: what Python's reader lets in nobody could be answered.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class TolerantWire(Wire):
    """A message to or from somebody else's program: unknown fields are ignored, so that fields can be added."""

    model_config = ConfigDict(extra="ignore")
