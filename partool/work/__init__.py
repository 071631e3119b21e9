"""What is to be done, on which machines and by which code base: the input of every price."""
