"""Text to token ids and back, and chat templates."""

import datetime
import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import numpy as np
import tokenizers

from specjax.checkpoints.sources import resolve
from specjax.checkpoints.weights import CheckpointError

Message = Mapping[str, Any]


class Tokenizer:
    """A tokenizer and its model's chat template.

    Attributes:
      stop_token_ids: tuple of ids after which the model's answers end.
      special_tokens: texts by name (`bos_token`, `eos_token`, ...), as chat templates know them.
      vocab_size: one past the largest id that has a text.
    """

    def __init__(
        self,
        encoder: tokenizers.Tokenizer,
        *,
        chat_templates: Mapping[str, str] | None = None,
        stop_token_ids: Sequence[int] = (),
        special_tokens: Mapping[str, str] | None = None,
    ):
        encoder.no_padding()
        encoder.no_truncation()
        self._encoder = encoder
        self._templates = dict(chat_templates or {})
        self.stop_token_ids = tuple(stop_token_ids)
        self.special_tokens = dict(special_tokens or {})
        self.vocab_size = max(encoder.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Special tokens written out in the text become those tokens, as in transformers.

        Args:
          text: any string of valid Unicode.
          add_special_tokens: whether to put the model's begin and end tokens around it.

        Raises:
          ValueError: not a string, or one with lone surrogates.
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a string, got {type(text).__name__}: {text!r:.100}")
        try:
            return self._encoder.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise ValueError(f"text must be valid Unicode, got {text!r:.100}") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids.

        Bytes that are no valid UTF-8, such as half a character, become U+FFFD. Ids without a text,
        such as the spare rows of a padded vocabulary, become nothing.

        Raises:
          ValueError: not a flat sequence of integers >= 0.
        """
        return self._encoder.decode(_id_list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self, *, skip_special_tokens: bool = False) -> "TextStream":
        """A decoder for tokens that arrive in pieces."""
        return TextStream(self._encoder, skip_special_tokens)

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables
    ) -> list[int]:
        """Token ids of a conversation in the model's own format, ready for the assistant's answer.

        For the arguments and errors see `render_chat`.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables
    ) -> str:
        """The text that the chat template makes of a conversation.

        Args:
          messages: mappings with `role` and mostly `content`; entries that are None are left out.
          add_generation_prompt: whether to open the assistant's turn.
          variables: passed on to the template (tools, documents, ...): plain data, as in JSON.

        Raises:
          ValueError: no template, malformed messages, or the template refused them.
        """
        template = self._template(with_tools=variables.get("tools") is not None)
        if (
            isinstance(messages, (str, Mapping))
            or not isinstance(messages, Sequence)
            or not messages
            or not all(isinstance(m, Mapping) and "role" in m for m in messages)
        ):
            raise ValueError(
                "messages must be a non-empty list of mappings with 'role' and 'content', "
                f"got {messages!r:.200}"
            )
        told = [{k: v for k, v in m.items() if v is not None} for m in messages]
        names = {"tools": None, "documents": None, **self.special_tokens, **_plain(variables)}
        names |= {"messages": _plain(told), "add_generation_prompt": add_generation_prompt}
        try:
            return _compile(template).render(names)
        except Exception as error:  # the template is foreign code: it may raise anything
            raise ValueError(f"the chat template refused these messages: {error}") from error

    def _template(self, with_tools: bool) -> str:
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        others = f" (only {', '.join(sorted(self._templates))})" if self._templates else ""
        raise ValueError(
            f"this tokenizer has no chat template{others}; use encode on a prompt instead"
        )

    def token_texts(self) -> list[str | None]:
        """The written form of every id; None where an id has none."""
        return [self._encoder.id_to_token(i) for i in range(self.vocab_size)]


class TextStream:
    """Text of tokens as they arrive: what `push` and `end` return, joined, is `decode` of them all.

    A character whose bytes are spread over tokens is held back until it is whole, so no piece holds
    a broken one unless the tokens do. (`tokenizers.decoders.DecodeStream` has no end, and raises or
    departs from `decode` where SentencePiece's byte tokens are no valid UTF-8.)
    """

    def __init__(self, encoder: tokenizers.Tokenizer, skip_special_tokens: bool):
        self._encoder = encoder
        added = encoder.get_added_tokens_decoder()
        self._skipped = {i for i, token in added.items() if token.special and skip_special_tokens}
        self._start()

    def _start(self) -> None:
        # Tokens whose text `_out` is out (`_done` of them, kept because what a decoder makes of a
        # token depends on those before it), then tokens whose text is held back.
        self._ids: list[int] = []
        self._done = 0
        self._out = ""
        self._open = False  # in a run of byte tokens

    def push(self, ids: Sequence[int]) -> str:
        """The text that these further tokens complete; it may be empty."""
        for i in _id_list(ids):
            token = self._encoder.id_to_token(i)
            if token is not None and i not in self._skipped:
                self._ids.append(i)
                # A run of byte tokens decodes as a whole, to characters or else to one U+FFFD per
                # byte, so nothing of it is certain before it has ended.
                self._open = re.fullmatch("<0x[0-9A-Fa-f]{2}>", token) is not None
        text = self._decode()
        if self._open or len(text) <= len(self._out) or text.endswith("\ufffd"):
            return ""
        new = text[len(self._out) :]
        self._ids = self._ids[self._done :]
        self._done = len(self._ids)
        self._out = self._decode()
        return new

    def end(self) -> str:
        """The text still held back. The stream is as new afterwards."""
        rest = self._decode()[len(self._out) :]
        self._start()
        return rest

    def _decode(self) -> str:
        return self._encoder.decode(self._ids, skip_special_tokens=False)


