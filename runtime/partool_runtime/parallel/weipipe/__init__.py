"""WeiPipe: weights and gradients travel between ranks, micro-batches stay (Lin et al., PPoPP'25)."""
