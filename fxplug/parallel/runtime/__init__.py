"""What a parallel graph calls: meshes, collectives, attention over split tokens, halos, checks of the other processes."""
