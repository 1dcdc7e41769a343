"""Which fields of a record are written again: those that are not the same, which is more than those that differ."""

from dataclasses import replace
from typing import Any

import pytest

from flotilla.services.gateway.store.statements import row_of
from tests.unit.gateway.builders import a_record


@pytest.mark.parametrize(("before", "after"), [(1, True), (1, 1.0), (0, False), (0.0, 0)])
def test_a_value_of_another_type_in_a_document_is_written(before: Any, after: Any) -> None:
    old = replace(a_record(), spec={"tracking": {"a": [before]}})
    new = replace(old, spec={"tracking": {"a": [after]}})

    assert list(row_of(new, since=old)) == ["spec"]
    assert repr(row_of(new, since=old)["spec"]["tracking"]["a"]) == repr([after])


def test_only_what_was_replaced_is_written() -> None:
    old = a_record()

    assert row_of(replace(old, step=old.step), since=old) == {}
    assert row_of(replace(old, step=old.step + 1), since=old) == {"step": old.step + 1}
    assert row_of(replace(old, name="".join(old.name)), since=old) == {}, "plain values are compared"
