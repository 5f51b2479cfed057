"""What a decoder-only transformer is made of, as data.

A model family is a value of `TransformerConfig`, never a class of its own. The configs are frozen and hashable: they are the
static part of a `Transformer` pytree, so two models of equal config share one compiled program.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding: base frequency and how it is stretched to longer contexts.

    Attributes:
      theta: base of the geometric series of wavelengths.
      kind: `default` | `linear` (positions divided by `factor`) | `llama3` (low frequencies divided by `factor`, a smooth
        step between) | `yarn` (arXiv 2309.00071) | `factors` (each frequency divided by its own entry of `factors`, which
        is how GGUF files carry Llama 3's scaling).
      factor: stretch of the context.
      low_freq_factor, high_freq_factor: edges of llama3's step, in turns over `original_length`.
      original_length: context length before stretching, in tokens (llama3, yarn).
      beta_fast, beta_slow: edges of yarn's ramp, in turns over `original_length`.
      truncate: whether yarn rounds its ramp's edges outwards to whole dimensions (gpt-oss does not).
      attention_factor: multiplies cos and sin; None means yarn's 0.1 ln(factor) + 1, and 1 for the other kinds.
      mscale, mscale_all_dim: DeepSeek's variant of yarn's attention factor; 0 when absent.
      factors: one divisor per frequency (kind `factors`).
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    factors: tuple[float, ...] = ()

    def frequencies(self, rotary_dim: int) -> np.ndarray:
        """Angular step per position, float32[rotary_dim / 2], highest frequency first."""
        exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / rotary_dim
        base = (1.0 / np.float32(self.theta) ** exponents).astype(np.float32)
        match self.kind:
            case "default":
                return base
            case "linear":
                return base / np.float32(self.factor)
            case "factors":
                return base / np.asarray(self.factors, np.float32)
            case "llama3":
                turns = self.original_length * base / (2 * math.pi)
                span = self.high_freq_factor - self.low_freq_factor
                keep = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
                return (base * (keep + (1 - keep) / self.factor)).astype(np.float32)
            case "yarn":
                return self._yarn(base, rotary_dim)

    def _yarn(self, base: np.ndarray, rotary_dim: int) -> np.ndarray:
        def dimension(turns: float) -> float:
            """Index of the frequency that makes `turns` turns over the original context."""
            ratio = self.original_length / (turns * 2 * math.pi)
            return rotary_dim * math.log(ratio) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low == high:
            high += 0.001  # the ramp is a step: avoid 0/0
        stretched = np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0.0, 1.0)
        return (base * (1 - stretched) + base / self.factor * stretched).astype(np.float32)

    @property
    def amplitude(self) -> float:
        """Factor on cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind != "yarn":
            return 1.0

        def scale(m: float) -> float:
            return 0.1 * m * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale(1.0)


@dataclass(frozen=True, kw_only=True)
class ClampedSwiGLU:
    """gpt-oss's activation (arXiv 2508.10925): gate * sigmoid(alpha * gate) * (up + 1) of clamped gate and up.

    Attributes:
      limit: the gate is clamped from above, up from both sides.
      alpha: slope of the sigmoid.
    """

    limit: float = 7.0
    alpha: float = 1.702


