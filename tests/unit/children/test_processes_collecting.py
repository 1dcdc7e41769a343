import gc

from flotilla.shared.children.processes import collecting_later


def test_nothing_is_collected_while_modules_are_imported_and_they_are_not_looked_at_afterwards() -> None:
    before = gc.get_freeze_count()

    with collecting_later():
        while_importing = gc.isenabled()
        imported = [[] for _ in range(1000)]  # type: ignore[var-annotated]
    frozen = gc.get_freeze_count() - before
    gc.unfreeze()

    assert not while_importing
    assert gc.isenabled()
    assert frozen >= len(imported)
