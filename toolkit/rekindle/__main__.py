"""`python -m rekindle`."""

from rekindle._src.cli.main import program

if __name__ == "__main__":
    raise SystemExit(program())
