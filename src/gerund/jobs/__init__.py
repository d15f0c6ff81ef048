"""Resumable jobs: atomic files, locks, checkpoints, engines for shards, object stores, a disk cache, signals."""
