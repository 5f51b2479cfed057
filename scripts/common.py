"""What the commands share: how they start and how they name drafters."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

import specjax
from specjax.checkpoints.sources import cache_dir


def use_compilation_cache() -> None:
    """Keeps compiled programs between processes, in the cache folder unless JAX was told of another."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@contextmanager
def count_compilations() -> Iterator[list[float]]:
    """A list that grows by the seconds of every program compiled, or read from the persistent cache, meanwhile."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def describe_device() -> str:
    """The device that computes, in words."""
    device = jax.devices()[0]
    cores = f", {os.cpu_count()} cores" if device.platform == "cpu" else ""
    return f"{device.device_kind}{cores} ({device.platform}, jax {jax.__version__})"


def make_drafter(name: str, num_draft: int | None, draft_model: str | None = None) -> Any:
    """The drafter of a command line's name; None for "none".

    Raises:
      ValueError: unknown name, or a missing draft model.
    """
    given = {} if num_draft is None else {"num_draft": num_draft}
    match name:
        case "none":
            return None
        case "ngram":
            return specjax.NGram(**given)
        case "draft-model":
            if draft_model is None:
                raise ValueError("drafter draft-model needs --draft-model SOURCE, got none")
            return specjax.DraftModel(specjax.load_target(draft_model), **given)
    raise ValueError(f"drafter must be one of none, ngram, draft-model; got {name!r}")
