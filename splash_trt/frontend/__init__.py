"""The frontend: the process that serves clients over HTTP, and exchanges the link's messages with rank 0."""
