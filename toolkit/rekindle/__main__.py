"""`python -m rekindle`."""

from rekindle.cli.main import program

if __name__ == "__main__":
    raise SystemExit(program())
