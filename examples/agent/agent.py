"""An agent that is trained while it works: it asks the policy through the `openai` package, and says how good it was.

    python examples/agent/agent.py EXPERIMENT [--gateway URL] [--parallel N]

The token (FLOTILLA_TOKEN) is that of the fleet, or one of the scope `agent`.
"""

import argparse
import asyncio
import json
import os
import urllib.error
import urllib.request

from openai import APIError, AsyncOpenAI

NO_MORE = {401, 403, 404, 409}


def call(url: str, token: str, body: dict) -> tuple[int, dict]:
    """Post JSON; return status and answer."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")
    except OSError as error:
        return 0, {"detail": str(error)}


async def work(task: dict, client: AsyncOpenAI, model: str) -> float:
    """Solve one task; return the reward. This is the part that is yours."""
    chat = [{"role": message["role"], "content": message["content"]} for message in task["messages"]]
    reply = await client.chat.completions.create(model=model, messages=chat)
    answer = (reply.choices[0].message.content or "").rpartition("####")[2].strip()
    return float(answer == task["label"])


async def agent(gateway: str, experiment: str, token: str, connections: AsyncOpenAI) -> int:
    """Work until the experiment has ended; return how many episodes that were."""
    done = 0
    while True:
        url = f"{gateway}/v1/experiments/{experiment}/episodes"
        status, episode = await asyncio.to_thread(call, url, token, {"wait_seconds": 20})
        if status in NO_MORE:
            print(episode.get("detail", status))
            return done
        if status != 201:
            await asyncio.sleep(1)
            continue
        # A client for each episode, over shared connections: to make one from nothing takes as long as a short answer.
        client = connections.with_options(base_url=episode["base_url"], api_key=episode["key"])
        try:
            reward = await work(episode["task"], client, episode["model"])
        except APIError as error:
            print(f"episode given up: {error}")  # its lease ends, and somebody else gets the task
            continue
        end = f"{gateway}/v1/episodes/{episode['episode_id']}/complete"
        status, _ = await asyncio.to_thread(call, end, episode["key"], {"reward": reward})
        done += status == 200


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("experiment", help="id")
    parser.add_argument("--gateway", default=os.environ.get("FLOTILLA_GATEWAY_URL", "http://127.0.0.1:8470"))
    parser.add_argument("--parallel", type=int, default=16, help="episodes at a time")
    arguments = parser.parse_args()
    token = os.environ["FLOTILLA_TOKEN"]
    async with AsyncOpenAI(base_url=arguments.gateway, api_key=token) as connections:
        agents = [agent(arguments.gateway, arguments.experiment, token, connections) for _ in range(arguments.parallel)]
        print(f"{sum(await asyncio.gather(*agents))} episodes")


if __name__ == "__main__":
    asyncio.run(main())
