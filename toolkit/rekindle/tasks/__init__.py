"""The four anyio tasks that a request passes, and the one loop that they share."""
