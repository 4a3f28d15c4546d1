"""What the demo asks the server: a burst of short requests that ends in a few long ones, then one long prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Openings in the manner of what the model was trained on; written for this demo.
OPENINGS = (
    "And it came to pass in the evening of that day, that",
    "And he lifted up his voice, and said unto the people,",
    "Now these are the names of the captains:",
    "Then said the woman unto the stranger,",
    "The words of the wise are",
    "Hear, O my son, and",
    "ORLANDO.\nI saw her at the gate, and",
    "JULIET.\nTell me, good nurse,",
    "MACBETH.\nWho comes there? The night is",
    "KING HENRY.\nBring hither the letter, and let",
    "FALSTAFF.\nA cup of wine, and then",
    "Scene II. A street before the house.\n\n",
    "When summer nights are cold, my love",
    "So through the dark the angel",
    "If thou wert honest, thou",
    "Of all the ships that sailed,",
)
SPEAKERS = ("Hamlet", "Falstaff", "Portia", "Romeo", "Lady Macbeth", "King Lear", "Rosalind", "Iago")

NUM_SHORT = 40
SHORT_TOKENS = (56, 80)  # fewest and most of a short answer
CHAT_TOKENS = 72
NUM_LONG = 3
LONG_TOKENS = 208
LONG_PROMPT_TOKENS = 3000
LAST_TOKENS = 144
SAMPLED = 0.7  # temperature; every third request is greedy


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request. speaker: who shall speak, for the chat API; else `prompt` is a text or token ids."""

    name: str
    prompt: str | tuple[int, ...] = ""
    speaker: str | None = None
    max_tokens: int
    temperature: float
    seed: int

    @property
    def path(self) -> str:
        return "/v1/completions" if self.speaker is None else "/v1/chat/completions"

    def body(self) -> dict[str, object]:
        """The request as JSON for `path`."""
        about: dict[str, object] = {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}
        # top_p as in the check: else the server takes what the model's generation_config.json says.
        about |= {"top_p": 1.0, "stream": True, "return_token_ids": True}
        if self.speaker is not None:
            return {"messages": [{"role": "user", "content": self.speaker}], **about}
        return {"prompt": self.prompt if isinstance(self.prompt, str) else list(self.prompt), **about}


def burst() -> list[Ask]:
    """Short requests, some of them turns of a conversation, then the few that go on when those are done."""
    low, high = SHORT_TOKENS
    asks = [
        Ask(
            name=f"short {i + 1}",
            prompt=OPENINGS[i % len(OPENINGS)],
            max_tokens=low + (high - low) * i // (NUM_SHORT - 1),
            temperature=0.0 if i % 3 == 0 else SAMPLED,
            seed=i,
        )
        for i in range(NUM_SHORT)
    ]
    asks += [
        Ask(name=f"chat {name}", speaker=name, max_tokens=CHAT_TOKENS, temperature=SAMPLED, seed=100 + i)
        for i, name in enumerate(SPEAKERS)
    ]
    asks += [
        Ask(name=f"long {i + 1}", prompt=OPENINGS[i], max_tokens=LONG_TOKENS, temperature=SAMPLED, seed=200 + i)
        for i in range(NUM_LONG)
    ]
    return asks


def long_prompt(answers: Sequence[Sequence[int]]) -> Ask:
    """One prompt of LONG_PROMPT_TOKENS ids: what the model has said so far, end to end, repeated where too short."""
    said = [token for answer in answers for token in answer]
    if not said:
        raise ValueError("answers: there is not one token to make a long prompt of")
    ids = (said * (LONG_PROMPT_TOKENS // len(said) + 1))[:LONG_PROMPT_TOKENS]
    return Ask(name="long prompt", prompt=tuple(ids), max_tokens=LAST_TOKENS, temperature=0.0, seed=300)
