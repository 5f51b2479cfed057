"""Advice as files and as other engines' commands, for `advise.py`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from advisor import Options
from common import describe_device
from findings import Advice

import specjax
from specjax.advice import LEAST_GAIN, best_prediction
from specjax.trees import ladder


def setting_fields(advice: Advice, options: Options) -> dict[str, Any]:
    """The setting as options of `generate.py`, or of `batch.py` where several rows decode together."""
    choice = advice.choices[options.temperature, options.batch[0]]

    def absolute(source: str) -> str:
        return str(Path(source).absolute()) if Path(source).exists() else source

    found: dict[str, Any] = {
        "target": absolute(options.target),
        "drafter": choice.trial.candidate.name if choice.pays else "none",
    }
    if choice.pays:
        found["num_draft"] = choice.prediction.num_draft
        if choice.trial.candidate.kind == "adaptive":
            curve = advice.curves[options.batch[0]]
            widths = np.asarray(ladder(choice.prediction.num_draft))
            found["costs"] = [round(float(c), 3) for c in curve.pass_cost(widths)]
        used = {"draft-model": ("draft_model", options.draft), "head": ("head", options.head)}
        field, given = used.get(choice.trial.candidate.name, ("", None))
        if given is not None:
            found[field] = absolute(given)
    if options.batch[0] > 1:
        found["slots"] = options.batch[0]
    return found | {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
    }


def write_setting(path: Path, advice: Advice, options: Options) -> None:
    """The setting as TOML, with why."""
    choice = advice.choices[options.temperature, options.batch[0]]
    alone = "generate.py --config {} --prompt TEXT"
    together = "batch.py --config {} --prompts FILE --output FILE"
    script = (alone if options.batch[0] == 1 else together).format(path)
    lines = [
        "# Written by scripts/advise.py; use it with",
        f"#   python scripts/{script}",
        f"# {describe_device()}; batch {options.batch[0]}",
        ("# " if choice.pays else f"# nothing pays; the closest, {choice.trial.candidate.name}: ")
        + f"expected {choice.prediction.speed_up:.2f}x over plain decoding"
        + (f", measured {choice.check.speed_up:.2f}x" if choice.check else ""),
    ]
    # of these plain values JSON and TOML write the same
    lines += [f"{k} = {json.dumps(v)}" for k, v in setting_fields(advice, options).items()]
    path.write_text("\n".join(lines) + "\n")


def engine_commands(advice: Advice, options: Options) -> list[specjax.EngineCommand]:
    """The setting in the other engines' words."""
    choice = advice.choices[options.temperature, options.batch[0]]
    candidate = choice.trial.candidate
    by_batch: dict[int, int] = {}

    def fixed(batch: int) -> specjax.Prediction:
        """The best number of drafts where the drafter does not choose it itself."""
        costs, profile = advice.costs[batch][candidate.name], choice.trial.profile
        counts = range(1, candidate.longest + 1)
        return best_prediction([specjax.predict(profile, costs, k) for k in counts])

    for batch in sorted(advice.curves):
        best = fixed(batch)
        there = advice.choices[options.temperature, batch]
        refuted = there.trial.candidate is candidate and there.check is not None and not there.pays
        pays = best.speed_up >= LEAST_GAIN and not refuted
        by_batch[batch] = best.num_draft if pays else 0
    drafter = None
    if choice.pays:
        drafter = candidate.make(choice.prediction.num_draft, advice.curves[options.batch[0]])
    return specjax.engine_commands(
        drafter,
        target=options.target,
        draft=options.draft,
        head=options.head,
        sampled=options.temperature > 0,
        num_draft=fixed(options.batch[0]).num_draft,
        drafts_by_batch=by_batch,
    )


def to_json(advice: Advice, options: Options) -> dict[str, Any]:
    """Every figure; NaN as null."""

    def known(x: float) -> float | None:
        return None if np.isnan(x) else float(x)

    def profile(p: specjax.AcceptanceProfile) -> dict[str, Any]:
        return {
            "rounds": p.rounds,
            "tokens_per_round": p.tokens(),
            "acceptance_per_position": [known(x) for x in p.per_position],
            "proposed": p.proposed.tolist(),
            "accepted": p.accepted.tolist(),
            "basis": p.basis,
        }

    def prediction(p: specjax.Prediction) -> dict[str, Any]:
        return vars(p) | {"width": p.width, "speed_up": p.speed_up}

    choices = []
    for (temperature, batch), choice in advice.choices.items():
        row = {
            "temperature": temperature,
            "batch": batch,
            "drafter": choice.trial.candidate.name,
            "prediction": prediction(choice.prediction),
            "measured": vars(choice.check) if choice.check else None,
            "speculate": choice.pays,
        }
        choices.append(row)
    return {
        "target": options.target,
        "device": describe_device(),
        "prompts": advice.workloads,
        "verify_curve": {
            str(batch): {
                "widths": list(curve.widths),
                "cost": list(curve.verify),
                "seconds_per_pass": advice.seconds[batch],
                "drift": advice.drift[batch],
                "break_even_acceptance": [
                    known(specjax.break_even(curve, width - 1)) for width in curve.widths[1:]
                ],
            }
            for batch, curve in advice.curves.items()
        },
        "drafters": [
            {
                "drafter": trial.candidate.name,
                "temperature": temperature,
                **profile(trial.profile),
                "workloads": {w: profile(p) for w, p in trial.by_workload.items()},
                "measured_speed_up": trial.measured,
                "draft_cost": {
                    str(batch): costs[trial.candidate.name].draft
                    for batch, costs in advice.costs.items()
                },
                "predictions": {
                    str(batch): [
                        prediction(p) for p in trial.predictions(costs[trial.candidate.name])
                    ]
                    for batch, costs in advice.costs.items()
                },
            }
            for temperature, trials in advice.trials.items()
            for trial in trials
        ],
        "choices": choices,
        "memory": {str(batch): vars(m) | {"total": m.total} for batch, m in advice.memory.items()},
        "setting": setting_fields(advice, options),
        "engines": [vars(c) for c in engine_commands(advice, options)],
    }
