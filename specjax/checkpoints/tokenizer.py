"""Text to token ids and back, and chat templates."""

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from specjax.checkpoints.sources import resolve
from specjax.checkpoints.weights import CheckpointError

Message = Mapping[str, Any]


class Tokenizer:
    """A tokenizer and its model's chat template.

    Attributes:
      stop_token_ids: tuple of ids after which the model's answers end.
      vocab_size: ids that have a text.
    """

    def __init__(
        self,
        encoder: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        stop_token_ids: Sequence[int] = (),
        special_tokens: Mapping[str, str] | None = None,
    ):
        encoder.no_padding()
        encoder.no_truncation()
        self._encoder = encoder
        self._template = chat_template
        self.stop_token_ids = tuple(stop_token_ids)
        self.special_tokens = dict(special_tokens or {})

    @property
    def vocab_size(self) -> int:
        return self._encoder.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written out in the text become those tokens, as in transformers."""
        return self._encoder.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._encoder.decode(
            [int(i) for i in ids], skip_special_tokens=skip_special_tokens
        )

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables
    ) -> list[int]:
        """Token ids of a conversation in the model's own chat format, ready for the assistant's answer."""
        text = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, **variables
        )
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables
    ) -> str:
        """The text that the chat template makes of a conversation.

        Args:
          messages: mappings with `role` and `content`.
          add_generation_prompt: whether to open the assistant's turn.
          variables: passed on to the template (tools, documents, ...).

        Raises:
          ValueError: no template, malformed messages, or the template refused them.
        """
        if self._template is None:
            raise ValueError("this tokenizer has no chat template; use encode on a prompt instead")
        if isinstance(messages, (str, Mapping)) or not all(
            isinstance(m, Mapping) and "role" in m for m in messages
        ):
            raise ValueError(
                f"messages must be a list of mappings with 'role' and 'content', got {messages!r:.200}"
            )
        try:
            return _environment().from_string(self._template).render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
                **variables,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refused these messages: {error}") from error

    def token_texts(self) -> list[str | None]:
        """The written form of every id; None where an id has none."""
        return [self._encoder.id_to_token(i) for i in range(self.vocab_size)]


def _environment() -> jinja2.Environment:
    """Templates come with downloaded files: they run in a sandbox that can call and change nothing outside."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training masks; here it is only looked through."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def load_tokenizer(source: str | os.PathLike) -> Tokenizer:
    """The tokenizer of a source that `load_target` accepts.

    Raises:
      FileNotFoundError: unknown source.
      CheckpointError: no tokenizer there, or one of a kind that is not supported.
    """
    path = resolve(source, weights=False)
    if path.suffix == ".gguf":
        from specjax.checkpoints.gguf_tokenizer import load_gguf_tokenizer

        return load_gguf_tokenizer(path)
    folder = path if path.is_dir() else path.parent
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"{folder}: expected tokenizer.json, found none. Convert other tokenizers with "
            "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        encoder = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exceptions
        raise CheckpointError(f"{file}: not a tokenizer: {error}") from error
    settings = _json(folder / "tokenizer_config.json")
    special = {
        name: value["content"] if isinstance(value, Mapping) else value
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (value := settings.get(name))
    }
    template = folder / "chat_template.jinja"
    chat = template.read_text() if template.is_file() else settings.get("chat_template")
    if isinstance(chat, list):  # several named templates
        chat = next((t["template"] for t in chat if t["name"] == "default"), None)
    return Tokenizer(
        encoder,
        chat_template=chat,
        stop_token_ids=_stop_tokens(folder, encoder, special.get("eos_token")),
        special_tokens=special,
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error


def _stop_tokens(
    folder: Path, encoder: tokenizers.Tokenizer, eos_token: str | None
) -> tuple[int, ...]:
    """End-of-sequence ids: of generation_config.json, else of config.json, and the tokenizer's own."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        eos = _json(folder / name).get("eos_token_id")
        if eos is not None:
            ids += eos if isinstance(eos, list) else [eos]
            break
    own = encoder.token_to_id(eos_token) if eos_token else None
    if own is not None:
        ids.append(own)
    return tuple(dict.fromkeys(int(i) for i in ids))
