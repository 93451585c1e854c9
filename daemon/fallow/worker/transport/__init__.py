"""Connections among the members of one generation."""
