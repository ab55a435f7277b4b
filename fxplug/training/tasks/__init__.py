"""What a model learns: the loss of a batch, the test, and pictures of how far it is."""
