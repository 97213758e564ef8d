"""Tests of this folder leave trio to CI."""

from helpers.thorough import anyio_backend  # noqa: F401  the fixture
