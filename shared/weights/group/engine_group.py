"""A weight group whose members are the trainer and the ranks of engines: what both ends must do alike.

An engine does not take an image: it loads tensors, as the broadcasts come. So the image is cut between tensors, and
each engine learns from its rollout, over HTTP, which tensors the next broadcast holds. Engines form the group by
torch's own helper for groups beside the default one, which names keys of the store in its own way.
"""

from collections.abc import Iterator, Sequence

from flotilla.shared.schemas.publication import TensorSpec


def group_name(epoch: int, port: int) -> str:
    """Name the group of an epoch whose store is at a port; a server must not see a name twice."""
    return f"flotilla-{epoch}-{port}"


def store_prefixes(name: str, *, on_gpus: bool) -> list[str]:
    """Name the prefixes of an engine's keys, each around a store with those before it.

    Args:
        name: of the group.
        on_gpus: whether it is one of nccl; else it is one of gloo.
    """
    return [name, f"{name}/", "cuda/" if on_gpus else "cpu/"]


def buckets_of(tensors: Sequence[TensorSpec], bucket_bytes: int) -> Iterator[tuple[TensorSpec, ...]]:
    """Cut an image's tensors into the runs that are broadcast, in the order of their bytes.

    A run has tensors of one dtype, so that each begins at a multiple of its element's size, and at most so many bytes,
    or one tensor.

    Args:
        tensors: of the image, which lie in it without gaps.
        bucket_bytes: most bytes of a run.
    """
    first = 0
    for index in range(1, len(tensors) + 1):
        is_full = index == len(tensors) or tensors[index].end - tensors[first].start > bucket_bytes
        if is_full or tensors[index].dtype != tensors[first].dtype:
            yield tuple(tensors[first:index])
            first = index
