"""From gradients to sums: buckets, the arithmetic of sums, buffers."""
