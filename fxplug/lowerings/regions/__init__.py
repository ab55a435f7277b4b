"""Regions of a graph as submodules again: for compiling, checkpointing and sharding."""
