"""A complete tiny Hugging Face folder, model and tokenizer, made without any outside library's help."""

import json
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from specjax.checkpoints.huggingface import parse_config
from specjax.checkpoints.parts import parameter_parts

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_folder(folder: Path, seed: int = 0, **changes) -> Path:
    """Random weights of a two-layer Llama and a byte-level tokenizer with a ChatML template."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder = tokenizers.Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    encoder.train_from_iterator([Path(__file__).read_text()], trainer)
    encoder.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML})
    )
    raw = {
        "model_type": "llama",
        "vocab_size": encoder.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": 1,
    } | changes
    (folder / "config.json").write_text(json.dumps(raw))
    rng = np.random.default_rng(seed)
    shapes = {p.name: p.shape for ps in parameter_parts(parse_config(raw)).values() for p in ps}
    tensors = {
        name: (np.ones(shape) if len(shape) == 1 else rng.normal(0, 0.3, shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder
