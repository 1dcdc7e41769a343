"""The process that trains: started by the supervisor, told over its standard input, heard on its standard output."""
