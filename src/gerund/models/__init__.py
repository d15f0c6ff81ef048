"""Models as objects in memory: loading them, pooling their states, adapters, fingerprints."""