Activation = Literal["silu", "gelu_tanh"] | ClampedSwiGLU


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of all heads are made from one
    narrow vector per token, and one rotated key is common to all heads.

    Attributes:
      query_rank: width of the vector that queries are made from; None makes them from the stream.
      rank: width of the vector that keys and values are made from.
      content_dim: dimensions of a query or key that are not rotated; the others, `rotary_dim` of them, follow.
      value_dim: of a head's values.
      interleaved: rotated dimensions are paired neighbour with neighbour, not half against half.
    """

    query_rank: int | None
    rank: int
    content_dim: int
    value_dim: int
    interleaved: bool = True


@dataclass(frozen=True, kw_only=True)
class SigmoidRouter:
    """DeepSeek-V3's choice of experts (arXiv 2412.19437, section 2.1.2): a token's weights are sigmoids; a learned bias
    decides about the choice alone.

    Attributes:
      groups: experts stand in so many groups of equal size,
      kept: of which these many are chosen from, by the sum of their two best.
    """

    groups: int = 1
    kept: int = 1


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What may differ from layer to layer.

    Attributes:
      window: a query sees itself and the `window - 1` positions before it; None sees everything before it.
      rope: index into `TransformerConfig.ropes`.
      experts: whether the feed-forward part is a mixture of experts.
    """

    window: int | None = None
    rope: int = 0
    experts: bool = False


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Shapes and switches of one decoder-only transformer.

    Attributes:
      family: the `model_type` that the checkpoint calls itself, for messages and exports.
      vocab_size: rows of the embedding, padding rows included (V).
      hidden_size: width of the residual stream (D).
      mlp_size: width of a dense feed-forward part.
      num_heads, num_kv_heads, head_dim: query heads, key/value heads (a divisor), width of each.
      layers: one `LayerConfig` per layer.
      ropes: the distinct rotary embeddings in use.
      context_length: longest sequence that the model was made for, in tokens.
      rotary_dim: how many of a head's dimensions are rotated, the first ones.
      tied: logits use the embedding's rows.
      qkv_bias, output_bias, mlp_bias: which projections carry biases.
      qk_norm: RMS norm over each head's query and key before the rotation.
      sinks: one learned logit per query head joins each softmax and takes no value.
      post_norms: Gemma's extra norms on what attention and feed-forward add to the stream.
      activation: of the gated feed-forward parts, experts included.
      embedding_scale: factor on embeddings (Gemma: sqrt(D)).
      attention_scale: factor on query-key products; None means head_dim ** -0.5.
      attention_softcap, logit_softcap: c * tanh(x / c); None is off.
      num_experts, experts_per_token, expert_size: the mixture's shape.
      normalize_experts: whether the chosen router probabilities are scaled to sum to 1.
      router: how experts are chosen; None is by the softmax over all of them.
      expert_factor: on what the chosen experts give together.
      shared_expert_size: width of one more expert that every token has; 0 is none.
      shared_expert_gate: that one counts by the sigmoid of a projection of what it reads (Qwen3-Next).
      output_gate: what attention gathers is multiplied by the sigmoid of a projection of what it reads (Qwen3.5).
      norm_offset: what files leave out of a norm's weight (Gemma, Qwen3.5: 1).
      expert_bias: whether router and experts carry biases.
      latent: attention by compressed keys and values; `head_dim` is then that of queries and keys.
    """

    family: str
    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[Rope, ...] = (Rope(),)
    context_length: int = 2048
    rotary_dim: int | None = None
    norm_eps: float = 1e-5
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    post_norms: bool = False
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalize_experts: bool = True
    router: SigmoidRouter | None = None
    expert_factor: float = 1.0
    shared_expert_size: int = 0
    shared_expert_gate: bool = False
    output_gate: bool = False
    norm_offset: float = 0.0
    expert_bias: bool = False
    latent: Latent | None = None

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.rotary % 2 or self.rotary > self.head_dim:
            raise ValueError(
                f"rotary_dim must be even and at most head_dim {self.head_dim}, got {self.rotary}"
            )
        sparse = any(layer.experts for layer in self.layers)
        if sparse and not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                "experts_per_token must be at least 1 and at most num_experts, "
                f"got {self.experts_per_token} and {self.num_experts}"
            )
        if sparse and self.router is not None:
            groups, kept = self.router.groups, self.router.kept
            size = self.num_experts // max(groups, 1)
            if groups * size != self.num_experts or size < 2 or not 1 <= kept <= groups:
                raise ValueError(
                    "groups of experts must be of equal size, at least 2, and some of them kept; "
                    f"got {groups} for {self.num_experts} experts, {kept} kept"
                )
            if kept * size < self.experts_per_token:
                raise ValueError(
                    f"the groups that are kept have {kept * size} experts, fewer than experts_per_token {self.experts_per_token}"
                )
        if self.latent is not None:
            self._check_latent(self.latent)

    def _check_latent(self, latent: Latent) -> None:
        if latent.content_dim + self.rotary != self.head_dim or self.num_kv_heads != self.num_heads:
            raise ValueError(
                "latent attention: head_dim must be content_dim and rotary_dim together and num_kv_heads num_heads; got "
                f"{self.head_dim} for {latent.content_dim} and {self.rotary}, {self.num_kv_heads} and {self.num_heads} heads"
            )
        if not 1 <= latent.value_dim <= self.head_dim:  # values are kept as wide as keys
            raise ValueError(
                f"latent attention: value_dim must be in 1..head_dim {self.head_dim}, got {latent.value_dim}"
            )
        if self.qk_norm or self.qkv_bias or self.output_bias or self.output_gate or self.sinks:
            raise ValueError(
                "latent attention has no biases (attention_bias), norms of queries and keys, output gate or sinks here"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def rotary(self) -> int:
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
