"""The version of the package; the one place that says it. `pyproject.toml` reads it from here without importing."""

VERSION = "0.3.0"
