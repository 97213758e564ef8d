"""The prefix cache: page pool, radix tree, and the tiers that pages move through."""
