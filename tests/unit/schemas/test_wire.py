"""Docstrings under fields: in the schema, and nowhere before."""

from pydantic import Field

from flotilla.shared.schemas.wire import Described, descriptions_of


class Parent(Described):
    """What is inherited."""

    kept: int = 1
    """Described by the parent,
    on two lines."""
    changed: int = 2
    """Described by the parent as well."""
    silent: int = 3


class Child(Parent):
    """What changes a default, a description, and adds a section."""

    changed: int = 4
    """Described by the child."""
    silent: int = Field(5, description="Described where it is declared.")
    """Not this."""
    section: Parent = Parent()
    """Described beside the reference."""


class Sibling(Parent):
    """What changes nothing but a default."""

    kept: int = 6


def test_a_schema_has_the_docstrings_of_each_class_nearest_first() -> None:
    properties = Child.model_json_schema()["properties"]

    assert {name: found["description"] for name, found in properties.items()} == {
        "kept": "Described by the parent,\non two lines.",
        "changed": "Described by the child.",
        "silent": "Described where it is declared.",
        "section": "Described beside the reference.",
    }
    assert Sibling.model_json_schema()["properties"]["kept"]["description"] == descriptions_of(Parent)["kept"]


def test_nothing_is_read_as_a_class_is_made() -> None:
    assert Parent.model_fields["kept"].description is None
    assert descriptions_of(type("Made", (Parent,), {})) == descriptions_of(Parent), "a class without source inherits"
