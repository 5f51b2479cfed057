"""The same model run by other engines, for `benchmark.py`: transformers on torch, and llama.cpp.

A peer that is not installed is skipped by name, never replaced.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from specjax.checkpoints.gguf import GGUFFile
from specjax.checkpoints.sources import cache_dir, resolve

Engine = Callable[[list[int], int], tuple[list[int], float]]
"""From prompt and length to new token ids and the seconds each took once the prompt was read."""


def transformers_engine(source: str, threads: int) -> Engine:
    """Hugging Face transformers' `generate`, float32, on the same dequantised weights."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    file = GGUFFile(resolve(source))
    config = file.config()
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

    def run(prompt: list[int], count: int) -> tuple[list[int], float]:
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode():
            began = time.perf_counter()
            model.generate(ids, max_new_tokens=1, **options)
            first = time.perf_counter()
            out = model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options)
            ended = time.perf_counter()
        # the second call repeats the prompt's pass and first token: take them off
        seconds = (ended - first) - (first - began)
        return out[0, len(prompt) :].tolist(), seconds / (count - 1)

    return run


def float32_gguf(source: str) -> Path:
    """The built-in model dequantised into a float32 GGUF file in the cache folder; made once."""
    path = cache_dir() / "models" / f"{source}-f32.gguf"
    if path.is_file():
        return path
    reader = gguf.GGUFReader(resolve(source))
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
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


def llama_cpp_engine(source: str, threads: int) -> Engine:
    """llama.cpp through llama-cpp-python, float32 weights, as many threads."""
    import llama_cpp  # pyright: ignore[reportMissingImports] (optional)

    model = llama_cpp.Llama(
        str(float32_gguf(source)),
        n_ctx=2048,
        n_threads=threads,
        n_threads_batch=threads,
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


PEERS: dict[str, Callable[[str, int], Engine]] = {
    "transformers": transformers_engine,
    "llama.cpp F32": llama_cpp_engine,
}
