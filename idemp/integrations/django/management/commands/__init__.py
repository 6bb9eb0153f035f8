"""The command `manage.py idemp`."""
