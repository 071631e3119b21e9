"""Tables of accelerators, hosts, networks and models, and functions that resolve a spec's sections with them."""
