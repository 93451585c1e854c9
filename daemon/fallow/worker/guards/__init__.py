"""What a script must not do: found early, refused with what to write instead."""
