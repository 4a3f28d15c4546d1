"""A load made to defeat the policy: it watches the layout, and turns into its opposite as soon as a switch is done.

It has two modes, few requests with long answers and many with short ones, and changes its mode after each switch: so
what the switch was made for has just ended. If there is no switch, it changes its mode after a while all the same.
"""

from __future__ import annotations

import numpy as np

from splash_trt.config import Layout
from splash_trt.simulate.traces import NOT_AFTER, Trace


class Adversary:
    """A Source. A closed loop: `few` clients with long answers, or `many` with short ones, send the next request when
    one ends.

    requests: how many in all. patience: how many each client sends before the mode changes without a switch. After a
    run, `trace` is what was sent, as a load that does not look at layouts: each request follows the one that it was
    sent at the end of, so that other layouts can be given the same work in the same order.
    """

    def __init__(
        self,
        seed: int,
        *,
        requests: int = 6000,
        few: int = 2,
        many: int = 512,
        prompt_tokens: int = 256,
        long_output: int = 1500,
        short_output: int = 200,
        patience: int = 16,
    ) -> None:
        rng = np.random.default_rng(seed)
        self._numbers = (
            f"requests={requests}, few={few}, many={many}, prompt_tokens={prompt_tokens}, long_output={long_output}, "
            f"short_output={short_output}, patience={patience}, seed={seed}"
        )
        self._requests = requests
        self._clients = {"few": few, "many": many}
        self._patience = patience
        self._outputs = {
            "few": np.maximum(1, rng.poisson(long_output, requests)),
            "many": np.maximum(1, rng.poisson(short_output, requests)),
        }
        self.prompt_tokens = np.maximum(1, rng.poisson(prompt_tokens, requests)).astype(np.int64)
        self.output_tokens = np.ones(requests, np.int64)
        self._arrival_s = np.zeros(requests)
        self._after = np.full(requests, NOT_AFTER)
        self._kind: list[str] = []  # of each request sent
        self._active = {"few": 0, "many": 0}
        self._mode = "many"  # since auto starts in the layout that serves few requests best
        self._sent = 0  # requests since the last change of mode
        self._layout: Layout | None = None
        self._ready: list[tuple[float, int]] = []
        self._last_end: tuple[int, float] | None = None
        self.flips = 0
        """Changes of mode that a switch brought about."""
        self._fill(0.0)

    @property
    def num_requests(self) -> int:
        return self._requests

    @property
    def max_output(self) -> int:
        return int(max(outputs.max() for outputs in self._outputs.values()))

    def next_s(self) -> float | None:
        return self._ready[0][0] if self._ready else None

    def due(self, now: float) -> list[tuple[float, int]]:
        arrived, self._ready = self._ready, []
        return arrived

    def ended(self, numbers: list[int], now: float) -> None:
        for number in numbers:
            self._active[self._kind[number]] -= 1
            self._last_end = (number, now)
            self._fill(now)

    def watch(self, layout: Layout, now: float) -> None:
        if self._layout is not None and layout is not self._layout:
            self.flips += 1
            self._turn()
            self._fill(now)
        self._layout = layout

    @property
    def trace(self) -> Trace:
        """The requests that have been sent, as a trace."""
        sent = len(self._kind)
        return Trace.open(
            "adversary",
            self._arrival_s[:sent],
            self.prompt_tokens[:sent],
            self.output_tokens[:sent],
            after=self._after[:sent],
            notes=(
                f"adversary: {self._numbers}",
                f"made against auto, which it watched: {self.flips} flips; the others got the same requests",
            ),
        )

    def _turn(self) -> None:
        self._mode = "many" if self._mode == "few" else "few"
        self._sent = 0

    def _fill(self, now: float) -> None:
        """Sends requests of the present mode until as many are under way as the mode has clients."""
        if self._sent >= self._patience * self._clients[self._mode]:
            self._turn()
        while self._active[self._mode] < self._clients[self._mode] and len(self._kind) < self._requests:
            number = len(self._kind)
            self._kind.append(self._mode)
            self._active[self._mode] += 1
            self._sent += 1
            self.output_tokens[number] = self._outputs[self._mode][number]
            if self._last_end is None:
                self._arrival_s[number] = now
            else:
                self._after[number] = self._last_end[0]
                self._arrival_s[number] = now - self._last_end[1]
            self._ready.append((now, number))
