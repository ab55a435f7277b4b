"""What blocks in a graph make of weights."""
