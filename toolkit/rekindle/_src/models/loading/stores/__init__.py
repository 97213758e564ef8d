"""The stores that other tools keep models in on this machine: their names and files."""
