"""Resumable jobs: folders of finished parts, their manifests and locks, shards of work, files written whole."""
