"""A drafter's setting as command lines of other engines, with the flags of late 2026.

vLLM 0.32, SGLang 0.5.23, TensorRT-LLM 1.4 (PyTorch backend), llama.cpp of October 2026. None of them was run here: the flags
are those of their sources and documentation. Where an engine's method differs, the note says how.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specjax.drafters.adaptive import Adaptive
from specjax.drafters.base import Drafter, NoDrafter
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.eagle3 import Eagle3
from specjax.drafters.mtp import MTP
from specjax.drafters.ngram import NGram
from specjax.drafters.ngram_map import NGramMap
from specjax.drafters.ngram_mod import NGramMod
from specjax.drafters.p_eagle import PEagle
from specjax.drafters.suffix import Suffix

ENGINES = ("vLLM", "SGLang", "TensorRT-LLM", "llama.cpp")
SAME = "the same method"
INSIDE = f"{SAME}; the module must be part of the served model"


@dataclass(frozen=True)
class EngineCommand:
    """How an engine is told of a setting.

    Attributes:
      engine: one of `ENGINES`.
      command: for a POSIX shell; None where the engine has no equivalent.
      note: what differs.
    """

    engine: str
    command: str | None
    note: str


@dataclass(frozen=True)
class Names:
    """What commands call the models; placeholders in capitals stand for what only the user knows.

    Attributes:
      target, draft: hub ids.
      head: folder or hub id of a head as it is served; a built-in one must be exported first.
      target_file, draft_file: .gguf files.
    """

    target: str
    draft: str
    head: str
    target_file: str
    draft_file: str

    @classmethod
    def create(cls, target: str, draft: str | None, head: str | None) -> "Names":
        def hub(source: str | None, otherwise: str) -> str:
            local = source is None or Path(source).exists() or source.endswith(".gguf")
            known = not local and re.fullmatch(r"[\w.-]+/[\w.-]+", str(source))
            return str(source) if known else otherwise

        def file(source: str | None, otherwise: str) -> str:
            return source if source and source.endswith(".gguf") else otherwise

        return cls(
            target=hub(target, "ORG/TARGET"),
            draft=hub(draft, "ORG/DRAFT"),
            head=str(head) if head and Path(head).exists() else hub(head, "ORG/HEAD"),
            target_file=file(target, "TARGET.gguf"),
            draft_file=file(draft, "DRAFT.gguf"),
        )


def engine_commands(
    drafter: Drafter | None,
    *,
    target: str,
    draft: str | None = None,
    head: str | None = None,
    sampled: bool = False,
    num_draft: int | None = None,
    drafts_by_batch: Mapping[int, int] | None = None,
) -> list[EngineCommand]:
    """One entry for every engine.

    Args:
      drafter: the setting; None decodes plainly.
      target, draft, head: their sources; local models become placeholders for their hub ids.
      sampled: rows have a temperature, so drafts of networks are drawn from q and judged by min(1, p / q).
      num_draft: of an adaptive look-up, the fixed number of drafts that pays most; by default the most it would propose.
      drafts_by_batch: number of drafts that pays by batch size, 0 for none; a size that is not listed takes the next
        larger one's. Where an engine can be told, it is.
    """
    names, by_batch = (
        Names.create(target, draft, head),
        dict(sorted((drafts_by_batch or {}).items())),
    )
    if any(b < 1 or k < 0 for b, k in by_batch.items()):
        raise ValueError(
            f"drafts_by_batch must map batch sizes >= 1 to numbers of drafts >= 0, got {by_batch}"
        )
    inner, fixed = drafter, ""
    if isinstance(drafter, Adaptive):
        inner, fixed = drafter.drafter, "; drafts of a fixed number, not as many as pay"
        if num_draft is not None and isinstance(inner, NGram | Suffix):
            inner = replace(inner, num_draft=num_draft)
    found = []
    for engine, describe in zip(ENGINES, (_vllm, _sglang, _tensorrt, _llama), strict=True):
        command, note = describe(inner, names, sampled, by_batch)
        found.append(EngineCommand(engine, command, note + (fixed if command else "")))
    return found


Described = tuple[str | None, str]


def _vllm(d: Any, names: Names, sampled: bool, by_batch: dict[int, int]) -> Described:
    note = SAME
    config: dict[str, Any] = {}
    match d:
        case None | NoDrafter():
            return shlex.join(["vllm", "serve", names.target]), "plain"
        case NGram():
            config = {
                "method": "ngram",
                "prompt_lookup_min": _shortest(d, 1, sampled),
                "prompt_lookup_max": d.max_match,
            }
            note = "nearest: always as many drafts, and the earliest of equal matches"
        case NGramMap():
            config = {"method": "ngram", "prompt_lookup_min": d.n, "prompt_lookup_max": d.n}
            note = "nearest: look-up by search, no counts"
        case Suffix():
            config = {
                "method": "suffix",
                "suffix_decoding_max_tree_depth": d.max_depth,
                "suffix_decoding_max_spec_factor": d.spec_factor,
                "suffix_decoding_min_token_prob": d.min_probability,
            }
            note = f"{SAME}; it also remembers other requests' outputs"
        case DraftModel(tree=None):
            config = {"method": "draft_model", "model": names.draft}
        case MTP(tree=None):
            config, note = {"method": "mtp"}, INSIDE
        case Eagle3(tree=None):
            config = {"method": "eagle3", "model": names.head}
        case PEagle():
            config = {"method": "eagle3", "model": names.head, "parallel_drafting": True}
            if d.head.config.markov_rank:
                note = "nearest: without the head's Markov correction, which no server reads"
        case _:
            return None, "no equivalent"
    config["num_speculative_tokens"] = d.num_draft
    if sampled and isinstance(d, DraftModel | Eagle3):
        config["draft_sample_method"] = "probabilistic"
    if len(set(by_batch.values())) > 1:
        rows, start = [], 1
        for batch, count in by_batch.items():
            rows.append([start, batch, min(count, d.num_draft)])
            start = batch + 1
        config["num_speculative_tokens_per_batch_size"] = rows
    return shlex.join(
        ["vllm", "serve", names.target, "--speculative-config", json.dumps(config)]
    ), note


def _sglang(d: Any, names: Names, sampled: bool, by_batch: dict[int, int]) -> Described:
    start = ["python", "-m", "sglang.launch_server", "--model-path", names.target]

    def flags(algorithm: str, **values: Any) -> list[str]:
        line = ["--speculative-algorithm", algorithm]
        for name, value in values.items():
            line += [f"--speculative-{name.replace('_', '-')}", str(value)]
        return line

    note = SAME
    match d:
        case None | NoDrafter():
            return shlex.join(start), "plain"
        case NGram() | NGramMap() | NGramMod() | Suffix():
            longest = {NGram: "max_match", Suffix: "max_depth"}.get(type(d), "n")
            line = flags(
                "NGRAM",
                num_draft_tokens=d.num_draft + 1,
                ngram_max_bfs_breadth=1,
                ngram_max_trie_depth=getattr(d, longest) + d.num_draft,
                ngram_match_type="PROB" if isinstance(d, Suffix) else "BFS",
            )
            note = "nearest: a trie that all requests share, always as many drafts"
        case DraftModel(tree=None) | Eagle3(tree=None):
            chain = {
                "num_steps": d.num_draft,
                "eagle_topk": 1,
                "num_draft_tokens": d.num_draft + 1,
            }
            if isinstance(d, MTP):
                line, note = flags("NEXTN", **chain), INSIDE
            elif isinstance(d, Eagle3):
                line = flags("EAGLE3", draft_model_path=names.head, **chain)
            else:
                line = flags("STANDALONE", draft_model_path=names.draft, **chain)
            line += ["--speculative-use-rejection-sampling"] * sampled
        case _:
            return None, "no equivalent"
    return shlex.join([*start, *line]), note


def _tensorrt(d: Any, names: Names, sampled: bool, by_batch: dict[int, int]) -> Described:
    note = SAME
    config: dict[str, Any] = {}
    serve = ["trtllm-serve", names.target]
    match d:
        case None | NoDrafter():
            return shlex.join(serve), "plain"
        case NGram() | NGramMap() | NGramMod():
            config = {
                "decoding_type": "NGram",
                "max_matching_ngram_size": d.max_match if isinstance(d, NGram) else d.n,
                "is_use_oldest": isinstance(d, NGramMap),
                "is_public_pool": isinstance(d, NGramMod),
            }
            note = "nearest: always as many drafts"
        case Suffix():
            config = {"decoding_type": "SA"}
            note = "nearest: the longest match's continuation, not the most frequent"
        case DraftModel(tree=None):
            config = {"decoding_type": "Draft_Target", "speculative_model": names.draft}
        case MTP(tree=None):
            config, note = {"decoding_type": "MTP"}, INSIDE
        case Eagle3(tree=None):
            config = {"decoding_type": "Eagle3", "speculative_model": names.head}
        case _:
            return None, "no equivalent"
    config["max_draft_len"] = d.num_draft
    if sampled and isinstance(d, DraftModel | Eagle3):
        config["use_rejection_sampling"] = True
    # it drafts most at the smallest batch, and stops at one size for all larger ones
    counts = [min(k, d.num_draft) for k in by_batch.values()]
    paying = {b: k for b, k in zip(by_batch, counts, strict=True) if k}
    if len(set(counts)) > 1:
        if counts != sorted(counts, reverse=True):
            note += "; that larger batches want more drafts cannot be told"
        elif len(set(paying.values())) == 1:
            config["max_concurrency"] = max(paying)
        else:
            config["max_draft_len"] = counts[0]
            config["draft_len_schedule"] = {str(b): k for b, k in paying.items()}
    content = shlex.quote(json.dumps({"speculative_config": config}))
    start = shlex.join([*serve, "--config", "speculation.yaml"])
    return f"echo {content} > speculation.yaml && {start}", note


def _shortest(d: NGram, count: int, sampled: bool) -> int:
    """The shortest match after which as many drafts are proposed as `count`, or the longest there is."""
    matches = range(d.min_match, d.max_match + 1)
    return next((m for m in matches if d.proposal_length(m, sampled) >= count), d.max_match)


def _llama(d: Any, names: Names, sampled: bool, by_batch: dict[int, int]) -> Described:
    start = ["llama-server", "--model", names.target_file]

    def lookup(kind: str, **values: int) -> list[str]:
        line = ["--spec-type", f"ngram-{kind}"]
        for name, value in values.items():
            line += [f"--spec-ngram-{kind}-{name.replace('_', '-')}", str(value)]
        return line

    def network(kind: str, *file: str) -> list[str]:
        line = ["--spec-type", f"draft-{kind}", *(["--spec-draft-model", *file] if file else [])]
        return [*line, "--spec-draft-n-max", str(d.num_draft)]

    note = SAME
    match d:
        case None | NoDrafter():
            return shlex.join(start), "plain"
        case NGram():
            # llama.cpp drafts m tokens after every match of n: the shortest match that drafts as many here
            n = _shortest(d, d.num_draft, sampled)
            drafts = max(d.num_draft, n)  # it takes no fewer than it matches
            line = lookup("simple", size_n=n, size_m=drafts)
            if d.grow or drafts != d.num_draft:
                note = f"nearest: {drafts} drafts after a match of {n}, none after shorter ones"
        case NGramMap(continuations=1):
            line = lookup("map-k", size_n=d.n, size_m=d.m)
        case NGramMap():
            line = lookup("map-k4v", size_n=d.n, size_m=d.m, min_hits=d.min_hits)
        case NGramMod():
            line = lookup("mod", n_match=d.n, n_min=d.min_draft, n_max=d.max_draft)
        case DraftModel(tree=None):
            line, note = network("simple", names.draft_file), f"{SAME}; drafts are greedy"
        case MTP(tree=None):
            line, note = network("mtp"), f"{INSIDE}; drafts are greedy"
        case Eagle3(tree=None):
            line, note = network("eagle3", "HEAD.gguf"), f"{SAME}; drafts are greedy"
        case _:
            return None, "no equivalent"
    return shlex.join([*start, *line]), note
