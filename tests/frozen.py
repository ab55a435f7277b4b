"""Imported last by the server that processes are forked from: what it holds is never walked, and so not copied, in a child."""

import gc

gc.set_threshold(20_000, 20, 20)
gc.freeze()
