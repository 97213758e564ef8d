"""The operations: their entry points, their records, and the facts that select an implementation."""

from rekindle_kernels.ops import implementations as implementations  # fills the registries
