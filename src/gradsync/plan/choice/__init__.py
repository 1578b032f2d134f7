"""Which split to take, and why not another one."""
