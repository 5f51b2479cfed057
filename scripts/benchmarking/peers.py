"""The same work done by other engines: transformers on torch, and llama.cpp.

Same weights, prompts, lengths and threads, greedily, in turn with specjax. A peer that cannot take part is skipped by name,
never replaced.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from rich.table import Table

import specjax
from benchmarking.workloads import first_difference
from specjax.checkpoints.gguf import GGUFFile
from specjax.checkpoints.sources import cache_dir, resolve

Engine = Callable[[list[int], int], tuple[list[int], float]]
"""From prompt and length to new token ids and the seconds that each took once the prompt was read."""


class CannotTakePart(Exception):
    """Why a peer is skipped."""


@dataclass(frozen=True)
class Entry:
    """What the engines work with.

    Attributes:
      source: of the target, as `specjax.load_target` has it.
      threads: for the engines that can be told.
      draft_model: source of a draft model; None is none.
      exit_layer: for drafting by the target's first layers; None is none.
    """

    source: str
    threads: int
    draft_model: str | None = None
    exit_layer: int | None = None


def specjax_engine(target: Any, drafter: Any) -> Engine:
    def run(prompt: list[int], count: int) -> tuple[list[int], float]:
        out = specjax.generate(target, [prompt], drafter=drafter, max_new_tokens=count)
        return out.tokens[0].tolist(), out.decode_seconds / count

    return run


def load_transformers(source: str) -> Any:
    """transformers' own model in float32: of a folder as it loads it, of a GGUF file with its dequantised weights."""
    import torch

    # by name: reading its thousand modules takes the type checker half a minute
    transformers: Any = import_module("transformers")

    path = resolve(source)
    if path.is_dir():
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    file = GGUFFile(path)
    config = file.config()
    if config.family != "llama":
        raise CannotTakePart(f"of GGUF files it is given Llamas alone, this is a {config.family}")
    settings = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.mlp_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context_length,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.ropes[0].theta},
        tie_word_embeddings=config.tied,
    )
    model: Any = transformers.LlamaForCausalLM(settings).eval()
    state = {name: torch.tensor(file.read(name).astype(np.float32)) for name in file.shapes}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"transformers' model does not fit: {missing}, {unexpected}")
    return model


class Transformers:
    """Hugging Face transformers' `generate`, plainly and with what it has to offer; one model for all."""

    def __init__(self, entry: Entry):
        import torch

        torch.set_num_threads(entry.threads)
        self.entry, self.model = entry, load_transformers(entry.source)
        self.model.generation_config.eos_token_id = None  # as many tokens as were asked for

    def engine(self, **options: Any) -> Engine:
        import torch

        greedy = {"do_sample": False, "pad_token_id": 0, **options}

        def generate(prompt: list[int], count: int) -> tuple[list[int], float]:
            ids = torch.tensor([prompt])
            given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": count, **greedy}
            began = time.perf_counter()
            with torch.inference_mode():
                out = self.model.generate(ids, **given)
            return out[0, len(prompt) :].tolist(), time.perf_counter() - began

        def run(prompt: list[int], count: int) -> tuple[list[int], float]:
            _, first = generate(prompt, 1)  # the prompt's pass and the first token
            tokens, seconds = generate(prompt, count)
            return tokens, (seconds - first) / (count - 1)

        return run

    def lookup(self) -> Engine:
        return self.engine(prompt_lookup_num_tokens=10)

    def assisted(self) -> Engine:
        if self.entry.draft_model is None:
            raise CannotTakePart("no --draft-model was given")
        return self.engine(assistant_model=load_transformers(self.entry.draft_model))

    def early_exit(self) -> Engine:
        if self.entry.exit_layer is None:
            raise CannotTakePart("no --exit-layer was given")
        return self.engine(assistant_early_exit=self.entry.exit_layer)


def gguf_file(source: str) -> Path:
    """The GGUF file that a source is."""
    path = resolve(source)
    if path.suffix != ".gguf":
        raise CannotTakePart(f"it reads GGUF files, not {path}")
    return path


