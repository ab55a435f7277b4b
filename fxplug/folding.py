"""The merge lowering: passes folded into a copy of the weights, and back."""
