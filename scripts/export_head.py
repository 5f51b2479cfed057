"""Writes a head in the layout of another program.

python scripts/export_head.py --head runs/smollm2/head --target smollm2-135m-instruct --layout speculators --output out
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

import specjax
from specjax.checkpoints.head_export import Layout


@dataclass(frozen=True, kw_only=True)
class Options:
    """Export a head.

    Attributes:
      head: folder or hub id in any layout that specjax reads.
      target: the model it drafts for.
      output: folder to write.
      layout: `sglang` (SGLang, vLLM, TensorRT-LLM, SafeAILab, SpecForge), `speculators` (speculators, vLLM) or, for MTP
        modules, `deepseek`; by default the first or the last.
      dtype: of the written tensors.
      verifier: hub id of the target, for speculators' layout.
      num_draft: drafted tokens that speculators' layout proposes to servers; by default 7 of P-EAGLE's and 3 of others, if they
        were trained for that many.
      share_rows: leave out the vocabulary's rows where they are the target's own; specjax takes them from there.
    """

    head: str
    target: str
    output: Path
    layout: Layout | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    verifier: str | None = None
    num_draft: int | None = None
    share_rows: bool = False


def main(options: Options) -> None:
    target = specjax.load_target(options.target)
    head = specjax.load_head(options.head, target)
    specjax.save_head(
        head,
        options.output,
        options.layout,
        target=target,
        verifier=options.verifier,
        dtype=options.dtype,
        num_draft=options.num_draft,
        share_rows=options.share_rows,
    )
    print(f"{options.output}: {options.layout or 'usual'} layout, {options.dtype}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
