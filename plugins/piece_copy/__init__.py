"""Copies many small pieces of memory between addresses, also those of peers' memory, in one launch."""
