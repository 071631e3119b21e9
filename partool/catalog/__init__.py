"""Figures of accelerators, hosts, networks and models, and the decisions that follow from them."""
