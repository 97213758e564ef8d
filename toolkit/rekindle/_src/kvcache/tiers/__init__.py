"""Where cached pages live below the device: host memory and disk."""
