"""``flotilla certs``: an authority for a fleet, and a certificate for each of its hosts, made with openssl."""

import argparse
import asyncio
import shutil
import subprocess
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from flotilla.cli.output import new_console
from flotilla.shared.environment.tls import AUTHORITY, CERTIFICATE, KEY
from flotilla.shared.errors import InvalidRequest, Unavailable

AUTHORITY_DAYS = 3650
CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


async def certs(arguments: argparse.Namespace) -> int:
    """Make what is not there yet of the authority, and a certificate for each host.

    Raises:
        InvalidRequest: a host is neither a name nor an address, or one of the authority's files is missing.
        Unavailable: there is no openssl, or it fails.
    """
    console = new_console()
    hosts = [_names(host) for host in arguments.hosts]
    if shutil.which("openssl") is None:
        raise Unavailable("openssl is not on the PATH: install it, or give certificates of an authority that you have")
    for line in await asyncio.to_thread(_make, Path(arguments.folder), hosts, arguments.days):
        console.print(line, markup=False)
    console.print(f"on each host {CERTIFICATE}=HOST.pem {KEY}=HOST.key {AUTHORITY}=ca.pem", markup=False)
    return 0


def _make(folder: Path, hosts: Sequence[Sequence[str]], days: int) -> list[str]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority, key = folder / "ca.pem", folder / "ca.key"
    if not authority.exists() and not key.exists():
        _make_authority(authority, key)
    # Another authority in the place of one that hosts believe would end the trust in every certificate that it signed.
    for path in (authority, key):
        if not path.exists():
            raise InvalidRequest(f"{path} is not there, and the other file of the authority is: bring it back")
    made = [f"authority    {authority} (its key, {key}, stays here)"]
    for names in hosts:
        certificate = folder / f"{names[0].replace(':', '-')}.pem"
        _make_certificate(certificate, names, authority, key, days=days)
        made.append(f"certificate  {certificate} for {', '.join(names)}")
    return made


def _names(host: str) -> list[str]:
    names = [each for each in host.split(",") if each]
    for name in names:
        if not name.isascii() or not all(letter.isalnum() or letter in ".-:*" for letter in name):
            raise InvalidRequest(f"{name!r} is no name or address of a host")
    if not names or names[0] == "ca":
        raise InvalidRequest(f"{host!r} is no name or address of a host" if not names else "ca.pem is the authority's")
    return names


def _make_authority(authority: Path, key: Path) -> None:
    extensions = ("basicConstraints=critical,CA:TRUE,pathlen:0", "keyUsage=critical,keyCertSign,cRLSign")
    command = ["req", "-x509", *CURVE, "-subj", "/O=Flotilla/CN=Flotilla fleet authority", "-days", str(AUTHORITY_DAYS)]
    for each in extensions:
        command += ["-addext", each]
    _openssl([*command, "-keyout", str(key), "-out", str(authority)])
    key.chmod(0o600)


def _make_certificate(certificate: Path, names: Sequence[str], authority: Path, key: Path, *, days: int) -> None:
    # Not by suffix alone: an address has dots.
    own_key, request, extensions = (Path(f"{str(certificate)[:-4]}{end}") for end in (".key", ".csr", ".ext"))
    alternatives = ",".join(f"{_kind(name)}:{name}" for name in names)
    extensions.write_text(
        "basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n"
        "extendedKeyUsage=serverAuth,clientAuth\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
        f"subjectAltName={alternatives}\n",
        encoding="ascii",
    )
    try:
        asking = ["req", "-new", *CURVE, "-subj", f"/O=Flotilla/CN={names[0][:64]}"]
        _openssl([*asking, "-keyout", str(own_key), "-out", str(request)])
        own_key.chmod(0o600)
        signing = ["x509", "-req", "-in", str(request), "-CA", str(authority), "-CAkey", str(key), "-CAcreateserial"]
        _openssl([*signing, "-days", str(days), "-extfile", str(extensions), "-out", str(certificate)])
    finally:
        request.unlink(missing_ok=True)
        extensions.unlink(missing_ok=True)


def _kind(name: str) -> str:
    try:
        ip_address(name)
    except ValueError:
        return "DNS"
    return "IP"


def _openssl(arguments: Sequence[str]) -> None:
    command = ("openssl", *arguments)
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise Unavailable(f"openssl {arguments[0]} failed: {result.stderr.strip()[-300:]}")
