"""How one step's room for prompt tokens is dealt out. Pure functions."""

from __future__ import annotations


def in_turn(need: list[int], room: int) -> list[int]:
    """Tokens for each prompt: the first gets what it needs, the next what that leaves."""
    tokens = []
    for wanted in need:
        tokens.append(min(wanted, room))
        room -= tokens[-1]
    return tokens


def spread(need: list[int], owner: list[int], room: int) -> list[int]:
    """Tokens for each prompt where each is computed on its owner alone, senior prompts first.

    Owners get even shares, and what one of them does not need goes to the others, so that no rank computes a prompt
    while others with prompts of their own wait. Within an owner prompts take theirs in turn. The first prompt of all
    gets at least one token.
    """
    demand: dict[int, int] = {}
    for rank, wanted in zip(owner, need, strict=True):
        demand[rank] = demand.get(rank, 0) + wanted
    shares = _even_shares(demand, room)
    tokens = []
    for rank, wanted in zip(owner, need, strict=True):
        tokens.append(min(wanted, shares[rank]))
        shares[rank] -= tokens[-1]
    return tokens


def _even_shares(demand: dict[int, int], room: int) -> dict[int, int]:
    """By owner, in the order of their most senior prompts: at most its demand, as even as can be, `room` together."""
    if room < len(demand):
        return {rank: int(place < room) for place, rank in enumerate(demand)}
    shares = dict.fromkeys(demand, 0)
    waiting = sorted(demand, key=lambda rank: demand[rank])
    for place, rank in enumerate(waiting):
        shares[rank] = min(demand[rank], room // (len(waiting) - place))
        room -= shares[rank]
    return shares
