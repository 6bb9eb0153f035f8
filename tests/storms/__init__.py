"""Workers killed at random, servers restarted under load: by command at full size, in the suite at a smaller one."""
