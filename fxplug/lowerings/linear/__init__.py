"""Linear layers with low-rank updates as fewer or cheaper products."""
