"""What the table says of specs is true: what it calls refused is refused by name, and all else is not."""

from itertools import product

import pytest

from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.errors import InvalidSpec
from tests.pairs.covering import Case, Row
from tests.pairs.documents import BASE, changes_of, document_of
from tests.pairs.keys import APART, SECTIONS, is_named, keys_of_table, leaves
from tests.pairs.table import FLEET, FLEET_STATES, TRAINER, TRAINER_REFUSED, TRAINER_STATES

DEFAULTS: Row = {name: next(iter(values)) for name, values in TRAINER.items()}


def refusal_of(cases: frozenset[Case]) -> str | None:
    """Say why a spec with these values, and otherwise the first of each option, is refused; None where it is not."""
    try:
        validate_spec(document_of(BASE, changes_of(DEFAULTS | dict(cases), TRAINER)))
    except InvalidSpec as refusal:
        return str(refusal)
    return None


@pytest.mark.parametrize("pair", TRAINER_REFUSED, ids=lambda pair: " ".join(map(" ".join, sorted(pair))))
def test_a_refused_pair_is_refused_with_both_names(pair: frozenset[Case]) -> None:
    refusal = refusal_of(pair)

    assert refusal is not None
    assert all(name in refusal for name in TRAINER_REFUSED[pair])


@pytest.mark.parametrize("option", TRAINER)
def test_pairs_that_are_not_listed_as_refused_are_allowed(option: str) -> None:
    others = [(name, value) for name in TRAINER if name != option for value in TRAINER[name]]
    pairs = [frozenset({(option, own), other}) for own, other in product(TRAINER[option], others)]

    refused = {pair: found for pair in pairs if (found := refusal_of(pair)) is not None}

    assert {pair: found for pair, found in refused.items() if pair not in TRAINER_REFUSED} == {}


@pytest.mark.parametrize(
    "cases",
    [
        {("job", "sft"), ("average", "kept"), ("contents", "weights")},
        {("job", "preference"), ("average", "kept"), ("contents", "weights")},
    ],
    ids=["sft", "preference"],
)
def test_what_is_refused_of_sampled_answers_is_refused_of_finished_ones(cases: set[Case]) -> None:
    assert "optimisation.average_decay has no effect while checkpoint.contents" in (refusal_of(frozenset(cases)) or "")


def test_every_option_touches_some_state() -> None:
    assert {name for names in TRAINER_STATES.values() for name in names} == set(TRAINER)
    assert {name for names in FLEET_STATES.values() for name in names} == set(FLEET)


def test_every_key_is_in_a_row_or_listed_as_touching_no_shared_state() -> None:
    apart = frozenset(key for keys in APART.values() for key in keys)
    keys = {key for key in leaves() if key.partition(".")[0] in SECTIONS}

    assert {key for key in keys if not is_named(key, apart | keys_of_table())} == set()


def test_what_is_listed_as_touching_no_shared_state_exists_and_is_in_no_row() -> None:
    apart = {key for keys in APART.values() for key in keys}
    keys = list(leaves())

    assert {name for name in apart if not any(is_named(key, frozenset({name})) for key in keys)} == set()
    assert {name for name in apart if name in keys_of_table()} == set()


def test_a_key_that_is_new_is_missed() -> None:
    apart = frozenset(key for keys in APART.values() for key in keys)

    assert not is_named("optimisation.new_key", apart | keys_of_table())
    assert not is_named("checkpoint.new_key", apart | keys_of_table())
