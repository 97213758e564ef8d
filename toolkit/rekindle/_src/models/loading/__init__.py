"""From a checkpoint folder to arrays on the device: reading, quantising, memory mapping, fingerprints."""
