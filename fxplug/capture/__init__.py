"""The tracer: one run of a model's own `forward` written down as a graph, and process and model left as they were."""
