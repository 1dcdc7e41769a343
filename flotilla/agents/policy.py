"""Asks the policy of one episode, for agents that talk to its endpoint without a client's package."""

from collections.abc import Mapping
from typing import Any

import httpx

from flotilla.agents.episodes import REQUEST_SECONDS, Episode, EpisodeLost

ENDS = frozenset({"context_length_exceeded", "limit_reached"})
"""Codes of refusals after which there is no room for another turn."""


async def ask_policy(
    client: httpx.AsyncClient, episode: Episode, endpoint: str, body: Mapping[str, Any], *, is_first: bool
) -> Any:
    """Sample an answer; None where there is no room left for another turn.

    Args:
        endpoint: below the episode's base URL, such as ``completions``.
        is_first: whether nothing was sampled yet: then there is no room for any turn.

    Raises:
        EpisodeLost: the fleet refuses, or cannot be reached.
    """
    headers = {"Authorization": f"Bearer {episode.key}"}
    try:
        answer = await client.post(
            f"{episode.base_url}/{endpoint}", json=dict(body), headers=headers, timeout=REQUEST_SECONDS
        )
    except httpx.HTTPError as error:
        raise EpisodeLost(repr(error)) from error
    if answer.status_code == 200:
        try:
            return answer.json()
        except ValueError as error:
            raise EpisodeLost(f"an answer that is no JSON: {answer.text[:200]}") from error
    if not is_first and any(f'"{code}"' in answer.text for code in ENDS):
        return None
    raise EpisodeLost(f"{answer.status_code}: {answer.text[:500]}")
