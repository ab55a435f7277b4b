"""Finding a plan: operations tried on parts, from where tokens are born to where they end."""
