"""The device side of a session: dispatching programs and reading their results."""
