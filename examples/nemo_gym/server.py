"""A resources server of NeMo Gym, written without this fleet in mind: chains of sums, verified by their number.

python examples/nemo_gym/server.py --port 8300
python examples/nemo_gym/server.py --rows train.jsonl data.jsonl
"""

import argparse
import json
from importlib import import_module
from pathlib import Path
from typing import Any


def write_data(problems: Path, output: Path, count: int) -> None:
    """Write lines of NeMo Gym's data of problems that examples/arithmetic/prepare.py made."""
    lines = []
    for line in problems.read_text(encoding="utf-8").splitlines()[:count]:
        problem = json.loads(line)
        params = {"input": [{"role": "user", "content": problem["prompt"]}]}
        lines.append(json.dumps({"responses_create_params": params, "expected_answer": str(problem["answer"])}))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def sums() -> Any:
    """Make the class of the server."""
    from nemo_gym.base_resources_server import (
        BaseResourcesServerConfig,
        BaseVerifyRequest,
        BaseVerifyResponse,
        SimpleResourcesServer,
    )

    class SumVerifyRequest(BaseVerifyRequest):
        expected_answer: str

    class SumVerifyResponse(BaseVerifyResponse):
        expected_answer: str
        words: int

    class SumServer(SimpleResourcesServer):
        config: BaseResourcesServerConfig

        async def verify(self, body: SumVerifyRequest) -> SumVerifyResponse:
            parts = [part for item in body.response.output if item.type == "message" for part in item.content]
            text = "".join(part.text for part in parts)
            reward = float(text.rpartition("####")[2].strip() == body.expected_answer)
            return SumVerifyResponse(**body.model_dump(), reward=reward, words=len(text.split()))

    return SumServer


def serve(server: Any, port: int) -> None:
    """Serve as `ng_run` does, without Ray and the head server, which one resources server does not need."""
    import uvicorn
    from nemo_gym.config_types import BaseServerConfig
    from nemo_gym.server_utils import ServerClient
    from omegaconf import OmegaConf

    head = BaseServerConfig(host="127.0.0.1", port=11000)
    client = ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({}))
    configuration = server.model_fields["config"].annotation
    config = configuration(name=server.__name__, host="127.0.0.1", port=port, entrypoint="server.py")
    app = server(config=config, server_client=client).setup_webserver()
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument("--server", metavar="MODULE:CLASS", help="another one, such as those below resources_servers")
    parser.add_argument("--rows", type=Path, nargs=2, metavar=("PROBLEMS", "DATA"))
    parser.add_argument("--count", type=int, default=2000)
    arguments = parser.parse_args()
    if arguments.rows:
        write_data(*arguments.rows, arguments.count)
    elif arguments.server:
        module, _, name = arguments.server.partition(":")
        serve(getattr(import_module(module), name), arguments.port)
    else:
        serve(sums(), arguments.port)


if __name__ == "__main__":
    main()
