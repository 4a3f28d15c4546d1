"""Times of one step: per layout, number of ranks, batch and context."""
