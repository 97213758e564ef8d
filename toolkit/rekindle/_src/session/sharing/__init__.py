"""Pages between sessions: a session shares its pages at an address, and others take those they are about to need."""
