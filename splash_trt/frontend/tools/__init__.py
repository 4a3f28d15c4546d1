"""Readers of tool calls in an answer's text, one file for each format; all of them are incremental."""
