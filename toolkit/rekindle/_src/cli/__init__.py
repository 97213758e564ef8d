"""The command line: `rekindle` and `python -m rekindle`."""
