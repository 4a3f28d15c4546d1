"""Messages for people that quote what they were given, however long that is."""

from __future__ import annotations


def shortened(message: str, *, most: int, end: int) -> str:
    """At most `most` characters of the message: a long one loses its middle, and keeps its first ones, which name the
    field, and its last `end`, which have the remedy."""
    if len(message) <= most:
        return message
    return f"{message[: most - end - 3]} … {message[-end:]}"
