"""Tests of the project itself: its layers, exports, imports, tutorials."""
