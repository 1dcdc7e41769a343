"""References say of every route and command what the program says of itself."""

import pytest

from docs.site.references import cli_page, rest_page
from flotilla.cli.command_line import build_parser, leaves


@pytest.fixture(scope="module")
def rest() -> str:
    return rest_page()


def test_a_route_has_scopes_parameters_answers_and_its_own_refusals(rest: str) -> None:
    route = rest.partition("### `GET /v1/experiments/{experiment_id}`\n")[2].partition("\n### ")[0]

    assert "scopes: operator, reader" in route
    assert "`experiment_id` in the path" in route
    assert "200: `application/json` ExperimentView" in route
    assert "409: This release refuses the experiment's spec." in route
    assert "429" not in route, "what holds for all routes is said once"


def test_routes_that_only_services_call_are_left_out(rest: str) -> None:
    assert "PUT /v1/services" not in rest
    assert "POST /v1/experiments" in rest


def test_every_command_has_a_section_with_its_help() -> None:
    page = cli_page()

    assert [name for name in leaves(build_parser()) if f"\n## flotilla {name}\n" not in page] == []
    assert "--rollouts" in page.partition("## flotilla up\n")[2].partition("\n## ")[0]
