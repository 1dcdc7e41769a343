"""Rule of ``exactness: bitwise``: both sides compute each answer alone, with the same operators in the same shapes."""

from flotilla.shared.config.sections.episodes import SingleTurnConfig
from flotilla.shared.config.tree import Sections


def _check_quantised(spec: Sections) -> None:
    """Check that all participants support quantised weights.

    Raises:
        ValueError: one cannot.
    """
    asked, engine = spec.asynchrony.publication.quantisation, spec.rollout.engine
    if asked is None:
        return
    key = f"asynchrony.publication.quantisation {asked}"
    if engine.kind != "torch":
        raise ValueError(
            f"{key} is for the embedded engine, and rollout.engine.kind {engine.kind} reads images of whole weights: "
            "leave it out, or set rollout.engine.kind to torch"
        )
    if spec.exactness is not None:
        raise ValueError(f"{key} rounds weights, which exactness {spec.exactness} excludes: leave one out")
    if spec.algorithm.old_log_probs == "recompute_at_version":
        raise ValueError(
            f"{key} samples with rounded weights, and algorithm.old_log_probs recompute_at_version computes with whole "
            "ones: set it to recompute"
        )


def check_exactness(spec: Sections) -> None:
    """Check that nothing stands against equal bits, where they are asked for, nor against rounded weights.

    Raises:
        ValueError: something does; all of it is named.
    """
    _check_quantised(spec)
    if spec.exactness is None:
        return
    wrong = [text for is_wrong, text in _conditions(spec) if is_wrong]
    if wrong:
        raise ValueError(f"exactness bitwise needs {'; '.join(wrong)}")


def _conditions(spec: Sections) -> list[tuple[bool, str]]:
    engine, model, parallelism = spec.rollout.engine, spec.model, spec.parallelism
    asynchrony, optimisation = spec.asynchrony, spec.optimisation
    threads = getattr(engine, "threads", "auto")
    devices = (getattr(engine, "device", "auto"), parallelism.device)
    return [
        (spec.finished_job is not None or not spec.trains, "answers that are sampled and trained: leave job out"),
        (engine.kind != "torch", "rollout.engine.kind torch, since no other engine computes as the trainer does"),
        (any(each.startswith("cuda") for each in devices), "cpu as rollout.engine.device and parallelism.device"),
        (parallelism.ranks > 1, "parallelism.ranks 1"),
        (
            threads == "auto" or threads != parallelism.threads,
            "the same number as rollout.engine.threads and parallelism.threads, such as 1",
        ),
        (bool(asynchrony.staleness_threshold), "asynchrony.staleness_threshold 0"),
        (asynchrony.trigger_parameter_sync_step > 1, "asynchrony.trigger_parameter_sync_step 1"),
        (asynchrony.require_batches > 1, "asynchrony.require_batches 1"),
        (optimisation.epochs_per_step > 1, "optimisation.epochs_per_step 1"),
        (optimisation.packing == "packed", "optimisation.packing auto or padded: each answer has a pass of its own"),
        (optimisation.compile_layers, "optimisation.compile_layers false"),
        (model.dtype == "bfloat16", "model.dtype float32"),
        (model.lora is not None, "no model.lora: adapters are added to the engine's weights"),
        (model.attention not in {"auto", "sdpa"}, "model.attention auto or sdpa"),
        (spec.data.images is not None, "no data.images"),
        (spec.algorithm.router_replay is not None, "no algorithm.router_replay"),
        (
            not isinstance(spec.rollout.episodes, SingleTurnConfig) or spec.rollout.agents is not None,
            "answers of one turn: no rollout.episodes and no rollout.agents",
        ),
    ]
