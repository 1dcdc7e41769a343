"""What a process is told of certificates, and what it says where it is told wrong."""

from pathlib import Path

import pytest

from flotilla.shared.environment.tls import Tls, tls_from
from flotilla.shared.errors import InvalidRequest


def test_without_a_word_nothing_is_encrypted() -> None:
    assert tls_from({}) == Tls()
    assert tls_from({}).scheme == "http"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"FLOTILLA_TLS_CERTIFICATE": "{file}"}, "FLOTILLA_TLS_CERTIFICATE and FLOTILLA_TLS_KEY go together"),
        ({"FLOTILLA_TLS_CLIENTS": "yes"}, "FLOTILLA_TLS_CLIENTS must be optional or required, got 'yes'"),
        ({"FLOTILLA_TLS_CLIENTS": "required", "FLOTILLA_TLS_CA": "{file}"}, "required needs FLOTILLA_TLS_CERTIFICATE"),
        ({"FLOTILLA_TLS_CA": "{file}-absent"}, r"absent \(FLOTILLA_TLS_CA\) is no file"),
        ({"FLOTILLA_TLS_CA": "{file}"}, r"no certificate with its key, in PEM, is in .*\(FLOTILLA_TLS_CA\)"),
    ],
)
def test_what_is_no_certificate_is_named(values: dict[str, str], said: str, tmp_path: Path) -> None:
    file = tmp_path / "file.pem"
    file.write_text("no certificate")

    with pytest.raises(InvalidRequest, match=said):
        tls_from({name: value.replace("{file}", str(file)) for name, value in values.items()})
