"""Detects mistakes of a script early, and raises errors that say what to write instead."""
