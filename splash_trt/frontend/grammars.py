"""Compiles grammars in the frontend first, so that the engine never gets one that does not compile."""

from __future__ import annotations

from splash_trt.frontend.background import BackgroundThreads
from splash_trt.frontend.errors import ApiError
from splash_trt.frontend.structured import Form
from splash_trt.link import Ready
from splash_trt.runtime.grammar import GrammarCompiler


class Grammars:
    """Checks grammars. tokenizer: the bytes of tokenizer.json."""

    def __init__(self, tokenizer: bytes, background: BackgroundThreads) -> None:
        self._tokenizer = tokenizer
        self._background = background
        self._compiler: GrammarCompiler | None = None
        self._made_for: tuple[object, ...] = ()

    async def check(self, form: Form, ready: Ready) -> None:
        """Raises ApiError, naming the field, for a grammar that does not compile or that nothing can match."""

        def check() -> None:
            self._compiler_for(ready).check(form.grammar)

        try:
            await self._background.run(check)
        except ValueError as error:
            what = str(error).partition(": ")[2]
            raise ApiError(f"{form.field}: {what}", param=form.field) from None

    def _compiler_for(self, ready: Ready) -> GrammarCompiler:
        """The compiler, made at its first use: that takes a second for a large vocabulary, and few servers need it."""
        wanted = (ready.vocab_size, ready.eos_token_ids)
        if self._compiler is None or self._made_for != wanted:
            self._compiler, self._made_for = GrammarCompiler(self._tokenizer, *wanted), wanted
        return self._compiler
