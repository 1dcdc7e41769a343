"""The program that runs inside the isolation and starts the untrusted one; standard library only."""
