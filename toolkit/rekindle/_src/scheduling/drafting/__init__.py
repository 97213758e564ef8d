"""Drafting: the seam of drafters on the host, how likely each proposal is, and how many drafts a step computes."""
