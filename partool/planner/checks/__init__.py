"""Rules that check a spec against its model and machines, and rules that check the layout that the search found."""
