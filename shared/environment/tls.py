"""What a process shows and believes in TLS: its certificate, and the fleet's own authority beside the public ones.

Read where a connection or a server is made, so that a service's child processes agree with it.
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flotilla.shared.errors import InvalidRequest

CERTIFICATE: Final = "FLOTILLA_TLS_CERTIFICATE"
KEY: Final = "FLOTILLA_TLS_KEY"
AUTHORITY: Final = "FLOTILLA_TLS_CA"
CLIENTS: Final = "FLOTILLA_TLS_CLIENTS"


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of one process, all in PEM.

    Attributes:
        certificate: shown to callers, and to servers that ask for one; None: this process serves plain HTTP.
        key: of the certificate.
        authority: what has signed the certificates of the fleet; None: public authorities alone are believed.
        are_clients_checked: whether callers must show a certificate of that authority.
    """

    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None
    are_clients_checked: bool = False

    @property
    def scheme(self) -> str:
        """Of the URLs under which this process is reached."""
        return "http" if self.certificate is None else "https"

    def add_to(self, context: ssl.SSLContext) -> ssl.SSLContext:
        """Let a client believe the authority too, and show the certificate where it is asked for one."""
        if self.authority is not None:
            context.load_verify_locations(self.authority)
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.key)
        return context


def tls_from(values: Mapping[str, str]) -> Tls:
    """Read ``FLOTILLA_TLS_CERTIFICATE``, ``_KEY``, ``_CA`` and ``_CLIENTS``; without them nothing is encrypted.

    Raises:
        InvalidRequest: one goes with another that is not there, or a file is not what it should be.
    """
    clients = values.get(CLIENTS) or "optional"
    if clients not in {"optional", "required"}:
        raise InvalidRequest(f"{CLIENTS} must be optional or required, got {clients!r}")
    certificate, key, authority = (
        Path(values[name]) if values.get(name) else None for name in (CERTIFICATE, KEY, AUTHORITY)
    )
    if (certificate is None) != (key is None):
        raise InvalidRequest(f"{CERTIFICATE} and {KEY} go together: one of them is not set")
    found = Tls(certificate, key, authority, are_clients_checked=clients == "required")
    if found.are_clients_checked and (certificate is None or authority is None):
        raise InvalidRequest(f"{CLIENTS}=required needs {CERTIFICATE}, {KEY} and {AUTHORITY}")
    for name, path in ((CERTIFICATE, certificate), (KEY, key), (AUTHORITY, authority)):
        if path is not None and not path.is_file():
            raise InvalidRequest(f"{path} ({name}) is no file")
    try:
        found.add_to(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    except OSError as error:
        names = ", ".join(
            f"{path} ({name})"
            for name, path in ((CERTIFICATE, certificate), (KEY, key), (AUTHORITY, authority))
            if path
        )
        raise InvalidRequest(f"no certificate with its key, in PEM, is in {names}: {error}") from None
    return found


def why_not_believed(error: BaseException) -> str | None:
    """Return why a server's certificate was refused; None if the error is another one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    return (
        f"its certificate is not believed ({cause.verify_message}): {AUTHORITY} must name the authority that signed it"
    )
