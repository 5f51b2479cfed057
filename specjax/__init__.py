"""Speculative decoding in JAX: draft, verify and accept in one jitted loop, following the target's distribution exactly."""

from specjax.advice import (
    AcceptanceProfile,
    Memory,
    Prediction,
    RoundCosts,
    break_even,
    estimate_memory,
    predict,
)
from specjax.batching import Completion, generate_stream, generate_to_file
from specjax.checkpoints import CheckpointError, Tokenizer, load_target, load_tokenizer
from specjax.checkpoints.head_export import save_head
from specjax.checkpoints.heads import load_head
from specjax.drafters.adaptive import Adaptive
from specjax.drafters.base import Drafter, NoDrafter, Proposal
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.eagle3 import Eagle3
from specjax.drafters.early_exit import EarlyExit
from specjax.drafters.guard import Guard
from specjax.drafters.heads import head_drafter
from specjax.drafters.hybrid import Hybrid
from specjax.drafters.mtp import MTP
from specjax.drafters.ngram import NGram
from specjax.drafters.p_eagle import PEagle
from specjax.drafters.suffix import Suffix
from specjax.drafters.translated import TranslatedModel, translate
from specjax.drafters.tree import StaticTree, TopKTree
from specjax.engines import EngineCommand, engine_commands
from specjax.generate import Generation, Piece, generate, stream
from specjax.models.transformer import Target, Transformer
from specjax.monitoring import Monitor
from specjax.sampling import Sampling
from specjax.statistics import Statistics
from specjax.verification import Verification

__all__ = [
    "MTP",
    "AcceptanceProfile",
    "Adaptive",
    "CheckpointError",
    "Completion",
    "DraftModel",
    "Drafter",
    "Eagle3",
    "EarlyExit",
    "EngineCommand",
    "Generation",
    "Guard",
    "Hybrid",
    "Memory",
    "Monitor",
    "NGram",
    "NoDrafter",
    "PEagle",
    "Piece",
    "Prediction",
    "Proposal",
    "RoundCosts",
    "Sampling",
    "StaticTree",
    "Statistics",
    "Suffix",
    "Target",
    "Tokenizer",
    "TopKTree",
    "Transformer",
    "TranslatedModel",
    "Verification",
    "break_even",
    "engine_commands",
    "estimate_memory",
    "generate",
    "generate_stream",
    "generate_to_file",
    "head_drafter",
    "load_head",
    "load_target",
    "load_tokenizer",
    "predict",
    "save_head",
    "stream",
    "translate",
]
