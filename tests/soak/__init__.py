"""Half an hour of everything that goes wrong, at a steady rate: by command at full length, in the suite for a minute."""
