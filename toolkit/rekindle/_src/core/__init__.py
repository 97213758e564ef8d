"""What every part shares: configuration, records, contracts, memory, atomic writes, progress and HTML."""
