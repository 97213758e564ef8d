"""Several processes that share one model: a leader with a session, and followers that make the same calls."""
