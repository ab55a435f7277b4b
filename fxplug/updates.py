"""What an adapter file holds, layer by layer."""
