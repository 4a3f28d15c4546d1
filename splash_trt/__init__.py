"""Splash-TRT serves latent-attention models under four attention layouts and switches between them in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from splash_trt.version import __version__

if TYPE_CHECKING:
    from splash_trt.llm import LLM
    from splash_trt.request import Grammar, GrammarKind, SamplingParams

__all__ = ["LLM", "Grammar", "GrammarKind", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Loads LLM and the types of its arguments at their first use: `import splash_trt` alone does not import torch."""
    if name == "LLM":
        from splash_trt.llm import LLM

        return LLM
    if name in ("Grammar", "GrammarKind", "SamplingParams"):
        from splash_trt import request

        return getattr(request, name)
    raise AttributeError(f"module 'splash_trt' has no attribute {name!r}")
