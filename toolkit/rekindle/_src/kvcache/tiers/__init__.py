"""The tiers of cached pages below the device: host memory and disk."""
