"""A recorded run, so that the page can be examined before there is one."""
