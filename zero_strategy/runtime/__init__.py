"""The base of all packages: observers, progress bars, terminal output, files, aligned memory and moving bytes."""
