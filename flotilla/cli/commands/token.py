"""``flotilla token create | list | revoke``: access tokens of a fleet."""

import argparse

from flotilla.cli.gateway import open_gateway
from flotilla.cli.output import new_console, table_of, write_json
from flotilla.shared.net.authorisation.token_records import TokenView

COLUMNS = ("id", "name", "scope", "owner", "for", "created", "by", "expires")


async def create(arguments: argparse.Namespace) -> int:
    """Make a token and print it, this once."""
    async with open_gateway(arguments) as client:
        made = await client.create_token(
            arguments.name,
            arguments.scope,
            kind=arguments.kind,
            experiment_id=arguments.experiment,
            expires_in_seconds=arguments.expires,
            owner=arguments.owner,
        )
    if arguments.json:
        write_json(made.model_dump(mode="json"))
        return 0
    until = f"until {_time(made.expires_at)}" if made.expires_at else "and does not expire"
    console = new_console()
    console.print(f"{made.name} ({made.id}) has the scope {made.scope} {until}; it is shown this once:", markup=False)
    console.print(made.token, markup=False)
    return 0


async def list_tokens(arguments: argparse.Namespace) -> int:
    """List the tokens that were made and not revoked."""
    async with open_gateway(arguments) as client:
        found = await client.tokens()
    if arguments.json:
        write_json([view.model_dump(mode="json") for view in found])
    elif found:
        new_console().print(table_of(COLUMNS, [_row(view) for view in found], whole=("id", "name")))
    else:
        new_console().print("no token was made: there is only the operator's own")
    return 0


async def revoke(arguments: argparse.Namespace) -> int:
    """Revoke a token: its next request is refused."""
    async with open_gateway(arguments) as client:
        await client.revoke_token(arguments.token)
    if arguments.json:
        write_json({"revoked": arguments.token})
    else:
        new_console().print(f"{arguments.token} is revoked", markup=False)
    return 0


def _row(view: TokenView) -> dict[str, str]:
    return {
        "id": view.id,
        "name": view.name,
        "scope": str(view.scope),
        "owner": view.owner or "",
        "for": " ".join(str(each) for each in (view.kind, view.experiment_id, view.subject) if each),
        "created": _time(view.created_at),
        "by": view.created_by,
        "expires": ("expired " if view.is_expired else "") + (_time(view.expires_at) if view.expires_at else "never"),
    }


def _time(text: str) -> str:
    return text[:16].replace("T", " ")
