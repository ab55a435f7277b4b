"""Training a rewritten module: data, tasks, plugins and the loop."""
