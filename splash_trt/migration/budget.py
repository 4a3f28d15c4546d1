"""How many bytes a rank may send or receive for a switch in one step."""

from __future__ import annotations

from collections import deque
from statistics import median

KEPT = 64  # step times remembered
ENOUGH = 8  # of each kind before they are compared


class Budget:
    """Grows while steps that move something are hardly slower than those that do not, and shrinks when they are.

    start_bytes is the first budget; it stays between floor_bytes and ceiling_bytes. max_slowdown: 0.05 means 5 %.
    """

    def __init__(self, start_bytes: int, floor_bytes: int, ceiling_bytes: int, max_slowdown: float) -> None:
        self._floor, self._ceiling = floor_bytes, max(floor_bytes, ceiling_bytes)
        self._max_slowdown = max_slowdown
        self.bytes_per_step = min(max(start_bytes, floor_bytes), self._ceiling)
        self._moving: deque[float] = deque(maxlen=KEPT)
        self._plain: deque[float] = deque(maxlen=KEPT)

    def observe(self, seconds: float, moved: bool) -> None:
        """The time of one step that computed something."""
        (self._moving if moved else self._plain).append(seconds)
        if moved and len(self._moving) >= ENOUGH and len(self._plain) >= ENOUGH:
            too_slow = median(self._moving) > median(self._plain) * (1 + self._max_slowdown)
            scaled = self.bytes_per_step // 2 if too_slow else self.bytes_per_step * 5 // 4
            self.bytes_per_step = min(max(scaled, self._floor), self._ceiling)
            self._moving.clear()

    def begin(self) -> None:
        """A new switch: what earlier ones measured of moving steps no longer counts."""
        self._moving.clear()


class Allowance:
    """One step's budget, spent rank by rank: what each may still send and receive."""

    def __init__(self, bytes_per_step: int, num_ranks: int) -> None:
        self._sent = [bytes_per_step] * num_ranks
        self._received = [bytes_per_step] * num_ranks

    def room(self, source: int, targets: list[int], unit_bytes: int) -> int:
        """How many units of unit_bytes `source` may still send to every one of `targets`."""
        least = min((self._received[target] for target in targets), default=0)
        return min(self._sent[source] // len(targets), least) // unit_bytes if targets else 0

    def spend(self, source: int, targets: list[int], num_bytes: int) -> None:
        """num_bytes go from `source` to each of `targets`."""
        self._sent[source] -= num_bytes * len(targets)
        for target in targets:
            self._received[target] -= num_bytes

    @property
    def spent(self) -> bool:
        """Nobody may send or nobody may receive any more."""
        return max(self._sent) <= 0 or max(self._received) <= 0
