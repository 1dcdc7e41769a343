"""The process that trains: started by the supervisor, commanded over stdin, reporting on stdout."""
