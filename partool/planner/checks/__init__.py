"""Rules that check a spec with its model and machines, and the layout that was found."""
