"""Drafting: the drafters that propose tokens ahead, how likely each proposal is, and how many a step computes."""
