"""What a head is worth in real decoding: acceptance by workload."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import specjax
from specjax.monitoring import Monitor


def decode_workloads(
    target: Any,
    drafter: Any,
    workloads: Mapping[str, Sequence[Sequence[int]]],
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    temperature: float = 0.0,
    batch_size: int = 8,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[str, Any]]:
    """Decodes prompts with a drafter and counts what stood.

    Args:
      workloads: prompts as token ids, by name.
      max_new_tokens: per prompt.
      batch_size: prompts that decode together.
      progress: called with each workload's name when it is done.

    Returns:
      by workload and for "all": `mean_acceptance_length`, `acceptance_rate`, `acceptance_per_position` (share of rounds),
      `tokens`.
    """
    sampling = specjax.Sampling(temperature=temperature)
    whole, found = Monitor(), {}

    def figures(monitor: Monitor) -> dict[str, Any]:
        rounds = max(monitor.rounds, 1)
        return {
            "mean_acceptance_length": monitor.mean_acceptance_length,
            "acceptance_rate": monitor.acceptance_rate,
            "acceptance_per_position": (monitor.accepted_per_position / rounds).round(4).tolist(),
            "tokens": monitor.emitted,
        }

    for name, prompts in workloads.items():
        monitor = Monitor()
        for start in range(0, len(prompts), batch_size):
            part = list(prompts[start : start + batch_size])
            out = specjax.generate(
                target,
                part,
                drafter=drafter,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                key=start,
                stop_token_ids=stop_token_ids,
            )
            monitor.add(out.statistics)
            whole.add(out.statistics)
        found[name] = figures(monitor)
        progress(name)
    found["all"] = figures(whole)
    lengths = [row["mean_acceptance_length"] for row in found.values()][:-1]
    found["all"]["mean_over_workloads"] = float(np.mean(lengths))
    return found
