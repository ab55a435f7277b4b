"""What ways of splitting a model will cost, before anything runs."""
