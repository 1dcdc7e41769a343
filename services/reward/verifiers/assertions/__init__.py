"""Assertions about a program, judged where the program is not."""
