"""A page that shows a rewritten model: what it is, what changed where, what it costs, and how it was checked and trained."""