def _id_list(ids: Sequence[int]) -> list[int]:
    array = np.asarray(ids)
    if array.size and (
        array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= 1 << 32
    ):
        raise ValueError(f"ids must be a flat sequence of token ids >= 0, got {ids!r:.100}")
    return array.reshape(-1).tolist()


def _plain(data: Any) -> Any:
    """A copy in plain types, so that a template meets no object whose methods could do harm."""

    def mapping(x):
        if isinstance(x, Mapping):
            return dict(x)
        raise TypeError(f"got {type(x).__name__}")

    try:
        return json.loads(json.dumps(data, default=mapping))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            "messages and template variables must hold strings, numbers, lists and mappings only: "
            f"{error}"
        ) from error


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    """A template as transformers sets it up.

    Templates come with downloaded files: they run in a sandbox that can call and change nothing
    outside. Time and memory are not bounded.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    # Jinja's own tojson escapes HTML
    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training masks; here it is but a scope."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def load_tokenizer(source: str | os.PathLike) -> Tokenizer:
    """The tokenizer of a source that `load_target` accepts.

    A folder's tokenizer.json is followed as it is written; transformers builds some named classes
    (LlamaTokenizer, GemmaTokenizer) anew from its vocabulary alone. `add_bos_token` and
    `add_eos_token` of tokenizer_config.json have no effect beside it, as in transformers 5.

    Raises:
      FileNotFoundError: unknown source.
      CheckpointError: no tokenizer there, or one that is damaged or of a kind not supported.
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
    if "added_tokens_decoder" not in settings:  # before 2024, tokens were named in a file apart
        settings |= _json(folder / "special_tokens_map.json")
    special = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            special[name] = text
    try:
        _declare(encoder, settings, special)
        templates = _chat_templates(folder, settings)
    except (TypeError, ValueError, KeyError, AttributeError, OSError) as error:
        raise CheckpointError(
            f"{folder}: tokenizer_config.json or the chat template cannot be read: {error!r}"
        ) from error
    return Tokenizer(
        encoder,
        chat_templates=templates,
        stop_token_ids=_stop_tokens(folder, encoder, special.get("eos_token")),
        special_tokens=special,
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _declare(
    encoder: tokenizers.Tokenizer, settings: dict[str, Any], special: dict[str, str]
) -> None:
    """Adds what tokenizer_config.json declares beyond tokenizer.json's added tokens."""
    known = list(encoder.get_added_tokens_decoder().values())
    declared = settings.get("added_tokens_decoder") or {}
    tokens = [tokenizers.AddedToken(**declared[i]) for i in sorted(declared, key=int)]
    written = {repr(token) for token in known}
    new = [token for token in tokens if repr(token) not in written]
    names = {token.content for token in [*known, *new]}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    extra = extra.values() if isinstance(extra, Mapping) else extra
    texts = [t["content"] if isinstance(t, Mapping) else t for t in (*special.values(), *extra)]
    new += [
        tokenizers.AddedToken(text, special=True)
        for text in dict.fromkeys(texts)
        if text not in names
    ]
    encoder.add_tokens(new)
    encoder.encode_special_tokens = bool(settings.get("split_special_tokens"))


def _chat_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Templates by name; files of their own hide those of tokenizer_config.json."""
    files = {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    template = settings.get("chat_template")
    if isinstance(template, list):
        return {t["name"]: t["template"] for t in template}
    return {} if template is None else {"default": template}


def _stop_tokens(
    folder: Path, encoder: tokenizers.Tokenizer, eos_token: str | None
) -> tuple[int, ...]:
    """Ends of generation_config.json, else of config.json, and the tokenizer's own."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        eos = _json(folder / name).get("eos_token_id")
        if eos is not None:
            ids += eos if isinstance(eos, list) else [eos]
            break
    if bad := [i for i in ids if type(i) is not int]:
        raise CheckpointError(f"{folder / name}: eos_token_id must be whole numbers, got {bad}")
    own = encoder.token_to_id(eos_token) if eos_token else None
    if own is not None:
        ids.append(own)
    return tuple(dict.fromkeys(ids))
