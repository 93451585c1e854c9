"""The same training under other elastic runtimes, started as their documentation says."""
