"""The stores in which other tools keep models on this machine: their names, and the files that lie under them."""
