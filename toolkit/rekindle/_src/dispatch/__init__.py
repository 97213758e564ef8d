"""The loop of a session: the front and the engine, their tasks, and the threads that these run in."""
