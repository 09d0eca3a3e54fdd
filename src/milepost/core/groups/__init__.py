"""Group managers: what one kind of layer can serve of a path. They do not know each other."""
