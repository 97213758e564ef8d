"""The HTTP server: an ASGI app over open sessions, and the thread that serves it."""
