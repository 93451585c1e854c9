"""Durable state of a head: a private Redis server (`server`) or the site's, and its client (`client`)."""
