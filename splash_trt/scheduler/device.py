"""What the cost model knows of the machine that ranks run on: a description, its origin, and nothing of any model.

Built-in descriptions, JSON files and calibration all give the same value (devices.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from splash_trt.config import MOST_MIGRATION_BYTES
from splash_trt.migration.budget import REFERENCE_STEP_S

KINDS = (
    "gemm", "experts", "decode", "prefill", "indexer", "elementwise", "collective", "operation", "step", "copies"
)  # fmt: skip
"""What a step's time is made of; each has a factor by which it is slower than the ideal that the figures allow. Of
collectives the factor concerns their bytes, not their latency; copies are what a switch moves in the background."""


BACKGROUND_SHARE = 0.035
"""Of the link, for copies in the background: 13 GB/s of an H200's 369 lengthened a memory-bound step by 0.35 %."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One rank's device and the links between ranks. Rates are what hardware can reach, factors what programs do."""

    name: str
    origin: str
    """Where the figures are from: documents, or who measured what, when and how."""
    memory_bytes: int
    """Of one rank; 0: unknown, the user says how much there is."""
    flops: dict[str, float]
    """Multiply-adds count two; by format of the operands, as in config.FORMATS."""
    memory_bytes_s: float
    """Read or written."""
    link_bytes_s: float
    """Between ranks, what one rank sends while it receives as much."""
    collective_s: float
    """A small collective among two ranks."""
    collective_hop_s: float
    """What every further rank adds."""
    operation_s: float
    """What an operation takes however little it does."""
    step_s: float
    """What a step takes however little it does, preparation and hand-over included."""
    concurrent_ranks: int | None = None
    """Ranks that really run at the same time when they share a machine's cores; None: all."""
    factors: dict[str, float] = field(default_factory=dict)
    """By KINDS; 1 where nothing is said."""
    expert_s: float = 0.0
    """What each touched expert adds, where experts run one after the other."""
    padded: bool = False
    """Attention computes every context to the longest one's length and masks, as the plain reference does."""
    provenance: dict[str, str | int | float] = field(default_factory=dict)
    """Of a calibration: machine, versions, commit, date, model, ranks, errors."""

    @property
    def run_on(self) -> str:
        """EngineConfig.run_on of ranks on such devices: only those on CPUs run the plain reference."""
        return "cpu" if self.padded else "gpu"

    @property
    def migration_bytes(self) -> int:
        """EngineConfig.migration_bytes that steps on this device hardly notice."""
        return min(max(1, round(BACKGROUND_SHARE * self.link_bytes_s * REFERENCE_STEP_S)), MOST_MIGRATION_BYTES)
