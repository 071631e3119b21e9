"""Shell, container and HTML templates."""
