"""`make install` installs what requirements.lock names: each package that pyproject.toml asks for, with hashes."""

import re
import tomllib
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LEFT_TO_CONSTRAINTS = {"torch"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, tuple[str, int]]:
    """Version and number of hashes of each package, as far as this machine installs it."""
    found: dict[str, tuple[str, int]] = {}
    text = (ROOT / "requirements.lock").read_text().replace("\\\n", " ")
    for line in filter(None, (line.partition("#")[0].strip() for line in text.splitlines())):
        requirement = Requirement(line.partition("--hash")[0].strip())
        if requirement.marker is None or requirement.marker.evaluate({**default_environment(), "extra": ""}):
            (pin,) = requirement.specifier
            assert pin.operator == "==", line
            found[normal(requirement.name)] = pin.version, line.count("--hash=sha256:")
    return found


def asked_for() -> list[Requirement]:
    """What pyproject.toml asks for, extras of our own resolved."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found, to_do = list(project["dependencies"]), ["dev"]
    while to_do:
        for text in extras[to_do.pop()]:
            requirement = Requirement(text)
            if requirement.name == project["name"]:
                to_do += sorted(requirement.extras)
            else:
                found.append(text)
    return [Requirement(text) for text in found]


def test_everything_that_is_asked_for_is_locked_at_a_version_that_fits() -> None:
    versions = locked()

    for requirement in asked_for():
        if requirement.name not in LEFT_TO_CONSTRAINTS:
            version, _ = versions[normal(requirement.name)]
            assert requirement.specifier.contains(version), f"{requirement} is locked at {version}: make lock"


def test_every_locked_package_has_hashes_and_none_is_named_by_address() -> None:
    text = (ROOT / "requirements.lock").read_text()

    assert all(hashes for _, hashes in locked().values())
    assert "://" not in text
    assert "--index" not in text
