"""The command line; hmt.cli.main is where it begins."""
