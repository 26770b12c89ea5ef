"""The HTTP surface: routes, their bodies and answers."""
