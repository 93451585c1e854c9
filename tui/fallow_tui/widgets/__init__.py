"""Widgets of the screens. Each widget draws one part of a `View`."""
