"""`python -m rekindle`."""

from rekindle.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
