"""Adds a step's result to its requests: new tokens, log-probabilities, and which requests end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from splash_trt.plan import SAMPLE, Plan, StepResult
from splash_trt.request import FinishReason, TokenDelta, TokenLogprob
from splash_trt.scheduler.sequence import Sequence


def take_in(
    plan: Plan, sequences: list[Sequence], result: StepResult, end: Callable[[Sequence, FinishReason], str | None]
) -> list[TokenDelta]:
    """Returns what to tell each request. sequences: those of the plan's rows. end: called for each request that ends
    with this step; returns an error to tell its client, or None.

    Most rows bring one token to a request that goes on and wants nothing else: these take a fast path.
    """
    deltas: list[TokenDelta] = []
    step, errors, add = result.step, result.errors, deltas.append
    for sequence, token, begin, stop in _wanted(plan, sequences, result):
        if step <= sequence.void_through:
            continue
        known = sequence.tokens
        goes_on = sequence.first_total <= len(known) < sequence.plain_below and token not in sequence.stops
        if goes_on and not errors:
            known.append(token)
            add(TokenDelta(sequence.id, (token,)))
        else:
            add(_take(sequence, plan, result, begin, stop, end))
    return deltas


def _wanted(plan: Plan, sequences: list[Sequence], result: StepResult) -> Iterator[tuple[Sequence, int, int, int]]:
    """For every row with wanted positions [begin, end): (its sequence, the token at begin, begin, end)."""
    tokens, count = result.token.tolist(), len(plan.want_index)
    if count == plan.num_rows == plan.num_tokens:
        return zip(sequences, tokens, range(count), range(1, count + 1), strict=True)
    if count == 0:
        return iter(())
    row = plan.want_row
    ends = [*(np.flatnonzero(row[1:] != row[:-1]) + 1).tolist(), count]
    begins = [0, *ends[:-1]]
    rows = row[begins].tolist()
    return zip([sequences[r] for r in rows], [tokens[b] for b in begins], begins, ends, strict=True)


def _take(
    sequence: Sequence,
    plan: Plan,
    result: StepResult,
    begin: int,
    stop: int,
    end: Callable[[Sequence, FinishReason], str | None],
) -> TokenDelta:
    """Add wanted positions [begin, stop), all of one row, to their request; returns what to tell it."""
    p = sequence.request.sampling
    scores: list[TokenLogprob] = []
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    for i in range(begin, stop):
        token = int(result.token[i])
        if plan.want_target[i] != SAMPLE:
            scores.append(_logprob(result, i, p.prompt_logprobs or 0))
            sequence.reported += 1
            continue
        if i in result.errors:
            end(sequence, FinishReason.ERROR)
            return TokenDelta(sequence.id, (), (), tuple(scores), FinishReason.ERROR, result.errors[i])
        sequence.tokens.append(token)
        tokens = (token,)
        if p.logprobs is not None:
            logprobs = (_logprob(result, i, p.logprobs),)
    finish = sequence.ends_here() if tokens else None
    error = None if finish is None else end(sequence, finish)
    queued_s = sequence.queued_s if tokens and len(sequence.tokens) == sequence.first_total else None
    return TokenDelta(sequence.id, tokens, logprobs, tuple(scores), finish, error, queued_s)


def _logprob(result: StepResult, i: int, alternatives: int) -> TokenLogprob:
    ids = result.top_token[i, :alternatives].tolist()
    top = zip(ids, result.top_logprob[i, :alternatives].tolist(), strict=True)
    return TokenLogprob(int(result.token[i]), float(result.logprob[i]), tuple(top))
