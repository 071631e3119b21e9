"""All uses of private names of torch, each with the reason and the missing public alternative."""
