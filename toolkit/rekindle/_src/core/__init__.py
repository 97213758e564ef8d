"""The foundation of all parts: configuration, records, contracts, memory, atomic writes and progress."""
