"""Names of layers in common files, told from the graph."""
