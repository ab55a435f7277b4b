"""The live merge: layers read shadow weights, which are rebuilt when a slot changes."""
