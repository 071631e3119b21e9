"""Models of the user's own: any module whose forward pass maps tokens to logits (``model.module``)."""
