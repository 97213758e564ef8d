"""The public session object and what it is composed of."""
