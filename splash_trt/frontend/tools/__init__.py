"""Tool calls in the text of an answer: one file for each way of writing them, all incremental."""
