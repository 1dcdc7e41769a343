"""Run as a process of its own: a rank of an engine, which forms a group and receives as SGLang 0.5.23 does.

``python engine_rank.py HOST PORT RANK WORLD_SIZE NAME SIZES``: says ``waiting`` once it has reached the store, receives
a broadcast of each of these numbers of bytes, says ``received CHECKSUM`` once it has the first two, and then
``done`` or ``failed REASON``.
"""

import json
import sys
from datetime import timedelta

import torch
import torch.distributed
import xxhash
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world, rendezvous

TIMEOUT = timedelta(minutes=30)


def main(host: str, port: str, rank: int, world_size: int, name: str, sizes: list[int]) -> None:
    """Form the group beside a default one, which an engine has, and receive."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        store, *_ = next(iter(rendezvous(f"tcp://{host}:{port}", rank, world_size, timeout=TIMEOUT)))
        store.set_timeout(TIMEOUT)
        print("waiting", flush=True)
        group, _ = _new_process_group_helper(
            world_size,
            rank,
            [],
            Backend("gloo"),
            PrefixStore(name, store),
            group_name=name,
            backend_options=None,
            timeout=TIMEOUT,
        )
        _world.pg_group_ranks[group] = {number: number for number in range(world_size)}
        digest = xxhash.xxh3_64()
        for number, size in enumerate(sizes):
            received = torch.empty(size, dtype=torch.uint8)
            torch.distributed.broadcast(received, src=0, group=group)
            digest.update(received.numpy().data)
            if number == 1:
                print("received", digest.hexdigest(), flush=True)
    except Exception as error:
        print("failed", str(error).splitlines()[0], flush=True)
    else:
        print("done", flush=True)


if __name__ == "__main__":
    host, port, rank, world_size, name, sizes = sys.argv[1:]
    main(host, port, int(rank), int(world_size), name, json.loads(sizes))
