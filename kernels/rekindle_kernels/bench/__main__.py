"""`python -m rekindle_kernels.bench` measures paged attention on the device at hand."""

from __future__ import annotations

from rekindle_kernels.bench.paged_attention import main

if __name__ == "__main__":
    main()
