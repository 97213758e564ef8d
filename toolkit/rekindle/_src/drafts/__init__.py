"""Drafters. Each is one file with all of its parts; `plan` chooses the drafters of a session.

To add one, write its `DraftKind` (`kind`), and name it in `plan`.
"""
