"""Rules that check a spec against its model and machines, before the search."""
