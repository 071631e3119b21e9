"""WeiPipe: ranks send weights and gradients around a ring and keep their micro-batches (Lin et al., PPoPP'25)."""
