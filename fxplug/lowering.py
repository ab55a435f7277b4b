"""The lowerings together: merge, pack, fuse, outline."""
