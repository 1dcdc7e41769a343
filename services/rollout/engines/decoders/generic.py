"""Decoders for any other causal language model: the forward of transformers, with our own cache or with none.

Slower than the fused forward and equal in result. Which of the two serves is found out by trying: a model whose cached
forward does not agree with its plain one, or that has no such cache (as state space models), is computed again for each
token.
"""

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.utils import logging as transformers_logging

from flotilla.services.rollout.engines.base import Completion, GenerationRequest
from flotilla.services.rollout.engines.decoders.adapted import AdaptedTensors, BaseWeights, open_staged
from flotilla.services.rollout.engines.decoders.arrival import Arrival, Tensors
from flotilla.services.rollout.engines.decoders.base import KeepsNothing, KeptRow, Tokens
from flotilla.services.rollout.engines.decoders.checkpoint import check_headers
from flotilla.shared.errors import ModelError, WeightTransferFailed
from flotilla.shared.net.absence import absent_or
from flotilla.shared.vision.kinds import takes_images
from flotilla.shared.weights.image.checkpoint_names import pieces_of
from flotilla.shared.weights.image.digests import as_rows, of_sums, sums_of_all

log = logging.getLogger(__name__)

PROBE_LENGTHS = (9, 4, 6)
PROBE_STEPS = 3
# Far above the rounding of each type, far below what a wrong mask or position does.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}


FIRST_CAPACITY = 64


class _Columns(DynamicLayer):  # type: ignore[misc]
    """One layer's live columns, as transformers sees them while one token is appended."""

    def __init__(self, keys: Tensor, values: Tensor, first: int, end: int) -> None:
        super().__init__()
        self._buffers = (keys, values)
        self._first, self._end = first, end
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values = (buffer[:, :, first:end] for buffer in self._buffers)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        end = self._end + key_states.shape[-2]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._end : end] = new
        self.keys, self.values = (buffer[:, :, self._first : end] for buffer in self._buffers)
        return self.keys, self.values


