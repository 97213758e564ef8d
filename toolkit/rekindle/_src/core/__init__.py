"""The foundation of all parts: configuration, records, contracts, memory, atomic writes, progress and HTML."""
