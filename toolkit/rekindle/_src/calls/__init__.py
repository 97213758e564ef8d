"""The caller's side of a session or a fleet: prompts, the calls that run them, chats and their tools, rows, vectors."""
