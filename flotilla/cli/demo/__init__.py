"""A recorded run, so that the page can be looked at before there is one."""
