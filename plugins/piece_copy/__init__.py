"""Copies many small pieces of memory between addresses, of peers too, in one launch."""
