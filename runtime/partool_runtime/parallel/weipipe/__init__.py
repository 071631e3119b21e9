"""WeiPipe: weights and gradients are sent around a ring of ranks, micro-batches stay (Lin et al., PPoPP'25)."""