def float32_gguf(source: str) -> Path:
    """A GGUF file's model dequantised into a float32 one in the cache folder; made once."""
    stored = gguf_file(source)
    place = f"{stored.resolve()} {stored.stat().st_size} {stored.stat().st_mtime_ns}"
    digest = hashlib.sha256(place.encode()).hexdigest()[:12]
    path = cache_dir() / "models" / f"{stored.stem}-{digest}-f32.gguf"
    if path.is_file():
        return path
    reader = gguf.GGUFReader(stored)
    part = path.with_suffix(".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(part, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, value = field.types[0], field.contents()
        if kind == gguf.GGUFValueType.ARRAY:
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, 0 if name == "general.file_type" else value, kind)
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        data = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, data.astype(np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(path)
    return path


def exit_code(function: Callable[..., Any], *arguments: Any) -> int | None:
    """Of a process of its own that calls the function; negative if a signal ended it."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def try_llama_cpp(entry: Entry, float32: bool, lookup: bool) -> None:
    load_llama_cpp(entry, float32, lookup)([1] * 64, 2)


def llama_cpp_engine(entry: Entry, *, float32: bool, lookup: bool) -> Engine:
    """llama.cpp, if it does not end the process that it runs in (as builds for other processors do)."""
    if find_spec("llama_cpp") is None:
        raise CannotTakePart("No module named 'llama_cpp'")
    if code := exit_code(try_llama_cpp, entry, float32, lookup):
        raise CannotTakePart(f"a process that tried it ended with exit code {code}")
    return load_llama_cpp(entry, float32, lookup)


def load_llama_cpp(entry: Entry, float32: bool, lookup: bool) -> Engine:
    """llama.cpp through llama-cpp-python, with float32 weights or the file's own, as many threads."""
    import llama_cpp  # pyright: ignore[reportMissingImports] (optional)
    from llama_cpp.llama_speculative import (  # pyright: ignore[reportMissingImports]
        LlamaPromptLookupDecoding,
    )

    model = llama_cpp.Llama(
        str((float32_gguf if float32 else gguf_file)(entry.source)),
        n_ctx=0,  # the model's own
        n_threads=entry.threads,
        n_threads_batch=entry.threads,
        # two drafts are what its documentation advises without a GPU
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=2) if lookup else None,
        verbose=False,
    )

    def run(prompt: list[int], count: int) -> tuple[list[int], float]:
        model.reset()
        tokens: list[int] = []
        began = 0.0
        for token in model.generate(prompt, temp=0.0):
            tokens.append(int(token))
            if len(tokens) == 1:
                began = time.perf_counter()
            if len(tokens) == count:
                break
        return tokens, (time.perf_counter() - began) / (count - 1)

    return run


def make_peers(entry: Entry) -> tuple[dict[str, Engine], dict[str, str]]:
    """The engines that can take part, and why the others cannot, by name."""
    loaded: dict[str, Transformers] = {}

    def transformers() -> Transformers:
        if not loaded:
            loaded["model"] = Transformers(entry)
        return loaded["model"]

    llama = partial(llama_cpp_engine, entry)
    makers: dict[str, Callable[[], Engine]] = {
        "transformers": lambda: transformers().engine(),
        "transformers, prompt lookup": lambda: transformers().lookup(),
        "transformers, assisted": lambda: transformers().assisted(),
        "transformers, early exit": lambda: transformers().early_exit(),
        "llama.cpp F32": partial(llama, float32=True, lookup=False),
        "llama.cpp F32, prompt lookup": partial(llama, float32=True, lookup=True),
        "llama.cpp as stored": partial(llama, float32=False, lookup=False),
        "llama.cpp as stored, prompt lookup": partial(llama, float32=False, lookup=True),
    }
    engines: dict[str, Engine] = {}
    skipped: dict[str, str] = {}
    for name, make in makers.items():
        try:
            engines[name] = make()
        # whatever keeps another engine from loading a model is a reason to go on without it
        except (CannotTakePart, ImportError, ValueError, RuntimeError, OSError) as reason:
            skipped[name] = str(reason).split("\n")[0]
    return engines, skipped


def measure_peers(
    own: Mapping[str, Engine],
    others: Mapping[str, Engine],
    prompts: Sequence[list[int]],
    count: int,
    repeats: int,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Every engine on every prompt in turn, `count` tokens each; our own first is what others are compared with.

    Returns:
      by engine: `tokens_per_second` over all prompts, of medians; `over_first`, times as fast as the first engine;
      `same_tokens`, how many of each prompt's tokens are the first engine's before one differs. Then the reasons of
      others that failed on the way and are left out.
    """
    engines, failed = {**own, **others}, {}
    times: dict[str, list[float]] = defaultdict(list)
    outputs: dict[str, list[list[int]]] = defaultdict(list)
    for prompt in prompts:
        spent: dict[str, list[float]] = defaultdict(list)
        for attempt in range(repeats + 1):  # the first warms up
            for name, engine in list(engines.items()):
                try:
                    tokens, seconds = engine(prompt, count)
                except Exception as reason:
                    if name in own:
                        raise
                    failed[name] = f"failed: {type(reason).__name__}: {reason}".split("\n")[0]
                    del engines[name]
                    continue
                if attempt == 0:
                    outputs[name].append(tokens)
                else:
                    spent[name].append(seconds)
        for name in engines:
            times[name].append(float(np.median(spent[name])))
    first = next(iter(engines))
    means = {name: float(np.mean(times[name])) for name in engines}
    result = {}
    for name, mean in means.items():
        places = [
            first_difference(np.asarray(a), np.asarray(b))
            for a, b in zip(outputs[name], outputs[first], strict=True)
        ]
        result[name] = {
            "tokens_per_second": 1 / mean,
            "over_first": means[first] / mean,
            "same_tokens": [count if place is None else place for place in places],
        }
    return result, failed


def peer_table(result: Mapping[str, Mapping[str, Any]], count: int, dtype: Any) -> Table:
    first = next(iter(result))
    title = f"The same work, batch 1, {count} tokens; specjax in {dtype}"
    table = Table("engine", "tokens/s", f"over {first}", "same tokens", title=title)
    for name, figures in result.items():
        same = " ".join(str(n) for n in figures["same_tokens"])
        table.add_row(
            name,
            f"{figures['tokens_per_second']:.1f}",
            f"{figures['over_first']:.2f}x",
            same,
        )
    return table
