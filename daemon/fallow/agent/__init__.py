"""The node agent: starts and watches the workers of one node of an allocation."""
