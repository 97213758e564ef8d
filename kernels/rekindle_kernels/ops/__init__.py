"""One module per operation: its entry point, its records, and the facts by which an implementation is chosen."""
