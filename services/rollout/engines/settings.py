"""What an embedded engine needs to start; plain values, so that they can cross a process boundary."""

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How the embedded engine runs.

    Attributes:
        model_path: a Hugging Face model directory (config.json and safetensors).
        version: the policy version of those weights.
        dtype: of weights, activations and KV cache; log-probabilities are always computed in float32.
        device: "cpu", or a CUDA device such as "cuda:0".
        slots: completions that the batch can hold.
        context_tokens: prompt and completion together; the model's own position limit applies as well.
        threads: compute threads of the engine's process; "auto" shares the host's cores with others.
        batch_invariant: compute every step in the same shapes, whatever is in the batch.
        is_exact: report log-probabilities with the trainer's bits (``exactness: bitwise``).
        overlap_load: read new weights on a thread of their own, while sampling continues.
        prefill_tokens: prompt tokens computed at a time; bounds memory and how long running samples pause.
        prefix_cache_mb: megabytes of KV of finished turns that are kept for the next ones.
        start_seconds: deadline of ``start``.
        call_seconds: deadline of a call that waits for no sampling.
        close_seconds: how long ``close`` waits before it kills the engine's process.
        image_pixels: least and most pixels of an image, each None to keep the model's processor's; None where
            prompts have no images.
        records_experts: record which experts the routers of a mixture choose for each token.
    """

    model_path: str
    version: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    slots: int = 128
    context_tokens: int = 4096
    threads: int | Literal["auto"] = 1
    batch_invariant: bool = False
    is_exact: bool = False
    overlap_load: bool = False
    prefill_tokens: int = 4096
    prefix_cache_mb: int = 256
    start_seconds: float = 120.0
    call_seconds: float = 60.0
    close_seconds: float = 5.0
    image_pixels: tuple[int | None, int | None] | None = None
    records_experts: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in {"float32", "bfloat16"}:
            raise ValueError(f"dtype must be float32 or bfloat16, got {self.dtype!r}")
        if self.prefix_cache_mb < 0:
            raise ValueError(f"prefix_cache_mb must be at least 0, got {self.prefix_cache_mb}")
        for name in ("slots", "context_tokens", "threads", "prefill_tokens"):
            if getattr(self, name) != "auto" and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def to_wire(self) -> dict[str, Any]:
        """Make a plain mapping of it."""
        return asdict(self)
