"""Rules about a spec with its model and machines, and about the layout that was found."""
