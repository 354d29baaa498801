"""gpupoolctl: the command line. Heavy modules are loaded by the commands that need them."""