class ColumnCache:
    """Keys and values of every layer, each [rows, heads, capacity, dims]; shapes are learnt from the first prefill.

    Args:
        num_rows: rows.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._capacity = 0
        self._end = 0

    def write(self, computed: Cache, lengths: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """Store sequences that were computed padded on the left.

        Args:
            computed: their cache, each layer [N, heads, T, dims].
            lengths: tokens of each.
            rows: the rows that get each.
        """
        if not self._layers:
            self._layers = [self._allocate(layer.keys, layer.values) for layer in computed.layers]
        longest = max(lengths)
        if longest > self._end:
            self._relocate(self._end, longest)
        for buffers, layer in zip(self._layers, computed.layers, strict=True):
            for buffer, new in zip(buffers, (layer.keys, layer.values), strict=True):
                for index, (length, targets) in enumerate(zip(lengths, rows, strict=True)):
                    # One row at a time: rows that continue keep what lies left of a shorter neighbour.
                    buffer[list(targets), :, self._end - length : self._end] = new[index, :, -length:]

    def appending(self, num_rows: int, longest: int) -> Cache:
        """Hand the first rows' live columns to a forward pass that appends one token to each."""
        if self._end + 1 > self._capacity:
            self._relocate(longest, longest)
        first = self._end - longest
        layers = [_Columns(keys[:num_rows], values[:num_rows], first, self._end) for keys, values in self._layers]
        self._end += 1
        return Cache(layers=layers)

    def keep(self, row: int, num_tokens: int) -> KeptRow:
        """Copy what a row has; it ends where all do."""
        live = slice(self._end - num_tokens, self._end)
        keys, values = (torch.stack([layer[of][row, :, live] for layer in self._layers]) for of in (0, 1))
        return KeptRow(keys, values)

    @property
    def token_bytes(self) -> int:
        """Count the bytes of a token of a row; 0 before the first prefill."""
        return sum(each.shape[1] * each.shape[3] * each.element_size() for layer in self._layers for each in layer)

    def release(self) -> None:
        """Free all rows."""
        self._layers, self._capacity, self._end = [], 0, 0

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Zero rows."""
        for buffers in self._layers:
            for buffer in buffers:
                buffer[list(rows)] = 0

    def move_rows(self, sources: Sequence[int], targets: Sequence[int], longest: int) -> None:
        """Copy rows to other rows."""
        live = slice(max(self._end - longest, 0), self._end)
        for buffers in self._layers:
            for buffer in buffers:
                buffer[list(targets), :, live] = buffer[list(sources), :, live]

    def _allocate(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._capacity = self._capacity or FIRST_CAPACITY

        def zeros(like: Tensor) -> Tensor:
            return torch.zeros(
                (self._num_rows, like.shape[1], self._capacity, like.shape[3]), dtype=like.dtype, device=like.device
            )

        return zeros(keys), zeros(values)

    def _relocate(self, num_live: int, end: int) -> None:
        """Move the last ``num_live`` columns so that they end at ``end``, with room for as many again."""
        old = slice(self._end - num_live, self._end)
        self._capacity = max(self._capacity, 2 * end)
        moved = []
        for keys, values in self._layers:
            new_keys, new_values = self._allocate(keys, values)
            new_keys[:, :, end - num_live : end] = keys[:, :, old]
            new_values[:, :, end - num_live : end] = values[:, :, old]
            moved.append((new_keys, new_values))
        self._layers, self._end = moved, end


def load_model(directory: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Load a causal language model; code that comes with a model is never run.

    Raises:
        ModelError: transformers cannot load it, or its files lack weights.
    """
    transformers_logging.disable_progress_bar()
    try:
        kind = AutoModelForImageTextToText if takes_images(directory) else AutoModelForCausalLM
        model, info = kind.from_pretrained(directory, local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError) as error:
        raise absent_or(error, ModelError(f"model {directory} cannot be loaded by transformers: {error}")) from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ModelError(f"model {directory} lacks {len(missing)} tensors (first: {missing[0]})")
    loaded: nn.Module = model.to(device=device).eval().requires_grad_(False)
    for parameter in loaded.parameters():  # Not the buffers: rotary frequencies stay float32 whatever the weights are.
        # A copy: what maps the model's file could not be released.
        parameter.data = parameter.data.to(dtype, copy=True)
    return loaded


