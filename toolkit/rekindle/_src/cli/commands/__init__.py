"""One module for each subcommand: its options, their checks, and `run`.

`NEEDS` names what `run` imports that takes long, mostly JAX: `main` shows the wait for it.
"""
