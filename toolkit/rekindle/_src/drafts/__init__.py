"""Drafters: each of them is one file, which has all of it, and `plan` chooses those of a session.

To add one, write its `DraftKind` (`kind`), and name it in `plan`.
"""
