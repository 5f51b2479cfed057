"""The measurements behind `advise.py`: what stood, what it cost, and what the best setting did."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarking.workloads import decode_in_turn, tokens_per_second
from common import DrafterName, check_room, count_compilations, encode_workloads, make_drafter
from findings import Advice, Candidate, Check, Choice, Trial, choose
from rich.console import Console

import specjax
from specjax.generate import bucket, needed_slots
from specjax.trees import ladder
from specjax.tuning import measure_draft_cost, measure_passes

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Options:
    """Advise on speculation.

    Attributes:
      target: a built-in name, a Hugging Face folder or hub id, or a .gguf file.
      prompts: JSON lines with `prompt`, `turns` or `messages`, and maybe `workload`: what the model will be asked.
      drafters: the ones to try that need no training.
      draft: source of a draft model to try.
      head: folder or hub id of a trained head to try: EAGLE-3, P-EAGLE, MTP.
      num_draft: drafts per round at most; by default 15 of look-ups and 7 of networks.
      temperature, top_k, top_p: how the model will be sampled; temperature 0 is measured in any case.
      batch: rows that will decode together; the setting is for the first, the others tell where speculation stops paying.
      context: tokens of prompt and output together, for the memory.
      limit: prompts per workload.
      max_new_tokens: per prompt.
      repeats: measurements of every cost; medians are used.
      price_per_hour: of the machine, in any currency.
      json: write every figure to this file.
      write: write the setting to this file, for `generate.py --config`.
    """

    target: str = "smollm2-135m-instruct"
    prompts: Path = HERE / "prompts.jsonl"
    drafters: tuple[DrafterName, ...] = ("ngram", "suffix", "adaptive")
    draft: str | None = None
    head: str | None = None
    num_draft: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    batch: tuple[int, ...] = (1,)
    context: int = 2048
    limit: int = 2
    max_new_tokens: int = 128
    repeats: int = 3
    price_per_hour: float | None = None
    json: Path | None = None
    write: Path | None = None

    def __post_init__(self):
        for name in ("num_draft", "limit", "max_new_tokens", "repeats", "context"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be a whole number >= 1, got {value}")
        if not self.batch or min(self.batch) < 1 or len(set(self.batch)) < len(self.batch):
            raise ValueError(f"batch must be distinct whole numbers >= 1, got {self.batch}")
        price = self.price_per_hour
        if price is not None and not (math.isfinite(price) and price > 0):
            raise ValueError(f"price_per_hour must be a positive number, got {price}")
        if "none" in self.drafters:
            raise ValueError("drafters must propose something; plain decoding is always measured")


def find_candidates(options: Options, target: specjax.Transformer) -> list[Candidate]:
    """The drafters to try, loaded and checked against the target."""
    found = []
    for name in dict.fromkeys(options.drafters):
        longest = options.num_draft or 15

        def make(k: int, costs: specjax.RoundCosts, name: str = name) -> Any:
            curve = costs.pass_cost(np.asarray(ladder(k))).tolist()
            return make_drafter(name, k, costs=curve)

        adaptive = name.startswith("adaptive")
        found.append(Candidate(name, longest, make, "adaptive" if adaptive else "look-up"))
    longest = options.num_draft or 7
    networks: dict[str, Any] = {}
    if options.draft is not None:
        networks["draft-model"] = specjax.DraftModel(specjax.load_target(options.draft))
    if options.head is not None:
        networks["head"] = specjax.head_drafter(specjax.load_head(options.head, target))
    for name, drafter in networks.items():
        drafter.check(target)

        def resize(k: int, _: specjax.RoundCosts, drafter: Any = drafter) -> Any:
            return replace(drafter, num_draft=k)

        found.append(Candidate(name, longest, resize, "network"))
    if not found:
        raise ValueError("nothing to try: name drafters, a draft model or a head")
    return found


class Advisor:
    """Takes the measurements in turn."""

    def __init__(self, options: Options, console: Console):
        self.options, self.console = options, console
        self.target = specjax.load_target(options.target)
        if options.context > self.target.context_length:
            raise ValueError(
                f"context must be at most the target's {self.target.context_length}, got {options.context}"
            )
        self.sampling(options.temperature)  # refuses what is no setting
        self.tokenizer = specjax.load_tokenizer(options.target)
        self.workloads = encode_workloads(options.prompts, self.tokenizer, options.limit)
        check_room(self.workloads, options.max_new_tokens, self.target.context_length)
        self.prompts = [p for prompts in self.workloads.values() for p in prompts]
        self.candidates = find_candidates(options, self.target)
        self.longest = max(c.longest for c in self.candidates)
        # one for all that is measured: the curve is then that of the runs, and every drafter is compiled once
        longest = max(map(len, self.prompts))
        self.slots = bucket(needed_slots(longest, options.max_new_tokens, self.longest))

    def sampling(self, temperature: float) -> specjax.Sampling:
        return specjax.Sampling(
            temperature=temperature, top_k=self.options.top_k, top_p=self.options.top_p
        )

    def run(
        self,
        parts: Mapping[str, list[list[list[int]]]],
        drafters: dict[str, Any],
        temperature: float,
        description: str,
    ) -> dict[str, dict[str, list[specjax.Generation]]]:
        """Batches of prompts, by workload, with every drafter in turn; by workload and drafter.

        All of them once more where anything was compiled: a program's branches are set up when they first run, each at
        the price of many tokens, and a prompt may be the first to need one.
        """
        options, sampling = self.options, self.sampling(temperature)

        def sweep() -> dict[str, dict[str, list[specjax.Generation]]]:
            return {
                workload: decode_in_turn(
                    self.target,
                    batches,
                    drafters,
                    sampling=sampling,
                    max_new_tokens=options.max_new_tokens,
                    stop_token_ids=self.tokenizer.stop_token_ids,
                    console=self.console,
                    description=f"{description} {workload}",
                    slots=self.slots,
                )
                for workload, batches in parts.items()
            }

        with count_compilations() as compiled:
            outs = sweep()
        return sweep() if compiled else outs

    def measure_curve(self, batch: int) -> np.ndarray:
        """Seconds of a target pass of every width of the ladder, at a batch size."""
        widths, repeats = ladder(self.longest), self.options.repeats
        return measure_passes(self.target, widths, batch=batch, slots=self.slots, repeats=repeats)

    def round_costs(self, seconds: np.ndarray, batch: int) -> specjax.RoundCosts:
        """The verify curve in passes over one token."""
        return specjax.RoundCosts(ladder(self.longest), tuple(seconds), batch=batch)

    def measure_drafting(
        self, candidate: Candidate, costs: specjax.RoundCosts
    ) -> tuple[float, float]:
        """What this candidate's proposals cost at the batch size of a curve: fixed and per token."""
        counts = (
            sorted({1, candidate.longest}) if candidate.kind == "network" else [candidate.longest]
        )
        spent = [
            measure_draft_cost(
                self.target,
                candidate.make(k, costs),
                min(self.prompts, key=len),
                batch=costs.batch,
                max_new_tokens=self.options.max_new_tokens,
                slots=self.slots,
                sampling=self.sampling(self.options.temperature),
                repeats=self.options.repeats,
            )
            for k in counts
        ]
        each = max((spent[-1] - spent[0]) / max(counts[-1] - counts[0], 1), 0.0)
        return max(spent[-1] - each * counts[-1], 0.0), each

    def try_out(self, costs: specjax.RoundCosts, temperature: float) -> list[Trial]:
        """Every candidate on every prompt, beside plain decoding."""
        drafters = {"plain": None} | {c.name: c.make(c.longest, costs) for c in self.candidates}
        single = {w: [[p] for p in prompts] for w, prompts in self.workloads.items()}
        outs = self.run(single, drafters, temperature, f"T={temperature:g}")
        joined = {name: [out for w in outs.values() for out in w[name]] for name in drafters}
        return [
            Trial(
                candidate=c,
                temperature=temperature,
                profile=c.profile(joined[c.name]),
                by_workload={w: c.profile(o[c.name]) for w, o in outs.items()},
                measured=tokens_per_second(joined[c.name]) / tokens_per_second(joined["plain"]),
            )
            for c in self.candidates
        ]

    def check(self, choice: Choice, costs: specjax.RoundCosts) -> Check:
        """The choice against plain decoding, which is run twice to show the machine's own scatter."""
        candidate, size = choice.trial.candidate, costs.batch
        setting = candidate.make(choice.prediction.num_draft, costs)
        drafters = {"plain": None, "setting": setting, "again": None}
        parts = self.workloads if size == 1 else {"": self.prompts}
        batches = {}
        for workload, prompts in parts.items():
            filled = [prompts[i % len(prompts)] for i in range(-(-len(prompts) // size) * size)]
            batches[workload] = [filled[i : i + size] for i in range(0, len(filled), size)]
        outs = self.run(batches, drafters, choice.trial.temperature, f"checking at batch {size}")
        joined = {name: [out for w in outs.values() for out in w[name]] for name in drafters}
        speeds = {name: tokens_per_second(runs) for name, runs in joined.items()}
        return Check(
            speed_up=speeds["setting"] / speeds["plain"],
            by_workload={
                w: tokens_per_second(o["setting"]) / tokens_per_second(o["plain"])
                for w, o in outs.items()
            }
            if size == 1
            else {},
            scatter=speeds["again"] / speeds["plain"] - 1,
            plain=speeds["plain"],
        )


def advise(advisor: Advisor) -> Advice:
    """Measures everything: costs, acceptance, and the best setting itself."""
    options, say = advisor.options, advisor.console.print
    say("the verify curve ...", style="dim")
    before = {batch: advisor.measure_curve(batch) for batch in {*options.batch, 1}}
    say("what drafting costs ...", style="dim")
    curves = {batch: advisor.round_costs(seconds, batch) for batch, seconds in before.items()}
    drafting = {
        batch: {c.name: advisor.measure_drafting(c, curves[batch]) for c in advisor.candidates}
        for batch in options.batch
    }
    say("every drafter on every prompt, a shape's first run compiles ...", style="dim")
    trials = {t: advisor.try_out(curves[1], t) for t in sorted({0.0, options.temperature})}
    say("the verify curve again ...", style="dim")
    after = {batch: advisor.measure_curve(batch) for batch in options.batch}
    seconds = {batch: (before[batch] + after[batch]) / 2 for batch in options.batch}
    curves = {batch: advisor.round_costs(seconds[batch], batch) for batch in options.batch}
    costs = {
        batch: {name: replace(curves[batch], draft=draft) for name, draft in spent.items()}
        for batch, spent in drafting.items()
    }
    choices = {
        (t, batch): choose(rows, costs[batch]) for t, rows in trials.items() for batch in costs
    }
    memory = {}
    for batch in options.batch:
        at = options.temperature, batch
        choice, drafter, left = choices[at], None, list(trials[options.temperature])
        while choice.pays:  # where the best is refuted, the next one may still pay
            name = choice.trial.candidate.name
            say(f"{name} against plain decoding, batch {batch} ...", style="dim")
            choice = replace(choice, check=advisor.check(choice, costs[batch][name]))
            if choice.pays or choices[at].check is None:
                choices[at] = choice
            left.remove(choice.trial)
            if choice.pays or not left:
                break
            choice = choose(left, costs[batch])
        choice = choices[at]
        if choice.pays:
            drafter = choice.trial.candidate.make(choice.prediction.num_draft, curves[batch])
        memory[batch] = specjax.estimate_memory(
            advisor.target, drafter, batch=batch, context=options.context
        )
    return Advice(
        workloads={name: len(prompts) for name, prompts in advisor.workloads.items()},
        curves=curves,
        seconds={batch: float(spent[0]) for batch, spent in seconds.items()},
        costs=costs,
        trials=trials,
        choices=choices,
        memory=memory,
        drift={batch: _drift(before[batch], after[batch]) for batch in options.batch},
    )


def _drift(before: np.ndarray, after: np.ndarray) -> float:
    """The largest relative change of a curve's costs in passes over one token."""
    ratios = (after / after[0]) / (before / before[0])
    return float(np.max(np.maximum(ratios, 1 / ratios)) - 1)
