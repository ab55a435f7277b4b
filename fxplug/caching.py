"""Step caches: a graph cut into a full one and a shallow one that takes cached values."""
