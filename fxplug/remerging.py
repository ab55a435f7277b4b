"""The remerge lowering: the low-rank update is added to the weight in the graph."""
