"""Log-probs of recorded tokens: packing, the vocabulary head tile by tile, layers with a backward pass of their own."""
