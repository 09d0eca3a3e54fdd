"""Where segments live outside the process: the port, the object format and the stores behind it."""
