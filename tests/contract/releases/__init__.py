"""What services and the gateway tell each other, by release; run the package to write that of this one."""
