"""The command line: one small file a command, imported when it is used."""
