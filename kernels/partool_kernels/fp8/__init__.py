"""Products in 8 bits with one scale per block: numbers to 8 bits and back, and linear maps computed in them."""
