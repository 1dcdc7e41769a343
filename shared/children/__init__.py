"""The one way to own a child process: how it is started, asked, ended, and how its death is explained.

``spawning`` starts a program; ``calls`` asks one that answers by ``serving``; ``blocking`` does so on threads.
"""