class ModelWeights:
    """The weights of a transformers model, replaced by images with the names of its checkpoint.

    Args:
        model: whose weights.
        files: the safetensors files of its initial weights.
    """

    def __init__(self, model: nn.Module, files: Sequence[Path] = ()) -> None:
        first = next(model.parameters())
        self.base = BaseWeights(files, first.dtype, first.device)
        storages = {each.data_ptr(): each for each in (p.untyped_storage() for p in model.parameters())}
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]
        state = model.state_dict()
        pieces = pieces_of(model, {name: tuple(tensor.shape) for name, tensor in state.items()})
        self._tensors: Mapping[str, Tensor] = {piece.name: piece.of(state[piece.source]) for piece in pieces}
        trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        parameters = {piece.name for piece in pieces if piece.source in trained}
        self._tied: list[set[str]] = []
        places: dict[tuple[int, tuple[int, ...]], set[str]] = defaultdict(set)
        for name, tensor in self._tensors.items():
            places[tensor.data_ptr(), tuple(tensor.shape)].add(name)
        self._tied = [names for names in places.values() if len(names) > 1]
        self._optional = frozenset(set().union(*self._tied) | (self._tensors.keys() - parameters))
        self._staged: dict[str, Tensor] = {}
        self._is_discarded = False

    def stage(self, image: Path, arrival: Arrival | None = None) -> None:
        """Read an image; see ``Decoder.stage``."""
        expected = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        with open_staged(image, arrival, self.base) as source:
            if not isinstance(source, AdaptedTensors):  # The model's own files are what it was loaded from.
                check_headers(source.headers, expected, optional=self._optional)
                self._check_tied(source)
            self._stage_from(source)

    def _check_tied(self, source: Tensors) -> None:
        for names in self._tied:
            if not names & source.headers.keys():
                raise WeightTransferFailed(f"the image has none of the tied tensors {', '.join(sorted(names))}")

    def _stage_from(self, source: Tensors) -> None:
        self._staged = {}
        for name in source.headers:
            if name not in self._tensors:
                continue
            if self._is_discarded:
                self._tensors[name].copy_(source.read(name))
            else:
                self._staged[name] = source.read(name).to(self._tensors[name], copy=True)

    def digests(self) -> Iterator[tuple[str, int]]:
        """Digest the model's own tensors; see ``Decoder.digests``."""
        sums = sums_of_all([as_rows(tensor) for tensor in self._tensors.values()])
        yield from zip(self._tensors, map(of_sums, sums), strict=True)

    def discard(self) -> None:
        """Have the next weights read into the model itself; see ``Decoder.discard``."""
        self._is_discarded = True

    def release(self) -> None:
        """Free the parameters' memory; the tensors stay what they are, and are empty until they are filled."""
        self._staged, self._is_discarded = {}, False
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Read the initial weights; see ``Decoder.restore``."""
        with self.base.open() as source:
            self._stage_from(source)
        self.switch()

    def switch(self) -> None:
        """Copy what was staged into the model."""
        for storage, num_bytes in self._storages:
            if not storage.nbytes():
                storage.resize_(num_bytes)
        for name, tensor in self._staged.items():
            self._tensors[name].copy_(tensor)
        self._staged, self._is_discarded = {}, False


class _Forward:
    """Calls a model's forward with those of our arguments that it knows."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = set(inspect.signature(model.forward).parameters)

    def __call__(self, token_ids: Tensor, **arguments: Any) -> Tensor:
        """Compute the logits of the last position: [B, V]."""
        arguments["logits_to_keep"] = 1
        known = {name: value for name, value in arguments.items() if name in self._known}
        logits: Tensor = self._model(input_ids=token_ids, **known).logits
        return logits[:, -1]


