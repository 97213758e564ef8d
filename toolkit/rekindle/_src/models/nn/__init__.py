"""The layers that families are built from."""
