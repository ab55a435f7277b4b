"""What a rewrite works on: the traced module, its functions, regions, subgraphs and text."""