class CachedDecoder(KeepsNothing):
    """A ``Decoder`` that keeps keys and values in a ``ColumnCache``.

    Args:
        model: of transformers, with attention over keys and values in every layer.
        weights: the same model's.
        num_rows: rows of the cache.
    """

    def __init__(self, model: nn.Module, weights: ModelWeights, num_rows: int) -> None:
        self.vocab_size, self.max_positions = limits(model)
        self.description = f"transformers {type(model).__name__}, cached"
        self.device = self._device = next(model.parameters()).device
        self._forward = _Forward(model)
        self._cache = ColumnCache(num_rows)
        self.stage, self.switch, self.restore = weights.stage, weights.switch, weights.restore
        self.discard, self.digests, self.base = weights.discard, weights.digests, weights.base
        self._weights = weights
        self.move_rows, self.clear_rows = self._cache.move_rows, self._cache.clear_rows

    def release(self) -> None:
        """Free weights and cache; see ``Decoder.release``."""
        self._weights.release()
        self._cache.release()

    @torch.inference_mode()
    def prefill(
        self,
        sequences: Sequence[Tokens],
        rows: Sequence[Sequence[int]],
        kept: Sequence[tuple[KeptRow, int] | None] = (),
    ) -> Tensor:
        """Compute sequences, padded on the left to the longest; see ``Decoder.prefill``."""
        lengths, padded = padded_left(sequences)
        starts = padded.shape[1] - torch.tensor(lengths, device=self._device).unsqueeze(1)
        columns = torch.arange(padded.shape[1], device=self._device)
        computed = DynamicCache()
        logits = self._forward(
            torch.from_numpy(padded).to(self._device),
            attention_mask=(columns >= starts).long(),
            position_ids=(columns - starts).clamp(min=0),
            past_key_values=computed,
            use_cache=True,
        )
        self._cache.write(computed, lengths, rows)
        return logits

    @torch.inference_mode()
    def decode(self, token_ids: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Append one token to each of the first B rows; see ``Decoder.decode``."""
        columns, lengths = torch.arange(longest + 1, device=self._device), lengths.to(self._device)
        return self._forward(
            token_ids.unsqueeze(1),
            attention_mask=(columns >= longest - lengths.unsqueeze(1)).long(),
            position_ids=self._next_positions(lengths).unsqueeze(1),
            past_key_values=self._cache.appending(token_ids.shape[0], longest),
            use_cache=True,
        )

    def _next_positions(self, lengths: Tensor) -> Tensor:
        """Return the position of the token behind so many cached ones of each of the first rows: [B]."""
        return lengths


class RecomputingDecoder(KeepsNothing):
    """A ``Decoder`` without a cache: every token costs a pass over its whole sequence, unpadded.

    Since nothing is cached, a sample that continues over a weight update is computed under the new weights alone.

    Args:
        model: any causal language model of transformers.
        weights: the same model's.
        num_rows: rows.
    """

    def __init__(self, model: nn.Module, weights: ModelWeights, num_rows: int) -> None:
        self.vocab_size, self.max_positions = limits(model)
        self.description = f"transformers {type(model).__name__}, recomputed for each token"
        self._device = next(model.parameters()).device
        self._forward = _Forward(model)
        self._rows: list[list[int]] = [[] for _ in range(num_rows)]
        self.stage, self.switch, self.digests = weights.stage, weights.switch, weights.digests
        self.base = weights.base
        self.release, self.restore, self.discard = weights.release, weights.restore, weights.discard

    @torch.inference_mode()
    def prefill(
        self,
        sequences: Sequence[Tokens],
        rows: Sequence[Sequence[int]],
        kept: Sequence[tuple[KeptRow, int] | None] = (),
    ) -> Tensor:
        """Remember the sequences and compute them; see ``Decoder.prefill``."""
        for sequence, targets in zip(sequences, rows, strict=True):
            for row in targets:
                self._rows[row] = sequence.tolist()
        return self._compute_rows([targets[0] for targets in rows])

    @torch.inference_mode()
    def decode(self, token_ids: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Append one token to each of the first B rows; see ``Decoder.decode``."""
        for row, (token, length) in enumerate(zip(token_ids.tolist(), lengths.tolist(), strict=True)):
            self._rows[row] = [*self._rows[row][:length], token]
        return self._compute_rows(range(token_ids.shape[0]))

    def move_rows(self, sources: Sequence[int], targets: Sequence[int], longest: int) -> None:
        """Copy rows to other rows."""
        for source, target in zip(sources, targets, strict=True):
            self._rows[target] = list(self._rows[source])

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Do nothing: there is no KV."""

    def _compute_rows(self, rows: Sequence[int]) -> Tensor:
        """Compute the logits behind the sequences of some rows: [B, V]."""
        sequences = [self._rows[row] for row in rows]
        of_length: dict[int, list[int]] = defaultdict(list)
        for index, sequence in enumerate(sequences):
            of_length[len(sequence)].append(index)
        logits: Tensor | None = None
        for indices in of_length.values():
            token_ids = torch.tensor([sequences[index] for index in indices], device=self._device)
            part = self._forward(token_ids, use_cache=False)
            if logits is None:
                logits = part.new_empty((len(sequences), part.shape[1]))
            logits[indices] = part
        assert logits is not None
        return logits


class WholeScorer:
    """Scores whole answers under the weights that a model has now, with the bits of the trainer (``exactness``).

    One sequence at a time, without padding, cache or own kernels: transformers' forward of all of its tokens, the
    logits behind those that predict a sampled one, torch's log-softmax. Another number of rows or columns may add in
    another order, so the trainer's passes have one sequence each, too (``Policy.is_exact``).

    Args:
        model: of transformers; its owner replaces its weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def rescored(self, request: GenerationRequest, completion: Completion) -> Completion:
        """Return a completion, all of it sampled under the present weights, with log-probabilities of these."""
        sampling = request.sampling
        temperature = 1.0 if sampling.greedy else sampling.temperature
        found = self.log_probs(request.prompt_ids, completion.token_ids, temperature)
        return replace(completion, log_probs=found)

    @torch.no_grad()
    def log_probs(
        self, prompt_ids: Sequence[int], token_ids: npt.NDArray[np.int32], temperature: float
    ) -> npt.NDArray[np.float32]:
        """Compute the log-probabilities of an answer's tokens [N], in nats."""
        labels = torch.from_numpy(token_ids.astype(np.int64))
        sequence = torch.cat([torch.tensor(prompt_ids, dtype=torch.int64), labels]).unsqueeze(0)
        logits = self._model(input_ids=sequence, use_cache=False).logits
        first = len(prompt_ids) - 1
        chosen = logits.reshape(-1, logits.shape[-1]).index_select(0, torch.arange(first, first + labels.shape[0]))
        log_all = torch.log_softmax(chosen.float() / temperature, dim=-1)
        found: npt.NDArray[np.float32] = log_all.gather(-1, labels.unsqueeze(-1)).squeeze(-1).numpy()
        return found


def padded_left(sequences: Sequence[Tokens]) -> tuple[list[int], Tokens]:
    """Lay sequences into rows that end together: their lengths, and [N, longest] token ids, 0 before each."""
    lengths = [sequence.shape[0] for sequence in sequences]
    padded = np.zeros((len(sequences), max(lengths)), dtype=np.int64)
    for index, sequence in enumerate(sequences):
        padded[index, padded.shape[1] - lengths[index] :] = sequence
    return lengths, padded


def limits(model: nn.Module) -> tuple[int, int]:
    """Find the vocabulary size and the number of positions of a model."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    vocab_size: int = model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return vocab_size, int(positions or 2**31 - 1)


def choose_decoder(
    model: nn.Module,
    dtype: torch.dtype,
    num_rows: int,
    files: Sequence[Path] = (),
    make_cached: Callable[[nn.Module, ModelWeights, int], CachedDecoder] = CachedDecoder,
    make_plain: Callable[[nn.Module, ModelWeights, int], RecomputingDecoder] = RecomputingDecoder,
) -> CachedDecoder | RecomputingDecoder:
    """Take the cached decoder if it agrees with the plain forward on a few sequences, else the one that recomputes."""
    weights = ModelWeights(model, files)
    plain = RecomputingDecoder(model, weights, len(PROBE_LENGTHS))
    try:
        difference = _largest_difference(make_cached(model, weights, len(PROBE_LENGTHS)), plain)
    except Exception as error:  # Whatever a foreign model raises on our cache, it works without one.
        log.warning("model does not work with a cache", extra={"error": repr(error)})
    else:
        if difference < PROBE_TOLERANCE[dtype]:
            return make_cached(model, weights, num_rows)
        log.warning("model computes otherwise with a cache", extra={"largest_difference": difference})
    return make_plain(model, weights, num_rows)


def _largest_difference(cached: CachedDecoder, plain: RecomputingDecoder) -> float:
    """Compare log-probabilities over sequences that join at different times and differ in length."""
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, cached.vocab_size, length) for length in PROBE_LENGTHS]
    lengths = np.array(PROBE_LENGTHS)
    worst = 0.0
    for step in range(-2, PROBE_STEPS):
        if step < 0:
            joining = [0, 1] if step == -2 else [2]
            chosen = [sequences[index] for index in joining]
            pair = [decoder.prefill(chosen, [[index] for index in joining]) for decoder in (cached, plain)]
        else:
            # On the device, as ``Decoder.decode`` is promised: a cache on a GPU failed this for tokens on the host.
            token_ids = torch.from_numpy(generator.integers(0, cached.vocab_size, len(sequences))).to(cached.device)
            where = torch.from_numpy(lengths)
            pair = [decoder.decode(token_ids, where, int(lengths.max())) for decoder in (cached, plain)]
            lengths += 1
        one, other = (logits.float().log_softmax(dim=-1) for logits in pair)
        worst = max(worst, float((one - other).abs().nan_to_num(nan=torch.inf).max()))
    return worst
