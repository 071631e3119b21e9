"""Sections and rules of the targets, one package per target that has a section of its own."""
