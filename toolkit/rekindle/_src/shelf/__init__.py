"""Several models in one process: loaded at first use, put to sleep and unloaded by one rule, within one budget."""
