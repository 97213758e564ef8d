"""Pages between sessions: one gives those it has at an address, others take what they are about to need."""
