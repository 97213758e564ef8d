"""Every bound of the project: what it counts, what its dearest unit costs, and what it promises. See records.py."""
