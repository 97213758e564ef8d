"""One module per operation: its entry point, its records, and the facts by which an implementation is chosen."""

from rekindle_kernels.ops import implementations as implementations  # fills the registries
