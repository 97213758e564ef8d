"""Tools of Model Context Protocol servers for chats: connected, shown to the user, and called within bounds.

Everything that a server sends is untrusted text: `limits.py` has the bounds on it.
"""
