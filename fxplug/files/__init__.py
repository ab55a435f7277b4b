"""Files from strangers read within bounds, and files of our own written whole."""
