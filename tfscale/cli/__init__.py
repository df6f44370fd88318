"""The commands `demo`, `lint` and `profile`, each a module with `add_arguments` and `run`."""
