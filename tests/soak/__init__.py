"""Everything at once for a long time: random requests, cancellations, saves, faults of the disk, other processes."""
