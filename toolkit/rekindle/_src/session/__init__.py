"""The public session object and its parts."""
