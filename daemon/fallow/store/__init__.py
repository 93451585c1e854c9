"""Durable state: a private Redis (`server`) or a site's, and the one client of it (`client`)."""
