"""One module per operation: its entry point, its records, and the facts that select an implementation."""

from rekindle_kernels.ops import implementations as implementations  # fills the registries
