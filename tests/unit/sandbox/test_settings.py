"""What a sandbox is told at its start: by variables, the provider's key by a file too, and nothing without effect."""

from pathlib import Path

import pytest

from flotilla.services.sandbox.__main__ import sandbox_settings
from flotilla.services.sandbox.providers import opening
from flotilla.services.sandbox.settings import SandboxSettings
from flotilla.shared.environment.secret_variables import without_secrets
from flotilla.shared.errors import InvalidRequest

TOKEN = "a token that is long enough"


def settings(**environment: str) -> SandboxSettings:
    return sandbox_settings(TOKEN, {f"FLOTILLA_SANDBOX_{name.upper()}": text for name, text in environment.items()})


def test_a_provider_and_its_key_are_read_and_the_key_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("of-an-account\n")

    found = settings(provider="e2b", key_file=str(file), images="swebench/*, python:*", warm="3", image="base")

    assert found.key is not None
    assert found.key.get_secret_value() == "of-an-account"
    assert "of-an-account" not in repr(found)
    assert (found.images, found.warm, found.image) == (("swebench/*", "python:*"), 3, "base")


def test_numbers_and_switches_are_read_of_text() -> None:
    found = settings(concurrency="7", busy_part="0.5", provider="local")
    boxes = settings(provider="docker", box_network="true", box_start_seconds="5", warm="0")

    assert (found.concurrency, found.busy_part) == (7, 0.5)
    assert (boxes.box_network, boxes.box_start_seconds, boxes.warm) == (True, 5.0, 0)


def test_children_do_not_get_the_key() -> None:
    given = {"FLOTILLA_SANDBOX_KEY": "k", "FLOTILLA_SANDBOX_KEY_FILE": "f", "PATH": "/bin"}

    assert without_secrets(given) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"provider": "elsewhere"}, "FLOTILLA_SANDBOX_PROVIDER: Input should be 'local', 'docker'"),
        ({"concurrency": "many"}, "FLOTILLA_SANDBOX_CONCURRENCY: "),
        ({"provider": "docker", "box_network": "perhaps"}, "FLOTILLA_SANDBOX_BOX_NETWORK: "),
        ({"image": "x"}, "FLOTILLA_SANDBOX_IMAGE has no effect where FLOTILLA_SANDBOX_PROVIDER is local"),
        ({"provider": "docker", "level": "A"}, "FLOTILLA_SANDBOX_LEVEL has no effect"),
        ({"provider": "docker", "key": "k"}, "FLOTILLA_SANDBOX_KEY has no effect"),
        ({"provider": "e2b", "runtime": "runsc"}, "FLOTILLA_SANDBOX_RUNTIME has no effect"),
        ({"provider": "modal", "key": "a:b", "namespace": "n"}, "FLOTILLA_SANDBOX_NAMESPACE has no effect"),
        ({"provider": "docker", "url": "ftp://x"}, "FLOTILLA_SANDBOX_URL: String should match"),
        ({"key_file": "/nowhere/key"}, "FLOTILLA_SANDBOX_KEY_FILE"),
    ],
)
def test_what_is_wrong_or_has_no_effect_is_refused_by_its_variable(environment: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        settings(**environment)

    assert words in refused.value.detail


@pytest.mark.parametrize(
    ("environment", "is_installed", "words"),
    [
        ({"key": "a:b"}, False, "pip install 'flotilla[modal]'"),
        ({}, True, "FLOTILLA_SANDBOX_KEY"),
        ({"key": "only-one"}, True, "the id and the secret of a token, ID:SECRET"),
        ({"key": "a:"}, True, "the id and the secret of a token, ID:SECRET"),
        ({"key": "a:b", "url": "tcp://host:1"}, True, "begins with http:// or https://, not 'tcp://host:1'"),
    ],
)
def test_modal_is_refused_by_what_it_lacks(
    environment: dict[str, str], is_installed: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "has_modal", lambda: is_installed)

    with pytest.raises(InvalidRequest) as refused:
        opening.open_provider(settings(provider="modal", **environment), "me")

    assert words in refused.value.detail
    assert "only-one" not in refused.value.detail
