"""How much of which slot each sample takes: the network that passes with slots bring."""
