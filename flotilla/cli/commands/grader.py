"""``flotilla grader check``: a conformance run against a grader behind a URL."""

import argparse
import os
from dataclasses import asdict

from pydantic import ValidationError

from flotilla.cli.output import new_console, table_of, write_json
from flotilla.grader_check import GraderCheck, Outcome
from flotilla.shared.config.sections.reward import RemoteConfig
from flotilla.shared.errors import InvalidRequest


async def check(arguments: argparse.Namespace) -> int:
    """Ask a grader as a reward service does; 1 if an answer of it is wrong."""
    try:
        RemoteConfig(url=arguments.url)
    except ValidationError as error:
        raise InvalidRequest(f"{arguments.url}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    run = GraderCheck(arguments.url, arguments.dialect, _secret(arguments.secret_env), arguments.timeout)
    try:
        findings = await run.run()
    finally:
        await run.close()
    is_right = all(each.outcome is not Outcome.WRONG for each in findings)
    if arguments.json:
        write_json({"url": arguments.url, "is_right": is_right, "checks": [asdict(each) for each in findings]})
        return 0 if is_right else 1
    console = new_console()
    rows = [(each.check, each.outcome, each.found) for each in findings]
    console.print(table_of(("", "outcome", "found"), rows))
    for each in findings:
        if each.advice:
            console.print(f"{each.check}: {each.advice}", markup=False)
    console.print("this grader can be used" if is_right else "this grader cannot be used until what is wrong is right")
    return 0 if is_right else 1


def _secret(name: str | None) -> str | None:
    if name is None:
        return None
    secret = os.environ.get(name)
    if not secret:
        raise InvalidRequest(f"the environment variable {name} (--secret-env) is not set")
    return secret
