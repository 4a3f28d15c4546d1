"""The process that speaks HTTP to clients, and the link's messages to rank 0."""
