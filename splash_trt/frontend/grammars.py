"""Grammars are compiled here before the engine is asked, so that it never sees one that does not compile."""

from __future__ import annotations

from splash_trt.frontend.background import BackgroundThreads
from splash_trt.frontend.errors import ApiError
from splash_trt.frontend.structured import Form
from splash_trt.link import Ready
from splash_trt.runtime.grammar import GrammarCompiler


class Grammars:
    """tokenizer: what tokenizer.json holds."""

    def __init__(self, tokenizer: bytes, background: BackgroundThreads) -> None:
        self._tokenizer = tokenizer
        self._background = background
        self._compiler: GrammarCompiler | None = None
        self._made_for: tuple[object, ...] = ()

    async def check(self, form: Form, ready: Ready) -> None:
        """ApiError, naming the field, for a grammar that does not compile or that nothing matches."""

        def check() -> None:
            self._compiler_for(ready).check(form.grammar)

        try:
            await self._background.run(check)
        except ValueError as error:
            what = str(error).partition(": ")[2]
            raise ApiError(f"{form.field}: {what}", param=form.field) from None

    def _compiler_for(self, ready: Ready) -> GrammarCompiler:
        """Made at its first use: a large vocabulary takes a second, and most servers never need it."""
        wanted = (ready.vocab_size, ready.eos_token_ids)
        if self._compiler is None or self._made_for != wanted:
            self._compiler, self._made_for = GrammarCompiler(self._tokenizer, *wanted), wanted
        return self._compiler
