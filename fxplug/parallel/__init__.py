"""Many devices: a plan found by trying operations on parts, written into the graph as collectives over a device mesh."""
