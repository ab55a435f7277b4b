"""What passes make of weights, as weights: merge and unmerge, at each call, or live."""
