"""Other projects' test scripts and trainings, run as a user would run them; see `__main__`."""
