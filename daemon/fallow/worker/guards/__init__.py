"""What a script must not do, and what it is told then."""
